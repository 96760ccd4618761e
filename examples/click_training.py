"""Parts that the examples on click logs share: options, step, training, evaluation, report, and processes that meet.

A model is an `nnx.Module` that is called with the integers of a batch, float32 [batch, 13], and the embeddings of its
categories by name, and returns a logit for each sample. Not here: models, tables, files (`train_dlrm.py`,
`train_dcnv2.py`), and the loop over steps (`training.py`).
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import training
from flax import nnx
from jax.experimental import multihost_utils

import jaxsok
from jaxsok import data

FREE = {
    "cache_dir", "checkpoint_dir", "checkpoint_every", "convert", "distributed", "heartbeat_timeout_s", "lookahead",
    "num_devices", "num_processes", "num_threads", "placement", "plot", "process_id", "replicate_rows", "show_progress",
    "steps_per_call", "wire",
}  # fmt: skip
"""Fields that may change when a run goes on."""

_MOST_WAIT_MS = 24 * 3600 * 1000  # while the first process writes a log

AnyConfig = TypeVar("AnyConfig", bound="Config")


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields that the examples share; the command line has an option for each."""

    num_rows: int = 600_000
    """Rows of the synthetic log."""
    cache_dir: pathlib.Path | None = None
    """Where the synthetic log and converted logs are kept; None: the user's cache directory."""
    max_rows: int | None = None
    """Read at most so many rows; None: all."""
    held_out_rows: int | None = None
    """Rows at the end of the log that are not trained on; None: a tenth, at most 100,000."""
    epochs: int = 1
    """How often the log is gone through."""
    shuffle: bool = False
    """Whether each epoch has another order; otherwise that of the log."""
    num_streams: int | None = None
    """Parts of the log that are read at once; None: with `shuffle` one for each process, else one. A run that goes on
    with other processes needs the same number."""
    num_threads: int = 4
    """Threads of each process that read the log."""
    batch_size: int = 2048
    """Rows in a step, on all devices together."""
    dim: int = 16
    """Numbers in a row of a table, and width of the bottom MLP's result."""
    optimizer: str = "adagrad"
    """Optimizer of the tables, by name."""
    learning_rate: float = 0.04
    """Learning rate of the tables."""
    dense_learning_rate: float = 2e-3
    """Learning rate of the dense part."""
    bottom: tuple[int, ...] = (64, 32)
    """Hidden widths of the MLP over the integers."""
    top: tuple[int, ...] = (128, 64)
    """Hidden widths of the MLP over the interactions."""
    seed: int = 0
    """Seed of the tables, of the dense part and of the synthetic log."""
    plot: pathlib.Path | None = None
    """File for the plot; None: no plot."""
    checkpoint_dir: pathlib.Path | None = None
    """Where Ctrl-C leaves the run, so that the same command goes on; removed at the end. None: nowhere."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: only on Ctrl-C."""
    show_progress: bool = True
    """Whether to show a progress bar."""
    num_devices: int | None = None
    """How many devices to use; None: all. In several processes always all."""
    placement: str = "auto"
    """Where tables live, if there are several devices: "auto" asks the planner; "sharded" spreads all of them."""
    device_rows: float | None = None
    """Share of the rows that devices have, all others being in host memory alone; None: all rows are on the devices."""
    lookahead: int = 0
    """1: each step looks the next batch up too, with the same results (docs/lookups_ahead.md)."""
    staleness: int = 0
    """Updates that the rows of a batch may miss."""
    steps_per_call: int = 1
    """Steps of one call (docs/compiled_steps.md)."""
    distributed: bool = False
    """Whether a launcher started several of this process."""
    num_processes: int | None = None
    """How many, where the launcher does not say; None: $NUM_PROCESSES."""
    process_id: int | None = None
    """Which of them this is, where the launcher does not say; None: $PROCESS_ID."""
    heartbeat_timeout_s: int = 100
    """After so many seconds without a word from a process, or of waiting for one at the end, all of them end."""

    @property
    def memory(self) -> jaxsok.HostMemory | None:
        """Where rows of the tables lie."""
        return None if self.device_rows is None else jaxsok.HostMemory(self.device_rows)

    def for_process(self: AnyConfig) -> AnyConfig:
        """Returns the configuration of this process: only the first one shows progress, and streams are counted."""
        num_streams = self.num_streams or (jax.process_count() if self.shuffle else 1)
        shows = self.show_progress and jax.process_index() == 0
        return dataclasses.replace(self, show_progress=shows, num_streams=num_streams)


@dataclasses.dataclass(frozen=True)
class Result(training.Curves):
    """The result of a training run."""

    auc: float
    """AUC on the held-out rows; NaN if they are of one class."""
    num_held_out: int
    """How many held-out rows there were."""
    missing_keys: float
    """Share of the held-out rows' keys that training never saw."""
    is_interrupted: bool
    """Whether Ctrl-C ended the training."""


# -------------------------------------------------------------------------------------------------------------- model


def make_mlp(widths: Sequence[int], rngs: nnx.Rngs, **options: Any) -> nnx.List:
    """Makes the layers of an MLP; `options` are those of `nnx.Linear`."""
    return nnx.List([nnx.Linear(before, after, rngs=rngs, **options) for before, after in itertools.pairwise(widths)])


def apply_mlp(mlp: Iterable[nnx.Linear], x: jax.Array) -> jax.Array:
    """Applies the layers, with a rectifier between two of them."""
    for i, linear in enumerate(mlp):
        x = linear(nnx.relu(x) if i else x)
    return x


# ----------------------------------------------------------------------------------------------------------- training


def log_loss(params: nnx.State, embeddings: dict[str, jax.Array], batch: Any, graphdef: nnx.GraphDef) -> jax.Array:
    """Gives the mean log loss of a batch: a scalar to differentiate by parameters and embeddings."""
    logits = nnx.merge(graphdef, params)(batch["integers"], embeddings)
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


def make_step(collection: jaxsok.Collection, graphdef: nnx.GraphDef, tx: optax.GradientTransformation) -> Callable:
    """Makes a step: look up, differentiate, update tables and dense part.

    On many devices nothing here changes: the loss is a mean over the whole batch, so gradients are those of one device.
    """

    def step(state, params, opt_state, batch, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        loss, (params_gradient, embeddings_gradient) = jax.value_and_grad(log_loss, (0, 1))(
            params, embeddings, batch, graphdef
        )
        state, stats = collection.update(state, plan, embeddings_gradient)
        updates, opt_state = tx.update(params_gradient, opt_state, params)
        return state, optax.apply_updates(params, updates), opt_state, loss, stats

    return step


def train(
    config: Config,
    source: data.Source,
    collection: jaxsok.Collection,
    model: nnx.Module,
    tx: optax.GradientTransformation,
    *,
    init: Callable[[], jaxsok.State] | None = None,
    grows: bool = True,
) -> Result:
    """Trains on the rows of a log but the last ones, and evaluates on those.

    Args:
      config: how to train, of this process.
      source: the log: "integers", "label" and the features of the collection.
      collection: the declared tables.
      model: the dense part.
      tx: its optimizer.
      init: makes the first state of the tables; None: `collection.init`.
      grows: whether tables get more rows as keys come.

    Returns:
      The result; if Ctrl-C came, of the part that was trained.

    Raises:
      ValueError: too few rows for one step; an interrupted run has other settings.
    """
    num_rows = min(len(source), sys.maxsize if config.max_rows is None else config.max_rows)
    held_out_rows = min(num_rows // 10, 100_000) if config.held_out_rows is None else config.held_out_rows
    num_trained = (num_rows - held_out_rows) // config.batch_size * config.batch_size
    if num_trained <= 0:
        raise ValueError(
            f"train: {num_rows} rows are too few for a step of {config.batch_size} rows and {held_out_rows} "
            "held-out rows; pass a smaller batch_size or held_out_rows."
        )
    seed = config.seed if config.shuffle else None
    batches = data.Batches(
        source, config.batch_size, seed=seed, num_streams=config.num_streams, stop=num_trained
    ).repeat(config.epochs)
    held_out = None
    if num_trained < num_rows:
        held_out = data.Batches(source, config.batch_size, start=num_trained, stop=num_rows, drop_remainder=False)
    graphdef, params = nnx.split(model)
    dense = collection.shards.replicate((params, tx.init(params)))
    step = make_step(collection, graphdef, tx)
    checkpoints = training.Checkpoints(
        config.checkpoint_dir, config.checkpoint_every, training.settings_of(config, FREE)
    )
    fitted = training.fit(
        collection,
        step,
        init or functools.partial(collection.init, seed=config.seed),
        dense,
        data.iterate(batches, num_threads=config.num_threads),
        training.History(config.epochs * num_trained, config.show_progress),
        checkpoints,
        num_samples=lambda _: config.batch_size,
        grows=grows,
        lookahead=config.lookahead,
        staleness=config.staleness,
        steps_per_call=config.steps_per_call,
    )
    label, probabilities, missing_keys = evaluate(
        collection, fitted.tables, graphdef, fitted.dense[0], held_out, config.batch_size
    )
    if not fitted.is_interrupted:
        checkpoints.remove()
    return Result(
        auc=training.auc_of(label, probabilities),
        held_out_loss=training.log_loss_of(label, probabilities),
        num_held_out=len(label),
        missing_keys=missing_keys,
        num_rows=collection.num_rows(fitted.tables),
        is_interrupted=fitted.is_interrupted,
        **fitted.summary,
    )


def evaluate(
    collection: jaxsok.Collection,
    state: jaxsok.State,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    held_out: Iterable[Any] | None,
    batch_size: int,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Gives label and click probability of each held-out row; the tables do not change.

    Args:
      collection: the tables' declaration.
      state: their state.
      graphdef: definition of the dense model.
      params: its parameters.
      held_out: the rows; the last batch may be smaller than the others. None: there are none.
      batch_size: rows in the others.

    Returns:
      float32 [rows] twice, and the share of the keys (padding not counted) that have no row.
    """

    @jax.jit
    def predict(state, params, batch):
        embeddings, stats = collection.find(state, batch.features)
        return nnx.sigmoid(nnx.merge(graphdef, params)(batch["integers"], embeddings)), stats

    labels, probabilities, num_found, num_missing = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)], 0, 0
    for raw in () if held_out is None else data.iterate(held_out):
        batch = collection.batch(raw, pad_to=batch_size // jax.process_count())  # one program serves all
        result, stats = predict(state, params, batch)
        result, label, is_real = multihost_utils.process_allgather((result, batch["label"], batch.mask), tiled=True)
        labels.append(label[is_real])
        probabilities.append(result[is_real])
        num_found += int(np.asarray(stats.num_found).sum())
        num_missing += int(np.asarray(stats.num_missing).sum())
    missing_keys = num_missing / max(num_found + num_missing, 1)
    return np.concatenate(labels), np.concatenate(probabilities), missing_keys


def format_result(result: Result) -> str:
    """Says in words what a run did."""
    keys = [f"{name} {count:,}" for name, count in result.num_rows.items()]
    lines = [", ".join(keys[i : i + 7]) for i in range(0, len(keys), 7)]
    return "\n".join(
        [
            "Interrupted; what was done:" if result.is_interrupted else "Done.",
            f"  trained on       {result.num_samples:,} rows, {len(result.losses):,} steps",
            f"  held-out AUC     {result.auc:.4f}  (log loss {result.held_out_loss:.4f}, {result.num_held_out:,} rows, "
            f"{result.missing_keys:.1%} of their keys new)",
            f"  samples/s        {result.samples_per_s:,.0f}  "
            f"({result.steady_samples_per_s:,.0f} without compilation and growth)",
            f"  keys             {sum(result.num_rows.values()):,} in {len(result.num_rows)} tables:",
            *(f"                   {line}" for line in lines),
        ]
    )


# ---------------------------------------------------------------------------------------------------------- processes


def once(config: Config, name: str, write: Callable[[], pathlib.Path]) -> pathlib.Path:
    """Has the first process write a file that all of them read; where they cannot see it, each writes its own."""
    # Barriers of the coordinator: processes that wait for a collective on CPUs give up after half a minute.
    meet = functools.partial(ocp.multihost.get_barrier_sync_fn(), timeout_ms=_MOST_WAIT_MS)
    if jax.process_index():
        meet(key=f"{name} of the first")
    path = write()
    if not jax.process_index():
        meet(key=f"{name} of the first")
    meet(key=f"{name} of all")
    if config.show_progress:
        print(f"Reading {path}")
    return path


def join_processes(config: Config) -> None:
    """Meets the other processes; before anything else, since JAX looks for devices once.

    SLURM and Open MPI give JAX all it needs. Elsewhere it takes the address of process 0 from
    $JAX_COORDINATOR_ADDRESS, and the numbers from here.
    """

    def number(given: int | None, variable: str) -> int | None:
        return int(os.environ[variable]) if given is None and variable in os.environ else given

    jax.distributed.initialize(
        num_processes=number(config.num_processes, "NUM_PROCESSES"),
        process_id=number(config.process_id, "PROCESS_ID"),
        heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        shutdown_timeout_seconds=config.heartbeat_timeout_s,
    )


# ------------------------------------------------------------------------------------------------------- command line


def add_options(parser: argparse.ArgumentParser, default: Config, optimizers: Iterable[str]) -> None:
    """Declares the options of the shared fields; the defaults are those of a configuration."""
    add = parser.add_argument
    add("--num-rows", type=int, default=default.num_rows, help="rows of the synthetic log")
    add("--cache-dir", type=pathlib.Path,
        help="where synthetic and converted logs are kept (default: ~/.cache/jaxsok)")  # fmt: skip
    add("--epochs", type=int, default=default.epochs, help="how often the log is gone through")
    add("--shuffle", action="store_true", help="go through the log in another order each time")
    add("--num-streams", type=int, help="parts of the log that are read at once (default: one for each process, or "
        "without --shuffle one); give the number of before when a run goes on with other processes")  # fmt: skip
    add("--num-threads", type=int, default=default.num_threads, help="threads that read the log")
    add("--max-rows", type=int, help="read at most so many rows (default: all)")
    add("--held-out-rows", type=int,
        help="rows at the end of the log to evaluate on (default: a tenth, at most 100,000)")  # fmt: skip
    add("--batch-size", type=int, default=default.batch_size, help="rows in a step, on all devices together")
    add("--dim", type=int, default=default.dim, help="dim of the tables")
    add("--optimizer", choices=sorted(optimizers), default=default.optimizer, help="optimizer of the tables")
    add("--learning-rate", type=float, default=default.learning_rate, help="learning rate of the tables")
    add("--device-rows", type=float, metavar="SHARE",
        help="keep the tables in host memory, with a cache of this share of their rows on the devices")  # fmt: skip
    add("--dense-learning-rate", type=float, default=default.dense_learning_rate,
        help="learning rate of the dense part")  # fmt: skip
    add("--bottom", nargs="*", type=int, default=default.bottom, metavar="WIDTH",
        help="hidden widths of the MLP over the integers")  # fmt: skip
    add("--top", nargs="*", type=int, default=default.top, metavar="WIDTH",
        help="hidden widths of the MLP over the interactions")  # fmt: skip
    add("--seed", type=int, default=default.seed, help="seed of tables, dense part and synthetic log")
    add("--plot", type=pathlib.Path, default=default.plot, metavar="FILE", help="file for the plot")
    add("--checkpoint-dir", type=pathlib.Path, default=default.checkpoint_dir, metavar="FOLDER",
        help="where Ctrl-C leaves the run; the same command goes on from there")  # fmt: skip
    add("--checkpoint-every", type=int, metavar="STEPS", help="save every so many steps too")
    add("--no-progress", dest="show_progress", action="store_false", default=argparse.SUPPRESS,
        help="show no progress bar")  # fmt: skip
    add("--num-devices", type=int, help="how many devices to use (default: all)")
    add("--placement", choices=("auto", "sharded"), default=default.placement,
        help="where tables live: as the planner says, or spread over all devices")  # fmt: skip
    add("--lookahead", type=int, default=default.lookahead, choices=(0, 1),
        help="batches that are looked up ahead, with the same results")  # fmt: skip
    add("--staleness", type=int, default=default.staleness, help="updates that the rows of a batch may miss")
    add("--steps-per-call", type=int, default=default.steps_per_call,
        help="steps of one call, for steps of a few milliseconds and less")  # fmt: skip
    add("--distributed", action="store_true", help="one of several processes: under SLURM, Open MPI, or with "
        "JAX_COORDINATOR_ADDRESS set and the two options that follow")  # fmt: skip
    add("--num-processes", type=int, help="how many processes, if no launcher says (default: $NUM_PROCESSES)")
    add("--process-id", type=int, help="which one this is, from 0 (default: $PROCESS_ID)")
    add("--heartbeat-timeout-s", type=int, default=default.heartbeat_timeout_s,
        help="seconds of silence of one process after which the others end")  # fmt: skip


def parse(parser: argparse.ArgumentParser, make: type[AnyConfig], arguments: Sequence[str] | None) -> AnyConfig:
    """Reads the command line into a configuration."""
    values = vars(parser.parse_args(arguments))
    return make(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def run(name: str, model_name: str, config: AnyConfig, train: Callable[[AnyConfig], Result]) -> int:
    """Trains, and prints and draws the result; in several processes the first one does.

    Returns:
      The exit code: 0; 1 after an error; or 130 (as shells expect of SIGINT) if Ctrl-C ended the training.
    """
    if config.distributed:
        join_processes(config)
    is_first = jax.process_index() == 0
    if is_first:
        device, number = jax.devices()[0], len(jax.devices()[: config.num_devices])
        of_many = f"{number} x " if number > 1 else ""
        in_many = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        print(f"Device: {of_many}{device.platform} ({device.device_kind}){in_many}")
    try:
        training.check_options(config)
        result = train(config)
    except KeyboardInterrupt:
        print("Interrupted before there was anything to report.", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    if is_first:
        print(format_result(result))
        if config.plot is not None:
            training.save_plot(result, f"{model_name} on dynamic tables: held-out AUC {result.auc:.4f}", config.plot)
            print(f"  plot             {config.plot}")
    return 130 if result.is_interrupted else 0

"""Trains a DLRM on dynamic tables from a click log in Criteo's format.

Each of the 26 categories has a table that begins small and gets a row when a key is first seen; nobody counts the keys
beforehand. Without `--data` the example writes (once) and reads a synthetic log of the same format, so that it runs
anywhere, on CPU or GPU:

    python examples/train_dlrm.py
    python examples/train_dlrm.py --data train.txt
    python examples/train_dlrm.py --data day_0.gz day_1.gz --dim 64 --batch-size 65536 --bottom 512 256 --top 512 256

It uses all devices of the machine: the tables and each batch are split over them, the MLPs are on each. With
`--distributed` it uses those of all processes that a launcher started; SLURM and Open MPI tell each process which one
it is, otherwise three environment variables do (docs/many_devices.md):

    srun python examples/train_dlrm.py --distributed --data train.txt
    JAX_COORDINATOR_ADDRESS=host:1234 NUM_PROCESSES=2 PROCESS_ID=0 python examples/train_dlrm.py --distributed

It ends with the AUC on held-out rows, the keys of each table, samples per second, and a plot of loss and table growth.
Ctrl-C stops after the current step, saves, and ends in the same way with what was done (exit code 130); the same
command then goes on at the next batch. A second Ctrl-C aborts.

The model: M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import synthetic_log
import training
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import jaxsok
from jaxsok import data
from jaxsok.data import criteo

OPTIMIZERS = {
    # From 0: gradients of a mean over a batch are small, and Optax's 0.1 would hold rows back for thousands of steps.
    "adagrad": functools.partial(jaxsok.optim.adagrad, initial_accumulator_value=0.0),
    "rowwise_adagrad": jaxsok.optim.rowwise_adagrad,
}


FREE = {
    "cache_dir", "checkpoint_dir", "checkpoint_every", "convert", "distributed", "heartbeat_timeout_s", "num_devices",
    "num_processes", "num_threads", "placement", "plot", "process_id", "show_progress",
}  # fmt: skip
"""Fields that may change when a run goes on."""

_MOST_WAIT_MS = 24 * 3600 * 1000  # for the conversion of a log


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train, on what; the command line has an option for each field."""

    data: tuple[pathlib.Path, ...] = ()
    """Logs in Criteo's format, read in order, or one folder of binary files; none: a synthetic log."""
    convert: bool = False
    """Whether text becomes binary files first, which are read many times faster. Text with gzip always does."""
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
    capacity: int = 4096
    """Rows that each table begins with: small, so that growth is seen."""
    optimizer: str = "adagrad"
    """Optimizer of the tables, a name in OPTIMIZERS."""
    learning_rate: float = 0.04
    """Learning rate of the tables."""
    dense_learning_rate: float = 2e-3
    """Learning rate of the MLPs (Adam)."""
    bottom: tuple[int, ...] = (64, 32)
    """Hidden widths of the MLP over the integers (the DLRM paper: 512, 256)."""
    top: tuple[int, ...] = (128, 64)
    """Hidden widths of the MLP over the interactions (the DLRM paper: 512, 256)."""
    seed: int = 0
    """Seed of the tables, of the MLPs and of the synthetic log."""
    plot: pathlib.Path | None = pathlib.Path("train_dlrm.png")
    """File for the plot; None: no plot."""
    checkpoint_dir: pathlib.Path | None = pathlib.Path("train_dlrm.checkpoint")
    """Where Ctrl-C leaves the run, so that the same command goes on; removed at the end. None: nowhere."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: only on Ctrl-C."""
    show_progress: bool = True
    """Whether to show a progress bar."""
    num_devices: int | None = None
    """How many devices to use; None: all. In several processes always all."""
    placement: str = "auto"
    """Where tables live, if there are several devices: "auto" asks the planner; "sharded" spreads all of them."""
    distributed: bool = False
    """Whether a launcher started several of this process."""
    num_processes: int | None = None
    """How many, where the launcher does not say; None: $NUM_PROCESSES."""
    process_id: int | None = None
    """Which of them this is, where the launcher does not say; None: $PROCESS_ID."""
    heartbeat_timeout_s: int = 100
    """After so many seconds without a word from a process, or of waiting for one at the end, all of them end."""


@dataclasses.dataclass(frozen=True)
class Result(training.Curves):
    """What a training run did."""

    auc: float
    """AUC on the held-out rows; NaN if they are of one class."""
    num_held_out: int
    """How many held-out rows there were."""
    missing_keys: float
    """Share of the held-out rows' keys that training never saw."""
    num_rows: dict[str, int]
    """Rows (keys) of each table at the end."""
    is_interrupted: bool
    """Whether Ctrl-C ended the training."""


# -------------------------------------------------------------------------------------------------------------- model


class DLRM(nnx.Module):
    """Bottom MLP over the integers, dot products of all pairs of vectors, top MLP to one logit."""

    def __init__(self, dim: int, bottom: Sequence[int], top: Sequence[int], rngs: nnx.Rngs):
        """Makes the dense parameters; the tables are not part of the model.

        Args:
          dim: dim of the tables.
          bottom: hidden widths of the MLP over the integers.
          top: hidden widths of the MLP over the interactions.
          rngs: where the initial parameters come from.
        """
        num_vectors = criteo.NUM_CATEGORIES + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.bottom = _mlp([criteo.NUM_INTEGERS, *bottom, dim], rngs)
        self.top = _mlp([dim + num_pairs, *top, 1], rngs)

    def __call__(self, integers: jax.Array, embeddings: dict[str, jax.Array]) -> jax.Array:
        """Gives the logit of each sample.

        Args:
          integers: float32 [batch, 13].
          embeddings: float32 [batch, dim] for each category.

        Returns:
          float32 [batch].
        """
        dense = nnx.relu(_apply(self.bottom, integers))
        vectors = jnp.stack([dense, *(embeddings[name] for name in criteo.CATEGORY_NAMES)], axis=1)
        dots = jnp.einsum("bid,bjd->bij", vectors, vectors)
        left, right = np.tril_indices(vectors.shape[1], k=-1)
        return _apply(self.top, jnp.concatenate([dense, dots[:, left, right]], axis=1))[:, 0]


def _mlp(widths: Sequence[int], rngs: nnx.Rngs) -> nnx.List:
    return nnx.List([nnx.Linear(before, after, rngs=rngs) for before, after in itertools.pairwise(widths)])


def _apply(mlp: Iterable[nnx.Linear], x: jax.Array) -> jax.Array:
    for i, linear in enumerate(mlp):
        x = linear(nnx.relu(x) if i else x)
    return x


def make_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes the dense model of a configuration, split into its definition and its parameters."""
    return nnx.split(DLRM(config.dim, config.bottom, config.top, nnx.Rngs(config.seed)))


def log_loss(params: nnx.State, embeddings: dict[str, jax.Array], batch, graphdef: nnx.GraphDef) -> jax.Array:
    """Gives the mean log loss of a batch: a scalar to differentiate by parameters and embeddings."""
    logits = nnx.merge(graphdef, params)(batch["integers"], embeddings)
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


# ------------------------------------------------------------------------------------------------------------- tables


def make_mesh(config: Config) -> jax.sharding.Mesh | None:
    """Lines up the devices along one axis; None for one device, which needs no mesh.

    Raises:
      ValueError: there are fewer, or a batch cannot be shared out evenly.
    """
    devices = jax.devices()[: None if jax.process_count() > 1 else config.num_devices]
    if config.batch_size % len(devices) or len(devices) < (config.num_devices or 1):
        raise ValueError(
            f"train: {len(devices)} devices cannot share batches of {config.batch_size} rows evenly, or are fewer than "
            f"num_devices={config.num_devices}; pass another batch_size or num_devices."
        )
    if len(devices) == 1:
        return None
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def make_collection(config: Config, mesh: jax.sharding.Mesh | None = None) -> jaxsok.Collection:
    """Declares a table and a feature for each category; with a mesh they are split over its devices."""
    optimizer = OPTIMIZERS[config.optimizer](config.learning_rate)
    tables = [jaxsok.TableSpec(name, config.dim, optimizer, capacity=config.capacity) for name in criteo.CATEGORY_NAMES]
    features = [jaxsok.FeatureSpec(name, table=name) for name in criteo.CATEGORY_NAMES]
    if mesh is None:
        return jaxsok.Collection(tables, features)
    if config.placement == "auto":
        proposal = jaxsok.propose(tables, features, num_shards=mesh.size, keys_per_step=config.batch_size // mesh.size)
        tables = proposal.tables
        if config.show_progress and jax.process_index() == 0:
            print(proposal)
    return jaxsok.Collection(tables, features, mesh=mesh, axis="data")


def make_step(collection: jaxsok.Collection, graphdef: nnx.GraphDef, tx: optax.GradientTransformation) -> Callable:
    """Compiles a step: look up, differentiate, update tables and MLPs. State and parameters are donated.

    On many devices nothing here changes: the loss is a mean over the whole batch, so gradients are those of one device.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(state, params, opt_state, batch, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        loss, (params_gradient, embeddings_gradient) = jax.value_and_grad(log_loss, (0, 1))(
            params, embeddings, batch, graphdef
        )
        state, stats = collection.update(state, plan, embeddings_gradient)
        updates, opt_state = tx.update(params_gradient, opt_state, params)
        return state, optax.apply_updates(params, updates), opt_state, loss, stats

    return step


# ----------------------------------------------------------------------------------------------------------- training


def train(config: Config) -> Result:
    """Trains on the rows of a log but the last ones, and evaluates on those.

    Args:
      config: what to train, on what.

    Returns:
      The result; if Ctrl-C came, of the part that was trained.

    Raises:
      ValueError: the log has no labels, or too few rows for one step; an interrupted run has other settings.
      criteo.LogFormatError: a row of the log is not in Criteo's format.
    """
    is_first = jax.process_index() == 0  # it alone shows what goes on
    num_streams = config.num_streams or (jax.process_count() if config.shuffle else 1)
    config = dataclasses.replace(config, show_progress=config.show_progress and is_first, num_streams=num_streams)
    mesh = make_mesh(config)
    source = open_log(config)
    num_rows = min(len(source), config.max_rows or sys.maxsize)
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
    iterator = data.iterate(batches, num_threads=config.num_threads)

    collection = make_collection(config, mesh)
    graphdef, params = make_model(config)
    tx = optax.adam(config.dense_learning_rate)
    params, opt_state = collection.shards.replicate((params, tx.init(params)))
    step = collection.ahead(make_step(collection, graphdef, tx))  # growth finds its program compiled
    checkpoints = training.Checkpoints(
        config.checkpoint_dir, config.checkpoint_every, training.settings_of(config, FREE)
    )
    history = training.History(config.epochs * num_trained, config.show_progress)
    if (saved := checkpoints.restore(collection, (params, opt_state))) is None:
        state = collection.init(seed=config.seed)
    else:
        state, (params, opt_state) = saved.tables, saved.dense
        iterator.set_state(saved.data)
        history.restore(saved.curves)

    with history, training.CtrlC() as ctrl_c:
        pipeline = collection.pipeline(iterator)
        for batch, plan in pipeline:
            state = collection.grow(state, batch)  # makes room for its keys; almost always returns at once
            state, params, opt_state, loss, stats = step(state, params, opt_state, batch, plan)
            history.add(loss, stats, config.batch_size)
            is_stopped = ctrl_c.asks_to_stop(history.num_steps)
            if is_stopped or checkpoints.is_due(history.num_steps):
                checkpoints.save(collection, state, (params, opt_state), pipeline, history)
            if is_stopped:
                break
    checkpoints.finish()
    label, probabilities, missing_keys = evaluate(collection, state, graphdef, params, held_out, config.batch_size)
    if not ctrl_c.has_stopped:
        checkpoints.remove()
    return Result(
        auc=training.auc_of(label, probabilities),
        held_out_loss=training.log_loss_of(label, probabilities),
        num_held_out=len(label),
        missing_keys=missing_keys,
        num_rows=collection.num_rows(state),
        is_interrupted=ctrl_c.has_stopped,
        **history.summary(),
    )


def open_log(config: Config) -> data.Source:
    """Opens the log: text as it is, compressed text as binary files that are written once, binary files."""
    cache_dir = synthetic_log.cache_folder(config.cache_dir)
    paths = config.data or (
        _once(config, "log", lambda: synthetic_log.cached_log(config.num_rows, config.seed, cache_dir)),
    )
    if len(paths) == 1 and (paths[0].is_dir() or paths[0].suffix == ".bin"):
        return criteo.binary_source(paths[0])
    if not (config.convert or any(path.suffix == ".gz" for path in paths)):
        source: data.Source = criteo.TextSource(paths)
    else:
        name = hashlib.sha256("\n".join(f"{path.absolute()} {path.stat().st_mtime_ns}" for path in paths).encode())
        folder = cache_dir / f"binary-{name.hexdigest()[:16]}"

        def convert() -> pathlib.Path:
            if not (folder / "day_0_dense.npy").exists():
                if config.show_progress:
                    print(f"Writing binary files to {folder}: the first run does it, later ones read them.")
                criteo.convert(paths, folder, num_threads=config.num_threads)
            return folder

        source = criteo.binary_source(_once(config, "convert", convert))
    if len(source) and "label" not in source[0]:
        raise ValueError("train: the log has 39 columns, so no labels (Kaggle's test.txt?); pass one of 40.")
    return source


def _once(config: Config, name: str, write: Callable[[], pathlib.Path]) -> pathlib.Path:
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


# --------------------------------------------------------------------------------------------------------- evaluation


def evaluate(
    collection: jaxsok.Collection,
    state: jaxsok.State,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    held_out: data.Batches | None,
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


# ------------------------------------------------------------------------------------------------------------- report


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


# ------------------------------------------------------------------------------------------------------- command line


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line.

    Args:
      arguments: the words after the program's name; None takes those of this process.

    Returns:
      The configuration.
    """
    default = Config()
    parser = argparse.ArgumentParser(
        description="Train a DLRM on dynamic tables from a click log in Criteo's format.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", nargs="+", type=pathlib.Path, default=(), metavar="FILE",
        help="logs in Criteo's format, plain or gzip, read in order, or a folder of binary files (default: a "
        "synthetic log)")  # fmt: skip
    add("--num-rows", type=int, default=default.num_rows, help="rows of the synthetic log")
    add("--cache-dir", type=pathlib.Path,
        help="where synthetic and converted logs are kept (default: ~/.cache/jaxsok)")  # fmt: skip
    add("--convert", action="store_true", help="write binary files first, and read those")
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
    add("--capacity", type=int, default=default.capacity, help="rows that each table begins with")
    add("--optimizer", choices=sorted(OPTIMIZERS), default=default.optimizer, help="optimizer of the tables")
    add("--learning-rate", type=float, default=default.learning_rate, help="learning rate of the tables")
    add("--dense-learning-rate", type=float, default=default.dense_learning_rate,
        help="learning rate of the MLPs (Adam)")  # fmt: skip
    add("--bottom", nargs="*", type=int, default=default.bottom, metavar="WIDTH",
        help="hidden widths of the MLP over the integers")  # fmt: skip
    add("--top", nargs="*", type=int, default=default.top, metavar="WIDTH",
        help="hidden widths of the MLP over the interactions")  # fmt: skip
    add("--seed", type=int, default=default.seed, help="seed of tables, MLPs and synthetic log")
    add("--plot", type=pathlib.Path, default=default.plot, metavar="FILE", help="file for the plot")
    add("--checkpoint-dir", type=pathlib.Path, default=default.checkpoint_dir, metavar="FOLDER",
        help="where Ctrl-C leaves the run; the same command goes on from there")  # fmt: skip
    add("--checkpoint-every", type=int, metavar="STEPS", help="save every so many steps too")
    add("--no-progress", dest="show_progress", action="store_false", help="show no progress bar")
    add("--num-devices", type=int, help="how many devices to use (default: all)")
    add("--placement", choices=("auto", "sharded"), default=default.placement,
        help="where tables live: as the planner says, or spread over all devices")  # fmt: skip
    add("--distributed", action="store_true", help="one of several processes: under SLURM, Open MPI, or with "
        "JAX_COORDINATOR_ADDRESS set and the two options that follow")  # fmt: skip
    add("--num-processes", type=int, help="how many processes, if no launcher says (default: $NUM_PROCESSES)")
    add("--process-id", type=int, help="which one this is, from 0 (default: $PROCESS_ID)")
    add("--heartbeat-timeout-s", type=int, default=default.heartbeat_timeout_s,
        help="seconds of silence of one process after which the others end")  # fmt: skip
    values = vars(parser.parse_args(arguments))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def join_processes(config: Config) -> None:
    """Meets the other processes; before anything else, since JAX looks for devices once.

    SLURM and Open MPI have told JAX all it needs. Elsewhere it takes the address of process 0 from
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the command line says, and prints the result.

    Args:
      arguments: the words after the program's name; None takes those of this process.

    Returns:
      The exit code: 0, or 130 (as shells expect of SIGINT) if Ctrl-C ended the training.
    """
    config = parse_arguments(arguments)
    if config.distributed:
        join_processes(config)
    is_first = jax.process_index() == 0
    if is_first:
        device, number = jax.devices()[0], len(jax.devices()[: config.num_devices])
        of_many = f"{number} x " if number > 1 else ""
        in_many = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        print(f"Device: {of_many}{device.platform} ({device.device_kind}){in_many}")
    try:
        result = train(config)
    except KeyboardInterrupt:
        print("Interrupted before there was anything to report.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"train_dlrm: {error}", file=sys.stderr)
        return 1
    if is_first:
        print(format_result(result))
        if config.plot is not None:
            title = f"DLRM on dynamic tables: held-out AUC {result.auc:.4f}"
            training.save_plot(result, title, config.plot)
            print(f"  plot             {config.plot}")
    return 130 if result.is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains a DLRM on dynamic tables from a click log in Criteo's format.

Each of the 26 categories has a table that begins small and gets a row when a key is first seen; nobody counts the keys
beforehand. Without `--data` the example writes (once) and reads a synthetic log of the same format, so that it runs
anywhere, on CPU or GPU:

    python examples/train_dlrm.py
    python examples/train_dlrm.py --data train.txt
    python examples/train_dlrm.py --data day_0.gz day_1.gz --dim 64 --batch-size 16384 --bottom 512 256 --top 512 256

It uses all devices of the machine: the tables and each batch are split over them, the MLPs are on each. With
`--distributed` it uses those of all processes that a launcher started; SLURM and Open MPI tell each process which one
it is, otherwise three environment variables do (docs/many_devices.md):

    srun python examples/train_dlrm.py --distributed --data train.txt
    JAX_COORDINATOR_ADDRESS=host:1234 NUM_PROCESSES=2 PROCESS_ID=0 python examples/train_dlrm.py --distributed

It ends with the AUC on held-out rows, the keys of each table, samples per second, and a plot of loss and table growth.
Ctrl-C stops after the current step and ends in the same way with what was done (exit code 130); a second one aborts.

The model: M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import criteo
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

import jaxsok

OPTIMIZERS = {
    # From 0: gradients of a mean over a batch are small, and Optax's 0.1 would hold rows back for thousands of steps.
    "adagrad": functools.partial(jaxsok.optim.adagrad, initial_accumulator_value=0.0),
    "rowwise_adagrad": jaxsok.optim.rowwise_adagrad,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train, on what; the command line has an option for each field."""

    data: tuple[pathlib.Path, ...] = ()
    """Logs in Criteo's format, read in order; none: a synthetic log."""
    num_rows: int = 600_000
    """Rows of the synthetic log."""
    cache_dir: pathlib.Path | None = None
    """Where the synthetic log is kept; None: the user's cache directory."""
    max_rows: int | None = None
    """Read at most so many rows; None: all."""
    held_out_rows: int | None = None
    """Rows at the end of the log that are not trained on; None: a tenth, at most 100,000."""
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
class Result:
    """What a training run did."""

    auc: float
    """AUC on the held-out rows; NaN if they are of one class."""
    held_out_loss: float
    """Mean log loss on the held-out rows."""
    num_held_out: int
    """How many held-out rows there were."""
    missing_keys: float
    """Share of the held-out rows' keys that training never saw."""
    losses: np.ndarray
    """float32 [steps]: the mean log loss of each step."""
    growth: np.ndarray
    """int32 [steps, 26]: the rows of each table after each step."""
    capacity: np.ndarray
    """int64 [steps]: the rows allocated for all tables in each step."""
    num_rows: dict[str, int]
    """Rows (keys) of each table at the end."""
    num_samples: int
    """Rows of the log that were trained on."""
    seconds: float
    """Time from the first batch to the last step, compilation and growth included."""
    steady_samples_per_s: float
    """Samples per second of the median step: without compilation and growth."""
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


def own_part(rows: criteo.Batch, batch_size: int) -> criteo.Batch:
    """Gives the rows of a batch that this process feeds: its share of `batch_size`, fewer at the end of a log."""
    share = batch_size // jax.process_count()
    part = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    return criteo.Batch(rows.label[part], rows.integers[part], rows.categories[part])


def to_raw(rows: criteo.Batch) -> dict[str, np.ndarray]:
    """Names the columns of a batch of the log; the collection packs the categories and carries the rest."""
    categories = {name: rows.categories[:, i] for i, name in enumerate(criteo.CATEGORY_NAMES)}
    return {"label": rows.label, "integers": rows.integers, **categories}


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
      The result. If Ctrl-C came, of the part that was trained; the held-out rows are then those that follow it.

    Raises:
      ValueError: the log has no labels, or too few rows for one step.
      criteo.LogFormatError: a row of the log is not in Criteo's format.
    """
    is_first = jax.process_index() == 0  # it alone shows what goes on
    config = dataclasses.replace(config, show_progress=config.show_progress and is_first)
    mesh = make_mesh(config)
    paths = config.data or (_synthetic_log(config),)
    num_rows = min(sum(map(criteo.estimate_num_rows, paths)), config.max_rows or sys.maxsize)
    held_out_rows = min(num_rows // 10, 100_000) if config.held_out_rows is None else config.held_out_rows
    collection = make_collection(config, mesh)
    state = collection.init(seed=config.seed)
    graphdef, params = make_model(config)
    tx = optax.adam(config.dense_learning_rate)
    params, opt_state = collection.shards.replicate((params, tx.init(params)))
    step = collection.ahead(make_step(collection, graphdef, tx))  # growth finds its program compiled

    history = _History(num_rows - held_out_rows, config.show_progress)
    held_out: collections.deque[criteo.Batch] = collections.deque()
    reader = criteo.read_log(paths, config.batch_size, max_rows=config.max_rows)
    with contextlib.closing(reader), history, _CtrlC() as ctrl_c:
        own_parts = (to_raw(own_part(rows, config.batch_size)) for rows in hold_back(reader, held_out_rows, held_out))
        # Asked by the pipeline, which is a batch ahead: what it has read is trained on, so that no row is skipped.
        for batch, plan in collection.pipeline(ctrl_c.until_pressed(own_parts)):
            state = collection.grow(state, batch)  # makes room for its keys; almost always returns at once
            state, params, opt_state, loss, stats = step(state, params, opt_state, batch, plan)
            history.add(loss, stats, config.batch_size)
    if not history.num_samples:
        raise ValueError(
            f"train: {paths[0]}: about {num_rows} rows are too few for a step of {config.batch_size} rows "
            f"beside {held_out_rows} held-out rows; pass a smaller batch_size or held_out_rows."
        )
    probabilities, missing_keys = evaluate(collection, state, graphdef, params, held_out, config.batch_size)
    label = np.concatenate([rows.label for rows in held_out]) if held_out else np.zeros(0)
    return Result(
        auc=auc_of(label, probabilities),
        held_out_loss=log_loss_of(label, probabilities),
        num_held_out=len(label),
        missing_keys=missing_keys,
        num_rows=collection.num_rows(state),
        is_interrupted=ctrl_c.is_pressed,
        **history.summary(),
    )


def _synthetic_log(config: Config) -> pathlib.Path:
    if config.show_progress:
        print(f"Synthetic log of {config.num_rows:,} rows: written by the first run, read by the later ones.")
    if jax.process_index():
        multihost_utils.sync_global_devices("log")  # the first process writes it
    path = criteo.cached_log(config.num_rows, config.seed, config.cache_dir)
    if jax.process_count() > 1 and not jax.process_index():
        multihost_utils.sync_global_devices("log")
    if config.show_progress:
        print(f"Reading {path}")
    return path


def hold_back(
    batches: Iterable[criteo.Batch], num_rows: int, held_out: collections.deque[criteo.Batch]
) -> Iterator[criteo.Batch]:
    """Gives the batches of a stream but the last ones, which hold at least `num_rows` rows and stay in `held_out`.

    The length of a stream is known at its end only, so batches wait here until enough rows have come after them.

    Args:
      batches: a stream whose last batch may be smaller than the others.
      num_rows: the least number of rows to hold back.
      held_out: where they wait; at any time, the rows that follow the batch given last.

    Yields:
      The batches to train on, all of full size.

    Raises:
      ValueError: the rows have no labels.
    """
    num_held = 0
    for rows in batches:
        if rows.label is None:
            raise ValueError("train: the log has 39 columns, so no labels (Kaggle's test.txt?); pass one of 40.")
        held_out.append(rows)
        num_held += rows.num_rows
        # A batch is given only after the next one came: the last one may be short, and would compile another step.
        while len(held_out) > 1 and num_held - held_out[0].num_rows >= num_rows:
            num_held -= held_out[0].num_rows
            yield held_out.popleft()


class _CtrlC:
    """Turns the first Ctrl-C into a question asked between steps: an exception inside one would lose donated state."""

    AGREE_EVERY = 20  # batches between questions to the other processes, which must stop at the same step

    def __init__(self):
        self.is_pressed = False

    def until_pressed(self, batches: Iterable) -> Iterator:
        """The same batches, up to the one during which Ctrl-C came, to whichever process."""
        for i, batch in enumerate(batches):
            yield batch
            if jax.process_count() > 1:
                if i % self.AGREE_EVERY:
                    continue
                self.is_pressed = bool(multihost_utils.process_allgather(np.array(self.is_pressed)).any())
            if self.is_pressed:
                return

    def __enter__(self):
        # Python lets only the main thread set handlers; elsewhere Ctrl-C is not ours to handle.
        self._is_ours = threading.current_thread() is threading.main_thread()
        if self._is_ours:
            self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_):
        if self._is_ours:
            signal.signal(signal.SIGINT, self._previous)

    def _press(self, *_):
        self.is_pressed = True
        signal.signal(signal.SIGINT, self._previous)


class _History:
    """What happened in each step. Values stay on the device until they are shown, so that steps run ahead."""

    SHOW_EVERY = 20  # steps between waits for the device

    def __init__(self, num_rows: int, show_progress: bool):
        self.num_samples = 0
        self._bar = tqdm(total=num_rows, unit=" rows", unit_scale=True, disable=not show_progress)
        self._losses, self._growth, self._capacity = [], [], []
        self._shown_at = []  # (steps, seconds) when all of them were done

    def __enter__(self):
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_):
        if len(self._losses) % self.SHOW_EVERY:
            self._wait()
        self._bar.close()

    def add(self, loss: jax.Array, stats: jaxsok.Stats, num_rows: int) -> None:
        self.num_samples += num_rows
        self._losses.append(loss)
        self._growth.append(stats)
        # Tables of one store say the same capacity.
        self._capacity.append(sum(dict(zip(stats.stores, stats.capacities, strict=True)).values()))
        self._bar.update(num_rows)
        if len(self._losses) % self.SHOW_EVERY == 0:
            self._wait()

    def _wait(self) -> None:
        """Waits for the steps so far; raises if one of them lost anything (a full table, a gradient not finite)."""
        first = self._shown_at[-1][0] if self._shown_at else 0
        for i in range(first, len(self._losses)):
            self._growth[i].check()
            self._growth[i] = np.asarray(self._growth[i].num_rows)
            self._losses[i] = np.asarray(self._losses[i])
        self._shown_at.append((len(self._losses), time.perf_counter() - self._start))
        self._bar.set_postfix(loss=f"{np.mean(self._losses[first:]):.4f}", keys=f"{self._growth[-1].sum():,}")

    def summary(self) -> dict:
        steps, seconds = np.array([(0, 0.0), *self._shown_at]).T
        rows_per_step = self.num_samples / len(self._losses)
        return {
            "losses": np.array(self._losses),
            "growth": np.array(self._growth),
            "capacity": np.array(self._capacity, np.int64),
            "num_samples": self.num_samples,
            "seconds": float(seconds[-1]),
            "steady_samples_per_s": float(rows_per_step * np.median(np.diff(steps) / np.diff(seconds))),
        }


# --------------------------------------------------------------------------------------------------------- evaluation


def evaluate(
    collection: jaxsok.Collection,
    state: jaxsok.State,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    held_out: Iterable[criteo.Batch],
    batch_size: int,
) -> tuple[np.ndarray, float]:
    """Gives the click probability of each held-out row; the tables do not change.

    Args:
      collection: the tables' declaration.
      state: their state.
      graphdef: definition of the dense model.
      params: its parameters.
      held_out: the rows; the last batch may be smaller than the others.
      batch_size: rows in the others.

    Returns:
      float32 [rows], and the share of the keys (padding not counted) that have no row.
    """

    @jax.jit
    def predict(state, params, batch):
        embeddings, stats = collection.find(state, batch.features)
        return nnx.sigmoid(nnx.merge(graphdef, params)(batch["integers"], embeddings)), stats

    probabilities, num_found, num_missing = [np.zeros(0, np.float32)], 0, 0
    for rows in held_out:
        raw = to_raw(own_part(rows, batch_size))
        batch = collection.batch(raw, pad_to=batch_size // jax.process_count())  # one program serves all
        result, stats = predict(state, params, batch)
        result, is_real = multihost_utils.process_allgather((result, batch.mask), tiled=True)
        probabilities.append(result[is_real])
        num_found += int(np.asarray(stats.num_found).sum())
        num_missing += int(np.asarray(stats.num_missing).sum())
    return np.concatenate(probabilities), num_missing / max(num_found + num_missing, 1)


def auc_of(label: np.ndarray, probabilities: np.ndarray) -> float:
    """Gives the area under the ROC curve; NaN where it is undefined, with fewer than two classes."""
    return float(roc_auc_score(label, probabilities)) if len(np.unique(label)) == 2 else float("nan")


def log_loss_of(label: np.ndarray, probabilities: np.ndarray) -> float:
    """Gives the mean log loss of predictions; NaN for none."""
    if not len(label):
        return float("nan")
    likelihood = np.where(label == 1, probabilities, 1 - probabilities)
    return float(-np.log(np.maximum(likelihood, 1e-7)).mean())


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
            f"  samples/s        {result.num_samples / result.seconds:,.0f}  "
            f"({result.steady_samples_per_s:,.0f} without compilation and growth)",
            f"  keys             {sum(result.num_rows.values()):,} in {len(result.num_rows)} tables:",
            *(f"                   {line}" for line in lines),
        ]
    )


def save_plot(result: Result, path: pathlib.Path) -> None:
    """Draws the loss and the growth of the tables over the samples.

    Args:
      result: of a training run.
      path: the file; its ending names the format.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # after use(): a machine without a display has no other back end

    samples = np.linspace(0, result.num_samples, len(result.losses) + 1)[1:]
    figure, (loss_axes, keys_axes) = plt.subplots(2, 1, sharex=True, figsize=(9, 8), layout="constrained")
    window = max(len(result.losses) // 25, 1)
    smooth = np.convolve(result.losses, np.full(window, 1 / window), mode="valid")
    loss_axes.plot(samples, result.losses, color="0.8", linewidth=0.8, label="each step")
    loss_axes.plot(samples[window - 1 :], smooth, label=f"mean of {window} steps")
    loss_axes.axhline(result.held_out_loss, color="C1", linestyle="--", label="held-out rows, at the end")
    loss_axes.set(ylabel="log loss", title=f"DLRM on dynamic tables: held-out AUC {result.auc:.4f}")
    loss_axes.legend()

    order = np.argsort(result.growth[-1])[::-1]
    names = np.array(list(result.num_rows))[order]
    growth = result.growth.T[order]
    shown = 8
    rest = f"{len(names) - shown} others"
    keys_axes.stackplot(samples, *growth[:shown], growth[shown:].sum(0), labels=[*names[:shown], rest], alpha=0.8)
    keys_axes.step(samples, result.capacity, where="pre", color="0.3", linestyle=":", label="rows allocated")
    keys_axes.set(xlabel="samples", ylabel="keys (rows) in the tables", title="Growth of the tables")
    for axis in (keys_axes.xaxis, keys_axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    keys_axes.legend(loc="upper left", ncols=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
        help="logs in Criteo's format, plain or gzip, read in order (default: a synthetic log)")  # fmt: skip
    add("--num-rows", type=int, default=default.num_rows, help="rows of the synthetic log")
    add("--cache-dir", type=pathlib.Path, help="where the synthetic log is kept (default: ~/.cache/jaxsok)")
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
            save_plot(result, config.plot)
            print(f"  plot             {config.plot}")
    return 130 if result.is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())

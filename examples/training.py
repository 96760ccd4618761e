"""The loop of the training examples: progress, curves and checkpoints. It stops on Ctrl-C and goes on later.

Orbax saves tables, dense parameters, the place in the data and the curves together; the same command then continues at
exactly the next batch.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

import jaxsok
from jaxsok import checkpoint


class CtrlC:
    """Turns the first Ctrl-C into a question asked between steps: an exception inside one would lose donated state."""

    AGREE_EVERY = 20  # steps between questions to the other processes, which must stop at the same step

    def __init__(self):
        self.has_stopped = False
        """The last answer of `asks_to_stop`, the same in all processes; Ctrl-C after that has nothing to stop."""
        self._is_pressed, self._num_steps = False, 0

    def asks_to_stop(self, num_steps: int) -> bool:
        """Says after a step, or several, whether Ctrl-C was pressed, in whichever process."""
        before, self._num_steps = self._num_steps, num_steps
        if jax.process_count() == 1:
            self.has_stopped = self._is_pressed
        elif before // self.AGREE_EVERY < num_steps // self.AGREE_EVERY:
            self.has_stopped = bool(multihost_utils.process_allgather(np.array(self._is_pressed)).any())
        return self.has_stopped

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
        self._is_pressed = True
        signal.signal(signal.SIGINT, self._previous)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """The record of a run, step by step."""

    losses: np.ndarray
    """float32 [steps]: the mean log loss of each step."""
    growth: np.ndarray
    """int32 [steps, tables]: the rows of each table after each step."""
    capacity: np.ndarray
    """int64 [steps]: the rows allocated for all tables in each step."""
    samples: np.ndarray
    """int64 [steps]: the samples trained on after each step."""
    num_restored: int
    """Samples that an interrupted run had trained on."""
    seconds: float
    """Time from the first batch of this run to its last step, compilation and growth included."""
    steady_samples_per_s: float
    """Samples per second of the median step: without compilation and growth."""
    held_out_loss: float
    """Mean log loss on held-out samples, at the end."""
    num_rows: dict[str, int]
    """Rows (keys) of each table at the end."""

    @property
    def num_samples(self) -> int:
        """The samples trained on."""
        return int(self.samples[-1]) if len(self.samples) else 0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of this run, compilation and growth included."""
        return (self.num_samples - self.num_restored) / max(self.seconds, 1e-9)


class History:
    """Records the steps of a run. Values stay on the device until they are shown, so that steps run ahead.

    Args:
      num_samples: of the whole run, for the progress bar.
      show_progress: whether to show one.
      fixed_rows: the rows of tables that do not grow, which have no `Stats`.
    """

    SHOW_EVERY = 20  # steps between waits for the device

    def __init__(self, num_samples: int, show_progress: bool, fixed_rows: Sequence[int] = ()):
        self._fixed_rows = np.array(fixed_rows)
        self._bar = tqdm(total=num_samples, unit=" samples", unit_scale=True, disable=not show_progress)
        self._losses, self._growth, self._capacity, self._samples = [], [], [], [0]
        self._pending = []  # losses and statistics of calls, perhaps still on the way
        self._shown_at = []  # (steps, seconds) when all of them were done
        self._num_restored = 0

    @property
    def num_steps(self) -> int:
        """Steps so far, those of an interrupted run included."""
        return len(self._samples) - 1

    def restore(self, curves: dict[str, np.ndarray]) -> None:
        """Goes on after the steps of an interrupted run."""
        self._losses, self._growth = list(curves["losses"]), list(curves["growth"])
        self._capacity, self._samples = curves["capacity"].tolist(), [0, *curves["samples"].tolist()]
        self._num_restored = self._samples[-1]
        self._bar.update(self._num_restored)

    def curves(self) -> dict[str, np.ndarray]:
        """Returns all steps so far; waits for them."""
        self._wait()
        return {
            "losses": np.array(self._losses),
            "growth": np.array(self._growth),
            "capacity": np.array(self._capacity, np.int64),
            "samples": np.array(self._samples[1:], np.int64),
        }

    def __enter__(self):
        self._start = time.perf_counter()
        self._shown_at.append((self.num_steps, 0.0))
        return self

    def __exit__(self, error, *_):
        try:
            if error is None:  # else that one is raised: the wait may have been cut off by it
                self._wait()
        finally:
            self._bar.close()

    def add(self, loss: jax.Array, stats: jaxsok.Stats | None, num_samples: Sequence[int]) -> None:
        """Records the steps of a call that was dispatched, stacked if there may be several; `num_samples` has each."""
        self._pending.append((loss, stats))
        # Tables of one store have the same capacity.
        capacities = [self._fixed_rows.sum()] if stats is None else _by_store(stats).values()
        for num in num_samples:
            self._capacity.append(sum(capacities))
            self._samples.append(self._samples[-1] + num)
        self._bar.update(sum(num_samples))
        if self.num_steps - self._shown_at[-1][0] >= self.SHOW_EVERY:
            self._wait()

    def _wait(self) -> None:
        """Waits for the steps so far; raises if one of them lost anything (a full table, a gradient not finite)."""
        first = self._shown_at[-1][0]
        if first == self.num_steps:
            return
        for loss, stats in self._pending:
            if stats is not None:
                stats.check()
            rows = self._fixed_rows if stats is None else np.asarray(stats.num_rows)
            self._growth += list(rows.reshape(-1, rows.shape[-1]))
            self._losses += list(np.asarray(loss).reshape(-1))
        self._pending = []
        self._shown_at.append((self.num_steps, time.perf_counter() - self._start))
        self._bar.set_postfix(loss=f"{np.mean(self._losses[first:]):.4f}", keys=f"{self._growth[-1].sum():,}")

    def summary(self) -> dict[str, Any]:
        """Returns the fields of `Curves` that this class knows."""
        steps, seconds = zip(*self._shown_at, strict=True)
        samples = np.array(self._samples)[list(steps)]
        rates = np.diff(samples) / np.diff(seconds) if len(steps) > 1 else [0.0]
        return {
            **self.curves(),
            "num_restored": self._num_restored,
            "seconds": float(seconds[-1]),
            "steady_samples_per_s": float(np.median(rates)),
        }


def _by_store(stats: jaxsok.Stats) -> dict[int, int]:
    return dict(zip(stats.stores, stats.capacities, strict=True))


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, unless that says what happens without it, or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_it = action.default in (None, (), False) or "(default: " in (action.help or "")
        return action.help if says_it else super()._get_help_string(action)


def check_options(config: Any) -> None:
    """Refuses numbers and a plot that would fail later, the plot after the training."""
    positive = "batch_size checkpoint_every num_devices max_rows num_streams num_threads bottom top hidden"
    for name, least in (dict.fromkeys(positive.split(), 1) | {"seed": 0, "held_out_rows": 0}).items():
        value = getattr(config, name, None)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(number < least for number in numbers):
            raise ValueError(f"train: {name}: got {value}, wanted at least {least}.")
    plot = config.plot
    if plot is not None and not (plot.absolute().parent.is_dir() and plot.suffix in (".png", ".svg", ".pdf")):
        raise ValueError(f"train: plot: got {plot}, wanted a file .png, .svg or .pdf in a folder that exists.")


def settings_of(config: Any, free: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a configuration but the free ones, as JSON: a run goes on only if they are the same."""
    fixed = {name: value for name, value in dataclasses.asdict(config).items() if name not in free}
    return json.loads(json.dumps(fixed, default=str))


def log_loss_of(label: np.ndarray, probabilities: np.ndarray) -> float:
    """Gives the mean log loss of predictions; NaN for none."""
    if not len(label):
        return float("nan")
    likelihood = np.where(label == 1, probabilities, 1 - probabilities)
    return float(-np.log(np.maximum(likelihood, 1e-7)).mean())


def auc_of(label: np.ndarray, probabilities: np.ndarray) -> float:
    """Gives the area under the ROC curve; NaN where it is undefined, with fewer than two classes."""
    return float(roc_auc_score(label, probabilities)) if len(np.unique(label)) == 2 else float("nan")


def save_plot(curves: Curves, title: str, path: pathlib.Path) -> None:
    """Draws the loss and the growth of the tables over the samples; the ending of `path` names the format."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # after use(): a machine without a display has no other back end

    samples = curves.samples
    figure, (loss_axes, keys_axes) = plt.subplots(2, 1, sharex=True, figsize=(9, 8), layout="constrained")
    window = max(len(curves.losses) // 25, 1)
    smooth = np.convolve(curves.losses, np.full(window, 1 / window), mode="valid")
    loss_axes.plot(samples, curves.losses, color="0.8", linewidth=0.8, label="each step")
    loss_axes.plot(samples[window - 1 :], smooth, label=f"mean of {window} steps")
    loss_axes.axhline(curves.held_out_loss, color="C1", linestyle="--", label="held-out samples, at the end")
    loss_axes.set(ylabel="log loss", title=title)
    loss_axes.legend()

    order = np.argsort(curves.growth[-1])[::-1]
    names = np.array(list(curves.num_rows))[order]
    growth = curves.growth.T[order]
    shown = min(8, len(names))
    others = {f"{len(names) - shown} others": growth[shown:].sum(0)} if len(names) > shown else {}
    labels = [*names[:shown], *others]
    keys_axes.stackplot(samples, *growth[:shown], *others.values(), labels=labels, alpha=0.8)
    keys_axes.step(samples, curves.capacity, where="pre", color="0.3", linestyle=":", label="rows allocated")
    keys_axes.set(xlabel="samples", ylabel="keys (rows) in the tables", title="Growth of the tables")
    for axis in (keys_axes.xaxis, keys_axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    keys_axes.legend(loc="upper left", ncols=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Training(NamedTuple):
    """All that a run needs to go on."""

    tables: jaxsok.State
    dense: Any
    """Dense parameters and the state of their optimizer: a tree of arrays."""
    data: Any
    """State of the iterator over the data."""
    curves: dict[str, np.ndarray]
    """The record of each step so far: `History.curves`."""


class Checkpoints:
    """Saves a run in a folder, and restores it; without a folder it does nothing.

    Args:
      folder: where to; shared by all processes.
      every: steps between saves; None: only when `save` is called.
      settings: what must be the same in a run that goes on, as JSON.

    Raises:
      OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: pathlib.Path | None, every: int | None, settings: dict[str, Any]):
        self._folder, self._every, self._settings = folder, every, settings
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        self._manager = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # Orbax would find out with the first save
                self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def restore(self, collection: jaxsok.Collection, dense: Any) -> Training | None:
        """Restores what a run saved that was interrupted; None: there is nothing.

        Args:
          collection: the declared tables; it may have other devices than the one that saved.
          dense: a tree of arrays like the one that was saved.

        Raises:
          ValueError: other settings than those of the run that saved.
        """
        if self._manager is None or (step := self._manager.latest_step()) is None:
            return None
        # First, since tables and parameters of other sizes cannot be restored.
        data = self._manager.restore(step, args=ocp.args.Composite(data=ocp.args.JsonRestore()))["data"]
        saved = data["settings"]
        if saved != self._settings:
            differs = {
                name: (saved.get(name), value) for name, value in self._settings.items() if saved.get(name) != value
            }
            raise ValueError(
                f"train: {self._folder}: it holds an interrupted run with other settings (saved, given): {differs}; "
                "give the same ones to go on, or remove it."
            )
        read = ocp.args.Composite(
            tables=checkpoint.TablesRestore(collection),
            dense=ocp.args.StandardRestore(dense),
            curves=ocp.args.StandardRestore(),
        )
        found = self._manager.restore(step, args=read)
        return Training(found["tables"], found["dense"], data["iterator"], found["curves"])

    def is_due(self, before: int, num_steps: int) -> bool:
        """Says whether to save after so many steps, when there was last a chance to after `before`."""
        return (
            self._manager is not None and self._every is not None and before // self._every < num_steps // self._every
        )

    def save(
        self, collection: jaxsok.Collection, state: jaxsok.State, dense: Any, pipeline: Any, history: History
    ) -> None:
        """Saves a run after a step, while the next ones go on.

        The pipeline has read further; its state is that of the batch just trained on.
        """
        if self._manager is None:
            return
        written = ocp.args.Composite(
            tables=checkpoint.TablesSave(collection, state),
            dense=ocp.args.StandardSave(dense),
            data=ocp.args.JsonSave({"iterator": pipeline.get_state(), "settings": self._settings}),
            curves=ocp.args.StandardSave(history.curves()),
        )
        self._manager.save(history.num_steps, args=written, force=True)

    def finish(self) -> None:
        """Waits for what is being saved."""
        if self._manager is not None:
            self._manager.close()

    def remove(self) -> None:
        """Removes what was saved of a run that came to its end; the folder too, if nothing else is in it."""
        if self._folder is None or self._manager is None or jax.process_index():
            return
        for step in self._manager.all_steps():
            shutil.rmtree(self._folder / str(step))
        with contextlib.suppress(OSError):  # it has other files
            self._folder.rmdir()


def make_mesh(batch_size: int, num_devices: int | None = None) -> Mesh | None:
    """Lines up the devices along one axis; None for one device, which needs no mesh.

    Args:
      batch_size: samples in a step, on all devices together.
      num_devices: how many devices; None: all. In several processes always all.

    Raises:
      ValueError: there are fewer, or a batch cannot be shared out evenly.
    """
    devices = jax.devices()[: None if jax.process_count() > 1 else num_devices]
    if batch_size % len(devices) or len(devices) < (num_devices or 1):
        raise ValueError(
            f"train: {len(devices)} devices cannot share batches of {batch_size} samples evenly, or are fewer than "
            f"num_devices={num_devices}; pass another batch_size or num_devices."
        )
    if len(devices) == 1:
        return None
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


class Fitted(NamedTuple):
    """The result of a loop over steps."""

    tables: jaxsok.State
    dense: Any
    """Dense parameters, and the state of their optimizer."""
    is_interrupted: bool
    """Whether Ctrl-C ended it."""
    summary: dict[str, Any]
    """Fields of `Curves`: `History.summary`."""


def fit(
    collection: jaxsok.Collection,
    step: Callable,
    init: Callable[[], jaxsok.State],
    dense: tuple[Any, Any],
    iterator: Any,
    history: History,
    checkpoints: Checkpoints,
    *,
    num_samples: Callable[[int], int],
    grows: bool = True,
    pad_to: int | None = None,
    lookahead: int = 0,
    staleness: int = 0,
    steps_per_call: int = 1,
) -> Fitted:
    """Trains to the end of the data or until Ctrl-C; goes on where an interrupted run stopped.

    Args:
      collection: the declared tables.
      step: (state, params, opt_state, batch, plan) to (state, params, opt_state, loss, stats); it is compiled here, and
        the first three are donated.
      init: makes the first state of the tables, where there is no interrupted run.
      dense: parameters, and the state of their optimizer.
      iterator: raw batches; its state can be saved and set.
      history: takes the record of each step.
      checkpoints: where runs are saved; `remove` is left to the caller.
      num_samples: the samples of a step, by its number from 0.
      grows: whether tables get more rows as keys come. Tables that have room for all keys skip the question, which
        costs a count on the device where rows are nearly all in use.
      pad_to: as of `collection.batch`.
      lookahead: as of `collection.pipeline`.
      staleness: as of `collection.pipeline`.
      steps_per_call: as of `collection.pipeline`; the run is shown, saved and stopped between calls.
    """
    if (saved := checkpoints.restore(collection, dense)) is None:
        state, (params, opt_state) = init(), dense
    else:
        state, (params, opt_state) = saved.tables, saved.dense
        iterator.set_state(saved.data)
        history.restore(saved.curves)

    def compile_ahead(step: Callable, **options: Any) -> Callable:
        return collection.ahead(jax.jit(step, **options))  # growth finds its program compiled

    with history, CtrlC() as ctrl_c:
        pipeline = collection.pipeline(
            iterator, pad_to=pad_to, lookahead=lookahead, staleness=staleness, steps_per_call=steps_per_call
        )
        # On a mesh a call also plans later batches.
        call = step if steps_per_call == 1 else scan_over(step)
        call = pipeline.jit(call, jit=compile_ahead, donate_argnums=(0, 1, 2))
        is_stopped, num_ahead = False, max(lookahead, staleness) * steps_per_call
        for batch, plan in pipeline:
            before = history.num_steps
            if is_stopped or checkpoints.is_due(before, before + num_ahead):
                state = collection.drain(state)  # what is saved has no lookup in flight
            if grows:
                state = collection.grow(state, batch)  # makes room for its keys; almost always returns at once
            state, params, opt_state, loss, stats = call(state, params, opt_state, batch, plan)
            history.add(loss, stats, [num_samples(before + i) for i in range(loss.size)])
            is_stopped = ctrl_c.asks_to_stop(history.num_steps)
            ends = is_stopped and not state.ahead
            if ends or checkpoints.is_due(before, history.num_steps):
                checkpoints.save(collection, state, (params, opt_state), pipeline, history)
            if ends:
                break
    checkpoints.finish()
    return Fitted(state, (params, opt_state), ctrl_c.has_stopped, history.summary())


def scan_over(step: Callable) -> Callable:
    """Makes a call of several steps, whose batches and plans are stacked, of a step as `fit` takes it."""

    def call(state: jaxsok.State, params: Any, opt_state: Any, batches: Any, plans: Any) -> tuple:
        def body(carry: tuple, inputs: tuple) -> tuple:
            *carry, loss, stats = step(*carry, *inputs)
            return tuple(carry), (loss, stats)

        carry, outputs = jaxsok.scan(body, (state, params, opt_state), (batches, plans))
        return *carry, *outputs

    return call

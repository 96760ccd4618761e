"""MLPerf's DLRM-DCNv2 from files to updated rows, as `examples/train_dcnv2.py` trains it, and each part alone.

Question: how many samples a second does training take, what limits it, and how many host threads does the input need?
Workload: 26 tables of 128 floats, 204,184,588 rows in all, 214 keys a sample, batches of 65,536; bags that come back
          with their first key (Zipf 1.05), or uniform keys. All rows are in the tables before anything is timed.
Limit:    none; the parts are compared with the whole.
Command:  `python -m jaxsok bench --only dcnv2 [--devices 4] [--optimizers adagrad] [--seconds 120]`
Last result: docs/results/dcnv2.md (4 x H200, commit a9a487f, 4 x H100, and one H200).

"train" is the whole: files, packing, copy, plan, step, for `--seconds` three times; the median counts. The parts:

- "read, pack and copy": the pipeline without steps; on several devices with the plans. From the page cache, from the
  disk (the first pass over the files) and from Parquet.
- "plan": distinct keys, and on several devices their exchange. On one device the lookup does it, and "plan" is part of
  "training forward".
- "DLRM step": the step on batches that are packed and planned before.
- "training forward" and "forward + update": the tables alone, with the embeddings as gradients.
- "dense part": the model alone, forward, backward and its optimizer, with given embeddings.

"cores" is the processor time of the process over the time taken.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

import jaxsok

from . import records
from .records import Record, Recorder
from .timing import Protocol, Step, Timing, summary

if TYPE_CHECKING:  # Other benchmarks run without the libraries of `jaxsok[data]`.
    from jaxsok import data

WORKLOAD = "DLRM-DCNv2"

KEYS = ("zipf1.05", "uniform")
"""The distributions that there are files for."""

OPTIMIZERS = ("adagrad", "rowwise_adagrad")

SECONDS = 120.0
"""Seconds of each timed run."""

NUM_RUNS = 3

TRACED_STEPS = 8

_NUM_AHEAD = 8  # steps in flight at most
_PARQUET_BATCHES = 24  # More than the source keeps decoded, so each pass decodes all of them.
_NUM_PACKED = 2  # batches in rotation where no input takes part


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run."""

    devices: Sequence[int] = ()
    """Numbers of devices; none: all."""
    keys: Sequence[str] = KEYS
    optimizers: Sequence[str] = OPTIMIZERS[:1]
    seconds: float = SECONDS
    folder: pathlib.Path | None = None
    """The folder of the files; None: a temporary folder."""
    train: Sequence[str] = ()
    """More options of the example's command line, which take precedence over `scale` and `is_quick`."""
    trace: pathlib.Path | None = None
    """A folder for profiles of `TRACED_STEPS` steps that are fed from files, in a folder for each run; None: none."""
    scale: float = 1.0
    """Share of the tables' rows, of the batch and of the files."""
    is_quick: bool = False
    """Whether files and dense part are small, for a run that only shows that everything works."""


def measure(recorder: Recorder, protocol: Protocol, seed: int, options: Options) -> None:
    """Measures training and its parts, with each optimizer, distribution of keys, and number of devices."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
    import train_dcnv2

    batch_size = 1 << max(8, round(math.log2(train_dcnv2.Config.batch_size * options.scale)))
    num_rows = 16 * batch_size if options.is_quick else round(train_dcnv2.Config.num_rows * min(1.0, options.scale))
    with tempfile.TemporaryDirectory() as temporary:
        sizes = {"scale": options.scale, "batch-size": batch_size, "num-rows": max(num_rows, 16 * batch_size)}
        if options.is_quick:
            sizes |= {"bottom": 16, "top": 16, "rank": 8, "dim": 16}
        sizes |= {"seed": seed, "cache-dir": options.folder or temporary}
        given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        config = train_dcnv2.parse_arguments([*given, *options.train])
        numbers = options.devices or [len(jax.devices())]
        for optimizer, distribution, number in itertools.product(options.optimizers, options.keys, numbers):
            label = f"{WORKLOAD} {optimizer} {distribution} on {number}"
            if recorder.has_time(label):
                is_uniform = distribution == "uniform"
                run = dataclasses.replace(config, optimizer=optimizer, uniform=is_uniform, num_devices=number)
                trace = options.trace and options.trace / label.replace(" ", "-")
                with recorder.attempt(label):
                    _Bench(run, recorder, protocol, options.seconds, trace).measure()
                gc.collect()
                recorder.write()


class _Bench:
    """One configuration: its files, its tables with all rows, and the measurements on them."""

    def __init__(
        self, config: Any, recorder: Recorder, protocol: Protocol, seconds: float, trace: pathlib.Path | None = None
    ):
        import train_dcnv2
        import training

        self._example = train_dcnv2
        self._config, self._recorder, self._protocol = config, recorder, protocol
        self._seconds, self._trace = seconds, trace
        begin = time.perf_counter()
        self._source = train_dcnv2.open_log(config)
        recorder.say(f"{len(self._source):,} samples in files after {time.perf_counter() - begin:.1f} s")
        mesh = training.make_mesh(config.batch_size, config.num_devices)
        self._collection = train_dcnv2.make_collection(config, self._source, mesh)
        self._num_unique = train_dcnv2.distinct_keys(train_dcnv2.first_batch(self._source, config.batch_size))
        exchange = self._collection.exchange
        self._wire = f"{exchange.rows or config.row_dtype}, {exchange.gradients or 'float32'}" if mesh else "-"
        self._losses: collections.deque[jax.Array] = collections.deque()  # of steps in flight
        self._num_keys = config.batch_size * sum(train_dcnv2.BAG_SIZES.values())

    def measure(self) -> None:
        """Measures input, the whole, and the parts."""
        recorder, collection, config = self._recorder, self._collection, self._config
        recorder.say(f"rows {config.row_dtype}, on the wire {self._wire}, {self._num_unique:,} distinct keys of "
                     f"{self._num_keys:,} in the first batch; {config.num_threads} threads read, "
                     f"{collection.packer.num_threads} pack")  # fmt: skip
        print(self._example.estimate(config, collection))
        self._measure_input()
        begin = time.perf_counter()
        state = self._example.fill(config, collection)
        recorder.say(
            f"{sum(config.table_rows.values()):,} rows in the tables after {time.perf_counter() - begin:.1f} s"
        )

        import click_training
        from flax import nnx

        graphdef, params = nnx.split(self._example.make_model(config))
        tx = self._example.make_optimizer(config)
        carry = (state, *collection.shards.replicate((params, tx.init(params))))
        step = click_training.make_step(collection, graphdef, tx)
        carry = self._train(step, carry)
        with self._pipeline() as pipeline:
            batches = list(itertools.islice(pipeline, _NUM_PACKED))
        carry = self._measure_step(step, carry, batches)
        carry = self._measure_tables(carry, batches)
        loss = functools.partial(click_training.log_loss, graphdef=graphdef)
        self._measure_dense(loss, tx, carry, batches)

    @contextlib.contextmanager
    def _pipeline(self, source: "data.Source | None" = None) -> Iterator[Any]:
        """Yields from the pipeline over the files, which repeats them."""
        from jaxsok import data

        batches = data.Batches(source or self._source, self._config.batch_size)
        iterator: Any = data.iterate(batches.repeat(), num_threads=self._config.num_threads)
        pipeline = iter(self._collection.pipeline(iterator))
        try:
            yield pipeline
        finally:
            pipeline.close()
            iterator.close()

    def _add(self, what: str, timing: Timing, variant: str = "", **notes: Any) -> None:
        notes |= {
            "part": "dcnv2",
            "num_devices": self._config.num_devices,
            "num_samples": self._config.batch_size,
            "rows": self._config.row_dtype,
            "wire": self._wire,
        }
        self._recorder.add(
            Record(
                WORKLOAD,
                what,
                "jaxsok",
                timing,
                distribution="uniform" if self._config.uniform else "zipf1.05",
                optimizer="" if what in (records.READ, records.PLAN, records.TRAINING) else self._config.optimizer,
                variant=variant,
                num_keys=self._num_keys,
                num_unique=self._num_unique,
                notes=notes,
            )
        )

    # ---------------------------------------------------------------------------------------------------------- input

    def _measure_input(self) -> None:
        """Measures the pipeline without steps: files from the disk, from the page cache, and as Parquet."""
        from jaxsok.data import ArrowSource

        num_batches = len(self._source) // self._config.batch_size
        _forget_pages(self._example.log_folder(self._config))
        # A first pass reads the disk, unless another process maps the files in memory.
        for variant, source, num_passes in (
            ("disk", self._source, 1),
            ("page cache", self._source, max(2, min(3, self._protocol.repetitions))),
        ):
            self._measure_source(variant, source, num_batches, num_passes)
        with tempfile.TemporaryDirectory() as folder, self._recorder.attempt("Parquet"):
            path = pathlib.Path(folder) / "samples.parquet"
            num_written = min(num_batches, _PARQUET_BATCHES)
            _write_parquet(path, self._source, self._config.batch_size, num_written)
            self._measure_source("Parquet", ArrowSource(path), num_written, 3)

    def _measure_source(self, variant: str, source: "data.Source", num_batches: int, num_passes: int) -> None:
        times, cores = [], []
        with self._pipeline(source) as pipeline:
            jax.block_until_ready([next(pipeline), next(pipeline)])  # Starts the threads, and compiles plans.
            for _ in range(num_passes):
                begin, used = time.perf_counter(), time.process_time()
                last = collections.deque(itertools.islice(pipeline, num_batches), maxlen=1)
                jax.block_until_ready(list(last))
                elapsed = time.perf_counter() - begin
                times.append(elapsed * 1e3 / num_batches)
                cores.append((time.process_time() - used) / elapsed)
        timing = summary(times, num_batches)
        self._add(records.READ, timing, variant, num_threads=self._config.num_threads, cores=float(np.median(cores)))

    # ---------------------------------------------------------------------------------------------------------- whole

    def _train(self, step: Any, carry: tuple) -> tuple:
        """Trains from files for the given number of seconds, several times."""
        times, cores, num_steps = [], [], 0
        with self._pipeline() as pipeline:
            carry, _ = self._steps(step, carry, pipeline, 2 * _NUM_AHEAD)  # Compiles, and fills the read-ahead.
            jax.block_until_ready(carry)
            for _ in range(NUM_RUNS):
                begin, used, num_steps = time.perf_counter(), time.process_time(), 0
                while time.perf_counter() - begin < self._seconds:
                    carry, stats = self._steps(step, carry, pipeline, 4 * _NUM_AHEAD)
                    num_steps += 4 * _NUM_AHEAD
                jax.block_until_ready(carry)
                elapsed = time.perf_counter() - begin
                stats.check()
                times.append(elapsed * 1e3 / num_steps)
                cores.append((time.process_time() - used) / elapsed)
            if self._trace is not None:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = options.host_tracer_level = 0  # else the host sets the pace
                with jax.profiler.trace(str(self._trace), profiler_options=options):
                    carry, _ = self._steps(step, carry, pipeline, TRACED_STEPS)
                    jax.block_until_ready(carry)
        num_threads = self._config.num_threads
        self._add(records.TRAIN, summary(times, num_steps), num_threads=num_threads, cores=float(np.median(cores)))
        return carry

    def _steps(self, step: Any, carry: tuple, pipeline: Iterator[Any], count: int) -> tuple[tuple, jaxsok.Stats]:
        """Dispatches steps, a few ahead of the devices; also returns the counts of the last step."""
        for batch, plan in itertools.islice(pipeline, count):
            state, params, opt_state, loss, stats = step(*carry, batch, plan)
            carry = (state, params, opt_state)
            self._losses.append(loss)
            if len(self._losses) > _NUM_AHEAD:
                jax.block_until_ready(self._losses.popleft())
        return carry, stats

    # ---------------------------------------------------------------------------------------------------------- parts

    def _measure_step(self, step: Any, carry: tuple, batches: list) -> tuple:
        """Measures the step without input, and the plans."""

        def take_step(carry, inputs):
            state, params, opt_state, loss, _ = step(*carry, *inputs)
            return (state, params, opt_state), loss

        timing, carry = Step(take_step, donates=True, is_compiled=True).measure(carry, batches, self._protocol)
        self._add(records.DLRM, timing)
        features = [batch.features for batch, _ in batches]
        capacities = [None if asked is None else asked.send_capacity for asked in batches[-1][1].asked or ()]
        send_capacity = [capacity or 1 for capacity in capacities] or None

        def plan(_, features):
            return self._collection.plan(features, send_capacity=send_capacity)

        timing, _ = Step(plan, donates=False, is_compiled=True).measure(None, features, self._protocol)
        self._add(records.PLAN, timing)
        return carry

    def _measure_tables(self, carry: tuple, batches: list) -> tuple:
        """Measures lookups alone, and with updates."""
        collection, plans = self._collection, [plan for _, plan in batches]

        def forward(state, plan):
            embeddings, state, _ = collection.lookup(state, plan)
            return state, embeddings

        def update(state, plan):
            embeddings, state, plan = collection.lookup(state, plan)
            return collection.update(state, plan, embeddings)

        state, *dense = carry
        for what, function in ((records.TRAINING, forward), (records.STEP, update)):
            timing, state = Step(function, donates=True).measure(state, plans, self._protocol)
            self._add(what, timing)
        return (state, *dense)

    def _measure_dense(self, loss: Any, tx: optax.GradientTransformation, carry: tuple, batches: list) -> None:
        """Measures the model with given embeddings: forward, backward, its optimizer."""
        state, *dense = carry
        inputs = [(jax.jit(self._collection.find)(state, batch.features)[0], batch) for batch, _ in batches[:1]]

        def dense_step(dense, inputs):
            (params, opt_state), (embeddings, batch) = dense, inputs
            value, gradients = jax.value_and_grad(loss, (0, 1))(params, embeddings, batch)
            updates, opt_state = tx.update(gradients[0], opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), (value, gradients[1])

        timing, _ = Step(dense_step, donates=True).measure(tuple(dense), inputs, self._protocol)
        self._add(records.DENSE, timing)


def _forget_pages(folder: pathlib.Path) -> None:
    """Writes the files' cached pages to disk and drops them, so that the next pass reads the disk."""
    os.sync()
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_parquet(path: pathlib.Path, source: "data.Source", batch_size: int, num_batches: int) -> None:
    """Writes the first batches as a Parquet file with a row group for each."""
    import pyarrow as pa
    import pyarrow.parquet

    writer = None
    for number in range(num_batches):
        columns = source.take(slice(number * batch_size, (number + 1) * batch_size))
        arrays = {
            name: pa.FixedSizeListArray.from_arrays(np.ascontiguousarray(column).reshape(-1), column.shape[1])
            if column.ndim > 1
            else pa.array(column)
            for name, column in columns.items()
        }
        table = pa.table(arrays)
        writer = writer or pa.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=batch_size)
    if writer is not None:
        writer.close()

"""From a reader's arrays to the device: packing by threads, the copies, and steps fed from raw batches.

Question: how many keys a second does the host pack, how near is that to a plain copy, and does it hide behind a step?
Workload: W1 (a column of int64 keys a feature, and the same as int32) and W5 (ragged, with lengths); uniform keys.
Limit:    as many bytes copied from array to array by as many threads; of the copies to a device, its link, which the
          pinned copy shows. The fed step is compared with the same step on batches packed before.
Command:  `python -m jaxsok bench --only input`
Last result: 2026-11-28, H200, 16 cores (docs/results/raw_batches.md): fed steps with `prefetch=0` take 1.02 and 0.98
          times those on batches packed before, W1's 1.4 times by the pipeline's thread; eight steps a call 1.30 and
          1.04 times those in calls of eight.

"Packed" is the time of `collection.batch`, which on a GPU does not wait for its copy; with int32 keys it includes the
dispatch of the program that widens them. "Fed" takes raw batches through `collection.pipeline`, one after the other:
by the thread that it has by default, and with `prefetch=0`. With eight steps a call (`steps_per_call=8`) the program is
a `lax.scan`, which returns no embeddings; batches that were packed before are then stacked before, too.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsok

from . import fill, records, workloads
from .bench_tiers import CALLS, PER_CALL
from .records import Record, Recorder
from .timing import Protocol, Timing, summary
from .workloads import Workload

WORKLOADS = ("W1", "W5")

THREADS = (1, 2, 4, 8, 16, 32)
"""Numbers of threads, up to the cores of the host."""

FED: dict[str, dict[str, int]] = {
    "fed": {},
    "fed, prefetch=0": {"prefetch": 0},
    f"fed{CALLS}": {"steps_per_call": PER_CALL},
}
"""Options of the pipeline by variant of the fed step."""

_WARM_UP_STEPS, _STEPS = 64, 256
"""Fed steps before any is timed, on a GPU, and those of a repetition: the first sixty of W5 took longer, while further
memory was pinned, and the first calls after a wait find other copies under way than those in the middle of training."""


def measure(recorder: Recorder, protocol: Protocol, seed: int, scale: float, is_quick: bool = False) -> None:
    """Measures packing, copies and the fed step of each workload."""
    num_cores = len(os.sched_getaffinity(0))
    threads = [number for number in THREADS if number <= num_cores][: 2 if is_quick else None]
    for name in WORKLOADS:
        if not recorder.has_time(f"input of {name}"):
            continue
        with recorder.attempt(f"input of {name}"):
            workload = workloads.WORKLOADS[name].scale(scale)
            workload = dataclasses.replace(workload, num_tables=2) if is_quick else workload
            id_sets = workloads.draw_batches(workload, "uniform", protocol.num_key_sets, seed)
            _measure_host(_Input(workload, recorder, protocol), id_sets, threads)
            _measure_steps(_Input(workload, recorder, protocol), id_sets)
        gc.collect()
        recorder.write()
    with recorder.attempt("paths from files"):
        from . import bench_paths  # It needs `jaxsok[data]`.

        bench_paths.measure(recorder, protocol, scale, is_quick)


@dataclasses.dataclass
class _Input:
    """A workload's raw batches, and the recorder of its measurements."""

    workload: Workload
    recorder: Recorder
    protocol: Protocol

    def collection(self, tables: Sequence[jaxsok.TableSpec] | None = None) -> jaxsok.Collection:
        """Returns a collection of the workload's features, of a declared size, over its tables or over small ones."""
        plain = fill.collection_of(dataclasses.replace(self.workload, num_rows=64), "sgd")
        most = self.workload.num_bags * self.workload.hotness
        return jaxsok.Collection(
            plain.tables if tables is None else tables,
            [dataclasses.replace(spec, max_keys=most) for spec in plain.features],
        )

    def raw(self, collection: jaxsok.Collection, ids: np.ndarray, dtype: str = "int64") -> dict[str, Any]:
        """Returns a reader's batch: a column, or keys with lengths, for each feature."""
        raw = fill.raw_of(collection, self.workload, ids)
        if self.workload.hotness == 1:
            return {name: keys.astype(dtype) for name, keys in raw.items()}
        lengths = np.full(self.workload.num_bags, self.workload.hotness)
        return {name: jaxsok.Bags(keys.reshape(-1).astype(dtype), lengths=lengths) for name, keys in raw.items()}

    def samples(self, function: Callable[[], Any]) -> Timing:
        """Times calls, each from an idle device, without waiting for the work that they began."""
        times = []
        for _ in range(max(5, 2 * self.protocol.repetitions)):
            begin = time.perf_counter()
            begun = function()
            times.append((time.perf_counter() - begin) * 1e3)
            jax.block_until_ready(begun)
        return summary(times[1:], 1)

    def add(self, what: str, subject: str, timing: Timing, variant: str, num_bytes: int, **more: Any) -> None:
        notes = {"part": "input", "num_threads": more.pop("num_threads", 0)}
        self.recorder.add(
            Record(
                self.workload.name,
                what,
                subject,
                timing,
                distribution="uniform",
                variant=variant,
                num_keys=self.workload.num_keys,
                moved_bytes=num_bytes,
                notes=notes,
                **more,
            )
        )


def _measure_host(given: _Input, id_sets: Sequence[np.ndarray], threads: Sequence[int]) -> None:
    """Measures packing by threads and by NumPy, copies of as many bytes, and the transfer to the device."""
    collection = given.collection()
    packer = collection.packer
    for dtype in ("int64", "int32") if given.workload.hotness == 1 else ("int64",):
        raws = itertools.cycle([given.raw(collection, ids, dtype) for ids in id_sets])
        is_narrow = dtype == "int32" and jax.default_backend() == "gpu"
        num_bytes = given.workload.num_keys * (4 if is_narrow else 8)
        for number in threads:
            packer.num_threads = number
            limit = given.samples(_copies(num_bytes, number))
            given.add(records.HOST_COPY, "limit", limit, dtype, num_bytes, num_threads=number)
            timing = given.samples(lambda raws=raws: collection.batch(next(raws)).features)
            given.add(records.PACK, "jaxsok", timing, dtype, num_bytes, num_threads=number, limit_ms=limit.ms)
        timing = given.samples(lambda raws=raws: packer.pack_by_numpy(next(raws), None, False).features)
        given.add(records.PACK, "plain", timing, dtype, num_bytes, by="NumPy", num_threads=1)
        if jax.default_backend() == "gpu":
            _measure_link(given, num_bytes, packer, dtype)


def _copies(num_bytes: int, num_threads: int) -> Callable[[], None]:
    """Copies from array to array by threads, each its own part."""
    source, target = np.arange(num_bytes // 8), np.zeros(num_bytes // 8, np.int64)
    pairs = list(zip(np.array_split(target, num_threads), np.array_split(source, num_threads), strict=True))
    if num_threads == 1:
        return lambda: np.copyto(target, source)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    return lambda: concurrent.futures.wait([pool.submit(np.copyto, *pair) for pair in pairs]) and None


def _measure_link(given: _Input, num_bytes: int, packer: Any, dtype: str) -> None:
    """Measures the copy to the device with its wait: from the memory of packed batches, and from other memory."""
    pinned = np.frombuffer(packer.host_buffers().take(num_bytes), np.int32)
    for kind, source in (("pinned", pinned), ("pageable", np.zeros(num_bytes // 4, np.int32))):
        timing = given.samples(lambda source=source: jax.block_until_ready(jax.device_put(source)))
        given.add(records.LINK, "limit", timing, f"{dtype}, {kind}", num_bytes)


def _measure_steps(given: _Input, id_sets: Sequence[np.ndarray]) -> None:
    """Measures a step on batches that were packed before, and steps fed from raw batches."""
    filled = fill.fill_tables(given.workload, given.workload.runs[0].optimizer)
    collection = given.collection(filled.collection.tables)
    with filled.view_as(given.workload, collection) as seen:
        raws = [given.raw(collection, ids) for ids in id_sets]
        gradients = seen.gradients(given.workload.num_bags)
        sets = [(collection.batch(raw).features, gradients) for raw in raws]
        packed = seen.measure(records.STEP, sets, given.protocol)
        given.add(records.STEP, "jaxsok", packed, "packed before", 0, optimizer=seen.optimizer)

        is_on_gpu = jax.default_backend() == "gpu"
        num_warm_up, num_steps = (
            (_WARM_UP_STEPS, _STEPS) if is_on_gpu else (3, max(10, given.protocol.dispatches(packed.ms * 1e-3)))
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def call(state: Any, features: Any, gradients: Any) -> tuple[Any, Any]:
            def step(state: Any, features: Any) -> tuple[Any, Any]:
                state, (_, stats) = seen.programs[records.STEP].function(state, (features, gradients))
                return state, stats

            return lax.scan(step, state, features)

        def measure(variant: str, features: Iterator[Any], per_call: int, limit_ms: float | None = None) -> float:
            """Records and returns the time of a step, of those that follow a warm-up."""

            def calls(count: int) -> float:
                outputs = None
                begin = time.perf_counter()
                for given_features in itertools.islice(features, count):
                    if per_call == 1:
                        inputs = given_features, gradients
                        seen.state, outputs = seen.programs[records.STEP].run(seen.state, inputs)
                    else:
                        seen.state, outputs = call(seen.state, given_features, gradients)
                jax.block_until_ready((seen.state, outputs))
                return time.perf_counter() - begin

            calls(math.ceil(num_warm_up / per_call))
            count = max(1, num_steps // per_call)
            times = [calls(count) * 1e3 / (count * per_call) for _ in range(given.protocol.repetitions)]
            timing = summary(times, count)
            num_bytes = 0 if limit_ms is None else 8 * given.workload.num_keys
            given.add(records.STEP, "jaxsok", timing, variant, num_bytes, optimizer=seen.optimizer, limit_ms=limit_ms)
            return timing.ms

        chosen = [sets[number % len(sets)][0] for number in range(PER_CALL)]
        stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *chosen)
        limits = {1: packed.ms, PER_CALL: measure(f"packed before{CALLS}", itertools.repeat(stack), PER_CALL)}
        for variant, options in FED.items():
            per_call = options.get("steps_per_call", 1)
            pipeline = iter(collection.pipeline(itertools.cycle(raws), **options))  # batches ahead are packed once
            measure(variant, (batch.features for batch, _ in pipeline), per_call, limits[per_call])
            pipeline.close()

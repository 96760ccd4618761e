"""Tables in host memory with a cache on the device: MLPerf's DLRM, and the same with all rows on the device.

Question: how much of the throughput is left when half, a tenth and a fiftieth of the rows fit the device, with and
          without lookups ahead, which bring the rows of the next batch while the model runs, and with eight steps a
          call? How much more do several devices train, each with a cache of a tenth of its rows?
Workload: M1 with 1,000,000 rows in each of its 26 tables, 8,192 samples a device, one key a bag, Zipf 1.05 over all
          rows; 128 floats with rowwise Adagrad, and 64 with Adam. Every step has keys of its own. All rows are in the
          tables, and in host memory, before anything is timed; they were filled from the rarest to the most frequent,
          so that the cache begins with about what it would hold after a long run. The model's other input lies on
          the device.
Limit:    the larger of the step on the device and the records that crossed the link over the rate of that path ("bring
          random rows": nearly all of them are read, and as many written).
Command:  `python -m jaxsok bench --only tiers [--devices 1,4]`
Last result: 2026-12-01, H200 (docs/results/host_memory.md): with lookups ahead 0.87, 0.73 and 0.54 of the device's
          throughput.
"""

import collections
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok
from jaxsok import tiers
from jaxsok.features import Batch
from jaxsok.pipeline import LookAhead, Pipeline
from jaxsok.types import TIER_COUNTERS

from . import dlrm, fill, records, workloads
from .bench_exchange import Packed, devices_at_hand, mesh_of
from .records import Record, Recorder
from .timing import Protocol, Timing, summary
from .workloads import SCATTER, Workload

RUNS = (("M1", "rowwise_adagrad"), ("M1-64", "adam"))

NUM_ROWS = 1_000_000
"""Rows of each of the 26 tables."""

SHARES = (None, 0.5, 0.1, 0.02)
"""Shares of the rows that the cache has; None: all rows lie on the device."""

SHARE_OF_MESHES = 0.1
"""The same on several devices."""

NUM_BATCHES = 320
"""Batches with keys of their own: a quarter fills caches, and another is for each way of running. On several devices
half as many."""

PER_CALL = 8
"""Steps of a call, where a call has several."""

CALLS_UNDER_WAY = 3
"""Calls that the device has while the host waits for the one before them."""

AHEAD, CALLS = ", looked up ahead", ", eight steps a call"

_FILL_IDS = 1 << 14
"""Ids of each table in one step that fills."""


def measure(
    recorder: Recorder,
    protocol: Protocol,
    seed: int,
    scale: float,
    is_quick: bool = False,
    devices: Sequence[int] = (1,),
) -> None:
    """Measures each optimizer on one device, first with all rows there; then the first optimizer on several devices."""
    for num_devices in devices_at_hand(devices):
        for name, optimizer in RUNS[: 1 if is_quick or num_devices > 1 else None]:
            workload = dataclasses.replace(workloads.on_mesh(name), num_rows=NUM_ROWS).scale(scale)
            workload = workload.on_devices(num_devices, "weak")
            num_batches = 256 if is_quick else NUM_BATCHES // min(num_devices, 2)
            ids = workloads.draw_batches(workload, "zipf1.05", num_batches, seed)
            on_device: dict[int, Timing] = {}
            for share in SHARES if num_devices == 1 else (None, SHARE_OF_MESHES):
                if recorder.has_time(f"tiers of {name} at {share}"):
                    with recorder.attempt(f"{name} with a cache of {share}"):
                        bench = _Bench(workload, optimizer, share, recorder, num_devices)
                        on_device |= bench.measure(ids, on_device)
                        del bench
                    gc.collect()
                    recorder.write()


class _Bench:
    """One filled table group, and the model."""

    def __init__(self, workload: Workload, optimizer: str, share: float | None, recorder: Recorder, num_devices: int):
        self._workload, self._optimizer, self._share, self._recorder = workload, optimizer, share, recorder
        self._num_devices = num_devices
        memory = None if share is None else jaxsok.HostMemory(device_rows=share)
        mesh = None if num_devices == 1 else mesh_of(num_devices)
        self._collection = fill.collection_of(workload, optimizer, mesh, memory=memory)
        begin = time.perf_counter()
        state = self._collection.init(seed=0)
        recorder.say(f"{workload.name}, cache of {share}: tables made in {time.perf_counter() - begin:.1f} s")
        begin, step = time.perf_counter(), jax.jit(self._filling, donate_argnums=0)
        for first in reversed(range(0, workload.num_rows, min(_FILL_IDS, workload.num_rows))):
            first = max(0, min(first, workload.num_rows - _FILL_IDS))
            ranks = np.arange(first, first + min(_FILL_IDS, workload.num_rows))
            ids = (ranks * SCATTER % workload.num_rows).astype(np.int32)
            same = np.broadcast_to(ids[None, :, None], (workload.num_tables, ids.size, 1))
            state = step(state, fill.pack(self._collection, workload, same))
        self._state = jax.block_until_ready(state)
        recorder.say(f"{workload.num_tables * workload.num_rows:,} rows filled in {time.perf_counter() - begin:.1f} s")

    def _filling(self, state: jaxsok.State, features: jaxsok.Features) -> jaxsok.State:
        """Makes rows and writes them, as a step with gradients of zero does."""
        embeddings, state, plan = self._collection.lookup(state, features)
        return self._collection.update(state, plan, jax.tree.map(jnp.zeros_like, embeddings))[0]

    def measure(self, ids: list[np.ndarray], on_device: Mapping[int, Timing]) -> dict[int, Timing]:
        """Times steps in each way; `on_device` has the times with all rows on the device, by the steps of a call.

        Returns these times, or nothing.
        """
        workload, collection = self._workload, self._collection
        rest = {
            "dense": np.random.default_rng(0).random((workload.num_bags, dlrm.NUM_DENSE), np.float32),
            "label": (np.arange(workload.num_bags) % 2).astype(np.float32),
        }
        if self._num_devices == 1:  # the host's copies would set the pace of the steps that are compared
            rest = jax.device_put(rest)
        batches = [collection.batch(fill.raw_of(collection, workload, step_ids) | rest) for step_ids in ids]
        carry, num_each = (self._state, *dlrm.init_for(collection, workload.dim)), len(batches) // 4
        del self._state
        step = dlrm.step_of(collection)
        for batch, plan in self._pairs(batches[:num_each], LookAhead(), 1):
            carry, (loss, stats) = step(carry, plan, batch["dense"], batch["label"])
        stats.check()
        if not np.isfinite(float(loss)):
            raise RuntimeError(f"{workload.name}: the loss is {float(loss)}.")
        ways = {"": (LookAhead(), 1)}
        if self._share is None:
            ways |= {CALLS: (LookAhead(), PER_CALL)}
        else:
            ways |= {AHEAD: (LookAhead(1), 1), AHEAD + CALLS: (LookAhead(1), PER_CALL)}
        timings: dict[str, tuple[Timing, dict[str, float]]] = {}
        for number, (name, (ahead, per_call)) in enumerate(ways.items(), start=1):
            of_way = batches[number * num_each : (number + 1) * num_each]
            carry, *timings[name] = self._time(carry, of_way, ahead, per_call)
        rate = None
        if self._share is not None and self._num_devices == 1:
            bring, moved_alone = self._measure_bring(carry[0])
            self._add(records.BRING, bring, moved_alone)
            rate = sum(moved_alone[name] for name in ("num_fetched", "num_written")) / bring.ms
        for name, (steps, counts) in timings.items():
            limit_ms, more = None, {}
            if self._share is not None and (of_device := on_device.get(ways[name][1])):
                num_moved = counts["num_fetched"] + counts["num_written"]
                limit_ms = None if rate is None else max(num_moved / rate, of_device.ms)
                more["throughput"] = of_device.ms / steps.ms
            self._add(records.DLRM, steps, counts, limit_ms, name, **more)
        return {ways[name][1]: steps for name, (steps, _) in timings.items()} if self._share is None else {}

    def _pairs(self, batches: Sequence[Batch], ahead: LookAhead, per_call: int) -> Iterator[tuple]:
        return iter(Pipeline(Packed(self._collection), batches, ahead=ahead, prefetch=0, steps_per_call=per_call))

    def _time(
        self, carry: Any, batches: Sequence[Batch], ahead: LookAhead, per_call: int
    ) -> tuple[Any, Timing, dict[str, float]]:
        """Times steps with keys of their own; also returns each step's moved rows. The first of two groups compiles.

        A time is between the ends of two groups of steps. The device has the next steps before a group ends, as it has
        in training: it never waits for the host to see that a group has ended.
        """
        pairs = self._pairs(batches, ahead, per_call)
        step = (dlrm.step_of if per_call == 1 else dlrm.call_of)(self._collection)

        def run(num_steps: int | None) -> Iterator[Any]:
            nonlocal carry
            for batch, plan in itertools.islice(pairs, num_steps):
                carry, out = step(carry, plan, batch["dense"], batch["label"])
                yield out

        num_calls = len(batches) // per_call
        size = max(1, num_calls // 8)
        jax.block_until_ready((list(run(2 * size)), carry))
        num_timed = (num_calls - 2 * size - CALLS_UNDER_WAY - 1) // size * size  # one is left for the end
        before = self._counters(carry[0])
        under_way, ends = collections.deque(run(CALLS_UNDER_WAY)), [time.perf_counter()]
        for number, out in enumerate(run(num_timed), start=1):
            under_way.append(out)
            jax.block_until_ready(under_way.popleft())
            if number % size == 0:
                ends.append(time.perf_counter())
        jax.block_until_ready((under_way, carry))
        times = [(end - start) * 1e3 / (size * per_call) for start, end in itertools.pairwise(ends[1:])]
        num_steps = (num_timed + CALLS_UNDER_WAY) * per_call
        moved = {name: (count - before[name]) / num_steps for name, count in self._counters(carry[0]).items()}
        collections.deque(run(None), maxlen=0)  # the last step leaves nothing in flight
        return carry, summary(times, size * per_call), moved

    def _counters(self, state: jaxsok.State) -> dict[str, int]:
        (store,) = state.stores
        return {
            name: int(count)
            for tier in store.tier
            for name, count in zip(TIER_COUNTERS, self._sum_counters(tier.counters), strict=True)
            if name in ("num_hits", "num_fetched", "num_written", "num_ahead")
        }

    def _sum_counters(self, counters: jax.Array) -> np.ndarray:
        return np.asarray(counters).reshape(self._num_devices, -1).sum(axis=0, dtype=np.int64)

    def _measure_bring(self, state: jaxsok.State) -> tuple[Timing, dict[str, float]]:
        """Times bringing random rows alone, as many as a batch has keys."""
        (spec,), (store,) = self._collection.stores, state.stores
        num_keys, num_rows = self._workload.num_keys, self._workload.num_rows * self._workload.num_tables
        rng = np.random.default_rng(1)
        row_ids = [jnp.asarray(rng.integers(0, num_rows, num_keys), jnp.uint32) for _ in range(12)]
        bring = jax.jit(lambda store, row_ids: tiers.bring_rows(spec, store, state.seed, row_ids)[0], donate_argnums=0)
        store = jax.block_until_ready(bring(store, row_ids[0]))
        state = dataclasses.replace(state, stores=(store,))
        before, times = self._counters(state), []
        for ids in row_ids[1:]:
            start = time.perf_counter()
            store = jax.block_until_ready(bring(store, ids))
            times.append((time.perf_counter() - start) * 1e3)
        state = dataclasses.replace(state, stores=(store,))
        moved = {name: (count - before[name]) / len(times) for name, count in self._counters(state).items()}
        return summary(times, 1), moved

    def _add(
        self,
        what: str,
        timing: Timing,
        moved: dict[str, float],
        limit_ms: float | None = None,
        suffix: str = "",
        **more: Any,
    ) -> None:
        notes = {} if self._num_devices == 1 else {"num_devices": self._num_devices}
        variant = "all on the device" if self._share is None else f"{self._share:.0%} in the cache"
        variant += suffix
        if self._num_devices > 1:
            variant += f", {self._num_devices} devices"
        self._recorder.add(
            Record(
                self._workload.name,
                what,
                "jaxsok",
                timing,
                distribution="zipf1.05" if what == records.DLRM else "uniform",
                optimizer=self._optimizer,
                variant=variant,
                num_keys=self._workload.num_keys,
                limit_ms=limit_ms,
                notes={"part": "tiers", **notes, **{name: round(count) for name, count in moved.items()}, **more},
            )
        )

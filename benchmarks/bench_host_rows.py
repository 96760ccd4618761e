"""Tables in host memory over a long life: the speed of imports, and whether a table that outgrew its cache is right.

Question: rows a minute of `import_table` into a table in host memory; and whether 2,000 steps with growth, eviction, a
          checkpoint and a restore onto all devices leave the bits that the table in host memory has.
Workload: one table of 128 floats with rowwise Adagrad. Import: 40 M rows in chunks of 1 M, a cache of a tenth.
          Endurance: a cache of a third of at most 12 M rows, 3 M at first; each step asks for 33,600 keys, a quarter of
          them new, the others of the 8 M that came last; the least recently used rows leave.
Limit:    for the import a copy of the same arrays to the device.
Command:  `python -m jaxsok bench --only host_rows`
Last result: 2026-11-24, H200 (docs/results/host_memory.md): 186 M rows a minute are imported; after 2,000 steps, a
          checkpoint and a restore onto the device the bits are the same.
"""

import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxsok
from jaxsok import checkpoint
from jaxsok.types import TIER_COUNTERS

from . import records, workloads
from .bench_exchange import mesh_of
from .bench_scale import share_of_memory
from .fill import AXIS, optimizer_of
from .records import Record, Recorder
from .timing import summary

DIM = 128
OPTIMIZER = "rowwise_adagrad"

IMPORTED_ROWS = 40_000_000
CHUNK_ROWS = 1_000_000
IMPORT_CACHE = 0.1

MOST_ROWS = 12_000_000
CACHE_PART, FIRST_PART = 3, 4
"""Rows of which there are at most so many times as many as in the cache, and as at first."""
NUM_STEPS, QUICK_STEPS = 2000, 120
NEW_SHARE = 1.4
"""New keys of all steps, as a share of the rows that there may be."""
NEW_PART = 4
"""One key in this many is new."""
NUM_COMPARED = 20
"""Batches whose embeddings are compared at the end."""


def measure(recorder: Recorder, seed: int, scale: float, is_quick: bool = False) -> None:
    """Measures the import and the long life."""
    if recorder.has_time("host rows: import"):
        with recorder.attempt("host rows: import"):
            _import(recorder, max(4096, round(IMPORTED_ROWS * scale)), seed)
    if recorder.has_time("host rows: endurance"):
        with recorder.attempt("host rows: endurance"):
            num_rows, num_steps = max(1 << 14, round(MOST_ROWS * scale)), QUICK_STEPS if is_quick else NUM_STEPS
            _Life(recorder, num_rows, num_steps, seed).measure()


def _collection(mesh: Mesh | None = None, **options: Any) -> jaxsok.Collection:
    """Returns a collection of one table, and a feature of single keys."""
    table = jaxsok.TableSpec("items", dim=DIM, optimizer=optimizer_of(OPTIMIZER), **options)
    axis = None if mesh is None else AXIS
    return jaxsok.Collection([table], [jaxsok.FeatureSpec("item", table="items")], mesh=mesh, axis=axis)


def _keys(ids: np.ndarray) -> np.ndarray:
    return workloads.mix(0, ids).view(np.uint64)[..., 0]


def _import(recorder: Recorder, num_rows: int, seed: int) -> None:
    """Imports chunks of distinct keys, and reads some of the rows."""
    size = min(CHUNK_ROWS, num_rows)
    num_rows -= num_rows % size  # Chunks of another size would compile during the timing.
    rows = np.random.default_rng(seed).random((size, DIM), np.float32)

    def chunks() -> Iterator[jaxsok.Records]:
        for begin in range(0, num_rows, size):
            ids = np.arange(begin, min(begin + size, num_rows))
            yield jaxsok.Records(_keys(ids), rows[: ids.size])

    collection = _collection(capacity=num_rows, memory=jaxsok.HostMemory(device_rows=IMPORT_CACHE))
    begin = time.perf_counter()
    state = jax.block_until_ready(collection.init(seed=seed))
    recorder.say(f"host rows: a table of {num_rows:,} rows made in {time.perf_counter() - begin:.1f} s")
    state = collection.import_table(state, "items", next(chunks()))  # Compiles.
    begin = time.perf_counter()
    state = jax.block_until_ready(collection.import_table(state, "items", chunks()))
    seconds = time.perf_counter() - begin
    link_ms = []
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(jax.device_put(rows))
        link_ms.append((time.perf_counter() - begin) * 1e3)
    found = collection.num_rows(state)["items"]
    some = np.random.default_rng(seed + 1).integers(0, num_rows, 4096)
    read, has_row = collection.rows_of(state, "items", _keys(some))
    if found != num_rows or not np.all(has_row) or not np.array_equal(read, rows[some % size]):
        raise RuntimeError(f"host rows: {found} rows after the import, wanted {num_rows}, and the rows imported.")
    recorder.add(
        Record(
            "host rows",
            records.IMPORT,
            "jaxsok",
            summary([seconds * 1e3], 1),
            optimizer=OPTIMIZER,
            variant=f"{IMPORT_CACHE:.0%} in the cache",
            num_keys=num_rows,
            moved_bytes=num_rows * (4 * DIM + 8),
            limit_ms=min(link_ms) * num_rows / size,
            notes={"part": "host_rows", "rows_per_minute": round(num_rows / seconds * 60)},
        )
    )


class _Life:
    """A table that grows, evicts, is saved, and is restored onto all devices."""

    def __init__(self, recorder: Recorder, most_rows: int, num_steps: int, seed: int):
        self._recorder, self._most_rows, self._num_steps, self._seed = recorder, most_rows, num_steps, seed
        num_new = round(NEW_SHARE * most_rows / num_steps)
        self._num_new = num_new + -num_new % jax.device_count()  # all devices share the batches in the end
        self._options = {"max_capacity": most_rows, "eviction": jaxsok.policies.LeastRecentlyUsed()}

    def _ids(self, step: int) -> np.ndarray:
        """Returns the ids of a step: new ids, then some of the previous ones."""
        end = (step + 1) * self._num_new
        rng = np.random.default_rng([self._seed, step])
        others = rng.integers(max(0, end - 2 * self._most_rows // CACHE_PART), end, (NEW_PART - 1) * self._num_new)
        return np.concatenate([np.arange(end - self._num_new, end), others])

    def measure(self) -> None:
        """Times all steps; raises if the restored table has other bits."""
        recorder, num_steps = self._recorder, self._num_steps
        collection = _collection(
            capacity=self._most_rows // FIRST_PART,
            memory=jaxsok.HostMemory(device_rows=self._most_rows // CACHE_PART),
            **self._options,
        )

        def step(state: jaxsok.State, features: jaxsok.Features) -> tuple[jaxsok.State, jaxsok.Stats]:
            embeddings, state, plan = collection.lookup(state, features)
            gradients = jax.tree.map(lambda rows: 0.01 * rows + 1e-3, embeddings)
            return collection.update(state, plan, gradients)

        jitted = jax.jit(step, donate_argnums=0)
        state, begin = collection.init(seed=self._seed), time.perf_counter()
        times, stats, size = [], None, max(1, num_steps // 10)
        for number in range(num_steps):
            features = collection.batch({"item": _keys(self._ids(number))}).features
            state, stats = jitted(collection.grow(state, features), features)
            if (number + 1) % size == 0:
                jax.block_until_ready(stats)
                times.append((time.perf_counter() - begin) * 1e3 / size)
                begin = time.perf_counter()
        if stats is not None:
            stats.check()
        (tier,) = state.stores[0].tier
        counters = dict(zip(TIER_COUNTERS, np.asarray(tier.counters).tolist(), strict=True))
        moved = {name: counters[name] for name in ("num_hits", "num_fetched", "num_written")}
        growth = {"num_grown": collection.growth.num_grown, "num_evictions": collection.growth.num_evictions}
        recorder.say(f"host rows: {growth}, {moved}")
        if not all([*growth.values(), moved["num_fetched"], moved["num_written"]]):
            raise RuntimeError(f"host rows: {growth}, {moved}: a life without growth, evictions or use of the link.")
        seconds = self._compare(collection, state)
        recorder.add(
            Record(
                "host rows",
                records.LIFE,
                "jaxsok",
                summary(times, size),
                optimizer=OPTIMIZER,
                variant=f"1/{CACHE_PART} in the cache",
                num_keys=NEW_PART * self._num_new,
                notes={"part": "host_rows", **growth, **moved, **seconds},
            )
        )

    def _compare(self, collection: jaxsok.Collection, state: jaxsok.State) -> dict[str, float]:
        """Saves, restores into a table on the devices, and compares embeddings; returns the seconds of both calls."""
        needed = 2 * self._most_rows * 4 * (DIM + 16)
        if needed > share_of_memory():
            self._recorder.skip("host rows: restore", f"a table on the device takes {needed} bytes")
            return {}
        num_devices = len(jax.devices())
        plain = _collection(
            mesh_of(num_devices) if num_devices > 1 else None, capacity=self._most_rows, **self._options
        )
        with tempfile.TemporaryDirectory() as folder:
            path, begin = pathlib.Path(folder, "full"), time.perf_counter()
            checkpoint.export_full(path, collection, state)
            saved_s, begin = time.perf_counter() - begin, time.perf_counter()
            restored = jax.block_until_ready(checkpoint.load(path, plain))
            restored_s = time.perf_counter() - begin
        for number in range(max(0, self._num_steps - NUM_COMPARED), self._num_steps):
            raw = {"item": _keys(self._ids(number))}
            found, _ = collection.find(state, collection.batch(raw).features)
            also, _ = plain.find(restored, plain.batch(raw).features)
            first, second = (np.asarray(rows["item"]).view(np.uint32) for rows in (found, also))
            if not np.array_equal(first, second) or not np.all(np.any(first, axis=1)):
                raise RuntimeError(f"host rows: embeddings of step {number} differ after the restore, or are missing.")
        seconds = {"saved_s": round(saved_s, 2), "restored_s": round(restored_s, 2)}
        return {**seconds, "restored_onto_devices": num_devices}

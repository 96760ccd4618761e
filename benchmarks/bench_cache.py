"""Rows in host memory, a tenth of them in a cache on the device: lookups by hit rate, compared with the link.

Question: how many keys a second does a lookup through the cache read, how long does one take, and how near is that to
          what the link and the device's memory give?
Workload: one table of 8,000,000 rows of 128 floats; 65,536 and 4,096 distinct keys a lookup, of which 50, 75, 90, 99
          and 100% are in the cache; each miss is fetched, so answers are exact, and inserted, so another row leaves.
Limit:    the rows of the misses at the speed of a copy from pinned host memory, and those of the hits at the speed of
          a copy on the device. For answers in host memory: the hits' rows at the speed of a copy to it, or the misses'
          rows at that of a copy from it, whichever takes longer, since both can go on at the same time.
Command:  `python -m jaxsok bench --only cache`
Last result: docs/results/serving.md (one H200, commit 58f74ac).

"To the device" leaves the rows there, for a model: the rows of the distinct keys as tables of their own, and one lookup
of the keys in these. "To the host" gives NumPy arrays. Keys begin on the host in both. Time is that of a caller who
waits for each lookup; keys/s also with several threads, each of which waits for its own. `on_device_ms` is of lookups
in a row whose keys are on the device. "That reads host memory": no
cache, but frozen tables with a tenth of the rows on the device, and a kernel that reads the others over the link
(`device_share`); the hits are keys of the former. "From C": the same tables in a folder, opened and read through
jaxsok.h (`frozen_c.py`), without JAX, by the program that calls NVE. Peers: `jnp.take` on an array
that has all rows on the device, given row numbers; FBGEMM's UVM cache (`fbgemm_cache.py`) and NVE's (`nve.py`) on the
same ids.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok import Records
from jaxsok.kernels.reader import Asked, Reader, Stores
from jaxsok.serving.backing import HostRows
from jaxsok.serving.cache import DeviceCache
from jaxsok.serving.frozen import SEED, FrozenSpec, FrozenStore, FrozenTable, FrozenTables, SizedRecords, freeze_records
from jaxsok.serving.frozen_files import export_frozen
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.serving.row_map import RowMap, host_device

from . import frozen_c, limits, nve, records, workloads
from .records import Record, Recorder
from .timing import Protocol, summary
from .workloads import CACHE_DIM, CACHE_HIT_RATES, CACHE_ROWS, CACHE_SHARE, CachedIds

TABLE = "items"
THREADS = 4
LOOKUPS, QUICK_LOOKUPS = 40, 4
"""Lookups that are timed one by one, at most."""
LATENCY_S = 2.0
THREAD_KEYS, QUICK_THREAD_KEYS = 1 << 22, 1 << 15
"""Keys that each thread looks up, where several look up at the same time: in at most `MOST_LOOKUPS` lookups."""
MOST_LOOKUPS = 300
THREADS_S = 3.0
"""After so many seconds a thread begins no lookup."""
_FILL_ROWS = 1 << 20


@dataclasses.dataclass
class Filled:
    """The rows in host memory, and the speeds of this device."""

    source: HostRows
    rows: np.ndarray
    """The same rows, in the order of their ids."""
    copy_gb_s: float
    to_device_gb_s: float
    to_host_gb_s: float

    def link_ms(self, num_misses: int) -> float:
        """Returns the time of the rows of the misses on the link."""
        return num_misses * self.rows.shape[1] * limits.FLOAT_BYTES / self.to_device_gb_s * 1e-6

    def limit_ms(self, num_hits: int, num_misses: int, to_host: bool) -> float:
        """Returns the least time of a lookup: see `Limit` above.

        Example:
          >>> filled = Filled(None, np.zeros((1, 128), np.float32), 2000.0, 50.0, 25.0)
          >>> [round(filled.limit_ms(1000, 1000, to_host), 5) for to_host in (False, True)]
          [0.01075, 0.02048]
        """
        row_bytes = self.rows.shape[1] * limits.FLOAT_BYTES
        hits, misses_ms = num_hits * row_bytes * 1e-6, self.link_ms(num_misses)
        if to_host:
            return max(hits / self.to_host_gb_s, misses_ms)
        return misses_ms + 2 * hits / self.copy_gb_s


def measure(
    recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, scale: float, is_quick: bool = False
) -> None:
    """Measures each number of keys by hit rate, the peer on the device, and the fetch of misses by itself."""
    to_device, to_host, num_bytes = limits.link_gigabytes_per_s(protocol)
    for what, timing in ((records.LINK, to_device), (records.TO_HOST, to_host)):
        recorder.add(
            Record("cache", what, "limit", timing, variant="pinned", moved_bytes=num_bytes, notes={"part": "cache"})
        )
    num_rows = max(4096, round(CACHE_ROWS * scale))
    begin = time.perf_counter()
    source, rows = fill(num_rows)
    filled = Filled(source, rows, copy_gb_s, *(num_bytes / timing.ms * 1e-6 for timing in (to_device, to_host)))
    recorder.say(f"cache: {num_rows:,} rows in host memory in {time.perf_counter() - begin:.1f} s")
    # A threshold above 1: each lookup waits for the rows that it misses.
    with DeviceCache(source, fraction=CACHE_SHARE, hit_rate_threshold=2.0) as cache:
        ids = CachedIds(num_rows, cache.capacity, seed)
        sizes = workloads.cache_keys(scale)
        runs = [_Run(recorder, filled, cache, ids, num_keys, seed, is_quick) for num_keys in sizes]
        for run in runs:
            run.warm_up()
            for hit_rate in CACHE_HIT_RATES[:: 2 if is_quick else 1]:
                for to_host in (False, True):
                    run.cached(hit_rate, to_host)
                recorder.write()
    with recorder.attempt("cache: rows that the device reads in host memory"):
        tables = freeze(rows)
        for run in runs:
            for hit_rate in CACHE_HIT_RATES[:: 2 if is_quick else 1]:
                for to_host in (False, True):
                    run.from_host(tables, hit_rate, to_host)
            recorder.write()
        with opened_from_c(tables, rows, max(sizes)) as read:
            for each in itertools.product(CACHE_HIT_RATES[:: 2 if is_quick else 1], (False, True)):
                for run in runs:
                    run.from_c(read, *each)
            recorder.write()
        del tables
    for run in runs:
        with recorder.attempt(f"cache {run.num_keys} keys, without a cache"):
            run.fetch()
            run.take()


def fill(num_rows: int) -> tuple[HostRows, np.ndarray]:
    """Returns rows in host memory; key `mix(0, i)` has row i."""
    row_map = RowMap(1, num_rows)
    for first in range(0, num_rows, _FILL_ROWS):
        row_map.place(0, keys_of(np.arange(first, min(num_rows, first + _FILL_ROWS))))
    spec = FrozenSpec.of([FrozenTable(TABLE, CACHE_DIM)])
    index, counters = row_map.index(host_device())
    with jax.default_device(host_device()):
        rows = limits.varied_floats((num_rows, CACHE_DIM))
    tables = FrozenTables((FrozenStore(index, counters, rows),), spec)
    return HostRows(tables, (row_map,)), np.asarray(rows)


def freeze(rows: np.ndarray) -> FrozenTables:
    """Freezes the rows of `fill` with a share of them on the device: the first, since no uses are known."""
    firsts = range(0, len(rows), _FILL_ROWS)
    chunks = _Chunks(rows, [slice(first, min(len(rows), first + _FILL_ROWS)) for first in firsts])
    table = FrozenTable(TABLE, CACHE_DIM)
    return freeze_records([(table, SizedRecords(len(rows), chunks))], device_share=CACHE_SHARE)[0]


@contextlib.contextmanager
def opened_from_c(tables: FrozenTables, rows: np.ndarray, max_keys: int) -> Iterator[frozen_c.FrozenRows]:
    """Writes what `freeze` made into a folder, and opens it as a program in C does."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tables")
        export_frozen(path, tables)
        source = frozen_c.Source(path, rows, keys_of(np.arange(len(rows))), len(tables.stores[0].rows))
        read = frozen_c.FrozenRows(source, max_keys, jax.default_backend())
        try:
            yield read
        finally:
            read.close()


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Records of rows, in pieces."""

    rows: np.ndarray
    pieces: list[slice]

    def __iter__(self) -> Iterator[Records]:
        return (Records(keys_of(np.arange(piece.start, piece.stop)), self.rows[piece]) for piece in self.pieces)


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Returns the keys of rows, uint64."""
    return workloads.mix(0, ids).view(np.uint64)[:, 0]


@jax.jit
def _look_up(tables: FrozenTables, words: jax.Array) -> jax.Array:
    return lookup(tables, {TABLE: LookupInput(TABLE, words)})[TABLE]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Lookups of one number of keys."""

    recorder: Recorder
    filled: Filled
    cache: DeviceCache
    ids: CachedIds
    num_keys: int
    seed: int
    is_quick: bool

    def warm_up(self) -> None:
        """Compiles what lookups of this number of keys need."""
        for as_tables in (False, True):
            self.cache.warm_up([{TABLE: self.num_keys}], as_tables=as_tables)

    def cached(self, hit_rate: float, to_host: bool) -> None:
        """Measures lookups through the cache, unless there is no time."""
        label = f"cache {self.num_keys} keys, {hit_rate:.0%}, to the {'host' if to_host else 'device'}"
        if self.recorder.has_time(label):
            with self.recorder.attempt(label):
                self._measure(hit_rate, to_host)

    def _call(self, keys: np.ndarray, to_host: bool) -> Any:
        if to_host:
            return self.cache.lookup({TABLE: keys}).rows[TABLE]
        tables, _ = self.cache.lookup_tables({TABLE: keys})
        return jax.block_until_ready(_look_up(tables, keys.view(np.uint32).reshape(-1, 2)))

    def _measure(self, hit_rate: float, to_host: bool) -> None:
        cache = self.cache
        for number in range(self.ids.num_warm_ups(self.num_keys, hit_rate)):
            ids = self.ids.take(self.num_keys, hit_rate)
            got = self._call(keys_of(ids), to_host)
            if number == 0 and not np.array_equal(np.asarray(got), self.filled.rows[ids]):
                raise RuntimeError("bench_cache: a lookup gave other rows than those of its keys.")
        before, ms, begin = cache.stats(), [], time.perf_counter()
        for _ in range(QUICK_LOOKUPS if self.is_quick else LOOKUPS):
            keys = keys_of(self.ids.take(self.num_keys, hit_rate))
            start = time.perf_counter()
            self._call(keys, to_host)
            ms.append((time.perf_counter() - start) * 1e3)
            if time.perf_counter() - begin > LATENCY_S and len(ms) >= 5:
                break
        after = cache.stats()
        seen = (after.hits - before.hits) / (after.distinct - before.distinct)
        wanted = round(hit_rate * self.num_keys) / self.num_keys
        if abs(seen - wanted) > 0.02:
            raise RuntimeError(f"bench_cache: got a hit rate of {seen:.3f}, wanted {wanted:.3f}.")
        keys_per_s = self._by_threads(hit_rate, to_host)
        num_hits = round(seen * self.num_keys)
        limit_ms = self.filled.limit_ms(num_hits, self.num_keys - num_hits, to_host)
        link_ms = self.filled.link_ms(self.num_keys - num_hits)
        notes = {"hit_rate": seen, "threads_keys_per_s": keys_per_s, "link_ms": link_ms}
        self._add("jaxsok", ms, hit_rate, to_host, limit_ms, **notes)

    def from_host(self, tables: FrozenTables, hit_rate: float, to_host: bool) -> None:
        """Measures lookups in tables some of whose rows lie in host memory."""
        num_on_device, (device,) = tables.stores[0].rows.shape[0], tables.stores[0].rows.devices()
        words, seed = jax.device_put((tables.spec.words, SEED), device)
        reader, stores = Reader([device]), Stores([(tables.stores, words, seed)])
        asked = Asked([(0, 0)], [CACHE_DIM], [1])
        ms, num_hits, begin = [], 0, time.perf_counter()
        for number in range(5 + (QUICK_LOOKUPS if self.is_quick else LOOKUPS)):
            ids = self.ids.take(self.num_keys, hit_rate)
            keys = keys_of(ids)
            start = time.perf_counter()
            if to_host:
                (got,), _ = reader.lookup(stores, asked, [keys])
            else:
                got = jax.block_until_ready(_look_up(tables, keys.view(np.uint32).reshape(-1, 2)))
            took = (time.perf_counter() - start) * 1e3
            if number == 0 and not np.array_equal(np.asarray(got), self.filled.rows[ids]):
                raise RuntimeError("bench_cache: a lookup gave other rows than those of its keys.")
            if number >= 5:
                ms.append(took)
                num_hits += int((ids < num_on_device).sum())
            if time.perf_counter() - begin > LATENCY_S and len(ms) >= 5:
                break
        num_hits //= len(ms)
        limit_ms = self.filled.limit_ms(num_hits, self.num_keys - num_hits, to_host)
        link_ms = self.filled.link_ms(self.num_keys - num_hits)
        notes = {"hit_rate": num_hits / self.num_keys, "link_ms": link_ms}
        if not to_host:
            notes["on_device_ms"] = self._in_a_row(tables, hit_rate)
        self._add("jaxsok", ms, hit_rate, to_host, limit_ms, what=records.FROM_HOST, **notes)

    def from_c(self, read: frozen_c.FrozenRows, hit_rate: float, in_place: bool) -> None:
        """Measures lookups through jaxsok.h, with keys of pinned memory and rows for the device."""
        found = nve.measure(read, self.ids, self.num_keys, hit_rate, in_place)
        num_hits = round(found["hit_rate"] * self.num_keys)
        limit_ms = self.filled.limit_ms(num_hits, self.num_keys - num_hits, False)
        link_ms = self.filled.link_ms(self.num_keys - num_hits)
        ms = found.pop("samples_ms")
        by = nve.IN_PLACE if in_place else ""
        self._add("jaxsok", ms, hit_rate, False, limit_ms, what=records.FROM_C, by=by, link_ms=link_ms, **found)

    def _in_a_row(self, tables: FrozenTables, hit_rate: float) -> float:
        """Returns the time of one of many lookups in a row, whose keys are on the device already."""
        asked = [self.ids.take(self.num_keys, hit_rate) for _ in range(QUICK_LOOKUPS if self.is_quick else LOOKUPS)]
        words = [jax.device_put(keys_of(ids).view(np.uint32).reshape(-1, 2)) for ids in asked]
        for _ in range(2):  # the first warms up
            begin = time.perf_counter()
            found = [_look_up(tables, of_one) for of_one in words]
            jax.block_until_ready(found)
        return (time.perf_counter() - begin) * 1e3 / len(words)

    def _by_threads(self, hit_rate: float, to_host: bool) -> float:
        """Returns the keys per second of several threads, each with keys of its own that were drawn before."""
        num_lookups = min(MOST_LOOKUPS, (QUICK_THREAD_KEYS if self.is_quick else THREAD_KEYS) // self.num_keys)
        batches: list[list[np.ndarray]] = [[] for _ in range(THREADS)]
        for _ in range(max(2, num_lookups)):  # in the order in which they will be asked for
            for mine in batches:
                mine.append(keys_of(self.ids.take(self.num_keys, hit_rate)))

        def work(mine: list[np.ndarray]) -> int:
            for number, keys in enumerate(mine):
                if time.perf_counter() - begin > THREADS_S:
                    return number
                self._call(keys, to_host)
            return len(mine)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            begin = time.perf_counter()
            count = sum(pool.map(work, batches))
            return count * self.num_keys / (time.perf_counter() - begin)

    def _add(
        self,
        subject: str,
        ms: list[float],
        wanted: float | None,
        to_host: bool,
        limit_ms: float | None,
        what: str = records.CACHED,
        by: str = "",
        **notes: Any,
    ) -> None:
        place = "the host" if to_host else "the device"
        of = "no cache" if wanted is None else f"{wanted:.0%} in the cache"
        self.recorder.add(
            Record(
                "cache",
                records.FETCH if subject == "plain" else what,
                subject,
                summary(ms, 1),
                variant=f"{self.num_keys} keys to {place}, {of}",
                num_keys=self.num_keys,
                num_unique=self.num_keys,
                moved_bytes=self.num_keys * CACHE_DIM * limits.FLOAT_BYTES,
                limit_ms=limit_ms,
                by=by,
                notes={"part": "cache", "to_host": to_host, "wanted": wanted, "p99_ms": float(np.percentile(ms, 99))}
                | notes,
            )
        )

    def take(self) -> None:
        """Measures `jnp.take` on an array of all rows on the device."""
        table = jax.device_put(self.filled.rows)
        take = jax.jit(lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"))
        rng = np.random.default_rng(self.seed)
        for to_host, wait in ((False, jax.block_until_ready), (True, np.asarray)):
            ms = []
            for number in range(3 + (QUICK_LOOKUPS if self.is_quick else LOOKUPS)):
                ids = rng.integers(0, len(self.filled.rows), self.num_keys, dtype=np.int32)
                start = time.perf_counter()
                wait(take(table, ids))
                if number >= 3:
                    ms.append((time.perf_counter() - start) * 1e3)
            self._add("xla", ms, None, to_host, self.filled.limit_ms(self.num_keys, 0, to_host))

    def fetch(self) -> None:
        """Measures reading rows of host memory alone, as many as a lookup has keys."""
        rng, ms = np.random.default_rng(self.seed), []
        for number in range(3 + (QUICK_LOOKUPS if self.is_quick else LOOKUPS)):
            keys = keys_of(rng.integers(0, len(self.filled.rows), self.num_keys))
            start = time.perf_counter()
            self.filled.source.fetch(TABLE, keys)
            if number >= 3:
                ms.append((time.perf_counter() - start) * 1e3)
        self._add("plain", ms, None, True, None)

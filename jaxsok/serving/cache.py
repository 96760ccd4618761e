"""A device cache: some rows of the tables of a model on the device, over a source that has them all.

The semantics are those of HPS's embedding cache, made exact where HPS approximates. A lookup makes its keys distinct
and asks the cache. Of each table, the hit rate is hits ÷ distinct keys. Where it reaches the threshold, keys that
missed read what keys without a row do, and their rows are fetched in the background for those who ask later; where it
does not, the lookup waits for their rows. Rows leave by last use, exactly over a store.

One tick of the clock is one lookup or one insertion. After an insertion a store holds its `capacity` rows of greatest
(tick of the last use, table, key). This is all there is to the order of replacement.

Keys that no tier has are not cached: they would push real rows out, and a newer version may have them. They miss each
time, count for the hit rate as misses, and read the table's default, or the row that they would get in training.

Below is the source (backing.py); above, a session. Not here: bags and their combining, which are made of the rows.
"""

import dataclasses
import functools
import math
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import checks
from jaxsok import keys as keys_lib
from jaxsok.serving import cache_store as programs
from jaxsok.serving import quantize
from jaxsok.serving.backing import RowSource, SourceReplacedError, padded_size
from jaxsok.serving.cache_parts import (
    LEAST_KEYS,
    LOG,
    Asked,
    Background,
    Fetched,
    Found,
    Prepared,
    hottest,
    packed,
    unpacked,
)
from jaxsok.serving.errors import ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTable, FrozenTables, rounded
from jaxsok.serving.ready import Beside
from jaxsok.store import num_buckets_of
from jaxsok.types import BUCKET_WORDS, COUNTERS, MAX_CAPACITY, NO_ROW, PADDING_KEY

MIN_ROWS: int = 64
"""Of a table's share, as in HPS: 2 slabs of 32 rows."""

ROWS_AT_A_TIME = 1 << 17  # of prefill, refresh and swap: host and device memory for them stays bounded
_MOST_PADDING = 4  # a lookup is padded to so many times its keys at most, while its own program is compiled,
_FEW_KEYS = 1 << 14  # or to so many in all: they cost a few milliseconds
_LAST_TICK = 2**32 - 2
_MAX_SALTS = 8  # below one lookup in 10^9 needs a second one
_NO_KEYS = np.zeros(0, np.uint64)
_WAIT_S = 120.0  # for the swap that follows an update in place


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """What a lookup found."""

    rows: dict[str, np.ndarray]
    """float32[*keys.shape, dim] by table; may be read only."""
    version: int
    """Of the source; all rows are of it."""
    hit_rates: dict[str, float]
    """By table: distinct keys that the cache had ÷ distinct keys; 1.0 of no keys."""


@dataclasses.dataclass(frozen=True)
class CachedTables:
    """The rows of some keys as frozen tables, for code that looks up by itself."""

    tables: FrozenTables
    """Every key that was asked is there; one that no tier has is there with its default."""
    version: int
    hit_rates: dict[str, float]


@dataclasses.dataclass
class CacheStats:
    """What happened since the cache was made. Keys are distinct ones of one lookup, but for `keys`.

    Example:
      >>> CacheStats(distinct=4, hits=3, misses=1).hit_rate
      0.75
    """

    lookups: int = 0
    keys: int = 0
    """Occurrences, without padding."""
    distinct: int = 0
    hits: int = 0
    misses: int = 0
    sync: int = 0
    """Tables of lookups that waited for rows."""
    background: int = 0
    """Tables of lookups that answered misses with the default."""
    dropped: int = 0
    """Tables of lookups whose misses are not fetched, because too much was waiting; they will miss again."""
    fetched: int = 0
    """Keys asked of the source because they missed."""
    missing: int = 0
    """Of the fetched, those that no tier has."""
    inserted: int = 0
    evicted: int = 0
    """Rows that left because others came."""
    refreshed: int = 0
    """Rows overwritten by `refresh` and `swap`."""
    removed: int = 0
    """Rows that left by `refresh` and `swap`: their keys are gone, or everything was dropped."""
    failed: int = 0
    """Background fetches whose source raised; logged."""
    swaps: int = 0

    @property
    def hit_rate(self) -> float:
        """Of all lookups together; 1.0 before the first."""
        return self.hits / self.distinct if self.distinct else 1.0


@dataclasses.dataclass
class TableCounts:
    """What became of the keys of one table since the cache was made, as of `CacheStats`."""

    distinct: int = 0
    hits: int = 0
    misses: int = 0
    missing: int = 0


class DeviceCache:
    """Some rows on the device over a source of all; looked up by many threads. Close it.

    Tables of one dim and dtype share a store and its budget: the sum of their shares, each of which is `fraction` of
    the rows of the table, and at least `min_rows`. The least recently used row of a store leaves, whatever its table,
    as in HPS where tables are fused. Rows are cached in the bits of their table's dtype.

    Args:
      source: of the rows; belongs to the caller, who closes it.
      fraction: of the rows of each table: HPS's `gpucacheper`.
      hit_rate_threshold: at this hit rate of a table and above, its misses are fetched in the background. 0: always;
        above 1: never, so that answers are exact.
      refresh_fraction: of the cached rows, that `refresh` reads at a time: HPS's
        `cache_refresh_percentage_per_iteration`; 0: all at once.
      max_pending: lookups whose misses may wait for the background thread; those beyond are dropped, and counted.
        HPS's `num_of_worker_buffer_in_pool` may be given.
      min_rows: of each table's share.
      device: None: the default one.

    Raises:
      ValueError: an argument out of range, or a store of more rows than there can be; names both.

    Cost:
      Device: `cache_bytes`. A lookup that hits: one program, and one number for each table read by the host beside the
      rows. An insertion into a full store reads its records (about 80 bytes a row of capacity in all); lookups of other
      threads are queued behind it.

    Example:
      >>> from jaxsok import Records
      >>> from jaxsok.serving.backing import HostRows
      >>> from jaxsok.serving.frozen import SizedRecords
      >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
      >>> source = HostRows.of([(FrozenTable("item", dim=1, default=-1.0), SizedRecords(2, [records]))])
      >>> with DeviceCache(source, hit_rate_threshold=0.5) as cache:
      ...     first = cache.lookup({"item": np.array([7, 8])})  # both miss: waits for the row of 7
      ...     second = cache.lookup({"item": np.array([9, 7])})  # 7 hits: 9 reads the default, and is fetched meanwhile
      ...     cache.drain()
      ...     third = cache.lookup({"item": np.array([9, 7])})
      >>> [found.rows["item"].ravel().tolist() for found in (first, second, third)]
      [[1.0, -1.0], [-1.0, 1.0], [2.0, 1.0]]
      >>> [found.hit_rates["item"] for found in (first, second, third)]
      [0.0, 0.5, 1.0]

    Source: HPS of HugeCTR 24.06, `HugeCTR/src/hps/embedding_cache.cpp`.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        fraction: float = 0.2,
        hit_rate_threshold: float = 0.9,
        refresh_fraction: float = 0.0,
        max_pending: int = 16,
        min_rows: int = MIN_ROWS,
        device: Any = None,
    ) -> None:
        checks.number("DeviceCache: fraction", fraction, checks.ABOVE_ZERO, math.inf, "a number above 0")
        checks.number("DeviceCache: hit_rate_threshold", hit_rate_threshold, 0, math.inf, "a number from 0")
        checks.number("DeviceCache: refresh_fraction", refresh_fraction, 0, 1)
        checks.integer("DeviceCache: max_pending", max_pending, 1)
        checks.integer("DeviceCache: min_rows", min_rows, 1)
        self.fraction, self.hit_rate_threshold, self.refresh_fraction = fraction, hit_rate_threshold, refresh_fraction
        self.device = jax.devices()[0] if device is None else device
        self._spec = cached_spec(source.tables.values())
        self._layout = programs.Layout(self._spec)
        self._shares = {name: _share(source, name, fraction, min_rows) for name in source.tables}
        self._capacities = [sum(self._shares[table.name] for table in tables) for tables in self._spec.stores]
        for tables, capacity in zip(self._spec.stores, self._capacities, strict=True):
            if capacity > MAX_CAPACITY:
                raise ValueError(
                    f"DeviceCache: fraction: got {fraction}, {capacity} rows of tables "
                    f"{[table.name for table in tables]}, wanted at most {MAX_CAPACITY} in one store."
                )
        self._lock = threading.Lock()  # the fields from here to the gap; held while programs are dispatched
        self._swapped = threading.Condition(self._lock)
        self._stores = tuple(
            self._new_store(len(tables), tables[0], capacity)
            for tables, capacity in zip(self._spec.stores, self._capacities, strict=True)
        )
        self._forms = jax.tree.map(self._form, self._stores)
        self._most_rows = [0] * len(self._stores)  # a bound of the rows in use: below the capacity nobody must leave
        self._clock = 0
        self._source, self._epoch = source, 0
        self._leaving: Mapping[str, np.ndarray] = {}  # keys by table, sorted, that a swap is about to change
        self._scratch_salt = np.frombuffer(secrets.token_bytes(8), np.uint32)

        self._ready: set[tuple[Any, ...]] = set()  # programs that are compiled
        self._compiling = threading.Lock()
        self._beside = Beside()
        self._query_sizes: frozenset[tuple[int, ...]] = frozenset()  # of `lookup` that are compiled
        self._counting = threading.Lock()
        self._stats = CacheStats()
        self._of_tables = {name: TableCounts() for name in source.tables}
        self._changing = threading.Lock()  # one refresh or swap at a time
        self._background = Background(self._fetch_later, max_pending)

    # What users call ------------------------------------------------------------------------------------------------

    @property
    def source(self) -> RowSource:
        """Of the rows, now."""
        return self._source

    @property
    def version(self) -> int:
        """Of the source."""
        return self._source.version

    @property
    def tables(self) -> Mapping[str, FrozenTable]:
        """As the source has them."""
        return self._source.tables

    @property
    def capacity(self) -> int:
        """Rows of all stores."""
        return sum(self._capacities)

    @property
    def num_bytes(self) -> int:
        """Of device memory."""
        with self._lock:
            return sum(leaf.nbytes for leaf in jax.tree.leaves(self._stores))

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table that are cached now (waits for the device); after `close` none."""
        counts = self._copied("table_rows")
        if not counts:
            return dict.fromkeys(self._spec.places, 0)
        return {
            table.name: int(count)
            for tables, line in zip(self._spec.stores, counts, strict=True)
            for table, count in zip(tables, np.asarray(line), strict=True)
        }

    def cached_keys(self) -> dict[str, np.ndarray]:
        """The keys of each table that are cached now, uint64 (16 bytes a row of capacity are copied to the host)."""
        records = self._copied("records", is_required=True)
        keys_of = {}
        for tables, lines in zip(self._spec.stores, map(np.asarray, records), strict=True):
            keys = keys_lib.from_words(lines[:, :2])
            for number, table in enumerate(tables):
                keys_of[table.name] = keys[(keys != np.uint64(PADDING_KEY)) & (lines[:, 2] == number)]
        return keys_of

    def stats(self) -> CacheStats:
        """A copy of the counts."""
        with self._counting:
            return dataclasses.replace(self._stats)

    def table_counts(self) -> dict[str, TableCounts]:
        """A copy of the counts of each table."""
        with self._counting:
            return {name: dataclasses.replace(counts) for name, counts in self._of_tables.items()}

    def lookup(self, keys: Mapping[str, Any]) -> CachedRows:
        """The rows of keys; those that the cache does not have by the rule of the threshold.

        Args:
          keys: by table, NumPy integers of any shape. PADDING_KEY reads zeros and is not counted.

        Returns:
          Rows, all of one version of the source. Keys that no tier has, and those whose rows come in the background,
          have the default of their table.

        Raises:
          UnknownTableError, RequestError: before anything is looked up. And what the source raises, if the lookup has
            to wait for it; the cache is as before.

        Cost:
          One program where nothing misses; else also the fetch and, of a table that waits, its insertion.
        """
        asked = Asked(self._spec, keys, self._ready_sizes)
        found, fetched = self._answered(asked, is_expanded=True)
        rows: dict[str, np.ndarray] = {}
        of_store: dict[int, np.ndarray] = {}
        for part in asked.parts:
            if part.store not in of_store:
                of_store[part.store] = np.asarray(found.rows[part.store][0])
            lines = of_store[part.store][part.lines]
            if part.name in fetched:
                one = fetched[part.name]
                one = dataclasses.replace(one, rows=self._wide(part.name, one.rows))
                lines = one.put_into(lines, np.asarray(found.inverse[part.store])[part.lines])
            rows[part.name] = lines.reshape(*part.shape, lines.shape[1])
        return CachedRows(rows, found.version, found.hit_rates)

    def lookup_tables(self, keys: Mapping[str, Any]) -> CachedTables:
        """As `lookup`, and gives the rows as small frozen tables on the device, for a model that looks up by itself.

        Their tables are `cached_spec(source.tables.values())`, all of them.

        Args:
          keys: by table, NumPy integers of any shape; tables that are not named are empty.

        Cost:
          As `lookup`, but that rows stay on the device, one for each distinct key.
        """
        asked = Asked(self._spec, keys, lambda least: least)
        found, fetched = self._answered(asked, is_expanded=False)
        stores = []
        for s, slabs in enumerate(found.rows):
            rows = slabs[0]
            mine = [fetched[part.name] for part in asked.parts if part.store == s and part.name in fetched]
            if mine:
                slots = np.full(rows.shape[0], -1, np.int32)
                lines = np.concatenate([one.rows for one in mine])
                slots[np.concatenate([one.places for one in mine])] = np.arange(len(lines), dtype=np.int32)
                size = padded_size(len(lines), LEAST_KEYS)
                self._ready_to_merge(s, len(rows), size)
                of_lines = [_longer(one, size) for one in self._parts(s, lines)]
                slabs = programs.merged(slabs, *self._put((slots, tuple(of_lines))))
            rows, *scales = slabs
            index, counters = found.indices[s]
            if scales:  # no 8 bits stand for what keys without a row read: the model must not find them
                is_hidden = np.zeros(rows.shape[0], bool)
                for part in asked.parts:
                    if part.store == s and part.name in found.missed:
                        is_hidden[found.missed[part.name][0]] = True
                for one in mine:
                    is_hidden[one.places] = False
                if is_hidden.any():
                    self._ready_to_hide(s, len(is_hidden))
                    index = programs.hidden(index, self._put(is_hidden))
            stores.append(FrozenStore(index, counters, rows.astype(self._spec.stores[s][0].dtype), tuple(scales)))
        return CachedTables(FrozenTables(tuple(stores), self._spec), found.version, found.hit_rates)

    def fill(self) -> int:
        """Fills each table's share before the first lookup: with its hottest rows.

        If the source does not know frequencies with its first ones. HPS does so at the start if `init_ec` is on and
        `cache_refresh_percentage_per_iteration` above 0.

        Returns:
          How many rows came.

        Cost:
          With frequencies reads all rows of the source once; host memory for twice a table's share.
        """
        with self._lock:
            source, epoch = self._source, self._epoch
        before = self.stats().inserted
        for name, share in self._shares.items():
            keys, rows = hottest(source.scan(name, ROWS_AT_A_TIME), share)
            last = (len(keys) - 1) // ROWS_AT_A_TIME
            for chunk in range(last, -1, -1) if len(keys) else ():  # the hottest come last: they are the most recent
                lines = slice(chunk * ROWS_AT_A_TIME, (chunk + 1) * ROWS_AT_A_TIME)
                self._insert({name: self._filling(source, name, keys[lines], rows[lines])}, epoch)
        return self.stats().inserted - before

    def _filling(
        self, source: RowSource, name: str, keys: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys and rows of a scan as the cache stores them; the bits of quantized ones are asked of the source."""
        if not self.tables[name].is_quantized:
            return keys, self._stored(name, rows)
        lines, is_found = self._fetch(source, name, keys)
        return keys[is_found], lines[is_found]

    def refresh(self) -> int:
        """Reads cached rows anew from the source, `refresh_fraction` of them at a time, and overwrites them in place.

        Keys that the source does not have any more leave the cache. The order of replacement stays as it is. Of use
        where rows change beneath the source (a database); `swap` tells of a new version.

        Returns:
          How many rows were overwritten.
        """
        with self._changing:
            before = self.stats().refreshed
            with self._lock:
                source = self._source  # swaps wait for `_changing`
            cached = self.cached_keys()
            num_cached = sum(map(len, cached.values()))
            share = math.ceil(num_cached * self.refresh_fraction) if self.refresh_fraction else num_cached
            at_a_time = min(max(1, share), ROWS_AT_A_TIME)
            for name, keys in cached.items():
                for start in range(0, len(keys), at_a_time):
                    some = keys[start : start + at_a_time]
                    try:
                        fetched = self._fetch(source, name, some)
                    except SourceReplacedError:  # the swap that follows brings what is new
                        return self.stats().refreshed - before
                    rows, is_found = fetched
                    prepared = self._overwriting(name, some[is_found], rows[is_found])
                    prepared += self._dropping({name: (some[~is_found], None)})
                    self._ready_to_rewrite(prepared)
                    with self._lock:
                        self._require_open()
                        done = self._rewritten(prepared)
                    self._count_rewritten(done)
            return self.stats().refreshed - before

    def swap(self, source: RowSource, changed: Mapping[str, Any] | None) -> None:
        """Goes over to another version of the source: lookups answer from the old one or from the new one, whole.

        Args:
          source: with the same tables. The old one is not closed; lookups that began before may still read it.
          changed: the keys whose rows differ, by table, those that are gone among them: where they are cached they are
            overwritten, or leave if the new version does not have them. None: everything leaves.

        Raises:
          ValueError, UnknownTableError: other tables; nothing has changed then.

        Cost:
          A search for the changed keys, ROWS_AT_A_TIME of them on the device, and a fetch of those that are cached
          before anybody waits; then, while lookups wait for their dispatch, one program for each ROWS_AT_A_TIME of
          these, and one for each store that rows leave. Device memory for the new rows of the cached ones: if a whole
          table changes, for as many rows as the cache has of it. Meanwhile changed keys that miss are fetched for
          those who ask, and not cached.
        """
        if dict(source.tables) != dict(self.tables):
            raise ValueError(
                f"swap: source: got tables {list(source.tables.values())}, wanted {list(self.tables.values())}; open "
                "another cache."
            )
        for name in changed or ():
            if name not in self._spec.places:
                raise UnknownTableError.of("swap", name, self._spec.places)
        with self._changing:
            leaving = {} if changed is None else {name: _changed_keys(name, keys) for name, keys in changed.items()}
            with self._lock:
                self._require_open()
                self._leaving = leaving  # no insertion brings them from here on: those that are found now are all
            try:
                self._swap(source, leaving, drops_all=changed is None)
            finally:
                with self._lock:
                    self._leaving = {}

    def _swap(self, source: RowSource, leaving: Mapping[str, np.ndarray], *, drops_all: bool) -> None:
        prepared: list[Prepared] = []
        gone: dict[str, tuple[np.ndarray, None]] = {}
        for name, keys in leaving.items():
            of_table = []
            for start in range(0, len(keys), ROWS_AT_A_TIME):
                some = keys[start : start + ROWS_AT_A_TIME]
                some = some[self._contains(name, some)]
                if len(some):
                    rows, is_found = self._fetch(source, name, some)
                    prepared += self._overwriting(name, some[is_found], rows[is_found])
                    of_table.append(some[~is_found])
            gone[name] = np.concatenate([_NO_KEYS, *of_table]), None
        prepared += self._dropping(gone)
        self._ready_to_rewrite(prepared)
        for s, form in enumerate(self._forms) if drops_all else ():
            self._make_ready(("emptied", s), form)
        with self._lock:
            self._require_open()
            done = self._emptied() if drops_all else self._rewritten(prepared)
            self._source, self._epoch = source, self._epoch + 1
            self._swapped.notify_all()
        self._count_rewritten(done, swaps=1)

    def warm_up(self, lookups: Iterable[Mapping[str, int]], *, as_tables: bool = False) -> None:
        """Compiles what lookups need: the programs that ask the cache, and those that insert what missed.

        Without it the first lookup of a new size compiles, and so does the first insertion of a new size. With it, a
        lookup of fewer keys of some stores is padded to what is compiled, until its own program is, by a thread; one
        that would be padded to more than 4 times its keys, and to more than 16,384, compiles. Nothing is looked up or
        counted. What the source compiles is its own: `HostRows.fetch` does for each table and power of two, while other
        threads look up.

        Args:
          lookups: how many keys of each table, padding among them, are looked up together. Programs are made for
            powers of two.
          as_tables: whether by `lookup_tables`, not by `lookup`.

        Raises:
          UnknownTableError: nothing is compiled then.

        Cost:
          On a CPU core about 0.3 s for each size of a lookup, and 0.15 s for each store and each power of two up to its
          keys.
        """
        sizes = []
        for num_keys in lookups:
            of_store = [0] * len(self._forms)
            for name, count in num_keys.items():
                if name not in self._spec.places:
                    raise UnknownTableError.of("warm_up", name, self._spec.places)
                of_store[self._spec.places[name][0]] += count
            sizes.append(of_store)
        for of_store in sizes:
            padded = tuple(padded_size(count, LEAST_KEYS) for count in of_store)
            self._ready_to_query(not as_tables, padded)
            for s, size in enumerate(padded) if as_tables else ():
                if self._spec.stores[s][0].is_quantized:
                    self._ready_to_hide(s, size)
                for step in range((size // LEAST_KEYS).bit_length()):
                    self._ready_to_merge(s, size, LEAST_KEYS << step)
        for s, most in enumerate(map(max, zip(*sizes, strict=True))):
            size, last = LEAST_KEYS, padded_size(min(most, self._capacities[s]), LEAST_KEYS)
            while most and size <= last:
                for must_leave in (False, True):
                    self._ready_to_insert(s, must_leave, size)
                size *= 2

    def tables_like(self, num_keys: Mapping[str, int]) -> FrozenTables:
        """What `lookup_tables` gives for so many keys of tables, padding among them, as shapes without arrays."""
        of_store = [0] * len(self._forms)
        for name, count in num_keys.items():
            of_store[self._spec.places[name][0]] += count
        place, stores = jax.sharding.SingleDeviceSharding(self.device), []
        for tables, count in zip(self._spec.stores, of_store, strict=True):
            size = padded_size(count, LEAST_KEYS)
            shapes = [(num_buckets_of(size), BUCKET_WORDS), (len(COUNTERS),), (size, tables[0].dim)]
            dtypes = [np.uint32, np.uint32, jnp.dtype(tables[0].dtype)]
            scales = (jax.ShapeDtypeStruct((size,), np.float32, sharding=place),) if tables[0].is_quantized else ()
            stores.append(
                FrozenStore(
                    *(jax.ShapeDtypeStruct(*one, sharding=place) for one in zip(shapes, dtypes, strict=True)), scales
                )
            )
        return FrozenTables(tuple(stores), self._spec)

    def drain(self) -> None:
        """Waits until nothing is left to fetch in the background, nor to compile."""
        self._background.drain()
        self._beside.drain()

    def stop_compiling(self) -> None:
        """Begins to compile nothing more beside lookups; of use before `close`, where other caches are closed too."""
        self._beside.stop()

    def close(self, timeout_s: float | None = None) -> bool:
        """Drains, stops the background threads and gives the device memory back. Again: nothing.

        Args:
          timeout_s: for a program that is compiled beside to be ready, which nothing can cut off; None: any time.

        Returns:
          Whether it is.
        """
        self._beside.stop()
        self._background.close()
        has_ended = self._beside.close(timeout_s)
        with self._lock:
            self._stores = ()
            self._swapped.notify_all()
        return has_ended

    def __enter__(self) -> "DeviceCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Lookups --------------------------------------------------------------------------------------------------------

    def _answered(self, asked: Asked, *, is_expanded: bool) -> tuple[Found, dict[str, Fetched]]:
        """What the cache has, and what was waited for."""
        operands = self._put(tuple(asked.batches))
        while True:
            found = self._query(asked, operands, is_expanded)
            waits = {name for name, rate in found.hit_rates.items() if rate < self.hit_rate_threshold}
            waits &= found.missed.keys()
            later = {name: keys for name, (_, keys) in found.missed.items() if name not in waits}
            fetched: dict[str, Fetched] = {}
            try:
                for name in sorted(waits):
                    places, keys = found.missed[name]
                    rows, is_found = self._fetch(found.source, name, keys)
                    fetched[name] = Fetched(places[is_found], keys[is_found], rows[is_found])
            except SourceReplacedError:
                self._wait_for_swap(found.epoch)
                continue
            break
        if fetched:
            self._insert({name: (one.keys, one.rows) for name, one in fetched.items()}, found.epoch)
        is_taken = not later or self._background.offer(later)
        num_missed = {name: len(keys) for name, (_, keys) in found.missed.items()}
        self._count(
            lookups=1,
            keys=asked.num_keys,
            sync=len(fetched),
            background=len(later),
            dropped=0 if is_taken else len(later),
            fetched=sum(num_missed[name] for name in fetched),
        )
        for name, num_distinct in found.num_distinct.items():
            misses, gone = num_missed.get(name, 0), 0
            if name in fetched:
                gone = misses - len(fetched[name].keys)
            self._count_table(name, distinct=num_distinct, hits=num_distinct - misses, misses=misses, missing=gone)
        return found, fetched

    def _query(self, asked: Asked, operands: Any, is_expanded: bool) -> Found:
        self._ready_to_query(is_expanded, tuple(words.shape[0] for words, _ in operands))
        for _ in range(_MAX_SALTS):
            with self._lock:
                self._require_open()
                clock = self._tick()
                statistics, out = programs.query(
                    self._layout,
                    is_expanded,
                    tuple(store.statistics for store in self._stores),
                    tuple((store.index, store.counters, store.slabs) for store in self._stores),
                    operands,
                    clock,
                    self._scratch_salt,
                )
                self._stores = tuple(
                    dataclasses.replace(store, statistics=new)
                    for store, new in zip(self._stores, statistics, strict=True)
                )
                source, epoch, version = self._source, self._epoch, self._source.version
            counts = np.asarray(out.counts)
            if not counts[:, 2].any():
                return Found.of(self._spec, asked, out, counts, source, epoch, version)
            self._scratch_salt = np.frombuffer(secrets.token_bytes(8), np.uint32)
        raise ServingError(f"lookup: keys: got some that find no place under {_MAX_SALTS} salts, wanted others.")

    def _wait_for_swap(self, epoch: int) -> None:
        with self._lock:
            if not self._swapped.wait_for(lambda: self._epoch != epoch or not self._stores, _WAIT_S):
                raise ServingError(
                    f"lookup: source: got one that was updated in place, and no swap for {_WAIT_S} s, wanted "
                    "DeviceCache.swap to its newer version."
                )

    def _fetch(self, source: RowSource, name: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows as the cache stores them, of float32 or `packed`, and which are there."""
        table = self.tables[name]
        if table.is_quantized:
            numbers, scales, is_found = source.fetch_quantized(name, keys)
            shapes, wanted = (numbers.shape, scales.shape), ((len(keys), table.dim), (len(keys),))
            dtypes = numbers.dtype, scales.dtype
            if shapes != wanted or dtypes != (jnp.dtype(table.dtype), np.float32) or is_found.shape != wanted[1]:
                raise RuntimeError(
                    f'DeviceCache: table "{name}": got {dtypes} of {shapes} of {type(source).__name__}.'
                    f"fetch_quantized, wanted {table.dtype} and float32 of {wanted}."
                )
            return packed(numbers, scales), np.asarray(is_found, bool)
        rows, is_found = source.fetch(name, keys)
        wanted = (len(keys), self.tables[name].dim)
        if rows.shape != wanted or rows.dtype != np.float32 or is_found.shape != wanted[:1]:
            raise RuntimeError(
                f'DeviceCache: table "{name}": got {rows.dtype}{list(rows.shape)} and found{list(is_found.shape)} of '
                f"{type(source).__name__}.fetch, wanted float32{list(wanted)} and bool[{wanted[0]}]."
            )
        return self._stored(name, rows), np.asarray(is_found, bool)

    def _stored(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows rounded to what a store holds: an answer is the same whether its row was cached or fetched."""
        store, _ = self._spec.places[name]
        dtype = self._spec.stores[store][0].dtype
        return np.asarray(rows, np.float32) if dtype == "float32" else rounded(rows, dtype).astype(np.float32)

    def _parts(self, s: int, lines: np.ndarray) -> tuple[np.ndarray, ...]:
        """Rows of a store as `_fetch` gives them, and their scales if they have some."""
        table = self._spec.stores[s][0]
        return unpacked(lines, table.dtype) if table.is_quantized else (lines,)

    def _wide(self, name: str, lines: np.ndarray) -> np.ndarray:
        """Rows as `_fetch` gives them, as float32."""
        parts = self._parts(self._spec.places[name][0], lines)
        return quantize.dequantized(*parts) if len(parts) > 1 else lines

    def _fetch_later(self, asked: Sequence[Mapping[str, np.ndarray]]) -> None:
        """In the background: of what several lookups left, one fetch and one insertion."""
        names = sorted({name for one in asked for name in one})
        missed = {name: np.unique(np.concatenate([one[name] for one in asked if name in one])) for name in names}
        while True:
            with self._lock:
                source, epoch = self._source, self._epoch
            try:
                rows = {}
                for name, keys in missed.items():
                    lines, is_found = self._fetch(source, name, keys)
                    rows[name] = keys[is_found], lines[is_found]
            except SourceReplacedError:
                self._wait_for_swap(epoch)
                continue
            except Exception:
                self._count(failed=1)
                LOG.exception("DeviceCache: rows of tables %s could not be fetched; their keys miss again", names)
                return
            self._insert(rows, epoch)
            self._count(fetched=sum(map(len, missed.values())))
            for name, keys in missed.items():
                self._count_table(name, missing=len(keys) - len(rows[name][0]))
            return

    # Changes of the stores -------------------------------------------------------------------------------------------

    def _insert(self, rows: Mapping[str, tuple[np.ndarray, np.ndarray]], epoch: int) -> None:
        """Inserts rows (distinct keys of each table) in one tick, if the source is still that of the epoch."""
        while True:
            leaving = self._leaving
            parts = self._insertions(rows, leaving)
            if not parts:
                return
            counts = []
            with self._lock:
                if self._epoch != epoch or not self._stores:
                    return
                if self._leaving is not leaving:  # a swap has begun, or failed
                    continue
                bounds = [self._most_rows[s] + num_keys for s, num_keys, _ in parts]
                chosen = [
                    (s, bound > self._capacities[s], operands[0].shape[0])
                    for (s, _, operands), bound in zip(parts, bounds, strict=True)
                ]
                if all(("insert", *one) in self._ready for one in chosen):
                    clock = self._tick()
                    stores = list(self._stores)
                    for (s, _, operands), (_, must_leave, _), bound in zip(parts, chosen, bounds, strict=True):
                        stores[s], *counted = programs.insert(must_leave, stores[s], *operands, clock)
                        self._most_rows[s] = min(bound, self._capacities[s])
                        counts.append(counted)
                    self._stores = tuple(stores)
                    break
            for one in chosen:  # while others look up; then what must leave may be otherwise
                self._ready_to_insert(*one)
        inserted, evicted = (sum(int(np.asarray(one[i])) for one in counts) for i in range(2))
        self._count(inserted=inserted, evicted=evicted)

    def _insertions(
        self, rows: Mapping[str, tuple[np.ndarray, np.ndarray]], leaving: Mapping[str, np.ndarray]
    ) -> list[tuple[int, int, Any]]:
        """By store: how many rows, and the operands that insert them; without those of keys that a swap is about."""
        if leaving:
            rows = {name: _without(*some, leaving.get(name, _NO_KEYS)) for name, some in rows.items()}
        parts = []
        for s, some in self._by_store(rows):
            ids = np.concatenate([np.full(len(keys), number, np.uint32) for number, keys, _ in some])
            keys, lines = np.concatenate([k for _, k, _ in some]), np.concatenate([r for _, _, r in some])
            if len(keys) > self._capacities[s]:
                last = np.sort(np.lexsort((keys, ids))[-self._capacities[s] :])
                ids, keys, lines = ids[last], keys[last], lines[last]
            if len(keys):
                parts.append((s, len(keys), self._operands(s, keys, ids, lines)))
        return parts

    def _contains(self, name: str, keys: np.ndarray) -> np.ndarray:
        s, number = self._spec.places[name]
        words, ids, _ = self._operands(s, keys, np.full(len(keys), number, np.uint32), None)
        form = self._forms[s]
        self._make_ready(("find", s, words.shape[0]), form.index, form.counters, words, ids)
        with self._lock:
            self._require_open()
            row_ids = programs.find(self._stores[s].index, self._stores[s].counters, words, ids)
        return np.asarray(row_ids)[: len(keys)] != NO_ROW

    def _overwriting(self, name: str, keys: np.ndarray, lines: np.ndarray) -> list[Prepared]:
        """New rows of a table, on their way to the device."""
        if not len(keys):
            return []
        s, number = self._spec.places[name]
        return [Prepared(s, *self._operands(s, keys, np.full(len(keys), number, np.uint32), lines))]

    def _dropping(self, gone: Mapping[str, tuple[np.ndarray, None]]) -> list[Prepared]:
        """Keys of tables that leave, on their way to the device: one program for each store, which reads all of it."""
        prepared = []
        for s, some in self._by_store(gone):
            ids = np.concatenate([np.full(len(keys), number, np.uint32) for number, keys, _ in some])
            keys = np.concatenate([keys for _, keys, _ in some])
            if len(keys):
                prepared.append(Prepared(s, *self._operands(s, keys, ids, None)))
        return prepared

    def _rewritten(self, prepared: Sequence[Prepared]) -> list[tuple[Any, Any]]:
        """Overwrites cached rows, and drops those without a new one. The lock is held."""
        stores, done = list(self._stores), []
        for one in prepared:
            store = stores[one.store]
            if one.lines is None:
                stores[one.store], num_dropped = programs.drop(store, one.words, one.ids)
                done.append((0, num_dropped))
            else:
                stores[one.store], num_written = programs.overwrite(store, one.words, one.ids, one.lines)
                done.append((num_written, 0))
        self._stores = tuple(stores)
        return done

    def _emptied(self) -> list[tuple[Any, Any]]:
        """Drops everything. The lock is held."""
        done, stores = [], []
        for store in self._stores:
            new, num_removed = programs.emptied(store)
            stores.append(new)
            done.append((0, num_removed))
        self._stores, self._most_rows = tuple(stores), [0] * len(stores)
        return done

    def _count_rewritten(self, done: Iterable[tuple[Any, Any]], **more: int) -> None:
        done = list(done)
        refreshed, removed = (sum(int(np.asarray(one[i])) for one in done) for i in range(2))
        self._count(refreshed=refreshed, removed=removed, **more)

    # Programs --------------------------------------------------------------------------------------------------------

    def _copied(self, name: str, *, is_required: bool = False) -> list[Array]:
        """An array of each store as it is now: a later program may take the store's own."""
        for form in self._forms:
            form = getattr(form, name)
            self._make_ready(("copied", form.shape), form)
        with self._lock:
            if is_required:
                self._require_open()
            return [programs.copied(getattr(store, name)) for store in self._stores]

    def _make_ready(self, key: tuple[Any, ...], *operands: Any) -> None:
        """Compiles a program, unless it was. The lock is not held: lookups of other threads go on meanwhile."""
        if key in self._ready:
            return
        with self._compiling:
            if key not in self._ready:
                programs.make_ready(key[0], *operands)
                self._ready.add(key)

    def _ready_sizes(self, least: tuple[int, ...]) -> tuple[int, ...]:
        """Those to pad to: of a query that is compiled and not much larger, of the least keys in all; else the least.

        Where they are not the least, these are compiled meanwhile.
        """
        if least in self._query_sizes:
            return least
        most = max(_MOST_PADDING * sum(least), _FEW_KEYS)
        larger = [
            sizes
            for sizes in self._query_sizes
            if sum(sizes) <= most and all(a >= b for a, b in zip(sizes, least, strict=True))
        ]
        if not larger:
            return least
        self._beside.offer(least, functools.partial(self._ready_to_query, True, least))
        return min(larger, key=lambda sizes: (sum(sizes), sizes))

    def _ready_to_query(self, is_expanded: bool, sizes: tuple[int, ...]) -> None:
        forms = self._forms
        self._make_ready(
            ("query", is_expanded, sizes),
            self._layout,
            is_expanded,
            tuple(form.statistics for form in forms),
            tuple((form.index, form.counters, form.slabs) for form in forms),
            tuple(self._form_of_keys(size) for size in sizes),
            np.uint32(0),
            self._scratch_salt,
        )
        if is_expanded and sizes not in self._query_sizes:
            with self._compiling:
                self._query_sizes |= {sizes}

    def _ready_to_merge(self, s: int, num_rows: int, num_lines: int) -> None:
        place, table = jax.sharding.SingleDeviceSharding(self.device), self._spec.stores[s][0]
        dtype = jnp.dtype(table.dtype) if table.is_quantized else np.float32

        def slabs(size: int) -> tuple[Any, ...]:
            scales = (jax.ShapeDtypeStruct((size,), np.float32, sharding=place),) if table.is_quantized else ()
            return jax.ShapeDtypeStruct((size, table.dim), dtype, sharding=place), *scales

        slots = jax.ShapeDtypeStruct((num_rows,), np.int32, sharding=place)
        self._make_ready(("merged", s, num_rows, num_lines), slabs(num_rows), slots, slabs(num_lines))

    def _ready_to_hide(self, s: int, num_rows: int) -> None:
        place = jax.sharding.SingleDeviceSharding(self.device)
        index = jax.ShapeDtypeStruct((num_buckets_of(num_rows), BUCKET_WORDS), np.uint32, sharding=place)
        self._make_ready(("hidden", s, num_rows), index, jax.ShapeDtypeStruct((num_rows,), np.bool_, sharding=place))

    def _ready_to_insert(self, s: int, must_leave: bool, size: int) -> None:
        lines = tuple(
            jax.ShapeDtypeStruct((size, slab.shape[1]), slab.dtype, sharding=slab.sharding)
            for slab in self._forms[s].slabs
        )
        key = ("insert", s, must_leave, size)
        self._make_ready(key, must_leave, self._forms[s], *self._form_of_keys(size), lines, np.uint32(0))

    def _ready_to_rewrite(self, prepared: Iterable[Prepared]) -> None:
        for one in prepared:
            program, lines = ("drop", ()) if one.lines is None else ("overwrite", (one.lines,))
            key = (program, one.store, one.words.shape[0])
            self._make_ready(key, self._forms[one.store], one.words, one.ids, *lines)

    def _form_of_keys(self, size: int) -> tuple[Any, Any]:
        """Of words and table ids."""
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        words, ids = (jax.ShapeDtypeStruct(shape, np.uint32, sharding=sharding) for shape in ((size, 2), (size,)))
        return words, ids

    def _form(self, array: Array) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    # Help ------------------------------------------------------------------------------------------------------------

    def _tick(self) -> np.uint32:
        """The next one. The lock is held."""
        if self._clock >= _LAST_TICK:
            self._renumber()
        self._clock += 1
        return np.uint32(self._clock)

    def _renumber(self) -> None:
        """Ticks from 1 on, in the same order: the clock has 32 bits. Waits for the device."""
        lines = [np.array(store.statistics) for store in self._stores]
        ticks, ranks = np.unique(np.concatenate([one[:, 0] for one in lines]), return_inverse=True)
        start, stores = 0, []
        for store, one in zip(self._stores, lines, strict=True):
            one[:, 0] = ranks.ravel()[start : start + len(one)]
            start += len(one)
            stores.append(dataclasses.replace(store, statistics=self._owned(one)))
        self._stores, self._clock = tuple(stores), len(ticks)

    def _by_store(self, rows: Mapping[str, tuple[np.ndarray, Any]]) -> Iterable[tuple[int, list[Any]]]:
        parts: dict[int, list[Any]] = {}
        for name, (keys, lines) in rows.items():
            store, number = self._spec.places[name]
            parts.setdefault(store, []).append((number, keys, lines))
        return parts.items()

    def _operands(self, s: int, keys: np.ndarray, ids: np.ndarray, lines: np.ndarray | None) -> Any:
        """Words, table ids and rows of keys, padded, on the device."""
        size = padded_size(len(keys), LEAST_KEYS)
        words = keys_lib.padding_words((size,))
        words[: len(keys)] = keys_lib.to_words(keys)
        padded_ids = np.zeros(size, np.uint32)
        padded_ids[: len(keys)] = ids
        if lines is None:
            return self._put((words, padded_ids, None))
        rows, *scales = self._parts(s, lines)
        slabs = rows.astype(jnp.dtype(self._spec.stores[s][0].dtype), copy=False), *(one[:, None] for one in scales)
        return self._put((words, padded_ids, tuple(_longer(slab, size) for slab in slabs)))

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.device)

    def _owned(self, array: np.ndarray) -> Array:
        """A buffer of the device's own, which may be donated."""
        return jax.device_put(array, self.device, may_alias=False)

    def _new_store(self, num_tables: int, table: FrozenTable, capacity: int) -> programs.CacheStore:
        counters = np.zeros(len(COUNTERS), np.uint32)
        counters[[COUNTERS.index("salt_low"), COUNTERS.index("salt_high")]] = np.frombuffer(
            secrets.token_bytes(8), np.uint32
        )
        with jax.default_device(self.device):
            index, table_rows, records, statistics = _new_arrays(num_buckets_of(capacity), num_tables, capacity)
            rows = jnp.zeros((capacity, table.dim), table.dtype)
            scales = (jnp.zeros((capacity, 1), jnp.float32),) if table.is_quantized else ()
        state = (index, self._owned(counters), table_rows, rows, records, statistics, scales)
        return programs.CacheStore(*jax.device_put(state, self.device))

    def _require_open(self) -> None:
        if not self._stores:
            raise ServingError("DeviceCache: got a call after close, wanted none; open another.")

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, number in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + number)

    def _count_table(self, table: str, **more: int) -> None:
        """Counts keys of a table, and of all tables together."""
        self._count(**more)
        with self._counting:
            counts = self._of_tables[table]
            for name, number in more.items():
                setattr(counts, name, getattr(counts, name) + number)


def cached_spec(tables: Iterable[FrozenTable]) -> FrozenSpec:
    """How a cache groups tables: by dim and dtype, as frozen tables are.

    Example:
      >>> [table.dtype for table in cached_spec([FrozenTable("a", 4, dtype="int8")]).stores[0]]
      ['int8']
    """
    return FrozenSpec.of(list(tables))


def cache_bytes(tables: Mapping[FrozenTable, int]) -> dict[str, int]:
    """Bytes of device memory of a cache that holds so many rows of tables.

    Args:
      tables: rows of each table's share.

    Example:
      >>> cache_bytes({FrozenTable("user", dim=128): 1_000_000})
      {'rows': 512000000, 'index': 32000000, 'records': 16000000, 'statistics': 8000000}
    """
    spec = cached_spec(tables)
    rows_of = {table.name: num_rows for table, num_rows in tables.items()}
    capacities = [sum(rows_of[table.name] for table in of_store) for of_store in spec.stores]
    return {
        "rows": sum(n * store[0].row_bytes for n, store in zip(capacities, spec.stores, strict=True)),
        "index": sum(4 * BUCKET_WORDS * num_buckets_of(n) for n in capacities),
        "records": 16 * sum(capacities),
        "statistics": 8 * sum(capacities),
    }


def _share(source: RowSource, name: str, fraction: float, min_rows: int) -> int:
    num_rows = source.num_rows(name)
    return max(min_rows, math.ceil(min(fraction, 1.0) * num_rows))


def _longer(lines: np.ndarray, size: int) -> np.ndarray:
    """With zeros behind."""
    made = np.zeros((size, *lines.shape[1:]), lines.dtype)
    made[: len(lines)] = lines
    return made


def _changed_keys(name: str, keys: Any) -> np.ndarray:
    """Distinct keys of a table, sorted."""
    keys = np.unique(keys_lib.from_words(keys_lib.to_words(np.asarray(keys), f'swap: table "{name}"')))
    return keys[keys != np.uint64(PADDING_KEY)]


def _without(keys: np.ndarray, rows: np.ndarray, leaving: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and rows, but for those of keys in a sorted array."""
    if not len(leaving):
        return keys, rows
    place = np.minimum(np.searchsorted(leaving, keys), len(leaving) - 1)
    stays = leaving[place] != keys
    return keys[stays], rows[stays]


_new_arrays = jax.jit(programs.empty_arrays, static_argnums=(0, 1, 2))

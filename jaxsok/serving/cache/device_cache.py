"""A device cache, as its users see it: docs/tiers.md says what a lookup reads and which rows leave.

After an insertion a store holds its `capacity` rows of greatest (tick of the last use, table, key). Keys that no tier
has are not cached: they would push real rows out, and a newer version may have them. They count as misses.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxsok import checks, keys as keys_lib
from jaxsok.records import Records, hottest_rows
from jaxsok.serving.backing import RowSource, fetch_lines, join_lines, round_rows
from jaxsok.serving.cache import programs
from jaxsok.serving.cache.programs import LEAST_KEYS
from jaxsok.serving.cache.requests import Fetched, Fetcher, Found, Request
from jaxsok.serving.cache.stores import Batch, Counter, DeviceStores
from jaxsok.serving.devices import device_or_default
from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTable, FrozenTables, check_records
from jaxsok.serving.padding import NO_KEYS, fill_up, padded_size, slices
from jaxsok.serving.ready import rest_s
from jaxsok.shards import view_on_host
from jaxsok.store import num_buckets_of
from jaxsok.types import BUCKET_WORDS, MAX_CAPACITY, NO_ROW, PADDING_KEY

ROWS_AT_A_TIME = 1 << 17  # rows of one step of a fill, refresh or swap, which bounds their memory on host and device
MIN_ROWS: int = 64  # rows of a table's share, at least: 2 slabs of 32 rows, as in HPS


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """The result of a lookup."""

    rows: dict[str, np.ndarray]  # float32[*keys.shape, dim] by table; may be read only
    version: int  # of the source and of all rows
    hit_rates: dict[str, float]  # by table: distinct keys that the cache had ÷ distinct keys; 1.0 without keys


class DeviceCache:
    """A cache of some rows on the device over a source of all; looked up by many threads. Close it.

    Tables of one dim and dtype share a store with room for the sum of their shares: `fraction` of the rows of each, and
    at least `min_rows`. The least recently used row of a store leaves, whatever its table, as in HPS where tables are
    fused. Rows are cached in the bits of their table's dtype.

    Args:
      source: belongs to the caller, which closes it.
      fraction: HPS's `gpucacheper`.
      hit_rate_threshold: from this hit rate of a table on, its misses are fetched in the background. 0: always;
        above 1: never, so that answers are exact.
      refresh_fraction: the part of the cached rows that `refresh` reads at a time; 0: all at once.
      max_pending: lookups whose misses may wait for the background thread; more are dropped, and counted.
      keeps_rows: False: lookups read the source each time, as without a cache.

    Cost:
      A lookup that hits: one program. An insertion into a full store reads about 100 bytes a row of capacity; other
      lookups wait for it.

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
        keeps_rows: bool = True,
        min_rows: int = MIN_ROWS,
        device: Any = None,
    ) -> None:
        checks.number("DeviceCache: fraction", fraction, checks.ABOVE_ZERO, math.inf, "a number above 0")
        checks.number("DeviceCache: hit_rate_threshold", hit_rate_threshold, 0, math.inf, "a number from 0")
        checks.number("DeviceCache: refresh_fraction", refresh_fraction, 0, 1)
        checks.integer("DeviceCache: max_pending", max_pending, 1)
        checks.integer("DeviceCache: min_rows", min_rows, 1)
        self.hit_rate_threshold, self.refresh_fraction = hit_rate_threshold, refresh_fraction
        self.device = device_or_default(device)
        self._spec = FrozenSpec.of(list(source.tables.values()))
        share = min(fraction, 1.0)
        self._shares = {name: max(min_rows, math.ceil(share * source.num_rows(name))) for name in source.tables}
        capacities = _capacities(self._spec, self._shares)
        for tables, capacity in zip(self._spec.stores, capacities, strict=True):
            if capacity > MAX_CAPACITY:
                raise ValueError(
                    f"DeviceCache: fraction: got {fraction}, {capacity} rows of tables "
                    f"{[table.name for table in tables]}, wanted at most {MAX_CAPACITY} in one store."
                )
        self.capacity = sum(capacities)  # rows
        self._counter = Counter(source.tables)
        self.stores = DeviceStores(source, self._spec, capacities, self.device, self._counter)
        self._compiled = self.stores.compiled
        self._fetcher = Fetcher(self.stores, self._counter, max_pending, keeps_rows)
        self._changing = threading.Lock()  # held by one refresh or swap, from its search for cached keys to its end
        self.stats, self.table_counts = self._counter.stats, self._counter.tables
        self.tables_like, self.warm_up = self._compiled.tables_like, self._compiled.warm_up
        self.stop_compiling = self._compiled.background.stop  # before `close`, where other caches are closed too

    @property
    def source(self) -> RowSource:
        return self.stores.epoch.source

    @property
    def num_bytes(self) -> int:
        return self.stores.num_bytes

    @property
    def num_rows(self) -> dict[str, int]:
        """The cached rows of each table (waits for the device); none after `close`."""
        counts = [np.asarray(line) for line in self.stores.copies("table_rows")]
        return {name: int(counts[s][number]) if counts else 0 for name, (s, number) in self._spec.places.items()}

    def lookup(self, keys: Mapping[str, Any]) -> CachedRows:
        """Reads the rows of keys of any shape, all of one version of the source; its errors leave the cache as it was.

        Keys that no tier has, and those whose rows come in the background, have the default of their table. PADDING_KEY
        reads zeros and is not counted.
        """
        request = Request(self._spec, keys, self._compiled.choose_sizes)
        found, fetched = self._ask(request, is_expanded=True)
        stores = {self._spec.places[name][0] for name in request.lines}
        of_store = {s: view_on_host(found.out.rows[s][0], may_write=True) for s in stores}
        rows: dict[str, np.ndarray] = {}
        for name, place in request.lines.items():
            s = self._spec.places[name][0]
            lines = of_store[s][place]
            if name in fetched:
                lines = fetched[name].put_into(lines, view_on_host(found.out.inverse[s])[place])
            lines.flags.writeable = False
            rows[name] = lines.reshape(*request.shapes[name], lines.shape[1])
        return CachedRows(rows, found.epoch.source.version, found.hit_rates)

    def lookup_tables(self, keys: Mapping[str, Any]) -> tuple[FrozenTables, RowSource]:
        """Looks up as `lookup`, and gives all tables frozen on the device, with one row for each distinct key.

        They are for code that looks up by itself. The second result is the source of their rows, which has the version.
        """
        request = Request(self._spec, keys, lambda least: least)
        found, fetched = self._ask(request, is_expanded=False)
        stores = [self._store_of(s, request, found, fetched) for s in range(len(self._spec.stores))]
        return FrozenTables(tuple(stores), self._spec), found.epoch.source

    def _ask(self, request: Request, *, is_expanded: bool) -> tuple[Found, dict[str, Fetched]]:
        found = Found(self._spec, request, *self.stores.query(request.batches, is_expanded))
        return found, self._fetcher.fetch(found, request.num_keys, self.hit_rate_threshold)

    def _store_of(self, s: int, request: Request, found: Found, fetched: Mapping[str, Fetched]) -> FrozenStore:
        """Packs the rows of a request in one store as a frozen store of their own."""
        slabs, table = found.out.rows[s], self._spec.stores[s][0]
        num_rows = slabs[0].shape[0]
        names = [name for name in request.lines if self._spec.places[name][0] == s]
        late = [fetched[name] for name in names if name in fetched]
        if late:
            places = np.concatenate([some.places for some in late]).astype(np.uint32)
            size = padded_size(len(places), LEAST_KEYS)
            self._compiled.make("merge", s, num_rows, size)
            parts = tuple(fill_up(part, size) for part in join_lines(some.rows for some in late))
            slabs = programs.merge(slabs, *self.stores.put((fill_up(places, size, NO_ROW), parts)))
        rows, *scales = slabs
        index, counters = found.out.indices[s]
        is_hidden = np.zeros(num_rows, bool)  # keys without a row: the model must not find them
        for name in found.missed.keys() & names:
            is_hidden[found.missed[name][0]] = True
        for some in late:
            is_hidden[some.places] = False
        if is_hidden.any():
            self._compiled.make("hide", s, num_rows)
            index = programs.hide(index, self.stores.put(is_hidden))
        return FrozenStore(index, counters, rows.astype(table.dtype), tuple(scales))

    def fill(self) -> int:
        """Fills each table's share before the first lookup; returns the number of cached rows.

        ValueError: the source gives rows of another width than its table's.
        Takes the first rows, or the hottest of all if the source knows frequencies. Host memory: twice a table's share.
        """
        epoch = self.stores.epoch
        for name, share in self._shares.items():
            table, hottest = epoch.source.tables[name], hottest_rows(_scan(epoch.source, name), share)
            chunks = list(slices(hottest.num_rows, ROWS_AT_A_TIME))
            for chunk in reversed(chunks):  # the hottest rows come last: they count as the most recent
                keys = hottest.keys[chunk]
                if table.is_quantized:  # only the source has their bits
                    rows, is_found = fetch_lines(epoch.source, name, keys)
                    keys = keys[is_found]
                else:
                    rows = round_rows(table, hottest.rows[chunk])
                self.stores.insert({name: (keys, rows)}, epoch)
        return sum(self.num_rows.values())

    def cached_keys(self) -> dict[str, np.ndarray]:
        """Reads the keys of each table that are cached now, uint64; copies 16 bytes a row of capacity to the host."""
        records = [np.asarray(of_store) for (of_store,) in self.stores.copies("records", is_required=True)]
        cached = {}
        for name, (s, number) in self._spec.places.items():
            keys = keys_lib.from_words(records[s][records[s][:, 2] == number, :2])
            cached[name] = keys[keys != np.uint64(PADDING_KEY)]
        return cached

    def refresh(self) -> int:
        """Overwrites cached rows in place with the source's, `refresh_fraction` of them at a time; returns how many.

        Keys that left the source leave the cache. The order of replacement stays. `swap` brings a new version.
        """
        with self._changing:
            self.stores.begin_epoch()  # what was fetched before is not what the source has now
            num_refreshed, cached = 0, self.cached_keys()
            share = math.ceil(sum(map(len, cached.values())) * (self.refresh_fraction or 1.0))
            for name, keys in cached.items():
                for chunk in slices(len(keys), min(max(1, share), ROWS_AT_A_TIME)):
                    written, gone = self._batches_of(self.source, name, keys[chunk])
                    num_refreshed += self.stores.rewrite([*written, *self.stores.batches({name: (gone, None)})])
            return num_refreshed

    def swap(self, source: RowSource, changed: Mapping[str, Any] | None) -> None:
        """Goes over to another version of the source: each lookup answers from the old or the new one, whole.

        `changed` has the keys whose rows differ or are gone, by table; None: everything leaves. The old source is not
        closed: earlier lookups may still read it.

        The cached ones among the changed keys are fetched before any lookup waits, and lie on the device. Lookups wait
        while one program is dispatched for each ROWS_AT_A_TIME of them, and one for each store that rows leave.
        """
        stores = self.stores
        tables = dict(self.source.tables)
        if dict(source.tables) != tables:
            got, wanted = list(source.tables.values()), list(tables.values())
            raise ValueError(f"swap: source: got tables {got}, wanted {wanted}; open another cache.")
        leaving: dict[str, np.ndarray] = {}  # distinct keys by table
        for name, keys in (changed or {}).items():
            self._spec.place_of("swap", name)
            keys = np.unique(keys_lib.from_words(keys_lib.to_words(np.asarray(keys), f'swap: table "{name}"')))
            leaving[name] = keys[keys != np.uint64(PADDING_KEY)]
        with self._changing, stores.keep_out(None if changed is None else leaving):
            if changed is not None:
                batches = self._changed_batches(source, leaving)
            else:
                batches = list(stores.batches({name: (keys, None) for name, keys in self.cached_keys().items()}))
            stores.rewrite(batches, source)
        self._counter.add(swaps=1)

    def _changed_batches(self, source: RowSource, changed: Mapping[str, np.ndarray]) -> list[Batch]:
        """Finds the changed keys that are cached: with their rows in another source, or to be dropped."""
        batches: list[Batch] = []
        gone = {name: [NO_KEYS] for name in changed}
        for name, keys in changed.items():
            for chunk in slices(len(keys), ROWS_AT_A_TIME):
                cached = keys[chunk][self.stores.contains(name, keys[chunk])]
                if len(cached):
                    written, missing = self._batches_of(source, name, cached)
                    batches += written
                    gone[name].append(missing)
        dropped = self.stores.batches({name: (np.concatenate(parts), None) for name, parts in gone.items()})
        return [*batches, *dropped]  # one program a store drops rows, which reads all of it

    def _batches_of(self, source: RowSource, name: str, keys: np.ndarray) -> tuple[list[Batch], np.ndarray]:
        """Reads the rows of keys, to be written; also returns the keys that the source does not have."""
        rows, is_found = fetch_lines(source, name, keys)
        return list(self.stores.batches({name: (keys[is_found], rows)})), keys[~is_found]

    def drain(self) -> None:
        """Waits until nothing is left to fetch or compile in the background."""
        self._fetcher.background.drain()
        self._compiled.background.drain()

    def close(self, timeout_s: float | None = None) -> bool:
        """Drains, gives the memory back, and returns whether compilation has ended within `timeout_s` (None: any)."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._compiled.background.stop()
        self._fetcher.background.drain(timeout_s)
        has_fetched = self._fetcher.background.close(rest_s(until))
        self.stores.close()
        return self._compiled.background.close(rest_s(until)) and has_fetched

    def __enter__(self) -> "DeviceCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cache_bytes(tables: Mapping[FrozenTable, int]) -> dict[str, int]:
    """Counts the bytes of device memory of a cache that holds these numbers of rows."""
    spec = FrozenSpec.of(list(tables))
    capacities = _capacities(spec, {table.name: num_rows for table, num_rows in tables.items()})
    return {
        "rows": sum(n * store[0].row_bytes for n, store in zip(capacities, spec.stores, strict=True)),
        "index": sum(4 * BUCKET_WORDS * num_buckets_of(n) for n in capacities),
        "records": 16 * sum(capacities),
        "statistics": 8 * sum(capacities),
    }


def _scan(source: RowSource, name: str) -> Iterator[Records]:
    for records in source.scan(name, ROWS_AT_A_TIME):
        check_records(f"{type(source).__name__}.scan", source.tables[name], records)
        yield records


def _capacities(spec: FrozenSpec, num_rows: Mapping[str, int]) -> list[int]:
    return [sum(num_rows[table.name] for table in tables) for tables in spec.stores]

"""The cached rows on the device, their source, the lock of both, and the counts of the cache."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok.interrupts import held_back
from jaxsok.serving.backing import Lines, RowSource, join_lines
from jaxsok.serving.cache import programs
from jaxsok.serving.cache.programs import LEAST_KEYS, CompiledPrograms
from jaxsok.serving.errors import ServingError
from jaxsok.serving.frozen import FrozenSpec, FrozenTable
from jaxsok.serving.padding import NO_KEYS, fill_up, key_words, padded_size
from jaxsok.serving.row_map import draw_salt
from jaxsok.shards import view_on_host
from jaxsok.types import NO_ROW

_LAST_TICK = 2**32 - 2
_MAX_SALTS = 8  # below one lookup in 10^9 needs a second one

Rows = Mapping[str, tuple[np.ndarray, Any]]  # distinct keys by table, and their `Lines`, or None


@dataclasses.dataclass(frozen=True, eq=False)
class Epoch:
    """The time from one swap to the next, in which all rows are of one source; each is another object."""

    source: RowSource


@dataclasses.dataclass(frozen=True)
class Batch:
    """Keys of one store, padded, on the device."""

    store: int
    num_keys: int
    size: int  # with padding
    words: Array
    ids: Array
    lines: tuple[Array, ...] | None  # their rows; None: they have none, or leave


@dataclasses.dataclass
class TableCounts:
    """Counts of the keys of one table since the cache was made: distinct keys of each lookup."""

    distinct: int = 0
    hits: int = 0
    misses: int = 0
    missing: int = 0  # fetched keys that no tier has

    @property
    def hit_rate(self) -> float:
        """The hit rate of all lookups together; 1.0 before the first."""
        return self.hits / self.distinct if self.distinct else 1.0


@dataclasses.dataclass
class CacheStats(TableCounts):
    """Counts of all tables together."""

    lookups: int = 0
    keys: int = 0  # occurrences, without padding
    sync: int = 0  # tables of lookups that waited for rows
    background: int = 0  # tables of lookups that answered misses with the default
    dropped: int = 0  # tables of lookups whose misses are not fetched, because too much was waiting
    fetched: int = 0  # keys asked of the source because they missed
    refreshed: int = 0  # rows overwritten by `refresh` and `swap`
    removed: int = 0  # rows that left by `refresh` and `swap`: their keys are gone, or everything was dropped
    failed: int = 0  # background fetches whose source raised; logged
    swaps: int = 0


class Counter:
    """The counts of one cache, added up by many threads."""

    def __init__(self, tables: Iterable[str]) -> None:
        self._lock = threading.Lock()
        # Changed and copied under `_lock`: a copy has all of an `add`, or none of it.
        self._tables = {name: collections.Counter[str]() for name in tables}
        self._all = collections.Counter[str]()

    def add(self, table: str | None = None, **more: int) -> None:
        with self._lock:
            self._all.update(more)
            if table is not None:
                self._tables[table].update(more)

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(**self._all)

    def tables(self) -> dict[str, TableCounts]:
        with self._lock:
            return {name: TableCounts(**counts) for name, counts in self._tables.items()}


class DeviceStores:
    """The arrays of all stores of a cache. Each query and insertion takes a tick of the clock; they run in that order.

    Programs donate the arrays to each other, so each dispatch happens under the lock; compiling does not.
    """

    def __init__(
        self, source: RowSource, spec: FrozenSpec, capacities: Sequence[int], device: Any, counter: Counter
    ) -> None:
        self.spec, self.capacities, self.device, self._counter = spec, capacities, device, counter
        self.layout: programs.Layout = tuple(words.tobytes() for words in spec.words)
        self._salt = draw_salt()  # of a query's scratch index
        self.lock = threading.Lock()
        # Written under `lock` alone. All rows in `arrays` are of `epoch`; no key of `_leaving` is inserted. Store s
        # has `_most_rows[s]` rows in use at most, so below its capacity none must leave. Closed: no arrays.
        self.arrays = tuple(map(self._new_store, spec.stores, capacities))
        self._most_rows = [0] * len(self.arrays)
        self._clock = 0
        self.epoch, self._is_mixed = Epoch(source), False  # mixed: rows of a source that failed to come could not leave
        self._leaving: Mapping[str, np.ndarray] | None = {}  # keys that a swap will change, sorted; None: all
        self.compiled = CompiledPrograms(spec, self.layout, self.arrays)

    @property
    def num_bytes(self) -> int:
        with self.lock:
            return sum(leaf.nbytes for leaf in jax.tree.leaves(self.arrays))

    def query(self, batches: Sequence[Any], is_expanded: bool) -> tuple[programs.Queried, np.ndarray, Epoch]:
        """Queries words and table ids by store; returns the results, their counts on the host, and their epoch."""
        operands = self.put(tuple(batches))
        self.compiled.make("query", is_expanded, tuple(words.shape[0] for words, _ in operands))
        for _ in range(_MAX_SALTS):
            with self.lock, held_back():
                self.require_open()
                if self._is_mixed:
                    raise RuntimeError(
                        "DeviceCache: rows: got some of a source that failed to come, which could not leave, wanted "
                        "those of one source; update the tables again, or open them again."
                    )
                clock = self._tick()
                form = self.layout, is_expanded, self.compiled.is_pinned
                parts = programs.query_parts(self.arrays)
                new_statistics, out = programs.query(*form, *parts, operands, clock, self._salt)
                queried = zip(self.arrays, new_statistics, strict=True)
                self.arrays = tuple(dataclasses.replace(store, statistics=new) for store, new in queried)
                epoch = self.epoch
            counts = view_on_host(out.counts)
            if not counts[:, 2].any():
                return out, counts, epoch
            self._salt = draw_salt()
        raise ServingError(f"lookup: keys: got some that find no place under {_MAX_SALTS} salts, wanted others.")

    def insert(self, rows: Rows, epoch: Epoch) -> None:
        """Inserts rows of an epoch in one tick, unless it is over; does not wait for the device."""
        while True:
            leaving = self._leaving
            if leaving is None:
                return
            kept = {name: _drop_keys(*some, leaving.get(name, NO_KEYS)) for name, some in rows.items()}
            batches = list(self.batches(kept, are_bounded=True))
            if not batches:
                return
            with self.lock:
                if self.epoch is not epoch or not self.arrays:
                    return
                if self._leaving is not leaving:  # a swap has begun, or failed
                    continue
                bounds = {batch.store: self._most_rows[batch.store] + batch.num_keys for batch in batches}
                chosen = [(some.store, bounds[some.store] > self.capacities[some.store], some.size) for some in batches]
                if all(self.compiled.has("insert", *program) for program in chosen):
                    clock = self._tick()
                    with self._replacing() as stores:
                        for batch, (s, must_leave, _) in zip(batches, chosen, strict=True):
                            keys = batch.words, batch.ids, batch.lines
                            stores[s] = programs.insert(must_leave, stores[s], *keys, clock)
                            self._most_rows[s] = min(bounds[s], self.capacities[s])
                    return
            for program in chosen:  # while others look up; afterwards other rows may have to leave
                self.compiled.make("insert", *program)

    def contains(self, name: str, keys: np.ndarray) -> np.ndarray:
        (batch,) = self.batches({name: (keys, None)})
        self.compiled.make("find", batch.store, batch.size)
        with self.lock:
            self.require_open()
            store = self.arrays[batch.store]
            row_ids = programs.find(store.index, store.counters, batch.words, batch.ids)
        return np.asarray(row_ids)[: len(keys)] != NO_ROW

    def rewrite(self, batches: Sequence[Batch], source: RowSource | None = None) -> int:
        """Overwrites cached rows, drops those of batches without lines, and sets a given source; counts the former.

        If a program fails on the way to another source, all rows leave: none may be of that source. If they cannot,
        queries are refused until they have left.
        """
        for batch in batches:
            self.compiled.make("drop" if batch.lines is None else "overwrite", batch.store, batch.size)
        written, dropped = [], []
        with self.lock:
            self.require_open()
            if source is not None:
                if self._is_mixed:
                    self._drop_all()
                self._is_mixed = True
            try:
                with self._replacing() as stores:
                    for batch in batches:
                        operands = stores[batch.store], batch.words, batch.ids
                        if batch.lines is None:
                            stores[batch.store], count = programs.drop(*operands)
                        else:
                            stores[batch.store], count = programs.overwrite(*operands, batch.lines)
                        (dropped if batch.lines is None else written).append(count)
            except BaseException:
                if source is not None:
                    self._drop_all()
                raise
            if source is not None:
                self.epoch, self._is_mixed = Epoch(source), False
        num_written = sum(map(int, written))
        self._counter.add(refreshed=num_written, removed=sum(map(int, dropped)))
        return num_written

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[list[programs.CacheStore]]:
        """Gives the stores to programs that donate them, under `lock`; keeps what those have made that did not fail."""
        with held_back():
            stores = list(self.arrays)
            try:
                yield stores
            finally:
                self.arrays = tuple(stores)

    def _drop_all(self) -> None:
        with self._replacing() as stores:
            for s, store in enumerate(stores):
                sizes = len(self.spec.stores[s]), self.capacities[s]
                stores[s] = _new_store(*sizes, draw_salt(), store.rows, store.numbers)
                self._most_rows[s] = 0
        self._is_mixed = False

    def begin_epoch(self) -> None:
        """Begins another epoch of the same source: rows that are on their way are not inserted."""
        with self.lock:
            self.epoch = Epoch(self.epoch.source)

    @contextlib.contextmanager
    def keep_out(self, keys: Mapping[str, np.ndarray] | None) -> Iterator[None]:
        """Prevents insertions of these keys, None: of any; only those already cached stay."""
        with self.lock:
            self.require_open()
            self._leaving = keys
        try:
            yield
        finally:
            with self.lock:
                self._leaving = {}

    def copies(self, field: str, *, is_required: bool = False) -> list[Any]:
        """Copies a field of each store, which a later program may donate. Closed stores return none, or are refused."""
        for s in range(len(self.capacities)):
            self.compiled.make("copy", s, field)
        with self.lock:
            if is_required:
                self.require_open()
            return [programs.copy(getattr(store, field)) for store in self.arrays]

    def close(self) -> None:
        with self.lock:
            self.arrays = ()

    def require_open(self) -> None:
        if not self.arrays:
            raise ServingError("DeviceCache: got a call after close, wanted none; open another.")

    def batches(self, rows: Rows, *, are_bounded: bool = False) -> Iterator[Batch]:
        """Packs keys of tables by store for the device; with a bound no more than a store has room for."""
        parts: dict[int, list[Any]] = {}
        for name, (keys, lines) in rows.items():
            s, number = self.spec.places[name]
            parts.setdefault(s, []).append((np.full(len(keys), number, np.uint32), keys, lines))
        for s, some in parts.items():
            ids, keys = (np.concatenate([part[i] for part in some]) for i in range(2))
            lines = None if some[0][2] is None else join_lines(part[2] for part in some)
            if are_bounded and lines is not None and len(keys) > self.capacities[s]:
                last = np.sort(np.lexsort((keys, ids))[-self.capacities[s] :])
                ids, keys, lines = ids[last], keys[last], tuple(array[last] for array in lines)
            if not len(keys):
                continue
            size, table, slabs = padded_size(len(keys), LEAST_KEYS), self.spec.stores[s][0], None
            if lines is not None:
                numbers, *scales = lines
                slabs = numbers.astype(jnp.dtype(table.dtype), copy=False), *(scale[:, None] for scale in scales)
                slabs = tuple(fill_up(part, size) for part in slabs)
            yield Batch(s, len(keys), size, *self.put((key_words(keys, size), fill_up(ids, size), slabs)))

    def put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.device)

    def _tick(self) -> np.uint32:
        if self._clock >= _LAST_TICK:
            self._renumber()
        self._clock += 1
        return np.uint32(self._clock)

    def _renumber(self) -> None:
        """Numbers the ticks again from 1 in the same order: the clock has 32 bits. Waits for the device."""
        statistics = [np.array(store.statistics[0]) for store in self.arrays]
        ticks, ranks = np.unique(np.concatenate([lines[:, 0] for lines in statistics]), return_inverse=True)
        parts = np.split(ranks.ravel(), np.cumsum([len(lines) for lines in statistics[:-1]]))
        stores = []
        for store, lines, of_store in zip(self.arrays, statistics, parts, strict=True):
            lines[:, 0] = of_store
            owned = jax.device_put(lines, self.device, may_alias=False)  # as what is donated has to be
            stores.append(dataclasses.replace(store, statistics=(owned,)))
        self.arrays, self._clock = tuple(stores), len(ticks)

    def _new_store(self, tables: Sequence[FrozenTable], capacity: int) -> programs.CacheStore:
        with jax.default_device(self.device):
            rows, numbers = (jnp.zeros((capacity, tables[0].dim), tables[0].dtype),), ()
            if tables[0].is_quantized:
                rows, numbers = (jnp.zeros((capacity, 1), jnp.float32),), rows
            return jax.device_put(_new_store(len(tables), capacity, draw_salt(), rows, numbers), self.device)


def _drop_keys(keys: np.ndarray, rows: Lines, leaving: np.ndarray) -> tuple[np.ndarray, Lines]:
    """Takes out the keys in a sorted array, and their rows."""
    if not len(leaving):
        return keys, rows
    place = np.minimum(np.searchsorted(leaving, keys), len(leaving) - 1)
    stays = leaving[place] != keys
    return keys[stays], tuple(array[stays] for array in rows)


_new_store = jax.jit(programs.empty_store, static_argnums=(0, 1), donate_argnums=(3, 4))

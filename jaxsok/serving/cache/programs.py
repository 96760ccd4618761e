"""The arrays of one store of a device cache, and the programs over them; a query changes the ticks of uses alone.

Programs are compiled before they are called, while the lock of the cache is free (`CompiledPrograms`).
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok.kernels import evict as evict_kernels, table as kernels
from jaxsok.kernels.call import StoreArrays
from jaxsok.keys import PADDING_WORD
from jaxsok.serving.frozen import SEED, FrozenSpec, FrozenStore, FrozenTables
from jaxsok.serving.padding import padded_size
from jaxsok.serving.ready import Background, Form, Ready
from jaxsok.serving.row_map import SALT, UNUSED, find_or_insert, release
from jaxsok.store import num_buckets_of
from jaxsok.types import BUCKET_WORDS, COUNTERS, COUNTS, NO_ROW, NUM_TABLE_WORDS, RECORD_WORDS

LEAST_KEYS = 256  # keys of the smallest programs; others have powers of two, so that programs are few

_MOST_PADDING = 4  # a lookup is padded to this many times its keys at most, while its own program is compiled,
_FEW_KEYS = 1 << 14  # or to this many in all: they cost a few milliseconds
_NO_TABLE = np.uint32(2**24 - 1)  # kMaxTables of ffi/core/layout.h, less 1
_INSERTED, _REFUSED = COUNTS.index("num_inserted"), COUNTS.index("num_refused")

Layout = tuple[bytes, ...]  # the words of the tables of each store, hashable: a program is compiled for each
Sizes = tuple[int, ...]  # keys of each store


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheStore(StoreArrays):
    """Rows of tables of one dim and dtype, as a training store has them, in one slab.

    Its statistics are the tick of each row's last use, and how often it was used. `rows` of quantized tables are the
    scales of `numbers`: kernels begin new rows in floats.
    """

    numbers: tuple[Array, ...] = ()

    @property
    def slabs(self) -> tuple[Array, ...]:
        """The arrays of which a row has a part."""
        return *self.numbers, *self.rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queried:
    """The results of the query program, by store."""

    rows: tuple[tuple[Array, ...], ...]  # float32 of each position; numbers and scales of distinct keys, if quantized
    records: tuple[Array, ...]  # of the distinct keys, by first position
    row_ids: tuple[Array, ...]  # of the distinct keys in the cache
    inverse: tuple[Array, ...]
    indices: tuple[tuple[Array, Array], ...]
    counts: Array  # by table of all stores: distinct keys, misses, keys that found no place among the distinct


def empty_store(
    num_tables: int, capacity: int, salt: Any, rows: tuple[Array, ...] = (), numbers: tuple[Array, ...] = ()
) -> CacheStore:
    """Makes a store without keys over the arrays of its rows, if it has any."""
    return CacheStore(
        index=jnp.full((num_buckets_of(capacity), BUCKET_WORDS), UNUSED),
        counters=jnp.zeros(len(COUNTERS), jnp.uint32).at[SALT].set(salt),
        table_rows=jnp.zeros(num_tables, jnp.uint32),
        rows=rows,
        records=(jnp.full((capacity, RECORD_WORDS), UNUSED),),
        statistics=(jnp.zeros((capacity, 2), jnp.uint32),),
        numbers=numbers,
    )


def query_parts(stores: Sequence[CacheStore]) -> tuple[Any, Any]:
    """Separates what a query donates, the statistics, from what it only reads."""
    statistics = tuple(store.statistics for store in stores)
    return statistics, tuple((store.index, store.counters, store.slabs) for store in stores)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def query(
    layout: Layout,
    is_expanded: bool,
    is_pinned: bool,
    statistics: tuple[tuple[Array, ...], ...],
    stores: tuple[tuple[Array, Array, tuple[Array, ...]], ...],
    batches: tuple[tuple[Array, Array], ...],
    clock: Array,
    salt: Array,
) -> tuple[tuple[tuple[Array, ...], ...], Queried]:
    """Makes keys distinct, asks the cache, and gives each position its row: steps 1, 2 and 5 of a lookup.

    If `is_pinned`, it writes what the host reads to pinned host memory, at the rate of the link, for `view_on_host`.
    """
    by_store = zip(layout, statistics, stores, batches, strict=True)
    done = [_query_store(*operands, is_expanded, clock, salt) for operands in by_store]
    new_statistics, rows, records, row_ids, inverse, indices, counts = zip(*done, strict=True)
    found = {"records": records, "row_ids": row_ids, "inverse": inverse, "counts": jnp.concatenate(counts)}
    found |= {"rows": rows} if is_expanded else {}
    if is_pinned:
        found = jax.device_put(found, jax.memory.Space.Host)
    return new_statistics, Queried(**{"rows": rows, "indices": indices, **found})


def _query_store(
    words_of_tables: bytes, statistics: Any, store: Any, batch: Any, is_expanded: bool, clock: Array, salt: Array
) -> tuple[Any, ...]:
    index, counters, (*numbers, rows) = store  # of quantized rows the scales
    words, ids = batch
    table_words = np.frombuffer(words_of_tables, np.uint32).reshape(-1, NUM_TABLE_WORDS)
    n, num_tables = words.shape[0], len(table_words)
    # (table, key) pairs are made distinct by inserting them into an empty store.
    scratch = dataclasses.replace(empty_store(num_tables, n, salt), statistics=())
    scratch, inverse, counts = find_or_insert(scratch, words, ids)
    records = scratch.records[0]
    unique, unique_ids = records[:, :2], records[:, 2]
    row_ids = kernels.find(index, counters, unique, unique_ids)
    statistics = kernels.touch(row_ids, None, clock, statistics)
    is_of = unique_ids[:, None] == jnp.arange(num_tables, dtype=jnp.uint32)[None, :]
    hits = (is_of & (row_ids != jnp.uint32(NO_ROW))[:, None]).sum(axis=0, dtype=jnp.int32)
    if is_expanded:
        wanted = row_ids.at[inverse].get(mode="fill", fill_value=np.uint32(NO_ROW))
        requests = jnp.concatenate([words, ids[:, None], jnp.ones((n, 1), jnp.uint32)], axis=1)
    else:
        wanted = row_ids
        requests = jnp.concatenate([records[:, :3], jnp.ones((n, 1), jnp.uint32)], axis=1)
    if numbers and not is_expanded:
        # Rows of uncached keys have no meaning; `hide` takes those that are not fetched either.
        lines = _read(numbers[0], wanted), _read(rows, wanted)[:, 0]
    else:
        stored, of_stored, is_row = rows, wanted, wanted != jnp.uint32(NO_ROW)
        if numbers:  # what keys without a row read is not rounded: float rows, of which only theirs count
            stored = jnp.zeros((1, numbers[0].shape[1]), jnp.float32)
            of_stored = jnp.where(is_row, jnp.uint32(0), jnp.uint32(NO_ROW))
        arrays = counters, table_words, jnp.asarray(SEED), requests, of_stored, (stored,)
        _, wide, _ = kernels.gather(*arrays, is_find=False, dtype="float32")
        if numbers:
            scaled = _read(numbers[0], wanted).astype(jnp.float32) * _read(rows, wanted)
            wide = jnp.where(is_row[:, None], scaled, wide)
        lines = (wide,)
    distinct = counts[:, _INSERTED]
    summary = jnp.stack([distinct, distinct - hits, counts[:, _REFUSED]], axis=1)
    return statistics, lines, records, row_ids, inverse, (scratch.index, scratch.counters), summary


def _read(slab: Array, row_ids: Array) -> Array:
    return slab.at[row_ids].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def insert(
    must_leave: bool, store: CacheStore, words: Array, ids: Array, lines: tuple[Array, ...], clock: Array
) -> CacheStore:
    """Inserts at most `capacity` distinct keys; with `must_leave` the least recent rows make room."""
    if must_leave:
        known = kernels.find(store.index, store.counters, words, ids)
        is_key = (words != PADDING_WORD).any(axis=1)
        num_new = (is_key & (known == jnp.uint32(NO_ROW))).sum(dtype=jnp.uint32)
        # Keys that are here already become as recent as new ones.
        store = dataclasses.replace(store, statistics=kernels.touch(known, None, clock, store.statistics))
        num_kept = jnp.uint32(store.records[0].shape[0]) - num_new
        ticks = store.statistics[0][:, 0]
        flags, _ = evict_kernels.select(num_kept, store.records, [[ticks]], [], store.table_rows.shape[0])
        store, _ = evict_kernels.release(store, flags)
    store, row_ids, _ = find_or_insert(store, words, ids)
    store = _scatter(store, row_ids, lines)
    return dataclasses.replace(store, statistics=kernels.touch(row_ids, None, clock, store.statistics))


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(store: CacheStore, words: Array, ids: Array, lines: tuple[Array, ...]) -> tuple[CacheStore, Array]:
    """Overwrites the rows of those keys that are cached, and counts them. The order of replacement stays as it is."""
    known = kernels.find(store.index, store.counters, words, ids)
    store = _scatter(store, known, lines)
    return store, (known != jnp.uint32(NO_ROW)).sum(dtype=jnp.uint32)


def _scatter(store: CacheStore, row_ids: Array, lines: tuple[Array, ...]) -> CacheStore:
    slabs = [kernels.scatter(row_ids, part, (slab,))[0] for part, slab in zip(lines, store.slabs, strict=True)]
    return dataclasses.replace(store, numbers=tuple(slabs[:-1]), rows=(slabs[-1],))


@jax.jit
def merge(slabs: tuple[Array, ...], row_ids: Array, lines: tuple[Array, ...]) -> tuple[Array, ...]:
    """Replaces some rows, and their scales."""
    (rows, *scales), (new_rows, *new_scales) = slabs, lines
    replaced = (old.at[row_ids].set(new, mode="drop") for old, new in zip(scales, new_scales, strict=True))
    return kernels.scatter(row_ids, new_rows, (rows,))[0], *replaced


@jax.jit
def hide(index: Array, is_hidden: Array) -> Array:
    """Hides rows from an index by row id: it gives their entries no table."""
    entries = index.reshape(-1, 4)  # key (two words), row id, table
    hides = is_hidden.at[entries[:, 2]].get(mode="fill", fill_value=False)
    return entries.at[:, 3].set(jnp.where(hides, _NO_TABLE, entries[:, 3])).reshape(index.shape)


find = jax.jit(kernels.find)
copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))
# Drops and counts the rows of those keys that are cached; reads all records and the index once.
drop = jax.jit(release, donate_argnums=0)
_PROGRAMS = {"query": query, "insert": insert, "overwrite": overwrite, "merge": merge, "hide": hide}
_PROGRAMS |= {"find": find, "copy": copy, "drop": drop}


class CompiledPrograms:
    """The compiled programs of a cache, by name and the sizes that `_operands` takes."""

    def __init__(self, spec: FrozenSpec, layout: Layout, stores: Sequence[CacheStore]) -> None:
        self._spec, self._layout = spec, layout
        self._forms = Form(tuple(stores)).tree
        self._place = self._forms[0].index.sharding
        (device,) = stores[0].index.devices()
        self.is_pinned = device.platform != "cpu"  # of the results of queries for the host
        self._ready: Ready[tuple[Any, ...]] = Ready(self._compile)
        self.background = Background()
        self.query_sizes: set[Sizes] = set()  # for which the query of `lookup` is compiled; only grows

    def has(self, name: str, *sizes: Any) -> bool:
        return self._ready.has(None, (name, *sizes))

    def make(self, name: str, *sizes: Any) -> None:
        self._ready.need(None, (name, *sizes))

    def _compile(self, _: None, program: tuple[Any, ...]) -> None:
        name, *sizes = program
        _PROGRAMS[name].lower(*self._operands(name, *sizes)).compile()
        if name == "query" and sizes[0]:
            self.query_sizes.add(sizes[1])

    def _operands(self, name: str, of: Any, *sizes: Any) -> tuple[Any, ...]:
        """Describes a program's operands, which are neither read nor donated; `of` is a store, but of a query."""
        if name == "query":  # of `lookup`, which gives each position its row, or of `lookup_tables`
            form, batches = (self._layout, of, self.is_pinned), tuple(map(self._keys, *sizes))
            return *form, *query_parts(self._forms), batches, np.uint32(0), np.zeros(2, np.uint32)
        form = self._forms[of]
        match name, sizes:
            case "insert", (must_leave, size):
                return must_leave, form, *self._keys(size), self._lines(of, size), np.uint32(0)
            case "overwrite", (size,):
                return form, *self._keys(size), self._lines(of, size)
            case "drop", (size,):
                return form, *self._keys(size)
            case "find", (size,):
                return form.index, form.counters, *self._keys(size)
            case "copy", (field,):
                return (getattr(form, field),)
            case "merge", (num_rows, num_lines):  # of fetched rows into those of a lookup
                return self._slabs(of, num_rows), self._shape((num_lines,), np.uint32), self._slabs(of, num_lines)
        (num_rows,) = sizes  # "hide"
        return self._index(num_rows), self._shape((num_rows,), np.bool_)

    def choose_sizes(self, least: Sizes) -> Sizes:
        """Chooses the sizes of a lookup: the least, or while those are compiled a query that is not much larger."""
        if least in self.query_sizes:
            return least
        most = max(_MOST_PADDING * sum(least), _FEW_KEYS)
        at_most = [sizes for sizes in tuple(self.query_sizes) if sum(sizes) <= most]
        larger = [sizes for sizes in at_most if all(a >= b for a, b in zip(sizes, least, strict=True))]
        if not larger:
            return least
        program = "query", True, least
        self.background.offer(program, functools.partial(self._ready.make, None, program))
        return min(larger, key=lambda sizes: (sum(sizes), sizes))

    def warm_up(self, lookups: Iterable[Mapping[str, int]], *, as_tables: bool = False) -> None:
        """Compiles the programs of lookups with these numbers of keys: queries, and insertions of misses.

        Smaller lookups are then padded to these sizes until a thread has compiled their own programs. `as_tables`: for
        `lookup_tables`. On a CPU core a size of a lookup takes about 0.3 s, a store and power of two 0.15 s.
        """
        sizes = [self._by_store("warm_up", num_keys) for num_keys in lookups]
        for of_store in sizes:
            padded = tuple(padded_size(count, LEAST_KEYS) for count in of_store)
            self.make("query", not as_tables, padded)
            for s, size in enumerate(padded) if as_tables else ():
                self.make("hide", s, size)
                for step in range((size // LEAST_KEYS).bit_length()):
                    self.make("merge", s, size, LEAST_KEYS << step)
        for s, most in enumerate(map(max, zip(*sizes, strict=True))):
            last = padded_size(min(most, self._forms[s].records[0].shape[0]), LEAST_KEYS)
            for step in range((last // LEAST_KEYS).bit_length() if most else 0):
                for must_leave in (False, True):
                    self.make("insert", s, must_leave, LEAST_KEYS << step)

    def tables_like(self, num_keys: Mapping[str, int]) -> FrozenTables:
        """Describes the result of `lookup_tables` for these numbers of keys, padding included, as shapes."""
        stores = []
        for s, count in enumerate(self._by_store("tables_like", num_keys)):
            size = padded_size(count, LEAST_KEYS)
            rows, *scales = self._slabs(s, size)
            rows = self._shape(rows.shape, jnp.dtype(self._spec.stores[s][0].dtype))
            counters = self._shape((len(COUNTERS),), np.uint32)
            stores.append(FrozenStore(self._index(size), counters, rows, tuple(scales)))
        return FrozenTables(tuple(stores), self._spec)

    def _by_store(self, op: str, num_keys: Mapping[str, int]) -> list[int]:
        sizes = [0] * len(self._spec.stores)
        for name, count in num_keys.items():
            sizes[self._spec.place_of(op, name)[0]] += count
        return sizes

    def _index(self, num_rows: int) -> Any:
        return self._shape((num_buckets_of(num_rows), BUCKET_WORDS), np.uint32)

    def _slabs(self, s: int, size: int) -> tuple[Any, ...]:
        table = self._spec.stores[s][0]
        if not table.is_quantized:
            return (self._shape((size, table.dim), np.float32),)
        return self._shape((size, table.dim), jnp.dtype(table.dtype)), self._shape((size,), np.float32)

    def _lines(self, s: int, size: int) -> tuple[Any, ...]:
        return tuple(self._shape((size, slab.shape[1]), slab.dtype) for slab in self._forms[s].slabs)

    def _keys(self, size: int) -> tuple[Any, Any]:
        return self._shape((size, 2), np.uint32), self._shape((size,), np.uint32)

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

"""The arrays of one store of a device cache, and the programs over them.

A store has the arrays of training without optimizer state, and each row's tick of its last use. A query changes ticks
alone; insertions, rewrites and emptying change the rest, in place.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Shaped, UInt32

from jaxsok.kernels import evict as evict_kernels
from jaxsok.kernels import table as kernels
from jaxsok.kernels.call import StoreArrays
from jaxsok.serving.frozen import SEED, FrozenSpec
from jaxsok.store import num_buckets_of
from jaxsok.types import BUCKET_WORDS, COUNTERS, COUNTS, NO_ROW, NUM_TABLE_WORDS, PADDING_KEY

_SEED = np.zeros(2, np.uint32)  # for new rows, which are overwritten
_NO_TABLE = np.uint32(2**24 - 1)  # kMaxTables of ffi/core/layout.h, less 1
_INSERTED, _REFUSED = COUNTS.index("num_inserted"), COUNTS.index("num_refused")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheStore:
    """Rows of tables of one dim and dtype, as a training store has them, and the tick of each one's last use."""

    index: UInt32[Array, "num_buckets 16"]
    counters: UInt32[Array, " num_counters"]
    table_rows: UInt32[Array, " num_tables"]
    rows: Shaped[Array, "capacity dim"]
    records: UInt32[Array, "capacity 4"]
    statistics: UInt32[Array, "capacity 2"]  # tick of the last use, and how often it was used
    scales: tuple[Float32[Array, "capacity 1"], ...] = ()  # one array, of quantized rows

    @property
    def slabs(self) -> tuple[Array, ...]:
        """The arrays of which a row has a part."""
        return self.rows, *self.scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queried:
    """What the query program gives, by store."""

    rows: tuple[tuple[Array, ...], ...]  # float32 of each position; numbers and scales of distinct keys, if quantized
    records: tuple[Array, ...]  # of the distinct keys, by first position
    row_ids: tuple[Array, ...]  # of the distinct keys in the cache
    inverse: tuple[Array, ...]
    indices: tuple[tuple[Array, Array], ...]
    counts: Array  # by table of all stores: distinct keys, misses, keys that found no place among the distinct


class Layout:
    """The words of the tables of each store, as one hashable value: a program is compiled for each."""

    def __init__(self, spec: FrozenSpec) -> None:
        self.words = spec.words
        content = b"".join(repr(array.shape).encode() + array.tobytes() for array in self.words)
        self._digest = hashlib.blake2b(content, digest_size=16).digest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._digest == other._digest


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def query(
    layout: Layout,
    is_expanded: bool,
    statistics: tuple[Array, ...],
    stores: tuple[tuple[Array, Array, tuple[Array, ...]], ...],
    batches: tuple[tuple[Array, Array], ...],
    clock: Array,
    salt: Array,
) -> tuple[tuple[Array, ...], Queried]:
    """Steps 1, 2 and 5 of a lookup: makes keys distinct, asks the cache, gives each position its row."""
    done = [
        _query_store(*arguments, is_expanded, clock, salt)
        for arguments in zip(layout.words, statistics, stores, batches, strict=True)
    ]
    new_statistics, rows, records, row_ids, inverse, indices, counts = zip(*done, strict=True)
    return new_statistics, Queried(rows, records, row_ids, inverse, indices, jnp.concatenate(counts))


def _query_store(
    table_words: np.ndarray, statistics: Array, store: Any, batch: Any, is_expanded: bool, clock: Array, salt: Array
) -> tuple[Any, ...]:
    index, counters, (rows, *scales) = store
    words, ids = batch
    n, num_tables = words.shape[0], len(table_words)
    scratch_index, scratch_counters, records, inverse, counts = _distinct(words, ids, num_tables, salt)
    unique, unique_ids = records[:, :2], records[:, 2]
    row_ids = kernels.find(index, counters, unique, unique_ids)
    (statistics,) = kernels.touch(row_ids, None, clock, (statistics,))
    is_hit = row_ids != jnp.uint32(NO_ROW)
    is_of = unique_ids[:, None] == jnp.arange(num_tables, dtype=jnp.uint32)[None, :]
    hits = (is_of & is_hit[:, None]).sum(axis=0, dtype=jnp.int32)
    if is_expanded:
        wanted = row_ids.at[inverse].get(mode="fill", fill_value=np.uint32(NO_ROW))
        requests = jnp.concatenate([words, ids[:, None], jnp.ones((n, 1), jnp.uint32)], axis=1)
    else:
        wanted = row_ids
        requests = jnp.concatenate([records[:, :3], jnp.ones((n, 1), jnp.uint32)], axis=1)
    if scales and not is_expanded:
        # Rows of uncached keys mean nothing: those that are not fetched either are `hidden`.
        lines = rows.at[wanted].get(mode="fill", fill_value=0), scales[0].at[wanted, 0].get(mode="fill", fill_value=0)
    else:
        stored, of_stored, is_row = rows, wanted, wanted != jnp.uint32(NO_ROW)
        if scales:  # what keys without a row read is not rounded: float rows, of which only theirs count
            stored = jnp.zeros((1, rows.shape[1]), jnp.float32)
            of_stored = jnp.where(is_row, jnp.uint32(0), jnp.uint32(NO_ROW))
        seed = jnp.asarray(SEED)
        _, wide, _ = kernels.gather(
            counters, table_words, seed, requests, of_stored, (stored,), is_find=False, dtype="float32"
        )
        if scales:
            numbers = rows.at[wanted].get(mode="fill", fill_value=0).astype(jnp.float32)
            wide = jnp.where(is_row[:, None], numbers * scales[0].at[wanted].get(mode="fill", fill_value=0), wide)
        lines = (wide,)
    distinct = counts[:, _INSERTED]
    summary = jnp.stack([distinct, distinct - hits, counts[:, _REFUSED]], axis=1)
    return statistics, lines, records, row_ids, inverse, (scratch_index, scratch_counters), summary


def _distinct(words: Array, ids: Array, num_tables: int, salt: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Makes (table, key) pairs distinct by inserting them into an empty store.

    Gives index, counters and records of that store, each position's place (NO_ROW for padding), and counts.
    """
    n = words.shape[0]
    index, table_rows, records, _ = empty_arrays(num_buckets_of(n), num_tables, n)
    low, high = COUNTERS.index("salt_low"), COUNTERS.index("salt_high")
    counters = jnp.zeros(len(COUNTERS), jnp.uint32).at[low].set(salt[0]).at[high].set(salt[1])
    rows = jnp.zeros((n, 1), jnp.float32)  # the kernels write new rows somewhere
    no_words = np.zeros((num_tables, NUM_TABLE_WORDS), np.uint32)
    scratch = StoreArrays(index, counters, table_rows, (rows,), (records,))
    scratch, inverse, counts = kernels.find_or_insert(scratch, no_words, jnp.asarray(_SEED), words, ids)
    return scratch.index, scratch.counters, scratch.records[0], inverse, counts


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def insert(
    must_leave: bool, store: CacheStore, words: Array, ids: Array, lines: tuple[Array, ...], clock: Array
) -> tuple[CacheStore, Array, Array]:
    """Inserts at most `capacity` distinct keys; with `must_leave` the least recent rows make room first.

    Gives the store, and how many rows came and went.
    """
    # The kernels begin new rows in float arrays: in the scales, if rows are no floats.
    *others, first = store.slabs
    arrays = _arrays(store, first)
    num_evicted = jnp.zeros((), jnp.uint32)
    if must_leave:
        known = kernels.find(arrays.index, arrays.counters, words, ids)
        is_key = (words != jnp.uint32(PADDING_KEY & 0xFFFFFFFF)).any(axis=1)
        num_new = (is_key & (known == jnp.uint32(NO_ROW))).sum(dtype=jnp.uint32)
        # Keys that are here already become as recent as new ones.
        arrays = dataclasses.replace(arrays, statistics=kernels.touch(known, None, clock, arrays.statistics))
        num_kept = jnp.uint32(store.records.shape[0]) - num_new
        ticks = arrays.statistics[0][:, 0]
        flags, _ = evict_kernels.select(num_kept, arrays.records, [[ticks]], [], store.table_rows.shape[0])
        arrays, released = evict_kernels.release(arrays, flags)
        num_evicted = released.sum(dtype=jnp.uint32)
    no_words = np.zeros((store.table_rows.shape[0], NUM_TABLE_WORDS), np.uint32)
    arrays, row_ids, counts = kernels.find_or_insert(arrays, no_words, jnp.asarray(_SEED), words, ids)
    rows, *scales = _scattered(row_ids, lines, (*others, *arrays.rows))
    arrays = dataclasses.replace(arrays, statistics=kernels.touch(row_ids, None, clock, arrays.statistics))
    return _cache_store(arrays, rows, tuple(scales)), counts[:, _INSERTED].sum(), num_evicted


def _arrays(store: CacheStore, rows: Array) -> StoreArrays:
    """The operand of kernels, with `rows` to begin new rows in."""
    return StoreArrays(
        store.index, store.counters, store.table_rows, (rows,), (store.records,), statistics=(store.statistics,)
    )


def _cache_store(arrays: StoreArrays, rows: Array, scales: tuple[Array, ...]) -> CacheStore:
    (records,), (statistics,) = arrays.records, arrays.statistics
    return CacheStore(arrays.index, arrays.counters, arrays.table_rows, rows, records, statistics, scales)


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(store: CacheStore, words: Array, ids: Array, lines: tuple[Array, ...]) -> tuple[CacheStore, Array]:
    """Overwrites the rows of those keys that are cached, and counts them. The order of replacement stays as it is."""
    known = kernels.find(store.index, store.counters, words, ids)
    rows, *scales = _scattered(known, lines, store.slabs)
    return dataclasses.replace(store, rows=rows, scales=tuple(scales)), (known != jnp.uint32(NO_ROW)).sum(
        dtype=jnp.uint32
    )


def _scattered(row_ids: Array, lines: tuple[Array, ...], slabs: tuple[Array, ...]) -> list[Array]:
    return [kernels.scatter(row_ids, one, (slab,))[0] for one, slab in zip(lines, slabs, strict=True)]


@functools.partial(jax.jit, donate_argnums=0)
def drop(store: CacheStore, words: Array, ids: Array) -> tuple[CacheStore, Array]:
    """Drops and counts the rows of those keys that are cached; reads all records and the index once."""
    known = kernels.find(store.index, store.counters, words, ids)
    flags = jnp.zeros(store.records.shape[0], jnp.uint8).at[known].set(jnp.uint8(1), mode="drop")
    return _released(store, flags)


@functools.partial(jax.jit, donate_argnums=0)
def emptied(store: CacheStore) -> tuple[CacheStore, Array]:
    """Drops all rows."""
    flags = (store.records[:, :2] != jnp.uint32(PADDING_KEY & 0xFFFFFFFF)).any(axis=1).astype(jnp.uint8)
    return _released(store, flags)


def _released(store: CacheStore, flags: Array) -> tuple[CacheStore, Array]:
    arrays, released = evict_kernels.release(_arrays(store, store.rows), flags)
    return _cache_store(arrays, store.rows, store.scales), released.sum(dtype=jnp.uint32)


@jax.jit
def merged(slabs: tuple[Array, ...], slots: Array, lines: tuple[Array, ...]) -> tuple[Array, ...]:
    """Replaces some rows (and their scales), each by the line that its slot names unless that is negative."""
    return tuple(
        jnp.where((slots >= 0).reshape(-1, *[1] * (slab.ndim - 1)), part.at[slots].get(mode="clip"), slab)
        for slab, part in zip(slabs, lines, strict=True)
    )


@jax.jit
def hidden(index: Array, is_hidden: Array) -> Array:
    """Hides rows from an index by row id: it gives their entries no table."""
    entries = index.reshape(-1, 4)  # key (two words), row id, table
    hides = is_hidden.at[entries[:, 2]].get(mode="fill", fill_value=False)
    return entries.at[:, 3].set(jnp.where(hides, _NO_TABLE, entries[:, 3])).reshape(index.shape)


find = jax.jit(kernels.find)
copied = jax.jit(jnp.copy)

_PROGRAMS = {
    "query": query,
    "insert": insert,
    "overwrite": overwrite,
    "drop": drop,
    "emptied": emptied,
    "find": find,
    "copied": copied,
    "merged": merged,
    "hidden": hidden,
}


def make_ready(program: str, *operands: Any) -> None:
    """Compiles a program for operands like these (or their shapes), which are neither read nor donated."""
    _PROGRAMS[program].lower(*operands).compile()


def empty_arrays(num_buckets: int, num_tables: int, capacity: int) -> tuple[Array, Array, Array, Array]:
    """Index, rows of tables, records and statistics of an empty store."""
    unused = np.uint32(0xFFFFFFFF)
    return (
        jnp.full((num_buckets, BUCKET_WORDS), unused),
        jnp.zeros(num_tables, jnp.uint32),
        jnp.full((capacity, 4), unused),
        jnp.zeros((capacity, 2), jnp.uint32),
    )

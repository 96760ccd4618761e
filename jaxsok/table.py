"""Operations on (table, key) pairs on one shard: find, insert, assign, erase and release.

They serve keys without bags: requests of other shards, inspection, erasing. The whole lookup is in lookup.py.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, UInt32

from jaxsok import admission, annotations, rows as rows_lib, tiers
from jaxsok.kernels import evict as evict_kernels, table as kernels
from jaxsok.kernels.tier import SlotList
from jaxsok.shards import ONE_DEVICE, Shards
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import (
    COUNTS,
    NO_ROW,
    PADDING_KEY,
    ByTable,
    Clock,
    Keys,
    RowFlags,
    RowIds,
    Seed,
    TableCounts,
    TableIds,
)

_FOUND, _INSERTED, _PADDING = (COUNTS.index(name) for name in ("num_found", "num_inserted", "num_padding"))


def find(store: StoreState, keys: Keys, table_ids: TableIds | np.ndarray) -> RowIds:
    """Finds the row id of each (table, key) pair; NO_ROW where it is absent. Changes nothing.

    Keys are words; duplicates and PADDING_KEY are allowed. Costs 12 bytes a key in, one 64-byte bucket a probe (about
    one at load 0.5), 4 bytes out.
    """
    return kernels.find(store.index, store.counters, jnp.asarray(keys), jnp.asarray(table_ids))


def find_or_insert(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    keys: Keys,
    table_ids: TableIds | np.ndarray,
    *,
    step: Clock | None = None,
    uses: Array | None = None,
) -> tuple[StoreState, RowIds, TableCounts]:
    """Finds the row id of each (table, key) pair, and gives unseen pairs rows, by first occurrence.

    Row ids are NO_ROW for padding, for keys that are not admitted and where the store is full. Without a `step` all
    keys are admitted; `uses` are the occurrences of each key (None: one). With NumPy `table_ids`, tables whose rows XLA
    computes skip other tables' keys. Counts count keys, but of the unadmitted their uses. The store is donated.
    """
    keys, ids = jnp.asarray(keys), jnp.asarray(table_ids)
    deciding = admission.operands(spec, step, uses)
    # A row in host memory is initialized when it is first brought.
    insert = functools.partial(kernels.find_or_insert, has_rows=spec.memory is None)
    if not spec.traced_tables:
        return insert(store, spec.table_words(), seed, keys, ids, deciding)
    known = find(store, keys, ids)
    is_known = known != jnp.uint32(NO_ROW)
    # Known keys need no second search. And since the insertion depends on the search, XLA does not copy the index.
    unseen = jnp.where(is_known[:, None], jnp.uint32(PADDING_KEY & 0xFFFFFFFF), keys)
    store, new, counts = insert(store, spec.table_words(), seed, unseen, ids, deciding)
    found = ((ids[:, None] == jnp.arange(len(spec.tables), dtype=jnp.uint32)[None, :]) & is_known[:, None]).sum(
        axis=0, dtype=jnp.int32
    )
    counts = counts.at[:, _FOUND].add(found).at[:, _PADDING].add(-found)
    to_write = jnp.where(_is_one_of(ids, spec.traced_tables), new, jnp.uint32(NO_ROW))
    store = rows_lib.write_lines(spec, store, seed, to_write, initial_rows(spec, keys, table_ids), {})
    return store, jnp.where(is_known, known, new), counts


def gather(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    requests: UInt32[Array, "num_keys 4"],
    row_ids: RowIds,
    *,
    is_find: bool,
    dtype: str,
    known: SlotList | None = None,
) -> tuple[StoreState, Float[Array, "num_keys dim"], ByTable]:
    """Reads the rows of requests whose row ids are known; also counts by table the uses without a row.

    NO_ROW gives the initial row of the key, in lookups what the table's admission says, and with `is_find` zeros in
    tables with `unknown="zeros"`; PADDING_KEY gives zeros. An update of the returned store comes after this read.
    """
    store, view, slots, _ = tiers.bring_rows(spec, store, seed, row_ids, known, keeps=not is_find)
    words = spec.table_words() if is_find else spec.refused_words()
    counters, rows, num_absent = kernels.gather(
        view.counters, words, seed, requests, slots, view.rows, is_find=is_find, dtype=dtype
    )
    store = tiers.give_back(store, dataclasses.replace(view, counters=counters))
    # The kernel fills in zeros and other constants for keys without a row.
    given = list_xla_tables(spec, is_find=is_find)
    if given:
        keys, table_ids = requests[:, :2], requests[:, 2]
        is_initial = (row_ids == jnp.uint32(NO_ROW)) & is_key(keys) & _is_one_of(table_ids, given)
        rows = jnp.where(is_initial[:, None], round_to(initial_rows(spec, keys, table_ids), dtype), rows)
    return store, rows, num_absent


def assign(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    clock: Clock,
    keys: Keys,
    table_ids: TableIds | np.ndarray,
    rows: Float[Array, "num_keys dim"],
    states: Mapping[str, Float32[Array, "num_keys _"]],
    statistics: UInt32[Array, "num_keys 2"] | None = None,
    *,
    is_distinct: bool = False,
) -> tuple[StoreState, RowIds, TableCounts]:
    """Gives (table, key) pairs known rows; unseen pairs get them too, whatever their table's admission says.

    Of duplicate pairs the last row counts; `is_distinct` says that there are none, and saves a sort. `states` has
    optimizer state by name: missing state stays as it is, and is initial for new rows. Without `statistics` (last step
    and frequency) `clock` becomes the last step. The store is donated; results are those of `find_or_insert`.
    """
    store, num_let_in = _admit_waiting(spec, store, seed, keys, table_ids)
    store, row_ids, counts = find_or_insert(spec, store, seed, keys, table_ids)
    counts = counts.at[:, _INSERTED].add(num_let_in).at[:, _FOUND].add(-num_let_in)
    place = row_ids if is_distinct else _keep_last_of_each(row_ids)
    names = [state.name for state in spec.state_specs]
    numbers = round_to(rows, spec.dtype), {names.index(name): lines for name, lines in states.items()}
    kept = statistics if spec.keeps_statistics else None
    store = rows_lib.write_lines(spec, store, seed, place, *numbers, kept)
    if statistics is None:
        store = touch(spec, store, row_ids, jnp.zeros(row_ids.shape, jnp.uint32), clock)
    return store, row_ids, counts


def _admit_waiting(
    spec: StoreSpec, store: StoreState, seed: Seed, keys: Keys, table_ids: TableIds | np.ndarray
) -> tuple[StoreState, ByTable]:
    """Gives waiting keys rows as if seen often enough, so that their counts are forgotten when rows go; counts them."""
    if not store.sightings:
        return store, jnp.zeros(len(spec.tables), jnp.int32)
    keys, ids = jnp.asarray(keys), jnp.asarray(table_ids)
    seen = kernels.find(store.sightings[0], store.counters, keys, ids)  # an index, with counts in place of row ids
    floors = jnp.asarray(spec.sighting_floors())[ids]
    is_waiting = (seen > jnp.uint32(0)) & (seen < floors)  # NO_ROW is above all floors
    # Uses of duplicate keys add up; 2**32 of them would leave the count as it is.
    uses = jnp.where(is_waiting, floors - seen, jnp.uint32(0))
    waiting = jnp.where(is_waiting[:, None], keys, jnp.uint32(PADDING_KEY & 0xFFFFFFFF))
    step = jnp.zeros((), jnp.uint32)  # only admission by chance reads it, and has no waiting keys
    store, _, counts = find_or_insert(spec, store, seed, waiting, table_ids, step=step, uses=uses)
    return store, counts[:, _INSERTED]


def _keep_last_of_each(row_ids: RowIds) -> RowIds:
    order = jnp.argsort(row_ids, stable=True)
    by_row = row_ids[order]
    is_last = jnp.concatenate([by_row[1:] != by_row[:-1], jnp.ones(min(1, len(order)), bool)])
    return jnp.full_like(row_ids, NO_ROW).at[order].set(jnp.where(is_last, by_row, jnp.uint32(NO_ROW)))


def touch(
    spec: StoreSpec, store: StoreState, row_ids: RowIds, uses: UInt32[Array, " num_keys"] | None, clock: Clock
) -> StoreState:
    """Records in a store's statistics, if it keeps any, that a lookup used rows (`uses`: None for one each)."""
    if not spec.keeps_statistics:
        return store
    return dataclasses.replace(store, statistics=kernels.touch(row_ids, uses, clock, store.statistics))


def reads_initial(spec: StoreSpec, number: int, *, is_find: bool) -> bool:
    """Returns whether keys of a table without a row read their initial row: in `find`, or in a lookup."""
    table = spec.tables[number]
    return table.unknown == "initial" if is_find else table.refused_read_initial


def list_xla_tables(spec: StoreSpec, *, is_find: bool) -> list[int]:
    """Lists the tables whose keys without a row read a row that XLA computes."""
    return [n for n in spec.traced_tables if reads_initial(spec, n, is_find=is_find)]


# Initial rows that XLA computes --------------------------------------------------------------------------------------


def initial_rows(spec: StoreSpec, keys: Keys, table_ids: TableIds | np.ndarray) -> Float[Array, "num_keys dim"]:
    """Computes new rows of keys by the initializers that XLA runs; keys of other tables get zeros."""
    if isinstance(table_ids, np.ndarray):
        ends = [0, *(np.flatnonzero(np.diff(table_ids)) + 1).tolist(), len(table_ids)]
        runs = [(int(table_ids[begin]), keys[begin:end]) for begin, end in itertools.pairwise(ends) if end > begin]
        rows = [_initial_rows_of(spec, number, part) for number, part in runs]
        return jnp.concatenate(rows) if rows else jnp.zeros((0, spec.dim), spec.dtype)
    rows = jnp.zeros((keys.shape[0], spec.dim), spec.dtype)
    for number in spec.traced_tables:
        rows = jnp.where((table_ids == number)[:, None], _initial_rows_of(spec, number, keys), rows)
    return rows


def _initial_rows_of(spec: StoreSpec, number: int, keys: Keys) -> Float[Array, "num_keys dim"]:
    initializer = spec.tables[number].initializer
    if not initializer.is_traced:
        return jnp.zeros((keys.shape[0], spec.dim), spec.dtype)
    return round_to(initializer.rows(keys, spec.dim), spec.dtype)


def is_key(keys: Keys) -> Bool[Array, " num_keys"]:
    """Marks the keys that are no padding."""
    return (keys != jnp.uint32(PADDING_KEY & 0xFFFFFFFF)).any(axis=1)


def _is_one_of(table_ids: TableIds | np.ndarray, numbers: Sequence[int]) -> Bool[Array, " num_keys"]:
    return (jnp.asarray(table_ids)[:, None] == jnp.array(numbers, jnp.uint32)[None, :]).any(axis=1)


def round_to(values: Float[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """Converts to another dtype as the kernels round: to nearest, and finite numbers stay finite."""
    if dtype == "float32" or values.dtype == jnp.dtype(dtype):
        return values.astype(dtype)
    largest = jnp.finfo(dtype).max.astype(values.dtype)
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values).astype(dtype)


def erase(
    spec: StoreSpec, store: StoreState, keys: Keys, table_ids: TableIds, shards: Shards = ONE_DEVICE
) -> tuple[StoreState, UInt32[Array, ""]]:
    """Takes rows of (table, key) pairs away, and the counts of those that wait for one; donates the store.

    Returns how many distinct pairs had a row.
    """
    row_ids = find(store, keys, table_ids)
    flags = jnp.zeros(store.capacity, jnp.uint8).at[row_ids].set(jnp.uint8(1), mode="drop")  # NO_ROW is beyond all
    store, num_released = release(spec, store, flags, shards, is_eviction=False)
    return admission.forget_keys(spec, store, keys, table_ids), num_released.sum(dtype=jnp.uint32)


@annotations.annotate_store
def release(
    spec: StoreSpec, store: StoreState, flags: RowFlags, shards: Shards = ONE_DEVICE, *, is_eviction: bool
) -> tuple[StoreState, UInt32[Array, " num_tables"]]:
    """Takes flagged rows, which must be in use, away and counts them by table; advances the generation if any goes.

    Each shard has flags of its own; counts are those of all. State and statistics are reset, the index is swept, and
    counts of admitted keys are forgotten. Donates the store.
    """
    initial_values = [state.initial_value for state in spec.state_specs if spec.memory is None]
    generation = store.generation
    store, num_released = evict_kernels.release(store, flags, initial_values, counts_evicted=is_eviction)
    store = admission.forget(spec, tiers.release_rows(store, flags), num_released)
    num_released = shards.total(num_released, is_replicated=spec.is_replicated)
    return store.advance_generation(generation, num_released), num_released


def clear(spec: StoreSpec, store: StoreState, number: int, shards: Shards) -> tuple[StoreState, UInt32[Array, ""]]:
    """Takes all rows of one table away and counts them; forgets keys that wait for a row. Donates the store."""
    flags = [is_key(lines[:, :2]) & (lines[:, 2] == jnp.uint32(number)) for lines in store.records]
    store, num_released = release(spec, store, jnp.concatenate(flags).astype(jnp.uint8), shards, is_eviction=False)
    begin, size = spec.bloom_segments()[number]
    if size:
        bloom = store.bloom[0].at[begin // 4 : (begin + size) // 4].set(jnp.uint32(0))  # four counters a word
        store = dataclasses.replace(store, bloom=(bloom,))
    # Also where there were no rows: waiting keys have none.
    store = admission.forget(spec, store, jnp.zeros((), jnp.uint32), cleared=number)
    return store, num_released[number]

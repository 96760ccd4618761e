"""find, find_or_insert, erase and rebuild on one shard: from (table, key) pairs to row ids.

The whole way down is `lookup.py`; this is for keys without bags: plans made apart, inspection, erasing.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from jaxsok.kernels import table as kernels
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import Keys, RowIds, TableIds


def find(store: StoreState, keys: Keys, table_ids: TableIds) -> RowIds:
    """Finds the row id of each (table, key) pair; changes nothing.

    Args:
      store: not donated.
      keys: words; duplicates and PADDING_KEY are allowed.
      table_ids: the number of each key's table in the store.

    Returns:
      Row ids; NO_ROW where the pair is absent.

    Cost:
      12 bytes a key in, one 64-byte bucket a probe (about one at load 0.5), 4 bytes out.

    Example:
      `find(state.stores[0], to_words(np.array([7])), np.zeros(1, np.uint32))` → `[0]` if 7 was the first key.
    """
    return kernels.find(store.index, store.counters, jnp.asarray(keys), jnp.asarray(table_ids))


def find_or_insert(
    spec: StoreSpec, store: StoreState, seed: UInt32[Array, "2"], keys: Keys, table_ids: TableIds
) -> tuple[StoreState, RowIds, Int32[Array, "num_tables num_counts"]]:
    """Finds the row id of each (table, key) pair, and gives unseen pairs rows, by first occurrence.

    Args:
      spec: the store's tables, whose initializers fill new rows.
      store: donated: the result has its buffers.
      seed: of the state.
      keys: words; duplicates and PADDING_KEY are allowed.
      table_ids: the number of each key's table in the store.

    Returns:
      The store, the row ids (NO_ROW for padding and where the store is full), and counts by table (types.COUNTS).

    Example:
      Keys `[9, 7, 9]` in an empty store → row ids `[0, 1, 0]`.
    """
    index, counters, table_rows, rows, records, row_ids, counts = kernels.find_or_insert(
        store.index,
        store.counters,
        store.table_rows,
        spec.table_words(),
        seed,
        jnp.asarray(keys),
        jnp.asarray(table_ids),
        store.rows,
        store.records,
    )
    store = dataclasses.replace(
        store, index=index, counters=counters, table_rows=table_rows, rows=rows, records=records
    )
    return store, row_ids, counts


def gather(
    spec: StoreSpec,
    store: StoreState,
    seed: UInt32[Array, "2"],
    requests: UInt32[Array, "num_keys 4"],
    row_ids: RowIds,
    *,
    is_find: bool,
) -> tuple[StoreState, Float[Array, "num_keys dim"], Int32[Array, " num_tables"]]:
    """The rows of requests whose row ids are known.

    Args:
      spec: the store's tables.
      store: unchanged; an update of the store that is returned comes after this read.
      seed: of the state.
      requests: key low, key high, table, uses; PADDING_KEY gives zeros.
      row_ids: of each request; NO_ROW gives what the key's row would hold if it were new.
      is_find: whether tables with `unknown="zeros"` give zeros for NO_ROW.

    Returns:
      The store, the rows in the dtype of the store, and by table how many uses had no row.

    Cost:
      Reads and writes each row once.

    Example:
      Row ids `[1, 0, NO_ROW]` → row 1, row 0, and the initial row of the third request's key.
    """
    counters, rows, num_absent = kernels.gather(
        store.counters, spec.table_words(), seed, requests, row_ids, store.rows, is_find=is_find
    )
    return dataclasses.replace(store, counters=counters), rows, num_absent


def erase(spec: StoreSpec, store: StoreState, keys: Keys, table_ids: TableIds) -> tuple[StoreState, UInt32[Array, ""]]:
    """Takes the rows of (table, key) pairs away; absent pairs are passed over.

    The index is rebuilt in place, the generation advanced, and the rows' optimizer state set back.

    Args:
      spec: the store's tables.
      store: donated: the result has its buffers.
      keys: words.
      table_ids: the number of each key's table in the store.

    Returns:
      The store, and how many distinct pairs were there.

    Cost:
      Streams the records (16 bytes a row) and rewrites the index (32 bytes a row).

    Example:
      Erasing `[7, 7, 8]` from a table that holds 7 and 9 → 1, and 7's row id is the next to be handed out.
    """
    index, counters, table_rows, records, states, num_erased = kernels.erase(
        store.index,
        store.counters,
        store.table_rows,
        jnp.asarray(keys),
        jnp.asarray(table_ids),
        store.records,
        store.states,
        [state.initial_value for state in spec.state_specs],
    )
    store = dataclasses.replace(
        store, index=index, counters=counters, table_rows=table_rows, records=records, states=states
    )
    return store, num_erased


def rebuild(store: StoreState, num_buckets: int) -> tuple[Array, Array]:
    """Makes an index of another size (or under another salt) from the records.

    Returns:
      index, counters.

    Example:
      `rebuild(store, num_buckets_of(2 * store.capacity))` after slabs were appended.
    """
    return kernels.rebuild(store.counters, store.records, num_buckets)


def table_ids_of(number: int, num_keys: int) -> np.ndarray:
    """Table ids of keys that all belong to one table.

    Example:
      >>> table_ids_of(2, 3).tolist()
      [2, 2, 2]
    """
    return np.full(num_keys, number, np.uint32)

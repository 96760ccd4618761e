"""Doors of the evict noun: select, release."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, UInt8, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.table import RecordSlab, StateSlab, result

# Slabs of one array differ in capacity.
ScoreSlab = UInt32[Array, " _"]
MaskSlab = UInt8[Array, " _"]
StatisticsSlab = UInt32[Array, "_ 2"]
ALL_TABLES = -1


def select(
    num_kept: UInt32[Array, ""],
    records: Sequence[RecordSlab],
    scores: Sequence[Sequence[ScoreSlab]],
    mask: Sequence[MaskSlab],
    num_tables: int,
    table: int = ALL_TABLES,
) -> tuple[UInt8[Array, " capacity"], UInt32[Array, " num_tables"]]:
    """Selects the rows that leave. See `LaunchSelect` in ffi/kernels/evict.h.

    Args:
      num_kept: rows that stay; of no meaning with a mask.
      records: slabs.
      scores: one or two arrays in slabs, the more significant first; none: the mask tells who goes.
      mask: slabs; none where there are scores.
      num_tables: of the store.
      table: whose rows may go.

    Returns:
      A flag for each row, and how many have one, by table.
    """
    capacity = sum(slab.shape[0] for slab in records)
    workspace = library.register().JaxsokSelectWorkspaceBytes()
    like = records[0]
    results = (
        result(like, (capacity,), "uint8"),
        result(like, (num_tables,), "uint32"),
        result(like, (workspace,), "uint8"),
    )
    slabs = [slab[:, None] for array in (scores or [mask]) for slab in array]
    flags, num_selected, _ = jax.ffi.ffi_call("jaxsok_evict_select", results)(
        num_kept,
        *records,
        *slabs,
        num_slabs=np.int32(len(records)),
        num_words=np.int32(len(scores)),
        table=np.int32(table),
    )
    return flags, num_selected


def release(
    index: UInt32[Array, "num_buckets 16"],
    counters: UInt32[Array, " num_counters"],
    table_rows: UInt32[Array, " num_tables"],
    flags: UInt8[Array, " capacity"],
    records: Sequence[RecordSlab],
    states: Sequence[Sequence[StateSlab]],
    initial_values: Sequence[float],
    statistics: Sequence[StatisticsSlab],
    table_evicted: Sequence[UInt32[Array, " num_tables"]],
) -> tuple[
    Array,
    Array,
    Array,
    tuple[Array, ...],
    tuple[tuple[Array, ...], ...],
    tuple[Array, ...],
    tuple[Array, ...],
    UInt32[Array, " num_tables"],
]:
    """Takes flagged rows away and sweeps the index in place. See `LaunchRelease` in ffi/kernels/evict.h.

    Args:
      index: as the others of a store, donated.
      counters: likewise.
      table_rows: likewise.
      flags: of `select`.
      records: slabs.
      states: of the optimizer, in slabs.
      initial_values: of the states.
      statistics: slabs; none where none are kept.
      table_evicted: one array, or none.

    Returns:
      index, counters, table_rows, records, states, statistics, table_evicted (all donated), num_released by table.
    """
    num_slabs = len(records)
    capacity = sum(slab.shape[0] for slab in records)
    workspace = library.register().JaxsokReleaseWorkspaceBytes(capacity)
    state = (index, counters, table_rows)
    slabs = (*records, *(slab for array in states for slab in array), *statistics, *table_evicted)
    results = (
        *map(jax.typeof, state),
        jax.typeof(table_rows),
        result(table_rows, (workspace,), "uint8"),
        *map(jax.typeof, slabs),
    )
    aliases = {0: 0, 1: 1, 2: 2} | {4 + i: 5 + i for i in range(len(slabs))}
    call = jax.ffi.ffi_call("jaxsok_evict_release", results, input_output_aliases=aliases)
    index, counters, table_rows, num_released, _, *slabs = call(
        *state,
        flags,
        *slabs,
        num_slabs=np.int32(num_slabs),
        has_statistics=np.int32(len(statistics) > 0),
        has_evicted=np.int32(len(table_evicted)),
        initial=np.asarray(initial_values, np.float32),
    )
    of_slabs = slabs[: len(slabs) - len(table_evicted)]
    parts = [tuple(of_slabs[i : i + num_slabs]) for i in range(0, len(of_slabs), num_slabs)]
    new_states = tuple(parts[1 : 1 + len(states)])
    new_statistics = parts[-1] if statistics else ()
    new_evicted = tuple(slabs[len(of_slabs) :])
    return index, counters, table_rows, parts[0], new_states, new_statistics, new_evicted, num_released

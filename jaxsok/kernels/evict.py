"""Doors of the evict noun: select, release."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, UInt8, UInt32

from jaxsok.kernels.call import RecordSlab, Store, call_on, call_on_store, result, workspace
from jaxsok.types import RowFlags

# Slabs of one array differ in capacity.
ScoreSlab = UInt32[Array, " _"]
MaskSlab = UInt8[Array, " _"]
ALL_TABLES = -1


def select(
    num_kept: UInt32[Array, ""],
    records: Sequence[RecordSlab],
    scores: Sequence[Sequence[ScoreSlab]],
    mask: Sequence[MaskSlab],
    num_tables: int,
    table: int = ALL_TABLES,
) -> tuple[RowFlags, UInt32[Array, " num_tables"]]:
    """Selects rows of a table to leave by scores, down to `num_kept`, or by a mask. See `LaunchSelect` in evict.h."""
    like = records[0]
    arrays, operands = {"records": records}, {"num_kept": num_kept, "ranks": scores or mask}
    results = {
        "flags": result(like, (sum(slab.shape[0] for slab in records),), "uint8"),
        "num_selected": result(like, (num_tables,), "uint32"),
        "workspace": workspace(like, "JaxsokSelectWorkspaceBytes"),
    }
    out = call_on("jaxsok_evict_select", arrays, operands, results, num_words=len(scores), table=table)
    return out["flags"], out["num_selected"]


def release(
    store: Store, flags: RowFlags, initial_values: Sequence[float] = (), *, counts_evicted: bool = False
) -> tuple[Store, UInt32[Array, " num_tables"]]:
    """Takes flagged rows away and sweeps the index; donates the store. See `LaunchRelease` in ffi/kernels/evict.h."""
    like = store.table_rows
    capacity = sum(slab.shape[0] for slab in store.records)
    changed = ("index", "counters", "table_rows", "records", "states", "statistics")
    results = {
        "num_released": result(like, like.shape, "uint32"),
        "workspace": workspace(like, "JaxsokReleaseWorkspaceBytes", capacity),
    }
    changes = (*changed, "table_evicted") if counts_evicted else changed
    initial = np.asarray(initial_values, np.float32)
    store, out = call_on_store(
        "jaxsok_evict_release", store, {"flags": flags}, results, changes=changes, initial=initial
    )
    return store, out["num_released"]

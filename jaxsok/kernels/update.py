"""Door of the update noun: bag gradients in, rows and optimizer state stepped in place."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.lookup import Batch
from jaxsok.kernels.table import RecordSlab, Slab, StateSlab, result
from jaxsok.types import RowIds


def update(
    counters: UInt32[Array, " num_counters"],
    generations: UInt32[Array, " num_plans"],
    batch: Batch,
    row_ids: RowIds,
    hyper: Float32[Array, " num_hyper"],
    rows: Sequence[Slab],
    states: Sequence[Sequence[StateSlab]],
    records: Sequence[RecordSlab],
    gradients: Sequence[Float32[Array, "..."]],
    *,
    num_tables: int,
    num_tiles: int,
    optimizer: int,
    row_gradient: int,
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], ...], Int32[Array, " num_tables"], Int32[Array, ""]]:
    """Steps every row that the batch used, once. See `LaunchUpdate` in ffi/kernels/update.h.

    Returns:
      rows, states (donated), num_nonfinite, num_stale.
    """
    keys, num_slabs, dim = batch[0], len(rows), rows[0].shape[1]
    workspace = library.register().JaxsokUpdateWorkspaceBytes(keys.shape[0], dim)
    slabs = (*rows, *(slab for array in states for slab in array))
    results = (
        result(row_ids, (num_tables,), "int32"),
        result(row_ids, (), "int32"),
        result(row_ids, (workspace,), "uint8"),
        *map(jax.typeof, slabs),
    )
    aliases = {8 + i: 3 + i for i in range(len(slabs))}
    call = jax.ffi.ffi_call("jaxsok_update", results, input_output_aliases=aliases)
    num_nonfinite, num_stale, _, *slabs = call(
        counters,
        generations,
        *batch,
        row_ids,
        hyper,
        *slabs,
        *records,
        *gradients,
        num_slabs=np.int32(num_slabs),
        num_states=np.int32(len(states)),
        num_tiles=np.int32(num_tiles),
        optimizer=np.int32(optimizer),
        row_gradient=np.int32(row_gradient),
    )
    parts = tuple(tuple(slabs[i : i + num_slabs]) for i in range(0, len(slabs), num_slabs))
    return parts[0], parts[1:], num_nonfinite, num_stale

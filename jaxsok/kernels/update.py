"""Door of the update noun: bag gradients in, rows and optimizer state stepped in place."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.lookup import Batch
from jaxsok.kernels.table import RecordSlab, Slab, StateSlab, result
from jaxsok.types import RowIds


def update(
    counters: UInt32[Array, " num_counters"],
    is_live: Bool[Array, " num_plans"],
    batch: Batch,
    row_ids: RowIds,
    hyper: Float32[Array, " num_hyper"],
    tables: UInt32[np.ndarray, "num_tables 16"],
    seed: UInt32[Array, "2"],
    step: UInt32[Array, ""],
    table_ids: UInt32[Array, " num_keys_or_0"],
    num_uses: Float32[Array, " num_keys_or_0"],
    rows: Sequence[Slab],
    states: Sequence[Sequence[StateSlab]],
    records: Sequence[RecordSlab],
    gradients: Sequence[Float[Array, "..."]],
    *,
    num_tiles: int,
    optimizer: int,
    row_gradient: int,
    rounding: int,
    program: Int32[np.ndarray, " num_words"],
    num_registers: int,
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], ...], Int32[Array, " num_tables"], Int32[Array, ""]]:
    """Steps every row that the batch used, once. See `LaunchUpdate` in ffi/kernels/update.h.

    `table_ids`: the table of each key, where the batch's features do not tell it; else none. `num_uses`: of each key's
    row on all shards, where the batch does not tell it; else none. `program`: words of a row program, if the optimizer
    is one.

    Returns:
      rows, states (donated), num_nonfinite, num_stale.
    """
    keys, num_slabs, dim = batch[0], len(rows), rows[0].shape[1]
    workspace = library.register().JaxsokUpdateWorkspaceBytes(keys.shape[0], dim)
    slabs = (*rows, *(slab for array in states for slab in array))
    results = (
        result(row_ids, (tables.shape[0],), "int32"),
        result(row_ids, (), "int32"),
        result(row_ids, (workspace,), "uint8"),
        *map(jax.typeof, slabs),
    )
    aliases = {13 + i: 3 + i for i in range(len(slabs))}
    call = jax.ffi.ffi_call("jaxsok_update", results, input_output_aliases=aliases)
    num_nonfinite, num_stale, _, *slabs = call(
        counters,
        is_live,
        *batch,
        row_ids,
        hyper,
        tables,
        seed,
        step,
        table_ids,
        num_uses,
        *slabs,
        *records,
        *gradients,
        num_slabs=np.int32(num_slabs),
        num_states=np.int32(len(states)),
        num_tiles=np.int32(num_tiles),
        optimizer=np.int32(optimizer),
        row_gradient=np.int32(row_gradient),
        rounding=np.int32(rounding),
        program=program,
        num_registers=np.int32(num_registers),
    )
    parts = tuple(tuple(slabs[i : i + num_slabs]) for i in range(0, len(slabs), num_slabs))
    return parts[0], parts[1:], num_nonfinite, num_stale

"""Door of the update noun: bag gradients in, rows and optimizer state stepped in place."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxsok.kernels.call import Store, call_on_store, result, workspace
from jaxsok.kernels.lookup import Batch, batch_operands
from jaxsok.kernels.table import Tables
from jaxsok.types import RowIds


@dataclasses.dataclass(frozen=True)
class RowStep:
    """What a step does to a row (`UpdateSpec` in ffi/kernels/update.h)."""

    optimizer: int
    hyper: Float32[Array, " num_hyper"]
    """Hyperparameters, or the scalars of a row program."""
    row_gradient: int
    rounding: int
    program: Int32[np.ndarray, " num_words"] = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))
    """Words of a row program, if the optimizer is one."""
    num_registers: int = 0


def update(
    store: Store,
    tables: Tables,
    seed: UInt32[Array, "2"],
    step: UInt32[Array, ""],
    batch: Batch,
    row_ids: RowIds,
    is_live: Bool[Array, " num_plans"],
    row_step: RowStep,
    gradients: Sequence[Float[Array, "..."]],
    *,
    num_tiles: int,
    table_ids: UInt32[Array, " num_keys_or_0"] | None = None,
    num_uses: Float32[Array, " num_keys"] | None = None,
) -> tuple[Store, Int32[Array, " num_tables"], Int32[Array, ""]]:
    """Steps every row that the batch used, once. See `LaunchUpdate` in ffi/kernels/update.h.

    The store is donated. `table_ids` has the table of each key, and `num_uses` the uses of each key's row on all
    shards, where the batch does not have them. Also returns num_nonfinite and num_stale.
    """
    operands = {
        "row_ids": row_ids,
        "is_live": is_live,
        "step": step,
        "hyper": row_step.hyper,
        "table_ids": jnp.zeros(0, jnp.uint32) if table_ids is None else table_ids,
        "num_uses": jnp.zeros(0, jnp.float32) if num_uses is None else num_uses,
        "gradients": gradients,
    }
    dim = store.rows[0].shape[1]
    store, out = call_on_store(
        "jaxsok_update",
        store,
        {"tables": tables, "seed": seed} | batch_operands(batch) | operands,
        {
            "num_nonfinite": result(row_ids, (tables.shape[0],), "int32"),
            "num_stale": result(row_ids, (), "int32"),
            "workspace": workspace(row_ids, "JaxsokUpdateWorkspaceBytes", batch[0].shape[0], dim),
        },
        reads=("counters", "records"),
        changes=("rows", "states"),
        num_tiles=num_tiles,
        optimizer=row_step.optimizer,
        row_gradient=row_step.row_gradient,
        rounding=row_step.rounding,
        program=row_step.program,
        num_registers=row_step.num_registers,
    )
    return store, out["num_nonfinite"], out["num_stale"]

"""Door of the update noun: bag gradients in, rows and optimizer state stepped in place."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8, UInt32

from jaxsok.kernels.call import Store, call_on_store, result, workspace
from jaxsok.kernels.lookup import Batch, batch_operands
from jaxsok.kernels.table import Tables
from jaxsok.kernels.window import after_meeting
from jaxsok.types import ByTable, Clock, Inverse, RowIds, Seed


@dataclasses.dataclass(frozen=True)
class RowStep:
    """The step of a row (`UpdateSpec` in ffi/kernels/update.h)."""

    optimizer: int
    hyper: Float32[Array, " num_hyper"]
    """Hyperparameters, or the scalars of a row program."""
    row_gradient: int
    rounding: int
    program: Int32[np.ndarray, " num_words"] = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))
    """Words of a row program, if the optimizer is one."""
    num_registers: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the rows that a batch used (`Step` in ffi/handlers/update.cc)."""

    tables: Tables
    seed: Seed
    step: Clock
    batch: Batch
    num_tiles: int
    row_ids: RowIds
    is_live: Bool[Array, " num_plans"]
    row_step: RowStep
    table_ids: UInt32[Array, " num_keys"] | None = None
    """The table of each key, where the features do not say it."""
    num_uses: Float32[Array, " num_keys"] | None = None
    """The uses of each key's row on all shards, where the batch does not have them."""

    def operands(self) -> dict[str, Any]:
        """Returns the operands, in order."""
        operands = {"tables": self.tables, "seed": self.seed} | batch_operands(self.batch)
        operands |= {"row_ids": self.row_ids, "is_live": self.is_live, "step": self.step, "hyper": self.row_step.hyper}
        return operands | {
            "table_ids": jnp.zeros(0, jnp.uint32) if self.table_ids is None else self.table_ids,
            "num_uses": jnp.zeros(0, jnp.float32) if self.num_uses is None else self.num_uses,
        }

    def results(self) -> dict[str, Any]:
        """Returns the types of the first results."""
        return {
            "num_nonfinite": result(self.row_ids, (self.tables.shape[0],), "int32"),
            "num_stale": result(self.row_ids, (), "int32"),
        }

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes."""
        of_row = {name: value for name, value in vars(self.row_step).items() if name != "hyper"}
        return of_row | {"num_tiles": self.num_tiles}


_STEPPED = {"reads": ("counters", "records"), "changes": ("rows", "states")}


def update(
    store: Store, step: Step, gradients: Sequence[Float[Array, "..."]]
) -> tuple[Store, ByTable, Int32[Array, ""]]:
    """Steps every row that the batch used, once. See `LaunchUpdate` in ffi/kernels/update.h.

    The store is donated. Also returns num_nonfinite and num_stale.
    """
    size = workspace(step.row_ids, "JaxsokUpdateWorkspaceBytes", step.row_ids.shape[0], store.rows[0].shape[1])
    operands, results = step.operands() | {"gradients": gradients}, step.results() | {"workspace": size}
    store, out = call_on_store("jaxsok_update", store, operands, results, **_STEPPED, **step.attributes())
    return store, out["num_nonfinite"], out["num_stale"]


def _of_window(window: int, num_bag_tiles: int, dtype: str) -> dict[str, Any]:
    return {"window": window, "num_bag_tiles": num_bag_tiles, "is_bfloat16": dtype == "bfloat16"}


def update_window(
    window: int,
    store: Store,
    step: Step,
    requests: UInt32[Array, "num_lines 4"],
    slots: Inverse,
    bags: Sequence[Any],
    gradients: Sequence[Float32[Array, "..."]],
    num_bag_tiles: int,
    dtype: str,
    sorted_uses: UInt8[Array, " num_bytes"] | None = None,
) -> tuple[Store, ByTable, Int32[Array, ""]]:
    """Does `combine.combine_transpose`, an exchange of the sums (float32 or bfloat16) and `update` in one call.

    `slots` has the line of each key of the bags; the step has a key for each request received. `sorted_uses` are those
    that `lookup_window` sorted; None: they are sorted here.
    """
    num_lines, dim = step.row_ids.shape[0], store.rows[0].shape[1]
    operands = step.operands() | {"slots": slots, "bags": tuple(bags), "bag_gradients": gradients}
    operands["sorted_uses"] = jnp.zeros(0, jnp.uint8) if sorted_uses is None else sorted_uses
    operands |= {"requests": requests} | after_meeting(window, slots)
    results = step.results() | {
        "num_uses": result(slots, (num_lines,), "int32"),
        "workspace_of_bags": workspace(slots, "JaxsokUpdateWorkspaceBytes", slots.shape[0], dim),
        "workspace": workspace(slots, "JaxsokUpdateWorkspaceBytes", num_lines, dim),
    }
    attributes = step.attributes() | _of_window(window, num_bag_tiles, dtype)
    store, out = call_on_store("jaxsok_update_window", store, operands, results, **_STEPPED, **attributes)
    return store, out["num_nonfinite"], out["num_stale"]


def update_bags_window(
    window: int,
    store: Store,
    step: Step,
    bags: Sequence[Any],
    scales: Float32[Array, " num_bags"],
    gradients: Sequence[Float32[Array, "..."]],
    num_bag_tiles: int,
    dtype: str,
) -> tuple[Store, ByTable, Int32[Array, ""]]:
    """Scales the gradients of bags, sends them to all shards and does `update`, in one call.

    The batch of the step has a feature for each shard. Gradients travel as `dtype`: float32 or bfloat16.
    """
    size = workspace(step.row_ids, "JaxsokUpdateWorkspaceBytes", step.row_ids.shape[0], store.rows[0].shape[1])
    operands = step.operands() | {"bags": tuple(bags), "scales": scales, "bag_gradients": gradients}
    operands |= after_meeting(window, scales)
    results = step.results() | {"workspace": size}
    attributes = step.attributes() | _of_window(window, num_bag_tiles, dtype)
    store, out = call_on_store("jaxsok_update_bags_window", store, operands, results, **_STEPPED, **attributes)
    return store, out["num_nonfinite"], out["num_stale"]

"""The backward pass: plans and gradients → state. Each used row steps once, with the sum of its gradients.

On one device each store costs one FFI call. On a mesh this runs on every shard: gradients are summed for each distinct
key and go to the owners, where the rows step once, with the gradients of all shards.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from jaxsok import annotations
from jaxsok.exchange import Exchange
from jaxsok.gradients import (
    Arrived,
    Used,
    as_features,
    bag_gradient,
    concatenated,
    joined,
    over_arrivals,
    scaled_by_uses,
)
from jaxsok.kernels import update as kernels
from jaxsok.optimizers.program import compiled
from jaxsok.optimizers.protocol import PROGRAM
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import ROUNDINGS, ROW_GRADIENTS


@dataclasses.dataclass(frozen=True)
class Stepping:
    """The step of a row: an optimizer's kernel or a row program."""

    kernel: int
    hyper: Float[Array, " num_hyper"]
    """Hyperparameters, or a program's scalars."""
    words: np.ndarray
    """Words of the program, else ignored."""
    num_registers: int = 0
    counts_uses: bool = False

    @classmethod
    def of(
        cls, spec: StoreSpec, globals_: tuple[Array, ...], step: Any, learning_rate: Any
    ) -> tuple["Stepping", tuple[Array, ...]]:
        """Returns the stepping of a store's optimizer at a step, and the store's globals after it."""
        optimizer = spec.optimizer
        if optimizer.kernel != PROGRAM:
            return cls(optimizer.kernel, optimizer.hyper_operand(step, learning_rate), np.zeros(1, np.int32)), globals_
        program = compiled(optimizer, spec.dim)
        hyper, after = optimizer.advance(tuple(leaf[0] for leaf in globals_), step, learning_rate, spec.dim)
        stepping = cls(PROGRAM, program.scalars(hyper), program.words(), program.num_registers, program.counts_uses)
        return stepping, tuple(jnp.asarray(leaf)[None] for leaf in after)


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs of a step beside rows and gradients; seed and step give the random bits."""

    stepping: Stepping
    seed: UInt32[Array, "2"]
    step: UInt32[Array, ""]


@annotations.by_store
def update_here(
    spec: StoreSpec, store: StoreState, s: int, used: Used, inputs: StepInputs
) -> tuple[StoreState, Array, Array]:
    """Steps one store on one shard; also counts rows with non-finite gradients by table, and uses of stale plans."""
    parts = [plan.features.stores[s] for plan in used.plans]
    batch, num_tiles = joined(parts)
    row_ids = concatenated([plan.found_of(s).row_ids for plan in used.plans])
    flat = [
        bag_gradient(grads, part, layout, spec)
        for part, grads in zip(parts, used.gradients, strict=True)
        for layout in part.layouts
    ]
    if any(gradient.dtype != spec.embedding_dtype for gradient in flat):
        flat = [gradient.astype(jnp.float32) for gradient in flat]
    return _stepped(spec, store, used.is_live, batch, num_tiles, row_ids, None, inputs, flat, spec.row_gradient)


def _stepped(
    spec: StoreSpec,
    store: StoreState,
    is_live: Bool[Array, " num_plans"],
    batch: kernels.Batch,
    num_tiles: int,
    row_ids: Array,
    table_ids: Array | None,
    inputs: StepInputs,
    gradients: Sequence[Array],
    row_gradient: str,
    num_uses: Array | None = None,
) -> tuple[StoreState, Array, Array]:
    """Steps the used rows; also counts rows with non-finite gradients by table, and uses of stale plans."""
    stepping = inputs.stepping
    return kernels.update(
        store,
        spec.table_words(),
        inputs.seed,
        inputs.step,
        batch,
        row_ids,
        is_live,
        kernels.RowStep(
            stepping.kernel,
            stepping.hyper,
            ROW_GRADIENTS[row_gradient],
            ROUNDINGS[spec.rounding],
            stepping.words,
            stepping.num_registers,
        ),
        gradients,
        num_tiles=num_tiles,
        table_ids=table_ids,
        num_uses=num_uses,
    )


@annotations.by_store
def update_exchanged(
    exchange: Exchange, spec: StoreSpec, store: StoreState, s: int, used: Used, inputs: StepInputs
) -> tuple[StoreState, Array, Array]:
    """Steps the rows of one store that this shard owns; counts as `update_here` does."""
    is_live = used.is_live

    def step(carry: tuple[StoreState, Array, Array], arrived: list[Arrived]) -> tuple[StoreState, Array, Array]:
        store, num_nonfinite, num_stale = carry
        sums, total = scaled_by_uses(spec, arrived, is_live, counts_uses=inputs.stepping.counts_uses)
        received = [one.received for one in arrived]
        batch, num_tiles = as_features([part.shape[0] for part in received])
        keys = concatenated([part[:, :2] for part in received])
        # One feature has keys of all tables, and random rounding depends on the table.
        is_random = spec.dtype != "float32" and spec.rounding == "stochastic"
        table_ids = concatenated([part[:, 2] for part in received]) if is_random else None
        row_ids = concatenated([one.row_ids for one in arrived])
        store, more_nonfinite, _ = _stepped(
            spec, store, is_live, (keys, *batch), num_tiles, row_ids, table_ids, inputs, sums, "sum", total
        )
        more_stale = sum(jnp.where(is_live[p], 0, one.uses.sum()) for p, one in enumerate(arrived))
        return store, num_nonfinite + more_nonfinite, num_stale + more_stale

    carry = store, jnp.zeros(len(spec.tables), jnp.int32), jnp.zeros((), jnp.int32)
    store, num_nonfinite, num_stale = over_arrivals(
        exchange, "update", spec, s, used, lambda carry: carry[0], step, carry
    )
    if spec.is_replicated:
        # Every shard did the same; only the first counts.
        is_first = exchange.shards.index() == 0
        num_nonfinite, num_stale = jnp.where(is_first, num_nonfinite, 0), jnp.where(is_first, num_stale, 0)
    return store, num_nonfinite, num_stale

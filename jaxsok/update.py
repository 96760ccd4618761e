"""The backward pass: plans and gradients → state. Each used row steps once, with the sum of its gradients.

On one device each store costs one FFI call. On a mesh this runs on every shard: gradients are summed for each distinct
key and go to the owners, where the rows step once, with the gradients of all shards.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from jaxsok import annotations, gradients as gradients_lib, tiers
from jaxsok.checks import not_none
from jaxsok.exchange import Exchange, gathered_dtype
from jaxsok.gradients import Arrived, Used
from jaxsok.kernels import update as kernels
from jaxsok.optimizers.program import compile_row_program
from jaxsok.optimizers.protocol import PROGRAM
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import NO_ROW, ROUNDINGS, ROW_GRADIENTS, Clock, RowIds, Seed


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs of a step apart from rows and gradients; seed and step give the random bits."""

    row_step: kernels.RowStep
    """The step of one row, by the optimizer's kernel or a row program."""
    seed: Seed
    step: Clock
    counts_uses: bool
    """True if a row program reads the uses of a row."""

    @classmethod
    def of(
        cls, spec: StoreSpec, globals_: tuple[Array, ...], seed: Seed, step: Clock, learning_rate: Any
    ) -> tuple["StepInputs", tuple[Array, ...]]:
        """Returns the inputs of a store's step, and the store's globals after it."""
        optimizer = spec.optimizer
        kinds = ROW_GRADIENTS[spec.row_gradient], ROUNDINGS[spec.rounding]
        if optimizer.kernel != PROGRAM:
            row_step = kernels.RowStep(optimizer.kernel, optimizer.hyper_operand(step, learning_rate), *kinds)
            return cls(row_step, seed, step, counts_uses=False), globals_
        program = compile_row_program(optimizer, spec.dim)
        hyper, after = optimizer.advance(tuple(leaf[0] for leaf in globals_), step, learning_rate, spec.dim)
        row_step = kernels.RowStep(PROGRAM, program.scalars(hyper), *kinds, program.words(), program.num_registers)
        return cls(row_step, seed, step, program.counts_uses), tuple(jnp.asarray(leaf)[None] for leaf in after)


@annotations.annotate_store
def update_here(
    spec: StoreSpec, store: StoreState, s: int, used: Used, inputs: StepInputs
) -> tuple[StoreState, Array, Array]:
    """Steps one store on one shard; also counts rows with non-finite gradients by table, and uses of stale plans."""
    parts = [plan.features.stores[s] for plan in used.plans]
    batch, num_tiles = gradients_lib.join_features(parts)
    row_ids = gradients_lib.concatenate([plan.found_of(s).row_ids for plan in used.plans])
    flat = [
        gradients_lib.bag_gradient(grads, part, layout, spec)
        for part, grads in zip(parts, used.gradients, strict=True)
        for layout in part.layouts
    ]
    if any(gradient.dtype != spec.embedding_dtype for gradient in flat):
        flat = [gradient.astype(jnp.float32) for gradient in flat]
    store, view, slots, _ = tiers.bring_rows(spec, store, inputs.seed, row_ids, used.slots_of(s))
    tables, is_live = spec.table_words(), used.is_live
    step = kernels.Step(tables, inputs.seed, inputs.step, batch, num_tiles, slots, is_live, inputs.row_step)
    view, num_nonfinite, num_stale = kernels.update(view, step, flat)
    return tiers.give_back(store, view, writes=True), num_nonfinite, num_stale


def _step_of_lines(
    spec: StoreSpec,
    inputs: StepInputs,
    received: Sequence[UInt32[Array, "_ 4"]],
    row_ids: RowIds,
    is_live: Bool[Array, " num_plans"],
    total: Array | None,
) -> kernels.Step:
    """Returns the step of the rows of requests, plan after plan, with a gradient each; `total` has their uses."""
    batch, num_tiles = gradients_lib.as_features([part.shape[0] for part in received])
    keys = gradients_lib.concatenate([part[:, :2] for part in received])
    # One feature has keys of all tables, and random rounding depends on the table.
    is_random = spec.dtype != "float32" and spec.rounding == "stochastic"
    table_ids = gradients_lib.concatenate([part[:, 2] for part in received]) if is_random else None
    # The sums are scaled already.
    row_step = dataclasses.replace(inputs.row_step, row_gradient=ROW_GRADIENTS["sum"])
    of_lines = (keys, *batch), num_tiles, row_ids, is_live, row_step, table_ids, total
    return kernels.Step(spec.table_words(), inputs.seed, inputs.step, *of_lines)


@annotations.annotate_store
def update_exchanged(
    exchange: Exchange, spec: StoreSpec, store: StoreState, s: int, used: Used, inputs: StepInputs
) -> tuple[StoreState, Array, Array]:
    """Steps the rows of one store that this shard owns; counts as `update_here` does."""
    is_live, plan = used.is_live, used.plans[0]
    if len(used.plans) == 1 and exchange.sends_sums_by_kernels(spec, plan.features.stores[s], plan.asked_of(s)):
        return _update_in_windows(exchange, spec, store, s, used, inputs)

    def step(carry: tuple[StoreState, Array, Array], arrived: list[Arrived]) -> tuple[StoreState, Array, Array]:
        store, num_nonfinite, num_stale = carry
        sums, total = gradients_lib.scale_by_uses(spec, arrived, is_live, counts_uses=inputs.counts_uses)
        received = [part.received for part in arrived]
        row_ids = gradients_lib.concatenate([part.row_ids for part in arrived])
        store, view, slots, _ = tiers.bring_rows(spec, store, inputs.seed, row_ids)
        step_of_round = _step_of_lines(spec, inputs, received, slots, is_live, total)
        view, more_nonfinite, _ = kernels.update(view, step_of_round, sums)
        store = tiers.give_back(store, view, writes=True)
        more_stale = sum(jnp.where(is_live[p], 0, part.uses.sum(dtype=jnp.int32)) for p, part in enumerate(arrived))
        return store, num_nonfinite + more_nonfinite, num_stale + more_stale

    carry = store, jnp.zeros(len(spec.tables), jnp.int32), jnp.zeros((), jnp.int32)
    store, num_nonfinite, num_stale = gradients_lib.fold_arrivals(
        exchange, "update", spec, s, used, lambda carry: carry[0], step, carry
    )
    if spec.is_replicated:
        # Every shard did the same; only the first counts.
        is_first = exchange.shards.index() == 0
        num_nonfinite, num_stale = jnp.where(is_first, num_nonfinite, 0), jnp.where(is_first, num_stale, 0)
    return store, num_nonfinite, num_stale


def _update_in_windows(
    exchange: Exchange, spec: StoreSpec, store: StoreState, s: int, used: Used, inputs: StepInputs
) -> tuple[StoreState, Array, Array]:
    """Does `update_exchanged`; sums of gradients go into windows, and from there into the step."""
    (plan,), (gradients,), windows = used.plans, used.gradients, not_none(exchange.windows)
    part, asked, found = plan.features.stores[s], plan.asked_of(s), plan.found_of(s)
    received, row_ids, total = asked.received, found.row_ids, None
    if inputs.counts_uses:
        uses = jnp.where(row_ids == jnp.uint32(NO_ROW), 0, received[:, 3].astype(jnp.int32))
        total = gradients_lib.uses_in_all([row_ids], [uses], used.is_live)
    dtype = gathered_dtype(exchange.spec.gradients, "float32")
    windows.reserve(received.shape[0] * spec.dim * np.dtype(dtype).itemsize)
    _, *bags = part.operands()
    store, view, slots, _ = tiers.bring_rows(spec, store, inputs.seed, row_ids, found.slots)
    step = _step_of_lines(spec, inputs, [received], slots, used.is_live, total)
    flat = gradients_lib.gradients_by_bag(spec, part, gradients)
    of_bags = asked.slots, bags, flat, part.num_tiles, dtype, found.sorted_uses
    view, num_nonfinite, num_stale = kernels.update_window(windows.number, view, step, received, *of_bags)
    return tiers.give_back(store, view, writes=True), num_nonfinite, num_stale

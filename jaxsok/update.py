"""The way back: plans and gradients → state. Each row that was used steps once, with the sum of its gradients.

On one device each store costs one FFI call. On a mesh this runs on every shard: gradients are summed for each distinct
key, go to the owners, and there the rows step, once, with what came from all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxsok import annotations, exchange, table, tickets
from jaxsok.exchange import Round, Route
from jaxsok.features import FeatureLayout, StoreFeatures, single_key_layouts
from jaxsok.kernels import combine as combine_kernels
from jaxsok.kernels import update as kernels
from jaxsok.optimizers.program import compiled
from jaxsok.optimizers.protocol import PROGRAM
from jaxsok.plan import Plan, Requests
from jaxsok.shards import Shards
from jaxsok.specs import ExchangeSpec, StoreSpec
from jaxsok.store import State, StoreState
from jaxsok.types import NO_ROW, NUM_FEATURE_WORDS, ROUNDINGS, ROW_GRADIENTS

Gradients = Mapping[str, Float[Array, "..."]]
"""By feature, in the shape and, but for the rounding, the dtype of its embedding."""


def update(
    specs: Sequence[StoreSpec],
    state: State,
    plans: Sequence[Plan],
    gradients: Sequence[Gradients],
    learning_rate: Any,
    shards: Shards | None = None,
    wire: ExchangeSpec | None = None,
) -> tuple[State, list[Int32[Array, " num_tables"]], Int32[Array, ""], Int32[Array, ""]]:
    """Steps every row that the plans used, once, and advances the step.

    Args:
      specs: of the stores.
      state: donated: the result has its buffers.
      plans: of the lookups of this step.
      gradients: one for each plan.
      learning_rate: a scalar in place of the optimizers' own, or None.
      shards: over which the stores are split; None: one device.
      wire: how gradients travel between them.

    Returns:
      The state; rows with non-finite gradients by store and table; uses of plans that were left out; plans that were
      left out because the state had no open ticket of theirs.
    """
    for plan, grads in zip(plans, gradients, strict=True):
        _check_names(plan, grads)
    redeemed = tickets.redeem(state, plans)
    stores, nonfinite = [], []
    stale = jnp.zeros((), jnp.int32)
    for s, (spec, store) in enumerate(zip(specs, state.stores, strict=True)):
        used = [i for i, plan in enumerate(plans) if plan.features.stores[s].layouts]
        # What belongs to no row, a count of steps say, goes on also where no row is used.
        stepping, globals_ = Stepping.of(spec, store.globals_, state.step, learning_rate)
        if not used:
            stores.append(dataclasses.replace(store, globals_=globals_))
            nonfinite.append(jnp.zeros(len(spec.tables), jnp.int32))
            continue
        inputs = StepInputs(stepping, state.seed, state.step)
        is_live = tickets.of_some(redeemed.is_live, used)
        of_store = [plans[i] for i in used], [gradients[i] for i in used], inputs, is_live
        if shards is None or wire is None:
            store, one_nonfinite, one_stale = _update_store(spec, store, s, *of_store)
        else:
            store, one_nonfinite, one_stale = _update_exchanged(shards, wire, spec, store, s, *of_store)
        stores.append(dataclasses.replace(store, globals_=globals_))
        nonfinite.append(one_nonfinite)
        stale = stale + one_stale
    # It stays at its end: a step that began anew would make the rows used last those used longest ago.
    step = jnp.maximum(state.step, state.step + jnp.uint32(1))
    state = dataclasses.replace(state, stores=tuple(stores), step=step, tickets=redeemed.tickets)
    return state, nonfinite, stale, redeemed.num_misused


@dataclasses.dataclass(frozen=True)
class Stepping:
    """What the kernel does to a row: by an optimizer of its own, or by a row program."""

    kernel: int
    hyper: Float[Array, " num_hyper"]
    """Or a program's scalars."""
    words: np.ndarray
    """Of the program; of no meaning without."""
    num_registers: int = 0
    counts_uses: bool = False
    """Whether the step of a row depends on how often it was used."""

    @classmethod
    def of(
        cls, spec: StoreSpec, globals_: tuple[Array, ...], step: Any, learning_rate: Any
    ) -> tuple["Stepping", tuple[Array, ...]]:
        """That of a store's optimizer at a step, and the store's globals after it."""
        optimizer = spec.optimizer
        if optimizer.kernel != PROGRAM:
            return cls(optimizer.kernel, optimizer.hyper_operand(step, learning_rate), np.zeros(1, np.int32)), globals_
        program = compiled(optimizer, spec.dim)
        hyper, after = optimizer.advance(tuple(leaf[0] for leaf in globals_), step, learning_rate, spec.dim)
        stepping = cls(PROGRAM, program.scalars(hyper), program.words(), program.num_registers, program.counts_uses)
        return stepping, tuple(jnp.asarray(leaf)[None] for leaf in after)


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What a step needs beside rows and gradients: what it does to a row, and where its random bits come from."""

    stepping: Stepping
    seed: UInt32[Array, "2"]
    step: UInt32[Array, ""]


@annotations.by_store
def _update_store(
    spec: StoreSpec,
    store: StoreState,
    s: int,
    plans: Sequence[Plan],
    gradients: Sequence[Gradients],
    inputs: StepInputs,
    is_live: Bool[Array, " num_plans"],
) -> tuple[StoreState, Array, Array]:
    parts = [plan.features.stores[s] for plan in plans]
    batch, num_tiles = joined(parts)
    row_ids = _concatenate([plan.found[s].row_ids for plan in plans])
    flat = [
        bag_gradient(grads, part, layout, spec)
        for part, grads in zip(parts, gradients, strict=True)
        for layout in part.layouts
    ]
    if any(gradient.dtype != spec.embedding_dtype for gradient in flat):
        flat = [_as_float32(gradient) for gradient in flat]
    # The features tell the table of each key.
    table_ids = jnp.zeros(0, jnp.uint32)
    return _stepped(spec, store, is_live, batch, num_tiles, row_ids, table_ids, inputs, flat, spec.row_gradient)


def _stepped(
    spec: StoreSpec,
    store: StoreState,
    is_live: Bool[Array, " num_plans"],
    batch: kernels.Batch,
    num_tiles: int,
    row_ids: Array,
    table_ids: Array,
    inputs: StepInputs,
    gradients: Sequence[Array],
    row_gradient: str,
    num_uses: Array | None = None,
) -> tuple[StoreState, Array, Array]:
    """The store, its used rows stepped; rows with non-finite gradients by table; uses of stale plans."""
    rows, states, num_nonfinite, num_stale = kernels.update(
        store.counters,
        is_live,
        batch,
        row_ids,
        inputs.stepping.hyper,
        spec.table_words(),
        inputs.seed,
        inputs.step,
        table_ids,
        jnp.zeros(0, jnp.float32) if num_uses is None else num_uses,
        store.rows,
        store.states,
        store.records,
        gradients,
        num_tiles=num_tiles,
        optimizer=inputs.stepping.kernel,
        row_gradient=ROW_GRADIENTS[row_gradient],
        rounding=ROUNDINGS[spec.rounding],
        program=inputs.stepping.words,
        num_registers=inputs.stepping.num_registers,
    )
    return dataclasses.replace(store, rows=rows, states=states), num_nonfinite, num_stale


@annotations.by_store
def _update_exchanged(
    shards: Shards,
    wire: ExchangeSpec,
    spec: StoreSpec,
    store: StoreState,
    s: int,
    plans: Sequence[Plan],
    gradients: Sequence[Gradients],
    inputs: StepInputs,
    is_live: Bool[Array, " num_plans"],
) -> tuple[StoreState, Array, Array]:
    """One store's update through the exchange."""
    asked = [plan.asked[s] for plan in plans]
    # The number of uses travels with the gradients only where the requests do not know it.
    counts_differ = any(exchange.has_unused_keys(plan.features.stores[s]) for plan in plans)
    none = jnp.zeros(len(spec.tables), jnp.int32), jnp.zeros((), jnp.int32)

    def step(
        store: StoreState, arrived: Sequence[tuple[Array, Array, Array, Array]]
    ) -> tuple[StoreState, Array, Array]:
        """Steps the rows of requests `[n, 4]` by the gradients that arrived for them, from each plan."""
        received, row_ids, sums, uses = zip(*arrived, strict=True)
        row_ids = [jnp.where(n > 0, ids, jnp.uint32(NO_ROW)) for ids, n in zip(row_ids, uses, strict=True)]
        num_stale = sum(jnp.where(is_live[p], 0, n.sum()) for p, n in enumerate(uses))
        all_ids = _concatenate(row_ids)
        total = None
        if spec.row_gradient != "sum" or inputs.stepping.counts_uses:
            alive = [jnp.where(is_live[p], n, 0) for p, n in enumerate(uses)]
            total = exchange.uses_of_rows(all_ids, _concatenate(alive)).astype(jnp.float32)
        if spec.row_gradient != "sum":
            divisor = jnp.maximum(total if spec.row_gradient == "mean" else jnp.sqrt(total), 1.0)
            ends = np.cumsum([ids.shape[0] for ids in row_ids])
            sums = [part / one[:, None] for part, one in zip(sums, jnp.split(divisor, ends[:-1].tolist()), strict=True)]
        batch, num_tiles = as_features([part.shape[0] for part in received])
        keys = _concatenate([part[:, :2] for part in received])
        # One feature has keys of all tables; who rounds at random must know which.
        is_random = spec.dtype != "float32" and spec.rounding == "stochastic"
        table_ids = _concatenate([part[:, 2] for part in received]) if is_random else jnp.zeros(0, jnp.uint32)
        store, num_nonfinite, _ = _stepped(
            spec, store, is_live, (keys, *batch), num_tiles, all_ids, table_ids, inputs, sums, "sum", total
        )
        return store, num_nonfinite, num_stale

    if all(one.received is not None for one in asked):
        arrived = []
        for plan, grads, one in zip(plans, gradients, asked, strict=True):
            route = Route(shards, spec.is_replicated, one.send_capacity)
            sums, uses = summed_by_key(spec, plan, grads, s)
            live_uses = route.to_owners(uses) if counts_differ else one.received[:, 3].astype(jnp.int32)
            sums = route.rows_to_owners(sums, wire.gradients)
            live_uses = jnp.where(plan.found[s].row_ids != jnp.uint32(NO_ROW), live_uses, 0)
            arrived.append((one.received, plan.found[s].row_ids, sums, live_uses))
        store, num_nonfinite, num_stale = step(store, arrived)
    else:
        asked = [in_rounds(spec, plan, s) for plan in plans]
        summed = [summed_by_key(spec, plan, grads, s) for plan, grads in zip(plans, gradients, strict=True)]

        def one_round(carry: tuple, rounds: list[Round]) -> tuple:
            store, num_nonfinite, num_stale = carry
            arrived = []
            for one, part, (sums, uses) in zip(asked, rounds, summed, strict=True):
                received = part.requests(one)
                row_ids = table.find(store, received[:, :2], received[:, 2])
                live_uses = part.route.to_owners(part.take(uses)) if counts_differ else received[:, 3].astype(jnp.int32)
                live_uses = jnp.where(table.is_key(received[:, :2]), live_uses, 0)
                sums = part.route.rows_to_owners(part.take(sums), wire.gradients)
                arrived.append((received, row_ids, sums, live_uses))
            store, more_nonfinite, more_stale = step(store, arrived)
            return store, num_nonfinite + more_nonfinite, num_stale + more_stale

        carry = store, *none
        (store, num_nonfinite, num_stale), _, _ = exchange.over_rounds(shards, spec, asked, one_round, carry)
    if spec.is_replicated:
        # Every shard did the same: one of them counts.
        is_first = shards.index() == 0
        num_nonfinite, num_stale = jnp.where(is_first, num_nonfinite, 0), jnp.where(is_first, num_stale, 0)
    return store, num_nonfinite, num_stale


def in_rounds(spec: StoreSpec, plan: Plan, s: int, op: str = "update") -> Requests:
    """What a plan asks as one that goes in rounds, beside others that do; without the keys that were kept out."""
    asked = plan.asked[s]
    if asked.received is not None:
        raise ValueError(
            f"{op}: plan: got plans with and without a send capacity in one update, wanted all of one kind: all from "
            "collection.pipeline or plan(send_capacity=...), or none."
        )
    if not spec.has_admission:
        return asked
    has_row = plan.found[s].row_ids != jnp.uint32(NO_ROW)
    return dataclasses.replace(asked, requests=jnp.where(has_row[:, None], asked.requests, exchange.PADDING_REQUEST))


def summed_by_key(spec: StoreSpec, plan: Plan, gradients: Gradients, s: int) -> tuple[Array, Array]:
    """By request, or by line to send, the gradients of its key, summed over all uses in the batch, and their number."""
    part, asked = plan.features.stores[s], plan.asked[s]
    flat = [_as_float32(bag_gradient(gradients, part, layout, spec)) for layout in part.layouts]
    keys, offsets, weights, words = part.operands()
    bags = offsets, weights, words
    if asked.received is None:
        return combine_kernels.combine_transpose(flat, asked.inverse, bags, asked.requests.shape[0], part.num_tiles)
    num_lines = (asked.starts.shape[0] - 1) * asked.send_capacity
    if asked.send_capacity >= keys.shape[0] or not exchange.has_divided_bags(part):
        return combine_kernels.combine_transpose(flat, asked.slots, bags, num_lines, part.num_tiles)
    # Keys that were not sent are part of the hotness of their bags, as they were for the lookup: they get a line more.
    is_unsent = table.is_key(keys) & (asked.slots < 0)
    lines = jnp.where(is_unsent, num_lines, asked.slots)
    sums, uses = combine_kernels.combine_transpose(flat, lines, bags, num_lines + 1, part.num_tiles)
    return sums[:num_lines], uses[:num_lines]


def as_features(sizes: Sequence[int]) -> tuple[tuple[Array, Array, np.ndarray], int]:
    """Single keys, one feature for each plan, as the kernels take them: offsets, weights, features; tiles."""
    layouts = single_key_layouts([0] * len(sizes), sizes)
    words = np.array([layout.words(plan=number) for number, layout in enumerate(layouts)], np.int32)
    num_tiles = sum(layout.num_tiles for layout in layouts)
    return (jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32), words), num_tiles


def check_gradients(
    specs: Sequence[StoreSpec], plan: Plan, gradients: Gradients, num_parts: int, op: str = "update"
) -> None:
    """Refuses gradients that do not fit a plan of global arrays.

    Args:
      specs: of the stores.
      plan: of a lookup.
      gradients: by feature.
      num_parts: shards that the samples are split over.
      op: as messages name the call.

    Raises:
      TypeError, ValueError: names the feature, got and wanted.
    """
    _check_names(plan, gradients, op)
    for spec, part in zip(specs, plan.features.stores, strict=True):
        for layout in part.layouts:
            num_lines, *others = layout.embedding_shape
            whole = dataclasses.replace(layout, embedding_shape=(num_lines * num_parts, *others))
            gradient_of(gradients, whole, spec, op)


def _check_names(plan: Plan, gradients: Gradients, op: str = "update") -> None:
    known = {layout.name for part in plan.features.stores for layout in part.layouts}
    unknown = sorted(set(gradients) - known)
    if unknown:
        raise ValueError(f"{op}: gradients: got features {unknown}, wanted only those of the plan: {sorted(known)}.")


def gradient_of(gradients: Gradients, layout: FeatureLayout, spec: StoreSpec, op: str = "update") -> Array:
    """A feature's gradient, checked."""
    what = f'{op}: gradients: feature "{layout.name}"'
    if layout.name not in gradients:
        raise ValueError(f"{what}: got none, wanted one; there are {sorted(gradients)}.")
    gradient = gradients[layout.name]
    wanted = (*layout.embedding_shape, spec.dim)
    if not hasattr(gradient, "shape") or not jnp.issubdtype(gradient.dtype, jnp.floating):
        got = f"{gradient.dtype}{list(gradient.shape)}" if hasattr(gradient, "shape") else type(gradient).__name__
        raise TypeError(f"{what}: got {got}, wanted a float array of shape {list(wanted)}.")
    if gradient.shape != wanted:
        raise ValueError(f"{what}: got shape {list(gradient.shape)}, wanted that of its embedding, {list(wanted)}.")
    return jnp.asarray(gradient)


def bag_gradient(gradients: Gradients, part: StoreFeatures, layout: FeatureLayout, spec: StoreSpec) -> Array:
    """The gradient of what the kernels made: where samples share a bag, their sum, in the order of the samples."""
    gradient = gradient_of(gradients, layout, spec)
    inverse = part.inverse_of(layout)
    if inverse is None:
        return gradient
    shape = (*layout.combined_shape, spec.dim)
    num_samples, hotness = gradient.shape[0], int(np.prod(layout.embedding_shape[1:]))
    if num_samples == 0 or layout.num_distinct == 0:
        return jnp.zeros(shape, jnp.float32)
    # Not XLA's scatter-add, whose order of summing changes from run to run on a GPU (law 3).
    lines = inverse[:, None] * jnp.int32(hotness) + jnp.arange(hotness, dtype=jnp.int32)[None, :]
    flat = _as_float32(gradient).reshape(num_samples * hotness, spec.dim)
    bags, num_tiles = as_features([num_samples * hotness])
    summed, _ = combine_kernels.combine_transpose(
        [flat], lines.reshape(-1), bags, layout.num_distinct * hotness, num_tiles
    )
    return summed.reshape(shape)


def _as_float32(gradient: Array) -> Array:
    return gradient.astype(jnp.float32)


def _concatenate(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def joined(parts: Sequence[StoreFeatures]) -> tuple[kernels.Batch, int]:
    """Several plans' features as one batch, each feature knowing its plan."""
    words, num_keys, num_bags, num_offsets, num_weights, num_tiles = [], 0, 0, 0, 0, 0
    operands = [part.operands() for part in parts]
    for number, (part, (_, offsets, weights, _)) in enumerate(zip(parts, operands, strict=True)):
        for layout in part.layouts:
            moved = dataclasses.replace(
                layout,
                key_start=layout.key_start + num_keys,
                bag_start=layout.bag_start + num_bags,
                offsets_start=layout.offsets_start + num_offsets,
                weights_start=layout.weights_start + num_weights if layout.weights_start >= 0 else -1,
                tile_start=layout.tile_start + num_tiles,
            )
            words.append(moved.words(plan=number))
        num_keys += part.keys.shape[0]
        num_bags += sum(layout.num_bags for layout in part.layouts)
        num_offsets += offsets.shape[0]
        num_weights += weights.shape[0]
        num_tiles += part.num_tiles
    features = np.array(words, np.int32).reshape(-1, NUM_FEATURE_WORDS)
    keys, offsets, weights = (_concatenate([arrays[i] for arrays in operands]) for i in range(3))
    return (keys, offsets, weights, features), num_tiles

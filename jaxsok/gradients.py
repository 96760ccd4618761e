"""Gradients of embeddings on their way to rows: checked, summed by key, and brought to the owners of the rows.

update.py steps the rows that are reached, and norms.py adds up the squares of what arrives. On one device the kernels
sum the gradients of bags by row. On a mesh a shard sums its gradients by distinct key, and sends them the way that the
requests of its plan went.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsok import exchange as exchange_lib, table
from jaxsok.checks import not_none
from jaxsok.exchange import PADDING_REQUEST, Exchange, HashOrder, Round, Route
from jaxsok.features import FeatureLayout, StoreFeatures, single_key_layouts
from jaxsok.kernels import combine as combine_kernels
from jaxsok.kernels.lookup import Batch
from jaxsok.kernels.tier import SlotList
from jaxsok.plan import Plan, Requests
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import NO_ROW, NUM_FEATURE_WORDS, Inverse, RowIds

Gradients = Mapping[str, Float[Array, "..."]]
"""Gradient of each feature, in the shape and, except for the rounding, the dtype of its embedding."""


# Checks --------------------------------------------------------------------------------------------------------------


def check_gradients(specs: Sequence[StoreSpec], plan: Plan, gradients: Gradients, num_parts: int, op: str) -> None:
    """Refuses gradients that do not fit a plan of global arrays, whose samples are split over `num_parts` shards."""
    known = {layout.name for part in plan.features.stores for layout in part.layouts}
    unknown = sorted(set(gradients) - known)
    if unknown:
        raise ValueError(f"{op}: gradients: got features {unknown}, wanted only those of the plan: {sorted(known)}.")
    for spec, part in zip(specs, plan.features.stores, strict=True):
        for layout in part.layouts:
            num_lines, *others = layout.embedding_shape
            _check(gradients, layout.name, (num_lines * num_parts, *others, spec.dim), op)


def _check(gradients: Gradients, name: str, wanted: tuple[int, ...], op: str) -> None:
    what = f'{op}: gradients: feature "{name}"'
    if name not in gradients:
        raise ValueError(f"{what}: got none, wanted one; there are {sorted(gradients)}.")
    gradient = gradients[name]
    if not hasattr(gradient, "shape") or not jnp.issubdtype(gradient.dtype, jnp.floating):
        got = f"{gradient.dtype}{list(gradient.shape)}" if hasattr(gradient, "shape") else type(gradient).__name__
        raise TypeError(f"{what}: got {got}, wanted a float array of shape {list(wanted)}.")
    if gradient.shape != wanted:
        raise ValueError(f"{what}: got shape {list(gradient.shape)}, wanted that of its embedding, {list(wanted)}.")


# On one shard --------------------------------------------------------------------------------------------------------


def bag_gradient(gradients: Gradients, part: StoreFeatures, layout: FeatureLayout, spec: StoreSpec) -> Array:
    """Returns the gradient by bag: where samples share a bag, their sum, in the order of the samples."""
    gradient = jnp.asarray(gradients[layout.name])
    inverse = part.inverse_of(layout)
    if inverse is None:
        return gradient
    shape = (*layout.combined_shape, spec.dim)
    num_samples, hotness = gradient.shape[0], int(np.prod(layout.embedding_shape[1:]))
    if num_samples == 0 or layout.num_distinct == 0:
        return jnp.zeros(shape, jnp.float32)
    # Not XLA's scatter-add, whose order of summing changes from run to run on a GPU (law 3).
    lines = inverse[:, None] * jnp.int32(hotness) + jnp.arange(hotness, dtype=jnp.int32)[None, :]
    flat = gradient.astype(jnp.float32).reshape(num_samples * hotness, spec.dim)
    bags, num_tiles = as_features([num_samples * hotness])
    summed, _ = combine_kernels.combine_transpose(
        [flat], lines.reshape(-1), bags, layout.num_distinct * hotness, num_tiles
    )
    return summed.reshape(shape)


def join_features(parts: Sequence[StoreFeatures]) -> tuple[Batch, int]:
    """Joins several plans' features into one batch, in which each feature knows its plan."""
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
    keys, offsets, weights = (concatenate([arrays[i] for arrays in operands]) for i in range(3))
    return (keys, offsets, weights, features), num_tiles


def as_features(sizes: Sequence[int]) -> tuple[tuple[Array, Array, np.ndarray], int]:
    """Makes single keys, one feature for each plan, as the kernels take them: offsets, weights, features; tiles."""
    layouts = single_key_layouts([0] * len(sizes), sizes)
    words = np.array([layout.words(plan=number) for number, layout in enumerate(layouts)], np.int32)
    num_tiles = sum(layout.num_tiles for layout in layouts)
    return (jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32), words), num_tiles


def concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenates arrays; a single one is returned without an operation."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


# To the owners -------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """The gradients that came to this shard for the requests of one plan: for its rows, summed by each asker."""

    received: Array
    """The requests, `[n, 4]`."""
    row_ids: RowIds
    """Row ids to step; NO_ROW where there is nothing to step."""
    sums: Float32[Array, "n dim"]
    uses: Int32[Array, " n"]
    """The number of uses in each sum."""


class Used(NamedTuple):
    """The plans of a step that use one store, and their gradients."""

    plans: Sequence[Plan]
    gradients: Sequence[Gradients]
    is_live: Bool[Array, " num_plans"]

    def slots_of(self, s: int) -> SlotList | None:
        """Returns the list of the slots of a store's rows that the lookup made; None for several plans."""
        return self.plans[0].found_of(s).slots if len(self.plans) == 1 else None


def fold_arrivals(
    exchange: Exchange,
    op: str,
    spec: StoreSpec,
    s: int,
    used: Used,
    store_of: Callable[[Any], StoreState],
    body: Callable[[Any, list[Arrived]], Any],
    carry: Any,
) -> Any:
    """Brings the gradients of one store to the owners of the rows: `body(carry, arrived)` for each round.

    All gradients of a row come in one round, and normally there is only one. `body` gets the arrivals of each plan and
    returns the next carry; `store_of` finds the store in a carry. Returns the last carry.
    """
    plans = used.plans
    asked = [plan.asked_of(s) for plan in plans]
    if len({requests.listed is None for requests in asked}) > 1:
        raise ValueError(
            f"{op}: plan: got plans with and without a send capacity in one update, wanted all of one kind: all from "
            "collection.pipeline or plan(send_capacity=...), or none."
        )
    # The number of uses travels with the gradients only where the requests do not know it.
    counts_differ = any(exchange_lib.has_unused_keys(plan.features.stores[s]) for plan in plans)
    dtype = exchange_lib.gathered_dtype(exchange.spec.gradients, "float32")

    def deliver(
        route: Route, received: Array, row_ids: RowIds, is_real: bool | Bool[Array, " n"], sums: Array, uses: Array
    ) -> Arrived:
        uses_of_key = received[:, 3].astype(jnp.int32)  # 0 in padding
        uses = jnp.where(is_real & (uses_of_key > 0), route.to_owners(uses) if counts_differ else uses_of_key, 0)
        row_ids = jnp.where(uses > 0, row_ids, jnp.uint32(NO_ROW))
        sums = exchange_lib.send_rows(sums, exchange.spec.gradients, route.to_owners).astype(jnp.float32)
        return Arrived(received, row_ids, sums, uses)

    def one_round(asked: Sequence[Requests]) -> Any:
        of_plans = []
        for plan, grads, requests in zip(plans, used.gradients, asked, strict=True):
            route, row_ids = exchange.route(spec, requests.send_capacity), plan.found_of(s).row_ids
            sums = _sum_by_line(spec, plan, grads, s, dtype, route.num_sent)
            of_plans.append(deliver(route, requests.received, row_ids, row_ids != jnp.uint32(NO_ROW), *sums))
        return body(carry, of_plans)

    def rounds(carry: Any) -> Any:
        ordered, summed = [], []
        for plan, grads, requests in zip(plans, used.gradients, asked, strict=True):
            part = plan.features.stores[s]
            order = HashOrder.of(spec, part, requests.send_capacity)
            summed.append(_sum(spec, part, grads, order.inverse, order.lines.shape[0], dtype))
            route = exchange.route(spec, requests.send_capacity)
            ordered.append(dataclasses.replace(order, lines=_lines_with_row(route, plan, s, order)))

        def run_round(carry: Any, parts: list[Round]) -> Any:
            of_plans = []
            for order, part, (sums, uses) in zip(ordered, parts, summed, strict=True):
                received = part.requests(order.lines)
                row_ids = table.find(store_of(carry), received[:, :2], received[:, 2])
                # A key whose row went since the lookup is a use of a stale plan, and counted.
                of_plans.append(deliver(part.route, received, row_ids, True, part.take(sums), part.take(uses)))
            return body(carry, of_plans)

        return exchange_lib.over_rounds(exchange, spec, ordered, run_round, carry)

    return exchange_lib.in_one_round_or_more(asked, one_round, rounds)


def _lines_with_row(route: Route, plan: Plan, s: int, order: HashOrder) -> Array:
    """Returns the requests in the order of their hashes, padding in place of keys that the lookup gave no row."""
    asked, found = plan.asked_of(s), plan.found_of(s)
    # The lookup may have had one round where the update, with another plan, has several; else all row ids are NO_ROW.
    row_ids = (
        route.to_askers(found.row_ids).at[asked.slots].get(mode="fill", fill_value=NO_ROW, wrap_negative_indices=False)
    )
    has_row = not_none(found.has_row).at[not_none(asked.listed).inverse].get(mode="fill", fill_value=False)
    of_line = jnp.zeros(order.lines.shape[0], bool)
    of_line = of_line.at[order.inverse].set(has_row | (row_ids != jnp.uint32(NO_ROW)), mode="drop")
    return jnp.where(of_line[:, None], order.lines, PADDING_REQUEST)


def scale_by_uses(
    spec: StoreSpec, arrived: Sequence[Arrived], is_live: Bool[Array, " num_plans"], *, counts_uses: bool = False
) -> tuple[list[Array], Float32[Array, " num_lines"] | None]:
    """Scales sums by the uses of the row in all live plans, as `row_gradient` says; returns the uses if needed."""
    sums = [part.sums for part in arrived]
    if spec.row_gradient == "sum" and not counts_uses:
        return sums, None
    total = uses_in_all([part.row_ids for part in arrived], [part.uses for part in arrived], is_live)
    if spec.row_gradient != "sum":
        divisor = jnp.maximum(total if spec.row_gradient == "mean" else jnp.sqrt(total), 1.0)
        ends = np.cumsum([part.row_ids.shape[0] for part in arrived])[:-1].tolist()
        sums = [part / uses[:, None] for part, uses in zip(sums, jnp.split(divisor, ends), strict=True)]
    return sums, total


def uses_in_all(
    row_ids: Sequence[RowIds], uses: Sequence[Int32[Array, " _"]], is_live: Bool[Array, " num_plans"]
) -> Float32[Array, " num_lines"]:
    """Counts for each line, plan after plan, the uses of its row in all live plans."""
    alive = [jnp.where(is_live[p], of_plan, 0) for p, of_plan in enumerate(uses)]
    return exchange_lib.uses_of_rows(concatenate(row_ids), concatenate(alive)).astype(jnp.float32)


def gradients_by_bag(spec: StoreSpec, part: StoreFeatures, gradients: Gradients) -> list[Float32[Array, "..."]]:
    """Returns the gradients of a store's features by bag, as float32."""
    return [bag_gradient(gradients, part, layout, spec).astype(jnp.float32) for layout in part.layouts]


def _sum_by_line(
    spec: StoreSpec, plan: Plan, gradients: Gradients, s: int, dtype: str, num_lines: int
) -> tuple[Array, Array]:
    """Sums the gradients of each key over its uses in the batch, and counts them: by line to send in the one round."""
    part, asked = plan.features.stores[s], plan.asked_of(s)
    is_all_sent = asked.listed is not None or asked.send_capacity >= part.keys.shape[0]
    if is_all_sent or not exchange_lib.has_divided_bags(part):
        return _sum(spec, part, gradients, asked.slots, num_lines, dtype)
    # Keys that were not sent count in the hotness of their bags, as they did in the lookup: they get an extra line.
    is_unsent = table.is_key(part.keys) & (asked.slots < 0)
    lines = jnp.where(is_unsent, num_lines, asked.slots)
    sums, uses = _sum(spec, part, gradients, lines, num_lines + 1, dtype)
    return sums[:num_lines], uses[:num_lines]


def _sum(
    spec: StoreSpec, part: StoreFeatures, gradients: Gradients, lines: Inverse, num_lines: int, dtype: str
) -> tuple[Array, Array]:
    """Sums the gradients of the keys of each line, and counts them."""
    _, *bags = part.operands()
    flat = gradients_by_bag(spec, part, gradients)
    return combine_kernels.combine_transpose(flat, lines, tuple(bags), num_lines, part.num_tiles, dtype)

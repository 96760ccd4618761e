"""The norm of a step's row gradients, for clipping by global norm.

Each row counts once, with the sum of its gradients over all uses, plans and shards, so the norm is that of the dense
gradient of the whole table. Plans and gradients go the way of update.py up to the point where rows would step; nothing
changes. `Collection.clip_by_global_norm` scales the gradients.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, UInt32

from jaxsok import annotations, table
from jaxsok.exchange import Exchange, has_divided_bags
from jaxsok.gradients import Arrived, Used, as_features, fold_arrivals, gradients_by_bag, join_features, scale_by_uses
from jaxsok.kernels import combine as combine_kernels, plan as plan_kernels
from jaxsok.plan import default_owners
from jaxsok.shards import Shards
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import NO_ROW

Squares: TypeAlias = Float32[Array, ""]
"""A sum of squares."""


def with_squares(squares: Squares, numbers: Float[Array, "..."]) -> Squares:
    """Adds the squares of more numbers to their sum; a number that is not finite makes the result so."""
    return squares + jnp.square(numbers.astype(jnp.float32)).sum()


def sum_over_shards(shards: Shards, squares: Squares) -> Squares:
    """Adds the squares of all shards, in their order."""
    # Each part has its own place, where adding is exact, so the collective cannot change the order of the sum.
    return shards.sum(jnp.zeros(shards.num_shards, jnp.float32).at[shards.index()].set(squares)).sum()


def sum_by_row(
    spec: StoreSpec,
    row_ids: UInt32[Array, " num_keys"],
    batch: tuple[Array, Array, np.ndarray],
    num_tiles: int,
    gradients: Sequence[Float32[Array, "..."]],
    row_gradient: str,
    is_refused: Bool[Array, " num_keys"] | None = None,
) -> Float32[Array, "num_keys dim"]:
    """Sums gradients by row; zeros where a sum is not finite. Refused keys count in the hotness of their bags."""
    # Rows are made distinct as keys are, with the row id in place of the key, and one owner for all.
    is_row = row_ids != jnp.uint32(NO_ROW)
    as_keys = jnp.stack([row_ids, jnp.where(is_row, jnp.uint32(0), jnp.uint32(NO_ROW))], axis=1)
    inverse = plan_kernels.plan_requests(
        (as_keys, *batch), spec.table_words(), default_owners(1), num_tiles=num_tiles, num_shards=1
    ).inverse
    if is_refused is not None:
        # Refused keys go to the last place, which no row uses: each of them leaves a place free.
        spare = row_ids.shape[0] - 1
        inverse = jnp.where(is_refused, spare, inverse)
    sums, uses = combine_kernels.combine_transpose(gradients, inverse, batch, row_ids.shape[0], num_tiles)
    if is_refused is not None:
        is_spare = (jnp.arange(row_ids.shape[0], dtype=jnp.int32) == spare) & is_refused.any()
        sums = jnp.where(is_spare[:, None], 0.0, sums)
    if row_gradient != "sum":
        divisor = jnp.maximum(uses.astype(jnp.float32), 1.0)
        sums = sums / (divisor if row_gradient == "mean" else jnp.sqrt(divisor))[:, None]
    # The update skips rows with non-finite gradients.
    return jnp.where(jnp.isfinite(sums).all(axis=1, keepdims=True), sums, 0.0)


@annotations.annotate_store
def row_gradients_here(spec: StoreSpec, store: StoreState, s: int, used: Used) -> Float32[Array, "num_keys dim"]:
    """Returns one store's row gradients on one shard."""
    plans, gradients, is_live = used
    parts = [plan.features.stores[s] for plan in plans]
    (keys, *batch), num_tiles = join_features(parts)
    row_ids = [jnp.where(is_live[p], plan.found_of(s).row_ids, jnp.uint32(NO_ROW)) for p, plan in enumerate(plans)]
    row_ids = jnp.concatenate(row_ids)
    is_refused = None
    if any(has_divided_bags(part) for part in parts):
        is_refused = table.is_key(keys) & (row_ids == jnp.uint32(NO_ROW))
    flat = [grad for part, grads in zip(parts, gradients, strict=True) for grad in gradients_by_bag(spec, part, grads)]
    return sum_by_row(spec, row_ids, tuple(batch), num_tiles, flat, spec.row_gradient, is_refused)


@annotations.annotate_store
def add_exchanged(
    exchange: Exchange, spec: StoreSpec, store: StoreState, s: int, used: Used, squares: Squares
) -> Squares:
    """Adds the squares of the rows that this shard owns; gradients come to it as for an update."""
    is_live = used.is_live
    # Every shard has all rows of a replicated store; only the first counts.
    is_counted = jnp.bool_(True) if not spec.is_replicated else exchange.shards.index() == 0

    def add(squares: Squares, arrived: list[Arrived]) -> Squares:
        sums, _ = scale_by_uses(spec, arrived, is_live)
        row_ids = [jnp.where(is_live[p], part.row_ids, jnp.uint32(NO_ROW)) for p, part in enumerate(arrived)]
        batch, num_tiles = as_features([ids.shape[0] for ids in row_ids])
        rows = sum_by_row(spec, jnp.concatenate(row_ids), batch, num_tiles, sums, "sum")
        return with_squares(squares, jnp.where(is_counted, rows, 0.0))

    return fold_arrivals(exchange, "gradient_norm", spec, s, used, lambda _: store, add, squares)


def tree_norm(tree: Any) -> Float32[Array, ""]:
    """Returns the norm of all numbers of a tree, as `optax.tree.norm`; complex numbers by their absolute value."""
    squares = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        squares = with_squares(squares, jnp.abs(jnp.asarray(leaf)))
    return jnp.sqrt(squares)


def clip(tree: Any, norm: Float32[Array, ""], max_norm: Any) -> Any:
    """Scales the numbers of a tree, in their own dtype, from a norm above `max_norm` to it; all are NaN for a NaN."""
    max_norm = jnp.asarray(max_norm, jnp.float32)
    scale = jnp.where(norm < max_norm, jnp.float32(1), max_norm / norm)

    def times(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        wide = jnp.float32 if leaf.dtype.itemsize < 4 else leaf.dtype  # 16 bits are rounded once
        return (leaf.astype(wide) * scale.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(times, tree)

"""Combines rows at hand into the embeddings of bags, and the transpose (law 4); a lookup combines by itself."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxsok import checks
from jaxsok.features import FeatureLayout, make_rise
from jaxsok.kernels import combine as kernels
from jaxsok.types import COMBINERS, Combiner, Inverse

_COMBINERS = tuple(name for name in COMBINERS if name)


def combine(
    rows: Float[Array, "num_unique dim"],
    inverse: Inverse,
    offsets: Int32[Array, " num_bags_plus_1"],
    combiner: Combiner,
    weights: Float[Array, " num_keys"] | None = None,
) -> Float[Array, "num_bags dim"]:
    """Combines the rows of each bag into its embedding, in the order of the keys; empty bags get zeros.

    "mean" divides by the hotness or the sum of the weights, "sqrtn" by the root of the hotness or of the sum of the
    squared weights. Positions in `inverse` that are out of range are padding.

    Example:
      >>> rows = jnp.array([[1.0, 2.0], [3.0, 4.0]])  # the rows of keys 7 and 9
      >>> inverse, offsets = jnp.array([0, 0, 1]), jnp.array([0, 2, 3])  # bags [7, 7] and [9]
      >>> combine(rows, inverse, offsets, "sum").tolist()
      [[2.0, 4.0], [3.0, 4.0]]
    """
    layout, bags = _bags(inverse, offsets, combiner, weights, "combine")
    rows, inverse = jnp.asarray(rows, jnp.float32), jnp.asarray(inverse, jnp.int32)
    return kernels.combine(rows, inverse, bags, layout.num_bags, layout.num_tiles)


def combine_transpose(
    bag_gradients: Float[Array, "num_bags dim"],
    inverse: Inverse,
    offsets: Int32[Array, " num_bags_plus_1"],
    combiner: Combiner,
    num_unique: int,
    weights: Float[Array, " num_keys"] | None = None,
) -> Float[Array, "num_unique dim"]:
    """Takes bag gradients back to rows: the transpose of `combine`, with its arguments and errors."""
    layout, bags = _bags(inverse, offsets, combiner, weights, "combine_transpose")
    gradients, inverse = jnp.asarray(bag_gradients, jnp.float32), jnp.asarray(inverse, jnp.int32)
    if gradients.ndim != 2 or gradients.shape[0] != layout.num_bags:
        raise ValueError(
            f"combine_transpose: bag_gradients: got shape {list(gradients.shape)}, wanted [{layout.num_bags}, dim]."
        )
    row_gradients, _ = kernels.combine_transpose([gradients], inverse, bags, num_unique, layout.num_tiles)
    return row_gradients


def combine_clipped(
    rows: Float[Array, "num_bags hotness dim"],
    weights: Shaped[Array, "num_bags hotness"],
    combiner: Combiner,
    max_norm: float | None = None,
) -> Float32[Array, "num_bags dim"]:
    """Combines the embeddings of a feature without a combiner, after scaling longer ones down to `max_norm` (L2).

    It is the `max_norm` of `tf.nn.safe_embedding_lookup_sparse` in training: call it in the loss function, so that
    gradients go through the clipping. `optim.Limits(max_row_norm=)` bounds the rows themselves instead.

    Args:
      rows: what a lookup gives for `FeatureSpec(combiner=None)` with `[num_bags, hotness]` keys or `max_hotness`.
      weights: a float for each key, zero where there is none; or `batch.features.mask(name)`.
      combiner: "sum", "mean" (divides by the sum of the weights) or "sqrtn" (by the root of their squares' sum). A bag
        whose divisor is 0 gets zeros.
      max_norm: None: nothing is clipped.

    Raises:
      TypeError, ValueError: unknown combiner, or a negative `max_norm`. Raised when traced.

    Cost:
      XLA's own programs over all `num_bags * hotness` rows.

    Example:
      >>> rows, mask = jnp.array([[[3.0, 4.0], [0.0, 0.5]]]), jnp.array([[True, True]])
      >>> combine_clipped(rows, mask, "sum", max_norm=2.5).tolist()
      [[1.5, 2.5]]
    """
    op = "combine_clipped"
    checks.one_of(f"{op}: combiner", combiner, _COMBINERS)
    rows, weights = jnp.asarray(rows, jnp.float32), jnp.asarray(weights).astype(jnp.float32)
    if max_norm is not None:
        max_norm = checks.number(f"{op}: max_norm", max_norm, 0, wanted="a number from 0, or None")
        squares = jnp.sum(rows * rows, axis=-1, keepdims=True)
        is_longer = squares > jnp.float32(max_norm) ** 2
        # A root of zero has no derivative, even where it is not used.
        rows = rows * jnp.where(is_longer, jnp.float32(max_norm) / jnp.sqrt(jnp.where(is_longer, squares, 1.0)), 1.0)
    total = jnp.sum(rows * weights[..., None], axis=1)
    if combiner == "sum":
        return total
    divisor = jnp.sum(weights, axis=1) if combiner == "mean" else jnp.sqrt(jnp.sum(weights * weights, axis=1))
    divisor = divisor[:, None]
    return jnp.where(divisor == 0, 0.0, total / jnp.where(divisor == 0, 1.0, divisor))


def _bags(
    inverse: Inverse, offsets: Array, combiner: str, weights: Array | None, op: str
) -> tuple[FeatureLayout, kernels.Bags]:
    checks.one_of(f"{op}: combiner", combiner, _COMBINERS)
    if offsets.ndim != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{op}: offsets: got shape {list(offsets.shape)}, wanted [num_bags + 1].")
    if inverse.ndim != 1:
        raise ValueError(f"{op}: inverse: got shape {list(inverse.shape)}, wanted [num_keys].")
    if weights is not None and weights.shape != inverse.shape:
        raise ValueError(f"{op}: weights: got shape {list(weights.shape)}, wanted {list(inverse.shape)}.")
    num_bags = offsets.shape[0] - 1
    layout = FeatureLayout(
        name=op,
        table=0,
        combiner=combiner,
        num_keys=inverse.shape[0],
        num_bags=num_bags,
        hotness=0,
        embedding_shape=(num_bags,),
        num_offsets=num_bags + 1,
        weights_start=-1 if weights is None else 0,
    )
    words = np.array([layout.words()], np.int32)
    weights = jnp.zeros(0, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    return layout, (make_rise(jnp.asarray(offsets), inverse.shape[0]), weights, words)

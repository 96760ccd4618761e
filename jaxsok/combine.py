"""Combines rows that a lookup gave without a combiner; a lookup with a combiner does it by itself."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from jaxsok import checks
from jaxsok.types import COMBINERS, Combiner

_COMBINERS = tuple(name for name in COMBINERS if name)


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

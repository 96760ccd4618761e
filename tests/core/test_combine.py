"""jaxsok.combine, and the door of combine_transpose, by hand; test_laws.py compares the transpose with lookups."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsok
from jaxsok import gradients
from jaxsok.kernels import combine

ROWS = np.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, -6.0], [9.0, 9.0]], [[9.0, 9.0], [9.0, 9.0]]], np.float32)
MASK = np.array([[True, True], [True, False], [False, False]])
WEIGHTS = np.array([[0.5, 2.0], [1.0, -1.0], [0.0, 0.0]], np.float32)


@pytest.mark.parametrize("weights", [MASK, WEIGHTS], ids=["mask", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combine_clipped_without_a_limit(combiner, weights):
    """A full bag, one with padding or weights that cancel, and an empty bag give the result of loops."""
    got = jaxsok.combine_clipped(ROWS, weights, combiner)
    want = np.zeros((3, 2))
    for bag, (rows, factors) in enumerate(zip(ROWS.astype(np.float64), weights.astype(np.float64), strict=True)):
        divisor = {"sum": 1.0, "mean": factors.sum(), "sqrtn": np.sqrt((factors**2).sum())}[combiner]
        for row, factor in zip(rows, factors, strict=True):
            want[bag] += factor * row / divisor if divisor else 0.0
    # The values are sums of at most two products in float32.
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6, atol=1e-6)


def test_transpose_sums_over_uses():
    """A row's gradient is the sum over its uses, of all features; rows without a use get zeros."""
    inverse = jnp.array([0, 2, 1, 1, -1, 4, 0], jnp.int32)  # -1 and 4 are out of range: padding
    given = [jnp.array([[1.0, 10.0], [7.0, 70.0], [2.0, 20.0]]), jnp.array([[4.0, 40.0]] * 4)]
    bags, num_tiles = gradients.as_features([3, 4])
    got, num_uses = combine.combine_transpose(given, inverse, bags, 4, num_tiles)
    assert np.asarray(got).tolist() == [[5.0, 50.0], [6.0, 60.0], [7.0, 70.0], [0.0, 0.0]]
    assert np.asarray(num_uses).tolist() == [2, 2, 1, 0]

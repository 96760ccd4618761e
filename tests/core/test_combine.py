"""jaxsok.combine: the rows of a bag become its embedding, as in plain loops; test_laws.py tests the transpose."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsok.combine import combine, combine_transpose

ROWS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, -6.0]], np.float32)
INVERSE = np.array([0, 2, 1, 1, 3, -1, 0], np.int32)  # 3 and -1 are out of range: padding
OFFSETS = np.array([0, 2, 2, 6, 7], np.int32)
WEIGHTS = np.array([0.5, 2.0, 1.0, -1.0, 9.0, 9.0, 0.25], np.float32)


def by_hand(combiner: str, weights: np.ndarray | None) -> np.ndarray:
    """Combines one bag after the other, in float64."""
    out = np.zeros((len(OFFSETS) - 1, ROWS.shape[1]))
    for bag, (begin, end) in enumerate(itertools.pairwise(OFFSETS)):
        used = [i for i in range(begin, end) if 0 <= INVERSE[i] < len(ROWS)]
        w = np.ones(len(used)) if weights is None else weights[used].astype(np.float64)
        total = sum((w_i * ROWS[INVERSE[i]] for w_i, i in zip(w, used, strict=True)), np.zeros(ROWS.shape[1]))
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        out[bag] = total / divisor if divisor else 0.0
    return out


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combine(combiner, weights):
    """Bags with padding, an empty bag, and a bag whose weights sum to zero give the result of loops."""
    got = combine(jnp.asarray(ROWS), jnp.asarray(INVERSE), jnp.asarray(OFFSETS), combiner, weights)
    # The values are sums of at most two products in float32.
    np.testing.assert_allclose(np.asarray(got), by_hand(combiner, weights), rtol=1e-6, atol=1e-6)


def test_transpose_sums_over_uses():
    """A row's gradient is the sum over its bags; rows in no bag get zeros."""
    gradients = np.array([[1.0, 10.0], [7.0, 7.0], [2.0, 20.0], [4.0, 40.0]], np.float32)
    got = combine_transpose(jnp.asarray(gradients), jnp.asarray(INVERSE), jnp.asarray(OFFSETS), "sum", 4)
    assert np.asarray(got).tolist() == [[5.0, 50.0], [4.0, 40.0], [1.0, 10.0], [2.0, 20.0]]


def test_traced_offsets_stay_inside():
    """Offsets that decrease or are out of range are clamped and made to increase; nothing outside is accessed."""
    wild = jnp.asarray(np.array([-5, 4, 1, 10**9, 3], np.int32))
    got = jax.jit(lambda o: combine(jnp.asarray(ROWS), jnp.asarray(INVERSE), o, "sum"))(wild)
    tame = combine(jnp.asarray(ROWS), jnp.asarray(INVERSE), jnp.asarray(np.array([0, 4, 4, 7, 7], np.int32)), "sum")
    assert np.array_equal(np.asarray(got), np.asarray(tame))


@pytest.mark.parametrize(
    ("combiner", "offsets", "weights", "part"),
    [
        ("max", OFFSETS, None, "combiner"),
        (None, OFFSETS, None, "combiner"),
        ("sum", OFFSETS[:0], None, "offsets"),
        ("sum", OFFSETS, WEIGHTS[:2], "weights"),
    ],
)
def test_refusals(combiner, offsets, weights, part):
    """Invalid arguments are refused with the argument's name."""
    with pytest.raises(ValueError, match=part):
        combine(jnp.asarray(ROWS), jnp.asarray(INVERSE), jnp.asarray(offsets), combiner, weights)

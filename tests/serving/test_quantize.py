"""Rows in 8 bits, against brute force over all codes and exact fractions."""

import fractions

import hypothesis
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxsok import Records
from jaxsok.serving import frozen, quantize
from jaxsok.serving.errors import ServingError

CODES = {
    "int8": np.arange(-127, 128).astype(np.int8),
    "float8_e4m3fn": np.array([c for c in range(256) if c & 127 != 127], np.uint8).view(ml_dtypes.float8_e4m3fn),
}
DTYPES = list(CODES)
MOST = float(np.finfo(np.float32).max)
FINITE = st.floats(-MOST, MOST, width=32)
CORNERS = st.sampled_from((0.0, -0.0, 1.0, -1.0, MOST, -MOST, 2.0**-149, 2.0**-126, -(2.0**-127), 1 / 448, 1 / 512))
ROWS = arrays.arrays(np.float32, (3, 5), elements=st.one_of(FINITE, CORNERS, st.floats(-1, 1, width=32)))


def scale_of(row: np.ndarray, dtype: str) -> fractions.Fraction:
    """Returns the scale before it is rounded."""
    largest, least = (
        (127, fractions.Fraction(1, 2**126)) if dtype == "int8" else (448, fractions.Fraction(1, 448 * 512))
    )
    return max(max(fractions.Fraction(abs(float(x))) for x in row) / largest, least)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(rows=ROWS)
def test_nearest_code(dtype, rows):
    """Each number gets the code nearest to x / scale, on a tie the even one; the scale is a rounding from exact."""
    numbers, scales = quantize.quantize_rows(rows, dtype)
    assert numbers.dtype == CODES[dtype].dtype and scales.dtype == np.float32 and scales.shape == (3,)
    assert np.isfinite(quantize.dequantize_rows(numbers, scales)).all()
    codes = [fractions.Fraction(float(code)) for code in CODES[dtype].astype(np.float64)]
    for row, line, scale in zip(rows, numbers.astype(np.float64), scales, strict=True):
        exact = fractions.Fraction(float(scale))
        assert abs(exact / scale_of(row, dtype) - 1) <= fractions.Fraction(1, 2**23)
        for x, got in zip(row, line, strict=True):
            ratio = fractions.Fraction(float(x)) / exact
            distance = abs(fractions.Fraction(float(got)) - ratio)
            best = min(abs(code - ratio) for code in codes)
            assert distance <= best + abs(ratio) * fractions.Fraction(1, 2**50)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(rows=ROWS)
def test_error_bound(dtype, rows):
    """No number is farther from its stored value than the error bounds of its own and of its row."""
    rows_back = quantize.dequantize_rows(*quantize.quantize_rows(rows, dtype)).astype(np.float64)
    errors = np.abs(rows_back - rows)
    row_max = np.abs(rows).max(axis=1)
    assert (errors <= oracle.quantization_error_bound(dtype, row_max[:, None], rows)).all()
    assert (errors <= oracle.quantization_error_bound(dtype, row_max)[:, None]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_bound_is_tight(dtype):
    """Numbers of all sizes stay within the bound and come near it. For fp8 they reach 1/17 of a number, not 1/16."""
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((2000, 64)) * 10.0 ** rng.uniform(-30, 30, (2000, 1))).astype(np.float32)
    errors = np.abs(quantize.dequantize_rows(*quantize.quantize_rows(rows, dtype)).astype(np.float64) - rows)
    share = errors / oracle.quantization_error_bound(dtype, np.abs(rows).max(axis=1)[:, None], rows)
    assert (0.999 if dtype == "int8" else 0.93) < share.max() <= 1


def test_known_numbers():
    """Known numbers get their codes: ties go to even codes, and the scale of fp8 is that of HPS."""
    numbers, scales = quantize.quantize_rows(np.array([[127.0, 0.5, 1.5, -2.5, 0.49]], np.float32), "int8")
    assert numbers.tolist() == [[127, 0, 2, -2, 0]] and scales.tolist() == [1.0]
    numbers, scales = quantize.quantize_rows(
        np.array([[448.0, 17.0, 19.0, 2.0**-10, 1.5 * 2.0**-9, -1.0]]), "float8_e4m3fn"
    )
    assert numbers.astype(np.float32).tolist() == [[448.0, 16.0, 20.0, 0.0, 2.0**-8, -1.0]]
    assert scales.tolist() == [1.0]


@pytest.mark.parametrize("dtype, least", [("int8", 2.0**-126), ("float8_e4m3fn", np.float32(1 / (448 * 512)))])
def test_zeros_and_tiny_rows(dtype, least):
    """The scale has a floor, so no division is by zero, and zeros come back as zeros."""
    numbers, scales = quantize.quantize_rows(np.array([[0.0, -0.0], [2.0**-149, 0.0]], np.float32), dtype)
    assert scales.tolist() == [least] * 2
    assert (quantize.dequantize_rows(numbers, scales) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype):
    """Empty tables give empty rows."""
    for shape in ((0, 4), (2, 0)):
        numbers, scales = quantize.quantize_rows(np.zeros(shape, np.float32), dtype)
        assert numbers.shape == shape and scales.shape == shape[:1]
        assert quantize.dequantize_rows(numbers, scales).shape == shape


@pytest.mark.parametrize("source", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_rows_of_other_floats(source):
    """Rows of other floating dtypes are converted to float32 first."""
    rows = np.random.default_rng(1).standard_normal((4, 6)).astype(source)
    for got, want in zip(
        quantize.quantize_rows(rows, "int8"), quantize.quantize_rows(rows.astype(np.float32), "int8"), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e39])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(dtype, bad):
    """A row that is not finite is named in the error."""
    rows = np.zeros((5, 3))
    rows[3, 1] = bad
    with pytest.raises(ValueError, match=r"quantize_rows: rows: got .* in row 3, column 1, wanted finite numbers"):
        quantize.quantize_rows(rows, dtype)
    source = frozen.SizedRecords(5, [Records(np.arange(10, 15, dtype=np.uint64), rows)])
    with pytest.raises(ServingError, match='table "item": key 13: got a row with NaN or infinity, wanted finite'):
        frozen.freeze_records([(frozen.FrozenTable("item", 3, dtype=dtype), source)])

"""Rows in 8 bits: int8 or float8_e4m3fn numbers, and one float32 scale for each row, in NumPy.

A number stands for itself times its row's scale, rounded to float32, in frozen lookups as in `dequantize_rows`.

Sources: the scaling by row of HugeCTR's parameter server for fp8 (a row's largest magnitude over 448, at least
1 / (448 * 512)); the same with 127 for int8, which HPS does not have.
"""

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {"int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_LEAST_SCALE = {"int8": np.float32(2.0**-126), "float8_e4m3fn": np.float32(1.0 / (448.0 * 512.0))}


def quantize_rows(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds rows to numbers of 8 bits ("int8" or "float8_e4m3fn"), to nearest, ties to even; gives numbers and scales.

    A row's scale is its largest magnitude over the largest number (127, or 448), and at least 2^-126 for int8 and
    1 / (448 * 512) for float8_e4m3fn: rows of smaller magnitudes lose bits. Floats wider than float32 are rounded to it
    first. ValueError: rows that are not finite; names the first such row.
    """
    with np.errstate(over="ignore"):  # what is too large for float32 is refused below
        rows = rows.astype(np.float32, copy=False)
    is_finite = np.isfinite(rows)
    if not is_finite.all():
        row, column = np.argwhere(~is_finite)[0].tolist()
        raise ValueError(
            f"quantize_rows: rows: got {rows[row, column]} in row {row}, column {column}, wanted finite numbers; such "
            "a row has no scale. Repair it, or keep the table in float32."
        )
    largest = np.float32(_LARGEST[dtype])
    scales = np.maximum(np.abs(rows).max(axis=1, initial=0.0) / largest, _LEAST_SCALE[dtype])
    with np.errstate(over="ignore"):
        overflows = np.isinf(scales * largest)  # the largest number times its scale must stay finite
    scales = np.where(overflows, np.nextafter(scales, np.float32(0)), scales).astype(np.float32)
    # A quotient in float64 is far nearer than half a step to the true one, so the rounding to 8 bits is the only one.
    ratios = np.clip(rows.astype(np.float64) / scales[:, None], -_LARGEST[dtype], _LARGEST[dtype])
    return (np.rint(ratios) if dtype == "int8" else ratios).astype(_DTYPES[dtype]), scales


def dequantize_rows(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns float32 rows, to the bit as lookups read them."""
    return numbers.astype(np.float32) * scales[:, None]

"""Counts of numbers by size, taken chunk by chunk in memory that does not depend on how many there are.

`Magnitudes` are for norms, `Frequencies` for uses, `Steps` for last steps. Each says how exact it is.
"""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Bin(NamedTuple):
    """The number of values in [low, high)."""

    low: float
    high: float
    num: int


_OCTAVES = [0, *(1 << bit for bit in range(33))]


def _octave_bins(counts: Sequence[int] | np.ndarray) -> tuple[Bin, ...]:
    """Makes a histogram of counts of 0, 1, 2 to 3, 4 to 7, ...; empty ends left out."""
    filled = np.flatnonzero(counts)
    bins = [Bin(_OCTAVES[i], _OCTAVES[i + 1], int(count)) for i, count in enumerate(counts)]
    return tuple(bins[filled[0] : filled[-1] + 1]) if filled.size else ()


class Magnitudes:
    """Numbers of 0 and above, in bins of a 64th of an octave. Quantiles are to within 0.6%, all else is exact."""

    _BY_OCTAVE = 64
    _LOWEST, _HIGHEST = -1080, 1030  # octaves: all of float64, the greatest sums of squares included
    _MOST_BINS = 16

    def __init__(self) -> None:
        self._counts = np.zeros((self._HIGHEST - self._LOWEST) * self._BY_OCTAVE, np.int64)
        self.num_zero = self.num_nonfinite = self.num_finite = 0
        self.min = self.max = math.nan

    def add(self, values: np.ndarray) -> None:
        is_finite = np.isfinite(values)
        finite = values if is_finite.all() else values[is_finite]
        self.num_nonfinite += values.size - finite.size
        if not finite.size:
            return
        self.num_finite += finite.size
        self.min = float(np.fmin(self.min, finite.min()))
        self.max = float(np.fmax(self.max, finite.max()))
        above = finite[finite > 0]
        self.num_zero += finite.size - above.size
        number = np.floor(np.log2(above) * self._BY_OCTAVE).astype(np.int64) - self._LOWEST * self._BY_OCTAVE
        first = int(number.min()) if number.size else 0
        counts = np.bincount(number - first)
        self._counts[first : first + counts.size] += counts

    def quantile(self, share: float) -> float:
        """Returns the least finite number that a share of them does not exceed; NaN if there is none."""
        if not self.num_finite:
            return math.nan
        rank = max(1, math.ceil(share * self.num_finite - 1e-9))
        if rank <= self.num_zero:
            return 0.0
        number = int(np.searchsorted(np.cumsum(self._counts), rank - self.num_zero))
        middle = 2.0 ** ((number + 0.5) / self._BY_OCTAVE + self._LOWEST)
        return min(max(middle, self.min), self.max)

    def bins(self) -> tuple[Bin, ...]:
        """Makes a histogram of those above 0, of at most 16 bins of equal ratio; empty ends left out."""
        filled = np.flatnonzero(self._counts)
        if not filled.size:
            return ()
        first, last = int(filled[0]), int(filled[-1])
        width = 16  # a quarter of an octave
        while last // width - first // width >= self._MOST_BINS:
            width *= 2
        bins = []
        for number in range(first // width, last // width + 1):
            octaves = (edge * width / self._BY_OCTAVE + self._LOWEST for edge in (number, number + 1))
            low, high = (2.0**octave if octave < 1024 else sys.float_info.max for octave in octaves)
            bins.append(Bin(low, high, int(self._counts[number * width : (number + 1) * width].sum())))
        return tuple(bins)


class Frequencies:
    """Uses of rows, uint32. Counts and sums are exact; above 2,047 counters are shared within 0.1%."""

    _PRECISE = 10  # bits of precision within an octave

    def __init__(self) -> None:
        size = 1 + (32 << self._PRECISE)
        self._counts, self._sums, self.num_rows = np.zeros(size, np.int64), np.zeros(size, np.int64), 0

    def add(self, frequency: np.ndarray) -> None:
        wide = frequency.astype(np.float64)
        # Exponent and first bits of the fraction, counted from those of 1; 0 has a counter of its own.
        number = np.maximum((wide.view(np.int64) >> (52 - self._PRECISE)) - (1023 << self._PRECISE) + 1, 0)
        self._counts += np.bincount(number, minlength=self._counts.size)
        # A chunk of 2**21 rows at most sums below 2**53, where float64 is exact.
        self._sums += np.bincount(number, weights=wide, minlength=self._sums.size).astype(np.int64)
        self.num_rows += frequency.size

    @property
    def num_uses(self) -> int:
        return int(self._sums.sum())

    @property
    def num_unused(self) -> int:
        return int(self._counts[0])

    def share_of_top(self, share: float) -> float:
        """Returns the part of all uses that the `share` most used rows have; NaN without uses."""
        if not self.num_uses:
            return math.nan
        num_top = math.ceil(share * self.num_rows - 1e-9)
        # The rows of a counter share its uses evenly: along a line from one counter to the next.
        rows, uses = (np.cumsum([0, *counters[::-1]]) for counters in (self._counts, self._sums))
        return float(np.interp(num_top, rows, uses)) / self.num_uses

    def bins(self) -> tuple[Bin, ...]:
        return _octave_bins([self._counts[0], *self._counts[1:].reshape(32, -1).sum(axis=1)])


class Steps:
    """Last steps, uint32. Least and greatest are exact, ages to within `width` steps, which doubles as needed."""

    _NUM_BINS = 1 << 16

    def __init__(self) -> None:
        self._counts = np.zeros(self._NUM_BINS, np.int64)
        self.width, self.num_rows, self.min, self.max = 1, 0, 0, 0

    def add(self, last_step: np.ndarray) -> None:
        if not last_step.size:
            return
        low, high = int(last_step.min()), int(last_step.max())
        self.min, self.max = min(self.min, low) if self.num_rows else low, max(self.max, high)
        while self.max // self.width >= self._NUM_BINS:
            halves = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts = np.concatenate([halves, np.zeros_like(halves)])
            self.width *= 2
        counts = np.bincount(last_step.astype(np.int64) // self.width)
        self._counts[: counts.size] += counts
        self.num_rows += last_step.size

    def ages(self, clock: int) -> tuple[Bin, ...]:
        """Makes a histogram of `clock - last_step` by octave, 0 at least; a step counts as the last of its counter."""
        filled = np.flatnonzero(self._counts)
        ages = np.maximum(clock - (filled + 1) * self.width + 1, 0)
        which = np.searchsorted(_OCTAVES, ages, side="right") - 1
        return _octave_bins(np.bincount(which, weights=self._counts[filled], minlength=33))

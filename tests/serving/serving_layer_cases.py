"""Tables and what they read, by NumPy and a dict alone: for the tests of frozen layers and of exported models."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np

from jaxsok import Bags, Records
from jaxsok.serving import frozen

PADDING = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class Known:
    """A table as a dict: what each key reads, in float64."""

    table: frozen.FrozenTable
    rows: dict[int, np.ndarray]

    def row(self, key, max_norm=None):
        """Returns what a key reads, clipped."""
        key = int(key) & PADDING
        if key == PADDING:
            return np.zeros(self.table.dim)
        row = self.rows.get(key, np.full(self.table.dim, self.table.default))
        norm = np.sqrt((row**2).sum())
        return row if max_norm is None or norm <= max_norm else row * (max_norm / norm)

    def each(self, keys, max_norm=None):
        """Returns what `LookupLayer` returns."""
        keys = np.asarray(keys)
        lines = [self.row(key, max_norm) for key in keys.reshape(-1)]
        return np.array(lines).reshape(*keys.shape, self.table.dim)

    def bags(self, bags, combiner, max_norm=None):
        """Returns what `SparseLookupLayer` returns: bags are lists of (key, weight)."""
        out = np.zeros((len(bags), self.table.dim))
        for line, bag in zip(out, bags, strict=True):
            real = [(key, weight) for key, weight in bag if int(key) & PADDING != PADDING]
            weights = np.array([weight for _, weight in real], np.float64)
            divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
            if real and divisor != 0:
                line += sum(weight * self.row(key, max_norm) for key, weight in real) / divisor
        return out


def read_stored(rows, dtype):
    """Returns what rows read after they were stored in a dtype, by the formulas of the documentation."""
    if dtype in ("int8", "float8_e4m3fn"):
        largest, least = {"int8": (127.0, 2.0**-126), "float8_e4m3fn": (448.0, 1.0 / (448.0 * 512.0))}[dtype]
        scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(largest), np.float32(least))
        numbers = np.clip(rows / scales, -largest, largest)
        numbers = np.rint(numbers) if dtype == "int8" else numbers.astype(ml_dtypes.float8_e4m3fn)
        return numbers.astype(np.float64) * scales
    return rows.astype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)).astype(np.float64)


def make_tables(declared, seed=0, num_rows=40, spare_rows=0):
    """Makes frozen tables, and returns them with their contents.

    Args:
      declared: FrozenTables.
      seed: of rows; keys are 3 · i + number of the table, in part beyond 2^63.
      num_rows: of each table.
      spare_rows: as for `freeze_records`.

    Returns:
      FrozenTables; Known by name.
    """
    sources, known = [], {}
    for number, table in enumerate(declared):
        rng = np.random.default_rng([seed, number])
        keys = keys_of(number, num_rows)
        rows = rng.normal(size=(num_rows, table.dim)).astype(np.float32)
        sources.append((table, frozen.SizedRecords(num_rows, [Records(keys, rows)])))
        known[table.name] = Known(table, dict(zip(keys.tolist(), read_stored(rows, table.dtype), strict=True)))
    return frozen.freeze_records(sources, spare_rows=spare_rows)[0], known


def keys_of(number, num_rows):
    """Returns the keys of a table; equal keys occur in different tables."""
    keys = (np.arange(num_rows, dtype=np.uint64) * np.uint64(3)) + np.uint64(number)
    keys[1::4] |= np.uint64(1 << 63)
    return keys


def draw_keys(rng, number, shape, num_rows=40):
    """Draws keys of a table: present keys with repetitions, missing keys, and padding."""
    keys = rng.choice(keys_of(number, num_rows), shape)
    keys = np.where(rng.random(shape) < 0.15, np.uint64(10**9) + rng.integers(0, 5, shape).astype(np.uint64), keys)
    return np.where(rng.random(shape) < 0.1, np.uint64(PADDING), keys)


def draw_bags(rng, number, num_bags, is_weighted=False, num_rows=40):
    """Draws ragged bags, the second one empty: as `jaxsok.Bags`, and as lists of (key, weight)."""
    lengths = rng.integers(0, 5, num_bags)
    lengths[1:2] = 0
    keys = draw_keys(rng, number, int(lengths.sum()), num_rows)
    weights = (rng.integers(1, 8, keys.size) / 4).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    factors = weights if is_weighted else np.ones(keys.size, np.float32)
    pairs = [
        list(zip(keys[begin:end].tolist(), factors[begin:end].tolist(), strict=True))
        for begin, end in itertools.pairwise(offsets)
    ]
    return Bags(keys, offsets=offsets, weights=weights if is_weighted else None), pairs

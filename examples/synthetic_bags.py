"""Bags of keys in the shape of MLPerf's DLRM-DCNv2, with NumPy alone: programs without JAX draw the same ones.

`synthetic_log.write_bags` writes them to files.
"""

import numpy as np

TABLE_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
"""Rows of the table of each category in MLPerf's DLRM-DCNv2."""

BAG_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Keys of a sample in each category there."""

FEWEST_ROWS = 16
"""Rows that a table keeps when it is scaled down, unless it has fewer."""

_EXPONENT = 1.05  # the power law of keys in recommender logs; the same as the Zipf workloads of the benchmarks
_PIECE_KEYS = 1 << 18  # keys that one thread works on at once: they stay in its cache


def scale_rows(scale: float) -> list[int]:
    """Returns the rows of each table at a share of their number."""
    return [max(min(rows, FEWEST_ROWS), round(rows * scale)) for rows in TABLE_ROWS]


def draw_bags(
    rng: np.random.Generator, num_samples: int, category: int, table_rows: int, bag_size: int, *, is_uniform: bool
) -> np.ndarray:
    """Draws a bag for each sample.

    The first key follows a power law over all rows of the table, and `bag_of` gives the keys that belong to it.

    Args:
      rng: chooses the keys.
      num_samples: bags to draw.
      category: its number from 0.
      table_rows: all keys are below this, which is at most 2**31.
      bag_size: keys of a bag.
      is_uniform: whether all keys are equally likely and independent instead.

    Returns:
      int32 [num_samples, bag_size].
    """
    if is_uniform:
        return rng.integers(0, table_rows, (num_samples, bag_size), dtype=np.int32)
    # A prime scatters the ranks over the table: frequent keys are not neighbours.
    firsts = power_law_ranks(rng, num_samples, table_rows).astype(np.int64) * 2654435761 % table_rows
    bags = np.empty((num_samples, bag_size), np.int32)
    step = max(1, _PIECE_KEYS // bag_size)
    for start in range(0, num_samples, step):
        bags[start : start + step] = bag_of(firsts[start : start + step], category, table_rows, bag_size)
    return bags


def bag_of(first_keys: np.ndarray, category: int, table_rows: int, bag_size: int) -> np.ndarray:
    """Gives the bag that belongs to each key: the key, and keys drawn by a hash of category, key and place.

    Args:
      first_keys: integers [n], below `table_rows`.
      category: its number from 0.
      table_rows: all keys are below this, which is at most 2**31.
      bag_size: keys of a bag.

    Returns:
      int32 [n, bag_size].
    """
    places = first_keys.astype(np.uint32)[:, None] * np.uint32(bag_size) + np.arange(bag_size, dtype=np.uint32)
    hashes = mix(places ^ np.uint32(0x9E3779B9 * (category + 1) % 2**32)).astype(np.uint64)
    bags = ((hashes * np.uint64(table_rows)) >> np.uint64(32)).astype(np.int32)
    bags[:, 0] = first_keys
    return bags


def mix(x: np.ndarray) -> np.ndarray:
    """Murmur3's finalizer: a bijection of 32 bits, so that distinct ranks are distinct keys."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def power_law_ranks(rng: np.random.Generator, num_rows: int, cardinality: int) -> np.ndarray:
    """Ranks from 0 to cardinality - 1, r with a chance near (r + 1)**-_EXPONENT: by the inverse of its integral."""
    power = 1.0 - _EXPONENT
    top = (cardinality + 1.0) ** power
    ranks = ((top - 1.0) * rng.random(num_rows) + 1.0) ** (1.0 / power)
    return np.minimum(ranks.astype(np.uint32) - 1, cardinality - 1).astype(np.uint32)

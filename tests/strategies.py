"""Adversarial keys and batches. Shapes are fixed by the caller: Hypothesis varies contents, never compilations."""

import numpy as np
from hypothesis import strategies as st

PADDING_KEY = 2**64 - 1

# Keys that a careless implementation confuses: zero, twins that differ only in the high or only in the low
# word, the sign bit, small negatives seen as unsigned, the last legal key, one word all ones.
CORNER_KEYS = (
    0,
    1,
    5,
    2**31,
    2**32 - 1,
    2**32,
    2**32 + 1,
    2**32 + 5,
    2**33 + 5,
    2**62 + 5,
    2**63 - 1,
    2**63,
    2**63 + 5,
    2**64 - 2**32,
    2**64 - 3,
    2**64 - 2,
)


def keys(pool=CORNER_KEYS, *, padding=False):
    """Draws one key of the pool, or PADDING_KEY if allowed."""
    return st.sampled_from((*pool, PADDING_KEY) if padding else tuple(pool))


def any_key():
    """Draws any legal key."""
    return st.one_of(keys(), st.integers(0, 2**64 - 2))


def key_lists(pool, size, *, padding=False):
    """Draws `size` keys: drawn separately, one key repeated, or as many distinct keys as the pool has."""
    one_by_one = st.lists(keys(pool, padding=padding), min_size=size, max_size=size)
    repeated = keys(pool).map(lambda key: [key] * size)
    distinct = st.permutations(pool).map(lambda order: [order[i % len(order)] for i in range(size)])
    return st.one_of(one_by_one, repeated, distinct)


@st.composite
def lengths(draw, num_bags, max_keys):
    """Draws lengths of bags, some of them empty, that together fit a buffer."""
    cuts = sorted(draw(st.lists(st.integers(0, max_keys), min_size=num_bags, max_size=num_bags)))
    bounds = [0, *cuts]
    sizes = [bounds[i + 1] - bounds[i] for i in range(num_bags)]
    return draw(st.permutations(sizes))


@st.composite
def ragged_bags(draw, pool, num_bags, max_keys, *, padding=False):
    """Draws bags of any length that together fit a buffer of `max_keys` positions."""
    sizes = draw(lengths(num_bags, max_keys))
    flat = draw(key_lists(pool, sum(sizes), padding=padding))
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    return [flat[bounds[i] : bounds[i + 1]] for i in range(num_bags)]


@st.composite
def padded_bags(draw, pool, num_bags, hotness):
    """Draws bags of a fixed width, with padding anywhere in them."""
    flat = draw(key_lists(pool, num_bags * hotness, padding=True))
    return [flat[i * hotness : (i + 1) * hotness] for i in range(num_bags)]


def weights_for(bags, values=(0.25, 0.5, 1.0, 2.0)):
    """Gives every key of the bags a weight; the default values are powers of two, so that products are exact."""
    size = sum(len(bag) for bag in bags)

    def attach(flat):
        flat = iter(flat)
        return [[(key, next(flat)) for key in bag] for bag in bags]

    return st.lists(st.sampled_from(values), min_size=size, max_size=size).map(attach)


def gradients(shape, values=(0.25, 0.5, 1.0, 2.0)):
    """Draws a float32 array of a few exact values; positive by default, so that no sum cancels to rounding noise."""
    size = int(np.prod(shape))
    flat = st.lists(st.sampled_from(values), min_size=size, max_size=size)
    return flat.map(lambda values: np.array(values, np.float32).reshape(shape))


def home_bucket(keys: np.ndarray, table_ids: np.ndarray, salt: int, num_buckets: int) -> np.ndarray:
    """Returns the home bucket of (table, key) pairs, in NumPy; test_kernels.py compares it with a model of an index."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    words = np.ascontiguousarray(keys).view(np.uint64)[:, 0]
    hashes = mix(mix(words ^ np.uint64(salt)) + (table_ids.astype(np.uint64) + np.uint64(1)) * golden)
    return ((hashes >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)


def keys_of_one_bucket(home_bucket, num_keys, *, table_id, salt, num_buckets, bucket=0, start=0, stride=1):
    """Returns the first `num_keys` of the keys start, start + stride, ... whose home is one bucket, by brute force.

    A stride of 2**32 gives twins: keys of one low word.

    `home_bucket(words, table_ids, salt=, num_buckets=)` only aims the keys: the table's results are
    checked without it.
    """
    found, block = [], 1 << 16
    while sum(map(len, found)) < num_keys:
        candidates = np.uint64(start) + np.arange(block, dtype=np.uint64) * np.uint64(stride)
        words = candidates.view("<u4").reshape(block, 2)
        homes = np.asarray(home_bucket(words, np.full(block, table_id, np.uint32), salt=salt, num_buckets=num_buckets))
        found.append(candidates[homes == bucket])
        start += block * stride
    return np.concatenate(found)[:num_keys]

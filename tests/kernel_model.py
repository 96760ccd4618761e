"""The model of the kernels: the exact bits every target must give. Imports nothing of jaxsok.

`oracle.py` defines the ops in float64. This module states in NumPy float32 and plain loops what `ffi/core` and
`ffi/kernels/*.h` promise in addition: the layout of a store, the order of row ids and of every sum, the counts.
The words of layout.h are written down again, so that a word moved by mistake is detected.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Sequence

import ml_dtypes
import numpy as np

PADDING_KEY = 2**64 - 1
NO_ROW = 2**32 - 1
NO_OWNER = 2**32 - 1
NUM_PARTITIONS = 4096
EMPTY = np.uint32(2**32 - 1)  # every word of an empty entry or record
MAX_PROBES = 64
PER_BUCKET = 4
BAGS_PER_TILE = 256
USES_PER_RUN = 8
USES_PER_CHUNK = 32
CHUNK_LANES = 32
VECTORS_PER_LANE = {8: 1, 4: 2, 1: 4}

NUM_ALLOCATED, FREE_BEGIN, FREE_END, GENERATION, NUM_UNPLACED, LONGEST_PROBE, SALT_LOW, SALT_HIGH, NUM_SIGHTINGS = (
    range(9)
)
FOUND, INSERTED, MISSING, REFUSED, PADDED, UNADMITTED = range(6)
NONE, SUM, MEAN, SQRTN = range(4)
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
SUM_OF_USES, MEAN_OF_USES, SQRT_OF_USES = range(3)
CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL = range(4)
NEAREST, STOCHASTIC = range(2)
ADMIT_ALL, BY_COUNT, BY_BLOOM, BY_PROBABILITY = range(4)
MOST_SIGHTINGS = 255

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
U64 = np.uint64
GOLDEN = U64(0x9E3779B97F4A7C15)
ROUNDING_STREAM = U64(0xD1B54A32D192ED03)
ADMISSION_STREAM = U64(0xAEF17502108EF2D9)

# --------------------------------------------------------------------------------------------------------------
# Keys and hashes (core/hash.h)


def as_keys(keys) -> np.ndarray:
    """Converts Python integers to uint64."""
    return np.array(keys, np.uint64).reshape(-1)


def words(keys: np.ndarray) -> np.ndarray:
    """Converts uint64 keys to uint32[n, 2], low word first."""
    return np.stack([keys & U64(2**32 - 1), keys >> U64(32)], -1).astype(np.uint32)


def from_words(pairs: np.ndarray) -> np.ndarray:
    """Reverses `words`."""
    return pairs[..., 0].astype(np.uint64) | pairs[..., 1].astype(np.uint64) << U64(32)


def mix(x: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finaliser; arrays only, since NumPy warns of scalars that wrap."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def unmix(x: int) -> int:
    """Returns the number that `mix` turns into x."""
    wrap = 2**64 - 1
    x = x ^ x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & wrap
    x = x ^ x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & wrap
    return x ^ x >> 30 ^ x >> 60


def key_of_hash(wanted: int, line: np.ndarray) -> int:
    """Returns the key that has this partition hash, for a table given by its words."""
    name = int(line[0]) | int(line[1]) << 32
    return unmix((unmix(wanted) - int(GOLDEN)) % 2**64) ^ name


def partition_hashes(keys: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Returns the hashes that select partitions and rounds; `lines`: the words of each key's table."""
    return mix(mix(keys ^ from_words(lines[:, 0:2])) + GOLDEN)


def home_buckets(keys: np.ndarray, tables: np.ndarray, salt: int, num_buckets: int) -> np.ndarray:
    """Returns the bucket where the walk of each (table, key) pair begins."""
    hashes = mix(mix(keys ^ U64(salt)) + (tables.astype(np.uint64) + U64(1)) * GOLDEN)
    return ((hashes >> U64(32)) * U64(num_buckets)) >> U64(32)


# --------------------------------------------------------------------------------------------------------------
# New rows (core/initialize.h)


def _log(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32) - 127
    m = ((bits & np.uint32(0x007FFFFF)) | np.uint32(0x3F800000)).view(F32)
    halve = m > F32(1.41421356)
    m = np.where(halve, m * F32(0.5), m)
    exponent = exponent + halve
    s = (m - F32(1)) / (m + F32(1))
    z = s * s
    series = np.full_like(z, F32(2) / F32(9))
    for coefficient in (F32(2) / F32(7), F32(2) / F32(5), F32(2) / F32(3), F32(2)):
        series = series * z + coefficient
    return exponent.astype(F32) * F32(0.693147181) + s * series


def _polynomial(r: np.ndarray, *coefficients: float) -> np.ndarray:
    """Evaluates a polynomial by Horner's method, the highest power first."""
    total = np.full_like(r, F32(coefficients[0]))
    for coefficient in coefficients[1:]:
        total = total * r + F32(coefficient)
    return total


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """Computes AS 241, routine PPND7, operation by operation."""
    q = p - F32(0.5)
    r = F32(0.180625) - q * q
    top = _polynomial(r, 59.109374720, 159.29113202, 50.434271938, 3.3871327179)
    bottom = _polynomial(r, 67.187563600, 78.757757664, 17.895169469, 1.0)
    center = q * top / bottom
    tail = np.where(q < 0, p, F32(1) - p)
    r = np.sqrt(-_log(tail))
    near, far = r - F32(1.6), r - F32(5)
    top = _polynomial(near, 0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777)
    bottom = _polynomial(near, 0.12021132975, 0.73700164250, 1.0)
    magnitude = top / bottom
    top = _polynomial(far, 0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150)
    bottom = _polynomial(far, 0.012258202635, 0.24197894225, 1.0)
    magnitude = np.where(r <= F32(5), magnitude, top / bottom)
    return np.where(np.abs(q) <= F32(0.425), center, np.where(q < 0, -magnitude, magnitude))


def initial_rows(table_words: np.ndarray, seed: np.ndarray, keys: np.ndarray, tables: np.ndarray, dim: int):
    """Returns the row that each (table, key) pair gets when it is first seen."""
    lines = table_words[tables]
    names = from_words(lines[:, 0:2])
    streams = mix(mix(from_words(seed[None]) + GOLDEN) ^ names)
    streams = mix(keys + mix(streams))
    steps = np.arange(1, dim + 1, dtype=np.uint64) * GOLDEN
    bits = (mix(streams[:, None] + steps) >> U64(32)).astype(np.uint32)
    a, b = lines[:, 3].copy().view(F32)[:, None], lines[:, 4].copy().view(F32)[:, None]
    unit = (bits >> 8).astype(F32) * F32(2.0**-24)
    p = ((bits >> 9).astype(F32) + F32(0.5)) * F32(2.0**-23)
    low, high = F32(0.0227501319), F32(0.9772498681)
    kinds = lines[:, 2][:, None]
    with np.errstate(all="ignore"):  # branches that are not taken
        return np.select(
            [kinds == CONSTANT, kinds == UNIFORM, kinds == NORMAL, kinds == TRUNCATED_NORMAL],
            [
                np.broadcast_to(a, p.shape),
                a + (b - a) * unit,
                a + b * normal_quantile(p),
                a + b * normal_quantile(low + p * (high - low)),
            ],
        ).astype(F32)


# --------------------------------------------------------------------------------------------------------------
# Admission (core/admission.h)


def admission_hash(line: np.ndarray, seed: np.ndarray, key: int) -> np.ndarray:
    """Returns the hash of one key for a table given by its words: uint64[1]."""
    of_table = mix(mix(from_words(seed[None]) + ADMISSION_STREAM) ^ from_words(line[None, 0:2]))
    return mix(as_keys([key]) + of_table)


def is_drawn(line: np.ndarray, seed: np.ndarray, key: int, step: int) -> bool:
    """Returns whether a random draw admits a key at a step."""
    draw = mix(admission_hash(line, seed, key) + as_keys([step + 1]) * GOLDEN) >> U64(32)
    return bool(draw[0] < line[8])


def bloom_counters(line: np.ndarray, seed: np.ndarray, key: int) -> np.ndarray:
    """Returns the positions of a key's counters in the filter of its shard."""
    begin, size, num_hashes = (int(word) for word in line[9:12])
    value = int(admission_hash(line, seed, key)[0])
    low, high = value & 0xFFFFFFFF, value >> 32 | 1
    return np.array([4 * begin + ((low + i * high) % 2**32 * size >> 32) for i in range(num_hashes)], np.int64)


# --------------------------------------------------------------------------------------------------------------
# Rows of 16 bits (core/row_dtype.h): ml_dtypes and float64 define the rounding


def nearest(values: np.ndarray, dtype) -> np.ndarray:
    """Rounds to nearest, ties to even; finite values stay finite."""
    values = np.asarray(values, F32)
    if dtype == F32:
        return values
    largest = F32(ml_dtypes.finfo(dtype).max)
    return np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(dtype)


def stochastic(values: np.ndarray, dtype, random: np.ndarray) -> np.ndarray:
    """Rounds to a neighbour: away from zero if the remainder beyond the nearer neighbour plus the random bits carry."""
    values = np.asarray(values, F32)
    if dtype == F32:
        return values
    mantissa, least = (8, -126) if dtype == BF16 else (11, -14)
    _, exponent = np.frexp(np.abs(values.astype(np.float64)))
    is_subnormal = exponent <= least
    last = np.ldexp(1.0, np.where(is_subnormal, least + 1, exponent) - mantissa)
    number, random = np.abs(values.astype(np.float64)) / last, random.astype(np.float64)
    if dtype == BF16:
        number = np.floor(number + random / 2.0**16)
    else:
        small = np.floor((np.floor(number * 2.0**16) + random) / 2.0**16)
        number = np.where(is_subnormal, small, np.floor(number + np.floor(random / 8) / 2.0**13))
    rounded = np.minimum(number * last, np.float64(ml_dtypes.finfo(dtype).max))
    return np.where(np.isfinite(values), np.copysign(rounded, values), values).astype(F32).astype(dtype)


def rounding_bits(lines: np.ndarray, seed: np.ndarray, step: int, keys: np.ndarray, dim: int) -> np.ndarray:
    """Returns the 16 random bits of each column of keys in one step; `lines`: the words of each key's table."""
    of_step = mix(mix(from_words(seed[None]) + ROUNDING_STREAM) + U64(step + 1) * GOLDEN)
    streams = mix(keys + mix(of_step ^ from_words(lines[:, 0:2])))
    draws = mix(streams[:, None] + np.arange(1, -(-dim // 4) + 1, dtype=np.uint64) * GOLDEN)
    shifts = np.arange(4, dtype=np.uint64) * U64(16)
    return (draws[:, :, None] >> shifts & U64(0xFFFF)).reshape(len(keys), 4 * draws.shape[1])[:, :dim]


@functools.cache
def table_words(num_tables: int) -> np.ndarray:
    """Returns the words of tables with all kinds of initializers, each with its own name."""
    lines = np.zeros((num_tables, 16), np.uint32)
    for t, line in enumerate(lines):
        line[:3] = zlib.crc32(b"low %d" % t), zlib.crc32(b"high %d" % t), (t + 1) % 4
        line[3:5] = np.array([-0.5, 0.25 + t], F32).view(np.uint32)
        line[5] = NO_OWNER
    lines.flags.writeable = False
    return lines


def place_lines(
    lines: np.ndarray, owners: dict[int, int] | None = None, unknown_zeros: Sequence[int] = ()
) -> np.ndarray:
    """Returns words of tables of which some are on one shard, and some give zeros for unknown keys."""
    lines = lines.copy()
    for table, owner in (owners or {}).items():
        lines[table, 5] = owner
    lines[list(unknown_zeros), 6] = 1
    return lines


# --------------------------------------------------------------------------------------------------------------
# Batches (FeatureWord in core/layout.h, bags in kernels/lookup.h)


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature's part of a batch."""

    keys: np.ndarray
    table: int = 0
    combiner: int = NONE
    hotness: int = 1
    """Positions per bag; 0: ragged."""
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None
    unknown_zeros: bool = False
    plan: int = 0

    @property
    def num_keys(self) -> int:
        return len(self.keys)

    @property
    def num_bags(self) -> int:
        if self.offsets is not None:
            return len(self.offsets) - 1
        return self.num_keys // self.hotness

    @property
    def num_tiles(self) -> int:
        """Returns the number of tiles. Keys without any bag have a tile too, which counts them."""
        return max(-(-self.num_bags // BAGS_PER_TILE), int(self.num_keys > 0))

    def bounds(self) -> np.ndarray:
        """Returns where each bag begins among the feature's positions; numbers out of range are clamped."""
        if self.offsets is None:
            return np.arange(self.num_bags + 1) * self.hotness
        assert (np.diff(self.offsets.astype(np.int64)) >= 0).all()  # the callers of the kernels ensure it
        return np.clip(self.offsets.astype(np.int64), 0, self.num_keys)

    def bags(self) -> np.ndarray:
        """Returns the bag of each position, or -1 for a position in no bag."""
        bounds = self.bounds()
        of = np.full(self.num_keys, -1)
        of[bounds[0] : bounds[-1]] = np.repeat(np.arange(self.num_bags), np.diff(bounds))
        return of


def single(keys, table=0, **more) -> Feature:
    """Returns a feature in which every key has a row of its own."""
    return Feature(as_keys(keys), table, NONE, 1, **more)


def make_fixed(keys, table, combiner, hotness, weights=None, **more) -> Feature:
    """Returns a feature with bags of one size."""
    return Feature(as_keys(keys), table, combiner, hotness, weights=weights, **more)


def make_ragged(keys, table, combiner, offsets, weights=None, **more) -> Feature:
    """Returns a feature with bags of any size."""
    return Feature(as_keys(keys), table, combiner, 0, np.asarray(offsets, np.int32), weights, **more)


class Batch:
    """All features over one store."""

    def __init__(self, *features: Feature):
        self.features = features
        self.keys = np.concatenate([f.keys for f in features] or [np.zeros(0, np.uint64)])
        self.starts = np.cumsum([0, *(f.num_keys for f in features)])
        sizes = [f.num_keys for f in features]
        self.tables = np.repeat([f.table for f in features], sizes).astype(np.int64)
        bags = [f.bags() for f in features]
        self.bags = np.concatenate(bags or [np.zeros(0, np.int64)])
        self.is_asked = (self.keys != U64(PADDING_KEY)) & (self.bags >= 0)

    def words(self) -> tuple[tuple[int, ...], ...]:
        """Returns the features operand."""
        lines, bag, offset, weight, tile = [], 0, 0, 0, 0
        for f, start in zip(self.features, self.starts, strict=False):
            weights_start = -1 if f.weights is None else weight
            line = (f.table, f.combiner, start, f.num_keys, bag, f.num_bags, f.hotness, offset, weights_start, tile)
            lines.append((*map(int, line), int(f.unknown_zeros), f.plan))
            bag += f.num_bags
            offset += 0 if f.offsets is None else len(f.offsets)
            weight += 0 if f.weights is None else len(f.weights)
            tile += f.num_tiles
        return tuple(lines)

    @property
    def num_tiles(self) -> int:
        return sum(f.num_tiles for f in self.features)

    def shapes(self, dim: int) -> tuple[tuple[int, int], ...]:
        """Returns the shapes of the embeddings."""
        return tuple((f.num_bags, dim) for f in self.features)

    def operands(self) -> dict[str, np.ndarray]:
        """Returns keys, offsets and weights."""
        offsets = [f.offsets for f in self.features if f.offsets is not None]
        weights = [f.weights for f in self.features if f.weights is not None]
        return {
            "keys": words(self.keys),
            "offsets": np.concatenate([*offsets, np.zeros(0, np.int32)]).astype(np.int32),
            "weights": np.concatenate([*weights, np.zeros(0, F32)]).astype(F32),
        }

    def part(self, number: int) -> slice:
        """Returns the positions of one feature."""
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def count_padding(self, num_tables: int) -> np.ndarray:
        """Counts positions without a key by table: padding, and positions in no bag."""
        return np.bincount(self.tables[~self.is_asked], minlength=num_tables).astype(np.int32)

    def digest(self) -> np.ndarray:
        """Returns the digest of all keys except padding, including keys that are in no bag."""
        places = np.arange(1, len(self.keys) + 1, dtype=np.uint64) * GOLDEN
        return words(mix(self.keys + places)[self.keys != U64(PADDING_KEY)].sum(dtype=np.uint64, keepdims=True))


def without_tables(batch: Batch) -> Batch:
    """Returns the features as declared if the tables of their keys are given separately."""
    return Batch(*(dataclasses.replace(f, table=0) for f in batch.features))


def join_batches(*batches: Batch) -> Batch:
    """Joins the batches of several plans, feature by feature; each feature keeps the number of its plan."""
    return Batch(*(dataclasses.replace(f, plan=p) for p, batch in enumerate(batches) for f in batch.features))


def _in_order(bags: np.ndarray, present: np.ndarray):
    """Returns (positions, their bags) of the first keys of all bags, then of the second keys, and so on."""
    positions = np.flatnonzero(present & (bags >= 0))
    of = bags[positions]
    if not len(of):
        return
    starts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
    ranks = np.arange(len(of)) - np.repeat(starts, np.diff(np.r_[starts, len(of)]))
    for rank in range(int(ranks.max()) + 1):
        yield rank, positions[ranks == rank], of[ranks == rank]


def bag_scales(feature: Feature, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns 1 / divisor of each bag for mean and sqrtn, and where the divisor is zero."""
    counts, sums = np.zeros(feature.num_bags, F32), np.zeros(feature.num_bags, F32)
    for _, positions, bags in _in_order(feature.bags(), present):
        counts[bags] += F32(1)
        if feature.weights is not None:
            w = feature.weights[positions]
            sums[bags] = sums[bags] + (w * w if feature.combiner == SQRTN else w)
    divisors = counts if feature.weights is None else sums
    if feature.combiner == SQRTN:
        divisors = np.sqrt(divisors)
    is_zero = divisors == 0
    return np.where(is_zero, F32(0), F32(1) / np.where(is_zero, F32(1), divisors)), is_zero


def combine(feature: Feature, values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Returns the embeddings of one feature. `values`: the row of each position; `present`: not padding."""
    if feature.combiner == NONE:
        return np.where(present[:, None], values, F32(0))
    out = np.zeros((feature.num_bags, values.shape[1]), F32)
    for rank, positions, bags in _in_order(feature.bags(), present):
        rows = values[positions]
        if feature.weights is not None:
            rows = feature.weights[positions][:, None] * rows
        out[bags] = rows if rank == 0 else out[bags] + rows
    if feature.combiner in (MEAN, SQRTN):
        scales, is_zero = bag_scales(feature, present)
        out = np.where(is_zero[:, None], F32(0), out * scales[:, None])
    return out


def use_factors(feature: Feature, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factor of the bag's gradient for each position, and which positions are no uses."""
    weights = np.ones(feature.num_keys, F32) if feature.weights is None else feature.weights
    if feature.combiner == NONE:
        return np.ones(feature.num_keys, F32), ~present
    bags = feature.bags()
    left_out = ~present | (bags < 0)
    if feature.combiner == SUM:
        return weights, left_out
    scales, is_zero = bag_scales(feature, present)
    scales, is_zero = np.append(scales, F32(0)), np.append(is_zero, True)  # bag -1
    return (scales[bags] if feature.weights is None else weights * scales[bags]), left_out | is_zero[bags]


# --------------------------------------------------------------------------------------------------------------
# Sums and steps (core/row_update.h)


def added_in_sequence(terms: np.ndarray, starts: np.ndarray, num_terms: int, most: int) -> np.ndarray:
    """Adds the terms from each start to the next in sequence, at most `most` of them."""
    sizes = np.diff(np.r_[starts, num_terms])
    sums = terms[starts]
    for i in range(1, most):
        more = np.flatnonzero(sizes > i)
        sums[more] = sums[more] + terms[starts[more] + i]
    return sums


def sum_uses(rows: np.ndarray, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns distinct rows, the sum of each row's terms, and their number. Terms come in the order of positions."""
    dim = terms.shape[1]
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros((0, dim), F32), np.zeros(0, np.int64)
    order = np.argsort(rows, kind="stable")
    rows, terms = rows[order], terms[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    sizes = np.diff(np.r_[starts, len(rows)])
    ranks = np.arange(len(rows)) - np.repeat(starts, sizes)
    run_starts = np.flatnonzero(ranks % USES_PER_RUN == 0)
    runs = added_in_sequence(terms, run_starts, len(rows), USES_PER_RUN)
    chunk_starts = np.flatnonzero(ranks % USES_PER_CHUNK == 0)
    chunks = added_in_sequence(
        runs, np.searchsorted(run_starts, chunk_starts), len(run_starts), USES_PER_CHUNK // USES_PER_RUN
    )
    first_chunks = np.searchsorted(chunk_starts, starts)
    sums = chunks[first_chunks]
    for r in np.flatnonzero(sizes > USES_PER_CHUNK):
        lanes = np.full((CHUNK_LANES, dim), -0.0, F32)
        for c in range(-(-int(sizes[r]) // USES_PER_CHUNK)):
            chunk = chunks[first_chunks[r] + c]
            lanes[c % CHUNK_LANES] = chunk if c < CHUNK_LANES else lanes[c % CHUNK_LANES] + chunk
        half = CHUNK_LANES // 2
        while half:
            lanes = lanes[:half] + lanes[half:]
            half //= 2
        sums[r] = lanes[0]
    return rows[starts], sums, sizes


def mean_squares(gradients: np.ndarray, has_rows16: bool = False) -> np.ndarray:
    """Returns the mean square of each row, in the order of LaneShape; rows of 16 bits use another order."""
    num, dim = gradients.shape
    vector = 8 if has_rows16 and dim % 8 == 0 else 4 if dim % 4 == 0 else 1
    lanes = 1
    while lanes * VECTORS_PER_LANE[vector] < dim // vector and lanes < 32:
        lanes *= 2
    per_lane = -(-dim // (lanes * vector))
    squares = np.zeros((num, per_lane * lanes * vector), F32)
    squares[:, :dim] = gradients * gradients
    squares = squares.reshape(num, per_lane, lanes, vector)
    sums = np.zeros((num, lanes), F32)
    for k in range(per_lane):
        for i in range(vector):
            sums = sums + squares[:, k, :, i]
    while lanes > 1:
        lanes //= 2
        sums = sums[:, :lanes] + sums[:, lanes:]
    return sums[:, 0] / F32(dim)


def step(
    optimizer: int,
    hyper: np.ndarray,
    g: np.ndarray,
    row: np.ndarray,
    states: list[np.ndarray],
    has_rows16: bool = False,
):
    """Returns new rows and states."""
    h = hyper.astype(F32)
    if optimizer == SGD:
        return row - h[0] * g, []
    if optimizer == ADAGRAD:
        acc = states[0] + g * g
        inverse = np.where(acc > 0, F32(1) / np.sqrt(np.where(acc > 0, acc, F32(1)) + h[1]), F32(0))
        return row - h[0] * (g * inverse), [acc]
    if optimizer == ROWWISE_ADAGRAD:
        acc = states[0] + mean_squares(g, has_rows16)[:, None]
        return row - (h[0] / (np.sqrt(acc) + h[1])) * g, [acc]
    m = h[1] * states[0] + h[6] * g
    v = h[2] * states[1] + h[7] * (g * g)
    return row - h[0] * ((m / h[4]) / (np.sqrt(v / h[5]) + h[3])), [m, v]


STATES = {SGD: (), ADAGRAD: ("dim",), ROWWISE_ADAGRAD: (1,), ADAM: ("dim", "dim")}


def hyper_of(optimizer: int, learning_rate: float = 0.5) -> np.ndarray:
    """Returns hyper-parameters with which every term of a step counts."""
    numbers = {
        SGD: (learning_rate,),
        ADAGRAD: (learning_rate, 1e-3),
        ROWWISE_ADAGRAD: (learning_rate, 1e-3),
        ADAM: (learning_rate, 0.9, 0.99, 1e-3, 0.19, 0.0199, 0.1, 0.01),
    }[optimizer]
    return np.array(numbers + (0.0,) * (8 - len(numbers)), F32)


# --------------------------------------------------------------------------------------------------------------
# Stores


class Store:
    """One shard: arrays as in core/layout.h, and their meaning as dicts."""

    def __init__(
        self,
        slabs=(312,),
        dim=4,
        num_tables=1,
        num_buckets=None,
        salt=0x1234567890ABCDEF,
        optimizer=SGD,
        initial=(0.1, 0.2),
        generation=7,
        dtype=F32,
        embedding_dtype=None,
        admission=None,
        refused=None,
        num_waiting_buckets=64,
    ):
        """`admission`: the words from kTableAdmission on, by table; `refused`: what a key without a row reads."""
        self.dtype = np.dtype(dtype)
        self.embedding_dtype = np.dtype(embedding_dtype or dtype)
        self.slabs, self.dim, self.num_tables, self.optimizer = tuple(slabs), dim, num_tables, optimizer
        self.capacity = sum(slabs)
        self.tables = table_words(num_tables).copy()
        for table, line in (admission or {}).items():
            self.tables[table, 7 : 7 + len(line)] = line
        self.refused = self.tables.copy()
        for table, value in (refused or {}).items():
            self.refused[table, 2:5] = np.array([CONSTANT, F32(value).view(np.uint32), 0], np.uint32)
        self.admits = admission is not None
        kinds = self.tables[:, 7]
        self.waiting: dict[tuple[int, int], int] = {}
        self.num_waiting_buckets = num_waiting_buckets if (kinds == BY_COUNT).any() else 0
        self.bloom = np.zeros(int((4 * self.tables[:, 9] + self.tables[:, 10]).max()), np.uint8)
        self.seed = np.array([11, 12], np.uint32)
        widths = [dim if width == "dim" else width for width in STATES[optimizer]]
        self.initial = tuple(float(F32(value)) for value in initial[: len(widths)])
        self.rows = np.full((self.capacity, dim), -99, self.dtype)  # rows that are never written keep this value
        self.records = np.full((self.capacity, 4), EMPTY)
        self.states = [np.full((self.capacity, w), F32(v)) for w, v in zip(widths, self.initial, strict=True)]
        self.counters = np.zeros(9, np.uint32)
        self.counters[GENERATION] = generation
        self.table_rows = np.zeros(num_tables, np.uint32)
        self.row_of: dict[tuple[int, int], int] = {}
        self._empty_index(num_buckets or max(16, -(-self.capacity // 2)), salt)

    # Reading ------------------------------------------------------------------------------------------------

    @property
    def num_buckets(self) -> int:
        return len(self.index)

    @property
    def salt(self) -> int:
        return int(self.counters[SALT_LOW]) | int(self.counters[SALT_HIGH]) << 32

    @property
    def num_rows_left(self) -> int:
        c = self.counters
        return self.capacity - int(c[NUM_ALLOCATED]) + int(c[FREE_END]) - int(c[FREE_BEGIN])

    def arrays(self) -> dict:
        """Copies all arrays, with per-row arrays cut into slabs."""
        ends = np.cumsum(self.slabs)[:-1]

        def cut(array):
            return tuple(part.copy() for part in np.split(array, ends))

        return {
            "index": self.index.copy(),
            "counters": self.counters.copy(),
            "table_rows": self.table_rows.copy(),
            "rows": cut(self.rows),
            "records": cut(self.records),
            "states": tuple(cut(state) for state in self.states),
            "sightings": (self._sightings(),) if self.num_waiting_buckets else (),
            "bloom": (self.bloom.copy().view("<u4"),) if len(self.bloom) else (),
        }

    def _sightings(self) -> np.ndarray:
        """Returns the keys that wait, each where a walk finds it."""
        array = np.full((self.num_waiting_buckets, 16), EMPTY)
        pairs = list(self.waiting)
        keys, tables = as_keys([key for _, key in pairs]), np.array([table for table, _ in pairs], np.int64)
        homes = home_buckets(keys, tables, self.salt, self.num_waiting_buckets).astype(np.int64)
        for (table, key), home in zip(pairs, homes.tolist(), strict=True):
            places = [(home + probe) % self.num_waiting_buckets for probe in range(MAX_PROBES)]
            lines = array.reshape(-1, PER_BUCKET, 4)
            free = ((b, e) for b in places for e in range(PER_BUCKET) if (lines[b, e, :2] == EMPTY).all())
            lines[next(free)] = key & 0xFFFFFFFF, key >> 32, self.waiting[table, key], table
        return array

    def homes(self, keys: np.ndarray, tables: np.ndarray) -> list[int]:
        return home_buckets(keys, tables, self.salt, self.num_buckets).tolist()

    def find(self, keys: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Returns row ids, with NO_ROW for absent keys."""
        pairs = zip(tables.tolist(), keys.tolist(), strict=True)
        return np.array([self.row_of.get(pair, NO_ROW) for pair in pairs], np.uint32)

    # The index ----------------------------------------------------------------------------------------------

    def _empty_index(self, num_buckets: int, salt: int) -> None:
        self.index = np.full((num_buckets, 16), EMPTY)
        self.fill = [0] * num_buckets
        self.bucket_of: dict[tuple[int, int], int] = {}
        self.counters[SALT_LOW], self.counters[SALT_HIGH] = salt & 0xFFFFFFFF, salt >> 32

    def _walk(self, home: int) -> tuple[int | None, int]:
        """Returns the first bucket with an empty entry, and how many were visited."""
        for probe in range(MAX_PROBES):
            bucket = (home + probe) % self.num_buckets
            if self.fill[bucket] < PER_BUCKET:
                return bucket, probe + 1
        return None, MAX_PROBES

    def _enter(self, pair: tuple[int, int], bucket: int, row_id: int) -> None:
        table, key = pair
        at = 4 * self.fill[bucket]
        self.index[bucket, at : at + 4] = key & 0xFFFFFFFF, key >> 32, row_id, table
        self.fill[bucket] += 1
        self.bucket_of[pair] = bucket

    def _saw(self, probes: int) -> None:
        """Counts a walk that ends at a row."""
        self.counters[LONGEST_PROBE] = max(int(self.counters[LONGEST_PROBE]), probes)

    # Writing ------------------------------------------------------------------------------------------------

    def find_or_insert(self, keys: np.ndarray, tables: np.ndarray, is_asked: np.ndarray, uses=None, step=None):
        """Returns row ids and counts. Distinct pairs come in order of first position; repeats share the result.

        `step`: unseen pairs are judged by their tables' admission; `uses`: how many uses each position represents.
        """
        row_ids = np.full(len(keys), NO_ROW, np.uint32)
        counts = np.zeros((self.num_tables, 6), np.int32)
        new = []
        uses = np.ones(len(keys), np.int64) if uses is None else np.asarray(uses, np.int64)
        kept_out = set()
        if step is not None:
            asked = self._distinct(keys, tables, is_asked)
            sums = {pair: int(uses[at].sum()) for pair, at, _ in asked if pair not in self.bucket_of}
            kept_out = self._keep_out(sums, step)
        for pair, occurrences, home in self._distinct(keys, tables, is_asked):
            table, row_id = pair[0], self.row_of.get(pair)
            num = len(occurrences)
            if pair in kept_out:
                counts[table, [REFUSED, UNADMITTED]] += num, uses[occurrences].sum()
                continue
            if pair in self.bucket_of:
                self._saw((self.bucket_of[pair] - home) % self.num_buckets + 1)
                row_ids[occurrences] = row_id
                counts[table, FOUND] += num
                continue
            bucket, probes = self._walk(home)
            if bucket is None or self.num_rows_left == 0:
                self.counters[NUM_UNPLACED] += num if bucket is None else 0
                counts[table, REFUSED] += num
                continue
            self._saw(probes)
            row_ids[occurrences] = row_id = self._take_row(pair)
            self._enter(pair, bucket, row_id)
            counts[table, [INSERTED, FOUND]] += 1, num - 1
            new.append((row_id, occurrences[0]))
        rows, firsts = np.array(new, np.int64).reshape(-1, 2).T
        self.rows[rows] = self.initial_rows(keys[firsts], tables[firsts])
        return row_ids, counts

    def _keep_out(self, sums: dict[tuple[int, int], int], step: int) -> set[tuple[int, int]]:
        """Returns the unseen pairs that get no row, given their uses in a call; updates the counts."""
        counters = {
            pair: bloom_counters(self.tables[pair[0]], self.seed, pair[1])
            for pair in sums
            if self.tables[pair[0], 7] == BY_BLOOM
        }
        for pair, num in sums.items():
            line = self.tables[pair[0]]
            if line[7] == BY_COUNT:
                self.waiting[pair] = min(self.waiting.get(pair, 0) + num, int(line[8]))
            for at in counters.get(pair, ()):
                self.bloom[at] = min(int(self.bloom[at]) + num, MOST_SIGHTINGS)
        self.counters[NUM_SIGHTINGS] = len(self.waiting)

        def is_let_in(pair: tuple[int, int]) -> bool:
            line = self.tables[pair[0]]
            if line[7] == BY_COUNT:
                return self.waiting[pair] >= line[8]
            if line[7] == BY_BLOOM:
                return self.bloom[counters[pair]].min() >= line[8]
            return line[7] == ADMIT_ALL or is_drawn(line, self.seed, pair[1], step)

        return {pair for pair in sums if not is_let_in(pair)}

    def forget(self, floors: np.ndarray) -> None:
        """Resets counts that reached their table's floor to 0; their entries stay."""
        self.waiting = {pair: 0 if num >= floors[pair[0]] else num for pair, num in self.waiting.items()}

    def wait(self, num_buckets: int, floors: np.ndarray, more: dict[tuple[int, int], int]) -> None:
        """Stores the keys that wait, including additional keys, in so many buckets."""
        kept: dict[tuple[int, int], int] = {}
        for pair, num in [*self.waiting.items(), *more.items()]:
            if pair[0] < self.num_tables and 0 < num < floors[pair[0]]:
                kept[pair] = kept.get(pair, 0) + num
        self.waiting, self.num_waiting_buckets = kept, num_buckets
        self.counters[NUM_SIGHTINGS] = len(kept)

    def initial_rows(self, keys: np.ndarray, tables: np.ndarray, lines: np.ndarray | None = None) -> np.ndarray:
        """Returns the initial rows of (table, key) pairs, as they are stored."""
        lines = self.tables if lines is None else lines
        return nearest(initial_rows(lines, self.seed, keys, tables, self.dim), self.dtype)

    def _distinct(self, keys: np.ndarray, tables: np.ndarray, is_asked: np.ndarray):
        """Yields (table, key), its positions and its home bucket, by first position."""
        positions = np.flatnonzero(is_asked)
        order = positions[np.lexsort((positions, keys[positions], tables[positions]))]
        is_first = np.r_[True, (np.diff(keys[order]) != 0) | (np.diff(tables[order]) != 0)][: len(order)]
        groups = np.split(order, np.flatnonzero(is_first)[1:]) if len(order) else []
        groups.sort(key=lambda group: group[0])
        firsts = np.array([group[0] for group in groups], np.int64)
        pairs = zip(tables[firsts].tolist(), keys[firsts].tolist(), strict=True)
        return zip(pairs, groups, self.homes(keys[firsts], tables[firsts]), strict=True)

    def _take_row(self, pair: tuple[int, int]) -> int:
        c = self.counters
        if c[FREE_BEGIN] < c[FREE_END]:
            row_id = int(self.records[c[FREE_BEGIN], 3])
            c[FREE_BEGIN] += 1
        else:
            row_id = int(c[NUM_ALLOCATED])
            c[NUM_ALLOCATED] += 1
        self.records[row_id, :3] = pair[1] & 0xFFFFFFFF, pair[1] >> 32, pair[0]
        self.table_rows[pair[0]] += 1
        self.row_of[pair] = row_id
        return row_id

    def _list_freed(self) -> None:
        """Rebuilds the list of freed rows."""
        dead = np.flatnonzero((self.records[: self.counters[NUM_ALLOCATED], :2] == EMPTY).all(axis=1))
        self.records[: len(dead), 3] = dead
        self.counters[[FREE_BEGIN, FREE_END]] = 0, len(dead)
        self.counters[GENERATION] += 1

    def select(self, scores: Sequence[np.ndarray], num_kept: int, table: int, mask: np.ndarray | None) -> np.ndarray:
        """Returns a flag for each row of capacity: rows of lowest (scores, table, key), or rows of a mask."""
        asked = {pair: row_id for pair, row_id in self.row_of.items() if table in (-1, pair[0])}
        if mask is not None:
            gone = [row_id for row_id in asked.values() if mask[row_id]]
        else:
            ranked = sorted((*(int(word[row_id]) for word in scores), *pair, row_id) for pair, row_id in asked.items())
            gone = [row_id for *_, row_id in ranked[: max(0, len(ranked) - num_kept)]]
        flags = np.zeros(self.capacity, np.uint8)
        flags[gone] = 1
        return flags

    def release(self, flags: np.ndarray) -> np.ndarray:
        """Returns how many rows of each table were removed; without removals nothing changes."""
        num_released = np.zeros(self.num_tables, np.uint32)
        for pair, row_id in [item for item in self.row_of.items() if flags[item[1]]]:
            del self.row_of[pair]
            num_released[pair[0]] += 1
            self.records[row_id, :2] = EMPTY
            for state, value in zip(self.states, self.initial, strict=True):
                state[row_id] = F32(value)
        self.table_rows -= num_released
        if num_released.any():
            self._list_freed()
            self._sweep() if self.counters[NUM_UNPLACED] == 0 else self.rebuild()
        return num_released

    def _sweep(self) -> None:
        """Keeps entries that are in their home bucket and inserts the others again, by row id."""
        pairs = sorted(self.row_of, key=self.row_of.get)
        keys, tables = as_keys([key for _, key in pairs]), np.array([table for table, _ in pairs], np.int64)
        homes, before = dict(zip(pairs, self.homes(keys, tables), strict=True)), self.bucket_of
        self._empty_index(self.num_buckets, self.salt)
        self.counters[LONGEST_PROBE] = 0
        at_home = [pair for pair in pairs if before[pair] == homes[pair]]
        for pair in at_home:
            self._saw(1)
            self._enter(pair, homes[pair], self.row_of[pair])
        for pair in pairs:
            if before[pair] != homes[pair]:
                bucket, probes = self._walk(homes[pair])
                assert bucket is not None
                self._saw(probes)
                self._enter(pair, bucket, self.row_of[pair])

    def rebuild(self, num_buckets: int | None = None, salt: int | None = None) -> None:
        """Builds another index over the same records."""
        self._empty_index(num_buckets or self.num_buckets, self.salt if salt is None else salt)
        self.counters[[NUM_UNPLACED, LONGEST_PROBE]] = 0
        pairs = sorted(self.row_of, key=self.row_of.get)
        keys, tables = as_keys([key for _, key in pairs]), np.array([table for table, _ in pairs], np.int64)
        for pair, home in zip(pairs, self.homes(keys, tables), strict=True):
            bucket, probes = self._walk(home)
            if bucket is None:
                self.counters[NUM_UNPLACED] += 1
            else:
                self._saw(probes)
                self._enter(pair, bucket, self.row_of[pair])

    # Batches ------------------------------------------------------------------------------------------------

    def row_values(
        self, batch: Batch, row_ids: np.ndarray, *, may_be_zeros: bool = False, lines: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the row of each position: the stored row, otherwise its initial row, otherwise zeros.

        `lines`: words of tables; they state which tables give zeros.
        """
        values = np.zeros((len(batch.keys), self.dim), F32)
        known = row_ids < self.capacity
        values[known] = self.rows[row_ids[known]].astype(F32)
        unknown = ~known & batch.is_asked
        if may_be_zeros:
            zeros = [np.full(f.num_keys, f.unknown_zeros) for f in batch.features]
            unknown &= ~np.concatenate([*zeros, np.zeros(0, bool)])
        if lines is not None:
            unknown &= lines[batch.tables, 6] == 0
        else:
            lines = self.tables if may_be_zeros else self.refused
        keys, tables = batch.keys[unknown], batch.tables[unknown]
        values[unknown] = self.initial_rows(keys, tables, lines).astype(F32)
        return values

    def embeddings(self, batch: Batch, values: np.ndarray) -> list[np.ndarray]:
        """Returns the embeddings of all features."""
        present = batch.keys != U64(PADDING_KEY)
        parts = [batch.part(f) for f in range(len(batch.features))]
        combined = [combine(f, values[part], present[part]) for f, part in zip(batch.features, parts, strict=True)]
        return [nearest(number, self.embedding_dtype) for number in combined]

    def note_lookup(self, batch: Batch, statistics: np.ndarray, clock: int) -> np.ndarray:
        """Returns the statistics after a lookup, occurrence by occurrence."""
        uses: dict[tuple[int, int], int] = {}
        pairs = zip(batch.tables.tolist(), batch.keys.tolist(), strict=True)
        for pair, is_asked in zip(pairs, batch.is_asked.tolist(), strict=True):
            if is_asked and pair in self.row_of:
                uses[pair] = uses.get(pair, 0) + 1
        after = statistics.copy()
        for pair, num in uses.items():
            after[self.row_of[pair]] = clock, min(int(statistics[self.row_of[pair], 1]) + num, 2**32 - 1)
        return after

    def lookup(self, batch: Batch, step=None):
        """Returns embeddings, row ids and counts."""
        row_ids, counts = self.find_or_insert(batch.keys, batch.tables, batch.is_asked, step=step)
        counts[:, PADDED] = batch.count_padding(self.num_tables)
        return self.embeddings(batch, self.row_values(batch, row_ids)), row_ids, counts

    def lookup_find(self, batch: Batch):
        """Returns embeddings and counts."""
        row_ids = np.where(batch.is_asked, self.find(batch.keys, batch.tables), np.uint32(NO_ROW))
        values = self.row_values(batch, row_ids, may_be_zeros=True)
        return self.embeddings(batch, values), self._counts(batch, row_ids, MISSING)

    def lookup_planned(self, batch: Batch, row_ids: np.ndarray, lines: np.ndarray | None = None):
        """Returns embeddings and counts. `lines`: words of tables, if the features do not give each key's table."""
        values = self.row_values(batch, row_ids, lines=lines)
        counted = batch if lines is None else without_tables(batch)
        return self.embeddings(batch, values), self._counts(counted, row_ids, REFUSED)

    def _counts(self, batch: Batch, row_ids: np.ndarray, absent: int) -> np.ndarray:
        counts = np.zeros((self.num_tables, 6), np.int32)
        known = row_ids < self.capacity
        for outcome, which in ((FOUND, batch.is_asked & known), (absent, batch.is_asked & ~known)):
            counts[:, outcome] = np.bincount(batch.tables[which], minlength=self.num_tables)
        counts[:, PADDED] = batch.count_padding(self.num_tables)
        return counts

    def update(
        self,
        batch: Batch,
        row_ids,
        gradients,
        is_live,
        hyper,
        row_gradient=SUM_OF_USES,
        rounding=NEAREST,
        num_steps=0,
    ):
        """Returns rows with gradients that are not finite by table, and uses of stale plans."""
        present = batch.keys != U64(PADDING_KEY)
        used_rows, terms, num_stale = [np.zeros(0, np.int64)], [np.zeros((0, self.dim), F32)], 0
        for f, feature in enumerate(batch.features):
            part = batch.part(f)
            with_row = batch.is_asked[part] & (row_ids[part] < self.capacity)
            if not is_live[feature.plan]:
                num_stale += int(with_row.sum())
                continue
            factors, left_out = use_factors(feature, present[part])
            uses = np.flatnonzero(with_row & ~left_out)
            used_rows.append(row_ids[part][uses].astype(np.int64))
            terms.append(factors[uses, None] * gradients[f][feature.bags()[uses]].astype(F32))
        rows, sums, num_uses = sum_uses(np.concatenate(used_rows), np.concatenate(terms))
        if row_gradient == MEAN_OF_USES:
            sums = sums * (F32(1) / num_uses.astype(F32))[:, None]
        if row_gradient == SQRT_OF_USES:
            sums = sums * (F32(1) / np.sqrt(num_uses.astype(F32)))[:, None]
        finite = np.isfinite(sums).all(axis=1)
        nonfinite_tables = self.records[rows[~finite], 2]
        rows, sums = rows[finite], sums[finite]
        old_rows, old_states = self.rows[rows].astype(F32), [s[rows] for s in self.states]
        new_rows, new_states = step(self.optimizer, hyper, sums, old_rows, old_states, self.dtype != F32)
        lines, keys = self.tables[self.records[rows, 2]], from_words(self.records[rows])
        random = rounding_bits(lines, self.seed, num_steps, keys, self.dim)
        is_nearest = rounding == NEAREST
        self.rows[rows] = nearest(new_rows, self.dtype) if is_nearest else stochastic(new_rows, self.dtype, random)
        for state, values in zip(self.states, new_states, strict=True):
            state[rows] = values
        return np.bincount(nonfinite_tables, minlength=self.num_tables).astype(np.int32), np.int32(num_stale)


def distinct_pairs(batch: Batch) -> dict[str, np.ndarray]:
    """Returns distinct (table, key) pairs by first position."""
    n = len(batch.keys)
    inverse = np.full(n, n, np.int32)
    pairs: dict[tuple[int, int], int] = {}
    multiplicity = np.zeros(n, np.int32)
    keys, tables = batch.keys.tolist(), batch.tables.tolist()
    for i in np.flatnonzero(batch.is_asked).tolist():
        inverse[i] = pairs.setdefault((tables[i], keys[i]), len(pairs))
        multiplicity[inverse[i]] += 1
    unique, unique_tables = np.full(n, PADDING_KEY, np.uint64), np.zeros(n, np.uint32)
    unique[: len(pairs)] = [key for _, key in pairs]
    unique_tables[: len(pairs)] = [table for table, _ in pairs]
    return {
        "unique": words(unique),
        "unique_tables": unique_tables,
        "inverse": inverse,
        "multiplicity": multiplicity,
        "num_unique": np.array(len(pairs), np.int32),
    }


def plan_requests(
    batch: Batch, lines: np.ndarray, partition_owners: np.ndarray, num_shards: int, by_hash: bool, send_capacity: int
) -> dict[str, np.ndarray]:
    """Returns distinct (table, key) pairs by owner, then by round hash if requested, then by first position.

    `slots` are the lines at which a round that sends each owner its first `send_capacity` pairs has those of keys.
    """
    distinct, n = distinct_pairs(batch), len(batch.keys)
    num = int(distinct["num_unique"])
    keys, tables = from_words(distinct["unique"][:num]), distinct["unique_tables"][:num]
    hashes = partition_hashes(keys, lines[tables])
    pinned = lines[tables, 5]
    owners = np.where(pinned != NO_OWNER, pinned, partition_owners[hashes // U64(2**52)])
    owners = np.minimum(owners, num_shards - 1).astype(np.int64)
    rounds = hashes << U64(12) | hashes // U64(2**52)
    first = np.arange(num)
    order = np.lexsort((first, rounds, owners) if by_hash else (first, owners))
    requests = np.tile(np.array([EMPTY, EMPTY, 0, 0], np.uint32), (n, 1))
    requests[:num, :2] = words(keys[order])
    requests[:num, 2] = tables[order]
    requests[:num, 3] = distinct["multiplicity"][order]
    place = np.full(n + 1, n, np.int32)
    place[order] = first
    sorted_hashes = np.full((n if by_hash else 0, 2), EMPTY)
    if by_hash:
        sorted_hashes[:num] = words(rounds[order])
    starts = np.r_[0, np.cumsum(np.bincount(owners, minlength=num_shards))].astype(np.int32)
    sent = [range(starts[o], starts[o + 1])[:send_capacity] for o in range(num_shards)]
    slot_of_place = {p: o * send_capacity + i for o, places in enumerate(sent) for i, p in enumerate(places)}
    inverse = place[distinct["inverse"]]
    slots = [slot_of_place.get(p, -1) for p in inverse.tolist()] if send_capacity else []
    return {
        "requests": requests,
        "inverse": inverse,
        "starts": starts,
        "hashes": sorted_hashes,
        "slots": np.array(slots, np.int32),
        "digest": batch.digest(),
    }


LEFT_OUT = 1 << 31


def plan_uses(
    batch: Batch, lines: np.ndarray, partition_owners: np.ndarray, num_shards: int, num_words: int
) -> dict[str, np.ndarray]:
    """Returns every use of a bag by owner, in the order of positions: loops over bags, a list for each owner."""
    uses: list[list[tuple[int, ...]]] = [[] for _ in range(num_shards)]
    begins: list[list[int]] = [[] for _ in range(num_shards)]
    scales = []
    for feature in batch.features:
        line = lines[feature.table]
        hashes = partition_hashes(feature.keys, np.broadcast_to(line, (feature.num_keys, 16)))
        of_partitions = partition_owners[(hashes >> U64(52)).astype(np.int64)]
        owners = np.minimum(of_partitions if line[5] == NO_OWNER else line[5], num_shards - 1)
        owners = np.broadcast_to(owners, feature.num_keys).tolist()
        weights = np.ones(feature.num_keys, F32) if feature.weights is None else feature.weights
        bits, keys = weights.view(np.uint32).tolist(), feature.keys.tolist()
        bounds = feature.bounds().tolist()
        for first, last in itertools.pairwise(bounds):
            present = [i for i in range(first, last) if keys[i] != PADDING_KEY]
            divisor = F32(0)
            for i in present:
                divisor = divisor + (weights[i] * weights[i] if feature.combiner == SQRTN else weights[i])
            is_divided = feature.combiner in (MEAN, SQRTN)
            is_left_out = is_divided and divisor == 0
            root = np.sqrt(divisor) if feature.combiner == SQRTN else divisor
            # Only -0 indicates that the divisor is zero.
            scales.append(
                F32(-0.0)
                if is_left_out
                else abs(F32(1) / root)
                if is_divided and not F32(1) / root
                else F32(1) / root
                if is_divided
                else F32(1)
            )
            for owner in range(num_shards):
                begins[owner].append(len(uses[owner]))
            for i in present:
                word = feature.table | (LEFT_OUT if is_left_out else 0)
                uses[owners[i]].append((keys[i] & 0xFFFFFFFF, keys[i] >> 32, word, bits[i]))
    padding = [(int(EMPTY), int(EMPTY), 0, 0)] * (len(batch.keys) - sum(map(len, uses)))
    ordered = [use for of_owner in uses for use in of_owner]
    return {
        "uses": np.array(ordered + padding, np.uint32).reshape(-1, 4)[:, :num_words],
        "starts": np.cumsum([0, *map(len, uses)]).astype(np.int32),
        "offsets": np.array([[*begin, len(own)] for begin, own in zip(begins, uses, strict=True)], np.int32),
        "scales": np.array(scales, F32),
    }

"""The cases of test_kernels.py, and what every target must give for them, to the bit. Imports nothing of jaxsok.

First the model: `oracle.py` says what the ops mean, in float64; this says in NumPy float32 and plain loops what
`ffi/core` and `ffi/kernels/*.h` promise beyond it: the layout of a store, the numbering of rows, the order of every
sum, the counts. The words of layout.h are written down again, so that a word moved by mistake is seen.

Then the cases: scripts of calls on one store, each with the outputs and the whole state that must follow.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from strategies import CORNER_KEYS

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
    """Python integers as uint64."""
    return np.array(keys, np.uint64).reshape(-1)


def words(keys: np.ndarray) -> np.ndarray:
    """uint64 keys as uint32[n, 2], low word first."""
    return np.stack([keys & U64(2**32 - 1), keys >> U64(32)], -1).astype(np.uint32)


def from_words(pairs: np.ndarray) -> np.ndarray:
    """The reverse of `words`."""
    return pairs[..., 0].astype(np.uint64) | pairs[..., 1].astype(np.uint64) << U64(32)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; arrays only, since NumPy warns of scalars that wrap."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def unmix(x: int) -> int:
    """The number that `mix` turns into x."""
    wrap = 2**64 - 1
    x = x ^ x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & wrap
    x = x ^ x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & wrap
    return x ^ x >> 30 ^ x >> 60


def key_of_hash(wanted: int, line: np.ndarray) -> int:
    """The key of a table, by its words, that has this partition hash."""
    name = int(line[0]) | int(line[1]) << 32
    return unmix((unmix(wanted) - int(GOLDEN)) % 2**64) ^ name


def partition_hashes(keys: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """By which keys belong to partitions and rounds; `lines`: the words of each key's table."""
    return mix(mix(keys ^ from_words(lines[:, 0:2])) + GOLDEN)


def home_buckets(keys: np.ndarray, tables: np.ndarray, salt: int, num_buckets: int) -> np.ndarray:
    """Where the walk of each (table, key) pair begins."""
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
    """Horner, the highest power first."""
    total = np.full_like(r, F32(coefficients[0]))
    for coefficient in coefficients[1:]:
        total = total * r + F32(coefficient)
    return total


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """AS 241, routine PPND7, operation by operation."""
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
    """The row that each (table, key) pair gets when it is first seen."""
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
    with np.errstate(all="ignore"):  # branches not taken
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
    """Of one key of a table, by its words: uint64[1]."""
    of_table = mix(mix(from_words(seed[None]) + ADMISSION_STREAM) ^ from_words(line[None, 0:2]))
    return mix(as_keys([key]) + of_table)


def is_drawn(line: np.ndarray, seed: np.ndarray, key: int, step: int) -> bool:
    """Whether chance lets a key in at a step."""
    draw = mix(admission_hash(line, seed, key) + as_keys([step + 1]) * GOLDEN) >> U64(32)
    return bool(draw[0] < line[8])


def bloom_counters(line: np.ndarray, seed: np.ndarray, key: int) -> np.ndarray:
    """The places of a key's counters in the filter of its shard."""
    begin, size, num_hashes = (int(word) for word in line[9:12])
    value = int(admission_hash(line, seed, key)[0])
    low, high = value & 0xFFFFFFFF, value >> 32 | 1
    return np.array([4 * begin + ((low + i * high) % 2**32 * size >> 32) for i in range(num_hashes)], np.int64)


# --------------------------------------------------------------------------------------------------------------
# Rows of 16 bits (core/row_dtype.h): ml_dtypes and float64 say what rounding means


def nearest(values: np.ndarray, dtype) -> np.ndarray:
    """Ties to even; what is finite stays finite."""
    values = np.asarray(values, F32)
    largest = F32(ml_dtypes.finfo(dtype).max)
    return np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(dtype)


def stochastic(values: np.ndarray, dtype, random: np.ndarray) -> np.ndarray:
    """To one of the two neighbours: away from zero if the part beyond the nearer one and the random bits carry."""
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
    """The 16 random bits of each column of keys in one step; `lines`: the words of each key's table."""
    of_step = mix(mix(from_words(seed[None]) + ROUNDING_STREAM) + U64(step + 1) * GOLDEN)
    streams = mix(keys + mix(of_step ^ from_words(lines[:, 0:2])))
    draws = mix(streams[:, None] + np.arange(1, -(-dim // 4) + 1, dtype=np.uint64) * GOLDEN)
    shifts = np.arange(4, dtype=np.uint64) * U64(16)
    return (draws[:, :, None] >> shifts & U64(0xFFFF)).reshape(len(keys), 4 * draws.shape[1])[:, :dim]


@functools.cache
def table_words(num_tables: int) -> np.ndarray:
    """Tables with all kinds of initializers, each of its own name."""
    lines = np.zeros((num_tables, 16), np.uint32)
    for t, line in enumerate(lines):
        line[:3] = zlib.crc32(b"low %d" % t), zlib.crc32(b"high %d" % t), (t + 1) % 4
        line[3:5] = np.array([-0.5, 0.25 + t], F32).view(np.uint32)
        line[5] = NO_OWNER
    lines.flags.writeable = False
    return lines


def placed(lines: np.ndarray, owners: dict[int, int] | None = None, unknown_zeros: Sequence[int] = ()) -> np.ndarray:
    """Words of tables of which some lie on one shard, and some give zeros for unknown keys."""
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
        """Keys without any bag have a tile, too: it counts them."""
        return max(-(-self.num_bags // BAGS_PER_TILE), int(self.num_keys > 0))

    def bounds(self) -> np.ndarray:
        """Where each bag begins among the feature's positions; what lies outside is clamped."""
        if self.offsets is None:
            return np.arange(self.num_bags + 1) * self.hotness
        assert (np.diff(self.offsets.astype(np.int64)) >= 0).all()  # the callers of the kernels see to it
        return np.clip(self.offsets.astype(np.int64), 0, self.num_keys)

    def bags(self) -> np.ndarray:
        """The bag of each position; -1: in none."""
        bounds = self.bounds()
        of = np.full(self.num_keys, -1)
        of[bounds[0] : bounds[-1]] = np.repeat(np.arange(self.num_bags), np.diff(bounds))
        return of


def single(keys, table=0, **more) -> Feature:
    """Every key its own row."""
    return Feature(as_keys(keys), table, NONE, 1, **more)


def fixed(keys, table, combiner, hotness, weights=None, **more) -> Feature:
    """Bags of one size."""
    return Feature(as_keys(keys), table, combiner, hotness, weights=weights, **more)


def ragged(keys, table, combiner, offsets, weights=None, **more) -> Feature:
    """Bags of any size."""
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
        """The features operand."""
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
        """Of the embeddings."""
        return tuple((f.num_bags, dim) for f in self.features)

    def operands(self) -> dict[str, np.ndarray]:
        """keys, offsets, weights."""
        offsets = [f.offsets for f in self.features if f.offsets is not None]
        weights = [f.weights for f in self.features if f.weights is not None]
        return {
            "keys": words(self.keys),
            "offsets": np.concatenate([*offsets, np.zeros(0, np.int32)]).astype(np.int32),
            "weights": np.concatenate([*weights, np.zeros(0, F32)]).astype(F32),
        }

    def part(self, number: int) -> slice:
        """The positions of one feature."""
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def count_padding(self, num_tables: int) -> np.ndarray:
        """Positions without a key, by table: padding, and whatever lies in no bag."""
        return np.bincount(self.tables[~self.is_asked], minlength=num_tables).astype(np.int32)

    def digest(self) -> np.ndarray:
        """Of all keys but padding, also of those that lie in no bag."""
        places = np.arange(1, len(self.keys) + 1, dtype=np.uint64) * GOLDEN
        return words(mix(self.keys + places)[self.keys != U64(PADDING_KEY)].sum(dtype=np.uint64, keepdims=True))


def joined(*batches: Batch) -> Batch:
    """Several plans' batches as one; feature by feature, each knowing its plan."""
    return Batch(*(dataclasses.replace(f, plan=p) for p, batch in enumerate(batches) for f in batch.features))


def _in_order(bags: np.ndarray, present: np.ndarray):
    """(positions, their bags) of the first keys of all bags, then of the second ones, ..."""
    positions = np.flatnonzero(present & (bags >= 0))
    of = bags[positions]
    if not len(of):
        return
    starts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
    ranks = np.arange(len(of)) - np.repeat(starts, np.diff(np.r_[starts, len(of)]))
    for rank in range(int(ranks.max()) + 1):
        yield rank, positions[ranks == rank], of[ranks == rank]


def bag_scales(feature: Feature, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 / divisor of each bag of mean and sqrtn, and where the divisor is zero."""
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
    """The embeddings of one feature. `values`: the row of each position; `present`: not padding."""
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
    """By what the gradient of its bag is multiplied for each position, and which positions are no uses at all."""
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
    """The sum of the terms from each start to the next, at most `most` of them, one after the other."""
    sizes = np.diff(np.r_[starts, num_terms])
    sums = terms[starts]
    for i in range(1, most):
        more = np.flatnonzero(sizes > i)
        sums[more] = sums[more] + terms[starts[more] + i]
    return sums


def sum_uses(rows: np.ndarray, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct rows, the sum of each one's terms, and their number. Terms come in the order of their positions."""
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
    """The mean square of each row, in the order of LaneShape; that of rows of 16 bits is another."""
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
    """New rows and states."""
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
    """Hyper-parameters with which every term of a step counts."""
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
    """One shard: arrays as in core/layout.h, and what they mean as dicts."""

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
        """`admission`: by table its words from kTableAdmission on; `refused`: what a key without a row reads."""
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
        self.rows = np.full((self.capacity, dim), -99, self.dtype)  # what nobody writes stays so
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
        """Copies of all arrays, per-row ones cut into slabs."""
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
        """Those that wait, each where a walk finds it."""
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
        """Row ids; NO_ROW where absent."""
        pairs = zip(tables.tolist(), keys.tolist(), strict=True)
        return np.array([self.row_of.get(pair, NO_ROW) for pair in pairs], np.uint32)

    # The index ----------------------------------------------------------------------------------------------

    def _empty_index(self, num_buckets: int, salt: int) -> None:
        self.index = np.full((num_buckets, 16), EMPTY)
        self.fill = [0] * num_buckets
        self.bucket_of: dict[tuple[int, int], int] = {}
        self.counters[SALT_LOW], self.counters[SALT_HIGH] = salt & 0xFFFFFFFF, salt >> 32

    def _walk(self, home: int) -> tuple[int | None, int]:
        """The first bucket with an empty entry, and how many were visited."""
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
        """Walks count that end at a row."""
        self.counters[LONGEST_PROBE] = max(int(self.counters[LONGEST_PROBE]), probes)

    # Writing ------------------------------------------------------------------------------------------------

    def find_or_insert(self, keys: np.ndarray, tables: np.ndarray, is_asked: np.ndarray, uses=None, step=None):
        """Row ids and counts. Distinct pairs come one after the other, by first position; repeats share their fate.

        `step`: unseen pairs are judged by the admission of their tables; `uses`: what each position stands for.
        """
        row_ids = np.full(len(keys), NO_ROW, np.uint32)
        counts = np.zeros((self.num_tables, 6), np.int32)
        new = []
        uses = np.ones(len(keys), np.int64) if uses is None else np.asarray(uses, np.int64)
        kept_out = set()
        if step is not None:
            asked = self._distinct(keys, tables, is_asked)
            sums = {pair: int(uses[at].sum()) for pair, at, _ in asked if pair not in self.bucket_of}
            kept_out = self._kept_out(sums, step)
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

    def _kept_out(self, sums: dict[tuple[int, int], int], step: int) -> set[tuple[int, int]]:
        """Of unseen pairs with their uses in a call, those that get no row; counts what is to be counted."""
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
        """Counts that reached their table's floor begin at 0; their entries stay."""
        self.waiting = {pair: 0 if num >= floors[pair[0]] else num for pair, num in self.waiting.items()}

    def wait(self, num_buckets: int, floors: np.ndarray, more: dict[tuple[int, int], int]) -> None:
        """Those that wait, with others, in so many buckets."""
        kept: dict[tuple[int, int], int] = {}
        for pair, num in [*self.waiting.items(), *more.items()]:
            if pair[0] < self.num_tables and 0 < num < floors[pair[0]]:
                kept[pair] = kept.get(pair, 0) + num
        self.waiting, self.num_waiting_buckets = kept, num_buckets
        self.counters[NUM_SIGHTINGS] = len(kept)

    def initial_rows(self, keys: np.ndarray, tables: np.ndarray, lines: np.ndarray | None = None) -> np.ndarray:
        """Of (table, key) pairs, as they are stored."""
        lines = self.tables if lines is None else lines
        return nearest(initial_rows(lines, self.seed, keys, tables, self.dim), self.dtype)

    def _distinct(self, keys: np.ndarray, tables: np.ndarray, is_asked: np.ndarray):
        """(table, key), its positions and its home bucket, by first position."""
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

    def erase(self, keys: np.ndarray, tables: np.ndarray) -> int:
        """How many distinct pairs were there."""
        num_erased = 0
        for pair in zip(tables.tolist(), keys.tolist(), strict=True):
            row_id = self.row_of.pop(pair, None)
            if row_id is None:
                continue
            num_erased += 1
            self.records[row_id, :2] = EMPTY
            self.table_rows[pair[0]] -= 1
            for state, value in zip(self.states, self.initial, strict=True):
                state[row_id] = F32(value)
        self._list_freed(num_erased)
        self.rebuild()
        return num_erased

    def _list_freed(self, num_freed: int) -> None:
        """The list of freed rows, made anew."""
        dead = np.flatnonzero((self.records[: self.counters[NUM_ALLOCATED], :2] == EMPTY).all(axis=1))
        self.records[: len(dead), 3] = dead
        self.counters[[FREE_BEGIN, FREE_END]] = 0, len(dead)
        self.counters[GENERATION] += num_freed > 0

    def select(self, scores: Sequence[np.ndarray], num_kept: int, table: int, mask: np.ndarray | None) -> np.ndarray:
        """A flag for each row of capacity: those of lowest (scores, table, key), or those of a mask."""
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
        """How many rows of each table went; where none did all stays."""
        num_released = np.zeros(self.num_tables, np.uint32)
        for pair, row_id in [item for item in self.row_of.items() if flags[item[1]]]:
            del self.row_of[pair]
            num_released[pair[0]] += 1
            self.records[row_id, :2] = EMPTY
            for state, value in zip(self.states, self.initial, strict=True):
                state[row_id] = F32(value)
        self.table_rows -= num_released
        if num_released.any():
            self._list_freed(int(num_released.sum()))
            self._sweep() if self.counters[NUM_UNPLACED] == 0 else self.rebuild()
        return num_released

    def _sweep(self) -> None:
        """Who is in its home bucket stays there; the others enter anew, by row id."""
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
        """Another index over the same records."""
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

    def row_values(self, batch: Batch, row_ids: np.ndarray, *, may_be_zeros: bool = False) -> np.ndarray:
        """The row of each position: the store's, else the one it would get, else zeros."""
        values = np.zeros((len(batch.keys), self.dim), F32)
        known = row_ids < self.capacity
        values[known] = self.rows[row_ids[known]].astype(F32)
        unknown = ~known & batch.is_asked
        if may_be_zeros:
            zeros = [np.full(f.num_keys, f.unknown_zeros) for f in batch.features]
            unknown &= ~np.concatenate([*zeros, np.zeros(0, bool)])
        keys, tables = batch.keys[unknown], batch.tables[unknown]
        lines = self.tables if may_be_zeros else self.refused
        values[unknown] = self.initial_rows(keys, tables, lines).astype(F32)
        return values

    def embeddings(self, batch: Batch, values: np.ndarray) -> list[np.ndarray]:
        """Of all features."""
        present = batch.keys != U64(PADDING_KEY)
        parts = [batch.part(f) for f in range(len(batch.features))]
        combined = [combine(f, values[part], present[part]) for f, part in zip(batch.features, parts, strict=True)]
        return [nearest(one, self.embedding_dtype) for one in combined]

    def noted(self, batch: Batch, statistics: np.ndarray, clock: int) -> np.ndarray:
        """The statistics after a lookup, occurrence by occurrence."""
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
        """Embeddings, row ids, counts."""
        row_ids, counts = self.find_or_insert(batch.keys, batch.tables, batch.is_asked, step=step)
        counts[:, PADDED] = batch.count_padding(self.num_tables)
        return self.embeddings(batch, self.row_values(batch, row_ids)), row_ids, counts

    def lookup_find(self, batch: Batch):
        """Embeddings, counts."""
        row_ids = np.where(batch.is_asked, self.find(batch.keys, batch.tables), np.uint32(NO_ROW))
        values = self.row_values(batch, row_ids, may_be_zeros=True)
        return self.embeddings(batch, values), self._counts(batch, row_ids, MISSING)

    def lookup_planned(self, batch: Batch, row_ids: np.ndarray):
        """Embeddings, counts."""
        values = self.row_values(batch, row_ids)
        return self.embeddings(batch, values), self._counts(batch, row_ids, REFUSED)

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
        """Rows with gradients that are not finite by table, and uses of stale plans."""
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


def plan(batch: Batch) -> dict[str, np.ndarray]:
    """Distinct (table, key) pairs by first position."""
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
    batch: Batch, lines: np.ndarray, partition_owners: np.ndarray, num_shards: int, by_hash: bool
) -> dict[str, np.ndarray]:
    """Distinct (table, key) pairs by owner, then by round hash or not, then by first position."""
    distinct, n = plan(batch), len(batch.keys)
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
    return {
        "requests": requests,
        "inverse": place[distinct["inverse"]],
        "starts": np.r_[0, np.cumsum(np.bincount(owners, minlength=num_shards))].astype(np.int32),
        "hashes": sorted_hashes,
    }


# --------------------------------------------------------------------------------------------------------------
# Scripts


@dataclasses.dataclass
class Step:
    """One call: its operands and attributes, what must come out, and the store's arrays after it."""

    op: str
    inputs: dict[str, Any]
    statics: dict[str, Any]
    want: dict[str, Any]
    state: dict[str, Any] | None
    meaning: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the oracle needs to judge the model."""


class Script:
    """Calls on one store, one after the other; the model runs along and says what each must give."""

    def __init__(self, seed: int = 0, **store):
        self.rng = np.random.default_rng(seed)
        self.store = Store(**store)
        self.initial: dict[str, Any] | None = None
        self.steps: list[Step] = []
        self.has_exact_probes = False
        """Whether the longest walk is the same in whatever order the keys of a call enter the index."""

    def _add(self, op, inputs, statics, want, **meaning) -> None:
        self.steps.append(Step(op, inputs, statics, want, self.store.arrays(), meaning))

    def _begin(self) -> None:
        if self.initial is None:
            self.initial = self.store.arrays()

    # The store before the first call ------------------------------------------------------------------------

    def fill(self, keys, tables=0) -> None:
        """Gives keys rows that no initializer makes, and optimizer state that no step begins with."""
        assert self.initial is None
        store, rng = self.store, self.rng
        keys = as_keys(keys)
        tables = np.broadcast_to(tables, keys.shape).astype(np.int64)
        row_ids, counts = store.find_or_insert(keys, tables, np.full(len(keys), True))
        assert counts[:, REFUSED].sum() == 0
        row_ids = np.unique(row_ids)
        store.rows[row_ids] = nearest(rng.normal(size=(len(row_ids), store.dim)), store.dtype)
        for state in store.states:
            state[row_ids] = rng.uniform(0.5, 2, (len(row_ids), state.shape[1])).astype(F32)

    # Calls --------------------------------------------------------------------------------------------------

    def find(self, keys, tables=0) -> None:
        self._begin()
        keys, tables = _pairs(keys, tables)
        want = {"row_ids": self.store.find(keys, tables)}
        self._add("find", {"keys": words(keys), "table_ids": tables.astype(np.uint32)}, {}, want)

    def find_or_insert(self, keys, tables=0, uses=None, step=None) -> np.ndarray:
        """`step`: with admission; `uses`: of each key, for it."""
        self._begin()
        store = self.store
        keys, tables = _pairs(keys, tables)
        is_known = tables < store.num_tables
        is_padding = keys == U64(PADDING_KEY)
        row_ids, counts = store.find_or_insert(keys, tables, is_known & ~is_padding, uses, step)
        counts[:, PADDED] = np.bincount(tables[is_known & is_padding], minlength=store.num_tables)
        inputs = {"keys": words(keys), "table_ids": tables.astype(np.uint32), "seed": store.seed}
        inputs |= {} if uses is None else {"uses": np.asarray(uses, np.uint32)}
        admission, statics = self._admission(step)
        self._add(
            "find_or_insert",
            {**inputs, **admission},
            {**self._tables(), **statics},
            {"row_ids": row_ids, "counts": counts},
        )
        return row_ids

    def forget(self, floors) -> None:
        """By table the count from which a key waits no longer."""
        self._begin()
        self.store.forget(np.asarray(floors))
        self._add("forget", {"floors": np.asarray(floors, np.uint32)}, {}, {})

    def wait(self, num_buckets: int, floors, keys=(), counts=(), tables=0) -> None:
        """Other keys beside those that wait, in so many buckets."""
        self._begin()
        keys, tables = _pairs(keys, tables)
        counts = np.asarray(counts, np.int64)
        entries = np.concatenate([words(keys), counts[:, None], tables[:, None]], axis=1).astype(np.uint32)
        pairs = zip(tables.tolist(), keys.tolist(), strict=True)
        more = {pair: num for pair, num in zip(pairs, counts.tolist(), strict=True) if pair[1] != PADDING_KEY}
        self.store.wait(num_buckets, np.asarray(floors), more)
        self._add("wait", {"entries": entries}, {"floors": tuple(floors), "num_buckets": num_buckets}, {})

    def _admission(self, step) -> tuple[dict[str, Any], dict[str, Any]]:
        """Operands and attributes more, if a step is given."""
        if step is None:
            return {}, {}
        return {"step": np.array(step, np.uint32)}, {"refused": tuple(map(tuple, self.store.refused.tolist()))}

    def erase(self, keys, tables=0) -> None:
        self._begin()
        keys, tables = _pairs(keys, tables)
        want = {"num_erased": np.array(self.store.erase(keys, tables), np.uint32)}
        inputs = {"keys": words(keys), "table_ids": tables.astype(np.uint32)}
        self._add("erase", inputs, {"initial": self.store.initial}, want)

    def scatter(self, row_ids, width: int, dtype) -> None:
        """Lines of any bits into an array of the store's slabs; the lines of equal row ids are equal."""
        self._begin()
        row_ids, dtype = np.asarray(row_ids, np.uint32), np.dtype(dtype)
        size = (self.store.capacity + 1, width * dtype.itemsize)
        before, by_row = self.rng.integers(0, 120, (2, *size), np.uint8)  # no NaN in any dtype
        lines = by_row[np.minimum(row_ids, self.store.capacity)].view(dtype)
        before, by_row = (array[:-1].view(dtype) for array in (before, by_row))
        after = before.copy()
        rows = row_ids[row_ids < self.store.capacity]
        after[rows] = by_row[rows]
        ends = np.cumsum(self.store.slabs)[:-1]
        inputs = {"row_ids": row_ids, "lines": lines, "slabs": tuple(np.split(before, ends))}
        self._add("scatter", inputs, {}, {"slabs": tuple(np.split(after, ends))})

    def touch(self, row_ids, uses=None, clock=5) -> None:
        """`uses`: of each position; None: one each. Statistics are inputs of the call, any numbers."""
        self._begin()
        row_ids = np.asarray(row_ids, np.uint32)
        before = self._statistics()
        after = before.copy()
        is_row = row_ids < self.store.capacity
        rows = row_ids[is_row]
        after[rows, 0] = clock
        uses = None if uses is None else np.broadcast_to(np.asarray(uses, np.uint32), row_ids.shape)
        total = after[:, 1].astype(np.int64)
        np.add.at(total, rows, 1 if uses is None else uses[is_row].astype(np.int64))
        after[:, 1] = np.minimum(total, 2**32 - 1)
        ends = np.cumsum(self.store.slabs)[:-1]
        slabs = {name: tuple(np.split(array, ends)) for name, array in (("before", before), ("after", after))}
        inputs = {"row_ids": row_ids, "uses": np.zeros(0, np.uint32) if uses is None else uses}
        inputs |= {"clock": np.array(clock, np.uint32), "statistics": slabs["before"]}
        self._add("touch", inputs, {}, {"statistics": slabs["after"]})

    def _statistics(self) -> np.ndarray:
        """Any numbers; some frequencies that are soon at their end."""
        lines = self.rng.integers(0, 2**32, (self.store.capacity, 2), np.uint32)
        lines[:, 1] >>= 8
        lines[::7, 1] = 2**32 - 1 - np.arange(len(lines[::7])) % 3
        return lines

    def evict_select(self, scores: Sequence[np.ndarray], num_kept=0, table=-1, mask=None) -> np.ndarray:
        self._begin()
        store = self.store
        scores = tuple(np.asarray(word, np.uint32) for word in scores)
        flags = store.select(scores, num_kept, table, mask)
        owners = [pair[0] for pair, row_id in store.row_of.items() if flags[row_id]]
        num_selected = np.bincount(np.array(owners, np.int64), minlength=store.num_tables).astype(np.uint32)
        ends = np.cumsum(store.slabs)[:-1]
        inputs = {
            "num_kept": np.array(num_kept, np.uint32),
            "scores": tuple(tuple(np.split(word, ends)) for word in scores),
            "mask": () if mask is None else tuple(np.split(np.asarray(mask, np.uint8), ends)),
        }
        statics = {"num_tables": store.num_tables, "table": table}
        self._add("evict_select", inputs, statics, {"flags": flags, "num_selected": num_selected})
        return flags

    def evict_release(self, flags: np.ndarray, *, has_statistics=True, has_evicted=True) -> None:
        self._begin()
        store = self.store
        ends = np.cumsum(store.slabs)[:-1]
        statistics = self.rng.integers(0, 2**32, (store.capacity, 2), dtype=np.uint32)
        evicted = self.rng.integers(0, 2**32, store.num_tables, dtype=np.uint32)
        is_used = np.isin(np.arange(store.capacity), list(store.row_of.values()))
        inputs = {
            "flags": np.asarray(flags, np.uint8),
            "statistics": tuple(np.split(statistics, ends)) if has_statistics else (),
            "table_evicted": (evicted,) if has_evicted else (),
        }
        num_released = store.release(flags)
        statistics = np.where((is_used & (np.asarray(flags) != 0))[:, None], np.uint32(0), statistics)
        want = {
            "num_released": num_released,
            "statistics": tuple(np.split(statistics, ends)) if has_statistics else (),
            "table_evicted": (evicted + num_released,) if has_evicted else (),
        }
        self._add("evict_release", inputs, {"initial": store.initial}, want)

    def rebuild(self, num_buckets: int, salt: int | None = None) -> None:
        self._begin()
        self.store.rebuild(num_buckets, salt)
        inputs = {"salt": self.store.counters[[SALT_LOW, SALT_HIGH]]}
        self._add("rebuild", inputs, {"num_buckets": num_buckets}, {})

    def plan(self, batch: Batch) -> None:
        self._begin()
        self._add("plan", batch.operands(), _features(batch), plan(batch))

    def plan_requests(self, batch: Batch, num_shards: int, owners=None, on: dict[int, int] | None = None) -> None:
        """In both orders. `owners`: of the partitions, else equal ranges; `on`: of tables that lie on one shard."""
        self._begin()
        lines = placed(self.store.tables, on)
        if owners is None:
            owners = np.arange(NUM_PARTITIONS) * num_shards // NUM_PARTITIONS
        owners = np.broadcast_to(np.asarray(owners, np.uint32), NUM_PARTITIONS)
        for by_hash in (False, True):
            statics = {**self._tables(lines), **_features(batch), "num_shards": num_shards, "by_hash": by_hash}
            want = plan_requests(batch, lines, owners, num_shards, by_hash)
            self._add("plan_requests", {**batch.operands(), "owners": owners}, statics, want)

    def gather(self, keys, tables, row_ids, uses=1, unknown_zeros: Sequence[int] = ()) -> None:
        """For a lookup and for find."""
        self._begin()
        store = self.store
        keys, tables = _pairs(keys, tables)
        row_ids = np.broadcast_to(np.asarray(row_ids, np.int64), keys.shape).astype(np.uint32)
        uses = np.broadcast_to(np.asarray(uses, np.int64), keys.shape)
        requests = np.concatenate([words(keys), tables[:, None], uses[:, None]], axis=1).astype(np.uint32)
        lines = placed(store.tables, None, unknown_zeros)
        is_real = (keys != U64(PADDING_KEY)) & (tables < store.num_tables)
        is_known = is_real & (row_ids < store.capacity)
        is_absent = is_real & ~is_known
        rows = np.zeros((len(keys), store.dim), store.dtype)
        rows[is_known] = store.rows[row_ids[is_known]]
        rows[is_absent] = store.initial_rows(keys[is_absent], tables[is_absent], lines)
        num_absent = np.zeros(store.num_tables, np.int32)
        np.add.at(num_absent, tables[is_absent], uses[is_absent])
        inputs = {"seed": store.seed, "requests": requests, "row_ids": row_ids}
        for is_find in (False, True):
            if is_find:
                rows = rows.copy()
                rows[is_absent & np.isin(tables, unknown_zeros)] = 0
            statics = {**self._tables(lines), "is_find": is_find}
            self._add("gather", inputs, statics, {"rows": rows, "num_absent": num_absent})

    def lookup(self, batch: Batch, step=None, clock=None) -> np.ndarray:
        """`step`: with admission; `clock`: with statistics, which are inputs of the call, any numbers."""
        self._begin()
        embeddings, row_ids, counts = self.store.lookup(batch, step)
        admission, more = self._admission(step)
        inputs = {**batch.operands(), "seed": self.store.seed, **admission}
        statics = {**self._tables(), **_features(batch), **self._embeddings(batch), **more}
        want = {"row_ids": row_ids, "counts": counts, "digest": batch.digest(), "embeddings": embeddings}
        if clock is not None:
            ends = np.cumsum(self.store.slabs)[:-1]
            before = self._statistics()
            after = self.store.noted(batch, before, clock)
            inputs |= {"clock": np.array(clock, np.uint32), "statistics": tuple(np.split(before, ends))}
            want["statistics"] = tuple(np.split(after, ends))
        self._add("lookup", inputs, statics, want, batch=batch, values=self.store.row_values(batch, row_ids))
        return row_ids

    def lookup_find(self, batch: Batch) -> None:
        self._begin()
        embeddings, counts = self.store.lookup_find(batch)
        inputs = {**batch.operands(), "seed": self.store.seed}
        statics = {**self._tables(), **_features(batch), **self._embeddings(batch)}
        self._add("lookup_find", inputs, statics, {"counts": counts, "embeddings": embeddings})

    def lookup_planned(self, batch: Batch, row_ids: np.ndarray) -> None:
        self._begin()
        embeddings, counts = self.store.lookup_planned(batch, row_ids)
        inputs = {**batch.operands(), "seed": self.store.seed, "row_ids": row_ids}
        statics = {**self._tables(self.store.refused), **_features(batch), **self._embeddings(batch)}
        self._add("lookup_planned", inputs, statics, {"counts": counts, "embeddings": embeddings})

    def update(
        self,
        batch: Batch,
        row_ids,
        *,
        gradients=None,
        is_live=None,
        row_gradient=SUM_OF_USES,
        learning_rate=0.5,
        rounding=STOCHASTIC,
        num_steps=5,
        tables_apart=False,
    ) -> None:
        """`tables_apart`: the table of each key stands beside it, and the features do not tell it."""
        self._begin()
        store = self.store
        if gradients is None:
            gradients = [self.normal(f.num_bags, store.dim).astype(store.embedding_dtype) for f in batch.features]
        if is_live is None:
            is_live = [True] * (1 + max(f.plan for f in batch.features))
        is_live = np.array(is_live)
        hyper = hyper_of(store.optimizer, learning_rate)
        before = (store.rows.copy(), [state.copy() for state in store.states])
        nonfinite, stale = store.update(batch, row_ids, gradients, is_live, hyper, row_gradient, rounding, num_steps)
        inputs = {**batch.operands(), "row_ids": row_ids, "gradients": gradients, "hyper": hyper}
        inputs |= {"seed": store.seed, "step": np.array(num_steps, np.uint32), "table_ids": np.zeros(0, np.uint32)}
        told = batch
        if tables_apart:
            inputs["table_ids"] = batch.tables.astype(np.uint32)
            told = Batch(*(dataclasses.replace(f, table=0) for f in batch.features))
        statics = {
            **self._tables(),
            **_features(told),
            "rounding": rounding,
            "optimizer": store.optimizer,
            "row_gradient": row_gradient,
        }
        want = {"num_nonfinite": nonfinite, "num_stale": stale}
        meaning = {"batch": batch, "before": before, "learning_rate": learning_rate}
        self._add("update", {**inputs, "is_live": is_live}, statics, want, **meaning)

    def combine(self, feature: Feature, inverse: np.ndarray, num_unique: int) -> None:
        """combine and its transpose of one feature, whose keys are not read."""
        self._begin()
        dim = self.store.dim
        rows = self.normal(num_unique, dim)
        present = (inverse >= 0) & (inverse < num_unique)
        values = np.zeros((len(inverse), dim), F32)
        values[present] = rows[inverse[present]]
        batch = Batch(feature)
        operands = {name: array for name, array in batch.operands().items() if name != "keys"}
        inputs = {**operands, "inverse": inverse.astype(np.int32)}
        want = {"embeddings": combine(feature, values, present)}
        statics = {**_features(batch), "num_bags": feature.num_bags}
        self._add("combine", {**inputs, "rows": rows}, statics, want)

        self.transpose(batch, inverse, num_unique)

    def transpose(self, batch: Batch, inverse: np.ndarray, num_unique: int, gradients=None) -> None:
        """combine_transpose of any features; their keys are not read."""
        self._begin()
        dim = self.store.dim
        if gradients is None:
            gradients = [self.normal(f.num_bags, dim) for f in batch.features]
        present = (inverse >= 0) & (inverse < num_unique)
        used_rows, terms = [np.zeros(0, np.int64)], [np.zeros((0, dim), F32)]
        for f, feature in enumerate(batch.features):
            part = batch.part(f)
            factors, left_out = use_factors(feature, present[part])
            uses = np.flatnonzero(~left_out)
            used_rows.append(inverse[part][uses].astype(np.int64))
            terms.append(factors[uses, None] * gradients[f][feature.bags()[uses]])
        used, sums, counts = sum_uses(np.concatenate(used_rows), np.concatenate(terms))
        row_gradients, num_uses = np.zeros((num_unique, dim), F32), np.zeros(num_unique, np.int32)
        row_gradients[used], num_uses[used] = sums, counts
        operands = {name: array for name, array in batch.operands().items() if name != "keys"}
        inputs = {**operands, "inverse": inverse.astype(np.int32), "gradients": gradients}
        statics = {**_features(batch), "num_unique": num_unique}
        self._add("combine_transpose", inputs, statics, {"row_gradients": row_gradients, "num_uses": num_uses})

    def _embeddings(self, batch: Batch) -> dict[str, Any]:
        return {"shapes": batch.shapes(self.store.dim), "embedding_dtype": self.store.embedding_dtype.name}

    def _tables(self, lines: np.ndarray | None = None) -> dict[str, Any]:
        return {"tables": tuple(map(tuple, (self.store.tables if lines is None else lines).tolist()))}

    # Numbers ------------------------------------------------------------------------------------------------

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(F32)

    def distinct(self, num: int, low: int = 1 << 40) -> np.ndarray:
        """Keys that no other part of a script uses, if it has another `low`."""
        return (U64(low) + self.rng.permutation(4 * num + 4)[:num].astype(np.uint64) * U64(0x100000001)).astype(U64)

    def mixed(self, num: int, present) -> np.ndarray:
        """Keys with rows, new ones, some of them again, and padding between."""
        rng = self.rng
        pool = np.concatenate([as_keys(present), self.distinct(num // 3 + 1)])
        keys = rng.choice(pool, num) if num else np.zeros(0, np.uint64)
        keys[rng.random(num) < 0.07] = PADDING_KEY
        return keys

    def weights(self, num: int) -> np.ndarray:
        return self.rng.uniform(-0.5, 2, num).astype(F32)

    def keys_of_homes(self, buckets, num: int, table: int = 0) -> np.ndarray:
        """The first keys whose walk begins in one of these buckets, in equal parts."""
        found = []
        for bucket in buckets:
            part: list[np.ndarray] = []
            start = 0
            while sum(map(len, part)) < -(-num // len(buckets)):
                block = np.arange(start, start + (1 << 19), dtype=np.uint64)
                homes = home_buckets(block, np.full(len(block), table), self.store.salt, self.store.num_buckets)
                part.append(block[homes == U64(bucket)])
                start += len(block)
            found.append(np.concatenate(part)[: -(-num // len(buckets))])
        return np.concatenate(found)[:num]


def _pairs(keys, tables) -> tuple[np.ndarray, np.ndarray]:
    keys = as_keys(keys)
    return keys, np.broadcast_to(np.asarray(tables, np.int64), keys.shape)


def _features(batch: Batch) -> dict[str, Any]:
    return {"features": batch.words(), "num_tiles": batch.num_tiles}


# --------------------------------------------------------------------------------------------------------------
# Cases: a name says what is special; names with "small" are those that run under compute-sanitizer.

CASES: dict[str, Callable[[], Script]] = {}
Keys = Sequence[int] | np.ndarray

SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 1000, 5000)
# Every shape of DispatchShape: rows of 4-float vectors and of single floats, 1 to 32 lanes, 1 to 32 pieces a lane.
DIMS = (1, 2, 3, 4, 7, 8, 12, 13, 16, 30, 32, 33, 64, 66, 100, 128, 200, 201, 256, 301, 400, 513, 1024)
SLABS = ((312,), (5, 307), (5, 7, 300))
HALVES = {"bfloat16": BF16, "float16": F16}


def case(name: str, *args: Any) -> Callable:
    """Registers a function that makes a script; more than once with other arguments."""

    def register(build: Callable[..., Script]) -> Callable[..., Script]:
        def script() -> Script:
            with np.errstate(all="ignore"):  # infinities and NaN are part of some cases
                return build(*args)

        assert name not in CASES
        CASES[name] = script
        return build

    return register


def cases(pattern: str, *arguments: Any) -> Callable:
    """`case` for each of a list of arguments (or tuples of them), which the name shows."""

    def register(build: Callable[..., Script]) -> Callable[..., Script]:
        for argument in arguments:
            argument = argument if isinstance(argument, tuple) else (argument,)
            case(pattern.format(*argument), *argument)(build)
        return build

    return register


# Tables: find, find_or_insert, erase, rebuild ------------------------------------------------------------------


def table_store(num_keys: int, number: int, seed: int, **more) -> Script:
    """Slabs, tables, dims and optimizers in turn."""
    slabs = SLABS[number % 3] if num_keys <= 257 else ((5, 2507), (5, 7, 2500), (2512,))[number % 3]
    parameters = {"num_tables": (1, 3, 70)[number % 3], "dim": (8, 3, 4)[number % 3], "optimizer": (number + 3) % 4}
    return Script(seed=seed, slabs=slabs, **{**parameters, **more})


@cases("table-{0}_keys", *SIZES)
def table_sizes(num_keys: int) -> Script:
    """Around the sizes of warps, blocks and chunks: insert, find, erase, insert again."""
    number = SIZES.index(num_keys)
    script = table_store(num_keys, number, seed=num_keys)

    def tables_of(num):
        return script.rng.integers(0, script.store.num_tables, num)

    present = script.distinct(max(num_keys, 3) // 3, low=9)
    script.fill(present, tables_of(len(present)))
    keys, tables = script.mixed(num_keys, present), tables_of(num_keys)
    script.find_or_insert(keys, tables)
    script.find(script.rng.permutation(keys), tables)
    script.erase(script.rng.permutation(keys), tables)
    script.find_or_insert(script.rng.permutation(keys), tables)
    script.find(keys, tables)
    return script


def corner_keys(script: Script, num: int) -> tuple[Keys, Keys]:
    """0, the sign bit, twins: in part present."""
    return CORNER_KEYS[::2], script.rng.choice(as_keys(CORNER_KEYS), num)


KINDS: dict[str, Callable[[Script, int], tuple[Keys, Keys]]] = {
    "new": lambda s, n: ([], s.distinct(n)),
    "present": lambda s, n: (pool := s.distinct(n * 2 // 3), s.rng.choice(pool, n)),
    "half_present": lambda s, n: (
        pool := s.distinct(n // 2),
        s.rng.permutation(np.r_[pool, s.distinct(n - n // 2, 7)]),
    ),
    "one_new": lambda s, n: ([1, 2, 3], np.full(n, 2**63, np.uint64)),
    "one_present": lambda s, n: ([1, 2**63, 3], np.full(n, 2**63, np.uint64)),
    "high_words": lambda s, n: ([5, 5 + 2**32], s.rng.integers(0, n, n).astype(U64) << U64(32) | U64(5)),
    "low_words": lambda s, n: ([5 << 32], s.rng.integers(0, n, n).astype(U64) | U64(5 << 32)),
    "corners": corner_keys,
    "padding_between": lambda s, n: ([7, 8], np.where(np.arange(n) % 2, U64(PADDING_KEY), s.distinct(n))),
    "only_padding": lambda s, n: ([7, 8], np.full(n, PADDING_KEY, np.uint64)),
    "in_all_tables": lambda s, n: (range(50), s.rng.integers(0, 100, n)),
    "of_one_home": lambda s, n: ([7, 8], s.rng.choice(s.keys_of_homes([5], 200), n)),
    "of_last_homes": lambda s, n: (
        (last := [s.store.num_buckets - 2, s.store.num_buckets - 1])
        and (s.keys_of_homes(last, 30), s.rng.choice(s.keys_of_homes(last, 200), n))
    ),
}


@cases("table-keys_{0}", *KINDS)
def table_kinds(kind: str) -> Script:
    """Keys that a careless table confuses, in three tables, then under another salt in an index of another size."""
    script = table_store(1000, 1, seed=1, optimizer=ADAM)
    present, keys = KINDS[kind](script, 1000)
    tables = np.zeros(1000, np.int64) if "home" in kind or "one" in kind else script.rng.integers(0, 3, 1000)
    script.fill(np.repeat(as_keys(present), 3), np.tile(np.arange(3), len(present)))
    script.find(keys, tables)
    script.find_or_insert(keys, tables)
    script.find(keys, (tables + 1) % 3)
    script.rebuild(700, salt=99)
    script.find_or_insert(script.rng.permutation(keys), tables)
    script.erase(np.where(np.arange(1000) % 3, keys, U64(12345)), tables)
    script.find(keys, tables)
    script.find_or_insert(keys[::-1], tables)
    return script


@case("table-300000_keys")
def table_large() -> Script:
    """More blocks of 1,024 keys, and of 1,024 rows, than a block has threads; most rows are freed ones."""
    script = Script(slabs=(100_000, 200_000), dim=1, num_tables=1, num_buckets=1 << 13)
    script.fill(np.arange(1000))
    store = script.store
    store.records[:289_000, 3] = np.arange(1000, 290_000)
    store.counters[[NUM_ALLOCATED, FREE_BEGIN, FREE_END]] = 290_000, 0, 289_000
    keys = script.rng.integers(0, 12_000, 300_000)
    script.find_or_insert(keys)
    script.erase(script.rng.integers(6000, 20_000, 300_000))
    script.find_or_insert(keys)
    return script


@case("table-24_slabs")
def table_slabs() -> Script:
    """As many slabs as a store can have, of one row and of a hundred."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=3, num_tables=3, optimizer=ADAGRAD)
    keys = script.rng.permutation(np.arange(1000))
    script.find_or_insert(keys, np.arange(1000) % 3)
    script.erase(keys[:1000:7], np.arange(0, 1000, 7) % 3)
    script.find_or_insert(keys[::-1], np.arange(1000) % 3)
    return script


@case("table-one_key_5000_times")
def table_one_key() -> Script:
    """New, then present, then erased by 5,000 at once."""
    script = table_store(5000, SIZES.index(5000), seed=2)
    script.fill(script.distinct(100), 0)
    keys = np.full(5000, 2**64 - 2, np.uint64)
    for call in (script.find_or_insert, script.find, script.find_or_insert, script.erase, script.find_or_insert):
        call(keys)
    return script


@case("table-unknown_tables")
def table_unknown_tables() -> Script:
    """Numbers of tables that the store does not have: nothing found, nothing inserted, nothing touched."""
    script = Script(slabs=(5, 7, 300), num_tables=3)
    script.fill(range(40), np.arange(40) % 3)
    keys, tables = np.arange(33), np.resize([0, 1, 2, 3, 2**24, 2**31, 2**32 - 2, 2**32 - 1], 33)
    script.find(keys, tables)
    script.find_or_insert(keys, tables)
    script.erase(keys, tables)
    script.find_or_insert(np.where(keys % 2, U64(PADDING_KEY), as_keys(keys)), tables)
    return script


@case("table-few_rows_left")
def table_few_rows_left() -> Script:
    """The first new keys by position get the rows that are left; then none is left; then freed ones, ascending."""
    script = Script(slabs=(5, 7), num_tables=3, optimizer=ADAGRAD)
    rng = script.rng
    tables = rng.integers(0, 3, 33)
    script.fill(range(7), 0)
    script.find_or_insert(np.r_[np.arange(30, 40), rng.integers(0, 20, 23)], np.r_[np.zeros(10, int), tables[10:]])
    script.find_or_insert(rng.integers(0, 60, 33), tables)
    script.erase(np.resize([3, 6, 0, 31, 3, 2**50, PADDING_KEY], 33), 0)
    script.find_or_insert(np.resize([2**40, 3, 2**41, 2**42, 0, 2**43], 33), 0)
    script.erase(np.resize([1, 2**40, 4], 33), 0)
    script.find_or_insert(np.resize([77, PADDING_KEY, 78, 77], 33), tables % 2)
    script.find_or_insert(np.arange(100, 133), tables)
    return script


@cases("table-{0}_new_keys_for_8_rows", 33, 257, 5000)
def table_far_too_many(num_keys: int) -> Script:
    """More new keys than rows, and than entries in the index: eight get rows, the others leave no trace."""
    script = Script(slabs=(8,), num_tables=1, num_buckets=16)
    keys = script.distinct(num_keys)
    script.find_or_insert(keys)
    script.find_or_insert(keys[::-1])
    script.find(keys)
    return script


@cases("table-index_of_{0}_buckets", 1, 2, 3)
def table_crowded_index(num_buckets: int) -> Script:
    """An index with fewer entries than the store has rows: keys without an entry are refused and counted apart."""
    script = Script(slabs=(5, 7, 300), num_tables=3, num_buckets=num_buckets)
    keys = script.distinct(20, low=3)
    script.fill(keys[:3], np.arange(3))
    asked = script.rng.choice(keys, 257)
    script.find_or_insert(asked, np.arange(257) % 3)
    script.find(asked, np.arange(257) % 3)
    script.find_or_insert(asked[::-1], np.arange(257) % 3)
    script.rebuild(160)
    script.find_or_insert(asked, np.arange(257) % 3)
    return script


@cases("table-300_keys_of_home_{0}", 100, 4095)
def table_aimed(bucket: int) -> Script:
    """More keys of one home than a walk is long: the first 256 by position get entries; erasing makes room for more."""
    script = Script(slabs=(5, 7, 588), num_buckets=4096, num_tables=1)
    rng = script.rng
    aimed = rng.permutation(script.keys_of_homes([bucket], 300))
    keys = rng.permutation(np.r_[aimed, script.distinct(100)])
    script.find_or_insert(keys)
    script.find_or_insert(rng.permutation(np.r_[keys[:350], np.full(50, aimed[-1])]))
    script.find(keys)
    placed = [key for key in aimed.tolist() if (0, key) in script.store.row_of]
    script.erase(np.resize(as_keys(placed[10:60]), 400))
    script.find_or_insert(keys)
    script.find(keys)
    return script


@case("table-320_keys_of_8_homes")
def table_aimed_around() -> Script:
    """Walks that overlap: who gets an entry depends on the order, which is that of the positions."""
    script = Script(slabs=(5, 7, 588), num_buckets=4096, num_tables=1)
    aimed = script.keys_of_homes(range(4090, 4098 - 2), 320)
    keys = script.rng.permutation(np.r_[aimed, script.distinct(80)])
    script.find_or_insert(keys)
    script.find_or_insert(keys[::-1])
    script.find(keys)
    return script


@cases("table-walk_of_{0}_keys", 1, 4, 5, 33, 128, 255, 256)
def table_longest_walk(num_keys: int) -> Script:
    """Keys of one home fill bucket after bucket, in any order: the longest walk is known exactly."""
    script = Script(slabs=(5, 307), num_buckets=512)
    script.has_exact_probes = True
    keys = np.resize(script.keys_of_homes([500], num_keys), 256)
    script.find_or_insert(keys)
    script.rebuild(512)
    script.erase(np.resize(keys[:1], 256))
    return script


@case("table-longest_walk_of_one_warp")
def table_longest_walk_present() -> Script:
    """A find_or_insert of present keys walks too, and says how far."""
    script = Script(slabs=(5, 307), num_buckets=512)
    script.has_exact_probes = True
    keys = script.keys_of_homes([3], 32)
    script.fill(keys)
    script.store.counters[LONGEST_PROBE] = 0
    script.find_or_insert(keys)
    return script


@case("table-erase_all_and_refill")
def table_erase_all() -> Script:
    """Every row is freed and handed out again, ascending, whatever the order of erasing; twice."""
    script = Script(slabs=(5, 7, 300), num_tables=3, optimizer=ROWWISE_ADAGRAD)
    rng = script.rng
    keys, tables = script.distinct(312, low=1), np.arange(312) % 3
    script.fill(keys[:200], tables[:200])
    for _ in range(2):
        script.find_or_insert(keys, tables)
        order = rng.permutation(312)
        script.erase(keys[order], tables[order])
        order = rng.permutation(312)
        script.find_or_insert(keys[order] + U64(rng.integers(2)), tables[order])
    return script


@case("table-erase_again_and_again")
def table_erase_in_parts() -> Script:
    """Freed rows of several erasures are one ascending list, used up before fresh rows."""
    script = Script(slabs=(5, 7, 300), num_tables=1, optimizer=ADAM)
    keys = script.distinct(200, low=1)
    script.fill(keys)
    for part in (keys[150:160], keys[20:50], keys[145:155], keys[:33]):
        script.erase(np.resize(part, 33))
        script.find_or_insert(script.distinct(33, low=int(part[0]) + 2**50)[:12])
    return script


@case("table-erase_absent_keys")
def table_erase_absent() -> Script:
    """Nothing is there to erase: generation and rows stay."""
    script = Script(slabs=(5, 7, 300), optimizer=ADAGRAD)
    script.fill(range(100))
    script.erase(np.arange(1000, 1033))
    script.erase(np.full(33, PADDING_KEY, np.uint64))
    return script


@case("table-erase_absent_keys_after_reuse")
def table_erase_absent_after_reuse() -> Script:
    """Of the freed rows some are in use again, and nothing is erased: the list is made anew all the same."""
    script = Script(slabs=(5, 7, 300), optimizer=ADAGRAD)
    script.fill(range(100))
    script.erase(np.arange(40, 73))
    script.find_or_insert(np.resize(np.arange(1000, 1010), 33))
    script.erase(np.arange(5000, 5033))
    script.find_or_insert(np.arange(2000, 2033))
    return script


# Batches: plan, lookup, lookup_find, lookup_planned, update ---------------------------------------------------


def all_batch_ops(script: Script, batch: Batch, **update) -> Script:
    """All targets that take a batch; the store holds some of its keys."""
    script.plan(batch)
    script.lookup_find(batch)
    row_ids = script.lookup(batch)
    script.lookup_find(batch)
    script.update(batch, row_ids, **update)
    some = np.where(script.rng.random(len(row_ids)) < 0.1, np.uint32(NO_ROW), row_ids)
    script.lookup_planned(batch, some)
    return script


@cases("batch-{0}_keys", *SIZES)
def batch_sizes(num_keys: int) -> Script:
    """Single keys, around the sizes of warps, blocks and tiles."""
    number = SIZES.index(num_keys) + 1
    script = table_store(num_keys, number, seed=num_keys)
    table = script.store.num_tables - 1
    present = script.distinct(max(num_keys, 3) // 3, low=9)
    script.fill(present, table)
    return all_batch_ops(script, Batch(single(script.mixed(num_keys, present), table)), row_gradient=number % 3)


@case("batch-300000_keys")
def batch_large() -> Script:
    """More blocks than a block has threads; more positions than any chunk of the CPU."""
    script = Script(slabs=(100_000, 50_000), dim=1, optimizer=ADAGRAD, num_buckets=1 << 14)
    script.fill(np.arange(1000))
    keys = (2.0 ** script.rng.uniform(0, 14, 300_000)).astype(np.uint64)  # key 1 has some 20,000 uses
    batch = Batch(single(keys[:200_000], 0), fixed(keys[200_000:], 0, MEAN, 10))
    script.plan(batch)
    script.update(batch, script.lookup(batch))
    return script


@case("batch-24_slabs")
def batch_slabs() -> Script:
    """As many slabs as a store can have, of one row and of a hundred."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=3, num_tables=1, optimizer=ADAM)
    script.fill(np.arange(100))
    return all_batch_ops(script, Batch(single(script.rng.permutation(np.arange(1000)), 0)))


@case("batch-one_key_5000_times")
def batch_one_key() -> Script:
    """A hot key and nothing else; a sum of 157 chunks."""
    script = table_store(5000, SIZES.index(5000) + 1, seed=2)
    script.fill(script.distinct(30, low=9), 0)
    return all_batch_ops(
        script, Batch(single(np.full(5000, 2**63, np.uint64), script.store.num_tables - 1)), row_gradient=1
    )


@cases("batch-keys_{0}", *KINDS)
def batch_kinds(kind: str) -> Script:
    """The same keys in three tables: single, in bags of five, in ragged bags."""
    script = Script(slabs=(5, 7, 2500), num_tables=3, dim=8, optimizer=ADAGRAD)
    present, keys = KINDS[kind](script, 1000)
    keys = as_keys(keys)
    script.fill(np.repeat(as_keys(present), 3), np.tile(np.arange(3), len(present)))
    offsets = np.r_[0, np.sort(script.rng.integers(0, 1000, 63)), 1000]
    batch = Batch(
        single(keys, 0),
        fixed(keys[::-1], 1, MEAN, 5, script.weights(1000)),
        ragged(np.roll(keys, 7), 2, SQRTN, offsets),
    )
    return all_batch_ops(script, batch)


@case("batch-few_rows_left")
def batch_few_rows_left() -> Script:
    """Refused keys give their initial rows and take no gradient; first come by position, over all features."""
    script = Script(slabs=(5, 7, 20), num_tables=3, dim=12, optimizer=ADAM)
    script.fill(range(9), 0)

    def keys(num):
        return script.rng.integers(0, 40, num)

    weights = script.weights(40)
    for _ in range(2):
        batch = Batch(
            ragged(keys(40), 0, MEAN, np.r_[0, 0, 3, 20, 39], weights),
            single(keys(33), 1),
            fixed(keys(60), 0, SUM, 4),
            single(keys(10), 2),
        )
        script.update(batch, script.lookup(batch))
    script.erase(np.arange(33), 0)
    script.update(batch, script.lookup(batch))
    return script


@case("batch-5000_new_keys_for_8_rows")
def batch_far_too_many() -> Script:
    """More new keys than entries in the index, in bags of 16."""
    script = Script(slabs=(8,), num_tables=1, num_buckets=16, dim=8)
    batch = Batch(single(script.distinct(904), 0), fixed(script.distinct(4096), 0, MEAN, 16))
    script.update(batch, script.lookup(batch))
    script.lookup(batch)
    return script


@case("batch-index_of_2_buckets")
def batch_crowded_index() -> Script:
    """Keys without an entry, in bags and single."""
    script = Script(slabs=(5, 7, 300), num_tables=3, num_buckets=2, dim=7)
    keys = script.distinct(20, low=3)
    script.fill(keys[:3], 1)
    batch = Batch(
        single(script.rng.choice(keys, 33), 1),
        ragged(script.rng.choice(keys, 100), 2, SUM, [0, 50, 50, 90]),
        fixed(script.rng.choice(keys, 60), 1, MEAN, 3, script.weights(60)),
    )
    script.lookup_find(batch)
    script.update(batch, script.lookup(batch))
    script.lookup(batch)
    return script


@case("batch-300_keys_of_one_home")
def batch_aimed() -> Script:
    """First come by position, over features and bags."""
    script = Script(slabs=(5, 7, 588), num_buckets=4096, dim=4)
    aimed = script.rng.permutation(script.keys_of_homes([77], 300))
    batch = Batch(
        single(np.r_[aimed[:120], aimed[:30]], 0),
        ragged(np.r_[aimed[100:], aimed[:50]], 0, SUM, [0, 100, 100, 101, 250]),
    )
    script.lookup(batch)
    script.update(batch, script.lookup(batch))
    script.lookup_find(batch)
    return script


# Bags ----------------------------------------------------------------------------------------------------------

LENGTHS = (0, 0, 1, 500, 2, 0, 33, 257, 31, 32, 64, 0, 3, 129, 0)


def bag_features(script: Script, lengths, combiners=(SUM, MEAN, SQRTN), table=0) -> list[Feature]:
    """Ragged features of all combiners, without weights and with; some keys have rows, some are padding."""
    offsets = np.r_[0, np.cumsum(lengths)]
    num_keys = int(offsets[-1])
    present = script.distinct(200, low=9)
    if script.initial is None and (table, int(present[0])) not in script.store.row_of:
        script.fill(present, table)
    return [
        ragged(
            script.mixed(num_keys, present), table, combiner, offsets, script.weights(num_keys) if weighted else None
        )
        for combiner in combiners
        for weighted in (False, True)
    ]


@cases("bags-ragged_of_dim_{0}", 12, 7)
def bags_ragged(dim: int) -> Script:
    """Bags of 0 to 500 keys; empty ones first, in between and last."""
    script = Script(slabs=(5, 7, 4000), dim=dim, optimizer=ADAGRAD)
    return all_batch_ops(script, Batch(*bag_features(script, LENGTHS)))


@case("bags-one_key_500_times")
def bags_one_key() -> Script:
    """Long bags of one new key: within the call it is found after its first position, also by its own bag."""
    script = Script(slabs=(5, 7, 300), dim=16)
    offsets = [0, 500, 500, 1000]
    batch = Batch(*(ragged(np.full(1000, 2**63 + c), 0, c, offsets) for c in (SUM, MEAN, SQRTN)))
    return all_batch_ops(script, batch, row_gradient=SQRT_OF_USES)


@case("bags-of_fixed_size")
def bags_fixed() -> Script:
    """1 (with weights), 2, 5, 33, 100 and 500 keys a bag, with padding anywhere."""
    script = Script(slabs=(5, 7, 3000), dim=8, num_tables=3, optimizer=ROWWISE_ADAGRAD)
    present = script.distinct(200, low=9)
    script.fill(present, 1)
    features = [
        fixed(script.mixed(h * n, present), t % 3, 1 + t % 3, h, script.weights(h * n) if t % 2 else None)
        for t, (h, n) in enumerate([(2, 257), (1, 300), (5, 33), (33, 9), (500, 2), (100, 7)])
    ]
    return all_batch_ops(script, Batch(*features), row_gradient=MEAN_OF_USES)


@case("bags-many_tiles")
def bags_many_tiles() -> Script:
    """More than 256 bags a feature; a tile of empty bags."""
    script = Script(slabs=(5, 7, 3000), dim=4)
    lengths = np.r_[np.zeros(257, int), script.rng.integers(0, 4, 400), np.zeros(30, int)]
    return all_batch_ops(script, Batch(*bag_features(script, lengths, (SUM, MEAN))))


@case("bags-weights_of_sum_zero")
def bags_zero_sums() -> Script:
    """Weights that cancel or vanish: zeros for mean, and no gradient; sum and sqrtn go by their own rules."""
    script = Script(slabs=(5, 7, 300), dim=8, optimizer=ADAM)
    script.fill(range(40), 0)
    weights = np.array([1, -1, 0, 0, 2, 1, 0.5, -0.5, 3, 0, 0, 1, -1, 1, -1, 4], F32)
    offsets = [0, 2, 4, 5, 8, 9, 11, 15, 15, 16]
    keys = script.rng.integers(0, 60, (4, 16))
    batch = Batch(*(ragged(keys[combiner], 0, combiner, offsets, weights) for combiner in (SUM, MEAN, SQRTN)))
    return all_batch_ops(script, batch)


@case("bags-empty")
def bags_empty() -> Script:
    """Features without keys, without bags, with neither; bags without keys, and of padding alone."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(range(40), 1)
    none = np.zeros(0, np.uint64)
    batch = Batch(
        ragged(none, 0, SUM, [0, 0, 0, 0, 0]),
        single(none, 1),
        ragged(none, 2, MEAN, [0]),
        ragged(script.rng.integers(0, 60, 33), 1, MEAN, [0, 0, 10, 10, 33]),
        ragged(np.full(8, PADDING_KEY, np.uint64), 1, SQRTN, [0, 4, 4, 8]),
        fixed(np.full(12, PADDING_KEY, np.uint64), 2, MEAN, 4),
        ragged(none, 0, SUM, [0, 0]),
    )
    return all_batch_ops(script, batch)


@cases("bags-only_empty_{0}", "bags", "features")
def bags_only_empty(what: str) -> Script:
    """A batch without a key."""
    script = Script(slabs=(5, 7, 300), dim=8)
    script.fill(range(40))
    feature = ragged([], 0, MEAN, [0] * 34) if what == "bags" else ragged([], 0, MEAN, [0])
    return all_batch_ops(script, Batch(feature))


@case("bags-40_features")
def bags_40_features() -> Script:
    """Every kind of feature at once, more than a warp has lanes, over three tables."""
    script = Script(slabs=(5, 7, 3000), dim=8, num_tables=3, optimizer=ROWWISE_ADAGRAD)
    present = script.distinct(100, low=9)
    script.fill(np.repeat(present, 3), np.tile(np.arange(3), 100))
    features = []
    for i in range(40):
        table, combiner, n = i % 3, 1 + i // 4 % 3, int(script.rng.integers(0, 70))
        weights = script.weights(n) if i % 5 == 0 else None
        unknown_zeros = table == 2
        keys = script.mixed(n, present)
        if i % 4 == 0:
            features.append(single(keys, table, unknown_zeros=unknown_zeros))
        elif i % 4 == 1:
            h = 1 + i // 4 % 5
            n = n // h * h
            weights = None if weights is None else weights[:n]
            features.append(fixed(keys[:n], table, combiner, h, weights, unknown_zeros=unknown_zeros))
        else:
            offsets = np.r_[0, np.sort(script.rng.integers(0, n + 1, i)), n]
            features.append(ragged(keys, table, combiner, offsets, weights, unknown_zeros=unknown_zeros))
    return all_batch_ops(script, Batch(*features), row_gradient=SQRT_OF_USES)


@case("bags-70_tables")
def bags_70_tables() -> Script:
    """More tables than the GPU counts in shared memory, each with keys of the same numbers."""
    script = Script(slabs=(5, 7, 1200), dim=4, num_tables=70)
    script.fill(np.repeat(np.arange(5), 70), np.tile(np.arange(70), 5))
    keys = np.where(script.rng.random((70, 10)) < 0.1, -1, script.rng.integers(0, 12, (70, 10))).astype(U64)
    features = [single(keys[t], t) if t % 2 else ragged(keys[t], t, MEAN, [0, 3, 3, 10]) for t in range(70)]
    return all_batch_ops(script, Batch(*features))


@case("bags-unknown_keys_as_zeros")
def bags_unknown_zeros() -> Script:
    """find: a key without a row gives zeros, and counts in the divisor."""
    script = Script(slabs=(5, 7, 300), dim=8)
    script.fill(range(20))
    keys = script.rng.integers(0, 60, 33)
    script.lookup_find(
        Batch(
            *(ragged(keys, 0, c, [0, 10, 10, 33], unknown_zeros=True) for c in (SUM, MEAN, SQRTN)),
            ragged(keys, 0, MEAN, [0, 10, 10, 33], script.weights(33), unknown_zeros=True),
            single(keys, 0, unknown_zeros=True),
        )
    )
    return script


BATCH_OPS = ("plan", "lookup_find", "lookup", "lookup_planned", "update")


def one_batch_op(script: Script, op: str, batch: Batch) -> Script:
    """One target alone, so that a case is about it."""
    row_ids = np.where(batch.is_asked, script.store.find(batch.keys, batch.tables), np.uint32(NO_ROW))
    more = {"lookup_planned": (row_ids,), "update": (row_ids,)}.get(op, ())
    getattr(script, op)(batch, *more)
    return script


def batch_with_loose_ends(keys) -> Batch:
    """Positions before the first bag, after the last one, and without any bag."""
    return Batch(
        ragged(keys(64, 5, 40), 0, MEAN, [5, 10, 10, 33, 40]),
        single(keys(5, 0, 5), 1),
        ragged(keys(64, 0, 1), 1, SUM, [0, 1]),
        ragged(keys(64, 64, 64), 2, SQRTN, [64]),
        ragged(keys(64, 60, 64), 2, SUM, [60, 64, 64], np.full(64, 0.5, F32)),
        ragged(keys(300, 7, 290), 0, MEAN, np.r_[np.full(300, 7), 290]),
    )


@cases("bags-padding_in_no_bag-{0}", *BATCH_OPS)
def bags_padding_in_no_bag(op: str) -> Script:
    """Padding before the first bag and after the last one is counted: what features.py makes of a traced batch."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20))

    def keys(num, first, last):
        where = np.arange(num)
        return np.where((where < first) | (where >= last), -1, script.rng.integers(0, 40, num)).astype(U64)

    return one_batch_op(script, op, batch_with_loose_ends(keys))


@cases("bags-keys_in_no_bag-{0}", *BATCH_OPS)
def bags_keys_in_no_bag(op: str) -> Script:
    """Keys before the first bag and after the last one are padding, whatever they are."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20))
    return one_batch_op(script, op, batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)))


@cases("bags-offsets_outside-{0}", *BATCH_OPS)
def bags_offsets_outside(op: str) -> Script:
    """Negative offsets, and offsets past the end, are clamped."""
    script = Script(slabs=(5, 7, 300), dim=8)
    script.fill(range(20))
    keys = script.rng.integers(0, 40, 64)
    batch = Batch(
        ragged(keys, 0, SUM, [-(10**8), -1, 3, 60, 65, 10**9]),
        ragged(keys, 0, MEAN, [-(2**31), 2**31 - 1]),
        ragged(keys, 0, SQRTN, [0, 64, 70, 70]),
    )
    return one_batch_op(script, op, batch)


# Dims ----------------------------------------------------------------------------------------------------------


def mostly_two(script: Script, keys: np.ndarray, num: int) -> np.ndarray:
    """`num` positions: one key hot, one warm, of the others a few uses each."""
    found = np.where(np.arange(num) % 8 == 7, script.rng.choice(keys[2:], num), keys[0])
    found[::33] = keys[1]
    return found


@cases("dim-{0}", *DIMS)
def dims(dim: int) -> Script:
    """Every shape of a row: read, initialized, combined, summed over few, some and many uses, stepped."""
    number = DIMS.index(dim)
    script = Script(slabs=SLABS[number % 3], dim=dim, num_tables=3, optimizer=number % 4, seed=dim)
    present = script.distinct(20, low=9)
    script.fill(present, 0)
    hot = mostly_two(script, present, 1250)
    lengths = (0, 33, 1, 0, 12, 2, 64, 3, 0)
    num_keys = sum(lengths)
    offsets = np.r_[0, np.cumsum(lengths)]
    batch = Batch(
        ragged(hot, 0, SUM, np.r_[0, np.sort(script.rng.integers(0, 1250, 60)), 1250]),
        single(script.mixed(40, present), 0),
        ragged(script.mixed(num_keys, present), 1, MEAN, offsets, script.weights(num_keys)),
        fixed(script.mixed(24, present), 2, SQRTN, 3),
    )
    script.lookup_find(batch)
    script.update(batch, script.lookup(batch), row_gradient=number % 3)
    return script


@cases("combine-dim_{0}", *DIMS)
def combine_dims(dim: int) -> Script:
    """Combine and its transpose, with a row of more than 1,024 uses."""
    number = DIMS.index(dim)
    script = Script(dim=dim, seed=dim)
    inverse = np.where(script.rng.random(1400) < 0.8, 3, script.rng.integers(-2, 23, 1400))
    offsets = np.r_[0, np.sort(script.rng.integers(0, 1400, 63)), 1400]
    weights = script.weights(1400) if number % 2 else None
    script.combine(ragged(np.zeros(1400), 0, 1 + number % 3, offsets, weights), inverse, 20)
    return script


@cases("combine-{0}_keys", *SIZES)
def combine_sizes(num_keys: int) -> Script:
    """As many positions, bags or rows as threads, warps, blocks; padding is what lies outside the rows."""
    number = SIZES.index(num_keys)
    script = Script(dim=(4, 3, 8)[number % 3], seed=num_keys)
    num_unique = max(1, num_keys // (1 + number % 3))
    inverse = script.rng.integers(-1, num_unique + 1, num_keys)
    inverse[::17] = np.resize([-(2**31), 2**31 - 1], len(inverse[::17]))
    num_bags = max(1, num_keys // (1 + (number + 1) % 3))
    offsets = np.r_[0, np.sort(script.rng.integers(0, num_keys + 1, num_bags - 1)), num_keys]
    weights = script.weights(num_keys) if number % 2 else None
    script.combine(ragged(np.zeros(num_keys), 0, 1 + number % 3, offsets, weights), inverse, num_unique)
    return script


@case("combine-of_fixed_size")
def combine_fixed() -> Script:
    """Bags of one size, of 500 keys, weights of sum zero, no bags, no rows."""
    script = Script(dim=8)

    def inverse(num):
        return script.rng.integers(-1, 34, num)

    script.combine(fixed(np.zeros(1000), 0, MEAN, 500), inverse(1000), 33)
    script.combine(fixed(np.zeros(257), 0, SQRTN, 1, script.weights(257)), inverse(257), 33)
    zero = np.array([1, -1, 0, 0, 2, 1], F32)
    for combiner in (SUM, MEAN, SQRTN):
        script.combine(ragged(np.zeros(6), 0, combiner, [0, 2, 4, 6], zero), np.arange(6) % 4, 4)
    script.combine(ragged(np.zeros(6), 0, MEAN, [0]), np.arange(6) % 4, 4)
    script.combine(ragged(np.zeros(6), 0, MEAN, [0, 3, 6]), np.arange(6), 0)
    return script


@case("combine-odd_offsets")
def combine_odd_offsets() -> Script:
    """Positions in no bag, offsets outside."""
    script = Script(dim=8)
    script.combine(ragged(np.zeros(64), 0, MEAN, [5, 10, 10, 40]), script.rng.integers(-1, 11, 64), 10)
    script.combine(ragged(np.zeros(64), 0, SUM, [-9, 3, 70, 90]), script.rng.integers(-1, 11, 64), 10)
    return script


@cases("transpose-{0}_keys", *SIZES)
def transpose_sizes(num_keys: int) -> Script:
    """Three features over one list of rows: single keys, weighted bags of two, ragged bags with loose positions."""
    number = SIZES.index(num_keys)
    script = Script(dim=(3, 8, 66)[number % 3], seed=num_keys)
    half, num_unique = num_keys // 2 * 2, max(1, num_keys // 2)
    first, last = num_keys // 7, num_keys - num_keys // 9
    offsets = np.r_[first, np.sort(script.rng.integers(first, last + 1, num_keys // 3)), last]
    batch = Batch(
        single(np.zeros(num_keys)),
        fixed(np.zeros(half), 1, 1 + number % 3, 2, script.weights(half)),
        ragged(np.zeros(num_keys), 2, 1 + (number + 1) % 3, offsets),
    )
    inverse = script.rng.integers(-1, num_unique + 1, len(batch.keys))
    inverse[::17] = np.resize([-(2**31), 2**31 - 1], len(inverse[::17]))
    script.transpose(batch, inverse, num_unique)
    return script


@cases("transpose-dim_{0}", *DIMS)
def transpose_dims(dim: int) -> Script:
    """A row with uses in all features, more than 1,024 of them; one with none; numbers of uses."""
    script = Script(dim=dim, seed=dim)
    lengths = np.resize([0, 33, 1, 2, 64], 40)
    num_keys = int(lengths.sum())
    offsets = np.r_[0, np.cumsum(lengths)]
    batch = Batch(
        ragged(np.zeros(num_keys), 0, 1 + dim % 3, offsets, script.weights(num_keys)),
        single(np.zeros(600)),
        fixed(np.zeros(300), 0, SQRTN, 3),
    )
    inverse = np.where(script.rng.random(len(batch.keys)) < 0.8, 3, script.rng.integers(-2, 40, len(batch.keys)))
    script.transpose(batch, np.where(inverse == 5, -1, inverse), 38)
    return script


@case("transpose-one_row")
def transpose_one_row() -> Script:
    """Every position of every feature uses the same row; then none uses any; then there is no row."""
    script = Script(dim=8)
    batch = Batch(single(np.zeros(700)), fixed(np.zeros(900), 0, MEAN, 3), single(np.zeros(33)))
    for inverse, num_unique in ((np.zeros(1633, int), 1), (np.full(1633, 9), 9), (np.full(1633, -1), 3)):
        script.transpose(batch, inverse, num_unique)
    script.transpose(batch, np.zeros(1633, int), 0)
    return script


@case("transpose-divisors_of_zero")
def transpose_zero_divisors() -> Script:
    """Keys of a bag whose weights cancel or vanish are no uses of their rows, but with sum; padding does not count."""
    script = Script(dim=8)
    weights = np.array([1, -1, 0, 0, 2, 1, 0.5, -0.5, 3, 0, 0, 1, -1, 1, -1, 4], F32)
    offsets = [0, 2, 4, 5, 8, 9, 11, 15, 15, 16]
    batch = Batch(*(ragged(np.zeros(16), 0, c, offsets, weights) for c in (SUM, MEAN, SQRTN)), single(np.zeros(5)))
    script.transpose(batch, np.arange(53) % 16, 16)
    script.transpose(batch, np.where(np.arange(53) % 3 == 1, -1, np.arange(53) % 7), 8)
    return script


@case("transpose-odd_offsets")
def transpose_odd_offsets() -> Script:
    """Positions in no bag, offsets outside, features without keys and without bags."""
    script = Script(dim=8)
    batch = Batch(
        single([]),
        ragged(np.zeros(64), 0, MEAN, [5, 10, 10, 40]),
        ragged([], 0, SUM, [0, 0, 0]),
        ragged(np.zeros(64), 0, SUM, [-9, 3, 70, 90]),
        ragged(np.zeros(64), 0, SQRTN, [64]),
        single(np.zeros(64)),
        ragged(np.zeros(300), 0, MEAN, np.r_[np.full(300, 7), 290]),
    )
    script.transpose(batch, script.rng.integers(-1, 11, len(batch.keys)), 10)
    return script


@case("transpose-not_finite")
def transpose_not_finite() -> Script:
    """Infinite sums are given as they are; nobody skips them here."""
    script = Script(dim=8)
    batch = Batch(single(np.zeros(40)), fixed(np.zeros(40), 0, SUM, 2))
    gradients = [script.normal(f.num_bags, 8) for f in batch.features]
    gradients[0][3, 2], gradients[1][5, 0] = np.inf, -np.inf
    gradients[0][7:9, 1] = 3e38
    script.transpose(batch, np.arange(80) // 4 % 13, 13, gradients)
    return script


@case("transpose-40_features")
def transpose_40_features() -> Script:
    """Every kind of feature at once, more than a warp has lanes; more than one tile of bags."""
    script = Script(dim=12)
    features = []
    for i in range(40):
        combiner, n = 1 + i // 4 % 3, int(script.rng.integers(0, 400))
        weights = script.weights(n) if i % 5 == 0 else None
        if i % 4 == 0:
            features.append(single(np.zeros(n)))
        elif i % 4 == 1:
            h = 1 + i // 4 % 5
            n = n // h * h
            features.append(fixed(np.zeros(n), 0, combiner, h, None if weights is None else weights[:n]))
        else:
            features.append(
                ragged(np.zeros(n), 0, combiner, np.r_[0, np.sort(script.rng.integers(0, n + 1, 9 * i)), n], weights)
            )
    batch = Batch(*features)
    script.transpose(batch, script.rng.integers(-3, 900, len(batch.keys)), 890)
    return script


# Requests: plan_requests, gather -------------------------------------------------------------------------------

NUM_SHARDS = (1, 2, 3, 8, 64)


def batch_of_tables(script: Script, keys: np.ndarray) -> Batch:
    """The same keys in three tables: single, in bags of one size, in ragged bags with loose positions."""
    n = len(keys)
    offsets = np.r_[n // 5, np.sort(script.rng.integers(n // 5, n - n // 6 + 1, n // 4)), n - n // 6]
    fives = n // 5 * 5
    return Batch(single(keys, 0), fixed(keys[::-1][:fives], 1, MEAN, 5), ragged(np.roll(keys, 7), 2, SUM, offsets))


@cases("requests-{0}_keys", *SIZES)
def requests_sizes(num_keys: int) -> Script:
    """Around the sizes of warps, blocks and chunks, for several numbers of shards."""
    number = SIZES.index(num_keys)
    script = Script(num_tables=3, seed=num_keys)
    batch = batch_of_tables(script, script.mixed(num_keys, range(20)))
    for num_shards in (NUM_SHARDS[number % 5], NUM_SHARDS[(number + 2) % 5]):
        script.plan_requests(batch, num_shards)
    return script


@cases("requests-of_{0}_shards", *NUM_SHARDS, 5, 1000, 65536)
def requests_shards(num_shards: int) -> Script:
    """Every number of shards, with keys of all partitions; most of the last have no owner of a key."""
    script = Script(num_tables=3, seed=num_shards)
    script.plan_requests(batch_of_tables(script, script.mixed(1500, range(200))), num_shards)
    return script


@case("requests-300000_keys")
def requests_large() -> Script:
    """More blocks than a block has threads; more positions than any chunk of the CPU; keys used often and once."""
    script = Script(num_tables=2)
    keys = (2.0 ** script.rng.uniform(0, 24, 300_000)).astype(np.uint64)
    batch = Batch(single(keys[:200_000], 0), fixed(keys[200_000:], 1, MEAN, 10))
    script.plan_requests(batch, 8, on={1: 3})
    return script


@cases("requests-keys_{0}", *KINDS)
def requests_kinds(kind: str) -> Script:
    """Keys that a careless plan confuses."""
    script = Script(slabs=(5, 7, 2500), num_tables=3)
    _, keys = KINDS[kind](script, 1000)
    script.plan_requests(batch_of_tables(script, as_keys(keys)), 8)
    return script


@case("requests-one_key_5000_times")
def requests_one_key() -> Script:
    """One request, used 5,000 times; each table has another owner for it, or the same."""
    script = Script(num_tables=3)
    script.plan_requests(batch_of_tables(script, np.full(5000, 2**63, np.uint64)), 64)
    return script


@case("requests-of_one_owner")
def requests_one_owner() -> Script:
    """All keys of one shard, whichever: the others get none."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(700, range(200)))
    for owner in (0, 2, 7):
        script.plan_requests(batch, 8, owners=owner)
    script.plan_requests(batch, 8, on={0: 5, 1: 5, 2: 5})
    return script


@case("requests-of_pinned_tables")
def requests_pinned() -> Script:
    """Tables that lie on one shard beside one that is spread; owners in any order; the first and the last shard."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(700, range(200)))
    script.plan_requests(batch, 3, on={1: 0})
    script.plan_requests(batch, 8, owners=script.rng.integers(0, 8, NUM_PARTITIONS), on={0: 7, 2: 0})
    script.plan_requests(batch, 1, on={0: 0, 1: 0})
    return script


@case("requests-of_shards_that_are_not")
def requests_wrong_owners() -> Script:
    """Owners beyond the last shard, which Python refuses: they count as the last, and nothing outside is touched."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(700, range(200)))
    script.plan_requests(batch, 3, owners=script.rng.integers(0, 2**32, NUM_PARTITIONS), on={1: 2**32 - 2})
    script.plan_requests(batch, 1, owners=7, on={1: 3})
    return script


@case("requests-equal_hashes")
def requests_equal_hashes() -> Script:
    """Keys of three tables with one hash stay by first position; a real hash of all ones comes before the padding."""
    script = Script(num_tables=3)
    lines = script.store.tables
    hashes = [2**64 - 1, 0, 1, 2**52 - 1, 2**52, 2**63, *map(int, script.rng.integers(0, 2**63, 60))]
    keys = [as_keys([key_of_hash(h, line) for h in script.rng.permutation(as_keys(hashes)).tolist()]) for line in lines]
    assert np.array_equal(np.sort(partition_hashes(keys[1], np.resize(lines[1], (66, 16)))), np.sort(as_keys(hashes)))
    padded = [np.r_[one[:30], np.full(7, PADDING_KEY, np.uint64), one[30:], one[:9]] for one in keys]
    batch = Batch(single(padded[2], 2), single(padded[0], 0), fixed(padded[1], 1, SUM, 2))
    for num_shards in (1, 8):
        script.plan_requests(batch, num_shards)
        script.plan_requests(batch, num_shards, owners=0)
    return script


@case("requests-padding_alone")
def requests_padding() -> Script:
    """Padding, and keys in no bag: no request."""
    script = Script(num_tables=3)
    batch = Batch(
        single(np.full(300, PADDING_KEY, np.uint64), 0),
        ragged(range(64), 1, SUM, [64]),
        ragged(range(64), 2, SUM, [9, 9, 9]),
    )
    for num_shards in (1, 3):
        script.plan_requests(batch, num_shards)
    return script


@case("requests-odd_bags")
def requests_odd_bags() -> Script:
    """Keys before the first bag and after the last one are padding, whatever they are."""
    script = Script(num_tables=3)
    script.plan_requests(batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)), 8)
    return script


@case("requests-70_tables")
def requests_70_tables() -> Script:
    """Each with keys of the same numbers, and some on one shard."""
    script = Script(num_tables=70)
    keys = script.rng.integers(0, 12, (70, 30))
    script.plan_requests(Batch(*(single(keys[t], t) for t in range(70))), 8, on={t: t % 8 for t in range(0, 70, 3)})
    return script


GATHER_DIMS = (*DIMS, 130)


def gather_mixed(script: Script, num: int, unknown_zeros: Sequence[int] = ()) -> Script:
    """Requests with rows and without, padding with rows and without, tables that are not, in any order."""
    store, rng = script.store, script.rng
    script.fill(range(60), np.arange(60) % store.num_tables)
    keys = np.where(rng.random(num) < 0.2, U64(PADDING_KEY), rng.integers(0, 2**63, num).astype(np.uint64))
    tables = np.where(rng.random(num) < 0.05, rng.choice([store.num_tables, 2**24, 2**32 - 1], num), 0)
    tables = np.where(tables == 0, rng.integers(0, store.num_tables, num), tables)
    absent = rng.choice([NO_ROW, NO_ROW - 1, store.capacity, 2**31], num)
    row_ids = np.where(rng.random(num) < 0.3, absent, rng.integers(0, store.capacity, num))
    uses = np.where(rng.random(num) < 0.01, 10**6, rng.integers(0, 9, num))
    script.gather(keys, tables, row_ids, uses, unknown_zeros)
    return script


@cases("gather-dim_{0}", *GATHER_DIMS)
def gather_dims(dim: int) -> Script:
    """Every shape of a row, from one slab, two or three; tables with all kinds of initializers."""
    number = GATHER_DIMS.index(dim)
    return gather_mixed(Script(slabs=SLABS[number % 3], dim=dim, num_tables=3 + number % 2, seed=dim), 150, (1,))


@cases("gather-{0}_keys", *SIZES)
def gather_sizes(num_keys: int) -> Script:
    """Around the sizes of warps and blocks; more tables than the GPU counts in shared memory."""
    number = SIZES.index(num_keys)
    script = Script(slabs=SLABS[number % 3], dim=(8, 3, 64)[number % 3], num_tables=(1, 3, 70)[number % 3])
    return gather_mixed(script, num_keys, range(0, script.store.num_tables, 2))


@case("gather-24_slabs")
def gather_slabs() -> Script:
    """As many slabs as a store can have, of one row and of a hundred: every row, its neighbours' ends first."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=12, num_tables=1)
    script.fill(np.arange(640))
    script.gather(np.arange(1300), 0, np.r_[np.arange(650), np.arange(650)[::-1]])
    return script


@cases("gather-all_{0}", "present", "absent", "padding", "of_no_table")
def gather_all(what: str) -> Script:
    """Warps that agree: of rows alone, of new rows, of zeros."""
    script = Script(slabs=(5, 7, 300), dim=64, num_tables=3)
    script.fill(range(60), np.arange(60) % 3)
    keys = np.full(700, PADDING_KEY, np.uint64) if what == "padding" else np.arange(700)
    tables = np.full(700, 3) if what == "of_no_table" else np.arange(700) % 3
    row_ids = np.full(700, NO_ROW) if what == "absent" else script.rng.integers(0, 312, 700)
    script.gather(keys, tables, row_ids, np.arange(700), (0, 2))
    return script


@case("gather-300000_keys")
def gather_large() -> Script:
    """More blocks than fit any GPU at once; counts of one table from all of them."""
    script = Script(slabs=(100_000, 50_000), dim=4, num_buckets=1 << 14)
    script.fill(range(1000))
    script.store.rows[:] = script.normal(150_000, 4)
    script.gather(np.arange(300_000), 0, script.rng.integers(0, 200_000, 300_000), 3)
    return script


# Scatters: lines into per-row arrays ---------------------------------------------------------------------------


@cases("scatter-{0}_keys", *SIZES)
def scatter_sizes(num_keys: int) -> Script:
    """Lines of every number of bytes that the GPU tells apart, of all dtypes; rows twice, and absent ones between."""
    number = SIZES.index(num_keys)
    script = Script(slabs=SLABS[number % 3], num_tables=1, seed=number)
    rng = script.rng
    for width, dtype in ((1, F32), (2, np.uint32), (3, F32), (64, F32), (1, F16), (3, BF16), (4, BF16), (128, F16)):
        absent = rng.choice([NO_ROW, NO_ROW - 1, 312, 2**31], num_keys)
        script.scatter(np.where(rng.random(num_keys) < 0.2, absent, rng.integers(0, 312, num_keys)), width, dtype)
    return script


@case("scatter-24_slabs")
def scatter_slabs() -> Script:
    """As many slabs as a store can have: every row, its neighbours' ends first."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), num_tables=1)
    script.scatter(np.r_[np.arange(660), np.arange(660)[::-1]], 8, F32)
    return script


@case("scatter-200000_keys")
def scatter_large() -> Script:
    """More vectors than the GPU's grid has threads."""
    script = Script(slabs=(100_000, 50_000), dim=1, num_buckets=16)
    script.scatter(script.rng.integers(0, 160_000, 200_000), 12, F32)
    return script


# Touches: statistics of rows -----------------------------------------------------------------------------------


@cases("touch-{0}_keys", *SIZES)
def touch_sizes(num_keys: int) -> Script:
    """Around the sizes of warps and blocks: few rows and many, absent ones between, with uses and without."""
    number = SIZES.index(num_keys)
    script = Script(slabs=SLABS[number % 3], num_tables=1, seed=number)
    rng = script.rng
    for num_rows in (1, 3, 40, 312):
        absent = rng.choice([NO_ROW, NO_ROW - 1, 312, 2**31], num_keys)
        row_ids = np.where(rng.random(num_keys) < 0.2, absent, rng.integers(0, num_rows, num_keys))
        script.touch(row_ids, clock=num_rows)
        script.touch(row_ids, np.where(rng.random(num_keys) < 0.1, 2**27 - 1, rng.integers(0, 9, num_keys)), 2**32 - 1)
    return script


@cases("touch-{0}", "one_row", "all_absent", "each_row_of_a_warp_once", "pairs_in_a_warp", "no_uses")
def touch_warps(what: str) -> Script:
    """Warps that agree, and warps whose lanes meet in groups of every kind."""
    script = Script(slabs=(5, 7, 300), num_tables=1)
    i = np.arange(2000)
    row_ids = {
        "one_row": np.full(2000, 6),
        "all_absent": np.full(2000, NO_ROW),
        "each_row_of_a_warp_once": i % 32 + 3,
        "pairs_in_a_warp": i % 32 // 2 * 19,
        "no_uses": i % 5,
    }[what]
    script.touch(row_ids)
    script.touch(row_ids, 0 if what == "no_uses" else i % 4)
    return script


@case("touch-24_slabs")
def touch_slabs() -> Script:
    """As many slabs as a store can have: every row, its neighbours' ends first."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), num_tables=1)
    script.touch(np.r_[np.arange(660), np.arange(660)[::-1]], np.arange(1320))
    return script


@case("touch-700000_keys")
def touch_large() -> Script:
    """More positions than the GPU's grid has threads; one row in nine positions is hot."""
    script = Script(slabs=(100_000, 50_000), dim=1, num_buckets=16)
    rng = script.rng
    row_ids = np.where(rng.random(700_000) < 0.11, 77, rng.integers(0, 160_000, 700_000))
    script.touch(row_ids)
    script.touch(row_ids, rng.integers(0, 2**27, 700_000, np.uint32))
    return script


# Statistics that lookups write -----------------------------------------------------------------------------------


def used_batch(script: Script, num: int, num_distinct: int) -> Batch:
    """Features of all kinds over two tables, some over one; a hot key, padding between."""
    rng = script.rng

    def keys(size):
        drawn = rng.integers(0, num_distinct, size).astype(np.uint64) * U64(0x100000001)
        drawn[rng.random(size) < 0.11] = U64(0x100000001)
        drawn[rng.random(size) < 0.05] = PADDING_KEY
        return drawn

    offsets = np.r_[0, np.sort(rng.integers(0, num + 1, max(num // 3, 1)))]
    return Batch(
        single(keys(num), 0),
        single(keys(num), 1),
        fixed(keys(2 * num), 0, MEAN, 2, script.weights(2 * num)),
        ragged(keys(num), 0, SQRTN, offsets),
        ragged(keys(num), 1, SUM, np.minimum(offsets, num // 2), script.weights(num)),
        fixed(keys(3 * num), 1, SUM, 3),
    )


@cases("statistics-{0}_keys", *SIZES)
def statistics_sizes(num_keys: int) -> Script:
    """New keys, then the same and others; rows that are freed and come back; clocks that go back."""
    number = SIZES.index(num_keys)
    script = Script(slabs=((5, 7, 300), (12_000,))[num_keys > 100], num_tables=2, dim=(4, 7, 64)[number % 3])
    for clock in (3, 2**32 - 1, 0):
        script.lookup(used_batch(script, num_keys, num_keys + 2), clock=clock)
    script.erase(np.arange(0, num_keys, 2).astype(np.uint64) * U64(0x100000001), 0)
    script.lookup(used_batch(script, num_keys, num_keys + 9), clock=1)
    return script


@cases("statistics-dim_{0}", 1, 2, 3, 33, 66, 128, 201, 256, 301, 400, 513, 1024)
def statistics_dims(dim: int) -> Script:
    """Every shape of a row: in bags as many positions are at hand at once as lanes share a row."""
    script = Script(slabs=(5, 7, 400), num_tables=2, dim=dim, seed=dim)
    script.fill(np.arange(20).astype(U64) * U64(0x100000001), 0)
    for clock in (1, 2):
        script.lookup(used_batch(script, 80, 90), clock=clock)
    return script


@cases("statistics-{0}-dim_{1}", *itertools.product(HALVES, (3, 8, 256)))
def statistics_rows16(dtype: str, dim: int) -> Script:
    """Rows of 16 bits."""
    script = Script(slabs=(5, 7, 400), num_tables=2, dim=dim, dtype=HALVES[dtype])
    for clock in (1, 2):
        script.lookup(used_batch(script, 80, 90), clock=clock)
    return script


@cases("statistics-{0}", "one_key", "each_key_of_a_warp_once", "pairs_in_a_warp", "all_new", "all_padding")
def statistics_warps(what: str) -> Script:
    """Warps that agree, and warps whose lanes meet in groups of every kind: keys with rows, then new ones."""
    script = Script(slabs=(5, 7, 3000), num_tables=2, dim=4)
    i = np.arange(2000).astype(U64)
    keys = {
        "one_key": np.full(2000, 6),
        "each_key_of_a_warp_once": i % U64(32) + U64(3),
        "pairs_in_a_warp": i % U64(32) // U64(2) * U64(19),
        "all_new": i * U64(0x100000001),
        "all_padding": np.full(2000, PADDING_KEY, np.uint64),
    }[what]
    offsets = np.r_[0, np.sort(script.rng.integers(0, 2000, 40)), 2000]
    batch = Batch(single(keys, 0), ragged(keys, 0, SUM, offsets), fixed(keys[::-1], 1, MEAN, 5), single(keys[:700], 1))
    script.lookup(batch, clock=5)
    script.lookup(batch, clock=6)
    return script


@case("statistics-24_slabs")
def statistics_slabs() -> Script:
    """As many slabs as a store can have."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=3, num_tables=1)
    script.fill(np.arange(100))
    script.lookup(Batch(single(script.rng.permutation(np.arange(1000))), fixed(np.arange(400), 0, SUM, 4)), clock=9)
    return script


@case("statistics-160000_keys")
def statistics_large() -> Script:
    """More blocks than run on a GPU at once; hot keys in single positions and in bags."""
    script = Script(slabs=(3_000, 2_000), dim=1, num_buckets=4096)
    script.fill(np.arange(1000))
    keys = (2.0 ** script.rng.uniform(0, 12, 160_000)).astype(np.uint64)
    script.lookup(Batch(single(keys[:140_000], 0), fixed(keys[140_000:], 0, MEAN, 10)), clock=1)
    return script


@cases("statistics-{0}", "few_rows_left", "many_new_keys_for_8_rows", "index_of_2_buckets", "keys_of_one_home")
def statistics_refused(why: str) -> Script:
    """Keys that get no row are not noted, new ones once for each position, whatever way they come in."""
    sizes = {
        "few_rows_left": {"slabs": (5, 7, 20)},
        "many_new_keys_for_8_rows": {"slabs": (8,), "num_buckets": 16},
        "index_of_2_buckets": {"slabs": (5, 7, 300), "num_buckets": 2},
        "keys_of_one_home": {"slabs": (5, 7, 588), "num_buckets": 4096},
    }[why]
    script = Script(num_tables=3, dim=8, **sizes)
    rng = script.rng
    pool = script.keys_of_homes([77], 300) if why == "keys_of_one_home" else script.distinct(300, low=3)
    script.fill(pool[:5], 1)
    for clock in range(3):
        batch = Batch(
            single(rng.choice(pool, 33), 1),
            ragged(rng.choice(pool, 300), 1, SUM, [0, 50, 50, 290], script.weights(300)),
            single(np.repeat(rng.choice(pool, 200), 4), 2),
            fixed(rng.choice(pool, 600), 1, MEAN, 3),
        )
        script.lookup(batch, clock=clock)
    return script


@case("statistics-keys_in_no_bag")
def statistics_loose() -> Script:
    """What lies in no bag is not used, whatever it is; offsets beyond the keys are clamped."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20))
    keys = script.rng.integers(0, 40, 64)
    script.lookup(batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)), clock=1)
    script.lookup(
        Batch(ragged(keys, 0, SUM, [-(10**8), -1, 3, 60, 65, 10**9]), ragged(keys, 1, MEAN, [-(2**31), 2**31 - 1])),
        clock=2,
    )
    script.lookup(Batch(fixed([], 0, SUM, 2), ragged([], 0, SUM, [0, 0, 0])), clock=3)
    return script


# Updates -------------------------------------------------------------------------------------------------------

NUM_USES = (1, 2, 31, 32, 33, 64, 1024, 1025, 5000)
USES = (
    (SGD, SUM_OF_USES, 8),
    (SGD, SQRT_OF_USES, 3),
    (ADAGRAD, SUM_OF_USES, 8),
    (ADAGRAD, MEAN_OF_USES, 7),
    (ROWWISE_ADAGRAD, SUM_OF_USES, 8),
    (ROWWISE_ADAGRAD, MEAN_OF_USES, 33),
    (ADAM, SUM_OF_USES, 8),
    (ADAM, SQRT_OF_USES, 12),
)


def keys_with_uses(script: Script, uses: Sequence[int]) -> np.ndarray:
    """Key i occurs uses[i] times, anywhere."""
    return script.rng.permutation(np.repeat(np.arange(len(uses), dtype=np.uint64), uses))


@cases("update-uses-optimizer_{0}-row_gradient_{1}-dim_{2}", *USES)
def update_uses(optimizer: int, row_gradient: int, dim: int) -> Script:
    """Rows with 1 to 5,000 uses in one batch: in a chunk, in two, in one round of lanes, in five."""
    script = Script(slabs=(5, 7, 300), dim=dim, optimizer=optimizer, seed=dim)
    script.fill(range(40))
    keys = keys_with_uses(script, [*NUM_USES, *NUM_USES[:6]])
    script.update(batch := Batch(single(keys)), script.store.find(keys, batch.tables), row_gradient=row_gradient)
    return script


@cases("update-uses_in_bags-{0}", SUM, MEAN, SQRTN)
def update_uses_in_bags(combiner: int) -> Script:
    """The same uses in weighted bags; a use has the factor of its bag."""
    script = Script(slabs=(5, 7, 300), dim=4, optimizer=ADAGRAD)
    script.fill(range(40))
    keys = keys_with_uses(script, NUM_USES)
    offsets = np.r_[0, np.sort(script.rng.integers(0, len(keys), 600)), len(keys)]
    batch = Batch(ragged(keys, 0, combiner, offsets, script.weights(len(keys))))
    script.update(batch, script.store.find(keys, batch.tables))
    return script


@case("update-600000_uses")
def update_many_uses() -> Script:
    """So many that uses are sorted by larger tiles."""
    script = Script(slabs=(5, 7, 300), dim=4)
    script.fill(range(300))
    keys = script.rng.integers(0, 300, 600_000).astype(U64)
    script.update(batch := Batch(single(keys)), script.store.find(keys, batch.tables))
    return script


@cases("update-squares_overflow-dim_{0}", 7, 8, 64)
def update_squares_overflow(dim: int) -> Script:
    """Gradients are finite though their squares are not: their rows step, and none is counted."""
    script = Script(slabs=(5, 7, 300), dim=dim, optimizer=ROWWISE_ADAGRAD)
    script.fill(range(40))
    keys = keys_with_uses(script, [1, 1, 1, 5, 40, 1])
    gradients = script.normal(len(keys), dim)
    gradients[np.isin(keys, [1, 3, 4]), dim - 1] = 1e25
    batch = Batch(single(keys))
    row_ids = script.store.find(keys, batch.tables)
    script.update(batch, row_ids, gradients=[gradients])
    assert np.isinf(script.store.states[0]).sum() == 3
    return script


@case("update-uses_do_not_mind_their_neighbours")
def update_neighbours() -> Script:
    """Decision D8: a row's sum depends on its own uses, so rows with the same uses get the same bits."""
    script = Script(slabs=(40,), dim=8)
    script.fill(range(3))
    script.store.rows[:3] = 0
    one = script.normal(1100, 8)
    keys, gradients = np.full(4400, 2, np.uint64), script.normal(4400, 8)
    every_second, in_a_row = np.arange(1, 2201, 2), np.arange(3000, 4100)
    keys[every_second], gradients[every_second] = 0, one
    keys[in_a_row], gradients[in_a_row] = 1, one
    batch = Batch(single(keys))
    script.update(batch, script.store.find(keys, batch.tables), gradients=[gradients])
    assert (script.store.rows[0].view(np.uint32) == script.store.rows[1].view(np.uint32)).all()
    return script


@cases("update-not_finite-optimizer_{0}", SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)
@cases("update-not_finite-optimizer_{0}-dim_{1}", (SGD, 128), (ROWWISE_ADAGRAD, 128), (ADAM, 33))
@cases("rows16-not_finite-optimizer_{0}-dim_{1}-{2}", *((o, 24 + 104 * (o % 2), d) for o in range(4) for d in HALVES))
def update_not_finite(optimizer: int, dim: int = 8, dtype: str = "float32") -> Script:
    """One infinite or NaN column, a sum that overflows, infinities that cancel: the row stays, its table counts it.

    Wide rows: its neighbours in a warp step.
    """
    more = {"dtype": HALVES[dtype], "embedding_dtype": F32} if dtype in HALVES else {}
    script = Script(slabs=(5, 7, 300), dim=dim, num_tables=3, optimizer=optimizer, **more)
    script.fill(np.repeat(np.arange(14), 3), np.tile(np.arange(3), 14))
    keys = keys_with_uses(script, [1, 2, 2, 40, 1, 2, 1100, 3, 1, 1, 40])
    weights = np.where(keys == 8, F32(0), F32(0.5))
    gradients = script.normal(len(keys), dim)
    of = [np.flatnonzero(keys == key) for key in range(11)]
    eighth = dim // 8
    gradients[of[0], 3 * eighth] = np.inf
    gradients[of[1][1], 0] = np.nan
    gradients[of[2], dim - 1] = np.inf, -np.inf
    gradients[of[3][35], 2 * eighth] = -np.inf
    gradients[of[5], eighth] = 3e38
    gradients[of[6][1050], 4 * eighth] = np.nan
    gradients[of[8], 4 * eighth] = np.inf  # times weight zero
    gradients[of[10], 0] = 1e38
    batch = Batch(
        single(keys, 2),
        fixed(keys, 0, SUM, 1, weights),
        ragged(keys, 1, MEAN, np.arange(len(keys) + 1)),
    )
    row_ids = script.store.find(batch.keys, batch.tables)
    script.update(batch, row_ids, gradients=[gradients] * 3)
    script.update(batch, row_ids, gradients=[gradients] * 3, row_gradient=MEAN_OF_USES)
    return script


@cases("update-tiny_numbers-optimizer_{0}", SGD, ADAGRAD)
def update_tiny(optimizer: int) -> Script:
    """Numbers below the normal ones are neither flushed nor taken for zero."""
    script = Script(slabs=(5, 7, 300), dim=8, optimizer=optimizer)
    script.fill(range(10))
    script.store.rows[:10] *= F32(1e-39)
    script.store.rows[7:9] = -0.0  # a sum starts from its first row, not from zero
    for state in script.store.states:
        state[:5] = 0
    keys = np.arange(10).repeat(4)
    batch = Batch(single(keys), fixed(keys, 0, MEAN, 4), fixed(keys, 0, SUM, 2, np.full(40, 1e-3, F32)))
    row_ids = script.lookup(batch)
    gradients = [script.normal(f.num_bags, 8) * F32(1e-40) for f in batch.features]
    script.update(batch, row_ids, gradients=gradients, learning_rate=0.5 if optimizer == SGD else 1e-20)
    return script


@cases("update-plans_{0}", "none_stale", "first_stale", "last_stale", "all_stale")
def update_stale(which: str) -> Script:
    """Uses of a plan that does not act are left out and counted; the other plan's rows step alone."""
    script = Script(slabs=(5, 7, 30), dim=8, num_tables=3, optimizer=ADAM)
    script.fill(np.repeat(np.arange(10), 3), np.tile(np.arange(3), 10))

    def keys(num):
        return np.where(script.rng.random(num) < 0.1, -1, script.rng.integers(0, 20, num)).astype(U64)

    offsets = [0, 0, 3, 30, 33]
    batches = [
        Batch(single(keys(33), 0), ragged(keys(40), 1, MEAN, offsets, script.weights(40))),
        Batch(fixed(keys(30), 1, SQRTN, 3), single(keys(33), 2), ragged(keys(33), 0, SUM, offsets)),
    ]
    row_ids = np.concatenate([script.lookup(batch) for batch in batches])  # the store gets full: refused keys, too
    stale = {"none": [], "first": [0], "last": [1], "all": [0, 1]}[which.split("_")[0]]
    script.update(joined(*batches), row_ids, is_live=[p not in stale for p in range(2)])
    return script


@case("update-stale_bag_of_weights_of_sum_zero")
def update_stale_zero_sum() -> Script:
    """Keys of a stale plan that had a row are counted, whatever their bag would have done with their gradient."""
    script = Script(slabs=(5, 7, 30), dim=8)
    script.fill(range(10))
    weights = np.array([1, -1, 2, 1, 0, 0], F32)
    batch = Batch(ragged([1, 2, 3, 4, 5, PADDING_KEY], 0, MEAN, [0, 2, 4, 6], weights))
    row_ids = np.where(batch.is_asked, script.store.find(batch.keys, batch.tables), np.uint32(NO_ROW))
    script.update(batch, row_ids, is_live=[False])
    script.update(batch, row_ids)
    return script


# Rows of 16 bits -----------------------------------------------------------------------------------------------

DIMS_16 = (1, 2, 3, 7, 8, 12, 16, 33, 64, 100, 128, 200, 256, 513, 1024)


@cases("rows16-{0}-dim_{1}", *itertools.product(HALVES, DIMS_16))
def rows16_dims(dtype: str, dim: int) -> Script:
    """Every shape of a row: initialized, read, combined, summed, stepped; embeddings and rounding of both kinds."""
    number = DIMS_16.index(dim) + list(HALVES).index(dtype)
    embedding_dtype = (None, F32)[number // 2 % 2]
    script = Script(
        slabs=SLABS[number % 3],
        dim=dim,
        num_tables=3,
        optimizer=number % 4,
        seed=dim,
        dtype=HALVES[dtype],
        embedding_dtype=embedding_dtype,
    )
    present = script.distinct(20, low=9)
    script.fill(present, 0)
    hot = mostly_two(script, present, 1250)
    lengths = (0, 33, 1, 0, 12, 2, 64, 3, 0)
    num_keys = sum(lengths)
    batch = Batch(
        ragged(hot, 0, SUM, np.r_[0, np.sort(script.rng.integers(0, 1250, 60)), 1250]),
        single(script.mixed(40, present), 0),
        ragged(script.mixed(num_keys, present), 1, MEAN, np.r_[0, np.cumsum(lengths)], script.weights(num_keys)),
        fixed(script.mixed(24, present), 2, SQRTN, 3),
    )
    script.lookup_find(batch)
    row_ids = script.lookup(batch)
    script.update(batch, row_ids, row_gradient=number % 3, rounding=number % 2)
    script.update(batch, row_ids, rounding=1 - number % 2, num_steps=2**32 - 1, tables_apart=True, learning_rate=1e-3)
    return script


@cases("rows16-{0}-optimizer_{1}-rounding_{2}", *itertools.product(HALVES, range(4), (NEAREST, STOCHASTIC)))
@cases("rows16-{0}-optimizer_{1}-rounding_{2}-dim_{3}", *itertools.product(HALVES, range(4), (STOCHASTIC,), (24, 128)))
def rows16_optimizers(dtype: str, optimizer: int, rounding: int, dim: int = 12) -> Script:
    """Three steps of every optimizer, small ones among them, by gradients of float32 and of 16 bits."""
    half = HALVES[dtype]
    script = Script(slabs=(5, 7, 50), dim=dim, num_tables=3, optimizer=optimizer, dtype=half)
    script.fill(range(30), np.arange(30) % 3)
    keys = [keys_with_uses(script, [1, 2, 33, 3, 2, 9]) * U64(3) + U64(t) for t in range(3)]
    batch = Batch(*(single(keys[t], t) for t in range(3)))
    row_ids = script.store.find(batch.keys, batch.tables)
    for num_steps, learning_rate in enumerate((0.5, 1e-4, 1e-2)):
        gradients = [script.normal(f.num_bags, dim).astype(half if num_steps else F32) for f in batch.features]
        more = {"rounding": rounding, "num_steps": num_steps, "tables_apart": num_steps == 1}
        script.update(batch, row_ids, gradients=gradients, learning_rate=learning_rate, **more)
    return script


@cases("rows16-{0}-extremes-rounding_{1}", *itertools.product(HALVES, (NEAREST, STOCHASTIC)))
def rows16_extremes(dtype: str, rounding: int) -> Script:
    """Results beyond the largest number and below the least normal one, ties, signed zeros; sums that overflow."""
    half = HALVES[dtype]
    script = Script(slabs=(5, 7, 50), dim=8, dtype=half)
    script.fill(range(12))
    largest, least = F32(ml_dtypes.finfo(half).max), F32(ml_dtypes.finfo(half).smallest_subnormal)
    script.store.rows[:12] = 0
    script.store.rows[:4] = half.type(largest)
    script.store.rows[4:6] = -half.type(largest)
    script.store.rows[11] = -half.type(0)
    keys = np.arange(12)
    batch = Batch(single(keys), fixed(np.repeat(keys, 2), 0, SUM, 2))
    row_ids = script.lookup(batch)  # two largest ones are more than the largest
    steps = np.zeros((12, 8), F32)
    # With 0.2 / 64 a sum lies between the largest bfloat16, which it becomes, and the largest float32.
    steps[:6] = np.outer([1e-3, 0.2, 1, 30, -1e-3, -1], np.arange(8)) * largest / F32(64)
    steps[6:11] = np.outer([0.125, 0.5, 1.5, 77.3, 1024], np.arange(1, 9)) * least
    gradients = [-steps, np.zeros((12, 8), F32)]
    script.update(batch, row_ids, gradients=gradients, rounding=rounding, learning_rate=1.0)
    script.lookup_planned(batch, row_ids)
    return script


@cases("rows16-{0}-unknown_and_refused", *HALVES)
def rows16_refused(dtype: str) -> Script:
    """Keys without a row read their rounded initial row, or zeros; so do keys that a full store refuses."""
    script = Script(slabs=(5, 7), dim=7, num_tables=3, dtype=HALVES[dtype])
    script.fill(range(6), np.arange(6) % 3)
    keys = script.mixed(40, range(6))
    batch = Batch(
        *(single(keys, t, unknown_zeros=t == 1) for t in range(3)), fixed(keys, 0, MEAN, 4, unknown_zeros=True)
    )
    script.lookup_find(batch)
    script.lookup_planned(batch, script.lookup(batch))
    return script


@cases("rows16-{0}-gather", *HALVES)
def rows16_gather(dtype: str) -> Script:
    """Rows are copied bit by bit, NaN among them; new ones are rounded."""
    script = Script(slabs=(5, 7, 300), dim=33, num_tables=3, dtype=HALVES[dtype])
    script.store.rows[:] = nearest(script.normal(312, 33), script.store.dtype)
    script.store.rows[20:30, ::3] = np.nan
    return gather_mixed(script, 700, (1,))


# Admission -----------------------------------------------------------------------------------------------------

# By count, by Bloom filter, by probability, everyone: the words of each table from kTableAdmission on.
POLICIES = {0: (BY_COUNT, 3), 1: (BY_BLOOM, 2, 0, 800, 5), 2: (BY_PROBABILITY, 2**31), 4: (BY_COUNT, 2)}
REFUSED_READ = {0: 0.75, 1: 0.0, 4: -2.5}  # the keys of table 2 read their initial rows


def admitting(seed: int, num_tables: int = 5, **more) -> Script:
    """A store whose tables admit in all ways."""
    return Script(seed=seed, num_tables=num_tables, admission=POLICIES, refused=REFUSED_READ, **more)


def admission_batch(script: Script, num: int, num_distinct: int) -> Batch:
    """Single keys, bags of one size and ragged ones, of all tables; some keys again, some padding."""
    rng = script.rng

    def keys(size):
        drawn = rng.integers(0, num_distinct, size).astype(np.uint64) * U64(0x100000001)
        drawn[rng.random(size) < 0.05] = PADDING_KEY
        return drawn

    offsets = np.r_[0, np.sort(rng.integers(0, num + 1, max(num // 3, 1)))]
    return Batch(
        single(keys(num), 0),
        fixed(keys(2 * num), 1, MEAN, 2, script.weights(2 * num)),
        ragged(keys(num), 2, SQRTN, offsets),
        single(keys(num), 3),
        fixed(keys(3 * num), 4, SUM, 3),
        fixed(keys(num), 0, MEAN, 1),
    )


@cases("admission-{0}_keys", 1, 33, 257, 2000)
def admission_sizes(num_keys: int) -> Script:
    """Lookups one after the other: keys wait, come in, are erased and wait again."""
    script = admitting(num_keys, slabs=((5, 7, 300), (12_000,))[num_keys > 100], num_waiting_buckets=4096, dim=5)
    for step in range(3):
        script.lookup(admission_batch(script, num_keys, num_keys + 2), step=step)
    erased = np.arange(0, num_keys, 2).astype(np.uint64) * U64(0x100000001)
    for table in (0, 1, 2):
        script.erase(erased, table)
    script.forget([3, 1, 1, 1, 2])
    row_ids = script.lookup(batch := admission_batch(script, num_keys, num_keys + 2), step=3)
    script.lookup_planned(batch, row_ids)
    script.lookup_find(batch)
    return script


@cases("admission-{0}_pairs_with_uses", 33, 5000)
def admission_uses(num_keys: int) -> Script:
    """Keys of all tables as owners get them: each stands for several uses; unknown tables and padding between."""
    script = admitting(num_keys, slabs=(9000,), dim=3, num_waiting_buckets=5000)
    rng = script.rng
    for step in range(3):
        keys, tables = rng.integers(0, 2 * num_keys, num_keys).astype(np.uint64), rng.integers(0, 6, num_keys)
        keys[rng.random(num_keys) < 0.05] = PADDING_KEY
        script.find_or_insert(keys, tables, uses=rng.integers(1, 3, num_keys), step=step)
    script.find_or_insert(keys, tables)  # without admission everyone comes in
    return script


@cases("admission-with_statistics-{0}_keys", 33, 2000)
def admission_with_statistics(num_keys: int) -> Script:
    """Keys that wait are not noted; of one that is let in all positions are."""
    script = admitting(num_keys, slabs=((5, 7, 300), (12_000,))[num_keys > 100], num_waiting_buckets=4096, dim=5)
    for step in range(4):
        script.lookup(admission_batch(script, num_keys, num_keys + 2), step=step, clock=step + 7)
    return script


@case("admission-one_key_5000_times")
def admission_one_key() -> Script:
    """All occurrences of a call count: the key comes in with all its positions, or with none."""
    script = Script(
        slabs=(8,), num_tables=3, admission={0: (BY_COUNT, 5001), 1: (BY_COUNT, 5000), 2: (BY_BLOOM, 255, 0, 64, 3)}
    )
    keys = np.full(5000, 2**64 - 2, np.uint64)
    for table in (0, 1, 2, 0):
        script.find_or_insert(keys, table, step=0)
    return script


@case("admission-full_store")
def admission_full_store() -> Script:
    """More keys are let in than there are rows: the first by position get them, the others are refused for room."""
    script = admitting(1, slabs=(3, 5), num_tables=5)
    keys, tables = np.repeat(np.arange(40), 4), np.tile([0, 1, 2, 3], 40)
    for step in range(3):
        script.find_or_insert(keys, tables, step=step)
    batch = admission_batch(script, 30, 40)
    script.lookup(batch, step=4)
    return script


@case("admission-70_tables")
def admission_many_tables() -> Script:
    """More tables than counts have room for in shared memory."""
    script = Script(
        num_tables=70, admission={t: (BY_COUNT, 2 + t % 3) for t in range(0, 70, 2)}, num_waiting_buckets=300
    )
    for step in range(3):
        script.find_or_insert(script.rng.integers(0, 5, 600), script.rng.integers(0, 70, 600), step=step)
    return script


@cases("admission-{0}", *HALVES)
def admission_rows16(dtype: str) -> Script:
    """Rows of 16 bits: what a key without a row reads is rounded as a new row is."""
    script = Script(
        seed=3,
        slabs=(600,),
        dim=12,
        dtype=HALVES[dtype],
        num_tables=5,
        admission=POLICIES,
        refused={0: 1 / 3, 1: 1e30, 4: -0.1},
    )
    for step in range(2):
        script.lookup(admission_batch(script, 40, 30), step=step)
    return script


@case("admission-a_small_filter")
def admission_small_filter() -> Script:
    """Sixteen counters for hundreds of keys: they fill up and stay full."""
    script = Script(num_tables=2, admission={0: (BY_BLOOM, 255, 0, 16, 4), 1: (BY_BLOOM, 3, 4, 64, 30)})
    for step in range(3):
        uses = script.rng.integers(1, 50, 257)
        script.find_or_insert(script.rng.integers(0, 100, 257), np.arange(257) % 2, uses=uses, step=step)
    return script


@case("small-admission")
def admission_small() -> Script:
    """All of it once: waiting, coming in, forgotten, made anew in more buckets, with others and without."""
    script = admitting(7, slabs=(5, 95), num_waiting_buckets=16)
    batch = admission_batch(script, 6, 9)
    script.lookup(batch, step=0)
    script.find_or_insert([1, 2, 3, 3, PADDING_KEY, 1], [0, 0, 4, 4, 0, 1], uses=[1, 2, 1, 1, 5, 1], step=1)
    script.wait(32, [3, 1, 1, 1, 2], [77, 78, 79, 1, PADDING_KEY, 80], [1, 2, 3, 1, 1, 0], [0, 0, 0, 4, 0, 0])
    script.find_or_insert([77, 78, 79, 80], 0, step=1)
    script.forget([1, 1, 1, 1, 2])  # nobody of table 0 waits
    script.wait(16, [3, 1, 1, 1, 2])
    row_ids = script.lookup(batch, step=2)
    script.lookup_planned(batch, row_ids)
    script.gather(batch.keys, batch.tables, row_ids)
    return script


# Eviction: select, release -------------------------------------------------------------------------------------


def score_words(script: Script, kind: str) -> tuple[np.ndarray, ...]:
    """Scores of every row of capacity, in use or not."""
    rng, num = script.rng, script.store.capacity
    some = rng.integers(0, 2**32, num, dtype=np.uint32)
    return {
        "equal": (np.full(num, 2**32 - 1, np.uint32),),
        "steps": (rng.integers(1000, 1100, num).astype(np.uint32),),
        "spread": (some,),
        "low_bits": (some & np.uint32(0x3FF),),
        "pairs": (rng.integers(0, 3, num).astype(np.uint32), some),
        "second_equal": (some % np.uint32(5), np.zeros(num, np.uint32)),
        "high_bits": (some & np.uint32(0xC0000000), some << np.uint32(31)),
    }[kind]


SCORES = ("equal", "steps", "spread", "low_bits", "pairs", "second_equal", "high_bits")


@cases("evict-scores_{0}", *SCORES)
def evict_scores(kind: str) -> Script:
    """Budgets from none to more than there is, of all tables and of one; then the freed rows are handed out again."""
    script = table_store(1000, SCORES.index(kind), seed=SCORES.index(kind), optimizer=SCORES.index(kind) % 4)
    store = script.store
    keys = np.r_[script.distinct(1500, low=int(script.rng.integers(2**40))), as_keys([0, 2**63, 2**64 - 2])]
    script.fill(keys, script.rng.integers(0, store.num_tables, len(keys)))
    words = score_words(script, kind)
    for num_kept in (0, 1, 700, len(keys) - 1, len(keys), 2**32 - 1):
        script.evict_select(words, num_kept)
    of_one = script.evict_select(words, 3, table=store.num_tables - 1)
    script.evict_release(of_one)
    script.find_or_insert(script.rng.permutation(keys)[:600], script.rng.integers(0, store.num_tables, 600))
    script.evict_release(script.evict_select(words, 400), has_evicted=False)
    script.find(keys, script.rng.integers(0, store.num_tables, len(keys)))
    script.find_or_insert(script.distinct(600, low=5))
    return script


@cases("evict-mask_{0}", "none", "some", "all")
def evict_mask(which: str) -> Script:
    """Of the rows in use alone, of all tables and of one; where nothing goes not even the index is touched."""
    script = Script(slabs=(5, 7, 1000), num_tables=3, optimizer=ADAM)
    keys = script.distinct(800, low=3)
    script.fill(keys, np.arange(800) % 3)
    share = {"none": 2.0, "some": 0.7, "all": 0.0}[which]
    mask = script.rng.random(script.store.capacity) >= share
    script.find_or_insert(np.r_[keys[:50], script.distinct(50, low=2)], np.arange(100) % 3)
    script.evict_release(script.evict_select((), table=1, mask=mask), has_statistics=False)
    script.evict_release(script.evict_select((), mask=mask))
    script.find_or_insert(keys[::-1], np.arange(800) % 3)
    script.evict_release(np.zeros(script.store.capacity))
    return script


@cases("evict-index_of_{0}_buckets", 90, 110, 200)
def evict_crowded_index(num_buckets: int) -> Script:
    """Long walks, across the index's end too: entries that are swept away, and those that move up behind them."""
    script = Script(slabs=(5, 7, 300), num_tables=3, num_buckets=num_buckets, optimizer=ADAGRAD)
    aimed = script.keys_of_homes([num_buckets - 2, num_buckets - 1], 60)
    others = script.distinct(250, low=3)
    script.fill(np.r_[aimed, others], np.r_[np.zeros(60, int), np.arange(250) % 3])
    for share in (0.1, 0.5, 0.9):
        flags = (script.rng.random(script.store.capacity) < share).astype(np.uint8)
        script.evict_release(flags)
        script.find(np.r_[aimed, others], np.r_[np.zeros(60, int), np.arange(250) % 3])
        script.find_or_insert(script.rng.permutation(aimed)[:20])
    return script


@case("evict-after_keys_found_no_entry")
def evict_unplaced() -> Script:
    """Then rows may be without one: the index is rebuilt, and they are found again."""
    script = Script(slabs=(5, 7, 300), num_buckets=20)
    keys = script.distinct(90, low=1)
    script.find_or_insert(keys)
    script.evict_release(np.arange(script.store.capacity) % 4 == 0)
    script.find(keys)
    script.evict_release(np.arange(script.store.capacity) % 4 == 1)
    script.find_or_insert(keys)
    return script


@case("evict-20000_rows")
def evict_large() -> Script:
    """Scores that tie by thousands; keys that differ in their last bits."""
    script = Script(slabs=(7_000, 14_000), dim=1, num_tables=2, num_buckets=1 << 13)
    keys = np.arange(20_000).astype(U64) + (U64(3) << U64(60))
    script.fill(script.rng.permutation(keys), np.arange(20_000) % 2)
    steps = (script.rng.integers(0, 5, script.store.capacity).astype(np.uint32),)
    script.evict_select(steps, 19_900)
    script.evict_release(script.evict_select(steps, 9_000))
    script.find_or_insert(keys[:3000], np.arange(3000) % 2)
    return script


# A small selection: every kernel, in every way through it, in little time ---------------------------------------


@cases("small-table-{0}_tables", 3, 70)
def small_table(num_tables: int) -> Script:
    """find, find_or_insert, erase and rebuild in the normal case."""
    script = Script(slabs=(5, 7, 100), num_tables=num_tables, dim=5, optimizer=ADAM)
    tables = script.rng.integers(0, num_tables, 48)
    script.fill(range(20), np.arange(20) % 3)
    keys = script.mixed(48, range(20))
    script.find_or_insert(keys, tables)
    script.erase(keys[:20], tables[:20])
    script.find_or_insert(keys, tables)
    script.rebuild(30, salt=5)
    script.find(keys, tables)
    return script


@case("small-scatter")
def small_scatter() -> Script:
    """Vectors of all widths, into three slabs."""
    script = Script(slabs=(5, 7, 300), num_tables=1)
    for width, dtype in ((4, F32), (2, F32), (1, F32), (3, BF16)):
        script.scatter(script.rng.integers(0, 330, 300), width, dtype)
    return script


@case("small-touch")
def small_touch() -> Script:
    """With uses and without, from three slabs."""
    script = Script(slabs=(5, 7, 300), num_tables=1)
    row_ids = script.rng.integers(0, 330, 600)
    script.touch(row_ids)
    script.touch(row_ids % 9, script.rng.integers(0, 9, 600), clock=0)
    return script


@cases("small-statistics-dim_{0}", 4, 7, 72)
def small_statistics(dim: int) -> Script:
    """Lookups that note uses: of rows that were there, of new ones, of all once no row is left."""
    script = Script(slabs=(5, 7, 60), num_tables=2, dim=dim)
    script.fill(np.arange(20).astype(U64) * U64(0x100000001), 0)
    for num_distinct in (30, 200):
        script.lookup(used_batch(script, 40, num_distinct), clock=num_distinct)
    return script


@cases("small-evict-{0}_tables", 3, 70)
def small_evict(num_tables: int) -> Script:
    """By score and by mask."""
    script = Script(slabs=(5, 7, 100), num_tables=num_tables, dim=5, optimizer=ADAM)
    script.fill(script.distinct(90), np.arange(90) % num_tables)
    words = score_words(script, "pairs")
    script.evict_release(script.evict_select(words, 60))
    script.evict_release(script.evict_select(words[:1], 1, table=2))
    mask = np.arange(script.store.capacity) % 5 == 0
    script.evict_release(script.evict_select((), mask=mask), has_statistics=False, has_evicted=False)
    script.evict_release(np.zeros(script.store.capacity))
    script.find_or_insert(script.distinct(40))
    return script


@cases("small-table-{0}", "full", "crowded")
def small_table_refusing(why: str) -> Script:
    """Rows run out; entries run out."""
    script = Script(slabs=(5, 7), dim=8, num_buckets=16 if why == "full" else 2)
    for keys in (range(10, 42), range(32)):
        script.find_or_insert(keys)
    return script


@cases("small-plan-{0}_keys", 0, 300)
def small_plan(num_keys: int) -> Script:
    """Distinct keys over two blocks and two tables."""
    script = Script(num_tables=2)
    keys = script.mixed(num_keys, range(5))
    script.plan(Batch(single(keys, 0), ragged(keys, 1, SUM, [0, num_keys // 2, num_keys])))
    return script


@cases("small-requests-{0}_keys", 0, 300)
def small_requests(num_keys: int) -> Script:
    """Several shards, and one; a table that lies on one of them."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(num_keys, range(50)))
    for num_shards in (1, 3):
        script.plan_requests(batch, num_shards, on={2: 0})
    return script


@cases("small-gather-dim_{0}", 4, 7, 72)
def small_gather(dim: int) -> Script:
    """Rows, new rows, zeros, over two blocks."""
    return gather_mixed(Script(slabs=(5, 7, 100), dim=dim, num_tables=3), 300, (0,))


@cases("small-batch-dim_{0}", 4, 7, 72)
def small_batch(dim: int) -> Script:
    """lookup, lookup_find and lookup_planned: single keys, bags, tails."""
    script = Script(slabs=(5, 7, 200), dim=dim, num_tables=2)
    script.fill(range(20), 0)
    keys = script.mixed(40, range(30))
    batch = Batch(
        single(keys, 0),
        ragged(keys, 1, MEAN, [0, 0, 33, 33, 36], np.abs(script.weights(40))),
        fixed(keys, 0, SQRTN, 4),
    )
    script.lookup_find(batch)
    row_ids = script.lookup(batch)
    script.lookup_planned(batch, row_ids)
    return script


@cases("small-batch-{0}", "full", "crowded")
def small_batch_refusing(why: str) -> Script:
    """Rows run out; entries run out."""
    script = Script(slabs=(5, 7), dim=8, num_buckets=16 if why == "full" else 2)
    script.lookup(Batch(single(range(10, 30)), ragged(range(30), 0, MEAN, [0, 3, 3, 30])))
    return script


@cases("small-update-optimizer_{0}", SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)
def small_update(optimizer: int) -> Script:
    """Few uses, more than a chunk, more than a round of lanes; a bag, a NaN, a stale plan."""
    script = Script(slabs=(5, 7, 50), dim=(8, 7, 72, 33)[optimizer], optimizer=optimizer)
    script.fill(range(20))
    keys = keys_with_uses(script, [1, 2, 33, 1060, 32, 1])
    batch = joined(Batch(single(keys), ragged(keys[:40], 0, MEAN, [0, 5, 5, 40])), Batch(single(range(20))))
    gradients = [script.normal(f.num_bags, script.store.dim) for f in batch.features]
    gradients[0][keys == 0] = np.nan
    row_ids = script.store.find(batch.keys, batch.tables)
    script.update(batch, row_ids, gradients=gradients, is_live=[True, False])
    return script


@cases("small-rows16-{0}", *HALVES)
def small_rows16(dtype: str) -> Script:
    """Every launcher that reads or writes rows, once."""
    script = Script(slabs=(5, 7, 60), dim=12, num_tables=2, optimizer=ADAGRAD, dtype=HALVES[dtype])
    script.fill(range(20))
    keys = script.mixed(40, range(30))
    batch = Batch(single(keys, 0), ragged(keys, 1, MEAN, [0, 0, 33, 33, 36]))
    script.lookup_find(batch)
    script.update(batch, script.lookup(batch))
    script.find_or_insert(np.arange(50, 60), 1)
    script.gather(np.arange(20), 0, np.arange(20) * 4)
    return script


@cases("small-combine-dim_{0}", 4, 33)
def small_combine(dim: int) -> Script:
    """combine and its transpose, with a row of 1,100 uses."""
    script = Script(dim=dim)
    inverse = np.where(script.rng.random(1200) < 0.95, 3, script.rng.integers(-2, 9, 1200))
    script.combine(ragged(np.zeros(1200), 0, MEAN, np.arange(0, 1201, 40), script.weights(1200)), inverse, 8)
    return script


@cases("small-transpose-dim_{0}", 4, 33)
def small_transpose(dim: int) -> Script:
    """combine_transpose of three features, with a row of 1,100 uses."""
    script = Script(dim=dim)
    batch = Batch(
        single(np.zeros(600)),
        ragged(np.zeros(600), 0, MEAN, np.arange(40, 561, 40), script.weights(600)),
        fixed(np.zeros(60), 0, SUM, 3),
    )
    inverse = np.where(script.rng.random(1260) < 0.95, 3, script.rng.integers(-2, 9, 1260))
    script.transpose(batch, inverse, 8)
    return script

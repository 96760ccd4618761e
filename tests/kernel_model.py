"""What every target of the library must give, to the bit: NumPy float32 and plain loops. Imports nothing of jaxsok.

`oracle.py` says what the ops mean, in float64; this says what `ffi/core` and `ffi/kernels/*.h` promise beyond it: the
layout of a store, the numbering of rows, the order of every sum, the counts. The words of layout.h are written down
again here, so that a word moved by mistake is seen.
"""

import dataclasses
import functools
import zlib

import numpy as np

PADDING_KEY = 2**64 - 1
NO_ROW = 2**32 - 1
EMPTY = np.uint32(2**32 - 1)  # every word of an empty entry or record
MAX_PROBES = 64
PER_BUCKET = 4
BAGS_PER_TILE = 256
USES_PER_CHUNK = 32
CHUNK_LANES = 32

NUM_ALLOCATED, FREE_BEGIN, FREE_END, GENERATION, NUM_UNPLACED, LONGEST_PROBE, SALT_LOW, SALT_HIGH = range(8)
FOUND, INSERTED, MISSING, REFUSED, PADDED = range(5)
NONE, SUM, MEAN, SQRTN = range(4)
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
SUM_OF_USES, MEAN_OF_USES, SQRT_OF_USES = range(3)
CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL = range(4)

F32 = np.float32
U64 = np.uint64
GOLDEN = U64(0x9E3779B97F4A7C15)

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


@functools.cache
def table_words(num_tables: int) -> np.ndarray:
    """Tables with all kinds of initializers, each of its own name."""
    lines = np.zeros((num_tables, 8), np.uint32)
    for t, line in enumerate(lines):
        line[:3] = zlib.crc32(b"low %d" % t), zlib.crc32(b"high %d" % t), (t + 1) % 4
        line[3:5] = np.array([-0.5, 0.25 + t], F32).view(np.uint32)
    lines.flags.writeable = False
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

    def bounds(self) -> np.ndarray:
        """Where each bag begins among the feature's positions; what lies outside or falls is clamped."""
        if self.offsets is None:
            return np.arange(self.num_bags + 1) * self.hotness
        return np.maximum.accumulate(np.clip(self.offsets.astype(np.int64), 0, self.num_keys))

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
            tile += -(-f.num_bags // BAGS_PER_TILE)
        return tuple(lines)

    @property
    def num_tiles(self) -> int:
        return sum(-(-f.num_bags // BAGS_PER_TILE) for f in self.features)

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
    chunk_starts = np.flatnonzero(ranks % USES_PER_CHUNK == 0)
    chunk_sizes = np.diff(np.r_[chunk_starts, len(rows)])
    chunks = terms[chunk_starts]
    for i in range(1, USES_PER_CHUNK):
        more = np.flatnonzero(chunk_sizes > i)
        chunks[more] = chunks[more] + terms[chunk_starts[more] + i]
    first_chunks = np.searchsorted(chunk_starts, starts)
    sums = chunks[first_chunks]
    for r in np.flatnonzero(sizes > USES_PER_CHUNK):
        lanes = np.zeros((CHUNK_LANES, dim), F32)
        for c in range(-(-int(sizes[r]) // USES_PER_CHUNK)):
            chunk = chunks[first_chunks[r] + c]
            lanes[c % CHUNK_LANES] = chunk if c < CHUNK_LANES else lanes[c % CHUNK_LANES] + chunk
        half = CHUNK_LANES // 2
        while half:
            lanes = lanes[:half] + lanes[half:]
            half //= 2
        sums[r] = lanes[0]
    return rows[starts], sums, sizes


def mean_squares(gradients: np.ndarray) -> np.ndarray:
    """The mean square of each row, in the order of LaneShape."""
    num, dim = gradients.shape
    vector = 4 if dim % 4 == 0 else 1
    lanes = 1
    while lanes < dim // vector and lanes < 32:
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


def step(optimizer: int, hyper: np.ndarray, g: np.ndarray, row: np.ndarray, states: list[np.ndarray]):
    """New rows and states."""
    h = hyper.astype(F32)
    if optimizer == SGD:
        return row - h[0] * g, []
    if optimizer == ADAGRAD:
        acc = states[0] + g * g
        inverse = np.where(acc > 0, F32(1) / np.sqrt(np.where(acc > 0, acc, F32(1)) + h[1]), F32(0))
        return row - h[0] * (g * inverse), [acc]
    if optimizer == ROWWISE_ADAGRAD:
        acc = states[0] + mean_squares(g)[:, None]
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
    ):
        self.slabs, self.dim, self.num_tables, self.optimizer = tuple(slabs), dim, num_tables, optimizer
        self.capacity = sum(slabs)
        self.tables = table_words(num_tables)
        self.seed = np.array([11, 12], np.uint32)
        widths = [dim if width == "dim" else width for width in STATES[optimizer]]
        self.initial = tuple(float(F32(value)) for value in initial[: len(widths)])
        self.rows = np.full((self.capacity, dim), F32(-99))  # what nobody writes stays so
        self.records = np.full((self.capacity, 4), EMPTY)
        self.states = [np.full((self.capacity, w), F32(v)) for w, v in zip(widths, self.initial, strict=True)]
        self.counters = np.zeros(8, np.uint32)
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
        cut = lambda array: tuple(part.copy() for part in np.split(array, ends))
        return {
            "index": self.index.copy(),
            "counters": self.counters.copy(),
            "table_rows": self.table_rows.copy(),
            "rows": cut(self.rows),
            "records": cut(self.records),
            "states": tuple(cut(state) for state in self.states),
        }

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
        self.counters[LONGEST_PROBE] = max(int(self.counters[LONGEST_PROBE]), probes)

    # Writing ------------------------------------------------------------------------------------------------

    def find_or_insert(self, keys: np.ndarray, tables: np.ndarray, is_asked: np.ndarray):
        """Row ids and counts; one occurrence after the other."""
        row_ids = np.full(len(keys), NO_ROW, np.uint32)
        counts = np.zeros((self.num_tables, 5), np.int32)
        homes, key_list, table_list = self.homes(keys, tables), keys.tolist(), tables.tolist()
        new = []
        for i in np.flatnonzero(is_asked).tolist():
            table, pair = table_list[i], (table_list[i], key_list[i])
            row_id = self.row_of.get(pair)
            if pair in self.bucket_of:
                self._saw((self.bucket_of[pair] - homes[i]) % self.num_buckets + 1)
                row_ids[i] = row_id
                counts[table, FOUND] += 1
                continue
            bucket, probes = self._walk(homes[i])
            self._saw(probes)
            if bucket is None or self.num_rows_left == 0:
                self.counters[NUM_UNPLACED] += bucket is None
                counts[table, REFUSED] += 1
                continue
            row_ids[i] = self._take_row(pair)
            self._enter(pair, bucket, int(row_ids[i]))
            counts[table, INSERTED] += 1
            new.append(i)
        self.rows[row_ids[new]] = initial_rows(self.tables, self.seed, keys[new], tables[new], self.dim)
        return row_ids, counts

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
        dead = np.flatnonzero((self.records[: self.counters[NUM_ALLOCATED], :2] == EMPTY).all(axis=1))
        self.records[: len(dead), 3] = dead
        self.counters[[FREE_BEGIN, FREE_END]] = 0, len(dead)
        self.counters[GENERATION] += num_erased > 0
        self.rebuild()
        return num_erased

    def rebuild(self, num_buckets: int | None = None, salt: int | None = None) -> None:
        """Another index over the same records."""
        self._empty_index(num_buckets or self.num_buckets, self.salt if salt is None else salt)
        self.counters[[NUM_UNPLACED, LONGEST_PROBE]] = 0
        pairs = sorted(self.row_of, key=self.row_of.get)
        keys, tables = as_keys([key for _, key in pairs]), np.array([table for table, _ in pairs], np.int64)
        for pair, home in zip(pairs, self.homes(keys, tables), strict=True):
            bucket, probes = self._walk(home)
            self._saw(probes)
            if bucket is None:
                self.counters[NUM_UNPLACED] += 1
            else:
                self._enter(pair, bucket, self.row_of[pair])

    # Batches ------------------------------------------------------------------------------------------------

    def row_values(self, batch: Batch, row_ids: np.ndarray, *, may_be_zeros: bool = False) -> np.ndarray:
        """The row of each position: the store's, else the one it would get, else zeros."""
        values = np.zeros((len(batch.keys), self.dim), F32)
        known = row_ids < self.capacity
        values[known] = self.rows[row_ids[known]]
        unknown = ~known & batch.is_asked
        if may_be_zeros:
            zeros = [np.full(f.num_keys, f.unknown_zeros) for f in batch.features]
            unknown &= ~np.concatenate([*zeros, np.zeros(0, bool)])
        keys, tables = batch.keys[unknown], batch.tables[unknown]
        values[unknown] = initial_rows(self.tables, self.seed, keys, tables, self.dim)
        return values

    def embeddings(self, batch: Batch, values: np.ndarray) -> list[np.ndarray]:
        """Of all features."""
        present = batch.keys != U64(PADDING_KEY)
        parts = [batch.part(f) for f in range(len(batch.features))]
        return [combine(f, values[part], present[part]) for f, part in zip(batch.features, parts, strict=True)]

    def lookup(self, batch: Batch):
        """Embeddings, row ids, counts."""
        row_ids, counts = self.find_or_insert(batch.keys, batch.tables, batch.is_asked)
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
        counts = np.zeros((self.num_tables, 5), np.int32)
        known = row_ids < self.capacity
        for outcome, which in ((FOUND, batch.is_asked & known), (absent, batch.is_asked & ~known)):
            counts[:, outcome] = np.bincount(batch.tables[which], minlength=self.num_tables)
        counts[:, PADDED] = batch.count_padding(self.num_tables)
        return counts

    def update(self, batch: Batch, row_ids, gradients, generations, hyper, row_gradient=SUM_OF_USES):
        """Rows with gradients that are not finite by table, and uses of stale plans."""
        present = batch.keys != U64(PADDING_KEY)
        used_rows, terms, num_stale = [np.zeros(0, np.int64)], [np.zeros((0, self.dim), F32)], 0
        for f, feature in enumerate(batch.features):
            part = batch.part(f)
            with_row = batch.is_asked[part] & (row_ids[part] < self.capacity)
            if generations[feature.plan] != self.counters[GENERATION]:
                num_stale += int(with_row.sum())
                continue
            factors, left_out = use_factors(feature, present[part])
            uses = np.flatnonzero(with_row & ~left_out)
            used_rows.append(row_ids[part][uses].astype(np.int64))
            terms.append(factors[uses, None] * gradients[f][feature.bags()[uses]])
        rows, sums, num_uses = sum_uses(np.concatenate(used_rows), np.concatenate(terms))
        if row_gradient == MEAN_OF_USES:
            sums = sums * (F32(1) / num_uses.astype(F32))[:, None]
        if row_gradient == SQRT_OF_USES:
            sums = sums * (F32(1) / np.sqrt(num_uses.astype(F32)))[:, None]
        finite = np.isfinite(sums).all(axis=1)
        nonfinite_tables = self.records[rows[~finite], 2]
        rows, sums = rows[finite], sums[finite]
        new_rows, new_states = step(self.optimizer, hyper, sums, self.rows[rows], [s[rows] for s in self.states])
        self.rows[rows] = new_rows
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

"""New rows: the right distribution, and a function of only (seed, table, key, column)."""

import collections
import functools
import json
import pathlib
import re

import compiled_cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok

DIM = 16
KEYS = np.arange(4096, dtype=np.uint64) * np.uint64(2**33 + 3)
GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "golden").glob("initial_rows_v*.json"))
# Statistics of 65,536 fixed random numbers: the results never change, so five sigma is generous.
NUM = KEYS.size * DIM
SIGMAS = 5


def draw(initializer, *, name="user", dim=DIM, keys=KEYS, seed=0):
    """Returns initial rows of many keys."""
    return programs.initial_rows(name, dim, keys, initializer=initializer, seed=seed).astype(np.float64)


def assert_moments(values, mean, std, kurtosis):
    """Checks that mean and variance are within five of their own standard deviations."""
    assert abs(values.mean() - mean) < SIGMAS * std / np.sqrt(values.size)
    assert abs(values.var() / std**2 - 1) < SIGMAS * np.sqrt((kurtosis - 1) / values.size)


def assert_distribution(values, cdf):
    """Checks Kolmogorov's distance; 2.5 / sqrt(n) is exceeded by chance once in 10^5."""
    ordered = np.sort(values.reshape(-1))
    rank = (np.arange(ordered.size) + 0.5) / ordered.size
    assert np.abs(cdf(ordered) - rank).max() < 2.5 / np.sqrt(ordered.size)


def normal_cdf(x):
    """Returns the distribution function of the standard normal distribution."""
    from math import erf

    return 0.5 * (1 + np.vectorize(erf)(np.asarray(x) / np.sqrt(2)))


def test_zeros_and_constant():
    """The values are exact."""
    np.testing.assert_array_equal(draw(jaxsok.initializers.zeros()), 0)
    np.testing.assert_array_equal(draw(jaxsok.initializers.constant(-1.25)), -1.25)
    np.testing.assert_array_equal(draw(jaxsok.initializers.constant(0.1)), np.float64(np.float32(0.1)))


@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (1.0, 3.0), (0.0, 1e-6)])
def test_uniform(low, high):
    """Values are in [low, high), with a uniform distribution."""
    values = draw(jaxsok.initializers.uniform(low, high))
    # The scaling rounds once or twice in float32: an ulp of the larger bound.
    ulp = np.spacing(np.float32(max(abs(low), abs(high))))
    assert values.min() >= low - ulp and values.max() <= high + ulp
    unit = (values - low) / (high - low)
    assert_moments(unit, 0.5, np.sqrt(1 / 12), 1.8)
    assert_distribution(unit, lambda x: x)


def test_uniform_defaults():
    """The interval is [-0.05, 0.05), which is also the default of a table."""
    values = draw(jaxsok.initializers.uniform())
    assert -0.05001 < values.min() < -0.0499 and 0.0499 < values.max() < 0.05001
    assert jaxsok.TableSpec("a", 4, jaxsok.optim.sgd(1.0)).initializer == jaxsok.initializers.uniform()


@pytest.mark.parametrize(("stddev", "mean"), [(0.01, 0.0), (2.0, -3.0)])
def test_normal(stddev, mean):
    """Mean, deviation, shape and tails are those of the normal distribution."""
    unit = (draw(jaxsok.initializers.normal(stddev, mean)) - mean) / stddev
    assert_moments(unit, 0.0, 1.0, 3.0)
    assert_distribution(unit, normal_cdf)
    assert 3.5 < np.abs(unit).max() < 7  # of 65,536 numbers the largest is about 4.3


@pytest.mark.parametrize(("stddev", "mean"), [(0.01, 0.0), (2.0, -3.0)])
def test_truncated_normal(stddev, mean):
    """The distribution is cut at two standard deviations, as in JAX and Flax, without a peak there."""
    unit = (draw(jaxsok.initializers.truncated_normal(stddev, mean)) - mean) / stddev
    assert np.abs(unit).max() <= 2 + 1e-5  # float32 rounding of a number of size 7 over 2
    assert np.abs(unit).max() > 1.99
    inside = normal_cdf(2) - normal_cdf(-2)
    assert_distribution(unit, lambda x: (normal_cdf(np.clip(x, -2, 2)) - normal_cdf(-2)) / inside)
    assert np.isclose(unit.std(), 0.87962566, rtol=0.01)  # of the standard normal cut at two; 65,536 draws
    assert len(np.unique(unit)) > 0.9 * NUM


@pytest.mark.parametrize(
    "make", [jaxsok.initializers.uniform, jaxsok.initializers.normal, jaxsok.initializers.truncated_normal]
)
def test_no_correlation(make):
    """Columns, neighbouring keys, twins in the high word, seeds and tables are uncorrelated."""
    base = draw(make())
    center = base.mean()

    def correlation(first, second):
        return np.mean((first - center) * (second - center)) / base.var()

    bound = SIGMAS / np.sqrt(NUM / 2)
    consecutive = draw(make(), keys=np.arange(4096))
    pairs = {
        "columns": (base[:, :-1], base[:, 1:]),
        "neighbours": (consecutive[:-1], consecutive[1:]),
        "high word": (consecutive, draw(make(), keys=np.arange(4096, dtype=np.uint64) + np.uint64(2**32))),
        "sign bit": (consecutive, draw(make(), keys=np.arange(4096, dtype=np.uint64) + np.uint64(2**63))),
        "seeds": (base, draw(make(), seed=1)),
        "distant seeds": (base, draw(make(), seed=2**31)),
        "tables": (base, draw(make(), name="item")),
        "key and seed": (draw(make(), keys=np.arange(1, 4097)), draw(make(), keys=np.arange(4096), seed=1)),
    }
    for name, (first, second) in pairs.items():
        assert abs(correlation(first, second)) < bound, name
    assert len(np.unique(base, axis=0)) == len(KEYS)


def test_rows_do_not_depend_on_the_batch():
    """Order, other keys and repetition do not affect a key's row."""
    collection = programs.one_table(dim=DIM, capacity=256)
    keys = np.array([9, 2**63, 4, 77])
    rows = []
    for order in (keys, keys[::-1], np.repeat(keys, 3), np.concatenate([np.arange(100, 130), keys])):
        state = programs.insert(collection, collection.init(seed=0), order)
        rows.append(np.stack([programs.rows_of(collection, state)[int(key) % 2**64] for key in keys]))
    for other in rows[1:]:
        np.testing.assert_array_equal(rows[0], other)
    np.testing.assert_array_equal(rows[0], programs.initial_rows("user", DIM, keys))


def test_rows_do_not_depend_on_store_capacity_or_optimizer(by_doubling):
    """Alone, with another table, in a large store, after growth, with another optimizer: the bits are equal."""
    initializer = jaxsok.initializers.normal(1.0)
    want = programs.initial_rows("item", DIM, [5, 6], initializer=initializer)

    def rows(optimizer, before=(), **spec):
        tables = [
            jaxsok.TableSpec("user", DIM, optimizer, capacity=16),
            jaxsok.TableSpec("item", DIM, optimizer, initializer=initializer, **spec),
        ]
        collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])
        state = collection.init(seed=0)
        for keys in before:
            features = programs.batch(collection, user=np.array(keys), item=np.full(len(keys), -1))
            _, state, _ = collection.lookup(state, features)
        features = programs.batch(collection, user=np.array([5, 6]), item=np.array([5, 6]))
        state = collection.grow(state, features)
        assert collection.growth.num_grown == len(before)
        embeddings, _, _ = collection.lookup(state, features)
        return np.asarray(embeddings["item"])

    np.testing.assert_array_equal(rows(jaxsok.optim.sgd(1.0), capacity=16), want)
    np.testing.assert_array_equal(rows(jaxsok.optim.adam(0.1), capacity=1 << 15), want)
    np.testing.assert_array_equal(rows(jaxsok.optim.sgd(0.5), before=[range(32)], capacity=16), want)


def test_columns_do_not_depend_on_the_dim():
    """Rows are a function of the column: a wider table begins with the same numbers."""
    narrow, wide = (programs.initial_rows("user", dim, [1, 2, 3]) for dim in (3, 16))
    np.testing.assert_array_equal(narrow, wide[:, :3])


@pytest.mark.skipif(not GOLDEN, reason="no tests/golden/initial_rows_v*.json: run tests/golden/make_golden.py")
@pytest.mark.parametrize("path", GOLDEN[-1:], ids=lambda path: path.stem)
def test_golden_rows(path):
    """The rows of fixed keys in the newest format version are equal to the bit on every machine."""
    golden = json.loads(path.read_text())
    assert len(golden["cases"]) >= 4
    for case in golden["cases"]:
        initializer = getattr(jaxsok.initializers, case["initializer"])(*case["parameters"])
        keys = [int(key) for key in case["keys"]]
        got = programs.initial_rows(case["table"], case["dim"], keys, initializer=initializer, seed=case["seed"])
        want = np.array([[float.fromhex(value) for value in row] for row in case["rows"]], np.float32)
        np.testing.assert_array_equal(programs.bits(got), programs.bits(want), err_msg=str(case["initializer"]))


# --------------------------------------------------------------------------------------------------------------
# Dependence on the dim


@pytest.mark.parametrize("dim", [1, 3, 16])
def test_fan_in_is_a_kernel_initializer(dim):
    """The bits equal the kernels' own with the deviation of this dim, without new code at run time."""
    initializers = jaxsok.initializers
    deviation = np.sqrt(2.0 / dim)
    within_two = 0.8796256610342398  # for the standard normal distribution cut at two
    pairs = {
        "uniform": initializers.uniform(-np.sqrt(3.0) * deviation, np.sqrt(3.0) * deviation),
        "normal": initializers.normal(deviation),
        "truncated_normal": initializers.truncated_normal(deviation / within_two),
    }
    for distribution, same in pairs.items():
        got, want = (draw(i, dim=dim, keys=KEYS[:64]) for i in (initializers.fan_in(2.0, distribution), same))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)  # a parameter may round differently


@pytest.mark.parametrize("distribution", ["uniform", "normal", "truncated_normal"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_fan_in_is_that_of_jax(distribution, scale):
    """Deviation and largest value equal `variance_scaling`'s, whose fan-in of a [num_rows, dim] table is its dim."""
    make = jax.nn.initializers.variance_scaling(scale, "fan_in", distribution, in_axis=1, out_axis=0)
    want = np.asarray(make(jax.random.key(0), (KEYS.size, DIM)))
    got = draw(jaxsok.initializers.fan_in(scale, distribution))
    assert np.isclose(got.std(), np.sqrt(scale / DIM), rtol=SIGMAS / np.sqrt(NUM))
    assert np.isclose(got.std(), want.std(), rtol=2 * SIGMAS / np.sqrt(NUM))
    if distribution != "normal":
        assert np.isclose(np.abs(got).max(), np.abs(want).max(), rtol=1e-3)


def test_fan_in_follows_the_dim():
    """One declaration serves tables of several dims."""
    initializer = jaxsok.initializers.fan_in()
    for dim in (4, 64):
        assert np.isclose(draw(initializer, dim=dim).var() * dim, 1, rtol=0.02)
    assert initializer.for_dim(4) != initializer.for_dim(64) and initializer == jaxsok.initializers.fan_in()


# --------------------------------------------------------------------------------------------------------------
# Initial rows from XLA: a matrix, a user's function

TRACED_DIM = 3
# Eighths: exact in 16 bits, and sums of them in any order.
MATRIX = (np.arange(7 * TRACED_DIM, dtype=np.float32).reshape(7, TRACED_DIM) - 10) / 8
MIXED = [0, 1, 6, 7, 2**32, 2**32 + 3, 2**63, 2**64 - 2, 2**40 + 11, 12345678901234567]


def row_of_key(words, columns):
    """Computes an integer from both words and the column, then one exact product: a user's function."""
    mixed = (words[0] * jnp.uint32(3) + words[1] * jnp.uint32(5)) % jnp.uint32(64)
    return (mixed.astype(jnp.int32) - columns * 2).astype(jnp.float32) / 8


def oracle_row(table, key):
    """Returns the declared rows in Python's integers; for the kernels' own initializers it reads the kernels."""
    key = int(key) % 2**64
    if table == "matrix":
        return MATRIX[key % 7]
    if table == "own":
        low, high = key % 2**32, key >> 32
        mixed = (low * 3 + high * 5) % 2**32 % 64
        return np.array([(mixed - 2 * column) / 8 for column in range(TRACED_DIM)], np.float32)
    return programs.initial_rows("kernel", TRACED_DIM, [key], seed=4)[0]


@functools.cache
def declare_mixed(num_shards=None, dtype="float32", placement=jaxsok.SHARDED, capacity=256, unknown="initial"):
    """Declares a store with a table of each kind, with single keys and bags; if sharded, one table is on a shard."""
    initializers = jaxsok.initializers
    kinds = {
        "matrix": initializers.matrix(MATRIX),
        "kernel": initializers.uniform(),
        "own": initializers.function(row_of_key, "of_key"),
    }
    options = {"capacity": capacity, "dtype": dtype, "unknown": unknown}
    placements = {name: placement for name in kinds}
    if placement == jaxsok.SHARDED:
        placements["matrix"] = jaxsok.on(1)
    tables = [
        jaxsok.TableSpec(
            name, TRACED_DIM, jaxsok.optim.sgd(0.5), initializer=kind, placement=placements[name], **options
        )
        for name, kind in kinds.items()
    ]
    features = [jaxsok.FeatureSpec(name, name) for name in ("own", "kernel", "matrix")]
    features.append(jaxsok.FeatureSpec("bag", "own", combiner="sum", max_keys=16))
    return programs.over(num_shards, tables, features) if num_shards else jaxsok.Collection(tables, features)


NUM_SAMPLES = 8
TABLE_OF = {"own": "own", "kernel": "kernel", "matrix": "matrix", "bag": "own"}


def mixed_batch(rng, pool):
    """Returns keys of a pool, some of them padding."""
    pool = np.array([*pool, 2**64 - 1], np.uint64)
    lengths = rng.integers(0, 3, NUM_SAMPLES)
    raw = {name: rng.choice(pool, NUM_SAMPLES) for name in ("own", "kernel", "matrix")}
    return raw | {"bag": jaxsok.Bags(rng.choice(pool, lengths.sum()), lengths=lengths)}


def bags_of(raw):
    """Returns by feature the keys of each sample, without padding."""
    bags = {name: [[key] for key in raw[name].tolist()] for name in ("own", "kernel", "matrix")}
    ends = np.cumsum(raw["bag"].lengths)
    bags["bag"] = [raw["bag"].keys[e - n : e].tolist() for e, n in zip(ends, raw["bag"].lengths, strict=True)]
    return {name: [[key for key in bag if key != 2**64 - 1] for bag in of] for name, of in bags.items()}


class Dense:
    """A dict of rows under plain SGD with gradient 1: an oracle for `lookup` and `update`."""

    def __init__(self, dtype):
        self.rows, self.dtype = {}, np.dtype(dtype)

    def row(self, table, key):
        return self.rows.get((table, key), oracle_row(table, key).astype(self.dtype)).astype(np.float32)

    def embeddings(self, raw):
        nothing = np.zeros(TRACED_DIM, np.float32)
        return {
            name: np.stack([sum((self.row(TABLE_OF[name], key) for key in bag), nothing) for bag in bags])
            for name, bags in bags_of(raw).items()
        }

    def step(self, raw):
        uses = collections.Counter(
            (TABLE_OF[name], key) for name, of in bags_of(raw).items() for bag in of for key in bag
        )
        stepped = {at: self.row(*at) - np.float32(0.5 * n) for at, n in uses.items()}
        self.rows |= {at: row.astype(self.dtype) for at, row in stepped.items()}


@functools.cache
def unit_step(collection):
    """Returns a step whose gradient is 1."""

    def run(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        state, stats = collection.update(state, plan, jax.tree.map(jnp.ones_like, embeddings))
        return embeddings, state, stats

    return jax.jit(run, donate_argnums=0, compiler_options=programs.quickly())


def assert_like_dense(collection, dense, state, raw):
    """Makes one step of both; before it, checks that `find` reads what the lookup gives."""
    dtype = collection.tables[0].dtype
    features = programs.batch(collection, **raw)
    found, _ = programs.find(collection)(state, features)
    found = jax.device_get(found)
    embeddings, state, stats = unit_step(collection)(state, features)
    stats.check()
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]  # of the kernel's row, in bags of one
    for name, want in dense.embeddings(raw).items():
        got = np.asarray(embeddings[name], np.float32)
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), got, err_msg=name)
        if name == "kernel":
            np.testing.assert_allclose(got, want, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, want.astype(dense.dtype), err_msg=name)
    dense.step(raw)
    counted = stats.to_dict()
    for table in ("own", "kernel", "matrix"):
        num_rows = sum(of == table for of, _ in dense.rows)
        assert counted[table]["num_rows"] == num_rows
    return state, counted


@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), keys=st.lists(st.integers(0, 2**64 - 2), min_size=1, max_size=12))
def test_traced_rows_are_those_of_a_dict(seed, keys):
    """New, known, repeated and padding keys over steps agree to the bit, with tables of each kind in one store."""
    rng, collection, dense = np.random.default_rng(seed), declare_mixed(), Dense("float32")
    state = collection.init(seed=4)
    for step in range(3):
        batch = mixed_batch(rng, [*keys, *MIXED][: 4 + 6 * step])
        state, counted = assert_like_dense(collection, dense, state, batch)
        for table in counted.values():
            assert table["num_found"] + table["num_inserted"] + table["num_padding"] in (NUM_SAMPLES, NUM_SAMPLES + 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_traced_rows_of_16_bits(dtype):
    """Rows are rounded to nearest when they are made; absent rows read the rounded values."""
    initializers = jaxsok.initializers
    values = np.random.default_rng(0).normal(size=(5, TRACED_DIM)).astype(np.float32)
    values[0] = [3.3e38, -3.3e38, 65519.0]  # beyond the largest float16; 3.3e38 is below that of bfloat16
    want = np.clip(values, -np.float32(jnp.finfo(dtype).max), np.float32(jnp.finfo(dtype).max)).astype(jnp.dtype(dtype))
    collection = programs.one_table(dim=TRACED_DIM, dtype=dtype, initializer=initializers.matrix(values))
    features = programs.batch(collection, user=np.arange(5))
    found, _ = collection.find(collection.init(), features)
    embeddings, state, _ = jax.jit(collection.lookup, donate_argnums=0)(collection.init(), features)
    rows = programs.rows_of(collection, state)
    for got in (found["user"], embeddings["user"], np.stack([rows[key] for key in range(5)])):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))
    wide = programs.one_table(
        dim=TRACED_DIM, dtype=dtype, embedding_dtype="float32", initializer=initializers.matrix(values)
    )
    found, _ = wide.find(wide.init(), features_like(wide, np.arange(5)))
    np.testing.assert_array_equal(found["user"], want.astype(np.float32))


def features_like(collection, keys):
    """Returns a batch for a collection of one table."""
    return programs.batch(collection, user=keys)


@pytest.mark.parametrize(
    ("path", "placement"), [("rounds", jaxsok.SHARDED), ("pipeline", jaxsok.SHARDED), ("rounds", jaxsok.REPLICATED)]
)
def test_traced_rows_on_a_mesh(path, placement):
    """Owners or all shards make the rows of one device, over steps."""
    collection, dense = declare_mixed(2, placement=placement), Dense("float32")
    state, rng = collection.init(seed=4), np.random.default_rng(1)
    raws = [mixed_batch(rng, MIXED[: 4 + 3 * step]) for step in range(3)]
    if path == "rounds":
        for raw in raws:
            state, _ = assert_like_dense(collection, dense, state, raw)
        return
    for raw, (_, plan) in zip(raws, collection.pipeline(raws), strict=True):
        embeddings, state, stats = planned_step(collection)(state, plan)
        stats.check()
        for name, want in dense.embeddings(raw).items():
            np.testing.assert_allclose(embeddings[name], want, atol=1e-6)
        dense.step(raw)


@functools.cache
def planned_step(collection):
    """Returns a step with a plan."""

    def run(state, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        state, stats = collection.update(state, plan, jax.tree.map(jnp.ones_like, embeddings))
        return embeddings, state, stats

    return jax.jit(run, donate_argnums=0, compiler_options=programs.quickly())


@pytest.mark.parametrize("num_shards", [None, 2])
def test_keys_that_were_not_sent_read_their_initial_rows(num_shards):
    """Keys refused for lack of rows, or of room on the wire, read their initial rows and are counted."""
    if num_shards is None:
        collection = declare_mixed(capacity=1)  # three rows for all tables
        features = programs.batch(collection, **distinct_raw())
        asked = features
    else:
        collection = declare_mixed(num_shards)
        features = programs.batch(collection, **distinct_raw())
        asked = collection.plan(features, send_capacity=(4,))
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=4), asked)
    want = Dense("float32").embeddings(distinct_raw())
    for name in want:
        np.testing.assert_allclose(embeddings[name], want[name], atol=1e-7, err_msg=name)
    _, stats = programs.update(collection)(state, plan, embeddings)
    counted = stats.to_dict()
    assert sum(table["num_refused"] for table in counted.values()) > 0
    for table, num_keys in (("own", NUM_SAMPLES + 4), ("kernel", NUM_SAMPLES), ("matrix", NUM_SAMPLES)):
        parts = counted[table]
        assert parts["num_found"] + parts["num_inserted"] + parts["num_refused"] == num_keys


def distinct_raw():
    """Returns a batch in which every key is new."""
    raw = {name: np.arange(NUM_SAMPLES) * 8 + i for i, name in enumerate(("own", "kernel", "matrix"))}
    return {name: keys.astype(np.uint64) for name, keys in raw.items()} | {
        "bag": jaxsok.Bags(np.arange(100, 104, dtype=np.uint64), lengths=np.array([2, 0, 0, 1, 0, 0, 1, 0]))
    }


@pytest.mark.parametrize("num_shards", [None, 2])
def test_find_of_unknown_keys_gives_zeros_where_declared(num_shards):
    """As with the kernels' own initializers, unknown keys give zeros and count as missing."""
    collection = declare_mixed(num_shards, unknown="zeros")
    features = programs.batch(collection, **distinct_raw())
    # The compiler for GPUs of jaxlib 0.11.2 ends the process where `shard_map` takes an array without elements.
    program = programs.find(collection).lower(collection.init(seed=4), features).as_text()
    assert not re.search(r"%arg\d+: tensor<0x", program)
    found, stats = programs.find(collection)(collection.init(seed=4), features)
    for name, got in found.items():
        assert not np.asarray(got).any(), name
    counted = stats.to_dict()
    assert [counted[name]["num_missing"] for name in ("matrix", "kernel", "own")] == [8, 8, 12]
    assert all(table["num_refused"] == table["num_found"] == 0 for table in counted.values())


def test_rows_that_were_erased_are_made_anew():
    """A reused row id holds the new key's row; a key that returns has its initial row."""
    collection = programs.one_table(dim=TRACED_DIM, initializer=jaxsok.initializers.matrix(MATRIX), capacity=4)
    state = programs.insert(collection, collection.init(), [1, 2, 3])
    for erased, inserted in (([2], [9]), ([1, 9], [2, 1, 11])):
        state, _ = collection.erase(state, "user", programs.as_array(erased))
        state = programs.insert(collection, state, inserted)
        for key, row in programs.rows_of(collection, state).items():
            np.testing.assert_array_equal(row, MATRIX[key % 7])


def test_rows_in_later_slabs():
    """After growth new rows are in several slabs, and absent keys still read theirs."""
    collection = programs.one_table(dim=TRACED_DIM, initializer=jaxsok.initializers.matrix(MATRIX), capacity=4)
    state = collection.init()
    for first in range(0, 40, 4):
        features = programs.batch(collection, user=np.arange(first, first + 4))
        _, state, _ = programs.lookup(collection)(collection.grow(state), features)
    assert len(state.stores[0].rows) >= 3
    for key, row in programs.rows_of(collection, state).items():
        np.testing.assert_array_equal(row, MATRIX[key % 7])
    found, _ = collection.find(state, programs.batch(collection, user=programs.as_array([39, 1000, 0, 2**64 - 3])))
    np.testing.assert_array_equal(found["user"], MATRIX[[39 % 7, 1000 % 7, 0, (2**64 - 3) % 7]])


def test_slabs_at_most():
    """If XLA makes rows, lookups have an additional slab, so such a store has one slab less."""
    assert declare_mixed().stores[0].max_slabs == 23 and programs.one_table().stores[0].max_slabs == 24


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 4096, 65_535, 65_536, 65_537, 2**31 - 1])
def test_keys_modulo_rows(divisor):
    """Unsigned 64-bit keys are reduced with 32-bit arithmetic."""
    keys = [*MIXED, *np.random.default_rng(0).integers(0, 2**63, 50).tolist(), 2**64 - 2, 2**64 - 3]
    got = jaxsok.initializers._modulo(jnp.asarray(programs.words(keys)), divisor)
    assert got.tolist() == [key % divisor for key in keys]


def test_a_function_sees_one_key():
    """A key's row does not depend on other keys, whatever the function does."""

    def greedy(words, columns):
        """Tries to read all keys of the batch."""
        return jnp.cumsum(words.astype(jnp.float32))[-1] + jnp.zeros(columns.shape)

    initializer = jaxsok.initializers.function(greedy, "greedy")
    alone = programs.initial_rows("user", 2, [5], initializer=initializer)
    among = programs.initial_rows("user", 2, [9, 5, 7], initializer=initializer)
    np.testing.assert_array_equal(alone[0], among[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_function_that_is_not_finite(bad):
    """The embedding has the bad value; the update skips and counts the row, and `check` raises."""

    def row_of_parity(words, columns):
        """Returns values that are not finite for odd keys."""
        return jnp.where(words[0] % 2 == 1, jnp.float32(bad), 1.0) * jnp.ones(columns.shape)

    collection = programs.one_table(initializer=jaxsok.initializers.function(row_of_parity, "parity"))
    embeddings, state, plan = collection.lookup(
        collection.init(), programs.batch(collection, user=programs.as_array([4, 7]))
    )
    np.testing.assert_array_equal(embeddings["user"], [[1.0] * 4, [bad] * 4])
    state, stats = collection.update(state, plan, embeddings)
    assert programs.total(stats, "num_nonfinite") == 1
    with pytest.raises(jaxsok.NonFiniteGradientError, match="'user': 1"):
        stats.check()
    rows = programs.rows_of(collection, state)
    np.testing.assert_array_equal([rows[4], rows[7]], [[0.0] * 4, [bad] * 4])


def test_equal_declarations():
    """A matrix is compared by its numbers, a function by itself and its name: both enter the fingerprint."""
    initializers = jaxsok.initializers
    same, other = initializers.matrix(MATRIX.tolist()), initializers.matrix(-MATRIX)
    assert initializers.matrix(MATRIX) == same != other and len({initializers.matrix(MATRIX), same, other}) == 2
    assert initializers.matrix(MATRIX) != initializers.matrix(MATRIX.reshape(TRACED_DIM, 7))
    named, renamed = initializers.function(row_of_key, "a"), initializers.function(row_of_key, "b")
    assert (
        named == initializers.function(row_of_key, "a") != renamed
        and len({named, renamed, initializers.function(row_of_key, "a")}) == 2
    )
    assert named != initializers.function(lambda *given: row_of_key(*given), "a")

    def fingerprint(initializer):
        return programs.one_table(dim=TRACED_DIM, initializer=initializer).fingerprint

    of_each = [initializers.zeros(), initializers.fan_in(), initializers.matrix(MATRIX), other, named, renamed]
    assert len({fingerprint(each) for each in of_each}) == len(of_each)
    # In another process the function is another object, so its name represents it.
    assert fingerprint(named) == fingerprint(initializers.function(lambda *given: row_of_key(*given), "a"))
    assert fingerprint(initializers.fan_in(1.0, "normal")) == fingerprint(initializers.normal(1 / np.sqrt(TRACED_DIM)))


def test_a_matrix_is_a_copy():
    """Later changes of the user's array do not affect the table."""
    values = MATRIX.copy()
    initializer = jaxsok.initializers.matrix(values)
    values[:] = 100
    np.testing.assert_array_equal(programs.initial_rows("user", TRACED_DIM, [8], initializer=initializer)[0], MATRIX[1])


def declared_with(initializer):
    """Declares a table of dim 3."""
    return jaxsok.TableSpec("item", TRACED_DIM, jaxsok.optim.sgd(0.1), initializer=initializer)


BAD = {
    "scale": (ValueError, "fan_in: scale: got -1", lambda initializers: initializers.fan_in(-1.0)),
    "scale kind": (ValueError, "fan_in: scale: got 'a'", lambda initializers: initializers.fan_in("a")),
    "distribution": (
        ValueError,
        "fan_in: distribution: got 'cauchy', wanted",
        lambda initializers: initializers.fan_in(1, "cauchy"),
    ),
    "integers": (
        TypeError,
        r"matrix: values: got int64\[1, 3\], wanted floats",
        lambda initializers: initializers.matrix([[1, 2, 3]]),
    ),
    "one axis": (
        ValueError,
        r"matrix: values: got shape \[3\], wanted",
        lambda initializers: initializers.matrix(np.ones(3)),
    ),
    "no rows": (
        ValueError,
        r"matrix: values: got shape \[0, 3\]",
        lambda initializers: initializers.matrix(np.ones((0, 3))),
    ),
    "infinite": (
        ValueError,
        "matrix: values: got infinite or NaN",
        lambda initializers: initializers.matrix([[1e39, 0.0, 0.0]]),
    ),
    "columns": (
        ValueError,
        'TableSpec "item": initializer: got a matrix of 2 columns, wanted dim = 3',
        lambda initializers: declared_with(initializers.matrix(np.ones((4, 2)))),
    ),
    "no function": (
        TypeError,
        "function: fn: got 3, wanted a function",
        lambda initializers: initializers.function(3, "a"),
    ),
    "no name": (
        TypeError,
        "function: name: got '', wanted a string",
        lambda initializers: initializers.function(row_of_key, ""),
    ),
    "shape": (
        TypeError,
        r"TableSpec \"item\": initializer: got function\('a'\) that gives float32\[2\] .* wanted float32\[3\]",
        lambda initializers: declared_with(initializers.function(lambda words, columns: jnp.zeros(2), "a")),
    ),
    "dtype": (
        TypeError,
        r"initializer: got function\('a'\) that gives int32\[3\] .* wanted float32\[3\]",
        lambda initializers: declared_with(initializers.function(lambda words, columns: columns, "a")),
    ),
    "nothing": (
        TypeError,
        r"got function\('a'\) that gives NoneType",
        lambda initializers: declared_with(initializers.function(lambda words, columns: None, "a")),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_declarations(name):
    """Bad declarations are refused by name."""
    error, message, make = BAD[name]
    with pytest.raises(error, match=message):
        make(jaxsok.initializers)


# The programs that XLA makes


@functools.cache
def large(capacity, dtype, num_shards=None):
    """Declares one store of two tables, one of them with rows from XLA."""
    values = np.arange(4 * 16, dtype=np.float32).reshape(4, 16)
    kinds = {"a": jaxsok.initializers.matrix(values), "b": jaxsok.initializers.uniform()}
    tables = [
        jaxsok.TableSpec(name, 16, jaxsok.optim.adagrad(0.1), initializer=kind, capacity=capacity, dtype=dtype)
        for name, kind in kinds.items()
    ]
    features = [jaxsok.FeatureSpec(name, name) for name in kinds]
    collection = programs.over(num_shards, tables, features) if num_shards else jaxsok.Collection(tables, features)
    return collection, programs.batch(collection, a=np.arange(32), b=np.arange(32))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lookup", "float16"), ("linear step", "bfloat16"), ("two lookups", "float32")],
)
def test_rows_are_written_where_they_lie(name, dtype):
    """There is no copy of a table, and temporary memory does not depend on the table's size."""
    temporary = []
    for capacity in (1 << 13, 1 << 17):
        collection, features = large(capacity, dtype)
        function, num_batches = {
            "lookup": (collection.lookup, 1),
            "linear step": (compiled_cases.linear_step(collection), 1),
            "two lookups": (compiled_cases.two_lookups(collection), 2),
        }[name]
        state = collection.init(seed=0)
        program = jax.jit(function, donate_argnums=0, compiler_options=programs.in_place())
        compiled = program.lower(state, *[features] * num_batches).compile()
        assert not compiled_cases.table_copies(compiled.as_text(), capacity * 16 * 2)
        before = compiled_cases.addresses(state)
        results = compiled(state, *[features] * num_batches)
        state = results[1] if name == "lookup" else results[0]
        assert before == compiled_cases.addresses(state)
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert abs(temporary[1] - temporary[0]) <= compiled_cases.ALIGNMENT_BYTES


def test_rows_are_written_where_they_lie_on_a_mesh():
    """Every shard writes in place, in the loop over rounds."""
    collection, features = large(1 << 15, "float32", 2)
    state = collection.init(seed=0)
    step = jax.jit(compiled_cases.linear_step(collection), donate_argnums=0, compiler_options=programs.in_place())
    compiled = step.lower(state, features).compile()
    assert not compiled_cases.table_copies(compiled.as_text(), (1 << 14) * 16 * 4)
    before = compiled_cases.addresses(state)
    state, *_ = compiled(state, features)
    assert before == compiled_cases.addresses(state)


def test_other_stores_look_up_in_one_call():
    """Only a store with such a table uses more calls, and only if a feature reads the table."""
    collection = jaxsok.Collection(
        [
            jaxsok.TableSpec("a", TRACED_DIM, jaxsok.optim.sgd(0.1), initializer=jaxsok.initializers.matrix(MATRIX)),
            jaxsok.TableSpec("b", TRACED_DIM, jaxsok.optim.sgd(0.1)),
            jaxsok.TableSpec("c", 5, jaxsok.optim.sgd(0.1), initializer=jaxsok.initializers.fan_in()),
        ],
        [jaxsok.FeatureSpec(name, name) for name in "bc"],
    )
    features = programs.batch(collection, b=np.arange(4), c=np.arange(4))
    text = jax.jit(collection.lookup).lower(collection.init(), features).as_text()
    assert text.count("@jaxsok_lookup(") == 2 and "jaxsok_table" not in text


def test_memory_of_initial_rows_is_counted():
    """The estimate includes XLA's memory for a lookup that computes rows."""
    collection = programs.one_table(
        dim=64, initializer=jaxsok.initializers.matrix(np.ones((2, 64))), capacity=1 << 15, combiner="mean"
    )
    batch = collection.batch({"user": np.arange(1 << 16).reshape(1 << 14, 4)})
    state = collection.init()
    compiled = jax.jit(collection.lookup, donate_argnums=0).lower(state, batch.features).compile()
    estimate = collection.memory_estimate(state, batch)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    least = 0.5 if jax.default_backend() == "cpu" else 0.2  # XLA's GPU compiler keeps less of it in memory
    assert least * estimate.stores[0].step["workspace"] < temporary <= estimate.stores[0].step["workspace"] + (4 << 20)


def test_names_stand_for_calls_without_arguments():
    """A string is equal to the call, so both spellings of a table have one state."""
    for name in ("zeros", "ones", "uniform", "normal", "truncated_normal", "fan_in"):
        spec = jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.1), initializer=name)
        assert spec.initializer == getattr(jaxsok.initializers, name)()
    assert (draw("ones") == 1).all() and (draw("zeros") == 0).all() and draw("uniform").std() > 0.01
    with pytest.raises(TypeError, match=r"initializer: got 'matrix', wanted .*'ones'"):
        jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.1), initializer="matrix")

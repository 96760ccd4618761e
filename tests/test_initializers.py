"""New rows: the right distribution, and a function of (seed, table, key, column) alone."""

import json
import pathlib

import numpy as np
import programs
import pytest

import jaxsok

DIM = 16
KEYS = np.arange(4096, dtype=np.uint64) * np.uint64(2**33 + 3)
GOLDEN = sorted((pathlib.Path(__file__).parent / "golden").glob("initial_rows_v*.json"))
# Statistics of 65,536 numbers that are drawn once and for all: they pass or fail for ever, five sigma is generous.
NUM = KEYS.size * DIM
SIGMAS = 5


def draw(initializer, *, name="user", dim=DIM, keys=KEYS, seed=0):
    """Initial rows of many keys."""
    return programs.initial_rows(name, dim, keys, initializer=initializer, seed=seed).astype(np.float64)


def assert_moments(values, mean, std, kurtosis):
    """Mean and variance within five of their own standard deviations."""
    assert abs(values.mean() - mean) < SIGMAS * std / np.sqrt(values.size)
    assert abs(values.var() / std**2 - 1) < SIGMAS * np.sqrt((kurtosis - 1) / values.size)


def assert_distribution(values, cdf):
    """Kolmogorov's distance; 2.5 / sqrt(n) is passed by chance once in 10^5."""
    ordered = np.sort(values.reshape(-1))
    rank = (np.arange(ordered.size) + 0.5) / ordered.size
    assert np.abs(cdf(ordered) - rank).max() < 2.5 / np.sqrt(ordered.size)


def normal_cdf(x):
    """Of the standard normal distribution."""
    from math import erf

    return 0.5 * (1 + np.vectorize(erf)(np.asarray(x) / np.sqrt(2)))


def test_zeros_and_constant():
    """Exactly."""
    np.testing.assert_array_equal(draw(jaxsok.initializers.zeros()), 0)
    np.testing.assert_array_equal(draw(jaxsok.initializers.constant(-1.25)), -1.25)
    np.testing.assert_array_equal(draw(jaxsok.initializers.constant(0.1)), np.float64(np.float32(0.1)))


@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (1.0, 3.0), (0.0, 1e-6)])
def test_uniform(low, high):
    """In [low, high), flat."""
    values = draw(jaxsok.initializers.uniform(low, high))
    # The scaling rounds once or twice in float32: an ulp of the larger bound.
    ulp = np.spacing(np.float32(max(abs(low), abs(high))))
    assert values.min() >= low - ulp and values.max() <= high + ulp
    unit = (values - low) / (high - low)
    assert_moments(unit, 0.5, np.sqrt(1 / 12), 1.8)
    assert_distribution(unit, lambda x: x)


def test_uniform_defaults():
    """[-0.05, 0.05), the default of a table too."""
    values = draw(jaxsok.initializers.uniform())
    assert -0.05001 < values.min() < -0.0499 and 0.0499 < values.max() < 0.05001
    assert jaxsok.TableSpec("a", 4, jaxsok.optim.sgd(1.0)).initializer == jaxsok.initializers.uniform()


@pytest.mark.parametrize(("stddev", "mean"), [(0.01, 0.0), (2.0, -3.0)])
def test_normal(stddev, mean):
    """Mean, deviation, shape and tails."""
    unit = (draw(jaxsok.initializers.normal(stddev, mean)) - mean) / stddev
    assert_moments(unit, 0.0, 1.0, 3.0)
    assert_distribution(unit, normal_cdf)
    assert 3.5 < np.abs(unit).max() < 7  # of 65,536 numbers the largest is about 4.3


@pytest.mark.parametrize(("stddev", "mean"), [(0.01, 0.0), (2.0, -3.0)])
def test_truncated_normal(stddev, mean):
    """The normal distribution between two standard deviations, as in JAX and Flax: nothing beyond, no heap there."""
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
    """Between columns, neighbouring keys, twins in the high word, seeds and tables: as of strangers."""
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
    """Order, company and repetition are nothing to a key."""
    collection = programs.one_table(dim=DIM, capacity=256)
    keys = np.array([9, 2**63, 4, 77])
    rows = []
    for order in (keys, keys[::-1], np.repeat(keys, 3), np.concatenate([np.arange(100, 130), keys])):
        state = programs.insert(collection, collection.init(seed=0), order)
        rows.append(np.stack([programs.rows_of(collection, state)[int(key) % 2**64] for key in keys]))
    for other in rows[1:]:
        np.testing.assert_array_equal(rows[0], other)
    np.testing.assert_array_equal(rows[0], programs.initial_rows("user", DIM, keys))


def test_rows_do_not_depend_on_store_capacity_or_optimizer():
    """Alone, beside another table, in a large store, after growth, with another optimizer: the same bits."""
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
        state = collection.grow(state)
        features = programs.batch(collection, user=np.array([5, 6]), item=np.array([5, 6]))
        embeddings, _, _ = collection.lookup(state, features)
        return np.asarray(embeddings["item"])

    np.testing.assert_array_equal(rows(jaxsok.optim.sgd(1.0), capacity=16), want)
    np.testing.assert_array_equal(rows(jaxsok.optim.adam(0.1), capacity=1 << 15), want)
    np.testing.assert_array_equal(rows(jaxsok.optim.sgd(0.5), before=[range(30)], capacity=16), want)


def test_columns_do_not_depend_on_the_dim():
    """A function of the column: a wider table begins with the same numbers."""
    narrow, wide = (programs.initial_rows("user", dim, [1, 2, 3]) for dim in (3, 16))
    np.testing.assert_array_equal(narrow, wide[:, :3])


@pytest.mark.skipif(not GOLDEN, reason="no tests/golden/initial_rows_v*.json: run tests/golden/make_golden.py")
@pytest.mark.parametrize("path", GOLDEN[-1:], ids=lambda path: path.stem)
def test_golden_rows(path):
    """The newest version of the format: rows of fixed keys, to the bit, on every machine, for ever."""
    golden = json.loads(path.read_text())
    assert len(golden["cases"]) >= 4
    for case in golden["cases"]:
        initializer = getattr(jaxsok.initializers, case["initializer"])(*case["parameters"])
        keys = [int(key) for key in case["keys"]]
        got = programs.initial_rows(case["table"], case["dim"], keys, initializer=initializer, seed=case["seed"])
        want = np.array([[float.fromhex(value) for value in row] for row in case["rows"]], np.float32)
        np.testing.assert_array_equal(programs.bits(got), programs.bits(want), err_msg=str(case["initializer"]))

"""Rows of 16 bits: read as floats, summed and stepped in float32, rounded once; bits independent of the row's place.

Exact expectations come from NumPy float32 and `ml_dtypes`. `kernel_model.py` and `ffi/tests/core_test.cc` test the
random bits themselves; this module tests their statistics, and what they must not depend on.
"""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import exchange, planner, store

F32 = np.float32
HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
DTYPES = [(dtype, embedding_dtype) for dtype in HALVES for embedding_dtype in (None, "float32")]
COMBINERS = [(None, False), *itertools.product(("sum", "mean", "sqrtn"), (False, True))]
NUM_SHARDS = 4


def covering(values):
    """Combines values with dtypes so that each value meets each dtype of rows and each of embeddings: half of all."""
    return [(*DTYPES[k], value) for i, value in enumerate(values) for k in ((1, 2) if i % 2 else (0, 3))]


def assert_same_bits(got, want):
    """Checks that dtype, shape and bits are equal."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(programs.bits(got), programs.bits(want))


def sgd_table(name="user", dim=4, dtype="bfloat16", **spec):
    """Declares rows that start at one and move by their gradients."""
    spec = {"initializer": jaxsok.initializers.constant(1.0), "capacity": 64, **spec}
    return jaxsok.TableSpec(name, dim, jaxsok.optim.sgd(1.0), dtype=dtype, **spec)


def one_key_each(tables, **options):
    """Returns a collection with a feature for each table and one key per sample."""
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(t.name, t.name) for t in tables], **options)


@programs.for_equals
def step_of(collection):
    """Returns a jitted lookup and update by the given gradients; it returns the state and its embeddings."""

    def step(state, features, gradients):
        embeddings, state, plan = collection.lookup(state, features)
        state, stats = collection.update(state, plan, gradients)
        return state, embeddings, stats

    return jax.jit(step, compiler_options=programs.quickly())


def after_steps(collection, keys, gradients, *, num_steps=1, seed=0, batch=None):
    """Returns rows by key after steps with equal gradients for every embedding: {table: {key: row}}."""
    state = collection.init(seed=seed)
    for _ in range(num_steps):
        features = collection.batch(keys if batch is None else batch).features
        state = collection.grow(state)
        given = {name: jnp.asarray(gradients[name], step_dtype(collection)) for name in gradients}
        state, _, stats = step_of(collection)(state, features, given)
        stats.check()
    return {table.name: programs.rows_of(collection, state, table.name) for table in collection.tables}


def step_dtype(collection):
    """Returns the dtype of the gradients of the first store."""
    return collection.stores[0].embedding_dtype


# Embeddings ----------------------------------------------------------------------------------------------------


def combine_bag(rows, weights, combiner):
    """Returns one bag's embedding in float32, key by key."""
    if not rows:
        return None
    total = None
    for row, weight in zip(rows, weights, strict=True):
        term = row.astype(F32) if weight is None else F32(weight) * row.astype(F32)
        total = term if total is None else total + term
    if combiner in ("mean", "sqrtn"):
        divisor = F32(0)
        for weight in weights:
            w = F32(1) if weight is None else F32(weight)
            divisor = divisor + (w * w if combiner == "sqrtn" else w)
        divisor = np.sqrt(divisor) if combiner == "sqrtn" else divisor
        total = total * (F32(1) / divisor) if divisor != 0 else np.zeros_like(total)
    return total


@pytest.mark.parametrize(("dtype", "embedding_dtype", "kind"), covering(COMBINERS))
def test_embeddings(dtype, embedding_dtype, kind):
    """Lookup and find are exact: rows are widened, added in order, divided, and rounded once at the end."""
    combiner, weighted = kind
    collection = programs.one_table(
        dim=7,
        dtype=dtype,
        embedding_dtype=embedding_dtype,
        combiner=combiner,
        weighted=weighted,
        initializer=jaxsok.initializers.normal(1.0),
    )
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 30, (12, 3))
    keys[rng.random(keys.shape) < 0.2] = -1
    weights = rng.uniform(-1, 2, keys.shape).astype(F32)
    features = programs.batch(collection, user=jaxsok.Bags(keys, weights=weights) if weighted else keys)
    embeddings, state, _ = programs.lookup(collection)(collection.init(seed=5), features)
    rows = programs.rows_of(collection, state)
    assert all(row.dtype == HALVES[dtype] for row in rows.values())
    want = np.zeros((*keys.shape, 7) if combiner is None else (len(keys), 7), F32)
    for i, bag in enumerate(keys.tolist()):
        real = [(key, weights[i, j] if weighted else None) for j, key in enumerate(bag) if key != -1]
        if combiner is None:
            want[i] = [np.zeros(7, F32) if key == -1 else rows[key].astype(F32) for key in bag]
        elif real:
            want[i] = combine_bag([rows[key] for key, _ in real], [weight for _, weight in real], combiner)
    want = want.astype(HALVES[dtype] if embedding_dtype is None else F32)
    assert_same_bits(embeddings["user"], want)
    found, stats = programs.find(collection)(state, features)
    assert_same_bits(found["user"], want)
    stats.check()


@pytest.mark.parametrize(
    ("dtype", "embedding_dtype", "initializer"), covering(["uniform", "normal", "truncated_normal", "constant"])
)
def test_new_rows_are_rounded_to_nearest(dtype, embedding_dtype, initializer):
    """New rows are the float32 table's rows in 16 bits; `find` gives them before they exist."""
    make = {"constant": lambda: jaxsok.initializers.constant(0.1)}
    values = make.get(initializer, getattr(jaxsok.initializers, initializer))()
    keys = np.arange(40)
    want = programs.initial_rows("user", 5, keys, initializer=values).astype(HALVES[dtype])
    collection = programs.one_table(dim=5, dtype=dtype, embedding_dtype=embedding_dtype, initializer=values)
    state, features = collection.init(seed=0), programs.batch(collection, user=keys)
    found, stats = programs.find(collection)(state, features)
    assert int(stats.num_missing[0]) == 40
    looked_up, state, _ = programs.lookup(collection)(state, features)
    exported = programs.rows_of(collection, state)
    assert_same_bits(np.stack([exported[key] for key in range(40)]), want)
    for embeddings in (found, looked_up):
        assert_same_bits(embeddings["user"], want.astype(F32) if embedding_dtype else want)


@pytest.mark.parametrize("dtype", HALVES)
def test_unknown_zeros(dtype):
    """A table that declares zeros for unknown keys gives zeros of its dtype."""
    collection = programs.one_table(dtype=dtype, unknown="zeros")
    found, _ = programs.find(collection)(collection.init(), programs.batch(collection, user=np.arange(3)))
    assert_same_bits(found["user"], np.zeros((3, 4), HALVES[dtype]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_devices", [1, NUM_SHARDS])
def test_embeddings_stay_finite(dtype, num_devices):
    """A sum beyond the largest number becomes the largest number; as float32 it is exact."""
    largest = float(ml_dtypes.finfo(HALVES[dtype]).max)
    for embedding_dtype in (None, "float32"):
        values = jaxsok.initializers.constant(largest if dtype == "float16" else largest / 2)
        table = sgd_table(dtype=dtype, embedding_dtype=embedding_dtype, initializer=values)
        over = {} if num_devices == 1 else {"mesh": programs.mesh(num_devices), "axis": "data"}
        collection = one_key_each([table], **over)
        keys = np.arange(12).reshape(4, 3) if dtype == "float16" else np.arange(8).reshape(4, 2)
        batch = collection.batch({"user": keys})
        embeddings, _, _ = programs.lookup(collection)(collection.init(), batch.features)
        want = 3 * largest if dtype == "float16" and embedding_dtype else largest
        np.testing.assert_array_equal(np.asarray(embeddings["user"]).astype(np.float64), np.full((4, 4), want))


# Steps to nearest ----------------------------------------------------------------------------------------------

# Decay rates whose powers are exact, so that the bias corrections are.
OPTIMIZERS = {
    "sgd": jaxsok.optim.sgd(0.3),
    "adagrad": jaxsok.optim.adagrad(0.3),
    "rowwise_adagrad": jaxsok.optim.rowwise_adagrad(0.3),
    "adam": jaxsok.optim.adam(0.3, b1=0.5, b2=0.5),
}


def step_row(name, row, state, g, step):
    """Steps one row in float32, operation by operation."""
    rate = F32(0.3)
    if name == "sgd":
        return row - rate * g, []
    if name == "adagrad":
        accumulator = state[0] + g * g
        return row - rate * (g * (F32(1) / np.sqrt(accumulator + F32(1e-7)))), [accumulator]
    if name == "rowwise_adagrad":
        total = F32(0)
        for square in g * g:
            total = total + square
        accumulator = state[0] + total / F32(len(g))
        return row - (rate / (np.sqrt(accumulator) + F32(1e-8))) * g, [accumulator]
    m, v = F32(0.5) * state[0] + F32(0.5) * g, F32(0.5) * state[1] + F32(0.5) * (g * g)
    correction = F32(1) - F32(0.5) ** F32(step + 1)
    return row - rate * ((m / correction) / (np.sqrt(v / correction) + F32(1e-8))), [m, v]


@pytest.mark.parametrize(("dtype", "embedding_dtype", "name"), covering(OPTIMIZERS))
def test_every_optimizer_to_nearest(dtype, embedding_dtype, name):
    """Rows and float32 state after three steps are exact; gradients have the embeddings' dtype."""
    collection = programs.one_table(
        optimizer=OPTIMIZERS[name], dtype=dtype, embedding_dtype=embedding_dtype, rounding="nearest", dim=4
    )
    rng = np.random.default_rng(1)
    keys = np.array([3, 5, 3, 7, 5])
    initial = {"sgd": [], "adagrad": [np.full(4, 0.1, F32)], "rowwise_adagrad": [np.zeros(1, F32)]}
    states = {key: list(initial.get(name, [np.zeros(4, F32)] * 2)) for key in (3, 5, 7)}
    half = HALVES[dtype]
    start = programs.initial_rows("user", 4, [3, 5, 7]).astype(half)
    rows = dict(zip((3, 5, 7), start, strict=True))
    state, features = collection.init(seed=0), programs.batch(collection, user=keys)
    for step in range(3):
        gradients = rng.normal(size=(5, 4)).astype(F32).astype(F32 if embedding_dtype else half)
        state, _, stats = step_of(collection)(state, features, {"user": jnp.asarray(gradients)})
        stats.check()
        sums = {key: sum(gradients[i].astype(F32) for i in np.flatnonzero(keys == key)) for key in rows}
        for key in rows:
            row, states[key] = step_row(name, rows[key].astype(F32), states[key], sums[key], step)
            rows[key] = row.astype(half)
    got = programs.export(collection, state)
    for key in rows:
        assert_same_bits(got[key][1], rows[key])
        for have, want in zip(jax.tree.leaves(got[key][2]), states[key], strict=True):
            assert_same_bits(have, want)


def test_gradients_have_the_dtype_of_embeddings():
    """jax.grad gives cotangents of that dtype; update accepts other dtypes too, and does not round float32 first."""
    for embedding_dtype, want in ((None, jnp.bfloat16), ("float32", jnp.float32)):
        collection = programs.one_table(dtype="bfloat16", embedding_dtype=embedding_dtype)
        features = programs.batch(collection, user=np.arange(3))
        embeddings, _, _ = collection.lookup(collection.init(), features)
        gradients = jax.grad(lambda e: (e["user"].astype(jnp.float32) ** 2).sum())(embeddings)
        assert embeddings["user"].dtype == want and gradients["user"].dtype == want
    # 1 - 0.0117 is nearer to 0.98828125 than to 0.9921875 only with the gradient's last bits.
    collection = one_key_each([sgd_table(dtype="bfloat16", rounding="nearest")])
    tie = 1 - (0.98828125 + 0.9921875) / 2
    for gradient, row in ((tie + 2.0**-16, 0.98828125), (tie - 2.0**-16, 0.9921875)):
        rows = after_steps_with(collection, np.array([7]), jnp.full((1, 4), gradient, jnp.float32))
        np.testing.assert_array_equal(rows[7].astype(F32), np.full(4, row, F32))


def after_steps_with(collection, keys, gradient):
    """Returns rows after one step by a gradient of any dtype."""
    features = programs.batch(collection, user=keys)
    state, _, _ = step_of(collection)(collection.init(), features, {"user": gradient})
    return programs.rows_of(collection, state)


# Stochastic steps ----------------------------------------------------------------------------------------------

SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # of the numbers from 1 on


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("share", [0.125, 0.5, 0.9])
def test_the_mean_over_keys_is_kept(dtype, share):
    """If rows of 1.0 should move by a fraction of the spacing, that fraction of them moves by the whole spacing."""
    num_keys, dim = 8192, 8
    collection = one_key_each([sgd_table(dim=dim, dtype=dtype, embedding_dtype="float32", capacity=num_keys)])
    gradient = np.full((num_keys, dim), -share * SPACING[dtype], F32)
    rows = after_steps(collection, {"user": np.arange(num_keys)}, {"user": gradient})["user"]
    moved = (np.stack(list(rows.values())).astype(np.float64) - 1.0) / SPACING[dtype]
    assert set(np.unique(moved)) == {0.0, 1.0}
    # Five standard deviations of the mean of independent draws: exceeded once in 1.7 million times.
    deviation = np.sqrt(share * (1 - share))
    assert abs(moved.mean() - share) < 5 * deviation / np.sqrt(moved.size)
    for axis, size in ((0, num_keys), (1, dim)):
        assert (np.abs(moved.mean(axis=axis) - share) < 6 * deviation / np.sqrt(size)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_the_mean_over_steps_is_kept(dtype):
    """Rows move by the sum of 200 steps of a sixteenth of the spacing on average; to nearest they never move."""
    num_keys, dim, num_steps = 64, 16, 200
    share = 1 / 16
    keys = {"user": np.arange(num_keys)}
    gradient = {"user": np.full((num_keys, dim), -share * SPACING[dtype], F32)}
    moved = {}
    for rounding in ("stochastic", "nearest"):
        table = sgd_table(dim=dim, dtype=dtype, embedding_dtype="float32", rounding=rounding)
        rows = after_steps(one_key_each([table]), keys, gradient, num_steps=num_steps)["user"]
        moved[rounding] = (np.stack(list(rows.values())).astype(np.float64) - 1.0) / SPACING[dtype]
    assert not moved["nearest"].any()
    # Each step is a separate draw: a row's sum is binomial, and rows are independent.
    variance = num_steps * share * (1 - share)
    assert abs(moved["stochastic"].mean() - num_steps * share) < 5 * np.sqrt(variance / moved["stochastic"].size)
    # The variance of n draws has a relative error of about sqrt(2 / n): steps with repeated bits would have
    # num_steps times the variance.
    assert abs(moved["stochastic"].var() / variance - 1) < 6 * np.sqrt(2 / moved["stochastic"].size)


def test_random_bits_depend_on_table_seed_key_step_and_column():
    """Half of the draws differ if any of these differs; all agree if none does."""
    num_keys, dim = 256, 8
    names = ("a", "b")
    collection = one_key_each([sgd_table(name, dim, embedding_dtype="float32", capacity=num_keys) for name in names])
    assert len(collection.stores) == 1
    keys = {name: np.arange(num_keys) for name in names}
    gradient = {name: np.full((num_keys, dim), -0.5 * SPACING["bfloat16"], F32) for name in names}

    def move_rows(num_steps=1, seed=0):
        rows = after_steps(collection, keys, gradient, num_steps=num_steps, seed=seed)
        return [np.stack([rows[name][key] for key in range(num_keys)]).astype(np.float64) for name in names]

    first, again, other_seed = move_rows()[0], move_rows()[0], move_rows(seed=1)[0]
    second_step = move_rows(num_steps=2)[0] - first
    np.testing.assert_array_equal(first, again)
    is_up = first > 1
    halves = (move_rows()[1] > 1, other_seed > 1, second_step > 0, np.roll(is_up, 1, 0), np.roll(is_up, 1, 1))
    for other in halves:
        # 2,048 fair coins: six deviations of 22.6.
        assert abs(int((is_up != other).sum()) - 1024) < 6 * 22.7


@pytest.mark.parametrize("dtype", HALVES)
def test_exact_results_stay(dtype):
    """Results that the dtype holds exactly, here small integers, are never rounded away."""
    collection = one_key_each([sgd_table(dtype=dtype, initializer=jaxsok.initializers.zeros())])
    keys = {"user": np.arange(32)}
    gradient = {"user": -np.arange(32 * 4).reshape(32, 4).astype(F32) % 16}
    rows = after_steps(collection, keys, gradient, num_steps=8)["user"]
    for key in range(32):
        np.testing.assert_array_equal(rows[key].astype(F32), -8 * gradient["user"][key])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_rows_stay_finite(dtype, rounding):
    """Rows pushed beyond the largest number stop there, and can return."""
    largest = float(ml_dtypes.finfo(HALVES[dtype]).max)
    for sign in (1, -1):
        # float32 holds the push: beyond its own largest number rows are infinite, as they would be with 32 bits.
        values = jaxsok.initializers.constant(sign * largest)
        table = sgd_table(dtype=dtype, embedding_dtype="float32", rounding=rounding, initializer=values)
        collection = one_key_each([table])
        state, features = collection.init(), programs.batch(collection, user=np.arange(16))
        for part, low, high in ((0.003, 1, 1), (0.001, 1, 1), (0.003, 1, 1), (-0.4, 0.59, 0.61)):
            gradient = np.full((16, 4), -sign * part * largest, F32)
            state, _, stats = step_of(collection)(state, features, {"user": jnp.asarray(gradient)})
            stats.check()
            rows = np.stack(list(programs.rows_of(collection, state).values())).astype(np.float64)
            assert (rows * sign >= low * largest).all() and (rows * sign <= high * largest).all()


# Independence of the bits --------------------------------------------------------------------------------------


def uneven_gradients(num_keys, dim, seed=0):
    """Returns sums of one use by key, so that the order of addition does not matter."""
    return np.random.default_rng(seed).normal(size=(num_keys, dim)).astype(F32)


def assert_same_rows(got, want):
    """Checks that rows are equal by key, to the bit."""
    assert got.keys() == want.keys()
    for key in want:
        assert_same_bits(got[key], want[key])


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_do_not_depend_on_order_row_id_capacity_or_store(dtype):
    """Another order of keys, other row ids, other rows in the store, or more slabs give the same rows."""
    num_keys, dim = 40, 7
    table = sgd_table("user", dim, dtype, capacity=64)
    gradient = uneven_gradients(num_keys, dim)
    want = after_steps(one_key_each([table]), {"user": np.arange(num_keys)}, {"user": gradient}, num_steps=3)["user"]
    order = np.random.default_rng(9).permutation(num_keys)
    shuffled = after_steps(one_key_each([table]), {"user": order}, {"user": gradient[order]}, num_steps=3)["user"]
    assert_same_rows(shuffled, want)
    small = sgd_table("user", dim, dtype, capacity=2)
    grown = one_key_each([small])
    grown.init()
    assert_same_rows(after_steps(grown, {"user": order}, {"user": gradient[order]}, num_steps=3)["user"], want)
    others = [sgd_table("a", dim, dtype, capacity=64), sgd_table("b", dim, dtype), table]
    together = one_key_each(others)
    assert len(together.stores) == 1
    few = np.full(num_keys, jaxsok.PADDING_KEY)
    few[:5] = np.arange(5)
    keys = {"a": np.arange(num_keys), "b": few, "user": order}
    gradients = {"a": gradient, "b": gradient, "user": gradient[order]}
    rows = after_steps(together, keys, gradients, num_steps=3)
    assert_same_rows(rows["user"], want)
    assert any(
        (programs.bits(rows["a"][key]) != programs.bits(want[key])).any() for key in want
    )  # another name gives other bits


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_do_not_depend_on_freed_row_ids(dtype):
    """The previous key of a row has no effect."""
    collection = one_key_each([sgd_table(dtype=dtype)])
    gradient = uneven_gradients(8, 4)
    want = after_steps(collection, {"user": np.arange(8)}, {"user": gradient})["user"]
    state = programs.insert(collection, collection.init(), np.arange(100, 110))
    state, _ = collection.erase(state, "user", np.arange(100, 110, 2))
    features = programs.batch(collection, user=np.arange(8))
    state, _, _ = step_of(collection)(state, features, {"user": jnp.asarray(gradient, dtype)})
    rows = programs.rows_of(collection, state)
    assert_same_rows({key: rows[key] for key in range(8)}, want)


PLACEMENTS = {"sharded": jaxsok.SHARDED, "on": jaxsok.on(2), "replicated": jaxsok.REPLICATED}


@pytest.mark.parametrize(
    ("dtype", "embedding_dtype", "path"),
    [
        pytest.param(*dtypes, path, marks=pytest.mark.slow if (path == "rounds") != (dtypes == DTYPES[0]) else ())
        for dtypes, path in itertools.product(DTYPES, ("rounds", "pipeline"))
    ],
)
def test_one_device_and_four_give_the_same_bits(dtype, embedding_dtype, path):
    """Embeddings and rows agree after three steps, in every placement, two tables per store, if sums have one use."""
    num_keys, dim = 32, 5

    def tables(on_mesh):
        for kind, placement in PLACEMENTS.items():
            for twin in ("", "_twin"):
                place = placement if on_mesh else jaxsok.SHARDED
                yield sgd_table(kind + twin, dim, dtype, embedding_dtype=embedding_dtype, placement=place, capacity=64)

    keys = {table.name: np.arange(num_keys) * 7 + i for i, table in enumerate(tables(False))}
    gradients = {name: uneven_gradients(num_keys, dim, i) for i, name in enumerate(keys)}
    results = []
    for num_devices in (1, NUM_SHARDS):
        over = {} if num_devices == 1 else {"mesh": programs.mesh(num_devices), "axis": "data"}
        collection = one_key_each(list(tables(num_devices > 1)), **over)
        state, embeddings = collection.init(seed=3), []
        given = {
            name: jnp.asarray(gradient, collection.stores[0].embedding_dtype) for name, gradient in gradients.items()
        }
        if path == "pipeline" and num_devices > 1:
            for _, plan in collection.pipeline(keys for _ in range(3)):
                state, looked_up, stats = step_of(collection)(state, plan, given)
                embeddings.append(looked_up)
        else:
            for _ in range(3):
                state, looked_up, stats = step_of(collection)(state, collection.batch(keys).features, given)
                embeddings.append(looked_up)
        stats.check()
        rows = {name: programs.by_key(collection, state, name) for name in keys}
        results.append((jax.tree.map(np.asarray, embeddings), rows))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for single, four in zip(*map(jax.tree.leaves, results), strict=True):
        assert_same_bits(four, single)


def test_two_runs_give_the_same_bits():
    """Two runs with hot keys, bags and two features over one store agree (law 3)."""
    tables = [sgd_table("item", 12, "bfloat16", capacity=256, initializer=jaxsok.initializers.normal(1.0))]
    features = [
        jaxsok.FeatureSpec("a", "item", combiner="mean"),
        jaxsok.FeatureSpec("b", "item", combiner=None),
    ]
    collection = jaxsok.Collection(tables, features)
    rng = np.random.default_rng(2)
    batch = {"a": rng.integers(0, 40, (64, 3)) ** 2 % 50, "b": rng.integers(0, 60, 64)}
    packed = collection.batch(batch).features
    step = jax.jit(
        programs.train_step(collection, lambda e: sum((x.astype(jnp.float32) ** 2).sum() for x in e.values()))
    )
    runs = []
    for _ in range(2):
        state = collection.init(seed=1)
        for _ in range(3):
            state, value, _ = step(state, packed)
        runs.append((np.asarray(value), collection.export_table(state, "item")))
    for first, second in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(programs.bits(first), programs.bits(second))


def test_a_scan_is_its_steps():
    """The step, on which the random bits depend, advances inside a program as well."""
    collection = one_key_each([sgd_table(dim=8)])
    features = programs.batch(collection, user=np.arange(16))
    gradient = {"user": jnp.asarray(uneven_gradients(16, 8), jnp.bfloat16)}

    def scan_step(state, _):
        _, state, plan = collection.lookup(state, features)
        state, _ = collection.update(state, plan, gradient)
        return state, None

    scanned, _ = jax.jit(lambda state: jax.lax.scan(scan_step, state, length=4))(collection.init())
    state = collection.init()
    for _ in range(4):
        state, _, _ = step_of(collection)(state, features, gradient)
    assert_same_rows(programs.rows_of(collection, scanned), programs.rows_of(collection, state))


def test_plans_apart_give_the_same_bits():
    """A plan made ahead, and several plans in one update, give equal bits."""
    collection = one_key_each([sgd_table(dim=8)])
    features = programs.batch(collection, user=np.arange(16))
    gradient = {"user": jnp.asarray(uneven_gradients(16, 8), jnp.bfloat16)}
    want = after_steps(collection, {"user": np.arange(16)}, {"user": uneven_gradients(16, 8)})["user"]
    embeddings, state, plan = collection.lookup(collection.init(), collection.plan(features))
    assert embeddings["user"].dtype == jnp.bfloat16
    state, _ = collection.update(state, plan, gradient)
    assert_same_rows(programs.rows_of(collection, state), want)
    state, plans = collection.init(), []
    for part in (np.arange(8), np.arange(8, 16)):
        _, state, plan = collection.lookup(state, programs.batch(collection, user=part))
        plans.append(plan)
    # One of the gradients is float32, so all are treated as float32.
    halves = [{"user": gradient["user"][:8]}, {"user": gradient["user"][8:].astype(jnp.float32)}]
    state, _ = collection.update(state, plans, halves)
    assert_same_rows(programs.rows_of(collection, state), want)


# The wire ------------------------------------------------------------------------------------------------------


def on_the_wire(collection, keys):
    """Returns the types that the all-to-alls of a step carry, as named in XLA's text."""
    features = collection.batch({"user": keys}).features

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, embeddings)

    text = jax.jit(step).lower(collection.init(), features).as_text()
    lines = [line for line in text.splitlines() if '"stablehlo.all_to_all"' in line]
    return {line.split(": (tensor<")[1].split(">")[0].split("x")[-1] for line in lines}


def test_rows_travel_as_they_are_stored():
    """By default the wire has 16-bit words of rows, and float32 gradients on the way back."""
    keys = np.arange(64)
    for dtype, spec, want in (
        ("bfloat16", {}, {"ui32", "ui16", "f32"}),
        ("float16", {}, {"ui32", "ui16", "f32"}),
        ("float32", {}, {"ui32", "f32"}),
        ("float16", {"gradients": "bfloat16"}, {"ui32", "ui16"}),
        ("bfloat16", {"rows": "float32"}, {"ui32", "f32"}),
        ("bfloat16", {"rows": "float8_e4m3fn"}, {"ui32", "ui8", "f32"}),
    ):
        collection = one_key_each(
            [sgd_table(dtype=dtype)],
            mesh=programs.mesh(NUM_SHARDS),
            axis="data",
            exchange=jaxsok.ExchangeSpec(**spec),
        )
        assert on_the_wire(collection, keys) == want, (dtype, spec)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_named_dtypes_on_the_wire(wire):
    """Values that a named dtype holds arrive exactly; float8 within its four bits."""
    keys = {"user": np.arange(32)}
    values = jaxsok.initializers.uniform(0.5, 1.0)
    tables = [sgd_table(dim=8, dtype="bfloat16", initializer=values)]
    here, there = (
        one_key_each(tables),
        programs.over(NUM_SHARDS, tables, [jaxsok.FeatureSpec("user", "user")], rows=wire),
    )
    embeddings = [
        programs.lookup(collection)(collection.init(), collection.batch(keys).features)[0]["user"]
        for collection in (here, there)
    ]
    single, four = (np.asarray(value).astype(F32) for value in embeddings)
    np.testing.assert_allclose(four, single, rtol=2.0**-4 if wire == "float8_e4m3fn" else 0)


def test_bytes_on_the_wire_by_the_planner():
    """Rows of 16 bits count half; gradients count as float32."""
    assert exchange.wire_bytes(32, None, "bfloat16") == 64 and exchange.wire_bytes(32, None) == 128
    tables = [jaxsok.TableSpec(dtype, 32, jaxsok.optim.sgd(0.1), dtype=dtype, capacity=1000) for dtype in DTYPE_BYTES]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    proposal = planner.propose(tables, features, num_shards=4, keys_per_step=100)
    lines = {line.table.name: line for line in proposal.lines}
    for name, itemsize in DTYPE_BYTES.items():
        distinct = lines[name].distinct_keys
        assert lines[name].wire_bytes["sharded"] == round(distinct * 3 / 4 * (16 + 32 * itemsize + 128))
        assert lines[name].wire_bytes["replicated"] == round(distinct * 3 * (16 + 128))
        assert lines[name].num_bytes == 1000 * (32 * itemsize + 48)


# Stores --------------------------------------------------------------------------------------------------------

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bytes(dtype):
    """memory_estimate and row_bytes equal the sizes of the arrays, also after growing."""
    collection = programs.one_table(dim=6, dtype=dtype, optimizer=jaxsok.optim.adam(0.1), capacity=64)
    state = collection.init()
    assert store.row_bytes(collection.stores[0]) == 6 * DTYPE_BYTES[dtype] + 2 * 6 * 4 + 16 + 32
    for _ in range(2):
        arrays = state.stores[0]
        (estimate,) = collection.memory_estimate(state).stores
        assert estimate.state["rows"] == sum(slab.nbytes for slab in arrays.rows)
        assert estimate.state["optimizer_state"] == sum(slab.nbytes for slab in jax.tree.leaves(arrays.states))
        state = programs.insert(collection, state, np.arange(100), grow=True)
    assert [slab.dtype for slab in state.stores[0].rows] == [jnp.dtype(dtype)] * len(state.stores[0].rows)
    assert len(state.stores[0].rows) > 1


def test_tables_share_a_store_if_their_dtypes_and_rounding_are_equal():
    """Rounding splits only tables of 16 bits; an embedding dtype equal to the rows' does not split."""

    def stores(*options):
        tables = [jaxsok.TableSpec(str(i), 4, jaxsok.optim.sgd(0.1), **case) for i, case in enumerate(options)]
        return len(jaxsok.Collection(tables, []).stores)

    assert stores({}, {"embedding_dtype": "float32"}, {"rounding": "nearest"}) == 1
    assert stores({"dtype": "bfloat16"}, {"dtype": "bfloat16", "embedding_dtype": "bfloat16"}) == 1
    assert stores({"dtype": "bfloat16"}, {"dtype": "float16"}, {}) == 3
    assert stores({"dtype": "bfloat16"}, {"dtype": "bfloat16", "embedding_dtype": "float32"}) == 2
    assert stores({"dtype": "bfloat16"}, {"dtype": "bfloat16", "rounding": "nearest"}) == 2


def test_fingerprints():
    """A state fits collections of its dtypes, whatever their rounding."""

    def fingerprint(**options):
        return programs.one_table(**options).fingerprint

    names = [fingerprint(), fingerprint(dtype="bfloat16"), fingerprint(dtype="float16")]
    names += [fingerprint(dtype=dtype, embedding_dtype="float32") for dtype in HALVES]
    assert len(set(names)) == 5
    assert fingerprint(embedding_dtype="float32") == names[0] == fingerprint(rounding="nearest")
    assert fingerprint(dtype="bfloat16", rounding="nearest") == names[1]


def test_stores_of_all_dtypes_in_one_step():
    """Each feature's embeddings and gradients have their own dtype; every key is counted (law 5)."""
    tables = [sgd_table(dtype, 4, dtype, capacity=32) for dtype in DTYPE_BYTES]
    tables.append(sgd_table("wide", 4, "float16", embedding_dtype="float32", capacity=2, max_capacity=2))
    collection = one_key_each(tables)
    keys = np.array([[1, 2, -1], [2, 2, 9]])
    features = collection.batch({table.name: keys for table in tables}).features
    embeddings, state, plan = programs.lookup(collection)(collection.init(), features)
    assert {name: value.dtype.name for name, value in embeddings.items()} == {
        **{dtype: dtype for dtype in DTYPE_BYTES},
        "wide": "float32",
    }
    state, stats = programs.update(collection)(state, plan, embeddings)
    for table, counts in stats.to_dict().items():
        kinds = ("found", "inserted", "missing", "refused", "padding")
        assert sum(counts[f"num_{kind}"] for kind in kinds) == 6
        assert (counts["num_inserted"], counts["num_refused"]) == ((2, 1) if table == "wide" else (3, 0))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_that_are_not_finite_are_skipped(dtype):
    """Gradients infinite in 16 bits, or by their sum, leave the row's bits unchanged and are counted."""
    collection = one_key_each([sgd_table(dtype=dtype)])
    features = programs.batch(collection, user=np.array([1, 2, 3]))
    gradient = np.ones((3, 4), F32)
    gradient[1, 2] = np.inf
    state, _, stats = step_of(collection)(collection.init(), features, {"user": jnp.asarray(gradient, dtype)})
    assert int(stats.num_nonfinite[0]) == 1
    rows = programs.rows_of(collection, state)
    assert_same_bits(rows[2], np.ones(4, HALVES[dtype]))
    assert_same_bits(rows[1], np.zeros(4, HALVES[dtype]))


@pytest.mark.parametrize(
    ("dtype", "embedding_dtype", "num_devices"),
    [
        pytest.param(*dtypes, number, marks=pytest.mark.slow if number > 1 and dtypes in DTYPES[1:-1] else ())
        for dtypes, number in itertools.product(DTYPES, (1, NUM_SHARDS))
    ],
)
def test_a_donated_state_keeps_its_addresses(dtype, embedding_dtype, num_devices):
    """No slab is copied, however its numbers are stored (law 9)."""
    over = {} if num_devices == 1 else {"mesh": programs.mesh(num_devices), "axis": "data"}
    table = sgd_table(dim=8, dtype=dtype, embedding_dtype=embedding_dtype, capacity=1024)
    collection = one_key_each([table], **over)
    state = collection.init()

    def addresses(state):
        return [
            [part.data.unsafe_buffer_pointer() for part in leaf.addressable_shards]
            for leaf in jax.tree.leaves(state.stores)
        ]

    before = addresses(state)
    step = jax.jit(programs.train_step(collection, lambda e: e["user"].astype(jnp.float32).sum()), donate_argnums=0)
    for start in range(3):
        state, _, _ = step(state, collection.batch({"user": np.arange(64) + start}).features)
    assert addresses(state) == before


def test_pmap_takes_and_gives_rows_of_16_bits():
    """stack, a step under pmap, and unstack give the bits of the step under jit."""
    collection = one_key_each([sgd_table(dim=8)], mesh=programs.mesh(NUM_SHARDS), axis="data")
    keys = np.arange(32)
    gradient = {"user": jnp.asarray(uneven_gradients(32, 8), jnp.bfloat16)}
    features = collection.batch({"user": keys}).features
    want, _, _ = step_of(collection)(collection.init(), features, gradient)

    def step(state, features, gradients):
        _, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, gradients)[0]

    parts = {"user": gradient["user"].reshape(NUM_SHARDS, -1, 8)}
    stacked = jax.pmap(step, axis_name="data", devices=jax.devices()[:NUM_SHARDS])(
        collection.stack(collection.init()), collection.stack(features), parts
    )
    got = collection.unstack(stacked)
    assert_same_rows(programs.rows_of(collection, got), programs.rows_of(collection, want))


def test_ahead_compiles_for_rows_of_16_bits():
    """The program for the next capacity is ready when the state grows."""
    collection = programs.one_table(dtype="bfloat16", capacity=8)
    step = collection.ahead(
        jax.jit(programs.train_step(collection, lambda e: e["user"].astype(jnp.float32).sum()), donate_argnums=0)
    )
    state = collection.init()
    for start in range(0, 32, 4):
        features = collection.batch({"user": np.arange(start, start + 4)}).features
        state, _, stats = step(collection.grow(state), features)
        stats.check()
    assert step.num_hits_ahead >= 1 and state.stores[0].rows[-1].dtype == jnp.bfloat16

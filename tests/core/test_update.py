"""Updates: gradients back to rows, several plans, scans, learning rates, gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest

import jaxsok

DIM = 4
FLOAT32_MAX = float(np.finfo(np.float32).max)


def rows_after(collection, keys, gradients, *, state=None, learning_rate=None):
    """Makes one lookup and one update; returns rows before, rows after and the statistics."""
    state = collection.init(seed=0) if state is None else state
    features = programs.batch(collection, user=keys)
    _, state, plan = programs.lookup(collection)(state, features)
    before = programs.rows_of(collection, state)
    update = programs.update(collection)
    state, stats = update(state, plan, {"user": jnp.asarray(gradients)}, learning_rate=learning_rate)
    return before, programs.rows_of(collection, state), stats


def zeros_table(**spec):
    """Declares a table whose rows start at zero, so that small integers stay exact."""
    return programs.one_table(initializer=jaxsok.initializers.zeros(), **spec)


def test_gradients_of_a_row_are_summed_over_all_its_uses():
    """A row gets gradients from all uses of its key, in one bag and in several."""
    collection = zeros_table()
    gradients = np.array([[1, 0, 0, 0], [0, 10, 0, 0]], np.float32)
    _, rows, _ = rows_after(collection, np.array([[7, 7, 9], [9, -1, 7]]), gradients)
    np.testing.assert_array_equal(rows[7], [-2, -10, 0, 0])
    np.testing.assert_array_equal(rows[9], [-1, -10, 0, 0])


def test_a_row_with_thousands_of_uses():
    """The sum of a hot key among cold keys has every use once (integers, so exact in any order)."""
    collection = zeros_table(capacity=4096)
    rng, size = np.random.default_rng(0), 200_000
    keys = np.where(rng.random(size) < 0.5, 7, rng.integers(100, 2000, size))
    gradients = rng.integers(-4, 5, (size, DIM)).astype(np.float32)
    _, rows, _ = rows_after(collection, keys, gradients)
    for key in (7, *rng.choice(keys, 50)):
        np.testing.assert_array_equal(rows[int(key)], -gradients[keys == key].sum(axis=0))
    assert set(rows) == set(keys.tolist())


@pytest.mark.parametrize("num_keys", [1, 2, 31, 32, 33, 255, 256, 257, 1023, 1025])
def test_sizes_around_blocks_and_warps(num_keys):
    """The last block of keys is handled like the first."""
    collection = zeros_table(capacity=2048, dim=3)
    keys = np.arange(num_keys) // 2  # each key twice, except perhaps the last
    gradients = (np.arange(num_keys * 3).reshape(num_keys, 3) % 7).astype(np.float32)
    _, rows, _ = rows_after(collection, keys, gradients)
    want = np.zeros((num_keys // 2 + 1, 3), np.float32)
    np.add.at(want, keys, -gradients)
    assert sorted(rows) == sorted(set(keys.tolist()))
    for key, row in rows.items():
        np.testing.assert_array_equal(row, want[key])


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 13, 64, 65, 128, 200])
def test_every_dim(dim):
    """Dims that are no multiple of a vector or a warp work."""
    collection = zeros_table(dim=dim, combiner="mean", optimizer=jaxsok.optim.sgd(2.0))
    gradients = np.arange(2 * dim, dtype=np.float32).reshape(2, dim)
    _, rows, _ = rows_after(collection, np.array([[7, 9], [9, 9]]), gradients)
    np.testing.assert_array_equal(rows[7], -gradients[0])
    np.testing.assert_array_equal(rows[9], -gradients[0] - 2 * gradients[1])


def test_only_touched_rows_move():
    """Other rows and their optimizer state keep their bits."""
    collection = programs.one_table(optimizer=jaxsok.optim.adam(0.1))
    state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.arange(8)))
    before = programs.export(collection, state)
    state, _ = programs.learn(collection, state, programs.batch(collection, user=np.array([2, 2, 5, -1])))
    after = programs.export(collection, state)
    for key in range(8):
        is_same = np.array_equal(before[key][1], after[key][1])
        assert is_same == (key not in (2, 5))
        assert np.array_equal(before[key][2], after[key][2]) == is_same


@pytest.mark.parametrize("row_gradient", ["sum", "mean", "sqrt"])
def test_row_gradient_scales_by_the_number_of_uses(row_gradient):
    """Uses are occurrences of the key, in any bag and with any weights."""
    collection = zeros_table(row_gradient=row_gradient, weighted=True)
    keys = np.array([[7, 7, 9], [7, -1, 7]])
    weights = np.array([[1, 2, 1], [0.5, 9, 0.5]], np.float32)
    features = programs.batch(collection, user=jaxsok.Bags(keys, weights=weights))
    _, state, plan = collection.lookup(collection.init(seed=0), features)
    state, _ = collection.update(state, plan, {"user": jnp.array([[1.0] * DIM, [4.0] * DIM])})
    scale = {"sum": 1.0, "mean": 1 / 4, "sqrt": 1 / 2}[row_gradient]
    rows = programs.rows_of(collection, state)
    np.testing.assert_array_equal(rows[7], np.full(DIM, -7.0 * scale))  # 3 * 1 + 1 * 4; powers of two: exact
    np.testing.assert_array_equal(rows[9], np.full(DIM, -1.0))


@pytest.mark.parametrize("row_gradient", ["sum", "mean", "sqrt"])
def test_row_gradient_counts_uses_over_features_and_plans(row_gradient):
    """With two features and two plans, the sum over all is divided by the number of all uses."""
    table = jaxsok.TableSpec(
        "item",
        DIM,
        jaxsok.optim.sgd(1.0),
        initializer=jaxsok.initializers.zeros(),
        capacity=16,
        row_gradient=row_gradient,
    )
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("a", "item"), jaxsok.FeatureSpec("b", "item")])
    state, plans = collection.init(seed=0), []
    for _ in range(2):
        _, state, plan = collection.lookup(state, programs.batch(collection, a=np.array([5]), b=np.array([[5, 6, -1]])))
        plans.append(plan)
    gradients = [{"a": jnp.full((1, DIM), 1.0 + i), "b": jnp.full((1, DIM), 4.0)} for i in range(2)]
    state, _ = collection.update(state, plans, gradients)
    rows = programs.rows_of(collection, state, "item")
    scale = {"sum": 1.0, "mean": 1 / 4, "sqrt": 1 / 2}[row_gradient]
    np.testing.assert_array_equal(rows[5], np.full(DIM, -11.0 * scale))  # 1 + 4 + 2 + 4
    # 8 * 1/sqrt(2) is a product of two rounded numbers.
    np.testing.assert_allclose(rows[6], {"sum": -8.0, "mean": -4.0, "sqrt": -8 / np.sqrt(2)}[row_gradient], rtol=2e-7)


def test_several_plans_step_each_row_once():
    """Adam distinguishes them: two steps with half the gradient are not one step with the whole."""
    adam = jaxsok.optim.adam(0.1)
    collection = programs.one_table(optimizer=adam)
    features = [programs.batch(collection, user=np.array(keys)) for keys in ([1, 2], [2, 3])]
    state, plans, gradients = collection.init(seed=0), [], []
    for i, part in enumerate(features):
        _, state, plan = programs.lookup(collection)(state, part)
        plans.append(plan)
        gradients.append({"user": jnp.full((2, DIM), 1.0 + i)})
    before = programs.rows_of(collection, state)
    state, stats = programs.update(collection)(state, plans, gradients)
    assert int(state.step) == 1
    model = oracle.Adam()
    for key, gradient in {1: 1.0, 2: 3.0, 3: 2.0}.items():
        begin = before[key].astype(np.float64)
        row, moments = model.step(begin, model.initial_state(DIM), np.full(DIM, gradient), 0.1, 0)
        _, got, got_moments = programs.export(collection, state)[key]
        # 1 - 0.999 in float32 is accurate to 2^-25 / 0.001 = 3e-5, and so is a movement of 0.1.
        np.testing.assert_allclose(got, row, rtol=0, atol=3e-6)
        np.testing.assert_allclose(got_moments, moments, rtol=3e-5)
    assert programs.counts(stats) == {
        "num_found": 1,
        "num_inserted": 3,
        "num_missing": 0,
        "num_refused": 0,
        "num_padding": 0,
    }


def test_micro_batches_are_one_batch():
    """Several plans give what one plan of all their keys gives (integers: exact)."""
    collection = zeros_table()
    rng = np.random.default_rng(1)
    keys, gradients = rng.integers(-1, 9, 12), rng.integers(-3, 4, (12, DIM)).astype(np.float32)
    state = collection.init(seed=0)
    _, whole, plan = programs.lookup(collection)(state, programs.batch(collection, user=keys))
    whole, _ = programs.update(collection)(whole, plan, {"user": jnp.asarray(gradients)})
    plans = []
    for part in np.split(keys, 3):
        _, state, plan = programs.lookup(collection)(state, programs.batch(collection, user=part))
        plans.append(plan)
    parts = [{"user": jnp.asarray(part)} for part in np.split(gradients, 3)]
    state, _ = programs.update(collection)(state, plans, parts)
    programs.assert_same_tables(collection, whole, state)


def test_plans_of_different_shapes_in_one_update():
    """Micro-batches may have different shapes."""
    collection = zeros_table()
    state, plans = collection.init(seed=0), []
    for keys in ([[1, 2]], [[2, 3, 4], [1, -1, -1]]):
        _, state, plan = collection.lookup(state, programs.batch(collection, user=np.array(keys)))
        plans.append(plan)
    state, stats = collection.update(state, tuple(plans), ({"user": jnp.ones((1, DIM))}, {"user": jnp.ones((2, DIM))}))
    rows = programs.rows_of(collection, state)
    assert {key: row[0] for key, row in rows.items()} == {1: -2, 2: -2, 3: -1, 4: -1}
    assert sum(programs.counts(stats).values()) == 2 + 6


@pytest.mark.parametrize("kind", ["number", "array", "traced"])
def test_learning_rate_of_an_update(kind):
    """A rate given to update, as a number or an array, replaces the optimizer's rate."""
    collection = zeros_table(optimizer=jaxsok.optim.sgd(100.0))
    features = programs.batch(collection, user=np.array([1]))
    _, state, plan = collection.lookup(collection.init(seed=0), features)
    gradients = {"user": jnp.ones((1, DIM))}
    if kind == "traced":
        state, _ = jax.jit(lambda state, plan, rate: collection.update(state, plan, gradients, learning_rate=rate))(
            state, plan, jnp.float32(0.25)
        )
    else:
        rate = 0.25 if kind == "number" else jnp.float32(0.25)
        state, _ = collection.update(state, plan, gradients, learning_rate=rate)
    np.testing.assert_array_equal(programs.rows_of(collection, state)[1], np.full(DIM, -0.25))


def test_learning_rate_of_zero_moves_nothing():
    """Zero is a rate, and does not mean that no rate was given."""
    collection = programs.one_table()
    before, after, _ = rows_after(collection, np.array([1]), np.ones((1, DIM), np.float32), learning_rate=0.0)
    np.testing.assert_array_equal(before[1], after[1])


def test_another_learning_rate_compiles_nothing():
    """Changing rates are operands."""
    collection = zeros_table()
    num_traces = []

    @jax.jit
    def step(state, plan, gradients, rate):
        num_traces.append(1)
        return collection.update(state, plan, gradients, learning_rate=rate)

    state = collection.init(seed=0)
    for rate in (0.5, 0.25, 0.125):
        _, state, plan = collection.lookup(state, programs.batch(collection, user=np.array([1])))
        state, _ = step(state, plan, {"user": jnp.ones((1, DIM))}, jnp.float32(rate))
    assert len(num_traces) == 1
    np.testing.assert_array_equal(programs.rows_of(collection, state)[1], np.full(DIM, -0.875))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_non_finite_row_gradients_are_skipped_and_counted(optimizer, poison):
    """The row and its state keep their bits; other rows move; check() raises."""
    collection = programs.one_table(optimizer=getattr(jaxsok.optim, optimizer)(0.5))
    features = programs.batch(collection, user=np.array([1, 2, 1, 3]))
    state, _ = programs.learn(collection, collection.init(seed=0), features)
    before = programs.export(collection, state)
    _, state, plan = programs.lookup(collection)(state, features)
    gradients = np.ones((4, DIM), np.float32)
    gradients[2, DIM - 1] = poison
    state, stats = programs.update(collection)(state, plan, {"user": jnp.asarray(gradients)})
    after = programs.export(collection, state)
    np.testing.assert_array_equal(before[1][1], after[1][1])
    for a, b in zip(before[1][2], after[1][2], strict=True):
        np.testing.assert_array_equal(a, b)
    for key in (2, 3):
        assert np.all(before[key][1] != after[key][1])
    assert stats.to_dict()["user"]["num_nonfinite"] == 1  # rows, not uses
    assert int(state.step) == 2
    with pytest.raises(jaxsok.NonFiniteGradientError, match="user"):
        stats.check()


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_keys_of_a_bag_without_divisor_are_no_uses(combiner):
    """Weights that cancel make a bag of zeros, to which its rows contribute nothing, so Adam does not step them."""
    collection = programs.one_table(
        combiner=combiner, weighted=True, optimizer=jaxsok.optim.adam(0.1), row_gradient="mean"
    )
    keys = np.array([[1, 2], [3, 2]])
    state = collection.init(seed=0)
    for weights in ([[1.0, 1.0], [1.0, 1.0]], [[1.0, -1.0] if combiner == "mean" else [0.0, 0.0], [1.0, 1.0]]):
        features = programs.batch(collection, user=jaxsok.Bags(keys, weights=np.array(weights, np.float32)))
        before = programs.rows_of(collection, state)
        state, stats = programs.learn(collection, state, features)
    after = programs.export(collection, state)
    np.testing.assert_array_equal(after[1][1], before[1])
    assert np.all(after[2][1] != before[2]) and np.all(after[3][1] != before[3])
    for a, b in zip(after[2][2], after[3][2], strict=True):
        np.testing.assert_array_equal(a, b)  # one use each in the second step, whatever row_gradient divides by
    assert programs.counts(stats)["num_found"] == 4


@pytest.mark.gpu
def test_the_divisor_of_a_bag_is_the_exact_number_of_its_keys():
    """Ones that are summed in float32 would end at 2**24."""
    num_keys = 2**25
    collection = zeros_table(combiner="mean", optimizer=jaxsok.optim.sgd(1.0))
    bags = jaxsok.Bags(np.full(num_keys, 7), offsets=np.array([0, num_keys]))
    _, after, _ = rows_after(collection, bags, np.ones((1, DIM), np.float32))
    np.testing.assert_allclose(after[7], -np.ones(DIM, np.float32), rtol=1e-3)


def test_a_sum_that_overflows_is_not_finite():
    """Finite gradients whose sum is not finite are skipped and counted like any other."""
    collection = programs.one_table()
    gradients = np.full((3, DIM), 0.75 * FLOAT32_MAX, np.float32)
    gradients[2] = 1.0
    before, after, stats = rows_after(collection, np.array([1, 1, 2]), gradients)
    np.testing.assert_array_equal(before[1], after[1])
    np.testing.assert_array_equal(after[2], before[2] - 1)
    assert programs.total(stats, "num_nonfinite") == 1


def test_non_finite_gradients_of_padding_and_empty_bags_are_nothing():
    """Gradients that belong to no row are ignored."""
    collection = programs.one_table(combiner="mean")
    keys = np.array([[-1, -1], [1, -1]])
    gradients = np.array([[np.nan] * DIM, [1.0] * DIM], np.float32)
    before, after, stats = rows_after(collection, keys, gradients)
    np.testing.assert_array_equal(after[1], before[1] - 1)
    assert programs.total(stats, "num_nonfinite") == 0
    stats.check()


def test_update_inside_a_scan():
    """lax.scan over steps gives the exact bits of separate steps."""
    collection = jaxsok.Collection(
        [
            jaxsok.TableSpec("user", DIM, jaxsok.optim.adam(0.1), capacity=64),
            jaxsok.TableSpec("item", 8, jaxsok.optim.adagrad(0.1), capacity=64),
        ],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item", combiner="mean", max_keys=8)],
    )
    rng = np.random.default_rng(0)
    batches = [
        programs.batch(
            collection,
            user=rng.integers(0, 9, 4),
            item=jaxsok.Bags(rng.integers(-1, 9, 7), lengths=np.array([3, 0, 3, 1])),
        )
        for _ in range(5)
    ]
    step = programs.train_step(collection)
    one_by_one, counted = collection.init(seed=0), None
    for features in batches:
        one_by_one, _, stats = jax.jit(step)(one_by_one, features)
        counted = stats if counted is None else counted + stats

    def body(state, features):
        state, loss, stats = step(state, features)
        return state, (loss, stats)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    scanned, (_, stats) = jax.jit(lambda state, xs: jax.lax.scan(body, state, xs))(collection.init(seed=0), stacked)
    programs.assert_same_state(one_by_one, scanned, index=False)
    np.testing.assert_array_equal(np.sum(np.asarray(stats.num_inserted), axis=0), counted.num_inserted)


def test_steps_under_cond_and_while():
    """A step may be conditional, and a loop may end depending on the data."""
    collection = zeros_table()
    features = programs.batch(collection, user=np.array([1, 2]))
    step = programs.train_step(collection, loss=lambda embeddings: jnp.sum(embeddings["user"]))

    @jax.jit
    def maybe(state, features, take):
        return jax.lax.cond(take, lambda s: step(s, features)[0], lambda s: s, state)

    @jax.jit
    def until_five(state, features):
        return jax.lax.while_loop(lambda s: s.step < jnp.uint32(5), lambda s: step(s, features)[0], state)

    state = maybe(maybe(collection.init(seed=0), features, False), features, True)
    assert int(state.step) == 1 and collection.num_rows(state) == {"user": 2}
    np.testing.assert_array_equal(programs.rows_of(collection, state)[1], np.full(DIM, -1.0))
    state = until_five(state, features)
    np.testing.assert_array_equal(programs.rows_of(collection, state)[2], np.full(DIM, -5.0))


@pytest.mark.parametrize("barrier", [False, True])
def test_a_read_before_the_step_sees_the_old_rows(barrier):
    """One program on a donated state finds, then steps the same rows, ordered or not."""
    collection = programs.one_table()
    features = programs.batch(collection, user=np.array([1, 2, 9, -1]))
    state = programs.insert(collection, collection.init(seed=0), [1, 2, 3, 4])
    rows = programs.rows_of(collection, state)

    def step(state, features):
        found, _ = collection.find(state, features)
        if barrier:
            state, found = jax.lax.optimization_barrier((state, found))
        embeddings, state, plan = collection.lookup(state, features)
        state, _ = collection.update(state, plan, jax.tree.map(jnp.ones_like, embeddings))
        return state, found, collection.find(state, features)[0]

    state, old, new = jax.jit(step, donate_argnums=0)(state, features)
    want = np.stack([rows[1], rows[2], programs.initial_rows("user", DIM, [9])[0], np.zeros(DIM, np.float32)])
    np.testing.assert_array_equal(old["user"], want)
    np.testing.assert_array_equal(np.asarray(new["user"])[:3], want[:3] - 1)


def test_gradients_by_jax_grad():
    """Embeddings are ordinary values: the update is the derivative of the loss through a dense model."""
    collection = programs.one_table(combiner="mean")
    dense = jnp.asarray(np.random.default_rng(0).normal(size=(DIM, 2)).astype(np.float32))
    keys = np.array([[3, 5, 3], [5, -1, -1]])

    def loss(embeddings):
        return jnp.sum(jnp.tanh(embeddings["user"] @ dense) ** 2)

    embeddings, state, plan = collection.lookup(collection.init(seed=0), programs.batch(collection, user=keys))
    before = programs.rows_of(collection, state)
    state, _ = collection.update(state, plan, jax.grad(loss)(embeddings))
    after = programs.rows_of(collection, state)

    def loss_of_rows(rows):  # the same model on a dense table of two rows
        return loss({"user": jnp.stack([(2 * rows[0] + rows[1]) / 3, rows[1]])})

    want = jax.grad(loss_of_rows)(jnp.stack([before[3], before[5]]))
    # The values are two float32 computations of numbers of size <= 1, each with some tens of roundings.
    np.testing.assert_allclose(np.stack([before[3] - after[3], before[5] - after[5]]), want, rtol=1e-4, atol=1e-6)

"""The norm of row gradients, and clipping of rows and dense parameters together, against NumPy and dense Optax."""

import collections
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest

import jaxsok
from jaxsok.operations import specs_of

NUM_SAMPLES = 8
SGD = jaxsok.optim.sgd(1.0)
TABLES = (
    jaxsok.TableSpec("user", 4, SGD, capacity=64),
    jaxsok.TableSpec("item", 4, SGD, capacity=64, row_gradient="mean"),
    jaxsok.TableSpec("tag", 3, SGD, capacity=64, row_gradient="sqrt"),
)
FEATURES = (
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("friend", "user", combiner="mean"),
    jaxsok.FeatureSpec("item", "item", combiner="mean", weighted=True),
    jaxsok.FeatureSpec("tag", "tag", combiner=None),
)
HOTNESS = {"user": 1, "friend": 3, "item": 2, "tag": 2}


@functools.cache
def declare(num_devices=1, send_capacity=None, replicated=False):
    """Declares three stores that scale row gradients differently, on one device or over several."""
    tables = TABLES
    if replicated:
        tables = [jaxsok.TableSpec("user", 4, SGD, capacity=64, placement=jaxsok.REPLICATED), *TABLES[1:]]
    if num_devices == 1:
        return jaxsok.Collection(tables, FEATURES)
    return programs.over(num_devices, tables, FEATURES, send_capacity=send_capacity)


@functools.cache
def jit_method(collection, name):
    """Returns a jitted method of a collection."""
    return jax.jit(getattr(collection, name), compiler_options=programs.quickly())


def random_raw(rng, num_keys=12):
    """Returns keys with repeats and padding, in every feature."""
    raw = {}
    for feature in FEATURES:
        keys = rng.integers(-1, num_keys, (NUM_SAMPLES, HOTNESS[feature.name]))
        if feature.weighted:
            # Opposite weights make a mean without a divisor, which is no use.
            raw[feature.name] = jaxsok.Bags(keys, weights=rng.choice([-1.0, 0.5, 1.0], keys.shape).astype(np.float32))
        else:
            raw[feature.name] = keys[:, 0] if HOTNESS[feature.name] == 1 else keys
    return raw


def random_gradients(rng, raw):
    """Returns gradients of the embeddings of a batch."""
    shapes = {
        "user": (NUM_SAMPLES, 4),
        "friend": (NUM_SAMPLES, 4),
        "item": (NUM_SAMPLES, 4),
        "tag": (NUM_SAMPLES, 2, 3),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def dense_row_gradients(raws, gradients):
    """Returns a dense table's gradient by (table, key), scaled as the table declares, from plain loops."""
    sums, uses = collections.defaultdict(float), collections.Counter()
    for raw, of_raw in zip(raws, gradients, strict=True):
        for feature in FEATURES:
            bags = raw[feature.name]
            keys = bags.keys if isinstance(bags, jaxsok.Bags) else bags
            weights = bags.weights if isinstance(bags, jaxsok.Bags) else np.ones(keys.shape)
            keys, weights = keys.reshape(NUM_SAMPLES, -1), weights.reshape(NUM_SAMPLES, -1)
            for i in range(NUM_SAMPLES):
                # The oracle identifies the padding key by its number.
                bag, of_bag = [key % 2**64 for key in keys[i].tolist()], weights[i].tolist()
                if not oracle.has_divisor(bag, of_bag, feature.combiner, feature.weighted):
                    continue
                factors = oracle.bag_factors(bag, of_bag, feature.combiner, feature.weighted)
                for position, (key, factor) in enumerate(zip(keys[i].tolist(), factors, strict=True)):
                    if key == -1:
                        continue
                    gradient = of_raw[feature.name][i].astype(np.float64)
                    gradient = gradient[position] if feature.combiner is None else factor * gradient
                    sums[feature.table, key] = sums[feature.table, key] + gradient
                    uses[feature.table, key] += 1
    scale = {"user": lambda n: 1.0, "item": lambda n: 1.0 / n, "tag": lambda n: n**-0.5}
    return {use: total * scale[use[0]](uses[use]) for use, total in sums.items()}


def norm_of(arrays):
    """Returns the root of the sum of squares."""
    return float(np.sqrt(sum(np.square(np.asarray(array, np.float64)).sum() for array in arrays)))


def look_up(collection, raws):
    """Returns state and plans after lookups of several batches."""
    state, plans = collection.init(seed=0), []
    for raw in raws:
        _, state, plan = jit_method(collection, "lookup")(state, collection.batch(raw).features)
        plans.append(plan)
    return state, plans


@hypothesis.given(
    seed=st.integers(0, 2**32 - 1), num_plans=st.sampled_from([1, 2]), num_keys=st.sampled_from([1, 4, 40])
)
def test_norm_is_that_of_the_dense_gradient(seed, num_plans, num_keys):
    collection, rng = declare(), np.random.default_rng(seed)
    raws = [random_raw(rng, num_keys) for _ in range(num_plans)]
    gradients = [random_gradients(rng, raw) for raw in raws]
    state, plans = look_up(collection, raws)
    norm = jit_method(collection, "gradient_norm")(state, plans, gradients)
    assert norm.shape == () and norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, norm_of(dense_row_gradients(raws, gradients).values()), rtol=1e-5)


@pytest.mark.parametrize(
    ("num_devices", "send_capacity", "replicated", "path"),
    [(2, 3, False, "rounds"), (4, None, True, "pipeline")],
)
def test_norm_on_a_mesh_is_that_of_one_device(num_devices, send_capacity, replicated, path):
    """Gradients of a key from several shards and plans are summed before they are squared; in several rounds too."""
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices")
    collection, rng = declare(num_devices, send_capacity, replicated), np.random.default_rng(5)
    raws = [random_raw(rng, 40) for _ in range(2)]
    gradients = [random_gradients(rng, raw) for raw in raws]
    want = norm_of(dense_row_gradients(raws, gradients).values())
    state, plans = collection.init(seed=0), []
    for raw in raws:
        asked = collection.batch(raw).features if path == "rounds" else next(iter(collection.pipeline([raw])))[1]
        _, state, plan = jit_method(collection, "lookup")(state, asked)
        plans.append(plan)
    norm = jit_method(collection, "gradient_norm")(state, plans, gradients)
    np.testing.assert_allclose(norm, want, rtol=1e-5)
    again = jit_method(collection, "gradient_norm")(state, plans, gradients)
    assert programs.bits(norm) == programs.bits(again)


def test_norm_inside_shard_map():
    """Inside shard_map every shard gets the norm over all shards."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    collection, rng = declare(2), np.random.default_rng(6)
    raw = random_raw(rng)
    gradients = random_gradients(rng, raw)
    features = collection.batch(raw).features
    spec = jax.sharding.PartitionSpec("data")
    same = jax.sharding.PartitionSpec()

    def body(state, features, gradients, dense):
        _, state, plan = collection.lookup(state, features)
        gradients, dense, norm = collection.clip_by_global_norm(state, plan, gradients, 0.5, dense)
        return gradients, dense, norm

    of_state = specs_of(collection.shards, collection.init())
    mapped = jax.shard_map(
        body,
        mesh=collection.shards.mesh,
        in_specs=(of_state, spec, spec, same),
        out_specs=(spec, same, same),
    )
    mapped = jax.jit(mapped, compiler_options=programs.quickly())
    placed = jax.device_put(gradients, collection.shards.split)
    clipped, dense, norm = mapped(collection.init(seed=0), features, placed, {"bias": jnp.float32(3.0)})
    want = norm_of([*dense_row_gradients([raw], [gradients]).values(), 3.0])
    np.testing.assert_allclose(norm, want, rtol=1e-5)
    np.testing.assert_allclose(dense["bias"], 3.0 * 0.5 / want, rtol=1e-5)
    np.testing.assert_allclose(clipped["tag"], gradients["tag"] * (0.5 / want), rtol=1e-5)


def rows_by_key(collection, state):
    """Returns all rows of all tables."""
    return {
        (table.name, key): row
        for table in collection.tables
        for key, row in programs.rows_of(collection, state, table.name).items()
    }


def test_clipping_is_that_of_dense_optax():
    """Tables and dense parameters are clipped together: rows move as in a dense table under Optax's clipping."""
    import optax

    tables = [jaxsok.TableSpec(name, 3, SGD, capacity=32) for name in ("user", "item")]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item", combiner="mean")]
    collection = jaxsok.Collection(tables, features)
    rng = np.random.default_rng(1)
    user, item = rng.integers(0, 5, 16), rng.integers(0, 7, (16, 3))
    target, kernel = rng.normal(size=(16, 3)).astype(np.float32), rng.normal(size=(3, 3)).astype(np.float32)

    def loss_of(kernel, embeddings):
        return jnp.sum(jnp.square(embeddings["user"] @ kernel + embeddings["item"] - target))

    @functools.partial(jax.jit, compiler_options=programs.quickly())
    def step(state, kernel, features, max_norm):
        embeddings, state, plan = collection.lookup(state, features)
        dense, gradients = jax.grad(loss_of, (0, 1))(kernel, embeddings)
        gradients, dense, norm = collection.clip_by_global_norm(state, plan, gradients, max_norm, dense)
        state, _ = collection.update(state, plan, gradients)
        return state, kernel - dense, norm

    def dense_loss(params):
        embeddings = {"user": params["user"][user], "item": params["item"][item].mean(axis=1)}
        return loss_of(params["kernel"], embeddings)

    features = collection.batch({"user": user, "item": item}).features
    before = rows_by_key(collection, jit_method(collection, "lookup")(collection.init(seed=0), features)[1])
    params = {
        name: jnp.stack([jnp.asarray(before[name, k]) for k in range(n)]) for name, n in (("user", 5), ("item", 7))
    }
    params["kernel"] = jnp.asarray(kernel)
    gradients = jax.grad(dense_loss)(params)
    for max_norm in (0.1, 1e6):
        clipped, _ = optax.clip_by_global_norm(max_norm).update(gradients, optax.EmptyState())
        want = jax.tree.map(lambda p, g: p - g, params, clipped)

        state, got_kernel, norm = step(collection.init(seed=0), jnp.asarray(kernel), features, max_norm)
        np.testing.assert_allclose(norm, norm_of(gradients.values()), rtol=1e-5)
        np.testing.assert_allclose(got_kernel, want["kernel"], rtol=1e-4, atol=1e-5)
        for (name, key), row in rows_by_key(collection, state).items():
            np.testing.assert_allclose(row, want[name][key], rtol=1e-4, atol=1e-5)


def one_lookup(keys=(7, 9, 7), **options):
    """Returns collection, state and plan after a lookup in a table of zeros."""
    collection = programs.one_table(initializer=jaxsok.initializers.zeros(), **options)
    _, state, plan = collection.lookup(collection.init(seed=0), programs.batch(collection, user=np.array(keys)))
    return collection, state, plan


def test_below_max_norm_nothing_changes():
    """Gradients keep all bits, in every dtype."""
    collection, state, plan = one_lookup()
    rng = np.random.default_rng(0)
    gradients = {"user": jnp.asarray(rng.normal(size=(3, 4)), jnp.bfloat16)}
    dense = [jnp.asarray(rng.normal(size=5), jnp.float16), jnp.float32(1e-30)]
    clipped, dense_clipped, _ = collection.clip_by_global_norm(state, plan, gradients, 1e3, dense)
    for old, new in zip(jax.tree.leaves((gradients, dense)), jax.tree.leaves((clipped, dense_clipped)), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(old.astype(jnp.float32), new.astype(jnp.float32))


def test_forms_are_kept():
    """The forms are a mapping for one plan, a list for several, any tree of dense gradients, or none."""
    collection, state, plan = one_lookup()
    gradients = {"user": jnp.ones((3, 4))}
    clipped, dense, norm = collection.clip_by_global_norm(state, plan, gradients, 1.0)
    assert isinstance(clipped, dict) and dense is None
    _, later, again = collection.lookup(state, plan.features)
    several, dense, norm_of_two = collection.clip_by_global_norm(later, [plan, again], [gradients, gradients], 1.0, ())
    assert isinstance(several, list) and dense == ()
    np.testing.assert_allclose(norm_of_two, 2 * norm, rtol=1e-6)
    scalar = jax.jit(lambda limit: collection.clip_by_global_norm(state, plan, gradients, limit)[0])
    np.testing.assert_allclose(scalar(1.0)["user"], clipped["user"], rtol=1e-6)


def test_rows_that_the_update_leaves_alone_do_not_count():
    """The norm excludes gradients that are not finite and refused keys: it counts the rows that move."""
    collection, state, plan = one_lookup((7, 9, 11, -1), capacity=2, max_capacity=2)
    gradients = np.array([[3.0] * 4, [np.inf] * 4, [1e6] * 4, [1e6] * 4], np.float32)
    after, stats = collection.update(state, plan, {"user": jnp.asarray(gradients)})
    assert programs.total(stats, "num_refused") == 1 and programs.total(stats, "num_nonfinite") == 1
    want = norm_of(programs.rows_of(collection, after).values())
    assert want == 6.0
    norm = collection.gradient_norm(state, plan, {"user": jnp.asarray(gradients)})
    assert norm == want
    clipped, _, _ = collection.clip_by_global_norm(state, plan, {"user": jnp.asarray(gradients)}, 3.0)
    after, stats = collection.update(state, plan, clipped)
    assert programs.total(stats, "num_nonfinite") == 1
    np.testing.assert_array_equal(programs.rows_of(collection, after)[7], [-1.5] * 4)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("row_gradient", ["sum", "mean"])
def test_refused_keys_are_part_of_the_hotness(combiner, is_ragged, row_gradient):
    """Their rows do not move, but other gradients are divided by all keys of the bag except padding."""
    collection = programs.one_table(
        combiner=combiner,
        capacity=4,
        max_capacity=4,
        initializer=jaxsok.initializers.zeros(),
        row_gradient=row_gradient,
    )
    bags = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 1, 10], [11, 12, 2, 13, 14]]
    keys = np.full((3, 8), -1)
    for line, bag in zip(keys, bags, strict=True):
        line[: len(bag)] = bag
    raw = jaxsok.Bags(np.concatenate(bags), lengths=np.array([len(bag) for bag in bags])) if is_ragged else keys
    _, state, plan = programs.lookup(collection)(collection.init(seed=0), collection.batch({"user": raw}).features)
    gradients = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    kept, sums, uses = set(programs.rows_of(collection, state)), collections.defaultdict(float), collections.Counter()
    assert len(kept) == 4
    for bag, gradient in zip(bags, gradients, strict=True):
        for key in set(bag) & kept:
            divisor = len(bag) if combiner == "mean" else len(bag) ** 0.5
            sums[key] = sums[key] + bag.count(key) * gradient / divisor
            uses[key] += bag.count(key)
    want = [sums[key] / (uses[key] if row_gradient == "mean" else 1) for key in kept]
    norm = collection.gradient_norm(state, plan, {"user": jnp.asarray(gradients)})
    np.testing.assert_allclose(norm, norm_of(want), rtol=1e-5)
    after, _ = collection.update(state, plan, {"user": jnp.asarray(gradients)})
    np.testing.assert_allclose(norm, norm_of(programs.rows_of(collection, after).values()), rtol=1e-5)


def test_stale_plans_do_not_count():
    collection, state, first = one_lookup()
    gradients = {"user": jnp.ones((3, 4))}
    state, _ = collection.erase(state, "user", np.array([9]))
    assert collection.gradient_norm(state, first, gradients) == 0.0
    _, state, second = collection.lookup(state, programs.batch(collection, user=np.array([7, 7, 9])))
    both = collection.gradient_norm(state, [first, second], [gradients, gradients])
    np.testing.assert_allclose(both, norm_of([np.full(4, 2.0), np.full(4, 1.0)]), rtol=1e-6)
    # Excluded rows do not move: a factor of NaN or 0 would show here.
    clipped, _, norm = collection.clip_by_global_norm(state, first, gradients, 1.0)
    assert norm == 0.0
    np.testing.assert_array_equal(clipped["user"], gradients["user"])


def test_a_dense_gradient_that_is_not_finite_stops_all():
    """As in Optax, NaN makes all gradients NaN; then no row moves, and they are counted."""
    import optax

    collection, state, plan = one_lookup()
    gradients = {"user": jnp.ones((3, 4))}
    clipped, dense, norm = collection.clip_by_global_norm(
        state, plan, gradients, 1.0, {"bias": jnp.array([1.0, np.nan])}
    )
    want, _ = optax.clip_by_global_norm(1.0).update({"bias": jnp.array([1.0, np.nan])}, optax.EmptyState())
    assert np.isnan(norm) and np.isnan(dense["bias"]).all() and np.isnan(want["bias"]).all()
    after, stats = collection.update(state, plan, clipped)
    assert programs.total(stats, "num_nonfinite") == 2
    np.testing.assert_array_equal(programs.rows_of(collection, after)[7], np.zeros(4))
    _, dense, norm = collection.clip_by_global_norm(state, plan, gradients, 1.0, {"bias": jnp.array([1.0, np.inf])})
    want, _ = optax.clip_by_global_norm(1.0).update({"bias": jnp.array([1.0, np.inf])}, optax.EmptyState())
    assert np.isinf(norm)
    np.testing.assert_array_equal(dense["bias"], want["bias"])


def test_samples_that_share_a_bag():
    """The gradient of a bag is the sum of its samples' gradients."""
    collection = programs.one_table(initializer=jaxsok.initializers.zeros())
    bags = jaxsok.Bags(np.array([[7, 9], [9, 11]]), inverse=np.array([0, 1, 1, 0, 1]))
    _, state, plan = collection.lookup(collection.init(seed=0), collection.batch({"user": bags}).features)
    gradients = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    first, second = gradients[[0, 3]].sum(axis=0), gradients[[1, 2, 4]].sum(axis=0)
    norm = collection.gradient_norm(state, plan, {"user": jnp.asarray(gradients)})
    np.testing.assert_allclose(norm, norm_of([first, first + second, second]), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_numbers_of_any_usual_size(size):
    """Their squares are within float32."""
    collection, state, plan = one_lookup((7, 9))
    gradients = {"user": jnp.asarray(np.array([[3, 0, 0, 0], [0, 0, 4, 0]], np.float32) * np.float32(size))}
    clipped, dense, norm = collection.clip_by_global_norm(
        state, plan, gradients, size, {"bias": jnp.float32(12 * np.float32(size))}
    )
    np.testing.assert_allclose(norm, 13 * size, rtol=1e-6)
    np.testing.assert_allclose(clipped["user"][0, 0], 3 / 13 * size, rtol=1e-5)
    np.testing.assert_allclose(dense["bias"], 12 / 13 * size, rtol=1e-5)


def test_squares_that_overflow_are_as_in_optax():
    """The norm is infinite, and clipped gradients are zeros."""
    import optax

    collection, state, plan = one_lookup((7, 9))
    gradients, dense = {"user": jnp.full((2, 4), 1e20)}, {"bias": jnp.float32(2)}
    clipped, clipped_dense, norm = collection.clip_by_global_norm(state, plan, gradients, 1.0, dense)
    want, _ = optax.clip_by_global_norm(1.0).update(gradients | dense, optax.EmptyState())
    assert np.isinf(norm)
    np.testing.assert_array_equal(clipped["user"], want["user"])
    np.testing.assert_array_equal(clipped_dense["bias"], want["bias"])


def test_many_rows_keep_their_precision():
    """The norm of a hundred thousand equal rows is the root of their number."""
    collection, num_keys = programs.one_table(dim=8, capacity=1 << 17), 100_000
    features = programs.batch(collection, user=np.arange(num_keys))
    _, state, plan = jit_method(collection, "lookup")(collection.init(seed=0), features)
    norm = jit_method(collection, "gradient_norm")(state, plan, {"user": jnp.full((num_keys, 8), 0.1)})
    np.testing.assert_allclose(norm, np.float32(0.1) * np.sqrt(8 * num_keys), rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_norm": "large"}, TypeError, "clip_by_global_norm: max_norm: got 'large', wanted a scalar"),
        ({"max_norm": np.ones(2)}, TypeError, "max_norm: got float64\\[2\\], wanted a scalar"),
        ({"max_norm": np.array(1j)}, TypeError, "max_norm: got complex128\\[\\], wanted a scalar"),
        ({"max_norm": -1.0}, ValueError, "max_norm: got -1.0, wanted a positive number"),
        ({"max_norm": np.float32(0)}, ValueError, "max_norm: got 0.0, wanted a positive number"),
        ({"max_norm": jnp.float32(-1)}, ValueError, "max_norm: got -1.0, wanted a positive number"),
        ({"gradients": {"user": jnp.ones((2, 4))}}, ValueError, 'gradient_norm: gradients: feature "user": got shape'),
        ({"gradients": {"item": jnp.ones((3, 4))}}, ValueError, "gradient_norm: gradients: got features \\['item'\\]"),
        ({"gradients": {"user": jnp.ones((3, 4), jnp.int32)}}, TypeError, "wanted a float array"),
        ({"dense": {"w": jnp.array([3, 4])}}, TypeError, "dense: got a leaf of int32, wanted floats"),
        ({"gradients": []}, ValueError, "gradient_norm: gradients: got 0 for 1 plans"),
        ({"gradients": None}, TypeError, "gradient_norm: gradients: got NoneType, wanted a dict of arrays by feature"),
        ({"plan": None}, TypeError, "gradient_norm: plan: got NoneType that no lookup returned"),
        ({"state": {}}, TypeError, "gradient_norm: state: got dict"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    collection, state, plan = one_lookup()
    good = {"state": state, "plan": plan, "gradients": {"user": jnp.ones((3, 4))}, "max_norm": 1.0}
    with pytest.raises(error, match=message):
        collection.clip_by_global_norm(**{**good, **arguments})


def test_clipping_copies_no_table():
    """A donated step that clips changes its state in place."""
    collection = programs.one_table(dim=64, capacity=1 << 14)
    features = programs.batch(collection, user=np.arange(32))

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients, _, norm = collection.clip_by_global_norm(state, plan, embeddings, 1.0)
        state, _ = collection.update(state, plan, gradients)
        return state, norm

    step = jax.jit(step, donate_argnums=0)
    state = collection.init(seed=0)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)]
    for _ in range(2):
        state, _ = step(state, features)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)] == places

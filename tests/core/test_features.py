"""Features: all forms of keys, all combiners, and the contents of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest

import jaxsok

DIM = 4
# Embeddings are sums of at most 8 rows of size <= 4 in float32, compared in float64: 8 * 32 * 2^-24 < 2e-5.
TOLERANCE = {"rtol": 1e-6, "atol": 2e-5}


def expect(bags, combiner, *, weighted=False, name="user"):
    """Returns the oracle's embeddings of bags on a new table."""
    initial = programs.initial_row(name, DIM)
    return np.array(
        [
            oracle.combine(
                [np.zeros(DIM) if key == oracle.PADDING_KEY else initial(key) for key in keys],
                oracle.bag_factors(keys, weights, combiner, weighted),
                DIM,
            )
            for keys, weights in map(oracle.keys_and_weights, bags)
        ]
    )


def embed(collection, value):
    """Returns the embeddings of one feature on a new state."""
    embeddings, _, _ = programs.lookup(collection)(collection.init(seed=0), programs.batch(collection, user=value))
    return np.asarray(embeddings["user"])


BAGS = [[3, 5, 3], [], [7], [5, 9, 2**63 + 1, 3]]
WEIGHTED_BAGS = [[(3, 0.5), (5, 2.0), (3, -1.0)], [], [(7, 0.0)], [(5, 1.0), (9, 1.0), (2**63 + 1, 3.0), (3, 0.25)]]
FLAT = programs.as_array([key for bag in BAGS for key in bag])
LENGTHS = np.array([len(bag) for bag in BAGS])
OFFSETS = np.array([0, 3, 3, 4, 8])
WEIGHTS = np.array([weight for bag in WEIGHTED_BAGS for _, weight in bag], np.float32)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("shape", ["lengths", "offsets"])
def test_ragged_feature(combiner, shape):
    """Lengths and offsets give equal results."""
    collection = programs.one_table(combiner=combiner, max_keys=12)
    bags = jaxsok.Bags(FLAT, lengths=LENGTHS) if shape == "lengths" else jaxsok.Bags(FLAT, offsets=OFFSETS)
    got = embed(collection, bags)
    assert got.shape == (4, DIM) and got.dtype == np.float32
    np.testing.assert_allclose(got, expect(BAGS, combiner), **TOLERANCE)
    np.testing.assert_array_equal(got[1], 0)  # an empty bag


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_weighted_ragged_feature(combiner):
    """Weights apply first: the mean divides by their sum, sqrtn by the root of the sum of their squares."""
    collection = programs.one_table(combiner=combiner, weighted=True, max_keys=12)
    got = embed(collection, jaxsok.Bags(FLAT, lengths=LENGTHS, weights=WEIGHTS))
    np.testing.assert_allclose(got, expect(WEIGHTED_BAGS, combiner, weighted=True), **TOLERANCE)
    np.testing.assert_array_equal(got[1:3], 0)  # an empty bag, and a bag whose only weight is zero


@pytest.mark.parametrize("layout", ["lengths", "offsets"])
@pytest.mark.parametrize("on_device", ["keys", "layout", "weights", "all"])
def test_ragged_feature_on_the_device(layout, on_device):
    """Keys as words, lengths or offsets, and weights may be NumPy or jax.Array, in any mixture."""
    collection = programs.one_table(combiner="mean", weighted=True, max_keys=12)
    keys, sizes, weights = FLAT, {"lengths": LENGTHS, "offsets": OFFSETS}[layout], WEIGHTS
    if on_device in ("keys", "all"):
        keys = jnp.asarray(programs.words(keys))
    if on_device in ("layout", "all"):
        sizes = jnp.asarray(sizes.astype(np.int32))
    if on_device in ("weights", "all"):
        weights = jnp.asarray(weights)
    got = embed(collection, jaxsok.Bags(keys, weights=weights, **{layout: sizes}))
    np.testing.assert_allclose(got, expect(WEIGHTED_BAGS, "mean", weighted=True), **TOLERANCE)


def test_max_hotness_on_the_device():
    """Words and lengths on the device give the same rectangle."""
    collection = programs.one_table(combiner=None, max_keys=12, max_hotness=5)
    bags = jaxsok.Bags(jnp.asarray(programs.words(FLAT)), lengths=jnp.asarray(LENGTHS.astype(np.int32)))
    np.testing.assert_array_equal(embed(collection, bags), embed(collection, jaxsok.Bags(FLAT, lengths=LENGTHS)))


def test_padding_after_the_last_bag():
    """A buffer that is longer than its bags may end with PADDING_KEY, which is cut off or kept as padding."""
    collection = programs.one_table(max_keys=12)
    keys = np.concatenate([FLAT, np.full(3, oracle.PADDING_KEY, np.uint64)])
    want = expect(BAGS, "sum")
    for given in (keys, jnp.asarray(programs.words(keys))):
        np.testing.assert_allclose(embed(collection, jaxsok.Bags(given, lengths=LENGTHS)), want, **TOLERANCE)


def test_weighted_mean_of_weights_that_cancel_is_zero():
    """A zero sum of weights gives zeros, not infinities; so does a bag without keys."""
    collection = programs.one_table(combiner="mean", weighted=True)
    keys = np.array([[3, 5], [3, 5], [-1, -1]])
    weights = np.array([[1.0, -1.0], [1.0, 1.0], [4.0, 2.0]], np.float32)
    got = embed(collection, jaxsok.Bags(keys, weights=weights))
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_array_equal(got[2], 0)
    assert np.all(got[1] != 0)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_padded_dense_feature(combiner):
    """Padding may be anywhere; the hotness is the number of real keys."""
    collection = programs.one_table(combiner=combiner)
    keys = np.array([[3, -1, 5, 3], [-1, -1, -1, -1], [-1, 7, -1, -1]])
    bags = [[int(key) % 2**64 for key in bag] for bag in keys]
    got = embed(collection, keys)
    np.testing.assert_allclose(got, expect(bags, combiner), **TOLERANCE)
    np.testing.assert_array_equal(got[1], 0)


def test_padded_dense_feature_with_weights():
    """The weight of a padding position enters neither the sum nor the divisor."""
    collection = programs.one_table(combiner="mean", weighted=True)
    keys = np.array([[3, -1, 5], [7, 7, -1]])
    weights = np.array([[1.0, 100.0, 3.0], [0.5, 0.25, -8.0]], np.float32)
    bags = [
        [(int(key) % 2**64, float(weight)) for key, weight in zip(*bag, strict=True)]
        for bag in zip(keys, weights, strict=True)
    ]
    got = embed(collection, jaxsok.Bags(keys, weights=weights))
    np.testing.assert_allclose(got, expect(bags, "mean", weighted=True), **TOLERANCE)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
def test_one_key_a_sample(combiner):
    """A bag of one key is its row, to the bit, with every combiner; padding gives zeros."""
    collection = programs.one_table(combiner=combiner)
    got = embed(collection, np.array([3, 5, -1, 3]))
    want = np.zeros((4, DIM), np.float32)
    want[[0, 1, 3]] = programs.initial_rows("user", DIM, [3, 5, 3])
    np.testing.assert_array_equal(got, want)


def test_one_key_a_sample_with_weights():
    """The weight multiplies the row."""
    collection = programs.one_table(weighted=True)
    got = embed(collection, jaxsok.Bags(np.array([3, 5]), weights=np.array([0.5, -2.0], np.float32)))
    rows = programs.initial_rows("user", DIM, [3, 5])
    np.testing.assert_array_equal(got, np.array([[0.5], [-2.0]], np.float32) * rows)  # powers of two: exact


def test_no_combiner_padded():
    """Every position keeps its row; padding positions are zeros."""
    keys = np.array([[3, -1, 5], [7, 3, -1]])
    got = embed(programs.one_table(combiner=None), keys)
    want = np.zeros((2, 3, DIM), np.float32)
    real = keys != -1
    want[real] = programs.initial_rows("user", DIM, keys[real])
    np.testing.assert_array_equal(got, want)


def test_no_combiner_ragged_is_jagged():
    """The result has one row per position of the buffer, with zeros past the end."""
    got = embed(programs.one_table(combiner=None, max_keys=12), jaxsok.Bags(FLAT, lengths=LENGTHS))
    want = np.zeros((12, DIM), np.float32)
    want[:8] = programs.initial_rows("user", DIM, FLAT)
    np.testing.assert_array_equal(got, want)


def test_no_combiner_ragged_with_max_hotness_is_padded():
    """The result is [batch, max_hotness, dim]; the mask follows from the offsets."""
    got = embed(programs.one_table(combiner=None, max_keys=12, max_hotness=5), jaxsok.Bags(FLAT, lengths=LENGTHS))
    want = np.zeros((4, 5, DIM), np.float32)
    for i, bag in enumerate(BAGS):
        want[i, : len(bag)] = programs.initial_rows("user", DIM, bag)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("max_hotness", [None, 5])
def test_no_combiner_gradients_reach_their_rows(max_hotness):
    """Each position's gradient reaches its row and no other; gradients past the end reach none."""
    collection = programs.one_table(combiner=None, max_keys=12, max_hotness=max_hotness)
    bags = jaxsok.Bags(FLAT, lengths=LENGTHS)
    _, state, plan = collection.lookup(collection.init(seed=0), programs.batch(collection, user=bags))
    before = programs.rows_of(collection, state)
    position_gradients = np.arange(8 * DIM, dtype=np.float32).reshape(8, DIM)
    if max_hotness is None:
        gradients = np.full((12, DIM), 1e6, np.float32)
        gradients[:8] = position_gradients
    else:
        gradients = np.full((4, 5, DIM), 1e6, np.float32)
        for i, length in enumerate(LENGTHS):
            gradients[i, :length] = position_gradients[OFFSETS[i] : OFFSETS[i + 1]]
    state, _ = collection.update(state, plan, {"user": jnp.asarray(gradients)})
    after = programs.rows_of(collection, state)
    for key in before:
        want = position_gradients[key == FLAT].sum(axis=0)
        np.testing.assert_allclose(before[key] - after[key], want, atol=1e-5)  # numbers of size <= 64: 64 * 2^-23


def test_sums_run_in_the_order_of_the_keys():
    """Products and sums are rounded separately in float32 and added in order: the bits equal a loop's."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1000, (16, 8))
    weights = rng.normal(size=(16, 8)).astype(np.float32)
    for weighted in (False, True):
        collection = programs.one_table(weighted=weighted, initializer=jaxsok.initializers.normal(1.0), capacity=256)
        rows = programs.initial_rows(
            "user", DIM, keys.reshape(-1), initializer=jaxsok.initializers.normal(1.0)
        ).reshape(16, 8, DIM)
        want = np.zeros((16, DIM), np.float32)
        for i in range(8):
            want = want + (rows[:, i] * weights[:, i, None] if weighted else rows[:, i])
        got = embed(collection, jaxsok.Bags(keys, weights=weights) if weighted else keys)
        np.testing.assert_array_equal(programs.bits(got + np.float32(0)), programs.bits(want))


def test_a_batch_of_empty_bags():
    """Empty bags give zeros, and no key is requested or inserted."""
    collection = programs.one_table(combiner="mean", max_keys=4)
    features = programs.batch(collection, user=jaxsok.Bags(np.zeros(0, np.int64), lengths=np.zeros(3, np.int32)))
    embeddings, state, plan = collection.lookup(collection.init(seed=0), features)
    np.testing.assert_array_equal(embeddings["user"], np.zeros((3, DIM)))
    state, stats = collection.update(state, plan, {"user": jnp.ones((3, DIM))})
    assert collection.num_rows(state) == {"user": 0}
    assert programs.counts(stats) == {**dict.fromkeys(oracle.COUNTS, 0), "num_padding": 4}


def test_key_buffers_without_max_keys_are_powers_of_two():
    """A stream of ragged batches therefore compiles a few programs, not one per batch."""
    collection = programs.one_table()
    sizes = {}
    for num_keys in (0, 1, 2, 3, 4, 5, 8, 9, 100):
        bags = jaxsok.Bags(np.arange(num_keys), lengths=np.array([num_keys, 0]))
        sizes[num_keys] = programs.batch(collection, user=bags).mask("user").shape[0]
    assert {n: sizes[n] for n in sizes if n > 0} == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 100: 128}
    assert sizes[0] <= 1


def test_offsets_and_mask_of_a_ragged_feature():
    """Offsets count from 0 to the number of keys; the mask is true at real keys."""
    collection = programs.one_table(max_keys=12)
    for bags in (jaxsok.Bags(FLAT, lengths=LENGTHS), jaxsok.Bags(FLAT, offsets=OFFSETS)):
        features = programs.batch(collection, user=bags)
        np.testing.assert_array_equal(features.offsets("user"), OFFSETS)
        assert features.offsets("user").dtype == np.int32
        np.testing.assert_array_equal(features.mask("user"), np.arange(12) < 8)
    padding_inside = jaxsok.Bags(np.array([3, -1, 5]), lengths=np.array([2, 1]))
    np.testing.assert_array_equal(
        programs.batch(collection, user=padding_inside).mask("user"), [True, False, True] + [False] * 9
    )


def test_mask_of_a_padded_feature():
    """The mask is [batch, hotness], as the keys were given; a single key is a column or a vector."""
    collection = programs.one_table()
    keys = np.array([[3, -1, 5], [7, 3, -1]])
    np.testing.assert_array_equal(programs.batch(collection, user=keys).mask("user"), keys != -1)
    single = np.asarray(programs.batch(collection, user=np.array([3, -1])).mask("user"))
    np.testing.assert_array_equal(single.reshape(-1), [True, False])


def test_mask_fits_embeddings_without_combiner():
    """The mask has one bit per row of the embeddings, in every layout."""
    cases = {
        "one key a sample": (programs.one_table(combiner=None), np.array([3, -1, 5])),
        "padded": (programs.one_table(combiner=None), np.array([[3, -1], [-1, -1], [7, 3]])),
        "jagged": (programs.one_table(combiner=None, max_keys=12), jaxsok.Bags(FLAT, lengths=LENGTHS)),
        "max_hotness": (
            programs.one_table(combiner=None, max_keys=12, max_hotness=5),
            jaxsok.Bags(FLAT, lengths=LENGTHS),
        ),
    }
    for name, (collection, value) in cases.items():
        features = programs.batch(collection, user=value)
        embeddings, _, _ = collection.lookup(collection.init(seed=0), features)
        mask, got = np.asarray(features.mask("user")), np.asarray(embeddings["user"])
        assert mask.shape == got.shape[:-1], name
        np.testing.assert_array_equal(mask, np.any(got != 0, axis=-1), err_msg=name)


def test_a_batch_carries_everything_else_as_given():
    """Labels and dense inputs are kept unchanged with the features."""
    collection = programs.one_table()
    label, dense = np.array([0.0, 1.0]), jnp.ones((2, 3))
    batch = collection.batch({"user": np.array([1, 2]), "label": label, "dense": dense, "name": "monday"})
    assert batch["label"] is label and batch["dense"] is dense and batch["name"] == "monday"


def test_features_are_a_pytree_of_small_arrays():
    """They pass a jit boundary, and tree_map stacks them for a scan."""
    collection = programs.one_table(max_keys=12)
    features = programs.batch(collection, user=jaxsok.Bags(FLAT, lengths=LENGTHS))
    leaves, structure = jax.tree.flatten(features)
    assert leaves and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
    assert not any(np.asarray(leaf).dtype.itemsize == 8 for leaf in leaves)  # x64 is off: nothing may be narrowed
    again = jax.jit(lambda features: features)(features)
    assert jax.tree.structure(again) == structure
    np.testing.assert_array_equal(again.mask("user"), features.mask("user"))


def test_a_batch_packed_inside_a_program():
    """Keys that a program computes on the device, as words, do not pass through the host."""
    collection = programs.one_table(combiner="mean")
    keys = programs.as_array([[3, 2**40 + 3], [5, oracle.PADDING_KEY]])

    @jax.jit
    def step(state, words):
        embeddings, state, _ = collection.lookup(state, collection.batch({"user": words}).features)
        return embeddings["user"], state

    got, state = step(collection.init(seed=0), jnp.asarray(programs.words(keys)))
    np.testing.assert_array_equal(got, embed(collection, keys))
    assert collection.export_table(state, "user")["keys"].tolist() == [3, 2**40 + 3, 5]


def test_traced_offsets_stay_inside():
    """A program cannot refuse offsets: they are clamped to the keys and made to rise, and the rest is padding."""
    collection = programs.one_table(max_keys=12)
    words = jnp.asarray(programs.words(FLAT))

    @jax.jit
    def pack(offsets):
        return collection.batch({"user": jaxsok.Bags(words, offsets=offsets)}).features

    wild = pack(jnp.array([-5, 1, 4, 2, 10**9, 3], jnp.int32))
    np.testing.assert_array_equal(wild.offsets("user"), [0, 1, 4, 4, 8, 8])
    late = pack(jnp.array([2, 3, 3, 5], jnp.int32))
    np.testing.assert_array_equal(late.mask("user"), [False, False, True, True, True] + [False] * 7)
    for features, bags in ((wild, [[3], [5, 3, 7], [], FLAT[4:], []]), (late, [[3], [], FLAT[3:5]])):
        embeddings, _, _ = collection.lookup(collection.init(seed=0), features)
        want = expect([[int(key) for key in bag] for bag in bags], "sum")
        np.testing.assert_allclose(embeddings["user"], want, **TOLERANCE)


def test_several_features_of_one_table_share_their_rows():
    """A key inserted by one feature is found by the next, in the order of the collection's list."""
    table = jaxsok.TableSpec("item", DIM, jaxsok.optim.sgd(1.0), capacity=64)
    collection = jaxsok.Collection(
        [table],
        [jaxsok.FeatureSpec("b", "item"), jaxsok.FeatureSpec("a", "item", max_keys=4)],
    )
    features = programs.batch(
        collection, a=jaxsok.Bags(np.array([9, 7, 8]), lengths=np.array([2, 1])), b=np.array([7, 6])
    )
    embeddings, state, plan = collection.lookup(collection.init(seed=0), features)
    exported = collection.export_table(state, "item")
    assert exported["keys"].tolist() == [7, 6, 9, 8]  # "b" is the first feature of the list
    assert exported["row_ids"].tolist() == [0, 1, 2, 3]
    initial = programs.initial_rows("item", DIM, [6, 7, 8, 9])
    np.testing.assert_array_equal(embeddings["b"], initial[[1, 0]])
    np.testing.assert_allclose(embeddings["a"], [initial[3] + initial[1], initial[2]], rtol=0, atol=1e-7)
    state, stats = collection.update(state, plan, {"a": jnp.ones((2, DIM)), "b": jnp.ones((2, DIM))})
    assert programs.counts(stats, "item") == {
        "num_found": 1,
        "num_inserted": 4,
        "num_missing": 0,
        "num_refused": 0,
        "num_padding": 1,
    }
    moved = initial - np.stack([collection.export_table(state, "item")["rows"][i] for i in (1, 0, 3, 2)])
    np.testing.assert_allclose(moved, np.array([1, 2, 1, 1])[:, None] * np.ones(DIM), atol=1e-6)  # numbers <= 2

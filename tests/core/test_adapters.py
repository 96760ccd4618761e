"""jaxsok.adapters and shared bags: every form of input has the meaning of the same bags in NumPy."""

import collections
import functools
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.experimental import sparse

import jaxsok
from jaxsok import adapters
from jaxsok.operations import specs_of

pa = pytest.importorskip("pyarrow", reason="needs pyarrow, of the test dependencies")
pl = pytest.importorskip("polars", reason="needs polars, of the test dependencies")

NUM_BAGS, WIDTH, DIM = 8, 3, 4
VOCABULARY = 50  # of sparse matrices; other forms have 64-bit keys
MAX_KEYS = NUM_BAGS * WIDTH  # for each of two shards half of it would not always suffice
SparseTensor = collections.namedtuple("SparseTensor", ("indices", "values", "dense_shape"))
RaggedTensor = collections.namedtuple("RaggedTensor", ("values", "row_splits"))
FORMS = ("coo", "rows", "shuffled", "tensor", "ragged", "list", "large_list", "chunked", "polars", "bcoo")


@functools.cache
def declare(num_shards=None, combiner="sum", weighted=False, key_dtype="int64"):
    """Declares one feature over one table."""
    table = jaxsok.TableSpec("item", DIM, jaxsok.optim.adagrad(0.5), capacity=512)
    feature = jaxsok.FeatureSpec(
        "item",
        "item",
        combiner=combiner,
        weighted=weighted,
        max_keys=2 * MAX_KEYS,
        max_hotness=WIDTH if combiner is None else None,
        key_dtype=key_dtype,
    )
    if num_shards is None:
        return jaxsok.Collection([table], [feature])
    return programs.over(num_shards, [table], [feature])


@functools.cache
def step(collection):
    """Returns a whole step, including its embeddings."""

    def run(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.tree.map(jnp.cos, embeddings)
        state, stats = collection.update(state, plan, gradients)
        return embeddings, state, stats

    return jax.jit(run, compiler_options=programs.quickly() if collection.shards.is_mesh else None)


def run_step(collection, value, state=None):
    """Returns embeddings, and keys with rows after a step."""
    state = collection.init(seed=3) if state is None else state
    embeddings, state, stats = step(collection)(state, programs.batch(collection, item=value))
    stats.check()
    return np.asarray(embeddings["item"]), programs.rows_of(collection, state, "item")


def assert_same_step(collection, value, bags):
    """Checks that embeddings and rows after a step are equal to the bit."""
    (got, got_rows), (want, want_rows) = run_step(collection, value), run_step(collection, bags)
    np.testing.assert_array_equal(got, want)
    assert got_rows.keys() == want_rows.keys()
    for key in want_rows:
        np.testing.assert_array_equal(got_rows[key], want_rows[key])


def matrix_of(dense, nse, dtype=None):
    """Returns a BCOO, padded as `BCOO.fromdense(..., nse=)` does it: its last entries are out of range."""
    indices = np.argwhere(dense)
    data = dense[tuple(indices.T)].astype(dtype or dense.dtype)
    more = nse - len(data)
    indices = np.concatenate([indices, np.full((more, 2), dense.shape)]).astype(np.int32)
    data = np.concatenate([data, np.zeros(more, data.dtype)])
    return sparse.BCOO((jnp.asarray(data), jnp.asarray(indices)), shape=dense.shape)


@st.composite
def draw_ragged(draw, *, most=2**63 - 1):
    """Draws keys, lengths and weights of a batch of bags."""
    lengths = draw(st.lists(st.integers(0, WIDTH), min_size=NUM_BAGS, max_size=NUM_BAGS))
    keys = draw(st.lists(st.integers(0, most), min_size=sum(lengths), max_size=sum(lengths)))
    weights = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, -1.0]), min_size=len(keys), max_size=len(keys)))
    return np.array(keys, np.int64), np.array(lengths), np.array(weights, np.float32)


def lists_of(keys, lengths):
    """Returns Python lists; every other empty bag is null, the rest are empty lists."""
    ends = np.cumsum(lengths)
    bags = [keys[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
    return [None if not bag and i % 2 else bag for i, bag in enumerate(bags)]


def make_chunks(lists, kind):
    """Returns a column of two chunks, of which the first is a slice."""
    half = NUM_BAGS // 2
    first = pa.array([[1, 2], None, *lists[:half]], kind).slice(2)
    return pa.chunked_array([first, pa.array(lists[half:], kind)])


def in_form(form, keys, lengths, weights):
    """Converts the bags to another library's form."""
    rows = np.repeat(np.arange(NUM_BAGS), lengths)
    columns = np.arange(len(keys)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    indices = np.stack([rows, columns], axis=1)
    if form == "coo":
        return jaxsok.Coo(indices, keys, weights=weights, shape=(NUM_BAGS, WIDTH))
    if form == "rows":
        return jaxsok.Coo(rows, keys, weights=weights, shape=(NUM_BAGS,))
    if form == "shuffled":
        order = np.random.default_rng(0).permutation(len(keys))
        weights = None if weights is None else weights[order]
        return jaxsok.Coo(indices[order], keys[order], weights=weights, shape=(NUM_BAGS, WIDTH))
    if form in ("tensor", "ragged"):
        splits, shape = np.append(0, np.cumsum(lengths)), np.array([NUM_BAGS, WIDTH])
        tensor = lambda values: (  # noqa: E731
            SparseTensor(indices, values, shape) if form == "tensor" else RaggedTensor(values, splits)
        )
        return tensor(keys) if weights is None else jaxsok.Bags(tensor(keys), weights=tensor(weights))
    make = {
        "list": lambda lists, kind: pa.array(lists, pa.list_(kind)),
        "large_list": lambda lists, kind: pa.array(lists, pa.large_list(kind)),
        "chunked": lambda lists, kind: make_chunks(lists, pa.list_(kind)),
        "polars": lambda lists, kind: pl.Series(
            lists, dtype=pl.List({pa.int64(): pl.Int64, pa.float32(): pl.Float32}[kind])
        ),
    }[form]
    column = make(lists_of(keys, lengths), pa.int64())
    return column if weights is None else jaxsok.Bags(column, weights=make(lists_of(weights, lengths), pa.float32()))


@pytest.mark.parametrize("form", FORMS[:-1])
@pytest.mark.parametrize("weighted", [False, True])
@hypothesis.settings(max_examples=10)
@hypothesis.given(bags=draw_ragged())
def test_every_form_is_a_step_of_the_same_bags(form, weighted, bags):
    """Embeddings and rows are equal to the bit, including bags in any order and null lists."""
    keys, lengths, weights = bags
    collection = declare(weighted=weighted, combiner="mean")
    value = in_form(form, keys, lengths, weights if weighted else None)
    want = jaxsok.Bags(keys, lengths=lengths, weights=weights if weighted else None)
    assert_same_step(collection, value, want)


def test_tensors_whose_weights_lie_elsewhere_are_refused():
    """Weights must have one entry per key, at the same positions."""
    keys, weights, shape = np.array([7, 9]), np.ones(2, np.float32), np.array([2, 3])
    sparse = SparseTensor(np.array([[0, 0], [1, 2]]), keys, shape)
    ragged = RaggedTensor(keys, np.array([0, 1, 2]))
    refused = {
        "with keys of other indices and dense_shape": [
            jaxsok.Bags(sparse, weights=SparseTensor(np.array([[0, 0], [1, 1]]), weights, shape)),
            jaxsok.Bags(keys, weights=SparseTensor(sparse.indices, weights, shape)),
        ],
        "with keys of other row_splits": [jaxsok.Bags(ragged, weights=RaggedTensor(weights, np.array([0, 2, 2])))],
        "got a RaggedTensor with lengths or offsets": [jaxsok.Bags(ragged, lengths=np.array([1, 1]))],
    }
    for message, values in refused.items():
        for value in values:
            with pytest.raises(ValueError, match=f'feature "item": .*{message}'):
                declare(weighted=value.weights is not None).batch({"item": value})


def test_real_tensors_of_tensorflow():
    """RaggedTensor and SparseTensor, ids with and without weights, give the results of TensorFlow's own lookup."""
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    indices, keys = [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]], np.array([7, 7, 9, 3, 5])
    weights = np.array([0.5, 1.5, 1.0, 2.0, 0.25], np.float32)
    tensors = {
        "sparse": lambda values: tf.SparseTensor(indices, values, (4, 3)),
        "ragged": lambda values: tf.RaggedTensor.from_row_splits(values, [0, 2, 2, 5, 5]),
    }
    sparse = tensors["sparse"]
    for weighted in (False, True):
        collection = declare(weighted=weighted, combiner="sum")
        for kind, tensor in tensors.items():
            value = jaxsok.Bags(tensor(keys), weights=tensor(weights)) if weighted else tensor(keys)
            batch = collection.batch({"item": value})
            embeddings, state, _ = collection.lookup(collection.init(seed=0), batch.features)
            rows = np.asarray(collection.rows_of(state, "item", np.arange(10))[0])
            sp_weights = sparse(weights) if weighted else None
            want = tf.nn.safe_embedding_lookup_sparse(tf.constant(rows), sparse(keys), sp_weights, combiner="sum")
            assert np.any(want)
            np.testing.assert_allclose(embeddings["item"], want, rtol=1e-5, atol=1e-7, err_msg=kind)


@pytest.mark.parametrize("form", ["shuffled", "polars"])
def test_every_form_without_a_combiner(form):
    """Each key keeps its row, in the order of its column."""
    keys, lengths = np.arange(10, 20), np.array([3, 0, 2, 1, 0, 3, 1, 0])
    assert_same_step(declare(combiner=None), in_form(form, keys, lengths, None), jaxsok.Bags(keys, lengths=lengths))


@pytest.mark.parametrize("form", FORMS[:-1])
def test_every_form_on_a_mesh_and_through_the_pipeline(form):
    """Samples of any form go to their shards; the pipeline and `pad_to` pack as `batch` does."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, WIDTH + 1, NUM_BAGS)
    keys = rng.integers(0, 99, lengths.sum())
    collection = declare(2)
    bags = jaxsok.Bags(keys, lengths=lengths)
    value = in_form(form, keys, lengths, None)
    assert_same_step(collection, value, bags)
    for pad_to in (None, NUM_BAGS + 2):
        (got, _), *_ = collection.pipeline([{"item": value}], pad_to=pad_to)
        want = collection.batch({"item": bags}, pad_to=pad_to)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_sample_of_any_form_for_propose():
    """All forms lead to the same placements, since they have the same keys."""
    collection = declare()
    keys, lengths = np.array([7, 8, 7, 9]), np.array([2, 0, 1, 1, 0, 0, 0, 0])
    forms = [in_form(form, keys, lengths, None) for form in ("shuffled", "polars")]
    proposals = [
        jaxsok.propose(collection.tables, collection.features, num_shards=2, sample={"item": value})
        for value in (jaxsok.Bags(keys, lengths=lengths), *forms)
    ]
    assert str(proposals[0]) == str(proposals[1]) == str(proposals[2])
    with pytest.raises(TypeError, match='propose: sample: feature "item": keys: got an Arrow column of double'):
        jaxsok.propose(collection.tables, collection.features, num_shards=2, sample={"item": pa.array([1.5])})


# --------------------------------------------------------------------------------------------------------------
# Coordinates


def test_equal_coordinates_keep_their_order():
    """The sort is stable, so floats are added in the order of the keys."""
    coo = jaxsok.Coo(np.array([1, 0, 1, 0, 1]), np.array([5, 6, 7, 8, 9]), shape=(2,))
    bags = adapters.convert_features({"item": coo}, declare().features)["item"]
    assert bags.keys.tolist() == [6, 8, 5, 7, 9] and bags.lengths.tolist() == [2, 3]
    both = jaxsok.Coo(np.array([[0, 1], [0, 0], [0, 1]]), np.array([5, 6, 7]), shape=(1, 2))
    assert adapters.convert_features({"item": both}, declare().features)["item"].keys.tolist() == [6, 5, 7]


@pytest.mark.parametrize("key_dtype", ["int64", "int32"])
def test_declared_int32(key_dtype):
    """Narrow keys work in every form; a jax.Array of int32 only if declared."""
    keys, lengths = np.array([3, 7, 2**31 - 1, 7], np.int32), np.array([2, 0, 1, 1, 0, 0, 0, 0])
    collection, want = declare(key_dtype=key_dtype), jaxsok.Bags(keys.astype(np.int64), lengths=lengths)
    narrow = [
        pa.array(lists_of(keys, lengths), pa.list_(pa.int32())),
        pl.Series(lists_of(keys, lengths), dtype=pl.List(pl.Int32)),
        jaxsok.Coo(np.repeat(np.arange(NUM_BAGS), lengths), keys, shape=(NUM_BAGS,)),
        jaxsok.Bags(keys, lengths=lengths),
    ]
    for value in narrow:
        assert_same_step(collection, value, want)
    for value in (
        jaxsok.Bags(jnp.asarray(keys), lengths=lengths),
        jaxsok.Coo(np.repeat(np.arange(NUM_BAGS), lengths), jnp.asarray(keys), shape=(NUM_BAGS,)),
    ):
        if key_dtype == "int32":
            assert_same_step(collection, value, want)
        else:
            with pytest.raises(TypeError, match=r'"item": keys: got a jax.Array int32\[4\], which may be an int64'):
                programs.batch(collection, item=value)


COO = functools.partial(jaxsok.Coo, shape=(2, 3))
BAD_COO = {
    "negative bag": (ValueError, "indices: got bag -1 at 1, wanted 0 to 1", COO([[0, 0], [-1, 0]], [1, 2])),
    "bag past the end": (ValueError, "indices: got bag 2 at 0, wanted 0 to 1", COO([[2, 0]], [1])),
    "negative column": (ValueError, "indices: got column -2 at 0, wanted 0 to 2", COO([[0, -2]], [1])),
    "column past the end": (ValueError, "indices: got column 3 at 0", COO([[0, 3]], [1])),
    "fewer keys": (ValueError, r"keys: got shape \[1\] for 2 indices, wanted \[2\]", COO([[0, 0], [1, 0]], [1])),
    "weights": (ValueError, r"weights: got shape \[2\], wanted", COO([[0, 0]], [1], weights=[1.0, 2.0])),
    "float indices": (TypeError, "indices: got float64", COO([[0.0, 0.0]], [1])),
    "bool indices": (TypeError, "indices: got bool", COO([[True, False]], [1])),
    "float keys": (TypeError, "keys must be integers, got float64", COO([[0, 0]], [1.5])),
    "three axes": (ValueError, r"indices: got shape \[1, 3\], wanted \[num_keys, 2\]", COO([[0, 0, 0]], [1])),
    "no columns": (ValueError, r"shape: got \(2,\), wanted \(num_bags, num_columns\)", COO([[0, 0]], [1], shape=(2,))),
    "bad shape": (ValueError, "shape: got -1, wanted", COO([0], [1], shape=-1)),
    "lengths too": (
        ValueError,
        r"got a Coo with \['lengths'\], wanted it alone",
        jaxsok.Bags(COO([], []), lengths=[0]),
    ),
}


@pytest.mark.parametrize("name", BAD_COO)
def test_bad_coordinates(name):
    """Bad coordinates are refused by name, with the actual and the expected value."""
    error, message, value = BAD_COO[name]
    as_arrays = value
    if isinstance(value, jaxsok.Coo):
        as_arrays = jaxsok.Coo(np.array(value.indices), np.array(value.keys), weights=value.weights, shape=value.shape)
    with pytest.raises(error, match=f'batch: feature "item": {message}'):
        programs.batch(declare(), item=as_arrays)


def test_traced_coordinates_are_refused():
    """Sorting runs on the host; the message states what to pass inside a program."""
    collection = declare(key_dtype="int32")
    with pytest.raises(TypeError, match=r"got a Coo of traced arrays.*BCOO"):
        jax.jit(lambda keys: programs.batch(collection, item=jaxsok.Coo(np.array([0]), keys, shape=(1,))))(
            jnp.array([1])
        )


# --------------------------------------------------------------------------------------------------------------
# Sparse matrices


@functools.cache
def find_inside(collection):
    """Returns `find` of a batch that a program packs."""
    return jax.jit(lambda state, value: collection.find(state, programs.batch(collection, item=value))[0]["item"])


@hypothesis.settings(max_examples=10)
@hypothesis.given(bags=draw_ragged(most=VOCABULARY - 1))
def test_a_sparse_matrix_times_the_table(bags):
    """With weights and sum, embeddings equal the matrix product, outside a program and inside it."""
    keys, lengths, weights = bags
    rows = np.repeat(np.arange(NUM_BAGS), lengths)
    # The last entries are out of range, as `BCOO.fromdense(..., nse=)` pads.
    more = MAX_KEYS - len(keys)
    indices = np.concatenate([np.stack([rows, keys], axis=1), np.full((more, 2), [NUM_BAGS, VOCABULARY])])
    data = np.concatenate([weights, np.zeros(more, np.float32)])
    order = np.random.default_rng(1).permutation(MAX_KEYS)
    arrays = jnp.asarray(data[order]), jnp.asarray(indices[order].astype(np.int32))
    matrix = sparse.BCOO(arrays, shape=(NUM_BAGS, VOCABULARY))
    collection = declare(weighted=True)
    table = programs.initial_rows("item", DIM, np.arange(VOCABULARY), seed=3)
    got, _ = run_step(collection, matrix)
    dense = np.zeros((NUM_BAGS, VOCABULARY), np.float32)
    np.add.at(dense, (rows, keys), weights)
    np.testing.assert_allclose(got, dense @ table, atol=1e-6)
    np.testing.assert_array_equal(find_inside(collection)(collection.init(seed=3), matrix), got)


def test_a_sparse_matrix_without_weights():
    """Ones are keys; zeros and entries out of range are none, in any dtype; other numbers need declared weights."""
    dense = np.zeros((NUM_BAGS, VOCABULARY), np.int32)
    dense[0, [3, 7]] = dense[2, 49] = 1
    want = jaxsok.Bags(np.array([3, 7, 49]), lengths=np.array([2, 0, 1, 0, 0, 0, 0, 0]))
    for dtype in (np.int32, np.float32, np.bool_):
        matrix = matrix_of(dense, MAX_KEYS, dtype)
        assert_same_step(declare(), matrix, want)
        assert_same_step(declare(2), matrix, want)
        found = find_inside(declare())(declare().init(seed=3), matrix)
        np.testing.assert_array_equal(found, run_step(declare(), want)[0])
    with pytest.raises(ValueError, match=r'"item": weights: got a BCOO that holds 2, wanted 0 and 1 .*weighted=True'):
        programs.batch(declare(), item=matrix_of(2 * dense, MAX_KEYS))


def test_bad_sparse_matrices():
    """Negative indices, batch axes and other ranks are refused."""
    negative = sparse.BCOO((jnp.ones(1), jnp.array([[0, -1]])), shape=(NUM_BAGS, VOCABULARY))
    with pytest.raises(ValueError, match="indices: got -1, wanted no negative number"):
        programs.batch(declare(), item=negative)
    ones, zeros = np.ones, functools.partial(np.zeros, dtype=np.int32)
    for data, indices, shape in (
        (ones((NUM_BAGS, 4)), zeros((NUM_BAGS, 4, 1)), (NUM_BAGS, 4)),  # a batch axis
        (ones((1, 4)), zeros((1, 1)), (NUM_BAGS, 4)),  # a dense axis
        (ones(4), zeros((4, 1)), (4,)),
    ):
        matrix = sparse.BCOO((jnp.asarray(data, jnp.float32), jnp.asarray(indices)), shape=shape)
        with pytest.raises(ValueError, match=r"got a BCOO of shape .* wanted \[num_bags, num_keys\] with neither"):
            programs.batch(declare(), item=matrix)
    ragged_beside = jax.jit(lambda matrix: programs.batch(declare(2), item=matrix))
    with pytest.raises(ValueError, match="got ragged keys together with device arrays"):
        ragged_beside(matrix_of(np.ones((NUM_BAGS, 4)), NUM_BAGS * 4, np.float32))


# --------------------------------------------------------------------------------------------------------------
# Columns


def test_columns_of_single_keys():
    """A column has one key per sample; a null is no key."""
    keys = [3, None, 2**62, 7, None, 1, 2, 3]
    want = np.array([-1 if key is None else key for key in keys])
    for column in (
        pa.array(keys, pa.int64()),
        pa.chunked_array([pa.array(keys[:3], pa.int64()), pa.array(keys[3:], pa.int64())]),
        pl.Series(keys, dtype=pl.Int64),
        pl.Series(keys, dtype=pl.UInt64),
    ):
        assert_same_step(declare(), column, want)
    narrow = [3, None, 7, 1, 2, 3, 4, 255]
    want = np.array([-1 if key is None else key for key in narrow])
    for kind in (pa.int32(), pa.uint8()):
        narrow_keys = narrow if kind == pa.int32() else pa.array(narrow, pa.uint8())
        assert_same_step(declare(), pa.array(narrow_keys, kind), want)


def test_nulls():
    """A null list is an empty bag, and a null key is padding, also inside a list."""
    lists = [[3, None], None, [], [None], [7], [8], [9], [1]]
    want = jaxsok.Bags(np.array([3, -1, -1, 7, 8, 9, 1]), lengths=np.array([2, 0, 0, 1, 1, 1, 1, 1]))
    for column in (pa.array(lists, pa.list_(pa.int64())), pl.Series(lists, dtype=pl.List(pl.Int64))):
        assert_same_step(declare(combiner="mean"), column, want)


def test_null_lists_over_keys():
    """Keys under a null list, which Arrow allows, belong to no bag."""
    offsets, keys = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5], pa.int64())
    column = pa.ListArray.from_arrays(offsets, keys, mask=pa.array([False, True, False]))
    bags = adapters.convert_features({"item": column}, declare().features)["item"]
    assert bags.keys.tolist() == [1, 2, 5] and bags.lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize("kind", ["arrow", "narrow", "polars"])
def test_lists_of_one_size_are_rectangles(kind):
    """The shapes are static without a declared number of keys; a null list is a row of padding."""
    lists = [[1, 2], None, [3, None], [4, 5], [6, 7], [1, 2], [8, 9], [3, 4]]
    column = {
        "arrow": lambda: pa.array(lists, pa.list_(pa.int64(), 2)),
        "narrow": lambda: pa.array(lists, pa.list_(pa.uint16(), 2)),
        "polars": lambda: pl.Series(lists, dtype=pl.Array(pl.Int64, 2)),
    }[kind]()
    want = np.array([[-1 if key is None else key for key in keys or [None, None]] for keys in lists])
    assert_same_step(declare(), column, want)
    assert adapters.convert_features({"item": column}, declare().features)["item"].shape == (NUM_BAGS, 2)


def test_weights_of_lists_of_one_size():
    """A null in both columns is an empty bag; null weights of keys are refused."""
    keys = pa.array([[1, 2], None] + [[3, 4]] * 6, pa.list_(pa.int64(), 2))
    weights = pa.array([[1.0, 0.5], None] + [[2.0, 1.0]] * 6, pa.list_(pa.float32(), 2))
    plain = jaxsok.Bags(
        np.array([[1, 2], [-1, -1]] + [[3, 4]] * 6),
        weights=np.array([[1.0, 0.5], [0, 0]] + [[2.0, 1.0]] * 6, np.float32),
    )
    assert_same_step(declare(weighted=True), jaxsok.Bags(keys, weights=weights), plain)
    with pytest.raises(ValueError, match="weights: got infinite or NaN"):
        programs.batch(declare(weighted=True), item=jaxsok.Bags(keys.fill_null([5, 6]), weights=weights))


def test_columns_without_nulls_are_not_copied():
    """Keys stay in the memory of Arrow and Polars."""
    keys = np.arange(1000)
    for column, values in (
        (pa.array(keys), keys),
        (pl.Series(keys), keys),
        (pa.ListArray.from_arrays(pa.array([0, 400, 1000], pa.int32()), pa.array(keys)), keys),
    ):
        found = adapters.convert_features({"item": column}, declare().features)["item"]
        found = found.keys if isinstance(found, jaxsok.Bags) else found
        np.testing.assert_array_equal(found, values)
        assert not found.flags.owndata and not found.flags.writeable


def test_columns_in_bags():
    """Lengths, offsets and weights may be columns too, mixed with NumPy arrays."""
    keys, lengths, weights = np.arange(4), np.array([2, 0, 1, 1, 0, 0, 0, 0]), np.ones(4, np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    plain = jaxsok.Bags(keys, lengths=lengths, weights=weights)
    for value in (
        jaxsok.Bags(pa.array(keys), lengths=pa.array(lengths), weights=pa.array(weights)),
        jaxsok.Bags(keys, offsets=pa.array(offsets), weights=pl.Series(weights)),
        jaxsok.Bags(pl.Series(keys), lengths=lengths, weights=weights),
    ):
        assert_same_step(declare(weighted=True), value, plain)


KEYS_OF_KJT = np.arange(4)
LISTS = pa.array([[1, 2], [3]])
BAD_COLUMNS = {
    "floats": (TypeError, "keys: got an Arrow column of double, wanted integers", pa.array([1.5])),
    "strings": (TypeError, "keys: got an Arrow column of string, wanted integers", pa.array(["a"])),
    "lists of floats": (TypeError, "keys: got an Arrow column of double", pa.array([[1.5]])),
    "lists of lists": (TypeError, "keys: got an Arrow column of list<", pa.array([[[1]]])),
    "a table": (TypeError, "keys: got an Arrow column of struct", pl.DataFrame({"a": [1]})),
    "lengths twice": (ValueError, "got a column of lists with lengths or offsets", jaxsok.Bags(LISTS, lengths=[2, 1])),
    "null lengths": (ValueError, "lengths: got 1 nulls", jaxsok.Bags(np.arange(2), lengths=pa.array([2, None]))),
    "null weights": (
        ValueError,
        "weights: got 1 nulls, wanted a number in every place",
        jaxsok.Bags(LISTS, weights=pa.array([[1.0, None], [2.0]])),
    ),
    "weights of other lengths": (
        ValueError,
        "weights: got lists of other lengths than the keys'",
        jaxsok.Bags(LISTS, weights=pa.array([[1.0], [2.0, 3.0]])),
    ),
    "flat weights of lists": (
        ValueError,
        "weights: got lists of other lengths than the keys'",
        jaxsok.Bags(LISTS, weights=pa.array([1.0, 2.0, 3.0])),
    ),
    "integer weights": (TypeError, "weights: got an Arrow column of int64", jaxsok.Bags(LISTS, weights=LISTS)),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_bad_columns(name):
    """Bad columns are refused by name, with the actual and the expected value."""
    error, message, value = BAD_COLUMNS[name]
    with pytest.raises(error, match=f'batch: feature "item": {message}'):
        programs.batch(declare(weighted="weights" in name), item=value)


@pytest.mark.parametrize("dtype", [pl.Int64, pl.UInt64, pl.Int32])
def test_plain_columns_need_no_pyarrow(monkeypatch, dtype):
    """A Polars column of integers without nulls is an array; so are its lengths."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    keys = np.array([7, 9, 7, 2**31 - 1])
    want = programs.batch(declare(), item=jaxsok.Bags(keys, lengths=np.array([3, 0, 1])))
    bags = jaxsok.Bags(pl.Series(keys, dtype=dtype), lengths=pl.Series([3, 0, 1]))
    got = programs.batch(declare(), item=bags)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    single = programs.one_table()
    got = programs.batch(single, user=pl.Series(keys, dtype=dtype))
    jax.tree.map(np.testing.assert_array_equal, got, programs.batch(single, user=keys))


@pytest.mark.parametrize(
    "values",
    [
        pl.Series([7, None], dtype=pl.Int64),
        pl.Series([[7], [8, 9]]),
        pl.Series([1.0]),
        pl.Series([[1, 2]], dtype=pl.Array(pl.Int64, 2)),
    ],
    ids=["nulls", "lists", "floats", "array"],
)
def test_other_columns_say_that_they_need_pyarrow(monkeypatch, values):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'feature "user": keys: got Series.*pip install pyarrow') as caught:
        programs.batch(programs.one_table(), user=values)
    assert "integers without nulls" in str(caught.value)


# --------------------------------------------------------------------------------------------------------------
# One array for all features


def test_jagged_keys_of_all_features():
    """Jagged keys are read by feature and bag, with weights, as in TorchRec's KeyedJaggedTensor; nothing is copied."""
    values, weights = np.array([7, 9, 8, 7, 5]), np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32)
    for lengths in (np.array([2, 0, 1, 2]), np.array([[2, 0], [1, 2]], np.int32)):
        got = jaxsok.from_kjt(values, lengths, ["a", jaxsok.FeatureSpec("b", "item")], weights=weights)
        assert list(got) == ["a", "b"]
        assert [bags.keys.tolist() for bags in got.values()] == [[7, 9], [8, 7, 5]]
        assert [bags.lengths.tolist() for bags in got.values()] == [[2, 0], [1, 2]]
        assert [bags.weights.tolist() for bags in got.values()] == [[1.0, 2.0], [3.0, 4.0, 5.0]]
        assert all(
            np.shares_memory(bags.keys, values) and np.shares_memory(bags.weights, weights) for bags in got.values()
        )


def test_jagged_keys_of_empty_lists():
    """Samples without keys, whose list says no type."""
    collection = programs.one_table()
    bags = jaxsok.from_kjt([], [0, 0], [collection.features[0].name])
    assert [each.keys.dtype.kind for each in bags.values()] == ["i"]


def test_jagged_keys_of_torch():
    """Tensors on the host are read in place."""
    torch = pytest.importorskip("torch")
    got = jaxsok.from_kjt(torch.tensor([7, 9, 8]), torch.tensor([1, 0, 1, 1]), ["a", "b"])
    assert [bags.keys.tolist() for bags in got.values()] == [[7], [9, 8]]


def test_jagged_keys_behind_the_last_bag_are_padding():
    """A buffer may be longer than its bags; other keys behind them are refused with the name of the last feature."""
    collection = declare()
    padded = jaxsok.from_kjt(np.array([7, 9, -1, -1]), np.array([1, 1]), ["item"])
    assert programs.batch(collection, **padded).keys("item").shape[0] >= 2
    with pytest.raises(ValueError, match='feature "item": lengths: got an end at 2 of 3 keys'):
        programs.batch(collection, **jaxsok.from_kjt(np.array([7, 9, 8]), np.array([1, 1]), ["item"]))
    with pytest.raises(ValueError, match="from_kjt: lengths: got -1"):
        jaxsok.from_kjt(np.array([7, 9, 8]), np.array([-1, 1]), ["item"])


WRAPPING = [2**63 - 1, 2**63 - 1, 3, 3]  # their sum is 4 in 64 bits


@pytest.mark.parametrize(
    ("kind", "message", "arguments", "weights"),
    [
        (TypeError, "lengths: got float64", (KEYS_OF_KJT, np.ones(4), ["a", "b"]), None),
        (ValueError, r"lengths: got shape \[3\] for 2 features", (KEYS_OF_KJT, [1, 1, 1], ["a", "b"]), None),
        (ValueError, r"lengths: got shape \[3, 2\] for 2 features", (KEYS_OF_KJT, [[1, 0]] * 3, ["a", "b"]), None),
        (ValueError, "lengths: got an end at 5, past the end of 4 keys", (KEYS_OF_KJT, [1, 4], ["a", "b"]), None),
        (ValueError, "lengths: got a bag of 9223372036854775807 keys", (KEYS_OF_KJT, WRAPPING, ["a", "b"]), None),
        (ValueError, r"values: got shape \[2, 2\]", (KEYS_OF_KJT.reshape(2, 2), [2, 2], ["a", "b"]), None),
        (ValueError, r"weights: got shape \[3\]", (KEYS_OF_KJT, [2, 2], ["a", "b"]), np.ones(3, np.float32)),
        (ValueError, r"lengths: got shape \[0\] for 0 features", (KEYS_OF_KJT, np.zeros(0, int), []), None),
        (ValueError, "features: got .* wanted each feature once", (KEYS_OF_KJT, [2, 2], ["a", "a"]), None),
    ],
)
def test_bad_jagged_keys(kind, message, arguments, weights):
    with pytest.raises(kind, match=f"from_kjt: {message}"):
        jaxsok.from_kjt(*arguments, weights=weights)


# --------------------------------------------------------------------------------------------------------------
# Samples that share bags

NUM_SAMPLES = 16


@st.composite
def draw_shared(draw):
    """Draws bags, and the bag of each sample; some bags may have no sample."""
    bags = draw(draw_ragged())
    inverse = draw(st.lists(st.integers(0, NUM_BAGS - 1), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES))
    return bags, np.array(inverse)


def expand_bags(keys, lengths, weights, inverse):
    """Returns a bag for each sample, which sharing avoids."""
    ends = np.cumsum(lengths)
    place = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in inverse]).astype(int)
    return jaxsok.Bags(keys[place], lengths=lengths[inverse], weights=None if weights is None else weights[place])


@functools.cache
def sharing(num_shards, combiner, weighted, num_keys, optimizer=None):
    """Declares a feature with shared bags and a feature without, over the same table."""
    table = jaxsok.TableSpec("item", DIM, optimizer or jaxsok.optim.sgd(0.25), capacity=512)
    options = {"combiner": combiner, "weighted": weighted, "max_keys": num_keys}
    width = WIDTH if combiner is None else None
    features = [
        jaxsok.FeatureSpec("plain", "item"),
        jaxsok.FeatureSpec("item", "item", max_hotness=width, **options),
        jaxsok.FeatureSpec("again", "item"),
    ]
    return programs.over(num_shards, [table], features) if num_shards else jaxsok.Collection([table], features)


@pytest.mark.parametrize(
    ("num_shards", "combiner", "weighted"), [(None, "mean", True), (None, None, False), (2, "sum", True)]
)
@hypothesis.settings(max_examples=10)
@hypothesis.given(drawn=draw_shared())
def test_shared_bags_are_expanded(num_shards, combiner, weighted, drawn):
    """Embeddings and rows are as if each sample had its own bag; gradients of a bag are summed."""
    (keys, lengths, weights), inverse = drawn
    weights = weights if weighted else None
    collection = sharing(num_shards, combiner, weighted, NUM_SAMPLES * WIDTH * 2)
    other = np.arange(NUM_SAMPLES) % 5
    again = jaxsok.Bags(np.arange(NUM_BAGS), inverse=inverse)
    results = []
    for item, more in (
        (jaxsok.Bags(keys, lengths=lengths, weights=weights, inverse=inverse), again),
        (expand_bags(keys, lengths, weights, inverse), np.arange(NUM_BAGS)[inverse]),
    ):
        features = programs.batch(collection, plain=other, item=item, again=more)
        embeddings, state, stats = step(collection)(collection.init(seed=3), features)
        stats.check()
        results.append((jax.device_get(embeddings), programs.rows_of(collection, state, "item")))
    (got, got_rows), (want, want_rows) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    assert want_rows.keys() == got_rows.keys()  # a bag without samples is not looked up
    for key in want_rows:
        np.testing.assert_allclose(got_rows[key], want_rows[key], rtol=1e-5, atol=1e-5)


def test_shared_bags_move_rows_by_the_sum():
    """Two samples of a bag move its rows by the sum, one sample moves another; one without samples is not asked."""
    collection = programs.one_table(dim=2, initializer=jaxsok.initializers.zeros())
    bags = jaxsok.Bags(np.array([7, 8, 9]), inverse=np.array([1, 0, 1]))
    embeddings, state, plan = collection.lookup(collection.init(), programs.batch(collection, user=bags))
    assert embeddings["user"].shape == (3, 2)
    gradients = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    state, _ = collection.update(state, plan, {"user": gradients})
    rows = programs.rows_of(collection, state)
    assert {key: row.tolist() for key, row in rows.items()} == {7: [-10, -20], 8: [-101, -202]}
    with pytest.raises(ValueError, match=r'"user": got shape \[2, 2\], wanted that of its embedding, \[3, 2\]'):
        collection.update(state, plan, {"user": gradients[:2]})


@pytest.mark.parametrize("num_shards", [None, 2])
def test_shared_bags_through_pipeline_and_padding(num_shards):
    """Added samples have an empty bag; parts know their own bags; the pipeline's plan is valid."""
    collection = sharing(num_shards, "sum", False, 64)
    inverse = np.array([1, 0, 1, 2, 2])
    raw = {
        "plain": np.arange(5),
        "item": jaxsok.Bags(np.array([7, 8, 9]), lengths=np.array([2, 1, 0]), inverse=inverse),
        "again": jaxsok.Bags(np.array([[4, 5], [6, -1], [-1, -1]]), inverse=inverse),
    }
    ((batch, plan),) = collection.pipeline([raw], pad_to=8)
    assert np.asarray(batch.mask).tolist() == [True] * 5 + [False] * 3
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=3), plan)
    rows = dict(enumerate(programs.initial_rows("item", DIM, np.arange(10), seed=3)))
    nothing = np.zeros(DIM, np.float32)
    item = np.stack([rows[7] + rows[8], rows[9], nothing, nothing])
    again = np.stack([rows[4] + rows[5], rows[6], nothing, nothing])
    padded = np.concatenate([inverse, [3, 3, 3]])
    np.testing.assert_allclose(embeddings["item"], item[np.array([1, 0, 1, 2, 2, 3, 3, 3])], atol=1e-7)
    np.testing.assert_allclose(embeddings["again"], again[padded], atol=1e-7)
    state, stats = programs.update(collection)(state, plan, jax.tree.map(jnp.ones_like, embeddings))
    stats.check()
    moved = {key: (rows[key] - row)[0] for key, row in programs.rows_of(collection, state, "item").items() if key > 4}
    np.testing.assert_allclose([moved[key] for key in (5, 6, 7, 8, 9)], [0.25, 0.5, 0.25, 0.25, 0.5], atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint32"])
@pytest.mark.parametrize("num_bags", [2, 3])
def test_shared_bags_inside_a_program(num_bags, dtype):
    """Keys and inverse are on the device, unchecked: a sample whose bag does not exist has none."""
    collection = programs.one_table(dim=2)

    @jax.jit
    def train_step(state, words, inverse):
        features = programs.batch(collection, user=jaxsok.Bags(words, inverse=inverse))
        embeddings, state, plan = collection.lookup(state, features)
        state, _ = collection.update(state, plan, {"user": jnp.ones((5, 2))})
        return embeddings["user"], state

    keys = [7, 8, 9][:num_bags]
    rows = programs.initial_rows("user", 2, keys)
    outside = np.array([-3]).astype(dtype)[0]
    inverse = jnp.asarray(np.array([1, 0, 9, outside, num_bags], dtype))
    got, state = train_step(collection.init(), jnp.asarray(programs.words(keys)), inverse)
    np.testing.assert_array_equal(got, [rows[1], rows[0], [0, 0], [0, 0], [0, 0]])
    after = programs.rows_of(collection, state)
    for number, key in enumerate(keys):
        np.testing.assert_allclose(after[key], rows[number] - (1.0 if number < 2 else 0.0), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "num_shards", "num_programs"),
    [*((kind, None, 2) for kind in ("single", "rectangle", "ragged", "lines")), ("rectangle", 2, 1), ("lines", 2, 1)],
)
def test_few_programs_serve_all_numbers_of_shared_bags(num_shards, num_programs, kind):
    """The number of bags is a power of two, or the number of a shard's samples."""
    table = jaxsok.TableSpec("item", DIM, jaxsok.optim.sgd(0.25), capacity=64)
    feature = jaxsok.FeatureSpec(
        "item",
        "item",
        combiner=None if kind == "lines" else "mean",
        weighted=kind == "rectangle",
        max_keys=16,
        max_hotness=2 if kind == "lines" else None,
    )
    collection = programs.over(num_shards, [table], [feature]) if num_shards else jaxsok.Collection([table], [feature])
    num_traces = 0

    @jax.jit
    def train(state, features):
        nonlocal num_traces
        num_traces += 1
        embeddings, state, plan = collection.lookup(state, features)
        return embeddings["item"], collection.update(state, plan, embeddings)[0]

    for num_bags in (3, 4, 5, 6, 7, 8):
        keys = np.stack([np.arange(num_bags), np.arange(num_bags) + 20], axis=1)
        inverse = np.arange(8)[::-1] % num_bags
        weights = np.full(keys.shape, 0.5, np.float32) if kind == "rectangle" else None
        bags = jaxsok.Bags(keys, weights=weights, inverse=inverse)
        if kind == "single":
            bags = jaxsok.Bags(keys[:, 0], inverse=inverse)
        elif kind in ("ragged", "lines"):
            bags = jaxsok.Bags(keys.reshape(-1), lengths=np.full(num_bags, 2), inverse=inverse)
        got, state = train(collection.init(seed=3), programs.batch(collection, item=bags))
        first, second = (programs.initial_rows("item", DIM, column[inverse], seed=3) for column in keys.T)
        want = np.stack([first, second], axis=1)
        want = first if kind == "single" else want if kind == "lines" else want.mean(axis=1)
        np.testing.assert_allclose(got, want, atol=1e-6)
        used = keys[:, 0] if kind == "single" else keys.reshape(-1)
        assert sorted(programs.rows_of(collection, state, "item")) == sorted(used.tolist())
    assert num_traces == num_programs


def test_shared_bags_beside_few_samples():
    """More bags than samples, and as many single keys as `max_keys` allows, are accepted."""
    collection = programs.one_table(dim=2, max_keys=5)
    for num_bags, num_samples in ((5, 2), (5, 9), (3, 0), (1, 1)):
        bags = jaxsok.Bags(np.arange(num_bags), inverse=np.arange(num_samples) % num_bags)
        features = programs.batch(collection, user=bags)
        assert features.keys("user").shape[0] <= 5
        embeddings, _ = collection.find(collection.init(), features)
        want = programs.initial_rows("user", 2, np.arange(num_samples) % num_bags)
        np.testing.assert_array_equal(embeddings["user"], want.reshape(num_samples, 2))


def test_shared_bags_inside_shard_map():
    """Each shard packs its own part: its bags and their samples."""
    table = jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.1), capacity=64)
    collection = programs.over(2, [table], [jaxsok.FeatureSpec("user", "user")])

    def find_embeddings(state, words, inverse):
        batch = collection.batch({"user": jaxsok.Bags(words, inverse=inverse)})
        return collection.find(state, batch.features)[0]["user"]

    split, state = jax.sharding.PartitionSpec("data"), collection.init(seed=3)
    specs = (specs_of(collection.shards, state), split, split)
    on_shards = jax.jit(jax.shard_map(find_embeddings, mesh=collection.shards.mesh, in_specs=specs, out_specs=split))
    got = on_shards(state, jnp.asarray(programs.words([7, 8, 9, 10])), jnp.array([1, 0, 1, 1, 1, 0]))
    np.testing.assert_array_equal(got, programs.initial_rows("user", DIM, [8, 7, 8, 10, 10, 9], seed=3))


def test_what_features_tell_of_shared_bags():
    """Keys, offsets and mask belong to the bags; the inverse gives the bag of each sample."""
    collection = sharing(2, "sum", False, 64)
    raw = {
        "plain": np.arange(4),
        "item": jaxsok.Bags(np.array([7, 8, 9]), lengths=np.array([2, 1]), inverse=np.array([1, 1, 0, 1])),
        "again": np.arange(4),
    }
    features = programs.batch(collection, **raw)
    assert features.inverse("item").tolist() == [0, 0, 0, 1]
    assert features.inverse("plain").tolist() == [0, 1, 0, 1]
    assert features.offsets("item").tolist() == [0, 1, 1, 0, 2, 3]


def test_no_samples():
    """A batch without samples has neither gradients nor embeddings, and no error occurs."""
    collection = programs.one_table(dim=2)
    for keys in (np.zeros(0, np.int64), np.array([5])):
        bags = jaxsok.Bags(keys, inverse=np.zeros(0, np.int64))
        embeddings, state, plan = collection.lookup(collection.init(), programs.batch(collection, user=bags))
        assert embeddings["user"].shape == (0, 2)
        collection.update(state, plan, embeddings)


BAD_INVERSES = {
    "floats": (TypeError, r"inverse: got float64\[1\], wanted integers", np.array([0.0])),
    "two axes": (ValueError, r"inverse: got shape \[1, 1\], wanted \[num_samples\]", np.array([[0]])),
    "negative": (ValueError, "inverse: got -1, wanted 0 to 1, one of 2 bags", np.array([0, -1])),
    "past the end": (ValueError, "inverse: got 2, wanted 0 to 1", np.array([2, 0])),
    "nulls": (ValueError, "inverse: got 1 nulls", pa.array([0, None])),
}


@pytest.mark.parametrize("name", BAD_INVERSES)
@pytest.mark.parametrize("num_shards", [None, 2])
def test_bad_inverses(name, num_shards):
    """Bad inverses are refused by name, with the actual and the expected value; the mesh gives the same message."""
    error, message, inverse = BAD_INVERSES[name]
    with pytest.raises(error, match=f'batch: feature "item": {message}'):
        programs.batch(declare(num_shards), item=jaxsok.Bags(np.array([3, 4]), inverse=inverse))


def test_inverses_that_have_no_lines():
    """Jagged rows have no row for each bag; device arrays on a mesh cannot be cut by bags."""
    jagged = programs.one_table(combiner=None, max_keys=8)
    bags = jaxsok.Bags(np.array([1, 2]), lengths=np.array([2]), inverse=np.array([0]))
    with pytest.raises(ValueError, match=r"inverse: got one with combiner None and ragged keys.*max_hotness"):
        programs.batch(jagged, user=bags)
    words = jnp.asarray(programs.words([1, 2]))
    with pytest.raises(ValueError, match="inverse: got one together with device arrays"):
        programs.batch(declare(2), item=jaxsok.Bags(words, inverse=np.array([0, 1])))


def test_shared_bags_repeat_to_the_bit():
    """Law 3: the sum over the samples of a bag runs in one order."""
    collection = sharing(None, "sum", False, 64)
    rng = np.random.default_rng(0)
    raw = {
        "plain": np.arange(64),
        "item": jaxsok.Bags(np.arange(3), lengths=np.array([1, 1, 1]), inverse=rng.integers(0, 3, 64)),
        "again": np.arange(64),
    }
    features = programs.batch(collection, **raw)
    _, state, plan = programs.lookup(collection)(collection.init(seed=3), features)
    gradients = {name: rng.normal(size=(64, DIM)).astype(np.float32) for name in raw}
    rows = []
    for _ in range(3):
        after, _ = programs.update(collection)(state, plan, gradients)
        rows.append(programs.rows_of(collection, after, "item"))
    for other in rows[1:]:
        for key, row in rows[0].items():
            np.testing.assert_array_equal(programs.bits(row), programs.bits(other[key]))

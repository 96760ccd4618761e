"""The code of docs/coming_from.md computes the same as TensorFlow's lookups, by their definitions in NumPy."""

import contextlib
import functools
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import programs
import pytest

import jaxsok

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIM = 4
# The order is that in DeepRec's documentation of its asynchronous lookup.
TEN = [
    "tf.contrib.feature_column.sequence_input_layer",
    "tf.contrib.layers.safe_embedding_lookup_sparse",
    "tf.contrib.layers.input_from_feature_columns",
    "tf.contrib.layers.sequence_input_from_feature_columns",
    "tf.feature_column.input_layer",
    "tf.nn.embedding_lookup",
    "tf.nn.embedding_lookup_sparse",
    "tf.nn.safe_embedding_lookup_sparse",
    "tf.nn.fused_embedding_lookup_sparse",
    "fused_safe_embedding_lookup_sparse",
]


def combine_sample(rows, weights, combiner):
    """Combines one sample by the definition in `tf.nn.embedding_lookup_sparse`."""
    weights = np.asarray(weights, np.float64)
    total = sum(weight * row for weight, row in zip(weights, rows, strict=True))
    return total / {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]


def look_up(rows, indices, ids, num_samples, weights=None, combiner="mean", default_id=None, *, prunes=True):
    """Computes `tf.nn.safe_embedding_lookup_sparse`; without pruning the plain lookup, with zeros for empty samples."""
    weights = np.ones(len(ids)) if weights is None else weights
    result = np.zeros((num_samples, DIM))
    for sample in range(num_samples):
        entries = [(key, w) for (i, _), key, w in zip(indices, ids.tolist(), weights, strict=True) if i == sample]
        if prunes:
            entries = [(key, w) for key, w in entries if key >= 0 and (combiner == "sum" or w > 0)]
        if not entries and default_id is not None:
            entries = [(default_id, 1.0)]
        if entries:
            result[sample] = combine_sample([rows[key] for key, _ in entries], [w for _, w in entries], combiner)
    return result


def sequences(rows, ragged):
    """Returns a sequence column: the row of each id at its place, zeros at negative ids and after the last id."""
    result, begin = np.zeros((len(ragged.lengths), ragged.lengths.max(), DIM)), 0
    for sample, length in enumerate(ragged.lengths):
        for place, key in enumerate(ragged.keys[begin : begin + length].tolist()):
            result[sample, place] = rows[key] if key >= 0 else 0
        begin += length
    return result


@functools.cache
def page():
    """Returns the names that the section's code defines, and its text."""
    text = (ROOT / "docs/coming_from.md").read_text()
    section = text[text.index("## DeepRec") : text.index("## HugeCTR")]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    names = {"functools": functools, "jax": jax, "jnp": jnp, "np": np, "jaxsok": jaxsok}
    names["adagrad"] = jaxsok.optim.rowwise_adagrad(0.02)
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        exec(compile(code, "docs/coming_from.md", "exec"), names)
    return names, section, code


def rows_by_key(collection, state, keys):
    """Returns the rows of these keys as float64."""
    keys = np.unique(keys)
    rows, _ = collection.rows_of(state, "item", keys)
    return dict(zip(keys.tolist(), np.asarray(rows, np.float64), strict=True))


@pytest.fixture(scope="module")
def found():
    """Returns the results of the page's code for its batch, and the rows that it used."""
    names, *_ = page()
    collection, raw = names["lookups"], names["raw"]
    embeddings, state, _ = collection.lookup(collection.init(seed=0), collection.batch(raw).features)
    rows = rows_by_key(collection, state, np.arange(12))
    return {name: np.asarray(rows) for name, rows in embeddings.items()}, rows


def test_every_one_of_the_ten_is_in_the_table_and_has_a_line():
    """The table has each function's full name; the code may leave out the modules of a second one."""
    _, section, code = page()
    for name in TEN:
        assert f"`{name}`" in section, name
        assert re.search(rf"# .*\b{name.rsplit('.', 1)[-1]}\b", code), name


@pytest.mark.parametrize("name", TEN)
def test_a_line_gives_what_the_function_does(found, name):
    """The page's batch has negative ids, non-positive weights, and samples that are empty before or after pruning."""
    embeddings, rows = found
    names, *_ = page()
    indices, ids, weights, raw = (names[name] for name in ("indices", "ids", "weights", "raw"))
    lookup = functools.partial(look_up, rows, indices)
    two_columns = [lookup(np.abs(ids), 4), lookup(ids, 4)]  # "genre", then "tag"
    two_sequences = [sequences(rows, names["ragged"])] * 2
    columns = names["columns"]
    got, want = {
        "tf.nn.embedding_lookup": lambda: (
            embeddings["id"],
            np.array([[rows[key] for key in pair] for pair in raw["id"].tolist()]),
        ),
        "tf.nn.embedding_lookup_sparse": lambda: (
            embeddings["sparse"],
            lookup(np.abs(ids), 4, weights, prunes=False),
        ),
        "tf.nn.safe_embedding_lookup_sparse": lambda: (embeddings["safe"], lookup(ids, 4, weights, "sqrtn")),
        "tf.contrib.layers.safe_embedding_lookup_sparse": lambda: (
            embeddings["contrib"],
            lookup(ids, 4, weights, "mean", default_id=6),
        ),
        "tf.nn.fused_embedding_lookup_sparse": lambda: (embeddings["fused"], lookup(np.abs(ids), 4, combiner="sum")),
        "fused_safe_embedding_lookup_sparse": lambda: (embeddings["fused_safe"], lookup(ids, 4, default_id=6)),
        **dict.fromkeys(
            ["tf.feature_column.input_layer", "tf.contrib.layers.input_from_feature_columns"],
            lambda: (columns(embeddings, ["tag", "genre"]), np.concatenate(two_columns, axis=1)),
        ),
        **dict.fromkeys(
            [
                "tf.contrib.feature_column.sequence_input_layer",
                "tf.contrib.layers.sequence_input_from_feature_columns",
            ],
            lambda: (columns(embeddings, ["seen", "rated"]), np.concatenate(two_sequences, axis=2)),
        ),
    }[name]()
    assert got.shape == want.shape and np.any(want)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7, err_msg=name)  # float32 sums of a few rows


def test_sequence_lengths():
    """TensorFlow derives a length from the indices: the last column of each sample plus one."""
    names, *_ = page()
    assert names["batch"]["length"].tolist() == [1, 0, 3, 0]


@pytest.mark.parametrize("default_id", [None, 0, 6])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_safe_on_random_bags(combiner, weighted, default_id):
    """`safe_bags` prunes a third of the ids and of the weights."""
    table = jaxsok.TableSpec("item", DIM, jaxsok.optim.sgd(0.1), capacity=64)
    feature = jaxsok.FeatureSpec("bag", "item", combiner=combiner, weighted=weighted, max_keys=64)
    collection = jaxsok.Collection([table], [feature])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 4, 12)
        samples = np.repeat(np.arange(12), lengths)
        indices = np.stack([samples, np.arange(len(samples))], axis=1)
        ids = rng.integers(-5, 10, len(samples))
        weights = rng.integers(-1, 3, len(samples)).astype(np.float32) if weighted else None
        if weighted and combiner == "sum":
            weights[:] = rng.normal(size=len(samples))
        bag = jaxsok.safe_bags(
            jaxsok.Coo(indices, ids, weights=weights, shape=(12, 48)), combiner=combiner, default_key=default_id
        )
        embeddings, state, _ = collection.lookup(collection.init(seed=0), collection.batch({"bag": bag}).features)
        rows = rows_by_key(collection, state, np.arange(10))
        want = look_up(rows, indices, ids, 12, weights, combiner, default_id)
        assert (lengths == 0).any() and np.any(want)
        np.testing.assert_allclose(embeddings["bag"], want, rtol=1e-5, atol=1e-6)


def test_safe_bags_of_other_forms_and_what_it_refuses():
    """Rectangles, padding after the last bag and any 64-bit default are accepted; weights of another shape are not."""
    square = jaxsok.safe_bags(np.array([[7, -1], [-5, -5]]), default_key=2**63 + 1)
    assert (square.keys.tolist(), square.lengths.tolist()) == ([7, 2**63 + 1], [1, 1])
    padded = jaxsok.safe_bags(jaxsok.Bags(np.array([3, -2, 4, -1]), offsets=np.array([0, 1, 3])))
    assert (padded.keys.tolist(), padded.lengths.tolist()) == ([3, 4], [1, 1])
    from jax.experimental import sparse

    weights = np.float32([[0, 2.0, 0], [-1.0, 0, 1.0]])
    of_matrix = jaxsok.safe_bags(sparse.BCOO.fromdense(weights))
    assert (of_matrix.keys.tolist(), of_matrix.lengths.tolist()) == ([1, 2], [1, 1])
    assert of_matrix.weights.tolist() == [2.0, 1.0]
    assert jaxsok.safe_bags(sparse.BCOO.fromdense(np.float32(weights > 0))).weights is None
    assert jaxsok.safe_bags(sparse.BCOO.fromdense(np.array([[0, 3]]))).weights.tolist() == [3.0]
    with pytest.raises(ValueError, match=r"safe_bags: weights: got shape \[1\], wanted that of the keys, \[2\]"):
        jaxsok.safe_bags(jaxsok.Bags(np.array([1, 2]), weights=np.ones(1, np.float32)))
    with pytest.raises(ValueError, match="safe_bags: combiner: got 'max', wanted one of"):
        jaxsok.safe_bags(np.array([1]), combiner="max")
    with pytest.raises(TypeError, match="safe_bags: default_key"):
        jaxsok.safe_bags(np.array([1]), default_key=0.5)
    rows = jnp.ones((1, 2, 3))
    with pytest.raises(ValueError, match="combine_clipped: combiner: got 'max'"):
        jaxsok.combine_clipped(rows, jnp.ones((1, 2)), "max")
    with pytest.raises(ValueError, match="combine_clipped: max_norm: got -1"):
        jaxsok.combine_clipped(rows, jnp.ones((1, 2)), "sum", max_norm=-1)


def clipped_step(rows, bags, combiner, max_norm, rate):
    """Runs one step of SGD under loss sum(embedding * (1, 2, 3, 4)), by the derivative of r -> m r / |r| in NumPy."""
    direction = np.arange(1.0, DIM + 1)
    embeddings, gradients = np.zeros((len(bags), DIM)), {key: np.zeros(DIM) for key in rows}
    for number, entries in enumerate(bags):
        weights = np.array([weight for _, weight in entries])
        divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner] or 1.0
        for key, weight in entries:
            row, length = rows[key], np.linalg.norm(rows[key])
            clipped, gradient = row, direction
            if length > max_norm:
                clipped = row * max_norm / length
                gradient = max_norm / length * (direction - row * (row @ direction) / length**2)
            embeddings[number] += weight / divisor * clipped
            gradients[key] += weight / divisor * gradient
    return embeddings, {key: row - rate * gradients[key] for key, row in rows.items()}


@pytest.mark.parametrize(("combiner", "num_devices"), [("sum", 1), ("mean", 4), ("sqrtn", 1)])
def test_max_norm_and_default_id_in_training(combiner, num_devices):
    """`safe_bags` and `combine_clipped` give the embeddings and rows after a step; some rows exceed `max_norm`."""
    rng, keys = np.random.default_rng(1), np.arange(8)
    table = jaxsok.TableSpec("item", DIM, jaxsok.optim.sgd(0.5), capacity=64)
    feature = jaxsok.FeatureSpec("bag", "item", combiner=None, max_hotness=3)
    collection = programs.over(num_devices, [table], [feature])
    values = rng.normal(size=(8, DIM)).astype(np.float32)
    state, *_ = collection.assign(collection.init(seed=0), "item", keys, values)
    ids = jaxsok.Bags(
        np.array([3, 7, 3, -5, 0, 2, 5]), lengths=np.array([3, 1, 2, 1]), weights=np.float32([1, 2, 0.5, 1, 1, 0.25, 3])
    )
    bags = jaxsok.safe_bags(ids, combiner=combiner, default_key=6)
    weights = np.zeros((4, 3), np.float32)
    weights[np.arange(3) < bags.lengths[:, None]] = bags.weights
    batch = collection.batch({"bag": jaxsok.Bags(bags.keys, lengths=bags.lengths), "weights": weights})
    embeddings, state, plan = collection.lookup(state, batch.features)
    combined = lambda embeddings: jaxsok.combine_clipped(embeddings["bag"], batch["weights"], combiner, 1.5)  # noqa: E731
    loss_fn = lambda embeddings: jnp.sum(combined(embeddings) @ jnp.arange(1.0, DIM + 1))  # noqa: E731
    state, _ = collection.update(state, plan, jax.grad(loss_fn)(embeddings))
    used = [[(3, 1), (7, 2), (3, 0.5)], [(6, 1)], [(0, 1), (2, 0.25)], [(5, 3)]]
    want, rows = clipped_step(dict(zip(keys, values.astype(np.float64), strict=True)), used, combiner, 1.5, 0.5)
    lengths = np.linalg.norm(values, axis=1)
    assert (lengths > 1.5).any() and (lengths < 1.5).any()
    np.testing.assert_allclose(combined(embeddings), want, rtol=1e-5)
    got, _ = collection.rows_of(state, "item", keys)
    np.testing.assert_allclose(got, np.stack([rows[key] for key in keys]), rtol=1e-5, atol=1e-6)


def test_max_norm_and_default_id_of_tensorflow():
    """TensorFlow's own function and its gradient move the rows as `clipped_step` does."""
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    rows = tf.Variable(np.random.default_rng(1).normal(size=(8, DIM)).astype(np.float32))
    indices = [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1], [3, 0]]
    ids = tf.SparseTensor(indices, np.array([3, 7, 3, -5, 0, 2, 5]), (4, 3))
    weights = tf.SparseTensor(indices, np.float32([1, 2, 0.5, 1, 1, 0.25, 3]), (4, 3))
    for combiner in ("sum", "mean", "sqrtn"):
        with tf.GradientTape() as tape:
            got = tf.nn.safe_embedding_lookup_sparse(rows, ids, weights, combiner, default_id=6, max_norm=1.5)
            loss = tf.reduce_sum(got * tf.range(1.0, DIM + 1))
        moved = rows - 0.5 * tf.convert_to_tensor(tape.gradient(loss, rows))
        used = [[(3, 1), (7, 2), (3, 0.5)], [(6, 1)], [(0, 1), (2, 0.25)], [(5, 3)]]
        want, after = clipped_step(dict(enumerate(rows.numpy().astype(np.float64))), used, combiner, 1.5, 0.5)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(moved, np.stack([after[key] for key in range(8)]), rtol=1e-5, atol=1e-6)

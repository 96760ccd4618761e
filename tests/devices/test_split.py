"""A batch on a mesh: samples go to shards in order, missing ones are padded and masked, arrays stay in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxsok

NUM_SHARDS, NUM_SAMPLES = 4, 8
TABLES = [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=64)]
FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("basket", "user", weighted=True),
    jaxsok.FeatureSpec("history", "user", combiner="mean", weighted=True, max_keys=32),
]


@functools.cache
def collection(num_shards=NUM_SHARDS, features=tuple(FEATURES)):
    """Returns one table, read as a column, a weighted rectangle and weighted ragged bags; with None, on one device."""
    if num_shards is None:
        return jaxsok.Collection(TABLES, features)
    return programs.over(num_shards, TABLES, features)


def raw_batch(num_samples, seed=0):
    """Makes samples with empty bags and padding among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, num_samples)
    return {
        "user": rng.integers(-1, 30, num_samples),
        "basket": jaxsok.Bags(
            rng.integers(-1, 30, (num_samples, 2)), weights=rng.uniform(0.5, 2, (num_samples, 2)).astype(np.float32)
        ),
        "history": jaxsok.Bags(
            rng.integers(0, 30, lengths.sum()),
            lengths=lengths,
            weights=rng.uniform(0.5, 2, lengths.sum()).astype(np.float32),
        ),
    }


def embeddings_of(declared, features):
    """Returns the embeddings that `find` reads from a fresh state: a function of the keys alone."""
    embeddings, stats = programs.find(declared)(declared.init(seed=5), features)
    return jax.device_get(embeddings), stats.to_dict()


def assert_same_embeddings(got, want):
    """Asserts equality within the rounding of a sum of three."""
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-7, err_msg=name)


# --------------------------------------------------------------------------------------------------------------
# Splitting


def test_samples_go_to_shards_in_order():
    """Every kind of feature reads the embeddings of one device, sample by sample, on any shard."""
    raw = raw_batch(NUM_SAMPLES)
    got, _ = embeddings_of(collection(), programs.batch(collection(), **raw))
    want, _ = embeddings_of(collection(None), programs.batch(collection(None), **raw))
    assert_same_embeddings(got, want)


def test_every_array_is_split_evenly():
    """Each device holds its own part of the batch, and all parts have one size."""
    batch = collection().batch({**raw_batch(NUM_SAMPLES), "label": np.arange(NUM_SAMPLES, dtype=np.float32)})
    for leaf in [*jax.tree.leaves(batch.features), batch["label"]]:
        assert not leaf.sharding.is_fully_replicated
        assert [part.data.shape[0] * NUM_SHARDS for part in leaf.addressable_shards] == [leaf.shape[0]] * NUM_SHARDS


def test_entries_with_a_line_for_each_sample_are_split():
    """Labels go to the shards of their samples; other entries of the batch are unchanged."""
    label, dense, names = np.arange(NUM_SAMPLES), np.ones((NUM_SAMPLES, 3), np.float16), ["a"] * NUM_SAMPLES
    text, table = np.array(names), np.ones((5, 2))
    raw = {**raw_batch(NUM_SAMPLES), "label": label, "dense": dense, "names": names, "text": text, "table": table}
    batch = collection().batch(raw)
    assert batch["names"] is names and batch["text"] is text and batch["table"] is table
    assert [part.data.tolist() for part in batch["label"].addressable_shards] == label.reshape(NUM_SHARDS, 2).tolist()
    assert batch["dense"].shape == dense.shape and batch["dense"].dtype == jnp.float16
    assert batch["label"].dtype == jax.dtypes.canonicalize_dtype(np.int64)
    assert batch.mask is None


def test_one_program_serves_all_lengths():
    """Batches that differ only in their lengths have the same static shapes."""
    shapes = {
        tuple(leaf.shape for leaf in jax.tree.leaves(programs.batch(collection(), **raw_batch(NUM_SAMPLES, seed))))
        for seed in range(4)
    }
    assert len(shapes) == 1


def test_a_ragged_batch_without_declared_size_takes_the_next_power_of_two():
    """The longest part sets the size for all."""
    declared = collection(features=(jaxsok.FeatureSpec("history", "user"),))
    lengths = np.array([0, 1, 2, 3, 0, 0, 1, 0])
    features = programs.batch(declared, history=jaxsok.Bags(np.arange(7), lengths=lengths))
    assert features.stores[0].keys.shape == (NUM_SHARDS * 8, 2)  # 5 keys on the second shard


# --------------------------------------------------------------------------------------------------------------
# Padding


@pytest.mark.parametrize("num_shards", [None, 1, NUM_SHARDS])
def test_padded_samples_are_masked_and_read_zeros(num_shards):
    """Real samples read the same as without padding; padded samples read zeros, have no keys, and are masked."""
    declared, raw = collection(num_shards), raw_batch(5)
    batch = declared.batch({**raw, "label": np.arange(1, 6, dtype=np.float32)}, pad_to=NUM_SAMPLES)
    assert np.asarray(batch.mask).tolist() == [True] * 5 + [False] * 3
    assert np.asarray(batch["label"]).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    got, counts = embeddings_of(declared, batch.features)
    want, want_counts = embeddings_of(collection(None), programs.batch(collection(None), **raw))
    assert_same_embeddings({name: value[:5] for name, value in got.items()}, want)
    assert all((value[5:] == 0).all() for value in got.values())
    assert counts["user"]["num_missing"] == want_counts["user"]["num_missing"]
    if num_shards == NUM_SHARDS:
        assert len(batch.mask.sharding.device_set) == NUM_SHARDS


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_any_number_of_samples_is_padded_to_the_shards(num_shards):
    """With `pad_to="auto"`, `batch` and the pipeline pad to the next multiple."""
    declared, shards = collection(num_shards), num_shards or 1
    for num_samples in (0, 1, NUM_SHARDS, NUM_SHARDS + 1, 2 * NUM_SHARDS):
        raw, pad_to = raw_batch(num_samples), max(shards, -(-num_samples // shards) * shards)
        want = declared.batch(raw, pad_to=pad_to)
        (of_pipeline, _), *_ = declared.pipeline([raw], pad_to="auto")
        for got in (declared.batch(raw, pad_to="auto"), of_pipeline):
            assert jax.tree.structure(got) == jax.tree.structure(want)
            assert [int(got.mask.sum()), got.mask.shape[0]] == [num_samples, pad_to]
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_full_batch_needs_no_padding():
    """The mask is all true; the shapes are those of every padded batch."""
    full, short, empty = (collection().batch(raw_batch(n), pad_to=NUM_SAMPLES) for n in (NUM_SAMPLES, 5, 0))
    assert [int(batch.mask.sum()) for batch in (full, short, empty)] == [NUM_SAMPLES, 5, 0]
    for batch in (short, empty):
        shapes = [[leaf.shape for leaf in jax.tree.leaves(features)] for features in (full.features, batch.features)]
        assert shapes[0] == shapes[1]


def test_padded_samples_teach_nothing():
    """A mean loss over real samples moves the tables as the real samples alone do."""
    raw, states = raw_batch(5), []
    for declared, pad_to in ((collection(), NUM_SAMPLES), (collection(None), None)):
        features = declared.batch(raw, pad_to=pad_to).features
        num_samples = pad_to or 5
        gradients = {spec.name: np.full((num_samples, 4), 0.5, np.float32) for spec in FEATURES}
        state, _, stats = programs.fed_step(declared)(declared.init(seed=0), features, gradients)
        stats.check()
        states.append(state)
    programs.assert_close_tables((collection(), collection(None)), states, rtol=1e-6, atol=1e-6)


def test_offsets_are_padded_as_lengths_are():
    """Bags by offsets are padded like bags by lengths."""
    features = (jaxsok.FeatureSpec("history", "user", max_keys=32),)
    keys, lengths = np.arange(4), np.array([1, 0, 3])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    declared = collection(features=features)
    packed = [
        declared.batch({"history": jaxsok.Bags(keys, **{name: value})}, pad_to=NUM_SAMPLES).features
        for name, value in (("lengths", lengths), ("offsets", offsets))
    ]
    for a, b in zip(*map(jax.tree.leaves, packed), strict=True):
        np.testing.assert_array_equal(a, b)


# --------------------------------------------------------------------------------------------------------------
# Device arrays

RECTANGLES = tuple(FEATURES[:2])


def on_device(sharding=None):
    """Returns a batch of rectangles as device arrays, and the same in NumPy."""
    raw = raw_batch(NUM_SAMPLES)
    del raw["history"]
    put = functools.partial(jax.device_put, device=sharding)
    basket = jaxsok.Bags(put(programs.words(raw["basket"].keys)), weights=put(raw["basket"].weights))
    return {"user": put(programs.words(raw["user"])), "basket": basket}, raw


@pytest.mark.parametrize("kind", ["split", "one device", "repeated", "mixed"])
def test_device_arrays_are_packed_where_they_are(kind):
    """Arrays on the collection's axis, on one device, on all of them, or mixed with NumPy give the same samples."""
    declared = collection(features=RECTANGLES)
    shardings = {
        "split": declared.shards.split,
        "one device": None,
        "repeated": declared.shards.same,
        "mixed": declared.shards.split,
    }
    raw, plain = on_device(shardings[kind])
    if kind == "mixed":
        raw["user"] = plain["user"]
    features = declared.batch(raw).features
    got, _ = embeddings_of(declared, features)
    want, _ = embeddings_of(collection(None, RECTANGLES), programs.batch(collection(None, RECTANGLES), **plain))
    assert_same_embeddings(got, want)
    for leaf in jax.tree.leaves(features):
        if leaf.size:
            assert leaf.addressable_shards[0].data.shape[0] * NUM_SHARDS == leaf.shape[0]


def test_device_arrays_under_jit():
    """Packing runs in the step, so keys never reach the host."""
    declared = collection(features=RECTANGLES)
    raw, plain = on_device(declared.shards.split)
    state = declared.init(seed=5)
    found = jax.jit(
        lambda state, user, keys, weights: declared.find(
            state, declared.batch({"user": user, "basket": jaxsok.Bags(keys, weights=weights)}).features
        )
    )
    got, _ = found(state, raw["user"], raw["basket"].keys, raw["basket"].weights)
    want, _ = embeddings_of(declared, programs.batch(declared, **plain))
    assert_same_embeddings(jax.device_get(got), want)


def test_device_arrays_on_another_axis_are_refused():
    """Moving them would be a hidden collective."""
    programs.mesh(4)  # skips where there are fewer devices
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    declared = jaxsok.Collection(TABLES, FEATURES[:1], mesh=mesh, axis="data")
    keys = jax.device_put(programs.words(np.arange(NUM_SAMPLES)), NamedSharding(mesh, P("model")))
    with pytest.raises(ValueError, match=r"batch: feature \"user\": keys: got samples split over axis \['model'\]"):
        declared.batch({"user": keys})
    declared.batch({"user": jax.device_put(keys, NamedSharding(mesh, P("data")))})


def test_no_samples_are_refused():
    """Without samples, a mesh has nothing to share out."""
    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)
    collection = programs.over(2, [table], [jaxsok.FeatureSpec("user", "user")])
    with pytest.raises(ValueError, match=r'"user": keys: got no samples, wanted at least one .* pad_to=2'):
        collection.batch({"user": np.zeros(0, np.int64)})

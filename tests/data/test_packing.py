"""Packing by Grain's threads and workers gives the batches that the collection packs."""

import jax
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import data

NUM_SAMPLES, BATCH_SIZE = 96, 16


def collection_of(num_devices=1):
    tables = [jaxsok.TableSpec(name, 4, jaxsok.optim.adam(0.1), capacity=64) for name in ("user", "words")]
    features = [
        jaxsok.FeatureSpec("user", table="user"),
        jaxsok.FeatureSpec("words", table="words", combiner="sum", weighted=True, max_keys=8 * BATCH_SIZE),
        jaxsok.FeatureSpec("three", table="words", combiner="mean"),
    ]
    if num_devices == 1:
        return jaxsok.Collection(tables, features)
    return jaxsok.Collection(tables, features, mesh=programs.mesh(num_devices), axis="data")


def source_of(**changes):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, NUM_SAMPLES)
    count = lengths.sum()
    bags = jaxsok.Bags(rng.integers(0, 99, count), lengths=lengths, weights=rng.random(count).astype(np.float32))
    columns = {
        "user": rng.integers(0, 2**40, NUM_SAMPLES),
        "words": bags,
        "three": rng.integers(0, 99, (NUM_SAMPLES, 3)),
        "label": rng.random(NUM_SAMPLES).astype(np.float32),
    }
    return data.ArraySource(columns | changes)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert leaf.dtype == other.dtype and leaf.shape == other.shape
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("pad_to", [None, BATCH_SIZE + 4, "auto"])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_batches_are_those_of_the_collection(num_devices, pad_to, is_narrow):
    collection, source = collection_of(num_devices), source_of()
    collection.packer.is_narrow = is_narrow
    batches = data.Batches(source, BATCH_SIZE)
    packed = batches.map(data.PackBatch(collection, pad_to=pad_to))
    assert len(packed) == NUM_SAMPLES // BATCH_SIZE
    for batch, raw in zip(packed, batches, strict=True):
        got = collection.batch(batch, pad_to=pad_to)
        assert_same(got, collection.batch(raw, pad_to=pad_to))
        np.testing.assert_array_equal(np.asarray(got["label"])[:BATCH_SIZE], raw["label"])


@pytest.mark.parametrize("num_devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_pack_for_a_training_that_resumes(num_devices):
    """A training fed by two workers, resumed after an epoch, gives the tables of an uninterrupted one."""

    def train(iterator, state, num_steps):
        pipeline = collection.pipeline(iterator)
        for _, (batch, plan) in zip(range(num_steps), pipeline, strict=False):
            state = collection.grow(state, batch)
            embeddings, state, plan = collection.lookup(state, plan)
            state, stats = collection.update(state, plan, embeddings)
            stats.check()
        return state, pipeline.get_state()

    collection = collection_of(num_devices)
    batches = data.Batches(source_of(), BATCH_SIZE, seed=5).repeat(2)
    want, _ = train(data.iterate(batches), collection.init(seed=0), 12)
    steps_of_epoch = NUM_SAMPLES // BATCH_SIZE
    packed = batches.map(data.PackBatch(collection))
    state, stopped = train(data.iterate(packed, num_workers=2), collection.init(seed=0), steps_of_epoch)
    again = data.iterate(packed, num_workers=2)
    again.set_state(stopped)
    state, _ = train(again, state, 12)
    for table in ("user", "words"):
        got_rows, want_rows = (collection.export_table(trained, table) for trained in (state, want))
        for name in ("keys", "rows"):
            order, want_order = np.argsort(got_rows["keys"]), np.argsort(want_rows["keys"])
            np.testing.assert_array_equal(got_rows[name][order], want_rows[name][want_order])


def test_what_numpy_has_to_pack_passes_as_it_is():
    """Features whose samples share bags, and data that are refused, are left to the collection."""
    collection = collection_of()
    raw = source_of().take(slice(0, BATCH_SIZE))
    shared = raw | {"user": jaxsok.Bags(np.array([7, 9]), inverse=np.arange(BATCH_SIZE) % 2)}
    negative = raw | {"words": jaxsok.Bags(raw["words"].keys, lengths=-np.ones(BATCH_SIZE, np.int64))}
    pack = data.PackBatch(collection)
    assert pack.map(shared)["user"] is shared["user"]
    assert_same(collection.batch(pack.map(shared)), collection.batch(shared))
    negative["words"] = jaxsok.Bags(raw["words"].keys, lengths=negative["words"].lengths, weights=raw["words"].weights)
    assert pack.map(negative)["words"] is negative["words"]
    with pytest.raises(ValueError, match='feature "words": lengths'):
        collection.batch(pack.map(negative))


def test_a_batch_for_other_devices_is_refused():
    single, four = collection_of(), collection_of(4)
    raw = source_of().take(slice(0, BATCH_SIZE))
    with pytest.raises(ValueError, match="batch: raw: got a batch packed for"):
        four.batch(data.PackBatch(single).map(raw))
    with pytest.raises(ValueError, match="batch: raw: got a batch packed for"):
        single.batch(data.PackBatch(single).map(raw), pad_to=32)

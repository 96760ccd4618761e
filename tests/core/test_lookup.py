"""jaxsok.lookup: all kinds of lookup agree; test_collection.py and test_machine.py test their meaning."""

import dataclasses

import jax
import numpy as np

import jaxsok

TABLES = [
    jaxsok.TableSpec("a", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64),
    jaxsok.TableSpec("b", dim=8, optimizer=jaxsok.optim.sgd(0.1), capacity=64, unknown="zeros"),
]
FEATURES = [
    jaxsok.FeatureSpec("one", table="a"),
    jaxsok.FeatureSpec("bag", table="b", combiner="mean", max_keys=32),
    jaxsok.FeatureSpec("each", table="a", combiner=None),
]
COLLECTION = jaxsok.Collection(TABLES, FEATURES)


def batch(seed: int, space: int = 30):
    """Returns a batch of eight samples."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-1, space, shape)  # noqa: E731
    lengths = rng.integers(0, 4, 8)
    bag = jaxsok.Bags(draw(int(lengths.sum())), lengths=lengths)
    return COLLECTION.batch({"one": draw(8), "bag": bag, "each": draw(8, 2)}).features


@jax.jit
def lookup_fused(state, features):
    """Looks up without a plan."""
    return COLLECTION.lookup(state, features)


def test_find_reads_what_lookup_gave():
    """When the keys have rows, the evaluation lookup gives the same bits and changes nothing."""
    features = batch(5)
    embeddings, state, _ = lookup_fused(COLLECTION.init(seed=1), features)
    again, stats = COLLECTION.find(state, features)
    for name in embeddings:
        assert np.array_equal(np.asarray(embeddings[name]), np.asarray(again[name])), name
    assert int(np.asarray(stats.num_missing).sum()) == 0


def test_find_of_unknown_keys():
    """A key without a row reads its initial row, or zeros if its table declares so."""
    features = batch(6)
    embeddings, _ = COLLECTION.find(COLLECTION.init(seed=1), features)
    first, *_ = lookup_fused(COLLECTION.init(seed=1), features)
    assert np.array_equal(np.asarray(embeddings["one"]), np.asarray(first["one"]))
    assert not np.asarray(embeddings["bag"]).any() and np.asarray(first["bag"]).any()


def test_features_of_one_store_only():
    """A store that no feature reads is unchanged."""
    collection = jaxsok.Collection(TABLES, FEATURES[:1])
    state = collection.init(seed=1)
    features = collection.batch({"one": np.arange(8)}).features
    embeddings, state, plan = collection.lookup(state, features)
    state, stats = collection.update(state, plan, embeddings)
    assert collection.num_rows(state) == {"a": 8, "b": 0}
    assert stats.to_dict()["b"] == dict.fromkeys(stats.to_dict()["b"], 0)
    assert dataclasses.is_dataclass(plan) and plan.found[1].row_ids.tolist() == [jaxsok.NO_ROW]

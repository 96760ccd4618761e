"""Coming batches: distinct keys without a row, and the rows that batches request, against sets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings, strategies as st

import jaxsok
from jaxsok import coming

DIM = 4
NUM_SAMPLES = 24


@functools.cache
def counting(num_shards):
    """Declares two tables of one store, the second with counted admission; the send capacity makes several rounds."""
    sgd = jaxsok.optim.sgd(0.1)
    tables = [
        jaxsok.TableSpec("user", DIM, sgd, capacity=128),
        jaxsok.TableSpec("item", DIM, sgd, capacity=128, admission=jaxsok.policies.AdmitByCount(3)),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("item", "item"),
        jaxsok.FeatureSpec("also", "user", combiner="sum"),
    ]
    return programs.over(num_shards, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)


def owners(keys, name, num_shards):
    """Returns the shard of each key."""
    return programs.owner_of(np.array(keys, np.uint64), name, num_shards) if num_shards > 1 else np.zeros(len(keys))


@pytest.mark.parametrize("num_shards", [1, 2])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), is_stacked=st.booleans())
def test_distinct_keys_without_a_row(num_shards, seed, is_stacked):
    """The count is over all batches, on the fullest shard, without padding, repeats and keys below the threshold.

    Low and high words of keys are drawn separately, so that twins that differ in one of them occur.
    """
    collection, rng = counting(num_shards), np.random.default_rng(seed)

    def raw():
        keys = {}
        for feature in collection.features:
            words = rng.integers(0, 5, NUM_SAMPLES).astype(np.uint64) << np.uint64(32)
            words += rng.integers(0, 5, NUM_SAMPLES).astype(np.uint64)
            keys[feature.name] = np.where(rng.random(NUM_SAMPLES) < 0.2, np.uint64(jaxsok.PADDING_KEY), words)
        return keys

    def uses(raws, name):
        table = {feature.name: feature.table for feature in collection.features}
        flat = np.concatenate([keys for raw in raws for feature, keys in raw.items() if table[feature] == name])
        values, counts = np.unique(flat[flat != np.uint64(jaxsok.PADDING_KEY)], return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    first = raw()
    _, state, _ = programs.lookup(collection)(collection.init(seed=0), collection.batch(first).features)
    present = {name: programs.export(collection, state, name) for name in ("user", "item")}
    seen = uses([first], "item")
    raws = [raw(), raw()]
    batches = [collection.batch(raw).features for raw in raws]
    parts = [batch.stores[0] for batch in batches]
    if is_stacked:
        parts = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)]
    numbers, is_used = coming.count(
        collection.stores[0], state.stores[0], parts, state.partition_owners, collection.shards
    )
    new, in_use, used = (np.zeros(num_shards, int) for _ in range(3))
    for name, floor in (("user", 0), ("item", 3)):
        asked = uses(raws, name)
        fresh = [
            key for key in asked if key not in present[name] and asked[key] + seen.get(key, 0) * bool(floor) >= floor
        ]
        found = [key for key in asked if key in present[name]]
        for counts, keys in ((new, fresh), (in_use, list(present[name])), (used, found)):
            counts += np.bincount(owners(keys, name, num_shards).astype(int), minlength=num_shards)
    assert np.asarray(numbers).tolist() == [new.max(), (new + in_use).max(), used.max()]
    marked = np.asarray(is_used).reshape(num_shards, -1)
    np.testing.assert_array_equal(marked.sum(axis=1), used)
    if num_shards == 1:
        rows = [present[name][key][0] for name in present for key in uses(raws, name) if key in present[name]]
        assert sorted(np.flatnonzero(marked[0]).tolist()) == sorted(rows)

"""Tables in host memory: placement, states that are kept, and a long life that ends without host memory."""

import jax
import numpy as np
import programs
import pytest
from test_tiers import assert_law, assert_same_bits, assert_same_results, collection_of, raw_batches, run_loop

import jaxsok
from jaxsok import checkpoint, policies
from jaxsok.types import TIER_COUNTERS

ADAM = jaxsok.optim.adam(0.05)


# Placement -----------------------------------------------------------------------------------------------------------


def declare_placed(memory, num_shards):
    """Returns tables on one device each, and a sharded table; the first two share a store."""
    options = {"capacity": 24, "memory": memory}
    tables = [
        jaxsok.TableSpec("user", 4, ADAM, placement=jaxsok.on(num_shards - 1), **options),
        jaxsok.TableSpec("item", 4, ADAM, placement=jaxsok.on(0), **options),
        jaxsok.TableSpec("ad", 3, jaxsok.optim.rowwise_adagrad(0.05), **options),
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    return programs.over(num_shards, tables, features)


@pytest.mark.parametrize(("num_shards", "device_rows"), [(4, 12), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_tables_on_one_device_of_several(num_shards, device_rows):
    plain, tiered = declare_placed(None, num_shards), declare_placed(jaxsok.HostMemory(device_rows), num_shards)
    (want, results), (got, others) = (run_loop(each, raw_batches(each, 6)) for each in (plain, tiered))
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    assert any(len(store.rows) > 1 for store in got.stores)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_device_that_is_not_the_first(number):
    """Without a mesh, a table, its cache and its host memory are on the default device, also after growth."""
    if len(jax.devices()) <= number:
        pytest.skip(f"needs {number + 1} devices")
    device = jax.devices()[number]
    runs = []
    for device_rows in (None, 24):
        collection = collection_of("one table", device_rows)
        with jax.default_device(device):
            runs.append((collection, *run_loop(collection, raw_batches(collection, 8))))
    (plain, want, results), (tiered, got, others) = runs
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    assert len(got.stores[0].rows) > 1
    assert {place for leaf in jax.tree.leaves(got) for place in leaf.devices()} == {device}


# Kept states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_shards", "device_rows"), [(None, 24), pytest.param(None, 0, marks=pytest.mark.slow), (2, 24)]
)
def test_a_state_that_is_not_given_away(num_shards, device_rows):
    """A step leaves a kept state unchanged, to the bit; repeated, it gives the same, and both states train on alone."""
    collection = collection_of("two", device_rows, num_shards)
    raws = raw_batches(collection, 10)
    state, _ = run_loop(collection, raws[:6])
    features = collection.batch(raws[6]).features
    state = collection.grow(state, features)
    before = jax.tree.map(programs.read, state)

    @jax.jit
    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, embeddings)[0], embeddings

    first, embeddings = step(state, features)
    programs.assert_same_state(before, state)
    again, others = step(state, features)
    programs.assert_same_state(before, state)
    programs.assert_same_state(first, again)
    jax.tree.map(assert_same_bits, embeddings, others)
    after = jax.tree.map(programs.read, first)
    keys = np.asarray(raws[6]["user"])
    assert (collection.rows_of(first, "user", keys)[0] != collection.rows_of(state, "user", keys)[0]).any()
    # The old state continues, donated from now on; the new one does not change.
    run_loop(collection, raws[7:], state=state)
    programs.assert_same_state(after, first)


# A long life ---------------------------------------------------------------------------------------------------------


def living(memory, num_shards=None):
    """Returns a table that grows to 192 rows and then evicts the least recently used."""
    lru = policies.LeastRecentlyUsed()
    table = jaxsok.TableSpec("user", 4, ADAM, capacity=48, max_capacity=192, eviction=lru, memory=memory)
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("user_bag", "user", combiner="mean", weighted=True, max_keys=64),
    ]
    return programs.over(num_shards, [table], features) if num_shards else jaxsok.Collection([table], features)


@pytest.mark.filterwarnings("ignore:grow")
def test_a_long_life_that_ends_without_host_memory(by_doubling, tmp_path):
    """A cache of a third of the rows takes 240 steps with growth and eviction; four devices then hold its rows."""
    plain, tiered = living(None), living(jaxsok.HostMemory(device_rows=64))
    raws = raw_batches(plain, 240, num_keys=150)
    (want, results), (got, others) = (run_loop(each, raws) for each in (plain, tiered))
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    assert got.stores[0].capacity == 192 and tiered.growth.num_grown > 1 and tiered.growth.num_evictions > 10
    moved = dict(zip(TIER_COUNTERS, np.asarray(got.stores[0].tier[0].counters).tolist(), strict=True))
    assert moved["num_written"] > 1000 and moved["num_fetched"] > 1000
    checkpoint.export_full(tmp_path / "full", tiered, got)
    spread = living(None, 4)
    restored = checkpoint.load(tmp_path / "full", spread)
    assert not restored.stores[0].tier and len(restored.stores[0].counters.devices()) == 4
    num_found = 0
    for raw in raws[-24::2]:
        found, stats = programs.find(plain)(want, plain.batch(raw).features)
        also, other_stats = programs.find(spread)(restored, spread.batch(raw).features)
        jax.tree.map(assert_same_bits, found, also)
        np.testing.assert_array_equal(stats.num_missing, other_stats.num_missing)
        num_found += int(np.any(np.asarray(found["user"]) != 0, axis=1).sum())
    assert num_found > 50

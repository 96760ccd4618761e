"""Plans: made ahead, made from only keys, invalid after an erasure."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import plan as plan_lib


def two_stores():
    """Declares two tables in two stores, with ragged and weighted features."""
    return jaxsok.Collection(
        [
            jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=64),
            jaxsok.TableSpec("item", 8, jaxsok.optim.adam(0.1), capacity=64),
        ],
        [
            jaxsok.FeatureSpec("user", "user"),
            jaxsok.FeatureSpec("history", "item", combiner="mean", weighted=True, max_keys=8),
        ],
    )


def features_of(collection, seed):
    """Returns a small batch."""
    rng = np.random.default_rng(seed)
    return collection.batch(
        {
            "user": rng.integers(-1, 6, 4),
            "history": jaxsok.Bags(
                rng.integers(-1, 9, 7),
                lengths=np.array([0, 4, 1, 2]),
                weights=rng.uniform(0.5, 1, 7).astype(np.float32),
            ),
        }
    ).features


@pytest.fixture(scope="module")
def collection():
    """Returns a collection shared by all tests of this file."""
    return two_stores()


def test_lookup_of_a_plan_is_lookup_of_its_features(collection):
    """Embeddings, state and the following update are equal to the bit."""
    features = features_of(collection, 0)
    state = collection.init(seed=0)
    results = []
    for argument in (features, programs.plan(collection)(features), collection.plan(features)):
        embeddings, after, plan = programs.lookup(collection)(state, argument)
        after, stats = programs.update(collection)(after, plan, embeddings)
        results.append((embeddings, after, stats))
    for embeddings, after, stats in results[1:]:
        for name in embeddings:
            np.testing.assert_array_equal(programs.bits(embeddings[name]), programs.bits(results[0][0][name]))
        programs.assert_same_state(after, results[0][1], index=False)
        assert stats.to_dict() == results[0][2].to_dict()


def test_plans_are_made_ahead_of_earlier_steps(collection):
    """A plan reads no table: made before the step of another batch, it uses the rows of that step."""
    first, second = features_of(collection, 1), features_of(collection, 2)
    ahead = programs.plan(collection)(second)
    state, _ = programs.learn(collection, collection.init(seed=0), first)
    late = programs.lookup(collection)(state, programs.plan(collection)(second))
    early = programs.lookup(collection)(state, ahead)
    for name in late[0]:
        np.testing.assert_array_equal(early[0][name], late[0][name])
    programs.assert_same_state(early[1], late[1], index=False)


def test_one_plan_serves_several_states(collection):
    """A plan belongs to the batch, not to a state."""
    features = features_of(collection, 3)
    plan = programs.plan(collection)(features)
    for seed in (0, 1):
        with_plan, _, _ = programs.lookup(collection)(collection.init(seed=seed), plan)
        without, _, _ = programs.lookup(collection)(collection.init(seed=seed), features)
        np.testing.assert_array_equal(with_plan["history"], without["history"])


def test_a_plan_is_a_pytree(collection):
    """A plan crosses a jit boundary, and passes from one program to another."""
    plan = collection.plan(features_of(collection, 4))
    leaves, structure = jax.tree.flatten(plan)
    again = jax.tree.unflatten(structure, [jnp.asarray(np.array(leaf)) for leaf in leaves])
    embeddings, _, _ = collection.lookup(collection.init(seed=0), again)
    want, _, _ = collection.lookup(collection.init(seed=0), plan)
    np.testing.assert_array_equal(embeddings["user"], want["user"])


@pytest.fixture(scope="module")
def one_table():
    """Returns a collection of one table with two features, so that a plan has several parts."""
    return jaxsok.Collection(
        [jaxsok.TableSpec("user", 4, jaxsok.optim.adagrad(1.0), capacity=64)],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("friends", "user", max_keys=8)],
    )


def small_batch(collection, keys):
    """Returns four keys, two of which also occur as friends."""
    bags = jaxsok.Bags(np.array(keys[:2]), lengths=np.array([1, 0, 1, 0]))
    return collection.batch({"user": np.array(keys), "friends": bags}).features


def test_a_stale_plan_changes_nothing_and_is_counted(one_table):
    """After an erasure row ids of older plans may belong to other keys: nothing moves, and check() reports it."""
    state = one_table.init(seed=0)
    embeddings, state, plan = programs.lookup(one_table)(state, small_batch(one_table, [1, 2, 3, 4]))
    state, _ = one_table.erase(state, "user", np.array([2]))
    after, stats = programs.update(one_table)(state, plan, embeddings)
    programs.assert_same_tables(one_table, state, after)
    assert int(stats.num_stale) == 6  # uses: four of "user", two of "friends"
    with pytest.raises(jaxsok.StalePlanError):
        stats.check()


def test_a_stale_plan_does_not_touch_the_row_of_another_key(one_table):
    """A new key reuses the row id before the stale gradient arrives."""
    embeddings, state, plan = programs.lookup(one_table)(one_table.init(seed=0), small_batch(one_table, [1, 2, 3, 4]))
    state, _ = one_table.erase(state, "user", np.array([1, 2, 3, 4]))
    _, state, _ = programs.lookup(one_table)(state, small_batch(one_table, [11, 12, 13, 14]))
    assert {key: row_id for key, (row_id, _, _) in programs.export(one_table, state).items()} == {
        11: 0,
        12: 1,
        13: 2,
        14: 3,
    }
    after, stats = programs.update(one_table)(state, plan, embeddings)
    programs.assert_same_tables(one_table, state, after)
    assert int(stats.num_stale) == 6


def test_stale_and_fresh_plans_in_one_update(one_table):
    """The valid plan is applied, the stale plan is counted."""
    embeddings, state, stale = programs.lookup(one_table)(one_table.init(seed=0), small_batch(one_table, [1, 2, 3, 4]))
    state, _ = one_table.erase(state, "user", np.array([9, 1]))
    features = small_batch(one_table, [2, 3, 5, 6])
    _, state, fresh = programs.lookup(one_table)(state, features)
    both, stats = programs.update(one_table)(state, [stale, fresh], [embeddings, embeddings])
    alone, _ = programs.update(one_table)(state, fresh, embeddings)
    programs.assert_same_tables(one_table, both, alone)
    assert int(stats.num_stale) == 6
    both, stats = programs.update(one_table)(state, [fresh, stale], [embeddings, embeddings])
    programs.assert_same_tables(one_table, both, alone)
    assert int(stats.num_stale) == 6


def test_a_plan_over_two_stores_is_stale_as_a_whole(collection):
    """A step is all or nothing: after an erasure in one store, older plans do not change the other store."""
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=0), features_of(collection, 5))
    state, _ = collection.erase(state, "item", np.arange(9))
    after, stats = programs.update(collection)(state, plan, embeddings)
    programs.assert_same_tables(collection, state, after)
    assert int(stats.num_stale) > 0


def test_rows_that_leave_a_store_without_keys_leave_plans_alone():
    """A plan is stale only if rows left a store that its batch has read."""
    tables = [jaxsok.TableSpec(name, dim, jaxsok.optim.sgd(1.0), capacity=8) for name, dim in (("user", 4), ("ad", 2))]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("user", "user")])
    state = collection.init(seed=0)
    state, *_ = collection.assign(state, "ad", np.array([7]), np.ones((1, 2), np.float32))
    embeddings, state, plan = programs.lookup(collection)(state, programs.batch(collection, user=np.arange(4)))
    state, num_erased = collection.erase(state, "ad", np.array([7]))
    assert int(num_erased) == 1
    programs.update(collection)(state, plan, embeddings)[1].check()


def test_growing_does_not_make_plans_stale():
    """Row ids are stable under growth, so an update may follow it."""
    collection = programs.one_table(capacity=4)
    state = collection.init(seed=0)
    _, state, plan = collection.lookup(state, programs.batch(collection, user=np.arange(4)))
    before = programs.rows_of(collection, state)
    state = collection.grow(state, steps=50)
    state, stats = collection.update(state, plan, {"user": jnp.ones((4, 4))})
    stats.check()
    after = programs.rows_of(collection, state)
    for key in range(4):
        np.testing.assert_array_equal(after[key], before[key] - 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 1 << 24], ids=["one bucket", "one share and slot"])
@pytest.mark.parametrize("salt", [0, 0x9E3779B97F4A7C15], ids=hex)
def test_crafted_keys_take_no_longer(salt, step):
    """A million keys that would meet in one place under a guessed salt take at most double the time."""
    collection = jaxsok.Collection(
        [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=1 << 21)], [jaxsok.FeatureSpec("user", "user")]
    )
    num_keys = 10**6
    hashes = np.arange(num_keys, dtype=np.uint64) * np.uint64(step)
    with np.errstate(over="ignore"):
        crafted = programs.unmixed64(programs.unmixed64(hashes) - np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(salt)
    owners = jnp.asarray(plan_lib.default_owners(1))
    make_requests = jax.jit(lambda features: plan_lib.requests_of(collection.stores[0], features.stores[0], owners))
    times = {}
    for name, keys in (("others", np.arange(num_keys, dtype=np.uint64) << np.uint64(20)), ("crafted", crafted)):
        features = programs.batch(collection, user=keys)
        times[name] = min(programs.seconds(lambda features=features: make_requests(features)) for _ in range(7))
        states = [collection.init(seed=0) for _ in range(4)]
        times[f"{name} inserted"] = min(
            programs.seconds(lambda state=state, features=features: programs.lookup(collection)(state, features))
            for state in states
        )
    assert times["crafted"] < 2 * times["others"], times
    assert times["crafted inserted"] < 2 * times["others inserted"], times

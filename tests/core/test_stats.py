"""Statistics: data-dependent events, counted on the device, raised on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok

DIM = 4


def two_tables(**spec):
    """Declares two tables in one store."""
    sgd = jaxsok.optim.sgd(1.0)
    return jaxsok.Collection(
        [jaxsok.TableSpec("user", DIM, sgd, **spec), jaxsok.TableSpec("item", DIM, sgd, **spec)],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item", combiner="mean", max_keys=8)],
    )


def step(collection, state, user, item):
    """Makes one lookup and update; returns state and stats."""
    bags = jaxsok.Bags(np.array(item), lengths=np.array([len(item), 0]))
    return programs.learn(collection, state, programs.batch(collection, user=np.array(user), item=bags))


def test_each_count_says_what_it_counts():
    """`help` and editors show the meaning of a count, not that of all counts."""
    assert jaxsok.Stats.num_inserted.__doc__ == "By table: the key was new and got a row."


def test_occurrences_are_counted_one_after_the_other():
    """The first occurrence of a new key is inserted, its repeats are found; unused positions are padding."""
    collection = two_tables(capacity=16)
    state, stats = step(collection, collection.init(seed=0), [5, 5], [5, 6, 6, -1, 6])
    assert programs.counts(stats, "user") == {
        "num_found": 1,
        "num_inserted": 1,
        "num_missing": 0,
        "num_refused": 0,
        "num_padding": 0,
    }
    assert programs.counts(stats, "item") == {
        "num_found": 2,
        "num_inserted": 2,
        "num_missing": 0,
        "num_refused": 0,
        "num_padding": 4,
    }
    assert stats.to_dict()["user"]["num_rows"] == 1 and stats.to_dict()["item"]["num_rows"] == 2
    _, stats = step(collection, state, [7, 5], [6])
    assert programs.counts(stats, "user")["num_found"] == 1
    assert stats.to_dict()["user"]["num_rows"] == 2


def test_shapes_and_types():
    """Counts are arrays of int32 by table and by store; names are static data."""
    collection = two_tables(capacity=16)
    _, stats = step(collection, collection.init(seed=0), [5, 5], [5])
    assert tuple(stats.tables) == ("user", "item")
    by_table = "num_found num_inserted num_missing num_refused num_padding num_rows num_nonfinite".split()
    for name in by_table:
        assert getattr(stats, name).shape == (2,) and getattr(stats, name).dtype == np.int32, name
    for name in ("longest_probe", "num_unplaced"):
        assert getattr(stats, name).shape == (1,) and getattr(stats, name).dtype == np.int32, name
    assert stats.num_stale.shape == () and stats.num_stale.dtype == np.int32
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(stats))
    assert set(stats.to_dict()) >= {"user", "item"}
    assert set(stats.to_dict()["user"]) >= set(by_table)
    assert all(isinstance(stats.to_dict()["user"][name], int) for name in by_table)


def test_tables_of_interleaved_stores():
    """The order is that of the declaration, however the tables are divided into stores."""
    sgd = jaxsok.optim.sgd(1.0)
    tables = [jaxsok.TableSpec(name, dim, sgd, capacity=16) for name, dim in zip("abcd", (4, 8, 4, 8), strict=True)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(f"f{table.name}", table.name) for table in tables[::-1]])
    batch = {f"f{name}": np.arange(4) % (i + 1) for i, name in enumerate("abcd")}
    features = collection.batch(batch).features
    _, state, plan = programs.lookup(collection)(collection.init(seed=0), features)
    gradients = {f"f{table.name}": jnp.full((4, table.dim), np.nan if table.name == "c" else 1.0) for table in tables}
    state, stats = programs.update(collection)(state, plan, gradients)
    assert tuple(stats.tables) == tuple("abcd")
    for i, name in enumerate("abcd"):
        assert programs.counts(stats, name)["num_inserted"] == i + 1
        assert stats.to_dict()[name]["num_rows"] == i + 1
        assert stats.to_dict()[name]["num_nonfinite"] == (3 if name == "c" else 0)
    assert stats.longest_probe.shape == (2,)
    assert collection.num_rows(state) == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_check_is_silent_when_nothing_is_wrong():
    """check() returns None and raises nothing."""
    collection = two_tables(capacity=16)
    _, stats = step(collection, collection.init(seed=0), [5, -1], [5])
    stats.check()


def test_refused_keys_raise_with_table_capacity_and_number():
    """The message has what a user needs to act."""
    collection = programs.one_table(capacity=8, max_capacity=8)
    _, stats = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.arange(21)))
    assert programs.counts(stats)["num_refused"] == 13
    with pytest.raises(jaxsok.TableFullError) as error:
        stats.check()
    for part in ("user", "8", "13"):
        assert part in str(error.value)
    assert "item" not in str(error.value)


def test_refused_names_only_tables_that_refused():
    """In a full store of two tables, the table whose keys were refused is named."""
    collection = two_tables(capacity=2, max_capacity=2)
    _, stats = step(collection, collection.init(seed=0), [1, 2], [1, 2, 3])
    assert programs.counts(stats, "user")["num_refused"] == 0
    assert programs.counts(stats, "item")["num_refused"] == 1
    with pytest.raises(jaxsok.TableFullError, match='table "item"') as error:
        stats.check()
    assert 'table "user"' not in str(error.value)


def test_statistics_add():
    """Counts of two steps are added; rows in use and the longest probe are those of the later, larger state."""
    collection = two_tables(capacity=16)
    state, first = step(collection, collection.init(seed=0), [1, 2], [1, 1])
    _, second = step(collection, state, [1, 3], [4, -1])
    both = sum([first, second])
    assert tuple(both.tables) == ("user", "item")
    for table in ("user", "item"):
        for name, value in programs.counts(both, table).items():
            assert value == programs.counts(first, table)[name] + programs.counts(second, table)[name]
    assert both.to_dict()["user"]["num_rows"] == 3
    assert both.to_dict()["item"]["num_rows"] == 2


def test_added_statistics_still_raise():
    """A refusal in one of many steps is kept in the sum."""
    collection = programs.one_table(capacity=2, max_capacity=2)
    state, fine = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.array([1, 2])))
    _, full = programs.learn(collection, state, programs.batch(collection, user=np.array([1, 3])))
    (fine + fine).check()
    for stats in (fine + full, full + fine):
        with pytest.raises(jaxsok.TableFullError):
            stats.check()


def test_statistics_pass_jit_and_scan():
    """Stats are a pytree like any other."""
    collection = two_tables(capacity=16)
    _, stats = step(collection, collection.init(seed=0), [5, 5], [5])
    doubled = jax.jit(lambda stats: stats + stats)(stats)
    np.testing.assert_array_equal(doubled.num_found, 2 * np.asarray(stats.num_found))
    assert jax.tree.map(jnp.asarray, stats).tables == stats.tables


def test_num_nonfinite_is_by_table():
    """Rows count for their own table, not for another table of the store."""
    collection = two_tables(capacity=16)
    bags = jaxsok.Bags(np.array([5, 6, 7]), lengths=np.array([2, 1]))
    features = programs.batch(collection, user=np.array([1, 2]), item=bags)
    _, state, plan = programs.lookup(collection)(collection.init(seed=0), features)
    gradients = {"user": jnp.ones((2, DIM)), "item": jnp.array([[np.nan] * DIM, [1.0] * DIM])}
    _, stats = programs.update(collection)(state, plan, gradients)
    assert stats.to_dict()["user"]["num_nonfinite"] == 0
    assert stats.to_dict()["item"]["num_nonfinite"] == 2
    with pytest.raises(jaxsok.NonFiniteGradientError, match="item"):
        stats.check()


def test_longest_probe_is_at_least_one():
    """The longest probe counts the buckets of the longest walk, which is short at a moderate load."""
    collection = programs.one_table(capacity=4096)
    features = programs.batch(collection, user=np.arange(2048) * 1000)
    _, stats = programs.learn(collection, collection.init(seed=0), features)
    # 2,048 keys in an index for 4,096 rows, four entries per bucket: a walk of more than 16 buckets is not by chance.
    assert 1 <= programs.total(stats, "longest_probe") <= 16
    assert programs.total(stats, "num_unplaced") == 0


def test_capacities_on_a_mesh_are_those_of_all_shards():
    """The same holds for num_rows; a replicated store counts the capacity of one shard."""
    tables = [
        jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64),
        jaxsok.TableSpec("tag", 8, jaxsok.optim.sgd(0.1), capacity=64, placement=jaxsok.REPLICATED),
    ]
    collection = programs.over(2, tables, [jaxsok.FeatureSpec(name, name) for name in ("user", "tag")])
    state = collection.init(seed=0)
    _, stats = collection.find(state, programs.batch(collection, user=np.arange(4), tag=np.arange(4)))
    assert stats.capacities == (state.stores[0].capacity, state.stores[1].capacity // 2)
    assert stats.capacities[1] == 64


def scan_steps(collection, user, items):
    """Returns the stacked Stats of a `lax.scan` over the steps, and the Stats of each step alone."""
    bags = [jaxsok.Bags(np.array(item), lengths=np.array([len(item), 0])) for item in items]
    steps = [programs.batch(collection, user=np.array(keys), item=bag) for keys, bag in zip(user, bags, strict=True)]

    def body(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, jax.tree.map(jnp.ones_like, embeddings))

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)
    last, stats = jax.jit(lambda state: jax.lax.scan(body, state, stacked))(collection.init(seed=0))
    state, one_by_one = collection.init(seed=0), []
    for features in steps:
        state, of_step = programs.learn(collection, state, features)
        one_by_one.append(of_step)
    assert collection.num_rows(last) == collection.num_rows(state)
    return stats, one_by_one


USERS, ITEMS = [[1, 2], [1, 3], [4, -1]], [[5, 5], [5, 6, 7], [6]]


def test_the_stats_of_a_scan_are_taken_together():
    """Counts of its steps are added; other values are those of the last step."""
    stats, one_by_one = scan_steps(two_tables(capacity=16, eviction=jaxsok.policies.LeastRecentlyUsed()), USERS, ITEMS)
    assert stats.words.ndim == 2
    of_steps = [stats.to_dict() for stats in one_by_one]
    latest = {"num_rows", "num_evicted"}
    for table in ("user", "item"):
        wanted = {
            name: of_steps[-1][table][name] if name in latest else sum(counts[table][name] for counts in of_steps)
            for name in of_steps[0][table]
        }
        assert stats.to_dict()[table] == wanted
    assert stats.to_dict()["user"]["num_inserted"] == 4 and stats.to_dict()["user"]["num_rows"] == 4
    stats.check()


def test_scalars_of_a_scan():
    """Rates are over all steps; fill and load are those of the last."""
    stats, one_by_one = scan_steps(two_tables(capacity=16), USERS, ITEMS)
    scalars, last = stats.scalars("all"), one_by_one[-1].scalars("all")
    assert scalars["all/user/hit_rate"] == 1 / 5  # key 1 again, among five
    assert scalars["all/user/num_found"] == 1.0
    for name in ("fill", "load", "longest_probe", "num_unplaced", "num_rounds"):
        assert scalars[f"all/user/{name}"] == last[f"all/user/{name}"], name


def test_check_of_a_scan():
    """A refusal in one step of a scan raises with the number over all steps."""
    collection = two_tables(capacity=2, max_capacity=2)  # four rows in the store of both
    stats, _ = scan_steps(collection, [[1, 2], [3, 4], [1, 2]], [[-1], [-1], [5, 6, 1]])
    with pytest.raises(jaxsok.TableFullError, match='table "item": 3 keys refused'):
        stats.check()


def test_sums_over_a_scan_do_not_overflow():
    """The counts of a long scan may exceed an int32."""
    _, stats = step(two_tables(capacity=16), two_tables(capacity=16).init(seed=0), [5, 5], [5])
    many = jax.tree.map(lambda words: jnp.full((3, *words.shape), 2**30, words.dtype), stats)
    assert many.to_dict()["user"]["num_found"] == 3 * 2**30
    none = jax.tree.map(lambda words: words[None][:0], stats)
    assert set(none.to_dict()["user"].values()) == {0}

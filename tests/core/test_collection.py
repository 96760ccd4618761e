"""Collections: declarations, their state, find, erase, export and memory."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok.operations import specs_of

DIM = 4


def test_specs_and_optimizers_are_frozen_and_hashable():
    """They can be static arguments and dictionary keys; equal declarations are equal."""

    def declare():
        adam = jaxsok.optim.adam(0.1)
        table = jaxsok.TableSpec("user", DIM, adam, initializer=jaxsok.initializers.normal(0.5))
        return [
            table,
            jaxsok.FeatureSpec("user", "user", combiner="mean"),
            *(make(0.1) for make in (jaxsok.optim.sgd, jaxsok.optim.adagrad, jaxsok.optim.rowwise_adagrad)),
            adam,
            jaxsok.initializers.uniform(),
        ]

    for first, second in zip(declare(), declare(), strict=True):
        assert first == second and hash(first) == hash(second)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(first, dataclasses.fields(first)[0].name, None)


def test_tables_share_a_store_by_dim_optimizer_and_row_gradient():
    """Tables with equal values share a store; each difference makes another store."""
    sgd, adam = jaxsok.optim.sgd(1.0), jaxsok.optim.adam(1.0)
    tables = [
        jaxsok.TableSpec("a", 4, sgd, capacity=8),
        jaxsok.TableSpec("b", 8, sgd, capacity=8),
        jaxsok.TableSpec("c", 4, adam, capacity=8),
        jaxsok.TableSpec("d", 4, sgd, capacity=8, row_gradient="mean"),
        jaxsok.TableSpec("e", 4, jaxsok.optim.sgd(1.0), capacity=8),
        jaxsok.TableSpec("f", 4, jaxsok.optim.sgd(2.0), capacity=8),
    ]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])
    assert len(collection.stores) == 5
    features = collection.batch({name: np.array([7]) for name in "abcdef"}).features
    _, state, _ = collection.lookup(collection.init(seed=0), features)
    ids = {name: collection.export_table(state, name)["row_ids"].tolist() for name in "abcdef"}
    assert ids == {"a": [0], "b": [0], "c": [0], "d": [0], "e": [1], "f": [0]}


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_copies_of_a_collection_are_declared_in_the_same_way(make_copy):
    """They have compiled nothing yet; a state of one fits the other, with the same results."""
    collection = programs.one_table()
    state = programs.insert(collection, collection.init(seed=0), [1, 2, 3])
    other = make_copy(collection)
    assert other is not collection and repr(other) == repr(collection)
    for keys in ([2, 4], [3, 2]):
        expected = collection.find(state, collection.batch({"user": np.array(keys)}).features)[0]["user"]
        found = other.find(state, other.batch({"user": np.array(keys)}).features)[0]["user"]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_collection_holds_no_arrays():
    """A collection is a declaration; everything that changes is in the state."""
    collection = programs.one_table()
    first, second = collection.init(seed=0), collection.init(seed=0)
    first = programs.insert(collection, first, [1, 2, 3])
    assert collection.num_rows(first) == {"user": 3}
    assert collection.num_rows(second) == {"user": 0}
    assert not [value for value in vars(collection).values() if isinstance(value, jax.Array)]


def test_state_is_a_pytree_of_arrays():
    """The state passes jit, tree_map and a round trip through NumPy; the step starts at zero, as uint32."""
    collection = programs.one_table()
    state = programs.insert(collection, collection.init(seed=0), [1, 2, 3])
    assert state.step.dtype == np.uint32 and state.step.shape == () and int(state.step) == 0
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert not any(leaf.dtype.itemsize == 8 for leaf in leaves)
    copy = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), jax.jit(lambda state: state)(state))
    programs.assert_same_tables(collection, state, copy)
    programs.assert_same_state(programs.insert(collection, copy, [3, 4]), programs.insert(collection, state, [3, 4]))


def test_step_counts_updates():
    """Each update counts one step, however many plans it has; lookups do not count."""
    collection = programs.one_table()
    state = collection.init(seed=0)
    features = programs.batch(collection, user=np.array([1]))
    embeddings, state, plan = collection.lookup(state, features)
    assert int(state.step) == 0
    state, _ = collection.update(state, [plan, plan], [embeddings, embeddings])
    assert int(state.step) == 1
    state, _ = programs.learn(collection, state, features)
    assert int(state.step) == 2


def test_init_depends_on_the_seed_alone():
    """Equal seeds give equal bits except for the salts; another seed gives other rows."""
    collection = programs.one_table()
    first, second, other = (collection.init(seed=seed) for seed in (3, 3, 4))
    programs.assert_same_state(first, second, index=False)
    rows = [programs.rows_of(collection, programs.insert(collection, state, [5]))[5] for state in (first, other)]
    assert not np.array_equal(*rows)


def salts_of(state):
    """Returns the 64-bit salt of each store."""
    return [int(words[6]) | int(words[7]) << 32 for words in (np.asarray(store.counters) for store in state.stores)]


def test_salts_are_drawn():
    """All states and stores have different salts, so that colliding keys cannot be predicted."""
    tables = [jaxsok.TableSpec(f"of_{dim}", dim, jaxsok.optim.sgd(0.1), capacity=8) for dim in (2, 3)]
    collection = jaxsok.Collection(tables, [])
    salts = [salt for _ in range(3) for salt in salts_of(collection.init(seed=0))]
    assert len(set(salts)) == 6 and min(salts) >= 2**32  # a salt is smaller by chance once in 10^9


def test_salts_can_be_asked_for():
    """With given salts two runs have equal bits, including the index; the seed does not affect salts."""
    collection = programs.one_table()
    states = [programs.insert(collection, collection.init(seed=3, salt=7), np.arange(40)) for _ in range(2)]
    programs.assert_same_state(*states)
    assert salts_of(states[0]) == salts_of(collection.init(seed=4, salt=7)) != salts_of(collection.init(seed=3, salt=8))


@pytest.mark.parametrize("salt", [-1, 2**64, 1.0, True, "7"])
def test_a_salt_is_64_bits(salt):
    """A bad salt is refused like a bad seed."""
    with pytest.raises(ValueError, match=r"init: salt: got .*, wanted an integer from 0 to 2\*\*64 - 1"):
        programs.one_table().init(seed=0, salt=salt)


def test_rows_and_row_ids_do_not_depend_on_the_salt():
    """Rows inserted, trained, erased and inserted again under two salts differ only in their positions in the index."""
    collection = programs.one_table(capacity=256)
    states = []
    for salt in (1, 2):
        state = collection.init(seed=0, salt=salt)
        for start in (0, 60, 30):
            state, _ = programs.learn(
                collection, state, programs.batch(collection, user=np.arange(start, start + 64) << 20)
            )
            state, _ = collection.erase(state, "user", np.arange(start, start + 20) << 20)
        states.append(state)
    first, second = (np.asarray(state.stores[0].index) for state in states)
    assert not np.array_equal(first, second)
    programs.assert_same_state(*states, index=False)


def test_rows_differ_and_stay():
    """A second lookup finds the rows of the first, to the bit, in any order."""
    collection = programs.one_table()
    features = programs.batch(collection, user=np.array([3, 1, 2, 1]))
    embeddings, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
    again, state_again, _ = programs.lookup(collection)(state, features)
    np.testing.assert_array_equal(embeddings["user"], again["user"])
    programs.assert_same_tables(collection, state, state_again)
    swapped = programs.batch(collection, user=np.array([1, 1, 2, 3]))
    third, _, _ = programs.lookup(collection)(state, swapped)
    np.testing.assert_array_equal(third["user"], np.asarray(embeddings["user"])[[1, 1, 2, 0]])
    assert len(np.unique(np.asarray(embeddings["user"]))) == 3 * DIM


def test_row_ids_in_order_of_first_occurrence():
    """Known keys keep their row ids, and new keys get the next ids."""
    collection = programs.one_table()
    state = programs.insert(collection, collection.init(seed=0), [30, 10, 30, 20])
    state = programs.insert(collection, state, [5, 10, 5, 40])
    assert {key: row_id for key, (row_id, _, _) in programs.export(collection, state).items()} == {
        30: 0,
        10: 1,
        20: 2,
        5: 3,
        40: 4,
    }


def test_row_ids_of_a_large_batch():
    """Thousands of keys, most of them new and repeated, get row ids in the order of a sequential loop."""
    collection = programs.one_table(capacity=1 << 14)
    rng = np.random.default_rng(0)
    state, seen = collection.init(seed=0), {}
    for _ in range(3):
        keys = rng.integers(0, 6000, 8192).astype(np.uint64) << np.uint64(31)
        state = programs.insert(collection, state, keys)
        for key in keys.tolist():
            seen.setdefault(key, len(seen))
        table = collection.export_table(state, "user")
        assert dict(zip(table["keys"].tolist(), table["row_ids"].tolist(), strict=True)) == seen


@pytest.mark.parametrize("max_capacity", [None, 20_000])
def test_row_ids_of_a_very_large_batch(max_capacity):
    """A quarter of a million keys, some hot, are inserted on many threads, with more new keys than rows."""
    collection = programs.one_table(capacity=1 << 17 if max_capacity is None else max_capacity, dim=2)
    rng = np.random.default_rng(1)
    keys = np.where(rng.random(1 << 18) < 0.3, rng.integers(0, 4, 1 << 18), rng.integers(0, 2**62, 1 << 18) >> 46)
    keys = keys.astype(np.uint64) * np.uint64(2**32 + 1)
    features = programs.batch(collection, user=keys)
    _, state, plan = programs.lookup(collection)(collection.init(seed=0), features)
    distinct, first = np.unique(keys, return_index=True)
    order = distinct[np.argsort(first)][:max_capacity]
    table = collection.export_table(state, "user")
    np.testing.assert_array_equal(table["keys"], order)
    np.testing.assert_array_equal(table["row_ids"], np.arange(len(order)))
    _, stats = programs.update(collection)(state, plan, {"user": jnp.zeros((1 << 18, 2))})
    is_in = np.isin(keys, order)
    assert programs.counts(stats) == {
        "num_found": int(is_in.sum()) - len(order),
        "num_inserted": len(order),
        "num_missing": 0,
        "num_refused": int((~is_in).sum()),
        "num_padding": 0,
    }


@pytest.mark.parametrize("value", ["single", "padded", "ragged"])
def test_a_batch_of_no_samples(value):
    """The last batch of a reader may be empty: nothing changes except the step."""
    collection = programs.one_table(max_keys=4)
    raw = {
        "single": np.zeros(0, np.int64),
        "padded": np.zeros((0, 3), np.int64),
        "ragged": jaxsok.Bags(np.zeros(0, np.int64), lengths=np.zeros(0, np.int32)),
    }[value]
    state = programs.insert(collection, collection.init(seed=0), [1, 2])
    embeddings, state, plan = collection.lookup(state, programs.batch(collection, user=raw))
    assert embeddings["user"].shape == (0, DIM)
    state, stats = collection.update(state, plan, {"user": jnp.zeros((0, DIM))})
    stats.check()
    assert collection.num_rows(state) == {"user": 2} and int(state.step) == 1
    assert sum(programs.counts(stats).values()) == (4 if value == "ragged" else 0)


def test_a_table_without_features():
    """A table without features stays empty, and is exported, erased from and counted like any other."""
    optimizer = jaxsok.optim.adam(0.1)
    tables = [jaxsok.TableSpec("user", DIM, optimizer), jaxsok.TableSpec("later", 2 * DIM, optimizer)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("user", "user")])
    state, stats = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.array([1])))
    stats.check()
    assert collection.num_rows(state) == {"user": 1, "later": 0}
    assert stats.to_dict()["later"]["num_rows"] == 0
    state, num_erased = collection.erase(collection.grow(state), "later", np.array([1]))
    assert int(num_erased) == 0
    assert len(collection.export_table(state, "later")["keys"]) == 0


def test_on_another_device():
    """State and features are placed on the default device, and every op stays there."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"needs two devices, has {len(devices)}")
    results = []
    for device in (devices[0], devices[-1]):
        with jax.default_device(device):
            collection = programs.one_table(capacity=4, optimizer=jaxsok.optim.adam(0.1))
            state = collection.init(seed=0)
            features = programs.batch(collection, user=np.array([1, 2, 3, 4, 5]))
            state, _ = programs.learn(collection, collection.grow(state), features)
            state, _ = collection.erase(state, "user", np.array([2]))
            assert {d for leaf in jax.tree.leaves(state) for d in leaf.devices()} == {device}
            results.append(collection.export_table(state, "user"))
    np.testing.assert_array_equal(results[0]["rows"], results[1]["rows"])
    assert results[0]["keys"].tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize("unknown", ["initial", "zeros"])
def test_find_inserts_nothing(unknown):
    """Evaluation reads existing rows, and for other keys the table's default; the state is only read."""
    collection = programs.one_table(unknown=unknown, combiner="mean", max_keys=4)
    state = collection.init(seed=0)
    known = jaxsok.Bags(np.array([1, 2]), lengths=np.array([1, 1]))
    state, _ = programs.learn(collection, state, programs.batch(collection, user=known), gradient=2.0)
    mixed = jaxsok.Bags(np.array([1, 9, -1]), lengths=np.array([3, 0]))
    embeddings, stats = programs.find(collection)(state, programs.batch(collection, user=mixed))
    row, initial = programs.rows_of(collection, state)[1], programs.initial_rows("user", DIM, [9])[0]
    want = (row + (initial if unknown == "initial" else 0)) / 2  # a missing key still counts in the hotness
    np.testing.assert_allclose(np.asarray(embeddings["user"]), [want, np.zeros(DIM)], rtol=0, atol=1e-6)  # size <= 3
    assert programs.counts(stats) == {
        "num_found": 1,
        "num_inserted": 0,
        "num_missing": 1,
        "num_refused": 0,
        "num_padding": 2,
    }
    assert collection.num_rows(state) == {"user": 2}


def test_find_gives_what_lookup_would():
    """The initial row of an unknown key is the row that training creates."""
    collection = programs.one_table()
    features = programs.batch(collection, user=programs.as_array([3, 2**63, 2**40]))
    state = collection.init(seed=11)
    found, _ = collection.find(state, features)
    looked_up, _, _ = collection.lookup(state, features)
    np.testing.assert_array_equal(found["user"], looked_up["user"])


def test_erase_counts_rows_that_were_there():
    """Missing keys and padding do not count, and repeated keys count once."""
    collection = programs.one_table()
    state = programs.insert(collection, collection.init(seed=0), [1, 2, 3, 2**63])
    state, num_erased = collection.erase(state, "user", programs.as_array([2, 2, 2**63, 77, jaxsok.PADDING_KEY]))
    assert num_erased.dtype == np.uint32 and num_erased.shape == ()
    assert int(num_erased) == 2
    assert list(programs.rows_of(collection, state)) == [1, 3]
    state, num_erased = collection.erase(state, "user", programs.as_array([2, 2**63]))
    assert int(num_erased) == 0
    assert collection.num_rows(state) == {"user": 2}


def test_erase_takes_words_and_nothing():
    """Erase accepts uint32[n, 2] on the device, and an empty array."""
    collection = programs.one_table()
    state = programs.insert(collection, collection.init(seed=0), [1, 2**40])
    state, num_erased = collection.erase(state, "user", jnp.asarray(programs.words([2**40])))
    assert int(num_erased) == 1
    state, num_erased = collection.erase(state, "user", np.zeros(0, np.int64))
    assert int(num_erased) == 0
    assert list(programs.rows_of(collection, state)) == [1]


def test_erased_keys_start_anew():
    """An erased key that returns has its initial row and new optimizer state, and counts as inserted."""
    collection = programs.one_table(optimizer=jaxsok.optim.adagrad(0.5))
    features = programs.batch(collection, user=np.array([1, 2]))
    state, _ = programs.learn(collection, collection.init(seed=0), features)
    state, _ = collection.erase(state, "user", np.array([1]))
    _, state, plan = programs.lookup(collection)(state, features)
    row_id, row, (accumulator,) = programs.export(collection, state)[1]
    assert row_id == 0
    np.testing.assert_array_equal(row, programs.initial_rows("user", DIM, [1])[0])
    np.testing.assert_array_equal(accumulator, np.full(DIM, 0.1, np.float32))
    _, stats = programs.update(collection)(state, plan, {"user": jnp.zeros((2, DIM))})
    assert programs.counts(stats)["num_inserted"] == 1 and programs.counts(stats)["num_found"] == 1


def test_freed_row_ids_are_reused_in_ascending_order():
    """Freed ids are reused in order over several erasures and part-way through the list; new ids come after."""
    collection = programs.one_table()
    state = programs.insert(collection, collection.init(seed=0), range(100, 110))
    state, _ = collection.erase(state, "user", np.array([107, 105]))
    state = programs.insert(collection, state, [1])
    state, _ = collection.erase(state, "user", np.array([102, 109, 100]))
    state = programs.insert(collection, state, [2, 103, 3, 4])
    state = programs.insert(collection, state, [5, 6])
    ids = {key: row_id for key, (row_id, _, _) in programs.export(collection, state).items()}
    assert {key: ids[key] for key in (1, 2, 3, 4, 5, 6)} == {1: 5, 2: 0, 3: 2, 4: 7, 5: 9, 6: 10}


def test_freed_rows_serve_every_table_of_the_store():
    """A row freed by one table may go to another table, with that table's initial row."""
    sgd = jaxsok.optim.sgd(1.0)
    collection = jaxsok.Collection(
        [jaxsok.TableSpec("user", DIM, sgd, capacity=8), jaxsok.TableSpec("item", DIM, sgd, capacity=8)],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item")],
    )
    batch = {"user": np.array([1, 2]), "item": np.array([-1, -1])}
    _, state, _ = collection.lookup(collection.init(seed=0), collection.batch(batch).features)
    state, _ = collection.erase(state, "user", np.array([1]))
    batch = {"user": np.array([2, 2]), "item": np.array([1, -1])}
    _, state, _ = collection.lookup(state, collection.batch(batch).features)
    row_id, row, _ = programs.export(collection, state, "item")[1]
    assert row_id == 0
    np.testing.assert_array_equal(row, programs.initial_rows("item", DIM, [1])[0])


def test_export_table_types():
    """The export gives host arrays with one record per row, ordered by row id; an empty table exports nothing."""
    collection = programs.one_table(optimizer=jaxsok.optim.adam(0.1))
    empty = collection.export_table(collection.init(seed=0), "user")
    assert empty["keys"].shape == (0,) and empty["rows"].shape == (0, DIM)
    state = programs.insert(collection, collection.init(seed=0), [2**63, 3])
    table = collection.export_table(state, "user")
    assert {name: (type(table[name]), table[name].dtype) for name in ("keys", "rows", "row_ids")} == {
        "keys": (np.ndarray, np.uint64),
        "rows": (np.ndarray, np.float32),
        "row_ids": (np.ndarray, np.uint32),
    }
    assert table["rows"].shape == (2, DIM)
    assert table["keys"].tolist() == [2**63, 3]
    names = [spec.name for spec in jaxsok.optim.adam(0.1).state_specs(DIM)]
    assert list(table["state"]) == names and len(names) == 2
    assert all(len(array) == 2 for array in table["state"].values())


def test_export_table_keeps_the_order_of_states():
    optimizer = jaxsok.optim.rmsprop(0.1, centered=True, momentum=0.9)
    names = [spec.name for spec in optimizer.state_specs(DIM)]
    assert names != sorted(names)
    collection = jaxsok.Collection([jaxsok.TableSpec("t", DIM, optimizer, capacity=8)], [])
    assert list(collection.export_table(collection.init(), "t")["state"]) == names


def test_many_tables_and_features():
    """With 26 tables of three dims and two features each, every feature reads its own table."""
    optimizer = jaxsok.optim.rowwise_adagrad(0.1)
    tables = [jaxsok.TableSpec(f"t{i}", (4, 8, 12)[i % 3], optimizer, capacity=16) for i in range(26)]
    features = [jaxsok.FeatureSpec(f"{kind}{i}", f"t{i}") for kind in "xy" for i in range(26)]
    collection = jaxsok.Collection(tables, features)
    assert len(collection.stores) == 3
    batch = {feature.name: np.array([5, 6]) for feature in features}
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=0), collection.batch(batch).features)
    state, stats = programs.update(collection)(state, plan, embeddings)
    seen = set()
    for i, table in enumerate(tables):
        if i % 9 == 0:  # reading initial rows compiles a program for each table
            initial = programs.initial_rows(table.name, table.dim, [5, 6])
            np.testing.assert_array_equal(embeddings[f"x{i}"], initial)
        np.testing.assert_array_equal(embeddings[f"x{i}"], embeddings[f"y{i}"])
        assert embeddings[f"x{i}"].shape == (2, table.dim)
        seen.add(np.asarray(embeddings[f"x{i}"])[0, :4].tobytes())
        assert programs.counts(stats, table.name)["num_inserted"] == 2
        assert programs.counts(stats, table.name)["num_found"] == 2
    assert len(seen) == 26


# --------------------------------------------------------------------------------------------------------------
# repr


def two_stores(mesh=None):
    """Returns a collection of two stores, with features of every kind."""
    tables = [
        jaxsok.TableSpec("user", 8, jaxsok.optim.adam(1e-3), capacity=1024),
        jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), dtype="bfloat16", capacity=64),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("history", "item", combiner="mean", max_keys=32),
        jaxsok.FeatureSpec("clicks", "item", combiner=None),
    ]
    return jaxsok.Collection(tables, features, mesh=mesh, axis=None if mesh is None else "data")


def raw_of_two_stores():
    """Returns four samples, with labels and a side input."""
    history = jaxsok.Bags(np.arange(6), lengths=[1, 2, 3, 0])
    clicks = np.arange(8).reshape(4, 2)
    return {"user": np.arange(4), "history": history, "clicks": clicks, "label": np.ones(4, np.float32), "side": (1,)}


def test_repr_is_short_and_says_the_sizes():
    """The repr has names, dims, sizes and shapes, and no elements of arrays."""
    collection = two_stores()
    state, batch = collection.init(seed=0), collection.batch(raw_of_two_stores(), pad_to=4)
    _, _, plan = collection.lookup(state, batch.features)
    assert repr(collection) == (
        "Collection(tables: user (8 float32, adam), item (4 bfloat16, sgd); features: user (user, sum), "
        "history (item, mean), clicks (item, None); one device)"
    )
    assert repr(state).startswith("State(1,024 rows of 8 float32 and state of 8 + 8, 64 rows of 4 bfloat16; ")
    assert repr(state.stores[1]) == "StoreState(64 rows of 4 bfloat16)"
    features = "user: 4 keys -> [4, dim], history: 32 keys -> [4, dim], clicks: 8 keys -> [4, 2, dim]"
    assert repr(batch.features) == f"Features({features})"
    assert repr(batch) == f"Batch(Features({features}), {{'label': float32[4], 'side': tuple}}, mask=bool[4])"
    assert repr(plan) == f"Plan(looked up; Features({features}))"
    assert repr(collection.plan(batch.features)) == f"Plan(not looked up; Features({features}))"


def test_repr_of_many_tables_and_features_is_short():
    """More than eight are counted."""
    tables = [jaxsok.TableSpec(f"table {i}", i + 1, jaxsok.optim.sgd(0.1), capacity=16) for i in range(30)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(f"{i}", f"table {i}") for i in range(30)])
    batch = collection.batch({f"{i}": np.arange(2) for i in range(30)})
    for value in (collection, collection.init(seed=0), batch, batch.features, jaxsok.plan.Plan(batch.features)):
        assert "22 more" in repr(value) and len(repr(value)) < 700


def test_repr_reads_no_array():
    """The repr works for arrays that are deleted, traced or elsewhere, for shapes, and for trees of other leaves."""
    collection = two_stores()
    state, batch = collection.init(seed=0), collection.batch(raw_of_two_stores())
    _, state, plan = collection.lookup(state, batch.features)
    seen = []
    jax.jit(lambda *trees: seen.extend(map(repr, trees)))(state, batch, plan)
    assert all("traced" in text and "Tracer" not in text and len(text) < 300 for text in seen)
    for tree in (state, batch, plan):
        of_arrays = repr(tree)
        assert repr(jax.device_get(tree)) == of_arrays
        assert repr(jax.eval_shape(lambda tree=tree: tree)) == of_arrays
        for leaf in (None, object(), jax.sharding.PartitionSpec("data")):
            repr(jax.tree.map(lambda _, leaf=leaf: leaf, tree))
    for tree in (batch, plan, state):
        jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, tree)
        assert "deleted" in repr(tree) and len(repr(tree)) < 300


def test_repr_on_a_mesh():
    """The repr has the axes, the wire, and how often features occur; also for the specs of a state in `shard_map`."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    collection = two_stores(mesh)
    state, batch = collection.init(seed=0), collection.batch(raw_of_two_stores())
    wire = "dense" if jax.default_backend() == "cpu" else "window"
    assert repr(collection).endswith(f"; mesh data=2, {wire} wire)") and repr(state).endswith("; data=2)")
    assert "user: 2 keys -> [2, dim]" in repr(batch) and "for each of 2 shards" in repr(batch)
    assert "keys exchanged" in repr(collection.plan(batch.features, send_capacity=(16, 32)))
    assert repr(specs_of(collection.shards, state)).startswith("State(")
    assert repr(collection.stack(state)).endswith("; data=2)")

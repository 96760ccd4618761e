"""Growth: up to a maximum or without one, no row is copied; full tables refuse keys and report it."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import checkpoint, enlarge, grow, growth

DIM = 4


def float_pointers(state):
    """Returns the addresses of rows and optimizer state."""
    return {leaf.unsafe_buffer_pointer() for _, leaf in programs.state_leaves(state) if leaf.dtype == np.float32}


def test_growth_without_a_maximum():
    """From 4 rows to thousands, every row keeps its id and its bits."""
    collection = programs.one_table(capacity=4, optimizer=jaxsok.optim.adam(0.1))
    state, expected = collection.init(seed=0), {}
    rng = np.random.default_rng(0)
    for _ in range(12):
        keys = rng.integers(0, 4000, 512)
        features = programs.batch(collection, user=keys)
        state = collection.grow(state)
        before = programs.export(collection, state)
        state, stats = programs.learn(collection, state, features)
        stats.check()
        for key in keys.tolist():
            expected.setdefault(key, len(expected))
        after = programs.export(collection, state)
        assert {key: row_id for key, (row_id, _, _) in after.items()} == expected
        for key in before.keys() - set(keys.tolist()):
            np.testing.assert_array_equal(before[key][1], after[key][1])
            np.testing.assert_array_equal(before[key][2], after[key][2])
    assert len(expected) > 3000


def test_growth_keeps_everything():
    """Keys, ids, rows, optimizer state, step and free ids do not change."""
    collection = programs.one_table(capacity=8, optimizer=jaxsok.optim.adagrad(0.5))
    state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.arange(8)))
    state, _ = collection.erase(state, "user", np.array([6, 3]))
    before = collection.export_table(state, "user")
    grown = collection.grow(state, steps=100)
    after = collection.export_table(grown, "user")
    for name in ("keys", "rows", "row_ids"):
        np.testing.assert_array_equal(before[name], after[name])
    for name in before["state"]:
        np.testing.assert_array_equal(before["state"][name], after["state"][name])
    assert int(grown.step) == 1
    grown = programs.insert(collection, grown, [100, 101, 102])
    ids = {key: row_id for key, (row_id, _, _) in programs.export(collection, grown).items()}
    assert (ids[100], ids[101], ids[102]) == (3, 6, 8)


def test_growth_stops_at_the_maximum():
    """The capacity is exactly max_capacity rows, however often `grow` is called."""
    collection = programs.one_table(capacity=8, max_capacity=20)
    state = collection.init(seed=0)
    for start in range(0, 40, 5):
        state = programs.insert(collection, state, range(start, start + 5), grow=True)
    assert collection.num_rows(state) == {"user": 20}
    assert list(programs.rows_of(collection, state)) == list(range(20))


def test_a_store_holds_the_maxima_of_its_tables():
    """Rows are shared: the maximum of the store is the sum of its tables' maxima."""
    sgd = jaxsok.optim.sgd(1.0)
    collection = jaxsok.Collection(
        [
            jaxsok.TableSpec("user", DIM, sgd, capacity=4, max_capacity=6),
            jaxsok.TableSpec("item", DIM, sgd, capacity=4, max_capacity=10),
        ],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item")],
    )
    state = collection.init(seed=0)
    for start in range(0, 32, 8):
        keys = np.arange(start, start + 8)
        features = programs.batch(collection, user=keys, item=keys)
        _, state, _ = programs.lookup(collection)(collection.grow(state), features)
    assert sum(collection.num_rows(state).values()) == 16


def test_without_growth_the_first_capacity_is_the_end():
    """Without a call of `grow` the store has exactly `capacity` rows, for the first keys."""
    collection = programs.one_table(capacity=8)
    state = programs.insert(collection, collection.init(seed=0), range(30))
    assert list(programs.rows_of(collection, state)) == list(range(8))
    state = programs.insert(collection, state, range(30), grow=True)
    assert list(programs.rows_of(collection, state)) == list(range(30))


def test_a_full_table_refuses_the_keys_that_come_last():
    """In the order of the batch, new keys get rows while there are any; all occurrences of the others are refused."""
    collection = programs.one_table(capacity=4, max_capacity=4)
    state = programs.insert(collection, collection.init(seed=0), [1, 2])
    features = programs.batch(collection, user=np.array([9, 1, 8, 7, 9, 7, 6, -1]))
    embeddings, state, plan = programs.lookup(collection)(state, features)
    assert list(programs.rows_of(collection, state)) == [1, 2, 9, 8]
    initial = programs.initial_rows("user", DIM, [9, 1, 8, 7, 9, 7, 6])
    np.testing.assert_array_equal(embeddings["user"], np.concatenate([initial, np.zeros((1, DIM), np.float32)]))
    before = programs.export(collection, state)
    state, stats = programs.update(collection)(state, plan, {"user": jnp.ones((8, DIM))})
    assert programs.counts(stats) == {
        "num_found": 2,
        "num_inserted": 2,
        "num_missing": 0,
        "num_refused": 3,
        "num_padding": 1,
    }
    after = programs.rows_of(collection, state)
    np.testing.assert_array_equal(after[2], before[2][1])  # not in the batch
    np.testing.assert_array_equal(after[1], before[1][1] - 1)
    np.testing.assert_array_equal(after[9], before[9][1] - 2)
    np.testing.assert_array_equal(after[8], before[8][1] - 1)


def test_refused_keys_contribute_to_their_bags():
    """Refused keys count in the hotness, with their initial row; their bag still updates its other rows."""
    collection = programs.one_table(capacity=1, max_capacity=1, combiner="mean")
    keys = np.array([[1, 2], [2, -1]])
    features = programs.batch(collection, user=keys)
    embeddings, state, plan = collection.lookup(collection.init(seed=0), features)
    first, two = programs.initial_rows("user", DIM, [1, 2])
    np.testing.assert_allclose(embeddings["user"], [(first + two) / 2, two], rtol=0, atol=1e-8)  # numbers <= 0.05
    state, stats = collection.update(state, plan, {"user": jnp.ones((2, DIM))})
    rows = programs.rows_of(collection, state)
    assert list(rows) == [1]
    np.testing.assert_allclose(rows[1], first - 0.5, rtol=0, atol=1e-7)
    again, _, _ = collection.lookup(state, features)
    np.testing.assert_array_equal(again["user"][1], two)  # it was not updated
    assert programs.counts(stats)["num_refused"] == 2


def test_a_full_table_still_finds_and_erasing_makes_room():
    """Refused keys leave no entry in the index; freed rows go to the next new keys."""
    collection = programs.one_table(capacity=8, max_capacity=8)
    state = programs.insert(collection, collection.init(seed=0), range(8))
    for start in range(100, 1000, 100):
        state = programs.insert(collection, state, range(start, start + 64))
    assert list(programs.rows_of(collection, state)) == list(range(8))
    _, stats = programs.find(collection)(state, programs.batch(collection, user=np.arange(8)))
    assert programs.counts(stats)["num_found"] == 8
    _, stats = programs.find(collection)(state, programs.batch(collection, user=np.arange(100, 164)))
    assert programs.counts(stats)["num_missing"] == 64
    state, _ = collection.erase(state, "user", np.array([3, 5]))
    state = programs.insert(collection, state, [100, 101, 102])
    assert {key: row_id for key, (row_id, _, _) in programs.export(collection, state).items()} == {
        0: 0,
        1: 1,
        2: 2,
        100: 3,
        4: 4,
        101: 5,
        6: 6,
        7: 7,
    }


def test_grow_reserves_for_a_scan():
    """steps=K: no table becomes full in K steps of one program."""
    collection = programs.one_table(capacity=8, optimizer=jaxsok.optim.adagrad(0.1))
    num_steps, batch_size = 6, 16
    batches = [programs.batch(collection, user=np.arange(batch_size) + step * batch_size) for step in range(num_steps)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)

    def body(state, features):
        state, _, stats = programs.train_step(collection)(state, features)
        return state, stats

    # The reserve covers the batches that the collection has seen: at least as many keys as they may insert.
    state, _, _ = jax.jit(programs.train_step(collection))(collection.grow(collection.init(seed=0)), batches[0])
    state = collection.grow(state, steps=num_steps)
    state, stats = jax.jit(lambda state, xs: jax.lax.scan(body, state, xs))(state, stacked)
    np.testing.assert_array_equal(np.asarray(stats.num_refused), 0)
    assert collection.num_rows(state) == {"user": num_steps * batch_size}


def test_grow_with_room_returns_at_once():
    """If the reserve exists, nothing is allocated and nothing moves."""
    collection = programs.one_table(capacity=1 << 14)
    state = programs.insert(collection, collection.init(seed=0), range(10))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    again = collection.grow(state)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(again)] == before


def test_growing_copies_no_row():
    """Old slabs of rows and optimizer state stay at their addresses; new slabs are appended."""
    collection = programs.one_table(capacity=1 << 10, dim=16, optimizer=jaxsok.optim.adam(0.1))
    state = programs.insert(collection, collection.init(seed=0), range(1 << 10), grow=True)
    before = float_pointers(state)
    grown = collection.grow(state)
    assert before < float_pointers(grown)
    expected = np.asarray(programs.initial_rows("user", 16, [5, 1023]))
    rows = programs.rows_of(collection, grown)
    np.testing.assert_array_equal(np.stack([rows[5], rows[1023]]), expected)


def test_the_peak_of_growth_is_the_new_size():
    """After growth only the new state exists: no second copy of rows, and no old index."""
    collection = programs.one_table(capacity=1 << 14, dim=64)
    state = programs.insert(collection, collection.init(seed=0), range(1 << 14), grow=True)
    jax.block_until_ready(state)
    gc.collect()
    others = sum(leaf.nbytes for leaf in jax.live_arrays()) - sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    state = jax.block_until_ready(collection.grow(state))
    gc.collect()
    alive = sum(leaf.nbytes for leaf in jax.live_arrays())
    new_size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert new_size > 2 * (1 << 14) * 64 * 4  # it did grow
    assert alive - others <= new_size + (1 << 12)  # a few scalars may be cached


def test_two_states_of_one_collection():
    """Facts about one state are not applied to another: two runs may alternate."""
    collection = programs.one_table(capacity=64)
    first, second = collection.init(seed=0), collection.init(seed=1)
    for start in range(0, 256, 16):
        first = programs.insert(collection, first, range(start, start + 16), grow=True)
        second = programs.insert(collection, second, [start, *range(15)], grow=True)
    assert collection.num_rows(first) == {"user": 256}
    assert collection.num_rows(second) == {"user": 30}
    for start in range(256, 512, 16):
        second = programs.insert(collection, second, range(start, start + 16), grow=True)
    assert collection.num_rows(second) == {"user": 30 + 256}


def test_lookups_without_growing_are_noticed():
    """Growth reads the present counts, so steps before the first `grow` cause no loss later."""
    collection = programs.one_table(capacity=64)
    state = programs.insert(collection, collection.init(seed=0), range(30))
    state = programs.insert(collection, state, range(30, 60))
    for start in range(60, 360, 20):
        state = programs.insert(collection, state, range(start, start + 20), grow=True)
    assert collection.num_rows(state) == {"user": 360}


def test_rows_in_use_are_at_most_those_seen_and_those_that_steps_could_insert():
    """Counters that arrive late describe the time of their request."""
    tracker = programs.one_table(capacity=64).growth
    assert tracker.bound(0) is None
    tracker.allowed[0] = 10
    asked = list(tracker.allowed)
    tracker.allowed[0] += 4
    tracker.learn(growth.Seen([3], [0], [2], [0]), asked)
    assert (tracker.bound(0), tracker.sightings_bound(0)) == (7, 6)


def test_an_older_state_goes_on():
    """A run that is resumed from a kept state grows like the first run."""
    collection = programs.one_table(capacity=64)
    kept = programs.insert(collection, collection.init(seed=0), range(60), grow=True)
    for _ in range(2):
        state = jax.tree.map(jnp.copy, kept)
        for start in range(100, 400, 20):
            state = programs.insert(collection, state, range(start, start + 20), grow=True)
        assert collection.num_rows(state) == {"user": 360}


def test_steps_after_growth_are_the_same_steps():
    """A small table that grew and a table that was large from the start have equal rows, ids and state."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 300, 64) for _ in range(8)]
    collections = [programs.one_table(capacity=capacity, optimizer=jaxsok.optim.adam(0.1)) for capacity in (16, 1024)]
    tables = []
    for collection in collections:
        state = collection.init(seed=0)
        for keys in batches:
            features = programs.batch(collection, user=keys)
            state, _ = programs.learn(collection, collection.grow(state), features)
        tables.append(collection.export_table(state, "user"))
    for name in ("keys", "row_ids", "rows"):
        np.testing.assert_array_equal(tables[0][name], tables[1][name])


def test_growth_after_erasures():
    """When a tenth of the keys leaves and returns many times, the store grows no further than necessary."""
    collection = programs.one_table(capacity=512)
    state, alive, fresh = collection.init(seed=0), list(range(400)), 400
    state = programs.insert(collection, state, alive)
    rng = np.random.default_rng(0)
    bytes_before = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for _ in range(30):
        leaving = rng.choice(alive, 40, replace=False)
        state, num_erased = collection.erase(state, "user", leaving)
        assert int(num_erased) == 40
        alive = [key for key in alive if key not in set(leaving.tolist())] + list(range(fresh, fresh + 40))
        state = programs.insert(collection, state, range(fresh, fresh + 40))
        fresh += 40
        assert set(programs.rows_of(collection, state)) == set(alive)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == bytes_before
    _, stats = programs.find(collection)(state, programs.batch(collection, user=np.array(alive)))
    assert programs.counts(stats)["num_found"] == 400


def test_keys_of_one_bucket():
    """Such keys fill bucket after bucket; all are found, none is lost, and probes are counted."""
    collection = programs.one_table(capacity=1024)
    state = collection.init(seed=0)
    keys = programs.aimed_keys(collection, state, 64)
    state, stats = programs.learn(collection, state, programs.batch(collection, user=keys), gradient=0.0)
    assert programs.counts(stats)["num_inserted"] == 64
    assert programs.total(stats, "longest_probe") >= 16  # 64 keys in buckets of four
    assert programs.export(collection, state).keys() == set(keys.tolist())
    embeddings, stats = programs.find(collection)(state, programs.batch(collection, user=keys[::-1].copy()))
    assert programs.counts(stats)["num_found"] == 64
    np.testing.assert_array_equal(embeddings["user"], programs.initial_rows("user", DIM, keys[::-1]))
    state, num_erased = collection.erase(state, "user", keys[::2])
    assert int(num_erased) == 32
    _, stats = programs.find(collection)(state, programs.batch(collection, user=keys))
    assert programs.counts(stats)["num_found"] == 32 and programs.counts(stats)["num_missing"] == 32


def test_more_keys_of_one_bucket_than_a_walk_is_long():
    """Some keys find no entry within the bound. They are counted separately; after a rebuild none is lost."""
    collection = programs.one_table(capacity=2048)
    state = collection.init(seed=0)
    keys = programs.aimed_keys(collection, state, 600)
    features = programs.batch(collection, user=keys)
    state, stats = programs.learn(collection, state, features, gradient=0.0)
    num_unplaced = programs.total(stats, "num_unplaced")
    assert num_unplaced > 0
    counts = programs.counts(stats)
    assert counts["num_inserted"] == 600 - num_unplaced and sum(counts.values()) == 600
    with pytest.warns(RuntimeWarning, match=f"got {num_unplaced} keys refused so far .* rebuilds the index"):
        state = collection.grow(state)
    state, stats = programs.learn(collection, state, features, gradient=0.0)
    assert programs.counts(stats)["num_refused"] == 0 and programs.total(stats, "num_unplaced") == 0
    assert programs.export(collection, state).keys() == set(keys.tolist())
    ids = sorted(row_id for row_id, _, _ in programs.export(collection, state).values())
    assert ids == list(range(600))


def test_keys_aimed_at_one_state_miss_another():
    """Knowledge of one state, or of the seed, does not help with the next state or with this state after a rebuild."""
    collection = programs.one_table(capacity=2048)
    first = collection.init(seed=0)
    keys = programs.aimed_keys(collection, first, 600)
    features = programs.batch(collection, user=keys)
    _, stats = programs.learn(collection, collection.init(seed=0), features, gradient=0.0)
    assert programs.total(stats, "num_unplaced") == 0
    salts = set()
    for _ in range(2):
        state, stats = programs.learn(collection, jax.tree.map(jnp.copy, first), features, gradient=0.0)
        assert programs.total(stats, "num_unplaced") > 0
        collection.growth.warned.clear()  # each warning appears once
        with pytest.warns(RuntimeWarning, match="this call rebuilds the index"):
            state = collection.grow(state)
        salts.add(programs.index_of(collection, state)[1])
    assert len(salts) == 2


def hundred_new(collection, number):
    """Returns a batch of 100 keys that no other batch has."""
    return collection.batch({"user": np.arange(100) + 100 * number})


FORMS = {
    "batch": lambda collection, batch: batch,
    "features": lambda collection, batch: batch.features,
    "plan": lambda collection, batch: collection.plan(batch.features),
    "number": lambda collection, batch: 100,
    "list": lambda collection, batch: [batch],
    "parts": lambda collection, batch: (50, np.int64(50)),
}


@pytest.mark.parametrize(("form", "num_shards"), [*((form, 1) for form in FORMS), ("batch", 2)])
def test_the_ordinary_loop_keeps_every_key(form, num_shards, tmp_path):
    """A new process with capacity for 64 and 100 new keys per step loses none, also right after a restore."""
    tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(1.0), capacity=64)]
    features = [jaxsok.FeatureSpec("user", "user")]

    def fresh():
        return programs.over(2, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)

    def steps(collection, state, numbers):
        step = programs.fed_step(collection)
        for number in numbers:
            batch = hundred_new(collection, number)
            state = collection.grow(state, FORMS[form](collection, batch))
            state, _, stats = step(state, batch.features, {"user": jnp.zeros((100, DIM))})
            stats.check()
        return state

    collection = fresh()
    state = steps(collection, collection.init(seed=0), range(2))
    checkpoint.export_full(tmp_path / "saved", collection, state)
    collection = fresh()
    state = steps(collection, checkpoint.load(tmp_path / "saved", collection), range(2, 4))
    assert set(programs.rows_of(collection, state)) == set(range(400))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_restored_state_has_room_for_a_step(num_shards, tmp_path):
    """Without a call of `grow` after the restore, the first step of the earlier batch size refuses no key."""
    tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(1.0), capacity=64)]
    features = [jaxsok.FeatureSpec("user", "user")]
    collections = [
        programs.over(num_shards, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)
        for _ in range(2)
    ]
    batch = hundred_new(collections[0], 0)
    state = collections[0].grow(collections[0].init(seed=0), batch)
    _, state, _ = collections[0].lookup(state, batch.features)
    checkpoint.export_full(tmp_path / "saved", collections[0], state)
    state = checkpoint.load(tmp_path / "saved", collections[1])
    batch = hundred_new(collections[1], 1)
    _, state, _ = collections[1].lookup(state, batch.features)
    assert collections[1].num_rows(state) == {"user": 200}


@pytest.mark.parametrize("num_shards", [1, 2])
def test_batches_of_a_scan_stacked(num_shards):
    """The leading axis is the number of steps: all of them fit, also on a mesh."""
    tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(1.0), capacity=64, max_capacity=1000)]
    features = [jaxsok.FeatureSpec("user", "user")]
    collection = programs.over(num_shards, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)
    batches = [hundred_new(collection, number) for number in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    state = collection.grow(collection.init(seed=0), stacked)

    def body(state, batch):
        _, state, _ = collection.lookup(state, batch.features)
        return state, None

    scan = jax.jit(lambda state, xs: jax.lax.scan(body, state, xs), compiler_options=programs.quickly())
    state, _ = scan(state, stacked)
    assert collection.num_rows(state) == {"user": 300}
    # The same keys again: their positions do not fit in addition to the rows, and they need none.
    capacity = state.stores[0].capacity
    for coming in (stacked, batches):
        state = collection.grow(state, coming)
        assert state.stores[0].capacity == capacity and collection.num_rows(state) == {"user": 300}


def test_a_small_table_of_large_batches_does_not_wait_for_ever(monkeypatch):
    """Its keys soon have rows; then no step is waited for, though positions exceed its rows, and none is at rest."""
    monkeypatch.setattr(grow, "is_at_rest", lambda state, shards: False)
    collection = programs.one_table(capacity=16)
    state, waits = collection.init(seed=0), []
    for step in range(40):
        batch = collection.batch({"user": (np.arange(1000) + step) % 12})
        state = collection.grow(state, batch)
        _, state, _ = programs.lookup(collection)(state, batch.features)
        waits.append(collection.growth.num_waits)
    assert waits[-1] == waits[2 * grow.MOST_COUNTS]
    assert collection.num_rows(state) == {"user": 12}


def test_keys_that_have_rows_need_no_room(by_doubling):
    """They are counted if positions do not fit; after some waits the table nevertheless grows for the positions."""
    collection = programs.one_table(capacity=120)
    batch = hundred_new(collection, 0)
    state = collection.init(seed=0)
    capacities = []
    for _ in range(grow.MOST_COUNTS + 3):
        state = collection.grow(state, batch)
        _, state, _ = programs.lookup(collection)(state, batch.features)
        capacities.append(state.stores[0].capacity)
    assert capacities == [120] * grow.MOST_COUNTS + [240] * 3
    waits = collection.growth.num_waits
    jax.block_until_ready(state)  # on a GPU the counters of the last steps may be on their way
    collection.grow(state, batch)
    assert collection.growth.num_waits == waits


def test_a_first_call_that_knows_nothing_says_so():
    """The warning appears once and states the remedy; later calls report losses with table and count."""
    collection = programs.one_table(capacity=64)
    state, step = collection.init(seed=0), jax.jit(programs.train_step(collection), donate_argnums=0)
    with pytest.warns(RuntimeWarning, match=r"grow: batch: got none.*collection\.grow\(state, batch\)"):
        state = collection.grow(state)
    state, _, _ = step(state, hundred_new(collection, 0).features)
    with pytest.warns(RuntimeWarning, match=r'table "user": got 36 keys refused so far') as warned:
        state = collection.grow(state)
    assert warned[0].filename == __file__
    for number in range(1, 4):
        state, _, stats = step(state, hundred_new(collection, number).features)
        stats.check()
        state = collection.grow(state)


def test_refused_keys_are_reported_while_steps_run():
    """If a table that may not grow refuses keys, `grow` warns within a few calls, once per table, without Stats."""
    tables = [
        jaxsok.TableSpec(name, DIM, jaxsok.optim.sgd(1.0), capacity=64, max_capacity=64, **more)
        for name, more in (("full", {}), ("kept_out", {"admission": jaxsok.policies.AdmitByCount(1000)}))
    ]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])
    state, step = collection.init(seed=0), jax.jit(programs.train_step(collection), donate_argnums=0)
    warned = []  # if the state is never ready, call 16 reads the counters that call 8 requested
    for number in range(20):
        batch = collection.batch({table.name: np.arange(40) + 40 * number for table in tables})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = collection.grow(state, batch)
        warned += [(number, str(warning.message)) for warning in caught]
        state, _, stats = step(state, batch.features)
    ((number, message),) = warned
    assert number < 16 and 'table "full": got ' in message and "raise max_capacity" in message
    assert int(state.num_refused[0]) == 20 * 40 - 2 * 64 and int(state.num_refused[1]) == 0
    with pytest.raises(jaxsok.TableFullError):
        stats.check()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"user": np.arange(3)}, "got dict, wanted a Batch"),
        (np.arange(3), "got ndarray, wanted a Batch"),
        (-1, "got -1, wanted a Batch"),
        (True, "got True, wanted a Batch"),
        (1.5, "got 1.5, wanted a Batch"),
        ([1, "two"], "got str, wanted a Batch"),
    ],
)
def test_what_is_no_batch(batch, message):
    """Each message states what to pass, and nothing changes."""
    collection = programs.one_table(capacity=64)
    state = collection.init(seed=0)
    with pytest.raises(TypeError, match=f"grow: batch: {message}") as raised:
        collection.grow(state, batch)
    assert "collection.batch(raw)" in str(raised.value)
    with pytest.raises(ValueError, match="grow: features: got those of a collection with other specs"):
        collection.grow(state, programs.one_table(dim=8).batch({"user": np.arange(3)}))
    with pytest.raises(ValueError, match="grow: steps: got 3 with a list of batches"):
        collection.grow(state, [1, 2], steps=3)
    collection.num_rows(state)


def test_numbers_of_keys_and_steps(by_doubling):
    """A number represents the keys of all shards; steps multiply a single batch."""
    collection = programs.one_table(capacity=64)
    assert collection.grow(collection.init(seed=0), 200, steps=3).stores[0].capacity == 600
    batch = hundred_new(collection, 0)
    assert collection.grow(collection.init(seed=0), batch, steps=3).stores[0].capacity == 300
    assert collection.grow(collection.init(seed=0), [batch, 100]).stores[0].capacity == 200


def first_capacity(collection):
    """Returns the capacity after the first call of `grow`, with a batch of 100 new keys."""
    return collection.grow(collection.init(seed=0), hundred_new(collection, 0)).stores[0].capacity


def test_a_fresh_table_begins_with_room_for_many_batches(monkeypatch):
    """It doubles until 32 such batches fit, up to `max_capacity` or a sixteenth of free memory."""
    assert first_capacity(programs.one_table(capacity=64)) == 64 * 2**6
    assert first_capacity(programs.one_table(capacity=3200)) == 3200
    assert first_capacity(programs.one_table(capacity=64, max_capacity=1000)) == 1000
    collection = programs.one_table(capacity=64)
    of_row = collection.memory_estimate().stores[0].row_bytes
    for more, capacity in ((4032, 4096), (4031, 2048), (0, 128)):  # a batch must always fit
        monkeypatch.setattr(enlarge, "free_bytes", lambda more=more: 16 * max(more, 20) * of_row)
        assert first_capacity(collection) == capacity
    monkeypatch.undo()
    by_chance = jaxsok.policies.AdmitByProbability(0.1)  # most counted keys get no row
    table = jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(1.0), capacity=64, admission=by_chance)
    assert first_capacity(jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")])) == 128
    state = programs.insert(collection, collection.init(seed=0), [7])
    assert collection.grow(state, hundred_new(collection, 0)).stores[0].capacity == 128  # the state is not new


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_fresh_table_grows_less_often_with_the_same_bits(num_shards, monkeypatch):
    """There is one growth in place of several; keys, row ids, rows and optimizer state are equal."""
    found = []
    for first_calls in (0, 32):
        monkeypatch.setattr(grow, "FIRST_CALLS", first_calls)
        tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.adagrad(0.1), capacity=64)]
        features = [jaxsok.FeatureSpec("user", "user")]
        collection = programs.over(2, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)
        state, step = collection.init(seed=0), programs.fed_step(collection)
        for number in range(8):
            batch = hundred_new(collection, number)
            state = collection.grow(state, batch)
            state, _, stats = step(state, batch.features, {"user": jnp.full((100, DIM), 1.0 + number)})
            stats.check()
        found.append((collection.growth.num_grown, collection.export_table(state, "user")))
    (often, small), (once, large) = found
    assert once == 1 and often >= 3
    for name in ("keys", "row_ids", "rows"):
        np.testing.assert_array_equal(small[name], large[name])
    for name in small["state"]:
        np.testing.assert_array_equal(small["state"][name], large["state"][name])


@pytest.mark.slow
def test_a_million_rows():
    """A table grows to 2^20 rows by doubling, in batches."""
    collection = programs.one_table(capacity=1 << 12, dim=8)
    state = collection.init(seed=0)
    for start in range(0, 1 << 20, 1 << 15):
        batch = programs.batch(collection, user=np.arange(start, start + (1 << 15)) * 7919)
        state, stats = programs.learn(collection, collection.grow(state, batch), batch)
        stats.check()
    assert collection.num_rows(state) == {"user": 1 << 20}

"""Statistics of rows: when and how often lookups used them, against a dict; on one device and on meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings, strategies as st

import jaxsok
from jaxsok import policies
from jaxsok.types import COUNTERS

NUM_SAMPLES, HOTNESS = 8, 3
PADDING = jaxsok.PADDING_KEY
POOL = [0, 5, 2**32 + 5, 2**63, 2**64 - 2, *range(100, 125)]
FEATURES = [
    jaxsok.FeatureSpec("one", "a"),
    jaxsok.FeatureSpec("many", "a", combiner="mean", max_keys=NUM_SAMPLES * HOTNESS),
    jaxsok.FeatureSpec("other", "b"),
]


@functools.cache
def collection_of(way, num_shards=1):
    """Declares two tables of one store; one requests statistics, so both have them."""
    options, more = {}, {}
    if way == "traced":
        options["initializer"] = jaxsok.initializers.matrix(np.ones((3, 4), np.float32))
    if way == "replicated":
        options["placement"] = jaxsok.REPLICATED
    if way == "on":
        options["placement"] = jaxsok.on(num_shards - 1)
    if way == "rounds":
        more["exchange"] = jaxsok.ExchangeSpec(send_capacity=2)
    if num_shards > 1:
        more |= {"mesh": programs.mesh(num_shards), "axis": "data"}
    sgd = jaxsok.optim.sgd(0.5)
    tables = [
        jaxsok.TableSpec("a", 4, sgd, capacity=256, statistics=True, **options),
        jaxsok.TableSpec("b", 4, sgd, capacity=256, **options),
    ]
    return jaxsok.Collection(tables, FEATURES, **more)


@functools.cache
def jitted_lookup(collection):
    """Returns a jitted lookup with features, a state and a clock, all traced."""
    return jax.jit(lambda state, features, clock: collection.lookup(state, features, clock=clock), donate_argnums=0)


def statistics_of(state):
    """Returns (table, key) -> (last step, frequency) of all rows in use, without replicas, and what freed rows keep."""
    (store,) = state.stores
    in_use, freed = {}, []
    for records, statistics in zip(store.records, store.statistics, strict=True):
        for (low, high, table, _), (last_step, frequency) in zip(
            np.asarray(records).tolist(), np.asarray(statistics).tolist(), strict=True
        ):
            if low | high << 32 == PADDING:
                freed.append((last_step, frequency))
            else:
                entry = in_use.setdefault((table, low | high << 32), (last_step, frequency))
                assert entry == (last_step, frequency), "replicas differ"
    return in_use, freed


def batch_of(collection, single, lengths, many, other):
    """Packs keys of the three features."""
    raw = {"one": programs.as_array(single), "other": programs.as_array(other)}
    raw["many"] = jaxsok.Bags(programs.as_array(many[: sum(lengths)]), lengths=np.array(lengths))
    return collection.batch(raw)


def apply_lookup(want, clock, single, lengths, many, other):
    """Applies a lookup of these keys to the dict."""
    for table, keys in ((0, [*single, *many[: sum(lengths)]]), (1, other)):
        for key in keys:
            if key != PADDING:
                want[table, key] = (clock, want.get((table, key), (0, 0))[1] + 1)


keys = st.sampled_from([*POOL, PADDING])
batches = st.tuples(
    st.lists(keys, min_size=NUM_SAMPLES, max_size=NUM_SAMPLES),
    st.lists(st.integers(0, HOTNESS), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES),
    st.lists(keys, min_size=NUM_SAMPLES * HOTNESS, max_size=NUM_SAMPLES * HOTNESS),
    st.lists(keys, min_size=NUM_SAMPLES, max_size=NUM_SAMPLES),
)
steps = st.lists(
    st.tuples(batches, st.one_of(st.integers(0, 9), st.just(2**32 - 1)), st.lists(st.sampled_from(POOL), max_size=3)),
    min_size=1,
    max_size=4,
)
WAYS = [
    ("fused", 1),
    ("traced", 1),
    ("rounds", 4),
    ("traced", 4),
    ("replicated", 4),
    ("on", 4),
    ("planned", 4),
]


@pytest.mark.parametrize(("way", "num_shards"), WAYS)
@settings(max_examples=8)
@given(steps)
def test_last_step_and_frequency(way, num_shards, script):
    """Every occurrence counts, the clock may decrease, and a key that returns after an erase starts from zero."""
    collection = collection_of(way, num_shards)
    state, want = collection.init(seed=1), {}
    for batch, clock, erased in script:
        features = batch_of(collection, *batch).features
        if way == "planned":
            features = collection.plan(features, send_capacity=[64])
        _, state, _ = jitted_lookup(collection)(state, features, jnp.uint32(clock))
        apply_lookup(want, clock, *batch)
        erased = np.array([*erased, *[PADDING] * (3 - len(erased))], np.uint64)
        state, _ = collection.erase(state, "a", erased)
        for key in erased.tolist():
            want.pop((0, key), None)
        got, freed = statistics_of(state)
        assert got == want
        assert set(freed) <= {(0, 0)}


def test_clock_is_the_step():
    """The step is the default clock; an update advances it, and find changes nothing."""
    collection = collection_of("fused")
    state = collection.init(seed=0)
    batch = batch_of(collection, [5] * 8, [0] * 8, [], [5] * 4 + [PADDING] * 4)
    for _ in range(3):
        embeddings, state, plan = collection.lookup(state, batch.features)
        state, _ = collection.update(state, plan, embeddings)
    collection.find(state, batch.features)
    assert statistics_of(state)[0] == {(0, 5): (2, 24), (1, 5): (2, 12)}
    _, state, _ = collection.lookup(state, batch.features, clock=2**32 - 1)
    assert statistics_of(state)[0] == {(0, 5): (2**32 - 1, 32), (1, 5): (2**32 - 1, 16)}


@pytest.mark.parametrize("num_shards", (1, 4))
def test_frequency_stops_at_its_end_and_a_hot_key_is_counted_whole(num_shards):
    """All positions of a large batch are one key; from 2**32 - 3 the count saturates at 2**32 - 1."""
    collection = collection_of("fused" if num_shards == 1 else "rounds", num_shards)
    state = collection.init(seed=0)
    raw = {
        "one": np.full(4096, 7),
        "other": np.full(4096, 7),
        "many": jaxsok.Bags(np.zeros(0, np.int64), lengths=np.zeros(4096, int)),
    }
    _, state, _ = collection.lookup(state, collection.batch(raw).features)
    assert statistics_of(state)[0] == {(0, 7): (0, 4096), (1, 7): (0, 4096)}
    (store,) = state.stores
    (slab,) = store.statistics
    near = jnp.where(slab > 0, jnp.uint32(2**32 - 3), slab)
    state = dataclasses.replace(state, stores=(dataclasses.replace(store, statistics=(near,)),))
    for _ in range(2):
        _, state, _ = collection.lookup(state, collection.batch(raw).features)
        assert statistics_of(state)[0] == {(0, 7): (0, 2**32 - 1), (1, 7): (0, 2**32 - 1)}


def test_freed_rows_start_anew():
    """The row of an erased key goes to another key, without the old statistics."""
    collection = collection_of("fused")
    state = collection.init(seed=0)

    def look(state, key, clock):
        features = batch_of(collection, [key] * 8, [0] * 8, [], [PADDING] * 8).features
        return collection.lookup(state, features, clock=clock)[1]

    state = look(look(state, 1, 3), 2, 4)
    state, _ = collection.erase(state, "a", np.array([1]))
    state = look(state, 3, 9)
    assert int(state.stores[0].counters[COUNTERS.index("num_allocated")]) == 2
    assert statistics_of(state)[0] == {(0, 2): (4, 8), (0, 3): (9, 8)}


def test_refused_keys_are_not_counted():
    """New keys get no row in a full store, and statistics of old keys continue."""
    sgd = jaxsok.optim.sgd(0.5)
    collection = jaxsok.Collection(
        [jaxsok.TableSpec("a", 4, sgd, capacity=2, statistics=True)], [jaxsok.FeatureSpec("one", "a")]
    )
    state = collection.init(seed=0)
    for _ in range(2):
        _, state, _ = collection.lookup(state, programs.batch(collection, one=np.array([1, 2, 3, 3])))
    assert statistics_of(state)[0] == {(0, 1): (0, 2), (0, 2): (0, 2)}


def test_grown_slabs_keep_statistics():
    """Uses of rows in a new slab are recorded like those in the first."""
    sgd = jaxsok.optim.sgd(0.5)
    table = jaxsok.TableSpec("a", 4, sgd, capacity=4, statistics=True)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("one", "a")])
    state, want = collection.init(seed=0), {}
    for clock in range(6):
        chunk = np.arange(clock, clock + 4)
        features = programs.batch(collection, one=chunk)
        _, state, _ = collection.lookup(collection.grow(state), features, clock=clock)
        for key in chunk.tolist():
            want[0, key] = (clock, want.get((0, key), (0, 0))[1] + 1)
    assert len(state.stores[0].statistics) > 1
    assert statistics_of(state)[0] == want


def test_calls_of_a_lookup():
    """The fused lookup records uses itself. Stores without statistics have none.

    Each lookup also has a call that makes the ticket of its plan. A plan made apart changes nothing.
    """
    plain = programs.one_table()
    kept = programs.one_table(statistics=True)
    for collection, num_notes in ((plain, 0), (kept, 1)):
        features = programs.batch(collection, user=np.arange(4))
        state = collection.init(seed=0)
        fused = jax.jit(collection.lookup).lower(state, features).as_text()
        assert fused.count("@jaxsok_lookup(") == fused.count("@jaxsok_tickets_issue(") == 1
        assert fused.count("@jaxsok_") == 2
        # The number of arrays of each kind in the call; statistics follow five kinds and the optimizer state.
        assert fused.count(f"store = dense<[1, 1, 1, 1, 1, 0, {num_notes}, 0, 0, 0]>") == 1
        planned = jax.jit(collection.lookup).lower(state, collection.plan(features)).as_text()
        assert planned == fused
    _, state, _ = plain.lookup(plain.init(seed=0), programs.batch(plain, user=np.arange(4)), clock=3)
    assert state.stores[0].statistics == ()


@pytest.mark.parametrize(
    ("clock", "error", "message"),
    [
        (-1, ValueError, "lookup: clock: got -1, wanted 0 to 2"),
        (2**32, ValueError, "lookup: clock: got 4294967296"),
        (True, TypeError, "lookup: clock: got True, wanted an integer or a uint32 scalar"),
        (1.5, TypeError, "lookup: clock: got 1.5"),
        (np.zeros(1, np.uint32), TypeError, r"lookup: clock: got uint32\[1\]"),
        (np.zeros((), np.int32), TypeError, r"lookup: clock: got int32\[\]"),
    ],
)
def test_clocks_that_are_refused(clock, error, message):
    """Bad input changes nothing in the state."""
    collection = collection_of("fused")
    state = collection.init(seed=0)
    features = batch_of(collection, [5] * 8, [0] * 8, [], [5] * 8).features
    with pytest.raises(error, match=message):
        collection.lookup(state, features, clock=clock)
    assert statistics_of(state)[0] == {}


@pytest.mark.parametrize(("way", "num_shards"), [("fused", 1), ("rounds", 4)])
def test_statistics_stay_where_they_are(way, num_shards):
    """A donated state keeps its buffers' addresses (law 9) in lookup and erase."""
    collection = collection_of(way, num_shards)
    state = collection.init(seed=0)
    features = batch_of(collection, [5] * 8, [1] * 8, [6] * 8, [7] * 8).features

    @functools.partial(jax.jit, donate_argnums=0)
    def erase(state):
        return collection.erase(state, "a", np.array([5], np.uint64))[0]

    def places(state):
        slabs = state.stores[0].statistics
        return [part.data.unsafe_buffer_pointer() for slab in slabs for part in slab.addressable_shards]

    before = places(state)
    _, state, _ = jitted_lookup(collection)(state, features, jnp.uint32(3))
    assert places(state) == before
    state = erase(state)
    assert places(state) == before
    assert statistics_of(state)[0] == {(0, 6): (3, 8), (1, 7): (3, 8)}


@pytest.mark.parametrize("num_shards", (1, 4))
def test_frequency_begins_with_the_row(num_shards):
    """Earlier sightings do not count; all occurrences of the lookup that inserts the row do."""
    tables = [
        jaxsok.TableSpec(
            name, 1, jaxsok.optim.sgd(0.1), capacity=64, statistics=True, admission=policies.AdmitByCount(n)
        )
        for name, n in (("a", 3), ("b", 1))
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    collection = programs.over(num_shards, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)
    state = collection.init(seed=0)
    for keys in ([5, 5, 6, 7], [5, 5, 6, 7], [5, 6, 6, 6], [7, 8, 8, 8]):
        batch = programs.batch(collection, a=np.array(keys), b=np.array(keys))
        _, state, _ = programs.lookup(collection)(state, batch)
    want = {"a": {5: 3, 6: 3, 7: 1, 8: 3}, "b": {5: 5, 6: 5, 7: 3, 8: 3}}
    for name in want:
        table = collection.export_table(state, name)
        assert dict(zip(table["keys"].tolist(), table["frequency"].tolist(), strict=True)) == want[name]

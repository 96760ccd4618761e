"""Eviction: the exact rows that leave, what leaves with a row, what the caller receives, room ahead of need.

The oracle is a sorted list of (scores, table, key) in Python integers.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType

import jaxsok
from jaxsok import enlarge, evict, grow, policies, table_export
from jaxsok.operations import specs_of
from jaxsok.policies import LeastFrequentlyUsed, LeastRecentlyUsed, LowestScore, SmallNorm, TimeToLive
from jaxsok.types import COUNTERS

DIM = 4
PADDING = jaxsok.PADDING_KEY


# --------------------------------------------------------------------------------------------------------------
# States with given statistics


def keys_of(records):
    """Returns the keys of records as Python integers, one per row."""
    words = np.asarray(records).astype(np.uint64)
    return (words[:, 0] | words[:, 1] << np.uint64(32)).tolist()


def with_statistics(collection, state, statistics):
    """Returns the state with statistics `{table: {key: (last_step, frequency)}}`, and zeros for all other keys."""
    stores = []
    for spec, store in zip(collection.stores, state.stores, strict=True):
        slabs = []
        for records, old in zip(store.records, store.statistics, strict=True):
            lines = np.zeros(old.shape, np.uint32)
            for place, (key, table) in enumerate(zip(keys_of(records), np.asarray(records)[:, 2], strict=True)):
                if key != PADDING:
                    lines[place] = statistics.get(spec.tables[table].name, {}).get(key, (0, 0))
            # NumPy's own memory would be borrowed by a CPU device, and could not be donated.
            slabs.append(jax.jit(jnp.copy)(jax.device_put(lines, old.sharding)))
        stores.append(dataclasses.replace(store, statistics=tuple(slabs)))
    return dataclasses.replace(state, stores=tuple(stores))


def statistics_of(collection, state, name="user"):
    """Returns `{key: (last_step, frequency)}` of a table; checks that all other rows have zeros."""
    (s,) = [s for s, spec in enumerate(collection.stores) if name in [table.name for table in spec.tables]]
    number = [table.name for table in collection.stores[s].tables].index(name)
    found = {}
    for records, statistics in zip(state.stores[s].records, state.stores[s].statistics, strict=True):
        lines = np.asarray(statistics).tolist()
        for key, table, line in zip(keys_of(records), np.asarray(records)[:, 2].tolist(), lines, strict=True):
            if key == PADDING:
                assert line == [0, 0]
            elif table == number:
                found[key] = tuple(line)
    return found


def two_tables(policy, **spec):
    """Declares tables "user" and "item" in one store, with a feature each."""
    spec = {"capacity": 64, "eviction": policy, **spec}
    optimizer = jaxsok.optim.adam(0.1)
    tables = [jaxsok.TableSpec(name, DIM, optimizer, **spec) for name in ("user", "item")]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    return jaxsok.Collection(tables, features)


def fill(collection, keys, statistics=None):
    """Returns a state with `{table: keys}` after one step, so that optimizer state is not initial."""
    num_keys = max(map(len, keys.values()))
    raw = {table.name: np.full(num_keys, PADDING, np.uint64) for table in collection.tables}
    for name, some in keys.items():
        raw[name][: len(some)] = some
    features = programs.batch(collection, **raw)
    state, _ = programs.learn(collection, collection.init(seed=0), features)
    return state if statistics is None else with_statistics(collection, state, statistics)


def rank_by_facts(facts):
    """Returns two words made of all facts."""
    return facts.frequency ^ facts.keys[:, 1], facts.last_step + facts.clock


def sevenths(facts):
    """Returns one word with many ties."""
    return facts.keys[:, 0] % jnp.uint32(7)


def age(facts):
    """Returns a score independent of the statistics, for which the whole first word matters."""
    return jnp.uint32(0xFFFFFFFF) - facts.last_step


# Policy -> its rank in Python integers.
RANKS = {
    LeastRecentlyUsed(): lambda key, last, uses, clock: (last,),
    LeastFrequentlyUsed(): lambda key, last, uses, clock: (uses, last),
    policies.EpochLeastRecentlyUsed(10): lambda key, last, uses, clock: (last // 10,),
    policies.EpochLeastFrequentlyUsed(10): lambda key, last, uses, clock: (last // 10, uses),
    LowestScore(rank_by_facts): lambda key, last, uses, clock: (uses ^ key >> 32, (last + clock) % 2**32),
    LowestScore(sevenths): lambda key, last, uses, clock: (key % 2**32 % 7,),
    LowestScore(age): lambda key, last, uses, clock: (2**32 - 1 - last,),
}


def survivors(policy, tables, num_rows, clock=1):
    """Returns, by table number, the keys that stay of `[(table number, {key: (last_step, frequency)})]`: the oracle."""
    rank = RANKS[policy]
    everyone = sorted(
        (*rank(key, *of_key, clock), table, key) for table, keys in tables for key, of_key in keys.items()
    )
    kept = everyone[max(0, len(everyone) - num_rows) :]
    return {table: {key for *_, its, key in kept if its == table} for table, _ in tables}


@functools.cache
def collection_of(policy):
    """Returns a collection whose programs are compiled once."""
    return two_tables(policy)


# --------------------------------------------------------------------------------------------------------------
# Which rows leave


PINNED = {  # by statistics {key: (last step, frequency)}: the keys that stay, as docs/life_of_a_table.md states
    LeastRecentlyUsed(): ({1: (5, 9), 2: (5, 1), 3: (4, 9), 4: (5, 5)}, 3, [1, 2, 4]),
    LeastFrequentlyUsed(): ({1: (5, 2), 2: (3, 2), 3: (3, 2), 4: (1, 9)}, 2, [1, 4]),
    policies.EpochLeastRecentlyUsed(10): ({1: (19, 9), 2: (10, 1), 3: (9, 9), 4: (12, 5)}, 2, [2, 4]),
    policies.EpochLeastFrequentlyUsed(10): ({1: (19, 2), 2: (10, 3), 3: (9, 9), 4: (12, 1)}, 2, [1, 2]),
}


@pytest.mark.parametrize("policy", PINNED)
def test_order_that_the_page_states(policy):
    """LFU: equal frequencies leave by last step; remaining ties and those of other policies leave by (table, key)."""
    statistics, num_rows, stay = PINNED[policy]
    collection = collection_of(policy)
    state = fill(collection, {"user": [*statistics] + [PADDING] * 26, "item": [PADDING] * 30})
    state = with_statistics(collection, state, {"user": statistics})
    state, _ = collection.evict(state, num_rows=num_rows)
    assert sorted(programs.export(collection, state, "user")) == stay


def test_ties_leave_by_table_then_key():
    """Tables are ordered by their number in the store, keys as unsigned numbers."""
    collection = collection_of(LeastFrequentlyUsed())
    keys = [2**63 + 1, 7, 2**64 - 2]
    state = fill(collection, {name: keys + [PADDING] * 27 for name in ("user", "item")})
    state = with_statistics(collection, state, {name: dict.fromkeys(keys, (4, 4)) for name in ("user", "item")})
    state, _ = collection.evict(state, num_rows=2)
    assert sorted(programs.export(collection, state, "item")) == [2**63 + 1, 2**64 - 2]
    assert not programs.export(collection, state, "user")


words32 = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1), st.sampled_from([0, 2**31, 2**32 - 1]))
some_keys = st.dictionaries(
    st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 2), st.integers(0, 7).map(lambda n: n << 32)),
    st.tuples(words32, words32),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(list(RANKS)),
    users=some_keys,
    items=some_keys,
    share=st.integers(0, 64),
    whose=st.sampled_from([None, "user", "item"]),
    clock=st.sampled_from([0, 1, 1000, 2**32 - 1]),
)
def test_exactly_the_lowest_leave(policy, users, items, share, whose, clock):
    """Rows leave by (scores, table, key), of one table or of all tables of a store, whatever the ties."""
    collection, statistics = collection_of(policy), {"user": users, "item": items}
    state = fill(collection, {name: list(keys) + [PADDING] * (30 - len(keys)) for name, keys in statistics.items()})
    state = with_statistics(collection, state, statistics)
    before = {name: programs.export(collection, state, name) for name in statistics}
    asked = [(n, statistics[name]) for n, name in enumerate(statistics) if whose in (None, name)]
    stay = survivors(policy, asked, share, clock)
    state, evicted = collection.evict(state, whose, num_rows=share, clock=clock)
    for number, (name, keys) in enumerate(statistics.items()):
        wanted = stay.get(number, set(keys))
        after = programs.export(collection, state, name)
        assert after.keys() == wanted
        assert evicted.to_dict()[name] == len(keys) - len(wanted)
        for key in wanted:  # rows that stay keep everything
            row_id, row, states = before[name][key]
            assert after[key][0] == row_id
            np.testing.assert_array_equal(after[key][1], row)
            np.testing.assert_array_equal(after[key][2], states)
        assert statistics_of(collection, state, name) == {key: keys[key] for key in wanted}
    assert collection.num_rows(state) == {
        name: len(stay.get(n, keys)) for n, (name, keys) in enumerate(statistics.items())
    }


@pytest.mark.parametrize("num_rows", [0, 1, 5999, 6000, 2**32 - 1])
def test_thousands_of_ties(num_rows):
    """If all scores are equal, the keys decide, to their last bits."""
    collection = programs.one_table(capacity=6000, eviction=LeastRecentlyUsed())
    keys = np.random.default_rng(0).permutation(6000).astype(np.uint64) + np.uint64(2**63)
    state = fill(collection, {"user": keys})
    state, evicted = collection.evict(state, "user", num_rows=num_rows)
    stay = np.sort(keys)[max(0, 6000 - num_rows) :]
    assert sorted(programs.rows_of(collection, state)) == stay.tolist()
    assert evicted.to_dict() == {"user": 6000 - len(stay)}


def test_several_slabs():
    """Row ids continue from slab to slab, and slabs may have different sizes."""
    collection = programs.one_table(capacity=7, eviction=LeastFrequentlyUsed())
    state = collection.init(seed=0)
    for start in range(0, 60, 10):
        state = programs.insert(collection, state, range(start, start + 10), grow=True)
    assert len(state.stores[0].rows) > 2
    rng = np.random.default_rng(1)
    statistics = {key: (int(rng.integers(5)), int(rng.integers(3))) for key in range(60)}
    state = with_statistics(collection, state, {"user": statistics})
    stay = survivors(LeastFrequentlyUsed(), [(0, statistics)], 23)[0]
    handed = []
    state, _ = collection.evict(state, num_rows=23, hand_over=lambda name, records: handed.append((name, records)))
    assert set(programs.rows_of(collection, state)) == stay
    assert sorted(key for _, records in handed for key in records.keys.tolist()) == sorted(set(range(60)) - stay)


def test_empty_store():
    """No row leaves and nothing changes."""
    collection = collection_of(LeastRecentlyUsed())
    state = collection.init(seed=0)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    state, evicted = collection.evict(state, num_rows=0)
    assert evicted.to_dict() == {"user": 0, "item": 0}
    for old, new in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_time_to_live():
    """Rows not used for more than `steps` ticks leave; a row whose last use is ahead of the clock stays."""
    collection = collection_of(TimeToLive(10))
    last = {1: 79, 2: 89, 3: 90, 4: 100, 5: 101, 6: 0}
    state = fill(collection, {"user": list(last)}, {"user": {key: (step, 1) for key, step in last.items()}})
    state, evicted = collection.evict(state, clock=100)
    assert set(programs.rows_of(collection, state)) == {3, 4, 5}
    assert evicted.to_dict() == {"user": 3, "item": 0}
    state, _ = collection.evict(state)  # by the state's own step no row has expired
    assert set(programs.rows_of(collection, state)) == {3, 4, 5}
    state, _ = collection.evict(state, clock=2**32 - 1)
    assert not programs.rows_of(collection, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_small_norm(dtype):
    """Rows with a norm below the threshold leave; no statistics are kept for it."""
    threshold = 0.55
    collection = programs.one_table(
        capacity=32, dtype=dtype, eviction=SmallNorm(threshold), initializer=jaxsok.initializers.uniform(-0.5, 0.5)
    )
    state = programs.insert(collection, collection.init(seed=0), range(30))
    assert state.stores[0].statistics == ()
    rows = programs.rows_of(collection, state)
    norms = {key: float(np.sqrt((row.astype(np.float64) ** 2).sum())) for key, row in rows.items()}
    assert all(abs(norm - threshold) > 1e-4 for norm in norms.values())
    stay = {key for key, norm in norms.items() if norm >= threshold}
    assert 3 < len(stay) < 27
    state, _ = collection.evict(state)
    assert set(programs.rows_of(collection, state)) == stay


def test_a_policy_of_the_call():
    """The policy of the call replaces the table's own, and applies to tables without a policy that keep statistics."""
    collection = two_tables(None, statistics=True)
    statistics = {"user": {key: (100 - key, key) for key in range(10)}, "item": {key: (key, 0) for key in range(5)}}
    state = fill(collection, {name: list(keys) for name, keys in statistics.items()}, statistics)
    state, _ = collection.evict(state, "user", LeastRecentlyUsed(), num_rows=4)
    assert set(programs.rows_of(collection, state)) == {0, 1, 2, 3}
    state, _ = collection.evict(state, None, LeastFrequentlyUsed(), num_rows=3)
    assert set(programs.rows_of(collection, state, "user")) == {1, 2, 3}
    assert set(programs.rows_of(collection, state, "item")) == set()
    state, stats = programs.learn(collection, state, programs.batch(collection, user=np.arange(3), item=np.arange(3)))
    assert {name: line["num_evicted"] for name, line in stats.to_dict().items()} == {"user": 0, "item": 0}


@pytest.mark.parametrize("back_end", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_words", [1, 2])
def test_more_rows_than_a_grid_has_threads(back_end, num_words):
    """Flags and counts of `select` equal those of a sort, in slabs of odd sizes with a tenth of the rows unused."""
    device = jax.devices("cpu" if back_end == "cpu" else "gpu")[0]
    rng, sizes = np.random.default_rng(num_words), (99_999, 300_001)
    capacity = sum(sizes)
    keys = rng.integers(0, 2**64, capacity, np.uint64)
    tables = rng.integers(0, 100, capacity).astype(np.uint32)
    keys[rng.random(capacity) < 0.1] = np.uint64(PADDING)
    scores = rng.integers(0, (2**32, 50)[num_words - 1], (num_words, capacity)).astype(np.uint32)
    records = np.stack([keys & np.uint64(2**32 - 1), keys >> np.uint64(32), tables, tables], axis=1).astype(np.uint32)
    order = np.lexsort((keys, tables, *scores[::-1]))
    order = order[keys[order] != np.uint64(PADDING)]
    run = jax.jit(evict.kernels.select, static_argnums=(4, 5))
    for table, num_kept in ((-1, 123_457), (-1, len(order) - 5), (17, 1000)):
        asked = order if table < 0 else order[tables[order] == table]
        gone = asked[: max(0, len(asked) - num_kept)]
        wanted = np.zeros(capacity, np.uint8)
        wanted[gone] = 1

        def cut(array):
            return tuple(jax.device_put(part, device) for part in np.split(array, [sizes[0]]))

        flags, counts = run(
            jax.device_put(np.uint32(num_kept), device), cut(records), tuple(map(cut, scores)), (), 100, table
        )
        np.testing.assert_array_equal(flags, wanted)
        np.testing.assert_array_equal(counts, np.bincount(tables[gone], minlength=100))


# --------------------------------------------------------------------------------------------------------------
# What leaves with a row


def test_freed_rows_are_reused_and_a_key_that_comes_back_starts_anew():
    """Rows are reused in ascending order, with the initial row, initial state and no statistics."""
    collection = programs.one_table(capacity=16, optimizer=jaxsok.optim.adam(0.1), eviction=LeastRecentlyUsed())
    keys = [50, 51, 52, 53, 54, 55]
    last = {50: 9, 51: 1, 52: 8, 53: 2, 54: 7, 55: 3}
    state = fill(collection, {"user": keys}, {"user": {key: (step, 5) for key, step in last.items()}})
    state, _ = collection.evict(state, num_rows=3)
    assert statistics_of(collection, state) == {50: (9, 5), 52: (8, 5), 54: (7, 5)}
    state = programs.insert(collection, state, [70, 53, 71, 72])
    after = programs.export(collection, state)
    assert {key: row_id for key, (row_id, _, _) in after.items()} == {50: 0, 70: 1, 52: 2, 53: 3, 54: 4, 71: 5, 72: 6}
    np.testing.assert_array_equal(after[53][1], programs.initial_rows("user", DIM, [53])[0])
    for state_of_53, state_of_72 in zip(after[53][2], after[72][2], strict=True):
        np.testing.assert_array_equal(state_of_53, state_of_72)  # a key whose row is new


def test_admission_begins_anew():
    """A key that was admitted and then evicted waits again; a key that waits keeps its count."""
    admission = policies.AdmitByCount(3)
    collection = programs.one_table(capacity=16, eviction=LeastRecentlyUsed(), admission=admission)
    state = collection.init(seed=0)
    for keys in ([1, 1, 2], [1, 2, 3]):
        state = programs.insert(collection, state, keys)
    assert set(programs.rows_of(collection, state)) == {1}
    state, _ = collection.evict(state, num_rows=0)
    state = programs.insert(collection, state, [1, 1, 2])
    assert set(programs.rows_of(collection, state)) == {2}
    state = programs.insert(collection, state, [1, 3, 4])
    assert set(programs.rows_of(collection, state)) == {1, 2}


def test_plans_of_before_are_stale():
    """An update with such plans changes nothing and is counted; if no row left, the plans are valid."""
    collection = programs.one_table(capacity=16, eviction=LeastRecentlyUsed())
    features = programs.batch(collection, user=np.arange(6))
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=0), features)
    gradients = {"user": jnp.ones_like(embeddings["user"])}
    state, _ = collection.evict(state, num_rows=6)
    state, stats = programs.update(collection)(state, plan, gradients)
    assert int(stats.num_stale) == 0
    _, state, plan = programs.lookup(collection)(state, features)
    state, _ = collection.evict(state, num_rows=5)
    before = programs.rows_of(collection, state)
    state, stats = programs.update(collection)(state, plan, gradients)
    assert (int(stats.num_stale), int(stats.num_misused_plans)) == (6, 0)
    with pytest.raises(jaxsok.StalePlanError, match="eviction"):
        stats.check()
    after = programs.rows_of(collection, state)
    assert before.keys() == after.keys()
    for key, row in before.items():
        np.testing.assert_array_equal(row, after[key])


def test_stats_count_evicted_rows():
    """Evicted rows count by table, from the first step on; a sum of Stats has the later count."""
    collection = collection_of(LeastRecentlyUsed())
    state = fill(collection, {"user": list(range(8)), "item": list(range(5))})
    state, _ = collection.evict(state, "user", num_rows=6)
    state, _ = collection.evict(state, "item", num_rows=1)
    features = programs.batch(collection, user=np.arange(3), item=np.arange(3))
    state, first = programs.learn(collection, state, features)
    assert {name: line["num_evicted"] for name, line in first.to_dict().items()} == {"user": 2, "item": 4}
    state, _ = collection.evict(state, "user", num_rows=0)
    state, second = programs.learn(collection, state, features)
    total = (first + second).to_dict()
    assert {name: line["num_evicted"] for name, line in total.items()} == {"user": 10, "item": 4}
    stores = (dataclasses.replace(state.stores[0], table_evicted=(jnp.array([2**32 - 2, 0], jnp.uint32),)),)
    state, _ = collection.evict(dataclasses.replace(state, stores=stores), "user", num_rows=0)
    _, third = programs.learn(collection, state, features)
    assert third.to_dict()["user"]["num_evicted"] == 1  # 2**32 - 2 and 3 more, modulo 2**32


# --------------------------------------------------------------------------------------------------------------
# What the caller receives


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_hand_over(monkeypatch, chunk_bytes):
    """Evicted and kept records together are the previous content: keys, rows, state, statistics, each once."""
    monkeypatch.setattr(evict, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(table_export, "UNPACKED_ROWS", 72)  # flags are looked through in several pieces
    collection = two_tables(LeastFrequentlyUsed())
    rng = np.random.default_rng(3)
    statistics = {
        name: {key: tuple(rng.integers(0, 9, 2).tolist()) for key in rng.integers(0, 2**62, 40).tolist()}
        for name in ("user", "item")
    }
    state = fill(collection, {name: list(keys) for name, keys in statistics.items()}, statistics)
    before = {name: programs.export(collection, state, name) for name in statistics}
    handed = {name: {} for name in statistics}
    sizes = []

    def hand_over(name, records):
        sizes.append(records.num_rows)
        for i, key in enumerate(records.keys.tolist()):
            assert key not in handed[name]
            states = [records.state[name][i] for name in ("m", "v")]
            handed[name][key] = (records.rows[i], states, (int(records.last_step[i]), int(records.frequency[i])))

    state, evicted = collection.evict(state, num_rows=30, hand_over=hand_over)
    assert sum(map(len, handed.values())) == 50 and sum(evicted.to_dict().values()) == 50
    if chunk_bytes == 1:
        assert sizes == [1] * 50
    for name, keys in statistics.items():
        assert handed[name].keys() | programs.export(collection, state, name).keys() == keys.keys()
        assert len(handed[name]) == evicted.to_dict()[name]
        for key, (row, states, of_key) in handed[name].items():
            np.testing.assert_array_equal(row, before[name][key][1])
            np.testing.assert_array_equal(states, before[name][key][2])
            assert of_key == keys[key]


def test_nothing_changes_if_the_caller_refuses():
    """An error of `hand_over` leaves the state unchanged and usable."""
    collection = collection_of(LeastRecentlyUsed())
    state = fill(collection, {"user": list(range(8)), "item": []})

    def refuse(name, records):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        collection.evict(state, num_rows=2, hand_over=refuse)
    assert collection.num_rows(state) == {"user": 8, "item": 0}
    with pytest.raises(TypeError, match="grow: hand_over: got 3, wanted a function"):
        collection.grow(state, hand_over=3)
    with pytest.raises(TypeError, match="hand_over: got one under a trace"):
        jax.jit(lambda state: collection.evict(state, num_rows=2, hand_over=refuse))(state)


# --------------------------------------------------------------------------------------------------------------
# Bad input


def test_nothing_changes_if_the_caller_refuses_while_another_store_grows():
    """The rows of a full store are handed over before a store with room to grow grows."""
    tables = [
        jaxsok.TableSpec("full", 4, jaxsok.optim.sgd(0.5), capacity=64, max_capacity=64, eviction=LeastRecentlyUsed()),
        jaxsok.TableSpec("open", 8, jaxsok.optim.sgd(0.5), capacity=64),
    ]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name in ("full", "open")])
    batch = collection.batch({"full": np.arange(40), "open": np.arange(40)})
    _, state, _ = collection.lookup(collection.init(seed=0), batch.features)

    def refuse(name, records):
        raise OSError("no room on the disk")

    with pytest.raises(OSError, match="no room on the disk"):
        collection.grow(state, hand_over=refuse)
    assert collection.num_rows(state) == {"full": 40, "open": 40}
    for name in ("full", "open"):
        assert sorted(collection.export_table(state, name)["keys"].tolist()) == list(range(40))
    handed = []
    state = collection.grow(state, hand_over=lambda name, records: handed.extend(records.keys.tolist()))
    assert handed
    assert collection.num_rows(state) == {"full": 40 - len(handed), "open": 40}
    assert [store.capacity for store in state.stores] == [64, 128]


@pytest.mark.parametrize(("start", "num_shards"), [(2**31 - 3, 1), (2**32 - 4, 2)])
def test_rows_are_ranked_where_the_step_ends(start, num_shards):
    """In six steps across an end, the least recently used rows leave, never the newest; ages do not wrap."""
    sgd = jaxsok.optim.sgd(0.5)
    tables = [
        jaxsok.TableSpec("ranked", 4, sgd, capacity=64, eviction=LeastRecentlyUsed()),
        jaxsok.TableSpec("timed", 2, sgd, capacity=64, eviction=TimeToLive(2)),
        jaxsok.TableSpec("counted", 3, sgd, capacity=64, eviction=LeastFrequentlyUsed()),
    ]
    collection = programs.over(num_shards, tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])
    state = collection.init(seed=0)
    state = dataclasses.replace(state, step=jax.device_put(jnp.uint32(start), state.step.sharding))
    last_step = {}
    for i in range(6):
        keys = np.array([100 + i, 50 - i])  # the order of keys differs from that of steps
        embeddings, state, plan = collection.lookup(state, collection.batch({t.name: keys for t in tables}).features)
        last_step |= dict.fromkeys(keys.tolist(), int(state.step))
        state, _ = collection.update(state, plan, embeddings)
        assert int(state.step) == min(start + i + 1, 2**32 - 1)
    assert list(last_step.values()) == [min(start + i // 2, 2**32 - 1) for i in range(12)]
    state, _ = collection.evict(state, num_rows=4)
    left = {table.name: set(collection.export_table(state, table.name)["keys"].tolist()) for table in tables}
    ranked = sorted(last_step, key=lambda key: (last_step[key], key))
    if num_shards == 1:  # shards keep equal shares
        assert left["ranked"] == left["counted"] == set(ranked[-4:])
    oldest = min(last_step[key] for key in left["ranked"])
    assert oldest >= min(start + 3, 2**32 - 1) and {105, 45} & left["ranked"]
    assert left["timed"] == {key for key in last_step if int(state.step) - last_step[key] <= 2}


@pytest.mark.parametrize("now", [2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_clocks_of_the_users_own_at_the_ends(now):
    """Last uses and ages are plain unsigned numbers."""
    tables = [jaxsok.TableSpec("timed", 2, jaxsok.optim.sgd(0.5), capacity=64, eviction=TimeToLive(5))]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("timed", "timed")])
    state = collection.init(seed=0)
    for age in (0, 5, 6, 2**30):
        _, state, _ = collection.lookup(state, collection.batch({"timed": np.array([age])}).features, clock=now - age)
    ranked, _ = collection.evict(jax.tree.map(jnp.copy, state), "timed", LeastRecentlyUsed(), num_rows=2, clock=now)
    assert collection.export_table(ranked, "timed")["keys"].tolist() == [0, 5]
    state, _ = collection.evict(state, clock=now)
    assert sorted(collection.export_table(state, "timed")["keys"].tolist()) == [0, 5]


def test_tables_of_two_policies_share_no_store():
    """Each of two tables that differ only in the policy loses the rows that its own policy selects."""
    sgd = jaxsok.optim.sgd(0.5)
    policies = {"ranked": LeastRecentlyUsed(), "timed": TimeToLive(1)}
    tables = [jaxsok.TableSpec(name, 2, sgd, capacity=8, eviction=policy) for name, policy in policies.items()]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, name) for name in policies])
    state = collection.init(seed=0)
    for clock in (0, 1, 5):
        batch = collection.batch(dict.fromkeys(policies, np.array([clock])))
        _, state, _ = collection.lookup(state, batch.features, clock=clock)
    state, evicted = collection.evict(state, num_rows=2, clock=5)
    assert evicted.to_dict() == {"ranked": 1, "timed": 2}


def test_each_store_goes_by_its_own_policy():
    """Stores that rank keep the budget, the others lose expired rows; a budget is required if any store ranks."""
    sgd = jaxsok.optim.sgd(0.5)
    tables = [
        jaxsok.TableSpec("ranked", 4, sgd, capacity=64, eviction=LeastRecentlyUsed()),
        jaxsok.TableSpec("rare", 8, sgd, capacity=64, eviction=LeastFrequentlyUsed()),
        jaxsok.TableSpec("timed", 2, sgd, capacity=64, eviction=TimeToLive(3)),
        jaxsok.TableSpec("kept", 3, sgd, capacity=64),
    ]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])
    state = collection.init(seed=0)
    for clock, keys in ((0, np.arange(6)), (5, np.arange(2, 8))):
        features = collection.batch({table.name: keys for table in tables}).features
        _, state, _ = collection.lookup(state, features, clock=clock)
    with pytest.raises(ValueError, match="num_rows: got None with LeastRecentlyUsed"):
        collection.evict(state, clock=5)
    handed = {}
    state, evicted = collection.evict(
        state, num_rows=3, clock=5, hand_over=lambda name, records: handed.update({name: records.keys.tolist()})
    )
    assert evicted.to_dict() == {"ranked": 5, "rare": 5, "timed": 2, "kept": 0}
    left = {table.name: set(collection.export_table(state, table.name)["keys"].tolist()) for table in tables}
    # By last step and key; by frequency and key; last used at 5 - 3 or later.
    assert left == {"ranked": {5, 6, 7}, "rare": {3, 4, 5}, "timed": set(range(2, 8)), "kept": set(range(8))}
    assert handed["timed"] == [0, 1] and set(handed) == {"ranked", "rare", "timed"}


def test_refusals():
    """Each message states the actual and the expected value."""
    none, lru, ttl = two_tables(None), collection_of(LeastRecentlyUsed()), collection_of(TimeToLive(10))
    for collection, arguments, options, message in (
        (none, (), {"num_rows": 1}, "policy: got None, and every table was declared without one"),
        (none, ("user",), {"num_rows": 1}, 'policy: got None, and table "user" was declared without one'),
        (none, ("user", LeastRecentlyUsed()), {"num_rows": 1}, "keep no statistics"),
        (lru, ("nobody",), {"num_rows": 1}, "table: got 'nobody'"),
        (lru, (), {}, "num_rows: got None with LeastRecentlyUsed"),
        (lru, (), {"num_rows": -1}, "num_rows: got -1"),
        (lru, (), {"num_rows": 1, "clock": 2**32}, "clock: got 4294967296"),
        (ttl, (), {"num_rows": 1}, "num_rows: got 1 with TimeToLive"),
        (lru, ("user", 3), {"num_rows": 1}, "policy: got 3"),
        (lru, ("user", policies.Eviction()), {"num_rows": 1}, "policy: got Eviction"),
        (lru, (), {"num_rows": 2.0}, "num_rows: got 2.0"),
        (lru, (), {"num_rows": 1, "clock": jnp.zeros(2, jnp.uint32)}, "clock: got uint32"),
        (lru, (), {"num_rows": 1, "hand_over": "log"}, "hand_over: got 'log'"),
        (
            lru,
            (None, LowestScore(lambda facts: facts.last_step.astype(jnp.float32))),
            {"num_rows": 1},
            "got scores float32",
        ),
        (lru, (None, LowestScore(lambda facts: (facts.last_step,) * 3)), {"num_rows": 1}, "got 3 scores"),
    ):
        state = collection.init(seed=0)
        with pytest.raises((TypeError, ValueError), match=r"^evict: ") as raised:
            collection.evict(state, *arguments, **options)
        assert message in str(raised.value)
        collection.num_rows(state)  # the state still exists


# --------------------------------------------------------------------------------------------------------------
# Programs


def test_under_jit_with_donation_nothing_moves():
    """Nothing moves (law 9), in a direct call and inside a program; the budget and the clock may be traced."""
    collection = two_tables(LeastRecentlyUsed(), capacity=1 << 10)
    state = fill(collection, {"user": list(range(40)), "item": list(range(30))})
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)]
    state, evicted = collection.evict(state, num_rows=60)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)] == before
    assert sum(evicted.to_dict().values()) == 10

    @functools.partial(jax.jit, donate_argnums=0)
    def program(state, num_rows, clock):
        return collection.evict(state, num_rows=num_rows, clock=clock)

    state, evicted = program(state, jnp.uint32(50), jnp.uint32(7))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)] == before
    assert sum(evicted.to_dict().values()) == 10
    handed = []
    state, _ = collection.evict(state, num_rows=45, hand_over=lambda *arguments: handed.append(arguments))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)] == before
    assert sum(records.num_rows for _, records in handed) == 5


def test_gradients_do_not_go_through():
    """The error message uses the terms of the call."""
    collection = collection_of(LeastRecentlyUsed())
    state = collection.init(seed=0)

    def loss(rows):
        store = dataclasses.replace(state.stores[0], rows=(rows,))
        after, _ = collection.evict(dataclasses.replace(state, stores=(store,)), num_rows=1)
        return after.stores[0].rows[0].sum()

    with pytest.raises(TypeError, match="evict: state: got a derivative"):
        jax.grad(loss)(state.stores[0].rows[0])


# --------------------------------------------------------------------------------------------------------------
# Several shards


@functools.cache
def over_shards(num_shards, **spec):
    """Declares a sharded table, a table on one shard in the same store, and a replicated table."""
    spec = {"capacity": 256, "eviction": LeastRecentlyUsed(), **spec}
    sgd = jaxsok.optim.adagrad(0.1)
    tables = [
        jaxsok.TableSpec("user", DIM, sgd, **spec),
        jaxsok.TableSpec("item", DIM, sgd, placement=jaxsok.on(num_shards - 1), **spec),
        jaxsok.TableSpec("ad", DIM, sgd, placement=jaxsok.REPLICATED, **spec),
    ]
    return programs.over(num_shards, tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])


def by_shard(collection, state, name):
    """Returns the keys of a table on each shard."""
    table = collection.export_table(state, name)
    shards = table.get("shards", np.zeros(len(table["keys"]), np.uint32))
    num_shards = collection.stores[0].num_shards
    return [set(table["keys"][shards == shard].tolist()) for shard in range(num_shards)]


def fair_shares(sizes, num_rows):
    """Removes rows one at a time from the fullest shard, or the first of equally full shards: the oracle."""
    sizes = list(sizes)
    while sum(sizes) > num_rows:
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


@pytest.mark.parametrize(("num_shards", "num_rows"), [(2, 0), (2, 90), (4, 17)])
def test_shards_share_a_budget(num_shards, num_rows):
    """Exactly so many rows stay in total; each shard keeps its best, and shards are as even as possible."""
    collection = over_shards(num_shards)
    rng = np.random.default_rng(num_rows)
    statistics = {
        name: {key: (int(rng.integers(0, 30)), 1) for key in rng.choice(10_000, size, replace=False).tolist()}
        for name, size in (("user", 60), ("item", 50), ("ad", 40))
    }
    keys = {name: list(of_table) + [PADDING] * (64 - len(of_table)) for name, of_table in statistics.items()}
    state = fill(collection, keys, statistics)
    before = {name: by_shard(collection, state, name) for name in statistics}
    state = jax.tree.map(jnp.copy, state)  # of whose memory NumPy has no view, which JAX 0.11 would leave in place
    places = programs.places_of(state)
    handed = {name: [] for name in statistics}
    state, evicted = collection.evict(
        state, num_rows=num_rows, hand_over=lambda name, records: handed[name].extend(records.keys.tolist())
    )
    after = {name: by_shard(collection, state, name) for name in statistics}
    # "user" and "item" share a store.
    sizes = [len(before["user"][shard]) + len(before["item"][shard]) for shard in range(num_shards)]
    for shard, share in enumerate(fair_shares(sizes, num_rows)):
        of_shard = [
            (number, {key: statistics[name][key] for key in before[name][shard]})
            for number, name in enumerate(("user", "item"))
        ]
        stay = survivors(LeastRecentlyUsed(), of_shard, share)
        assert after["user"][shard] == stay[0] and after["item"][shard] == stay[1]
    stay = survivors(LeastRecentlyUsed(), [(0, statistics["ad"])], num_rows)[0]
    assert set().union(*after["ad"]) == stay
    for name, of_table in statistics.items():
        gone = set(of_table) - set().union(*after[name])
        assert evicted.to_dict()[name] == len(gone)
        assert sorted(handed[name]) == sorted(gone)
    assert collection.num_rows(state) == {name: len(set().union(*after[name])) for name in statistics}
    assert programs.places_of(state) == places


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_one_device(axis_type):
    """A mesh of one device equals one device, also if the axes of its mesh are part of types."""
    tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.1), capacity=32, eviction=LeastRecentlyUsed())]
    collection = programs.over(1, tables, [jaxsok.FeatureSpec("user", "user")], axis_type=axis_type)
    statistics = {key: (key % 5, 0) for key in range(20)}
    state = fill(collection, {"user": list(statistics)}, {"user": statistics})
    state, evicted = collection.evict(state, num_rows=7)
    assert set(programs.rows_of(collection, state)) == survivors(LeastRecentlyUsed(), [(0, statistics)], 7)[0]
    assert evicted.to_dict() == {"user": 13}


def test_one_table_on_a_mesh_and_stale_plans():
    """A plan is stale on all shards, including shards that lost no row, inside and outside a program."""
    collection = over_shards(4)
    features = programs.batch(
        collection, user=np.arange(64), item=np.arange(64) % 5, ad=np.full(64, PADDING, np.uint64)
    )
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=0), features)
    state = with_statistics(collection, state, {"item": {key: (key, 0) for key in range(5)}})
    state, evicted = jax.jit(lambda state: collection.evict(state, "item", num_rows=2))(state)
    assert evicted.to_dict() == {"user": 0, "item": 3, "ad": 0}
    assert set().union(*by_shard(collection, state, "item")) == {3, 4}
    assert collection.num_rows(state)["user"] == 64
    generations = np.asarray(state.stores[0].counters).reshape(4, -1)[:, 3]
    np.testing.assert_array_equal(generations, 1)
    state, stats = programs.update(collection)(state, plan, jax.tree.map(jnp.ones_like, embeddings))
    assert int(stats.num_stale) == 128
    assert stats.to_dict()["item"]["num_evicted"] == 3
    state, _ = collection.evict(state, "ad", num_rows=0)
    np.testing.assert_array_equal(np.asarray(state.stores[0].counters).reshape(4, -1)[:, 3], 1)


def test_inside_shard_map():
    """Eviction works on a shard's part, like the other calls."""
    collection = over_shards(2)
    state = fill(collection, {name: list(range(40)) for name in ("user", "item", "ad")})
    of_state = specs_of(collection.shards, state)

    def part(state):
        state, evicted = collection.evict(state, "user", num_rows=10)
        return state, evicted

    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(part, mesh=programs.mesh(2), in_specs=(of_state,), out_specs=(of_state, spec()))
    state, evicted = jax.jit(run, donate_argnums=0)(state)
    assert evicted.to_dict() == {"user": 30, "item": 0, "ad": 0}
    assert collection.num_rows(state) == {"user": 10, "item": 40, "ad": 40}


# --------------------------------------------------------------------------------------------------------------
# Ahead of need


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), LeastFrequentlyUsed()])
def test_a_full_store_never_refuses(policy):
    """In many steps with four times as many keys as rows, no key is refused, and the policy's choice stays."""
    capacity, batch = 64, 8
    collection = programs.one_table(capacity=16, max_capacity=capacity, eviction=policy)
    state, present, rng = collection.init(seed=0), {}, np.random.default_rng(0)
    num_gone = 0
    for step in range(60):
        keys = np.minimum(rng.zipf(1.3, batch), 4 * capacity) if step % 3 else rng.integers(0, 4 * capacity, batch)
        features = programs.batch(collection, user=keys)
        state = collection.grow(state)
        if state.stores[0].capacity == capacity and len(present) + batch > capacity:
            stay = survivors(policy, [(0, present)], capacity - batch - capacity // 16)[0]
            num_gone += len(present) - len(stay)
            present = {key: present[key] for key in stay}
        assert set(programs.rows_of(collection, state)) == set(present)
        state, stats = programs.learn(collection, state, features)
        stats.check()
        counts = stats.to_dict()["user"]
        assert counts["num_refused"] == 0
        assert counts["num_rows"] <= capacity
        assert counts["num_evicted"] == num_gone
        for key in keys.tolist():
            present[key] = (step, present.get(key, (0, 0))[1] + 1)
        assert statistics_of(collection, state) == present
    assert num_gone > 100
    assert collection.growth.num_evictions > 5


def test_the_batch_that_is_coming_decides():
    """With 1,682 items, 1,400 rows and 1,024 positions a step, only what the new keys and a slack need leaves."""
    capacity, slack = 1400, 88
    sgd = jaxsok.optim.sgd(0.1)
    table = jaxsok.TableSpec("item", 4, sgd, capacity=64, max_capacity=capacity, eviction=LeastRecentlyUsed())
    feature = jaxsok.FeatureSpec("item", "item", combiner="sum", max_keys=1024)
    collection = jaxsok.Collection([table], [feature])
    state, present, num_gone, rng = collection.init(seed=0), {}, 0, np.random.default_rng(0)
    shares = 1 / np.arange(1, 1683) ** 0.7
    for step in range(36):
        keys = rng.choice(1682, 300, p=shares / shares.sum())
        batch = collection.batch({"item": jaxsok.Bags(keys, lengths=np.full(100, 3))})
        asked = set(keys.tolist())
        num_new = len(asked - present.keys())
        if len(present) + num_new > capacity:
            others = sorted((last, key) for key, last in present.items() if key not in asked)
            for _, key in others[: len(present) - (capacity - num_new - slack)]:
                del present[key]
                num_gone += 1
            assert len(present) >= capacity - num_new - slack
        state = collection.grow(state, batch)
        assert set(programs.rows_of(collection, state, "item")) == present.keys()
        embeddings, state, plan = programs.lookup(collection)(state, batch.features)
        state, stats = programs.update(collection)(state, plan, embeddings)
        stats.check()
        present |= dict.fromkeys(asked, step)
    assert num_gone > 200 and programs.total(stats, "num_evicted") == num_gone
    assert state.stores[0].capacity == capacity


LATE_ROWS, LATE_BATCH = 4800, 100


def late_collection(**spec):
    """Declares a full table that is large against its batches, and another that grows."""
    sgd = jaxsok.optim.sgd(0.1)
    bounded = {"capacity": LATE_ROWS, "max_capacity": LATE_ROWS, "eviction": LeastRecentlyUsed(), **spec}
    tables = [jaxsok.TableSpec("item", 4, sgd, **bounded), jaxsok.TableSpec("user", 8, sgd, capacity=64)]
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])


def late_keys(step):
    """Returns keys of a batch; the first 48 steps fill the table, then a third of the keys are new."""
    fresh = LATE_BATCH * step + np.arange(LATE_BATCH)
    return (
        fresh if step < 48 else np.where(np.arange(LATE_BATCH) % 3 == 0, fresh, 47 * LATE_BATCH + np.arange(LATE_BATCH))
    )


def late_step(collection, state, step, *, is_given=True):
    """Takes a step; returns the state and the keys of the bounded table."""
    batch = collection.batch({"item": late_keys(step), "user": late_keys(step) % 500})
    state = collection.grow(state, batch) if is_given else collection.grow(state)
    state, stats = programs.learn(collection, state, batch.features)
    stats.check()
    assert stats.to_dict()["item"]["num_refused"] == 0
    return state


class LateOracle:
    """Which rows are in a full table, by a dictionary: it knows the rows in use two calls ago."""

    def __init__(self):
        self.last, self.looks, self.num_evictions = {}, [], 0

    def step(self, step):
        """Applies the rule before a step, and then the step."""
        number, keys = len(self.looks), late_keys(step).tolist()
        if self.looks:
            # The newest look that is two calls old, or was made by an eviction.
            usable = [look for look in self.looks if look is not None and look[0] <= number]
            _, rows, then = usable[-1]
            bound = rows + (number - then) * LATE_BATCH
        else:
            bound = 0
        look = (0, 0, 0) if not self.looks else None
        if bound + LATE_BATCH > LATE_ROWS:
            kept = LATE_ROWS - 3 * LATE_BATCH - LATE_ROWS // 16
            others = sorted((last, key) for key, last in self.last.items() if key not in keys)
            for _, key in others[: len(self.last) - kept]:
                del self.last[key]
            self.num_evictions += 1
            self.looks = [None] * number
            look = (number, kept, number)
        elif bound + 3 * LATE_BATCH > LATE_ROWS:
            look = (number + 2, len(self.last), number)
        self.looks.append(look)
        self.last |= dict.fromkeys(keys, step)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_large_full_store_decides_by_earlier_counters(is_given):
    """It evicts at the calls of the rule, loses no key, and waits for no step."""
    collection, oracle = late_collection(), LateOracle()
    state = collection.init(seed=0)
    waits = None
    for step in range(150):
        state = late_step(collection, state, step, is_given=is_given)
        oracle.step(step)
        if step == 60:
            waits = collection.growth.num_waits
        if step % 10 == 9 or step > 120:
            assert set(programs.rows_of(collection, state, "item")) == oracle.last.keys()
        assert collection.growth.num_evictions == oracle.num_evictions
    assert oracle.num_evictions >= 5
    assert collection.growth.num_waits == waits


def test_late_decisions_do_not_depend_on_what_has_arrived(monkeypatch):
    """The counters are there, or are not: the same rows leave at the same calls."""
    found = []
    for is_ready in (True, False):
        monkeypatch.setattr(grow, "is_at_rest", lambda state, shards, is_ready=is_ready: is_ready)
        collection = late_collection()
        state, history = collection.init(seed=0), []
        for step in range(110):
            state = late_step(collection, state, step)
            history.append((collection.growth.num_evictions, collection.num_rows(state)["item"]))
        found.append((history, set(programs.rows_of(collection, state, "item"))))
    assert found[0] == found[1] and found[0][0][-1][0] >= 2


def test_a_store_that_still_grows_decides_late_too():
    """The bound counts, not the capacity at the time: a store that begins small ends with the same rows."""
    found = []
    for capacity in (LATE_ROWS, 64):
        collection = late_collection(capacity=capacity)
        state, evictions = collection.init(seed=0), []
        for step in range(100):
            state = late_step(collection, state, step)
            evictions.append(collection.growth.num_evictions)
        found.append((evictions, programs.rows_of(collection, state, "item").keys()))
    assert found[0] == found[1] and found[0][0][-1] >= 2


def test_a_larger_batch_of_a_large_full_store():
    """A batch for which the reserve is too small is counted, and loses no key."""
    collection = late_collection()
    state = collection.init(seed=0)
    for step in range(80):
        state = late_step(collection, state, step)
        if step % 10 == 7:
            keys = 10**6 + 1000 * step + np.arange(700)
            batch = collection.batch({"item": keys, "user": keys % 500})
            state = collection.grow(state, batch)
            state, stats = programs.learn(collection, state, batch.features)
            stats.check()
            assert stats.to_dict()["item"]["num_refused"] == 0
            assert set(keys.tolist()) <= programs.rows_of(collection, state, "item").keys()
    assert collection.growth.num_evictions >= 4


def test_no_memory_for_another_table_leaves_a_full_store_as_it_is(monkeypatch):
    """A late eviction comes after everything that may fail: no row has left, and the state can be used."""
    collection, handed = late_collection(), []
    state = collection.init(seed=0)
    for step in range(48):
        state = late_step(collection, state, step)
    before = set(programs.rows_of(collection, state, "item"))
    keys = {"item": late_keys(48), "user": 10**6 + np.arange(100)}
    crowded = collection.batch({**keys, "user": jaxsok.Bags(10**6 + np.arange(5000), lengths=np.full(100, 50))})
    monkeypatch.setattr(enlarge, "free_bytes", lambda: 10)
    for _ in range(2):
        with pytest.raises(MemoryError, match="user"):
            collection.grow(state, crowded, hand_over=lambda *arguments: handed.append(arguments))
        assert not handed and not state.stores[0].counters.is_deleted()
    monkeypatch.undo()
    assert set(programs.rows_of(collection, state, "item")) == before
    state = collection.grow(state, crowded, hand_over=lambda *arguments: handed.append(arguments))
    state, stats = programs.learn(collection, state, crowded.features)
    stats.check()
    assert handed and collection.growth.num_evictions == 1


def test_waiting_keys_of_a_large_full_store_are_bounded(monkeypatch):
    """An eviction tells nothing of the keys that wait: their bound goes on from the last time they were counted."""
    monkeypatch.setattr(grow, "is_at_rest", lambda state, shards: False)
    spec = {"capacity": 2400, "max_capacity": 2400, "eviction": LeastRecentlyUsed()}
    collection = programs.one_table(**spec, admission=policies.AdmitByCount(2))
    state = collection.init(seed=0)
    for step in range(130):
        new, once = 10**6 + 30 * step + np.arange(30), 10**9 + 40 * step + np.arange(40)
        batch = collection.batch({"user": np.concatenate([new, new, once])})
        state = collection.grow(state, batch)
        bound = collection.growth.sightings_bound(0)
        assert bound is None or bound >= int(state.stores[0].counters[COUNTERS.index("num_sightings")])
        state, stats = programs.learn(collection, state, batch.features)
        stats.check()
    assert collection.growth.num_evictions >= 4


@functools.cache
def small_and_full(policy, num_shards, **spec):
    """Declares a table of 24 rows, of which a batch uses at most 12, and a replicated table on a mesh."""
    spec = {"capacity": 24, "max_capacity": 24, "eviction": policy, **spec}
    tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.5), **spec)]
    if num_shards > 1:
        tables.append(
            jaxsok.TableSpec("ad", DIM, jaxsok.optim.sgd(0.5), placement=jaxsok.REPLICATED, **spec),
        )
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    return programs.over(num_shards, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)


@pytest.mark.parametrize(
    ("policy", "num_shards"),
    [(LeastRecentlyUsed(), 1), (LeastFrequentlyUsed(), 1), (TimeToLive(0), 1), (LeastRecentlyUsed(), 2)],
)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), together=st.integers(1, 2), num_keys=st.integers(20, 80))
def test_what_a_batch_asks_for_stays(policy, num_shards, seed, together, num_keys):
    """Rows that any of the batches use never leave for them, and no key is refused while all fit."""
    collection = small_and_full(policy, num_shards)
    state, rng = collection.init(seed=0), np.random.default_rng(seed)
    names = [table.name for table in collection.tables]
    num_evictions = collection.growth.num_evictions
    for _ in range(6):
        coming = [rng.integers(0, num_keys, 12) for _ in range(together)]
        coming = [np.where(rng.random(12) < 0.2, -1, keys) for keys in coming]
        packed = [collection.batch(dict.fromkeys(names, keys)) for keys in coming]
        asked = {key for keys in coming for key in keys.tolist()} - {-1}
        before = {name: programs.rows_of(collection, state, name) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if isinstance(policy, TimeToLive) else "error")
            state = collection.grow(state, packed)
        after = {name: programs.rows_of(collection, state, name) for name in names}
        for name in names:
            assert before[name].keys() & asked == after[name].keys() & asked
        for batch in packed:
            state, stats = programs.learn(collection, state, batch.features)
            if policy.has_score:
                stats.check()
    assert num_keys < 40 or collection.growth.num_evictions > num_evictions


def test_keys_that_admission_keeps_out_need_no_room():
    """Only counted keys that reach the threshold in this batch need room."""
    admission = policies.AdmitByCount(3)
    spec = {"capacity": 32, "max_capacity": 32, "eviction": LeastRecentlyUsed(), "admission": admission}
    collection = programs.one_table(**spec)
    state = collection.init(seed=0)
    first = collection.batch({"user": np.repeat(np.arange(30), 3)})
    _, state, _ = programs.lookup(collection)(collection.grow(state, first), first.features)
    assert collection.num_rows(state) == {"user": 30}
    once = collection.batch({"user": np.concatenate([np.arange(100, 160), np.full(30, -1)])})
    state = collection.grow(state, once)
    assert collection.num_rows(state) == {"user": 30}
    _, state, _ = programs.lookup(collection)(state, once.features)
    again = collection.batch({"user": np.concatenate([[100] * 2, np.arange(200, 288)])})
    state = collection.grow(state, again)
    assert collection.num_rows(state) == {"user": 30}  # 100 is seen for the third time
    more = collection.batch({"user": np.concatenate([[101] * 2, [102] * 2, [103] * 2, np.full(84, 7)])})
    _, state, _ = programs.lookup(collection)(state, again.features)
    state = collection.grow(state, more)
    assert collection.num_rows(state) == {"user": 32 - 3 - 2}
    _, state, _ = programs.lookup(collection)(state, more.features)
    rows = programs.rows_of(collection, state)
    assert {7, 101, 102, 103} <= set(rows) and len(rows) == 32 - 2


def test_scores_of_the_users_own_do_not_outrank_a_batch():
    """Rows that the batch uses stay even if all others have the highest possible score."""
    for policy in (LowestScore(highest), LowestScore(both_highest)):
        collection = programs.one_table(capacity=16, max_capacity=16, eviction=policy)
        state = programs.insert(collection, collection.init(seed=0), range(16))
        batch = collection.batch({"user": np.array([*range(12, 16), 20, 21, 22, 23])})
        state = collection.grow(state, batch)
        assert set(range(12, 16)) <= set(programs.rows_of(collection, state))


def highest(facts):
    """Returns one word, the highest for all rows."""
    return jnp.full_like(facts.last_step, 0xFFFFFFFF)


def both_highest(facts):
    """Returns two words."""
    return highest(facts), highest(facts)


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), TimeToLive(1000)])
def test_a_batch_that_cannot_fit_gives_a_remedy(policy):
    """The warning appears once, with the numbers; its advice to set a score is omitted if the policy has one."""
    collection = programs.one_table(capacity=16, max_capacity=16, eviction=policy)
    state = programs.insert(collection, collection.init(seed=0), range(16))
    batch = collection.batch({"user": np.arange(100, 120)})
    in_use = 0 if policy.has_score else 16
    with pytest.warns(RuntimeWarning) as warned:
        state = collection.grow(state, batch)
    (message,) = (str(warning.message) for warning in warned)
    assert f"got {in_use} rows in use after eviction by {policy!r} and 20 new keys coming" in message
    assert "wanted at most 16 together (max_capacity)" in message and "a smaller max_keys" in message
    assert ("a policy with a score" in message) != policy.has_score
    assert "-" not in message.replace("jaxsok-", "")
    collection.grow(state, batch)  # there is no second warning


def test_rows_kept():
    """The new rows fit, with a slack of a sixteenth; if the number is only a bound, a quarter stays."""
    for capacity in range(1, 200, 7):
        for new in range(0, 2 * capacity, 3):
            kept = grow.num_rows_to_keep(capacity, new, is_exact=True)
            assert 0 <= kept and (kept == 0 or capacity - new - kept == (capacity + 15) // 16)
            assert grow.num_rows_to_keep(capacity, new) == max(kept, capacity // 4)


def test_batches_larger_than_a_store_do_not_empty_it():
    """A batch may have more positions than the store has rows: some rows stay, whatever the batch contains."""
    policy = jaxsok.policies.AdmitByCount(3)
    collection = programs.one_table(capacity=4, max_capacity=4, eviction=LeastRecentlyUsed(), admission=policy)
    features = programs.batch(collection, user=np.repeat(np.arange(4), 3))
    _, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
    assert collection.num_rows(state) == {"user": 4}
    with pytest.warns(RuntimeWarning, match="after eviction"):
        state = collection.grow(state)
    assert collection.num_rows(state) == {"user": 1}


def test_full_shards_never_refuse():
    """On a mesh each shard makes its own room; the caller receives the rows that leave."""
    collection = over_shards(2, capacity=64, max_capacity=64)
    state, seen, handed = collection.init(seed=0), set(), []
    for step in range(9):
        keys = np.arange(32) + 32 * step
        features = programs.batch(collection, user=keys, item=keys % 40, ad=keys)
        state = collection.grow(state, hand_over=lambda name, records: handed.extend((name, k) for k in records.keys))
        state, stats = programs.learn(collection, state, features)
        stats.check()
        assert programs.total(stats, "num_refused") == 0
        seen |= {(name, key) for name, key in zip(["user"] * 32 + ["ad"] * 32, [*keys, *keys], strict=True)}
        state = with_statistics(
            collection, state, {name: {key: (key, 0) for key in range(32 * 9)} for name in ("user", "ad", "item")}
        )
    kept = {(name, key) for name in ("user", "ad") for part in by_shard(collection, state, name) for key in part}
    gone = {(name, int(key)) for name, key in handed if name != "item"}
    assert gone and kept | gone == seen and not kept & gone
    evicted = {name: line["num_evicted"] for name, line in stats.to_dict().items()}
    assert evicted["user"] == sum(name == "user" for name, _ in gone)
    assert evicted["ad"] == sum(name == "ad" for name, _ in gone)


def test_time_to_live_makes_room_by_a_users_clock():
    """Expired rows leave; if that frees too little, one warning reports it and keys may be refused."""
    collection = programs.one_table(capacity=32, max_capacity=32, eviction=TimeToLive(100))
    state = collection.init(seed=0)
    lookup = jax.jit(lambda state, features, clock: collection.lookup(state, features, clock=clock))
    for hour in range(8):
        features = programs.batch(collection, user=np.arange(8) + 8 * hour)
        state = collection.grow(state, clock=50 * hour)
        embeddings, state, plan = lookup(state, features, np.uint32(50 * hour))
        state, stats = programs.update(collection)(state, plan, embeddings)
        stats.check()
        # Room for four hours; in the fifth hour rows that are more than two hours old leave.
        assert min(programs.rows_of(collection, state)) == 8 * (0 if hour < 4 else 2 if hour < 6 else 4)
    assert collection.growth.num_evictions == 2
    state = programs.insert(collection, state, range(100, 108))
    state = programs.insert(collection, state, range(108, 116))
    with pytest.warns(RuntimeWarning, match="rows in use after eviction by TimeToLive"):
        state = collection.grow(state, clock=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = collection.grow(state, clock=0)


def test_steps_in_one_program():
    """steps=k keeps the reserve of k steps."""
    collection = programs.one_table(capacity=64, max_capacity=64, eviction=LeastRecentlyUsed())
    state = programs.insert(collection, collection.init(seed=0), range(60), grow=True)
    programs.batch(collection, user=np.arange(4))
    collection.growth.keys_per_step[0] = 4
    state = collection.grow(state, steps=6)
    assert collection.num_rows(state) == {"user": 36}  # of 64, less 24 keys and a slack of 4
    state = collection.grow(state, steps=6)
    assert collection.num_rows(state) == {"user": 36}

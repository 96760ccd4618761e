"""The planner: its counts against NumPy and against the exchange, its choices, refusals and printed tables."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import REPLICATED, SHARDED, Bags, ExchangeSpec, FeatureSpec, TableSpec, on, propose
from jaxsok.printed import format_bytes

SGD = jaxsok.optim.sgd(0.1)


def specs(**rows):
    """Returns tables of dim 8 with these numbers of rows, each with a feature of its name."""
    tables = [TableSpec(name, 8, SGD, capacity=capacity) for name, capacity in rows.items()]
    return tables, [FeatureSpec(name, table=name) for name in rows]


def placements(proposal):
    return [table.placement for table in proposal.tables]


# Traffic -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "num_keys"), [(10, 4), (100, 300), (5000, 1000), (50, 5000)])
def test_distinct_keys_of_uniform_draws(num_rows, num_keys):
    proposal = propose(*specs(item=num_rows), num_shards=4, keys_per_step=num_keys)
    rng = np.random.default_rng(0)
    drawn = [np.unique(rng.integers(0, num_rows, num_keys)).size for _ in range(400)]
    # The exponential approximates (1 - 1/R)^K: at most one key of ten too few; the mean of the draws varies by less.
    assert proposal.lines[0].distinct_keys == pytest.approx(np.mean(drawn), abs=0.02 * min(num_rows, num_keys) + 0.3)


def test_features_of_one_table_are_counted_together():
    tables = [TableSpec("item", 8, SGD, capacity=100)]
    features = [FeatureSpec("history", table="item"), FeatureSpec("clicked", table="item")]
    (line,) = propose(tables, features, num_shards=2, keys_per_step={"history": 60, "clicked": 40}).lines
    assert line.keys == 100
    assert line.distinct_keys == pytest.approx(100 * (1 - np.exp(-1)))


def test_max_keys_stands_for_keys_per_step():
    tables = [TableSpec("item", 8, SGD, capacity=100)]
    (line,) = propose(tables, [FeatureSpec("item", table="item", max_keys=80)], num_shards=4).lines
    assert line.keys == 20


def test_a_sample_is_counted():
    tables = [TableSpec("user", 8, SGD), TableSpec("item", 8, SGD)]
    features = [FeatureSpec("user", "user"), FeatureSpec("clicked", "item"), FeatureSpec("history", "item")]
    sample = {
        "user": np.array([7, 7, -1, 8]),  # by device: [7, 7] and [padding, 8]
        "clicked": np.array([[1, 2], [2, -1], [5, 6], [7, 8]]),  # [1, 2, 2] and [5, 6, 7, 8]
        "history": Bags(np.array([1, 1, 9, 5, 5]), lengths=np.array([2, 0, 1, 2])),  # [1, 1] and [9, 5, 5]
    }
    user, item = propose(tables, features, num_shards=2, sample=sample).lines
    assert (user.keys, user.distinct_keys) == (1.5, 1.0)
    assert (item.keys, item.distinct_keys) == ((5 + 7) / 2, (2 + 5) / 2)


def test_a_sample_is_counted_as_the_exchange_counts():
    rng = np.random.default_rng(1)
    tables, features = specs(user=10_000, item=50)
    sample = {"user": rng.zipf(1.3, 1024) % 10_000, "item": rng.integers(0, 50, (1024, 3))}
    proposal = propose(tables, features, num_shards=8, sample=sample)
    collection = programs.over(8, proposal.tables, features)
    plan = collection.plan(collection.batch(sample).features)
    num_requests = np.asarray(plan.asked[0].listed.starts).reshape(8, -1)[:, -1]
    assert sum(line.distinct_keys for line in proposal.lines) == num_requests.mean()


def test_bags_that_samples_share_are_counted_on_each_device_that_uses_them():
    """As on a mesh: four bags of ten keys, used by samples of all four devices, are forty keys of each."""
    tables, features = specs(item=1000)
    rng = np.random.default_rng(2)
    inverse = np.concatenate([rng.permutation(np.arange(8) % 4) for _ in range(4)])
    sample = {"item": Bags(np.arange(40).reshape(4, 10), inverse=inverse)}
    (line,) = propose(tables, features, num_shards=4, sample=sample).lines
    assert (line.keys, line.distinct_keys) == (40, 40)
    one = Bags(np.arange(40).reshape(4, 10), inverse=np.repeat(np.arange(4), 8))  # a bag a device
    (line,) = propose(tables, features, num_shards=4, sample={"item": one}).lines
    assert (line.keys, line.distinct_keys) == (10, 10)


# Costs ---------------------------------------------------------------------------------------------------------------


def test_bytes_by_hand():
    # 4 devices, dim 8, 100 distinct keys of 1,000,000 rows: requests of 16 bytes, rows and gradients of 32.
    proposal = propose(*specs(item=1_000_000), num_shards=4, keys_per_step=100)
    (line,) = proposal.lines
    assert line.distinct_keys == pytest.approx(100, abs=0.01)
    assert line.wire_bytes["sharded"] == round(99.995 * 3 / 4 * (16 + 32 + 32))
    assert line.wire_bytes["on"] == round(99.995 * 3 * (16 + 32 + 32))
    assert line.wire_bytes["replicated"] == round(99.995 * 3 * (16 + 32))
    assert proposal.wire_bytes == line.wire_bytes["sharded"]
    small = propose(
        *specs(item=1_000_000),
        num_shards=4,
        keys_per_step=100,
        exchange=ExchangeSpec(rows="bfloat16", gradients="float8_e4m3fn"),
    )
    assert small.wire_bytes == round(99.995 * 3 / 4 * (16 + 16 + 12))


def test_bytes_are_those_of_the_arrays_that_travel():
    # All keys are distinct and every capacity is full; count the rows sent to other devices, as the plan lays them out.
    tables, features = specs(item=1_000_000)
    sample = {"item": np.arange(8 * 512)}
    proposal = propose(tables, features, num_shards=8, sample=sample)
    collection = programs.over(8, proposal.tables, features)
    plan = collection.plan(collection.batch(sample).features)
    (counts,) = (np.asarray(asked.listed.starts).reshape(8, 9) for asked in plan.asked)
    to_others = np.diff(counts, axis=1) * (1 - np.eye(8, dtype=np.int64))
    request_bytes = plan.asked[0].received.dtype.itemsize * plan.asked[0].received.shape[1]
    # Hashing shares keys out unevenly: 3584 keys leave their devices on average, give or take a square root of it.
    assert to_others.sum() / 8 * (request_bytes + 32 + 32) == pytest.approx(proposal.wire_bytes, rel=0.03)


def test_one_device_sends_nothing():
    proposal = propose(*specs(user=100, item=10), num_shards=1, keys_per_step=50)
    assert proposal.wire_bytes == 0
    assert placements(proposal) == [SHARDED, SHARDED]
    assert "one device" in str(proposal)


def test_tables_on_devices_cost_the_most_loaded_one():
    tables, features = specs(a=1000, b=1000, c=1000, d=1000)
    costs = {}
    for name, devices in {"apart": (0, 1, 2, 3), "two by two": (0, 0, 1, 1), "together": (2, 2, 2, 2)}.items():
        overrides = {table.name: on(d) for table, d in zip(tables, devices, strict=True)}
        costs[name] = propose(tables, features, num_shards=4, keys_per_step=200, overrides=overrides).wire_bytes
    sharded = propose(tables, features, num_shards=4, keys_per_step=200).wire_bytes
    assert costs["apart"] == pytest.approx(sharded, abs=4)
    assert costs["two by two"] == pytest.approx(2 * sharded, rel=1e-3)
    assert costs["together"] == pytest.approx(4 * sharded, rel=1e-3)


# Choices -------------------------------------------------------------------------------------------------------------


def test_training_traffic_is_sharded():
    proposal = propose(*specs(user=100_000, day=7), num_shards=8, keys_per_step=1000)
    assert placements(proposal) == [SHARDED, SHARDED]
    assert all("replicated sends 4.8 times as much" in line.reason for line in proposal.lines)


def test_small_tables_are_replicated_where_that_sends_less():
    tables, features = specs(user=1_000_000, day=7)
    narrow = ExchangeSpec(gradients="float8_e4m3fn")  # 2 devices, 16 + 12 bytes against half of 16 + 32 + 12
    proposal = propose(tables, features, num_shards=2, keys_per_step=1000, exchange=narrow)
    assert placements(proposal) == [SHARDED, REPLICATED]
    assert "takes 76.3 MiB on every device" in proposal.lines[0].reason  # 80 bytes for each of 1,000,000 rows


def test_choices_cost_the_least():
    for num_shards, gradients in itertools.product((2, 8), ("float32", "float8_e4m3fn")):
        exchange = ExchangeSpec(gradients=gradients)
        proposal = propose(*specs(user=500, day=7), num_shards=num_shards, keys_per_step=100, exchange=exchange)
        for line in proposal.lines:
            assert line.wire_bytes[line.table.placement.kind] == min(line.wire_bytes.values())


def test_overrides_come_before_declared_placements_and_those_before_the_planner():
    tables, features = specs(a=100, b=100, c=100)
    tables[1] = TableSpec("b", 8, SGD, capacity=100, placement=on(2))
    tables[2] = TableSpec("c", 8, SGD, capacity=100, placement=on(2))
    proposal = propose(tables, features, num_shards=4, keys_per_step=10, overrides={"a": REPLICATED, "c": SHARDED})
    assert placements(proposal) == [REPLICATED, on(2), SHARDED]
    assert [line.reason.split(";")[0] for line in proposal.lines] == ["asked for", "declared so", "asked for"]


# Memory --------------------------------------------------------------------------------------------------------------


def propose_mixed(num_shards=4):
    tables = [
        TableSpec("user", 8, SGD, capacity=4000),
        TableSpec("item", 8, SGD, capacity=1000, placement=on(1)),
        TableSpec("day", 8, SGD, capacity=70, placement=REPLICATED),
        TableSpec("query", 16, jaxsok.optim.adam(0.1), capacity=400),
    ]
    features = [FeatureSpec(table.name, table=table.name) for table in tables]
    return propose(tables, features, num_shards=num_shards, keys_per_step=64), features


def test_bytes_per_device_by_hand():
    proposal, _ = propose_mixed()
    # SGD of dim 8: 32 bytes + 16 of record + 32 of index; Adam of dim 16: 64 + 128 + 48
    everywhere = 4000 // 4 * 80 + 70 * 80 + 400 // 4 * 240
    assert proposal.bytes_per_device == (everywhere, everywhere + 1000 * 80, everywhere, everywhere)


def test_rows_in_host_memory_are_counted_apart():
    """Host rows of 8 float32 are records of 32 bytes; the device has places, homes, records, index and the cache."""
    tables, features = specs(item=1000)
    tables = [dataclasses.replace(tables[0], memory=jaxsok.HostMemory(device_rows=100))]
    proposal = propose(tables, features, num_shards=2, keys_per_step=10)
    (store,) = programs.over(2, proposal.tables, features).init().stores
    assert proposal.host_bytes == 32 * store.capacity // 2 == store.rows[0].addressable_shards[1].data.nbytes
    assert proposal.lines[0].num_bytes == 1000 * 60
    assert str(proposal).endswith(f"{format_bytes(proposal.host_bytes)} of host memory for each of 2 devices.")
    assert propose(*specs(item=1000), num_shards=2, keys_per_step=10).host_bytes == 0


def test_allocated_bytes_are_those_of_init():
    proposal, features = propose_mixed()
    collection = programs.over(4, proposal.tables, features)
    state = collection.init(seed=0)
    leaves = jax.tree.leaves(state.stores)
    assert proposal.allocated_bytes == sum(leaf.addressable_shards[1].data.nbytes for leaf in leaves)


def test_tables_that_send_bags_have_stores_of_their_own():
    """The bytes that are claimed are those of the proposed collection."""
    tables = [TableSpec("a", 8, SGD, capacity=1000, statistics=True), TableSpec("b", 8, SGD, capacity=900)]
    features = [FeatureSpec("a", table="a"), FeatureSpec("b", table="b")]
    sample = {"a": np.arange(32), "b": np.arange(640).reshape(32, 20)}
    proposal = propose(tables, features, num_shards=4, sample=sample)
    assert [feature.exchange for feature in proposal.features] == ["rows", "bags"]
    state = programs.over(4, proposal.tables, proposal.features).init(seed=0)
    allocated = sum(leaf.addressable_shards[1].data.nbytes for leaf in jax.tree.leaves(state.stores))
    assert proposal.allocated_bytes == allocated


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards: got 0"),
        ({"keys_per_step": None}, 'feature "item": keys_per_step: got none'),
        ({"keys_per_step": {"itme": 3}}, r"got features \['itme'\]"),
        ({"keys_per_step": -1}, "got -1, wanted a number, at least 0"),
        ({"keys_per_step": np.nan}, "keys_per_step: got nan"),
        ({"exchange": "bfloat16"}, "exchange: got 'bfloat16', wanted a jaxsok.ExchangeSpec"),
        ({"sample": {"item": np.arange(8)}}, "one of the two"),
        ({"keys_per_step": None, "sample": {"itme": np.arange(8)}}, r"wanted also \['item'\]"),
        ({"overrides": {"itme": SHARDED}}, r"got tables \['itme'\]"),
        ({"overrides": {"item": on(4)}}, r"got on\(4\), wanted a device from 0 to 3"),
        ({"overrides": {"item": "replicated"}}, "wanted jaxsok.SHARDED"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        propose(*specs(item=100), **{"num_shards": 4, "keys_per_step": 10, **options})


@pytest.mark.parametrize("call", ["memory_estimate", "cache_estimate", "propose"])
def test_devices_that_are_not_there_are_refused(call):
    tables, features = [TableSpec("item", 8, SGD, placement=on(8))], [FeatureSpec("item", table="item")]
    options = {"memory_estimate": {}, "cache_estimate": {"batches": []}, "propose": {"keys_per_step": 1}}[call]
    with pytest.raises(ValueError, match=rf'{call}: table "item": placement: got on\(8\), wanted a device from 0 to 3'):
        getattr(jaxsok, call)(tables, features=features, num_shards=4, **options)


def test_batches_that_a_collection_refuses_are_refused():
    """As samples, too: missing weights, features of different numbers of samples, and more keys than are declared."""
    tables, declared = specs(item=100, user=100)
    good = {"item": np.arange(8), "user": np.arange(8)}
    cases = [
        ({"weighted": True}, good, "weights: got none"),
        ({}, good | {"item": Bags(np.arange(8), weights=np.ones(8, np.float32))}, "weights: got some"),
        ({}, good | {"item": np.arange(4)}, "wanted one number of samples"),
        ({"max_keys": 4}, good, "got 8 keys, wanted at most max_keys = 4"),
    ]
    for options, raw, message in cases:
        features = [FeatureSpec("item", table="item", **options), declared[1]]
        with pytest.raises(ValueError, match=message):
            jaxsok.Collection(tables, features).batch(raw)
        with pytest.raises(ValueError, match=message):
            propose(tables, features, num_shards=1, sample=raw)
        with pytest.raises(ValueError, match=message):
            jaxsok.cache_estimate(tables, features, [raw])


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match='feature "item": table: got "itme"'):
        propose(specs(item=100)[0], [FeatureSpec("item", table="itme")], num_shards=2, keys_per_step=1)


# Rows or partial bags ------------------------------------------------------------------------------------------------


def propose_bags(num_shards=4, hotness=20, **options):
    """Returns a table whose keys never repeat, in bags of one size, 8 on each device."""
    rng = np.random.default_rng(3)
    sample = {"item": rng.permutation(8 * num_shards * hotness).reshape(-1, hotness)}
    tables, features = specs(item=10_000)
    return propose(tables, features, num_shards=num_shards, sample=sample, **options)


def test_bags_are_proposed_where_they_send_less():
    """With 20 distinct keys a bag on 4 devices, a device receives 3/4 of 160 rows, or 3 sums for each of 8 bags."""
    proposal = propose_bags()
    (line,) = proposal.lines
    assert line.wire_bytes["sharded"] == 3 / 4 * 160 * (16 + 2 * 4 * 8)
    assert line.wire_bytes["bags"] == 3 / 4 * 160 * 8 + 3 * 8 * (2 * 4 * 8)
    assert (line.exchange, proposal.wire_bytes) == ("bags", line.wire_bytes["bags"])
    assert [feature.exchange for feature in proposal.features] == ["bags"]
    assert "SHARDED, bags" in str(proposal) and "bags send 0.26 of the bytes of rows" in line.reason


def test_bags_are_not_proposed_where_they_send_more():
    proposal = propose_bags(hotness=3)
    assert proposal.lines[0].wire_bytes["bags"] > proposal.lines[0].wire_bytes["sharded"]
    assert [feature.exchange for feature in proposal.features] == ["rows"]
    assert propose_bags(num_shards=1).lines[0].exchange == "rows"


def test_bags_need_a_combiner_in_every_feature_of_the_table():
    tables, (item,) = specs(item=10_000)
    sample = {"item": np.arange(640).reshape(32, 20), "last": np.arange(32)}
    (line,) = propose(tables, [item, FeatureSpec("last", "item", combiner=None)], num_shards=4, sample=sample).lines
    assert "bags" not in line.wire_bytes and line.exchange == "rows"


def test_declared_bags_stand():
    tables, _ = specs(item=100)
    features = [FeatureSpec("item", "item", exchange="bags")]
    proposal = propose(tables, features, num_shards=4, keys_per_step=10)
    assert proposal.features == tuple(features) and proposal.lines[0].exchange == "bags"
    assert proposal.wire_bytes == propose(tables, specs(item=1)[1], num_shards=4, keys_per_step=10).wire_bytes
    replicated = propose(tables, features, num_shards=4, keys_per_step=10, overrides={"item": REPLICATED})
    assert replicated.lines[0].exchange == "bags"  # the form has no effect there
    assert replicated.wire_bytes == replicated.lines[0].wire_bytes["replicated"]


def test_bags_of_a_table_on_one_device():
    """All uses go to one owner, and the exchange is dense."""
    line = propose_bags(overrides={"item": on(1)}).lines[0]
    assert line.wire_bytes["bags"] == 3 * 160 * 8 + 3 * 8 * (2 * 4 * 8)
    assert (line.exchange, line.table.placement) == ("bags", on(1))


# Printed and applied proposals ---------------------------------------------------------------------------------------


def test_it_prints_what_it_chose_and_why():
    text = str(propose_mixed()[0])
    head, *lines, last = text.splitlines()
    assert head.split() == [
        *("table", "rows", "bytes", "keys", "distinct", "sharded", "bags", "on", "one", "replicated", "placement"),
        "reason",
    ]
    for line, placement in zip(lines, ("SHARDED", "on(1)", "REPLICATED", "SHARDED"), strict=True):
        assert placement in line
        assert line.index(placement) == head.index("placement")
    assert "Full tables take" in last and "each of 4 devices" in last


def test_what_is_proposed_trains_as_one_device_does():
    rng = np.random.default_rng(2)
    tables, features = specs(user=256, item=128, day=7)
    proposal = propose(tables, features, num_shards=8, keys_per_step=8, overrides={"item": on(3), "day": REPLICATED})
    assert {table.placement.kind for table in proposal.tables} == {"sharded", "on", "replicated"}
    sizes = {"user": 200, "item": 60, "day": 7}
    raws = [{name: rng.integers(0, size, 64) for name, size in sizes.items()} for _ in range(3)]

    def train(collection):
        state = collection.init(seed=3)
        step = programs.fed_step(collection)
        for raw in raws:
            features = collection.batch(raw).features
            gradients = {name: jnp.ones((64, 8)) * (keys[:, None] + 1.0) for name, keys in raw.items()}
            state, _, stats = step(state, features, gradients)
            stats.check()
        return state

    single, many = jaxsok.Collection(tables, features), programs.over(8, proposal.tables, features)
    # Gradients are small integers, so their sums are exact in any order.
    programs.assert_close_tables((single, many), (train(single), train(many)), rtol=1e-6, atol=1e-6)

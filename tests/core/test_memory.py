"""The estimate of memory, against allocations: arrays of states, and XLA's memory for a step."""

import dataclasses
import functools

import jax
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import REPLICATED, ExchangeSpec, FeatureSpec, TableSpec, memory_estimate, on
from jaxsok.kernels import library

OPTIMIZERS = {
    "sgd": jaxsok.optim.sgd(0.1),
    "rowwise_adagrad": jaxsok.optim.rowwise_adagrad(0.1),
    "adagrad": jaxsok.optim.adagrad(0.1),
    "adam": jaxsok.optim.adam(0.1),
}
NUM_SHARDS = 4
ALIGNMENT_BYTES = 4096  # XLA rounds each buffer up; constants, counts and the loss are a few hundred bytes
# How far the estimate of an exchange may exceed XLA's allocation: it counts buffers that do not always live
# at once.
EXCHANGE_BOUND = 2.0


def table(name, dim, optimizer="sgd", **options):
    return TableSpec(name, dim, OPTIMIZERS[optimizer], **options)


def nbytes(tree, device=None):
    """Returns the bytes of all arrays, or of their parts on one device."""
    leaves = jax.tree.leaves(tree)
    if device is None:
        return sum(leaf.nbytes for leaf in leaves)
    return sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards if part.device == device)


def parts_of(store, device=None):
    """Returns the bytes of a store by their content."""
    return {
        "rows": nbytes(store.rows, device),
        "optimizer_state": nbytes(store.states, device),
        "records": nbytes(store.records, device),
        "index": nbytes(store.index, device),
        "counters": nbytes((store.counters, store.table_rows), device),
    }


# The state -----------------------------------------------------------------------------------------------------------

CONFIGURATIONS = {
    **{
        f"{dim} columns, {optimizer}": [table("user", dim, optimizer, capacity=1000)]
        for dim in (1, 3, 8, 64, 100, 1024)
        for optimizer in OPTIMIZERS
    },
    **{f"{rows} rows": [table("user", 8, "adam", capacity=rows)] for rows in (1, 2, 31, 32, 33, 4097, 100_003)},
    "one store of three tables": [table(name, 16, capacity=10 + len(name)) for name in ("user", "item", "category")],
    "four stores": [
        table("user", 16, "adam", capacity=300),
        table("item", 16, "adam", capacity=50, row_gradient="mean"),
        table("ad", 4, capacity=7),
        table("day", 16, "rowwise_adagrad", capacity=9000),
        table("night", 16, "adam", capacity=500),
    ],
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_is_what_init_allocates(name):
    """The estimate is exact, part by part, without a collection and with one."""
    collection = jaxsok.Collection(CONFIGURATIONS[name], [])
    state = collection.init(seed=0)
    for estimate in (
        memory_estimate(collection.tables),
        collection.memory_estimate(),
        collection.memory_estimate(state),
    ):
        assert [dict(store.state) for store in estimate.stores] == [parts_of(store) for store in state.stores]
        assert [store.capacity for store in estimate.stores] == [store.capacity for store in state.stores]
        assert estimate.state_bytes == estimate.total == nbytes(state)


@functools.cache
def declared_over(num_shards, **exchange):
    """Declares sharded stores, one with tables on single devices, and a replicated store; with and without divisors."""
    tables = [
        table("user", 64, "adagrad", capacity=1 << 14, row_gradient="mean"),
        table("item", 64, "adagrad", capacity=100, row_gradient="mean", placement=on(3)),
        table("ad", 8, "adam", capacity=3000),
        table("day", 8, "adam", capacity=400, placement=REPLICATED),
    ]
    features = [
        FeatureSpec("user", "user"),
        FeatureSpec("item", "item", combiner="mean", max_keys=4 * 1024 * num_shards),
        FeatureSpec("ad", "ad", combiner="sqrtn", max_keys=2 * 1024 * num_shards),
        FeatureSpec("day", "day"),
    ]
    return programs.over(num_shards, tables, features, **exchange)


@pytest.mark.parametrize("num_shards", [1, NUM_SHARDS])
def test_state_on_a_mesh_is_what_each_device_allocates(num_shards):
    tables = [
        dataclasses.replace(table, placement=on(0)) if table.name == "item" else table
        for table in declared_over(4).tables
    ]
    collection = programs.over(num_shards, tables, [])
    state = collection.init(seed=0)
    estimate = memory_estimate(tables, num_shards=num_shards)
    assert estimate == collection.memory_estimate() == collection.memory_estimate(state)
    for device in collection.shards.mesh.devices.flat:
        assert [dict(store.state) for store in estimate.stores] == [parts_of(store, device) for store in state.stores]
        assert estimate.state_bytes == nbytes(state, device)


def grown(collection, num_keys, num_steps, steps=1):
    """Returns a state after so many steps of only new keys, and a final `grow`."""
    state = collection.init(seed=0)
    for start in range(0, num_keys * num_steps, num_keys):
        features = programs.batch(
            collection, **{feature.name: np.arange(num_keys) + start for feature in collection.features}
        )
        state = collection.grow(jax.block_until_ready(state), steps=steps)  # with known rows, not a bound
        _, state, _ = programs.lookup(collection)(state, features)
    return collection.grow(jax.block_until_ready(state), steps=steps)


@pytest.mark.parametrize(("steps", "num_slabs"), [(1, [4, 2]), (7, [4, 2]), (20, [3, 2])])
def test_after_several_growths(steps, num_slabs):
    """The state is exact to the byte, and the capacity after growth is predicted."""
    tables = [table("user", 8, "adam", capacity=16), table("item", 4, capacity=100, max_capacity=150)]
    features = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]
    collection = jaxsok.Collection(tables, features)
    state = grown(collection, 10, 10, steps)
    assert [len(store.rows) for store in state.stores] == num_slabs
    estimate = collection.memory_estimate(state)
    assert [dict(store.state) for store in estimate.stores] == [parts_of(store) for store in state.stores]
    assert estimate.state_bytes == nbytes(state)
    foreseen = memory_estimate(tables, features, num_rows=100, num_samples=10, steps=steps)
    assert foreseen.state_bytes == nbytes(state)
    capacities = [store.capacity for store in state.stores]
    assert [store.reserve for store in foreseen.stores] == [
        min(10 * steps, capacities[0]) * 144,
        min(10 * steps, 150) * 64,
    ]
    assert foreseen.bytes_per_key == nbytes(state) / 200
    # The index has two entries for each row of capacity.
    assert [store.load for store in foreseen.stores] == [100 / (2 * capacity) for capacity in capacities]


def test_growth_on_a_mesh():
    """The fullest shard decides when to grow, so the prediction is at least that."""
    tables = [table("user", 8, "adagrad", capacity=256), table("day", 4, capacity=64, placement=REPLICATED)]
    features = [FeatureSpec(table.name, table.name) for table in tables]
    collection = programs.over(NUM_SHARDS, tables, features)
    state = grown(collection, 64, 8)
    for device in collection.shards.mesh.devices.flat:
        assert collection.memory_estimate(state).state_bytes == nbytes(state, device)
    foreseen = memory_estimate(tables, features, num_rows=512, num_shards=NUM_SHARDS, num_samples=16)
    capacities = [store.capacity // NUM_SHARDS for store in state.stores]
    assert foreseen.stores[0].capacity in (capacities[0], 2 * capacities[0])
    # All keys of all devices may be new to a replicated table: 64 per step, each with a row of 64 bytes.
    assert (foreseen.stores[1].capacity, foreseen.stores[1].reserve) == (capacities[1], 64 * 64)


def test_keys_that_wait_for_admission_are_counted():
    """Their array has the size that their number needs, which the capacity does not say."""
    spec = table("user", 4, "sgd", capacity=1024, admission=jaxsok.policies.AdmitByCount(num_sightings=100))
    collection = jaxsok.Collection([spec], [FeatureSpec("user", "user")])
    state, rng = collection.init(seed=0), np.random.default_rng(0)
    for _ in range(2):
        batch = collection.batch({"user": rng.integers(0, 2**60, 8000)})
        state = programs.train_step(collection)(collection.grow(state, batch), batch.features)[0]
    assert state.stores[0].sightings[0].shape > collection.init().stores[0].sightings[0].shape
    assert collection.memory_estimate(state).state_bytes == nbytes(state)


@pytest.mark.parametrize("dim", [1, 8, 64])
def test_a_step_with_staged_rows_takes_at_most_what_the_estimate_says(dim):
    spec = table("user", dim, "sgd", capacity=50_000, memory=jaxsok.HostMemory(device_rows=256))
    collection = jaxsok.Collection([spec], [FeatureSpec("user", "user")])
    state = collection.init(seed=0)
    features = collection.batch({"user": np.random.default_rng(0).integers(0, 2**50, (5000, 4))}).features
    lowered = jax.jit(programs.train_step(collection), donate_argnums=0).lower(state, features)
    estimate = collection.memory_estimate(state, features)
    taken = lowered.compile().memory_analysis().temp_size_in_bytes + nbytes(features)
    assert 0.5 * estimate.step_bytes < taken <= estimate.step_bytes


def test_more_rows_than_a_shard_can_have_are_refused():
    spec = table("user", 4, "sgd")
    for num_shards in (1, 4):
        with pytest.raises(ValueError, match=r'num_rows: got \d+ on each device for the tables "user", wanted at most'):
            memory_estimate([spec], num_shards=num_shards, num_rows=3_000_000_000 * num_shards)
    assert memory_estimate([spec], num_shards=4, num_rows=3_000_000_000).stores[0].capacity < 2**31
    limited = dataclasses.replace(spec, capacity=10_000, max_capacity=10_000)
    assert memory_estimate([limited], num_rows=3_000_000_000).stores[0].num_rows == 10_000


def test_largest_capacities():
    """The capacities fit, an additional row per table does not, and they are in proportion."""
    tables = [table("user", 64, "rowwise_adagrad", capacity=3000), table("item", 64, "rowwise_adagrad", capacity=1000)]
    features = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]
    estimate = memory_estimate(tables, features, num_samples=512)
    limit = 100 << 20
    rows = estimate.largest_capacities(limit)
    assert rows["user"] // 3 == rows["item"]

    def total(more):
        larger = [dataclasses.replace(table, capacity=rows[table.name] + more) for table in tables]
        return memory_estimate(larger, features, num_samples=512).total

    assert total(0) <= limit < total(2)
    # By hand: 256 + 4 + 16 + 32 bytes per row, from the memory left by the step and the tickets (258 of 8 bytes).
    assert sum(rows.values()) == pytest.approx((limit - estimate.step_bytes - 258 * 8) / 308, abs=4)
    collection = jaxsok.Collection(
        [dataclasses.replace(table, capacity=rows[table.name]) for table in tables], features
    )
    assert nbytes(collection.init(seed=0)) <= limit - estimate.step_bytes
    assert estimate.largest_capacities(1000) == {"user": 0, "item": 0}


def test_largest_capacities_end_at_max_capacity():
    """A table gets no more than its maximum, and the remaining memory goes to the others."""
    kind = "rowwise_adagrad"
    user = table("user", 64, kind, capacity=3000, max_capacity=5000)
    tables = [user, table("item", 64, kind, capacity=1000), table("ad", 32, kind, capacity=1)]
    estimate = memory_estimate(tables, device_bytes=100 << 20, memory_fraction=1.0)
    rows = estimate.largest_capacities()
    assert rows["user"] == 5000 and rows["item"] // 1000 == rows["ad"]
    for more, fits in ((0, True), (2000, False)):
        larger = [
            dataclasses.replace(table, capacity=min(rows[table.name] + more, table.max_capacity or 2**30))
            for table in tables
        ]
        assert (memory_estimate(larger).total <= 100 << 20) == fits
    assert "Rows that would fit: user 5,000 (its max_capacity), item " in str(estimate)
    alone = memory_estimate([user], device_bytes=100 << 20)
    assert str(alone).endswith("Rows that would fit: user 5,000 (its max_capacity).")
    assert alone.largest_capacities(1000) == {"user": 0}
    # A table at its maximum cannot get more rows.
    assert memory_estimate([user], num_rows=10**6).stores[0].num_rows == 5000


@pytest.mark.parametrize("device_rows", [None, 0.5, 1.0, 1000, 0])
def test_largest_capacities_count_the_cache(device_rows):
    """A cache that is a share of the rows grows with the capacity."""
    host = jaxsok.HostMemory(device_rows=device_rows)
    user = table("user", 64, "adam", capacity=100_000, memory=host)
    estimate = memory_estimate([user], device_bytes=8 << 30)
    rows = estimate.largest_capacities()["user"]
    totals = [
        memory_estimate([dataclasses.replace(user, capacity=rows + more)], device_bytes=8 << 30).total
        for more in (0, rows // 1000)
    ]
    assert totals[0] <= estimate.memory_bytes < totals[1]


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"memory_estimate: tables: got \['user'\] more than once"):
        memory_estimate([table("user", 4), table("user", 4)])


def test_largest_capacities_end_with_the_row_ids():
    rows = memory_estimate([table("user", 1)], num_shards=2).largest_capacities(10**13)
    assert 1.99 * 2**31 < rows["user"] < 2**32


def test_a_table_has_more_rows_than_a_shard_may_have():
    """Row ids bound the rows of a shard, not those of all shards together."""
    declared = dataclasses.replace(table("user", 64), capacity=10**10, max_capacity=2 * 10**10)
    (store,) = memory_estimate([declared], num_shards=8).stores
    assert 1.25e9 < store.capacity < 1.26e9
    (spec,) = programs.over(8, [declared], [FeatureSpec("user", "user")]).stores
    assert (spec.capacity, spec.max_capacity) == (store.capacity, 2**31 - 1)
    wanted = r"capacity: got 10000000000 rows of a shard in store 0, wanted at most 2147483647; use more shards\."
    for op, declare in (("memory_estimate", memory_estimate), ("Collection", lambda of: jaxsok.Collection(of, []))):
        with pytest.raises(ValueError, match=rf"{op}: tables \['user'\]: {wanted}"):
            declare([declared])


def test_a_limit_beyond_the_row_ids_limits_nothing_less():
    """A small table with such a limit grows, and its rows stay."""
    tables = [dataclasses.replace(table("user", 4), capacity=16, max_capacity=10**10)]
    collection = programs.over(2, tables, [FeatureSpec("user", "user")])
    state = collection.init(seed=0)
    for first in range(0, 256, 64):
        batch = collection.batch({"user": np.arange(first, first + 64)})
        state = collection.grow(state, batch)
        _, state, _ = collection.lookup(state, batch.features)
    assert collection.num_rows(state) == {"user": 256}


def test_device_bytes():
    """A fraction of a device is the memory that XLA gives to arrays."""
    estimate = memory_estimate([table("user", 64)], device_bytes=80 << 30)
    assert estimate.memory_bytes == 60 << 30  # JAX takes 75% by default
    assert estimate.largest_capacities() == estimate.largest_capacities(60 << 30)
    assert "75% of 80.0 GiB: enough" in str(estimate)
    assert "too little" in str(memory_estimate([table("user", 64)], device_bytes=1 << 20, memory_fraction=0.9))
    with pytest.raises(ValueError, match="memory_bytes: got None"):
        memory_estimate([table("user", 64)]).largest_capacities()


# The step ------------------------------------------------------------------------------------------------------------

NUM_BAGS = 1024


@functools.cache
def declare(capacity=1 << 12):
    """Declares two stores: single keys, padded and ragged bags, weights, and rows without a combiner."""
    tables = [
        table("user", 64, "adagrad", capacity=capacity),
        table("item", 64, "adagrad", capacity=capacity),
        table("ad", 16, "adam", capacity=capacity),
    ]
    features = [
        FeatureSpec("user", "user"),
        FeatureSpec("history", "item", combiner="mean", weighted=True, max_keys=5 * NUM_BAGS),
        FeatureSpec("ad", "ad", combiner=None, max_keys=3 * NUM_BAGS),
    ]
    return jaxsok.Collection(tables, features)


def features_of(collection):
    rng = np.random.default_rng(0)
    lengths = np.full(NUM_BAGS, 3)
    return programs.batch(
        collection,
        user=rng.integers(0, 2**40, NUM_BAGS),
        history=jaxsok.Bags(rng.integers(0, 99, 3 * NUM_BAGS), lengths=lengths, weights=np.ones(3 * NUM_BAGS)),
        ad=jaxsok.Bags(rng.integers(0, 99, 3 * NUM_BAGS), lengths=lengths),
    )


@functools.cache
def measure_compiled(name, capacity):
    """Returns the memory of one compiled program, its state, its features, and its other results."""
    collection = declare(capacity)
    state, features = collection.init(seed=0), features_of(collection)
    if name == "update":
        embeddings, _, plan = jax.eval_shape(collection.lookup, state, features)
        function, donated, arguments = collection.update, 0, (state, plan, embeddings)
    elif name == "find":
        function, donated, arguments = collection.find, (), (state, features)
    else:
        function = collection.lookup if name == "lookup" else programs.train_step(collection)
        donated, arguments = 0, (state, features)
    lowered = jax.jit(function, donate_argnums=donated, compiler_options=programs.quickly()).lower(*arguments)
    return lowered.compile().memory_analysis()


def sum_bytes(estimate, *names):
    return sum(store.step[name] for store in estimate.stores for name in names)


@pytest.mark.parametrize("name", ["lookup", "find", "update", "step"])
def test_programs_take_what_the_estimate_says(name):
    """XLA's memory besides arguments and results is the workspace; in a step also the values between calls."""
    collection = declare()
    state, features = collection.init(seed=0), features_of(collection)
    estimate = collection.memory_estimate(state, features)
    memory = measure_compiled(name, 1 << 12)
    workspace = max(store.step["workspace"] for store in estimate.stores)
    if name in ("lookup", "step"):
        taken = nbytes(state) + nbytes(features)
        assert (estimate.state_bytes, sum_bytes(estimate, "batch")) == (nbytes(state), nbytes(features))
        assert taken - 16 <= memory.argument_size_in_bytes <= taken  # a step uses neither `step` nor padding
        assert memory.alias_size_in_bytes >= nbytes(state.stores)
    if name == "lookup":
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        wanted = sum_bytes(estimate, "embeddings", "plan", "batch")  # a plan contains its features
        assert wanted <= results <= wanted + ALIGNMENT_BYTES
    sizes = library.load_cpu()
    num_keys = [6 * NUM_BAGS, 3 * NUM_BAGS]
    assert [store.num_keys for store in estimate.stores] == num_keys
    inserting = max(map(sizes.JaxsokInsertWorkspaceBytes, num_keys))
    least, most = {
        "lookup": (0, inserting),  # XLA may reuse a result that is written later
        "find": (0, 0),
        "update": (workspace, workspace),
        # A gradient may replace its embedding; not all row ids live at once.
        "step": (
            workspace + sum_bytes(estimate, "embeddings"),
            workspace + sum_bytes(estimate, "plan", "embeddings", "gradients"),
        ),
    }[name]
    # XLA's GPU compiler reuses a few KiB of buffers that are written later.
    lent = 0 if jax.default_backend() == "cpu" else least // 16
    assert least - ALIGNMENT_BYTES - lent <= memory.temp_size_in_bytes <= most + ALIGNMENT_BYTES
    assert memory.temp_size_in_bytes <= estimate.step_bytes
    if name == "step":  # the peak: state, batch, and the values between calls
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert peak <= estimate.total + ALIGNMENT_BYTES


@pytest.mark.parametrize("name", ["lookup", "find", "update", "step"])
def test_no_temporary_grows_with_the_tables(name):
    small, large = (measure_compiled(name, capacity) for capacity in (1 << 12, 1 << 17))
    assert large.temp_size_in_bytes - small.temp_size_in_bytes <= ALIGNMENT_BYTES
    results = [memory.output_size_in_bytes - memory.alias_size_in_bytes for memory in (small, large)]
    assert results[0] == results[1]


def test_sizes_assumed_are_those_of_a_batch():
    """Given numbers of keys and samples, the estimate equals that of a batch of that form."""
    collection = declare()
    state = collection.init(seed=0)
    counted = collection.memory_estimate(state, features_of(collection))
    keys = {"history": 5 * NUM_BAGS, "ad": 3 * NUM_BAGS}
    options = {"num_samples": NUM_BAGS, "num_rows": {"user": 3}}
    assumed = memory_estimate(collection.tables, collection.features, keys_per_step=keys, **options)
    from_specs = memory_estimate(collection.tables, collection.features, **options)
    assert [store.step for store in assumed.stores] == [store.step for store in counted.stores]
    assert [store.step for store in from_specs.stores] == [store.step for store in counted.stores]


def features_over(collection, num_shards):
    rng = np.random.default_rng(0)
    n = num_shards * NUM_BAGS
    return programs.batch(
        collection,
        user=rng.integers(0, 2**40, n),
        item=jaxsok.Bags(rng.integers(0, 20, 4 * n), lengths=np.full(n, 4)),
        ad=jaxsok.Bags(rng.integers(0, 2**40, 2 * n), lengths=np.full(n, 2)),
        day=rng.integers(0, 7, n),
    )


@functools.cache
def compiled_over(name, path, capacity=1 << 14, wire="float32"):
    """Returns the memory of one compiled program over several devices."""
    collection = declared_over(NUM_SHARDS, rows=wire, gradients=wire)
    tables = [dataclasses.replace(table, capacity=capacity) for table in collection.tables]
    collection = programs.over(NUM_SHARDS, tables, collection.features, rows=wire, gradients=wire)
    state, asked = collection.init(seed=0), features_over(collection, NUM_SHARDS)
    if path == "planned":
        parts = [part.layouts for part in asked.stores]
        sizes = tuple(-(-sum(layout.num_keys for layout in layouts) * 5 // 4 // NUM_SHARDS) for layouts in parts)
        asked = collection.plan(asked, send_capacity=sizes)
    function = {"step": programs.train_step(collection), "lookup": collection.lookup, "find": collection.find}[name]
    donated = () if name == "find" else 0
    lowered = jax.jit(function, donate_argnums=donated, compiler_options=programs.quickly()).lower(state, asked)
    return lowered.compile().memory_analysis()


@pytest.mark.parametrize(("path", "wire"), [("rounds", "float32"), ("planned", "float16")])
def test_exchange_takes_at_most_what_the_estimate_says(path, wire):
    collection = declared_over(NUM_SHARDS, rows=wire, gradients=wire)
    estimate = collection.memory_estimate(None, features_over(collection, NUM_SHARDS))
    temp = compiled_over("step", path, wire=wire).temp_size_in_bytes
    rest = estimate.step_bytes - sum_bytes(estimate, "batch")
    assert temp <= rest <= EXCHANGE_BOUND * temp


@pytest.mark.parametrize(
    ("name", "path"), [("step", "rounds"), pytest.param("step", "planned", marks=pytest.mark.slow), ("find", "rounds")]
)
def test_no_temporary_grows_with_the_tables_on_a_mesh(name, path):
    small, large = (compiled_over(name, path, capacity).temp_size_in_bytes for capacity in (1 << 14, 1 << 18))
    assert abs(large - small) <= ALIGNMENT_BYTES


def test_a_step_on_a_mesh_is_counted_for_one_device():
    """Plans of four batches in flight count, and two more batches that are packed, to the byte."""
    collection = programs.over(NUM_SHARDS, [table("user", 8, capacity=64)], [FeatureSpec("user", "user")])
    features = programs.batch(collection, user=np.arange(NUM_SHARDS * 100))
    estimate = collection.memory_estimate(batch=features)
    device = collection.shards.mesh.devices.flat[1]
    assert sum_bytes(estimate, "batch") == 6 * nbytes(features, device)
    # 100 keys evenly spread plus a quarter, rounded up to eight: 32 for each of four destinations.
    _, _, plan = collection.lookup(collection.init(seed=0), collection.plan(features, send_capacity=(32,)))
    assert sum_bytes(estimate, "plan") == 4 * (nbytes(plan, device) - nbytes(features, device))
    sizes, dense = {"num_shards": NUM_SHARDS, "num_samples": 100}, ExchangeSpec(wire="dense")
    assert memory_estimate(collection.tables, collection.features, **sizes, exchange=dense) == estimate
    # Windows, which "auto" may take, sort the uses of both sides at once.
    auto, window = (
        memory_estimate(collection.tables, collection.features, **sizes, exchange=ExchangeSpec(wire=wire))
        for wire in ("auto", "window")
    )
    assert auto == window
    assert sum_bytes(auto, "workspace") > sum_bytes(estimate, "workspace")


# Printing and refusals -----------------------------------------------------------------------------------------------


def test_it_prints_every_part():
    tables = [table("user", 64, capacity=1000), table("item", 64, capacity=24), table("ad", 8, "adam", capacity=500)]
    features = [FeatureSpec(name, name) for name in ("user", "item", "ad")]
    lines = str(memory_estimate(tables, features, num_samples=100)).splitlines()
    assert len(lines) == 9
    for words in (
        ["user", "item", "64", "1,024", "1,024", "256.0", "KiB", "0", "B", "16.0", "KiB", "32.0", "KiB", "44", "B"],
        ["ad", "8", "500", "500", "15.6", "KiB", "31.2", "KiB", "7.8", "KiB", "15.6", "KiB", "40", "B"],
    ):
        assert any(line.split()[: len(words)] == words for line in lines), words
    assert len(str(memory_estimate(tables)).splitlines()) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards: got 0"),
        ({"num_rows": {"itme": 3}}, r"num_rows: got tables \['itme'\]"),
        ({"num_rows": -1}, 'table "item": num_rows: got -1'),
        ({"num_samples": 0}, "num_samples: got 0"),
        ({"keys_per_step": {"itme": 3}}, r"keys_per_step: got features \['itme'\]"),
        ({"keys_per_step": {}}, 'feature "item": keys_per_step: got none'),
        ({"keys_per_step": "many"}, "got 'many', wanted a number"),
        ({"steps": 0}, "steps: got 0"),
        ({"device_bytes": 0}, "device_bytes: got 0"),
        ({"memory_fraction": 75}, "memory_fraction: got 75"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^memory_estimate: .*{message}|^memory_estimate: {message}"):
        memory_estimate([table("item", 8)], [FeatureSpec("item", "item")], **options)


def test_no_tables_and_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="tables: got none"):
        memory_estimate([])
    with pytest.raises(ValueError, match='feature "item": table: got "itme"'):
        memory_estimate([table("item", 8)], [FeatureSpec("item", "itme")])


def test_features_and_states_of_others_are_refused():
    collection, other = declare(), jaxsok.Collection([table("item", 8)], [FeatureSpec("item", "item")])
    with pytest.raises(ValueError, match="memory_estimate: state: got one of other specs"):
        collection.memory_estimate(other.init(seed=0))
    with pytest.raises(ValueError, match="memory_estimate: features: got those of a collection"):
        collection.memory_estimate(batch=other.batch({"item": np.arange(3)}))
    with pytest.raises(TypeError, match="memory_estimate: features: got ndarray"):
        collection.memory_estimate(batch=np.arange(3))


def test_send_capacity_counts():
    features = [FeatureSpec("item", "item")]
    small, large = (
        memory_estimate(
            [table("item", 8)], features, num_shards=4, num_samples=1000, exchange=ExchangeSpec(send_capacity=lines)
        )
        for lines in (100, 200)
    )
    # Two rows of 32 bytes, requests of 16 sent and received, 32 bytes of ids and uses, for each of 400 more positions.
    assert sum_bytes(large, "exchange") - sum_bytes(small, "exchange") == 400 * (2 * 32 + 2 * 16 + 32)

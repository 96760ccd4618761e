"""Tables in host memory: declaration, allocation, growth and counters; other files test their results."""

import ctypes
import dataclasses
import gc
import re
import subprocess
import sys
import threading
import warnings

import jax
import numpy as np
import programs
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

import jaxsok
from jaxsok import (
    REPLICATED,
    FeatureSpec,
    HostMemory,
    TableSpec,
    enlarge,
    host_limits,
    host_slabs,
    memory_estimate,
    on,
    shards,
)
from jaxsok.host_limits import HostLimit
from jaxsok.kernels.host_memory import HostBytes
from jaxsok.specs import describe, group_into_stores
from jaxsok.types import FRESH, NO_ROW

ADAM = jaxsok.optim.adam(0.1)
FEATURES = [FeatureSpec("user", table="user")]
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="acts as if the CPU needed pinned memory")


def table(name="user", *, memory=0.1, dim=6, optimizer=ADAM, **options):
    """Declares a table in host memory, by default of 6 float32 with Adam; `memory`: the cache."""
    return TableSpec(name, dim, optimizer, memory=None if memory is None else HostMemory(memory), **options)


def store_of(*tables, num_shards=1):
    (store,) = group_into_stores(tables, num_shards)
    return store


def nbytes(tree, device=None):
    """Returns the bytes of arrays, or of their parts on one device."""
    parts = [part for leaf in jax.tree.leaves(tree) for part in leaf.addressable_shards]
    return sum(part.data.nbytes for part in parts if device in (None, part.device))


# Declaration ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_rows", "num_shards", "num_slots"),
    [(0, 1, 0), (1, 1, 1), (1, 4, 1), (100, 1, 100), (101, 4, 26), (0.25, 1, 250), (1.0, 1, 1000), (None, 1, 100)],
)
def test_slots_of_a_shard(device_rows, num_shards, num_slots):
    assert store_of(table(memory=device_rows or 0, capacity=1000), num_shards=1).memory is not None
    spec = TableSpec("user", 6, ADAM, capacity=1000, memory=HostMemory(device_rows))
    assert store_of(spec, num_shards=num_shards).num_slots == num_slots


def test_one_row_is_not_all_rows():
    """1 and 1.0 are equal numbers; declarations with them are not, and share neither a store nor programs."""
    assert HostMemory(1) != HostMemory(1.0) and HostMemory(1) == HostMemory(1) != 1
    assert HostMemory(**dataclasses.asdict(HostMemory(0.5))) == HostMemory(0.5)
    assert len({HostMemory(1), HostMemory(1.0), HostMemory(1)}) == 2
    specs = [TableSpec(name, 6, ADAM, memory=HostMemory(rows)) for name, rows in (("user", 1), ("item", 1.0))]
    assert [store.num_slots for store in jaxsok.Collection(specs, []).stores] == [1, specs[1].capacity]


def test_a_share_is_of_the_shards_capacity_and_no_cache_is_larger_than_its_store():
    spread = store_of(table(memory=0.5, capacity=1000), num_shards=4)
    assert spread.capacity == 314 and spread.num_slots == 157
    assert store_of(table(memory=5000, capacity=10, max_capacity=300)).num_slots == 300
    assert store_of(table(memory=5000, capacity=10)).num_slots == 5000  # it may grow to so many rows


@pytest.mark.parametrize(
    ("device_rows", "text"),
    [
        (-1, "device_rows: got -1, wanted rows, 0 to 1099511627776, or a share of the capacity"),
        (0.0, "device_rows: got 0.0, wanted a share above 0, at most 1.0"),
        (1.5, "device_rows: got 1.5, wanted a share above 0, at most 1.0"),
        (float("nan"), "device_rows: got nan, wanted a share above 0, at most 1.0"),
        (True, "device_rows: got True, wanted rows, 0 to 1099511627776, or a share of the capacity"),
        ("all", "device_rows: got 'all', wanted rows, 0 to 1099511627776, or a share of the capacity"),
    ],
)
def test_wrong_caches(device_rows, text):
    with pytest.raises(ValueError, match=re.escape(f"HostMemory: {text}.")):
        HostMemory(device_rows)


def test_wrong_tables():
    with pytest.raises(TypeError, match=re.escape("memory: got 'host', wanted None or jaxsok.HostMemory(device_rows")):
        TableSpec("user", 6, ADAM, memory="host")
    with pytest.raises(ValueError, match=re.escape('TableSpec "user": memory: got HostMemory(device_rows=0.1) with')):
        table(placement=REPLICATED)
    with pytest.raises(TypeError, match="cache_load_factor: got an argument of that name, wanted memory"):
        TableSpec("user", 6, ADAM, cache_load_factor=0.2)
    with pytest.raises(ValueError, match=re.escape("got HostMemory(device_rows=1073741825), 1073741825 rows for a")):
        jaxsok.Collection([table(memory=2**30 + 1)], FEATURES)


def test_tables_of_one_memory_share_a_store():
    tables = [table("a"), table("b", memory=None), table("c"), table("d", memory=0.2)]
    stores = group_into_stores(tables)
    assert [[table.name for table in store.tables] for store in stores] == [["a", "c"], ["b"], ["d"]]
    assert [store.memory for store in stores] == [HostMemory(0.1), None, HostMemory(0.2)]


def test_the_cache_is_in_the_fingerprint_where_there_is_one():
    """Tables on the device have the same fingerprint as before."""
    plain, cached = (describe(group_into_stores([table(memory=memory, capacity=50)])) for memory in (None, 10))
    assert cached == [*plain, "0:HostMemory(device_rows=10)"]


def test_rows_in_host_memory_are_not_proposed_on_every_device():
    narrow = jaxsok.ExchangeSpec(gradients="float8_e4m3fn")
    for memory, placement in ((None, REPLICATED), (5, jaxsok.SHARDED)):
        tables = [table(capacity=7, memory=memory, dim=64)]
        proposal = jaxsok.propose(tables, FEATURES, num_shards=2, keys_per_step=1000, exchange=narrow)
        assert [line.table.placement for line in proposal.lines] == [placement]


# Allocation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "optimizer", "host_bytes", "widths"),
    [
        ("float32", jaxsok.optim.sgd(0.1), 32, []),
        ("float32", ADAM, 80, [6, 6]),
        ("bfloat16", jaxsok.optim.rowwise_adagrad(0.1), 16, [1]),
    ],
)
@pytest.mark.parametrize("memory", [0, 5])
def test_an_empty_state(dtype, optimizer, host_bytes, widths, memory):
    spec = table(memory=memory, dtype=dtype, optimizer=optimizer, capacity=20, statistics=True)
    collection = jaxsok.Collection([spec], FEATURES)
    store = collection.init(seed=0).stores[0]
    (tier,), num_lines = store.tier, max(1, memory)
    assert [(slab.shape, slab.dtype) for slab in store.rows] == [((20, host_bytes), np.uint8)]
    assert store.states == () and store.capacity == 20 and store.records[0].shape == (20, 4)
    assert store.statistics[0].shape == (20, 2)
    assert tier.rows.shape == (num_lines, 6) and tier.rows.dtype.name == dtype
    assert [state.shape for state in tier.states] == [(num_lines, width) for width in widths]
    assert tier.places[0].shape == (20, 1) and (np.asarray(tier.places[0]) == FRESH).all()
    assert tier.owners.shape == (num_lines, 4) and (np.asarray(tier.owners) == NO_ROW).all()
    assert not np.asarray(tier.last_use).any() and not np.asarray(tier.counters).any()
    state = f" and state of {' + '.join(map(str, widths))}" if widths else ""
    assert f"20 rows of 6 {dtype}{state} in host memory, cache of {num_lines} rows" in repr(store)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_the_estimate_is_what_each_device_allocates(num_shards):
    """The estimate is exact, on the device and in host memory: without a collection, with one, and after growth."""
    tables = [
        table(capacity=300, memory=40),
        table("item", capacity=70, memory=40, placement=on(0)),
        table("day", capacity=90, memory=0, dim=3, dtype="float16"),
        table("ad", capacity=50, memory=None),
    ]
    collection = programs.over(num_shards, tables, FEATURES)
    state = collection.init(seed=0)
    larger = {s: 500 for s in range(3)}
    grown = enlarge.grow_to("grow", collection.stores, collection.init(seed=0), larger, collection.shards)
    estimates = [memory_estimate(tables, num_shards=num_shards), *map(collection.memory_estimate, (None, state, grown))]
    assert estimates[0] == estimates[1] == estimates[2]
    for estimate, made in zip(estimates[2:], (state, grown), strict=True):
        for device in collection.shards.mesh.devices.flat:
            host_rows = [store.rows if store.tier else () for store in made.stores]
            assert [store.host_bytes for store in estimate.stores] == [nbytes(rows, device) for rows in host_rows]
            assert estimate.host_bytes == nbytes(host_rows, device) > 0
            assert estimate.state_bytes == nbytes(made, device) - estimate.host_bytes
            for store_estimate, store in zip(estimate.stores, made.stores, strict=True):
                assert store_estimate.state.get("places", 0) == nbytes(
                    [(tier.places, tier.homes) for tier in store.tier], device
                )
                assert ("rows" in store_estimate.state) == (not store.tier)


def test_the_estimate_counts_what_is_staged():
    """It counts 24 bytes of a row, 48 of Adam's state and 16 of an owner for 900 keys beyond 100 slots.

    And for each key 4 bytes of its slot, and 16 in the list of rows that leave, and in that of those that come.
    """
    features = [FeatureSpec("user", table="user", combiner=None)]
    staged = [
        memory_estimate([table(memory=rows, capacity=5000)], features, num_samples=1000).stores[0].step["staged"]
        for rows in (100, 1000, None)
    ]
    assert staged[:2] == [900 * 88 + 36_000, 36_000]
    plain = memory_estimate([TableSpec("user", 6, ADAM, capacity=5000)], features, num_samples=1000)
    assert plain.stores[0].step["staged"] == plain.host_bytes == 0
    assert "staged" not in str(plain) and "host memory" not in str(plain)
    text = str(memory_estimate([table(memory=100, capacity=5000)], features, num_samples=1000))
    assert "staged" in text and "390.6 KiB of host memory for the device." in text  # 5000 records of 80 bytes


# Growth --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 4])
def test_growth_appends(num_shards):
    """Growth appends a host slab, records, places and statistics; existing content and the cache stay."""
    collection = programs.over(num_shards, [table(memory=8, capacity=16, statistics=True)], FEATURES)
    state, step = collection.init(seed=0), programs.donated_step(collection)
    before = state.stores[0].capacity
    for number in range(6):
        features = programs.batch(collection, user=np.arange(16) + 16 * number)
        state = collection.grow(state, features)
        state, _, stats = step(state, features)
        stats.check()
    (store,) = state.stores
    sizes = [slab.shape[0] for slab in store.rows]
    assert len(sizes) > 1 and sum(sizes) == store.capacity > before == sizes[0]
    for slabs in (store.records, store.tier[0].places, store.statistics):
        assert [slab.shape[0] for slab in slabs] == sizes
    assert {slab.shape[1] for slab in store.rows} == {80} and store.states == ()
    assert store.tier[0].rows.shape[0] == num_shards * collection.stores[0].num_slots
    assert len(collection.export_table(state, "user")["keys"]) == 96


def with_available(monkeypatch, num_bytes):
    """Simulates a host with so many available bytes; returns the limit."""
    limit = HostLimit("MemAvailable", num_bytes, "host")
    monkeypatch.setattr(host_limits, "limits", lambda: [limit])
    return limit


def test_host_memory_that_there_is_not(monkeypatch):
    """It is refused before any change, with the requested bytes, the available bytes and the limit's name."""
    collection = jaxsok.Collection([table(memory=8, capacity=1000)], FEATURES)
    state = collection.init(seed=0)
    limit = with_available(monkeypatch, 79_999)
    text = (
        'got 80000 bytes of host memory for a device (store of tables "user": 1000 rows of 80 bytes), wanted at most '
        "79999 that are available to it (MemAvailable: 79999 bytes for the device); lower"
    )
    with pytest.raises(MemoryError, match=re.escape(f"init: capacity: {text}")):
        collection.init(seed=0)
    with pytest.raises(MemoryError, match=re.escape(f"grow: capacity: {text}")):
        enlarge.grow_to("grow", collection.stores, state, {0: 2000}, collection.shards)
    assert state.stores[0].capacity == 1000 and not state.stores[0].index.is_deleted()
    # Twice the size does not fit, a quarter more does.
    assert enlarge.next_capacity(collection.stores[0], 1000, 1001, None, limit) == 1250
    enough = dataclasses.replace(limit, num_bytes=80_000)
    assert enlarge.next_capacity(collection.stores[0], 1000, 1001, None, enough) == 2000


LIMITED = """
import resource, jaxsok

def collection(capacity):
    memory = jaxsok.HostMemory(device_rows=8)
    table = jaxsok.TableSpec("user", 64, jaxsok.optim.sgd(0.1), capacity=capacity, memory=memory)
    return jaxsok.Collection([table], [jaxsok.FeatureSpec("user", table="user")])

small = collection(1000)
state = small.init(seed=0)
num_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (num_bytes + (300 << 20),) * 2)
try:
    collection(2_000_000).init(seed=0)
except MemoryError as error:
    assert "512000000 bytes (2000000 rows of 256)" in str(error) and "ulimit -v" in str(error), error
    assert small.num_rows(state) == {"user": 0}
    print("refused")
"""


@on_cpu
def test_memory_that_a_limit_of_the_process_refuses():
    """It is no error of XLA, whose message names neither rows nor limit."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr


def test_all_devices_of_a_mesh_share_the_host(monkeypatch):
    """Devices that hold copies of a shard, along an unnamed axis of the mesh, share it as well."""
    mesh = Mesh(programs.mesh(4).devices.reshape(2, 2), ("data", "model"))
    collection = jaxsok.Collection([table(memory=8, capacity=1000)], FEATURES, mesh=mesh, axis="data")
    needed = 4 * 80 * collection.stores[0].capacity
    with_available(monkeypatch, needed)
    state = collection.init(seed=0)
    assert sum(part.data.nbytes for slab in state.stores[0].rows for part in slab.addressable_shards) == needed
    with_available(monkeypatch, needed - 1)
    with pytest.raises(MemoryError, match=f"MemAvailable: {needed - 1} bytes for 4 devices"):
        collection.init(seed=0)


def test_a_maximum_beyond_host_memory(monkeypatch):
    """The warning appears when the state is made, not when the rows exist."""
    collection = jaxsok.Collection([table(memory=8, capacity=10, max_capacity=1000)], FEATURES)
    with_available(monkeypatch, 80_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection.init(seed=0)
    with_available(monkeypatch, 79_999)
    with pytest.warns(RuntimeWarning, match=r"^init: max_capacity: got 80000 bytes .*at most 79999 that") as caught:
        collection.init(seed=0)
    assert [warning.filename for warning in caught] == [__file__]


def test_device_memory_that_there_is_not(monkeypatch):
    """A new store also needs its cache: 8 slots of 92 bytes, and 60 for each row and the counters."""
    collection = jaxsok.Collection([table(memory=8, capacity=10)], FEATURES)
    needed = collection.memory_estimate().stores[0].state["cache"] + 60 * 10
    for free, is_enough in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(enlarge, "agree_on_free_bytes", lambda shards, free=free: free)
        if is_enough:
            collection.init(seed=0)
        else:
            with pytest.raises(MemoryError, match=f"got {needed} bytes .* bytes of cache.*lower device_rows, capacity"):
                collection.init(seed=0)


# Pinned memory -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pinned(monkeypatch):
    """Treats the CPU as a device that needs pinned memory, for which JAX has a memory kind on CPU too."""

    def part(device, shape):
        place = SingleDeviceSharding(device, memory_kind="pinned_host")
        made = jax.device_put(np.zeros(shape, np.uint8), place)
        return jax.make_array_from_single_device_arrays(shape, place, [made])  # with the type that DLPack gives

    monkeypatch.setattr(host_slabs, "_is_pinned", lambda records: True)
    monkeypatch.setattr(host_slabs, "_allocate_pinned", part)


def types_of(store):
    """Returns the printed types of host slabs."""
    return [str(jax.typeof(slab)).split("[")[0] for slab in store.rows]


@on_cpu
@pytest.mark.parametrize("num_shards", [None, 4])
def test_slabs_keep_their_memory(pinned, num_shards):
    """The memory kind stays through steps and growth, without a second compilation; None: no mesh."""
    tables = [table(memory=8, capacity=64)]
    collection = programs.over(num_shards, tables, FEATURES) if num_shards else jaxsok.Collection(tables, FEATURES)
    assert jax.eval_shape(collection.init).stores[0].rows[0].shape[1] == 80
    state, step = collection.init(seed=0), jax.jit(programs.train_step(collection), donate_argnums=0)
    for number in range(4):
        if number == 2:
            state = enlarge.grow_to("grow", collection.stores, state, {0: 100}, collection.shards)
        state, _, stats = step(state, programs.batch(collection, user=np.arange(16) + 8 * number))
        stats.check()
        assert types_of(state.stores[0]) == ["uint8<host>"] * (1 + number // 2)
        assert {slab.sharding.memory_kind for slab in state.stores[0].rows} == {"pinned_host"}
    assert step._cache_size() == 2
    assert len(collection.export_table(state, "user")["keys"]) == 40


@on_cpu
def test_programs_for_growth_are_compiled_ahead(pinned, by_doubling):
    collection = jaxsok.Collection([table(memory=8, capacity=16)], FEATURES)
    step = collection.ahead(jax.jit(programs.train_step(collection), donate_argnums=0))
    state = collection.init(seed=0)
    for number in range(8):
        features = programs.batch(collection, user=np.arange(8) + 8 * number)
        state = collection.grow(jax.block_until_ready(state), features)
        state, _, stats = step(state, features)
        stats.check()
        step.wait()
    assert state.stores[0].capacity == 64 and types_of(state.stores[0]) == ["uint8<host>"] * 3
    assert (step.num_compiled, step.num_hits_ahead) == (1, 2)


@on_cpu
@pytest.mark.parametrize("kind", ["drains", "layouts", "static arguments"])
def test_programs_of_other_structures_are_not_taken_for_those_compiled_ahead(pinned, kind):
    """All leaves are equal: what differs is the structure of the state or the plan, or a static argument."""
    bags = {"combiner": "sum"} if kind == "layouts" else {}
    features = [jaxsok.FeatureSpec(name, "item", **bags) for name in ("user", "other")]
    spec = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=128, memory=jaxsok.HostMemory(device_rows=64))

    def run(ahead):
        collection = jaxsok.Collection([spec], features)

        def step(state, plan, scale):
            embeddings, state, plan = collection.lookup(state, plan)
            return collection.update(state, plan, jax.tree.map(lambda rows: rows * scale, embeddings))

        jitted = jax.jit(step, donate_argnums=0, static_argnums=2 if kind == "static arguments" else ())
        jitted = collection.ahead(jitted) if ahead else jitted
        raws = []
        for number in range(60):
            keys = np.split(np.arange(24) + 24 * number, [12 if not bags else 16 if number % 2 else 8])
            if bags:
                keys = [jaxsok.Bags(mine, lengths=[len(mine) - 2, 1, 1]) for mine in keys]
            raws.append(dict(zip(("user", "other"), keys, strict=True)))
        state = collection.init(seed=0)
        for number, (batch, plan) in enumerate(collection.pipeline(raws, lookahead=int(kind == "drains"))):
            state = collection.drain(state) if kind == "drains" and number % 10 == 9 else state
            state = collection.grow(jax.block_until_ready(state), batch)
            state, stats = jitted(state, plan, 1 + number % 2 if kind == "static arguments" else 1.0)
            stats.check()
            if ahead:
                jitted.wait()
        assert not ahead or jitted.num_ahead > 1
        return programs.by_key(collection, state, "item")

    got, wanted = run(True), run(False)
    np.testing.assert_array_equal(got["keys"], wanted["keys"])
    np.testing.assert_array_equal(programs.bits(got["rows"]), programs.bits(wanted["rows"]))


def is_mapped(address):
    """Returns whether this process has memory mapped there."""
    with open("/proc/self/maps") as lines:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in ranges)


@on_cpu
def test_jax_takes_the_memory_over():
    """JAX takes it without a copy. It is freed with the array, or by itself if it was never taken."""
    slab = jax.dlpack.from_dlpack(HostBytes("cpu", 0, 10_000, 528))
    assert slab.shape == (10_000, 528) and slab.dtype == np.uint8 and not np.asarray(slab).any()
    address = slab.unsafe_buffer_pointer()
    assert is_mapped(address)
    del slab
    gc.collect()
    assert not is_mapped(address)
    untaken = HostBytes("cpu", 0, 10_000, 528)
    address = ctypes.c_void_p.from_address(untaken._tensor).value  # its first word
    assert is_mapped(address)
    del untaken
    assert not is_mapped(address)


@on_cpu
def test_memory_that_the_system_does_not_give():
    device = jax.devices()[0]
    with pytest.raises(
        MemoryError, match=r"got \d+ bytes \(\d+ rows of 1048576\) for .*the system maps no memory of.*"
    ):
        host_slabs._allocate_pinned(device, (2**40, 2**20))


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="on a CPU nothing is recorded")
def test_memory_is_deleted_while_another_thread_records_cuda_graphs():
    """CUDA ends all recordings of a device if a thread waits for the device as a whole."""
    collection = jaxsok.Collection([TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=1_000)], FEATURES)
    is_over, num_deleted, failed = threading.Event(), 0, []

    def delete():
        nonlocal num_deleted
        try:
            while not is_over.is_set():
                host_slabs.new_host_rows(jax.devices()[0], 1_000, 64)
                num_deleted += 1
        except BaseException as error:
            failed.append(error)

    @jax.jit
    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, embeddings)[0]

    state, kept = collection.init(seed=0), []
    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for number in range(2_000):  # XLA records a call again if its arrays lie elsewhere
            kept = [*kept[-(number % 7) :], state]
            features = collection.batch({"user": np.arange(number, number + 32) % 500}).features
            state = jax.block_until_ready(step(state, features))
    finally:
        is_over.set()
        thread.join()
    assert num_deleted > 10 and not failed
    keys = np.array([0, 499, 500])
    np.testing.assert_array_equal(collection.contains(state, "user", keys), [True, True, False])


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="on a CPU no program writes to pinned memory")
def test_results_in_pinned_memory_are_not_copied():
    """They are read where they lie, and stay there while the NumPy array is in use."""
    double = jax.jit(lambda array: jax.device_put(array * 2, jax.memory.Space.Host))
    result = double(np.arange(1000, dtype=np.float32))
    address = result.unsafe_buffer_pointer()
    view = shards.view_on_host(result)
    del result
    gc.collect()
    others = [double(np.full(1000, n, np.float32)) for n in range(8)]
    assert view.ctypes.data == address and not view.flags.writeable
    np.testing.assert_array_equal(view, np.arange(1000, dtype=np.float32) * 2)
    assert len(others) == 8


def test_results_on_a_cpu_are_read_as_ever():
    result = jax.jit(lambda array: array * 2)(np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(shards.view_on_host(result), np.arange(10, dtype=np.float32) * 2)

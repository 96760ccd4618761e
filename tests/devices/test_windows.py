"""The window wire: its calls equal an all-to-all between other calls; whole steps have the dense wire's bits.

Collections use windows on GPUs alone. On the CPU the same handlers block a thread of XLA, so a test runs programs of
one window call for each device, one after the other; there `on_any_platform` lets collections have windows.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxsok
from jaxsok import policies, windows
from jaxsok.kernels import library, window as doors
from jaxsok.shards import ONE_DEVICE, MeshShards

NUM_SHARDS = 4
NUM_SAMPLES = 64  # per shard
CAPACITY = 200  # to send to each shard: more than the keys of a batch
WIRES = (
    {},
    {"rows": "float32", "gradients": "float32"},
    {"rows": "bfloat16", "gradients": "bfloat16"},
    {"rows": "float16", "gradients": "float8_e4m3fn"},
)
ADAM = jaxsok.optim.adam(0.1)


def on_any_platform():
    """Lets collections have windows on the CPU too, within the context."""
    return unittest.mock.patch.object(windows, "_why_not", lambda shards: None)


def mesh_of_gpus():
    """Returns a mesh of all GPUs, at most four; skips if there are fewer than two."""
    num_gpus = len(jax.devices()) if jax.default_backend() == "gpu" else 0
    if num_gpus < 2:
        pytest.skip(f"needs 2 GPUs; there are {num_gpus}")
    return programs.mesh(min(num_gpus, NUM_SHARDS))


def mesh_of_any():
    """Returns a mesh of GPUs or, if the CPU is the default backend, of CPU devices."""
    return programs.mesh(NUM_SHARDS) if jax.default_backend() == "cpu" else mesh_of_gpus()


def collection_of(mesh, wire, tables, features, **exchange):
    """Returns a collection over the mesh's axis "data"."""
    spec = jaxsok.ExchangeSpec(wire=wire, **exchange)
    with on_any_platform():
        return jaxsok.Collection(tables, features, mesh=mesh, axis="data", exchange=spec)


def assert_same_bits(got, want):
    """Compares every leaf except the index and sightings, where the place of an entry is not promised, and lineages."""
    is_compared = []

    def compare(path, got, want):
        name = jax.tree_util.keystr(path)
        if "index" in name or "sightings" in name:
            return
        got, want = (programs.without_lineage(name, np.asarray(each)) for each in (got, want))
        assert got.dtype == want.dtype and got.shape == want.shape, name
        assert got.tobytes() == want.tobytes(), name
        is_compared.append(name)

    jax.tree_util.tree_map_with_path(compare, got, want)
    assert is_compared


def assert_same_on_both_wires(run, *arguments):
    """Asserts that `run(wire, ...)` gives the same bits with windows as without; on GPUs twice with them."""
    wires = ("dense", "window") if jax.default_backend() == "cpu" else ("dense", "window", "window")
    want, *got = (jax.tree.map(np.asarray, run(wire, *arguments)) for wire in wires)
    for results in got:
        assert_same_bits(results, want)


# The choice --------------------------------------------------------------------------------------------------------


def test_the_cpu_has_no_windows():
    """The CPU has none by default, and refuses an explicit request."""
    shards = MeshShards(programs.mesh(2), ("data",))
    if jax.default_backend() == "gpu":
        pytest.skip("the default backend has windows")
    with unittest.mock.patch.object(doors, "open_windows", side_effect=AssertionError):
        assert windows.windows_of(shards, "auto") is None
        assert windows.windows_of(shards, "dense") is None
        with pytest.raises(ValueError, match=r"wire='window'.*platform 'cpu', wanted GPUs; pass wire='auto'"):
            windows.windows_of(shards, "window")


def test_one_shard_needs_no_windows():
    """On one shard nothing is exchanged, whatever the declaration requests."""
    with on_any_platform(), unittest.mock.patch.object(doors, "open_windows", side_effect=AssertionError):
        assert windows.windows_of(ONE_DEVICE, "window") is None
        assert windows.windows_of(MeshShards(programs.mesh(1), ("data",)), "window") is None


def test_the_dense_wire_opens_none():
    """The dense wire opens no windows even if they are available."""
    with on_any_platform(), unittest.mock.patch.object(doors, "open_windows", side_effect=AssertionError):
        assert windows.windows_of(MeshShards(programs.mesh(2), ("data",)), "dense") is None


def test_windows_that_cannot_be_opened():
    """The error has the back end's reason; "auto" falls back to the dense wire."""
    shards = MeshShards(programs.mesh(2), ("data",))
    failing = unittest.mock.patch.object(doors, "open_windows", side_effect=RuntimeError("no NVLink"))
    with on_any_platform(), failing, unittest.mock.patch.object(windows, "_numbers", {}):
        assert windows.windows_of(shards, "auto") is None
        with pytest.raises(ValueError, match="no NVLink; pass wire='auto'"):
            windows.windows_of(shards, "window")


def test_graphs_without_an_order(monkeypatch):
    """Where XLA may run calls of a graph at once there are no windows, and the reason names the flag."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    device = unittest.mock.Mock(platform="gpu")
    shards = unittest.mock.Mock(mesh=unittest.mock.Mock(devices=np.array([device, device])), num_shards=2)
    monkeypatch.setattr(windows, "_is_here", lambda device: True)
    assert "scheduling_mode=CONCURRENT" in windows._why_not(shards)


def test_an_unknown_wire_is_refused():
    """The declaration refuses it."""
    with pytest.raises(ValueError, match='ExchangeSpec: wire: got \'x\', wanted "auto", "dense" or "window"'):
        jaxsok.ExchangeSpec(wire="x")


def num_bytes_of(of_devices):
    """Returns the bytes that the windows of a device take now."""
    return library.load_for(of_devices.platform).JaxsokWindowBytes(of_devices.number)


def test_windows_of_the_same_devices_are_shared():
    """They belong to the process, and only grow."""
    shards = MeshShards(mesh_of_any(), ("data",))
    with on_any_platform():
        first, other = (windows.windows_of(shards, "window") for _ in range(2))
    assert first == other
    first.reserve(1000)
    num_bytes = num_bytes_of(other)
    assert num_bytes >= 1000
    other.reserve(10)
    assert num_bytes_of(first) == num_bytes
    other.reserve(num_bytes)
    assert num_bytes_of(first) >= 2 * num_bytes - 4096  # a larger window, and those of before


def test_more_bytes_than_a_device_has():
    """After the failed request the windows are unchanged."""
    if jax.default_backend() == "cpu":
        pytest.skip("the CPU gives memory that is not there")
    shards = MeshShards(mesh_of_gpus(), ("data",))
    of_mesh = windows.windows_of(shards, "window")
    before = num_bytes_of(of_mesh)
    with pytest.raises(
        RuntimeError, match=r"reserve: num_bytes: got \d+: a device has no room for its window; .*'dense'"
    ):
        of_mesh.reserve(1 << 45)
    assert num_bytes_of(of_mesh) == before


def test_a_number_that_is_not_open():
    """A program traced in another process may have such a number."""
    platform = jax.default_backend()
    assert library.load_for(platform).JaxsokWindowBytes(12345) == 0
    with pytest.raises(RuntimeError, match="unknown window"):
        doors.reserve(platform, 12345, 1)
    with pytest.raises(Exception, match="not traced in this process"):
        jax.block_until_ready(jax.jit(functools.partial(doors.exchange, 12345))(jnp.zeros((2, 4))))


# Calls -------------------------------------------------------------------------------------------------------------


def both_ways(mesh, lines, num_times):
    """Returns rows after `num_times` exchanges, through windows and by XLA; each exchange changes them."""
    with on_any_platform():
        of_mesh = windows.windows_of(MeshShards(mesh, ("data",)), "window")

    def repeat_exchange(exchange):
        def body(lines, _):
            return exchange(lines) + jnp.ones((), lines.dtype), None

        spec = P(mesh.axis_names)
        run = jax.shard_map(
            lambda lines: lax.scan(body, lines, length=num_times)[0],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return np.asarray(jax.jit(run)(lines))

    return repeat_exchange(of_mesh.exchange), repeat_exchange(
        lambda lines: lax.all_to_all(lines, "data", 0, 0, tiled=True)
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4,), np.uint8),
        ((20, 7), np.uint8),
        pytest.param((12, 3), np.uint16, marks=pytest.mark.slow),
        pytest.param((40, 4), np.uint32, marks=pytest.mark.slow),
        ((8, 33), np.float32),
        ((4000, 64), np.float32),
    ],
)
def test_an_exchange_is_an_all_to_all(shape, dtype):
    """Rows have any dtype and number of bytes; seven exchanges in sequence use the same windows."""
    mesh = mesh_of_any()
    rng = np.random.default_rng(0)
    if mesh.size != NUM_SHARDS:
        shape = (shape[0] // NUM_SHARDS * mesh.size, *shape[1:])
    lines = rng.integers(0, 200, (mesh.size * shape[0], *shape[1:])).astype(dtype)
    got, want = both_ways(mesh, lines, 7)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("send_capacity", [1, 40, 1001])
@pytest.mark.parametrize("num_offsets", [1, 17, 5000])
@pytest.mark.parametrize("num_words", [2, 4])
def test_lines_for_each_shard(num_words, num_offsets, send_capacity):
    """Each shard gets its lines from all, cut to the capacity and padded, its offsets, and the load of all shards."""
    mesh = mesh_of_any()
    with on_any_platform():
        of_mesh = windows.windows_of(MeshShards(mesh, ("data",)), "window")
    rng, size, num_lines = np.random.default_rng(send_capacity), mesh.size, 500
    lines = rng.integers(0, 2**32, (size, num_lines, num_words), dtype=np.uint32)
    ends = np.sort(rng.integers(0, num_lines, (size, size)), axis=1)
    starts = np.concatenate([np.zeros((size, 1), np.int64), ends], axis=1).astype(np.int32)
    digests = rng.integers(0, 2**32, (size, 1, 2), dtype=np.uint32)
    offsets = rng.integers(0, 2**31, (size, size, num_offsets)).astype(np.int32)

    def send(*parts):
        out = of_mesh.send_lines(*(part[0] for part in parts), send_capacity)
        return tuple(part[None] for part in out)

    run = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    for _ in range(3):  # in the same windows
        received, offsets_received, load, digest = map(np.asarray, run(lines, starts, digests, offsets))
    counts = np.diff(starts, axis=1)
    padding = np.array([2**32 - 1, 2**32 - 1, 0, 0], np.uint32)[:num_words]
    wanted = np.tile(padding, (size, size, send_capacity, 1))
    for asker in range(size):
        for owner in range(size):
            sent = lines[asker, starts[asker, owner] : starts[asker, owner + 1]][:send_capacity]
            wanted[owner, asker, : len(sent)] = sent
    np.testing.assert_array_equal(received.reshape(wanted.shape), wanted)
    np.testing.assert_array_equal(offsets_received, offsets.swapaxes(0, 1))
    np.testing.assert_array_equal(load.reshape(size, 2), [[counts.max(), counts.sum(axis=0).max()]] * size)
    assert len({words.tobytes() for words in digest}) == 1, "a digest of all is the same everywhere"
    *_, other = map(np.asarray, run(lines, starts, digests[::-1], offsets))
    assert other.tobytes() != digest.tobytes(), "it depends on which shard has which keys"


@pytest.mark.parametrize("num_words", [1, 240, 3000])
def test_a_sum_over_all_shards(num_words):
    """Repeated sums, in one pass or several, are those of NumPy modulo 2**32, the same on all shards."""
    mesh, num_times = mesh_of_any(), 5
    with on_any_platform():
        of_mesh = windows.windows_of(MeshShards(mesh, ("data",)), "window")

    def body(words, same):
        def add(words, _):
            sums = of_mesh.sum(words[0], same)
            return words * 3 + 1, sums

        return lax.scan(add, words, length=num_times)[1]

    words = np.random.default_rng(0).integers(-(2**31), 2**31, (mesh.size, num_words)).astype(np.int32)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P()))
    got = np.asarray(run(words, np.int32(7)))
    for sums in got:
        np.testing.assert_array_equal(sums, words.sum(axis=0, dtype=np.int32))
        words = words * np.int32(3) + np.int32(1)


def test_groups_along_another_axis():
    """Shards exchange with those at their own place on the other axis, whichever axis comes first."""
    num_devices = len(jax.devices())
    if jax.default_backend() == "gpu" and num_devices < 4:
        pytest.skip("needs 4 GPUs")
    for shape, names in (((2, 2), ("model", "data")), ((2, 2), ("data", "model"))):
        mesh = jax.make_mesh(shape, names, axis_types=(programs.AXIS_TYPE,) * 2, devices=jax.devices()[:4])
        lines = np.arange(4 * 6 * 3, dtype=np.int32).reshape(4 * 6, 3)
        got, want = both_ways(mesh, lines, 3)
        np.testing.assert_array_equal(got, want)


# Whole steps: on any platform, where a program has one window call -------------------------------------------------


def one_feature(dtype, dim, combiner, *, hotness=3, form="rows", **table):
    """Returns a table with one feature, and a function that makes its batches by number."""
    tables = [jaxsok.TableSpec("item", dim, ADAM, capacity=2048, dtype=dtype, **table)]
    features = [jaxsok.FeatureSpec("item", "item", combiner=combiner, weighted=combiner == "sum", exchange=form)]

    def raw(number, num_shards):
        rng = np.random.default_rng(number)
        shape = (NUM_SAMPLES * num_shards, hotness)
        keys = rng.integers(0, 300, shape).astype(np.uint64)
        keys[rng.random(shape) < 0.1] = jaxsok.PADDING_KEY
        if combiner != "sum":
            return {"item": keys}
        weights = rng.normal(size=keys.size).astype(np.float32)
        return {"item": jaxsok.Bags(keys.reshape(-1), lengths=np.full(len(keys), hotness, np.int32), weights=weights)}

    return tables, features, raw


def steps_of_one_feature(wire, mesh, world, exchange, send_capacity=CAPACITY):
    """Returns all results of some planned steps, each of whose programs has one window call."""
    tables, features, raw = world
    collection = collection_of(mesh, wire, tables, features, **exchange)
    plan = jax.jit(functools.partial(collection.plan, send_capacity=send_capacity and [send_capacity]))
    lookup, update, find, norm = map(
        jax.jit, (collection.lookup, collection.update, collection.find, collection.gradient_norm)
    )
    state, results = collection.init(seed=3, salt=0), []
    with on_any_platform():
        for number in range(3):
            batch = collection.batch(raw(number, mesh.size)).features
            asked = jax.block_until_ready(plan(batch))
            found = jax.block_until_ready(find(state, asked))
            embeddings, state, used = jax.block_until_ready(lookup(state, asked))
            gradients = jax.block_until_ready(jax.tree.map(jnp.tanh, embeddings))
            length = jax.block_until_ready(norm(state, used, gradients))
            state, stats = jax.block_until_ready(update(state, used, gradients))
            results.append((found, embeddings, length, stats))
    return state, results


@pytest.mark.parametrize(
    ("dtype", "dim", "combiner", "wire"),
    [
        ("float32", 8, "sum", 0),
        pytest.param("float32", 7, "mean", 2, marks=pytest.mark.slow),
        pytest.param("float32", 8, "sum", 3, marks=pytest.mark.slow),
        ("bfloat16", 16, "mean", 0),
        pytest.param("bfloat16", 16, "sqrtn", 1, marks=pytest.mark.slow),
        ("float16", 5, None, 2),
    ],
)
def test_steps_of_one_feature(dtype, dim, combiner, wire):
    """Plan, find, lookup, gradient_norm and update, each a program, have the bits of the dense wire."""
    world = one_feature(dtype, dim, combiner, unknown="initial" if dim == 16 else "zeros")
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, WIRES[wire])


@pytest.mark.parametrize(
    ("dtype", "dim", "combiner", "wire"),
    [
        ("float32", 8, "sum", 0),
        pytest.param("float32", 7, "mean", 2, marks=pytest.mark.slow),
        pytest.param("float32", 8, "sum", 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", 16, "sqrtn", 2, marks=pytest.mark.slow),
        ("float16", 5, "mean", 2),
    ],
)
def test_steps_of_partial_bags(dtype, dim, combiner, wire):
    """The bits agree if owners sum the rows of bags."""
    world = one_feature(dtype, dim, combiner, form="bags", unknown="initial" if dim == 16 else "zeros")
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, WIRES[wire])


def test_partial_bags_with_too_little_room():
    """Unsent uses, keys without admission, and a table on one shard have the bits of the dense wire."""
    options = {"form": "bags", "placement": jaxsok.on(1), "admission": policies.AdmitByCount(2)}
    world = one_feature("float32", 8, "mean", **options)
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, {}, 30)


# Each form occurs once here; the tests above combine every form with every wire.
@pytest.mark.parametrize(("wire", "form"), [(0, "rows"), pytest.param(2, "rows", marks=pytest.mark.slow), (3, "bags")])
def test_plans_that_go_in_rounds(wire, form):
    """Without a send capacity the first requests go through windows, further ones over the dense wire."""
    world = one_feature("float32", 8, "mean", form=form)
    exchange = WIRES[wire] | {"send_capacity": 20}
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, exchange, None)


def targets(function, *arguments):
    """Returns a program's targets that exchange through windows."""
    found = re.findall(r"jaxsok_(\w*window\w*)", jax.jit(function).lower(*arguments).as_text())
    others = [name for name in found if name != "window_meet"]
    assert not others or "window_meet" in found, "threads meet before a program exchanges"
    return others


@pytest.mark.parametrize("form", ["rows", "bags"])
@pytest.mark.parametrize("wire", range(len(WIRES)))
def test_the_calls_of_a_step(wire, form):
    """One call looks up, one updates and one adds up the counts; XLA converts numbers with a scale."""
    tables, features, raw = one_feature("float32", 8, "mean", form=form)
    mesh = mesh_of_any()
    collection = collection_of(mesh, "window", tables, features, **WIRES[wire])
    with on_any_platform():
        state = jax.eval_shape(lambda: collection.init(seed=3, salt=0))
        batch = collection.batch(raw(0, mesh.size)).features
        plan = functools.partial(collection.plan, send_capacity=[CAPACITY])
        asked = jax.eval_shape(plan, batch)
        embeddings, _, used = jax.eval_shape(collection.lookup, state, asked)
        of_bags, has_scale = "bags_" if form == "bags" else "", WIRES[wire].get("rows") == "float16"
        by_xla = ["window_exchange"] if form == "bags" else []
        assert targets(plan, batch) == ["window_lines"]
        found = by_xla if has_scale else [f"lookup_{of_bags}window"]
        assert targets(collection.find, state, asked) == [*found, "window_sum"]  # of the counts
        assert targets(collection.lookup, state, asked) == (by_xla if has_scale else [f"lookup_{of_bags}window"])
        updates = by_xla if has_scale else [f"update_{of_bags}window"]
        assert targets(collection.update, state, used, embeddings) == [*updates, "window_sum"]


def test_steps_of_keys_that_are_not_admitted():
    """The owners' answers let the update know which keys have rows."""
    world = one_feature("float32", 8, "mean", unknown="initial", admission=policies.AdmitByCount(2))
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, {})


def test_plans_with_too_little_room():
    """Unsent keys are part of the hotness of their bags."""
    world = one_feature("float32", 8, "mean")
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, {}, 30)


@pytest.mark.parametrize(
    ("wire", "exchange", "sorts"),
    [("window", {}, True), ("dense", {}, False), ("window", {"gradients": "float16"}, False)],
)
def test_what_a_lookup_sorts_for_its_update(wire, exchange, sorts):
    """The uses of its batch, if the update can send their sums through windows."""
    mesh = mesh_of_any()
    tables, features, raw = one_feature("float32", 8, "mean")
    collection = collection_of(mesh, wire, tables, features, **exchange)
    state, batch = collection.init(seed=3, salt=0), collection.batch(raw(1, mesh.size)).features
    with on_any_platform():
        asked = jax.jit(functools.partial(collection.plan, send_capacity=[CAPACITY]))(batch)
        _, _, plan = jax.eval_shape(collection.lookup, state, asked)
    found = plan.found_of(0).sorted_uses
    assert (found is not None) == sorts
    if sorts:
        num_keys = batch.stores[0].keys.shape[0] // mesh.size
        assert found.shape == (16 * mesh.size * -(-num_keys // 64) * 64,)


def stale_update(wire, mesh, form):
    """Updates with a plan from before rows left the store."""
    tables, features, raw = one_feature("float32", 8, "mean", form=form)
    collection = collection_of(mesh, wire, tables, features)
    state, batch = collection.init(seed=3, salt=0), collection.batch(raw(1, mesh.size)).features
    with on_any_platform():
        asked = jax.jit(functools.partial(collection.plan, send_capacity=[CAPACITY]))(batch)
        embeddings, state, plan = jax.block_until_ready(jax.jit(collection.lookup)(state, asked))
        state, _ = collection.erase(state, "item", np.arange(40, dtype=np.uint64))
        return jax.block_until_ready(jax.jit(collection.update)(state, plan, embeddings))


@pytest.mark.parametrize("form", ["rows", "bags"])
def test_uses_of_stale_plans(form):
    """They are counted, however often a key occurs in a batch, and step no row."""
    mesh = mesh_of_any()
    assert_same_on_both_wires(stale_update, mesh, form)
    _, stats = stale_update("window", mesh, form)
    keys = one_feature("float32", 8, "mean")[2](1, mesh.size)["item"]
    assert int(stats.num_stale) == (keys != jaxsok.PADDING_KEY).sum()


def test_a_table_on_one_shard():
    """All rows go to one owner."""
    world = one_feature("float32", 8, "sqrtn", hotness=2, placement=jaxsok.on(1))
    assert_same_on_both_wires(steps_of_one_feature, mesh_of_any(), world, {})


# Whole steps on GPUs -----------------------------------------------------------------------------------------------

TABLES = [
    jaxsok.TableSpec("user", 8, ADAM, capacity=4096),
    jaxsok.TableSpec("item", 8, ADAM, capacity=4096, unknown="initial"),
    jaxsok.TableSpec("word", 16, jaxsok.optim.rowwise_adagrad(0.1), capacity=4096, dtype="bfloat16"),
    jaxsok.TableSpec("ad", 4, ADAM, capacity=4096, placement=jaxsok.REPLICATED),
    jaxsok.TableSpec(
        "city", 7, ADAM, capacity=4096, dtype="float16", placement=jaxsok.on(1), admission=policies.AdmitByCount(2)
    ),
    jaxsok.TableSpec("tag", 12, ADAM, capacity=4096),
]
FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("item", "item", combiner="mean"),
    jaxsok.FeatureSpec("clicked", "item", combiner="sum", weighted=True, max_keys=4096),
    jaxsok.FeatureSpec("word", "word", combiner="sqrtn"),
    jaxsok.FeatureSpec("ad", "ad"),
    jaxsok.FeatureSpec("city", "city", combiner="mean"),
    jaxsok.FeatureSpec("tag", "tag", combiner="mean", max_keys=4096, exchange="bags"),
]


@functools.cache
def collection_of_all_kinds(mesh, wire, exchange):
    """Returns a collection that tests share, so that its programs compile once."""
    return collection_of(mesh, wire, TABLES, FEATURES, **dict(exchange))


@functools.cache
def train_without_model(collection):
    """Returns a step without a model, jitted, and as a function."""

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.tree.map(jnp.tanh, embeddings)
        length = collection.gradient_norm(state, plan, gradients)
        state, stats = collection.update(state, plan, gradients)
        return state, (embeddings, length, stats)

    return jax.jit(step), step


@functools.cache
def norm(collection):
    """Returns a jitted `collection.gradient_norm`."""
    return jax.jit(collection.gradient_norm)


class World:
    """A collection of all kinds of tables, and its state."""

    def __init__(self, mesh, wire, *, num_samples=NUM_SAMPLES, **exchange):
        self.mesh, self.num_samples = mesh, num_samples
        collection = collection_of_all_kinds(mesh, wire, tuple(exchange.items()))
        self.collection, self.state = collection, collection.init(seed=3, salt=0)
        self.plan, self.find, self.lookup, self.update, self.norm = (
            cached(collection) for cached in (programs.plan, programs.find, programs.lookup, programs.update, norm)
        )
        self.jitted_step, self.step = train_without_model(collection)

    def batch(self, number):
        """Returns features of a batch: keys repeat, some are padding."""
        rng, num = np.random.default_rng(number), self.num_samples * self.mesh.size
        lengths = rng.integers(0, 4, num).astype(np.int32)
        total = int(lengths.sum())
        weights = rng.normal(size=total).astype(np.float32)
        raw = {
            "user": rng.integers(0, 300, num),
            "item": rng.integers(0, 200, (num, 3)),
            "clicked": jaxsok.Bags(rng.integers(0, 200, total), lengths=lengths, weights=weights),
            "word": rng.integers(0, 100, (num, 5)),
            "ad": rng.integers(0, 50, num),
            "city": rng.integers(0, 400, (num, 2)),
            "tag": jaxsok.Bags(rng.integers(0, 300, total), lengths=lengths),
        }
        return self.collection.batch(raw).features

    def train(self, features):
        """Runs a step in one program."""
        self.state, results = self.jitted_step(self.state, features)
        return results


def planned_steps(wire, mesh, exchange, is_planned):
    """Runs steps in one program each, with find in between."""
    world, results = World(mesh, wire, **exchange), []
    for number in range(5):
        features = world.batch(number)
        results.append(world.train(world.plan(features) if is_planned else features))
        results.append(world.find(world.state, features))
    return world.state, results


@pytest.mark.parametrize("wire", range(len(WIRES)))
def test_several_stores(wire):
    """All placements, combiners and row dtypes agree, with admission."""
    assert_same_on_both_wires(planned_steps, mesh_of_gpus(), WIRES[wire], True)


@pytest.mark.parametrize("wire", [0, 3])
def test_several_stores_in_rounds(wire):
    """Without a plan, a loop on the devices ends at the same round on all shards."""
    assert_same_on_both_wires(planned_steps, mesh_of_gpus(), WIRES[wire], False)


def random_calls(wire, mesh, seed):
    """Makes calls in random order: separate programs, which the devices overlap as far as they can."""
    world, results, rng = World(mesh, wire), [], np.random.default_rng(seed)
    for number in range(12):
        features = world.batch(number)
        kind = rng.integers(0, 5)
        if rng.random() < 0.5:
            features = world.plan(features)
        if kind == 0:
            results.append(world.find(world.state, features))
        elif kind == 1:
            results.append(world.train(features))
        elif kind == 2:
            embeddings, world.state, _ = world.lookup(world.state, features)
            results.append(embeddings)
        else:
            plans, gradients = [], []
            for more in range(kind - 2):
                asked = features if more == 0 else world.plan(world.batch(100 + number))
                embeddings, world.state, plan = world.lookup(world.state, asked)
                plans.append(plan)
                gradients.append(jax.tree.map(jnp.tanh, embeddings))
                results.append(world.norm(world.state, plan, gradients[-1]))
            world.state, stats = world.update(world.state, plans, gradients)
            results.append(stats)
    return world.state, results


@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order(seed):
    """lookup, find, gradient_norm and update agree, planned or not."""
    assert_same_on_both_wires(random_calls, mesh_of_gpus(), seed)


def micro_batches(wire, mesh):
    """Runs two lookups, then one update of both, in one program."""
    world, results = World(mesh, wire), []

    @jax.jit
    def step(state, batches):
        plans, gradients = [], []
        for features in batches:
            embeddings, state, plan = world.collection.lookup(state, features)
            plans.append(plan)
            gradients.append(jax.tree.map(jnp.tanh, embeddings))
        return world.collection.update(state, plans, gradients)

    for number in range(3):
        batches = [world.plan(world.batch(3 * number + k)) for k in range(2)]
        world.state, stats = step(world.state, batches)
        results.append(stats)
    return world.state, results


def test_several_lookups_before_one_update():
    """Their gradients meet at the owners."""
    assert_same_on_both_wires(micro_batches, mesh_of_gpus())


def scan_steps(wire, mesh, is_planned):
    """Runs steps in a loop on the devices."""
    world = World(mesh, wire)
    batches = [world.plan(batch) if is_planned else batch for batch in map(world.batch, range(5))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    return jax.jit(lambda state, batches: lax.scan(world.step, state, batches))(world.state, stacked)


@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "rounds"])
def test_inside_scan(is_planned):
    """A call that runs many times in one program has the same bits."""
    assert_same_on_both_wires(scan_steps, mesh_of_gpus(), is_planned)


@pytest.mark.parametrize("names", [("data", "model"), ("model", "data")])
def test_a_second_axis_of_one(names):
    """Nothing is exchanged along the second axis of the mesh."""
    mesh = mesh_of_gpus()
    shape = tuple(mesh.size if name == "data" else 1 for name in names)
    mesh = jax.make_mesh(shape, names, axis_types=(programs.AXIS_TYPE,) * 2, devices=list(mesh.devices.flat))
    assert_same_on_both_wires(planned_steps, mesh, {}, True)


def interrupt_steps(wire, mesh):
    """Runs steps between which the host fails: after a dispatch, and while a program is traced."""
    world, results = World(mesh, wire), []

    def fails(state, features):
        world.collection.lookup(state, features)
        raise KeyError("as a program of the user might")

    for number in range(4):
        features = world.plan(world.batch(number))
        results.append(world.train(features))
        with pytest.raises(KeyError):
            jax.jit(fails)(world.state, features)
        results.append(world.train(world.batch(10 + number)))
    return world.state, results


def test_an_exception_between_two_dispatches():
    """The exception leaves no exchange half done."""
    assert_same_on_both_wires(interrupt_steps, mesh_of_gpus())


def growing(wire, mesh):
    """Runs batches that grow and then shrink; their first programs know only the small windows."""
    results, worlds = [], [World(mesh, wire, num_samples=num_samples) for num_samples in (8, 64, 512)]
    for number, k in enumerate((0, 1, 0, 2, 1, 0, 2)):
        results.append(worlds[k].train(worlds[k].plan(worlds[k].batch(number))))
    return [world.state for world in worlds], results


def test_windows_grow():
    """Windows are added while earlier programs are in use, and their work may still run."""
    assert_same_on_both_wires(growing, mesh_of_gpus())
    of_mesh = windows.windows_of(MeshShards(mesh_of_gpus(), ("data",)), "auto")
    before = num_bytes_of(of_mesh)
    world = World(mesh_of_gpus(), "auto", num_samples=8)
    features = world.plan(world.batch(0))
    world.train(features)
    of_mesh.reserve(before)  # while the step runs
    world.train(features)
    assert num_bytes_of(of_mesh) >= 2 * before - 4096


def test_with_the_latency_hiding_scheduler():
    """XLA may move other work around the calls, but not the calls around each other."""
    mesh_of_gpus()
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_latency_hiding_scheduler=true"
    environment = os.environ | {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    root = pathlib.Path(jaxsok.__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k"]
    command += ["test_inside_scan or test_several_lookups or test_an_exception"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]

"""XLA's programs: no copy of a table, no host call, memory for only the batch; on CPU and for an H200."""

import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from compiled_cases import (
    ALIGNMENT_BYTES,
    CAPACITY,
    H200,
    NUM_SHARDS,
    SHARDED_BYTES,
    addresses,
    cases,
    declare,
    declared_over_eight,
    features_of,
    features_over_eight,
    host_calls,
    linear_step,
    missing_wheels,
    scan_of_steps,
    table_copies,
    two_lookups,
)

import jaxsok

# The smallest array with one element per row: the accumulator of rowwise Adagrad. The batch's arrays stay below it.
TABLE_BYTES = CAPACITY * 4


def state_bytes(state):
    """Returns the bytes of all large arrays of a state."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.size >= CAPACITY)


@functools.cache
def compiled_case(name, capacity=CAPACITY, **more):
    """Returns one case, compiled for the default backend, and the bytes of its state."""
    collection = declare(capacity, **more)
    state = collection.init(seed=0)
    function, arguments = cases(collection)[name]
    return jax.jit(function, donate_argnums=0).lower(state, *arguments).compile(), state_bytes(state)


CASES = ("lookup", "train step", "linear loss", "two lookups", "scan", "find and step", "erase")
KEPT_CASES = ("train step", "two lookups", "scan")  # with statistics as well


def skip_where_xla_drops_barriers(name):
    """Skips cases in which XLA's CPU compiler of jax 0.10 drops the barrier and copies tables read before a change."""
    if name == "find and step" and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):
        pytest.skip(f"XLA's CPU compiler of jax {jax.__version__} drops optimization barriers")


def test_the_helper_sees_a_copy():
    """A table that is not donated must be copied, and the search finds the copy; so a negative result is meaningful."""
    collection = declare()
    state = collection.init(seed=0)
    step = programs.train_step(collection)
    text = jax.jit(step).lower(state, features_of(collection)).compile().as_text()
    assert len(table_copies(text, TABLE_BYTES)) >= 5
    callback = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(np.float32(1)).compile().as_text()
    assert host_calls(callback)


@pytest.mark.parametrize("name", CASES)
def test_no_table_sized_copy_and_no_host_call(name):
    """Donated programs change the tables in place."""
    skip_where_xla_drops_barriers(name)
    compiled, num_bytes = compiled_case(name)
    text = compiled.as_text()
    assert "custom-call" in text
    assert not table_copies(text, TABLE_BYTES)
    assert not host_calls(text)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes


@pytest.mark.parametrize("name", KEPT_CASES)
def test_statistics_add_neither_copies_nor_calls(name):
    """They are recorded in place, by the existing calls."""
    compiled, num_bytes = compiled_case(name, statistics=True)
    text = compiled.as_text()
    assert num_bytes == compiled_case(name)[1] + 2 * CAPACITY * 8
    assert not table_copies(text, TABLE_BYTES)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes
    assert text.count("custom_call_target") == compiled_case(name)[0].as_text().count("custom_call_target")


@pytest.mark.parametrize("name", CASES)
def test_peak_memory_is_the_state_and_the_batch(name):
    """The memory of a step besides the state does not depend on the size of the tables."""
    skip_where_xla_drops_barriers(name)
    small, large = (compiled_case(name, capacity)[0].memory_analysis() for capacity in (CAPACITY, 16 * CAPACITY))
    if name == "erase":
        # Erasing lists the freed rows in ascending order: a few words per row, never the rows themselves.
        num_rows = 2 * 16 * CAPACITY
        assert large.temp_size_in_bytes <= num_rows * 16 + small.temp_size_in_bytes
        return
    assert abs(large.temp_size_in_bytes - small.temp_size_in_bytes) <= ALIGNMENT_BYTES
    # Two stores, each with a workspace of fixed size (4 MiB for sorting), and some dozens of rows per key.
    assert large.temp_size_in_bytes < 10 << 20
    outputs = [analysis.output_size_in_bytes - analysis.alias_size_in_bytes for analysis in (small, large)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lookup", ["jaxsok_lookup"] * 2 + ["jaxsok_tickets_issue"]),
        ("train step", ["jaxsok_lookup", "jaxsok_update"] * 2 + ["jaxsok_tickets_issue", "jaxsok_tickets_redeem"]),
        (
            "two lookups",
            ["jaxsok_lookup"] * 4 + ["jaxsok_update"] * 2 + ["jaxsok_tickets_issue"] * 2 + ["jaxsok_tickets_redeem"],
        ),
    ],
)
def test_a_call_a_store_for_lookup_and_one_for_update(name, wanted):
    """A step has two calls per store, whatever its features, and two for the ticket; each micro-batch adds calls."""
    targets = re.findall(r'custom_call_target="(jaxsok_\w+)"', compiled_case(name)[0].as_text())
    assert sorted(targets) == sorted(wanted)


def test_one_program_serves_all_batches():
    """Other contents of the same shapes cause no compilation."""
    collection = declare()
    step = jax.jit(programs.train_step(collection), donate_argnums=0)
    state = collection.init(seed=0)
    for seed in range(3):
        state, _, _ = step(state, features_of(collection, seed))
    assert step._cache_size() == 1


@functools.cache
def compiled_removal(name, capacity):
    """Compiles `clear` or `erase` of one of two tables that keep statistics, with Adam."""
    options = {"optimizer": jaxsok.optim.adam(0.1), "capacity": capacity // 2, "statistics": True}
    tables = [jaxsok.TableSpec(table, 16, **options) for table in ("user", "item")]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("user", "user")])
    keys = (jnp.asarray(programs.words(np.arange(9))),) if name == "erase" else ()
    call = functools.partial(getattr(collection, name), table="item")
    function = lambda state, *keys: call(state, **dict(zip(("keys",), keys, strict=False)))  # noqa: E731
    state = collection.init(seed=0)
    return jax.jit(function, donate_argnums=0).lower(state, *keys).compile(), state_bytes(state)


@pytest.mark.parametrize("name", ["clear", "erase"])
def test_what_takes_rows_away_needs_a_flag_a_row(name):
    """Records, optimizer state and statistics are not copied; their kernel resets them in place."""
    compiled, num_bytes = compiled_removal(name, 1 << 16)
    text = compiled.as_text()
    # Compared values are read with a broadcast constant, which needs no memory.
    assert not [line for line in table_copies(text, (1 << 16) * 4) if " copy" in line] and not host_calls(text)
    assert re.findall(r'custom_call_target="(jaxsok_\w+)"', text)[-1:] == ["jaxsok_evict_release"]
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= num_bytes
    small = compiled_removal(name, 1 << 12)[0].memory_analysis()
    # The flags.
    assert analysis.temp_size_in_bytes - small.temp_size_in_bytes <= 3 * (1 << 16) + ALIGNMENT_BYTES


EVICTIONS = {
    "one word": jaxsok.policies.LeastRecentlyUsed(),
    "two words": jaxsok.policies.EpochLeastFrequentlyUsed(10),
    "time": jaxsok.policies.TimeToLive(10),
    "norm": jaxsok.policies.SmallNorm(0.1),
}
# Memory per row besides the state: a flag and scores of 4 or 8 bytes, or a flag and a mask (for norms also their
# squares); a count for every 1,024 rows.
BYTES_OF_EVICTION = {"one word": 5, "two words": 9, "time": 2, "norm": 6}


@functools.cache
def compiled_eviction(name, capacity, dtype="float32"):
    """Compiles `Collection.evict` of a store with Adam, by one policy."""
    policy = EVICTIONS[name]
    table = jaxsok.TableSpec("user", 16, jaxsok.optim.adam(0.1), capacity=capacity, eviction=policy, dtype=dtype)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")])
    num_rows = capacity // 2 if policy.has_score else None
    evict = functools.partial(collection.evict, num_rows=num_rows)
    return jax.jit(evict, donate_argnums=0).lower(collection.init(seed=0)).compile()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EVICTIONS)
def test_eviction_copies_nothing_by_row(name, dtype):
    """Rows, state, statistics and records stay in place; only scores and flags have one element per row."""
    small, large = (compiled_eviction(name, capacity, dtype) for capacity in (CAPACITY, 16 * CAPACITY))
    assert not table_copies(large.as_text(), 16 * CAPACITY * 8)
    assert not host_calls(large.as_text())
    temp_bytes = [compiled.memory_analysis().temp_size_in_bytes for compiled in (small, large)]
    assert temp_bytes[1] - temp_bytes[0] <= 15 * CAPACITY * (BYTES_OF_EVICTION[name] + 0.05) + ALIGNMENT_BYTES
    # Everything except the state's arrays outside its stores is aliased.
    assert large.memory_analysis().output_size_in_bytes - large.memory_analysis().alias_size_in_bytes < ALIGNMENT_BYTES


# --------------------------------------------------------------------------------------------------------------
# Over eight devices: every program is for one shard


def stacked_on_devices(*batches):
    """Returns batches for a scan, as arrays with a leading axis of steps."""
    return jax.jit(lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees))(*batches)


def sharded_case(name):
    """Returns a function of a donated state and other arguments, and these arguments: "path, step"."""
    collection = declared_over_eight()
    path, _, kind = name.partition(", ")

    def make_request(seed):
        features = features_over_eight(seed)
        return features if path == "rounds" else collection.plan(features, send_capacity=(16,) * 3)

    if kind == "scan":
        return scan_of_steps(collection), (stacked_on_devices(make_request(0), make_request(1)),)
    if kind == "two plans":
        return two_lookups(collection), (make_request(0), make_request(1))
    make = {"step": programs.train_step, "linear loss": linear_step}[kind]
    return make(collection), (make_request(0),)


@functools.cache
def compiled_sharded_case(name):
    """Returns one case, compiled, and its arguments besides the state."""
    function, arguments = sharded_case(name)
    state = declared_over_eight().init(seed=0)
    lowered = jax.jit(function, donate_argnums=0, compiler_options=programs.in_place()).lower(state, *arguments)
    return lowered.compile(), arguments


# A step whose loss orders its reads and writes is the simplest case, and part of a scan.
SHARDED_CASES = (
    pytest.param("rounds, step", marks=pytest.mark.slow),
    "rounds, linear loss",
    "rounds, scan",
    pytest.param("planned, step", marks=pytest.mark.slow),
    pytest.param("planned, linear loss", marks=pytest.mark.slow),
    "planned, two plans",
    "planned, scan",
)


@pytest.mark.parametrize("name", SHARDED_CASES)
def test_no_table_sized_copy_on_a_mesh(name):
    """Every shard changes its part in place, with rounds in a loop or without, inside a loop over steps or not."""
    compiled, _ = compiled_sharded_case(name)
    text = compiled.as_text()
    assert "all-to-all" in text
    assert not table_copies(text, SHARDED_BYTES)
    assert not host_calls(text)
    assert ("while(" in text) == (name != "planned, step" and name != "planned, linear loss" and "two" not in name)


@pytest.mark.parametrize("name", SHARDED_CASES)
def test_addresses_on_a_mesh_do_not_change(name):
    """On eight devices all donated arrays of the state keep their addresses (law 9)."""
    compiled, arguments = compiled_sharded_case(name)
    state = declared_over_eight().init(seed=0)
    before = addresses(state)
    state, *_ = compiled(state, *arguments)
    state, *_ = compiled(state, *arguments)
    after = addresses(state)
    assert before.keys() == after.keys()
    assert {place for place in before if before[place] != after[place]} == set()


def bytes_beside_the_state(path, num_keys, dim):
    """Returns the bytes per device of a step over eight devices for so many keys, without the state and the results."""
    table = jaxsok.TableSpec("user", dim, jaxsok.optim.adagrad(0.1), capacity=1 << 16)
    collection = programs.over(NUM_SHARDS, [table], [jaxsok.FeatureSpec("user", "user")])
    keys = np.random.default_rng(0).integers(0, 2**40, NUM_SHARDS * num_keys)
    asked = programs.batch(collection, user=keys)
    if path == "planned":
        (_, asked), *_ = collection.pipeline([{"user": keys}])
    state = collection.init(seed=0)
    step = jax.jit(programs.train_step(collection), donate_argnums=0, compiler_options=programs.in_place())
    return step.lower(state, asked).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("path", ["rounds", "planned"])
def test_memory_of_the_exchange_is_that_of_the_batch(path):
    """A dense exchange for the worst case would have room for num_shards batches; this needs less than half of it.

    If rounds are possible there is also room for the requests of all shards and their row ids, 20 bytes per key.
    Counted from 4,096 to 16,384 keys per device, since the kernels' workspaces have a fixed part (8 MiB).
    """
    few, many, dim = 4096, 16_384, 32
    small, large = (bytes_beside_the_state(path, num_keys, dim) for num_keys in (few, many))
    rows_of_the_batch = (many - few) * dim * 4
    requests_of_all = 20 * NUM_SHARDS * (many - few) if path == "rounds" else 0
    assert large - small < 0.5 * NUM_SHARDS * rows_of_the_batch + requests_of_all
    assert small < 12 << 20


# --------------------------------------------------------------------------------------------------------------
# The same for an H200 that need not exist


def compile_for_h200():
    """Runs in its own process (this file as a program): prints the result of each case, as JSON."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxsok.kernels import library

    # Nothing is executed, so the CPU's handlers may replace CUDA's: only names and buffers matter to XLA.
    cpu = library.load_cpu()
    for name, symbol in library.TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(cpu, symbol)), platform="CUDA")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("data",)), PartitionSpec())

    def abstract(leaf):
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

    results = {}
    for capacity, more in ((CAPACITY, {}), (16 * CAPACITY, {}), (CAPACITY, {"statistics": True})):
        collection = declare(capacity, **more)
        state = collection.init(seed=0)
        for name, (function, arguments) in cases(collection).items():
            if (capacity > CAPACITY and name not in ("train step", "scan")) or (more and name not in KEPT_CASES):
                continue
            lowered = jax.jit(function, donate_argnums=0).lower(*jax.tree.map(abstract, (state, *arguments)))
            compiled = lowered.compile()
            memory, text = compiled.memory_analysis(), compiled.as_text()
            results.setdefault(f"{name}, statistics" if more else name, []).append(
                {
                    "copies": table_copies(text, TABLE_BYTES),
                    "host_calls": host_calls(text),
                    "num_custom_calls": text.count("custom-call"),
                    "alias_bytes": memory.alias_size_in_bytes,
                    "temp_bytes": memory.temp_size_in_bytes,
                    "state_bytes": state_bytes(state),
                    "step_bytes": collection.memory_estimate(state, arguments[0]).step_bytes
                    if name in ("lookup", "train step", "linear loss", "find and step")
                    else None,
                }
            )
    results |= compile_for_eight_h200s()
    print(json.dumps(results))


def compile_for_eight_h200s():
    """Compiles the sharded step. A compiler that crashes, as on arguments without elements, crashes here first."""
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{NUM_SHARDS}")
    mesh = Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))
    on_cpu = declared_over_eight()
    collection = jaxsok.Collection(on_cpu.tables, on_cpu.features, mesh=mesh, axis="data")

    def abstract(leaf, spec=None):
        spec = leaf.sharding.spec if spec is None else spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = on_cpu.init(seed=0)
    features = jax.tree.map(abstract, features_over_eight())
    plan = jax.eval_shape(functools.partial(collection.plan, send_capacity=(16,) * 3), features)
    plan = jax.tree.map(lambda leaf: abstract(leaf, PartitionSpec("data")), plan)
    step = jax.jit(programs.train_step(collection), donate_argnums=0)
    results = {}
    for name, asked in zip(MESH_CASES, (features, plan), strict=True):
        compiled = step.lower(jax.tree.map(abstract, state), asked).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        results[name] = [
            {
                "copies": table_copies(text, SHARDED_BYTES),
                "host_calls": host_calls(text),
                "num_custom_calls": text.count("custom-call"),
                "alias_bytes": memory.alias_size_in_bytes,
                "temp_bytes": memory.temp_size_in_bytes,
                "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.stores)) // NUM_SHARDS,
                "step_bytes": collection.memory_estimate(batch=features).step_bytes,
            }
        ]
    return results


MESH_CASES = ("eight devices, rounds", "eight devices, planned")


def test_compiled_for_h200():
    """There is no table-sized copy or host call, everything is in place, and memory does not grow with the tables."""
    reason = missing_wheels()
    if reason is not None:
        pytest.skip(reason)
    if jax.default_backend() == "gpu":
        pytest.skip("this process holds a real GPU: the tests above compiled for it")
    root, helpers = pathlib.Path(jaxsok.__file__).parents[1], pathlib.Path(programs.__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(helpers), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # as users compile
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == {*CASES, *(f"{name}, statistics" for name in KEPT_CASES), *MESH_CASES}
    for name, by_capacity in results.items():
        for result in by_capacity:
            assert result["copies"] == [], name
            assert result["host_calls"] == [], name
            assert result["num_custom_calls"] > 0, name
            assert result["alias_bytes"] >= result["state_bytes"], name
            if result["step_bytes"] is not None:
                assert result["temp_bytes"] <= result["step_bytes"], name
                assert name == "lookup" or result["step_bytes"] <= 2 * result["temp_bytes"], name
        if len(by_capacity) == 2:
            assert abs(by_capacity[1]["temp_bytes"] - by_capacity[0]["temp_bytes"]) <= ALIGNMENT_BYTES, name


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM_SHARDS)
    compile_for_h200()

"""CUDA graphs: the calls that XLA puts into command buffers, for an H200 that need not exist.

XLA decides this at compilation, from a mark on each handler, and can print the sequence of thunks. The
marks are those of the CUDA library if it is built. Otherwise the CPU's handlers represent it, with the additional mark
that ffi/handlers/bind.h gives to all handlers of CUDA.
"""

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest.mock

import compiled_cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import gradients as gradients_module, pipeline, policies, strategy, windows
from jaxsok.kernels import combine as combine_door, library, table as table_door
from jaxsok.kernels.call import StoreArrays
from jaxsok.plan import Plan
from jaxsok.serving import frozen, fused, row_map

CAPTURABLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
# Prefetches run on another stream, and a graph would end only after them. The threads of devices meet while they run a
# program, not while they record it.
EAGER = {"jaxsok_tier_write_ahead", "jaxsok_tier_read_ahead", "jaxsok_window_meet"}
MARKS = {name: 0 if name in EAGER else CAPTURABLE for name, _ in library.TARGETS}


# Marks ---------------------------------------------------------------------------------------------------------------


class _Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base, and the pointer that follows it in XLA_FFI_Metadata_Extension."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata of the oldest FFI; newer versions append to it."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),
    )


class _CallFrame(ctypes.Structure):
    """The first fields of XLA_FFI_CallFrame."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)))


_METADATA = 1  # XLA_FFI_Extension_Metadata
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_kept = []  # objects that ctypes would otherwise free


def listen(handler, answers, name, *, is_marking):
    """Returns a handler that records its answer when XLA queries its marks, and adds a mark if asked."""
    inner = _HANDLER(ctypes.cast(handler, ctypes.c_void_p).value)

    def call(frame):
        error = inner(frame)
        extension = _CallFrame.from_address(frame).extension
        if extension and extension[0].type == _METADATA:
            metadata = _Metadata.from_address(extension[0].metadata)
            answers[name] = metadata.traits
            metadata.traits |= CAPTURABLE if is_marking else 0
        return error

    outer = _HANDLER(call)
    _kept.append(outer)
    return outer


def test_handlers_of_cuda_are_marked():
    """In the built library all CUDA handlers except the eager ones are marked; CPU handlers are not."""
    if not library.library_path("cuda").exists():
        pytest.skip("the CUDA library is not built")
    assert compile_case("marked")["marks"] == MARKS
    assert compile_case("unmarked")["marks"] == {name: 0 for name, _ in library.TARGETS}


def test_all_handlers_of_cuda_are_defined_with_the_mark():
    """In the source handlers are defined in one way, which marks under CUDA, and eager handlers in another."""
    handlers = pathlib.Path(jaxsok.__file__).parents[1] / "ffi/handlers"
    cuda, cpu = handlers.joinpath("bind.h").read_text().split("#else")
    assert "{ffi::Traits::kCmdBufferCompatible})" in cuda and "kCmdBufferCompatible" not in cpu
    sources = {path.name: path.read_text() for path in handlers.glob("*.cc")}
    assert not [name for name, text in sources.items() if "XLA_FFI_DEFINE_HANDLER" in text]
    defined = re.findall(r"JAXSOK_DEFINE_(EAGER_)?(?:WINDOW_)?HANDLER\(\s*(\w+),", "".join(sources.values()))
    wanted = [("EAGER_" if name in EAGER else "", symbol) for name, symbol in library.TARGETS]
    assert sorted(defined) == sorted(wanted)


# XLA's thunks --------------------------------------------------------------------------------------------------------


def sequence(text):
    """Returns thunks as XLA prints them, nested by indentation: [(kind, kinds of all that contain it)]."""
    thunks, path = [], []
    for line in text.splitlines():
        found = re.match(r"( *)\d+: (k\w+)", line)
        if found is None:
            continue
        depth = len(found[1])
        path = [(outer, kind) for outer, kind in path if outer < depth]
        thunks.append((found[2], [kind for _, kind in path]))
        path.append((depth, found[2]))
    return thunks


def test_sequences_are_read():
    """The helper reads an excerpt of XLA's output."""
    text = """001: kCopy         [source] kCopy
000: kWhile         [prev=001 (1)]
    000: kCommandBuffer [source | sink]
        015: kCustomCall         [prev=013 (1)] kCustomCall
    016: kCustomCall         [prev=013 (1)] kCustomCall
"""
    assert sequence(text) == [
        ("kCopy", []),
        ("kWhile", []),
        ("kCommandBuffer", ["kWhile"]),
        ("kCustomCall", ["kWhile", "kCommandBuffer"]),
        ("kCustomCall", ["kWhile"]),
    ]


def plan_shapes(features, abstract, collection, **sizes):
    """Returns the shapes of a plan."""
    return jax.tree.map(abstract, jax.eval_shape(functools.partial(collection.plan, **sizes), features))


def single_cases(abstract):
    """Returns name -> (function of a donated state, arguments) with the targets of one device."""
    collection = compiled_cases.declare()
    state = jax.tree.map(abstract, collection.init(seed=0))
    features = jax.tree.map(abstract, compiled_cases.features_of(collection))
    cases = {
        name: (function, (state, *jax.tree.map(abstract, arguments)))
        for name, (function, arguments) in compiled_cases.cases(collection).items()
        if name in ("train step", "two lookups", "scan", "find and step", "erase")
    }
    return (
        cases
        | {
            "bare step": (bare_step(collection), (state, features)),
            "find": (collection.find, (state, features)),
            "combine_transpose": (transpose_keys, (abstract(jnp.zeros((9, 4))), abstract(np.zeros(9, np.int32)))),
            "rebuild": (
                lambda counters, records: table_door.rebuild(counters, records, 1 << 13),
                (state.stores[0].counters, state.stores[0].records),
            ),
        }
        | life_cases(abstract)
        | tier_cases(abstract)
        | frozen_cases(abstract)
    )


def bare_step(collection):
    """Returns a step without a model, so that only jaxsok's operations occur."""

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, embeddings)

    return step


def frozen_cases(abstract):
    """Returns a lookup of frozen tables, and the operations of their row map on its own arrays."""
    keys, rows = np.arange(64, dtype=np.uint64), np.zeros((64, 8), np.float32)
    source = frozen.SizedRecords(64, [jaxsok.Records(keys, rows)])
    tables, _ = frozen.freeze_records([(frozen.FrozenTable("item", 8), source)])
    words = abstract(np.zeros((16, 2), np.uint32))
    ids = abstract(np.zeros(16, np.uint32))
    store = jax.tree.map(abstract, tables.stores[0])
    records = abstract(np.zeros((64, 4), np.uint32))
    return {
        "frozen": (
            lambda tables, words: fused.lookup_with_counts(tables, {"item": words}),
            (jax.tree.map(abstract, tables), words),
        ),
        "release": (
            lambda index, counters, table_rows, records, words, ids: row_map.release(
                StoreArrays(index, counters, table_rows, (), (records,)), words, ids
            ),
            (store.index, store.counters, abstract(np.zeros(1, np.uint32)), records, words, ids),
        ),
    }


def life_cases(abstract):
    """Returns cases with admission, statistics and an eviction: all operations on one table."""
    item = jaxsok.TableSpec(
        "item",
        dim=8,
        optimizer=jaxsok.optim.adagrad(0.1),
        capacity=4096,
        admission=policies.AdmitByCount(2),
        eviction=policies.LeastRecentlyUsed(),
    )
    collection = jaxsok.Collection([item], [jaxsok.FeatureSpec("clicked", table="item")])
    state = jax.tree.map(abstract, collection.init(seed=0))
    features = jax.tree.map(abstract, collection.batch({"clicked": np.arange(64).reshape(32, 2)}).features)
    words, rows = abstract(np.zeros((16, 2), np.uint32)), abstract(np.zeros((16, 8), np.float32))
    store = state.stores[0]
    return {
        "admitting step": (programs.train_step(collection), (state, features)),
        "assign": (lambda state, keys, rows: collection.assign(state, "item", keys, rows), (state, words, rows)),
        "evict": (lambda state: collection.evict(state, "item", num_rows=100), (state,)),
        "wait": (
            lambda counters, entries: table_door.wait(counters, np.array([2], np.uint32), entries, 4096),
            (store.counters, abstract(np.zeros((64, 4), np.uint32))),
        ),
    }


def tier_cases(abstract):
    """Returns a step and an evaluation with rows in host memory. Topologies lack it, so device memory replaces it."""
    memory = jaxsok.HostMemory(device_rows=100)
    item = jaxsok.TableSpec("item", 8, jaxsok.optim.adagrad(0.1), capacity=4096, memory=memory)
    collection = jaxsok.Collection([item], [jaxsok.FeatureSpec("clicked", table="item")])
    state = jax.tree.map(abstract, collection.init(seed=0))
    features = jax.tree.map(abstract, collection.batch({"clicked": np.arange(64)}).features)
    ahead = Plan(features, following=(Plan(features),))
    in_flight = jax.tree.map(abstract, jax.eval_shape(collection.lookup, state, ahead)[1])

    def multiply_and_step(state, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        return collection.update(state, plan, jax.tree.map(lambda rows: jnp.tanh(rows.T @ rows)[0] + rows, embeddings))

    def stack(leaf):
        return abstract(jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype))

    return {
        "tiered steps ahead": (
            lambda state, plans: jax.lax.scan(multiply_and_step, state, plans),
            (in_flight, jax.tree.map(stack, ahead)),
        ),
        "tiered step": (programs.train_step(collection), (state, features)),
        "tiered step ahead": (programs.train_step(collection), (state, ahead)),
        "tiered last step": (programs.train_step(collection), (in_flight, Plan(features))),
        "tiered find": (collection.find, (state, features)),
    }


def transpose_keys(gradients, inverse):
    """Sums the gradients of single keys into those of 8 rows."""
    bags, num_tiles = gradients_module.as_features([inverse.shape[0]])
    return combine_door.combine_transpose([gradients], inverse, bags, 8, num_tiles)


def sharded_cases(mesh, abstract):
    """Returns cases on eight devices: the step with its plan ready, the plan, and the step with rounds."""
    from jax.sharding import PartitionSpec

    on_cpu = compiled_cases.declared_over_eight()
    collection = jaxsok.Collection(on_cpu.tables, on_cpu.features, mesh=mesh, axis="data")
    state = jax.tree.map(abstract, on_cpu.init(seed=0))
    features = jax.tree.map(abstract, compiled_cases.features_over_eight())
    asked = plan_shapes(
        features, lambda leaf: abstract(leaf, PartitionSpec("data")), collection, send_capacity=(16,) * 3
    )
    step = programs.train_step(collection)
    # Windows of devices that are not there: the calls only name them.
    numbered = windows.Windows("gpu", 0, compiled_cases.NUM_SHARDS)
    summing = [dataclasses.replace(table, row_gradient="sum") for table in on_cpu.tables]
    item = jaxsok.TableSpec("item", 16, jaxsok.optim.rowwise_adagrad(0.1), capacity=1 << 14)
    one_on_cpu = programs.over(compiled_cases.NUM_SHARDS, [item], [jaxsok.FeatureSpec("clicked", "item")])
    with unittest.mock.patch.object(strategy, "windows_of", lambda shards, wire: numbered):
        with_windows = jaxsok.Collection(summing, on_cpu.features, mesh=mesh, axis="data")
        with_one = jaxsok.Collection(one_on_cpu.tables, one_on_cpu.features, mesh=mesh, axis="data")
        scaled = jaxsok.ExchangeSpec(rows="float16")
        with_scales = jaxsok.Collection(summing, on_cpu.features, mesh=mesh, axis="data", exchange=scaled)

    def make_windowed(function):
        def call(*args):
            with unittest.mock.patch.object(windows.Windows, "reserve", lambda self, num_bytes: None):
                return function(*args)

        return call

    # Room for all keys: else steps of bags with divisors take the dense wire.
    plan_of_windows = functools.partial(with_windows.plan, send_capacity=(512,) * 3)
    all_asked = plan_shapes(
        features, lambda leaf: abstract(leaf, PartitionSpec("data")), collection, send_capacity=(512,) * 3
    )
    batch_of_one = one_on_cpu.batch({"clicked": np.arange(1024)}).features
    of_one = jax.tree.map(abstract, batch_of_one)
    asked_of_one = plan_shapes(
        batch_of_one, lambda leaf: abstract(leaf, PartitionSpec("data")), one_on_cpu, send_capacity=(64,)
    )

    def joined_step(state, features, asked):
        return pipeline.step_with_plan(bare_step(with_one), with_one, (64,))(state, asked, jaxsok_features=features)

    def stacked_steps(state, features, asked):
        steps = functools.partial(jax.lax.scan, bare_step(with_one))
        return pipeline.step_with_plan(steps, with_one, (64,))(state, asked, jaxsok_features=features)

    def stack(leaf):
        shape = jax.ShapeDtypeStruct((4, *leaf.shape), leaf.dtype)
        return abstract(shape, PartitionSpec(None, "data"))

    return {
        "one store, windows, stacked": (
            make_windowed(stacked_steps),
            (
                jax.tree.map(abstract, one_on_cpu.init(seed=0)),
                *(jax.tree.map(stack, x) for x in (of_one, asked_of_one)),
            ),
        ),
        "one store, windows, joined": (
            make_windowed(joined_step),
            (jax.tree.map(abstract, one_on_cpu.init(seed=0)), of_one, asked_of_one),
        ),
        "one store, windows, loads, plan": (
            make_windowed(lambda features: with_one.plan_with_loads(features, (64,))),
            (of_one,),
        ),
        "eight devices, windows": (make_windowed(programs.train_step(with_windows)), (state, all_asked)),
        "eight devices, windows, plan": (make_windowed(plan_of_windows), (features,)),
        "eight devices, windows, scaled": (make_windowed(programs.train_step(with_scales)), (state, all_asked)),
        "eight devices, planned": (step, (state, asked)),
        "eight devices, rounds": (step, (state, features)),
        "eight devices, plan": (functools.partial(collection.plan, send_capacity=(16,) * 3), (features,)),
    }


SINGLE = ("train step", "bare step", "two lookups", "scan", "find and step")
SMALL = (
    "find",
    "erase",
    "combine_transpose",
    "rebuild",
    "admitting step",
    "assign",
    "evict",
    "wait",
    "tiered step",
    "tiered last step",
    "tiered find",
    "frozen",
    "release",
)  # fewer commands than XLA captures by default
ONE_STORE = ("one store, windows, joined", "one store, windows, loads, plan")
SHARDED = (
    "eight devices, windows",
    "eight devices, windows, plan",
    "eight devices, windows, scaled",
    "eight devices, planned",
    "eight devices, rounds",
    "eight devices, plan",
)


def compile_for_h200(marks):
    """Runs in its own process (this file as a program): prints the sequence of each case, as JSON."""
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    is_built = library.library_path("cuda").exists()
    handlers = library.load_for("gpu" if is_built and marks == "marked" else "cpu")
    answers = {}
    for name, symbol in library.TARGETS:
        is_marking = marks == "marked" and not is_built and name not in EAGER
        handler = listen(getattr(handlers, symbol), answers, name, is_marking=is_marking)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")

    def mesh_of(num_devices):
        shape = f"1x1x{num_devices}"
        topology = topologies.get_topology_desc(platform="cuda", target_config=compiled_cases.H200, topology=shape)
        return Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))

    single, eight = mesh_of(1), mesh_of(compiled_cases.NUM_SHARDS)

    def on_one(leaf):
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=NamedSharding(single, PartitionSpec()))

    def on_eight(leaf, spec=None):
        spec = leaf.sharding.spec if spec is None else spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(eight, spec))

    cases = single_cases(on_one)
    if marks == "marked":
        cases |= sharded_cases(eight, on_eight)
    else:
        cases = {"train step": cases["train step"]}
    results, order = {}, None
    for name, (function, arguments) in cases.items():
        lowered = jax.jit(function, donate_argnums=() if name.endswith(("find", "plan", "frozen")) else 0).lower(
            *arguments
        )
        with tempfile.TemporaryDirectory() as folder:
            # The defaults, as users get them, except that XLA by default leaves out graphs of fewer than five commands.
            least = {} if name in SINGLE else {"xla_gpu_graph_min_graph_size": 1}
            text = lowered.compile(compiler_options={"xla_dump_to": folder} | least).as_text()
            (dumped,) = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
            results[name] = [sequence(dumped.read_text()), re.findall(r'custom_call_target="(\w+)"', text)]
            if name == "tiered steps ahead":
                order = order_of_moves(text)
    print(json.dumps({"marks": answers, "cases": results, "order": order}))


def order_of_moves(text):
    """Returns in what order XLA runs a product of matrices, and the calls that move rows ahead."""
    (body,) = [part for part in re.split(r"\n(?=(?:ENTRY )?%[\w.-]+ \()", text) if "tier_read_ahead" in part]
    return re.findall(r"tier_write_ahead|tier_read_ahead|dot_general(?= *\")", body)


@functools.cache
def compile_case(marks):
    """Returns the results of `compile_for_h200`; skips if it cannot run."""
    reason = compiled_cases.missing_wheels()
    if reason is not None:
        pytest.skip(reason)
    root, helpers = pathlib.Path(jaxsok.__file__).parents[1], pathlib.Path(programs.__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(helpers), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # as users compile
    }
    command = [sys.executable, __file__, marks]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def split(thunks):
    """Splits calls into those in command buffers and those outside."""
    calls = [path for kind, path in thunks if kind == "kCustomCall"]
    return [path for path in calls if "kCommandBuffer" in path], [
        path for path in calls if "kCommandBuffer" not in path
    ]


@pytest.mark.parametrize("name", SINGLE)
def test_a_program_of_one_device_is_one_command_buffer(name):
    """With XLA's defaults one graph has the whole step and all of our calls; in a scan, each iteration."""
    thunks, targets = compile_case("marked")["cases"][name]
    inside, outside = split(thunks)
    assert targets and all(target.startswith("jaxsok_") for target in targets)
    assert len(inside) == len(targets) and not outside
    if name != "scan":
        assert [kind for kind, path in thunks if not path] == ["kCommandBuffer"]
    else:
        buffers = [path for kind, path in thunks if kind == "kCommandBuffer" and "kWhile" in path]
        assert len(buffers) == 1


def test_counts_cost_one_kernel():
    """XLA's own kernels: one joins the Stats of all stores; a step counts itself, and stacks Adam's numbers.

    A step has one more kernel, which adds up refused keys. Tickets add no kernel and no copy of open tickets.
    """
    for name, num_kernels in (("find", 1), ("bare step", 3 + 1)):
        thunks, _ = compile_case("marked")["cases"][name]
        others = [kind for kind, _ in thunks if kind not in ("kCommandBuffer", "kCustomCall", "kCopy")]
        assert others == ["kCustomKernel"] * num_kernels, name


@pytest.mark.parametrize("name", SMALL + SHARDED + ONE_STORE)
def test_every_call_is_captured(name):
    """If XLA also captures the smallest graphs, all of our calls are captured, between collectives."""
    thunks, targets = compile_case("marked")["cases"][name]
    inside, outside = split(thunks)
    # Threads meet once in a program, whichever of its calls ask for it.
    num_meetings = targets.count("jaxsok_window_meet")
    assert num_meetings == len(outside) == (1 if "windows" in name else 0)
    assert len(inside) == sum(target.startswith("jaxsok_") for target in targets) - num_meetings > 0


@pytest.mark.parametrize("name", ONE_STORE)
def test_a_plan_for_the_pipeline_is_one_command_buffer(name):
    """So is a step that makes one. Both copy no more than loads to the host, and the features that a plan returns."""
    thunks, _ = compile_case("marked")["cases"][name]
    assert [kind for kind, path in thunks if not path] == ["kCustomCall", "kCommandBuffer"]  # threads meet first
    assert [kind for kind, _ in thunks].count("kCopy") == (1 if name.endswith("joined") else 2)


def test_calls_of_stacked_steps_are_captured():
    """In both loops, over steps and over plans, all calls but the meetings of threads are in graphs."""
    thunks, targets = compile_case("marked")["cases"]["one store, windows, stacked"]
    inside, outside = split(thunks)
    assert all("kWhile" in path for path in inside + outside)
    num_meetings = targets.count("jaxsok_window_meet")
    assert num_meetings == len(outside) == 2
    assert len(inside) == sum(target.startswith("jaxsok_") for target in targets) - num_meetings > 0


def test_what_is_moved_ahead_stays_outside():
    """A step that looks up ahead has two such calls, and the second runs in parallel with the later calls."""
    thunks, targets = compile_case("marked")["cases"]["tiered step ahead"]
    inside, outside = split(thunks)
    eager = [target for target in targets if target in EAGER]
    assert sorted(eager) == ["jaxsok_tier_read_ahead", "jaxsok_tier_write_ahead"] and len(outside) == len(eager)
    assert len(inside) == len(targets) - len(eager) > 0


def test_what_is_moved_ahead_begins_before_the_model():
    """Rows cross the link while the model runs; left alone, XLA begins the moves at the end of an iteration."""
    order = compile_case("marked")["order"]
    assert order[:2] == ["tier_write_ahead", "tier_read_ahead"] and "dot_general" in order[2:]


def test_every_target_is_among_the_cases():
    """The tests above therefore cover all marked handlers."""
    seen = {target for _, targets in compile_case("marked")["cases"].values() for target in targets}
    assert seen >= {name for name, mark in MARKS.items() if mark}


def test_without_marks_calls_stay_outside():
    """The tests above can fail. Each of the two stores has a lookup and an update; a ticket is made and redeemed."""
    thunks, targets = compile_case("unmarked")["cases"]["train step"]
    inside, outside = split(thunks)
    calls = ["jaxsok_lookup", "jaxsok_update"] * 2 + ["jaxsok_tickets_issue", "jaxsok_tickets_redeem"]
    assert len(outside) == len(targets) and sorted(targets) == sorted(calls) and not inside


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", compiled_cases.NUM_SHARDS)
    compile_for_h200(sys.argv[1])

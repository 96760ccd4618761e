"""Programs that several test modules compile, and the copies, host calls and addresses in XLA's result."""

import functools
import importlib.metadata
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import programs

import jaxsok

NUM_BAGS, MAX_KEYS, NUM_STEPS = 32, 128, 3
CAPACITY = 1 << 14
ALIGNMENT_BYTES = 4096  # XLA rounds up and packs: equal programs may differ by a few hundred bytes


def declare(capacity=CAPACITY, **more):
    """Declares two stores with all kinds of features, optimizers with and without state; `more` goes to all tables."""
    rowwise, adam = jaxsok.optim.rowwise_adagrad(0.1), jaxsok.optim.adam(0.1)
    return jaxsok.Collection(
        [
            jaxsok.TableSpec("user", 16, rowwise, capacity=capacity // 2, **more),
            jaxsok.TableSpec("item", 16, rowwise, capacity=capacity // 2, **more),
            jaxsok.TableSpec("ad", 4, adam, capacity=capacity, **more),
        ],
        [
            jaxsok.FeatureSpec("user", "user"),
            jaxsok.FeatureSpec("history", "item", combiner="mean", weighted=True, max_keys=MAX_KEYS),
            jaxsok.FeatureSpec("basket", "item", combiner="sqrtn"),
            jaxsok.FeatureSpec("ad", "ad", combiner=None, max_keys=MAX_KEYS),
        ],
    )


def features_of(collection, seed=0):
    """Returns one batch."""
    rng = np.random.default_rng(seed)
    lengths = np.full(NUM_BAGS, 3)
    weights = np.ones(3 * NUM_BAGS, np.float32)
    return collection.batch(
        {
            "user": rng.integers(0, 2**40, NUM_BAGS),
            "history": jaxsok.Bags(rng.integers(0, 99, 3 * NUM_BAGS), lengths=lengths, weights=weights),
            "basket": rng.integers(-1, 99, (NUM_BAGS, 2)),
            "ad": jaxsok.Bags(rng.integers(0, 99, 3 * NUM_BAGS), lengths=lengths),
        }
    ).features


def two_lookups(collection):
    """Returns a step of two micro-batches, with an evaluation lookup between them."""

    def step(state, first, second):
        embeddings, state, plan = collection.lookup(state, first)
        more, state, other = collection.lookup(state, second)
        gradients = [jax.grad(programs.loss_of)(embeddings), jax.grad(programs.loss_of)(more)]
        return collection.update(state, [plan, other], gradients)

    return step


def linear_step(collection):
    """Returns a step whose gradient does not depend on the embeddings: the model does not order read before write."""

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        state, stats = collection.update(state, plan, jax.tree.map(jnp.ones_like, embeddings))
        return state, embeddings, stats

    return step


def scan_of_steps(collection):
    """Returns a program of several steps."""

    def steps(state, stacked):
        def body(state, features):
            state, loss, stats = programs.train_step(collection)(state, features)
            return state, (loss, stats)

        return jax.lax.scan(body, state, stacked)

    return steps


def find_and_step(collection):
    """Returns a program that computes metrics of the state before the step; the barrier orders them first."""

    def step(state, features):
        found, stats = collection.find(state, features)
        state, found = jax.lax.optimization_barrier((state, found))
        state, loss, more = programs.train_step(collection)(state, features)
        return state, found, loss, stats + more

    return step


def cases(collection):
    """Returns name -> (function of a donated state and features, features)."""
    first, two = features_of(collection), features_of(collection, 1)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[features_of(collection, i) for i in range(NUM_STEPS)])
    return {
        "lookup": (collection.lookup, (first,)),
        "train step": (programs.train_step(collection), (first,)),
        "linear loss": (linear_step(collection), (first,)),
        "two lookups": (two_lookups(collection), (first, two)),
        "scan": (scan_of_steps(collection), (stacked,)),
        "find and step": (find_and_step(collection), (first,)),
        "erase": (
            lambda state, keys: collection.erase(state, "item", keys),
            (jnp.asarray(programs.words(np.arange(9))),),
        ),
    }


def table_copies(text, num_bytes):
    """Returns lines of HLO that materialise `num_bytes` or more: copies, joins, fills, slices set by XLA."""
    pattern = re.compile(
        r"= \(?([a-z]+)(\d*)\[([\d,]+)\]\S* "
        r"(copy|copy-start|concatenate|transpose|broadcast|dynamic-update-slice|pad)\("
    )
    lines = []
    for line in text.splitlines():
        match = pattern.search(line)
        if match is None:
            continue
        itemsize = max(int(match[2] or 8) // 8, 1)
        if itemsize * math.prod(map(int, match[3].split(","))) >= num_bytes:
            lines.append(line.strip())
    return lines


def host_calls(text):
    """Returns lines of HLO that communicate with the host."""
    return [
        line.strip()
        for line in text.splitlines()
        if re.search(r"callback|infeed\(|outfeed\(|send\(|recv\(|MoveToHost", line)
    ]


NUM_SHARDS = 8
SHARD_CAPACITY = 1 << 12  # of the smaller store: its rows of Adam are the smallest large arrays except for the records
SHARDED_BYTES = SHARD_CAPACITY * 16


@functools.cache
def declared_over_eight():
    """Declares sharded stores with two placements or partial bags and a replicated store; with and without divisors."""
    adagrad, adam = jaxsok.optim.adagrad(0.1), jaxsok.optim.adam(0.1)
    tables = [
        jaxsok.TableSpec("user", 16, adagrad, capacity=NUM_SHARDS * SHARD_CAPACITY, row_gradient="mean"),
        jaxsok.TableSpec("item", 16, adagrad, capacity=64, row_gradient="mean", placement=jaxsok.on(3)),
        jaxsok.TableSpec("ad", 4, adam, capacity=SHARD_CAPACITY, placement=jaxsok.REPLICATED),
        jaxsok.TableSpec("tag", 8, adagrad, capacity=NUM_SHARDS * SHARD_CAPACITY),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("item", "item", combiner="mean", max_keys=MAX_KEYS),
        jaxsok.FeatureSpec("ad", "ad"),
        jaxsok.FeatureSpec("tag", "tag", combiner="mean", exchange="bags"),
    ]
    return programs.over(NUM_SHARDS, tables, features)


def features_over_eight(seed=0):
    """Returns one batch."""
    rng = np.random.default_rng(seed)
    return programs.batch(
        declared_over_eight(),
        user=rng.integers(0, 2**40, NUM_BAGS),
        item=jaxsok.Bags(rng.integers(0, 20, NUM_BAGS), lengths=np.ones(NUM_BAGS, int)),
        ad=rng.integers(-1, 99, (NUM_BAGS, 2)),
        tag=rng.integers(-1, 99, (NUM_BAGS, 3)),
    )


def addresses(state):
    """Returns the address of each part of each array, by path and device."""
    return {
        (path, part.device.id): part.data.unsafe_buffer_pointer()
        for path, leaf in programs.state_leaves(state)
        for part in leaf.addressable_shards
    }


# XLA keeps the full description in xla/backends/gpu/target_config/specs/h200.txtpb; these fields are enough.
H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 device_vendor: "NVIDIA Corporation" name: "NVIDIA H200 141GB HBM3e"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" }
  platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
  device_description_str: "NVIDIA H200 141GB HBM3e" """


def missing_wheels():
    wanted = importlib.metadata.version("jaxlib")
    for wheel in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            found = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"{wheel}=={wanted} is not installed"
        if found != wanted:
            return f"{wheel} is {found}, jaxlib is {wanted}"
    return None

"""Collections, batches in the form of the library and of the oracle, and programs jitted once, for all tests."""

import dataclasses
import functools
import hashlib
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import strategies
from jax.sharding import AxisType

import jaxsok
from jaxsok.types import COUNTERS

PADDING = jaxsok.PADDING_KEY


# --------------------------------------------------------------------------------------------------------------
# Programs, compiled once for all collections that are declared alike

_FIRST = {}


def first_of_equals(collection):
    """Returns the first collection that was declared like this one: its programs take the states of all of them."""
    return _FIRST.setdefault((collection._steps, collection.features), collection)


def for_equals(make):
    """Calls a function of a collection once for all collections that are declared alike."""
    cached = functools.cache(make)
    return functools.wraps(make)(lambda collection: cached(first_of_equals(collection)))


@for_equals
def lookup(collection):
    """Returns jitted `collection.lookup`."""
    return jax.jit(collection.lookup)


@for_equals
def plan(collection):
    """Returns jitted `collection.plan`."""
    return jax.jit(collection.plan)


@for_equals
def find(collection):
    """Returns jitted `collection.find`."""
    return jax.jit(collection.find)


@for_equals
def update(collection):
    """Returns jitted `collection.update`."""
    return jax.jit(collection.update)


def loss_of(embeddings):
    """Returns a loss that is not linear in the embeddings."""
    return sum(jnp.sum(jnp.tanh(embedding) ** 2) for embedding in embeddings.values())


def train_step(collection, loss=loss_of):
    """Returns one whole step: lookup, loss and its gradients, update."""

    def step(state, features):
        embeddings, state, plan_ = collection.lookup(state, features)
        value, gradients = jax.value_and_grad(loss)(embeddings)
        state, stats = collection.update(state, plan_, gradients)
        return state, value, stats

    return step


@for_equals
def donated_step(collection):
    """Returns jitted `train_step` that donates its state."""
    return jax.jit(train_step(collection), donate_argnums=0)


def only_on_gpus(*values):
    """Makes a parameter whose size selects other code only on a GPU; without a GPU it is slow."""
    return pytest.param(*values, marks=() if jax.default_backend() == "gpu" else pytest.mark.slow)


# --------------------------------------------------------------------------------------------------------------
# Collections


def one_table(
    *,
    dim=4,
    optimizer=None,
    combiner="sum",
    weighted=False,
    max_keys=None,
    max_hotness=None,
    key_dtype="int64",
    name="user",
    **spec,
):
    """Returns a collection of one table with one feature; both are called `name`."""
    optimizer = jaxsok.optim.sgd(1.0) if optimizer is None else optimizer
    spec = {"capacity": 64, **spec}
    table = jaxsok.TableSpec(name, dim, optimizer, **spec)
    feature = jaxsok.FeatureSpec(
        name,
        name,
        combiner=combiner,
        weighted=weighted,
        max_keys=max_keys,
        max_hotness=max_hotness,
        key_dtype=key_dtype,
    )
    return jaxsok.Collection([table], [feature])


def batch(collection, **raw):
    """Returns the features of a batch."""
    return collection.batch(raw).features


def as_array(keys):
    """Converts Python integers to uint64, whatever their sign bit."""
    return np.array([int(key) % 2**64 for key in np.ravel(np.asarray(keys, object))], np.uint64).reshape(
        np.shape(np.asarray(keys, object))
    )


def words(keys):
    """Converts keys to JAX's words: uint32[..., 2], low word first."""
    keys = as_array(keys)
    return np.stack([keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], -1).astype(np.uint32)


def to_bags(bags):
    """Converts the oracle's ragged bags to `jaxsok.Bags` with lengths."""
    pairs = [oracle.keys_and_weights(bag) for bag in bags]
    flat = as_array([key for keys, _ in pairs for key in keys]).reshape(-1)
    lengths = np.array([len(keys) for keys, _ in pairs], np.int32)
    if not any(isinstance(entry, tuple) for bag in bags for entry in bag):
        return jaxsok.Bags(flat, lengths=lengths)
    weights = np.array([weight for _, weights in pairs for weight in weights], np.float32)
    return jaxsok.Bags(flat, lengths=lengths, weights=weights)


def learn(collection, state, features, gradient=1.0):
    """Makes one lookup and one update with the same gradient for every embedding; returns state and stats."""
    embeddings, state, plan_ = lookup(collection)(state, features)
    gradients = jax.tree.map(lambda e: jnp.full(e.shape, gradient, e.dtype), embeddings)
    return update(collection)(state, plan_, gradients)


def insert(collection, state, keys, *, name="user", grow=False):
    """Looks up an array of keys, one key per sample, and returns the state; `grow` runs first if requested."""
    features = batch(collection, **{name: as_array(keys)})
    if grow:  # after the batch is packed, since a collection learns from its batches how many keys one step may insert
        state = collection.grow(state)
    _, state, _ = lookup(collection)(state, features)
    return state


# --------------------------------------------------------------------------------------------------------------
# Reading results


def export(collection, state, name="user"):
    """Returns a table as a dict from key to (row id, row, [state arrays])."""
    table = collection.export_table(state, name)
    states = list(table["state"].values())
    return {
        int(key): (int(row_id), row, [array[i] for array in states])
        for i, (key, row, row_id) in enumerate(zip(table["keys"], table["rows"], table["row_ids"], strict=True))
    }


def rows_of(collection, state, name="user"):
    """Returns a table as a dict from key to row."""
    return {key: row for key, (_, row, _) in export(collection, state, name).items()}


def counts(stats, table="user"):
    """Returns the five counts of law 5 of one table, as Python integers."""
    return {name: int(stats.to_dict()[table][name]) for name in oracle.COUNTS}


def total(stats, name):
    """Returns one field of the statistics, summed over tables or stores."""
    return int(np.sum(getattr(jax.device_get(stats), name)))


def state_leaves(state):
    """Returns (path, leaf) of every array in a state."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


def assert_same_state(first, second, *, index=True):
    """Checks bitwise equality of two states; without `index`, ignores where entries are in the index (law 3)."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    is_one_life = np.array_equal(*(getattr(each, "lineage", 0) for each in (first, second)))
    for (path, a), (_, b) in zip(state_leaves(first), state_leaves(second), strict=True):
        a, b = (bits(leaf) if index else without_places(path, bits(leaf)) for leaf in (a, b))
        if not is_one_life:
            a, b = without_lineage(path, a), without_lineage(path, b)
        np.testing.assert_array_equal(a, b, err_msg=path)


def without_lineage(path, leaf):
    """Removes the lineage from an array of a state; of tickets, which depend on it, whether they are open stays.

    Each call of `init` in a process, and each state made from a folder, begins its own lineage.
    """
    if path.endswith(".lineage"):
        return np.zeros_like(leaf)
    if path.endswith(".tickets"):  # the second line is the number of lookups
        return np.where(np.arange(leaf.shape[1])[:, None] == 1, leaf, leaf != 0)
    return leaf


def without_places(path, leaf):
    """Removes what depends on the salt from an array of a state: entries are sorted, and longest_probe goes."""
    if "index" in path or "sightings" in path:
        entries = leaf.reshape(-1, 4)
        return entries[np.lexsort(entries.T)]
    if "counters" in path:
        words = leaf.reshape(-1, len(COUNTERS)).copy()
        words[:, [COUNTERS.index(name) for name in ("salt_low", "salt_high", "longest_probe")]] = 0
        return words
    return leaf


def seconds(call):
    """Returns how long a call takes, to the end of its work on the device."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def read(array):
    """Copies an array to NumPy, part by part.

    JAX would keep hold of one that several devices have in host memory, and no later step could take it over.
    """
    if not isinstance(array, jax.Array) or len(array.addressable_shards) == 1:
        return np.array(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def bits(array):
    """Returns the bits of an array, so that equality sees -0 and NaN; bfloat16 is of NumPy's kind "V"."""
    array = np.ascontiguousarray(read(array))
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind in "fV" else array


def assert_same_tables(collection, first, second, rtol=0):
    """Checks equality of what two states export: to the bit, or for numbers within `rtol`."""

    def assert_same(a, b, name):
        if rtol == 0:
            np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 100, err_msg=name)

    for table in collection.tables:
        a, b = collection.export_table(first, table.name), collection.export_table(second, table.name)
        np.testing.assert_array_equal(a["keys"], b["keys"])
        np.testing.assert_array_equal(a["row_ids"], b["row_ids"])
        assert_same(a["rows"], b["rows"], "rows")
        assert a["state"].keys() == b["state"].keys()
        for name in a["state"]:
            assert_same(a["state"][name], b["state"][name], name)


# --------------------------------------------------------------------------------------------------------------
# Initial rows

_CHUNK = 256  # keys per request: one compilation per table


@functools.cache
def _initial_row_finder(name, dim, initializer, seed):
    table = jaxsok.TableSpec(name, dim, jaxsok.optim.sgd(1.0), initializer=initializer, capacity=16)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("probe", name)])
    return collection, collection.init(seed=seed)


def initial_rows(name, dim, keys, *, initializer=None, seed=0):
    """Reads from `find` on a new state what new rows hold: float32[n, dim]."""
    initializer = jaxsok.initializers.uniform() if initializer is None else initializer
    collection, state = _initial_row_finder(name, dim, initializer, seed)
    keys = as_array(keys)
    rows = []
    for start in range(0, len(keys), _CHUNK):
        chunk = np.full(_CHUNK, PADDING, np.uint64)
        part = keys[start : start + _CHUNK]
        chunk[: len(part)] = part
        embeddings, _ = find(collection)(state, batch(collection, probe=chunk))
        rows.append(np.asarray(embeddings["probe"])[: len(part)])
    return np.concatenate(rows) if rows else np.zeros((0, dim), np.float32)


def initial_row(name, dim, **options):
    """Returns the oracle's callback: key -> initial row; each key is requested once."""
    cache = {}

    def row(key):
        if key not in cache:
            cache[key] = initial_rows(name, dim, [key], **options)[0]
        return cache[key]

    return row


# --------------------------------------------------------------------------------------------------------------
# The only look inside: how tests aim keys at one bucket


def index_of(collection, state, store=0):
    """Returns (num_buckets, salt) of a store's index, for `strategies.keys_of_one_bucket`."""
    store = state.stores[store]
    counters = np.asarray(store.counters)
    return store.index.shape[0], int(counters[6]) | int(counters[7]) << 32


def aimed_keys(collection, state, num_keys, *, table_id=0, bucket=1, **options):
    """Returns keys of a table of the first store whose home is one bucket of the present index."""
    num_buckets, salt = index_of(collection, state)
    return strategies.keys_of_one_bucket(
        strategies.home_bucket,
        num_keys,
        table_id=table_id,
        salt=salt,
        num_buckets=num_buckets,
        bucket=bucket,
        **options,
    )


# --------------------------------------------------------------------------------------------------------------
# Many devices


# JAXSOK_AXIS_TYPE=Explicit gives explicit axes to all meshes that are built here.
AXIS_TYPE = AxisType[os.environ.get("JAXSOK_AXIS_TYPE", "Auto")]


@functools.cache
def mesh(num_devices, axis="data", axis_type=AXIS_TYPE):
    """Returns a mesh of the first devices of the default backend; skips the test if there are fewer."""
    devices = jax.devices()
    if len(devices) < num_devices:
        pytest.skip(f"needs {num_devices} devices; the {jax.default_backend()} backend has {len(devices)}")
    return jax.make_mesh((num_devices,), (axis,), axis_types=(axis_type,), devices=devices[:num_devices])


def places_of(state):
    """Returns where the arrays of a state's stores lie, but for the few words of counts: JAX 0.11 moves these."""
    stores = [dataclasses.replace(store, counters=(), table_evicted=()) for store in state.stores]
    return [part.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(stores) for part in leaf.addressable_shards]


def over(num_devices, tables, features, *, axis_type=AXIS_TYPE, **exchange):
    """Returns a collection over so many devices; other keyword arguments go to its `ExchangeSpec`."""
    spec = jaxsok.ExchangeSpec(**exchange) if exchange else None
    mesh_ = mesh(num_devices, axis_type=axis_type)
    return jaxsok.Collection(tables, features, mesh=mesh_, axis="data", exchange=spec)


def quickly():
    """Returns compiler options for programs that run a few times only: on CPU LLVM takes most of a test's time."""
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def in_place():
    """Returns these options for tests of copies and memory: XLA's older code generator copies what scatters write."""
    flag = "xla_cpu_use_fusion_emitters"
    return quickly() if flag not in os.environ.get("XLA_FLAGS", "") else {**quickly(), flag: True}


@for_equals
def fed_step(collection):
    """Returns a jitted, donated step with given gradients; it returns state, embeddings and statistics."""

    def step(state, features, gradients):
        embeddings, state, plan_ = collection.lookup(state, features)
        state, stats = collection.update(state, plan_, gradients)
        return state, embeddings, stats

    return jax.jit(step, donate_argnums=0, compiler_options=quickly())


def by_key(collection, state, name):
    """Returns a table ordered by key, without mesh-dependent parts: {"keys", "rows", and each optimizer state}."""
    table = collection.export_table(state, name)
    order = np.argsort(table["keys"])
    columns = {"keys": table["keys"], "rows": table["rows"], **table["state"]}
    return {column: values[order] for column, values in columns.items()}


def assert_close_tables(collections, states, *, rtol, atol):
    """Checks that two collections have equal contents by key: keys exactly, rows and state within a tolerance."""
    for spec in collections[0].tables:
        first, second = (by_key(*pair, spec.name) for pair in zip(collections, states, strict=True))
        np.testing.assert_array_equal(first.pop("keys"), second.pop("keys"), err_msg=spec.name)
        assert first.keys() == second.keys()
        for column in first:
            message = f"{spec.name}: {column}"
            np.testing.assert_allclose(first[column], second[column], rtol=rtol, atol=atol, err_msg=message)


def replicas(collection, state, store):
    """Returns the parts of every array of a replicated store, shard by shard: [(path, [part, ...])]."""
    num_shards = collection.shards.num_shards
    return [(path, np.split(np.asarray(leaf), num_shards)) for path, leaf in state_leaves(state.stores[store])]


# The owner of a key, written again from its definition (decision D6; ffi/core/hash.h): a test that uses the library's
# owners cannot detect wrong owners.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NUM_PARTITIONS = 4096


def mix64(values):
    """Applies SplitMix64's finaliser to an array of uint64."""
    values = np.atleast_1d(values)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def unmixed64(values):
    """Inverts `mix64`."""

    def unshift(values, shift):
        result = values
        for _ in range(64 // shift + 1):
            result = values ^ (result >> np.uint64(shift))
        return result

    def inverse(odd):  # inverse of an odd number modulo 2^64
        return np.uint64(pow(odd, -1, 2**64))

    values = unshift(np.atleast_1d(values), 31) * inverse(0x94D049BB133111EB)
    values = unshift(values, 27) * inverse(0xBF58476D1CE4E5B9)
    return unshift(values, 30)


def _word_of_name(table):
    return np.uint64(int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little"))


def partition_hash(keys, table):
    """Returns the hash that assigns keys of a table to partitions."""
    return mix64(mix64(as_array(keys).reshape(-1) ^ _word_of_name(table)) + _GOLDEN)


def keys_of_hashes(hashes, table):
    """Returns the keys of a table that have these partition hashes: every step of the hash is invertible."""
    return unmixed64(unmixed64(as_array(hashes).reshape(-1)) - _GOLDEN) ^ _word_of_name(table)


def round_hash(keys, table):
    """Returns the hash that assigns keys to rounds: the partition hash, its top 12 bits moved to the bottom."""
    hashes = partition_hash(keys, table)
    return hashes << np.uint64(12) | hashes >> np.uint64(52)


def keys_of_round_hashes(hashes, table):
    """Returns the keys of a table that have these round hashes."""
    hashes = as_array(hashes).reshape(-1)
    return keys_of_hashes(hashes >> np.uint64(12) | hashes << np.uint64(52), table)


def owner_of(keys, table, num_shards):
    """Returns the shard of each key of a table that is spread over all shards."""
    partitions = (partition_hash(keys, table) >> np.uint64(52)).astype(np.int64)
    return partitions * num_shards // NUM_PARTITIONS


def keys_of_owner(owner, num_keys, table, num_shards, *, start=0):
    """Returns the first keys from `start` on that one shard owns."""
    keys = np.arange(start, start + 16 * num_shards * (num_keys + 16), dtype=np.uint64)
    return keys[owner_of(keys, table, num_shards) == owner][:num_keys]

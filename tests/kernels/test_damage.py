"""Damaged states: every op refuses them with a reason, or gives any result, and none crashes.

A `tree.map` over a whole train state also changes the arrays of the tables: a moving average, a cast, a slice. On the
CPU a handler refuses contents that no op produces. On a GPU it cannot wait to check, and the kernels bound their reads.

The last test runs this file and the kernels' contract suite under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, strategies as st

import jaxsok
from jaxsok import admission, keys as keys_lib, optim, policies, table as table_lib
from jaxsok.kernels import evict as evict_door
from jaxsok.kernels.call import StoreArrays
from jaxsok.serving import freeze, fused
from jaxsok.types import BUCKET_WORDS, COUNTERS

CAPACITY = 24
NUM_KEYS = 16
REFUSALS = (jax.errors.JaxRuntimeError, ValueError, TypeError, MemoryError)
ON_CPU = jax.default_backend() == "cpu"


def spec(name, **more):
    """Declares a table; tables with different rows in a collection are in separate stores."""
    return jaxsok.TableSpec(name, 4, optim.adagrad(0.1), capacity=CAPACITY, **more)


@functools.cache
def collection_of(kind):
    """Returns collections that together give every handler every kind of operand of a state."""
    more = {
        "plain": {},
        "counted": {"admission": policies.AdmitByCount(2), "eviction": policies.LeastRecentlyUsed()},
        "bloom": {"admission": policies.AdmitByBloom(2, num_keys=64), "statistics": True, "dtype": "bfloat16"},
    }[kind]
    features = [
        jaxsok.FeatureSpec("user", table="user"),
        jaxsok.FeatureSpec("history", table="item", combiner="mean", max_keys=NUM_KEYS),
    ]
    return jaxsok.Collection([spec("user", **more), spec("item", **more)], features)


KINDS = ("plain", "counted", "bloom")


def batch_of(collection, keys):
    """Returns NUM_KEYS single keys and as many in bags of 0 to 3."""
    keys = np.resize(np.array(keys, np.int64), NUM_KEYS)
    lengths = np.resize([2, 0, 3, 1], NUM_KEYS // 2)
    history = jaxsok.Bags(keys[: lengths.sum()] + 7, lengths=lengths)
    return collection.batch({"user": keys[: len(lengths)], "history": history})


@functools.cache
def season(kind):
    """Returns the leaves of a state with rows of both tables, waiting keys, freed rows and, if plain, two slabs."""
    collection = collection_of(kind)
    state = collection.init(seed=0, salt=1)
    for _ in range(3):  # often enough for every policy
        for start in (0, 8):
            features = batch_of(collection, np.arange(start, start + 8)).features
            state, _ = programs.learn(collection, state, features)
    if kind == "plain":
        state = collection.grow(state)
    state, num_erased = collection.erase(state, "user", np.arange(0, 16, 3))
    assert int(num_erased) > 2
    return jax.tree.map(np.asarray, state)


def copy_state(state):
    """Copies the state into new buffers, which may be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)


# --------------------------------------------------------------------------------------------------------------
# Every op that takes a state


def lookup(collection, state, features):
    return programs.lookup(collection)(state, features)


def find(collection, state, features):
    return programs.find(collection)(state, features)


def step(collection, state, features):
    embeddings, state, plan = lookup(collection, state, features)
    return programs.update(collection)(state, plan, embeddings)


def run_planned(collection, state, features):
    """Looks up and updates with a plan made before, whose rows are those of the undamaged state."""
    embeddings, _, plan = lookup(collection, copy_state(season(kind_of(collection))), features)
    return lookup(collection, state, plan), programs.update(collection)(state, plan, embeddings)


def rebuild(collection, state, features):
    rebuilt = jax.jit(table_lib.kernels.rebuild, static_argnums=2)
    return [rebuilt(store.counters, store.records, 32) for store in state.stores]


def remade(collection, state, features):
    return [
        admission.prepare_remake(spec, store, 8, collection.shards)(store)
        for spec, store in zip(collection.stores, state.stores, strict=True)
    ]


def evict(collection, state, features):
    if kind_of(collection) == "plain":  # it keeps no statistics
        return collection.evict(state, "user", policies.SmallNorm(1e9))
    return collection.evict(state, "user", policies.LeastFrequentlyUsed(), num_rows=3)


OPS = {
    "lookup": lookup,
    "find": find,
    "step": step,
    "planned": run_planned,
    "rebuild": rebuild,
    "remade": remade,
    "evict": evict,
    "erase": lambda collection, state, features: collection.erase(state, "user", np.arange(12)),
    "clear": lambda collection, state, features: collection.clear(state, "item"),
    "contains": lambda collection, state, features: collection.contains(state, "user", np.arange(12)),
    "rows_of": lambda collection, state, features: collection.rows_of(state, "user", np.arange(12)),
    "assign": lambda collection, state, features: collection.assign(
        state, "user", np.arange(12) + 5, np.ones((12, 4), np.float32)
    ),
    "export": lambda collection, state, features: [collection.export_table(state, name) for name in ("user", "item")],
    "num_rows": lambda collection, state, features: collection.num_rows(state),
}


def kind_of(collection):
    """Returns the kind of a collection of this file."""
    return next(kind for kind in KINDS if collection_of(kind) is collection)


def survive(op, collection, state, features):
    """Runs an op to its end; returns the message of its refusal, or its result."""
    try:
        return jax.block_until_ready(OPS[op](collection, copy_state(state), features))
    except REFUSALS as error:
        return str(error)


# --------------------------------------------------------------------------------------------------------------
# Damage to an array

WORDS = [
    0,
    1,
    CAPACITY - 1,
    CAPACITY,
    2 * CAPACITY,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 4,
    2**32 - 3,
    2**32 - 2,
    2**32 - 1,
]
"""Among them the marks of layout.h: no row, pending, winner, an unset entry, a pending one."""


def damage(leaf, how, places, words):
    """Returns a leaf with other contents. `places`: fractions of its size."""
    bits = programs.bits(leaf)
    flat = bits.reshape(-1).copy()
    with np.errstate(over="ignore"):
        if how == "some":
            for place, word in zip(places, words, strict=True):
                flat[int(place * (flat.size - 1))] = np.array(word % 2 ** (8 * flat.itemsize), flat.dtype)
        elif how == "all":
            flat[:] = np.array(words[0] % 2 ** (8 * flat.itemsize), flat.dtype)
        elif how == "more":
            flat += np.array(words[0] % 2 ** (8 * flat.itemsize), flat.dtype)
        elif how == "turned":
            flat = np.roll(flat, 1 + int(places[0] * 8))
        else:
            rng = np.random.default_rng(words)
            flat = rng.integers(0, 2 ** (8 * flat.itemsize), flat.size, np.uint64).astype(flat.dtype)
    return flat.view(leaf.dtype).reshape(leaf.shape)


def uses_of(leaves):
    """Returns the leaves that may be damaged: all except those that hold only numbers of rows."""
    return [i for i, (path, _) in enumerate(leaves) if ".rows" not in path or ".table_rows" in path]


def damage_arrays(data, tree):
    """Returns a tree of arrays with random words in some of them."""
    leaves, structure = jax.tree.flatten(tree)
    paths = programs.state_leaves(tree)
    for _ in range(data.draw(st.integers(1, 3), label="arrays")):
        i = data.draw(st.sampled_from(uses_of(paths)), label="array")
        how = data.draw(st.sampled_from(["some", "all", "more", "turned", "random"]), label="how")
        num_words = data.draw(st.integers(1, 4), label="words")
        places = data.draw(st.lists(st.floats(0, 1), min_size=num_words, max_size=num_words), label="places")
        word = st.one_of(st.sampled_from(WORDS), st.integers(0, 2**32 - 1))
        words = data.draw(st.lists(word, min_size=num_words, max_size=num_words), label="words")
        leaves[i] = damage(leaves[i], how, places, words)
    return jax.tree.unflatten(structure, leaves)


asked = st.lists(st.integers(0, 40), min_size=1, max_size=16)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_no_op_crashes_on_a_damaged_state(kind, data):
    """Every op runs on a state with random words in any of its arrays, each on the same damaged state."""
    collection, state = collection_of(kind), damage_arrays(data, season(kind))
    features = batch_of(collection, data.draw(asked)).features
    for op in OPS:
        survive(op, collection, state, features)


@functools.cache
def frozen(dtype):
    """Returns frozen tables of the plain state."""
    tables = freeze(collection_of("plain"), copy_state(season("plain")), dtype=dtype)
    return jax.tree.map(np.asarray, tables)


@functools.cache
def frozen_lookup():
    """Returns a jitted lookup: single keys of one table, and bags of the other."""
    offsets = np.array([0, 3, 3, NUM_KEYS])
    return jax.jit(
        lambda tables, words: fused.lookup(
            tables, {"user": words, "item": fused.LookupInput("item", words, combiner="mean", offsets=offsets)}
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(data=st.data())
def test_no_lookup_crashes_on_damaged_frozen_tables(dtype, data):
    """Lookups in damaged serving tables do not crash either."""
    words = keys_lib.to_words(np.resize(np.array(data.draw(asked), np.uint64), NUM_KEYS))
    for tables in (frozen(dtype), damage_arrays(data, frozen(dtype))):
        try:
            jax.block_until_ready(frozen_lookup()(tables, words))
        except REFUSALS:
            assert tables is not frozen(dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_takes_a_state_that_nothing_damaged(kind, op):
    """The ops above succeed on an undamaged state, so what they refuse is damage."""
    collection = collection_of(kind)
    result = survive(op, collection, season(kind), batch_of(collection, np.arange(12)).features)
    assert not isinstance(result, str), result


# --------------------------------------------------------------------------------------------------------------
# Refusals and their messages


def with_store(state, **arrays):
    """Returns a state of one store with other arrays."""
    return dataclasses.replace(state, stores=(dataclasses.replace(state.stores[0], **arrays),))


def with_counter(state, **values):
    """Returns a state with other numbers in its counters."""
    counters = state.stores[0].counters.copy()
    for name, value in values.items():
        counters[COUNTERS.index(name)] = value
    return with_store(state, counters=counters)


def refusal_of(state, op="lookup", kind="plain"):
    """Returns how an op refuses a state, for NUM_KEYS keys without a row."""
    collection = collection_of(kind)
    message = survive(op, collection, state, batch_of(collection, np.arange(100, 100 + NUM_KEYS)).features)
    assert isinstance(message, str), f"{op} took it"
    return message


cpu_only = pytest.mark.skipif(not ON_CPU, reason="on a GPU a handler cannot look into its buffers without a wait")


@cpu_only
@pytest.mark.parametrize("op", ["lookup", "find", "erase", "evict", "rebuild", "assign"])
@pytest.mark.parametrize(
    "values",
    [
        {"num_allocated": 2**31},
        {"num_allocated": 2 * CAPACITY * 2 + 1},
        {"free_end": 2**32 - 1},
        {"free_begin": 10**6},
        {"free_begin": 1, "free_end": 0},
    ],
    ids=str,
)
def test_impossible_counters_are_refused(op, values):
    """The message names the op, the argument, the numbers and the remedy."""
    message = refusal_of(with_counter(season("plain"), **values), op)
    assert re.search(r"(table|lookup|evict)\w*: counters: got the free rows \d+ to \d+ of \d+ rows handed out", message)
    assert "restore it from a checkpoint" in message


@cpu_only
@pytest.mark.parametrize("word", [CAPACITY * 10, 2**32 - 1, 0], ids=["beyond", "none", "in use"])
def test_a_damaged_list_of_freed_rows_is_refused(word):
    """Rows beyond the capacity and rows that have a key are refused: the latter would make two keys share a row."""
    state = season("plain")
    records = [slab.copy() for slab in state.stores[0].records]
    (used,) = np.nonzero((records[0][:, :2] != 2**32 - 1).any(1))
    for slab in records:
        slab[:, 3] = word if word else np.resize(used, len(slab))  # ascending, as for freed rows
    assert "lookup: records: got a list of freed rows" in refusal_of(with_store(state, records=tuple(records)))


@cpu_only
@pytest.mark.parametrize("op", ["lookup", "find", "evict"])
def test_an_entry_of_a_row_beyond_the_capacity_is_refused(op):
    """The entries of a scaled index, for example, refer to rows that do not exist."""
    state = season("plain")
    index = state.stores[0].index.copy().reshape(-1, 4)
    index[(index[:, :2] != 2**32 - 1).any(1), 2] += 10**6
    collection = collection_of("plain")
    message = survive(
        op, collection, with_store(state, index=index.reshape(-1, 16)), batch_of(collection, np.arange(12)).features
    )
    assert isinstance(message, str) and re.search(r"(lookup|evict)\w*: index: got an entry of a row", message)


def slice_arrays(store, name, *slices):
    """Returns a store with every array of a name sliced."""
    return dataclasses.replace(store, **{name: jax.tree.map(lambda array: array[slices], getattr(store, name))})


@pytest.mark.parametrize(
    ("kind", "op", "name", "slices", "message"),
    [
        ("plain", "find", "counters", [slice(5)], "counters: got shape [5], wanted [9]"),
        ("plain", "find", "index", [slice(None), slice(8)], "index: got shape"),
        ("plain", "erase", "index", [slice(0)], "index: got 0 buckets, wanted 1 to"),
        ("plain", "lookup", "table_rows", [slice(1)], "tables: got shape [2, 16], wanted [1, 16]"),
        ("plain", "erase", "records", [slice(None), slice(2)], "records: got 2 words a row, wanted 4"),
        ("plain", "rebuild", "records", [slice(0)], "records: got a slab without rows"),
        ("plain", "lookup", "records", [slice(3)], "records: slabs of another size"),
        ("plain", "erase", "states", [slice(3)], "states: slabs of another size"),
        ("bloom", "lookup", "statistics", [slice(None), slice(1)], "statistics: got 1 words a row, wanted 2"),
        ("bloom", "lookup", "bloom", [slice(1)], "bloom: got 4 counters, wanted"),
        ("counted", "lookup", "sightings", [slice(0)], "sightings: got 0 buckets"),
        ("counted", "evict", "table_evicted", [slice(1)], "table_evicted: got shape [1], wanted [2]"),
    ],
)
def test_arrays_of_another_shape_are_refused(kind, op, name, slices, message):
    """If every array of a kind is sliced, handlers check the shapes on both back ends."""
    state = season(kind)
    state = dataclasses.replace(state, stores=(slice_arrays(state.stores[0], name, *slices),))
    if name == "bloom" and jax.default_backend() == "gpu":
        # The required number of counters is in the device's memory: the kernels use only the existing ones.
        survive(op, collection_of(kind), state, batch_of(collection_of(kind), np.arange(NUM_KEYS)).features)
        return
    assert message in refusal_of(state, op, kind)


def test_too_many_slabs_are_refused():
    """A handler's views hold MAX_SLABS of an array: it writes none beyond them, including statistics."""
    store = StoreArrays(
        index=jnp.full((4, BUCKET_WORDS), 2**32 - 1, jnp.uint32),
        counters=jnp.zeros(len(COUNTERS), jnp.uint32),
        table_rows=jnp.zeros(1, jnp.uint32),
        rows=(),
        records=(jnp.zeros((1, 4), jnp.uint32),) * 400,
        statistics=(jnp.zeros((1, 2), jnp.uint32),) * 400,
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="evict_release: num_slabs: got 400, wanted 1 to 24"):
        jax.block_until_ready(jax.jit(evict_door.release)(store, jnp.zeros(400, jnp.uint8)))


# --------------------------------------------------------------------------------------------------------------
# Under sanitizers

SANITIZED = pathlib.Path(__file__).parents[2] / "build" / "sanitized"
RUN_SANITIZED = """
import sys
import pytest

class Library:
    def pytest_configure(self):
        import jaxsok
        jaxsok.__path__.insert(0, sys.argv[1])

sys.exit(pytest.main(sys.argv[2:], plugins=[Library()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        ["tests/kernels/test_damage.py"],
        ["tests/kernels/test_kernels.py", "-k", "contract and cpu and not large"],
        ["tests/serving/test_c_interface.py", "-k", "not program and not example and not header"],
    ],
    ids=len,
)
def test_under_sanitizers(tests):
    """AddressSanitizer and UndefinedBehaviorSanitizer find nothing: `make test-slow` builds the library for it."""
    if not (SANITIZED / "_lib" / "libjaxsok_cpu.so").exists():
        pytest.skip(f"no sanitized library in {SANITIZED}; make test-sanitized builds it")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc, whose runtime a sanitized library needs")
    runtime = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime),
        # Python and XLA keep their memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "JAX_PLATFORMS": "cpu",
        "JAXSOK_PROFILE": "gpu",
        "JAXSOK_SLOW": "0",
    }
    command = [sys.executable, "-c", RUN_SANITIZED, str(SANITIZED), "-q", "-p", "no:cacheprovider", *tests]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]

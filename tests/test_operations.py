"""Operations on one table of a store, against dicts: contains, rows_of, assign, clear, export and import."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsok
from jaxsok import plan
from jaxsok.kernels import plan as plan_door

PADDING = jaxsok.PADDING_KEY
DIM, NUM_KEYS = 4, 8
POOL = [0, 5, 2**32 + 5, 2**63, 2**64 - 2, *range(100, 119)]
ADAM = jaxsok.optim.adam(0.1)
ADAGRAD = jaxsok.optim.rowwise_adagrad(0.1)
WAYS = [("one", 1), ("sharded", 1), ("sharded", 2), ("sharded", 4), ("on", 4), ("replicated", 4)]


@functools.cache
def collection_of(way="one", num_shards=1, dtype="float32", capacity=256, is_alone=False, max_capacity=None):
    """Tables a and b of one store with statistics; `is_alone`: a has one of its own, beside another dim."""
    options = {"dtype": dtype, "statistics": True, "capacity": capacity, "max_capacity": max_capacity}
    if way == "replicated":
        options["placement"] = jaxsok.REPLICATED
    if way == "on":
        options["placement"] = jaxsok.on(num_shards - 1)
    tables = [jaxsok.TableSpec("a", DIM, ADAM, **options), jaxsok.TableSpec("b", DIM, ADAM, **options)]
    if is_alone:
        tables = [jaxsok.TableSpec("other", 3, ADAGRAD), tables[0]]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    where = {} if way == "one" else {"mesh": programs.mesh(num_shards), "axis": "data"}
    return jaxsok.Collection(tables, features, **where)


def store_of(state, table="a"):
    """The store that has a table of these collections, and the table's number in it."""
    s = len(state.stores) - 1
    return state.stores[s], "ab".index(table)


def content(state, table="a", num_shards=1, is_replicated=False):
    """key -> (row, states, last step, frequency), from the arrays; and the keys in the order of shards and rows."""
    store, number = store_of(state, table)
    columns = [
        np.asarray(slab) for slabs in (store.records, store.rows, *store.states, store.statistics) for slab in slabs
    ]
    num_slabs, rows, order = len(store.rows), {}, []
    for shard in range(1 if is_replicated else num_shards):
        for s in range(num_slabs):
            parts = [np.split(array, num_shards)[shard] for array in columns[s::num_slabs]]
            for i, (low, high, of, _) in enumerate(parts[0].tolist()):
                if of == number and low | high << 32 != PADDING:
                    order.append(low | high << 32)
                    statistics = parts[-1][i].tolist()
                    rows[order[-1]] = (parts[1][i].tobytes(), *(part[i].tobytes() for part in parts[2:-1]), *statistics)
    assert len(order) == len(rows), "a key twice"
    return rows, order


def as_dict(records):
    """The same of `Records`."""
    names = ("momentum", "variance")
    lines = {}
    for i, key in enumerate(records.keys.tolist()):
        states = [array[i].tobytes() for array in records.state.values()]
        lines[key] = (records.rows[i].tobytes(), *states, int(records.last_step[i]), int(records.frequency[i]))
    assert len(names) == len(records.state)
    return lines


def random_records(rng, keys, dtype="float32", with_state=True, with_statistics=True):
    """Records of keys, any numbers."""
    size = len(keys)
    states = [state.name for state in ADAM.state_specs(DIM)]
    words = [rng.integers(0, 2**32, size, np.uint32) for _ in range(2)] if with_statistics else (None, None)
    return jaxsok.Records(
        programs.as_array(keys),
        rng.normal(size=(size, DIM)).astype(np.float32).astype(dtype),
        {name: rng.normal(size=(size, DIM)).astype(np.float32) for name in states} if with_state else {},
        *words,
    )


def filled(collection, rng, num=150, dtype="float32", **options):
    """A state whose table a has rows of random keys."""
    keys = [*POOL, *rng.integers(0, 2**63, num - len(POOL)).tolist()]
    records = random_records(rng, keys, dtype, **options)
    return collection.import_table(collection.init(seed=3), "a", records), records


# --------------------------------------------------------------------------------------------------------------
# Owners


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**64 - 2), min_size=40, max_size=40), st.sampled_from([2, 3, 8, 1000]))
def test_owners_on_the_host_and_traced_are_those_of_the_kernels(keys, num_shards):
    """Both words of keys and names count; the partition's owner is looked up, and a pinned table has one."""
    keys = programs.as_array([*POOL, *keys])
    tables = [
        jaxsok.TableSpec("user", DIM, ADAM),
        jaxsok.TableSpec("item \u00e9", DIM, ADAM),
        jaxsok.TableSpec("ad", DIM, ADAM, placement=jaxsok.on(1)),
    ]
    spec = jaxsok.StoreSpec(tuple(tables), num_shards)
    owners = np.random.default_rng(num_shards).permutation(plan.default_owners(num_shards))
    for number in range(3):
        features = np.array([[number, 0, 0, len(keys), 0, len(keys), 1, 0, -1, 0, 0, 0]], np.int32)
        batch = (programs.words(keys), np.zeros(0, np.int32), np.zeros(0, np.float32), features)
        requests, _, starts, _ = _requests(num_shards)(batch, spec.table_words(), owners)
        requests, starts = np.asarray(requests), np.asarray(starts)
        of_kernel = np.repeat(np.arange(num_shards), np.diff(starts))
        words = requests[: len(of_kernel), :2]
        asked = words[:, 0] | words[:, 1].astype(np.uint64) << np.uint64(32)
        assert set(asked.tolist()) == set(keys.tolist())
        np.testing.assert_array_equal(plan.owners_of(spec, number, asked, owners), of_kernel)
        traced = plan.owner_of(spec, number, jnp.asarray(words), jnp.asarray(owners))
        np.testing.assert_array_equal(np.asarray(traced), of_kernel)


@functools.cache
def _requests(num_shards):
    return jax.jit(functools.partial(plan_door.plan_requests, num_tiles=1, num_shards=num_shards, by_hash=False))


# --------------------------------------------------------------------------------------------------------------
# By keys, against a dict

key_lists = st.lists(st.sampled_from([*POOL, PADDING]), min_size=NUM_KEYS, max_size=NUM_KEYS)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("lookup"), key_lists),
        st.tuples(st.just("assign"), key_lists),
        st.tuples(st.just("erase"), key_lists),
        st.tuples(st.just("clear"), st.sampled_from("ab")),
        st.tuples(st.just("import"), st.lists(st.sampled_from(POOL), max_size=NUM_KEYS, unique=True)),
    ),
    min_size=1,
    max_size=8,
)


@functools.cache
def jitted(collection, name):
    """A method, jitted with a donated state."""
    donates = name in ("lookup", "assign", "erase", "clear")
    statics = 1 if name != "lookup" else ()
    return jax.jit(getattr(collection, name), static_argnums=statics, donate_argnums=0 if donates else ())


@pytest.mark.parametrize(("way", "num_shards"), WAYS)
@settings(max_examples=8)
@given(calls, st.integers(0, 99))
def test_one_table_of_a_shared_store(way, num_shards, script, seed):
    """After every call: which keys there are, their rows to the bit, optimizer state, statistics; b is b's alone."""
    rng = np.random.default_rng(seed)
    collection = collection_of(way, num_shards)
    state = collection.init(seed=5)
    model = {"a": {}, "b": {}}
    probe = programs.as_array([*POOL[: NUM_KEYS - 1], PADDING])
    zeros = np.zeros(DIM, np.float32).tobytes()
    for clock, (op, argument) in enumerate(script):
        if op == "lookup":
            keys = programs.as_array(argument)
            embeddings, state, _ = jitted(collection, op)(
                state, collection.batch({"a": keys, "b": keys}).features, clock=np.uint32(clock)
            )
            for table in "ab":
                rows = np.asarray(embeddings[table])
                for key, row in zip(keys.tolist(), rows, strict=True):
                    if key != PADDING:
                        old = model[table].get(key, (row.tobytes(), zeros, zeros, 0, 0))
                        assert old[0] == row.tobytes()
                        model[table][key] = (*old[:3], clock, old[4] + 1)
        elif op == "assign":
            rows = rng.normal(size=(NUM_KEYS, DIM)).astype(np.float32)
            keys = programs.as_array(argument)
            state, inserted, refused = jitted(collection, op)(
                state, "a", programs.words(keys), rows, clock=np.uint32(clock)
            )
            assert int(refused) == 0
            assert int(inserted) == len(set(argument) - set(model["a"]) - {PADDING})
            for key, row in zip(argument, rows, strict=True):
                if key != PADDING:
                    old = model["a"].get(key, (None, zeros, zeros, 0, 0))
                    model["a"][key] = (row.tobytes(), *old[1:3], clock, old[4])
        elif op == "erase":
            state, erased = jitted(collection, op)(state, "b", programs.words(argument))
            assert int(erased) == sum(model["b"].pop(key, None) is not None for key in set(argument))
        elif op == "clear":
            state, erased = jitted(collection, op)(state, argument)
            assert int(erased) == len(model[argument])
            model[argument] = {}
        else:
            records = random_records(rng, argument)
            state = collection.import_table(state, "b", records)
            model["b"].update(as_dict(records))
        for table in "ab":
            got, order = content(state, table, num_shards, way == "replicated")
            assert got == model[table]
            is_there = jitted(collection, "contains")(state, table, programs.words(probe))
            assert np.asarray(is_there).tolist() == [key in model[table] for key in probe.tolist()]
            rows, also = jitted(collection, "rows_of")(state, table, programs.words(probe))
            assert np.asarray(also).tolist() == np.asarray(is_there).tolist()
            for key, row in zip(probe.tolist(), np.asarray(rows), strict=True):
                assert row.tobytes() == (model[table][key][0] if key in model[table] else zeros)
            chunks = list(collection.export_chunks(state, table, chunk_rows=3))
            assert [key for chunk in chunks for key in chunk.keys.tolist()] == order
            assert {key: line for chunk in chunks for key, line in as_dict(chunk).items()} == model[table]
        assert collection.num_rows(state) == {table: len(model[table]) for table in "ab"}

"""Operations on one table of a store, against dicts: contains, rows_of, assign, clear, export and import."""

import dataclasses
import functools
import itertools
import pickle
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import programs
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxsok
from jaxsok import checkpoint, enlarge, plan, serving, table_export
from jaxsok.kernels import plan as plan_door
from jaxsok.operations import specs_of
from jaxsok.types import COUNTERS

PADDING = jaxsok.PADDING_KEY
DIM, NUM_KEYS = 4, 8
POOL = [0, 5, 2**32 + 5, 2**63, 2**64 - 2, *range(100, 119)]
ADAM = jaxsok.optim.adam(0.1)
ADAGRAD = jaxsok.optim.rowwise_adagrad(0.1)
WAYS = [("one", 1), ("sharded", 4), ("on", 4), ("replicated", 4)]


@functools.cache
def collection_of(way="one", num_shards=1, dtype="float32", capacity=256, is_alone=False, max_capacity=None):
    """Declares tables a and b of one store with statistics; `is_alone`: a has its own store, and b another dim."""
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
    """Returns the store that has a table of these collections, and the table's number in it."""
    s = len(state.stores) - 1
    return state.stores[s], "ab".index(table)


def content(state, table="a", num_shards=1, is_replicated=False):
    """Reads key -> (row, states, last step, frequency) from the arrays, and the keys by shard and row."""
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
    """Converts `Records` to such a dict."""
    names = ("m", "v")
    lines = {}
    for i, key in enumerate(records.keys.tolist()):
        states = [array[i].tobytes() for array in records.state.values()]
        lines[key] = (records.rows[i].tobytes(), *states, int(records.last_step[i]), int(records.frequency[i]))
    assert len(names) == len(records.state)
    return lines


def random_records(rng, keys, dtype="float32", with_state=True, with_statistics=True):
    """Returns records of keys, with any numbers."""
    size = len(keys)
    states = [state.name for state in ADAM.state_specs(DIM)]
    words = [rng.integers(0, 2**32, size, np.uint32) for _ in range(2)] if with_statistics else (None, None)
    return jaxsok.Records(
        programs.as_array(keys),
        rng.normal(size=(size, DIM)).astype(np.float32).astype(dtype),
        {name: rng.normal(size=(size, DIM)).astype(np.float32) for name in states} if with_state else {},
        *words,
    )


def fill(collection, rng, num=150, dtype="float32", **options):
    """Returns a state whose table a has rows of random keys."""
    keys = [*POOL, *rng.integers(0, 2**63, num - len(POOL)).tolist()]
    records = random_records(rng, keys, dtype, **options)
    return collection.import_table(collection.init(seed=3), "a", records), records


# --------------------------------------------------------------------------------------------------------------
# Owners


@settings(max_examples=4)
@given(st.lists(st.integers(0, 2**64 - 2), min_size=40, max_size=40), st.sampled_from([3, 1000]))
def test_owners_on_the_host_and_traced_are_those_of_the_kernels(keys, num_shards):
    """Both words of keys and names count; the owner of a partition is looked up, and a pinned table has one owner."""
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
        requests, _, starts, *_ = _requests(num_shards)(batch, spec.table_words(), owners)
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
def jit_method(collection, name):
    """Returns a method, jitted with a donated state."""
    donates = name in ("lookup", "assign", "erase", "clear")
    statics = 1 if name != "lookup" else ()
    return jax.jit(getattr(collection, name), static_argnums=statics, donate_argnums=0 if donates else ())


@pytest.mark.parametrize(("way", "num_shards"), WAYS)
@settings(max_examples=5)
@given(calls, st.integers(0, 99))
def test_one_table_of_a_shared_store(way, num_shards, script, seed):
    """After every call the keys, rows to the bit, optimizer state and statistics agree; b is not affected."""
    rng = np.random.default_rng(seed)
    collection = collection_of(way, num_shards)
    state = collection.init(seed=5)
    model = {"a": {}, "b": {}}
    probe = programs.as_array([*POOL[: NUM_KEYS - 1], PADDING])
    zeros = np.zeros(DIM, np.float32).tobytes()
    for clock, (op, argument) in enumerate(script):
        if op == "lookup":
            keys = programs.as_array(argument)
            embeddings, state, _ = jit_method(collection, op)(
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
            state, inserted, refused = jit_method(collection, op)(
                state, "a", programs.words(keys), rows, clock=np.uint32(clock)
            )
            assert int(refused) == 0
            assert int(inserted) == len(set(argument) - set(model["a"]) - {PADDING})
            for key, row in zip(argument, rows, strict=True):
                if key != PADDING:
                    old = model["a"].get(key, (None, zeros, zeros, 0, 0))
                    model["a"][key] = (row.tobytes(), *old[1:3], clock, old[4])
        elif op == "erase":
            state, erased = jit_method(collection, op)(state, "b", programs.words(argument))
            assert int(erased) == sum(model["b"].pop(key, None) is not None for key in set(argument))
        elif op == "clear":
            state, erased = jit_method(collection, op)(state, argument)
            assert int(erased) == len(model[argument])
            model[argument] = {}
        else:
            records = random_records(rng, argument)
            state = collection.import_table(state, "b", records)
            model["b"].update(as_dict(records))
        for table in "ab":
            got, order = content(state, table, num_shards, way == "replicated")
            assert got == model[table]
            is_there = jit_method(collection, "contains")(state, table, programs.words(probe))
            assert np.asarray(is_there).tolist() == [key in model[table] for key in probe.tolist()]
            rows, also = jit_method(collection, "rows_of")(state, table, programs.words(probe))
            assert np.asarray(also).tolist() == np.asarray(is_there).tolist()
            for key, row in zip(probe.tolist(), np.asarray(rows), strict=True):
                assert row.tobytes() == (model[table][key][0] if key in model[table] else zeros)
            chunks = list(collection.export_chunks(state, table, chunk_rows=3))
            assert [key for chunk in chunks for key in chunk.keys.tolist()] == order
            assert {key: line for chunk in chunks for key, line in as_dict(chunk).items()} == model[table]
        assert collection.num_rows(state) == {table: len(model[table]) for table in "ab"}


# --------------------------------------------------------------------------------------------------------------
# Export


@pytest.fixture
def small_pieces(monkeypatch):
    """Makes blocks and gathers of few rows, so that small tables cross their ends."""
    monkeypatch.setattr(table_export, "UNPACKED_ROWS", 8)
    monkeypatch.setattr(table_export, "_LEAST_ROWS", 1)


def test_export_in_any_pieces(small_pieces):
    """Every row occurs once, in the order of row ids, from several slabs with freed rows; chunks have one size."""
    rng = np.random.default_rng(0)
    collection = collection_of(capacity=12)
    state, records = fill(collection, rng)
    state = collection.import_table(state, "b", random_records(rng, range(50)))
    state, _ = collection.erase(state, "a", records.keys[::5])
    assert len(state.stores[0].rows) > 1
    want, order = content(state)
    sizes = [slab.shape[0] for slab in state.stores[0].rows]
    for chunk_rows in (1, 4, 7, 1000, None):
        chunks = list(collection.export_chunks(state, "a", chunk_rows=chunk_rows))
        assert [key for chunk in chunks for key in chunk.keys.tolist()] == order
        assert {key: line for chunk in chunks for key, line in as_dict(chunk).items()} == want
        # All chunks except the last of a slab are full.
        assert sum(chunk.num_rows < (chunk_rows or 1000) for chunk in chunks) <= len(sizes)
        assert all(chunk.num_rows <= (chunk_rows or 1000) for chunk in chunks)
    whole = collection.export_table(state, "a")
    assert as_dict(jaxsok.Records(*(whole[n] for n in ("keys", "rows", "state", "last_step", "frequency")))) == want
    assert whole["keys"].tolist() == order and (np.diff(whole["row_ids"].astype(int)) > 0).all()


def test_export_holds_no_chunk_that_was_read(monkeypatch):
    """The device arrays of a chunk are freed when the reader requests the next chunk, up to the last."""
    collection = collection_of()
    state, _ = fill(collection, np.random.default_rng(0))
    sent, gather = [], table_export.gather_rows

    def note_arrays(*args):
        arrays = gather(*args)
        sent.append([weakref.ref(array) for array in jax.tree.leaves(arrays)])
        return arrays

    monkeypatch.setattr(table_export, "gather_rows", note_arrays)
    for read, _ in enumerate(collection.export_chunks(state, "a", chunk_rows=40)):
        held = [number for number, arrays in enumerate(sent[:read]) if any(ref() is not None for ref in arrays)]
        assert held == [], f"chunks held next to chunk {read}"
    assert len(sent) > 1 + table_export.AHEAD


@pytest.mark.parametrize("num_shards", (1, 4))
def test_export_since(num_shards, small_pieces):
    """Only rows used since then are exported; a last step of 2**32 - 1 is late, not early."""
    rng = np.random.default_rng(1)
    collection = collection_of("one" if num_shards == 1 else "sharded", num_shards)
    state, records = fill(collection, rng)
    for since in (-1, 0, 2**31, int(records.last_step.max()), 2**32 - 1, 2**32):
        chunks = list(collection.export_chunks(state, "a", since=since, with_state=False))
        keys = [key for chunk in chunks for key in chunk.keys.tolist()]
        assert sorted(keys) == sorted(records.keys[records.last_step >= since].tolist())
        assert all(chunk.state == {} and (chunk.last_step >= since).all() for chunk in chunks)


def test_export_of_nothing():
    """A table without rows has no chunks, and its whole export has empty arrays of its shapes."""
    collection = collection_of()
    state = collection.init(seed=0)
    assert list(collection.export_chunks(state, "a")) == []
    whole = collection.export_table(state, "a")
    assert whole["rows"].shape == (0, DIM) and whole["state"]["m"].shape == (0, DIM)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_rows": 0}, ValueError, "chunk_rows: got 0, wanted at least 1"),
        ({"chunk_rows": 1.5}, TypeError, "chunk_rows: got 1.5"),
        ({"since": "x"}, TypeError, "since: got 'x'"),
        ({"since": 3}, ValueError, "whose rows have no last step; declare TableSpec"),
    ],
)
def test_exports_that_are_refused(options, error, message):
    """The error is raised by the call, not by the first chunk."""
    collection = programs.one_table()
    with pytest.raises(error, match=message):
        collection.export_chunks(collection.init(seed=0), "user", **options)


# --------------------------------------------------------------------------------------------------------------
# Import

TARGETS = [("one", 1, 16, True), ("sharded", 4, 16, False), ("replicated", 4, 16, True), ("on", 4, 512, False)]


@pytest.mark.parametrize(
    ("source", "way", "num_shards", "capacity", "is_alone"),
    [
        pytest.param(
            source, *target, marks=pytest.mark.slow if source[1] > 1 and target[0] in ("replicated", "on") else ()
        )
        for source, target in itertools.product([("one", 1), ("sharded", 4)], TARGETS)
    ],
)
def test_import_of_an_export_is_the_table(source, way, num_shards, capacity, is_alone, small_pieces):
    """Rows, optimizer state and statistics are equal to the bit on another mesh, capacity and grouping (law 6)."""
    rng = np.random.default_rng(2)
    first = collection_of(*source)
    state, records = fill(first, rng)
    second = collection_of(way, num_shards, capacity=capacity, is_alone=is_alone)
    chunks = first.export_chunks(state, "a", chunk_rows=33)
    copied = second.import_table(second.init(seed=9), "a", chunks)
    want = as_dict(records)
    assert content(state, "a", source[1])[0] == want
    got = second.export_table(copied, "a")
    names = ("keys", "rows", "state", "last_step", "frequency")
    assert as_dict(jaxsok.Records(*(got[name] for name in names))) == want


@pytest.mark.parametrize("way", ["one", "sharded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_sixteen_bits(way, dtype):
    """float32 rows are rounded to nearest, and finite values stay finite; rows of the dtype keep their bits."""
    rng = np.random.default_rng(3)
    collection = collection_of(way, 1 if way == "one" else 4, dtype)
    state, records = fill(collection, rng, dtype=dtype)
    got, _ = content(state, "a", 1 if way == "one" else 4)
    assert got == as_dict(records)
    rows = np.array([[1 + 2**-12, -1e30, 1e-3, 3.4e38], [np.inf, np.nan, -0.0, 1.0]], np.float32)
    state = collection.import_table(state, "a", jaxsok.Records(programs.as_array([5, 6]), rows))
    assigned, *_ = collection.assign(state, "a", programs.as_array([7, 8]), rows.astype(np.float64))
    largest = float(ml_dtypes.finfo(dtype).max)
    want = np.where(np.isfinite(rows), np.clip(rows, -largest, largest), rows).astype(dtype)
    for keys, where in (([5, 6], assigned), ([7, 8], assigned)):
        rows_there, is_there = collection.rows_of(where, "a", programs.as_array(keys))
        assert np.asarray(is_there).all() and rows_there.dtype == dtype
        np.testing.assert_array_equal(np.asarray(rows_there).astype(np.float32), want.astype(np.float32))


def test_what_records_lack():
    """State stays or, if requested, is reset; the last step is the clock; new rows start with initial values."""
    rng = np.random.default_rng(4)
    collection = collection_of()
    state, records = fill(collection, rng)
    old = as_dict(records)
    zeros = np.zeros(DIM, np.float32).tobytes()
    half = random_records(rng, [5, 1000], with_state=False, with_statistics=False)
    momentum = {"m": np.ones((2, DIM), np.float32)}
    ones = momentum["m"][0].tobytes()
    copies = [jax.tree.map(jnp.copy, state) for _ in range(3)]
    got, _ = content(collection.import_table(copies[0], "a", half, clock=77))
    assert got[5] == (half.rows[0].tobytes(), *old[5][1:3], 77, old[5][4])
    assert got[1000] == (half.rows[1].tobytes(), zeros, zeros, 77, 0)
    got, _ = content(collection.import_table(copies[1], "a", half, reset_state=True))
    assert got[5] == (half.rows[0].tobytes(), zeros, zeros, 0, old[5][4])
    with_momentum = jaxsok.Records(half.keys, half.rows, momentum)
    got, _ = content(collection.import_table(copies[2], "a", with_momentum, reset_state=True))
    assert got[5][1:3] == (ones, zeros) and got[1000][1:3] == (ones, zeros)
    assert {key: line for key, line in got.items() if key not in (5, 1000)} == {
        key: line for key, line in old.items() if key != 5
    }


def test_statistics_are_passed_over_where_none_are_kept():
    """A table without statistics accepts records with statistics."""
    table = jaxsok.TableSpec("a", DIM, ADAM, capacity=64)
    collection = jaxsok.Collection([table], [])
    state = collection.import_table(collection.init(seed=0), "a", random_records(np.random.default_rng(0), POOL))
    assert collection.num_rows(state) == {"a": len(POOL)} and state.stores[0].statistics == ()


def test_plans_made_before_an_import_are_stale():
    """Gradients of the earlier rows change nothing, and are counted."""
    collection = collection_of()
    keys = np.arange(8)
    features = collection.batch({"a": keys, "b": keys}).features
    embeddings, state, found = collection.lookup(collection.init(seed=0), features)
    state = collection.import_table(state, "a", random_records(np.random.default_rng(0), [3]))
    before = content(state)
    state, stats = collection.update(state, found, embeddings)
    assert int(stats.num_stale) == 16
    assert content(state) == before


@pytest.mark.parametrize(("way", "num_shards"), [("one", 1), ("sharded", 4), ("replicated", 4)])
def test_import_grows_and_stops_at_the_cap(way, num_shards):
    """A chunk gets room before it is imported; past `max_capacity` none of it is, and the content is kept."""
    rng = np.random.default_rng(5)
    capped = collection_of(way, num_shards, capacity=16, max_capacity=64)
    limit = capped.stores[-1].max_capacity * (num_shards if way == "sharded" else 1)
    chunks = [random_records(rng, range(start, start + 20)) for start in range(0, limit + 40, 20)]
    with pytest.raises(jaxsok.TableFullError, match="wanted at most its max_capacity") as caught:
        capped.import_table(capped.init(seed=0), "a", chunks)
    got, _ = content(caught.value.state, "a", num_shards, way == "replicated")
    num_entered = len(got) // 20
    assert num_entered >= 2
    assert got == {key: line for chunk in chunks[:num_entered] for key, line in as_dict(chunk).items()}
    assert "the chunks before this one are entered" in caught.value.__notes__[0]
    # The same keys again add no rows, however full the store is.
    again = [random_records(rng, chunk.keys) for chunk in chunks[:num_entered]]
    state = capped.import_table(caught.value.state, "a", again)
    got, _ = content(state, "a", num_shards, way == "replicated")
    assert got == {key: line for chunk in again for key, line in as_dict(chunk).items()}


def test_room_for_a_given_number_of_rows():
    """One slab is added for all rows, although the chunks separately would add several."""
    rng = np.random.default_rng(6)
    chunks = [random_records(rng, range(start, start + 10)) for start in range(0, 300, 10)]
    for num_rows, num_slabs in ((300, 2), (None, 6)):
        collection = collection_of(capacity=8)
        state = collection.import_table(collection.init(seed=0), "a", chunks, num_rows=num_rows)
        assert len(state.stores[0].rows) == num_slabs
        assert collection.num_rows(state)["a"] == 300
    more_than_given = random_records(rng, range(30))
    state = collection.import_table(collection.init(seed=0), "a", [more_than_given], num_rows=20)
    assert collection.num_rows(state)["a"] == 30
    capped = collection_of(capacity=8, max_capacity=32)
    state = capped.import_table(capped.init(seed=0), "a", chunks[0], num_rows=10**9)
    assert state.stores[0].capacity == 64  # two tables of 32


def test_keys_without_an_entry_get_one_under_another_salt():
    """Keys aimed at one bucket find no entry within the bound: none is lost, whatever the chunk."""
    table = jaxsok.TableSpec("a", DIM, ADAM, capacity=700, statistics=True)
    collection = jaxsok.Collection([table], [])
    state = collection.init(seed=0)
    keys = programs.aimed_keys(collection, state, 600)
    salt = np.asarray(state.stores[0].counters)[COUNTERS.index("salt_low")]
    records = random_records(np.random.default_rng(0), keys)
    state = collection.import_table(state, "a", [records.take(slice(0, 400)), records.take(slice(400, None))])
    assert np.asarray(state.stores[0].counters)[COUNTERS.index("salt_low")] != salt
    assert content(state)[0] == as_dict(records)
    assert np.asarray(collection.contains(state, "a", keys)).all()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_keys_without_an_entry_are_entered_before_an_error_leaves(error):
    """The chunks or the user stop while the last chunk still has keys to retry."""
    collection = jaxsok.Collection([jaxsok.TableSpec("a", DIM, ADAM, capacity=700, statistics=True)], [])
    state = collection.init(seed=0)
    keys = programs.aimed_keys(collection, state, 600)
    records = random_records(np.random.default_rng(0), keys)

    def broken():
        yield records
        raise error("gone")

    with pytest.raises(error) as caught:
        collection.import_table(state, "a", broken())
    assert "the chunks before this one are entered" in caught.value.__notes__[0]
    assert content(caught.value.state)[0] == as_dict(records)


def test_memory_that_there_is_not(monkeypatch):
    """The error is raised before any change: the given state is intact."""
    collection = collection_of(capacity=16)
    state = collection.init(seed=0)
    monkeypatch.setattr(enlarge, "agree_on_free_bytes", lambda shards: 1000)
    records = random_records(np.random.default_rng(0), range(100))
    with pytest.raises(MemoryError, match="import_table: capacity: got"):
        collection.import_table(state, "a", records)
    assert content(state) == ({}, [])


def test_growth_goes_on_after_an_import():
    """The counts that `grow` remembers are not used after an import or an assign."""
    rng = np.random.default_rng(7)
    collection = collection_of(capacity=40)
    features = collection.batch({"a": np.arange(8), "b": np.arange(8)}).features
    _, state, _ = collection.lookup(collection.grow(collection.init(seed=0)), features)
    state = collection.grow(state)
    state = collection.import_table(state, "a", random_records(rng, range(50, 110)))
    assert state.stores[0].capacity == 80
    features = collection.batch({"a": np.arange(200, 208), "b": np.arange(200, 208)}).features
    _, state, found = collection.lookup(collection.grow(state), features)
    assert np.asarray(found.found[0].counts)[:, 1].sum() == 16


def test_a_traced_assign_keeps_its_reserve():
    """A step that assigns new keys never meets a full store, if `grow` runs before it."""
    collection = collection_of(capacity=8)
    state = collection.init(seed=0)
    step = jax.jit(lambda state, keys: collection.assign(state, "a", keys, jnp.ones((16, DIM))), donate_argnums=0)
    jax.eval_shape(step, state, programs.words(range(16)))
    for start in range(0, 160, 16):
        state, inserted, refused = step(collection.grow(state), programs.words(range(start, start + 16)))
        assert (int(inserted), int(refused)) == (16, 0)


@pytest.mark.parametrize("num_shards", (1, 4))
def test_assign_to_a_full_store(num_shards):
    """Keys without room for a row are counted; keys with a row are set."""
    collection = collection_of("one" if num_shards == 1 else "on", num_shards, capacity=4)
    rows = np.arange(12 * DIM, dtype=np.float32).reshape(12, DIM)
    state, inserted, refused = collection.assign(collection.init(seed=0), "a", np.arange(12), rows)
    assert (int(inserted), int(refused)) == (8, 4)
    there, is_there = collection.rows_of(state, "a", np.arange(12))
    assert np.asarray(is_there).tolist() == [True] * 8 + [False] * 4
    np.testing.assert_array_equal(np.asarray(there), np.where(np.arange(12)[:, None] < 8, rows, 0))


def test_inside_shard_map():
    """If the axis is manual, the calls work on the shard's part; keys are equal on all shards."""
    collection = collection_of("sharded", 4)
    shards = collection.shards
    keys, rows = programs.words(POOL), np.ones((len(POOL), DIM), np.float32)

    def body(state, keys, rows):
        state, inserted, refused = collection.assign(state, "a", keys, rows)
        return state, inserted, refused, collection.contains(state, "a", keys)

    state = collection.init(seed=0)
    of_state = specs_of(collection.shards, state)
    none = jax.sharding.PartitionSpec()
    run = jax.jit(lambda *args: shards.run(body, args, (of_state, none, none), (of_state, none, none, none)))
    state, inserted, refused, is_there = run(state, keys, rows)
    assert (int(inserted), int(refused)) == (len(POOL), 0) and np.asarray(is_there).all()
    assert sorted(content(state, "a", 4)[1]) == sorted(POOL)


@pytest.mark.parametrize(("way", "num_shards", "dtype"), [("one", 1, "bfloat16"), ("sharded", 4, "float32")])
def test_nothing_is_copied(way, num_shards, dtype):
    """A donated state keeps its buffers (law 9); other table-sized memory is one byte per row."""
    collection = collection_of(way, num_shards, dtype, capacity=1 << 15)
    state, _ = fill(collection, np.random.default_rng(8), dtype=dtype)
    places = programs.places_of
    before = places(state)
    state = collection.import_table(state, "a", random_records(np.random.default_rng(9), POOL, dtype))
    assert places(state) == before
    keys, rows = np.arange(64), np.ones((64, DIM), np.float32)
    for call in (lambda s: collection.assign(s, "a", keys, rows), lambda s: collection.clear(s, "a")):
        compiled = jax.jit(call, donate_argnums=0).lower(state).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 20 * state.stores[0].capacity // num_shards + 2**18
        state = compiled(state)[0]
        assert places(state) == before


@pytest.mark.parametrize(("way", "num_shards"), [("one", 1), ("sharded", 4)])
def test_nothing_is_copied_between_steps(way, num_shards):
    """Outside a trace erase, assign and clear donate their store, and reads do not (law 9)."""
    collection = collection_of(way, num_shards)
    state, _ = fill(collection, np.random.default_rng(8))
    places = programs.places_of
    before, keys = places(state), programs.as_array(POOL[:4])
    for call in (
        lambda s: collection.erase(s, "a", keys),
        lambda s: collection.assign(s, "a", keys, np.ones((4, DIM), np.float32)),
        lambda s: collection.clear(s, "b"),
    ):
        old = state
        collection.rows_of(old, "a", keys)
        state = call(old)[0]
        assert places(state) == before
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.stores))
    assert np.asarray(collection.contains(state, "a", keys)).all()


def aligned(shape, dtype):
    """Returns an empty array of memory that JAX would keep without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_arrays_of_the_caller_may_be_filled_again_after_a_call(num_shards):
    """A program on a CPU may begin after the call has returned, and reads NumPy arrays where they lie."""
    size, num_calls = 4096, 4
    collection = collection_of("sharded" if num_shards > 1 else "one", num_shards, capacity=size * num_calls * 2)
    keys, rows, state = aligned((size,), np.uint64), aligned((size, DIM), np.float32), collection.init()
    for number in range(num_calls):
        keys[:], rows[:] = np.arange(size) + number * size, number
        state, _, _ = collection.assign(state, "a", keys, rows)
        keys[:], rows[:] = 7, -1
    exported = collection.export_table(state, "a")
    order = np.argsort(exported["keys"])
    np.testing.assert_array_equal(exported["keys"][order], np.arange(size * num_calls))
    np.testing.assert_array_equal(exported["rows"][order, 0], np.repeat(np.arange(num_calls), size))
    results = []
    for call in (collection.contains, collection.rows_of, collection.erase):
        keys[:] = np.arange(size)
        results.append(call(state, "a", keys))
        keys[:] = size * num_calls
    is_there, (found, _), (_, num_erased) = results
    assert is_there.all() and (found == 0).all() and num_erased == size


RECORDS = random_records(np.random.default_rng(0), [1, 2, 3])


def change_records(**columns):
    """Returns three records, with some columns replaced."""
    return dataclasses.replace(RECORDS, **columns)


@pytest.mark.parametrize(
    ("records", "error", "message"),
    [
        (7, TypeError, "chunks: got int, wanted jaxsok.Records, or several"),
        ([{"keys": 1}], TypeError, "chunks: got dict, wanted jaxsok.Records"),
        (change_records(keys=np.array([1, 2, 2], np.uint64)), ValueError, "keys: got 2 more than once in a chunk"),
        (change_records(keys=np.array([1, 2, -1])), ValueError, "keys: got PADDING_KEY"),
        (change_records(keys=np.ones((3, 1), np.int64)), ValueError, r"keys: got shape \[3, 1\]"),
        (change_records(keys=np.array([1.0, 2.0, 3.0])), TypeError, "keys must be integers"),
        (change_records(keys=np.array([1, 2])), ValueError, r"rows: got float32\[3, 4\], wanted floats\[2, 4\]"),
        (
            change_records(rows=np.ones((3, 5), np.float32)),
            ValueError,
            r"rows: got float32\[3, 5\], wanted floats\[3, 4\]",
        ),
        (change_records(rows=np.ones((3, 4), np.int32)), ValueError, r"rows: got int32\[3, 4\], wanted floats"),
        (
            change_records(state={"accumulator": np.ones((3, 4), np.float32)}),
            ValueError,
            "state: got 'accumulator', wanted",
        ),
        (change_records(state={"m": np.ones((3, 1), np.float32)}), ValueError, "state 'm': got"),
        (change_records(last_step=None), ValueError, "last_step, frequency: got one of them, wanted both"),
        (change_records(frequency=np.ones(3, np.int32)), ValueError, r"frequency: got int32\[3\], wanted uint32\[3\]"),
    ],
)
def test_records_that_are_refused(records, error, message):
    """Bad input changes nothing: the given state is intact."""
    collection = collection_of()
    state = collection.init(seed=0)
    with pytest.raises(error, match=message):
        collection.import_table(state, "a", records, num_rows=10_000)
    assert content(state) == ({}, [])


WHOLE = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "asarray": lambda state: jax.tree.map(jnp.asarray, jax.device_get(state)),
    "replicated": lambda state: jax.device_put(state, NamedSharding(state.stores[0].counters.sharding.mesh, P())),
    "one device": lambda state: jax.device_put(state, jax.devices()[0]),
}


@pytest.mark.parametrize("put", WHOLE.values(), ids=WHOLE)
def test_a_state_that_is_not_split_over_the_shards_is_refused(put, tmp_path):
    """Exports read each shard's part where it lies; what is on another device was left out."""
    collection = collection_of("sharded", 4, capacity=64)
    records = change_records(last_step=None, frequency=None)
    state = collection.import_table(collection.init(seed=0), "a", records)
    before = checkpoint.export_full(tmp_path / "before", collection, state)
    whole = put(state)
    for call in (
        lambda: collection.grow(whole, 1),
        lambda: collection.evict(
            whole, "a", jaxsok.policies.LeastRecentlyUsed(), num_rows=1, hand_over=lambda *args: None
        ),
        lambda: collection.import_table(whole, "a", records),
        lambda: collection.export_table(whole, "a"),
        lambda: next(collection.export_chunks(whole, "a", chunk_rows=1)),
        lambda: serving.freeze(collection, whole),
        lambda: checkpoint.export_full(tmp_path / "whole", collection, whole),
        lambda: checkpoint.TablesSave(collection, whole),
        lambda: checkpoint.load(before.path, collection, state=whole),
        lambda: checkpoint.apply_delta(before.path, collection, whole, after=before.path),
    ):
        with pytest.raises(ValueError, match=r"state: got one whose arrays are whole .* each of 4 shards; put it back"):
            call()
    assert not (tmp_path / "whole").exists()
    copy = jax.device_get(whole)
    back = jax.device_put(copy, jax.tree.map(lambda leaf: leaf.sharding, state))
    assert content(collection.grow(back, 1)) == content(state)
    with pytest.raises(TypeError, match="got one of NumPy arrays"):  # the words that a lookup returns as they are
        collection.grow(dataclasses.replace(back, seed=copy.seed), 1)


def test_calls_that_are_refused():
    """Invalid arguments and traced states are refused."""
    collection = collection_of()
    state = collection.init(seed=0)
    for options, message in (
        ({"num_rows": -1}, "num_rows: got -1"),
        ({"num_rows": 1.0}, "num_rows: got 1.0"),
        ({"reset_state": 1}, "reset_state: got 1"),
        ({"clock": -1}, "clock: got -1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            collection.import_table(state, "a", RECORDS, **options)
    with pytest.raises(TypeError, match="import_table: state: got one that is traced"):
        jax.jit(lambda state: collection.import_table(state, "a", RECORDS))(state)
    on_host = jax.device_get(state)
    for call in (
        lambda: collection.grow(on_host, 1),
        lambda: collection.export_table(on_host, "a"),
        lambda: next(collection.export_chunks(on_host, "a", chunk_rows=1)),
    ):
        with pytest.raises(TypeError, match=r"state: got one of NumPy arrays, as jax\.device_get gives it, wanted arr"):
            call()
    back = jax.device_put(on_host, jax.tree.map(lambda leaf: leaf.sharding, state))
    assert content(collection.grow(back, 1)) == ({}, []) and collection.num_rows(on_host) == {"a": 0, "b": 0}
    with pytest.raises(ValueError, match=r"assign: rows: got float32\[2, 4\], wanted floats\[3, 4\]"):
        collection.assign(state, "a", np.arange(3), np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"rows_of: keys: got shape \[1, 3\], wanted \[num_keys\]"):
        collection.rows_of(state, "a", np.arange(3)[None])
    with pytest.raises(ValueError, match="clear: table: got 'c', wanted one of"):
        collection.clear(state, "c")
    assert content(state) == ({}, [])

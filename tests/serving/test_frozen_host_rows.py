"""Frozen tables some of whose rows lie in host memory: the bits of tables on the device, and of NumPy."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jaxsok
from jaxsok import Records
from jaxsok.serving import frozen
from jaxsok.serving.artifact import KeysInput, export_model
from jaxsok.serving.backing import HostRows
from jaxsok.serving.frozen import DTYPES, FrozenTable, SizedRecords, freeze, freeze_records
from jaxsok.serving.fused import LookupInput, find_rows, lookup_with_counts
from jaxsok.types import PADDING_KEY

NUM_ROWS = {"user": 60, "item": 37}


def records_of(name, dim, seed=0):
    """Returns all rows of a table in two chunks, with frequencies in an order of their own."""
    rng = np.random.default_rng([seed, len(name)])
    number = NUM_ROWS[name]
    keys = rng.permutation(1000)[:number].astype(np.uint64)
    rows, frequency = rng.normal(size=(number, dim)).astype(np.float32), rng.permutation(number).astype(np.uint32)
    whole = Records(keys, rows, frequency=frequency)
    return whole, SizedRecords(number, [whole.take(slice(0, 20)), whole.take(slice(20, None))])


def make(share, dtype="float32", dim=6, spare_rows=0):
    """Returns frozen tables of two tables in one store, with their maps and records."""
    given = {name: records_of(name, dim) for name in NUM_ROWS}
    tables = {name: FrozenTable(name, dim, default=0.5, dtype=dtype) for name in NUM_ROWS}
    sources = [(tables[name], source) for name, (_, source) in given.items()]
    made, maps = freeze_records(sources, spare_rows=spare_rows, device_share=share)
    return made, maps, {name: whole for name, (whole, _) in given.items()}


def ask(tables, keys):
    """Looks keys up one by one, and as bags of three, weighted."""
    bags = {}
    for name, some in keys.items():
        weights = np.arange(some.size, dtype=np.float32).reshape(-1, 3)
        bags[f"{name} bags"] = LookupInput(name, some.reshape(-1, 3), combiner="mean", weights=weights)
    rows, counts = jax.jit(lambda tables: lookup_with_counts(tables, {**keys, **bags}))(tables)
    return {name: np.asarray(value) for name, value in rows.items()} | {"counts": np.asarray(counts)}


def some_keys(records, seed):
    """Draws keys that have rows, keys that have none, and padding."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, whole in records.items():
        unknown = rng.integers(2000, 3000, 4).astype(np.uint64)
        drawn[name] = rng.permutation(
            np.concatenate([rng.choice(whole.keys, 40), unknown, np.array([PADDING_KEY], np.uint64)])
        )
    return drawn


def assert_same(got, wanted):
    """All values agree to the bit."""
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_lookups_have_the_bits_of_the_device(share, dtype):
    """Wherever rows lie, in all dtypes, for rows of bytes that are no multiple of 16."""
    tables, _, records = make(share, dtype)
    (store,) = tables.stores
    shares = [int(np.ceil(share * number)) for number in NUM_ROWS.values()]
    assert store.rows.shape[0] == max(1, sum(shares)) < store.capacity == sum(NUM_ROWS.values())
    keys = some_keys(records, 1)
    assert_same(ask(tables, keys), ask(make(1.0, dtype)[0], keys))


def test_rows_are_those_of_the_records():
    """NumPy reads the same rows; the bytes are counted where they lie."""
    tables, _, records = make(0.25)
    for name, whole in records.items():
        rows, is_found = find_rows(tables, name, whole.keys)
        np.testing.assert_array_equal(np.asarray(rows), whole.rows)
        assert np.asarray(is_found).all()
    (store,) = tables.stores
    assert store.host_bytes == tables.host_bytes == (store.capacity - store.rows.shape[0]) * 24
    assert tables.num_bytes == store.rows.nbytes + store.index.nbytes + store.counters.nbytes


def test_the_rows_used_most_lie_on_the_device():
    """Each table has its share, by frequency."""
    tables, maps, records = make(0.25)
    on_device = tables.stores[0].rows.shape[0]
    for number, (name, whole) in enumerate(records.items()):
        hottest = whole.keys[np.argsort(-whole.frequency.astype(int))[: int(np.ceil(NUM_ROWS[name] / 4))]]
        assert (maps[0].find(number, hottest) < on_device).all()


def test_without_frequencies_the_first_rows_lie_on_the_device():
    """The order is that of the records."""
    keys = np.arange(10, dtype=np.uint64) * 7
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    tables, (row_map,) = freeze_records(
        [(FrozenTable("user", 2), SizedRecords(10, [Records(keys, rows)]))], device_share=0.4
    )
    assert row_map.find(0, keys).tolist() == list(range(10))
    np.testing.assert_array_equal(np.asarray(tables.stores[0].rows), rows[:4])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow), "int8"])
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(data=st.data())
def test_rows_are_written_where_they_lie(dtype, data):
    """Any rows, new ones too, agree with a dict after any writes."""
    tables, (row_map,), records = make(0.3, dtype, spare_rows=5)
    other, (other_map,), _ = make(1.0, dtype, spare_rows=5)
    (store,), (on_device,) = tables.stores, other.stores
    table = tables.tables["user"]
    for number in range(data.draw(st.integers(1, 3))):
        places = data.draw(st.lists(st.integers(0, NUM_ROWS["user"] + 4), min_size=1, unique=True))
        known = np.concatenate([records["user"].keys, np.arange(5000, 5005, dtype=np.uint64)])
        keys = known[np.array(places)]
        rows = np.random.default_rng(number).normal(size=(len(keys), 6)).astype(np.float32)
        store = frozen.write_rows(store, table, row_map.place(0, keys), Records(keys, rows))
        on_device = frozen.write_rows(on_device, table, other_map.place(0, keys), Records(keys, rows))

    def with_index(tables, store, row_map):
        index, counters = row_map.index(jax.devices()[0])
        stores = (dataclasses.replace(store, index=index, counters=counters),)
        return dataclasses.replace(tables, stores=stores)

    keys = some_keys(records, 3)
    keys["user"][:5] = np.arange(5000, 5005)
    assert_same(ask(with_index(tables, store, row_map), keys), ask(with_index(other, on_device, other_map), keys))


def test_a_trained_table_is_frozen_with_a_share():
    """`freeze` reads the state twice, and lookups give what `find` gives."""
    spec = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=64)
    collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec("clicked", table="item")])
    keys = np.arange(48, dtype=np.uint64) * 3
    batch = collection.batch({"clicked": keys})
    _, state, _ = collection.lookup(collection.init(seed=0), batch.features)
    wanted, _ = collection.find(state, batch.features)
    tables = freeze(collection, state, device_share=0.5)
    assert tables.stores[0].rows.shape[0] == 24 and tables.host_bytes == 24 * 16
    np.testing.assert_array_equal(np.asarray(find_rows(tables, "item", keys)[0]), np.asarray(wanted["clicked"]))


@pytest.mark.parametrize("share", [-0.1, 1.5, "half"])
def test_shares_that_cannot_be(share):
    """The error names the argument."""
    with pytest.raises((ValueError, TypeError), match="device_share"):
        make(share)


def test_what_needs_all_rows_on_the_device(tmp_path):
    """Files and exported models say so."""
    tables, _, _ = make(0.3)
    inputs = {"user": KeysInput("user")}
    with pytest.raises(ValueError, match="export_model: tables: got some with rows in host memory"):
        export_model(tmp_path / "model", lambda tables, inputs: inputs["user"], tables, inputs)


def test_streams_that_can_be_read_once():
    """The first reading only chooses rows, so a second one has to bring them."""
    whole, _ = records_of("user", 6)
    source = SizedRecords(60, iter([whole.take(slice(0, 20)), whole.take(slice(20, None))]))
    with pytest.raises(ValueError, match=r"got 15 keys of tables .* wanted streams that can be read twice"):
        freeze_records([(FrozenTable("user", 6), source)], device_share=0.25)


def test_rows_in_host_memory_of_another_width():
    """The handler refuses them: it would read beyond them."""
    (store,) = make(0.3)[0].stores
    tables, _, records = make(0.3)
    narrow = dataclasses.replace(store, host_rows=(store.host_rows[0][:, :20],))
    with pytest.raises(Exception, match=r"host_rows: got shape \[67, 20\], wanted \[-1, 24\]"):
        ask(dataclasses.replace(tables, stores=(narrow,)), some_keys(records, 0))
    with pytest.raises(ValueError, match="HostRows: tables: got some with rows in host memory"):
        HostRows(tables, [])

"""Tiers below the device against dictionaries: what a source has."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxsok
from jaxsok.records import Records
from jaxsok.serving import backing
from jaxsok.serving.backing import HostRows
from jaxsok.serving.errors import UnknownTableError
from jaxsok.serving.frozen import FrozenTable, SizedRecords

# Two tables share a store; the numbers below are exact in all dtypes. An int8 row has 127 as its largest number, so
# that its scale is 1.
TABLES = {
    "a": FrozenTable("a", dim=4),
    "b": FrozenTable("b", dim=4, default=3.0),
    "h": FrozenTable("h", dim=3, dtype="bfloat16"),
    "q": FrozenTable("q", dim=3, dtype="int8"),
}
KEYS = (*range(12), 2**40, 2**64 - 2)


def row_of(table, value):
    """Draws a row of whole numbers."""
    return np.array([value, 127, -value, 1][: TABLES[table].dim], np.float32)


def records_of(table, values, frequencies=None):
    """Returns `{key: value}` as records."""
    keys = np.array(list(values), np.uint64)
    rows = np.array([row_of(table, value) for value in values.values()], np.float32).reshape(-1, TABLES[table].dim)
    hot = None if frequencies is None else np.array([frequencies[key] for key in values], np.uint32)
    return Records(keys, rows, frequency=hot)


def host_rows(values, **options):
    """Puts `{table: {key: value}}` into host memory."""
    sources = [
        # A source may promise more rows than it has; equal sizes save compilations.
        (TABLES[name], SizedRecords(max(8, len(some)), [records_of(name, some)] if some else []))
        for name, some in values.items()
    ]
    return HostRows.of(sources, **options)


def contents(source, chunk_rows=5):
    """Returns the rows of `scan` by key."""
    return {
        table: {
            key: row.tolist()
            for records in source.scan(table, chunk_rows)
            for key, row in zip(records.keys.tolist(), records.rows, strict=True)
        }
        for table in source.tables
    }


def expected_contents(values):
    """Returns the dictionary in the form of `contents`."""
    return {
        table: {key: row_of(table, value).tolist() for key, value in some.items()} for table, some in values.items()
    }


def assert_has(source, values):
    """Checks `fetch` of all keys, some of them twice, and `num_rows`."""
    keys = np.array([*KEYS, jaxsok.PADDING_KEY, *KEYS[::-1]], np.uint64)
    for table, some in values.items():
        rows, is_found = source.fetch(table, keys)
        assert rows.dtype == np.float32 and rows.shape == (len(keys), TABLES[table].dim)
        assert is_found.tolist() == [key in some for key in keys.tolist()]
        for key, row, is_there in zip(keys.tolist(), rows, is_found, strict=True):
            if is_there:
                np.testing.assert_array_equal(row, row_of(table, some[key]))
        assert source.num_rows(table) == len(some)


dictionaries = st.fixed_dictionaries(
    {table: st.dictionaries(st.sampled_from(KEYS), st.integers(-120, 120), max_size=8) for table in TABLES}
)


@settings(max_examples=10)
@given(dictionaries)
def test_host_rows(values):
    """`fetch`, `scan` and `num_rows` give what the records had."""
    source = host_rows(values, version=3)
    assert_has(source, values)
    assert contents(source) == expected_contents(values) and source.version == 3


def test_frequencies_go_with_their_rows():
    """Frequencies are stored with their rows if all records have them."""
    hot = {key: 100 - key for key in range(10)}
    chunks = [records_of("a", {key: key for key in some}, hot) for some in (range(4), range(4, 10))]
    source = HostRows.of([(TABLES["a"], SizedRecords(10, chunks))])
    found = {
        key: frequency
        for records in source.scan("a", 3)
        for key, frequency in zip(records.keys.tolist(), records.frequency.tolist(), strict=True)
    }
    assert found == hot
    some = [records_of("a", {1: 1}, {1: 5}), records_of("a", {2: 2})]
    assert next(iter(HostRows.of([(TABLES["a"], SizedRecords(2, some))]).scan("a", 9))).frequency is None


def test_frequencies_of_a_table_do_not_hang_on_another():
    """Frequencies of one table do not depend on another, whether they share a store (a and b) or not."""
    known = {"a": {1: 5, 2: 6}, "b": None, "h": None, "q": {1: 7, 2: 8}}
    sources = [(TABLES[name], SizedRecords(2, [records_of(name, {1: 1, 2: 2}, hot)])) for name, hot in known.items()]
    source = HostRows.of(sources)
    for name, hot in known.items():
        (records,) = source.scan(name, 9)
        if hot is None:
            assert records.frequency is None
        else:
            assert dict(zip(records.keys.tolist(), records.frequency.tolist(), strict=True)) == hot


def test_many_keys_in_parts(monkeypatch):
    """More keys than one fetch takes are fetched in parts."""
    values = {"a": {key: key % 100 for key in range(1000)}}
    source = host_rows(values)
    monkeypatch.setattr(backing, "KEYS_AT_A_TIME", 300)
    keys = np.arange(1100, dtype=np.uint64)
    rows, is_found = source.fetch("a", keys)
    np.testing.assert_array_equal(is_found, keys < 1000)
    np.testing.assert_array_equal(rows[:1000, 0], keys[:1000] % np.uint64(100))
    assert source.fetch("a", keys[:0])[0].shape == (0, 4)
    assert source.num_bytes > 1000 * 16


def test_bad_tiers():
    """Bad tiers are named, with what is wanted."""
    source = host_rows({"a": {1: 1}})
    with pytest.raises(UnknownTableError, match="fetch: table: got 'b'"):
        source.fetch("b", np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="HostRows: maps: got 0"):
        HostRows(source._tables, ())


def test_no_cpu_backend(monkeypatch):
    """The error for a missing CPU backend states the remedy."""

    def none(**_):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(RuntimeError, match="leave JAX_PLATFORMS unset"):
        backing.host_device()

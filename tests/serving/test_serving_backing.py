"""Tiers below the device against dictionaries: what a source has, what a newer version of it has, how they stack."""

import collections

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsok
from jaxsok.records import Records
from jaxsok.serving import backing, store_plans
from jaxsok.serving.backing import HostRows, Layered, SourceReplacedError
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
    """Of whole numbers."""
    return np.array([value, 127, -value, 1][: TABLES[table].dim], np.float32)


def records_of(table, values, frequencies=None):
    """`{key: value}` as records."""
    keys = np.array(list(values), np.uint64)
    rows = np.array([row_of(table, value) for value in values.values()], np.float32).reshape(-1, TABLES[table].dim)
    hot = None if frequencies is None else np.array([frequencies[key] for key in values], np.uint32)
    return Records(keys, rows, frequency=hot)


def host_rows(values, **options):
    """`{table: {key: value}}` in host memory."""
    sources = [
        # Sources may promise more rows than they have; equal sizes spare programs.
        (TABLES[name], SizedRecords(max(8, len(some)), [records_of(name, some)] if some else []))
        for name, some in values.items()
    ]
    return HostRows.of(sources, **options)


def contents(source, chunk_rows=5):
    """What `scan` gives, as rows by key."""
    return {
        table: {
            key: row.tolist()
            for records in source.scan(table, chunk_rows)
            for key, row in zip(records.keys.tolist(), records.rows, strict=True)
        }
        for table in source.tables
    }


def expected_contents(values):
    """The same of the dictionary."""
    return {
        table: {key: row_of(table, value).tolist() for key, value in some.items()} for table, some in values.items()
    }


def assert_has(source, values):
    """`fetch` of all keys, some of them twice, and `num_rows`."""
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
updates = st.lists(
    st.tuples(
        st.dictionaries(
            st.sampled_from(list(TABLES)),
            st.dictionaries(st.sampled_from(KEYS), st.integers(-120, 120), max_size=8),
            max_size=3,
        ),
        st.dictionaries(st.sampled_from(list(TABLES)), st.sets(st.sampled_from(KEYS), max_size=8), max_size=3),
        st.booleans(),
    ),
    max_size=4,
)


@settings(max_examples=10)
@given(dictionaries, updates, st.sampled_from([0, 12]))
def test_updates_of_host_rows(values, steps, spare_rows):
    """Any updates, copied or in place: the newer version has them, the older one is as it was or says that it is not.

    In place there is room for as many new keys as there are free rows of the store; else nothing changes.
    """
    source = host_rows(values, spare_rows=spare_rows)
    assert_has(source, values)
    for changed, erased, in_place in steps:
        given = {table: records_of(table, some) for table, some in changed.items()}
        gone = {table: np.array(sorted(keys), np.uint64) for table, keys in erased.items()}
        newer = {table: dict(some) for table, some in values.items()}
        for table, keys in erased.items():
            for key in keys:
                newer[table].pop(key, None)
        for table, some in changed.items():
            newer[table].update(some)
        try:
            after = source.updated(given, gone, in_place=in_place)
        except ValueError as error:
            assert in_place and "new keys" in str(error)
            assert_has(source, values)
            after = source.updated(given, gone)
            in_place = False
        assert after.version == source.version + 1
        if in_place:
            with pytest.raises(SourceReplacedError):
                source.fetch("a", np.zeros(1, np.uint64))
            with pytest.raises(SourceReplacedError):
                source.updated({}, {}, in_place=True)
        else:
            assert_has(source, values)
        assert_has(after, newer)
        assert contents(after) == expected_contents(newer)
        source, values = after, newer


def test_in_place_keeps_the_rows_where_they_are():
    """No copy of what is large; spare rows are used, and no more than those."""
    source = host_rows({"a": {key: key for key in range(8)}}, spare_rows=2)
    address = source._tables.stores[0].rows.unsafe_buffer_pointer()
    source = source.updated({"a": records_of("a", {3: 30, 50: 5, 51: 6})}, in_place=True, version=9)
    assert source._tables.stores[0].rows.unsafe_buffer_pointer() == address and source.version == 9
    with pytest.raises(ValueError, match=r"got 1 new keys of tables.*at most 0.*in_place=False"):
        source.updated({"a": records_of("a", {52: 1})}, in_place=True)
    source = source.updated({"a": records_of("a", {52: 1})}, {"a": np.array([0])}, in_place=True)
    assert (
        contents(source)["a"]
        == expected_contents({"a": {52: 1, 1: 1, 2: 2, 3: 30, 4: 4, 5: 5, 6: 6, 7: 7, 50: 5, 51: 6}})["a"]
    )


def test_in_place_leaves_alone_what_older_versions_share():
    """Stores that did not change are shared by versions: they are copied while another version lives, then not."""
    values = {"a": {1: 1, 2: 2}, "h": {1: 5}, "q": {1: 6}}
    first = host_rows(values, spare_rows=4)
    second = first.updated({"h": records_of("h", {1: 50, 3: 3})})
    third = second.updated({name: records_of(name, {1: 9, 7: 7}) for name in values}, in_place=True)
    assert_has(first, values)
    assert contents(first) == expected_contents(values)
    with pytest.raises(SourceReplacedError, match="version 1 "):
        second.fetch("a", np.zeros(1, np.uint64))
    with pytest.raises(SourceReplacedError):
        second.updated({"a": records_of("a", {1: 3})})  # which would copy rows that are gone
    with pytest.raises(SourceReplacedError):
        next(second.scan("a", 8))
    newer = {"a": {1: 9, 2: 2, 7: 7}, "h": {1: 9, 3: 3, 7: 7}, "q": {1: 9, 7: 7}}
    assert_has(third, newer)
    # The other way about: the older version goes in place, the newer one stays.
    first.updated({"q": records_of("q", {1: 2})}, in_place=True)
    fourth = third.updated({"q": records_of("q", {1: 4})})
    fifth = third.updated({"a": records_of("a", {1: 8})}, in_place=True)
    assert_has(fourth, newer | {"q": {1: 4, 7: 7}})
    assert_has(fifth, newer | {"a": {1: 8, 2: 2, 7: 7}})
    address = fifth._tables.stores[0].rows.unsafe_buffer_pointer()
    del third, fourth
    sixth = fifth.updated({"a": records_of("a", {1: 6})}, in_place=True)
    assert sixth._tables.stores[0].rows.unsafe_buffer_pointer() == address
    assert_has(sixth, newer | {"a": {1: 6, 2: 2, 7: 7}})


def test_versions_share_rows_where_keys_were_only_erased():
    """The older one has rows that the newer one lacks: an update in place copies them while it lives."""
    values = {"a": {1: 1, 2: 2, 3: 3}, "q": {1: 6, 2: 7}}
    first = host_rows(values, spare_rows=4)
    second = first.updated({}, {"a": np.ones(1, np.uint64), "q": np.ones(1, np.uint64)})
    third = second.updated({"a": records_of("a", {2: 9}), "q": records_of("q", {2: 9})}, in_place=True)
    assert_has(first, values)
    assert_has(third, {"a": {2: 9, 3: 3}, "q": {2: 9}})


def test_an_update_in_place_that_fails_halfway_stays_closed(monkeypatch):
    """Its rows may be of two versions: nobody reads them. Older versions that share stores are as they were."""
    values = {"a": {1: 1, 2: 2}, "h": {1: 5}}
    first = host_rows(values, spare_rows=4)
    second = first.updated({"a": records_of("a", {1: 3})})
    real = store_plans.lines_of

    def fail(table, rows):
        if table.name == "h":
            raise MemoryError("no room")
        return real(table, rows)

    monkeypatch.setattr(store_plans, "lines_of", fail)
    with pytest.raises(MemoryError, match="no room"):
        second.updated({"a": records_of("a", {2: 9}), "h": records_of("h", {1: 9})}, in_place=True)
    for read in (
        lambda: second.fetch("a", np.ones(1, np.uint64)),
        lambda: second.updated({}, {}, in_place=True),
        lambda: second.updated({}),
    ):
        with pytest.raises(SourceReplacedError):
            read()
    assert_has(first, values)


def test_frequencies_go_with_their_rows():
    """They come with the records, and change by updates that know them."""
    hot = {key: 100 - key for key in range(10)}
    chunks = [records_of("a", {key: key for key in some}, hot) for some in (range(4), range(4, 10))]
    source = HostRows.of([(TABLES["a"], SizedRecords(10, chunks))])
    source = source.updated({"a": records_of("a", {3: 1, 77: 2}, {3: 1, 77: 1000})}, {"a": np.array([0])})
    found = {
        key: frequency
        for records in source.scan("a", 3)
        for key, frequency in zip(records.keys.tolist(), records.frequency.tolist(), strict=True)
    }
    assert found == {key: value for key, value in hot.items() if key} | {3: 1, 77: 1000}
    some = [records_of("a", {1: 1}, {1: 5}), records_of("a", {2: 2})]
    assert next(iter(HostRows.of([(TABLES["a"], SizedRecords(2, some))]).scan("a", 9))).frequency is None


def test_frequencies_of_a_table_do_not_hang_on_another():
    """Of one store (a and b) as of two: whose records have none has none."""
    known = {"a": {1: 5, 2: 6}, "b": None, "h": None, "q": {1: 7, 2: 8}}
    sources = [(TABLES[name], SizedRecords(2, [records_of(name, {1: 1, 2: 2}, hot)])) for name, hot in known.items()]
    source = HostRows.of(sources).updated({"b": records_of("b", {3: 3}), "h": records_of("h", {3: 3}, {3: 9})})
    for name, hot in known.items():
        (records,) = source.scan(name, 9)
        if hot is None:
            assert records.frequency is None
        else:
            assert dict(zip(records.keys.tolist(), records.frequency.tolist(), strict=True)) == hot


@settings(max_examples=8)
@given(st.lists(dictionaries, min_size=1, max_size=3))
def test_layers(layers):
    """The first that has a key gives its row, as in a ChainMap."""
    source = Layered([host_rows(values, version=10 + number) for number, values in enumerate(layers)])
    together = {table: dict(collections.ChainMap(*(values[table] for values in layers))) for table in TABLES}
    keys = np.array(KEYS, np.uint64)
    for table, some in together.items():
        rows, is_found = source.fetch(table, keys)
        assert is_found.tolist() == [key in some for key in KEYS]
        for key, row, is_there in zip(KEYS, rows, is_found, strict=True):
            if is_there:
                np.testing.assert_array_equal(row, row_of(table, some[key]))
        assert source.num_rows(table) == max(len(values[table]) for values in layers)
    assert contents(source) == expected_contents(together)
    assert source.version == sum(range(10, 10 + len(layers)))
    source.close()


def test_keys_of_no_layer_read_what_the_first_gives(monkeypatch):
    """The default of host memory, although a database below it may give anything for them."""
    above, below = host_rows({"b": {1: 5}}), host_rows({"b": {2: 6}})
    fetch = below.fetch

    def fetch_anything(table, keys):
        rows, is_found = fetch(table, keys)
        return np.where(is_found[:, None], rows, np.float32(np.nan)), is_found

    monkeypatch.setattr(below, "fetch", fetch_anything)
    rows, is_found = Layered([above, below]).fetch("b", np.array([1, 2, 3], np.uint64))
    assert is_found.tolist() == [True, True, False]
    np.testing.assert_array_equal(rows, [row_of("b", 5), row_of("b", 6), [3.0] * 4])


def test_many_keys_in_parts(monkeypatch):
    """More keys than are fetched at a time."""
    values = {"a": {key: key % 100 for key in range(1000)}}
    source = host_rows(values)
    monkeypatch.setattr(backing, "KEYS_AT_A_TIME", 300)
    keys = np.arange(1100, dtype=np.uint64)
    rows, is_found = source.fetch("a", keys)
    np.testing.assert_array_equal(is_found, keys < 1000)
    np.testing.assert_array_equal(rows[:1000, 0], keys[:1000] % np.uint64(100))
    assert source.fetch("a", keys[:0])[0].shape == (0, 4)
    assert source.num_bytes > 1000 * 16


@pytest.mark.parametrize(
    ("changed", "erased", "error", "message"),
    [
        ({"z": Records(np.zeros(1, np.uint64), np.zeros((1, 4), np.float32))}, {}, UnknownTableError, "got 'z'"),
        ({}, {"z": np.zeros(1, np.uint64)}, UnknownTableError, "got 'z'"),
        ({"a": Records(np.zeros(1, np.uint64), np.zeros((1, 3), np.float32))}, {}, ValueError, r"shape \[1, 3\]"),
        (
            {"a": Records(np.array([2**64 - 1], np.uint64), np.zeros((1, 4), np.float32))},
            {},
            ValueError,
            "got PADDING_KEY",
        ),
        ({"q": Records(np.zeros(1, np.uint64), np.full((1, 3), np.inf, np.float32))}, {}, ValueError, "infinite"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_bad_updates(changed, erased, error, message, in_place):
    """Refused, and nothing has changed."""
    values = {"a": {1: 1}, "q": {2: 2}}
    source = host_rows(values)
    good = {"a": records_of("a", {1: 9})}
    with pytest.raises(error, match=message):
        source.updated(good | changed, erased, in_place=in_place)
    assert_has(source, values)


def test_bad_tiers():
    """Named, with what was wanted."""
    with pytest.raises(ValueError, match="Layered: layers: got none"):
        Layered([])
    with pytest.raises(ValueError, match="wanted the same in all"):
        Layered([host_rows({"a": {1: 1}}), host_rows({"b": {1: 1}})])
    source = host_rows({"a": {1: 1}})
    with pytest.raises(UnknownTableError, match="fetch: table: got 'b'"):
        source.fetch("b", np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="HostRows: maps: got 0"):
        HostRows(source._tables, ())


def test_no_cpu_backend(monkeypatch):
    """Said with its remedy."""

    def none(**_):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(RuntimeError, match="leave JAX_PLATFORMS unset"):
        backing.host_device()

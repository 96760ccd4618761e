"""The device cache against a dict that forgets: which rows are cached, the order in which they leave, and what is read.

The oracle is a dictionary of rows by version and a sorted list of (tick, table, key). Rows encode version, table and
key, so that a wrong route or a mixed version shows in the numbers.
"""

import contextlib
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from waiting import wait_until

import jaxsok
from jaxsok.records import Records
from jaxsok.serving import cache as cache_module, ready as ready_lib
from jaxsok.serving.backing import HostRows, RowSource
from jaxsok.serving.cache import DeviceCache, cache_bytes, device_cache, programs, stores
from jaxsok.serving.errors import RequestError, ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable, SizedRecords
from jaxsok.serving.fused import lookup as frozen_lookup

PADDING = jaxsok.PADDING_KEY
# Tables a and b share a store; rows of h have 16 bits.
TABLES = {
    "a": FrozenTable("a", dim=4, default=-1.0),
    "h": FrozenTable("h", dim=3, default=0.5, dtype="float16"),
    "b": FrozenTable("b", dim=4, default=-2.0),
}
NUMBERS = {"a": 1, "b": 2, "h": 3}
KEYS = (*range(20), 2**32 + 1, 2**63 + 5, 2**64 - 2)


class DictSource(RowSource):
    """A source over rows in a dictionary, `{table: {key: row}}`, with what the tests observe or break."""

    def __init__(self, rows, tables=None, version=0, frequencies=None):
        """Takes the dictionary, which the test may change."""
        self.given, self.rows, self.version, self.frequencies = tables or TABLES, rows, version, frequencies
        self.fetched, self.before_fetch = [], None

    @property
    def tables(self):
        """The tables, by name."""
        return self.given

    def num_rows(self, table):
        """Returns the dictionary's number of rows."""
        return len(self.rows[table])

    def fetch(self, table, keys):
        """Returns rows; absent rows are NaN, which no answer may contain."""
        self.fetched.append((table, keys.tolist()))
        if self.before_fetch is not None:
            self.before_fetch(table, keys)
        there = self.rows[table]
        rows = np.full((len(keys), self.tables[table].dim), np.nan, np.float32)
        for i, key in enumerate(keys.tolist()):
            if key in there:
                rows[i] = there[key]
        return rows, np.array([key in there for key in keys.tolist()], bool)

    def scan(self, table, chunk_rows):
        """Yields records in the order of the dictionary."""
        keys = np.array(list(self.rows[table]), np.uint64)
        for start in range(0, len(keys), chunk_rows):
            some = keys[start : start + chunk_rows]
            hot = self.frequencies and np.array([self.frequencies[table][key] for key in some.tolist()], np.uint32)
            yield Records(some, self.fetch(table, some)[0], frequency=hot if self.frequencies else None)


def row_of(version, table, key):
    """Returns a row that states its version, table and key; exact in float16."""
    place = KEYS.index(key) if key in KEYS else key
    return np.array([version % 1000, NUMBERS[table], place, 7], np.float32)[: TABLES[table].dim]


def rows_of(version, keys=KEYS[:-3]):
    """Returns a dictionary of rows of all tables."""
    return {table: {key: row_of(version, table, key) for key in keys} for table in TABLES}


def default_of(table):
    """Returns what an absent key reads."""
    return np.full(TABLES[table].dim, TABLES[table].default, np.float32)


def keys_of(*keys):
    """Returns keys in the form of requests."""
    return np.array(keys, np.uint64)


class Oracle:
    """A cache in plain Python."""

    def __init__(self, shares):
        """Takes the number of rows by store, which is given by its tables."""
        self.shares, self.tick = shares, 0
        self.cached = {}  # (table, key) -> [tick, row]
        self.counts = dict.fromkeys(("distinct", "hits", "misses", "missing"), 0)

    def store_of(self, table):
        """Returns the tables that share the table's store."""
        return next(tables for tables in self.shares if table in tables)

    def lookup(self, source_rows, keys, threshold):
        """Returns what each table reads and its hit rate, and updates the cache."""
        self.tick += 1
        values, rates, here, later = {}, {}, [], []
        for table, some in keys.items():
            distinct = {key for key in some if key != PADDING}
            hits = {key for key in distinct if (table, key) in self.cached}
            for key in hits:
                self.cached[table, key][0] = self.tick
            rates[table] = len(hits) / len(distinct) if distinct else 1.0
            waits = rates[table] < threshold
            read = {key: self.cached[table, key][1] for key in hits}
            for key in distinct - hits:
                row = source_rows[table].get(key)
                self.counts["missing"] += row is None
                if row is not None:
                    (here if waits else later).append((table, key, row))
                if row is not None and waits:
                    read[key] = row
            zeros = np.zeros(TABLES[table].dim, np.float32)
            values[table] = [zeros if key == PADDING else read.get(key, default_of(table)) for key in some]
            self.counts["distinct"] += len(distinct)
            self.counts["hits"] += len(hits)
            self.counts["misses"] += len(distinct) - len(hits)
        self.insert(here)
        self.insert(later)
        return values, rates

    def insert(self, rows):
        """Inserts rows in one tick; then the rows of greatest (tick, table, key) stay."""
        self.tick += 1
        for table, key, row in rows:
            self.cached[table, key] = [self.tick, row]
        for tables, share in self.shares.items():
            mine = [(tick, tables.index(t), key) for (t, key), (tick, _) in self.cached.items() if t in tables]
            for _, number, key in sorted(mine)[: max(0, len(mine) - share)]:
                del self.cached[tables[number], key]


class CacheMachine(RuleBasedStateMachine):
    """A state machine of lookups at any threshold, changes of the source, refreshes and swaps."""

    @initialize(min_rows=st.sampled_from([1, 4]), clock=st.sampled_from([0, stores._LAST_TICK - 7]), fill=st.booleans())
    def start(self, min_rows, clock, fill):
        """Makes a cache of few rows, whose clock may be about to overflow."""
        self.rows, self.version = rows_of(0), 0
        self.source = DictSource(self.rows)
        self.cache = DeviceCache(self.source, fraction=1e-9, min_rows=min_rows)
        self.cache.stores._clock = clock
        self.oracle = Oracle({("a", "b"): 2 * min_rows, ("h",): min_rows})
        if fill:
            self.cache.fill()
            for table in TABLES:
                first = list(self.rows[table].items())[:min_rows]
                self.oracle.insert([(table, key, row) for key, row in first])

    def teardown(self):
        """No thread outlives its test."""
        if hasattr(self, "cache"):
            self.cache.close()

    @rule(
        keys=st.dictionaries(
            st.sampled_from(list(TABLES)), st.lists(st.sampled_from([*KEYS, PADDING]), max_size=25), max_size=3
        ),
        threshold=st.sampled_from([0, 0.5, 0.9, 1.0, 1.5]),
        as_tables=st.booleans(),
    )
    def lookup(self, keys, threshold, as_tables):
        """Values, hit rates and versions agree."""
        self.cache.hit_rate_threshold = threshold
        expected, rates = self.oracle.lookup(self.rows, keys, threshold)
        asked = {table: np.array(some, np.uint64) for table, some in keys.items()}
        if as_tables:
            tables, source = self.cache.lookup_tables(asked)
            rows, version = frozen_lookup(tables, asked), source.version
        else:
            found = self.cache.lookup(asked)
            rows, version = found.rows, found.version
            assert found.hit_rates == rates
        self.cache.drain()
        assert version == self.version
        for table, lines in expected.items():
            shape = (len(lines), TABLES[table].dim)
            np.testing.assert_array_equal(np.asarray(rows[table]), np.array(lines, np.float32).reshape(shape))

    @rule(
        table=st.sampled_from(list(TABLES)),
        key=st.sampled_from(KEYS),
        value=st.one_of(st.none(), st.integers(-9, -3)),
        fraction=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def refresh(self, table, key, value, fraction):
        """A row of the database changes, and a later refresh brings it into the cache."""
        if value is None:
            self.rows[table].pop(key, None)
        else:
            self.rows[table][key] = np.full(TABLES[table].dim, value, np.float32)
        self.cache.refresh_fraction = fraction
        cached = self.oracle.cached
        there = {place: line for place, line in cached.items() if place[1] in self.rows[place[0]]}
        assert self.cache.refresh() == len(there)
        self.oracle.cached = {(t, k): [tick, self.rows[t][k]] for (t, k), (tick, _) in there.items()}

    @rule(
        changed=st.one_of(
            st.none(), st.dictionaries(st.sampled_from(list(TABLES)), st.sets(st.sampled_from(KEYS)), max_size=3)
        ),
        gone=st.sets(st.sampled_from(KEYS), max_size=3),
    )
    def swap(self, changed, gone):
        """A newer version comes, in which some rows differ and some are gone."""
        self.version += 1
        rows = {table: dict(some) for table, some in self.rows.items()}
        if changed is None:
            rows, self.oracle.cached = rows_of(self.version), {}
        for table, keys in (changed or {}).items():
            for key in keys:
                rows[table].pop(key, None)
                if key not in gone:
                    rows[table][key] = row_of(self.version, table, key)
                    if (table, key) in self.oracle.cached:
                        self.oracle.cached[table, key][1] = rows[table][key]
                else:
                    self.oracle.cached.pop((table, key), None)
        self.rows, self.source = rows, DictSource(rows, version=self.version)
        keys = changed and {table: np.array(sorted(some), np.uint64) for table, some in changed.items()}
        self.cache.swap(self.source, keys)

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def same_keys(self):
        """Cached keys and counts agree."""
        cached = {(table, key) for table, keys in self.cache.cached_keys().items() for key in keys.tolist()}
        assert cached == set(self.oracle.cached)
        assert sum(self.cache.num_rows.values()) == len(cached)
        stats = dataclasses.asdict(self.cache.stats())
        assert {name: stats[name] for name in self.oracle.counts} == self.oracle.counts


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=max(12, settings().max_examples // 2))


# The rule of the threshold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "num_cached", "waits"),
    [
        (0, 0, False),
        (0.1, 1, False),  # 1 - 9 / 10 is below 0.1 in floating point
        (0.1, 0, True),
        (0.3, 3, False),
        (0.9, 9, False),
        (0.9, 8, True),
        (1.0, 9, True),
        (1.0, 10, False),
        (1.0001, 9, True),
        (7, 0, True),
    ],
)
def test_at_the_threshold_misses_come_in_the_background(threshold, num_cached, waits):
    """At the threshold, the misses among ten keys are fetched in the background."""
    with DeviceCache(DictSource(rows_of(3)), hit_rate_threshold=2) as cache:
        cache.lookup({"a": np.arange(num_cached)})
        cache.hit_rate_threshold = threshold
        found = cache.lookup({"a": np.arange(10)})
        assert found.hit_rates == {"a": num_cached / 10}
        for key, row in enumerate(found.rows["a"]):
            is_there = waits or key < num_cached
            np.testing.assert_array_equal(row, row_of(3, "a", key) if is_there else default_of("a"))
        cache.drain()
        assert cache.num_rows == {"a": 10, "b": 0, "h": 0}
        assert (cache.stats().sync - (num_cached > 0), cache.stats().background) == (
            (waits and num_cached < 10),
            (not waits and num_cached < 10),
        )


def test_each_table_has_its_own_hit_rate():
    """Each table has its own hit rate: one table waits, one does not, and one has no keys."""
    with DeviceCache(DictSource(rows_of(3)), hit_rate_threshold=0.5) as cache:
        cache.lookup({"a": np.arange(4)})
        found = cache.lookup({"a": np.arange(8), "b": np.arange(2), "h": np.zeros((2, 0), np.int64)})
    assert found.hit_rates == {"a": 0.5, "b": 0.0, "h": 1.0}
    np.testing.assert_array_equal(found.rows["a"][4:], [default_of("a")] * 4)
    np.testing.assert_array_equal(found.rows["b"], [row_of(3, "b", key) for key in range(2)])
    assert found.rows["h"].shape == (2, 0, 3)


def test_keys_of_any_shape_and_nothing_at_all():
    """Repeated keys are fetched once, and padding is never fetched; keys may have any shape or be none."""
    source = DictSource(rows_of(3))
    with DeviceCache(source, hit_rate_threshold=2) as cache:
        assert cache.lookup({}).rows == {}
        assert cache.lookup({"a": []}).rows["a"].shape == (0, 4)
        found = cache.lookup({"a": np.array([[[5, -1], [5, 2]]])})
        np.testing.assert_array_equal(found.rows["a"][0, 0], [row_of(3, "a", 5), np.zeros(4)])
        np.testing.assert_array_equal(found.rows["a"][0, 1], [row_of(3, "a", 5), row_of(3, "a", 2)])
        assert [(table, sorted(keys)) for table, keys in source.fetched] == [("a", [2, 5])]
        assert (cache.stats().keys, cache.stats().distinct, cache.stats().lookups) == (3, 2, 3)
        assert cache.lookup({"h": np.int64(3)}).rows["h"].shape == (3,)


def test_keys_of_no_tier_are_asked_again_and_not_cached():
    """Keys that no tier has read the default, are fetched again each time, and are not cached."""
    source = DictSource(rows_of(3))
    with DeviceCache(source, hit_rate_threshold=2) as cache:
        for _ in range(2):
            np.testing.assert_array_equal(cache.lookup({"a": keys_of(999)}).rows["a"], [default_of("a")])
        assert source.fetched == [("a", [999])] * 2
        assert (cache.stats().missing, sum(cache.num_rows.values())) == (2, 0)


@pytest.mark.parametrize("threshold", [0, 2])
def test_more_keys_than_rows(threshold):
    """More keys than rows are all answered, and the cache fills up in the order of replacement."""
    tables = {"t": FrozenTable("t", dim=2, default=-1.0)}
    rows = {"t": {key: np.array([key, 1], np.float32) for key in range(1000)}}
    with DeviceCache(DictSource(rows, tables), fraction=0.1, hit_rate_threshold=threshold) as cache:
        assert cache.capacity == 100
        for first in (900, 800):  # The insertion follows its lookup, so that lookup's hits may leave for it.
            found = cache.lookup({"t": np.arange(1000)[::-1]})
            cache.drain()
            if threshold:
                np.testing.assert_array_equal(found.rows["t"][:, 0], np.arange(1000)[::-1])
            np.testing.assert_array_equal(np.sort(cache.cached_keys()["t"]), np.arange(first, first + 100))
        assert found.hit_rates == {"t": 0.1}


def test_rows_of_a_table_may_take_the_whole_store():
    """One table may take the whole store: tables that share a store share its budget, as those that HPS fuses."""
    with DeviceCache(DictSource(rows_of(3)), fraction=1e-9, min_rows=4, hit_rate_threshold=2) as cache:
        cache.lookup({"a": np.arange(8)})
        assert cache.num_rows == {"a": 8, "b": 0, "h": 0}
        cache.lookup({"b": np.arange(3)})
        assert cache.num_rows == {"a": 5, "b": 3, "h": 0}
        np.testing.assert_array_equal(np.sort(cache.cached_keys()["a"]), np.arange(3, 8))


def test_sizes():
    """The capacity is a fraction of the rows, at least 64 per table; the device bytes follow from it."""
    tables = {name: FrozenTable(name, dim=8) for name in ("s", "t")} | {"q": FrozenTable("q", dim=8, dtype="int8")}
    row = np.ones(8, np.float32)
    rows = {name: dict.fromkeys(range(size), row) for name, size in (("s", 1001), ("t", 3), ("q", 10))}
    with DeviceCache(DictSource(rows, tables), fraction=0.2) as cache:
        assert cache.capacity == 201 + 64 + 64
        estimate = cache_bytes({tables["s"]: 201, tables["t"]: 64, tables["q"]: 64})
        assert 0 <= cache.num_bytes - sum(estimate.values()) < 100


# Rows of 8 bits -----------------------------------------------------------------------------------------------------


def quantized_of(rows, dtype):
    """Returns what rows of a quantized table read: numbers times scale, in float32."""
    least, most = {"int8": (2.0**-126, 127.0), "float8_e4m3fn": (1 / (448.0 * 512.0), 448.0)}[dtype]
    scales = np.maximum(np.abs(rows).max(axis=1) / np.float32(most), np.float32(least)).astype(np.float32)
    ratios = np.clip(rows.astype(np.float64) / scales[:, None], -most, most)
    numbers = (np.rint(ratios) if dtype == "int8" else ratios).astype(jnp.dtype(dtype))
    return numbers.astype(np.float32) * scales[:, None]


@pytest.mark.parametrize("of", ["host", "dict"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_of_8_bits(dtype, of):
    """Rows of 8 bits are cached as stored and read with the bits of a full table; defaults are not rounded."""
    rng, dim, num_rows = np.random.default_rng(3), 12, 500
    tables = {name: FrozenTable(name, dim=dim, default=d, dtype=dtype) for name, d in (("s", 0.1), ("t", -1e-30))}
    rows = {name: rng.normal(size=(num_rows, dim)).astype(np.float32) * 10.0**n for n, name in enumerate(tables)}
    read = {name: quantized_of(mine, dtype) for name, mine in rows.items()}
    keys = np.arange(num_rows, dtype=np.uint64)

    def host():
        records = {name: Records(keys, mine, frequency=keys) for name, mine in rows.items()}
        return HostRows.of([(table, SizedRecords(num_rows, [records[name]])) for name, table in tables.items()])

    source = {
        "host": host,
        "dict": lambda: DictSource({n: dict(enumerate(mine)) for n, mine in rows.items()}, tables),
    }[of]()

    def check(cache, asked, as_tables):
        asked = {name: np.array([*some, PADDING], np.uint64) for name, some in asked.items()}
        got = frozen_lookup(cache.lookup_tables(asked)[0], asked) if as_tables else cache.lookup(asked).rows
        for name, some in asked.items():
            defaults = np.full((len(some), dim), tables[name].default, np.float32)
            wanted = np.where((some < num_rows)[:, None], read[name][np.minimum(some, num_rows - 1)], defaults)
            wanted[-1] = 0
            assert np.asarray(got[name]).tobytes() == wanted.tobytes()

    with DeviceCache(source, fraction=0.2, min_rows=1, hit_rate_threshold=2) as cache:
        sizes = cache_bytes({table: 100 for table in tables.values()})
        assert sizes["rows"] == 200 * (dim + 4) and 0 <= cache.num_bytes - sum(sizes.values()) < 100
        cache.fill()
        assert sum(cache.num_rows.values()) == 200
        if of == "host":
            assert set(cache.cached_keys()["s"].tolist()) == set(range(400, 500))
        for step in range(12):
            asked = {name: rng.integers(0, 600, 40) for name in ("s", "t")[: 1 + step % 3]}
            check(cache, asked, as_tables=step % 2)
        assert cache.stats().misses > cache.stats().missing and cache.stats().hits > 0
        cache.refresh()
        check(cache, {"s": np.arange(50, 90), "t": np.arange(3)}, as_tables=False)
        if of == "host":
            read["s"][7] = quantized_of(np.full((1, dim), 3.3, np.float32), dtype)
            rows["s"][7] = 3.3
            newer = host()
            check(cache, {"s": [8], "t": [7]}, as_tables=False)
            cache.swap(newer, {"s": keys[7:8]})
            for as_tables in (False, True):
                check(cache, {"s": [7, 8]}, as_tables)


# Filling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [4, 7, 1000])
def test_filled_with_the_hottest(chunk_rows, monkeypatch):
    """A fill gives each table its share, and the hottest rows leave last."""
    monkeypatch.setattr(device_cache, "ROWS_AT_A_TIME", chunk_rows)
    hot = {table: {key: (key * 7 + number) % 10 for key in KEYS[:-3]} for number, table in enumerate(TABLES)}
    with DeviceCache(DictSource(rows_of(3), frequencies=hot), fraction=0.3, min_rows=1) as cache:
        assert cache.fill() == 18 == sum(cache.num_rows.values())
        cached = cache.cached_keys()
        for table, frequencies in hot.items():
            assert set(cached[table].tolist()) == set(sorted(frequencies, key=lambda key: -frequencies[key])[:6])
        found = cache.lookup({table: keys for table, keys in cached.items()})
        assert set(found.hit_rates.values()) == {1.0}
        np.testing.assert_array_equal(found.rows["b"], [row_of(3, "b", key) for key in cached["b"].tolist()])


def test_filled_in_the_order_of_the_file():
    """Without frequencies, rows fill the cache in file order, and no more are read than are cached."""
    source = DictSource(rows_of(3))
    with DeviceCache(source, fraction=0.25, min_rows=1) as cache:
        assert cache.fill() == 15
        assert {table: sorted(keys.tolist()) for table, keys in cache.cached_keys().items()} == {
            table: list(range(5)) for table in TABLES
        }


# Threads ------------------------------------------------------------------------------------------------------------


def test_a_lookup_does_not_wait_for_the_background():
    """During a slow fetch the cache answers; work that does not fit the queue is dropped and misses again."""
    source, go, is_in = DictSource(rows_of(3)), threading.Event(), threading.Event()
    source.before_fetch = lambda *_: (is_in.set(), go.wait(30))
    with DeviceCache(source, hit_rate_threshold=0, max_pending=1) as cache:
        cache.lookup({"a": keys_of(1)})
        assert is_in.wait(30)
        cache.lookup({"a": keys_of(2)})  # It waits in the queue.
        cache.lookup({"a": keys_of(3)})  # It does not fit.
        assert (cache.stats().background, cache.stats().dropped) == (3, 1)
        go.set()
        cache.drain()
        assert sorted(cache.cached_keys()["a"].tolist()) == [1, 2]


def test_many_lookups_wait_for_the_background():
    """More lookups than `ready.MOST_WAITING` wait for the background, and none is dropped."""
    source, go, is_in = DictSource(rows_of(3, range(301))), threading.Event(), threading.Event()
    source.before_fetch = lambda *_: (is_in.set(), go.wait(30))
    with DeviceCache(source, fraction=1.0, hit_rate_threshold=0, max_pending=300) as cache:
        cache.lookup({"a": keys_of(0)})
        assert is_in.wait(30)
        for key in range(1, 301):
            cache.lookup({"a": keys_of(key)})
        assert (cache.stats().background, cache.stats().dropped) == (301, 0)
        go.set()
        cache.drain()
        assert sorted(cache.cached_keys()["a"].tolist()) == list(range(301))
        assert len(source.fetched) == 2  # The first fetch, and all that waited.


def test_close_drains():
    """`close` finishes pending fetches; later calls are refused."""
    source = DictSource(rows_of(3))
    source.before_fetch = lambda *_: time.sleep(0.05)
    cache = DeviceCache(source, hit_rate_threshold=0)
    for key in range(5):
        cache.lookup({"a": keys_of(key)})
    cache.close()
    cache.close()
    assert sorted(key for _, keys in source.fetched for key in keys) == [0, 1, 2, 3, 4]
    with pytest.raises(ServingError, match="after close"):
        cache.lookup({"a": keys_of(1)})
    assert (cache.num_rows, cache.num_bytes) == ({"a": 0, "b": 0, "h": 0}, 0)


def test_closing_waits_for_fetches_as_long_as_it_may():
    source, goes_on = DictSource(rows_of(3)), threading.Event()
    cache = DeviceCache(source, hit_rate_threshold=0)
    source.before_fetch = lambda *_: goes_on.wait(60)
    cache.lookup({"a": keys_of(1)})
    begun = time.monotonic()
    assert not cache.close(0.1) and time.monotonic() - begun < 30
    goes_on.set()
    assert cache.close(60)


def _changing_rows(num_versions, rng):
    """Returns rows of each version, and which keys changed."""
    versions, changes = [rows_of(1000)], [None]
    for version in range(1, num_versions):
        changed = {table: rng.choice(20, 8, replace=False) for table in TABLES}
        rows = {table: dict(some) for table, some in versions[-1].items()}
        for table, keys in changed.items():
            for key in keys.tolist():
                rows[table].pop(key, None)
                if rng.random() < 0.8:
                    rows[table][key] = row_of(version, table, key)
        versions.append(rows)
        changes.append(changed)
    return versions, changes


def _expect(rows, table, keys):
    return np.array([rows[table].get(key, default_of(table)) for key in keys.tolist()], np.float32)


def _looking_up(cache, versions, stop, errors, seed, num_answers):
    rng = np.random.default_rng(seed)
    try:
        while not stop.is_set() or num_answers[seed] == 0:
            keys = {table: rng.integers(0, 20, 12) for table in TABLES if rng.random() < 0.8}
            is_exact = cache.hit_rate_threshold > 1
            if seed % 2:
                found = cache.lookup(keys)
                answer, version = found.rows, found.version
            else:
                tables, source = cache.lookup_tables(keys)
                answer, version = frozen_lookup(tables, keys) if keys else {}, source.version
            for table, some in keys.items():
                rows, wanted = np.asarray(answer[table]), _expect(versions[version], table, some)
                is_right = (rows == wanted).all(axis=1)
                if not is_exact:
                    is_right |= (rows == default_of(table)).all(axis=1)
                assert is_right.all(), (version, table, some, rows, wanted)
            num_answers[seed] += 1
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize(("kind", "threshold"), [("dict", 2), ("host", 0)])
def test_no_answer_mixes_versions(threshold, kind):
    """Eight threads look up while versions change: each answer is wholly of the version that it states."""
    versions, changes = _changing_rows(12, np.random.default_rng(5))

    def source(version):
        rows = versions[version]
        if kind == "dict":
            return DictSource(rows, version=version)
        return HostRows.of(
            [(TABLES[name], _records(TABLES[name], mine)) for name, mine in rows.items()], version=version
        )

    stop, errors, num_answers = threading.Event(), [], [0] * 8
    with DeviceCache(source(0), fraction=0.5, min_rows=4, hit_rate_threshold=threshold) as cache:
        threads = [
            threading.Thread(target=_looking_up, args=(cache, versions, stop, errors, seed, num_answers))
            for seed in range(8)
        ]
        for thread in threads:
            thread.start()
        for version in range(1, len(versions)):
            target = sum(num_answers) + 8
            wait_until(lambda target=target: errors or sum(num_answers) >= target)
            cache.swap(source(version), changes[version] if version % 5 else None)
            if version % 4 == 0:
                cache.refresh()
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not errors, errors[0]
        assert min(num_answers) > 0 and not any(thread.is_alive() for thread in threads)
        cache.hit_rate_threshold = 2
        keys = np.arange(20)
        for table in TABLES:
            expected = _expect(versions[-1], table, keys)
            np.testing.assert_array_equal(cache.lookup({table: keys}).rows[table], expected)
        assert cache.stats().swaps == len(versions) - 1


def _records(table, rows):
    keys = np.array(list(rows), np.uint64)
    lines = np.array(list(rows.values()), np.float32).reshape(len(rows), table.dim)
    return SizedRecords(len(rows), [Records(keys, lines)])


def test_an_insertion_of_an_old_version_is_left_out():
    """A row that was fetched before a swap is not inserted after it."""
    old, new = DictSource(rows_of(1)), DictSource(rows_of(2), version=2)
    with DeviceCache(old, hit_rate_threshold=2) as cache:
        old.before_fetch = lambda *_: cache.swap(new, {"a": keys_of(5)})
        found = cache.lookup({"a": keys_of(5, 6)})
        np.testing.assert_array_equal(found.rows["a"], [row_of(1, "a", 5), row_of(1, "a", 6)])
        assert (found.version, cache.source.version, cache.num_rows["a"]) == (0, 2, 0)
        np.testing.assert_array_equal(cache.lookup({"a": keys_of(5)}).rows["a"], [row_of(2, "a", 5)])


@pytest.mark.parametrize("threshold", [0, 2], ids=["background", "waits"])
def test_a_row_that_was_fetched_before_a_refresh_is_left_out(threshold):
    """It may be older than what the refresh has read."""
    source = DictSource(rows_of(1))
    with DeviceCache(source, hit_rate_threshold=threshold) as cache:

        def change(*_):
            source.before_fetch = None
            fetched, source.rows = source.rows, rows_of(2)
            cache.refresh()
            source.rows, source.later = fetched, source.rows  # what this fetch reads is what was there before

        source.before_fetch = change
        cache.lookup({"a": keys_of(5)})
        cache.drain()
        source.rows = source.later
        for _ in range(2):
            cache.lookup({"a": keys_of(5)})
            cache.drain()
        np.testing.assert_array_equal(cache.lookup({"a": keys_of(5)}).rows["a"], [row_of(2, "a", 5)])


class Failing:
    """A program that fails once, as where the device has no memory for it."""

    def __init__(self, program, number):
        self.program, self.lower, self.number = program, program.lower, number

    def __call__(self, *arguments):
        self.number -= 1
        if self.number == 0:
            raise RuntimeError("no memory")
        return self.program(*arguments)


@pytest.mark.parametrize(
    "name, number", [("insert", 1), ("insert", 2), ("drop", 1), ("overwrite", 1), ("overwrite", 2)]
)
def test_a_program_that_fails_leaves_a_cache_that_answers(monkeypatch, name, number):
    """Programs before it have donated arrays; no row of a source that did not come is left."""
    old, new = DictSource(rows_of(1)), DictSource(rows_of(2), version=2)
    del new.rows["a"][7]
    keys = {"a": keys_of(5, 6, 7), "h": keys_of(5)}
    with DeviceCache(old, hit_rate_threshold=2) as cache:
        if name != "insert":
            cache.lookup(keys)
        monkeypatch.setattr(programs, name, Failing(getattr(programs, name), number))
        with pytest.raises(RuntimeError, match="no memory"):
            if name == "insert":
                cache.lookup(keys)
            else:
                cache.swap(new, keys)
        for source in (old, new):
            if source is new:
                cache.swap(new, keys)
            for _ in range(2):
                for table, found in cache.lookup(keys).rows.items():
                    wanted = [source.rows[table].get(key, default_of(table)) for key in keys[table].tolist()]
                    np.testing.assert_array_equal(found, wanted)


def test_a_row_that_comes_while_a_swap_prepares_leaves_again():
    """A row that was inserted while a swap prepared, before the swap held the lock, leaves again."""
    old, new = DictSource(rows_of(1)), DictSource(rows_of(2), version=2)
    with DeviceCache(old, hit_rate_threshold=2) as cache:
        cache.lookup({"a": keys_of(5)})
        new.before_fetch = lambda *_: cache.lookup({"a": keys_of(6, 7)})
        cache.swap(new, {"a": keys_of(5, 6)})
        new.before_fetch = None
        assert sorted(cache.cached_keys()["a"].tolist()) == [5, 7]
        np.testing.assert_array_equal(
            cache.lookup({"a": keys_of(5, 6, 7)}).rows["a"], [row_of(2, "a", 5), row_of(2, "a", 6), row_of(1, "a", 7)]
        )


@pytest.mark.parametrize("are_gone", [False, True])
def test_a_swap_of_whole_tables_takes_memory_for_what_is_cached(monkeypatch, are_gone):
    """A swap uploads only those changed rows that are cached, and removes all absent keys of a store at once."""
    tables = {name: FrozenTable(name, dim=4) for name in ("s", "t")}
    keys = np.arange(20_000)
    rows = {name: {key: np.full(4, key, np.float32) for key in keys.tolist()} for name in tables}
    new = {name: {} if are_gone else {key: -row for key, row in some.items()} for name, some in rows.items()}
    monkeypatch.setattr(device_cache, "ROWS_AT_A_TIME", 1 << 12)
    with DeviceCache(DictSource(rows, tables), fraction=0.05, hit_rate_threshold=2) as cache:
        cached = {name: keys[::20] + number for number, name in enumerate(tables)}
        cache.lookup(cached)
        put, real, dropped = [], cache.stores.put, []
        monkeypatch.setattr(cache.stores, "put", lambda tree: real((put.append(tree), tree)[1]))
        drop = programs.drop
        monkeypatch.setattr(programs, "drop", lambda *operands: (dropped.append(operands), drop(*operands))[1])
        cache.swap(DictSource(new, tables, version=1), dict.fromkeys(tables, keys))
        lines = [leaf for leaf in jax.tree.leaves(put) if leaf.dtype == np.float32]
        assert sum(map(len, lines)) <= (0 if are_gone else 2 * cache.capacity) and len(dropped) == are_gone
        stats = cache.stats()
        assert (stats.refreshed, stats.removed) == ((0, 2000) if are_gone else (2000, 0))
        assert sum(cache.num_rows.values()) == (0 if are_gone else 2000)
        found = cache.lookup(cached).rows
        for name, some in cached.items():
            np.testing.assert_array_equal(found[name][:, 0], np.zeros(1000) if are_gone else -some.astype(np.float32))


def test_what_a_swap_is_about_is_not_cached_meanwhile():
    """Insertions that a swap overtakes omit the swap's keys; after a failed swap the keys are inserted again."""
    old, new = DictSource(rows_of(1)), DictSource(rows_of(2), version=2)
    with DeviceCache(old, hit_rate_threshold=2) as cache:
        cache.lookup({"a": keys_of(5)})

        def fail(*_):
            found = cache.lookup({"a": keys_of(6, 7), "h": keys_of(6)})
            np.testing.assert_array_equal(found.rows["a"], [row_of(1, "a", 6), row_of(1, "a", 7)])
            raise OSError("the database is away")

        new.before_fetch = fail
        with pytest.raises(OSError, match="is away"):
            cache.swap(new, {"a": keys_of(5, 6, 8)})
        assert {table: sorted(keys.tolist()) for table, keys in cache.cached_keys().items()} == {
            "a": [5, 7],
            "b": [],
            "h": [6],
        }
        cache.lookup({"a": keys_of(6)})
        assert sorted(cache.cached_keys()["a"].tolist()) == [5, 6, 7]
        np.testing.assert_array_equal(
            cache.lookup({"a": keys_of(5, 6)}).rows["a"], [row_of(1, "a", 5), row_of(1, "a", 6)]
        )


# What fails ---------------------------------------------------------------------------------------------------------


def test_a_source_that_fails(caplog):
    """A lookup that waits raises the source's error; one that does not wait is answered, and the failure counts."""
    source = DictSource(rows_of(3))

    def fail(*_):
        raise OSError("the database is away")

    with DeviceCache(source, hit_rate_threshold=2) as cache:
        cache.lookup({"a": keys_of(1)})
        source.before_fetch = fail
        with pytest.raises(OSError, match="is away"):
            cache.lookup({"a": keys_of(1, 2)})
        with pytest.raises(OSError, match="is away"):
            cache.refresh()
        with pytest.raises(OSError, match="is away"):
            cache.swap(source, {"a": keys_of(1)})
        cache.hit_rate_threshold = 0
        found = cache.lookup({"a": keys_of(1, 2)})
        np.testing.assert_array_equal(found.rows["a"], [row_of(3, "a", 1), default_of("a")])
        cache.drain()
        assert cache.stats().failed == 1 and "is away" in caplog.text
        source.before_fetch = None
        cache.lookup({"a": keys_of(1, 2)})
        cache.drain()
        np.testing.assert_array_equal(cache.lookup({"a": keys_of(2)}).rows["a"], [row_of(3, "a", 2)])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("found", "got"),
    [
        ((np.zeros((1, 9), np.float32), np.ones(1, bool)), r"float32\[1, 9\], bool\[1\]"),
        ((np.zeros(4, np.float32), np.ones(1, bool)), r"float32\[4\], bool\[1\]"),
        ((np.zeros((0, 4), np.float32), np.ones(1, bool)), r"float32\[0, 4\], bool\[1\]"),
        ((np.zeros((1, 4)), np.ones(1, bool)), r"float64\[1, 4\], bool\[1\]"),
        (([[0.0] * 4], [True]), r"list, bool\[1\]"),
        (None, "NoneType"),
    ],
)
def test_a_source_that_gives_something_else(monkeypatch, dtype, found, got):
    """A source whose result has another form gets an error that states both forms."""
    source = DictSource({"a": {1: np.zeros(4, np.float32)}}, {"a": FrozenTable("a", dim=4, dtype=dtype)})
    monkeypatch.setattr(source, "fetch", lambda table, keys: found)
    wanted = rf'table "a": got {got} of DictSource.fetch, wanted float32\[1, 4\], bool\[1\]\.'
    with DeviceCache(source, hit_rate_threshold=2) as cache, pytest.raises(RuntimeError, match=wanted):
        cache.lookup({"a": keys_of(1)})


def test_a_source_whose_scan_gives_rows_of_another_width(monkeypatch):
    """A fill with them is refused before it reaches the cache, which goes on answering."""
    source = DictSource(rows_of(3))
    with DeviceCache(source, fraction=0.5, min_rows=1) as cache:
        num_rows = cache.fill()
        wide = [Records(np.array(KEYS, np.uint64), np.zeros((len(KEYS), 99), np.float32))]
        with monkeypatch.context() as patched:
            patched.setattr(source, "scan", lambda name, chunk_rows: iter(wide))
            with pytest.raises(ValueError, match=r'DictSource.scan: table ".": rows: got shape \[\d+, 99\], wanted'):
                cache.fill()
        assert cache.fill() == num_rows == sum(map(len, cache.cached_keys().values()))
        np.testing.assert_array_equal(cache.lookup({"b": [7]}).rows["b"], [row_of(3, "b", 7)])


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"z": [1]}, UnknownTableError, "got 'z', wanted one of"),
        ([1], RequestError, "keys: got list, wanted a mapping"),
        ({"a": [1.5]}, RequestError, 'table "a".*integers, got float64'),
        ({"a": [True]}, RequestError, "integers, got bool"),
    ],
)
def test_bad_requests(keys, error, message):
    """Bad requests are refused before anything is looked up."""
    with DeviceCache(DictSource(rows_of(3))) as cache:
        with pytest.raises(error, match=message):
            cache.lookup(keys)
        assert cache.stats().lookups == 0


def test_bad_arguments():
    """Bad arguments are named, with what is wanted."""
    source = DictSource(rows_of(3))
    for name, value in (
        ("fraction", 0),
        ("fraction", float("nan")),
        ("hit_rate_threshold", -1),
        ("refresh_fraction", 1.5),
        ("max_pending", 0),
        ("min_rows", True),
    ):
        with pytest.raises(ValueError, match=f"DeviceCache: {name}: got"):
            DeviceCache(source, **{name: value})
    with DeviceCache(source) as cache:
        other = DictSource(rows_of(3), {**TABLES, "a": FrozenTable("a", dim=4, default=7.0)})
        with pytest.raises(ValueError, match="swap: source: got tables"):
            cache.swap(other, None)
        with pytest.raises(UnknownTableError, match="swap: table: got 'z'"):
            cache.swap(DictSource(rows_of(4), version=4), {"z": keys_of(1)})
        with pytest.raises(TypeError, match="integers"):
            cache.swap(DictSource(rows_of(4), version=4), {"a": np.array([0.5])})
        assert cache.source.version == 0


def test_keys_that_find_no_place_get_another_salt(monkeypatch):
    """Distinct keys of one lookup that find no place in the index get another salt."""
    real, salts = programs.query, []

    def unlucky(*arguments):
        statistics, out = real(*arguments)
        salts.append(tuple(np.asarray(arguments[-1]).tolist()))
        counts = out.counts.at[0, 2].set(jnp.int32(len(salts) % 3))
        return statistics, dataclasses.replace(out, counts=counts)

    with DeviceCache(DictSource(rows_of(3)), hit_rate_threshold=2) as cache:
        monkeypatch.setattr(programs, "query", unlucky)
        np.testing.assert_array_equal(cache.lookup({"a": keys_of(4)}).rows["a"], [row_of(3, "a", 4)])
        assert len(set(salts)) == 3
        monkeypatch.setattr(
            programs,
            "query",
            lambda *arguments: (
                (out := real(*arguments))[0],
                dataclasses.replace(out[1], counts=out[1].counts.at[0, 2].set(jnp.int32(1))),
            ),
        )
        with pytest.raises(ServingError, match="find no place"):
            cache.lookup({"a": keys_of(4)})


class BrokenRows(DictSource):
    """A source whose int8 table has a NaN in key 3, or another number without a scale."""

    broken = np.nan

    def fetch(self, table, keys):
        """Returns rows as stored."""
        rows, is_found = super().fetch(table, keys)
        if table == "q":
            rows[keys == 3, 1] = self.broken
        return rows, is_found


def _over_broken_rows(threshold):
    tables = {"a": FrozenTable("a", dim=4), "q": FrozenTable("q", dim=2, default=-1.0, dtype="int8")}
    rows = {name: {key: np.full(t.dim, key, np.float32) for key in range(20)} for name, t in tables.items()}
    return DeviceCache(BrokenRows(rows, tables), fraction=1e-9, min_rows=64, hit_rate_threshold=threshold)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_row_that_cannot_be_quantized_is_not_found(broken, caplog):
    """Only a row that cannot be quantized is missing; the log names its key once."""
    asked = {"a": np.arange(6), "q": np.arange(6)}
    with _over_broken_rows(2) as cache:
        cache.source.broken = broken
        for _ in range(3):
            found = cache.lookup(asked)
            assert found.rows["a"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
            np.testing.assert_allclose(found.rows["q"][:, 1], [0, 1, 2, -1, 4, 5], rtol=1e-6)
        assert cache.cached_keys()["q"].tolist().count(3) == 0 and cache.stats().missing == 3
    assert [record.getMessage() for record in caplog.records if "quantized" in record.getMessage()] == [
        'BrokenRows.fetch: table "q": got 1 rows that are not finite, the first of key 3, wanted numbers to be '
        "quantized; they count as not found. Not logged again for 60 s."
    ]


def test_a_row_that_breaks_later_leaves_the_cache():
    """A row that becomes unquantizable leaves the cache; refreshes and background fetches continue."""
    with _over_broken_rows(0) as cache:
        cache.source.broken = 3.0
        cache.lookup({"q": np.arange(6), "a": np.arange(3)})
        cache.drain()
        cache.source.broken = np.nan
        assert cache.refresh() == 8
        assert sorted(cache.cached_keys()["q"].tolist()) == [0, 1, 2, 4, 5]
        cache.lookup({"q": np.arange(3, 9), "a": np.arange(9)})
        cache.drain()
        assert sorted(cache.cached_keys()["q"].tolist()) == [0, 1, 2, 4, 5, 6, 7, 8]
        assert len(cache.cached_keys()["a"]) == 9 and cache.stats().failed == 0


# Programs -----------------------------------------------------------------------------------------------------------


class Compilations:
    """A record of JAX's compilations, and of whether a cache's lock was held then."""

    def __init__(self):
        """Listens until the process ends, and records while it is enabled."""
        self.cache, self.is_held = None, []
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event, seconds, **_):
        if self.cache is not None and "backend_compile" in event:
            self.is_held.append(self.cache.stores.lock.locked())

    @contextlib.contextmanager
    def of(self, cache):
        """Yields a list to which each compilation adds an entry."""
        self.cache, self.is_held = cache, []
        try:
            yield self.is_held
        finally:
            self.cache = None


COMPILATIONS = Compilations()


def _odd_cache(capacity):
    """Returns a cache of a capacity that no other test has, so none of its programs is compiled."""
    tables = {name: FrozenTable(name, dim=dim) for name, dim in (("s", 4), ("t", 2))}
    rows = {n: {key: np.full(t.dim, key, np.float32) for key in range(2000)} for n, t in tables.items()}
    return DeviceCache(DictSource(rows, tables), fraction=1e-9, min_rows=capacity, hit_rate_threshold=2)


def test_nobody_waits_for_the_compiler():
    """Programs are compiled without the lock, so lookups of other threads that need none continue."""
    with _odd_cache(611) as cache, COMPILATIONS.of(cache) as is_held:
        cache.lookup({"s": np.arange(300)})
        cache.lookup_tables({"s": np.arange(600), "t": np.arange(600)})
        cache.lookup({"s": np.arange(600, 900)})
        assert cache.num_rows == {"s": 611, "t": 600}
        cache.refresh()
        newer = DictSource({"s": {700: np.zeros(4, np.float32)}, "t": {}}, cache.source.tables, version=1)
        cache.swap(newer, {"s": np.arange(1000)})
        cache.swap(newer, None)
        assert len(is_held) > 10 and not any(is_held)


def test_warm_up_compiles_all_that_lookups_need():
    """A warm-up compiles the programs of all hits and misses, and leaves the counts alone."""
    with _odd_cache(613) as cache:
        with COMPILATIONS.of(cache) as compiled:
            cache.warm_up([{"s": 300, "t": 300}, {"s": 1000, "t": 1000}, {}])
            assert compiled
        assert cache.stats() == cache_module.CacheStats() and sum(cache.num_rows.values()) == 0
        with COMPILATIONS.of(cache) as compiled:
            for keys in (np.arange(300), np.arange(290), np.arange(1000), np.arange(400, 1000), np.arange(999)):
                found = cache.lookup({"s": keys, "t": keys[::-1]})
                np.testing.assert_array_equal(found.rows["t"][:, 1], keys[::-1])
            assert not compiled
        assert cache.num_rows == {"s": 613, "t": 613}
        with pytest.raises(UnknownTableError, match="warm_up: table: got 'z'"):
            cache.warm_up([{"s": 5000}, {"z": 1}])


def test_few_keys_are_not_padded_to_many():
    """Keys are padded to at most four times their number, unless they are few; otherwise a program is compiled."""
    with _odd_cache(617) as cache:
        cache.warm_up([{"s": 2**15, "t": 2**15}])
        assert cache.stores.compiled.choose_sizes((256, 256)) == (256, 256)
        assert cache.stores.compiled.choose_sizes((2**13, 2**12)) == (2**13, 2**12)
        with COMPILATIONS.of(cache) as compiled:
            np.testing.assert_array_equal(cache.lookup({"s": np.arange(5)}).rows["s"][:, 0], np.arange(5))
        assert compiled and cache.stores.compiled.query_sizes == {(2**15, 2**15), (256, 256)}
        assert cache.stores.compiled.choose_sizes((2**13, 2**13)) == (2**15, 2**15)
        cache.drain()
        assert (2**13, 2**13) in cache.stores.compiled.query_sizes
        cache.warm_up([{"s": 2**10, "t": 2**10}])
        assert cache.stores.compiled.choose_sizes((256, 512)) == (1024, 1024)


def test_lookups_of_many_sizes_get_programs_of_their_own(monkeypatch):
    """Lookups of many sizes each get a program: only those in the queue are bounded."""
    monkeypatch.setattr(ready_lib, "MOST_WAITING", 2)
    with _odd_cache(619) as cache:
        cache.warm_up([{"s": 1024, "t": 1024}])
        for sizes in ((256, 1024), (1024, 256), (512, 512), (512, 1024)):
            assert cache.stores.compiled.choose_sizes(sizes) != sizes
            cache.drain()
            assert cache.stores.compiled.choose_sizes(sizes) == sizes


# On the device ------------------------------------------------------------------------------------------------------


def test_nothing_of_the_size_of_the_cache_is_copied():
    """Lookups, insertions, refreshes and swaps copy no array of the size of the cache."""
    with DeviceCache(DictSource(rows_of(3)), fraction=1e-9, min_rows=4, hit_rate_threshold=2) as cache:

        def addresses():
            large = [(s.index, s.rows, s.records, s.statistics) for s in cache.stores.arrays]
            return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(large)]

        before = addresses()
        for start in range(6):
            cache.lookup({table: np.arange(start, start + 5) for table in TABLES})
        cache.refresh()
        cache.swap(DictSource(rows_of(4), version=4), {"a": np.arange(20)})
        cache.swap(DictSource(rows_of(5), version=5), None)
        assert addresses() == before
        assert cache.stats().misses > cache.capacity and cache.stats().refreshed > 0


@pytest.mark.slow
def test_many_tables_over_the_host():
    """A cache of a hundred tables, of several dims and dtypes, over rows in host memory answers exactly."""
    rng = np.random.default_rng(3)
    dtypes = ["float32", "bfloat16", "int8", "float16"]
    tables = [FrozenTable(f"t{i}", dim=(4, 8, 16)[i % 3], default=float(i), dtype=dtypes[i % 4]) for i in range(100)]
    rows = {table.name: rng.normal(size=(1000, table.dim)).astype(np.float32) for table in tables}
    keys = np.arange(1000, dtype=np.uint64)
    source = HostRows.of([(t, SizedRecords(1000, [Records(keys, rows[t.name])])) for t in tables])
    with DeviceCache(source, hit_rate_threshold=2) as cache:
        for _ in range(20):
            asked = {f"t{i}": rng.zipf(1.3, 200) % 1100 for i in rng.choice(100, 60, replace=False)}
            found = cache.lookup(asked)
            for name, some in asked.items():
                exact, is_there = source.fetch(name, some.astype(np.uint64))
                exact = np.where(is_there[:, None], exact, np.float32(int(name[1:])))
                np.testing.assert_array_equal(found.rows[name], exact)
                real = rows[name][np.minimum(some, 999)]
                near = np.abs(np.where(is_there[:, None], found.rows[name] - real, 0))
                assert near.max() <= 0.01 * np.abs(real).max() + 1e-6

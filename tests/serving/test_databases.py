"""Tests rows in Redis and RocksDB alike, against a dict, and rows in both databases at once."""

import contextlib
import importlib
import itertools
import logging
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from database_cases import DIMS, ITEM, USER, Tiers, check, redis_at, rocks_at, rows_for, u64
from redis_servers import Server, running
from serving_cases import PADDING
from waiting import wait_until

from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.errors import DatabaseError, ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable


@pytest.fixture(params=["server", "cluster", "rocks"])
def database(request, tmp_path):
    """Yields an empty database, which takes few keys at a time."""
    if request.param == "rocks":
        made = rocks_at(tmp_path / "rocks", max_batch_size=17)  # Each batch waits for the disk.
    else:
        place = request.getfixturevalue(request.param)
        for server in getattr(place, "servers", [place]):
            server.client.flushall()
        made = redis_at(place.address, max_batch_size=7)
    with contextlib.closing(made):
        yield made


# Against a dict ------------------------------------------------------------------------------------------------------


def test_any_reads_and_writes(database):
    """Reads and writes agree with a dict: tables do not see each other's rows, and batches are split."""

    numbers = itertools.count()

    @hypothesis.settings(max_examples=10 if database.max_batch_size == 7 else 3)
    @hypothesis.given(st.data())
    def run(data):
        rows = DatabaseRows([database], f"model-{next(numbers)}", [USER, ITEM])  # each run has its own tables
        content = {"user": {}, "item": {}}
        some = st.lists(st.integers(0, 40) | st.sampled_from([2**63, 2**64 - 2]), max_size=30, unique=True)
        for version in range(4):
            table = data.draw(st.sampled_from(["user", "item"]))
            keys, gone = data.draw(some), data.draw(some)
            rows.insert(table, np.array(keys, np.uint64), rows_for(keys, DIMS[table], version).reshape(-1, DIMS[table]))
            content[table] |= dict(zip(keys, rows_for(keys, DIMS[table], version), strict=True))
            rows.erase(table, np.array([*gone, PADDING], np.uint64))
            content[table] = {key: row for key, row in content[table].items() if key not in gone}
            asked = data.draw(st.lists(st.sampled_from([*keys, *gone, 41, PADDING]), max_size=40))
            check(rows, table, asked, content[table])
        for table, mine in content.items():
            check(rows, table, list(mine), mine)
            scanned = list(rows.scan(table, 5))
            assert all(chunk.num_rows <= 5 for chunk in scanned)
            found = {key: row for chunk in scanned for key, row in zip(chunk.keys.tolist(), chunk.rows, strict=True)}
            assert found.keys() == mine.keys() and sum(chunk.num_rows for chunk in scanned) == len(mine)
            assert all((found[key] == mine[key]).all() for key in mine)
            assert sorted(key for chunk in rows.keys(table) for key in chunk.tolist()) == sorted(mine)
            assert rows.num_rows(table) >= len(mine)

    run()


def test_what_is_refused(database):
    rows = DatabaseRows([database], "dlrm", [USER, ITEM])
    rows.insert("user", u64(7), rows_for([7], 4))
    for keys, given in ((u64(1, 2), np.zeros((1, 4))), (u64(1), np.zeros((1, 3))), (u64(PADDING), np.zeros((1, 4)))):
        with pytest.raises(ServingError, match=r'^insert: table "user": keys, rows: got rows \[1, \d\] and'):
            rows.insert("user", keys, given.astype(np.float32))
    check(rows, "user", [1, 2, 7], {7: rows_for([7], 4)[0]})
    for op in (lambda: rows.fetch("ad", u64(1)), lambda: rows.num_rows("ad"), lambda: rows.erase("ad", u64(1))):
        with pytest.raises(UnknownTableError, match=r"got 'ad', wanted one of \['item', 'user'\]"):
            op()
    narrow = DatabaseRows([database], "dlrm", [USER], key_bits=32)
    with pytest.raises(
        DatabaseError, match=r'^keys: supportlonglong: got keys of \[8\] bytes in "hps_et.dlrm.user", .* 4'
    ):
        list(narrow.keys("user"))
    other = DatabaseRows([database], "dlrm", [FrozenTable("user", dim=5)])
    with pytest.raises(DatabaseError, match=r'^fetch: dim: got rows of \[16\] bytes in "hps_et.dlrm.user", .* 20'):
        other.fetch("user", u64(1, 7))
    for model, table in (("a.b", "user"), ("dlrm", "us{er"), ("", "user"), ("dlrm", "x" * 121)):
        with pytest.raises(ServingError, match="wanted a name of 1 to 120 letters"):
            DatabaseRows([database], model, [FrozenTable(table, dim=4)])


# Tiers ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiers(redis, tmp_path):
    with contextlib.closing(rocks_at(tmp_path / "rocks")) as persistent:
        yield Tiers(redis(), persistent)


def test_the_volatile_database_is_asked_first_and_rows_are_lifted(tiers):
    content = {key: rows_for([key], 4)[0] for key in range(6)}
    tiers.persistent.insert("user", np.arange(6, dtype=np.uint64), rows_for(range(6), 4))
    tiers.volatile.insert("user", u64(0), rows_for([0], 4, version=1))
    check(tiers.both, "user", [0, 1, 2, 2, 9, PADDING], {**content, 0: rows_for([0], 4, version=1)[0]})
    tiers.background.drain()
    check(tiers.volatile, "user", [1, 2, 3, 9], {key: content[key] for key in (1, 2)})  # The default is left out.
    assert tiers.both.num_rows("user") == 6 and sum(chunk.num_rows for chunk in tiers.both.scan("user", 4)) == 6


def test_a_table_that_is_written_whole_leaves_nothing_in_either_database(tiers):
    """After an update that failed the two may have other keys."""
    tiers.volatile.insert("user", u64(0, 1, 4, 7), rows_for([0, 1, 4, 7], 4))
    tiers.persistent.insert("user", u64(4, 5, 7), rows_for([4, 5, 7], 4))
    assert tiers.both.keep_only("user", u64(7, 4, 9)).tolist() == [0, 1, 5]
    for rows in (tiers.volatile, tiers.persistent, tiers.both):
        check(rows, "user", range(10), {key: rows_for([key], 4)[0] for key in (4, 7)})


def test_a_lifted_row_does_not_replace_a_newer_one(tiers, monkeypatch):
    tiers.persistent.insert("user", u64(1, 2), rows_for([1, 2], 4))
    lifts = []
    monkeypatch.setattr(tiers.background, "offer", lambda name, work: lifts.append(work))
    tiers.both.fetch("user", u64(1))
    tiers.both.insert("user", u64(1), rows_for([1], 4, version=1))
    check(tiers.volatile, "user", [1], {1: rows_for([1], 4, version=1)[0]})
    tiers.both.fetch("user", u64(2))
    tiers.both.erase("user", u64(2))
    for lift in lifts:
        lift()
    assert len(lifts) == 2
    check(tiers.volatile, "user", [1, 2], {1: rows_for([1], 4, version=1)[0]})
    check(tiers.persistent, "user", [1, 2], {1: rows_for([1], 4, version=1)[0]})


def test_the_persistent_database_answers_for_a_volatile_one_that_fails(tmp_path, caplog):
    content = {key: rows_for([key], 4)[0] for key in range(50)}
    with running(Server, tmp_path) as server, contextlib.closing(rocks_at(tmp_path / "rocks")) as persistent:
        with contextlib.closing(redis_at(server.address)) as volatile:
            tiers = Tiers(volatile, persistent)
            tiers.both.insert("user", np.arange(50, dtype=np.uint64), rows_for(range(50), 4))
            server.kill()
            with caplog.at_level(logging.WARNING):
                check(tiers.both, "user", [1, 49, 50], content)
                check(tiers.both, "user", [1, 49, 50], content)
            assert sum("the last database answers" in record.getMessage() for record in caplog.records) == 1
            with pytest.raises(DatabaseError, match=r"volatile_db: address: got ConnectionError of Redis at"):
                tiers.both.insert("user", u64(1), rows_for([1], 4))
            server.start()  # It is empty: rows are lifted into it.

            def is_lifted():
                check(tiers.both, "user", [1, 49, 50], content)
                return server.client.dbsize()

            wait_until(is_lifted)
            volatile.background.drain()
            check(tiers.volatile, "user", [1, 49, 50, 2], {key: content[key] for key in (1, 49)})


# Packages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package, module", [("redis", "redis"), ("rocksdict", "rocksdb")])
def test_a_package_that_is_not_there_is_named(monkeypatch, package, module):
    importlib.import_module(f"jaxsok.serving.databases.{module}")
    monkeypatch.delitem(sys.modules, f"jaxsok.serving.databases.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}: got no such module, .*pip install 'jaxsok\[databases\]'"):
        importlib.import_module(f"jaxsok.serving.databases.{module}")

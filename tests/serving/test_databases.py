"""Rows in Redis and RocksDB: HPS's layout to the byte, a dict as the oracle, servers that hang, die and come back."""

import concurrent.futures
import contextlib
import importlib
import itertools
import logging
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from redis_servers import Cluster, HoldingProxy, Server, running
from serving_cases import PADDING, Trained, config_of, expect, model_of, rows_of, write
from waiting import wait_until

from jaxsok import serving
from jaxsok.serving.artifact import KeysInput, export_model
from jaxsok.serving.config import PersistentDb, VolatileDb
from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.errors import DatabaseError, ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.serving.http.responses import refusal_of

USER, ITEM = FrozenTable("user", dim=4, default=-1.0), FrozenTable("item", dim=3, default=0.5)
DIMS = {"user": 4, "item": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(Server, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(Cluster, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def redis_at(address, **options):
    from jaxsok.serving.databases.redis import RedisDatabase

    return RedisDatabase(VolatileDb("redis_cluster", address, **{"num_partitions": 8, "timeout_s": 5.0, **options}))


def rocks_at(path, **options):
    from jaxsok.serving.databases.rocksdb import RocksDatabase

    return RocksDatabase(PersistentDb("rocks_db", str(path), **{"num_threads": 2, **options}))


@pytest.fixture
def redis(server):
    """Yields an empty server, and a function that connects to it."""
    server.client.flushall()
    with contextlib.ExitStack() as opened:
        yield lambda **options: opened.enter_context(contextlib.closing(redis_at(server.address, **options)))


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


def u64(*keys):
    return np.array(keys, np.uint64)


def rows_for(keys, dim, version=0):
    return np.array([[1000 * version + key % 997 + column for column in range(dim)] for key in keys], np.float32)


def check(rows, table, keys, content):
    found, is_found = rows.fetch(table, np.array(keys, np.uint64))
    assert found.dtype == np.float32 and found.shape == (len(keys), DIMS[table])
    assert is_found.tolist() == [key in content for key in keys]
    for row, key in zip(found, keys, strict=True):
        if key in content:
            np.testing.assert_array_equal(row, content[key])


# The layout of HPS ---------------------------------------------------------------------------------------------------

# Compiled from HPS's own C++ code (rrxmrrxmsx_0 of database_backend_detail.hpp); modulo 8 and 5.
KEYS = [0, 1, 2, 3, 4, 5, 2**64 - 2, 2**40, 2**63 - 1]
PARTITIONS = {8: [0, 3, 6, 0, 5, 5, 6, 1, 6], 5: [0, 3, 3, 4, 2, 2, 0, 1, 2]}


@pytest.mark.parametrize("num_partitions", [8, 5])
def test_redis_has_rows_where_hps_has_them(server, redis, num_partitions):
    rows = DatabaseRows([redis(num_partitions=num_partitions)], "dlrm", [USER])
    rows.insert("user", np.array(KEYS, np.uint64), rows_for(KEYS, 4))
    wanted = {}
    for key, part in zip(KEYS, PARTITIONS[num_partitions], strict=True):
        value = struct.pack("<4f", *rows_for([key], 4)[0])
        wanted.setdefault(b"hps_et{hps_et.dlrm.user/p%d}v" % part, {})[struct.pack("<Q", key)] = value
    assert {name: server.client.hgetall(name) for name in server.client.keys()} == wanted


def test_rows_that_hps_wrote_are_read(server, redis):
    server.client.hset("hps_et{hps_et.dlrm.user/p3}v", struct.pack("<q", 1), struct.pack("<4f", 1, 2, 3, 4))
    server.client.hset("hps_et{hps_et.dlrm.user/p0}v", struct.pack("<q", 1), struct.pack("<4f", 9, 9, 9, 9))
    rows = DatabaseRows([redis()], "dlrm", [USER, ITEM])
    check(rows, "user", [1, 0, 2], {1: [1, 2, 3, 4]})  # The key is in partition 3: the row in p0 is not its row.
    check(rows, "item", [1], {})
    check(DatabaseRows([redis()], "other", [USER]), "user", [1], {})


def test_keys_of_32_bits(server, redis):
    rows = DatabaseRows([redis()], "dlrm", [USER], key_bits=32)
    keys = [0, 7, 2**32 - 1]
    rows.insert("user", np.array(keys, np.uint64), rows_for(keys, 4))
    check(rows, "user", [7, 2**32 + 7, PADDING, 2**32 - 1], dict(zip(keys, rows_for(keys, 4), strict=True)))
    assert server.client.hkeys("hps_et{hps_et.dlrm.user/p7}v") == [struct.pack("<I", 7)]
    assert server.client.hkeys("hps_et{hps_et.dlrm.user/p3}v") == [struct.pack("<I", 2**32 - 1)]
    assert sorted(key for some in rows.keys("user") for key in some.tolist()) == keys
    with pytest.raises(
        ServingError, match=r"insert: table \"user\": keys, rows: .* 1 keys that are PADDING_KEY or too"
    ):
        rows.insert("user", u64(2**32), np.zeros((1, 4), np.float32))


def test_rocksdb_has_rows_where_hps_has_them(tmp_path):
    import rocksdict

    with contextlib.closing(rocks_at(tmp_path)) as database:
        DatabaseRows([database], "dlrm", [USER]).insert("user", u64(7, 2**40), rows_for([7, 2**40], 4))
    options = rocksdict.Options(raw_mode=True)
    columns = {"default": options, "hps_et.dlrm.user": options}
    database = rocksdict.Rdict(str(tmp_path), options, columns)
    column = database.get_column_family("hps_et.dlrm.user")
    wanted = {struct.pack("<q", key): struct.pack("<4f", *rows_for([key], 4)[0]) for key in (7, 2**40)}
    assert dict(column.items()) == wanted and not list(database.items())
    column[struct.pack("<q", 9)] = struct.pack("<4f", 1, 2, 3, 4)
    column.close()
    database.close()
    with contextlib.closing(rocks_at(tmp_path)) as database:
        check(DatabaseRows([database], "dlrm", [USER]), "user", [9, 8], {9: [1, 2, 3, 4]})


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


# Overflow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["evict_random", "evict_least_used", "evict_oldest"])
def test_a_partition_that_overflows_shrinks_to_its_target(server, redis, policy):
    """A partition beyond its margin loses rows by the policy until half the margin is left; other partitions stay."""
    database = redis(num_partitions=1, overflow_margin=20, overflow_policy=policy, overflow_resolution_target=0.5)
    rows = DatabaseRows([database], "dlrm", [USER])
    rows.insert("user", np.arange(20, dtype=np.uint64), rows_for(range(20), 4))
    name = "hps_et{hps_et.dlrm.user/p0}"
    assert server.client.hlen(f"{name}v") == 20
    assert server.client.hlen(f"{name}t") == (0 if policy == "evict_random" else 20)
    used = [3, 5, 7, 11, 13, 17, 19, 2, 0]
    if policy == "evict_oldest":
        past = struct.pack("<q", int(time.time()) - 100)
        server.client.hset(f"{name}t", mapping={struct.pack("<q", key): past for key in range(20)})
        server.client.hset(f"{name}t", struct.pack("<q", 777), past)  # noted after the row had left
    if policy == "evict_least_used":
        server.client.hset(f"{name}t", struct.pack("<q", 777), 9)
    for _ in range(3):
        rows.fetch("user", np.array([*used, 999], np.uint64))
    database.background.drain()
    rows.insert("user", u64(100), rows_for([100], 4))
    left = sorted(struct.unpack("<q", key)[0] for key in server.client.hkeys(f"{name}v"))
    assert len(left) == 10
    meta = {struct.unpack("<q", key)[0]: use for key, use in server.client.hgetall(f"{name}t").items()}
    check(rows, "user", left, {key: rows_for([key], 4)[0] for key in left})
    if policy == "evict_random":
        assert not meta
        return
    assert sorted(meta) == left
    database.background.drain()
    if policy == "evict_least_used":  # Key 100 was used once, as were others that left.
        assert set(used) < set(left) and set(meta.values()) <= {b"0", b"2", b"1"}
    else:
        assert left == sorted([*used, 100])
        assert all(abs(struct.unpack("<q", use)[0] - time.time()) < 60 for use in meta.values())


def test_uses_are_noted_as_hps_does(server, redis):
    """Uses are noted as HPS notes them, for keys that are there: a decimal count, or 8 bytes of Unix time."""
    name = "hps_et{hps_et.dlrm.user/p3}t"
    for policy in ("evict_least_used", "evict_oldest"):
        server.client.flushall()
        database = redis(overflow_policy=policy)
        rows = DatabaseRows([database], "dlrm", [USER])
        rows.insert("user", u64(1), rows_for([1], 4))
        for _ in range(2):
            rows.fetch("user", u64(1, 2**64 - 3))
        database.background.drain()
        ((key, use),) = server.client.hgetall(name).items()
        assert key == struct.pack("<q", 1)
        assert use == b"3" if policy == "evict_least_used" else abs(struct.unpack("<q", use)[0] - time.time()) < 60
        rows.erase("user", u64(1))
        assert not server.client.keys()


# Tiers ---------------------------------------------------------------------------------------------------------------


class Tiers:
    """Two databases, together and each alone."""

    def __init__(self, volatile, persistent):
        self.both = DatabaseRows([volatile, persistent], "dlrm", [USER], lifts=True)
        self.volatile, self.persistent = (
            DatabaseRows([database], "dlrm", [USER]) for database in (volatile, persistent)
        )
        self.background = volatile.background


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


# Servers that fail ---------------------------------------------------------------------------------------------------


def test_a_server_that_hangs_is_waited_for_no_longer_than_declared(redis, server):
    patient, hurried = (DatabaseRows([redis(timeout_s=timeout_s)], "dlrm", [USER]) for timeout_s in (60.0, 1.0))
    patient.insert("user", u64(1), rows_for([1], 4))
    with server.frozen():
        start = time.monotonic()
        with pytest.raises(DatabaseError, match=r"TimeoutError of Redis at .*, wanted answers in 1 s; see that its"):
            hurried.fetch("user", u64(1))
        assert 1.0 <= time.monotonic() - start < 30
        with pytest.raises(DatabaseError, match="TimeoutError"):
            redis(timeout_s=0.1)
    check(patient, "user", [1], {1: rows_for([1], 4)[0]})
    assert hurried.num_rows("user") == 1


@pytest.mark.parametrize("late", ["insert", "erase"])
def test_a_write_that_had_no_answer_does_not_come_after_later_ones(late, server):
    """The server gets what it was sent while it hung only after the row was written again."""
    server.client.flushall()
    with contextlib.closing(HoldingProxy(server.port)) as proxy:
        with contextlib.closing(redis_at(proxy.address, timeout_s=1.0)) as database:
            rows = DatabaseRows([database], "dlrm", [USER])
            rows.insert("user", u64(1, 2), rows_for([1, 2], 4))
            proxy.hold()
            with pytest.raises(DatabaseError, match="TimeoutError of Redis"):
                rows.insert("user", u64(1), rows_for([1], 4, 1)) if late == "insert" else rows.erase("user", u64(1))
            proxy.wait()
            rows.insert("user", u64(1), rows_for([1], 4, 2))
            proxy.release()
            content = {1: rows_for([1], 4, 2)[0], 2: rows_for([2], 4)[0]}
            for _ in range(20):
                check(rows, "user", [1, 2], content)
                time.sleep(0.01)


def test_writes_that_follow_one_without_an_answer(cluster, caplog):
    """In a cluster, and as a user who may not end connections, which is logged."""
    keys = np.arange(64, dtype=np.uint64)
    for server in cluster.servers:
        server.client.flushall()
        server.client.acl_setuser("serve", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-client"])
    for user, num_logged in (("default", 0), ("serve", 1)):
        options = {"timeout_s": 1.0} | ({"user_name": "serve", "password": "any"} if user == "serve" else {})
        with contextlib.closing(redis_at(cluster.address, **options)) as database:
            rows = DatabaseRows([database], "dlrm", [USER])
            rows.insert("user", keys, rows_for(keys.tolist(), 4))
            with cluster.servers[1].frozen(), pytest.raises(DatabaseError, match="TimeoutError of Redis"):
                rows.insert("user", keys, rows_for(keys.tolist(), 4, 1))
            cluster.wait()
            caplog.clear()

            def is_written(rows=rows):
                with contextlib.suppress(DatabaseError):
                    rows.insert("user", keys, rows_for(keys.tolist(), 4, 2))
                    return True

            wait_until(is_written)
            check(rows, "user", keys.tolist(), dict(zip(keys.tolist(), rows_for(keys.tolist(), 4, 2), strict=True)))
            logged = [record for record in caplog.records if "may be carried out later" in record.getMessage()]
            assert len(logged) >= num_logged and bool(logged) == bool(num_logged)


def test_what_a_server_refuses_is_no_matter_of_time(server):
    server.client.flushall()
    with contextlib.closing(redis_at(server.address)) as database:
        rows = DatabaseRows([database], "dlrm", [USER])
        server.client.config_set("maxmemory", 1)
        try:
            with pytest.raises(DatabaseError, match=r"got OutOfMemoryError of Redis .*, wanted it to do what it was"):
                rows.insert("user", u64(1), rows_for([1], 4))
        finally:
            server.client.config_set("maxmemory", 0)
        rows.insert("user", u64(1), rows_for([1], 4))


@pytest.mark.parametrize("has_disk", [False, True])
def test_those_who_wait_for_calls_that_hang_wait_no_longer(has_disk, redis, server, tmp_path):
    """Twenty calls share five connections. With rows on the disk only one call asks again, once in a while."""
    with contextlib.closing(rocks_at(tmp_path / "rocks")) as persistent:
        tiers = Tiers(redis(timeout_s=1.0), persistent)
        rows = tiers.both if has_disk else tiers.volatile
        rows.insert("user", u64(1), rows_for([1], 4))
        times = []

        def fetch(_):
            start = time.monotonic()
            try:
                check(rows, "user", [1], {1: rows_for([1], 4)[0]})
            except DatabaseError:
                assert not has_disk
            times.append(time.monotonic() - start)

        with server.frozen(), concurrent.futures.ThreadPoolExecutor(20) as threads:
            list(threads.map(fetch, range(40)))
        assert len(times) == 40 and max(times) < 2.5


def test_a_node_that_hangs(cluster):
    """A call to a node that hangs fails; the next call after it resumes succeeds."""
    for server in cluster.servers:
        server.client.flushall()
    keys = np.arange(64, dtype=np.uint64)
    with contextlib.ExitStack() as opened:
        databases = [opened.enter_context(contextlib.closing(redis_at(cluster.address, timeout_s=s))) for s in (60, 1)]
        patient, hurried = (DatabaseRows([database], "dlrm", [USER]) for database in databases)
        patient.insert("user", keys, rows_for(keys.tolist(), 4))
        with cluster.servers[2].frozen(), pytest.raises(DatabaseError, match="TimeoutError of Redis"):
            hurried.fetch("user", keys)
        cluster.wait()
        content = dict(zip(keys.tolist(), rows_for(keys.tolist(), 4), strict=True))
        check(patient, "user", keys.tolist(), content)

        def answers():
            with contextlib.suppress(DatabaseError):
                return hurried.num_rows("user") == 64

        wait_until(answers)


def test_a_server_that_comes_back_is_used_again(tmp_path):
    with running(Server, tmp_path) as server, contextlib.closing(redis_at(server.address)) as database:
        rows = DatabaseRows([database], "dlrm", [USER])
        for version in range(2):
            rows.insert("user", u64(1), rows_for([1], 4, version))
            server.kill()
            if version:
                with pytest.raises(DatabaseError, match="got ConnectionError of Redis"):
                    rows.fetch("user", u64(1))
            server.start()  # The connection is lost; the next call opens a new one.
            check(rows, "user", [1], {})
    with pytest.raises(DatabaseError, match=r"got ConnectionError of Redis at"):
        redis_at(server.address)


def test_a_node_that_dies_in_the_middle(tmp_path):
    """While a node is dead, lookups of threads return their rows or raise DatabaseError; afterwards all return rows."""
    keys = np.arange(2000, dtype=np.uint64)
    with running(Cluster, tmp_path) as cluster, contextlib.closing(redis_at(cluster.address)) as database:
        rows = DatabaseRows([database], "dlrm", [USER])
        rows.insert("user", keys, rows_for(keys.tolist(), 4))
        assert all(server.client.dbsize() for server in cluster.servers)
        counts, wrong, is_over = {"read": 0, "failed": 0}, [], threading.Event()

        def read():
            while not is_over.is_set():
                try:
                    found, is_found = rows.fetch("user", keys)
                    wrong.extend(keys[is_found & (found != rows_for(keys.tolist(), 4)).any(axis=1)])
                    counts["read"] += 1
                except DatabaseError:
                    counts["failed"] += 1
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: counts["read"] > 3)
        cluster.servers[1].kill()
        wait_until(lambda: counts["failed"] > 3)
        cluster.servers[1].start()
        cluster.wait()
        read_before = counts["read"]
        wait_until(lambda: counts["read"] > read_before + 3)
        is_over.set()
        for thread in threads:
            thread.join()
        assert not wrong
        rows.insert("user", keys, rows_for(keys.tolist(), 4))
        check(rows, "user", keys.tolist(), dict(zip(keys.tolist(), rows_for(keys.tolist(), 4), strict=True)))


def test_the_first_node_that_answers_is_asked_for_the_cluster(cluster):
    for server in cluster.servers:
        server.client.flushall()
    with contextlib.closing(redis_at(f"127.0.0.1:1, {cluster.servers[2].address}")) as database:
        rows = DatabaseRows([database], "dlrm", [USER])
        rows.insert("user", np.arange(99, dtype=np.uint64), rows_for(range(99), 4))
        assert rows.num_rows("user") == 99
    for address in ("", "host:port", "127.0.0.1:7000:1"):
        with pytest.raises(ServingError, match=r'volatile_db: address: got ".*", wanted "host:port"'):
            redis_at(address)


def test_passwords(tmp_path):
    with running(Server, tmp_path, "--user", "serve", "on", ">secret", "~*", "+@all") as server:
        with contextlib.closing(redis_at(server.address, user_name="serve", password="secret")) as database:
            DatabaseRows([database], "dlrm", [USER]).insert("user", u64(1), rows_for([1], 4))
        with pytest.raises(DatabaseError, match=r"AuthenticationError .*wanted it to do what it was asked") as caught:
            redis_at(server.address, user_name="serve", password="wrong-word")
        assert "wrong-word" not in str(caught.value)


def test_tls(tmp_path):
    """Connections use TLS: the server shows a certificate of the CA, and asks for one."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make certificates")
    ca = [tmp_path / "ca.crt", tmp_path / "ca.key"]
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test".split()
    subprocess.run([*made, "-keyout", ca[1], "-out", ca[0]], check=True, capture_output=True)
    files = ["--tls-cert-file", ca[0], "--tls-key-file", ca[1], "--tls-ca-cert-file", ca[0]]
    with running(Server, tmp_path) as server:
        try:
            for option, value in zip(files[::2], files[1::2], strict=True):
                server.client.config_set(option.lstrip("-"), str(value))
            server.client.config_set("tls-port", server.port + 10_000)
        except Exception as error:
            pytest.skip(f"needs a redis-server with TLS: {error}")
        address = f"127.0.0.1:{server.port + 10_000}"
        own = {"tls_client_certificate": str(ca[0]), "tls_client_key": str(ca[1]), "tls_ca_certificate": str(ca[0])}
        with contextlib.closing(redis_at(address, enable_tls=True, **own)) as database:
            rows = DatabaseRows([database], "dlrm", [USER])
            rows.insert("user", u64(1), rows_for([1], 4))
            check(rows, "user", [1], {1: rows_for([1], 4)[0]})
        with pytest.raises(DatabaseError, match="volatile_db: address"):
            redis_at(address)


# RocksDB -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_opened_by_one_that_writes_and_keeps_its_rows(tmp_path):
    content = {key: rows_for([key], 4)[0] for key in range(100)}
    with contextlib.closing(rocks_at(tmp_path)) as database:
        DatabaseRows([database], "dlrm", [USER]).insert("user", u64(*content), rows_for(content, 4))
        with pytest.raises(DatabaseError, match=rf'persistent_db: path: got an error of RocksDB at "{tmp_path}"'):
            rocks_at(tmp_path)
    with contextlib.closing(rocks_at(tmp_path, read_only=True)) as database:
        rows = DatabaseRows([database], "dlrm", [USER, ITEM])
        check(rows, "user", [5, 99, 100], content)
        check(rows, "item", [5], {})
        assert rows.num_rows("item") == 0 and not list(rows.scan("item", 5))
        for table, key in (("user", 5), ("item", 5)):
            with pytest.raises(DatabaseError, match="persistent_db: read_only: got True"):
                rows.insert(table, u64(key), np.zeros((1, DIMS[table]), np.float32))
    with pytest.raises(DatabaseError, match="RocksDB at"):
        rocks_at(tmp_path / "none", read_only=True)
    for op in (rows.num_rows, lambda table: rows.fetch(table, u64(5)), lambda table: list(rows.keys(table))):
        with pytest.raises(DatabaseError, match="closed, wanted it open"):
            op("user")


def test_a_reader_follows_the_one_that_writes(tmp_path):
    """With read_only a session reads what another process has written since, also rows that left, and keeps no copy."""
    with contextlib.closing(rocks_at(tmp_path)) as writer:
        written = DatabaseRows([writer], "dlrm", [USER])
        written.insert("user", u64(1, 2), rows_for([1, 2], 4))
        with contextlib.closing(rocks_at(tmp_path, read_only=True)) as reader:
            read = DatabaseRows([reader], "dlrm", [USER])
            content = {key: rows_for([key], 4)[0] for key in (1, 2)}
            check(read, "user", [1, 2, 3], content)
            for number in range(3):
                content |= {2: rows_for([2], 4)[0] + number, 3: rows_for([3], 4)[0] - number}
                written.insert("user", u64(2, 3), np.stack([content[2], content[3]]))
                check(read, "user", [1, 2, 3], content)
            written.erase("user", u64(1))
            del content[1]
            check(read, "user", [1, 2, 3], content)


def test_a_folder_is_let_go_when_the_calls_that_run_have_ended(tmp_path, caplog):
    """Threads that read, write and scan end with the refusal; what they have written is there."""
    keys = np.arange(2000, dtype=np.uint64)
    for _ in range(3):
        database, failures = rocks_at(tmp_path), []
        rows = DatabaseRows([database], "dlrm", [USER])

        def run(work, failures=failures):
            with pytest.raises(DatabaseError, match="closed, wanted it open") as caught:
                while True:
                    work()
            failures.append(caught)

        works = [
            lambda rows=rows: rows.insert("user", keys, rows_for(keys, 4)),
            lambda rows=rows: rows.fetch("user", keys),
            lambda rows=rows: list(rows.keys("user")),
            lambda rows=rows: rows.num_rows("user"),
        ]
        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        wait_until(lambda rows=rows: rows.num_rows("user") > 0)
        database.close()
        database.close()
        for thread in threads:
            thread.join(30)
        assert len(failures) == len(works)
    with contextlib.closing(rocks_at(tmp_path)) as database:
        check(DatabaseRows([database], "dlrm", [USER]), "user", [5], {5: rows_for([5], 4)[0]})
    assert not caplog.records


def test_more_rows_than_there_is_memory_for(tmp_path):
    """A process with memory for only a part of its table writes it, reads it, and scans it."""
    code = """
        import resource, sys
        import numpy as np
        from jaxsok.serving.config import PersistentDb
        from jaxsok.serving.databases import DatabaseRows
        from jaxsok.serving.databases.rocksdb import RocksDatabase
        from jaxsok.serving.frozen import FrozenTable

        def peak():
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        dim, num_rows, step = 1024, 100_000, 4_000
        database = RocksDatabase(PersistentDb("rocks_db", sys.argv[1], num_threads=2, max_batch_size=step))
        rows, before = DatabaseRows([database], "dlrm", [FrozenTable("user", dim=dim)]), peak()
        for start in range(0, num_rows, step):
            keys = np.arange(start, start + step, dtype=np.uint64)
            rows.insert("user", keys, np.repeat(keys[:, None], dim, 1).astype(np.float32))
        for start in range(0, num_rows, 10 * step):
            keys = np.arange(start, start + step, dtype=np.uint64)
            found, is_found = rows.fetch("user", keys)
            assert is_found.all() and (found == keys[:, None]).all()
        assert sum(chunk.num_rows for chunk in rows.scan("user", 1000)) == num_rows
        grown, table = peak() - before, 4 * dim * num_rows
        database.close()
        print(grown, table)
        assert grown < table / 3, (grown, table)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package, module", [("redis", "redis"), ("rocksdict", "rocksdb")])
def test_a_package_that_is_not_there_is_named(monkeypatch, package, module):
    importlib.import_module(f"jaxsok.serving.databases.{module}")
    monkeypatch.delitem(sys.modules, f"jaxsok.serving.databases.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}: got no such module, .*pip install 'jaxsok\[databases\]'"):
        importlib.import_module(f"jaxsok.serving.databases.{module}")


# Sessions ------------------------------------------------------------------------------------------------------------

CONTENT = {"user": rows_of([*range(300), 2**63], 4), "item": rows_of(range(200, 500), 3)}
DEFAULTS = {"user": -1.0, "item": 0.5}
CACHED, READ = {"gpucacheper": 0.3, "hit_rate_threshold": 1.1}, {"gpucache": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return {name: (write(folder / name, content), DIMS[name]) for name, content in CONTENT.items()}


@pytest.fixture(params=["redis", "rocks", "both"])
def blocks(request, server, tmp_path):
    """Returns the blocks of a configuration that name the databases."""
    server.client.flushall()
    volatile = {"type": "redis_cluster", "address": server.address, "num_partitions": 4}
    persistent = {"type": "rocks_db", "path": str(tmp_path / "rocks")}
    if request.param == "both":
        volatile |= {"initial_cache_rate": 0.5, "cache_missed_embeddings": True, "overflow_margin": 30}
    return {
        "volatile_db": volatile if request.param != "rocks" else {"type": "disabled"},
        **({"persistent_db": persistent} if request.param != "redis" else {}),
    }


def check_answers(session, content, version):
    keys = {"user": np.array([[0, 299, 7], [300, -1, -(2**63)]]), "item": np.arange(190, 210)}
    for _ in range(2):
        answer = session.lookup(keys)
        assert answer.version == version
        for name in keys:
            wanted = expect(content[name], keys[name], DEFAULTS[name], DIMS[name])
            np.testing.assert_array_equal(answer[name], wanted)


@pytest.mark.parametrize("tier", [CACHED, READ], ids=["cached", "read"])
def test_sessions(folders, blocks, tier, tmp_path):
    """Lookups, predictions and updates work over every tier, and a second session serves what is stored."""
    tables, _ = freeze_records([(USER, SizedRecords(0, []))])
    model = lambda tables, inputs: lookup(tables, {"user": LookupInput("user", inputs["user"])})  # noqa: E731
    export_model(tmp_path / "model", model, tables, {"user": KeysInput("user", (2,))})
    given = config_of(
        model_of(folders, defaults=DEFAULTS, **tier),
        model_of({"user": folders["user"]}, "other", DEFAULTS, dense_file=str(tmp_path / "model"), **tier),
        **blocks,
    )
    newer = {"user": rows_of(range(250, 350), 4, version=1), "item": CONTENT["item"]}
    with serving.open(given, warm_up=False) as session:
        for name in ("dlrm", "other"):
            assert f'model "{name}": ' in session.report()
        keys = np.array([[3, 999], [2, -1]])
        predicted = session.predict({"user": keys}, model="other")["user"]
        np.testing.assert_array_equal(predicted, expect(CONTENT["user"], keys, -1.0, 4))
    given["models"].pop()
    with serving.open(given, warm_up=False) as session:
        check_answers(session, CONTENT, 1)
        with pytest.raises(ServingError, match=r"in_place: got False .* rows there are changed where they lie"):
            session.update({"user": write(tmp_path / "newer", newer["user"])}, in_place=False)
        with pytest.raises(ServingError, match="in_place: got 'yes'"):
            session.update({"user": tmp_path / "newer"}, in_place="yes")
        assert session.update({"user": tmp_path / "newer"}) == 2
        check_answers(session, newer, 2)
        session.refresh()
        check_answers(session, newer, 2)
        assert session.stats()["host_bytes"] == 0 and session.stats()["in_place_updates"] == 1
    for block in blocks.values():
        if block["type"] != "disabled":
            block["initialize_after_startup"] = False
    if "persistent_db" in blocks:
        blocks["persistent_db"]["read_only"] = True
    with serving.open(given, warm_up=False) as session:
        check_answers(session, newer, 1)
        if "persistent_db" in blocks:
            with pytest.raises(ServingError, match="persistent_db is read_only"):
                session.update({"user": tmp_path / "newer"})


@pytest.mark.parametrize("tier", [CACHED, READ], ids=["cached", "read"])
def test_a_session_that_is_closed_lets_requests_and_updates_end(folders, blocks, tier, tmp_path):
    given = config_of(model_of(folders, defaults=DEFAULTS, num_of_worker_buffer_in_pool=2, **tier), **blocks)
    newer, keys = write(tmp_path / "newer", rows_of(range(250, 350), 4, version=1)), {"user": np.arange(64)}
    for _ in range(2):
        session, failures = serving.open(given, warm_up=False), []

        def run(work, failures=failures):
            with pytest.raises(ServingError, match="session: got one that is closed, wanted an open one") as caught:
                while True:
                    work()
            failures.append(caught)

        works = [lambda session=session: session.lookup(keys)] * 3 + [
            lambda session=session: session.update({"user": newer})
        ]
        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        wait_until(lambda session=session: session.stats()["updates"] > 0)
        assert session.close(30)
        for thread in threads:
            thread.join(30)
        assert len(failures) == len(works)


def test_rows_that_are_written_again_are_counted_once(folders, tmp_path):
    """RocksDB's own estimate counts them again until it has merged its files."""
    blocks = {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "rocks_db", "path": str(tmp_path / "db")}}
    given = config_of(model_of({"user": folders["user"]}, defaults=DEFAULTS, **CACHED), **blocks)
    trained = Trained({"user": 4})
    trained.set("user", rows_of(range(40), 4))
    full = trained.full(tmp_path / "full")
    trained.set("user", rows_of(range(30, 50), 4, version=1))
    delta = trained.delta(tmp_path / "delta", full)
    for _ in range(3):
        with serving.open(given, warm_up=False) as session:
            assert session.models["dlrm"].num_rows == {"user": 301}
            session.update(full)
            assert session.models["dlrm"].num_rows == {"user": 40}
            session.update(delta)
            assert 50 <= session.models["dlrm"].num_rows["user"] <= 60


def test_filling_again_replaces_what_redis_had(folders, server, tmp_path):
    """Filling again replaces all rows in Redis, also those beyond `initial_cache_rate`."""
    server.client.flushall()
    volatile = {"type": "redis_cluster", "address": server.address, "num_partitions": 4}
    persistent = {"type": "rocks_db", "path": str(tmp_path / "rocks")}
    newer = write(tmp_path / "newer", rows_of(CONTENT["user"], 4, version=1))
    for rate in (1.0, 0.5):
        blocks = {"volatile_db": {**volatile, "initial_cache_rate": rate}, "persistent_db": persistent}
        with serving.open(
            config_of(model_of(folders, defaults=DEFAULTS, **CACHED), **blocks), warm_up=False
        ) as session:
            check_answers(session, CONTENT, 1)
            session.update({"user": newer})


@pytest.mark.parametrize("is_delta", [True, False], ids=["delta", "full"])
def test_opening_again_removes_what_the_files_no_longer_have(blocks, tmp_path, is_delta):
    trained = Trained(DIMS)
    trained.set("user", rows_of(range(40), 4))
    trained.set("item", rows_of(range(20), 3))
    first = trained.full(tmp_path / "first")
    trained.erase("user", range(10))
    last = trained.delta(tmp_path / "last", first) if is_delta else trained.full(tmp_path / "last")
    keys = np.arange(50)
    for path in (first, last):
        model = model_of({name: (path, dim) for name, dim in DIMS.items()}, defaults=DEFAULTS, **CACHED)
        with serving.open(config_of(model, **blocks), warm_up=False) as session:
            found = session.lookup({"user": keys})["user"]
    np.testing.assert_array_equal(found, expect(trained.content["user"], keys, -1.0, 4))


def test_deltas(blocks, tmp_path):
    """Deltas remove rows; one that does not follow is refused, and one that failed can be applied again."""
    trained = Trained(DIMS)
    trained.set("user", rows_of(range(40), 4))
    trained.set("item", rows_of(range(20), 3))
    full = trained.full(tmp_path / "full")
    trained.set("user", rows_of(range(30, 50), 4, version=1))
    trained.erase("user", range(10))
    delta = trained.delta(tmp_path / "delta", full)
    folders = {name: (full, dim) for name, dim in DIMS.items()}
    with serving.open(config_of(model_of(folders, defaults=DEFAULTS, **CACHED), **blocks), warm_up=False) as session:
        keys = {"user": np.arange(60), "item": np.arange(60)}
        session.lookup(keys)
        assert session.update(delta) == 2
        answer = session.lookup(keys)
        for name in keys:
            wanted = expect(trained.content[name], keys[name], DEFAULTS[name], DIMS[name])
            np.testing.assert_array_equal(answer[name], wanted)
        with pytest.raises(ServingError, match="applied already"):
            session.update(delta)


def test_an_update_that_a_server_does_not_survive_can_be_done_again(folders, tmp_path):
    newer = {"user": rows_of(range(250, 350), 4, version=1), "item": CONTENT["item"]}
    with running(Server, tmp_path) as server:
        volatile = {"type": "redis_cluster", "address": server.address, "num_partitions": 4}
        model = model_of(folders, defaults=DEFAULTS, **CACHED)
        with serving.open(config_of(model, volatile_db=volatile), warm_up=False) as session:
            check_answers(session, CONTENT, 1)
            server.kill()
            with pytest.raises(DatabaseError, match="volatile_db") as caught:
                session.update({"user": write(tmp_path / "newer", newer["user"])})
            refusal = refusal_of(caught.value, "update")
            assert (refusal.status, refusal.code) == (503, "database") and server.address not in str(refusal)
            with pytest.raises(DatabaseError):
                session.lookup({"user": np.arange(40, 48)})
            server.start()
            assert session.update({"user": tmp_path / "newer", "item": folders["item"][0]}) == 2
            check_answers(session, newer, 2)


def test_a_database_that_dies_after_an_update_takes_neither_cached_rows_nor_models_away(folders, tmp_path):
    newer = rows_of(range(250, 350), 4, version=1)
    with running(Server, tmp_path) as server:
        volatile = {"type": "redis_cluster", "address": server.address, "num_partitions": 4}
        model = model_of({"user": folders["user"]}, defaults=DEFAULTS, **CACHED)
        with serving.open(config_of(model, volatile_db=volatile), warm_up=False) as session:
            keys = np.array([299, 300, 7])
            session.lookup({"user": keys})
            session.update({"user": write(tmp_path / "newer", newer)})
            session.lookup({"user": keys[:2]})
            server.kill()
            np.testing.assert_array_equal(session.lookup({"user": keys[:2]})["user"], expect(newer, keys[:2], -1.0, 4))
            assert session.models["dlrm"].num_rows == {"user": 100}
            assert session.stats()["tables"]["user"]["num_rows"] == 100 and "100 rows" in session.report()


def test_a_database_that_cannot_be_reached_is_reported_when_it_is_opened(folders, tmp_path):
    given = config_of(model_of(folders, **CACHED))
    given["volatile_db"] = {"type": "redis_cluster", "address": "127.0.0.1:1", "num_partitions": 4}
    with pytest.raises(DatabaseError, match=r'volatile_db: address: got ConnectionError of Redis at "127.0.0.1:1"'):
        serving.open(given)
    (tmp_path / "file").write_text("")
    given["volatile_db"] = {"type": "disabled"}
    given["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / "file")}
    with pytest.raises(DatabaseError, match="persistent_db: path"):
        serving.open(given)

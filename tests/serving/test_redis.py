"""Tests rows in Redis: HPS's layout to the byte, overflow, and servers that hang, die and come back."""

import concurrent.futures
import contextlib
import pathlib
import shutil
import statistics
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
import redis as redis_lib
from database_cases import ITEM, USER, Tiers, check, redis_at, rocks_at, rows_for, u64
from redis_servers import Cluster, HoldingProxy, Server, running
from serving_cases import PADDING, Trained
from waiting import wait_until

from jaxsok.serving import streams
from jaxsok.serving.databases import DatabaseRows, rows as rows_lib
from jaxsok.serving.errors import DatabaseError, ServingError

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


def test_closing_waits_for_the_background_no_longer_than_told(server):
    database, begins, goes_on = redis_at(server.address), threading.Event(), threading.Event()
    database.background.offer(None, lambda: begins.set() or goes_on.wait())
    assert begins.wait(20)
    assert not database.close(time.monotonic() + 0.2)
    goes_on.set()
    assert database.close()


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


def test_only_a_write_that_may_be_carried_out_later_ends_connections(server, redis, monkeypatch):
    """One that was interrupted may; one that was refused is over."""
    database = redis()
    rows = DatabaseRows([database], "dlrm", [USER])
    ended, end = [], database._end_connections
    monkeypatch.setattr(database, "_end_connections", lambda: ended.append(end()))
    rows.insert("user", u64(1), rows_for([1], 4))
    server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(DatabaseError, match="OutOfMemoryError"):
            rows.insert("user", u64(1), rows_for([1], 4, 1))
    finally:
        server.client.config_set("maxmemory", 0)
    rows.insert("user", u64(1), rows_for([1], 4, 2))
    assert not ended
    with monkeypatch.context() as patched:

        def fail_beside_another(_):
            database._is_unsettled = True  # by a thread whose write had no answer
            raise DatabaseError("refused") from redis_lib.ResponseError("OOM")

        patched.setattr(database, "_call", fail_beside_another)
        with pytest.raises(DatabaseError, match="refused"):
            rows.insert("user", u64(1), rows_for([1], 4, 3))
    rows.insert("user", u64(1), rows_for([1], 4, 2))
    assert len(ended) == 1
    with monkeypatch.context() as patched:
        patched.setattr(database, "_call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rows.insert("user", u64(1), rows_for([1], 4, 3))
    rows.insert("user", u64(1), rows_for([1], 4, 4))
    assert len(ended) == 2
    check(rows, "user", [1], {1: rows_for([1], 4, 4)[0]})


def interrupt(_):
    raise KeyboardInterrupt


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


def test_reads_after_a_time_out_fail_at_once_until_one_has_asked_again(redis, server, monkeypatch):
    """When the server is back, the first read after the rest brings all others back, and so does a write."""
    monkeypatch.setattr(rows_lib, "RETRY_S", 1.0)
    rows = DatabaseRows([redis(timeout_s=0.5)], "dlrm", [USER])
    rows.insert("user", u64(1), rows_for([1], 4))

    def seconds():
        start = time.monotonic()
        with pytest.raises(DatabaseError, match=r"had no answer|Timeout"):
            rows.fetch("user", u64(1))
        return time.monotonic() - start

    with server.frozen():
        assert seconds() >= 0.5
        assert statistics.median(seconds() for _ in range(20)) < 0.4
        time.sleep(1.0)
        assert seconds() >= 0.5
    assert seconds() < 0.4
    time.sleep(1.0)
    content = {key: rows_for([key], 4)[0] for key in (1, 2)}
    for _ in range(2):
        check(rows, "user", [1], content)
    with server.frozen():
        assert seconds() >= 0.5
    assert seconds() < 0.4
    rows.insert("user", u64(2), rows_for([2], 4))
    check(rows, "user", [1, 2], content)


def test_few_wait_for_a_cluster_that_hangs(cluster):
    """Its client asks all nodes, one after the other and for one call at a time, and then has an error of its own."""
    with contextlib.closing(redis_at(cluster.address, timeout_s=0.3)) as database, contextlib.ExitStack() as frozen:
        rows = DatabaseRows([database], "dlrm", [USER])
        rows.insert("user", u64(1), rows_for([1], 4))
        for server in cluster.servers:
            frozen.enter_context(server.frozen())
        until = time.monotonic() + 4

        def ask(_):
            num_at_once = num_late = 0
            while (start := time.monotonic()) < until:
                with pytest.raises(DatabaseError):
                    rows.fetch("user", u64(1))
                is_late = time.monotonic() - start > 0.2
                num_late += is_late
                num_at_once += not is_late
                time.sleep(0.01)
            return num_at_once, num_late

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            num_at_once, num_late = np.sum(list(threads.map(ask, range(8))), axis=0)
        assert num_late <= 8 + 4  # each thread once, and then one of all after each rest of a second
        assert num_at_once > 200, (num_at_once, num_late)
    cluster.wait()


@pytest.mark.parametrize("policy", ["evict_random", "evict_oldest", "evict_least_used"])
def test_writes_to_a_node_that_hangs_end_whatever_number_of_keys_they_have(policy, cluster):
    """A client of a cluster repeats each command that had no answer by itself, as long as the first time."""
    keys = np.arange(1000, dtype=np.uint64)
    for server in cluster.servers:
        server.client.flushall()
    with contextlib.closing(redis_at(cluster.address, timeout_s=0.5, overflow_policy=policy)) as database:
        rows = DatabaseRows([database], "dlrm", [USER])
        rows.insert("user", keys, rows_for(keys.tolist(), 4))
        with cluster.servers[1].frozen():
            start = time.monotonic()
            with pytest.raises(DatabaseError, match="TimeoutError of Redis"):
                rows.insert("user", keys, rows_for(keys.tolist(), 4, 1))
            assert time.monotonic() - start < 20
    cluster.wait()


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


# Addresses, passwords and TLS ----------------------------------------------------------------------------------------


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


def test_a_tls_file_that_is_not_there_is_named(tmp_path):
    (tmp_path / "ca.crt").write_text("")
    files = {
        "tls_ca_certificate": tmp_path / "ca.crt",
        "tls_client_certificate": "",
        "tls_client_key": tmp_path / "key",
    }
    wanted = r'volatile_db: tls_client_key: got ".*key", wanted the path of a file that exists, or "" where'
    with pytest.raises(ServingError, match=wanted):
        redis_at("127.0.0.1:1", enable_tls=True, **{name: str(path) for name, path in files.items()})


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
        other = pathlib.Path(__file__).parent / "tls" / "cert.pem"
        with pytest.raises(DatabaseError, match=r"CERTIFICATE_VERIFY_FAILED.*see the tls_\.\.\. keys"):
            redis_at(address, enable_tls=True, **{**own, "tls_ca_certificate": str(other)})
        full = Trained({"user": 4}).full(tmp_path / "full")
        url = f"rediss://{address}/?ssl_certfile={ca[0]}&ssl_keyfile={ca[1]}"
        with pytest.raises(DatabaseError, match=r"CERTIFICATE_VERIFY_FAILED.*TLS on both sides, and"):
            streams.Publisher(f"{url}&ssl_ca_certs={other}", "dlrm").publish(full)
        with pytest.raises(DatabaseError, match=r"ssl_ca_cert.*wanted parameters in its URL"):
            streams.Publisher(f"{url}&ssl_ca_cert={ca[0]}", "dlrm").publish(full)

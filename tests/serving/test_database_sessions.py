"""Tests sessions whose rows are in Redis, in RocksDB, or in both: lookups, updates, and databases that fail."""

import concurrent.futures
import threading
import time

import httpx
import numpy as np
import pytest
from database_cases import DIMS, USER
from redis_servers import Server, running
from server_cases import serving as serve
from serving_cases import Trained, config_of, expect, model_of, rows_of, write
from waiting import wait_until

from jaxsok import serving
from jaxsok.serving.artifact import KeysInput, export_model
from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.errors import DatabaseError, ServingError
from jaxsok.serving.frozen import SizedRecords, freeze_records
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.serving.http.responses import refusal_of

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


def test_after_an_update_that_failed_another_delta_is_refused(tmp_path, monkeypatch):
    """The rows that were written would stay. A chain with the failed delta, or a full export, replaces them."""
    trained = Trained({"user": 4})
    trained.set("user", rows_of(range(60), 4))
    old = trained.full(tmp_path / "old")
    trained.set("user", rows_of([*range(10), 61], 4, version=1))
    first = trained.delta(tmp_path / "first", old)
    trained.set("user", rows_of(range(5, 20), 4, version=2))
    trained.erase("user", [61])
    second, other = trained.delta(tmp_path / "second", first), trained.delta(tmp_path / "other", old)
    after_first = trained.frozen_content()["user"]
    trained.set("user", rows_of(range(5), 4, version=3))
    third = trained.delta(tmp_path / "third", second)
    rolled_back = Trained({"user": 4})
    rolled_back.set("user", rows_of(range(40), 4, version=4))
    back = rolled_back.full(tmp_path / "back")
    config = config_of(model_of({"user": (old, 4)}, defaults=DEFAULTS, **READ))
    config |= {
        "volatile_db": {"type": "disabled"},
        "persistent_db": {"type": "rocks_db", "path": str(tmp_path / "rocks")},
    }
    keys, insert = np.arange(70), DatabaseRows.insert

    def fail(self, name, keys, rows):
        insert(self, name, keys, rows)
        raise DatabaseError("the database is away")

    def fails(session, source):
        with monkeypatch.context() as patch, pytest.raises(DatabaseError, match="is away"):
            patch.setattr(DatabaseRows, "insert", fail)
            session.update(source)

    with serving.open(config, warm_up=False) as session:
        fails(session, first)
        with pytest.raises(ServingError, match=r'the delta ".*other", wanted the update up to ".*first" again, or a'):
            session.update(other)
        assert session.update([first, second]) == 2
        np.testing.assert_array_equal(session.lookup({"user": keys})["user"], expect(after_first, keys, -1.0, 4))
        fails(session, back)
        with pytest.raises(ServingError, match=r'the delta ".*third", wanted the update up to ".*back" again, or a'):
            session.update(third)
        assert session.update(back) == 3
        wanted = expect(rolled_back.content["user"], keys, -1.0, 4)
        np.testing.assert_array_equal(session.lookup({"user": keys})["user"], wanted)


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


def test_cached_keys_are_answered_while_a_database_hangs(folders, tmp_path):
    """Requests share calls with others that wait for it: these get its error, and none waits for all of them."""
    volatile = {"type": "redis_cluster", "num_partitions": 4, "jaxsok": {"timeout_s": 1.0}}
    model = model_of({"user": folders["user"]}, defaults=DEFAULTS, **CACHED)
    with running(Server, tmp_path) as server:
        blocks = {"volatile_db": {**volatile, "address": server.address}}
        with serving.open(config_of(model, **blocks), warm_up=False) as session, serve(session) as http:

            def ask(key):
                start = time.monotonic()
                got = httpx.post(f"{http.address}/v1/models/dlrm/lookup", json={"keys": {"user": [key]}}, timeout=60)
                return got.status_code, time.monotonic() - start

            assert ask(7)[0] == 200
            with server.frozen(), concurrent.futures.ThreadPoolExecutor(24) as threads:
                missing = [threads.submit(ask, key) for key in range(100, 120)]
                cached = [threads.submit(ask, 7) for _ in range(4)]
                found = [future.result() for future in missing], [future.result() for future in cached]
    assert {status for status, _ in found[0]} == {503} and {status for status, _ in found[1]} == {200}
    assert max(seconds for of_kind in found for _, seconds in of_kind) < 6


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

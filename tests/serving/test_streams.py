"""Versions through a Redis stream reach every server whole, also when servers, Redis or publishers end; dicts judge."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import programs
import pytest
import redis
from redis_servers import Cluster, Server, running
from serving_cases import Trained, config_of, expect, model_of, rows_of, write
from waiting import free_port, wait_until

from jaxsok import checkpoint, serving
from jaxsok.serving import streams
from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.errors import ConfigError, DatabaseError, ServingError, StreamFullError
from jaxsok.serving.http.metrics import Metrics

DIMS = {"user": 4, "item": 3}
KEYS = np.arange(40)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Sets small chunks and short waits."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(streams, "RETRY_S", 0.05)
    monkeypatch.setattr(streams, "WAIT_S", 0.05)


@pytest.fixture
def url(server):
    server.client.flushall()
    return f"redis://{server.address}"


class Training(Trained):
    """A training state with a publisher; each version is a folder, whose rows state the version."""

    def __init__(self, folder, url, model="dlrm", **options):
        super().__init__(DIMS)
        self.folder, self.model, self.number = folder, model, 0
        self.publisher = streams.Publisher(url, model, **options)
        for name, dim in DIMS.items():
            self.set(name, rows_of(range(20), dim))
        self.first = self.last = self.full(folder / f"{model}-0")

    def change(self, keys=range(10, 30), erased=()):
        """Makes the next delta, unpublished."""
        self.number += 1
        for name, dim in DIMS.items():
            self.set(name, rows_of(keys, dim, version=self.number))
            self.erase(name, erased)
        self.last = self.delta(self.folder / f"{self.model}-{self.number}", self.last)
        return self.last

    def publish(self, *args, **options):
        self.publisher.publish(self.change(*args, **options))

    def all(self):
        self.number += 1
        self.last = self.full(self.folder / f"{self.model}-{self.number}")
        return self.last


def config(url, *trainings, consumer="here", **options):
    models = [
        model_of({name: (training.first, dim) for name, dim in DIMS.items()}, name=training.model, **options)
        for training in trainings
    ]
    source = {"type": "redis_stream", "brokers": url, "jaxsok": {"consumer": consumer}}
    return config_of(*models, update_source=source)


def serve(url, *trainings, **options):
    return serving.open(config(url, *trainings, **options), warm_up=False)


def serves(session, training):
    """Returns whether all keys of both tables have the rows of the dicts."""
    answer = session.lookup({name: KEYS for name in DIMS}, model=training.model)
    return all(np.array_equal(answer[name], expect(training.content[name], KEYS, 0.0, DIMS[name])) for name in DIMS)


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_changed_and_erased_keys_reach_answers(kind, request, tmp_path):
    place = request.getfixturevalue(kind)
    for node in getattr(place, "servers", [place]):
        node.client.flushall()
    url = f"redis://{place.address.split(',')[0]}"
    training = Training(tmp_path, url)
    with serve(url, training) as session:
        training.publish(erased=[0, 1])
        wait_until(lambda: serves(session, training))
        training.publish(keys=[0, 33], erased=[15])
        training.publish(keys=[15], erased=[33])
        wait_until(lambda: serves(session, training))
        wait_until(lambda: session.stats()["lag_versions"] == 0)
        stats = session.stats()
        assert stats["lag_s"] == 0.0 and stats["is_following"] and 0 < stats["delay_s"] < 60
        training.publisher.publish(training.all())
        training.publish(keys=[3])
        wait_until(lambda: serves(session, training))
    training.publisher.close()


OPTIONS = {
    "device": {},
    "cache": {"gpucacheper": 0.5, "hit_rate_threshold": 2.0},
    "host": {"gpucache": False},
    "split": {"deployed_device_list": [0, 1], "jaxsok": {"is_split": True}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_models_and_two_consumers(options, url, tmp_path):
    programs.mesh(len(options.get("deployed_device_list", [0])))  # skips the test if there are fewer devices
    trainings = [Training(tmp_path, url, model) for model in ("dlrm", "other")]
    with serve(url, *trainings, consumer="a", **options) as a, serve(url, *trainings, consumer="b", **options) as b:
        trainings[0].publish(erased=[2])
        trainings[0].publish(erased=[3])
        trainings[1].publish(erased=[4])
        for session in (a, b):
            for training in trainings:
                wait_until(lambda session=session, training=training: serves(session, training))
        for training in trainings:
            wait_until(lambda training=training: len(set(training.publisher._stream.positions().values())) == 1)
            assert set(training.publisher._stream.positions()) == {"a", "b"}


def test_a_server_that_starts_again_replays(url, server, tmp_path):
    """A restarted server holds the first export again, and `open` applies all that follows it before it returns."""
    training = Training(tmp_path, url)
    with serve(url, training) as session:
        training.publish(erased=[1])
        wait_until(lambda: serves(session, training))
        wait_until(lambda: training.publisher._stream.positions()["here"] != "0-0")  # Noted after it is served.
        position = training.publisher._stream.positions()["here"]
    training.publish(erased=[2])
    assert training.publisher._stream.positions()["here"] == position  # Those of the dead server.
    with serve(url, training) as session:
        assert serves(session, training)
        assert session.stats()["version"] == 2  # Both deltas at once.
    training.first = training.last  # An export of the current state leaves nothing to replay.
    with serve(url, training) as session:
        assert serves(session, training) and session.stats()["version"] == 1


def test_each_table_goes_on_from_what_it_holds(url, tmp_path):
    """A table that lacks versions gets them, also where another table holds them, and one of other files stays."""
    training = Training(tmp_path, url)
    versions = [training.change(erased=[number]) for number in range(3)]
    for path in versions:
        training.publisher.publish(path)
    tables = {"user": (versions[-1], 4), "item": (training.first, 3)}
    tables["other"] = write(tmp_path / "other", rows_of(range(5), 2)), 2
    given = config(url, training) | {"models": [model_of(tables)]}
    with serving.open(given, warm_up=False) as session:
        assert serves(session, training) and session.stats()["lag_versions"] == 0
        path = training.change(erased=[7])
        session.update({"user": path})
        training.publisher.publish(path)
        wait_until(lambda: serves(session, training))
        training.publish(erased=[8])
        wait_until(lambda: serves(session, training) and not session.stats()["lag_versions"])
        assert session.stats()["is_following"]


def test_what_later_full_exports_have_is_not_needed():
    """The tables are those of all versions from the first one that is needed on, and of none after it."""

    def contents(entries, names):
        found = {name: [] for name in names}
        for entry in entries:
            for name in found.keys() & set(entry.tables):
                found[name] = [*(found[name] if entry.base else ()), entry.uuid]
        return found

    rng = np.random.default_rng(3)
    for _ in range(200):
        entries = [
            streams._Entry(f"{n}-0", str(n), str(n - 1) if rng.random() < 0.5 else None, "", None, [], tables)
            for n in range(rng.integers(1, 7))
            for tables in [["user"], ["item"], ["user", "item"]][rng.integers(3) :][:1]
        ]
        start = streams._find_start(entries)
        assert contents(entries[start:], DIMS) == contents(entries, DIMS) != contents(entries[start + 1 :], DIMS)
        of_user = streams._find_start([entry for entry in entries if "user" in entry.tables], ["user"])
        users = [entry for entry in entries if "user" in entry.tables]
        assert contents(users[of_user:], ["user"]) == contents(users, ["user"])
        assert of_user == max((n for n, entry in enumerate(users) if not entry.base), default=0)


def test_full_exports_of_some_tables_hide_no_others(url, tmp_path):
    """A server that starts late applies the last full export of each table, as one that followed all along."""
    training, parts = Training(tmp_path, url), {name: Trained({name: dim}) for name, dim in DIMS.items()}
    with serve(url, training, consumer="early") as early:
        for number, name in enumerate(["user", "item", "item"], 1):
            parts[name].set(name, rows_of(range(number, 9), DIMS[name], version=number))
            training.content[name] = parts[name].content[name]
            training.publisher.publish(parts[name].full(tmp_path / f"part-{number}"))
            wait_until(lambda: serves(early, training))
        with serve(url, training, consumer="late") as late:
            assert serves(late, training)
            training.publisher.publish(training.all())
            training.content = {name: rows_of(range(20), dim) for name, dim in DIMS.items()}
            wait_until(lambda: serves(early, training) and serves(late, training))
        training.publish(keys=[3])
        wait_until(lambda: serves(early, training))
        assert len(training.publisher._stream.entries()) == 2  # What is before an export of all tables has gone.


def test_an_unfinished_version_is_never_served(url, server, tmp_path, monkeypatch):
    training = Training(tmp_path, url)
    before, pushes = {name: dict(mine) for name, mine in training.content.items()}, []

    def push(*arguments, push=streams._push):
        pushes.append(arguments)
        if len(pushes) == 3:
            raise KeyboardInterrupt
        push(*arguments)

    with serve(url, training) as session, monkeypatch.context() as patch:
        patch.setattr(streams, "_push", push)
        patch.setattr(streams.Publisher, "_forget", lambda *_: None)  # the process has ended without a cleanup
        with pytest.raises(KeyboardInterrupt):
            training.publish()
        (left,) = [key for key in server.client.keys() if server.client.type(key) == b"list"]
        assert server.client.llen(left) == 2 and 0 < server.client.ttl(left) <= streams.UNFINISHED_S
        after, training.content = training.content, before
        time.sleep(0.2)
        assert serves(session, training) and session.stats()["version"] == 1
        training.content = after
        patch.undo()
        training.publisher.publish(training.last)
        wait_until(lambda: serves(session, training))


def test_chunks_of_a_version_that_is_not_added_go(url, server, tmp_path, monkeypatch):
    """Otherwise they would take the room of later versions for as long as they live."""
    training, pushed = Training(tmp_path, url), []

    def push(payload, chunk, client, push=streams._push):
        pushed.append(payload)
        push(payload, chunk, client)
        if len(pushed) == 2:
            raise redis.exceptions.OutOfMemoryError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(streams, "_push", push)
        patched.setattr(streams, "CHUNK_BYTES", 256)
        with pytest.raises(DatabaseError, match="OutOfMemoryError"):
            training.publisher.publish(training.first)
    assert len(pushed) == 2 and not server.client.exists(*pushed)
    training.publisher.publish(training.first)
    with serve(url, training) as session:
        wait_until(lambda: serves(session, training))


def test_versions_that_failed_in_a_database_come_when_it_works_again(url, tmp_path, monkeypatch, caplog):
    """Those that were applied together are tried so again: alone, the first is refused until the update is done."""
    training = Training(tmp_path, url)
    training.publish()
    training.publish(keys=range(5, 15))
    insert, num_left = DatabaseRows.insert, 3

    def fail(self, name, keys, rows):
        nonlocal num_left
        insert(self, name, keys, rows)
        if (rows >= 1000).any() and num_left:  # of a version after the first
            num_left -= 1
            raise DatabaseError("the database is away")

    monkeypatch.setattr(DatabaseRows, "insert", fail)
    options = {
        "volatile_db": {"type": "disabled"},
        "persistent_db": {"type": "rocks_db", "path": str(tmp_path / "rows")},
    }
    with serving.open(config(url, training, gpucache=False) | options, warm_up=False) as session:
        wait_until(lambda: serves(session, training))
        training.publish(keys=[3])
        wait_until(lambda: serves(session, training))
        wait_until(lambda: session.stats()["is_following"])
    assert num_left == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "the database is away" in text]) == 1, messages


@pytest.mark.parametrize("keeps", [True, False])
def test_redis_starts_again(keeps, tmp_path):
    """After Redis loses its data, the next delta is applied if none was lost; otherwise a full export is requested."""
    with running(Server, tmp_path, *(["--appendonly", "yes", "--appendfsync", "always"] if keeps else [])) as place:
        url = f"redis://{place.address}"
        training = Training(tmp_path, url)
        with serve(url, training) as session:
            training.publish()
            wait_until(lambda: serves(session, training))
            place.kill()
            wait_until(lambda: not session.stats()["is_following"])
            with pytest.raises(DatabaseError, match=r'publish: stream "jaxsok:{dlrm}": got ConnectionError'):
                training.publisher.publish(training.change())
            place.start()
            training.publisher.publish(training.last)
            wait_until(lambda: serves(session, training))
            wait_until(lambda: session.stats()["is_following"])
            assert "here" in training.publisher._stream.positions()
            if not keeps:
                training.change()  # It is lost, with all of Redis's data.
                place.kill()
                place.start()
                training.publish()
                wait_until(lambda: session.stats()["lag_versions"] == 1)
                wait_until(lambda: not session.stats()["is_following"])


def test_redis_comes_back_with_a_clock_behind(tmp_path):
    """Versions that an empty Redis numbers from an earlier time on are applied, and not taken for old ones."""
    with running(Server, tmp_path) as place:
        url = f"redis://{place.address}"
        training = Training(tmp_path, url)
        place.client.xadd("jaxsok:{dlrm}", {"clock": "ahead"}, id=f"{int(time.time() + 3600) * 1000}-0")
        place.client.xtrim("jaxsok:{dlrm}", 0)
        with serve(url, training) as session:
            training.publish()
            wait_until(lambda: serves(session, training))
            place.kill()
            wait_until(lambda: not session.stats()["is_following"])
            place.start()
            for _ in range(2):
                training.publish()
                wait_until(lambda: serves(session, training))
            assert session.stats()["is_following"] and session.models["dlrm"].version == 4


def test_a_trimmed_stream_asks_for_a_full_export(url, tmp_path, caplog):
    training = Training(tmp_path, url, max_bytes=20_000)
    for _ in range(6):
        training.publish()  # No server has a position: old versions leave.
    there = training.publisher._stream.entries()
    assert 1 <= len(there) < 6 and sum(entry.num_bytes for entry in there) <= 20_000
    assert len(training.publisher._stream.call(lambda client: client.keys("jaxsok:{dlrm}:*"))) == len(there)
    with serve(url, training) as session:
        stats = session.stats()
        assert stats["version"] == 1 and stats["lag_versions"] == len(there) and stats["lag_s"] > 0
        assert not stats["is_following"]
        assert "were trimmed, or Session.update has set the tables back, or" in caplog.text
        training.publisher.publish(training.all())  # Such a server does not delay the publisher.
        training.publish()
        # The version is served a moment before the follower notes it.
        wait_until(lambda: serves(session, training) and session.stats()["is_following"])


def test_a_server_that_needs_another_export_takes_it_by_update(url, tmp_path):
    training = Training(tmp_path, url, max_bytes=20_000)
    for _ in range(6):
        training.publish()
    with serve(url, training) as session:
        assert session.stats()["lag_versions"]
        session.update([tmp_path / f"dlrm-{number}" for number in range(7)])  # The whole chain, where it was written.
        training.publish()
        wait_until(lambda: serves(session, training) and session.stats()["is_following"])


def test_a_full_export_by_its_path(url, tmp_path):
    """A full export that is published by its path does not pass through Redis, and later deltas rest on it."""
    training = Training(tmp_path, url, max_bytes=20_000)
    with serve(url, training) as session:
        training.publish()
        wait_until(lambda: serves(session, training))
        training.publisher.publish(training.all(), by_path=True)
        training.publish(erased=[3])
        wait_until(lambda: serves(session, training))
        # Earlier versions are of no more use.
        assert [entry.num_bytes > 0 for entry in training.publisher._stream.entries()] == [False, True]
    with serve(url, training) as session:
        assert serves(session, training)


def test_a_slow_server_holds_up_the_publisher(url, tmp_path):
    training = Training(tmp_path, url, max_bytes=20_000, timeout_s=0.2)
    training.publisher._stream.note("slow", "0-0")
    with serve(url, training) as session:
        training.publish()
        wait_until(lambda: serves(session, training))
        with pytest.raises(StreamFullError, match=r'the last one is "slow", at 0-0.* XGROUP DESTROY') as caught:
            for _ in range(6):
                training.publish()
        assert "wanted" in str(caught.value)
        before = training.publisher._stream.entries()
        training.publisher._timeout_s = 60.0
        thread = threading.Thread(target=training.publisher.publish, args=[training.last])
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()  # It waits.
        training.publisher._stream.note("slow", before[-1].id)
        thread.join(60)
        assert not thread.is_alive()
        wait_until(lambda: serves(session, training))


def test_a_version_that_never_has_room_is_refused_at_once(url, tmp_path):
    training, start = Training(tmp_path, url), time.monotonic()
    with pytest.raises(StreamFullError, match=r"got .* of [0-9]+ bytes, wanted at most max_bytes, 10; take more"):
        streams.Publisher(url, "dlrm", max_bytes=10, timeout_s=600).publish(training.change())
    assert time.monotonic() - start < 60


def test_nothing_is_sent_twice_to_a_cluster_that_hangs(cluster, monkeypatch):
    """Nodes carry out a command without an answer when they go on, and as often as it was sent."""
    from jaxsok.serving import stream_files

    monkeypatch.setattr(stream_files, "TIMEOUT_S", 0.5)
    for server in cluster.servers:
        server.client.flushall()
    with contextlib.closing(stream_files.connect(f"redis://{cluster.servers[0].address}")) as client:
        client.rpush("list", "first")
        with contextlib.ExitStack() as frozen:
            for server in cluster.servers:
                frozen.enter_context(server.frozen())
            with pytest.raises(stream_files.CAN_FAIL):
                client.rpush("list", "second")
        cluster.wait()
        wait_until(lambda: client.llen("list") > 1)
        time.sleep(0.5)
        assert client.lrange("list", 0, -1) == [b"first", b"second"]


@pytest.mark.parametrize("has_read", [True, False])
def test_a_server_follows_where_a_node_of_the_cluster_died(tmp_path, has_read):
    """Not the one that has the stream, but the one that URL and client name: a replica takes over.

    The process that reads versions has connected before, or connects then.
    """
    with running(Cluster, tmp_path, True) as cluster:
        nodes = cluster.servers[:3]
        slot = nodes[0].client.execute_command("CLUSTER KEYSLOT", "jaxsok:{dlrm}")
        named = nodes[0] if slot >= 5461 else nodes[1]
        training = Training(tmp_path, f"redis://{named.address}")
        training.publisher.publish(training.first)
        with serve(f"redis://{named.address}", training) as session:
            training.publish()
            wait_until(lambda: serves(session, training))
            for node in nodes:
                node.client.execute_command("WAIT", 1, 2000)
            if not has_read:
                session._followers["dlrm"]._fetcher.close()
            named.process.kill()
            named.process.wait()
            others = [server for server in cluster.servers if server is not named]
            num_primaries = lambda: sum(server.client.info("replication")["role"] == "master" for server in others)  # noqa: E731
            wait_until(lambda: num_primaries() == 3 and others[0].client.cluster("INFO")["cluster_state"] == "ok")
            delta = training.change()

            def is_published():
                with contextlib.suppress(DatabaseError):
                    training.publisher.publish(delta)
                    return True

            wait_until(is_published)
            wait_until(lambda: serves(session, training))
            wait_until(lambda: session.stats()["is_following"])
            wait_until(lambda: session.stats()["lag_versions"] == 0)
            assert serves(session, training)
        training.publisher.close()
        if not has_read:
            url = f"redis://{named.address},{others[0].address}"
            with serve(url, training, consumer="later") as session:  # it names the one that is gone first
                wait_until(lambda: serves(session, training))


def test_a_server_goes_on_where_redis_refuses_its_position(tmp_path, caplog):
    with running(Server, tmp_path) as server:
        url = f"redis://{server.address}"
        training = Training(tmp_path, url)
        training.publisher.publish(training.first)
        training.publish()
        server.client.execute_command("CONFIG", "SET", "min-replicas-to-write", 1)
        with serve(url, training) as session:
            assert serves(session, training)
            assert session.stats()["lag_versions"] == 0 and not session.stats()["is_following"]
            refused = [record for record in caplog.records if "their publisher does not learn it" in record.message]
            assert len(refused) == 1 and "NOREPLICAS" in refused[0].message
            server.client.execute_command("CONFIG", "SET", "min-replicas-to-write", 0)
            wait_until(lambda: session.stats()["is_following"])
            training.publish()
            wait_until(lambda: serves(session, training))
        training.publisher.close()


def test_refusals_of_redis_are_reported_without_the_bytes_of_rows(tmp_path):
    """The slot of the stream moves to another node: a transaction there is refused until it is there."""
    with running(Cluster, tmp_path) as cluster:
        slot = cluster.servers[0].client.execute_command("CLUSTER KEYSLOT", "jaxsok:{dlrm}")
        source = cluster.servers[slot * 3 // 16_384]
        target = next(server for server in cluster.servers if server is not source)
        ids = [server.client.execute_command("CLUSTER MYID") for server in (source, target)]
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        training = Training(tmp_path, f"redis://{source.address}")
        with pytest.raises(DatabaseError, match=r"publish: stream .* got \w+ of Redis") as info:
            training.publisher.publish(training.first)
        assert "ARROW" not in str(info.value) and "RPUSH" not in str(info.value) and len(str(info.value)) < 500
        training.publisher.close()


def test_versions_are_published_in_order(url, tmp_path):
    training = Training(tmp_path, url)
    first = training.change()
    second = training.change()
    for _ in range(2):  # the answer to the first attempt may have been lost
        training.publisher.publish(first)
    assert len(training.publisher._stream.entries()) == 1
    third = training.change()
    with pytest.raises(ServingError, match=r"which rests on .* publish deltas in order, or a full export"):
        training.publisher.publish(third)
    training.publisher.publish(second)
    with pytest.raises(ServingError, match="which was published, wanted the next version"):
        training.publisher.publish(first)
    training.publisher.publish(third)
    with pytest.raises(FileNotFoundError, match="publish: path"):
        training.publisher.publish(tmp_path / "nowhere")
    with pytest.raises(ServingError, match="Publisher: max_bytes: got 0"):
        streams.Publisher(url, "dlrm", max_bytes=0)


@pytest.mark.parametrize("damage", ["cut off", "one bit", "missing", "cut off, by its path"])
def test_a_damaged_folder_is_not_published(url, tmp_path, damage):
    """Nothing of it is sent; once repaired, it is published as ever, and servers go on."""
    training = Training(tmp_path, url)
    folder = pathlib.Path(training.all() if "path" in damage else training.change())
    file = next(folder.glob("table_*.arrow"))
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "one bit":
        file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    else:
        file.write_bytes(whole[: len(whole) // 2])
    with serve(url, training) as session:
        with pytest.raises(checkpoint.CorruptFileError, match=f"publish: file .*{file.name}"):
            training.publisher.publish(folder, by_path="path" in damage)
        assert not redis.Redis.from_url(url).keys("*:*:*"), "chunks"
        assert not training.publisher._stream.entries()
        file.write_bytes(whole)
        training.publisher.publish(folder, by_path="path" in damage)
        wait_until(lambda: serves(session, training))


def test_what_redis_will_never_do_is_reported_as_such(url, tmp_path):
    training = Training(tmp_path, url)
    redis.Redis.from_url(url).set(training.publisher.name, "of another type")
    with pytest.raises(DatabaseError, match=r"got ResponseError .*WRONGTYPE.* wanted it to do what it was asked"):
        training.publisher.publish(training.first)


def test_a_version_that_several_publish_at_once_is_added_once(url, tmp_path):
    """Each has sent all chunks before the first one adds the version; only the chunks of that one stay."""
    training = Training(tmp_path, url)
    training.publisher.publish(training.first)
    training.change()
    have_sent = threading.Barrier(4)

    def publish(number):
        publisher = streams.Publisher(url, "dlrm")
        make_room, waits = publisher._make_room, iter([lambda: None, have_sent.wait])

        def make_room_after_all(*args, **options):
            next(waits, lambda: None)()
            return make_room(*args, **options)

        publisher._make_room = make_room_after_all
        publisher.publish(training.last)

    with concurrent.futures.ThreadPoolExecutor(have_sent.parties) as pool:
        list(pool.map(publish, range(have_sent.parties)))
    there = training.publisher._stream.entries()
    assert [entry.base for entry in there] == [None, there[0].uuid]
    # One that has sent all when a later version is there, too.
    assert training.publisher._make_room(training.first, there[0].uuid, None, 1, is_sent=True) is None
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        assert len(client.keys("jaxsok:{dlrm}:*")) == 2
    with serve(url, training) as session:
        assert serves(session, training)


def test_deltas_become_one_version(tmp_path):
    """Several deltas become one version: links that erase and bring back keys agree with a dict."""
    rng = np.random.default_rng(3)
    training = Training(tmp_path, "redis://nowhere:1")
    for _ in range(3):
        before, links = training.last, []
        for _ in range(4):
            keys, erased = (rng.choice(40, 8, replace=False).tolist() for _ in range(2))
            links.append(training.change(keys=keys, erased=erased))
        tables = {name: (before, dim) for name, dim in DIMS.items()}
        with serving.open(config_of(model_of(tables)), warm_up=False) as session:
            with pytest.raises(ValueError, match="apply deltas in order"):
                session.update(links[::2])
            with pytest.raises(ServingError, match="got no folders"):
                session.update([])
            for empty in ("", [links[0], ""], {"user": ""}):
                with pytest.raises(ServingError, match='update: source: got "", wanted a folder'):
                    session.update(empty)
            with pytest.raises(ServingError, match="update: source: got None without a dense_file"):
                session.update(None)
            assert session.update(links) == 2
            assert serves(session, training)
            assert session.models["dlrm"].num_rows == {name: len(mine) for name, mine in training.content.items()}


def test_no_answer_mixes_versions(url, tmp_path):
    training = Training(tmp_path, url)
    keys, seen, stop = np.arange(10, 20), set(), threading.Event()

    def versions_in(answer):
        """Returns the versions that rows state in thousands."""
        return {number for name in DIMS for number in (answer[name] // 1000).astype(int).ravel().tolist()}

    def read():
        while not stop.is_set():
            seen.add(frozenset(versions_in(session.lookup({name: keys for name in DIMS}))))

    with serve(url, training) as session:
        thread = threading.Thread(target=read)
        thread.start()
        try:
            for _ in range(5):
                training.publish()
                wait_until(lambda: serves(session, training))
        finally:
            stop.set()
            thread.join()
    assert all(len(of_answer) == 1 for of_answer in seen) and len(seen) > 1


def test_damaged_entries_are_refused(url, server, tmp_path, caplog):
    training = Training(tmp_path, url)
    good = {"uuid": "0" * 32, "base": None, "payload": "0" * 16, "path": None, "files": [["manifest.json", 7]]}
    good["tables"] = ["user"]
    for wrong in ({"files": [["../x", 7]]}, {"files": [["x", -1]]}, {"uuid": "../x"}, {"payload": "x"}, {"base": 3}):
        server.client.xadd("jaxsok:{dlrm}", {"version": json.dumps(good | wrong)}, id="1-1")
        with pytest.raises(ServingError, match=r"jaxsok:{dlrm}, entry 1-1"):
            training.publisher.publish(training.first)
        server.client.delete("jaxsok:{dlrm}")
    server.client.xadd("jaxsok:{dlrm}", {"version": json.dumps(good)})
    with serve(url, training) as session:  # Its payload is missing.
        assert "manifest.json" in caplog.text and not session.stats()["is_following"]
        assert serves(session, training)
        training.publisher.publish(training.all())
        wait_until(lambda: session.stats()["is_following"])
        assert serves(session, training)


def test_files_are_written_by_a_process_that_is_started_again(url, tmp_path, caplog, monkeypatch):
    """Its command line does not show the URL, a version comes later if it is killed, and it ends with the session."""
    training = Training(tmp_path, url)
    with serve(url, training) as session:
        fetcher, pids = session._followers["dlrm"]._fetcher, []
        for _ in range(2):
            training.publish(keys=[3])
            wait_until(lambda: serves(session, training))
            pids.append(fetcher._process.pid)
            assert url not in pathlib.Path(f"/proc/{pids[-1]}/cmdline").read_text()
            os.kill(pids[-1], signal.SIGKILL)
            os.waitid(os.P_PID, pids[-1], os.WEXITED | os.WNOWAIT)
        assert pids[0] != pids[1] and "ended with -9" in caplog.text
        training.publish(keys=[5])
        wait_until(lambda: serves(session, training))
        pid = fetcher._process.pid
        (entry,) = session._followers["dlrm"]._stream.entries()[-1:]
        monkeypatch.setattr(pathlib.Path, "mkdir", lambda *_, **__: None)
        with pytest.raises(ServingError, match=f"No such file.*wanted its {entry.num_bytes} bytes written to"):
            fetcher.write_files(dataclasses.replace(entry, uuid="0" * 32))
    assert not pathlib.Path(f"/proc/{pid}").exists()
    training.publisher.close()


def test_versions_are_fetched_while_others_are_applied(url, server, tmp_path, monkeypatch):
    """Files of versions that come during an update are there at its end; then they go, whether applied or refused."""
    training = Training(tmp_path, url)
    with serve(url, training) as session:
        follower, is_begun, go = session._followers["dlrm"], threading.Event(), threading.Event()
        update = follower._served.update

        def wait(*args):
            is_begun.set()
            assert go.wait(30)
            update(*args)

        monkeypatch.setattr(follower._served, "update", wait)
        training.publish()
        assert is_begun.wait(30)
        training.publish(keys=[1, 35], erased=[20])
        training.publish(keys=[35])
        wait_until(lambda: len(follower._fetched) == 3)
        folder = follower._fetcher.folder
        server.client.delete(*server.client.keys("jaxsok:{dlrm}:*"))  # the files are not read again
        go.set()
        wait_until(lambda: serves(session, training))
        assert session.stats()["version"] <= 3, "the two that were fetched became one version"
        wait_until(lambda: not list(folder.iterdir()))

        def refuse(*_):
            raise ServingError("injected")

        monkeypatch.setattr(follower._served, "update", refuse)
        training.publish(keys=[4])
        wait_until(lambda: not session.stats()["is_following"])
        monkeypatch.setattr(follower._served, "update", update)
        wait_until(lambda: serves(session, training))
    assert not folder.exists()
    training.publisher.close()


@contextlib.contextmanager
def stopped_follower(url, training):
    """Serves without following; yields the session, its follower, which tests call, and the folder of its files."""
    with serve(url, training) as session:
        follower = session._followers["dlrm"]
        follower.close(None)
        folder = follower._fetcher.folder = training.folder / "files"
        folder.mkdir()
        yield session, follower, folder
    training.publisher.close()


def test_files_go_when_the_input_of_their_process_ends(tmp_path):
    """As when its server is killed; the signals that end a server do not end it."""
    folder = tmp_path / "files"
    (folder / "version").mkdir(parents=True)
    command = [sys.executable, "-P", streams.stream_files.__file__, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        print(json.dumps(["redis://127.0.0.1:1", "payload", [], str(folder)]), file=process.stdin, flush=True)
        assert json.loads(process.stdout.readline())[0] == "ConnectionError"  # it has begun
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None and folder.exists()
        process.communicate("")
    assert process.returncode == 0 and not folder.exists()


def test_files_of_a_version_that_is_trimmed_go(url, server, tmp_path):
    """Nothing stays of a version that is trimmed while it is read; a temporary folder that went is made again."""
    training = Training(tmp_path, url)
    with stopped_follower(url, training) as (session, follower, folder):
        training.publish()
        (entry,) = follower._stream.entries(follower._position)
        chunks = server.client.lrange(entry.payload, 0, -1)
        server.client.ltrim(entry.payload, 0, len(chunks) // 2)
        with pytest.raises(ServingError, match="it was trimmed meanwhile"):
            follower.look()
        assert not list(folder.iterdir())
        server.client.delete(entry.payload)
        server.client.rpush(entry.payload, *chunks)
        folder.rmdir()
        assert follower.look() == 1
        assert serves(session, training)


def test_a_folder_that_a_publisher_names_is_never_removed(url, server, tmp_path):
    """Also one below, or above, the folder for files of versions, whose name others can find out."""
    with stopped_follower(url, Training(tmp_path, url)) as (_, follower, folder):
        (folder / "kept").mkdir()
        entry = {"uuid": "0" * 32, "base": None, "payload": "0" * 16, "files": [], "tables": ["user"]}
        for path in (folder / "kept", f"{folder}/..", f"{folder}/kept/.."):
            server.client.xadd("jaxsok:{dlrm}", {"version": json.dumps(entry | {"path": str(path)})})
            with pytest.raises((ServingError, FileNotFoundError)):
                follower.look()
            assert (folder / "kept").is_dir()


def test_metrics_and_configuration(url, tmp_path):
    training = Training(tmp_path, url)
    given = config(url, training)
    with serving.open(given, warm_up=False) as session:
        training.publish()
        wait_until(lambda: session.stats()["delay_s"] > 0)
        assert 'updates: Redis streams, as consumer "here"' in session.report()
        text = Metrics(lambda: {"dlrm": session.stats()}).text().decode()
        for name, value in {"lag_versions": 0.0, "lag_seconds": 0.0, "is_following": 1.0}.items():
            assert f'jaxsok_stream_{name}{{model="dlrm"}} {value}' in text
        assert "jaxsok_stream_delay_seconds" in text
    for wrong in ("http://:hunter2@x", *(f"redis://:hunter2{mark}x@127.0.0.1:1" for mark in "/?#"), "redis://:1/2@x"):
        given["update_source"]["brokers"] = wrong
        with pytest.raises(ConfigError, match=r"update_source\.brokers: got something else, wanted a URL") as caught:
            serving.open(given)
        assert "hunter2" not in str(caught.value)
        with pytest.raises(ServingError, match=r"^publish: url: got something else .*, wanted a URL") as caught:
            streams.Publisher(wrong, "dlrm")
        assert "hunter2" not in str(caught.value)
    with pytest.raises(DatabaseError, match=r'Redis at "x" \(Invalid value for \'db\' in connection URL'):
        streams.Publisher("redis://:hunter2@x?db=y", "dlrm").publish(training.first)
    given["update_source"] = {"type": None, "brokers": "redis://:hunter2@x:1"}
    assert "hunter2" not in "\n".join(serving.read_config(given).summary())


def test_without_redis_the_files_are_served(tmp_path, caplog):
    training = Training(tmp_path, "redis://nowhere:1")
    with serve(f"redis://user:hunter2@127.0.0.1:{free_port()}", training) as session:
        assert serves(session, training) and not session.stats()["is_following"]
    assert "ConnectionError of Redis" in caplog.text and "hunter2" not in caplog.text


@pytest.mark.slow
def test_a_killed_server_process_goes_on(url, tmp_path):
    """After `python -m jaxsok serve` is killed, a new process has all versions when it answers."""
    training = Training(tmp_path, url)
    path, port = tmp_path / "config.json", free_port()
    path.write_text(json.dumps(config(url, training)))
    command = [sys.executable, "-m", "jaxsok", "serve", str(path), "--port", str(port)]

    def ask():
        body = json.dumps({"keys": {name: KEYS.tolist() for name in DIMS}}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models/dlrm/lookup", body)
        request.add_header("Content-Type", "application/json")
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(request) as response:
            rows = json.load(response)["rows"]
            return all(
                np.array_equal(rows[name], expect(training.content[name], KEYS, 0.0, DIMS[name])) for name in DIMS
            )

    def has_no_lag():  # as the follower saw last, when the version was served already
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            return 'jaxsok_stream_lag_versions{model="dlrm"} 0.0' in response.read().decode()

    for _ in range(2):
        training.publish()
        process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        try:
            wait_until(ask)
            training.publish()
            wait_until(ask)
            wait_until(has_no_lag)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def test_the_client_of_redis_gives_names_as_text(url):
    """`Publisher` compares positions as numbers, with names as text or bytes by the client's protocol."""
    publisher = streams.Publisher(url, "dlrm")
    publisher._stream.note("a", "5-0")
    publisher._stream.note("a", "12-3")
    assert publisher._stream.positions() == {"a": "12-3"}
    with contextlib.closing(redis.Redis.from_url(url, protocol=3)) as client:
        assert client.xinfo_groups("jaxsok:{dlrm}")[0]["last-delivered-id"] in (b"12-3", "12-3")


def test_a_publisher_that_goes_disconnects(url):
    """A publisher that nothing holds any more has closed its connections before Python collects their sockets."""
    publisher = streams.Publisher(url, "dlrm")
    assert publisher._stream.entries() == []
    client = publisher._stream._client
    nodes = [node.redis_connection for node in client.get_nodes()] if hasattr(client, "get_nodes") else [client]
    pools = [node.connection_pool for node in nodes if node is not None]
    connections = [connection for pool in pools for connection in pool._available_connections]
    assert any(connection.is_connected for connection in connections)
    del publisher
    gc.collect()
    assert not any(connection.is_connected for connection in connections)


def test_the_code_of_the_page(url, tmp_path):
    """The code of docs/freshness.md publishes versions that reach a session of its configuration."""
    training = Training(tmp_path, url)
    page = (pathlib.Path(__file__).parents[2] / "docs/freshness.md").read_text().replace("redis://127.0.0.1:6379", url)
    blocks = re.findall(r"^```py\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (source,) = re.findall(r"^```json\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    training.state, training.clock = training.collection.init(seed=0), 0  # A state without a clock of its own.
    for name, content in training.content.items():
        training.set(name, content)
    training.first = checkpoint.export_full(tmp_path / "monday", training.collection, training.state).path
    names = {"folder": tmp_path, "collection": training.collection}
    with serving.open({**config(url, training), **json.loads(f"{{{source}}}")}, warm_up=False) as session:
        for block in blocks:
            training.set("user", rows_of([len(block) % 40], 4, version=7))
            names["state"] = training.state
            exec(block, names)
            wait_until(lambda: serves(session, training))
        assert len(blocks) == 3 and set(names["publisher"]._stream.positions()) == {"server-1"}

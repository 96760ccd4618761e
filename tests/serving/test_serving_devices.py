"""One session over several devices: replicas, caches and split tables answer what dicts hold, wholly in one version."""

import threading

import jax
import numpy as np
import pytest
from serving_cases import PADDING, PLATFORMS, Trained, config_of, expect, model_of, records_of, rows_of

from jaxsok.serving import session as sessions
from jaxsok.serving.artifact import KeysInput, export_model
from jaxsok.serving.errors import ServingError
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.fused import lookup
from jaxsok.serving.model import versions

pytestmark = pytest.mark.skipif(len(jax.local_devices()) < 4, reason="needs four devices")

DIMS = {"user": 4, "item": 4, "ad": 3}
DEFAULTS = {"user": -1.0, "item": 0.5}
KEYS = np.append(np.arange(63), np.uint64(PADDING).astype(np.int64)).reshape(4, 16)
DEVICES = [0, 1, 3]
KINDS = {
    "replicas": {},
    "split": {"jaxsok": {"is_split": True, "spare_rows": 16}},
    "split with rows in host memory": {
        "embedding_cache_type": "uvm",
        "gpucacheper": 0.3,
        "jaxsok": {"is_split": True, "spare_rows": 16},
    },
    "caches": {"gpucacheper": 0.5, "hit_rate_threshold": 2.0},
}


@pytest.fixture
def trained(tmp_path):
    trained = Trained(DIMS)
    for name, dim in DIMS.items():
        trained.set(name, rows_of(range(40), dim))
    trained.path = trained.full(tmp_path / "full")
    return trained


def serve(trained, kind, devices=DEVICES, **options):
    tables = {name: (trained.path, dim) for name, dim in DIMS.items()}
    options = {"jaxsok": {"spare_rows": 16}, "max_batch_size": 16, **KINDS[kind], **options}
    limit = options.pop("memory_limit", None)
    model = model_of(tables, defaults=DEFAULTS, **{**options, "deployed_device_list": devices})
    return sessions.open(config_of(model), warm_up=False, memory_limit=limit)


def check(session, content):
    """Checks all keys, and some keys at least once for each device."""
    for keys in (KEYS, KEYS, KEYS[1:2, :3], KEYS[:0]):
        answer = session.lookup({name: keys for name in content})
        for name, mine in content.items():
            wanted = expect(mine, keys, DEFAULTS.get(name, 0.0), DIMS[name])
            np.testing.assert_array_equal(answer[name], wanted)
    assert dict(session.models["dlrm"].num_rows) == {name: len(mine) for name, mine in content.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_devices_answer_and_are_updated(trained, tmp_path, kind):
    with serve(trained, kind) as session:
        check(session, trained.content)
        asked = session.stats()
        assert asked["keys"] == 3 * (64 + 64 + 3) or kind == "caches"
        trained.set("user", rows_of(range(30, 60), 4, version=1))
        trained.erase("item", range(7))
        delta = trained.delta(tmp_path / "delta", trained.path)
        assert session.update(delta) == 2
        check(session, trained.content)
        trained.set("ad", rows_of([3, 45], 3, version=2))
        in_place = "auto" if kind == "caches" else True
        assert session.update(trained.delta(tmp_path / "next", delta), in_place=in_place) == 3
        check(session, trained.content)
        trained.erase("user", range(50))
        assert session.update(trained.full(tmp_path / "again")) == 4
        check(session, trained.content)
        assert " and ".join(str(jax.local_devices()[number]) for number in DEVICES) in session.report()


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_rows_are(trained, kind):
    with serve(trained, kind, devices=[3, 1]) as session:
        served = session._models["dlrm"]
        check(session, trained.content)
        parts = served.versions.current.parts
        if kind == "caches":
            stats = session.stats()
            for reader in served.readers:
                assert 0 < reader.cache.num_rows["user"] <= 64
            assert stats["distinct"] == sum(reader.cache.stats().distinct for reader in served.readers) > 0
            user = stats["tables"]["user"]
            assert user["hits"] + user["misses"] == user["distinct"] > 0
            return
        assert [next(iter(part.tables.stores[0].rows.devices())).id for part in parts] == [3, 1]
        rows = [sum(int(row_map.table_rows.sum()) for row_map in part.maps) for part in parts]
        if kind.startswith("split"):
            assert sum(rows) == 120 and min(rows) > 0
            assert all(part.tables.stores[0].capacity < 80 + 2 * 16 for part in parts)
        else:
            assert rows == [120, 120] and parts[0].maps is parts[1].maps
        assert served.device_bytes * 2 >= session.stats()["bytes"] >= served.device_bytes


@pytest.mark.parametrize(("kind", "in_place"), [("replicas", True), ("split", False)])
def test_no_answer_mixes_versions(trained, tmp_path, kind, in_place):
    """No answer mixes versions: rows state their version in thousands, and readers run during updates."""
    with serve(trained, kind) as session:
        stop, seen = threading.Event(), []

        def read():
            while not stop.is_set():
                answer = session.lookup({name: np.arange(20) for name in DIMS})
                versions = {int(number) for rows in answer.values() for number in np.unique(rows // 1000)}
                seen.append((answer.version, versions))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            path = trained.path
            for number in range(1, 5):
                for name, dim in DIMS.items():
                    trained.set(name, rows_of(range(20), dim, version=number))
                path = trained.delta(tmp_path / f"{number}", path)
                session.update(path, in_place=in_place)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        check(session, trained.content)
    assert all(versions == {number - 1} for number, versions in seen)


@pytest.mark.parametrize("kind", ["replicas", "split"])
def test_an_update_that_fails_leaves_all_devices(trained, tmp_path, monkeypatch, kind):
    write_lines, calls = versions.frozen.write_lines, []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return write_lines(*arguments)

    with serve(trained, kind) as session:
        before = trained.frozen_content()
        trained.set("user", rows_of(range(20), 4, version=5))
        delta = trained.delta(tmp_path / kind, trained.path)
        with monkeypatch.context() as patch:
            patch.setattr(versions.frozen, "write_lines", fails)
            with pytest.raises(RuntimeError, match="the device is gone"):
                session.update(delta, in_place=True)
        check(session, before)
        session.update(delta, in_place=True)
        check(session, trained.content)


def test_an_update_that_one_cache_refuses_leaves_all(trained, tmp_path, monkeypatch):
    """The caches that had it go back: their rows leave, and come again."""
    with serve(trained, "caches") as session:
        check(session, trained.content)
        before = trained.frozen_content()
        trained.set("user", rows_of(range(20), 4, version=5))
        delta = trained.delta(tmp_path / "delta", trained.path)
        caches = [reader.cache for reader in session._models["dlrm"].readers]
        swap = caches[1].swap

        def fails(source, changed):
            if changed is not None:
                raise RuntimeError("no memory")
            swap(source, changed)

        monkeypatch.setattr(caches[1], "swap", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            session.update(delta)
        monkeypatch.setattr(caches[1], "swap", swap)
        assert [sum(cache.num_rows.values()) for cache in caches[:2]] == [0, 0]
        for _ in DEVICES:
            check(session, before)
        session.update(delta)
        for _ in DEVICES:
            check(session, trained.content)


def test_predictions_take_turns(trained, tmp_path):
    def model(tables, inputs):
        return {"out": lookup(tables, {"user": inputs["user"]})["user"].sum(axis=-1) + 1.0}

    table = FrozenTable("user", dim=4, default=-1.0)
    records = records_of(trained.content["user"], 4)
    tables, _ = freeze_records([(table, SizedRecords(records.num_rows, [records]))])
    inputs = {"user": KeysInput("user")}
    export_model(tmp_path / "dense", model, tables, inputs, platforms=PLATFORMS)
    with serve(trained, "replicas", dense_file=str(tmp_path / "dense")) as session:
        keys = np.arange(30, 46)
        wanted = expect(trained.content["user"], keys, -1.0, 4).sum(axis=-1) + 1
        for _ in DEVICES:
            np.testing.assert_allclose(session.predict({"user": keys})["out"], wanted)
    with pytest.raises(ServingError, match=r"dense_file: .* got a dense model over tables that are split"):
        serve(trained, "split", dense_file=str(tmp_path / "dense"))


def test_room_is_that_of_the_fullest_device(trained):
    """The fullest device decides whether tables fit: each of three devices takes about a third of a split table."""
    with serve(trained, "replicas") as session:
        each = session._models["dlrm"].device_bytes
    with pytest.raises(ServingError, match="memory: got"):
        serve(trained, "replicas", memory_limit=each - 100)
    with serve(trained, "split", memory_limit=each - 100, jaxsok={"is_split": True}) as session:
        check(session, trained.content)

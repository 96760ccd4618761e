"""Updates from a folder: which folders a server that watches one applies, in which order, and what it leaves out."""

import asyncio
import functools
import json
import pathlib
import shutil
import tempfile
import zlib

import httpx
import numpy as np
import server_cases as cases
from serving_cases import Trained, config_of, model_of, rows_of, write
from waiting import wait_until

from jaxsok import serving
from jaxsok.serving.http import server, watch


def hps_folder(path):
    """Makes a folder in the form that `session.update` takes; the contents of its files do not matter here."""
    (path / "user").mkdir(parents=True)
    (path / "user" / "key").write_bytes(b"")
    (path / "user" / "emb_vector").write_bytes(b"")


@functools.cache
def _manifest_of(kind):
    """Returns the manifest of a real export of the table "user", without its checksum."""
    trained = Trained({"user": 2})
    trained.set("user", rows_of(range(4), 2))
    with tempfile.TemporaryDirectory() as folder:
        path = trained.full(f"{folder}/full")
        if kind == "delta":
            path = trained.delta(f"{folder}/delta", path)
        body = json.loads(pathlib.Path(path, "manifest.json").read_text())
    return {name: value for name, value in body.items() if name != "checksum"}


def export(path, kind):
    """Writes a manifest alone, with the checksum that docs/checkpoint_format.md describes."""
    body = {**_manifest_of(kind), "uuid": path.name}
    checksum = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({**body, "checksum": checksum}))


class Updated(cases.Session):
    """A session that records its updates; a delta follows the export of the number before it."""

    def __init__(self, models=("ranker", "tables_only")):
        super().__init__()
        self._versions = dict.fromkeys(models, 1)
        self.sources, self.refused = [], set()

    def update(self, source=None, *, model=None, dense_file=None):
        name = source and pathlib.Path(source).name
        if name in self.refused:
            raise ValueError(f"{name} does not fit")
        self.sources.append((model, name, dense_file and pathlib.Path(dense_file).name))
        return super().update(source, model=model)


def test_watched_folders_are_applied_in_order(tmp_path):
    session, seen = Updated(["ranker"]), []
    watcher = watch.Watcher(session, tmp_path, observe=lambda model, result: seen.append(result))
    assert watcher.look() == 0
    export(tmp_path / "step-8", "full")
    export(tmp_path / "step-9", "full")
    export(tmp_path / "step-10-delta", "delta")
    export(tmp_path / "step-11-delta", "delta")
    export(tmp_path / "step-12-delta.writing", "delta")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    assert watcher.look() == 3
    assert [name for _, name, _ in session.sources] == ["step-9", "step-10-delta", "step-11-delta"]
    assert sorted(seen) == ["applied"] * 3 + ["skipped"]
    assert watcher.look() == 0, "applied twice"
    (tmp_path / "step-12-delta.writing").rename(tmp_path / "step-12-delta")
    hps_folder(tmp_path / "step-13")
    assert watcher.look() == 1 and session.sources[-1][1] == "step-13"


def test_folders_with_the_last_of_a_table_or_of_the_dense_model_are_applied(tmp_path):
    """However many folders come between two looks: what is served is that of a server that took them one by one."""
    rng = np.random.default_rng(5)
    for case in range(40):
        folder, contents = tmp_path / str(case), {}
        sessions = [Parts(), Parts()]
        folder.mkdir()
        watchers = [watch.Watcher(session, folder) for session in sessions]
        for number in range(rng.integers(1, 8)):
            parts = [part for part in ("user", "item", "dense") if rng.random() < 0.5] or ["dense"]
            path = folder / f"{number}.tmp"
            for part in parts:
                below = path / "tables" / part if "dense" in parts and part != "dense" else path / part
                below.mkdir(parents=True)
                (below / ("model.json" if part == "dense" else "emb_vector")).write_text(str(number))
                contents[part] = str(number)
            path.rename(folder / str(number))
            watchers[0].look()
        watchers[1].look()
        assert [session.served for session in sessions] == [contents] * 2
    session = Parts()
    session.refused.add("1")
    for number in range(2):
        (tmp_path / "refused" / str(number) / "user").mkdir(parents=True)
        (tmp_path / "refused" / str(number) / "user" / "emb_vector").write_text(str(number))
    assert watch.Watcher(session, tmp_path / "refused").look() == 1 and session.served == {"user": "0"}


class Parts(cases.Session):
    """A session that serves the contents of the files that it was updated from."""

    def __init__(self):
        super().__init__()
        self._versions = {"ranker": 1}
        self.served, self.refused = {}, set()

    def update(self, source=None, *, model=None, dense_file=None):
        path = pathlib.Path(source or dense_file)
        if path.name in self.refused or path.parent.name in self.refused:
            raise ValueError("refused")
        if source:
            self.served |= {file.parent.name: file.read_text() for file in path.glob("*/emb_vector")}
        if dense_file:
            self.served["dense"] = (pathlib.Path(dense_file) / "model.json").read_text()
        return 2


def test_what_is_refused_is_tried_again(tmp_path, monkeypatch, caplog):
    """A delta without its base is tried again, a damaged full export does not block deltas, and each is logged once."""
    session = Updated(["ranker"])
    watcher = watch.Watcher(session, tmp_path)
    export(tmp_path / "1-full", "full")
    session.refused = {"1-full", "3-delta"}
    export(tmp_path / "2-delta", "delta")
    export(tmp_path / "3-delta", "delta")
    assert watcher.look() == 1 and session.sources[-1][1] == "2-delta"
    assert watcher.look() == 0
    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    assert watcher.look() == 0
    assert caplog.text.count("3-delta does not fit") == 1
    session.refused = set()
    assert watcher.look() == 1 and session.sources[-1][1] == "3-delta", "what stands before what is served stays away"
    (tmp_path / "4-delta").mkdir()
    (tmp_path / "4-delta" / "manifest.json").write_text("{")
    session.refused = {"4-delta"}
    assert watcher.look() == 0
    path = tmp_path / "4-delta"
    assert path in watcher._refused
    shutil.rmtree(path)
    assert watcher.look() == 0 and path not in watcher._refused


def test_a_late_export_does_not_turn_back(tmp_path, caplog):
    """A late export does not undo a newer one: it is skipped, with one line in the log."""
    session, seen = Updated(["ranker"]), []
    watcher = watch.Watcher(session, tmp_path, observe=lambda model, result: seen.append(result))
    for name, kind in (("full-9", "full"), ("full-10", "full"), ("full-11-delta", "delta")):
        export(tmp_path / name, kind)
        assert watcher.look() == 1
    export(tmp_path / "full-08", "full")
    export(tmp_path / "full-10-delta", "delta")
    assert watcher.look() == 0 == watcher.look()
    assert seen == ["applied"] * 3 + ["skipped"] * 2
    assert caplog.text.count("full-08 stands before") == 1
    export(tmp_path / "full-12", "full")
    assert watcher.look() == 1
    assert [name for _, name, _ in session.sources] == ["full-9", "full-10", "full-11-delta", "full-12"]


def test_what_cannot_be_read_stops_no_other(tmp_path, monkeypatch, caplog):
    """A folder that cannot be read blocks neither other folders, nor other models, nor the start."""
    session = Updated()
    for model in ("ranker", "tables_only"):
        export(tmp_path / model / "1", "full")
        export(tmp_path / model / "2", "full")
    read_export = watch._read_export

    def broken(path):
        if path == tmp_path / "ranker" / "2":
            raise PermissionError(13, "not allowed", str(path))
        return read_export(path)

    monkeypatch.setattr(watch, "_read_export", broken)
    with cases.serving(session, watch=tmp_path) as found, httpx.Client(base_url=found.address) as client:
        assert session.sources == [("ranker", "1", None), ("tables_only", "2", None)]
        samples = cases.samples_of(client.get("/metrics").text)
        assert samples["jaxsok_watched_updates_total", "ranker", "refused"] == 1
        assert caplog.text.count("not allowed") == 1
    monkeypatch.setattr(watch, "_read_export", read_export)
    watcher = watch.Watcher(session, tmp_path)
    shutil.rmtree(tmp_path / "ranker")
    (tmp_path / "ranker").symlink_to("ranker")
    export(tmp_path / "tables_only" / "3", "full")
    assert watcher.look() == 1 and session.sources[-1] == ("tables_only", "3", None)
    shutil.rmtree(tmp_path / "tables_only")
    (tmp_path / "ranker").unlink()
    tmp_path.rmdir()
    session = Updated(["ranker"])
    app = server.App(session, watch=tmp_path.parent)
    app._watcher.folder = tmp_path
    asyncio.run(_live(app))
    assert str(tmp_path) in caplog.text


async def _live(app):
    async with app.asgi.router.lifespan_context(app.asgi):
        assert app.is_ready


def test_tables_that_are_served_already_are_not_read_again_for_a_dense_model(tmp_path):
    session = Updated(["ranker"])
    watcher = watch.Watcher(session, tmp_path)
    for number, held in enumerate(({}, {"user": "tables"}, {"user": "other"})):
        session.exports = held
        export(tmp_path / str(number) / "tables", "full")
        (tmp_path / str(number) / "dense").write_bytes(b"")
        assert watcher.look() == 1
    assert session.sources == [("ranker", name, "dense") for name in ("tables", None, "tables")]


def test_tables_and_model_together_and_by_model(tmp_path):
    """Each of several models is updated from its own folder, tables and dense model together."""
    session = Updated()
    export(tmp_path / "ranker" / "1" / "tables", "full")
    (tmp_path / "ranker" / "1" / "dense").write_bytes(b"")
    export(tmp_path / "of_nobody" / "1", "full")
    with cases.serving(session, watch=tmp_path) as found, httpx.Client(base_url=found.address) as client:
        assert client.get("/v1/models/ranker").json()["version"] == 2, (
            "what is there is applied before the first request"
        )
        assert session.sources == [("ranker", "tables", "dense")]
        export(tmp_path / "tables_only" / "1", "full")
        wait_until(lambda: client.get("/v1/models/tables_only").json()["version"] > 1)
        samples = cases.samples_of(client.get("/metrics").text)
        assert samples["jaxsok_watched_updates_total", "applied", "tables_only"] == 1


# With a session of files ---------------------------------------------------------------------------------------------


def opened(tmp_path, tables=("user", "item")):
    """Returns a session over HPS files with zeros, a watcher of the empty folder `watched`, and what it observes."""
    for table in tables:
        write(tmp_path / "first" / table, rows_of(range(4), 2, 0))
    model = model_of({table: (tmp_path / "first" / table, 2) for table in tables})
    session, seen = serving.open(config_of(model), warm_up=False), []
    (tmp_path / "watched").mkdir()
    return (
        session,
        watch.Watcher(session, tmp_path / "watched", observe=lambda model, result: seen.append(result)),
        seen,
    )


def versions_of(session):
    """Returns by table which folder its rows are of: `rows_of` writes the number of the version into them."""
    tables = session.models["dlrm"].tables
    return {table: int(session.lookup({table: np.array([0])})[table][0, 0]) // 1000 for table in tables}


def test_the_export_that_is_served_already_is_not_applied_again(tmp_path):
    """A server is opened with the first folder of those that it watches; a copy of it under a later name turns back."""
    trained, folder = Trained({"user": 2, "item": 2}), tmp_path / "watched"
    path = None
    for number, name in enumerate(("1", "2-delta", "3-delta")):
        for table in ("user", "item"):
            trained.set(table, rows_of([number], 2, number))
        path = trained.delta(folder / name, path) if number else trained.full(folder / name)
    model = model_of({table: (folder / "1", 2) for table in ("user", "item")})
    with serving.open(config_of(model), warm_up=False) as session:
        seen, sources, update = [], [], session.update

        def record(source, **options):
            sources.append(pathlib.Path(source).name)
            return update(source, **options)

        session.update = record
        watcher = watch.Watcher(session, folder, observe=lambda model, result: seen.append(result))
        assert watcher.look() == 2 and sources == ["2-delta", "3-delta"] and seen == ["skipped", "applied", "applied"]
        found = session.lookup({"user": np.array([0, 1, 2])})["user"]
        np.testing.assert_array_equal(found, [rows_of([key], 2, key)[key] for key in range(3)])
        shutil.copytree(folder / "1", folder / "4")
        assert watcher.look() == 1 and sources[-1] == "4"
        assert (session.lookup({"user": np.array([1])})["user"] != found[1]).any()
        shutil.copytree(folder / "1", folder / "5")
        assert watcher.look() == 0 and seen[3:] == ["applied", "skipped"]


def test_what_the_deltas_rest_on_that_a_server_was_opened_with_is_not_applied(tmp_path):
    """It would turn back; a copy of it that comes later does so."""
    trained, folder, path = Trained({"user": 2}), tmp_path / "watched", None
    other = Trained({"item": 2})
    for number in range(5):
        trained.set("user", rows_of([number], 2, number))
        path = trained.delta(folder / str(number + 1), path) if number else trained.full(folder / "1")
    shutil.move(folder / "5", tmp_path / "5")
    other.set("item", rows_of([0], 2))
    tables = {"user": (folder / "4", 2), "item": (other.full(tmp_path / "item"), 2)}
    other.set("item", rows_of([0], 2, 1))
    other.full(folder / "0")  # applied first
    with serving.open(config_of(model_of(tables)), warm_up=False) as session:
        seen = []
        watcher = watch.Watcher(session, folder, observe=lambda model, result: seen.append(result), interval_s=0.01)
        watcher.start()
        assert watcher.has_looked.wait(20)
        assert seen == ["applied", *["skipped"] * 4] and session.stats()["version"] == 2
        shutil.move(tmp_path / "5", folder / "5")
        wait_until(lambda: seen[5:] == ["applied"])
        keys = {"user": np.arange(5)}
        np.testing.assert_array_equal(session.lookup(keys)["user"], [rows_of([key], 2, key)[key] for key in range(5)])
        shutil.copytree(folder / "1", tmp_path / "copy")
        shutil.move(tmp_path / "copy", folder / "6")
        wait_until(lambda: seen[6:] == ["applied"])
        assert (session.lookup(keys)["user"][1:] != rows_of([1], 2, 1)[1]).all()
        watcher.close()


def test_a_name_that_was_taken_away_may_come_back(tmp_path):
    """Its new content is applied, unless a later folder was since."""
    session, watcher, seen = opened(tmp_path)
    with session:
        for version in (1, 2):
            for table in ("user", "item"):
                write(tmp_path / "watched" / "now" / table, rows_of(range(4), 2, version))
            assert watcher.look() == 1 and set(versions_of(session).values()) == {version}
            assert watcher.look() == 0
            shutil.rmtree(tmp_path / "watched" / "now")
            assert watcher.look() == 0
        for name, version in (("then", 3), ("now", 4)):
            for table in ("user", "item"):
                write(tmp_path / "watched" / name / table, rows_of(range(4), 2, version))
            watcher.look()
        assert set(versions_of(session).values()) == {3} and seen == ["applied"] * 3 + ["skipped"]


def test_what_only_a_refused_folder_replaces_is_applied(tmp_path):
    """Three appear together, and the last is refused: the first, which it would have replaced, is applied."""
    session, watcher, seen = opened(tmp_path)
    write(tmp_path / "watched/1/user", rows_of(range(4), 2, 1))
    write(tmp_path / "watched/2/item", rows_of(range(4), 2, 2))
    write(tmp_path / "watched/3/user", rows_of(range(4), 3, 3))  # of another dim
    assert watcher.look() == 2
    assert versions_of(session) == {"user": 1, "item": 2}
    assert sorted(seen) == ["applied", "applied", "refused"]


def test_a_refused_folder_is_applied_when_it_is_repaired(tmp_path, monkeypatch):
    """Also if a later one was applied meanwhile: with the tables that this did not bring."""
    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    session, watcher, seen = opened(tmp_path)
    for table in ("user", "item"):
        write(tmp_path / "watched/1" / table, rows_of(range(4), 3, 1))
    assert watcher.look() == 0
    write(tmp_path / "watched/2/item", rows_of(range(4), 2, 2))
    assert watcher.look() == 1 and versions_of(session) == {"user": 0, "item": 2}
    shutil.rmtree(tmp_path / "watched/1")
    for table in ("user", "item"):
        write(tmp_path / "watched/1" / table, rows_of(range(4), 2, 1))
    assert watcher.look() == 1 and versions_of(session) == {"user": 1, "item": 2}
    assert watcher.look() == 0 and seen == ["refused", "applied", "applied"]


def test_parts_of_a_refused_export_are_applied_later(tmp_path, monkeypatch):
    """The same with exports: of a full one that is repaired only the table is applied that has nothing newer."""
    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    session, watcher, _ = opened(tmp_path)
    trained = Trained({"user": 2, "item": 2})
    for version in (1, 2):
        for table in ("user", "item"):
            trained.set(table, rows_of(range(4), 2, version))
        trained.full(tmp_path / f"export-{version}")
    shutil.copytree(tmp_path / "export-1", tmp_path / "watched/1")
    manifest = (tmp_path / "watched/1/manifest.json").read_bytes()
    for path in (tmp_path / "watched/1").rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            path.write_bytes(path.read_bytes()[:-1])
    assert watcher.look() == 0
    write(tmp_path / "watched/2/item", rows_of(range(4), 2, 2))
    assert watcher.look() == 1
    shutil.rmtree(tmp_path / "watched/1")
    shutil.copytree(tmp_path / "export-1", tmp_path / "watched/1")
    assert (tmp_path / "watched/1/manifest.json").read_bytes() == manifest
    assert watcher.look() == 1 and versions_of(session) == {"user": 1, "item": 2}


def test_names_of_folders_and_tables(tmp_path):
    """Digits of other scripts in a name stop nothing, and tables may have the names of the layout."""
    session, watcher, seen = opened(tmp_path, ("dense", "tables"))
    (tmp_path / "watched/³①").write_text("")
    write(tmp_path / "watched/1/dense", rows_of(range(4), 2, 1))
    assert watcher.look() == 1
    for table in ("dense", "tables"):
        write(tmp_path / "watched/2" / table, rows_of(range(4), 2, 2))
    write(tmp_path / "watched/3/tables", rows_of(range(4), 2, 3))
    assert watcher.look() == 2 and versions_of(session) == {"dense": 2, "tables": 3}
    assert seen == ["applied"] * 3

"""Updates while serving: every reader sees whole versions that equal the dicts; a failure leaves the served version."""

import concurrent.futures
import dataclasses
import gc
import pathlib
import signal
import threading
import time
import weakref

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import stateful
from serving_cases import PLATFORMS, Trained, config_of, expect, model_of, rows_of, write
from waiting import wait_until

import jaxsok
from jaxsok import checkpoint, host_limits
from jaxsok.interchange import files, hps
from jaxsok.serving import folders, frozen
from jaxsok.serving.artifact import ArrayInput, KeysInput, export_model
from jaxsok.serving.cache import programs, stores
from jaxsok.serving.errors import ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable, freeze_records
from jaxsok.serving.fused import lookup
from jaxsok.serving.model import readers, served, store_plans, versions
from jaxsok.serving.session import open

DIMS = {"user": 4, "item": 4, "ad": 3}
DEFAULTS = {"user": -1.0, "item": 0.5}
KEYS = np.arange(64)
IN_PLACE = [False, True]
UVM = {"embedding_cache_type": "uvm", "gpucacheper": 0.3}


def open_with(tables, **options):
    limit = options.pop("memory_limit", None)
    model = model_of(tables, defaults=DEFAULTS, max_batch_size=16, **options)
    return open(config_of(model), warm_up=False, memory_limit=limit)


def check(session, content):
    """Checks all keys of all tables, in one answer."""
    answer = session.lookup({name: KEYS for name in content})
    for name, mine in content.items():
        np.testing.assert_array_equal(answer[name], expect(mine, KEYS, DEFAULTS.get(name, 0.0), DIMS[name]))
    model = session.models["dlrm"]
    assert answer.version == model.version == session.stats()["version"]
    assert dict(model.num_rows) == {name: len(mine) for name, mine in content.items()}


@pytest.fixture
def trained(tmp_path):
    """Returns a state, its full export, and a session that serves it with spare rows."""
    trained = Trained(DIMS)
    for name, dim in DIMS.items():
        trained.set(name, rows_of(range(20), dim))
    trained.path = trained.full(tmp_path / "full")
    return trained


def serve(trained, **options):
    options = {"jaxsok": {"spare_rows": 16}, **options}
    return open_with({name: (trained.path, dim) for name, dim in DIMS.items()}, **options)


# Versions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_place", "tier"),
    [(False, {}), (True, {}), ("auto", {}), (True, UVM), ("auto", UVM), ("auto", UVM | {"gpucacheper": 0})],
)
def test_deltas_and_full_exports(trained, tmp_path, in_place, tier):
    with serve(trained, **tier) as session:
        check(session, trained.content)
        trained.set("user", rows_of(range(15, 25), 4, version=1))
        trained.erase("user", [0, 1])
        trained.erase("ad", [3])
        delta = trained.delta(tmp_path / "delta", trained.path)
        assert session.update(delta, in_place=in_place) == 2
        check(session, trained.content)
        trained.set("ad", rows_of([3, 40], 3, version=2))
        assert session.update(trained.delta(tmp_path / "next", delta), in_place=in_place) == 3
        check(session, trained.content)
        trained.erase("item", range(10))
        trained.set("item", rows_of(range(30, 40), 4, version=3))
        assert session.update(trained.full(tmp_path / "again"), in_place=in_place) == 4
        check(session, trained.content)
        stats = session.stats()
        assert (stats["updates"], stats["in_place_updates"]) == (3, 3 if in_place is True or tier else 0)
        assert set(stats["source"].values()) == {str(tmp_path / "again")}


@pytest.mark.parametrize("in_place", IN_PLACE)
@pytest.mark.parametrize("held_bytes", [0, folders.HELD_BYTES])
def test_several_deltas_at_once(trained, tmp_path, monkeypatch, in_place, held_bytes):
    """Rows that change again, go, and come back between deltas: of each key the last delta decides."""
    monkeypatch.setattr(folders, "HELD_BYTES", held_bytes)
    rng, last, number = np.random.default_rng(0), trained.path, 0
    with serve(trained) as session:
        for num_deltas in (4, 1, 6):
            deltas = []
            for _ in range(num_deltas):
                number += 1
                for name, dim in DIMS.items():
                    trained.set(name, rows_of(rng.choice(30, 12, replace=False).tolist(), dim, version=number))
                    trained.erase(name, rng.choice(30, 8, replace=False).tolist())
                deltas.append(last := trained.delta(tmp_path / f"delta{number}", last))
            session.update(deltas, in_place=in_place)
            check(session, trained.content)


def test_rows_that_the_device_reads_in_host_memory(trained, tmp_path):
    """They are counted where they lie, changed there alone, and cannot outgrow their memory."""
    with serve(trained, **UVM) as session, serve(trained) as on_device:
        stores = session._models["dlrm"].versions.current.tables.stores
        rows = {store.rows.shape[1]: (store.rows.shape[0], store.capacity) for store in stores}
        assert rows == {4: (12, 72), 3: (6, 36)}  # 0.3 of 20 rows of each table; 16 are spare
        stats = session.stats()
        assert on_device.stats()["bytes"] - stats["bytes"] == 60 * 16 + 30 * 12
        assert stats["host_bytes"] - on_device.stats()["host_bytes"] == 60 * 16 + 30 * 12
        with pytest.raises(ServingError, match=r"in_place: got False for model .* in host memory \(uvm\)"):
            session.update(trained.path, in_place=False)
        trained.set("user", rows_of(range(20, 60), 4, version=1))
        with pytest.raises(
            ServingError, match="wanted at most 72 to update in place; open with more spare_rows"
        ) as caught:
            session.update(trained.delta(tmp_path / "delta", trained.path))
        assert "copy" not in str(caught.value)
        check(session, {name: rows_of(range(20), dim) for name, dim in DIMS.items()})


def on_device(session):
    """Returns the keys of each table whose rows lie on the device."""
    part, found = session._models["dlrm"].versions.current.parts[0], {}
    for name, (s, number) in part.tables.spec.places.items():
        keys, rows = part.maps[s].keys_of(number)
        found[name] = set(keys[rows < part.tables.stores[s].rows.shape[0]].tolist())
    return found


def test_the_rows_used_most_lie_on_the_device_and_stay_there(tmp_path):
    """HPS's files tell how often keys were used; a full update keeps the places of the rows that stay."""
    content = {name: rows_of(range(20), dim) for name, dim in DIMS.items()}
    tables = {name: (write(tmp_path / name, mine), DIMS[name]) for name, mine in content.items()}
    for folder, _ in tables.values():
        (pathlib.Path(folder) / "meta").write_bytes(np.arange(20, dtype="<i8").tobytes())
    with open_with(tables, **UVM) as session:
        assert on_device(session) == {name: set(range(14, 20)) for name in DIMS}
        for name, dim in DIMS.items():
            content[name] = rows_of(range(10, 20), dim, version=1)
            write(tmp_path / "next" / name, content[name])
        session.update(tmp_path / "next")
        check(session, content)
        assert on_device(session) == {name: set(range(14, 20)) for name in DIMS}


def test_memory_of_rows_that_the_device_reads(trained, monkeypatch):
    """The host must have room for them; spare rows take none of the device."""
    with serve(trained, **UVM) as session:
        needed = session.stats()["bytes"]
    with serve(trained, memory_limit=needed, **UVM):
        pass
    with pytest.raises(ServingError, match="for its tables"):
        serve(trained, memory_limit=needed // 2, **UVM)
    monkeypatch.setattr(host_limits, "available_bytes", lambda *_: 30 * 16)
    with pytest.raises(ServingError, match=r"got 480 bytes free .* wanted 1320 for rows that the device reads in host"):
        serve(trained, **UVM)


@pytest.mark.parametrize("tier", [UVM, {}], ids=["uvm", "device"])
def test_an_update_in_place_needs_room_for_its_rows_on_the_host(trained, monkeypatch, tier):
    """It holds them twice there, as they were and as they will be; where there is no room, nothing changes."""
    before = trained.frozen_content()
    trained.set("user", rows_of([3, 15, 16], 4, version=1))
    delta = trained.delta(trained.path + "-delta", trained.path)
    after, held = trained.frozen_content(), 2 * 3 * 4 * 4
    with serve(trained, **tier) as session:
        short = dataclasses.replace(versions._HOST, free=lambda: held - 1)
        message = rf"update: .* memory: got {held - 1} bytes free on the host, wanted {held} for the changed rows"
        with monkeypatch.context() as patch, pytest.raises(ServingError, match=message):
            patch.setattr(versions, "_HOST", short)
            session.update(delta, in_place=True)
        check(session, before)
        session.update(delta, in_place=True)
        check(session, after)


@pytest.mark.parametrize("in_place", IN_PLACE)
def test_hps_directories(tmp_path, in_place):
    """HPS directories update by a mapping or by a folder of directories; tables without one stay."""
    content = {name: rows_of(range(10, 30), dim) for name, dim in DIMS.items()}
    tables = {name: (write(tmp_path / "a" / name, mine), DIMS[name]) for name, mine in content.items()}
    with open_with(tables, jaxsok={"spare_rows": 8}) as session:
        content["item"] = rows_of(range(25, 50), 4, version=1)
        session.update({"item": write(tmp_path / "b" / "item", content["item"])}, in_place=in_place)
        check(session, content)
        for name in ("user", "ad"):
            content[name] = rows_of(range(5), DIMS[name], version=2)
            write(tmp_path / "c" / name, content[name])
        session.update(tmp_path / "c", in_place=in_place)
        check(session, content)
        assert session.stats()["source"]["item"] == str(tmp_path / "b" / "item")
        with pytest.raises(ServingError, match="which does not name its table, wanted a mapping"):
            session.update(tmp_path / "c" / "user")
        with pytest.raises(UnknownTableError, match="table: got 'usr'"):
            session.update({"usr": tmp_path / "c" / "user"})
        with pytest.raises(FileNotFoundError):
            session.update(tmp_path / "nowhere")
        with pytest.raises(ServingError, match="in_place: got 3"):
            session.update(tmp_path / "c", in_place=3)
        check(session, content)


def test_an_hps_directory_goes_before_those_in_it(tmp_path):
    """An HPS directory of a model with one table is read itself, not a folder in it that has the table's name."""
    content = {"user": rows_of(range(10), 4)}
    with open_with({"user": (write(tmp_path / "a", content["user"]), 4)}) as session:
        content["user"] = rows_of(range(5), 4, version=1)
        write(tmp_path / "b" / "user", rows_of(range(5), 4, version=2))
        session.update(write(tmp_path / "b", content["user"]))
        check(session, content)


def test_what_does_not_change_is_shared(trained, tmp_path):
    """Copy on write shares all arrays of an unchanged store, and the rows of a store that only loses keys."""
    with serve(trained) as session:
        versions = session._models["dlrm"].versions
        trained.erase("ad", [3])
        before = versions.current.tables
        session.update(trained.delta(tmp_path / "delta", trained.path), in_place=False)
        after = versions.current.tables
        store = before.spec.places["user"][0]
        assert after.stores[store] is before.stores[store]
        ad = before.spec.places["ad"][0]
        assert after.stores[ad].rows is before.stores[ad].rows
        assert after.stores[ad].index is not before.stores[ad].index
        check(session, trained.content)


def test_a_version_grows(trained, tmp_path):
    """A copied version has room for any number of keys; an update in place, for as many as there are spare rows."""
    with serve(trained, jaxsok={"spare_rows": 4}) as session:
        trained.set("ad", rows_of(range(20, 25), 3, version=1))
        delta = trained.delta(tmp_path / "delta", trained.path)
        before = trained.frozen_content() | {"ad": rows_of(range(20), 3)}
        with pytest.raises(
            ServingError, match=r'rows: got 25 for the tables "ad", wanted at most 24 to update in place'
        ):
            session.update(delta, in_place=True)
        check(session, before)
        session.update(delta)
        check(session, trained.content)
        assert session._models["dlrm"].versions.current.tables.stores[1].capacity >= 29


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("in_place", IN_PLACE)
def test_rows_of_other_dtypes(trained, tmp_path, dtype, in_place):
    """An updated table of any dtype has the same bits as a table that was opened from the update."""
    if dtype in ("int8", "float8_e4m3fn"):
        pytest.importorskip("jaxsok.serving.quantize")
    own = {"row_dtype": dtype, "spare_rows": 16}
    with serve(trained, jaxsok=own) as session:
        trained.set("user", rows_of(range(10, 30), 4, version=1))
        trained.erase("item", range(5))
        delta = trained.delta(tmp_path / "delta", trained.path)
        session.update(delta, in_place=in_place)
        answer = session.lookup({name: KEYS for name in DIMS})
    trained.path = delta
    with serve(trained, jaxsok=own) as other:
        for name, rows in other.lookup({name: KEYS for name in DIMS}).items():
            assert rows.tobytes() == answer[name].tobytes()


def test_new_versions_lie_where_the_first_one_lay(tmp_path):
    """New versions stay on the device of the first, also with all rows replaced, not on the default device."""
    device = jax.devices()[-1]
    folder = write(tmp_path / "first", rows_of(range(10), 4))
    config = config_of(model_of({"user": (folder, 4)}, jaxsok={"row_dtype": "int8"}))
    with open(config, device, warm_up=False) as session:
        for number, size in enumerate((10, 300)):
            session.update({"user": write(tmp_path / str(number), rows_of(range(size), 4))}, in_place=False)
            store = session._models["dlrm"].versions.current.tables.stores[0]
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(store))


# Refusals ------------------------------------------------------------------------------------------------------------


def test_lineage(trained, tmp_path):
    """A delta must follow the served version: not twice, not with a gap, not over HPS directories."""
    with serve(trained) as session:
        paths = [trained.path]
        for number in range(1, 3):
            trained.set("user", rows_of(range(5), 4, version=number))
            paths.append(trained.delta(tmp_path / f"delta{number}", paths[-1]))
        with pytest.raises(
            ServingError, match=r"delta2\", which rests on .*, but the table holds .*apply deltas in order"
        ):
            session.update(paths[2])
        session.update(paths[1])
        with pytest.raises(ServingError, match="it was applied already"):
            session.update(paths[1])
        session.update(paths[2])
        check(session, trained.content)
        session.update({"ad": write(tmp_path / "ad", trained.content["ad"])})
        trained.set("user", rows_of(range(5), 4, version=9))
        before = trained.delta(tmp_path / "delta3", paths[2])
        with pytest.raises(ServingError, match=r'table "ad": source: .* but the table holds no export'):
            session.update(before)
        session.update({name: before for name in ("user", "item")})
        check(session, trained.content)
    trained.path = paths[2]  # A session that opens a chain continues with its next link.
    with serve(trained) as session:
        session.update(before)
        check(session, trained.content)


@pytest.mark.parametrize("in_place", IN_PLACE)
@pytest.mark.parametrize("harm", ["damaged", "odd", "dim", "twice", "unknown"])
def test_bad_sources(tmp_path, in_place, harm):
    """If the second table cannot be read, the first has not changed either."""
    content = {name: rows_of(range(20), dim) for name, dim in DIMS.items()}
    tables = {name: (write(tmp_path / name, mine), DIMS[name]) for name, mine in content.items()}
    with open_with(tables) as session:
        kind = ServingError
        if harm in ("damaged", "dim", "unknown"):
            trained = Trained({"user": 4, "ad" if harm != "unknown" else "other": 3 if harm != "dim" else 5})
            for name, dim in trained.dims.items():
                trained.set(name, rows_of(range(10), dim, version=1))
            path = trained.full(tmp_path / "next")
            source = {"user": path, "ad": path}
            if harm == "damaged":
                kind = checkpoint.CorruptFileError
                file = tmp_path / "next" / "table_0001.process_00000.arrow"
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
        else:
            kind = ValueError
            write(tmp_path / "next" / "user", rows_of(range(10), 4, version=1))
            write(tmp_path / "next" / "ad", rows_of(range(10), 3, version=1))
            source = tmp_path / "next"
            file = tmp_path / "next" / "ad" / "key"
            data = file.read_bytes()
            file.write_bytes(data[:-1] if harm == "odd" else data[:8] + data[:-8])
        with pytest.raises(kind):
            session.update(source, in_place=in_place)
        check(session, content)
        assert session.stats()["version"] == 1
        content["user"] = rows_of(range(10), 4, version=2)
        session.update({"user": write(tmp_path / "last", content["user"])}, in_place=in_place)
        check(session, content)


@pytest.mark.parametrize("in_place", IN_PLACE)
@pytest.mark.parametrize("keys", [range(1, 10), [*range(8), 30]])
@pytest.mark.parametrize("by", ["its file", "its keys"])
def test_a_directory_that_changes_while_it_is_read(tmp_path, monkeypatch, in_place, keys, by):
    """It is noticed by its keys, where two files have the same time, as within a tick of the system's clock."""
    message = "got another file than when it was opened"
    if by == "its keys":
        monkeypatch.setattr(files, "identity_of", lambda file: ())
        message = r'"user": path: ".*next" changed while it was read; write a new folder'
    content = {"user": rows_of(range(20), 4)}
    with open_with({"user": (write(tmp_path / "user", content["user"]), 4)}, jaxsok={"spare_rows": 4}) as session:
        real = store_plans.Change.of

        def change(*args):
            made = real(*args)
            write(tmp_path / "next", rows_of(keys, 4, version=2))
            return made

        monkeypatch.setattr(store_plans.Change, "of", change)
        with pytest.raises((ServingError, ValueError), match=message):
            session.update({"user": write(tmp_path / "next", rows_of(range(9), 4, version=1))}, in_place=in_place)
        check(session, content)


@pytest.mark.parametrize(("in_place", "tier"), [(False, {}), (True, {}), (True, UVM)])
@pytest.mark.parametrize("step", ["lines_of", "write_lines", "second write_lines", "index", "prepare"])
def test_failures_in_the_middle(trained, tmp_path, monkeypatch, in_place, tier, step):
    """A failure at any point leaves the served version, and the update can be repeated."""
    trained.set("user", rows_of(range(15, 25), 4, version=1))
    trained.set("ad", rows_of(range(5), 3, version=1))
    trained.erase("user", [3])
    delta = trained.delta(tmp_path / "delta", trained.path)
    before = {name: rows_of(range(20), dim) for name, dim in DIMS.items()}
    with serve(trained, **tier) as session:
        calls = {"left": 1 if step.startswith("second") else 0}

        def failing(real):
            def call(*args, **options):
                if calls["left"] == 0:
                    calls["left"] = -1
                    raise MemoryError("injected")
                calls["left"] -= 1
                return real(*args, **options)

            return call

        name = step.split()[-1]
        with monkeypatch.context() as patch:
            if name == "index":
                patch.setattr(versions.RowMap, "next_index", failing(versions.RowMap.next_index))
            elif name == "prepare":
                model = session._models["dlrm"].readers[0]
                patch.setattr(model, "prepare", failing(model.prepare))
            else:
                module = versions.frozen if in_place and name == "write_lines" else store_plans
                patch.setattr(module, name, failing(getattr(module, name)))
            with pytest.raises(MemoryError, match="injected"):
                session.update(delta, in_place=in_place)
            assert calls["left"] < 0
        check(session, before)
        assert session.stats()["version"] == 1
        session.update(delta, in_place=in_place)
        check(session, trained.content)


def test_rows_of_two_versions_are_not_served(trained, tmp_path, monkeypatch):
    """Where memory runs short in an update in place, and again when rows are put back, the next update mends it."""
    trained.set("user", rows_of(range(15, 25), 4, version=1))
    trained.set("ad", rows_of(range(5), 3, version=1))
    delta = trained.delta(tmp_path / "delta", trained.path)
    with serve(trained) as session:
        keys, done, write_lines = {name: KEYS for name in DIMS}, [], frozen.write_lines

        def failing(*args):
            done.append(args)
            if len(done) > 1:
                raise MemoryError("injected")
            return write_lines(*args)

        with monkeypatch.context() as patch:
            patch.setattr(versions.frozen, "write_lines", failing)
            with pytest.raises(MemoryError, match="injected"):
                session.update(delta, in_place=True)
            assert len(done) == 3
            for _ in range(3):
                with pytest.raises(RuntimeError, match="rows: got some of a failed update in place"):
                    session.lookup(keys)
            with pytest.raises(MemoryError, match="injected"):
                session.update(delta, in_place=True)
        session.update(delta, in_place=True)
        check(session, trained.content)


def interrupted(call, at, *, has_program=True):
    """Returns a call that is followed by Ctrl-C once: Python acts on it in the main thread when the call returns."""
    left = [at]

    def run(*args, **options):
        result = call(*args, **options)
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return result

    if has_program:
        run.lower = call.lower
    return run


@pytest.mark.parametrize("at", [1, 2])
def test_rows_that_are_written_in_place_survive_ctrl_c(trained, tmp_path, monkeypatch, at):
    trained.set("user", rows_of(range(15, 25), 4, version=1))
    trained.set("ad", rows_of(range(5), 3, version=1))
    delta = trained.delta(tmp_path / "delta", trained.path)
    with serve(trained) as session:
        with monkeypatch.context() as patch:
            patch.setattr(frozen, "_write", interrupted(frozen._write, at))
            with pytest.raises(KeyboardInterrupt):
                session.update(delta, in_place=True)
        check(session, trained.content)
        assert session.stats()["version"] == 2


@pytest.mark.parametrize("name", ["query", "insert", "overwrite", "drop"])
def test_the_rows_of_a_cache_survive_ctrl_c(tmp_path, monkeypatch, name):
    """Programs that change a cache take its arrays over; Ctrl-C must not come before their results are kept."""
    content = {name: rows_of(range(40), dim) for name, dim in DIMS.items()}
    tables = {name: (write(tmp_path / name, mine), DIMS[name]) for name, mine in content.items()}
    with open_with(tables, gpucacheper=0.5, hit_rate_threshold=1.1) as session:
        session.lookup({name: KEYS[:10] for name in DIMS})
        changed = {"user": {key: row for key, row in rows_of(range(5, 45), 4, version=1).items() if key != 7}}
        write(tmp_path / "next" / "user", changed["user"])
        with monkeypatch.context() as patch:
            patch.setattr(programs, name, interrupted(getattr(programs, name), 1))
            with pytest.raises(KeyboardInterrupt):
                session.lookup({name: KEYS for name in DIMS})
                session.update(tmp_path / "next")
        if session.stats()["version"] == 1:
            check(session, content)
            session.update(tmp_path / "next")
        check(session, content | changed)
        check(session, content | changed)


def test_a_cache_of_two_versions_is_not_served(tmp_path, monkeypatch):
    """Where memory runs short in an update, and then no rows can leave either, the next update mends it."""
    content = {name: rows_of(range(40), dim) for name, dim in DIMS.items()}
    tables = {name: (write(tmp_path / name, mine), DIMS[name]) for name, mine in content.items()}
    after = {name: rows_of(range(40), dim, version=1) for name, dim in DIMS.items()}
    for name, mine in after.items():
        write(tmp_path / "next" / name, mine)

    def failing(real, left):
        def call(*args):
            nonlocal left
            left -= 1
            if left < 0:
                raise MemoryError("injected")
            return real(*args)

        call.lower = getattr(real, "lower", None)
        return call

    with open_with(tables, gpucacheper=0.9, hit_rate_threshold=1.1) as session:
        for _ in range(2):
            check(session, content)
        with monkeypatch.context() as patch:
            patch.setattr(programs, "overwrite", failing(programs.overwrite, 1))
            patch.setattr(programs, "drop", failing(programs.drop, 0))
            patch.setattr(stores, "_new_store", failing(stores._new_store, 0))
            with pytest.raises(MemoryError, match="injected"):
                session.update(tmp_path / "next")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rows: got some of a source that failed to come"):
                session.lookup({"user": KEYS})
        session.update(tmp_path / "next")
        for _ in range(2):
            check(session, after)


def test_a_lookup_that_ctrl_c_ends_leaves_no_place_taken(trained, monkeypatch):
    """It comes when the lookup has ended; there it would take its worker away, and updates would wait for it."""
    with serve(trained) as session:
        model = session._models["dlrm"]
        keys, reader = {"user": KEYS}, model.readers[0]
        with monkeypatch.context() as patch:
            patch.setattr(reader, "lookup", interrupted(type(reader).lookup.__get__(reader), 1, has_program=False))
            with pytest.raises(KeyboardInterrupt):
                session.lookup(keys)
        assert model.workers._num_free == model.workers._number and not model.versions._gate._readers

        class Interrupted(type(model.workers)):
            def __exit__(self, *details):
                signal.raise_signal(signal.SIGINT)
                super().__exit__(*details)

        model.workers.__class__ = Interrupted
        with pytest.raises(KeyboardInterrupt):
            session.lookup(keys)
        assert model.workers._num_free == model.workers._number


def test_memory(trained, tmp_path):
    """An update that does not fit is refused first, with its bytes; "auto" works in place if a copy does not fit."""
    trained.set("user", rows_of(range(5), 4, version=1))
    delta = trained.delta(tmp_path / "delta", trained.path)
    before = trained.frozen_content() | {"user": rows_of(range(20), 4)}
    with serve(trained) as session:
        used = session.stats()["bytes"]
    row_bytes = (20 + 16) * 2 * 4 * 4  # Rows of user and item, with their spare rows.
    index_bytes = 64 * versions.RowMap(2, 72).num_buckets
    free = row_bytes + index_bytes  # A piece of rows has to fit as well.
    with serve(trained, memory_limit=used + free) as session:
        message = rf"got {free} bytes free on .*, wanted [0-9]+ for a copy of what changes; pass"
        with pytest.raises(ServingError, match=message):
            session.update(delta, in_place=False)
        check(session, before)
        assert session.update(delta) == 2
        assert session.stats()["in_place_updates"] == 1
        check(session, trained.content)
    with serve(trained, memory_limit=used + 100) as session:
        for in_place in (True, False, "auto"):
            with pytest.raises(ServingError, match="got 100 bytes free on"):
                session.update(delta, in_place=in_place)
        check(session, before)
    with serve(trained, memory_limit=2 * used + 2**20) as session:
        session.update(delta)
        assert session.stats()["in_place_updates"] == 0
        check(session, trained.content)


def test_room_to_grow_is_left_out_where_it_does_not_fit(tmp_path, monkeypatch):
    """A store that grows gets spare rows, within the allowed number and the free room."""
    content = rows_of(range(200), 64)
    folder, more = write(tmp_path / "first", content), rows_of(range(400), 64, version=1)
    path = write(tmp_path / "more", more)
    tables, options = {"user": (folder, 64)}, {"max_batch_size": 16, "per_sample": 32, "jaxsok": {"spare_rows": 0}}

    def open_session(limit=None):
        return open(config_of(model_of(tables, **options)), warm_up=False, memory_limit=limit)

    def capacity(session):
        session.update({"user": path}, in_place=False)
        keys = np.arange(410)
        np.testing.assert_array_equal(session.lookup({"user": keys})["user"], expect(more, keys, 0.0, 64))
        return session._models["dlrm"].versions.current.tables.stores[0].rows.shape[0]

    with open_session() as session:
        used = session.stats()["bytes"]
        assert capacity(session) == 425
    piece = 2 * 400 * 256
    with open_session(used + 400 * 256 + piece + 64 * versions.RowMap(1, 400).num_buckets) as session:
        assert capacity(session) == 400
    monkeypatch.setattr(versions, "MAX_CAPACITY", 410)
    with open_session() as session:
        assert capacity(session) == 410


def test_copies_on_one_device_are_made_one_after_another(tmp_path, monkeypatch):
    """Copies on one device are made one after another; otherwise two models would count on the same free bytes."""
    folders = [write(tmp_path / name, rows_of(range(10), 4)) for name in "ab"]
    models = [model_of({"user": (folder, 4)}, name=name) for name, folder in zip("ab", folders, strict=True)]
    planned, write_store, errors = versions.Versions._plan, store_plans.StorePlan.write, []
    running, most = [], []

    def planning(self, *args):
        running.append(self.name)
        most.append(len(running))
        return planned(self, *args)

    def copying(self, *args):
        time.sleep(0.2)
        made = write_store(self, *args)
        running.pop()
        return made

    monkeypatch.setattr(versions.Versions, "_plan", planning)
    monkeypatch.setattr(store_plans.StorePlan, "write", copying)

    def update(name, folder):
        try:
            session.update({"user": folder}, model=name, in_place=False)
        except Exception as error:
            errors.append(error)

    with open(config_of(*models), warm_up=False) as session:
        threads = [threading.Thread(target=update, args=pair) for pair in zip("ab", folders, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and most == [1, 1]


@pytest.mark.parametrize(
    "tier",
    [
        {"gpucache": False},
        {"gpucacheper": 0.5, "hit_rate_threshold": 1.1},
        pytest.param({}, marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="the device is the host")),
    ],
)
def test_memory_of_the_host(trained, monkeypatch, tier):
    """Rows in host memory need room there."""
    trained.set("user", rows_of(range(5), 4, version=1))
    before = trained.frozen_content() | {"user": rows_of(range(20), 4)}
    delta = trained.delta(trained.path + "-delta", trained.path)
    is_cached = "gpucacheper" in tier
    monkeypatch.setattr(host_limits, "available_bytes", lambda: 1000)
    with pytest.raises(
        ServingError, match=r"open: .* memory: got 1000 bytes free on .* wanted [0-9]+ for its (tables|cache)"
    ):
        serve(trained, **tier)
    monkeypatch.setattr(host_limits, "available_bytes", lambda: 2**40)
    with serve(trained, **tier) as session:
        monkeypatch.setattr(host_limits, "available_bytes", lambda: 100)
        with pytest.raises(ServingError, match=r"update: .* memory: got 100 bytes free on .* wanted [0-9]+") as caught:
            session.update(delta, in_place=False)
        assert ("in_place=True" in str(caught.value)) == (not is_cached)
        check(session, before)
        # Room for an index and a piece of rows, and none for a copy.
        needed = int(str(caught.value).split("wanted ")[1].split()[0])
        monkeypatch.setattr(host_limits, "available_bytes", lambda: needed - 1)
        if is_cached:
            with pytest.raises(ServingError, match="for a copy of what changes"):
                session.update(delta)
            check(session, before)
        else:
            session.update(delta)
            assert session.stats()["in_place_updates"] == 1
            check(session, trained.content)


def test_bytes_that_the_host_has():
    free = host_limits.available_bytes()
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize("in_place", IN_PLACE)
def test_memory_is_flat(tmp_path, in_place):
    """Neither JAX's arrays nor the process's memory grow over 30 updates."""
    sizes = {"user": (4000, 64), "ad": (1000, 8)}
    paths = []
    for number in range(2):
        for name, (count, dim) in sizes.items():
            write(tmp_path / str(number) / name, rows_of(range(number, count + number), dim, version=number))
        paths.append(tmp_path / str(number))
    model = model_of({name: (paths[0] / name, dim) for name, (_, dim) in sizes.items()}, jaxsok={"spare_rows": 4})
    with open(config_of(model), warm_up=False) as session:

        def count_bytes():
            gc.collect()
            return sum(array.nbytes for array in jax.live_arrays())

        for number in range(32):
            session.update(paths[number % 2], in_place=in_place)
            session.lookup({"user": np.arange(100)})
            if number == 1:
                first = count_bytes()
        assert count_bytes() <= first


# Readers -------------------------------------------------------------------------------------------------------------


def whole(version, keys, dim):
    return rows_of(keys, dim, version=version)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_old_versions_go_without_a_collection(tmp_path, part):
    """The server's process leaves what it has at its start out of collections: nothing may refer to it in a cycle."""
    folder = write(tmp_path / "user", rows_of(range(200), 4))
    with open_with({"user": (folder, 4)}, gpucacheper=part) as session:
        session.lookup({"user": KEYS})
        version = session._models["dlrm"].versions.current
        old = [weakref.ref(one) for one in (version, *jax.tree.leaves(version.parts[0].tables))]
        del version
        gc.collect()
        gc.disable()
        try:
            session.update({"user": write(tmp_path / "next", rows_of(range(200), 4, version=1))})
            session.lookup({"user": KEYS})
            assert [one() for one in old] == [None] * len(old)
        finally:
            gc.enable()


@pytest.mark.parametrize("in_place", IN_PLACE)
def test_no_answer_mixes_versions(tmp_path, in_place):
    """No answer mixes versions: readers of two stores and three tables run during updates, and rows state theirs."""
    count, folders = 300, []
    for version in range(3):
        for name, dim in DIMS.items():
            write(tmp_path / str(version) / name, rows_of(range(count), dim, version=version))
        folders.append(tmp_path / str(version))
    with open_with({name: (folders[0] / name, dim) for name, dim in DIMS.items()}) as session:
        session._models["dlrm"].workers = served._Workers(8)  # concurrent readers
        is_done, wrong, seen = threading.Event(), [], set()

        def read(seed):
            rng = np.random.default_rng(seed)
            try:
                while not is_done.is_set():
                    keys = {name: rng.integers(0, count, 40) for name in DIMS}
                    answer = session.lookup(keys)
                    content = (answer.version - 1) % 3
                    seen.add(answer.version)
                    for name, mine in keys.items():
                        column = 1000 * content + (mine * 7) % 997
                        if not np.array_equal(answer[name][:, 0], column):
                            wrong.append((answer.version, name, answer[name][:, 0], column))
            except BaseException as error:
                wrong.append(error)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for reader in readers:
            reader.start()
        try:
            for number in range(1, 25):
                assert session.update(folders[number % 3], in_place=in_place) == number + 1
                if number % 4 == 0:  # The other versions come without a pause.
                    wait_until(lambda now=number + 1: wrong or now in seen)
        finally:
            is_done.set()
            for reader in readers:
                reader.join()
        assert not wrong, wrong[0]


def test_one_thread_at_a_time_reads_where_arrays_lie(tmp_path, monkeypatch):
    """Between the end of an update and the note of its addresses many threads need them, but JAX counts on one."""
    for version in range(2):
        write(tmp_path / str(version), rows_of(range(10), 4, version=version))
    inside, most, describe = [], [], readers.Stores

    def watch(arrays):
        inside.append(0)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return describe(arrays)

    with open_with({"user": (tmp_path / "0", 4)}) as session:
        monkeypatch.setattr(readers, "Stores", watch)
        is_done = threading.Event()

        def read():
            while not is_done.is_set():
                session.lookup({"user": np.arange(3, dtype=np.uint64)})

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            reading = [pool.submit(read) for _ in range(4)]
            for number in range(12):
                session.update({"user": tmp_path / str((number + 1) % 2)})
            is_done.set()
            for one in reading:
                one.result()
    assert len(most) > 12 and max(most) == 1


def export(path, version, dim, folder):
    """Exports a dense model that states its version and that of the rows that it reads."""
    tables, _ = freeze_records([(FrozenTable("user", dim), hps.read_hps(folder, dim=dim))])

    def model(tables, inputs):
        rows = lookup(tables, {"user": inputs["user"]})["user"]
        return {"rows": rows, "dense": inputs["number"] * 0 + version}

    export_model(
        path,
        model,
        tables,
        {"user": KeysInput("user"), "number": ArrayInput()},
        platforms=PLATFORMS,
    )
    return path


@pytest.mark.parametrize(
    ("tier", "in_place"), [({}, False), ({}, True), ({"gpucacheper": 0.3, "hit_rate_threshold": 1.1}, False)]
)
def test_tables_and_dense_model_change_together(tmp_path, tier, in_place):
    """Tables and dense model change together: each prediction and lookup is of one version of both."""
    count, dim = 300, 4
    folders, models = [], []
    for version in range(2):
        folders.append(write(tmp_path / f"user{version}", rows_of(range(count), dim, version=version)))
        models.append(export(tmp_path / f"model{version}", version, dim, folders[version]))
    config = model_of({"user": (folders[0], dim)}, max_batch_size=8, dense_file=str(models[0]), **tier)
    with open(config_of({**config, "num_of_worker_buffer_in_pool": 4}), warm_up=False) as session:
        is_done, wrong, seen = threading.Event(), [], set()

        def read(seed):
            rng = np.random.default_rng(seed)
            try:
                while not is_done.is_set():
                    keys = rng.integers(0, count, 8)
                    if seed % 2:
                        answer = session.predict({"user": keys, "number": np.zeros(8, np.float32)})
                        rows, dense = answer["rows"], answer["dense"]
                    else:
                        answer = session.lookup({"user": keys})
                        rows, dense = answer["user"], np.full(8, (answer.version - 1) % 2)
                    version = (answer.version - 1) % 2
                    seen.add((seed % 2, answer.version))
                    if not ((rows[:, 0] == 1000 * version + (keys * 7) % 997).all() and (dense == version).all()):
                        wrong.append((answer.version, rows[:, 0], dense, keys))
            except BaseException as error:
                wrong.append(error)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for reader in readers:
            reader.start()
        try:
            for number in range(1, 9):
                source = {"user": folders[number % 2]}
                assert session.update(source, dense_file=models[number % 2], in_place=in_place) == number + 1
                wait_until(lambda now=number + 1: wrong or {(0, now), (1, now)} <= seen)
        finally:
            is_done.set()
            for reader in readers:
                reader.join()
        assert not wrong, wrong[0]


def test_closing_refuses_an_update_that_has_begun(tmp_path, monkeypatch):
    """It loads its dense model before it waits for its turn, so that the session may be closed by then."""
    folders = [write(tmp_path / str(version), rows_of(range(9), 4, version=version)) for version in range(2)]
    model = export(tmp_path / "model", 0, 4, folders[0])
    session = open_with({"user": (folders[0], 4)}, dense_file=str(model))
    load, begun, closed = served.load_dense_model, threading.Event(), threading.Event()

    def load_late(*arguments):
        begun.set()
        assert closed.wait(60)
        return load(*arguments)

    monkeypatch.setattr(served, "load_dense_model", load_late)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        update = pool.submit(session.update, {"user": folders[1]}, dense_file=model)
        assert begun.wait(60)
        assert session.close()
        closed.set()
        with pytest.raises(ServingError, match="update: session: got one that is closed"):
            update.result()


def test_a_cache_follows_its_source(tmp_path):
    """Deltas and directories below a cache change the cached rows; an update in place is refused."""
    content = {name: rows_of(range(40), dim) for name, dim in DIMS.items()}
    tables = {name: (write(tmp_path / name, mine), DIMS[name]) for name, mine in content.items()}
    with open_with(tables, gpucacheper=0.5, hit_rate_threshold=1.1) as session:
        check(session, content)
        with pytest.raises(ServingError, match=r"in_place: got True for model .* in host memory below a cache"):
            session.update({"ad": tables["ad"][0]}, in_place=True)
        for version in range(1, 4):
            content["ad"] = rows_of(range(version, 40, version), 3, version=version)
            content["item"] = rows_of(range(version, 50), 4, version=version)
            for name in ("ad", "item"):
                write(tmp_path / str(version) / name, content[name])
            assert session.update(tmp_path / str(version)) == version + 1
            check(session, content)
            check(session, content)
        file = tmp_path / "3" / "ad" / "emb_vector"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ValueError, match="emb_vector"):
            session.update(tmp_path / "3")
        check(session, content)


def test_gate_lets_a_writer_be_alone():
    gate, inside, worst, is_done = versions.Gate(), [0, 0], [], threading.Event()

    def read():
        while not is_done.is_set():
            with gate.reading():
                inside[0] += 1
                worst.append(inside[1])
                inside[0] -= 1

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(50):
        with gate.writing():
            inside[1] += 1
            for _ in range(100):
                pass
            inside[1] -= 1
    is_done.set()
    for reader in readers:
        reader.join()
    assert max(worst, default=0) == 0


def test_a_writer_that_is_interrupted_lets_readers_in(monkeypatch):
    """An update interrupted while it waits for readers lets new readers in."""
    gate = versions.Gate()

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), gate.writing():
            pass
    reader = threading.Thread(target=lambda: gate.reading().__enter__(), daemon=True)
    reader.start()
    reader.join(timeout=10)
    assert not reader.is_alive()


# Any sequence --------------------------------------------------------------------------------------------------------


class Updates(stateful.RuleBasedStateMachine):
    """A state machine of training, exports and updates in any order, compared with dicts."""

    def __init__(self):
        super().__init__()
        import pathlib
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.number = 0
        self.trained = Trained({"user": 2, "ad": 2})
        for name in ("user", "ad"):
            self.trained.set(name, rows_of(range(8), 2))
        self.trained.path = self.trained.full(self.path / "full")
        self.links, self.is_based = [self.trained.path], True  # what is served, and deltas that wait
        tables = {name: (self.trained.path, 2) for name in ("user", "ad")}
        model = model_of(tables, defaults=DEFAULTS, max_batch_size=16, jaxsok={"spare_rows": 6})
        self.session = open(config_of(model), warm_up=False)
        self.held = self.trained.frozen_content()
        self.version = 1

    tables = st.sampled_from(["user", "ad"])
    keys = st.lists(st.integers(0, 30), max_size=6)
    ways = st.sampled_from([True, False, "auto"])

    def _name(self):
        self.number += 1
        return self.path / f"export{self.number}"

    def _update(self, source, way, content):
        num_rows = sum(len(mine) for mine in content.values())
        try:
            version = self.session.update(source, in_place=way)
        except ServingError as error:
            assert way is True and "to update in place" in str(error)
            assert num_rows > self.session._models["dlrm"].versions.current.tables.stores[0].capacity
            return False
        self.version += 1
        assert version == self.version
        self.held = content
        return True

    @stateful.rule(table=tables, keys=keys)
    def train(self, table, keys):
        self.trained.set(table, rows_of(keys, 2, version=self.number))

    @stateful.rule(table=tables, keys=keys)
    def erase(self, table, keys):
        self.trained.erase(table, keys)

    @stateful.precondition(lambda self: self.is_based)
    @stateful.rule(way=st.none() | ways)
    def delta(self, way):
        """Exports a delta, and applies it with those that wait, or lets it wait (None)."""
        self.links.append(self.trained.delta(self._name(), self.links[-1]))
        if way is not None and self._update(self.links[1:], way, self.trained.frozen_content()):
            del self.links[:-1]

    @stateful.rule(way=ways)
    def full(self, way):
        path = self.trained.full(self._name())
        if self._update(path, way, self.trained.frozen_content()):
            self.links, self.is_based = [path], True

    @stateful.rule(table=tables, keys=st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True), way=ways)
    def directory(self, table, keys, way):
        content = rows_of(keys, 2, version=50 + self.number)
        path = write(self._name(), content)
        if self._update({table: path}, way, {**self.held, table: content}):
            self.is_based = False

    @stateful.invariant()
    def agrees(self):
        answer = self.session.lookup({name: KEYS for name in self.held})
        assert answer.version == self.version
        for name, mine in self.held.items():
            np.testing.assert_array_equal(answer[name], expect(mine, KEYS, DEFAULTS.get(name, 0.0), 2))

    def teardown(self):
        self.session.close()
        self.folder.cleanup()


TestUpdates = Updates.TestCase
TestUpdates.settings = hypothesis.settings(max_examples=5, stateful_step_count=10)


def test_a_delta_of_wide_keys_follows_no_cut_ones(tmp_path):
    """Where keys are cut, a delta has no wider keys, and follows no rows that had: it would replace others."""
    table = jaxsok.TableSpec("user", 1, jaxsok.optim.sgd(0.1), capacity=64, statistics=True)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")])
    state, folders = collection.init(seed=0), []
    for number, key in enumerate((5, 6, 5 + 2**32, 7)):
        clock = np.uint32(number + 1)
        state, *_ = collection.assign(state, "user", np.array([key]), np.array([[number]], np.float32), clock=clock)
        folders.append(tmp_path / str(number))
        if number in (0, 2):
            checkpoint.export_full(folders[-1], collection, state, clock=clock)
        else:
            checkpoint.export_delta(folders[-1], collection, state, base=folders[-2], clock=clock)
    checkpoint.export_delta(tmp_path / "wide", collection, state, base=folders[1], clock=np.uint32(9))

    def config(folder):
        return {
            "supportlonglong": False,
            "models": [
                {
                    "model": "dlrm",
                    "sparse_files": [str(folder)],
                    "embedding_table_names": ["user"],
                    "embedding_vecsize_per_table": [1],
                    "maxnum_catfeature_query_per_table_per_sample": [4],
                    "default_value_for_each_table": [-1.0],
                    "deployed_device_list": [0],
                    "gpucacheper": 1.0,
                }
            ],
        }

    with open(config(folders[0])) as session:
        session.update(folders[1])
        with pytest.raises(ServingError, match="keys of more than 32 bits, wanted a full export"):
            session.update(tmp_path / "wide")
        assert session.lookup({"user": np.array([5, 6])})["user"].ravel().tolist() == [0.0, 1.0]
    alone = tmp_path / "alone"
    state, *_ = collection.assign(collection.init(seed=1), "user", np.array([5 + 2**32]), np.array([[3.0]]), clock=1)
    checkpoint.export_full(alone, collection, state, clock=np.uint32(2))
    state, *_ = collection.assign(state, "user", np.array([5]), np.array([[4.0]]), clock=np.uint32(3))
    checkpoint.export_delta(tmp_path / "next", collection, state, base=alone, clock=np.uint32(4))
    with open(config(alone)) as session:
        with pytest.raises(ServingError, match="the table holds no export that a delta follows"):
            session.update(tmp_path / "next")
        assert session.lookup({"user": np.array([5])})["user"].ravel().tolist() == [3.0]

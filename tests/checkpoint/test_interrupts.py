"""Ctrl-C at the worst moment: between a call that was given a state and the assignment of its result."""

import concurrent.futures
import errno
import os
import resource
import signal
import sys
import threading
import time
import warnings

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_cases import assert_same, collection_of, content, tables_of, train

import jaxsok
from jaxsok import admission, checkpoint, enlarge, evict, grow, interrupts, published, table_import
from jaxsok.checkpoint import save
from jaxsok.interchange import columns, sok

POOL = concurrent.futures.ThreadPoolExecutor


def press_after(monkeypatch, owner, name, *, times=1):
    """Presses Ctrl-C when the first calls of a function are about to return."""
    function, left = getattr(owner, name), list(range(times))

    def call(*args, **options):
        result = function(*args, **options)
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, call)


def read(collection, state):
    """Reads all keys and rows: a state whose arrays were donated would raise."""
    return {name: collection.export_table(state, name)["keys"].tolist() for name in ("user", "item")}


@pytest.mark.parametrize("num_devices", [None, 2])
@pytest.mark.parametrize("owner, name", [(table_import, "enter_records"), (enlarge, "grow_to")])
def test_an_import_keeps_what_there_is(owner, name, num_devices, monkeypatch):
    """The state of the error can be used; importing once more gives what an import without Ctrl-C gives."""
    collection = collection_of(tables_of(capacity=16), num_devices)
    rows = np.arange(400, dtype=np.float32)[:, None].repeat(collection.tables[0].dim, axis=1)
    chunks = [jaxsok.Records(np.arange(begin, begin + 200, dtype=np.uint64), rows[:200] + begin) for begin in (0, 200)]
    wanted = collection.export_table(collection.import_table(collection.init(seed=1), "user", chunks), "user")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        press_after(patched, owner, name)
        collection.import_table(collection.init(seed=1), "user", chunks)
    state = caught.value.state
    assert set(read(collection, state)["user"]) <= set(range(400))
    found = collection.export_table(collection.import_table(state, "user", chunks), "user")
    order = [np.argsort(exported["keys"]) for exported in (found, wanted)]
    np.testing.assert_array_equal(found["keys"][order[0]], wanted["keys"][order[1]])
    np.testing.assert_array_equal(found["rows"][order[0]], wanted["rows"][order[1]])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


OWNERS = {
    "grow_to": enlarge,
    "enter_records": table_import,
    "_forget_waiting": checkpoint.non_row_state,
    "with_waiting": admission,
}


@pytest.mark.parametrize("name", ["clear", "erase", *OWNERS])
def test_a_restore_keeps_what_there_is(name, tmp_path, monkeypatch):
    """So does a restore into a state that lives on, and a delta; restoring once more gives what was saved."""
    collection = collection_of(tables_of(capacity=16))
    state = train(collection, collection.init(seed=1), 2)
    checkpoint.export_full(tmp_path / "full", collection, state)
    state, _ = collection.erase(state, "user", collection.export_table(state, "user")["keys"][:3])
    state = train(collection, state, 2)
    checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full")
    chain, tables = [tmp_path / "full", tmp_path / "delta"], ["user", "item", "ad"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        press_after(patched, OWNERS.get(name, collection), name)
        checkpoint.load(chain, collection, state=collection.init(seed=1), tables=tables)
    read(collection, caught.value.state)
    again = checkpoint.load(chain, collection, state=caught.value.state, tables=tables)
    same = [
        {key: array for key, array in content(collection, each).items() if key.startswith(("user.rows", "item.rows"))}
        for each in (again, state)
    ]
    assert_same(*same)


def test_a_second_press_comes_at_once():
    """As where the first waits for another process that will never answer."""
    with pytest.raises(KeyboardInterrupt), interrupts.held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_sigterm_waits_too():
    """As of a job that is told to end; where there is no handler, the signal ends the process as ever."""
    heard, passed = [], []

    def hear(number, _):
        heard.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        with interrupts.held_back():
            signal.raise_signal(signal.SIGTERM)
            passed.append(list(heard))
        with pytest.raises(KeyboardInterrupt), interrupts.held_back():  # both are heard, in order
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")
    finally:
        assert signal.signal(signal.SIGTERM, before) is hear
    assert passed == [[]] and heard == [signal.SIGTERM] * 2


def test_blocks_may_be_nested_and_other_threads_hold_nothing():
    passed = []
    with pytest.raises(KeyboardInterrupt), interrupts.held_back():
        with interrupts.held_back():
            signal.raise_signal(signal.SIGINT)
            passed.append("inner")
        passed.append("outer")
    with pytest.raises(KeyboardInterrupt), interrupts.held_back(), interrupts.held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")
    thread = threading.Thread(target=lambda: passed.append(interrupts.held_back().__enter__()))
    thread.start()
    thread.join()
    assert passed == ["inner", "outer", None]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def full(**options):
    """Returns a collection whose table is full, its state, and a batch that needs other rows."""
    table = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=32, initializer="uniform", **options)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("item", "item")])
    first, batch = (collection.batch({"item": keys}) for keys in (np.arange(30), np.arange(100, 120)))
    return collection, collection.lookup(collection.init(seed=1), first.features, clock=0)[1], batch


LIMITED = {"max_capacity": 32, "statistics": True}
GROWN = {
    "release": {"eviction": jaxsok.policies.LeastRecentlyUsed(), **LIMITED},
    "read_counters": {"eviction": jaxsok.policies.TimeToLive(1), **LIMITED},
    "capacities_of": {},
    "replace": {},
}


@pytest.mark.parametrize("name", GROWN)
def test_growth_keeps_what_there_is(name, monkeypatch):
    """Rows that stay are those of before, and the next call makes room."""
    collection, state, batch = full(**GROWN[name])
    before, donated = by_key(collection, state), state.stores[0].index
    owner = {"release": evict, "read_counters": grow, "capacities_of": grow, "replace": enlarge.dataclasses}[name]
    function = getattr(owner, name)

    def press_once_donated(*args, **options):
        result = function(*args, **options)
        if donated.is_deleted() and not pressed:
            pressed.append(name)
            signal.raise_signal(signal.SIGINT)
        return result

    pressed = []
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        patched.setattr(owner, name, press_once_donated)
        collection.grow(state, batch, clock=9)
    assert pressed and "grow: the state was donated" in caught.value.__notes__[0]
    state = caught.value.state
    left = by_key(collection, state)
    assert left.items() <= before.items() and (name in ("release", "read_counters") or left == before)
    _, state, _ = collection.lookup(collection.grow(state, batch, clock=9), batch.features, clock=9)
    assert {*range(100, 120)} <= by_key(collection, state).keys()


def by_key(collection, state):
    exported = collection.export_table(state, "item")
    return dict(zip(exported["keys"].tolist(), map(tuple, exported["rows"].tolist()), strict=True))


def test_a_warning_that_is_an_error_keeps_what_there_is():
    """How many rows have expired is known after they have gone, and with it whether there is room."""
    collection, state, batch = full(eviction=jaxsok.policies.TimeToLive(100), **LIMITED)
    before = by_key(collection, state)
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="after eviction by TimeToLive") as caught:
        warnings.simplefilter("error")
        collection.grow(state, batch, clock=9)
    assert by_key(collection, caught.value.state) == before


def test_ctrl_c_again_while_an_import_ends_keeps_what_there_is(monkeypatch):
    """As one presses who thinks that the first was not heard."""
    collection, state, _ = full()
    settle = table_import.RecordWriter.settle

    def press_again(self):
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return settle(self)

    def chunks():
        for begin in (200, 300, 400):
            if begin == 400:
                signal.raise_signal(signal.SIGINT)
            yield jaxsok.Records(np.arange(begin, begin + 50, dtype=np.uint64), np.ones((50, 4), np.float32))

    monkeypatch.setattr(table_import.RecordWriter, "settle", press_again)
    with pytest.raises(KeyboardInterrupt) as caught:
        collection.import_table(state, "item", chunks())
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert by_key(collection, caught.value.state).keys() == {*range(30), *range(200, 250), *range(300, 350)}


def test_an_error_that_has_a_state_of_its_own_gets_that_of_the_tables():
    """As that of a reader, or of another collection's import within the chunks."""
    collection, state, _ = full()
    error = OSError("the source failed")
    error.state = "CLOSED"

    def chunks():
        yield jaxsok.Records(np.arange(200, 250, dtype=np.uint64), np.ones((50, 4), np.float32))
        yield jaxsok.Records(np.arange(300, 350, dtype=np.uint64), np.ones((50, 4), np.float32))
        raise error

    with pytest.raises(OSError, match="the source failed"):
        collection.import_table(state, "item", chunks())
    assert by_key(collection, error.state).keys() == {*range(30), *range(200, 250), *range(300, 350)}


def test_a_delta_keeps_what_there_is_until_its_end(tmp_path, monkeypatch):
    """Also while it reads counters when all rows are there."""
    collection, state, batch = full(eviction=jaxsok.policies.LeastRecentlyUsed(), statistics=True)
    checkpoint.export_full(tmp_path / "full", collection, state, clock=1)
    _, state, _ = collection.lookup(collection.grow(state, batch, clock=2), batch.features, clock=2)
    checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full", clock=2)
    wanted, older = by_key(collection, state), checkpoint.load(tmp_path / "full", collection)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        press_after(patched, checkpoint.non_row_state, "restore_looks")
        checkpoint.apply_delta(tmp_path / "delta", collection, older, after=tmp_path / "full")
    assert by_key(collection, caught.value.state) == wanted


@pytest.mark.parametrize(
    "owner, name", [(save, "pieces"), (save.Saving, "feed"), (save.Saving, "_put"), (POOL, "submit")]
)
def test_an_export_leaves_nothing(owner, name, tmp_path, monkeypatch):
    """No folder, and no thread that waits for rows; the next call writes all."""
    collection, state, _ = full()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        press_after(patched, owner, name)
        checkpoint.export_full(tmp_path / "saved", collection, state)
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxsok.save")]
    assert checkpoint.export_full(tmp_path / "saved", collection, state).num_rows == {"item": 30}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_export_whose_bytes_are_lost_fails(at, tmp_path, monkeypatch):
    """A full or broken disk may say so when a file is flushed, and after that no more."""
    collection, state, _ = full()
    fsync, left = os.fsync, [at]

    def fail_at(descriptor):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_at)
        with pytest.raises(OSError, match=r"No space left on device: '.*saved'"):
            checkpoint.export_full(tmp_path / "saved", collection, state)
    assert not list(tmp_path.iterdir())

    def not_supported(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", not_supported)
    assert checkpoint.export_full(tmp_path / "saved", collection, state).num_rows == {"item": 30}


def test_an_export_whose_name_is_lost_says_that_it_is_complete(tmp_path, monkeypatch):
    """It has its name when the parent folder cannot be flushed."""
    collection, state, _ = full()
    fsync = os.fsync

    def fail_in_parent(descriptor):
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_in_parent)
    with pytest.raises(OSError, match="Input/output error") as info:
        checkpoint.export_full(tmp_path / "saved", collection, state)
    assert any('saved" is complete, and stays' in note for note in info.value.__notes__)
    assert by_key(collection, checkpoint.load(tmp_path / "saved", collection)) == by_key(collection, state)


def test_a_delta_without_a_thread_leaves_nothing(tmp_path, monkeypatch):
    collection, state, batch = full(statistics=True)
    checkpoint.export_full(tmp_path / "full", collection, state)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("jaxsok.export"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
        patched.setattr(threading.Thread, "start", refuse)
        checkpoint.begin_export_delta(tmp_path / "delta", collection, state, base=tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    checkpoint.begin_export_delta(tmp_path / "delta", collection, state, base=tmp_path / "full").result()


def test_a_folder_that_cannot_be_removed_is_named(tmp_path, monkeypatch, caplog):
    collection, state, _ = full()
    monkeypatch.setattr(published.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        press_after(monkeypatch, save, "pieces")
        checkpoint.export_full(tmp_path / "saved", collection, state)
    (left,) = tmp_path.iterdir()
    assert any(left.name in record.getMessage() for record in caplog.records)


def test_a_base_whose_path_is_no_unicode_is_refused(tmp_path):
    collection, state, _ = full(statistics=True)
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    checkpoint.export_full(folder / "full", collection, state)
    with pytest.raises(ValueError, match=r"export_delta: base: got a folder at .* wanted a path in UTF-8"):
        checkpoint.export_delta(tmp_path / "delta", collection, state, base=folder / "full")
    assert len(list(tmp_path.iterdir())) == 1


def test_files_that_are_too_large_are_named(tmp_path):
    """The limit is the process's; a full disk is met at the same places."""
    collection, state, _ = full()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_tables(path):
        with ocp.Checkpointer(checkpoint.TablesCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=checkpoint.TablesSave(collection, state))

    calls = {
        "sok": lambda path: sok.save(collection, state, path),
        "npz": lambda path: columns.save(collection, state, path, format="npz"),
        "orbax": save_tables,
    }
    for name, call in calls.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if name == "orbax" else 100, hard))  # Orbax writes files, too
        try:
            with pytest.raises(OSError, match=f"File too large: '.*{name}"):
                call(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_delta_is_written_where_its_path_was_when_it_began(tmp_path, monkeypatch):
    collection, state, batch = full(statistics=True)
    checkpoint.export_full(tmp_path / "full", collection, state)
    monkeypatch.chdir(tmp_path)
    _, state, _ = collection.lookup(collection.grow(state, batch), batch.features)
    begun = checkpoint.begin_export_delta("delta", collection, state, base="full")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert begun.result().path == tmp_path / "delta"
    assert not list((tmp_path / "other").iterdir())
    assert by_key(collection, checkpoint.load(tmp_path / "delta", collection)) == by_key(collection, state)


def test_an_export_that_waits_for_its_files_leaves_nothing(tmp_path, monkeypatch):
    """Ctrl-C comes while the thread writes; it writes no further file, and its folder goes."""
    collection, state, _ = full()
    writing, write, result, writes = threading.Event(), save._Tables.write, concurrent.futures.Future.result, []

    def write_slowly(self, prepared):
        writes.append(prepared)
        writing.set()
        time.sleep(0.5)
        return write(self, prepared)

    def wait(future, timeout=None):
        if threading.current_thread() is threading.main_thread():
            assert writing.wait(30)
            signal.raise_signal(signal.SIGINT)
        return result(future, timeout)

    monkeypatch.setattr(save._Tables, "write", write_slowly)
    monkeypatch.setattr(concurrent.futures.Future, "result", wait)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.export_full(tmp_path / "saved", collection, state)
    assert writes and not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxsok.save")]

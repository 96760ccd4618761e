"""Ctrl-C at the worst moment: between a call that was given a state and the assignment of its result."""

import signal
import threading

import numpy as np
import pytest
from checkpoint_cases import assert_same, collection_of, content, tables_of, train

import jaxsok
from jaxsok import admission, checkpoint, enlarge, interrupts, table_import


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

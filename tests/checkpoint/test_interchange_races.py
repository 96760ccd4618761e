"""Tests exports to places that have files already, that other writers use, or where a write fails."""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys

import checkpoint_cases
import numpy as np
import pytest
from interchange_cases import by_key, make_records, put, write_all

import jaxsok
from jaxsok.checkpoint.saved import Source
from jaxsok.interchange import columns, files, hps, npz, sok
from jaxsok.records import Records

pytest.importorskip("pyarrow")  # one of the formats needs it


# Files that are there --------------------------------------------------------------------------------------------

WRONG = {
    "keys: got int64": Records(np.array([7]), np.ones((1, 2), np.float32)),
    "keys: got 2": Records(np.array([2**64 - 1], np.uint64), np.ones((1, 2), np.float32)),
    "rows: got int64": Records(np.array([7], np.uint64), np.ones((1, 2), np.int64)),
    "rows: got float32[2, 2]": Records(np.array([7], np.uint64), np.ones((2, 2), np.float32)),
    'state["m"]: got float64': Records(np.array([7], np.uint64), np.ones((1, 2), np.float32), {"m": np.ones((1, 2))}),
    "frequency: got int64": Records(
        np.array([7], np.uint64), np.ones((1, 2), np.float32), frequency=np.array([1], np.int64)
    ),
    "chunk 1: got rows of 3": [make_records([7], 2), make_records([9], 3)],
    "got int": [7],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_records_leave_no_file(tmp_path, message):
    """In every format no new file is left behind, and existing files stay."""
    write_all(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in (
        lambda records: hps.write_hps(tmp_path / "hps", records, overwrite=True),
        lambda records: sok.write_sok(tmp_path / "sok", "user:0", records, overwrite=True),
        lambda records: columns.write_parquet(tmp_path / "t.parquet", records, overwrite=True),
        lambda records: npz.write_npz(tmp_path / "t.npz", records, overwrite=True),
    ):
        with pytest.raises((TypeError, ValueError)) as info:
            write(WRONG[message])
        assert message in str(info.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_rows_of_two_writers_are_not_read_together(tmp_path, monkeypatch):
    """Another process replaces a table by as many rows, at any instant of reading: one is read, or it is refused."""
    old, new = (Records(np.arange(9, dtype=np.uint64)[::step], np.full((9, 2), step, np.float32)) for step in (1, -1))
    identity_of, seen = files.identity_of, set()
    for instant in range(12):
        hps.write_hps(tmp_path / "user", old, overwrite=True)
        calls = []

        def count(file, calls=calls, instant=instant):
            found = identity_of(file)
            calls.append(file)
            if len(calls) == instant + 1:
                hps.write_hps(tmp_path / "user", new, overwrite=True)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(files, "identity_of", count)
            try:
                chunks = list(hps.read_hps(tmp_path / "user", dim=2, chunk_rows=4))
            except ValueError as error:
                assert "got another file than when it was opened" in str(error)
                seen.add("refused")
                continue
        keys, rows = (np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("keys", "rows"))
        is_old = bool(keys[0] == 0)
        np.testing.assert_array_equal(keys, old.keys if is_old else new.keys)
        np.testing.assert_array_equal(rows, old.rows if is_old else new.rows)
        seen.add("old" if is_old else "new")
    assert seen >= {"refused", "old"}


def test_a_link_to_a_folder_is_followed_once(tmp_path):
    """It is given another table while that of its first folder is read."""
    for name, step in (("first", 1), ("second", -1)):
        keys = np.arange(9, dtype=np.uint64)[::step]
        hps.write_hps(tmp_path / name, Records(keys, np.full((9, 2), step, np.float32)))
    link = tmp_path / "current"
    link.symlink_to("first")
    chunks = hps.read_hps(link, dim=2, chunk_rows=4)
    (tmp_path / "next").symlink_to("second")
    (tmp_path / "next").rename(link)
    for chunk in chunks:
        np.testing.assert_array_equal(chunk.rows, np.ones((chunk.num_rows, 2), np.float32))


def test_files_that_are_there_are_not_overwritten_unasked(tmp_path):
    """With overwrite, no file of the old export remains that would not fit the new export."""
    write_all(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    new = make_records([1, 2, 3], 2)
    writes = (
        functools.partial(hps.write_hps, tmp_path / "hps", new),
        functools.partial(sok.write_sok, tmp_path / "sok", "user:0", new),
        functools.partial(columns.write_parquet, tmp_path / "t.parquet", new),
        functools.partial(npz.write_npz, tmp_path / "t.npz", new),
    )
    for write in writes:
        with pytest.raises(FileExistsError, match="is there already; pass overwrite=True"):
            write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for write in writes:
        write(overwrite=True)
    assert sorted(path.name for path in (tmp_path / "hps").iterdir()) == ["emb_vector", "key"]
    assert sorted(path.name for path in (tmp_path / "sok").iterdir()) == ["user_0-key", "user_0-weight"]
    assert by_key(columns.read_parquet(tmp_path / "t.parquet")) == by_key([new])


def test_only_files_of_the_dump_are_overwritten(tmp_path):
    """Files with a common prefix stay; state of any slot, SOK's own or with this table's header, is removed."""
    old = make_records([1, 2], 3, {"m": 3, "x": 3})
    sok.write_sok(tmp_path, "user", old, optimizer={"m": "Adam-m", "x": "Mine-x"})
    (tmp_path / "user-Adam-v").write_bytes(b"torn")
    header = (tmp_path / "user-Mine-x").read_bytes()
    others = {
        "user-notes.txt": b"mine",
        "user-": b"",
        "user-log-2024": bytes(400).replace(b"\0", b" "),
        "user-Mine-y": header,  # another slot
        "user-other-x": b"guest".rjust(256) + header[256:],  # another table
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "user-photos-more").mkdir()
    sok.write_sok(tmp_path, "user", make_records([3], 3), overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "user-photos-more", "user-key", "user-weight"}
    assert all((tmp_path / name).read_bytes() == content for name, content in others.items())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_dump_that_another_writer_replaces_meanwhile(number, tmp_path, monkeypatch):
    """Its key file may go between two looks at the folder; the last writer wins."""
    write = functools.partial(sok.write_sok, tmp_path, "user", overwrite=True)
    write(make_records([1], 3))
    found, num_looks = sok._is_of, 0

    def is_of(path, end, table):
        nonlocal num_looks
        result, num_looks = found(path, end, table), num_looks + (end == "key")
        if end == "key" and num_looks == number:
            path.unlink()
        return result

    monkeypatch.setattr(sok, "_is_of", is_of)
    write(make_records([2, 3], 3))
    (records,) = sok.read_sok(tmp_path, "user", dim=3)
    assert records.keys.tolist() == [2, 3] and {path.name for path in tmp_path.iterdir()} == {"user-key", "user-weight"}


# Writes that fail, and files that change -------------------------------------------------------------------------


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    """The chunk is refused instead of being half read."""
    hps.write_hps(tmp_path, make_records(range(4), 2))
    chunks = iter(hps.read_hps(tmp_path, dim=2, chunk_rows=2))
    next(chunks)
    whole = (tmp_path / "emb_vector").read_bytes()
    put(tmp_path / "emb_vector", whole[:-4])
    with pytest.raises(ValueError, match="emb_vector: got another file than when it was opened, or other cont"):
        next(chunks)


@pytest.mark.parametrize("num_rows", [2, 4, 40])
def test_a_file_that_is_replaced_after_its_check(tmp_path, num_rows):
    """`load` checks the files of all tables, then enters their rows: meanwhile another writer may come."""
    path = tmp_path / "user.parquet"
    columns.write_parquet(path, [make_records([7, 8], 2), make_records([9, 10], 2)])
    checked = columns.read_parquet(path)
    assert checked.num_rows == 4 and sum(chunk.num_rows for chunk in checked) == 4
    columns.write_parquet(path, make_records(range(num_rows), 2), overwrite=True)
    with pytest.raises(ValueError, match=f"read_parquet: {path}: got another file than when it was opened"):
        list(checked)


def test_an_export_that_stops_halfway_leaves_the_old_one(tmp_path):
    """The writer dies between two chunks."""
    write_all(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def broken():
        yield make_records([1], 2)
        raise RuntimeError("the disk is gone")

    for write in (
        lambda: hps.write_hps(tmp_path / "hps", broken(), overwrite=True),
        lambda: sok.write_sok(tmp_path / "sok", "user:0", broken(), overwrite=True),
        lambda: columns.write_parquet(tmp_path / "t.parquet", broken(), overwrite=True),
    ):
        with pytest.raises(RuntimeError, match="the disk is gone"):
            write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_cannot_be_replaced_is_found_before_anything_goes(tmp_path, monkeypatch):
    """A folder in a file's place, one that appears during the export, and a failing disk leave recoverable files."""
    sok.write_sok(tmp_path, "user", make_records([1, 2], 3))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    folder = tmp_path / "user-Adam-m"

    def late():
        folder.mkdir()
        yield make_records([3], 3, {"m": 3})

    state = {"optimizer": {"m": "Adam-m"}, "overwrite": True}
    for records in (files.RecordChunks(1, 3, {"m": 3}, late), make_records([3], 3, {"m": 3})):
        with pytest.raises(IsADirectoryError, match="user-Adam-m: got a folder"):
            sok.write_sok(tmp_path, "user", records, **state)
        assert {path: path.read_bytes() for path in tmp_path.iterdir() if path != folder} == before
    folder.rmdir()
    replace = os.replace

    def fails_at_weight(source, target):
        if str(target).endswith("weight"):
            raise OSError("the disk is gone")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_at_weight)
    with pytest.raises(OSError, match="the disk is gone") as info:
        sok.write_sok(tmp_path, "user", make_records([3], 3), overwrite=True)
    partials = sorted(tmp_path.glob("*.partial"))
    assert len(partials) == 2 and all(str(path) in info.value.__notes__[0] for path in partials)
    assert not (tmp_path / "user-key").exists()
    monkeypatch.undo()
    for path in partials:
        path.rename(path.with_name(path.name.rsplit(".", 2)[0]))
    assert by_key(sok.read_sok(tmp_path, "user", dim=3)) == by_key([make_records([3], 3)])


# Several writers -------------------------------------------------------------------------------------------------


def test_two_writers_of_one_name_do_not_share_a_file(tmp_path):
    """The writer that ends last replaces the file completely."""

    def chunks():
        yield make_records([1], 2)
        hps.write_hps(tmp_path, make_records([3], 2), overwrite=True)
        yield make_records([2], 2)

    hps.write_hps(tmp_path, chunks(), overwrite=True)
    assert by_key(hps.read_hps(tmp_path, dim=2)) == by_key([make_records([1, 2], 2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emb_vector", "key"]


def test_files_that_another_writer_left_meanwhile_go_too(tmp_path):
    """State written during an export of rows alone is removed, since it would not fit them."""

    def chunks():
        yield make_records([1], 2)
        sok.write_sok(tmp_path, "user", make_records([3, 4], 2, {"m": 2, "v": 2}), optimizer="adam", overwrite=True)
        yield make_records([2], 2)

    sok.write_sok(tmp_path, "user", chunks(), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["user-key", "user-weight"]
    assert by_key(sok.read_sok(tmp_path, "user", dim=2)) == by_key([make_records([1, 2], 2)])


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Returns two processes that write on command, and their folder."""
    root = tmp_path_factory.mktemp("written")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(jaxsok.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-W", "ignore", checkpoint_cases.__file__, "writes", str(root)]
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(subprocess.Popen([*command, number], env=environment, text=True, **pipes))
            for number in "12"
        ]
        assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
        yield root, both
        for child in both:
            child.stdin.close()


def read_back(form, path):
    """Returns the numbers at a written path, which must all come from one writer."""
    if form == "export":
        source = Source.of("test", path)
        source.verify(["item"])
        chunks = list(source.records("item"))
    elif form == "model":
        source = json.loads((path / "model.json").read_text())["of"]
        return {source, *(path / "model.stablehlo").read_text()}
    else:
        read = {
            "hps": lambda: hps.read_hps(path, dim=2, hotness=True),
            "sok": lambda: sok.read_sok(path, "item", dim=2, optimizer="adam"),
            "npz": lambda: npz.read_npz(path),
            "parquet": lambda: columns.read_parquet(path),
        }[form]
        chunks = list(read())
    assert sum(chunk.num_rows for chunk in chunks) == 39
    found = [np.unique(chunk.rows) for chunk in chunks]
    found += [np.unique(array) for chunk in chunks for array in chunk.state.values()]
    found += [np.unique(chunk.frequency) for chunk in chunks if chunk.frequency is not None]
    return {str(int(number)) for array in found for number in array}


def check_races(writers, form, rounds, overwrite):
    root, both = writers
    for number in range(rounds):
        path = root / f"{form}.{overwrite}.{number}_of_{rounds}"
        for process in both:
            process.stdin.write(f"{form} {path.name} {overwrite}\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in both]
        succeeded = {str(n) for n, line in enumerate(lines, 1) if line == "written\n"}
        # The loser gets an error; only the winner's files are there.
        assert len(succeeded) == 1 or (overwrite and succeeded), lines
        assert all(
            line == "written\n" or (line.startswith("FileExistsError") and str(path) in line) for line in lines
        ), lines
        found = read_back(form, path)
        assert len(found) == 1 and found <= succeeded, (found, lines)
        below = [*root.iterdir(), *(path.iterdir() if path.is_dir() else [])]
        assert not [child.name for child in below if child.suffix in (".writing", ".partial")]


FORMS_RACED = ["export", "model", "hps", "sok", "npz", "parquet"]


@pytest.mark.parametrize("form", FORMS_RACED)
def test_of_two_writers_of_one_path_one_succeeds(writers, form):
    """Two processes write at the same time, like a preempted job and its successor."""
    check_races(writers, form, 8, False)


@pytest.mark.parametrize("form", FORMS_RACED[2:])
def test_two_writers_that_may_overwrite_do_not_mix(writers, form):
    check_races(writers, form, 8, True)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS_RACED)
def test_many_rounds_of_two_writers(writers, form):
    check_races(writers, form, 200, False)

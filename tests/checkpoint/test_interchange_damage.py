"""Tests that files of other systems are refused where bytes are missing, moved or changed, or values cannot be."""

import functools
import io
import os
import string
import struct
import tracemalloc
import warnings
import zipfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from interchange_cases import by_key, folder, hps_bytes, make_records, put, sok_bytes, write_all

import jaxsok
from jaxsok.interchange import columns, files, hps, npz, sok, sok_files

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("form", ["hps", "sok", "parquet", "npz"])
def test_files_of_another_size_are_refused(tmp_path, form):
    """Files with bytes cut off, added or removed anywhere are refused, with the file and the byte."""
    read, paths = write_all(tmp_path)[form]
    wanted = by_key(read())
    for path in paths:
        whole = path.read_bytes()
        # Small files are cut at every place; files of libraries, mostly metadata, at a sample of places.
        step = 1 if form in ("hps", "sok") else 7
        bad = [whole[:length] for length in range(0, len(whole), step)] + [whole[:-1], whole + b"\0", whole + b"PAR1"]
        if form != "npz":  # checksums do not cover the directory of a zip
            bad += [whole[:place] + whole[place + 1 :] for place in range(0, len(whole), 7)]
            bad += [whole[:place] + b"\0" + whole[place:] for place in range(0, len(whole), 7)]
        untouched = 0
        for content in bad:
            put(path, content)
            try:
                # Parquet has unused room; the parts that checksums cover are unchanged then.
                assert by_key(read()) == wanted and form == "parquet" and abs(len(content) - len(whole)) == 1
                untouched += 1
            except ValueError as error:
                assert path.name in str(error) and any(what in str(error) for what in ("byte", "line"))
        assert untouched < len(bad) / 100
        path.unlink()
        with pytest.raises(FileNotFoundError, match=path.name):
            read()
        put(path, whole)
    assert by_key(read()) == wanted


def entry_of(array):
    """Returns an array as `.npy` stores it."""
    with io.BytesIO() as file:
        np.save(file, array)
        return file.getvalue()


def claims(shape, dtype="<f4"):
    """Returns the head of an array without its data."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


NPZ = {
    "a duplicate": ["key.npy", ("key.npy", entry_of(np.array([1, 2, 3], np.uint64)))],
    "a name without .npy": [("key", entry_of(np.array([1, 2, 3], np.uint64)))],
    "the same name with and without .npy": ["key.npy", ("key", b"123")],
    "no array": [("key.npy", b"123")],
    "text": ["key.npy", ("readme.txt", b"hello")],
    "an array of objects": [("key.npy", claims((3,), "|O") + b"N.")],
    "a scalar": [("key.npy", entry_of(np.uint64(3)))],
    "fields": [("key.npy", entry_of(np.zeros(3, [("a", "<u8")])))],
    "strings": [("key.npy", entry_of(np.array(["7", "8", "9"])))],
    "floats": [("key.npy", entry_of(np.ones(3)))],
    "one of the statistics": ["key.npy", ("last_step.npy", entry_of(np.ones(3, np.uint32)))],
    "an unknown dtype of rows": ["key.npy", ("row_dtype.npy", entry_of(np.array("int8")))],
    "a shape beyond memory": [("key.npy", claims((2**50,), "<u8"))],
    "an array that claims more than there is": [("key.npy", claims((2**28,), "<u8"))],
    "a negative shape": [("key.npy", claims((-1,), "<u8"))],
    "statistics of objects": ["key.npy", ("last_step.npy", entry_of(np.array("x")))],
    "a state of one axis": ["key.npy", ("state.m.npy", entry_of(np.ones(3, np.float32)))],
}


@pytest.mark.parametrize("case", NPZ)
def test_npz_entries_that_cannot_be_are_refused(tmp_path, case):
    """Duplicates, invalid arrays, arrays of other types, and sizes that only the head claims are refused."""
    whole = {
        "key.npy": entry_of(np.array([7, 8, 9], np.uint64)),
        "row.npy": entry_of(np.ones((3, 2), np.float32)),
        "row_dtype.npy": entry_of(np.array("float32")),
    }
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two entries have one name
        rest = ["row.npy"] if "dtype" in case else ["row.npy", "row_dtype.npy"]
        for file_name in [*rest, *NPZ[case]]:
            file.writestr(*((file_name, whole[file_name]) if isinstance(file_name, str) else file_name))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"read_npz: .*t\.npz: "):
        npz.read_npz(tmp_path / "t.npz")
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize("form", ["parquet", "npz"])
def test_bytes_that_were_changed_are_found(tmp_path, form):
    """Checksums find them before the first chunk is yielded; an accepted file holds what was written."""
    read, (path,) = write_all(tmp_path)[form]
    whole, wanted, found = path.read_bytes(), by_key(read()), 0
    places = range(0, len(whole), 2)
    for place in places:
        put(path, whole[:place] + bytes([whole[place] ^ (1, 16, 128)[place // 2 % 3]]) + whole[place + 1 :])
        try:
            assert by_key(read()) == wanted
        except ValueError as error:
            assert path.name in str(error)
            found += 1
    # The times of files in a zip have no checksum and are never read; the same holds for the mark before a footer.
    assert found > 0.6 * len(places) if form == "npz" else found >= len(places) - 4


@pytest.mark.parametrize("end", ["key", "weight", "Adam-m"])
@hypothesis.given(place=st.integers(0, 295), value=st.integers(0, 255))
def test_headers_that_were_changed_are_refused(end, place, value):
    """The error names the file and the changed field's bytes, or the value that no longer fits."""
    with folder() as path:
        _, paths = write_all(path)["sok"]
        read = functools.partial(sok.read_sok, path / "sok", "user:0", dim=2, optimizer="adam")
        (changed,) = (path for path in paths if path.name == f"user_0-{end}")
        content = bytearray(changed.read_bytes())
        hypothesis.assume(content[place] != value)
        # The reader cannot detect int64 for uint64, other punctuation in names, or a blank slot.
        hypothesis.assume(not (place == 295 and end == "key" and value == 3))
        hypothesis.assume(not (place == 254 and chr(value) in string.punctuation))
        hypothesis.assume(not (place == 291 and end == "Adam-m" and value == 32))
        content[place] = value
        put(changed, bytes(content))
        with pytest.raises(ValueError) as info:
            read()
        fields = {"0 to 255": range(256), "256 to 259": range(256, 260), "260 to 291": range(260, 292)}
        field = next((field for field, places in fields.items() if place in places), None)
        if field is not None:
            assert f"{changed}: byte" in str(info.value)
            assert f"bytes {field}:" in str(info.value) or f"byte {place}:" in str(info.value)
        else:  # a dtype that is unknown, of another kind or of another width
            assert f"{changed}: bytes 292 to 295: dtype: got" in str(info.value) or "byte" in str(info.value)


def test_messages_of_headers(tmp_path):
    """The messages are compared in full."""
    _, paths = write_all(tmp_path)["sok"]
    read = functools.partial(sok.read_sok, tmp_path / "sok", dim=2)
    key = next(path for path in paths if path.name == "user_0-key")
    whole = key.read_bytes()
    put(key, whole[:256] + struct.pack(">I", 7) + whole[260:])
    with pytest.raises(
        ValueError, match=r"user_0-key: bytes 256 to 259: kind of file: got 7 \(unknown\), wanted 0 \(k"
    ):
        read("user:0")
    put(key, whole[:292] + struct.pack(">I", 5) + whole[296:])
    with pytest.raises(
        ValueError, match=r"user_0-key: bytes 292 to 295: dtype: got 5 \(float32\), wanted one of {0: 'i"
    ):
        read("user:0")
    put(key, b"other".rjust(256) + whole[256:])
    with pytest.raises(ValueError, match=r"user_0-key: bytes 0 to 255: table: got 'other', wanted 'user:0' or blanks"):
        read("user:0")
    put(key, whole[:100])
    with pytest.raises(
        ValueError, match=r"user_0-key: byte 100: got the end of the file, wanted a header of 296 bytes"
    ):
        read("user:0")
    put(key, whole)
    with pytest.raises(ValueError, match=r"user_0-weight: byte 320: got the end of the file \(320 bytes\), wanted 332"):
        sok.read_sok(tmp_path / "sok", "user:0", dim=3)


@pytest.mark.parametrize("form", ["parquet", "npz"])
def test_a_part_of_an_optimizers_state_is_refused(form, tmp_path):
    """The rest would be initial, and a step of Adam without its `v` is a thousand times too long."""
    write = columns.write_parquet if form == "parquet" else npz.write_npz
    write(tmp_path / f"item.{form}", make_records(np.arange(3), 2, {"m": 2}))
    collection = jaxsok.Collection([jaxsok.TableSpec("item", 2, jaxsok.optim.adam(0.1))], [])
    with pytest.raises(ValueError, match=r"got optimizer state {'m': 2} in the file, wanted {'m': 2, 'v': 2}"):
        columns.load(collection, collection.init(), tmp_path, format=form)
    state = columns.load(collection, collection.init(), tmp_path, format=form, with_state=False)
    assert collection.num_rows(state) == {"item": 3}


def test_state_with_fewer_lines_than_keys(tmp_path):
    """SOK's defect is refused and explained."""
    put(tmp_path / "t-key", sok_bytes(0, 1, [7, 9, 4]))
    put(tmp_path / "t-weight", sok_bytes(1, 5, np.ones((3, 2))))
    put(tmp_path / "t-Adagrad-accumulator", sok_bytes(2, 5, np.ones((2, 2))))
    with pytest.raises(ValueError, match=r"byte 312: .*after 2 lines of state, wanted 3, .*never trained"):
        sok.read_sok(tmp_path, "t", dim=2, optimizer="adagrad")
    assert sok.read_sok(tmp_path, "t", dim=2).num_rows == 3


@pytest.mark.parametrize("keys", [[7, 2**64 - 1, 9], [7, 9, 5, 9]])
def test_keys_that_cannot_be_are_refused(tmp_path, keys, monkeypatch):
    """PADDING_KEY and repeated keys, however far apart and in however many passes, are refused with their byte."""
    rows, place = np.ones((len(keys), 1), np.float32), 1 if len(keys) == 3 else 3
    key, numbers_ = hps_bytes(keys, rows)
    put(tmp_path / "key", key)
    put(tmp_path / "emb_vector", numbers_)
    put(tmp_path / "t-key", sok_bytes(0, 3, np.array(keys, np.uint64)))
    put(tmp_path / "t-weight", sok_bytes(1, 5, rows))
    put(tmp_path / "t_keys.file", key)
    put(tmp_path / "t_values.file", numbers_)
    arrays = {"key": np.array(keys, np.uint64), "row": rows, "row_dtype": np.array("float32")}
    np.savez(tmp_path / "t.npz", **arrays)
    table = pyarrow.table(
        {"key": arrays["key"], "row": pyarrow.array(rows.tolist(), pyarrow.list_(pyarrow.float32(), 1))}
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    for held in (files.KEYS_HELD, 2, 1):
        monkeypatch.setattr(files, "KEYS_HELD", held)
        monkeypatch.setattr(files, "CHUNK_BYTES", 8 * held)
        with pytest.raises(ValueError, match=f"key: byte {8 * place}: key: got"):
            hps.read_hps(tmp_path, dim=1)
        with pytest.raises(ValueError, match=f"t-key: byte {296 + 8 * place}: key: got"):
            sok.read_sok(tmp_path, "t", dim=1)
        with pytest.raises(ValueError, match=f"t_keys.file: byte {8 * place}: key: got"):
            sok.read_sok_v1(tmp_path, "t", dim=1)
        with pytest.raises(ValueError, match=r"t.npz: .*key"):
            npz.read_npz(tmp_path / "t.npz")
        with pytest.raises(ValueError, match=f"t.parquet: line {place}: key: got"):
            columns.read_parquet(tmp_path / "t.parquet")


COLUMNS = {
    "wanted also": {"key": [7]},
    'column "key": got double, wanted uint64': {"key": [7.0], "row": [[1.0]]},
    'column "row": got list<': {"key": [7], "row": [[1.0]]},
    'column "note": got an unknown column': {"key": [7], "row": None, "note": ["x"]},
    'column "frequency": got int64': {"key": [7], "row": None, "frequency": [1]},
    'column "state.m": got double': {"key": [7], "row": None, "state.m": [1.0]},
    "got nulls": {"key": [None], "row": None},
    'column "key": got dictionary<': {"key": [7], "row": None},
}


@pytest.mark.parametrize("message", COLUMNS)
def test_columns_of_another_type_are_refused(tmp_path, message):
    """The error names each of them."""
    row = pyarrow.array([[1.0, 2.0]], pyarrow.list_(pyarrow.float32(), 2))
    content = {name: row if values is None else values for name, values in COLUMNS[message].items()}
    content["key"] = pyarrow.array(content["key"], pyarrow.float64() if "key" in message else pyarrow.int64())
    if "dictionary" in message:
        content["key"] = pyarrow.array(["seven"]).dictionary_encode()
    parquet.write_table(pyarrow.table(content), tmp_path / "t.parquet")
    with pytest.raises(ValueError) as info:
        columns.read_parquet(tmp_path / "t.parquet")
    assert message in str(info.value) and "t.parquet" in str(info.value)


def test_bits_of_a_footer_of_pyarrow(tmp_path):
    """Each is read or refused with the file's name: some of its errors came through code that may not throw."""
    path, rows = tmp_path / "foreign.parquet", pyarrow.array(np.ones(80, np.float32))
    table = {"key": np.arange(20, dtype=np.uint64), "row": pyarrow.FixedSizeListArray.from_arrays(rows, 4)}
    parquet.write_table(pyarrow.table(table), path, compression="zstd")
    whole = path.read_bytes()
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for bit in range(0, 8 * (len(whole) - 8 - begin), 3):
        damaged = bytearray(whole)
        damaged[begin + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            for _ in columns.read_parquet(path):
                pass
        except (ValueError, TypeError) as error:
            assert str(path) in str(error), (bit, error)


def test_a_head_that_cannot_be_parsed(tmp_path):
    """Python's parser raises MemoryError for it; that is no lack of memory."""
    head = "-" * 9000
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()
    with zipfile.ZipFile(tmp_path / "deep.npz", "w") as archive:
        archive.writestr("key.npy", data)
    with pytest.raises(ValueError, match=r"deep\.npz: .*got a head that cannot be parsed in .key.npy."):
        npz.read_npz(tmp_path / "deep.npz")


def test_a_pipe_in_place_of_a_state_of_sok(tmp_path):
    """It is passed over, and not waited for."""
    sok.write_sok(tmp_path, "user", make_records([7, 9], 2, {"m": 2, "v": 2}), optimizer="adam")
    found = sok_files.tables_in(tmp_path)
    assert len(found["user"]["optimizer"]) == 2
    os.mkfifo(tmp_path / "user-pipe-state")
    assert sok_files.tables_in(tmp_path) == found

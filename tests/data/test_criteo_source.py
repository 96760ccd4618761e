"""Criteo's logs against plain loops, on genuine rows if available: text, conversion, binary forms."""

import concurrent.futures
import csv
import gzip
import math
import os
import pathlib
import pickle
import random
import tempfile
import threading
import tracemalloc

import numpy as np
import pytest

import jaxsok
from jaxsok.data import Batches, criteo, iterate

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _sample_path() -> pathlib.Path:
    """Finds 200 genuine rows, as CSV with a header; skips if there are none, since they may not be distributed."""
    candidates = [ROOT.parent / "shared" / "data" / "criteo-sample" / "criteo_sample.csv"]
    if "JAXSOK_CRITEO_SAMPLE" in os.environ:
        candidates.insert(0, pathlib.Path(os.environ["JAXSOK_CRITEO_SAMPLE"]))
    for path in candidates:
        if path.exists():
            return path
    pytest.skip("no genuine Criteo rows; set JAXSOK_CRITEO_SAMPLE to a criteo_sample.csv")


def _synthetic_fields(num_rows: int, seed: int = 0) -> list[list[str]]:
    """Makes rows of random fields, many of them missing."""
    rng = random.Random(seed)

    def integer():
        return "" if rng.random() < 0.3 else str(rng.choice([-2, -1, 0, 1, 7, rng.randrange(10**7)]))

    def category():
        return "" if rng.random() < 0.3 else f"{rng.choice([0, 2**32 - 1, rng.randrange(2**32)]):08x}"

    return [
        [str(rng.randrange(2)), *(integer() for _ in range(13)), *(category() for _ in range(26))]
        for _ in range(num_rows)
    ]


def _to_text(rows: list[list[str]]) -> bytes:
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def _assert_columns(columns, rows: list[list[str]], *, has_label: bool = True, key_dtype=np.int64) -> None:
    """Compares columns with the meaning of rows of 40 fields, one field at a time."""
    assert set(columns) == {*(["label"] if has_label else []), "integers", *(f"C{i}" for i in range(1, 27))}
    integers = np.array([[math.log1p(max(float(x), 0)) if x else 0.0 for x in row[1:14]] for row in rows])
    assert columns["integers"].dtype == np.float32
    assert columns["integers"].shape == (len(rows), 13)
    # NumPy's log1p of a float32 and Python's of a double, rounded, differ by a unit in the last place.
    np.testing.assert_allclose(columns["integers"], integers.reshape(-1, 13).astype(np.float32), rtol=3e-7)
    for i in range(26):
        keys = columns[f"C{i + 1}"]
        assert keys.dtype == key_dtype
        assert keys.tolist() == [int(row[14 + i], 16) if row[14 + i] else -1 for row in rows]
    if has_label:
        assert columns["label"].dtype == np.float32
        assert columns["label"].tolist() == [float(row[0]) for row in rows]


def _assert_reads(source, rows: list[list[str]], **options) -> None:
    """Reads all rows at once, some of them, and a single row."""
    assert len(source) == len(rows)
    _assert_columns(source.take(slice(0, len(rows))), rows, **options)
    some = np.arange(0, len(rows), 3)
    _assert_columns(source.take(some), rows[::3], **options)
    _assert_columns(source[len(rows) - 1], rows[-1:], **options)


def _as_text(paths, folder):
    return criteo.TextSource(paths)


def _convert(paths, folder):
    converted = pathlib.Path(tempfile.mkdtemp(dir=folder), "converted")
    criteo.convert(paths, converted, num_threads=3)
    return criteo.binary_source(converted)


@pytest.fixture(params=[_as_text, _convert])
def read(request, tmp_path):
    """Returns a reader of plain text: directly, or after a conversion."""
    return lambda paths: request.param(paths, tmp_path)


@pytest.fixture
def small_blocks(monkeypatch):
    """Sets blocks of two or three rows, so that a few hundred rows have many boundaries."""
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 700)


# Text -----------------------------------------------------------------------------------------------------------------


def test_genuine_rows_are_read_as_the_csv_module_reads_them(tmp_path, small_blocks, read):
    """Criteo's own 200 rows are read correctly."""
    with open(_sample_path(), newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == criteo.COLUMN_NAMES
    assert len(rows) == 200
    (tmp_path / "sample.tsv").write_bytes(_to_text(rows))
    _assert_reads(read(tmp_path / "sample.tsv"), rows)
    whole = [[row[0], *(x.removesuffix(".0") for x in row[1:14]), *row[14:]] for row in rows]
    assert whole != rows, "the sample has integers written as floats; the log itself has none"
    (tmp_path / "sample.tsv.gz").write_bytes(gzip.compress(_to_text(whole)))
    _assert_reads(_convert(tmp_path / "sample.tsv.gz", tmp_path), whole)


@pytest.mark.parametrize("block_bytes", [1, 3, 40, 700, 10**6])
def test_rows_do_not_depend_on_blocks(tmp_path, monkeypatch, read, block_bytes):
    """Blocks smaller than a row are joined."""
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block_bytes)
    rows = _synthetic_fields(5 if block_bytes < 100 else 300)
    (tmp_path / "log").write_bytes(_to_text(rows))
    _assert_reads(read(tmp_path / "log"), rows)


def test_the_last_row_needs_no_newline(tmp_path, small_blocks, read):
    """Some files have none."""
    rows = _synthetic_fields(20)
    (tmp_path / "log").write_bytes(_to_text(rows).removesuffix(b"\n"))
    _assert_reads(read(tmp_path / "log"), rows)


def test_capital_digits_are_digits(tmp_path, read):
    """Hexadecimal numbers may have capital digits."""
    rows = _synthetic_fields(20)
    upper = [[*row[:14], *(x.upper() for x in row[14:])] for row in rows]
    (tmp_path / "log").write_bytes(_to_text(upper))
    _assert_reads(read(tmp_path / "log"), rows)


def test_carriage_returns_are_no_part_of_a_row(tmp_path, small_blocks, read):
    """Files from Windows have them."""
    rows = _synthetic_fields(20)
    (tmp_path / "log").write_bytes(_to_text(rows).replace(b"\n", b"\r\n"))
    _assert_reads(read(tmp_path / "log"), rows)


def test_logs_without_labels_are_recognised(tmp_path, small_blocks, read):
    """Kaggle's test file has no column of labels."""
    rows = _synthetic_fields(50)
    (tmp_path / "test.txt").write_bytes(_to_text([row[1:] for row in rows]))
    _assert_reads(read(tmp_path / "test.txt"), rows, has_label=False)
    assert not criteo.TextSource(tmp_path / "test.txt").has_label


def test_several_logs_are_one(tmp_path, small_blocks, read):
    """Logs are concatenated in the given order; some may be empty."""
    rows = _synthetic_fields(100)
    (tmp_path / "b").write_bytes(_to_text(rows[:33]))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "a").write_bytes(_to_text(rows[33:]))
    _assert_reads(read([tmp_path / "b", tmp_path / "empty", tmp_path / "a"]), rows)


def test_batches_of_a_log(tmp_path, small_blocks):
    """Shuffled by threads, each row occurs once with all its columns; another process reads the same."""
    rows = _synthetic_fields(300)
    for row, number in zip(rows, range(300), strict=True):
        row[14] = f"{number:08x}"
    (tmp_path / "log").write_bytes(_to_text(rows))
    source = pickle.loads(pickle.dumps(criteo.TextSource(tmp_path / "log")))
    seen = []
    for batch in iterate(Batches(source, 30, seed=1, process_index=0, process_count=1)):
        seen += batch["C1"].tolist()
        _assert_columns(batch, [rows[number] for number in batch["C1"]])
    assert sorted(seen) == list(range(300)) != seen


def test_gzip_is_recognised_by_its_first_bytes(tmp_path, small_blocks):
    """The suffix does not matter for a conversion; as text, gzip cannot be read from the middle."""
    rows = _synthetic_fields(200)
    halves = _to_text(rows[:90]), _to_text(rows[90:])
    (tmp_path / "day_0").write_bytes(gzip.compress(halves[0]) + gzip.compress(halves[1]))  # two members, as pigz writes
    _assert_reads(_convert(tmp_path / "day_0", tmp_path), rows)
    with pytest.raises(ValueError, match=r"TextSource: .*day_0: got a file compressed with gzip.*convert"):
        criteo.TextSource(tmp_path / "day_0")


def test_a_missing_category_is_the_padding_key():
    """The padding key contributes zeros."""
    assert int(criteo.MISSING_KEY) % 2**64 == jaxsok.PADDING_KEY


MALFORMED = {
    "a column too few": (lambda row: row[:-1], "got 39 columns, wanted 40"),
    "a column too many": (lambda row: [*row, "0"], "got 41 columns"),
    "an empty line": (lambda row: [], "got 1 columns"),
    "a category of seven digits": (lambda row: [*row[:20], "abcdef0", *row[21:]], "column C7: wanted 8 hexadecimal"),
    "a category of nine digits": (lambda row: [*row[:20], "0abcdef01", *row[21:]], "column C7: wanted 8 hexadecimal"),
    "a category that is no number": (lambda row: [*row[:39], "0000000g"], "column C26: .* got '0000000g'"),
    "a category with a sign": (lambda row: [*row[:39], "-0000001"], "column C26"),
    "a category that is not ASCII": (lambda row: [*row[:39], "000000é"], "column C26"),
    "an integer that is a word": (lambda row: [*row[:3], "many", *row[4:]], "column I3: wanted an integer .* 'many'"),
    "an integer that is infinite": (lambda row: [*row[:3], "inf", *row[4:]], "column I3"),
    "an integer that is no number": (lambda row: [*row[:3], "nan", *row[4:]], "column I3"),
    "a label of 2": (lambda row: ["2", *row[1:]], "column label: wanted 0 or 1, got '2'"),
    "no label": (lambda row: ["", *row[1:]], "column label: wanted 0 or 1, got ''"),
}


@pytest.mark.parametrize("bad_row", [1, 2, 77, 100])
@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_row_is_named(tmp_path, small_blocks, change, message, bad_row):
    """The error names file, row and column; the conversion leaves nothing, and the blocks before can be read."""
    rows = _synthetic_fields(100)
    rows[bad_row - 1] = change(rows[bad_row - 1])
    (tmp_path / "log").write_bytes(_to_text(rows))
    is_taken_for_unlabelled = len(rows[0]) == 39
    if is_taken_for_unlabelled:
        message = r"row [12].*taken for one without labels"

    def read_text():
        source = criteo.TextSource(tmp_path / "log")
        assert len(source) == 100
        if bad_row > 10:
            _assert_columns(source.take(slice(0, 50)), rows[:50])
        source.take(slice(0, 100))

    for read in (read_text, lambda: criteo.convert(tmp_path / "log", tmp_path / "converted")):
        with pytest.raises(criteo.LogFormatError, match=message) as caught:
            read()
        assert str(tmp_path / "log") in str(caught.value)
        assert is_taken_for_unlabelled or f"row {bad_row}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_labels_in_one_file_only_are_an_error(tmp_path):
    """The error names the file that differs."""
    rows = _synthetic_fields(4)
    (tmp_path / "train").write_bytes(_to_text(rows))
    (tmp_path / "test").write_bytes(_to_text([row[1:] for row in rows]))
    paths = [tmp_path / "train", tmp_path / "test"]
    for read in (criteo.TextSource, lambda paths: criteo.convert(paths, tmp_path / "converted")):
        with pytest.raises(criteo.LogFormatError, match="test: some of the files have labels"):
            read(paths)
    assert not (tmp_path / "converted").exists()


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    """The conversion leaves no folder."""
    for read in (criteo.TextSource, lambda path: criteo.convert(path, tmp_path / "converted"), criteo.binary_source):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            read(tmp_path / "nowhere")
    assert not (tmp_path / "converted").exists()


def test_empty_logs(tmp_path):
    """An empty log has no rows, and no batch can be made of it."""
    (tmp_path / "log").write_bytes(b"")
    source = criteo.TextSource(tmp_path / "log")
    assert len(source) == 0 and source.ends.tolist() == []
    with pytest.raises(ValueError, match="batch_size: got 4 for 0 samples"):
        Batches(source, 4)
    assert criteo.convert(tmp_path / "log", tmp_path / "converted") == 0
    assert not (tmp_path / "converted").exists()


# Conversion -----------------------------------------------------------------------------------------------------------


def test_a_truncated_gzip_file_is_an_error(tmp_path, small_blocks):
    """The error names the file and the last row that was read."""
    text = gzip.compress(_to_text(_synthetic_fields(300)))
    (tmp_path / "log.gz").write_bytes(text[: len(text) // 2])
    with pytest.raises(criteo.LogFormatError, match=r"log\.gz, after row \d+: .*cut off or damaged"):
        criteo.convert(tmp_path / "log.gz", tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir()] == ["log.gz"]


def test_a_damaged_gzip_file_is_an_error(tmp_path, small_blocks):
    """Bytes in the middle of the file are missing."""
    text = bytearray(gzip.compress(_to_text(_synthetic_fields(300))))
    text[len(text) // 2 : len(text) // 2 + 64] = bytes(64)
    (tmp_path / "log.gz").write_bytes(text)
    with pytest.raises(criteo.LogFormatError, match=r"log\.gz"):
        criteo.convert(tmp_path / "log.gz", tmp_path / "converted")


def test_the_threads_of_a_conversion_end(tmp_path, small_blocks):
    rows = _synthetic_fields(100)
    (tmp_path / "log").write_bytes(_to_text(rows))
    assert criteo.convert(tmp_path / "log", tmp_path / "out") == 100
    _assert_reads(criteo.binary_source(tmp_path / "out"), rows)
    assert not any(thread.name.startswith("criteo") for thread in threading.enumerate())


def test_wrong_arguments_of_convert_are_refused(tmp_path):
    """The arguments are checked before a file is opened."""
    with pytest.raises(ValueError, match="convert: num_threads: got"):
        criteo.convert(tmp_path / "log", tmp_path / "out", num_threads=0)
    with pytest.raises(ValueError, match="convert: paths: got none, wanted at least one file"):
        criteo.convert(tmp_path.glob("*.gz"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"", _to_text(_synthetic_fields(10))], ids=["no samples", "samples"])
def test_a_folder_that_is_there_is_refused(tmp_path, text):
    """Its files would be read with the labels of another log, or as the samples of this one."""
    (tmp_path / "log").write_bytes(text)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "day_0_labels.npy").write_bytes(b"")
    with pytest.raises(FileExistsError, match=r"convert: path: got .*out, which exists, wanted a new folder"):
        criteo.convert(tmp_path / "log", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["day_0_labels.npy"]


def test_paths_of_any_kind(tmp_path):
    rows = _synthetic_fields(10)
    (tmp_path / "log").write_bytes(_to_text(rows))
    assert len(criteo.TextSource(tmp_path.glob("log"))) == 10


def test_a_conversion_that_cannot_finish_leaves_nothing(tmp_path, monkeypatch):
    """Ctrl-C, here after the files and before the folder gets its name."""
    (tmp_path / "log").write_bytes(_to_text(_synthetic_fields(10)))

    def interrupted(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", interrupted)
        criteo.convert(tmp_path / "log", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_of_two_conversions_into_one_folder_the_first_stays(tmp_path, monkeypatch):
    """The log without labels must not be read with those of the other."""
    rows = _synthetic_fields(10)
    (tmp_path / "train").write_bytes(_to_text(rows))
    (tmp_path / "test").write_bytes(_to_text([row[1:] for row in _synthetic_fields(10)]))
    write_header = criteo._write_header

    def convert_other(*args):
        monkeypatch.setattr(criteo, "_write_header", write_header)
        criteo.convert(tmp_path / "train", tmp_path / "out")
        write_header(*args)

    monkeypatch.setattr(criteo, "_write_header", convert_other)
    with pytest.raises(FileExistsError, match="another process has written in the meantime"):
        criteo.convert(tmp_path / "test", tmp_path / "out")
    _assert_reads(criteo.binary_source(tmp_path / "out"), rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "test", "train"]


def test_memory_is_bounded_by_the_blocks_in_flight(tmp_path, monkeypatch):
    """The bound does not depend on the length of the log."""
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 1 << 18)
    (tmp_path / "log.gz").write_bytes(gzip.compress(_to_text(_synthetic_fields(1000)) * 100, compresslevel=1))
    tracemalloc.start()
    try:
        num_rows = criteo.convert(tmp_path / "log.gz", tmp_path / "out")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_rows == 100_000
    # A block, its text and its parsed rows, is 0.7 MB, and five are in flight; all rows would be 26 MB, their text 19.
    assert peak_bytes < 8e6


# Binary ---------------------------------------------------------------------------------------------------------------


def _day(folder, number, num_rows, *, key_dtype=np.int32, has_label=True):
    """Writes a day in TorchRec's form, with keys that encode their place."""
    places = 1000 * number + np.arange(num_rows)
    arrays = {
        "dense": np.stack([places + i for i in range(13)], 1).astype(np.float32),
        "sparse": np.stack([26 * places + i for i in range(26)], 1).astype(key_dtype),
    }
    if has_label:
        arrays["labels"] = (places % 2).astype(np.int32)[:, None]
    for name, array in arrays.items():
        np.save(folder / f"day_{number}_{name}.npy", array)
    return arrays


@pytest.mark.parametrize("key_dtype", [np.int32, np.int64])
def test_days_of_arrays(tmp_path, key_dtype):
    """TorchRec's form has days by number, keys of the files' dtype, and float32 labels."""
    days = {number: _day(tmp_path, number, 40 + number, key_dtype=key_dtype) for number in (10, 2, 0)}
    source = criteo.binary_source(tmp_path)
    assert len(source) == 40 + 42 + 50
    whole = {name: np.concatenate([days[number][name] for number in (0, 2, 10)]) for name in days[0]}
    for places in (slice(30, 100), np.arange(0, 132, 5)):
        columns = source.take(places)
        np.testing.assert_array_equal(columns["integers"], whole["dense"][places])
        assert columns["label"].tolist() == whole["labels"][places, 0].tolist()
        assert columns["label"].dtype == np.float32
        for i in range(26):
            assert columns[f"C{i + 1}"].dtype == key_dtype
            np.testing.assert_array_equal(columns[f"C{i + 1}"], whole["sparse"][places, i])
    assert len(pickle.dumps(source)) < 10_000, "files are mapped again"
    again = pickle.loads(pickle.dumps(source)).take(slice(30, 100))
    np.testing.assert_array_equal(again["C26"], whole["sparse"][30:100, 25])


def test_days_of_bags(tmp_path):
    """MLPerf's form has a fixed number of keys per sample for each category."""
    hotness = [1 + i % 5 for i in range(26)]
    plain = {}
    for number in (0, 1):
        _day(tmp_path, number, 20)
        (tmp_path / f"day_{number}_sparse.npy").unlink()
        plain[number] = {
            str(i): (np.arange(20 * hotness[i], dtype=np.int32) + 10_000 * number).reshape(20, -1) for i in range(26)
        }
        plain[number]["4"] = np.asfortranarray(plain[number]["4"])
        np.savez(tmp_path / f"day_{number}_sparse_multi_hot.npz", **plain[number])
    source = criteo.binary_source(tmp_path)
    for places in (slice(15, 25), np.array([0, 19, 20, 39])):
        columns = source.take(places)
        assert columns["label"].shape == (len(columns["integers"]),)
        for i in range(26):
            wanted = np.concatenate([plain[0][str(i)], plain[1][str(i)]])[places]
            assert columns[f"C{i + 1}"].dtype == np.int32
            np.testing.assert_array_equal(columns[f"C{i + 1}"], wanted)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).take(slice(0, 20))["C5"], plain[0]["4"])


def test_one_file_of_integers(tmp_path):
    """Meta's form has 40 numbers of 32 bits per sample; several threads read it."""
    rng = np.random.default_rng(0)
    rows = np.concatenate(
        [rng.integers(0, 2, (50, 1)), rng.integers(-3, 100, (50, 13)), rng.integers(0, 2**31, (50, 26))], 1
    ).astype(np.int32)
    rows.tofile(tmp_path / "train.bin")
    fields = [[*map(str, row[:14]), *(f"{key:08x}" for key in row[14:])] for row in rows.tolist()]
    source = criteo.binary_source(tmp_path / "train.bin")
    _assert_reads(source, fields, key_dtype=np.int32)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for columns in pool.map(source.take, [slice(10, 30)] * 8):
            _assert_columns(columns, fields[10:30], key_dtype=np.int32)
    _assert_reads(pickle.loads(pickle.dumps(source)), fields, key_dtype=np.int32)


def _without(folder, name):
    (folder / name).unlink()


def _bags(folder, arrays, save=np.savez):
    save(folder / "day_0_sparse_multi_hot.npz", **{name: np.zeros((rows, 2), np.int32) for name, rows in arrays})


MISSHAPEN = {
    "25 categories": (
        lambda folder: np.save(folder / "day_0_sparse.npy", np.zeros((5, 25), np.int32)),
        r"day_0_sparse\.npy: got shape \[5, 25\], wanted \[num_samples, 26\]",
    ),
    "12 integers": (
        lambda folder: np.save(folder / "day_0_dense.npy", np.zeros((5, 12), np.float32)),
        r"day_0_dense\.npy: got shape \[5, 12\], wanted \[num_samples, 13\]",
    ),
    "flat categories": (
        lambda folder: np.save(folder / "day_0_sparse.npy", np.zeros(5 * 26, np.int32)),
        r"day_0_sparse\.npy: got shape \[130\]",
    ),
    "fewer labels": (
        lambda folder: np.save(folder / "day_0_labels.npy", np.zeros((4, 1), np.int32)),
        r"day_0.*'label': 4",
    ),
    "labels of one day only": (lambda folder: _without(folder, "day_1_labels.npy"), "some of the days have labels"),
    "bags of 25 categories": (
        lambda folder: _bags(folder, [(str(i), 5) for i in range(25)]),
        r"multi_hot\.npz: got arrays .*wanted .0. to .25.",
    ),
    "bags of other names": (
        lambda folder: _bags(folder, [(f"C{i}", 5) for i in range(26)]),
        r"multi_hot\.npz: got arrays",
    ),
    "bags of fewer samples": (
        lambda folder: _bags(folder, [(str(i), 5 - (i == 3)) for i in range(26)]),
        r"day_0.*'C4': 4",
    ),
    "compressed bags": (
        lambda folder: _bags(folder, [(str(i), 5) for i in range(26)], np.savez_compressed),
        r"multi_hot\.npz: got compressed arrays",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISSHAPEN.values(), ids=MISSHAPEN)
def test_arrays_of_another_shape_are_refused(tmp_path, change, message):
    """The error names the file."""
    for number in (0, 1):
        _day(tmp_path, number, 5)
    change(tmp_path)
    with pytest.raises(ValueError, match=f"binary_source: .*{message}"):
        criteo.binary_source(tmp_path)


@pytest.mark.parametrize("name", ["dense.npy", "labels.npy", "sparse.npy", "sparse_multi_hot.npz"])
@pytest.mark.parametrize("size", [0, 3, 60, -200])
def test_damaged_arrays_are_named(tmp_path, name, size):
    """NumPy's errors do not say which file it is, and one of them advises to unpickle it."""
    _day(tmp_path, 0, 50)
    if name.endswith(".npz"):
        _without(tmp_path, "day_0_sparse.npy")
        _bags(tmp_path, [(str(i), 50) for i in range(26)])
    file = tmp_path / f"day_0_{name}"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(
        ValueError, match=rf"binary_source: .*day_0_{name}: got \d+ bytes .* cut off or damaged"
    ) as info:
        criteo.binary_source(tmp_path)
    assert "pickle" not in str(info.value)


def test_missing_and_cut_off_files(tmp_path):
    """A day without categories, and a file that ends within a sample, are refused."""
    with pytest.raises(FileNotFoundError, match=r"got no \*_dense\.npy there"):
        criteo.binary_source(tmp_path)
    _day(tmp_path, 0, 5)
    (tmp_path / "day_0_sparse.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"day_0_sparse\.npy"):
        criteo.binary_source(tmp_path)
    for num_bytes in (0, 159, 161):
        (tmp_path / "train.bin").write_bytes(bytes(num_bytes))
        with pytest.raises(ValueError, match=rf"train\.bin: got {num_bytes} bytes, wanted a multiple of 160"):
            criteo.binary_source(tmp_path / "train.bin")

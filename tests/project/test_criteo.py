"""The reader of examples/criteo.py against plain loops, on genuine rows where they are at hand; its synthetic log."""

import csv
import doctest
import gzip
import itertools
import math
import os
import pathlib
import random
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest

import jaxsok

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import criteo  # noqa: E402


def _sample_path() -> pathlib.Path:
    """200 genuine rows, as CSV with a header. They are not ours to distribute: found, or the test is skipped."""
    candidates = [ROOT.parent / "shared" / "data" / "criteo-sample" / "criteo_sample.csv"]
    if "JAXSOK_CRITEO_SAMPLE" in os.environ:
        candidates.insert(0, pathlib.Path(os.environ["JAXSOK_CRITEO_SAMPLE"]))
    for path in candidates:
        if path.exists():
            return path
    pytest.skip("no genuine Criteo rows; set JAXSOK_CRITEO_SAMPLE to a criteo_sample.csv")


def _synthetic_fields(num_rows: int, seed: int = 0) -> list[list[str]]:
    """Rows of random fields, many of them missing, made without the writer under test."""
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


def _expected(rows: list[list[str]]) -> criteo.Batch:
    """The meaning of a row of 40 fields, one field at a time."""
    label = np.array([float(row[0]) for row in rows], np.float32)
    integers = np.array([[math.log1p(max(float(x), 0)) if x else 0.0 for x in row[1:14]] for row in rows], np.float32)
    keys = np.array([[int(x, 16) if x else -1 for x in row[14:]] for row in rows], np.int64)
    return criteo.Batch(label, integers, keys)


def _assert_reads(paths, rows: list[list[str]], batch_size: int, *, has_label: bool = True, **options) -> None:
    expected = _expected(rows)
    start = 0
    for batch in criteo.read_log(paths, batch_size, **options):
        end = min(start + batch_size, len(rows))
        assert batch.num_rows == end - start
        assert batch.integers.dtype == np.float32
        assert batch.categories.dtype == np.int64
        np.testing.assert_array_equal(batch.categories, expected.categories[start:end])
        # NumPy's log1p of a float32 and Python's of a double, rounded, differ by a unit in the last place.
        np.testing.assert_allclose(batch.integers, expected.integers[start:end], rtol=3e-7)
        if has_label:
            assert batch.label.dtype == np.float32
            np.testing.assert_array_equal(batch.label, expected.label[start:end])
        else:
            assert batch.label is None
        start = end
    assert start == len(rows)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two or three rows, so that a few hundred rows have many boundaries."""
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 700)


def test_genuine_rows_are_read_as_the_csv_module_reads_them(tmp_path, small_blocks):
    with open(_sample_path(), newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == criteo.COLUMN_NAMES
    assert len(rows) == 200
    (tmp_path / "sample.tsv").write_bytes(_to_text(rows))
    _assert_reads(tmp_path / "sample.tsv", rows, batch_size=64)
    whole = [[row[0], *(x.removesuffix(".0") for x in row[1:14]), *row[14:]] for row in rows]
    assert whole != rows, "the sample has integers written as floats; the log itself has none"
    (tmp_path / "sample.tsv.gz").write_bytes(gzip.compress(_to_text(whole)))
    _assert_reads(tmp_path / "sample.tsv.gz", whole, batch_size=200)


@pytest.mark.parametrize("batch_size", [1, 7, 100, 1000])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_batches_do_not_depend_on_blocks(tmp_path, small_blocks, batch_size, num_workers):
    rows = _synthetic_fields(300)
    (tmp_path / "log").write_bytes(_to_text(rows))
    _assert_reads(tmp_path / "log", rows, batch_size, num_workers=num_workers, prefetch=2)


@pytest.mark.parametrize("block_bytes", [1, 3, 40, 10**6])
def test_blocks_smaller_than_a_row_are_joined(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block_bytes)
    rows = _synthetic_fields(5)
    (tmp_path / "log").write_bytes(_to_text(rows))
    _assert_reads(tmp_path / "log", rows, batch_size=2)


def test_gzip_is_told_by_its_first_bytes(tmp_path, small_blocks):
    rows = _synthetic_fields(200)
    halves = _to_text(rows[:90]), _to_text(rows[90:])
    (tmp_path / "day_0").write_bytes(gzip.compress(halves[0]) + gzip.compress(halves[1]))  # two members, as pigz writes
    _assert_reads(tmp_path / "day_0", rows, batch_size=32)


def test_the_last_row_needs_no_newline(tmp_path, small_blocks):
    rows = _synthetic_fields(20)
    (tmp_path / "log").write_bytes(_to_text(rows).removesuffix(b"\n"))
    _assert_reads(tmp_path / "log", rows, batch_size=8)


def test_capital_digits_are_digits(tmp_path):
    rows = _synthetic_fields(20)
    upper = [[*row[:14], *(x.upper() for x in row[14:])] for row in rows]
    (tmp_path / "log").write_bytes(_to_text(upper))
    _assert_reads(tmp_path / "log", rows, batch_size=20)


def test_carriage_returns_are_no_part_of_a_row(tmp_path):
    rows = _synthetic_fields(20)
    (tmp_path / "log").write_bytes(_to_text(rows).replace(b"\n", b"\r\n"))
    _assert_reads(tmp_path / "log", rows, batch_size=20)


def test_logs_without_labels_are_recognised(tmp_path, small_blocks):
    rows = _synthetic_fields(50)
    (tmp_path / "test.txt").write_bytes(_to_text([row[1:] for row in rows]))
    _assert_reads(tmp_path / "test.txt", rows, batch_size=16, has_label=False)


def test_several_logs_are_one_stream(tmp_path, small_blocks):
    rows = _synthetic_fields(100)
    (tmp_path / "a").write_bytes(_to_text(rows[:33]))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "b").write_bytes(gzip.compress(_to_text(rows[33:])))
    _assert_reads([tmp_path / "a", tmp_path / "empty", tmp_path / "b"], rows, batch_size=16)


@pytest.mark.parametrize("max_rows", [0, 1, 16, 17, 100, 1000])
def test_max_rows_ends_the_stream(tmp_path, small_blocks, max_rows):
    rows = _synthetic_fields(100)
    (tmp_path / "log").write_bytes(_to_text(rows))
    _assert_reads(tmp_path / "log", rows[:max_rows], batch_size=16, max_rows=max_rows)


def test_a_missing_category_is_the_padding_key():
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
    rows = _synthetic_fields(100)
    rows[bad_row - 1] = change(rows[bad_row - 1])
    (tmp_path / "log").write_bytes(_to_text(rows))
    is_taken_for_unlabelled = len(rows[0]) == 39
    if is_taken_for_unlabelled:
        message = r"row [12].*taken for one without labels"
    with pytest.raises(criteo.LogFormatError, match=message) as caught:
        list(criteo.read_log(tmp_path / "log", 10))
    assert str(tmp_path / "log") in str(caught.value)
    assert is_taken_for_unlabelled or f"row {bad_row}" in str(caught.value)


def test_full_batches_before_a_malformed_row_are_given(tmp_path, small_blocks):
    rows = _synthetic_fields(100)
    rows[80] = ["1"]
    (tmp_path / "log").write_bytes(_to_text(rows))
    batches = criteo.read_log(tmp_path / "log", 10)
    assert sum(batch.num_rows for batch in itertools.islice(batches, 7)) == 70
    with pytest.raises(criteo.LogFormatError, match="row 81"):
        list(batches)


def test_labels_in_one_file_only_are_an_error(tmp_path):
    rows = _synthetic_fields(4)
    (tmp_path / "train").write_bytes(_to_text(rows))
    (tmp_path / "test").write_bytes(_to_text([row[1:] for row in rows]))
    with pytest.raises(criteo.LogFormatError, match="test: some of the files have labels"):
        list(criteo.read_log([tmp_path / "train", tmp_path / "test"], 2))


def test_a_truncated_gzip_file_is_an_error(tmp_path, small_blocks):
    text = gzip.compress(_to_text(_synthetic_fields(300)))
    (tmp_path / "log.gz").write_bytes(text[: len(text) // 2])
    with pytest.raises(criteo.LogFormatError, match=r"log\.gz, after row \d+: .*cut off or damaged"):
        list(criteo.read_log(tmp_path / "log.gz", 10))


def test_a_damaged_gzip_file_is_an_error(tmp_path, small_blocks):
    text = bytearray(gzip.compress(_to_text(_synthetic_fields(300))))
    text[len(text) // 2 : len(text) // 2 + 64] = bytes(64)
    (tmp_path / "log.gz").write_bytes(text)
    with pytest.raises(criteo.LogFormatError, match=r"log\.gz"):
        list(criteo.read_log(tmp_path / "log.gz", 10))


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(criteo.read_log(tmp_path / "nowhere", 10))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"num_workers": 0}, {"prefetch": 0}, {"max_rows": -1}])
def test_wrong_arguments_are_refused_by_the_call(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"read_log: {name} must be at least"):
        criteo.read_log("log", **{"batch_size": 1} | options)


def test_closing_the_reader_ends_its_threads(tmp_path, small_blocks):
    (tmp_path / "log").write_bytes(_to_text(_synthetic_fields(300)))
    batches = criteo.read_log(tmp_path / "log", 1, prefetch=1)
    next(batches)
    assert any(thread.name.startswith("criteo") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("criteo") for thread in threading.enumerate())


def test_memory_is_bounded_by_the_blocks_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 1 << 18)
    (tmp_path / "log.gz").write_bytes(gzip.compress(_to_text(_synthetic_fields(1000)) * 100, compresslevel=1))
    tracemalloc.start()
    try:
        num_rows = sum(batch.num_rows for batch in criteo.read_log(tmp_path / "log.gz", 1024))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_rows == 100_000
    # A block, its text and its parsed rows, is 0.7 MB, and four are in flight; all rows would be 26 MB, their text 19.
    assert peak_bytes < 8e6


def test_estimated_rows(tmp_path):
    rows = _synthetic_fields(700)
    (tmp_path / "log").write_bytes(_to_text(rows))
    (tmp_path / "open_end").write_bytes(_to_text(rows).removesuffix(b"\n"))
    (tmp_path / "log.gz").write_bytes(gzip.compress(_to_text(rows)))
    (tmp_path / "empty").write_bytes(b"")
    assert [criteo.estimate_num_rows(tmp_path / name) for name in ("log", "open_end", "log.gz", "empty")] == [
        700,
        700,
        700,
        0,
    ]
    criteo.write_log(tmp_path / "long", 20_000)
    assert criteo.estimate_num_rows(tmp_path / "long") == pytest.approx(20_000, rel=0.03)


# ------------------------------------------------------------------------------------------------------ synthetic log


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """A synthetic log of 60,000 rows, its path and its content."""
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    criteo.write_log(path, 60_000, seed=3)
    (batch,) = criteo.read_log(path, 100_000)
    return path, batch


def test_synthetic_rows_have_the_form_of_criteos(synthetic):
    path, batch = synthetic
    assert batch.num_rows == 60_000
    first = path.read_bytes().split(b"\n", 1)[0].split(b"\t")
    assert len(first) == 40
    assert all(len(field) in (0, 8) for field in first[14:])
    _assert_reads(path, [line.split("\t") for line in path.read_text().splitlines()], batch_size=50_000)


def test_synthetic_keys_follow_a_power_law(synthetic):
    _, batch = synthetic
    for column in range(26):
        keys = batch.categories[:, column]
        missing = (keys == criteo.MISSING_KEY).mean()
        assert missing == pytest.approx(criteo._MISSING_CATEGORIES[column], abs=0.01)
        unique, counts = np.unique(keys[keys != criteo.MISSING_KEY], return_counts=True)
        assert len(unique) <= criteo.CARDINALITIES[column]
        if criteo.CARDINALITIES[column] > 1000:
            counts = np.sort(counts)[::-1]
            # Rank r is drawn r + 1 times less often: rank 0 in 10 times as often as rank 9, within its noise.
            assert 6 < counts[0] / counts[9] < 16
            assert counts[100:].sum() > 0.2 * counts.sum(), "a long tail"


def test_synthetic_labels_follow_the_planted_signal(synthetic):
    _, batch = synthetic
    probability = 1 / (1 + np.exp(-criteo.planted_logit(batch.integers, batch.categories)))
    assert batch.label.mean() == pytest.approx(0.25, abs=0.02)
    for low, high in itertools.pairwise(np.quantile(probability, [0, 0.2, 0.4, 0.6, 0.8, 1])):
        rows = (probability >= low) & (probability <= high)
        # Five standard deviations of a mean of 12,000 draws.
        assert batch.label[rows].mean() == pytest.approx(probability[rows].mean(), abs=5 * 0.5 / 12_000**0.5)


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        criteo.write_log(tmp_path / name, 1000, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_cached_log_is_written_once(tmp_path, monkeypatch):
    path = criteo.cached_log(500, cache_dir=tmp_path / "cache")
    written = path.stat().st_mtime_ns
    assert criteo.cached_log(500, cache_dir=tmp_path / "cache") == path
    assert path.stat().st_mtime_ns == written
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert criteo.cached_log(500).parent == tmp_path / "xdg" / "jaxsok"


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(criteo, "_write_chunk", interrupt)
    with pytest.raises(KeyboardInterrupt):
        criteo.write_log(tmp_path / "log", 1000)
    assert list(tmp_path.iterdir()) == []


def test_documented_examples_run():
    assert doctest.testmod(criteo).failed == 0


def test_the_reader_needs_neither_jax_nor_jaxsok():
    program = "import sys, criteo; assert not {'jax', 'jaxsok'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, check=True)

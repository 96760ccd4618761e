"""Click logs in Criteo's format: a streaming reader, and a writer of synthetic logs with a planted signal.

One row is one impression, its columns separated by tabs: the label (0 or 1; absent in Kaggle's test file), 13 integers,
26 categories of 8 hexadecimal digits. Any integer or category may be missing (an empty field). Kaggle's `train.txt` and
the Terabyte log's `day_0.gz` … `day_23.gz` are such files, plain or compressed with gzip.

Fed by files; feeds `train_dlrm.py`. Knows NumPy and PyArrow, neither JAX nor jaxsok. The model is not here.

Why PyArrow: with Polars 2.1 in its place (PyArrow 26, two cores, a million synthetic rows, four runs by turns) the same
batches came as fast from plain text (0.51 to 0.53 million rows a second; PyArrow 0.48 to 0.59) and a third faster from
gzip (0.43 to 0.46; PyArrow 0.31 to 0.39), in twice the memory (430 MiB; PyArrow 170, whatever the length of the file).
But Polars fills a row that is cut short, or empty, with nulls and says nothing, and its stream of batches is marked
unstable.
"""

import collections
import contextlib
import io
import os
import pathlib
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
INTEGER_NAMES = tuple(f"I{i + 1}" for i in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"C{i + 1}" for i in range(NUM_CATEGORIES))
COLUMN_NAMES = ("label", *INTEGER_NAMES, *CATEGORY_NAMES)

MISSING_KEY = np.int64(-1)
"""jaxsok.PADDING_KEY as int64: a missing category contributes zeros. No category has it: they are below 2**32."""

_BLOCK_BYTES = 4 << 20  # about 17,000 rows: 1 MiB pays more for each call than for its rows, 8 MiB falls out of cache
_GZIP_MAGIC = b"\x1f\x8b"
_HEX_DIGITS = 8


class Batch(NamedTuple):
    """Some consecutive rows of a log, as NumPy arrays."""

    label: np.ndarray | None
    """float32 [rows], 0.0 or 1.0; None if the file has no labels."""
    integers: np.ndarray
    """float32 [rows, 13]: log(1 + x); 0 where x is missing or negative (Criteo's I2 begins at -1)."""
    categories: np.ndarray
    """int64 [rows, 26]: keys; MISSING_KEY where missing. Each column is contiguous."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.integers)


class LogFormatError(ValueError):
    """A row of a log is not in Criteo's format; the message names the file, the row (from 1) and the column."""


# ------------------------------------------------------------------------------------------------------------ reading


def read_log(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    batch_size: int,
    *,
    max_rows: int | None = None,
    num_workers: int = 2,
    prefetch: int = 4,
) -> Iterator[Batch]:
    r"""Streams the rows of one or several logs, in order, as batches.

    Reading, decompression and parsing run in threads ahead of the caller. Memory is bounded by the blocks in flight
    (about 8 MiB each, `num_workers` + 2 of them) and `prefetch` batches, whatever the size of the files. Closing the
    iterator, or leaving it to the garbage collector, ends the threads.

    Args:
      paths: the files, plain or gzip (told apart by their first bytes). All of them have labels, or none has.
      batch_size: rows in a batch; the last batch of all has the rest.
      max_rows: stop after so many rows; None reads everything.
      num_workers: threads that parse.
      prefetch: batches kept ready.

    Yields:
      Batches of `batch_size` rows. An empty file yields nothing.

    Raises:
      ValueError: `batch_size`, `num_workers` or `prefetch` is below 1, or `max_rows` is negative.
      LogFormatError: a row is not in the format, or a file ends in the middle of its gzip stream. The full batches
        before it have been yielded.

    Cost:
      About 3.5 µs of processor time a row of plain text, 5 µs with gzip, spread over the threads.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "two_rows.tsv"
      >>> rows = [["1", "3", "-1"] + [""] * 11 + ["05db9164"] + [""] * 25, ["0"] + [""] * 39]
      >>> _ = path.write_text("".join("\t".join(row) + "\n" for row in rows))
      >>> batch = next(read_log(path, batch_size=2))
      >>> batch.label.tolist(), batch.categories[:, 0].tolist(), batch.integers[0, :2].round(3).tolist()
      ([1.0, 0.0], [98275684, -1], [1.3860000371932983, 0.0])
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("num_workers", num_workers, 1),
        ("prefetch", prefetch, 1),
        ("max_rows", 0 if max_rows is None else max_rows, 0),
    ):
        if value < least:
            raise ValueError(f"read_log: {name} must be at least {least}, got {value}.")
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    batches = _rebatch(_parsed_blocks(paths, num_workers), batch_size, max_rows)
    return _in_background(batches, prefetch)


def estimate_num_rows(path: str | os.PathLike) -> int:
    """Says about how many rows a log has, from its size and its first MiB; exact for a plain file below 1 MiB.

    Meant for a progress bar and for defaults: Criteo's own files vary by a few per cent.
    """
    head_bytes = 1 << 20
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(head_bytes)
    text = zlib.decompressobj(wbits=31).decompress(head) if head.startswith(_GZIP_MAGIC) else head
    num_lines = text.count(b"\n") + (len(head) == size and not text.endswith(b"\n") and len(text) > 0)
    return num_lines * size // max(len(head), 1)


class _Block(NamedTuple):
    path: str
    first_row: int  # from 1, as editors count lines
    text: bytes  # whole rows
    has_label: bool


def _open(path: str) -> pa.NativeFile:
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    return pa.input_stream(path, compression="gzip" if is_gzip else None, buffer_size=_BLOCK_BYTES if is_gzip else None)


def _blocks(path: str) -> Iterator[_Block]:
    first_row, rest, has_label = 1, b"", None
    with _open(path) as stream:
        while True:
            try:
                text = stream.read(_BLOCK_BYTES)
            except OSError as error:
                raise LogFormatError(
                    f"read_log: {path}, after row {first_row - 1 + rest.count(10)}: {error}; "
                    "the file is cut off or damaged, fetch it again."
                ) from error
            end = text.rfind(b"\n") + 1
            whole = rest + text[:end] if text else rest
            rest = text[end:] if end else rest + text
            if whole and (end or not text):
                if has_label is None:
                    has_label = _has_label(path, whole)
                yield _Block(path, first_row, whole, has_label)
                first_row += whole.count(b"\n")
            if not text:
                return


def _has_label(path: str, text: bytes) -> bool:
    num_columns = text.partition(b"\n")[0].count(b"\t") + 1
    if num_columns not in (len(COLUMN_NAMES), len(COLUMN_NAMES) - 1):
        raise LogFormatError(f"read_log: {path}, row 1: {_column_count_message(num_columns)}")
    return num_columns == len(COLUMN_NAMES)


def _column_count_message(num_columns: int) -> str:
    return (
        f"got {num_columns} columns, wanted {len(COLUMN_NAMES)} separated by tabs (label, {NUM_INTEGERS} integers, "
        f"{NUM_CATEGORIES} categories) or {len(COLUMN_NAMES) - 1} (no label)."
    )


def _parsed_blocks(paths: Sequence[str | os.PathLike], num_workers: int) -> Iterator[Batch]:
    """Parses blocks side by side, and gives them in order."""
    pending = collections.deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="criteo-parse") as pool:
        try:
            labelled = None
            for path in map(os.fspath, paths):
                for block in _blocks(path):
                    labelled = block.has_label if labelled is None else labelled
                    if block.has_label != labelled:
                        raise LogFormatError(f"read_log: {path}: some of the files have labels, some have not.")
                    pending.append(pool.submit(_parse, block))
                    if len(pending) > num_workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _parse(block: _Block) -> Batch:
    names = COLUMN_NAMES if block.has_label else COLUMN_NAMES[1:]
    types = {name: pa.binary(_HEX_DIGITS) if name in CATEGORY_NAMES else pa.float32() for name in names}
    try:
        table = pa.csv.read_csv(
            pa.py_buffer(block.text),
            # One block is one chunk, so that the buffers below are whole columns.
            read_options=pa.csv.ReadOptions(column_names=names, block_size=len(block.text) + 1, use_threads=False),
            parse_options=pa.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            convert_options=pa.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
        )
    except pa.ArrowInvalid as error:
        raise _explain(block, error) from error
    columns = [table.column(name).chunk(0) for name in names]
    num_rows = table.num_rows
    label = _label(columns.pop(0)) if block.has_label else None
    integers = np.empty((num_rows, NUM_INTEGERS), np.float32)
    categories = np.empty((NUM_CATEGORIES, num_rows), np.int64)
    is_good = label is None or bool(np.all((label == 0) | (label == 1)))
    for i, column in enumerate(columns[:NUM_INTEGERS]):
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        is_good &= bool(np.all(np.isfinite(values)))
        integers[:, i] = np.log1p(np.maximum(values, 0))
    for i, column in enumerate(columns[NUM_INTEGERS:]):
        is_good &= _keys_of(column, out=categories[i])
    if not is_good:
        raise _explain(block, None)
    return Batch(label, integers, categories.T)


def _label(column: pa.Array) -> np.ndarray:
    return column.fill_null(np.nan).to_numpy(zero_copy_only=False)


def _words(digit: int) -> np.uint64:
    """The byte `digit`, eight times."""
    return np.uint64(digit * 0x0101010101010101)


def _keys_of(column: pa.Array, out: np.ndarray) -> bool:
    """Writes the keys of a column of hexadecimal strings; says whether all of them were hexadecimal.

    Eight digits are one 64-bit word, first digit in its lowest byte, and all bytes are worked on at once.
    """
    text = np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * _HEX_DIGITS)
    nibbles = (text & _words(0x0F)) + ((text >> np.uint64(6)) & _words(1)) * np.uint64(9)
    words = ((nibbles << np.uint64(4)) | (nibbles >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    words = ((words << np.uint64(8)) | (words >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    words = ((words << np.uint64(16)) | (words >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    out[:] = words.view(np.int64)
    is_hex = _is_hex(text)
    if column.null_count:
        is_missing = column.is_null().to_numpy(zero_copy_only=False)
        out[is_missing] = MISSING_KEY
        is_hex |= is_missing
    return bool(is_hex.all())


def _is_hex(text: np.ndarray) -> np.ndarray:
    """For each word, whether its eight bytes are hexadecimal digits.

    Adding to a byte below 0x80 what is missing to 0x80 sets its highest bit exactly if it reaches the bound, and never
    carries into the next byte; the bytes at or above 0x80 are refused by the last term.
    """
    lower = text | _words(0x20)
    is_digit = (text + _words(0x80 - 0x30)) & ~(text + _words(0x80 - 0x3A))
    is_letter = (lower + _words(0x80 - 0x61)) & ~(lower + _words(0x80 - 0x67))
    return ((is_digit | is_letter) & ~text & _words(0x80)) == _words(0x80)


def _explain(block: _Block, error: Exception | None) -> LogFormatError:
    """Finds the first bad row of a block, field by field: slow, and only on the way to an error."""
    names = COLUMN_NAMES if block.has_label else COLUMN_NAMES[1:]
    hint = "" if block.has_label else " (Row 1 has 39 columns: the file was taken for one without labels.)"
    rows = block.text.removesuffix(b"\n").split(b"\n")
    for row, line in enumerate(rows, start=block.first_row):
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != len(names):
            return LogFormatError(f"read_log: {block.path}, row {row}: {_column_count_message(len(fields))}{hint}")
        for name, field in zip(names, fields, strict=True):
            if wanted := _refusal(name, field):
                got = field.decode(errors="backslashreplace")
                where = f"{block.path}, row {row}, column {name}"
                return LogFormatError(f"read_log: {where}: wanted {wanted}, got {got!r}.{hint}")
    return LogFormatError(f"read_log: {block.path}, rows {block.first_row} to {row}: {error}.{hint}")


def _refusal(name: str, field: bytes) -> str | None:
    """What was wanted in place of `field`, or None if it is good."""
    if name in CATEGORY_NAMES:
        is_hex = len(field) == _HEX_DIGITS and all(digit in b"0123456789abcdefABCDEF" for digit in field)
        return None if is_hex or not field else "8 hexadecimal digits or nothing"
    try:
        value = float(field) if field else None
    except ValueError:
        value = np.nan
    if name == "label":
        return None if value in (0.0, 1.0) else "0 or 1"
    return None if value is None or np.isfinite(np.float32(value)) else "an integer or nothing"


def _rebatch(blocks: Iterator[Batch], batch_size: int, max_rows: int | None) -> Iterator[Batch]:
    """Cuts parsed blocks of any size into batches of one size."""
    parts: list[Batch] = []
    num_ready, num_left = 0, np.inf if max_rows is None else max_rows
    with contextlib.closing(blocks):
        for block in blocks:
            start = 0
            while start < block.num_rows and num_left:
                count = int(min(block.num_rows - start, batch_size - num_ready, num_left))
                parts.append(_rows(block, start, start + count))
                start, num_ready, num_left = start + count, num_ready + count, num_left - count
                if num_ready == batch_size:
                    yield _concatenate(parts)
                    parts, num_ready = [], 0
            if not num_left:
                break
    if parts:
        yield _concatenate(parts)


def _rows(batch: Batch, start: int, end: int) -> Batch:
    label = None if batch.label is None else batch.label[start:end]
    return Batch(label, batch.integers[start:end], batch.categories[start:end])


def _concatenate(parts: Sequence[Batch]) -> Batch:
    """Joins parts into arrays of their own, so that a small batch does not keep a block alive."""
    label = None if parts[0].label is None else np.concatenate([part.label for part in parts])
    categories = np.concatenate([part.categories.T for part in parts], axis=1).T
    return Batch(label, np.concatenate([part.integers for part in parts]), categories)


def _in_background(batches: Iterator[Batch], prefetch: int) -> Iterator[Batch]:
    """Runs an iterator in a thread, at most `prefetch` items ahead; its exception is raised here."""
    ready, stop = queue.Queue(prefetch), threading.Event()

    def put(item) -> bool:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work():
        with contextlib.closing(batches):
            try:
                for batch in batches:
                    if not put((batch, None)):
                        return
                put((None, None))
            except Exception as error:
                put((None, error))

    def drain():
        thread = threading.Thread(target=work, name="criteo-read", daemon=True)
        thread.start()
        try:
            while True:
                batch, error = ready.get()
                if error is not None:
                    raise error
                if batch is None:
                    return
                yield batch
        finally:
            stop.set()
            thread.join()

    return drain()


# ------------------------------------------------------------------------------------------------------ synthetic log

CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct keys of C1 … C26 in Kaggle's train.txt."""

_MISSING_INTEGERS = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.77, 0.22)
_MISSING_CATEGORIES = (
    0.0, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0,
    0.0, 0.0, 0.03, 0.0, 0.0, 0.44, 0.44, 0.03, 0.76, 0.0, 0.03, 0.44, 0.44,
)  # fmt: skip
# The shares of missing values follow Kaggle's train.txt.

_EXPONENT = 1.05  # the power law of keys in recommender logs; the same as the Zipf workloads of the benchmarks
_CHUNK_ROWS = 1 << 16
_LOG_VERSION = 1  # part of the name of a cached log: raise it when the same seed gives other rows

_KEY_EFFECT = 0.25  # standard deviation of what one category adds to the logit
_PAIRS = ((0, 13), (4, 8), (5, 16), (7, 22))  # columns of few keys whose products count: what a dot interaction finds
_PAIR_EFFECT = 0.35
_INTEGER_EFFECT = 0.12
_BIAS = -1.65  # a base rate of 0.25, about that of Kaggle's log


def write_log(path: str | os.PathLike, num_rows: int, seed: int = 0, *, max_cardinality: int = 200_000) -> None:
    """Writes a log in Criteo's format whose labels follow a planted signal.

    Keys follow a power law over as many keys as Criteo's columns have, at most `max_cardinality`; as many values are
    missing. A label is 1 with probability sigmoid(`planted_logit`), about 0.25 on average. The same arguments write
    the same bytes. The file appears when it is complete: an interrupted call leaves nothing.

    Args:
      path: where to; replaced if it is there.
      num_rows: rows to write.
      seed: chooses rows and labels; the effect of a key is the same for all seeds.
      max_cardinality: the most keys of one column.

    Cost:
      About 6 µs and 240 bytes a row.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            for start in range(0, num_rows, _CHUNK_ROWS):
                rng = np.random.default_rng([seed, start])
                _write_chunk(file, rng, min(_CHUNK_ROWS, num_rows - start), max_cardinality)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def cached_log(num_rows: int, seed: int = 0, cache_dir: str | os.PathLike | None = None) -> pathlib.Path:
    """Gives the path of a synthetic log, written by the first call and read by the later ones.

    Args:
      num_rows: rows of the log.
      seed: as of `write_log`.
      cache_dir: where it lies; None is `jaxsok` under `$XDG_CACHE_HOME`, by default `~/.cache`.

    Returns:
      The path of the complete file.
    """
    if cache_dir is None:
        cache_dir = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxsok"
    path = pathlib.Path(cache_dir) / f"clicks-v{_LOG_VERSION}-{num_rows}-rows-seed-{seed}.tsv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_log(path, num_rows, seed)
    return path


def planted_logit(integers: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Gives the logit from which the label of a synthetic row was drawn: the best that any model can know.

    Every key has a hidden effect (a function of its column and itself), a few pairs of columns have a product of
    hidden signs, and the integers add linearly; a missing value adds nothing.

    Args:
      integers: float32 [rows, 13], as in `Batch`.
      categories: int64 [rows, 26], as in `Batch`.

    Returns:
      float64 [rows].
    """
    logit = np.full(len(integers), _BIAS)
    signs = {}
    for column in range(NUM_CATEGORIES):
        keys = categories[:, column]
        hashes = _mix(keys.astype(np.uint32) ^ np.uint32(0x9E3779B9 * (column + 1) % 2**32))
        uniform = hashes * 2.0**-32 - 0.5
        is_present = keys != MISSING_KEY
        logit += is_present * uniform * (np.sqrt(12) * _KEY_EFFECT)
        # The lowest bit is as good as independent of the size of the hash.
        signs[column] = is_present * ((hashes & np.uint32(1)) * 2.0 - 1.0)
    for left, right in _PAIRS:
        logit += _PAIR_EFFECT * signs[left] * signs[right]
    signs_of_integers = 1 - 2 * (np.arange(NUM_INTEGERS) % 2)
    return logit + integers @ (_INTEGER_EFFECT * signs_of_integers)


def _mix(x: np.ndarray) -> np.ndarray:
    """Murmur3's finalizer: a bijection of 32 bits, so that distinct ranks are distinct keys."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _power_law_ranks(rng: np.random.Generator, num_rows: int, cardinality: int) -> np.ndarray:
    """Ranks from 0 to cardinality - 1, r with a chance near (r + 1)**-_EXPONENT: by the inverse of its integral."""
    power = 1.0 - _EXPONENT
    top = (cardinality + 1.0) ** power
    ranks = ((top - 1.0) * rng.random(num_rows) + 1.0) ** (1.0 / power)
    return np.minimum(ranks.astype(np.uint32) - 1, cardinality - 1).astype(np.uint32)


def _write_chunk(file: io.BufferedIOBase, rng: np.random.Generator, num_rows: int, max_cardinality: int) -> None:
    raw, is_missing = np.empty((NUM_INTEGERS, num_rows), np.int64), np.empty((NUM_INTEGERS, num_rows), bool)
    for i in range(NUM_INTEGERS):
        spread = 1.0 + 0.15 * i  # from counts of a few to counts of thousands, as in Criteo's columns
        raw[i] = np.minimum(np.exp(rng.normal(1.0, spread, num_rows)) - (2 if i == 1 else 0), 1 << 24)
        is_missing[i] = rng.random(num_rows) < _MISSING_INTEGERS[i]
    integers = np.where(is_missing, 0, np.log1p(np.maximum(raw, 0))).astype(np.float32).T
    keys = np.empty((NUM_CATEGORIES, num_rows), np.int64)
    for i in range(NUM_CATEGORIES):
        ranks = _power_law_ranks(rng, num_rows, min(CARDINALITIES[i], max_cardinality))
        keys[i] = _mix(ranks + np.uint32(i << 25))
        keys[i, rng.random(num_rows) < _MISSING_CATEGORIES[i]] = MISSING_KEY
    label = rng.random(num_rows) < 1.0 / (1.0 + np.exp(-planted_logit(integers, keys.T)))
    columns = [pa.array(label.astype(np.int8))]
    columns += [pa.array(values, mask=mask) for values, mask in zip(raw, is_missing, strict=True)]
    columns += [_hex_strings(column) for column in keys]
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(pa.table(columns, names=list(COLUMN_NAMES)), file, options)


def _hex_strings(keys: np.ndarray) -> pa.Array:
    """Writes keys as 8 hexadecimal digits each, empty where missing: `_keys_of` backwards."""
    words = keys.view(np.uint64) & np.uint64(0xFFFFFFFF)
    words = ((words >> np.uint64(16)) | (words << np.uint64(32))) & np.uint64(0x0000FFFF0000FFFF)
    words = ((words >> np.uint64(8)) | (words << np.uint64(16))) & np.uint64(0x00FF00FF00FF00FF)
    words = ((words >> np.uint64(4)) | (words << np.uint64(8))) & _words(0x0F)
    is_letter = ((words + _words(0x06)) >> np.uint64(4)) & _words(1)
    text = words + _words(ord("0")) + is_letter * np.uint64(ord("a") - ord("0") - 10)
    offsets = np.arange(0, _HEX_DIGITS * (len(keys) + 1), _HEX_DIGITS, dtype=np.int32)
    strings = pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))
    return pa.compute.if_else(pa.array(keys == MISSING_KEY), None, strings)

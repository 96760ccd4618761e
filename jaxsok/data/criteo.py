"""Criteo's click logs: the text as it is published, and the binary forms that others made of it.

One line of text is one impression, its columns separated by tabs: the label (0 or 1; absent in Kaggle's test file), 13
integers, 26 categories of 8 hexadecimal digits. Any integer or category may be missing (an empty field). Kaggle's
`train.txt` and the Terabyte log's `day_0.gz` … `day_23.gz` are such files, plain or compressed with gzip.

All sources here give the same columns: `label` float32 `[num_samples]`, `integers` float32 `[num_samples, 13]`, and
keys `C1` … `C26`.
"""

import binascii
import collections
import contextlib
import itertools
import os
import pathlib
import re
import tokenize
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from jaxsok import checks, published
from jaxsok.data.samples import ArraySource, BlockSource, Columns, JoinedSource
from jaxsok.types import PADDING_KEY

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
INTEGER_NAMES = tuple(f"I{i + 1}" for i in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"C{i + 1}" for i in range(NUM_CATEGORIES))
COLUMN_NAMES = ("label", *INTEGER_NAMES, *CATEGORY_NAMES)

MISSING_KEY = np.uint64(PADDING_KEY).astype(np.int64)  # contributes zeros; categories are below 2**32

_BLOCK_BYTES = 4 << 20  # about 17,000 rows: 1 MiB pays more for each call than for its rows, 8 MiB falls out of cache
_GZIP_MAGIC = b"\x1f\x8b"
_HEX_DIGITS = 8


class LogFormatError(ValueError):
    """A row of a log is not in Criteo's format; the message names the file, the row (from 1) and the column."""


class TextSource(BlockSource):
    r"""Plain text in Criteo's format, one or several files in order; integers x become log(1 + x), or 0 below 0.

    Files compressed with gzip cannot be read from the middle: `convert` makes binary files of them.

    Raises:
      LogFormatError: a row is not in the format; found when its block is read. Some of the files have labels, others
        have none.
      ValueError: a file is compressed.

    Cost:
      Making it reads the files once, to count their rows. Parsing takes about 3.5 µs of processor time a row; blocks
      are parsed by the threads that read them.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "two_rows.tsv"
      >>> rows = [["1", "3", "-1"] + [""] * 11 + ["05db9164"] + [""] * 25, ["0"] + [""] * 39]
      >>> _ = path.write_text("".join("\t".join(row) + "\n" for row in rows))
      >>> columns = TextSource(path).take(slice(0, 2))
      >>> columns["label"].tolist(), columns["C1"].tolist(), columns["integers"][0, :2].round(3).tolist()
      ([1.0, 0.0], [98275684, -1], [1.3860000371932983, 0.0])
    """

    def __init__(self, paths: str | os.PathLike | Sequence[str | os.PathLike]):
        paths = _paths_of("TextSource", paths)
        for path in paths:
            if _is_gzip(path):
                raise ValueError(
                    f"TextSource: {path}: got a file compressed with gzip, wanted text; see criteo.convert."
                )
        self._places: list[tuple[_Block, int]] = []  # each without its text, whose size follows
        counts: list[int] = []
        for block in _blocks_of(paths):
            self._places.append((block._replace(text=b""), len(block.text)))
            counts.append(block.text.count(b"\n") + (not block.text.endswith(b"\n")))
        super().__init__(counts)

    @property
    def has_label(self) -> bool:
        """True if rows have labels: those of Kaggle's test file have none, and there is no column `label`."""
        return all(block.has_label for block, _ in self._places)

    def load(self, block: int) -> Columns:
        without_text, num_bytes = self._places[block]
        with open(without_text.path, "rb") as file:
            file.seek(without_text.first_byte)
            return _parse(without_text._replace(text=file.read(num_bytes)))


def binary_source(path: str | os.PathLike) -> JoinedSource:
    """Reads binary files that hold Criteo's log, or logs of its shape, through the page cache; no sample is decoded.

    Three forms are known:
    - A folder of arrays for each day, as TorchRec and MLPerf make them: `day_0_labels.npy`, `day_0_dense.npy` and
      `day_0_sparse.npy` (`[num_samples, 26]`), or for bags `day_0_sparse_multi_hot.npz`, uncompressed, with an array
      `[num_samples, hotness]` for each category, `"0"` to `"25"`. What `convert` writes is of this form.
    - One file `*.bin` of int32 with 40 numbers a sample: label, integers, categories (Meta's DLRM). Integers become
      log(1 + x), or 0 below 0.

    Keys have the files' type: 32-bit keys travel to a GPU as 32 bits.

    Raises:
      FileNotFoundError: no such files. ValueError: a file of another shape.
    """
    path = pathlib.Path(path)
    if path.is_file():
        return JoinedSource([_RowsOf40(path)])
    numbers_in = lambda dense: ([int(number) for number in re.findall(r"\d+", dense.name)], dense.name)  # noqa: E731
    days = [_Day(dense) for dense in sorted(path.glob("*_dense.npy"), key=numbers_in)]
    if not days:
        raise FileNotFoundError(f"binary_source: {path}: got no *_dense.npy there, wanted at least one day.")
    if len({"label" in day.columns for day in days}) > 1:
        raise ValueError(f"binary_source: {path}: some of the days have labels, some have none.")
    return JoinedSource(days)


class _Day(ArraySource):
    """The arrays of one day."""

    def __init__(self, dense: pathlib.Path):
        stem = os.fspath(dense).removesuffix("_dense.npy")
        labels, bags = pathlib.Path(f"{stem}_labels.npy"), pathlib.Path(f"{stem}_sparse_multi_hot.npz")
        columns = {"integers": _map_rows(dense, NUM_INTEGERS)}
        if labels.exists():
            with _naming_damage(labels):
                columns["label"] = np.load(labels, mmap_mode="r").reshape(-1)
        if bags.exists():
            columns |= _map_bags(bags)
        else:
            columns["sparse"] = _map_rows(pathlib.Path(f"{stem}_sparse.npy"), NUM_CATEGORIES)
        counts = {name: len(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"binary_source: {stem}: got {counts} samples, wanted as many in each file.")
        super().__init__(columns)

    def take(self, positions: slice | np.ndarray) -> Columns:
        columns = super().take(positions)
        if "label" in columns:
            columns["label"] = columns["label"].astype(np.float32)
        # Rows first, then columns: a gather of rows reads each line of memory once.
        return columns | _columns_of(columns.pop("sparse")) if "sparse" in columns else columns


class _RowsOf40(ArraySource):
    """A file of int32 with 40 numbers a sample."""

    def __init__(self, path: pathlib.Path):
        width = len(COLUMN_NAMES)
        if path.stat().st_size % (4 * width) or not path.stat().st_size:
            raise ValueError(
                f"binary_source: {path}: got {path.stat().st_size} bytes, wanted a multiple of {4 * width}: {width} "
                "int32 a sample."
            )
        super().__init__({"rows": np.memmap(path, np.int32, "r").reshape(-1, width)})

    def take(self, positions: slice | np.ndarray) -> Columns:
        rows = super().take(positions)["rows"]
        integers = np.log1p(np.maximum(rows[:, 1 : 1 + NUM_INTEGERS], 0).astype(np.float32))
        columns = {"label": rows[:, 0].astype(np.float32), "integers": integers}
        return columns | _columns_of(rows[:, 1 + NUM_INTEGERS :])


def _columns_of(categories: np.ndarray) -> Columns:
    return {name: categories[:, i] for i, name in enumerate(CATEGORY_NAMES)}


def _map_rows(path: pathlib.Path, width: int) -> np.ndarray:
    with _naming_damage(path):
        array = np.load(path, mmap_mode="r")
    if array.shape[1:] != (width,):
        raise ValueError(f"binary_source: {path}: got shape {list(array.shape)}, wanted [num_samples, {width}].")
    return array


@contextlib.contextmanager
def _naming_damage(path: pathlib.Path) -> Iterator[None]:
    """Names a file of NumPy that cannot be mapped; NumPy's errors do not."""
    try:
        yield
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile) as error:
        num_bytes = path.stat().st_size
        raise ValueError(
            f"binary_source: {path}: got {num_bytes} bytes that NumPy cannot map, wanted arrays of np.save or np.savez "
            "without objects; the file is cut off or damaged: make it again, or use another copy."
        ) from error


def _map_bags(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Maps the keys of each category from an uncompressed .npz, which `np.load` would copy to memory."""
    arrays = {}
    with _naming_damage(path), zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
        for member in [] if is_compressed else archive.infolist():
            file.seek(member.header_offset + 26)  # the lengths of name and extra field, which the data follow
            name_bytes, extra_bytes = np.frombuffer(file.read(4), "<u2").tolist()
            file.seek(member.header_offset + 30 + name_bytes + extra_bytes)
            formats, version = np.lib.format, np.lib.format.read_magic(file)
            read_header = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
            shape, is_fortran, dtype = read_header(file)
            order = "F" if is_fortran else "C"
            arrays[member.filename.removesuffix(".npy")] = np.memmap(path, dtype, "r", file.tell(), shape, order)
    if is_compressed:
        raise ValueError(f"binary_source: {path}: got compressed arrays, wanted those of np.savez.")
    wanted = {str(i): name for i, name in enumerate(CATEGORY_NAMES)}
    if set(arrays) != set(wanted):
        raise ValueError(f'binary_source: {path}: got arrays {list(arrays)}, wanted "0" to "{NUM_CATEGORIES - 1}".')
    return {wanted[name]: array for name, array in arrays.items()}


def convert(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    *,
    num_threads: int = 4,
) -> int:
    """Writes text, plain or compressed with gzip, as binary files for `binary_source`, all of it as one day.

    Args:
      paths: the files, in order. All of them have labels, or none has.
      folder: a new one, which appears when its files are complete. A log without samples makes none.
      num_threads: threads that parse.

    Returns:
      The number of samples.

    Raises:
      LogFormatError: a row is not in the format, or a file ends in the middle of its gzip stream; nothing is written.
      ValueError: no paths; `num_threads` out of range.
      FileExistsError: the folder is there.

    Cost:
      About 3.5 µs of processor time a row of plain text, 5 µs with gzip; 264 bytes of disk.
    """
    checks.integer("convert: num_threads", num_threads, 1)
    paths, folder = _paths_of("convert", paths), pathlib.Path(folder)
    published.require_new("convert", folder)
    with contextlib.closing(_parse_blocks(paths, num_threads)) as parsed:
        blocks = map(_arrays_of, parsed)
        first = next(blocks, None)
        if first is None:
            return 0
        with published.new_folder("convert", folder) as unfinished:
            return _write_arrays(unfinished, first, blocks)


def _arrays_of(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what `convert` writes of a block."""
    sparse = np.stack([columns[name] for name in CATEGORY_NAMES], axis=1)
    arrays = {"dense": columns["integers"], "sparse": sparse}
    return arrays | {"labels": columns["label"]} if "label" in columns else arrays


def _write_arrays(
    folder: pathlib.Path, first: Mapping[str, np.ndarray], rest: Iterable[Mapping[str, np.ndarray]]
) -> int:
    """Writes an .npy file of each array of all blocks, in their order; returns the number of rows."""
    num_rows = 0
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"day_0_{name}.npy", "wb")) for name in first}
        for name, file in files.items():
            _write_header(file, first[name], 0)
        for arrays in itertools.chain([first], rest):
            for name, array in arrays.items():
                files[name].write(np.ascontiguousarray(array).data)
            num_rows += len(arrays["dense"])
        for name, file in files.items():
            file.seek(0)
            _write_header(file, first[name], num_rows)
    return num_rows


def _write_header(file: IO[bytes], like: np.ndarray, num_rows: int) -> None:
    """Writes the head of an .npy file, which is as long for any number of rows."""
    header = {"descr": like.dtype.str, "fortran_order": False, "shape": (num_rows, *like.shape[1:])}
    np.lib.format.write_array_header_1_0(file, header)


def _paths_of(op: str, paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[str]:
    found = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not found:
        raise ValueError(f"{op}: paths: got none, wanted at least one file.")
    return found


def _is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == _GZIP_MAGIC


class _Block(NamedTuple):
    path: str
    first_row: int  # from 1, as editors count lines
    first_byte: int
    text: bytes  # whole rows
    has_label: bool


def _blocks_of(paths: Sequence[str]) -> Iterator[_Block]:
    has_label = None
    for path in paths:
        for block in _read_blocks(path):
            has_label = block.has_label if has_label is None else has_label
            if block.has_label != has_label:
                raise LogFormatError(f"criteo: {path}: some of the files have labels, some have none.")
            yield block


def _read_blocks(path: str) -> Iterator[_Block]:
    first_row, first_byte, rest, has_label = 1, 0, b"", None
    gzip, buffer_size = ("gzip", _BLOCK_BYTES) if _is_gzip(path) else (None, None)
    with pa.input_stream(path, compression=gzip, buffer_size=buffer_size) as stream:
        while True:
            try:
                text = stream.read(_BLOCK_BYTES)
            except OSError as error:
                raise LogFormatError(
                    f"criteo: {path}, after row {first_row - 1 + rest.count(10)}: {error}; "
                    "the file is cut off or damaged, fetch it again."
                ) from error
            end = text.rfind(b"\n") + 1
            whole = rest + text[:end] if text else rest
            rest = text[end:] if end else rest + text
            if whole and (end or not text):
                if has_label is None:
                    num_columns = whole.partition(b"\n")[0].count(b"\t") + 1
                    has_label = num_columns == len(COLUMN_NAMES)
                    if not has_label and num_columns != len(COLUMN_NAMES) - 1:
                        raise LogFormatError(f"criteo: {path}, row 1: {_column_count_message(num_columns)}")
                yield _Block(path, first_row, first_byte, whole, has_label)
                first_row, first_byte = first_row + whole.count(b"\n"), first_byte + len(whole)
            if not text:
                return


def _column_count_message(num_columns: int) -> str:
    return (
        f"got {num_columns} columns, wanted {len(COLUMN_NAMES)} separated by tabs (label, {NUM_INTEGERS} integers, "
        f"{NUM_CATEGORIES} categories) or {len(COLUMN_NAMES) - 1} (no label)."
    )


def _parse_blocks(paths: Sequence[str], num_threads: int) -> Iterator[Columns]:
    """Parses blocks side by side, and gives them in order."""
    pending: collections.deque[Future[Columns]] = collections.deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="criteo-parse") as pool:
        try:
            for block in _blocks_of(paths):
                pending.append(pool.submit(_parse, block))
                if len(pending) > num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _parse(block: _Block) -> Columns:
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
    chunks = [table.column(name).chunk(0) for name in names]
    num_rows = table.num_rows
    label = chunks.pop(0).fill_null(np.nan).to_numpy(zero_copy_only=False) if block.has_label else None
    integers = np.empty((num_rows, NUM_INTEGERS), np.float32)
    categories = np.empty((NUM_CATEGORIES, num_rows), np.int64)
    is_good = label is None or bool(np.all((label == 0) | (label == 1)))
    for i, column in enumerate(chunks[:NUM_INTEGERS]):
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        is_good &= bool(np.all(np.isfinite(values)))
        integers[:, i] = np.log1p(np.maximum(values, 0))
    for i, column in enumerate(chunks[NUM_INTEGERS:]):
        try:
            categories[i] = _keys_of(column)
        except binascii.Error:
            is_good = False
    if not is_good:
        raise _explain(block, None)
    columns: Columns = {} if label is None else {"label": label}
    return columns | {"integers": integers} | dict(zip(CATEGORY_NAMES, categories, strict=True))


def _keys_of(column: pa.Array) -> np.ndarray:
    """Reads the keys of a column of hexadecimal strings: int64; other digits raise binascii.Error."""
    text = column.fill_null(b"0" * _HEX_DIGITS)
    digits = memoryview(text.buffers()[1])[_HEX_DIGITS * text.offset :][: _HEX_DIGITS * len(text)]
    keys = np.frombuffer(binascii.unhexlify(digits), ">u4").astype(np.int64)
    if column.null_count:
        keys[column.is_null().to_numpy(zero_copy_only=False)] = MISSING_KEY
    return keys


def _explain(block: _Block, error: Exception | None) -> LogFormatError:
    """Finds the first bad row of a block, field by field: slow, and only on the way to an error."""
    names = COLUMN_NAMES if block.has_label else COLUMN_NAMES[1:]
    hint = "" if block.has_label else " (Row 1 has 39 columns: the file was taken for one without labels.)"
    rows = block.text.removesuffix(b"\n").split(b"\n")
    for row, line in enumerate(rows, start=block.first_row):
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != len(names):
            return LogFormatError(f"criteo: {block.path}, row {row}: {_column_count_message(len(fields))}{hint}")
        for name, field in zip(names, fields, strict=True):
            if wanted := _refusal(name, field):
                got = field.decode(errors="backslashreplace")
                where = f"{block.path}, row {row}, column {name}"
                return LogFormatError(f"criteo: {where}: wanted {wanted}, got {got!r}.{hint}")
    return LogFormatError(f"criteo: {block.path}, rows {block.first_row} to {row}: {error}.{hint}")


def _refusal(name: str, field: bytes) -> str | None:
    """Says what was wanted in place of `field`; None if it is good."""
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

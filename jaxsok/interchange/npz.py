"""A table as a `.npz` of NumPy: for tables that fit into host memory, and for other tools.

Arrays are `key` uint64 and `row`, and if they are kept `state.<name>`, `last_step` and `frequency`, with an entry for
each row. Rows of bfloat16, which the format lacks, are uint16 of the same bits; `row_dtype` names the dtype. A file of
another tool may leave `row_dtype` out, and its `key` may be of any integer type. `save` and `load` are in columns.py.
"""

import math
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxsok import keys as keys_lib, published
from jaxsok.interchange import files
from jaxsok.interchange.files import RecordChunks, RecordsIn
from jaxsok.records import Records, join_records

_END = b"PK\x05\x06"
_END_BYTES = 22
_MOST_INFLATED = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # bytes of one byte, at most


def write_npz(path: str | os.PathLike, records: RecordsIn, *, overwrite: bool = False) -> int:
    """Writes a table as one `.npz`, uncompressed; returns the number of rows. Host memory holds the whole table, twice.

    Raises:
      FileExistsError: there is a file, and `overwrite` is False.
      ValueError: a key that occurs twice.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_npz(f"{path}/user.npz", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     with np.load(f"{path}/user.npz") as arrays:
      ...         {name: arrays[name].tolist() for name in arrays}
      {'key': [7], 'row': [[1.0, 1.0]], 'row_dtype': 'float32'}
    """
    _, chunks = files.check_records("write_npz", records, pairs_statistics=True)
    whole = join_records(list(chunks) or [Records(np.zeros(0, np.uint64), np.zeros((0, 1), np.float32))])
    files.check_keys("write_npz", len(whole.keys), lambda: iter([whole.keys]), lambda number: f"records.keys[{number}]")
    rows = whole.rows.view(np.uint16) if whole.rows.dtype.name == "bfloat16" else whole.rows
    arrays: dict[str, Any] = {"key": whole.keys, "row": rows, "row_dtype": np.array(whole.rows.dtype.name)}
    arrays |= {f"state.{name}": array for name, array in whole.state.items()}
    arrays |= {name: getattr(whole, name) for name in ("last_step", "frequency") if getattr(whole, name) is not None}
    with published.partial_files("write_npz", [pathlib.Path(path)], overwrite=overwrite) as (file,):
        np.savez(file, allow_pickle=False, **arrays)
    return whole.num_rows


def read_npz(path: str | os.PathLike, *, chunk_rows: int | None = None) -> RecordChunks:
    """Reads what `write_npz` or another tool wrote; host memory holds the whole table.

    The checksums of all arrays are checked before this returns.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: no `.npz` of these arrays, truncated, of another size, PADDING_KEY, or a key that occurs twice.

    Example:
      `rows = np.concatenate([chunk.rows for chunk in read_npz("tables/user.npz")])`
    """
    op, path = "read_npz", pathlib.Path(path)
    arrays = _arrays(op, path)
    missing = [name for name in ("key", "row") if name not in arrays]
    if missing:
        raise ValueError(f"{op}: {path}: got arrays {list(arrays)}, wanted also {missing}.")
    rows, keys = arrays.pop("row"), arrays.pop("key")
    named = str(arrays.pop("row_dtype", rows.dtype.name))
    dtype = files.ROW_DTYPES.get(named)
    if dtype is None or rows.dtype != (np.dtype(np.uint16) if named == "bfloat16" else dtype):
        wanted = f"one of {list(files.ROW_DTYPES)}; row_dtype names it, bfloat16 is held as uint16"
        raise ValueError(f"{op}: {path}: row: got {rows.dtype.name} with row_dtype {named}, wanted {wanted}.")
    if not np.issubdtype(keys.dtype, np.integer) or keys.ndim != 1:
        raise ValueError(f"{op}: {path}: key: got {keys.dtype.name}{list(keys.shape)}, wanted integers [num_rows].")
    keys = keys_lib.from_words(keys_lib.to_words(keys, op))
    state = {name.removeprefix("state."): arrays.pop(name) for name in list(arrays) if name.startswith("state.")}
    records = Records(keys, rows.view(dtype), state, arrays.pop("last_step", None), arrays.pop("frequency", None))
    if arrays:
        raise ValueError(f"{op}: {path}: got arrays {list(arrays)}, of which a table has none.")
    try:
        form = files.form_of(f"{op}: {path}", records)
    except TypeError as error:
        raise ValueError(str(error)) from error
    files.require_both_statistics(f"{op}: {path}", form.statistics)
    files.check_keys(op, len(keys), lambda: iter([keys]), lambda number: f"{path}: key[{number}]")
    at_once = files.rows_of_chunk(op, chunk_rows, form.row_bytes)

    def chunks() -> Iterator[Records]:
        return (records.take(slice(start, start + at_once)) for start in range(0, len(keys), at_once))

    return RecordChunks(len(keys), form.dim, dict(form.states), chunks)


def _arrays(op: str, path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a `.npz`; refuses one that is longer or shorter than it says."""
    size = files.size_of(op, path)
    with open(path, "rb") as file:
        head = file.read(4)
        file.seek(max(0, size - _END_BYTES))
        tail = file.read(_END_BYTES)
    # zipfile reads past what stands before and behind an archive; a file that was written whole has neither.
    if head != b"PK\x03\x04" or len(tail) != _END_BYTES or tail[:4] != _END or struct.unpack("<H", tail[20:])[0]:
        raise ValueError(
            f"{op}: {path}: bytes {max(0, size - _END_BYTES)} to {size}: got no end of a .npz, wanted one; truncated, "
            "or of another format."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) != struct.unpack("<H", tail[10:12])[0]:
                raise ValueError(f"{len(entries)} arrays and another number at the end")
            arrays: dict[str, np.ndarray] = {}
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name == entry.filename or name in arrays:
                    raise ValueError(f"an entry {entry.filename!r} {'a second time' if name in arrays else ''}")
                arrays[name] = _array(archive, entry)
            return arrays
    except MemoryError:
        raise  # the file is as large
    except Exception as error:  # of many kinds: of zipfile, zlib, NumPy, and the tokenizer that it reads heads with
        raise ValueError(
            f"{op}: {path}: bytes 0 to {size}: got {error}, wanted a .npz as write_npz makes it."
        ) from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Reads an array, once its head claims no more bytes than the entry has."""
    name, most = entry.filename, _MOST_INFLATED.get(entry.compress_type, 0) * entry.compress_size
    if entry.file_size > most:
        raise ValueError(f"{entry.file_size} bytes in the entry {name!r} of {entry.compress_size}")
    with archive.open(entry) as file:
        major, _ = np.lib.format.read_magic(file)
        head = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        try:
            shape, _, dtype = head(file)
        except MemoryError as error:  # of Python's parser, whatever is free
            raise ValueError(f"a head that cannot be parsed in {name!r}") from error
        num_bytes = file.tell() + math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or num_bytes != entry.file_size:
            raise ValueError(f"{dtype}{list(shape)} in the {entry.file_size} bytes of {name!r}")
    with archive.open(entry) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    return array.astype(array.dtype.newbyteorder("="), copy=False)

"""Tables as columns, for analysis: Parquet files, which need pyarrow; `save` and `load` of these and of `.npz`.

| column | type | |
|---|---|---|
| `key` | uint64 | |
| `row` | fixed_size_list[dim] of float16, float32 or float64 | bfloat16 becomes float32, and the metadata says so |
| `state.<name>` | fixed_size_list of float32 | of each piece of optimizer state |
| `last_step`, `frequency` | uint32 | where statistics are kept |

Any tool that reads such files can make them: the metadata is optional, and signed or narrower integers do for keys.
"""

import functools
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np

from jaxsok import checks, published
from jaxsok.collection import Collection
from jaxsok.interchange import files, npz
from jaxsok.interchange.files import Form, RecordChunks, RecordsIn
from jaxsok.keys import from_words, to_words
from jaxsok.records import Records, make_batch
from jaxsok.store import State

_STATISTICS = ("last_step", "frequency")
_ROW_DTYPE = b"jaxsok.row_dtype"
_MAGIC = b"PAR1"  # at both ends of a file

# Pages of Parquet have checksums; their heads and the footer have none, and pyarrow ends the process where some numbers
# of a footer do not fit each other. So files written here have a mark and a checksum of all other bytes before the
# footer, where nothing points to.
_MARK = b"jaxsok 2"
_READ_BYTES = 1 << 20  # at a time, for a checksum


def write_parquet(
    path: str | os.PathLike, records: RecordsIn, *, compression: str | None = "zstd", overwrite: bool = False
) -> int:
    """Writes a table as one Parquet file, a row group for each chunk, with checksums; returns the number of rows.

    `compression` is a codec of Parquet, as "zstd", "lz4" or "snappy", or None. FileExistsError: there is a file, and
    `overwrite` is False; ImportError: pyarrow is missing.

    Example:
      >>> import tempfile, pyarrow.parquet
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_parquet(f"{path}/user.parquet", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     pyarrow.parquet.read_table(f"{path}/user.parquet").to_pylist()
      [{'key': 7, 'row': [1.0, 1.0]}]
    """
    _, parquet = _arrow("write_parquet")
    form, chunks = files.check_records("write_parquet", records, pairs_statistics=True)
    schema, num_rows = _schema(form), 0
    with published.partial_files("write_parquet", [pathlib.Path(path)], overwrite=overwrite) as (file,):
        how = {"compression": compression or "none", "write_page_checksum": True, "use_dictionary": False}
        with parquet.ParquetWriter(file, schema, **how) as writer:
            for chunk in chunks:
                writer.write_batch(_batch(chunk, schema), row_group_size=max(1, chunk.num_rows))
                num_rows += chunk.num_rows
        _guard_footer(file)
    return num_rows


def read_parquet(path: str | os.PathLike, *, chunk_rows: int | None = None) -> RecordChunks:
    """Reads a table from Parquet.

    The whole file is decoded once, with its checksums, before this returns. Host memory holds a chunk of `chunk_rows`
    rows (None: about 64 MiB) and a row group.

    Raises:
      FileNotFoundError, ImportError: there is no file, or no pyarrow.
      ValueError: truncated or broken, columns that are missing, unknown, of another type or with nulls, PADDING_KEY,
        or a key that occurs twice; names the file, and its row group or bytes.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_parquet(f"{path}/user.parquet", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     [chunk.rows.tolist() for chunk in read_parquet(f"{path}/user.parquet")]
      [[[1.0, 1.0]]]
    """
    op, path = "read_parquet", pathlib.Path(path)
    pa, parquet = _arrow(op)
    size = _check_ends(op, path)
    identity = files.identity_of(path)
    _check_footer(op, path, size)

    open_file = functools.partial(parquet.ParquetFile, path, page_checksum_verification=True, pre_buffer=False)
    try:
        with open_file() as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{op}: {path}: the footer, before byte {size - 8}: {error}") from error
    form = _form_of(op, path, schema)
    at_once = files.rows_of_chunk(op, chunk_rows, form.row_bytes)

    def batches(columns: list[str] | None = None) -> Iterator[Any]:
        with open_file() as file:
            files.require_same(op, path, path, identity)
            for group in range(metadata.num_row_groups):
                try:
                    yield from file.iter_batches(at_once, row_groups=[group], columns=columns)
                except (pa.ArrowException, OSError) as error:
                    raise ValueError(f"{op}: {path}: row group {group}: {error}") from error

    return _check_all(op, path, form, metadata.num_rows, batches)


_WRITERS = {"parquet": write_parquet, "npz": npz.write_npz}
_READERS = {"parquet": read_parquet, "npz": npz.read_npz}


def save(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    format: Literal["parquet", "npz"] = "parquet",
    with_state: bool = True,
    overwrite: bool = False,
) -> dict[str, int]:
    """Writes `<directory>/<table>.<format>` for each table; `jaxsok.interchange` has arguments and errors.

    Example:
      `columns.save(collection, state, "tables", ["user"], with_state=False)`
    """
    op = "columns.save"
    checks.one_of(f"{op}: format", format, _WRITERS)
    paths = files.paths_of(op, collection, directory, tables, f".{format}")
    return files.export_all(op, collection, state, paths, _WRITERS[format], with_state=with_state, overwrite=overwrite)


def load(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    format: Literal["parquet", "npz"] = "parquet",
    with_state: bool = True,
    reset_state: bool = False,
    chunk_rows: int | None = None,
) -> State:
    """Enters the rows of such files into tables; `jaxsok.interchange` has arguments and errors.

    Example:
      `state = columns.load(collection, state, "tables", ["user"])`
    """
    op = "columns.load"
    checks.one_of(f"{op}: format", format, _READERS)
    paths = files.paths_of(op, collection, directory, tables, f".{format}")
    chunks = {table: _READERS[format](path, chunk_rows=chunk_rows) for table, path in paths.items()}
    return files.import_all(op, collection, state, chunks, with_state=with_state, reset_state=reset_state)


def _arrow(op: str) -> tuple[Any, Any]:
    what, wanted = f"{op}: pyarrow", "for Parquet files; pip install 'jaxsok[arrow]'"
    return checks.module(what, "pyarrow", wanted), checks.module(what, "pyarrow.parquet", wanted)


def _schema(form: Form) -> Any:
    import pyarrow as pa

    numbers = {"float16": pa.float16(), "float64": pa.float64()}.get(form.dtype.name, pa.float32())
    fields = [("key", pa.uint64()), ("row", pa.list_(numbers, max(1, form.dim)))]
    fields += [(f"state.{name}", pa.list_(pa.float32(), width)) for name, width in form.states]
    fields += [(name, pa.uint32()) for name in form.statistics]
    return pa.schema(fields, metadata={_ROW_DTYPE: form.dtype.name.encode()})


def _batch(chunk: Records, schema: Any) -> Any:
    rows = chunk.rows.astype(np.float32) if chunk.rows.dtype.name == "bfloat16" else chunk.rows
    statistics = [array for array in (chunk.last_step, chunk.frequency) if array is not None]
    return make_batch(schema, chunk.keys, rows, *chunk.state.values(), *statistics)


def _form_of(op: str, path: pathlib.Path, schema: Any) -> Form:
    """Returns the form of a schema; refuses columns that records do not have."""
    import pyarrow as pa

    def refuse(name: str, got: Any, wanted: str) -> None:
        raise ValueError(f'{op}: {path}: column "{name}": got {got}, wanted {wanted}.')

    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise ValueError(f"{op}: {path}: the schema, in the footer's bytes: {error}") from error
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: {path}: got columns {names}, wanted each once.")
    for name in ("key", "row"):
        if name not in names:
            raise ValueError(f'{op}: {path}: got columns {names}, wanted also "{name}": a table of jaxsok.')
    states, dtype, dim = [], np.dtype(np.float32), 0
    for field in schema:
        name, kind = field.name, field.type
        is_lists = pa.types.is_fixed_size_list(kind) and kind.list_size > 0
        if name == "key":
            if not pa.types.is_integer(kind):
                refuse(name, kind, "uint64")
        elif name == "row":
            if not is_lists or not pa.types.is_floating(kind.value_type):
                refuse(name, kind, "fixed_size_list<float>[dim]: pyarrow.list_(pyarrow.float32(), dim)")
            dim, dtype = kind.list_size, np.dtype(kind.value_type.to_pandas_dtype())
        elif name.startswith("state."):
            if not is_lists or kind.value_type != pa.float32():
                refuse(name, kind, "fixed_size_list<float>[width]")
            states.append((name.removeprefix("state."), kind.list_size))
        elif name in _STATISTICS:
            if kind != pa.uint32():
                refuse(name, kind, "uint32")
        else:
            refuse(name, "an unknown column", "key, row, state.<name>, last_step and frequency alone; drop it")
    named = (schema.metadata or {}).get(_ROW_DTYPE, dtype.name.encode()).decode(errors="replace")
    if named != dtype.name:
        if named != "bfloat16" or dtype != np.float32:
            refuse("row", f"{dtype.name} with the metadata {named}", "one dtype")
        dtype = files.ROW_DTYPES["bfloat16"]
    statistics = tuple(name for name in _STATISTICS if name in names)
    files.require_both_statistics(f"{op}: {path}: columns", statistics)
    return Form(dim, dtype, tuple(states), statistics)


def _records(op: str, path: pathlib.Path, form: Form, batch: Any) -> Records:
    def numbers(name: str, *width: int) -> np.ndarray:
        column = batch.column(name)
        flat = column.flatten() if width else column
        if column.null_count or flat.null_count:
            raise ValueError(f'{op}: {path}: column "{name}": got nulls, wanted none.')
        return flat.to_numpy(zero_copy_only=False).reshape(-1, *width)

    return Records(
        from_words(to_words(numbers("key"), op)),
        numbers("row", form.dim).astype(form.dtype),
        {name: numbers(f"state.{name}", width).copy() for name, width in form.states},
        **{name: numbers(name).copy() for name in form.statistics},
    )


def _check_all(
    op: str, path: pathlib.Path, form: Form, num_rows: int, batches: Callable[..., Iterator[Any]]
) -> RecordChunks:
    chunks = lambda: (_records(op, path, form, batch) for batch in batches())  # noqa: E731
    columns = lambda: (batch.column("key").to_numpy() for batch in batches(["key"]))  # noqa: E731
    found = sum(chunk.num_rows for chunk in chunks())
    if found != num_rows:
        raise ValueError(f"{op}: {path}: got {found} rows, wanted {num_rows}, as the footer says.")
    keys = lambda: (from_words(to_words(column, op)) for column in columns())  # noqa: E731
    files.check_keys(op, num_rows, keys, lambda number: f"{path}: line {number}")
    return RecordChunks(num_rows, form.dim, dict(form.states), chunks)


def _check_ends(op: str, path: pathlib.Path) -> int:
    """Returns the size of a file; refuses one that begins or ends otherwise than it must."""
    size = files.size_of(op, path)
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC))
        file.seek(max(0, size - len(_MAGIC)))
        tail = file.read()
    for place, got in ((0, head), (max(0, size - len(tail)), tail)):
        if got != _MAGIC or size < 12:
            raise ValueError(
                f"{op}: {path}: byte {place}: got {got!r}, wanted {_MAGIC!r}; truncated, or of another format."
            )
    return size


def _sum(file: IO[bytes], num_bytes: int) -> int:
    """Computes the checksum of the first bytes of a file."""
    checksum = 0
    file.seek(0)
    while num_bytes > 0 and (data := file.read(min(num_bytes, _READ_BYTES))):
        checksum, num_bytes = zlib.crc32(data, checksum), num_bytes - len(data)
    return checksum


def _guard_footer(file: IO[bytes]) -> None:
    """Writes mark and checksum of all bytes before the footer of a Parquet file."""
    size = file.seek(0, os.SEEK_END)
    checksum = _sum(file, size)
    file.seek(size - 8)
    begin = size - 8 - int.from_bytes(file.read(4), "little")
    file.seek(begin)
    footer = file.read()
    file.seek(begin)
    file.write(_MARK + checksum.to_bytes(4, "little") + footer)


def _check_footer(op: str, path: pathlib.Path, size: int) -> None:
    """Refuses a footer longer than the file, and a marked file without its checksum."""
    with open(path, "rb") as file:
        file.seek(size - 8)
        begin = size - 8 - int.from_bytes(file.read(4), "little")
        if begin < 4:
            raise ValueError(f"{op}: {path}: byte {size - 8}: got a footer longer than the file, wanted a shorter one.")
        guard = max(0, begin - 12)
        file.seek(guard)
        before = file.read(begin - guard)
        if before[:8] != _MARK:
            return
        checksum = _sum(file, guard)
        file.seek(begin)
        if zlib.crc32(file.read(), checksum) != int.from_bytes(before[8:], "little"):
            raise ValueError(f"{op}: {path}: bytes 0 to {size}: got a file that does not have its checksum.")

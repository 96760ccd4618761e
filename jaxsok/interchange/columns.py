"""Tables as columns, for analysis: Parquet files, and Arrow IPC files, which are read without decoding. Needs pyarrow.

| column | type | |
|---|---|---|
| `key` | uint64 | |
| `row` | fixed_size_list[dim] of float16, float32 or float64 | bfloat16 becomes float32, and the metadata says so |
| `state.<name>` | fixed_size_list of float32 | of each piece of optimizer state |
| `last_step`, `frequency` | uint32 | where statistics are kept |

Any tool that reads such files can make them: the metadata is optional, and signed or narrower integers do for keys.
"""

import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np

from jaxsok.collection import Collection
from jaxsok.interchange import files
from jaxsok.interchange.files import Form, PartialFiles, RecordChunks, RecordsIn
from jaxsok.keys import from_words, to_words
from jaxsok.records import Records
from jaxsok.store import State

Format = Literal["parquet", "arrow"]

_ROW_DTYPE = b"jaxsok.row_dtype"
_PARQUET, _ARROW = b"PAR1", b"ARROW1"

# Pages of Parquet have checksums, the footer has none, and pyarrow ends the process where some of its numbers do not
# fit each other. So the footers written here have a mark and a checksum before them, in bytes that nothing points to.
_MARK = b"jaxsok 1"


def write_parquet(
    path: str | os.PathLike, records: RecordsIn, *, compression: str | None = "zstd", overwrite: bool = False
) -> int:
    """Writes a table as one Parquet file, a row group for each chunk, with checksums.

    Args:
      path: of the file; its directory is made.
      records: chunks, taken one by one.
      compression: a codec that Parquet knows, as "zstd", "lz4" or "snappy"; None: none.
      overwrite: whether a file that is there may go.

    Returns:
      How many rows were written.

    Raises:
      FileExistsError: there is a file, and `overwrite` is False.
      ImportError: pyarrow is missing.

    Example:
      >>> import tempfile, pyarrow.parquet
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_parquet(f"{path}/user.parquet", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     pyarrow.parquet.read_table(f"{path}/user.parquet").to_pylist()
      [{'key': 7, 'row': [1.0, 1.0]}]
    """
    _, parquet = _arrow("write_parquet")
    form, chunks = files.checked_records("write_parquet", records)
    schema, num_rows = _schema(form), 0
    with PartialFiles("write_parquet", [pathlib.Path(path)], overwrite=overwrite) as (file,):
        with parquet.ParquetWriter(
            file, schema, compression=compression or "none", write_page_checksum=True, use_dictionary=False
        ) as writer:
            for chunk in chunks:
                writer.write_batch(_batch(chunk, schema), row_group_size=max(1, chunk.num_rows))
                num_rows += chunk.num_rows
        _guard_footer(file)
    return num_rows


def read_parquet(path: str | os.PathLike, *, chunk_rows: int | None = None) -> RecordChunks:
    """Reads a table from Parquet.

    The whole file is decoded once, with its checksums, before this returns; it is read again while the result is
    iterated.

    Args:
      path: of the file.
      chunk_rows: rows at once; None: about 64 MiB. Host memory holds a row group besides.

    Returns:
      Chunks; `num_rows` tells how many in all.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: truncated or broken, columns that are missing, unknown, of another type or with nulls, PADDING_KEY,
        or a key that occurs twice; names the file, and its row group or bytes.
      ImportError: pyarrow is missing.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_parquet(f"{path}/user.parquet", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     [chunk.rows.tolist() for chunk in read_parquet(f"{path}/user.parquet")]
      [[[1.0, 1.0]]]
    """
    op, path = "read_parquet", pathlib.Path(path)
    pa, parquet = _arrow(op)
    size = _check_ends(op, path, _PARQUET, 12)
    _check_footer(op, path, size)

    def opened() -> Any:
        return parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)

    try:
        with opened() as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{op}: {path}: the footer, before byte {size - 8}: {error}") from error
    form = _form_of(op, path, schema)
    at_once = files.rows_of_chunk(op, chunk_rows, form.row_bytes)

    def batches(columns: list[str] | None = None) -> Iterator[Any]:
        with opened() as file:
            for group in range(metadata.num_row_groups):
                try:
                    yield from file.iter_batches(at_once, row_groups=[group], columns=columns)
                except (pa.ArrowException, OSError) as error:
                    first, last = _bytes_of(metadata.row_group(group))
                    raise ValueError(f"{op}: {path}: row group {group}, bytes {first} to {last}: {error}") from error

    return _checked(op, path, form, metadata.num_rows, batches)


def write_arrow(path: str | os.PathLike, records: RecordsIn, *, overwrite: bool = False) -> int:
    """Writes a table as one Arrow IPC file (Feather 2), uncompressed, a record batch for each chunk.

    Args:
      path: of the file; its directory is made.
      records: chunks, taken one by one.
      overwrite: whether a file that is there may go.

    Returns:
      How many rows were written.

    Raises:
      FileExistsError: there is a file, and `overwrite` is False.
      ImportError: pyarrow is missing.

    Example:
      >>> import tempfile, pyarrow
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_arrow(f"{path}/user.arrow", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     pyarrow.ipc.open_file(f"{path}/user.arrow").read_all().to_pylist()
      [{'key': 7, 'row': [1.0, 1.0]}]
    """
    pa, _ = _arrow("write_arrow")
    form, chunks = files.checked_records("write_arrow", records)
    schema, num_rows = _schema(form), 0
    with PartialFiles("write_arrow", [pathlib.Path(path)], overwrite=overwrite) as (file,):
        with pa.ipc.new_file(file, schema) as writer:
            for chunk in chunks:
                writer.write_batch(_batch(chunk, schema))
                num_rows += chunk.num_rows
    return num_rows


def read_arrow(path: str | os.PathLike, *, chunk_rows: int | None = None) -> RecordChunks:
    """Reads a table from an Arrow IPC file.

    The file is checked, and all keys are read, before this returns; rows are read while the result is iterated. The
    format has no checksums.

    Args:
      path: of the file.
      chunk_rows: rows at once; None: about 64 MiB. The file is mapped into memory, not loaded.

    Returns:
      Chunks; `num_rows` tells how many in all.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: truncated or broken, columns that are missing, unknown, of another type or with nulls, PADDING_KEY,
        or a key that occurs twice; names the file, and its record batch or bytes.
      ImportError: pyarrow is missing.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     _ = write_arrow(f"{path}/user.arrow", Records(np.array([7], np.uint64), np.ones((1, 2), np.float32)))
      ...     [chunk.rows.tolist() for chunk in read_arrow(f"{path}/user.arrow")]
      [[[1.0, 1.0]]]
    """
    op, path = "read_arrow", pathlib.Path(path)
    pa, _ = _arrow(op)
    size = _check_ends(op, path, _ARROW, 18)
    with open(path, "rb") as file:
        file.seek(size - 10)
        footer = size - 10 - int.from_bytes(file.read(4), "little", signed=True)
        file.seek(max(0, footer - 8))
        before = file.read(8)
    # Everything in the file is a multiple of 8 bytes long, and a mark stands before the footer: a byte more or less,
    # wherever it is, moves one of them.
    if not 8 <= footer <= size - 10 or footer % 8 or before != b"\xff\xff\xff\xff\0\0\0\0":
        raise ValueError(f"{op}: {path}: byte {footer}: got no footer, wanted one; truncated, or with bytes added.")
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
            schema = file.schema
            num_rows = sum(file.get_batch(number).num_rows for number in range(file.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{op}: {path}: the footer, at byte {footer}, or what it points to: {error}") from error
    form = _form_of(op, path, schema)
    at_once = files.rows_of_chunk(op, chunk_rows, form.row_bytes)

    def batches(columns: list[str] | None = None) -> Iterator[Any]:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                batch = batch if columns is None else batch.select(columns)
                try:
                    batch.validate(full=True)
                except pa.ArrowException as error:
                    raise ValueError(f"{op}: {path}: record batch {number}, before byte {footer}: {error}") from error
                yield from (batch.slice(start, at_once) for start in files.starts(batch.num_rows, at_once))

    return _checked(op, path, form, num_rows, batches)


def save(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    format: Format = "parquet",
    with_state: bool = True,
    overwrite: bool = False,
) -> dict[str, int]:
    """Writes each table of a collection as `<directory>/<table>.parquet` or `.arrow`.

    Args:
      collection: of one process.
      state: not donated.
      directory: it is made.
      tables: names, or a mapping from them to those of the files; None: all. Punctuation becomes `_`.
      format: "parquet" or "arrow".
      with_state: whether to write optimizer state.
      overwrite: whether files that are there may go.

    Returns:
      How many rows were written, by table.

    Raises:
      ValueError: a table that is not there, or two for one file.
      FileExistsError: there are files, and `overwrite` is False.
      ImportError: pyarrow is missing.

    Example:
      `columns.save(collection, state, "tables", ["user"], with_state=False)`
    """
    op, write = "columns.save", _of_format("columns.save", format, write_parquet, write_arrow)
    paths = files.paths_of(op, collection, directory, tables, f".{format}")
    return files.export_all(op, collection, state, paths, write, with_state=with_state, overwrite=overwrite)


def load(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    format: Format = "parquet",
    with_state: bool = True,
    reset_state: bool = False,
    chunk_rows: int | None = None,
) -> State:
    """Enters the rows of such files into tables, each by its key; all files are checked before the first row.

    Args:
      collection: on any mesh.
      state: donated.
      directory: as for `save`.
      tables: as for `save`.
      format: "parquet" or "arrow".
      with_state: whether to take optimizer state; else that of new rows is initial.
      reset_state: whether state of rows that are there becomes initial where the files have none.
      chunk_rows: rows at once; None: about 64 MiB.

    Returns:
      The state.

    Raises:
      FileNotFoundError, ValueError: as `read_parquet`, and where a file does not fit its table; the state is as it
        was.
      MemoryError, TableFullError: the tables cannot grow as far; `state` of the error is the state as it is then.
      ImportError: pyarrow is missing.

    Example:
      `state = columns.load(collection, state, "tables", ["user"])`
    """
    op, read = "columns.load", _of_format("columns.load", format, read_parquet, read_arrow)
    paths = files.paths_of(op, collection, directory, tables, f".{format}")
    chunks = {table: read(path, chunk_rows=chunk_rows) for table, path in paths.items()}
    return files.import_all(op, collection, state, chunks, with_state=with_state, reset_state=reset_state)


# Records as batches of columns ---------------------------------------------------------------------------------------


def _arrow(op: str) -> tuple[Any, Any]:
    """The package pyarrow and its Parquet part."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{op}: needs pyarrow, which is missing: pip install 'jaxsok[arrow]'.") from error
    return pyarrow, pyarrow.parquet


def _schema(form: Form) -> Any:
    import pyarrow as pa

    numbers = {"float16": pa.float16(), "float64": pa.float64()}.get(form.dtype.name, pa.float32())
    fields = [("key", pa.uint64()), ("row", pa.list_(numbers, max(1, form.dim)))]
    fields += [(f"state.{name}", pa.list_(pa.float32(), width)) for name, width in form.states]
    fields += [(name, pa.uint32()) for name in ("last_step", "frequency") if getattr(form, f"has_{name}")]
    return pa.schema(fields, metadata={_ROW_DTYPE: form.dtype.name.encode()})


def _batch(chunk: Records, schema: Any) -> Any:
    import pyarrow as pa

    def lists(array: np.ndarray) -> Any:
        numbers = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        return pa.FixedSizeListArray.from_arrays(
            pa.array(np.ascontiguousarray(numbers).reshape(-1)), max(1, array.shape[1])
        )

    arrays = [pa.array(chunk.keys), lists(chunk.rows), *(lists(array) for array in chunk.state.values())]
    arrays += [pa.array(array) for array in (chunk.last_step, chunk.frequency) if array is not None]
    return pa.record_batch(arrays, schema=schema)


def _form_of(op: str, path: pathlib.Path, schema: Any) -> Form:
    try:
        return _form(op, path, schema)
    except UnicodeDecodeError as error:
        raise ValueError(f"{op}: {path}: the schema, in the footer's bytes: {error}") from error


def _form(op: str, path: pathlib.Path, schema: Any) -> Form:
    """What a schema says of records; refuses columns that records do not have."""
    import pyarrow as pa

    def refuse(name: str, got: Any, wanted: str) -> None:
        raise ValueError(f'{op}: {path}: column "{name}": got {got}, wanted {wanted}.')

    if len(set(schema.names)) != len(schema.names):
        raise ValueError(f"{op}: {path}: got columns {schema.names}, wanted each once.")
    for name in ("key", "row"):
        if name not in schema.names:
            raise ValueError(f'{op}: {path}: got columns {schema.names}, wanted also "{name}".')
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
        elif name in ("last_step", "frequency"):
            if kind != pa.uint32():
                refuse(name, kind, "uint32")
        else:
            refuse(name, "an unknown column", "key, row, state.<name>, last_step and frequency alone; drop it")
    named = (schema.metadata or {}).get(_ROW_DTYPE, dtype.name.encode()).decode(errors="replace")
    if named != dtype.name:
        if named != "bfloat16" or dtype != np.float32:
            refuse("row", f"{dtype.name} with the metadata {named}", "one dtype")
        dtype = files.ROW_DTYPES["bfloat16"]
    kept = ("last_step" in schema.names, "frequency" in schema.names)
    return Form(dim, dtype, tuple(states), *kept)


def _records(op: str, path: pathlib.Path, form: Form, batch: Any) -> Records:
    """A batch as records, in memory of its own; refuses nulls."""

    def lines(name: str, width: int) -> np.ndarray:
        column = batch.column(name)
        numbers = column.flatten()
        if column.null_count or numbers.null_count:
            raise ValueError(f'{op}: {path}: column "{name}": got nulls, wanted none.')
        return numbers.to_numpy(zero_copy_only=False).reshape(-1, width)

    def numbers(name: str) -> np.ndarray:
        column = batch.column(name)
        if column.null_count:
            raise ValueError(f'{op}: {path}: column "{name}": got nulls, wanted none.')
        return column.to_numpy(zero_copy_only=False)

    return Records(
        from_words(to_words(numbers("key"), op)),
        lines("row", form.dim).astype(form.dtype),
        {name: lines(f"state.{name}", width).copy() for name, width in form.states},
        numbers("last_step").copy() if form.has_last_step else None,
        numbers("frequency").copy() if form.has_frequency else None,
    )


def _checked(
    op: str, path: pathlib.Path, form: Form, num_rows: int, batches: Callable[..., Iterator[Any]]
) -> RecordChunks:
    """The chunks of a file that has been gone through once."""

    def chunks() -> Iterator[Records]:
        return (_records(op, path, form, batch) for batch in batches())

    def keys() -> Iterator[np.ndarray]:
        return (from_words(to_words(batch.column("key").to_numpy(), op)) for batch in batches(["key"]))

    found = sum(one.num_rows for one in chunks())
    if found != num_rows:
        raise ValueError(f"{op}: {path}: got {found} rows, wanted {num_rows}, as the footer says.")
    files.check_keys(op, num_rows, keys, lambda number: f"{path}: line {number}")
    return RecordChunks(num_rows, form.dim, dict(form.states), chunks)


def _check_ends(op: str, path: pathlib.Path, magic: bytes, least: int) -> int:
    """The size of a file that begins and ends as it must."""
    size = files.size_of(op, path)
    with open(path, "rb") as file:
        head = file.read(len(magic))
        file.seek(max(0, size - len(magic)))
        tail = file.read()
    for place, got in ((0, head), (max(0, size - len(magic)), tail)):
        if got != magic or size < least:
            raise ValueError(
                f"{op}: {path}: byte {place}: got {got!r}, wanted {magic!r}; truncated, or of another format."
            )
    return size


def _guard_footer(file: IO[bytes]) -> None:
    """Puts mark and checksum before the footer of a Parquet file that was just written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 8)
    begin = size - 8 - int.from_bytes(file.read(4), "little")
    file.seek(begin)
    footer = file.read()
    file.seek(begin)
    file.write(_MARK + zlib.crc32(footer).to_bytes(4, "little") + footer)


def _check_footer(op: str, path: pathlib.Path, size: int) -> None:
    """Refuses a footer that does not have its checksum, or its length; one without a mark is another tool's."""
    with open(path, "rb") as file:
        file.seek(size - 8)
        begin = size - 8 - int.from_bytes(file.read(4), "little")
        if begin < 4:
            raise ValueError(f"{op}: {path}: byte {size - 8}: got a footer longer than the file, wanted a shorter one.")
        file.seek(max(0, begin - 12))
        before = file.read(begin - max(0, begin - 12))
        footer = file.read()
    if before[:8] == _MARK and zlib.crc32(footer) != int.from_bytes(before[8:], "little"):
        raise ValueError(f"{op}: {path}: bytes {begin} to {size}: got a footer that does not have its checksum.")


def _bytes_of(group: Any) -> tuple[int, int]:
    """Where a row group of a Parquet file lies."""
    parts = [group.column(i) for i in range(group.num_columns)]
    begins = [part.dictionary_page_offset or part.data_page_offset for part in parts]
    return min(begins), max(b + part.total_compressed_size for b, part in zip(begins, parts, strict=True))


def _of_format(op: str, format: str, parquet: Any, arrow: Any) -> Any:
    if format not in ("parquet", "arrow"):
        raise ValueError(f'{op}: format: got {format!r}, wanted "parquet" or "arrow".')
    return parquet if format == "parquet" else arrow

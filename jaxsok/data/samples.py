"""Sources of samples that can be read at any place: arrays, and data in blocks (Arrow, Parquet, text).

A source has a fixed number of samples in a fixed order. It reads columns: NumPy arrays with an entry for each sample,
and `Bags` with offsets. `batches.py` decides which samples make a batch.
"""

import abc
import concurrent.futures
import dataclasses
import functools
import glob
import itertools
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxsok import adapters, checks, keys as keys_lib
from jaxsok.features import Bags
from jaxsok.raw_features import bag_offsets, offsets_of
from jaxsok.split import cut_bags, pick_bags
from jaxsok.types import PADDING_KEY

Columns = dict[str, Any]  # by name: arrays `[num_samples, ...]`, or `Bags` with offsets

BLOCK_SAMPLES = 1 << 16  # of a source without blocks of its own: this many neighbours stay together when shuffled


@runtime_checkable
class Source(Protocol):
    """Samples that `Batches` reads. Any thread may read; a source that worker processes read can be pickled.

    It is a random-access data source for Grain, too: `source[i]` is one sample, whose columns have one entry.
    """

    ends: np.ndarray
    """The end of each block: int64 `[num_blocks]`, ascending. A block is read from a file at once."""

    @abc.abstractmethod
    def take(self, positions: slice | np.ndarray) -> Columns:
        """Reads samples: a slice with start and stop, or ascending positions, int64 `[num_samples]`."""

    def keep(self, num_blocks: int) -> None:
        """Asks for at least `num_blocks` blocks to be kept in memory, where reading one again is expensive."""

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, position: int) -> Columns:
        position = range(len(self))[position]  # raises IndexError
        return self.take(slice(position, position + 1))


class ArraySource(Source):
    """Columns that are NumPy arrays, in memory or mapped from files (`np.load(..., mmap_mode="r")`).

    A slice of samples is read without a copy. Other processes map the files of mapped arrays themselves.

    Raises:
      ValueError: columns of different lengths; `Bags` with neither lengths nor offsets, or with both; with fewer keys
        than these say, or more than their lengths do. (Offsets may be some of those of all samples, with all keys.)
      TypeError: masked arrays in `Bags`.

    Example:
      >>> source = ArraySource({"user": np.array([7, 9, 8]), "label": np.array([0.0, 1.0, 1.0])})
      >>> len(source), source.take(slice(1, 3))["user"].tolist(), source.take(np.array([0, 2]))["label"].tolist()
      (3, [9, 8], [0.0, 1.0])
    """

    def __init__(self, columns: Mapping[str, Any], *, block_samples: int = BLOCK_SAMPLES):
        checks.integer("ArraySource: block_samples", block_samples, 1)
        self.columns = {
            name: _with_offsets(f'ArraySource: column "{name}"', column) for name, column in columns.items()
        }
        counts = {name: _count_samples(column) for name, column in self.columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"ArraySource: columns: got {counts} samples, wanted columns of one length.")
        (num_samples,) = set(counts.values())
        self.ends = np.minimum(np.arange(0, num_samples, block_samples, dtype=np.int64) + block_samples, num_samples)

    def take(self, positions: slice | np.ndarray) -> Columns:
        return _pick_columns(self.columns, positions)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"columns": {name: _map_arrays(_to_mapped, c) for name, c in self.columns.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.columns = {name: _map_arrays(_from_mapped, column) for name, column in self.columns.items()}


class JoinedSource(Source):
    """Sources with the same columns, one after the other."""

    def __init__(self, parts: Sequence[Source]):
        if not parts:
            raise ValueError("JoinedSource: parts: got none, wanted at least one source.")
        self._parts = list(parts)
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self.ends = np.concatenate([part.ends + start for part, start in zip(parts, self._starts[:-1], strict=True)])

    def take(self, positions: slice | np.ndarray) -> Columns:
        return _read_parts(self._starts[1:], positions, lambda number, of_part: self._parts[number].take(of_part))

    def keep(self, num_blocks: int) -> None:
        for part in self._parts:
            part.keep(num_blocks)


class BlockSource(Source):
    """Samples that are decoded block by block; decoded blocks are kept for the batches that follow."""

    def __init__(self, sizes: Sequence[int]):
        self.ends = np.cumsum(np.asarray(sizes, np.int64))
        self._num_kept = 4
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, concurrent.futures.Future[Columns]] = OrderedDict()  # under the lock

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @abc.abstractmethod
    def load(self, block: int) -> Columns:
        """Reads and decodes a block, as many samples as `sizes` says: NumPy arrays, or `Bags`, by name."""

    def keep(self, num_blocks: int) -> None:
        self._num_kept = max(self._num_kept, num_blocks)

    def take(self, positions: slice | np.ndarray) -> Columns:
        return _read_parts(self.ends, positions, lambda block, part: _pick_columns(self._block(block), part))

    def _block(self, block: int) -> Columns:
        """Returns a block; of several threads that want it the first one reads it."""
        with self._lock:
            found = self._kept.get(block)
            if found is None:
                mine = self._kept[block] = concurrent.futures.Future()
                while len(self._kept) > self._num_kept:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(block)
        if found is not None:
            return found.result()
        try:
            mine.set_result(self._load_whole(block))
        except BaseException as error:
            with self._lock:  # the next reader tries again
                if self._kept.get(block) is mine:
                    del self._kept[block]
            mine.set_exception(error)
        return mine.result()

    def _load_whole(self, block: int) -> Columns:
        """Loads a block; ValueError: it has another number of samples than when the source was made."""
        columns = self.load(block)
        what = f"{type(self).__name__}: block {block}: column"
        columns = {name: _with_offsets(f'{what} "{name}"', column) for name, column in columns.items()}
        wanted = int(self.ends[block] - (self.ends[block - 1] if block else 0))
        for name, column in columns.items():
            if (found := _count_samples(column)) != wanted:
                raise ValueError(
                    f'{what} "{name}": got {found} samples, wanted {wanted}, as when the source was made; if its '
                    "files have changed, make the source again."
                )
        return columns


class ArrowSource(BlockSource):
    """Columns of an Arrow table, of Arrow IPC files, or of a dataset: Parquet files, folders, partitions.

    A block is a row group of a Parquet file, a record batch of an IPC file, or a whole file of another format. Integers
    become keys, and nulls among them PADDING_KEY, which is -1 of a signed type; lists become `Bags`, lists of a fixed
    size rectangles. Bools become int8, and unsigned integers of 8 to 32 bits the next wider signed type.

    Args:
      data: a `pyarrow.Table` or another table with Arrow's C interface, a `pyarrow.dataset.Dataset`, a path, a pattern
        (`"clicks/*.parquet"`), or several paths. Folders `day=3` below the path, or at the place of a pattern, give a
        column, but not those of Arrow IPC files. Files that end in `.arrow`, `.feather` or `.ipc` are mapped to memory.
      columns: the columns to read; None: all.

    Raises:
      FileNotFoundError: no file there. ImportError: pyarrow is missing. KeyError: a column that is not there.
      TypeError: when a block is read, a column that holds neither numbers nor lists of numbers. ValueError: floats
        with nulls, also found when a block is read; files with different columns, IPC files of another format.

    Cost:
      Making it reads the metadata of every file. Each block is decoded once as long as batches near each other ask for
      it; row groups of about a batch's size or more suit training.
    """

    def __init__(self, data: Any, columns: Sequence[str] | None = None):
        import pyarrow as pa

        self._columns = None if columns is None else list(columns)
        if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            data = pa.table(data)
            schema, pieces = data.schema, [_Piece(batch, batch.num_rows, "the table") for batch in data.to_batches()]
        else:
            schema, pieces = _pieces_of(data, self._columns)
        missing = [name for name in self._columns or () if name not in schema.names]
        if missing:
            raise KeyError(f"ArrowSource: columns: got {missing}, wanted some of {schema.names}.")
        self._pieces = [piece for piece in pieces if piece.num_rows]
        if not self._pieces:
            self._pieces = [_Piece(pa.RecordBatch.from_pylist([], schema), 0, "the table")]
        super().__init__([piece.num_rows for piece in self._pieces])

    def load(self, block: int) -> Columns:
        piece = self._pieces[block]
        try:
            rows = piece.rows() if callable(piece.rows) else piece.rows
            names = rows.schema.names if self._columns is None else self._columns
            return {name: _column_of_arrow(name, rows.column(name)) for name in names}
        except Exception as error:
            where = f"block {block} is of {piece.where}"
            error.add_note(f"ArrowSource: {where}. If that has changed, make the source again.")
            raise


class _Piece(NamedTuple):
    """A block of an ArrowSource."""

    rows: Any  # a table or record batch, or a function that reads one
    num_rows: int
    where: str  # the file, for errors


def _pieces_of(data: Any, columns: list[str] | None) -> tuple[Any, list[_Piece]]:
    """Returns the schema of files or a dataset, and its blocks."""
    import pyarrow as pa
    import pyarrow.dataset

    are_paths = not isinstance(data, pa.dataset.Dataset)
    if are_paths:
        paths, base = _paths_of(data)
        if all(path.endswith((".arrow", ".feather", ".ipc")) for path in paths):
            return _ipc_pieces(paths, columns)
        if "://" in paths[0]:
            import pyarrow.fs

            systems, paths = zip(*map(pa.fs.FileSystem.from_uri, paths), strict=True)
            if any(system != systems[0] for system in systems):
                raise ValueError(f"ArrowSource: data: got URIs of several file systems, {[*paths]}, wanted one.")
            found = paths[0] if len(paths) == 1 else [*paths]
            data = pa.dataset.dataset(found, filesystem=systems[0], partitioning="hive")
        else:
            data = _dataset_below(base, paths)
    parts, types = [], _Types(columns)
    for fragment in data.get_fragments():
        if are_paths:  # a dataset of the caller's may want nulls for columns that a file does not have
            of_folders = [*pa.dataset.get_partition_keys(fragment.partition_expression)]
            _check_columns(fragment.path, fragment.physical_schema.names, of_folders, data.schema.names, columns)
            types.add(fragment.path, fragment.physical_schema)
        is_parquet = isinstance(fragment, pa.dataset.ParquetFileFragment)
        for part in fragment.split_by_row_group() if is_parquet else [fragment]:
            num_rows = part.row_groups[0].num_rows if is_parquet else part.count_rows()
            where = (
                f"{part.path}, row group {part.row_groups[0].id}" if is_parquet else str(getattr(part, "path", part))
            )
            parts.append((part.to_table, num_rows, where))
    schema = types.of(data.schema)
    return schema, [
        _Piece(functools.partial(read, schema=schema, columns=columns), num_rows, where)
        for read, num_rows, where in parts
    ]


class _Types:
    """The types to which the columns of all files are cast: no number changes."""

    def __init__(self, columns: Sequence[str] | None):
        self._columns = columns
        self._found: dict[str, tuple[Any, str]] = {}  # the type so far, and a file that has it

    def add(self, path: str, schema: Any) -> None:
        """Adds those of a file. ValueError: a column has a type that does not go with those of the files before it."""
        for field in schema:
            if self._columns is not None and field.name not in self._columns:
                continue
            before, where = self._found.get(field.name, (field.type, path))
            common = _common_type(before, field.type)
            if common is None:
                raise ValueError(
                    f'ArrowSource: {path}: column "{field.name}": got {field.type}, wanted a type that goes with '
                    f"{before} of {where}: integers and floats are widened, but not to 64 bits with and without a "
                    "sign. Write the files with one type, or give pyarrow.dataset.dataset(paths, schema=...)."
                )
            self._found[field.name] = common, path if common == field.type else where

    def of(self, schema: Any) -> Any:
        """Returns a schema with these types."""
        import pyarrow as pa

        return pa.schema([field.with_type(self._found.get(field.name, (field.type,))[0]) for field in schema])


def _common_type(one: Any, other: Any) -> Any:
    """Returns the type that has the numbers of two others; None: there is none."""
    import pyarrow as pa
    from pyarrow import types

    if one == other:
        return one
    one, other = (kind.value_type if types.is_dictionary(kind) else kind for kind in (one, other))
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
        common = pa.unify_schemas(schemas, promote_options="permissive").field("column").type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None
    # Arrow also makes floats of integers, and signed ones of unsigned ones that are as wide.
    before, after = [_number_of(one), _number_of(other)], _number_of(common)
    is_cut = types.is_floating(after) and any(map(types.is_integer, before))
    return None if is_cut or (after == pa.int64() and pa.uint64() in before) else common


def _number_of(kind: Any) -> Any:
    """Returns the type of the numbers of a column, which may be of lists."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind


def _dataset_below(base: str, paths: Sequence[str]) -> Any:
    """Makes a dataset of files and folders, in which names of folders below `base` are columns."""
    import pyarrow as pa
    import pyarrow.dataset

    folders = {path: pa.dataset.dataset(path).files for path in paths if os.path.isdir(path)}
    files = [os.path.abspath(file) for path in paths for file in folders.get(path, [path])]
    if not files:
        raise FileNotFoundError(f"ArrowSource: data: got {[*folders]}, where there is no file.")
    try:
        return pa.dataset.dataset(files, partitioning="hive", partition_base_dir=base)
    except pa.ArrowTypeError as error:
        raise ValueError(
            f"ArrowSource: {files[0]}: {error}; names of folders as day=3 give columns, which files must not have."
        ) from error


def _check_columns(
    path: str, of_file: list[str], of_folders: list[str], wanted: list[str], columns: list[str] | None
) -> None:
    """Refuses a file with other columns than the first one, or with one that a folder's name gives, too."""
    if twice := sorted({*of_file} & {*of_folders}):
        raise ValueError(
            f"ArrowSource: {path}: got columns {twice} in the file and in names of folders, wanted each in one of them."
        )
    there = {*of_file, *of_folders}
    if missing := [name for name in columns or wanted if name in wanted and name not in there]:
        raise ValueError(f"ArrowSource: {path}: got no columns {missing}, wanted {wanted} in every file.")
    if columns is None and (more := sorted(there - {*wanted})):
        raise ValueError(
            f"ArrowSource: {path}: got also columns {more}, wanted {wanted} in every file, as in the first one; name "
            "those that are to be read (columns=)."
        )


def _ipc_pieces(paths: Sequence[str], columns: list[str] | None) -> tuple[Any, list[_Piece]]:
    import pyarrow as pa

    schema, batches, types = None, [], _Types(columns)
    first_field = pa.ipc.IpcReadOptions(included_fields=[0])  # of compressed files the others are not decoded
    for path in paths:
        with pa.memory_map(path) as file:
            try:
                of_file = pa.ipc.open_file(file).schema
            except pa.ArrowInvalid as error:
                raise ValueError(
                    f"ArrowSource: {path}: {error}; wanted an Arrow IPC file. A stream is read by "
                    "pyarrow.ipc.open_stream(path).read_all(), as a table."
                ) from error
            reader = pa.ipc.open_file(file, options=first_field)
            sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
        if schema is not None and of_file.names != schema.names:
            raise ValueError(
                f"ArrowSource: {path}: got columns {of_file.names}, wanted {schema.names} as in {paths[0]}."
            )
        schema = schema or of_file
        types.add(path, of_file)
        batches += [(path, number, size) for number, size in enumerate(sizes)]
    schema = types.of(schema)
    return schema, [
        _Piece(functools.partial(_read_batch, path, number, schema, columns), size, path)
        for path, number, size in batches
    ]


def _read_batch(path: str, number: int, schema: Any, columns: list[str] | None) -> Any:
    import pyarrow as pa

    with pa.memory_map(path) as file:
        batch = pa.ipc.open_file(file).get_batch(number)
    batch.validate()  # a damaged offset of lists would end the process
    if batch.schema.types == schema.types:
        return batch
    names = schema.names if columns is None else columns
    return pa.Table.from_batches([batch]).select(names).cast(pa.schema([schema.field(name) for name in names]))


def _paths_of(data: Any) -> tuple[list[str], str]:
    """Returns files and folders, and the folder below which names such as `day=3` are columns."""
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    paths: list[str] = []
    bases = []
    for path in map(os.fspath, given):
        is_pattern = glob.has_magic(path) and not os.path.exists(path)
        if "://" in path:
            is_pattern = "*" in path or "[" in path  # options come behind a question mark
        if is_pattern and "://" in path:
            raise ValueError(
                f"ArrowSource: data: got the pattern {path!r}, wanted patterns of local paths alone; elsewhere give "
                "the folder, or a pyarrow.dataset."
            )
        found = sorted(glob.glob(path)) if is_pattern else [path]
        if not found:
            raise FileNotFoundError(f"ArrowSource: data: got {path!r}, where there is no file.")
        paths += found
        literal = re.split(r"[*?[]", path)[0]
        bases.append(os.path.abspath(path if os.path.isdir(path) else os.path.dirname(literal if is_pattern else path)))
    if not paths:
        raise FileNotFoundError("ArrowSource: data: got no path, wanted at least one.")
    return paths, os.path.commonpath(bases)


def _column_of_arrow(name: str, column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        is_view = pa.types.is_string_view(column.type.value_type) or pa.types.is_binary_view(column.type.value_type)
        column = column.dictionary if is_view else column.dictionary_decode()  # which Arrow cannot; refused below
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    role = "floats" if pa.types.is_floating(kind) else "keys"
    if role == "floats" and pa.types.is_fixed_size_list(column.type) and column.null_count:
        raise ValueError(
            f'ArrowSource: column "{name}": floats: got {column.null_count} nulls, wanted a list in every place; fill '
            "them."
        )
    numbers, lengths = adapters.unpack_arrow(column, f'ArrowSource: column "{name}"', role)
    return numbers if lengths is None else Bags(numbers, offsets=offsets_of(lengths))


def _with_offsets(what: str, column: Any) -> Any:
    if not isinstance(column, Bags):
        keys_lib.require_unmasked(what, {"array": column})
        array = column if hasattr(column, "shape") else np.asarray(column)
        if not array.shape:
            raise ValueError(f"{what}: got a scalar, wanted an array [num_samples, ...] or Bags.")
        return array
    keys_lib.require_unmasked(what, vars(column))
    if column.inverse is not None or (column.lengths is None) == (column.offsets is None):
        raise ValueError(f"{what}: got {column}, wanted Bags with either lengths or offsets.")
    bags = _map_arrays(lambda array: array if hasattr(array, "shape") else np.asarray(array), column)
    given, places = ("lengths", bags.lengths) if bags.offsets is None else ("offsets", bags.offsets)
    is_integer = places.dtype.kind in "iu" or places.size < (1 if given == "lengths" else 2)  # np.cumsum([]): floats
    if places.ndim != 1 or not is_integer or (given == "offsets" and not places.size):
        wanted = "[num_samples]" if given == "lengths" else "[num_samples + 1]"
        raise ValueError(f"{what}: {given}: got {places.dtype}{list(places.shape)}, wanted integers {wanted}.")
    # Offsets need not begin at 0: they may be a slice of those of all samples, and `keys` then has those of all.
    offsets = bag_offsets(places, given, len(bags.keys), what)
    if given == "lengths" and not _is_padding(bags.keys[(end := int(offsets[-1])) :]):
        raise ValueError(
            f"{what}: lengths: got an end at {end} of {len(bags.keys)} keys, wanted all keys in bags, or PADDING_KEY "
            "after the last bag."
        )
    if not np.can_cast(offsets.dtype, np.int64):
        offsets = offsets.astype(np.int64)
    if bags.weights is not None and bags.weights.shape != bags.keys.shape:
        raise ValueError(f"{what}: weights: got {list(bags.weights.shape)}, wanted {list(bags.keys.shape)}.")
    return Bags(bags.keys, offsets=offsets, weights=bags.weights)


def _is_padding(keys: np.ndarray) -> bool:
    """Returns whether all of these are PADDING_KEY, as numbers of 64 bits (int32 -1 too) or as pairs of words."""
    keys = np.asarray(keys)
    padding = PADDING_KEY if keys.ndim == 1 else keys_lib.PADDING_WORD
    return not keys.size or (keys.dtype.kind in "iu" and bool((keys.astype(np.uint64) == padding).all()))


def _map_arrays(change: Callable[[Any], Any], column: Any) -> Any:
    """Changes an array, or each array of bags."""
    if not isinstance(column, Bags):
        return change(column)
    return Bags(**{name: None if array is None else change(array) for name, array in vars(column).items()})


def _to_mapped(array: Any) -> Any:
    """Returns a call that maps a mapped array from its file again; any other array as it is."""
    is_mapped = isinstance(array, np.memmap) and array._mmap is not None and array.filename
    if not is_mapped or array.mode not in ("r", "r+") or not (array.flags.c_contiguous or array.flags.f_contiguous):
        return array
    # A view has the offset of the array it was made from; the mapping begins with a page.
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = begin + array.ctypes.data - np.frombuffer(array._mmap, np.uint8).ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    return functools.partial(np.memmap, os.fspath(array.filename), array.dtype, "r", offset, array.shape, order)


def _from_mapped(array: Any) -> Any:
    return array() if isinstance(array, functools.partial) else array


def _count_samples(column: Any) -> int:
    return len(column.offsets) - 1 if isinstance(column, Bags) else len(column)


def _pick_columns(columns: Columns, positions: slice | np.ndarray) -> Columns:
    return {name: _pick(column, positions) for name, column in columns.items()}


def _pick(column: Any, positions: slice | np.ndarray) -> Any:
    """Returns some samples of a column; a slice without a copy of its keys."""
    if not isinstance(column, Bags):
        return column[positions]
    column = dataclasses.replace(column, offsets=np.asarray(column.offsets))
    if isinstance(positions, slice):
        return cut_bags(column, positions.start, positions.stop)
    return pick_bags(column, positions)


def _read_parts(
    ends: np.ndarray, positions: slice | np.ndarray, read: Callable[[int, slice | np.ndarray], Columns]
) -> Columns:
    """Reads samples from the parts that hold them, which end at `ends`, and joins the columns."""
    if not len(ends):
        return {}
    pieces: list[tuple[int, slice | np.ndarray]] = []
    if isinstance(positions, slice):
        first, last = np.searchsorted(ends, positions.start, "right"), np.searchsorted(ends, positions.stop, "left")
        for number in range(int(first), min(int(last) + 1, len(ends))):
            begin = int(ends[number - 1]) if number else 0
            start, stop = max(positions.start, begin), min(positions.stop, int(ends[number]))
            if start < stop:
                pieces.append((number, slice(start - begin, stop - begin)))
    elif len(positions):
        of_part = np.searchsorted(ends, positions, "right")
        bounds = [0, *(np.flatnonzero(np.diff(of_part)) + 1).tolist(), len(positions)]
        for first, last in itertools.pairwise(bounds):
            number = int(of_part[first])
            pieces.append((number, positions[first:last] - (int(ends[number - 1]) if number else 0)))
    if not pieces:  # their columns are those of the first part with samples: a source without blocks knows none
        pieces = [(min(int(np.searchsorted(ends, 0, "right")), len(ends) - 1), slice(0, 0))]
    parts = [read(number, of_part) for number, of_part in pieces]
    return parts[0] if len(parts) == 1 else join_columns(parts)


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Joins the columns of parts, one after the other."""
    names = [list(part) for part in parts]
    if any(set(of_part) != set(names[0]) for of_part in names):
        raise ValueError(f"take: got parts of a source with columns {names}, wanted the same columns in all of them.")
    whole = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        forms = dict.fromkeys(_form_of(column) for column in columns)
        if len(forms) > 1:
            raise ValueError(
                f'take: column "{name}": got {" and ".join(forms)} in parts of a source, wanted one form in all.'
            )
        if isinstance(columns[0], Bags):
            lengths = np.concatenate([np.diff(bags.offsets) for bags in columns])
            weights = None if columns[0].weights is None else np.concatenate([bags.weights for bags in columns])
            keys = _join_numbers(name, [bags.keys for bags in columns])
            whole[name] = Bags(keys, offsets=offsets_of(lengths), weights=weights)
        else:
            whole[name] = _join_numbers(name, columns)
    return whole


def _form_of(column: np.ndarray | Bags) -> str:
    if isinstance(column, Bags):
        return "Bags" if column.weights is None else "Bags with weights"
    return f"arrays [{', '.join(map(str, ('num_samples', *column.shape[1:])))}]"


def _join_numbers(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Joins arrays of a column; refuses integers that would become floats, since keys would change."""
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    if np.result_type(*dtypes).kind == "f" and any(dtype.kind in "iu" for dtype in dtypes):
        raise ValueError(
            f'take: column "{name}": got {" and ".join(map(str, dtypes))} in parts of a source, wanted one dtype '
            "that holds all of them."
        )
    return np.concatenate(arrays)

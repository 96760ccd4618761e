"""The common part of the formats: sizes and keys are checked before rows are read, and files appear whole.

A reader checks names, types, sizes and all keys before it gives out rows. A writer fills files under other names, and
renames them when the last row is in.
"""

import dataclasses
import math
import os
import pathlib
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

from jaxsok import checks, keys as keys_lib, published, table_import
from jaxsok.collection import Collection
from jaxsok.interrupts import Held
from jaxsok.operations import check_placed, locate
from jaxsok.records import Records
from jaxsok.specs import TableSpec
from jaxsok.store import State
from jaxsok.types import PADDING_KEY

CHUNK_BYTES: int = 64 * 2**20  # of a chunk of records where the caller gives no number of rows; also of exports
KEYS_HELD: int = 2**25  # keys that are compared at once: 256 MiB, twice. A longer file is read once for each such part

ROW_DTYPES: dict[str, np.dtype] = {name: jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")}

RecordsIn = Records | Iterable[Records]


@dataclasses.dataclass(frozen=True)
class RecordChunks:
    """Records of a checked file. Each iteration reads it, chunk by chunk."""

    num_rows: int
    dim: int
    states: Mapping[str, int]
    """Widths of the optimizer state that comes along."""
    start: Callable[[], Iterator[Records]]

    def __iter__(self) -> Iterator[Records]:
        return self.start()


@dataclasses.dataclass(frozen=True)
class Form:
    """The dim, dtype, states and statistics of all chunks of one export."""

    dim: int
    dtype: np.dtype
    states: tuple[tuple[str, int], ...]
    statistics: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with its key, state and statistics, as if all of the latter were kept."""
        return 8 + self.dim * self.dtype.itemsize + sum(4 * width for _, width in self.states) + 8

    def __str__(self) -> str:
        statistics = list(self.statistics)
        return f"rows of {self.dim} x {self.dtype.name}, state {dict(self.states)}, statistics {statistics}"


EMPTY = Form(0, ROW_DTYPES["float32"], (), ())  # the form of an export without chunks


def form_of(op: str, records: Any) -> Form:
    """Returns the form of a chunk; what is none is a TypeError or ValueError."""
    if not isinstance(records, Records):
        raise TypeError(f"{op}: records: got {type(records).__name__}, wanted jaxsok.Records, or several.")
    keys, rows = records.keys, records.rows
    if keys.dtype != np.uint64 or keys.ndim != 1:
        raise TypeError(f"{op}: records.keys: got {keys.dtype.name}{list(keys.shape)}, wanted uint64[num_rows].")
    if np.any(keys == np.uint64(PADDING_KEY)):
        raise ValueError(f"{op}: records.keys: got 2**64 - 1 (int64 -1), wanted any other key: this one is reserved.")
    if rows.dtype.name not in ROW_DTYPES or rows.ndim != 2 or rows.shape[0] != len(keys) or rows.shape[1] == 0:
        raise ValueError(
            f"{op}: records.rows: got {rows.dtype.name}{list(rows.shape)}, wanted [{len(keys)}, dim] of one of "
            f"{list(ROW_DTYPES)}."
        )
    for name, array in records.state.items():
        if array.dtype != np.float32 or array.ndim != 2 or len(array) != len(keys) or array.shape[1] == 0:
            raise ValueError(
                f'{op}: records.state["{name}"]: got {array.dtype.name}{list(array.shape)}, wanted '
                f"float32[{len(keys)}, width]."
            )
    given = {"last_step": records.last_step, "frequency": records.frequency}
    statistics = {name: array for name, array in given.items() if array is not None}
    for name, array in statistics.items():
        if array.dtype != np.uint32 or array.shape != keys.shape:
            raise ValueError(
                f"{op}: records.{name}: got {array.dtype.name}{list(array.shape)}, wanted uint32[{len(keys)}]."
            )
    states = tuple((name, array.shape[1]) for name, array in records.state.items())
    return Form(rows.shape[1], rows.dtype, states, tuple(statistics))


def require_both_statistics(what: str, given: Sequence[str]) -> None:
    """Refuses one of the statistics without the other: a table keeps both."""
    if len(given) == 1:
        raise ValueError(f"{what}: got {given[0]} alone, wanted last_step and frequency, or neither.")


def check_records(op: str, records: RecordsIn, *, pairs_statistics: bool = False) -> tuple[Form, Iterator[Records]]:
    """Returns the form of the first chunk, and all chunks, each checked to have it; EMPTY if there are none.

    With `pairs_statistics` one of the statistics without the other is refused.
    """
    chunks = iter([records] if isinstance(records, Records) else records)
    first = next(chunks, None)
    if first is None:
        return EMPTY, iter(())
    form = form_of(op, first)
    if pairs_statistics:
        require_both_statistics(f"{op}: records", form.statistics)

    def rest() -> Iterator[Records]:
        yield first
        for number, chunk in enumerate(chunks, 1):
            if form_of(op, chunk) != form:
                raise ValueError(
                    f"{op}: records: chunk {number}: got {form_of(op, chunk)}, wanted {form}, as the first."
                )
            yield chunk

    return form, rest()


def write_array(file: IO[bytes], array: np.ndarray) -> None:
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def size_of(op: str, path: pathlib.Path, remedy: str = "") -> int:
    """Returns the bytes of a file; refuses a missing one."""
    if not path.is_file():
        there = sorted(file.name for file in path.parent.iterdir())[:10] if path.parent.is_dir() else []
        has = f" Its folder has {', '.join(there)}." if there else ""
        raise FileNotFoundError(f"{op}: {path}: there is no such file.{remedy}{has}")
    return path.stat().st_size


def follow_links(path: str | os.PathLike) -> pathlib.Path:
    """Follows links once, so that all files below are of one folder even if a link is given another one meanwhile."""
    real = os.path.realpath(path)
    return pathlib.Path(path if real == os.path.abspath(path) else real)


@dataclasses.dataclass(frozen=True)
class RawArray:
    """Rows of numbers from byte `begin` of a file to its end; `dtype` has its byte order.

    Each read refuses a file that was replaced or written since the array was made. So of files whose writer removes the
    first and places it last, as `partial_files`, rows are of one writer if the first one's array is made first, and
    read after the others are made.
    """

    op: str
    path: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int = 0
    keys: pathlib.Path | None = None  # the file that says how many rows there are, if it is another one
    _identity: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_identity", identity_of(self.path) if self.path.exists() else ())
        size, wanted = size_of(self.op, self.path), self.begin + self.row_bytes * self.shape[0]
        if size != wanted:
            got = "the end of the file" if size < wanted else "more"
            numbers = " x ".join(map(str, self.shape))
            as_keys = "" if self.keys is None else f", as many as {self.keys} has keys"
            raise ValueError(
                f"{self.op}: {self.path}: byte {min(size, wanted)}: got {got} ({size} bytes), wanted {wanted} bytes: "
                f"{self.begin or 'no'} bytes of header and {numbers} {self.dtype.name}{as_keys}; truncated, or of "
                "another dim or dtype."
            )

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def byte_of(self, row: int) -> int:
        return self.begin + row * self.row_bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads rows, in the machine's byte order."""
        stop = min(stop, self.shape[0])
        count = (stop - start) * math.prod(self.shape[1:])
        with self.path.open("rb") as file:
            numbers = np.fromfile(file, self.dtype, count, offset=self.byte_of(start))
            require_same(self.op, self.path, file.fileno(), self._identity)
        if numbers.size != count:
            raise _replaced_error(self.op, self.path)
        return numbers.astype(self.dtype.newbyteorder("="), copy=False).reshape(-1, *self.shape[1:])

    def read_keys(self, start: int, stop: int) -> np.ndarray:
        """Reads rows as keys: narrower integers are widened by their sign."""
        return keys_lib.from_words(keys_lib.to_words(self.read(start, stop), self.op))


def identity_of(file: pathlib.Path | int) -> tuple[int, ...]:
    """Returns what changes if a file is replaced or written."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def require_same(op: str, path: pathlib.Path, file: pathlib.Path | int, identity: tuple[int, ...]) -> None:
    """Refuses a file, given as path or descriptor, that is not the one that had an identity."""
    if identity_of(file) != identity:
        raise _replaced_error(op, path)


def _replaced_error(op: str, path: pathlib.Path) -> ValueError:
    return ValueError(
        f"{op}: {path}: got another file than when it was opened, or other contents, wanted the same; another process "
        "writes it: read it again."
    )


def rows_in(op: str, path: pathlib.Path, row_bytes: int, begin: int = 0) -> int:
    """Counts the rows after a file's header; refuses a partial row."""
    size = size_of(op, path)
    if size < begin:
        wanted = f"a header of {begin} bytes; truncated"
        raise ValueError(f"{op}: {path}: byte {size}: got the end of the file, wanted {wanted}.")
    num_rows, rest = divmod(size - begin, row_bytes)
    if rest:
        raise ValueError(
            f"{op}: {path}: byte {size - rest}: got {rest} bytes at the end, wanted a multiple of {row_bytes}; "
            "truncated, or of another dtype."
        )
    return num_rows


def rows_of_chunk(op: str, chunk_rows: int | None, row_bytes: int) -> int:
    if chunk_rows is None:
        return max(1, CHUNK_BYTES // row_bytes)
    return checks.integer(f"{op}: chunk_rows", chunk_rows, 1, wanted="None or a positive integer")


def check_dim(op: str, dim: Any) -> None:
    checks.integer(f"{op}: dim", dim, 1, wanted="a positive integer: the dim of the table")


def check_keys(op: str, num_keys: int, chunks: Callable[[], Iterator[np.ndarray]], place: Callable[[int], str]) -> None:
    """Refuses PADDING_KEY and keys that occur twice, among `num_keys` uint64 keys that `chunks` begins to read.

    `place` names a key by its number in errors. At most KEYS_HELD keys are compared at once; a longer file is read
    again for each part of its keys, chosen by hash.
    """
    num_parts = max(1, -(-num_keys // KEYS_HELD))
    for part in range(num_parts):
        held, begin = [np.zeros(0, np.uint64)], 0
        for keys in chunks():
            padding = np.flatnonzero(keys == np.uint64(PADDING_KEY))
            if padding.size:
                raise ValueError(
                    f"{op}: {place(begin + int(padding[0]))}: key: got 2**64 - 1 (int64 -1), wanted any other: this "
                    "one is reserved."
                )
            begin += len(keys)
            if num_parts > 1:
                # The high bits of a product with the golden ratio's fraction are spread evenly, whatever the keys are.
                hashes = keys * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
                keys = keys[hashes % np.uint64(num_parts) == part]
            held.append(keys)
        ordered = np.concatenate(held)
        ordered.sort()
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            key = np.uint64(ordered[twice[0] + 1])
            raise ValueError(
                f"{op}: {place(_find_second(chunks, key))}: key: got {key} a second time, wanted each key once: its "
                "row would depend on the order."
            )


def _find_second(chunks: Callable[[], Iterator[np.ndarray]], key: np.uint64) -> int:
    found, begin = [], 0
    for keys in chunks():
        found += [begin + int(i) for i in np.flatnonzero(keys == key)[:2]]
        begin += len(keys)
        if len(found) > 1:
            break
    return found[1]


def check_raw_keys(keys: RawArray) -> None:
    num_keys, at_once = keys.shape[0], max(1, CHUNK_BYTES // 8)
    chunks = lambda: (keys.read_keys(start, start + at_once) for start in range(0, num_keys, at_once))  # noqa: E731
    check_keys(keys.op, num_keys, chunks, lambda number: f"{keys.path}: byte {keys.byte_of(number)}")


_PLAIN = str.maketrans(string.punctuation, "_" * len(string.punctuation))


def spell_name(name: str) -> str:
    """Spells a name as SOK names files: `user/age:0` is `user_age_0`."""
    return name.translate(_PLAIN)


def names_of(
    op: str,
    collection: Collection,
    tables: Sequence[str] | Mapping[str, str] | None,
    ending: str = "",
    *,
    spell: Callable[[str], str] = spell_name,
) -> dict[str, str]:
    """Returns each chosen table's name in files; refuses an unknown table, and two with the same file by `spell`."""
    every = [table.name for table in collection.tables]
    if isinstance(tables, str):
        raise TypeError(f"{op}: tables: got {tables!r}, wanted None, a list of names, or a mapping from them.")
    names = every if tables is None else tables
    chosen = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    for name in chosen:
        if name not in every:
            raise ValueError(f"{op}: tables: got {name!r}, wanted some of {every}.")
    seen: dict[str, str] = {}
    for table, name in chosen.items():
        file = spell(name) + ending
        other = seen.setdefault(file, table)
        if other != table:
            raise ValueError(
                f"{op}: tables: got {other!r} and {table!r}, whose files would both be named {file!r}, wanted names "
                f"apart: pass a mapping, as tables={{{other!r}: 'a', {table!r}: 'b'}}."
            )
    return chosen


def spec_of(collection: Collection, table: str) -> TableSpec:
    return next(spec for spec in collection.tables if spec.name == table)


def refuse_processes(op: str, collection: Collection, write: str) -> None:
    """Refuses several processes: each has only its own shards, and they must not write one file."""
    if collection.shards.num_processes > 1:
        raise ValueError(
            f"{op}: collection: got a mesh over {collection.shards.num_processes} processes, wanted one process: each "
            f"has the rows of its own shards. Let each write a part, as {write}(part, collection.export_chunks(state, "
            "table))."
        )


def export_all(
    op: str,
    collection: Collection,
    state: State,
    paths: Mapping[str, pathlib.Path],
    write: Callable[..., int],
    *,
    with_state: bool,
    overwrite: bool,
) -> dict[str, int]:
    """Checks and writes tables, each into its one file; returns how many rows, by table."""
    refuse_processes(op, collection, write.__name__)
    published.refuse_existing(op, list(paths.values()), overwrite)
    return {
        table: write(path, collection.export_chunks(state, table, with_state=with_state), overwrite=overwrite)
        for table, path in paths.items()
    }


def import_all(
    op: str,
    collection: Collection,
    state: State,
    chunks: Mapping[str, RecordChunks],
    *,
    with_state: bool = True,
    reset_state: bool,
) -> State:
    """Enters the rows of checked files, table by table; first refuses those that do not fit theirs."""
    chunks = {table: read if with_state else _drop_state(read) for table, read in chunks.items() if read.num_rows}
    for table, read in chunks.items():
        spec = spec_of(collection, table)
        if read.dim != spec.dim:
            raise ValueError(f'{op}: table "{table}": got rows of dim {read.dim} in the file, wanted {spec.dim}.')
        states = {state.name: state.dim for state in spec.optimizer.state_specs(spec.dim)}
        if read.states and dict(read.states) != states:
            raise ValueError(
                f'{op}: table "{table}": got optimizer state {dict(read.states)} in the file, wanted {states}, as '
                f"{spec.optimizer.name} has it; pass with_state=False for rows alone."
            )
    check_placed(op, collection, state)
    held = Held(state)
    with held.kept_on_errors(f"{op}: the state was donated, and is changed: the tables before this one are there."):
        for table, read in chunks.items():
            resolved = locate(op, collection, table)
            collection.growth.forget()  # its bound on the rows in use holds for steps alone
            how = {"clock": None, "num_rows": read.num_rows, "reset_state": reset_state}
            table_import.import_table(collection.stores, held, resolved, read, **how)
    return held.state


def paths_of(
    op: str,
    collection: Collection,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None,
    ending: str,
) -> dict[str, pathlib.Path]:
    names = names_of(op, collection, tables, ending)
    return {table: pathlib.Path(directory) / f"{spell_name(name)}{ending}" for table, name in names.items()}


def _drop_state(chunks: RecordChunks) -> RecordChunks:
    start = lambda: (dataclasses.replace(chunk, state={}) for chunk in chunks)  # noqa: E731
    return RecordChunks(chunks.num_rows, chunks.dim, {}, start)

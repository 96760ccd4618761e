"""The files of a saved table: Arrow IPC files of record batches, each with its place, size and checksum.

The manifest says which files belong together. Any program that reads Arrow can read the files; jaxsok reads single
batches of them, by the places in the manifest, and checks every byte's checksum first.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (names bfloat16 to NumPy)
import numpy as np

from jaxsok import checks, manifests, published
from jaxsok.checks import not_none
from jaxsok.records import Records, make_batch
from jaxsok.specs import StoreSpec, TableSpec
from jaxsok.types import NUM_PARTITIONS

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger("jaxsok.checkpoint")
COMPRESSIONS: tuple[str, ...] = ("none", "lz4", "zstd")
MAGIC_BYTES = 8  # "ARROW1" and two zeros, in front of the schema
ALL_PARTITIONS = 0, NUM_PARTITIONS - 1  # of a batch whose keys are in no order


class CorruptFileError(ValueError):
    """A file is not what was written: cut short, changed, or of another kind. Names the file and the byte."""


def arrow() -> Any:
    """Imports PyArrow, or says what to install."""
    wanted = "to read and write files; pip install 'jaxsok[checkpoint]'"
    return checks.module("jaxsok.checkpoint: pyarrow", "pyarrow", wanted)  # with `pyarrow.ipc`


@dataclasses.dataclass(frozen=True)
class TableForm:
    """The columns of a saved table; `optimizer` is the name of its function in `jaxsok.optim`."""

    name: str
    dim: int
    dtype: str
    optimizer: str
    state_form: str  # `Optimizer.state_form`, which distinguishes states of the same names
    states: tuple[tuple[str, int, float], ...]  # name, dim and initial value of each piece of optimizer state
    statistics: bool

    @classmethod
    def of(cls, store: StoreSpec, table: TableSpec) -> "TableForm":
        return cls(
            name=table.name,
            dim=table.dim,
            dtype=table.dtype,
            optimizer=table.optimizer.name,
            state_form=table.optimizer.state_form(table.dim),
            states=tuple((state.name, state.dim, float(state.initial_value)) for state in store.state_specs),
            statistics=store.keeps_statistics,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TableForm":
        fields = {field.name: value[field.name] for field in dataclasses.fields(cls)}
        fields["states"] = tuple((str(name), int(dim), float(initial)) for name, dim, initial in fields["states"])
        return cls(**fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its key, optimizer state and statistics, uncompressed."""
        numbers = self.dim * (4 if self.dtype == "float32" else 2) + 4 * sum(dim for _, dim, _ in self.states)
        return 8 + numbers + 8 * self.statistics

    @functools.cached_property
    def schema(self) -> "pa.Schema":
        pa = arrow()
        types = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16()}

        def numbers(name: str, kind: Any, dim: int, metadata: Mapping[str, str] | None = None) -> "pa.Field":
            lists = pa.list_(pa.field("item", kind, nullable=False), dim)
            return pa.field(name, lists, nullable=False, metadata=metadata)

        fields = [
            pa.field("key", pa.uint64(), nullable=False),
            numbers("row", types[self.dtype], self.dim, {"dtype": self.dtype}),
            *(numbers(f"state.{name}", pa.float32(), dim) for name, dim, _ in self.states),
        ]
        if self.statistics:
            fields += [pa.field(name, pa.uint32(), nullable=False) for name in ("last_step", "frequency")]
        return pa.schema(fields, metadata={"jaxsok.table": self.name})

    def to_batch(self, records: Records) -> "pa.RecordBatch":
        rows = np.ascontiguousarray(records.rows)
        columns = [records.keys, rows.view(np.uint16) if self.dtype == "bfloat16" else rows]
        columns += [records.state[name] for name, _, _ in self.states]
        columns += [not_none(records.last_step), not_none(records.frequency)] if self.statistics else []
        return make_batch(self.schema, *columns)

    def no_records(self) -> Records:
        none = np.zeros(0, np.uint32) if self.statistics else None
        states = {name: np.zeros((0, dim), np.float32) for name, dim, _ in self.states}
        return Records(np.zeros(0, np.uint64), np.zeros((0, self.dim), self.dtype), states, none, none)

    def from_batch(self, batch: "pa.RecordBatch") -> Records:
        """Returns views of a batch."""

        def lists(name: str, dtype: str, dim: int) -> np.ndarray:
            values = batch.column(name).values.to_numpy(zero_copy_only=False)
            return values.view(dtype).reshape(batch.num_rows, dim)

        return Records(
            column_of(batch, "key"),
            lists("row", self.dtype, self.dim),
            {name: lists(f"state.{name}", "float32", dim) for name, dim, _ in self.states},
            column_of(batch, "last_step") if self.statistics else None,
            column_of(batch, "frequency") if self.statistics else None,
        )


def column_of(batch: Any, name: str) -> np.ndarray:
    return batch.column(name).to_numpy(zero_copy_only=False)


def keys_schema(with_counts: bool) -> Any:
    """Returns the schema of files of keys alone (tombstones), or of keys and how often they were seen."""
    pa = arrow()
    fields = [pa.field("key", pa.uint64(), nullable=False)]
    return pa.schema(fields + [pa.field("count", pa.uint32(), nullable=False)] * with_counts)


class _SegmentedFile(io.RawIOBase):
    """A file that PyArrow writes, with offset, size and checksum of each segment."""

    def __init__(self, file: Any, head_size: int):
        super().__init__()
        self.file, self.size, self.head = file, 0, []
        self._head_size, self._begin, self._checksum = head_size, 0, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, piece: Any) -> int:
        piece = bytes(piece)
        # PyArrow writes the schema with the first batch, and need not end a piece between them.
        rest_of_head = self._head_size - self.size
        if 0 < rest_of_head < len(piece):
            return self.write(piece[:rest_of_head]) + self.write(piece[rest_of_head:])
        self.file.write(piece)
        self.size += len(piece)
        self._checksum = zlib.crc32(piece, self._checksum)
        if self.size == self._head_size:
            self.head = self.end_segment()[1:]
        return len(piece)

    def end_segment(self) -> list[int]:
        segment = [self._begin, self.size - self._begin, self._checksum]
        self._begin, self._checksum = self.size, 0
        return segment


def close_and_sync(file: Any) -> None:
    with contextlib.closing(file):
        file.flush()
        try:
            descriptor = file.fileno()
        except (AttributeError, io.UnsupportedOperation):  # of a remote file, whose close has to do
            return
        published.to_disk(descriptor)


def write_and_sync(path: Any, text: str) -> None:
    with contextlib.closing(path.open("wb")) as file:
        file.write(text.encode())
        close_and_sync(file)


class BatchFile:
    """An Arrow IPC file that is being written; `close` returns where everything lies."""

    def __init__(self, folder: Any, name: str, schema: Any, compression: str = "none"):
        pa = arrow()
        self.name, self.batches = name, []
        self._file = _SegmentedFile((folder / name).open("wb"), MAGIC_BYTES + schema.serialize().size)
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), schema, options=options)

    def write(self, batch: Any, partitions: tuple[int, int]) -> None:
        """Adds a batch; `partitions` are the first and the last that its keys may belong to."""
        self._writer.write_batch(batch)
        self.batches.append([*self._file.end_segment(), batch.num_rows, *partitions])

    def close(self) -> dict[str, Any]:
        """Ends the file and has it on the disk; returns the manifest's entry."""
        self._writer.close()
        foot = self._file.end_segment()
        close_and_sync(self._file.file)
        return {
            "name": self.name,
            "size": self._file.size,
            "num_rows": sum(batch[3] for batch in self.batches),
            "head": self._file.head,
            "batches": self.batches,
            "foot": foot,
        }

    def abandon(self) -> None:
        self._file.file.close()


class SavedFile:
    """A file that the manifest lists by `entry`, which `BatchFile.close` returned. It is opened when it is read."""

    def __init__(self, op: str, folder: Any, entry: Mapping[str, Any], schema: Any):
        self.op, self.path, self.entry, self.schema = op, folder / entry["name"], entry, schema

    def check_size(self) -> None:
        try:
            found = self.path.stat()
            size = found.st_size if hasattr(found, "st_size") else found.length  # of pathlib, of etils.epath
        except FileNotFoundError as error:
            raise self._damage_error(0, "got no such file", "the file that the manifest names") from error
        wanted = self.entry["size"]
        if size != wanted:
            raise self._damage_error(min(size, wanted), f"got a file of {size} bytes", f"{wanted} bytes")

    def verify(self) -> None:
        """Reads the whole file against its checksums."""
        self.check_size()
        with self.path.open("rb") as file:
            self._check_head(file)
            for offset, size, checksum, *_ in [*self.entry["batches"], self.entry["foot"]]:
                self._read(file, offset, size, checksum)

    def words(self, shard: int | None = None) -> Iterator[np.ndarray]:
        """Reads the pieces of a Bloom filter; those of one shard, or all."""
        self.check_size()
        with self.path.open("rb") as file:
            for offset, size, checksum, of in self.entry["pieces"]:
                if shard in (None, of):
                    yield np.frombuffer(self._read(file, offset, size, checksum), "<u4")

    def batches(self, wanted: np.ndarray | None = None) -> Iterator[Any]:
        """Reads the record batches that may have keys of wanted partitions, bool[4096]; checks them.

        None reads all batches, and checks all bytes of the file: then it need not be verified as well.
        """
        pa = arrow()
        chosen = [batch for batch in self.entry["batches"] if wanted is None or wanted[batch[4] : batch[5] + 1].any()]
        if wanted is not None and not chosen:
            return
        self.check_size()
        with self.path.open("rb") as file:
            self._check_head(file)
            for offset, size, checksum, num_rows, _, _ in chosen:
                data = self._read(file, offset, size, checksum)
                try:
                    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), self.schema)
                    batch.validate(full=False)
                except (pa.ArrowException, OSError, EOFError) as error:
                    raise self._damage_error(offset, f"got {error}", "a record batch") from error
                if batch.num_rows != num_rows or any(column.null_count for column in batch.columns):
                    raise self._damage_error(offset, f"got {batch.num_rows} rows", f"{num_rows}, none of them null")
                yield batch
            if wanted is None:
                self._read(file, *self.entry["foot"])

    def _check_head(self, file: Any) -> None:
        pa = arrow()
        head = self._read(file, 0, *self.entry["head"])
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(head[MAGIC_BYTES:]))
        except (pa.ArrowException, OSError, EOFError) as error:
            raise self._damage_error(MAGIC_BYTES, f"got {error}", "the schema of an Arrow file") from error
        if not schema.equals(self.schema, check_metadata=True):
            got, wanted = (
                ", ".join(f"{field.name} {field.type}" for field in fields) for fields in (schema, self.schema)
            )
            raise self._damage_error(MAGIC_BYTES, f"got columns {got}", wanted)

    def _read(self, file: Any, offset: int, size: int, checksum: int) -> bytes:
        file.seek(offset)
        data = file.read(size)
        if len(data) != size:
            raise self._damage_error(offset + len(data), "got the end of the file", f"{size - len(data)} bytes more")
        found = zlib.crc32(data)
        if found != checksum:
            raise self._damage_error(offset, f"got {size} bytes with checksum {found}", f"checksum {checksum}")
        return data

    def _damage_error(self, byte: int, got: str, wanted: str) -> ValueError:
        return manifests.damage_error(self.op, self.path, f"byte {byte}: {got}, wanted {wanted}", CorruptFileError)


def key_batches(files: Iterable[SavedFile]) -> Iterator[np.ndarray]:
    for file in files:
        for batch in file.batches():
            yield column_of(batch, "key")

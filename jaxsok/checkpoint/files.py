"""The files of a saved table: Arrow IPC files of record batches, each with its place, size and checksum.

Knows rows and bytes; what belongs together is told by the manifest. Anybody who reads Arrow can read the files; jaxsok
reads single batches of them, by the places that the manifest gives, and looks at every byte's checksum first.
"""

import dataclasses
import functools
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxsok.records import Records
from jaxsok.specs import StoreSpec, TableSpec
from jaxsok.types import NUM_PARTITIONS

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSIONS: tuple[str, ...] = ("none", "lz4", "zstd")
MAGIC_BYTES = 8  # "ARROW1" and two zeros, in front of the schema


class CorruptFileError(ValueError):
    """A file is not what was written: cut short, changed, or of another kind. Names the file and the byte."""


def arrow() -> Any:
    """PyArrow, or what to install."""
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise ImportError(
            "jaxsok.checkpoint: pyarrow: got no such module, wanted it to read and write files; pip install "
            "'jaxsok[checkpoint]'."
        ) from error
    import pyarrow

    return pyarrow


@dataclasses.dataclass(frozen=True)
class TableForm:
    """What the lines of a saved table are made of."""

    name: str
    dim: int
    dtype: str
    """Of the rows."""
    optimizer: str
    """The name of the function in `jaxsok.optim` that made it."""
    state_form: str
    """`Optimizer.state_form`: what tells states of the same names apart."""
    states: tuple[tuple[str, int, float], ...]
    """Name, dim and initial value of each piece of optimizer state."""
    statistics: bool
    """Whether each row has its last step and frequency."""

    @classmethod
    def of(cls, store: StoreSpec, table: TableSpec) -> "TableForm":
        """That of a table as it is declared."""
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
        """What `to_json` gave."""
        fields = {field.name: value[field.name] for field in dataclasses.fields(cls)}
        fields["states"] = tuple((str(name), int(dim), float(initial)) for name, dim, initial in fields["states"])
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """As the manifest has it."""
        return dataclasses.asdict(self)

    @functools.cached_property
    def schema(self) -> "pa.Schema":
        """Of its files."""
        pa = arrow()
        types = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16()}
        fields = [
            pa.field("key", pa.uint64(), nullable=False),
            _numbers("row", types[self.dtype], self.dim, {"dtype": self.dtype}),
            *(_numbers(f"state.{name}", pa.float32(), dim) for name, dim, _ in self.states),
        ]
        if self.statistics:
            fields += [pa.field(name, pa.uint32(), nullable=False) for name in ("last_step", "frequency")]
        return pa.schema(fields, metadata={"jaxsok.table": self.name})

    def to_batch(self, records: Records) -> "pa.RecordBatch":
        """Some lines as Arrow has them; arrays that lie in one piece are not copied."""
        pa = arrow()
        rows = np.ascontiguousarray(records.rows)
        if self.dtype == "bfloat16":
            rows = rows.view(np.uint16)
        columns = [pa.array(records.keys), _lists(rows)]
        columns += [_lists(np.ascontiguousarray(records.state[name])) for name, _, _ in self.states]
        if self.statistics:
            columns += [pa.array(records.last_step), pa.array(records.frequency)]
        return pa.record_batch(columns, schema=self.schema)

    def from_batch(self, batch: "pa.RecordBatch") -> Records:
        """The lines of a batch, as views of it."""

        def lists(name: str, dtype: Any, dim: int) -> np.ndarray:
            values = batch.column(name).values.to_numpy(zero_copy_only=False)
            return values.view(dtype).reshape(batch.num_rows, dim)

        def plain(name: str) -> np.ndarray:
            return batch.column(name).to_numpy(zero_copy_only=False)

        row_dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[self.dtype]
        return Records(
            plain("key"),
            lists("row", row_dtype, self.dim),
            {name: lists(f"state.{name}", np.float32, dim) for name, dim, _ in self.states},
            plain("last_step") if self.statistics else None,
            plain("frequency") if self.statistics else None,
        )


def _numbers(name: str, kind: Any, dim: int, metadata: Mapping[str, str] | None = None) -> Any:
    """A column of vectors."""
    pa = arrow()
    return pa.field(name, pa.list_(pa.field("item", kind, nullable=False), dim), nullable=False, metadata=metadata)


def _lists(values: np.ndarray) -> Any:
    pa = arrow()
    item = pa.array(values.reshape(-1))
    kind = pa.list_(pa.field("item", item.type, nullable=False), values.shape[1])
    return pa.FixedSizeListArray.from_arrays(item, type=kind)


def keys_schema(with_counts: bool) -> Any:
    """Of files of keys alone (tombstones), or of keys and how often they were seen."""
    pa = arrow()
    fields = [pa.field("key", pa.uint64(), nullable=False)]
    return pa.schema(fields + [pa.field("count", pa.uint32(), nullable=False)] * with_counts)


def keys_batch(keys: np.ndarray, counts: np.ndarray | None = None) -> Any:
    """A batch of such a file."""
    pa = arrow()
    columns = [pa.array(keys)] + ([] if counts is None else [pa.array(counts)])
    return pa.record_batch(columns, schema=keys_schema(counts is not None))


# Partitions ----------------------------------------------------------------------------------------------------------


def name_word(table: str) -> np.uint64:
    """The word by which a table's name enters hashes (`StoreSpec.table_words`)."""
    return np.uint64(int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little"))


# Writing -------------------------------------------------------------------------------------------------------------


class _Sink(io.RawIOBase):
    """Where PyArrow writes: pieces in memory, until the next segment of the file is done."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        piece = bytes(piece)
        self.pieces.append(piece)
        self.position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.position


def close_synced(file: Any) -> None:
    """Closes a file that was written, when its bytes are on the disk."""
    file.flush()
    if hasattr(file, "fileno"):
        try:
            os.fsync(file.fileno())
        except (OSError, io.UnsupportedOperation):
            pass  # a file system without it: its own close has to do
    file.close()


def write_synced(path: Any, text: str) -> None:
    """Writes a file of a text, and has it on the disk."""
    file = path.open("wb")
    try:
        file.write(text.encode())
        close_synced(file)
    finally:
        file.close()


class BatchFile:
    """An Arrow IPC file that is being written; `close` tells where everything lies."""

    def __init__(self, folder: Any, name: str, schema: Any, compression: str = "none"):
        """Begins the file.

        Args:
          folder: an existing one: of `pathlib` or `etils.epath`.
          name: of the file in it.
          schema: of all batches.
          compression: "none", "lz4" or "zstd", of the columns.
        """
        pa = arrow()
        self.name, self.schema = name, schema
        self.batches: list[list[int]] = []
        self.num_rows = 0
        self.head: list[int] = []
        self._sink, self._size = _Sink(), 0
        self._file = (folder / name).open("wb")
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), schema, options=options)

    def write(self, batch: Any, partitions: tuple[int, int]) -> None:
        """Adds a batch.

        Args:
          batch: of the schema.
          partitions: the first and last that its keys may belong to.
        """
        self._writer.write_batch(batch)
        if not self.head:
            # PyArrow writes the schema with the first batch.
            size = MAGIC_BYTES + self.schema.serialize().size
            whole = b"".join(self._sink.pieces)
            self._sink.pieces = [whole[size:]]
            self.head = self._put([whole[:size]])[1:]
        self.batches.append([*self._put(self._taken()), batch.num_rows, *partitions])
        self.num_rows += batch.num_rows

    def close(self) -> dict[str, Any]:
        """Ends the file and has it on the disk; what the manifest says of it."""
        self._writer.close()
        foot = self._put(self._taken())
        close_synced(self._file)
        return {
            "name": self.name,
            "size": self._size,
            "num_rows": self.num_rows,
            "head": self.head,
            "batches": self.batches,
            "foot": foot,
        }

    def abandon(self) -> None:
        """Lets go of the file as it is."""
        self._file.close()

    def _taken(self) -> list[bytes]:
        pieces, self._sink.pieces = self._sink.pieces, []
        return pieces

    def _put(self, pieces: list[bytes]) -> list[int]:
        """Offset, size and checksum of what is written next."""
        offset, checksum = self._size, 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
            self._file.write(piece)
            self._size += len(piece)
        return [offset, self._size - offset, checksum]


# Reading -------------------------------------------------------------------------------------------------------------


class SavedFile:
    """A file that the manifest tells of."""

    def __init__(self, op: str, folder: Any, entry: Mapping[str, Any], schema: Any):
        """Opens nothing yet.

        Args:
          op: named in errors.
          folder: where it is.
          entry: what `BatchFile.close` said.
          schema: that it must have.
        """
        self.op, self.path, self.entry, self.schema = op, folder / entry["name"], entry, schema

    def check_size(self) -> None:
        """Refuses a file that is not there, or of another size."""
        try:
            found = self.path.stat()
            size = found.st_size if hasattr(found, "st_size") else found.length  # of pathlib, of etils.epath
        except FileNotFoundError as error:
            raise CorruptFileError(self._corrupt(0, "got no such file", "the file that the manifest names")) from error
        if size != self.entry["size"]:
            raise CorruptFileError(
                self._corrupt(
                    min(size, self.entry["size"]), f"got a file of {size} bytes", f"{self.entry['size']} bytes"
                )
            )

    def verify(self) -> None:
        """Reads all of it against its checksums; nothing of it is kept."""
        self.check_size()
        with self.path.open("rb") as file:
            self._check_head(file)
            for offset, size, checksum, *_ in [*self.entry["batches"], self.entry["foot"]]:
                self._read(file, offset, size, checksum)

    def ranges(self, ranges: Iterable[Sequence[int]]) -> Iterator[bytes]:
        """Bytes of some ranges: offset, size and checksum of each."""
        self.check_size()
        with self.path.open("rb") as file:
            for offset, size, checksum in ranges:
                yield self._read(file, offset, size, checksum)

    def batches(self, wanted: np.ndarray | None = None) -> Iterator[Any]:
        """The record batches that may have keys of wanted partitions, checked.

        Args:
          wanted: bool[4096], by partition; None: all.
        """
        pa = arrow()
        chosen = [batch for batch in self.entry["batches"] if wanted is None or wanted[batch[4] : batch[5] + 1].any()]
        if not chosen:
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
                    raise CorruptFileError(self._corrupt(offset, f"got {error}", "a record batch")) from error
                if batch.num_rows != num_rows or any(column.null_count for column in batch.columns):
                    raise CorruptFileError(
                        self._corrupt(offset, f"got {batch.num_rows} rows", f"{num_rows}, none of them null")
                    )
                yield batch

    def _check_head(self, file: Any) -> None:
        pa = arrow()
        size, checksum = self.entry["head"]
        head = self._read(file, 0, size, checksum)
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(head[MAGIC_BYTES:]))
        except (pa.ArrowException, OSError, EOFError) as error:
            raise CorruptFileError(self._corrupt(MAGIC_BYTES, f"got {error}", "the schema of an Arrow file")) from error
        if not schema.equals(self.schema, check_metadata=True):
            raise CorruptFileError(
                self._corrupt(MAGIC_BYTES, f"got columns {_columns(schema)}", f"{_columns(self.schema)}")
            )

    def _read(self, file: Any, offset: int, size: int, checksum: int) -> bytes:
        file.seek(offset)
        data = file.read(size)
        if len(data) != size:
            raise CorruptFileError(
                self._corrupt(offset + len(data), "got the end of the file", f"{size - len(data)} bytes more")
            )
        if zlib.crc32(data) != checksum:
            raise CorruptFileError(
                self._corrupt(offset, f"got {size} bytes with checksum {zlib.crc32(data)}", f"checksum {checksum}")
            )
        return data

    def _corrupt(self, byte: int, got: str, wanted: str) -> str:
        return (
            f'{self.op}: file "{self.path}", byte {byte}: {got}, wanted {wanted}; the file is damaged, use another '
            "copy."
        )


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def key_batches(files: Iterable[SavedFile], wanted: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """The keys alone of some files, batch by batch."""
    for file in files:
        for batch in file.batches(wanted):
            yield batch.column("key").to_numpy(zero_copy_only=False)


def all_partitions() -> tuple[int, int]:
    """Of a batch whose keys are in no order."""
    return 0, NUM_PARTITIONS - 1

"""Folders of `torch.distributed.checkpoint`, read without torch: nothing that a pickle names is imported or called.

`.metadata` is a pickle: the chunks of each tensor by offset, and where in the files each of them lies. A chunk is a zip
archive of `torch.save`: a pickle with shape and strides, and the numbers, stored as they are. Decision 0025 says why
torch's own reader is not used.
"""

import dataclasses
import functools
import io
import math
import mmap
import os
import pathlib
import pickle
import reprlib
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes  # noqa: F401  (names bfloat16 to NumPy)
import numpy as np

from jaxsok.interchange import files

_MOST_ITEMS = 10_000  # of a tuple, with those of the tuples in it
_MOST_SIZES = 64


class _Inert:
    """An object of a pickle: the name of its class or function, and what that would have been given."""

    origin: str = ""
    fields: Any = ()

    def __new__(cls, *args: Any) -> "_Inert":
        made = super().__new__(cls)
        made.fields = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.fields = state


def _counting(load: Any) -> Any:
    def load_tuple(unpickler: "_Unpickler") -> None:
        load(unpickler)
        unpickler._count_items()

    return load_tuple


_LOADS = pickle._Unpickler.dispatch
_TUPLES = pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3


class _Unpickler(pickle._Unpickler):
    """Makes inert objects of all classes but tuples and dicts, so that no code of a file runs.

    It is Python's own implementation: that of C takes memory by a number of a place in the file. A tuple that holds
    another one twice, and so on, would take for ever to hash or to print; so items are counted. What torch does not
    write is refused: arrays of bytes, of as many as a number in the file says, and frozen sets, which hold tuples, too.
    """

    dispatch: ClassVar = _LOADS | {code: _counting(_LOADS[code]) for (code,) in _TUPLES}
    del dispatch[pickle.BYTEARRAY8[0]], dispatch[pickle.FROZENSET[0]]

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))
        self._tuples: dict[int, tuple[int, tuple]] = {}  # the items of each, by its id, and the tuple: it keeps its id

    def _count_items(self) -> None:
        made = self.stack[-1]
        count = sum(1 + self._tuples.get(id(item), (0,))[0] for item in made)
        if count > _MOST_ITEMS:
            raise ValueError(f"a tuple of {count} items, with those of the tuples in it")
        self._tuples[id(made)] = count, made

    def find_class(self, module: str, name: str) -> Any:
        origin = f"{module}.{name}"
        if origin == "torch.Size":
            return functools.partial(_read_sizes)  # a new one: a pickle may set attributes of what it calls
        return dict if origin == "collections.OrderedDict" else type(name, (_Inert,), {"origin": origin})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _read_sizes(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or len(sizes) > _MOST_SIZES:
        raise ValueError("a torch.Size of something else than a few integers")
    return tuple(map(int, sizes))


class _Part(io.RawIOBase):
    """A part of a mapped file, as a file of its own: zipfile would see what lies before an archive, too."""

    def __init__(self, content: memoryview):
        super().__init__()
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, len(self._content))[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._content[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint."""

    op: str
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: Mapping[tuple[int, ...], tuple[tuple[int, ...], pathlib.Path, int, int]]
    """The sizes of each chunk and its file, first and last byte, by offset."""

    def read(self, *ranges: tuple[int, int]) -> np.ndarray:
        """Reads a block, given as (first, end) of the leading dimensions; the rest is whole. Touches its bytes alone.

        Raises:
          ValueError: chunks that do not cover the block, or that are no arrays of torch.
        """
        ranges = (*ranges, *((0, size) for size in self.shape[len(ranges) :]))
        result, num_read, parts = np.empty([end - begin for begin, end in ranges], self.dtype), 0, []
        for offsets, (sizes, *place) in self.chunks.items():
            there, here = [], []
            for (begin, end), offset, size in zip(ranges, offsets, sizes, strict=True):
                first, last = max(begin, offset), max(begin, offset, min(end, offset + size))
                there.append(slice(first - offset, last - offset))
                here.append(slice(first - begin, last - begin))
            if count := math.prod(part.stop - part.start for part in here):
                result[tuple(here)] = self._open(sizes, *place)[tuple(there)]
                num_read += count
                parts.append(here)
        firsts = np.array([[part.start for part in here] for here in parts], np.int64)
        lasts = np.array([[part.stop for part in here] for here in parts], np.int64)
        share = (np.maximum(firsts[:, None], firsts) < np.minimum(lasts[:, None], lasts)).all(axis=-1)
        if num_read != result.size or share.sum() != len(parts):  # each shares numbers with itself
            raise ValueError(
                f'{self.op}: "{self.name}": got chunks with {num_read} numbers of the block {list(ranges)}, wanted '
                f"{result.size}, each once; files are missing, or of another checkpoint."
            )
        return result

    def _open(self, sizes: tuple[int, ...], path: pathlib.Path, begin: int, end: int) -> np.ndarray:
        try:
            with open(path, "rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ))[begin:]
            with zipfile.ZipFile(_Part(content)) as archive:
                entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if any(entries[name].compress_type for name in ("data.pkl", "byteorder") if name in entries):
                    raise ValueError("compressed entries")
                made = _Unpickler(archive.read(entries["data.pkl"])).load()
                is_big = "byteorder" in entries and archive.read(entries["byteorder"]) == b"big"
            (_, _, key, _, _), offset, shape, strides = made.fields[:4]
            if {type(number) for number in (offset, *shape, *strides)} - {int} or len(shape) > _MOST_SIZES:
                raise ValueError("numbers of a tensor that are no integers")
            entry, dtype = entries[f"data/{key}"], self.dtype.newbyteorder(">" if is_big else "<")
            if made.origin != "torch._utils._rebuild_tensor_v2" or entry.compress_type != 0 or shape != sizes:
                raise ValueError(
                    f"{made.origin} of shape {reprlib.repr(shape)}, stored in the way {entry.compress_type}"
                )
            first = entry.header_offset + 30
            first += sum(struct.unpack("<HH", content[first - 4 : first]))  # its name and its extra field
            numbers = np.frombuffer(content, dtype, entry.file_size // dtype.itemsize, first)[offset:]
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if min((offset, *strides)) < 0 or last >= len(numbers):
                raise ValueError(f"strides {strides} for {len(numbers)} numbers")
            strides = [stride * dtype.itemsize for stride in strides]
            return np.lib.stride_tricks.as_strided(numbers, shape, strides, writeable=False)
        except Exception as error:  # zip archives and pickles fail in many ways
            raise ValueError(
                f'{self.op}: {path}: byte {begin}: "{self.name}": got {_text_of(error)}, wanted an archive of '
                f"torch.save with {self.dtype.name}{list(sizes)}; damaged, or of another format."
            ) from error


def read_tensors(op: str, folder: pathlib.Path) -> dict[str, Tensor]:
    """Finds the tensors of a folder by name; checks that the files are long enough, and reads no numbers.

    Raises:
      FileNotFoundError, ValueError: a missing, truncated or foreign file.
    """
    path, places, tensors = folder / ".metadata", {}, {}
    files.size_of(op, path)
    try:
        found = _Unpickler(path.read_bytes()).load().fields
        for index, info in found["storage_data"].items():
            name, begin, size = (info.fields[field] for field in ("relative_path", "offset", "length"))
            places[index.fields["fqn"], index.fields.get("offset")] = folder / name, begin, begin + size
            if info.fields.get("transform_descriptors"):
                raise ValueError("chunks that an extension has transformed")
        for name, entry in found["state_dict_metadata"].items():
            if "chunks" in entry.fields:  # other objects have none
                parts = [part.fields for part in entry.fields["chunks"]]
                chunks = {part["offsets"]: (part["sizes"], *places[name, part["offsets"]]) for part in parts}
                dtype = np.dtype(entry.fields["properties"].fields[0].origin.removeprefix("torch."))
                tensors[name] = Tensor(op, name, dtype, entry.fields["size"], chunks)
    except Exception as error:  # a pickle of any other content fails in many ways
        raise ValueError(
            f"{op}: {path}: got {_text_of(error)}, wanted the metadata of a checkpoint in chunks."
        ) from error
    for file, _, end in places.values():
        if (size := files.size_of(op, file)) < end:
            raise ValueError(f"{op}: {file}: byte {size}: got the end of the file, wanted {end} bytes; truncated.")
    return tensors


def _text_of(error: Exception) -> str:
    """Returns an error's kind, with its text if that is one: a key of a dict could be of any size."""
    return repr(error) if error.args and isinstance(error.args[0], str) else type(error).__name__

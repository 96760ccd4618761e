"""Folders of `torch.distributed.checkpoint`, read without torch: nothing that a pickle names is imported or called.

`.metadata` is a pickle: the chunks of each tensor by offset, and where in the files each of them lies. A chunk is a zip
archive of `torch.save`: a pickle with shape and strides, and the numbers, stored as they are. Decision 0025 tells why
torch's own reader is not used.
"""

import dataclasses
import io
import math
import mmap
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxsok.interchange import files

_DTYPES = {
    "torch.FloatStorage": np.float32,
    "torch.DoubleStorage": np.float64,
    "torch.HalfStorage": np.float16,
    "torch.BFloat16Storage": ml_dtypes.bfloat16,
    "torch.LongStorage": np.int64,
    "torch.IntStorage": np.int32,
    "torch.BoolStorage": np.bool_,
    "torch.ByteStorage": np.uint8,
}
_HARMLESS = {"torch.Size": tuple, "collections.OrderedDict": dict}


class _Inert:
    """An object of a pickle: the name of its class or function, and what that would have been given."""

    origin = ""
    args: tuple[Any, ...] = ()
    fields: Any = ()

    def __new__(cls, *args: Any) -> "_Inert":
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class _Unpickler(pickle.Unpickler):
    """Makes inert objects of all classes but tuples and dicts, so that no code of a file runs."""

    def find_class(self, module: str, name: str) -> Any:
        origin = f"{module}.{name}"
        return _HARMLESS.get(origin) or type(name, (_Inert,), {"origin": origin})

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Section(io.RawIOBase):
    """Some bytes of a mapped file as a file of their own: in front of a zip archive there may be others."""

    def __init__(self, section: memoryview):
        self._section, self._at = section, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._section))[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._section[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class Chunk(NamedTuple):
    """A part of a tensor, and the bytes of a file that have it."""

    sizes: tuple[int, ...]
    path: pathlib.Path
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, in chunks by their offsets."""

    op: str
    name: str
    shape: tuple[int, ...]
    chunks: Mapping[tuple[int, ...], Chunk]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the first chunk."""
        return self._open(next(iter(self.chunks.values()))).dtype

    def read(self, *ranges: tuple[int, int]) -> np.ndarray:
        """Reads a block, given as (first, end) of the leading dimensions; the rest is whole. Touches its bytes alone.

        Raises:
          ValueError: chunks that do not cover the block, or that are no arrays of torch.
        """
        ranges = (*ranges, *((0, size) for size in self.shape[len(ranges) :]))
        result, num_read = np.empty([end - begin for begin, end in ranges], self.dtype), 0
        for offsets, chunk in self.chunks.items():
            there, here = [], []
            for (begin, end), offset, size in zip(ranges, offsets, chunk.sizes, strict=True):
                first, last = max(begin, offset), max(begin, offset, min(end, offset + size))
                there.append(slice(first - offset, last - offset))
                here.append(slice(first - begin, last - begin))
            count = math.prod(part.stop - part.start for part in here)
            if count:
                result[tuple(here)] = self._open(chunk)[tuple(there)]
                num_read += count
        if num_read != result.size:
            raise ValueError(
                f'{self.op}: "{self.name}": got chunks with {num_read} numbers of the block {list(ranges)}, wanted '
                f"{result.size}, each once; files are missing, or of another checkpoint."
            )
        return result

    def _open(self, chunk: Chunk) -> np.ndarray:
        """Maps a chunk into memory."""
        try:
            with open(chunk.path, "rb") as file:
                section = memoryview(mmap.mmap(file.fileno(), chunk.end, access=mmap.ACCESS_READ))[chunk.begin :]
            with zipfile.ZipFile(_Section(section)) as archive:
                entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                made = _Unpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
                is_big = "byteorder" in entries and archive.read(entries["byteorder"]) == b"big"
            made = made.args[0] if made.origin == "torch._utils._rebuild_parameter" else made
            if made.origin != "torch._utils._rebuild_tensor_v2":
                raise ValueError(f"{made.origin} in place of a plain tensor")
            (_, storage, key, _, _), offset, shape, strides = made.args[:4]
            dtype, entry = (
                np.dtype(_DTYPES[storage.origin]).newbyteorder(">" if is_big else "<"),
                entries[f"data/{key}"],
            )
            if entry.compress_type != zipfile.ZIP_STORED or shape != chunk.sizes:
                raise ValueError(f"shape {shape}, stored in the way {entry.compress_type}")
            begin = entry.header_offset + 30
            begin += sum(struct.unpack("<HH", section[begin - 4 : begin]))  # its name and its extra field
            numbers = np.frombuffer(section, dtype, entry.file_size // dtype.itemsize, begin)[offset:]
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if min((offset, *strides)) < 0 or (0 not in shape and last >= len(numbers)):
                raise ValueError(f"strides {strides} for {len(numbers)} numbers")
            strides = [stride * dtype.itemsize for stride in strides]
            return np.lib.stride_tricks.as_strided(numbers, shape, strides, writeable=False)
        except Exception as error:  # a zip archive, a pickle and a missing key do not say alike what is broken
            raise ValueError(
                f'{self.op}: {chunk.path}: byte {chunk.begin}: "{self.name}": got {error!r}, wanted an archive of '
                f"torch.save, {list(chunk.sizes)} numbers in one of {list(_DTYPES)}; damaged, or of another format."
            ) from error


def read_tensors(op: str, folder: pathlib.Path) -> dict[str, Tensor]:
    """Finds the tensors of a folder by name; reads `.metadata`, and checks that the files it names are long enough.

    Raises:
      FileNotFoundError, ValueError: a missing, truncated or foreign file.
    """
    path = folder / ".metadata"
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load().fields
        places, tensors = {}, {}
        for index, info in found["storage_data"].items():
            stored = info.fields
            if stored.get("transform_descriptors"):
                raise ValueError("chunks that an extension has transformed")
            begin, offset = stored["offset"], index.fields["offset"]
            places[index.fields["fqn"], offset] = folder / stored["relative_path"], begin, begin + stored["length"]
        for name, entry in found["state_dict_metadata"].items():
            parts = [part.fields for part in entry.fields.get("chunks", ())]  # other objects have none
            chunks = {part["offsets"]: Chunk(part["sizes"], *places[name, part["offsets"]]) for part in parts}
            if chunks:
                tensors[name] = Tensor(op, name, entry.fields["size"], chunks)
    except FileNotFoundError:
        raise
    except Exception as error:  # a pickle of any other content fails in many ways
        raise ValueError(f"{op}: {path}: got {error!r}, wanted the metadata of a checkpoint in chunks.") from error
    for file, _, end in places.values():
        if (size := files.size_of(op, file)) < end:
            raise ValueError(f"{op}: {file}: byte {size}: got the end of the file, wanted {end} bytes; truncated.")
    return tensors

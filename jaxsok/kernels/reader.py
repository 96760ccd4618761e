"""Door to lookups for the host without XLA (ffi/c_interface/reader.cc): a native call, which frees Python's lock."""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxsok.kernels import library, pack
from jaxsok.types import COUNTS, ROW_DTYPES

DTYPES = {**ROW_DTYPES, "int8": 3, "float8_e4m3fn": 4}
"""Codes of the dtypes of frozen rows (RowDtype in ffi/core/layout.h)."""


class Stores:
    """The stores of each part of a `Reader`, by addresses (ReaderStore in reader.h); it keeps their arrays alive."""

    def __init__(self, parts: Sequence[tuple[Sequence[Any], Sequence[Array], Array]]) -> None:
        """Takes of each part its stores (arrays as in `serving.FrozenStore`), their tables' words, and the seed."""
        jax.block_until_ready(parts)  # a reader does not wait for JAX's programs
        self._arrays = parts
        lines = [[_line_of(*pair, seed) for pair in zip(stores, words, strict=True)] for stores, words, seed in parts]
        self._lines = np.array(lines, np.int64)
        self.addresses = self._lines.ctypes.data + self._lines.strides[0] * np.arange(len(parts))


class Asked:
    """The tables of a lookup, made once for all lookups of the same tables."""

    def __init__(self, places: Sequence[tuple[int, int]], dims: Sequence[int], num_tables: Sequence[int]) -> None:
        """Takes the store and the number of each table, ascending, and by store the dim and the number of tables."""
        self.dims = [dims[s] for s, _ in places]
        self.inputs = np.array([(*place, 0, 0, 0) for place in places], np.int64).reshape(-1, 5)
        firsts, self.num_counted = {}, 0
        for s in dict.fromkeys(s for s, _ in places):
            firsts[s], self.num_counted = self.num_counted, self.num_counted + num_tables[s]
        self.counted = np.array([firsts[s] + number for s, number in places], np.int64)


def _line_of(store: Any, tables: Array, seed: Array) -> list[int]:
    address = lambda array: 0 if array is None else array.unsafe_buffer_pointer()  # noqa: E731
    rows, (more, scales) = store.rows, ((*given, None)[0] for given in (store.host_rows, store.scales))
    return [
        *(address(store.index), store.index.shape[0], address(store.counters)),
        *(address(tables), tables.shape[0], address(seed)),
        *(address(rows), rows.shape[0], address(more), 0 if more is None else more.shape[0]),
        *(address(scales), DTYPES[rows.dtype.name], rows.shape[1]),
    ]


class _Answer(ctypes.Structure):
    """ReaderAnswer in reader.h."""

    _fields_ = (("counts", ctypes.c_void_p), ("memory", ctypes.c_void_p), ("num_bytes", ctypes.c_int64))


class _Owner:
    """Is alive as long as an array of its answer is."""


class Reader:
    """Reads rows of one device, or of several that own keys of their own, for the host and for callers in any thread.

    Rows lie in memory that is used again once no array of an answer is left: pinned memory, where devices are GPUs.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._library = loaded = library.load_for(devices[0].platform)
        # With the interpreter's lock: another thread that got it in so short a call might keep it for milliseconds.
        give_back = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        self._give_back = give_back(("JaxsokReaderGiveBack", loaded))
        handles = []
        for device in devices:
            handle = ctypes.c_void_p()
            ordinal = 0 if device.platform == "cpu" else device.local_hardware_id
            _require(loaded.JaxsokReaderOpen(ordinal, ctypes.byref(handle)))
            weakref.finalize(self, loaded.JaxsokReaderClose, handle).atexit = False
            handles.append(handle.value)
        self._handles = np.array(handles, np.int64)

    def lookup(
        self, stores: Stores, asked: Asked, keys: Sequence[np.ndarray]
    ) -> tuple[list[Float32[np.ndarray, "*num_keys dim"]], Int32[np.ndarray, "num_tables num_counts"]]:
        """Reads a row for each key; gives the rows of each table, read-only, and their counts (`types.COUNTS`).

        `keys` of each table are uint64 of any shape, contiguous. The arrays of `stores` must not change meanwhile.
        RuntimeError: what the device refused.
        """
        answer, owner = _Answer(), _Owner()
        # First, since Ctrl-C may come as soon as the memory is lent.
        weakref.finalize(owner, _end, self, answer).atexit = False
        parts, inputs = np.stack([self._handles, stores.addresses], axis=1), asked.inputs.copy()
        inputs[:, 2] = pack.addresses(keys)
        inputs[:, 3] = [mine.size for mine in keys]
        run = self._library.JaxsokReaderLookup
        _require(run(parts.ctypes.data, len(parts), inputs.ctypes.data, len(inputs), ctypes.byref(answer)))
        lent: Any = (ctypes.c_char * answer.num_bytes).from_address(answer.memory)
        lent.owner = owner
        memory = memoryview(lent).toreadonly()
        rows = [
            np.ndarray((*mine.shape, dim), np.float32, memory, place)
            for mine, dim, place in zip(keys, asked.dims, (inputs[:, 4] - answer.memory).tolist(), strict=True)
        ]
        shape = asked.num_counted, len(COUNTS)
        return rows, np.ndarray(shape, np.int32, memory, answer.counts - answer.memory)[asked.counted]


def _end(reader: Reader, answer: _Answer) -> None:
    reader._give_back(ctypes.addressof(answer))


def _require(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())

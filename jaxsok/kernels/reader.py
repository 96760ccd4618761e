"""Door to lookups for the host without XLA (ffi/c_interface/reader.cc): a native call, which frees Python's lock."""

import ctypes
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxsok.kernels import library, pack
from jaxsok.types import COUNTS, ROW_DTYPES

DTYPES = {**ROW_DTYPES, "int8": 3, "float8_e4m3fn": 4}
"""Codes of the dtypes of frozen rows (RowDtype in ffi/core/layout.h)."""


_ALIGNMENT = 64


class FrozenArrays(NamedTuple):
    """The arrays of a frozen store, all of one device: operands of `kernels.lookup.FrozenOperands`, with the seed."""

    index: Array
    counters: Array
    tables: Array
    seed: Array
    rows: Array
    host_rows: Array | None
    scales: Array | None


class Stores:
    """The stores that a `Reader` reads, by addresses (ReaderStore in reader.h); it keeps their arrays alive."""

    def __init__(self, stores: Sequence[FrozenArrays]) -> None:
        jax.block_until_ready(stores)  # a reader does not wait for JAX's programs
        self._arrays = stores
        self._lines = np.array(list(map(_line_of, stores)), np.int64)
        self.address = self._lines.ctypes.data


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


def _line_of(store: FrozenArrays) -> list[int]:
    address = lambda array: 0 if array is None else array.unsafe_buffer_pointer()  # noqa: E731
    rows, more = store.rows, store.host_rows
    return [
        *(address(store.index), store.index.shape[0], address(store.counters)),
        *(address(store.tables), store.tables.shape[0], address(store.seed)),
        *(address(rows), rows.shape[0], address(more), 0 if more is None else more.shape[0]),
        *(address(store.scales), DTYPES[rows.dtype.name], rows.shape[1]),
    ]


class _Answer(ctypes.Structure):
    """ReaderAnswer in reader.h."""

    _fields_ = (("counts", ctypes.c_void_p), ("memory", ctypes.c_void_p), ("num_bytes", ctypes.c_int64),
                ("running", ctypes.c_void_p))  # fmt: skip


class Reader:
    """Reads rows of one device for the host, for callers in any thread; RuntimeError says what the device refused."""

    def __init__(self, device: Any) -> None:
        loaded = library.load_for(device.platform)
        self._library = loaded
        # With the interpreter's lock: another thread that got it in so short a call might keep it for milliseconds.
        give_back = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        self._give_back = give_back(("JaxsokReaderGiveBack", loaded))
        self._handle = ctypes.c_void_p()
        ordinal = 0 if device.platform == "cpu" else device.local_hardware_id
        _require(loaded.JaxsokReaderOpen(ordinal, ctypes.byref(self._handle)))
        weakref.finalize(self, loaded.JaxsokReaderClose, self._handle).atexit = False

    def begin(self, stores: Stores, asked: Asked, keys: Sequence[np.ndarray], *, waits: bool = False) -> "Begun":
        """Begins to read a row for each key; `waits`: until they are there, in the same native call.

        The arrays of `stores` must not change before the result is there. `keys` of each table are uint64 of any shape,
        contiguous, and may change when this returns.
        """
        run = self._library.JaxsokReaderLookup if waits else self._library.JaxsokReaderBegin
        inputs, answer = asked.inputs.copy(), _Answer()
        inputs[:, 2] = pack.addresses(keys)
        inputs[:, 3] = [mine.size for mine in keys]
        _require(run(self._handle, stores.address, inputs.ctypes.data, len(inputs), ctypes.byref(answer)))
        return Begun(self._library.JaxsokReaderWait, answer, self._lend(answer), asked, inputs, [k.shape for k in keys])

    def join(
        self, shapes: Sequence[tuple[int, ...]], pieces: Sequence[tuple[int, np.ndarray, np.ndarray]]
    ) -> list[Float32[np.ndarray, "*num_keys dim"]]:
        """Makes arrays of rows from pieces: the number of an array, places of lines in it (int64), and their rows."""
        begins = [0, *itertools.accumulate(-(-4 * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes)]
        arrays = [array for _, places, rows in pieces for array in (rows, places)]
        lines = np.empty((len(pieces), 5), np.int64)
        lines[:, :2] = pack.addresses(arrays).reshape(-1, 2)
        lines[:, 2:] = [(len(places), shapes[number][-1], begins[number]) for number, places, _ in pieces]
        answer = _Answer()
        join = self._library.JaxsokReaderJoin
        _require(join(self._handle, lines.ctypes.data, len(lines), begins[-1], ctypes.byref(answer)))
        memory = memoryview(self._lend(answer)).toreadonly()
        return [np.ndarray(shape, np.float32, memory, at) for shape, at in zip(shapes, begins, strict=False)]

    def _lend(self, answer: _Answer) -> ctypes.Array:
        lent = (ctypes.c_char * answer.num_bytes).from_address(answer.memory)
        weakref.finalize(lent, _end, self, answer).atexit = False
        return lent


class Begun:
    """A lookup that has begun; its memory comes back to the reader when no array of the result is left."""

    def __init__(
        self,
        wait: Any,
        answer: _Answer,
        lent: ctypes.Array,
        asked: Asked,
        inputs: np.ndarray,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._wait, self._answer, self._lent = wait, answer, lent
        self._asked, self._inputs, self._shapes = asked, inputs, shapes

    def result(
        self,
    ) -> tuple[list[Float32[np.ndarray, "*num_keys dim"]], Int32[np.ndarray, "num_tables num_counts"]]:
        """Waits for the rows of each table, read-only, and their counts (`types.COUNTS`)."""
        answer, asked = self._answer, self._asked
        if answer.running is not None:
            _require(self._wait(ctypes.byref(answer)))
        memory = memoryview(self._lent).toreadonly()
        places = (self._inputs[:, 4] - answer.memory).tolist()
        rows = [
            np.ndarray((*shape, dim), np.float32, memory, place)
            for shape, dim, place in zip(self._shapes, asked.dims, places, strict=True)
        ]
        shape = asked.num_counted, len(COUNTS)
        return rows, np.ndarray(shape, np.int32, memory, answer.counts - answer.memory)[asked.counted]


def _end(reader: Reader, answer: _Answer) -> None:
    reader._give_back(reader._handle, ctypes.addressof(answer))


def _require(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())

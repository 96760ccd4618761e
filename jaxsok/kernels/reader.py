"""Door to lookups for the host without XLA (ffi/c_interface/reader.cc): a native call, which frees Python's lock."""

import ctypes
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
        self.dims = [store.rows.shape[1] for store in stores]
        self.num_tables = [store.tables.shape[0] for store in stores]


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

    def begin(
        self, stores: Stores, places: Sequence[tuple[int, int]], keys: Sequence[np.ndarray], *, waits: bool = False
    ) -> "Begun":
        """Begins to read a row for each key; `waits`: until they are there, in the same native call.

        The arrays of `stores` must not change before the result is there. `places` are the store and the number of each
        table, ascending, and `keys` theirs, uint64, which may change when this returns.
        """
        run = self._library.JaxsokReaderLookup if waits else self._library.JaxsokReaderBegin
        inputs = np.array([(*place, 0, len(mine), 0) for place, mine in zip(places, keys, strict=True)], np.int64)
        inputs = inputs.reshape(-1, 5)
        inputs[:, 2] = pack.addresses(keys)
        answer = _Answer()
        _require(run(self._handle, stores.address, inputs.ctypes.data, len(inputs), ctypes.byref(answer)))
        lent = (ctypes.c_char * answer.num_bytes).from_address(answer.memory)
        weakref.finalize(lent, _end, self, answer).atexit = False
        return Begun(self._library.JaxsokReaderWait, answer, lent, inputs, stores)


class Begun:
    """A lookup that has begun; its memory comes back to the reader when no array of the result is left."""

    def __init__(self, wait: Any, answer: _Answer, lent: ctypes.Array, inputs: np.ndarray, stores: Stores) -> None:
        self._wait, self._answer, self._lent, self._inputs, self._stores = wait, answer, lent, inputs, stores

    def result(self) -> tuple[list[Float32[np.ndarray, "num_keys dim"]], Int32[np.ndarray, "num_tables num_counts"]]:
        """Waits for the rows of each table, read-only, and the counts of all tables of the stores that are read."""
        if self._answer.running is not None:
            _require(self._wait(ctypes.byref(self._answer)))
        memory, begin, rows = memoryview(self._lent).toreadonly(), self._answer.memory, []
        used = dict.fromkeys(self._inputs[:, 0].tolist())
        for s, _, _, num_keys, address in self._inputs.tolist():
            dim = self._stores.dims[s]
            rows.append(np.frombuffer(memory, np.float32, num_keys * dim, address - begin).reshape(num_keys, dim))
        num_counts = len(COUNTS) * sum(self._stores.num_tables[s] for s in used)
        counts = np.frombuffer(memory, np.int32, num_counts, self._answer.counts - begin)
        return rows, counts.reshape(-1, len(COUNTS))


def _end(reader: Reader, answer: _Answer) -> None:
    reader._give_back(reader._handle, ctypes.addressof(answer))


def _require(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())

"""Frozen tables with rows in host memory, looked up through jaxsok.h as `nve.py` looks up NVE's: without JAX.

Question: what does a lookup cost a program in C, where a GPU reads most rows in host memory?
Workload: that of `bench_cache.py`: the same ids, a tenth of the rows on the device.
Limit:    that of `bench_cache.py`.
Command:  `python -m jaxsok bench --only cache`, on a GPU.
Last result: docs/results/serving.md (one H200, commit 58f74ac).

Keys come from pinned memory in each call. They are copied to the device on the stream of the lookup or, "in place", the
kernels read them there.
"""

import ctypes
import dataclasses
import os
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from jaxsok.kernels import library

from .nve import LOOKUPS, ROW_BYTES
from .workloads import CACHE_DIM

_UNVERIFIED, _SINGLE_ROWS = 1, 0
"""JAXSOK_UNVERIFIED and JAXSOK_ROWS of jaxsok.h."""
_NON_BLOCKING = 1
"""CUDA's flag of a stream that does not wait for the default one."""


class Feature(ctypes.Structure):
    """jaxsok.h's `jaxsok_feature`."""

    _fields_ = (
        ("table", c_int32),
        ("combiner", c_int32),
        ("first_key", c_int64),
        ("num_keys", c_int64),
        ("num_bags", c_int64),
        ("first_offset", c_int64),
        ("first_weight", c_int64),
        ("out", c_void_p),
    )


class Batch(ctypes.Structure):
    """jaxsok.h's `jaxsok_batch`."""

    _fields_ = (
        ("keys", c_void_p),
        ("num_keys", c_int64),
        ("offsets", c_void_p),
        ("num_offsets", c_int64),
        ("weights", c_void_p),
        ("num_weights", c_int64),
        ("features", ctypes.POINTER(Feature)),
        ("num_features", c_int32),
    )


class GpuMemory:
    """Memory and a stream of the first GPU, by the functions of its driver."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context, device = c_void_p(), c_int()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.stream = c_void_p(self._create("cuStreamCreate", c_uint(_NON_BLOCKING)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"frozen_c: {name} returned {status}.")

    def _create(self, name: str, *arguments: Any) -> int:
        handle = c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def pinned(self, num_bytes: int) -> int:
        """Returns the address of pinned memory of the host, which stays until the process ends."""
        return self._create("cuMemHostAlloc", c_size_t(num_bytes), c_uint(0))

    def on_device(self, num_bytes: int) -> int:
        """Returns the address of memory of the device, which stays until the process ends."""
        return self._create("cuMemAlloc_v2", c_size_t(num_bytes))

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Begins to copy memory of either kind, on the stream."""
        self._call("cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(num_bytes), self.stream)

    def wait(self) -> None:
        """Waits for the stream."""
        self._call("cuStreamSynchronize", self.stream)


class CpuMemory:
    """Does the same on a CPU, where all memory is the host's."""

    stream = None

    def __init__(self) -> None:
        self._held: list[np.ndarray] = []

    def pinned(self, num_bytes: int) -> int:
        """Returns the address of memory."""
        self._held.append(np.zeros(num_bytes, np.uint8))
        return self._held[-1].ctypes.data

    on_device = pinned

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Copies memory."""
        ctypes.memmove(to, source, num_bytes)

    def wait(self) -> None:
        """Does nothing: everything is done."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The content of a folder of frozen tables: one table, with a row for each id."""

    folder: str | os.PathLike[str]
    rows: np.ndarray
    """The row of each id."""
    keys: np.ndarray
    """The key of each id."""
    num_on_device: int
    """Rows of ids from 0 to this number lie on the device."""


class FrozenRows:
    """An open folder, with buffers for the keys of several lookups; `nve.measure` calls it."""

    def __init__(self, source: Source, max_keys: int, platform: str):
        """Opens the folder on the first device; raises RuntimeError with what was refused."""
        self._source, self._max_keys = source, max_keys
        is_gpu = platform == "gpu"
        self._memory = GpuMemory() if is_gpu else CpuMemory()
        self._library = ctypes.CDLL(str(library.require("cuda" if is_gpu else "cpu")))
        self._library.jaxsok_error.restype, self._library.jaxsok_close.restype = c_char_p, None
        self._library.jaxsok_close.argtypes = (c_void_p,)
        self._tables = c_void_p()
        opened = ctypes.byref(self._tables)
        self._require(self._library.jaxsok_open(os.fsencode(source.folder), c_int32(0), c_uint32(_UNVERIFIED), opened))
        num_bytes, row_bytes = LOOKUPS * max_keys * 8, max_keys * ROW_BYTES
        self._slots, self._copied = self._memory.pinned(num_bytes), self._memory.pinned(row_bytes)
        self._device_keys, self._output = self._memory.on_device(num_bytes), self._memory.on_device(row_bytes)
        pinned = ctypes.cast(self._slots, ctypes.POINTER(c_uint64))
        self._keys = np.ctypeslib.as_array(pinned, (LOOKUPS, max_keys))
        self._shares = np.zeros(LOOKUPS)

    def _require(self, status: int) -> None:
        if status:
            raise RuntimeError(self._library.jaxsok_error().decode())

    def fill(self, num_hot: int) -> None:
        """Does nothing: rows lie where they were frozen to lie."""

    def wanted_rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the rows of ids."""
        return self._source.rows[ids]

    def put(self, slot: int, ids: np.ndarray) -> None:
        """Writes the keys of ids to pinned memory."""
        self._keys[slot, : len(ids)] = self._source.keys[ids]
        self._shares[slot] = (ids < self._source.num_on_device).mean()

    def bring(self, slot: int, num_keys: int) -> None:
        """Begins to copy keys to the device."""
        start = slot * self._max_keys * 8
        self._memory.copy(self._device_keys + start, self._slots + start, num_keys * 8)

    def lookup(self, slot: int, num_keys: int, counts: bool = False, in_place: bool = False) -> float | None:
        """Begins a lookup of keys that are on the device, and returns the share of rows there if it is asked for.

        With `in_place` the kernels read the keys in pinned memory.
        """
        feature = Feature(0, _SINGLE_ROWS, 0, num_keys, num_keys, -1, -1, self._output)
        keys = (self._slots if in_place else self._device_keys) + slot * self._max_keys * 8
        batch = Batch(keys, num_keys, None, 0, None, 0, ctypes.pointer(feature), 1)
        self._require(self._library.jaxsok_lookup(self._tables, ctypes.byref(batch), self._memory.stream))
        return float(self._shares[slot]) if counts else None

    def wait(self) -> None:
        """Waits for the rows of the lookups that were begun."""
        self._memory.wait()

    def copied_rows(self, num_keys: int) -> np.ndarray:
        """Returns a copy of the rows of the last lookup."""
        self._memory.copy(self._copied, self._output, num_keys * ROW_BYTES)
        self.wait()
        pinned = ctypes.cast(self._copied, ctypes.POINTER(c_float))
        return np.ctypeslib.as_array(pinned, (num_keys, CACHE_DIM)).copy()

    def close(self) -> None:
        """Closes the folder."""
        self.wait()
        self._library.jaxsok_close(self._tables)

r"""NVE, NVIDIA's nv-embedding-cache, with rows in host memory: a process of its own without JAX.

Question: what does the cache cost that NVIDIA offers for inference on tables that do not fit the device?
Workload: that of `bench_cache.py`: the same ids; the cache has the bytes of a tenth of the rows.
Limit:    that of `bench_cache.py`.
Command:  `python -m jaxsok bench --only cache` starts it first where NVE is found: in the folder that `JAXSOK_NVE`
          names, or as the installed package `pynve`; by hand: `python -m benchmarks.nve --out nve.json`.
Last result: docs/results/serving.md, "NVE" (one H100, commit 4328f66).

This file calls NVE's C interface. A *linear* layer has a static table in pinned memory, where an id is its row. (NVE's
Python layer puts it in managed memory, which is not measured.) A kernel reads rows that are not in the cache over the
link. A *hierarchical* layer has 64-bit keys, and their rows in a hash map in host memory (NVHashMap). Threads of the
host find the rows that are not in the cache.

By default NVE counts the misses of each lookup, waits for the count, and then inserts the keys of some lookups, chosen
at random: of half of the lookups where half of the keys miss, of 1% where a quarter does. "No inserts" turns this off,
and lookups do not wait for a count. Each measurement begins with the first tenth of the rows in the cache, less those
that find no place there, and the hot ids stay. "Hit rate" is what NVE counted. Ids come from pinned memory in each
call: they are copied to the device or, "in place", the kernels read them there. "on_device_ms" is the time of ids that
are on the device already. Rows are compared with what was written, before and after the times are taken.

To build NVE (commit 318a481 of github.com/NVIDIA/nv-embedding-cache) for H100 and H200, run in its folder:

    git submodule update --init third_party/{json,pybind11,cuembed,dlpack,nvhashmap}
    pip install mpich torch
    cmake -S . -B build -DNVE_SM_VERSION=90 -DNVE_ORIGIN_RPATH=1 -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared \
      -DNVE_DISABLE_TESTS_AND_SAMPLES=1 -DNVE_DISABLE_AVX512=1 \
      -DNVE_FEATURES="ht_mask_64 ht_key_64 ht_key_32 ht_part_fnv1a ht_kernel_64 ht_kernel_128 nvhm_plugin"
    cmake --build build
    export JAXSOK_NVE=$PWD/build/lib

This leaves out the plugins for Abseil, Parallel Hashmap, Redis and RocksDB, the tests, and the samples, which need
TensorRT. NVE links MPI, which is not used here. Torch is for NVE's Python layers and NVE's own benchmark; this file
does not need it (`-DNVE_DISABLE_TORCH_BINDINGS=ON`).
"""

import argparse
import ctypes
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

from . import workloads
from .workloads import CACHE_DIM, CACHE_HIT_RATES, CACHE_ROWS, CACHE_SHARE, SCATTER, CachedIds, cache_keys

FOLDER = "JAXSOK_NVE"
"""The variable with the folder of NVE's libraries, where they are not installed as `pynve`."""
LIBRARY, HASH_MAP = "libnve-common.so", "libnve-plugin-nvhm.so"

LOOKUPS = 40
ROW_BYTES = CACHE_DIM * 4
_CHUNK = 1 << 16
"""Rows that are written or inserted at a time."""
_HOT_INSERTS = 3
"""Insertions of a hot id when the cache is filled: what was inserted most often stays."""

INT64, FLOAT32 = 1, 1
"""NVE's numbers of the type of keys and of the type of rows."""
IN_PLACE = "keys read in place"
_ANY_DIRECTION = 4
"""CUDA's number of a copy between any two places."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to use NVE."""

    by: str
    is_linear: bool
    """False: a hierarchical layer."""
    inserts: bool


SETUPS = (
    Setup("linear, no inserts", True, False),
    Setup("linear", True, True),
    Setup("hierarchical", False, True),
)


class GpuTableConfig(ctypes.Structure):
    """NVE's `nve_gpu_table_config_t`."""

    _fields_ = (
        ("device_id", c_int32),
        ("cache_size", c_uint64),
        ("row_size_in_bytes", c_int64),
        ("uvm_table", c_void_p),
        ("count_misses", c_int),
        ("max_modify_size", c_int64),
        ("value_dtype", c_int),
        ("private_stream", c_void_p),
        ("disable_uvm_update", c_int),
        ("uvm_cpu_accumulate", c_int),
        ("data_storage_on_host", c_int),
        ("modify_on_gpu", c_int),
        ("kernel_mode_type", c_uint64),
        ("kernel_mode_value", c_uint64),
        ("invalid_key", c_int64),
    )


class LinearLayerConfig(ctypes.Structure):
    """NVE's `nve_linear_uvm_layer_config_t`."""

    _fields_ = (
        ("layer_name", c_char_p),
        ("insert_heuristic", c_void_p),
        ("min_insert_freq_gpu", c_int64),
        ("min_insert_size_gpu", c_int64),
    )


class HierarchicalLayerConfig(ctypes.Structure):
    """NVE's `nve_hierarchical_layer_config_t`."""

    _fields_ = (
        ("layer_name", c_char_p),
        ("insert_heuristic", c_void_p),
        ("min_insert_freq_gpu", c_int64),
        ("min_insert_freq_host", c_int64),
        ("min_insert_size_gpu", c_int64),
        ("min_insert_size_host", c_int64),
        ("default_embedding", c_void_p),
        ("default_embedding_size", c_int64),
    )


_OUT = POINTER(c_void_p)

DEFAULTS = {
    "nve_gpu_table_config_default": GpuTableConfig,
    "nve_linear_uvm_layer_config_default": LinearLayerConfig,
    "nve_hierarchical_layer_config_default": HierarchicalLayerConfig,
}
"""Functions that return a struct."""

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nve_get_last_error": (POINTER(c_char_p),),
    "nve_version": (POINTER(c_int32),) * 3,
    "nve_load_host_table_plugin": (c_char_p,),
    "nve_create_host_table_factory": (_OUT, c_char_p),
    "nve_host_factory_produce": (c_void_p, c_int64, c_char_p, _OUT),
    "nve_host_factory_destroy": (c_void_p,),
    "nve_heuristic_create_never": (_OUT,),
    "nve_heuristic_destroy": (c_void_p,),
    "nve_gpu_table_create": (_OUT, c_int, POINTER(GpuTableConfig), c_void_p),
    "nve_table_destroy": (c_void_p,),
    "nve_linear_uvm_layer_create": (_OUT, c_int, POINTER(LinearLayerConfig), c_void_p, c_void_p),
    "nve_hierarchical_layer_create": (_OUT, c_int, POINTER(HierarchicalLayerConfig), _OUT, c_int64, c_void_p),
    "nve_layer_create_execution_context": (c_void_p, _OUT, c_void_p, c_void_p, c_void_p, c_void_p),
    "nve_layer_lookup": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, POINTER(c_float)),
    "nve_layer_insert": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64),
    "nve_layer_destroy": (c_void_p,),
    "nve_context_wait": (c_void_p,),
    "nve_context_destroy": (c_void_p,),
    "cudaSetDevice": (c_int,),
    "cudaDeviceSynchronize": (),
    "cudaMalloc": (_OUT, c_size_t),
    "cudaFree": (c_void_p,),
    "cudaHostAlloc": (_OUT, c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaStreamCreate": (_OUT,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamDestroy": (c_void_p,),
}
"""The functions that this file calls, with the types of their arguments; each returns a status, 0 for success."""


class Nve:
    """NVE's C interface, and the CUDA runtime that it is linked to."""

    def __init__(self, folder: pathlib.Path):
        """Loads the library; raises FileNotFoundError where the folder does not have it."""
        self.folder = folder
        if not (folder / LIBRARY).exists():
            raise FileNotFoundError(f"nve: found no {LIBRARY} in {folder}; {FOLDER} must name the folder with it.")
        self._library = ctypes.CDLL(str(folder / LIBRARY))
        for name, arguments in FUNCTIONS.items():
            function = getattr(self._library, name)  # a library's handle finds what its dependencies have, too
            function.argtypes, function.restype = arguments, c_int
        for name, struct in DEFAULTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = (), struct
        self._library.cudaGetErrorString.argtypes = (c_int,)
        self._library.cudaGetErrorString.restype = c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function; raises RuntimeError with its message where it fails."""
        status = getattr(self._library, name)(*arguments)
        if not status:
            return
        if name.startswith("cuda"):
            text = self._library.cudaGetErrorString(status)
        else:
            message = c_char_p()
            self._library.nve_get_last_error(ctypes.byref(message))
            text = message.value
        raise RuntimeError(f"nve: {name} returned {status}: {(text or b'no message').decode(errors='replace')}")

    def create(self, name: str, *arguments: Any) -> c_void_p:
        """Calls a function that writes a handle to its first argument, and returns the handle."""
        handle = c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def default(self, name: str) -> Any:
        """Returns a struct of NVE's default settings."""
        return getattr(self._library, name)()

    @property
    def version(self) -> str:
        """NVE's version."""
        numbers = [c_int32() for _ in range(3)]
        self.call("nve_version", *map(ctypes.byref, numbers))
        return ".".join(str(number.value) for number in numbers)


class Memory:
    """Memory on the device or on the host, by its address."""

    def __init__(self, nve: Nve, num_bytes: int, kind: str):
        """Allocates memory, "device" or "pinned"."""
        self._nve, self._kind, self.num_bytes = nve, kind, num_bytes
        is_pinned = kind == "pinned"
        made = nve.create("cudaHostAlloc", num_bytes, 0) if is_pinned else nve.create("cudaMalloc", num_bytes)
        self.address = int(made.value or 0)

    def array(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Returns host memory as an array."""
        content = memoryview((ctypes.c_char * self.num_bytes).from_address(self.address))
        return np.frombuffer(content, dtype).reshape(shape)

    def free(self) -> None:
        """Gives the memory back."""
        self._nve.call("cudaFreeHost" if self._kind == "pinned" else "cudaFree", self.address)


def rows_of(ids: np.ndarray) -> np.ndarray:
    """Returns the rows of ids, float32 [ids, dim], which tell one id from another.

    Example:
      >>> rows_of(np.arange(2))[:, :3].astype(int)
      array([[       0,      158,      316],
             [10368889, 10369047, 10369206]])
    """
    mixed = ids.astype(np.uint32)[:, None] * np.uint32(SCATTER) + np.arange(CACHE_DIM, dtype=np.uint32) * 40503
    return (mixed >> np.uint32(8)).astype(np.float32)  # 24 bits: exact


class Layer:
    """One of NVE's layers: all rows in host memory, its cache, and buffers for the keys of several lookups."""

    def __init__(self, nve: Nve, setup: Setup, num_rows: int, max_keys: int):
        """Writes all rows."""
        self._nve, self._setup, self._num_rows, self._max_keys = nve, setup, num_rows, max_keys
        self.capacity = int(CACHE_SHARE * num_rows)
        self._closing: list[Callable[[], None]] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        nve, setup = self._nve, self._setup
        rows = None
        if setup.is_linear:
            rows = self._memory(self._num_rows * ROW_BYTES, "pinned")
            in_memory = rows.array(np.float32, (self._num_rows, CACHE_DIM))
            for ids in _chunks(self._num_rows):
                in_memory[ids[0] : ids[0] + len(ids)] = rows_of(ids)
        config = nve.default("nve_gpu_table_config_default")
        config.cache_size, config.row_size_in_bytes = self.capacity * ROW_BYTES, ROW_BYTES
        config.value_dtype, config.uvm_table = FLOAT32, rows.address if rows else None
        table = self._owned("nve_table_destroy", nve.create("nve_gpu_table_create", INT64, ctypes.byref(config), None))
        self._layer = self._linear(table) if setup.is_linear else self._hierarchical(table)
        self._streams = [self._owned("cudaStreamDestroy", nve.create("cudaStreamCreate")) for _ in range(2)]
        context = c_void_p()
        nve.call("nve_layer_create_execution_context", self._layer, ctypes.byref(context), *self._streams, None, None)
        self._context = self._owned("nve_context_destroy", context)
        if not setup.is_linear:
            for ids in _chunks(self._num_rows):
                keys, written = self.keys_of(ids), rows_of(ids)  # held while NVE reads them by address
                self._insert(len(ids), keys.ctypes.data, written.ctypes.data, 1)
        slots = LOOKUPS * self._max_keys * 8
        self._slots = self._memory(slots, "pinned")
        self._keys = self._slots.array(np.int64, (LOOKUPS, self._max_keys))
        self._device_keys = self._memory(slots, "device")
        self._output = self._memory(self._max_keys * ROW_BYTES, "device")
        self._copied = self._memory(self._max_keys * ROW_BYTES, "pinned")
        self._cached_keys = self._memory(self.capacity * 8, "device")
        self._cached_rows = self._memory(self.capacity * ROW_BYTES, "device")
        for ids in _chunks(self.capacity):
            keys, written, first = self.keys_of(ids), rows_of(ids), int(ids[0])
            self._copy(self._cached_keys.address + first * 8, keys.ctypes.data, keys.nbytes)
            self._copy(self._cached_rows.address + first * ROW_BYTES, written.ctypes.data, written.nbytes)
        self._hit_rates = (c_float * 4)()
        nve.call("cudaDeviceSynchronize")

    def _owned(self, destroy: str, handle: c_void_p) -> c_void_p:
        self._closing.append(lambda: self._nve.call(destroy, handle))
        return handle

    def _memory(self, num_bytes: int, kind: str) -> Memory:
        memory = Memory(self._nve, num_bytes, kind)
        self._closing.append(memory.free)
        return memory

    def _linear(self, table: c_void_p) -> c_void_p:
        nve, config = self._nve, self._nve.default("nve_linear_uvm_layer_config_default")
        if not self._setup.inserts:
            never = self._owned("nve_heuristic_destroy", nve.create("nve_heuristic_create_never"))
            config.insert_heuristic = never.value
        layer = nve.create("nve_linear_uvm_layer_create", INT64, ctypes.byref(config), table, None)
        return self._owned("nve_layer_destroy", layer)

    def _hierarchical(self, table: c_void_p) -> c_void_p:
        nve, config = self._nve, self._nve.default("nve_hierarchical_layer_config_default")
        settings = {
            "key_size": 8,
            "max_value_size": ROW_BYTES,
            "value_dtype": "float32",
            "value_alignment": 32,
            "initial_capacity": int(1.1 * self._num_rows),
            "num_partitions": 1,
            "partitioner": "always_zero",
        }  # those of NVE's Python layer
        nve.call("nve_load_host_table_plugin", str(nve.folder / HASH_MAP).encode())
        factory = nve.create("nve_create_host_table_factory", json.dumps({"implementation": "nvhm_map"}).encode())
        self._owned("nve_host_factory_destroy", factory)
        hash_map = c_void_p()
        nve.call("nve_host_factory_produce", factory, 100, json.dumps(settings).encode(), ctypes.byref(hash_map))
        self._owned("nve_table_destroy", hash_map)
        tables = (c_void_p * 2)(table, hash_map)
        layer = nve.create("nve_hierarchical_layer_create", INT64, ctypes.byref(config), tables, 2, None)
        return self._owned("nve_layer_destroy", layer)

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the keys of ids, int64: the ids of a linear layer, else 62 bits in which nothing tells the row."""
        if self._setup.is_linear:
            return ids
        return workloads.mix(0, ids).view(np.int64)[:, 0] & ((1 << 62) - 1)

    def _insert(self, num_keys: int, keys: int, rows: int, table: int) -> None:
        self._nve.call(
            "nve_layer_insert", self._layer, self._context, num_keys, keys, ROW_BYTES, ROW_BYTES, rows, table
        )
        self._nve.call("nve_context_wait", self._context)

    def fill(self, num_hot: int) -> None:
        """Inserts the first rows into the cache, and the hot ones again, which stay."""
        self._nve.call("nve_context_wait", self._context)  # for insertions that lookups began
        for count in (self.capacity, *[num_hot] * _HOT_INSERTS):
            for ids in _chunks(count):
                first = int(ids[0])
                keys, rows = self._cached_keys.address + first * 8, self._cached_rows.address + first * ROW_BYTES
                self._insert(len(ids), keys, rows, 0)

    def put(self, slot: int, ids: np.ndarray) -> None:
        """Writes the keys of ids to pinned memory."""
        self._keys[slot, : len(ids)] = self.keys_of(ids)

    def bring(self, slot: int, num_keys: int) -> None:
        """Begins to copy keys to the device."""
        start = slot * self._max_keys * 8
        self._copy(self._device_keys.address + start, self._slots.address + start, num_keys * 8, is_waited_for=False)

    def lookup(self, slot: int, num_keys: int, counts: bool = False, in_place: bool = False) -> float | None:
        """Begins a lookup of keys that are on the device, and returns the hit rate where it is counted, else None.

        With `in_place` the kernels read the keys in pinned memory.
        """
        is_counted = counts or self._setup.inserts  # NVE's Python layers always ask for it
        keys = self._slots if in_place else self._device_keys
        self._nve.call(
            "nve_layer_lookup",
            self._layer,
            self._context,
            num_keys,
            keys.address + slot * self._max_keys * 8,
            self._output.address,
            ROW_BYTES,
            None,
            self._hit_rates if is_counted else None,
        )
        return float(self._hit_rates[0]) if is_counted else None

    def wait(self) -> None:
        """Waits for the rows of the lookups that were begun."""
        self._nve.call("cudaStreamSynchronize", self._streams[0])

    def wanted_rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the rows that were written for ids."""
        return rows_of(ids)

    def copied_rows(self, num_keys: int) -> np.ndarray:
        """Returns a copy of the rows of the last lookup."""
        self.wait()
        self._copy(self._copied.address, self._output.address, num_keys * ROW_BYTES)
        return self._copied.array(np.float32, (self._max_keys, CACHE_DIM))[:num_keys].copy()

    def _copy(self, to: int, source: int, num_bytes: int, is_waited_for: bool = True) -> None:
        self._nve.call("cudaMemcpyAsync", to, source, num_bytes, _ANY_DIRECTION, self._streams[0])
        if is_waited_for:
            self.wait()

    def close(self) -> None:
        """Destroys the layer and frees its memory, in the reverse order of their making."""
        while self._closing:
            self._closing.pop()()


def _chunks(count: int) -> list[np.ndarray]:
    return [np.arange(first, min(count, first + _CHUNK)) for first in range(0, count, _CHUNK)]


def measure(layer: Any, stream: CachedIds, num_keys: int, hit_rate: float, in_place: bool = False) -> dict[str, Any]:
    """Measures one number of keys and hit rate.

    Args:
      layer: a `Layer`, or a `frozen_c.FrozenRows`.
      stream: the ids.
      num_keys: keys of a lookup.
      hit_rate: the share of hot ids, which the cache has.
      in_place: kernels read keys in pinned memory; otherwise they are copied to the device first.

    Returns:
      Milliseconds of single lookups ("samples_ms"), of lookups back to back, and of single lookups whose keys are on
      the device, and the hit rate that the layer counted.

    Raises:
      RuntimeError: a lookup gave other rows than those that were written.
    """
    asked: list[np.ndarray] = []

    def draw(count: int) -> None:
        asked[:] = [stream.take(num_keys, hit_rate) for _ in range(count)]
        for slot, ids in enumerate(asked):
            layer.put(slot, ids)

    def call(slot: int, counts: bool = False) -> float | None:
        if not in_place:
            layer.bring(slot, num_keys)
        return layer.lookup(slot, num_keys, counts, in_place)

    def check() -> None:
        draw(1)
        call(0)
        if not np.array_equal(layer.copied_rows(num_keys), layer.wanted_rows(asked[0])):
            raise RuntimeError("nve.measure: a lookup gave other rows than those that were written.")

    def in_turn(lookup: Callable[[int], Any]) -> list[float]:
        ms = []
        for slot in range(LOOKUPS):
            begin = time.perf_counter()
            lookup(slot)
            layer.wait()
            ms.append((time.perf_counter() - begin) * 1e3)
        return ms

    layer.fill(stream.num_hot)
    check()
    for _ in range(stream.num_warm_ups(num_keys, hit_rate)):
        draw(1)
        call(0)
        layer.wait()
    draw(LOOKUPS)
    alone = in_turn(call)
    draw(LOOKUPS)
    begin = time.perf_counter()
    for slot in range(LOOKUPS):
        call(slot)
    layer.wait()
    back_to_back_ms = (time.perf_counter() - begin) * 1e3 / LOOKUPS
    draw(LOOKUPS)
    for slot in range(LOOKUPS):
        layer.bring(slot, num_keys)
    layer.wait()
    on_device = in_turn(lambda slot: layer.lookup(slot, num_keys))
    draw(LOOKUPS)
    seen = [call(slot, counts=True) for slot in range(LOOKUPS)]
    check()
    return {
        "samples_ms": alone,
        "back_to_back_ms": back_to_back_ms,
        "on_device_ms": float(np.median(on_device)),
        "hit_rate": float(np.mean([rate for rate in seen if rate is not None])),
    }


def find() -> pathlib.Path | None:
    """Returns the folder that `JAXSOK_NVE` names, else that of the installed package, else None."""
    if os.environ.get(FOLDER):
        return pathlib.Path(os.environ[FOLDER]).resolve()
    found = importlib.util.find_spec("pynve")
    return pathlib.Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def main() -> None:
    """Measures each setup, number of keys and hit rate, and writes after each."""
    parser = argparse.ArgumentParser(description="NVE's cache on the workload of bench_cache.py.")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    about: dict[str, str] = {}

    def write() -> None:
        options.out.write_text(json.dumps({"records": records, "failures": failures, "about": about}))

    def fail(label: str, error: Exception) -> None:
        failures.append({"what": label, "why": f"{type(error).__name__}: {error}"[:2000]})
        print(f"{label} FAILED: {error}", flush=True)
        write()

    num_rows, sizes = max(4096, round(CACHE_ROWS * options.scale)), cache_keys(options.scale)
    try:
        folder = find()
        if folder is None:
            raise FileNotFoundError(f"nve: found no package pynve, and {FOLDER} names no folder with {LIBRARY}.")
        nve = Nve(folder)
        about["nve"] = nve.version
        nve.call("cudaSetDevice", 0)
    except (OSError, AttributeError, RuntimeError) as error:
        fail("NVE", error)
        return
    for setup in SETUPS:
        label = f"NVE, {setup.by}"
        try:
            begin = time.perf_counter()
            layer = Layer(nve, setup, num_rows, max(sizes))
        except Exception as error:
            fail(label, error)
            continue
        print(f"{label}: {num_rows:,} rows in {time.perf_counter() - begin:.1f} s", flush=True)
        stream = CachedIds(num_rows, layer.capacity, options.seed)
        for num_keys, hit_rate, in_place in itertools.product(sizes, CACHE_HIT_RATES, (False, True)):
            by = f"{setup.by}, {IN_PLACE}" if in_place else setup.by
            case = f"NVE, {by}, {num_keys} keys, {hit_rate:.0%}"
            try:
                found = measure(layer, stream, num_keys, hit_rate, in_place)
            except Exception as error:
                fail(case, error)
                continue
            records.append({"by": by, "num_keys": num_keys, "wanted": hit_rate, **found})
            print(
                f"{case}, seen {found['hit_rate']:.3f}: {np.median(found['samples_ms']):.4g} ms, "
                f"{found['back_to_back_ms']:.4g} in turn, {found['on_device_ms']:.4g} with keys on the device",
                flush=True,
            )
            write()
        try:
            layer.close()
        except Exception as error:
            fail(f"{label}, end", error)


if __name__ == "__main__":
    main()

"""jaxsok.h through ctypes: structures, a wrapper, and batches that are made of several arrays."""

import contextlib
import ctypes
import dataclasses

import numpy as np

from benchmarks.frozen_c import Batch, Feature
from jaxsok.kernels import library

COMBINERS = {None: 0, "sum": 1, "mean": 2, "sqrtn": 3}
BAD_ARGUMENT, NO_FOLDER, BAD_FOLDER, NO_MEMORY, DEVICE_FAILED, BAD_INDEX = range(1, 7)
UNVERIFIED, IN_MEMORY = 1, 2


class Refused(Exception):
    """The error for a status that is not JAXSOK_OK."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def load(back_end="cpu"):
    """Loads the library and declares the types of its functions."""
    found = ctypes.CDLL(str(library.library_path(back_end)))
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    for name, result, *arguments in (
        ("api_version", number),
        ("platform", text),
        ("error", text),
        ("open", number, text, number, ctypes.c_uint32, ctypes.POINTER(pointer)),
        ("close", None, pointer),
        ("num_tables", number, pointer),
        ("table_name", text, pointer, number),
        ("table_dim", number, pointer, number),
        ("table_num_rows", ctypes.c_int64, pointer, number),
        ("find_table", number, pointer, text),
        ("lookup", number, pointer, ctypes.POINTER(Batch), pointer),
    ):
        function = getattr(found, f"jaxsok_{name}")
        function.restype, function.argtypes = result, arguments
    return found


@dataclasses.dataclass
class Request:
    """Keys of one table, in the form of `LookupInput`."""

    table: str
    keys: np.ndarray
    combiner: str | None = None
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def num_bags(self):
        if self.offsets is not None:
            return len(self.offsets) - 1
        return self.keys.size if self.combiner is None else len(self.keys)


class Tables:
    """An open folder of tables."""

    def __init__(self, folder, back_end="cpu", device=0, flags=0):
        self.library, self.pointer = load(back_end), ctypes.c_void_p()
        self._check(self.library.jaxsok_open(str(folder).encode(), device, flags, ctypes.byref(self.pointer)))

    def _check(self, status):
        if status:
            raise Refused(status, self.library.jaxsok_error().decode())

    def close(self):
        """Closes the folder; a second call does nothing."""
        self.library.jaxsok_close(self.pointer)

    def tables(self):
        """Returns dims and numbers of rows by name."""
        found = self.library
        return {
            found.jaxsok_table_name(self.pointer, t).decode(): (
                found.jaxsok_table_dim(self.pointer, t),
                found.jaxsok_table_num_rows(self.pointer, t),
            )
            for t in range(found.jaxsok_num_tables(self.pointer))
        }

    def number(self, name):
        """Returns the number of a table."""
        return self.library.jaxsok_find_table(self.pointer, name.encode())

    def pack(self, requests):
        """Returns the arrays of a batch, and its features without `out`."""
        keys = [np.asarray(request.keys).reshape(-1).astype(np.uint64) for request in requests]
        offsets = [np.asarray(request.offsets, np.int32) for request in requests if request.offsets is not None]
        weights = [
            np.asarray(request.weights, np.float32).reshape(-1) for request in requests if request.weights is not None
        ]
        features, first_key, first_offset, first_weight = [], 0, 0, 0
        for request, given in zip(requests, keys, strict=True):
            is_ragged, is_weighted = request.offsets is not None, request.weights is not None
            features.append(
                Feature(
                    self.number(request.table),
                    COMBINERS[request.combiner],
                    first_key,
                    given.size,
                    request.num_bags,
                    first_offset if is_ragged else -1,
                    first_weight if is_weighted else -1,
                    None,
                )
            )
            first_key += given.size
            first_offset += request.num_bags + 1 if is_ragged else 0
            first_weight += given.size if is_weighted else 0
        return (
            np.concatenate([*keys, np.zeros(0, np.uint64)]),
            np.concatenate([*offsets, np.zeros(0, np.int32)]),
            np.concatenate([*weights, np.zeros(0, np.float32)]),
            features,
        )

    def call(self, arrays, features, stream=None):
        """Looks up the batch whose keys, offsets and weights are at (address, size)."""
        flat = [part for array in arrays for part in array]
        batch = Batch(*flat, (Feature * len(features))(*features), len(features))
        self._check(self.library.jaxsok_lookup(self.pointer, ctypes.byref(batch), stream))

    def lookup(self, *requests):
        """Returns the embeddings of each request, `[num_bags, dim]`, in host memory."""
        *arrays, features = self.pack(requests)
        outs = []
        for feature, request in zip(features, requests, strict=True):
            dim = self.library.jaxsok_table_dim(self.pointer, feature.table)
            outs.append(np.full((request.num_bags, dim), np.nan, np.float32))
            feature.out = outs[-1].ctypes.data
        self.call([(array.ctypes.data, array.size) for array in arrays], features)
        return outs


class Gpu:
    """Memory, a stream and graphs of the first GPU, for the calling thread, through the driver's functions."""

    def __init__(self):
        self._driver = ctypes.CDLL("libcuda.so.1")
        context, device, self.stream = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self.stream), 1)  # 1: the stream does not wait for the default stream

    def _call(self, name, *arguments):
        status = getattr(self._driver, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def put(self, array):
        """Copies an array to the GPU and returns its address. The array stays there."""
        pointer = ctypes.c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 1)))
        self._call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return pointer.value

    def pin(self, array):
        """Copies an array to pinned host memory and returns its address. The array stays there."""
        pointer = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 1)), 0)
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)
        return pointer.value

    def get(self, pointer, shape):
        """Copies float32 values from the GPU after the stream has finished its work."""
        array = np.empty(shape, np.float32)
        self._call("cuStreamSynchronize", self.stream)
        address = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyDtoH_v2", address, ctypes.c_void_p(pointer), ctypes.c_size_t(array.nbytes))
        return array

    def capture(self, work):
        """Captures what `work` enqueues on the stream in a graph, and returns a function that runs the graph there."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self.stream, 1)  # 1: other threads are not restricted
        work()
        self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return lambda: self._call("cuGraphLaunch", executable, self.stream)

    def lookup(self, tables, *requests, is_graph=False, is_pinned=False):
        """Does the same as `Tables.lookup` with arrays on the GPU, or keys, offsets and weights in pinned memory."""
        *arrays, features = tables.pack(requests)
        held = [((self.pin if is_pinned else self.put)(array), array.size) for array in arrays]
        shapes = []
        for feature, request in zip(features, requests, strict=True):
            shapes.append((request.num_bags, tables.library.jaxsok_table_dim(tables.pointer, feature.table)))
            feature.out = self.put(np.full(shapes[-1], np.nan, np.float32))
        outs = [feature.out for feature in features]
        if is_graph:
            run = self.capture(lambda: tables.call(held, features, self.stream))
            for _ in range(3):
                run()
        else:
            tables.call(held, features, self.stream)
        return [self.get(out, shape) for out, shape in zip(outs, shapes, strict=True)]


@contextlib.contextmanager
def open_tables(folder, **options):
    """Opens tables and closes them at the end."""
    tables = Tables(folder, **options)
    try:
        yield tables
    finally:
        tables.close()

"""The door to packing on the host (ffi/kernels/pack.h): functions of the CPU library that ctypes calls.

They run on threads of the library without the interpreter's lock, on the arrays whose addresses they get. The caller
answers for addresses, strides and sizes, and keeps the arrays alive, except those that a `KeysJob` keeps.
"""

import ctypes
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsok.kernels import library

TYPES: dict[np.dtype, int] = {
    np.dtype(name): code
    for code, name in enumerate(
        ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
    )
}
"""Codes of the dtypes that are read (PackType in pack.h), all in the machine's byte order."""


def _item(names: str) -> np.dtype:
    return np.dtype([(name, np.int64) for name in names.split()])


BAGS = _item("given stride type is_offsets num_bags num_keys num_parts bags_of_part offsets offsets_step ends")
"""The bags of a ragged feature (PackBags in pack.h)."""

KEYS = _item(
    "keys line_stride key_stride type width num_keys ends num_parts part_bytes size packed is_narrow "
    "weights weight_line_stride weight_stride weight_type packed_weights offsets num_bags square"
)
"""The keys of a feature, with weights (PackKeys in pack.h)."""

_struct_of = operator.attrgetter("__array_struct__")
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@functools.cache
def _functions() -> tuple[Callable[..., Any], ...]:
    loaded = library.load_cpu()
    # With the interpreter's lock: another thread that got it in so short a call might keep it for milliseconds.
    read = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    begin = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
    return (
        read(("JaxsokPackAddresses", loaded)),
        loaded.JaxsokPackBags,
        begin(("JaxsokBeginKeys", loaded)),
        loaded.JaxsokEndKeys,
    )


def is_available() -> bool:
    """Returns whether the library loads; where it does not, batches are packed with NumPy."""
    try:
        _functions()
    except ImportError:
        return False
    return True


def addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns where the elements of arrays begin, in a third of the time of `__array_interface__`."""
    structs = list(map(_struct_of, arrays))
    pointers = np.array(list(map(_pointer_of, structs, itertools.repeat(None))), np.int64)
    _functions()[0](pointers.ctypes.data, len(structs))
    return pointers


def pack_bags(items: np.ndarray, num_threads: int) -> bool:
    """Writes offsets and ends of ragged features, given as `BAGS`; returns False where the data are refused."""
    return _functions()[1](items.ctypes.data, len(items), num_threads) == 0


class KeysJob:
    """Keys and weights of features, given as `KEYS`, that the library's threads write from now on.

    It keeps the arrays that they read and write alive, and the end of the job is waited for when nothing refers to it
    any more. With one thread the work is done in `wait`.
    """

    def __init__(self, items: np.ndarray, num_threads: int, arrays: Any):
        self._begun = ctypes.c_void_p()  # the library sets it, and clears it when the job has ended
        # First, since Ctrl-C may come as soon as the job has begun.
        weakref.finalize(self, _end_keys, self._begun, arrays)
        _functions()[2](items.ctypes.data, len(items), num_threads, ctypes.addressof(self._begun))

    def wait(self) -> bool:
        """Waits, once, and works too; returns False where the data are refused."""
        return _end_keys(self._begun, None) == 0


def _end_keys(begun: ctypes.c_void_p, arrays: Any) -> int:
    return _functions()[3](ctypes.addressof(begun))

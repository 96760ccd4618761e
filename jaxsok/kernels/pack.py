"""The door to packing on the host (ffi/kernels/pack.h): functions of the CPU library that ctypes calls.

They run on threads of the library without the interpreter's lock, on the arrays whose addresses they get. The caller
keeps these arrays alive and answers for addresses, strides and sizes.
"""

import array
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxsok.kernels import library

TYPES: dict[np.dtype, int] = {
    np.dtype(name): code
    for code, name in enumerate(
        ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
    )
}
"""Codes of the dtypes that are read (PackType in pack.h), all in the machine's byte order."""


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    loaded = library.load_cpu()
    return loaded.JaxsokPackBags, loaded.JaxsokPackKeys


def is_available() -> bool:
    """Returns whether the library loads; where it does not, batches are packed with NumPy."""
    try:
        _functions()
    except ImportError:
        return False
    return True


def pack_bags(items: Sequence[Iterable[int]], num_threads: int) -> bool:
    """Writes offsets and ends of ragged features; returns False where the data are refused.

    Args:
      items: for each feature the fields of `PackBags`.
      num_threads: at most so many threads work, the caller's among them.
    """
    return _call(_functions()[0], items, num_threads)


def pack_keys(items: Sequence[Iterable[int]], num_threads: int) -> bool:
    """Writes keys and weights of features; returns False where the data are refused.

    Args:
      items: for each feature the fields of `PackKeys`.
      num_threads: at most so many threads work, the caller's among them.
    """
    return _call(_functions()[1], items, num_threads)


def _call(function: Callable[..., int], items: Sequence[Iterable[int]], num_threads: int) -> bool:
    words = array.array("q", itertools.chain.from_iterable(items))
    return function(words.buffer_info()[0], len(items), num_threads) == 0

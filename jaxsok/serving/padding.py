"""Fills arrays up to a power of two, so that programs are few."""

from typing import Any

import numpy as np

from jaxsok import keys as keys_lib

NO_KEYS = np.zeros(0, np.uint64)


def padded_size(num_keys: int, least: int) -> int:
    """Returns the least power of two from `least` on that has room for the keys."""
    return max(least, 1 << max(0, num_keys - 1).bit_length())


def fill_up(array: np.ndarray, size: int, value: Any = 0) -> np.ndarray:
    """Copies an array and appends rows of one value."""
    filled = np.empty((size, *array.shape[1:]), array.dtype)
    filled[: len(array)], filled[len(array) :] = array, value
    return filled


def key_words(keys: np.ndarray, size: int) -> np.ndarray:
    """Converts keys of one axis to words, with padding behind: uint32[size, 2]."""
    return fill_up(keys_lib.to_words(np.asarray(keys, np.uint64)), size, np.uint32(0xFFFFFFFF))

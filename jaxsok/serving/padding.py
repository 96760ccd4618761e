"""Fills arrays up to a power of two, so that programs are few."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok import keys as keys_lib

NO_KEYS = np.zeros(0, np.uint64)


def padded_size(num_keys: int, least: int) -> int:
    """Returns the least power of two from `least` on that has room for the keys."""
    return max(least, 1 << max(0, num_keys - 1).bit_length())


def slices(size: int, most: int) -> Iterator[slice]:
    """Yields slices of at most `most` that cover an axis of a size."""
    return (slice(start, min(start + most, size)) for start in range(0, size, most))


def fill_up(array: Any, size: int, value: Any = 0) -> Any:
    """Appends rows of one value to a copy of an array; gives back one that has the size."""
    numbers = jnp if isinstance(array, jax.Array) else np
    if array.shape[0] == size:
        return array
    return numbers.concatenate([array, numbers.full((size - array.shape[0], *array.shape[1:]), value, array.dtype)])


def key_words(keys: np.ndarray, size: int) -> np.ndarray:
    """Converts keys of one axis to words, with padding behind: uint32[size, 2]."""
    return fill_up(keys_lib.to_words(np.asarray(keys, np.uint64)), size, keys_lib.PADDING_WORD)

"""64-bit keys into JAX and out of it (decision D1): views, widening, refusals.

JAX without x64 narrows int64 to int32 in silence, so keys cross every JAX boundary as `uint32[..., 2]` words,
low word first. NumPy integers of any width are taken; of `jax.Array`s only those that cannot have been narrowed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxsok.types import PADDING_KEY

PADDING_WORD = np.uint32(PADDING_KEY & 0xFFFFFFFF)
"""Both words of PADDING_KEY."""


def to_words(keys: np.ndarray, what: str = "to_words") -> np.ndarray:
    """Views NumPy integers as `uint32[..., 2]` words, low word first; narrower integers are widened by sign."""
    if keys.dtype.kind not in "iu":
        remedy = "hash strings to int64 or uint64" if keys.dtype.kind in "UST" else "pass NumPy int64 or uint64"
        raise TypeError(f"{what}: keys must be integers, got {keys.dtype}{list(keys.shape)}; {remedy}.")
    if keys.dtype.itemsize < 8:
        keys = keys.astype(np.int64)
    keys = np.ascontiguousarray(keys)
    if keys.dtype.byteorder == ">":
        keys = keys.astype(keys.dtype.newbyteorder("="))
    return keys.view(np.uint32).reshape(*keys.shape, 2)


def from_words(words: Any) -> np.ndarray:
    """Returns the uint64 keys of `uint32[..., 2]` words, as NumPy."""
    words = np.ascontiguousarray(np.asarray(words, dtype=np.uint32))
    return words.view(np.uint64).reshape(words.shape[:-1])


def words_of(keys: Any, key_dtype: str, what: str) -> np.ndarray | UInt32[Array, "... 2"]:
    """Returns the words of keys: NumPy integers, or a `jax.Array` of words, int64, or int32 if `key_dtype` says so."""
    keys = keys if isinstance(keys, jax.Array) else as_array(keys, what)
    shape_of(keys, key_dtype, what)
    if isinstance(keys, np.ndarray):
        return to_words(keys, what)
    if keys.dtype == jnp.uint32:
        return keys
    words = jax.lax.bitcast_convert_type(keys, jnp.uint32)
    if keys.dtype == jnp.int32:
        return jnp.stack([words, jnp.where(keys < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))], axis=-1)
    return words


def shape_of(keys: np.ndarray | jax.Array, key_dtype: str, what: str) -> tuple[int, ...]:
    """Returns the shape of keys, of which a `jax.Array` may hold words; raises if its dtype can hold no keys."""
    if keys.ndim == 0:
        raise ValueError(f"{what}: keys: got a scalar, wanted an array of at least one axis.")
    if isinstance(keys, np.ndarray):
        return keys.shape
    if keys.dtype == jnp.uint32:
        if keys.shape[-1] != 2:
            raise ValueError(
                f"{what}: keys: a jax.Array of uint32 must hold (low, high) words, got shape {list(keys.shape)}, "
                "wanted [..., 2]; pass NumPy int64, or view it as words with jaxsok.keys.to_words."
            )
        return keys.shape[:-1]
    if keys.dtype in (jnp.dtype("int64"), jnp.dtype("uint64")) or (keys.dtype == jnp.int32 and key_dtype == "int32"):
        return keys.shape
    if keys.dtype == jnp.int32:
        raise TypeError(
            f"{what}: keys: got a jax.Array int32{list(keys.shape)}, which may be an int64 that JAX narrowed in silence"
            "; pass NumPy int64, or a jax.Array of uint32[..., 2] words; a feature may have "
            'FeatureSpec(key_dtype="int32").'
        )
    raise TypeError(
        f"{what}: keys must be integers or uint32[..., 2] words, got {keys.dtype}{list(keys.shape)}; pass NumPy int64."
    )


def require_unmasked(what: str, arrays: Mapping[Any, Any]) -> None:
    """Refuses NumPy's masked arrays, by their names, whose hidden elements would be taken for the others."""
    for name, array in arrays.items():
        if isinstance(array, np.ma.MaskedArray):
            is_signed = name == "keys" and array.dtype.kind == "i"
            fill = (
                ": masked_array.filled(-1) makes masked keys padding" if is_signed else "; fill it, or leave them out"
            )
            raise TypeError(f"{what}: {name}: got a masked array, wanted a plain one{fill}.")


def as_array(keys: Any, what: str) -> np.ndarray:
    """Converts anything to NumPy; an empty list, which has no type, becomes integers."""
    require_unmasked(what, {"keys": keys})
    try:
        array = np.asarray(keys)
    except ValueError as error:
        raise ValueError(
            f"{what}: keys: got lists of different lengths, wanted an array; ragged keys are jaxsok.Bags("
            "np.concatenate(lists), lengths=[len(keys) for keys in lists])."
        ) from error
    return array.astype(np.int64) if isinstance(keys, (list, tuple)) and array.size == 0 else array


def padding_words(shape: tuple[int, ...]) -> np.ndarray:
    """Returns PADDING_KEY as words, in an array of the given shape."""
    return np.full((*shape, 2), PADDING_KEY & 0xFFFFFFFF, np.uint32)

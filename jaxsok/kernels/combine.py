"""Doors of the combine noun: rows to embeddings, and bag gradients to row gradients."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxsok.kernels import library
from jaxsok.kernels.table import result
from jaxsok.types import Inverse

Bags = tuple[Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Int32[np.ndarray, "num_features 12"]]
"""offsets, weights, features: as in a lookup's `Batch`; a combine has one feature."""


def combine(
    rows: Float32[Array, "num_unique dim"], inverse: Inverse, bags: Bags, num_bags: int, num_tiles: int
) -> Float32[Array, "num_bags dim"]:
    """The rows of each bag into its embedding. See `LaunchCombine` in ffi/kernels/combine.h."""
    library.register()
    call = jax.ffi.ffi_call("jaxsok_combine", result(rows, (num_bags, rows.shape[1]), "float32"))
    return call(rows, inverse, *bags, num_tiles=np.int32(num_tiles))


def combine_transpose(
    gradients: Sequence[Float32[Array, "..."]], inverse: Inverse, bags: Bags, num_unique: int, num_tiles: int
) -> tuple[Float32[Array, "num_unique dim"], Int32[Array, " num_unique"]]:
    """Bag gradients of each feature into row gradients. See `LaunchCombineTranspose` in ffi/kernels/combine.h.

    Returns:
      row_gradients, num_uses.
    """
    dim = gradients[0].shape[-1]
    workspace = library.register().JaxsokUpdateWorkspaceBytes(inverse.shape[0], dim)
    results = (
        result(gradients[0], (num_unique, dim), "float32"),
        result(gradients[0], (num_unique,), "int32"),
        result(gradients[0], (workspace,), "uint8"),
    )
    row_gradients, num_uses, _ = jax.ffi.ffi_call("jaxsok_combine_transpose", results)(
        inverse, *bags, *gradients, num_tiles=np.int32(num_tiles)
    )
    return row_gradients, num_uses

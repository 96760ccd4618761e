"""Doors of the combine noun: rows to embeddings, and bag gradients to row gradients."""

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxsok.kernels import library
from jaxsok.kernels.table import result
from jaxsok.types import Inverse

Bags = tuple[Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Int32[np.ndarray, "1 12"]]
"""offsets, weights, features: the one feature of a combine."""


def combine(
    rows: Float32[Array, "num_unique dim"], inverse: Inverse, bags: Bags, num_bags: int, num_tiles: int
) -> Float32[Array, "num_bags dim"]:
    """The rows of each bag into its embedding. See `LaunchCombine` in ffi/kernels/combine.h."""
    library.register()
    call = jax.ffi.ffi_call("jaxsok_combine", result(rows, (num_bags, rows.shape[1]), "float32"))
    return call(rows, inverse, *bags, num_tiles=np.int32(num_tiles))


def combine_transpose(
    bag_gradients: Float32[Array, "num_bags dim"], inverse: Inverse, bags: Bags, num_unique: int, num_tiles: int
) -> Float32[Array, "num_unique dim"]:
    """Bag gradients into row gradients. See `LaunchCombineTranspose` in ffi/kernels/combine.h."""
    dim = bag_gradients.shape[1]
    workspace = library.register().JaxsokUpdateWorkspaceBytes(inverse.shape[0], dim)
    results = (
        result(bag_gradients, (num_unique, dim), "float32"),
        result(bag_gradients, (workspace,), "uint8"),
    )
    row_gradients, _ = jax.ffi.ffi_call("jaxsok_combine_transpose", results)(
        bag_gradients, inverse, *bags, num_tiles=np.int32(num_tiles)
    )
    return row_gradients

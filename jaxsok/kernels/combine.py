"""The door of the combine noun: bag gradients to row gradients; lookups combine rows."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxsok.kernels.call import call, result, workspace
from jaxsok.kernels.lookup import bag_operands
from jaxsok.types import Inverse

Bags = tuple[Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Int32[np.ndarray, "num_features 12"]]
"""offsets, weights, features: as in a lookup's `Batch`."""


def combine_transpose(
    gradients: Sequence[Float32[Array, "..."]],
    inverse: Inverse,
    bags: Bags,
    num_unique: int,
    num_tiles: int,
    dtype: str = "float32",
) -> tuple[Float[Array, "num_unique dim"], Int32[Array, " num_unique"]]:
    """Sums bag gradients into row gradients, float32 or bfloat16; also counts uses. See `LaunchCombineTranspose`."""
    like, dim = gradients[0], gradients[0].shape[-1]
    operands = {"inverse": inverse} | bag_operands(bags) | {"gradients": gradients}
    results = {
        "row_gradients": result(like, (num_unique, dim), dtype),
        "num_uses": result(like, (num_unique,), "int32"),
        "workspace": workspace(like, "JaxsokUpdateWorkspaceBytes", inverse.shape[0], dim),
    }
    out = call("jaxsok_combine_transpose", operands, results, num_tiles=num_tiles)
    return out["row_gradients"], out["num_uses"]

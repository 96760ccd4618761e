"""Door of the plan noun: the distinct keys of a batch."""

import jax
import numpy as np
from jaxtyping import Array, Int32

from jaxsok.kernels import library
from jaxsok.kernels.lookup import Batch
from jaxsok.kernels.table import result
from jaxsok.types import Inverse, Keys, TableIds


def plan(batch: Batch, num_tiles: int) -> tuple[Keys, TableIds, Inverse, Int32[Array, " num_keys"], Int32[Array, ""]]:
    """Distinct (table, key) pairs by first position. See `LaunchPlan` in ffi/kernels/plan.h.

    Returns:
      unique, unique_tables, inverse, multiplicity, num_unique.
    """
    keys = batch[0]
    n = keys.shape[0]
    workspace = library.register().JaxsokPlanWorkspaceBytes(n)
    results = (
        result(keys, (n, 2), "uint32"),
        result(keys, (n,), "uint32"),
        result(keys, (n,), "int32"),
        result(keys, (n,), "int32"),
        result(keys, (), "int32"),
        result(keys, (workspace,), "uint8"),
    )
    *out, _ = jax.ffi.ffi_call("jaxsok_plan", results)(*batch, num_tiles=np.int32(num_tiles))
    return tuple(out)

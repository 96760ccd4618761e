"""Doors of the plan noun: the distinct keys of a batch, by first position or by owner."""

import jax
import numpy as np
from jaxtyping import Array, Int32, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.lookup import Batch
from jaxsok.kernels.table import result
from jaxsok.types import REQUEST_WORDS, Inverse, Keys, TableIds


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


def plan_requests(
    batch: Batch,
    tables: UInt32[np.ndarray, "num_tables 16"],
    partition_owners: UInt32[Array, " num_partitions"] | UInt32[np.ndarray, " num_partitions"],
    *,
    num_tiles: int,
    num_shards: int,
    by_hash: bool,
) -> tuple[UInt32[Array, "num_keys 4"], Inverse, Int32[Array, " num_shards_plus_1"], UInt32[Array, "num_keys_or_0 2"]]:
    """Distinct (table, key) pairs, ordered by owner. See `LaunchPlanRequests` in ffi/kernels/plan.h.

    Returns:
      requests, inverse, starts, hashes (none unless `by_hash`).
    """
    keys = batch[0]
    n = keys.shape[0]
    workspace = library.register().JaxsokPlanRequestsWorkspaceBytes(n)
    results = (
        result(keys, (n, REQUEST_WORDS), "uint32"),
        result(keys, (n,), "int32"),
        result(keys, (num_shards + 1,), "int32"),
        result(keys, (n if by_hash else 0, 2), "uint32"),
        result(keys, (workspace,), "uint8"),
    )
    *out, _ = jax.ffi.ffi_call("jaxsok_plan_requests", results)(
        *batch,
        tables,
        partition_owners,
        num_tiles=np.int32(num_tiles),
        num_shards=np.int32(num_shards),
        by_hash=np.int32(by_hash),
    )
    return tuple(out)

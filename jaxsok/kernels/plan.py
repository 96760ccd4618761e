"""Doors of the plan noun: the distinct keys of a batch, or the uses of its bags, by owner."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxsok.kernels.call import call, result, workspace
from jaxsok.kernels.lookup import Batch, batch_operands
from jaxsok.types import REQUEST_WORDS, Digest, Inverse, PartitionOwners

LEFT_OUT = 1 << 31
"""A bit in the table of a use: the divisor of its bag is zero (`kLeftOut` in ffi/kernels/plan.h)."""

ZERO_DIVISOR = 1 << 31
"""The bits of the scale of a bag whose divisor is zero, -0, which no other bag has."""


class OrderedRequests(NamedTuple):
    """The distinct (table, key) pairs of a batch, by owner."""

    requests: UInt32[Array, "num_keys 4"]
    inverse: Inverse
    starts: Int32[Array, " num_shards_plus_1"]
    hashes: UInt32[Array, "num_keys_or_0 2"]
    """By place, if the order is by hash."""
    slots: Inverse
    """Line of each key among those that are sent, if there is a send capacity."""
    digest: Digest
    """Digest of all keys of the batch."""


def plan_requests(
    batch: Batch,
    tables: UInt32[np.ndarray, "num_tables 16"],
    partition_owners: PartitionOwners | UInt32[np.ndarray, " num_partitions"],
    *,
    num_tiles: int,
    num_shards: int,
    by_hash: bool = False,
    send_capacity: int = 0,
) -> OrderedRequests:
    """Makes pairs distinct, by owner. See `LaunchPlanRequests` in ffi/kernels/plan.h."""
    keys, n = batch[0], batch[0].shape[0]
    operands = batch_operands(batch) | {"tables": tables, "partition_owners": partition_owners}
    results = {
        "requests": result(keys, (n, REQUEST_WORDS), "uint32"),
        "inverse": result(keys, (n,), "int32"),
        "starts": result(keys, (num_shards + 1,), "int32"),
        "hashes": result(keys, (n if by_hash else 0, 2), "uint32"),
        "slots": result(keys, (n if send_capacity else 0,), "int32"),
        "digest": result(keys, (1, 2), "uint32"),
        "workspace": workspace(keys, "JaxsokPlanRequestsWorkspaceBytes", n),
    }
    attributes = {"num_tiles": num_tiles, "num_shards": num_shards, "by_hash": by_hash, "send_capacity": send_capacity}
    *out, _ = call("jaxsok_plan_requests", operands, results, **attributes).values()
    return OrderedRequests(*out)


def plan_uses(
    batch: Batch,
    tables: UInt32[np.ndarray, "num_tables 16"],
    partition_owners: PartitionOwners | UInt32[np.ndarray, " num_partitions"],
    *,
    num_tiles: int,
    num_shards: int,
    num_bags: int,
    num_words: int,
) -> tuple[
    UInt32[Array, "num_keys num_words"],
    Int32[Array, " num_shards_plus_1"],
    Int32[Array, "num_shards num_bags_plus_1"],
    Float32[Array, " num_bags"],
]:
    """Orders the uses of bags by owner: uses (lines of `plan.Uses`), starts, offsets, scales. See `LaunchPlanUses`.

    Uses have `num_words` words: 2 for keys alone, or `REQUEST_WORDS`.
    """
    keys = batch[0]
    operands = batch_operands(batch) | {"tables": tables, "partition_owners": partition_owners}
    results = {
        "uses": result(keys, (keys.shape[0], num_words), "uint32"),
        "starts": result(keys, (num_shards + 1,), "int32"),
        "offsets": result(keys, (num_shards, num_bags + 1), "int32"),
        "scales": result(keys, (num_bags,), "float32"),
        "workspace": workspace(keys, "JaxsokPlanUsesWorkspaceBytes", keys.shape[0]),
    }
    *out, _ = call("jaxsok_plan_uses", operands, results, num_tiles=num_tiles, num_shards=num_shards).values()
    return tuple(out)

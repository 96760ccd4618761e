"""Doors of the tier noun: bring, give_back, flush. Rows lie in host memory, some also in a cache on the device."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8, UInt32

from jaxsok.kernels.call import RecordSlab, call, result, workspace
from jaxsok.kernels.table import Tables
from jaxsok.types import RECORD_WORDS, RowIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@no_type_check  # trees of shapes and types have this form, too
class Tier:
    """Where the rows of a store in host memory are, and the cache: `TierView` in ffi/kernels/tier.h."""

    places: tuple[UInt32[Array, "_ 1"], ...]
    """By row, in slabs: its slot in the cache, IN_HOST or FRESH."""
    rows: Float[Array, "num_lines dim"]
    """The rows in the cache, by slot; one line at least."""
    states: tuple[Float32[Array, "num_lines _"], ...]
    """Their optimizer state, in the order of the optimizer's `state_specs`."""
    owners: UInt32[Array, "num_lines 4"]
    """Key low, key high, table and row id of the row in each slot; all ones where it is free."""
    last_use: UInt32[Array, " num_lines"]
    """The clock of the last call that used the slot."""
    counters: UInt32[Array, " num_counters"]
    """`jaxsok.types.TIER_COUNTERS`."""
    order: UInt32[Array, " num_words"]
    """Zeros, in place of a store's counters: a call that reads the cache takes and returns them, so that a later one
    which changes the cache comes after it, and XLA makes no copy."""


class Brought(NamedTuple):
    """Rows that a call may read and write, by slot: slots below `num_lines` are the cache's, the others are staged."""

    slots: RowIds
    """Of each row asked for; NO_ROW where there is none."""
    staged_rows: Float[Array, "num_staged dim"]
    """Without lines where everything fits the cache."""
    staged_states: tuple[Float32[Array, "num_staged _"], ...]
    staged_owners: UInt32[Array, "num_staged 4"]


HostSlab = UInt8[Array, "_ host_bytes"]
"""What each row owns in one piece: its numbers, then its optimizer state from a multiple of 4 bytes on."""


def host_bytes(row_bytes: int, state_widths: Sequence[int]) -> int:
    """Returns the bytes of a row's record in host memory (`HostRecordBytes`).

    Example:
      >>> host_bytes(4 * 128, [1]), host_bytes(2 * 3, [3])
      (528, 32)
    """
    return -(-(-(-row_bytes // 4) * 4 + 4 * sum(state_widths)) // 16) * 16


def num_staged(num_keys: int, num_slots: int, *, keeps: bool) -> int:
    """Returns the slots beyond the cache that a call with so many rows may need."""
    return max(0, num_keys - num_slots) if keeps else num_keys


def bring(
    tier: Tier,
    host: Sequence[HostSlab],
    records: Sequence[RecordSlab],
    tables: Tables,
    seed: UInt32[Array, "2"],
    row_ids: RowIds,
    initial_values: Sequence[float],
    num_slots: int,
    *,
    keeps: bool,
) -> tuple[Tier, tuple[HostSlab, ...], Brought]:
    """Gives every row of a call a slot that holds its numbers. See `LaunchBring` in ffi/kernels/tier.h.

    Tier and host slabs are donated. `initial_values` are those of optimizer state, for fresh rows. Without `keeps`
    nothing changes, nor is donated: what the cache does not have is staged, once for each position (`LaunchPeek`).
    """
    num_keys = row_ids.shape[0]
    room = num_staged(num_keys, num_slots, keeps=keeps)
    size = {"workspace": workspace(row_ids, "JaxsokBringWorkspaceBytes", num_keys, num_slots)} if keeps else {}
    out = call(
        "jaxsok_tier_bring" if keeps else "jaxsok_tier_peek",
        {
            "host": tuple(host),
            "tier": tier,
            "records": tuple(records),
            "tables": tables,
            "seed": seed,
            "row_ids": row_ids,
        },
        {
            "slots": result(row_ids, (num_keys,), "uint32"),
            "staged_rows": result(row_ids, (room, tier.rows.shape[1]), tier.rows.dtype),
            "staged_states": tuple(result(row_ids, (room, state.shape[1]), "float32") for state in tier.states),
            "staged_owners": result(row_ids, (room, RECORD_WORDS), "uint32"),
        }
        | size,
        in_place=("host", "tier") if keeps else (),
        num_slabs=len(host),
        num_states=len(tier.states),
        num_slots=num_slots,
        initial=np.asarray(initial_values, np.float32),
    )
    brought = Brought(out["slots"], out["staged_rows"], out["staged_states"], out["staged_owners"])
    return (out["tier"], out["host"], brought) if keeps else (tier, tuple(host), brought)


def give_back(
    tier: Tier,
    host: Sequence[HostSlab],
    staged_rows: Float[Array, "num_staged dim"],
    staged_states: Sequence[Float32[Array, "num_staged _"]],
    staged_owners: UInt32[Array, "num_staged 4"],
) -> tuple[Tier, tuple[HostSlab, ...]]:
    """Writes staged rows to host memory; tier and host slabs are donated. See `LaunchReturn`."""
    out = call(
        "jaxsok_tier_return",
        {
            "host": tuple(host),
            "tier": tier,
            "staged_rows": staged_rows,
            "staged_states": tuple(staged_states),
            "staged_owners": staged_owners,
        },
        {},
        in_place=("host", "tier"),
        num_slabs=len(host),
        num_states=len(tier.states),
    )
    return out["tier"], out["host"]


def flush(tier: Tier, host: Sequence[HostSlab]) -> tuple[Tier, tuple[HostSlab, ...]]:
    """Writes the rows of the cache to host memory too; tier and host slabs are donated. See `LaunchFlush`."""
    out = call(
        "jaxsok_tier_flush",
        {"host": tuple(host), "tier": tier},
        {},
        in_place=("host", "tier"),
        num_slabs=len(host),
        num_states=len(tier.states),
    )
    return out["tier"], out["host"]

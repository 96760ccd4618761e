"""Doors of the tier noun: bring, bring_ahead, wait, give_back. Rows lie in host memory, some also in a cache."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8, UInt32

from jaxsok.kernels.call import RecordSlab, call, result, workspace
from jaxsok.kernels.table import Tables
from jaxsok.types import IN_HOST, RECORD_WORDS, TIER_COUNTERS, RowIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@no_type_check  # trees of shapes and types have this form, too
class Tier:
    """The places of the rows of a store in host memory, and the cache: `TierView` in ffi/kernels/tier.h."""

    places: tuple[UInt32[Array, "_ 1"], ...]
    """The place of each row, in slabs: its slot in the cache, FRESH, or in host memory with the time of its last use;
    IN_HOST where that is not known."""
    homes: tuple[UInt32[Array, "_ 2"], ...]
    """Which record of host memory is whose, in slabs: the number of a row's record less its row id, modulo 2**32; and
    the row id of a record's row less the number of the record, modulo 2**31, with a hint above: it has content."""
    rows: Float[Array, "num_lines dim"]
    """The rows in the cache, by slot; at least one slot."""
    states: tuple[Float32[Array, "num_lines _"], ...]
    """Their optimizer state, in the order of the optimizer's `state_specs`."""
    owners: UInt32[Array, "num_lines 4"]
    """Key low, key high, table and row id of the row in each slot; all ones where it is free."""
    last_use: UInt32[Array, " num_lines"]
    """When the last use of the slot's row began; 0: the slot is free."""
    priority: UInt32[Array, " num_lines"]
    """The mean of the times of all its uses: the oldest leaves. tier.h has the flags."""
    foreseen: UInt32[Array, "num_foreseen 4"]
    """Rows that the next call will place if nothing changes until then: row id, slot, priority, 1 for a fresh row."""
    counters: UInt32[Array, " num_tier_counters"]
    """`jaxsok.types.TIER_COUNTERS`."""
    order: UInt32[Array, " num_words"]
    """Zeros, in place of a store's counters: a call that reads the cache takes and returns them, so that a later one
    which changes the cache comes after it, and XLA makes no copy."""


_TIER_ARRAYS = tuple(field.name for field in dataclasses.fields(Tier))
_PLACING_ARRAYS = ("places", "homes", "owners", "last_use", "priority", "foreseen", "counters", "order")

_STAMP_WORDS = 4  # `SlotsStamp` in ffi/kernels/tier.h
_MOVE_WORDS = 4  # `Move`
MOVE_BYTES = 4 * _MOVE_WORDS  # of a row that leaves or comes, in a list
_MOVE_COUNTS = 4  # `MoveCount`

MOST_FORESEEN = 1 << 16
"""Rows of a store that are foreseen for a call, at most: `kMostAhead` in ffi/kernels/tier.h."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@no_type_check
class SlotList:
    """The slots of a call's rows, as `SlotList` in tier.h: a later call with the same row ids need not find them.

    A list is only a hint: the later call checks each slot, and finds all rows again if one is no longer that of its
    row.
    """

    slots: RowIds
    stamp: UInt32[Array, "4"]
    """`SlotsStamp`: all zeros where the list says nothing."""


class Brought(NamedTuple):
    """Rows that a call may read and write, by slot: slots below `num_lines` are the cache's, the others are staged."""

    slots: RowIds
    """The slot of each row asked for; NO_ROW where there is none."""
    known: SlotList | None
    """The same for a later call; None where nothing was kept."""
    staged_rows: Float[Array, "num_staged dim"]
    """Staged rows; none if everything fits the cache."""
    staged_states: tuple[Float32[Array, "num_staged _"], ...]
    staged_owners: UInt32[Array, "num_staged 4"]


HostSlab = UInt8[Array, "_ host_bytes"]
"""Records, one for each row: its numbers, then its optimizer state from a multiple of 4 bytes on."""


def host_bytes(row_bytes: int, state_widths: Sequence[int]) -> int:
    """Returns the bytes of a row's record in host memory (`HostRecordBytes`).

    Example:
      >>> host_bytes(4 * 128, [1]), host_bytes(2 * 3, [3])
      (528, 32)
    """
    return -(-(-(-row_bytes // 4) * 4 + 4 * sum(state_widths)) // 16) * 16


def num_staged(num_keys: int, num_slots: int, *, keeps: bool) -> int:
    """Returns the slots beyond the cache that a call with `num_keys` rows may need."""
    return max(0, num_keys - num_slots) if keeps else num_keys


def bring(
    tier: Tier,
    host: Sequence[HostSlab],
    records: Sequence[RecordSlab],
    counters: UInt32[Array, " num_counters"],
    tables: Tables,
    seed: UInt32[Array, "2"],
    row_ids: RowIds,
    initial_values: Sequence[float],
    num_slots: int,
    *,
    keeps: bool,
    known: SlotList | None = None,
) -> tuple[Tier, tuple[HostSlab, ...], UInt32[Array, " num_counters"], Brought]:
    """Gives every row of a call a slot that holds its numbers. See `LaunchBring` in ffi/kernels/tier.h.

    Tier, host slabs and the store's counters are donated; the counters do not change, but an op that takes them, as one
    that changes records, comes after this one. `initial_values` are those of optimizer state, for fresh rows. Without
    `keeps` nothing changes, nor is donated: what the cache does not have is staged, once for each position
    (`LaunchPeek`). `known` is what an earlier call with the same row ids returned: it saves time, and changes nothing
    else.
    """
    num_keys = row_ids.shape[0]
    room = num_staged(num_keys, num_slots, keeps=keeps)
    states = tuple(result(row_ids, (room, state.shape[1]), "float32") for state in tier.states)
    staged = {"staged_rows": result(row_ids, (room, tier.rows.shape[1]), tier.rows.dtype), "staged_states": states}
    owners = {"staged_owners": result(row_ids, (room, RECORD_WORDS), "uint32")}
    sizes = {"num_slabs": len(host), "num_states": len(tier.states)}
    fresh = {"tables": tables, "seed": seed}
    initial = np.asarray(initial_values, np.float32)
    if not keeps:
        read = {
            "places": tier.places,
            "homes": tier.homes,
            "rows": tier.rows,
            "states": tier.states,
            "host": tuple(host),
        }
        out = call(
            "jaxsok_tier_peek",
            read | {"records": tuple(records), "row_ids": row_ids} | fresh,
            {"slots": result(row_ids, (num_keys,), "uint32")} | owners | staged,
            num_slots=num_slots,
            initial=initial,
            **sizes,
        )
        return tier, tuple(host), counters, _make_brought(out, None)
    known = known or SlotList(row_ids, jnp.zeros(_STAMP_WORDS, jnp.uint32))  # it says nothing
    of_rows = {"row_ids": row_ids, "known_slots": known.slots, "known_stamp": known.stamp}
    placed = _call_placing("jaxsok_tier_bring", tier, host, records, counters, of_rows, num_slots, owners)
    host = _write_leaving(host, tier.rows, tier.states, placed["leaving"], placed["counts"])
    out = call(
        "jaxsok_tier_read",
        {
            "rows": tier.rows,
            "states": tier.states,
            "host": host,
            "owners": placed["owners"],
            "staged_owners": placed["staged_owners"],
            "coming": placed["coming"],
            "counts": placed["counts"],
        }
        | fresh,
        staged,
        in_place=("rows", "states"),
        initial=initial,
        **sizes,
    )
    tier = Tier(**{name: (out if name in ("rows", "states") else placed)[name] for name in _TIER_ARRAYS})
    known = SlotList(placed["slots"], placed["stamp"])
    return tier, host, placed["store_counters"], _make_brought(placed | out, known)


def bring_ahead(
    tier: Tier,
    host: Sequence[HostSlab],
    records: Sequence[RecordSlab],
    counters: UInt32[Array, " num_counters"],
    row_ids: RowIds,
    num_slots: int,
) -> tuple[Tier, tuple[HostSlab, ...], UInt32[Array, " num_counters"], SlotList]:
    """Begins to move what `bring` of the same rows will move; no place changes. See `LaunchBringAhead`.

    Tier, host slabs and the store's counters are donated, as by `bring`. On a GPU records cross the link while other
    work runs: slabs of pinned memory that the library made get it, others nothing.
    """
    of_rows = {"row_ids": row_ids}
    listed = _call_placing("jaxsok_tier_bring_ahead", tier, host, records, counters, of_rows, num_slots, {})
    leaving = listed["leaving"], listed["counts"]
    host = _write_leaving(host, tier.rows, tier.states, *leaving, target="jaxsok_tier_write_ahead")
    # It takes the slabs that come back, so the counters do so after both have begun.
    out = call(
        "jaxsok_tier_read_ahead",
        {"counters": listed["counters"], "host": host},
        {},
        in_place=("counters",),
        num_slabs=len(host),
        num_states=len(tier.states),
    )
    changed = {name: listed[name] for name in _PLACING_ARRAYS} | {"counters": out["counters"]}
    slots = SlotList(listed["slots"], listed["stamp"])
    return dataclasses.replace(tier, **changed), host, listed["store_counters"], slots


def wait(tier: Tier, host: Sequence[HostSlab]) -> Tier:
    """Waits for rows on their way to host memory; places are donated. See `LaunchWait`."""
    sizes = {"num_slabs": len(host), "num_states": len(tier.states)}
    out = call("jaxsok_tier_wait", {"places": tier.places, "host": tuple(host)}, {}, in_place=("places",), **sizes)
    return dataclasses.replace(tier, places=out["places"])


def _call_placing(
    target: str,
    tier: Tier,
    host: Sequence[HostSlab],
    records: Sequence[RecordSlab],
    counters: UInt32[Array, " num_counters"],
    of_rows: Mapping[str, Any],
    num_slots: int,
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """Calls a target that lists moves; also returns the arrays of the tier that it changes, and the counters."""
    changed = {name: getattr(tier, name) for name in _PLACING_ARRAYS}
    row_ids = of_rows["row_ids"]
    num_keys = row_ids.shape[0]
    moves = result(row_ids, (num_keys, _MOVE_WORDS), "uint32")
    return call(
        target,
        changed | {"records": tuple(records), "host": tuple(host), "store_counters": counters, **of_rows},
        {
            "slots": result(row_ids, (num_keys,), "uint32"),
            "stamp": result(row_ids, (_STAMP_WORDS,), "uint32"),
            **results,
            "leaving": moves,
            "coming": moves,
            "counts": result(row_ids, (_MOVE_COUNTS,), "uint32"),
            "workspace": workspace(row_ids, "JaxsokBringWorkspaceBytes", num_keys),
        },
        in_place=(*changed, "store_counters"),
        num_slots=num_slots,
        num_slabs=len(host),
        num_states=len(tier.states),
    )


def _make_brought(out: Mapping[str, Any], known: SlotList | None) -> Brought:
    return Brought(out["slots"], known, out["staged_rows"], out["staged_states"], out["staged_owners"])


def _write_leaving(
    host: Sequence[HostSlab],
    rows: Float[Array, "_ dim"],
    states: Sequence[Float32[Array, "_ _"]],
    leaving: UInt32[Array, "num_moves 4"],
    counts: UInt32[Array, "4"],
    target: str = "jaxsok_tier_write",
) -> tuple[HostSlab, ...]:
    """Writes the rows that leave to donated host slabs, with a call for each. See `LaunchWrite`.

    XLA takes any result of a call for the buffer in host memory that the call changes, so it can be the only one.
    """
    begins = np.cumsum([0, *(slab.shape[0] for slab in host)])
    return tuple(
        call(
            target,
            {"rows": rows, "states": tuple(states), "leaving": leaving, "counts": counts, "host": slab},
            {},
            in_place=("host",),
            num_slabs=1,
            num_states=len(states),
            begin=int(begin),
        )["host"]
        for slab, begin in zip(host, begins, strict=False)
    )


def give_back(
    tier: Tier,
    host: Sequence[HostSlab],
    staged_rows: Float[Array, "num_staged dim"],
    staged_states: Sequence[Float32[Array, "num_staged _"]],
    staged_owners: UInt32[Array, "num_staged 4"],
) -> tuple[Tier, tuple[HostSlab, ...]]:
    """Writes staged rows to host memory; tier and host slabs are donated."""
    if staged_owners.shape[0] == 0:
        return tier, tuple(host)
    row_ids, places, begin = staged_owners[:, 3], [], 0
    records = row_ids
    for homes, slab in zip(tier.homes, tier.places, strict=True):
        lines = row_ids - jnp.uint32(begin)  # those of other slabs are beyond this one
        records = records + homes.at[lines, 0].get(mode="fill", fill_value=0)
        places.append(slab.at[lines].set(jnp.uint32(IN_HOST), mode="drop"))
        begin += slab.shape[0]
    leaving = jnp.stack([jnp.arange(row_ids.size, dtype=jnp.uint32), row_ids, records, jnp.zeros_like(row_ids)], axis=1)
    counts = jnp.asarray([row_ids.size, 0, 0, 0], jnp.uint32)
    host = _write_leaving(host, staged_rows, staged_states, leaving, counts)
    counters = forget_foreseen(tier.counters)  # what was read ahead may be of these rows
    return dataclasses.replace(tier, places=tuple(places), counters=counters), host


def forget_foreseen(counters: UInt32[Array, " num_tier_counters"]) -> UInt32[Array, " num_tier_counters"]:
    """Makes the ticket of what was foreseen, and read and written ahead, invalid."""
    return counters.at[TIER_COUNTERS.index("ticket")].set(0)

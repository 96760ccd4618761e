"""Rows in host memory with a cache on the device: the one door to their numbers (decision 0024).

An op that reads or writes numbers of rows first brings the rows: it gets a *view*, a store whose rows and optimizer
state are those of the cache and of what is staged for this op, and *slots*, which stand for row ids in the view.
Kernels work on a view as on any store. Where rows lie on the device, the view is the store and slots are row ids.

    store, view, slots, _ = tiers.bring_rows(spec, store, seed, row_ids)
    view = ...                                   # a kernel reads or writes the rows of the slots
    store = tiers.give_back(store, view, writes=True)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8, UInt32

from jaxsok.kernels import tier as kernels
from jaxsok.kernels.tier import SlotList
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import FRESH, NO_ROW, RowIds


def bring_rows(
    spec: StoreSpec,
    store: StoreState,
    seed: UInt32[Array, "2"],
    row_ids: RowIds,
    known: SlotList | None = None,
    *,
    keeps: bool = True,
) -> tuple[StoreState, StoreState, RowIds, SlotList | None]:
    """Returns the store, a view that has the numbers of rows, and the slots of the rows in it; NO_ROW stays so.

    Rows that were not in the cache take the places of those whose mean use is the oldest; what does not fit is staged.
    With `keeps=False`, for ops that change nothing, the cache stays as it is and the store is not donated.

    Also returns the slots as a list for a later call with the same row ids, or None. `known` is such a list of an
    earlier call, which saves this one to find the rows again. The results are the same.

    Costs nothing where rows lie on the device. Else a pass over the row ids; where rows come that were not foreseen a
    pass over some of the slots (8 bytes each; 262,144, or four for each row id); and over the link a record in, and one
    out if it makes room, for each row that comes. Staged rows take device memory for the op: one for each row id beyond
    the slots, with `keeps=False` one for each.
    """
    if not store.tier:
        return store, store, row_ids, None
    (tier,) = store.tier
    tier, host, counters, new = kernels.bring(
        tier,
        store.rows,
        store.records,
        store.counters,
        spec.table_words(),
        seed,
        row_ids,
        [state.initial_value for state in spec.state_specs],
        _num_slots(spec, store),
        keeps=keeps,
        known=known,
    )
    store = dataclasses.replace(store, rows=host, counters=counters, tier=(tier,))
    has_staged = new.staged_owners.shape[0] > 0
    view = dataclasses.replace(
        store,
        rows=(tier.rows, *([new.staged_rows] if has_staged else [])),
        records=(tier.owners, *([new.staged_owners] if has_staged else [])),
        states=tuple(
            (cached, *([staged] if has_staged else []))
            for cached, staged in zip(tier.states, new.staged_states, strict=True)
        ),
        counters=tier.order,
        tier=(),
    )
    return store, view, new.slots, new.known


def bring_rows_ahead(spec: StoreSpec, store: StoreState, row_ids: RowIds) -> tuple[StoreState, SlotList | None]:
    """Begins to bring rows that a later op brings: the numbers of rows change nowhere, and no place does.

    Also returns their slots for that op, or None.

    On a GPU their records are read, and those of rows that make room are written, while other work runs; the op that
    brings the rows waits for what is read. What is done with the store in between may undo the advantage, but nothing
    else. Brings nothing where the op might stage rows: those are written to host memory after each op.

    Rows that left the cache, and were written ahead for that, may be on their way to host memory until the next call of
    this function ends. A lookup that takes one ahead out of the state therefore calls it, or `finish_moves`.
    """
    if not store.tier:
        return store, None
    (tier,) = store.tier
    num_slots = _num_slots(spec, store)
    if row_ids.shape[0] > num_slots:
        return finish_moves(store), None
    tier, host, counters, known = kernels.bring_ahead(
        tier, store.rows, store.records, store.counters, row_ids, num_slots
    )
    return dataclasses.replace(store, rows=host, counters=counters, tier=(tier,)), known


def begin_after_moves(stores: Sequence[StoreState], work: Any) -> tuple[list[StoreState], Any]:
    """Has what takes `work`, a tree of arrays, run after `bring_rows_ahead` has begun: its moves need that time.

    XLA sees no dependency between the two, and would begin the moves when it happens to.
    """
    counters, work = lax.optimization_barrier(([[tier.counters for tier in store.tier] for store in stores], work))
    after = []
    for store, of_store in zip(stores, counters, strict=True):
        pairs = zip(store.tier, of_store, strict=True)
        tier = tuple(dataclasses.replace(tier, counters=after_moves) for tier, after_moves in pairs)
        after.append(dataclasses.replace(store, tier=tier))
    return after, work


def finish_moves(store: StoreState) -> StoreState:
    """Waits, on the device, until all rows that left the cache are in host memory, where later ops may read them."""
    return dataclasses.replace(store, tier=tuple(kernels.wait(tier, store.rows) for tier in store.tier))


def _num_slots(spec: StoreSpec, store: StoreState) -> int:
    """Returns the slots of the cache; a declared share follows the capacity, but the arrays do not."""
    return store.tier[0].rows.shape[0] if store.tier and spec.num_slots else 0


def give_back(store: StoreState, view: StoreState, *, writes: bool = False) -> StoreState:
    """Returns the store after an op on its view; `writes`: numbers of rows were written."""
    if not store.tier:
        return view
    (tier,) = store.tier
    rows, *staged_rows = view.rows
    tier = dataclasses.replace(tier, rows=rows, states=tuple(slabs[0] for slabs in view.states), order=view.counters)
    host = store.rows
    if writes and staged_rows:
        states = [slabs[1] for slabs in view.states]
        tier, host = kernels.give_back(tier, host, staged_rows[0], states, view.records[1])
    return dataclasses.replace(store, rows=host, tier=(tier,))


def release_rows(store: StoreState, flags: UInt8[Array, " capacity"]) -> StoreState:
    """Forgets the numbers of rows that left, by row id: their places become fresh, and their slots free."""
    if not store.tier:
        return store
    (tier,) = store.tier
    places, begin = [], 0
    for slab in tier.places:
        gone = flags[begin : begin + slab.shape[0], None] != 0
        places.append(jnp.where(gone, jnp.uint32(FRESH), slab))
        begin += slab.shape[0]
    is_gone = flags.at[tier.owners[:, 3]].get(mode="fill", fill_value=0) != 0  # a free slot's row id is beyond all
    owners = jnp.where(is_gone[:, None], jnp.uint32(NO_ROW), tier.owners)
    last_use, priority = (jnp.where(is_gone, jnp.uint32(0), words) for words in (tier.last_use, tier.priority))
    counters = kernels.forget_foreseen(tier.counters)  # a row id may get another row
    changed = {"owners": owners, "last_use": last_use, "priority": priority, "counters": counters}
    return dataclasses.replace(store, tier=(dataclasses.replace(tier, places=tuple(places), **changed),))

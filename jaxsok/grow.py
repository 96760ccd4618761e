"""Between steps, on the host: more slabs and a larger index, before they are needed (decisions D9 and D20).

`grow` decides by bounds that cost no wait, and where these do not fit by an exact count (docs/growth.md). If the bounds
fit, the exact numbers fit too. So the decision depends on the state and the coming batches alone, and not on what has
arrived by when: a resumed run decides as one that went on, and all processes of a run decide alike. The same holds for
the keys that wait for a row (`StoreState.sightings`), which are rebuilt before they fill half of their buckets, and for
evictions, whose late form record 0030 describes. On a mesh the fullest shard decides, and all shards grow alike.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxsok import admission, coming as coming_lib, evict as evict_lib, policies, processes
from jaxsok.checks import not_none
from jaxsok.coming import Coming
from jaxsok.enlarge import agree_on_room, fits, names_of, next_capacity, prepare_growth, require_growth
from jaxsok.growth import GrowthTracker, Look, Seen, Summary, is_at_rest, read_counters, request_counters
from jaxsok.interrupts import Held
from jaxsok.specs import StoreSpec
from jaxsok.store import State, capacities_of
from jaxsok.types import ENTRIES_PER_BUCKET

LOOK_EVERY = 64  # calls between looks at counters that nothing forces: refused keys and full indexes show there
FIRST_CALLS = 32  # calls like the first one for which a store without rows gets room: its steps are not compiled yet
FIRST_SHARE = 16  # one in this many free bytes may go into that, all stores together
WAITING_RESERVES = 2  # for which waiting keys get room: so that the host need not wait for the last steps' counters
SLACK_SHARE = 16  # one in this many rows leaves in addition to the coming keys' need: evicting streams the whole store
LATE_BATCHES = 2  # after which counters are used that a late decision asked for: they have arrived by then
LATE_SHARE = 8  # one in this many rows may stay free for the positions of these batches, else keys are counted
MOST_COUNTS = 8  # counts of one store that found room before it grows for the positions: each count is a wait
CALLS_AT_ONCE = 4  # for whose positions it then grows: counters are asked for two calls before, and arrive meanwhile


def grow(
    tracker: GrowthTracker,
    held: Held[State],
    coming: Coming,
    steps: int = 1,
    clock: Any = None,
    hand_over: evict_lib.HandOver | None = None,
    *,
    is_ahead: bool = False,
    untaken: Coming | None = None,
    is_missed: bool = False,
) -> None:
    """Makes room for the keys until the next call; see `Collection.grow`. Changes `tracker`, and the state in `held`.

    No row leaves while lookups are in flight, or for keys that are only looked up ahead (`is_ahead`): the state drains
    first. `steps` is for a caller that gave no batch. `untaken`: what is coming without batches of earlier calls, whose
    rows are in the state already, or will be before the others'; None: nothing. `is_missed`: some of those are not yet.
    """
    specs, shards, state = tracker.specs, tracker.shards, held.state
    signature = capacities_of(state)
    if tracker.signature != signature:
        tracker.forget()
        tracker.signature = signature
    tracker.begin(coming, steps)
    if untaken is not None:
        tracker.most = [max(pair) for pair in zip(tracker.most, untaken.positions, strict=True)]
    late = [s for s, spec in enumerate(specs) if _decides_late(spec, tracker.most[s])]
    decided = _Decided({}, [], is_blind=False)
    if untaken is not None:
        decided = _decide_late(tracker, state, untaken, late, is_missed=is_missed)
    bounds, evicting, growth = _Bounds.of(tracker, state, coming, late), dict(decided.full), None
    rests = is_at_rest(state, shards)
    if (seen := _look(bounds, state, rests)) is not None:
        growth = _Growth.of(bounds, state, seen)
        evicting |= growth.evicting
    if decided.is_blind or (evicting and (state.ahead or is_ahead)):
        held.state = state.drain_for_grow()
    elif evicting:
        # Before anything changes: `hand_over` is the caller's, and may fail.
        evicting |= _mark_used(tracker, state, untaken or coming, decided.full)
        _evict(tracker, held, evicting, clock, hand_over)
    summary = None
    if growth is not None:
        held.change(growth.enlarge)
        for s in growth.crowded:
            tracker.sightings[s] = admission.num_waiting(specs[s], held.state.stores[s], shards), tracker.allowed[s]
        tracker.num_grown += growth.num_stores
        tracker.signature = capacities_of(held.state)
    elif not (rests or tracker.under_way) and (bounds.is_due or bounds.is_any_half_used()):
        summary = request_counters(held.state, shards)
        tracker.under_way.append((summary, list(tracker.allowed)))
    if untaken is not None and (held.state.looks_ahead or not is_ahead):
        if decided.looking and summary is None:
            summary = request_counters(held.state, shards)
        _take(tracker, untaken, decided.looking, summary)


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """Says of each store whether the coming keys have room in it, by what `tracker` knows of its rows."""

    tracker: GrowthTracker
    coming: Coming
    capacities: list[int]
    """Rows of a shard."""
    half_entries: list[int]
    """The keys that may wait in a shard before their buckets are half full; 0: none waits."""
    late: list[int]
    """The stores that decide late."""
    is_due: bool
    """True at calls that learn from counters although no bound needs them."""

    @classmethod
    def of(cls, tracker: GrowthTracker, state: State, coming: Coming, late: list[int]) -> "_Bounds":
        num_shards = tracker.specs[0].num_shards
        half_entries = [
            sum(array.shape[0] // num_shards * ENTRIES_PER_BUCKET // 2 for array in store.sightings)
            for store in state.stores
        ]
        # Often at first, so that a short run gets its warnings.
        is_due = tracker.num_calls % LOOK_EVERY == 0 or tracker.num_calls & (tracker.num_calls - 1) == 0
        capacities = [capacity // num_shards for capacity in not_none(tracker.signature)]
        return cls(tracker, coming, capacities, half_entries, late, is_due)

    def _may_change(self, s: int) -> bool:
        """Returns whether a store may grow, or evicts by a count."""
        spec = self.tracker.specs[s]
        limit, evicts = spec.max_capacity, spec.tables[0].eviction is not None
        return limit is None or self.capacities[s] < limit or (evicts and s not in self.late)

    def is_short(self, s: int) -> bool:
        bound = self.tracker.bound(s)
        # A restored store may be larger than its limit.
        room = min(self.capacities[s], self.tracker.specs[s].most_rows)
        return self._may_change(s) and (bound is None or bound + self.coming.positions[s] > room)

    def is_crowded(self, s: int) -> bool:
        """Returns whether waiting keys may fill more than half of their buckets."""
        bound, most = self.tracker.sightings_bound(s), self.half_entries[s]
        return bool(most) and (bound is None or bound + self.coming.positions[s] > most)

    def is_fresh(self, s: int) -> bool:
        """Returns whether nothing was inserted yet, so that the first batch may say how large the store begins."""
        tracker, spec = self.tracker, self.tracker.specs[s]
        enough = min(FIRST_CALLS * self.coming.positions[s], spec.most_rows)
        is_first = tracker.num_calls == 1 and tracker.known[s] == (0, tracker.allowed[s]) and bool(self.coming.features)
        return is_first and self.capacities[s] < enough and not _admits_by_chance(spec)

    def is_any_short(self) -> bool:
        return any(self.is_short(s) or self.is_crowded(s) for s in range(len(self.capacities)))

    def is_any_half_used(self) -> bool:
        """Returns whether half of what was left may be gone: then counters arrive before they are needed."""
        return any(map(self._is_half_used, range(len(self.capacities))))

    def _is_half_used(self, s: int) -> bool:
        tracker, more = self.tracker, self.coming.positions[s]
        if (known := tracker.known[s]) is None:
            return False
        if self._may_change(s) and 2 * (not_none(tracker.bound(s)) + more) > self.capacities[s] + known[0]:
            return True
        most = self.half_entries[s]
        return bool(most) and 2 * (not_none(tracker.sightings_bound(s)) + more) > most + tracker.sightings[s][0]


def _look(bounds: _Bounds, state: State, rests: bool) -> Seen | None:
    """Learns from counters that are there, and waits for others where bounds need it.

    Returns the present ones if a store must change, else None.
    """
    tracker, stores = bounds.tracker, range(len(bounds.capacities))
    is_unplaced = False
    if rests:
        # No wait. It saves waits later, and does not change what is decided.
        is_unplaced = _learn(bounds, read_counters(state, tracker.shards))
    while tracker.under_way and (bounds.is_due or bounds.is_any_short()):
        summary, allowed = tracker.under_way.popleft()
        is_unplaced |= _learn(bounds, summary(), allowed)
    if not (is_unplaced or bounds.is_any_short() or any(map(bounds.is_fresh, stores))):
        return None
    seen = read_counters(state, tracker.shards)
    tracker.num_waits += 1
    _learn(bounds, seen)
    return seen


def _learn(bounds: _Bounds, seen: Seen, allowed: Sequence[int] | None = None) -> bool:
    """Notes what was seen, and warns; returns whether keys found no entry in the index."""
    bounds.tracker.learn(seen, allowed)
    _warn_of_refusals(bounds.tracker, bounds.capacities, seen)
    return any(seen.num_unplaced)


@dataclasses.dataclass(frozen=True)
class _Growth:
    """The growth of one call, and the stores that must lose rows for it."""

    enlarge: Callable[[State], State]
    num_stores: int
    """Stores that get slabs."""
    crowded: list[int]
    """Stores whose waiting keys get more buckets."""
    evicting: dict[int, "_Need"]

    @classmethod
    def of(cls, bounds: _Bounds, state: State, seen: Seen) -> "_Growth":
        """Prepares it; whatever can fail fails here, before anything has changed."""
        tracker, coming, specs = bounds.tracker, bounds.coming, bounds.tracker.specs
        stores = range(len(specs))
        fresh = [s for s in stores if bounds.is_fresh(s)]
        needs = _count(tracker, state, coming, [s for s in stores if bounds.is_short(s) or s in fresh])
        first = {s: FIRST_CALLS * (needs[s].num_new - coming.uncounted[s]) for s in fresh}
        wanted = _rows_to_grow_to(tracker, bounds.capacities, coming.positions, needs, first)
        room = agree_on_room([specs[s] for s in wanted], tracker.shards)
        larger = {s: next_capacity(specs[s], bounds.capacities[s], rows, *room) for s, rows in wanted.items()}
        require_growth("grow", specs, state, larger, room)
        crowded = [s for s in stores if bounds.is_crowded(s)]
        waiting = {s: WAITING_RESERVES * coming.positions[s] for s in crowded}
        is_resalted = [num > 0 for num in seen.num_unplaced]
        enlarge = prepare_growth(specs, state, larger, is_resalted, waiting, tracker.shards)
        counted = (s for s in needs if specs[s].tables[0].eviction is not None and s not in bounds.late)
        return cls(enlarge, len(larger), crowded, {s: needs[s] for s in counted if needs[s].is_beyond(specs[s])})


def _take(tracker: GrowthTracker, coming: Coming, looking: Sequence[int], summary: Summary | None) -> None:
    """Notes that there is room for a batch; `summary` tells the rows before it to the stores in `looking`."""
    for s in looking:
        tracker.looks[s].append(Look(tracker.num_taken + LATE_BATCHES, not_none(summary), tracker.taken[s]))
    tracker.num_taken += 1
    tracker.taken = [taken + more for taken, more in zip(tracker.taken, coming.positions, strict=True)]


def _mark_used(tracker: GrowthTracker, state: State, coming: Coming, full: dict[int, "_Need"]) -> dict[int, "_Need"]:
    """Marks the rows that a batch asks for, in stores that must lose rows by a late decision; does not wait."""
    marked = {}
    for s, need in full.items():
        used = _count_on_device(tracker, state, coming, s)
        marked[s] = need if used is None else dataclasses.replace(need, is_used=used[1])
        # A bound, since the rows in use are not known: more than will stay.
        tracker.known[s] = not_none(tracker.specs[s].max_capacity), tracker.allowed[s]
    return marked


def _decides_late(spec: StoreSpec, num_positions: int) -> bool:
    """Returns whether a store evicts by earlier counters, given its largest batch: whatever its capacity is now."""
    policy, limit = spec.tables[0].eviction, spec.max_capacity or 0
    return policy is not None and policy.has_score and 0 < LATE_SHARE * _late_reserve(num_positions) <= limit


def _late_reserve(num_positions: int) -> int:
    """Returns the rows that stay free for the batches since a look, and for this one."""
    return (LATE_BATCHES + 1) * num_positions


@dataclasses.dataclass(frozen=True)
class _Need:
    """The needs, in its fullest shard, of a store whose bounds do not fit."""

    num_new: int
    num_rows: int
    """Rows in use plus new ones, of the shard that has most of both."""
    num_used: int = 0
    """Rows that a coming batch asks for, of the shard that has most of them."""
    is_used: Array | None = None
    """Marks the rows of capacity that a coming batch asks for; None: no batch was given."""

    def is_beyond(self, spec: StoreSpec) -> bool:
        return spec.max_capacity is not None and self.num_rows > spec.max_capacity


@dataclasses.dataclass(frozen=True)
class _Decided:
    """The needs of the stores that decide late, for one batch."""

    full: dict[int, "_Need"]
    """Those that must lose rows."""
    looking: list[int]
    """Those of which later decisions need the rows in use now."""
    is_blind: bool
    """True if the rows that a decision or a look needs cannot be seen: those between two batches of one step."""


def _decide_late(
    tracker: GrowthTracker, state: State, coming: Coming, late: Sequence[int], *, is_missed: bool
) -> _Decided:
    """Decides for the stores in `late`; changes nothing but looks. See `grow` for `is_missed`."""
    specs, full, looking = tracker.specs, {}, []
    for s in late:
        limit, reserve = not_none(specs[s].max_capacity), _late_reserve(coming.positions[s])
        bound = tracker.late_bound(s)
        if bound is None and is_missed:
            return _Decided({}, [], is_blind=True)
        if bound is None:
            tracker.num_waits += not is_at_rest(state, tracker.shards)
            tracker.set_look(s, read_counters(state, tracker.shards).num_rows[s])
            bound = not_none(tracker.late_bound(s))
        if bound + coming.positions[s] > limit:
            full[s] = _Need(reserve, limit + reserve)
        elif bound + reserve > limit:
            looking.append(s)
    return _Decided(full, looking, is_blind=bool(looking) and is_missed)


def _count(tracker: GrowthTracker, state: State, coming: Coming, short: Sequence[int]) -> dict[int, _Need]:
    """Finds what the stores in `short` need; counts on the device where batches were given (waits)."""
    found = {s: _count_on_device(tracker, state, coming, s) for s in short}
    counts = {s: count for s, count in found.items() if count is not None}
    needs = {}
    for s in short:
        needs[s] = _Need(coming.positions[s], tracker.num_in_use(s) + coming.positions[s])
        if s in counts:
            numbers, is_used = counts[s]
            num_new, num_rows, num_used = np.asarray(numbers).tolist()
            more = coming.uncounted[s]
            needs[s] = _Need(num_new + more, num_rows + more, num_used, is_used)
            if not state.stores[s].sightings:  # where a key that gets no row may get an entry
                tracker.coming[s] = min(num_new + more, coming.positions[s])
    return needs


def _count_on_device(
    tracker: GrowthTracker, state: State, coming: Coming, s: int
) -> tuple[Int32[Array, "3"], Bool[Array, " _"]] | None:
    """Counts the coming keys of a store and marks the rows that they have, without a wait; None: no batch was given."""
    parts = [features.stores[s] for features in coming.features if features.stores[s].layouts]
    if not parts:
        return None
    return coming_lib.count(tracker.specs[s], state.stores[s], parts, state.partition_owners, tracker.shards)


def _rows_to_grow_to(
    tracker: GrowthTracker,
    capacities: Sequence[int],
    positions: Sequence[int],
    needs: dict[int, _Need],
    first: dict[int, int],
) -> dict[int, int]:
    """Returns the rows that a shard needs, for each store that grows.

    A store whose keys were counted again and again, and had room each time, grows for their positions if there is
    memory: counting is a wait at every step. A fresh store doubles until it has the rows of `first`, within a share of
    the memory.
    """
    wanted, tired, specs = {}, {}, tracker.specs
    for s, need in needs.items():
        spec = specs[s]
        if spec.max_capacity is not None and capacities[s] >= spec.max_capacity:
            continue
        tracker.num_counts[s] = 0 if need.num_rows > capacities[s] else tracker.num_counts[s] + 1
        if tracker.num_counts[s] == 0:
            wanted[s] = need.num_rows
        elif tracker.num_counts[s] % MOST_COUNTS == 0:
            tired[s] = tracker.num_in_use(s) + CALLS_AT_ONCE * positions[s]
    room = agree_on_room([specs[s] for s in (*tired, *first)], tracker.shards)
    for s, enough in first.items():
        rows, limit = capacities[s], specs[s].most_rows
        shares = FIRST_SHARE * len(specs)
        while rows < min(limit, enough) and fits([(specs[s], shares * (2 * rows - capacities[s]))], *room):
            rows *= 2
        if rows > capacities[s]:
            wanted[s] = max(wanted.get(s, 0), min(rows, limit))
    for s, rows in tired.items():
        more = min(rows, specs[s].most_rows) - capacities[s]
        if fits([(specs[s], 2 * more)], *room):  # in half of the memory
            wanted[s] = rows
            tracker.num_counts[s] = 0
    return wanted


def num_rows_to_keep(capacity: int, num_new: int, *, is_exact: bool = False) -> int:
    """Returns how many rows of a full shard stay, so that new ones fit with a slack; a quarter if these are a bound."""
    slack = -(-capacity // SLACK_SHARE)
    return max(0 if is_exact else capacity // 4, capacity - num_new - slack)


def _evict(
    tracker: GrowthTracker, held: Held[State], full: dict[int, _Need], clock: Any, hand_over: evict_lib.HandOver | None
) -> None:
    """Takes rows out of full stores by their policy. The state is unchanged if `hand_over` raises."""
    specs, shards, state = tracker.specs, tracker.shards, held.state
    leaving = {
        s: evict_lib.Leaving(specs[s], not_none(specs[s].tables[0].eviction), None, shards, is_shared=False)
        for s in full
    }
    kept, used = {}, {}
    for s, need in full.items():
        is_exact = need.is_used is not None and not _admits_by_chance(specs[s])
        kept[s] = num_rows_to_keep(specs[s].max_capacity, need.num_new, is_exact=is_exact)
        if need.is_used is not None:
            used[s] = need.is_used
    left = {s: min(tracker.num_in_use(s), max(kept[s], need.num_used)) for s, need in full.items()}
    for s, need in full.items():
        # Before anything changes: a warning may be an error.
        if leaving[s].policy.has_score and left[s] + need.num_new > specs[s].max_capacity:
            _warn_of_shortage(tracker, specs[s], left[s], need)
    now = state.step if clock is None else clock
    if shards.num_processes > 1:
        processes.require_same("grow", [f"hand_over: {hand_over is not None}", f"clock: {clock}"])
    flags = evict_lib.choose("grow", leaving, state.stores, state.seed, now, kept, hand_over, used)
    del state  # it is donated now
    held.change(lambda state: dataclasses.replace(state, stores=evict_lib.release(leaving, state.stores, flags)[0]))
    tracker.num_evictions += len(full)
    if all(rule.policy.has_score for rule in leaving.values()):
        for s in full:
            tracker.known[s] = left[s], tracker.allowed[s]
            tracker.set_look(s, left[s])
        return
    # How many have expired is known only now.
    tracker.learn(read_counters(held.state, shards), tracker.allowed)
    tracker.num_waits += 1
    for s, need in full.items():
        in_use = tracker.num_in_use(s)
        if not leaving[s].policy.has_score and in_use + need.num_new > specs[s].max_capacity:
            _warn_of_shortage(tracker, specs[s], in_use, need)


def _admits_by_chance(spec: StoreSpec) -> bool:
    """Returns whether most of the keys that are counted may be kept out: by chance, or by a Bloom filter."""
    return any(
        table.admission is not None and not isinstance(table.admission, policies.AdmitByCount) for table in spec.tables
    )


def _warn_of_shortage(tracker: GrowthTracker, spec: StoreSpec, in_use: int, need: _Need) -> None:
    """Warns, once for a store, that eviction could not make room."""
    policy, of_shard = not_none(spec.tables[0].eviction), " of a shard" if spec.num_shards > 1 else ""
    new = f"{need.num_new} new keys coming" if need.is_used is not None else f"up to {need.num_new} keys coming"
    remedies = ["raise max_capacity", "take smaller batches (a smaller max_keys of the features)"]
    if need.is_used is None:
        remedies.append("pass the batch, so that only its new keys count: collection.grow(state, batch)")
    if not policy.has_score:
        remedies.append("let more rows expire, or use a policy with a score")
    tracker.warn_once(
        f"shortage {names_of(spec)}",
        f"grow: store of tables {names_of(spec)}: got {in_use} rows{of_shard} in use after eviction by {policy!r} and "
        f"{new}, wanted at most {spec.max_capacity} together (max_capacity{of_shard}); keys that find no room are "
        f"refused. Remedies: {'; '.join(remedies)}.",
        stacklevel=7,  # the caller of Collection.grow, behind its annotation
    )


def _warn_of_refusals(tracker: GrowthTracker, capacities: Sequence[int], seen: Seen) -> None:
    """Warns, once for a table, that keys were refused for want of room."""
    specs = tracker.specs
    for spec, num_refused in zip(tracker.tables, seen.num_refused, strict=True):
        name = spec.name
        if not num_refused or f"refused {name}" in tracker.warned:
            continue
        s = next(s for s, store in enumerate(specs) if spec in store.tables)
        capacity, limit = specs[s].num_shards * capacities[s], specs[s].max_capacity
        if seen.num_unplaced[s]:
            remedy = "this call rebuilds the index, in which they had found no entry"
        elif limit is None or capacities[s] < limit:
            remedy = "call state = collection.grow(state, batch) before every step, with the batch of that step"
        elif specs[s].tables[0].eviction is None:
            remedy = "raise max_capacity, or declare an eviction policy"
        else:
            remedy = "raise max_capacity, or take smaller batches (a smaller max_keys of the features)"
        tracker.warn_once(
            f"refused {name}",
            f'grow: table "{name}": got {num_refused} keys refused so far for want of room, wanted none (its store of '
            f"tables {names_of(specs[s])} has a capacity of {capacity} rows); they learned nothing. "
            f"Remedy: {remedy}.",
            stacklevel=8,  # the caller of Collection.grow, behind its annotation
        )

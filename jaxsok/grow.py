"""Between steps, on the host: more slabs and a larger index, before they are needed (decisions D9 and D20).

Growing appends a slab to every per-row array and copies no row. The old index goes before the new one is made from the
records, so the peak is the new size. Slabs are allocated and programs compiled before anything goes.

`grow` decides by bounds that cost no wait, and where these do not fit by an exact count (docs/growth.md). If the bounds
fit, the exact numbers fit too. So the decision depends on the state and the coming batches alone, and not on what has
arrived by when: a resumed run decides as one that went on, and all processes of a run decide alike. The same holds for
the keys that wait for a row (`StoreState.sightings`), which are rebuilt before they fill half of their buckets, and for
evictions, whose late form record 0030 describes. On a mesh the fullest shard decides, and all shards grow alike.
"""

import collections
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from jaxsok import admission, policies, processes, table
from jaxsok import coming as coming_lib
from jaxsok import evict as evict_lib
from jaxsok.checks import not_none
from jaxsok.coming import Coming
from jaxsok.features import Features
from jaxsok.host_limits import HostLimit, available_bytes, share_of_device
from jaxsok.host_slabs import with_host_slab
from jaxsok.shards import ONE_DEVICE, Shards
from jaxsok.specs import StoreSpec, TableSpec, sum_pinned_and_spread
from jaxsok.store import (
    State,
    StoreState,
    cache_bytes,
    capacities_of,
    first_slab,
    host_row_bytes,
    new_slab,
    num_buckets_of,
    row_bytes,
    with_slab,
)
from jaxsok.types import COUNTERS, ENTRIES_PER_BUCKET, MAX_CAPACITY

GROWTH_FACTOR = 2.0  # capacity after growing over capacity before: the number of programs compiled is logarithmic
LOOK_EVERY = 64  # calls between looks at counters that nothing forces: refused keys and full indexes show there
GENTLE_FACTOR = 1.25  # where twice does not fit into memory
FIRST_CALLS = 32  # calls like the first one for which a store without rows gets room: its steps are not compiled yet
FIRST_SHARE = 16  # one in this many free bytes may go into that, all stores together
WAITING_RESERVES = 2  # for which waiting keys get room: so that the host need not wait for the last steps' counters
COPIES = 3  # steps in a row that copy the state before a warning: one copy may have come from elsewhere
WORTH_BYTES = 64 << 20  # of the largest array of a state that is: below, copying costs less than a step
PLACES = 100  # calls that look: then it is known how the step goes
SLACK_SHARE = 16  # one in this many rows leaves in addition to the coming keys' need: evicting streams the whole store
LATE_BATCHES = 2  # after which counters are used that a late decision asked for: they have arrived by then
LATE_SHARE = 8  # one in this many rows may stay free for the positions of these batches, else keys are counted
MOST_COUNTS = 8  # counts of one store that found room before it grows for the positions: each count is a wait
CALLS_AT_ONCE = 4  # for whose positions it then grows: counters are asked for two calls before, and arrive meanwhile

_ALLOCATED, _BEGIN, _END, _UNPLACED, _SIGHTINGS = (
    COUNTERS.index(name) for name in ("num_allocated", "free_begin", "free_end", "num_unplaced", "num_sightings")
)


@dataclasses.dataclass(frozen=True)
class _Look:
    """The rows in use of one store before some batch, for late decisions."""

    usable_from: int
    """The first batch whose decision may use it: not when it arrives decides, so all runs decide alike."""
    rows: "int | _Summary"
    """Those of the fullest shard; or the counters of all stores, on their way to the host."""
    taken: int
    """Positions of all batches before."""


@dataclasses.dataclass
class GrowthTracker:
    """The host's knowledge of the rows in use, of one state that passes through `grow`; lists go by store."""

    specs: Sequence[StoreSpec]
    tables: Sequence[TableSpec]
    """Tables in the order of the collection."""
    shards: Shards
    keys_per_step: list[int]
    """Positions that one step can insert: learned from batches and traces; saved with checkpoints."""
    allowed: list[int]
    """Insertions that all steps so far could have made since the tracker began."""
    assigned_per_step: list[int]
    """Keys that one step sets the rows of: learned from traces; saved with checkpoints."""
    known: list[tuple[int, int] | None]
    """Rows last seen in the fullest shard, and `allowed` at that time."""
    sightings: list[tuple[int, int]]
    """Entries of `sightings` last seen in the fullest shard, and `allowed` at that time; counts if `known` does."""
    coming: list[int]
    """Insertions that the steps since the last call can make."""
    num_counts: list[int]
    """Counts in succession of the keys of a store that could grow, for which there was room."""
    under_way: collections.deque[tuple["_Summary", list[int]]]
    """Summaries on their way to the host, oldest first, with `allowed` when they were requested."""
    looks: list[list[_Look]]
    """For late decisions, oldest first: of those that may be used, only the last is kept."""
    taken: list[int]
    """Positions of the batches for which there is room: their rows are in the state, or in that of the next step."""
    most: list[int]
    """Positions of the largest batch so far for which there was to be room; saved with checkpoints."""
    num_taken: int = 0
    """Batches for which there is room: those of one call count as one."""
    signature: tuple[int, ...] | None = None
    """Capacities of the state last seen; others mean another state, of which nothing is known."""
    steps: int | None = None
    """Steps until the next call of `grow`, if the last call got no batch."""
    num_calls: int = 0
    num_waits: int = 0
    """Waits of the host for the device."""
    num_grown: int = 0
    """Stores that grew; after each growth the step is compiled again."""
    place: tuple[weakref.ref, int] | None = None
    """The largest array of the state last seen, and its address."""
    num_places: int = 0
    """Checks of the address."""
    num_copied: int = 0
    """Checks in succession after which the state had moved and its former array was gone."""
    num_evictions: int = 0
    """Stores that lost rows to make room."""
    following: list[tuple[weakref.ref, tuple[Features, ...]]] = dataclasses.field(default_factory=list)
    """The batches that pipelines handed out and callers hold, and those of which their steps look some up ahead."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """Subjects of warnings so far: each comes once."""

    @classmethod
    def of(cls, specs: Sequence[StoreSpec], tables: Sequence[TableSpec], shards: Shards) -> "GrowthTracker":
        """Makes a tracker that knows nothing."""
        zeros = [[0] * len(specs) for _ in range(7)]
        sightings = [(0, 0) for _ in specs]
        looks: list[list[_Look]] = [[] for _ in specs]
        known: list[tuple[int, int] | None] = [None] * len(specs)
        return cls(
            specs, tables, shards, *zeros[:3], known, sightings, *zeros[3:5], collections.deque(), looks, *zeros[5:]
        )

    def warn_once(self, about: str, message: str, stacklevel: int) -> None:
        """Warns if there was no warning about this before; `stacklevel` counts from the caller."""
        if about not in self.warned:
            self.warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)

    def num_in_use(self, store: int) -> int:
        """Returns the rows in use, just read."""
        return not_none(self.known[store])[0]

    def forget(self) -> None:
        """Forgets everything except the size of batches."""
        self.known = [None] * len(self.known)
        self.looks = [[] for _ in self.looks]
        self.under_way.clear()
        self.signature, self.num_calls = None, 0

    def record_batch(self, store: int, num_keys: int) -> None:
        """Notes how many keys one step asks of a store."""
        self.keys_per_step[store] = max(self.keys_per_step[store], num_keys)

    def record_features(self, features: Sequence[Features]) -> None:
        """Notes how many keys one step may insert that looks all of these up."""
        for s, spec in enumerate(self.specs):
            layouts = [layout for part in features for layout in part.stores[s].layouts]
            self.record_batch(s, keys_at_most(spec, [(layout.table, layout.num_keys) for layout in layouts]))

    def record_assign(self, store: int, num_keys: int) -> None:
        """Notes how many rows one call sets, in a step."""
        self.assigned_per_step[store] = max(self.assigned_per_step[store], num_keys)

    def per_step(self) -> list[int]:
        """Returns the rows that one step may insert, by store."""
        return [keys + assigned for keys, assigned in zip(self.keys_per_step, self.assigned_per_step, strict=True)]

    def extrapolate(self, steps: int) -> Coming:
        """Returns what `steps` steps may insert, if they are as those so far."""
        positions = [keys * steps for keys in self.per_step()]
        return Coming(positions, uncounted=positions, is_given=False)

    def begin(self, coming: Coming, steps: int) -> None:
        """Begins a call: the steps since the last one may have inserted what was coming then."""
        if self.num_calls:
            # A caller that passed no batch may have packed the first one, or a larger one, only after the call.
            asked = self.coming if self.steps is None else self.extrapolate(self.steps).positions
            for s, (first, later) in enumerate(zip(self.coming, asked, strict=True)):
                self.allowed[s] += max(first, later)
                self.taken[s] += max(0, later - first)
        self.num_calls += 1
        self.coming, self.steps = list(coming.positions), None if coming.is_given else steps

    def bound(self, store: int) -> int | None:
        """Returns an upper bound of the rows in use; None: not known."""
        known = self.known[store]
        return None if known is None else known[0] + self.allowed[store] - known[1]

    def sightings_bound(self, store: int) -> int | None:
        """Returns an upper bound of the entries of `sightings`; None: not known. Each key asked may take one."""
        num_seen, allowed = self.sightings[store]
        return None if self.known[store] is None else num_seen + self.allowed[store] - allowed

    def late_bound(self, store: int) -> int | None:
        """Returns an upper bound of the rows in use by the last look that may be used; None: there is none."""
        looks = self.looks[store]
        while len(looks) > 1 and looks[1].usable_from <= self.num_taken:
            del looks[0]
        if not looks or looks[0].usable_from > self.num_taken:
            return None
        return self.rows_of(store, looks[0]) + self.taken[store] - looks[0].taken

    def rows_of(self, store: int, look: _Look) -> int:
        """Returns the rows of a look; waits if its counters have not arrived."""
        return look.rows if isinstance(look.rows, int) else look.rows.seen.num_rows[store]

    def set_look(self, store: int, rows: int) -> None:
        """Notes the rows in use now; earlier looks count no more."""
        self.looks[store] = [_Look(self.num_taken, rows, self.taken[store])]

    def looks_to_save(self, store: int) -> list[tuple[int, int, int]]:
        """Returns for each look the batches until it may be used, the rows, and the positions since; may wait."""
        return [
            (max(0, look.usable_from - self.num_taken), self.rows_of(store, look), self.taken[store] - look.taken)
            for look in self.looks[store]
        ]

    def restore_looks(
        self, store: int, saved: Sequence[tuple[int, int, int]], num_rows: int, most: int, state: State
    ) -> None:
        """Restores what `looks_to_save` returned, and `most`; `state` is the one that comes next.

        Looks that do not bound `num_rows`, the rows in use of the fullest shard, are of other rows.
        """
        self.signature, self.most[store] = capacities_of(state), max(self.most[store], most)
        if any(rows + since < num_rows for _, rows, since in saved):
            return
        self.looks[store] = [
            _Look(self.num_taken + batches, rows, self.taken[store] - since) for batches, rows, since in saved
        ]

    def learn(self, seen: "_Seen", allowed: Sequence[int] | None = None) -> None:
        """Records a summary and the value of `allowed` that belongs to it; None: what it is now, nothing is newer."""
        if allowed is None:
            self.under_way.clear()
            allowed = self.allowed
        for s, num_rows in enumerate(seen.num_rows):
            self.known[s] = (num_rows, allowed[s])
            self.sightings[s] = seen.num_sightings[s], allowed[s]


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The contents of a summary: lists by store, and the refused keys by table in the order of the collection."""

    num_rows: list[int]
    """Rows in use, of the fullest shard."""
    num_unplaced: list[int]
    """Keys that found no index entry."""
    num_sightings: list[int]
    """Entries taken, of the fullest shard."""
    num_refused: list[int]

    @classmethod
    def of(cls, words: list[int], num_stores: int, num_shards: int) -> "_Seen":
        """Reads the counters of all stores, shard by shard, and the refused keys behind them."""
        seen = cls([], [], [], words[num_stores * num_shards * len(COUNTERS) :])
        for s in range(num_stores):
            begins = range(s * num_shards * len(COUNTERS), (s + 1) * num_shards * len(COUNTERS), len(COUNTERS))
            seen.num_rows.append(max((words[b + _ALLOCATED] - words[b + _END] + words[b + _BEGIN]) for b in begins))
            seen.num_unplaced.append(sum(words[b + _UNPLACED] for b in begins))
            seen.num_sightings.append(max(words[b + _SIGHTINGS] for b in begins))
        return seen


@dataclasses.dataclass(frozen=True)
class _Summary:
    """Counters on their way to the host."""

    words: Array
    num_stores: int
    num_shards: int

    @functools.cached_property
    def seen(self) -> _Seen:
        """The counters; reading them waits until they have arrived."""
        return _Seen.of(np.asarray(self.words).tolist(), self.num_stores, self.num_shards)


def keys_at_most(spec: StoreSpec, num_keys: Sequence[tuple[int, int]]) -> int:
    """Bounds the keys that one step may insert into one shard, given the table and the keys of each feature."""
    # A shard's share of hashed keys varies by its root: six of them on top are exceeded once in 10**9 times.
    if spec.num_shards == 1:
        return sum(keys for _, keys in num_keys)
    if spec.is_replicated:
        return spec.num_shards * sum(keys for _, keys in num_keys)
    pinned, spread = sum_pinned_and_spread(((spec.tables[number], keys) for number, keys in num_keys), spec.num_shards)
    return min(spec.num_shards * spread, math.ceil(spread + 6 * math.sqrt(spread))) + spec.num_shards * pinned


def keys_of_total(spec: StoreSpec, total: int) -> int:
    """Bounds the keys that one shard may insert of `total` keys of a whole batch, in any of its tables."""
    share = -(-total // spec.num_shards)
    return max(keys_at_most(spec, [(number, share)]) for number in range(len(spec.tables)))


@functools.partial(jax.jit, static_argnums=1)
def _summary(state_words: tuple[tuple[Array, ...], Array], shards: Shards) -> Array:
    """Copies counters of all stores and refused keys to an array that lives on when the state is donated."""
    counters, refused = state_words
    if shards.is_mesh:
        is_explicit = AxisType.Explicit in shards.mesh.axis_types
        gather = jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
        counters = [gather(words, shards.same) for words in counters]
    return jnp.concatenate([*counters, refused])


def _words_of(state: State) -> tuple[tuple[Array, ...], Array]:
    return tuple(store.counters for store in state.stores), state.num_refused


def _read(state: State, num_shards: int, shards: Shards) -> _Seen:
    """Reads the counters; waits for the steps under way."""
    counters, refused = _words_of(state)
    if shards.num_processes > 1:
        words = np.asarray(_summary((counters, refused), shards)).tolist()
    else:
        words = [word for array in (*counters, refused) for word in np.asarray(array).tolist()]
    return _Seen.of(words, len(counters), num_shards)


def _is_at_rest(state: State, shards: Shards) -> bool:
    """Returns whether the counters are there already; several processes could see this at different calls."""
    return shards.num_processes == 1 and all(store.counters.is_ready() for store in state.stores)


def grow(
    tracker: GrowthTracker,
    state: State,
    coming: Coming,
    steps: int = 1,
    clock: Any = None,
    hand_over: evict_lib.HandOver | None = None,
    *,
    is_ahead: bool = False,
    untaken: Coming | None = None,
    is_missed: bool = False,
) -> State:
    """Makes room for the keys until the next call; see `Collection.grow`. Changes `tracker`.

    No row leaves while lookups are in flight, or for keys that are only looked up ahead (`is_ahead`): the state drains
    first. `steps` is for a caller that gave no batch. `untaken`: what is coming without batches of earlier calls, whose
    rows are in the state already, or will be before the others'; None: nothing. `is_missed`: some of those are not yet.
    """
    specs, shards = tracker.specs, tracker.shards
    num_shards, stores = specs[0].num_shards, range(len(specs))
    signature = capacities_of(state)
    if tracker.signature != signature:
        tracker.forget()
        tracker.signature = signature
    tracker.begin(coming, steps)
    _warn_of_copies(tracker, state)
    positions = coming.positions
    capacities = [capacity // num_shards for capacity in signature]
    half_entries = [_half_entries(spec, store) for spec, store in zip(specs, state.stores, strict=True)]
    if untaken is not None:
        tracker.most = [max(pair) for pair in zip(tracker.most, untaken.positions, strict=True)]
    late = [s for s in stores if _decides_late(specs[s], tracker.most[s])]
    is_open = [
        spec.max_capacity is None
        or capacities[s] < spec.max_capacity
        or (spec.tables[0].eviction is not None and s not in late)
        for s, spec in enumerate(specs)
    ]
    decided = _Decided({}, [], is_blind=False)
    if untaken is not None:
        decided = _decide_late(tracker, state, untaken, late, is_missed=is_missed)
    evicting, enlarge, crowded, larger = dict(decided.full), None, [], {}

    def is_short(s: int) -> bool:
        bound = tracker.bound(s)
        room = min(capacities[s], specs[s].max_capacity or MAX_CAPACITY)  # a restored store may be larger
        return is_open[s] and (bound is None or bound + positions[s] > room)

    def is_crowded(s: int) -> bool:
        bound = tracker.sightings_bound(s)
        return bool(half_entries[s]) and (bound is None or bound + positions[s] > half_entries[s])

    def is_fresh(s: int) -> bool:
        """Returns whether nothing was inserted yet, so that the first batch may say how large the store begins."""
        enough = min(FIRST_CALLS * positions[s], specs[s].max_capacity or MAX_CAPACITY)
        is_first = tracker.num_calls == 1 and tracker.known[s] == (0, tracker.allowed[s]) and bool(coming.features)
        return is_first and capacities[s] < enough and not _admits_by_chance(specs[s])

    def is_any_short() -> bool:
        return any(is_short(s) or is_crowded(s) for s in stores)

    # Often at first, so that a short run gets its warnings.
    is_due = tracker.num_calls % LOOK_EVERY == 0 or tracker.num_calls & (tracker.num_calls - 1) == 0
    is_unplaced = False
    is_at_rest = _is_at_rest(state, shards)
    if is_at_rest:
        # No wait. It saves waits later, and does not change what is decided.
        seen = _read(state, num_shards, shards)
        tracker.learn(seen)
        is_unplaced = any(seen.num_unplaced)
        _warn_of_refusals(tracker, capacities, seen)
    while tracker.under_way and (is_due or is_any_short()):
        summary, allowed = tracker.under_way.popleft()
        tracker.learn(summary.seen, allowed)
        is_unplaced |= any(summary.seen.num_unplaced)
        _warn_of_refusals(tracker, capacities, summary.seen)
    if is_unplaced or is_any_short() or any(map(is_fresh, stores)):
        seen = _read(state, num_shards, shards)
        tracker.num_waits += 1
        tracker.learn(seen)
        _warn_of_refusals(tracker, capacities, seen)
        fresh = [s for s in stores if is_fresh(s)]
        short = [s for s in stores if is_short(s) or s in fresh]
        needs = _count(tracker, state, coming, short)
        first = {s: FIRST_CALLS * (needs[s].num_new - coming.uncounted[s]) for s in fresh}
        wanted = _rows_to_grow_to(tracker, capacities, positions, needs, first)
        larger = _new_capacities(tracker, state, wanted)
        crowded = [s for s in stores if is_crowded(s)]
        room = {s: WAITING_RESERVES * positions[s] for s in crowded}
        enlarge = _prepare_growth(specs, state, larger, [num > 0 for num in seen.num_unplaced], room, shards)
        counted = (s for s in needs if specs[s].tables[0].eviction is not None and s not in late)
        evicting |= {s: needs[s] for s in counted if needs[s].is_beyond(specs[s])}
    if decided.is_blind or (evicting and (state.ahead or is_ahead)):
        state = dataclasses.replace(state, drains=True)
    elif evicting:
        # Before anything changes: `hand_over` is the caller's, and may fail.
        evicting |= _mark_used(tracker, state, untaken or coming, decided.full)
        state = _evict(tracker, state, evicting, clock, hand_over)
    summary = None
    if enlarge is not None:
        state = enlarge(state)
        for s in crowded:
            tracker.sightings[s] = admission.num_waiting(specs[s], state.stores[s], shards), tracker.allowed[s]
        tracker.num_grown += len(larger)
        tracker.signature = capacities_of(state)
    elif not (is_at_rest or tracker.under_way) and (
        is_due
        or any(
            # Half of what is left may be gone: ask now, so that the answer is there before it is needed.
            (known := tracker.known[s]) is not None
            and (
                2 * (not_none(tracker.bound(s)) + positions[s]) * is_open[s] > capacity + known[0]
                or 2 * (not_none(tracker.sightings_bound(s)) + positions[s]) * bool(half_entries[s])
                > half_entries[s] + tracker.sightings[s][0]
            )
            for s, capacity in enumerate(capacities)
        )
    ):
        summary = _request(tracker, state)
        tracker.under_way.append((summary, list(tracker.allowed)))
    if untaken is not None and not (is_ahead and state.drains):
        if decided.looking and summary is None:
            summary = _request(tracker, state)
        _take(tracker, untaken, decided.looking, summary)
    return state


def _request(tracker: GrowthTracker, state: State) -> _Summary:
    """Asks for the counters of all stores as they are after the steps under way."""
    arriving = _summary(_words_of(state), tracker.shards)
    arriving.copy_to_host_async()
    return _Summary(arriving, len(tracker.specs), tracker.specs[0].num_shards)


def _take(tracker: GrowthTracker, coming: Coming, looking: Sequence[int], summary: _Summary | None) -> None:
    """Notes that there is room for a batch; `summary` tells the rows before it to the stores in `looking`."""
    for s in looking:
        tracker.looks[s].append(_Look(tracker.num_taken + LATE_BATCHES, not_none(summary), tracker.taken[s]))
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
        """Returns whether the largest capacity is too small."""
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
            tracker.num_waits += not _is_at_rest(state, tracker.shards)
            tracker.set_look(s, _read(state, specs[s].num_shards, tracker.shards).num_rows[s])
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
        rows, limit = capacities[s], min(specs[s].max_capacity or MAX_CAPACITY, MAX_CAPACITY)
        shares = FIRST_SHARE * len(specs)
        while rows < min(limit, enough) and fits([(specs[s], shares * (2 * rows - capacities[s]))], *room):
            rows *= 2
        if rows > capacities[s]:
            wanted[s] = max(wanted.get(s, 0), min(rows, limit))
    for s, rows in tired.items():
        limit = min(specs[s].max_capacity or MAX_CAPACITY, MAX_CAPACITY)
        if fits([(specs[s], 2 * (min(rows, limit) - capacities[s]))], *room):  # in half of the memory
            wanted[s] = rows
            tracker.num_counts[s] = 0
    return wanted


def num_rows_to_keep(capacity: int, num_new: int, *, is_exact: bool = False) -> int:
    """Returns how many rows of a full shard stay, so that new ones fit with a slack; a quarter if these are a bound."""
    slack = -(-capacity // SLACK_SHARE)
    return max(0 if is_exact else capacity // 4, capacity - num_new - slack)


def _evict(
    tracker: GrowthTracker, state: State, full: dict[int, _Need], clock: Any, hand_over: evict_lib.HandOver | None
) -> State:
    """Takes rows out of full stores by their policy. The state is unchanged if `hand_over` raises."""
    specs, shards = tracker.specs, tracker.shards
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
    stores, _ = evict_lib.evict(leaving, state.stores, state.seed, now, kept, hand_over, used)
    state = dataclasses.replace(state, stores=stores)
    tracker.num_evictions += len(full)
    if all(rule.policy.has_score for rule in leaving.values()):
        for s in full:
            tracker.known[s] = left[s], tracker.allowed[s]
            tracker.set_look(s, left[s])
        return state
    # How many have expired is known only now.
    tracker.learn(_read(state, specs[0].num_shards, shards), tracker.allowed)
    tracker.num_waits += 1
    for s, need in full.items():
        in_use = tracker.num_in_use(s)
        if not leaving[s].policy.has_score and in_use + need.num_new > specs[s].max_capacity:
            _warn_of_shortage(tracker, specs[s], in_use, need)
    return state


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
        f"shortage {_names(spec)}",
        f"grow: store of tables {_names(spec)}: got {in_use} rows{of_shard} in use after eviction by {policy!r} and "
        f"{new}, wanted at most {spec.max_capacity} together (max_capacity{of_shard}); keys that find no room are "
        f"refused. Remedies: {'; '.join(remedies)}.",
        stacklevel=6,  # the caller of Collection.grow, behind its annotation
    )


def _warn_of_refusals(tracker: GrowthTracker, capacities: Sequence[int], seen: _Seen) -> None:
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
            f"tables {_names(specs[s])} has a capacity of {capacity} rows); they learned nothing. "
            f"Remedy: {remedy}.",
            stacklevel=5,  # the caller of Collection.grow, behind its annotation
        )


def _warn_of_copies(tracker: GrowthTracker, state: State) -> None:
    """Warns, once, that steps copy the state, so that its address changes; waits for nothing."""
    if tracker.num_places >= PLACES or tracker.num_copied >= COPIES:
        return
    slab = max((slab for store in state.stores for slab in store.rows), key=lambda slab: slab.nbytes)
    if slab.nbytes < WORTH_BYTES or not slab.is_ready():
        tracker.place = None
        return
    last, tracker.num_places = tracker.place, tracker.num_places + 1
    tracker.place = weakref.ref(slab), slab.addressable_shards[0].data.unsafe_buffer_pointer()
    if last is None or last[0]() is slab:
        return
    # Where the old state lives on, two of them take turns, or the caller means to keep it.
    old = last[0]()
    is_kept = old is not None and not old.is_deleted()
    tracker.num_copied = tracker.num_copied + 1 if tracker.place[1] != last[1] and not is_kept else 0
    if tracker.num_copied == COPIES:
        tracker.warn_once(
            "copies",
            f"grow: state: got a new copy of it after each of the last {COPIES} steps (its largest array has "
            f"{slab.nbytes} bytes), wanted one that is changed in place; donate the state to the step: "
            "jax.jit(step, donate_argnums=0).",
            stacklevel=5,  # the caller of Collection.grow, behind its annotation
        )


def next_capacity(
    spec: StoreSpec, capacity: int, needed: int, free: int | None, host_share: HostLimit | None = None
) -> int:
    """Returns the capacity that a shard grows to: twice, or a quarter more where that would not fit, or `needed`."""
    limit = min(spec.max_capacity or MAX_CAPACITY, MAX_CAPACITY)
    wanted = min(limit, max(needed, int(capacity * GROWTH_FACTOR)))
    gentle = min(limit, max(needed, int(capacity * GENTLE_FACTOR)))
    return wanted if fits([(spec, wanted - capacity)], free, host_share) else gentle


def fits(asked: Sequence[tuple[StoreSpec, int]], free: int | None, host_share: HostLimit | None) -> bool:
    """Returns whether there is memory for stores with their rows (of a shard)."""
    limits = ((row_bytes, free), (host_row_bytes, None if host_share is None else host_share.num_bytes))
    return all(
        limit is None or sum(num_rows * bytes_of(spec) for spec, num_rows in asked) <= limit
        for bytes_of, limit in limits
    )


def _new_capacities(tracker: GrowthTracker, state: State, needed: dict[int, int]) -> dict[int, int]:
    """Returns the capacities that short stores grow to; raises, before anything has changed, if they will not fit."""
    capacities, specs = {}, tracker.specs
    room = agree_on_room([specs[s] for s in needed], tracker.shards)
    for s, rows in needed.items():
        capacity, num_slabs = state.stores[s].capacity // specs[s].num_shards, len(state.stores[s].rows)
        capacities[s] = next_capacity(specs[s], capacity, rows, *room)
        if capacities[s] <= capacity or num_slabs >= specs[s].max_slabs:
            raise MemoryError(
                f"grow: store of tables {_names(specs[s])}: got {capacity} rows in {num_slabs} slabs, wanted {rows} "
                f"rows, beyond {MAX_CAPACITY} rows or {specs[s].max_slabs} slabs; start with a larger capacity."
            )
    require_memory(rows_to_add(specs, state, capacities), "grow", *room)
    return capacities


def rows_to_add(specs: Sequence[StoreSpec], state: State, capacities: Mapping[int, int]) -> list[tuple[StoreSpec, int]]:
    """Returns the stores that grow to `capacities`, by store, with the rows that each shard gets."""
    return [(specs[s], new - state.stores[s].capacity // specs[s].num_shards) for s, new in capacities.items()]


def _prepare_growth(
    specs: Sequence[StoreSpec],
    state: State,
    capacities: dict[int, int],
    is_resalted: Sequence[bool],
    room: dict[int, int],
    shards: Shards,
) -> Callable[[State], State]:
    """Returns a function that enlarges a state, which it consumes; whatever can fail fails before it is called.

    `capacities` are rows of a shard, by store; `is_resalted` marks stores with keys that found no entry; `room` is for
    so many waiting keys, by store. The old index is freed before the new one is made.
    """
    slabs, salts, rebuild, remake = {}, {}, {}, {}
    for s, spec in enumerate(specs):
        store = state.stores[s]
        if s in capacities:
            num_rows = spec.num_shards * capacities[s] - store.capacity
            with processes.fail_together("grow", is_shared=shards.num_processes > 1):
                slab = with_host_slab(spec, shards.make(new_slab, spec, num_rows), shards)
                slabs[s] = jax.tree.map(_place_like, slab, first_slab(store))
            store = with_slab(store, slabs[s])
        if s in capacities or is_resalted[s]:
            num_buckets = num_buckets_of(store.capacity // spec.num_shards)
            # The salt is drawn and does not follow from the last one, which may be known.
            salts[s] = processes.draw_words(is_shared=shards.num_processes > 1) if is_resalted[s] else None
            rebuild[s] = _rebuild.lower(store.counters, store.records, salts[s], num_buckets, shards).compile()
        if s in room or is_resalted[s]:  # waiting keys lie where the salt says, too
            remake[s] = admission.prepare_remake(spec, store, room.get(s, 0), shards)

    def enlarge(state: State) -> State:
        stores = list(state.stores)
        for s in slabs:
            stores[s] = with_slab(stores[s], slabs[s])
        for s in rebuild:
            stores[s].index.delete()
            index, counters = rebuild[s](stores[s].counters, stores[s].records, salts[s])
            stores[s] = dataclasses.replace(stores[s], index=index, counters=counters)
        for s in remake:
            stores[s] = remake[s](stores[s])
        return dataclasses.replace(state, stores=tuple(stores)) if rebuild or remake else state

    return enlarge


def _place_like(new: Array, old: Array) -> Array:
    """Commits a new array to its device if the old one is: otherwise the step is compiled again for what it returns."""
    return jax.device_put(new, old.sharding) if old.committed and not new.committed else new


def _half_entries(spec: StoreSpec, store: StoreState) -> int:
    """Returns the keys that may wait in a shard before their buckets are half full; 0: none waits."""
    return sum(array.shape[0] // spec.num_shards * ENTRIES_PER_BUCKET // 2 for array in store.sightings)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _rebuild(
    counters: Array, records: tuple[Array, ...], salt: Array | None, num_buckets: int, shards: Shards
) -> tuple[Array, Array]:
    """Builds an index of the rows that the records name, under another salt (two words) if one is given."""

    def rebuild_shard(counters: Array, records: tuple[Array, ...], salt: Array | None) -> tuple[Array, Array]:
        if salt is not None:
            low, high = COUNTERS.index("salt_low"), COUNTERS.index("salt_high")
            counters = counters.at[low].set(salt[0]).at[high].set(salt[1])
        return table.kernels.rebuild(counters, records, num_buckets)

    return shards.run(rebuild_shard, (counters, records, salt), (shards.spec, shards.spec, P()), shards.spec)


def _names(spec: StoreSpec) -> str:
    return ", ".join(f'"{table.name}"' for table in spec.tables)


def agree_on_room(specs: Sequence[StoreSpec], shards: Shards) -> tuple[int | None, HostLimit | None]:
    """Returns the memory that stores can grow into: free bytes for a shard, and a device's share of host memory.

    They are the same in all processes. None: unknown, or there is no such store, or none that has rows there.
    """
    if not specs:
        return None, None
    free = agree_on_free_bytes(shards)
    return free, share_of_device(shards) if any(spec.memory is not None for spec in specs) else None


def agree_on_free_bytes(shards: Shards) -> int | None:
    """Returns the least free memory for a shard over the devices of all processes; None: unknown."""
    free, unknown = free_bytes(), 1 << 61
    if shards.num_processes > 1:
        free = processes.least(unknown if free is None else free)
    if free is None or free == unknown:
        return None
    # Shards on CPU devices share the memory of their host.
    return free // len(shards.local()) if jax.default_backend() == "cpu" else free


def free_bytes() -> int | None:
    """Returns the free memory on the default device; None where it does not report it."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return available_bytes()
    stats = device.memory_stats() or {}
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) if "bytes_limit" in stats else None


def require_memory(
    asked: Sequence[tuple[StoreSpec, int]],
    op: str,
    free: int | None,
    host_share: HostLimit | None = None,
    *,
    is_new: bool = False,
) -> None:
    """Raises MemoryError if stores with their rows (of a shard), with caches if `is_new`, will not fit together."""
    caches = sum(cache_bytes(spec) for spec, _ in asked) if is_new else 0
    total = caches + sum(num_rows * row_bytes(spec) for spec, num_rows in asked)
    if free is not None and total > free:
        parts = "; ".join(
            f"store of tables {_names(spec)}: {num_rows} rows of {row_bytes(spec)} bytes "
            + (
                f"(row {spec.itemsize * spec.dim}, the rest optimizer state, record and index)"
                if spec.memory is None
                else f"(record, place and index){f' and {cache_bytes(spec)} bytes of cache' if is_new else ''}"
            )
            for spec, num_rows in asked
        )
        caches_too = " device_rows," if caches else ""
        raise MemoryError(
            f"{op}: capacity: got {total} bytes ({parts}), wanted at most {free} that are free; lower{caches_too} "
            "capacity, dim or the optimizer's state."
        )
    if shortage := _describe_host_shortage(asked, host_share):
        raise MemoryError(
            f"{op}: capacity: {shortage}; lower capacity, dim or the optimizer's state, or raise the limit."
        )


def warn_of_max_capacity(specs: Sequence[StoreSpec], host_share: HostLimit | None) -> None:
    """Warns that new stores cannot grow up to the `max_capacity` that they declare, for want of host memory."""
    limited = [(spec, spec.max_capacity) for spec in specs if spec.max_capacity is not None]
    if shortage := _describe_host_shortage(limited, host_share):
        warnings.warn(
            f"init: max_capacity: {shortage}; growth will fail before max_capacity is reached. Lower max_capacity, or "
            "raise the limit.",
            RuntimeWarning,
            stacklevel=4,  # the caller of Collection.init, behind its annotation
        )


def _describe_host_shortage(asked: Sequence[tuple[StoreSpec, int]], host_share: HostLimit | None) -> str:
    """Describes what stores with their rows (of a shard) ask of host memory; empty if they fit."""
    total = sum(num_rows * host_row_bytes(spec) for spec, num_rows in asked)
    if host_share is None or total <= host_share.num_bytes:
        return ""
    parts = "; ".join(
        f"store of tables {_names(spec)}: {num_rows} rows of {host_row_bytes(spec)} bytes"
        for spec, num_rows in asked
        if spec.memory is not None
    )
    return (
        f"got {total} bytes of host memory for a device ({parts}), wanted at most {host_share.num_bytes} that are "
        f"available to it ({host_share.name})"
    )


def grow_to(
    op: str, specs: Sequence[StoreSpec], state: State, capacities: dict[int, int], shards: Shards = ONE_DEVICE
) -> State:
    """Enlarges shards of some stores at once to `capacities` rows by store; consumes the state if it succeeds."""
    if not capacities:
        return state
    for s, rows in capacities.items():
        if rows > MAX_CAPACITY or len(state.stores[s].rows) >= specs[s].max_slabs:
            raise MemoryError(
                f"{op}: store of tables {_names(specs[s])}: got {rows} rows for a shard, wanted at most {MAX_CAPACITY} "
                f"in {specs[s].max_slabs} slabs; use more shards, or start with a larger capacity."
            )
    room = agree_on_room([specs[s] for s in capacities], shards)
    require_memory(rows_to_add(specs, state, capacities), op, *room)
    return _prepare_growth(specs, state, capacities, [False] * len(specs), {}, shards)(state)


def resalt_index(specs: Sequence[StoreSpec], state: State, s: int, shards: Shards = ONE_DEVICE) -> State:
    """Rebuilds the index of one store under another salt, so that keys that found no entry find one."""
    is_resalted = [number == s for number in range(len(specs))]
    return _prepare_growth(specs, state, {}, is_resalted, {}, shards)(state)

"""Between steps, on the host: more slabs and a larger index, before they are needed (decision D9).

Growing appends a slab to every per-row array and copies no row. The old index goes before the new one is made from the
records, so the peak is the new size. Slabs are allocated and programs compiled before anything goes. Whether to grow
rests on counters that have already arrived: if the state's own are there, on them; while steps are still under way, on
a bound that follows from the last ones seen and from what the steps since could have inserted at most. The host waits
for the device only when that bound does not fit.

The same holds for the keys that wait for a row (`StoreState.sightings`), which are made anew, larger if need be, before
they fill half of their buckets.

A store that may grow no further, and whose tables have a policy of eviction, loses rows in the same manner: ahead of
need, and a slack more than the reserve asks, so that it is rare.

On a mesh the fullest shard decides, and all shards grow alike. In several processes no decision rests on what has
arrived at one of them: counters are asked for as a collective and read a fixed number of calls later, so that all
processes grow at the same call.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxsok import admission, processes, table
from jaxsok import evict as evict_lib
from jaxsok.shards import Shards
from jaxsok.specs import StoreSpec
from jaxsok.store import State, StoreState, new_slab, num_buckets_of, row_bytes
from jaxsok.types import COUNTERS, ENTRIES_PER_BUCKET, MAX_CAPACITY

GROWTH_FACTOR = 2.0  # capacity after growing over capacity before: the number of programs compiled is logarithmic
LOOK_EVERY = 64  # calls between looks at counters that nothing forces: keys without an index entry show there
GENTLE_FACTOR = 1.25  # where twice does not fit into memory
WAITING_RESERVES = 2  # for which waiting keys get room: so that the host need not wait for the last steps' counters
COPIES = 3  # steps in a row after which a state that is copied is told: one may have come from elsewhere
WORTH_BYTES = 64 << 20  # of the largest array of a state that is: below, copying costs less than a step
PLACES = 100  # calls that look: then it is known how the step goes
SLACK_SHARE = 16  # one in so many rows leaves beside what the reserve asks: evicting streams the whole store
AGREED_LAG = 2  # calls between asking for counters and reading them, where several processes must agree

_WORD = {name: i for i, name in enumerate(COUNTERS)}


@dataclasses.dataclass
class GrowthTracker:
    """What the host knows about the rows in use, of one state that passes through `grow` between its steps."""

    keys_per_step: list[int]
    """Positions that one step can insert, by store: learned from batches and traces."""
    allowed: list[int]
    """Insertions that all steps so far could have made, by store, since the tracker began."""
    assigned_per_step: list[int]
    """Keys that one step sets the rows of, by store: learned from traces."""
    known: list[tuple[int, int] | None]
    """Rows last seen, and `allowed` at that time, by store; on a mesh the rows of the fullest shard."""
    sightings: list[int]
    """Entries of `sightings` last seen, by store; of the fullest shard. Known since when the rows are."""
    under_way: collections.deque[tuple[Array, list[int], int]]
    """Summaries on their way to the host, oldest first, with `allowed` and `num_calls` when they were asked for."""
    signature: tuple[int, ...] | None = None
    """Capacities of the state last seen; another one means another state, of which nothing is known."""
    steps: int = 1
    """Steps until the next call of `grow`, as the last one was told."""
    num_calls: int = 0
    num_waits: int = 0
    """How often the host had to wait for the device."""
    num_grown: int = 0
    """How often a store grew: each time the step is compiled anew."""
    place: tuple[weakref.ref, int] | None = None
    """The largest array of the state last seen, and where it lay."""
    num_places: int = 0
    """How often that was looked at."""
    num_copied: int = 0
    """How often in a row the state was elsewhere, and what it came from gone."""
    num_evictions: int = 0
    """How often rows of a store left to make room."""
    is_told: bool = False
    """Whether it was told that eviction could not make room."""

    @classmethod
    def of(cls, num_stores: int) -> "GrowthTracker":
        """A tracker that knows nothing."""
        none = [0] * num_stores
        return cls(none.copy(), none.copy(), none.copy(), [None] * num_stores, none.copy(), collections.deque())

    def forget(self) -> None:
        """Forgets all but the size of batches."""
        self.known = [None] * len(self.known)
        self.under_way.clear()
        self.signature = None

    def saw_batch(self, store: int, num_keys: int) -> None:
        """Notes how many keys one step asks of a store."""
        self.keys_per_step[store] = max(self.keys_per_step[store], num_keys)

    def saw_assign(self, store: int, num_keys: int) -> None:
        """Notes how many rows one call sets, in a step."""
        self.assigned_per_step[store] = max(self.assigned_per_step[store], num_keys)

    def per_step(self) -> list[int]:
        """Rows that one step may insert, by store."""
        return [keys + assigned for keys, assigned in zip(self.keys_per_step, self.assigned_per_step, strict=True)]

    def bound(self, store: int) -> int | None:
        """Rows in use at most; None: not known."""
        known = self.known[store]
        return None if known is None else known[0] + self.allowed[store] - known[1]

    def sightings_bound(self, store: int) -> int | None:
        """Entries of `sightings` taken at most; None: not known. Each key asked may take one."""
        known = self.known[store]
        return None if known is None else self.sightings[store] + self.allowed[store] - known[1]

    def learn(self, summary: np.ndarray, allowed: Sequence[int]) -> None:
        """Takes in a summary `[num_stores, 3]` that was current when `allowed` was."""
        for s, (num_rows, _, num_sightings) in enumerate(summary):
            self.known[s] = (int(num_rows), allowed[s])
            self.sightings[s] = int(num_sightings)


def keys_at_most(spec: StoreSpec, num_keys: Sequence[tuple[int, int]]) -> int:
    """The keys that one step may insert into one shard of a store.

    Of keys that are spread by hash a shard gets its share give or take a root; six of them on top are passed once in
    10**9 times, unless somebody aims at a shard.

    Args:
      spec: of the store.
      num_keys: of each feature of one shard's batch, its table's number and its keys.
    """
    if spec.num_shards == 1:
        return sum(keys for _, keys in num_keys)
    if spec.is_replicated:
        return spec.num_shards * sum(keys for _, keys in num_keys)
    pinned, spread = [0] * spec.num_shards, 0
    for number, keys in num_keys:
        placement = spec.tables[number].placement
        if placement.kind == "on":
            pinned[placement.shard] += spec.num_shards * keys
        else:
            spread += keys
    return min(spec.num_shards * spread, math.ceil(spread + 6 * math.sqrt(spread))) + max(pinned)


def _signature(state: State) -> tuple[int, ...]:
    return tuple(store.capacity for store in state.stores)


def _summed_up(counters: Any, num_shards: int, xp: Any) -> Any:
    """By store: rows in use of the fullest shard, keys that found no index entry, `sightings` taken of the fullest."""
    lines = []
    for words in counters:
        words = words.reshape(num_shards, len(COUNTERS)).astype(xp.int32)
        in_use = words[:, _WORD["num_allocated"]] - words[:, _WORD["free_end"]] + words[:, _WORD["free_begin"]]
        num_sightings = words[:, _WORD["num_sightings"]].max()
        lines.append(xp.stack([in_use.max(), words[:, _WORD["num_unplaced"]].sum(), num_sightings]))
    return xp.stack(lines)


@functools.partial(jax.jit, static_argnums=1)
def _summary(counters: tuple[Array, ...], shards: Shards | None) -> Array:
    """What the host needs of the counters, as an array that lives on when the state is donated."""
    if shards is None:
        return _summed_up(counters, 1, jnp)

    def of_shard(counters: tuple[Array, ...]) -> Array:
        num_rows, num_unplaced, num_sightings = _summed_up(counters, 1, jnp).T
        most_rows, most_sightings = (lax.pmax(words, shards.axis) for words in (num_rows, num_sightings))
        return jnp.stack([most_rows, lax.psum(num_unplaced, shards.axis), most_sightings], axis=1)

    return shards.run(of_shard, (counters,), (shards.spec,), P())


def _read(state: State, num_shards: int, shards: Shards | None, is_agreed: bool) -> np.ndarray:
    counters = tuple(store.counters for store in state.stores)
    if is_agreed:
        return np.asarray(_summary(counters, shards))
    return _summed_up([np.asarray(words) for words in counters], num_shards, np)


def grow(
    specs: Sequence[StoreSpec],
    tracker: GrowthTracker,
    state: State,
    steps: int,
    shards: Shards | None = None,
    clock: Any = None,
    hand_over: evict_lib.HandOver | None = None,
) -> State:
    """Makes room for what the next `steps` steps may insert.

    Args:
      specs: of the stores.
      tracker: of the state; changed.
      state: consumed, if it grows or loses rows.
      steps: until the next call.
      shards: over which the stores are split; None: one device.
      clock: of eviction; None: the state's step.
      hand_over: is given the rows that are evicted, before anything changes.

    Returns:
      The same state, or one with more slabs or fewer rows; the old one must not be used then.
    """
    num_shards = specs[0].num_shards
    is_agreed = shards is not None and shards.num_processes > 1
    if tracker.signature != _signature(state):
        tracker.forget()
        tracker.signature = _signature(state)
    if tracker.num_calls:
        # Counted only now: the first batch may be seen after the first call.
        for s, keys in enumerate(tracker.per_step()):
            tracker.allowed[s] += keys * tracker.steps
    tracker.num_calls += 1
    tracker.steps = steps
    _warn_of_copies(tracker, state)
    reserve = [keys * steps for keys in tracker.per_step()]
    capacities = [store.capacity // num_shards for store in state.stores]
    open_ended = [
        spec.max_capacity is None or capacity < spec.max_capacity
        for spec, capacity in zip(specs, capacities, strict=True)
    ]

    half_entries = [_half_entries(spec, store) for spec, store in zip(specs, state.stores, strict=True)]
    evicting = [spec.max_capacity is not None and spec.tables[0].eviction is not None for spec in specs]

    def short(s: int) -> bool:
        bound = tracker.bound(s)
        return (open_ended[s] or evicting[s]) and (bound is None or bound + reserve[s] > capacities[s])

    def short_of_sightings(s: int) -> bool:
        bound = tracker.sightings_bound(s)
        return bool(half_entries[s]) and (bound is None or bound + reserve[s] > half_entries[s])

    def has_arrived(summary: Array, asked_at: int) -> bool:
        return tracker.num_calls - asked_at >= AGREED_LAG if is_agreed else summary.is_ready()

    unplaced = False
    summary = None
    if not is_agreed and all(store.counters.is_ready() for store in state.stores):
        summary = _read(state, num_shards, shards, is_agreed)
    while summary is None and tracker.under_way and has_arrived(tracker.under_way[0][0], tracker.under_way[0][2]):
        arrived, allowed, _ = tracker.under_way.popleft()
        tracker.learn(np.asarray(arrived), allowed)
        unplaced = bool(np.asarray(arrived)[:, 1].any())
    if summary is None and (unplaced or any(short(s) or short_of_sightings(s) for s in range(len(specs)))):
        summary = _read(state, num_shards, shards, is_agreed)
        tracker.num_waits += 1
    if summary is not None:
        tracker.under_way.clear()
        tracker.learn(summary, tracker.allowed)
        needed = {s: tracker.known[s][0] + reserve[s] for s in range(len(specs)) if open_ended[s] and short(s)}
        is_full = any(evicting[s] and short(s) for s in range(len(specs)))
        larger = _new_capacities(specs, state, needed, shards)
        crowded = [s for s in range(len(specs)) if short_of_sightings(s)]
        room = {s: WAITING_RESERVES * reserve[s] for s in crowded}
        enlarge = _enlarging(specs, state, larger, summary[:, 1] > 0, room, shards)
        if is_full:
            # Before anything changes: `hand_over` is the caller's, and may fail.
            state = _evicted(specs, tracker, state, reserve, larger, shards, clock, hand_over)
        state = enlarge(state)
        for s in crowded:
            tracker.sightings[s] = admission.num_waiting(specs[s], state.stores[s], shards)
        tracker.num_grown += len(needed)
        tracker.signature = _signature(state)
    elif not tracker.under_way and (
        tracker.num_calls % LOOK_EVERY == 0
        or any(
            # Half of what is left may be gone: ask now, so that the answer is there before it is needed.
            tracker.known[s] is not None
            and (
                2 * (tracker.bound(s) + reserve[s]) > capacity + tracker.known[s][0]
                or 2 * (tracker.sightings_bound(s) + reserve[s]) * bool(half_entries[s])
                > half_entries[s] + tracker.sightings[s]
            )
            for s, capacity in enumerate(capacities)
        )
    ):
        counters = tuple(store.counters for store in state.stores)
        arriving = _summary(counters, shards)
        arriving.copy_to_host_async()
        tracker.under_way.append((arriving, list(tracker.allowed), tracker.num_calls))
    return state


def rows_kept(capacity: int, reserve: int) -> int:
    """Rows of a shard that stay when its store is full: so many that the reserve fits, and a slack.

    The slack is the larger of the reserve and a sixteenth of the capacity, and at most half of what the reserve leaves.
    No reserve takes more than half of the capacity, so a quarter of the rows always stays: not every key of a batch
    needs a row, least of all where admission keeps most out.

    Example:
      >>> rows_kept(1600, 50), rows_kept(1600, 400), rows_kept(1600, 1000), rows_kept(1600, 2000)
      (1450, 800, 400, 400)
    """
    reserve = min(reserve, capacity // 2)
    left = capacity - reserve
    return left - min(max(reserve, capacity // SLACK_SHARE), left // 2)


def _evicted(
    specs: Sequence[StoreSpec],
    tracker: GrowthTracker,
    state: State,
    reserve: Sequence[int],
    larger: dict[int, int],
    shards: Shards | None,
    clock: Any,
    hand_over: evict_lib.HandOver | None,
) -> State:
    """The state without the rows that leave full stores by their policy; `larger`: capacities of those that grow next.

    Whatever `hand_over` raises, the state is as it was.
    """
    capacities = [store.capacity // spec.num_shards for spec, store in zip(specs, state.stores, strict=True)]
    capacities = [larger.get(s, capacity) for s, capacity in enumerate(capacities)]

    def short(s: int) -> bool:
        is_at_its_end = specs[s].tables[0].eviction is not None and capacities[s] == specs[s].max_capacity
        return is_at_its_end and tracker.known[s][0] + reserve[s] > capacities[s]

    full = [s for s in range(len(specs)) if short(s)]
    leaving = {s: evict_lib.Leaving(specs[s], specs[s].tables[0].eviction, None, shards, is_shared=False) for s in full}
    kept = {s: rows_kept(capacities[s], reserve[s]) for s in full}
    stores, _ = evict_lib.evict(leaving, state.stores, state.step if clock is None else clock, kept, hand_over)
    state = dataclasses.replace(state, stores=stores)
    tracker.num_evictions += len(full)
    if all(one.policy.has_score for one in leaving.values()):
        for s in full:
            tracker.known[s] = min(tracker.known[s][0], kept[s]), tracker.allowed[s]
    else:
        # How many have expired nobody knows before.
        is_agreed = shards is not None and shards.num_processes > 1
        tracker.learn(_read(state, specs[0].num_shards, shards, is_agreed), tracker.allowed)
        tracker.num_waits += 1
    left = [s for s in full if short(s)]
    if left and not tracker.is_told:
        tracker.is_told = True
        s = left[0]
        warnings.warn(
            f"grow: store of tables {_names(specs[s])}: got {tracker.known[s][0]} rows in use after eviction by "
            f"{specs[s].tables[0].eviction!r}, wanted at most {capacities[s] - reserve[s]} of {capacities[s]}, so that "
            f"the {reserve[s]} keys of the next steps all get rows; some may be refused. Raise max_capacity, take "
            "smaller batches, or evict more: a shorter time, or a policy with a score.",
            RuntimeWarning,
            stacklevel=5,  # the caller of Collection.grow, behind its annotation
        )
    return state


def _warn_of_copies(tracker: GrowthTracker, state: State) -> None:
    """Tells, once, that steps copy the state: rows lie elsewhere after each.

    A donated state stays where it is (law 9). One that is not is right as well, but is copied in every step, and two of
    it are in memory. Nothing is waited for: while steps are under way nobody looks.
    """
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
        warnings.warn(
            f"grow: state: got a new copy of it after each of the last {COPIES} steps (its largest array has "
            f"{slab.nbytes} bytes), wanted one that is changed in place; donate the state to the step: "
            "jax.jit(step, donate_argnums=0).",
            RuntimeWarning,
            stacklevel=5,  # the caller of Collection.grow, behind its annotation
        )


def next_capacity(spec: StoreSpec, capacity: int, needed: int, free: int | None) -> int:
    """The capacity that a shard grows to: twice, or a quarter more where that would not fit, or what is needed."""
    limit = min(spec.max_capacity or MAX_CAPACITY, MAX_CAPACITY)
    wanted = min(limit, max(needed, int(capacity * GROWTH_FACTOR)))
    gentle = min(limit, max(needed, int(capacity * GENTLE_FACTOR)))
    fits = free is None or (wanted - capacity) * row_bytes(spec) <= free
    return wanted if fits else gentle


def _new_capacities(
    specs: Sequence[StoreSpec], state: State, needed: dict[int, int], shards: Shards | None
) -> dict[int, int]:
    """What the shards of each store that is short grow to; refuses what will not fit before anything has changed."""
    capacities = {}
    free = agreed_free_bytes(shards) if needed else None
    for s, rows in needed.items():
        capacity, num_slabs = state.stores[s].capacity // specs[s].num_shards, len(state.stores[s].rows)
        capacities[s] = next_capacity(specs[s], capacity, rows, free)
        if capacities[s] <= capacity or num_slabs >= specs[s].max_slabs:
            raise MemoryError(
                f"grow: store of tables {_names(specs[s])}: got {capacity} rows in {num_slabs} slabs, wanted {rows} "
                f"rows, beyond {MAX_CAPACITY} rows or {specs[s].max_slabs} slabs; start with a larger capacity."
            )
    more = [(specs[s], new - state.stores[s].capacity // specs[s].num_shards) for s, new in capacities.items()]
    require_memory(more, "grow", free)
    return capacities


def _enlarging(
    specs: Sequence[StoreSpec],
    state: State,
    capacities: dict[int, int],
    is_resalted: Sequence[bool],
    room: dict[int, int],
    shards: Shards | None,
) -> Callable[[State], State]:
    """Prepares larger stores, and new indexes where stores are larger or get another salt.

    Slabs are allocated and programs compiled here: whatever fails until the result is called has changed nothing. The
    old index goes only then, so that the peak is the new size: it is not larger than the new one.

    Args:
      specs: of all stores.
      state: unchanged.
      capacities: rows of a shard, by the number of the store; more than there are.
      is_resalted: for each store, whether keys of it found no entry.
      room: for how many keys that wait, by the number of the store.
      shards: over which the stores are split; None: one device.

    Returns:
      A function that takes the state, or one that lost rows meanwhile, and consumes it.
    """
    slabs, rebuild, remake = {}, {}, {}
    for s, spec in enumerate(specs):
        store = state.stores[s]
        if s in capacities:
            slabs[s] = _slab(spec, capacities[s] - store.capacity // spec.num_shards, shards)
            store = _with_slab(store, slabs[s])
        if s in capacities or is_resalted[s]:
            num_buckets = num_buckets_of(store.capacity // spec.num_shards)
            arguments = (store.counters, store.records, num_buckets, bool(is_resalted[s]), shards)
            rebuild[s] = _rebuild.lower(*arguments).compile()
        if s in room or is_resalted[s]:  # waiting keys lie where the salt says, too
            remake[s] = admission.remaking(spec, store, room.get(s, 0), shards)

    def enlarge(state: State) -> State:
        stores = list(state.stores)
        for s in slabs:
            stores[s] = _with_slab(stores[s], slabs[s])
        for s in rebuild:
            stores[s].index.delete()
            index, counters = rebuild[s](stores[s].counters, stores[s].records)
            stores[s] = dataclasses.replace(stores[s], index=index, counters=counters)
        for s in remake:
            stores[s] = remake[s](stores[s])
        return dataclasses.replace(state, stores=tuple(stores)) if rebuild or remake else state

    return enlarge


def _half_entries(spec: StoreSpec, store: StoreState) -> int:
    """Keys that may wait in a shard before their buckets are half full; 0: none waits."""
    return sum(array.shape[0] // spec.num_shards * ENTRIES_PER_BUCKET // 2 for array in store.sightings)


def _slab(spec: StoreSpec, size: int, shards: Shards | None) -> tuple:
    """One more slab, of `size` rows in each shard."""

    def make() -> tuple:
        return new_slab(spec, spec.num_shards * size)

    return make() if shards is None else shards.make(make)


def _with_slab(store: StoreState, slab: tuple) -> StoreState:
    rows, records, states, statistics = slab
    return dataclasses.replace(
        store,
        rows=(*store.rows, rows),
        records=(*store.records, records),
        states=tuple((*slabs, slab) for slabs, slab in zip(store.states, states, strict=True)),
        statistics=(*store.statistics, *statistics),
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3, 4))
def _rebuild(
    counters: Array, records: tuple[Array, ...], num_buckets: int, is_resalted: bool, shards: Shards | None
) -> tuple[Array, Array]:
    """A new index of the rows that the records name, under another salt if asked, and the counters."""

    def of_shard(counters: Array, records: tuple[Array, ...]) -> tuple[Array, Array]:
        if is_resalted:
            counters = counters.at[_WORD["salt_low"]].add(jnp.uint32(0x9E3779B9))
        return table.kernels.rebuild(counters, records, num_buckets)

    if shards is None:
        return of_shard(counters, records)
    return shards.run(of_shard, (counters, records), (shards.spec, shards.spec), shards.spec)


def _names(spec: StoreSpec) -> str:
    return ", ".join(f'"{table.name}"' for table in spec.tables)


def agreed_free_bytes(shards: Shards | None) -> int | None:
    """Memory that is left for a shard on each device, the least of all processes; None where nobody says."""
    free = free_bytes()
    if shards is None or shards.num_processes == 1:
        num_local = 1 if shards is None else len(shards.local())
    else:
        unknown = 1 << 61
        free = processes.least(unknown if free is None else free)
        free = None if free == unknown else free
        num_local = len(shards.local())
    # Shards on CPU devices share the memory of their host.
    return free // num_local if free is not None and jax.default_backend() == "cpu" else free


def free_bytes() -> int | None:
    """Memory that is left on the default device; None where it does not say."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _free_host_bytes()
    stats = device.memory_stats() or {}
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) if "bytes_limit" in stats else None


def _free_host_bytes() -> int | None:
    """What Linux can give without swapping (its page cache included), within the limit of the control group."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def require_memory(asked: Sequence[tuple[StoreSpec, int]], op: str, free: int | None) -> None:
    """Refuses stores and rows (of a shard) that will not fit together, before anything changes.

    Raises:
      MemoryError: says the bytes asked, the bytes that a row costs, and the bytes there are.
    """
    total = sum(num_rows * row_bytes(spec) for spec, num_rows in asked)
    if free is not None and total > free:
        parts = "; ".join(
            f"store of tables {_names(spec)}: {num_rows} rows of {row_bytes(spec)} bytes "
            f"(row {spec.itemsize * spec.dim}, the rest optimizer state, record and index)"
            for spec, num_rows in asked
        )
        raise MemoryError(
            f"{op}: capacity: got {total} bytes ({parts}), wanted at most {free} that are free; lower capacity, dim or "
            "the optimizer's state."
        )


def grow_to(
    op: str, specs: Sequence[StoreSpec], state: State, capacities: dict[int, int], shards: Shards | None = None
) -> State:
    """Makes shards of some stores so large, at once: for rows that are known to come.

    Args:
      op: named in errors.
      specs: of all stores.
      state: the old one must not be used then.
      capacities: rows of a shard, by the number of the store; more than there are.
      shards: over which the stores are split; None: one device.

    Raises:
      MemoryError: they will not fit; nothing has changed.
    """
    if not capacities:
        return state
    for s, rows in capacities.items():
        if rows > MAX_CAPACITY or len(state.stores[s].rows) >= specs[s].max_slabs:
            raise MemoryError(
                f"{op}: store of tables {_names(specs[s])}: got {rows} rows for a shard, wanted at most {MAX_CAPACITY} "
                f"in {specs[s].max_slabs} slabs; use more shards, or start with a larger capacity."
            )
    free = agreed_free_bytes(shards)
    more = [(specs[s], new - state.stores[s].capacity // specs[s].num_shards) for s, new in capacities.items()]
    require_memory(more, op, free)
    return _enlarging(specs, state, capacities, [False] * len(specs), {}, shards)(state)


def resalted(specs: Sequence[StoreSpec], state: State, s: int, shards: Shards | None = None) -> State:
    """The state with the index of one store made anew under another salt: keys that found no entry find one then."""
    is_resalted = [number == s for number in range(len(specs))]
    return _enlarging(specs, state, {}, is_resalted, {}, shards)(state)

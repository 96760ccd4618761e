"""Between steps, on the host: more slabs and a larger index, before they are needed (decision D9).

Growing appends a slab to every per-row array and copies no row. The old index goes first, then the new one is made
from the records, so the peak is the new size. Whether to grow rests on counters that have already arrived: if the
state's own are there, on them; while steps are still under way, on a bound that follows from the last ones seen and
from what the steps since could have inserted at most. The host waits for the device only when that bound does not
fit.
"""

import collections
import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import table
from jaxsok.specs import StoreSpec
from jaxsok.store import State, StoreState, new_slab, num_buckets_of, row_bytes
from jaxsok.types import COUNTERS, MAX_CAPACITY, MAX_SLABS

GROWTH_FACTOR = 2.0  # capacity after growing over capacity before: the number of programs compiled is logarithmic
LOOK_EVERY = 64  # calls between looks at counters that nothing forces: keys without an index entry show there
GENTLE_FACTOR = 1.25  # where twice does not fit into memory

_WORD = {name: i for i, name in enumerate(COUNTERS)}


@dataclasses.dataclass
class GrowthTracker:
    """What the host knows about the rows in use, of one state that passes through `grow` between its steps."""

    keys_per_step: list[int]
    """Positions that one step can insert, by store: learned from batches and traces."""
    allowed: list[int]
    """Insertions that all steps so far could have made, by store, since the tracker began."""
    known: list[tuple[int, int] | None]
    """Rows last seen, and `allowed` at that time, by store."""
    under_way: collections.deque[tuple[Array, list[int]]]
    """Counters on their way to the host, oldest first, with `allowed` when they were asked for."""
    signature: tuple[int, ...] | None = None
    """Capacities of the state last seen; another one means another state, of which nothing is known."""
    num_calls: int = 0
    num_waits: int = 0
    """How often the host had to wait for the device."""
    num_grown: int = 0
    """How often a store grew: each time the step is compiled anew."""

    @classmethod
    def of(cls, num_stores: int) -> "GrowthTracker":
        """A tracker that knows nothing."""
        return cls([0] * num_stores, [0] * num_stores, [None] * num_stores, collections.deque())

    def forget(self) -> None:
        """Forgets all but the size of batches."""
        self.known = [None] * len(self.known)
        self.under_way.clear()
        self.signature = None

    def saw_batch(self, store: int, num_keys: int) -> None:
        """Notes how many keys one step asks of a store."""
        self.keys_per_step[store] = max(self.keys_per_step[store], num_keys)

    def bound(self, store: int) -> int | None:
        """Rows in use at most; None: not known."""
        known = self.known[store]
        return None if known is None else known[0] + self.allowed[store] - known[1]

    def learn(self, counters: np.ndarray, allowed: Sequence[int]) -> None:
        """Takes in counters `[num_stores, num_counters]` that were current when `allowed` was."""
        for s, words in enumerate(counters):
            self.known[s] = (_rows_in_use(words), allowed[s])


def _rows_in_use(words: np.ndarray) -> int:
    return int(words[_WORD["num_allocated"]]) - int(words[_WORD["free_end"]]) + int(words[_WORD["free_begin"]])


def _signature(state: State) -> tuple[int, ...]:
    return tuple(store.capacity for store in state.stores)


@jax.jit
def _snapshot(counters: tuple[Array, ...]) -> Array:
    """A copy that lives on when the state is donated."""
    return jnp.stack(counters)


def _read(state: State) -> np.ndarray:
    return np.stack([np.asarray(store.counters) for store in state.stores])


def grow(specs: Sequence[StoreSpec], tracker: GrowthTracker, state: State, steps: int) -> State:
    """Makes room for what the next `steps` steps may insert.

    Returns:
      The same state, or one with more slabs; the old one must not be used then.
    """
    if tracker.signature != _signature(state):
        tracker.forget()
        tracker.signature = _signature(state)
    tracker.num_calls += 1
    reserve = [keys * steps for keys in tracker.keys_per_step]
    open_ended = [
        spec.max_capacity is None or store.capacity < spec.max_capacity
        for spec, store in zip(specs, state.stores, strict=True)
    ]

    def short(s: int) -> bool:
        bound = tracker.bound(s)
        return open_ended[s] and (bound is None or bound + reserve[s] > state.stores[s].capacity)

    unplaced = False
    counters = _read(state) if all(store.counters.is_ready() for store in state.stores) else None
    while counters is None and tracker.under_way and tracker.under_way[0][0].is_ready():
        arrived, allowed = tracker.under_way.popleft()
        tracker.learn(np.asarray(arrived), allowed)
        unplaced = bool(np.asarray(arrived)[:, _WORD["num_unplaced"]].any())
    if counters is None and (unplaced or any(short(s) for s in range(len(specs)))):
        counters = _read(state)
        tracker.num_waits += 1
    if counters is not None:
        tracker.under_way.clear()
        tracker.learn(counters, tracker.allowed)
        stores = list(state.stores)
        for s, spec in enumerate(specs):
            if counters[s, _WORD["num_unplaced"]]:
                stores[s] = _salted_anew(stores[s], counters[s])
            if short(s):
                stores[s] = _grow_store(spec, stores[s], int(tracker.known[s][0]) + reserve[s])
                tracker.num_grown += 1
        state = dataclasses.replace(state, stores=tuple(stores))
        tracker.signature = _signature(state)
    elif not tracker.under_way and (
        tracker.num_calls % LOOK_EVERY == 0
        or any(
            # Half of what is left may be gone: ask now, so that the answer is there before it is needed.
            tracker.known[s] is not None and 2 * (tracker.bound(s) + reserve[s]) > store.capacity + tracker.known[s][0]
            for s, store in enumerate(state.stores)
        )
    ):
        arriving = _snapshot(tuple(store.counters for store in state.stores))
        arriving.copy_to_host_async()
        tracker.under_way.append((arriving, list(tracker.allowed)))
    for s, keys in enumerate(reserve):
        tracker.allowed[s] += keys
    return state


def _grow_store(spec: StoreSpec, store: StoreState, needed: int) -> StoreState:
    """Appends one slab and makes the index anew."""
    capacity = store.capacity
    limit = min(spec.max_capacity or MAX_CAPACITY, MAX_CAPACITY)
    wanted = max(needed, int(capacity * GROWTH_FACTOR))
    gentle = max(needed, int(capacity * GENTLE_FACTOR))
    new_capacity = min(limit, wanted if fits(spec, wanted - capacity) else gentle)
    names = ", ".join(f'"{table.name}"' for table in spec.tables)
    if new_capacity <= capacity or len(store.rows) >= MAX_SLABS:
        raise MemoryError(
            f"grow: store of tables {names}: got {capacity} rows in {len(store.rows)} slabs, wanted "
            f"{needed} rows, beyond "
            f"{limit} rows or {MAX_SLABS} slabs; start with a larger capacity."
        )
    require_memory(spec, new_capacity - capacity, "grow")
    store.index.delete()
    rows, records, states = new_slab(spec, new_capacity - capacity)
    store = dataclasses.replace(
        store,
        rows=(*store.rows, rows),
        records=(*store.records, records),
        states=tuple((*slabs, slab) for slabs, slab in zip(store.states, states, strict=True)),
    )
    index, counters = _rebuild(store.counters, store.records, num_buckets_of(new_capacity))
    return dataclasses.replace(store, index=index, counters=counters)


def _salted_anew(store: StoreState, words: np.ndarray) -> StoreState:
    """Makes the index anew under another salt: keys found no entry within the probe bound."""
    words = words.copy()
    words[_WORD["salt_low"]] += np.uint32(0x9E3779B9)
    num_buckets = store.index.shape[0]
    store.index.delete()
    index, counters = _rebuild(jnp.asarray(words), store.records, num_buckets)
    return dataclasses.replace(store, index=index, counters=counters)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def _rebuild(counters: Array, records: tuple[Array, ...], num_buckets: int) -> tuple[Array, Array]:
    return table.kernels.rebuild(counters, records, num_buckets)


def free_bytes() -> int | None:
    """Memory that is left on the default device; None where it does not say."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


def fits(spec: StoreSpec, num_rows: int) -> bool:
    """Whether so many more rows would fit into memory."""
    free = free_bytes()
    return free is None or num_rows * row_bytes(spec) <= free


def require_memory(spec: StoreSpec, num_rows: int, op: str) -> None:
    """Refuses rows that will not fit, before anything changes.

    Raises:
      MemoryError: says the bytes asked, the bytes that a row costs, and the bytes there are.
    """
    free, cost = free_bytes(), row_bytes(spec)
    if free is not None and num_rows * cost > free:
        names = ", ".join(f'"{table.name}"' for table in spec.tables)
        raise MemoryError(
            f"{op}: store of tables {names}: got {num_rows} rows of {cost} bytes (row {4 * spec.dim}, the "
            "rest optimizer "
            f"state, record and index), {num_rows * cost} bytes, wanted at most {free} that are free; lower "
            "capacity, dim "
            "or the optimizer's state, or use more devices."
        )

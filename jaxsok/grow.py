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
import pathlib
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
    steps: int = 1
    """Steps until the next call of `grow`, as the last one was told."""
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
    if tracker.num_calls:
        # Counted only now: the first batch may be seen after the first call.
        for s, keys in enumerate(tracker.keys_per_step):
            tracker.allowed[s] += keys * tracker.steps
    tracker.num_calls += 1
    tracker.steps = steps
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
        needed = {s: tracker.known[s][0] + reserve[s] for s in range(len(specs)) if short(s)}
        state = _rebuilt(specs, state, counters, _new_capacities(specs, state, needed))
        tracker.num_grown += len(needed)
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
    return state


def next_capacity(spec: StoreSpec, capacity: int, needed: int) -> int:
    """The capacity that a store grows to: twice, or a quarter more where that would not fit, or what is needed."""
    limit = min(spec.max_capacity or MAX_CAPACITY, MAX_CAPACITY)
    wanted = min(limit, max(needed, int(capacity * GROWTH_FACTOR)))
    gentle = min(limit, max(needed, int(capacity * GENTLE_FACTOR)))
    return wanted if fits(spec, wanted - capacity) else gentle


def _new_capacities(specs: Sequence[StoreSpec], state: State, needed: dict[int, int]) -> dict[int, int]:
    """What each store that is short grows to; refuses what will not fit before anything has changed."""
    capacities = {}
    for s, rows in needed.items():
        capacity, num_slabs = state.stores[s].capacity, len(state.stores[s].rows)
        capacities[s] = next_capacity(specs[s], capacity, rows)
        if capacities[s] <= capacity or num_slabs >= MAX_SLABS:
            raise MemoryError(
                f"grow: store of tables {_names(specs[s])}: got {capacity} rows in {num_slabs} slabs, wanted {rows} "
                f"rows, beyond {MAX_CAPACITY} rows or {MAX_SLABS} slabs; start with a larger capacity."
            )
    require_memory([(specs[s], new - state.stores[s].capacity) for s, new in capacities.items()], "grow")
    return capacities


def _rebuilt(specs: Sequence[StoreSpec], state: State, counters: np.ndarray, capacities: dict[int, int]) -> State:
    """The state with larger stores, and with new indexes where they are larger or keys found no entry."""
    stores = list(state.stores)
    for s, spec in enumerate(specs):
        if counters[s, _WORD["num_unplaced"]]:
            words = counters[s].copy()
            words[_WORD["salt_low"]] = (int(words[_WORD["salt_low"]]) + 0x9E3779B9) & 0xFFFFFFFF
            stores[s] = dataclasses.replace(stores[s], counters=jnp.asarray(words))
        elif s not in capacities:
            continue
        stores[s].index.delete()
        if s in capacities:
            stores[s] = _with_slab(spec, stores[s], capacities[s] - stores[s].capacity)
        num_buckets = num_buckets_of(stores[s].capacity)
        index, new_counters = _rebuild(stores[s].counters, stores[s].records, num_buckets)
        stores[s] = dataclasses.replace(stores[s], index=index, counters=new_counters)
    return dataclasses.replace(state, stores=tuple(stores))


def _with_slab(spec: StoreSpec, store: StoreState, size: int) -> StoreState:
    rows, records, states = new_slab(spec, size)
    return dataclasses.replace(
        store,
        rows=(*store.rows, rows),
        records=(*store.records, records),
        states=tuple((*slabs, slab) for slabs, slab in zip(store.states, states, strict=True)),
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def _rebuild(counters: Array, records: tuple[Array, ...], num_buckets: int) -> tuple[Array, Array]:
    return table.kernels.rebuild(counters, records, num_buckets)


def _names(spec: StoreSpec) -> str:
    return ", ".join(f'"{table.name}"' for table in spec.tables)


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


def fits(spec: StoreSpec, num_rows: int) -> bool:
    """Whether so many more rows would fit into memory."""
    free = free_bytes()
    return free is None or num_rows * row_bytes(spec) <= free


def require_memory(asked: Sequence[tuple[StoreSpec, int]], op: str) -> None:
    """Refuses stores and rows that will not fit together, before anything changes.

    Raises:
      MemoryError: says the bytes asked, the bytes that a row costs, and the bytes there are.
    """
    free = free_bytes()
    total = sum(num_rows * row_bytes(spec) for spec, num_rows in asked)
    if free is not None and total > free:
        parts = "; ".join(
            f"store of tables {_names(spec)}: {num_rows} rows of {row_bytes(spec)} bytes (row {4 * spec.dim}, the rest "
            "optimizer state, record and index)"
            for spec, num_rows in asked
        )
        raise MemoryError(
            f"{op}: capacity: got {total} bytes ({parts}), wanted at most {free} that are free; lower capacity, dim or "
            "the optimizer's state."
        )

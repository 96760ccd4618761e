"""More rows and a larger index for stores, if there is memory for them.

Growing appends a slab to every per-row array and copies no row. The old index goes before the new one is made from the
records, so the peak is the new size. Slabs are allocated and programs compiled before anything goes.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxsok import admission, processes, table
from jaxsok.host_limits import HostLimit, available_bytes, share_of_device
from jaxsok.host_slabs import with_host_slab
from jaxsok.settings import compile_ahead
from jaxsok.shards import ONE_DEVICE, Shards
from jaxsok.specs import StoreSpec
from jaxsok.store import State, cache_bytes, first_slab, host_row_bytes, new_slab, num_buckets_of, row_bytes, with_slab
from jaxsok.types import COUNTERS, MAX_CAPACITY

GROWTH_FACTOR = 2.0  # capacity after growing over capacity before: the number of programs compiled is logarithmic
GENTLE_FACTOR = 1.25  # where twice does not fit into memory

Room = tuple[int | None, HostLimit | None]
"""Memory that stores can grow into: free bytes for a shard, and a device's share of host memory (`agree_on_room`)."""


def next_capacity(
    spec: StoreSpec, capacity: int, needed: int, free: int | None, host_share: HostLimit | None = None
) -> int:
    """Returns the capacity that a shard grows to: twice, or a quarter more where that would not fit, or `needed`."""
    wanted = min(spec.most_rows, max(needed, int(capacity * GROWTH_FACTOR)))
    gentle = min(spec.most_rows, max(needed, int(capacity * GENTLE_FACTOR)))
    return wanted if fits([(spec, wanted - capacity)], free, host_share) else gentle


def fits(asked: Sequence[tuple[StoreSpec, int]], free: int | None, host_share: HostLimit | None) -> bool:
    """Returns whether there is memory for stores with their rows (of a shard)."""
    limits = ((row_bytes, free), (host_row_bytes, None if host_share is None else host_share.num_bytes))
    return all(
        limit is None or sum(num_rows * bytes_of(spec) for spec, num_rows in asked) <= limit
        for bytes_of, limit in limits
    )


def rows_to_add(specs: Sequence[StoreSpec], state: State, capacities: Mapping[int, int]) -> list[tuple[StoreSpec, int]]:
    """Returns the stores that grow to `capacities`, by store, with the rows that each shard gets."""
    return [(specs[s], new - state.stores[s].capacity // specs[s].num_shards) for s, new in capacities.items()]


def prepare_growth(
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
            salts[s] = processes.draw_words("grow", is_shared=shards.num_processes > 1) if is_resalted[s] else None
            rebuild[s] = compile_ahead(_rebuild, store.counters, store.records, salts[s], num_buckets, shards)
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


def names_of(spec: StoreSpec) -> str:
    """Returns the names of the tables of a store, for messages."""
    return ", ".join(f'"{table.name}"' for table in spec.tables)


def agree_on_room(specs: Sequence[StoreSpec], shards: Shards) -> Room:
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
    if free is not None and jax.default_backend() == "cpu":  # where shards share the memory of their host
        free //= len(shards.local())
    if shards.num_processes > 1:
        free = processes.least("grow", unknown if free is None else free)
    return None if free == unknown else free


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
            f"store of tables {names_of(spec)}: {num_rows} rows of {row_bytes(spec)} bytes "
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
        f"store of tables {names_of(spec)}: {num_rows} rows of {host_row_bytes(spec)} bytes"
        for spec, num_rows in asked
        if spec.memory is not None
    )
    return (
        f"got {total} bytes of host memory for a device ({parts}), wanted at most {host_share.num_bytes} that are "
        f"available to it ({host_share.name})"
    )


def require_growth(
    op: str, specs: Sequence[StoreSpec], state: State, capacities: Mapping[int, int], room: Room
) -> None:
    """Raises MemoryError if shards cannot grow to `capacities`, by store, for want of slabs, row ids or memory."""
    for s, rows in capacities.items():
        capacity, num_slabs = state.stores[s].capacity // specs[s].num_shards, len(state.stores[s].rows)
        if not capacity < rows <= MAX_CAPACITY or num_slabs >= specs[s].max_slabs:
            raise MemoryError(
                f"{op}: store of tables {names_of(specs[s])}: got {capacity} rows of a shard in {num_slabs} slabs, "
                f"wanted more, beyond {MAX_CAPACITY} rows or {specs[s].max_slabs} slabs; use more shards, or start "
                "with a larger capacity."
            )
    require_memory(rows_to_add(specs, state, capacities), op, *room)


def grow_to(
    op: str, specs: Sequence[StoreSpec], state: State, capacities: dict[int, int], shards: Shards = ONE_DEVICE
) -> State:
    """Enlarges shards of some stores at once to `capacities` rows by store; consumes the state if it succeeds."""
    if not capacities:
        return state
    require_growth(op, specs, state, capacities, agree_on_room([specs[s] for s in capacities], shards))
    return prepare_growth(specs, state, capacities, [False] * len(specs), {}, shards)(state)


def resalt_index(specs: Sequence[StoreSpec], state: State, s: int, shards: Shards = ONE_DEVICE) -> State:
    """Rebuilds the index of one store under another salt, so that keys that found no entry find one."""
    is_resalted = [number == s for number in range(len(specs))]
    return prepare_growth(specs, state, {}, is_resalted, {}, shards)(state)

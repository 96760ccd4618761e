"""The state of one shard: index, slabs of rows and optimizer state, records, counters (`ffi/core/layout.h`).

A state is a pytree of plain arrays. Ops take and return it; under `donate_argnums` they change it in place. On a mesh
each array of a store is split along its first dimension, and a shard's part is what one device would have.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxsok.kernels.call import StoreArrays
from jaxsok.kernels.tier import MOST_FORESEEN, MOVE_BYTES, Tier, host_bytes, num_staged
from jaxsok.printed import condition_of, describe_value, format_bytes, join_items
from jaxsok.specs import StoreSpec
from jaxsok.types import (
    BUCKET_WORDS,
    COUNTERS,
    ENTRIES_PER_BUCKET,
    FRESH,
    RECORD_WORDS,
    TIER_COUNTERS,
    Clock,
    PartitionOwners,
    Seed,
)

NUM_STATISTICS = 2  # words of a row's statistics: last step, frequency
MIN_SIGHTINGS = 4096  # buckets for waiting keys, at least; `grow` adds more
MIN_BUCKETS = 16  # 1 KiB; below it the index costs nothing worth saving


class Slab(NamedTuple):
    """The arrays that a slab adds to a store."""

    rows: tuple[Array, ...]
    """The device's array; none before the host slab exists."""
    records: Array
    states: tuple[Array, ...]
    statistics: tuple[Array, ...]
    """None or one."""
    places: tuple[Array, ...]
    """One array if rows lie in host memory."""
    homes: tuple[Array, ...]
    """Likewise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoreState(StoreArrays):
    """The arrays of one store."""

    globals_: tuple[Array, ...] = ()
    """Optimizer state that belongs to no row, repeated for each shard."""
    tier: tuple[Tier, ...] = ()
    """One where rows lie in host memory: `rows` are then records of bytes, with the optimizer state, and `states` are
    empty."""

    def __repr__(self) -> str:
        """Names its size; reads no array, so it waits for nothing."""
        return f"StoreState({', '.join([self._size, *condition_of(self)])})"

    @property
    def _size(self) -> str:
        """Describes rows, slabs and optimizer state; for a tree of other leaves (shardings, say) the leaves."""
        leaves = jax.tree.leaves(self)
        if not all(isinstance(getattr(leaf, "shape", None), tuple) for leaf in leaves) or not leaves:
            return f"leaves {join_items(sorted({describe_value(leaf) for leaf in leaves}))}"
        num_rows = sum(math.prod(slab.shape[:-1]) for slab in self.records)
        tier = self.tier[0] if self.tier else None
        rows = self.rows[0] if tier is None else tier.rows
        states = [slabs[0] for slabs in self.states if slabs] if tier is None else tier.states
        size = f"{num_rows:,} rows of {rows.shape[-1]} {rows.dtype}"
        widths = [str(state.shape[-1]) for state in states]
        size += f" and state of {' + '.join(widths)}" if widths else ""
        size += f" in {len(self.records)} slabs" if len(self.records) > 1 else ""
        return size + ("" if tier is None else f" in host memory, cache of {math.prod(rows.shape[:-1]):,} rows")

    @property
    def capacity(self) -> int:
        """Rows allocated."""
        return sum(slab.shape[0] for slab in self.records)

    @property
    def generation(self) -> UInt32[Array, ""]:
        """Advanced whenever row ids of older plans lose their meaning."""
        return self.counters[COUNTERS.index("generation")]

    def advance_generation(self, generation: UInt32[Array, ""], num_gone: UInt32[Array, "..."]) -> "StoreState":
        """Advances the generation if rows went (`num_gone`) on any shard, so that plans become stale on all of them."""
        after = generation + (num_gone > 0).any().astype(jnp.uint32)
        return dataclasses.replace(self, counters=self.counters.at[COUNTERS.index("generation")].set(after))

    def num_rows(self) -> UInt32[Array, ""]:
        """Returns the rows in use."""
        word = {name: self.counters[i] for i, name in enumerate(COUNTERS)}
        return word["num_allocated"] - (word["free_end"] - word["free_begin"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All arrays of a collection: a pytree that jitted steps take, donate and return."""

    stores: tuple[StoreState, ...]
    step: Clock
    """The number of updates so far; it stays at 2**32 - 1."""
    seed: Seed
    partition_owners: PartitionOwners
    """The shard of each of the 4,096 partitions of keys; on one device a single 0."""
    tickets: UInt32[Array, "num_shards num_lines 2"]
    """Tickets of lookups whose plans no update has used yet (tickets.py)."""
    lineage: UInt32[Array, "2"]
    """Words by which exports identify their base: drawn from the seed, or when a state is made of a folder."""
    num_refused: UInt32[Array, " num_tables"]
    """Uses of keys that updates counted as refused for want of room, since the state was made, modulo 2**32, by table
    of the collection. `grow` warns by it."""
    fingerprint: str = dataclasses.field(metadata={"static": True})
    """Fingerprint of its specs; a collection with others refuses the state."""
    mesh: str = dataclasses.field(default="", metadata={"static": True})
    """The axes and sizes over which it is split, as "data=8"; empty on one device."""
    ahead: tuple[Any, ...] = ()
    """Lookups in flight (`plan.InFlight`), oldest first: those of batches whose steps are to come."""
    drains: bool = dataclasses.field(default=False, metadata={"static": True})
    """True makes steps look nothing up ahead until no lookup is in flight (`Collection.drain`)."""
    awaits_grow: bool = dataclasses.field(default=False, metadata={"static": True})
    """True makes them look nothing up ahead until `grow` finds none in flight, which may come after several steps."""

    @property
    def looks_ahead(self) -> bool:
        """True if steps look up the batches that follow."""
        return not (self.drains or self.awaits_grow)

    def drain(self) -> "State":
        """Returns the state whose steps look nothing up ahead."""
        # What is in flight is drained for `grow` already. Another mark would ask for another program.
        return self if self.awaits_grow and self.ahead else dataclasses.replace(self, drains=True)

    def drain_for_grow(self) -> "State":
        """Returns the state whose steps look nothing up ahead until `grow` finds nothing in flight."""
        return dataclasses.replace(self, drains=False, awaits_grow=True)

    def end_step(self) -> "State":
        """Returns the state at the end of a step, updated or not: draining ends when no lookup is in flight."""
        return self if self.ahead else dataclasses.replace(self, drains=False)

    def __repr__(self) -> str:
        """Names its stores' sizes, its bytes, and whether it is traced or deleted; reads no array."""
        num_bytes = sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self) if hasattr(leaf, "dtype")
        )
        stores = self.stores if isinstance(self.stores, (tuple, list)) else [self.stores]
        sizes = join_items(store._size if isinstance(store, StoreState) else describe_value(store) for store in stores)
        parts = [sizes, format_bytes(num_bytes)]
        if self.ahead:
            parts.append(f"{len(self.ahead)} lookups in flight")
        return f"State({'; '.join(parts + ([self.mesh] if self.mesh else []) + condition_of(self))})"


def num_buckets_of(capacity: int) -> int:
    """Returns the buckets of an index that is half full when every row is in use: 32 bytes a row."""
    return max(MIN_BUCKETS, -(-2 * capacity // ENTRIES_PER_BUCKET))


def first_sightings(capacity: int) -> int:
    """Returns the first buckets for waiting keys: half full when as many wait as there are rows."""
    return max(MIN_SIGHTINGS, num_buckets_of(capacity))


def bloom_words(spec: StoreSpec) -> int:
    """Returns the words of a shard's Bloom filter; 0 if it has none."""
    begin, size = spec.bloom_segments()[-1]
    return (begin + size) // 4


def row_bytes(spec: StoreSpec) -> int:
    """Returns the bytes of one row of capacity on the device: row, optimizer state, record, its share of the index."""
    return sum(_bytes_by_row(spec).values()) + 4 * BUCKET_WORDS * 2 // ENTRIES_PER_BUCKET


def host_row_bytes(spec: StoreSpec) -> int:
    """Returns the bytes of a row's numbers and optimizer state in host memory; 0: they lie on the device."""
    if spec.memory is None:
        return 0
    return host_bytes(spec.itemsize * spec.dim, [state.dim for state in spec.state_specs])


def store_bytes(spec: StoreSpec, capacity: int, sightings_bytes: int | None = None) -> dict[str, int]:
    """Returns the bytes of a shard's arrays on its device, by their content; `capacity` is that of the shard.

    `sightings_bytes`: of the keys that wait for admission, whose array grows with them; None: of as many as at first.
    """
    sizes = {name: capacity * num_bytes for name, num_bytes in _bytes_by_row(spec).items()}
    if spec.memory is not None:
        sizes["cache"] = cache_bytes(spec)
    sizes["index"] = 4 * BUCKET_WORDS * num_buckets_of(capacity)
    globals_ = map(np.asarray, spec.optimizer.init_globals(spec.dim))
    num_evicted = len(spec.tables) if spec.tables[0].eviction else 0
    words = len(COUNTERS) + len(spec.tables) + num_evicted
    sizes["counters"] = 4 * words + sum(leaf.nbytes for leaf in globals_)
    if sightings_bytes is None:
        sightings_bytes = 4 * BUCKET_WORDS * first_sightings(capacity) if spec.counts_sightings else 0
    admission = sightings_bytes + 4 * bloom_words(spec)
    return sizes | ({"admission": admission} if admission else {})


def cache_bytes(spec: StoreSpec) -> int:
    """Returns the bytes of a shard's cache, which does not grow; 0: it has none."""
    if spec.memory is None:
        return 0
    words = 2 * _num_lines(spec) + 4 * _num_foreseen(spec) + len(TIER_COUNTERS) + len(COUNTERS)
    return _num_lines(spec) * _staged_line(spec) + 4 * words


def _num_foreseen(spec: StoreSpec) -> int:
    return min(MOST_FORESEEN, _num_lines(spec))


def staged_bytes(spec: StoreSpec, num_keys: int) -> int:
    """Returns the bytes that a call with `num_keys` keys stages beyond the cache, with its slots and lists of moves."""
    return num_staged(num_keys, spec.num_slots, keeps=True) * _staged_line(spec) + (4 + 2 * MOVE_BYTES) * num_keys


def _staged_line(spec: StoreSpec) -> int:
    """Returns the bytes of a row on the device, with its owner."""
    return sum(_bytes_of_numbers(spec).values()) + 4 * RECORD_WORDS


def _bytes_of_numbers(spec: StoreSpec) -> dict[str, int]:
    """Returns the bytes of a row's numbers and of its optimizer state in kernels' arrays."""
    return {"rows": spec.itemsize * spec.dim, "optimizer_state": 4 * sum(state.dim for state in spec.state_specs)}


def _bytes_by_row(spec: StoreSpec) -> dict[str, int]:
    """Returns the bytes of one row in the slabs on the device, by their content."""
    numbers = _bytes_of_numbers(spec) if spec.memory is None else {"places": 12}
    return (
        numbers | {"records": 4 * RECORD_WORDS} | ({"statistics": 4 * NUM_STATISTICS} if spec.keeps_statistics else {})
    )


def _num_lines(spec: StoreSpec) -> int:
    """Returns the lines of the cache's arrays in a shard: no slots are one line that is never used."""
    return max(1, spec.num_slots)


def new_slab(spec: StoreSpec, size: int) -> Slab:
    """Makes the arrays of a slab, each its own buffer, to be donated; host slabs are not among them (host_slabs.py)."""
    records = jnp.full((size, RECORD_WORDS), np.uint32(0xFFFFFFFF))
    statistics = (jnp.zeros((size, NUM_STATISTICS), jnp.uint32),) if spec.keeps_statistics else ()
    if spec.memory is not None:
        homes = jnp.zeros((size, 2), jnp.uint32)
        return Slab((), records, (), statistics, (jnp.full((size, 1), np.uint32(FRESH)),), (homes,))
    return Slab((jnp.zeros((size, spec.dim), spec.dtype),), records, _initial_states(spec, size), statistics, (), ())


def _initial_states(spec: StoreSpec, size: int) -> tuple[Array, ...]:
    return tuple(jnp.full((size, state.dim), np.float32(state.initial_value)) for state in spec.state_specs)


def first_slab(store: StoreState) -> Slab:
    """Returns the arrays of a store's first slab."""
    return Slab(
        store.rows[:1],
        store.records[0],
        tuple(slabs[0] for slabs in store.states),
        store.statistics[:1],
        store.tier[0].places[:1] if store.tier else (),
        store.tier[0].homes[:1] if store.tier else (),
    )


def with_slab(store: StoreState, slab: Slab) -> StoreState:
    """Appends a slab to every per-row array."""
    return dataclasses.replace(
        store,
        rows=(*store.rows, *slab.rows),
        records=(*store.records, slab.records),
        states=tuple((*slabs, new) for slabs, new in zip(store.states, slab.states, strict=True)),
        statistics=(*store.statistics, *slab.statistics),
        tier=tuple(
            dataclasses.replace(tier, places=(*tier.places, *slab.places), homes=(*tier.homes, *slab.homes))
            for tier in store.tier
        ),
    )


def with_store(state: State, s: int, store: StoreState) -> State:
    """Replaces store `s`."""
    return dataclasses.replace(state, stores=(*state.stores[:s], store, *state.stores[s + 1 :]))


def capacities_of(state: State) -> tuple[int, ...]:
    """Returns the rows allocated, by store, on all shards together."""
    return tuple(store.capacity for store in state.stores)


def init_stores(specs: tuple[StoreSpec, ...], salts: UInt32[Array, "num_stores 2"]) -> tuple[StoreState, ...]:
    """Makes empty stores, with salts for their hashes."""
    return tuple(init_store(spec, salts[s]) for s, spec in enumerate(specs))


def init_store(spec: StoreSpec, salt: UInt32[Array, "2"]) -> StoreState:
    """Makes an empty store for all shards; `host_slabs.with_host_slabs` adds the host slab where rows lie there."""
    capacity, num_shards = spec.capacity, spec.num_shards
    slab = new_slab(spec, num_shards * capacity)
    counters = jnp.zeros((num_shards, len(COUNTERS)), jnp.uint32)
    counters = counters.at[:, COUNTERS.index("salt_low")].set(salt[0])
    counters = counters.at[:, COUNTERS.index("salt_high")].set(salt[1])
    return StoreState(
        index=jnp.full((num_shards * num_buckets_of(capacity), BUCKET_WORDS), np.uint32(0xFFFFFFFF)),
        counters=counters.reshape(-1),
        table_rows=jnp.zeros(num_shards * len(spec.tables), jnp.uint32),
        rows=slab.rows,
        records=(slab.records,),
        states=tuple((state,) for state in slab.states),
        globals_=tuple(
            jnp.asarray(np.broadcast_to(leaf, (num_shards, *np.shape(leaf))))
            for leaf in spec.optimizer.init_globals(spec.dim)
        ),
        statistics=slab.statistics,
        sightings=(jnp.full((num_shards * first_sightings(capacity), BUCKET_WORDS), np.uint32(0xFFFFFFFF)),)
        if spec.counts_sightings
        else (),
        bloom=(jnp.zeros(num_shards * bloom_words(spec), jnp.uint32),) if bloom_words(spec) else (),
        table_evicted=(jnp.zeros(num_shards * len(spec.tables), jnp.uint32),) if spec.tables[0].eviction else (),
        tier=(_new_tier(spec, slab),) if spec.memory is not None else (),
    )


def _new_tier(spec: StoreSpec, slab: Slab) -> Tier:
    num_lines = spec.num_shards * _num_lines(spec)
    return Tier(
        places=slab.places,
        homes=slab.homes,
        rows=jnp.zeros((num_lines, spec.dim), spec.dtype),
        states=_initial_states(spec, num_lines),
        owners=jnp.full((num_lines, RECORD_WORDS), np.uint32(0xFFFFFFFF)),
        last_use=jnp.zeros(num_lines, jnp.uint32),
        priority=jnp.zeros(num_lines, jnp.uint32),
        foreseen=jnp.zeros((spec.num_shards * _num_foreseen(spec), 4), jnp.uint32),
        counters=jnp.zeros(spec.num_shards * len(TIER_COUNTERS), jnp.uint32),
        order=jnp.zeros(spec.num_shards * len(COUNTERS), jnp.uint32),
    )

"""Keys that wait for a row: admission in a lookup, forgetting counts, and moving waiting keys out and in.

The lookup's kernels decide which unseen keys get a row (ffi/core/admission.h); `policies.py` declares it. Exact counts
lie in `StoreState.sightings`, an index of its own; `grow` keeps it at most half full. The counters of a Bloom filter
hold no keys: they stay together, and cannot be moved to another mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxsok import policies, processes
from jaxsok.kernels import table as kernels
from jaxsok.keys import from_words, to_words
from jaxsok.settings import compile_ahead
from jaxsok.shards import ONE_DEVICE, Shards
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import BUCKET_WORDS, ENTRIES_PER_BUCKET, NO_ROW, Clock

_ENTRY_WORDS = BUCKET_WORDS // ENTRIES_PER_BUCKET
_NO_ENTRY = np.full(_ENTRY_WORDS, 0xFFFFFFFF, np.uint32)
_NEVER = 0xFFFFFFFF  # a floor that no count reaches: thresholds are below 2**31
ROOM = 4  # entries per taken or possible one, after sightings were remade


def operands(spec: StoreSpec, step: Clock | None, uses: Array | None = None) -> kernels.Admission | None:
    """Returns the kernels' operands of admission, with the occurrences of each key; None if every key gets a row."""
    if step is None or all(table.admission is None for table in spec.tables):
        return None
    return kernels.Admission(step, spec.refused_words(), None if uses is None else uses.astype(jnp.uint32))


def forget(spec: StoreSpec, store: StoreState, num_gone: Array, cleared: int | None = None) -> StoreState:
    """Forgets the counts of admitted keys if rows went, and waiting keys of the table `cleared`; donates the store."""
    if not store.sightings:
        return store
    floors = spec.sighting_floors(cleared)
    is_asked = (num_gone > 0).any() | (np.arange(len(floors)) == (-1 if cleared is None else cleared))
    floors = jnp.where(is_asked, floors, jnp.uint32(_NEVER))
    sightings = kernels.forget(store.sightings[0], floors)
    return dataclasses.replace(store, sightings=(sightings,))


def forget_keys(spec: StoreSpec, store: StoreState, keys: Array, table_ids: Array) -> StoreState:
    """Forgets the counts of (table, key) pairs that wait for a row, of duplicates as well; donates the store."""
    if not store.sightings or not len(keys):
        return store
    (sightings,) = store.sightings
    entries = jnp.column_stack([keys, jnp.ones_like(table_ids), table_ids])
    floors = np.full(len(spec.tables), 2, np.uint32)  # so that entries with a count of 1 are kept
    index, _ = kernels.wait(store.counters, floors, entries, ROOM * len(keys) // ENTRIES_PER_BUCKET)
    seen = sightings.reshape(-1, _ENTRY_WORDS)
    is_gone = kernels.find(index, store.counters, seen[:, :2], seen[:, 3]) != jnp.uint32(NO_ROW)
    counts = jnp.where(is_gone, jnp.uint32(0), seen[:, 2])
    return dataclasses.replace(store, sightings=(seen.at[:, 2].set(counts).reshape(sightings.shape),))


# Waiting keys, out and in ------------------------------------------------------------------------------------------


def waiting_in(spec: StoreSpec, buckets: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Picks the keys of a table that wait for a row out of buckets of `sightings`, and their counts."""
    entries = buckets.reshape(-1, _ENTRY_WORDS)
    entries = entries[_is_waiting(entries, spec.sighting_floors(), np) & (entries[:, 3] == number)]
    return from_words(entries[:, :2]), np.ascontiguousarray(entries[:, 2])


def with_waiting(
    spec: StoreSpec,
    store: StoreState,
    number: int,
    keys: np.ndarray,
    counts: np.ndarray,
    owners: np.ndarray | None = None,
    shards: Shards = ONE_DEVICE,
) -> StoreState:
    """Adds distinct waiting keys with their counts to a table that admits by count; donates the store.

    Counts of keys that wait already add up; counts of 0, or at the threshold or above, are left out. `owners` are the
    shards of the keys (`plan.owners_of`); each process takes the keys of its own shards.
    """
    table = spec.tables[number]
    if not isinstance(table.admission, policies.AdmitByCount):
        raise ValueError(
            f'with_waiting: table "{table.name}": admission: got {table.admission!r}, wanted policies.AdmitByCount.'
        )
    keys, counts = np.asarray(keys, np.uint64), np.asarray(counts, np.uint32)
    entries = np.column_stack([to_words(keys), counts, np.full_like(counts, number)])
    if spec.num_shards == 1:
        blocks, most = {0: entries}, len(entries)
    else:
        blocks = {shard: entries if spec.is_replicated else entries[owners == shard] for shard in shards.local()}
        most = processes.greatest("load", max(map(len, blocks.values())))
    padded = {
        shard: np.concatenate([part, np.tile(_NO_ENTRY, (most - len(part), 1))]) for shard, part in blocks.items()
    }
    return prepare_remake(spec, store, most, shards, shards.put(padded))(store)


# Sizes ---------------------------------------------------------------------------------------------------------------


def prepare_remake(
    spec: StoreSpec, store: StoreState, room: int, shards: Shards, more: Array | None = None
) -> Callable[[StoreState], StoreState]:
    """Returns a function that remakes a store's `sightings` of the waiting keys alone, at most a quarter full.

    `more` has further entries `[num_entries, 4]` of all shards. Whatever can fail, except the allocation of the new
    array, fails here. The function donates its store, whose salt or rows may have changed since.
    """
    if not store.sightings:
        return lambda store: store
    num_buckets = store.sightings[0].shape[0] // spec.num_shards
    wanted = ROOM * (num_waiting(spec, store, shards) + room)
    while num_buckets * ENTRIES_PER_BUCKET < wanted:
        num_buckets *= 2
    rest = () if more is None else (more,)
    program = compile_ahead(_remake, store.counters, (*store.sightings, *rest), num_buckets, spec, shards)

    def remake(store: StoreState) -> StoreState:
        (old,) = store.sightings
        new, counters = program(store.counters, (old, *rest))
        old.delete()
        return dataclasses.replace(store, sightings=(new,), counters=counters)

    return remake


def num_waiting(spec: StoreSpec, store: StoreState, shards: Shards) -> int:
    """Counts the keys of all tables that wait for a row, in the fullest shard (waits for the device)."""
    return int(np.asarray(_most_waiting(store.sightings[0], spec, shards)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _most_waiting(sightings: Array, spec: StoreSpec, shards: Shards) -> Array:
    def count(sightings: Array) -> Array:
        is_waiting = _is_waiting(sightings.reshape(-1, _ENTRY_WORDS), spec.sighting_floors(), jnp)
        return shards.max(is_waiting.sum(dtype=jnp.int32))

    return shards.run(count, (sightings,), (shards.spec,), P())


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3, 4))
def _remake(
    counters: Array, parts: tuple[Array, ...], num_buckets: int, spec: StoreSpec, shards: Shards
) -> tuple[Array, Array]:
    def remake_part(counters: Array, *parts: Array) -> tuple[Array, Array]:
        entries = [part.reshape(-1, _ENTRY_WORDS) for part in parts]
        entries = entries[0] if len(entries) == 1 else jnp.concatenate(entries)
        return kernels.wait(counters, spec.sighting_floors(), entries, num_buckets)

    return shards.run(remake_part, (counters, *parts), (shards.spec,) * (1 + len(parts)), shards.spec)


def _is_waiting(entries: Any, floors: np.ndarray, xp: Any) -> Any:
    """Marks the entries `[num_entries, 4]` of keys that wait: seen, and not often enough.

    A key seen often enough has a row, or had one; a count of 0 is that of a key that was forgotten.
    """
    counts, tables = entries[:, 2], entries[:, 3]
    is_waiting = xp.zeros(counts.shape, bool)
    for number, floor in enumerate(floors):
        is_waiting |= (tables == xp.uint32(number)) & (counts > xp.uint32(0)) & (counts < xp.uint32(floor))
    return is_waiting

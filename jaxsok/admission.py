"""Keys that wait for a row: admission in a lookup, forgetting counts, and moving waiting keys out and in.

The lookup's kernels decide who gets a row, for unseen keys alone (ffi/core/admission.h); `policies.py` declares it.
Exact counts lie in `StoreState.sightings`, an index of its own; `grow` keeps it at most half full. The counters of a
Bloom filter hold no keys: they go where the whole array goes, and cannot be dealt to another mesh.
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
from jaxsok.shards import ONE_DEVICE, Shards, local_parts
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import BUCKET_WORDS, ENTRIES_PER_BUCKET, Clock

_ENTRY_WORDS = BUCKET_WORDS // ENTRIES_PER_BUCKET
_NO_ENTRY = np.full(_ENTRY_WORDS, 0xFFFFFFFF, np.uint32)
_NEVER = 0xFFFFFFFF  # a floor that no count reaches: thresholds are below 2**31
ROOM = 4  # entries for each that is taken or may be, after sightings were made anew


def operands(spec: StoreSpec, step: Clock | None, uses: Array | None = None) -> kernels.Admission | None:
    """Returns what the kernels need for admission, or None where every key gets a row.

    `uses` are the occurrences that each key stands for.
    """
    if step is None or not spec.has_admission:
        return None
    words = spec.refused_words()
    uses = None if uses is None else uses.astype(jnp.uint32)
    return kernels.Admission(step, words, uses)


def forget(spec: StoreSpec, store: StoreState, num_gone: Array, cleared: int | None = None) -> StoreState:
    """Forgets the counts of keys that were let in, after rows went, so that keys that come back start anew.

    Keys that still have their row never need the count again. Keys that had enough sightings when the store was full
    start anew, too. If no row went (`num_gone` is 0), only the waiting keys of the table `cleared` are forgotten.
    Donates the store.
    """
    if not store.sightings:
        return store
    floors = spec.sighting_floors(cleared)
    is_asked = (num_gone > 0).any() | (np.arange(len(floors)) == (-1 if cleared is None else cleared))
    floors = jnp.where(is_asked, floors, jnp.uint32(_NEVER))
    sightings = kernels.forget(store.sightings[0], floors)
    return dataclasses.replace(store, sightings=(sightings,))


# Waiting keys, out and in ------------------------------------------------------------------------------------------


def waiting(spec: StoreSpec, store: StoreState, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys of a table that wait for a row, uint64, and how often each was seen, uint32; in no order.

    Waits for the device. In several processes each returns those of its own shards; a replicated store returns those of
    one shard. A table that does not admit by count has none.
    """
    keys, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint32)]
    if store.sightings and isinstance(spec.tables[number].admission, policies.AdmitByCount):
        floors = spec.sighting_floors()
        parts = list(local_parts(store.sightings[0], spec.num_shards).values())
        for shard in parts[: 1 if spec.is_replicated else None]:
            entries = np.asarray(shard).reshape(-1, _ENTRY_WORDS)
            entries = entries[_is_waiting(entries, floors, np) & (entries[:, 3] == number)]
            keys.append(np.ascontiguousarray(entries[:, :2]).view("<u8")[:, 0].astype(np.uint64))
            counts.append(entries[:, 2])
    return np.concatenate(keys), np.concatenate(counts)


def with_waiting(
    spec: StoreSpec,
    store: StoreState,
    number: int,
    keys: np.ndarray,
    counts: np.ndarray,
    owners: np.ndarray | None = None,
    shards: Shards = ONE_DEVICE,
) -> StoreState:
    """Adds waiting keys (uint64, distinct, without PADDING_KEY) with their counts to a table; donates the store.

    Counts of keys that wait already are added. Counts of 0, or at the threshold or above, are left out. `owners` are
    the shards of the keys (`plan.owners_of`); each process takes the keys that its own shards own. `sightings` grow as
    they need, and are in memory twice while they are made anew. Raises ValueError if the table does not admit by count.
    """
    table = spec.tables[number]
    if not isinstance(table.admission, policies.AdmitByCount):
        raise ValueError(
            f'with_waiting: table "{table.name}": admission: got {table.admission!r}, wanted policies.AdmitByCount.'
        )
    keys, counts = np.asarray(keys, np.uint64), np.asarray(counts, np.uint32)
    entries = np.empty((keys.shape[0], _ENTRY_WORDS), np.uint32)
    entries[:, 0], entries[:, 1] = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
    entries[:, 2], entries[:, 3] = counts, number
    if spec.num_shards == 1:
        blocks, most = {0: entries}, len(entries)
    else:
        blocks = {shard: entries if spec.is_replicated else entries[owners == shard] for shard in shards.local()}
        most = max(map(len, blocks.values()))
        most = processes.greatest(most)
    padded = {
        shard: np.concatenate([part, np.tile(_NO_ENTRY, (most - len(part), 1))]) for shard, part in blocks.items()
    }
    return remaking(spec, store, most, shards, shards.put(padded))(store)


# Sizes ---------------------------------------------------------------------------------------------------------------


def remaking(
    spec: StoreSpec, store: StoreState, room: int, shards: Shards, more: Array | None = None
) -> Callable[[StoreState], StoreState]:
    """Prepares `sightings` that hold the waiting keys alone, with room for others: a quarter full at most.

    `more` has further entries `[num_entries, 4]` of all shards. `sightings` never shrink, so that programs stay the
    same. Everything that can fail fails here and changes nothing, except the allocation of the new array. The returned
    function donates its store, whose salt or rows may have changed since.
    """
    if not store.sightings:
        return lambda store: store
    num_buckets = store.sightings[0].shape[0] // spec.num_shards
    wanted = ROOM * (num_waiting(spec, store, shards) + room)
    while num_buckets * ENTRIES_PER_BUCKET < wanted:
        num_buckets *= 2
    rest = () if more is None else (more,)
    floors = tuple(spec.sighting_floors().tolist())
    program = _remade.lower(store.counters, (*store.sightings, *rest), num_buckets, floors, shards).compile()

    def remake(store: StoreState) -> StoreState:
        (old,) = store.sightings
        new, counters = program(store.counters, (old, *rest))
        old.delete()
        return dataclasses.replace(store, sightings=(new,), counters=counters)

    return remake


def num_waiting(spec: StoreSpec, store: StoreState, shards: Shards) -> int:
    """Counts the keys of all tables that wait for a row, in the fullest shard (waits for the device)."""
    return int(np.asarray(_most_waiting(store.sightings[0], tuple(spec.sighting_floors().tolist()), shards)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _most_waiting(sightings: Array, floors: tuple[int, ...], shards: Shards) -> Array:
    def of_shard(sightings: Array) -> Array:
        is_waiting = _is_waiting(sightings.reshape(-1, _ENTRY_WORDS), np.array(floors, np.uint32), jnp)
        num_waiting = is_waiting.sum(dtype=jnp.int32)
        return shards.max(num_waiting)

    return shards.run(of_shard, (sightings,), (shards.spec,), P())


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3, 4))
def _remade(
    counters: Array, parts: tuple[Array, ...], num_buckets: int, floors: tuple[int, ...], shards: Shards
) -> tuple[Array, Array]:
    def of_shard(counters: Array, *parts: Array) -> tuple[Array, Array]:
        entries = [part.reshape(-1, _ENTRY_WORDS) for part in parts]
        entries = entries[0] if len(entries) == 1 else jnp.concatenate(entries)
        return kernels.wait(counters, np.array(floors, np.uint32), entries, num_buckets)

    return shards.run(of_shard, (counters, *parts), (shards.spec,) * (1 + len(parts)), shards.spec)


def _is_waiting(entries: Any, floors: np.ndarray, xp: Any) -> Any:
    """Marks the entries `[num_entries, 4]` of keys that wait: seen, and not often enough."""
    counts, tables = entries[:, 2], entries[:, 3]
    is_waiting = xp.zeros(counts.shape, bool)
    for number, floor in enumerate(floors):
        is_waiting |= (tables == xp.uint32(number)) & (counts > xp.uint32(0)) & (counts < xp.uint32(floor))
    return is_waiting

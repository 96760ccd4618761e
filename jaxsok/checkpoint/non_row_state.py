"""Restores what is saved apart from rows: the step, words of the stores, and keys that wait for a row."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok import admission as admission_lib, policies, processes
from jaxsok.checkpoint import lineage as lineage_lib, manifest as manifest_lib
from jaxsok.checkpoint.files import LOG
from jaxsok.checkpoint.place import Restoring
from jaxsok.checkpoint.save import admission_of
from jaxsok.checkpoint.saved import Source
from jaxsok.checks import not_none
from jaxsok.collection import Collection
from jaxsok.operations import locate
from jaxsok.plan import owners_of
from jaxsok.records import join_records, regroup
from jaxsok.shards import local_parts
from jaxsok.specs import TableRef
from jaxsok.store import State, StoreState, with_store
from jaxsok.table_import import rows_in_use
from jaxsok.types import COUNTERS

WAITING_AT_A_TIME = 1 << 22  # keys that wait for a row: 64 MiB on the host


def add(source: Source, held: Restoring, names: Sequence[str]) -> None:
    """Restores what is saved apart from the rows of the tables `names`; a whole state also gets its step and a life."""
    collection, optimizer_state = held.collection, held.optimizer_state
    for name in names:
        _add_admission(source, held, locate(source.op, collection, name))
    if held.is_whole:
        state, step = held.state, jnp.asarray(source.manifest["step"], jnp.uint32)
        if collection.shards.is_mesh:
            step = jax.device_put(step, state.step.sharding)
        state = dataclasses.replace(state, step=step)
        state = _restore_evicted(source, collection, state, names)
        if optimizer_state != "initial":
            state = _with_globals(source, collection, state, names)
        is_exact = optimizer_state == "require"
        held.state = lineage_lib.begin_life(collection, state, source.manifest, is_exact=is_exact)


def add_store_words(source: Source, held: Restoring) -> None:
    """Restores salts and generations, where the same tables share a store; the index must be empty."""
    for s, spec in enumerate(held.collection.stores):
        if saved := source.store_with(spec):
            low, high = saved["salt"]
            saved_words = {"salt_low": low, "salt_high": high, "generation": saved["generation"]}
            words = np.array([saved_words.get(name, 0) for name in COUNTERS], np.uint32)
            held.state = _with_arrays(held.state, s, counters=_repeat(held.collection, words))


def note_keys(source: Source, collection: Collection) -> None:
    """Reports to `grow` how many keys a step had when the state was saved."""
    reports = {"keys_per_step": collection.growth.record_batch, "assigned_per_step": collection.growth.record_assign}
    for s, spec in enumerate(collection.stores):
        names = {table.name for table in spec.tables}
        for field, report in reports.items():
            total = 0
            for saved in source.manifest["stores"]:
                if names & set(saved["tables"]):
                    # The count is that of one shard; every shard of a replicated store has all keys.
                    total += saved[field] * (1 if saved["is_replicated"] else source.manifest["num_shards"])
            report(s, total if spec.is_replicated else -(-total // spec.num_shards))


def restore_looks(source: Source, held: Restoring) -> None:
    """Restores what `grow` had seen of full stores, so that they evict at the calls of a run that went on."""
    collection, state = held.collection, held.state
    for s, spec in enumerate(collection.stores):
        saved = source.store_with(spec)
        # On another number of shards, these counts are of other rows.
        if saved and source.manifest["num_shards"] == spec.num_shards:
            num_rows = int(rows_in_use(spec, state.stores[s], collection.shards).max())
            collection.growth.restore_looks(s, saved["looks"], num_rows, saved["most_positions"], state)


def _with_globals(source: Source, collection: Collection, state: State, names: Sequence[str]) -> State:
    """Restores optimizer state that belongs to no row, from the store of the first restored table of each."""
    for s, spec in enumerate(collection.stores):
        name = next((table.name for table in spec.tables if table.name in names), None)
        leaves, wanted = state.stores[s].globals_, spec.optimizer.global_names(spec.dim)
        if name is None or not leaves:
            continue
        saved = {entry["name"]: manifest_lib.array_from_json(entry) for entry in source.store_of(name)[1]["globals"]}
        restored, new = [], []
        for own, leaf in zip(wanted, leaves, strict=True):
            array = saved.get(own)
            if own is not None and array is not None and (array.shape, array.dtype) == (leaf.shape[1:], leaf.dtype):
                leaf = _repeat(collection, array[None])
            elif own is not None:
                new.append(own)
            restored.append(leaf)
        if new:
            text = '%s: table "%s": optimizer state of no row begins with its initial value: %s.'
            LOG.warning(text, source.op, name, ", ".join(new))
        state = _with_arrays(state, s, globals_=tuple(restored))
    return state


def _restore_evicted(source: Source, collection: Collection, state: State, names: Sequence[str]) -> State:
    """Restores counts of evicted rows, on the first shard (of replicated stores: on all)."""
    tables = source.manifest["tables"]
    for s, spec in enumerate(collection.stores):
        if not state.stores[s].table_evicted:
            continue
        saved = [tables[table.name]["num_evicted"] if table.name in names else 0 for table in spec.tables]
        counts = np.array(saved, np.uint64).astype(np.uint32)
        blocks = {shard: np.zeros_like(counts) for shard in collection.shards.local()}
        blocks |= {shard: counts.copy() for shard in blocks if shard == 0 or spec.is_replicated}
        state = _with_arrays(state, s, table_evicted=(collection.shards.put(blocks),))
    return state


def _with_arrays(state: State, s: int, **arrays: Any) -> State:
    return with_store(state, s, dataclasses.replace(state.stores[s], **arrays))


def _repeat(collection: Collection, block: np.ndarray) -> Any:
    """Makes an array with a copy of a block on each shard."""
    return collection.shards.put({shard: block.copy() for shard in collection.shards.local()})


def _add_admission(source: Source, held: Restoring, table: TableRef) -> None:
    name, admission = table.declared.name, table.declared.admission
    was, now = source.manifest["tables"][name]["admission"], admission_of(table.spec, table.declared)
    if was and now and was["by"] != now["by"]:
        text = '%s: table "%s": admission by %s was saved, wanted by %s: keys without a row are counted from 0.'
        LOG.warning(text, source.op, name, was["by"], now["by"])
    if isinstance(admission, policies.AdmitByCount):
        _add_waiting(source, held, table)
    if isinstance(admission, policies.AdmitByBloom):
        with processes.fail_together(source.op):
            _add_bloom(source, held, table)


def _add_waiting(source: Source, held: Restoring, table: TableRef) -> None:
    spec, s = table.spec, table.store
    held.change(lambda state: with_store(state, s, _forget_waiting(table, state.stores[s])))
    # Few large pieces: each costs a pass over all that wait.
    waiting = regroup(source.waiting_keys(table.declared.name), WAITING_AT_A_TIME, join_records)
    for some in processes.iterate_together(source.op, waiting):
        # A key seen often enough for a lower threshold waits for one more sight.
        counts = np.minimum(not_none(some.frequency), np.uint32(not_none(table.declared.admission).threshold - 1))
        owners = owners_of(spec, table.number, some.keys, held.collection.partition_owners)
        held.change(functools.partial(_add_waiting_keys, table, some.keys, counts, owners))


def _add_waiting_keys(table: TableRef, keys: np.ndarray, counts: np.ndarray, owners: np.ndarray, state: State) -> State:
    spec, store = table.spec, state.stores[table.store]
    store = admission_lib.with_waiting(spec, store, table.number, keys, counts, owners, table.shards)
    return with_store(state, table.store, store)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _forget_waiting(table: TableRef, store: StoreState) -> StoreState:
    def forget(part: StoreState) -> StoreState:
        return admission_lib.forget(table.spec, part, jnp.zeros((), jnp.uint32), cleared=table.number)

    return table.shards.run(forget, (store,), (table.shards.spec,), table.shards.spec)


def _add_bloom(source: Source, held: Restoring, table: TableRef) -> None:
    """Restores the table's part of the filter, where the shards are the same: it has no keys to deal it out by."""
    spec, name = table.spec, table.declared.name
    begin, size = spec.bloom_segments()[table.number]
    _, saved = source.store_of(name)
    old_begin, old_size = saved["bloom_segments"][saved["tables"].index(name)]
    was, wanted = source.manifest["tables"][name]["admission"], admission_of(spec, table.declared)
    is_same = was == wanted and old_size == size
    if not is_same and old_size:
        text = '%s: table "%s": its Bloom filter starts empty: %s was saved, wanted %s, and counters without keys '
        text += "stay on the shards where they were. Keys without a row are counted from 0."
        LOG.warning(text, source.op, name, was, wanted)
    (bloom,) = held.state.stores[table.store].bloom
    blocks = {}
    for shard, part in local_parts(bloom, spec.num_shards).items():
        counters = np.array(part).view(np.uint8)
        counters[begin : begin + size] = 0
        if is_same:
            words = source.bloom(name, 0 if spec.is_replicated else shard)
            counters[begin : begin + size] = words.view(np.uint8)[old_begin : old_begin + old_size]
        blocks[shard] = counters.view(np.uint32)
    held.state = _with_arrays(held.state, table.store, bloom=(table.shards.put(blocks),))

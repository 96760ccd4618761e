"""A table as records: key, row, row id, optimizer state; here as NumPy arrays on the host."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxsok.keys import from_words
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import PADDING_KEY


def export_table(spec: StoreSpec, store: StoreState, number: int) -> dict[str, Any]:
    """The rows of one table of a store, shard by shard, in the order of their row ids.

    Waits for the device and holds the whole table in host memory. In several processes each gives the rows of its
    own shards; of a replicated table every process gives all.

    Args:
      spec: of the store.
      store: not donated.
      number: of the table in the store.

    Returns:
      `keys` uint64[num_rows], `rows` [num_rows, dim] in the table's dtype, `row_ids` uint32[num_rows] within the shard,
      and `state`, a dict of float32[num_rows, dim or 1] by the name of the optimizer's state; on a mesh also `shards`
      uint32[num_rows].

    Example:
      A table that holds 7 → `{"keys": [7], "rows": [[...]], "row_ids": [0], "state": {"accumulator": [[0.1, ...]]}}`.
    """
    parts = [_parts(leaf, spec.num_shards) for leaf in jax.tree.leaves((store.records, store.rows, store.states))]
    tree = jax.tree.structure((store.records, store.rows, store.states))
    shards = sorted(parts[0])
    exported = []
    for shard in shards[:1] if spec.is_replicated else shards:
        records, rows, states = jax.tree.unflatten(tree, [part[shard] for part in parts])
        exported.append(_export_shard(spec, records, rows, states, number))
    table = {name: _joined([one[name] for one in exported]) for name in exported[0]}
    if spec.num_shards > 1:
        sizes = [one["keys"].shape[0] for one in exported]
        table["shards"] = np.repeat(np.array(shards[: len(sizes)], np.uint32), sizes)
    return table


def _joined(parts: list[Any]) -> Any:
    """Arrays end to end, and dicts of them, whose order stays as it is."""
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def _parts(array: Array, num_shards: int) -> dict[int, np.ndarray]:
    """The parts of a split array that this process has, by shard."""
    size = array.shape[0] // num_shards
    if array.is_fully_addressable:
        return dict(enumerate(np.split(np.asarray(array), num_shards)))
    return {(shard.index[0].start or 0) // size: np.asarray(shard.data) for shard in array.addressable_shards}


def _export_shard(
    spec: StoreSpec, all_records: tuple, all_rows: tuple, all_states: tuple, number: int
) -> dict[str, Any]:
    kept: list[np.ndarray] = []
    keys, rows = [], []
    states: dict[str, list[np.ndarray]] = {state.name: [] for state in spec.state_specs}
    start = 0
    for s, words in enumerate(all_records):
        slab_keys = from_words(words[:, :2])
        mine = np.flatnonzero((slab_keys != np.uint64(PADDING_KEY)) & (words[:, 2] == number))
        keys.append(slab_keys[mine])
        rows.append(all_rows[s][mine])
        for state, slabs in zip(spec.state_specs, all_states, strict=True):
            states[state.name].append(slabs[s][mine])
        kept.append((mine + start).astype(np.uint32))
        start += words.shape[0]
    return {
        "keys": np.concatenate(keys),
        "rows": np.concatenate(rows),
        "row_ids": np.concatenate(kept),
        "state": {name: np.concatenate(parts) for name, parts in states.items()},
    }

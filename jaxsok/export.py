"""A table as records: key, row, row id, optimizer state; here as NumPy arrays on the host."""

from typing import Any

import numpy as np

from jaxsok.keys import from_words
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import PADDING_KEY


def export_table(spec: StoreSpec, store: StoreState, number: int) -> dict[str, Any]:
    """The rows of one table of a store, in the order of their row ids.

    Waits for the device and holds the whole table in host memory.

    Args:
      spec: of the store.
      store: not donated.
      number: of the table in the store.

    Returns:
      `keys` uint64[num_rows], `rows` float32[num_rows, dim], `row_ids` uint32[num_rows], and `state`, a dict of
      float32[num_rows, dim or 1] by the name of the optimizer's state.

    Example:
      A table that holds 7 → `{"keys": [7], "rows": [[...]], "row_ids": [0], "state": {"accumulator": [[0.1, ...]]}}`.
    """
    kept: list[np.ndarray] = []
    keys, rows = [], []
    states: dict[str, list[np.ndarray]] = {state.name: [] for state in spec.state_specs}
    start = 0
    for s, records in enumerate(store.records):
        words = np.asarray(records)
        slab_keys = from_words(words[:, :2])
        mine = np.flatnonzero((slab_keys != np.uint64(PADDING_KEY)) & (words[:, 2] == number))
        keys.append(slab_keys[mine])
        rows.append(np.asarray(store.rows[s])[mine])
        for state, slabs in zip(spec.state_specs, store.states, strict=True):
            states[state.name].append(np.asarray(slabs[s])[mine])
        kept.append((mine + start).astype(np.uint32))
        start += words.shape[0]
    return {
        "keys": np.concatenate(keys),
        "rows": np.concatenate(rows),
        "row_ids": np.concatenate(kept),
        "state": {name: np.concatenate(parts) for name, parts in states.items()},
    }

"""The numbers of rows, read and written outside kernels; only this module knows where they lie.

The numbers of a row are the row itself and its optimizer state. They lie in slabs; the row's record and statistics lie
at the same place of other slabs. Callers name rows by row id, or by place in a slab. Allocation is in store.py.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxsok import tiers
from jaxsok.kernels.call import StoreArrays
from jaxsok.kernels.table import scatter
from jaxsok.shards import without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import RowIds


class RowSlab(NamedTuple):
    """Everything that one slab has of each row."""

    records: UInt32[Array, "size 4"]
    rows: Float[Array, "size dim"]
    states: tuple[Float32[Array, "size _"], ...]
    statistics: UInt32[Array, "size 2"] | None


def slabs_of(store: StoreArrays) -> list[RowSlab]:
    """Returns the slabs of a store (or of one shard's parts) in the order of row ids."""
    return [
        RowSlab(
            store.records[s],
            store.rows[s],
            tuple(slabs[s] for slabs in store.states),
            store.statistics[s] if store.statistics else None,
        )
        for s in range(len(store.records))
    ]


@without_mesh
@jax.jit
def read_lines(slabs: Any, places: Int32[Array, " num_lines"]) -> Any:
    """Reads lines of slabs (any tree of them), by place."""
    return jax.tree.map(lambda slab: slab.at[places].get(mode="clip"), slabs)


@without_mesh
@functools.partial(jax.jit, static_argnums=2)
def cut_lines(slabs: Any, start: Int32[Array, ""], size: int) -> Any:
    """Copies consecutive lines of slabs (any tree of them)."""
    return jax.tree.map(lambda slab: lax.dynamic_slice_in_dim(slab, start, size), slabs)


def write_lines(
    spec: StoreSpec,
    store: StoreState,
    seed: UInt32[Array, "2"],
    row_ids: RowIds,
    rows: Float[Array, "num_keys dim"],
    states: Mapping[int, Float32[Array, "num_keys _"]],
    statistics: UInt32[Array, "num_keys 2"] | None = None,
) -> StoreState:
    """Overwrites rows in the donated store; NO_ROW is ignored.

    Equal row ids must have equal lines. `rows` have the dtype of the store; `states` has optimizer state by number.
    State that is not named, and statistics if None, stay as they are.
    """
    store, view, slots = tiers.brought(spec, store, seed, row_ids)
    new_states = tuple(
        scatter(slots, states[k], slabs) if k in states else slabs for k, slabs in enumerate(view.states)
    )
    view = dataclasses.replace(view, rows=scatter(slots, rows, view.rows), states=new_states)
    store = tiers.returned(store, view, writes=True)
    if statistics is None:
        return store
    return dataclasses.replace(store, statistics=scatter(row_ids, statistics, store.statistics))

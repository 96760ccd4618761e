"""Reads and writes the numbers of rows outside kernels; only this module knows where they lie.

The numbers of a row are the row itself and its optimizer state. They lie in slabs; the row's record and statistics lie
at the same place of other slabs. Callers name rows by row id, or by place in a slab. Allocation is in store.py.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxsok import tiers
from jaxsok.kernels.table import scatter
from jaxsok.shards import without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import RowIds, Seed

Numbers = tuple[Float[Array, "num_lines dim"], tuple[Float32[Array, "num_lines _"], ...]]
"""Rows and their optimizer state."""


class RowLines(NamedTuple):
    """Records, numbers, optimizer state and statistics of some rows."""

    records: UInt32[Array, "num_lines 4"]
    rows: Float[Array, "num_lines dim"]
    states: tuple[Float32[Array, "num_lines _"], ...]
    statistics: UInt32[Array, "num_lines 2"] | None


@dataclasses.dataclass(frozen=True)
class RowSlab:
    """One slab of a store, or of a shard's part of one, to be read by place."""

    spec: StoreSpec
    store: StoreState
    seed: Seed | UInt32[np.ndarray, "2"]
    number: int

    @property
    def records(self) -> UInt32[Array, "size 4"]:
        """The key and table of each row."""
        return self.store.records[self.number]

    @property
    def statistics(self) -> UInt32[Array, "size 2"] | None:
        """Last step and frequency of each row; None: not kept."""
        return self.store.statistics[self.number] if self.store.statistics else None

    @property
    def rows(self) -> Float[Array, "size dim"]:
        """The rows, where they lie on the device."""
        return self.store.rows[self.number]

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.records.shape[0]

    @property
    def start(self) -> int:
        """The row id of the first row."""
        return sum(records.shape[0] for records in self.store.records[: self.number])

    def read(self, places: Int32[np.ndarray, " num_lines"], *, with_state: bool = True) -> RowLines:
        """Reads rows, and if asked for their state, by place."""
        if not self.store.tier:
            return read_lines(self._lines if with_state else self._lines._replace(states=()), places)
        records, statistics = read_lines((self.records, self.statistics), places)
        row_ids = (places + self.start).astype(np.uint32)
        rows, states = _read_through_tier(self.spec, self.store, self.seed, row_ids)
        return RowLines(records, rows, states if with_state else (), statistics)

    def cut(self, start: int, size: int) -> RowLines:
        """Copies consecutive rows."""
        if self.store.tier:
            return self.read(np.arange(start, start + size, dtype=np.int32))
        return cut_lines(self._lines, np.int32(start), size)

    @property
    def _lines(self) -> RowLines:
        states = tuple(slabs[self.number] for slabs in self.store.states)
        return RowLines(self.records, self.rows, states, self.statistics)


def slabs_of(spec: StoreSpec, store: StoreState, seed: Seed | UInt32[np.ndarray, "2"]) -> list[RowSlab]:
    """Returns the slabs of a store (or of one shard's parts) in the order of row ids; `seed` is the state's."""
    return [RowSlab(spec, store, seed, number) for number in range(len(store.records))]


def numbers_in_host_memory(spec: StoreSpec, store: StoreState, seed: Seed, row_ids: RowIds) -> Numbers:
    """Reads rows of a store in host memory by row id, and leaves its cache as it is."""
    _, view, slots, _ = tiers.bring_rows(spec, store, seed, row_ids, keeps=False)

    def lines_of(slabs: tuple[Array, ...]) -> Array:
        cached, *others = slabs
        lines = cached.at[slots].get(mode="clip")
        for staged in others:  # one at most
            is_staged = slots >= jnp.uint32(cached.shape[0])
            others_lines = staged.at[slots - jnp.uint32(cached.shape[0])].get(mode="clip")
            lines = jnp.where(is_staged[:, None], others_lines, lines)
        return lines

    return lines_of(view.rows), tuple(lines_of(slabs) for slabs in view.states)


_read_through_tier = without_mesh(jax.jit(numbers_in_host_memory, static_argnums=0))


@without_mesh
@jax.jit
def read_lines(slabs: Any, places: Int32[Array, " num_lines"]) -> Any:
    """Reads rows of slabs (any tree of them), by place."""
    return jax.tree.map(lambda slab: slab.at[places].get(mode="clip"), slabs)


@without_mesh
@functools.partial(jax.jit, static_argnums=2)
def cut_lines(slabs: Any, start: Int32[Array, ""], size: int) -> Any:
    """Copies consecutive rows of slabs (any tree of them)."""
    return jax.tree.map(lambda slab: lax.dynamic_slice_in_dim(slab, start, size), slabs)


def write_lines(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    row_ids: RowIds,
    rows: Float[Array, "num_keys dim"],
    states: Mapping[int, Float32[Array, "num_keys _"]],
    statistics: UInt32[Array, "num_keys 2"] | None = None,
) -> StoreState:
    """Overwrites rows in the donated store; NO_ROW is ignored, and equal row ids must have equal lines.

    `states` has optimizer state by number; state that is not named, and statistics if None, stay as they are.
    """
    store, view, slots, _ = tiers.bring_rows(spec, store, seed, row_ids)
    new_states = tuple(
        scatter(slots, states[k], slabs) if k in states else slabs for k, slabs in enumerate(view.states)
    )
    view = dataclasses.replace(view, rows=scatter(slots, rows, view.rows), states=new_states)
    store = tiers.give_back(store, view, writes=True)
    if statistics is None:
        return store
    return dataclasses.replace(store, statistics=scatter(row_ids, statistics, store.statistics))

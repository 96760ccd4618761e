"""What one lookup knows beside the rows: its features, the distinct keys if they were sought, then row ids.

A plan made apart (`Collection.plan`) reads no table, so it can run a batch ahead. A lookup without one finds rows
key by key in one fused call, and its plan carries row ids alone. A plan is never differentiated.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from jaxsok.features import Features, StoreFeatures
from jaxsok.kernels import plan as kernels
from jaxsok.types import Inverse, Keys, RowIds, TableIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Distinct:
    """The distinct (table, key) pairs of a batch, by first occurrence."""

    unique: Keys
    """PADDING_KEY beyond num_unique."""
    unique_tables: TableIds
    inverse: Inverse
    """For each key of the batch its position in `unique`; num_keys for padding."""
    multiplicity: Int32[Array, " num_keys"]
    """Occurrences of each; 0 beyond num_unique."""
    num_unique: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Found:
    """What a lookup found out about one store's keys."""

    row_ids: RowIds
    generation: UInt32[Array, ""]
    """Of the store when it was looked up; an erase since then makes the plan stale."""
    counts: Int32[Array, "num_tables num_counts"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One lookup's plan, by store."""

    features: Features
    distinct: tuple[Distinct, ...] | None = None
    """From `Collection.plan`; None where the lookup was fused."""
    found: tuple[Found, ...] | None = None
    """From `Collection.lookup`; None before it."""


def distinct_keys(features: StoreFeatures) -> Distinct:
    """Makes one store's keys distinct.

    Cost:
      One pass over the keys and a scratch index of 32 bytes a key. Reads no table.

    Example:
      Keys `[9, 7, 9]` of one table → unique `[9, 7]`, inverse `[0, 1, 0]`, multiplicity `[2, 1, 0]`, num_unique 2.
    """
    return Distinct(*kernels.plan(features.operands(), features.num_tiles))


def empty_distinct() -> Distinct:
    """The distinct keys of no features."""
    none = jnp.zeros(0, jnp.int32)
    words = jnp.zeros((0, 2), jnp.uint32)
    return Distinct(words, jnp.zeros(0, jnp.uint32), none, none, jnp.zeros((), jnp.int32))

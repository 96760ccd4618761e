"""What one lookup knows beside the rows: its features, the distinct keys if they were sought, then row ids.

A plan made apart (`Collection.plan`) reads no table, so it can run a batch ahead. On one device a lookup without one
finds rows key by key in one fused call, and its plan carries row ids alone. On a mesh the distinct keys of each shard,
ordered by owner, are what it asks of the others (exchange.py). A plan is never differentiated.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from jaxsok.features import Features, StoreFeatures
from jaxsok.kernels import plan as kernels
from jaxsok.specs import StoreSpec
from jaxsok.types import NUM_PARTITIONS, Inverse, Keys, RowIds, TableIds


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
class Requests:
    """What one shard asks of the others for one store: its distinct (table, key) pairs, owner by owner."""

    requests: UInt32[Array, "num_keys 4"]
    """Key low, key high, table, uses; PADDING_KEY beyond the last one."""
    inverse: Inverse
    """For each key of the batch its place in `requests`; num_keys for padding."""
    starts: Int32[Array, " num_owners_plus_1"]
    """Where the requests of each owner begin, and where the last ones end."""
    hashes: UInt32[Array, "_ 2"]
    """By place, what decides a request's round: (low, high). Rising within an owner; one line if there is one round."""
    load: Int32[Array, "1 2"]
    """The same on all shards: most requests from one shard to one owner, and most to one owner from all shards."""
    received: UInt32[Array, "_ 4"] | None = None
    """What the others ask of this shard, `send_capacity` requests each, if the keys were exchanged ahead."""
    slots: Inverse | None = None
    """With `received`: for each key of the batch the line of its row among what comes back; -1 for none."""
    send_capacity: int = dataclasses.field(default=0, metadata={"static": True})
    """With `received`: requests for one owner, in one round. Else: of each round."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Found:
    """What a lookup found out about one store's keys."""

    row_ids: RowIds
    """By key of the batch; on a mesh by request received, or none if there may have been several rounds."""
    generation: UInt32[Array, "1"]
    """Of the store when it was looked up; an erase since then makes the plan stale."""
    counts: Int32[Array, "num_tables num_counts"]
    num_rounds: Int32[Array, "1"]
    """Passes of the exchange; 0 on one device."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One lookup's plan, by store."""

    features: Features
    distinct: tuple[Distinct, ...] | None = None
    """From `Collection.plan` on one device; None where the lookup was fused."""
    asked: tuple[Requests, ...] | None = None
    """On a mesh, from `Collection.plan` or `Collection.lookup`."""
    found: tuple[Found, ...] | None = None
    """From `Collection.lookup`; None before it."""

    @property
    def is_looked_up(self) -> bool:
        """Whether `update` can take it."""
        return self.found is not None


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


def default_owners(num_shards: int) -> np.ndarray:
    """The shard of each of the 4,096 partitions: equal contiguous ranges.

    Example:
      >>> owners = default_owners(3)
      >>> owners[:2].tolist(), owners[-1:].tolist(), np.bincount(owners).tolist()
      ([0, 0], [2], [1366, 1365, 1365])
    """
    return (np.arange(NUM_PARTITIONS, dtype=np.uint64) * num_shards // NUM_PARTITIONS).astype(np.uint32)


def requests_of(
    spec: StoreSpec, features: StoreFeatures, owners: UInt32[Array, " num_partitions"], *, by_hash: bool
) -> tuple[UInt32[Array, "num_keys 4"], Inverse, Int32[Array, " num_owners_plus_1"], UInt32[Array, "_ 2"]]:
    """Makes one store's keys distinct and orders them by owner.

    Args:
      spec: of the store.
      features: of one shard.
      owners: the shard of each partition.
      by_hash: whether requests of one owner are ordered by the hash that decides their round, else by first
        occurrence.

    Returns:
      requests, inverse, starts, hashes: see `Requests`.

    Cost:
      As `distinct_keys`, and a radix sort of the distinct keys by owner (and by 64 bits of hash).
    """
    num_owners = 1 if spec.is_replicated else spec.num_shards
    return kernels.plan_requests(
        features.operands(),
        spec.table_words(),
        owners,
        num_tiles=features.num_tiles,
        num_shards=num_owners,
        by_hash=by_hash,
    )

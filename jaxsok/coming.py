"""The keys of the steps until the next call of `grow`: positions, known on the host, and distinct new keys.

Positions are shapes: they cost no wait, and count padding, repeats and keys that have a row. If the positions do not
fit, `count` asks the device how many rows the batches need, and which rows they use. It is a collective: on a mesh the
keys go to their owners as in a lookup, and in several processes all call it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32, UInt32

from jaxsok import exchange, policies, table
from jaxsok.features import Features, StoreFeatures, single_key_layouts
from jaxsok.kernels import table as kernels
from jaxsok.shards import ONE_DEVICE, Shards
from jaxsok.specs import ExchangeSpec, StoreSpec
from jaxsok.store import StoreState, num_buckets_of
from jaxsok.types import BUCKET_WORDS, ENTRIES_PER_BUCKET, NO_ROW, NUM_PARTITIONS, Keys


@dataclasses.dataclass(frozen=True)
class Coming:
    """The keys that steps until the next call of `grow` may insert, in the fullest shard."""

    positions: list[int]
    """Positions for keys, by store: no more keys can be new."""
    features: tuple[Features, ...] = ()
    """Batches whose keys can be counted; each one batch, or several stacked along a leading axis."""
    uncounted: list[int] = dataclasses.field(default_factory=list)
    """Positions that are not in `features`, by store."""
    is_given: bool = True
    """True if the caller passed a batch; otherwise this follows from the batches so far."""

    def plus(self, more: "Coming") -> "Coming":
        """Adds the keys of further batches."""
        positions = [sum(pair) for pair in zip(self.positions, more.positions, strict=True)]
        uncounted = [sum(pair) for pair in zip(self.uncounted, more.uncounted, strict=True)]
        return Coming(positions, self.features + more.features, uncounted, self.is_given)


def num_stacked(features: Features) -> int:
    """Counts the batches that were stacked along a leading axis, as `lax.scan` takes them; 0: it is one batch."""
    for store in features.stores:
        if store.keys.ndim == 3:
            return store.keys.shape[0]
    return 0


# Counting on the device ----------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 4))
def count(
    spec: StoreSpec,
    store: StoreState,
    features: Sequence[StoreFeatures],
    partition_owners: UInt32[Array, " _"],
    shards: Shards = ONE_DEVICE,
) -> tuple[Int32[Array, "3"], Bool[Array, " _"]]:
    """Counts the distinct keys that need a new row, and marks the rows of the others.

    A key whose table admits by count needs one if its sightings and its occurrences here reach the threshold. If
    admission is by chance or by Bloom filter, every key without a row counts.

    Returns three numbers, each the greatest over the shards: the new keys, the new keys plus the rows in use, and the
    rows that a batch asks for; and marks the rows of capacity that a batch asks for.
    """

    def part(store: StoreState, keys: tuple[Array, ...], owners: Array) -> tuple[Array, Array]:
        words, runs = _join(features, keys)
        if spec.num_shards == 1:
            # The keys lie table by table.
            table_ids = np.concatenate([np.full(size, number, np.uint32) for number, size in runs])
            num_new, is_used = _new_keys(spec, store, words, table_ids)
        else:
            num_new, is_used = _new_keys_of_all(shards, spec, store, words, runs, owners)
        in_use = store.num_rows().astype(jnp.int32)
        numbers = jnp.stack([num_new, num_new + in_use, is_used.sum(dtype=jnp.int32)])
        return shards.max(numbers), is_used

    keys = tuple(part.keys for part in features)
    of_keys = tuple(shards.stacked_spec if words.ndim == 3 else shards.spec for words in keys)
    return shards.run(part, (store, keys, partition_owners), (shards.spec, of_keys, P()), (P(), shards.spec))


def _join(features: Sequence[StoreFeatures], keys: tuple[Array, ...]) -> tuple[Keys, list[tuple[int, int]]]:
    by_table: dict[int, list[Array]] = {}
    for part, words in zip(features, keys, strict=True):
        for layout in part.layouts:
            if layout.num_keys:
                start, end = layout.key_start, layout.key_start + layout.num_keys
                by_table.setdefault(layout.table, []).append(words[..., start:end, :].reshape(-1, 2))
    parts = [(number, jnp.concatenate(by_table[number])) for number in sorted(by_table)]
    return jnp.concatenate([part for _, part in parts]), [(number, part.shape[0]) for number, part in parts]


def _new_keys(
    spec: StoreSpec, store: StoreState, keys: Keys, table_ids: Any, uses: Array | None = None
) -> tuple[Int32[Array, ""], Bool[Array, " capacity"]]:
    """Counts the distinct keys of one shard that get a new row, and marks the rows that are asked for."""
    table_ids = jnp.asarray(table_ids)
    row_ids = table.find(store, keys, table_ids)
    is_new = (row_ids == jnp.uint32(NO_ROW)) & table.is_key(keys)
    place = jnp.where(row_ids == jnp.uint32(NO_ROW), jnp.uint32(store.capacity), row_ids).astype(jnp.int32)
    is_used = jnp.zeros(store.capacity, bool).at[place].set(True, mode="drop")
    # A scratch index of the keys, as of those that wait for a row: each once, with its occurrences.
    occurrences = jnp.where(is_new, jnp.uint32(1) if uses is None else uses, jnp.uint32(0))
    entries = jnp.stack([keys[:, 0], keys[:, 1], occurrences, table_ids], axis=1)
    floors = np.full(len(spec.tables), 0xFFFFFFFF, np.uint32)
    scratch, _ = kernels.wait(store.counters, floors, entries, num_buckets_of(keys.shape[0]))
    distinct = scratch.reshape(-1, BUCKET_WORDS // ENTRIES_PER_BUCKET)
    needs_row = table.is_key(distinct[:, :2])
    if store.sightings:
        needs_row &= _is_admitted(spec, store, distinct)
    return needs_row.sum(dtype=jnp.int32), is_used


def _is_admitted(spec: StoreSpec, store: StoreState, distinct: UInt32[Array, "_ 4"]) -> Bool[Array, " _"]:
    numbers = jnp.minimum(distinct[:, 3], jnp.uint32(len(spec.tables) - 1))  # empty entries have none
    seen = kernels.find(store.sightings[0], store.counters, distinct[:, :2], numbers)
    seen = jnp.where(seen == jnp.uint32(NO_ROW), jnp.uint32(0), seen)
    by_count = np.array([isinstance(declared.admission, policies.AdmitByCount) for declared in spec.tables])
    floors = jnp.asarray(np.where(by_count, spec.sighting_floors(), 0).astype(np.uint32))
    return seen + distinct[:, 2] >= floors[numbers]


_Counted = tuple[Int32[Array, ""], Bool[Array, " capacity"]]
"""The new keys, and the rows that the batches ask for."""


def _new_keys_of_all(
    shards: Shards,
    spec: StoreSpec,
    store: StoreState,
    keys: Keys,
    runs: Sequence[tuple[int, int]],
    owners: UInt32[Array, f"{NUM_PARTITIONS}"],
) -> _Counted:
    """Applies `_new_keys` to the keys of all shards that this one owns."""
    # One feature for each table, with one key a sample.
    layouts = single_key_layouts(*zip(*runs, strict=True))
    features = StoreFeatures(keys, None, None, layouts)
    between = exchange.Exchange(shards, ExchangeSpec())
    spec = dataclasses.replace(spec, sends_bags=False)  # distinct keys alone travel here
    asked = exchange.ask(between, spec, features, owners)

    def add(counted: _Counted, received: UInt32[Array, "_ 4"]) -> _Counted:
        num_new, is_used = _new_keys(spec, store, received[:, :2], received[:, 2], received[:, 3])
        return counted[0] + num_new, counted[1] | is_used

    def rounds(counted: _Counted) -> _Counted:
        order = exchange.HashOrder.of(spec, features, asked.send_capacity)
        # A key is in one round on all shards: none is counted twice.
        return exchange.over_rounds(
            between, spec, [order], lambda counted, parts: add(counted, parts[0].requests(order.lines)), counted
        )

    first = (jnp.zeros((), jnp.int32), jnp.zeros(store.capacity, bool))
    return exchange.in_one_round_or_more([asked], lambda asked: add(first, asked[0].received), rounds)

"""The plan of a lookup: its features, on several devices the requests of the shards to each other, then row ids.

On one device a lookup finds rows key by key in one fused call, so a plan made apart (`Collection.plan`) has nothing but
the features. On several devices the distinct keys of each shard, ordered by owner, are its requests to the others
(exchange.py); these read no table, so a plan made apart can run a batch ahead. A plan is never differentiated.
"""

import dataclasses
import zlib
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt8, UInt32, UInt64

from jaxsok.checks import not_none
from jaxsok.features import Features, StoreFeatures
from jaxsok.kernels import plan as kernels
from jaxsok.kernels.tickets import Ticket, tickets_digest
from jaxsok.kernels.tier import SlotList
from jaxsok.specs import StoreSpec
from jaxsok.types import NO_ROW, NUM_PARTITIONS, Digest, Inverse, Keys, PartitionOwners, RowIds, TableCounts

# Constants of ffi/core/hash.h.
GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, then multiply; and a last shift
_LAST_SHIFT = 31
_PARTITION_BITS = NUM_PARTITIONS.bit_length() - 1

Word = UInt32[Array, " _"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestList:
    """The distinct (table, key) pairs of one shard's batch, owner by owner, each owner's by first occurrence."""

    lines: UInt32[Array, "num_keys 4"]
    """Key low, key high, table, uses; PADDING_KEY beyond the last one."""
    inverse: Inverse
    """The place in `lines` of each key of the batch; num_keys for padding."""
    starts: Int32[Array, " num_owners_plus_1"]
    """Places at which the requests of each owner begin, and at which the last ones end."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """The requests of shards to each other for one store, as far as one round of the exchange has room."""

    received: UInt32[Array, "num_lines 4"]
    """The requests to this shard, lines as in `RequestList`: the first `send_capacity` from each shard."""
    slots: Inverse
    """Line of each key's row among those that come back; -1 for none."""
    load: Int32[Array, "1 2"]
    """Most requests from one shard to one owner, and most to one owner from all shards; the same on all shards."""
    digest: Digest
    """Digest of the keys of all shards, for the lookup's ticket."""
    listed: RequestList | None = None
    """All requests of this shard, which go in several rounds where one has no room; None: what has no room is left
    out."""
    send_capacity: int = dataclasses.field(default=0, metadata={"static": True})
    """Requests for one owner in one round."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uses:
    """The uses of bags that came to one shard for one store, where shards exchange partial bags."""

    received: UInt32[Array, "num_lines num_words"]
    """Key low, key high: `send_capacity` lines from each shard, in the order of its batch; PADDING_KEY beyond. Where a
    feature has weights also the table with `LEFT_OUT`, and the bits of the weight."""
    offsets: Int32[Array, " num_offsets"]
    """Places at which the bags of each shard begin among its lines, and the number of its uses."""
    scales: Float32[Array, " num_bags"]
    """The factor on the sum of each bag of this shard; `ZERO_DIVISOR` (-0) where the divisor is zero."""
    counts: Int32[Array, "num_tables 2"]
    """Padding of this shard's batch by table, and uses that the send capacity kept back."""
    load: Int32[Array, "1 2"]
    """The load of `Requests`, counted in uses."""
    digest: Digest
    num_rounds: Int32[Array, "1"]
    send_capacity: int = dataclasses.field(default=0, metadata={"static": True})


Loads: TypeAlias = tuple[Int32[Array, "num_shards 2"] | None, ...]
"""`Requests.load` by store; None where a store has no features."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a lookup for one store's keys."""

    row_ids: RowIds
    """Row id of each key of the batch; on a mesh of each request received, NO_ROW after several rounds."""
    counts: TableCounts
    num_rounds: Int32[Array, "1"]
    """Passes of the exchange; 0 on one device."""
    has_row: Bool[Array, " num_keys"] | None = None
    """Marks listed requests that got a row, after several rounds; None where there is no list."""
    sorted_uses: UInt8[Array, " num_bytes"] | None = None
    """The uses of the batch by row, sorted for the update while rows crossed the wire; None: the update sorts them."""
    slots: SlotList | None = None
    """The slots of these rows in the cache, where they lie in host memory; None: they are found when needed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one lookup, by store."""

    features: Features
    asked: tuple[Requests | Uses | None, ...] | None = None
    """Exchanged requests, made by `Collection.plan` or `Collection.lookup` on a mesh."""
    found: tuple[Found, ...] | None = None
    """Rows, found by `Collection.lookup`; None before it."""
    ticket: Ticket | None = None
    """An update takes it out of the state's open tickets (tickets.py). Two words, then the generation of each store:
    rows that left a store since then make the plan stale. On a mesh each shard has one."""
    following: tuple["Plan", ...] = ()
    """Plans of the next batches, from a pipeline with lookups ahead: this batch's lookup looks them up too."""
    staleness: int = dataclasses.field(default=0, metadata={"static": True})
    """Updates that the rows of `following` may miss; with 0 they are read after the update of this batch."""
    updates_before: int = dataclasses.field(default=1, metadata={"static": True})
    """Updates between this batch's lookup and the next one's in a loop without lookups ahead: 0 or 1."""

    def asked_of(self, store: int) -> Requests:
        """Returns this shard's requests for a store that has features; on a mesh."""
        asked = not_none(self.asked)[store]
        assert isinstance(asked, Requests)
        return asked

    def uses_of(self, store: int) -> Uses:
        """Does `asked_of` for a store whose shards exchange partial bags."""
        asked = not_none(self.asked)[store]
        assert isinstance(asked, Uses)
        return asked

    def found_of(self, store: int) -> Found:
        """Returns what the lookup found in a store."""
        return not_none(self.found)[store]

    def digests(self) -> tuple[Digest, ...]:
        """Returns a digest of the keys of each store, which tells batches apart; on several shards that of all."""
        if self.asked is None:
            return tuple(tickets_digest(part.keys) for part in self.features.stores if part.layouts)
        return tuple(asked.digest for asked in self.asked if asked is not None)

    def form(self) -> int:
        """Returns a number that follows from the shapes and layouts of its arrays."""
        leaves, structure = jax.tree.flatten((self.features, self.asked))
        return zlib.crc32(repr((structure, [leaf.shape for leaf in leaves])).encode())

    def __repr__(self) -> str:
        """Names its features and progress; reads no array, so it waits for nothing."""
        is_exchanged = any(asked is not None for asked in self.asked or ())
        steps = ["looked up" if self.is_looked_up else "not looked up"] + ["keys exchanged"] * is_exchanged
        return f"Plan({', '.join(steps)}; {self.features!r})"

    @property
    def is_looked_up(self) -> bool:
        """True if `update` can take it."""
        return self.found is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
    """A lookup ahead: its batch's step is yet to come."""

    found: tuple[Found, ...]
    """Its counts are complete once the rows are read."""
    ticket: Ticket
    digests: tuple[Digest, ...]
    """Those of its batch (`Plan.digests`)."""
    form: int = dataclasses.field(metadata={"static": True})
    embeddings: dict[str, Array] | None = None
    """None: rows are read when the batch is looked up."""


def default_owners(num_shards: int) -> np.ndarray:
    """Returns the shard of each of the 4,096 partitions: equal contiguous ranges."""
    return (np.arange(NUM_PARTITIONS, dtype=np.uint64) * num_shards // NUM_PARTITIONS).astype(np.uint32)


def owners_of(
    spec: StoreSpec, number: int, keys: UInt64[np.ndarray, " num_keys"], partition_owners: UInt32[np.ndarray, " _"]
) -> UInt32[np.ndarray, " num_keys"]:
    """Returns each key's shard, on the host (`OwnerOf` in ffi/core/hash.h); of a replicated store 0."""
    low, high, pinned = _place_words(spec, number)
    if pinned != NO_ROW:
        return np.full(len(keys), pinned, np.uint32)
    return partition_owners[partitions_of(keys, np.uint64(low | high << 32)).astype(np.int64)]


def partitions_of(
    keys: UInt64[np.ndarray, " num_keys"], names: UInt64[np.ndarray, " num_keys"] | np.uint64
) -> UInt64[np.ndarray, " num_keys"]:
    """Returns the partition of each key, on the host (`PartitionOf` in ffi/core/hash.h); `names` are tables' words."""
    hashes = mix(mix(keys ^ names) + np.uint64(GOLDEN))
    return hashes >> np.uint64(64 - _PARTITION_BITS)


def owner_of(spec: StoreSpec, number: int, keys: Keys, partition_owners: PartitionOwners) -> UInt32[Array, " num_keys"]:
    """Does `owners_of` for words on the device: some two hundred 32-bit operations a key."""
    low, high, pinned = _place_words(spec, number)
    if pinned != NO_ROW:
        return jnp.full(keys.shape[0], jnp.uint32(pinned))
    words = keys[:, 0] ^ jnp.uint32(low), keys[:, 1] ^ jnp.uint32(high)
    _, top = mix_words(*plus(*mix_words(*words), GOLDEN))
    return partition_owners.at[top >> jnp.uint32(32 - _PARTITION_BITS)].get(mode="promise_in_bounds")


def _place_words(spec: StoreSpec, number: int) -> tuple[int, int, int]:
    """Returns the words of a table's name, and the shard that has all of it, or NO_ROW."""
    words = spec.table_words()[number].tolist()
    return words[0], words[1], 0 if spec.num_shards == 1 else words[5]


def mix(x: UInt64[np.ndarray, " _"]) -> UInt64[np.ndarray, " _"]:
    """Mixes 64-bit words (`Mix64` in ffi/core/hash.h)."""
    for shift, factor in _MIX:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(_LAST_SHIFT))


def mix_words(low: Word, high: Word) -> tuple[Word, Word]:
    """Mixes 64 bits, given as two words (`Mix64` in ffi/core/hash.h)."""
    for shift, factor in _MIX:
        low, high = _times(*_xor_with_shift(low, high, shift), factor)
    return _xor_with_shift(low, high, _LAST_SHIFT)


def _xor_with_shift(low: Word, high: Word, shift: int) -> tuple[Word, Word]:
    """Xors a number with itself shifted right by 1 to 31 bits."""
    right, left = jnp.uint32(shift), jnp.uint32(32 - shift)
    return low ^ (low >> right | high << left), high ^ high >> right


def plus(low: Word, high: Word, term: int) -> tuple[Word, Word]:
    """Adds a constant modulo 2**64."""
    total = low + jnp.uint32(term & 0xFFFFFFFF)
    return total, high + jnp.uint32(term >> 32) + (total < low).astype(jnp.uint32)


def _times(low: Word, high: Word, factor: int) -> tuple[Word, Word]:
    """Multiplies modulo 2**64; the full product of the low words is computed from 16-bit halves."""
    a, b = jnp.uint32(factor & 0xFFFFFFFF), jnp.uint32(factor >> 32)
    half, bits = jnp.uint32(0xFFFF), jnp.uint32(16)
    cross = (low >> bits) * (a & half), (low & half) * (a >> bits)
    middle = ((low & half) * (a & half) >> bits) + (cross[0] & half) + (cross[1] & half)
    carried = (low >> bits) * (a >> bits) + (cross[0] >> bits) + (cross[1] >> bits) + (middle >> bits)
    return low * a, carried + low * b + high * a


def requests_of(
    spec: StoreSpec,
    features: StoreFeatures,
    owners: PartitionOwners,
    *,
    by_hash: bool = False,
    send_capacity: int = 0,
) -> kernels.OrderedRequests:
    """Makes one store's keys distinct and orders them by owner.

    Requests of one owner are ordered by the hash that deals them to the rounds of an update (`by_hash`), else by first
    occurrence.
    """
    num_shards = 1 if spec.is_replicated else spec.num_shards
    how = {"num_tiles": features.num_tiles, "num_shards": num_shards, "by_hash": by_hash}
    return kernels.plan_requests(features.operands(), spec.table_words(), owners, **how, send_capacity=send_capacity)

"""The all-to-all between shards: keys to their owners, rows to the askers, gradients to the owners (decision D5).

Every shard sends each owner `send_capacity` lines, padded: a dense all-to-all of static shape. In a replicated store
every shard is an owner: lines are all-gathered, and each shard reads the rows from its own copy.

The requests of a shard lie owner by owner, each owner's by first occurrence, and a round sends the next ones to each.
Normally one round has room for all. Otherwise all requests arrive, in rounds, before any is looked up, so that new rows
get their ids by source shard and first occurrence whatever the capacity.

Gradients that have no room in one round go by slices of the hash of their key. All shards agree on the end of a slice:
the least hash that would be one too many for any of them. So every round fits, every key is in one round on all shards,
all gradients of a row meet in one round, and its optimizer steps once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxsok import annotations, plan as plan_lib, table
from jaxsok.features import StoreFeatures
from jaxsok.kernels.window import ReceivedLines
from jaxsok.optimizers.program import vary_alike
from jaxsok.plan import RequestList, Requests
from jaxsok.shards import Shards
from jaxsok.specs import ExchangeSpec, StoreSpec, sum_pinned_and_spread
from jaxsok.types import PADDING_KEY, Digest, PartitionOwners
from jaxsok.windows import Windows

SLACK = 1.25  # default send capacity over what uniform owners would need
CAPACITY_STEPS = 8  # send capacities in an octave: a plan's load is rounded up by at most an eighth
MOST_LINES = 2  # lines received in one round over the keys of a shard's batch: beyond it there are more rounds
SMALL_ENOUGH = 1024  # a send capacity whose memory is not worth a round
_LEAST = 16  # lines of the smallest default capacity
DIVIDED = ("mean", "sqrtn")  # combiners that divide the sum of a bag

_ALL_ONES = np.uint32(0xFFFFFFFF)
PADDING_REQUEST = np.array([PADDING_KEY & 0xFFFFFFFF, PADDING_KEY >> 32, 0, 0], np.uint32)


def default_send_capacity(spec: StoreSpec, features: StoreFeatures) -> int:
    """Returns a quarter more than the most loaded owner gets from distinct keys that are spread evenly."""
    amounts = ((spec.tables[layout.table], layout.num_keys) for layout in features.layouts)
    pinned, spread = sum_pinned_and_spread(amounts, spec.num_shards)
    share = spread if spec.is_replicated else spread / spec.num_shards + pinned
    least = max(_LEAST, len(spec.tables))
    return max(least, min(most_send_capacity(spec, features), -(-int(share * SLACK) // 8) * 8))


def most_send_capacity(spec: StoreSpec, features: StoreFeatures) -> int:
    """Returns the largest send capacity for a shard's batch; beyond it, further rounds take less memory."""
    num_keys = sum(layout.num_keys for layout in features.layouts)
    if spec.sends_bags:  # a lookup without a plan has room for all of them as well
        return max(_LEAST, len(spec.tables), num_keys)
    most = min(num_keys, max(SMALL_ENOUGH, -(-MOST_LINES * num_keys // spec.num_shards)))
    return max(_LEAST, len(spec.tables), most)


def rounded_capacity(load: int) -> int:
    """Rounds a load up to one of at most eight capacities in each octave, so that few programs serve all batches."""
    step = max(_LEAST, 1 << max(0, (load - 1).bit_length() - CAPACITY_STEPS.bit_length()))
    return max(1, -(-load // step)) * step


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange between the shards of a collection."""

    shards: Shards
    spec: ExchangeSpec
    windows: Windows | None = None
    """None: the dense wire."""

    def route(self, spec: StoreSpec, send_capacity: int) -> "Route":
        """Returns the route of a store's lines."""
        return Route(self.shards, spec.is_replicated, send_capacity, self.windows)

    def all_to_all(self, lines: Array) -> Array:
        """Sends each shard its part of lines, equal parts by shard, over windows if there are any."""
        if self.windows is not None:
            return self.windows.exchange(lines)
        return lax.all_to_all(lines, self.shards.axis, 0, 0, tiled=True)

    def all_gather(self, lines: Array) -> Array:
        """Sends every shard all lines."""
        if self.windows is None:
            return lax.all_gather(lines, self.shards.axis, axis=0, tiled=True)
        num_shards = self.shards.num_shards
        copies = jnp.broadcast_to(lines[None], (num_shards, *lines.shape))
        return self.windows.exchange(copies.reshape(-1, *lines.shape[1:]))

    def sends_sums_by_kernels(self, spec: StoreSpec, features: StoreFeatures, asked: Requests) -> bool:
        """Returns whether kernels alone can sum, send and apply the gradients of a batch, through windows."""
        is_scaled = spec.row_gradient != "sum" or self.spec.gradients in SCALED_DTYPES
        if self.windows is None or spec.is_replicated or asked.listed is not None or is_scaled:
            return False
        if has_unused_keys(features):
            return False
        return asked.send_capacity >= features.keys.shape[0] or not has_divided_bags(features)


@dataclasses.dataclass(frozen=True)
class Route:
    """The way of lines between the askers and the owners of one store."""

    shards: Shards
    is_replicated: bool
    send_capacity: int
    windows: Windows | None = None

    @property
    def num_owners(self) -> int:
        """The number of destinations of a shard's lines."""
        return 1 if self.is_replicated else self.shards.num_shards

    @property
    def num_sent(self) -> int:
        """The number of lines that a shard sends in a round."""
        return self.num_owners * self.send_capacity

    @jax.named_scope("to_owners")
    def to_owners(self, lines: Array) -> Array:
        """Sends lines, equal parts by owner; each owner gets a part from each shard, `[num_shards * part, ...]`."""
        if self.is_replicated:
            return lax.all_gather(lines, self.shards.axis, axis=0, tiled=True)
        return lax.all_to_all(lines, self.shards.axis, 0, 0, tiled=True)

    @jax.named_scope("to_askers")
    def to_askers(self, lines: Array) -> Array:
        """Sends a result for each line back, in the order in which the asker sent them."""
        if self.is_replicated:
            return lax.dynamic_slice_in_dim(lines, self.shards.index() * self.send_capacity, self.send_capacity)
        return lax.all_to_all(lines, self.shards.axis, 0, 0, tiled=True)

    def requests_to_owners(
        self,
        lines: UInt32[Array, "num_keys line_words"],
        starts: Int32[Array, " num_owners_plus_1"],
        digest: Digest,
        offsets: Int32[Array, "num_owners num_offsets"],
    ) -> ReceivedLines:
        """Sends each owner its first requests, and offsets."""
        if self.windows is not None and not self.is_replicated:
            return self.windows.send_lines(lines, starts, digest, offsets, self.send_capacity)
        requests = Round.numbered(self, starts, 0, lines.shape[0]).select(lines)
        counts = (starts[1:] - starts[:-1]).astype(jnp.uint32)
        to_all = jnp.broadcast_to(jnp.concatenate([digest[0], counts]), (self.num_owners, 2 + self.num_owners))
        words = jnp.concatenate([to_all, offsets.astype(jnp.uint32)], axis=1)
        if self.is_replicated:
            received, words = self.to_owners(requests), lax.all_gather(words[0], self.shards.axis)
        else:  # in one exchange: each part ends with the words
            num_words, width = words.shape[1], lines.shape[1]
            tail = jnp.pad(words, ((0, 0), (0, -num_words % width))).reshape(self.num_owners, -1, width)
            parts = jnp.concatenate([requests.reshape(self.num_owners, -1, width), tail], axis=1)
            came = self.to_owners(parts.reshape(-1, width)).reshape(parts.shape)
            words = came[:, self.send_capacity :].reshape(self.num_owners, -1)[:, :num_words]
            received = came[:, : self.send_capacity].reshape(-1, width)
        digests, counts, offsets = jnp.split(words, (2, 2 + self.num_owners), axis=1)
        return ReceivedLines(received, offsets.astype(jnp.int32), load_of(counts), digest_of_all(digests))


# The wire ------------------------------------------------------------------------------------------------------------

# Rows are scaled until their largest number is below this power of two, the greatest that the dtype holds with room.
_TOP_EXPONENT = {"float16": 15, "float8_e4m3fn": 8}

SCALED_DTYPES = tuple(_TOP_EXPONENT)
"""Dtypes that travel with a scale for each row."""


def gathered_dtype(dtype: str | None, own: str) -> str:
    """Returns the dtype in which kernels write and read rows that travel as `dtype`; XLA converts to scaled dtypes."""
    if dtype is None:
        return own
    return dtype if dtype == "bfloat16" else "float32"


def send_rows(rows: Float[Array, "_ dim"], dtype: str | None, send: Callable[[Array], Array]) -> Float[Array, "_ dim"]:
    """Sends rows by `send` in another dtype on the wire; None: their own. See `gathered_dtype`."""
    rows = table.round_to(rows, gathered_dtype(dtype, rows.dtype.name))
    return _decode(send(_encode(rows, dtype)), dtype, rows.dtype)


def _encode(rows: Float[Array, "_ dim"], dtype: str | None) -> Array:
    """Returns rows as they travel: unchanged, or bytes of 16- or 8-bit numbers followed by the scale of the row."""
    if dtype in (None, "float32", "bfloat16"):
        # As integers: back ends without 16-bit collectives would widen them on the wire.
        return lax.bitcast_convert_type(rows, jnp.uint16) if rows.dtype.itemsize == 2 else rows
    largest = jnp.abs(rows).max(axis=1, keepdims=True)
    _, exponent = jnp.frexp(largest)
    shift = jnp.where(jnp.isfinite(largest) & (largest > 0), _TOP_EXPONENT[dtype] - exponent, 0)
    shift = jnp.clip(shift, -126, 126)
    small = lax.bitcast_convert_type((rows * _power_of_two(shift)).astype(dtype), jnp.uint8)
    scale = lax.bitcast_convert_type(_power_of_two(-shift), jnp.uint8)
    return jnp.concatenate([small.reshape(rows.shape[0], -1), scale.reshape(rows.shape[0], -1)], axis=1)


def _decode(lines: Array, dtype: str | None, own: np.dtype) -> Float[Array, "_ dim"]:
    """Returns lines in the dtype `own` that they had before; scaled numbers become float32."""
    if dtype in (None, "float32", "bfloat16"):
        return lax.bitcast_convert_type(lines, own) if lines.dtype == jnp.uint16 else lines
    num_lines, itemsize = lines.shape[0], jnp.dtype(dtype).itemsize
    scale = lax.bitcast_convert_type(lines[:, -4:], jnp.float32)
    small = lines[:, :-4]
    small = lax.bitcast_convert_type(small.reshape(num_lines, -1, 2) if itemsize == 2 else small, jnp.dtype(dtype))
    numbers = small.astype(jnp.float32)
    # Rounded up, the greatest numbers would become infinite.
    bound = jnp.where(jnp.isfinite(numbers), jnp.finfo(jnp.float32).max, jnp.inf)
    return jnp.clip(numbers * scale[:, None], -bound, bound)


def _power_of_two(exponent: Int32[Array, "..."]) -> Float32[Array, "..."]:
    """Computes 2 to the exponent from its bits: exact."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def wire_bytes(dim: int, dtype: str | None, own: str = "float32") -> int:
    """Returns the bytes of one row on the wire, with its scale, where it travels as `dtype`; None: as `own`."""
    if dtype is None:
        return dim * jnp.dtype(own).itemsize
    return {"float32": 4 * dim, "bfloat16": 2 * dim, "float16": 2 * dim + 4, "float8_e4m3fn": dim + 4}[dtype]


# Plans ---------------------------------------------------------------------------------------------------------------


@annotations.annotate_store
def ask(
    exchange: Exchange,
    spec: StoreSpec,
    features: StoreFeatures,
    owners: PartitionOwners,
    send_capacity: int | None = None,
) -> Requests:
    """Exchanges the keys of one round; with `send_capacity` the others are left out, else they are listed."""
    capacity = send_capacity or exchange.spec.send_capacity or default_send_capacity(spec, features)
    ordered = plan_lib.requests_of(spec, features, owners, send_capacity=capacity)
    route = exchange.route(spec, capacity)
    none = jnp.zeros((route.num_owners, 0), jnp.int32)
    came = route.requests_to_owners(ordered.requests, ordered.starts, ordered.digest, none)
    listed = RequestList(ordered.requests, ordered.inverse, ordered.starts) if send_capacity is None else None
    return Requests(came.lines, ordered.slots, came.load, came.digest, listed, capacity)


def load_of(counts: UInt32[Array, "num_shards num_owners"]) -> Int32[Array, "1 2"]:
    """Returns the most lines from one shard to one owner, and the most to one owner from all shards."""
    counts = counts.astype(jnp.int32)
    return jnp.stack([counts.max(), counts.sum(axis=0, dtype=jnp.int32).max()])[None]


def digest_of_all(digests: UInt32[Array, "num_shards 2"]) -> Digest:
    """Combines the digests of all shards' keys; the result depends on which shard had which keys."""
    place = jnp.arange(digests.shape[0], dtype=jnp.uint32)
    low, high = plan_lib.mix_words(digests[:, 0] ^ place, digests[:, 1])
    return jnp.stack([low.sum(dtype=jnp.uint32), high.sum(dtype=jnp.uint32)])[None]


# Rounds --------------------------------------------------------------------------------------------------------------


def num_rounds_of(most: Int32[Array, ""], send_capacity: int) -> Int32[Array, ""]:
    """Returns the rounds in which each owner gets its next `send_capacity` requests, of at most `most`; at least 1."""
    return jnp.maximum(1, -(-most // send_capacity))


def receive_all(
    route: Route,
    received: UInt32[Array, "num_lines line_words"],
    lines: UInt32[Array, "num_keys line_words"],
    starts: Int32[Array, " num_owners_plus_1"],
    num_rounds: Int32[Array, ""],
) -> UInt32[Array, "num_shards num_keys_in_rounds line_words"]:
    """Sends the rest of the requests after the first round; each shard's lie in their order, padding after them."""
    num_shards, capacity, width = route.shards.num_shards, route.send_capacity, lines.shape[1]
    size = -(-lines.shape[0] // capacity) * capacity
    room = jnp.broadcast_to(PADDING_REQUEST[:width], (num_shards, size, width))
    # Not `.at[].set`: where the slice is the whole array, its empty index ends XLA's compiler (jaxlib 0.11.2).
    room = lax.dynamic_update_slice_in_dim(
        vary_as(room, received), received.reshape(num_shards, capacity, width), 0, axis=1
    )

    @jax.named_scope("round")
    def receive(number: Array, room: Array) -> Array:
        more = Round.numbered(route, starts, number, lines.shape[0]).requests(lines)
        return lax.dynamic_update_slice_in_dim(
            room, more.reshape(num_shards, capacity, width), number * capacity, axis=1
        )

    return lax.fori_loop(1, num_rounds, receive, room)


def in_one_round_or_more(
    asked: Sequence[Requests], one_round: Callable[[Sequence[Requests]], Any], rounds: Callable[[Any], Any]
) -> Any:
    """Returns `one_round(asked)` if one round has room for the requests of all plans, else the result of `rounds`.

    Without room `one_round` gets padding alone, and `rounds` its result, of the same type.
    """
    if all(requests.listed is None for requests in asked):
        return one_round(asked)
    fits = functools.reduce(jnp.logical_and, [each.load[0, 0] <= each.send_capacity for each in asked])
    result = one_round(
        [dataclasses.replace(each, received=jnp.where(fits, each.received, PADDING_REQUEST)) for each in asked]
    )
    # A loop that runs at most once: XLA would copy the tables for branches.
    _, result = lax.while_loop(
        lambda loop: ~loop[0], lambda loop: vary_as((jnp.bool_(True), rounds(loop[1])), fits), vary_as((fits, result))
    )
    return result


def vary_as(tree: Any, *others: Any) -> Any:
    """Makes the leaves of a tree vary over the mesh axes of all leaves, as a loop's carry must; `others` count too."""
    leaves, structure = jax.tree.flatten((tree, others))
    return jax.tree.unflatten(structure, vary_alike(leaves))[0]


@dataclasses.dataclass(frozen=True)
class HashOrder:
    """The requests of one plan for one store, owner by owner, each owner's by the hash that deals them to rounds."""

    lines: UInt32[Array, "num_keys 4"]
    inverse: Int32[Array, " num_positions"]
    """The field of `RequestList`, in this order."""
    starts: Int32[Array, " num_owners_plus_1"]
    hashes: UInt32[Array, "num_keys 2"]
    """Hash by place, (low, high); rising within an owner."""
    send_capacity: int

    @classmethod
    def of(cls, spec: StoreSpec, features: StoreFeatures, send_capacity: int) -> "HashOrder":
        """Makes the keys of a batch distinct again, in this order."""
        owners = jnp.asarray(plan_lib.default_owners(spec.num_shards))
        ordered = plan_lib.requests_of(spec, features, owners, by_hash=True)
        return cls(ordered.requests, ordered.inverse, ordered.starts, ordered.hashes, send_capacity)


@dataclasses.dataclass(frozen=True)
class Round:
    """The requests of one plan that one round sends."""

    route: Route
    place: Int32[Array, " num_sent"]
    """The place of each line to send among the requests; num_keys where there is none."""
    is_real: Bool[Array, " num_sent"]

    @classmethod
    def between(
        cls, route: Route, begins: Int32[Array, " num_owners"], ends: Int32[Array, " num_owners"], num_keys: int
    ) -> "Round":
        """Makes a round that sends each owner its requests from a begin to an end."""
        place = begins[:, None] + jnp.arange(route.send_capacity, dtype=jnp.int32)[None, :]
        is_real = place < ends[:, None]
        return cls(route, jnp.where(is_real, place, num_keys).reshape(-1), is_real.reshape(-1))

    @classmethod
    def numbered(
        cls, route: Route, starts: Int32[Array, " num_owners_plus_1"], number: int | Array, num_keys: int
    ) -> "Round":
        """Makes a round that sends each owner its next requests."""
        return cls.between(route, starts[:-1] + number * route.send_capacity, starts[1:], num_keys)

    def select(self, lines: UInt32[Array, "num_keys line_words"]) -> UInt32[Array, "num_sent line_words"]:
        """Selects the requests to send; padding where there is none."""
        return jnp.where(
            self.is_real[:, None], lines.at[self.place].get(mode="clip"), PADDING_REQUEST[: lines.shape[1]]
        )

    def requests(self, lines: UInt32[Array, "num_keys line_words"]) -> UInt32[Array, "_ line_words"]:
        """Sends the requests of this round to their owners."""
        return self.route.to_owners(self.select(lines))

    def take(self, lines: Array) -> Array:
        """Selects the lines of this round from those of all requests; zeros where nothing is sent."""
        return lines.at[self.place].get(mode="fill", fill_value=0)


def over_rounds(
    exchange: Exchange,
    spec: StoreSpec,
    ordered: Sequence[HashOrder],
    body: Callable[[Any, list[Round]], Any],
    carry: Any,
) -> Any:
    """Calls `body(carry, rounds)`, with the plans' parts of each round, until every request was sent."""
    routes = [exchange.route(spec, order.send_capacity) for order in ordered]

    @jax.named_scope("round")
    def go_on(loop: tuple) -> tuple:
        carry, begins, _ = loop
        bound, is_last = _common_end(exchange.shards, ordered, begins)
        ends = [_ends(order, begin, bound, is_last) for order, begin in zip(ordered, begins, strict=True)]
        rounds = [
            Round.between(route, begin, end, order.lines.shape[0])
            for route, order, begin, end in zip(routes, ordered, begins, ends, strict=True)
        ]
        return body(carry, rounds), ends, is_last

    begins = [order.starts[:-1] for order in ordered]
    first = vary_as((carry, begins), [order.lines for order in ordered])
    carry, *_ = lax.while_loop(lambda loop: ~loop[2], go_on, (*first, jnp.bool_(False)))
    return carry


def _common_end(
    shards: Shards, ordered: Sequence[HashOrder], begins: Sequence[Array]
) -> tuple[UInt32[Array, "2"], Bool[Array, ""]]:
    """Finds the hash (high, low) at which a round ends on all shards, and whether the rest fits; one all-reduce."""
    highs, lows, is_over = [], [], []
    for order, begin in zip(ordered, begins, strict=True):
        at = begin + order.send_capacity  # the first request of each owner that the round has no room for
        over = at < order.starts[1:]
        hashes = order.hashes.at[at].get(mode="fill", fill_value=0)
        highs.append(jnp.where(over, hashes[:, 1], _ALL_ONES))
        lows.append(jnp.where(over, hashes[:, 0], _ALL_ONES))
        is_over.append(over)
    high, low, over = jnp.concatenate(highs), jnp.concatenate(lows), jnp.concatenate(is_over)
    least = high.min()
    words = jnp.stack([least, jnp.where(high == least, low, _ALL_ONES).min(), over.any().astype(jnp.uint32)])
    # Each shard writes its own line, so that the sum is a gather whose result is known to be the same everywhere.
    lines = jnp.zeros((shards.num_shards, 3), jnp.uint32)
    lines = lax.psum(lines.at[shards.index()].set(words), shards.axis)
    least = lines[:, 0].min()
    bound = jnp.stack([least, jnp.where(lines[:, 0] == least, lines[:, 1], _ALL_ONES).min()])
    return bound, ~lines[:, 2].any()


def _ends(
    ordered: HashOrder, begins: Array, bound: UInt32[Array, "2"], is_last: Bool[Array, ""]
) -> Int32[Array, " num_owners"]:
    """Returns for each owner the end of the requests whose hash is below the bound; the last round takes all."""
    high, low = ordered.hashes[:, 1], ordered.hashes[:, 0]
    is_below = (high < bound[0]) | ((high == bound[0]) & (low < bound[1])) | is_last
    place = jnp.arange(ordered.hashes.shape[0], dtype=jnp.int32)[None, :]
    is_next = (place >= begins[:, None]) & (place < ordered.starts[1:, None]) & is_below[None, :]
    return begins + is_next.sum(axis=1, dtype=jnp.int32)


def has_divided_bags(features: StoreFeatures) -> bool:
    """Returns whether a bag of several keys is divided by something that depends on all its keys."""
    return any(layout.hotness != 1 and layout.combiner in DIVIDED for layout in features.layouts)


def has_unused_keys(features: StoreFeatures) -> bool:
    """Returns whether a key of a bag may not count as a use of its row: weights can make the divisor zero."""
    return any(layout.weights_start >= 0 and layout.combiner in DIVIDED for layout in features.layouts)


@functools.partial(jax.jit, inline=True)
def uses_of_rows(row_ids: UInt32[Array, " _"], uses: Int32[Array, " _"]) -> Int32[Array, " _"]:
    """Sums for each line the uses of its row, over all lines of that row."""
    order = jnp.argsort(row_ids)
    rows, sums = row_ids[order], jnp.cumsum(uses[order])
    first = jnp.searchsorted(rows, rows, side="left", method="sort")
    last = jnp.searchsorted(rows, rows, side="right", method="sort") - 1
    before = jnp.where(first > 0, sums[jnp.maximum(first - 1, 0)], 0)
    return jnp.zeros_like(uses).at[order].set(sums[last] - before)

"""Partial bags between shards: owners sum the rows of a bag that they have (decision 0019).

A shard sends every use of its bags to the owner of the row, in the order of its batch. An owner receives a batch of its
own, with a part of every bag of every shard: it looks this batch up, and updates with it, as one device does with its
batch. Sums of bags go back, a line per bag and owner; the gradient of a bag goes to all owners. The shard of the batch
adds the sums in the order of the owners and divides them (mean, sqrtn): only it has all keys of the bag.

No use is left out where a plan has no send capacity: uses go in as many rounds as the fullest pair of shards needs,
before anything is looked up. So all bits are the same whatever the capacity, and rows get their ids by shard and first
occurrence.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxsok import annotations, exchange as exchange_lib, norms, table, tiers, update
from jaxsok.checks import not_none
from jaxsok.exchange import DIVIDED, SCALED_DTYPES, Exchange
from jaxsok.features import FeatureLayout, StoreFeatures
from jaxsok.gradients import Gradients, Used, concatenate, gradients_by_bag, join_features
from jaxsok.kernels import lookup as lookup_kernels, plan as plan_kernels, update as update_kernels
from jaxsok.kernels.tickets import tickets_digest
from jaxsok.kernels.tier import SlotList
from jaxsok.lookup import Owner, StoreLookup, StoreRead
from jaxsok.plan import Found, Plan, Uses
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import (
    BAGS_PER_TILE,
    COUNTS,
    KEY_WORDS,
    MAX_FEATURES,
    NO_ROW,
    PartitionOwners,
    RowIds,
    TableCounts,
)

_FOUND, _PADDING = COUNTS.index("num_found"), COUNTS.index("num_padding")
_MISSING, _REFUSED = COUNTS.index("num_missing"), COUNTS.index("num_refused")
_UNKNOWN_WORD = 6  # of a table's line: kTableUnknown in ffi/core/layout.h


# Plans ---------------------------------------------------------------------------------------------------------------


@annotations.annotate_store
def ask(
    exchange: Exchange,
    spec: StoreSpec,
    features: StoreFeatures,
    owners: PartitionOwners,
    send_capacity: int | None = None,
) -> Uses:
    """Sends the uses of bags to the owners of their rows, in one round if `send_capacity` is given, else in several."""
    num_shards, num_words = spec.num_shards, features.use_words
    sizes = {"num_tiles": features.num_tiles, "num_shards": num_shards, "num_bags": _num_bags(features)}
    sizes["num_words"] = num_words
    uses, starts, offsets, scales = plan_kernels.plan_uses(features.operands(), spec.table_words(), owners, **sizes)
    capacity = send_capacity or exchange.spec.send_capacity or exchange_lib.default_send_capacity(spec, features)
    route = exchange.route(spec, capacity)
    came = route.requests_to_owners(uses, starts, tickets_digest(features.keys), offsets)
    received, num_rounds, room = came.lines, jnp.int32(1), capacity
    if send_capacity is None:
        num_rounds = exchange_lib.num_rounds_of(came.load[0, 0], capacity)
        lines = exchange_lib.receive_all(route, received, uses, starts, num_rounds)
        received, room, capacity = lines.reshape(-1, num_words), None, lines.shape[1]
    return Uses(
        received,
        came.offsets.reshape(-1),
        scales,
        _count_unsent(spec, features, offsets, room),
        came.load,
        came.digest,
        num_rounds[None],
        send_capacity=capacity,
    )


def _count_unsent(
    spec: StoreSpec, features: StoreFeatures, offsets: Int32[Array, "num_shards _"], room: int | None
) -> Int32[Array, "num_tables 2"]:
    """Counts by table the positions that are padding, and the uses for which an owner has no room."""
    borders = [layout.bag_start for layout in features.layouts] + [_num_bags(features)]
    at_borders = offsets[:, np.array(borders)]
    of_features = jnp.diff(at_borders).sum(axis=0, dtype=jnp.int32)
    num_keys = np.array([layout.num_keys for layout in features.layouts], np.int32)
    kept_back = jnp.zeros_like(of_features)
    if room is not None:
        kept_back = of_features - jnp.diff(jnp.minimum(at_borders, room)).sum(axis=0, dtype=jnp.int32)
    lines = jnp.stack([num_keys - of_features, kept_back], axis=1)
    tables = np.array([layout.table for layout in features.layouts])
    return jnp.zeros((len(spec.tables), 2), jnp.int32).at[tables].add(lines)


def _num_bags(features: StoreFeatures) -> int:
    return sum(layout.num_bags for layout in features.layouts)


def _tables_by_line(
    features: StoreFeatures, offsets: Int32[Array, "num_shards num_bags_plus_1"], num_lines: int
) -> UInt32[Array, " num_shards_times_num_lines"]:
    """Returns the table of each use that arrived, from the place among those of its shard; 0 for padding."""
    places, table = jnp.arange(num_lines, dtype=jnp.int32)[None], 0
    tables = jnp.zeros((offsets.shape[0], num_lines), jnp.uint32)
    starts = [(layout.bag_start, layout.table) for layout in features.layouts] + [(_num_bags(features), 0)]
    for first_bag, next_table in starts:  # a difference for each change: one fused pass, without a search
        if next_table != table:
            change = jnp.uint32((next_table - table) % 2**32)
            tables += jnp.where(places >= offsets[:, first_bag, None], change, jnp.uint32(0))
            table = next_table
    return tables.reshape(-1)


@dataclasses.dataclass(frozen=True)
class _Received:
    """The batch that a shard got from all shards: a feature for each, with all of its bags."""

    features: StoreFeatures
    table_ids: UInt32[Array, " num_lines"]
    is_left_out: Bool[Array, " num_lines"] | None
    """Marks uses whose bag has a divisor of zero: their rows take no step. None: without weights there are none."""


def _received_batch(spec: StoreSpec, features: StoreFeatures, uses: Uses) -> _Received:
    """Returns the batch that an owner received; `features` are this shard's own, shaped as those of all."""
    size, num_bags, is_weighted = uses.send_capacity, _num_bags(features), features.is_weighted
    layouts = [
        FeatureLayout(
            name=str(shard),
            table=0,
            combiner="sum",
            num_keys=size,
            num_bags=num_bags,
            hotness=0,
            embedding_shape=(num_bags,),
            key_start=shard * size,
            bag_start=shard * num_bags,
            offsets_start=shard * (num_bags + 1),
            num_offsets=num_bags + 1,
            weights_start=shard * size if is_weighted else -1,
            tile_start=shard * max(1, -(-num_bags // BAGS_PER_TILE)),
        )
        for shard in range(spec.num_shards)
    ]
    if not is_weighted:
        tables = _tables_by_line(features, uses.offsets.reshape(spec.num_shards, -1), size)
        return _Received(StoreFeatures(uses.received, uses.offsets, None, tuple(layouts)), tables, None)
    keys, tables = uses.received[:, :KEY_WORDS], uses.received[:, 2]
    weights, bit = lax.bitcast_convert_type(uses.received[:, 3], jnp.float32), jnp.uint32(plan_kernels.LEFT_OUT)
    return _Received(StoreFeatures(keys, uses.offsets, weights, tuple(layouts)), tables & ~bit, tables >= bit)


# Lookups -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BagsOwner(Owner):
    """A lookup in which owners sum the rows of bags that they have, and the shard of a batch adds the sums."""

    asked: Uses

    def lookup(self, store: StoreState) -> StoreLookup:
        """Looks up one store."""
        return *self.read(*self.index(store)), self.digest()

    @annotations.annotate_store
    def index(self, store: StoreState) -> tuple[StoreState, Found]:
        """Finds or inserts the rows of the uses that arrived."""
        store, row_ids, counts = self._find_uses(store, _received_batch(self.spec, self.features, self.asked))
        padding, kept_back = self.asked.counts.T
        counts = counts.at[:, _PADDING].set(padding).at[:, _REFUSED].add(kept_back)
        return store, Found(row_ids, counts, self.asked.num_rounds)

    @annotations.annotate_store
    def read(self, store: StoreState, found: Found) -> StoreRead:
        """Does the rest of a lookup: sums the rows in each bag of each shard, and sends the sums."""
        spec, features, seed = self.spec, self.features, self.seed
        received = _received_batch(spec, features, self.asked)
        sums_of, lines = _batch_of_sums(spec, features)
        shapes = [(*layout.combined_shape, spec.dim) for layout in features.layouts]

        def make_reading(words: np.ndarray) -> lookup_kernels.Reading:
            return lookup_kernels.Reading(words, seed, sums_of.operands(), features.num_tiles, shapes)

        windows, on_wire = self.exchange.windows, self.exchange.spec.rows
        is_by_xla = table.list_xla_tables(spec, is_find=self.is_find)
        dtype = exchange_lib.gathered_dtype(on_wire, "float32")
        fits_kernels = on_wire not in SCALED_DTYPES and (dtype == "float32" or spec.dtype != "float16")
        if windows is not None and not is_by_xla and fits_kernels:
            windows.reserve(jnp.dtype(dtype).itemsize * spec.dim * lines.shape[0])
            store, view, slots, known = tiers.bring_rows(
                spec, store, seed, found.row_ids, found.slots, keeps=not self.is_find
            )
            reading, owned = make_reading(self._words_to_read()), received.features
            of_owned = owned.operands(), owned.num_tiles, slots, received.table_ids
            counters, values = lookup_kernels.lookup_bags_window(windows.number, view, reading, *of_owned, lines, dtype)
            store = tiers.give_back(store, dataclasses.replace(view, counters=counters))
        else:
            store, sums, known = self._sum_rows(store, received, found)
            sums = exchange_lib.send_rows(sums, on_wire, self.exchange.all_to_all)
            counters, _, values = lookup_kernels.lookup_planned(
                store.counters, make_reading(spec.table_words()), lines, (sums,)
            )
            store = dataclasses.replace(store, counters=counters)
        values = [
            table.round_to(_scale(value, self.asked.scales, layout), spec.embedding_dtype)
            for value, layout in zip(values, features.layouts, strict=True)
        ]
        return store, dataclasses.replace(found, slots=known), values

    def _find_uses(self, store: StoreState, received: _Received) -> tuple[StoreState, RowIds, TableCounts]:
        """Finds or inserts the rows of the uses that arrived; counts them by table, without padding."""
        spec, keys, table_ids = self.spec, received.features.keys, received.table_ids
        if not self.is_find:
            store, row_ids, counts = table.find_or_insert(spec, store, self.seed, keys, table_ids, step=self.step)
            return table.touch(spec, store, row_ids, None, not_none(self.clock)), row_ids, counts
        row_ids = table.find(store, keys, table_ids)
        is_of_table = table_ids[:, None] == jnp.arange(len(spec.tables), dtype=jnp.uint32)[None, :]
        num_uses = (is_of_table & table.is_key(keys)[:, None]).sum(axis=0, dtype=jnp.int32)
        num_found = (is_of_table & (row_ids != jnp.uint32(NO_ROW))[:, None]).sum(axis=0, dtype=jnp.int32)
        counts = jnp.zeros((len(spec.tables), len(COUNTS)), jnp.int32)
        return store, row_ids, counts.at[:, _FOUND].set(num_found).at[:, _MISSING].set(num_uses - num_found)

    def _sum_rows(
        self, store: StoreState, received: _Received, found: Found
    ) -> tuple[StoreState, Float32[Array, "num_bags_of_all dim"], SlotList | None]:
        """Sums the rows of this shard in every bag of every shard, each times its weight; also returns their slots."""
        spec, seed, features, row_ids = self.spec, self.seed, received.features, found.row_ids
        if is_by_xla := bool(table.list_xla_tables(spec, is_find=self.is_find)):
            ones = jnp.ones((features.keys.shape[0], 1), jnp.uint32)
            requests = jnp.concatenate([features.keys, received.table_ids[:, None], ones], axis=1)
            how = {"is_find": self.is_find, "dtype": "float32", "known": found.slots}
            store, rows, _ = table.gather(spec, store, seed, requests, row_ids, **how)
            view, known = dataclasses.replace(store, rows=(rows,)), None
            slots = jnp.arange(rows.shape[0], dtype=jnp.uint32)
        else:
            store, view, slots, known = tiers.bring_rows(
                spec, store, seed, row_ids, found.slots, keeps=not self.is_find
            )
        (num_bags,) = {layout.num_bags for layout in features.layouts}
        shapes = [(len(features.layouts) * num_bags, spec.dim)]
        reading = lookup_kernels.Reading(self._words_to_read(), seed, features.operands(), features.num_tiles, shapes)
        counters, _, (sums,) = lookup_kernels.lookup_planned(
            view.counters, reading, slots, view.rows, received.table_ids
        )
        if is_by_xla:
            return dataclasses.replace(store, counters=counters), sums, known
        return tiers.give_back(store, dataclasses.replace(view, counters=counters)), sums, known

    def _words_to_read(self) -> np.ndarray:
        """Returns the words of the tables; a lookup knows no table whose keys without a row read zeros."""
        words = self.words
        if not self.is_find:
            words[:, _UNKNOWN_WORD] = 0
        return words


def _batch_of_sums(spec: StoreSpec, features: StoreFeatures) -> tuple[StoreFeatures, UInt32[Array, " num_bags_of_all"]]:
    """Makes bags with a key for each owner, in their order; also returns the line of each sum that comes."""
    num_bags, num_shards = _num_bags(features), spec.num_shards
    form = {"combiner": "sum", "hotness": num_shards, "num_offsets": 0, "weights_start": -1}
    layouts = []
    for layout in features.layouts:
        place = {"num_keys": layout.num_bags * num_shards, "key_start": layout.bag_start * num_shards}
        layouts.append(dataclasses.replace(layout, **form, **place))
    keys = jnp.zeros((num_bags * num_shards, 2), jnp.uint32)
    lines = jnp.arange(num_bags, dtype=jnp.uint32)[:, None] + jnp.arange(num_shards, dtype=jnp.uint32)[None] * num_bags
    return dataclasses.replace(features, keys=keys, layouts=tuple(layouts)), lines.reshape(-1)


def _scale(lines: Array, scales: Float32[Array, " num_bags"], layout: FeatureLayout) -> Array:
    """Multiplies the lines of a feature's bags by their scales; zeros where the divisor is zero."""
    if layout.combiner not in DIVIDED:
        return lines
    scale = lax.slice_in_dim(scales, layout.bag_start, layout.bag_start + layout.num_bags)[:, None]
    has_divisor = lax.bitcast_convert_type(scale, jnp.uint32) != jnp.uint32(plan_kernels.ZERO_DIVISOR)
    return jnp.where(has_divisor, lines * scale, 0.0)


# Updates -------------------------------------------------------------------------------------------------------------


def _to_owners(
    exchange: Exchange, spec: StoreSpec, plan: Plan, gradients: Gradients, s: int
) -> Float32[Array, "num_bags_of_all dim"]:
    """Sends the gradients of all bags, divided as their embeddings were, to all shards."""
    part, scales = plan.features.stores[s], plan.uses_of(s).scales
    of_features = zip(gradients_by_bag(spec, part, gradients), part.layouts, strict=True)
    lines = concatenate([_scale(grads.reshape(-1, spec.dim), scales, layout) for grads, layout in of_features])
    return exchange_lib.send_rows(lines, exchange.spec.gradients, exchange.all_gather).astype(jnp.float32)


def _join_received(
    op: str, spec: StoreSpec, s: int, used: Used
) -> tuple[update_kernels.Batch, int, RowIds, UInt32[Array, " num_lines"]]:
    """Joins the batches that arrived for the plans of a step: batch, tiles, row ids and tables."""
    if len(used.plans) * spec.num_shards > MAX_FEATURES:
        names = [table.name for table in spec.tables]
        raise ValueError(
            f"{op}: plans: got {len(used.plans)} for tables {names} of partial bags on "
            f"{spec.num_shards} shards, wanted at most {MAX_FEATURES // spec.num_shards}; update more often, or "
            'declare FeatureSpec(exchange="rows").'
        )
    received = [_received_batch(spec, plan.features.stores[s], plan.uses_of(s)) for plan in used.plans]
    batch, num_tiles = join_features([part.features for part in received])
    row_ids = [plan.found_of(s).row_ids for plan in used.plans]
    for p, part in enumerate(received):
        if part.is_left_out is not None:
            row_ids[p] = jnp.where(part.is_left_out, jnp.uint32(NO_ROW), row_ids[p])
    return batch, num_tiles, concatenate(row_ids), concatenate([part.table_ids for part in received])


@annotations.annotate_store
def update_exchanged(
    exchange: Exchange, spec: StoreSpec, store: StoreState, s: int, used: Used, inputs: update.StepInputs
) -> tuple[StoreState, Array, Array]:
    """Steps the rows of one store that this shard owns; counts as `update_here` does."""
    batch, num_tiles, row_ids, table_ids = _join_received("update", spec, s, used)
    store, view, slots, _ = tiers.bring_rows(spec, store, inputs.seed, row_ids, used.slots_of(s))
    of_batch = batch, num_tiles, slots, used.is_live, inputs.row_step, table_ids
    step = update_kernels.Step(spec.table_words(), inputs.seed, inputs.step, *of_batch)
    windows, wire = exchange.windows, exchange.spec.gradients
    if windows is not None and len(used.plans) == 1 and wire not in SCALED_DTYPES:
        part, scales = used.plans[0].features.stores[s], used.plans[0].uses_of(s).scales
        dtype = exchange_lib.gathered_dtype(wire, "float32")
        windows.reserve(spec.num_shards * scales.size * spec.dim * jnp.dtype(dtype).itemsize)
        of_bags = part.operands()[1:], scales, gradients_by_bag(spec, part, used.gradients[0]), part.num_tiles, dtype
        view, num_nonfinite, num_stale = update_kernels.update_bags_window(windows.number, view, step, *of_bags)
    else:
        gradients = [_to_owners(exchange, spec, *pair, s) for pair in zip(used.plans, used.gradients, strict=True)]
        view, num_nonfinite, num_stale = update_kernels.update(view, step, gradients)
    return tiers.give_back(store, view, writes=True), num_nonfinite, num_stale


@annotations.annotate_store
def add_squares(exchange: Exchange, spec: StoreSpec, s: int, used: Used, squares: norms.Squares) -> norms.Squares:
    """Adds the squares of the row gradients by which `update_exchanged` would step."""
    (_, offsets, weights, words), num_tiles, row_ids, _ = _join_received("gradient_norm", spec, s, used)
    ends = np.cumsum([plan.uses_of(s).received.shape[0] for plan in used.plans])[:-1]
    alive = [
        jnp.where(used.is_live[p], ids, jnp.uint32(NO_ROW)) for p, ids in enumerate(jnp.split(row_ids, ends.tolist()))
    ]
    gradients = [
        part
        for pair in zip(used.plans, used.gradients, strict=True)
        for part in jnp.split(_to_owners(exchange, spec, *pair, s), spec.num_shards)
    ]
    rows = norms.sum_by_row(
        spec, concatenate(alive), (offsets, weights, words), num_tiles, gradients, spec.row_gradient
    )
    return norms.with_squares(squares, rows)

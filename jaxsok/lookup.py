"""The forward pass: features or a plan → embeddings, state, plan; `find` does the same and changes nothing.

On one device each store costs one FFI call. A plan made apart costs two, the first over distinct keys only; initial
rows that XLA computes cost three, and statistics one more. The ticket of the plan is one call for all stores
(tickets.py). On a mesh this runs on every shard: the distinct keys go to their owners, which find or insert rows and
send them back.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from jaxsok import admission, annotations, table, tiers
from jaxsok import exchange as exchange_lib
from jaxsok.checks import not_none
from jaxsok.exchange import SCALED_DTYPES, Exchange, Route
from jaxsok.features import StoreFeatures
from jaxsok.kernels import lookup as kernels
from jaxsok.kernels.tickets import tickets_digest
from jaxsok.plan import Distinct, Found, Requests
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import COUNTS, NO_ROW, ByTable, Clock, Digest, Inverse, RowIds, Seed, TableCounts

Embeddings = dict[str, Array]
"""Embedding of each feature, in its table's `embedding_dtype`: `[num_bags, dim]` with a combiner, else rows by key."""

StoreRead = tuple[StoreState, Found, list[Array]]
"""A store after its rows were read, the result for its plan, and the embedding of each feature."""

_INSERTED, _FOUND = COUNTS.index("num_inserted"), COUNTS.index("num_found")
_MISSING, _REFUSED = COUNTS.index("num_missing"), COUNTS.index("num_refused")
_UNADMITTED = COUNTS.index("num_unadmitted")


# Between shards ------------------------------------------------------------------------------------------------------


def lookup_exchanged(
    spec: StoreSpec, store: StoreState, features: StoreFeatures, asked: Requests, owner: "Owner"
) -> StoreRead:
    """Looks up one store through the exchange."""
    if asked.listed is None:
        return read_exchanged(spec, features, asked, owner, *index_exchanged(store, asked, owner))

    def one_round(all_asked: Sequence[Requests]) -> _Outcome:
        (asked,) = all_asked
        outcome = _read_by_xla(spec, features, asked, owner, *index_exchanged(store, asked, owner), may_lack_rows=False)
        return outcome._replace(has_row=jnp.zeros(not_none(asked.listed).lines.shape[0], bool))

    def rounds(before: _Outcome) -> _Outcome:
        return _lookup_in_rounds(spec, before.store, features, asked, owner)

    outcome = exchange_lib.in_one_round_or_more([asked], one_round, rounds)
    num_rounds = exchange_lib.num_rounds_of(asked.load[0, 0], asked.send_capacity)
    return outcome.store, Found(outcome.row_ids, outcome.counts, _rounds(num_rounds), outcome.has_row), outcome.values


def index_exchanged(store: StoreState, asked: Requests, owner: "Owner") -> tuple[StoreState, Found]:
    """Finds or inserts the rows of requests that came in one round; counts requests, not yet the keys of the batch."""
    store, row_ids, counts = owner.find_rows(store, asked.received)
    return store, Found(row_ids, counts, _rounds(1))


def read_exchanged(
    spec: StoreSpec, features: StoreFeatures, asked: Requests, owner: "Owner", store: StoreState, found: Found
) -> StoreRead:
    """Does the rest of a lookup: sends the rows that `index_exchanged` found, and combines them."""
    if _fits_windows(spec, features, owner):
        return _read_in_windows(spec, features, asked, owner, store, found)
    read = _read_by_xla(spec, features, asked, owner, store, found, may_lack_rows=True)
    return read.store, Found(read.row_ids, read.counts, found.num_rounds), read.values


class _Outcome(NamedTuple):
    """The result of a lookup in one store, of the same shapes after one round as after several."""

    store: StoreState
    values: list[Array]
    counts: TableCounts
    row_ids: RowIds
    has_row: Bool[Array, " num_keys"] | None


def _read_by_xla(
    spec: StoreSpec,
    features: StoreFeatures,
    asked: Requests,
    owner: "Owner",
    store: StoreState,
    found: Found,
    *,
    may_lack_rows: bool,
) -> _Outcome:
    """Sends rows back over the dense wire; `may_lack_rows`: keys beyond the send capacity were not sent."""
    route = owner.exchange.route(spec, asked.send_capacity)
    store, back, absent = owner.answer(store, route, asked.received, found.row_ids)
    store, counts, values = _combine_answers(
        spec, store, features, owner, back, asked.slots, found.counts, absent, may_lack_rows=may_lack_rows
    )
    return _Outcome(store, values, counts, found.row_ids, None)


def _lookup_in_rounds(
    spec: StoreSpec, store: StoreState, features: StoreFeatures, asked: Requests, owner: "Owner"
) -> _Outcome:
    """Looks up a store in several rounds. All requests arrive first, so that row ids are those of one round."""
    route, listed = owner.exchange.route(spec, asked.send_capacity), not_none(asked.listed)
    capacity = asked.send_capacity
    num_rounds, num_keys = exchange_lib.num_rounds_of(asked.load[0, 0], capacity), listed.lines.shape[0]
    room = exchange_lib.receive_all(route, asked.received, listed.lines, listed.starts, num_rounds)
    store, row_ids, inserted = owner.find_rows(store, room.reshape(-1, 4))
    row_ids = row_ids.reshape(room.shape[:2])
    dtype = exchange_lib.gathered_dtype(owner.exchange.spec.rows, spec.dtype)
    ids = jnp.full(num_keys, jnp.uint32(NO_ROW))
    rows = ids if spec.is_replicated else jnp.zeros((num_keys, spec.dim), dtype)
    none = jnp.zeros(len(spec.tables), jnp.int32)

    @jax.named_scope("round")
    def answer(number: Array, carry: tuple) -> tuple:
        store, rows, ids, absent = carry
        received = lax.dynamic_slice_in_dim(room, number * capacity, capacity, axis=1).reshape(-1, 4)
        of_round = lax.dynamic_slice_in_dim(row_ids, number * capacity, capacity, axis=1).reshape(-1)
        store, back, absent_now = owner.answer(store, route, received, of_round)
        place, _ = exchange_lib.places_of_round(route, listed.starts, number, num_keys)
        ids = ids.at[place].set(route.to_askers(of_round), mode="drop")
        rows = ids if spec.is_replicated else rows.at[place].set(back, mode="drop")
        return store, rows, ids, absent + absent_now

    first = exchange_lib.vary_as((store, rows, ids, none), asked.received)
    store, rows, ids, absent = lax.fori_loop(0, num_rounds, answer, first)
    store, counts, values = _combine_answers(
        spec, store, features, owner, rows, listed.inverse, inserted, absent, may_lack_rows=False
    )
    nothing_received = jnp.full(asked.received.shape[0], jnp.uint32(NO_ROW))
    return _Outcome(store, values, counts, nothing_received, ids != jnp.uint32(NO_ROW))


def _combine_answers(
    spec: StoreSpec,
    store: StoreState,
    features: StoreFeatures,
    owner: "Owner",
    back: Array,
    lines: Inverse,
    inserted: TableCounts,
    absent: ByTable,
    *,
    may_lack_rows: bool,
) -> tuple[StoreState, TableCounts, list[Array]]:
    """Combines the rows that came back into embeddings; `lines` has for each key the place of its row among them."""
    is_line = (lines >= 0) & (lines < back.shape[0])
    if spec.is_replicated:
        of_key = jnp.where(is_line, back.at[lines].get(mode="clip"), jnp.uint32(NO_ROW))
        slabs = store.rows
        inserted = jnp.where(owner.exchange.shards.index() == 0, inserted, 0)
    else:
        of_key = jnp.where(is_line, lines.astype(jnp.uint32), jnp.uint32(NO_ROW))
        slabs = (back,)
    is_find, may_lack_rows = owner.is_find, may_lack_rows or spec.is_replicated
    store, counts, values = _combine(
        spec, store, owner.seed, features, of_key, slabs, is_find=is_find, may_lack_rows=may_lack_rows
    )
    return store, _correct_counts(counts, inserted, absent, is_find=is_find), values


def _correct_counts(counts: TableCounts, inserted: TableCounts, absent: ByTable, *, is_find: bool) -> TableCounts:
    """Corrects the counts of askers: they got a row for every key, and only owners know which of them existed."""
    num_new, unadmitted = inserted[:, _INSERTED], inserted[:, _UNADMITTED]
    changes = {_FOUND: -num_new - absent, _INSERTED: num_new, _UNADMITTED: unadmitted}
    changes[_MISSING if is_find else _REFUSED] = absent
    none = jnp.zeros_like(absent)
    # Not `.at[:, column].add`, whose bounds XLA checks in kernels of their own.
    return counts + jnp.stack([changes.get(column, none) for column in range(counts.shape[1])], axis=1)


def _fits_windows(spec: StoreSpec, features: StoreFeatures, owner: "Owner") -> bool:
    """Returns whether kernels alone can read, send and combine the rows."""
    is_by_xla = _reads_traced(spec, features) or table.list_xla_tables(spec, is_find=owner.is_find)
    is_scaled = owner.exchange.spec.rows in SCALED_DTYPES
    return owner.exchange.windows is not None and not (spec.is_replicated or is_by_xla or is_scaled)


def _read_in_windows(
    spec: StoreSpec, features: StoreFeatures, asked: Requests, owner: "Owner", store: StoreState, found: Found
) -> StoreRead:
    """Does `read_exchanged`; rows go from the store into windows, and from there into embeddings."""
    received, windows = asked.received, not_none(owner.exchange.windows)
    dtype = exchange_lib.gathered_dtype(owner.exchange.spec.rows, spec.dtype)
    windows.reserve(received.shape[0] * spec.dim * np.dtype(dtype).itemsize)
    store, view, slots = tiers.bring_rows(spec, store, owner.seed, found.row_ids, keeps=not owner.is_find)
    words = spec.table_words() if owner.is_find else spec.refused_words()
    reading = _reading(spec, words, owner.seed, features, spec.embedding_dtype if dtype == spec.dtype else "float32")
    counters, absent, counts, values = kernels.lookup_window(
        windows.number, view, reading, received, slots, asked.slots, is_find=owner.is_find, dtype=dtype
    )
    store = tiers.give_back(store, dataclasses.replace(view, counters=counters))
    values = [table.round_to(value, spec.embedding_dtype) for value in values]
    counts = _correct_counts(counts, found.counts, absent, is_find=owner.is_find)
    return store, dataclasses.replace(found, counts=counts), values


@dataclasses.dataclass(frozen=True)
class Owner:
    """The owner of some keys of a store, which answers the other shards' requests."""

    exchange: Exchange
    spec: StoreSpec
    seed: Seed
    step: Clock | None = None
    """None: the owner only finds, and inserts nothing."""
    clock: Clock | None = None

    @property
    def is_find(self) -> bool:
        """True if the lookup changes nothing."""
        return self.step is None

    def find_rows(
        self, store: StoreState, received: UInt32[Array, "num_lines 4"]
    ) -> tuple[StoreState, RowIds, TableCounts]:
        """Finds or inserts the rows of received requests; also counts keys, but of those not admitted the uses."""
        spec, keys, table_ids, uses = self.spec, received[:, :2], received[:, 2], received[:, 3]
        if self.is_find:
            return store, table.find(store, keys, table_ids), jnp.zeros((len(spec.tables), len(COUNTS)), jnp.int32)
        store, row_ids, counts = table.find_or_insert(
            spec, store, self.seed, keys, table_ids, step=self.step, uses=uses
        )
        return table.touch(spec, store, row_ids, uses, not_none(self.clock)), row_ids, counts

    def answer(
        self, store: StoreState, route: Route, received: UInt32[Array, "_ 4"], row_ids: RowIds
    ) -> tuple[StoreState, Array, ByTable]:
        """Sends the rows of received requests back, in a replicated store their ids; also counts uses without a row."""
        spec, on_wire = self.spec, self.exchange.spec.rows
        if spec.is_replicated:
            return store, route.to_askers(row_ids), jnp.zeros(len(spec.tables), jnp.int32)
        dtype = exchange_lib.gathered_dtype(on_wire, spec.dtype)
        store, rows, absent = table.gather(spec, store, self.seed, received, row_ids, is_find=self.is_find, dtype=dtype)
        return store, exchange_lib.send_rows(rows, on_wire, route.to_askers), absent


# On one device -------------------------------------------------------------------------------------------------------


@annotations.annotate_store
def find_here(spec: StoreSpec, store: StoreState, seed: Seed, features: StoreFeatures) -> tuple[Found, list[Array]]:
    """Looks up one store whose rows are all here, and changes nothing."""
    if _reads_traced(spec, features) or spec.memory is not None:
        row_ids = table.find(store, features.keys, _table_ids(features))
        _, counts, values = _read(spec, store, seed, features, row_ids, is_find=True)
        counts = counts.at[:, _MISSING].set(counts[:, _REFUSED]).at[:, _REFUSED].set(0)
    else:
        counts, values = kernels.lookup_find(store, _reading(spec, spec.table_words(), seed, features))
    return _without_row_ids(counts), values


def lookup_here(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    features: StoreFeatures,
    distinct: Distinct | None,
    step: Clock,
    clock: Clock,
) -> tuple[StoreState, Found, list[Array], Digest]:
    """Looks up one store whose rows are all here, in one call if possible; also returns the digest of the keys."""
    if distinct is None and not _reads_traced(spec, features) and spec.memory is None:
        return _lookup_fused(spec, store, seed, features, step, clock)
    indexed = index_here(spec, store, seed, features, distinct, step, clock)
    return *read_here(spec, features, seed, *indexed), tickets_digest(features.keys)


@annotations.annotate_store
def _lookup_fused(
    spec: StoreSpec, store: StoreState, seed: Seed, features: StoreFeatures, step: Clock, clock: Clock
) -> tuple[StoreState, Found, list[Array], Digest]:
    reading, deciding = _reading(spec, spec.table_words(), seed, features), admission.operands(spec, step)
    store, out = kernels.lookup(store, reading, deciding, clock if spec.keeps_statistics else None)
    return store, Found(out.row_ids, out.counts, _rounds(0)), out.embeddings, out.digest


@annotations.annotate_store
def index_here(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    features: StoreFeatures,
    distinct: Distinct | None,
    step: Clock,
    clock: Clock,
) -> tuple[StoreState, Found]:
    """Finds or inserts the rows of a batch, by key or (`distinct`) each distinct key once; counts these alone."""
    if distinct is None:
        keys, table_ids, uses = features.keys, _table_ids(features), None
    else:
        keys, table_ids, uses = distinct.unique, distinct.unique_tables, distinct.multiplicity.astype(jnp.uint32)
    store, row_ids, counts = table.find_or_insert(spec, store, seed, keys, table_ids, step=step, uses=uses)
    store = table.touch(spec, store, row_ids, uses, clock)
    if distinct is not None:
        row_ids = row_ids.at[distinct.inverse].get(mode="fill", fill_value=NO_ROW)
    return store, Found(row_ids, counts, _rounds(0))


@annotations.annotate_store
def read_here(spec: StoreSpec, features: StoreFeatures, seed: Seed, store: StoreState, found: Found) -> StoreRead:
    """Does the rest of a lookup: combines the rows that `index_here` found."""
    store, counts, values = _read(spec, store, seed, features, found.row_ids)
    # Every new key is its own first occurrence; the rest of its occurrences are found.
    inserted = found.counts[:, _INSERTED]
    counts = counts.at[:, _INSERTED].set(inserted).at[:, _FOUND].add(-inserted)
    counts = counts.at[:, _UNADMITTED].set(found.counts[:, _UNADMITTED])
    return store, dataclasses.replace(found, counts=counts), values


# Rows into embeddings ------------------------------------------------------------------------------------------------


def _read(
    spec: StoreSpec, store: StoreState, seed: Seed, features: StoreFeatures, row_ids: RowIds, *, is_find: bool = False
) -> tuple[StoreState, TableCounts, list[Array]]:
    """Does `_combine` with the store's own rows."""
    store, view, slots = tiers.bring_rows(spec, store, seed, row_ids, keeps=not is_find)
    view, counts, values = _combine(spec, view, seed, features, slots, view.rows, is_find=is_find)
    return tiers.give_back(store, view), counts, values


def _combine(
    spec: StoreSpec,
    store: StoreState,
    seed: Seed,
    features: StoreFeatures,
    row_ids: RowIds,
    slabs: Sequence[Array],
    *,
    is_find: bool = False,
    may_lack_rows: bool = True,
) -> tuple[StoreState, TableCounts, list[Array]]:
    """Combines rows into embeddings; keys without a row read their initial row, or what their table says instead.

    `row_ids` point into `slabs`: the store's own, or rows that came from others. `may_lack_rows` says whether keys
    other than padding may have NO_ROW. The store does not change, but an update of the returned one comes after this.
    """
    absent = None
    if may_lack_rows and _reads_traced(spec, features):
        row_ids, slabs, absent = _with_initial_rows(spec, features, row_ids, slabs, is_find=is_find)
    # With table ids the kernel looks whether a table reads zeros.
    table_ids = jnp.asarray(_table_ids(features)) if is_find and may_lack_rows and absent is None else None
    is_own = slabs[0].dtype == jnp.dtype(spec.dtype)
    words = spec.table_words() if is_find else spec.refused_words()
    reading = _reading(spec, words, seed, features, spec.embedding_dtype if is_own else "float32")
    counters, counts, values = kernels.lookup_planned(store.counters, reading, row_ids, slabs, table_ids)
    values = [table.round_to(value, spec.embedding_dtype) for value in values]
    if absent is not None:
        counts = counts.at[:, _FOUND].add(-absent).at[:, _REFUSED].add(absent)
    return dataclasses.replace(store, counters=counters), counts, values


def _with_initial_rows(
    spec: StoreSpec, features: StoreFeatures, row_ids: RowIds, slabs: Sequence[Array], *, is_find: bool
) -> tuple[RowIds, tuple[Array, ...], ByTable]:
    """Adds a slab of initial rows, and row ids that point to it; also counts by table the keys that read it."""
    capacity = sum(slab.shape[0] for slab in slabs)
    ids, absent = [], [jnp.zeros((), jnp.int32) for _ in spec.tables]
    # Keys that read zeros use the first line; without it this kernel would give them the initial row.
    initial, num_initial, end = [jnp.zeros((1, spec.dim), slabs[0].dtype)], 1, 0
    for layout in features.layouts:
        begin, end = layout.key_start, layout.key_start + layout.num_keys
        own, keys = row_ids[begin:end], features.keys[begin:end]
        reads_zeros = is_find and layout.unknown_zeros
        is_traced = spec.tables[layout.table].initializer.is_traced
        if reads_zeros or (is_traced and table.reads_initial(spec, layout.table, is_find=is_find)):
            is_absent = table.is_key(keys) & (own == jnp.uint32(NO_ROW))
            absent[layout.table] += is_absent.sum(dtype=jnp.int32)
            place = jnp.uint32(capacity)
            if not reads_zeros:
                place = jnp.arange(layout.num_keys, dtype=jnp.uint32) + jnp.uint32(capacity + num_initial)
                rows = table.initial_rows(spec, keys, table.table_ids_of(layout.table, layout.num_keys))
                initial.append(rows.astype(slabs[0].dtype))
                num_initial += layout.num_keys
            own = jnp.where(is_absent, place, own)
        ids.append(own)
    ids.append(row_ids[end:])
    return jnp.concatenate(ids), (*slabs, jnp.concatenate(initial)), jnp.stack(absent)


def _reads_traced(spec: StoreSpec, features: StoreFeatures) -> bool:
    """Returns whether a feature reads a table whose initial rows XLA computes."""
    return any(spec.tables[layout.table].initializer.is_traced for layout in features.layouts)


def _table_ids(features: StoreFeatures) -> np.ndarray:
    """Returns the table of each key; 0 for the spare last position, which is never read."""
    ids = np.zeros(features.keys.shape[0], np.uint32)
    for layout in features.layouts:
        ids[layout.key_start : layout.key_start + layout.num_keys] = layout.table
    return ids


def find_nothing(spec: StoreSpec) -> Found:
    """Returns the result of a lookup in a store without features."""
    return _without_row_ids(jnp.zeros((len(spec.tables), len(COUNTS)), jnp.int32))


def _without_row_ids(counts: TableCounts) -> Found:
    # One NO_ROW: the array must not be empty, see `StoreFeatures`.
    return Found(jnp.full(1, jnp.uint32(NO_ROW)), counts, _rounds(0))


def _rounds(num_rounds: int | Int32[Array, ""]) -> Int32[Array, "1"]:
    return jnp.asarray(num_rounds, jnp.int32)[None]


def _reading(
    spec: StoreSpec, words: np.ndarray, seed: Seed, features: StoreFeatures, dtype: str | None = None
) -> kernels.Reading:
    shapes = [(*layout.combined_shape, spec.dim) for layout in features.layouts]
    return kernels.Reading(words, seed, features.operands(), features.num_tiles, shapes, dtype or spec.embedding_dtype)


def by_name(features: StoreFeatures, values: Sequence[Array]) -> Embeddings:
    """Maps the names of a store's features to their embeddings."""
    pairs = zip(features.layouts, values, strict=True)
    return {layout.name: _expand(value, features.inverse_of(layout)) for layout, value in pairs}


def _expand(value: Array, inverse: Int32[Array, " num_samples"] | None) -> Array:
    """Repeats the embedding of a bag for each of its samples; zeros if the bag is missing."""
    if inverse is None:
        return value
    if value.shape[0] == 0:
        return jnp.zeros((inverse.shape[0], *value.shape[1:]), value.dtype)
    return value.at[inverse].get(mode="fill", fill_value=0)

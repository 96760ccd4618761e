"""The forward pass: features or a plan → embeddings, state, plan; `find` does the same and changes nothing.

On one device each store costs one FFI call; with initial rows that XLA computes it costs five, and six with statistics.
Stores in host memory need several, too. The ticket of the plan is one call for all stores (tickets.py). On a mesh this
runs on every shard: the distinct keys go to their owners, which find or insert rows and send them back.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from jaxsok import admission, annotations, exchange as exchange_lib, table, tiers
from jaxsok.checks import not_none
from jaxsok.exchange import SCALED_DTYPES, Exchange, Route
from jaxsok.features import StoreFeatures
from jaxsok.kernels import lookup as kernels
from jaxsok.kernels.tickets import tickets_digest
from jaxsok.kernels.tier import SlotList
from jaxsok.plan import Found, Requests
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import COUNTS, NO_ROW, ByTable, Clock, Digest, Inverse, RowIds, Seed, TableCounts

Embeddings = dict[str, Array]
"""Embedding of each feature, in its table's `embedding_dtype`: `[num_bags, dim]` with a combiner, else rows by key."""

StoreRead = tuple[StoreState, Found, list[Array]]
"""A store after its rows were read, the result for its plan, and the embedding of each feature."""

StoreLookup = tuple[StoreState, Found, list[Array], Digest]
"""The same after a whole lookup, and the digest of the keys."""

_INSERTED, _FOUND = COUNTS.index("num_inserted"), COUNTS.index("num_found")
_MISSING, _REFUSED = COUNTS.index("num_missing"), COUNTS.index("num_refused")
_UNADMITTED = COUNTS.index("num_unadmitted")


@dataclasses.dataclass(frozen=True)
class Reader:
    """A batch of one store: makes the embeddings of its features out of rows."""

    spec: StoreSpec
    features: StoreFeatures
    seed: Seed
    step: Clock | None
    """None in a `find`, which changes nothing."""
    clock: Clock | None

    @property
    def is_find(self) -> bool:
        """True if the lookup changes nothing."""
        return self.step is None

    @property
    def words(self) -> np.ndarray:
        """The words of the tables, with the initializers that keys without a row read."""
        return self.spec.table_words() if self.is_find else self.spec.refused_words()

    @property
    def reads_traced(self) -> bool:
        """True if a feature reads a table whose initial rows XLA computes."""
        return any(self.spec.tables[layout.table].initializer.is_traced for layout in self.features.layouts)

    @property
    def table_ids(self) -> np.ndarray:
        """The table of each key; 0 for the spare last position, which is never read."""
        ids = np.zeros(self.features.keys.shape[0], np.uint32)
        for layout in self.features.layouts:
            ids[layout.key_start : layout.key_start + layout.num_keys] = layout.table
        return ids

    def reading(self, words: np.ndarray, dtype: str | None = None) -> kernels.Reading:
        """Returns the operands of the kernels, for embeddings of a dtype (None: the declared one)."""
        shapes = [(*layout.combined_shape, self.spec.dim) for layout in self.features.layouts]
        of_batch = self.features.operands(), self.features.num_tiles, shapes
        return kernels.Reading(words, self.seed, *of_batch, dtype or self.spec.embedding_dtype)

    def combine(
        self, store: StoreState, row_ids: RowIds, slabs: Sequence[Array], *, may_lack_rows: bool = True
    ) -> tuple[StoreState, TableCounts, list[Array]]:
        """Combines rows into embeddings; keys without a row read their initial row, or what their table says instead.

        `row_ids` point into `slabs`: the store's own, or rows that came from others. `may_lack_rows` says whether keys
        other than padding may have NO_ROW. The store does not change, but an update of the returned one comes after
        this.
        """
        spec, absent = self.spec, None
        if may_lack_rows and self.reads_traced:
            row_ids, slabs, absent = self._with_initial_rows(row_ids, slabs)
        # With table ids the kernel looks whether a table reads zeros.
        table_ids = jnp.asarray(self.table_ids) if self.is_find and may_lack_rows and absent is None else None
        is_own = slabs[0].dtype == jnp.dtype(spec.dtype)
        reading = self.reading(self.words, spec.embedding_dtype if is_own else "float32")
        counters, counts, values = kernels.lookup_planned(store.counters, reading, row_ids, slabs, table_ids)
        values = [table.round_to(value, spec.embedding_dtype) for value in values]
        if absent is not None:
            counts = counts.at[:, _FOUND].add(-absent).at[:, _REFUSED].add(absent)
        return dataclasses.replace(store, counters=counters), counts, values

    def _with_initial_rows(self, row_ids: RowIds, slabs: Sequence[Array]) -> tuple[RowIds, tuple[Array, ...], ByTable]:
        """Adds a slab of initial rows, and row ids that point to it; also counts by table the keys that read it."""
        spec, features, is_find = self.spec, self.features, self.is_find
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
                    rows = table.initial_rows(spec, keys, np.full(layout.num_keys, layout.table, np.uint32))
                    initial.append(rows.astype(slabs[0].dtype))
                    num_initial += layout.num_keys
                own = jnp.where(is_absent, place, own)
            ids.append(own)
        ids.append(row_ids[end:])
        return jnp.concatenate(ids), (*slabs, jnp.concatenate(initial)), jnp.stack(absent)


# On one device -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Here(Reader):
    """A lookup in a store whose rows are all here."""

    asked: ClassVar[None] = None
    """There are no other shards to ask."""

    @annotations.annotate_store
    def find(self, store: StoreState) -> tuple[Found, list[Array]]:
        """Looks up and changes nothing."""
        if self.reads_traced or self.spec.memory is not None:
            _, counts, values, _ = self._combine_own(store, table.find(store, self.features.keys, self.table_ids))
            counts = counts.at[:, _MISSING].set(counts[:, _REFUSED]).at[:, _REFUSED].set(0)
        else:
            counts, values = kernels.lookup_find(store, self.reading(self.spec.table_words()))
        return _without_row_ids(counts), values

    def lookup(self, store: StoreState) -> StoreLookup:
        """Looks up in one call if possible."""
        if not self.reads_traced and self.spec.memory is None:
            return self._lookup_fused(store)
        return *self.read(*self.index(store)), self.digest()

    @annotations.annotate_store
    def _lookup_fused(self, store: StoreState) -> StoreLookup:
        spec, clock = self.spec, self.clock if self.spec.keeps_statistics else None
        reading, deciding = self.reading(spec.table_words()), admission.operands(spec, not_none(self.step))
        store, out = kernels.lookup(store, reading, deciding, clock)
        return store, Found(out.row_ids, out.counts, _rounds(0)), out.embeddings, out.digest

    def digest(self) -> Digest:
        """Returns the digest of the keys."""
        return tickets_digest(self.features.keys)

    @annotations.annotate_store
    def index(self, store: StoreState) -> tuple[StoreState, Found]:
        """Finds or inserts the rows of the keys."""
        store, row_ids, counts = table.find_or_insert(
            self.spec, store, self.seed, self.features.keys, self.table_ids, step=self.step
        )
        store = table.touch(self.spec, store, row_ids, None, not_none(self.clock))
        return store, Found(row_ids, counts, _rounds(0))

    @annotations.annotate_store
    def read(self, store: StoreState, found: Found) -> StoreRead:
        """Does the rest of a lookup: combines the rows that `index` found."""
        store, counts, values, slots = self._combine_own(store, found.row_ids, found.slots)
        # Every new key is its own first occurrence; the rest of its occurrences are found.
        inserted = found.counts[:, _INSERTED]
        counts = counts.at[:, _INSERTED].set(inserted).at[:, _FOUND].add(-inserted)
        counts = counts.at[:, _UNADMITTED].set(found.counts[:, _UNADMITTED])
        return store, dataclasses.replace(found, counts=counts, slots=slots), values

    def _combine_own(
        self, store: StoreState, row_ids: RowIds, known: SlotList | None = None
    ) -> tuple[StoreState, TableCounts, list[Array], SlotList | None]:
        """Does `combine` with the store's own rows; also returns their slots."""
        store, view, slots, known = tiers.bring_rows(
            self.spec, store, self.seed, row_ids, known, keeps=not self.is_find
        )
        view, counts, values = self.combine(view, slots, view.rows)
        return tiers.give_back(store, view), counts, values, known


# Between shards ------------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """The result of a lookup in one store, of the same shapes after one round as after several."""

    store: StoreState
    values: list[Array]
    counts: TableCounts
    row_ids: RowIds
    has_row: Bool[Array, " num_keys"] | None


@dataclasses.dataclass(frozen=True)
class Owner(Reader):
    """A lookup through the exchange: the owner of some keys answers the other shards, and combines what comes back."""

    asked: Requests
    exchange: Exchange

    def find(self, store: StoreState) -> tuple[Found, list[Array]]:
        """Looks up and changes nothing."""
        _, found, values, _ = self.lookup(store)
        return found, values

    def lookup(self, store: StoreState) -> StoreLookup:
        """Looks up one store."""
        read = self.read(*self.index(store)) if self.asked.listed is None else self._lookup_listed(store)
        return *read, self.digest()

    def digest(self) -> Digest:
        """Returns the digest of the keys of all shards."""
        return self.asked.digest

    @annotations.annotate_store
    def _lookup_listed(self, store: StoreState) -> StoreRead:
        """Looks up in one round if it has room for all requests, else in several."""
        asked = self.asked

        def one_round(all_asked: Sequence[Requests]) -> _Outcome:
            (asked,) = all_asked
            after, row_ids, counts = self._find_rows(store, asked.received)
            outcome = self._read_by_xla(asked, after, Found(row_ids, counts, _rounds(1)), may_lack_rows=False)
            return outcome._replace(has_row=jnp.zeros(not_none(asked.listed).lines.shape[0], bool))

        def rounds(before: _Outcome) -> _Outcome:
            return self._lookup_in_rounds(before.store)

        outcome = exchange_lib.in_one_round_or_more([asked], one_round, rounds)
        num_rounds = _rounds(exchange_lib.num_rounds_of(asked.load[0, 0], asked.send_capacity))
        return outcome.store, Found(outcome.row_ids, outcome.counts, num_rounds, outcome.has_row), outcome.values

    @annotations.annotate_store
    def index(self, store: StoreState) -> tuple[StoreState, Found]:
        """Finds or inserts rows of requests that came in one round; counts requests, not yet the keys of the batch."""
        store, row_ids, counts = self._find_rows(store, self.asked.received)
        return store, Found(row_ids, counts, _rounds(1))

    @annotations.annotate_store
    def read(self, store: StoreState, found: Found) -> StoreRead:
        """Does the rest of a lookup: sends the rows that `index` found, and combines them."""
        if self._fits_windows():
            return self._read_in_windows(store, found)
        read = self._read_by_xla(self.asked, store, found, may_lack_rows=True)
        return read.store, Found(read.row_ids, read.counts, found.num_rounds), read.values

    def _read_by_xla(self, asked: Requests, store: StoreState, found: Found, *, may_lack_rows: bool) -> _Outcome:
        """Sends rows back over the dense wire; `may_lack_rows`: keys beyond the send capacity were not sent."""
        route = self.exchange.route(self.spec, asked.send_capacity)
        store, back, absent = self._answer(store, route, asked.received, found.row_ids, found.slots)
        store, counts, values = self._combine_answers(
            store, back, asked.slots, found.counts, absent, may_lack_rows=may_lack_rows
        )
        return _Outcome(store, values, counts, found.row_ids, None)

    def _lookup_in_rounds(self, store: StoreState) -> _Outcome:
        """Looks up a store in several rounds. All requests arrive first, so that row ids are those of one round."""
        spec, asked = self.spec, self.asked
        route, listed = self.exchange.route(spec, asked.send_capacity), not_none(asked.listed)
        capacity = asked.send_capacity
        num_rounds, num_keys = exchange_lib.num_rounds_of(asked.load[0, 0], capacity), listed.lines.shape[0]
        room = exchange_lib.receive_all(route, asked.received, listed.lines, listed.starts, num_rounds)
        store, row_ids, inserted = self._find_rows(store, room.reshape(-1, 4))
        row_ids = row_ids.reshape(room.shape[:2])
        dtype = exchange_lib.gathered_dtype(self.exchange.spec.rows, spec.dtype)
        ids = jnp.full(num_keys, jnp.uint32(NO_ROW))
        rows = ids if spec.is_replicated else jnp.zeros((num_keys, spec.dim), dtype)
        none = jnp.zeros(len(spec.tables), jnp.int32)

        @jax.named_scope("round")
        def answer(number: Array, carry: tuple) -> tuple:
            store, rows, ids, absent = carry
            received = lax.dynamic_slice_in_dim(room, number * capacity, capacity, axis=1).reshape(-1, 4)
            of_round = lax.dynamic_slice_in_dim(row_ids, number * capacity, capacity, axis=1).reshape(-1)
            store, back, absent_now = self._answer(store, route, received, of_round)
            place = exchange_lib.Round.numbered(route, listed.starts, number, num_keys).place
            ids = ids.at[place].set(route.to_askers(of_round), mode="drop")
            rows = ids if spec.is_replicated else rows.at[place].set(back, mode="drop")
            return store, rows, ids, absent + absent_now

        first = exchange_lib.vary_as((store, rows, ids, none), asked.received)
        store, rows, ids, absent = lax.fori_loop(0, num_rounds, answer, first)
        store, counts, values = self._combine_answers(
            store, rows, listed.inverse, inserted, absent, may_lack_rows=False
        )
        nothing_received = jnp.full(asked.received.shape[0], jnp.uint32(NO_ROW))
        return _Outcome(store, values, counts, nothing_received, ids != jnp.uint32(NO_ROW))

    def _combine_answers(
        self,
        store: StoreState,
        back: Array,
        lines: Inverse,
        inserted: TableCounts,
        absent: ByTable,
        *,
        may_lack_rows: bool,
    ) -> tuple[StoreState, TableCounts, list[Array]]:
        """Combines the rows that came back; `lines` has for each key the place of its row among them."""
        is_line = (lines >= 0) & (lines < back.shape[0])
        if self.spec.is_replicated:
            of_key = jnp.where(is_line, back.at[lines].get(mode="clip"), jnp.uint32(NO_ROW))
            slabs = store.rows
            inserted = jnp.where(self.exchange.shards.index() == 0, inserted, 0)
        else:
            of_key = jnp.where(is_line, lines.astype(jnp.uint32), jnp.uint32(NO_ROW))
            slabs = (back,)
        may_lack_rows = may_lack_rows or self.spec.is_replicated
        store, counts, values = self.combine(store, of_key, slabs, may_lack_rows=may_lack_rows)
        return store, self._correct_counts(counts, inserted, absent), values

    def _correct_counts(self, counts: TableCounts, inserted: TableCounts, absent: ByTable) -> TableCounts:
        """Corrects the counts of askers: they got a row for every key, and only owners know which of them existed."""
        num_new, unadmitted = inserted[:, _INSERTED], inserted[:, _UNADMITTED]
        changes = {_FOUND: -num_new - absent, _INSERTED: num_new, _UNADMITTED: unadmitted}
        changes[_MISSING if self.is_find else _REFUSED] = absent
        none = jnp.zeros_like(absent)
        # Not `.at[:, column].add`, whose bounds XLA checks in kernels of their own.
        return counts + jnp.stack([changes.get(column, none) for column in range(counts.shape[1])], axis=1)

    def _fits_windows(self) -> bool:
        """Returns whether kernels alone can read, send and combine the rows."""
        is_by_xla = self.reads_traced or table.list_xla_tables(self.spec, is_find=self.is_find)
        is_scaled = self.exchange.spec.rows in SCALED_DTYPES
        return self.exchange.windows is not None and not (self.spec.is_replicated or is_by_xla or is_scaled)

    def _read_in_windows(self, store: StoreState, found: Found) -> StoreRead:
        """Does `read`; rows go from the store into windows, and from there into embeddings."""
        spec, asked, windows = self.spec, self.asked, not_none(self.exchange.windows)
        dtype = exchange_lib.gathered_dtype(self.exchange.spec.rows, spec.dtype)
        windows.reserve(asked.received.shape[0] * spec.dim * np.dtype(dtype).itemsize)
        store, view, slots, known = tiers.bring_rows(
            spec, store, self.seed, found.row_ids, found.slots, keeps=not self.is_find
        )
        reading = self.reading(self.words, spec.embedding_dtype if dtype == spec.dtype else "float32")
        sorts_uses = not self.is_find and self.exchange.sends_sums_by_kernels(spec, self.features, asked)
        how = {"is_find": self.is_find, "dtype": dtype, "sorts_uses": sorts_uses}
        read = kernels.lookup_window(windows.number, view, reading, asked.received, slots, asked.slots, **how)
        store = tiers.give_back(store, dataclasses.replace(view, counters=read.counters))
        values = [table.round_to(value, spec.embedding_dtype) for value in read.embeddings]
        counts = self._correct_counts(read.counts, found.counts, read.num_absent)
        return store, dataclasses.replace(found, counts=counts, sorted_uses=read.sorted_uses, slots=known), values

    def _find_rows(
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

    def _answer(
        self,
        store: StoreState,
        route: Route,
        received: UInt32[Array, "_ 4"],
        row_ids: RowIds,
        known: SlotList | None = None,
    ) -> tuple[StoreState, Array, ByTable]:
        """Sends the rows of received requests back, in a replicated store their ids; also counts uses without a row."""
        spec, on_wire = self.spec, self.exchange.spec.rows
        if spec.is_replicated:
            return store, route.to_askers(row_ids), jnp.zeros(len(spec.tables), jnp.int32)
        dtype = exchange_lib.gathered_dtype(on_wire, spec.dtype)
        how = {"is_find": self.is_find, "dtype": dtype, "known": known}
        store, rows, absent = table.gather(spec, store, self.seed, received, row_ids, **how)
        return store, exchange_lib.send_rows(rows, on_wire, route.to_askers), absent


# Results -------------------------------------------------------------------------------------------------------------


def find_nothing(spec: StoreSpec) -> Found:
    """Returns the result of a lookup in a store without features."""
    return _without_row_ids(jnp.zeros((len(spec.tables), len(COUNTS)), jnp.int32))


def _without_row_ids(counts: TableCounts) -> Found:
    # One NO_ROW: the array must not be empty, see `StoreFeatures`.
    return Found(jnp.full(1, jnp.uint32(NO_ROW)), counts, _rounds(0))


def _rounds(num_rounds: int | Int32[Array, ""]) -> Int32[Array, "1"]:
    return jnp.asarray(num_rounds, jnp.int32)[None]


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

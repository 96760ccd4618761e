"""The way down: features or a plan → embeddings, state, plan; find is the same and changes nothing.

On one device each store costs one FFI call. A plan made apart costs two, the first over distinct keys only.
On a mesh this runs on every shard: the distinct keys go to their owners, who find or insert rows and send them back.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from jaxsok import exchange, table
from jaxsok.exchange import Round, Route
from jaxsok.features import StoreFeatures
from jaxsok.kernels import lookup as kernels
from jaxsok.plan import Distinct, Found, Plan, Requests
from jaxsok.shards import Shards
from jaxsok.specs import ExchangeSpec, StoreSpec
from jaxsok.store import State, StoreState
from jaxsok.types import COUNTS, NO_ROW, RowIds

Embeddings = dict[str, Array]
"""By feature, in its table's `embedding_dtype`: `[num_bags, dim]` with a combiner, else one row per key in the shape of
the keys."""

_INSERTED, _FOUND = COUNTS.index("num_inserted"), COUNTS.index("num_found")


def lookup(
    specs: Sequence[StoreSpec],
    state: State,
    plan: Plan,
    shards: Shards | None = None,
    wire: ExchangeSpec | None = None,
) -> tuple[Embeddings, State, Plan]:
    """Looks up a batch; unseen keys get rows.

    Args:
      specs: of the stores.
      state: donated: the result has its buffers.
      plan: its features are looked up; its distinct keys are used if it has them.
      shards: over which the stores are split; None: one device.
      wire: how rows travel between them.

    Returns:
      Embeddings by feature, the state, and the plan with what was found.

    Cost:
      A key's bucket (64 bytes) and row are read once, an embedding is written once.
    """
    embeddings: Embeddings = {}
    stores, found, asked = [], [], []
    for s, (spec, store, features) in enumerate(zip(specs, state.stores, plan.features.stores, strict=True)):
        if not features.layouts:
            one_found, values = _nothing(spec, store), []
            asked.append(None if plan.asked is None else plan.asked[s])
        elif shards is not None and wire is not None:
            requests = _asked(shards, spec, features, state, plan, s, wire)
            store, one_found, values = _lookup_exchanged(shards, wire, spec, store, state.seed, features, requests)
            asked.append(requests)
        elif plan.distinct is None:
            store, one_found, values = _lookup_fused(spec, store, state.seed, features)
        else:
            store, one_found, values = _lookup_planned(spec, store, state.seed, features, plan.distinct[s])
        stores.append(store)
        found.append(one_found)
        embeddings |= _named(features, values)
    state = dataclasses.replace(state, stores=tuple(stores))
    plan = dataclasses.replace(plan, asked=None if shards is None else tuple(asked), found=tuple(found))
    return embeddings, state, plan


def find(
    specs: Sequence[StoreSpec],
    state: State,
    plan: Plan,
    shards: Shards | None = None,
    wire: ExchangeSpec | None = None,
) -> tuple[Embeddings, list[Found]]:
    """Looks up a batch and changes nothing; keys without a row read what their table's `unknown` says.

    Returns:
      Embeddings by feature, and what was found by store.
    """
    embeddings: Embeddings = {}
    found = []
    for s, (spec, store, part) in enumerate(zip(specs, state.stores, plan.features.stores, strict=True)):
        if not part.layouts:
            found.append(_nothing(spec, store))
            continue
        if shards is None or wire is None or spec.is_replicated:
            # A replicated store is all here: nothing is asked of others.
            counts, values = kernels.lookup_find(
                store.index,
                store.counters,
                spec.table_words(),
                state.seed,
                part.operands(),
                store.rows,
                _shapes(part, spec),
                part.num_tiles,
                spec.embedding_dtype,
            )
            one_found = Found(_no_row_ids(), store.generation[None], counts, _rounds(0))
        else:
            requests = _asked(shards, spec, part, state, plan, s, wire)
            _, one_found, values = _lookup_exchanged(
                shards, wire, spec, store, state.seed, part, requests, is_find=True
            )
        found.append(one_found)
        embeddings |= _named(part, values)
    return embeddings, found


# Between shards ------------------------------------------------------------------------------------------------------


def _asked(
    shards: Shards, spec: StoreSpec, features: StoreFeatures, state: State, plan: Plan, s: int, wire: ExchangeSpec
) -> Requests:
    if plan.asked is not None:
        return plan.asked[s]
    return exchange.ask(shards, spec, features, state.partition_owners, per_round=wire.send_capacity)


def _lookup_exchanged(
    shards: Shards,
    wire: ExchangeSpec,
    spec: StoreSpec,
    store: StoreState,
    seed: UInt32[Array, "2"],
    features: StoreFeatures,
    asked: Requests,
    *,
    is_find: bool = False,
) -> tuple[StoreState, Found, list[Array]]:
    """One store's lookup through the exchange. What comes back for each request: its row, or its id if replicated."""
    none = jnp.zeros(len(spec.tables), jnp.int32)

    def answer(
        store: StoreState, route: Route, received: UInt32[Array, "_ 4"]
    ) -> tuple[StoreState, Array, Array, Array, Array]:
        """What an owner does: the store, its row ids, what it sends back; inserted keys and uses without a row."""
        keys, table_ids = received[:, :2], received[:, 2]
        if is_find:
            row_ids, inserted = table.find(store, keys, table_ids), none
        else:
            store, row_ids, counts = table.find_or_insert(spec, store, seed, keys, table_ids)
            inserted = counts[:, _INSERTED]
        if spec.is_replicated:
            return store, row_ids, route.to_askers(row_ids), inserted, none
        store, rows, absent = table.gather(spec, store, seed, received, row_ids, is_find=is_find)
        return store, row_ids, route.rows_to_askers(rows, wire.rows), inserted, absent

    if asked.received is not None:
        route = Route(shards, spec.is_replicated, asked.send_capacity)
        store, row_ids, answers, inserted, absent = answer(store, route, asked.received)
        lines, num_rounds = asked.slots, 1
    else:
        row_ids = _no_row_ids()
        num_keys = asked.requests.shape[0]
        if spec.is_replicated:
            answers = jnp.full(num_keys, jnp.uint32(NO_ROW))
        else:
            answers = jnp.zeros((num_keys, spec.dim), jnp.float32)

        def one_round(carry: tuple, rounds: list[Round]) -> tuple:
            store, answers, inserted, absent = carry
            (part,) = rounds
            store, _, back, more_inserted, more_absent = answer(store, part.route, part.requests(asked))
            return store, part.put(answers, back), inserted + more_inserted, absent + more_absent

        (store, answers, inserted, absent), num_rounds = exchange.over_rounds(
            shards, spec, [asked], one_round, (store, answers, none, none)
        )
        lines = asked.inverse
    is_line = (lines >= 0) & (lines < answers.shape[0])
    if spec.is_replicated:
        of_key = jnp.where(is_line, answers.at[lines].get(mode="clip"), jnp.uint32(NO_ROW))
        slabs = store.rows
        inserted = jnp.where(shards.index() == 0, inserted, 0)
    else:
        of_key = jnp.where(is_line, lines.astype(jnp.uint32), jnp.uint32(NO_ROW))
        slabs = (answers,)
    counters, counts, values = kernels.lookup_planned(
        store.counters,
        spec.table_words(),
        seed,
        features.operands(),
        of_key,
        slabs,
        _shapes(features, spec),
        features.num_tiles,
        spec.embedding_dtype if spec.is_replicated else "float32",
    )
    values = [_rounded(value, spec.embedding_dtype) for value in values]
    store = dataclasses.replace(store, counters=counters)
    # Rows came for all keys; which of them were there, the owners know.
    without = COUNTS.index("num_missing" if is_find else "num_refused")
    counts = counts.at[:, _FOUND].add(-inserted - absent).at[:, _INSERTED].add(inserted).at[:, without].add(absent)
    return store, Found(row_ids, store.generation[None], counts, _rounds(num_rounds)), values


# On one device -------------------------------------------------------------------------------------------------------


def _lookup_fused(
    spec: StoreSpec, store: StoreState, seed: UInt32[Array, "2"], features: StoreFeatures
) -> tuple[StoreState, Found, list[Array]]:
    index, counters, table_rows, rows, records, row_ids, counts, values = kernels.lookup(
        store.index,
        store.counters,
        store.table_rows,
        spec.table_words(),
        seed,
        features.operands(),
        store.rows,
        store.records,
        _shapes(features, spec),
        features.num_tiles,
        spec.embedding_dtype,
    )
    store = dataclasses.replace(
        store, index=index, counters=counters, table_rows=table_rows, rows=rows, records=records
    )
    return store, Found(row_ids, store.generation[None], counts, _rounds(0)), values


def _lookup_planned(
    spec: StoreSpec, store: StoreState, seed: UInt32[Array, "2"], features: StoreFeatures, distinct: Distinct
) -> tuple[StoreState, Found, list[Array]]:
    store, unique_ids, unique_counts = table.find_or_insert(spec, store, seed, distinct.unique, distinct.unique_tables)
    row_ids = unique_ids.at[distinct.inverse].get(mode="fill", fill_value=NO_ROW)
    counters, counts, values = kernels.lookup_planned(
        store.counters,
        spec.table_words(),
        seed,
        features.operands(),
        row_ids,
        store.rows,
        _shapes(features, spec),
        features.num_tiles,
        spec.embedding_dtype,
    )
    store = dataclasses.replace(store, counters=counters)
    # Among distinct keys every new one is its own first occurrence; the rest of its occurrences are found.
    inserted = unique_counts[:, COUNTS.index("num_inserted")]
    counts = counts.at[:, COUNTS.index("num_inserted")].set(inserted)
    counts = counts.at[:, COUNTS.index("num_found")].add(-inserted)
    return store, Found(row_ids, store.generation[None], counts, _rounds(0)), values


def _rounded(values: Array, dtype: str) -> Array:
    """Embeddings in the dtype of their table, rounded as the kernels round: what is finite stays finite."""
    if values.dtype == jnp.dtype(dtype):
        return values
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values).astype(dtype)


def _nothing(spec: StoreSpec, store: StoreState) -> Found:
    """What a store without features was asked: nothing."""
    counts = jnp.zeros((len(spec.tables), len(COUNTS)), jnp.int32)
    return Found(_no_row_ids(), store.generation[None], counts, _rounds(0))


def _no_row_ids() -> RowIds:
    """Of nobody; not empty, see `StoreFeatures`."""
    return jnp.full(1, jnp.uint32(NO_ROW))


def _rounds(num_rounds: int | Int32[Array, ""]) -> Int32[Array, "1"]:
    return jnp.asarray(num_rounds, jnp.int32)[None]


def _shapes(features: StoreFeatures, spec: StoreSpec) -> list[tuple[int, ...]]:
    return [(*layout.embedding_shape, spec.dim) for layout in features.layouts]


def _named(features: StoreFeatures, values: Sequence[Array]) -> Embeddings:
    return {layout.name: value for layout, value in zip(features.layouts, values, strict=True)}

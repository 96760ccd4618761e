"""The way down: features or a plan → embeddings, state, plan; find is the same and changes nothing.

On one device each store costs one FFI call. A plan made apart costs two, the first over distinct keys only.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from jaxsok import table
from jaxsok.features import Features, StoreFeatures
from jaxsok.kernels import lookup as kernels
from jaxsok.plan import Distinct, Found, Plan
from jaxsok.specs import StoreSpec
from jaxsok.store import State, StoreState
from jaxsok.types import COUNTS, NO_ROW

Embeddings = dict[str, Array]
"""By feature: float32, `[num_bags, dim]` with a combiner, else one row per key in the shape of the keys."""


def lookup(specs: Sequence[StoreSpec], state: State, plan: Plan) -> tuple[Embeddings, State, Plan]:
    """Looks up a batch; unseen keys get rows.

    Args:
      specs: of the stores.
      state: donated: the result has its buffers.
      plan: its features are looked up; its distinct keys are used if it has them.

    Returns:
      Embeddings by feature, the state, and the plan with what was found.

    Cost:
      A key's bucket (64 bytes) and row are read once, an embedding is written once.
    """
    embeddings: Embeddings = {}
    stores, found = [], []
    for s, (spec, store, features) in enumerate(zip(specs, state.stores, plan.features.stores, strict=True)):
        if not features.layouts:
            stores.append(store)
            found.append(_nothing(spec, store))
            continue
        if plan.distinct is None:
            store, one_found, values = _lookup_fused(spec, store, state.seed, features)
        else:
            store, one_found, values = _lookup_planned(spec, store, state.seed, features, plan.distinct[s])
        stores.append(store)
        found.append(one_found)
        embeddings |= _named(features, values)
    state = dataclasses.replace(state, stores=tuple(stores))
    return embeddings, state, dataclasses.replace(plan, found=tuple(found))


def find(
    specs: Sequence[StoreSpec], state: State, features: Features
) -> tuple[Embeddings, list[Int32[Array, "num_tables num_counts"]]]:
    """Looks up a batch and changes nothing; keys without a row read what their table's `unknown` says.

    Returns:
      Embeddings by feature, and counts by store.
    """
    embeddings: Embeddings = {}
    counts = []
    for spec, store, part in zip(specs, state.stores, features.stores, strict=True):
        if not part.layouts:
            counts.append(_nothing(spec, store).counts)
            continue
        one_counts, values = kernels.lookup_find(
            store.index,
            store.counters,
            spec.table_words(),
            state.seed,
            part.operands(),
            store.rows,
            _shapes(part, spec),
            part.num_tiles,
        )
        counts.append(one_counts)
        embeddings |= _named(part, values)
    return embeddings, counts


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
    )
    store = dataclasses.replace(
        store, index=index, counters=counters, table_rows=table_rows, rows=rows, records=records
    )
    return store, Found(row_ids, store.generation, counts), values


def _lookup_planned(
    spec: StoreSpec, store: StoreState, seed: UInt32[Array, "2"], features: StoreFeatures, distinct: Distinct
) -> tuple[StoreState, Found, list[Array]]:
    store, unique_ids, unique_counts = table.find_or_insert(spec, store, seed, distinct.unique, distinct.unique_tables)
    row_ids = unique_ids.at[distinct.inverse].get(mode="fill", fill_value=NO_ROW)
    counts, values = kernels.lookup_planned(
        spec.table_words(),
        seed,
        features.operands(),
        row_ids,
        store.rows,
        _shapes(features, spec),
        features.num_tiles,
    )
    # Among distinct keys every new one is its own first occurrence; the rest of its occurrences are found.
    inserted = unique_counts[:, COUNTS.index("num_inserted")]
    counts = counts.at[:, COUNTS.index("num_inserted")].set(inserted)
    counts = counts.at[:, COUNTS.index("num_found")].add(-inserted)
    return store, Found(row_ids, store.generation, counts), values


def _nothing(spec: StoreSpec, store: StoreState) -> Found:
    """What a store without features was asked: nothing."""
    counts = jnp.zeros((len(spec.tables), len(COUNTS)), jnp.int32)
    return Found(jnp.zeros(0, jnp.uint32), store.generation, counts)


def _shapes(features: StoreFeatures, spec: StoreSpec) -> list[tuple[int, ...]]:
    return [(*layout.embedding_shape, spec.dim) for layout in features.layouts]


def _named(features: StoreFeatures, values: Sequence[Array]) -> Embeddings:
    return {layout.name: value for layout, value in zip(features.layouts, values, strict=True)}

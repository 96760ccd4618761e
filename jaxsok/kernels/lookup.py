"""Doors of the lookup noun: keys to embeddings, inserting, reading only, or with known row ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxsok.kernels.call import Slab, Store, StoreArrays, call, call_on, call_on_store, result, workspace
from jaxsok.kernels.table import ADMITTING, Admission, Tables, admission_operands
from jaxsok.types import COUNTS, ByTable, Clock, Counters, Digest, Keys, RowIds, Seed, TableCounts

Batch = tuple[Keys, Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Int32[np.ndarray, "num_features 12"]]
"""keys, offsets, weights, features: the parts of `BatchView` in ffi/kernels/lookup.h."""

QUANTIZED_DTYPES: tuple[str, ...] = ("int8", "float8_e4m3fn")
"""Dtypes of rows that have a scale each, in frozen stores alone."""

_COMBINER_WORD = 1  # of a line of features: kFeatureCombiner in ffi/core/layout.h


class LookedUp(NamedTuple):
    """The results of a lookup, without the store."""

    row_ids: RowIds
    counts: TableCounts
    digest: Digest
    embeddings: list[Array]
    """By feature."""


def lookup(
    store: Store,
    tables: Tables,
    seed: Seed,
    batch: Batch,
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str = "float32",
    admission: Admission | None = None,
    clock: Clock | None = None,
) -> tuple[Store, LookedUp]:
    """Looks up a batch; unseen keys get rows. See `LaunchLookup` in ffi/kernels/lookup.h.

    The store is donated. With a clock, which becomes `last_step`, the uses of rows are noted in its statistics.
    """
    if clock is not None and not store.statistics:
        raise ValueError("lookup: clock: got one for a store that keeps no statistics; leave it out")
    keys = batch[0]
    deciding, asked = admission_operands(admission)
    noted = {} if clock is None else {"clock": clock}
    changes = ["index", "counters", "table_rows", "rows", "records"]
    changes += [*(("statistics",) if noted else ()), *(ADMITTING if asked else ())]
    results = {
        "row_ids": result(keys, (keys.shape[0],), "uint32"),
        "digest": result(keys, (1, 2), "uint32"),
        "workspace": workspace(keys, "JaxsokInsertWorkspaceBytes", keys.shape[0]),
    }
    store, out = call_on_store(
        "jaxsok_lookup",
        store,
        {"tables": tables, "seed": seed} | batch_operands(batch) | deciding | noted,
        results | _counts_and_embeddings(batch, tables, embedding_shapes, embedding_dtype),
        changes=changes,
        admission=asked,
        **_attributes(batch, num_tiles),
    )
    return store, LookedUp(out["row_ids"], out["counts"], out["digest"], out["embeddings"])


def lookup_find(
    store: StoreArrays,
    tables: Tables,
    seed: Seed,
    batch: Batch,
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str = "float32",
) -> tuple[TableCounts, list[Array]]:
    """Looks up a batch and changes nothing. See `LaunchLookupFind` in ffi/kernels/lookup.h."""
    _, out = call_on_store(
        "jaxsok_lookup_find",
        store,
        {"tables": tables, "seed": seed} | batch_operands(batch),
        _counts_and_embeddings(batch, tables, embedding_shapes, embedding_dtype),
        reads=("index", "counters", "rows"),
        **_attributes(batch, num_tiles),
    )
    return out["counts"], out["embeddings"]


def lookup_planned(
    counters: Counters,
    tables: Tables,
    seed: Seed,
    batch: Batch,
    row_ids: RowIds,
    rows: Sequence[Slab],
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str = "float32",
    table_ids: UInt32[Array, " num_keys"] | None = None,
) -> tuple[Counters, TableCounts, list[Array]]:
    """Combines rows whose ids are known, a store's or others. See `LaunchLookupPlanned` in ffi/kernels/lookup.h.

    The counters are donated and do not change, but an op that takes them comes after this one. `table_ids` has the
    table of each key of bags, where the features do not give it. There is an embedding for each feature, or for several
    neighbours, which share it in equal parts.
    """
    out = call_on(
        "jaxsok_lookup_planned",
        {"counters": counters, "rows": rows},
        {"tables": tables, "seed": seed}
        | batch_operands(batch)
        | {"row_ids": row_ids, "table_ids": jnp.zeros(0, jnp.uint32) if table_ids is None else table_ids},
        _counts_and_embeddings(batch, tables, embedding_shapes, embedding_dtype),
        in_place=("counters",),
        **_attributes(batch, num_tiles),
    )
    return out["counters"], out["counts"], out["embeddings"]


def lookup_window(
    window: int,
    store: StoreArrays,
    tables: Tables,
    seed: Seed,
    requests: UInt32[Array, "num_lines 4"],
    row_ids: RowIds,
    batch: Batch,
    slots: Int32[Array, " num_keys"],
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str,
    *,
    is_find: bool,
    dtype: str,
) -> tuple[Counters, ByTable, TableCounts, list[Array]]:
    """Sends rows to the shards that asked for them, and combines what came, in one call of each shard.

    It is `table.gather`, an exchange and `lookup_planned`, where no row is written between. Row ids are by request
    received; `slots` has the line of each key's row among those that come back. Returns the counters, which are
    donated and do not change, num_absent, counts and embeddings.
    """
    out = call_on(
        "jaxsok_lookup_window",
        {"counters": store.counters, "rows": store.rows},
        {"tables": tables, "seed": seed, "requests": requests, "row_ids": row_ids}
        | batch_operands(batch)
        | {"slots": slots.view(np.uint32)},
        {"num_absent": result(requests, (tables.shape[0],), "int32")}
        | _counts_and_embeddings(batch, tables, embedding_shapes, embedding_dtype),
        in_place=("counters",),
        window=window,
        is_find=is_find,
        is_float32=dtype == "float32",
        is_bfloat16=dtype == "bfloat16",
        **_attributes(batch, num_tiles),
    )
    return out["counters"], out["num_absent"], out["counts"], out["embeddings"]


def lookup_bags_window(
    window: int,
    store: StoreArrays,
    tables: Tables,
    seed: Seed,
    owned: Batch,
    num_owned_tiles: int,
    row_ids: RowIds,
    table_ids: UInt32[Array, " num_owned_keys"],
    batch: Batch,
    slots: UInt32[Array, " num_lines"],
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    dtype: str,
) -> tuple[Counters, list[Array]]:
    """Sums a shard's rows in the bags of all shards, sends the sums, and adds what came, in one call of each shard.

    It is `lookup_planned` of the batch that is owned, an exchange and `lookup_planned` of the sums, where no sum is
    written between. The owned batch has a feature for each shard; `slots` has the lines of each bag among the sums that
    come as `dtype`, float32 or bfloat16. Returns the counters, which are donated and do not change, and float32
    embeddings.
    """
    out = call_on(
        "jaxsok_lookup_bags_window",
        {"counters": store.counters, "rows": store.rows},
        {"tables": tables, "seed": seed, "owned": owned, "row_ids": row_ids, "table_ids": table_ids}
        | batch_operands(batch)
        | {"slots": slots},
        _counts_and_embeddings(batch, tables, embedding_shapes, "float32"),
        in_place=("counters",),
        window=window,
        num_owned_tiles=num_owned_tiles,
        is_bfloat16=dtype == "bfloat16",
        **_attributes(batch, num_tiles),
    )
    return out["counters"], out["embeddings"]


@dataclasses.dataclass(frozen=True)
class FrozenOperands:
    """One frozen store and the batch that reads it (`FrozenLookup` in ffi/kernels/lookup.h)."""

    index: UInt32[Array, "num_buckets 16"]
    counters: Counters
    """Only the salt is read."""
    tables: UInt32[np.ndarray, "num_tables 16"]
    """A key without a row reads its table's initial row."""
    batch: tuple[Keys, Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Any]
    """As `Batch`; its features, int32[num_features, 12], may be traced."""
    rows: Any
    """`[capacity, dim]`: float32, bfloat16, float16, int8 or float8_e4m3fn."""
    scales: Float32[Array, " capacity"] | None
    """Scales of int8 and float8_e4m3fn rows; else None."""
    embedding_shapes: Sequence[tuple[Any, ...]]
    """By feature: the last axis is `dim`, the bags lie before it. Sizes may be symbolic."""
    embedding_dtype: str
    """float32; or that of the rows, if they are bfloat16 or float16."""
    kinds: int
    """FeatureKind in ffi/core/layout.h: 1 some features have single keys, 2 some have bags, 3 both."""


def lookup_frozen(
    stores: Sequence[FrozenOperands], seed: Seed, *, is_counted: bool = True
) -> tuple[TableCounts | None, list[list[Array]]]:
    """Looks up a batch in several read-only stores, in one call. See `LaunchLookupFrozen`.

    A value of a quantized row is its number times the row's scale, rounded to float32; weights and sums come after.
    Float rows give the bits of `lookup_find`. The seed is for initial rows, unless they are constant. Counts, of the
    stores' tables one after the other, cost a launch more on a GPU; without `is_counted` they are None. ValueError:
    rows do not fit scales or embeddings.
    """
    for number, store in enumerate(stores):
        _check_frozen(store, f"kernels.lookup_frozen: stores[{number}]")
    keys, num_tables = stores[0].batch[0], sum(store.tables.shape[0] for store in stores)
    read = [(one.index, one.counters, one.tables, *one.batch, one.rows, one.scales) for one in stores]
    embeddings = [
        [result(one.batch[0], shape, one.embedding_dtype) for shape in one.embedding_shapes] for one in stores
    ]
    out = call(
        "jaxsok_lookup_frozen",
        {"seed": seed, "stores": read},
        {"counts": result(keys, (num_tables, len(COUNTS)), "int32"), "embeddings": embeddings},
        kinds=np.array([store.kinds for store in stores], np.int32),
        is_counted=is_counted,
    )
    return out["counts"] if is_counted else None, out["embeddings"]


def _check_frozen(store: FrozenOperands, what: str) -> None:
    dtype = np.dtype(store.rows.dtype).name
    is_quantized = dtype in QUANTIZED_DTYPES
    if is_quantized != (store.scales is not None):
        wanted = "float32[capacity]" if is_quantized else "None"
        got = "None" if store.scales is None else f"an array of shape {store.scales.shape}"
        raise ValueError(f"{what}: scales: got {got}, wanted {wanted} for rows of {dtype}.")
    allowed = ("float32",) if is_quantized else ("float32", dtype)
    if store.embedding_dtype not in allowed:
        raise ValueError(f"{what}: embedding_dtype: got {store.embedding_dtype!r}, wanted one of {allowed}.")


def batch_operands(batch: Batch) -> dict[str, Any]:
    """Returns the operands that ReadBatch in ffi/handlers/buffers.h reads."""
    return {"keys": batch[0]} | bag_operands(batch[1:])


def bag_operands(bags: Sequence[Any]) -> dict[str, Any]:
    """Returns the operands that ReadBags reads: offsets, weights, features."""
    return dict(zip(("offsets", "weights", "features"), bags, strict=True))


def _attributes(batch: Batch, num_tiles: int) -> dict[str, Any]:
    """Returns what a launch must know before it can read the batch; `kinds`: FeatureKind in ffi/core/layout.h."""
    is_bag = batch[3][:, _COMBINER_WORD] != 0
    return {"num_tiles": num_tiles, "kinds": int(not is_bag.all()) | int(is_bag.any()) << 1}


def _counts_and_embeddings(
    batch: Batch, tables: Tables, embedding_shapes: Sequence[tuple[int, ...]], embedding_dtype: str
) -> dict[str, Any]:
    keys = batch[0]
    return {
        "counts": result(keys, (tables.shape[0], len(COUNTS)), "int32"),
        "embeddings": [result(keys, shape, embedding_dtype) for shape in embedding_shapes],
    }

"""Doors of the lookup noun: keys to embeddings, inserting, reading only, or with known row ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8, UInt32

from jaxsok.kernels.call import Slab, Store, StoreArrays, call, call_on, call_on_store, result, workspace
from jaxsok.kernels.table import ADMITTING, Admission, Tables, admission_operands
from jaxsok.kernels.window import after_meeting
from jaxsok.types import COUNTS, ByTable, Clock, Counters, Digest, Keys, RowIds, Seed, TableCounts

Batch = tuple[Keys, Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Int32[np.ndarray, "num_features 12"]]
"""keys, offsets, weights, features: the parts of `BatchView` in ffi/kernels/lookup.h."""

QUANTIZED_DTYPES: tuple[str, ...] = ("int8", "float8_e4m3fn")
"""Dtypes of rows that have a scale each, in frozen stores alone."""

_COMBINER_WORD = 1  # of a line of features: kFeatureCombiner in ffi/core/layout.h


@dataclasses.dataclass(frozen=True)
class Reading:
    """A batch, and the embeddings to make of it."""

    tables: Tables
    seed: Seed
    batch: Batch
    num_tiles: int
    shapes: Sequence[tuple[int, ...]]
    """Shape of the embedding of each feature; neighbours may share one in equal parts."""
    dtype: str = "float32"
    """Dtype of the embeddings."""

    def operands(self, **others: Any) -> dict[str, Any]:
        """Returns tables and seed, other operands, and the batch."""
        return {"tables": self.tables, "seed": self.seed} | others | batch_operands(self.batch)

    def results(self) -> dict[str, Any]:
        """Returns the types of counts and embeddings."""
        keys = self.batch[0]
        return {
            "counts": result(keys, (self.tables.shape[0], len(COUNTS)), "int32"),
            "embeddings": [result(keys, shape, self.dtype) for shape in self.shapes],
        }

    def attributes(self) -> dict[str, Any]:
        """Returns what a launch must know before it can read the batch; `kinds`: FeatureKind in ffi/core/layout.h."""
        is_bag = self.batch[3][:, _COMBINER_WORD] != 0
        return {"num_tiles": self.num_tiles, "kinds": int(not is_bag.all()) | int(is_bag.any()) << 1}


class LookupResults(NamedTuple):
    """The results of a lookup, without the store."""

    row_ids: RowIds
    counts: TableCounts
    digest: Digest
    embeddings: list[Array]
    """The embedding of each feature."""


def lookup(
    store: Store, reading: Reading, admission: Admission | None = None, clock: Clock | None = None
) -> tuple[Store, LookupResults]:
    """Looks up a batch; unseen keys get rows. See `LaunchLookup` in ffi/kernels/lookup.h.

    The store is donated. With a clock, which becomes `last_step`, the uses of rows are noted in its statistics.
    """
    keys = reading.batch[0]
    deciding, asked = admission_operands(admission)
    noted = {} if clock is None else {"clock": clock}
    changes = ["index", "counters", "table_rows", "rows", "records"]
    changes += [*(("statistics",) if noted else ()), *(ADMITTING if asked else ())]
    operands = reading.operands() | deciding | noted
    results = {
        "row_ids": result(keys, (keys.shape[0],), "uint32"),
        "digest": result(keys, (1, 2), "uint32"),
        "workspace": workspace(keys, "JaxsokInsertWorkspaceBytes", keys.shape[0]),
    } | reading.results()
    attributes = {"admission": asked} | reading.attributes()
    store, out = call_on_store("jaxsok_lookup", store, operands, results, changes=changes, **attributes)
    return store, LookupResults(out["row_ids"], out["counts"], out["digest"], out["embeddings"])


def lookup_find(store: StoreArrays, reading: Reading) -> tuple[TableCounts, list[Array]]:
    """Looks up a batch and changes nothing. See `LaunchLookupFind` in ffi/kernels/lookup.h."""
    reads, attributes = ("index", "counters", "rows"), reading.attributes()
    _, out = call_on_store(
        "jaxsok_lookup_find", store, reading.operands(), reading.results(), reads=reads, **attributes
    )
    return out["counts"], out["embeddings"]


def lookup_planned(
    counters: Counters,
    reading: Reading,
    row_ids: RowIds,
    rows: Sequence[Slab],
    table_ids: UInt32[Array, " num_keys"] | None = None,
) -> tuple[Counters, TableCounts, list[Array]]:
    """Combines rows with known ids, of a store or others. See `LaunchLookupPlanned` in ffi/kernels/lookup.h.

    The counters are donated and do not change, but an op that takes them comes after this one. `table_ids` has the
    table of each key of bags, where the features do not give it.
    """
    ids = {"row_ids": row_ids, "table_ids": jnp.zeros(0, jnp.uint32) if table_ids is None else table_ids}
    arrays, operands = {"counters": counters, "rows": rows}, reading.operands() | ids
    in_place, attributes = ("counters",), reading.attributes()
    out = call_on("jaxsok_lookup_planned", arrays, operands, reading.results(), in_place=in_place, **attributes)
    return out["counters"], out["counts"], out["embeddings"]


class WindowResults(NamedTuple):
    """The results of a lookup through windows."""

    counters: Counters
    """Those given, which are donated and do not change."""
    num_absent: ByTable
    counts: TableCounts
    sorted_uses: UInt8[Array, " num_bytes"] | None
    """The uses of the rows that came, sorted by row, for `update_window`."""
    embeddings: list[Array]


def lookup_window(
    window: int,
    store: StoreArrays,
    reading: Reading,
    requests: UInt32[Array, "num_lines 4"],
    row_ids: RowIds,
    slots: Int32[Array, " num_keys"],
    *,
    is_find: bool,
    dtype: str,
    sorts_uses: bool,
) -> WindowResults:
    """Does `table.gather`, an exchange and `lookup_planned` in one call of each shard; writes no row in between.

    Row ids are by request received; `slots` has the line of each key's row among those that come back, as `dtype`.
    The uses are sorted, if so asked, while rows cross the wire.
    """
    arrays = {"counters": store.counters, "rows": store.rows}
    operands = reading.operands(requests=requests, row_ids=row_ids) | {"slots": slots.view(np.uint32)}
    operands |= after_meeting(window, slots)
    num_keys, none = slots.shape[0], result(slots, (0,), "uint8")
    results = {
        "num_absent": result(requests, (reading.tables.shape[0],), "int32"),
        "sorted_uses": workspace(slots, "JaxsokSortedUsesBytes", num_keys) if sorts_uses else none,
        "workspace": workspace(slots, "JaxsokUpdateWorkspaceBytes", num_keys, 0) if sorts_uses else none,
    } | reading.results()
    attributes = reading.attributes() | {
        "window": window,
        "is_find": is_find,
        "is_float32": dtype == "float32",
        "is_bfloat16": dtype == "bfloat16",
    }
    out = call_on("jaxsok_lookup_window", arrays, operands, results, in_place=("counters",), **attributes)
    sorted_uses = out["sorted_uses"] if sorts_uses else None
    return WindowResults(out["counters"], out["num_absent"], out["counts"], sorted_uses, out["embeddings"])


def lookup_bags_window(
    window: int,
    store: StoreArrays,
    reading: Reading,
    owned: Batch,
    num_owned_tiles: int,
    row_ids: RowIds,
    table_ids: UInt32[Array, " num_owned_keys"],
    slots: UInt32[Array, " num_lines"],
    dtype: str,
) -> tuple[Counters, list[Array]]:
    """Does `lookup_planned` of the owned batch, an exchange and `lookup_planned` of the sums, in a call of each shard.

    The owned batch has a feature for each shard; `slots` has the lines of each bag among the sums that come as `dtype`,
    float32 or bfloat16. Returns the counters, which are donated and do not change, and float32 embeddings.
    """
    arrays = {"counters": store.counters, "rows": store.rows}
    operands = reading.operands(owned=owned, row_ids=row_ids, table_ids=table_ids) | {"slots": slots}
    operands |= after_meeting(window, slots)
    results, attributes = reading.results(), reading.attributes()
    attributes |= {"window": window, "num_owned_tiles": num_owned_tiles, "is_bfloat16": dtype == "bfloat16"}
    out = call_on("jaxsok_lookup_bags_window", arrays, operands, results, in_place=("counters",), **attributes)
    return out["counters"], out["embeddings"]


MOST_KEY_ARRAYS = 64
"""Arrays of keys that a lookup of a frozen store reads (`kMostKeyArrays` in ffi/kernels/lookup.h)."""


@dataclasses.dataclass(frozen=True)
class FrozenOperands:
    """The arrays of one frozen store and of the batch that reads it (`FrozenLookup` in ffi/kernels/lookup.h)."""

    index: UInt32[Array, "num_buckets 16"]
    counters: Counters
    """Only the salt is read."""
    tables: UInt32[np.ndarray, "num_tables 16"]
    """The tables; a key without a row reads its table's initial row."""
    keys: Sequence[Keys]
    """One array with the keys of all features, or an array for each, at most `MOST_KEY_ARRAYS`."""
    bags: tuple[Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Any]
    """Offsets and weights, and features: int32[num_features, 12], which may be traced."""
    rows: Any
    """`[capacity, dim]`: float32, bfloat16, float16, int8 or float8_e4m3fn."""
    scales: Float32[Array, " capacity"] | None
    """Scales of int8 and float8_e4m3fn rows; else None."""
    host_rows: Sequence[UInt8[Array, "_ row_bytes"]]
    """No array, or one: the bytes of the rows beyond those of `rows`, in host memory."""
    embedding_shapes: Sequence[tuple[Any, ...]]
    """Shape of each feature's embedding: `dim` last, the bags before it. Sizes may be symbolic."""
    kinds: int
    """FeatureKind in ffi/core/layout.h: 1 some features have single keys, 2 some have bags, 3 both."""


def lookup_frozen(
    stores: Sequence[FrozenOperands], seed: Seed, *, is_counted: bool = True
) -> tuple[TableCounts | None, list[list[Array]]]:
    """Looks up a batch in several read-only stores, in one call. See `LaunchLookupFrozen`.

    A value of a quantized row is its number times the row's scale, rounded to float32; weights and sums come after.
    Float rows give the bits of `lookup_find`. Counts, of the stores' tables one after the other, cost a launch more on
    a GPU; without `is_counted` they are None. ValueError: rows do not fit scales.
    """
    for number, store in enumerate(stores):
        _check_frozen(store, f"kernels.lookup_frozen: stores[{number}]")
    keys, num_tables = stores[0].keys[0], sum(store.tables.shape[0] for store in stores)
    read = [
        (
            store.index,
            store.counters,
            store.tables,
            *store.keys,
            *store.bags,
            store.rows,
            *store.host_rows,
            store.scales,
        )
        for store in stores
    ]
    embeddings = [[result(store.keys[0], shape, "float32") for shape in store.embedding_shapes] for store in stores]
    out = call(
        "jaxsok_lookup_frozen",
        {"seed": seed, "stores": read},
        {"counts": result(keys, (num_tables, len(COUNTS)), "int32"), "embeddings": embeddings},
        kinds=np.array([store.kinds for store in stores], np.int32),
        has_host_rows=np.array([len(store.host_rows) for store in stores], np.int32),
        num_key_arrays=np.array([len(store.keys) if len(store.keys) > 1 else 0 for store in stores], np.int32),
        is_counted=is_counted,
    )
    return out["counts"] if is_counted else None, out["embeddings"]


def _check_frozen(store: FrozenOperands, what: str) -> None:
    if len(store.keys) > MOST_KEY_ARRAYS:
        raise ValueError(f"{what}: keys: got {len(store.keys)} arrays, wanted at most {MOST_KEY_ARRAYS}; join them.")
    dtype = np.dtype(store.rows.dtype).name
    is_quantized = dtype in QUANTIZED_DTYPES
    if is_quantized != (store.scales is not None):
        wanted = "float32[capacity]" if is_quantized else "None"
        got = "None" if store.scales is None else f"an array of shape {store.scales.shape}"
        raise ValueError(f"{what}: scales: got {got}, wanted {wanted} for rows of {dtype}.")


def batch_operands(batch: Batch) -> dict[str, Any]:
    """Returns the operands that ReadBatch in ffi/handlers/buffers.h reads."""
    return {"keys": batch[0]} | bag_operands(batch[1:])


def bag_operands(bags: Sequence[Any]) -> dict[str, Any]:
    """Returns the operands that ReadBags reads: offsets, weights, features."""
    return dict(zip(("offsets", "weights", "features"), bags, strict=True))

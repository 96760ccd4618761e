"""Doors of the lookup noun: keys to embeddings, inserting, reading only, or with row ids known."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.table import Admission, RecordSlab, Slab, StatisticsSlab, result
from jaxsok.types import COUNTS, Keys, RowIds

Batch = tuple[Keys, Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Int32[np.ndarray, "num_features 12"]]
"""keys, offsets, weights, features: the parts of `BatchView` in ffi/kernels/lookup.h."""

QUANTIZED_DTYPES: tuple[str, ...] = ("int8", "float8_e4m3fn")
"""Of rows that have a scale each; frozen stores alone have them."""

_COMBINER_WORD = 1  # of a line of features: kFeatureCombiner in ffi/core/layout.h


def lookup(
    index: UInt32[Array, "num_buckets 16"],
    counters: UInt32[Array, " num_counters"],
    table_rows: UInt32[Array, " num_tables"],
    tables: UInt32[np.ndarray, "num_tables 16"],
    seed: UInt32[Array, "2"],
    batch: Batch,
    rows: Sequence[Slab],
    records: Sequence[RecordSlab],
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str = "float32",
    admission: Admission | None = None,
    statistics: Sequence[StatisticsSlab] = (),
    clock: UInt32[Array, ""] | None = None,
) -> tuple[
    Array,
    Array,
    Array,
    tuple[Array, ...],
    tuple[Array, ...],
    tuple[StatisticsSlab, ...],
    tuple[tuple[Array, ...], tuple[Array, ...]],
    RowIds,
    Int32[Array, "num_tables num_counts"],
    UInt32[Array, "1 2"],
    list[Array],
]:
    """Looks up a batch; unseen keys get rows. See `LaunchLookup` in ffi/kernels/lookup.h.

    With `statistics`, slabs of the store, the uses of rows are noted in them: `clock` is what `last_step` becomes.

    Returns:
      index, counters, table_rows, rows, records, statistics, (sightings, bloom) (all donated), row_ids, counts,
      the digest of the keys, embeddings.
    """
    if bool(statistics) != (clock is not None):
        raise ValueError("lookup: statistics and clock: got one of them; pass both or neither")
    keys, num_slabs = batch[0], len(rows)
    workspace = library.register().JaxsokInsertWorkspaceBytes(keys.shape[0])
    state = (index, counters, table_rows)
    slabs = (*rows, *records, *statistics, *(() if admission is None else admission.in_place))
    others = (*(() if admission is None else admission.others), *(() if clock is None else (clock,)))
    results = (
        *map(jax.typeof, state),
        result(keys, (keys.shape[0],), "uint32"),
        result(keys, (tables.shape[0], len(COUNTS)), "int32"),
        result(keys, (1, 2), "uint32"),
        result(keys, (workspace,), "uint8"),
        *map(jax.typeof, slabs),
        *(result(keys, shape, embedding_dtype) for shape in embedding_shapes),
    )
    aliases = {0: 0, 1: 1, 2: 2} | {9 + i: 7 + i for i in range(len(slabs))}
    call = jax.ffi.ffi_call("jaxsok_lookup", results, input_output_aliases=aliases)
    attributes = {
        "statistics": np.int32(bool(statistics)),
        "admission": np.int32(0 if admission is None else admission.bits),
    }
    out = call(*state, tables, seed, *batch, *slabs, *others, **attributes, **_attributes(batch, num_slabs, num_tiles))
    index, counters, table_rows, row_ids, counts, digest, _, *rest = out
    ends = [num_slabs, 2 * num_slabs, 2 * num_slabs + len(statistics), len(slabs), len(rest)]
    *in_place, embeddings = (tuple(rest[begin:end]) for begin, end in itertools.pairwise([0, *ends]))
    new_rows, new_records, new_statistics, counted = in_place
    counted = ((), ()) if admission is None else admission.after(counted)
    state = (index, counters, table_rows, new_rows, new_records, new_statistics, counted)
    return *state, row_ids, counts, digest, list(embeddings)


def lookup_find(
    index: UInt32[Array, "num_buckets 16"],
    counters: UInt32[Array, " num_counters"],
    tables: UInt32[np.ndarray, "num_tables 16"],
    seed: UInt32[Array, "2"],
    batch: Batch,
    rows: Sequence[Slab],
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str = "float32",
) -> tuple[Int32[Array, "num_tables num_counts"], list[Array]]:
    """Looks up a batch and changes nothing. See `LaunchLookupFind` in ffi/kernels/lookup.h.

    Returns:
      counts, embeddings.
    """
    library.register()
    results = _counts_and_embeddings(batch[0], tables, embedding_shapes, embedding_dtype)
    call = jax.ffi.ffi_call("jaxsok_lookup_find", results)
    counts, *embeddings = call(index, counters, tables, seed, *batch, *rows, **_attributes(batch, len(rows), num_tiles))
    return counts, list(embeddings)


def lookup_planned(
    counters: UInt32[Array, " num_counters"],
    tables: UInt32[np.ndarray, "num_tables 16"],
    seed: UInt32[Array, "2"],
    batch: Batch,
    row_ids: RowIds,
    rows: Sequence[Slab],
    embedding_shapes: Sequence[tuple[int, ...]],
    num_tiles: int,
    embedding_dtype: str = "float32",
) -> tuple[UInt32[Array, " num_counters"], Int32[Array, "num_tables num_counts"], list[Array]]:
    """Combines rows whose ids are known. See `LaunchLookupPlanned` in ffi/kernels/lookup.h.

    Returns:
      counters (donated, unchanged: an op that takes them comes after this one), counts, embeddings.
    """
    library.register()
    results = (jax.typeof(counters), *_counts_and_embeddings(batch[0], tables, embedding_shapes, embedding_dtype))
    call = jax.ffi.ffi_call("jaxsok_lookup_planned", results, input_output_aliases={0: 0})
    counters, counts, *embeddings = call(
        counters, tables, seed, *batch, row_ids, *rows, **_attributes(batch, len(rows), num_tiles)
    )
    return counters, counts, list(embeddings)


@dataclasses.dataclass(frozen=True)
class FrozenOperands:
    """One frozen store and the batch that reads it (`FrozenLookup` in ffi/kernels/lookup.h)."""

    index: UInt32[Array, "num_buckets 16"]
    counters: UInt32[Array, " num_counters"]
    """The salt alone is read."""
    tables: UInt32[np.ndarray, "num_tables 16"]
    """What a key without a row reads is its table's initial row."""
    batch: tuple[Keys, Int32[Array, " num_offsets"], Float32[Array, " num_weights"], Any]
    """As `Batch`; its features, int32[num_features, 12], may be traced."""
    rows: Any
    """`[capacity, dim]`: float32, bfloat16, float16, int8 or float8_e4m3fn."""
    scales: Float32[Array, " capacity"] | None
    """Of int8 and float8_e4m3fn, and of those alone."""
    embedding_shapes: Sequence[tuple[Any, ...]]
    """By feature: the last axis is `dim`, the bags lie before it. Sizes may be symbolic."""
    embedding_dtype: str
    """float32; or that of the rows, if they are bfloat16 or float16."""
    kinds: int
    """FeatureKind in ffi/core/layout.h: 1 some features have single keys, 2 some have bags, 3 both."""


def lookup_frozen(
    stores: Sequence[FrozenOperands], seed: UInt32[Array, "2"], *, is_counted: bool = True
) -> tuple[Int32[Array, "num_tables num_counts"] | None, list[list[Array]]]:
    """Looks up a batch in several stores that nobody writes, in one call. See `LaunchLookupFrozen`.

    A value of a quantized row is its number times the row's scale, rounded to float32; weights and sums come after.
    Float rows give the bits of `lookup_find`.

    Args:
      stores: one at least. Their tables lie one after the other in the counts.
      seed: of the initial rows that keys without a row read; a constant one asks for none.
      is_counted: whether keys are counted: a launch more, on a GPU.

    Returns:
      counts of all tables or None, embeddings by store and feature.

    Raises:
      ValueError: rows and scales, or rows and embeddings, do not fit each other.
    """
    library.register()
    for number, store in enumerate(stores):
        _check_frozen(store, f"kernels.lookup_frozen: stores[{number}]")
    num_tables = sum(store.tables.shape[0] for store in stores)
    keys = stores[0].batch[0]
    results = [result(keys, (num_tables, len(COUNTS)), "int32")]
    operands: list[Any] = [seed]
    for store in stores:
        scales = () if store.scales is None else (store.scales,)
        operands += [store.index, store.counters, store.tables, *store.batch, store.rows, *scales]
        results += [result(store.batch[0], shape, store.embedding_dtype) for shape in store.embedding_shapes]
    kinds = np.array([store.kinds for store in stores], np.int32)
    call = jax.ffi.ffi_call("jaxsok_lookup_frozen", results)
    counts, *embeddings = call(*operands, kinds=kinds, is_counted=np.int32(is_counted))
    by_store = []
    for store in stores:
        by_store.append(embeddings[: len(store.embedding_shapes)])
        embeddings = embeddings[len(store.embedding_shapes) :]
    return counts if is_counted else None, by_store


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


def _attributes(batch: Batch, num_slabs: int, num_tiles: int) -> dict[str, np.int32]:
    """What a launch must know before it can look into the batch; `kinds`: FeatureKind in ffi/core/layout.h."""
    is_bag = batch[3][:, _COMBINER_WORD] != 0
    kinds = int(not is_bag.all()) | int(is_bag.any()) << 1
    return {"num_slabs": np.int32(num_slabs), "num_tiles": np.int32(num_tiles), "kinds": np.int32(kinds)}


def _counts_and_embeddings(
    keys: Keys, tables: np.ndarray, embedding_shapes: Sequence[tuple[int, ...]], embedding_dtype: str
) -> tuple[Any, ...]:
    return (
        result(keys, (tables.shape[0], len(COUNTS)), "int32"),
        *(result(keys, shape, embedding_dtype) for shape in embedding_shapes),
    )

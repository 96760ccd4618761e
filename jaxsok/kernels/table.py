"""Doors of the table noun: find, find_or_insert, gather, scatter, touch, rebuild, forget, wait."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt32

from jaxsok.kernels.call import RecordSlab, StatisticsSlab, Store, call, call_on, call_on_store, result, workspace
from jaxsok.types import BUCKET_WORDS, COUNTS, ByTable, Clock, Counters, Keys, RowIds, Seed, TableCounts, TableIds

Tables = UInt32[np.ndarray, "num_tables 16"]
"""The tables of a store, by number: TableWord in ffi/core/layout.h."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """Decides which unseen keys get a row, with the store's sightings and its Bloom filter."""

    step: Clock
    refused: Tables
    """The tables, with the initializers that keys without a row read."""
    uses: UInt32[Array, " num_keys"] | None = None
    """Occurrences of each position; None: one each."""


ADMITTING = ("sightings", "bloom")
"""Arrays of a store that change with insertions, where tables have an admission."""


def admission_operands(admission: Admission | None) -> tuple[dict[str, Any], int]:
    """Returns the operands of an admission, and an attribute that says which there are (`ReadAdmission`)."""
    if admission is None:
        return {}, 0
    operands = {"step": admission.step, "refused": admission.refused}
    return (operands, 1) if admission.uses is None else (operands | {"uses": admission.uses}, 3)


def find(index: UInt32[Array, "num_buckets 16"], counters: Counters, keys: Keys, table_ids: TableIds) -> RowIds:
    """Finds row ids of (table, key) pairs; NO_ROW where absent or padding. See `LaunchFind` in ffi/kernels/table.h."""
    arrays = {"index": index, "counters": counters}
    results = {"row_ids": result(keys, (keys.shape[0],), "uint32")}
    return call_on("jaxsok_table_find", arrays, {"keys": keys, "table_ids": table_ids}, results)["row_ids"]


def find_or_insert(
    store: Store,
    tables: Tables,
    seed: Seed,
    keys: Keys,
    table_ids: TableIds,
    admission: Admission | None = None,
    *,
    has_rows: bool = True,
) -> tuple[Store, RowIds, TableCounts]:
    """Finds row ids of pairs; unseen pairs get rows, with numbers if `has_rows`. See `LaunchFindOrInsert`."""
    rows = ("rows",) if has_rows else ()
    num_keys = keys.shape[0]
    deciding, asked = admission_operands(admission)
    results = {
        "row_ids": result(keys, (num_keys,), "uint32"),
        "counts": result(keys, (tables.shape[0], len(COUNTS)), "int32"),
        "workspace": workspace(keys, "JaxsokInsertWorkspaceBytes", num_keys),
    }
    store, out = call_on_store(
        "jaxsok_table_find_or_insert",
        store,
        {"tables": tables, "seed": seed, "keys": keys, "table_ids": table_ids} | deciding,
        results,
        changes=("index", "counters", "table_rows", *rows, "records", *(ADMITTING if asked else ())),
        admission=asked,
    )
    return store, out["row_ids"], out["counts"]


def gather(
    counters: Counters,
    tables: Tables,
    seed: Seed,
    requests: UInt32[Array, "num_keys 4"],
    row_ids: RowIds,
    rows: Sequence[Float[Array, "_ dim"]],
    *,
    is_find: bool,
    dtype: str,
) -> tuple[Counters, Float[Array, "num_keys dim"], ByTable]:
    """Reads the rows of requests by row id; counts absent rows; donates the counters. See `LaunchGather`."""
    arrays = {"counters": counters, "rows": rows}
    operands = {"tables": tables, "seed": seed, "requests": requests, "row_ids": row_ids}
    results = {
        "gathered": result(requests, (requests.shape[0], rows[0].shape[1]), dtype),
        "num_absent": result(requests, (tables.shape[0],), "int32"),
    }
    out = call_on("jaxsok_table_gather", arrays, operands, results, in_place=("counters",), is_find=is_find)
    return out["counters"], out["gathered"], out["num_absent"]


def scatter(row_ids: RowIds, lines: Shaped[Array, "_ _"], slabs: Sequence[Shaped[Array, "_ _"]]) -> tuple[Array, ...]:
    """Writes rows into donated slabs by row id, in their dtype. See `LaunchScatter` in ffi/kernels/table.h."""
    operands = {"row_ids": row_ids, "lines": lines, "slabs": tuple(slabs)}
    return call("jaxsok_table_scatter", operands, {}, in_place=("slabs",))["slabs"]


def touch(
    row_ids: RowIds, uses: UInt32[Array, " _"] | None, clock: Clock, statistics: Sequence[StatisticsSlab]
) -> tuple[StatisticsSlab, ...]:
    """Notes in donated statistics that a lookup used rows, once each or as `uses` says. See `LaunchTouch`."""
    uses = jnp.zeros(0, jnp.uint32) if uses is None else uses
    operands = {"row_ids": row_ids, "uses": uses, "clock": clock}
    arrays = {"statistics": tuple(statistics)}
    return call_on("jaxsok_table_touch", arrays, operands, {}, in_place=("statistics",))["statistics"]


def rebuild(
    counters: Counters, records: Sequence[RecordSlab], num_buckets: int
) -> tuple[UInt32[Array, "num_buckets 16"], Counters]:
    """Makes an index of `num_buckets` buckets from the records; the counters are donated. See `LaunchRebuild`."""
    results = {"index": result(counters, (num_buckets, BUCKET_WORDS), "uint32")}
    arrays = {"counters": counters, "records": records}
    out = call_on("jaxsok_table_rebuild", arrays, {}, results, in_place=("counters",))
    return out["index"], out["counters"]


def forget(
    sightings: UInt32[Array, "num_buckets 16"], floors: UInt32[Array, " num_tables"] | UInt32[np.ndarray, " num_tables"]
) -> UInt32[Array, "num_buckets 16"]:
    """Forgets waiting keys with a count at their table's floor or above; sightings are donated. See `LaunchForget`."""
    arrays = {"sightings": sightings}
    return call_on("jaxsok_table_forget", arrays, {"floors": floors}, {}, in_place=("sightings",))["sightings"]


def wait(
    counters: Counters,
    floors: UInt32[np.ndarray, " num_tables"],
    entries: UInt32[Array, "num_entries 4"],
    num_buckets: int,
) -> tuple[UInt32[Array, "num_buckets 16"], Counters]:
    """Makes sightings of `num_buckets` buckets of waiting keys; the counters are donated. See `LaunchWait`."""
    operands = {"floors": floors, "entries": entries}
    results = {"sightings": result(counters, (num_buckets, BUCKET_WORDS), "uint32")}
    out = call_on("jaxsok_table_wait", {"counters": counters}, operands, results, in_place=("counters",))
    return out["sightings"], out["counters"]

"""Doors of the table noun: find, find_or_insert, gather, scatter, touch, erase, rebuild, forget, wait."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

from jaxsok.kernels import library
from jaxsok.types import BUCKET_WORDS, COUNTS, Keys, RowIds, TableIds

# Slabs of one array differ in capacity. Rows are float32, bfloat16 or float16; optimizer state is as wide as its row
# or 1.
Slab = Float[Array, "_ dim"]
StateSlab = Float32[Array, "_ _"]
RecordSlab = UInt32[Array, "_ 4"]
StatisticsSlab = UInt32[Array, "_ 2"]


def result(like: Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result type that varies over the mesh as `like` does."""
    return jax.typeof(like).update(shape=shape, dtype=np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Admission:
    """What decides who of the unseen keys gets a row (`AdmissionView` in ffi/core/layout.h)."""

    sightings: tuple[UInt32[Array, "_ 16"], ...]
    """None or one; donated."""
    bloom: tuple[UInt32[Array, " _"], ...]
    """None or one; donated."""
    step: UInt32[Array, ""]
    refused: UInt32[np.ndarray, "num_tables 16"]
    """As `tables`, with initializers that give what keys without a row read."""
    uses: UInt32[Array, " num_keys"] | None = None
    """Occurrences that each position stands for; None: one each."""

    @property
    def in_place(self) -> tuple[Array, ...]:
        """The operands that come back."""
        return (*self.sightings, *self.bloom)

    @property
    def others(self) -> tuple[Any, ...]:
        """Those that follow."""
        return (self.step, self.refused, *(() if self.uses is None else (self.uses,)))

    @property
    def bits(self) -> int:
        """Which operands there are: AdmissionOperand in ffi/handlers/buffers.h."""
        return 1 | bool(self.sightings) << 1 | bool(self.bloom) << 2 | (self.uses is not None) << 3

    def after(self, in_place: Sequence[Array]) -> "tuple[tuple[Array, ...], tuple[Array, ...]]":
        """The sightings and the filter, of what came back."""
        return tuple(in_place[: len(self.sightings)]), tuple(in_place[len(self.sightings) :])


def find(
    index: UInt32[Array, "num_buckets 16"],
    counters: UInt32[Array, " num_counters"],
    keys: Keys,
    table_ids: TableIds,
) -> RowIds:
    """Row ids of (table, key) pairs; NO_ROW where absent or padding. See `LaunchFind` in ffi/kernels/table.h."""
    library.register()
    call = jax.ffi.ffi_call("jaxsok_table_find", result(keys, (keys.shape[0],), "uint32"))
    return call(index, counters, keys, table_ids)


def find_or_insert(
    index: UInt32[Array, "num_buckets 16"],
    counters: UInt32[Array, " num_counters"],
    table_rows: UInt32[Array, " num_tables"],
    tables: UInt32[np.ndarray, "num_tables 16"],
    seed: UInt32[Array, "2"],
    keys: Keys,
    table_ids: TableIds,
    rows: Sequence[Slab],
    records: Sequence[RecordSlab],
    admission: Admission | None = None,
) -> tuple[
    Array,
    Array,
    Array,
    tuple[Array, ...],
    tuple[Array, ...],
    tuple[tuple[Array, ...], tuple[Array, ...]],
    RowIds,
    Int32[Array, "num_tables num_counts"],
]:
    """Row ids of (table, key) pairs; unseen pairs get rows. See `LaunchFindOrInsert` in ffi/kernels/table.h.

    Returns:
      index, counters, table_rows, rows, records, (sightings, bloom) (all donated), row_ids, counts.
    """
    num_keys, num_slabs = keys.shape[0], len(rows)
    workspace = library.register().JaxsokInsertWorkspaceBytes(num_keys)
    state = (index, counters, table_rows)
    slabs = (*rows, *records)
    in_place = slabs if admission is None else (*slabs, *admission.in_place)
    others = () if admission is None else admission.others
    operands = (*state, tables, seed, keys, table_ids, *in_place, *others)
    results = (
        *map(jax.typeof, state),
        result(keys, (num_keys,), "uint32"),
        result(keys, (tables.shape[0], len(COUNTS)), "int32"),
        result(keys, (workspace,), "uint8"),
        *map(jax.typeof, in_place),
    )
    aliases = {0: 0, 1: 1, 2: 2} | {7 + i: 6 + i for i in range(len(in_place))}
    call = jax.ffi.ffi_call("jaxsok_table_find_or_insert", results, input_output_aliases=aliases)
    attributes = {"num_slabs": np.int32(num_slabs), "admission": np.int32(0 if admission is None else admission.bits)}
    index, counters, table_rows, row_ids, counts, _, *slabs = call(*operands, **attributes)
    rows, records, rest = slabs[:num_slabs], slabs[num_slabs : 2 * num_slabs], slabs[2 * num_slabs :]
    counted = ((), ()) if admission is None else admission.after(rest)
    return index, counters, table_rows, tuple(rows), tuple(records), counted, row_ids, counts


def gather(
    counters: UInt32[Array, " num_counters"],
    tables: UInt32[np.ndarray, "num_tables 16"],
    seed: UInt32[Array, "2"],
    requests: UInt32[Array, "num_keys 4"],
    row_ids: RowIds,
    rows: Sequence[Slab],
    *,
    is_find: bool,
) -> tuple[UInt32[Array, " num_counters"], Float[Array, "num_keys dim"], Int32[Array, " num_tables"]]:
    """The rows of requests whose row ids are known. See `LaunchGather` in ffi/kernels/table.h.

    Returns:
      counters (donated, unchanged: an op that takes them comes after this one), rows, num_absent.
    """
    library.register()
    results = (
        jax.typeof(counters),
        result(requests, (requests.shape[0], rows[0].shape[1]), rows[0].dtype),
        result(requests, (tables.shape[0],), "int32"),
    )
    call = jax.ffi.ffi_call("jaxsok_table_gather", results, input_output_aliases={0: 0})
    attributes = {"num_slabs": np.int32(len(rows)), "is_find": np.int32(is_find)}
    return tuple(call(counters, tables, seed, requests, row_ids, *rows, **attributes))


def scatter(row_ids: RowIds, lines: Shaped[Array, "_ _"], slabs: Sequence[Shaped[Array, "_ _"]]) -> tuple[Array, ...]:
    """Writes lines of a per-row array by row id. See `LaunchScatter` in ffi/kernels/table.h.

    Args:
      row_ids: of each line; NO_ROW is passed over. The lines of equal row ids are equal.
      lines: in the dtype and width of the slabs.
      slabs: of rows, of an array of optimizer state, or of statistics; donated.

    Returns:
      slabs.
    """
    library.register()
    results = tuple(map(jax.typeof, slabs))
    aliases = {2 + i: i for i in range(len(slabs))}
    call = jax.ffi.ffi_call("jaxsok_table_scatter", results, input_output_aliases=aliases)
    return tuple(call(row_ids, lines, *slabs, num_slabs=np.int32(len(slabs))))


def touch(
    row_ids: RowIds,
    uses: UInt32[Array, " _"],
    clock: UInt32[Array, ""],
    statistics: Sequence[StatisticsSlab],
) -> tuple[StatisticsSlab, ...]:
    """Notes that a lookup used rows. See `LaunchTouch` in ffi/kernels/table.h.

    Args:
      row_ids: of each position; NO_ROW is passed over.
      uses: of each position; none: one each.
      clock: what `last_step` becomes.
      statistics: slabs, donated.

    Returns:
      statistics.
    """
    library.register()
    results = tuple(map(jax.typeof, statistics))
    aliases = {3 + i: i for i in range(len(statistics))}
    call = jax.ffi.ffi_call("jaxsok_table_touch", results, input_output_aliases=aliases)
    return tuple(call(row_ids, uses, clock, *statistics, num_slabs=np.int32(len(statistics))))


def erase(
    index: UInt32[Array, "num_buckets 16"],
    counters: UInt32[Array, " num_counters"],
    table_rows: UInt32[Array, " num_tables"],
    keys: Keys,
    table_ids: TableIds,
    records: Sequence[RecordSlab],
    states: Sequence[Sequence[StateSlab]],
    initial_values: Sequence[float],
) -> tuple[Array, Array, Array, tuple[Array, ...], tuple[tuple[Array, ...], ...], UInt32[Array, ""]]:
    """Takes rows away and rebuilds the index in place. See `LaunchErase` in ffi/kernels/table.h.

    Returns:
      index, counters, table_rows, records, states (all donated), num_erased.
    """
    num_slabs = len(records)
    capacity = sum(slab.shape[0] for slab in records)
    workspace = library.register().JaxsokRebuildWorkspaceBytes(capacity)
    state = (index, counters, table_rows)
    slabs = (*records, *(slab for array in states for slab in array))
    results = (
        *map(jax.typeof, state),
        result(keys, (), "uint32"),
        result(keys, (workspace,), "uint8"),
        *map(jax.typeof, slabs),
    )
    aliases = {0: 0, 1: 1, 2: 2} | {5 + i: 5 + i for i in range(len(slabs))}
    call = jax.ffi.ffi_call("jaxsok_table_erase", results, input_output_aliases=aliases)
    index, counters, table_rows, num_erased, _, *slabs = call(
        *state, keys, table_ids, *slabs, num_slabs=np.int32(num_slabs), initial=np.asarray(initial_values, np.float32)
    )
    parts = tuple(tuple(slabs[i : i + num_slabs]) for i in range(0, len(slabs), num_slabs))
    return index, counters, table_rows, parts[0], parts[1:], num_erased


def rebuild(
    counters: UInt32[Array, " num_counters"], records: Sequence[RecordSlab], num_buckets: int
) -> tuple[UInt32[Array, "num_buckets 16"], UInt32[Array, " num_counters"]]:
    """Makes an index of `num_buckets` buckets from the records. See `LaunchRebuild` in ffi/kernels/table.h.

    Returns:
      index, counters (donated).
    """
    capacity = sum(slab.shape[0] for slab in records)
    workspace = library.register().JaxsokRebuildWorkspaceBytes(capacity)
    results = (
        result(counters, (num_buckets, BUCKET_WORDS), "uint32"),
        jax.typeof(counters),
        result(counters, (workspace,), "uint8"),
    )
    call = jax.ffi.ffi_call("jaxsok_table_rebuild", results, input_output_aliases={0: 1})
    index, counters, _ = call(counters, *records, num_slabs=np.int32(len(records)))
    return index, counters


def forget(
    sightings: UInt32[Array, "num_buckets 16"], floors: UInt32[Array, " num_tables"] | UInt32[np.ndarray, " num_tables"]
) -> UInt32[Array, "num_buckets 16"]:
    """Forgets waiting keys whose count is their table's floor or more. See `LaunchForget` in ffi/kernels/table.h.

    Returns:
      sightings (donated).
    """
    library.register()
    call = jax.ffi.ffi_call("jaxsok_table_forget", jax.typeof(sightings), input_output_aliases={0: 0})
    return call(sightings, floors)


def wait(
    counters: UInt32[Array, " num_counters"],
    floors: UInt32[np.ndarray, " num_tables"],
    entries: UInt32[Array, "num_entries 4"],
    num_buckets: int,
) -> tuple[UInt32[Array, "num_buckets 16"], UInt32[Array, " num_counters"]]:
    """Makes sightings of `num_buckets` buckets of waiting keys. See `LaunchWait` in ffi/kernels/table.h.

    Returns:
      sightings, counters (donated).
    """
    library.register()
    results = (result(counters, (num_buckets, BUCKET_WORDS), "uint32"), jax.typeof(counters))
    call = jax.ffi.ffi_call("jaxsok_table_wait", results, input_output_aliases={0: 1})
    return tuple(call(counters, floors, entries))


def home_bucket(
    keys: UInt32[np.ndarray, "num_keys 2"], table_ids: UInt32[np.ndarray, " num_keys"], salt: int, num_buckets: int
) -> np.ndarray:
    """The home bucket of (table, key) pairs, in NumPy: for tests and for looking at an index.

    Example:
      >>> home_bucket(np.array([[7, 0]], np.uint32), np.array([0], np.uint32), salt=0, num_buckets=1).tolist()
      [0]
    """
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    words = np.ascontiguousarray(keys).view(np.uint64)[:, 0]
    hashes = mix(mix(words ^ np.uint64(salt)) + (table_ids.astype(np.uint64) + np.uint64(1)) * golden)
    return ((hashes >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)

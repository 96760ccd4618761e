"""The next version of one store of a part, with its own map of rows: a plan changes no data that readers use."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok.plan import partitions_of
from jaxsok.records import Records, join_records, regroup
from jaxsok.serving.errors import ServingError
from jaxsok.serving.folders import Frozen, TableSource
from jaxsok.serving.frozen import FrozenStore, FrozenTable, FrozenTables, check_records, lines_of, write_lines
from jaxsok.serving.padding import NO_KEYS
from jaxsok.serving.ready import Form
from jaxsok.serving.row_map import RowMap
from jaxsok.types import NO_ROW

# Rows cross to the device in such pieces. Each takes a few calls of JAX, which keep Python's lock for some 0.1 ms, so
# with small pieces more lookups wait: 4 MiB made their 99th percentile 0.1 ms longer.
PIECE_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Part:
    """The tables on one device: all of their rows, or those whose keys it owns."""

    tables: FrozenTables
    maps: tuple[RowMap, ...]  # which keys have which rows, by store

    @functools.cached_property
    def form(self) -> Form:
        """The form of the arrays: programs are compiled for it."""
        return Form(self.tables)

    def over(self, stores: Sequence[FrozenStore], maps: Sequence[RowMap]) -> "Part":
        return Part(dataclasses.replace(self.tables, stores=tuple(stores)), tuple(maps))


@dataclasses.dataclass(frozen=True)
class Change:
    """The part of an update that changes one table."""

    table: FrozenTable
    source: TableSource
    keys: np.ndarray  # of the rows it brings: distinct
    gone: np.ndarray | None  # keys that go first; None: all keys but those it brings

    @classmethod
    def of(cls, table: FrozenTable, source: TableSource) -> "Change":
        """Reads the keys of an update, whose files are checked; `pieces` checks its rows."""
        keys = np.concatenate([NO_KEYS, *(some.copy() for some in source.keys())])
        gone = None if source.base is None else np.concatenate([NO_KEYS, *source.tombstones()])
        return cls(table, source, keys, gone)

    @property
    def is_empty(self) -> bool:
        return self.gone is not None and not len(self.keys) and not len(self.gone)

    def take_owned(self, number: int, num_parts: int) -> "Change":
        """Returns the change of the keys that one of several parts owns."""
        if num_parts == 1:
            return self
        gone = None if self.gone is None else self.gone[owners_of(self.gone, num_parts) == number]
        keys = self.keys[owners_of(self.keys, num_parts) == number]
        return dataclasses.replace(self, source=_filter_owned(self.source, number, num_parts), keys=keys, gone=gone)

    def pieces(self) -> Iterator[Records]:
        """Yields its rows in pieces, as large as one write takes: files have many small batches."""

        def check() -> Iterator[Records]:
            start = 0
            for records in self.source.chunks():
                check_records("update", self.table, records)
                if not np.array_equal(records.keys, self.keys[start : (start := start + records.num_rows)]):
                    raise ServingError(
                        f'update: table "{self.table.name}": path: "{self.source.path}" changed while it was read; '
                        "write a new folder for each update."
                    )
                yield records

        # A power of two, which needs no padding.
        yield from regroup(check(), 1 << max(1, PIECE_BYTES // self.table.row_bytes).bit_length() - 1, join_records)

    def find_gone(self, row_map: RowMap, number: int) -> np.ndarray:
        """Finds the keys that it removes from a table."""
        if self.gone is not None:
            return self.gone
        row_ids = row_map.find(number, self.keys)
        stays = np.zeros(row_map.capacity, bool)
        stays[row_ids[row_ids != NO_ROW]] = True
        held, rows = row_map.keys_of(number)
        return held[~stays[rows]]


def owners_of(keys: np.ndarray, num_parts: int) -> np.ndarray:
    """Returns the part that owns each key of tables that are split over devices."""
    return (partitions_of(keys, np.uint64(0)) % np.uint64(num_parts)).astype(np.int64)


def split_sources(given: Sequence[Frozen], num_parts: int) -> list[list[Frozen]]:
    """Gives each part the rows whose keys it owns; reads each source once to count them."""
    parts: list[list[Frozen]] = [[] for _ in range(num_parts)]
    for table, source in given:
        counts = np.zeros(num_parts, np.int64)
        for keys in source.keys():
            counts += np.bincount(owners_of(keys, num_parts), minlength=num_parts)
        for number, mine in enumerate(parts):
            owned = _filter_owned(source, number, num_parts)
            mine.append((table, dataclasses.replace(owned, num_rows=int(counts[number]))))
    return parts


def _filter_owned(source: TableSource, number: int, num_parts: int) -> TableSource:
    return dataclasses.replace(
        source,
        chunks=lambda: (some.take(owners_of(some.keys, num_parts) == number) for some in source.chunks()),
        keys=lambda: (keys[owners_of(keys, num_parts) == number] for keys in source.keys()),
    )


class StorePlan:
    """The next version of one store of a part; `capacity` chooses its size from the rows needed.

    With `keeps_places` rows that stay keep their row ids, which say whether they lie on the device.
    """

    def __init__(
        self, part: Part, store: int, changes: Sequence[Change], capacity: Callable[[int], int], *, keeps_places: bool
    ) -> None:
        self.part, self.store, self.changes = part, store, changes
        self.old, old, tables = part.tables.stores[store], part.maps[store], part.tables.spec.stores[store]
        numbers = {table.name: number for number, table in enumerate(tables)}
        gone = {change.table.name: change.find_gone(old, numbers[change.table.name]) for change in changes}
        are_whole = len(changes) == len(tables) and all(change.gone is None for change in changes)
        self._is_fresh = are_whole and not keeps_places  # no row of the old store stays
        if self._is_fresh:
            self.num_needed = sum(len(change.keys) for change in changes)  # rows in use
            self.row_map = RowMap(len(tables), capacity(self.num_needed))  # of the next version
            self._row_ids = [self.row_map.place(numbers[change.table.name], change.keys) for change in changes]
        else:
            self.row_map = old.copy()
            for name, keys in gone.items():
                self.row_map.remove(numbers[name], keys)
            self._row_ids = [self.row_map.find(numbers[change.table.name], change.keys) for change in changes]
            are_new = [row_ids == NO_ROW for row_ids in self._row_ids]
            self.num_needed = int(self.row_map.table_rows.sum()) + sum(map(np.count_nonzero, are_new))
            self.row_map.grow(capacity(self.num_needed))
            for change, row_ids, is_new in zip(changes, self._row_ids, are_new, strict=True):
                row_ids[is_new] = self.row_map.place(numbers[change.table.name], change.keys[is_new])
        # The keys of each table that have other rows, or none any more.
        self.changed = {change.table.name: np.concatenate([change.keys, gone[change.table.name]]) for change in changes}
        sizes, new_capacity = [len(change.keys) * tables[0].row_bytes for change in changes], self.row_map.capacity
        self._has_rows = any(sizes) or new_capacity != self.old.capacity
        self.is_grown = new_capacity > self.old.capacity
        self.changed_bytes = sum(sizes)
        self.piece_bytes = 2 * min(PIECE_BYTES, max(sizes))  # on the device, padded to a power of two
        self.index_bytes = 64 * self.row_map.num_buckets
        self.copy_bytes = self.index_bytes + self._has_rows * (new_capacity * tables[0].row_bytes + self.piece_bytes)

    def lines(self) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
        """Yields the changed rows as they are stored: row ids, and what `lines_of` gives."""
        for change, row_ids in zip(self.changes, self._row_ids, strict=True):
            start = 0
            for records in change.pieces():
                some = slice(start, start := start + records.num_rows)
                yield row_ids[some], lines_of(change.table, records)

    def write(self, device: Any, is_in_place: bool) -> FrozenStore:
        """Makes the next version, of a copy of the rows; in place, or if none changes, of the rows that are there."""
        store = self.old
        if self._has_rows and not is_in_place:
            with jax.default_device(device):
                rows, *scales = (self._copy(array) for array in (store.rows, *store.scales))
            store = dataclasses.replace(store, rows=rows, scales=tuple(scales))
            for row_ids, lines in self.lines():
                store = write_lines(store, row_ids, lines)
        index, counters = self.row_map.next_index(self.part.maps[self.store], self.old.index)
        return dataclasses.replace(store, index=index, counters=counters)

    def _copy(self, array: Array) -> Array:
        """Makes an array for the next version on an array's device, with its rows unless all of them leave."""
        more = self.row_map.capacity - array.shape[0]
        if self._is_fresh:
            return jax.device_put(jnp.zeros((self.row_map.capacity, *array.shape[1:]), array.dtype), array.sharding)
        return jnp.pad(array, [(0, more), *[(0, 0)] * (array.ndim - 1)]) if more else jnp.copy(array)

"""Versions of tables whose rows lie in databases: an update writes rows there, then replaces the cached ones.

A database has one version of a row. So an update is not atomic below the cache: until it ends, and after one that
failed, a lookup that misses may read both new and old rows; cached rows change in one instant. Doing it again
repairs an update that failed.
"""

import copy
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsok.serving.backing import RowSource
from jaxsok.serving.config import Config, ModelConfig
from jaxsok.serving.databases import Connected, DatabaseRows
from jaxsok.serving.errors import ServingError
from jaxsok.serving.folders import KeyBits, TableSource
from jaxsok.serving.frozen import FrozenSpec, FrozenTable, FrozenTables, check_records
from jaxsok.serving.model.store_plans import Change
from jaxsok.serving.model.versions import InPlace, Part, Reader, Source, Version, open_update
from jaxsok.types import PADDING_KEY


@dataclasses.dataclass(frozen=True)
class StoredVersion(Version):
    """A version whose `tables` have no arrays: the rows are in databases."""

    stored: Any = None  # DatabaseRows
    replaced: frozenset[str] = frozenset()  # tables that the update to this version has replaced whole

    @functools.cached_property
    def num_rows(self) -> dict[str, int]:
        return {name: self.stored.num_rows(name) for name in self.tables.tables}

    def rows(self) -> RowSource:
        """Returns the rows, as those of this version."""
        rows = copy.copy(self.stored)
        rows.version, rows.served = self.number, self.served
        return rows


class StoredVersions:
    """The versions of one model's tables in databases, as `versions.Versions` for those in memory. Fills them first."""

    host_bytes = held_bytes = 0

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        given: Sequence[tuple[FrozenTable, TableSource]],
        databases: Connected,
        served: Any,
    ) -> None:
        self.name, self._is_read_only = model.model, config.persistent_db.read_only
        self.key_bits: KeyBits = config.key_bits
        self._updating = threading.Lock()  # held by one update; it alone sets `current`
        self.num_in_place = 0
        tables = [table for table, _ in given]
        there = [database for database in databases if database is not None]
        make = functools.partial(DatabaseRows, model=model.model, tables=tables, key_bits=config.key_bits)
        filled = (
            databases[0] is not None and config.volatile_db.initialize_after_startup,
            databases[1] is not None and config.persistent_db.initialize_after_startup and not self._is_read_only,
        )
        volatile, persistent = (
            make([database]) if is_filled else None for database, is_filled in zip(databases, filled, strict=True)
        )
        for table, source in given:
            _fill(table, source, volatile, config.volatile_db.initial_cache_rate, persistent)
        is_filled = sum(filled) == len(there)
        self.current = StoredVersion(
            number=1,
            parts=(Part(FrozenTables((), FrozenSpec.of(tables)), ()),),
            is_split=False,
            files={table.name: str(source.path) for table, source in given},
            uuids={table.name: source.uuid if is_filled else None for table, source in given},
            unknowns={table.name: source.unknown for table, source in given},
            served=served,
            dense_file=str(model.dense_file or ""),
            stored=make(there, lifts=config.volatile_db.cache_missed_embeddings),
        )

    def update(
        self, source: Source | None, *, in_place: InPlace, dense_model: tuple[Any, str] | None, reader: Reader
    ) -> Version:
        """Writes the rows of a source into the databases, see `Session.update`; if one fails, some rows are written."""
        if in_place is False:
            raise ServingError(
                f'update: in_place: got False for model "{self.name}", whose rows lie in databases, wanted True or '
                '"auto": rows there are changed where they lie.'
            )
        if self._is_read_only and source is not None:
            raise ServingError(
                f'update: model "{self.name}": source: got one, wanted None: persistent_db is read_only, and rows that '
                "only volatile_db has can be lost; open it without read_only."
            )
        with self._updating:
            try:
                old = self.current
                opened = {} if source is None else open_update(self.name, source, old, self.key_bits)
                changes = [Change.of(old.tables.tables[name], found) for name, found in opened.items()]
                replaced = frozenset(change.table.name for change in changes if change.gone is None)
                new = dataclasses.replace(old.make_next(opened, dense_model), replaced=replaced)
                reader.prepare(old, new)
                changed = {change.table.name: _write(old.stored, change) for change in changes if not change.is_empty}
                reader.publish(new, changed)
                self.current = new
                self.num_in_place += bool(changed)
                return new
            finally:
                reader.settle(self.current)


def _fill(
    table: FrozenTable,
    source: TableSource,
    volatile: DatabaseRows | None,
    cache_rate: float,
    persistent: DatabaseRows | None,
) -> None:
    """Writes the rows of a table's file into the persistent database, and the first of them into the volatile one."""
    rest = round(cache_rate * source.num_rows)
    for records in source.chunks() if volatile or persistent else ():
        check_records("open", table, records)
        keys, rows = records.keys, records.rows.astype(np.float32)
        if persistent is not None:
            persistent.insert(table.name, keys, rows)
        if volatile is not None:
            volatile.insert(table.name, keys[:rest], rows[:rest])
            volatile.erase(table.name, keys[rest:])  # it may have older rows
            rest = max(0, rest - len(keys))


def _write(stored: DatabaseRows, change: Change) -> np.ndarray:
    """Writes an update of a table; gives the keys that have other rows now, or none."""
    name, gone = change.table.name, change.gone
    if gone is None:
        new = np.sort(np.append(change.keys, np.uint64(PADDING_KEY)))  # which is greater than all keys
        parts = [keys[new[np.searchsorted(new, keys)] != keys] for keys in stored.keys(name)]
        gone = np.concatenate([np.zeros(0, np.uint64), *parts])
    stored.erase(name, gone)
    for records in change.pieces():
        stored.insert(name, records.keys, records.rows.astype(np.float32))
    return np.concatenate([change.keys, gone])

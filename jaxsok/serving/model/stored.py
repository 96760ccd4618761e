"""Versions of tables whose rows lie in databases: an update writes rows there, then replaces the cached ones.

A database has one version of a row. So an update is not atomic below the cache: until it ends, and after one that
failed, a lookup that misses may read both new and old rows; cached rows change in one instant. Doing it again
repairs an update that failed, and so does a full export. Deltas without it are refused: its rows would stay.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsok.serving.config import Config, ModelConfig
from jaxsok.serving.databases import Connected, DatabaseRows
from jaxsok.serving.errors import ServingError
from jaxsok.serving.folders import Frozen
from jaxsok.serving.frozen import FrozenSpec, FrozenTables, check_records
from jaxsok.serving.model.store_plans import Change, Part
from jaxsok.serving.model.versions import AnyVersions, InPlace, Source, Version, publish
from jaxsok.serving.padding import NO_KEYS


class StoredVersions(AnyVersions):
    """The versions of one model's tables in databases, which it fills first."""

    host_bytes = 0

    def __init__(
        self, config: Config, model: ModelConfig, given: Sequence[Frozen], databases: Connected, served: Any
    ) -> None:
        super().__init__(model.model, config.key_bits)
        self._unfinished: dict[str, tuple[pathlib.Path, tuple[str, ...]]] = {}  # by table: what failed in the middle
        self._is_read_only = config.persistent_db.read_only
        tables = [table for table, _ in given]
        there = [database for database in databases if database is not None]
        make = functools.partial(DatabaseRows, model=model.model, tables=tables, key_bits=config.key_bits)
        volatile = persistent = None
        if databases[0] is not None and config.volatile_db.initialize_after_startup:
            volatile = make([databases[0]])
        if databases[1] is not None and config.persistent_db.initialize_after_startup and not self._is_read_only:
            persistent = make([databases[1]])
        _fill(given, volatile, persistent, config.volatile_db.initial_cache_rate)
        stored = make(there, lifts=config.volatile_db.cache_missed_embeddings)
        if persistent is not None:
            for table, source in given:
                stored.note_whole(table.name, source.num_rows)
        no_arrays = Part(FrozenTables((), FrozenSpec.of(tables)), ())
        num_rows = {table.name: stored.num_rows(table.name) for table in tables}
        first = Version.first(model, given, served, [no_arrays])
        self.current = dataclasses.replace(first, stored=stored, stored_rows=num_rows)
        if len(there) > sum(rows is not None for rows in (volatile, persistent)):  # a database may have other rows
            self.current = dataclasses.replace(self.current, uuids=dict.fromkeys(self.current.uuids), opened={})

    def _check(self, source: Source | None, in_place: InPlace) -> None:
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

    def _update(self, old: Any, new: Any, changes: Sequence[Change], in_place: InPlace, readers: Sequence[Any]) -> None:
        """Writes rows into the databases; if one fails, some are written."""
        for change in changes:
            path, last = self._unfinished.get(change.table.name, (None, ()))
            if path is not None and change.gone is not None and not {*last} & {*change.source.links}:
                raise ServingError(
                    f'update: table "{change.table.name}": source: got the delta "{change.source.path}", wanted '
                    f'the update up to "{path}" again, or a full export: it failed in the middle, and databases may '
                    "have some of its rows."
                )
        replaced = frozenset(change.table.name for change in changes if change.gone is None)
        new = dataclasses.replace(new, replaced=replaced)
        for reader in readers:
            reader.prepare(old, new)
        changed = {}
        for change in (change for change in changes if not change.is_empty):
            self._unfinished[change.table.name] = change.source.path, change.source.links[-1:]
            changed[change.table.name] = _write(old.stored, change)
        num_rows = {name: old.stored.num_rows(name) for name in changed}
        new = dataclasses.replace(new, stored_rows={**old.stored_rows, **num_rows})
        publish(readers, old, new, changed)
        self.current = new
        for name in changed:
            del self._unfinished[name]
        self.num_in_place += bool(changed)


def _fill(given: Sequence[Frozen], volatile: DatabaseRows | None, persistent: DatabaseRows | None, rate: float) -> None:
    """Makes the persistent database have the rows of tables, and the volatile one the first of each table."""
    for table, source in given if volatile or persistent else ():
        new = np.concatenate([NO_KEYS, *(some.copy() for some in source.keys())])
        for filled in filter(None, (persistent, volatile)):
            filled.keep_only(table.name, new)
        rest = round(rate * source.num_rows)
        for records in source.chunks():
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
        gone = stored.keep_only(name, change.keys)
    else:
        stored.erase(name, gone)
    for records in change.pieces():
        stored.insert(name, records.keys, records.rows.astype(np.float32))
    if change.gone is None:
        stored.note_whole(name, len(change.keys))
    else:
        stored.note_delta(name, len(change.keys))
    return np.concatenate([change.keys, gone])

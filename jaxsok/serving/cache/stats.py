"""Counts of a device cache."""

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_MOST_LATER = 64  # counts that wait on the device: reading more of them would take long, and holds arrays


@dataclasses.dataclass
class TableCounts:
    """Counts of the keys of one table since the cache was made: distinct keys of each lookup."""

    distinct: int = 0
    hits: int = 0
    misses: int = 0
    missing: int = 0  # fetched keys that no tier has

    @property
    def hit_rate(self) -> float:
        """The hit rate of all lookups together; 1.0 before the first."""
        return self.hits / self.distinct if self.distinct else 1.0


@dataclasses.dataclass
class CacheStats(TableCounts):
    """Counts of all tables together."""

    lookups: int = 0
    keys: int = 0  # occurrences, without padding
    sync: int = 0  # tables of lookups that waited for rows
    background: int = 0  # tables of lookups that answered misses with the default
    dropped: int = 0  # tables of lookups whose misses are not fetched, because too much was waiting
    fetched: int = 0  # keys asked of the source because they missed
    inserted: int = 0
    evicted: int = 0  # rows that left because others came
    refreshed: int = 0  # rows overwritten by `refresh` and `swap`
    removed: int = 0  # rows that left by `refresh` and `swap`: their keys are gone, or everything was dropped
    failed: int = 0  # background fetches whose source raised; logged
    swaps: int = 0


class Counter:
    """The counts of one cache, added up by many threads."""

    def __init__(self, tables: Iterable[str]) -> None:
        self._lock = threading.Lock()
        # Changed and copied under `_lock`: a copy has all of an `add`, or none of it.
        self._stats, self._tables = CacheStats(), {name: TableCounts() for name in tables}
        self._later: list[dict[str, Any]] = []  # counts on the device, to be added to those of all tables

    def add(self, table: str | None = None, **more: int) -> None:
        with self._lock:
            _add(self._stats, more)
            if table is not None:
                _add(self._tables[table], more)

    def add_later(self, **more: Any) -> None:
        """Adds numbers that the device is to deliver: when counts are asked for, or if too many wait."""
        with self._lock:
            self._later.append(more)
            if len(self._later) > _MOST_LATER:
                _add(self._stats, self._later.pop(0))

    def stats(self) -> CacheStats:
        """Returns the counts of all tables together; waits for programs that insert rows."""
        with self._lock:
            while self._later:
                _add(self._stats, self._later.pop(0))
            return dataclasses.replace(self._stats)

    def tables(self) -> dict[str, TableCounts]:
        with self._lock:
            return {name: dataclasses.replace(counts) for name, counts in self._tables.items()}


def _add(counts: TableCounts, more: Mapping[str, Any]) -> None:
    """Adds numbers by name, of the host or of a device, for which it waits."""
    for name, number in more.items():
        setattr(counts, name, getattr(counts, name) + int(np.asarray(number)))

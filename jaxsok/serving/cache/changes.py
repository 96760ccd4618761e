"""Fills, refreshes and swaps the rows of a device cache beside lookups."""

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxsok import keys as keys_lib
from jaxsok.serving.backing import RowSource, SourceReplacedError
from jaxsok.serving.cache import fetcher
from jaxsok.serving.cache.stores import Batch, DeviceStores
from jaxsok.serving.errors import UnknownTableError
from jaxsok.types import PADDING_KEY

ROWS_AT_A_TIME = 1 << 17  # rows of one step of these changes: host and device memory for them stays bounded

_NO_KEYS = np.zeros(0, np.uint64)


class Changes:
    """Runs one refresh or swap at a time: `_lock` is held from its first search for cached keys to its last write."""

    def __init__(self, stores: DeviceStores) -> None:
        self._stores = stores
        self._lock = threading.Lock()

    def fill(self, shares: Mapping[str, int]) -> int:
        start, num_inserted = self._stores.snapshot(), 0
        for name, share in shares.items():
            hottest = fetcher.hottest(start.source.scan(name, ROWS_AT_A_TIME), share)
            chunks = list(_chunks(hottest.num_rows, ROWS_AT_A_TIME))
            for chunk in reversed(chunks):  # the hottest come last: they are the most recent
                of_chunk = _filling(start.source, name, hottest.keys[chunk], hottest.rows[chunk])
                num_inserted += self._stores.insert({name: of_chunk}, start.epoch)
        return num_inserted

    def refresh(self, fraction: float) -> int:
        with self._lock:
            stores, source, num_refreshed = self._stores, self._stores.source, 0  # swaps wait for `_lock`
            cached = self.cached_keys()
            num_cached = sum(map(len, cached.values()))
            share = math.ceil(num_cached * fraction) if fraction else num_cached
            for name, keys in cached.items():
                for chunk in _chunks(len(keys), min(max(1, share), ROWS_AT_A_TIME)):
                    try:
                        written, gone = self._fetched(source, name, keys[chunk])
                    except SourceReplacedError:  # the swap that follows brings the new rows
                        return num_refreshed
                    num_refreshed += stores.rewrite([*written, *stores.batches({name: (gone, None)})])
            return num_refreshed

    def swap(self, source: RowSource, changed: Mapping[str, Any] | None) -> None:
        stores = self._stores
        if dict(source.tables) != dict(stores.source.tables):
            raise ValueError(
                f"swap: source: got tables {list(source.tables.values())}, wanted "
                f"{list(stores.source.tables.values())}; open another cache."
            )
        for name in changed or ():
            if name not in stores.spec.places:
                raise UnknownTableError.of("swap", name, stores.spec.places)
        with self._lock:
            leaving = {name: _changed_keys(name, keys) for name, keys in (changed or {}).items()}
            with stores.leaving(leaving):
                batches = None if changed is None else self._changed_batches(source, leaving)
                stores.swap(source, batches)

    def cached_keys(self) -> dict[str, np.ndarray]:
        """The keys of each table that are cached now, uint64."""
        keys_of = {}
        records = self._stores.copies(lambda store: store.records[0], is_required=True)
        for tables, lines in zip(self._stores.spec.stores, map(np.asarray, records), strict=True):
            keys = keys_lib.from_words(lines[:, :2])
            for number, table in enumerate(tables):
                keys_of[table.name] = keys[(keys != np.uint64(PADDING_KEY)) & (lines[:, 2] == number)]
        return keys_of

    def _changed_batches(self, source: RowSource, changed: Mapping[str, np.ndarray]) -> list[Batch]:
        """The changed keys that are cached: with their rows in another source, or to be dropped."""
        batches: list[Batch] = []
        gone: dict[str, tuple[np.ndarray, None]] = {}
        for name, keys in changed.items():
            of_table = [_NO_KEYS]
            for chunk in _chunks(len(keys), ROWS_AT_A_TIME):
                cached = keys[chunk][self._stores.contains(name, keys[chunk])]
                if len(cached):
                    written, missing = self._fetched(source, name, cached)
                    batches += written
                    of_table.append(missing)
            gone[name] = np.concatenate(of_table), None
        return [*batches, *self._stores.batches(gone)]  # one program a store drops rows, which reads all of it

    def _fetched(self, source: RowSource, name: str, keys: np.ndarray) -> tuple[list[Batch], np.ndarray]:
        """The rows of keys, to be written, and the keys that the source does not have."""
        rows, is_found = fetcher.fetch(source, name, keys)
        found = keys[is_found], fetcher.take(rows, is_found)
        return list(self._stores.batches({name: found})), keys[~is_found]


def _filling(source: RowSource, name: str, keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, fetcher.Lines]:
    """Keys and rows of a scan as the cache stores them; the bits of quantized rows are asked of the source."""
    if not source.tables[name].is_quantized:
        return keys, fetcher.round_rows(source.tables[name], rows)
    lines, is_found = fetcher.fetch(source, name, keys)
    return keys[is_found], fetcher.take(lines, is_found)


def _chunks(size: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, size, most))


def _changed_keys(name: str, keys: Any) -> np.ndarray:
    """Distinct keys of a table, sorted."""
    keys = np.unique(keys_lib.from_words(keys_lib.to_words(np.asarray(keys), f'swap: table "{name}"')))
    return keys[keys != np.uint64(PADDING_KEY)]

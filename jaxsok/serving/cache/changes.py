"""Changes of cached rows other than by lookups: filling, refreshing, and swapping versions."""

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxsok import keys as keys_lib
from jaxsok.serving.backing import RowSource, fetch_lines, hottest_rows, round_rows
from jaxsok.serving.cache.stores import Batch, DeviceStores
from jaxsok.serving.errors import UnknownTableError
from jaxsok.types import PADDING_KEY

ROWS_AT_A_TIME = 1 << 17  # rows of one step of a fill, refresh or swap, which bounds their memory on host and device

_NO_KEYS = np.zeros(0, np.uint64)


class Changes:
    """The changes of one cache."""

    def __init__(self, stores: DeviceStores) -> None:
        self._stores = stores
        self._lock = threading.Lock()  # held by one refresh or swap, from its search for cached keys to its end

    def cached_keys(self) -> dict[str, np.ndarray]:
        """Reads the keys of each table that are cached now, uint64; copies 16 bytes a row of capacity to the host."""
        keys_of = {}
        records = self._stores.copies("records", is_required=True)
        for tables, (of_store,) in zip(self._stores.spec.stores, records, strict=True):
            lines = np.asarray(of_store)
            keys = keys_lib.from_words(lines[:, :2])
            for number, table in enumerate(tables):
                keys_of[table.name] = keys[(keys != np.uint64(PADDING_KEY)) & (lines[:, 2] == number)]
        return keys_of

    def fill(self, shares: Mapping[str, int]) -> int:
        start, num_inserted = self._stores.snapshot(), 0
        for name, share in shares.items():
            table, hottest = start.source.tables[name], hottest_rows(start.source.scan(name, ROWS_AT_A_TIME), share)
            chunks = list(_chunks(hottest.num_rows, ROWS_AT_A_TIME))
            for chunk in reversed(chunks):  # the hottest rows come last: they count as the most recent
                keys = hottest.keys[chunk]
                if table.is_quantized:  # only the source has their bits
                    rows, is_found = fetch_lines(start.source, name, keys)
                    keys = keys[is_found]
                else:
                    rows = round_rows(table, hottest.rows[chunk])
                num_inserted += self._stores.insert({name: (keys, rows)}, start.epoch)
        return num_inserted

    def refresh(self, fraction: float) -> int:
        """Reads the cached rows again, a fraction of them at a time; 0: all at once."""
        with self._lock:
            num_refreshed, cached = 0, self.cached_keys()
            num_cached = sum(map(len, cached.values()))
            share = math.ceil(num_cached * fraction) if fraction else num_cached
            for name, keys in cached.items():
                for chunk in _chunks(len(keys), min(max(1, share), ROWS_AT_A_TIME)):
                    written, gone = self._batches_of(self._stores.source, name, keys[chunk])
                    num_refreshed += self._stores.rewrite([*written, *self._stores.batches({name: (gone, None)})])
            return num_refreshed

    def swap(self, source: RowSource, changed: Mapping[str, Any] | None) -> None:
        stores, spec = self._stores, self._stores.spec
        if dict(source.tables) != dict(stores.source.tables):
            raise ValueError(
                f"swap: source: got tables {list(source.tables.values())}, wanted "
                f"{list(stores.source.tables.values())}; open another cache."
            )
        for name in changed or ():
            if name not in spec.places:
                raise UnknownTableError.of("swap", name, spec.places)
        with self._lock:
            leaving = None if changed is None else {name: _distinct(name, keys) for name, keys in changed.items()}
            with stores.keep_out(leaving):
                if leaving is not None:
                    batches = self._changed_batches(source, leaving)
                else:
                    batches = list(stores.batches({name: (keys, None) for name, keys in self.cached_keys().items()}))
                stores.rewrite(batches, source)

    def _changed_batches(self, source: RowSource, changed: Mapping[str, np.ndarray]) -> list[Batch]:
        """Finds the changed keys that are cached: with their rows in another source, or to be dropped."""
        batches: list[Batch] = []
        gone: dict[str, tuple[np.ndarray, None]] = {}
        for name, keys in changed.items():
            of_table = [_NO_KEYS]
            for chunk in _chunks(len(keys), ROWS_AT_A_TIME):
                cached = keys[chunk][self._stores.contains(name, keys[chunk])]
                if len(cached):
                    written, missing = self._batches_of(source, name, cached)
                    batches += written
                    of_table.append(missing)
            gone[name] = np.concatenate(of_table), None
        return [*batches, *self._stores.batches(gone)]  # one program a store drops rows, which reads all of it

    def _batches_of(self, source: RowSource, name: str, keys: np.ndarray) -> tuple[list[Batch], np.ndarray]:
        """Reads the rows of keys, to be written; also returns the keys that the source does not have."""
        rows, is_found = fetch_lines(source, name, keys)
        return list(self._stores.batches({name: (keys[is_found], rows)})), keys[~is_found]


def _chunks(size: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, size, most))


def _distinct(name: str, keys: Any) -> np.ndarray:
    keys = np.unique(keys_lib.from_words(keys_lib.to_words(np.asarray(keys), f'swap: table "{name}"')))
    return keys[keys != np.uint64(PADDING_KEY)]

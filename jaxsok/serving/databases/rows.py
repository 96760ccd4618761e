"""The rows of a model in databases: keys and rows to bytes and back, and the order in which databases are asked.

A table is a set of values by key, named "hps_et.<model>.<table>". A key has 8 bytes (4 where keys have 32 bits), a row
`dim` float32, all little-endian: each of HPS and jaxsok reads what the other wrote.
"""

import abc
import contextlib
import functools
import logging
import math
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from jaxsok.records import Records
from jaxsok.serving.backing import IsFound, Keys, Rows, RowSource
from jaxsok.serving.config.keys import HPS_NAME
from jaxsok.serving.errors import DatabaseError, ServingError, require_table
from jaxsok.serving.frozen import FrozenTable
from jaxsok.serving.padding import NO_KEYS, slices
from jaxsok.serving.ready import Background, rest_s
from jaxsok.types import PADDING_KEY

RETRY_S = 1.0  # seconds for which a database that failed is not asked
_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Spares calls what failed: for RETRY_S none is made, then one asks whether it answers again.

    Source: Nygard, "Release It!", 2007.
    """

    def __init__(self, trips: Callable[[BaseException], bool] = lambda error: True) -> None:
        """`trips` says of an error whether it opens the breaker."""
        self._trips, self._until = trips, 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._until

    def reset(self) -> None:
        """Notes that a call of another kind was answered: the next one is made."""
        self._until = 0.0

    @contextlib.contextmanager
    def unless_open(self) -> Iterator[bool]:
        """Surrounds a call; yields whether to make it."""
        until = self._until
        if time.monotonic() < until:
            yield False
            return
        if until:
            self._until = math.inf  # until this one has asked
        try:
            yield True
        except BaseException as error:
            if not self._trips(error):
                self._until = 0.0
            elif until or self._until != math.inf:  # else another one asks now, after this one had begun
                self._until = time.monotonic() + RETRY_S
            raise
        if until:
            self._until = 0.0


class Database(abc.ABC):
    """Values by distinct keys (little-endian uint32 or uint64), in sets by name, for many threads."""

    is_followed = False  # whether another process writes it
    counts_exactly = True  # otherwise `count` may be too large, where values were replaced or erased

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.background = Background()  # runs work for which no lookup waits

    @abc.abstractmethod
    def read(self, name: str, keys: np.ndarray) -> list[bytes | None]: ...  # None: there is none
    @abc.abstractmethod
    def write(self, name: str, keys: np.ndarray, values: Sequence[bytes]) -> None: ...  # inserts or replaces
    @abc.abstractmethod
    def erase(self, name: str, keys: np.ndarray) -> None: ...
    @abc.abstractmethod
    def count(self, name: str) -> int: ...  # of keys
    @abc.abstractmethod
    def keys(self, name: str) -> Iterator[Sequence[bytes]]: ...  # all, some at a time
    def close(self, until: float | None = None) -> bool:
        """Waits for the background until a time of `time.monotonic`, then ends; returns whether all has ended."""
        return self.background.close(rest_s(until))


def bytes_of(keys: np.ndarray) -> list[bytes]:
    return keys.view(f"V{keys.itemsize}").tolist()


@final
class DatabaseRows(RowSource):
    """The tables of a model in one database or two, to read and to write.

    Of two databases, the last one has all rows; the first one is asked first. If it fails, the last one answers alone
    for RETRY_S, and a warning is logged. With `lifts` (HPS's `cache_missed_embeddings`) rows that only the last one had
    are written into the first one by a thread; not if any were written since they were read, which may be newer, and
    none if another process writes the last one: it may have changed the row since.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        model: str,
        tables: Sequence[FrozenTable],
        *,
        key_bits: int = 64,
        lifts: bool = False,
    ) -> None:
        for name in (model, *(table.name for table in tables)):
            if not HPS_NAME.fullmatch(name):
                raise ServingError(
                    f"DatabaseRows: model, tables: got {name!r}, wanted a name of 1 to 120 letters, digits, _ and -, "
                    "as HPS has them in databases; rename it."
                )
        self._databases, self._model = tuple(databases), model
        self._lifts = lifts and not self._databases[-1].is_followed
        self.tables = {table.name: table for table in tables}
        self._key_dtype = np.dtype("<u8" if key_bits == 64 else "<u4")
        # Shared by all copies. `lock` is held by a writer, and while rows are lifted; `writes` changes under
        # it, when a write begins and when it ends. `most_rows`: of the tables that were written whole.
        self._shared = types.SimpleNamespace(lock=threading.Lock(), writes=0, breaker=CircuitBreaker(), most_rows={})

    def num_rows(self, table: str) -> int:
        """Counts rows; of RocksDB it is an upper bound, exact after the whole table was written."""
        last, most = self._databases[-1], self._shared.most_rows.get(table)
        if most is None or last.counts_exactly:
            return last.count(self._name("num_rows", table))
        return most

    def fetch(self, table: str, keys: Keys) -> tuple[Rows, IsFound]:
        """Raises DatabaseError if no database can answer, or one has rows of another dim."""
        name, dim, writes = self._name("fetch", table), self.tables[table].dim, self._shared.writes
        keys, inverse = np.unique(np.asarray(keys, np.uint64), return_inverse=True)
        rows, is_found = np.zeros((len(keys), dim), np.float32), np.zeros(len(keys), bool)
        missing = np.flatnonzero(self._fit(keys))
        *first, last = self._databases
        for database in first:
            try:
                with self._shared.breaker.unless_open() as is_asked:
                    if is_asked:
                        self._read(database, name, keys, missing, rows, is_found)
            except DatabaseError as error:
                _log.warning("DatabaseRows: table %r: the last database answers for %g s: %s", table, RETRY_S, error)
            missing = missing[~is_found[missing]]
        self._read(last, name, keys, missing, rows, is_found)
        late = missing[is_found[missing]]
        if self._lifts and first and len(late) and not self._shared.breaker.is_open:
            lift = functools.partial(self._lift, first[0], writes, name, keys[late], rows[late])
            first[0].background.offer(None, lift)
        return rows[inverse], is_found[inverse]

    def _read(
        self, database: Database, name: str, keys: Keys, places: np.ndarray, rows: Rows, is_found: IsFound
    ) -> None:
        """Reads the rows of the keys at some places, as far as a database has them."""
        for where, some in self._batches(database, keys, places):
            values = database.read(name, some)
            there = [value for value in values if value is not None]
            wrong = {len(value) for value in there} - {4 * rows.shape[1]}
            if wrong:
                raise DatabaseError(
                    f'fetch: dim: got rows of {sorted(wrong)} bytes in "{name}", wanted {4 * rows.shape[1]}: '
                    f"{rows.shape[1]} float32; another model has written them: rename this one, or erase them."
                )
            is_found[where] = [value is not None for value in values]
            rows[where[is_found[where]]] = np.frombuffer(b"".join(there), "<f4").reshape(-1, rows.shape[1])

    def _lift(self, database: Database, writes: int, name: str, keys: Keys, rows: Rows) -> None:
        with self._shared.lock:
            if writes == self._shared.writes:
                try:
                    self._write(database, name, keys, rows)
                except DatabaseError as error:
                    _log.warning("DatabaseRows: %s: rows were not lifted: %s", name, error)

    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        for keys in self.keys(table):
            for some in (keys[part] for part in slices(len(keys), chunk_rows)):
                rows, is_found = self.fetch(table, some)
                yield Records(some[is_found], rows[is_found])

    def keys(self, table: str) -> Iterator[Keys]:
        """Yields all keys of a table, uint64, some at a time; keys that come or go meanwhile may or may not appear."""
        return self._keys_of(self._databases[-1], self._name("keys", table))

    def _keys_of(self, database: Database, name: str) -> Iterator[Keys]:
        for some in database.keys(name):
            wrong = {len(key) for key in some} - {self._key_dtype.itemsize}
            if wrong:
                raise DatabaseError(
                    f'keys: supportlonglong: got keys of {sorted(wrong)} bytes in "{name}", wanted '
                    f"{self._key_dtype.itemsize}; keys of another width have been written there: rename the model, or "
                    "erase them."
                )
            yield np.frombuffer(b"".join(some), self._key_dtype).astype(np.uint64)

    def insert(self, table: str, keys: Keys, rows: Rows) -> None:
        """Inserts or replaces rows of distinct keys, in the last database first; if one fails, some may be written."""
        name, dim = self._name("insert", table), self.tables[table].dim
        keys, rows = np.asarray(keys, np.uint64), np.ascontiguousarray(rows, "<f4")
        if rows.shape != (len(keys), dim) or not self._fit(keys).all():
            raise ServingError(
                f'insert: table "{table}": keys, rows: got rows {list(rows.shape)} and {np.sum(~self._fit(keys))} keys '
                f"that are PADDING_KEY or too large, wanted rows [{len(keys)}, {dim}] and no such key."
            )
        self._change(lambda to: self._write(to, name, keys, rows))

    def _write(self, database: Database, name: str, keys: Keys, rows: Rows) -> None:
        for where, some in self._batches(database, keys, np.arange(len(keys))):
            database.write(name, some, rows[where].view(f"V{4 * rows.shape[1]}")[:, 0].tolist())

    def erase(self, table: str, keys: Keys) -> None:
        """Removes the rows of keys, where they are there, in the last database first."""
        name, keys = self._name("erase", table), np.asarray(keys, np.uint64)
        places = np.flatnonzero(self._fit(keys))
        self._change(lambda to: [to.erase(name, some) for _, some in self._batches(to, keys, places)])

    def keep_only(self, table: str, keys: Keys) -> Keys:
        """Removes the rows of all other keys, in each database, before a table is written whole; returns these keys.

        The databases may differ: after an update that failed, the last one no longer has what the first one has.
        """
        name, kept = self._name("keep_only", table), np.append(keys, np.uint64(PADDING_KEY))  # greater than all keys
        kept.sort()
        there = (some for database in self._databases for some in self._keys_of(database, name))
        gone = np.unique(
            np.concatenate([NO_KEYS, *(some[kept[np.searchsorted(kept, some)] != some] for some in there)])
        )
        self.erase(table, gone)
        return gone

    def note_whole(self, table: str, num_rows: int) -> None:
        """Notes that a table was written whole to the last database."""
        self._shared.most_rows[table] = num_rows

    def note_delta(self, table: str, num_keys: int) -> None:
        """Notes that rows of so many keys, new ones or not, were written to a table."""
        most = self._shared.most_rows
        if table in most:
            most[table] = min(most[table] + num_keys, self._databases[-1].count(self._name("num_rows", table)))

    def _change(self, change: Callable[[Database], Any]) -> None:
        with self._shared.lock:
            self._shared.writes += 1
            try:
                for database in reversed(self._databases):
                    change(database)
            finally:
                self._shared.writes += 1

    def _fit(self, keys: np.ndarray) -> np.ndarray:
        return (keys != np.uint64(PADDING_KEY)) & (keys <= np.iinfo(self._key_dtype).max)

    def _batches(self, database: Database, keys: Keys, places: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the places of some keys in batches, with the keys as a database has them."""
        for where in (places[part] for part in slices(len(places), database.max_batch_size)):
            yield where, keys[where].astype(self._key_dtype)

    def _name(self, op: str, table: str) -> str:
        require_table(op, table, self.tables, f'model "{self._model}"')
        return f"hps_et.{self._model}.{table}"

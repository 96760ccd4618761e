"""The rows of a model in databases: keys and rows to bytes and back, and the order in which databases are asked.

A table is a set of values by key, named "hps_et.<model>.<table>". A key has 8 bytes (4 where keys have 32 bits), a row
`dim` float32, all little-endian: each of HPS and jaxsok reads what the other wrote.
"""

import abc
import contextlib
import functools
import logging
import re
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np

from jaxsok.records import Records
from jaxsok.serving.backing import IsFound, Keys, Rows, RowSource
from jaxsok.serving.errors import DatabaseError, ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable
from jaxsok.serving.ready import Beside
from jaxsok.types import PADDING_KEY

RETRY_S = 1.0  # after a failure of the volatile database the persistent one answers alone for so long
_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,120}")  # of a model or a table, as in HPS
_log = logging.getLogger(__name__)


def bytes_of(keys: np.ndarray) -> list[bytes]:
    """Keys as a database has them."""
    return keys.view(f"V{keys.itemsize}").tolist()


class Database(abc.ABC):
    """Values by key, in sets by name, for many threads. Methods raise DatabaseError where they cannot do their work.

    Keys are distinct, little-endian, of uint32 or uint64, and `max_batch_size` at most in a call.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.beside = Beside()  # does what no lookup waits for

    @abc.abstractmethod
    def read(self, name: str, keys: np.ndarray) -> list[bytes | None]: ...  # None: there is none
    @abc.abstractmethod
    def write(self, name: str, keys: np.ndarray, values: Sequence[bytes]) -> None: ...  # inserts or replaces
    @abc.abstractmethod
    def erase(self, name: str, keys: np.ndarray) -> None: ...
    @abc.abstractmethod
    def count(self, name: str) -> int: ...  # of keys, about
    @abc.abstractmethod
    def keys(self, name: str) -> Iterator[Sequence[bytes]]: ...  # all, some at a time
    def close(self) -> None:
        """Ends what runs beside; disconnects."""
        self.beside.close()


@final
class DatabaseRows(RowSource):
    """The tables of a model in one database, to read and to write; `database` belongs to the caller.

    Raises:
      ServingError: names that HPS does not allow: others than 1 to 120 letters, digits, `_` and `-`.

    Example:
      >>> import tempfile
      >>> from jaxsok.serving.config import PersistentDb
      >>> from jaxsok.serving.databases.rocksdb import RocksDatabase
      >>> database = RocksDatabase(PersistentDb("rocks_db", path=tempfile.mkdtemp()))
      >>> rows = DatabaseRows(database, "dlrm", [FrozenTable("user", dim=2)])
      >>> rows.insert("user", np.array([7, 9], np.uint64), np.array([[1, 2], [3, 4]], np.float32))
      >>> found, is_found = rows.fetch("user", np.array([9, 8], np.uint64))
      >>> found[0].tolist(), is_found.tolist()
      ([3.0, 4.0], [True, False])
      >>> database.close()
    """

    def __init__(self, database: Database, model: str, tables: Sequence[FrozenTable], *, key_bits: int = 64) -> None:
        for name in (model, *(table.name for table in tables)):
            if not _NAME.fullmatch(name):
                raise ServingError(
                    f"DatabaseRows: model, tables: got {name!r}, wanted a name of 1 to 120 letters, digits, _ and -, "
                    "as HPS has them in databases; rename it."
                )
        self.database, self._model = database, model
        self._tables = {table.name: table for table in tables}
        self._key_dtype = np.dtype("<u8" if key_bits == 64 else "<u4")

    @property
    def tables(self) -> Mapping[str, FrozenTable]:
        return self._tables

    def num_rows(self, table: str) -> int:
        return self.database.count(self._name("num_rows", table))

    def fetch(self, table: str, keys: Keys) -> tuple[Rows, IsFound]:
        """See `RowSource.fetch`. DatabaseError: the database fails, or has rows of another dim."""
        name, dim = self._name("fetch", table), self._tables[table].dim
        keys, inverse = np.unique(np.asarray(keys, np.uint64), return_inverse=True)
        rows, is_found = np.zeros((len(keys), dim), np.float32), np.zeros(len(keys), bool)
        for where, some in self._batches(keys):
            values = self.database.read(name, some)
            there = [value for value in values if value is not None]
            wrong = {len(value) for value in there} - {4 * dim}
            if wrong:
                raise DatabaseError(
                    f'fetch: table "{table}": dim: got rows of {sorted(wrong)} bytes in "{name}", wanted {4 * dim}: '
                    f"{dim} float32; another model has written them: rename this one, or erase them."
                )
            is_found[where] = [value is not None for value in values]
            rows[where[is_found[where]]] = np.frombuffer(b"".join(there), "<f4").reshape(-1, dim)
        return rows[inverse], is_found[inverse]

    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        for keys in self.keys(table):
            for start in range(0, len(keys), chunk_rows):
                some = keys[start : start + chunk_rows]
                rows, is_found = self.fetch(table, some)
                yield Records(some[is_found], rows[is_found])

    def keys(self, table: str) -> Iterator[Keys]:
        """All keys of a table, uint64, some at a time; of those that come or go meanwhile, any."""
        for some in self.database.keys(self._name("keys", table)):
            yield np.frombuffer(b"".join(some), self._key_dtype).astype(np.uint64)

    def insert(self, table: str, keys: Keys, rows: Rows) -> None:
        """Inserts or replaces rows of distinct keys.

        ServingError: rows of another shape, PADDING_KEY, or keys that do not fit; nothing is written. DatabaseError:
        the database fails; some rows may be written.
        """
        name, dim = self._name("insert", table), self._tables[table].dim
        keys, rows = np.asarray(keys, np.uint64), np.ascontiguousarray(rows, "<f4")
        if rows.shape != (len(keys), dim) or not self._fit(keys).all():
            raise ServingError(
                f'insert: table "{table}": keys, rows: got rows {list(rows.shape)} and {np.sum(~self._fit(keys))} keys '
                f"that are PADDING_KEY or too large, wanted rows [{len(keys)}, {dim}] and no such key."
            )
        for where, some in self._batches(keys):
            self.database.write(name, some, rows[where].view(f"V{4 * dim}")[:, 0].tolist())

    def erase(self, table: str, keys: Keys) -> None:
        """Removes the rows of keys, where they are there."""
        for _, some in self._batches(np.asarray(keys, np.uint64)):
            self.database.erase(self._name("erase", table), some)

    def _fit(self, keys: np.ndarray) -> np.ndarray:
        return (keys != np.uint64(PADDING_KEY)) & (keys <= np.iinfo(self._key_dtype).max)

    def _batches(self, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The keys that may be there, as the database has them, and their places."""
        places, most = np.flatnonzero(self._fit(keys)), self.database.max_batch_size
        for start in range(0, len(places), most):
            yield places[start : start + most], keys[places[start : start + most]].astype(self._key_dtype)

    def _name(self, op: str, table: str) -> str:
        if table not in self._tables:
            raise UnknownTableError.of(op, table, self._tables, f'model "{self._model}"')
        return f"hps_et.{self._model}.{table}"


@final
class DatabaseTiers(RowSource):
    """HPS's databases in its order, the volatile one, then the persistent one; one of them alone is enough.

    Where there are both, the persistent one has all rows. If the volatile one fails, it answers alone for RETRY_S, and
    a warning is logged. With `lifts` (`cache_missed_embeddings`), rows that it alone had are inserted into the volatile
    one, by a thread; not if rows were written since they were read, which may be newer.
    """

    def __init__(self, volatile: DatabaseRows | None, persistent: DatabaseRows | None, *, lifts: bool = False) -> None:
        self.volatile, self.persistent, self._lifts = volatile, persistent, lifts
        self.layers = [layer for layer in (volatile, persistent) if layer is not None]
        # Of all copies of this object. `lock` is held by a writer, and while rows are lifted; `writes` changes under
        # it, when a write begins and when it ends.
        self._shared = types.SimpleNamespace(lock=threading.Lock(), writes=0, skip_until=0.0)

    @property
    def tables(self) -> Mapping[str, FrozenTable]:
        return self.layers[0].tables

    def num_rows(self, table: str) -> int:
        return self.layers[-1].num_rows(table)

    def fetch(self, table: str, keys: Keys) -> tuple[Rows, IsFound]:
        """See `RowSource.fetch`. DatabaseError: no database can answer."""
        if self.volatile is None or self.persistent is None:
            return self.layers[0].fetch(table, keys)
        writes, keys = self._shared.writes, np.asarray(keys, np.uint64)
        is_up = time.monotonic() >= self._shared.skip_until
        rows, is_found = np.zeros((len(keys), self.tables[table].dim), np.float32), np.zeros(len(keys), bool)
        if is_up:
            try:
                rows, is_found = self.volatile.fetch(table, keys)
            except DatabaseError as error:
                self._shared.skip_until, is_up = time.monotonic() + RETRY_S, False
                _log.warning("DatabaseTiers: table %r: persistent_db answers alone for %g s: %s", table, RETRY_S, error)
        missing = np.flatnonzero(~is_found)
        if len(missing):
            rows[missing], is_found[missing] = more, is_there = self.persistent.fetch(table, keys[missing])
            if self._lifts and is_up and is_there.any():
                lift = functools.partial(self._lift, writes, table, keys[missing[is_there]], more[is_there])
                self.volatile.database.beside.offer(None, lift)
        return rows, is_found

    def _lift(self, writes: int, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        keys, first = np.unique(keys, return_index=True)
        with self._shared.lock:
            if writes == self._shared.writes and self.volatile is not None:
                try:
                    self.volatile.insert(table, keys, rows[first])
                except DatabaseError as error:
                    _log.warning("DatabaseTiers: table %r: rows were not lifted: %s", table, error)

    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        return self.layers[-1].scan(table, chunk_rows)

    def keys(self, table: str) -> Iterator[Keys]:
        """All keys of a table, some at a time."""
        return self.layers[-1].keys(table)

    def insert(self, table: str, keys: Keys, rows: Rows) -> None:
        """Writes rows into all databases, the persistent one first; see `DatabaseRows.insert`."""
        with self._writing():
            for layer in reversed(self.layers):
                layer.insert(table, keys, rows)

    def erase(self, table: str, keys: Keys) -> None:
        """Removes keys from all databases, the persistent one first."""
        with self._writing():
            for layer in reversed(self.layers):
                layer.erase(table, keys)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._shared.lock:
            self._shared.writes += 1
            try:
                yield
            finally:
                self._shared.writes += 1

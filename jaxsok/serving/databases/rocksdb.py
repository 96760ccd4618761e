"""RocksDB as HPS lays rows out in it: a column family for each table, in a folder of this machine."""

import contextlib
import itertools
import logging
import pathlib
import re
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

import numpy as np

from jaxsok import checks
from jaxsok.serving.config import PersistentDb
from jaxsok.serving.databases.rows import Database, bytes_of
from jaxsok.serving.errors import DatabaseError
from jaxsok.serving.ready import rest_s

try:
    import rocksdict
except ImportError as error:
    wanted = "for persistent_db of type rocks_db; pip install 'jaxsok[databases]'"
    raise checks.import_error("rocksdict", error, wanted) from error

_log = logging.getLogger(__name__)
_MEMORY_TABLES = "active-mem-table", "imm-mem-tables"  # in the order in which entries move
_Result = TypeVar("_Result")
_CACHE_MB, _UNWRITTEN_BYTES = 8, 64 << 20  # of a table: blocks that were read (as in HPS), and rows to be written
_FILE_BYTES = 64 << 20  # of rows that were written


@final
class RocksDatabase(Database):
    """A RocksDB folder, as `persistent_db` of a configuration declares it. One process at a time opens it to write.

    Memory: up to about 200 MiB for each table that is written. What was written is on the disk when a call returns.
    Source: HPS of HugeCTR 24.06, `HugeCTR/src/hps/rocksdb_backend.cpp`, whose options these are.
    """

    counts_exactly = False

    def __init__(self, config: PersistentDb) -> None:
        super().__init__(config.max_batch_size)
        self._path = config.path
        # A call adds itself before it looks at `_is_closed`, and `close` sets that before it looks for calls.
        self._running: set[object] = set()  # whose changes are atomic
        self._is_closed = False
        self._options = rocksdict.Options(raw_mode=True)
        self._options.create_if_missing(not config.read_only)
        self._options.increase_parallelism(config.num_threads)
        self._options.optimize_for_point_lookup(_CACHE_MB)
        self._options.optimize_level_style_compaction(_UNWRITTEN_BYTES)
        self._options.set_target_file_size_base(_FILE_BYTES)
        most_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Of a reader RocksDB has to keep all files open, since the writer deletes them.
        if not config.read_only and most_open != resource.RLIM_INFINITY:
            self._options.set_max_open_files(max(20, most_open // 4))  # 20: RocksDB's least
        self.is_followed = config.read_only
        with contextlib.ExitStack() as opened:
            kinds = rocksdict.AccessType
            access = kinds.read_write()
            if config.read_only:  # as RocksDB's secondaries do, which have a log
                folder = tempfile.TemporaryDirectory(prefix="jaxsok-rocksdb-")
                access = kinds.secondary(opened.enter_context(folder))
            is_there = (pathlib.Path(config.path) / "CURRENT").is_file()
            names = self._call(lambda: rocksdict.Rdict.list_cf(config.path, self._options)) if is_there else ["default"]
            columns = dict.fromkeys(names, self._options)
            self._database: Any = self._call(lambda: rocksdict.Rdict(config.path, self._options, columns, access))
            self._folder_of_log = opened.pop_all()
        self._creating = threading.Lock()  # held while a column family is made and put into `_columns`
        self._columns: dict[str, Any] = {name: self._database.get_column_family(name) for name in names}

    def read(self, name: str, keys: np.ndarray) -> list[bytes | None]:
        column = self._column(name)
        if column is None:
            return [None] * len(keys)
        if self.is_followed:
            self._call(self._database.try_catch_up_with_primary)
        return self._call(lambda: column.get(bytes_of(keys)))

    def write(self, name: str, keys: np.ndarray, values: Sequence[bytes]) -> None:
        self._require_writer()
        with self._creating:
            if name not in self._columns:
                self._columns[name] = self._call(lambda: self._database.create_column_family(name, self._options))
        self._change(name, lambda batch: [batch.put(*pair) for pair in zip(bytes_of(keys), values, strict=True)])

    def erase(self, name: str, keys: np.ndarray) -> None:
        self._require_writer()
        if self._column(name) is not None:
            self._change(name, lambda batch: [batch.delete(field) for field in bytes_of(keys)])

    def _require_writer(self) -> None:
        if self.is_followed:
            raise DatabaseError(f'persistent_db: read_only: got True for "{self._path}", wanted False to change rows.')

    def _change(self, name: str, fill: Callable[[Any], Any]) -> None:
        def run() -> None:
            batch = rocksdict.WriteBatch(raw_mode=True)
            batch.set_default_column_family(self._database.get_column_family_handle(name))
            fill(batch)
            self._database.write(batch)
            self._database.flush_wal(True)

        self._call(run)

    def count(self, name: str) -> int:
        """Returns the number of values that memory and files have, the replaced and erased ones included.

        RocksDB's own estimate is too low where keys were written and erased: each erasure takes a key away.
        """
        column = self._column(name)
        return 0 if column is None else self._call(lambda: _count_values(column))

    def keys(self, name: str) -> Iterator[Sequence[bytes]]:
        column = self._column(name)
        keys = iter(()) if column is None else self._call(column.keys)
        try:
            while some := self._call(lambda: list(itertools.islice(keys, self.max_batch_size))):
                yield some
        finally:
            keys = None  # it keeps the folder open, and an error keeps this frame

    def close(self, until: float | None = None) -> bool:
        """Refuses later calls, waits for those that run, and lets the folder go."""
        has_ended, self._is_closed = super().close(until), True
        while self._running:
            rest = rest_s(until)
            if rest is not None and rest <= 0:
                return False
            time.sleep(0.01)
        with self._creating:
            for name in list(self._columns):  # after Ctrl-C another call closes the others
                self._end(self._columns[name])
                del self._columns[name]
            if self._database is not None:
                self._end(self._database)
                self._database = None
        self._folder_of_log.close()
        return has_ended

    def _end(self, opened: Any) -> None:
        """Closes a table or the database, to which others may still refer."""
        try:
            opened.close()
        except Exception as error:  # what was written is on the disk
            _log.warning('persistent_db: got an error of RocksDB when "%s" was closed: %s', self._path, error)

    def _column(self, name: str) -> Any:
        return self._call(lambda: self._columns.get(name))

    def _call(self, run: Callable[[], _Result]) -> _Result:
        call = object()
        try:
            self._running.add(call)
            if self._is_closed:
                raise DatabaseError(f'persistent_db: got "{self._path}" closed, wanted it open.')
            try:
                return run()
            except Exception as error:  # rocksdict raises no other kind
                got = f'got an error of RocksDB at "{self._path}" ({error})'
                raise DatabaseError(f"persistent_db: path: {got}, wanted {_wanted(error)}.") from error
        finally:  # also after Ctrl-C
            self._running.discard(call)


def _wanted(error: Exception) -> str:
    """Returns what would help against an error of RocksDB, which has no kinds."""
    text = str(error)
    if "Too many open files" in text:
        return "a higher limit of open files (ulimit -n)"
    if "Read-only file system" in text or "Permission denied" in text:
        return "a folder in which this process may write, also with read_only: rocksdict writes rocksdict-config.json"
    if text.startswith("Corruption"):
        return "undamaged files; restore the folder, or remove it and open the session again, which fills it"
    return "a folder that no other process has open to write, and space on its disk; after a full disk open it again"


def _count_values(column: Any) -> int:
    """Counts entries, without the erasures of files; what moves from memory to a file meanwhile is counted twice."""
    in_memory = (column.property_int_value(f"rocksdb.num-entries-{kind}") for kind in _MEMORY_TABLES)
    num_written = sum(in_memory)  # before those of files
    of_files = column.property_value("rocksdb.aggregated-table-properties")
    in_files = {kind: int(number) for kind, number in re.findall(r"# (entries|deletions)=(\d+)", of_files)}
    return num_written + in_files["entries"] - in_files["deletions"]

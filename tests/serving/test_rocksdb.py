"""Tests rows in RocksDB: HPS's layout to the byte, writers and readers of one folder, and tables larger than memory."""

import concurrent.futures
import contextlib
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from database_cases import DIMS, ITEM, USER, check, rocks_at, rows_for, u64
from waiting import wait_until

from jaxsok.serving import FrozenTable
from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.errors import DatabaseError
from jaxsok.serving.padding import slices


def test_rocksdb_has_rows_where_hps_has_them(tmp_path):
    import rocksdict

    with contextlib.closing(rocks_at(tmp_path)) as database:
        DatabaseRows([database], "dlrm", [USER]).insert("user", u64(7, 2**40), rows_for([7, 2**40], 4))
    options = rocksdict.Options(raw_mode=True)
    columns = {"default": options, "hps_et.dlrm.user": options}
    database = rocksdict.Rdict(str(tmp_path), options, columns)
    column = database.get_column_family("hps_et.dlrm.user")
    wanted = {struct.pack("<q", key): struct.pack("<4f", *rows_for([key], 4)[0]) for key in (7, 2**40)}
    assert dict(column.items()) == wanted and not list(database.items())
    column[struct.pack("<q", 9)] = struct.pack("<4f", 1, 2, 3, 4)
    column.close()
    database.close()
    with contextlib.closing(rocks_at(tmp_path)) as database:
        check(DatabaseRows([database], "dlrm", [USER]), "user", [9, 8], {9: [1, 2, 3, 4]})


def test_a_folder_is_opened_by_one_that_writes_and_keeps_its_rows(tmp_path):
    content = {key: rows_for([key], 4)[0] for key in range(100)}
    with contextlib.closing(rocks_at(tmp_path)) as database:
        DatabaseRows([database], "dlrm", [USER]).insert("user", u64(*content), rows_for(content, 4))
        with pytest.raises(DatabaseError, match=rf'persistent_db: path: got an error of RocksDB at "{tmp_path}"'):
            rocks_at(tmp_path)
    with contextlib.closing(rocks_at(tmp_path, read_only=True)) as database:
        rows = DatabaseRows([database], "dlrm", [USER, ITEM])
        check(rows, "user", [5, 99, 100], content)
        check(rows, "item", [5], {})
        assert rows.num_rows("item") == 0 and not list(rows.scan("item", 5))
        for table, key in (("user", 5), ("item", 5)):
            with pytest.raises(DatabaseError, match="persistent_db: read_only: got True"):
                rows.insert(table, u64(key), np.zeros((1, DIMS[table]), np.float32))
    with pytest.raises(DatabaseError, match="RocksDB at"):
        rocks_at(tmp_path / "none", read_only=True)
    for op in (rows.num_rows, lambda table: rows.fetch(table, u64(5)), lambda table: list(rows.keys(table))):
        with pytest.raises(DatabaseError, match="closed, wanted it open"):
            op("user")


def test_a_limit_of_open_files_bounds_neither_rows_nor_readers(tmp_path, monkeypatch):
    """A database has more files than a process may open, as RocksDB sees the limit."""
    from jaxsok.serving.databases import rocksdb

    monkeypatch.setattr(rocksdb, "_FILE_BYTES", 1 << 18)
    monkeypatch.setattr(rocksdb, "_UNWRITTEN_BYTES", 2 << 20)
    wide, rng = FrozenTable("wide", dim=256, default=0.0), np.random.default_rng(0)
    num_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(rocksdb.resource, "getrlimit", lambda kind: (80, 80))
    database = rocks_at(tmp_path)
    with contextlib.closing(database):
        rows = DatabaseRows([database], "dlrm", [wide])
        content = rng.standard_normal((60_000, wide.dim), np.float32)
        for part in slices(len(content), 5_000):
            rows.insert("wide", np.arange(len(content), dtype=np.uint64)[part], content[part])
        wait_until(lambda: len(list(tmp_path.glob("*.sst"))) > 120)  # as compactions leave them
        asked = rng.integers(0, len(content), 5_000)
        np.testing.assert_array_equal(rows.fetch("wide", asked.astype(np.uint64))[0], content[asked])
        # RocksDB may keep 20 of them open. A compaction in the background opens what it merges as well, until it ends.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - num_before < 60)


def test_errors_of_rocksdb_say_what_would_help():
    from jaxsok.serving.databases import rocksdb

    for text, wanted in (
        ("IO error: Too many open files: x.sst", "ulimit -n"),
        ("Read-only file system", "may write"),
        ("Corruption: truncated block read from 000012.sst", "remove it and open the session again"),
    ):
        assert wanted in rocksdb._wanted(Exception(text))


def test_keys_that_come_and_go_do_not_lower_the_count(tmp_path):
    """Replaced and erased values may be counted, and no row is left out."""
    for _ in range(3):
        with contextlib.closing(rocks_at(tmp_path)) as database:
            rows = DatabaseRows([database], "dlrm", [USER])
            rows.insert("user", np.arange(100, dtype=np.uint64), rows_for(range(100), 4))
            for start in range(1000, 4000, 1000):
                keys = np.arange(start, start + 500, dtype=np.uint64)
                rows.insert("user", keys, rows_for(keys.tolist(), 4))
                rows.erase("user", np.append(keys, keys + np.uint64(10_000)))  # some are not there
            assert 100 <= rows.num_rows("user") <= 3 * (100 + 3 * 1500)
        for options in ({}, {"read_only": True}):
            with contextlib.closing(rocks_at(tmp_path, **options)) as database:
                rows = DatabaseRows([database], "dlrm", [USER])
                assert sum(map(len, rows.keys("user"))) == 100 <= rows.num_rows("user") <= 3 * (100 + 3 * 500)


def test_a_reader_follows_the_one_that_writes(tmp_path):
    """With read_only a session reads what another process has written since, also rows that left, and keeps no copy."""
    with contextlib.closing(rocks_at(tmp_path)) as writer:
        written = DatabaseRows([writer], "dlrm", [USER])
        written.insert("user", u64(1, 2), rows_for([1, 2], 4))
        with contextlib.closing(rocks_at(tmp_path, read_only=True)) as reader:
            read = DatabaseRows([reader], "dlrm", [USER])
            content = {key: rows_for([key], 4)[0] for key in (1, 2)}
            check(read, "user", [1, 2, 3], content)
            for number in range(3):
                content |= {2: rows_for([2], 4)[0] + number, 3: rows_for([3], 4)[0] - number}
                written.insert("user", u64(2, 3), np.stack([content[2], content[3]]))
                check(read, "user", [1, 2, 3], content)
            written.erase("user", u64(1))
            del content[1]
            check(read, "user", [1, 2, 3], content)


def test_a_reader_lifts_nothing(redis, tmp_path):
    """The process that writes may have changed a row since the reader's look at the disk."""
    with contextlib.ExitStack() as opened:
        writer = opened.enter_context(contextlib.closing(rocks_at(tmp_path)))
        DatabaseRows([writer], "dlrm", [USER]).insert("user", u64(1, 2), rows_for([1, 2], 4))
        content = {key: rows_for([key], 4)[0] for key in (1, 2)}
        reader, volatile = opened.enter_context(contextlib.closing(rocks_at(tmp_path, read_only=True))), redis()
        for last, lifted in ((reader, {}), (writer, content)):
            check(DatabaseRows([volatile, last], "dlrm", [USER], lifts=True), "user", [1, 2], content)
            assert volatile.background.drain(20)
            check(DatabaseRows([volatile], "dlrm", [USER]), "user", [1, 2], lifted)


def test_a_folder_is_let_go_when_the_calls_that_run_have_ended(tmp_path, caplog):
    """Threads that read, write and scan end with the refusal; what they have written is there."""
    keys = np.arange(2000, dtype=np.uint64)
    for _ in range(3):
        database, failures = rocks_at(tmp_path), []
        rows = DatabaseRows([database], "dlrm", [USER])

        def run(work, failures=failures):
            with pytest.raises(DatabaseError, match="closed, wanted it open") as caught:
                while True:
                    work()
            failures.append(caught)

        works = [
            lambda rows=rows: rows.insert("user", keys, rows_for(keys, 4)),
            lambda rows=rows: rows.fetch("user", keys),
            lambda rows=rows: list(rows.keys("user")),
            lambda rows=rows: rows.num_rows("user"),
        ]
        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        wait_until(lambda rows=rows: rows.num_rows("user") > 0)
        database.close()
        database.close()
        for thread in threads:
            thread.join(30)
        assert len(failures) == len(works)
    with contextlib.closing(rocks_at(tmp_path)) as database:
        check(DatabaseRows([database], "dlrm", [USER]), "user", [5], {5: rows_for([5], 4)[0]})
    assert not caplog.records


def test_closing_waits_for_as_long_as_it_may(tmp_path):
    """A call that was interrupted has ended; one that runs is waited for, and its folder is let go later."""
    database = rocks_at(tmp_path)
    rows = DatabaseRows([database], "dlrm", [USER])
    rows.insert("user", u64(1), rows_for([1], 4))
    begun, goes_on = threading.Event(), threading.Event()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        database._call(interrupt)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(database._call, lambda: (begun.set(), goes_on.wait(60)))
        assert begun.wait(60)
        assert not database.close(time.monotonic() + 0.1)
        with pytest.raises(DatabaseError, match="closed, wanted it open"):
            rows.fetch("user", u64(1))
        goes_on.set()
        assert database.close(time.monotonic() + 60)
        running.result()
    with contextlib.closing(rocks_at(tmp_path)) as again:
        check(DatabaseRows([again], "dlrm", [USER]), "user", [1], {1: rows_for([1], 4)[0]})


def test_closing_that_ctrl_c_ends_goes_on_with_the_next_call(tmp_path, monkeypatch):
    database = rocks_at(tmp_path)
    DatabaseRows([database], "dlrm", [USER]).insert("user", u64(1), rows_for([1], 4))
    name, column = next(iter(database._columns.items()))

    class Pressed:
        def close(self):
            column.close()
            database._columns[name] = column
            raise KeyboardInterrupt

    database._columns[name] = Pressed()
    with pytest.raises(KeyboardInterrupt):
        database.close()
    assert database.close()
    with contextlib.closing(rocks_at(tmp_path)) as again:
        check(DatabaseRows([again], "dlrm", [USER]), "user", [1], {1: rows_for([1], 4)[0]})


def test_a_folder_is_let_go_where_tables_cannot_be_closed(tmp_path, monkeypatch, caplog):
    """As after a disk was full: each table's last rows cannot be written to a file then."""
    keys = np.arange(50, dtype=np.uint64)
    content, database = dict(zip(keys.tolist(), rows_for(keys, 4), strict=True)), rocks_at(tmp_path)
    DatabaseRows([database], "dlrm", [USER]).insert("user", keys, rows_for(keys, 4))

    class Failing:
        def close(self):
            raise OSError("No space left on device")

    names = list(database._columns)
    for name in names:
        database._columns[name].close()
        database._columns[name] = Failing()
    database.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(names)
    with contextlib.closing(rocks_at(tmp_path)) as again:
        check(DatabaseRows([again], "dlrm", [USER]), "user", keys, content)


def test_more_rows_than_there_is_memory_for(tmp_path):
    """A process with memory for only a part of its table writes it, reads it, and scans it."""
    code = """
        import resource, sys
        import numpy as np
        from jaxsok.serving.config import PersistentDb
        from jaxsok.serving.databases import DatabaseRows
        from jaxsok.serving.databases.rocksdb import RocksDatabase
        from jaxsok.serving.frozen import FrozenTable

        def peak():
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        dim, num_rows, step = 1024, 100_000, 4_000
        database = RocksDatabase(PersistentDb("rocks_db", sys.argv[1], num_threads=2, max_batch_size=step))
        rows, before = DatabaseRows([database], "dlrm", [FrozenTable("user", dim=dim)]), peak()
        for start in range(0, num_rows, step):
            keys = np.arange(start, start + step, dtype=np.uint64)
            rows.insert("user", keys, np.repeat(keys[:, None], dim, 1).astype(np.float32))
        for start in range(0, num_rows, 10 * step):
            keys = np.arange(start, start + step, dtype=np.uint64)
            found, is_found = rows.fetch("user", keys)
            assert is_found.all() and (found == keys[:, None]).all()
        assert sum(chunk.num_rows for chunk in rows.scan("user", 1000)) == num_rows
        grown, table = peak() - before, 4 * dim * num_rows
        database.close()
        print(grown, table)
        assert grown < table / 3, (grown, table)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

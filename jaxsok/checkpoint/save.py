"""Saving: a state is written to the files of a folder through a queue of bounded size.

One side copies pieces of the state to the host, and training waits for it; the other picks out the live rows, sorts
them by partition and writes them. What does not fit into the queue waits until files are written.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import operator
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxsok import checks, operations, policies
from jaxsok.admission import waiting_in
from jaxsok.checkpoint import files, lineage as lineage_lib, manifest as manifest_lib
from jaxsok.checkpoint.files import LOG
from jaxsok.checkpoint.snapshot import Piece, pieces, shard_parts
from jaxsok.collection import Collection
from jaxsok.keys import from_words
from jaxsok.operations import check_placed
from jaxsok.plan import partitions_of
from jaxsok.records import make_batch
from jaxsok.shards import read_on_host
from jaxsok.specs import StoreSpec, TableSpec, name_word
from jaxsok.store import State
from jaxsok.table_export import to_records
from jaxsok.types import COUNTERS, NUM_PARTITIONS, PADDING_KEY

HOST_BYTES = 4 << 30  # of a process (decision D12)
PIECE_BYTES = 64 << 20  # large enough for a link's full speed, small compared with HOST_BYTES
WORKING_PIECES = 6  # pieces' worth of memory outside the queue: under way to the host, sorted, compressed, written
BATCHES_PER_PIECE = 16  # so that a process which restores a sixteenth of the partitions reads little more than that
# A smaller batch takes longer to find than to read, and pieces of a delta have few rows.
LEAST_BATCH_BYTES = 1 << 20
PREPARED_AHEAD = 1  # pieces whose batches are made while those of another are written


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Options of a save."""

    compression: str = "none"  # "none", "lz4" or "zstd"
    host_bytes: int = HOST_BYTES  # host memory that a process may take in addition to its tables
    piece_bytes: int = PIECE_BYTES  # what is copied from the device at a time; smaller where `host_bytes` requires it

    def check(self, op: str) -> None:
        checks.one_of(f"{op}: compression", self.compression, files.COMPRESSIONS)
        for name in ("host_bytes", "piece_bytes"):
            checks.integer(f"{op}: {name}", getattr(self, name), 1, wanted="a number of bytes")

    @property
    def bytes_of_piece(self) -> int:
        """The bytes of a piece, so that those outside the queue take half of the memory at most."""
        return max(1, min(self.piece_bytes, self.host_bytes // (2 * WORKING_PIECES)))


@dataclasses.dataclass
class SaveReport:
    """The result of a save in this process; `num_bytes` were copied from the devices."""

    pause_s: float = 0.0
    """Seconds for which training waited: until the last row was on the host."""
    num_bytes: int = 0
    peak_bytes: int = 0
    """The most bytes in the queue."""
    num_rows: dict[str, int] = dataclasses.field(default_factory=dict)
    num_nonfinite: dict[str, int] = dataclasses.field(default_factory=dict)
    """Rows written that have an infinite or NaN number."""
    file_bytes: int = 0
    total_s: float = 0.0
    """Seconds until the files of this process were on the disk; 0 before that."""


class Saving:
    """A save by one process: `feed` on the thread that holds the state, `write` on another."""

    def __init__(
        self,
        op: str,
        collection: Collection,
        state: State,
        options: SaveOptions,
        kind: str = "checkpoint",
        *,
        clock: int | None = None,
        rests_on: Mapping[str, Any] | None = None,
        tombstones: Mapping[str, np.ndarray] | None = None,
    ):
        """Reads what is small and waits for the state, which must not be donated until `feed` has returned.

        `kind` is "checkpoint", "full" or "delta". Of a delta `rests_on` has `base`, `base_path` and `since`, before
        which rows are left out; `tombstones` has the keys that are gone, by table.
        """
        options.check(op)
        check_placed(op, collection, state)
        self.op, self.collection, self.state, self.options = op, collection, state, options
        self.tombstones, rests_on = tombstones or {}, rests_on or {}
        self.report = SaveReport()
        self._began = time.perf_counter()
        self._queue: collections.deque[Piece | None] = collections.deque()
        self._held = 0
        self._error: BaseException | None = None
        # `with` takes it, and not the condition: Ctrl-C within a method of that would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._writes = threading.Event()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "jaxsok.save")
        self.latest = 0  # last step of a row that was written
        self.part = {
            "format": manifest_lib.FORMAT,
            "version": manifest_lib.VERSION,
            "kind": kind,
            "num_processes": jax.process_count(),
            "step": int(np.asarray(state.step)),
            "seed": [int(word) for word in np.asarray(state.seed)],
            "lineage": lineage_lib.entry_of(state),
            "mesh": state.mesh,
            "num_shards": collection.stores[0].num_shards,
            "stores": [self._store_part(s) for s in range(len(collection.stores))],
            **rests_on,
        }
        self.part["clock"] = time_of(op, state, clock)
        self.counts_steps = clock is None and kind != "checkpoint"  # of an export whose time is the state's step

    def feed(self, is_alive: Callable[[], None] = lambda: None) -> None:
        """Copies the state to the host, as fast as the queue takes it; `is_alive` raises if no writer will begin."""
        try:
            how = {"piece_bytes": self.options.bytes_of_piece, "since": self.part.get("since")}
            for s, (spec, store) in enumerate(zip(self.collection.stores, self.state.stores, strict=True)):
                for piece in pieces(s, spec, store, self.state.seed, self.collection.shards, **how):
                    self._put(piece, is_alive)
            del self.state
            self.report.pause_s = time.perf_counter() - self._began
            with self._lock:
                self._queue.append(None)
                self._changed.notify_all()
        except BaseException as error:
            self._fail(error)
            raise
        LOG.info("%s: %d bytes on the host after %.3f s", self.op, self.report.num_bytes, self.report.pause_s)

    def _put(self, piece: Piece, is_alive: Callable[[], None]) -> None:
        most = max(1, self.options.host_bytes - WORKING_PIECES * self.options.bytes_of_piece)
        with self._lock:
            # An empty queue takes a piece of any size.
            while self._error is None and self._held and self._held + piece.nbytes > most:
                if not self._changed.wait(timeout=1.0) and not self._writes.is_set():
                    is_alive()
            if self._error is not None:
                raise self._error  # the writer's own, so that all processes see one error, whichever thread is first
            self._queue.append(piece)
            self._held += piece.nbytes
            self.report.num_bytes += piece.nbytes
            self.report.peak_bytes = max(self.report.peak_bytes, self._held)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._queue.clear()
            self._changed.notify_all()

    def begin(self, folder: Any) -> "concurrent.futures.Future[None]":
        """Saves into an existing folder; returns once the rows are on the host, while a thread still writes files."""
        try:
            written = self._writer.submit(self.write, folder)
            self._writer.shutdown(wait=False)
            self.feed()
        except BaseException as error:
            self.stop(error)
            raise
        return written

    def stop(self, error: BaseException) -> None:
        """Ends the copy and the thread that writes, after an error, and waits for both."""
        self._fail(error)
        self._writer.shutdown()

    def write(self, folder: Any) -> None:
        """Writes this process's files into a folder, then its part of the manifest."""
        self._writes.set()
        tables = _Tables(self, folder)
        try:
            if jax.process_index() > 0 and not folder.is_dir():
                raise manifest_lib.unshared_error(self.op, folder, jax.process_index(), 0)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                begun = collections.deque[tuple[int, Callable[[], Any]]]()  # bytes of pieces, and what they become
                while True:
                    while len(begun) <= PREPARED_AHEAD and (piece := self._take(waits=not begun)) is not None:
                        begun.append((piece.nbytes, _begin(pool, functools.partial(tables.prepare, piece))))
                    piece = None  # else it would be held while others are written
                    if not begun:
                        break
                    num_bytes, prepared = begun.popleft()
                    tables.write(prepared())
                    prepared = None
                    with self._lock:
                        self._held -= num_bytes
                        self._changed.notify_all()
            for name, keys in self.tombstones.items() if jax.process_index() == 0 else ():
                tables.write_tombstones(name, keys)
            tables.close()
        except BaseException as error:
            self._fail(error)  # first of all: `feed` may wait
            tables.abandon()
            raise
        entries, report = tables.entries(), self.report
        report.num_rows = {name: entry["num_rows"] for name, entry in entries.items()}
        report.num_nonfinite = {name: entry["num_nonfinite"] for name, entry in entries.items()}
        report.file_bytes = tables.file_bytes()
        text = '%s: table "%s": %d of %d rows have numbers that are infinite or NaN; they are saved as they are.'
        for name, count in report.num_nonfinite.items():
            if count:
                LOG.warning(text, self.op, name, count, report.num_rows[name])
        if self.part["kind"] == "checkpoint" and self.latest > self.part["clock"] + 1:  # one more by a lookup ahead
            text = (
                "%s: clock: got %d, but rows were used at %d; pass clock= if lookups have one, so that ages are right."
            )
            LOG.warning(text, self.op, self.part["clock"], self.latest)
        bloom = [entry for _, entry in tables.bloom.values()]
        part = {**self.part, "tables": entries, "bloom": bloom, "pause_s": report.pause_s}
        manifest_lib.write_part(folder, jax.process_index(), part)
        report.total_s = time.perf_counter() - self._began

    def _take(self, *, waits: bool) -> Piece | None:
        """Returns the next piece; None: that was the last, or, unless it waits, there is none yet."""
        with self._lock:
            while waits and not self._queue and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise RuntimeError(f"{self.op}: the state could not be copied: {self._error}") from self._error
            return self._queue.popleft() if self._queue and self._queue[0] is not None else None

    def _store_part(self, s: int) -> dict[str, Any]:
        spec, store, shards = self.collection.stores[s], self.state.stores[s], self.collection.shards
        word = dict(zip(COUNTERS, read_on_host(store.counters).tolist(), strict=False))
        num_evicted = []
        for array in store.table_evicted:
            parts = (np.asarray(part).astype(np.int64) for part in shard_parts(array, spec, shards).values())
            num_evicted = sum(parts, np.zeros(len(spec.tables), np.int64)).tolist()
        return {
            "tables": [table.name for table in spec.tables],
            "salt": [word["salt_low"], word["salt_high"]],
            "generation": word["generation"],
            "is_replicated": spec.is_replicated,
            "keys_per_step": self.collection.growth.keys_per_step[s],
            "assigned_per_step": self.collection.growth.assigned_per_step[s],
            "looks": self.collection.growth.looks_to_save(s),
            "most_positions": self.collection.growth.most[s],
            "globals": [
                {"name": name, **manifest_lib.array_to_json(read_on_host(leaf)[0])}
                for name, leaf in zip(spec.optimizer.global_names(spec.dim), store.globals_, strict=True)
            ],
            "bloom_segments": [list(segment) for segment in spec.bloom_segments()],
            "num_evicted": num_evicted,
        }


def time_of(op: str, state: State, clock: Any) -> int:
    """Returns the time of a save: the clock, a uint32; None: the state's step. Other values are refused."""
    word = operations.clock_of(op, clock)
    return int(np.asarray(state.step if word is None else word))


def _begin(pool: concurrent.futures.Executor, work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins some work in a thread; returns a function that gives its result. Python's end begins no more threads."""
    try:
        return pool.submit(work).result
    except RuntimeError:
        return work


_Batch = tuple[files.TableForm, Any, tuple[int, int]]  # a record batch, and its first and last partition


class _Tables:
    """The files of all tables of one process, and their entries in the manifest."""

    def __init__(self, saving: Saving, folder: Any):
        self.saving, self.folder, self.collection = saving, folder, saving.collection
        stores = self.collection.stores
        self.forms = [[files.TableForm.of(spec, table) for table in spec.tables] for spec in stores]
        self.words = [np.array([name_word(table.name) for table in spec.tables]) for spec in stores]
        self.numbers = {table.name: number for number, table in enumerate(self.collection.tables)}
        self.open: dict[tuple[str, str], files.BatchFile] = {}
        self.done: dict[tuple[str, str], dict[str, Any]] = {}
        self.bloom: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.nonfinite = dict.fromkeys(self.numbers, 0)
        self.by_partition = {name: np.zeros(NUM_PARTITIONS, np.int64) for name in self.numbers}

    def prepare(self, piece: Piece) -> list[_Batch] | Piece:
        """Makes the record batches of rows, while another thread writes those of the piece before."""
        return list(self._batches_of(piece)) if piece.kind == "rows" else piece

    def write(self, prepared: list[_Batch] | Piece) -> None:
        if isinstance(prepared, list):
            for form, batch, partitions in prepared:
                self._file(form.name, manifest_lib.ROWS, form.schema).write(batch, partitions)
        elif prepared.kind == "waiting":
            self._write_waiting(prepared)
        else:
            self._write_bloom(prepared)

    def _batches_of(self, piece: Piece) -> Iterator[_Batch]:
        forms, arrays = self.forms[piece.store], piece.arrays
        keys, tables = from_words(arrays.records[:, :2]), arrays.records[:, 2]
        lines = np.flatnonzero(keys != np.uint64(PADDING_KEY))
        if arrays.statistics is not None and lines.size:
            latest, now = int(arrays.statistics[lines, 0].max()), self.saving.part["clock"]
            if self.saving.counts_steps and latest == now + 1:  # of a lookup ahead of a step that was discarded
                most = np.array([now, 2**32 - 1], np.uint32)
                arrays, latest = arrays._replace(statistics=np.minimum(arrays.statistics, most)), now
            self.saving.latest = max(self.saving.latest, latest)
        numbers = tables[lines]
        partitions = partitions_of(keys[lines], self.words[piece.store][numbers])
        ranks = numbers.astype(np.int64) * NUM_PARTITIONS + partitions.astype(np.int64)
        # NumPy sorts 16 bits, which up to 16 tables take, ten times faster than 64.
        order = np.argsort(ranks.astype(np.min_scalar_type(len(forms) * NUM_PARTITIONS - 1)), kind="stable")
        lines, partitions = lines[order], partitions[order].astype(np.int64)
        ends = np.searchsorted(numbers[order], np.arange(len(forms) + 1))
        least = LEAST_BATCH_BYTES * len(keys) // max(1, piece.nbytes)
        most = max(1, least, -(-len(keys) // BATCHES_PER_PIECE))
        for number, form in enumerate(forms):
            begin, end = ends[number : number + 2]
            names = [name for name, _, _ in form.states]
            self.by_partition[form.name] += np.bincount(partitions[begin:end], minlength=NUM_PARTITIONS)
            for start in range(begin, end, most):
                stop = min(start + most, end)
                records = to_records(jax.tree.map(operator.itemgetter(lines[start:stop]), arrays), names)
                self.nonfinite[form.name] += int((~np.isfinite(records.rows).all(axis=1)).sum())
                yield form, form.to_batch(records), (int(partitions[start]), int(partitions[stop - 1]))

    def _write_waiting(self, piece: Piece) -> None:
        schema = files.keys_schema(True)
        for number, form in enumerate(self.forms[piece.store]):
            keys, counts = waiting_in(self.collection.stores[piece.store], piece.arrays, number)
            if keys.size:
                file = self._file(form.name, manifest_lib.WAITING, schema)
                file.write(make_batch(schema, keys, counts), files.ALL_PARTITIONS)

    def _write_bloom(self, piece: Piece) -> None:
        if piece.store not in self.bloom:
            name = f"store_{piece.store:04d}.process_{jax.process_index():05d}.bloom"
            entry = {"store": piece.store, "name": name, "size": 0, "pieces": []}
            self.bloom[piece.store] = (self.folder / name).open("wb"), entry
        file, entry = self.bloom[piece.store]
        data = piece.arrays.astype("<u4").tobytes()
        entry["pieces"].append([entry["size"], len(data), zlib.crc32(data), piece.shard])
        entry["size"] += file.write(data)

    def write_tombstones(self, table: str, keys: np.ndarray) -> None:
        size, schema = max(1, self.saving.options.bytes_of_piece // keys.itemsize), files.keys_schema(False)
        for start in range(0, keys.size, size):
            file = self._file(table, manifest_lib.TOMBSTONES, schema)
            file.write(make_batch(schema, keys[start : start + size]), files.ALL_PARTITIONS)

    def _file(self, table: str, kind: str, schema: Any) -> files.BatchFile:
        if (table, kind) not in self.open:
            process = "" if kind == manifest_lib.TOMBSTONES else f".process_{jax.process_index():05d}"
            ending = "" if kind == manifest_lib.ROWS else f".{kind}"
            name = f"table_{self.numbers[table]:04d}{process}{ending}.arrow"
            self.open[table, kind] = files.BatchFile(self.folder, name, schema, self.saving.options.compression)
        return self.open[table, kind]

    def close(self) -> None:
        for key, file in self.open.items():
            self.done[key] = file.close()
        for file, _ in self.bloom.values():
            files.close_and_sync(file)

    def entries(self) -> dict[str, dict[str, Any]]:
        stores, (low, high) = self.saving.part["stores"], self.saving.part["seed"]
        evicted: dict[str, int] = {}
        for store in stores:  # without counts where nothing is evicted
            evicted |= zip(store["tables"], store["num_evicted"], strict=False)
        return {
            table.name: {
                "form": dataclasses.asdict(form),
                "admission": admission_of(spec, table),
                "unknown": manifest_lib.unknown_to_json(table, low | high << 32),
                "num_rows": sum(file["num_rows"] for file in self._entries_of(table.name, manifest_lib.ROWS)),
                "num_nonfinite": self.nonfinite[table.name],
                "partition_rows": manifest_lib.pack(self.by_partition[table.name]),
                **{kind: self._entries_of(table.name, kind) for kind in manifest_lib.KINDS},
                "num_evicted": evicted.get(table.name, 0),
            }
            for spec, forms in zip(self.collection.stores, self.forms, strict=True)
            for table, form in zip(spec.tables, forms, strict=True)
        }

    def _entries_of(self, table: str, kind: str) -> list[dict[str, Any]]:
        return [self.done[table, kind]] if (table, kind) in self.done else []

    def file_bytes(self) -> int:
        return sum(entry["size"] for entry in (*self.done.values(), *(entry for _, entry in self.bloom.values())))

    def abandon(self) -> None:
        """Closes the files after an error; others may follow, as where the disk is full and a file still has bytes."""
        for close in (*(file.abandon for file in self.open.values()), *(file.close for file, _ in self.bloom.values())):
            with contextlib.suppress(Exception):
                close()


def admission_of(spec: StoreSpec, table: TableSpec) -> dict[str, Any] | None:
    """Returns what a table's counters of admission depend on."""
    admission = table.admission
    if isinstance(admission, policies.AdmitByBloom):
        return {
            "by": "bloom",
            "num_keys": admission.num_keys,
            "false_positive_rate": admission.false_positive_rate,
            "num_shards": spec.num_shards,
            "placement": str(table.placement) if spec.num_shards > 1 else "",
        }
    return {"by": "count"} if isinstance(admission, policies.AdmitByCount) else None

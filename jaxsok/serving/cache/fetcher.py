"""Rows from the source below a device cache, as it stores them: at once, or in a thread for later lookups."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxsok.records import Records, joined
from jaxsok.serving.backing import RowSource
from jaxsok.serving.frozen import FrozenTable, rounded

LOG = logging.getLogger("jaxsok.serving")


Lines = tuple[np.ndarray, ...]  # rows as a cache stores them: float32, or numbers and scales


def fetch(source: RowSource, name: str, keys: np.ndarray) -> tuple[Lines, np.ndarray]:
    """Fetches the rows of those keys that a table has, as a cache stores them, and which keys these are."""
    table = source.tables[name]
    if table.is_quantized:
        numbers, scales, is_found = source.fetch_quantized(name, keys)
        is_found = np.asarray(is_found, bool)
        shapes, wanted = (numbers.shape, scales.shape), ((len(keys), table.dim), (len(keys),))
        dtypes = numbers.dtype, scales.dtype
        if shapes != wanted or dtypes != (jnp.dtype(table.dtype), np.float32) or is_found.shape != wanted[1]:
            raise RuntimeError(
                f'DeviceCache: table "{name}": got {dtypes} of {shapes} of {type(source).__name__}.'
                f"fetch_quantized, wanted {table.dtype} and float32 of {wanted}."
            )
        return (numbers[is_found], scales[is_found]), is_found
    rows, is_found = source.fetch(name, keys)
    is_found = np.asarray(is_found, bool)
    wanted = (len(keys), table.dim)
    if rows.shape != wanted or rows.dtype != np.float32 or is_found.shape != wanted[:1]:
        raise RuntimeError(
            f'DeviceCache: table "{name}": got {rows.dtype}{list(rows.shape)} and found{list(is_found.shape)} of '
            f"{type(source).__name__}.fetch, wanted float32{list(wanted)} and bool[{wanted[0]}]."
        )
    return round_rows(table, rows[is_found]), is_found


def round_rows(table: FrozenTable, rows: np.ndarray) -> Lines:
    """Rounds rows to what a store holds: an answer is the same whether its row was cached or fetched."""
    if table.dtype == "float32":
        return (np.asarray(rows, np.float32),)
    return (rounded(rows, table.dtype).astype(np.float32),)


def take(lines: Lines, which: np.ndarray) -> Lines:
    """Takes some of the rows."""
    return tuple(array[which] for array in lines)


def joined_lines(parts: Iterable[Lines]) -> Lines:
    """Joins rows of one dim and dtype."""
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def hottest(chunks: Iterable[Records], num_rows: int) -> Records:
    """The rows of highest frequency, of equal ones the first; without frequencies the first ones."""
    parts, num_kept, are_known = [], 0, True
    for records in chunks:
        parts.append(records)
        num_kept += records.num_rows
        are_known = are_known and records.frequency is not None
        if not are_known and num_kept >= num_rows:
            break
        if are_known and num_kept > 2 * num_rows:
            parts = [_top(parts, num_rows)]
            num_kept = num_rows
    return _top(parts, num_rows) if parts else Records(np.zeros(0, np.uint64), np.zeros((0, 1), np.float32))


def _top(parts: Sequence[Records], num_rows: int) -> Records:
    whole = joined(parts)
    if whole.frequency is None:
        return whole.take(slice(num_rows))
    return whole.take(np.argsort(-whole.frequency.astype(np.int64), kind="stable")[:num_rows])


class Background:
    """A thread that fetches the misses of lookups, all that wait together. The first offer starts it."""

    def __init__(self, work: Callable[[Sequence[Mapping[str, np.ndarray]]], None], max_pending: int) -> None:
        self._work = work
        self._queue: queue.Queue[Mapping[str, np.ndarray] | None] = queue.Queue(max_pending)
        self._lock = threading.Lock()
        # Both change under `_lock`, so that nothing enters the queue behind the None of `close`.
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def offer(self, missed: Mapping[str, np.ndarray]) -> bool:
        """Queues misses; returns whether there was room."""
        with self._lock:
            if self._is_closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxsok-device-cache", daemon=True)
                self._thread.start()
            try:
                self._queue.put_nowait(missed)
            except queue.Full:
                return False
            return True

    def drain(self) -> None:
        self._queue.join()

    def close(self) -> None:
        """Drains and stops the thread."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            thread = self._thread
        if thread is not None:
            if is_first:
                self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            waiting = [self._queue.get()]
            while waiting[-1] is not None:
                try:
                    waiting.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            is_last = waiting[-1] is None
            try:
                missed = [keys for keys in waiting if keys is not None]
                if missed:
                    self._work(missed)
            except Exception:
                LOG.exception("DeviceCache: an insertion failed; the keys miss again")
            finally:
                for _ in waiting:
                    self._queue.task_done()

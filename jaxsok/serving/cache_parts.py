"""What lookups of a device cache are made of on the host: keys asked, what was found, what waits in the background."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.records import Records
from jaxsok.serving.backing import RowSource, padded_size
from jaxsok.serving.cache_store import Queried
from jaxsok.serving.errors import RequestError, UnknownTableError
from jaxsok.serving.frozen import FrozenSpec
from jaxsok.types import NO_ROW, PADDING_KEY

LEAST_KEYS = 256  # of a lookup and of an insertion: padded to a power of two, so that programs are few
LOG = logging.getLogger("jaxsok.serving")


@dataclasses.dataclass(frozen=True)
class Part:
    """The keys of one table among those of its store."""

    name: str
    store: int
    lines: slice
    shape: tuple[int, ...]


class Asked:
    """Keys, checked and packed by store: each store's are one array, so that programs differ in few sizes."""

    def __init__(
        self, spec: FrozenSpec, keys: Mapping[str, Any], chosen: Callable[[tuple[int, ...]], tuple[int, ...]]
    ) -> None:
        """Checks and packs.

        Args:
          spec: the tables.
          keys: by table.
          chosen: to how many keys each store's are padded, of the least powers of two that have room for them.
        """
        if not isinstance(keys, Mapping):
            raise RequestError(f"lookup: keys: got {type(keys).__name__}, wanted a mapping from tables to keys.")
        words: list[list[np.ndarray]] = [[] for _ in spec.stores]
        ids: list[list[np.ndarray]] = [[] for _ in spec.stores]
        sizes = [0] * len(spec.stores)
        self.parts: list[Part] = []
        self.num_keys = 0
        for name, given in keys.items():
            if name not in spec.places:
                raise UnknownTableError.of("lookup", name, spec.places)
            given = np.asarray(given)
            if given.size == 0 and given.dtype == np.float64:
                given = given.astype(np.int64)  # of an empty list
            try:
                of_table = keys_lib.to_words(np.atleast_1d(given), f'lookup: table "{name}"').reshape(-1, 2)
            except TypeError as error:
                raise RequestError(str(error)) from error
            store, number = spec.places[name]
            words[store].append(of_table)
            ids[store].append(np.full(len(of_table), number, np.uint32))
            end = sizes[store] + len(of_table)
            self.parts.append(Part(name, store, slice(sizes[store], end), given.shape))
            sizes[store] = end
            self.num_keys += int((keys_lib.from_words(of_table) != np.uint64(PADDING_KEY)).sum())
        self.batches = []
        most = chosen(tuple(padded_size(size, LEAST_KEYS) for size in sizes))
        for s, size in enumerate(sizes):
            padded = keys_lib.padding_words((most[s],))
            padded_ids = np.zeros(len(padded), np.uint32)
            if size:
                np.concatenate(words[s], out=padded[:size])
                np.concatenate(ids[s], out=padded_ids[:size])
            self.batches.append((padded, padded_ids))


@dataclasses.dataclass(frozen=True)
class Found:
    """What a query gave, as the host knows it."""

    rows: Sequence[tuple[Array, ...]]
    """By store: of each position, or of each distinct key; see `Queried`."""
    inverse: Sequence[Array]
    """By store and position, the place among the distinct keys."""
    indices: Sequence[tuple[Array, Array]]
    """By store, index and counters over the distinct keys."""
    hit_rates: dict[str, float]
    missed: dict[str, tuple[np.ndarray, np.ndarray]]
    """By table with misses: their places among the distinct keys of the store, and the keys."""
    num_distinct: dict[str, int]
    """By table."""
    source: RowSource
    epoch: int
    version: int

    @classmethod
    def of(
        cls,
        spec: FrozenSpec,
        asked: Asked,
        out: Queried,
        counts: np.ndarray,
        source: RowSource,
        epoch: int,
        version: int,
    ) -> "Found":
        """Reads what the query says of the keys: hit rates, and where there are misses their keys."""
        starts = np.cumsum([0, *(len(tables) for tables in spec.stores)])
        distinct, rates, missed = {}, {}, {}
        records: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for part in asked.parts:
            s, number = spec.places[part.name]
            num_distinct, num_missed = counts[starts[s] + number, :2].tolist()
            distinct[part.name] = num_distinct
            # Not 1 - misses ÷ distinct, which may miss a threshold of 0.1 by rounding.
            rates[part.name] = (num_distinct - num_missed) / num_distinct if num_distinct else 1.0
            if not num_missed:
                continue
            if s not in records:
                lines, row_ids = np.asarray(out.records[s]), np.asarray(out.row_ids[s])
                keys = keys_lib.from_words(lines[:, :2])
                places = np.flatnonzero((row_ids == NO_ROW) & (keys != np.uint64(PADDING_KEY)))
                records[s] = places, keys[places], lines[places, 2]
            places, keys, ids = records[s]
            missed[part.name] = places[ids == number], keys[ids == number]
        return cls(out.rows, out.inverse, out.indices, rates, missed, distinct, source, epoch, version)


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Rows that a lookup waited for, of one table."""

    places: np.ndarray
    """Among the distinct keys of the store."""
    keys: np.ndarray
    rows: np.ndarray
    """float32, or `packed`."""

    def put_into(self, lines: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """Lines of positions, with these rows where they belong."""
        if not len(self.places):
            return lines
        slots = np.full(int(max(self.places.max(), _last(inverse))) + 2, -1, np.int64)
        slots[self.places] = np.arange(len(self.places))
        slot = slots[np.minimum(inverse, np.uint32(len(slots) - 1)).astype(np.int64)]
        lines = np.array(lines)
        lines[slot >= 0] = self.rows[slot[slot >= 0]]
        return lines


def packed(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Quantized rows as one array, their bytes: numbers, and behind them the scale.

    Example:
      >>> lines = packed(np.array([[1, -2]], np.int8), np.array([0.5], np.float32))
      >>> lines.shape, [part.tolist() for part in unpacked(lines, "int8")]
      ((1, 6), [[[1, -2]], [0.5]])
    """
    return np.concatenate([numbers.view(np.uint8), scales.astype(np.float32)[:, None].view(np.uint8)], axis=1)


def unpacked(lines: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scales of what `packed` gave."""
    numbers, scales = np.ascontiguousarray(lines[:, :-4]), np.ascontiguousarray(lines[:, -4:])
    return numbers.view(jnp.dtype(dtype)), scales.view(np.float32)[:, 0]


def _last(inverse: np.ndarray) -> int:
    real = inverse[inverse != NO_ROW]
    return int(real.max()) if len(real) else 0


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Keys of one store and their new rows, on the device."""

    store: int
    words: Array
    ids: Array
    lines: tuple[Array, ...] | None
    """None: the rows of these keys leave."""


class Background:
    """A thread that fetches what lookups left; all that waits is fetched together."""

    def __init__(self, work: Callable[[Sequence[Mapping[str, np.ndarray]]], None], max_pending: int) -> None:
        self._work = work
        self._queue: queue.Queue[Mapping[str, np.ndarray] | None] = queue.Queue(max_pending)
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def offer(self, missed: Mapping[str, np.ndarray]) -> bool:
        """Whether there was room for it."""
        with self._guard:
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
        """Waits until nothing is left."""
        self._queue.join()

    def close(self) -> None:
        """Drains and stops."""
        with self._guard:
            is_first, self._is_closed = not self._is_closed, True
            thread = self._thread
        if thread is not None:
            if is_first:
                self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            some = [self._queue.get()]
            while some[-1] is not None:
                try:
                    some.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            is_last = some[-1] is None
            try:
                asked = [one for one in some if one is not None]
                if asked:
                    self._work(asked)
            except Exception:
                LOG.exception("DeviceCache: an insertion failed; the keys miss again")
            finally:
                for _ in some:
                    self._queue.task_done()


def hottest(chunks: Iterable[Records], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and rows of the rows of highest frequency, of equal ones the first; without frequencies the first ones."""
    keys, rows = [], []
    frequencies: list[np.ndarray] | None = []
    num_kept = 0
    for records in chunks:
        keys.append(records.keys)
        rows.append(records.rows)
        num_kept += records.num_rows
        if records.frequency is None or frequencies is None:
            frequencies = None
            if num_kept >= num_rows:
                break
            continue
        frequencies.append(records.frequency)
        if num_kept > 2 * num_rows:
            keys, rows, frequencies = ([one] for one in _top(keys, rows, frequencies, num_rows))
            num_kept = len(keys[0])
    if not keys:
        return np.zeros(0, np.uint64), np.zeros((0, 1), np.float32)
    if frequencies is None:
        return np.concatenate(keys)[:num_rows], np.concatenate(rows)[:num_rows]
    return _top(keys, rows, frequencies, num_rows)[:2]


def _top(keys: Any, rows: Any, frequencies: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    frequency = np.concatenate(frequencies)
    order = np.argsort(-frequency.astype(np.int64), kind="stable")[:num_rows]
    return np.concatenate(keys)[order], np.concatenate(rows)[order], frequency[order]

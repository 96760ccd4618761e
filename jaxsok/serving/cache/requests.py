"""The host side of a lookup in a device cache: the keys of a request, cached rows, and rows that are fetched."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxsok import keys as keys_lib
from jaxsok.serving import quantize
from jaxsok.serving.backing import Lines, fetch_lines
from jaxsok.serving.cache.programs import LEAST_KEYS, Queried, Sizes
from jaxsok.serving.cache.stores import Counter, DeviceStores, Epoch
from jaxsok.serving.errors import refusals, require_mapping
from jaxsok.serving.frozen import FrozenSpec
from jaxsok.serving.padding import padded_size
from jaxsok.serving.ready import Background
from jaxsok.shards import view_on_host
from jaxsok.types import NO_ROW, PADDING_KEY

_log = logging.getLogger("jaxsok.serving")


class Request:
    """Checked keys, packed into one array for each store; `choose` gives its size, from the least power of two.

    `lines` has the place of each table's keys among those of its store, and `shapes` the shape in which they came.
    """

    def __init__(self, spec: FrozenSpec, keys: Mapping[str, Any], choose: Callable[[Sizes], Sizes]) -> None:
        require_mapping("lookup: keys", keys, "tables to keys")
        words: list[list[np.ndarray]] = [[] for _ in spec.stores]
        ids: list[list[np.ndarray]] = [[] for _ in spec.stores]
        sizes = [0] * len(spec.stores)
        self.lines: dict[str, slice] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.num_keys = 0
        for name, given in keys.items():
            store, number = spec.place_of("lookup", name)
            with refusals():
                given, what = keys_lib.as_array(given, "lookup"), f'lookup: table "{name}"'
                of_table = keys_lib.to_words(np.atleast_1d(given), what).reshape(-1, 2)
            words[store].append(of_table)
            ids[store].append(np.full(len(of_table), number, np.uint32))
            end = sizes[store] + len(of_table)
            self.lines[name], self.shapes[name] = slice(sizes[store], end), given.shape
            sizes[store] = end
            self.num_keys += int((keys_lib.from_words(of_table) != np.uint64(PADDING_KEY)).sum())
        self.batches = []
        most = choose(tuple(padded_size(size, LEAST_KEYS) for size in sizes))
        for s, size in enumerate(sizes):
            padding = keys_lib.padding_words((most[s] - size,)), np.zeros(most[s] - size, np.uint32)
            self.batches.append((np.concatenate([*words[s], padding[0]]), np.concatenate([*ids[s], padding[1]])))


class Found:
    """The result of a query on the host: hit rates, and the keys of misses if there are any."""

    def __init__(self, spec: FrozenSpec, request: Request, out: Queried, counts: np.ndarray, epoch: Epoch) -> None:
        self.out, self.epoch = out, epoch
        self.hit_rates: dict[str, float] = {}
        self.num_distinct: dict[str, int] = {}  # by table
        # By table: places among the store's distinct keys, and the keys.
        self.missed: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        starts = np.cumsum([0, *(len(tables) for tables in spec.stores)])
        records: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for name in request.lines:
            s, number = spec.places[name]
            num_distinct, num_missed = counts[starts[s] + number, :2].tolist()
            self.num_distinct[name] = num_distinct
            # Not 1 - misses ÷ distinct, which may miss a threshold of 0.1 by rounding.
            self.hit_rates[name] = (num_distinct - num_missed) / num_distinct if num_distinct else 1.0
            if not num_missed:
                continue
            if s not in records:
                lines, row_ids = view_on_host(out.records[s]), view_on_host(out.row_ids[s])
                keys = keys_lib.from_words(lines[:, :2])
                places = np.flatnonzero((row_ids == NO_ROW) & (keys != np.uint64(PADDING_KEY)))
                records[s] = places, keys[places], lines[places, 2]
            places, keys, ids = records[s]
            self.missed[name] = places[ids == number], keys[ids == number]


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Rows of one table that a lookup waited for."""

    places: np.ndarray  # among the distinct keys of the store
    keys: np.ndarray
    rows: Lines

    def put_into(self, lines: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """Puts these rows, as float32, among the rows of positions: into a copy, where `lines` cannot be written."""
        if not len(self.places):
            return lines
        last = inverse.max(initial=0, where=inverse != NO_ROW)
        slots = np.full(int(max(self.places.max(), last)) + 2, -1, np.int64)
        slots[self.places] = np.arange(len(self.places))
        slot = slots[np.minimum(inverse, np.uint32(len(slots) - 1)).astype(np.int64)]
        rows = self.rows[0] if len(self.rows) == 1 else quantize.dequantize_rows(*self.rows)
        lines = lines if lines.flags.writeable else np.array(lines)
        lines[slot >= 0] = rows[slot[slot >= 0]]
        return lines


class Fetcher:
    """Fetches the rows that lookups miss: at once, for lookups that wait, or in the background, for later ones."""

    def __init__(self, stores: DeviceStores, counter: Counter, max_pending: int, keeps_rows: bool) -> None:
        self._stores, self._counter, self._max_pending = stores, counter, max_pending
        self._keeps_rows = keeps_rows
        self._lock = threading.Lock()
        # Read and changed under `_lock`: the misses of lookups that are to be fetched, `max_pending` at most. There is
        # work for them in `background`, which takes all, unless there are none.
        self._missed: list[Mapping[str, np.ndarray]] = []
        self.background = Background()

    def fetch(self, found: Found, num_keys: int, threshold: float) -> dict[str, Fetched]:
        """Gives the missed rows of tables whose hit rate is below the threshold; the others come later. Counts both."""
        fetched: dict[str, Fetched] = {}
        for name, (places, keys) in sorted(found.missed.items()):
            if found.hit_rates[name] < threshold:
                rows, is_found = fetch_lines(found.epoch.source, name, keys)
                fetched[name] = Fetched(places[is_found], keys[is_found], rows)
        if fetched and self._keeps_rows:
            self._stores.insert({name: (late.keys, late.rows) for name, late in fetched.items()}, found.epoch)
        later = {name: keys for name, (_, keys) in found.missed.items() if name not in fetched}
        with self._lock:  # one piece of work in the background takes all that are there
            is_taken = not later or (
                len(self._missed) < self._max_pending
                and (bool(self._missed) or self.background.offer(None, self._fetch_missed))
            )
            if later and is_taken:
                self._missed.append(later)
        num_missed = {name: len(keys) for name, (_, keys) in found.missed.items()}
        self._counter.add(
            lookups=1,
            keys=num_keys,
            sync=len(fetched),
            background=len(later),
            dropped=0 if is_taken else len(later),
            fetched=sum(num_missed[name] for name in fetched),
        )
        for name, num_distinct in found.num_distinct.items():
            misses = num_missed.get(name, 0)
            gone = misses - len(fetched[name].keys) if name in fetched else 0
            self._counter.add(name, distinct=num_distinct, hits=num_distinct - misses, misses=misses, missing=gone)
        return fetched

    def _fetch_missed(self) -> None:
        with self._lock:
            missed, self._missed = self._missed, []
        names = sorted({name for some in missed for name in some})
        epoch, rows, num_keys = self._stores.epoch, {}, {}
        try:
            for name in names:
                keys = np.unique(np.concatenate([some[name] for some in missed if name in some]))
                lines, is_found = fetch_lines(epoch.source, name, keys)
                rows[name], num_keys[name] = (keys[is_found], lines), len(keys)
            self._stores.insert(rows, epoch)
        except Exception:
            self._counter.add(failed=1)
            _log.exception("DeviceCache: rows of tables %s could not be fetched; their keys miss again", names)
            return
        self._counter.add(fetched=sum(num_keys.values()))
        for name, number in num_keys.items():
            self._counter.add(name, missing=number - len(rows[name][0]))

"""Fetches the rows that lookups miss: at once, for lookups that wait, or in the background, for later ones."""

import logging
import threading
from collections.abc import Mapping

import numpy as np

from jaxsok.serving.backing import fetch_lines
from jaxsok.serving.cache.requests import Fetched, Found
from jaxsok.serving.cache.stats import Counter
from jaxsok.serving.cache.stores import DeviceStores
from jaxsok.serving.ready import Beside

_log = logging.getLogger("jaxsok.serving")


class Fetcher:
    """Fetches from the source of a cache, and inserts what it has."""

    def __init__(self, stores: DeviceStores, counter: Counter, max_pending: int, keeps_rows: bool) -> None:
        self._stores, self._counter, self._max_pending = stores, counter, max_pending
        self._keeps_rows = keeps_rows
        self._lock = threading.Lock()
        # Read and changed under `_lock`: the misses of lookups that are to be fetched, `max_pending` at most. There is
        # work for them in `background`, which takes all, unless there are none.
        self._missed: list[Mapping[str, np.ndarray]] = []
        self.background = Beside()

    def fetch(self, found: Found, num_keys: int, threshold: float) -> dict[str, Fetched]:
        """Gives the missed rows of tables whose hit rate is below the threshold; the others come later. Counts both."""
        fetched: dict[str, Fetched] = {}
        for name, (places, keys) in sorted(found.missed.items()):
            if found.hit_rates[name] < threshold:
                rows, is_found = fetch_lines(found.snapshot.source, name, keys)
                fetched[name] = Fetched(places[is_found], keys[is_found], rows)
        if fetched and self._keeps_rows:
            self._stores.insert({name: (late.keys, late.rows) for name, late in fetched.items()}, found.snapshot.epoch)
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
        """Fetches and inserts the misses of all lookups that wait."""
        with self._lock:
            missed, self._missed = self._missed, []
        names = sorted({name for some in missed for name in some})
        snapshot, rows, num_keys = self._stores.snapshot(), {}, {}
        try:
            for name in names:
                keys = np.unique(np.concatenate([some[name] for some in missed if name in some]))
                lines, is_found = fetch_lines(snapshot.source, name, keys)
                rows[name], num_keys[name] = (keys[is_found], lines), len(keys)
            self._stores.insert(rows, snapshot.epoch)
        except Exception:
            self._counter.add(failed=1)
            _log.exception("DeviceCache: rows of tables %s could not be fetched; their keys miss again", names)
            return
        self._counter.add(fetched=sum(num_keys.values()))
        for name, number in num_keys.items():
            self._counter.add(name, missing=number - len(rows[name][0]))

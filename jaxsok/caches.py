"""Statistics of the caches of tables in host memory: counts of a state, and hit rates that other caches would have.

`CacheStats` reads the counters of a state (`Collection.cache_stats`). `cache_estimate` needs no state: it follows the
keys of a sample of batches through caches of all sizes at once.

The estimate is for a cache that lets the rows go first whose last use is the longest ago, so that rows of one batch are
equally old. The real cache goes by the mean of all uses. That keeps rows that are used again and again, so it brings up
to 17% fewer rows where frequencies stay (decision 0040), and for large caches up to 5% more (decision 0033).

Let a row be used by batch t and again by a later one, let D rows have been used since t, and let E rows, this one among
them, have t as their last batch. A cache of c rows then has the D rows, and c - D of the E: none if c <= D, all if
c >= D + E. Which of the E these are depends on their places in the cache, so each counts with the share that stayed,
(c - D) / E. This needs one number for each batch, how many rows have it as their last one. Of a batch that does not fit
the cache the rows that were there stay, often the most used ones, so that small caches usually do better than this.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok.planner import read_batch
from jaxsok.printed import format_bytes, format_columns
from jaxsok.specs import FeatureSpec, StoreSpec, TableSpec, bag_tables, check_declarations, group_into_stores
from jaxsok.types import PADDING_KEY, TIER_COUNTERS


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """The cache of a store in host memory, on all devices together; `str` formats it in one line.

    Rows are counted in calls, and distinct within a call. A lookup and an update are a call each, so a training step
    asks twice for the rows of its batch. New rows, for which nothing is read, count as neither hits nor reads.

    The counters of a shard are kept modulo 2**32 and begin with the state. The difference of two is what happened
    between them, as long as no counter of a shard grew by 2**32 or more:

        before = collection.cache_stats(state)
        ...                                        # steps
        for earlier, later in zip(before, collection.cache_stats(state)):
            print(later - earlier)
    """

    tables: tuple[str, ...]
    """Names of the tables of the store."""
    num_rows: int
    """Rows in use, of all tables."""
    num_slots: int
    """Rows that the cache has room for."""
    num_cached: int
    """Rows in the cache."""
    record_bytes: int
    """Bytes of a row with its optimizer state in host memory, which cross the link together."""
    words: tuple[tuple[int, ...], ...]
    """The values of `jaxsok.types.TIER_COUNTERS`, by shard."""

    @property
    def num_hits(self) -> int:
        """Rows that the cache had."""
        return self._sum("num_hits")

    @property
    def num_read(self) -> int:
        """Rows that were read from host memory."""
        return self._sum("num_fetched")

    @property
    def num_written(self) -> int:
        """Rows that left the cache for host memory; staged rows, which an update writes too, are not counted."""
        return self._sum("num_written")

    @property
    def hit_rate(self) -> float:
        """Hits over hits and reads; NaN if there were none. Updates count, whose rows the lookup has just brought."""
        asked = self.num_hits + self.num_read
        return self.num_hits / asked if asked else float("nan")

    @property
    def bytes_read(self) -> int:
        """Bytes that were read over the link."""
        return self.num_read * self.record_bytes

    @property
    def bytes_written(self) -> int:
        """Bytes of the rows that left the cache."""
        return self.num_written * self.record_bytes

    def __sub__(self, earlier: "CacheStats") -> "CacheStats":
        """Returns the counts since `earlier`, of the same store; rows and slots are those of now."""
        if self.tables != earlier.tables or len(self.words) != len(earlier.words):
            raise ValueError(
                f"CacheStats: got a difference of the stores of tables {list(self.tables)} and {list(earlier.tables)} "
                f"on {len(self.words)} and {len(earlier.words)} shards, wanted the same store."
            )
        words = (np.array(self.words, np.int64) - np.array(earlier.words, np.int64)) % 2**32
        return dataclasses.replace(self, words=tuple(map(tuple, words.tolist())))

    def __str__(self) -> str:
        return (
            f"{', '.join(self.tables)}: {self.num_rows:,} rows in host memory, {self.num_cached:,} of them in a cache "
            f"of {self.num_slots:,}; hit rate {self.hit_rate:.3f}, {self.num_read:,} rows read "
            f"({format_bytes(self.bytes_read)}), {self.num_written:,} written ({format_bytes(self.bytes_written)})"
        )

    def _sum(self, name: str) -> int:
        return sum(shard[TIER_COUNTERS.index(name)] for shard in self.words)


# Caches that are not there -------------------------------------------------------------------------------------------

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes of caches that `str` shows, as shares of the keys."""


@dataclasses.dataclass(frozen=True, eq=False)
class CacheEstimate:
    """The hit rates of a sample of lookups, for caches of all sizes; `str` makes a table of them.

    The caches begin empty. The first use of a key in the sample says nothing of them: the row may be new, or it may
    have been used before the sample. `hit_rates` leave first uses out, `least_hit_rates` take them as reads. A longer
    sample brings the two together.
    """

    tables: tuple[str, ...]
    """Names of the tables of the store."""
    num_batches: int
    """Batches of the sample."""
    largest_batch: int
    """Distinct keys of the batch that has most of them; a smaller cache reads some rows twice in a training step."""
    num_repeated: int
    """Distinct keys that an earlier batch had too, summed over the batches."""
    num_hits: np.ndarray
    """float64[num_keys + 1]: how many of these a cache of 0, 1, 2, ... rows has, on average over which of several
    equally old rows leaves; a cache smaller than the largest batch usually has more."""
    device_rows: int | None = None
    """Rows of the declared cache; None: the tables are declared on the device."""

    @property
    def num_keys(self) -> int:
        """Distinct keys of the sample. A larger cache is of no use to it."""
        return len(self.num_hits) - 1

    @property
    def hit_rates(self) -> np.ndarray:
        """float64[num_keys + 1]: the hit rate of lookups by the rows of the cache; NaN if no key was repeated."""
        with np.errstate(invalid="ignore"):
            return self.num_hits / np.float64(self.num_repeated)

    @property
    def least_hit_rates(self) -> np.ndarray:
        """float64[num_keys + 1]: the same if the first use of each key in the sample read its row."""
        return self.num_hits / max(1, self.num_repeated + self.num_keys)

    def hit_rate(self, device_rows: int) -> float:
        """Returns the hit rate of lookups with a cache of `device_rows` rows, on all devices together."""
        return float(self.hit_rates[min(device_rows, self.num_keys)])

    def rows_read(self, device_rows: int) -> float:
        """Returns the rows that the lookup of a batch reads on average, first uses left out."""
        missed = self.num_repeated - self.num_hits[min(device_rows, self.num_keys)]
        return float(missed) / max(1, self.num_batches)

    def smallest_cache(self, hit_rate: float) -> int:
        """Returns the rows of the smallest cache with at least this hit rate, from 0.0 to 1.0."""
        # A count that rounding left just below the wanted one is enough.
        wanted = hit_rate * self.num_repeated * (1 - 1e-9)
        return min(int(np.searchsorted(self.num_hits, wanted)), self.num_keys)

    def __str__(self) -> str:
        declared = [] if self.device_rows is None else [self.device_rows]
        sizes = sorted({*declared, *(round(share * self.num_keys) for share in _SHARES)})
        head = ("cache", "of the keys", "hit rate", "at least", "rows read a batch", "")
        body = [
            (
                f"{rows:,}",
                f"{rows / max(1, self.num_keys):.1%}",
                f"{self.hit_rate(rows):.3f}",
                f"{self.least_hit_rates[min(rows, self.num_keys)]:.3f}",
                f"{self.rows_read(rows):,.1f}",
                "declared" if rows == self.device_rows else "",
            )
            for rows in sizes
        ]
        title = (
            f"{', '.join(self.tables)}: {self.num_batches:,} batches of at most {self.largest_batch:,} distinct keys, "
            f"{self.num_keys:,} in all"
        )
        return "\n".join([title, *format_columns(head, body, is_text=(5,))])


def cache_estimate(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    batches: Iterable[Mapping[str, Any]],
    *,
    num_shards: int = 1,
) -> tuple[CacheEstimate, ...]:
    """Counts how often caches of all sizes have the rows of a sample, for each store that may lie in host memory.

    Tables need not be declared in host memory; those that share a store share its cache. On several shards keys are
    taken to be spread evenly, so that caches on all devices together do what one of their size does. The least recently
    used row leaves here; the real cache goes by the mean of all uses, and brings up to 17% fewer rows where frequencies
    stay.

    Args:
      tables: of the collection.
      features: of the collection.
      batches: raw batches in the order of training, as `Collection.batch` takes them, each that of all devices.
      num_shards: devices along the axis.

    Raises:
      TypeError, ValueError: unknown names, or a batch that `Collection.batch` refuses.

    Cost:
      On the host, in NumPy: a sort of the keys of each batch and one of the distinct keys of all batches; then a pass
      over these, and for each batch one over the batches before it. 200 batches of 42,000 distinct keys took 5.5 s and
      600 MB on one core.

    Example:
      >>> from jaxsok import optim
      >>> tables = [TableSpec("item", 4, optim.sgd(0.1))]
      >>> batches = [{"item": np.array(keys)} for keys in ([7, 7, 8], [9, 9, 9], [7, 8, 9])]
      >>> (estimate,) = cache_estimate(tables, [FeatureSpec("item", table="item")], batches)
      >>> estimate.num_hits.tolist(), estimate.num_repeated  # a cache of 2 rows has 9, and 7 or 8
      ([0.0, 1.0, 2.0, 3.0], 3)
      >>> estimate.smallest_cache(0.6)
      2
    """
    check_declarations("cache_estimate", tables, features, num_shards)
    distinct: dict[str, list[np.ndarray]] = {table.name: [] for table in tables}
    for number, raw in enumerate(batches):
        for table, keys in _keys_of(features, raw, f"cache_estimate: batches[{number}]", distinct).items():
            distinct[table].append(np.unique(keys))
    stores = [store for store in group_into_stores(tables, num_shards, bag_tables(features)) if not store.is_replicated]
    return tuple(_estimate(store, [distinct[table.name] for table in store.tables]) for store in stores)


def _keys_of(
    features: Sequence[FeatureSpec], raw: Mapping[str, Any], what: str, tables: Iterable[str]
) -> dict[str, np.ndarray]:
    """Reads the keys of a raw batch by table, without padding."""
    read = read_batch(raw, features, what)
    keys: dict[str, list[np.ndarray]] = {table: [np.zeros(0, np.uint64)] for table in tables}
    for feature in features:
        keys[feature.table].append(read[feature.name][0].keys.reshape(-1))
    joined = {table: np.concatenate(parts) for table, parts in keys.items()}
    return {table: part[part != np.uint64(PADDING_KEY)] for table, part in joined.items()}


def _estimate(store: StoreSpec, distinct: Sequence[Sequence[np.ndarray]]) -> CacheEstimate:
    """Numbers the rows of a store, whose distinct keys are given by table and batch, and counts."""
    num_batches, num_keys = len(distinct[0]), 0
    rows: list[list[np.ndarray]] = [[] for _ in range(num_batches)]
    for of_table in distinct:
        known, numbers = np.unique(np.concatenate([np.zeros(0, np.uint64), *of_table]), return_inverse=True)
        cuts = np.cumsum([keys.size for keys in of_table])[:-1]
        for batch, part in zip(rows, np.split(numbers + num_keys, cuts), strict=False):
            batch.append(part)
        num_keys += known.size
    joined = [np.concatenate(parts) for parts in rows]
    num_hits = _hits(joined, num_keys)
    return CacheEstimate(
        tables=tuple(table.name for table in store.tables),
        num_batches=num_batches,
        largest_batch=max((batch.size for batch in joined), default=0),
        num_repeated=sum(batch.size for batch in joined) - num_keys,
        num_hits=num_hits,
        device_rows=None if store.memory is None else store.num_shards * store.num_slots,
    )


def _hits(batches: Sequence[np.ndarray], num_keys: int) -> np.ndarray:
    """Returns the rows found by caches of 0 to `num_keys` rows; each batch has the numbers of its distinct rows."""
    last = np.full(num_keys, -1)  # by row: the last batch that used it
    num_last = np.zeros(len(batches), np.int64)  # by batch: the rows that used it last
    more = np.zeros(num_keys + 1)  # by c: how much more a row beyond c is worth than the one before
    for number, rows in enumerate(batches):
        used = last[rows]
        num_again = np.bincount(used[used >= 0], minlength=number)
        sizes = num_last[:number]
        younger = sizes[::-1].cumsum()[::-1] - sizes
        groups = np.flatnonzero(num_again)
        shares = num_again[groups] / sizes[groups]
        more[younger[groups]] += shares
        more[(younger + sizes)[groups]] -= shares
        num_last[:number] -= num_again
        num_last[number] = rows.size
        last[rows] = number
    # Rounding must not make the curve fall.
    worth = np.maximum(np.cumsum(more[:-1]), 0)
    return np.concatenate([[0.0], np.cumsum(worth)])

"""Eviction: the cost of removing the tenth of the rows that was used longest ago, by part.

Question: how near to the memory's bandwidth is an exact eviction over all rows of a table: selecting rows, releasing
          them (which sweeps the index), both in one program; and the hand-over to the host? For comparison: the
          rebuild of an index of the same size, which a sweep avoids.
Workload: one table under rowwise Adagrad, least recently used, last steps spread over 2**20; 10% of the used rows
          leave; 100 M rows of 8 floats, and as many as fit of 64 floats. Between evictions as many new keys come.
Limit:    bytes of `select_bytes` and `release_bytes` at the bandwidth of a copy: each array that must be read, once.
Command:  `python -m jaxsok bench --only evict`
Last result: docs/performance.md (H200, commit 7db9096).
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp

from jaxsok import evict, table
from jaxsok.policies import LeastRecentlyUsed
from jaxsok.store import num_buckets_of, row_bytes

from . import bench_scale, records
from .one_table import OneTable, count
from .records import Record, Recorder
from .timing import summary

NUM_ROWS = 100_000_000
SHAPES = ((8, NUM_ROWS), (64, None))
"""Floats of a row, and rows; None: as many as fit, at most four times as many."""

SHARE = 10
"""One row in this many leaves."""

REPETITIONS = 5
KEYS_PER_CALL = 4 << 20
MAX_STEPS = 1 << 20

RECORD_BYTES, STATISTICS_BYTES, INDEX_BYTES, FLAG_BYTES = 16, 8, 32, 1
"""Bytes per row of capacity."""

HAND_OVER_ROWS = 2_000_000
"""Rows that are handed over at most: the link is the same for more."""


def select_bytes(num_rows: int) -> int:
    """Returns the bytes that selecting rows must move: each row's owner, last step, and a flag.

    Example:
      >>> select_bytes(num_rows=2)
      50
    """
    return num_rows * (RECORD_BYTES + STATISTICS_BYTES + FLAG_BYTES)


def release_bytes(num_rows: int, num_gone: int, state_floats: int) -> int:
    """Returns the bytes that a release must move: flags, records and index; record, statistics and state of freed rows.

    Example:
      >>> release_bytes(num_rows=10, num_gone=1, state_floats=1)  # 10 * 49 + 28
      518
    """
    of_all = FLAG_BYTES + RECORD_BYTES + INDEX_BYTES
    return num_rows * of_all + num_gone * (RECORD_BYTES + STATISTICS_BYTES + 4 * state_floats)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _with_last_steps(statistics: tuple[jax.Array, ...], most: int, salt: jax.Array) -> tuple[jax.Array, ...]:
    """Gives every row a random last step below `most`."""

    def spread(slab: jax.Array) -> jax.Array:
        words = (jax.lax.iota(jnp.uint32, slab.shape[0]) + salt) * jnp.uint32(0x9E3779B1)
        words = (words ^ (words >> jnp.uint32(15))) * jnp.uint32(0x2C1B3C6D)
        return jnp.stack([(words ^ (words >> jnp.uint32(13))) % jnp.uint32(most), jnp.ones_like(words)], axis=1)

    return tuple(map(spread, statistics))


def _renew(filled: OneTable, begin: int, num_new: int, salt: int) -> None:
    """Gives new ids the freed rows, and every row another last step."""
    for start in range(begin, begin + num_new, KEYS_PER_CALL):
        filled.insert_ids(start, min(KEYS_PER_CALL, begin + num_new - start))
    statistics = _with_last_steps(filled.store.statistics, MAX_STEPS, jnp.uint32(salt))
    filled.store = dataclasses.replace(filled.store, statistics=statistics)
    jax.block_until_ready(filled.state)


def _time(run) -> tuple[float, object]:
    begin = time.perf_counter()
    result = jax.block_until_ready(run())
    return (time.perf_counter() - begin) * 1e3, result


def _require_the_oldest(statistics, flags: jax.Array, records_: tuple, num_gone: int) -> None:
    """Raises unless the given number of rows is flagged, and no flagged row was used after a row that stays."""
    last = jnp.concatenate([slab[:, 0] for slab in statistics])
    keys = jnp.concatenate([slab[:, :2] for slab in records_])
    is_used = (keys != jnp.uint32(0xFFFFFFFF)).any(axis=1)
    goes = flags != 0
    newest_gone = jnp.where(goes, last, 0).max()
    oldest_kept = jnp.where(is_used & ~goes, last, jnp.uint32(0xFFFFFFFF)).min()
    if int(goes.sum()) != num_gone or int(newest_gone) > int(oldest_kept):
        raise RuntimeError(f"evict: {int(goes.sum())} rows flagged up to step {newest_gone}, kept from {oldest_kept}.")


def measure(recorder: Recorder, copy_gb_s: float, scale: float, is_quick: bool = False) -> None:
    """Measures both widths."""
    for dim, rows in SHAPES:
        spec = OneTable(16, dim, "rowwise_adagrad", eviction=LeastRecentlyUsed()).store_spec
        # A flag and a score for each row are extra, as are the refilled rows.
        affordable = bench_scale.share_of_memory() // (row_bytes(spec) + 9)
        num_rows = min(rows or 4 * NUM_ROWS, affordable)
        num_rows = max(1000, round(num_rows * scale))
        label = f"evict: D {dim}, {count(num_rows)} rows"
        if recorder.has_time(label):
            with recorder.attempt(label):
                _measure(recorder, copy_gb_s, dim, num_rows, 2 if is_quick else REPETITIONS)


def _measure(recorder: Recorder, copy_gb_s: float, dim: int, num_rows: int, repetitions: int) -> None:
    filled = OneTable(num_rows, dim, "rowwise_adagrad", eviction=LeastRecentlyUsed())
    num_gone = max(1, num_rows // SHARE)
    kept = jnp.uint32(num_rows - num_gone)
    leaving = evict.Leaving(filled.store_spec, LeastRecentlyUsed())
    filled.fill(min(num_rows, KEYS_PER_CALL))
    begin, clock = num_rows, jnp.uint32(MAX_STEPS)
    _renew(filled, begin, 0, 0)
    samples: dict[str, list[float]] = {what: [] for what in (records.SELECT, records.RELEASE, records.EVICT)}
    for number in range(repetitions + 1):  # The first call compiles.
        ms, (flags, _) = _time(lambda: evict._select(leaving, filled.store, filled.state.seed, clock, kept, None))
        samples[records.SELECT].append(ms)
        if number == 0:
            _require_the_oldest(filled.store.statistics, flags, filled.store.records, num_gone)
        ms, ((filled.store, _),) = _time(functools.partial(evict._release, (leaving,), (filled.store,), (flags,)))
        samples[records.RELEASE].append(ms)
        del flags
        filled.require_rows(num_rows - num_gone)
        _renew(filled, begin, num_gone, 2 * number + 1)
        call = functools.partial(evict.evict, {0: leaving}, (filled.store,), filled.state.seed, clock, {0: kept})
        ms, ((filled.store,), _) = _time(call)
        samples[records.EVICT].append(ms)
        filled.require_rows(num_rows - num_gone)
        begin += 2 * num_gone
        _renew(filled, begin - num_gone, num_gone, 2 * number + 2)
    num_buckets = num_buckets_of(filled.store.capacity)
    rebuild = jax.jit(lambda store: table.kernels.rebuild(store.counters, store.records, num_buckets))
    samples[records.REBUILD] = []
    for _ in range(repetitions + 1):
        filled.store = dataclasses.replace(
            filled.store, index=filled.store.index.delete() or jnp.zeros((0, 16), jnp.uint32)
        )
        ms, (index, counters) = _time(functools.partial(rebuild, filled.store))
        filled.store = dataclasses.replace(filled.store, index=index, counters=counters)
        samples[records.REBUILD].append(ms)
        del index
    state_floats = sum(state.dim for state in filled.store_spec.state_specs)
    of_select, of_release = select_bytes(num_rows), release_bytes(num_rows, num_gone, state_floats)
    moved = {
        records.SELECT: of_select,
        records.RELEASE: of_release,
        records.EVICT: of_select + of_release,
        records.REBUILD: num_rows * (RECORD_BYTES + INDEX_BYTES),
    }
    load = filled.load
    samples[records.HAND_OVER], moved[records.HAND_OVER] = _hand_over(filled, leaving, clock, num_rows)
    for what, times in samples.items():
        is_of_host = what == records.HAND_OVER
        recorder.add(
            Record(
                "evict",
                what,
                "jaxsok",
                summary(times[1:] or times, 1),
                optimizer=filled.optimizer,
                variant=f"D {dim}, {count(num_rows)} rows",
                num_keys=min(num_gone, HAND_OVER_ROWS) if is_of_host else num_rows,
                moved_bytes=moved[what],
                limit_ms=None if is_of_host else moved[what] / copy_gb_s * 1e-6,
                load=load,
                notes={"part": "evict", "num_rows": num_rows, "num_gone": num_gone, "first_ms": times[0]},
            )
        )


def _hand_over(filled: OneTable, leaving: evict.Leaving, clock: jax.Array, num_rows: int) -> tuple[list[float], int]:
    """Measures the milliseconds of reading the rows that would leave, and their bytes; no row leaves."""
    num_gone = max(1, min(num_rows // SHARE, HAND_OVER_ROWS))
    flags, _ = evict._select(leaving, filled.store, filled.state.seed, clock, jnp.uint32(num_rows - num_gone), None)
    times, num_bytes, seen = [], 0, 0
    for _ in range(2):  # The first call compiles.
        begin, num_bytes, seen = time.perf_counter(), 0, 0
        for _, part in evict.selected_records(filled.store_spec, filled.store, filled.state.seed, flags):
            seen += part.num_rows
            arrays = (part.keys, part.rows, *part.state.values(), part.last_step, part.frequency)
            num_bytes += sum(array.nbytes for array in arrays if array is not None)
        times.append((time.perf_counter() - begin) * 1e3)
    if seen != num_gone:
        raise RuntimeError(f"evict: {seen} rows handed over, wanted {num_gone}.")
    return times, num_bytes

"""Size: lookups as the table grows to the memory's end, the cost of growing, inserting, and the effect of churn.

Question: four of them. (1) The time of find + gather of 1 Mi keys in a table of 1 M rows, which grows by
          `Collection.grow` to 400 M, or to 80% of the device's memory. (2) Time and memory of growing a full store of
          10 GB. (3) Keys a second when 100 M keys are inserted into an empty store, 4 Mi a call. (4) The speed of
          find + gather after 1,000 rounds in which a tenth of the keys is erased and as many new ones are inserted,
          compared with a freshly built store with the same keys.
Workload: one table, 64 floats, SGD; uniform keys, all present.
Limit:    bytes of `limits.forward_bytes` and `limits.insert_bytes` at the bandwidth of a copy. Targets: (1) within 15%
          from 16 M rows on, (2) no copy of a row, (4) at least 90%.
Command:  `python -m jaxsok bench --only scale`
Last result: docs/performance.md (H200, commit 7db9096).
"""

import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxsok import table
from jaxsok.store import row_bytes
from jaxsok.types import COUNTERS

from . import limits, records
from .one_table import OneTable, count, draw, keys_of, table_ids
from .records import Record, Recorder
from .timing import Protocol, summary

DIM = 64
NUM_KEYS = 1 << 20
"""Keys of one lookup."""

SIZES = (1_000_000, 4_000_000, 16_000_000, 64_000_000, 256_000_000, 400_000_000)
"""Rows in use; all are multiples of the first."""

MEMORY_SHARE = 0.8
"""The share of the device's memory that a store may fill."""

GROWN_BYTES = 10_000_000_000
"""Bytes of a store before it grows: rows, records and index."""

BUILT_KEYS = 100_000_000
BUILD_KEYS_PER_CALL = 4 << 20

CHURN_ROWS = 4 << 20
CHURN_ROUNDS = 1000
CHURN_SHARE = 10
"""One key in this many leaves in a round."""

CPU_CHURN_ROUNDS, QUICK_CHURN_ROUNDS = 100, 10


def growth(recorder: Recorder, scale: float) -> None:
    """Grows a full store of 10 GB twice; the second time nothing is compiled.

    This is measured first, because a device reports the peak since the process began.
    """
    spec = OneTable(16, DIM).store_spec
    num_rows = max(1024, round(GROWN_BYTES * scale) // row_bytes(spec))
    if not recorder.has_time("scale: growth"):
        return
    for attempt in ("first", "again"):
        with recorder.attempt(f"scale: growth, {attempt}"):
            _grow_once(num_rows, attempt, recorder)


def _grow_once(num_rows: int, attempt: str, recorder: Recorder) -> None:
    table = OneTable(num_rows, DIM)
    table.fill(min(num_rows, BUILD_KEYS_PER_CALL))
    jax.block_until_ready(table.state)
    address = _address(table.store.rows[0])
    before = _memory()
    begin = time.perf_counter()
    table.state = table.collection.grow(table.state, 1)  # one new key is enough to grow
    jax.block_until_ready(table.state)
    ms = (time.perf_counter() - begin) * 1e3
    after = _memory()
    if table.store.capacity <= num_rows:
        raise RuntimeError(f"scale: {table.store.capacity} rows after growing, wanted more than {num_rows}.")
    table.require_rows(num_rows)
    notes = {
        "part": "scale",
        "attempt": attempt,
        "num_rows": num_rows,
        "capacity": table.store.capacity,
        "bytes": num_rows * row_bytes(table.store_spec),
        "rows_stay": _address(table.store.rows[0]) == address,
        "in_use_before": before.get("bytes_in_use"),
        "in_use_after": after.get("bytes_in_use"),
        "peak_before": before.get("peak_bytes_in_use"),
        "peak_after": after.get("peak_bytes_in_use"),
    }
    recorder.add(Record("scale", records.GROW, "jaxsok", summary([ms], 1), variant=attempt, notes=notes))


def sizes(recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, scale: float, is_quick: bool) -> None:
    """Times find + gather as `Collection.grow` enlarges one table, and records the largest size."""
    base = max(1024, round(SIZES[0] * scale))
    wanted = [base * (size // SIZES[0]) for size in (SIZES[:3] if is_quick else SIZES)]
    spec = OneTable(16, DIM).store_spec
    # The largest lookup and a batch of new keys need memory of their own.
    affordable = share_of_memory() // row_bytes(spec) // base * base
    last = min(wanted[-1], affordable)
    is_limited = last < wanted[-1]
    wanted = [size for size in wanted if size < last] + [last]
    # Lookups have a collection of their own, so `grow` sees no batch for which it would keep a reserve.
    reader = OneTable(base, DIM)
    table = OneTable(base, DIM, max_capacity=last)
    table.state = table.collection.init(seed=0)
    table.collection.batch(
        {"item": keys_of(jnp.zeros(base, jnp.uint32))}
    )  # Declares how many keys one call may insert.
    num_keys = max(16, round(NUM_KEYS * scale))
    num_rows, seconds, begin = 0, 0.0, time.perf_counter()
    for size in wanted:
        if num_rows and not recorder.has_time(f"scale: {count(size)} rows"):
            return
        try:
            while num_rows < size:
                table.state = table.collection.grow(table.state, base)
                table.insert_ids(num_rows, base)
                num_rows += base
                # With a counter, `grow` does not assume the worst case: a capacity more than wanted.
                jax.block_until_ready(table.store.counters)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:  # Report the sizes reached before.
            recorder.fail(f"scale: {count(size)} rows", f"{type(error).__name__}: {error}")
            break
        table.require_rows(size)
        seconds += time.perf_counter() - begin
        id_sets = draw(size, num_keys, protocol.num_key_sets, seed)
        reader.state = table.state
        sets = reader.inputs(records.FIND_AND_GATHER, id_sets)
        timing = reader.measure_in_a_row(records.FIND_AND_GATHER, sets, protocol)
        reader.state = None
        moved = limits.forward_bytes(num_keys, num_keys, num_keys, DIM, training=False)
        recorder.add(
            Record(
                "scale",
                records.FIND_AND_GATHER,
                "jaxsok",
                timing,
                variant=f"{count(size)} rows",
                num_keys=num_keys,
                moved_bytes=moved,
                limit_ms=moved / copy_gb_s * 1e-6,
                load=table.load,
                notes={
                    "part": "scale",
                    "num_rows": size,
                    "num_slabs": len(table.store.rows),
                    "bytes": table.store.capacity * row_bytes(spec),
                    "fill_s": seconds,
                },
            )
        )
        begin = time.perf_counter()
    memory = _memory()
    notes = {
        "part": "scale",
        "num_rows": num_rows,
        "bytes": table.store.capacity * row_bytes(spec),
        "in_use": memory.get("bytes_in_use"),
        "peak": memory.get("peak_bytes_in_use"),
        "memory": _total_memory(),
        "is_limited": is_limited,
    }
    recorder.add(Record("scale", records.FILL, "jaxsok", summary([seconds * 1e3], 1), notes=notes))


def build(recorder: Recorder, scale: float, copy_gb_s: float) -> None:
    """Times the insertion of all keys into an empty store of the size that they need."""
    num_keys = max(1024, round(BUILD_KEYS_PER_CALL * scale))
    calls = max(2, -(-round(BUILT_KEYS * scale) // num_keys))
    table = OneTable(calls * num_keys, DIM)
    samples = []
    for _ in range(3):  # The first call compiles.
        table.state = None
        table.state = table.collection.init(seed=0)
        jax.block_until_ready(table.state)
        begin = time.perf_counter()
        for call in range(calls):
            table.insert_ids(call * num_keys, num_keys)
        jax.block_until_ready(table.state)
        samples.append((time.perf_counter() - begin) * 1e3)
        table.require_rows(calls * num_keys)
    moved = limits.insert_bytes(calls * num_keys, DIM)
    recorder.add(
        Record(
            "scale",
            records.BUILD,
            "jaxsok",
            summary(samples[1:], 1),
            variant=f"{count(calls * num_keys)} keys, {count(num_keys)} a call",
            num_keys=calls * num_keys,
            moved_bytes=moved,
            limit_ms=moved / copy_gb_s * 1e-6,
            load=table.load,
            notes={"part": "scale", "first_ms": samples[0]},
        )
    )


def churn(recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, num_rows: int, rounds: int) -> None:
    """Erases and inserts a tenth of the keys, round by round, then compares with a fresh store of the same keys."""
    table = OneTable(num_rows, DIM)
    table.fill(min(num_rows, BUILD_KEYS_PER_CALL))
    num_changed = max(1, num_rows // CHURN_SHARE)
    live = jnp.arange(num_rows, dtype=jnp.uint32)
    change = jax.jit(functools.partial(_change, table.store_spec, num_changed), donate_argnums=(0, 1))
    for number in range(rounds):
        if number == 1:  # The first call compiles.
            jax.block_until_ready((table.store, live))
            begin = time.perf_counter()
        table.store, live = change(table.store, live, table.state.seed, jnp.uint32(number))
    jax.block_until_ready((table.store, live))
    round_ms = (time.perf_counter() - begin) * 1e3 / (rounds - 1)
    table.require_rows(num_rows)
    fresh = OneTable(num_rows, DIM)
    fresh.state = fresh.collection.init(seed=0)
    fresh.store, _ = fresh.insert(fresh.store, fresh.state.seed, keys_of(live))
    fresh.require_rows(num_rows)
    picks = draw(num_rows, max(16, min(NUM_KEYS, num_rows // 4)), protocol.num_key_sets, seed)
    id_sets = [live[pick] for pick in picks]
    moved = limits.forward_bytes(picks[0].size, picks[0].size, picks[0].size, DIM, training=False)
    for name, store in (("fresh", fresh), ("churned", table)):
        # Both run the same program, compiled once.
        store.programs = table.programs
        sets = table.inputs(records.FIND_AND_GATHER, id_sets)
        _, (_, stats) = table.programs[records.FIND_AND_GATHER].run(store.state, sets[0])
        if int(jax.device_get(stats.num_missing).sum()):
            raise RuntimeError(f"scale: the {name} store does not have all keys after {rounds} rounds.")
        timing = store.measure_in_a_row(records.FIND_AND_GATHER, sets, protocol)
        notes = {
            "part": "scale",
            "num_rows": num_rows,
            "rounds": rounds,
            "num_changed": num_changed,
            "longest_probe": int(store.store.counters[COUNTERS.index("longest_probe")]),
        }
        if store is table:
            notes["round_ms"] = round_ms
        recorder.add(
            Record(
                "scale",
                records.CHURN,
                "jaxsok",
                timing,
                variant=name,
                num_keys=picks[0].size,
                moved_bytes=moved,
                limit_ms=moved / copy_gb_s * 1e-6,
                load=store.load,
                notes=notes,
            )
        )


def measure(
    recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, scale: float, is_quick: bool = False
) -> None:
    """Measures everything except growth, each part alone."""
    is_cpu = jax.default_backend() == "cpu"
    rounds = QUICK_CHURN_ROUNDS if is_quick else CPU_CHURN_ROUNDS if is_cpu else CHURN_ROUNDS
    num_rows = 1 << max(10, (round(CHURN_ROWS * scale)).bit_length() - 1)  # a power of two, see _change
    measurements = {
        "churn": functools.partial(churn, recorder, protocol, seed, copy_gb_s, num_rows, rounds),
        "build": functools.partial(build, recorder, scale, copy_gb_s),
        "sizes": functools.partial(sizes, recorder, protocol, seed, copy_gb_s, scale, is_quick),
    }
    for name, measure in measurements.items():
        if recorder.has_time(f"scale: {name}"):
            with recorder.attempt(f"scale: {name}"):
                measure()


def _change(spec: Any, num_changed: int, store: Any, live: jax.Array, seed: jax.Array, number: jax.Array):
    """Runs one round: some live ids leave, and as many new ids take their places in `live`."""
    num_rows = live.size
    # Distinct places without a sort: an odd step through a power of two.
    step = (number * jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    places = (jax.lax.iota(jnp.uint32, num_changed) * step + number * jnp.uint32(0x85EBCA6B)) % jnp.uint32(num_rows)
    gone = keys_of(live[places])
    store, _ = table.erase(spec, store, gone, table_ids(gone))
    new = jnp.uint32(num_rows) + number * jnp.uint32(num_changed) + jax.lax.iota(jnp.uint32, num_changed)
    keys = keys_of(new)
    store, _, _ = table.find_or_insert(spec, store, seed, keys, table_ids(keys))
    return store, live.at[places].set(new)


def _memory() -> dict[str, int]:
    """Returns what the device reports of its memory; nothing on a CPU."""
    return jax.local_devices()[0].memory_stats() or {}


def _total_memory() -> int | None:
    """Returns the bytes of the device's memory: what JAX may take, divided by the share that it was given."""
    limit = _memory().get("bytes_limit")
    return round(limit / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))) if limit else None


def share_of_memory() -> int:
    """Returns the bytes that a store may fill: a share of the memory, at most what is free without two lookups."""
    total, stats = _total_memory(), _memory()
    if total is None:
        return 1 << 62
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) - 2 * NUM_KEYS * DIM * limits.FLOAT_BYTES * 3
    return min(round(MEMORY_SHARE * total), free)


def _address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()

"""The life of a table: statistics and admission in a lookup, the steps of a full table, and the speed of an export.

Question: training forward and step of W1 with frequency, last step and exact-count admission on, over the same without;
          a step of a table at its bound with `grow` before it, which evicts, over the step by itself, whose new keys
          are refused; an export of 10 GB, compared with the bandwidth of the link to the host.
Workload: W1, all keys present, and again with 1% of unseen keys, which wait and never enter; one table of 128
          floats under rowwise Adagrad, 10 GB of rows and state. The full table: 16 Mi rows of 64 floats, 262,144 keys a
          batch, a twentieth of them new, the others among recent rows with a probability of 1 / age; least recently
          used rows leave.
Limit:    the same step without; for the export a plain copy of 1 GB to the host, the best of three.
Command:  `python -m jaxsok bench --only life`
Last result: docs/results/life.md (H200, commits 7db9096 and f1daeda).
"""

import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxsok.policies import AdmitByCount, LeastRecentlyUsed

from . import fill, records, workloads
from .bench_scale import share_of_memory
from .limits import FLOAT_BYTES
from .one_table import OneTable, count
from .records import Batches, Record, Recorder
from .timing import Protocol, summary

WORKLOAD = "W1"
WITHOUT, WITH, WAITING = "without", "with", "with, 1% waiting"
NEVER = 1 << 30  # No key here is seen this often.
EXPORT_BYTES = 10 << 30
EXPORT_DIM = 128
LINK_BYTES = 1 << 30
UNSEEN = 100  # One key in this many is unseen.
FULL_ROWS, FULL_DIM, FULL_KEYS = 1 << 24, 64, 1 << 18
FULL_NEW = 20  # One key in this many is new.
FULL_STEPS, QUICK_FULL_STEPS = 100, 10


def measure(recorder: Recorder, protocol: Protocol, seed: int, scale: float, is_quick: bool = False) -> None:
    """Measures steps and the export."""
    workload = workloads.WORKLOADS[WORKLOAD].scale(scale)
    run = workload.runs[0]
    distributions = run.distributions[:1] if is_quick else run.distributions[:2]
    batches = []
    for distribution in distributions:
        key_sets = workloads.key_sets(workload, distribution, protocol.num_key_sets, seed)
        batches.append(Batches(workload, distribution, key_sets))
    for variant in (WITHOUT, WITH):
        label = f"life: {WORKLOAD} {variant}"
        if recorder.has_time(label):
            with recorder.attempt(label):
                _lookups(recorder, protocol, run.optimizer, batches, variant)
    for grows in (False, True):
        label = f"life: a full table, {WITH if grows else WITHOUT} grow"
        if recorder.has_time(label):
            with recorder.attempt(label):
                _full_table(recorder, seed, scale, QUICK_FULL_STEPS if is_quick else FULL_STEPS, grows=grows)
    if recorder.has_time("life: export"):
        with recorder.attempt("life: export"):
            _export(recorder, scale)


def _lookups(recorder: Recorder, protocol: Protocol, optimizer: str, batches: Sequence[Batches], variant: str) -> None:
    workload = batches[0].workload
    options = {} if variant == WITHOUT else {"statistics": True, "admission": AdmitByCount(num_sightings=NEVER)}
    filled = fill.fill_tables(workload, optimizer, **options)
    for key_batches in batches:
        id_sets = [key_set.ids for key_set in key_batches.key_sets]
        of_variant = {variant: id_sets}
        if variant == WITH:
            of_variant[WAITING] = [_with_unseen(ids, workload.num_rows) for ids in id_sets]
        for name, ids in of_variant.items():
            for what in (records.TRAINING, records.STEP):
                inputs = filled.inputs(what, ids)
                filled.state = filled.collection.grow(filled.state)  # Room for keys that wait.
                timing = filled.measure(what, inputs, protocol)
                notes = {"part": "life"}
                recorder.add(
                    key_batches.record(
                        what,
                        "jaxsok",
                        timing,
                        optimizer=optimizer if what == records.STEP else "",
                        variant=name,
                        load=filled.load,
                        notes=notes,
                    )
                )
    short = {name: rows for name, rows in filled.collection.num_rows(filled.state).items() if rows != workload.num_rows}
    if short:
        raise RuntimeError(f"life: tables hold {short} rows, wanted {workload.num_rows} each: keys came in that wait.")


def _with_unseen(ids: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns ids [num_tables, num_bags, hotness], of which one in a hundred has no row."""
    changed = ids.copy()
    changed[:, ::UNSEEN] = ids[:, ::UNSEEN] % 1000 + num_rows
    return changed


def _full_table(recorder: Recorder, seed: int, scale: float, num_steps: int, *, grows: bool) -> None:
    num_rows, num_keys = max(4096, round(FULL_ROWS * scale)), max(64, round(FULL_KEYS * scale))
    bound = {"max_capacity": num_rows, "eviction": LeastRecentlyUsed()}
    table = OneTable(num_rows, FULL_DIM, "rowwise_adagrad", **bound)
    table.fill(min(num_rows, 1 << 20))
    rng, first_new, num_new = np.random.default_rng(seed), num_rows, num_keys // FULL_NEW
    times = []
    for _ in range(4):  # The first repetition compiles.
        id_sets = []
        for _ in range(num_steps):
            ages = np.exp(rng.random(num_keys - num_new) * np.log(0.8 * num_rows)).astype(np.int64)
            id_sets.append(np.concatenate([first_new + np.arange(num_new), first_new - ages]).astype(np.uint32))
            first_new += num_new
        inputs = table.inputs(records.STEP, [jax.device_put(ids) for ids in id_sets])
        jax.block_until_ready(inputs)
        begin, outputs = time.perf_counter(), None
        for features, gradients in inputs:
            if grows:
                table.state = table.collection.grow(table.state, features)
            table.state, outputs = table.programs[records.STEP].run(table.state, (features, gradients))
        jax.block_until_ready((table.state, outputs))
        times.append((time.perf_counter() - begin) * 1e3 / num_steps)
    growth = table.collection.growth
    if grows and not growth.num_evictions:
        raise RuntimeError("life: a full table lost no row, though new keys came.")
    notes = {"part": "life", "num_waits": growth.num_waits, "num_evictions": growth.num_evictions}
    recorder.add(
        Record(
            "life",
            records.FULL,
            "jaxsok",
            summary(times[1:], num_steps),
            optimizer=table.optimizer,
            distribution="1 in 20 new",
            variant=f"{WITH} grow" if grows else WITHOUT,
            num_keys=num_keys,
            load=table.load,
            notes=notes,
        )
    )


def _export(recorder: Recorder, scale: float) -> None:
    row_bytes = EXPORT_DIM * FLOAT_BYTES + FLOAT_BYTES + 8
    num_rows = max(1000, round(min(EXPORT_BYTES, share_of_memory() // 3) * scale) // row_bytes)
    table = OneTable(num_rows, EXPORT_DIM, "rowwise_adagrad", statistics=True)
    table.fill(min(num_rows, 4 << 20))
    link = jax.block_until_ready(jax.numpy.zeros(max(1024, round(LINK_BYTES * scale) // 4), jax.numpy.float32))
    link_ms = []
    for _ in range(3):
        begin = time.perf_counter()
        np.asarray(link + 1)
        link_ms.append((time.perf_counter() - begin) * 1e3)
    del link
    times, num_bytes = [], 0
    for _ in range(3):  # The first call compiles.
        begin, num_bytes, seen = time.perf_counter(), 0, 0
        for part in table.collection.export_chunks(table.state, "items"):
            seen += part.num_rows
            arrays = (part.keys, part.rows, *part.state.values(), part.last_step, part.frequency)
            num_bytes += sum(array.nbytes for array in arrays if array is not None)
        times.append((time.perf_counter() - begin) * 1e3)
        if seen != num_rows:
            raise RuntimeError(f"life: export gave {seen} rows, wanted {num_rows}.")
    link_rate = max(1024, round(LINK_BYTES * scale) // 4) * 4 / min(link_ms)
    recorder.add(
        Record(
            "life",
            records.EXPORT,
            "jaxsok",
            summary(times[1:], 1),
            optimizer=table.optimizer,
            variant=f"D {EXPORT_DIM}, {count(num_rows)} rows",
            num_keys=num_rows,
            moved_bytes=num_bytes,
            limit_ms=num_bytes / link_rate,
            load=table.load,
            notes={"part": "life", "link_gb_per_s": link_rate * 1e-6, "first_ms": times[0]},
        )
    )

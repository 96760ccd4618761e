"""From files to the device: the sources of `jaxsok.data`, read, packed and copied, without a step.

Question: how many samples a second does each source give, with how many cores?
Workload: a log in Criteo's form (13 integers, 26 keys a sample), batches of 65,536 samples; in the page cache.
Limit:    none; the packing and copying of `bench_input.py` stand in the same table.
Command:  `python -m jaxsok bench --only input`
Last result: 2026-11-26, H100, 16 cores (docs/results/2026-11-26-h100-input.md): NumPy 35 M samples/s, Criteo's binary
          files 25, Arrow 23, Parquet 16, text 0.9 with 8 threads; workers not yet.

"threads" are those that read; packing has its own. Where there are workers, each of these processes reads and packs
with one thread. "cores" is processor time, that of workers included, over the time taken.
"""

import collections
import contextlib
import itertools
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet

import jaxsok
from jaxsok import data
from jaxsok.data import criteo

from . import records
from .records import Record, Recorder
from .timing import Protocol, summary

BATCH_SIZE = 65_536
NUM_BATCHES = 48
"""More than all workers together keep decoded (10 each), so that each epoch decodes all of them."""
THREADS = (1, 8)
WORKERS = (4,)


def measure(recorder: Recorder, protocol: Protocol, scale: float, is_quick: bool) -> None:
    """Writes the log in each form, and reads each with several numbers of threads and workers."""
    batch_size = BATCH_SIZE if scale >= 1 else max(256, round(BATCH_SIZE * scale))
    num_cores = len(os.sched_getaffinity(0))
    threads = [number for number in THREADS if number <= num_cores][: 1 if is_quick else None] or [1]
    workers = [number for number in WORKERS if number <= num_cores and not is_quick]
    with tempfile.TemporaryDirectory() as folder:
        for name, source in _sources(pathlib.Path(folder), batch_size, 2 if is_quick else NUM_BATCHES):
            decodes = isinstance(source, data.BlockSource)  # Otherwise workers have nothing to do.
            ways = [(number, 0) for number in threads] + [(1, number) for number in workers if decodes]
            for num_threads, num_workers in ways:
                if not recorder.has_time(f"reading of {name}"):
                    return
                with recorder.attempt(f"reading of {name}"):
                    _measure_source(recorder, protocol, name, source, batch_size, num_threads, num_workers)


def _sources(folder: pathlib.Path, batch_size: int, num_batches: int) -> Iterator[tuple[str, data.Source]]:
    """Yields the same samples from each kind of source."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
    import synthetic_log

    text, num_samples = folder / "log.tsv", batch_size * num_batches
    synthetic_log.write_log(text, num_samples)
    criteo.convert(text, folder / "binary", num_threads=8)
    binary = criteo.binary_source(folder / "binary")
    columns = binary.take(slice(0, num_samples))
    integers = pa.FixedSizeListArray.from_arrays(columns["integers"].reshape(-1), criteo.NUM_INTEGERS)
    keys = {name: np.ascontiguousarray(columns[name]) for name in criteo.CATEGORY_NAMES}
    table = pa.table({"label": columns["label"], "integers": integers} | keys)
    pa.parquet.write_table(table, folder / "log.parquet", row_group_size=batch_size)
    with pa.ipc.new_file(folder / "log.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_size)
    yield "NumPy arrays", data.ArraySource({"label": columns["label"], "integers": columns["integers"]} | keys)
    yield "Criteo binary", binary
    yield "Criteo text", criteo.TextSource(text)
    yield "Parquet", data.ArrowSource(folder / "log.parquet")
    yield "Arrow IPC", data.ArrowSource(folder / "log.arrow")


def _measure_source(
    recorder: Recorder,
    protocol: Protocol,
    name: str,
    source: data.Source,
    batch_size: int,
    num_threads: int,
    num_workers: int,
) -> None:
    tables = [jaxsok.TableSpec(key, 16, jaxsok.optim.sgd(0.1), capacity=64) for key in criteo.CATEGORY_NAMES]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(key, table=key) for key in criteo.CATEGORY_NAMES])
    batches = data.Batches(source, batch_size)
    dataset = batches.repeat()
    if num_workers:
        dataset = dataset.map(data.PackBatch(collection))
    num_ahead = 1 if num_workers else 4
    iterator: Any = data.iterate(dataset, num_threads=num_threads, num_workers=num_workers, num_ahead=num_ahead)
    pipeline = iter(collection.pipeline(iterator))
    times, cores = [], []
    for _ in itertools.islice(pipeline, len(batches)):  # Starts the workers, and fills the read-ahead.
        pass
    for _ in range(max(2, min(3, protocol.repetitions))):
        begin, used = time.perf_counter(), _processor_s()
        last = collections.deque(itertools.islice(pipeline, len(batches)), maxlen=1)
        jax.block_until_ready(list(last))
        elapsed = time.perf_counter() - begin
        times.append(elapsed * 1e3 / len(batches))
        cores.append((_processor_s() - used) / elapsed)
    pipeline.close()
    iterator.close()
    notes = {
        "part": "input",
        "num_threads": num_threads,
        "num_workers": num_workers,
        "num_samples": batch_size,
        "cores": float(np.median(cores)),
    }
    num_keys = batch_size * criteo.NUM_CATEGORIES
    timing = summary(times, len(batches))
    recorder.add(Record("Criteo", records.READ, "jaxsok", timing, variant=name, num_keys=num_keys, notes=notes))


def _processor_s() -> float:
    """Returns the processor time of this process and its workers so far."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total

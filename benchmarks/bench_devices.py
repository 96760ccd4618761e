"""One session on several devices: keys a second of replicas, and of tables that are split over devices.

Question: how many times as many keys a second does a session look up on 2, 4 and 8 devices as on one?
Workload: 8 tables of 500,000 rows of 128 floats, all rows on the devices; threads, 4 for each device, that look up
          2,048 or 16,384 samples with a key of each table, and wait for the rows in host memory.
Limit:    rows of as many keys as all devices together copy to pinned memory of the host, "copies"; the target is 3.5
          times the keys of one device on 4.
Command:  `python -m jaxsok bench --only devices`
Last result: docs/results/serving.md (four H200s, commit 19928b8).

Requests go to replicas by turns. Split tables have each row on one device: each request asks all of them. With one
device both are the same. On a CPU, devices are made by `XLA_FLAGS=--xla_force_host_platform_device_count=4`; they
share its cores, so that nothing is gained.
"""

import concurrent.futures
import pathlib
import tempfile
import time

import jax
import numpy as np

from jaxsok import Records, serving
from jaxsok.interchange.hps import write_hps

from . import records, workloads
from .records import Record, Recorder
from .timing import summary

NUM_TABLES, NUM_ROWS, DIM = 8, 500_000, 128
NUM_SAMPLES = (2048, 16_384)
THREADS = 4
"""Threads for each device."""
SECONDS, QUICK_SECONDS = 2.0, 0.3
DEVICES = (1, 2, 4, 8)
WAYS = {"replicas": False, "split": True}
NUM_REQUESTS = 16
"""Requests in rotation."""
COPIED_KEYS, NUM_COPIES = 131_072, 32
"""Rows that each device copies at a time, and how often, where the limit is measured; a large request has as many."""


def measure(recorder: Recorder, seed: int, scale: float, is_quick: bool = False) -> None:
    """Measures each number of devices that are there, as replicas and split."""
    numbers = [number for number in DEVICES if number <= jax.local_device_count()]
    num_rows = max(64, round(NUM_ROWS * scale))
    sizes = [max(16, round(size * min(1.0, 4 * scale))) for size in NUM_SAMPLES]
    with tempfile.TemporaryDirectory() as folder:
        names = [f"table{number}" for number in range(NUM_TABLES)]
        rows = np.random.default_rng(seed).random((num_rows, DIM), np.float32)
        for number, name in enumerate(names):
            keys = workloads.mix(number, np.arange(num_rows)).view(np.uint64)[:, 0]
            write_hps(pathlib.Path(folder) / name, Records(keys, rows))
        one_device: dict[int, float] = {}  # keys per second, by keys of a request
        copied_by_one: float | None = None  # keys per second
        for number in numbers if jax.default_backend() != "cpu" else ():
            keys_per_s, ms = _copy(number)
            copied_by_one = copied_by_one or keys_per_s
            _add(recorder, "limit", number, "copies", keys_per_s, [ms], COPIED_KEYS, copied_by_one)
        for number in numbers:
            for way, is_split in WAYS.items():
                label = f"session on {number} devices, {way}"
                if (is_split and number == 1) or not recorder.has_time(label):
                    continue
                with recorder.attempt(label):
                    with serving.open(_config(folder, names, number, is_split, max(sizes))) as session:
                        for num_samples in sizes:
                            keys_per_s, ms = _run(session, names, num_rows, num_samples, number, seed, is_quick)
                            num_keys = NUM_TABLES * num_samples
                            if number == 1:
                                one_device[num_keys] = keys_per_s
                            by_one = one_device.get(num_keys)
                            _add(recorder, "jaxsok", number, way, keys_per_s, ms, num_keys, by_one)


def _copy(num_devices: int) -> tuple[float, float]:
    """Returns how many keys a second have rows that all devices together copy, and the milliseconds of their copies."""
    to_host = jax.jit(lambda array: jax.device_put(array, jax.memory.Space.Host))
    rows = np.ones((COPIED_KEYS, DIM), np.float32)
    there = [jax.device_put(rows, device) for device in jax.devices()[:num_devices]]
    for _ in range(2):  # the first compiles, and pins memory
        begin, waiting = time.perf_counter(), list[list[jax.Array]]()
        for _ in range(NUM_COPIES):
            waiting.append([to_host(array) for array in there])
            if len(waiting) > THREADS:
                jax.block_until_ready(waiting.pop(0))
        jax.block_until_ready(waiting)
        took_s = time.perf_counter() - begin
    return num_devices * NUM_COPIES * COPIED_KEYS / took_s, took_s / NUM_COPIES * 1e3


def _config(folder: str, names: list[str], num_devices: int, is_split: bool, num_samples: int) -> dict:
    model = {
        "model": "model",
        "sparse_files": [f"{folder}/{name}" for name in names],
        "embedding_table_names": names,
        "embedding_vecsize_per_table": [DIM] * len(names),
        "maxnum_catfeature_query_per_table_per_sample": [1] * len(names),
        "default_value_for_each_table": [0.0] * len(names),
        "deployed_device_list": list(range(num_devices)),
        "max_batch_size": num_samples,
        "gpucacheper": 1.0,
        "num_of_worker_buffer_in_pool": THREADS,
        "jaxsok": {"is_split": is_split},
    }
    return {"supportlonglong": True, "models": [model]}


def _run(
    session: serving.Session,
    names: list[str],
    num_rows: int,
    num_samples: int,
    num_devices: int,
    seed: int,
    is_quick: bool,
) -> tuple[float, list[float]]:
    """Returns keys per second, and the milliseconds of each lookup."""
    rng, seconds = np.random.default_rng(seed), QUICK_SECONDS if is_quick else SECONDS
    requests = [
        {
            name: workloads.mix(number, rng.integers(0, num_rows, num_samples)).view(np.uint64)[:, 0]
            for number, name in enumerate(names)
        }
        for _ in range(NUM_REQUESTS)
    ]
    num_threads = THREADS * num_devices
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:

        def work(first: int, until: float) -> list[float]:
            ms = []
            while (begin := time.perf_counter()) < until:
                session.lookup(requests[(first + len(ms)) % NUM_REQUESTS])
                ms.append((time.perf_counter() - begin) * 1e3)
            return ms

        for run_s in (0.25 * seconds, seconds):  # The first brings all that is compiled on demand.
            begin = time.perf_counter()
            found = list(pool.map(work, range(num_threads), [begin + run_s] * num_threads))
            took_s = time.perf_counter() - begin
    ms = [one for of_thread in found for one in of_thread]
    return len(ms) * len(names) * num_samples / took_s, ms


def _add(
    recorder: Recorder,
    subject: str,
    num_devices: int,
    way: str,
    keys_per_s: float,
    ms: list[float],
    num_keys: int,
    one_device: float | None,
) -> None:
    recorder.add(
        Record(
            "devices",
            records.DEPLOYED,
            subject,
            summary(ms, 1),
            variant=f"{num_devices} devices, {way}, {num_keys} keys",
            num_keys=num_keys,
            notes={
                "part": "devices",
                "on": num_devices,
                "way": way,
                "keys_per_s": keys_per_s,
                "p99_ms": float(np.percentile(ms, 99)),
                "over_one": keys_per_s / one_device if one_device else None,
            },
        )
    )

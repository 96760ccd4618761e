#!/usr/bin/env python3
"""Trains for thousands of steps on several devices, with growth, eviction and checkpoints, and checks the results.

    python scripts/endurance.py --devices 4                          # 10,000 steps in one process
    python scripts/endurance.py --devices 4 --processes 4            # in one process for each device
    python scripts/endurance.py --devices 4 --hot 0.3                # and with one key that has 30% of all uses
    python scripts/endurance.py --devices 4 --twice                  # the same bits again, and with 4 processes
    python scripts/endurance.py --devices 4 --kill step growth       # a process dies; the job resumes on 2 devices

`JAX_PLATFORMS=cpu` uses CPU devices. There are five tables with separate losses, so that none affects another:

    user     grows from a small capacity; no row is removed
    page     the same, with partial bags
    item     has a bound: the least recently used rows are evicted
    query    admits a key at its second use; rows that were unused for some time are evicted at each checkpoint
    country  is small and replicated; NumPy computes its rows in float64

Keys are skewed: the key of rank r is drawn with a probability of about 1 / r. New keys keep arriving at rank 1, and the
ranks of older keys grow. Each run is a separate process, or one for each device, and ends with an export, which is
compared. `--report FILE` keeps what is printed of each run: times, counts, and memory by device.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.ipc
from jax.sharding import AxisType

import jaxsok
from jaxsok import checkpoint, enlarge, optim, policies, windows
from jaxsok.kernels import library

TABLES = ("user", "page", "item", "query", "country")
NUM_RAWS = 32  # drawn batches; a step takes one of them, with its keys shifted
MOST_KEYS = 4  # in a bag
NUM_COUNTRIES = 64
RATE = 0.5  # learning rate of "country"
KEY_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that keys are spread over 64 bits and stay distinct
FULL_EVERY = 4  # one of so many checkpoints is full, the others are deltas
SPARE_BYTES = 2**22  # allowed growth of arrays other than the state; in the end the pipeline holds none
TIMED_STEPS = 10  # the time of a step is the median of means over so many steps
# Another number of devices adds gradients in another order, so float32 rounding differs over all steps.
OTHER_ORDER = {"rtol": 1e-3, "atol": 1e-4}
# A row of "country" forgets an error as fast as it learns, and each step adds an error of 2^-24 of the row.
ORACLE = {"rtol": 1e-4, "atol": 1e-5}
END_S = 30  # beyond the heartbeat time-out, for a busy machine
MESSAGE = re.compile(r"reset by peer|Connection closed|unhealthy|heartbeat|waited in vain")
CHECKPOINT = re.compile(r"step_\d{8}")


class Raws:
    """The batches of all steps, and the rows that they must leave."""

    def __init__(self, options):
        self.options, num = options, options.samples
        rng = np.random.default_rng(7)
        self.lengths = rng.integers(0, MOST_KEYS + 1, (NUM_RAWS, num))
        self.label = rng.normal(size=(NUM_RAWS, num)).astype(np.float32)
        sizes = {"user": num, "page": MOST_KEYS * num, "item": num, "query": num}
        self.ranks = {name: self.draw_ranks(rng, size, options.window) for name, size in sizes.items()}
        self.country = self.draw_ranks(rng, num, NUM_COUNTRIES)
        num_ids = options.window + options.new * options.steps
        self.seen = {name: np.zeros(num_ids, bool) for name in ("user", "page")}
        self.rows = np.full((NUM_COUNTRIES, 4), 0.5)  # of "country", step by step
        self.is_row = np.zeros(NUM_COUNTRIES, bool)

    def draw_ranks(self, rng, size, most):
        """Returns ranks from 1 to `most`, with a probability of about 1 / rank; 0 is the most frequent key."""
        ranks = np.minimum(np.exp(rng.random((NUM_RAWS, size)) * np.log(most)).astype(np.int64), most - 1)
        ranks[rng.random(ranks.shape) < self.options.hot] = 0
        return ranks

    def ids(self, name, step):
        """Returns the number of each key of a step, in order of appearance; for page, the keys of all bags."""
        ranks = self.ranks[name][step % NUM_RAWS]
        if name == "page":
            ranks = ranks[: self.lengths[step % NUM_RAWS].sum()]
        return np.where(ranks == 0, 0, self.options.window + self.options.new * step - ranks)

    def part(self, step, process, num_processes):
        """Returns the inputs of a process in a step."""
        i, num = step % NUM_RAWS, self.options.samples
        mine = slice(num * process // num_processes, num * (process + 1) // num_processes)
        offsets = np.concatenate([[0], np.cumsum(self.lengths[i])])
        keys = {name: self.ids(name, step).astype(np.uint64) * KEY_FACTOR for name in self.ranks}
        flat = keys.pop("page")[offsets[mine.start] : offsets[mine.stop]]
        return {
            **{name: values[mine] for name, values in keys.items()},
            "page": jaxsok.Bags(flat, lengths=self.lengths[i][mine].astype(np.int32)),
            "country": self.country[i][mine],
            "label": self.label[i][mine],
        }

    def note(self, step):
        """Applies a step to the expected state."""
        for name, seen in self.seen.items():
            seen[self.ids(name, step)] = True
        uses, labels = self.country_sums[step % NUM_RAWS]
        self.rows -= RATE / self.options.samples * (uses * self.rows - labels)
        self.is_row |= uses[:, 0] > 0

    @functools.cached_property
    def country_sums(self):
        """Returns the number of uses and the sum of targets, for each batch and country."""
        scale = np.arange(1, 5) / 4
        pairs = [(keys, label.astype(np.float64)) for keys, label in zip(self.country, self.label, strict=True)]
        sums = [[np.bincount(keys, weights, NUM_COUNTRIES) for weights in (None, label)] for keys, label in pairs]
        return [(uses[:, None], labels[:, None] * scale) for uses, labels in sums]

    def keys_seen(self, name):
        """Returns all keys that occurred."""
        return np.flatnonzero(self.seen[name]).astype(np.uint64) * KEY_FACTOR


# ------------------------------------------------------------------------------------------------------ in a process


def make_collection(options, devices):
    """Declares the five tables over a mesh of devices."""
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    spec = functools.partial(jaxsok.TableSpec, statistics=True)  # deltas need them
    bound = {"capacity": options.window, "max_capacity": options.window, "eviction": policies.LeastRecentlyUsed()}
    small = {"placement": jaxsok.REPLICATED, "initializer": jaxsok.initializers.constant(0.5)}
    tables = [
        spec("user", 32, optim.adagrad(0.05), capacity=options.capacity),
        spec("page", 16, optim.adagrad(0.05), capacity=2 * options.capacity),
        spec("item", 8, optim.adam(0.01), **bound),
        spec("query", 8, optim.sgd(0.1), capacity=options.window, admission=policies.AdmitByCount(2)),
        spec("country", 4, optim.sgd(RATE), capacity=NUM_COUNTRIES, **small),
    ]
    bags = {"combiner": "mean", "max_keys": MOST_KEYS * options.samples, "exchange": "bags"}
    features = [jaxsok.FeatureSpec(name, name, **(bags if name == "page" else {})) for name in TABLES]
    return jaxsok.Collection(tables, features, mesh=mesh, axis="data")


def make_step(collection):
    """Returns a jitted step: each embedding learns the sample's label, times a number for each column."""

    def loss_of(embeddings, label):
        losses = []
        for embedding in embeddings.values():
            dim = embedding.shape[1]
            target = label[:, None] * (jnp.arange(1, dim + 1, dtype=jnp.float32) / dim)[None, :]
            losses.append(jnp.mean(jnp.sum((embedding - target) ** 2, axis=1)) / 2)
        return sum(losses)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, plan, label):
        embeddings, state, plan = collection.lookup(state, plan)
        loss, gradients = jax.value_and_grad(loss_of)(embeddings, label)
        state, stats = collection.update(state, plan, gradients)
        return state, loss, stats

    return step


def bytes_in_use(collection, state):
    """Returns bytes of each device of this process: in use, peak, of its window, and of arrays other than the state."""
    window, of_window = windows.windows_of(collection.shards, "auto"), 0
    if window is not None:
        of_window = library.load_for(window.platform).JaxsokWindowBytes(window.number)
    found = []
    for device in collection.shards.mesh.devices.flat:
        if device.process_index == jax.process_index():
            reported = device.memory_stats() or {}  # the CPU has none: arrays between two steps replace them
            live, of_state = (buffers_of(arrays, device) for arrays in (jax.live_arrays(), jax.tree.leaves(state)))
            in_use = reported.get("bytes_in_use", sum(live.values()))
            most = reported.get("peak_bytes_in_use", in_use)
            rest = sum(live.values()) - sum(of_state.values())
            found.append([in_use, most, of_window, rest])
    return found


def buffers_of(arrays, device):
    """Returns bytes by address of the buffers of arrays on a device; an array and its parts share buffers."""
    parts = (shard.data for array in arrays for shard in array.addressable_shards if shard.device == device)
    return {part.unsafe_buffer_pointer(): part.nbytes for part in parts}


def work(options):
    """Runs one process, and writes its results to a file."""
    process, num_processes = options.process, options.processes
    jax.config.update("jax_num_cpu_devices", options.devices // num_processes)
    if num_processes > 1:
        jax.distributed.initialize(
            f"localhost:{options.port}",
            num_processes,
            process,
            local_device_ids=None if os.environ.get("JAX_PLATFORMS") == "cpu" else [process],
            heartbeat_timeout_seconds=options.heartbeat_s,
            shutdown_timeout_seconds=options.heartbeat_s,
        )
    folder = pathlib.Path(options.folder)
    collection, raws = make_collection(options, jax.devices()[: options.devices]), Raws(options)
    step, saved = make_step(collection), last_checkpoint(folder)
    state = collection.init(seed=0) if saved is None else checkpoint.load(saved, collection)
    first, is_victim = int(state.step), process == num_processes - 1
    for number in range(first):
        raws.note(number)
    # From the first checkpoint on, the next growth: with few steps there may be only one.
    kill_step = {"step": options.steps * 11 // 20, "growth": options.every}.get(options.kill)
    counted, num_expired = {"full": 0, "delta": 0}, 0
    memory, waiting, times, began = {}, [], [], time.perf_counter()

    def check(number):
        """Checks losses, counts and rows against the expected values; the devices are idle then."""
        for loss, stats in jax.device_get(waiting):
            stats.check()
            require(np.isfinite(loss), f"the loss is {loss} before step {number}")
        waiting.clear()
        num_rows = collection.num_rows(state)
        for name, seen in raws.seen.items():
            is_whole, num = num_rows[name] == seen.sum(), num_rows[name]
            require(is_whole, f'"{name}" has {num} rows of {seen.sum()} keys at step {number}')
        rows, is_there = collection.rows_of(state, "country", np.arange(NUM_COUNTRIES))
        require((np.asarray(is_there) == raws.is_row).all(), f'"country" has other rows than NumPy at {number}')
        got, want = np.asarray(rows)[raws.is_row], raws.rows[raws.is_row]
        np.testing.assert_allclose(got, want, err_msg=f"country at step {number}", **ORACLE)
        return num_rows

    parts = (raws.part(number, process, num_processes) for number in range(first, options.steps))
    pipeline = collection.pipeline(parts)
    for number, (batch, plan) in enumerate(pipeline, first):
        dies = is_victim and kill_step is not None and number >= kill_step
        with die_in_growth() if dies and options.kill == "growth" else contextlib.nullcontext():
            state = collection.grow(state, batch)
        state, loss, stats = step(state, plan, batch["label"])
        if dies and options.kill == "step":  # the devices are computing it
            os.kill(os.getpid(), signal.SIGKILL)
        raws.note(number)
        waiting.append((loss, stats))
        times.append(time.perf_counter())
        done = number + 1
        if done == max(first + 1, options.steps // 10):
            jax.block_until_ready(state)
            memory["early"] = bytes_in_use(collection, state)
        if done % options.every == 0 or done == options.steps:
            state, gone = collection.evict(state, "query", policies.TimeToLive(options.every))
            num_expired += gone.to_dict()["query"]
            num_rows = check(done)
            path = folder / f"step_{done:08}"
            if (done // options.every - 1) % FULL_EVERY and saved is not None:
                checkpoint.export_delta(path, collection, state, saved)
                counted["delta"] += 1
            else:
                checkpoint.export_full(path, collection, state)
                counted["full"] += 1
            saved = path
            print(f"step {done}: {num_rows}", flush=True)
    seconds = time.perf_counter() - began
    for name in raws.seen:
        is_there = np.asarray(collection.contains(state, name, raws.keys_seen(name)))
        require(is_there.all(), f'"{name}" lost {np.count_nonzero(~is_there)} of {is_there.size} keys')
    memory["end"] = bytes_in_use(collection, state)
    for early, late in zip(memory["early"], memory["end"], strict=True):
        require(late[3] <= early[3] + SPARE_BYTES, f"{late[3]} bytes of arrays next to the state, early on {early[3]}")
    checkpoint.export_full(folder / "final", collection, state)
    stats, growth = stats.to_dict(), collection.growth
    found = {
        "first": first,
        "steps_per_s": (options.steps - first) / seconds,
        "step_ms": step_ms(times),
        "rows": num_rows,
        "growths": growth.num_grown,
        "waits": growth.num_waits,
        "evictions": {"times": growth.num_evictions, "item": stats["item"]["num_evicted"], "query": num_expired},
        "checkpoints": counted,
        "send_capacities": pipeline.send_capacities,
        "memory": memory,
        "kind": jax.devices()[0].device_kind,
        "place": repr(collection).rsplit("; ", 1)[1].rstrip(")"),
    }
    (folder / f"{process}.json").write_text(json.dumps(found))
    if num_processes > 1:
        jax.distributed.shutdown()


def die_in_growth():
    """Kills the process as soon as a larger store is put together."""
    return unittest.mock.patch.object(enlarge, "with_slab", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def step_ms(times):
    """Returns the milliseconds of a step, between checkpoints and growths, which are few."""
    means = (np.diff(times[::TIMED_STEPS]) / TIMED_STEPS * 1e3).tolist()
    return statistics.median(means) if means else float("nan")


def require(holds, message):
    """Raises unless a condition holds; `assert` may be switched off."""
    if not holds:
        raise SystemExit(f"endurance: {message}")


# ---------------------------------------------------------------------------------------------- around the processes


def last_checkpoint(folder):
    """Returns the last finished folder; None if there is none."""
    found = sorted(path for path in folder.glob("step_*") if CHECKPOINT.fullmatch(path.name))
    return found[-1] if found else None


def start(options, folder, devices, processes, **changes):
    """Starts the processes of a run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    chosen = {**vars(options), "folder": str(folder), "devices": devices, "processes": processes, "port": port}
    chosen |= {"kill": None, **changes}
    started = []
    for number in range(processes):
        with (folder / f"{number}.err").open("ab") as errors:
            command = [sys.executable, os.path.abspath(__file__), "--work", json.dumps({**chosen, "process": number})]
            started.append(subprocess.Popen(command, stdout=errors, stderr=errors))
    return started


def end(started):
    """Ends the remaining processes."""
    for process in started:
        process.kill()
        process.wait()


def output_of(folder, number, most=3000):
    """Returns the end of a process's output."""
    return (folder / f"{number}.err").read_text(errors="replace")[-most:].strip()


def run(options, name, devices, processes=1, folder=None, **changes):
    """Runs to the end; prints and returns the results."""
    folder = folder or pathlib.Path(options.folder) / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    started = start(options, folder, devices, processes, **changes)
    try:
        for number, process in enumerate(started):
            try:
                code = process.wait(timeout=options.timeout_s)
            except subprocess.TimeoutExpired:
                code = f"none within {options.timeout_s} s"
            require(code == 0, f"{name}: process {number}: exit code {code}\n{output_of(folder, number)}")
    finally:
        end(started)
    found = [json.loads((folder / f"{number}.json").read_text()) for number in range(processes)]
    result = found[0] | {"tables": tables_of(folder / "final")}
    result["memory"] = {when: [device for run in found for device in run["memory"][when]] for when in ("early", "end")}
    result["step_ms"] = max(run["step_ms"] for run in found)
    result["digest"] = digest_of(result["tables"])
    if options.report:
        kept = {key: value for key, value in result.items() if key != "tables"}
        line = {"run": name, "devices": devices, "processes": processes, **kept}
        with open(options.report, "a") as report:
            report.write(json.dumps(line) + "\n")
    place = f"{result['kind']}, {result['place']}"
    print(f"{name}: {devices} devices, {processes} processes, {place}, from step {result['first']}")
    for key in ("rows", "growths", "waits", "evictions", "checkpoints", "send_capacities"):
        print(f"  {key}: {result[key]}")
    print(f"  {result['steps_per_s']:.1f} steps/s in all, {result['step_ms']:.2f} ms a step between checkpoints")
    for when, numbers in result["memory"].items():
        units = [" / ".join(f"{number / 2**20:.1f}" for number in sizes) for sizes in numbers]
        print(f"  MiB in use / peak / window / other arrays than the state, by device, {when}: {', '.join(units)}")
    print(f"  digest: {result['digest']}", flush=True)
    return result


def run_killed(options, kind):
    """Kills a process, waits for the end of the others, and resumes."""
    folder = pathlib.Path(options.folder) / f"killed_in_{kind}"
    folder.mkdir(parents=True)
    started = start(options, folder, options.devices, options.devices, kill=kind)
    *others, victim = started
    try:
        code = victim.wait(timeout=options.timeout_s)
        require(code == -signal.SIGKILL, f"{kind}: nothing was killed\n{output_of(folder, len(others))}")
        began = time.monotonic()
        for number, process in enumerate(others):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, began + options.heartbeat_s + END_S - time.monotonic()))
            require(process.returncode, f"{kind}: process {number}: exit code {process.returncode}, wanted an error")
        seconds = time.monotonic() - began
    finally:
        end(started)
    for number, process in enumerate(others):
        printed = output_of(folder, number, 10**6)
        lines = [line for line in printed.splitlines() if MESSAGE.search(line)]
        require(lines, f"{kind}: process {number} does not say that another died: {printed[-3000:]!r}")
        print(f"killed in {kind}: process {number} ended with {process.returncode}: {lines[0][:300]}")
    print(f"killed in {kind}: all ended after {seconds:.1f} s, heartbeat time-out {options.heartbeat_s} s")
    require(last_checkpoint(folder) is not None, f"{kind}: there is no checkpoint")
    return run(options, f"resumed after {kind}", options.resume_devices or options.devices // 2, folder=folder)


def tables_of(path):
    """Returns all rows of an export by table, sorted by key: columns by name."""
    tables = {}
    for number, name in enumerate(TABLES):
        columns = {}
        for file in sorted(path.glob(f"table_{number:04}.process_?????.arrow")):
            table = pyarrow.ipc.open_file(file).read_all()
            for column in table.column_names:
                values = table[column].combine_chunks()
                if pyarrow.types.is_fixed_size_list(values.type):
                    values = values.flatten().to_numpy().reshape(len(table), -1)
                columns.setdefault(column, []).append(np.asarray(values))
        columns = {column: np.concatenate(values) for column, values in columns.items()}
        order = np.argsort(columns["key"])
        require(len(np.unique(columns["key"])) == len(order), f'"{name}" has two rows of one key')
        tables[name] = {column: values[order] for column, values in sorted(columns.items())}
    return tables


def digest_of(tables):
    """Returns the SHA-256 of all columns: keys, rows, optimizer state, last steps and frequencies."""
    digest = hashlib.sha256()
    for name, columns in tables.items():
        for column, values in columns.items():
            digest.update(f"{name} {column} {values.dtype} {values.shape}".encode() + values.tobytes())
    return digest.hexdigest()


def compare(name, got, want):
    """Compares tables by key with those of a run on another number of devices."""
    for table in ("user", "page", "query", "country"):  # each shard of "item" evicts its own rows
        require(np.array_equal(got[table]["key"], want[table]["key"]), f'{name}: "{table}" has other keys')
        for column, values in got[table].items():
            np.testing.assert_allclose(values, want[table][column], err_msg=f"{name}: {table}.{column}", **OTHER_ORDER)
    print(f"{name}: the rows of the run that was not disturbed, by key, to {OTHER_ORDER}")


def main():
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--devices", type=int, default=4)
    add("--steps", type=int, default=10_000)
    add("--every", type=int, help="steps between checkpoints; default: a tenth of all")
    add("--samples", type=int, default=1024, help="of a batch, on all devices together")
    add("--window", type=int, default=65_536, help="ranks of keys, and rows of the bounded table")
    add("--new", type=int, default=20, help="new keys of a step")
    add("--capacity", type=int, default=32_768, help="rows with which the growing table begins")
    add("--hot", type=float, default=0.0, help="share of the uses that one key has, in a second run")
    add("--most-ratio", type=float, help="fail if time or memory with the hot key is more than so many times as large")
    add("--processes", type=int, default=1, help="of a run; one, or one for each device")
    add("--twice", action="store_true", help="run again, and with the other number of processes: the same digest")
    add("--kill", nargs="+", default=[], choices=("step", "growth"), help="kill a process there, and resume")
    add("--resume-devices", type=int, help="default: half of them; with all of them the digest must be the same")
    add("--heartbeat-s", type=int, default=10)
    add("--timeout-s", type=int, default=3600, help="of a run")
    add("--report", help="a file to which each run adds a line of JSON")
    add("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(argparse.Namespace(**json.loads(options.work)))
    if options.processes not in (1, options.devices):
        parser.error(f"--processes: got {options.processes}, wanted 1 or the {options.devices} devices")
    options.every = options.every or max(1, options.steps // 10)
    hot, options.hot, kinds = options.hot, 0.0, options.kill
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("endurance: terminated"))  # ends the processes
    options.folder = tempfile.mkdtemp(prefix="endurance_")
    try:
        plain = run(options, "plain", options.devices, options.processes)
        if options.twice:
            other = ("one process", 1) if options.processes > 1 else ("a process for each device", options.devices)
            for name, processes in (("again", options.processes), other):
                digest = run(options, name, options.devices, processes)["digest"]
                require(digest == plain["digest"], f"{name}: another digest")
            print(f"twice: the same digest, and with {other[0]}")
        for kind in kinds:
            resumed = run_killed(options, kind)
            if options.resume_devices == options.devices:
                require(resumed["digest"] == plain["digest"], f"resumed after {kind}: another digest")
            compare(f"resumed after {kind}", resumed["tables"], plain["tables"])
        if hot:
            skewed = run(options, f"hot key {hot}", options.devices, options.processes, hot=hot)
            peaks = [[device[1] + device[2] for device in result["memory"]["end"]] for result in (skewed, plain)]
            ratios = {"time": skewed["step_ms"] / plain["step_ms"]}
            ratios["memory"] = max(peak / other for peak, other in zip(*peaks, strict=True))
            print(f"hot key: time of a step and peak memory of a device as ratios: {ratios}")
            most = options.most_ratio or float("inf")
            require(max(ratios.values()) <= most, f"a ratio above {most}: {ratios}")
        print("endurance: ok")
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

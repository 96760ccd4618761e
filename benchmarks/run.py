"""Runs the workloads: jaxsok, its limits and its peers, in one run on one device.

    python -m benchmarks.run --workloads W1,W5 --keys uniform --out results.json

On a mesh (M1, M1-64, and any of W1 to W6):

    python -m benchmarks.run --only exchange --workloads M1,W1,W5 [--devices 2]

Order: FBGEMM first, in a process of its own that gives its memory back; then, workload by workload, the filled tables,
the static tables, and the limits, one after the other, since two of them may not fit. Each measurement that fails is
recorded and passed over. The file is written after each workload.
"""

import argparse
import dataclasses
import gc
import importlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import jax.numpy as jnp

from benchmarks import limits, peers, records, timing, workloads
from benchmarks.records import Record, Recorder
from benchmarks.timing import Protocol
from benchmarks.workloads import KeySet, Run, Workload

PARTS = ("lookup", "update", "plan", "combine", "table", "limits", "xla", "fbgemm")
"""Of a run that names none: what one device can do."""

EXCHANGE = "exchange"
"""The part that is about meshes; a run measures it alone."""

EXCHANGE_PARTS = ("single", "planned", "bfloat16", "split", "dlrm", "pmap", "xla")
"""What `bench_exchange.py` has a measurement for; all of them by default."""

EXCHANGE_WORKLOADS = ("M1", "W1", "W5")

QUICK_SCALE = 0.002

CPU_SCALE = 0.01
"""Of a run on a CPU that names none: full size takes tens of gigabytes."""

MEMORY_FRACTION = "0.92"
"""Of the device's memory for JAX: W1 under Adam takes 80 GB of tables; CuPy's context needs a little beside it."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad names are refused before anything runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", help=f"comma-separated, of {', '.join(workloads.NAMES)}; default: all")
    parser.add_argument("--keys", help="comma-separated: uniform, zipf1.05, …; default: those of each workload")
    parser.add_argument("--optimizers", help="comma-separated; default: those of each workload")
    parser.add_argument("--only", help=f"comma-separated parts, of {', '.join(PARTS)} (default: all), or {EXCHANGE}")
    parser.add_argument("--devices", help="with exchange: comma-separated numbers of devices; default: 1, 2, 4, 8")
    parser.add_argument("--scaling", choices=workloads.SCALINGS, help="default: weak for M1, strong for others")
    parser.add_argument("--exchange", help=f"with exchange: comma-separated, of {', '.join(EXCHANGE_PARTS)}")
    parser.add_argument("--scale", type=float, help=f"share of the rows and bags; default 1, on a CPU {CPU_SCALE}")
    parser.add_argument("--quick", action="store_true", help=f"few repetitions, scale {QUICK_SCALE}, first run of each")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the results")
    parser.add_argument("--commit", help="commit of the code, where there is no repository to ask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, help="default 20")
    parser.add_argument("--batch-ms", type=float, help="dispatches of a repetition take at least this; default 50")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each step as well")
    parser.add_argument("--fbgemm-timeout", type=float, default=240.0, help="seconds for the FBGEMM process")
    options = parser.parse_args(arguments)
    try:
        options.parts = _listed("--only", options.only, PARTS, (EXCHANGE,))
        if EXCHANGE in options.parts and len(options.parts) > 1:
            raise ValueError(f"--only: {EXCHANGE} fills the memory of all devices; run it without other parts.")
        if EXCHANGE in options.parts:
            options.workloads = options.workloads or ",".join(EXCHANGE_WORKLOADS)
        options.workloads = workloads.select(options.workloads)
        meshless = [workloads.H1.name] if EXCHANGE in options.parts else workloads.MESH_WORKLOADS
        foreign = [name for name in options.workloads if name in meshless]
        if foreign:
            raise ValueError(f"--workloads: {foreign} go with --only {EXCHANGE}, the others, H1 too, without it.")
        options.exchange = _listed("--exchange", options.exchange, EXCHANGE_PARTS)
        options.devices = tuple(int(one) for one in options.devices.split(",")) if options.devices else None
        for workload in workloads.WORKLOADS.values():
            workloads.chosen_runs(workload, options.keys, options.optimizers)
    except ValueError as error:
        parser.error(str(error))
    options.is_gpu = has_gpu()
    if options.scale is None:
        options.scale = QUICK_SCALE if options.quick else 1.0 if options.is_gpu else CPU_SCALE
    return options


def _listed(option: str, text: str | None, usual: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """The parts that a comma-separated list names, all of the usual ones for None; refuses those it does not know."""
    if text is None:
        return tuple(usual)
    parts = tuple(part.strip() for part in text.split(","))
    unknown = [part for part in parts if part not in (*usual, *more)]
    if unknown:
        raise ValueError(f"{option}: unknown parts {unknown}; there are {', '.join((*usual, *more))}.")
    return parts


def has_gpu() -> bool:
    """Whether JAX will find a GPU, said without asking JAX: it would take the memory that FBGEMM needs first."""
    if os.environ.get("JAX_PLATFORMS", "").lower().startswith("cpu"):
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return listed.startswith("GPU")


def protocol_of(options: argparse.Namespace) -> Protocol:
    """The protocol that a command line asks for."""
    changes = {"profile": options.profile}
    if options.repetitions is not None:
        changes["repetitions"] = options.repetitions
    if options.batch_ms is not None:
        changes["batch_s"] = options.batch_ms * 1e-3
    return dataclasses.replace(timing.QUICK if options.quick else Protocol(), **changes)


def main(arguments: Sequence[str] | None = None) -> Recorder:
    """Runs what the command line asks for, prints the table, writes the file."""
    options = parse(arguments)
    protocol = protocol_of(options)
    begin = time.perf_counter()
    fbgemm = measure_fbgemm(options, protocol)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    about_mesh = ("devices", "scaling", "exchange") if EXCHANGE in options.parts else ()
    shown = {
        name: value
        for name, value in vars(options).items()
        if name in ("workloads", "keys", "optimizers", "parts", "scale", "quick", "seed", *about_mesh)
        and value is not None
    }
    recorder = Recorder(options.out, records.describe(shown, options.commit), begin)
    about = recorder.about
    if options.is_gpu and about["platform"] == "cpu":
        raise RuntimeError("a GPU is visible, but JAX runs on the CPU; install jax[cuda13] or set JAX_PLATFORMS=cpu.")
    recorder.say(f"{about['device']} ({about['platform']}), jax {about['versions'].get('jax')}, {about['commit']}")
    about["fbgemm"] = fbgemm["why"] or "measured"
    for record in fbgemm["records"]:
        recorder.add(record)
    recorder.failures += fbgemm["failures"]

    if EXCHANGE in options.parts:
        measure_exchange(options, protocol, recorder)
        finish(recorder)
        return recorder

    copy_gb_s, copy = limits.copy_gigabytes_per_s(protocol)
    about["copy_gb_per_s"] = copy_gb_s
    about["limits_by"] = "cuda and xla" if limits.has_cuda_kernels() else "xla alone"
    recorder.say(f"device copy: {copy_gb_s:.0f} GB/s ±{50 * copy.spread:.0f}%; limits by {about['limits_by']}")

    for name in options.workloads:
        if name in workloads.WORKLOADS:
            workload = workloads.WORKLOADS[name].scaled(options.scale)
            runs = workloads.chosen_runs(workload, options.keys, options.optimizers)
            if options.quick:
                runs = [Run(runs[0].optimizer, runs[0].distributions[:1])] if runs else []
            measure_workload(workload, runs, options, protocol, recorder, copy_gb_s)
        elif "table" in options.parts:
            bench_table = importlib.import_module("benchmarks.bench_table")
            workload = workloads.H1.scaled(options.scale)
            if options.quick:
                workload = workload.with_dims(workload.dims[:1])
            bench_table.measure(workload, recorder, protocol, options.seed, copy_gb_s)
        _collect()
        recorder.write()
    finish(recorder)
    return recorder


def measure_exchange(options: argparse.Namespace, protocol: Protocol, recorder: Recorder) -> None:
    """Measures the sharded step of each workload on each number of devices."""
    bench_exchange = importlib.import_module("benchmarks.bench_exchange")
    numbers = bench_exchange.devices_at_hand(options.devices)
    recorder.about["num_devices"] = numbers
    for name in options.workloads:
        workload = workloads.on_mesh(name).scaled(options.scale)
        (run, *_) = workloads.chosen_runs(workload, options.keys or "uniform", options.optimizers)
        scaling = options.scaling or bench_exchange.default_scaling(name)
        for num_devices in numbers:
            bench_exchange.measure(
                workload, run, num_devices, scaling, options.exchange, recorder, protocol, options.seed
            )
            recorder.write()


def measure_workload(
    workload: Workload,
    runs: Sequence[Run],
    options: argparse.Namespace,
    protocol: Protocol,
    recorder: Recorder,
    copy_gb_s: float,
) -> None:
    """Measures one of W1 to W6: for each optimizer the dynamic tables, then the static ones and the limits."""
    sets: dict[str, list[KeySet]] = {}
    for run in runs:
        for distribution in run.distributions:
            if distribution not in sets:
                sets[distribution] = workloads.key_sets(workload, distribution, protocol.num_key_sets, options.seed)
    seen: set[str] = set()
    for run in runs:
        first_time = [distribution for distribution in run.distributions if distribution not in seen]
        seen.update(first_time)
        label = f"{workload.name} {run.optimizer}"
        if {"lookup", "update"} & set(options.parts):
            with recorder.attempt(f"{label} jaxsok"):
                measure_jaxsok(workload, run, first_time, sets, options.parts, protocol, recorder)
            _collect()
        if {"limits", "xla"} & set(options.parts):
            with recorder.attempt(f"{label} static tables"):
                measure_static(workload, run, first_time, sets, options.parts, protocol, recorder)
            _collect()
    for part in ("plan", "combine"):
        bench = importlib.import_module(f"benchmarks.bench_{part}")
        if part not in options.parts or workload.name not in bench.WORKLOADS:
            continue
        for distribution in sets:
            with recorder.attempt(f"{workload.name} {distribution} {part}"):
                bench.measure(workload, distribution, sets[distribution], recorder, protocol, copy_gb_s)
            _collect()


def measure_jaxsok(workload, run, first_time, sets, parts, protocol, recorder) -> None:
    """Fills the tables of a workload, then measures lookups (where they were not measured yet) and updates."""
    bench_lookup = importlib.import_module("benchmarks.bench_lookup")
    bench_update = importlib.import_module("benchmarks.bench_update")
    fill = importlib.import_module("benchmarks.fill")
    begin = time.perf_counter()
    filled = fill.filled(workload, run.optimizer)
    rows = workload.num_tables * workload.num_rows
    seconds = time.perf_counter() - begin
    recorder.say(f"{workload.name} {run.optimizer}: {rows} rows filled in {seconds:.1f} s, load {filled.load:.2f}")
    if "lookup" in parts:
        lookup = bench_lookup.Lookup(filled)
        for distribution in first_time:
            lookup.measure(distribution, sets[distribution], recorder, protocol)
    if "update" in parts:
        update = bench_update.Update(filled)
        for distribution in run.distributions:
            update.measure(distribution, sets[distribution], recorder, protocol)


def measure_static(workload, run, first_time, sets, parts, protocol, recorder) -> None:
    """Makes static tables, then measures the limits on their rows and XLA's forward and step."""
    static = peers.StaticTables(workload, run.optimizer)
    num_bags = workload.num_tables * workload.num_bags
    for distribution in run.distributions:
        key_sets = sets[distribution]
        num_unique = min(key_set.num_unique for key_set in key_sets)
        shape = (workload.num_keys, num_unique, num_bags, workload.dim)
        common = {
            "workload": workload.name,
            "distribution": distribution,
            "num_keys": workload.num_keys,
            "num_unique": num_unique,
        }
        if "limits" in parts:
            if distribution in first_time:
                row_sets = [static.rows(key_set) for key_set in key_sets]
                found, by = limits.gather(static.table, row_sets, protocol)
                moved = limits.gather_bytes(*shape)
                recorder.add(
                    Record(what=records.GATHER, subject="limit", timing=found, moved_bytes=moved, by=by, **common)
                )
            # All sets cut to the shortest, so that one program serves them; they differ by a fraction of a per cent.
            unique = [jnp.asarray(key_set.shuffled_unique_rows()[:num_unique]) for key_set in key_sets]
            found, by, static.table = limits.read_modify_write(static.table, unique, protocol)
            wide = sum(width > 1 for width in workloads.state_dims(run.optimizer, workload.dim))
            found = timing.scaled(found, (3 + 2 * wide) / 3)
            moved = num_unique * (limits.ROW_ID_BYTES + (3 + 2 * wide) * workload.dim * limits.FLOAT_BYTES)
            recorder.add(
                Record(
                    what=records.READ_MODIFY_WRITE,
                    subject="limit",
                    timing=found,
                    optimizer=run.optimizer,
                    moved_bytes=moved,
                    by=by,
                    notes={"states": wide},
                    **common,
                )
            )
        if "xla" in parts:
            moved = limits.gather_bytes(*shape)
            if distribution in first_time:
                found = static.measure_forward(key_sets, protocol)
                recorder.add(Record(what=records.FORWARD, subject="xla", timing=found, moved_bytes=moved, **common))
            with recorder.attempt(f"{workload.name} {distribution} {run.optimizer} xla step"):
                found = static.measure_step(key_sets, protocol)
                moved += limits.update_bytes(*shape, workloads.state_dims(run.optimizer, workload.dim))
                recorder.add(
                    Record(
                        what=records.STEP,
                        subject="xla",
                        timing=found,
                        optimizer=run.optimizer,
                        moved_bytes=moved,
                        **common,
                    )
                )


def measure_fbgemm(options: argparse.Namespace, protocol: Protocol) -> dict:
    """Runs FBGEMM's process where it can run; its records, its failures, or why there are none."""
    found = {"records": [], "failures": [], "why": None}
    chosen = [name for name in options.workloads if name in workloads.WORKLOADS]
    if "fbgemm" not in options.parts or not chosen:
        found["why"] = "not asked for"
        return found
    found["why"] = peers.why_no_fbgemm() if options.is_gpu else "no GPU to run it on"
    if found["why"]:
        return found
    arguments = ["--workloads", ",".join(chosen), "--scale", str(options.scale), "--seed", str(options.seed)]
    arguments += ["--repetitions", str(protocol.repetitions), "--warmups", str(protocol.warmups)]
    arguments += ["--batch-s", str(protocol.batch_s), "--num-key-sets", str(protocol.num_key_sets)]
    arguments += ["--keys", options.keys] if options.keys else []
    arguments += ["--optimizers", options.optimizers] if options.optimizers else []
    written = peers.run_fbgemm(arguments, options.fbgemm_timeout)
    found["failures"] = written["failures"]
    for entry in written["records"]:
        samples, count = entry.pop("samples_ms"), entry.pop("dispatches")
        workload = workloads.WORKLOADS[entry["workload"]].scaled(options.scale)
        entry["num_keys"] = workload.num_keys
        found["records"].append(Record(timing=timing.summary(samples, count), **entry))
    return found


def finish(recorder: Recorder) -> None:
    """Prints the tables and the failures."""
    about = recorder.about
    is_full_size = about["platform"] == "gpu" and about["options"]["scale"] == 1.0
    on_meshes = records.exchange_rows(recorder.records, is_full_size)
    if on_meshes:
        print("\n" + records.format_table(records.EXCHANGE_COLUMNS, on_meshes))
    else:
        print("\n" + records.format_table(records.COLUMNS, records.rows(recorder.records)))
        note = records.host_bound_note(recorder.records)
        print(f"{note}\n" if note else "")
        print(records.format_table(records.KEY_COLUMNS, records.key_rows(recorder.records)) + "\n")
        print(records.format_table(records.PEER_COLUMNS, records.peer_rows(recorder.records)))
    for failure in recorder.failures:
        print(f"FAILED {failure['what']}: {failure['why']}")
    recorder.write()
    if recorder.path is not None:
        print(f"written: {recorder.path}")


def _collect() -> None:
    """Lets go of device memory: tables of one workload must be gone before those of the next are made."""
    gc.collect()


if __name__ == "__main__":
    sys.exit(1 if main().failures else 0)

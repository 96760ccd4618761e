"""The parts of a run on one device: filled tables, static tables, limits, then benchmarks with tables of their own.

Fed by `run.py`; feeds a Recorder. Not here: the measured programs (`bench_*.py`), peers (`peers.py`), limits
(`limits.py`), meshes (`bench_exchange.py`).
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from . import (
    bench_cache,
    bench_combine,
    bench_cpu,
    bench_devices,
    bench_dims,
    bench_evict,
    bench_fresh,
    bench_host_rows,
    bench_http,
    bench_input,
    bench_insert,
    bench_life,
    bench_lookup,
    bench_plan,
    bench_scale,
    bench_serving,
    bench_skew,
    bench_small,
    bench_table,
    bench_tickets,
    bench_tiers,
    bench_update,
    fill,
    limits,
    peers,
    records,
    timing,
    workloads,
)
from .records import Batches, Record, Recorder
from .timing import Protocol
from .workloads import Run, Workload

ON_FILLED = {
    "lookup": None,
    "update": None,
    "tickets": bench_tickets.WORKLOADS,
    "small": bench_small.WORKLOADS,
    "skew": bench_skew.WORKLOADS,
}
"""The parts that need filled tables, and the workloads whose tables they are measured on; None: all."""

WITHOUT_TABLES = {"plan": bench_plan, "combine": bench_combine}

SERVING = ("fused", "fresh", "cache", "http", "devices")
"""The parts that are about serving, all of which the name "serving" stands for."""

OWN_TABLES = ("insert", "scale", "dims", "evict", "life", *SERVING, "input", "tiers", "host_rows", "cpu")
"""The parts with tables of their own, in the order in which they are measured."""

DYNAMICEMB_S = 150.0
"""Seconds for the process of dynamicemb."""


def one_device(options: argparse.Namespace, protocol: Protocol, recorder: Recorder) -> None:
    """Measures every part of one device; the file is written after each workload."""
    about, scale = recorder.about, options.scale
    copy_gb_s, copy = limits.copy_gigabytes_per_s(protocol)
    about["copy_gb_per_s"] = copy_gb_s
    about["limits_by"] = "cuda and xla" if limits.has_cuda_kernels() else "xla alone"
    recorder.say(f"device copy: {copy_gb_s:.0f} GB/s, {copy}; limits by {about['limits_by']}")
    if "scale" in options.parts:
        bench_scale.growth(recorder, scale)
        collect()
    h1 = workloads.H1.scale(scale)
    for name in options.workloads:
        if name in workloads.WORKLOADS:
            workload = workloads.WORKLOADS[name].scale(scale)
            runs = workloads.chosen_runs(workload, options.keys, options.optimizers)
            if options.quick:
                runs = [Run(runs[0].optimizer, runs[0].distributions[:1])] if runs else []
            measure_workload(workload, runs, options, protocol, recorder, copy_gb_s)
        elif "table" in options.parts:
            h1_dims = h1.with_dims(h1.dims[:1]) if options.quick else h1
            bench_table.measure(h1_dims, recorder, protocol, options.seed, copy_gb_s)
        collect()
        recorder.write()
    brief, seed, is_quick = protocol.brief(), options.seed, options.quick
    own_tables = {
        "insert": lambda: bench_insert.measure(h1, recorder, protocol, copy_gb_s),
        "scale": lambda: bench_scale.measure(recorder, brief, seed, copy_gb_s, scale, is_quick),
        "dims": lambda: bench_dims.measure(recorder, brief, seed, copy_gb_s, scale, is_quick),
        "evict": lambda: bench_evict.measure(recorder, copy_gb_s, scale, is_quick),
        "life": lambda: bench_life.measure(recorder, brief, seed, scale, is_quick),
        "fused": lambda: bench_serving.measure(recorder, brief, seed, copy_gb_s, scale, is_quick),
        "fresh": lambda: bench_fresh.measure(recorder, seed, scale, is_quick),
        "cache": lambda: bench_cache.measure(recorder, brief, seed, copy_gb_s, scale, is_quick),
        "http": lambda: bench_http.measure(recorder, seed, scale, is_quick, options.minutes),
        "devices": lambda: bench_devices.measure(recorder, seed, scale, is_quick),
        "input": lambda: bench_input.measure(recorder, brief, seed, scale, is_quick),
        "tiers": lambda: bench_tiers.measure(recorder, brief, seed, scale, is_quick, options.devices or (1,)),
        "host_rows": lambda: bench_host_rows.measure(recorder, seed, scale, is_quick),
        "cpu": lambda: bench_cpu.measure(recorder, protocol, seed, scale, is_quick),
    }
    for part in OWN_TABLES:
        if part in options.parts and recorder.has_time(part):
            with recorder.attempt(part):
                own_tables[part]()
            collect()
            recorder.write()
    has_small = "small" in options.parts and set(bench_small.WORKLOADS) & set(options.workloads)
    if has_small and options.is_gpu:
        with recorder.attempt("small, kernels without work"):
            bench_small.floors(recorder, brief, seed)
        recorder.write()


def measure_workload(
    workload: Workload,
    runs: Sequence[Run],
    options: argparse.Namespace,
    protocol: Protocol,
    recorder: Recorder,
    copy_gb_s: float,
) -> None:
    """Measures one of W1 to W6: for each optimizer the dynamic tables, then static tables and limits."""
    on_filled = {part for part, names in ON_FILLED.items() if names is None or workload.name in names}
    on_filled &= set(options.parts)
    on_static = {"limits", "xla"} & set(options.parts)
    apart = [part for part, bench in WITHOUT_TABLES.items() if workload.name in bench.WORKLOADS]
    apart = [part for part in apart if part in options.parts]
    if not (on_filled or on_static or apart):
        return
    batches: dict[str, Batches] = {}
    for run in runs:
        for distribution in run.distributions:
            if distribution not in batches:
                key_sets = workloads.key_sets(workload, distribution, protocol.num_key_sets, options.seed)
                batches[distribution] = Batches(workload, distribution, key_sets)
    seen: set[str] = set()
    for number, run in enumerate(runs):
        first_time = [distribution for distribution in run.distributions if distribution not in seen]
        seen.update(first_time)
        label = f"{workload.name} {run.optimizer}"
        if not recorder.has_time(label):
            continue
        # Sweeps use the tables of the first optimizer.
        parts = on_filled if number == 0 else on_filled & {"lookup", "update"}
        if parts:
            with recorder.attempt(f"{label} jaxsok"):
                measure_jaxsok(workload, run, first_time, batches, parts, options, protocol, recorder, copy_gb_s)
            collect()
            recorder.write()
        if on_static and run.optimizer != workloads.LIFTED_ADAM:
            with recorder.attempt(f"{label} static tables"):
                measure_static(workload, run, first_time, batches, on_static, protocol, recorder)
            collect()
    for part in apart:
        for distribution, key_batches in batches.items():
            label = f"{workload.name} {distribution} {part}"
            if not recorder.has_time(label):
                continue
            with recorder.attempt(label):
                WITHOUT_TABLES[part].measure(key_batches, recorder, protocol, copy_gb_s)
            collect()


def measure_jaxsok(workload, run, first_time, batches, parts, options, protocol, recorder, copy_gb_s) -> None:
    """Fills the tables of a workload, then measures lookups (unless measured already), updates, and the rest."""
    begin = time.perf_counter()
    filled = fill.fill_tables(workload, run.optimizer)
    rows = workload.num_tables * workload.num_rows
    seconds = time.perf_counter() - begin
    recorder.say(f"{workload.name} {run.optimizer}: {rows} rows filled in {seconds:.1f} s, load {filled.load:.2f}")
    for distribution in first_time if "lookup" in parts else ():
        bench_lookup.measure(filled, batches[distribution], recorder, protocol)
    for distribution in run.distributions if "update" in parts else ():
        bench_update.measure(filled, batches[distribution], recorder, protocol)
    for distribution in first_time if "tickets" in parts else ():
        with recorder.attempt(f"{workload.name} {distribution} tickets"):
            bench_tickets.measure(filled, batches[distribution], recorder, protocol)
    brief = protocol.brief()
    if "skew" in parts and recorder.has_time(f"{workload.name} skew"):
        with recorder.attempt(f"{workload.name} skew"):
            uniform = batches.get("uniform") or next(iter(batches.values()))
            bench_skew.measure(filled, uniform.key_sets, recorder, brief, copy_gb_s)
    if "small" in parts and recorder.has_time(f"{workload.name} small"):
        with recorder.attempt(f"{workload.name} small"):
            bench_small.measure(filled, recorder, brief, options.seed, copy_gb_s, options.quick)


def measure_static(workload, run, first_time, batches, parts, protocol, recorder) -> None:
    """Makes static tables, then measures the limits on their rows and XLA's forward and step."""
    static = peers.StaticTables(workload, run.optimizer)
    for distribution in run.distributions:
        key_batches = batches[distribution]
        moved = limits.gather_bytes(*key_batches.shape)
        if "limits" in parts:
            if distribution in first_time:
                row_sets = [static.rows(key_set) for key_set in key_batches.key_sets]
                found, by = limits.gather(static.table, row_sets, protocol)
                recorder.add(key_batches.record(records.GATHER, "limit", found, moved_bytes=moved, by=by))
                if workload.hotness == 1:
                    found, by = limits.line_and_gather(static.table, [rows[:, 0] for rows in row_sets], protocol)
                    with_lines = moved + key_batches.num_unique * limits.INDEX_LINE_BYTES
                    recorder.add(
                        key_batches.record(records.LINE_AND_GATHER, "plain", found, moved_bytes=with_lines, by=by)
                    )
            # All sets are cut to the shortest, so that one program serves them; the cut is a fraction of a per cent.
            least = min(key_set.num_unique for key_set in key_batches.key_sets)
            unique = [jnp.asarray(key_set.shuffled_unique_rows()[:least]) for key_set in key_batches.key_sets]
            found, by, static.table = limits.read_modify_write(static.table, unique, protocol)
            wide = sum(width > 1 for width in workloads.state_dims(run.optimizer, workload.dim))
            found = timing.scale(found, (3 + 2 * wide) / 3)
            row_bytes = limits.ROW_ID_BYTES + (3 + 2 * wide) * workload.dim * limits.FLOAT_BYTES
            recorder.add(
                key_batches.record(
                    records.READ_MODIFY_WRITE,
                    "limit",
                    found,
                    optimizer=run.optimizer,
                    moved_bytes=least * row_bytes,
                    by=by,
                    notes={"states": wide},
                )
            )
        if "xla" in parts:
            if distribution in first_time:
                found = static.measure_forward(key_batches.key_sets, protocol)
                recorder.add(key_batches.record(records.FORWARD, "xla", found, moved_bytes=moved))
            with recorder.attempt(f"{workload.name} {distribution} {run.optimizer} xla step"):
                found = static.measure_step(key_batches.key_sets, protocol)
                moved += limits.update_bytes(*key_batches.shape, workloads.state_dims(run.optimizer, workload.dim))
                recorder.add(key_batches.record(records.STEP, "xla", found, optimizer=run.optimizer, moved_bytes=moved))


def measure_fbgemm(options: argparse.Namespace, protocol: Protocol) -> dict:
    """Runs FBGEMM's process if it can run; adds its records and failures, or the reason for their absence."""
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
        workload = workloads.WORKLOADS[entry["workload"]].scale(options.scale)
        entry["num_keys"] = workload.num_keys
        found["records"].append(Record(timing=timing.summary(samples, count), **entry))
    return found


def measure_dynamicemb(options: argparse.Namespace) -> dict:
    """Runs dynamicemb's process for the part "tiers" if it can run; see `measure_fbgemm`."""
    found = {"records": [], "failures": [], "why": "not asked for"}
    if "tiers" not in options.parts:
        return found
    found["why"] = peers.why_no_dynamicemb() if options.is_gpu else "no GPU to run it on"
    if found["why"]:
        return found
    (name, optimizer), *_ = bench_tiers.RUNS
    shares = [share for share in bench_tiers.SHARES if share is not None]
    arguments = ["--workload", name, "--num-rows", str(bench_tiers.NUM_ROWS)]
    arguments += ["--num-batches", "6"] if options.quick else []
    arguments += ["--shares", ",".join(map(str, shares)), "--scale", str(options.scale), "--seed", str(options.seed)]
    written = peers.run_dynamicemb(arguments, DYNAMICEMB_S)
    found["failures"] = written["failures"]
    on_device: dict[str, float] = {}
    for entry in written["records"]:
        timing_of = timing.summary(entry["samples_ms"], entry["dispatches"])
        if entry["share"] is None:
            on_device[entry["what"]] = timing_of.ms
        throughput = on_device[entry["what"]] / timing_of.ms if entry["what"] in on_device else None
        found["records"].append(
            Record(
                name,
                entry["what"],
                "dynamicemb",
                timing_of,
                distribution="zipf1.05",
                optimizer=optimizer,
                variant="all on the device" if entry["share"] is None else f"{entry['share']:.0%} in the cache",
                num_keys=workloads.on_mesh(name).scale(options.scale).num_keys,
                by=entry["by"],
                notes={"part": "tiers", "throughput": throughput, **entry["moved"]},
            )
        )
    return found


def measure_fbgemm_cache(options: argparse.Namespace) -> dict:
    """Runs the process of FBGEMM's cache for the part "cache" if it can run; see `measure_fbgemm`."""
    return _measure_cache("fbgemm", peers.why_no_fbgemm, peers.run_fbgemm_cache, options)


def measure_nve(options: argparse.Namespace) -> dict:
    """Runs NVE's process for the part "cache" if it can run; see `measure_fbgemm`."""
    return _measure_cache("nve", peers.why_no_nve, peers.run_nve, options)


def _measure_cache(subject: str, why_not: Callable, run_peer: Callable, options: argparse.Namespace) -> dict:
    """Runs a peer's process for the part "cache" if it can run; see `measure_fbgemm`."""
    found = {"records": [], "failures": [], "why": "not asked for"}
    if "cache" not in options.parts:
        return found
    found["why"] = why_not() if options.is_gpu else "no GPU to run it on"
    if found["why"]:
        return found
    arguments = ["--scale", str(options.scale), "--seed", str(options.seed)]
    return found | _cache_records(subject, run_peer(arguments, options.fbgemm_timeout))


def _cache_records(subject: str, written: dict) -> dict:
    """Returns the records and failures of what a peer's process wrote for the part "cache"."""
    made = []
    for entry in written["records"]:
        num_keys, wanted, samples_ms, by = (entry.pop(name) for name in ("num_keys", "wanted", "samples_ms", "by"))
        notes = {"part": "cache", "to_host": False, "wanted": wanted, "p99_ms": max(samples_ms)}
        made.append(
            Record(
                "cache",
                records.CACHED,
                subject,
                timing.summary(samples_ms, 1),
                variant=f"{num_keys} keys to the device, {wanted:.0%} in the cache",
                num_keys=num_keys,
                num_unique=num_keys,
                moved_bytes=num_keys * workloads.CACHE_DIM * limits.FLOAT_BYTES,
                by=by,
                notes=notes | entry,
            )
        )
    return {"records": made, "failures": written["failures"]}


def collect() -> None:
    """Frees device memory: a workload's tables must be freed before the next tables are made."""
    gc.collect()

"""The benchmarks of jaxsok, its limits and its peers in one run on one device: the program of `python -m jaxsok bench`.

    python -m jaxsok bench
    python -m jaxsok bench --workloads W1,W5 --keys uniform --out results.json

On a mesh (M1, M1-64, and any of W1 to W6):

    python -m jaxsok bench --only exchange --workloads M1,W1,W5 [--devices 2]

Training from files (bench_dcnv2.py):

    python -m jaxsok bench --only dcnv2 [--devices 4] [--seconds 120]

Order: FBGEMM, its cache, NVE and dynamicemb first, in processes of their own that give their memory back; then,
workload by workload, the filled tables, the static tables, and the limits, one after the other, since two of them may
not fit; then what has tables of its own. Each measurement that fails is recorded and passed over; what there is no time
for is recorded as skipped. The file is written after each workload.
"""

import argparse
import dataclasses
import importlib
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from . import bench_dcnv2, measure, plots, records, tables, timing, workloads
from .records import Recorder
from .timing import Protocol

OF_WORKLOADS = ("lookup", "update", "plan", "tickets", "combine", "table", "limits", "xla", "fbgemm", "small", "skew")
"""The parts that are measured on workloads."""

PARTS = (*OF_WORKLOADS, *measure.OWN_TABLES)
"""The default parts, which one device can measure. If workloads are named, the default is the parts of workloads."""

GROUPS = {"serving": measure.SERVING}
"""Names that stand for several parts."""

EXCHANGE = "exchange"
"""The part that is about meshes; a run measures it alone."""

DCNV2 = "dcnv2"
"""Training from files on tables that take all memory; a run measures it alone."""

ALONE = (EXCHANGE, DCNV2)

EXCHANGE_PARTS = ("single", "planned", "bfloat16", "split", "bags", "dlrm", "pmap", "xla")
"""The parts that `bench_exchange.py` can measure; the default is all of them."""

EXCHANGE_WORKLOADS = ("M1", "W1", "W5")

QUICK_SCALE = 0.002

QUICK_PARTS = ("lookup", "update", "xla")
QUICK_WORKLOADS = ("W1", "W5")
"""The defaults of a quick run: single keys and bags, compared with XLA. Other workloads can be named."""

QUICK_SECONDS = 0.2
"""Seconds of each timed run of training, with --quick."""

CPU_SCALE = 0.01
"""The default scale of a run on a CPU: full size takes tens of gigabytes."""

BUDGET_S = 500.0
"""After so many seconds a run begins nothing more, so that it ends within nine minutes."""

OUT = pathlib.Path("jaxsok-bench.json")

MEMORY_FRACTION = "0.92"
"""The share of the device's memory for JAX: W1 under Adam takes 80 GB of tables; CuPy's context needs a little more."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; refuses bad names before anything runs."""
    parser = argparse.ArgumentParser(prog="python -m jaxsok bench", description=__doc__.split(":")[0] + ".")
    parser.add_argument("--workloads", help=f"comma-separated, of {', '.join(workloads.NAMES)}; default: all")
    parser.add_argument("--keys", help="comma-separated: uniform, zipf1.05, …; default: those of each workload")
    parser.add_argument("--optimizers", help="comma-separated; default: those of each workload")
    parser.add_argument(
        "--only",
        help=f"comma-separated parts, of {', '.join((*PARTS, *GROUPS))} (default: all), or one of {', '.join(ALONE)}",
    )
    parser.add_argument(
        "--devices",
        help="with exchange, tiers and dcnv2: comma-separated numbers of devices; default: 1, 2, 4, 8, with tiers 1, "
        "with dcnv2 all",
    )
    parser.add_argument("--scaling", choices=workloads.SCALINGS, help="default: weak for M1, strong for others")
    parser.add_argument("--exchange", help=f"with exchange: comma-separated, of {', '.join(EXCHANGE_PARTS)}")
    parser.add_argument("--scale", type=float, help=f"share of the rows and bags; default 1, on a CPU {CPU_SCALE}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"few repetitions, scale {QUICK_SCALE}, {', '.join(QUICK_PARTS)} of {' and '.join(QUICK_WORKLOADS)}",
    )
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help=f"JSON file for the results; default {OUT}")
    parser.add_argument(
        "--time",
        type=float,
        help=f"begin nothing after so many seconds; default {BUDGET_S:g}, with --quick and on meshes no end",
    )
    parser.add_argument("--commit", help="commit of the code, where there is no repository to ask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, help="default 10")
    parser.add_argument("--batch-ms", type=float, help="dispatches of a repetition take at least this; default 30")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each step as well")
    parser.add_argument(
        "--fbgemm-timeout", type=float, default=240.0, help="seconds for each process of FBGEMM and NVE"
    )
    parser.add_argument("--seconds", type=float, help=f"with dcnv2: of a timed run; default {bench_dcnv2.SECONDS:g}")
    parser.add_argument("--minutes", type=float, help="with http: of load in which the growth of memory is measured")
    parser.add_argument("--files", type=pathlib.Path, help="with dcnv2: folder where its files are kept; default: none")
    parser.add_argument("--train", default="", help="with dcnv2: more options of train_dcnv2.py, in quotes")
    parser.add_argument(
        "--trace", type=pathlib.Path, help="with dcnv2: folder for a profile of steps (benchmarks.timeline)"
    )
    options = parser.parse_args(arguments)
    try:
        usual = QUICK_PARTS if options.quick else PARTS if options.workloads is None else OF_WORKLOADS
        parts = _read_list("--only", options.only, usual, (*PARTS, *GROUPS, *ALONE))
        options.parts = tuple(dict.fromkeys(part for name in parts for part in GROUPS.get(name, (name,))))
        if set(ALONE) & set(options.parts) and len(options.parts) > 1:
            raise ValueError(f"--only: {' and '.join(ALONE)} fill the memory of all devices; run each alone.")
        if EXCHANGE in options.parts:
            options.workloads = options.workloads or ",".join(EXCHANGE_WORKLOADS)
        elif options.quick and options.only is None:
            options.workloads = options.workloads or ",".join(QUICK_WORKLOADS)
        options.workloads = workloads.select(options.workloads)
        meshless = [workloads.H1.name] if EXCHANGE in options.parts else workloads.MESH_WORKLOADS
        foreign = [name for name in options.workloads if name in meshless]
        if foreign:
            raise ValueError(f"--workloads: {foreign} go with --only {EXCHANGE}, the others, H1 too, without it.")
        options.exchange = _read_list("--exchange", options.exchange, EXCHANGE_PARTS)
        options.devices = tuple(int(number) for number in options.devices.split(",")) if options.devices else None
        if DCNV2 in options.parts:
            options.seconds = options.seconds or (QUICK_SECONDS if options.quick else bench_dcnv2.SECONDS)
            options.keys = _read_list("--keys", options.keys, bench_dcnv2.KEYS)
            options.optimizers = _read_list(
                "--optimizers", options.optimizers, bench_dcnv2.OPTIMIZERS[:1], bench_dcnv2.OPTIMIZERS
            )
        else:
            for workload in workloads.WORKLOADS.values():
                workloads.chosen_runs(workload, options.keys, options.optimizers)
    except ValueError as error:
        parser.error(str(error))
    options.is_gpu = has_gpu()
    if options.time is None and not options.quick and not set(ALONE) & set(options.parts):
        options.time = BUDGET_S
    if options.scale is None:
        options.scale = QUICK_SCALE if options.quick else 1.0 if options.is_gpu else CPU_SCALE
    return options


def _read_list(option: str, text: str | None, usual: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the parts that a comma-separated list names, the default parts for None; refuses unknown names."""
    if text is None:
        return tuple(usual)
    parts = tuple(part.strip() for part in text.split(","))
    known = dict.fromkeys((*usual, *more))
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ValueError(f"{option}: unknown parts {unknown}; there are {', '.join(known)}.")
    return parts


def has_gpu() -> bool:
    """Returns whether JAX will find a GPU, without JAX, which would take the memory that FBGEMM needs first."""
    if os.environ.get("JAX_PLATFORMS", "").lower().startswith("cpu"):
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return listed.startswith("GPU")


def protocol_of(options: argparse.Namespace) -> Protocol:
    """Returns the protocol that a command line asks for."""
    changes = {"profile": options.profile}
    if options.repetitions is not None:
        changes["repetitions"] = options.repetitions
    if options.batch_ms is not None:
        changes["batch_s"] = options.batch_ms * 1e-3
    return dataclasses.replace(timing.QUICK if options.quick else Protocol(), **changes)


def main(arguments: Sequence[str] | None = None) -> Recorder:
    """Runs the parts that the command line names, prints the table, writes the file."""
    options = parse(arguments)
    protocol = protocol_of(options)
    begin = time.perf_counter()
    measured = {
        "fbgemm": measure.measure_fbgemm(options, protocol),
        "fbgemm_cache": measure.measure_fbgemm_cache(options),
        "nve": measure.measure_nve(options),
        "dynamicemb": measure.measure_dynamicemb(options),
    }
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    about_part = {
        EXCHANGE: ("devices", "scaling", "exchange"),
        DCNV2: ("devices", "seconds", "train"),
        "tiers": ("devices",),
    }.get(options.parts[0], ())
    shown = {
        name: value
        for name, value in vars(options).items()
        if name
        in ("workloads", "keys", "optimizers", "parts", "scale", "quick", "seed", "time", "minutes", *about_part)
        and value is not None
    }
    shown |= {"repetitions": protocol.repetitions, "batch_ms": protocol.batch_s * 1e3}
    recorder = Recorder(options.out, records.describe(shown, options.commit), begin, options.time)
    about = recorder.about
    if options.is_gpu and about["platform"] == "cpu":
        raise RuntimeError("a GPU is visible, but JAX runs on the CPU; install jax[cuda13] or set JAX_PLATFORMS=cpu.")
    recorder.say(f"{about['device']} ({about['platform']}), jax {about['versions'].get('jax')}, {about['commit']}")
    for peer, found in measured.items():
        about[peer] = found["why"] or "measured"
        for record in found["records"]:
            recorder.add(record)
        recorder.failures += found["failures"]
    recorder.write()
    if EXCHANGE in options.parts:
        measure_exchange(options, protocol, recorder)
    elif DCNV2 in options.parts:
        measure_dcnv2(options, protocol, recorder)
    else:
        measure.one_device(options, protocol, recorder)
    finish(recorder)
    return recorder


def measure_exchange(options: argparse.Namespace, protocol: Protocol, recorder: Recorder) -> None:
    """Measures the sharded step of each workload on each number of devices."""
    bench_exchange = importlib.import_module(".bench_exchange", __package__)
    numbers = bench_exchange.devices_at_hand(options.devices)
    recorder.about["num_devices"] = numbers
    for name in options.workloads:
        workload = workloads.on_mesh(name).scale(options.scale)
        (run, *_) = workloads.chosen_runs(workload, options.keys or "uniform", options.optimizers)
        scaling = options.scaling or bench_exchange.default_scaling(name)
        for num_devices in numbers:
            bench_exchange.measure(
                workload, run, num_devices, scaling, options.exchange, recorder, protocol, options.seed
            )
            recorder.write()


def measure_dcnv2(options: argparse.Namespace, protocol: Protocol, recorder: Recorder) -> None:
    """Measures training from files."""
    asked = bench_dcnv2.Options(
        devices=options.devices or (),
        keys=options.keys,
        optimizers=options.optimizers,
        seconds=options.seconds,
        folder=options.files,
        train=shlex.split(options.train),
        trace=options.trace,
        scale=options.scale,
        is_quick=options.quick,
    )
    bench_dcnv2.measure(recorder, protocol, options.seed, asked)


def finish(recorder: Recorder) -> None:
    """Prints the tables, the skipped and failed measurements, and writes the file and its plots."""
    about = recorder.about
    is_full_size = about["platform"] == "gpu" and about["options"]["scale"] == 1.0
    for title, columns, table in tables.all_of(recorder.records, is_full_size):
        print(f"\n{title}\n\n{tables.format_table(columns, table)}")
    notes = [tables.host_bound_note(recorder.records), tables.unsteady_note(recorder.records)]
    print("\n".join(["", *(note for note in notes if note)]))
    for entry in about.get("skipped", []):
        print(f"skipped {entry['what']}: {entry['why']}")
    for failure in recorder.failures:
        print(f"FAILED {failure['what']}: {failure['why']}")
    recorder.write()
    if recorder.path is None:
        return
    print(f"written: {recorder.path}")
    if plots.why_none():
        print(f"no plots: {plots.why_none()}")
        return
    folder = recorder.path.with_suffix("")
    with recorder.attempt("plots"):
        for name, _ in plots.draw(recorder.records, folder):
            print(f"drawn: {folder / name}")


if __name__ == "__main__":
    sys.exit(1 if main().failures else 0)

"""Small batches: the fixed cost of a lookup and of a step.

Question: how near does a small batch come to the floor, and does the host or the device set the pace?
Workload: W1's tables (26 x 64 floats, rowwise Adagrad) with 256 to 4,096 samples; uniform keys, all present.
Limit:    the later of two: the bytes at the bandwidth of a copy, and as many kernels without work as the program
          launches (a CUDA graph of them, by CuPy). Compared with the dispatch of an empty jitted program.
Command:  `python -m jaxsok bench --only small`
Last result: docs/performance.md (H200, commit c40a9abc).

"Dispatched" is one program a step, back to back: what a serving or training loop sees. "On the device" is a step of one
program that runs several of them, unrolled: the host dispatches once for all. "Forward + update" takes the gradients of
26 features and hands their embeddings out, 52 arrays more than a training loop has; with its loss in the program, a
step takes the batch and returns a number.
"""

import dataclasses

import jax.numpy as jnp

from . import cuda_kernels, fill, limits, records, workloads
from .bench_update import step_bytes
from .fill import Filled
from .records import Batches, Record, Recorder
from .timing import Protocol, Step

WORKLOADS = ("W1",)

SIZES = (256, 1024, 4096, 512, 2048)
"""Samples, in the order in which they are measured."""

STEPS, QUICK_STEPS = 8, 2
"""Steps of the unrolled program; each has keys of its own."""

COLD_BYTES = 128 << 20
"""Index lines and rows of all batches in rotation: more than a cache holds, so that no batch finds its rows cached."""

WHATS = (records.EVALUATION, records.TRAINING, records.STEP, records.LOSS_STEP)


def measure(
    filled: Filled, recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, is_quick: bool = False
) -> None:
    """Measures every size on tables that are filled already."""
    with recorder.attempt("small, an empty program"):
        empty(recorder, protocol)
    for num_samples in SIZES[:1] if is_quick else SIZES:
        label = f"{filled.workload.name} of {num_samples} samples"
        if not recorder.has_time(label):
            continue
        workload = dataclasses.replace(filled.workload, num_bags=num_samples)
        with recorder.attempt(label):
            length = QUICK_STEPS if is_quick else STEPS
            batch_bytes = workload.num_keys * (limits.INDEX_LINE_BYTES + workload.dim * limits.FLOAT_BYTES)
            num_programs = 1 if is_quick else max(1, -(-COLD_BYTES // (batch_bytes * length)))
            key_sets = workloads.key_sets(workload, "uniform", num_programs * length, seed)
            batches = Batches(workload, "uniform", key_sets)
            with filled.view_as(workload) as small:
                for what in WHATS:
                    _measure(small, what, batches, length, recorder, protocol, copy_gb_s)


def empty(recorder: Recorder, protocol: Protocol) -> None:
    """Times the dispatch of a program that adds one to a number."""
    step = Step(lambda carry, term: (carry + term, ()), donates=True)
    timing, _ = step.measure(jnp.zeros(()), [jnp.float32(1.0)], protocol)
    recorder.add(Record("W1", records.EMPTY, "limit", timing, notes={"part": "small"}))


def _measure(small, what, batches, length, recorder, protocol, copy_gb_s) -> None:
    sets = small.inputs(what, [key_set.ids for key_set in batches.key_sets])
    dispatched = small.measure(what, sets, protocol)
    on_device = small.measure_in_a_row(what, sets, protocol, length)
    num_samples = batches.workload.num_bags
    is_step = what in (records.STEP, records.LOSS_STEP)
    if is_step:
        moved = step_bytes(batches, small.optimizer)
    else:
        moved = limits.forward_bytes(*batches.shape, training=what == records.TRAINING)
    bytes_ms = moved / copy_gb_s * 1e-6
    best = on_device if on_device.ms < dispatched.ms else dispatched
    recorder.add(
        batches.record(
            what,
            "jaxsok",
            dataclasses.replace(best, dispatch_ms=dispatched.ms),
            optimizer=small.optimizer if is_step else "",
            variant=f"{num_samples} samples",
            moved_bytes=moved,
            limit_ms=bytes_ms,
            notes={"part": "small", "num_samples": num_samples, "device_ms": on_device.ms},
        )
    )


def floors(recorder: Recorder, protocol: Protocol, seed: int) -> None:
    """Times as many kernels without work as each program launches.

    JAX's profiler counts them on tables of a thousandth of the rows, since their number does not depend on the rows.
    Profiler and CUDA graphs come last in a run, so that nothing else is lost if they fail.
    """
    if not recorder.has_time("small, kernels without work"):
        return
    plain = cuda_kernels.load_kernels(4)
    if plain is None:
        recorder.skip("small, kernels without work", "CuPy is not importable here")
        return
    workload = dataclasses.replace(workloads.WORKLOADS[WORKLOADS[0]].scale(0.001), num_bags=SIZES[0])
    filled = fill.fill_tables(workload, workload.runs[0].optimizer)
    key_sets = workloads.key_sets(workload, "uniform", protocol.num_key_sets, seed)
    for what in WHATS:
        sets = filled.inputs(what, [key_set.ids for key_set in key_sets])
        filled.measure(what, sets, protocol)  # Compile before profiling.
        kernels, filled.state = filled.programs[what].kernels(filled.state, sets)
        num_kernels = sum(launches for launches, _ in kernels.values())
        if not num_kernels:
            recorder.skip(f"{what}: kernels without work", "the profiler saw no kernel")
            continue
        timing = plain.nothing(round(num_kernels), protocol)
        notes = {"part": "small", "num_kernels": num_kernels, "kernels": dict(list(kernels.items())[:20])}
        recorder.add(Record(workload.name, records.NO_WORK, "limit", timing, variant=what, notes=notes))

"""The step of a dynamic table against that of a static table on a CPU.

Question: what does a table without a chosen size cost, compared with `jnp.take` and `.at[].add` on a static array?
Workload: W1's shape scaled down (a 32nd, or as `--scale` says if that is more), SGD; uniform and Zipf 1.05.
Limit:    none; the target is at most 1.5 times the time of the static table.
Command:  `JAX_PLATFORMS=cpu python -m jaxsok bench --only cpu`
Last result: docs/performance.md (2 CPU cores, commit c9d821d).

Three systems run in one process, on the same ids, with all cores: jaxsok's lookup and update; one stacked array with
`jnp.take` and `.at[].add`, donated (`peers.py`); and, if torch can be imported, its `EmbeddingBag` with sparse
gradients and `torch.optim.SGD` on one stacked table.
"""

import dataclasses
import gc
import importlib.util
import itertools
import os
import time

import jax

from . import fill, peers, records, workloads
from .bench_update import step_bytes
from .records import Batches, Recorder
from .timing import Protocol, Timing, summary

LEAST_SCALE = 1 / 32

DISTRIBUTIONS = ("uniform", "zipf1.05")


def measure(recorder: Recorder, protocol: Protocol, seed: int, scale: float, is_quick: bool = False) -> None:
    """Measures all three; skipped on a GPU."""
    if jax.default_backend() != "cpu":
        recorder.skip("cpu", "a comparison on a CPU; run it with JAX_PLATFORMS=cpu")
        return
    workload = workloads.WORKLOADS["W1"].scale(scale if is_quick else max(scale, LEAST_SCALE))
    workload = dataclasses.replace(workload, num_tables=4) if is_quick else workload
    distributions = DISTRIBUTIONS[:1] if is_quick else DISTRIBUTIONS
    all_batches = [
        Batches(workload, distribution, workloads.key_sets(workload, distribution, protocol.num_key_sets, seed))
        for distribution in distributions
    ]
    filled = fill.fill_tables(workload, "sgd")
    for batches in all_batches:
        with recorder.attempt(f"cpu {batches.distribution} jaxsok"):
            sets = filled.inputs(records.STEP, [key_set.ids for key_set in batches.key_sets])
            _add(batches, "jaxsok", filled.measure(records.STEP, sets, protocol), recorder)
    del filled
    gc.collect()
    static = peers.StaticTables(workload, "sgd")
    for batches in all_batches:
        with recorder.attempt(f"cpu {batches.distribution} XLA"):
            _add(batches, "xla", static.measure_step(batches.key_sets, protocol), recorder)
    del static
    gc.collect()
    if importlib.util.find_spec("torch") is None:
        recorder.skip("cpu torch", "torch is not importable here")
        return
    for batches in all_batches:
        with recorder.attempt(f"cpu {batches.distribution} torch"):
            _add(batches, "torch", _torch_step(batches, protocol), recorder)


def _add(batches: Batches, subject: str, timing: Timing, recorder: Recorder) -> None:
    notes = {"part": "cpu", "num_rows": batches.workload.num_tables * batches.workload.num_rows}
    moved = step_bytes(batches, "sgd")
    recorder.add(
        batches.record(records.STEP, subject, timing, optimizer="sgd", variant="cpu", moved_bytes=moved, notes=notes)
    )


def _torch_step(batches: Batches, protocol: Protocol) -> Timing:
    """Times torch's step on the host: the step returns when it is done."""
    import torch

    workload = batches.workload
    torch.set_num_threads(os.cpu_count() or 1)
    module = torch.nn.EmbeddingBag(workload.num_tables * workload.num_rows, workload.dim, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=peers.LEARNING_RATE)
    rows = [torch.from_numpy(key_set.stacked_rows.reshape(-1).astype("int64")) for key_set in batches.key_sets]
    offsets = torch.arange(workload.num_embeddings) * workload.hotness
    gradients = torch.rand(workload.num_embeddings, workload.dim) * 0.1 - 0.05
    rotation = itertools.cycle(rows)

    def step():
        optimizer.zero_grad(set_to_none=True)
        module(next(rotation), offsets).backward(gradients)
        optimizer.step()

    def batch(count):
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - begin

    step_s = batch(1 + protocol.warmups * len(rows)) / (1 + protocol.warmups * len(rows))
    count = protocol.dispatches(step_s)
    return summary([batch(count) * 1e3 / count for _ in range(protocol.affordable(step_s))], count)

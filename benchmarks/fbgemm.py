"""FBGEMM's table-batched embeddings (TBE) on the workloads: a process of its own, because it imports no JAX.

Question: what do static tables without any hashing cost in the fastest library that PyTorch users have?
Workload: W1 to W6, with the ids of `workloads.py`, so that jaxsok and TBE look up the same rows.
Limit:    that of jaxsok's forward and step (`limits.py`).
Command:  `python -m jaxsok bench` starts it first where torch and fbgemm_gpu can be imported; by hand:
          `python -m benchmarks.fbgemm --workloads W1 --out fbgemm.json`.
Last result: docs/performance.md (H200, commit 3ba843f4).

Each workload is measured with `bounds_check_mode=NONE` ("fbgemm_unchecked": the honest peer, since a static table needs
no check to be right on right ids) and with the module's default, WARNING ("fbgemm_default": what a user gets). Forward
without autograd; the step is forward, backward with a given gradient, and the fused optimizer. CUDA events around
batches of calls, in the protocol of `timing.py`. TBE says of its own Adam that it is experimental and not optimized.
"""

import argparse
import dataclasses
import gc
import json
import pathlib
import warnings

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from . import workloads
from .workloads import Workload

LEARNING_RATE = 0.01

OPTIMIZERS = {
    "sgd": dict(optimizer=EmbOptimType.EXACT_SGD),
    "adagrad": dict(optimizer=EmbOptimType.EXACT_ADAGRAD, eps=1e-7),
    "rowwise_adagrad": dict(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, eps=1e-8),
    "adam": dict(optimizer=EmbOptimType.ADAM, eps=1e-8, beta1=0.9, beta2=0.999),
}

BOUNDS_CHECKS = {"fbgemm_unchecked": BoundsCheckMode.NONE, "fbgemm_default": BoundsCheckMode.WARNING}


@dataclasses.dataclass
class Options:
    """The options that the parent process passes; the fields of `timing.Protocol` have their names."""

    repetitions: int
    warmups: int
    batch_s: float
    num_key_sets: int
    seed: int


def tables(workload: Workload, optimizer: str, bounds_check: BoundsCheckMode) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Returns the tables of a workload on the device, in float32."""
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.num_rows, workload.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * workload.num_tables,
        weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32,
        stochastic_rounding=False,
        learning_rate=LEARNING_RATE,
        pooling_mode=PoolingMode.NONE if workload.combiner is None else PoolingMode.SUM,
        bounds_check_mode=bounds_check,
        device=torch.device("cuda"),
        **OPTIMIZERS[optimizer],
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    return module


def batch_milliseconds(step, sets, options: Options) -> tuple[list[float], int]:
    """Returns the milliseconds of a step for each batch of steps, and the number of steps in a batch."""
    position = 0

    def batch(count):
        nonlocal position
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            step(*sets[position % len(sets)])
            position += 1
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    for _ in range(options.warmups):
        batch(len(sets))
    count = max(1, round(options.batch_s * 1e3 / (batch(10) / 10)))
    return [batch(count) / count for _ in range(options.repetitions)], count


def measure(workload: Workload, optimizer: str, distributions, with_forward, subject: str, options: Options):
    """Yields (what, distribution, samples in ms, steps a batch) of one workload, optimizer and bounds check."""
    module = tables(workload, optimizer, BOUNDS_CHECKS[subject])
    shape = (workload.num_tables, workload.num_bags, workload.hotness)
    num_offsets = workload.num_tables * workload.num_bags + 1
    offsets = torch.arange(num_offsets, device="cuda", dtype=torch.int64) * workload.hotness
    gradient = None
    for distribution in distributions:
        sets = []
        for ids in workloads.draw_batches(workload, distribution, options.num_key_sets, options.seed):
            assert ids.shape == shape
            sets.append((torch.from_numpy(ids.reshape(-1)).to("cuda", torch.int64), offsets))

        if distribution in with_forward:
            with torch.no_grad():
                yield "forward", distribution, *batch_milliseconds(module, sets, options)

        if gradient is None:
            gradient = torch.empty_like(module(*sets[0])).uniform_(-0.05, 0.05)

        def step(ids, offsets, gradient=gradient):
            module(ids, offsets).backward(gradient)

        yield "forward + update", distribution, *batch_milliseconds(step, sets, options)


def main() -> None:
    """Measures the workloads that the command line names, and writes the results after every workload."""
    parser = argparse.ArgumentParser(description="FBGEMM's table-batched embeddings on the workloads of jaxsok.")
    parser.add_argument("--workloads", help="comma-separated names; default: all")
    parser.add_argument("--keys", help="comma-separated distributions; default: those of each workload")
    parser.add_argument("--optimizers", help="comma-separated names; default: those of each workload")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--batch-s", type=float, default=0.05)
    parser.add_argument("--num-key-sets", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    options = Options(
        arguments.repetitions, arguments.warmups, arguments.batch_s, arguments.num_key_sets, arguments.seed
    )
    warnings.filterwarnings("ignore", message=".*lazy loading.*")
    records, failures = [], []
    for name in workloads.select(arguments.workloads):
        if name not in workloads.WORKLOADS:
            continue
        workload = workloads.WORKLOADS[name].scale(arguments.scale)
        chosen = workloads.chosen_runs(workload, arguments.keys, arguments.optimizers)
        chosen = [run for run in chosen if run.optimizer in OPTIMIZERS]
        for subject in BOUNDS_CHECKS:
            seen: set[str] = set()
            for run in chosen:
                with_forward = [each for each in run.distributions if each not in seen]
                seen.update(with_forward)
                label = f"{name} {run.optimizer} {subject}"
                try:
                    for what, distribution, samples, count in measure(
                        workload, run.optimizer, run.distributions, with_forward, subject, options
                    ):
                        median = sorted(samples)[len(samples) // 2]
                        print(f"FBGEMM {label} {distribution} {what}: {median:.4g} ms", flush=True)
                        records.append(
                            dict(
                                workload=name,
                                what=what,
                                subject=subject,
                                distribution=distribution,
                                optimizer=run.optimizer if what != "forward" else "",
                                samples_ms=samples,
                                dispatches=count,
                            )
                        )
                except Exception as error:
                    failures.append({"what": f"FBGEMM {label}", "why": f"{type(error).__name__}: {error}"[:2000]})
                    print(f"FBGEMM {label} FAILED: {error}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        arguments.out.write_text(json.dumps({"records": records, "failures": failures, "about": versions}))


if __name__ == "__main__":
    main()

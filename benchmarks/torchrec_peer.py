"""TorchRec on several GPUs: sharded static tables, and MLPerf's DLRM around them; a program that imports no JAX.

Question: what does a step on the same GPUs cost in the framework that PyTorch users have?
Workload: M1, W1 and W5 with the ids of `workloads.py`, and the DLRM of `dlrm.py` on M1's tables.
Limit:    that of jaxsok's step on a mesh (`bench_exchange.py`), measured in a run of its own.
Command:  `torchrun --standalone --nproc-per-node 2 -m benchmarks.torchrec_peer --out torchrec.jsonl`
Last result: docs/results/many_gpus.md (4 x H100).

One process a GPU. Tables are an `EmbeddingBagCollection` in float32 with fused rowwise Adagrad and no bounds check,
sharded by TorchRec's planner, by rows, and by tables. "bfloat16" is TorchRec's quantized communication of rows and
gradients. *plain*: the lookup as it is called; *pipelined*: `TrainPipelineSparseDist`, which sends the keys of the next
batch during the step. Every batch lies on the device (`--batches pinned`: in pinned host memory, copied by the
pipeline), and the numbers of keys of its features are known, as a loader knows them.

The gradient of the tables alone is their embeddings, as in `bench_exchange.py`: nothing is computed for it. The dense
part of DLRM has the same layers, loss and optimizer as `dlrm.py`; `torch.compile` compiles it, and it is replicated by
`DistributedDataParallel`.

Times are wall times of batches of steps, with one wait at the end, of the slowest process. Peak memory is given by
GPU: what PyTorch allocated, what it reserved, and what the whole device had in use at the end, with NCCL's buffers.
A line of `--out` has the fields of `records.Record`. Without a GPU it runs on CPUs (gloo), to see that it works.
"""

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import pathlib
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist, comm_ops
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.streamable import Pipelineable

from . import workloads
from .workloads import Workload

LEARNING_RATE = 0.01
EPSILON = 1e-8

SHARDINGS = {
    # Not by data: such tables would have no fused optimizer.
    "planner": [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE],
    "row_wise": [ShardingType.ROW_WISE],
    "table_wise": [ShardingType.TABLE_WISE],
}

WIRES = ("float32", "bfloat16")
PARTS = ("tables", "dlrm")
DLRM_WORKLOADS = ("M1", "M1-64")

# As in records.py, which imports JAX.
EVALUATION, STEP, DLRM = "evaluation forward", "forward + update", "DLRM step"

# As in dlrm.py, likewise.
NUM_DENSE, BOTTOM, TOP = 13, (512, 256), (1024, 1024, 512, 256)
DENSE_LEARNING_RATE, INITIAL_ACCUMULATOR, DENSE_EPSILON = 0.01, 0.1, 1e-7  # of optax.adagrad(0.01)

TIMEOUT = datetime.timedelta(minutes=3)
"""After it NCCL ends the job where one process failed and the others wait for it. Compiling takes up to a minute."""

MEMORY = ("allocated", "reserved", "device")


# ----------------------------------------------------------------------------------------------------------- the model


@dataclasses.dataclass
class Batch(Pipelineable):
    """The samples of one process."""

    features: KeyedJaggedTensor
    dense: torch.Tensor
    """float32 [num_samples, 13]."""
    labels: torch.Tensor
    """float32 [num_samples], 0 or 1."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Returns the batch on a device."""
        return Batch(*(part.to(device=device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until a stream has used it."""
        for part in self._parts():
            part.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Returns the batch in pinned host memory."""
        return Batch(*(part.pin_memory() for part in self._parts()))

    def _parts(self):
        return self.features, self.dense, self.labels


class _HalfOfSquares(torch.autograd.Function):
    """Has the gradient of half the sum of squares, and does not compute the sum."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0]


@torch.fx.wrap
def half_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Returns a loss whose gradient is the values."""
    return _HalfOfSquares.apply(values)


class Tables(nn.Module):
    """The tables alone."""

    def __init__(self, tables: EmbeddingBagCollection):
        super().__init__()
        self.tables = tables

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss twice: what is minimized, and what is reported."""
        loss = half_of_squares(self.tables(batch.features).values())
        return loss, loss


class Dense(nn.Module):
    """The dense part of MLPerf's DLRM: parameters in float32, matrices multiplied in bfloat16."""

    def __init__(self, num_features: int, dim: int, device: torch.device):
        super().__init__()
        self.num_features, self.dim = num_features, dim
        num_pairs = (num_features + 1) * num_features // 2
        self.bottom = _layers((NUM_DENSE, *BOTTOM, dim), device)
        self.top = _layers((num_pairs + dim, *TOP, 1), device)
        num_vectors = num_features + 1
        rows, columns = np.tril_indices(num_vectors, -1)
        self.register_buffer("pairs", torch.from_numpy(rows * num_vectors + columns).to(device), persistent=False)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross entropy of the samples of this process.

        Args:
          embeddings: float32 [num_samples, num_features * dim].
          dense: float32 [num_samples, 13].
          labels: float32 [num_samples], 0 or 1.
        """
        num_samples, num_vectors = dense.shape[0], self.num_features + 1
        bottom = F.relu(_mlp(self.bottom, dense.to(torch.bfloat16)))
        vectors = embeddings.to(torch.bfloat16).view(num_samples, self.num_features, self.dim)
        vectors = torch.cat([bottom[:, None], vectors], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).reshape(num_samples, num_vectors * num_vectors)
        # The pairs below the diagonal are chosen in the weights, as in dlrm.py: in the products that takes a scatter.
        first = self.top[0]
        weights = first.weight.t()
        of_pairs = weights.new_zeros((num_vectors * num_vectors, weights.shape[1]))
        of_pairs = of_pairs.index_copy(0, self.pairs, weights[self.dim :])
        weights = torch.cat([weights[: self.dim], of_pairs]).to(torch.bfloat16)
        hidden = torch.cat([bottom, products], dim=1) @ weights + first.bias.to(torch.bfloat16)
        logits = _mlp(self.top[1:], F.relu(hidden))[:, 0].float()
        return torch.mean(F.softplus(logits) - labels * logits)


def _layers(sizes: Sequence[int], device: torch.device) -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(a, b, device=device) for a, b in itertools.pairwise(sizes))
    for layer in layers:
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return layers


def _mlp(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(layers):
        x = F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
        if number < len(layers) - 1:
            x = F.relu(x)
    return x


class Model(nn.Module):
    """DLRM: the tables and the dense part."""

    def __init__(self, tables: EmbeddingBagCollection, dense: Dense):
        super().__init__()
        self.tables, self.dense = tables, dense

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and the loss to report."""
        loss = self.dense(self.tables(batch.features).values(), batch.dense, batch.labels)
        return loss, loss.detach()


# -------------------------------------------------------------------------------------------------------- what is timed


class Peer:
    """The processes of a run: their device, their number, and how they measure."""

    def __init__(self, options: argparse.Namespace):
        """Joins the processes that `torchrun` started."""
        self.options = options
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if self.is_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.is_gpu else "gloo", timeout=TIMEOUT, device_id=self.device if self.is_gpu else None
        )
        self.rank, self.num_devices = dist.get_rank(), dist.get_world_size()
        self.records: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.begin = time.perf_counter()
        packages = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
        self.versions = {name: version for name in packages if (version := _version(name))}
        if options.out and self.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("")
        self.say(f"{self.num_devices} processes, {self.device_name}, {self.versions}")

    @property
    def device_name(self) -> str:
        """The kind of the device."""
        return torch.cuda.get_device_name() if self.is_gpu else "CPU"

    def say(self, line: str) -> None:
        """Prints a line, in the first process."""
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.begin:6.1f} s] {line}", flush=True)

    def wait(self) -> None:
        """Waits for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def most(self, number: float) -> float:
        """Returns the largest of the processes' numbers."""
        value = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Returns what the first process made, in all of them; its exception too is raised in all of them."""
        made: list[Any] = [None]
        if self.rank == 0:
            try:
                made = [make()]
            except Exception as error:
                made = [RuntimeError(str(error))]
        dist.broadcast_object_list(made, 0, device=self.device)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Measures; what fails in any process is noted, and ends nothing else."""
        why = ""
        try:
            measure()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"process {self.rank}: {what} FAILED: {why}", flush=True)
            if self.options.stop:
                raise
        if self.most(bool(why)):
            self.failures.append(f"{what}: {why or 'failed in another process'}"[:500])
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def measure_step(self, step: Callable[[], Any]) -> dict[str, Any]:
        """Returns the fields of a `timing.Timing`, of the slowest process."""
        for _ in range(self.options.warmups * self.options.num_key_sets):
            step()
        look = 10
        count = max(1, round(self.options.batch_s * look / self._seconds(step, look)))
        samples = sorted(self._seconds(step, count) * 1e3 / count for _ in range(self.options.repetitions))
        last = len(samples) - 1
        low, high = samples[round(0.1 * last)], samples[round(0.9 * last)]
        times = {"ms": statistics.median(samples), "low_ms": low, "high_ms": high}
        return times | {"repetitions": len(samples), "dispatches": count}

    def _seconds(self, step: Callable[[], Any], count: int) -> float:
        dist.barrier()
        self.wait()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self.wait()
        return self.most(time.perf_counter() - begin)

    def reset_memory(self) -> None:
        """Begins to look for the peak."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> dict[str, list[int]]:
        """Returns, for each process, the bytes of MEMORY since `reset_memory`; nothing on a CPU."""
        if not self.is_gpu:
            return {}
        free, total = torch.cuda.mem_get_info()
        numbers = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free]
        mine = torch.tensor(numbers, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.num_devices)]
        dist.all_gather(everyone, mine)
        return {name: [int(rank[i]) for rank in everyone] for i, name in enumerate(MEMORY)}

    def add(self, record: dict[str, Any]) -> None:
        """Keeps a record, prints it and appends it to the file."""
        self.records.append(record)
        self.say(" ".join(text for text in _row(record) if text != "-"))
        if self.options.out and self.rank == 0:
            with self.options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


class Sharder(EmbeddingBagCollectionSharder):
    """A sharder that may shard by rows on a CPU too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns what the constraints choose from."""
        return [kind.value for kind in SHARDINGS["planner"]]


class Pipelined:
    """`TrainPipelineSparseDist` over batches in turn; a call is a step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], peer: Peer):
        """Begins a pipeline; nothing runs yet."""
        self.pipeline = TrainPipelineSparseDist(model, optimizer, peer.device)
        self.batches = itertools.cycle(batches)
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        """Makes a step."""
        self.loss = self.pipeline.progress(self.batches)

    def detach(self) -> None:
        """Leaves the model as it was, for another pipeline or none."""
        self.pipeline.detach()


class Sharded:
    """One workload on all GPUs, under one sharding and one wire."""

    def __init__(self, peer: Peer, workload: Workload, scaling: str, sharding: str, wire: str):
        """Notes what is measured; `model` builds it."""
        self.peer, self.workload, self.wire, self.sharding = peer, workload, wire, sharding
        self.scaling = scaling
        self.num_samples = workload.num_bags // peer.num_devices
        self.names = [f"t{i}" for i in range(workload.num_tables)]
        self.plan: dict[str, int] = {}

    def shard_model(self, wrap: Callable[[EmbeddingBagCollection], nn.Module]) -> DistributedModelParallel:
        """Returns a model around the tables, on all devices."""
        peer, workload = self.peer, self.workload
        tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=workload.dim,
                    num_embeddings=workload.num_rows,
                    feature_names=[name],
                    pooling=PoolingType.SUM,
                )
                for name in self.names
            ],
        )
        registry = None
        if self.wire == "bfloat16":
            kind = CommType.BF16 if peer.is_gpu else CommType.FP16  # gloo has no bfloat16
            config = QCommsConfig(forward_precision=kind, backward_precision=kind)
            registry = get_qcomm_codecs_registry(config, device=peer.device)
        fused = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
            "eps": EPSILON,
            "bounds_check_mode": BoundsCheckMode.NONE,
        }
        sharder = Sharder(fused_params=fused, qcomm_codecs_registry=registry)
        constraint = ParameterConstraints(
            sharding_types=[kind.value for kind in SHARDINGS[self.sharding]],
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            pooling_factors=[float(workload.hotness)],
        )
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=peer.num_devices,
                local_world_size=peer.num_devices,
                compute_device=peer.device.type,
                hbm_cap=torch.cuda.mem_get_info()[1] if peer.is_gpu else None,
            ),
            batch_size=self.num_samples,
            constraints=dict.fromkeys(self.names, constraint),
            debug=False,
        )
        model = wrap(tables)
        plan = peer.from_first(lambda: planner.plan(model, [sharder]))
        self.plan = dict(Counter(table.sharding_type for part in plan.plan.values() for table in part.values()))
        return DistributedModelParallel(module=model, device=peer.device, plan=plan, sharders=[sharder])

    def batches(self, distribution: str) -> tuple[list[Batch], int]:
        """Returns this process's part of each batch, and the number of distinct keys of a whole batch."""
        peer, options, num = self.peer, self.peer.options, self.num_samples
        mine = slice(peer.rank * num, (peer.rank + 1) * num)
        key_sets = workloads.key_sets(self.workload, distribution, options.num_key_sets, options.seed)
        rng = np.random.default_rng((options.seed, peer.rank))
        made = []
        num_keys = num * self.workload.hotness
        for key_set in key_sets:
            keys = torch.from_numpy(key_set.ids[:, mine].reshape(-1).astype(np.int64))
            features = KeyedJaggedTensor(
                keys=self.names,
                values=keys,
                lengths=torch.full((len(self.names) * num,), self.workload.hotness, dtype=torch.int64),
                stride=num,
                length_per_key=[num_keys] * len(self.names),
            )
            dense = torch.from_numpy(rng.random((num, NUM_DENSE), np.float32))
            labels = torch.from_numpy(rng.integers(0, 2, num).astype(np.float32))
            batch = Batch(features, dense, labels)
            if options.batches == "device":
                batch = batch.to(peer.device)
            elif peer.is_gpu:
                batch = batch.pin_memory()
            made.append(batch)
        return made, round(sum(key_set.num_unique for key_set in key_sets) / len(key_sets))

    def measure_tables(self, distributions: Sequence[str]) -> None:
        """Measures the lookup, and the step plain and pipelined."""
        peer = self.peer
        # The gradient is that of a sum over all samples, so it is not divided by the number of processes.
        comm_ops.set_gradient_division(False)
        model = self.shard_model(Tables)
        peer.say(f"{self.workload.name} {self.sharding} {self.wire}: {self.plan}")
        for distribution in distributions:
            batches, num_unique = self.batches(distribution)
            on_device = itertools.cycle([batch.to(peer.device) for batch in batches])

            def forward(on_device=on_device) -> None:
                with torch.no_grad():
                    model(next(on_device))

            def step(on_device=on_device) -> None:
                model(next(on_device))[0].backward()

            self._add(EVALUATION, distribution, num_unique, "plain", forward)
            self._add(STEP, distribution, num_unique, "plain", step)
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # the tables have their own
            pipelined = Pipelined(model, optimizer, batches, peer)
            self._add(STEP, distribution, num_unique, "pipelined", pipelined)
            pipelined.detach()

    def measure_dlrm(self, distributions: Sequence[str]) -> None:
        """Measures a whole step of DLRM, pipelined."""
        peer, workload = self.peer, self.workload
        comm_ops.set_gradient_division(True)  # the loss is the mean over the samples of all processes
        dense = Dense(workload.num_tables, workload.dim, peer.device)
        if peer.options.compile_mode != "none":
            dense.compile(mode=peer.options.compile_mode, dynamic=False)
        model = self.shard_model(lambda tables: Model(tables, dense))
        peer.say(f"{workload.name} DLRM {self.sharding} {self.wire}: {self.plan}")
        optimizer = torch.optim.Adagrad(
            dense.parameters(),
            lr=DENSE_LEARNING_RATE,
            initial_accumulator_value=INITIAL_ACCUMULATOR,
            eps=DENSE_EPSILON,
            foreach=True,
        )
        for distribution in distributions:
            batches, num_unique = self.batches(distribution)
            pipelined = Pipelined(model, optimizer, batches, peer)
            self._add(DLRM, distribution, num_unique, "pipelined", pipelined)
            pipelined.detach()
            if not torch.isfinite(pipelined.loss):
                raise RuntimeError(f"the loss is {pipelined.loss.item()}.")

    def _add(self, what: str, distribution: str, num_unique: int, program: str, step: Callable[[], None]) -> None:
        """Measures a step, and records it."""
        peer, workload = self.peer, self.workload
        peer.reset_memory()
        timing = peer.measure_step(step)
        peaks = peer.peak_bytes()
        notes = {
            "scaling": self.scaling,
            "num_samples": workload.num_bags,
            "num_rows": workload.num_tables * workload.num_rows,
            "program": program,
            "wire": self.wire,
            "front_end": "torch",
            "sharding": self.sharding,
            "plan": self.plan,
            "batches": peer.options.batches if program == "pipelined" else "device",
            "samples_per_s": workload.num_bags / timing["ms"] * 1e3,
            "peak_bytes": peaks,
            "compile_mode": peer.options.compile_mode if what == DLRM else "",
            "device": peer.device_name,
            "versions": peer.versions,
        }
        variant = f"{self.scaling} x{peer.num_devices} {program} {self.sharding}"
        peer.add(
            {
                "workload": workload.name,
                "what": what,
                "subject": "torchrec",
                "timing": timing,
                "distribution": distribution,
                "optimizer": "" if what == EVALUATION else "rowwise_adagrad",
                "variant": variant + ("" if self.wire == "float32" else f" {self.wire}"),
                "num_keys": workload.num_keys,
                "num_unique": num_unique,
                "num_devices": peer.num_devices,
                "notes": notes,
            }
        )


# ------------------------------------------------------------------------------------------------------ what is printed

COLUMNS = ("workload", "keys", "what", "program", "sharding", "wire", "ms", "spread", "Msamples/s", "peak GiB a GPU")


def _row(record: dict[str, Any]) -> list[str]:
    notes, timing = record["notes"], record["timing"]
    peak = max(notes["peak_bytes"].get("allocated", [0]))
    return [
        record["workload"],
        record["distribution"],
        record["what"],
        notes["program"],
        notes["sharding"],
        notes["wire"],
        f"{timing['ms']:.3f}",
        f"{(timing['high_ms'] - timing['low_ms']) / timing['ms']:.0%}",
        f"{notes['samples_per_s'] / 1e6:.3f}",
        f"{peak / 2**30:.2f}" if peak else "-",
    ]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Returns the fastest program and sharding of each measurement, as a table."""
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        key = (record["workload"], record["distribution"], record["what"], record["notes"]["wire"])
        if key not in best or record["timing"]["ms"] < best[key]["timing"]["ms"]:
            best[key] = record
    rows = [list(COLUMNS), *(_row(record) for record in best.values())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workloads", default="M1,W1,W5")
    add("--keys", default="uniform,zipf1.05", help="distributions")
    add("--shardings", default=",".join(SHARDINGS))
    add("--wires", default=",".join(WIRES))
    add("--parts", default=",".join(PARTS), help="tables: lookup and step; dlrm: a whole step, on M1's tables")
    add("--scaling", choices=workloads.SCALINGS, help="default: weak for M1, strong for the others")
    add("--scale", type=float, default=1.0, help="share of the rows and samples")
    add("--batches", choices=("device", "pinned"), default="device", help="where the pipeline's batches lie")
    add("--compile-mode", default="default", help="of torch.compile on the dense part; none: not compiled")
    add("--repetitions", type=int, default=10)
    add("--warmups", type=int, default=3, help="rounds over all key sets")
    add("--batch-s", type=float, default=0.05, help="seconds of a repetition")
    add("--num-key-sets", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--stop", action="store_true", help="end at the first failure")
    add("--out", type=pathlib.Path, help="a record a line")
    options = parser.parse_args(arguments)
    for name, known in (("shardings", tuple(SHARDINGS)), ("wires", WIRES), ("parts", PARTS)):
        chosen = [part.strip() for part in getattr(options, name).split(",") if part.strip()]
        for part in chosen:
            if part not in known:
                parser.error(f"--{name}: got {part!r}, there are {', '.join(known)}")
        setattr(options, name, chosen)
    options.workloads = workloads.select(options.workloads)
    options.keys = [part.strip() for part in options.keys.split(",") if part.strip()]
    return options


def main() -> None:
    """Measures what the command line names; the first process prints the table last."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    options = parse()
    peer = Peer(options)
    for name in options.workloads:
        scaling = options.scaling or ("weak" if name in workloads.MESH_WORKLOADS else "strong")
        workload = workloads.on_mesh(name).scale(options.scale).on_devices(peer.num_devices, scaling)
        for part in options.parts:
            if part == "dlrm" and name not in DLRM_WORKLOADS:
                continue
            for sharding, wire in itertools.product(options.shardings, options.wires):
                if peer.num_devices == 1 and (sharding, wire) != ("table_wise", "float32"):
                    continue  # nothing is sent
                sharded = Sharded(peer, workload, scaling, sharding, wire)
                measure = sharded.measure_tables if part == "tables" else sharded.measure_dlrm
                peer.attempt(f"{name} {part} {sharding} {wire}", lambda measure=measure: measure(options.keys))
    if peer.rank == 0:
        for failure in peer.failures:
            print(f"FAILED {failure}")
        print(table(peer.records), flush=True)
    dist.destroy_process_group()
    if peer.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""TorchRec on several GPUs: sharded static tables, and MLPerf's models around them; a program that imports no JAX.

Question: what does a step on the same GPUs cost in the framework that PyTorch users have?
Workload: M1, W1 and W5 with the ids of `workloads.py`, and the DLRM of `dlrm.py` on M1's tables; `--workloads dcnv2`:
          DLRM-DCNv2 with the tables, keys, model and optimizers of `examples/train_dcnv2.py`.
Limit:    that of jaxsok's step on a mesh (`bench_exchange.py`, `bench_dcnv2.py`), measured in a run of its own.
Command:  `torchrun --standalone --nproc-per-node 2 -m benchmarks.torchrec_peer --out torchrec.jsonl`
Last result: docs/results/many_gpus.md and dcnv2.md (4 x H100).

One process a GPU. Tables are an `EmbeddingBagCollection` in float32 with a fused optimizer and no bounds check, sharded
by TorchRec's planner, by rows, and by tables. "bfloat16" is TorchRec's quantized communication of rows and gradients.
*plain*: the lookup, or the loop of training, as it is written without a pipeline; *pipelined*:
`TrainPipelineSparseDist`, which sends the keys of the next batch during the step. Every batch was made beforehand and
lies on the device; those of DLRM-DCNv2 lie in pinned host memory, and each step copies its batch (`--batches` chooses).
The numbers of keys of a batch's features are known, as a loader knows them. Keys are int64, FBGEMM's default;
`--key-dtypes int32` has FBGEMM take int32.

The gradient of the tables alone is their embeddings, as in `bench_exchange.py`: nothing is computed for it. The dense
part of each model has the same layers, loss and optimizer as in jaxsok, float32 parameters, and arithmetic in bfloat16.
`torch.compile` compiles it, and it is replicated by `DistributedDataParallel`. Where it cannot be compiled, that is
counted as a failure, and the times that follow have the compile mode "none".

Times are wall times of batches of steps, with one wait at the end, of the slowest process. Peak memory is given by
GPU: what PyTorch allocated, what it reserved, and what the whole device had in use at the end, with NCCL's buffers.
A line of `--out` has the fields of `records.Record`. Without a GPU it runs on CPUs (gloo), to see that it works.
"""

import argparse
import copy
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
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
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist, comm_ops
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.streamable import Pipelineable

from . import workloads
from .workloads import Workload

OPTIMIZERS = {
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01, "eps": 1e-8},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.005, "eps": 1e-8},
}
"""FBGEMM's settings of the tables' optimizers."""

SHARDINGS = {
    # Not by data: such tables would have no fused optimizer. Not by columns: the planner leaves 128 columns together.
    "planner": [ShardingType.TABLE_WISE, ShardingType.ROW_WISE],
    "row_wise": [ShardingType.ROW_WISE],
    "table_wise": [ShardingType.TABLE_WISE],
}

WIRES = ("float32", "bfloat16")
PROGRAMS = ("plain", "pipelined")
PARTS = ("tables", "dlrm")
KEY_DTYPES = {"int64": torch.int64, "int32": torch.int32}

DCNV2 = "DLRM-DCNv2"
DLRM_WORKLOADS = ("M1", "M1-64", DCNV2)

# As in records.py, which imports JAX.
EVALUATION, STEP, DLRM = "evaluation forward", "forward + update", "DLRM step"

# As in dlrm.py, likewise; DLRM-DCNv2 has the same MLPs.
NUM_DENSE, BOTTOM, TOP = 13, (512, 256), (1024, 1024, 512, 256)
DENSE_ADAGRAD = {"lr": 0.01, "initial_accumulator_value": 0.1, "eps": 1e-7}  # optax.adagrad(0.01)

# As in examples/train_dcnv2.py, likewise.
DCNV2_BATCH, DCNV2_DIM, CROSS_LAYERS, RANK = 65_536, 128, 3, 512
DCNV2_ADAGRAD = {"lr": 0.005, "initial_accumulator_value": 0.0, "eps": 1e-10}

TIMEOUT = datetime.timedelta(minutes=3)
"""After it NCCL ends the job where one process failed and the others wait for it. Compiling takes up to a minute."""

MEMORY = ("allocated", "reserved", "device")


# -------------------------------------------------------------------------------------------------- tables and batches

Ids = Sequence[np.ndarray]
"""The ids of each table, [samples, keys of a bag]."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The tables of a workload, the size of a batch, and where its ids come from."""

    name: str
    dim: int
    table_rows: Sequence[int]
    bag_sizes: Sequence[int]
    num_samples: int
    """Samples of a batch, on all devices together."""
    optimizer: str
    draw: Callable[[str, argparse.Namespace, slice], tuple[Sequence[Ids], int]]
    """Distribution, options, samples of this process -> its ids of each batch, distinct keys of a whole batch."""
    scaling: str = ""

    @property
    def num_keys(self) -> int:
        """The keys of a batch, on all devices together."""
        return self.num_samples * sum(self.bag_sizes)


def make_shape(name: str, options: argparse.Namespace, num_devices: int) -> Shape:
    """Returns the shape of a workload at the run's scale."""
    if name == DCNV2:
        bags = _synthetic_bags()
        rows = bags.scale_rows(options.scale)
        num_samples = 1 << max(8, round(math.log2(DCNV2_BATCH * options.scale)))
        draw = functools.partial(_draw_bags, rows, num_samples)
        return Shape(name, DCNV2_DIM, rows, bags.BAG_SIZES, num_samples, "adagrad", draw)
    scaling = options.scaling or ("weak" if name in workloads.MESH_WORKLOADS else "strong")
    workload = workloads.on_mesh(name).scale(options.scale).on_devices(num_devices, scaling)
    rows, sizes = [workload.num_rows] * workload.num_tables, [workload.hotness] * workload.num_tables
    draw = functools.partial(_draw_workload, workload)
    return Shape(name, workload.dim, rows, sizes, workload.num_bags, "rowwise_adagrad", draw, scaling)


def _draw_workload(workload: Workload, distribution: str, options: argparse.Namespace, mine: slice):
    key_sets = workloads.key_sets(workload, distribution, options.num_key_sets, options.seed)
    num_unique = round(sum(key_set.num_unique for key_set in key_sets) / len(key_sets))
    return [[ids[mine] for ids in key_set.ids] for key_set in key_sets], num_unique


def _draw_bags(rows: Sequence[int], num_samples: int, distribution: str, options: argparse.Namespace, mine: slice):
    """Draws bags as the files of `examples/train_dcnv2.py` have them.

    The first process also counts the distinct keys of the first batch.
    """
    bags = _synthetic_bags()
    if distribution not in ("uniform", "zipf1.05"):
        raise ValueError(f"{DCNV2} has uniform and zipf1.05 keys, got {distribution!r}.")
    num_mine = mine.stop - mine.start

    def draw(batch: int, start: int) -> Ids:
        """Draws the samples of a process; the others start elsewhere, so that none draws a whole batch."""
        rng = np.random.default_rng([options.seed, batch, start])
        tables = enumerate(zip(rows, bags.BAG_SIZES, strict=True))
        is_uniform = distribution == "uniform"
        return [bags.draw_bags(rng, num_mine, i, *table, is_uniform=is_uniform) for i, table in tables]

    num_unique = 0
    if mine.start == 0:
        parts = [draw(0, start) for start in range(0, num_samples, num_mine)]
        num_unique = sum(len(np.unique(np.concatenate(table))) for table in zip(*parts, strict=True))
    return [draw(batch, mine.start) for batch in range(options.num_key_sets)], num_unique


def _synthetic_bags():
    """Imports the examples' generator, which needs NumPy alone."""
    folder = str(pathlib.Path(__file__).resolve().parents[1] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import synthetic_bags

    return synthetic_bags


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


class DenseDcnv2(nn.Module):
    """The dense part of MLPerf's DLRM-DCNv2: parameters in float32, arithmetic in bfloat16."""

    def __init__(self, num_features: int, dim: int, device: torch.device):
        super().__init__()
        width = (num_features + 1) * dim
        self.bottom = _layers((NUM_DENSE, *BOTTOM, dim), device)
        self.cross = LowRankCrossNet(width, CROSS_LAYERS, RANK).to(device)
        self.top = _layers((width, *TOP, 1), device)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross entropy of the samples of this process; arguments as of `Dense`."""
        bottom = F.relu(_mlp(self.bottom, dense.to(torch.bfloat16)))
        x = first = torch.cat([bottom, embeddings.to(torch.bfloat16)], dim=1)
        # LowRankCrossNet.forward, with its parameters in bfloat16: under torch.autocast its sums would be float32.
        cross = self.cross
        for down, up, bias in zip(cross.V_kernels, cross.W_kernels, cross.bias, strict=True):
            x = first * F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype), bias.to(x.dtype)) + x
        logits = _mlp(self.top, x)[:, 0].float()
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

    def __init__(self, tables: EmbeddingBagCollection, dense: nn.Module):
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
        self.drawn: dict[tuple[str, str], tuple[Sequence[Ids], int]] = {}
        self.compile_modes: dict[type, str] = {}
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

    def has_time(self, what: str) -> bool:
        """Returns whether the time of the run is not over yet, in all processes alike."""
        if not self.options.time or self.most(time.perf_counter() - self.begin) < self.options.time:
            return True
        self.say(f"skipped {what}: out of time (--time)")
        return False

    def compile(self, dense: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
        """Has torch.compile compile a dense part; returns its mode, or "none" where a trial fails."""
        kind = type(dense)
        if kind not in self.compile_modes:
            self.compile_modes[kind] = self._try_to_compile(dense, inputs)
        mode = self.compile_modes[kind]
        if mode != "none":
            dense.compile(mode=mode, dynamic=False, fullgraph=True)
        return mode

    def _try_to_compile(self, dense: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
        """Returns the mode with which a replicated copy of a dense part can be compiled."""
        mode = self.options.compile_mode
        if mode == "none":
            return mode
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # It would go on without compiling, and not fail.
        why = ""
        try:
            trial = copy.deepcopy(dense)
            trial.compile(mode=mode, dynamic=False, fullgraph=True)
            # DistributedModelParallel replicates with these settings; they decide how the model is split into graphs.
            replicated = DistributedDataParallel(
                trial, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
            )
            for _ in range(2):
                replicated(*inputs).backward()
            self.wait()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"process {self.rank}: torch.compile FAILED, the dense part runs without it: {why}", flush=True)
        if self.most(bool(why)):
            self.failures.append(f"torch.compile of {type(dense).__name__}: {why or 'failed in another process'}"[:500])
            return "none"
        self.say(f"{type(dense).__name__}: torch.compile works, mode {mode}")
        return mode

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


class Plain:
    """The loop of training without a pipeline, over batches in turn; a call is a step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], peer: Peer):
        """Notes what a step needs."""
        self.model, self.optimizer, self.device = model, optimizer, peer.device
        self.batches = itertools.cycle(batches)
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        """Makes a step."""
        batch = next(self.batches).to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss, self.loss = self.model(batch)
        loss.backward()
        self.optimizer.step()

    def detach(self) -> None:
        """Leaves the model as it is."""


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
    """One workload on all GPUs, under one sharding, one wire and one dtype of keys."""

    def __init__(self, peer: Peer, shape: Shape, sharding: str, wire: str, key_dtype: str):
        """Notes what is measured; `shard_model` builds it."""
        self.peer, self.shape, self.sharding, self.wire, self.key_dtype = peer, shape, sharding, wire, key_dtype
        self.num_samples = shape.num_samples // peer.num_devices
        self.names = [f"t{i}" for i in range(len(shape.table_rows))]
        self.plan: dict[str, int] = {}
        self.compile_mode = ""
        self.batches_on = peer.options.batches or ("pinned" if shape.name == DCNV2 else "device")

    def __str__(self) -> str:
        keys = "" if self.key_dtype == "int64" else f" {self.key_dtype} keys"
        return f"{self.shape.name} {self.sharding} {self.wire}{keys}"

    def shard_model(self, wrap: Callable[[EmbeddingBagCollection], nn.Module]) -> DistributedModelParallel:
        """Returns a model around the tables, on all devices."""
        peer, shape = self.peer, self.shape
        tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=shape.dim,
                    num_embeddings=num_rows,
                    feature_names=[name],
                    pooling=PoolingType.SUM,
                )
                for name, num_rows in zip(self.names, shape.table_rows, strict=True)
            ],
        )
        registry = None
        if self.wire == "bfloat16":
            kind = CommType.BF16 if peer.is_gpu else CommType.FP16  # gloo has no bfloat16
            config = QCommsConfig(forward_precision=kind, backward_precision=kind)
            registry = get_qcomm_codecs_registry(config, device=peer.device)
        fused = OPTIMIZERS[shape.optimizer] | {"bounds_check_mode": BoundsCheckMode.NONE}
        if self.key_dtype != "int64":
            dtype = KEY_DTYPES[self.key_dtype]
            fused |= {"embedding_table_index_type": dtype, "embedding_table_offset_type": dtype}
        sharder = Sharder(fused_params=fused, qcomm_codecs_registry=registry)
        constraints = {
            name: ParameterConstraints(
                sharding_types=[kind.value for kind in SHARDINGS[self.sharding]],
                compute_kernels=[EmbeddingComputeKernel.FUSED.value],
                pooling_factors=[float(size)],
            )
            for name, size in zip(self.names, shape.bag_sizes, strict=True)
        }
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=peer.num_devices,
                local_world_size=peer.num_devices,
                compute_device=peer.device.type,
                hbm_cap=torch.cuda.mem_get_info()[1] if peer.is_gpu else None,
            ),
            batch_size=self.num_samples,
            constraints=constraints,
            debug=False,
        )
        model = wrap(tables)
        plan = peer.from_first(lambda: planner.plan(model, [sharder]))
        self.plan = dict(Counter(table.sharding_type for part in plan.plan.values() for table in part.values()))
        return DistributedModelParallel(module=model, device=peer.device, plan=plan, sharders=[sharder])

    def batches(self, distribution: str) -> tuple[list[Batch], int]:
        """Returns this process's part of each batch, and the number of distinct keys of a whole batch."""
        peer, shape, num = self.peer, self.shape, self.num_samples
        if (shape.name, distribution) not in peer.drawn:
            mine = slice(peer.rank * num, (peer.rank + 1) * num)
            peer.drawn[shape.name, distribution] = shape.draw(distribution, peer.options, mine)
        drawn, num_unique = peer.drawn[shape.name, distribution]
        rng = np.random.default_rng((peer.options.seed, peer.rank))
        dtype = KEY_DTYPES[self.key_dtype]
        made = []
        for ids in drawn:
            features = KeyedJaggedTensor(
                keys=self.names,
                values=torch.cat([torch.from_numpy(bags.reshape(-1)).to(dtype) for bags in ids]),
                lengths=torch.tensor(shape.bag_sizes, dtype=dtype).repeat_interleave(num),
                stride=num,
                length_per_key=[num * size for size in shape.bag_sizes],
            )
            dense = torch.from_numpy(rng.random((num, NUM_DENSE), np.float32))
            labels = torch.from_numpy(rng.integers(0, 2, num).astype(np.float32))
            batch = Batch(features, dense, labels)
            if self.batches_on == "device":
                batch = batch.to(peer.device)
            elif peer.is_gpu:
                batch = batch.pin_memory()
            made.append(batch)
        return made, num_unique

    def measure_tables(self, distributions: Sequence[str]) -> None:
        """Measures the lookup, and the step plain and pipelined."""
        peer = self.peer
        # The gradient is that of a sum over all samples, so it is not divided by the number of processes.
        comm_ops.set_gradient_division(False)
        model = self.shard_model(Tables)
        peer.say(f"{self}: {self.plan}")
        for distribution in distributions:
            batches, num_unique = self.batches(distribution)
            on_device = itertools.cycle([batch.to(peer.device) for batch in batches])

            def forward(on_device=on_device) -> None:
                with torch.no_grad():
                    model(next(on_device))

            def step(on_device=on_device) -> None:
                model(next(on_device))[0].backward()

            if "plain" in peer.options.programs:
                self._add(EVALUATION, distribution, num_unique, "plain", forward)
                self._add(STEP, distribution, num_unique, "plain", step)
            if "pipelined" in peer.options.programs:
                optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # the tables have their own
                pipelined = Pipelined(model, optimizer, batches, peer)
                self._add(STEP, distribution, num_unique, "pipelined", pipelined)
                pipelined.detach()

    def measure_dlrm(self, distributions: Sequence[str]) -> None:
        """Measures a whole step of a model."""
        peer, shape = self.peer, self.shape
        comm_ops.set_gradient_division(True)  # the loss is the mean over the samples of all processes
        kind, settings = (DenseDcnv2, DCNV2_ADAGRAD) if shape.name == DCNV2 else (Dense, DENSE_ADAGRAD)
        dense = kind(len(self.names), shape.dim, peer.device)
        width = len(self.names) * shape.dim
        embeddings = torch.zeros((self.num_samples, width), device=peer.device, requires_grad=True)
        numbers = torch.zeros((self.num_samples, NUM_DENSE), device=peer.device)
        self.compile_mode = peer.compile(dense, (embeddings, numbers, numbers[:, 0].contiguous()))
        del embeddings, numbers
        model = self.shard_model(lambda tables: Model(tables, dense))
        peer.say(f"{self} DLRM: {self.plan}")
        optimizer = torch.optim.Adagrad(dense.parameters(), foreach=True, **settings)
        for distribution in distributions:
            batches, num_unique = self.batches(distribution)
            for program in peer.options.programs:
                run = (Plain if program == "plain" else Pipelined)(model, optimizer, batches, peer)
                self._add(DLRM, distribution, num_unique, program, run)
                run.detach()
                if not torch.isfinite(run.loss):
                    raise RuntimeError(f"the loss is {run.loss.item()}.")

    def _add(self, what: str, distribution: str, num_unique: int, program: str, step: Callable[[], None]) -> None:
        """Measures a step, and records it."""
        peer, shape = self.peer, self.shape
        peer.reset_memory()
        timing = peer.measure_step(step)
        peaks = peer.peak_bytes()
        notes = {
            "scaling": shape.scaling,
            "num_samples": shape.num_samples,
            "num_rows": sum(shape.table_rows),
            "program": program,
            "wire": self.wire,
            "front_end": "torch",
            "sharding": self.sharding,
            "plan": self.plan,
            "batches": "device" if what != DLRM and program == "plain" else self.batches_on,
            "key_dtype": self.key_dtype,
            "samples_per_s": shape.num_samples / timing["ms"] * 1e3,
            "peak_bytes": peaks,
            "compile_mode": self.compile_mode,
            "device": peer.device_name,
            "versions": peer.versions,
        }
        words = [program, self.sharding]
        if shape.name == DCNV2:  # These records have a table of their own.
            notes |= {"part": "dcnv2", "rows": "float32", "wire": f"{self.wire}, {self.wire}"}
            notes |= {"num_devices": peer.num_devices}
        else:
            words = [shape.scaling, f"x{peer.num_devices}", *words] + [self.wire] * (self.wire != "float32")
        words += [f"{self.key_dtype} keys"] * (self.key_dtype != "int64")
        peer.add(
            {
                "workload": shape.name,
                "what": what,
                "subject": "torchrec",
                "timing": timing,
                "distribution": distribution,
                "optimizer": "" if what == EVALUATION else shape.optimizer,
                "variant": " ".join(words),
                "num_keys": shape.num_keys,
                "num_unique": num_unique,
                "num_devices": 0 if shape.name == DCNV2 else peer.num_devices,
                "notes": notes,
            }
        )


# ------------------------------------------------------------------------------------------------------ what is printed

COLUMNS = ("workload", "keys", "dtype", "what", "program", "sharding", "wire", "ms", "spread", "Msamples/s", "peak GiB")


def _row(record: dict[str, Any]) -> list[str]:
    notes, timing = record["notes"], record["timing"]
    peak = max(notes["peak_bytes"].get("allocated", [0]))
    return [
        record["workload"],
        record["distribution"],
        notes["key_dtype"],
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
        notes = record["notes"]
        key = (record["workload"], record["distribution"], record["what"], notes["wire"], notes["key_dtype"])
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
    add("--workloads", default="M1,W1,W5", help="those of workloads.py, or dcnv2")
    add("--keys", default="uniform,zipf1.05", help="distributions")
    add("--shardings", default=",".join(SHARDINGS))
    add("--wires", default=",".join(WIRES))
    add("--programs", default=",".join(PROGRAMS))
    add("--key-dtypes", default="int64", help=f"of {', '.join(KEY_DTYPES)}")
    add("--parts", default=",".join(PARTS), help="tables: lookup and step; dlrm: the whole step of a model")
    add("--scaling", choices=workloads.SCALINGS, help="default: weak for M1, strong for the others")
    add("--scale", type=float, default=1.0, help="share of the rows and samples")
    add("--batches", choices=("device", "pinned"), help="where batches lie (default: device; of dcnv2 pinned)")
    add("--compile-mode", default="default", help="of torch.compile on the dense part; none: not compiled")
    add("--repetitions", type=int, default=10)
    add("--warmups", type=int, default=3, help="rounds over all key sets")
    add("--batch-s", type=float, default=0.05, help="seconds of a repetition")
    add("--num-key-sets", type=int, default=3)
    add("--time", type=float, help="seconds after which no further combination is begun")
    add("--seed", type=int, default=0)
    add("--stop", action="store_true", help="end at the first failure")
    add("--out", type=pathlib.Path, help="a record a line")
    options = parser.parse_args(arguments)
    choices = {"shardings": SHARDINGS, "wires": WIRES, "programs": PROGRAMS, "key_dtypes": KEY_DTYPES, "parts": PARTS}
    for name, known in choices.items():
        chosen = [part.strip() for part in getattr(options, name).split(",") if part.strip()]
        for part in chosen:
            if part not in known:
                parser.error(f"--{name.replace('_', '-')}: got {part!r}, there are {', '.join(known)}")
        setattr(options, name, chosen)
    names = [part.strip() for part in options.workloads.split(",") if part.strip()]
    others = ",".join(name for name in names if name != "dcnv2")
    options.workloads = [*(workloads.select(others) if others else ()), *([DCNV2] if "dcnv2" in names else ())]
    options.keys = [part.strip() for part in options.keys.split(",") if part.strip()]
    return options


def main() -> None:
    """Measures what the command line names; the first process prints the table last."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    options = parse()
    peer = Peer(options)
    for name in options.workloads:
        shape = make_shape(name, options, peer.num_devices)
        for part, key_dtype in itertools.product(options.parts, options.key_dtypes):
            if part == "dlrm" and name not in DLRM_WORKLOADS:
                continue
            for sharding, wire in itertools.product(options.shardings, options.wires):
                if peer.num_devices == 1 and (sharding, wire) != ("table_wise", "float32"):
                    continue  # nothing is sent
                sharded = Sharded(peer, shape, sharding, wire, key_dtype)
                measure = sharded.measure_tables if part == "tables" else sharded.measure_dlrm
                if peer.has_time(f"{sharded} {part}"):
                    peer.attempt(f"{sharded} {part}", lambda measure=measure: measure(options.keys))
    if peer.rank == 0:
        for failure in peer.failures:
            print(f"FAILED {failure}")
        print(table(peer.records), flush=True)
    dist.destroy_process_group()
    if peer.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""NVIDIA's dynamicemb with rows in host memory and a cache on the device: a process of its own, as it imports no JAX.

Question: what does the nearest library on GPUs take for the steps of `bench_tiers.py`?
Workload: that of `bench_tiers.py` with rowwise Adagrad, with its ids and its shares of rows in the cache.
Limit:    that of jaxsok's step there.
Command:  `python -m jaxsok bench --only tiers` starts it first where torch and dynamicemb can be imported; the folders
          that `JAXSOK_DYNAMICEMB` names are searched for them before all others, in this process alone.
Last result: none.

Two things are timed, each as wall time of steps back to back. "DLRM step" is what jaxsok's record of that name is:
lookup, the model of `dlrm.py` in PyTorch (eager, matrices in bfloat16, Adagrad), its gradients, and the update of the
rows. "forward + update" is dynamicemb alone: forward, backward with a given gradient, and its fused optimizer. Each is
timed as calls of the module, and with its prefetch: while a step runs, the rows of the next one are brought in on a
stream of their own, called between forward and backward, as the pipeline of its examples does.

All rows are inserted into host memory before anything is timed, into a table that is 62% full, since a full bucket
drops a row. The cache is the module's: the least recently used row of a bucket leaves, the rows are rounded up to
buckets of 1,024, and 3,072 rows of overflow a table come on top, which are 15% more at a share of 2%. It is warmed from
the rarest to the most frequent row. All shares have one module, whose cache alone is replaced, in the way in which its
constructor makes it, because host memory takes long to pin.
"""

import argparse
import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import json
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.key_value_table import DynamicEmbCache
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from . import workloads
from .workloads import Workload

DEVICE = torch.device("cuda:0")

LEARNING_RATE = 0.01

LOAD = 0.625
"""Rows over slots of the table in host memory: buckets of 128 then hold all rows (5 standard deviations)."""

STORAGE_BUCKET, CACHE_BUCKET = 128, 1024
"""Rows of a bucket: the default of tables, and what the library takes for caches."""

WARM_IDS = 1 << 14
"""Ids of each table in one step that warms the cache, at most."""

INSERTED_ROWS = 1 << 20
"""Rows of one insertion into host memory, over all tables."""

NUM_BATCHES = 80
"""Batches that fill the cache, as in `bench_tiers.py`; the first part is timed on as many."""

METRIC_STEPS = 8
"""Steps whose hits are counted, after the others: counting waits for the device."""

NUM_DENSE, BOTTOM, TOP = 13, (512, 256), (1024, 1024, 512, 256)
"""The sizes of `dlrm.py`."""

DLRM, STEP = "DLRM step", "forward + update"
"""The names of `records.py`."""


def parts_of(num_batches: int) -> list[tuple[str, bool, int]]:
    """Returns the measurements: each a part to time, whether with prefetch, and the number of batches.

    Every step has batches of its own, since a cache keeps the keys it has seen; the first part has jaxsok's.
    """
    half = num_batches // 2
    return [(DLRM, False, num_batches), (DLRM, True, half), (STEP, False, half), (STEP, True, half)]


class Dense(torch.nn.Module):
    """The dense part of DLRM."""

    def __init__(self, num_features: int, dim: int):
        super().__init__()
        self._dim, num_vectors = dim, num_features + 1
        pairs = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("_positions", pairs[0] * num_vectors + pairs[1])
        self.bottom = _layers((NUM_DENSE, *BOTTOM, dim))
        self.top = _layers((pairs.shape[1] + dim, *TOP, 1))

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss; embeddings are [num_samples, num_features, dim]."""
        with torch.autocast(dense.device.type, torch.bfloat16):
            bottom = _run(self.bottom, dense).relu()
            vectors = torch.cat([bottom[:, None], embeddings.to(bottom.dtype)], dim=1)
            products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
            # Pairs are chosen in the weights, as in dlrm.py.
            first, *rest = self.top
            of_pairs = first.weight.new_zeros(first.out_features, products.shape[1])
            of_pairs = of_pairs.index_copy(1, self._positions, first.weight[:, self._dim :])
            weights = torch.cat([first.weight[:, : self._dim], of_pairs], dim=1)
            hidden = torch.nn.functional.linear(torch.cat([bottom, products], dim=1), weights, first.bias).relu()
            logits = _run(rest, hidden)[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)


def _layers(widths: Sequence[int]) -> torch.nn.ModuleList:
    return torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)])


def _run(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(layers):
        x = layer(x)
        if number < len(layers) - 1:
            x = x.relu()
    return x


class Bench:
    """One module with all rows of a workload, and the model."""

    def __init__(self, workload: Workload, share: float | None):
        """Makes and fills the tables; with a share of None all rows lie on the device."""
        self.workload = workload
        num_slots = -(-int(workload.num_rows / LOAD) // STORAGE_BUCKET) * STORAGE_BUCKET
        row_bytes = 4 * workload.dim + 16  # Rowwise Adagrad takes 16 bytes of a row.
        on_device = sys.maxsize if share is None else self.cache_rows(share) * row_bytes
        options = [
            DynamicEmbTableOptions(
                index_type=torch.int64,
                embedding_dtype=torch.float32,
                dim=workload.dim,
                max_capacity=num_slots,
                local_hbm_for_values=on_device,
                bucket_capacity=STORAGE_BUCKET,
                initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL),
                score_strategy=DynamicEmbScoreStrategy.TIMESTAMP,
                caching=share is not None,
            )
            for _ in range(workload.num_tables)
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # The constructor prints a table of its memory.
            self.module = BatchedDynamicEmbeddingTablesV2(
                table_options=options,
                table_names=[f"t{number}" for number in range(workload.num_tables)],
                pooling_mode=DynamicEmbPoolingMode.SUM,
                output_dtype=torch.float32,
                device=DEVICE,
                bounds_check_mode=BoundsCheckMode.NONE,
                optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                stochastic_rounding=False,
                learning_rate=LEARNING_RATE,
                eps=1e-8,
                prefetch_pipeline=share is not None,
            )
        if (self.module.cache is None) != (share is None):
            raise RuntimeError(f"dynamicemb: with a share of {share} its cache is {self.module.cache}.")
        self.module.train()
        self._fill()
        self._side = torch.cuda.Stream()
        self._offsets = torch.arange(workload.num_tables * workload.num_bags + 1, device=DEVICE)
        self._dense = Dense(workload.num_tables, workload.dim).to(DEVICE)
        self._optimizer = torch.optim.Adagrad(self._dense.parameters(), lr=0.01)
        self._inputs = torch.rand(workload.num_bags, NUM_DENSE, device=DEVICE)
        self._labels = (torch.arange(workload.num_bags, device=DEVICE) % 2).float()
        self._gradient = torch.empty(workload.num_bags, workload.num_tables * workload.dim, device=DEVICE)
        self._gradient.uniform_(-0.05, 0.05)
        self.loss = self._gradient.new_zeros(())

    def cache_rows(self, share: float) -> int:
        """Returns the cached rows of each table, before the library rounds them up to buckets."""
        return max(1, int(share * self.workload.num_rows))

    def _fill(self) -> None:
        """Inserts all rows; the first float of a row states its id."""
        workload, storage = self.workload, self.module.tables
        width, count = storage.value_dim(0), max(1, INSERTED_ROWS // workload.num_tables)
        table_ids = torch.arange(workload.num_tables, device=DEVICE)
        for begin in range(0, workload.num_rows, count):
            ids = torch.arange(begin, min(begin + count, workload.num_rows), device=DEVICE)
            values = torch.zeros(workload.num_tables * len(ids), width, device=DEVICE)
            values[:, 1 : workload.dim].normal_(0, 0.01)
            values[:, 0] = (ids / workload.num_rows).repeat(workload.num_tables)
            storage.insert(ids.repeat(workload.num_tables), table_ids.repeat_interleave(len(ids)), values)
        torch.cuda.synchronize()
        held, wanted = int(storage.size()), workload.num_tables * workload.num_rows
        if held < 0.9999 * wanted:
            raise RuntimeError(f"dynamicemb: {held:,} of {wanted:,} rows are in its tables.")

    def set_cache(self, share: float) -> None:
        """Replaces the cache by an empty one with this share of the rows, and resets all rows to inserted values."""
        module = self.module
        torch.cuda.synchronize()
        module._prefetch_states.clear()
        module._prefetch_outstanding_keys.zero_()
        module._cache = None
        gc.collect()
        options = copy.deepcopy(module._dynamicemb_options)
        for option in options:
            option.bucket_capacity = CACHE_BUCKET
            option.max_capacity = option.init_capacity = self.cache_rows(share)
        module._cache = DynamicEmbCache(options, module.optimizer)
        self._fill()

    def warm(self, share: float | None) -> None:
        """Looks up the most frequent rows that fill the cache, the rarest first, without changing them."""
        num_rows, num_tables = self.workload.num_rows, self.workload.num_tables
        end = num_rows if share is None else self.cache_rows(share)
        count = max(1, min(WARM_IDS, end // 2))  # The rows of a step must fit at once.
        offsets = torch.arange(num_tables * count + 1, device=DEVICE)
        for begin in reversed(range(0, end, count)):
            ranks = np.arange(begin, begin + count, dtype=np.int64) % num_rows
            ids = torch.from_numpy(ranks * workloads.SCATTER % num_rows).to(DEVICE)
            embeddings = self.module(ids.repeat(num_tables), offsets)
            embeddings.backward(torch.zeros_like(embeddings))
        torch.cuda.synchronize()

    def check(self, ids: torch.Tensor) -> None:
        """Compares the rows of a lookup with the inserted rows; no row has changed yet."""
        workload = self.workload
        embeddings = self.module(ids, self._offsets)
        embeddings.backward(torch.zeros_like(embeddings))
        found = embeddings.detach().view(workload.num_bags, workload.num_tables, workload.dim)[:, :, 0].T.reshape(-1)
        difference = (found - ids / workload.num_rows).abs().max().item()
        if not difference < 1e-5:
            raise RuntimeError(f"dynamicemb: embeddings differ by {difference} from the rows that were inserted.")

    def run(self, what: str, batches: Sequence[torch.Tensor], following: torch.Tensor | None = None) -> None:
        """Dispatches a step for each batch.

        Args:
          what: `DLRM` or `STEP`.
          batches: ids, table after table.
          following: the batch to bring in at the end, if steps bring in the next one; the first was brought in before.
        """
        ahead = batches[1:] if following is None else [*batches[1:], following]
        for number, ids in enumerate(batches):
            if following is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            embeddings = self.module(ids, self._offsets)
            result = embeddings if what == STEP else self._loss(embeddings)
            if following is not None:
                self.prefetch(ahead[number])
            if what == STEP:
                result.backward(self._gradient)
            else:
                self._optimizer.zero_grad(set_to_none=True)
                result.backward()
                self._optimizer.step()
                self.loss = result.detach()

    def _loss(self, embeddings: torch.Tensor) -> torch.Tensor:
        workload = self.workload
        embeddings = embeddings.view(workload.num_bags, workload.num_tables, workload.dim)
        return self._dense(embeddings, self._inputs, self._labels)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Brings in the rows of a batch, on a separate stream."""
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self._side):
            self.module.prefetch(ids, self._offsets, main)
        for array in vars(self.module._prefetch_states[-1]).values():
            if isinstance(array, torch.Tensor) and array.is_cuda:
                array.record_stream(main)  # Allocated on one stream, used and freed on the other.

    def measure(
        self, what: str, with_prefetch: bool, batches: Sequence[torch.Tensor], following: torch.Tensor
    ) -> tuple[list[float], int]:
        """Returns the milliseconds of a step for each eighth of the batches, and the number of these steps."""
        size, samples = max(1, len(batches) // 8), []
        if with_prefetch:
            self._side.wait_stream(torch.cuda.current_stream())
            self.prefetch(batches[0])
        torch.cuda.synchronize()
        for begin in range(0, len(batches) - size + 1, size):
            ahead = [*batches, following][begin + size] if with_prefetch else None
            start = time.perf_counter()
            self.run(what, batches[begin : begin + size], ahead)
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) * 1e3 / size)
        if with_prefetch:
            self.run(what, [following])  # A prefetched batch must be used.
            torch.cuda.synchronize()
        return samples, size

    def count(self, batches: Sequence[torch.Tensor]) -> dict[str, int]:
        """Counts a step's distinct rows: those in the cache, those read from host memory, and those written to it."""
        cache = self.module.cache
        if cache is None:
            return {}
        self.module.set_record_cache_metrics(True)
        sums = np.zeros(4)
        for ids in batches:
            cache.cache_metrics.zero_()
            self.run(STEP, [ids])
            sums += cache.cache_metrics[:4].numpy()
        self.module.set_record_cache_metrics(False)
        num_unique, num_hits, _, num_written = (round(total) for total in (sums / len(batches)).tolist())
        return {"num_hits": num_hits, "num_fetched": num_unique - num_hits, "num_written": num_written}


def measure_share(
    bench: Bench, share: float | None, num_batches: int, batches: Sequence[torch.Tensor], say: Callable[[str], None]
) -> list[dict]:
    """Warms the cache, then times all parts; returns the records."""
    begin, position = time.perf_counter(), num_batches
    bench.warm(share)
    bench.check(batches[0])
    bench.run(DLRM, batches[:position])
    loss = bench.loss.item()
    if not np.isfinite(loss):
        raise RuntimeError(f"dynamicemb: the loss is {loss}.")
    say(f"cache of {share}: warm in {time.perf_counter() - begin:.1f} s, loss {loss:.3f}")
    found = []
    for what, with_prefetch, count in parts_of(num_batches):
        if with_prefetch and bench.module.cache is None:
            continue  # There is nothing to bring in.
        end = position + count
        samples, size = bench.measure(what, with_prefetch, batches[position:end], batches[end])
        position, by = end + 1, "prefetch" if with_prefetch else ""
        say(f"cache of {share}, {what} {by}: {np.median(samples):.4g} ms")
        found.append(dict(what=what, by=by, share=share, samples_ms=samples, dispatches=size))
    moved = bench.count(batches[-METRIC_STEPS:])
    say(f"cache of {share}: rows of a step {moved}")
    return [record | {"moved": moved} for record in found]


def main() -> None:
    """Measures the parts that the command line names, and writes the results after every share."""
    parser = argparse.ArgumentParser(description="dynamicemb with tables in host memory.")
    parser.add_argument("--workload", default="M1")
    parser.add_argument("--num-rows", type=int, default=1_000_000)
    parser.add_argument("--shares", default="0.5,0.1,0.02", help="comma-separated; all rows on the device come first")
    parser.add_argument("--num-batches", type=int, default=NUM_BATCHES)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    start, num_batches = time.perf_counter(), arguments.num_batches
    found: dict[str, Any] = {"records": [], "failures": [], "about": {"torch": torch.__version__}}

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] dynamicemb: {line}", flush=True)

    workload = dataclasses.replace(workloads.on_mesh(arguments.workload), num_rows=arguments.num_rows)
    workload = workload.scale(arguments.scale)
    num_drawn = num_batches + sum(count + 1 for _, _, count in parts_of(num_batches)) + METRIC_STEPS
    drawn = workloads.draw_batches(workload, "zipf1.05", num_drawn, arguments.seed)
    batches = [torch.from_numpy(ids.reshape(-1)).to(DEVICE, torch.int64) for ids in drawn]
    say(f"{num_drawn} batches drawn")
    for shares in ([None], [float(share) for share in arguments.shares.split(",")]):
        bench = None
        for share in shares:
            try:
                if bench is None:
                    bench = Bench(workload, share)
                elif share is not None:
                    bench.set_cache(share)
                say(f"cache of {share}: all rows are in the tables")
                found["records"] += measure_share(bench, share, num_batches, batches, say)
            except Exception as error:
                traceback.print_exc()
                why = f"{type(error).__name__}: {error}"[:2000]
                found["failures"].append({"what": f"dynamicemb with a cache of {share}", "why": why})
            arguments.out.write_text(json.dumps(found))
        del bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

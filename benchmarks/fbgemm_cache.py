"""FBGEMM's cache on the device over tables in unified memory, forward only: a process of its own without JAX.

Question: what does the cache cost that PyTorch users have for tables that do not fit the device?
Workload: that of `bench_cache.py`: the same ids, of which the same share is in the cache.
Limit:    that of `bench_cache.py`.
Command:  `python -m jaxsok bench --only cache` starts it first where torch and fbgemm_gpu can be imported; by hand:
          `python -m benchmarks.fbgemm_cache --out fbgemm_cache.json`.
Last result: docs/results/serving.md (one H200, commit f1daeda).

Tables are `MANAGED_CACHING` with `cache_load_factor` 0.1 and its LRU; each forward brings the missed rows before it
reads. Measured with managed memory, the module's default, and with host memory that the device maps. Ids come from
pinned memory in each call. Bounds checks are off.
"""

import argparse
import gc
import json
import pathlib
import time
import warnings

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from .workloads import CACHE_DIM, CACHE_HIT_RATES, CACHE_ROWS, CACHE_SHARE, CachedIds, cache_keys

MEMORY = {"managed memory": False, "mapped host memory": True}
LOOKUPS = 40


def table(num_rows: int, is_mapped: bool) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Returns a table in unified memory, float32, with a cache of a tenth of its rows."""
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, CACHE_DIM, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)],
        cache_algorithm=CacheAlgorithm.LRU,
        cache_load_factor=CACHE_SHARE,
        gather_uvm_cache_stats=True,
        weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32,
        optimizer=EmbOptimType.EXACT_SGD,
        stochastic_rounding=False,
        pooling_mode=PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.NONE,
        uvm_host_mapped=is_mapped,
        device=torch.device("cuda"),
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    module.gather_uvm_cache_stats = False  # while times are taken
    return module


def measure(module: SplitTableBatchedEmbeddingBagsCodegen, stream: CachedIds, num_keys: int, hit_rate: float):
    """Returns milliseconds of single calls, those of calls back to back, and the hit rate that was seen."""
    offsets = torch.arange(num_keys + 1, device="cuda", dtype=torch.int64)

    def draw() -> torch.Tensor:
        return torch.from_numpy(stream.take(num_keys, hit_rate)).pin_memory()

    def call(ids: torch.Tensor) -> None:
        with torch.no_grad():
            module(ids.to("cuda", non_blocking=True), offsets)

    def in_turn() -> float:
        batches = [draw() for _ in range(LOOKUPS)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for ids in batches:
            call(ids)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / LOOKUPS

    for _ in range(stream.num_warm_ups(num_keys, hit_rate)):
        call(draw())
    torch.cuda.synchronize()
    alone = []
    for ids in [draw() for _ in range(LOOKUPS)]:
        begin = time.perf_counter()
        call(ids)
        torch.cuda.synchronize()
        alone.append((time.perf_counter() - begin) * 1e3)
    back_to_back_ms = in_turn()
    module.gather_uvm_cache_stats = True
    module.reset_uvm_cache_stats()
    in_turn()
    _, _, num_unique, num_missed, *_ = module.get_uvm_cache_stats().tolist()
    module.gather_uvm_cache_stats = False
    return alone, back_to_back_ms, 1.0 - num_missed / num_unique if num_unique else None


def main() -> None:
    """Measures each number of keys and hit rate in both kinds of memory, and writes after each."""
    parser = argparse.ArgumentParser(description="FBGEMM's UVM cache on the workload of bench_cache.py.")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*lazy loading.*")
    num_rows, records, failures = max(4096, round(CACHE_ROWS * options.scale)), [], []
    for by, is_mapped in MEMORY.items():
        module = table(num_rows, is_mapped)
        stream = CachedIds(num_rows, int(CACHE_SHARE * num_rows), options.seed)
        for num_keys in cache_keys(options.scale):
            for hit_rate in CACHE_HIT_RATES:
                label = f"FBGEMM's cache, {by}, {num_keys} keys, {hit_rate:.0%}"
                try:
                    alone, back_to_back_ms, seen = measure(module, stream, num_keys, hit_rate)
                    print(
                        f"{label}: {sorted(alone)[len(alone) // 2]:.4g} ms, {back_to_back_ms:.4g} in turn", flush=True
                    )
                    records.append(
                        dict(
                            by=by,
                            num_keys=num_keys,
                            wanted=hit_rate,
                            hit_rate=seen,
                            samples_ms=alone,
                            back_to_back_ms=back_to_back_ms,
                        )
                    )
                except Exception as error:
                    failures.append({"what": label, "why": f"{type(error).__name__}: {error}"[:2000]})
                    print(f"{label} FAILED: {error}", flush=True)
                about = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
                options.out.write_text(json.dumps({"records": records, "failures": failures, "about": about}))
        del module
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

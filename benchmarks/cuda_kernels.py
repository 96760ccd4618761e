"""Plain CUDA kernels, run by CuPy if it is installed: the limits without the cost of a framework.

Each kernel does one thing: gather rows, read-modify-write rows, read one line a key, read a line and then the row that
it names, or nothing.
Fed by `limits.py` and `bench_small.py`. Not here: the choice of the limit among several methods.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .timing import Protocol, Timing, summary


def load_kernels(dim: int) -> "CudaKernels | None":
    """Returns the kernels, or None on a CPU, without CuPy, or for rows that are not whole 16-byte pieces."""
    if jax.default_backend() == "cpu" or dim % 4:
        return None
    try:
        import cupy
    except ImportError:
        return None
    return CudaKernels(cupy)


_CUDA_SOURCE = r"""
// One thread, one 16-byte piece of one bag; `pieces` threads side by side read one row.
// Thread i writes out[i] and nothing else; the output is streamed past the cache, the rows are not.
extern "C" __global__ void Gather(const float4* table, const int* rows, float4* out, long long num_bags, int hotness,
                                  int pieces) {
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long bag = i / pieces;
  if (bag >= num_bags) return;
  const int piece = i - bag * pieces;
  float4 sum = table[rows[bag * hotness] * static_cast<long long>(pieces) + piece];
#pragma unroll 4
  for (int h = 1; h < hotness; ++h) {
    const float4 row = table[rows[bag * hotness + h] * static_cast<long long>(pieces) + piece];
    sum.x += row.x;
    sum.y += row.y;
    sum.z += row.z;
    sum.w += row.w;
  }
  __stcs(out + i, sum);
}

// One thread, one 16-byte piece of one row; no row occurs twice, so no two threads meet.
extern "C" __global__ void ReadModifyWrite(float4* table, const int* rows, const float4* gradients, long long num_rows,
                                           int pieces) {
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long at = i / pieces;
  if (at >= num_rows) return;
  const float4 gradient = __ldcs(gradients + i);
  float4* piece = table + rows[at] * static_cast<long long>(pieces) + (i - at * pieces);
  float4 row = *piece;
  row.x += gradient.x;
  row.y += gradient.y;
  row.z += gradient.z;
  row.w += gradient.w;
  *piece = row;
}

// One thread, one 64-byte line, four bytes out.
extern "C" __global__ void Probe(const float4* lines, const int* rows, float* out, long long num_keys) {
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i >= num_keys) return;
  const float4* line = lines + rows[i] * 4LL;
  const float4 a = line[0], b = line[1], c = line[2], d = line[3];
  out[i] = a.x + b.x + c.x + d.x;
}

// A warp, 32 keys: each lane reads the line of its key, then all copy the rows, a 16-byte piece a lane at a time. Lines
// are zeros; that a row's number waits for its line is what counts.
extern "C" __global__ void LineAndGather(const int4* lines, const float4* table, const int* rows, float4* out,
                                         long long num_keys, long long num_lines, int pieces) {
  const int lane = threadIdx.x % 32;
  const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x - lane;
  int row = 0;
  if (first + lane < num_keys) {
    row = rows[first + lane];
    const unsigned int spread = row * 0x9E3779B1u;
    const int4* line = lines + (static_cast<unsigned long long>(spread) * num_lines >> 32) * 4;
    const int4 a = line[0], b = line[1], c = line[2], d = line[3];
    row += a.x + b.x + c.x + d.x;
  }
#pragma unroll 8
  for (int i = 0; i < pieces; ++i) {
    const int at = i * 32 + lane;
    const int from = at / pieces;
    const long long piece = __shfl_sync(~0u, row, from) * static_cast<long long>(pieces) + at % pieces;
    if (first + from < num_keys) __stcs(out + first * pieces + at, table[piece]);
  }
}

// What a launch costs when there is nothing to do.
extern "C" __global__ void Nothing() {}
"""

_BLOCK = 256


class CudaKernels:
    """A launcher of the kernels on the buffers of JAX arrays, which nothing else may read during the call."""

    def __init__(self, cupy: Any):
        """Names the kernels; each is compiled at its first launch."""
        self._cupy = cupy
        self._gather = cupy.RawKernel(_CUDA_SOURCE, "Gather")
        self._read_modify_write = cupy.RawKernel(_CUDA_SOURCE, "ReadModifyWrite")
        self._probe = cupy.RawKernel(_CUDA_SOURCE, "Probe")
        self._line_and_gather = cupy.RawKernel(_CUDA_SOURCE, "LineAndGather")
        self._nothing = cupy.RawKernel(_CUDA_SOURCE, "Nothing")

    def gather(self, table: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol) -> Timing:
        """Gathers rows [num_bags, hotness] of a table and adds up each bag; checks the result against XLA's."""
        num_bags, hotness = row_sets[0].shape
        pieces = table.shape[1] // 4
        out = jnp.full((num_bags, table.shape[1]), jnp.nan, jnp.float32)

        def arguments(rows):
            return (*self._pointers(table, rows, out), *self._integers(num_bags), *self._small(hotness, pieces))

        timing = self._time(self._gather, num_bags * pieces, table, row_sets, out, arguments, protocol)
        want = table.at[row_sets[0][:1000]].get(mode="promise_in_bounds").sum(axis=1)
        self._gather((self._blocks(num_bags * pieces),), (_BLOCK,), arguments(row_sets[0]))
        self._cupy.cuda.Device().synchronize()
        if not bool(jnp.allclose(jnp.asarray(out)[:1000], want, rtol=1e-5, atol=1e-6)):
            raise RuntimeError("limits: the CUDA gather and XLA's disagree; its time would mean nothing.")
        return timing

    def read_modify_write(
        self, table: jax.Array, gradients: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol
    ) -> Timing:
        """Adds a gradient to rows that occur once each."""
        pieces = table.shape[1] // 4
        num_rows = row_sets[0].shape[0]

        def arguments(rows):
            return (*self._pointers(table, rows, gradients), *self._integers(num_rows), *self._small(pieces))

        return self._time(self._read_modify_write, num_rows * pieces, table, row_sets, gradients, arguments, protocol)

    def probe(self, lines: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol) -> Timing:
        """Reads one line of 64 bytes for each number in `row_sets`."""
        num_keys = row_sets[0].shape[0]
        out = jnp.full((num_keys,), jnp.nan, jnp.float32)

        def arguments(rows):
            return (*self._pointers(lines, rows, out), *self._integers(num_keys))

        return self._time(self._probe, num_keys, lines, row_sets, out, arguments, protocol)

    def line_and_gather(
        self, lines: jax.Array, table: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol
    ) -> Timing:
        """Reads a line of 64 bytes, then a row, for each of [num_keys]; checks the rows against the table."""
        num_keys = row_sets[0].shape[0]
        pieces = table.shape[1] // 4
        out = jnp.full((num_keys, table.shape[1]), jnp.nan, jnp.float32)

        def arguments(rows):
            sizes = (*self._integers(num_keys, lines.shape[0]), *self._small(pieces))
            return (*self._pointers(lines, table, rows, out), *sizes)

        timing = self._time(self._line_and_gather, num_keys, (lines, table), row_sets, out, arguments, protocol)
        self._line_and_gather((self._blocks(num_keys),), (_BLOCK,), arguments(row_sets[0]))
        self._cupy.cuda.Device().synchronize()
        if not bool((out[-1000:] == table[row_sets[0][-1000:]]).all()):
            raise RuntimeError("limits: the CUDA kernel copied other rows than XLA; its time would mean nothing.")
        return timing

    def nothing(self, num_kernels: int, protocol: Protocol) -> Timing:
        """Launches this many kernels that do nothing, in sequence, replayed as a CUDA graph: the floor of a program."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            self._nothing((1,), (32,), ())  # A capture needs a loaded kernel.
            stream.synchronize()
            stream.begin_capture()
            for _ in range(num_kernels):
                self._nothing((1,), (32,), ())
            graph = stream.end_capture()
            return self._batches(lambda: graph.launch(stream), 1, protocol)

    def _time(self, kernel, num_threads, table, row_sets, other, arguments, protocol) -> Timing:
        """Times batches of launches by device events, in the protocol of `timing.py`."""
        jax.block_until_ready((table, list(row_sets), other))
        prepared = [arguments(rows) for rows in row_sets]
        grid = (self._blocks(num_threads),)
        rotation = itertools.cycle(prepared)
        return self._batches(lambda: kernel(grid, (_BLOCK,), next(rotation)), len(prepared), protocol)

    def _batches(self, launch: Callable[[], Any], num_sets: int, protocol: Protocol) -> Timing:
        def batch(count):
            begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            begin.record()
            for _ in range(count):
                launch()
            end.record()
            end.synchronize()
            return self._cupy.cuda.get_elapsed_time(begin, end)

        for _ in range(protocol.warmups):
            batch(num_sets)
        count = protocol.dispatches(batch(20) / 20 * 1e-3)
        return summary([batch(count) / count for _ in range(protocol.repetitions)], count)

    def _pointers(self, *arrays):
        return [np.uint64(array.unsafe_buffer_pointer()) for array in arrays]

    def _integers(self, *values):
        return [np.int64(value) for value in values]

    def _small(self, *values):
        return [np.int32(value) for value in values]

    @staticmethod
    def _blocks(num_threads: int) -> int:
        return -(-num_threads // _BLOCK)

// touch on a GPU (table.h says what).
#include <algorithm>

#include "launch_cuda.cuh"
#include "table.h"

namespace jaxsok {
namespace {

/// Lanes whose row the others of a warp are compared with, before each writes for itself.
constexpr int kLeaders = 4;

// One thread, one position, grid-stride. A hot key stands in many lanes of every warp, whose additions to one word
// would come one after the other: the rows of a few lanes are compared with those of all, and where they meet one lane
// writes for all of them. (To match all lanes with all costs more than the additions of rows that are not hot.)
// Frequencies are added to atomically; whoever writes a last_step writes the same clock.
__global__ void __launch_bounds__(kBlock)
    TouchKernel(const __grid_constant__ StatisticsView statistics, const uint32_t* row_ids, const uint32_t* uses,
                int64_t num_keys, const uint32_t* clock) {
  const uint32_t now = __ldg(clock);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t stride = int64_t{gridDim.x} * kBlock;
  // Warps go on as a whole, so that all lanes meet in the votes.
  for (int64_t first = int64_t{blockIdx.x} * kBlock + threadIdx.x - lane; first < num_keys; first += stride) {
    const int64_t i = first + lane;
    const uint32_t row_id = i < num_keys ? __ldg(row_ids + i) : kNoRow;
    uint32_t sum = uses != nullptr && i < num_keys ? __ldg(uses + i) : 1;
    bool writes = row_id < statistics.capacity;
#pragma unroll
    for (int l = 0; l < kLeaders; ++l) {
      const uint32_t row_of_leader = __shfl_sync(~0u, row_id, l * (kWarp / kLeaders));
      const unsigned peers = __ballot_sync(~0u, writes && row_id == row_of_leader);
      if (__popc(peers) < 2) continue;  // the same for all lanes
      const bool is_peer = (peers >> lane & 1) != 0;
      const uint32_t all = __reduce_add_sync(~0u, is_peer ? sum : 0);
      if (!is_peer) continue;
      writes = lane == __ffs(static_cast<int>(peers)) - 1;
      sum = all;
    }
    if (!writes) continue;
    RowStatistics* line = statistics.data.At(statistics.starts, row_id, 1);
    atomicAdd(&line->frequency, sum);
    line->last_step = now;
  }
}

}  // namespace

LaunchError LaunchTouch(Stream stream, const StatisticsView& statistics, const uint32_t* row_ids, const uint32_t* uses,
                        int64_t num_keys, const uint32_t* clock) {
  if (num_keys == 0) return nullptr;
  const int64_t blocks = std::min<int64_t>(CeilDiv<int64_t>(num_keys, kBlock), kManyBlocks);
  TouchKernel<<<static_cast<unsigned>(blocks), kBlock, 0, stream>>>(statistics, row_ids, uses, num_keys, clock);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return nullptr;
}

}  // namespace jaxsok

// touch on a GPU (table.h has the contract).
#include "launch_cuda.cuh"
#include "table.h"

namespace jaxsok {
namespace {

// One thread, one position, grid-stride; of the lanes of a warp with one row the first adds up and writes for all: a
// hot key occurs in many lanes of every warp, whose additions to one word would be serialised. Frequencies are counted
// atomically; all writers of a last_step write the same clock.
__global__ void __launch_bounds__(kBlock)
    TouchKernel(const __grid_constant__ StatisticsView statistics, const uint32_t* row_ids, const uint32_t* uses,
                int64_t num_keys, const uint32_t* clock) {
  const uint32_t now = __ldg(clock);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t stride = int64_t{gridDim.x} * kBlock;
  // Warps iterate as a whole, so that all lanes take part in the vote.
  for (int64_t first = int64_t{blockIdx.x} * kBlock + threadIdx.x - lane; first < num_keys; first += stride) {
    const int64_t i = first + lane;
    const uint32_t row_id = i < num_keys ? __ldg(row_ids + i) : kNoRow;
    const unsigned peers = __match_any_sync(~0u, row_id);
    if (row_id >= statistics.capacity) continue;  // its peers skip it too, so no lane waits for them
    uint32_t sum = static_cast<uint32_t>(__popc(peers));
    if (uses != nullptr) {
      sum = __ldg(uses + i);
      if (peers != 1u << lane) sum = __reduce_add_sync(peers, sum);
    }
    if (lane != __ffs(static_cast<int>(peers)) - 1) continue;
    RowStatistics* line = statistics.data.At(statistics.starts, row_id, 1);
    CountAtomically(&line->frequency, sum);
    line->last_step = now;
  }
}

}  // namespace

LaunchError LaunchTouch(Stream stream, const StatisticsView& statistics, const uint32_t* row_ids, const uint32_t* uses,
                        int64_t num_keys, const uint32_t* clock) {
  if (num_keys == 0) return nullptr;
  TouchKernel<<<BlocksFor(num_keys, BlocksOfWave()), kBlock, 0, stream>>>(statistics, row_ids, uses, num_keys, clock);
  return LastLaunchError();
}

}  // namespace jaxsok

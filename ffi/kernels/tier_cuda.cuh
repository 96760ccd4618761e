// Definitions that tiers on a GPU share: memory that the library owns, for rows read and written ahead.
//
// For each slab of pinned memory that the library made (host_memory.cc) there is an area on its device. Kernels read
// and write the areas' records on two further streams of the device, and may still do so after the program that started
// them has ended: nothing else uses that memory, and it is freed only after them. A kernel that needs their results
// waits until their job has ended.
#ifndef JAXSOK_KERNELS_TIER_CUDA_CUH_
#define JAXSOK_KERNELS_TIER_CUDA_CUH_

#include "launch_cuda.cuh"
#include "tier.h"

namespace jaxsok {

// Blocks that move records ahead, each way at the same time and at the same pace, over the same parts of host memory:
// one for every so many records. A model whose kernels have 128 blocks then keeps as many multiprocessors of an H200,
// up to 32,767 records.
constexpr int kAheadBlock = 512;
constexpr int kAheadBlocks = 4;
constexpr uint32_t kMovesOfAheadBlock = 1 << 14;

/// The two ends of a move: its record in host memory, or in a copy (nullptr: it does not move), and its slot or its
/// other copy.
struct Ends {
  char* host;
  uint64_t here;
};

/// Jobs of one stream; they end in the order in which they begin.
struct Jobs {
  uint64_t num_begun;
  uint64_t num_ended;
};

/// Memory for rows that are read ahead, and for rows that are written ahead; nullptr: none has been so far.
struct AheadReads {
  Ends* ends;         // [MostAhead]
  uint32_t* row_ids;  // [MostAhead], by rank
  char* records;      // [MostAhead][host_bytes], by rank
};
struct AheadWrites {
  Ends* ends;     // [MostAhead]
  char* records;  // [MostAhead][host_bytes], as listed
};

/// The area of one slab, on its device. A captured program holds its address, and reads these words at each run. So a
/// slab at the address of a former slab gets the area of that slab.
struct AheadArea {
  Jobs* reads;
  Jobs* writes;

  // The rows read ahead, for all slabs of a store; stored in the area of the first one.
  uint64_t last_read;  // the job that reads them
  uint32_t ticket;     // the clock of the counters
  uint32_t listed;     // the ticket of what is listed, which is not read yet
  uint32_t num_coming;
  AheadReads coming;

  // The rows written ahead, to this slab.
  uint64_t last_write;  // the job that writes them
  uint32_t num_leaving;
  uint32_t num_blocks_done;  // of the kernel that copies them
  AheadWrites leaving;
};

/// Returns the number of blocks, one on each multiprocessor, that leave some free for those that move records ahead.
inline int BlocksBesidesAhead() { return std::max(1, NumMultiprocessors() - 2 * kAheadBlocks); }

/// Waits until a job that was started ahead has ended; `job` is &Jobs::num_begun for all of them. All threads of a
/// block call it, in kernels that leave room for the job: it needs multiprocessors too.
__device__ __forceinline__ void WaitForJob(const Jobs* jobs, const uint64_t* job) {
  if (threadIdx.x == 0) {
    while (*const_cast<const volatile uint64_t*>(&jobs->num_ended) < *job) __nanosleep(200);
    __threadfence_system();
  }
  __syncthreads();
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_CUDA_CUH_

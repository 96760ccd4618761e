// What tiers on a GPU have in common: memory of the library's own for what is read and written ahead.
//
// For each slab of pinned memory that the library made (host_memory.cc) there is an area on its device. Kernels read
// and write the areas' records on a stream of the device's own, and may still do so when the program that began it has
// ended: nothing else uses that memory, which ends after them. A kernel that needs what they did waits until their job
// ended.
#ifndef JAXSOK_KERNELS_TIER_CUDA_CUH_
#define JAXSOK_KERNELS_TIER_CUDA_CUH_

#include "launch_cuda.cuh"
#include "tier.h"

namespace jaxsok {

// Blocks that move records ahead: nearly as fast as more, and they slow other work less. One kind runs at a time.
constexpr int kReadAheadBlocks = 4;
constexpr int kWriteAheadBlocks = 6;

/// Where the record of a move lies: in host memory, or a copy (nullptr: it does not move), and its slot or its other
/// copy.
struct Ends {
  char* host;
  uint64_t here;
};

/// Jobs of a device's second stream; they end in the order in which they begin.
struct Jobs {
  uint64_t num_begun;
  uint64_t num_ended;
};

/// Of one slab, on its device. A program that was captured has its address, and reads these words anew. So a slab that
/// comes to lie where another one was has the area of that one.
struct AheadArea {
  Jobs* jobs;
  uint64_t last_job;  // that reads or writes this slab

  // What is read ahead, for all slabs of a store; in the area of the first one.
  uint32_t ticket;  // the clock of the counters
  uint32_t num_coming;
  Ends* coming;       // [MostAhead]
  uint32_t* row_ids;  // [MostAhead], by rank
  char* records;      // [MostAhead][host_bytes], by rank

  // What is written ahead, to this slab.
  uint32_t num_leaving;
  Ends* leaving;          // [MostAhead]
  char* leaving_records;  // [MostAhead][host_bytes], as listed

  __device__ bool HasEnded() const { return *const_cast<volatile uint64_t*>(&jobs->num_ended) >= last_job; }
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_CUDA_CUH_

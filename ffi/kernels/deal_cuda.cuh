// Dealing items to their owners on a GPU, in order: keys of a plan, or uses of bags.
#ifndef JAXSOK_KERNELS_DEAL_CUDA_CUH_
#define JAXSOK_KERNELS_DEAL_CUDA_CUH_

#include <algorithm>

#include "index_cuda.cuh"
#include "plan.h"
#include "sort_cuda.h"

namespace jaxsok {

constexpr uint32_t kMostDealtOwners = 64;  // more owners: a radix sort
constexpr int kItemsPerThread = static_cast<int>(kCountedTogether) / kBlock;
constexpr int kWarpsPerBlock = kBlock / kWarp;
constexpr int kWarpsPerChunk = static_cast<int>(kCountedTogether) / kWarp;
static_assert(kWarpsPerChunk == kWarp, "a lane sums up the warps of a chunk for each owner");

/// Returns the number of chunks of items, at least one.
JAXSOK_HOST_DEVICE int64_t NumChunksOf(int64_t num_items) {
  return CeilDiv<int64_t>(num_items + (num_items == 0 ? 1 : 0), kCountedTogether);
}

/// The arrays for dealing `num_items` items to their owners.
struct Dealing {
  uint32_t* owners;       // by item; num_owners: the item goes to none
  uint32_t* counts;       // [num_owners, chunks]: items of an owner in each chunk; then the place of the first one
  uint32_t* blocks_done;  // zero before
  int32_t* starts;        // [num_owners + 1], the output: places at which the items of each owner begin
  int64_t num_items;
  uint32_t num_owners;
  uint32_t* items;       // for more than kMostDealtOwners: memory for a number of each item,
  void* sort_workspace;  // and for sorting them: DealSortBytes

  JAXSOK_HOST_DEVICE int64_t NumChunks() const { return NumChunksOf(num_items); }
  /// Returns the item of this thread in a step of its block's chunk.
  __device__ int64_t Item(int step) const {
    return int64_t{blockIdx.x} * kCountedTogether + step * kBlock + static_cast<int64_t>(threadIdx.x);
  }
};

// A block for each chunk: lists the owners of its items and counts them. The last block to end sums the counts up, by
// owner and then by chunk, which gives the place of every owner's first item of every chunk.
// Blocks write their own counts; the last one, identified by a ticket after a fence, rewrites all of them.
template <typename Source>
__global__ void __launch_bounds__(kBlock) CountOwnersKernel(Source source, Dealing d) {
  __shared__ BlockScan::TempStorage storage;
  __shared__ uint32_t num_of_owner[kMostDealtOwners];
  if (threadIdx.x < d.num_owners) num_of_owner[threadIdx.x] = 0;
  __syncthreads();
  typename Source::Found found[kItemsPerThread];
  uint32_t owners[kItemsPerThread];
#pragma unroll
  for (int step = 0; step < kItemsPerThread; ++step) found[step] = source.Find(d.Item(step), d.num_items);
#pragma unroll
  for (int step = 0; step < kItemsPerThread; ++step) {
    owners[step] = source.Owner(d.Item(step), found[step], d.num_owners);
  }
#pragma unroll
  for (int step = 0; step < kItemsPerThread; ++step) {
    const int64_t item = d.Item(step);
    if (item >= d.num_items) continue;
    source.Note(item, found[step]);
    d.owners[item] = owners[step];
    if (owners[step] < d.num_owners) atomicAdd(&num_of_owner[owners[step]], 1u);
  }
  __syncthreads();
  if (threadIdx.x < d.num_owners) d.counts[threadIdx.x * d.NumChunks() + blockIdx.x] = num_of_owner[threadIdx.x];
  __syncthreads();
  if (!IsLastBlock(d.blocks_done)) return;
  const uint32_t total = SumCountsBefore(d.counts, static_cast<uint32_t>(d.num_owners * d.NumChunks()), storage);
  __syncthreads();
  if (threadIdx.x < d.num_owners) d.starts[threadIdx.x] = static_cast<int32_t>(d.counts[threadIdx.x * d.NumChunks()]);
  if (threadIdx.x == 0) d.starts[d.num_owners] = static_cast<int32_t>(total);
}

// A block for each chunk: calls put(item, place) for its items, and put.Nothing(place) for places without an item.
// Every place has one item, or none, so no two threads put at one place.
template <typename Put>
__global__ void __launch_bounds__(kBlock) DealKernel(Put put, Dealing d) {
  __shared__ uint32_t place_of_warp[kMostDealtOwners][kWarpsPerChunk];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  for (uint32_t o = warp; o < d.num_owners; o += kWarpsPerBlock) place_of_warp[o][lane] = 0;
  __syncthreads();
  uint32_t owners[kItemsPerThread], ranks[kItemsPerThread];
#pragma unroll
  for (int step = 0; step < kItemsPerThread; ++step) {
    const int64_t item = d.Item(step);
    owners[step] = item < d.num_items ? d.owners[item] : d.num_owners;
  }
#pragma unroll
  for (int step = 0; step < kItemsPerThread; ++step) {
    const unsigned same = __match_any_sync(~0u, owners[step]);
    ranks[step] = static_cast<uint32_t>(__popc(same & ((1u << lane) - 1)));
    if (ranks[step] == 0 && owners[step] < d.num_owners) {
      place_of_warp[owners[step]][step * kWarpsPerBlock + warp] = static_cast<uint32_t>(__popc(same));
    }
  }
  __syncthreads();
  for (uint32_t o = warp; o < d.num_owners; o += kWarpsPerBlock) {
    const uint32_t count = place_of_warp[o][lane];
    uint32_t before = count;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    place_of_warp[o][lane] = d.counts[o * d.NumChunks() + blockIdx.x] + before - count;
  }
  __syncthreads();
  const int32_t total = d.starts[d.num_owners];
#pragma unroll
  for (int step = 0; step < kItemsPerThread; ++step) {
    const int64_t item = d.Item(step);
    if (owners[step] < d.num_owners) {
      put(item, place_of_warp[owners[step]][step * kWarpsPerBlock + warp] + ranks[step]);
    }
    if (item >= total && item < d.num_items) put.Nothing(item);  // as a place
  }
}

// One thread, one item: its owner, for a sort.
template <typename Source>
__global__ void __launch_bounds__(kBlock) ListOwnersKernel(Source source, Dealing d) {
  const int64_t item = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (item >= d.num_items) return;
  const typename Source::Found found = source.Find(item, d.num_items);
  d.owners[item] = source.Owner(item, found, d.num_owners);
  source.Note(item, found);
  d.items[item] = static_cast<uint32_t>(item);
}

/// Returns the first place of sorted[0 .. size) that is not below `value`.
__device__ __forceinline__ int32_t LowerBound(const uint32_t* sorted, int32_t size, uint32_t value) {
  int32_t low = 0, high = size;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (sorted[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// One thread, one place in the order of the owners, and one owner.
template <typename Put>
__global__ void __launch_bounds__(kBlock)
    PutSortedKernel(Put put, Dealing d, const uint32_t* sorted_owners, const uint32_t* sorted_items) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i <= d.num_owners) {
    d.starts[i] = LowerBound(sorted_owners, static_cast<int32_t>(d.num_items), static_cast<uint32_t>(i));
  }
  if (i >= d.num_items) return;
  if (sorted_owners[i] < d.num_owners) {
    put(sorted_items[i], static_cast<uint32_t>(i));
  } else {
    put.Nothing(i);
  }
}

/// Deals items to their owners.
///
/// source.Find(item, num_items) reads what an item is, source.Owner(item, found, none) returns its owner or `none`, and
/// source.Note(item, found) writes: they are apart so that loads of several items are in flight. put(item, place) and
/// put.Nothing(place) are as in DealKernel.
/// Post: places are by owner, then by item.
template <typename Source, typename Put>
LaunchError Deal(Stream stream, const Dealing& d, const Source& source, const Put& put) {
  if (d.num_owners <= kMostDealtOwners) {
    const auto chunks = static_cast<unsigned>(d.NumChunks());
    CountOwnersKernel<<<chunks, kBlock, 0, stream>>>(source, d);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    DealKernel<<<chunks, kBlock, 0, stream>>>(put, d);
    return LastLaunchError();
  }
  WorkspaceCutter cutter(d.sort_workspace);
  uint32_t* sorted_owners = cutter.Take<uint32_t>(d.num_items);
  uint32_t* sorted_items = cutter.Take<uint32_t>(d.num_items);
  const PairsToSort pairs{d.owners, d.items, sorted_owners, sorted_items, d.num_items};
  const int owner_bits = BitsBelow(static_cast<int>(d.num_owners) + 1);
  size_t bytes = 0;
  JAXSOK_RETURN_IF_LAUNCH(SortPairs(stream, pairs, owner_bits, nullptr, &bytes));
  if (cutter.used() + static_cast<int64_t>(bytes) > DealSortBytes(d.num_items)) {
    return "workspace is smaller than its bound";
  }
  if (d.num_items > 0) {
    ListOwnersKernel<<<BlocksFor(d.num_items), kBlock, 0, stream>>>(source, d);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    JAXSOK_RETURN_IF_LAUNCH(SortPairs(stream, pairs, owner_bits, cutter.Rest(), &bytes));
  }
  const int64_t num_places = std::max(d.num_items, int64_t{d.num_owners} + 1);
  PutSortedKernel<<<BlocksFor(num_places), kBlock, 0, stream>>>(put, d, sorted_owners, sorted_items);
  return LastLaunchError();
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_DEAL_CUDA_CUH_

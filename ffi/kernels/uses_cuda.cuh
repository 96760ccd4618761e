// From bag gradients to row gradients on a GPU: the uses of a batch sorted by row, and summed in the order of
// core/row_update.h. update_cuda.cu steps optimizers with the sums, combine_cuda.cu writes them down.
//
//   list   each position says which row it used, and by which factor of its bag's gradient (bags with weights or
//          a divisor; single keys need none)
//   sort   (row, position), stable: a row's uses stand together, by position
//   sum    a warp takes 32 sorted uses. Rows with at most 32 uses are summed and applied at once; of longer rows
//          every 32 uses give a partial sum, and the row is put into a list
//   long   a block takes one row of that list: partial sums, tree, apply
#ifndef JAXSOK_KERNELS_USES_CUDA_CUH_
#define JAXSOK_KERNELS_USES_CUDA_CUH_

#include <cub/device/device_radix_sort.cuh>

#include "bags_cuda.cuh"
#include "update.h"

namespace jaxsok {

/// The bag of a use, and the factor on its gradient.
struct alignas(8) UseFactor {
  uint32_t bag;  // of all features
  float factor;
};

struct UsesWorkspace {
  uint32_t* num_long;     // [1]
  uint32_t* rows;         // [num_keys]
  uint32_t* positions;    // [num_keys]
  uint32_t* sorted_rows;  // [num_keys]
  uint32_t* sorted_positions;
  UseFactor* factors;     // [num_keys], by position
  uint32_t* long_starts;  // [num_keys / 32 + 1]: first sorted use of each row with more than 32
  float* partials;        // [2 * (num_keys / 32 + 1), dim]
  void* sort_storage;
  size_t sort_bytes;
};

inline LaunchError CutUses(void* workspace, int64_t num_keys, int32_t dim, int end_bit, UsesWorkspace* w) {
  const int64_t num_chunks = CeilDiv<int64_t>(num_keys, kUsesPerChunk);
  WorkspaceCutter cutter(workspace);
  w->num_long = cutter.Take<uint32_t>(1);
  w->rows = cutter.Take<uint32_t>(num_keys);
  w->positions = cutter.Take<uint32_t>(num_keys);
  w->sorted_rows = cutter.Take<uint32_t>(num_keys);
  w->sorted_positions = cutter.Take<uint32_t>(num_keys);
  w->factors = cutter.Take<UseFactor>(num_keys);
  w->long_starts = cutter.Take<uint32_t>(num_chunks);
  w->partials = cutter.Take<float>(2 * num_chunks * dim);
  w->sort_storage = cutter.Rest();
  JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, w->sort_bytes, w->rows, w->sorted_rows, w->positions,
                                                        w->sorted_positions, static_cast<int>(num_keys), 0, end_bit));
  if (cutter.used() + static_cast<int64_t>(w->sort_bytes) > UpdateWorkspaceBytes(num_keys, dim)) {
    return "workspace is smaller than its bound";
  }
  return nullptr;
}

/// Where the gradient of a sorted use lies, and its factor.
struct UseView {
  const int32_t* features;
  int num_features;
  const UseFactor* factors;
  int32_t dim;

  __device__ const float* GradientOf(const FeaturePointers<const float>& gradients, uint32_t position,
                                     float* factor) const {
    const int f = FeatureAt(features, num_features, kFeatureKeyStart, static_cast<int32_t>(position));
    const int32_t* words = features + f * kNumFeatureWords;
    if (__ldg(words + kFeatureCombiner) == kCombinerNone) {
      *factor = 1.0f;
      return gradients.data[f] + int64_t{static_cast<int32_t>(position) - __ldg(words + kFeatureKeyStart)} * dim;
    }
    const uint2 use = __ldg(reinterpret_cast<const uint2*>(factors + position));
    *factor = __uint_as_float(use.y);
    return gradients.data[f] + int64_t{static_cast<int32_t>(use.x) - __ldg(words + kFeatureBagStart)} * dim;
  }
};

// A block lists the uses of one tile of bags. `positions` says which row a position has, and whether it is padding.
// Single keys: a thread a position. Other bags: eight lanes a bag. Each position is written by one thread.
template <typename Positions>
__global__ void __launch_bounds__(kBlock) ListUsesKernel(BatchView batch, Positions positions, UsesWorkspace w) {
  constexpr int kLanes = 8;
  const Feature f =
      Feature::Load(batch.features, FeatureAt(batch.features, batch.num_features, kFeatureTileStart, blockIdx.x));
  const int32_t first_bag = (static_cast<int32_t>(blockIdx.x) - f.tile_start) * kBagsPerTile;
  const bool is_live = positions.IsLive(f);
  int num_stale = 0;
  const auto list = [&](int64_t position, bool is_left_out) {
    uint32_t row = positions.IsPadding(position) ? kNoRow : positions.Row(position);
    if (!is_live && row != kNoRow) ++num_stale;
    if (!is_live || is_left_out) row = kNoRow;
    w.rows[position] = row;
    w.positions[position] = static_cast<uint32_t>(position);
  };
  if (f.combiner == kCombinerNone) {
    const int32_t bag = first_bag + static_cast<int32_t>(threadIdx.x);
    if (bag < f.num_bags) list(int64_t{f.key_start} + bag, false);
  } else {
    const int lane = threadIdx.x % kLanes;
    const int group_start = static_cast<int>(threadIdx.x % kWarp) - lane;
    const bool weighted = f.weights_start >= 0;
    const bool divided = f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn;
    for (int step = 0; step < kLanes; ++step) {
      const int32_t bag = first_bag + step * (kBagsPerTile / kLanes) + static_cast<int32_t>(threadIdx.x / kLanes);
      int32_t begin = 0, end = 0;
      if (bag < f.num_bags) f.BagRange(batch.offsets, bag, &begin, &end);
      const int longest = __reduce_max_sync(~0u, end - begin);
      float scale = 1.0f;
      bool left_out = false;
      if (divided) {
        float divisor = 0.0f;
        for (int chunk = 0; chunk < longest; chunk += kLanes) {
          const int32_t at = begin + chunk + lane;
          const bool real = at < end && !positions.IsPadding(int64_t{f.key_start} + at);
          const float weight = real && weighted ? __ldg(batch.weights + f.weights_start + at) : 1.0f;
          for (int i = 0; i < kLanes; ++i) {
            const bool use = __shfl_sync(~0u, real ? 1 : 0, group_start + i) != 0;
            const float one = __shfl_sync(~0u, weight, group_start + i);
            if (use) divisor = divisor + (f.combiner == kCombinerSqrtn ? one * one : one);
          }
        }
        if (f.combiner == kCombinerSqrtn) divisor = sqrtf(divisor);
        left_out = divisor == 0.0f;
        scale = left_out ? 0.0f : 1.0f / divisor;
      }
      for (int32_t at = begin + lane; at < end; at += kLanes) {
        const int64_t position = int64_t{f.key_start} + at;
        const float weight = weighted ? __ldg(batch.weights + f.weights_start + at) : 1.0f;
        list(position, left_out);
        w.factors[position] = {static_cast<uint32_t>(f.bag_start + bag), divided && weighted ? weight * scale
                                                                         : divided           ? scale
                                                                                             : weight};
      }
    }
  }
  positions.AddStale(num_stale);
}

/// The first of sorted[0 .. end) that equals sorted[end]: the warp tests 32 places at a time.
__device__ __forceinline__ uint32_t StartOfRow(const uint32_t* sorted, uint32_t end, uint32_t row) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t low = 0, high = end;  // sorted[high] is the row; everything before low is not
  while (low < high) {
    const uint32_t step = (high - low + kWarp - 1) / kWarp;
    const uint32_t at = low + lane * step;
    const bool before = at < high && sorted[at] != row;
    const uint32_t num_before = __popc(__ballot_sync(~0u, before));
    if (num_before == 0) return low;
    const uint32_t next_high = min(low + num_before * step, high);
    low = low + (num_before - 1) * step + 1;
    high = next_high;
  }
  return high;
}

/// One past the last of sorted[begin .. end) that equals sorted[begin].
__device__ __forceinline__ uint32_t EndOfRow(const uint32_t* sorted, uint32_t begin, uint32_t end, uint32_t row) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t low = begin + 1, high = end;  // sorted[low - 1] is the row; everything from high on is not
  // Most long rows have fewer than 1,024 uses: two tests of 32 places find their end.
  const uint32_t near = begin + kUsesPerChunk * (lane + 1);
  const uint32_t num_near = __popc(__ballot_sync(~0u, near < end && sorted[near] == row));
  low = begin + kUsesPerChunk * num_near + 1;
  if (num_near < kWarp) high = min(low + kUsesPerChunk - 1, end);
  while (low < high) {
    const uint32_t step = (high - low + kWarp - 1) / kWarp;
    const uint32_t at = low + lane * step;
    const bool same = at < high && sorted[at] == row;
    const uint32_t num_same = __popc(__ballot_sync(~0u, same));
    if (num_same == 0) return low;
    const uint32_t next_high = min(low + num_same * step, high);
    low = low + (num_same - 1) * step + 1;
    high = next_high;
  }
  return low;
}

// One warp, 32 sorted uses. A chunk begins where a row begins, and every 32 uses after that; the warp that holds
// its first use sums it, reading up to 31 uses of the next warp. Groups of lanes take a chunk each.
// A row with one chunk is applied by the group that summed it, and by no other. A chunk of a longer row writes its
// partial sum: of the chunks that begin in one warp's 32 uses at most one is the first of a long row and at most
// one is a later one, so partials[2 * warp + is_first] is written once.
template <typename Apply, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock)
    SumUsesKernel(const __grid_constant__ Apply apply, const __grid_constant__ FeaturePointers<const float> gradients,
                  UseView view, UsesWorkspace w, uint32_t num_keys, int lanes) {
  constexpr int kFlight = RowsInFlight<kPerLane>();
  __shared__ uint8_t chunk_starts[kBlock / kWarp][kWarp];
  const int warp_in_block = threadIdx.x / kWarp, warp_lane = threadIdx.x % kWarp;
  const uint32_t warp = blockIdx.x * (kBlock / kWarp) + warp_in_block;
  const uint32_t first = warp * kWarp;
  if (first >= num_keys) return;
  const uint32_t at = first + warp_lane, later = at + kWarp;
  const uint32_t row = at < num_keys ? w.sorted_rows[at] : kNoRow;
  if (__all_sync(~0u, row == kNoRow)) return;
  const uint32_t later_row = later < num_keys ? w.sorted_rows[later] : kNoRow;
  const uint32_t before = first == 0 ? kNoRow : w.sorted_rows[first - 1];

  // Bit i: use first + i is of another row than the one before it.
  uint32_t previous = __shfl_up_sync(~0u, row, 1);
  if (warp_lane == 0) previous = before;
  uint32_t later_previous = __shfl_up_sync(~0u, later_row, 1);
  const uint32_t last_row = __shfl_sync(~0u, row, kWarp - 1);
  if (warp_lane == 0) later_previous = last_row;
  const unsigned changes = __ballot_sync(~0u, row != previous || at == 0);
  const unsigned later_changes = __ballot_sync(~0u, later_row != later_previous);
  const uint64_t boundary = Word64(changes, later_changes);

  const uint32_t first_row = __shfl_sync(~0u, row, 0);
  const uint32_t uses_before = (changes & 1) ? 0 : first - StartOfRow(w.sorted_rows, first, first_row);
  const unsigned heads_so_far = changes & (~0u >> (kWarp - 1 - warp_lane));
  const uint32_t rank = heads_so_far ? warp_lane - (kWarp - 1 - __clz(heads_so_far)) : uses_before + warp_lane;
  const bool is_start = row != kNoRow && rank % kUsesPerChunk == 0;
  const unsigned starts = __ballot_sync(~0u, is_start);
  if (starts == 0) return;
  const int num_starts = __popc(starts);
  if (is_start) chunk_starts[warp_in_block][__popc(starts & ((1u << warp_lane) - 1))] = static_cast<uint8_t>(warp_lane);
  // The boundary after each lane's use: where a chunk that begins there ends, unless 32 uses come first.
  const uint64_t after = warp_lane == 63 ? 0 : boundary >> (warp_lane + 1);
  const int to_boundary = after == 0 ? 64 : __ffsll(static_cast<long long>(after));
  const int length = min(kUsesPerChunk, to_boundary);
  const bool is_long = rank != 0 || (length == kUsesPerChunk && to_boundary > kUsesPerChunk);
  const bool needs_later = __any_sync(~0u, is_start && warp_lane + length > kWarp);

  float factor = 0.0f, later_factor = 0.0f;
  const float* gradient = nullptr;
  const float* later_gradient = nullptr;
  if (row != kNoRow) gradient = view.GradientOf(gradients, w.sorted_positions[at], &factor);
  if (needs_later && later_row != kNoRow) {
    later_gradient = view.GradientOf(gradients, w.sorted_positions[later], &later_factor);
  }
  __syncwarp();
  // Rows of single keys and plain sums, the common case, spare the factors.
  const bool has_factors =
      __any_sync(~0u, (row != kNoRow && factor != 1.0f) || (later_gradient != nullptr && later_factor != 1.0f));
  constexpr int kUsesMask = 0xff, kIsLong = 1 << 8, kIsFirst = 1 << 9;
  const int packed = length | (is_long ? kIsLong : 0) | (rank == 0 ? kIsFirst : 0);

  const int lane = warp_lane % lanes, group = warp_lane / lanes, groups = kWarp / lanes;
  const unsigned mask = (lanes == kWarp ? ~0u : (1u << lanes) - 1) << (warp_lane - lane);
  for (int turn = 0; turn < num_starts; turn += groups) {
    const bool valid = turn + group < num_starts;
    const int start = chunk_starts[warp_in_block][valid ? turn + group : turn];
    const uint32_t chunk_row = __shfl_sync(~0u, row, start);
    const int about = __shfl_sync(~0u, packed, start);
    const int uses = valid ? about & kUsesMask : 0;
    const auto from = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(gradient), start);
    const float first_factor = has_factors ? __shfl_sync(~0u, factor, start) : 1.0f;
    typename Apply::template Loaded<kVector, kPerLane> loaded;
    RowPart<kVector, kPerLane> sum;
    if (valid) {
      // The row is asked for before the first gradient is waited for.
      sum.Load(reinterpret_cast<const float*>(from), lane, lanes, view.dim);
      if ((about & kIsLong) == 0) apply.Load(chunk_row, lane, lanes, loaded);
      if (has_factors) sum.Scale(first_factor);
    }
    const int most = __reduce_max_sync(~0u, uses);
    for (int u = 1; u < most; u += kFlight) {
      RowPart<kVector, kPerLane> parts[kFlight];
      float factors[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int use = start + u + i;  // below 64, or not read
        const auto near = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(gradient), use & (kWarp - 1));
        const auto far = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(later_gradient), use & (kWarp - 1));
        if (has_factors) {
          const float near_factor = __shfl_sync(~0u, factor, use & (kWarp - 1));
          const float far_factor = __shfl_sync(~0u, later_factor, use & (kWarp - 1));
          factors[i] = use < kWarp ? near_factor : far_factor;
        }
        if (u + i < uses) {
          parts[i].Load(reinterpret_cast<const float*>(use < kWarp ? near : far), lane, lanes, view.dim);
        }
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (u + i >= uses) continue;
        if (has_factors) parts[i].Scale(factors[i]);
        sum.Add(parts[i]);
      }
    }
    if (!valid) continue;
    if ((about & kIsLong) != 0) {
      const bool is_first = (about & kIsFirst) != 0;
      sum.Store(w.partials + (2 * int64_t{warp} + (is_first ? 1 : 0)) * view.dim, lane, lanes, view.dim);
      if (is_first && lane == 0) w.long_starts[atomicAdd(w.num_long, 1u)] = first + start;
    } else {
      apply.Apply(chunk_row, static_cast<uint32_t>(uses), lane, lanes, mask, loaded, sum);
    }
  }
}

// One block, one row with more than 32 uses: kChunkLanes groups of lanes add its partial sums, then a tree.
// The list's order depends on timing; the rows in it do not touch each other.
template <typename Apply, int kVector, int kPerLane>
__global__ void __launch_bounds__(1024, 1)
    SumLongKernel(const __grid_constant__ Apply apply, UseView view, UsesWorkspace w, uint32_t num_keys, int lanes) {
  __shared__ float tree[kChunkLanes][kWarp * kVector];
  __shared__ uint32_t end;
  const int lane = threadIdx.x % lanes, chunk_lane = threadIdx.x / lanes;
  const uint32_t num_long = *w.num_long;
  for (uint32_t item = blockIdx.x; item < num_long; item += gridDim.x) {
    const uint32_t begin = w.long_starts[item];
    const uint32_t row = w.sorted_rows[begin];
    if (threadIdx.x < kWarp) {
      const uint32_t found = EndOfRow(w.sorted_rows, begin, num_keys, row);
      if (threadIdx.x == 0) end = found;
    }
    __syncthreads();
    const uint32_t num_uses = end - begin;
    const uint32_t num_chunks = CeilDiv<uint32_t>(num_uses, kUsesPerChunk);
    RowPart<kVector, kPerLane> sum;
    sum.SetZero();
    for (uint32_t c = chunk_lane; c < num_chunks; c += kChunkLanes) {
      const int64_t warp = (begin + c * kUsesPerChunk) / kWarp;
      RowPart<kVector, kPerLane> part;
      part.LoadPlain(w.partials + (2 * warp + (c == 0 ? 1 : 0)) * view.dim, lane, lanes, view.dim);
      if (c == static_cast<uint32_t>(chunk_lane)) {
        sum = part;
      } else {
        sum.Add(part);
      }
    }
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      float* mine = &tree[chunk_lane][lane * kVector];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kVector; ++i) mine[i] = sum.part[k].v[i];
      for (int half = kChunkLanes / 2; half >= 1; half /= 2) {
        __syncthreads();
        if (chunk_lane < half) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) mine[i] = mine[i] + tree[chunk_lane + half][lane * kVector + i];
        }
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.part[k].v[i] = mine[i];
    }
    if (chunk_lane == 0) {
      const unsigned mask = lanes == kWarp ? ~0u : (1u << lanes) - 1;
      typename Apply::template Loaded<kVector, kPerLane> loaded;
      apply.Load(row, lane, lanes, loaded);
      apply.Apply(row, num_uses, lane, lanes, mask, loaded, sum);
    }
    __syncthreads();
  }
}

constexpr int kLongBlocks = 132 * 4;  // fill the largest GPU with blocks of 512 threads; without work they cost 2 us

template <typename Apply>
struct LaunchSums {
  Stream stream;
  const Apply& apply;
  const FeaturePointers<const float>& gradients;
  UseView view;
  const UsesWorkspace& w;
  int64_t num_keys;
  template <int kVector, int kPerLane>
  LaunchError operator()(int lanes) const {
    const unsigned blocks = static_cast<unsigned>(CeilDiv<int64_t>(num_keys, kBlock));
    const uint32_t n = static_cast<uint32_t>(num_keys);
    SumUsesKernel<Apply, kVector, kPerLane><<<blocks, kBlock, 0, stream>>>(apply, gradients, view, w, n, lanes);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    SumLongKernel<Apply, kVector, kPerLane><<<kLongBlocks, kChunkLanes * lanes, 0, stream>>>(apply, view, w, n, lanes);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    return nullptr;
  }
};

/// sort, sum, long: after the uses are listed. `num_rows`: row ids are below it.
template <typename Apply>
inline LaunchError LaunchUses(Stream stream, const Apply& apply, const FeaturePointers<const float>& gradients,
                              const BatchView& batch, UsesWorkspace& w, int32_t dim, int end_bit) {
  const int n = static_cast<int>(batch.num_keys);
  JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(w.sort_storage, w.sort_bytes, w.rows, w.sorted_rows,
                                                        w.positions, w.sorted_positions, n, 0, end_bit, stream));
  const UseView view{batch.features, batch.num_features, w.factors, dim};
  return DispatchShape(dim, LaunchSums<Apply>{stream, apply, gradients, view, w, batch.num_keys});
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_USES_CUDA_CUH_

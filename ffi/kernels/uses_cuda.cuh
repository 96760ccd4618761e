// Sorts the uses of a batch by row on a GPU, so that uses_sum_cuda.cuh can sum their gradients.
//
//   list   each position stores the row that it used, and the factor of its bag's gradient (plain sums of bags of
//          one length need none)
//   sort   (row, position), stable: a row's uses are adjacent, by position
#ifndef JAXSOK_KERNELS_USES_CUDA_CUH_
#define JAXSOK_KERNELS_USES_CUDA_CUH_

#include "bags_cuda.cuh"
#include "sort_cuda.h"
#include "update.h"

namespace jaxsok {

/// The bag of a use, and the factor on its gradient.
struct alignas(8) UseFactor {
  uint32_t bag;  // of all features
  float factor;
};

/// A row with more than one chunk.
struct LongRow {
  uint32_t begin;  // its first sorted use
  uint32_t num_uses;
};

/// The number of chunks up to which a group of lanes adds a row's partial sums.
constexpr uint32_t kFewChunks = 8;
/// The number of chunks above which a row's partial sums are spread over blocks, one for each of the kChunkLanes lanes.
constexpr uint32_t kManyChunks = 512;

/// The numbers of rows with more than one chunk.
struct LongCounts {
  uint32_t few;   // at most kFewChunks
  uint32_t many;  // more
  uint32_t hot;   // of these, rows with more than kManyChunks
};

struct UsesWorkspace {
  LongCounts* num_long;
  uint32_t* rows;         // [num_keys]
  uint32_t* positions;    // [num_keys]
  uint32_t* sorted_rows;  // [num_keys]
  uint32_t* sorted_positions;
  UseFactor* factors;  // [num_keys], by position
  LongRow* long_rows;  // [num_chunks]: rows with few chunks from the begin on, those with more from the end
  LongRow* hot_rows;   // [num_chunks / kManyChunks + 1]
  uint32_t num_chunks;
  float* partials;  // [2 * (num_keys / 32 + 1), dim]
  void* sort_storage;
  size_t sort_bytes;

  __device__ LongRow& FewChunks(uint32_t i) const { return long_rows[i]; }
  __device__ LongRow& MoreChunks(uint32_t i) const { return long_rows[num_chunks - 1 - i]; }

  PairsToSort Pairs(int64_t num_keys) const { return {rows, positions, sorted_rows, sorted_positions, num_keys}; }
  /// Places the sorted uses apart from the workspace, if `memory` is not null: SortedUsesBytes.
  void PlaceSorted(void* memory, int64_t num_keys) {
    if (memory == nullptr) return;
    WorkspaceCutter cutter(memory);
    sorted_rows = cutter.Take<uint32_t>(num_keys);
    sorted_positions = cutter.Take<uint32_t>(num_keys);
    factors = cutter.Take<UseFactor>(num_keys);
  }
};

inline LaunchError CutUses(void* workspace, int64_t num_keys, int32_t dim, int end_bit, UsesWorkspace* w) {
  const int64_t num_chunks = CeilDiv<int64_t>(num_keys, kUsesPerChunk);
  WorkspaceCutter cutter(workspace);
  w->num_long = cutter.Take<LongCounts>(1);
  w->rows = cutter.Take<uint32_t>(num_keys);
  w->positions = cutter.Take<uint32_t>(num_keys);
  w->sorted_rows = cutter.Take<uint32_t>(num_keys);
  w->sorted_positions = cutter.Take<uint32_t>(num_keys);
  w->factors = cutter.Take<UseFactor>(num_keys);
  w->long_rows = cutter.Take<LongRow>(num_chunks);
  w->num_chunks = static_cast<uint32_t>(num_chunks);
  w->hot_rows = cutter.Take<LongRow>(num_chunks / kManyChunks + 1);
  w->partials = cutter.Take<float>(2 * num_chunks * dim);
  w->sort_storage = cutter.Rest();
  JAXSOK_RETURN_IF_LAUNCH(SortPairs(nullptr, w->Pairs(num_keys), end_bit, nullptr, &w->sort_bytes));
  if (cutter.used() + static_cast<int64_t>(w->sort_bytes) > UpdateWorkspaceBytes(num_keys, dim)) {
    return "workspace is smaller than its bound";
  }
  return nullptr;
}

/// Returns whether a feature's uses need no factors: bag and factor follow from the position.
__device__ __forceinline__ bool IsPlain(int32_t combiner, int32_t hotness, int32_t weights_start) {
  return hotness > 0 && weights_start < 0 && (combiner == kCombinerNone || combiner == kCombinerSum);
}

/// The type of gradients of kernels that read at run time which of these it is; the widest comes first.
template <typename... Numbers>
struct AnyOf {};

/// How a kernel reads gradients. One that is compiled for one type does not read the dtype: code for several costs
/// registers.
template <typename Gradient>
struct GradientReader {
  using Widest = Gradient;

  /// Calls work(number) with a value of the gradients' type.
  template <typename Work>
  __device__ static void WithNumber(RowDtype, const Work& work) {
    work(Gradient{});
  }
};
template <typename First, typename... Others>
struct GradientReader<AnyOf<First, Others...>> {
  using Widest = First;

  template <typename Work>
  __device__ static void WithNumber(RowDtype dtype, const Work& work) {
    if constexpr (sizeof...(Others) > 0) {
      if (dtype != RowNumber<First>::kDtype) return GradientReader<AnyOf<Others...>>::WithNumber(dtype, work);
    }
    work(First{});
  }
};

/// The bag gradients of each feature.
struct GradientPointers {
  FeaturePointers<const void> of_feature;
  RowDtype dtype;
};

/// The gradients of sorted uses, and their factors.
struct UseView {
  const int32_t* features;
  int num_features;
  const UseFactor* factors;
  int32_t dim;
  RowDtype gradient_dtype;
  int64_t num_keys;

  __device__ const void* GradientOf(const FeaturePointers<const void>& gradients, uint32_t position,
                                    float* factor) const {
    const int f = FeatureAt(features, num_features, kFeatureKeyStart, static_cast<int32_t>(position), num_keys);
    const int32_t* words = features + f * kNumFeatureWords;
    const int32_t line_bytes = dim * NumberBytes(gradient_dtype);
    if (IsPlain(__ldg(words + kFeatureCombiner), __ldg(words + kFeatureHotness), __ldg(words + kFeatureWeightsStart))) {
      *factor = 1.0f;
      const int32_t at = static_cast<int32_t>(position) - __ldg(words + kFeatureKeyStart);
      return static_cast<const char*>(gradients.data[f]) + int64_t{at / __ldg(words + kFeatureHotness)} * line_bytes;
    }
    const uint2 use = __ldg(reinterpret_cast<const uint2*>(factors + position));
    *factor = __uint_as_float(use.y);
    const int32_t bag = static_cast<int32_t>(use.x) - __ldg(words + kFeatureBagStart);
    return static_cast<const char*>(gradients.data[f]) + int64_t{bag} * line_bytes;
  }
};

// A block lists the uses of one tile of bags. `positions` provides the row of a position, and whether it is padding. If
// no factors are needed, one thread takes a position; other bags take eight lanes each. Each position is written by one
// thread.
template <typename Positions>
__global__ void __launch_bounds__(kBlock) ListUsesKernel(BatchView batch, Positions positions, UsesWorkspace w) {
  constexpr int kLanes = 8;
  const Feature f = Feature::Load(
      batch.features, FeatureAt(batch.features, batch.num_features, kFeatureTileStart, blockIdx.x, batch.num_tiles));
  const int32_t first_bag = (static_cast<int32_t>(blockIdx.x) - f.tile_start) * kBagsPerTile;
  const bool is_live = positions.IsLive(f);
  int num_stale = 0;
  const auto list = [&](int64_t position, uint32_t row, bool is_left_out) {
    if (!is_live && row != kNoRow) num_stale += positions.UsesAt(position);
    if (!is_live || is_left_out) row = kNoRow;
    w.rows[position] = row;
    w.positions[position] = static_cast<uint32_t>(position);
  };
  if (IsPlain(f.combiner, f.hotness, f.weights_start)) {
    const int64_t end = min(int64_t{first_bag + kBagsPerTile} * f.hotness, int64_t{f.num_keys});
    for (int64_t at = int64_t{first_bag} * f.hotness + threadIdx.x; at < end; at += kBlock) {
      // Padding has no row: its key need not be read.
      const int64_t position = int64_t{f.key_start} + at;
      list(position, positions.Row(position), false);
    }
  } else {
    const int lane = threadIdx.x % kLanes;
    const bool weighted = f.weights_start >= 0;
    const bool divided = f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn;
    for (int step = 0; step < kLanes; ++step) {
      const int32_t bag = first_bag + step * (kBagsPerTile / kLanes) + static_cast<int32_t>(threadIdx.x / kLanes);
      int32_t begin = 0, end = 0;
      if (bag < f.num_bags) f.BagRange(batch.offsets, bag, &begin, &end);
      float scale = 1.0f;
      bool left_out = false;
      if (divided) {
        const float divisor = DivisorOfBag<kLanes>(
            f, batch.weights, begin, end, [&](int32_t at) { return !positions.IsPadding(int64_t{f.key_start} + at); });
        left_out = divisor == 0.0f;
        scale = left_out ? 0.0f : 1.0f / divisor;
      }
      for (int32_t at = begin + lane; at < end; at += kLanes) {
        const int64_t position = int64_t{f.key_start} + at;
        const float weight = weighted ? __ldg(batch.weights + f.weights_start + at) : 1.0f;
        list(position, positions.Row(position), left_out);
        w.factors[position] = {static_cast<uint32_t>(f.bag_start + bag), divided && weighted ? weight * scale
                                                                         : divided           ? scale
                                                                                             : weight};
      }
    }
  }
  positions.AddStale(num_stale);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_USES_CUDA_CUH_

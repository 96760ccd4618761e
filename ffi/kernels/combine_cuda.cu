// The transpose of combining on a GPU: the sums of update, written to one array of rows or to windows.
#include <algorithm>

#include "combine.h"
#include "uses_sum_cuda.cuh"

namespace jaxsok {
namespace {

/// Positions whose rows are in one array; anything outside it is padding.
struct ArrayPositions {
  const int32_t* inverse;
  int64_t num_unique;

  __device__ bool IsPadding(int64_t position) const {
    const int32_t at = __ldg(inverse + position);
    return at < 0 || at >= num_unique;
  }
  __device__ uint32_t Row(int64_t position) const {
    return IsPadding(position) ? kNoRow : static_cast<uint32_t>(__ldg(inverse + position));
  }
  __device__ bool IsLive(const Feature&) const { return true; }
  __device__ int UsesAt(int64_t) const { return 1; }
  __device__ void AddStale(int) const {}
};

/// Writes the sum of a row's gradients, and the number of uses.
struct ApplyWrite {
  static constexpr bool kShiftsBlocks = true;
  using Row = float;
  static constexpr bool kStepsLongRowsApart = false;
  static constexpr bool kStepsRows16 = false;
  using Gradient = float;
  static constexpr int kNumLines = 0;

  LineTarget out;
  bool is_float32;
  int32_t* num_uses;
  int32_t dim;
  int64_t num_lines;

  /// Returns the shifted number of a block: sums are written in the order of their rows, and shards begin with
  /// different peers.
  __device__ uint32_t Shifted(uint32_t block) const {
    if (!out.IsWindow()) return block;
    return static_cast<uint32_t>((block + out.first_line * gridDim.x / num_lines) % gridDim.x);
  }
  template <int kVector, int kPerLane>
  struct Loaded {};
  __device__ static RowRounding RoundingOf(uint32_t) { return {0}; }
  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t, RowRounding, int, int, Loaded<kVector, kPerLane>&) const {}
  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t, uint32_t uses, int lane, int lanes, unsigned,
                        Loaded<kVector, kPerLane>&, RowPart<kVector, kPerLane>& gradient) const {
    if (uses == 0) return;
    if (is_float32) {
      gradient.Store(LineAt<float>(out, row, dim), lane, lanes, dim);
    } else {
      gradient.Store(LineAt<BFloat16>(out, row, dim), lane, lanes, dim);
    }
    if (lane == 0) num_uses[row] = static_cast<int32_t>(uses);
  }
};

// Sets all rows to zero uses.
__global__ void PrepareTransposeKernel(int32_t* num_uses, int64_t num_unique, LongCounts* num_long) {
  const int64_t start = int64_t{blockIdx.x} * kBlock + threadIdx.x, stride = int64_t{gridDim.x} * kBlock;
  if (start == 0) *num_long = {};
  for (int64_t i = start; i < num_unique; i += stride) num_uses[i] = 0;
}

LaunchError SortByRow(Stream stream, int64_t num_unique, const int32_t* inverse, const BatchView& batch,
                      UsesWorkspace& w) {
  if (batch.num_keys == 0 || batch.num_tiles == 0) return nullptr;
  // Only ragged features have positions outside all bags, which no block lists.
  if (batch.num_offsets > 0) JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, w.rows, batch.num_keys, kNoRow));
  ListUsesKernel<<<batch.num_tiles, kBlock, 0, stream>>>(batch, ArrayPositions{inverse, num_unique}, w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return SortPairs(stream, w.Pairs(batch.num_keys), BitsBelow(num_unique), w.sort_storage, &w.sort_bytes);
}

// Writes zeros for rows that no bag uses: as many lanes as a row has columns, at most a warp, take one row after the
// other. Few of the rows sent to owners are unused, so this pass runs after all the others are written.
__global__ void __launch_bounds__(kBlock)
    ZeroUnusedKernel(const __grid_constant__ ApplyWrite out, int64_t num_unique, int lanes) {
  const int64_t groups = int64_t{gridDim.x} * kBlock / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t row = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / lanes; row < num_unique; row += groups) {
    if (__ldg(out.num_uses + row) != 0) continue;
    for (int column = lane; column < out.dim; column += lanes) {
      if (out.is_float32) {
        LineAt<float>(out.out, row, out.dim)[column] = 0.0f;
      } else {
        LineAt<BFloat16>(out.out, row, out.dim)[column] = {0};
      }
    }
  }
}

constexpr int kSendThreads = 512;
constexpr int kMostSendBlocks = 64;  // the link is nearly full, and other multiprocessors are free

// A block takes one tile of bags after the other: reads its gradients once, and writes them to all shards. Shards begin
// with different peers.
template <typename To, int kVector>
__global__ void __launch_bounds__(kSendThreads, 2)
    SendBagGradientsKernel(const __grid_constant__ FeaturePointers<const float> gradients, BatchView bags,
                           const float* scales, const __grid_constant__ LineTarget windows, int dim, int shard,
                           int num_shards) {
  constexpr int kFlight = 4;
  for (int tile = static_cast<int>(blockIdx.x); tile < bags.num_tiles; tile += static_cast<int>(gridDim.x)) {
    const Feature f = Feature::Load(
        bags.features, FeatureAt(bags.features, bags.num_features, kFeatureTileStart, tile, bags.num_tiles));
    const int first_bag = (tile - f.tile_start) * kBagsPerTile;
    const int num_vectors = min(kBagsPerTile, f.num_bags - first_bag) * (dim / kVector);
    const float* from = gradients.data[f.number] + int64_t{first_bag} * dim;
    const int64_t line = int64_t{f.bag_start} + first_bag;
    for (int first = static_cast<int>(threadIdx.x); first < num_vectors; first += kFlight * kSendThreads) {
      Columns<kVector> columns[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int at = first + i * kSendThreads;
        if (at < num_vectors) columns[i] = Columns<kVector>::Load(from + at * kVector);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int at = first + i * kSendThreads;
        if (at >= num_vectors) continue;
        const float scale = __ldg(scales + line + at * kVector / dim);
#pragma unroll
        for (int c = 0; c < kVector; ++c) columns[i].v[c] = ScaledByBag(columns[i].v[c], scale);
      }
      for (int p = 0; p < num_shards; ++p) {
        To* to = reinterpret_cast<To*>(windows.parts[(shard + p) % num_shards]) + line * dim;
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          const int at = first + i * kSendThreads;
          if (at < num_vectors) columns[i].Store(to + at * kVector);
        }
      }
    }
  }
}

}  // namespace

LaunchError LaunchSendBagGradients(Stream stream, const float* const* bag_gradients, const float* scales, int32_t dim,
                                   const BatchView& bags, const LineTarget& windows, int32_t shard, int32_t num_shards,
                                   RowDtype dtype) {
  if (bags.num_tiles == 0) return nullptr;
  FeaturePointers<const float> pointers;
  JAXSOK_RETURN_IF_LAUNCH(FillPointers(bag_gradients, bags.num_features, pointers));
  const int blocks = std::min(bags.num_tiles, kMostSendBlocks);
  const auto launch = [&](auto* kernel) {
    kernel<<<blocks, kSendThreads, 0, stream>>>(pointers, bags, scales, windows, dim, shard, num_shards);
    return LastLaunchError();
  };
  const bool is_float32 = dtype == kRowDtypeFloat32;
  if (dim % 4 != 0) {
    return is_float32 ? launch(SendBagGradientsKernel<float, 1>) : launch(SendBagGradientsKernel<BFloat16, 1>);
  }
  return is_float32 ? launch(SendBagGradientsKernel<float, 4>) : launch(SendBagGradientsKernel<BFloat16, 4>);
}

LaunchError LaunchCombineTranspose(Stream stream, const float* const* bag_gradients, int64_t num_unique, int32_t dim,
                                   const int32_t* inverse, const BatchView& batch, const LineTarget& row_gradients,
                                   RowDtype dtype, int32_t* num_uses, void* sorted_uses, void* workspace) {
  GradientPointers pointers{{}, kRowDtypeFloat32};
  JAXSOK_RETURN_IF_LAUNCH(FillPointers(bag_gradients, batch.num_features, pointers.of_feature));
  const ApplyWrite out{row_gradients, dtype == kRowDtypeFloat32, num_uses, dim, num_unique};
  UsesWorkspace w;
  JAXSOK_RETURN_IF_LAUNCH(CutUses(workspace, batch.num_keys, dim, BitsBelow(num_unique), &w));
  w.PlaceSorted(sorted_uses, batch.num_keys);
  const unsigned blocks = BlocksFor(std::max<int64_t>(num_unique, 1), kMostPrepareBlocks);
  PrepareTransposeKernel<<<blocks, kBlock, 0, stream>>>(num_uses, num_unique, w.num_long);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (batch.num_keys != 0 && batch.num_tiles != 0) {
    if (sorted_uses == nullptr) JAXSOK_RETURN_IF_LAUNCH(SortByRow(stream, num_unique, inverse, batch, w));
    JAXSOK_RETURN_IF_LAUNCH(LaunchUses(stream, out, pointers, batch, w, dim, LaneShape::Of(dim)));
  }
  if (row_gradients.IsWindow()) return nullptr;
  int lanes = 1;
  while (lanes < dim && lanes < kWarp) lanes *= 2;
  ZeroUnusedKernel<<<kMostPrepareBlocks, kBlock, 0, stream>>>(out, num_unique, lanes);
  return LastLaunchError();
}

LaunchError LaunchSortByRow(Stream stream, int64_t num_unique, const int32_t* inverse, const BatchView& batch,
                            void* sorted_uses, void* workspace) {
  UsesWorkspace w;
  JAXSOK_RETURN_IF_LAUNCH(CutUses(workspace, batch.num_keys, 0, BitsBelow(num_unique), &w));
  w.PlaceSorted(sorted_uses, batch.num_keys);
  return SortByRow(stream, num_unique, inverse, batch, w);
}

}  // namespace jaxsok

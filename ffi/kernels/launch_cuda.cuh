// What every CUDA launcher uses: error checks, workspace, features, and the choice of a row's shape at compile time.
#ifndef JAXSOK_KERNELS_LAUNCH_CUDA_CUH_
#define JAXSOK_KERNELS_LAUNCH_CUDA_CUH_

#include <cuda_runtime.h>

#include "../core/row_update.h"
#include "lookup.h"

namespace jaxsok {

constexpr int kWarp = 32;
constexpr int kBlock = 256;

/// Pointers of all features travel as a kernel parameter (CUDA 12.1 on takes 32 KB of them on sm_70 and later).
constexpr int kMaxFeatures = 1024;
template <typename T>
struct FeaturePointers {
  T* data[kMaxFeatures];
};

template <typename T>
inline LaunchError FillPointers(T* const* from, int32_t num_features, FeaturePointers<T>& to) {
  if (num_features > kMaxFeatures) return "more than 1024 features over one store; split the collection";
  for (int32_t f = 0; f < num_features; ++f) to.data[f] = from[f];
  return nullptr;
}

/// How bags are dealt to blocks: a block takes kBlock / kWarp * granule neighbouring bags of one tile, a warp
/// `granule`.
struct TileShare {
  int granule;  // bags of a warp: a power of two, at most kWarp

  /// Finer for small batches, so that they too reach every multiprocessor: at least four warps for each of its
  /// schedulers where there are bags enough.
  static TileShare Of(int num_tiles) {
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      multiprocessors = 132;
    }
    TileShare share{kWarp};
    while (share.granule > 4 && int64_t{num_tiles} * kBagsPerTile < int64_t{multiprocessors} * 16 * share.granule) {
      share.granule /= 2;
    }
    return share;
  }
  __host__ __device__ int BlocksPerTile() const { return kBagsPerTile / (kBlock / kWarp * granule); }
};
static_assert(kBagsPerTile == kBlock, "with a granule of kWarp a block takes a tile");

#define JAXSOK_RETURN_IF_CUDA(expression)                                     \
  do {                                                                        \
    const cudaError_t jaxsok_error = (expression);                            \
    if (jaxsok_error != cudaSuccess) return cudaGetErrorString(jaxsok_error); \
  } while (false)

#define JAXSOK_RETURN_IF_LAUNCH(expression)                  \
  do {                                                       \
    const ::jaxsok::LaunchError jaxsok_error = (expression); \
    if (jaxsok_error != nullptr) return jaxsok_error;        \
  } while (false)

/// Parts of a workspace, each 256-byte aligned.
class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(void* begin) : begin_(static_cast<char*>(begin)), at_(0) {}
  template <typename T>
  T* Take(int64_t count) {
    T* part = reinterpret_cast<T*>(begin_ + at_);
    at_ += CeilDiv<int64_t>(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
    return part;
  }
  void* Rest() const { return begin_ + at_; }
  int64_t used() const { return at_; }

 private:
  char* begin_;
  int64_t at_;
};

/// Low bits in which numbers below `bound` differ, and differ from all ones (kNoRow, kNoOwner): what a sort looks at.
inline int BitsBelow(int64_t bound) {
  int bits = 1;
  while ((int64_t{1} << bits) <= bound) ++bits;
  return bits > 32 ? 32 : bits;
}

/// The last feature whose word is at most `value`: features lie one after the other by tiles, bags and keys alike,
/// and empty ones share their start with the next.
__device__ __forceinline__ int FeatureAt(const int32_t* features, int num_features, int word, int32_t value) {
  int low = 0, high = num_features - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (__ldg(features + middle * kNumFeatureWords + word) <= value) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// One feature's words.
struct Feature {
  int32_t table, combiner, key_start, num_keys, bag_start, num_bags, hotness, offsets_start, weights_start, tile_start;
  int32_t unknown_zeros, plan, number;

  __device__ static Feature Load(const int32_t* features, int number) {
    const int32_t* words = features + number * kNumFeatureWords;
    Feature f;
    f.table = __ldg(words + kFeatureTable);
    f.combiner = __ldg(words + kFeatureCombiner);
    f.key_start = __ldg(words + kFeatureKeyStart);
    f.num_keys = __ldg(words + kFeatureNumKeys);
    f.bag_start = __ldg(words + kFeatureBagStart);
    f.num_bags = __ldg(words + kFeatureNumBags);
    f.hotness = __ldg(words + kFeatureHotness);
    f.offsets_start = __ldg(words + kFeatureOffsetsStart);
    f.weights_start = __ldg(words + kFeatureWeightsStart);
    f.tile_start = __ldg(words + kFeatureTileStart);
    f.unknown_zeros = __ldg(words + kFeatureUnknown);
    f.plan = __ldg(words + kFeaturePlan);
    f.number = number;
    return f;
  }

  /// Where the bags of the feature begin and end among its keys; what lies outside is padding.
  __device__ void Bags(const int32_t* offsets, int32_t* first, int32_t* last) const {
    if (hotness > 0) {
      *first = 0;
      *last = static_cast<int32_t>(min(int64_t{num_bags} * hotness, int64_t{num_keys}));
      return;
    }
    *first = min(max(__ldg(offsets + offsets_start), 0), num_keys);
    *last = max(min(__ldg(offsets + offsets_start + num_bags), num_keys), *first);
  }

  /// Where a bag begins and ends among the feature's keys, clamped to them.
  __device__ void BagRange(const int32_t* offsets, int32_t bag, int32_t* begin, int32_t* end) const {
    if (hotness > 0) {
      *begin = min(bag * hotness, num_keys);
      *end = min(*begin + hotness, num_keys);
      return;
    }
    *begin = min(max(__ldg(offsets + offsets_start + bag), 0), num_keys);
    *end = min(max(__ldg(offsets + offsets_start + bag + 1), *begin), num_keys);
  }
};

/// `kVector` neighbouring columns: what one lane loads at once.
template <int kVector>
struct Columns;
template <>
struct Columns<1> {
  float v[1];
  __device__ static Columns Load(const float* at) { return {{__ldg(at)}}; }
  __device__ static Columns LoadPlain(const float* at) { return {{*at}}; }
  __device__ void Store(float* at) const { *at = v[0]; }
  __device__ void StoreStreaming(float* at) const { __stcs(at, v[0]); }
};
template <>
struct Columns<4> {
  float v[4];
  __device__ static Columns Of(float4 f) { return {{f.x, f.y, f.z, f.w}}; }
  __device__ static Columns Load(const float* at) { return Of(__ldg(reinterpret_cast<const float4*>(at))); }
  __device__ static Columns LoadPlain(const float* at) { return Of(*reinterpret_cast<const float4*>(at)); }
  __device__ void Store(float* at) const { *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]); }
  __device__ void StoreStreaming(float* at) const {
    __stcs(reinterpret_cast<float4*>(at), make_float4(v[0], v[1], v[2], v[3]));
  }
};

/// Calls body.operator()<kVector, kPerLane>() with the shape of a row of `dim` columns: kPerLane vectors a lane.
template <typename Body>
inline LaunchError DispatchShape(int dim, const Body& body) {
  const LaneShape shape = LaneShape::Of(dim);
  const int per_lane = CeilDiv(dim / shape.vector, shape.lanes);
  if (shape.vector == 4) {
    if (per_lane <= 1) return body.template operator()<4, 1>(shape.lanes);
    if (per_lane <= 2) return body.template operator()<4, 2>(shape.lanes);
    if (per_lane <= 4) return body.template operator()<4, 4>(shape.lanes);
    if (per_lane <= 8) return body.template operator()<4, 8>(shape.lanes);
  } else {
    if (per_lane <= 1) return body.template operator()<1, 1>(shape.lanes);
    if (per_lane <= 2) return body.template operator()<1, 2>(shape.lanes);
    if (per_lane <= 4) return body.template operator()<1, 4>(shape.lanes);
    if (per_lane <= 8) return body.template operator()<1, 8>(shape.lanes);
    if (per_lane <= 16) return body.template operator()<1, 16>(shape.lanes);
    if (per_lane <= 32) return body.template operator()<1, 32>(shape.lanes);
  }
  return "rows of more than 1024 columns";
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_LAUNCH_CUDA_CUH_

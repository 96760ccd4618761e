// Helpers of all CUDA launchers: error checks, grid sizes, features, and the choice of a row's shape at compile time.
#ifndef JAXSOK_KERNELS_LAUNCH_CUDA_CUH_
#define JAXSOK_KERNELS_LAUNCH_CUDA_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../core/row_dtype.h"
#include "../core/row_update.h"
#include "lookup.h"

namespace jaxsok {

constexpr int kWarp = 32;
constexpr int kBlock = 256;

/// Returns the number of multiprocessors of the current GPU, which sizes the grids of grid-stride kernels.
inline int NumMultiprocessors() {
  constexpr int kOfH200 = 132;  // used if the query fails; the launch that follows reports why
  int device = 0, count = 0;
  const bool is_known = cudaGetDevice(&device) == cudaSuccess &&
                        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return is_known ? count : kOfH200;
}

/// Returns the number of blocks that run at once: a multiprocessor holds 2,048 threads. A pass that may have nothing to
/// do has so many blocks.
inline int BlocksOfWave() { return NumMultiprocessors() * (2048 / kBlock); }

/// The block limit of a pass that only stores: about a wave of the largest GPUs.
constexpr int kMostPrepareBlocks = 1024;

/// Returns the number of blocks for one thread an item; at most `most`, if the threads stride over the items.
inline unsigned BlocksFor(int64_t num_items, int64_t most = INT32_MAX) {
  return static_cast<unsigned>(std::min(CeilDiv<int64_t>(num_items, kBlock), most));
}

/// Returns nullptr, or what went wrong with the launches so far.
inline LaunchError LastLaunchError() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// Returns the mask of a group of `lanes` lanes; `start`: its first lane in the warp.
__device__ __forceinline__ unsigned GroupMask(int lanes, int start) {
  return (lanes == kWarp ? ~0u : (1u << lanes) - 1) << start;
}

/// Returns the sum over the lanes of a warp, in lane 0.
__device__ __forceinline__ uint64_t SumOfWarp(uint64_t value) {
#pragma unroll
  for (int offset = kWarp / 2; offset >= 1; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
  return value;
}

__device__ __forceinline__ void AtomicAdd64(uint64_t* sum, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

/// Returns the number of a thread's group of `lanes`, a power of two. It does not divide, since it is called for each
/// row.
__device__ __forceinline__ int GroupOf(int thread, int lanes) { return thread >> (__ffs(lanes) - 1); }

/// The limit of features, whose pointers are a kernel parameter (CUDA 12.1 on accepts 32 KB of them on sm_70 and
/// later).
constexpr int kMaxFeatures = 1024;
template <typename T>
struct FeaturePointers {
  T* data[kMaxFeatures];
};

template <typename T, typename From>
inline LaunchError FillPointers(From* const* from, int32_t num_features, FeaturePointers<T>& to) {
  if (num_features > kMaxFeatures) return "more than 1024 features over one store; split the collection";
  for (int32_t f = 0; f < num_features; ++f) to.data[f] = from[f];
  return nullptr;
}

/// The distribution of bags over blocks: a block takes kBlock / kWarp * granule neighbouring bags of one tile, a warp
/// `granule`.
struct TileShare {
  int granule;  // bags of a warp: a power of two, at most kWarp

  /// Returns a finer share for small batches, so that they too reach every multiprocessor: at least four warps for each
  /// of its schedulers if there are enough bags.
  static TileShare Of(int num_tiles) {
    constexpr int kWarpsWanted = 4 * 4;  // per multiprocessor, which has four schedulers
    const int64_t bags_wanted = int64_t{NumMultiprocessors()} * kWarpsWanted;
    TileShare share{kWarp};
    while (share.granule > 4 && int64_t{num_tiles} * kBagsPerTile < bags_wanted * share.granule) {
      share.granule /= 2;
    }
    return share;
  }
  /// Returns a share for bags of several keys: a warp gets as many bags as have enough keys to be worth its start, and
  /// at least one for each of its groups of `lanes`. Fewer bags mean that the GPU works on fewer tables at a time,
  /// whose hot rows its caches then hold.
  static TileShare OfBags(int num_tiles, int64_t num_keys, int lanes) {
    constexpr int kFewBags = 4, kKeysWanted = 128;  // per warp
    const int most = Of(num_tiles).granule;
    TileShare share{std::max(kFewBags, kWarp / lanes)};
    while (share.granule < most && num_keys * share.granule < int64_t{num_tiles} * kBagsPerTile * kKeysWanted) {
      share.granule *= 2;
    }
    share.granule = std::min(share.granule, most);
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

template <int kBlockSize>
__global__ void __launch_bounds__(kBlockSize) SetWordsKernel(uint32_t* words, int64_t num_words, uint32_t value) {
  const int64_t start = int64_t{blockIdx.x} * kBlockSize + threadIdx.x, stride = int64_t{gridDim.x} * kBlockSize;
  for (int64_t i = start; i < num_words; i += stride) words[i] = value;
}

/// Sets words of 4 bytes by a kernel. In a CUDA graph it takes 1 us between two kernels, where a memset takes 3 to 5.
inline LaunchError SetWords(cudaStream_t stream, void* words, int64_t num_words, uint32_t value) {
  if (num_words == 0) return nullptr;
  const unsigned num_blocks = BlocksFor(num_words, kMostPrepareBlocks);
  SetWordsKernel<kBlock><<<num_blocks, kBlock, 0, stream>>>(static_cast<uint32_t*>(words), num_words, value);
  return LastLaunchError();
}

/// Returns how many low bits distinguish numbers below `bound` from each other and from all ones (kNoRow, kNoOwner):
/// the bits that a sort reads.
inline int BitsBelow(int64_t bound) {
  int bits = 1;
  while ((int64_t{1} << bits) <= bound) ++bits;
  return bits > 32 ? 32 : bits;
}

/// Returns the last feature whose word is at most `value`: features are ordered by tiles, bags and keys alike, and
/// empty ones share their start with the next.
///
/// `total`: that of all features. If features have about equal sizes the first guess is right, and takes the latency of
/// one load.
__device__ __forceinline__ int FeatureAt(const int32_t* features, int num_features, int word, int32_t value,
                                         int64_t total) {
  int low = 0, high = num_features - 1;
  const float share = static_cast<float>(value) / static_cast<float>(total);
  const int guess = min(static_cast<int>(share * static_cast<float>(num_features)), high);
  const int32_t start = __ldg(features + guess * kNumFeatureWords + word);
  const int32_t next = __ldg(features + min(guess + 1, high) * kNumFeatureWords + word);
  if (start <= value && (guess == high || value < next)) return guess;
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

/// The source of a position's table.
struct TableOfPosition {
  const uint32_t* table_ids;  // given, or
  const int32_t* features;    // by feature
  int num_features;
  int64_t num_keys;
  __device__ uint32_t operator()(int64_t position) const {
    if (table_ids != nullptr) return __ldg(table_ids + position);
    const int f = FeatureAt(features, num_features, kFeatureKeyStart, static_cast<int32_t>(position), num_keys);
    return static_cast<uint32_t>(__ldg(features + f * kNumFeatureWords + kFeatureTable));
  }
};

/// The words of one feature.
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

  /// Gets the first and last position of the feature's bags among its keys; positions outside are padding.
  __device__ void Bags(const int32_t* offsets, int32_t* first, int32_t* last) const {
    if (hotness > 0) {
      *first = 0;
      *last = static_cast<int32_t>(min(int64_t{num_bags} * hotness, int64_t{num_keys}));
      return;
    }
    *first = min(max(__ldg(offsets + offsets_start), 0), num_keys);
    *last = max(min(__ldg(offsets + offsets_start + num_bags), num_keys), *first);
  }

  /// Gets the begin and end of a bag among the feature's keys, clamped to them.
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

/// Returns the divisor of a bag's mean or sqrtn in each of the `kLanes` lanes that take the bag. All lanes of the warp
/// call it. `is_use(at)`: the feature's key `at` is no padding.
template <int kLanes, typename IsUse>
__device__ __forceinline__ float DivisorOfBag(const Feature& f, const float* weights, int32_t begin, int32_t end,
                                              const IsUse& is_use) {
  const int lane = static_cast<int>(threadIdx.x % kLanes), first_lane = static_cast<int>(threadIdx.x % kWarp) - lane;
  const int longest = __reduce_max_sync(~0u, end - begin);
  int num_uses = 0;
  float sum = 0.0f;
  for (int chunk = 0; chunk < longest; chunk += kLanes) {
    const int32_t at = begin + chunk + lane;
    const uint32_t uses = __ballot_sync(~0u, at < end && is_use(at)) >> first_lane & ((1u << kLanes) - 1);
    if (f.weights_start < 0) {  // in all lanes: the number is exact, where a sum of ones would end at 2^24
      num_uses += __popc(uses);
      continue;
    }
    const float weight = (uses >> lane & 1) != 0 ? __ldg(weights + f.weights_start + at) : 0.0f;
    for (int i = 0; i < kLanes; ++i) {  // in the order of the positions
      const float other = __shfl_sync(~0u, weight, first_lane + i);
      if ((uses >> i & 1) != 0) sum = sum + (f.combiner == kCombinerSqrtn ? other * other : other);
    }
  }
  const float divisor = f.weights_start < 0 ? static_cast<float>(num_uses) : sum;
  return f.combiner == kCombinerSqrtn ? sqrtf(divisor) : divisor;
}

/// `kVector` neighbouring numbers of a row as stored: one load of a lane.
template <typename Row, int kVector>
struct Packed;
template <>
struct Packed<float, 1> {
  using Type = float;
  __device__ static float Bits(Type packed, int) { return packed; }
  __device__ static Type Of(const float* numbers) { return numbers[0]; }
};
template <>
struct Packed<float, 4> {
  using Type = float4;
  __device__ static float Bits(Type packed, int i) {
    return i == 0 ? packed.x : i == 1 ? packed.y : i == 2 ? packed.z : packed.w;
  }
  __device__ static Type Of(const float* n) { return make_float4(n[0], n[1], n[2], n[3]); }
};
/// Eight floats, as two loads of 16 bytes.
struct alignas(16) EightFloats {
  float4 first, second;
};
template <>
struct Packed<float, 8> {
  using Type = EightFloats;
  __device__ static float Bits(const Type& packed, int i) {
    return Packed<float, 4>::Bits(i < 4 ? packed.first : packed.second, i % 4);
  }
  __device__ static Type Of(const float* n) {
    return {make_float4(n[0], n[1], n[2], n[3]), make_float4(n[4], n[5], n[6], n[7])};
  }
};
template <typename Row>
struct Packed<Row, 1> {
  using Type = unsigned short;
  __device__ static Row Bits(Type packed, int) { return {packed}; }
  __device__ static Type Of(const Row* numbers) { return numbers[0].bits; }
};
template <typename Row>
struct Packed<Row, 4> {
  using Type = uint2;
  __device__ static Row Bits(Type packed, int i) {
    return {static_cast<uint16_t>((i < 2 ? packed.x : packed.y) >> (i % 2 * 16))};
  }
  __device__ static Type Of(const Row* n) {
    return make_uint2(uint32_t{n[0].bits} | uint32_t{n[1].bits} << 16, uint32_t{n[2].bits} | uint32_t{n[3].bits} << 16);
  }
  __device__ static Type OfWords(const uint32_t* words) { return make_uint2(words[0], words[1]); }
};
template <typename Row>
struct Packed<Row, 8> {
  using Type = uint4;
  __device__ static Row Bits(Type packed, int i) {
    const uint32_t word = i < 2 ? packed.x : i < 4 ? packed.y : i < 6 ? packed.z : packed.w;
    return {static_cast<uint16_t>(word >> (i % 2 * 16))};
  }
  __device__ static Type Of(const Row* n) {
    return make_uint4(uint32_t{n[0].bits} | uint32_t{n[1].bits} << 16, uint32_t{n[2].bits} | uint32_t{n[3].bits} << 16,
                      uint32_t{n[4].bits} | uint32_t{n[5].bits} << 16, uint32_t{n[6].bits} | uint32_t{n[7].bits} << 16);
  }
  __device__ static Type OfWords(const uint32_t* words) { return make_uint4(words[0], words[1], words[2], words[3]); }
};

/// Adds to a saturating count. The order of the threads does not matter: every addition that overflows, and every later
/// one, writes the largest value afterwards.
__device__ __forceinline__ void CountAtomically(uint32_t* count, uint32_t value) {
  if (atomicAdd(count, value) > UINT32_MAX - value) atomicExch(count, UINT32_MAX);
}

/// Loads memory that no kernel writes meanwhile.
template <typename T>
__device__ __forceinline__ T LoadReadOnly(const T* at) {
  return __ldg(at);
}
__device__ __forceinline__ EightFloats LoadReadOnly(const EightFloats* at) {
  return {__ldg(&at->first), __ldg(&at->second)};
}

/// `kVector` neighbouring columns, widened.
template <int kVector>
struct Columns {
  float v[kVector];

  template <typename Row>
  __device__ static Columns Widened(typename Packed<Row, kVector>::Type packed) {
    Columns columns;
#pragma unroll
    for (int i = 0; i < kVector; ++i) columns.v[i] = RowNumber<Row>::Widened(Packed<Row, kVector>::Bits(packed, i));
    return columns;
  }
  template <typename Row>
  __device__ static Columns Load(const Row* at) {
    return Widened<Row>(LoadReadOnly(reinterpret_cast<const typename Packed<Row, kVector>::Type*>(at)));
  }
  template <typename Row>
  __device__ static Columns LoadPlain(const Row* at) {
    return Widened<Row>(*reinterpret_cast<const typename Packed<Row, kVector>::Type*>(at));
  }
  /// Returns the numbers rounded to nearest.
  template <typename Row>
  __device__ typename Packed<Row, kVector>::Type Nearest() const {
    Row numbers[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) numbers[i] = RowNumber<Row>::Nearest(v[i]);
    return Packed<Row, kVector>::Of(numbers);
  }
  template <typename Row>
  __device__ void Store(Row* at) const {
    *reinterpret_cast<typename Packed<Row, kVector>::Type*>(at) = Nearest<Row>();
  }
  template <typename Row>
  __device__ void StoreStreaming(Row* at) const {
    __stcs(reinterpret_cast<typename Packed<Row, kVector>::Type*>(at), Nearest<Row>());
  }
  /// Returns the numbers rounded by the row's random bits; `column`: that of the first number.
  template <typename Row>
  __device__ void StoreStochastic(Row* at, const RowRounding& rounding, uint32_t column) const {
    using Type = typename Packed<Row, kVector>::Type;
    if constexpr (std::is_same_v<Row, BFloat16> && kVector % 4 == 0) {
      float size = 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) size = size + fabsf(v[i]);
      // Neither the numbers nor their sum are near infinity or NaN: rounding is a truncated sum.
      if (size < 1e38f) {
        uint32_t words[kVector / 2];
#pragma unroll
        for (int q = 0; q < kVector; q += 4) {
          const uint64_t draw = rounding.Draw((column + q) / 4);
          const uint32_t low = static_cast<uint32_t>(draw), high = static_cast<uint32_t>(draw >> 32);
          words[q / 2] = __byte_perm(BitsOfFloat(v[q]) + (low & 0xffffu), BitsOfFloat(v[q + 1]) + (low >> 16), 0x7632);
          words[q / 2 + 1] =
              __byte_perm(BitsOfFloat(v[q + 2]) + (high & 0xffffu), BitsOfFloat(v[q + 3]) + (high >> 16), 0x7632);
        }
        *reinterpret_cast<Type*>(at) = Packed<Row, kVector>::OfWords(words);
        return;
      }
    }
    Row numbers[kVector];
    uint64_t draw = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i % 4 == 0) draw = rounding.Draw((column + i) / 4);
      numbers[i] = RowNumber<Row>::Stochastic(v[i], static_cast<uint32_t>(draw >> ((column + i) % 4 * 16)) & 0xffffu);
    }
    *reinterpret_cast<Type*>(at) = Packed<Row, kVector>::Of(numbers);
  }
};

/// Returns the number of blocks of kBlock threads that should fit a multiprocessor if lanes hold `kFloats` numbers of a
/// row: narrow rows need many warps in flight to hide the memory's latency, wide ones have enough bytes per lane.
template <int kFloats>
constexpr int BlocksPerMultiprocessor() {
  return kFloats <= 8 ? 4 : kFloats <= 32 ? 2 : 1;
}

/// Returns the number of rows in flight that make `kWanted` numbers a lane.
template <int kWanted, int kFloats>
constexpr int RowsInFlight() {
  return kFloats >= kWanted ? 1 : kWanted / kFloats;
}

/// Returns the compile-time vectors per lane: a power of two, at least the number that a lane holds.
inline int ShapePerLane(int dim, LaneShape shape) {
  int per_lane = 1;
  while (per_lane * shape.lanes * shape.vector < dim) per_lane *= 2;
  return per_lane;
}

/// A compile-time shape of rows: `lanes` lanes share a row, each with kPerLane vectors of kVector columns.
template <int kVectorColumns, int kVectorsPerLane>
struct CompiledShape {
  static constexpr int kVector = kVectorColumns;
  static constexpr int kPerLane = kVectorsPerLane;
  int lanes;
};

/// Calls body(CompiledShape) with the smallest power of two that is at least `per_lane`.
template <int kVector, int kPerLane = 1, typename Body>
inline LaunchError DispatchPerLane(int per_lane, int lanes, const Body& body) {
  if constexpr (kPerLane > kMaxDim / (kWarp * kVector)) {
    return "rows of more than 1024 columns";
  } else {
    if (per_lane <= kPerLane) return body(CompiledShape<kVector, kPerLane>{lanes});
    return DispatchPerLane<kVector, 2 * kPerLane>(per_lane, lanes, body);
  }
}

/// Calls body(CompiledShape) with the shape of a row of `dim` columns.
template <typename Body>
inline LaunchError DispatchShape(int dim, LaneShape shape, const Body& body) {
  const int per_lane = ShapePerLane(dim, shape);
  return shape.vector == 4 ? DispatchPerLane<4>(per_lane, shape.lanes, body)
                           : DispatchPerLane<1>(per_lane, shape.lanes, body);
}

/// Calls body as above, with vectors of 8 columns (LaneShape::OfRows16).
template <typename Body>
inline LaunchError DispatchVectorsOf8(int dim, LaneShape shape, const Body& body) {
  return DispatchPerLane<8>(ShapePerLane(dim, shape), shape.lanes, body);
}

template <typename Body>
inline LaunchError DispatchShape(int dim, const Body& body) {
  return DispatchShape(dim, LaneShape::Of(dim), body);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_LAUNCH_CUDA_CUH_

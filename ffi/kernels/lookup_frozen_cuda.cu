// Lookups in frozen stores on a GPU: one launch for the counts of all stores, then one or two for each store.
//
// Rows of 32 and 16 bits use the kernels of training (lookup_cuda.cuh), with the same bits. Rows of 8 bits have
// separate kernels here, in find mode only. Their lanes load four numbers at once; the output is four times as large,
// so the width of the stores matters.
#include "lookup_cuda.cuh"

namespace jaxsok {

// Compiled in separate files (JAXSOK_CUDA_INSTANCES).
extern template struct LookupOf<float, kModeFind>;
extern template struct LookupOf<BFloat16, kModeFind>;
extern template struct LookupOf<Float16, kModeFind>;

// Lanes hold 8-bit numbers packed: they become floats when they are extracted from the word.

template <>
struct Packed<Int8, 1> {
  using Type = signed char;
  __device__ static float Bits(Type packed, int) { return static_cast<float>(packed); }
};
template <>
struct Packed<Int8, 4> {
  using Type = uint32_t;
  /// Widens a number in two instructions at full rate, while a conversion runs at a quarter of it: with an exponent of
  /// 2^23 the byte counts integers, and the sum is exact. `i` is a compile-time constant.
  __device__ static float Bits(Type packed, int i) {
    return FloatOfBits(__byte_perm(packed ^ 0x80808080u, 0x4b000000u, 0x7540u + i)) - 8388736.0f;
  }
};

/// Widens one of two neighbouring numbers; the conversion is exact.
__device__ __forceinline__ float WidenedHalf(uint32_t pair, int i) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  float widened;
  asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(static_cast<uint16_t>(halves >> (i * 16))));
  return widened;
#else
  return RowNumber<Float8E4m3>::Widened(Float8E4m3{static_cast<uint8_t>(pair >> (i * 8))});
#endif
}
template <>
struct Packed<Float8E4m3, 1> {
  using Type = unsigned char;
  __device__ static float Bits(Type packed, int) { return WidenedHalf(packed, 0); }
};
template <>
struct Packed<Float8E4m3, 4> {
  using Type = uint32_t;
  __device__ static float Bits(Type packed, int i) { return WidenedHalf(packed >> (i / 2 * 16), i % 2); }
};

namespace {

/// Copies as CopyRows, for rows with scales; lane i holds the scale of position i.
template <typename Row, int kVector, int kPerLane>
__device__ __forceinline__ void CopyQuantizedRows(const Position& mine, float my_scale, int num_valid,
                                                  const StoreView& store, uint32_t table, int lanes, float* lines,
                                                  int64_t first_line) {
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane % lanes, group = warp_lane / lanes, groups = kWarp / lanes;
  float* out = lines + first_line * store.dim;
  if (__all_sync(~0u, mine.kind == kPositionRow || warp_lane >= num_valid)) {
    // Vectors stay packed until they are used; single numbers take a register each.
    constexpr int kFlight = RowsInFlight<kVector == 1 ? 8 : 32, kVector * kPerLane>();
    for (int first = 0; first < num_valid; first += groups * kFlight) {
      PackedPart<Row, kVector, kPerLane> rows[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int from = first + i * groups + group;
        const auto row = reinterpret_cast<const Row*>(
            __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.pointer), from & (kWarp - 1)));
        if (from < num_valid) rows[i].Load(row, lane, lanes, store.dim);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int64_t from = first + i * groups + group;
        const float scale = __shfl_sync(~0u, my_scale, static_cast<int>(from) & (kWarp - 1));
        if (from >= num_valid) continue;
        RowPart<kVector, kPerLane> row = rows[i].Widened();
        row.Scale(scale);
        row.StoreStreaming(out + from * store.dim, lane, lanes, store.dim);
      }
    }
    return;
  }
  for (int first = 0; first < num_valid; first += groups) {
    const int from = first + group;
    const Position p = Shuffle(mine, from & (kWarp - 1));
    const float scale = __shfl_sync(~0u, my_scale, from & (kWarp - 1));
    if (from >= num_valid) continue;
    RowPart<kVector, kPerLane> row;
    LoadPosition<Row>(p, store, table, lane, lanes, row);
    if (p.kind == kPositionRow) row.Scale(scale);
    row.StoreStreaming(out + int64_t{from} * store.dim, lane, lanes, store.dim);
  }
}

/// The contribution of positions whose rows have scales: a scale is requested as soon as its row is known.
template <typename RowType>
struct QuantizedSource : LookupSource<kModeFind, RowType> {
  using Base = LookupSource<kModeFind, RowType>;
  using typename Base::Token;
  using Sum = float;
  float scale = 0.0f;  // of the last position; meaningless if it has no row

  __device__ Position Take(int32_t at, uint64_t key, const ProbeResult& found) {
    if (key != kPaddingKey && found.row_id < this->a.store.capacity) {
      scale = __ldg(this->a.store.scales + found.row_id);
    }
    return Base::Take(at, key, found);
  }
  __device__ Position Resolve(int32_t at, const Token& token, bool valid) {
    const ProbeResult found = this->Walk(token);
    return valid ? Take(at, token.key, found) : Position{nullptr, kPaddingKey, kPositionPadding, 1.0f};
  }
  template <int kVector, int kPerLane>
  __device__ void Copy(const Position& mine, int num_valid, int lanes, void* out, bool, int64_t first_line) const {
    CopyQuantizedRows<RowType, kVector, kPerLane>(mine, scale, num_valid, this->a.store,
                                                  static_cast<uint32_t>(this->f.table), lanes, static_cast<float*>(out),
                                                  first_line);
  }
};

/// Returns the tiles of a batch. Every feature has at least one, with or without keys: this function does not know the
/// number of its keys. Blocks beyond the last tile in the feature words find no bag and count nothing.
int32_t NumTilesOf(const FrozenLookup& lookup) {
  int64_t num_tiles = 0;
  for (int32_t f = 0; f < lookup.batch.num_features; ++f) {
    const int64_t tiles = CeilDiv<int64_t>(lookup.num_bags[f], kBagsPerTile);
    num_tiles += tiles > 1 ? tiles : 1;
  }
  return static_cast<int32_t>(num_tiles);
}

}  // namespace

LaunchError LaunchLookupFrozen(Stream stream, const FrozenLookup* lookups, int32_t num_stores, int32_t* counts) {
  int num_tables = 0;
  for (int32_t s = 0; s < num_stores; ++s) num_tables += lookups[s].store.num_tables;
  if (num_tables == 0) return nullptr;
  if (counts != nullptr) JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, counts, int64_t{num_tables} * kNumCounts, 0));
  for (int32_t s = 0; s < num_stores; ++s) {
    const FrozenLookup& lookup = lookups[s];
    EmbeddingPointers pointers;
    JAXSOK_RETURN_IF_LAUNCH(pointers.Fill(lookup.embeddings, lookup.batch.num_features, lookup.store.row_dtype));
    LookupArguments a{lookup.store, lookup.batch, nullptr, nullptr, counts, {}};
    if (counts != nullptr) counts += lookup.store.num_tables * kNumCounts;
    a.batch.num_tiles = NumTilesOf(lookup);
    if (lookup.key_arrays != nullptr) {
      if (lookup.batch.num_features > kMostKeyArrays) return "keys: more than 64 arrays of a store; join them";
      a.has_key_arrays = true;
      std::copy_n(lookup.key_arrays, lookup.batch.num_features, a.key_arrays);
    }
    if (a.batch.num_tiles == 0) continue;
    JAXSOK_RETURN_IF_LAUNCH(WithStoredDtypes(a.store.row_dtype, kRowDtypeFloat32, [&](auto row, auto) {
      using Row = decltype(row);
      if constexpr (kIsQuantized<Row>) {
        return LaunchSource<QuantizedSource<Row>>(stream, a, pointers);
      } else {
        return LookupOf<Row, kModeFind>::Main(stream, a, pointers);
      }
    }));
  }
  return nullptr;
}

}  // namespace jaxsok

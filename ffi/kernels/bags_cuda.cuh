// Bags on a GPU: kernels combine the rows of each bag into its embedding, wherever the rows come from.
//
// A block takes bags of one tile, so of one feature (TileShare). `lanes` neighbouring lanes of a warp (LaneShape) share
// a row of dim columns, each with kPerLane vectors of kVector columns, so a warp works on 32 / lanes rows at once. Each
// lane finds one row id, 32 keys a warp at a time: many loads of probes and of rows are in flight.
#ifndef JAXSOK_KERNELS_BAGS_CUDA_CUH_
#define JAXSOK_KERNELS_BAGS_CUDA_CUH_

#include <type_traits>

#include "../core/initialize.h"
#include "launch_cuda.cuh"
#include "window.h"

namespace jaxsok {

/// The contribution of one position.
enum PositionKind : int {
  kPositionPadding = 0,     // nothing; not counted in the hotness
  kPositionRow = 1,         // the row at `pointer`
  kPositionInitial = 2,     // the initial row of the key
  kPositionZeros = 3,       // zeros, but counted in the hotness
  kPositionUnfinished = 4,  // unknown in this pass: the finishing pass computes the bag
};

struct Position {
  const void* pointer;
  uint64_t key;
  int kind;
  float weight;
};

/// Calls visit(k, column) for the vectors of a row that a lane holds: `column` is the first of vector k.
template <int kVector, int kPerLane, typename Visit>
__device__ __forceinline__ void ForVectors(int lane, int lanes, int dim, const Visit& visit) {
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int column = (lane + k * lanes) * kVector;
    if (column < dim) visit(k, column);
  }
}

/// Returns the k-th vector of a row that a lane reads. Beyond the end it returns the last vector. Its value there is
/// meaningless, but defined, so that the compiler keeps no register for the previous value.
template <int kVector>
__device__ __forceinline__ uint32_t VectorToRead(int k, int lane, int lanes, int dim) {
  return static_cast<uint32_t>(min(lane + k * lanes, dim / kVector - 1));
}

template <typename Row, int kVector, int kPerLane>
struct PackedPart;

/// The part of one row that one lane holds: `kPerLane` vectors.
template <int kVector, int kPerLane>
struct RowPart {
  Columns<kVector> part[kPerLane];

  template <typename Row>
  __device__ void Load(const Row* row, int lane, int lanes, int dim) {
    PackedPart<Row, kVector, kPerLane> packed;
    packed.Load(row, lane, lanes, dim);
    *this = packed.Widened();
  }
  /// Loads as above for a copied row: nothing is read beyond its end.
  template <typename Row>
  __device__ void LoadToCopy(const Row* row, int lane, int lanes, int dim) {
    ForVectors<kVector, kPerLane>(lane, lanes, dim,
                                  [&](int k, int column) { part[k] = Columns<kVector>::Load(row + column); });
  }
  /// Loads from rows that this kernel also writes.
  template <typename Row>
  __device__ void LoadPlain(const Row* row, int lane, int lanes, int dim) {
    PackedPart<Row, kVector, kPerLane> packed;
    packed.LoadPlain(row, lane, lanes, dim);
    *this = packed.Widened();
  }
  /// Fills the part with a new row's initial values, rounded to the row's dtype.
  template <typename Row>
  __device__ void LoadInitial(const RowInitializer& values, int lane, int lanes) {
    ForNumbers([&](int k, int i, float& number) {
      const float value = values.At(static_cast<uint32_t>((lane + k * lanes) * kVector + i));
      number = RowNumber<Row>::Widened(RowNumber<Row>::Nearest(value));
    });
  }
  template <typename Row>
  __device__ void Store(Row* row, int lane, int lanes, int dim) const {
    ForVectors<kVector, kPerLane>(lane, lanes, dim, [&](int k, int column) { part[k].Store(row + column); });
  }
  template <typename Row>
  __device__ void StoreStreaming(Row* row, int lane, int lanes, int dim) const {
    ForVectors<kVector, kPerLane>(lane, lanes, dim, [&](int k, int column) { part[k].StoreStreaming(row + column); });
  }
  template <typename Row>
  __device__ void StoreStochastic(Row* row, const RowRounding& rounding, int lane, int lanes, int dim) const {
    ForVectors<kVector, kPerLane>(lane, lanes, dim, [&](int k, int column) {
      part[k].StoreStochastic(row + column, rounding, static_cast<uint32_t>(column));
    });
  }
  __device__ void Fill(float value) {
    ForNumbers([&](int, int, float& number) { number = value; });
  }
  __device__ void Add(const RowPart& other) {
    ForNumbers([&](int k, int i, float& number) { number = number + other.part[k].v[i]; });
  }
  __device__ void Scale(float factor) {
    ForNumbers([&](int, int, float& number) { number = number * factor; });
  }
  /// Returns the part that another lane of the warp holds. All lanes call it together.
  __device__ RowPart Shuffle(int from) const {
    RowPart other;
    other.ForNumbers([&](int k, int i, float& number) { number = __shfl_sync(~0u, part[k].v[i], from); });
    return other;
  }

 private:
  /// Calls visit(k, i, number) for number i of vector k.
  template <typename Visit>
  __device__ __forceinline__ void ForNumbers(const Visit& visit) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) visit(k, i, part[k].v[i]);
    }
  }
};

/// A lane's part of a row as stored: for rows of 16 bits it takes half the registers of a RowPart.
template <typename Row, int kVector, int kPerLane>
struct PackedPart {
  using Type = typename Packed<Row, kVector>::Type;
  Type part[kPerLane];

  __device__ void Load(const Row* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      part[k] = LoadReadOnly(reinterpret_cast<const Type*>(row) + VectorToRead<kVector>(k, lane, lanes, dim));
    }
  }
  /// Loads from rows that this kernel also writes.
  __device__ void LoadPlain(const Row* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      part[k] = reinterpret_cast<const Type*>(row)[VectorToRead<kVector>(k, lane, lanes, dim)];
    }
  }
  __device__ RowPart<kVector, kPerLane> Widened() const {
    RowPart<kVector, kPerLane> wide;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) wide.part[k] = Columns<kVector>::template Widened<Row>(part[k]);
    return wide;
  }
};

/// The embedding outputs: in the dtype of the rows, or in float32.
struct EmbeddingPointers {
  FeaturePointers<void> pointers;
  bool is_float32;

  /// Fills in the pointers. `narrows`: bags of float32 rows may be written as bfloat16.
  LaunchError Fill(const EmbeddingsView& embeddings, int32_t num_features, RowDtype rows, bool narrows = false) {
    const bool is_narrow = narrows && rows == kRowDtypeFloat32 && embeddings.dtype == kRowDtypeBfloat16;
    if (!is_narrow && !HasRowDtypes(rows, embeddings.dtype)) return kWrongEmbeddings;
    is_float32 = embeddings.dtype == kRowDtypeFloat32;
    return FillPointers(embeddings.data, num_features, pointers);
  }
};

/// Returns the address of a row of `dim` numbers in an array, or in the windows of shards.
template <typename To>
__device__ __forceinline__ To* LineAt(void* lines, int64_t line, int dim) {
  return static_cast<To*>(lines) + line * dim;
}
template <typename To>
__device__ __forceinline__ To* LineAt(const LineTarget& lines, int64_t line, int dim) {
  return reinterpret_cast<To*>(lines.At(line, int64_t{dim} * static_cast<int64_t>(sizeof(To))));
}

/// Writes one row of a lookup's output. `line`: its number among rows of `dim`.
template <typename Row, int kVector, int kPerLane, typename Lines>
__device__ __forceinline__ void WriteLine(const RowPart<kVector, kPerLane>& part, const Lines& lines, bool is_float32,
                                          int64_t line, int lane, int lanes, int dim) {
  if (is_float32) {
    part.StoreStreaming(LineAt<float>(lines, line, dim), lane, lanes, dim);
  } else {
    part.StoreStreaming(LineAt<Row>(lines, line, dim), lane, lanes, dim);
  }
}

__device__ __forceinline__ Position Shuffle(const Position& p, int from) {
  Position q;
  q.pointer = reinterpret_cast<const void*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(p.pointer), from));
  q.key = __shfl_sync(~0u, static_cast<unsigned long long>(p.key), from);
  q.kind = __shfl_sync(~0u, p.kind, from);
  q.weight = __shfl_sync(~0u, p.weight, from);
  return q;
}

/// Returns a row's part, from the source that the position names.
template <typename Row, int kVector, int kPerLane>
__device__ __forceinline__ void LoadPosition(const Position& p, const StoreView& store, uint32_t table, int lane,
                                             int lanes, RowPart<kVector, kPerLane>& row) {
  if (p.kind == kPositionRow) {
    row.Load(static_cast<const Row*>(p.pointer), lane, lanes, store.dim);
  } else if (p.kind == kPositionInitial) {
    row.template LoadInitial<Row>(RowInitializer::Of(store.tables + table * kNumTableWords, store.seed, p.key), lane,
                                  lanes);
  } else {
    row.Fill(0.0f);
  }
}

/// The table of each lane's position, if all have the same.
struct OneTable {
  uint32_t table;
  __device__ uint32_t At(int) const { return table; }
};
/// The table of each lane's position, if they differ. All lanes of the warp call it together.
struct TableByLane {
  uint32_t mine;
  __device__ uint32_t At(int from) const { return __shfl_sync(~0u, mine, from); }
};

/// Copies 32 rows, lane i holding the pointer of row i, to rows `first_line` and following of the output.
template <typename From, typename To, int kVector, int kPerLane, typename Lines>
__device__ __forceinline__ void CopyLines(const void* mine, int num_valid, int dim, int lanes, const Lines& lines,
                                          int64_t first_line) {
  constexpr int kFlight = RowsInFlight<16, kVector * kPerLane>();
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane % lanes, group = warp_lane / lanes, groups = kWarp / lanes;
  for (int first = 0; first < num_valid; first += groups * kFlight) {
    RowPart<kVector, kPerLane> rows[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int from = first + i * groups + group;
      const auto row = reinterpret_cast<const From*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), from & (kWarp - 1)));
      if (from < num_valid) rows[i].LoadToCopy(row, lane, lanes, dim);
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int64_t from = first + i * groups + group;
      if (from < num_valid) rows[i].StoreStreaming(LineAt<To>(lines, first_line + from, dim), lane, lanes, dim);
    }
  }
}

/// Copies the rows of 32 positions, lane i holding position i, to rows `first_line` and following of the output, as
/// float32 or as `Narrow`.
template <typename Row, int kVector, int kPerLane, typename Narrow = Row, typename TableOf, typename Lines>
__device__ __forceinline__ void CopyRows(const Position& mine, int num_valid, const StoreView& store,
                                         const TableOf& table_of, int lanes, const Lines& lines, bool is_float32,
                                         int64_t first_line) {
  const int warp_lane = threadIdx.x % kWarp;
  if (__all_sync(~0u, mine.kind == kPositionRow || warp_lane >= num_valid)) {
    if constexpr (std::is_same_v<Narrow, float>) {
      CopyLines<float, float, kVector, kPerLane>(mine.pointer, num_valid, store.dim, lanes, lines, first_line);
    } else if (is_float32) {
      CopyLines<Row, float, kVector, kPerLane>(mine.pointer, num_valid, store.dim, lanes, lines, first_line);
    } else if (std::is_same_v<Row, Narrow> && store.dim % 8 == 0) {
      // Copied unchanged: pairs of 16-bit numbers are treated as floats.
      CopyLines<float, float, kVector, kPerLane>(mine.pointer, num_valid, store.dim / 2, lanes, lines, first_line);
    } else {
      CopyLines<Row, Narrow, kVector, kPerLane>(mine.pointer, num_valid, store.dim, lanes, lines, first_line);
    }
    return;
  }
  const int lane = warp_lane % lanes, group = warp_lane / lanes, groups = kWarp / lanes;
  for (int first = 0; first < num_valid; first += groups) {
    const int from = first + group;
    const Position p = Shuffle(mine, from & (kWarp - 1));
    const uint32_t table = table_of.At(from & (kWarp - 1));
    if (from >= num_valid || p.kind == kPositionUnfinished) continue;
    RowPart<kVector, kPerLane> row;
    LoadPosition<Row>(p, store, table, lane, lanes, row);
    WriteLine<Narrow>(row, lines, is_float32, first_line + from, lane, lanes, store.dim);
  }
}

/// Returns the number of blocks of kBlock threads that should fit a multiprocessor while bags are summed: many, so that
/// some warps add rows while others wait for keys, index lines and rows.
template <int kFloats>
constexpr int BagBlocksPerMultiprocessor() {
  return kFloats <= 4 ? 4 : kFloats <= 8 ? 3 : kFloats <= 32 ? 2 : 1;
}

/// Returns a mask of the lowest `count` bits, at most 32.
__device__ __forceinline__ unsigned LowBits(int count) { return count >= kWarp ? ~0u : (1u << count) - 1; }

/// Neighbouring bags that one group of lanes sums, at most one for each of its lanes.
///
/// Their positions are neighbours too: a bag begins where the previous one ends.
struct GroupBags {
  int32_t first_bag;  // of the feature
  int32_t num_bags;
  int32_t begin, end;  // positions among the feature's keys
  int32_t own_end;     // the end of the bag whose number in the group is the calling lane's

  /// Returns the share of the calling lane's group in bags [first_bag, last_bag) of a warp, at most kWarp.
  __device__ static GroupBags Of(const Feature& f, const int32_t* offsets, int32_t first_bag, int32_t last_bag,
                                 int granule, int lanes) {
    const int32_t of_group = max(granule * lanes / kWarp, 1);
    const int warp_lane = threadIdx.x % kWarp, lane = warp_lane & (lanes - 1);
    GroupBags g;
    g.first_bag = first_bag + GroupOf(warp_lane, lanes) * of_group;
    g.num_bags = min(max(last_bag - g.first_bag, 0), of_group);
    int32_t begin = 0;
    g.own_end = 0;
    if (lane < g.num_bags) f.BagRange(offsets, g.first_bag + lane, &begin, &g.own_end);
    g.begin = __shfl_sync(~0u, begin, warp_lane - lane);
    g.end = __shfl_sync(~0u, g.own_end, warp_lane - lane + max(g.num_bags - 1, 0));
    g.own_end = min(g.own_end, g.end);
    return g;
  }
};

/// The positions of a warp's current window. In shared memory, because the sums need the registers.
struct alignas(16) WindowRows {
  const void* rows[kWarp];  // the kind of a position without a row
  uint64_t keys[kWarp];     // used if a position has neither a row nor padding
  float weights[kWarp];
  int32_t ends[kWarp];  // of bags
};

/// The state of a group's bag after all its rows are added.
struct BagResult {
  bool unfinished;
  bool zeros;    // the divisor is zero, or the bag is empty
  float factor;  // of mean and sqrtn
};

/// Sums the bags of each group of lanes, and passes each to write(bag, result, sum), which the lanes of a group call
/// together. Returns the unfinished bags of the calling lane's group, as bits.
///
/// A group takes its positions in windows of as many positions as it has lanes, regardless of bag ends: each lane finds
/// the row of one position, then all of them add the rows of the window. A source provides the contribution of a
/// position: Resolve returns it, and Load requests the key one window earlier. The warp calls both together.
///
/// Quantized rows: a source holds the `scale` of the last resolved position.
///
/// Order of the sum: by position, from the first row. It begins at -0, since -0 plus any number is that number.
template <typename Row, int kVector, int kPerLane, typename Source, typename Write>
__device__ __forceinline__ uint32_t SumBags(const Feature& f, const GroupBags& bags, const StoreView& store, int lanes,
                                            Source& source, WindowRows& window, const Write& write) {
  constexpr int kFloats = kVector * kPerLane;
  constexpr int kFlight = RowsInFlight<16, (kFloats > 4 ? kFloats : 4)>();
  using Token = typename Source::Token;
  using Part = RowPart<kVector, kPerLane>;
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane & (lanes - 1), group_start = warp_lane - lane;
  const unsigned group_mask = GroupMask(lanes, group_start);
  const bool weighted = f.weights_start >= 0;
  const auto load = [&](int32_t at) { return lane < bags.end - at ? source.Load(at + lane) : Source::None(); };
  const auto scale_of = [&](int i) {
    float scale = 1.0f;
    // Not through shared memory: rows are requested before any lane waits for a scale.
    if constexpr (kIsQuantized<Row>) scale = __shfl_sync(group_mask, source.scale, group_start + i);
    return scale;
  };

  window.ends[warp_lane] = bags.own_end;
  __syncwarp();
  int bag = 0;  // among those of the group
  const auto end_of_bag = [&] { return bag < bags.num_bags ? window.ends[group_start + bag] : INT32_MAX; };
  int32_t bag_end = end_of_bag();
  uint32_t unfinished_bags = 0;

  Part sum;
  sum.Fill(-0.0f);
  int hotness = 0;
  float weights = 0.0f;
  const auto add = [&](int i, Part& row) {
    if (weighted) {
      const float weight = window.weights[group_start + i];
      row.Scale(weight);
      weights = weights + (f.combiner == kCombinerSqrtn ? weight * weight : weight);
    }
    sum.Add(row);
  };
  int32_t at = bags.begin;
  // Empty bags have a window too, in which their embeddings are written.
  int32_t to_come = max(static_cast<int32_t>(__reduce_max_sync(~0u, bags.end - bags.begin)), 1);
  Token next_token = load(at);
#pragma unroll 1
  for (; to_come > 0; to_come -= lanes, at += lanes) {
    const Token token = next_token;
    next_token = load(at + lanes);
    const int count = max(min(bags.end - at, lanes), 0);
    unsigned used;  // bits of the group's positions that are not padding
    bool are_rows;  // all positions of all groups have rows or padding
    {
      const Position mine = source.Resolve(at + lane, token, lane < count);
      are_rows = __all_sync(~0u, mine.kind <= kPositionRow);
      used = (__ballot_sync(~0u, mine.kind != kPositionPadding) & group_mask) >> group_start;
      window.rows[warp_lane] =
          mine.kind == kPositionRow ? mine.pointer : reinterpret_cast<const void*>(int64_t{mine.kind});
      if (!are_rows) window.keys[warp_lane] = mine.key;
      if (weighted) window.weights[warp_lane] = mine.weight;
    }
    __syncwarp();
    const void* const* pointers = window.rows + group_start;
    const bool is_plain = are_rows && !weighted && used == LowBits(count);
    int first = 0;
#pragma unroll 1
    while (true) {
      const int stop = max(min(bag_end - at, count), first);  // of the current bag
      hotness += __popc(used & LowBits(stop) & ~LowBits(first));
      if (is_plain) {
#pragma unroll 1
        for (; first + kFlight <= stop; first += kFlight) {
          Part rows[kFlight];
#pragma unroll
          for (int i = 0; i < kFlight; ++i) {
            rows[i].Load(static_cast<const Row*>(pointers[first + i]), lane, lanes, store.dim);
          }
#pragma unroll
          for (int i = 0; i < kFlight; ++i) {
            if constexpr (kIsQuantized<Row>) rows[i].Scale(scale_of(first + i));
            sum.Add(rows[i]);
          }
        }
      }
      if (are_rows) {
#pragma unroll 1
        for (; first < stop; first += kFlight) {
          const unsigned bits = used >> first & LowBits(min(stop - first, kFlight));
          Part rows[kFlight];
#pragma unroll
          for (int i = 0; i < kFlight; ++i) {
            rows[i].Fill(0.0f);  // otherwise the compiler keeps its registers through all loops
            if ((bits >> i & 1) == 0) continue;
            rows[i].Load(static_cast<const Row*>(pointers[first + i]), lane, lanes, store.dim);
          }
#pragma unroll
          for (int i = 0; i < kFlight; ++i) {
            if ((bits >> i & 1) == 0) continue;
            if constexpr (kIsQuantized<Row>) rows[i].Scale(scale_of(first + i));
            add(first + i, rows[i]);
          }
        }
      }
#pragma unroll 1
      for (; first < stop; ++first) {
        const int64_t kind = reinterpret_cast<int64_t>(pointers[first]);
        const float scale = scale_of(first);
        if (kind == kPositionPadding) continue;
        if (kind == kPositionUnfinished) unfinished_bags |= 1u << bag;
        const Position p{pointers[first], window.keys[group_start + first],
                         kind <= kPositionUnfinished ? static_cast<int>(kind) : kPositionRow, 1.0f};
        Part row;
        LoadPosition<Row>(p, store, source.TableAt(at + first), lane, lanes, row);
        if (kIsQuantized<Row> && p.kind == kPositionRow) row.Scale(scale);
        add(first, row);
      }
      first = stop;
      if (bag_end - at > count) break;
      BagResult result;
      result.unfinished = (unfinished_bags >> bag & 1) != 0;
      result.factor = 1.0f;
      result.zeros = hotness == 0;
      if (f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn) {
        float divisor = weighted ? weights : static_cast<float>(hotness);
        if (f.combiner == kCombinerSqrtn) divisor = sqrtf(divisor);
        result.zeros = divisor == 0.0f;
        result.factor = 1.0f / divisor;
      }
      write(bags.first_bag + bag, result, sum);
      sum.Fill(-0.0f);
      hotness = 0;
      weights = 0.0f;
      ++bag;
      bag_end = end_of_bag();
    }
    __syncwarp();
  }
  return unfinished_bags;
}

/// Writes a bag's embedding, if it is finished.
template <typename Row, int kVector, int kPerLane>
__device__ __forceinline__ void WriteBag(const Feature& f, const BagResult& bag, RowPart<kVector, kPerLane>& sum,
                                         int lanes, int dim, void* lines, bool is_float32, int64_t line) {
  if (bag.unfinished) return;
  if (bag.zeros) {
    sum.Fill(0.0f);
  } else if (f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn) {
    sum.Scale(bag.factor);
  }
  WriteLine<Row>(sum, lines, is_float32, line, threadIdx.x % lanes, lanes, dim);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_BAGS_CUDA_CUH_

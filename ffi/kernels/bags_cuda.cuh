// Bags on a GPU: the rows of each bag into its embedding, wherever the rows come from.
//
// A block takes bags of one tile, so of one feature (TileShare). A row of dim columns is shared by `lanes` neighbouring
// lanes of a warp (LaneShape), each with kPerLane vectors of kVector columns, so a warp works on 32 / lanes rows at
// once. Row ids are found lane by lane, 32 keys a warp at a time: probes and rows are both many loads in flight.
#ifndef JAXSOK_KERNELS_BAGS_CUDA_CUH_
#define JAXSOK_KERNELS_BAGS_CUDA_CUH_

#include <type_traits>

#include "../core/initialize.h"
#include "launch_cuda.cuh"
#include "window.h"

namespace jaxsok {

/// What one position contributes.
enum PositionKind : int {
  kPositionPadding = 0,     // nothing; not part of the hotness
  kPositionRow = 1,         // the row at `pointer`
  kPositionInitial = 2,     // the row that the key would get
  kPositionZeros = 3,       // zeros, yet part of the hotness
  kPositionUnfinished = 4,  // not known in this pass: the bag is left to the finishing one
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

/// `kPerLane` vectors of one row in one lane.
template <int kVector, int kPerLane>
struct RowPart {
  Columns<kVector> part[kPerLane];

  template <typename Row>
  __device__ void Load(const Row* row, int lane, int lanes, int dim) {
    ForVectors<kVector, kPerLane>(lane, lanes, dim,
                                  [&](int k, int column) { part[k] = Columns<kVector>::Load(row + column); });
  }
  /// For rows that this kernel also writes.
  template <typename Row>
  __device__ void LoadPlain(const Row* row, int lane, int lanes, int dim) {
    ForVectors<kVector, kPerLane>(lane, lanes, dim,
                                  [&](int k, int column) { part[k] = Columns<kVector>::LoadPlain(row + column); });
  }
  /// What a new row holds: rounded as one.
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
  /// The part that another lane of the warp holds. All lanes ask together.
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

/// A lane's part of a row as it is stored: of 16 bits half the registers of a RowPart.
template <typename Row, int kVector, int kPerLane>
struct PackedPart {
  using Type = typename Packed<Row, kVector>::Type;
  Type part[kPerLane];

  __device__ void Load(const Row* row, int lane, int lanes, int dim) {
    ForVectors<kVector, kPerLane>(lane, lanes, dim, [&](int k, int column) {
      part[k] = LoadReadOnly(reinterpret_cast<const Type*>(row + column));
    });
  }
  /// For rows that this kernel also writes.
  __device__ void LoadPlain(const Row* row, int lane, int lanes, int dim) {
    ForVectors<kVector, kPerLane>(lane, lanes, dim,
                                  [&](int k, int column) { part[k] = *reinterpret_cast<const Type*>(row + column); });
  }
  __device__ RowPart<kVector, kPerLane> Widened() const {
    RowPart<kVector, kPerLane> wide;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) wide.part[k] = Columns<kVector>::template Widened<Row>(part[k]);
    return wide;
  }
};

/// Where embeddings go: in the dtype of the rows, or in float32.
struct EmbeddingPointers {
  FeaturePointers<void> pointers;
  bool is_float32;

  /// `narrows`: whether bags of float32 rows may be written as bfloat16.
  LaunchError Fill(const EmbeddingsView& embeddings, int32_t num_features, RowDtype rows, bool narrows = false) {
    const bool is_narrow = narrows && rows == kRowDtypeFloat32 && embeddings.dtype == kRowDtypeBfloat16;
    if (!is_narrow && !HasRowDtypes(rows, embeddings.dtype)) return kWrongEmbeddings;
    is_float32 = embeddings.dtype == kRowDtypeFloat32;
    return FillPointers(embeddings.data, num_features, pointers);
  }
};

/// Where a line of `dim` numbers lies in an array, or in the windows of shards.
template <typename To>
__device__ __forceinline__ To* LineAt(void* lines, int64_t line, int dim) {
  return static_cast<To*>(lines) + line * dim;
}
template <typename To>
__device__ __forceinline__ To* LineAt(const LineTarget& lines, int64_t line, int dim) {
  return reinterpret_cast<To*>(lines.At(line, int64_t{dim} * static_cast<int64_t>(sizeof(To))));
}

/// Writes one line of what a lookup gives. `line`: its number among lines of `dim`.
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

/// A row's part, from wherever the position says.
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

/// The table of each lane's position: one for all of them,
struct OneTable {
  uint32_t table;
  __device__ uint32_t At(int) const { return table; }
};
/// or each lane's own. The warp asks together.
struct TableByLane {
  uint32_t mine;
  __device__ uint32_t At(int from) const { return __shfl_sync(~0u, mine, from); }
};

/// Copies 32 rows, lane i holding the pointer of row i, to lines `first_line` and following of the output.
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
      if (from < num_valid) rows[i].Load(row, lane, lanes, dim);
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int64_t from = first + i * groups + group;
      if (from < num_valid) rows[i].StoreStreaming(LineAt<To>(lines, first_line + from, dim), lane, lanes, dim);
    }
  }
}

/// Copies the rows of 32 positions, lane i holding position i, to lines `first_line` and following of the output, as
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
      // As they are: pairs of numbers of 16 bits are copied as if they were floats.
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

/// Blocks of kBlock threads that should fit a multiprocessor while bags are summed: rows in flight want registers.
template <int kFloats>
constexpr int BagBlocksPerMultiprocessor() {
  return kFloats <= 32 ? 2 : 1;
}

/// One group's part of one bag: a position for each of its lanes.
struct Window {
  int32_t first;  // position among the feature's keys
  int32_t count;  // at most 0: none
  int32_t bag;    // of the feature; beyond its last one: none
  bool is_last;   // the bags at hand end here; the same in all lanes of the warp
};

/// Deals neighbouring bags of one feature to the groups of a warp, window by window. The warp calls together.
class BagWalk {
 public:
  __device__ BagWalk(const Feature& f, const int32_t* offsets, int32_t first_bag, int32_t last_bag, int lanes)
      : f_(f), offsets_(offsets), next_(first_bag), last_(last_bag), lanes_(lanes) {}

  __device__ bool Next(Window& w) {
    if (at_ >= longest_) {
      if (next_ >= last_) return false;
      bag_ = next_ + static_cast<int32_t>(threadIdx.x % kWarp) / lanes_;
      next_ += kWarp / lanes_;
      begin_ = end_ = 0;
      if (bag_ < last_) f_.BagRange(offsets_, bag_, &begin_, &end_);
      // An empty bag has a window too: its embedding is written.
      longest_ = max(static_cast<int32_t>(__reduce_max_sync(~0u, end_ - begin_)), 1);
      at_ = 0;
    }
    w.first = begin_ + at_;
    w.count = min(end_ - w.first, lanes_);
    w.bag = bag_ < last_ ? bag_ : -1;
    at_ += lanes_;
    w.is_last = at_ >= longest_;
    return true;
  }

 private:
  const Feature& f_;
  const int32_t* offsets_;
  int32_t next_, last_, lanes_;
  int32_t bag_ = 0, begin_ = 0, end_ = 0, at_ = 0, longest_ = 0;
};

/// Where the rows of a warp's window lie, and their weights. In shared memory: registers are what the sums need.
struct WindowRows {
  const void* rows[kWarp];  // nullptr: padding
  float weights[kWarp];
};

/// What a group of lanes knows of its bag when all its rows are added.
struct BagResult {
  bool unfinished;
  bool zeros;    // the divisor is zero, or the bag is empty
  float factor;  // of mean and sqrtn
};

/// Sums the bags of a walk, one for each group of lanes at a time, and hands each to write(bag, result, sum).
///
/// A source says what a position contributes, in three steps, so that memory is asked long before it is needed: while
/// the rows of one window are added, the index lines of the next are on their way (Ask) and the keys of the one after
/// it (Load).
///
/// Quantized rows: a source holds the `scale` of the position that it resolved last.
///
/// Order of the sum: by position, from the first row. It begins at -0, which added to any number gives that number.
template <typename Row, int kVector, int kPerLane, typename Walk, typename Source, typename Write>
__device__ __forceinline__ void SumBags(const Feature& f, Walk& walk, const StoreView& store, int lanes, Source& source,
                                        WindowRows& window_rows, const Write& write) {
  constexpr int kFlight = RowsInFlight<32, kVector * kPerLane>();
  using Token = typename Source::Token;
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane % lanes, group_start = warp_lane - lane;
  const unsigned group_mask = GroupMask(lanes, group_start);
  const bool weighted = f.weights_start >= 0;
  const auto load = [&](const Window& w) { return lane < w.count ? source.Load(w.first + lane) : Source::None(); };

  Window now{}, next{}, later{};
  bool has_now = walk.Next(now), has_next = has_now && walk.Next(next);
  if (!has_now) return;
  Token now_token = load(now);
  if (!has_next) next.count = 0;
  Token next_token = load(next);
  source.Ask(now_token);

  RowPart<kVector, kPerLane> sum;
  sum.Fill(-0.0f);
  bool unfinished = false;
  int hotness = 0;
  float weights = 0.0f;
  while (has_now) {
    const bool has_later = has_next && walk.Next(later);
    if (!has_later) later.count = 0;
    const Token later_token = load(later);
    Position mine = source.Resolve(now.first + lane, now_token, lane < now.count);
    source.Ask(next_token);
    unfinished = unfinished || mine.kind == kPositionUnfinished;

    if (__all_sync(~0u, mine.kind <= kPositionRow)) {  // rows and padding alone
      hotness += __popc(__ballot_sync(~0u, mine.kind == kPositionRow) & group_mask);
      window_rows.rows[warp_lane] = mine.pointer;
      if (weighted) window_rows.weights[warp_lane] = mine.weight;
      __syncwarp();
      for (int first = 0; first < now.count; first += kFlight) {
        RowPart<kVector, kPerLane> rows[kFlight];
        const Row* from[kFlight];
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          from[i] =
              first + i < now.count ? static_cast<const Row*>(window_rows.rows[group_start + first + i]) : nullptr;
          if (from[i] != nullptr) rows[i].Load(from[i], lane, lanes, store.dim);
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          if (from[i] == nullptr) continue;
          if constexpr (kIsQuantized<Row>) {
            // Not by shared memory: rows are asked for before anybody waits for a scale.
            rows[i].Scale(__shfl_sync(group_mask, source.scale, group_start + first + i));
          }
          if (weighted) {
            const float weight = window_rows.weights[group_start + first + i];
            rows[i].Scale(weight);
            weights = weights + (f.combiner == kCombinerSqrtn ? weight * weight : weight);
          }
          sum.Add(rows[i]);
        }
      }
      __syncwarp();
    } else {
      const int longest = __reduce_max_sync(~0u, now.count);
      for (int first = 0; first < longest; ++first) {
        const Position p = Shuffle(mine, group_start + first);
        float scale = 1.0f;
        if constexpr (kIsQuantized<Row>) scale = __shfl_sync(~0u, source.scale, group_start + first);
        if (p.kind == kPositionPadding) continue;
        RowPart<kVector, kPerLane> row;
        LoadPosition<Row>(p, store, source.TableAt(now.first + first), lane, lanes, row);
        if constexpr (kIsQuantized<Row>) {
          if (p.kind == kPositionRow) row.Scale(scale);
        }
        if (weighted) {
          row.Scale(p.weight);
          weights = weights + (f.combiner == kCombinerSqrtn ? p.weight * p.weight : p.weight);
        }
        ++hotness;
        sum.Add(row);
      }
    }
    if (now.is_last) {
      BagResult result;
      result.unfinished = (__ballot_sync(~0u, unfinished) & group_mask) != 0;
      result.factor = 1.0f;
      result.zeros = hotness == 0;
      if (f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn) {
        float divisor = weighted ? weights : static_cast<float>(hotness);
        if (f.combiner == kCombinerSqrtn) divisor = sqrtf(divisor);
        result.zeros = divisor == 0.0f;
        result.factor = 1.0f / divisor;
      }
      write(now.bag, result, sum);
      sum.Fill(-0.0f);
      unfinished = false;
      hotness = 0;
      weights = 0.0f;
    }
    now = next;
    next = later;
    has_now = has_next;
    has_next = has_later;
    now_token = next_token;
    next_token = later_token;
  }
}

/// Writes a bag's embedding, if it is known.
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

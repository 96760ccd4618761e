// Bags on a GPU: the rows of each bag into its embedding, wherever the rows come from.
//
// A block takes one tile: kBagsPerTile bags of one feature. A row of dim columns is shared by `lanes` neighbouring
// lanes of a warp (LaneShape), each with kPerLane vectors of kVector columns, so a warp works on 32 / lanes rows at
// once. Row ids are found lane by lane, 32 keys a warp at a time, before rows are read: probes and rows are both
// many loads in flight.
#ifndef JAXSOK_KERNELS_BAGS_CUDA_CUH_
#define JAXSOK_KERNELS_BAGS_CUDA_CUH_

#include "../core/initialize.h"
#include "launch_cuda.cuh"

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
  const float* pointer;
  uint64_t key;
  int kind;
  float weight;
};

/// `kPerLane` vectors of one row in one lane.
template <int kVector, int kPerLane>
struct RowPart {
  Columns<kVector> part[kPerLane];

  __device__ void SetZero() {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) part[k].v[i] = 0.0f;
    }
  }
  __device__ void Load(const float* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column < dim) part[k] = Columns<kVector>::Load(row + column);
    }
  }
  /// For rows that this kernel also writes.
  __device__ void LoadPlain(const float* row, int lane, int lanes, int dim) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column < dim) part[k] = Columns<kVector>::LoadPlain(row + column);
    }
  }
  __device__ void LoadInitial(const RowInitializer& values, int lane, int lanes) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        part[k].v[i] = values.At(static_cast<uint32_t>((lane + k * lanes) * kVector + i));
      }
    }
  }
  __device__ void Store(float* row, int lane, int lanes, int dim) const {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column < dim) part[k].Store(row + column);
    }
  }
  __device__ void StoreStreaming(float* row, int lane, int lanes, int dim) const {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column < dim) part[k].StoreStreaming(row + column);
    }
  }
  __device__ void Add(const RowPart& other) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) part[k].v[i] = part[k].v[i] + other.part[k].v[i];
    }
  }
  __device__ void Scale(float factor) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) part[k].v[i] = part[k].v[i] * factor;
    }
  }
};

/// Rows in flight per lane: about four loads, however a row is cut.
template <int kPerLane>
constexpr int RowsInFlight() {
  return kPerLane >= 4 ? 1 : 4 / kPerLane;
}

__device__ __forceinline__ Position Shuffle(const Position& p, int from) {
  Position q;
  q.pointer = reinterpret_cast<const float*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(p.pointer), from));
  q.key = __shfl_sync(~0u, static_cast<unsigned long long>(p.key), from);
  q.kind = __shfl_sync(~0u, p.kind, from);
  q.weight = __shfl_sync(~0u, p.weight, from);
  return q;
}

/// A row's part, from wherever the position says. The warp stays together.
template <int kVector, int kPerLane>
__device__ __forceinline__ void LoadPosition(const Position& p, const StoreView& store, uint32_t table, int lane,
                                             int lanes, RowPart<kVector, kPerLane>& row) {
  if (p.kind == kPositionRow) {
    row.Load(p.pointer, lane, lanes, store.dim);
  } else if (p.kind == kPositionInitial) {
    row.LoadInitial(RowInitializer::Of(store.tables + table * kNumTableWords, store.seed, p.key), lane, lanes);
  } else {
    row.SetZero();
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

/// Copies the rows of 32 positions, lane i holding position i, to consecutive rows of the output.
template <int kVector, int kPerLane, typename TableOf>
__device__ __forceinline__ void CopyRows(const Position& mine, int num_valid, const StoreView& store,
                                         const TableOf& table_of, int lanes, float* out) {
  constexpr int kFlight = RowsInFlight<kPerLane>();
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane % lanes, group = warp_lane / lanes, groups = kWarp / lanes;
  const bool all_rows = __all_sync(~0u, mine.kind == kPositionRow || warp_lane >= num_valid);
  for (int first = 0; first < num_valid; first += groups * kFlight) {
    RowPart<kVector, kPerLane> rows[kFlight];
    bool store_it[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int from = first + i * groups + group;
      const auto pointer = reinterpret_cast<const float*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.pointer), from & (kWarp - 1)));
      store_it[i] = from < num_valid;
      if (all_rows) {
        if (store_it[i]) rows[i].Load(pointer, lane, lanes, store.dim);
        continue;
      }
      const Position p = Shuffle(mine, from & (kWarp - 1));
      const uint32_t table = table_of.At(from & (kWarp - 1));
      store_it[i] = store_it[i] && p.kind != kPositionUnfinished;
      if (store_it[i]) LoadPosition(p, store, table, lane, lanes, rows[i]);
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int64_t from = first + i * groups + group;
      if (store_it[i]) rows[i].StoreStreaming(out + from * store.dim, lane, lanes, store.dim);
    }
  }
}

/// What a group of lanes knows of its bag.
struct BagResult {
  bool unfinished;
  bool zeros;    // the divisor is zero, or the bag is empty
  float factor;  // of mean and sqrtn
};

/// Sums one bag per group of lanes; resolve(position) gives each position, lane by lane.
///
/// All lanes of the warp call it together; a group without a bag passes begin == end. Order of the sum: by position.
template <int kVector, int kPerLane, typename Resolve>
__device__ __forceinline__ BagResult SumBag(const Feature& f, int32_t begin, int32_t end, const StoreView& store,
                                            int lanes, const Resolve& resolve, RowPart<kVector, kPerLane>& sum) {
  constexpr int kFlight = RowsInFlight<kPerLane>();
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane % lanes, group_start = warp_lane - lane;
  const int length = end - begin;
  const int longest = __reduce_max_sync(~0u, length);
  const bool weighted = f.weights_start >= 0 && f.combiner != kCombinerNone;
  bool empty = true, unfinished = false;
  int hotness = 0;
  float weights = 0.0f;
  sum.SetZero();
  for (int chunk = 0; chunk < longest; chunk += lanes) {
    Position mine{nullptr, kPaddingKey, kPositionPadding, 1.0f};
    if (chunk + lane < length) mine = resolve(begin + chunk + lane);
    unfinished = unfinished || mine.kind == kPositionUnfinished;
    for (int first = 0; first < lanes && chunk + first < longest; first += kFlight) {
      RowPart<kVector, kPerLane> rows[kFlight];
      Position p[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        // Beyond the group's last lane: a position of the next group is read and not used.
        p[i] = Shuffle(mine, (group_start + first + i) & (kWarp - 1));
        if (first + i >= lanes) p[i].kind = kPositionPadding;
        if (p[i].kind != kPositionPadding) LoadPosition(p[i], store, f.table, lane, lanes, rows[i]);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (p[i].kind == kPositionPadding) continue;
        if (weighted) {
          rows[i].Scale(p[i].weight);
          const float w = p[i].weight;
          weights = weights + (f.combiner == kCombinerSqrtn ? w * w : w);
        }
        ++hotness;
        if (empty) {
          sum = rows[i];
          empty = false;
        } else {
          sum.Add(rows[i]);
        }
      }
    }
  }
  BagResult result;
  const unsigned group_mask = (lanes == kWarp ? ~0u : (1u << lanes) - 1) << group_start;
  result.unfinished = (__ballot_sync(~0u, unfinished) & group_mask) != 0;
  result.factor = 1.0f;
  result.zeros = false;
  if (f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn) {
    float divisor = weighted ? weights : static_cast<float>(hotness);
    if (f.combiner == kCombinerSqrtn) divisor = sqrtf(divisor);
    result.zeros = divisor == 0.0f;
    result.factor = 1.0f / divisor;
  }
  return result;
}

/// Writes a bag's embedding, if it is known.
template <int kVector, int kPerLane>
__device__ __forceinline__ void WriteBag(const Feature& f, const BagResult& bag, RowPart<kVector, kPerLane>& sum,
                                         int lanes, int dim, float* out) {
  if (bag.unfinished) return;
  if (f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn) {
    if (bag.zeros) {
      sum.SetZero();
    } else {
      sum.Scale(bag.factor);
    }
  }
  sum.StoreStreaming(out, threadIdx.x % lanes, lanes, dim);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_BAGS_CUDA_CUH_

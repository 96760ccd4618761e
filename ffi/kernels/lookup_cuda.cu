// The way down on a GPU. See bags_cuda.cuh for who does what, index_cuda.cuh for how rows are made.
#include "bags_cuda.cuh"
#include "index_cuda.cuh"
#include "lookup.h"

namespace jaxsok {
namespace {

enum Mode : int {
  kModeFind = 0,     // probe; absent keys stay absent
  kModeInsert = 1,   // probe; absent keys claim an entry, their bags wait for the finishing pass
  kModePlanned = 2,  // row ids are given
};

struct LookupArguments {
  StoreView store;
  BatchView batch;
  const uint32_t* given_row_ids;  // kModePlanned
  uint32_t* row_ids;              // kModeInsert
  int32_t* counts;
  InsertWorkspace insert;  // kModeInsert
};

/// What a lane saw; added up before it leaves the block.
struct LaneCounts {
  int found = 0;
  int absent = 0;
  int padding = 0;
  int longest_probe = 0;
};

// Zeroes what the passes add to: one launch in place of several memsets.
__global__ void PrepareKernel(int32_t* counts, int num_counts, InsertControl* control, uint32_t* row_ids,
                              int64_t num_row_ids) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t c = i; c < num_counts; c += int64_t{gridDim.x} * blockDim.x) counts[c] = 0;
  if (control != nullptr && i < static_cast<int64_t>(sizeof(InsertControl) / 4)) {
    reinterpret_cast<uint32_t*>(control)[i] = 0;
  }
  for (int64_t p = i; p < num_row_ids; p += int64_t{gridDim.x} * blockDim.x) row_ids[p] = kNoRow;
}

/// Finds what position `at` of a feature contributes, and counts it.
template <int kMode>
__device__ __forceinline__ Position ResolvePosition(const LookupArguments& a, const Feature& f, int32_t at,
                                                    uint64_t salt, LaneCounts& counts) {
  const int64_t position = int64_t{f.key_start} + at;
  Position p{nullptr, __ldg(a.batch.keys + position), kPositionPadding, 1.0f};
  uint32_t row_id = kNoRow;
  if (p.key == kPaddingKey) {
    ++counts.padding;
    if (kMode == kModeInsert) a.row_ids[position] = kNoRow;
    return p;
  }
  if (kMode == kModePlanned) {
    row_id = __ldg(a.given_row_ids + position);
    if (row_id >= a.store.capacity) row_id = kNoRow;
  } else {
    const ProbeResult at_entry =
        kMode == kModeInsert
            ? FindOrClaim(a.store.index, p.key, f.table, salt, kMaxProbes, static_cast<uint32_t>(position))
            : ProbeBuckets<false>(a.store.index, p.key, f.table, salt, kMaxProbes);
    row_id = at_entry.row_id;
    // Of the walks that ended at a row; those of new keys are seen when they are entered for good.
    if (row_id < kPendingRow) counts.longest_probe = max(counts.longest_probe, at_entry.num_probes);
    if (kMode == kModeInsert) {
      a.row_ids[position] = row_id;
      if (row_id == kPendingRow) {
        a.insert.entry_of[position] = at_entry.entry;
        if (at_entry.entry == kNoEntry) atomicAdd(&a.insert.control->num_unplaced, 1u);
      }
    }
  }
  if (f.weights_start >= 0) p.weight = __ldg(a.batch.weights + f.weights_start + at);
  if (kMode == kModeInsert && row_id == kPendingRow) {
    p.kind = kPositionUnfinished;
    ++counts.absent;
  } else if (row_id == kNoRow) {
    p.kind = kMode == kModeFind && f.unknown_zeros ? kPositionZeros : kPositionInitial;
    ++counts.absent;
  } else {
    p.kind = kPositionRow;
    p.pointer = a.store.rows.At<float>(a.store.starts, row_id, a.store.dim);
    ++counts.found;
  }
  return p;
}

/// Leaves bags to the finishing pass; lanes with `unfinished` each add one bag.
///
/// A bag that is left holds a position of its own, so the list has room for all of them.
__device__ __forceinline__ void LeaveBag(const InsertWorkspace& w, bool unfinished, uint32_t bag, int64_t room) {
  const unsigned lanes = __ballot_sync(~0u, unfinished);
  if (lanes == 0) return;
  const int leader = __ffs(lanes) - 1, lane = threadIdx.x % kWarp;
  uint32_t start = 0;
  if (lane == leader) start = atomicAdd(&w.control->num_unfinished, static_cast<uint32_t>(__popc(lanes)));
  start = __shfl_sync(~0u, start, leader);
  const uint32_t at = start + __popc(lanes & ((1u << lane) - 1));
  if (unfinished && at < room) w.unfinished[at] = bag;
}

/// What lies in no bag is padding: before the first bag of a feature, and after the last one.
template <int kMode>
__device__ __forceinline__ void CountLoosePositions(const LookupArguments& a, const Feature& f, int32_t tile,
                                                    LaneCounts& counts) {
  int32_t first, last;
  f.Bags(a.batch.offsets, &first, &last);
  const int32_t tiles = max(CeilDiv(f.num_bags, kBagsPerTile), 1);  // a feature without bags has one
  const int32_t num_loose = first + (f.num_keys - last);
  for (int64_t i = int64_t{tile} * kBlock + threadIdx.x; i < num_loose; i += int64_t{tiles} * kBlock) {
    ++counts.padding;
    if (kMode == kModeInsert) a.row_ids[f.key_start + (i < first ? i : last + (i - first))] = kNoRow;
  }
}

/// Adds the lanes' counts to the feature's table. All threads of the block.
template <int kMode>
__device__ __forceinline__ void FlushCounts(const LookupArguments& a, const Feature& f, const LaneCounts& lane) {
  __shared__ int32_t sums[4];
  if (threadIdx.x < 4) sums[threadIdx.x] = 0;
  __syncthreads();
  const int found = __reduce_add_sync(~0u, lane.found), absent = __reduce_add_sync(~0u, lane.absent);
  const int padding = __reduce_add_sync(~0u, lane.padding), longest = __reduce_max_sync(~0u, lane.longest_probe);
  if (threadIdx.x % kWarp == 0) {
    atomicAdd(&sums[0], found);
    atomicAdd(&sums[1], absent);
    atomicAdd(&sums[2], padding);
    atomicMax(&sums[3], longest);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t* counts = a.counts + f.table * kNumCounts;
  if (sums[0] != 0) atomicAdd(counts + kCountFound, sums[0]);
  if (sums[2] != 0) atomicAdd(counts + kCountPadding, sums[2]);
  if (kMode == kModeInsert) {
    // Absent keys are counted when it is known what became of them.
    if (sums[1] != 0) atomicAdd(&a.insert.control->num_pending, static_cast<uint32_t>(sums[1]));
    if (static_cast<uint32_t>(sums[3]) > a.store.counters[kLongestProbe]) {
      atomicMax(a.store.counters + kLongestProbe, static_cast<uint32_t>(sums[3]));
    }
  } else if (sums[1] != 0) {
    atomicAdd(counts + (kMode == kModeFind ? kCountMissing : kCountRefused), sums[1]);
  }
}

// One block, one tile of bags of one feature; one warp, 32 of them.
// Bags of single keys: lane i finds the row of bag i, then groups of lanes copy 32 / lanes rows at a time.
// Other bags: each group of lanes sums one bag after the other.
// A thread writes the row ids of the keys it resolved and its columns of its group's embeddings; nothing is shared
// but counters, which are added to.
template <int kMode, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock, BlocksPerMultiprocessor<kPerLane>())
    LookupKernel(const __grid_constant__ LookupArguments a, const __grid_constant__ FeaturePointers<float> embeddings,
                 int lanes) {
  const Feature f =
      Feature::Load(a.batch.features, FeatureAt(a.batch.features, a.batch.num_features, kFeatureTileStart, blockIdx.x));
  const uint64_t salt = kMode == kModePlanned ? 0 : SaltOf(a.store.counters);
  float* out = embeddings.data[f.number];
  const int warp_lane = threadIdx.x % kWarp;
  const int32_t tile = static_cast<int32_t>(blockIdx.x) - f.tile_start;
  const int32_t warp_bag = tile * kBagsPerTile + static_cast<int32_t>(threadIdx.x / kWarp) * kWarp;
  LaneCounts counts;

  if (f.combiner == kCombinerNone) {
    const int num_valid = min(kWarp, f.num_bags - warp_bag);
    if (num_valid > 0) {
      Position mine{nullptr, kPaddingKey, kPositionPadding, 1.0f};
      if (warp_lane < num_valid) mine = ResolvePosition<kMode>(a, f, warp_bag + warp_lane, salt, counts);
      CopyRows<kVector, kPerLane>(mine, num_valid, a.store, OneTable{static_cast<uint32_t>(f.table)}, lanes,
                                  out + int64_t{warp_bag} * a.store.dim);
      if (kMode == kModeInsert) {
        LeaveBag(a.insert, mine.kind == kPositionUnfinished, static_cast<uint32_t>(f.bag_start + warp_bag + warp_lane),
                 a.batch.num_keys);
      }
    }
  } else {
    const int groups = kWarp / lanes, group = warp_lane / lanes;
    for (int step = 0; step < lanes; ++step) {
      const int32_t bag = warp_bag + step * groups + group;
      if (warp_bag + step * groups >= f.num_bags) break;
      int32_t begin = 0, end = 0;
      if (bag < f.num_bags) f.BagRange(a.batch.offsets, bag, &begin, &end);
      RowPart<kVector, kPerLane> sum;
      BagResult result = SumBag<kVector, kPerLane>(
          f, begin, end, a.store, lanes, [&](int32_t at) { return ResolvePosition<kMode>(a, f, at, salt, counts); },
          sum);
      if (bag < f.num_bags)
        WriteBag<kVector, kPerLane>(f, result, sum, lanes, a.store.dim, out + int64_t{bag} * a.store.dim);
      if (kMode == kModeInsert) {
        LeaveBag(a.insert, result.unfinished && warp_lane % lanes == 0, static_cast<uint32_t>(f.bag_start + bag),
                 a.batch.num_keys);
      }
    }
  }
  CountLoosePositions<kMode>(a, f, tile, counts);
  FlushCounts<kMode>(a, f, counts);
}

// A group of lanes takes one bag of the list after the other: its pending keys are known now.
// A position lies in one bag, a bag is in the list once: no two groups write the same row id or embedding.
template <int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock)
    FinishKernel(const __grid_constant__ LookupArguments a, const __grid_constant__ FeaturePointers<float> embeddings,
                 int lanes) {
  const InsertControl control = *a.insert.control;
  if (control.num_pending == 0) return;
  __shared__ int32_t shared_counts[kSharedTables * kNumCounts];
  TableCounts table_counts(shared_counts, a.counts, a.store.num_tables);
  const StoreSink sink{a.store, a.counts};
  const int groups = kWarp / lanes, group = (threadIdx.x % kWarp) / lanes;
  const int64_t warp = int64_t{blockIdx.x} * (kBlock / kWarp) + threadIdx.x / kWarp;
  const int64_t stride = int64_t{gridDim.x} * (kBlock / kWarp) * groups;
  const int64_t num_unfinished = min(int64_t{control.num_unfinished}, a.batch.num_keys);
  for (int64_t first = warp * groups; first < num_unfinished; first += stride) {
    const int64_t item = first + group;
    const bool valid = item < num_unfinished;
    const int32_t global_bag = static_cast<int32_t>(a.insert.unfinished[valid ? item : first]);
    const Feature f = Feature::Load(a.batch.features,
                                    FeatureAt(a.batch.features, a.batch.num_features, kFeatureBagStart, global_bag));
    const int32_t bag = global_bag - f.bag_start;
    int32_t begin = 0, end = 0;
    if (valid) f.BagRange(a.batch.offsets, bag, &begin, &end);
    const auto resolve = [&](int32_t at) {
      const int64_t position = int64_t{f.key_start} + at;
      Position p{nullptr, __ldg(a.batch.keys + position), kPositionPadding, 1.0f};
      if (p.key == kPaddingKey) return p;
      uint32_t row_id = a.row_ids[position];
      if (row_id == kPendingRow) {
        bool unplaced;
        row_id = ResolvePending(sink, control, a.insert.entry_of[position], p.key, f.table, &unplaced);
        a.row_ids[position] = row_id;
        table_counts.Add(f.table, row_id == kNoRow ? kCountRefused : kCountFound, 1);
        if (unplaced) atomicAdd(a.store.counters + kNumUnplaced, 1u);
      }
      if (f.weights_start >= 0) p.weight = __ldg(a.batch.weights + f.weights_start + at);
      p.kind = row_id == kNoRow ? kPositionInitial : kPositionRow;
      if (row_id != kNoRow) p.pointer = a.store.rows.At<float>(a.store.starts, row_id, a.store.dim);
      return p;
    };
    RowPart<kVector, kPerLane> sum;
    const BagResult result = SumBag<kVector, kPerLane>(f, begin, end, a.store, lanes, resolve, sum);
    if (valid) {
      WriteBag<kVector, kPerLane>(f, result, sum, lanes, a.store.dim,
                                  embeddings.data[f.number] + int64_t{bag} * a.store.dim);
    }
  }
  table_counts.Flush();
}

/// Blocks of the finishing pass: enough to fill the largest GPU, few enough to cost nothing when there is no work.
constexpr int kFinishBlocks = 132 * 8;

template <int kMode>
struct LaunchMode {
  Stream stream;
  const LookupArguments& a;
  const FeaturePointers<float>& embeddings;
  template <int kVector, int kPerLane>
  LaunchError operator()(int lanes) const {
    LookupKernel<kMode, kVector, kPerLane><<<a.batch.num_tiles, kBlock, 0, stream>>>(a, embeddings, lanes);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    return nullptr;
  }
};

struct LaunchFinish {
  Stream stream;
  const LookupArguments& a;
  const FeaturePointers<float>& embeddings;
  template <int kVector, int kPerLane>
  LaunchError operator()(int lanes) const {
    FinishKernel<kVector, kPerLane><<<kFinishBlocks, kBlock, 0, stream>>>(a, embeddings, lanes);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    return nullptr;
  }
};

LaunchError Prepare(Stream stream, int32_t* counts, int num_tables, InsertControl* control, uint32_t* row_ids,
                    int64_t num_row_ids) {
  const int64_t items = num_row_ids > num_tables * kNumCounts ? num_row_ids : num_tables * kNumCounts;
  const int64_t threads = items > 64 ? items : 64;
  const int blocks = static_cast<int>(threads > (int64_t{1} << 18) ? 1024 : CeilDiv<int64_t>(threads, kBlock));
  PrepareKernel<<<blocks, kBlock, 0, stream>>>(counts, num_tables * kNumCounts, control, row_ids, num_row_ids);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return nullptr;
}

}  // namespace

LaunchError LaunchLookup(Stream stream, const StoreView& store, const BatchView& batch,
                         const EmbeddingsView& embeddings, uint32_t* row_ids, int32_t* counts, void* workspace) {
  FeaturePointers<float> pointers;
  JAXSOK_RETURN_IF_LAUNCH(
      FillPointers<float>(reinterpret_cast<float* const*>(embeddings.data), batch.num_features, pointers));
  LookupArguments a{store, batch, nullptr, row_ids, counts, InsertWorkspace::Cut(workspace, batch.num_keys)};
  // Only ragged features have positions that lie in no bag.
  JAXSOK_RETURN_IF_LAUNCH(
      Prepare(stream, counts, store.num_tables, a.insert.control, row_ids, batch.num_offsets > 0 ? batch.num_keys : 0));
  if (batch.num_tiles == 0 || batch.num_keys == 0) {
    // No keys: bags, if any, are empty.
    return batch.num_tiles == 0 ? nullptr : DispatchShape(store.dim, LaunchMode<kModeInsert>{stream, a, pointers});
  }
  JAXSOK_RETURN_IF_LAUNCH(DispatchShape(store.dim, LaunchMode<kModeInsert>{stream, a, pointers}));
  JAXSOK_RETURN_IF_LAUNCH(LaunchInsertPasses(stream, StoreSink{store, counts}, a.insert, batch.keys,
                                             TableOfPosition{nullptr, batch.features, batch.num_features}, row_ids,
                                             batch.num_keys, store.dim));
  return DispatchShape(store.dim, LaunchFinish{stream, a, pointers});
}

LaunchError LaunchLookupFind(Stream stream, const StoreView& store, const BatchView& batch,
                             const EmbeddingsView& embeddings, int32_t* counts) {
  FeaturePointers<float> pointers;
  JAXSOK_RETURN_IF_LAUNCH(
      FillPointers<float>(reinterpret_cast<float* const*>(embeddings.data), batch.num_features, pointers));
  LookupArguments a{store, batch, nullptr, nullptr, counts, {}};
  JAXSOK_RETURN_IF_LAUNCH(Prepare(stream, counts, store.num_tables, nullptr, nullptr, 0));
  if (batch.num_tiles == 0) return nullptr;
  return DispatchShape(store.dim, LaunchMode<kModeFind>{stream, a, pointers});
}

LaunchError LaunchLookupPlanned(Stream stream, const StoreView& store, const BatchView& batch, const uint32_t* row_ids,
                                const EmbeddingsView& embeddings, int32_t* counts) {
  FeaturePointers<float> pointers;
  JAXSOK_RETURN_IF_LAUNCH(
      FillPointers<float>(reinterpret_cast<float* const*>(embeddings.data), batch.num_features, pointers));
  LookupArguments a{store, batch, row_ids, nullptr, counts, {}};
  JAXSOK_RETURN_IF_LAUNCH(Prepare(stream, counts, store.num_tables, nullptr, nullptr, 0));
  if (batch.num_tiles == 0) return nullptr;
  return DispatchShape(store.dim, LaunchMode<kModePlanned>{stream, a, pointers});
}

}  // namespace jaxsok

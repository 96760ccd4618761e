// find, find_or_insert, gather and rebuild on a GPU. index_cuda.cuh creates rows, bags_cuda.cuh copies them.
#include "admission_cuda.cuh"
#include "bags_cuda.cuh"
#include "index_cuda.cuh"
#include "table.h"

namespace jaxsok {
namespace {

// One thread, one key: four 16-byte loads of its bucket, then the next bucket, up to kMaxProbes.
// Thread i writes row_ids[i] and nothing else; the index is only read.
// No race: a call that writes the index comes before or after, ordered by the state it returns.
__global__ void __launch_bounds__(kBlock) FindKernel(IndexView index, const uint32_t* counters, const uint64_t* keys,
                                                     const uint32_t* table_ids, int64_t num_keys, uint32_t* row_ids) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= num_keys) return;
  const uint64_t key = __ldg(keys + i);
  row_ids[i] = key == kPaddingKey
                   ? kNoRow
                   : ProbeBuckets<false>(index, key, __ldg(table_ids + i), SaltOf(counters), kMaxProbes).row_id;
}

__global__ void ZeroKernel(int32_t* counts, int num_counts, InsertControl* control) {
  for (int i = threadIdx.x; i < num_counts; i += blockDim.x) counts[i] = 0;
  if (threadIdx.x < sizeof(InsertControl) / 4) reinterpret_cast<uint32_t*>(control)[threadIdx.x] = 0;
}

// One thread, one key: it walks or claims. Without kClaims it only walks, and claims follow after admission has
// decided. Thread i writes row_ids[i] and entry_of[i].
template <bool kClaims>
__global__ void __launch_bounds__(kBlock) ClaimKernel(StoreSink sink, InsertWorkspace w, const uint64_t* keys,
                                                      const uint32_t* table_ids, int64_t num_keys, uint32_t* row_ids) {
  __shared__ int32_t shared_counts[kSharedTables * kNumCounts];
  TableCounts counts(shared_counts, sink.counts, sink.store.num_tables);
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  int probes = 0;
  bool pending = false;
  if (i < num_keys) {
    const uint64_t key = __ldg(keys + i);
    const uint32_t table = __ldg(table_ids + i);
    if (key == kPaddingKey || table >= static_cast<uint32_t>(sink.store.num_tables)) {
      row_ids[i] = kNoRow;
      if (table < static_cast<uint32_t>(sink.store.num_tables)) counts.Add(table, kCountPadding, 1);
    } else {
      ProbeResult at;
      if (kClaims) {
        at = FindOrClaim(sink.Index(), key, table, sink.Salt(), sink.MaxProbes(), static_cast<uint32_t>(i));
      } else {
        at = ProbeBuckets<false>(sink.Index(), key, table, sink.Salt(), sink.MaxProbes());
        if (at.row_id == kNoRow) at.row_id = kPendingRow;
      }
      pending = at.row_id == kPendingRow;
      // An invalid row id, in an index with foreign writes, must not look like a mark of the passes.
      const bool is_damaged = !pending && at.row_id >= sink.store.capacity;
      row_ids[i] = is_damaged ? kNoRow : at.row_id;
      probes = pending || is_damaged ? 0 : at.num_probes;
      if (pending && kClaims) {
        w.entry_of[i] = at.entry;
        if (at.entry == kNoEntry) atomicAdd(&w.control->num_unplaced, 1u);
      } else if (!pending) {
        counts.Add(table, is_damaged ? kCountRefused : kCountFound, 1);
      }
    }
  }
  counts.Flush();
  const int num_pending = __syncthreads_count(pending);
  if (threadIdx.x == 0 && num_pending != 0) atomicAdd(&w.control->num_pending, static_cast<uint32_t>(num_pending));
  const int longest = __reduce_max_sync(~0u, probes);
  if (threadIdx.x % kWarp == 0) sink.SawProbes(longest);
}

// One thread, one key that was pending.
__global__ void __launch_bounds__(kBlock)
    ResolveKernel(StoreSink sink, InsertWorkspace w, const uint64_t* keys, const uint32_t* table_ids, int64_t num_keys,
                  uint32_t* row_ids) {
  const InsertControl control = *w.control;
  if (control.num_pending == 0) return;
  __shared__ int32_t shared_counts[kSharedTables * kNumCounts];
  TableCounts counts(shared_counts, sink.counts, sink.store.num_tables);
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < num_keys && row_ids[i] == kPendingRow) {
    bool unplaced;
    const uint32_t table = table_ids[i];
    uint32_t row_id = ResolvePending(sink, control, w.entry_of[i], keys[i], table, &unplaced);
    if (row_id >= sink.store.capacity) row_id = kNoRow;
    row_ids[i] = row_id;
    counts.Add(table, row_id == kNoRow ? kCountRefused : kCountFound, 1);
    if (unplaced) atomicAdd(sink.store.counters + kNumUnplaced, 1u);
  }
  counts.Flush();
}

// Rebuild. ----------------------------------------------------------------------------------------------------

/// Returns whether a pass is skipped: the word that it depends on is 0. Passes without one (nullptr) always run.
__device__ __forceinline__ bool IsIdle(const uint32_t* only_if) { return only_if != nullptr && *only_if == 0; }

// A thread empties buckets, grid-stride.
__global__ void __launch_bounds__(kBlock) ClearIndexKernel(IndexView index, const uint32_t* only_if) {
  if (IsIdle(only_if)) return;
  uint4* words = reinterpret_cast<uint4*>(index.buckets);
  const int64_t num_words = int64_t{index.num_buckets} * kEntriesPerBucket;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_words; i += int64_t{gridDim.x} * kBlock) {
    words[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
}

// A thread inserts the rows in use, grid-stride: the pairs are distinct, entries are claimed by compare-and-swap.
__global__ void __launch_bounds__(kBlock) EnterKernel(StoreView store, const uint32_t* only_if) {
  if (IsIdle(only_if)) return;
  const uint64_t salt = SaltOf(store.counters);
  const uint32_t end = min(store.counters[kNumAllocated], store.capacity);
  int longest = 0;
  for (uint32_t row_id = blockIdx.x * kBlock + threadIdx.x; row_id < end; row_id += gridDim.x * kBlock) {
    const Record* record = store.records.At(store.starts, row_id, 1);
    const uint64_t key = record->key;
    if (key == kPaddingKey) continue;
    const ProbeResult at = InsertDistinct(store.index, key, record->table, salt, kMaxProbes, row_id);
    if (at.entry == kNoEntry) {
      atomicAdd(store.counters + kNumUnplaced, 1u);
    } else {
      longest = max(longest, at.num_probes);
    }
  }
  longest = __reduce_max_sync(~0u, longest);
  if (threadIdx.x % kWarp == 0) NoteProbes(store.counters, longest);
}

__global__ void ZeroProbeCountersKernel(uint32_t* counters, const uint32_t* only_if) {
  if (IsIdle(only_if)) return;
  counters[kNumUnplaced] = 0;
  counters[kLongestProbe] = 0;
}

/// Returns the blocks of grid-stride kernels: two full waves.
inline int NumStreamBlocks() { return 2 * BlocksOfWave(); }

// Keys without a row. -----------------------------------------------------------------------------------------

// A thread reads entries, grid-stride, and sets the counts of forgotten keys to 0.
__global__ void __launch_bounds__(kBlock)
    ForgetKernel(IndexView sightings, const uint32_t* floors, uint32_t num_tables) {
  const int64_t num_entries = int64_t{sightings.num_buckets} * kEntriesPerBucket;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_entries; i += int64_t{gridDim.x} * kBlock) {
    Entry* entry = sightings.EntryAt(static_cast<uint32_t>(i));
    const uint4 words = *reinterpret_cast<const uint4*>(entry);
    if (words.w < num_tables && words.z >= __ldg(floors + words.w)) entry->row_id = 0;
  }
}

// A thread inserts keys without a row, grid-stride; counts of one key are added to (AddSightings).
__global__ void __launch_bounds__(kBlock) WaitKernel(IndexView sightings, uint32_t* counters, const uint32_t* floors,
                                                     uint32_t num_tables, const Entry* entries, int64_t num_entries) {
  const uint64_t salt = SaltOf(counters);
  int num_new = 0;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_entries; i += int64_t{gridDim.x} * kBlock) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(entries + i));
    const uint64_t key = Word64(words.x, words.y);
    if (key == kPaddingKey || words.w >= num_tables || words.z == 0 || words.z >= __ldg(floors + words.w)) continue;
    AddSightings(sightings, salt, key, words.w, words.z, &num_new);
  }
  num_new = __reduce_add_sync(~0u, num_new);
  if (threadIdx.x % kWarp == 0 && num_new != 0) atomicAdd(counters + kNumSightings, static_cast<uint32_t>(num_new));
}

struct GatherArguments {
  StoreView store;
  const Request* requests;
  const uint32_t* row_ids;
  int64_t num_requests;
  bool is_find;
  LineTarget rows;
  RowDtype dtype;
  int32_t first_block;  // with which a launch begins, so that shards begin with rows of different peers
  int32_t* num_absent;
};

// One warp, 32 requests: lane i finds the row of request i, then groups of lanes copy 32 / lanes rows at a time. A
// thread writes its columns of its group's rows; only counts are shared, and are added to.
template <typename Row, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock, BlocksPerMultiprocessor<kVector * kPerLane>())
    GatherKernel(const __grid_constant__ GatherArguments a, int lanes) {
  __shared__ int32_t block_absent[kSharedTables];
  const bool has_few_tables = a.store.num_tables <= kSharedTables;
  if (threadIdx.x < kSharedTables) block_absent[threadIdx.x] = 0;
  const int64_t block = (int64_t{blockIdx.x} + a.first_block) % gridDim.x;
  const int64_t warp_first = block * kBlock + threadIdx.x / kWarp * kWarp;
  const int64_t i = block * kBlock + threadIdx.x;
  Position mine{nullptr, kPaddingKey, kPositionPadding, 1.0f};
  uint32_t table = 0;
  int32_t uses = 0;
  if (i < a.num_requests) {
    const uint4 request = __ldg(reinterpret_cast<const uint4*>(a.requests) + i);
    const uint32_t row_id = __ldg(a.row_ids + i);
    mine.key = Word64(request.x, request.y);
    if (mine.key != kPaddingKey && request.z < static_cast<uint32_t>(a.store.num_tables)) {
      table = request.z;
      if (row_id < a.store.capacity) {
        mine.kind = kPositionRow;
        mine.pointer = a.store.rows.At<Row>(a.store.starts, row_id, a.store.dim);
      } else {
        const bool is_zeros = a.is_find && __ldg(a.store.tables + table * kNumTableWords + kTableUnknown) != 0;
        mine.kind = is_zeros ? kPositionZeros : kPositionInitial;
        uses = static_cast<int32_t>(request.w);
      }
    } else if (a.rows.IsWindow()) {
      mine.kind = kPositionUnfinished;  // no reader requests this row
    }
  }
  // The barrier also makes the zeroed counts of the block visible.
  const bool has_absent = __syncthreads_or(uses != 0) != 0;
  if (uses != 0) atomicAdd((has_few_tables ? block_absent : a.num_absent) + table, uses);
  const int num_valid = static_cast<int>(min(int64_t{kWarp}, a.num_requests - warp_first));
  if (num_valid > 0) {
    const TableByLane tables{table};
    if (a.dtype == kRowDtypeBfloat16) {
      CopyRows<Row, kVector, kPerLane, BFloat16>(mine, num_valid, a.store, tables, lanes, a.rows, false, warp_first);
    } else {
      CopyRows<Row, kVector, kPerLane>(mine, num_valid, a.store, tables, lanes, a.rows, a.dtype == kRowDtypeFloat32,
                                       warp_first);
    }
  }
  if (!has_absent || !has_few_tables) return;
  __syncthreads();
  if (threadIdx.x < a.store.num_tables && block_absent[threadIdx.x] != 0) {
    atomicAdd(a.num_absent + threadIdx.x, block_absent[threadIdx.x]);
  }
}

}  // namespace

LaunchError LaunchGather(Stream stream, const StoreView& store, const Request* requests, const uint32_t* row_ids,
                         int64_t num_requests, bool is_find, const LineTarget& rows, RowDtype dtype,
                         int32_t* num_absent) {
  JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, num_absent, store.num_tables, 0));
  if (num_requests == 0) return nullptr;
  const auto first_block = static_cast<int32_t>(rows.first_line / kBlock);
  const GatherArguments a{store, requests, row_ids, num_requests, is_find, rows, dtype, first_block, num_absent};
  return WithRowDtype(store.row_dtype, [&](auto number) {
    return DispatchShape(store.dim, [&](auto shape) {
      GatherKernel<decltype(number), shape.kVector, shape.kPerLane>
          <<<BlocksFor(num_requests), kBlock, 0, stream>>>(a, shape.lanes);
      return LastLaunchError();
    });
  });
}

LaunchError LaunchFind(Stream stream, const IndexView& index, const uint32_t* counters, const uint64_t* keys,
                       const uint32_t* table_ids, int64_t num_keys, uint32_t* row_ids) {
  if (num_keys == 0) return nullptr;
  const unsigned blocks = BlocksFor(num_keys);
  FindKernel<<<blocks, kBlock, 0, stream>>>(index, counters, keys, table_ids, num_keys, row_ids);
  return LastLaunchError();
}

LaunchError LaunchFindOrInsert(Stream stream, const StoreView& store, const uint64_t* keys, const uint32_t* table_ids,
                               int64_t num_keys, uint32_t* row_ids, int32_t* counts, void* workspace,
                               const AdmissionView* admission) {
  const InsertWorkspace w = InsertWorkspace::Cut(workspace, num_keys);
  const StoreSink sink{store, counts};
  ZeroKernel<<<1, kBlock, 0, stream>>>(counts, store.num_tables * kNumCounts, w.control);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (num_keys == 0) return nullptr;
  const unsigned blocks = BlocksFor(num_keys);
  const TableOfPosition table_of{table_ids, nullptr, 0, 0};
  if (admission == nullptr) {
    ClaimKernel<true><<<blocks, kBlock, 0, stream>>>(sink, w, keys, table_ids, num_keys, row_ids);
  } else {
    ClaimKernel<false><<<blocks, kBlock, 0, stream>>>(sink, w, keys, table_ids, num_keys, row_ids);
    JAXSOK_RETURN_IF_LAUNCH(LaunchAdmission(stream, sink, *admission, w, keys, table_of, row_ids, num_keys));
    JAXSOK_RETURN_IF_LAUNCH(LaunchClaimPending(stream, sink, w, keys, table_of, row_ids, num_keys));
  }
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  JAXSOK_RETURN_IF_LAUNCH(LaunchInsertPasses(stream, sink, w, keys, table_of, row_ids, num_keys));
  ResolveKernel<<<blocks, kBlock, 0, stream>>>(sink, w, keys, table_ids, num_keys, row_ids);
  return LastLaunchError();
}

LaunchError LaunchRebuild(Stream stream, const StoreView& store, const uint32_t* only_if) {
  ClearIndexKernel<<<NumStreamBlocks(), kBlock, 0, stream>>>(store.index, only_if);
  ZeroProbeCountersKernel<<<1, 1, 0, stream>>>(store.counters, only_if);
  EnterKernel<<<NumStreamBlocks(), kBlock, 0, stream>>>(store, only_if);
  return LastLaunchError();
}

LaunchError LaunchForget(Stream stream, const IndexView& sightings, const uint32_t* floors, int32_t num_tables) {
  ForgetKernel<<<NumStreamBlocks(), kBlock, 0, stream>>>(sightings, floors, static_cast<uint32_t>(num_tables));
  return LastLaunchError();
}

LaunchError LaunchWait(Stream stream, const IndexView& sightings, uint32_t* counters, const uint32_t* floors,
                       int32_t num_tables, const Entry* entries, int64_t num_entries) {
  ClearIndexKernel<<<NumStreamBlocks(), kBlock, 0, stream>>>(sightings, nullptr);
  JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, counters + kNumSightings, 1, 0));
  WaitKernel<<<NumStreamBlocks(), kBlock, 0, stream>>>(sightings, counters, floors, static_cast<uint32_t>(num_tables),
                                                       entries, num_entries);
  return LastLaunchError();
}

}  // namespace jaxsok

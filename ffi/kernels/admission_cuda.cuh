// Decides which unseen keys get a row, on a GPU: two passes between the search and the claims of index_cuda.cuh.
//
//   count    each pending position adds its uses to its key's count
//   judge    each pending position reads the sums: admitted positions stay pending, the others are refused
//
// Integer sums do not depend on the order, so the counts are the same on every run; the place of an entry among the
// sightings is not. If a batch has no unseen key, both passes return at once.
#ifndef JAXSOK_KERNELS_ADMISSION_CUDA_CUH_
#define JAXSOK_KERNELS_ADMISSION_CUDA_CUH_

#include "../core/admission.h"
#include "index_cuda.cuh"

namespace jaxsok {

/// Adds to the count of a pair without a row. Returns its entry, which is created if absent; kNoEntry: none in reach.
///
/// Not inlined: two kernels call it, and it needs few registers.
static __device__ __noinline__ uint32_t AddSightings(IndexView sightings, uint64_t salt, uint64_t key, uint32_t table,
                                                     uint32_t uses, int* num_new) {
  const auto publish = [&](Entry* entry) {
    StoreHalf(entry, uses, table);
    ++*num_new;
  };
  const auto meet = [&](Entry* entry, uint32_t, uint32_t aux, ProbeResult*) {
    if (aux != table) return false;
    atomicAdd(&entry->row_id, uses);
    return true;
  };
  return TakeEntry(sightings, key, table, salt, kMaxProbes, publish, meet).entry;
}

/// Adds to one counter of the filter, which saturates.
__device__ __forceinline__ void AddToBloom(uint32_t* bloom, uint64_t counter, uint32_t uses) {
  uint32_t* word = bloom + counter / kBloomPerWord;
  uint32_t seen = *reinterpret_cast<volatile uint32_t*>(word);
  // A word only grows, by one of its counters each time, so it changes concurrently at most this often.
  for (uint32_t tries = 0; tries <= kBloomPerWord * kMostSightings && BloomCount(seen, counter) != kMostSightings;
       ++tries) {
    const uint32_t before = atomicCAS(word, seen, BloomAdded(seen, counter, uses));
    if (before == seen) return;
    seen = before;
  }
}

__device__ __forceinline__ uint32_t UsesOf(const AdmissionView& admission, int64_t position) {
  return admission.uses == nullptr ? 1 : __ldg(admission.uses + position);
}

// One thread, one position, grid-stride. Thread i writes entry_of[i] and adds to counts that all share.
static __global__ void __launch_bounds__(kBlock)
    CountSightingsKernel(const __grid_constant__ StoreView store, const __grid_constant__ AdmissionView admission,
                         InsertWorkspace w, const uint64_t* keys, TableOfPosition table_of, const uint32_t* row_ids,
                         int64_t num_keys) {
  if (w.control->num_pending == 0) return;
  const uint64_t salt = SaltOf(store.counters);
  int num_new = 0;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_keys; i += int64_t{gridDim.x} * kBlock) {
    if (row_ids[i] != kPendingRow) continue;
    const uint64_t key = __ldg(keys + i);
    const uint32_t table = table_of(i), uses = UsesOf(admission, i);
    const uint32_t* words = store.tables + table * kNumTableWords;
    const uint32_t kind = __ldg(words + kTableAdmission);
    if (kind == kAdmitByCount) {
      // Without sightings, or with fewer counters (below) than the tables need, the state has lost an array.
      w.entry_of[i] = admission.sightings.num_buckets == 0
                          ? kNoEntry
                          : AddSightings(admission.sightings, salt, key, table, uses, &num_new);
    } else if (kind == kAdmitByBloom) {
      const uint64_t hash = AdmissionHash(words, store.seed, key);
      const uint32_t num_hashes = __ldg(words + kTableBloomHashes);
      for (uint32_t h = 0; h < num_hashes; ++h) {
        const uint64_t counter = BloomCounter(words, hash, h);
        if (counter / kBloomPerWord < admission.num_bloom_words) AddToBloom(admission.bloom, counter, uses);
      }
    }
  }
  num_new = __reduce_add_sync(~0u, num_new);
  if (threadIdx.x % kWarp == 0 && num_new != 0)
    atomicAdd(store.counters + kNumSightings, static_cast<uint32_t>(num_new));
}

/// Returns whether an unseen key is admitted, after the whole batch is counted. `entry`: that of its pair in the
/// sightings.
__device__ __forceinline__ bool IsAdmitted(const StoreView& store, const AdmissionView& admission,
                                           const uint32_t* entry, uint64_t key, uint32_t table) {
  const uint32_t* words = store.tables + table * kNumTableWords;
  const uint32_t kind = __ldg(words + kTableAdmission), threshold = __ldg(words + kTableThreshold);
  if (kind == kAdmitByCount) {
    if (*entry == kNoEntry) return false;
    uint32_t* at = &admission.sightings.EntryAt(*entry)->row_id;
    const uint32_t count = *reinterpret_cast<volatile uint32_t*>(at);
    // Other positions of this key write the same number, and decide the same.
    if (count > threshold) *reinterpret_cast<volatile uint32_t*>(at) = threshold;
    return count >= threshold;
  }
  if (kind == kAdmitByBloom) {
    const uint64_t hash = AdmissionHash(words, store.seed, key);
    const uint32_t num_hashes = __ldg(words + kTableBloomHashes);
    uint32_t least = kMostSightings;
    for (uint32_t h = 0; h < num_hashes; ++h) {
      const uint64_t counter = BloomCounter(words, hash, h);
      if (counter / kBloomPerWord >= admission.num_bloom_words) return false;
      least = min(least, BloomCount(__ldcg(admission.bloom + counter / kBloomPerWord), counter));
    }
    return least >= threshold;
  }
  return kind != kAdmitByProbability || IsDrawn(words, AdmissionHash(words, store.seed, key), __ldg(admission.step));
}

// One thread, one position, grid-stride. Thread i writes row_ids[i]: pending positions that are refused are decided
// here, and only the finishing pass visits them again.
// num_pending falls while blocks check whether it is 0: if it is, no position of theirs is left.
static __global__ void __launch_bounds__(kBlock)
    JudgeKernel(const __grid_constant__ StoreView store, const __grid_constant__ AdmissionView admission,
                InsertWorkspace w, const uint64_t* keys, TableOfPosition table_of, uint32_t* row_ids, int64_t num_keys,
                int32_t* counts) {
  if (__syncthreads_or(*reinterpret_cast<volatile uint32_t*>(&w.control->num_pending) != 0) == 0) return;
  __shared__ int32_t shared_counts[kSharedTables * kNumCounts];
  TableCounts table_counts(shared_counts, counts, store.num_tables);
  int num_refused = 0, num_unplaced = 0;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_keys; i += int64_t{gridDim.x} * kBlock) {
    if (row_ids[i] != kPendingRow) continue;
    const uint32_t table = table_of(i);
    if (IsAdmitted(store, admission, w.entry_of + i, __ldg(keys + i), table)) continue;
    row_ids[i] = kNoRow;
    table_counts.Add(table, kCountRefused, 1);
    ++num_refused;
    // Without an entry the policy has not decided. The index lacks room, which the counter reports to grow.
    const bool is_uncounted =
        __ldg(store.tables + table * kNumTableWords + kTableAdmission) == kAdmitByCount && w.entry_of[i] == kNoEntry;
    num_unplaced += is_uncounted ? 1 : 0;
    if (!is_uncounted) table_counts.Add(table, kCountUnadmitted, static_cast<int>(UsesOf(admission, i)));
  }
  table_counts.Flush();
  num_refused = __reduce_add_sync(~0u, num_refused);
  if (threadIdx.x % kWarp == 0 && num_refused != 0) {
    atomicSub(&w.control->num_pending, static_cast<uint32_t>(num_refused));
  }
  num_unplaced = __reduce_add_sync(~0u, num_unplaced);
  if (threadIdx.x % kWarp == 0 && num_unplaced != 0) {
    atomicAdd(store.counters + kNumUnplaced, static_cast<uint32_t>(num_unplaced));
  }
}

/// Launches both passes.
inline LaunchError LaunchAdmission(Stream stream, const StoreSink& sink, const AdmissionView& admission,
                                   const InsertWorkspace& w, const uint64_t* keys, const TableOfPosition& table_of,
                                   uint32_t* row_ids, int64_t num_keys) {
  const int blocks = InsertBlocks(num_keys);
  CountSightingsKernel<<<blocks, kBlock, 0, stream>>>(sink.store, admission, w, keys, table_of, row_ids, num_keys);
  JudgeKernel<<<blocks, kBlock, 0, stream>>>(sink.store, admission, w, keys, table_of, row_ids, num_keys, sink.counts);
  return LastLaunchError();
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_ADMISSION_CUDA_CUH_

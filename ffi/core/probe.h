// The walk of one key through the index (the essay in layout.h says why it is right).
//
// This is the read-only walk, shared by both back ends. Inserting walks the same way but must claim entries
// under concurrency, which each back end does with its own atomics: kernels/index_cpu.h, kernels/index_cuda.cuh.
#ifndef JAXSOK_CORE_PROBE_H_
#define JAXSOK_CORE_PROBE_H_

#include "hash.h"
#include "layout.h"

namespace jaxsok {

/// The bucket after `bucket` on a walk.
JAXSOK_HOST_DEVICE uint32_t NextBucket(uint32_t bucket, uint32_t num_buckets) {
  return bucket + 1 == num_buckets ? 0 : bucket + 1;
}

/// Where a walk ended.
struct ProbeResult {
  uint32_t row_id;     // kNoRow: the key has no row
  uint32_t entry;      // the key's entry, or the first empty one; kNoEntry: neither within kMaxProbes
  int32_t num_probes;  // buckets visited
};

/// Walks to the entry of a (table, key) pair, or to the first empty entry.
JAXSOK_HOST_DEVICE ProbeResult Probe(const IndexView& index, uint64_t key, uint32_t table, uint64_t salt) {
  uint32_t bucket = HomeBucket(HashOf(key, table, salt), index.num_buckets);
  for (int probe = 0; probe < kMaxProbes; ++probe) {
    const Bucket& line = index.buckets[bucket];
    for (int e = 0; e < kEntriesPerBucket; ++e) {
      const Entry& entry = line.entries[e];
      if (entry.key == key && entry.aux == table) {
        return {entry.row_id, bucket * kEntriesPerBucket + e, probe + 1};
      }
      if (entry.key == kPaddingKey) return {kNoRow, bucket * kEntriesPerBucket + e, probe + 1};
    }
    bucket = NextBucket(bucket, index.num_buckets);
  }
  return {kNoRow, kNoEntry, kMaxProbes};
}

}  // namespace jaxsok

#endif  // JAXSOK_CORE_PROBE_H_

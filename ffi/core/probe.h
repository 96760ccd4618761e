// The part of a key's walk through the index that both back ends share (layout.h says why it is correct).
//
// Each back end has its own walk: a core reads one entry after the other (kernels/index_cpu.h), a GPU loads whole
// buckets and claims entries by compare-and-swap (kernels/index_cuda.cuh).
#ifndef JAXSOK_CORE_PROBE_H_
#define JAXSOK_CORE_PROBE_H_

#include "hash.h"
#include "layout.h"

namespace jaxsok {

/// Returns the salt of an index. `counters`: those of its store.
JAXSOK_HOST_DEVICE uint64_t SaltOf(const uint32_t* counters) { return Word64(counters[kSaltLow], counters[kSaltHigh]); }

/// Returns the bucket after `bucket` on a walk.
JAXSOK_HOST_DEVICE uint32_t NextBucket(uint32_t bucket, uint32_t num_buckets) {
  return bucket + 1 == num_buckets ? 0 : bucket + 1;
}

/// The end of a walk.
struct ProbeResult {
  uint32_t row_id;     // kNoRow: the key has no row
  uint32_t entry;      // the key's entry, or the first empty one; kNoEntry: neither within kMaxProbes
  int32_t num_probes;  // buckets visited
};

}  // namespace jaxsok

#endif  // JAXSOK_CORE_PROBE_H_

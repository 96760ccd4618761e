// Statistics on the CPU: a range of positions, for touch and for lookup (LaunchTouch in table.h has the contract).
#ifndef JAXSOK_KERNELS_TOUCH_CPU_H_
#define JAXSOK_KERNELS_TOUCH_CPU_H_

#include <algorithm>

#include "parallel_cpu.h"
#include "table.h"

namespace jaxsok {

/// Records the uses of the positions [begin, end); other threads may record theirs concurrently.
inline void TouchRange(const StatisticsView& statistics, const uint32_t* row_ids, const uint32_t* uses, int64_t begin,
                       int64_t end, uint32_t now) {
  constexpr int64_t kLinesAhead = 16;  // the latency of one memory line is about ten line accesses
  int64_t fetched = begin;
  for (int64_t i = begin; i < end; ++i) {
    for (const int64_t ahead = std::min(i + kLinesAhead, end); fetched < ahead; ++fetched) {
      if (row_ids[fetched] < statistics.capacity) {
        __builtin_prefetch(statistics.data.At(statistics.starts, row_ids[fetched], 1), 1);
      }
    }
    if (row_ids[i] >= statistics.capacity) continue;
    RowStatistics* line = statistics.data.At(statistics.starts, row_ids[i], 1);
    // Another thread may touch the same row.
    CountAtomically(&line->frequency, uses == nullptr ? uint32_t{1} : uses[i]);
    __atomic_store_n(&line->last_step, now, __ATOMIC_RELAXED);
  }
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TOUCH_CPU_H_

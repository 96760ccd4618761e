// touch on the CPU (table.h says what).
#include "touch_cpu.h"

namespace jaxsok {

LaunchError LaunchTouch(Stream stream, const StatisticsView& statistics, const uint32_t* row_ids, const uint32_t* uses,
                        int64_t num_keys, const uint32_t* clock) {
  constexpr int64_t kPositionsPerTask = 4096;
  const uint32_t now = *clock;
  RunRanges(stream, num_keys, kPositionsPerTask,
            [&](int64_t begin, int64_t end) { TouchRange(statistics, row_ids, uses, begin, end, now); });
  return nullptr;
}

}  // namespace jaxsok

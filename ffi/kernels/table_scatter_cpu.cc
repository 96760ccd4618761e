// scatter on the CPU (table.h says what).
#include <cstring>

#include "parallel_cpu.h"
#include "table.h"

namespace jaxsok {

LaunchError LaunchScatter(Stream stream, const LinesView& array, const uint32_t* row_ids, int64_t num_lines,
                          const void* lines) {
  constexpr int64_t kLinesPerTask = 512;
  const uint8_t* from = static_cast<const uint8_t*>(lines);
  RunRanges(stream, num_lines, kLinesPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (row_ids[i] >= array.capacity) continue;
      std::memcpy(array.data.At(array.starts, row_ids[i], array.line_bytes), from + i * array.line_bytes,
                  static_cast<size_t>(array.line_bytes));
    }
  });
  return nullptr;
}

}  // namespace jaxsok

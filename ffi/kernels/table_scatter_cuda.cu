// scatter on a GPU (table.h has the contract).
#include "launch_cuda.cuh"
#include "table.h"

namespace jaxsok {
namespace {

// One thread, one vector of a row, grid-stride: neighbours read neighbouring vectors, and write them within a row. Each
// vector of a row is written by one thread, or by several with the same value.
template <typename Vector>
__global__ void __launch_bounds__(kBlock)
    ScatterKernel(const __grid_constant__ LinesView array, const uint32_t* row_ids, int64_t num_vectors,
                  uint32_t vectors_per_line, const Vector* lines) {
  const int64_t stride = int64_t{gridDim.x} * kBlock;
  for (int64_t v = int64_t{blockIdx.x} * kBlock + threadIdx.x; v < num_vectors; v += stride) {
    const int64_t line = v / vectors_per_line;
    const uint32_t row_id = __ldg(row_ids + line);
    if (row_id >= array.capacity) continue;
    Vector* row = reinterpret_cast<Vector*>(array.data.At(array.starts, row_id, array.line_bytes));
    row[v - line * vectors_per_line] = __ldg(lines + v);
  }
}

template <typename Vector>
LaunchError Scatter(Stream stream, const LinesView& array, const uint32_t* row_ids, int64_t num_lines,
                    const void* lines) {
  const int64_t per_line = array.line_bytes / static_cast<int64_t>(sizeof(Vector));
  ScatterKernel<<<BlocksFor(num_lines * per_line, 2 * BlocksOfWave()), kBlock, 0, stream>>>(
      array, row_ids, num_lines * per_line, static_cast<uint32_t>(per_line), static_cast<const Vector*>(lines));
  return LastLaunchError();
}

}  // namespace

LaunchError LaunchScatter(Stream stream, const LinesView& array, const uint32_t* row_ids, int64_t num_lines,
                          const void* lines) {
  if (num_lines == 0 || array.line_bytes == 0) return nullptr;
  // XLA aligns buffers to 256 bytes, so every row is aligned to any of these sizes that divides its length.
  if (array.line_bytes % 16 == 0) return Scatter<uint4>(stream, array, row_ids, num_lines, lines);
  if (array.line_bytes % 8 == 0) return Scatter<uint2>(stream, array, row_ids, num_lines, lines);
  if (array.line_bytes % 4 == 0) return Scatter<uint32_t>(stream, array, row_ids, num_lines, lines);
  if (array.line_bytes % 2 == 0) return Scatter<uint16_t>(stream, array, row_ids, num_lines, lines);
  return Scatter<uint8_t>(stream, array, row_ids, num_lines, lines);
}

}  // namespace jaxsok

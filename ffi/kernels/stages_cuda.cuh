// Copies of a warp's next inputs to shared memory while it works on the current ones (StagedShortChunks,
// uses_sum_cuda.cuh).
#ifndef JAXSOK_KERNELS_STAGES_CUDA_CUH_
#define JAXSOK_KERNELS_STAGES_CUDA_CUH_

#include <cuda_pipeline_primitives.h>

#include <cstring>

#include "uses_cuda.cuh"

namespace jaxsok {

/// Copies of rows of `dim` numbers to shared memory, one row for each group of a block: the inputs of a turn of
/// StagedShortChunks are requested while the turn before is at work, and occupy no registers. Lanes read only what they
/// copied.
template <typename Number, int kVector, int kPerLane>
struct StagedLines {
  using Type = typename Packed<Number, kVector>::Type;
  static constexpr int kVectorParts = static_cast<int>(sizeof(Type) / 16);
  static_assert(sizeof(Type) % 16 == 0, "lanes copy 16 bytes at a time");
  static constexpr int kBytes = kBlock * kPerLane * static_cast<int>(sizeof(Type));  // per block

  /// Begins to copy the row of the calling lane's group.
  __device__ static void Ask(char* lines, const Number* from, int lane, int lanes, int dim) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column >= dim) continue;
#pragma unroll
      for (int j = 0; j < kVectorParts; ++j) {
        __pipeline_memcpy_async(PartAt(lines, k * kVectorParts + j),
                                reinterpret_cast<const char*>(from + column) + j * 16, 16);
      }
    }
  }
  /// Gets the calling lane's part of the row, which has arrived.
  __device__ static void Take(char* lines, PackedPart<Number, kVector, kPerLane>& part) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      float4 parts[kVectorParts];
#pragma unroll
      for (int j = 0; j < kVectorParts; ++j) {
        parts[j] = *reinterpret_cast<const float4*>(PartAt(lines, k * kVectorParts + j));
      }
      memcpy(&part.part[k], parts, sizeof(Type));
    }
  }

 private:
  __device__ static char* PartAt(char* lines, int part) { return lines + (part * kBlock + threadIdx.x) * 16; }
};

/// The inputs of a turn of StagedShortChunks in shared memory: the first gradient of each group's row, the row, and its
/// optimizer state. While one stage is used, those of the following turns are filled.
///
/// Used for rows of 16 bits and at most 256 columns, a multiple of 8: they have too few bytes to keep memory busy. It
/// was slower for float32 rows.
template <typename Apply, int kVector, int kPerLane>
struct StageOf {
  static constexpr bool kIsUsed = Apply::kStepsRows16 && kVector == 8 && kPerLane == 1;
  /// One more stage if lanes wait for each other's squares, since a warp then has less in flight. It cost 1% elsewhere.
  static constexpr int kCount = Apply::kStagesWords ? 3 : 2;
  using Row = typename Apply::Row;
  using Gradients = StagedLines<typename GradientReader<typename Apply::Gradient>::Widest, kVector, kPerLane>;
  using Rows = StagedLines<Row, kVector, kPerLane>;
  using States = StagedLines<float, kVector, kPerLane>;

  char* gradients;
  char* rows;
  char* states;  // rows, or a word for each group

  __host__ __device__ static constexpr int Bytes() {
    return Gradients::kBytes + Rows::kBytes + Apply::kNumStagedLines * States::kBytes +
           (Apply::kStagesWords ? kBlock * static_cast<int>(sizeof(float)) : 0);
  }
  __device__ static StageOf At(char* stages, int number) {
    char* begin = stages + number * Bytes();
    return {begin, begin + Gradients::kBytes, begin + Gradients::kBytes + Rows::kBytes};
  }
  __device__ char* StateLines(int state) const { return states + state * States::kBytes; }
  /// Returns the word of the calling lane's group.
  __device__ float* WordOf(int lanes) const { return reinterpret_cast<float*>(states) + GroupOf(threadIdx.x, lanes); }
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_STAGES_CUDA_CUH_

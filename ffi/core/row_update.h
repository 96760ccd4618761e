// One row's step, and the order in which a row's gradients are summed.
//
// The order is part of the contract: it depends only on the row's own uses (decision D8), never on their places in the
// batch, the device or the number of threads. CPU and CUDA use the same order.
//
//   uses u_0 .. u_{n-1} of a row, by position in the batch
//   run r     = u_{8r} + u_{8r+1} + ... in sequence                            (kUsesPerRun)
//   chunk c   = run_{4c} + run_{4c+1} + ... in sequence: 32 uses               (kUsesPerChunk)
//   lane l    = chunk_l + chunk_{l+32} + chunk_{l+64} + ... in sequence        (kChunkLanes; only if n > 32)
//   gradient  = the lanes that have a chunk, added in a binary tree: lane l += lane l + 16, then 8, 4, 2, 1
//
// A sum over the columns of a row (the mean square of rowwise Adagrad) has a fixed order too: LaneShape says which
// columns a lane holds; a lane sums its own in order, then lanes combine in a butterfly.
#ifndef JAXSOK_CORE_ROW_UPDATE_H_
#define JAXSOK_CORE_ROW_UPDATE_H_

#include "layout.h"

namespace jaxsok {

constexpr int kUsesPerRun = 8;     // a group of lanes adds them one after the other
constexpr int kUsesPerChunk = 32;  // one warp's worth of sorted uses
constexpr int kChunkLanes = 32;

// Vectors per lane: the instructions that a row costs apart from its bytes are then paid once for several vectors. Of
// 1, 2 and 4, 2 was the fastest on an H200 (docs/performance.md): W1's step took 0.97, 0.89 and 0.92 ms.
constexpr int kVectorsPerLane = 2;
// Single numbers per lane, if the dim is no multiple of 4. Of 2, 4 and 8, 4 was the fastest (docs/performance.md).
constexpr int kSinglesPerLane = 4;

/// The assignment of a row's columns to lanes: lane l holds the vectors l, l + lanes, l + 2 lanes, ... of `vector`
/// neighbouring columns.
struct LaneShape {
  int vector;  // 4 when dim is a multiple of 4 (16-byte loads of float), otherwise 1; OfRows16: also 8
  int lanes;   // a power of two, at most 32

  JAXSOK_HOST_DEVICE static LaneShape Of(int dim) { return Dealt(dim, kVectorsPerLane, kSinglesPerLane); }

  /// Returns the shape for a step on rows of 16 bits: as many columns a lane, also in vectors of 16 bytes.
  JAXSOK_HOST_DEVICE static LaneShape OfRows16(int dim) {
    if (dim % 8 != 0) return Of(dim);
    LaneShape shape = {8, 1};
    while (shape.lanes * 4 * kVectorsPerLane < dim && shape.lanes < 32) shape.lanes *= 2;
    return shape;
  }

  /// Returns the shape for bags on a GPU: a lane holds few numbers, so that many warps wait for rows at once.
  JAXSOK_HOST_DEVICE static LaneShape OfBags(int dim) { return Dealt(dim, 1, kSinglesPerLane); }

  /// Returns the shape for row programs, whose instructions cost less the more columns each takes.
  JAXSOK_HOST_DEVICE static LaneShape OfProgram(int dim) {
    return Dealt(dim, 2 * kVectorsPerLane, 2 * kSinglesPerLane);
  }

 private:
  JAXSOK_HOST_DEVICE static LaneShape Dealt(int dim, int vectors_per_lane, int singles_per_lane) {
    LaneShape shape;
    shape.vector = dim % 4 == 0 ? 4 : 1;
    const int vectors = dim / shape.vector;
    const int per_lane = shape.vector == 4 ? vectors_per_lane : singles_per_lane;
    shape.lanes = 1;
    while (shape.lanes * per_lane < vectors && shape.lanes < 32) shape.lanes *= 2;
    return shape;
  }
};

enum Optimizer : int {
  kOptimizerSgd = 0,
  kOptimizerAdagrad = 1,
  kOptimizerRowwiseAdagrad = 2,
  kOptimizerAdam = 3,
  kOptimizerProgram = 4,  // row_program.h
};

enum RowGradient : int {
  kRowGradientSum = 0,
  kRowGradientMean = 1,
  kRowGradientSqrt = 2,
};

constexpr int kNumHyper = 8;  // floats of the hyper-parameter operand; each optimizer says what its words mean

/// Returns the factor that row_gradient puts on the sum of a row's gradients.
JAXSOK_HOST_DEVICE float RowGradientScale(int row_gradient, int64_t num_uses) {
  if (row_gradient == kRowGradientMean) return 1.0f / static_cast<float>(num_uses);
  if (row_gradient == kRowGradientSqrt) return 1.0f / sqrtf(static_cast<float>(num_uses));
  return 1.0f;
}

/// SGD. hyper: learning rate.   row -= lr * g
struct Sgd {
  static constexpr int kNumStates = 0;
  static constexpr bool kRowwise = false;
  JAXSOK_HOST_DEVICE static void Step(const float* hyper, float g, float& row, float&, float&) {
    row = row - hyper[0] * g;
  }
};

/// Adagrad. hyper: learning rate, eps.   acc += g^2;  row -= lr * g / sqrt(acc + eps)   (where acc > 0; as Optax)
struct Adagrad {
  static constexpr int kNumStates = 1;
  static constexpr bool kRowwise = false;
  JAXSOK_HOST_DEVICE static void Step(const float* hyper, float g, float& row, float& acc, float&) {
    acc = acc + g * g;
    const float inverse = acc > 0.0f ? 1.0f / sqrtf(acc + hyper[1]) : 0.0f;
    row = row - hyper[0] * (g * inverse);
  }
};

/// Rowwise Adagrad. hyper: learning rate, eps.   acc += mean(g^2);  row -= lr * g / (sqrt(acc) + eps)   (as FBGEMM)
struct RowwiseAdagrad {
  static constexpr int kNumStates = 1;
  static constexpr bool kRowwise = true;  // one accumulator for the row
  /// Returns the factor on the gradient, from the accumulator after this step.
  JAXSOK_HOST_DEVICE static float Scale(const float* hyper, float acc) { return hyper[0] / (sqrtf(acc) + hyper[1]); }
};

/// Adam. hyper: learning rate, b1, b2, eps, 1 - b1^t, 1 - b2^t, 1 - b1, 1 - b2.
///   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  row -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
struct Adam {
  static constexpr int kNumStates = 2;
  static constexpr bool kRowwise = false;
  JAXSOK_HOST_DEVICE static void Step(const float* hyper, float g, float& row, float& m, float& v) {
    m = hyper[1] * m + hyper[6] * g;
    v = hyper[2] * v + hyper[7] * (g * g);
    row = row - hyper[0] * ((m / hyper[4]) / (sqrtf(v / hyper[5]) + hyper[3]));
  }
};

}  // namespace jaxsok

#endif  // JAXSOK_CORE_ROW_UPDATE_H_

// Row programs on a GPU: what uses_cuda.cuh applies to a row's gradients, operation by operation.
//
// A register lies in shared memory, each lane's columns of it (LaneShape) at places of the lane's own, so that no lane
// ever waits for another but in a reduction:
//
//   word (register * per_lane + k) * threads + thread     vector k of the thread's columns: 16 bytes, or 4
//
// A row and its states are copied there from memory without passing through the lane's own registers, while its
// gradients are summed. One instruction is looked up for all of a lane's columns, eight at a time.
#ifndef JAXSOK_KERNELS_ROW_PROGRAM_CUDA_CUH_
#define JAXSOK_KERNELS_ROW_PROGRAM_CUDA_CUH_

#include <cuda_pipeline_primitives.h>

#include "../core/row_program.h"
#include "update_cuda.cuh"

namespace jaxsok {

/// The registers of one lane.
template <int kVector>
struct LaneRegisters {
  Columns<kVector>* base;  // of this thread
  int threads;             // of the block
  int per_lane;

  __device__ Columns<kVector>& At(int number, int k) const { return base[(number * per_lane + k) * threads]; }
};

/// What operands stand for beside registers.
struct LaneScalars {
  const float* scalars;
  float num_uses;
  __device__ float At(int operand) const { return operand == -1 ? num_uses : __ldg(scalars - 2 - operand); }
};

/// Vectors that one instruction takes at a time.
template <int kVector>
constexpr int VectorsAtOnce() {
  return 8 / kVector;
}

template <int kVector>
using Operands = Columns<kVector>[VectorsAtOnce<kVector>()];

template <int kVector>
__device__ __forceinline__ void LoadOperand(const LaneRegisters<kVector>& registers, const LaneScalars& scalars,
                                            int operand, int first, Operands<kVector>& to) {
  constexpr int kAtOnce = VectorsAtOnce<kVector>();
  if (operand >= 0) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < registers.per_lane) to[k] = registers.At(operand, first + k);
    }
  } else {
    const float value = scalars.At(operand);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[k].v[i] = value;
    }
  }
}

template <int kCode, int kVector>
__device__ __forceinline__ void OverOperands(Operands<kVector>& a, const Operands<kVector>& b,
                                             const Operands<kVector>& c) {
#pragma unroll
  for (int k = 0; k < VectorsAtOnce<kVector>(); ++k) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) a[k].v[i] = RowOpOf<kCode>(a[k].v[i], b[k].v[i], c[k].v[i]);
  }
}

template <int kCode, int kVector>
__device__ __forceinline__ float ReducedOver(const LaneRegisters<kVector>& registers, const LaneScalars& scalars,
                                             int operand, int lane, int lanes, unsigned mask, int dim) {
  float sum = StartOf<kCode>();
  for (int k = 0; k < registers.per_lane; ++k) {
    if ((lane + k * lanes) * kVector >= dim) break;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum = JoinOf<kCode>(sum, operand >= 0 ? registers.At(operand, k).v[i] : scalars.At(operand));
    }
  }
  for (int offset = lanes / 2; offset >= 1; offset /= 2) {
    sum = JoinOf<kCode>(sum, __shfl_xor_sync(mask, sum, offset));
  }
  return sum;
}

/// Runs an instruction of JAXSOK_HEAVY_ROW_OPS, one number at a time: unrolled they would take all registers.
template <int kVector>
__device__ __noinline__ void RunHeavy(RowInstruction op, LaneRegisters<kVector> registers, LaneScalars scalars) {
#pragma unroll 1
  for (int at = 0; at < registers.per_lane * kVector; ++at) {
    const int k = at / kVector, i = at % kVector;
    const float a = op.a >= 0 ? registers.At(op.a, k).v[i] : scalars.At(op.a);
    const float b = op.code != kRowPower ? 0.0f : op.b >= 0 ? registers.At(op.b, k).v[i] : scalars.At(op.b);
    float value = a;
    switch (op.code) {
#define JAXSOK_ROW_OP(name)            \
  case name:                           \
    value = RowOpOf<name>(a, b, 0.0f); \
    break;
      JAXSOK_HEAVY_ROW_OPS(JAXSOK_ROW_OP)
#undef JAXSOK_ROW_OP
      default:
        break;
    }
    registers.At(op.to, k).v[i] = value;
  }
}

/// Runs one instruction that is no output. `mask`: the lanes of the group, which call it together.
template <int kVector>
__device__ __noinline__ void RunInstruction(RowInstruction op, LaneRegisters<kVector> registers, LaneScalars scalars,
                                            int lane, int lanes, unsigned mask, int dim) {
  constexpr int kAtOnce = VectorsAtOnce<kVector>();
  Operands<kVector> a, b, c;
  if (op.code >= kRowSum) {
    const float value = op.code == kRowSum   ? ReducedOver<kRowSum>(registers, scalars, op.a, lane, lanes, mask, dim)
                        : op.code == kRowMax ? ReducedOver<kRowMax>(registers, scalars, op.a, lane, lanes, mask, dim)
                                             : ReducedOver<kRowMin>(registers, scalars, op.a, lane, lanes, mask, dim);
    for (int k = 0; k < registers.per_lane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) registers.At(op.to, k).v[i] = value;
    }
    return;
  }
  for (int first = 0; first < registers.per_lane; first += kAtOnce) {
    LoadOperand<kVector>(registers, scalars, op.a, first, a);
    if (ReadsSecond(op.code)) LoadOperand<kVector>(registers, scalars, op.b, first, b);
    if (ReadsThird(op.code)) LoadOperand<kVector>(registers, scalars, op.c, first, c);
    switch (op.code) {
#define JAXSOK_ROW_OP(name)               \
  case name:                              \
    OverOperands<name, kVector>(a, b, c); \
    break;
      JAXSOK_LIGHT_ROW_OPS(JAXSOK_ROW_OP)
#undef JAXSOK_ROW_OP
      default:  // a heavy one
        return RunHeavy<kVector>(op, registers, scalars);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < registers.per_lane) registers.At(op.to, first + k) = a[k];
    }
  }
}

/// Steps one row by a row program, with the sum of its gradients.
template <typename RowType>
struct ApplyProgram {
  using Row = RowType;
  static constexpr int kNumLines = 2;  // of gradients: rows and states lie in shared memory
  static constexpr bool kStepsLongRowsApart = true;
  static constexpr int kSharedBytes = 56 << 10;  // of a block: four fit a multiprocessor

  StoreView store;
  BatchView batch;
  const uint32_t* step;
  int32_t rounding;
  StateView states;
  const float* scalars;
  const float* num_uses;
  int32_t row_gradient;
  int32_t* num_nonfinite;
  RowProgram program;

  /// Blocks for rows of which a lane holds `floats` numbers: smaller ones where registers are many or wide, so that
  /// several fit a multiprocessor.
  BlockShape ShapeOfBlock(int floats) const {
    const int bytes = program.num_registers * floats * static_cast<int>(sizeof(float));  // of a thread
    int threads = kBlock;
    while (threads > 2 * kWarp && threads * bytes > kSharedBytes) threads /= 2;
    return {threads, threads * bytes};
  }

  /// Nothing: shared memory has it.
  template <int kVector, int kPerLane>
  struct Loaded {};

  template <int kVector>
  __device__ static LaneRegisters<kVector> Registers(int per_lane) {
    extern __shared__ float4 shared_registers[];
    return {reinterpret_cast<Columns<kVector>*>(shared_registers) + threadIdx.x, static_cast<int>(blockDim.x),
            per_lane};
  }

  /// Begins to copy the row and its states.
  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t row, int lane, int lanes, Loaded<kVector, kPerLane>&) const {
    const LaneRegisters<kVector> registers = Registers<kVector>(kPerLane);
    const Row* from = store.rows.At<Row>(store.starts, row, store.dim);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column >= store.dim) continue;
      if constexpr (std::is_same_v<Row, float>) {
        __pipeline_memcpy_async(&registers.At(1, k), from + column, sizeof(Columns<kVector>));
      } else {
        registers.At(1, k) = Columns<kVector>::LoadPlain(from + column);
      }
    }
    for (int s = 0; s < states.num_states; ++s) {
      if (states.width[s] != store.dim) continue;
      const float* state = states.data[s].At(store.starts, row, store.dim);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int column = (lane + k * lanes) * kVector;
        if (column < store.dim) {
          __pipeline_memcpy_async(&registers.At(2 + s, k), state + column, sizeof(Columns<kVector>));
        }
      }
    }
    __pipeline_commit();
  }

  /// `position`: of a use of the row. `mask`: the lanes of the group, which call it together.
  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t position, uint32_t uses, int lane, int lanes, unsigned mask,
                        Loaded<kVector, kPerLane>&, RowPart<kVector, kPerLane>& gradient) const {
    if (row_gradient != kRowGradientSum) gradient.Scale(RowGradientScale(row_gradient, uses));
    const LaneRegisters<kVector> registers = Registers<kVector>(kPerLane);
    float zero = 0.0f;  // NaN once a gradient is infinite or NaN
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if ((lane + k * lanes) * kVector >= store.dim) continue;
      registers.At(0, k) = gradient.part[k];
#pragma unroll
      for (int i = 0; i < kVector; ++i) zero = __fmaf_rn(gradient.part[k].v[i], 0.0f, zero);
    }
    for (int s = 0; s < states.num_states; ++s) {
      if (states.width[s] == store.dim) continue;
      const float value = *states.data[s].At(store.starts, row, 1);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) registers.At(2 + s, k).v[i] = value;
      }
    }
    const bool is_finite = __all_sync(mask, zero == 0.0f);
    __pipeline_wait_prior(0);
    if (!is_finite) {
      if (lane == 0) {
        const uint32_t table = store.records.At(store.starts, row, 1)->table;
        if (table < static_cast<uint32_t>(store.num_tables)) atomicAdd(num_nonfinite + table, 1);
      }
      return;
    }
    Run(registers, row, position, uses, lane, lanes, mask);
  }

 private:
  template <int kVector>
  __device__ void Run(const LaneRegisters<kVector>& registers, uint32_t row, uint32_t position, uint32_t uses, int lane,
                      int lanes, unsigned mask) const {
    const LaneScalars of_row{scalars, num_uses == nullptr ? static_cast<float>(uses) : __ldg(num_uses + position)};
    for (int at = 0; at < program.num_ops; ++at) {
      const RowInstruction op = program.ops[at];
      if (op.code != kRowOutput) {
        RunInstruction<kVector>(op, registers, of_row, lane, lanes, mask, store.dim);
      } else if (op.to == 0) {
        WriteRow(registers, of_row, op.a, row, position, lane, lanes);
      } else if (states.width[op.to - 1] == store.dim) {
        float* state = states.data[op.to - 1].At(store.starts, row, store.dim);
        Write(registers, of_row, op.a, lane, lanes,
              [&](const Columns<kVector>& columns, int column) { columns.Store(state + column); });
      } else if (lane == 0) {
        *states.data[op.to - 1].At(store.starts, row, 1) = op.a >= 0 ? registers.At(op.a, 0).v[0] : of_row.At(op.a);
      }
    }
  }

  template <int kVector>
  __device__ void WriteRow(const LaneRegisters<kVector>& registers, const LaneScalars& of_row, int operand,
                           uint32_t row, uint32_t position, int lane, int lanes) const {
    Row* to = store.rows.At<Row>(store.starts, row, store.dim);
    if constexpr (!std::is_same_v<Row, float>) {
      if (rounding == kRoundingStochastic) {
        const RowRounding bits = RoundingAt(store, batch, step, position);
        Write(registers, of_row, operand, lane, lanes, [&](const Columns<kVector>& columns, int column) {
          columns.StoreStochastic(to + column, bits, static_cast<uint32_t>(column));
        });
        return;
      }
    }
    Write(registers, of_row, operand, lane, lanes,
          [&](const Columns<kVector>& columns, int column) { columns.Store(to + column); });
  }

  /// put(columns, first column) for each vector of an operand.
  template <int kVector, typename Put>
  __device__ void Write(const LaneRegisters<kVector>& registers, const LaneScalars& of_row, int operand, int lane,
                        int lanes, const Put& put) const {
    for (int k = 0; k < registers.per_lane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column >= store.dim) break;
      Columns<kVector> columns;
      if (operand >= 0) {
        columns = registers.At(operand, k);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) columns.v[i] = of_row.At(operand);
      }
      put(columns, column);
    }
  }
};

template <typename Row>
LaunchError ProgramOf<Row>::Step(Stream stream, const StoreView& store, const UpdateArguments& a,
                                 const FeaturePointers<const void>& gradients, UsesWorkspace& w, int end_bit) {
  ApplyProgram<Row> apply;
  apply.store = store;
  apply.batch = a.batch;
  apply.step = a.step;
  apply.rounding = a.spec.rounding;
  apply.states = a.states;
  apply.scalars = a.hyper;
  apply.num_uses = a.spec.num_uses;
  apply.row_gradient = a.spec.row_gradient;
  apply.num_nonfinite = a.num_nonfinite;
  apply.program = *a.spec.program;
  return LaunchUses(stream, apply, gradients, a.batch, w, store.dim, store.dim * a.gradient_bytes, end_bit);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_ROW_PROGRAM_CUDA_CUH_

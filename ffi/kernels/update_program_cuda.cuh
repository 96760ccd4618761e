// Row programs on a GPU: uses_sum_cuda.cuh applies them to a row's gradients, operation by operation.
//
// A register is in shared memory. The columns of each lane have the lane's own places, so that lanes wait for each
// other only in reductions:
//
//   (register * per_lane + k) * threads + thread     vector k of the thread's columns: 16 bytes, or 4
//   after all registers                              the scalars, four times each
//
// A row and its states are copied there from memory without passing through the lane's own registers, while its
// gradients are summed. The cost of an instruction apart from its arithmetic (fetch, addresses, choice of the
// operation) is paid once for sixteen columns: lanes hold twice as many as elsewhere (LaneShape::OfProgram).
#ifndef JAXSOK_KERNELS_UPDATE_PROGRAM_CUDA_CUH_
#define JAXSOK_KERNELS_UPDATE_PROGRAM_CUDA_CUH_

#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "../core/row_program.h"
#include "update_cuda.cuh"

namespace jaxsok {

/// One instruction as lanes read it: places in shared memory, in bytes from its begin.
struct LaneInstruction {
  uint32_t code_and_to;  // code, and from bit 8 on the destination: a place, or the number of an output
  uint32_t a, b, c;      // places; kOfLane: the lane's own part of a register, otherwise a scalar
};
constexpr uint32_t kOfLane = uint32_t{1} << 31;

/// `kVector` numbers in shared memory. The addresses are those of the shared window.
template <int kVector>
struct SharedColumns;
template <>
struct SharedColumns<4> {
  __device__ static Columns<4> Load(uint32_t at) {
    Columns<4> columns;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(columns.v[0]), "=f"(columns.v[1]), "=f"(columns.v[2]), "=f"(columns.v[3])
                 : "r"(at)
                 : "memory");
    return columns;
  }
  __device__ static void Store(uint32_t at, const Columns<4>& columns) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(columns.v[0]), "f"(columns.v[1]),
                 "f"(columns.v[2]), "f"(columns.v[3])
                 : "memory");
  }
};
template <>
struct SharedColumns<1> {
  __device__ static Columns<1> Load(uint32_t at) {
    Columns<1> columns;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(columns.v[0]) : "r"(at) : "memory");
    return columns;
  }
  __device__ static void Store(uint32_t at, const Columns<1>& columns) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(columns.v[0]) : "memory");
  }
};

/// The shared memory of a block, as one of its lanes addresses it.
template <int kVector>
struct LaneMemory {
  static constexpr uint32_t kBytes = kVector * sizeof(float);

  char* begin;      // of the block's part
  uint32_t window;  // the same address in the shared window
  uint32_t of_lane, stride;

  __device__ static LaneMemory Of() {
    extern __shared__ float4 shared_registers[];
    return {reinterpret_cast<char*>(shared_registers),
            static_cast<uint32_t>(__cvta_generic_to_shared(shared_registers)), threadIdx.x * kBytes,
            blockDim.x * kBytes};
  }
  /// Returns the place of vector k of register `number`, for rows with `per_lane` vectors a lane.
  __device__ uint32_t PlaceOf(int number, int per_lane, int k) const {
    return (number * per_lane + k) * stride + of_lane;
  }
  __device__ void* At(uint32_t place) const { return begin + place; }
  __device__ Columns<kVector> Get(uint32_t place) const { return SharedColumns<kVector>::Load(window + place); }
  __device__ void Put(uint32_t place, const Columns<kVector>& columns) const {
    SharedColumns<kVector>::Store(window + place, columns);
  }
};

/// Vectors that one instruction takes at a time.
template <int kVector, int kPerLane>
constexpr int VectorsAtOnce() {
  return kPerLane * kVector < 16 ? kPerLane : 16 / kVector;
}

/// The places of an operand's columns: a scalar's are all one place.
struct OperandPlaces {
  uint32_t first, step;

  template <int kVector>
  __device__ static OperandPlaces Of(const LaneMemory<kVector>& memory, uint32_t operand) {
    const uint32_t is_of_lane = static_cast<uint32_t>(static_cast<int32_t>(operand) >> 31);
    return {(operand & ~kOfLane) + (memory.of_lane & is_of_lane), memory.stride & is_of_lane};
  }
};

template <int kCode, int kVector, int kCount>
__device__ __forceinline__ void OverColumns(Columns<kVector> (&a)[kCount], const Columns<kVector> (&b)[kCount],
                                            const Columns<kVector> (&c)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) a[k].v[i] = RowOpOf<kCode>(a[k].v[i], b[k].v[i], c[k].v[i]);
  }
}

/// Computes an instruction of JAXSOK_HEAVY_ROW_OPS for one number. Not inlined: it would take all registers.
static __device__ __noinline__ float HeavyOf(int code, float a, float b) {
  switch (code) {
#define JAXSOK_ROW_OP(name) \
  case name:                \
    return RowOpOf<name>(a, b, 0.0f);
    JAXSOK_HEAVY_ROW_OPS(JAXSOK_ROW_OP)
#undef JAXSOK_ROW_OP
    default:
      return a;
  }
}

/// The columns of a row that a reduction covers, and the lanes that hold them.
struct RowShape {
  int lane, lanes;
  unsigned mask;
  int dim;
};

template <int kCode, int kVector, int kPerLane>
__device__ __forceinline__ float ReducedOver(const LaneMemory<kVector>& memory, OperandPlaces places,
                                             const RowShape& row) {
  float sum = StartOf<kCode>();
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    if ((row.lane + k * row.lanes) * kVector >= row.dim) break;
    const Columns<kVector> columns = memory.Get(places.first + k * places.step);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = JoinOf<kCode>(sum, columns.v[i]);
  }
  for (int offset = row.lanes / 2; offset >= 1; offset /= 2) {
    sum = JoinOf<kCode>(sum, __shfl_xor_sync(row.mask, sum, offset));
  }
  return sum;
}

/// Runs one instruction other than an output.
template <int kVector, int kPerLane>
__device__ __forceinline__ void RunInstruction(const LaneInstruction& op, const LaneMemory<kVector>& memory,
                                               const RowShape& row) {
  constexpr int kAtOnce = VectorsAtOnce<kVector, kPerLane>();
  const int code = static_cast<int>(op.code_and_to & 0xff);
  const uint32_t to = (op.code_and_to >> 8) + memory.of_lane;
  const OperandPlaces at_a = OperandPlaces::Of(memory, op.a);
  if (code >= kRowSum) {
    Columns<kVector> columns;
    const float value = code == kRowSum   ? ReducedOver<kRowSum, kVector, kPerLane>(memory, at_a, row)
                        : code == kRowMax ? ReducedOver<kRowMax, kVector, kPerLane>(memory, at_a, row)
                                          : ReducedOver<kRowMin, kVector, kPerLane>(memory, at_a, row);
#pragma unroll
    for (int i = 0; i < kVector; ++i) columns.v[i] = value;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) memory.Put(to + k * memory.stride, columns);
    return;
  }
  const OperandPlaces at_b = OperandPlaces::Of(memory, op.b), at_c = OperandPlaces::Of(memory, op.c);
#pragma unroll 1
  for (int first = 0; first < kPerLane; first += kAtOnce) {
    Columns<kVector> a[kAtOnce], b[kAtOnce], c[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) a[k] = memory.Get(at_a.first + (first + k) * at_a.step);
    if (ReadsSecond(code)) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) b[k] = memory.Get(at_b.first + (first + k) * at_b.step);
    }
    if (ReadsThird(code)) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) c[k] = memory.Get(at_c.first + (first + k) * at_c.step);
    }
    // The most frequent ones first: the others are a tree of comparisons.
    if (code == kRowMultiply) {
      OverColumns<kRowMultiply>(a, b, c);
    } else if (code == kRowMultiplyAdd) {
      OverColumns<kRowMultiplyAdd>(a, b, c);
    } else {
      switch (code) {
#define JAXSOK_ROW_OP(name)     \
  case name:                    \
    OverColumns<name>(a, b, c); \
    break;
        JAXSOK_LIGHT_ROW_OPS(JAXSOK_ROW_OP)
#undef JAXSOK_ROW_OP
        default:  // a heavy one
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) a[k].v[i] = HeavyOf(code, a[k].v[i], b[k].v[i]);
          }
          break;
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) memory.Put(to + (first + k) * memory.stride, a[k]);
  }
}

/// Steps one row by a row program, with the sum of its gradients.
template <typename RowType>
struct ApplyProgram {
  using Row = RowType;
  static constexpr int kNumLines = 2;  // of gradients: rows and states are in shared memory
  static constexpr bool kStepsLongRowsApart = true;
  static constexpr bool kStepsRows16 = false;
  static constexpr bool kShiftsBlocks = false;
  using Gradient =
      std::conditional_t<std::is_same_v<Row, Float16>, AnyOf<float, BFloat16, Float16>, AnyOf<float, BFloat16>>;
  static constexpr int kSharedBytes = 100 << 10;  // per block: two fit a multiprocessor

  StoreView store;
  BatchView batch;
  const uint32_t* step;
  int32_t rounding;
  StateView states;
  const float* scalars;
  const float* num_uses;
  int32_t row_gradient;
  int32_t* num_nonfinite;
  int32_t num_scalars, num_registers, num_ops;
  int32_t uses_register;  // it holds the number of uses; -1: no instruction reads it
  uint32_t scalars_place;
  LaneInstruction ops[kMaxRowOps];

  /// Empty: the row is in shared memory.
  template <int kVector, int kPerLane>
  struct Loaded {};

  /// Translates a program for rows of a shape, and returns the blocks that it needs: smaller ones if registers are many
  /// or wide, so that two of them fit a multiprocessor, and at most what a block can have.
  LaunchError Translate(const RowProgram& program, int vector, int per_lane, BlockShape* block) {
    int most = 0;
    JAXSOK_RETURN_IF_LAUNCH(SharedBytesOfBlock(&most));
    most -= kMostDeclaredBytes;
    num_ops = program.num_ops;
    num_registers = program.num_registers;
    uses_register = -1;
    for (int i = 0; i < num_ops; ++i) {
      const RowInstruction& op = program.ops[i];
      if (op.a == -1 || op.b == -1 || op.c == -1) uses_register = program.num_registers;
    }
    if (uses_register >= 0) ++num_registers;
    const int vector_bytes = vector * static_cast<int>(sizeof(float));
    const int scalar_bytes = num_scalars * static_cast<int>(sizeof(float4));
    const auto bytes_of = [&](int threads) { return num_registers * per_lane * threads * vector_bytes + scalar_bytes; };
    int threads = kBlock;
    while (threads > 2 * kWarp && bytes_of(threads) > std::min(kSharedBytes, most)) threads /= 2;
    if (bytes_of(threads) > most) threads = kWarp;
    if (bytes_of(threads) > most) return "program: its registers and scalars do not fit this GPU's shared memory";
    scalars_place = static_cast<uint32_t>(bytes_of(threads) - scalar_bytes);
    const auto register_at = [&](int number) {
      return static_cast<uint32_t>(number) * per_lane * threads * vector_bytes;
    };
    const auto place_of = [&](int operand) {
      if (operand >= 0) return kOfLane | register_at(operand);
      if (operand == -1) return kOfLane | register_at(uses_register);
      return scalars_place + static_cast<uint32_t>(-2 - operand) * static_cast<uint32_t>(sizeof(float4));
    };
    for (int i = 0; i < num_ops; ++i) {
      const RowInstruction& op = program.ops[i];
      const uint32_t to = op.code == kRowOutput ? op.to : register_at(op.to);
      ops[i] = {op.code | to << 8, place_of(op.a), place_of(op.b), place_of(op.c)};
    }
    *block = {threads, bytes_of(threads)};
    return nullptr;
  }

  /// Copies the scalars to the places of the instructions. The whole block calls it.
  __device__ void Begin() const {
    extern __shared__ float4 shared_registers[];
    float4* to = reinterpret_cast<float4*>(reinterpret_cast<char*>(shared_registers) + scalars_place);
    for (int i = static_cast<int>(threadIdx.x); i < num_scalars; i += static_cast<int>(blockDim.x)) {
      const float value = __ldg(scalars + i);
      to[i] = make_float4(value, value, value, value);
    }
    __syncthreads();
  }

  /// Returns zero: the bits are drawn when the row is written.
  __device__ static RowRounding RoundingOf(uint32_t) { return {0}; }

  /// Begins to copy the row and its states.
  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t row, RowRounding, int lane, int lanes, Loaded<kVector, kPerLane>&) const {
    const LaneMemory<kVector> memory = LaneMemory<kVector>::Of();
    const Row* from = store.rows.At<Row>(store.starts, row, store.dim);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (lane + k * lanes) * kVector;
      if (column >= store.dim) continue;
      if constexpr (std::is_same_v<Row, float>) {
        __pipeline_memcpy_async(memory.At(memory.PlaceOf(1, kPerLane, k)), from + column, memory.kBytes);
      } else {
        memory.Put(memory.PlaceOf(1, kPerLane, k), Columns<kVector>::LoadPlain(from + column));
      }
    }
    for (int s = 0; s < states.num_states; ++s) {
      if (states.width[s] != store.dim) continue;
      const float* state = states.data[s].At(store.starts, row, store.dim);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int column = (lane + k * lanes) * kVector;
        if (column >= store.dim) continue;
        __pipeline_memcpy_async(memory.At(memory.PlaceOf(2 + s, kPerLane, k)), state + column, memory.kBytes);
      }
    }
    __pipeline_commit();
  }

  /// Steps a row. `position`: that of a use of the row. A group without a row has no uses. Groups that are called
  /// together step together.
  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t position, uint32_t uses, int lane, int lanes, unsigned,
                        Loaded<kVector, kPerLane>&, RowPart<kVector, kPerLane>& gradient) const {
    if (uses == 0) return;
    const unsigned mask = GroupMask(lanes, static_cast<int>(threadIdx.x % kWarp) - lane);
    if (row_gradient != kRowGradientSum) gradient.Scale(RowGradientScale(row_gradient, uses));
    const LaneMemory<kVector> memory = LaneMemory<kVector>::Of();
    float zero = 0.0f;  // NaN once a gradient is infinite or NaN
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if ((lane + k * lanes) * kVector >= store.dim) continue;
      memory.Put(memory.PlaceOf(0, kPerLane, k), gradient.part[k]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) zero = __fmaf_rn(gradient.part[k].v[i], 0.0f, zero);
    }
    for (int s = 0; s < states.num_states; ++s) {
      if (states.width[s] == 1) Fill<kVector, kPerLane>(memory, 2 + s, *states.data[s].At(store.starts, row, 1));
    }
    if (uses_register >= 0) {
      const float number = num_uses == nullptr ? static_cast<float>(uses) : __ldg(num_uses + position);
      Fill<kVector, kPerLane>(memory, uses_register, number);
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
    Run<kVector, kPerLane>(memory, row, position, {lane, lanes, mask, store.dim});
  }

 private:
  template <int kVector, int kPerLane>
  __device__ static void Fill(const LaneMemory<kVector>& memory, int number, float value) {
    Columns<kVector> columns;
#pragma unroll
    for (int i = 0; i < kVector; ++i) columns.v[i] = value;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) memory.Put(memory.PlaceOf(number, kPerLane, k), columns);
  }

  template <int kVector, int kPerLane>
  __device__ void Run(const LaneMemory<kVector>& memory, uint32_t row, uint32_t position, const RowShape& shape) const {
    for (int at = 0; at < num_ops; ++at) {
      const LaneInstruction op = ops[at];
      if ((op.code_and_to & 0xff) != kRowOutput) {
        RunInstruction<kVector, kPerLane>(op, memory, shape);
        continue;
      }
      const OperandPlaces places = OperandPlaces::Of(memory, op.a);
      const int state = static_cast<int>(op.code_and_to >> 8) - 1;
      if (state < 0) {
        WriteRow<kVector, kPerLane>(memory, places, row, position, shape);
      } else if (states.width[state] == store.dim) {
        float* to = states.data[state].At(store.starts, row, store.dim);
        Write<kVector, kPerLane>(memory, places, shape,
                                 [&](const Columns<kVector>& columns, int column) { columns.Store(to + column); });
      } else if (shape.lane == 0) {
        *states.data[state].At(store.starts, row, 1) = memory.Get(places.first).v[0];
      }
    }
  }

  template <int kVector, int kPerLane>
  __device__ void WriteRow(const LaneMemory<kVector>& memory, OperandPlaces places, uint32_t row, uint32_t position,
                           const RowShape& shape) const {
    Row* to = store.rows.At<Row>(store.starts, row, store.dim);
    if constexpr (!std::is_same_v<Row, float>) {
      if (rounding == kRoundingStochastic) {
        const RowRounding bits = RoundingAt(store, batch, step, position);
        Write<kVector, kPerLane>(memory, places, shape, [&](const Columns<kVector>& columns, int column) {
          columns.StoreStochastic(to + column, bits, static_cast<uint32_t>(column));
        });
        return;
      }
    }
    Write<kVector, kPerLane>(memory, places, shape,
                             [&](const Columns<kVector>& columns, int column) { columns.Store(to + column); });
  }

  /// Calls put(columns, first column) for each vector of an operand.
  template <int kVector, int kPerLane, typename Put>
  __device__ static void Write(const LaneMemory<kVector>& memory, OperandPlaces places, const RowShape& shape,
                               const Put& put) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = (shape.lane + k * shape.lanes) * kVector;
      if (column < shape.dim) put(memory.Get(places.first + k * places.step), column);
    }
  }
};

template <typename Row>
LaunchError ProgramOf<Row>::Launch(Stream stream, const StoreView& store, const UpdateArguments& a,
                                   const GradientPointers& gradients, UsesWorkspace& w) {
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
  apply.num_scalars = a.spec.program->NumScalars();
  const LaneShape shape = LaneShape::OfProgram(store.dim);
  const int per_lane = ShapePerLane(store.dim, shape);
  BlockShape block;
  JAXSOK_RETURN_IF_LAUNCH(apply.Translate(*a.spec.program, shape.vector, per_lane, &block));
  return LaunchUses(stream, apply, gradients, a.batch, w, store.dim, shape, block);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_PROGRAM_CUDA_CUH_

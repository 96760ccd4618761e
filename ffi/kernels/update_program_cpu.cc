// The loops over columns of update_program_cpu.h, in a version for each instruction set.
#include "update_program_cpu.h"

#include <algorithm>

namespace jaxsok {
namespace {

/// One operand: columns, or one number for all.
struct Operand {
  const float* columns;  // null: `value` for all
  float value;

  static Operand Of(const RowMachine& machine, int number) {
    if (number >= 0) return {machine.Register(number), 0.0f};
    return {nullptr, machine.Scalar(number)};
  }
};

/// Computes to[c] = op(a[c], b[c], c[c]). If an operand is a number, the loop keeps it in a register.
template <int kCode>
struct OverColumns {
  __attribute__((always_inline)) static inline void Run(float* to, Operand a, Operand b, Operand c, int32_t dim) {
    const float *pa = a.columns, *pb = b.columns, *pc = c.columns;
    if (pa != nullptr && pb == nullptr && pc == nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(pa[i], b.value, c.value);
    } else if (pa != nullptr && pb != nullptr && pc == nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(pa[i], pb[i], c.value);
    } else if (pa == nullptr && pb != nullptr && pc == nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(a.value, pb[i], c.value);
    } else if (pa != nullptr && pb != nullptr && pc != nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(pa[i], pb[i], pc[i]);
    } else if (pa == nullptr && pb != nullptr && pc != nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(a.value, pb[i], pc[i]);
    } else if (pa != nullptr && pb == nullptr && pc != nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(pa[i], b.value, pc[i]);
    } else if (pa == nullptr && pb == nullptr && pc != nullptr) {
      for (int32_t i = 0; i < dim; ++i) to[i] = RowOpOf<kCode>(a.value, b.value, pc[i]);
    } else {
      const float value = RowOpOf<kCode>(a.value, b.value, c.value);
      for (int32_t i = 0; i < dim; ++i) to[i] = value;
    }
  }
};

/// Joins the columns of each lane of LaneShape::OfProgram, in order, then the lanes in a butterfly.
template <int kCode>
float Reduced(const float* values, int32_t dim) {
  const LaneShape shape = LaneShape::OfProgram(dim);
  float lanes[32] = {};
  for (int l = 0; l < shape.lanes; ++l) lanes[l] = StartOf<kCode>();
  for (int32_t start = 0; start < dim; start += shape.lanes * shape.vector) {
    for (int l = 0; l < shape.lanes; ++l) {
      const int32_t first = start + l * shape.vector;
      for (int32_t c = first; c < std::min(first + shape.vector, dim); ++c)
        lanes[l] = JoinOf<kCode>(lanes[l], values[c]);
    }
  }
  // Lane 0 of the butterfly: the other lanes hold the same, since the operation is commutative.
  for (int offset = shape.lanes / 2; offset >= 1; offset /= 2) {
    for (int l = 0; l < offset; ++l) lanes[l] = JoinOf<kCode>(lanes[l], lanes[l + offset]);
  }
  return lanes[0];
}

}  // namespace

JAXSOK_CPU_CLONES int32_t RunColumnOps(const RowMachine& machine, int32_t op) {
  const int32_t dim = machine.dim;
  for (; op < machine.program.num_ops; ++op) {
    const RowInstruction instruction = machine.program.ops[op];
    if (instruction.code >= kRowSum) break;
    float* to = machine.Register(instruction.to);
    const Operand a = Operand::Of(machine, instruction.a);
    // Unused operands are numbers, so that few of the loops are ever taken.
    const Operand b = ReadsSecond(instruction.code) ? Operand::Of(machine, instruction.b) : Operand{nullptr, 0.0f};
    const Operand c = ReadsThird(instruction.code) ? Operand::Of(machine, instruction.c) : Operand{nullptr, 0.0f};
    switch (instruction.code) {
#define JAXSOK_ROW_OP(name)                   \
  case name:                                  \
    OverColumns<name>::Run(to, a, b, c, dim); \
    break;
      JAXSOK_LIGHT_ROW_OPS(JAXSOK_ROW_OP)
      JAXSOK_HEAVY_ROW_OPS(JAXSOK_ROW_OP)
#undef JAXSOK_ROW_OP
      default:
        break;
    }
  }
  return op;
}

void RunReduction(const RowMachine& machine, const RowInstruction& op) {
  const int32_t dim = machine.dim;
  float value;
  if (op.a < 0) {
    // A number in every column, as the registers would hold it.
    float columns[kMaxDim];
    std::fill_n(columns, dim, machine.Scalar(op.a));
    value = op.code == kRowSum ? Reduced<kRowSum>(columns, dim) : columns[0];
  } else {
    const float* columns = machine.Register(op.a);
    value = op.code == kRowSum   ? Reduced<kRowSum>(columns, dim)
            : op.code == kRowMax ? Reduced<kRowMax>(columns, dim)
                                 : Reduced<kRowMin>(columns, dim);
  }
  float* to = machine.Register(op.to);
  for (int32_t c = 0; c < dim; ++c) to[c] = value;
}

}  // namespace jaxsok

// Row programs on the CPU: operation by operation, each a loop over the columns of one row.
#ifndef JAXSOK_KERNELS_UPDATE_PROGRAM_CPU_H_
#define JAXSOK_KERNELS_UPDATE_PROGRAM_CPU_H_

#include <vector>

#include "../core/row_program.h"
#include "../core/row_update.h"
#include "parallel_cpu.h"

namespace jaxsok {

/// The registers of one thread, and the values of its operands.
struct RowMachine {
  const RowProgram& program;
  const float* scalars;
  int32_t dim;
  int32_t stride;  // floats from one register to the next: dim, rounded up to a memory line
  float* registers;
  float num_uses = 0.0f;

  static int32_t StrideOf(int32_t dim) { return CeilDiv(dim, 16) * 16; }

  float* Register(int number) const { return registers + int64_t{number} * stride; }
  float Scalar(int operand) const { return operand == -1 ? num_uses : scalars[-2 - operand]; }
};

/// Runs the column operations of a program, from `op` to the next operation of another kind, and returns its number.
int32_t RunColumnOps(const RowMachine& machine, int32_t op);

/// Runs a reduction; LaneShape::OfProgram defines its order.
void RunReduction(const RowMachine& machine, const RowInstruction& op);

/// Runs a program. Calls put(slot, values, is_scalar) for each output: slot 0 is the row, 1 + k state k.
template <typename Put>
void RunRowProgram(const RowMachine& machine, const Put& put) {
  for (int32_t at = 0; at < machine.program.num_ops;) {
    const RowInstruction& op = machine.program.ops[at];
    if (op.code < kRowSum) {
      at = RunColumnOps(machine, at);
      continue;
    }
    if (op.code != kRowOutput) {
      RunReduction(machine, op);
    } else if (op.a >= 0) {
      put(op.to, machine.Register(op.a), false);
    } else {
      const float value = machine.Scalar(op.a);
      put(op.to, &value, true);
    }
    ++at;
  }
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_PROGRAM_CPU_H_

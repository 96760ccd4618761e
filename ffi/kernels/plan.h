// The distinct keys of a batch; reads no table.
#ifndef JAXSOK_KERNELS_PLAN_H_
#define JAXSOK_KERNELS_PLAN_H_

#include "lookup.h"

namespace jaxsok {

/// A scratch index at load 0.5 (32 bytes a key) beside what inserting takes.
constexpr int64_t PlanWorkspaceBytes(int64_t num_keys) {
  return InsertWorkspaceBytes(num_keys) + (CeilDiv<int64_t>(num_keys, 2) + 64) * 64 + 512;
}

struct PlanView {
  uint64_t* unique;         // [num_keys]: distinct (table, key) pairs by first position; then kPaddingKey
  uint32_t* unique_tables;  // [num_keys]; 0 beyond num_unique
  int32_t* inverse;         // [num_keys]: position among unique; num_keys for padding
  int32_t* multiplicity;    // [num_keys]: occurrences of each; 0 beyond num_unique
  int32_t* num_unique;      // [1]
};

/// Makes the keys of a batch distinct.
///
/// Order  : by first position: the same on every run and on both back ends.
/// Cost   : 32 B of scratch index a key, written once and probed once.
LaunchError LaunchPlan(Stream stream, const BatchView& batch, const PlanView& plan, void* workspace);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_PLAN_H_

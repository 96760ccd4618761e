// The fused update: bag gradients -> row gradients -> one optimizer step per row.
#ifndef JAXSOK_KERNELS_UPDATE_H_
#define JAXSOK_KERNELS_UPDATE_H_

#include "../core/row_program.h"
#include "lookup.h"

namespace jaxsok {

/// Bytes of workspace for every use that is sorted by row. A GPU stores row and position before and after (16), the
/// factor with its bag (8), the storage of CUB's sort (8), and its counts by tile (below 1, with room for other tiles).
/// The CPU stores a Use of 16 bytes, twice.
constexpr int64_t kBytesOfUse = 16 + 8 + 8 + 4;
/// Bytes that do not depend on the number of uses: far more than the histograms of CUB's sort, or the CPU's counts by
/// bucket (512 KiB). Launchers compare what they need with the total.
constexpr int64_t kUsesFixedBytes = 8 << 20;

/// Returns the bytes of workspace for an update of `num_keys` uses: the sorted uses, the partial sums of rows with more
/// than kUsesPerChunk uses (at most two a chunk, and one more), and the lists of those rows.
constexpr int64_t UpdateWorkspaceBytes(int64_t num_keys, int32_t dim) {
  const int64_t partial_bytes = 2 * int64_t{dim} * 4, list_bytes = 16;
  return 4 * kControlBytes + kUsesFixedBytes + PaddedToLine(num_keys) * kBytesOfUse +
         CeilDiv<int64_t>(num_keys, kUsesPerChunk) * (partial_bytes + list_bytes) + partial_bytes;
}

/// Returns the bytes of `num_keys` uses that a call sorts for another: row, position, and the factor with its bag.
constexpr int64_t SortedUsesBytes(int64_t num_keys) { return PaddedToLine(num_keys) * 16; }

struct UpdateSpec {
  int32_t optimizer;     // Optimizer
  int32_t row_gradient;  // RowGradient
  int32_t rounding;      // Rounding; of 16-bit rows
  // For kOptimizerProgram, otherwise null.
  const RowProgram* program = nullptr;
  // For a program, by position: the uses of the row in all shards; null: its uses in the batch.
  const float* num_uses = nullptr;
};

/// Checks that the states' widths are those of the optimizer.
inline LaunchError CheckStates(int32_t optimizer, const StateView& states, int32_t dim) {
  int32_t num_states = 0, width = dim;
  switch (optimizer) {
    case kOptimizerSgd:
      num_states = Sgd::kNumStates;
      break;
    case kOptimizerAdagrad:
      num_states = Adagrad::kNumStates;
      break;
    case kOptimizerRowwiseAdagrad:
      num_states = RowwiseAdagrad::kNumStates;
      width = 1;
      break;
    case kOptimizerAdam:
      num_states = Adam::kNumStates;
      break;
    case kOptimizerProgram:
      for (int32_t k = 0; k < states.num_states; ++k) {
        if (states.width[k] != dim && states.width[k] != 1) return "states: as wide as a row, or of one number";
      }
      return nullptr;
    default:
      return "optimizer: unknown";
  }
  if (states.num_states != num_states) return "states: not as many as the optimizer has";
  for (int32_t k = 0; k < num_states; ++k) {
    if (states.width[k] != width) return "states: not as wide as the optimizer's";
  }
  return nullptr;
}

/// The inputs and results of an update, other than the store and the gradients.
struct UpdateArguments {
  StateView states;
  UpdateSpec spec;
  const float* hyper;
  const uint32_t* step;
  const bool* is_live;
  BatchView batch;
  const uint32_t* row_ids;
  int32_t* num_nonfinite;
  int32_t* num_stale;
  void* workspace;
  const Request* requests = nullptr;  // by position: it stands for so many uses; null: for one
};

/// Steps every row that the batch used, once, with the sum of its gradients.
///
/// Pre    : row_ids are those that the lookups returned: a position's row is that of its key and table, kNoRow for
///          padding. is_live[p]: plan p (kFeaturePlan) is applied, see LaunchTicketsRedeem; hyper is float[kNumHyper],
///          or a program's scalars; step[0] is the number of updates so far. The store also has tables and seed.
/// Post   : rows and states of used rows are stepped once. A row whose summed gradient is not finite is unchanged and
///          counted in num_nonfinite[table]. Uses of a plan that is not applied are skipped and counted in num_stale[0]
///          (of keys that had a row). Keys of a bag whose divisor is zero (its embedding is zeros) are no uses: they do
///          not move their rows. All in float32. A row of 16 bits is rounded once, as spec.rounding says; random bits
///          depend on the seed, the step, and the key and table that the batch gives for a use of the row
///          (core/row_dtype.h).
/// Order  : core/row_update.h.
LaunchError LaunchUpdate(Stream stream, const StoreView& store, const UpdateArguments& a,
                         const GradientsView& gradients);

/// LaunchUpdate in two parts. The first sorts the uses by row and reads no gradient, so that it may run while gradients
/// arrive. The CPU does all in the second.
LaunchError LaunchSortUses(Stream stream, const StoreView& store, const UpdateArguments& a);
LaunchError LaunchStepRows(Stream stream, const StoreView& store, const UpdateArguments& a,
                           const GradientsView& gradients);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_H_

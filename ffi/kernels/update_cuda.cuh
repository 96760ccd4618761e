// An optimizer of the way back on a GPU, for rows of one dtype: what uses_cuda.cuh applies to a row's gradients. What
// these templates are compiled for: ../CMakeLists.txt.
#ifndef JAXSOK_KERNELS_UPDATE_CUDA_CUH_
#define JAXSOK_KERNELS_UPDATE_CUDA_CUH_

#include <algorithm>
#include <type_traits>

#include "update_cuda.h"

namespace jaxsok {

/// The random bits of the row that a position uses.
__device__ inline RowRounding RoundingAt(const StoreView& store, const BatchView& batch, const uint32_t* step,
                                         uint32_t position) {
  const TableOfPosition table_of{batch.tables, batch.features, batch.num_features, batch.num_keys};
  const uint32_t table = min(table_of(position), static_cast<uint32_t>(store.num_tables) - 1);
  return RowRounding::Of(store.tables + table * kNumTableWords, RoundingOfStep(store.seed, __ldg(step)),
                         __ldg(batch.keys + position));
}

/// Steps one row with the sum of its gradients.
///
/// The random bits of a row are those of the key and table that the batch gives for one of its uses: they are at hand,
/// the record would be one more line to read.
///
/// kRowGradients: bag gradients have the dtype of the rows; else that is looked up.
template <typename Step, typename RowType, bool kRowGradients>
struct ApplyStep {
  using Row = RowType;
  static constexpr bool kHasRowGradients = kRowGradients;
  static constexpr bool kStepsLongRowsApart = false;
  /// Whether vectors have 16 bytes of such rows, and the random bits of a warp's rows are drawn side by side.
  static constexpr bool kStepsRows16 = !std::is_same_v<Row, float>;
  /// Where rows come by shared memory (StageOf): what comes with them, lines as wide as they are or a word for each.
  static constexpr int kNumStagedLines = Step::kRowwise ? 0 : Step::kNumStates;
  static constexpr bool kStagesWords = Step::kRowwise;
  /// Lines as wide as a row that a step holds.
  static constexpr int kNumLines = 1 + (Step::kRowwise ? 0 : Step::kNumStates);

  StoreView store;
  BatchView batch;
  const uint32_t* step;
  int32_t rounding;
  static constexpr int kNumStates = Step::kNumStates > 0 ? Step::kNumStates : 1;
  Slabs<float> states[kNumStates];
  const float* hyper;
  int32_t row_gradient;
  int32_t* num_nonfinite;
  float inverse_dim;  // 1 / dim where that is a power of two, and so exactly as good as a division by dim; else 0

  template <int kVector, int kPerLane>
  struct Loaded {
    PackedPart<Row, kVector, kPerLane> row;
    RowPart<kVector, kPerLane> state0;
    RowPart<kVector, kPerLane> state1;
    float rowwise;
    RowRounding bits;  // of rows of 16 bits
  };

  /// The random bits of the row that the use at `position` is of.
  __device__ RowRounding RoundingOf(uint32_t position) const {
    if constexpr (kStepsRows16) {
      if (rounding == kRoundingStochastic) return RoundingAt(store, batch, step, position);
    }
    return {0};
  }

  /// Begins to read what the step will need, before the gradients are summed.
  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t row, RowRounding bits, int lane, int lanes, Loaded<kVector, kPerLane>& loaded) const {
    loaded.row.LoadPlain(store.rows.At<Row>(store.starts, row, store.dim), lane, lanes, store.dim);
    if constexpr (Step::kRowwise) {
      loaded.rowwise = *states[0].At(store.starts, row, 1);
    } else {
      if constexpr (Step::kNumStates > 0) {
        loaded.state0.LoadPlain(states[0].At(store.starts, row, store.dim), lane, lanes, store.dim);
      }
      if constexpr (Step::kNumStates > 1) {
        loaded.state1.LoadPlain(states[1].At(store.starts, row, store.dim), lane, lanes, store.dim);
      }
    }
    loaded.bits = bits;
  }

  /// Begins to read the same into a stage,
  template <typename Stage>
  __device__ void Ask(uint32_t row, const Stage& stage, int lane, int lanes) const {
    Stage::Rows::Ask(stage.rows, store.rows.At<Row>(store.starts, row, store.dim), lane, lanes, store.dim);
    if constexpr (Step::kRowwise) {
      if (lane == 0) __pipeline_memcpy_async(stage.WordOf(lanes), states[0].At(store.starts, row, 1), sizeof(float));
    } else {
#pragma unroll
      for (int s = 0; s < Step::kNumStates; ++s) {
        Stage::States::Ask(stage.StateLines(s), states[s].At(store.starts, row, store.dim), lane, lanes, store.dim);
      }
    }
  }
  /// and takes it from there.
  template <typename Stage, int kVector, int kPerLane>
  __device__ void Take(const Stage& stage, RowRounding bits, int lanes, Loaded<kVector, kPerLane>& loaded) const {
    Stage::Rows::Take(stage.rows, loaded.row);
    if constexpr (Step::kRowwise) {
      loaded.rowwise = *stage.WordOf(lanes);
    } else {
#pragma unroll
      for (int s = 0; s < Step::kNumStates; ++s) {
        PackedPart<float, kVector, kPerLane> state;
        Stage::States::Take(stage.StateLines(s), state);
        (s == 0 ? loaded.state0 : loaded.state1) = state.Widened();
      }
    }
    loaded.bits = bits;
  }

  /// `callers`: the lanes that call it together, whole groups of `lanes`. A group without a row has no uses.
  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t, uint32_t num_uses, int lane, int lanes, unsigned callers,
                        Loaded<kVector, kPerLane>& loaded, RowPart<kVector, kPerLane>& gradient) const {
    if (row_gradient != kRowGradientSum) gradient.Scale(RowGradientScale(row_gradient, num_uses));
    float words[kNumHyper];
#pragma unroll
    for (int i = 0; i < kNumHyper; ++i) words[i] = __ldg(hyper + i);
    float squares = 0.0f;  // of the whole row in the end
    if constexpr (Step::kRowwise) {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        if ((lane + k * lanes) * kVector >= store.dim) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) squares = squares + gradient.part[k].v[i] * gradient.part[k].v[i];
      }
#pragma unroll
      for (int offset = kWarp / 2; offset >= 1; offset /= 2) {
        if (offset < lanes) squares = squares + __shfl_xor_sync(callers, squares, offset);
      }
    }
    // True only where all numbers of the row are finite; a sum of squares may be infinite without.
    const bool is_surely_finite =
        Step::kRowwise ? squares < __int_as_float(0x7f800000) : __all_sync(callers, HasFinite(gradient, lane, lanes));
    if (num_uses == 0) return;
    const unsigned group_mask = GroupMask(lanes, static_cast<int>(threadIdx.x % kWarp) - lane);
    if (!is_surely_finite && !__all_sync(group_mask, HasFinite(gradient, lane, lanes))) {
      if (lane == 0) {
        const uint32_t table = store.records.At(store.starts, row, 1)->table;
        if (table < static_cast<uint32_t>(store.num_tables)) atomicAdd(num_nonfinite + table, 1);
      }
      return;
    }
    RowPart<kVector, kPerLane> stepped = loaded.row.Widened();
    if constexpr (Step::kRowwise) {
      const float mean = inverse_dim != 0.0f ? squares * inverse_dim : squares / static_cast<float>(store.dim);
      const float accumulator = loaded.rowwise + mean;
      const float scale = Step::Scale(words, accumulator);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          stepped.part[k].v[i] = stepped.part[k].v[i] - scale * gradient.part[k].v[i];
        }
      }
      if (lane == 0) *states[0].At(store.starts, row, 1) = accumulator;
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        if ((lane + k * lanes) * kVector >= store.dim) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          Step::Step(words, gradient.part[k].v[i], stepped.part[k].v[i], loaded.state0.part[k].v[i],
                     loaded.state1.part[k].v[i]);
        }
      }
      if constexpr (Step::kNumStates > 0) {
        loaded.state0.Store(states[0].At(store.starts, row, store.dim), lane, lanes, store.dim);
      }
      if constexpr (Step::kNumStates > 1) {
        loaded.state1.Store(states[1].At(store.starts, row, store.dim), lane, lanes, store.dim);
      }
    }
    Row* to = store.rows.At<Row>(store.starts, row, store.dim);
    if constexpr (!std::is_same_v<Row, float>) {
      if (rounding == kRoundingStochastic) {
        stepped.StoreStochastic(to, loaded.bits, lane, lanes, store.dim);
        return;
      }
    }
    stepped.Store(to, lane, lanes, store.dim);
  }

 private:
  /// Whether the columns that the calling lane holds are neither infinite nor NaN.
  template <int kVector, int kPerLane>
  __device__ bool HasFinite(const RowPart<kVector, kPerLane>& gradient, int lane, int lanes) const {
    float zero = 0.0f;  // NaN once a number is infinite or NaN
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if ((lane + k * lanes) * kVector >= store.dim) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) zero = __fmaf_rn(gradient.part[k].v[i], 0.0f, zero);
    }
    return zero == 0.0f;
  }
};

/// The kernels that read partial sums alone are the same whatever the dtype of the gradients was.
template <typename Step, typename Row>
ApplyStep<Step, Row, true> OfSums(const ApplyStep<Step, Row, false>& apply) {
  ApplyStep<Step, Row, true> same;
  same.store = apply.store;
  same.batch = apply.batch;
  same.step = apply.step;
  same.rounding = apply.rounding;
  std::copy_n(apply.states, apply.kNumStates, same.states);
  same.hyper = apply.hyper;
  same.row_gradient = apply.row_gradient;
  same.num_nonfinite = apply.num_nonfinite;
  same.inverse_dim = apply.inverse_dim;
  return same;
}

template <typename Step, typename Row, bool kRowGradients>
LaunchError LaunchStepAs(Stream stream, const StoreView& store, const UpdateArguments& a,
                         const FeaturePointers<const void>& gradients, UsesWorkspace& w, int end_bit) {
  ApplyStep<Step, Row, kRowGradients> apply;
  apply.store = store;
  apply.batch = a.batch;
  apply.step = a.step;
  apply.rounding = a.spec.rounding;
  for (int k = 0; k < Step::kNumStates; ++k) apply.states[k] = a.states.data[k];
  apply.hyper = a.hyper;
  apply.row_gradient = a.spec.row_gradient;
  apply.num_nonfinite = a.num_nonfinite;
  apply.inverse_dim = (store.dim & (store.dim - 1)) == 0 ? 1.0f / static_cast<float>(store.dim) : 0.0f;
  const LaneShape shape = std::is_same_v<Row, float> ? LaneShape::Of(store.dim) : LaneShape::OfRows16(store.dim);
  return LaunchUses(stream, apply, gradients, a.batch, w, store.dim, store.dim * a.gradient_bytes, end_bit, shape,
                    {kBlock, 0});
}

template <typename Row, typename Step>
LaunchError StepOf<Row, Step>::Launch(Stream stream, const StoreView& store, const UpdateArguments& a,
                                      const FeaturePointers<const void>& gradients, UsesWorkspace& w, int end_bit) {
  if constexpr (!std::is_same_v<Row, float>) {
    if (a.gradient_bytes != static_cast<int32_t>(sizeof(Row))) {
      return LaunchStepAs<Step, Row, false>(stream, store, a, gradients, w, end_bit);
    }
  }
  return LaunchStepAs<Step, Row, true>(stream, store, a, gradients, w, end_bit);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_CUDA_CUH_

// An optimizer of the update on a GPU, for rows of one dtype: uses_sum_cuda.cuh applies it to a row's gradients.
// ../CMakeLists.txt lists the instances of these templates.
#ifndef JAXSOK_KERNELS_UPDATE_CUDA_CUH_
#define JAXSOK_KERNELS_UPDATE_CUDA_CUH_

#include <algorithm>
#include <type_traits>

#include "update_cuda.h"
#include "uses_sum_cuda.cuh"

namespace jaxsok {

/// Returns the random bits of the row that a position uses.
__device__ inline RowRounding RoundingAt(const StoreView& store, const BatchView& batch, const uint32_t* step,
                                         uint32_t position) {
  const TableOfPosition table_of{batch.tables, batch.features, batch.num_features, batch.num_keys};
  const uint32_t table = min(table_of(position), static_cast<uint32_t>(store.num_tables) - 1);
  return RowRounding::Of(store.tables + table * kNumTableWords, RoundingOfStep(store.seed, __ldg(step)),
                         __ldg(batch.keys + position));
}

/// The inputs of stepping a row, for any optimizer.
///
/// The random bits of a row are those of the key and table that the batch gives for one of its uses: they are already
/// loaded, while the record would be one more memory line to read.
template <typename Step, typename RowType>
struct StepArguments {
  using Row = RowType;
  static constexpr bool kStepsLongRowsApart = false;
  /// True if vectors hold 16 bytes of such rows, and the random bits of a warp's rows are drawn in parallel.
  static constexpr bool kStepsRows16 = !std::is_same_v<Row, float>;
  static constexpr bool kShiftsBlocks = false;
  static constexpr int kNumStates = Step::kNumStates > 0 ? Step::kNumStates : 1;

  StoreView store;
  BatchView batch;
  const uint32_t* step;
  int32_t rounding;
  Slabs<float> states[kNumStates];
  const float* hyper;
  int32_t row_gradient;
  int32_t* num_nonfinite;
  float inverse_dim;  // 1 / dim if dim is a power of two, which makes it as exact as a division by dim; otherwise 0

  /// Returns the random bits of the row that the use at `position` belongs to.
  __device__ RowRounding RoundingOf(uint32_t position) const {
    if constexpr (kStepsRows16) {
      if (rounding == kRoundingStochastic) return RoundingAt(store, batch, step, position);
    }
    return {0};
  }

 protected:
  __device__ float* StateAt(int state, uint32_t row, int width) const {
    return states[state].At(store.starts, row, width);
  }

  struct Hyper {
    float words[kNumHyper];
  };
  __device__ Hyper LoadHyper() const {
    Hyper loaded;
#pragma unroll
    for (int i = 0; i < kNumHyper; ++i) loaded.words[i] = __ldg(hyper + i);
    return loaded;
  }

  /// Turns the sum of `num_uses` gradients into the row gradient.
  template <int kVector, int kPerLane>
  __device__ void ScaleGradient(uint32_t num_uses, RowPart<kVector, kPerLane>& gradient) const {
    if (row_gradient != kRowGradientSum) gradient.Scale(RowGradientScale(row_gradient, num_uses));
  }

  /// Returns whether the columns that the calling lane holds are neither infinite nor NaN.
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

  /// Returns whether a row's gradient is finite, and counts it otherwise. Lanes of a group call it together.
  template <int kVector, int kPerLane>
  __device__ bool CheckFinite(uint32_t row, const RowPart<kVector, kPerLane>& gradient, int lane, int lanes) const {
    const unsigned group_mask = GroupMask(lanes, static_cast<int>(threadIdx.x % kWarp) - lane);
    if (__all_sync(group_mask, HasFinite(gradient, lane, lanes))) return true;
    if (lane == 0) {
      const uint32_t table = store.records.At(store.starts, row, 1)->table;
      if (table < static_cast<uint32_t>(store.num_tables)) atomicAdd(num_nonfinite + table, 1);
    }
    return false;
  }

  template <int kVector, int kPerLane>
  __device__ void StoreRow(uint32_t row, const RowPart<kVector, kPerLane>& stepped, const RowRounding& bits, int lane,
                           int lanes) const {
    Row* to = store.rows.At<Row>(store.starts, row, store.dim);
    if constexpr (kStepsRows16) {
      if (rounding == kRoundingStochastic) {
        stepped.StoreStochastic(to, bits, lane, lanes, store.dim);
        return;
      }
    }
    stepped.Store(to, lane, lanes, store.dim);
  }
};

// The interface of a step. The sums of uses_sum_cuda.cuh call, for each row with uses:
//
//   Load          begins to read the inputs of the step, before the gradients are summed
//   Ask and Take  begin to read the same into a stage (StageOf), and take it from there
//   Apply         steps the row. `callers`: the lanes that call it together, whole groups of `lanes`. A group without a
//                 row has no uses.

/// Steps one row column by column; states are as wide as rows.
template <typename Step, typename RowType, typename GradientType>
struct ApplyByColumns : StepArguments<Step, RowType> {
  using Base = StepArguments<Step, RowType>;
  using Base::StateAt, Base::store;
  using Row = RowType;
  using Gradient = GradientType;

  static constexpr int kNumStagedLines = Step::kNumStates;
  static constexpr bool kStagesWords = false;
  static constexpr int kNumLines = 1 + Step::kNumStates;  // rows of this width that a step holds

  template <int kVector, int kPerLane>
  struct Loaded {
    PackedPart<Row, kVector, kPerLane> row;
    RowPart<kVector, kPerLane> states[Base::kNumStates];
    RowRounding bits;  // of rows of 16 bits
  };

  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t row, RowRounding bits, int lane, int lanes, Loaded<kVector, kPerLane>& loaded) const {
    loaded.row.LoadPlain(store.rows.template At<Row>(store.starts, row, store.dim), lane, lanes, store.dim);
#pragma unroll
    for (int s = 0; s < Step::kNumStates; ++s) {
      loaded.states[s].LoadPlain(StateAt(s, row, store.dim), lane, lanes, store.dim);
    }
    loaded.bits = bits;
  }

  template <typename Stage>
  __device__ void Ask(uint32_t row, const Stage& stage, int lane, int lanes) const {
    Stage::Rows::Ask(stage.rows, store.rows.template At<Row>(store.starts, row, store.dim), lane, lanes, store.dim);
#pragma unroll
    for (int s = 0; s < Step::kNumStates; ++s) {
      Stage::States::Ask(stage.StateLines(s), StateAt(s, row, store.dim), lane, lanes, store.dim);
    }
  }
  template <typename Stage, int kVector, int kPerLane>
  __device__ void Take(const Stage& stage, RowRounding bits, int, Loaded<kVector, kPerLane>& loaded) const {
    Stage::Rows::Take(stage.rows, loaded.row);
#pragma unroll
    for (int s = 0; s < Step::kNumStates; ++s) {
      PackedPart<float, kVector, kPerLane> state;
      Stage::States::Take(stage.StateLines(s), state);
      loaded.states[s] = state.Widened();
    }
    loaded.bits = bits;
  }

  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t, uint32_t num_uses, int lane, int lanes, unsigned callers,
                        Loaded<kVector, kPerLane>& loaded, RowPart<kVector, kPerLane>& gradient) const {
    this->ScaleGradient(num_uses, gradient);
    const auto hyper = this->LoadHyper();
    const bool are_all_finite = __all_sync(callers, this->HasFinite(gradient, lane, lanes));
    if (num_uses == 0) return;
    if (!are_all_finite && !this->CheckFinite(row, gradient, lane, lanes)) return;
    RowPart<kVector, kPerLane> stepped = loaded.row.Widened();
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if ((lane + k * lanes) * kVector >= store.dim) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        Step::Step(hyper.words, gradient.part[k].v[i], stepped.part[k].v[i], loaded.states[0].part[k].v[i],
                   loaded.states[Base::kNumStates - 1].part[k].v[i]);
      }
    }
#pragma unroll
    for (int s = 0; s < Step::kNumStates; ++s) {
      loaded.states[s].Store(StateAt(s, row, store.dim), lane, lanes, store.dim);
    }
    this->StoreRow(row, stepped, loaded.bits, lane, lanes);
  }
};

/// Steps one row by a factor that all its columns share: its state is one number, computed from their squares.
template <typename Step, typename RowType, typename GradientType>
struct ApplyByRow : StepArguments<Step, RowType> {
  using Base = StepArguments<Step, RowType>;
  using Base::StateAt, Base::store;
  using Row = RowType;
  using Gradient = GradientType;

  static constexpr int kNumStagedLines = 0;
  static constexpr bool kStagesWords = true;  // a word for each row
  static constexpr int kNumLines = 1;

  template <int kVector, int kPerLane>
  struct Loaded {
    PackedPart<Row, kVector, kPerLane> row;
    float accumulator;
    RowRounding bits;  // of rows of 16 bits
  };

  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t row, RowRounding bits, int lane, int lanes, Loaded<kVector, kPerLane>& loaded) const {
    loaded.row.LoadPlain(store.rows.template At<Row>(store.starts, row, store.dim), lane, lanes, store.dim);
    loaded.accumulator = *StateAt(0, row, 1);
    loaded.bits = bits;
  }

  template <typename Stage>
  __device__ void Ask(uint32_t row, const Stage& stage, int lane, int lanes) const {
    Stage::Rows::Ask(stage.rows, store.rows.template At<Row>(store.starts, row, store.dim), lane, lanes, store.dim);
    if (lane == 0) __pipeline_memcpy_async(stage.WordOf(lanes), StateAt(0, row, 1), sizeof(float));
  }
  template <typename Stage, int kVector, int kPerLane>
  __device__ void Take(const Stage& stage, RowRounding bits, int lanes, Loaded<kVector, kPerLane>& loaded) const {
    Stage::Rows::Take(stage.rows, loaded.row);
    loaded.accumulator = *stage.WordOf(lanes);
    loaded.bits = bits;
  }

  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t, uint32_t num_uses, int lane, int lanes, unsigned callers,
                        Loaded<kVector, kPerLane>& loaded, RowPart<kVector, kPerLane>& gradient) const {
    this->ScaleGradient(num_uses, gradient);
    const auto hyper = this->LoadHyper();
    const float squares = SumSquares(gradient, lane, lanes, callers);
    if (num_uses == 0) return;
    // A finite sum has finite terms; the sum of finite numbers may be infinite.
    if (!(squares < INFINITY) && !this->CheckFinite(row, gradient, lane, lanes)) return;
    RowPart<kVector, kPerLane> stepped = loaded.row.Widened();
    const float mean =
        this->inverse_dim != 0.0f ? squares * this->inverse_dim : squares / static_cast<float>(store.dim);
    const float accumulator = loaded.accumulator + mean;
    const float scale = Step::Scale(hyper.words, accumulator);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        stepped.part[k].v[i] = stepped.part[k].v[i] - scale * gradient.part[k].v[i];
      }
    }
    if (lane == 0) *StateAt(0, row, 1) = accumulator;
    this->StoreRow(row, stepped, loaded.bits, lane, lanes);
  }

 private:
  /// Returns the sum over the columns of a row, in each of its lanes (core/row_update.h has the order).
  template <int kVector, int kPerLane>
  __device__ float SumSquares(const RowPart<kVector, kPerLane>& gradient, int lane, int lanes, unsigned callers) const {
    float squares = 0.0f;
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
    return squares;
  }
};

template <typename Step, typename Row, typename Gradient>
using ApplyStep =
    std::conditional_t<Step::kRowwise, ApplyByRow<Step, Row, Gradient>, ApplyByColumns<Step, Row, Gradient>>;

/// Returns the step for kernels that read only partial sums, which do not depend on the dtype of the gradients.
template <typename Step, typename Row, typename Gradient>
ApplyByColumns<Step, Row, Row> OfSums(const ApplyByColumns<Step, Row, Gradient>& apply) {
  return {apply};
}
template <typename Step, typename Row, typename Gradient>
ApplyByRow<Step, Row, Row> OfSums(const ApplyByRow<Step, Row, Gradient>& apply) {
  return {apply};
}

template <typename Step, typename Row, typename Gradient>
LaunchError LaunchStepAs(Stream stream, const StoreView& store, const UpdateArguments& a,
                         const GradientPointers& gradients, UsesWorkspace& w) {
  ApplyStep<Step, Row, Gradient> apply;
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
  return LaunchUses(stream, apply, gradients, a.batch, w, store.dim, shape);
}

template <typename Row, typename Step>
LaunchError StepOf<Row, Step>::Launch(Stream stream, const StoreView& store, const UpdateArguments& a,
                                      const GradientPointers& gradients, UsesWorkspace& w) {
  if (gradients.dtype == RowNumber<Row>::kDtype) return LaunchStepAs<Step, Row, Row>(stream, store, a, gradients, w);
  // float16 rows have no code of their own for bfloat16, which would add 0.7 MB to the library.
  using Other = std::conditional_t<std::is_same_v<Row, float>, BFloat16,
                                   std::conditional_t<std::is_same_v<Row, BFloat16>, float, AnyOf<float, BFloat16>>>;
  return LaunchStepAs<Step, Row, Other>(stream, store, a, gradients, w);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_CUDA_CUH_

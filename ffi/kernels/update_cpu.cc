// The update on the CPU: row gradients (uses_cpu.h), each followed at once by its row's optimizer step.
#include <cstring>

#include "update.h"
#include "update_program_cpu.h"
#include "uses_cpu.h"

namespace jaxsok {
namespace {

JAXSOK_CPU_CLONES bool IsFiniteRow(const float* gradient, int32_t dim) {
  uint32_t num_bad = 0;
  for (int32_t c = 0; c < dim; ++c) num_bad += IsFinite(gradient[c]) ? 0 : 1;
  return num_bad == 0;
}

/// Sums the columns of each lane of LaneShape, for one size of its vectors.
template <int kVector>
inline void SumLanes(const float* __restrict squares, int lanes, int32_t dim, float* __restrict sums) {
  for (int32_t start = 0; start < dim; start += lanes * kVector) {
    const int used = std::min(lanes, (dim - start) / kVector);
    for (int l = 0; l < used; ++l) {
      const float* vector = squares + start + l * kVector;
      float sum = sums[l];
      for (int v = 0; v < kVector; ++v) sum = sum + vector[v];
      sums[l] = sum;
    }
  }
}

/// Returns the sum of squares in the order of a LaneShape, divided by dim.
JAXSOK_CPU_CLONES float MeanSquare(const float* __restrict gradient, int32_t dim, LaneShape shape) {
  alignas(64) float squares[kMaxDim];
  for (int32_t c = 0; c < dim; ++c) squares[c] = gradient[c] * gradient[c];
  float sums[32] = {};
  shape.vector == 8   ? SumLanes<8>(squares, shape.lanes, dim, sums)
  : shape.vector == 4 ? SumLanes<4>(squares, shape.lanes, dim, sums)
                      : SumLanes<1>(squares, shape.lanes, dim, sums);
  // Lane 0 of the butterfly: the other lanes hold the same sum, whose order of operands does not change it.
  for (int offset = shape.lanes / 2; offset >= 1; offset /= 2) {
    for (int l = 0; l < offset; ++l) sums[l] = sums[l] + sums[l + offset];
  }
  return sums[0] / static_cast<float>(dim);
}

template <typename Optimizer>
inline void StepColumns(const float* hyper_values, const float* __restrict gradient, float* __restrict row,
                        float* __restrict first, float* __restrict second, int32_t dim) {
  float hyper[kNumHyper];
  std::memcpy(hyper, hyper_values, sizeof(hyper));
  for (int32_t c = 0; c < dim; ++c) {
    float unused_first = 0.0f, unused_second = 0.0f;
    Optimizer::Step(hyper, gradient[c], row[c], Optimizer::kNumStates > 0 ? first[c] : unused_first,
                    Optimizer::kNumStates > 1 ? second[c] : unused_second);
  }
}

JAXSOK_CPU_CLONES void StepSgd(const float* hyper, const float* gradient, float* row, int32_t dim) {
  StepColumns<Sgd>(hyper, gradient, row, nullptr, nullptr, dim);
}

JAXSOK_CPU_CLONES void StepAdagrad(const float* hyper, const float* gradient, float* row, float* sum, int32_t dim) {
  StepColumns<Adagrad>(hyper, gradient, row, sum, nullptr, dim);
}

JAXSOK_CPU_CLONES void StepAdam(const float* hyper, const float* gradient, float* row, float* m, float* v,
                                int32_t dim) {
  StepColumns<Adam>(hyper, gradient, row, m, v, dim);
}

JAXSOK_CPU_CLONES void StepRowwiseAdagrad(const float* hyper, const float* __restrict gradient, float* __restrict row,
                                          float* sum, int32_t dim, LaneShape shape) {
  *sum = *sum + MeanSquare(gradient, dim, shape);
  const float scale = RowwiseAdagrad::Scale(hyper, *sum);
  for (int32_t c = 0; c < dim; ++c) row[c] = row[c] - scale * gradient[c];
}

void StepRow(int32_t optimizer, const float* hyper, const float* gradient, float* row, float* first, float* second,
             int32_t dim, LaneShape shape) {
  switch (optimizer) {
    case kOptimizerSgd:
      return StepSgd(hyper, gradient, row, dim);
    case kOptimizerAdagrad:
      return StepAdagrad(hyper, gradient, row, first, dim);
    case kOptimizerRowwiseAdagrad:
      return StepRowwiseAdagrad(hyper, gradient, row, first, dim, shape);
    default:
      return StepAdam(hyper, gradient, row, first, second, dim);
  }
}

/// Rounds a step's result to 16 bits, with the random bits of the row.
template <typename R>
inline void RoundColumns(R* __restrict out, const float* __restrict row, const RowRounding& rounding, int32_t dim) {
  constexpr int32_t kPerDraw = 4;
  // Draws first: then the loop over the columns uses only 16- and 32-bit numbers.
  alignas(64) uint64_t draws[kMaxDim / kPerDraw];
  for (int32_t q = 0; q < CeilDiv(dim, kPerDraw); ++q) draws[q] = rounding.Draw(static_cast<uint32_t>(q));
  alignas(64) uint16_t random[kMaxDim];
  for (int32_t c = 0; c < dim; ++c) random[c] = static_cast<uint16_t>(draws[c / kPerDraw] >> (c % kPerDraw * 16));
  for (int32_t c = 0; c < dim; ++c) out[c] = RowNumber<R>::Stochastic(row[c], random[c]);
}

JAXSOK_CPU_CLONES void RoundStepped(BFloat16* out, const float* row, const RowRounding& rounding, int32_t dim) {
  RoundColumns(out, row, rounding, dim);
}

JAXSOK_CPU_CLONES void RoundStepped(Float16* out, const float* row, const RowRounding& rounding, int32_t dim) {
  RoundColumns(out, row, rounding, dim);
}

struct StorePositions {
  const uint64_t* keys;
  const uint32_t* row_ids;
  uint32_t capacity;
  const Request* requests;

  bool IsPadding(int64_t i) const { return keys[i] == kPaddingKey; }
  uint32_t Row(int64_t i) const { return row_ids[i] < capacity ? row_ids[i] : kNoRow; }
  int32_t UsesAt(int64_t i) const { return requests == nullptr ? 1 : static_cast<int32_t>(requests[i].uses); }
};

/// Counts the uses in bags of a stale feature whose keys had a row.
int32_t CountStale(const FeatureView& feature, const StorePositions& positions) {
  int32_t num_stale = 0;
  const int64_t end = feature.BagBegin(feature.num_bags);
  for (int64_t i = feature.BagBegin(0); i < end; ++i) {
    if (!positions.IsPadding(i) && positions.Row(i) != kNoRow) num_stale += positions.UsesAt(i);
  }
  return num_stale;
}

/// The inputs of a step other than the row and its gradient.
struct StepView {
  const StoreView& store;
  const StateView& states;
  const UpdateSpec& spec;
  const float* hyper;

  float* StateOf(int k, uint32_t row) const {
    return k < states.num_states ? states.data[k].At(store.starts, row, states.width[k]) : nullptr;
  }

  /// Steps a row by its gradient; calls rounding() for the row's random bits if it needs them.
  template <typename R, typename Rounding>
  void Step(uint32_t row_id, const float* gradient, float num_uses, const Rounding& rounding) const {
    const int32_t dim = store.dim;
    R* row = store.rows.At<R>(store.starts, row_id, dim);
    if (spec.program != nullptr) return RunProgram(row, row_id, gradient, num_uses, rounding);
    if constexpr (std::is_same_v<R, float>) {
      StepRow(spec.optimizer, hyper, gradient, row, StateOf(0, row_id), StateOf(1, row_id), dim, LaneShape::Of(dim));
    } else {
      alignas(64) float stepped[kMaxDim];
      CopyRow(stepped, row, dim);
      StepRow(spec.optimizer, hyper, gradient, stepped, StateOf(0, row_id), StateOf(1, row_id), dim,
              LaneShape::OfRows16(dim));
      PutRow(row, stepped, rounding);
    }
  }

 private:
  template <typename R, typename Rounding>
  void PutRow(R* row, const float* stepped, const Rounding& rounding) const {
    if constexpr (std::is_same_v<R, float>) {
      CopyRow(row, stepped, store.dim);
    } else if (spec.rounding == kRoundingNearest) {
      RoundRow(row, stepped, store.dim);
    } else {
      RoundStepped(row, stepped, rounding(), store.dim);
    }
  }

  template <typename R, typename Rounding>
  void RunProgram(R* row, uint32_t row_id, const float* gradient, float num_uses, const Rounding& rounding) const {
    const int32_t dim = store.dim, stride = RowMachine::StrideOf(dim);
    thread_local std::vector<float> registers;  // scratch: its contents do not outlive the call
    if (registers.size() < static_cast<size_t>(kMaxRegisters) * stride) registers.resize(kMaxRegisters * stride);
    const RowMachine machine{*spec.program, hyper, dim, stride, registers.data(), num_uses};
    CopyRow(machine.Register(0), gradient, dim);
    CopyRow(machine.Register(1), row, dim);
    for (int k = 0; k < states.num_states; ++k) {
      const float* state = StateOf(k, row_id);
      if (states.width[k] == 1) {
        std::fill_n(machine.Register(2 + k), dim, *state);
      } else {
        CopyRow(machine.Register(2 + k), state, dim);
      }
    }
    RunRowProgram(machine, [&](int slot, const float* values, bool is_scalar) {
      alignas(64) float same[kMaxDim];
      if (is_scalar) {
        std::fill_n(same, dim, *values);
        values = same;
      }
      if (slot == 0) {
        PutRow(row, values, rounding);
      } else {
        std::copy_n(values, states.width[slot - 1], StateOf(slot - 1, row_id));
      }
    });
  }
};

}  // namespace

LaunchError LaunchSortUses(Stream, const StoreView&, const UpdateArguments&) { return nullptr; }

LaunchError LaunchStepRows(Stream stream, const StoreView& store, const UpdateArguments& a,
                           const GradientsView& gradients) {
  return LaunchUpdate(stream, store, a, gradients);
}

LaunchError LaunchUpdate(Stream stream, const StoreView& store, const UpdateArguments& a,
                         const GradientsView& gradients) {
  const auto& [states, spec, hyper, step, is_live, batch, row_ids, num_nonfinite, num_stale, workspace, requests] = a;
  const int32_t dim = store.dim;
  if (dim < 1 || dim > kMaxDim) return "rows: dim must be 1 to kMaxDim";
  if (!HasGradientDtype(store.row_dtype, gradients.dtype)) return kWrongGradients;
  if (LaunchError error = CheckStates(spec.optimizer, states, dim)) return error;
  const BagFeatures bags(stream, batch);
  if (LaunchError error = batch.tables == nullptr ? bags.ErrorWithTables(store.num_tables) : bags.error()) return error;
  const StorePositions positions = {batch.keys, row_ids, store.capacity, requests};
  std::fill_n(num_nonfinite, store.num_tables, 0);
  *num_stale = 0;
  std::vector<char> is_used(batch.num_features, 0);
  for (const FeatureView& feature : bags.features()) {
    is_used[feature.number] = is_live[feature.plan];
    if (!is_used[feature.number]) *num_stale += CountStale(feature, positions);
  }

  const StepView view = {store, states, spec, hyper};
  const uint64_t rounding_of_step = RoundingOfStep(store.seed, *step);
  const auto rounding_of = [&](uint32_t position) {
    const uint32_t last_table = static_cast<uint32_t>(store.num_tables) - 1;
    const uint32_t table = batch.tables == nullptr ? bags.At(position).table : batch.tables[position];
    const uint32_t* words = store.tables + int64_t{std::min(table, last_table)} * kNumTableWords;
    return RowRounding::Of(words, rounding_of_step, batch.keys[position]);
  };
  // A cache of rows in host memory has no counters of its own: zeros. Any of its slots may be used.
  const uint32_t allocated = store.counters[kNumAllocated];
  const int64_t num_rows = std::max<int64_t>(1, allocated == 0 ? store.capacity : std::min(allocated, store.capacity));
  const auto run = [&](auto row_number, auto gradient_number) {
    using R = decltype(row_number);
    using G = decltype(gradient_number);
    const auto fetch = [&](uint32_t row) {
      PrefetchRow(store.rows.At<R>(store.starts, row, dim), dim);
      for (int k = 0; k < states.num_states; ++k) PrefetchRow(view.StateOf(k, row), states.width[k]);
    };
    const auto apply = [&](uint32_t row, uint32_t position, float* gradient, int64_t num_uses) {
      if (spec.row_gradient != kRowGradientSum) ScaleRow(gradient, RowGradientScale(spec.row_gradient, num_uses), dim);
      if (IsFiniteRow(gradient, dim)) {
        const float uses = spec.num_uses == nullptr ? static_cast<float>(num_uses) : spec.num_uses[position];
        view.Step<R>(row, gradient, uses, [&] { return rounding_of(position); });
        return;
      }
      const uint32_t table = store.records.At(store.starts, row, 1)->table;
      if (table < static_cast<uint32_t>(store.num_tables)) AddAtomically(&num_nonfinite[table], 1);
    };
    std::vector<const G*> typed(batch.num_features);
    for (int32_t f = 0; f < batch.num_features; ++f) typed[f] = static_cast<const G*>(gradients.data[f]);
    ForEachRowGradient(stream, bags, is_used, typed.data(), batch.num_keys, dim, num_rows, positions, fetch, apply,
                       workspace);
  };
  WithRowDtype(store.row_dtype,
               [&](auto row) { WithRowDtype(gradients.dtype, [&](auto gradient) { run(row, gradient); }); });
  return nullptr;
}

}  // namespace jaxsok

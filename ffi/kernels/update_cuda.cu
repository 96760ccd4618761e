// The way back on a GPU: sums of row gradients (uses_cuda.cuh), and the optimizers that step with them.
#include "update.h"
#include "uses_cuda.cuh"

namespace jaxsok {
namespace {

/// Which row a position used, and whether its plan still holds.
struct PlannedPositions {
  const uint64_t* keys;
  const uint32_t* row_ids;
  const uint32_t* generations;
  const uint32_t* counters;
  uint32_t capacity;
  int32_t* num_stale;

  __device__ bool IsPadding(int64_t position) const { return __ldg(keys + position) == kPaddingKey; }
  __device__ uint32_t Row(int64_t position) const {
    const uint32_t row = __ldg(row_ids + position);
    return row < capacity ? row : kNoRow;
  }
  __device__ bool IsLive(const Feature& f) const { return generations[f.plan] == counters[kGeneration]; }
  __device__ void AddStale(int n) const {
    if (n != 0) atomicAdd(num_stale, n);
  }
};

__global__ void PrepareUpdateKernel(int32_t* num_nonfinite, int num_tables, int32_t* num_stale, uint32_t* num_long,
                                    uint32_t* rows, uint32_t* positions, int64_t num_rows) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t t = i; t < num_tables; t += int64_t{gridDim.x} * blockDim.x) num_nonfinite[t] = 0;
  if (i == 0) *num_stale = 0;
  if (i == 0) *num_long = 0;
  for (int64_t p = i; p < num_rows; p += int64_t{gridDim.x} * blockDim.x) {
    rows[p] = kNoRow;
    positions[p] = 0;
  }
}

/// Steps one row with the sum of its gradients.
template <typename Step>
struct ApplyStep {
  StoreView store;
  Slabs<float> states[kMaxStates];
  const float* hyper;
  int32_t row_gradient;
  int32_t* num_nonfinite;

  template <int kVector, int kPerLane>
  struct Loaded {
    RowPart<kVector, kPerLane> row;
    RowPart<kVector, kPerLane> state0;
    RowPart<kVector, kPerLane> state1;
    float rowwise;
  };

  /// Begins to read what the step will need, before the gradients are summed.
  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t row, int lane, int lanes, Loaded<kVector, kPerLane>& loaded) const {
    loaded.row.LoadPlain(store.rows.At<float>(store.starts, row, store.dim), lane, lanes, store.dim);
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
  }

  /// `mask`: the lanes of the group, which call it together.
  template <int kVector, int kPerLane>
  __device__ void Apply(uint32_t row, uint32_t num_uses, int lane, int lanes, unsigned mask,
                        Loaded<kVector, kPerLane>& loaded, RowPart<kVector, kPerLane>& gradient) const {
    if (row_gradient != kRowGradientSum) gradient.Scale(RowGradientScale(row_gradient, num_uses));
    bool finite = true;
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if ((lane + k * lanes) * kVector >= store.dim) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float g = gradient.part[k].v[i];
        finite = finite && IsFinite(g);
        if constexpr (Step::kRowwise) squares = squares + g * g;
      }
    }
    if (!__all_sync(mask, finite)) {
      if (lane == 0) {
        const uint32_t table = store.records.At(store.starts, row, 1)->table;
        if (table < static_cast<uint32_t>(store.num_tables)) atomicAdd(num_nonfinite + table, 1);
      }
      return;
    }
    float words[kNumHyper];
#pragma unroll
    for (int i = 0; i < kNumHyper; ++i) words[i] = __ldg(hyper + i);
    if constexpr (Step::kRowwise) {
      for (int offset = lanes / 2; offset >= 1; offset /= 2) {
        squares = squares + __shfl_xor_sync(mask, squares, offset);
      }
      const float accumulator = loaded.rowwise + squares / static_cast<float>(store.dim);
      const float scale = Step::Scale(words, accumulator);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          loaded.row.part[k].v[i] = loaded.row.part[k].v[i] - scale * gradient.part[k].v[i];
        }
      }
      if (lane == 0) *states[0].At(store.starts, row, 1) = accumulator;
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        if ((lane + k * lanes) * kVector >= store.dim) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          Step::Step(words, gradient.part[k].v[i], loaded.row.part[k].v[i], loaded.state0.part[k].v[i],
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
    loaded.row.Store(store.rows.At<float>(store.starts, row, store.dim), lane, lanes, store.dim);
  }
};

template <typename Step>
LaunchError LaunchWith(Stream stream, const StoreView& store, const StateView& states, const UpdateSpec& spec,
                       const float* hyper, const FeaturePointers<const float>& gradients, const BatchView& batch,
                       int32_t* num_nonfinite, UsesWorkspace& w, int end_bit) {
  ApplyStep<Step> apply;
  apply.store = store;
  for (int k = 0; k < kMaxStates; ++k) apply.states[k] = states.data[k];
  apply.hyper = hyper;
  apply.row_gradient = spec.row_gradient;
  apply.num_nonfinite = num_nonfinite;
  return LaunchUses(stream, apply, gradients, batch, w, store.dim, end_bit);
}

}  // namespace

LaunchError LaunchUpdate(Stream stream, const StoreView& store, const StateView& states, const UpdateSpec& spec,
                         const float* hyper, const uint32_t*, const uint32_t* generations, const BatchView& batch,
                         const uint32_t* row_ids, const GradientsView& gradients, int32_t* num_nonfinite,
                         int32_t* num_stale, void* workspace) {
  FeaturePointers<const float> pointers;
  JAXSOK_RETURN_IF_LAUNCH(
      FillPointers<const float>(reinterpret_cast<const float* const*>(gradients.data), batch.num_features, pointers));
  const int end_bit = BitsBelow(store.capacity);
  UsesWorkspace w;
  JAXSOK_RETURN_IF_LAUNCH(CutUses(workspace, batch.num_keys, store.dim, end_bit, &w));
  // Only ragged features have positions that lie in no bag, which nobody lists.
  const int64_t num_rows = batch.num_offsets > 0 ? batch.num_keys : 0;
  const int64_t threads = num_rows > store.num_tables ? num_rows : store.num_tables;
  const int blocks = static_cast<int>(threads > (int64_t{1} << 18) ? 1024 : CeilDiv<int64_t>(threads + 1, kBlock));
  PrepareUpdateKernel<<<blocks, kBlock, 0, stream>>>(num_nonfinite, store.num_tables, num_stale, w.num_long, w.rows,
                                                     w.positions, num_rows);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (batch.num_keys == 0 || batch.num_tiles == 0) return nullptr;
  const PlannedPositions positions{batch.keys, row_ids, generations, store.counters, store.capacity, num_stale};
  ListUsesKernel<<<batch.num_tiles, kBlock, 0, stream>>>(batch, positions, w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  switch (spec.optimizer) {
    case kOptimizerSgd:
      return LaunchWith<Sgd>(stream, store, states, spec, hyper, pointers, batch, num_nonfinite, w, end_bit);
    case kOptimizerAdagrad:
      return LaunchWith<Adagrad>(stream, store, states, spec, hyper, pointers, batch, num_nonfinite, w, end_bit);
    case kOptimizerRowwiseAdagrad:
      return LaunchWith<RowwiseAdagrad>(stream, store, states, spec, hyper, pointers, batch, num_nonfinite, w, end_bit);
    case kOptimizerAdam:
      return LaunchWith<Adam>(stream, store, states, spec, hyper, pointers, batch, num_nonfinite, w, end_bit);
    default:
      return "unknown optimizer";
  }
}

}  // namespace jaxsok

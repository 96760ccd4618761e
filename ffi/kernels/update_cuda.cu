// The update on a GPU: uses are sorted (uses_cuda.cuh) and summed (uses_sum_cuda.cuh), and rows step (update_cuda.cuh).
#include <algorithm>

#include "update_cuda.h"

namespace jaxsok {
namespace {

/// The row that each position used, and whether its plan is live.
struct PlannedPositions {
  const uint64_t* keys;
  const uint32_t* row_ids;
  const bool* is_live;
  uint32_t capacity;
  const Request* requests;
  int32_t* num_stale;

  __device__ bool IsPadding(int64_t position) const { return __ldg(keys + position) == kPaddingKey; }
  __device__ uint32_t Row(int64_t position) const {
    const uint32_t row = __ldg(row_ids + position);
    return row < capacity ? row : kNoRow;
  }
  __device__ bool IsLive(const Feature& f) const { return is_live[f.plan]; }
  __device__ int UsesAt(int64_t position) const {
    return requests == nullptr ? 1 : static_cast<int>(requests[position].uses);
  }
  __device__ void AddStale(int n) const {
    if (n != 0) atomicAdd(num_stale, n);
  }
};

__global__ void PrepareUpdateKernel(int32_t* num_nonfinite, int num_tables, int32_t* num_stale, LongCounts* num_long,
                                    uint32_t* rows, int64_t num_rows) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t t = i; t < num_tables; t += int64_t{gridDim.x} * blockDim.x) num_nonfinite[t] = 0;
  if (i == 0) *num_stale = 0;
  if (i == 0) *num_long = {};
  for (int64_t p = i; p < num_rows; p += int64_t{gridDim.x} * blockDim.x) rows[p] = kNoRow;
}

template <typename Row>
LaunchError Step(Stream stream, const StoreView& store, const UpdateArguments& a, const GradientPointers& gradients,
                 UsesWorkspace& w) {
  switch (a.spec.optimizer) {
    case kOptimizerSgd:
      return StepOf<Row, Sgd>::Launch(stream, store, a, gradients, w);
    case kOptimizerAdagrad:
      return StepOf<Row, Adagrad>::Launch(stream, store, a, gradients, w);
    case kOptimizerRowwiseAdagrad:
      return StepOf<Row, RowwiseAdagrad>::Launch(stream, store, a, gradients, w);
    case kOptimizerAdam:
      return StepOf<Row, Adam>::Launch(stream, store, a, gradients, w);
    case kOptimizerProgram:
      return ProgramOf<Row>::Launch(stream, store, a, gradients, w);
    default:
      return "unknown optimizer";
  }
}

}  // namespace

LaunchError LaunchSortUses(Stream stream, const StoreView& store, const UpdateArguments& a) {
  const BatchView& batch = a.batch;
  const int end_bit = BitsBelow(store.capacity);
  UsesWorkspace w;
  JAXSOK_RETURN_IF_LAUNCH(CutUses(a.workspace, batch.num_keys, store.dim, end_bit, &w));
  // Only ragged features have positions outside all bags, which no block lists.
  const int64_t num_rows = batch.num_offsets > 0 ? batch.num_keys : 0;
  const unsigned blocks = BlocksFor(std::max<int64_t>({num_rows, store.num_tables, 1}), kMostPrepareBlocks);
  PrepareUpdateKernel<<<blocks, kBlock, 0, stream>>>(a.num_nonfinite, store.num_tables, a.num_stale, w.num_long, w.rows,
                                                     num_rows);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (batch.num_keys == 0 || batch.num_tiles == 0) return nullptr;
  const PlannedPositions positions{batch.keys, a.row_ids, a.is_live, store.capacity, a.requests, a.num_stale};
  ListUsesKernel<<<batch.num_tiles, kBlock, 0, stream>>>(batch, positions, w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return SortPairs(stream, w.Pairs(batch.num_keys), end_bit, w.sort_storage, &w.sort_bytes);
}

LaunchError LaunchStepRows(Stream stream, const StoreView& store, const UpdateArguments& a,
                           const GradientsView& gradients) {
  if (!HasGradientDtype(store.row_dtype, gradients.dtype)) return kWrongGradients;
  JAXSOK_RETURN_IF_LAUNCH(CheckStates(a.spec.optimizer, a.states, store.dim));
  if (a.batch.num_keys == 0 || a.batch.num_tiles == 0) return nullptr;
  GradientPointers pointers{{}, gradients.dtype};
  JAXSOK_RETURN_IF_LAUNCH(FillPointers(gradients.data, a.batch.num_features, pointers.of_feature));
  UsesWorkspace w;
  JAXSOK_RETURN_IF_LAUNCH(CutUses(a.workspace, a.batch.num_keys, store.dim, BitsBelow(store.capacity), &w));
  return WithRowDtype(store.row_dtype,
                      [&](auto number) { return Step<decltype(number)>(stream, store, a, pointers, w); });
}

LaunchError LaunchUpdate(Stream stream, const StoreView& store, const UpdateArguments& a,
                         const GradientsView& gradients) {
  JAXSOK_RETURN_IF_LAUNCH(LaunchSortUses(stream, store, a));
  return LaunchStepRows(stream, store, a, gradients);
}

}  // namespace jaxsok

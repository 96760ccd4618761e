// Distinct keys on a GPU: the passes of index_cuda.cuh over a scratch index in the workspace.
#include "index_cuda.cuh"
#include "plan.h"

namespace jaxsok {
namespace {

/// New pairs become the next distinct ones.
struct PlanSink {
  IndexView index;
  PlanView plan;
  uint32_t num_keys;

  // The scratch index is half empty whatever the keys, and nobody can aim at one that lives for a call: a walk may
  // go all the way round.
  __device__ uint32_t MaxProbes() const { return index.num_buckets; }
  __device__ uint64_t Salt() const { return 0; }
  __device__ const IndexView& Index() const { return index; }
  __device__ uint32_t Available() const { return num_keys; }
  __device__ uint32_t RowOf(uint32_t ordinal) const { return ordinal; }
  __device__ void WriteRecord(uint32_t ordinal, uint64_t key, uint32_t table) const {
    plan.unique[ordinal] = key;
    plan.unique_tables[ordinal] = table;
  }
  __device__ uint64_t KeyOf(uint32_t ordinal) const { return plan.unique[ordinal]; }
  __device__ uint32_t TableOf(uint32_t ordinal) const { return plan.unique_tables[ordinal]; }
  __device__ void WriteRow(uint32_t, uint64_t, uint32_t, int, int) const {}
  __device__ void CountNew(uint32_t, int) const {}
  __device__ void Commit(uint32_t num_new) const { *plan.num_unique = static_cast<int32_t>(num_new); }
  __device__ void SawUnplaced() const {}
  __device__ void SawProbes(int) const {}
  __device__ void SawEntry(uint64_t, uint32_t, uint32_t) const {}
  __device__ int NumTables() const { return kSharedTables + 1; }
};

// Empties the scratch index and gives every output the value it has beyond the distinct keys.
__global__ void __launch_bounds__(kBlock) PlanPrepareKernel(PlanSink sink, InsertControl* control) {
  const int64_t start = int64_t{blockIdx.x} * kBlock + threadIdx.x, stride = int64_t{gridDim.x} * kBlock;
  uint4* words = reinterpret_cast<uint4*>(sink.index.buckets);
  for (int64_t i = start; i < int64_t{sink.index.num_buckets} * kEntriesPerBucket; i += stride) {
    words[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int64_t i = start; i < sink.num_keys; i += stride) {
    sink.plan.unique[i] = kPaddingKey;
    sink.plan.unique_tables[i] = 0;
    sink.plan.multiplicity[i] = 0;
  }
  if (start < static_cast<int64_t>(sizeof(InsertControl) / 4)) reinterpret_cast<uint32_t*>(control)[start] = 0;
  if (start == 0) *sink.plan.num_unique = 0;
}

// One thread, one position. `inverse` holds kPendingRow until it is known. What lies in no bag is padding.
__global__ void __launch_bounds__(kBlock) PlanClaimKernel(PlanSink sink, InsertWorkspace w, BatchView batch) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  bool pending = false;
  if (i < sink.num_keys) {
    const uint64_t key = __ldg(batch.keys + i);
    const Feature f = Feature::Load(
        batch.features, FeatureAt(batch.features, batch.num_features, kFeatureKeyStart, static_cast<int32_t>(i)));
    int32_t first, last;
    f.Bags(batch.offsets, &first, &last);
    const int32_t at_feature = static_cast<int32_t>(i) - f.key_start;
    if (key == kPaddingKey || at_feature < first || at_feature >= last) {
      sink.plan.inverse[i] = static_cast<int32_t>(kNoRow);
    } else {
      const ProbeResult at = Claim(sink.index, key, static_cast<uint32_t>(f.table), sink.Salt(), sink.MaxProbes(),
                                   static_cast<uint32_t>(i));
      sink.plan.inverse[i] = static_cast<int32_t>(kPendingRow);
      w.entry_of[i] = at.entry;
      pending = true;
    }
  }
  const int num_pending = __syncthreads_count(pending);
  if (threadIdx.x == 0 && num_pending != 0) atomicAdd(&w.control->num_pending, static_cast<uint32_t>(num_pending));
}

// One thread, one position. Lanes of a warp with one key add to its multiplicity together.
__global__ void __launch_bounds__(kBlock) PlanResolveKernel(PlanSink sink, InsertWorkspace w) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  uint32_t at = kNoRow;
  if (i < sink.num_keys) {
    at = static_cast<uint32_t>(sink.plan.inverse[i]);
    if (at == kPendingRow) at = static_cast<uint32_t>(LoadHalf(sink.index.EntryAt(w.entry_of[i])));
    sink.plan.inverse[i] = static_cast<int32_t>(at == kNoRow ? sink.num_keys : at);
  }
  const unsigned same = __match_any_sync(~0u, at);
  if (at != kNoRow && __ffs(same) - 1 == static_cast<int>(threadIdx.x % kWarp)) {
    atomicAdd(sink.plan.multiplicity + at, __popc(same));
  }
}

}  // namespace

LaunchError LaunchPlan(Stream stream, const BatchView& batch, const PlanView& plan, void* workspace) {
  WorkspaceCutter rest(nullptr);
  const InsertWorkspace w = InsertWorkspace::Cut(workspace, batch.num_keys, &rest);
  PlanSink sink;
  sink.plan = plan;
  sink.num_keys = static_cast<uint32_t>(batch.num_keys);
  sink.index.num_buckets = static_cast<uint32_t>(CeilDiv<int64_t>(batch.num_keys, 2) + 16);
  sink.index.buckets = rest.Take<Bucket>(sink.index.num_buckets);
  if (rest.used() > PlanWorkspaceBytes(batch.num_keys)) return "workspace is smaller than its bound";
  const unsigned blocks = static_cast<unsigned>(CeilDiv<int64_t>(batch.num_keys > 0 ? batch.num_keys : 1, kBlock));
  PlanPrepareKernel<<<blocks, kBlock, 0, stream>>>(sink, w.control);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (batch.num_keys == 0) return nullptr;
  const TableOfPosition table_of{nullptr, batch.features, batch.num_features};
  PlanClaimKernel<<<blocks, kBlock, 0, stream>>>(sink, w, batch);
  uint32_t* row_ids = reinterpret_cast<uint32_t*>(plan.inverse);
  JAXSOK_RETURN_IF_LAUNCH(LaunchInsertPasses(stream, sink, w, batch.keys, table_of, row_ids, batch.num_keys, 1));
  PlanResolveKernel<<<blocks, kBlock, 0, stream>>>(sink, w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return nullptr;
}

}  // namespace jaxsok

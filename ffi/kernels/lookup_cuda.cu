// The lookup on a GPU: the passes in their order. The kernels by dtype are in lookup_cuda.cuh.
#include <algorithm>

#include "admission_cuda.cuh"
#include "lookup_cuda.h"

namespace jaxsok {

namespace {

// Zeroes the counters of the passes: one launch in place of several memsets.
__global__ void PrepareKernel(int32_t* counts, int num_counts, uint64_t* digest, InsertControl* control,
                              uint32_t* row_ids, int64_t num_row_ids) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t c = i; c < num_counts; c += int64_t{gridDim.x} * blockDim.x) counts[c] = 0;
  if (digest != nullptr && i == 0) *digest = 0;
  if (control != nullptr && i < static_cast<int64_t>(sizeof(InsertControl) / 4)) {
    reinterpret_cast<uint32_t*>(control)[i] = 0;
  }
  for (int64_t p = i; p < num_row_ids; p += int64_t{gridDim.x} * blockDim.x) row_ids[p] = kNoRow;
}

LaunchError Prepare(Stream stream, int32_t* counts, int num_tables, uint64_t* digest, InsertControl* control,
                    uint32_t* row_ids, int64_t num_row_ids) {
  const int num_counts = num_tables * kNumCounts;
  const unsigned blocks = BlocksFor(std::max<int64_t>({num_row_ids, num_counts, 1}), kMostPrepareBlocks);
  PrepareKernel<<<blocks, kBlock, 0, stream>>>(counts, num_counts, digest, control, row_ids, num_row_ids);
  return LastLaunchError();
}

template <int kMode>
LaunchError Main(Stream stream, const LookupArguments& a, const EmbeddingPointers& embeddings) {
  return WithRowDtype(a.store.row_dtype,
                      [&](auto number) { return LookupOf<decltype(number), kMode>::Main(stream, a, embeddings); });
}

}  // namespace

LaunchError LaunchLookup(Stream stream, const StoreView& store, const BatchView& batch,
                         const EmbeddingsView& embeddings, uint32_t* row_ids, int32_t* counts, uint64_t* digest,
                         void* workspace, const AdmissionView* admission, const StatisticsView* statistics,
                         const uint32_t* clock) {
  EmbeddingPointers pointers;
  JAXSOK_RETURN_IF_LAUNCH(pointers.Fill(embeddings, batch.num_features, store.row_dtype));
  LookupArguments a{store, batch, nullptr, row_ids, counts, InsertWorkspace::Cut(workspace, batch.num_keys)};
  a.digest = digest;
  if (statistics != nullptr) a.notes = {statistics->data, clock};
  const auto main = [&] {
    return statistics != nullptr ? Main<kModeTrack>(stream, a, pointers) : Main<kModeInsert>(stream, a, pointers);
  };
  // Only ragged features have positions outside all bags.
  JAXSOK_RETURN_IF_LAUNCH(Prepare(stream, counts, store.num_tables, digest, a.insert.control, row_ids,
                                  batch.num_offsets > 0 ? batch.num_keys : 0));
  if (batch.num_tiles == 0 || batch.num_keys == 0) {
    // Without keys, bags are empty.
    return batch.num_tiles == 0 ? nullptr : main();
  }
  JAXSOK_RETURN_IF_LAUNCH(main());
  const StoreSink sink{store, counts, a.notes};
  const TableOfPosition table_of{nullptr, batch.features, batch.num_features, batch.num_keys};
  if (admission != nullptr) {
    JAXSOK_RETURN_IF_LAUNCH(
        LaunchAdmission(stream, sink, *admission, a.insert, batch.keys, table_of, row_ids, batch.num_keys));
    a.store.tables = admission->refused;  // from here on used only for keys without a row
  }
  JAXSOK_RETURN_IF_LAUNCH(LaunchClaimPending(stream, sink, a.insert, batch.keys, table_of, row_ids, batch.num_keys));
  JAXSOK_RETURN_IF_LAUNCH(LaunchInsertPasses(stream, sink, a.insert, batch.keys, table_of, row_ids, batch.num_keys));
  return WithRowDtype(store.row_dtype,
                      [&](auto number) { return FinishOf<decltype(number)>::Finish(stream, a, pointers); });
}

LaunchError LaunchLookupFind(Stream stream, const StoreView& store, const BatchView& batch,
                             const EmbeddingsView& embeddings, int32_t* counts) {
  EmbeddingPointers pointers;
  JAXSOK_RETURN_IF_LAUNCH(pointers.Fill(embeddings, batch.num_features, store.row_dtype));
  LookupArguments a{store, batch, nullptr, nullptr, counts, {}};
  JAXSOK_RETURN_IF_LAUNCH(Prepare(stream, counts, store.num_tables, nullptr, nullptr, nullptr, 0));
  if (batch.num_tiles == 0) return nullptr;
  return Main<kModeFind>(stream, a, pointers);
}

LaunchError LaunchLookupPlanned(Stream stream, const StoreView& store, const BatchView& batch, const uint32_t* row_ids,
                                const EmbeddingsView& embeddings, int32_t* counts) {
  EmbeddingPointers pointers;
  const bool has_bags_alone = (batch.kinds & kSingleKeys) == 0;
  JAXSOK_RETURN_IF_LAUNCH(pointers.Fill(embeddings, batch.num_features, store.row_dtype, has_bags_alone));
  LookupArguments a{store, batch, row_ids, nullptr, counts, {}};
  JAXSOK_RETURN_IF_LAUNCH(Prepare(stream, counts, store.num_tables, nullptr, nullptr, nullptr, 0));
  if (batch.num_tiles == 0) return nullptr;
  return Main<kModePlanned>(stream, a, pointers);
}

}  // namespace jaxsok

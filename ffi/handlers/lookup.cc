// Handlers of the lookup noun: keys -> embeddings, inserting, reading only, or with row ids already known.
#include "buffers.h"

namespace jaxsok {
namespace {

BatchView ReadLookedUp(Call& call) {
  BatchView batch = ReadBatch(call);
  batch.kinds = call.Attribute<int32_t>("kinds");
  return batch;
}

int32_t* CountsOf(Call& call, const Store& store) {
  return call.Result("counts", ffi::S32, {store.view.num_tables, kNumCounts}).as<int32_t>();
}

/// Looks up a batch; unseen keys get rows.
ffi::Error Lookup(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  const BatchView batch = ReadLookedUp(call);
  const AdmissionView* admission = ReadAdmission(call, batch.num_keys, store);
  const bool keeps_statistics = store.statistics.starts.num_slabs != 0;
  const Array clock = keeps_statistics ? call.Operand("clock", ffi::U32, {}) : Array();
  const Array row_ids = call.Result("row_ids", ffi::U32, {batch.num_keys});
  const Array digest = call.Result("digest", ffi::U32, {1, 2});
  void* workspace = call.Workspace(InsertWorkspaceBytes(batch.num_keys));
  int32_t* counts = CountsOf(call, store);
  RowArrays arrays(call, "embeddings");
  const EmbeddingsView embeddings = ReadEmbeddings(call, batch.num_features, arrays);
  return call.Launch([&](Stream stream) {
    return LaunchLookup(stream, store.view, batch, embeddings, row_ids.as<uint32_t>(), counts, digest.as<uint64_t>(),
                        workspace, admission, keeps_statistics ? &store.statistics : nullptr, clock.as<uint32_t>());
  });
}

/// Looks up a batch and changes nothing.
ffi::Error LookupFind(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  const BatchView batch = ReadLookedUp(call);
  int32_t* counts = CountsOf(call, store);
  RowArrays arrays(call, "embeddings");
  const EmbeddingsView embeddings = ReadEmbeddings(call, batch.num_features, arrays);
  return call.Launch([&](Stream stream) { return LaunchLookupFind(stream, store.view, batch, embeddings, counts); });
}

/// Combines rows whose ids a plan has found.
///
/// The counters pass through untouched: whoever takes them from here and writes rows comes after this read.
ffi::Error LookupPlanned(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  const BatchView batch = ReadLookedUp(call);
  const Array row_ids = call.Operand("row_ids", ffi::U32, {batch.num_keys});
  int32_t* counts = CountsOf(call, store);
  RowArrays arrays(call, "embeddings");
  const EmbeddingsView embeddings = ReadEmbeddings(call, batch.num_features, arrays);
  return call.Launch([&](Stream stream) {
    return LaunchLookupPlanned(stream, store.view, batch, row_ids.as<uint32_t>(), embeddings, counts);
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokLookup, "lookup", Lookup);
JAXSOK_DEFINE_HANDLER(JaxsokLookupFind, "lookup_find", LookupFind);
JAXSOK_DEFINE_HANDLER(JaxsokLookupPlanned, "lookup_planned", LookupPlanned);

}  // namespace jaxsok

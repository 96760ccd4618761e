// Handlers of the lookup noun: keys -> embeddings, inserting, reading only, or with row ids already known.
#include <vector>

#include "../kernels/combine.h"
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
/// The counters pass through unchanged: an op that takes them from here and writes rows runs after this read.
ffi::Error LookupPlanned(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  BatchView batch = ReadLookedUp(call);
  const Array row_ids = call.Operand("row_ids", ffi::U32, {batch.num_keys});
  ReadTableIds(call, batch);
  int32_t* counts = CountsOf(call, store);
  RowArrays arrays(call, "embeddings");
  const EmbeddingsView embeddings = ReadEmbeddings(call, batch.num_features, arrays);
  return call.Launch([&](Stream stream) {
    return LaunchLookupPlanned(stream, store.view, batch, row_ids.as<uint32_t>(), embeddings, counts);
  });
}

/// Returns a store whose rows are those of a window.
StoreView Received(const StoreView& store, void* lines, int64_t num_lines, RowDtype dtype) {
  StoreView received = store;
  received.rows.data[0] = lines;
  received.starts = {};
  received.starts.num_slabs = 1;
  received.capacity = static_cast<uint32_t>(num_lines);
  received.row_dtype = dtype;
  return received;
}

/// Sends the rows of received requests to the shards that asked for them, and combines the received rows of a batch.
///
/// Rows go from the store straight into the windows of the askers, and are combined where they arrive. Meanwhile the
/// uses of the batch are sorted for UpdateWindow, if the result for them is not empty. Counters pass through as in
/// LookupPlanned.
ffi::Error LookupWindow(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  const Array requests = call.Operand("requests", ffi::U32, {-1, 4});
  const int64_t num_lines = requests.size(0);
  const Array row_ids = call.Operand("row_ids", ffi::U32, {num_lines});
  const auto is_find = call.Attribute<int32_t>("is_find");
  const BatchView batch = ReadLookedUp(call);
  const Array slots = call.Operand("slots", ffi::U32, {batch.num_keys});
  ReadMeeting(call);
  const RowDtype dtype = call.Attribute<int32_t>("is_bfloat16") != 0  ? kRowDtypeBfloat16
                         : call.Attribute<int32_t>("is_float32") != 0 ? kRowDtypeFloat32
                                                                      : store.view.row_dtype;
  const Array num_absent = call.Result("num_absent", ffi::S32, {store.view.num_tables});
  const Array sorted_uses = call.Result("sorted_uses", ffi::U8, {-1});
  const bool sorts = sorted_uses.size(0) != 0;
  if (sorts) call.CheckShape("sorted_uses", sorted_uses.dims(), {SortedUsesBytes(batch.num_keys)});
  void* workspace = call.Workspace(sorts ? UpdateWorkspaceBytes(batch.num_keys, 0) : 0);
  int32_t* counts = CountsOf(call, store);
  RowArrays arrays(call, "embeddings");
  const EmbeddingsView embeddings = ReadEmbeddings(call, batch.num_features, arrays);
  return call.Launch([&](Stream stream) -> LaunchError {
    const int64_t line_bytes = int64_t{store.view.dim} * NumberBytes(dtype);
    Stream second;
    WindowExchange exchange(stream, window, call.device(), kCallLookup, num_lines * line_bytes,
                            sorts ? &second : nullptr);
    if (exchange.error() != nullptr) return exchange.error();
    LaunchError error = nullptr;
    if (sorts) {
      error = LaunchSortByRow(second, num_lines, slots.as<int32_t>(), batch, sorted_uses.as<void>(), workspace);
    }
    if (error != nullptr) return error;
    const LineTarget target = exchange.Target(num_lines / exchange.num_shards(), line_bytes);
    error = LaunchGather(stream, store.view, requests.as<Request>(), row_ids.as<uint32_t>(), num_lines, is_find != 0,
                         target, dtype, num_absent.as<int32_t>());
    if (error == nullptr) error = exchange.Meet(stream);
    if (error != nullptr) return error;
    const StoreView received = Received(store.view, exchange.received(), num_lines, dtype);
    return exchange.Done(LaunchLookupPlanned(stream, received, batch, slots.as<uint32_t>(), embeddings, counts));
  });
}

/// Sums the rows of this shard in the bags of all shards, sends the sums to those shards, and adds the sums received
/// for each bag.
///
/// Sums go straight into the windows of the shards, and are added where they arrive. Counters pass through as in
/// LookupPlanned. The owner's batch has a feature for each shard.
ffi::Error LookupBagsWindow(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  BatchView owned = ReadBatch(call, call.Attribute<int32_t>("num_owned_tiles"));
  owned.kinds = kBags;
  const Array row_ids = call.Operand("row_ids", ffi::U32, {owned.num_keys});
  ReadTableIds(call, owned);
  const BatchView batch = ReadLookedUp(call);
  const int64_t num_lines = batch.num_keys;
  const Array slots = call.Operand("slots", ffi::U32, {num_lines});
  ReadMeeting(call);
  int32_t* counts = CountsOf(call, store);
  RowArrays arrays(call, "embeddings");
  const EmbeddingsView embeddings = ReadEmbeddings(call, batch.num_features, arrays);
  const RowDtype dtype = ReadWireDtype(call);
  return call.Launch([&](Stream stream) -> LaunchError {
    const int64_t line_bytes = int64_t{store.view.dim} * NumberBytes(dtype);
    WindowExchange exchange(stream, window, call.device(), kCallLookupBags, num_lines * line_bytes);
    if (exchange.error() != nullptr) return exchange.error();
    if (owned.num_features != exchange.num_shards()) return "features: wanted one for each shard";
    const LineTarget target = exchange.Target(num_lines / exchange.num_shards(), line_bytes);
    const std::vector<void*> sums(target.parts, target.parts + exchange.num_shards());
    owned.first_tile = owned.num_tiles / exchange.num_shards() * exchange.shard();
    LaunchError error =
        LaunchLookupPlanned(stream, store.view, owned, row_ids.as<uint32_t>(), {dtype, sums.data()}, counts);
    if (error == nullptr) error = exchange.Meet(stream);
    if (error != nullptr) return error;
    const StoreView received = Received(store.view, exchange.received(), num_lines, dtype);
    return exchange.Done(LaunchLookupPlanned(stream, received, batch, slots.as<uint32_t>(), embeddings, counts));
  });
}

}  // namespace

JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokLookupBagsWindow, "lookup_bags_window", LookupBagsWindow);
JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokLookupWindow, "lookup_window", LookupWindow);
JAXSOK_DEFINE_HANDLER(JaxsokLookup, "lookup", Lookup);
JAXSOK_DEFINE_HANDLER(JaxsokLookupFind, "lookup_find", LookupFind);
JAXSOK_DEFINE_HANDLER(JaxsokLookupPlanned, "lookup_planned", LookupPlanned);

}  // namespace jaxsok

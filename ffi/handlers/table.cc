// Handlers of the table noun: find, find_or_insert, gather, scatter, touch, rebuild, forget, wait.
#include "buffers.h"

namespace jaxsok {
namespace {

/// Finds the row ids of (table, key) pairs; reads only.
ffi::Error Find(Call& call) {
  const Store store = ReadStore(call);
  const Array keys = ReadKeys(call);
  const int64_t n = keys.size(0);
  const Array table_ids = call.Operand("table_ids", ffi::U32, {n});
  const Array row_ids = call.Result("row_ids", ffi::U32, {n});
  return call.Launch([&](Stream stream) {
    return LaunchFind(stream, store.view.index, store.view.counters, keys.as<uint64_t>(), table_ids.as<uint32_t>(), n,
                      row_ids.as<uint32_t>());
  });
}

/// Finds the row ids of (table, key) pairs; unseen pairs get rows.
ffi::Error FindOrInsert(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  const Array keys = ReadKeys(call);
  const int64_t n = keys.size(0);
  const Array table_ids = call.Operand("table_ids", ffi::U32, {n});
  const AdmissionView* admission = ReadAdmission(call, n, store);
  const Array row_ids = call.Result("row_ids", ffi::U32, {n});
  const Array counts = call.Result("counts", ffi::S32, {store.view.num_tables, kNumCounts});
  void* workspace = call.Workspace(InsertWorkspaceBytes(n));
  return call.Launch([&](Stream stream) {
    return LaunchFindOrInsert(stream, store.view, keys.as<uint64_t>(), table_ids.as<uint32_t>(), n,
                              row_ids.as<uint32_t>(), counts.as<int32_t>(), workspace, admission);
  });
}

/// Gathers the rows of requests whose row ids are known.
///
/// The counters pass through unchanged: an op that takes them from here and writes rows runs after this read.
ffi::Error Gather(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  const Array requests = call.Operand("requests", ffi::U32, {-1, 4});
  const int64_t n = requests.size(0);
  const Array row_ids = call.Operand("row_ids", ffi::U32, {n});
  const auto is_find = call.Attribute<int32_t>("is_find");
  const Array rows = call.Result("rows");
  call.CheckShape("rows", rows.dims(), {n, store.view.dim});
  const RowDtype dtype = ReadGathered(call, rows.dtype(), store.view);
  const Array num_absent = call.Result("num_absent", ffi::S32, {store.view.num_tables});
  return call.Launch([&](Stream stream) {
    return LaunchGather(stream, store.view, requests.as<Request>(), row_ids.as<uint32_t>(), n, is_find != 0,
                        LineTarget::Of(rows.as<void>()), dtype, num_absent.as<int32_t>());
  });
}

/// Writes rows of a per-row array, by row id.
ffi::Error Scatter(Call& call) {
  const Array row_ids = call.Operand("row_ids", ffi::U32, {-1});
  const Array lines = call.Operand("lines");
  LinesView array{};
  SlabReader slabs(call, static_cast<int64_t>(call.num_operands_left()));
  const int64_t width = slabs.Read(
      "slabs", [&] { return call.InPlace("slabs", lines.dtype(), {-1, -1}); },
      [&](int s, const Array& slab) { array.data.data[s] = slab.as<uint8_t>(); });
  call.CheckShape("lines", lines.dims(), {row_ids.size(0), width});
  array.line_bytes = width * static_cast<int64_t>(ffi::ByteWidth(lines.dtype()));
  array.starts = slabs.starts();
  array.capacity = slabs.capacity();
  return call.Launch([&](Stream stream) {
    return LaunchScatter(stream, array, row_ids.as<uint32_t>(), row_ids.size(0), lines.as<void>());
  });
}

/// Records in the statistics of rows that a lookup used them.
ffi::Error Touch(Call& call) {
  const Store store = ReadStore(call);
  const Array row_ids = call.Operand("row_ids", ffi::U32, {-1});
  const int64_t n = row_ids.size(0);
  const Array uses = call.Operand("uses", ffi::U32, {-1});
  const bool has_uses = uses.size(0) != 0;
  if (has_uses) call.CheckShape("uses", uses.dims(), {n});
  const Array clock = call.Operand("clock", ffi::U32, {});
  return call.Launch([&](Stream stream) {
    return LaunchTouch(stream, store.statistics, row_ids.as<uint32_t>(), has_uses ? uses.as<uint32_t>() : nullptr, n,
                       clock.as<uint32_t>());
  });
}

/// Builds an index, possibly of another size, from the records.
ffi::Error Rebuild(Call& call) {
  Store store = ReadStore(call);
  const Array index = call.Result("index", ffi::U32, {-1, kEntriesPerBucket * 4});
  CheckIndex(call, "index", index);
  store.view.index = IndexOf(index);
  return call.Launch([&](Stream stream) { return LaunchRebuild(stream, store.view); });
}

/// Resets the counts of keys without a row whose counts have reached the floor of their table.
ffi::Error Forget(Call& call) {
  const Store store = ReadStore(call);
  const Array floors = call.Operand("floors", ffi::U32, {-1});
  return call.Launch([&](Stream stream) {
    return LaunchForget(stream, store.admission.sightings, floors.as<uint32_t>(), static_cast<int32_t>(floors.size(0)));
  });
}

/// Builds sightings, of any size, from entries of keys without a row.
ffi::Error Wait(Call& call) {
  const Store store = ReadStore(call);
  const Array floors = call.Operand("floors", ffi::U32, {-1});
  const Array entries = call.Operand("entries", ffi::U32, {-1, 4});
  const Array sightings = call.Result("sightings", ffi::U32, {-1, kEntriesPerBucket * 4});
  CheckIndex(call, "sightings", sightings);
  return call.Launch([&](Stream stream) {
    return LaunchWait(stream, IndexOf(sightings), store.view.counters, floors.as<uint32_t>(),
                      static_cast<int32_t>(floors.size(0)), entries.as<Entry>(), entries.size(0));
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokTableFind, "table_find", Find);
JAXSOK_DEFINE_HANDLER(JaxsokTableFindOrInsert, "table_find_or_insert", FindOrInsert);
JAXSOK_DEFINE_HANDLER(JaxsokTableGather, "table_gather", Gather);
JAXSOK_DEFINE_HANDLER(JaxsokTableScatter, "table_scatter", Scatter);
JAXSOK_DEFINE_HANDLER(JaxsokTableTouch, "table_touch", Touch);
JAXSOK_DEFINE_HANDLER(JaxsokTableRebuild, "table_rebuild", Rebuild);
JAXSOK_DEFINE_HANDLER(JaxsokTableForget, "table_forget", Forget);
JAXSOK_DEFINE_HANDLER(JaxsokTableWait, "table_wait", Wait);

}  // namespace jaxsok

JAXSOK_VISIBLE int64_t JaxsokInsertWorkspaceBytes(int64_t num_keys) { return jaxsok::InsertWorkspaceBytes(num_keys); }

// Handlers of the table noun: find, find_or_insert, gather, scatter, touch, erase, rebuild, forget, wait.
#include "buffers.h"

namespace jaxsok {
namespace {

/// Row ids of (table, key) pairs; reads only.
ffi::Error TableFindImpl(StreamArgument stream, Index index, Counters counters, Keys keys, TableIds table_ids,
                         ffi::Result<RowIds> row_ids) {
  constexpr char kOp[] = "table_find";
  JAXSOK_RETURN_IF_ERROR(CheckShape(keys.dimensions(), {-1, 2}, "keys", kOp));
  const int64_t n = keys.dimensions()[0];
  JAXSOK_RETURN_IF_ERROR(CheckIndex(index, "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counters.dimensions(), {kNumCounters}, "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(table_ids.dimensions(), {n}, "table_ids", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids->dimensions(), {n}, "row_ids", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchFind(scope.get(), IndexOf(index), counters.typed_data(), KeysOf(keys), table_ids.typed_data(),
                               n, row_ids->typed_data()),
                    kOp);
}

/// Row ids of (table, key) pairs; unseen pairs get rows.
ffi::Error TableFindOrInsertImpl(StreamArgument stream, Index index_in, Counters counters_in, TableRows table_rows_in,
                                 Tables tables, Seed seed, Keys keys, TableIds table_ids, ffi::RemainingArgs args,
                                 ffi::Result<Index> index, ffi::Result<Counters> counters,
                                 ffi::Result<TableRows> table_rows, ffi::Result<RowIds> row_ids,
                                 ffi::Result<Counts> counts, ffi::Result<Workspace> workspace, ffi::RemainingRets rets,
                                 int32_t num_slabs, int32_t admission_operands) {
  constexpr char kOp[] = "table_find_or_insert";
  JAXSOK_RETURN_IF_ERROR(CheckShape(keys.dimensions(), {-1, 2}, "keys", kOp));
  const int64_t n = keys.dimensions()[0];
  JAXSOK_RETURN_IF_ERROR(CheckAlias(index_in.typed_data(), index->typed_data(), "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(table_rows_in.typed_data(), table_rows->typed_data(), "table_rows", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(table_ids.dimensions(), {n}, "table_ids", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), InsertWorkspaceBytes(n), "workspace", kOp));
  StoreView store{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRows(store));
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(store.records));
  JAXSOK_RETURN_IF_ERROR(ReadIndex(slabs, *index, *counters, *table_rows, kOp, store));
  JAXSOK_RETURN_IF_ERROR(ReadTables(tables, seed, kOp, store, store.num_tables));
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids->dimensions(), {n}, "row_ids", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counts->dimensions(), {store.num_tables, kNumCounts}, "counts", kOp));
  size_t num_aliased = 2 * static_cast<size_t>(num_slabs);
  std::optional<AdmissionView> admission;
  JAXSOK_RETURN_IF_ERROR(ReadAdmission(args, admission_operands, n, store, kOp, admission, &num_aliased));
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, num_aliased, kOp));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchFindOrInsert(scope.get(), store, KeysOf(keys), table_ids.typed_data(), n, row_ids->typed_data(),
                         counts->typed_data(), workspace->typed_data(), admission.has_value() ? &*admission : nullptr),
      kOp);
}

/// The rows of requests whose row ids are known.
///
/// The counters pass through untouched: whoever takes them from here and writes rows comes after this read.
ffi::Error TableGatherImpl(StreamArgument stream, Counters counters_in, Tables tables, Seed seed, Requests requests,
                           RowIds row_ids, ffi::RemainingArgs args, ffi::Result<Counters> counters,
                           ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::Buffer<ffi::S32>> num_absent,
                           int32_t num_slabs, int32_t is_find) {
  constexpr char kOp[] = "table_gather";
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(requests.dimensions(), {-1, 4}, "requests", kOp));
  const int64_t n = requests.dimensions()[0];
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids.dimensions(), {n}, "row_ids", kOp));
  StoreView store{};
  JAXSOK_RETURN_IF_ERROR(ReadOnlyStore(tables, seed, args, num_slabs, kOp, store));
  JAXSOK_RETURN_IF_ERROR(CheckShape(rows->dimensions(), {n, store.dim}, "rows", kOp));
  std::optional<RowDtype> dtype = store.row_dtype;
  JAXSOK_RETURN_IF_ERROR(ReadRowDtype(*rows, "rows", kOp, dtype));
  JAXSOK_RETURN_IF_ERROR(CheckShape(num_absent->dimensions(), {store.num_tables}, "num_absent", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchGather(scope.get(), store, reinterpret_cast<const Request*>(requests.typed_data()),
                                 row_ids.typed_data(), n, is_find != 0, rows->untyped_data(), num_absent->typed_data()),
                    kOp);
}

/// Writes lines of a per-row array, by row id.
ffi::Error TableScatterImpl(StreamArgument stream, RowIds row_ids, ffi::AnyBuffer lines, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, int32_t num_slabs) {
  constexpr char kOp[] = "table_scatter";
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids.dimensions(), {-1}, "row_ids", kOp));
  const int64_t n = row_ids.dimensions()[0];
  JAXSOK_RETURN_IF_ERROR(CheckShape(lines.dimensions(), {n, -1}, "lines", kOp));
  LinesView array{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadLines("slabs", lines, array));
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, static_cast<size_t>(num_slabs), kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchScatter(scope.get(), array, row_ids.typed_data(), n, lines.untyped_data()), kOp);
}

/// Notes in the statistics of rows that a lookup used them.
ffi::Error TableTouchImpl(StreamArgument stream, RowIds row_ids, Uses uses, Scalar clock, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, int32_t num_slabs) {
  constexpr char kOp[] = "table_touch";
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids.dimensions(), {-1}, "row_ids", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(clock.dimensions(), {}, "clock", kOp));
  const int64_t n = row_ids.dimensions()[0];
  const bool has_uses = uses.element_count() != 0;
  if (has_uses) JAXSOK_RETURN_IF_ERROR(CheckShape(uses.dimensions(), {n}, "uses", kOp));
  StatisticsView statistics{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(ReadStatistics(slabs, statistics));
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, static_cast<size_t>(num_slabs), kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchTouch(scope.get(), statistics, row_ids.typed_data(), has_uses ? uses.typed_data() : nullptr,
                                n, clock.typed_data()),
                    kOp);
}

/// Takes rows away by (table, key) and rebuilds the index in place.
ffi::Error TableEraseImpl(StreamArgument stream, Index index_in, Counters counters_in, TableRows table_rows_in,
                          Keys keys, TableIds table_ids, ffi::RemainingArgs args, ffi::Result<Index> index,
                          ffi::Result<Counters> counters, ffi::Result<TableRows> table_rows,
                          ffi::Result<Scalar> num_erased, ffi::Result<Workspace> workspace, ffi::RemainingRets rets,
                          int32_t num_slabs, ffi::Span<const float> initial) {
  constexpr char kOp[] = "table_erase";
  JAXSOK_RETURN_IF_ERROR(CheckShape(keys.dimensions(), {-1, 2}, "keys", kOp));
  const int64_t n = keys.dimensions()[0];
  JAXSOK_RETURN_IF_ERROR(CheckAlias(index_in.typed_data(), index->typed_data(), "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(table_rows_in.typed_data(), table_rows->typed_data(), "table_rows", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(table_ids.dimensions(), {n}, "table_ids", kOp));
  StoreView store{};
  StateView states{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(store.records));
  JAXSOK_RETURN_IF_ERROR(slabs.ReadStates(static_cast<int32_t>(initial.size()), states, initial.begin()));
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, slabs.next(), kOp));
  JAXSOK_RETURN_IF_ERROR(ReadIndex(slabs, *index, *counters, *table_rows, kOp, store));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), RebuildWorkspaceBytes(store.capacity), "workspace", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchErase(scope.get(), store, states, KeysOf(keys), table_ids.typed_data(), n,
                                num_erased->typed_data(), workspace->typed_data()),
                    kOp);
}

/// Makes an index, perhaps of another size, from the records.
ffi::Error TableRebuildImpl(StreamArgument stream, Counters counters_in, ffi::RemainingArgs args,
                            ffi::Result<Index> index, ffi::Result<Counters> counters, ffi::Result<Workspace> workspace,
                            int32_t num_slabs) {
  constexpr char kOp[] = "table_rebuild";
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  StoreView store{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(store.records));
  JAXSOK_RETURN_IF_ERROR(CheckIndex(*index, "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckCounters(*counters, slabs.capacity(), kOp));
  store.index = IndexOf(*index);
  store.counters = counters->typed_data();
  store.starts = slabs.starts();
  store.capacity = slabs.capacity();
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), RebuildWorkspaceBytes(store.capacity), "workspace", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchRebuild(scope.get(), store, workspace->typed_data()), kOp);
}

/// Forgets, of the keys that wait for a row, those that were seen often.
ffi::Error TableForgetImpl(StreamArgument stream, Index sightings_in, ffi::Buffer<ffi::U32> floors,
                           ffi::Result<Index> sightings) {
  constexpr char kOp[] = "table_forget";
  JAXSOK_RETURN_IF_ERROR(CheckAlias(sightings_in.typed_data(), sightings->typed_data(), "sightings", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckIndex(sightings_in, "sightings", kOp));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchForget(scope.get(), IndexOf(*sightings), floors.typed_data(), static_cast<int32_t>(floors.element_count())),
      kOp);
}

/// Makes sightings, of any size, of keys that wait for a row.
ffi::Error TableWaitImpl(StreamArgument stream, Counters counters_in, ffi::Buffer<ffi::U32> floors,
                         ffi::Buffer<ffi::U32> entries, ffi::Result<Index> sightings, ffi::Result<Counters> counters) {
  constexpr char kOp[] = "table_wait";
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(entries.dimensions(), {-1, 4}, "entries", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckIndex(*sightings, "sightings", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counters->dimensions(), {kNumCounters}, "counters", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchWait(scope.get(), IndexOf(*sightings), counters->typed_data(), floors.typed_data(),
                               static_cast<int32_t>(floors.element_count()),
                               reinterpret_cast<const Entry*>(entries.typed_data()), entries.dimensions()[0]),
                    kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokTableForget, TableForgetImpl,
                      BindStream().Arg<Index>().Arg<ffi::Buffer<ffi::U32>>().Ret<Index>());

JAXSOK_DEFINE_HANDLER(JaxsokTableWait, TableWaitImpl,
                      BindStream()
                          .Arg<Counters>()
                          .Arg<ffi::Buffer<ffi::U32>>()
                          .Arg<ffi::Buffer<ffi::U32>>()
                          .Ret<Index>()
                          .Ret<Counters>());

JAXSOK_DEFINE_HANDLER(JaxsokTableFind, TableFindImpl,
                      BindStream().Arg<Index>().Arg<Counters>().Arg<Keys>().Arg<TableIds>().Ret<RowIds>());

JAXSOK_DEFINE_HANDLER(JaxsokTableFindOrInsert, TableFindOrInsertImpl,
                      BindStream()
                          .Arg<Index>()
                          .Arg<Counters>()
                          .Arg<TableRows>()
                          .Arg<Tables>()
                          .Arg<Seed>()
                          .Arg<Keys>()
                          .Arg<TableIds>()
                          .RemainingArgs()
                          .Ret<Index>()
                          .Ret<Counters>()
                          .Ret<TableRows>()
                          .Ret<RowIds>()
                          .Ret<Counts>()
                          .Ret<Workspace>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("admission"));

JAXSOK_DEFINE_HANDLER(JaxsokTableGather, TableGatherImpl,
                      BindStream()
                          .Arg<Counters>()
                          .Arg<Tables>()
                          .Arg<Seed>()
                          .Arg<Requests>()
                          .Arg<RowIds>()
                          .RemainingArgs()
                          .Ret<Counters>()
                          .Ret<ffi::AnyBuffer>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("is_find"));

JAXSOK_DEFINE_HANDLER(
    JaxsokTableScatter, TableScatterImpl,
    BindStream().Arg<RowIds>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets().Attr<int32_t>("num_slabs"));

JAXSOK_DEFINE_HANDLER(
    JaxsokTableTouch, TableTouchImpl,
    BindStream().Arg<RowIds>().Arg<Uses>().Arg<Scalar>().RemainingArgs().RemainingRets().Attr<int32_t>("num_slabs"));

JAXSOK_DEFINE_HANDLER(JaxsokTableErase, TableEraseImpl,
                      BindStream()
                          .Arg<Index>()
                          .Arg<Counters>()
                          .Arg<TableRows>()
                          .Arg<Keys>()
                          .Arg<TableIds>()
                          .RemainingArgs()
                          .Ret<Index>()
                          .Ret<Counters>()
                          .Ret<TableRows>()
                          .Ret<Scalar>()
                          .Ret<Workspace>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<ffi::Span<const float>>("initial"));

JAXSOK_DEFINE_HANDLER(
    JaxsokTableRebuild, TableRebuildImpl,
    BindStream().Arg<Counters>().RemainingArgs().Ret<Index>().Ret<Counters>().Ret<Workspace>().Attr<int32_t>(
        "num_slabs"));

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokInsertWorkspaceBytes(int64_t num_keys) {
  return jaxsok::InsertWorkspaceBytes(num_keys);
}

extern "C" __attribute__((visibility("default"))) int64_t JaxsokRebuildWorkspaceBytes(int64_t capacity) {
  return jaxsok::RebuildWorkspaceBytes(capacity);
}

/// The minor version of the FFI that this library was built with; an older jaxlib cannot run it.
extern "C" __attribute__((visibility("default"))) int32_t JaxsokFfiApiMinor() { return XLA_FFI_API_MINOR; }

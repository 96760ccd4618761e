// Handlers of the lookup noun: keys -> embeddings, inserting, reading only, or with row ids already known.
#include "buffers.h"

namespace jaxsok {
namespace {

/// Looks up a batch; unseen keys get rows.
ffi::Error LookupImpl(StreamArgument stream, Index index_in, Counters counters_in, TableRows table_rows_in,
                      Tables tables, Seed seed, Keys keys, Offsets offsets, Weights weights, Features features,
                      ffi::RemainingArgs args, ffi::Result<Index> index, ffi::Result<Counters> counters,
                      ffi::Result<TableRows> table_rows, ffi::Result<RowIds> row_ids, ffi::Result<Counts> counts,
                      ffi::Result<Seed> digest, ffi::Result<Workspace> workspace, ffi::RemainingRets rets,
                      int32_t num_slabs, int32_t num_tiles, int32_t kinds, int32_t has_statistics,
                      int32_t admission_operands) {
  constexpr char kOp[] = "lookup";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, num_tiles, kOp, batch));
  batch.kinds = kinds;
  JAXSOK_RETURN_IF_ERROR(CheckAlias(index_in.typed_data(), index->typed_data(), "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(table_rows_in.typed_data(), table_rows->typed_data(), "table_rows", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids->dimensions(), {batch.num_keys}, "row_ids", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(digest->dimensions(), {1, 2}, "digest", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), InsertWorkspaceBytes(batch.num_keys), "workspace", kOp));
  StoreView store{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRows(store));
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(store.records));
  JAXSOK_RETURN_IF_ERROR(ReadIndex(slabs, *index, *counters, *table_rows, kOp, store));
  JAXSOK_RETURN_IF_ERROR(ReadTables(tables, seed, kOp, store, store.num_tables));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counts->dimensions(), {store.num_tables, kNumCounts}, "counts", kOp));
  StatisticsView statistics{};
  const uint32_t* clock = nullptr;
  if (has_statistics != 0) {
    JAXSOK_RETURN_IF_ERROR(ReadStatistics(slabs, statistics));
    auto last = args.get<Scalar>(args.size() - 1);
    if (!last.has_value()) return last.error();
    JAXSOK_RETURN_IF_ERROR(CheckShape(last->dimensions(), {}, "clock", kOp));
    clock = last->typed_data();
  }
  size_t num_aliased = slabs.next();
  std::optional<AdmissionView> admission;
  JAXSOK_RETURN_IF_ERROR(ReadAdmission(args, admission_operands, batch.num_keys, store, kOp, admission, &num_aliased));
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, num_aliased, kOp));
  std::vector<void*> data;
  EmbeddingsView embeddings;
  JAXSOK_RETURN_IF_ERROR(ReadEmbeddings(rets, num_aliased, batch.num_features, kOp, data, embeddings));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchLookup(scope.get(), store, batch, embeddings, row_ids->typed_data(), counts->typed_data(),
                   reinterpret_cast<uint64_t*>(digest->typed_data()), workspace->typed_data(),
                   admission.has_value() ? &*admission : nullptr, clock != nullptr ? &statistics : nullptr, clock),
      kOp);
}

/// Looks up a batch and changes nothing.
ffi::Error LookupFindImpl(StreamArgument stream, Index index, Counters counters, Tables tables, Seed seed, Keys keys,
                          Offsets offsets, Weights weights, Features features, ffi::RemainingArgs args,
                          ffi::Result<Counts> counts, ffi::RemainingRets rets, int32_t num_slabs, int32_t num_tiles,
                          int32_t kinds) {
  constexpr char kOp[] = "lookup_find";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, num_tiles, kOp, batch));
  batch.kinds = kinds;
  StoreView store{};
  JAXSOK_RETURN_IF_ERROR(ReadOnlyStore(tables, seed, args, num_slabs, kOp, store));
  JAXSOK_RETURN_IF_ERROR(CheckIndex(index, "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckCounters(counters, store.capacity, kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counts->dimensions(), {store.num_tables, kNumCounts}, "counts", kOp));
  store.index = IndexOf(index);
  store.counters = counters.typed_data();
  std::vector<void*> data;
  EmbeddingsView embeddings;
  JAXSOK_RETURN_IF_ERROR(ReadEmbeddings(rets, 0, batch.num_features, kOp, data, embeddings));
  StreamScope scope(stream);
  return FromLaunch(LaunchLookupFind(scope.get(), store, batch, embeddings, counts->typed_data()), kOp);
}

/// Combines rows whose ids a plan has found.
///
/// The counters pass through untouched: whoever takes them from here and writes rows comes after this read.
ffi::Error LookupPlannedImpl(StreamArgument stream, Counters counters_in, Tables tables, Seed seed, Keys keys,
                             Offsets offsets, Weights weights, Features features, RowIds row_ids,
                             ffi::RemainingArgs args, ffi::Result<Counters> counters, ffi::Result<Counts> counts,
                             ffi::RemainingRets rets, int32_t num_slabs, int32_t num_tiles, int32_t kinds) {
  constexpr char kOp[] = "lookup_planned";
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, num_tiles, kOp, batch));
  batch.kinds = kinds;
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids.dimensions(), {batch.num_keys}, "row_ids", kOp));
  StoreView store{};
  JAXSOK_RETURN_IF_ERROR(ReadOnlyStore(tables, seed, args, num_slabs, kOp, store));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counts->dimensions(), {store.num_tables, kNumCounts}, "counts", kOp));
  std::vector<void*> data;
  EmbeddingsView embeddings;
  JAXSOK_RETURN_IF_ERROR(ReadEmbeddings(rets, 0, batch.num_features, kOp, data, embeddings));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchLookupPlanned(scope.get(), store, batch, row_ids.typed_data(), embeddings, counts->typed_data()), kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokLookup, LookupImpl,
                      BindStream()
                          .Arg<Index>()
                          .Arg<Counters>()
                          .Arg<TableRows>()
                          .Arg<Tables>()
                          .Arg<Seed>()
                          .Arg<Keys>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .RemainingArgs()
                          .Ret<Index>()
                          .Ret<Counters>()
                          .Ret<TableRows>()
                          .Ret<RowIds>()
                          .Ret<Counts>()
                          .Ret<Seed>()
                          .Ret<Workspace>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("num_tiles")
                          .Attr<int32_t>("kinds")
                          .Attr<int32_t>("statistics")
                          .Attr<int32_t>("admission"));

JAXSOK_DEFINE_HANDLER(JaxsokLookupFind, LookupFindImpl,
                      BindStream()
                          .Arg<Index>()
                          .Arg<Counters>()
                          .Arg<Tables>()
                          .Arg<Seed>()
                          .Arg<Keys>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .RemainingArgs()
                          .Ret<Counts>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("num_tiles")
                          .Attr<int32_t>("kinds"));

JAXSOK_DEFINE_HANDLER(JaxsokLookupPlanned, LookupPlannedImpl,
                      BindStream()
                          .Arg<Counters>()
                          .Arg<Tables>()
                          .Arg<Seed>()
                          .Arg<Keys>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .Arg<RowIds>()
                          .RemainingArgs()
                          .Ret<Counters>()
                          .Ret<Counts>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("num_tiles")
                          .Attr<int32_t>("kinds"));

}  // namespace jaxsok

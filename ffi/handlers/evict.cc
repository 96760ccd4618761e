// Handlers of the evict noun: select, release.
#include "../kernels/evict.h"

#include "buffers.h"

namespace jaxsok {
namespace {

using Flags = ffi::Buffer<ffi::U8>;  // [capacity]

/// Flags for the rows that leave: the lowest by score down to a number, or those of a mask.
ffi::Error EvictSelectImpl(StreamArgument stream, Scalar num_kept, ffi::RemainingArgs args, ffi::Result<Flags> flags,
                           ffi::Result<TableRows> num_selected, ffi::Result<Workspace> workspace, int32_t num_slabs,
                           int32_t num_words, int32_t table) {
  constexpr char kOp[] = "evict_select";
  if (num_words < 0 || num_words > kMaxScoreWords) {
    return ffi::Error::InvalidArgument("evict_select: num_words: wanted 0 to 2");
  }
  SelectView view{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(view.records));
  int64_t score_words = 1;
  for (int w = 0; w < num_words; ++w) {
    JAXSOK_RETURN_IF_ERROR(slabs.Read<ffi::U32>("scores", view.scores[w], &score_words));
    JAXSOK_RETURN_IF_ERROR(slabs.CheckWidth("scores", score_words, 1));
  }
  if (num_words == 0) {
    JAXSOK_RETURN_IF_ERROR(slabs.Read<ffi::U8>("mask", view.mask, &score_words));
    JAXSOK_RETURN_IF_ERROR(slabs.CheckWidth("mask", score_words, 1));
  }
  view.starts = slabs.starts();
  view.num_words = num_words;
  view.capacity = slabs.capacity();
  view.num_tables = static_cast<int32_t>(num_selected->dimensions()[0]);
  view.table = table;
  if (table < kAllTables || table >= view.num_tables) {
    return ffi::Error::InvalidArgument("evict_select: table: wanted -1 or a table of the store");
  }
  JAXSOK_RETURN_IF_ERROR(CheckShape(flags->dimensions(), {view.capacity}, "flags", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), SelectWorkspaceBytes(), "workspace", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchSelect(scope.get(), view, num_kept.typed_data(), flags->typed_data(),
                                 num_selected->typed_data(), workspace->typed_data()),
                    kOp);
}

/// Takes flagged rows away and sweeps the index in place.
///
/// Slabs, all aliased: records, states, statistics if there are any; then table_evicted if there is one.
ffi::Error EvictReleaseImpl(StreamArgument stream, Index index_in, Counters counters_in, TableRows table_rows_in,
                            Flags flags, ffi::RemainingArgs args, ffi::Result<Index> index,
                            ffi::Result<Counters> counters, ffi::Result<TableRows> table_rows,
                            ffi::Result<TableRows> num_released, ffi::Result<Workspace> workspace,
                            ffi::RemainingRets rets, int32_t num_slabs, int32_t has_statistics, int32_t has_evicted,
                            ffi::Span<const float> initial) {
  constexpr char kOp[] = "evict_release";
  JAXSOK_RETURN_IF_ERROR(CheckAlias(index_in.typed_data(), index->typed_data(), "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(counters_in.typed_data(), counters->typed_data(), "counters", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckAlias(table_rows_in.typed_data(), table_rows->typed_data(), "table_rows", kOp));
  StoreView store{};
  StateView states{};
  Slabs<uint32_t> statistics{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(store.records));
  JAXSOK_RETURN_IF_ERROR(slabs.ReadStates(static_cast<int32_t>(initial.size()), states, initial.begin()));
  if (has_statistics != 0) JAXSOK_RETURN_IF_ERROR(slabs.ReadStatistics(statistics));
  const size_t num_aliased = slabs.next() + (has_evicted != 0 ? 1 : 0);
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, num_aliased, kOp));
  JAXSOK_RETURN_IF_ERROR(ReadIndex(slabs, *index, *counters, *table_rows, kOp, store));
  JAXSOK_RETURN_IF_ERROR(CheckShape(flags.dimensions(), {store.capacity}, "flags", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(num_released->dimensions(), {store.num_tables}, "num_released", kOp));
  uint32_t* table_evicted = nullptr;
  if (has_evicted != 0) {
    auto buffer = rets.get<TableRows>(slabs.next());
    if (!buffer.has_value()) return buffer.error();
    JAXSOK_RETURN_IF_ERROR(CheckShape((*buffer)->dimensions(), {store.num_tables}, "table_evicted", kOp));
    table_evicted = (*buffer)->typed_data();
  }
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), ReleaseWorkspaceBytes(store.capacity), "workspace", kOp));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchRelease(scope.get(), store, states, has_statistics != 0 ? &statistics : nullptr, flags.typed_data(),
                    table_evicted, num_released->typed_data(), workspace->typed_data()),
      kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokEvictSelect, EvictSelectImpl,
                      BindStream()
                          .Arg<Scalar>()
                          .RemainingArgs()
                          .Ret<Flags>()
                          .Ret<TableRows>()
                          .Ret<Workspace>()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("num_words")
                          .Attr<int32_t>("table"));

JAXSOK_DEFINE_HANDLER(JaxsokEvictRelease, EvictReleaseImpl,
                      BindStream()
                          .Arg<Index>()
                          .Arg<Counters>()
                          .Arg<TableRows>()
                          .Arg<Flags>()
                          .RemainingArgs()
                          .Ret<Index>()
                          .Ret<Counters>()
                          .Ret<TableRows>()
                          .Ret<TableRows>()
                          .Ret<Workspace>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("has_statistics")
                          .Attr<int32_t>("has_evicted")
                          .Attr<ffi::Span<const float>>("initial"));

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokSelectWorkspaceBytes() {
  return jaxsok::SelectWorkspaceBytes();
}

extern "C" __attribute__((visibility("default"))) int64_t JaxsokReleaseWorkspaceBytes(int64_t capacity) {
  return jaxsok::ReleaseWorkspaceBytes(capacity);
}

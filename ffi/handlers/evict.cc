// Handlers of the evict noun: select, release.
#include "../kernels/evict.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Flags the rows to release: the lowest by score until `num_kept` stay, or the rows of a mask.
///
/// The operands after the number of rows to keep: the slabs of each score, or of a mask.
ffi::Error Select(Call& call) {
  const Store store = ReadStore(call);
  SelectView view{};
  view.starts = store.view.starts;
  view.records = store.view.records;
  view.capacity = store.view.capacity;
  view.num_words = call.Attribute<int32_t>("num_words");
  view.table = call.Attribute<int32_t>("table");
  call.Require(view.num_words >= 0 && view.num_words <= kMaxScoreWords, "num_words", "wanted 0 to 2");
  const Array num_kept = call.Operand("num_kept", ffi::U32, {});
  const bool has_scores = view.num_words > 0;
  for (int32_t w = 0; w < (has_scores ? view.num_words : 1); ++w) {
    for (int32_t s = 0; s < view.starts.num_slabs && !call.failed(); ++s) {
      const uint32_t end = s + 1 < view.starts.num_slabs ? view.starts.start[s + 1] : view.capacity;
      const int64_t size = end - view.starts.start[s];
      if (has_scores) view.scores[w].data[s] = call.Operand("scores", ffi::U32, {size}).as<uint32_t>();
      if (!has_scores) view.mask.data[s] = call.Operand("mask", ffi::U8, {size}).as<uint8_t>();
    }
  }
  const Array flags = call.Result("flags", ffi::U8, {view.capacity});
  const Array num_selected = call.Result("num_selected", ffi::U32, {-1});
  view.num_tables = static_cast<int32_t>(num_selected.size(0));
  const bool is_table = view.table >= kAllTables && view.table < view.num_tables;
  call.Require(is_table, "table", "wanted -1 or a table of the store");
  void* workspace = call.Workspace(SelectWorkspaceBytes());
  return call.Launch([&](Stream stream) {
    return LaunchSelect(stream, view, num_kept.as<uint32_t>(), flags.as<uint8_t>(), num_selected.as<uint32_t>(),
                        workspace);
  });
}

/// Releases flagged rows and sweeps the index in place.
ffi::Error Release(Call& call) {
  Store store = ReadStore(call);
  ReadInitial(call, store.states);
  const Array flags = call.Operand("flags", ffi::U8, {store.view.capacity});
  const Array num_released = call.Result("num_released", ffi::U32, {store.view.num_tables});
  void* workspace = call.Workspace(ReleaseWorkspaceBytes(store.view.capacity));
  Slabs<uint32_t> statistics{};
  const int32_t num_slabs = store.statistics.starts.num_slabs;
  for (int32_t s = 0; s < num_slabs; ++s) {
    statistics.data[s] = reinterpret_cast<uint32_t*>(store.statistics.data.data[s]);
  }
  return call.Launch([&](Stream stream) {
    return LaunchRelease(stream, store.view, store.states, num_slabs != 0 ? &statistics : nullptr, flags.as<uint8_t>(),
                         store.table_evicted, num_released.as<uint32_t>(), workspace);
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokEvictSelect, "evict_select", Select);
JAXSOK_DEFINE_HANDLER(JaxsokEvictRelease, "evict_release", Release);

}  // namespace jaxsok

JAXSOK_VISIBLE int64_t JaxsokSelectWorkspaceBytes() { return jaxsok::SelectWorkspaceBytes(); }

JAXSOK_VISIBLE int64_t JaxsokReleaseWorkspaceBytes(int64_t capacity) { return jaxsok::ReleaseWorkspaceBytes(capacity); }

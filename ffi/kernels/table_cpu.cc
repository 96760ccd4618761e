// find, find_or_insert, gather, scatter, touch, rebuild, forget and wait on the CPU (table.h has the contract,
// index_cpu.h the walks).
#include <cstring>

#include "index_cpu.h"
#include "table.h"
#include "touch_cpu.h"

namespace jaxsok {
namespace {

/// Fills one row with one kind of initializer, so that the loop over the columns has no branch on the kind.
template <int kKind>
inline void Initialize(RowInitializer initializer, float* __restrict row, int32_t dim) {
  initializer.kind = kKind;
  for (int32_t c = 0; c < dim; ++c) row[c] = initializer.At(static_cast<uint32_t>(c));
}

/// Empties the index.
void ClearIndex(Stream stream, const IndexView& index) {
  static_assert(kAuxUnset == ~uint32_t{0} && kPaddingKey == ~uint64_t{0}, "an empty entry is all ones");
  constexpr int64_t kBucketsPerTask = 1 << 14;
  RunRanges(stream, index.num_buckets, kBucketsPerTask, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<void*>(index.buckets + begin), 0xff, static_cast<size_t>(end - begin) * sizeof(Bucket));
  });
}

/// Converts a stored row of type `R`.
template <typename R, typename To>
void ConvertRow(To* out, const R* row, int32_t dim) {
  if constexpr (std::is_same_v<R, To>) {
    std::memcpy(out, row, static_cast<size_t>(dim) * sizeof(R));
  } else {
    for (int32_t c = 0; c < dim; ++c) out[c] = RowNumber<To>::Nearest(RowNumber<R>::Widened(row[c]));
  }
}

template <typename R, typename To>
void Gather(Stream stream, const StoreView& store, const Request* requests, const uint32_t* row_ids,
            int64_t num_requests, bool is_find, const LineTarget& rows, int32_t* num_absent) {
  const int32_t dim = store.dim;
  std::fill_n(num_absent, store.num_tables, 0);
  constexpr int64_t kRequestsPerTask = 1024;
  RunRanges(stream, num_requests, kRequestsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> absent(store.num_tables, 0);
    int64_t fetched = begin;
    for (int64_t i = begin; i < end; ++i) {
      for (const int64_t ahead = std::min(i + kRowsAhead, end); fetched < ahead; ++fetched) {
        if (row_ids[fetched] < store.capacity) PrefetchRow(store.rows.At<R>(store.starts, row_ids[fetched], dim), dim);
      }
      const Request& request = requests[i];
      To* out = reinterpret_cast<To*>(rows.At(i, int64_t{dim} * static_cast<int64_t>(sizeof(To))));
      if (request.key == kPaddingKey || request.table >= static_cast<uint32_t>(store.num_tables)) {
        if (!rows.IsWindow()) ClearRow(out, dim);
        continue;
      }
      if (row_ids[i] < store.capacity) {
        ConvertRow(out, store.rows.At<R>(store.starts, row_ids[i], dim), dim);
        continue;
      }
      absent[request.table] += static_cast<int32_t>(request.uses);
      const uint32_t* words = store.tables + int64_t{request.table} * kNumTableWords;
      if (is_find && words[kTableUnknown] != 0) {
        ClearRow(out, dim);
      } else {
        alignas(64) R initial[kMaxDim];
        InitializeRow(RowInitializer::Of(words, store.seed, request.key), initial, dim);
        ConvertRow(out, initial, dim);
      }
    }
    for (int32_t t = 0; t < store.num_tables; ++t) {
      if (absent[t] != 0) AddAtomically(&num_absent[t], absent[t]);
    }
  });
}

}  // namespace

void InitializeRow(const RowInitializer& initializer, BFloat16* row, int32_t dim) {
  alignas(64) float unrounded[kMaxDim];
  InitializeRow(initializer, unrounded, dim);
  RoundRow(row, unrounded, dim);
}

void InitializeRow(const RowInitializer& initializer, Float16* row, int32_t dim) {
  alignas(64) float unrounded[kMaxDim];
  InitializeRow(initializer, unrounded, dim);
  RoundRow(row, unrounded, dim);
}

JAXSOK_CPU_CLONES void InitializeRow(const RowInitializer& initializer, float* row, int32_t dim) {
  switch (initializer.kind) {
    case kInitializeConstant:
      return Initialize<kInitializeConstant>(initializer, row, dim);
    case kInitializeUniform:
      return Initialize<kInitializeUniform>(initializer, row, dim);
    case kInitializeTruncatedNormal:
      return Initialize<kInitializeTruncatedNormal>(initializer, row, dim);
    default:
      return Initialize<kInitializeNormal>(initializer, row, dim);
  }
}

LaunchError LaunchFind(Stream stream, const IndexView& index, const uint32_t* counters, const uint64_t* keys,
                       const uint32_t* table_ids, int64_t num_keys, uint32_t* row_ids) {
  if (index.num_buckets == 0) return "index: no buckets";
  const uint64_t salt = SaltOf(counters);
  RunRanges(stream, num_keys, kKeysPerChunk, [&](int64_t begin, int64_t end) {
    uint32_t tables[kKeysPerChunk];
    for (int64_t i = begin; i < end; ++i) tables[i - begin] = keys[i] == kPaddingKey ? kNoTable : table_ids[i];
    FindChunk(index, salt, keys + begin, tables, end - begin, row_ids + begin, [](int64_t, uint32_t) {});
  });
  return nullptr;
}

LaunchError LaunchFindOrInsert(Stream stream, const StoreView& store, const uint64_t* keys, const uint32_t* table_ids,
                               int64_t num_keys, uint32_t* row_ids, int32_t* counts, void* workspace,
                               const AdmissionView* admission) {
  if (store.index.num_buckets == 0) return "index: no buckets";
  const PairSource source = {keys, table_ids, static_cast<uint32_t>(store.num_tables)};
  return FindOrInsert(stream, store, source, num_keys, row_ids, counts, workspace, admission);
}

LaunchError LaunchGather(Stream stream, const StoreView& store, const Request* requests, const uint32_t* row_ids,
                         int64_t num_requests, bool is_find, const LineTarget& rows, RowDtype dtype,
                         int32_t* num_absent) {
  if (store.dim < 1 || store.dim > kMaxDim) return "rows: dim must be 1 to kMaxDim";
  return WithRowDtype(store.row_dtype, [&](auto number) {
    using R = decltype(number);
    if (dtype == kRowDtypeBfloat16) {
      Gather<R, BFloat16>(stream, store, requests, row_ids, num_requests, is_find, rows, num_absent);
    } else if (dtype == kRowDtypeFloat32) {
      Gather<R, float>(stream, store, requests, row_ids, num_requests, is_find, rows, num_absent);
    } else {
      Gather<R, R>(stream, store, requests, row_ids, num_requests, is_find, rows, num_absent);
    }
    return LaunchError{nullptr};
  });
}

LaunchError LaunchScatter(Stream stream, const LinesView& array, const uint32_t* row_ids, int64_t num_lines,
                          const void* lines) {
  constexpr int64_t kLinesPerTask = 512;
  const uint8_t* from = static_cast<const uint8_t*>(lines);
  RunRanges(stream, num_lines, kLinesPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (row_ids[i] >= array.capacity) continue;
      std::memcpy(array.data.At(array.starts, row_ids[i], array.line_bytes), from + i * array.line_bytes,
                  static_cast<size_t>(array.line_bytes));
    }
  });
  return nullptr;
}

LaunchError LaunchTouch(Stream stream, const StatisticsView& statistics, const uint32_t* row_ids, const uint32_t* uses,
                        int64_t num_keys, const uint32_t* clock) {
  constexpr int64_t kPositionsPerTask = 4096;
  const uint32_t now = *clock;
  RunRanges(stream, num_keys, kPositionsPerTask,
            [&](int64_t begin, int64_t end) { TouchRange(statistics, row_ids, uses, begin, end, now); });
  return nullptr;
}

LaunchError LaunchRebuild(Stream stream, const StoreView& store, const uint32_t* only_if) {
  if (only_if != nullptr && *only_if == 0) return nullptr;
  const IndexView& index = store.index;
  if (index.num_buckets == 0) return "index: no buckets";
  const uint64_t salt = SaltOf(store.counters);
  ClearIndex(stream, index);
  const int64_t num_allocated = std::min(store.counters[kNumAllocated], store.capacity);
  uint32_t num_unplaced = 0;
  int32_t longest = 0;
  struct Walk {
    Record record;
    uint32_t home;
  };
  Walk walks[kBucketsAhead];
  // One thread, rows in ascending order, so that the longest walk does not depend on the number of threads.
  for (int64_t r = 0; r < num_allocated + kBucketsAhead; ++r) {
    Walk& slot = walks[r % kBucketsAhead];
    if (r >= kBucketsAhead && slot.record.key != kPaddingKey) {
      const ProbeResult walk = ProbeFrom(index, slot.record.key, slot.record.table, slot.home);
      if (walk.entry == kNoEntry) {
        ++num_unplaced;
      } else {
        longest = std::max(longest, walk.num_probes);
        *index.EntryAt(walk.entry) = {slot.record.key, static_cast<uint32_t>(r - kBucketsAhead), slot.record.table};
      }
    }
    if (r >= num_allocated) {
      slot.record.key = kPaddingKey;
      continue;
    }
    slot.record = *store.records.At(store.starts, static_cast<uint32_t>(r), 1);
    slot.home = HomeBucket(HashOf(slot.record.key, slot.record.table, salt), index.num_buckets);
    __builtin_prefetch(&index.buckets[slot.home], 1);
  }
  store.counters[kNumUnplaced] = num_unplaced;
  store.counters[kLongestProbe] = static_cast<uint32_t>(longest);
  return nullptr;
}

LaunchError LaunchForget(Stream stream, const IndexView& sightings, const uint32_t* floors, int32_t num_tables) {
  constexpr int64_t kBucketsPerTask = 1 << 14;
  RunRanges(stream, sightings.num_buckets, kBucketsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (Entry& entry : sightings.buckets[b].entries) {
        if (entry.aux < static_cast<uint32_t>(num_tables) && entry.row_id >= floors[entry.aux]) entry.row_id = 0;
      }
    }
  });
  return nullptr;
}

LaunchError LaunchWait(Stream stream, const IndexView& sightings, uint32_t* counters, const uint32_t* floors,
                       int32_t num_tables, const Entry* entries, int64_t num_entries) {
  if (sightings.num_buckets == 0) return "sightings: no buckets";
  ClearIndex(stream, sightings);
  counters[kNumSightings] = 0;
  for (int64_t i = 0; i < num_entries; ++i) {
    const Entry& entry = entries[i];
    if (entry.key == kPaddingKey || entry.aux >= static_cast<uint32_t>(num_tables)) continue;
    if (entry.row_id == 0 || entry.row_id >= floors[entry.aux]) continue;
    AddSightings(sightings, counters, entry.key, entry.aux, entry.row_id);
  }
  return nullptr;
}

}  // namespace jaxsok

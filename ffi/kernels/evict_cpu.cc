// select and release on the CPU (evict.h has the contract): the passes of the GPU, a range of rows for each task.
#include <algorithm>
#include <vector>

#include "evict.h"
#include "index_cpu.h"

namespace jaxsok {
namespace {

constexpr int64_t kRowsPerTask = 1 << 15;

/// The split of the undecided rows by the last counted digit.
struct Split {
  uint32_t digit;
  bool is_exact;  // digits below go and all others stay; otherwise those of `digit` itself stay undecided

  RowFlag Of(uint32_t digit_of_row) const {
    if (digit_of_row < digit) return kRowGoes;
    return digit_of_row == digit && !is_exact ? kRowUndecided : kRowStays;
  }
};

/// Returns where the `needed` lowest of the counted rows end; subtracts the rows below the split from `needed`.
Split SplitAt(const std::vector<uint32_t>& bins, uint32_t* needed) {
  if (*needed == 0) return {0, true};
  uint32_t digit = 0;
  while (*needed > bins[digit]) *needed -= bins[digit++];
  return *needed == bins[digit] ? Split{digit + 1, true} : Split{digit, false};
}

constexpr int64_t kBucketsPerTask = 1 << 12;

/// Removes the entries of released rows from the index (evict.h describes the sweep). The flags of most rows say that
/// they stay, and fit a cache, which their records do not.
LaunchError Sweep(Stream stream, const StoreView& store, const uint8_t* flags) {
  const IndexView& index = store.index;
  const uint64_t salt = SaltOf(store.counters);
  const Entry empty = {kPaddingKey, kAuxUnset, kAuxUnset};
  std::vector<std::vector<uint32_t>> displaced(CeilDiv<int64_t>(index.num_buckets, kBucketsPerTask));
  uint32_t longest = 0, is_damaged = 0;
  RunRanges(stream, index.num_buckets, kBucketsPerTask, [&](int64_t begin, int64_t end) {
    bool is_any_kept = false;
    for (int64_t b = begin; b < end; ++b) {
      Entry* entries = index.buckets[b].entries;
      int num_kept = 0;
      for (int e = 0; e < kEntriesPerBucket && entries[e].key != kPaddingKey; ++e) {
        const Entry entry = entries[e];
        entries[e] = empty;
        if (entry.row_id >= store.capacity) {
          MaxAtomically(&is_damaged, uint32_t{1});
          continue;
        }
        if (flags[entry.row_id] != kRowStays && store.records.At(store.starts, entry.row_id, 1)->key == kPaddingKey) {
          continue;
        }
        if (HomeBucket(HashOf(entry.key, entry.aux, salt), index.num_buckets) == b) {
          entries[num_kept++] = entry;
        } else {
          displaced[begin / kBucketsPerTask].push_back(entry.row_id);
        }
      }
      is_any_kept = is_any_kept || num_kept > 0;
    }
    if (is_any_kept) MaxAtomically(&longest, uint32_t{1});
  });
  if (is_damaged != 0) return kIndexIsDamaged;
  std::vector<uint32_t> row_ids;
  for (const std::vector<uint32_t>& some : displaced) row_ids.insert(row_ids.end(), some.begin(), some.end());
  std::sort(row_ids.begin(), row_ids.end());  // so that the longest walk does not depend on their former places
  for (const uint32_t row_id : row_ids) {
    const Record& record = *store.records.At(store.starts, row_id, 1);
    if (record.key == kPaddingKey) continue;
    const ProbeResult walk = Probe(index, record.key, record.table, salt);
    if (walk.entry == kNoEntry) {
      ++store.counters[kNumUnplaced];
      continue;
    }
    longest = std::max(longest, static_cast<uint32_t>(walk.num_probes));
    *index.EntryAt(walk.entry) = {record.key, row_id, record.table};
  }
  store.counters[kLongestProbe] = longest;
  return nullptr;
}

constexpr int64_t kCountsPerTask = 16;

/// Rebuilds the list of freed rows from the dead records.
void ListFreedRows(Stream stream, const StoreView& store, void* workspace) {
  const int64_t num_allocated = std::min(store.counters[kNumAllocated], store.capacity);
  const int64_t num_counts = CeilDiv(num_allocated, kCountedTogether);
  int64_t* starts = WorkspaceCutter(workspace).Take<int64_t>(num_counts);
  const auto for_dead_rows = [&](int64_t count, const auto& visit) {
    const int64_t end = std::min((count + 1) * kCountedTogether, num_allocated);
    for (int64_t r = count * kCountedTogether; r < end; ++r) {
      const uint32_t row_id = static_cast<uint32_t>(r);
      if (store.records.At(store.starts, row_id, 1)->key == kPaddingKey) visit(row_id);
    }
  };
  RunRanges(stream, num_counts, kCountsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      starts[c] = 0;
      for_dead_rows(c, [&](uint32_t) { ++starts[c]; });
    }
  });
  int64_t num_freed = 0;
  for (int64_t c = 0; c < num_counts; ++c) {
    const int64_t count = starts[c];
    starts[c] = num_freed;
    num_freed += count;
  }
  RunRanges(stream, num_counts, kCountsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      int64_t next = starts[c];
      for_dead_rows(c, [&](uint32_t row_id) {
        store.records.At(store.starts, static_cast<uint32_t>(next++), 1)->free_id = row_id;
      });
    }
  });
  store.counters[kFreeBegin] = 0;
  store.counters[kFreeEnd] = static_cast<uint32_t>(num_freed);
}

}  // namespace

LaunchError LaunchSelect(Stream stream, const SelectView& view, const uint32_t* num_kept, uint8_t* flags,
                         uint32_t* num_selected, void*) {
  const int64_t capacity = view.capacity;
  RunRanges(stream, capacity, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint32_t row_id = static_cast<uint32_t>(r);
      const bool is_candidate =
          view.IsAsked(row_id) && (view.num_words > 0 || *view.mask.At(view.starts, row_id, 1) != 0);
      flags[r] = !is_candidate ? kRowStays : view.num_words > 0 ? kRowUndecided : kRowGoes;
    }
  });
  if (view.num_words > 0) {
    const Digits digits = Digits::Of(view.num_words, view.table == kAllTables ? view.num_tables : 1);
    std::vector<uint32_t> bins(kNumSelectBins);
    uint32_t needed = 0;
    Split split{0, false};
    for (int32_t d = 0; d <= digits.num_digits; ++d) {
      // Rows are split by the previous digit, and counted by this one.
      const bool is_counted = d < digits.num_digits && !split.is_exact;
      std::fill(bins.begin(), bins.end(), 0);
      RunRanges(stream, capacity, kRowsPerTask, [&](int64_t begin, int64_t end) {
        std::vector<uint32_t> own(is_counted ? kNumSelectBins : 0);
        for (int64_t r = begin; r < end; ++r) {
          if (flags[r] != kRowUndecided) continue;
          const uint32_t row_id = static_cast<uint32_t>(r);
          if (d > 0) flags[r] = split.Of(view.DigitOf(digits.digit[d - 1], row_id));
          if (is_counted && flags[r] == kRowUndecided) ++own[view.DigitOf(digits.digit[d], row_id)];
        }
        for (size_t b = 0; b < own.size(); ++b) {
          if (own[b] != 0) AddAtomically(&bins[b], own[b]);
        }
      });
      if (!is_counted) break;
      if (d == 0) {
        uint32_t num_asked = 0;
        for (const uint32_t count : bins) num_asked += count;
        needed = num_asked - std::min(num_asked, *num_kept);
      }
      split = SplitAt(bins, &needed);
    }
  }
  std::fill_n(num_selected, view.num_tables, 0);
  RunRanges(stream, capacity, kRowsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> own(view.num_tables);
    for (int64_t r = begin; r < end; ++r) {
      if (flags[r] == kRowGoes) ++own[view.records.At(view.starts, static_cast<uint32_t>(r), 1)->table];
    }
    for (int32_t t = 0; t < view.num_tables; ++t) {
      if (own[t] != 0) AddAtomically(&num_selected[t], own[t]);
    }
  });
  return nullptr;
}

LaunchError LaunchRelease(Stream stream, const StoreView& store, const StateView& states,
                          const Slabs<uint32_t>* statistics, const uint8_t* flags, uint32_t* table_evicted,
                          uint32_t* num_released, void* workspace) {
  if (store.index.num_buckets == 0) return "index: no buckets";
  std::fill_n(num_released, store.num_tables, 0);
  RunRanges(stream, store.capacity, kRowsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> own(store.num_tables);
    for (int64_t r = begin; r < end; ++r) {
      if (flags[r] == kRowStays) continue;
      const uint32_t row_id = static_cast<uint32_t>(r);
      Record* record = store.records.At(store.starts, row_id, 1);
      if (record->key == kPaddingKey || record->table >= static_cast<uint32_t>(store.num_tables)) continue;
      ++own[record->table];
      record->key = kPaddingKey;
      if (statistics != nullptr) std::fill_n(statistics->At(store.starts, row_id, 2), 2, 0);
      for (int k = 0; k < states.num_states; ++k) {
        std::fill_n(states.data[k].At(store.starts, row_id, states.width[k]), states.width[k], states.initial[k]);
      }
    }
    for (int32_t t = 0; t < store.num_tables; ++t) {
      if (own[t] != 0) AddAtomically(&num_released[t], own[t]);
    }
  });
  uint32_t num_freed = 0;
  for (int32_t t = 0; t < store.num_tables; ++t) {
    num_freed += num_released[t];
    store.table_rows[t] -= num_released[t];
    if (table_evicted != nullptr) table_evicted[t] += num_released[t];
  }
  if (num_freed == 0) return nullptr;
  ++store.counters[kGeneration];
  ListFreedRows(stream, store, workspace);
  // A sweep does not visit rows without an entry.
  if (store.counters[kNumUnplaced] != 0) return LaunchRebuild(stream, store);
  return Sweep(stream, store, flags);
}

}  // namespace jaxsok

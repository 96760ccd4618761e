// Walks through the index, many at a time, and inserts: the code that table_cpu.cc and lookup_cpu.cc share.
//
// One thread inserts, in the order of the positions: row ids then follow the first positions, and entries are never
// contended. All threads do the expensive work around it: before, the read-only walks (most keys have rows, so few are
// left to insert); after, the records and initial rows.
#ifndef JAXSOK_KERNELS_INDEX_CPU_H_
#define JAXSOK_KERNELS_INDEX_CPU_H_

#include <algorithm>
#include <vector>

#include "../core/admission.h"
#include "../core/initialize.h"
#include "../core/probe.h"
#include "bags_cpu.h"
#include "table.h"

namespace jaxsok {

constexpr uint32_t kNoTable = ~uint32_t{0};  // a position that is not looked up
constexpr int64_t kKeysPerChunk = kCountedTogether;
constexpr int64_t kChunksPerTask = 4;
constexpr int64_t kBucketsAhead = 16;  // walks started ahead: the memory lines that one core can wait for

/// Walks from its home bucket to the entry of a (table, key) pair, or to the first empty entry.
inline ProbeResult ProbeFrom(const IndexView& index, uint64_t key, uint32_t table, uint32_t home) {
  uint32_t bucket = home;
  for (int probe = 0; probe < kMaxProbes; ++probe) {
    const Bucket& line = index.buckets[bucket];
    for (int e = 0; e < kEntriesPerBucket; ++e) {
      const Entry& entry = line.entries[e];
      if (entry.key == key && entry.aux == table) {
        return {entry.row_id, bucket * kEntriesPerBucket + e, probe + 1};
      }
      if (entry.key == kPaddingKey) return {kNoRow, bucket * kEntriesPerBucket + e, probe + 1};
    }
    bucket = NextBucket(bucket, index.num_buckets);
  }
  return {kNoRow, kNoEntry, kMaxProbes};
}

inline ProbeResult Probe(const IndexView& index, uint64_t key, uint32_t table, uint64_t salt) {
  return ProbeFrom(index, key, table, HomeBucket(HashOf(key, table, salt), index.num_buckets));
}

/// Finds up to kKeysPerChunk keys; positions with kNoTable get kNoRow. Returns the number of buckets of the longest
/// walk to a row.
///
/// Calls `unseen(i, home)`, in order, for each key that is absent.
template <typename Unseen>
int32_t FindChunk(const IndexView& index, uint64_t salt, const uint64_t* keys, const uint32_t* tables, int64_t num_keys,
                  uint32_t* row_ids, const Unseen& unseen) {
  uint32_t homes[kBucketsAhead];
  const auto begin_walk = [&](int64_t i) {
    const uint32_t home = HomeBucket(HashOf(keys[i], tables[i], salt), index.num_buckets);
    __builtin_prefetch(&index.buckets[home]);
    homes[i % kBucketsAhead] = home;
  };
  int32_t longest = 0;
  for (int64_t i = 0; i < std::min(kBucketsAhead, num_keys); ++i) begin_walk(i);
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t home = homes[i % kBucketsAhead];
    if (i + kBucketsAhead < num_keys) begin_walk(i + kBucketsAhead);
    row_ids[i] = kNoRow;
    if (tables[i] == kNoTable) continue;
    const ProbeResult walk = ProbeFrom(index, keys[i], tables[i], home);
    row_ids[i] = walk.row_id;
    if (walk.row_id == kNoRow) {
      unseen(i, home);
    } else {
      longest = std::max(longest, walk.num_probes);
    }
  }
  return longest;
}

/// The counts of one task, added to the totals when it ends: integer sums do not depend on the order.
class Tally {
 public:
  Tally(int32_t* counts, int32_t num_tables) : counts_(counts), own_(static_cast<size_t>(num_tables) * kNumCounts, 0) {}
  ~Tally() {
    for (size_t i = 0; i < own_.size(); ++i) {
      if (own_[i] != 0) AddAtomically(&counts_[i], own_[i]);
    }
  }
  void Add(uint32_t table, Count count, int32_t occurrences) { own_[table * kNumCounts + count] += occurrences; }

 private:
  int32_t* counts_;
  std::vector<int32_t> own_;
};

inline void ClearCounts(int32_t* counts, int32_t num_tables) {
  std::fill_n(counts, static_cast<int64_t>(num_tables) * kNumCounts, 0);
}

/// A source of keys: pairs of keys and tables.
struct PairSource {
  const uint64_t* keys;
  const uint32_t* table_ids;
  uint32_t num_tables;

  uint32_t TableAt(int64_t position) const { return table_ids[position]; }

  /// Fills in the tables of positions [begin, end), kNoTable for padding, and reports padding(table, occurrences).
  template <typename Padding>
  void Tables(int64_t begin, int64_t end, uint32_t* tables, const Padding& padding) const {
    for (int64_t i = begin; i < end; ++i) {
      const bool is_known = table_ids[i] < num_tables;
      tables[i - begin] = is_known && keys[i] != kPaddingKey ? table_ids[i] : kNoTable;
      if (is_known && keys[i] == kPaddingKey) padding(table_ids[i], 1);
    }
  }
};

/// A source of keys: the features of a batch. Positions in no bag are padding.
struct BatchSource {
  const uint64_t* keys;
  const BagFeatures* features;

  uint32_t TableAt(int64_t position) const { return features->At(position).table; }

  template <typename Padding>
  void Tables(int64_t begin, int64_t end, uint32_t* tables, const Padding& padding) const {
    std::fill_n(tables, end - begin, kNoTable);
    for (const FeatureView& feature : features->features()) {
      const int64_t first = std::max(begin, feature.key_start);
      const int64_t last = std::min(end, feature.key_start + feature.num_keys);
      if (first >= last) continue;
      const int64_t first_in_bag = std::max(first, feature.BagBegin(0));
      const int64_t last_in_bag = std::min(last, feature.BagBegin(feature.num_bags));
      int32_t num_kept = 0;
      for (int64_t i = first_in_bag; i < last_in_bag; ++i) {
        if (keys[i] == kPaddingKey) continue;
        tables[i - begin] = feature.table;
        ++num_kept;
      }
      padding(feature.table, static_cast<int32_t>(last - first) - num_kept);
    }
  }
};

/// Writes the initial values of a row, rounded to nearest (table_cpu.cc).
void InitializeRow(const RowInitializer& initializer, float* row, int32_t dim);
void InitializeRow(const RowInitializer& initializer, BFloat16* row, int32_t dim);
void InitializeRow(const RowInitializer& initializer, Float16* row, int32_t dim);

/// Returns whether walks ended at entries that name rows beyond the capacity.
inline bool HasRowBeyond(uint32_t capacity, const uint32_t* row_ids, int64_t num_keys) {
  uint32_t num_beyond = 0;
  for (int64_t i = 0; i < num_keys; ++i) num_beyond += row_ids[i] >= capacity && row_ids[i] != kNoRow ? 1 : 0;
  return num_beyond != 0;
}

constexpr char kIndexIsDamaged[] =
    "index: got an entry of a row beyond the capacity, wanted rows below it; the state is damaged: restore it from a "
    "checkpoint.";
constexpr char kFreeRowsAreDamaged[] =
    "records: got a list of freed rows that names a row in use, one twice, or one that was never handed out, wanted "
    "freed rows in ascending order; the state is damaged: restore it from a checkpoint.";

/// Hands out row ids: freed ones in ascending order, then fresh ones.
///
/// Pre: the counters are possible (handlers/buffers.h CheckCounters).
class RowAllocator {
 public:
  explicit RowAllocator(const StoreView& store) : store_(store), counters_(store.counters) {}

  bool IsEmpty() const {
    return counters_[kFreeBegin] >= counters_[kFreeEnd] && counters_[kNumAllocated] >= store_.capacity;
  }

  /// Returns the next row id; kNoRow if the list of freed rows is invalid. Pre: not IsEmpty().
  uint32_t Take() {
    if (counters_[kFreeBegin] == counters_[kFreeEnd]) return counters_[kNumAllocated]++;
    const uint32_t row_id = store_.records.At(store_.starts, counters_[kFreeBegin]++, 1)->free_id;
    if (row_id < next_freed_ || row_id >= counters_[kNumAllocated]) return kNoRow;
    next_freed_ = row_id + 1;
    return row_id;
  }

 private:
  const StoreView& store_;
  uint32_t* counters_;
  uint32_t next_freed_ = 0;  // the lower bound of the next freed row
};

/// Adds `uses` to the sightings of a pair. Returns its entry, created if absent; kNoEntry: none in reach.
inline uint32_t AddSightings(const IndexView& sightings, uint32_t* counters, uint64_t key, uint32_t table,
                             uint32_t uses) {
  const ProbeResult walk = Probe(sightings, key, table, SaltOf(counters));
  if (walk.entry == kNoEntry) return kNoEntry;
  Entry* entry = sightings.EntryAt(walk.entry);
  if (walk.row_id == kNoRow) {
    *entry = {key, 0, table};
    ++counters[kNumSightings];
  }
  entry->row_id += uses;
  return walk.entry;
}

/// The positions of a batch whose keys have no row, in chunks of kKeysPerChunk positions.
struct UnseenPositions {
  int64_t num_chunks;
  uint32_t* num_unseen;  // [num_chunks]
  uint32_t* positions;   // those of chunk c start at c * kKeysPerChunk
  uint32_t* homes;       // the home buckets of their keys, likewise
};

/// Removes the positions of refused keys from the lists, and counts them.
///
/// One thread does this, as it inserts. All occurrences are counted before the first decision.
template <typename Source>
void Admit(const StoreView& store, const AdmissionView& admission, const Source& source, const UnseenPositions& unseen,
           uint32_t* row_ids, int32_t* counts) {
  const auto uses_of = [&](uint32_t position) { return admission.uses == nullptr ? 1u : admission.uses[position]; };
  const auto words_of = [&](uint32_t table) { return store.tables + int64_t{table} * kNumTableWords; };
  const auto for_all = [&](const auto& visit) {
    for (int64_t c = 0; c < unseen.num_chunks; ++c) {
      const int64_t begin = c * kKeysPerChunk;
      for (int64_t k = begin; k < begin + unseen.num_unseen[c]; ++k) {
        const uint32_t position = unseen.positions[k];
        visit(position, source.keys[position], source.TableAt(position));
      }
    }
  };
  for_all([&](uint32_t position, uint64_t key, uint32_t table) {
    const uint32_t* words = words_of(table);
    if (words[kTableAdmission] == kAdmitByCount) {
      // The decision below finds the entry here.
      row_ids[position] = AddSightings(admission.sightings, store.counters, key, table, uses_of(position));
    } else if (words[kTableAdmission] == kAdmitByBloom) {
      const uint64_t hash = AdmissionHash(words, store.seed, key);
      for (uint32_t i = 0; i < words[kTableBloomHashes]; ++i) {
        const uint64_t counter = BloomCounter(words, hash, i);
        uint32_t* word = &admission.bloom[counter / kBloomPerWord];
        *word = BloomAdded(*word, counter, uses_of(position));
      }
    }
  });
  const auto is_uncounted = [&](uint32_t position, uint32_t table) {
    return words_of(table)[kTableAdmission] == kAdmitByCount && row_ids[position] == kNoEntry;
  };
  const auto is_admitted = [&](uint32_t position, uint64_t key, uint32_t table) {
    const uint32_t* words = words_of(table);
    const uint32_t threshold = words[kTableThreshold];
    switch (words[kTableAdmission]) {
      case kAdmitByCount: {
        if (row_ids[position] == kNoEntry) return false;
        uint32_t* count = &admission.sightings.EntryAt(row_ids[position])->row_id;
        *count = std::min(*count, threshold);
        return *count == threshold;
      }
      case kAdmitByBloom: {
        const uint64_t hash = AdmissionHash(words, store.seed, key);
        uint32_t least = kMostSightings;
        for (uint32_t i = 0; i < words[kTableBloomHashes]; ++i) {
          const uint64_t counter = BloomCounter(words, hash, i);
          least = std::min(least, BloomCount(admission.bloom[counter / kBloomPerWord], counter));
        }
        return least >= threshold;
      }
      case kAdmitByProbability:
        return IsDrawn(words, AdmissionHash(words, store.seed, key), *admission.step);
      default:
        return true;
    }
  };
  for (int64_t c = 0; c < unseen.num_chunks; ++c) {
    const int64_t begin = c * kKeysPerChunk, end = begin + unseen.num_unseen[c];
    int64_t kept = begin;
    for (int64_t k = begin; k < end; ++k) {
      const uint32_t position = unseen.positions[k];
      const uint32_t table = source.TableAt(position);
      if (is_admitted(position, source.keys[position], table)) {
        unseen.positions[kept] = position;
        unseen.homes[kept++] = unseen.homes[k];
      } else {
        int32_t* table_counts = counts + int64_t{table} * kNumCounts;
        ++table_counts[kCountRefused];
        // Without an entry the policy has not decided. The index lacks room, which the counter reports to grow.
        if (is_uncounted(position, table)) {
          ++store.counters[kNumUnplaced];
        } else {
          table_counts[kCountUnadmitted] += static_cast<int32_t>(uses_of(position));
        }
      }
      row_ids[position] = kNoRow;
    }
    unseen.num_unseen[c] = static_cast<uint32_t>(kept - begin);
  }
}

/// Does the work of LaunchFindOrInsert, over keys of either source.
template <typename Source>
LaunchError FindOrInsert(Stream stream, const StoreView& store, const Source& source, int64_t num_keys,
                         uint32_t* row_ids, int32_t* counts, void* workspace, const AdmissionView* admission) {
  const uint64_t salt = SaltOf(store.counters);
  const int64_t num_chunks = CeilDiv(num_keys, kKeysPerChunk);
  WorkspaceCutter cutter(workspace);
  uint32_t* num_unseen = cutter.Take<uint32_t>(num_chunks);
  uint32_t* unseen = cutter.Take<uint32_t>(num_keys);  // positions; chunk c writes from c * kKeysPerChunk on
  uint32_t* homes = cutter.Take<uint32_t>(num_keys);
  ClearCounts(counts, store.num_tables);
  uint32_t is_damaged = 0;

  RunRanges(stream, num_chunks, kChunksPerTask, [&](int64_t first_chunk, int64_t last_chunk) {
    Tally tally(counts, store.num_tables);
    uint32_t tables[kKeysPerChunk];
    int32_t longest = 0;
    for (int64_t c = first_chunk; c < last_chunk; ++c) {
      const int64_t begin = c * kKeysPerChunk, end = std::min(begin + kKeysPerChunk, num_keys);
      source.Tables(begin, end, tables,
                    [&](uint32_t table, int32_t occurrences) { tally.Add(table, kCountPadding, occurrences); });
      uint32_t count = 0;
      longest = std::max(longest, FindChunk(store.index, salt, source.keys + begin, tables, end - begin,
                                            row_ids + begin, [&](int64_t i, uint32_t home) {
                                              unseen[begin + count] = static_cast<uint32_t>(begin + i);
                                              homes[begin + count] = home;
                                              ++count;
                                            }));
      num_unseen[c] = count;
      if (HasRowBeyond(store.capacity, row_ids + begin, end - begin)) MaxAtomically(&is_damaged, uint32_t{1});
      for (int64_t i = begin; i < end;) {
        int64_t run_end = i, num_found = 0;
        for (; run_end < end && tables[run_end - begin] == tables[i - begin]; ++run_end) {
          num_found += row_ids[run_end] != kNoRow ? 1 : 0;
        }
        if (tables[i - begin] != kNoTable) tally.Add(tables[i - begin], kCountFound, static_cast<int32_t>(num_found));
        i = run_end;
      }
    }
    MaxAtomically(&store.counters[kLongestProbe], static_cast<uint32_t>(longest));
  });

  if (is_damaged != 0) return kIndexIsDamaged;
  if (admission != nullptr) {
    Admit(store, *admission, source, UnseenPositions{num_chunks, num_unseen, unseen, homes}, row_ids, counts);
  }
  RowAllocator allocator(store);
  int64_t num_new = 0;  // the list of new positions overwrites the list of unseen positions, which it never overtakes
  uint32_t longest = store.counters[kLongestProbe];
  for (int64_t c = 0; c < num_chunks; ++c) {
    const int64_t begin = c * kKeysPerChunk, end = begin + num_unseen[c];
    for (int64_t k = begin; k < end; ++k) {
      if (k + kBucketsAhead < end) __builtin_prefetch(&store.index.buckets[homes[k + kBucketsAhead]], 1);
      const uint32_t position = unseen[k];
      const uint32_t table = source.TableAt(position);
      const ProbeResult walk = ProbeFrom(store.index, source.keys[position], table, homes[k]);
      int32_t* table_counts = counts + int64_t{table} * kNumCounts;
      if (walk.row_id != kNoRow) {
        row_ids[position] = walk.row_id;
        ++table_counts[kCountFound];
      } else if (walk.entry == kNoEntry || allocator.IsEmpty()) {
        if (walk.entry == kNoEntry) ++store.counters[kNumUnplaced];
        ++table_counts[kCountRefused];
      } else {
        const uint32_t row_id = allocator.Take();
        if (row_id == kNoRow) return kFreeRowsAreDamaged;
        *store.index.EntryAt(walk.entry) = {source.keys[position], row_id, table};
        row_ids[position] = row_id;
        longest = std::max(longest, static_cast<uint32_t>(walk.num_probes));
        ++table_counts[kCountInserted];
        ++store.table_rows[table];
        unseen[num_new++] = position;
      }
    }
  }
  store.counters[kLongestProbe] = longest;

  constexpr int64_t kNewRowsPerTask = 256;
  RunRanges(stream, num_new, kNewRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const uint32_t position = unseen[k];
      const uint64_t key = source.keys[position];
      const uint32_t table = source.TableAt(position);
      Record* record = store.records.At(store.starts, row_ids[position], 1);
      if (record->key != kPaddingKey) {
        MaxAtomically(&is_damaged, uint32_t{1});
        continue;
      }
      record->key = key;  // free_id does not belong to this row: it stays
      record->table = table;
      const uint32_t* words = store.tables + int64_t{table} * kNumTableWords;
      const RowInitializer initializer = RowInitializer::Of(words, store.seed, key);
      WithRowDtype(store.row_dtype, [&](auto number) {
        using R = decltype(number);
        InitializeRow(initializer, store.rows.At<R>(store.starts, row_ids[position], store.dim), store.dim);
      });
    }
  });
  return is_damaged != 0 ? kFreeRowsAreDamaged : nullptr;
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_INDEX_CPU_H_

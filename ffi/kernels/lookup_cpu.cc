// The lookup on the CPU: row ids first, for tiles or for the whole batch, then the rows of each bag.
#include "index_cpu.h"
#include "lookup.h"
#include "tickets.h"
#include "touch_cpu.h"

namespace jaxsok {
namespace {

/// The rows of positions whose row ids are known, for CombineTile. `R`: the type of their numbers.
template <typename R>
class StoreRows {
 public:
  using Number = std::conditional_t<kIsQuantized<R>, float, R>;  // the type of the numbers that it returns

  /// Makes the rows. `row_ids[i - first]` is the row id of position i; `unknown`: the row of an absent key
  /// (kFeatureUnknown).
  StoreRows(const StoreView& store, const FeatureView& feature, const BatchView& batch, const uint32_t* row_ids,
            int64_t first, int32_t unknown)
      : store_(store),
        keys_(batch.keys),
        tables_(batch.tables),
        row_ids_(row_ids),
        first_(first),
        unknown_(unknown),
        table_words_(store.tables + int64_t{feature.table} * kNumTableWords) {}

  void Fetch(int64_t position) const {
    const uint32_t row_id = row_ids_[position - first_];
    if (row_id >= store_.capacity) return;
    PrefetchRow(RowAt(row_id), store_.dim);
    if constexpr (kIsQuantized<R>) __builtin_prefetch(store_.scales + row_id);
  }

  const Number* Row(int64_t position) {
    const uint32_t row_id = row_ids_[position - first_];
    if (keys_[position] == kPaddingKey) {
      ++num_padding_;
      return nullptr;
    }
    if (row_id < store_.capacity) {
      ++num_found_;
      if constexpr (kIsQuantized<R>) {
        WidenRow(row_at_hand_, RowAt(row_id), store_.scales[row_id], store_.dim);
        return row_at_hand_;
      } else {
        return RowAt(row_id);
      }
    }
    ++num_unknown_;
    const uint32_t* words =
        tables_ == nullptr ? table_words_ : store_.tables + int64_t{tables_[position]} * kNumTableWords;
    if (unknown_ != 0 || (tables_ != nullptr && words[kTableUnknown] != 0)) {
      ClearRow(row_at_hand_, store_.dim);
    } else {
      InitializeRow(RowInitializer::Of(words, store_.seed, keys_[position]), row_at_hand_, store_.dim);
    }
    return row_at_hand_;
  }

  int32_t num_found() const { return num_found_; }
  int32_t num_unknown() const { return num_unknown_; }
  int32_t num_padding() const { return num_padding_; }

 private:
  const R* RowAt(uint32_t row_id) const { return store_.rows.At<R>(store_.starts, row_id, store_.dim); }

  const StoreView& store_;
  const uint64_t* keys_;
  const uint32_t* tables_;  // by position; nullptr: the feature's table
  const uint32_t* row_ids_;
  int64_t first_;
  int32_t unknown_;
  const uint32_t* table_words_;
  int32_t num_found_ = 0;
  int32_t num_unknown_ = 0;
  int32_t num_padding_ = 0;
  alignas(64) Number row_at_hand_[kMaxDim];  // the row of an absent key, or a widened quantized row
};

LaunchError CheckBatch(const BagFeatures& bags, const StoreView& store, const EmbeddingsView& embeddings,
                       bool narrows = false) {
  if (LaunchError error = bags.ErrorWithTables(store.num_tables)) return error;
  if (store.dim < 1 || store.dim > kMaxDim) return "rows: dim must be 1 to kMaxDim";
  const bool is_narrow = narrows && store.row_dtype == kRowDtypeFloat32 && embeddings.dtype == kRowDtypeBfloat16;
  return is_narrow || HasRowDtypes(store.row_dtype, embeddings.dtype) ? nullptr : kWrongEmbeddings;
}

/// Counts the keys that CombineTile read, and as padding the positions that no bag of the feature holds.
template <typename R>
void CountTile(const FeatureView& feature, const Tile& tile, const StoreRows<R>& rows, Count unknown, int32_t* counts) {
  int64_t num_outside = 0;
  if (tile.bag_begin == 0) {
    num_outside = feature.num_keys - (feature.BagBegin(feature.num_bags) - feature.BagBegin(0));
  }
  int32_t* table_counts = counts + int64_t{feature.table} * kNumCounts;
  AddAtomically(&table_counts[kCountFound], rows.num_found());
  AddAtomically(&table_counts[unknown], rows.num_unknown());
  AddAtomically(&table_counts[kCountPadding], rows.num_padding() + static_cast<int32_t>(num_outside));
}

/// Combines the embeddings of one tile; calls `saw(rows)` afterwards. The parameters are those of StoreRows.
template <typename Saw>
void CombineRows(const StoreView& store, const FeatureView& feature, const Tile& tile, const BatchView& batch,
                 const uint32_t* row_ids, int64_t first, int32_t unknown, const EmbeddingsView& embeddings,
                 const Saw& saw) {
  const auto combine = [&](auto row_number, auto number) {
    StoreRows<decltype(row_number)> rows(store, feature, batch, row_ids, first, unknown);
    CombineTile(feature, tile, store.dim, rows, static_cast<decltype(number)*>(embeddings.data[tile.feature]));
    saw(rows);
  };
  if (HasRowDtypes(store.row_dtype, embeddings.dtype)) {
    WithStoredDtypes(store.row_dtype, embeddings.dtype, combine);
  } else {
    combine(float{}, BFloat16{});
  }
}

/// Counts the positions of features without bags, which have no tile.
void CountBaglessFeatures(const BagFeatures& bags, int32_t* counts) {
  for (const FeatureView& feature : bags.features()) {
    if (feature.num_bags != 0) continue;
    counts[int64_t{feature.table} * kNumCounts + kCountPadding] += static_cast<int32_t>(feature.num_keys);
  }
}

}  // namespace

LaunchError LaunchLookup(Stream stream, const StoreView& store, const BatchView& batch,
                         const EmbeddingsView& embeddings, uint32_t* row_ids, int32_t* counts, uint64_t* digest,
                         void* workspace, const AdmissionView* admission, const StatisticsView* statistics,
                         const uint32_t* clock) {
  const BagFeatures bags(stream, batch);
  if (LaunchError error = CheckBatch(bags, store, embeddings)) return error;
  if (store.index.num_buckets == 0) return "index: no buckets";
  if (LaunchError error = LaunchTicketsDigest(stream, {batch.keys, batch.num_keys}, digest)) return error;
  if (LaunchError error = FindOrInsert(stream, store, BatchSource{batch.keys, &bags}, batch.num_keys, row_ids, counts,
                                       workspace, admission)) {
    return error;
  }
  StoreView read = store;
  if (admission != nullptr) read.tables = admission->refused;
  bags.ForEachTile(stream, [&](const Tile& tile, const FeatureView& feature) {
    constexpr int32_t kInitialRow = 0;
    if (statistics != nullptr) {  // positions outside all tiles have no row
      TouchRange(*statistics, row_ids, nullptr, feature.BagBegin(tile.bag_begin), feature.BagBegin(tile.bag_end),
                 *clock);
    }
    CombineRows(read, feature, tile, batch, row_ids, 0, kInitialRow, embeddings, [](const auto&) {});
  });
  return nullptr;
}

LaunchError LaunchLookupFind(Stream stream, const StoreView& store, const BatchView& batch,
                             const EmbeddingsView& embeddings, int32_t* counts) {
  const BagFeatures bags(stream, batch);
  if (LaunchError error = CheckBatch(bags, store, embeddings)) return error;
  if (store.index.num_buckets == 0) return "index: no buckets";
  const uint64_t salt = SaltOf(store.counters);
  ClearCounts(counts, store.num_tables);
  CountBaglessFeatures(bags, counts);
  uint32_t is_damaged = 0;
  bags.ForEachTile(stream, [&](const Tile& tile, const FeatureView& feature) {
    const int64_t first = feature.BagBegin(tile.bag_begin), last = feature.BagBegin(tile.bag_end);
    std::vector<uint32_t> row_ids(last - first);
    for (int64_t begin = first; begin < last; begin += kKeysPerChunk) {
      const int64_t end = std::min(begin + kKeysPerChunk, last);
      uint32_t tables[kKeysPerChunk];
      for (int64_t i = begin; i < end; ++i) tables[i - begin] = batch.keys[i] == kPaddingKey ? kNoTable : feature.table;
      FindChunk(store.index, salt, batch.keys + begin, tables, end - begin, row_ids.data() + (begin - first),
                [](int64_t, uint32_t) {});
    }
    if (HasRowBeyond(store.capacity, row_ids.data(), last - first)) MaxAtomically(&is_damaged, uint32_t{1});
    CombineRows(store, feature, tile, batch, row_ids.data(), first, feature.unknown, embeddings,
                [&](const auto& rows) { CountTile(feature, tile, rows, kCountMissing, counts); });
  });
  return is_damaged != 0 ? kIndexIsDamaged : nullptr;
}

LaunchError LaunchLookupFrozen(Stream stream, const FrozenLookup* lookups, int32_t num_stores, int32_t* counts) {
  std::vector<int32_t> unasked;
  for (int32_t s = 0; s < num_stores; ++s) {
    const FrozenLookup& lookup = lookups[s];
    for (int32_t f = 0; f < lookup.batch.num_features; ++f) {
      if (lookup.batch.features[int64_t{f} * kNumFeatureWords + kFeatureNumBags] != lookup.num_bags[f]) {
        return "features: another number of bags than the embedding has lines";
      }
    }
    const int64_t num_counts = int64_t{lookup.store.num_tables} * kNumCounts;
    int32_t* store_counts = counts;
    if (counts == nullptr) {
      unasked.resize(static_cast<size_t>(num_counts));
      store_counts = unasked.data();
    } else {
      counts += num_counts;
    }
    BatchView batch = lookup.batch;
    std::vector<uint64_t> joined;
    if (lookup.key_arrays != nullptr) {
      joined.reserve(static_cast<size_t>(batch.num_keys));
      for (int32_t f = 0; f < batch.num_features; ++f) {
        const int32_t num_keys = batch.features[int64_t{f} * kNumFeatureWords + kFeatureNumKeys];
        joined.insert(joined.end(), lookup.key_arrays[f], lookup.key_arrays[f] + num_keys);
      }
      batch.keys = joined.data();
    }
    if (LaunchError error = LaunchLookupFind(stream, lookup.store, batch, lookup.embeddings, store_counts)) {
      return error;
    }
  }
  return nullptr;
}

LaunchError LaunchLookupPlanned(Stream stream, const StoreView& store, const BatchView& batch, const uint32_t* row_ids,
                                const EmbeddingsView& embeddings, int32_t* counts) {
  const BagFeatures bags(stream, batch);
  if (LaunchError error = CheckBatch(bags, store, embeddings, (batch.kinds & kSingleKeys) == 0)) return error;
  ClearCounts(counts, store.num_tables);
  CountBaglessFeatures(bags, counts);
  bags.ForEachTile(stream, [&](const Tile& tile, const FeatureView& feature) {
    constexpr int32_t kInitialRow = 0;  // a key without a row was refused: it trains on its initial row
    CombineRows(store, feature, tile, batch, row_ids, 0, kInitialRow, embeddings,
                [&](const auto& rows) { CountTile(feature, tile, rows, kCountRefused, counts); });
  });
  return nullptr;
}

}  // namespace jaxsok

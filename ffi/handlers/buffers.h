// Readers of the arguments that several handlers share: a store, its tables, a batch, admission, embeddings, gradients.
#ifndef JAXSOK_HANDLERS_BUFFERS_H_
#define JAXSOK_HANDLERS_BUFFERS_H_

#include <optional>
#include <vector>

#include "../kernels/update.h"
#include "call.h"

namespace jaxsok {

/// The arrays of a store, in the order in which every handler takes them; jaxsok/kernels/call.py names them too.
enum StoreArray : int32_t {
  kArrayIndex,         // u32[num_buckets, 16]
  kArrayCounters,      // u32[kNumCounters]
  kArrayTableRows,     // u32[num_tables]
  kArrayRows,          // slabs: f32, bf16 or f16 [slab capacity, dim]
  kArrayRecords,       // slabs: u32[slab capacity, 4]
  kArrayStates,        // num_states times the slabs: f32[slab capacity, width]
  kArrayStatistics,    // slabs: u32[slab capacity, 2]
  kArraySightings,     // none or one: u32[num_buckets, 16]
  kArrayBloom,         // none or one: u32[num_words]
  kArrayTableEvicted,  // none or one: u32[num_tables]
  kNumStoreArrays,
};

/// The arrays of a store that a call passes. Arrays that it does not pass are empty.
struct Store {
  StoreView view{};
  StateView states{};
  StatisticsView statistics{};  // starts.num_slabs is 0 if there are none
  AdmissionView admission{};    // sightings and Bloom filter
  uint32_t* table_evicted = nullptr;
};

inline IndexView IndexOf(const Array& index) { return {index.as<Bucket>(), static_cast<uint32_t>(index.size(0))}; }

/// Checks an index, or sightings: entries have 32-bit numbers.
inline void CheckIndex(Call& call, const char* name, const Array& index) {
  constexpr int64_t kMaxBuckets = (int64_t{1} << 32) / kEntriesPerBucket;
  const int64_t num_buckets = index.size(0);
  call.RequireWhole(num_buckets >= 1 && num_buckets < kMaxBuckets, name, "got ", num_buckets, " buckets, wanted 1 to ",
                    kMaxBuckets - 1);
}

/// Checks that the counters are possible for this number of rows, if the handler may read them.
///
/// On a GPU the kernels bound them where they use them (index_cuda.cuh, table_cuda.cu).
inline void CheckCounters(Call& call, const uint32_t* counters, uint32_t capacity) {
  if (!kIsHostMemory || call.failed()) return;
  const uint32_t begin = counters[kFreeBegin], end = counters[kFreeEnd], num_allocated = counters[kNumAllocated];
  const bool is_impossible = begin > end || end > num_allocated || num_allocated > capacity;
  call.RequireWhole(!is_impossible, "counters", "got the free rows ", begin, " to ", end, " of ", num_allocated,
                    " rows handed out, wanted each at most the next, and at most the capacity ", capacity);
}

/// Returns the row dtype of an element type; nothing if rows are never stored in it.
inline std::optional<RowDtype> RowDtypeOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32:
      return kRowDtypeFloat32;
    case ffi::BF16:
      return kRowDtypeBfloat16;
    case ffi::F16:
      return kRowDtypeFloat16;
    default:
      return std::nullopt;
  }
}

/// Reads the dtype in which rows are gathered: float32, bfloat16, or the stored dtype.
inline RowDtype ReadGathered(Call& call, ffi::DataType dtype, const StoreView& store) {
  const std::optional<RowDtype> found = RowDtypeOf(dtype);
  const bool is_possible = found == kRowDtypeFloat32 || found == kRowDtypeBfloat16 || found == store.row_dtype;
  call.Require(is_possible, "rows", "got dtype ", dtype, ", wanted float32, bfloat16 or that of the store");
  return found.value_or(kRowDtypeFloat32);
}

/// Arrays of rows with one dtype.
class RowArrays {
 public:
  RowArrays(Call& call, const char* name) : call_(call), name_(name) {}

  void* Add(const Array& array) {
    const std::optional<RowDtype> found = RowDtypeOf(array.dtype());
    const bool is_same = found.has_value() && (data_.empty() || dtype_ == *found);
    call_.Require(is_same, name_, "wanted float32, bfloat16 or float16, the same in all");
    dtype_ = found.value_or(kRowDtypeFloat32);
    data_.push_back(array.as<void>());
    return data_.back();
  }
  /// Adds the arrays that `next()` returns: one for each feature, or fewer, which neighbouring features share in equal
  /// parts.
  template <typename Next>
  void AddOfFeatures(int32_t num_features, size_t num_arrays, const Next& next) {
    const auto n = static_cast<int64_t>(num_arrays), parts = n == 0 ? 0 : num_features / n;
    call_.Require(parts * n == num_features, name_, "got ", n, " arrays, wanted one for each of ", num_features,
                  " features, or one for several");
    for (int64_t a = 0; a < n && !call_.failed(); ++a) {
      const Array array = next();
      auto* begin = static_cast<char*>(Add(array));
      call_.Require(array.size(0) % parts == 0, name_, "got ", array.size(0), " lines, wanted ", parts, " equal parts");
      for (int64_t p = 1; p < parts; ++p) data_.push_back(begin + p * (array.num_bytes() / parts));
    }
  }
  RowDtype dtype() const { return dtype_; }
  void* const* data() const { return data_.data(); }

 private:
  Call& call_;
  const char* name_;
  RowDtype dtype_ = kRowDtypeFloat32;
  std::vector<void*> data_;
};

/// Reads per-row arrays in slabs, all of which must have the slabs of the first array.
class SlabReader {
 public:
  SlabReader(Call& call, int64_t num_slabs) : call_(call) {
    call.Require(num_slabs >= 1 && num_slabs <= kMaxSlabs, "num_slabs", "got ", num_slabs, ", wanted 1 to ", kMaxSlabs);
    starts_.num_slabs = call.failed() ? 0 : static_cast<int32_t>(num_slabs);  // views hold at most kMaxSlabs
  }

  /// Reads the slabs of an array: `next()` returns the next slab, `take(s, slab)` stores it. Returns the words of a
  /// row.
  template <typename Next, typename Take>
  int64_t Read(const char* name, const Next& next, const Take& take) {
    uint64_t start = 0;
    int64_t words = -1;
    for (int s = 0; s < starts_.num_slabs && !call_.failed(); ++s) {
      const Array slab = next();
      call_.CheckShape(name, slab.dims(), {-1, words});
      words = slab.size(1);
      if (capacity_ == 0) starts_.start[s] = static_cast<uint32_t>(start);
      call_.Require(starts_.start[s] == start, name, "slabs of another size than the rows'");
      call_.Require(slab.size(0) >= 1, name, "got a slab without rows");
      take(s, slab);
      start += static_cast<uint64_t>(slab.size(0));
    }
    if (capacity_ == 0) capacity_ = start;
    call_.Require(start == capacity_ && start < (uint64_t{1} << 31), name, "got ", start, " rows, wanted ", capacity_,
                  ", below 2^31");
    return words;
  }

  const SlabStarts& starts() const { return starts_; }
  uint32_t capacity() const { return static_cast<uint32_t>(capacity_); }

 private:
  Call& call_;
  SlabStarts starts_{};
  uint64_t capacity_ = 0;
};

/// Reads the arrays of a store that the call passes: the attribute `store` counts them by kind, and the bits of
/// `store_in_place` say which kinds are also results.
inline Store ReadStore(Call& call) {
  Store store;
  StoreView& view = store.view;
  const auto counts = call.Attribute<ffi::Span<const int32_t>>("store");
  const auto in_place = call.Attribute<int32_t>("store_in_place");
  call.Require(counts.size() == kNumStoreArrays, "store", "got ", counts.size(), " counts, wanted ", +kNumStoreArrays);
  if (call.failed()) return store;
  const auto next = [&](StoreArray kind, const char* name, ffi::DataType dtype, Shape shape) {
    return (in_place >> kind & 1) != 0 ? call.InPlace(name, dtype, shape) : call.Operand(name, dtype, shape);
  };
  const auto has = [&](StoreArray kind) { return counts[kind] != 0; };

  if (has(kArrayIndex)) {
    const Array index = next(kArrayIndex, "index", ffi::U32, {-1, kEntriesPerBucket * 4});
    CheckIndex(call, "index", index);
    view.index = IndexOf(index);
  }
  if (has(kArrayCounters)) {
    view.counters = next(kArrayCounters, "counters", ffi::U32, {kNumCounters}).as<uint32_t>();
  }
  if (has(kArrayTableRows)) {
    const Array table_rows = next(kArrayTableRows, "table_rows", ffi::U32, {-1});
    view.table_rows = table_rows.as<uint32_t>();
    view.num_tables = static_cast<int32_t>(table_rows.size(0));
  }

  // All per-row arrays have the same number of slabs; optimizer state has several arrays.
  const StoreArray any_of[] = {kArrayRows, kArrayRecords, kArrayStatistics};
  int64_t num_slabs = 0;
  for (StoreArray kind : any_of) num_slabs = has(kind) ? counts[kind] : num_slabs;
  if (num_slabs != 0) {
    SlabReader slabs(call, num_slabs);
    for (StoreArray kind : any_of) {
      call.Require(!has(kind) || counts[kind] == num_slabs, "store", "got ", counts[kind], " slabs, wanted ",
                   num_slabs);
    }
    if (has(kArrayRows)) {
      RowArrays rows(call, "rows");
      const auto next_rows = [&] {
        return (in_place >> kArrayRows & 1) != 0 ? call.InPlace("rows") : call.Operand("rows");
      };
      const auto take = [&](int s, const Array& slab) { view.rows.data[s] = rows.Add(slab); };
      view.dim = static_cast<int32_t>(slabs.Read("rows", next_rows, take));
      view.row_dtype = rows.dtype();
    }
    const auto read = [&](StoreArray kind, const char* name, ffi::DataType dtype, auto& array, int64_t wanted_words) {
      using T = std::remove_reference_t<decltype(*array.data[0])>;
      const auto next_slab = [&] { return next(kind, name, dtype, {-1, -1}); };
      const int64_t words = slabs.Read(name, next_slab, [&](int s, const Array& a) { array.data[s] = a.as<T>(); });
      const bool is_wanted = wanted_words < 0 || words == wanted_words;
      call.Require(is_wanted, name, "got ", words, " words a row, wanted ", wanted_words);
      return static_cast<int32_t>(words);
    };
    if (has(kArrayRecords)) read(kArrayRecords, "records", ffi::U32, view.records, 4);
    const int64_t num_states = counts[kArrayStates] / num_slabs;
    call.Require(num_states >= 0 && num_states <= kMaxStates && num_states * num_slabs == counts[kArrayStates],
                 "states", "got ", num_states, ", wanted 0 to ", +kMaxStates);
    store.states.num_states = call.failed() ? 0 : static_cast<int32_t>(num_states);
    for (int32_t k = 0; k < store.states.num_states; ++k) {
      store.states.width[k] = read(kArrayStates, "states", ffi::F32, store.states.data[k], -1);
    }
    if (has(kArrayStatistics)) {
      read(kArrayStatistics, "statistics", ffi::U32, store.statistics.data, 2);
      store.statistics.starts = slabs.starts();
      store.statistics.capacity = slabs.capacity();
    }
    view.starts = slabs.starts();
    view.capacity = slabs.capacity();
  }

  if (has(kArraySightings)) {
    const Array sightings = next(kArraySightings, "sightings", ffi::U32, {-1, kEntriesPerBucket * 4});
    CheckIndex(call, "sightings", sightings);
    store.admission.sightings = IndexOf(sightings);
  }
  if (has(kArrayBloom)) {
    const Array bloom = next(kArrayBloom, "bloom", ffi::U32, {-1});
    store.admission.bloom = bloom.as<uint32_t>();
    store.admission.num_bloom_words = static_cast<uint64_t>(bloom.size(0));
  }
  if (has(kArrayTableEvicted)) {
    store.table_evicted = next(kArrayTableEvicted, "table_evicted", ffi::U32, {view.num_tables}).as<uint32_t>();
  }
  // Rows without an index or records may belong to another state, which the counters do not describe.
  const bool is_own = view.capacity != 0 && (has(kArrayIndex) || has(kArrayRecords));
  if (is_own && has(kArrayCounters)) CheckCounters(call, view.counters, view.capacity);
  return store;
}

/// Reads the initial optimizer state: the attribute `initial` has one number for each kind of state.
inline void ReadInitial(Call& call, StateView& states) {
  const auto initial = call.Attribute<ffi::Span<const float>>("initial");
  const auto num_states = static_cast<size_t>(states.num_states);
  call.Require(initial.size() == num_states, "initial", "got ", initial.size(), " numbers, wanted ", num_states);
  for (size_t k = 0; k < num_states && !call.failed(); ++k) states.initial[k] = initial[k];
}

/// Reads the table words and the seed of a store.
inline void ReadTables(Call& call, StoreView& store) {
  const int64_t wanted = store.table_rows != nullptr ? store.num_tables : -1;
  const Array tables = call.Operand("tables", ffi::U32, {wanted, kNumTableWords});
  store.tables = tables.as<uint32_t>();
  store.seed = call.Operand("seed", ffi::U32, {2}).as<uint32_t>();
  store.num_tables = static_cast<int32_t>(tables.size(0));
}

/// Reads what decides which unseen keys get a row; nothing if all are admitted. The attribute `admission`: 0 admits all
/// keys, 1 lets the tables decide, 3 also says that positions stand for several uses.
inline const AdmissionView* ReadAdmission(Call& call, int64_t num_keys, Store& store) {
  const auto asked = call.Attribute<int32_t>("admission");
  if (asked == 0) return nullptr;
  AdmissionView& view = store.admission;
  const int32_t num_tables = store.view.num_tables;
  view.step = call.Operand("step", ffi::U32, {}).as<uint32_t>();
  view.refused = call.Operand("refused", ffi::U32, {num_tables, kNumTableWords}).as<uint32_t>();
  if ((asked & 2) != 0) view.uses = call.Operand("uses", ffi::U32, {num_keys}).as<uint32_t>();
  for (int32_t t = 0; kIsHostMemory && t < num_tables && !call.failed(); ++t) {
    const uint32_t* words = store.view.tables + int64_t{t} * kNumTableWords;
    const uint64_t bloom_end = uint64_t{words[kTableBloomBegin]} * 4 + words[kTableBloomSize];
    const bool needs_sightings = words[kTableAdmission] == kAdmitByCount,
               needs_bloom = words[kTableAdmission] == kAdmitByBloom;
    call.RequireWhole(!needs_sightings || view.sightings.num_buckets != 0, "sightings",
                      "got none, wanted those of a table that admits by count");
    call.RequireWhole(!needs_bloom || bloom_end <= view.num_bloom_words * 4, "bloom", "got ", view.num_bloom_words * 4,
                      " counters, wanted ", bloom_end);
  }
  return &view;
}

/// Reads the result of a meeting (handlers/window.cc), which has no content: a call that takes it comes after it.
inline void ReadMeeting(Call& call) { call.Operand("met", ffi::U32, {1}); }

/// Reads keys as 64-bit words: low, high.
inline Array ReadKeys(Call& call) { return call.Operand("keys", ffi::U32, {-1, 2}); }

/// Reads the positions of `num_keys` keys in the bags of features, and checks them against each other.
inline BatchView ReadBags(Call& call, int64_t num_keys, int32_t num_tiles) {
  const Array offsets = call.Operand("offsets", ffi::S32, {-1}), weights = call.Operand("weights", ffi::F32, {-1});
  const Array features = call.Operand("features", ffi::S32, {-1, kNumFeatureWords});
  BatchView batch{};
  batch.offsets = offsets.as<int32_t>();
  batch.weights = weights.as<float>();
  batch.features = features.as<int32_t>();
  batch.num_keys = num_keys;
  batch.num_features = static_cast<int32_t>(features.size(0));
  batch.num_tiles = num_tiles;
  batch.num_offsets = offsets.size(0);
  for (int32_t f = 0; kIsHostMemory && f < batch.num_features; ++f) {
    const int32_t* words = batch.features + int64_t{f} * kNumFeatureWords;
    const int64_t offsets_end = int64_t{words[kFeatureOffsetsStart]} + words[kFeatureNumBags] + 1;
    const int64_t weights_end = int64_t{words[kFeatureWeightsStart]} + words[kFeatureNumKeys];
    const bool is_ragged = words[kFeatureHotness] == 0, is_weighted = words[kFeatureWeightsStart] >= 0;
    call.Require(!is_ragged || (words[kFeatureOffsetsStart] >= 0 && offsets_end <= batch.num_offsets), "offsets",
                 "got ", batch.num_offsets, " of them, wanted ", offsets_end);
    call.Require(!is_weighted || weights_end <= weights.size(0), "weights", "got ", weights.size(0),
                 " of them, wanted ", weights_end);
  }
  return batch;
}

/// Reads a batch: its keys and their bags.
inline BatchView ReadBatch(Call& call, int32_t num_tiles) {
  const Array keys = ReadKeys(call);
  BatchView batch = ReadBags(call, keys.size(0), num_tiles);
  batch.keys = keys.as<uint64_t>();
  return batch;
}
inline BatchView ReadBatch(Call& call) { return ReadBatch(call, call.Attribute<int32_t>("num_tiles")); }

/// Reads in which dtype numbers cross a wire.
inline RowDtype ReadWireDtype(Call& call) {
  return call.Attribute<int32_t>("is_bfloat16") != 0 ? kRowDtypeBfloat16 : kRowDtypeFloat32;
}

/// Reads the table of each key; empty if the features determine it.
inline void ReadTableIds(Call& call, BatchView& batch) {
  const Array table_ids = call.Operand("table_ids", ffi::U32, {-1});
  if (table_ids.size(0) == 0) return;
  call.CheckShape("table_ids", table_ids.dims(), {batch.num_keys});
  batch.tables = table_ids.as<uint32_t>();
}

/// Reads the embeddings of all features, the last results. The view points into `arrays`.
inline EmbeddingsView ReadEmbeddings(Call& call, int32_t num_features, RowArrays& arrays) {
  arrays.AddOfFeatures(num_features, call.num_results_left(), [&] { return call.Result("embeddings"); });
  return {arrays.dtype(), arrays.data()};
}

}  // namespace jaxsok

#endif  // JAXSOK_HANDLERS_BUFFERS_H_

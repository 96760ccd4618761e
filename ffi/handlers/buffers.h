// The buffers of the handlers by name (the words of types.py), and the views that kernels take.
#ifndef JAXSOK_HANDLERS_BUFFERS_H_
#define JAXSOK_HANDLERS_BUFFERS_H_

#include <optional>
#include <vector>

#include "../kernels/update.h"
#include "bind.h"
#include "check.h"

namespace jaxsok {

using Index = ffi::Buffer<ffi::U32>;      // [num_buckets, 16]
using Counters = ffi::Buffer<ffi::U32>;   // [kNumCounters]
using TableRows = ffi::Buffer<ffi::U32>;  // [num_tables]
using Tables = ffi::Buffer<ffi::U32>;     // [num_tables, kNumTableWords]
using Seed = ffi::Buffer<ffi::U32>;       // [2]
using Keys = ffi::Buffer<ffi::U32>;       // [num_keys, 2]: low, high
using TableIds = ffi::Buffer<ffi::U32>;   // [num_keys]
using Offsets = ffi::Buffer<ffi::S32>;    // one vector for all ragged features
using Weights = ffi::Buffer<ffi::F32>;    // one vector for all weighted features
using Features = ffi::Buffer<ffi::S32>;   // [num_features, kNumFeatureWords]
using RowIds = ffi::Buffer<ffi::U32>;     // [num_keys]
using Counts = ffi::Buffer<ffi::S32>;     // [num_tables, kNumCounts]
using Rows = ffi::Buffer<ffi::F32>;       // [num_rows, dim]: rows at hand; those of a store may have 16 bits
using Records = ffi::Buffer<ffi::U32>;    // [slab capacity, 4]
using Requests = ffi::Buffer<ffi::U32>;   // [num_requests, 4]
using Uses = ffi::Buffer<ffi::U32>;       // [num_keys]: occurrences of each; [0]: one of each
using Inverse = ffi::Buffer<ffi::S32>;    // [num_keys]
using Workspace = ffi::Buffer<ffi::U8>;
using Scalar = ffi::Buffer<ffi::U32>;  // []

inline const uint64_t* KeysOf(const Keys& keys) { return reinterpret_cast<const uint64_t*>(keys.typed_data()); }

inline IndexView IndexOf(const Index& index) {
  return {reinterpret_cast<Bucket*>(index.typed_data()), static_cast<uint32_t>(index.dimensions()[0])};
}

/// What is said of arrays whose contents no op could have left.
inline ffi::Error Damaged(const char* op, const char* argument, const std::string& got, const std::string& wanted) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + argument + ": got " + got + ", wanted " + wanted +
                                     "; the state is damaged: restore it from a checkpoint.");
}

/// Checks an index, or sightings: entries have numbers of 32 bits.
inline ffi::Error CheckIndex(const Index& index, const char* argument, const char* op) {
  constexpr int64_t kMaxBuckets = (int64_t{1} << 32) / kEntriesPerBucket;
  JAXSOK_RETURN_IF_ERROR(CheckShape(index.dimensions(), {-1, kEntriesPerBucket * 4}, argument, op));
  const int64_t num_buckets = index.dimensions()[0];
  if (num_buckets >= 1 && num_buckets < kMaxBuckets) return ffi::Error::Success();
  return Damaged(op, argument, std::to_string(num_buckets) + " buckets", "1 to " + std::to_string(kMaxBuckets - 1));
}

/// Checks counters: their number and, where a handler may read them, that they are possible with so many rows.
///
/// On a GPU the kernels bound them where they use them (index_cuda.cuh, table_cuda.cu).
inline ffi::Error CheckCounters(const Counters& counters, uint32_t capacity, const char* op) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(counters.dimensions(), {kNumCounters}, "counters", op));
  if constexpr (kIsHostMemory) {
    const uint32_t* words = counters.typed_data();
    const uint32_t begin = words[kFreeBegin], end = words[kFreeEnd], num_allocated = words[kNumAllocated];
    if (begin > end || end > num_allocated || num_allocated > capacity) {
      return Damaged(op, "counters",
                     "the free rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                         std::to_string(num_allocated) + " rows handed out",
                     "each at most the next, and at most the capacity " + std::to_string(capacity));
    }
  }
  return ffi::Error::Success();
}

/// How a buffer's numbers are stored; nothing where no row is stored so.
inline std::optional<RowDtype> RowDtypeOf(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
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

/// Reads the dtype that the buffers of one argument share; `dtype` is empty before the first.
inline ffi::Error ReadRowDtype(const ffi::AnyBuffer& buffer, const char* argument, const char* op,
                               std::optional<RowDtype>& dtype) {
  const std::optional<RowDtype> found = RowDtypeOf(buffer);
  if (!found.has_value() || (dtype.has_value() && dtype != found)) {
    return ffi::Error::InvalidArgument(std::string(op) + ": " + argument +
                                       ": wanted float32, bfloat16 or float16, the same in all");
  }
  dtype = found;
  return ffi::Error::Success();
}

/// The features of a batch and how its keys lie in bags, checked against each other.
inline ffi::Error ReadBags(int64_t num_keys, const Offsets& offsets, const Weights& weights, const Features& features,
                           int32_t num_tiles, const char* op, BatchView& batch) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(features.dimensions(), {-1, kNumFeatureWords}, "features", op));
  batch.offsets = offsets.typed_data();
  batch.weights = weights.typed_data();
  batch.features = features.typed_data();
  batch.num_keys = num_keys;
  batch.num_features = static_cast<int32_t>(features.dimensions()[0]);
  batch.num_tiles = num_tiles;
  batch.num_offsets = static_cast<int64_t>(offsets.element_count());
  const int64_t num_weights = static_cast<int64_t>(weights.element_count());
  for (int32_t f = 0; kIsHostMemory && f < batch.num_features; ++f) {
    const int32_t* words = batch.features + int64_t{f} * kNumFeatureWords;
    const int64_t offsets_end = int64_t{words[kFeatureOffsetsStart]} + words[kFeatureNumBags] + 1;
    if (words[kFeatureHotness] == 0 && (words[kFeatureOffsetsStart] < 0 || offsets_end > batch.num_offsets)) {
      return ffi::Error::InvalidArgument(std::string(op) + ": offsets: got " + std::to_string(batch.num_offsets) +
                                         " of them, wanted " + std::to_string(offsets_end));
    }
    const int64_t weights_end = int64_t{words[kFeatureWeightsStart]} + words[kFeatureNumKeys];
    if (words[kFeatureWeightsStart] >= 0 && weights_end > num_weights) {
      return ffi::Error::InvalidArgument(std::string(op) + ": weights: got " + std::to_string(num_weights) +
                                         " of them, wanted " + std::to_string(weights_end));
    }
  }
  return ffi::Error::Success();
}

/// The features' part of a batch, with its keys.
inline ffi::Error ReadBatch(const Keys& keys, const Offsets& offsets, const Weights& weights, const Features& features,
                            int32_t num_tiles, const char* op, BatchView& batch) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(keys.dimensions(), {-1, 2}, "keys", op));
  batch.keys = KeysOf(keys);
  return ReadBags(keys.dimensions()[0], offsets, weights, features, num_tiles, op, batch);
}

/// Reads slabs from consecutive operands; `starts` is filled from the first array read and holds for all.
class SlabReader {
 public:
  SlabReader(const ffi::RemainingArgs& args, int32_t num_slabs, const char* op) : args_(args), op_(op) {
    starts_.num_slabs = num_slabs;
  }

  /// The next `num_slabs` operands as one per-row array of `T`, whose line has `words` words of the buffer's type.
  template <ffi::DataType dtype, typename T>
  ffi::Error Read(const char* argument, Slabs<T>& slabs, int64_t* words) {
    return ReadEach(argument, words, [&](int s) -> ffi::ErrorOr<ffi::AnyBuffer::Dimensions> {
      auto buffer = args_.get<ffi::Buffer<dtype>>(next_ + s);
      if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
      slabs.data[s] = reinterpret_cast<T*>(buffer->typed_data());
      return buffer->dimensions();
    });
  }

  /// The next `num_slabs` operands as records.
  ffi::Error ReadRecords(Slabs<Record>& records) {
    int64_t words = 0;
    JAXSOK_RETURN_IF_ERROR(Read<ffi::U32>("records", records, &words));
    return CheckWidth("records", words, 4);
  }

  /// The next `num_slabs` operands as a store's statistics.
  template <typename T>
  ffi::Error ReadStatistics(Slabs<T>& statistics) {
    int64_t words = 0;
    JAXSOK_RETURN_IF_ERROR(Read<ffi::U32>("statistics", statistics, &words));
    return CheckWidth("statistics", words, 2);
  }

  /// The next operands as optimizer state, in slabs; `initial`: what a row's state is before its first step.
  ffi::Error ReadStates(int32_t num_states, StateView& states, const float* initial = nullptr) {
    if (num_states < 0 || num_states > kMaxStates) {
      return ffi::Error::InvalidArgument(std::string(op_) + ": states: got " + std::to_string(num_states) +
                                         ", wanted 0 to " + std::to_string(kMaxStates));
    }
    states.num_states = num_states;
    for (int k = 0; k < num_states; ++k) {
      int64_t width = 0;
      JAXSOK_RETURN_IF_ERROR(Read<ffi::F32>("states", states.data[k], &width));
      states.width[k] = static_cast<int32_t>(width);
      if (initial != nullptr) states.initial[k] = initial[k];
    }
    return ffi::Error::Success();
  }

  /// Refuses lines of a per-row array that have another number of words.
  ffi::Error CheckWidth(const char* argument, int64_t got, int64_t wanted) const {
    if (got == wanted) return ffi::Error::Success();
    return ffi::Error::InvalidArgument(std::string(op_) + ": " + argument + ": got " + std::to_string(got) +
                                       " words a row, wanted " + std::to_string(wanted));
  }

  /// The next `num_slabs` operands as a store's rows.
  ffi::Error ReadRows(StoreView& store) {
    int64_t dim = 0;
    std::optional<RowDtype> dtype;
    JAXSOK_RETURN_IF_ERROR(ReadEach("rows", &dim, [&](int s) -> ffi::ErrorOr<ffi::AnyBuffer::Dimensions> {
      auto buffer = args_.get<ffi::AnyBuffer>(next_ + s);
      if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
      if (ffi::Error error = ReadRowDtype(*buffer, "rows", op_, dtype); error.failure()) return ffi::Unexpected(error);
      store.rows.data[s] = buffer->untyped_data();
      return buffer->dimensions();
    }));
    store.dim = static_cast<int32_t>(dim);
    store.row_dtype = *dtype;
    return ffi::Error::Success();
  }

  /// The next `num_slabs` operands as lines of any numbers, of the dtype and width of `like`.
  ffi::Error ReadLines(const char* argument, const ffi::AnyBuffer& like, LinesView& array) {
    int64_t width = 0;
    JAXSOK_RETURN_IF_ERROR(ReadEach(argument, &width, [&](int s) -> ffi::ErrorOr<ffi::AnyBuffer::Dimensions> {
      auto buffer = args_.get<ffi::AnyBuffer>(next_ + s);
      if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
      if (buffer->element_type() != like.element_type()) {
        return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(op_) + ": " + argument + ": mixed dtypes"));
      }
      array.data.data[s] = static_cast<uint8_t*>(buffer->untyped_data());
      return buffer->dimensions();
    }));
    JAXSOK_RETURN_IF_ERROR(CheckShape(like.dimensions(), {-1, width}, "lines", op_));
    array.line_bytes = width * static_cast<int64_t>(ffi::ByteWidth(like.element_type()));
    array.starts = starts_;
    array.capacity = capacity();
    return ffi::Error::Success();
  }

  const SlabStarts& starts() const { return starts_; }
  uint32_t capacity() const { return static_cast<uint32_t>(capacity_); }
  size_t next() const { return next_; }

 private:
  /// Checks slabs against each other and against those of the first array read; read(s) gives the dimensions of one.
  template <typename ReadOne>
  ffi::Error ReadEach(const char* argument, int64_t* words, const ReadOne& read) {
    if (starts_.num_slabs < 1 || starts_.num_slabs > kMaxSlabs) {
      return ffi::Error::InvalidArgument(std::string(op_) + ": num_slabs: got " + std::to_string(starts_.num_slabs) +
                                         ", wanted 1 to " + std::to_string(kMaxSlabs));
    }
    uint64_t start = 0;
    for (int s = 0; s < starts_.num_slabs; ++s) {
      const auto found = read(s);
      if (!found.has_value()) return found.error();
      const auto dims = *found;
      JAXSOK_RETURN_IF_ERROR(CheckShape(dims, {-1, s == 0 ? -1 : *words}, argument, op_));
      if (s == 0) *words = dims[1];
      if (capacity_ == 0) {
        starts_.start[s] = static_cast<uint32_t>(start);
      } else if (starts_.start[s] != start) {
        return ffi::Error::InvalidArgument(std::string(op_) + ": " + argument +
                                           ": slabs of another size than the rows'");
      }
      if (dims[0] < 1) {
        return ffi::Error::InvalidArgument(std::string(op_) + ": " + argument + ": got a slab without rows");
      }
      start += static_cast<uint64_t>(dims[0]);
    }
    next_ += starts_.num_slabs;
    if (capacity_ == 0) capacity_ = start;
    if (start != capacity_ || start >= (uint64_t{1} << 31)) {
      return ffi::Error::InvalidArgument(std::string(op_) + ": " + argument + ": got " + std::to_string(start) +
                                         " rows, wanted " + std::to_string(capacity_) + ", below 2^31");
    }
    return ffi::Error::Success();
  }

  const ffi::RemainingArgs& args_;
  const char* op_;
  SlabStarts starts_{};
  uint64_t capacity_ = 0;
  size_t next_ = 0;
};

/// Index, counters and rows by table of a store whose slabs are read.
inline ffi::Error ReadIndex(const SlabReader& slabs, const Index& index, const Counters& counters,
                            const TableRows& table_rows, const char* op, StoreView& store) {
  store.starts = slabs.starts();
  store.capacity = slabs.capacity();
  JAXSOK_RETURN_IF_ERROR(CheckIndex(index, "index", op));
  JAXSOK_RETURN_IF_ERROR(CheckCounters(counters, store.capacity, op));
  JAXSOK_RETURN_IF_ERROR(CheckShape(table_rows.dimensions(), {-1}, "table_rows", op));
  store.index = IndexOf(index);
  store.counters = counters.typed_data();
  store.table_rows = table_rows.typed_data();
  store.num_tables = static_cast<int32_t>(table_rows.dimensions()[0]);
  return ffi::Error::Success();
}

/// The tables of a store; `num_tables`: as many as there must be, -1: any number.
inline ffi::Error ReadTables(const Tables& tables, const Seed& seed, const char* op, StoreView& store,
                             int64_t num_tables = -1) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(tables.dimensions(), {num_tables, kNumTableWords}, "tables", op));
  JAXSOK_RETURN_IF_ERROR(CheckShape(seed.dimensions(), {2}, "seed", op));
  store.tables = tables.typed_data();
  store.seed = seed.typed_data();
  store.num_tables = static_cast<int32_t>(tables.dimensions()[0]);
  return ffi::Error::Success();
}

/// The store of ops that only read rows: those come first among the operands after the named ones.
inline ffi::Error ReadOnlyStore(const Tables& tables, const Seed& seed, const ffi::RemainingArgs& args,
                                int32_t num_slabs, const char* op, StoreView& store) {
  SlabReader slabs(args, num_slabs, op);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRows(store));
  store.starts = slabs.starts();
  store.capacity = slabs.capacity();
  JAXSOK_RETURN_IF_ERROR(ReadTables(tables, seed, op, store));
  return ffi::Error::Success();
}

/// Checks that the first results after the named ones alias the first operands after the named ones.
inline ffi::Error CheckSlabAliases(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, size_t first_arg,
                                   size_t first_ret, size_t count, const char* op) {
  for (size_t i = 0; i < count; ++i) {
    auto arg = args.get<ffi::AnyBuffer>(first_arg + i);
    auto ret = rets.get<ffi::AnyBuffer>(first_ret + i);
    if (!arg.has_value()) return arg.error();
    if (!ret.has_value()) return ret.error();
    JAXSOK_RETURN_IF_ERROR(CheckAlias(arg->untyped_data(), (*ret)->untyped_data(), "slab", op));
  }
  return ffi::Error::Success();
}

/// The statistics of a store: the next operands of `slabs`.
inline ffi::Error ReadStatistics(SlabReader& slabs, StatisticsView& statistics) {
  JAXSOK_RETURN_IF_ERROR(slabs.ReadStatistics(statistics.data));
  statistics.starts = slabs.starts();
  statistics.capacity = slabs.capacity();
  return ffi::Error::Success();
}

/// Which operands a store with admission brings, after the slabs and in this order; bits of the attribute `admission`.
/// kernels/table.py names them too. 0: everyone is let in.
enum AdmissionOperand : int32_t {
  kAdmissionAsked = 1,  // step and refused, after the next two
  kSightingsGiven = 2,  // in place, as the slabs
  kBloomGiven = 4,      // in place
  kUsesGiven = 8,       // the last
};

/// Reads them; `admission` is left empty where there are none. `num_aliased`: slabs before them, then with those that
/// are in place.
inline ffi::Error ReadAdmission(const ffi::RemainingArgs& args, int32_t operands, int64_t num_keys,
                                const StoreView& store, const char* op, std::optional<AdmissionView>& admission,
                                size_t* num_aliased) {
  if ((operands & kAdmissionAsked) == 0) return ffi::Error::Success();
  AdmissionView view{};
  size_t next = *num_aliased;
  const auto read = [&](const char* argument, std::initializer_list<int64_t> shape, auto** data) -> ffi::Error {
    auto buffer = args.get<ffi::Buffer<ffi::U32>>(next++);
    if (!buffer.has_value()) return buffer.error();
    *data = reinterpret_cast<std::remove_reference_t<decltype(*data)>>(buffer->typed_data());
    return CheckShape(buffer->dimensions(), shape, argument, op);
  };
  if ((operands & kSightingsGiven) != 0) {
    auto buffer = args.get<ffi::Buffer<ffi::U32>>(next);
    if (!buffer.has_value()) return buffer.error();
    JAXSOK_RETURN_IF_ERROR(CheckIndex(*buffer, "sightings", op));
    view.sightings = IndexOf(*buffer);
    ++next;
  }
  if ((operands & kBloomGiven) != 0) {
    auto buffer = args.get<ffi::Buffer<ffi::U32>>(next);
    if (!buffer.has_value()) return buffer.error();
    JAXSOK_RETURN_IF_ERROR(read("bloom", {-1}, &view.bloom));
    view.num_bloom_words = static_cast<uint64_t>(buffer->element_count());
  }
  *num_aliased = next;
  JAXSOK_RETURN_IF_ERROR(read("step", {}, &view.step));
  JAXSOK_RETURN_IF_ERROR(read("refused", {store.num_tables, kNumTableWords}, &view.refused));
  if ((operands & kUsesGiven) != 0) JAXSOK_RETURN_IF_ERROR(read("uses", {num_keys}, &view.uses));
  for (int32_t t = 0; kIsHostMemory && t < store.num_tables; ++t) {
    const uint32_t* words = store.tables + int64_t{t} * kNumTableWords;
    const uint64_t bloom_end = uint64_t{words[kTableBloomBegin]} * 4 + words[kTableBloomSize];
    if (words[kTableAdmission] == kAdmitByCount && view.sightings.num_buckets == 0) {
      return Damaged(op, "sightings", "none", "those of a table that admits by count");
    }
    if (words[kTableAdmission] == kAdmitByBloom && bloom_end > view.num_bloom_words * 4) {
      return Damaged(op, "bloom", std::to_string(view.num_bloom_words * 4) + " counters", std::to_string(bloom_end));
    }
  }
  admission = view;
  return ffi::Error::Success();
}

/// The embeddings of all features: results from `first` on. `data` holds what the view points to.
inline ffi::Error ReadEmbeddings(const ffi::RemainingRets& rets, size_t first, int32_t num_features, const char* op,
                                 std::vector<void*>& data, EmbeddingsView& embeddings) {
  std::optional<RowDtype> dtype;
  for (int32_t f = 0; f < num_features; ++f) {
    auto buffer = rets.get<ffi::AnyBuffer>(first + f);
    if (!buffer.has_value()) return buffer.error();
    JAXSOK_RETURN_IF_ERROR(ReadRowDtype(**buffer, "embeddings", op, dtype));
    data.push_back((*buffer)->untyped_data());
  }
  embeddings = {dtype.value_or(kRowDtypeFloat32), data.data()};
  return ffi::Error::Success();
}

/// Their gradients: operands from `first` on.
inline ffi::Error ReadGradients(const ffi::RemainingArgs& args, size_t first, int32_t num_features, const char* op,
                                std::vector<const void*>& data, GradientsView& gradients) {
  std::optional<RowDtype> dtype;
  for (int32_t f = 0; f < num_features; ++f) {
    auto buffer = args.get<ffi::AnyBuffer>(first + f);
    if (!buffer.has_value()) return buffer.error();
    JAXSOK_RETURN_IF_ERROR(ReadRowDtype(*buffer, "gradients", op, dtype));
    data.push_back(buffer->untyped_data());
  }
  gradients = {dtype.value_or(kRowDtypeFloat32), data.data()};
  return ffi::Error::Success();
}

}  // namespace jaxsok

#endif  // JAXSOK_HANDLERS_BUFFERS_H_

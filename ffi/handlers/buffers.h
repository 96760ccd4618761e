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

/// The features' part of a batch, checked against each other.
inline ffi::Error ReadBatch(const Keys& keys, const Offsets& offsets, const Weights& weights, const Features& features,
                            int32_t num_tiles, const char* op, BatchView& batch) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(keys.dimensions(), {-1, 2}, "keys", op));
  JAXSOK_RETURN_IF_ERROR(CheckShape(features.dimensions(), {-1, kNumFeatureWords}, "features", op));
  batch.keys = KeysOf(keys);
  batch.offsets = offsets.typed_data();
  batch.weights = weights.typed_data();
  batch.features = features.typed_data();
  batch.num_keys = keys.dimensions()[0];
  batch.num_features = static_cast<int32_t>(features.dimensions()[0]);
  batch.num_tiles = num_tiles;
  batch.num_offsets = static_cast<int64_t>(offsets.element_count());
  return ffi::Error::Success();
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

/// The store of ops that only read rows: those come first among the operands after the named ones.
inline ffi::Error ReadOnlyStore(Tables tables, Seed seed, const ffi::RemainingArgs& args, int32_t num_slabs,
                                const char* op, StoreView& store) {
  SlabReader slabs(args, num_slabs, op);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRows(store));
  store.tables = tables.typed_data();
  store.seed = seed.typed_data();
  store.starts = slabs.starts();
  store.capacity = slabs.capacity();
  store.num_tables = static_cast<int32_t>(tables.dimensions()[0]);
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
inline ffi::Error ReadStatistics(SlabReader& slabs, const char* op, StatisticsView& statistics) {
  int64_t words = 2;
  JAXSOK_RETURN_IF_ERROR(slabs.Read<ffi::U32>("statistics", statistics.data, &words));
  if (words != 2) return ffi::Error::InvalidArgument(std::string(op) + ": statistics: wanted two words a row");
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
inline ffi::Error ReadAdmission(const ffi::RemainingArgs& args, int32_t operands, int64_t num_keys, const char* op,
                                std::optional<AdmissionView>& admission, size_t* num_aliased) {
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
    view.sightings.num_buckets = static_cast<uint32_t>(buffer->dimensions()[0]);
    JAXSOK_RETURN_IF_ERROR(read("sightings", {-1, 16}, &view.sightings.buckets));
  }
  if ((operands & kBloomGiven) != 0) JAXSOK_RETURN_IF_ERROR(read("bloom", {-1}, &view.bloom));
  *num_aliased = next;
  JAXSOK_RETURN_IF_ERROR(read("step", {}, &view.step));
  JAXSOK_RETURN_IF_ERROR(read("refused", {-1, kNumTableWords}, &view.refused));
  if ((operands & kUsesGiven) != 0) JAXSOK_RETURN_IF_ERROR(read("uses", {num_keys}, &view.uses));
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

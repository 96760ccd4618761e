// The buffers of the handlers by name (the words of types.py), and the views that kernels take.
#ifndef JAXSOK_HANDLERS_BUFFERS_H_
#define JAXSOK_HANDLERS_BUFFERS_H_

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
using Rows = ffi::Buffer<ffi::F32>;       // [slab capacity, dim]
using Records = ffi::Buffer<ffi::U32>;    // [slab capacity, 4]
using Requests = ffi::Buffer<ffi::U32>;   // [num_requests, 4]
using Inverse = ffi::Buffer<ffi::S32>;    // [num_keys]
using Workspace = ffi::Buffer<ffi::U8>;
using Scalar = ffi::Buffer<ffi::U32>;  // []

inline const uint64_t* KeysOf(const Keys& keys) { return reinterpret_cast<const uint64_t*>(keys.typed_data()); }

inline IndexView IndexOf(const Index& index) {
  return {reinterpret_cast<Bucket*>(index.typed_data()), static_cast<uint32_t>(index.dimensions()[0])};
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
    if (starts_.num_slabs < 1 || starts_.num_slabs > kMaxSlabs) {
      return ffi::Error::InvalidArgument(std::string(op_) + ": num_slabs: got " + std::to_string(starts_.num_slabs) +
                                         ", wanted 1 to " + std::to_string(kMaxSlabs));
    }
    uint64_t start = 0;
    for (int s = 0; s < starts_.num_slabs; ++s) {
      auto buffer = args_.get<ffi::Buffer<dtype>>(next_++);
      if (!buffer.has_value()) return buffer.error();
      auto dims = buffer->dimensions();
      JAXSOK_RETURN_IF_ERROR(CheckShape(dims, {-1, s == 0 ? -1 : *words}, argument, op_));
      if (s == 0) *words = dims[1];
      if (capacity_ == 0) {
        starts_.start[s] = static_cast<uint32_t>(start);
      } else if (starts_.start[s] != start) {
        return ffi::Error::InvalidArgument(std::string(op_) + ": " + argument +
                                           ": slabs of another size than the rows'");
      }
      start += static_cast<uint64_t>(dims[0]);
      slabs.data[s] = reinterpret_cast<T*>(buffer->typed_data());
    }
    if (capacity_ == 0) capacity_ = start;
    if (start != capacity_ || start >= (uint64_t{1} << 31)) {
      return ffi::Error::InvalidArgument(std::string(op_) + ": " + argument + ": got " + std::to_string(start) +
                                         " rows, wanted " + std::to_string(capacity_) + ", below 2^31");
    }
    return ffi::Error::Success();
  }

  const SlabStarts& starts() const { return starts_; }
  uint32_t capacity() const { return static_cast<uint32_t>(capacity_); }
  size_t next() const { return next_; }

 private:
  const ffi::RemainingArgs& args_;
  const char* op_;
  SlabStarts starts_{};
  uint64_t capacity_ = 0;
  size_t next_ = 0;
};

/// The store of ops that only read rows: those come first among the operands after the named ones.
inline ffi::Error ReadOnlyStore(Tables tables, Seed seed, const ffi::RemainingArgs& args, int32_t num_slabs,
                                const char* op, StoreView& store) {
  int64_t dim = 0;
  SlabReader slabs(args, num_slabs, op);
  JAXSOK_RETURN_IF_ERROR(slabs.Read<ffi::F32>("rows", store.rows, &dim));
  store.tables = tables.typed_data();
  store.seed = seed.typed_data();
  store.starts = slabs.starts();
  store.capacity = slabs.capacity();
  store.dim = static_cast<int32_t>(dim);
  store.num_tables = static_cast<int32_t>(tables.dimensions()[0]);
  return ffi::Error::Success();
}

/// Checks that the first results after the named ones alias the first operands after the named ones.
template <ffi::DataType dtype>
ffi::Error CheckSlabAliases(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, size_t first_arg,
                            size_t first_ret, size_t count, const char* op) {
  for (size_t i = 0; i < count; ++i) {
    auto arg = args.get<ffi::Buffer<dtype>>(first_arg + i);
    auto ret = rets.get<ffi::Buffer<dtype>>(first_ret + i);
    if (!arg.has_value()) return arg.error();
    if (!ret.has_value()) return ret.error();
    JAXSOK_RETURN_IF_ERROR(CheckAlias(arg->typed_data(), (*ret)->typed_data(), "slab", op));
  }
  return ffi::Error::Success();
}

/// The embeddings of all features: results from `first` on.
inline ffi::Error ReadEmbeddings(const ffi::RemainingRets& rets, size_t first, int32_t num_features,
                                 std::vector<float*>& embeddings) {
  for (int32_t f = 0; f < num_features; ++f) {
    auto buffer = rets.get<ffi::Buffer<ffi::F32>>(first + f);
    if (!buffer.has_value()) return buffer.error();
    embeddings.push_back((*buffer)->typed_data());
  }
  return ffi::Error::Success();
}

}  // namespace jaxsok

#endif  // JAXSOK_HANDLERS_BUFFERS_H_

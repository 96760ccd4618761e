// Handler of lookups in frozen stores: several stores in one call, read only.
//
// How the operands divide is read from their shapes, so that a program exported with a symbolic batch needs no number
// of its batch as an attribute.
#include "buffers.h"

namespace jaxsok {
namespace {

constexpr char kOp[] = "lookup_frozen";

/// Takes operands of several stores one after the other.
class OperandReader {
 public:
  explicit OperandReader(const ffi::RemainingArgs& args) : args_(args) {}

  template <typename Buffer>
  ffi::ErrorOr<Buffer> Next() {
    return args_.get<Buffer>(next_++);
  }

 private:
  const ffi::RemainingArgs& args_;
  size_t next_ = 0;
};

#define JAXSOK_READ_OPERAND(Type, name)                 \
  auto name##_or = operands.Next<Type>();               \
  if (!name##_or.has_value()) return name##_or.error(); \
  const Type name = *name##_or

/// The rows of a frozen store: one slab, of any dtype that rows are stored in.
ffi::Error ReadFrozenRows(const ffi::AnyBuffer& rows, StoreView& store) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(rows.dimensions(), {-1, -1}, "rows", kOp));
  const int64_t capacity = rows.dimensions()[0];
  if (capacity >= (int64_t{1} << 31)) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": rows: got " + std::to_string(capacity) +
                                       " rows, wanted fewer than 2^31");
  }
  if (rows.element_type() == ffi::S8) {
    store.row_dtype = kQuantizedInt8;
  } else if (rows.element_type() == ffi::F8E4M3FN) {
    store.row_dtype = kQuantizedFloat8E4m3;
  } else if (const std::optional<RowDtype> dtype = RowDtypeOf(rows); dtype.has_value()) {
    store.row_dtype = *dtype;
  } else {
    return ffi::Error::InvalidArgument(std::string(kOp) +
                                       ": rows: wanted float32, bfloat16, float16, int8 or float8_e4m3fn");
  }
  store.rows.data[0] = rows.untyped_data();
  store.starts.num_slabs = 1;
  store.capacity = static_cast<uint32_t>(capacity);
  store.dim = static_cast<int32_t>(rows.dimensions()[1]);
  return ffi::Error::Success();
}

/// One store's operands. `lookup.embeddings` and `lookup.num_bags` are left to ReadResults.
ffi::Error ReadStore(OperandReader& operands, const Seed& seed, int32_t kinds, FrozenLookup& lookup) {
  JAXSOK_READ_OPERAND(Index, index);
  JAXSOK_READ_OPERAND(Counters, counters);
  JAXSOK_READ_OPERAND(Tables, tables);
  JAXSOK_READ_OPERAND(Keys, keys);
  JAXSOK_READ_OPERAND(Offsets, offsets);
  JAXSOK_READ_OPERAND(Weights, weights);
  JAXSOK_READ_OPERAND(Features, features);
  JAXSOK_READ_OPERAND(ffi::AnyBuffer, rows);
  constexpr int32_t kNoTiles = 0;  // known when the embeddings are
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, kNoTiles, kOp, lookup.batch));
  lookup.batch.kinds = kinds;
  JAXSOK_RETURN_IF_ERROR(CheckIndex(index, "index", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(counters.dimensions(), {kNumCounters}, "counters", kOp));
  StoreView& store = lookup.store;
  JAXSOK_RETURN_IF_ERROR(ReadTables(tables, seed, kOp, store));
  JAXSOK_RETURN_IF_ERROR(ReadFrozenRows(rows, store));
  if (store.row_dtype == kQuantizedInt8 || store.row_dtype == kQuantizedFloat8E4m3) {
    JAXSOK_READ_OPERAND(ffi::Buffer<ffi::F32>, scales);
    JAXSOK_RETURN_IF_ERROR(CheckShape(scales.dimensions(), {int64_t{store.capacity}}, "scales", kOp));
    store.scales = scales.typed_data();
  }
  store.index = IndexOf(index);
  store.counters = counters.typed_data();
  return ffi::Error::Success();
}

/// What one store's results hold beside their pointers.
struct Lines {
  std::vector<void*> data;
  std::vector<int64_t> num_bags;
};

/// One store's embeddings: results from `first` on.
ffi::Error ReadResults(const ffi::RemainingRets& rets, size_t first, Lines& lines, FrozenLookup& lookup) {
  const int32_t num_features = lookup.batch.num_features;
  JAXSOK_RETURN_IF_ERROR(ReadEmbeddings(rets, first, num_features, kOp, lines.data, lookup.embeddings));
  const int64_t dim = lookup.store.dim;
  for (int32_t f = 0; f < num_features; ++f) {
    const auto dims = (*rets.get<ffi::AnyBuffer>(first + f))->dimensions();
    if (dims.size() < 2 || dims[dims.size() - 1] != dim) {
      return ffi::Error::InvalidArgument(std::string(kOp) + ": embeddings: the last axis is not that of the rows");
    }
    int64_t num_bags = 1;
    for (size_t axis = 0; axis + 1 < dims.size(); ++axis) num_bags *= dims[axis];
    lines.num_bags.push_back(num_bags);
  }
  lookup.num_bags = lines.num_bags.data();
  return ffi::Error::Success();
}

ffi::Error LookupFrozenImpl(StreamArgument stream, Seed seed, ffi::RemainingArgs args, ffi::Result<Counts> counts,
                            ffi::RemainingRets rets, ffi::Span<const int32_t> kinds, int32_t is_counted) {
  const size_t num_stores = kinds.size();
  std::vector<FrozenLookup> lookups(num_stores);
  std::vector<Lines> lines(num_stores);
  OperandReader operands(args);
  size_t num_results = 0;
  int64_t num_tables = 0;
  for (size_t s = 0; s < num_stores; ++s) {
    JAXSOK_RETURN_IF_ERROR(ReadStore(operands, seed, kinds[s], lookups[s]));
    JAXSOK_RETURN_IF_ERROR(ReadResults(rets, num_results, lines[s], lookups[s]));
    num_results += static_cast<size_t>(lookups[s].batch.num_features);
    num_tables += lookups[s].store.num_tables;
  }
  JAXSOK_RETURN_IF_ERROR(CheckShape(counts->dimensions(), {num_tables, kNumCounts}, "counts", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchLookupFrozen(scope.get(), lookups.data(), static_cast<int32_t>(num_stores),
                                       is_counted != 0 ? counts->typed_data() : nullptr),
                    kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokLookupFrozen, LookupFrozenImpl,
                      BindStream()
                          .Arg<Seed>()
                          .RemainingArgs()
                          .Ret<Counts>()
                          .RemainingRets()
                          .Attr<ffi::Span<const int32_t>>("kinds")
                          .Attr<int32_t>("is_counted"));

}  // namespace jaxsok

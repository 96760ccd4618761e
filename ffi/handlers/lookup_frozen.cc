// Handler of lookups in frozen stores: several stores in one call, read only.
//
// The split of the operands follows from their shapes, so that a program exported with a symbolic batch needs no batch
// size as an attribute. Exported programs are files: the order of operands and results must not change.
#include "buffers.h"

namespace jaxsok {
namespace {

/// Reads the rows of a frozen store: a slab of any row dtype, perhaps one of bytes in host memory with the rows beyond
/// it, and a scale for each row if they are quantized.
void ReadFrozenRows(Call& call, bool has_host_rows, StoreView& store) {
  const Array rows = call.Operand("rows");
  call.CheckShape("rows", rows.dims(), {-1, -1});
  int64_t capacity = rows.size(0);
  store.rows.data[0] = rows.as<void>();
  store.starts.num_slabs = 1;
  if (has_host_rows) {
    const int64_t row_bytes = rows.size(1) * static_cast<int64_t>(ffi::ByteWidth(rows.dtype()));
    const Array more = call.Operand("host_rows", ffi::U8, {-1, row_bytes});
    store.rows.data[1] = more.as<void>();
    store.starts.start[1] = static_cast<uint32_t>(capacity);
    store.starts.num_slabs = 2;
    capacity += more.size(0);
  }
  call.Require(capacity < (int64_t{1} << 31), "rows", "got ", capacity, " rows, wanted fewer than 2^31");
  const bool is_quantized = rows.dtype() == ffi::S8 || rows.dtype() == ffi::F8E4M3FN;
  const std::optional<RowDtype> dtype = RowDtypeOf(rows.dtype());
  call.Require(is_quantized || dtype.has_value(), "rows", "wanted float32, bfloat16, float16, int8 or float8_e4m3fn");
  store.row_dtype = rows.dtype() == ffi::S8 ? kQuantizedInt8 : dtype.value_or(kQuantizedFloat8E4m3);
  store.capacity = static_cast<uint32_t>(capacity);
  store.dim = static_cast<int32_t>(rows.size(1));
  if (is_quantized) store.scales = call.Operand("scales", ffi::F32, {capacity}).as<float>();
}

/// Reads the batch of a store: its keys in one array, or in `num_key_arrays`, one for each feature.
BatchView ReadKeysAndBags(Call& call, int32_t num_key_arrays, std::vector<const uint64_t*>& key_arrays) {
  constexpr int32_t kNoTiles = 0;  // known after the embeddings are read
  if (num_key_arrays == 0) return ReadBatch(call, kNoTiles);
  int64_t num_keys = 0;
  std::vector<int64_t> sizes;
  for (int32_t f = 0; f < num_key_arrays; ++f) {
    const Array keys = ReadKeys(call);
    key_arrays.push_back(keys.as<uint64_t>());
    sizes.push_back(keys.size(0));
    num_keys += keys.size(0);
  }
  const BatchView batch = ReadBags(call, num_keys, kNoTiles);
  call.Require(batch.num_features == num_key_arrays, "features", "got ", batch.num_features, ", wanted ",
               num_key_arrays, ", one for each array of keys");
  for (int32_t f = 0; kIsHostMemory && !call.failed() && f < num_key_arrays; ++f) {
    const int32_t wanted = batch.features[int64_t{f} * kNumFeatureWords + kFeatureNumKeys];
    call.Require(sizes[f] == wanted, "keys", "got ", sizes[f], " of feature ", f, ", wanted ", wanted);
  }
  return batch;
}

/// Reads one store and its batch. ReadResults fills `lookup.embeddings` and `lookup.num_bags`.
void ReadFrozen(Call& call, const Array& seed, int32_t kinds, bool has_host_rows, int32_t num_key_arrays,
                std::vector<const uint64_t*>& key_arrays, FrozenLookup& lookup) {
  StoreView& store = lookup.store;
  const Array index = call.Operand("index", ffi::U32, {-1, kEntriesPerBucket * 4});
  CheckIndex(call, "index", index);
  store.index = IndexOf(index);
  store.counters = call.Operand("counters", ffi::U32, {kNumCounters}).as<uint32_t>();
  const Array tables = call.Operand("tables", ffi::U32, {-1, kNumTableWords});
  store.tables = tables.as<uint32_t>();
  store.num_tables = static_cast<int32_t>(tables.size(0));
  store.seed = seed.as<uint32_t>();
  lookup.batch = ReadKeysAndBags(call, num_key_arrays, key_arrays);
  if (num_key_arrays != 0) lookup.key_arrays = key_arrays.data();
  lookup.batch.kinds = kinds;
  ReadFrozenRows(call, has_host_rows, store);
}

/// The storage of what a store's lookup points to.
struct Lines {
  RowArrays arrays;
  std::vector<int64_t> num_bags;
  std::vector<const uint64_t*> key_arrays;
};

/// Reads one store's embeddings.
void ReadResults(Call& call, Lines& lines, FrozenLookup& lookup) {
  for (int32_t f = 0; f < lookup.batch.num_features; ++f) {
    const Array embeddings = call.Result("embeddings");
    const ffi::Span<const int64_t> dims = embeddings.dims();
    const bool is_wanted = dims.size() >= 2 && dims.back() == lookup.store.dim;
    call.Require(is_wanted, "embeddings", "the last axis is not that of the rows");
    if (call.failed()) return;
    lines.arrays.Add(embeddings);
    lines.num_bags.push_back(1);
    for (int64_t size : dims.first(dims.size() - 1)) lines.num_bags.back() *= size;
  }
  lookup.embeddings = {lines.arrays.dtype(), lines.arrays.data()};
  lookup.num_bags = lines.num_bags.data();
}

ffi::Error LookupFrozen(Call& call) {
  const auto kinds = call.Attribute<ffi::Span<const int32_t>>("kinds");
  const auto has_host_rows = call.AttributeOr<ffi::Span<const int32_t>>("has_host_rows", {});
  const auto num_key_arrays = call.AttributeOr<ffi::Span<const int32_t>>("num_key_arrays", {});
  const auto is_counted = call.Attribute<int32_t>("is_counted");
  const Array seed = call.Operand("seed", ffi::U32, {2});
  const Array counts = call.Result("counts", ffi::S32, {-1, kNumCounts});
  std::vector<FrozenLookup> lookups(kinds.size());
  std::vector<Lines> lines(kinds.size(), Lines{RowArrays(call, "embeddings"), {}, {}});
  int64_t num_tables = 0;
  for (size_t s = 0; s < lookups.size(); ++s) {
    ReadFrozen(call, seed, kinds[s], s < has_host_rows.size() && has_host_rows[s] != 0,
               s < num_key_arrays.size() ? num_key_arrays[s] : 0, lines[s].key_arrays, lookups[s]);
    ReadResults(call, lines[s], lookups[s]);
    num_tables += lookups[s].store.num_tables;
  }
  call.CheckShape("counts", counts.dims(), {num_tables, kNumCounts});
  return call.Launch([&](Stream stream) {
    return LaunchLookupFrozen(stream, lookups.data(), static_cast<int32_t>(lookups.size()),
                              is_counted != 0 ? counts.as<int32_t>() : nullptr);
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokLookupFrozen, "lookup_frozen", LookupFrozen);

}  // namespace jaxsok

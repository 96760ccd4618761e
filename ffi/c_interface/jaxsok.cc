// The functions of jaxsok.h: they check the caller's arguments, and call the lookup_frozen kernels.
#include "../../jaxsok/include/jaxsok.h"

#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "error.h"
#include "frozen_folder.h"

using jaxsok::Refuse;

struct jaxsok_tables {
  struct Table {
    std::string name;
    int64_t num_rows;
    int32_t dim;
    int32_t store;
    int32_t number;  // within its store
  };

  jaxsok::FrozenFolder folder;  // on the host, the tables themselves: destroyed after the device
  std::unique_ptr<jaxsok::Device> device;
  std::vector<jaxsok::StoreView> stores;
  std::vector<Table> tables;
  std::unordered_map<std::string, int32_t> numbers;
};

namespace jaxsok {
namespace {

thread_local std::string last_error;

/// Runs a function that may throw. Returns the status of its exception, and keeps the text.
template <typename Function>
int32_t Guarded(const char* op, const Function& function) {
  int32_t status = JAXSOK_BAD_ARGUMENT;
  try {
    try {
      function();
      return JAXSOK_OK;
    } catch (const Error& error) {
      status = error.status;
      last_error = error.text;
    } catch (const std::bad_alloc&) {
      status = JAXSOK_NO_MEMORY;
      last_error = std::string(op) + ": memory: got too little, wanted more; free some of the host's.";
    } catch (const std::exception& error) {
      last_error = std::string(op) + ": " + error.what();
    }
  } catch (...) {  // there is no memory for the text
    last_error.clear();
  }
  return status;
}

void Open(const char* path, int32_t ordinal, uint32_t flags, jaxsok_tables& opened) {
  opened.device = Device::Open(ordinal);
  opened.folder = ReadFrozenFolder(path, flags);
  Device& device = *opened.device;
  const auto* seed = static_cast<const uint32_t*>(device.Place(opened.folder.seed, sizeof(opened.folder.seed)));
  for (FrozenStoreFiles& files : opened.folder.stores) {
    const auto place = [&](const void* data, size_t num_bytes) {
      return num_bytes == 0 ? nullptr : const_cast<void*>(device.Place(data, num_bytes));  // frozen: never written
    };
    const auto number_of_store = static_cast<int32_t>(opened.stores.size());
    StoreView store{};
    store.index = {static_cast<Bucket*>(place(files.index.data(), files.index.size())), files.num_buckets};
    store.counters = static_cast<uint32_t*>(place(files.counters, sizeof(files.counters)));
    store.tables = static_cast<uint32_t*>(place(files.words.data(), files.words.size() * sizeof(uint32_t)));
    store.seed = seed;
    store.starts.num_slabs = 1;
    const size_t num_device_bytes = files.rows.size() / files.capacity * files.num_device_rows;
    store.rows.data[0] = place(files.rows.data(), num_device_bytes);
    if (files.num_device_rows < files.capacity && !Device::kIsHost) {
      const char* beyond = static_cast<const char*>(files.rows.data()) + num_device_bytes;
      store.rows.data[1] = const_cast<void*>(device.PlaceOnHost(beyond, files.rows.size() - num_device_bytes));
      store.starts.start[1] = files.num_device_rows;
      store.starts.num_slabs = 2;
    }
    store.row_dtype = files.dtype;
    store.capacity = files.capacity;
    store.dim = files.dim;
    store.num_tables = static_cast<int32_t>(files.tables.size());
    store.scales = static_cast<float*>(place(files.scales.data(), files.scales.size()));
    opened.stores.push_back(store);
    for (size_t t = 0; t < files.tables.size(); ++t) {
      const FrozenTableEntry& table = files.tables[t];
      opened.numbers.emplace(table.name, static_cast<int32_t>(opened.tables.size()));
      opened.tables.push_back({table.name, table.num_rows, files.dim, number_of_store, static_cast<int32_t>(t)});
    }
    if (!Device::kIsHost) {
      for (FileMemory* memory : {&files.index, &files.rows, &files.scales}) *memory = FileMemory();
    }
  }
}

/// The features of one store in a batch.
struct StoreBatch {
  std::vector<int32_t> words;
  std::vector<void*> outs;
  std::vector<int64_t> num_bags;
  int64_t bag_start = 0;
  int32_t num_tiles = 0;
  int32_t kinds = 0;
};

class BatchReader {
 public:
  BatchReader(const jaxsok_tables& tables, const jaxsok_batch& batch)
      : tables_(tables), batch_(batch), stores_(tables.stores.size()) {
    CheckArray("keys", batch.keys, batch.num_keys);
    CheckArray("offsets", batch.offsets, batch.num_offsets);
    CheckArray("weights", batch.weights, batch.num_weights);
    if (batch.num_features < 0 || (batch.num_features > 0 && batch.features == nullptr)) {
      Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_lookup: features: got ", batch.num_features, " at ", batch.features,
             ", wanted an array of them.");
    }
    int64_t key_end = 0;
    for (number_ = 0; number_ < batch.num_features; ++number_) {
      const jaxsok_feature& feature = batch.features[number_];
      Read(feature, key_end);
      key_end = feature.first_key + feature.num_keys;
    }
  }

  void Run(void* stream) {
    std::vector<FrozenLookup> lookups;
    lookups.reserve(stores_.size());
    for (size_t s = 0; s < stores_.size(); ++s) {
      const StoreBatch& features = stores_[s];
      if (features.outs.empty()) continue;
      FrozenLookup& lookup = lookups.emplace_back();
      lookup.store = tables_.stores[s];
      lookup.batch = {};
      lookup.batch.keys = batch_.keys;
      lookup.batch.offsets = batch_.offsets;
      lookup.batch.weights = batch_.weights;
      lookup.batch.features = features.words.data();
      lookup.batch.num_keys = batch_.num_keys;
      lookup.batch.num_features = static_cast<int32_t>(features.outs.size());
      lookup.batch.num_offsets = batch_.num_offsets;
      lookup.batch.kinds = features.kinds;
      lookup.embeddings = {kRowDtypeFloat32, features.outs.data()};
      lookup.num_bags = features.num_bags.data();
    }
    if (!lookups.empty()) tables_.device->Run(stream, lookups.data(), static_cast<int32_t>(lookups.size()));
  }

 private:
  static constexpr int64_t kMost = INT32_MAX;

  template <typename T>
  static void CheckArray(const char* name, const T* data, int64_t size) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(data) % alignof(T) == 0;
    if (size < 0 || size > kMost || (size > 0 && data == nullptr) || !is_aligned) {
      Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_lookup: ", name, ": got ", size, " of them at ", data,
             ", wanted 0 to 2^31 - 1, at a multiple of ", alignof(T), " bytes.");
    }
  }

  template <typename... Parts>
  [[noreturn]] void RefuseFeature(const char* field, const Parts&... parts) const {
    Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_lookup: features[", number_, "].", field, ": got ", parts..., ".");
  }

  /// Checks that [first, first + count) lies in [least, size).
  void CheckRange(const char* field, int64_t first, int64_t count, int64_t least, int64_t size) const {
    if (first < least || first > size || count > size - first) {
      RefuseFeature(field, first, " with ", count, " from there, wanted them between ", least, " and ", size,
                    ", the end of the array");
    }
  }

  void Read(const jaxsok_feature& feature, int64_t key_end) {
    if (feature.table < 0 || static_cast<size_t>(feature.table) >= tables_.tables.size()) {
      RefuseFeature("table", feature.table, ", wanted 0 to ", tables_.tables.size() - 1);
    }
    const jaxsok_tables::Table& table = tables_.tables[static_cast<size_t>(feature.table)];
    StoreBatch& store = stores_[static_cast<size_t>(table.store)];
    if (feature.combiner < JAXSOK_ROWS || feature.combiner > JAXSOK_SQRTN) {
      RefuseFeature("combiner", feature.combiner, ", wanted a jaxsok_combiner");
    }
    if (feature.num_keys < 0) RefuseFeature("num_keys", feature.num_keys, ", wanted 0 or more");
    CheckRange("first_key", feature.first_key, feature.num_keys, key_end, batch_.num_keys);
    if (feature.num_bags < 0 || feature.num_bags > kMost - kBagsPerTile - store.bag_start) {
      RefuseFeature("num_bags", feature.num_bags, ", wanted 0 to ", kMost - kBagsPerTile - store.bag_start,
                    ", which all features of tables of one dim and dtype share");
    }
    const bool has_bags = feature.combiner != JAXSOK_ROWS;
    const bool is_ragged = feature.first_offset != -1, is_weighted = feature.first_weight != -1;
    if (!has_bags && (is_ragged || is_weighted)) {
      RefuseFeature(is_ragged ? "first_offset" : "first_weight", "one with JAXSOK_ROWS, wanted -1, or a combiner");
    }
    if (!has_bags && feature.num_bags != feature.num_keys) {
      RefuseFeature("num_bags", feature.num_bags, ", wanted ", feature.num_keys, ", its num_keys, with JAXSOK_ROWS");
    }
    int64_t hotness = 1;
    if (is_ragged) {
      hotness = 0;
      CheckRange("first_offset", feature.first_offset, feature.num_bags + 1, 0, batch_.num_offsets);
      if (Device::kIsHost) CheckOffsets(feature);
    } else if (has_bags) {
      hotness = feature.num_bags == 0 ? 1 : feature.num_keys / feature.num_bags;
      if (hotness == 0 || hotness * feature.num_bags != feature.num_keys) {
        RefuseFeature("num_bags", feature.num_bags, ", wanted a divisor of ", feature.num_keys,
                      ", its num_keys, or offsets");
      }
    }
    if (is_weighted) CheckRange("first_weight", feature.first_weight, feature.num_keys, 0, batch_.num_weights);
    if (feature.num_bags == 0) return;
    if (feature.out == nullptr || reinterpret_cast<uintptr_t>(feature.out) % Device::kOutAlignment != 0) {
      RefuseFeature("out", feature.out, ", wanted the memory of the embeddings, at a multiple of ",
                    Device::kOutAlignment, " bytes");
    }
    // A bag of one unweighted key is its row, whatever the combiner.
    const bool is_single = hotness == 1 && !is_weighted;
    const auto word = [](int64_t value) { return static_cast<int32_t>(value); };
    const int32_t words[kNumFeatureWords] = {
        table.number,
        is_single ? kCombinerNone : feature.combiner,
        word(feature.first_key),
        word(feature.num_keys),
        word(store.bag_start),
        word(feature.num_bags),
        word(hotness),
        is_ragged ? word(feature.first_offset) : 0,
        word(feature.first_weight),
        store.num_tiles,
        0,
        0,
    };
    store.words.insert(store.words.end(), std::begin(words), std::end(words));
    store.outs.push_back(feature.out);
    store.num_bags.push_back(feature.num_bags);
    store.bag_start += feature.num_bags;
    store.num_tiles += word(CeilDiv<int64_t>(feature.num_bags, kBagsPerTile));
    store.kinds |= is_single ? kSingleKeys : kBags;
    constexpr size_t kMostFeatures = 1024;  // the limit of the GPU kernels
    if (store.outs.size() > kMostFeatures) {
      Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_lookup: features: got more than ", kMostFeatures,
             " of the tables of one dim and dtype, wanted at most so many; look them up in several calls.");
    }
  }

  void CheckOffsets(const jaxsok_feature& feature) const {
    const int32_t* offsets = batch_.offsets + feature.first_offset;
    int64_t before = 0;
    for (int64_t b = 0; b <= feature.num_bags; ++b) {
      if (offsets[b] < before || offsets[b] > feature.num_keys) {
        RefuseFeature("first_offset", "offset ", offsets[b], " at ", b, " of ", feature.num_bags + 1, ", wanted ",
                      before, " to ", feature.num_keys, ": offsets rise, and stay within the keys of the feature");
      }
      before = offsets[b];
    }
  }

  const jaxsok_tables& tables_;
  const jaxsok_batch& batch_;
  std::vector<StoreBatch> stores_;
  int32_t number_ = 0;  // of the current feature
};

const jaxsok_tables::Table* TableAt(const jaxsok_tables* tables, int32_t table) {
  if (tables == nullptr || table < 0 || static_cast<size_t>(table) >= tables->tables.size()) return nullptr;
  return &tables->tables[static_cast<size_t>(table)];
}

}  // namespace
}  // namespace jaxsok

extern "C" {

int32_t jaxsok_api_version(void) { return JAXSOK_API_VERSION; }

const char* jaxsok_platform(void) { return jaxsok::Device::kIsHost ? "cpu" : "cuda"; }

const char* jaxsok_error(void) { return jaxsok::last_error.c_str(); }

int32_t jaxsok_open(const char* folder, int32_t device, uint32_t flags, jaxsok_tables** tables) {
  return jaxsok::Guarded("jaxsok_open", [&] {
    if (tables != nullptr) *tables = nullptr;
    if (folder == nullptr || tables == nullptr) {
      Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_open: ", folder == nullptr ? "folder" : "tables",
             ": got NULL, wanted a pointer.");
    }
    if (*folder == '\0') Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_open: folder: got \"\", wanted the path of a folder.");
    if ((flags & ~(JAXSOK_UNVERIFIED | JAXSOK_IN_MEMORY)) != 0) {
      Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_open: flags: got ", flags,
             ", wanted 0, JAXSOK_UNVERIFIED, JAXSOK_IN_MEMORY, or both.");
    }
    auto opened = std::make_unique<jaxsok_tables>();
    jaxsok::Open(folder, device, flags, *opened);
    *tables = opened.release();
  });
}

void jaxsok_close(jaxsok_tables* tables) { delete tables; }

int32_t jaxsok_num_tables(const jaxsok_tables* tables) {
  return tables == nullptr ? -1 : static_cast<int32_t>(tables->tables.size());
}

const char* jaxsok_table_name(const jaxsok_tables* tables, int32_t table) {
  const auto* found = jaxsok::TableAt(tables, table);
  return found == nullptr ? nullptr : found->name.c_str();
}

int32_t jaxsok_table_dim(const jaxsok_tables* tables, int32_t table) {
  const auto* found = jaxsok::TableAt(tables, table);
  return found == nullptr ? -1 : found->dim;
}

int64_t jaxsok_table_num_rows(const jaxsok_tables* tables, int32_t table) {
  const auto* found = jaxsok::TableAt(tables, table);
  return found == nullptr ? -1 : found->num_rows;
}

int32_t jaxsok_find_table(const jaxsok_tables* tables, const char* name) {
  int32_t number = -1;
  jaxsok::Guarded("jaxsok_find_table", [&] {
    if (tables == nullptr || name == nullptr) return;
    const auto found = tables->numbers.find(name);
    if (found != tables->numbers.end()) number = found->second;
  });
  return number;
}

int32_t jaxsok_lookup(const jaxsok_tables* tables, const jaxsok_batch* batch, void* stream) {
  return jaxsok::Guarded("jaxsok_lookup", [&] {
    if (tables == nullptr || batch == nullptr) {
      Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_lookup: ", tables == nullptr ? "tables" : "batch",
             ": got NULL, wanted a pointer.");
    }
    jaxsok::BatchReader(*tables, *batch).Run(stream);
  });
}

}  // extern "C"

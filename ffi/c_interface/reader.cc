// The functions that jaxsok/kernels/reader.py calls. Each returns nullptr, or what went wrong: a text that is valid
// until the next call of the thread.
#include "reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "error.h"

namespace jaxsok {
namespace {

constexpr int64_t kLeastBytes = 64 << 10;
constexpr int64_t kMostFreeBytes = int64_t{2} << 30;  // beyond that, memory that comes back is deleted
constexpr int64_t kAlignment = 64;
thread_local std::string last_error;

int64_t Aligned(int64_t num_bytes) { return CeilDiv(num_bytes, kAlignment) * kAlignment; }

template <typename Function>
const char* Guarded(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const Error& error) {
    last_error = error.text;
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return last_error.c_str();
}

/// A device with host memory that it reads and writes, which is used again: to pin memory takes milliseconds, and so
/// does a first write of it.
class Reader {
 public:
  explicit Reader(int32_t ordinal) : device_(Device::Open(ordinal)) {}

  ~Reader() {
    for (const auto& [num_bytes, blocks] : free_) {
      for (void* block : blocks) device_->DeleteHostMemory(block);
    }
  }

  Device& device() { return *device_; }

  /// Lends at least so many bytes, and sets how many.
  void* Lend(int64_t* num_bytes) {
    int64_t size = kLeastBytes;
    while (size < *num_bytes) size *= 2;
    *num_bytes = size;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::vector<void*>& blocks = free_[size];
      if (!blocks.empty()) {
        void* block = blocks.back();
        blocks.pop_back();
        free_bytes_ -= size;
        return block;
      }
    }
    return device_->NewHostMemory(static_cast<size_t>(size));
  }

  void GiveBack(void* block, int64_t num_bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (free_bytes_ + num_bytes <= kMostFreeBytes) {
        free_[num_bytes].push_back(block);
        free_bytes_ += num_bytes;
        return;
      }
    }
    device_->DeleteHostMemory(block);
  }

 private:
  std::unique_ptr<Device> device_;
  std::mutex mutex_;
  std::unordered_map<int64_t, std::vector<void*>> free_;  // by size, under `mutex_`, as their bytes
  int64_t free_bytes_ = 0;
};

StoreView ViewOf(const ReaderStore& given) {
  const auto words = [](const void* address) { return static_cast<uint32_t*>(const_cast<void*>(address)); };
  StoreView store{};  // frozen: never written
  store.index = {static_cast<Bucket*>(const_cast<void*>(given.index)), static_cast<uint32_t>(given.num_buckets)};
  store.counters = words(given.counters);
  store.tables = words(given.tables);
  store.seed = words(given.seed);
  store.rows.data[0] = const_cast<void*>(given.rows);
  store.starts.num_slabs = 1;
  if (given.more_rows != nullptr) {
    store.rows.data[1] = const_cast<void*>(given.more_rows);
    store.starts.start[1] = static_cast<uint32_t>(given.num_rows);
    store.starts.num_slabs = 2;
  }
  store.scales = static_cast<float*>(const_cast<void*>(given.scales));
  store.row_dtype = static_cast<RowDtype>(given.dtype);
  store.capacity = static_cast<uint32_t>(given.num_rows + given.num_more_rows);
  store.dim = static_cast<int32_t>(given.dim);
  store.num_tables = static_cast<int32_t>(given.num_tables);
  return store;
}

/// One store's part of a lookup.
struct StoreInputs {
  std::vector<void*> rows;
  std::vector<int64_t> num_bags;
};

/// Places an answer: rows of each input, then counts, words of features, and keys.
void Begin(Reader& reader, const ReaderStore* stores, ReaderInput* inputs, int64_t num_inputs, ReaderAnswer* answer) {
  int64_t rows_bytes = 0, num_counts = 0, num_keys = 0, num_lookups = 0;
  for (int64_t i = 0; i < num_inputs; ++i) {
    const ReaderInput& input = inputs[i];
    const ReaderStore& store = stores[input.store];
    if (i == 0 || input.store != inputs[i - 1].store) {
      num_counts += store.num_tables * kNumCounts;
      ++num_lookups;
    }
    rows_bytes += Aligned(input.num_keys * store.dim * static_cast<int64_t>(sizeof(float)));
    num_keys += input.num_keys;
  }
  if (num_inputs < 1 || num_keys > INT32_MAX - kBagsPerTile * (num_inputs + 1)) {
    Refuse(JAXSOK_BAD_ARGUMENT, "lookup: keys: got ", num_keys, " of ", num_inputs,
           " tables, wanted fewer than 2^31 of one table or more.");
  }
  const int64_t counts_at = rows_bytes;
  const int64_t words_at = counts_at + Aligned(num_counts * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t words_bytes = num_inputs * kNumFeatureWords * static_cast<int64_t>(sizeof(int32_t));
  const int64_t keys_at = words_at + Aligned(words_bytes);
  answer->num_bytes = keys_at + num_keys * static_cast<int64_t>(sizeof(uint64_t));
  answer->running = nullptr;
  answer->memory = reader.Lend(&answer->num_bytes);
  try {
    char* memory = static_cast<char*>(answer->memory);
    answer->counts = reinterpret_cast<int32_t*>(memory + counts_at);
    auto* words = reinterpret_cast<int32_t*>(memory + words_at);
    auto* keys = reinterpret_cast<uint64_t*>(memory + keys_at);
    std::vector<FrozenLookup> lookups;
    std::vector<StoreInputs> of_stores(static_cast<size_t>(num_lookups));  // lookups point to its vectors
    lookups.reserve(of_stores.size());
    int32_t num_tiles = 0;
    for (int64_t i = 0; i < num_inputs; ++i) {
      ReaderInput& input = inputs[i];
      if (i == 0 || input.store != inputs[i - 1].store) {
        FrozenLookup& lookup = lookups.emplace_back();
        lookup.store = ViewOf(stores[input.store]);
        lookup.batch = {};
        lookup.batch.keys = keys;
        lookup.batch.features = words;
        lookup.batch.kinds = kSingleKeys;
        num_tiles = 0;
      }
      FrozenLookup& lookup = lookups.back();
      StoreInputs& of_store = of_stores[lookups.size() - 1];
      const auto first = static_cast<int32_t>(keys - lookup.batch.keys), size = static_cast<int32_t>(input.num_keys);
      if (size > 0) std::memcpy(keys, input.keys, static_cast<size_t>(size) * sizeof(uint64_t));
      const int32_t line[kNumFeatureWords] = {
          static_cast<int32_t>(input.table), kCombinerNone, first, size, first, size, 1, 0, -1, num_tiles, 0, 0};
      std::memcpy(words, line, sizeof(line));
      num_tiles += std::max(1, static_cast<int32_t>(CeilDiv<int64_t>(size, kBagsPerTile)));
      input.rows = reinterpret_cast<float*>(memory);
      of_store.rows.push_back(memory);
      of_store.num_bags.push_back(size);
      memory += Aligned(input.num_keys * lookup.store.dim * static_cast<int64_t>(sizeof(float)));
      keys += size;
      words += kNumFeatureWords;
      lookup.batch.num_keys += size;
      ++lookup.batch.num_features;
      lookup.batch.num_tiles = num_tiles;
    }
    for (size_t s = 0; s < lookups.size(); ++s) {
      lookups[s].embeddings = {kRowDtypeFloat32, of_stores[s].rows.data()};
      lookups[s].num_bags = of_stores[s].num_bags.data();
    }
    answer->running =
        reader.device().Begin(lookups.data(), static_cast<int32_t>(lookups.size()), answer->counts).release();
  } catch (...) {
    reader.GiveBack(answer->memory, answer->num_bytes);
    answer->memory = nullptr;
    throw;
  }
}

}  // namespace
}  // namespace jaxsok

#define JAXSOK_VISIBLE extern "C" __attribute__((visibility("default")))

using jaxsok::Guarded;
using jaxsok::Reader;

/// Opens a reader for tables of a device.
JAXSOK_VISIBLE const char* JaxsokReaderOpen(int32_t ordinal, Reader** reader) {
  return Guarded([&] { *reader = new Reader(ordinal); });
}

/// Closes a reader, whose answers have all been given back.
JAXSOK_VISIBLE void JaxsokReaderClose(Reader* reader) { delete reader; }

/// Begins a lookup, and sets the rows of its inputs and the answer.
JAXSOK_VISIBLE const char* JaxsokReaderBegin(Reader* reader, const jaxsok::ReaderStore* stores,
                                             jaxsok::ReaderInput* inputs, int64_t num_inputs,
                                             jaxsok::ReaderAnswer* answer) {
  return Guarded([&] { jaxsok::Begin(*reader, stores, inputs, num_inputs, answer); });
}

/// Waits until an answer is there.
JAXSOK_VISIBLE const char* JaxsokReaderWait(jaxsok::ReaderAnswer* answer) {
  return Guarded([&] {
    std::unique_ptr<jaxsok::Running> running(static_cast<jaxsok::Running*>(answer->running));
    answer->running = nullptr;
    running->Wait();
  });
}

/// Begins a lookup, and waits until its answer is there.
JAXSOK_VISIBLE const char* JaxsokReaderLookup(Reader* reader, const jaxsok::ReaderStore* stores,
                                              jaxsok::ReaderInput* inputs, int64_t num_inputs,
                                              jaxsok::ReaderAnswer* answer) {
  if (const char* error = JaxsokReaderBegin(reader, stores, inputs, num_inputs, answer)) return error;
  const char* error = JaxsokReaderWait(answer);
  if (error != nullptr) reader->GiveBack(answer->memory, answer->num_bytes);
  return error;
}

/// Makes an answer of the lines of several: arrays of rows in `num_bytes` of memory, whose lines all have one source.
JAXSOK_VISIBLE const char* JaxsokReaderJoin(Reader* reader, const jaxsok::ReaderLines* lines, int64_t num_arrays,
                                            int64_t num_bytes, jaxsok::ReaderAnswer* answer) {
  return Guarded([&] {
    *answer = {nullptr, nullptr, num_bytes, nullptr};
    answer->memory = reader->Lend(&answer->num_bytes);
    for (int64_t i = 0; i < num_arrays; ++i) {
      const jaxsok::ReaderLines& mine = lines[i];
      auto* to = reinterpret_cast<float*>(static_cast<char*>(answer->memory) + mine.begin);
      const auto line_bytes = static_cast<size_t>(mine.dim) * sizeof(float);
      for (int64_t l = 0; l < mine.num_lines; ++l) {
        std::memcpy(to + mine.places[l] * mine.dim, mine.from + l * mine.dim, line_bytes);
      }
    }
  });
}

/// Takes back the memory of an answer, after waiting for it.
JAXSOK_VISIBLE void JaxsokReaderGiveBack(Reader* reader, jaxsok::ReaderAnswer* answer) {
  delete static_cast<jaxsok::Running*>(answer->running);
  reader->GiveBack(answer->memory, answer->num_bytes);
}

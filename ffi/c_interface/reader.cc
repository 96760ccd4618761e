// The functions that jaxsok/kernels/reader.py calls. Each returns nullptr, or what went wrong: a text that is valid
// until the next call of the thread.
#include "reader.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/hash.h"
#include "device.h"
#include "error.h"

namespace jaxsok {
namespace {

constexpr int64_t kLeastBytes = 64 << 10;
constexpr int64_t kKeptBytes = int64_t{1} << 30;  // kept for answers to come, or twice what was lent at one time
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

/// Host memory that devices read and write, which is used again: to pin memory takes milliseconds, and so does its
/// first write. The pool is that of the process, whose devices all reach it.
class Pool {
 public:
  static Pool& Get() {
    static Pool* const pool = new Pool;  // never destroyed: a driver that shuts down frees its memory
    return *pool;
  }

  /// Lends at least so many bytes, and sets how many.
  void* Lend(const Device& device, int64_t* num_bytes) {
    int64_t size = kLeastBytes;
    while (size < *num_bytes) size *= 2;
    const int64_t step = std::max(kLeastBytes, size / 8);  // so that less than a fifth is wasted
    *num_bytes = size = CeilDiv(std::max<int64_t>(*num_bytes, 1), step) * step;
    std::list<Block> deleted;
    void* memory = Take(size, &deleted);
    for (const Block& block : deleted) device.DeleteHostMemory(block.memory);
    if (memory == nullptr) {
      try {
        memory = device.NewHostMemory(static_cast<size_t>(size));
      } catch (const Error&) {
        TakeAll(&deleted);  // of other sizes
        for (const Block& block : deleted) device.DeleteHostMemory(block.memory);
        memory = device.NewHostMemory(static_cast<size_t>(size));
      }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    lent_bytes_ += size;
    most_lent_bytes_ = std::max(most_lent_bytes_, lent_bytes_);
    return memory;
  }

  /// Takes memory back. It deletes none, since its caller may have Python's lock, and the driver waits for the device.
  void GiveBack(void* memory, int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    lent_bytes_ -= num_bytes;
    most_lent_bytes_ = std::max(lent_bytes_, most_lent_bytes_ - most_lent_bytes_ / 1024);  // a peak is forgotten
    free_.push_back({memory, num_bytes});
    free_bytes_ += num_bytes;
    // Those that have been free for longest are deleted first: their sizes are probably not in use any more.
    while (lent_bytes_ + free_bytes_ > std::max(kKeptBytes, 2 * most_lent_bytes_) && !free_.empty()) {
      free_bytes_ -= free_.front().num_bytes;
      deleted_.splice(deleted_.end(), free_, free_.begin());
    }
  }

 private:
  struct Block {
    void* memory;
    int64_t num_bytes;
  };

  /// Takes the last free block of a size, or nullptr, and what is to be deleted.
  void* Take(int64_t size, std::list<Block>* deleted) {
    std::lock_guard<std::mutex> lock(mutex_);
    deleted->swap(deleted_);
    const auto found = std::find_if(free_.rbegin(), free_.rend(), [&](const Block& b) { return b.num_bytes == size; });
    if (found == free_.rend()) return nullptr;
    void* memory = found->memory;
    free_.erase(std::next(found).base());
    free_bytes_ -= size;
    return memory;
  }

  void TakeAll(std::list<Block>* blocks) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks->clear();
    blocks->swap(free_);
    free_bytes_ = 0;
  }

  std::mutex mutex_;
  // All below under `mutex_`.
  std::list<Block> free_;     // in the order in which they came back
  std::list<Block> deleted_;  // by the next lookup
  int64_t free_bytes_ = 0, lent_bytes_ = 0, most_lent_bytes_ = 0;
};

/// An answer that is given back unless it is released.
class Owned {
 public:
  explicit Owned(Device& device) : device_(device) {}
  ~Owned() {
    running_.reset();  // nothing writes it any more
    if (answer.memory != nullptr) Pool::Get().GiveBack(answer.memory, answer.num_bytes);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  void Lend(int64_t num_bytes) {
    answer.num_bytes = num_bytes;
    answer.memory = Pool::Get().Lend(device_, &answer.num_bytes);
  }
  void Run(std::vector<FrozenLookup>& lookups, float* const* places) {
    running_ = device_.Begin(lookups.data(), static_cast<int32_t>(lookups.size()), answer.counts, places);
  }
  void Wait() {
    if (running_ != nullptr) running_->Wait();
    running_.reset();
  }
  ReaderAnswer Release() {
    const ReaderAnswer released = answer;
    answer.memory = nullptr;
    return released;
  }

  ReaderAnswer answer{};

 private:
  Device& device_;
  std::unique_ptr<Running> running_;
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

/// Sizes of an answer.
struct Sizes {
  int64_t rows_bytes = 0, num_counts = 0, num_keys = 0, num_lookups = 0;
};

bool IsFirstOfStore(const ReaderInput* inputs, int64_t i) { return i == 0 || inputs[i].store != inputs[i - 1].store; }

int64_t RowsBytes(const ReaderInput& input, const ReaderStore* stores) {
  return Aligned(input.num_keys * stores[input.store].dim * static_cast<int64_t>(sizeof(float)));
}

Sizes SizesOf(const ReaderStore* stores, const ReaderInput* inputs, int64_t num_inputs) {
  Sizes sizes;
  for (int64_t i = 0; i < num_inputs; ++i) {
    if (IsFirstOfStore(inputs, i)) {
      sizes.num_counts += stores[inputs[i].store].num_tables * kNumCounts;
      ++sizes.num_lookups;
    }
    sizes.rows_bytes += RowsBytes(inputs[i], stores);
    sizes.num_keys += inputs[i].num_keys;
  }
  if (num_inputs < 1 || sizes.num_keys > INT32_MAX - kBagsPerTile * (num_inputs + 1)) {
    Refuse(JAXSOK_BAD_ARGUMENT, "lookup: keys: got ", sizes.num_keys, " of ", num_inputs,
           " tables, wanted fewer than 2^31 of one table or more.");
  }
  return sizes;
}

/// Begins to look up on one device. Its answer has the rows of each input, then counts, words of features, and keys.
/// `places`: where the rows are copied, one for each key. The answer then has the places, and on a GPU no rows.
void Begin(const ReaderStore* stores, ReaderInput* inputs, int64_t num_inputs, Owned& owned,
           const std::vector<float*>* places = nullptr) {
  const Sizes sizes = SizesOf(stores, inputs, num_inputs);
  const bool has_rows = places == nullptr || Device::kIsHost;
  const int64_t counts_at = has_rows ? sizes.rows_bytes : 0;
  const int64_t words_at = counts_at + Aligned(sizes.num_counts * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t words_bytes = num_inputs * kNumFeatureWords * static_cast<int64_t>(sizeof(int32_t));
  const int64_t keys_at = words_at + Aligned(words_bytes);
  const int64_t places_at = keys_at + sizes.num_keys * static_cast<int64_t>(sizeof(uint64_t));
  owned.Lend(places_at + (places == nullptr ? 0 : sizes.num_keys * static_cast<int64_t>(sizeof(float*))));
  char* memory = static_cast<char*>(owned.answer.memory);
  owned.answer.counts = reinterpret_cast<int32_t*>(memory + counts_at);
  auto* words = reinterpret_cast<int32_t*>(memory + words_at);
  auto* keys = reinterpret_cast<uint64_t*>(memory + keys_at);
  auto* own_places = places == nullptr ? nullptr : reinterpret_cast<float**>(memory + places_at);
  if (places != nullptr) std::copy(places->begin(), places->end(), own_places);
  std::vector<FrozenLookup> lookups;
  std::vector<StoreInputs> of_stores(static_cast<size_t>(sizes.num_lookups));  // lookups point to its vectors
  lookups.reserve(of_stores.size());
  int32_t num_tiles = 0;
  for (int64_t i = 0; i < num_inputs; ++i) {
    ReaderInput& input = inputs[i];
    if (IsFirstOfStore(inputs, i)) {
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
    const auto table = static_cast<int32_t>(input.table);
    const int32_t line[kNumFeatureWords] = {table, kCombinerNone, first, size, first, size, 1, 0, -1, num_tiles, 0, 0};
    std::memcpy(words, line, sizeof(line));
    num_tiles += std::max(1, static_cast<int32_t>(CeilDiv<int64_t>(size, kBagsPerTile)));
    input.rows = reinterpret_cast<float*>(memory);
    of_store.rows.push_back(memory);
    of_store.num_bags.push_back(size);
    if (has_rows) memory += RowsBytes(input, stores);
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
  owned.Run(lookups, own_places);
}

/// The keys of a lookup that one of several devices owns.
struct PartInputs {
  std::vector<uint64_t> keys;
  std::vector<float*> places;  // of the rows of the keys
  std::vector<ReaderInput> inputs;
};

/// Gives each part its keys, as `owners_of` in serving/model/store_plans.py does. The inputs have their rows.
std::vector<PartInputs> SplitInputs(const ReaderStore* stores, const ReaderInput* inputs, int64_t num_inputs,
                                    int64_t num_keys, int32_t num_parts) {
  constexpr uint64_t kNoName = 0;
  std::vector<PartInputs> parts(static_cast<size_t>(num_parts));
  for (PartInputs& part : parts) {
    const auto most = static_cast<size_t>(num_keys / num_parts + num_keys / 8 + 64);
    part.keys.reserve(most);
    part.places.reserve(most);
    part.inputs.assign(inputs, inputs + num_inputs);
  }
  for (int64_t i = 0; i < num_inputs; ++i) {
    for (PartInputs& part : parts)
      part.inputs[static_cast<size_t>(i)].num_keys = -static_cast<int64_t>(part.keys.size());
    float* place = inputs[i].rows;
    for (int64_t k = 0; k < inputs[i].num_keys; ++k) {
      const uint64_t key = inputs[i].keys[k];
      PartInputs& part = parts[PartitionOf(PartitionHash(key, kNoName)) % static_cast<uint32_t>(num_parts)];
      part.keys.push_back(key);
      part.places.push_back(place);
      place += stores[inputs[i].store].dim;
    }
    for (PartInputs& part : parts)
      part.inputs[static_cast<size_t>(i)].num_keys += static_cast<int64_t>(part.keys.size());
  }
  for (PartInputs& part : parts) {
    const uint64_t* keys = part.keys.data();
    for (ReaderInput& input : part.inputs) {
      input.keys = keys;
      keys += input.num_keys;
    }
  }
  return parts;
}

/// Looks up on several devices, each of which has the rows of the keys that it owns, and writes them into the answer.
void LookUpInParts(const ReaderPart* parts, int32_t num_parts, ReaderInput* inputs, int64_t num_inputs, Owned& owned) {
  const ReaderStore* stores = parts[0].stores;  // of the same dims and tables as those of the others
  const Sizes sizes = SizesOf(stores, inputs, num_inputs);
  owned.Lend(sizes.rows_bytes + sizes.num_counts * static_cast<int64_t>(sizeof(int32_t)));
  char* memory = static_cast<char*>(owned.answer.memory);
  owned.answer.counts = reinterpret_cast<int32_t*>(memory + sizes.rows_bytes);
  std::fill_n(owned.answer.counts, sizes.num_counts, 0);
  for (int64_t i = 0; i < num_inputs; ++i) {
    inputs[i].rows = reinterpret_cast<float*>(memory);
    memory += RowsBytes(inputs[i], stores);
  }
  std::vector<PartInputs> split = SplitInputs(stores, inputs, num_inputs, sizes.num_keys, num_parts);
  std::vector<std::unique_ptr<Owned>> answers;  // destroyed first: nothing writes into the answer of all any more
  for (int32_t p = 0; p < num_parts; ++p) {
    PartInputs& part = split[static_cast<size_t>(p)];
    if (part.keys.empty()) continue;
    answers.push_back(std::make_unique<Owned>(*static_cast<Device*>(parts[p].reader)));
    Begin(parts[p].stores, part.inputs.data(), num_inputs, *answers.back(), &part.places);
  }
  for (const auto& answer : answers) {
    answer->Wait();
    for (int64_t c = 0; c < sizes.num_counts; ++c) owned.answer.counts[c] += answer->answer.counts[c];
  }
}

}  // namespace
}  // namespace jaxsok

using jaxsok::Device;
using jaxsok::Guarded;

/// Opens a reader for tables of a device.
JAXSOK_VISIBLE const char* JaxsokReaderOpen(int32_t ordinal, Device** reader) {
  return Guarded([&] { *reader = Device::Open(ordinal).release(); });
}

/// Closes a reader, whose answers have all been given back.
JAXSOK_VISIBLE void JaxsokReaderClose(Device* reader) { delete reader; }

/// Looks up, and sets the rows of the inputs and the answer. It lends memory for the first of the parts.
JAXSOK_VISIBLE const char* JaxsokReaderLookup(const jaxsok::ReaderPart* parts, int32_t num_parts,
                                              jaxsok::ReaderInput* inputs, int64_t num_inputs,
                                              jaxsok::ReaderAnswer* answer) {
  return Guarded([&] {
    jaxsok::Owned owned(*static_cast<Device*>(parts[0].reader));
    if (num_parts == 1) {
      jaxsok::Begin(parts[0].stores, inputs, num_inputs, owned);
      owned.Wait();
    } else {
      jaxsok::LookUpInParts(parts, num_parts, inputs, num_inputs, owned);
    }
    *answer = owned.Release();
  });
}

/// Takes back the memory of an answer, if it has some.
JAXSOK_VISIBLE void JaxsokReaderGiveBack(const jaxsok::ReaderAnswer* answer) {
  if (answer->memory != nullptr) jaxsok::Pool::Get().GiveBack(answer->memory, answer->num_bytes);
}

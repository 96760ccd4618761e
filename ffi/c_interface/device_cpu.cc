#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "../kernels/index_cpu.h"
#include "../kernels/thread_executor_cpu.h"
#include "device.h"
#include "error.h"

namespace jaxsok {
namespace {

/// An executor that runs all tasks in the calling thread: a server has as many threads as it wants, and a lookup costs
/// microseconds.
class CallingThread final : public Executor {
 public:
  void ParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) override {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  }
};

/// Prefetches the rows of features with few keys, all features at once.
///
/// The kernels look up one feature after the other, and wait for its bucket and then for its row. Where tables do not
/// fit the caches, 26 features of one key took 14 us; with their rows prefetched they take 4 us.
void FetchRows(const FrozenLookup& lookup) {
  constexpr int64_t kFewKeys = 32;  // features with more keys are prefetched by the kernels
  constexpr int64_t kAtOnce = 128;  // memory lines in flight that stay in the nearest cache
  const StoreView& store = lookup.store;
  const int64_t row_bytes = int64_t{store.dim} * (store.row_dtype == kRowDtypeFloat32 ? 4 : store.scales ? 1 : 2);
  const uint64_t salt = SaltOf(store.counters);
  uint64_t keys[kAtOnce] = {};
  uint32_t tables[kAtOnce] = {}, row_ids[kAtOnce];
  static_assert(kAtOnce <= kKeysPerChunk);
  int64_t num_keys = 0;
  const auto fetch = [&] {
    FindChunk(store.index, salt, keys, tables, num_keys, row_ids, [](int64_t, uint32_t) {});
    for (int64_t i = 0; i < num_keys; ++i) {
      if (row_ids[i] >= store.capacity) continue;
      PrefetchRow(store.rows.At<char>(store.starts, row_ids[i], row_bytes), static_cast<int32_t>(row_bytes));
      if (store.scales != nullptr) __builtin_prefetch(store.scales + row_ids[i]);
    }
    num_keys = 0;
  };
  for (int32_t f = 0; f < lookup.batch.num_features; ++f) {
    const int32_t* words = lookup.batch.features + int64_t{f} * kNumFeatureWords;
    const int32_t size = words[kFeatureNumKeys];
    if (size > kFewKeys) continue;
    if (num_keys + size > kAtOnce) fetch();
    for (int32_t i = 0; i < size; ++i) {
      const uint64_t key = lookup.batch.keys[words[kFeatureKeyStart] + i];
      keys[num_keys] = key;
      tables[num_keys++] = key == kPaddingKey ? kNoTable : static_cast<uint32_t>(words[kFeatureTable]);
    }
  }
  fetch();
}

/// A lookup that has ended.
class Done final : public Running {
 public:
  void Wait() override {}
};

class Host final : public Device {
 public:
  const void* Place(const void* data, size_t) override { return data; }
  const void* PlaceOnHost(const void* data, size_t) override { return data; }

  void Run(void*, FrozenLookup* lookups, int32_t num_lookups) const override {
    CallingThread thread;
    LookUp(&thread, lookups, num_lookups, nullptr);
  }

  void* NewHostMemory(size_t num_bytes) const override {
    return ::operator new(num_bytes, std::align_val_t{kAlignment});
  }
  void DeleteHostMemory(void* memory) const override { ::operator delete(memory, std::align_val_t{kAlignment}); }

  std::unique_ptr<Running> Begin(FrozenLookup* lookups, int32_t num_lookups, int32_t* counts,
                                 float* const* places) override {
    int64_t num_bytes = 0;
    for (int32_t s = 0; s < num_lookups; ++s) num_bytes += lookups[s].batch.num_keys * lookups[s].store.dim * 4;
    const auto num_threads = std::min<int64_t>(num_bytes / kBytesOfThread, std::thread::hardware_concurrency());
    if (num_threads > 1) {
      ThreadExecutor threads(static_cast<int>(num_threads));
      LookUp(&threads, lookups, num_lookups, counts);
    } else {
      CallingThread thread;
      LookUp(&thread, lookups, num_lookups, counts);
    }
    for (int32_t s = 0; places != nullptr && s < num_lookups; ++s) {
      const size_t line_bytes = static_cast<size_t>(lookups[s].store.dim) * sizeof(float);
      for (int32_t f = 0; f < lookups[s].batch.num_features; ++f) {
        const char* rows = static_cast<const char*>(lookups[s].embeddings.data[f]);
        for (int64_t k = 0; k < lookups[s].num_bags[f]; ++k, rows += line_bytes) {
          std::memcpy(*places++, rows, line_bytes);
        }
      }
    }
    return std::make_unique<Done>();
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr int64_t kBytesOfThread = 1 << 20;  // of embeddings that are worth starting a thread

  static void LookUp(Executor* executor, FrozenLookup* lookups, int32_t num_lookups, int32_t* counts) {
    for (int32_t s = 0; s < num_lookups; ++s) {
      if (lookups[s].batch.num_features > 1) FetchRows(lookups[s]);
    }
    const LaunchError error = LaunchLookupFrozen(executor, lookups, num_lookups, counts);
    if (error == nullptr) return;
    if (std::strcmp(error, kIndexIsDamaged) != 0) Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_lookup: ", error);
    Refuse(JAXSOK_BAD_INDEX,
           "jaxsok_lookup: index: got a row beyond the capacity, wanted one below it; the folder is damaged: open it "
           "without JAXSOK_UNVERIFIED, which names the file.");
  }
};

}  // namespace

std::unique_ptr<Device> Device::Open(int32_t ordinal) {
  if (ordinal != 0) {
    Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_open: device: got ", ordinal,
           ", wanted 0: this is libjaxsok_cpu.so; link libjaxsok_cuda.so for tables on a GPU.");
  }
  return std::make_unique<Host>();
}

}  // namespace jaxsok

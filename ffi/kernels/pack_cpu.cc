// Packs a batch on the host (pack.h has the contract).
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/platform.h"
#include "pack.h"
#include "parallel_cpu.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace jaxsok {
namespace {

constexpr uint64_t kPadding = ~uint64_t{0};
constexpr int64_t kKeysOfTask =
    32 << 10;  // 256 KiB of keys: long compared with the start of a task, short with a batch
constexpr int64_t kWorkOfThread = 64 << 10;  // numbers that are worth waking a thread: some 20 us

// Threads -----------------------------------------------------------------------------------------------------

/// Tasks that threads have begun or will begin, each of them once.
class Job {
 public:
  /// `run` does a task, and returns 0 or the number of the item that it refuses.
  Job(int64_t num_tasks, std::function<int64_t(int64_t)> run) : run_(std::move(run)), num_tasks_(num_tasks) {}

  /// Does tasks until all have begun.
  void Work() {
    ExactFloats exact;
    int64_t done = 0;
    for (int64_t i; (i = next_.fetch_add(1)) < num_tasks_; ++done) MaxAtomically(&refused_, run_(i));
    if (done == 0 || num_done_.fetch_add(done) + done < num_tasks_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    ended_.notify_all();
  }

  /// Works too, waits for the other threads, and returns the largest number of an item that was refused, or 0. No
  /// thread takes a task after that. A process that was forked since gets -1: the threads are its parent's.
  int64_t End() {
    if (process_ != getpid()) return -1;
    Work();
    const auto patience = std::chrono::steady_clock::now() + kPatience;
    while (!IsDone() && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return IsDone(); });
    return refused_;
  }

 private:
  /// The last tasks take some 50 us; to fall asleep and be woken can take longer.
  static constexpr std::chrono::microseconds kPatience{100};

  bool IsDone() const { return num_done_.load() == num_tasks_; }

  const std::function<int64_t(int64_t)> run_;
  const int64_t num_tasks_;
  const pid_t process_ = getpid();
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> num_done_{0};
  int64_t refused_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
};

/// Threads that wait for work, shared by all calls of the process.
///
/// The call that ends a job works too and waits only for tasks that have begun, so it ends even if no thread could be
/// started. Threads are never joined: they end with the process. A forked process has none of its parent's threads, so
/// it gets its own pool.
class Threads {
 public:
  static Threads& Get() {
    static std::atomic<Threads*> current{nullptr};
    Threads* threads = current.load();
    while (threads == nullptr || threads->process_ != getpid()) {
      auto* made = new Threads;
      if (current.compare_exchange_strong(threads, made)) return *made;
      delete made;
    }
    return *threads;
  }

  /// Lets this number of threads work on a job, in addition to the one that ends it.
  void Begin(const std::shared_ptr<Job>& job, int64_t num_helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (num_threads_ < num_helpers && Start()) {
      }
      for (int64_t i = 0; i < num_helpers; ++i) waiting_.push_back(job);
    }
    Wake(num_helpers);
  }

 private:
  /// Wakes two threads, each of which wakes two: a caller that woke all of them would go on with its own work late (7
  /// us for each). No job is forgotten: a thread looks for a job before it waits, and a thread that takes one wakes
  /// others.
  void Wake(int64_t num_waiting) {
    for (int64_t i = 0; i < std::min<int64_t>(num_waiting, 2); ++i) came_.notify_one();
  }

  bool Start() {
    try {
      std::thread([this] { Serve(); }).detach();
    } catch (const std::system_error&) {
      return false;  // no more threads: the caller does their work
    }
    ++num_threads_;
    return true;
  }

  void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      came_.wait(lock, [this] { return !waiting_.empty(); });
      std::shared_ptr<Job> job = std::move(waiting_.front());
      waiting_.pop_front();
      const auto num_waiting = static_cast<int64_t>(waiting_.size());
      lock.unlock();
      Wake(num_waiting);
      job->Work();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::shared_ptr<Job>> waiting_;
  int num_threads_ = 0;
};

/// Begins a job over `num_numbers` numbers in total, with up to `num_threads` threads, the one that ends it among them.
std::shared_ptr<Job> Begin(int32_t num_threads, int64_t num_numbers, int64_t num_tasks,
                           std::function<int64_t(int64_t)> run) {
  auto job = std::make_shared<Job>(num_tasks, std::move(run));
  const int64_t num_helpers = std::min({num_threads - int64_t{1}, num_numbers / kWorkOfThread, num_tasks - 1});
  if (num_helpers > 0) Threads::Get().Begin(job, num_helpers);
  return job;
}

// Numbers -----------------------------------------------------------------------------------------------------

template <typename T>
T Load(const char* place) {
  T value;
  std::memcpy(&value, place, sizeof(T));  // columns of a file need not be aligned
  return value;
}

/// Calls function(T{}) for the integer type T.
template <typename Function>
bool WithInteger(PackType type, const Function& function) {
  switch (type) {
    case PackType::kI8:
      return function(int8_t{});
    case PackType::kI16:
      return function(int16_t{});
    case PackType::kI32:
      return function(int32_t{});
    case PackType::kI64:
      return function(int64_t{});
    case PackType::kU8:
      return function(uint8_t{});
    case PackType::kU16:
      return function(uint16_t{});
    case PackType::kU32:
      return function(uint32_t{});
    case PackType::kU64:
      return function(uint64_t{});
    default:
      return false;
  }
}

/// The beginning of NumPy's PyArrayInterface.
struct ArrayInterface {
  int two;
  int num_axes;
  char kind;
  int item_bytes;
  int flags;
  intptr_t* shape;
  intptr_t* strides;
  void* data;
};

// Bags --------------------------------------------------------------------------------------------------------

template <typename T>
bool WriteOffsets(const PackBags& bags) {
  const char* given = bags.given;
  const auto num_keys = static_cast<uint64_t>(bags.num_keys);
  if (bags.is_offsets) {
    if (Load<T>(given) != 0) return false;
    given += bags.stride;
  }
  uint64_t end = 0;
  int64_t rest = bags.num_bags;
  for (int64_t part = 0; part < bags.num_parts; ++part) {
    const uint64_t begin = end;
    bags.ends[part] = static_cast<int64_t>(begin);
    int32_t* offsets = bags.offsets + part * bags.offsets_step;
    const int64_t num_bags = std::min(rest, bags.bags_of_part);
    rest -= num_bags;
    offsets[0] = 0;
    for (int64_t i = 0; i < num_bags; ++i, given += bags.stride) {
      // Negative numbers become huge ones, which exceed the feature's keys.
      const auto value = static_cast<uint64_t>(Load<T>(given));
      if (bags.is_offsets) {
        if (value < end || value > num_keys) return false;
        end = value;
      } else {
        if (value > num_keys - end) return false;
        end += value;
      }
      offsets[i + 1] = static_cast<int32_t>(end - begin);
    }
    for (int64_t i = num_bags; i < bags.bags_of_part; ++i) offsets[i + 1] = static_cast<int32_t>(end - begin);
  }
  bags.ends[bags.num_parts] = static_cast<int64_t>(end);
  return true;
}

// Keys and weights --------------------------------------------------------------------------------------------

/// The layout of a feature's numbers: `width` in an input row; rows and the numbers of a row each have a stride.
struct Lines {
  const char* data;
  int64_t line_stride;
  int64_t stride;
  int64_t width;
};

/// Writes write(number) for the numbers from `begin` to `end`.
template <typename From, typename To, typename Write>
void CopyNumbers(Lines from, int64_t begin, int64_t end, To* to, const Write& write) {
  constexpr int64_t kSize = sizeof(From);
  if (from.width == 1) from.stride = from.line_stride;
  if (from.width == 1 || from.line_stride == from.width * from.stride) from.width = INT64_MAX;  // one contiguous row
  while (begin < end) {
    const int64_t line = begin / from.width, column = begin % from.width;
    const int64_t num = std::min(end - begin, from.width - column);
    const char* place = from.data + line * from.line_stride + column * from.stride;
    if (from.stride == kSize) {  // the compiler vectorises this loop
      for (int64_t i = 0; i < num; ++i) to[i] = write(Load<From>(place + i * kSize));
    } else {
      for (int64_t i = 0; i < num; ++i) to[i] = write(Load<From>(place + i * from.stride));
    }
    to += num;
    begin += num;
  }
}

/// The part of a feature that one shard gets.
struct Part {
  PackKeys item;
  int64_t number;  // of the item
  int64_t begin;   // among the keys of the feature
  int64_t end;
  int64_t num_checked;  // keys after `end` that must be padding
  char* packed;
  float* weights;
  const int32_t* offsets;
};

Part PartOf(const PackKeys& item, int64_t number, int64_t part) {
  Part made = {item, number, 0, 0, 0, item.packed + part * item.part_bytes, nullptr, nullptr};
  if (item.ends != nullptr) {
    made.begin = item.ends[part];
    made.end = item.ends[part + 1];
    if (part == item.num_parts - 1) made.num_checked = item.num_keys - made.end;
  } else {
    made.begin = std::min(part * item.size, item.num_keys);
    made.end = std::min(made.begin + item.size, item.num_keys);
  }
  if (item.weights != nullptr) made.weights = reinterpret_cast<float*>(item.packed_weights + part * item.part_bytes);
  if (item.square > 0) made.offsets = item.offsets + part * (item.num_bags + 1);
  return made;
}

template <typename From, typename To>
void CopyKeys(const PackKeys& item, int64_t begin, int64_t end, To* to) {
  CopyNumbers<From>({item.keys, item.line_stride, item.key_stride, item.width}, begin, end, to, [](From key) {
    // Sign-extends signed types.
    return static_cast<To>(static_cast<std::conditional_t<std::is_signed_v<From>, int64_t, uint64_t>>(key));
  });
}

template <typename From>
bool CopyWeights(const PackKeys& item, int64_t begin, int64_t end, float* to) {
  bool is_finite = true;
  CopyNumbers<From>({item.weights, item.weight_line_stride, item.weight_stride, item.width}, begin, end, to,
                    [&is_finite](From weight) {
                      const auto rounded = static_cast<float>(weight);  // infinite if it is too large for a float
                      is_finite &= std::abs(rounded) <= std::numeric_limits<float>::max();
                      return rounded;
                    });
  return is_finite;
}

bool CopyWeightsOf(const PackKeys& item, int64_t begin, int64_t end, float* to) {
  return item.weight_type == PackType::kF64 ? CopyWeights<double>(item, begin, end, to)
                                            : CopyWeights<float>(item, begin, end, to);
}

/// Copies numbers with non-temporal stores: the host does not read them again, and its next work, mostly in Python, is
/// slow if they have evicted its own data from the caches.
template <typename To>
void Stream(const To* from, int64_t num, To* to) {
#if defined(__x86_64__)
  for (; num > 0 && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) != 0; --num) *to++ = *from++;
  for (constexpr int64_t kStep = sizeof(__m128i) / sizeof(To); num >= kStep; num -= kStep, from += kStep, to += kStep) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
#endif
  std::copy_n(from, num, to);
}

/// Copies keys as CopyKeys, with non-temporal stores.
template <typename From, typename To>
void StreamKeys(const PackKeys& item, int64_t begin, int64_t end, To* to) {
  constexpr int64_t kMost = 512;
  alignas(64) To keys[kMost];
  for (; begin < end; begin += kMost, to += kMost) {
    const int64_t num = std::min(kMost, end - begin);
    CopyKeys<From>(item, begin, begin + num, keys);
    Stream(keys, num, to);
  }
#if defined(__x86_64__)
  _mm_sfence();  // before another thread hears that the task is done
#endif
}

/// Writes places `first` to `last` of a part.
template <typename From, typename To>
bool WritePlaces(const Part& part, int64_t first, int64_t last) {
  const PackKeys& item = part.item;
  To* to = reinterpret_cast<To*>(part.packed);
  const int64_t middle = std::clamp(part.end - part.begin, first, last);
  StreamKeys<From>(item, part.begin + first, part.begin + middle, to + first);
  std::fill(to + middle, to + last, static_cast<To>(kPadding));
  if (part.weights == nullptr) return true;
  std::fill(part.weights + middle, part.weights + last, 0.0f);
  return CopyWeightsOf(item, part.begin + first, part.begin + middle, part.weights + first);
}

/// Writes bags `first` to `last` of a part, each `square` places wide.
template <typename From, typename To>
bool WriteSquare(const Part& part, int64_t first, int64_t last) {
  const int64_t square = part.item.square;
  To* to = reinterpret_cast<To*>(part.packed) + first * square;
  for (int64_t bag = first; bag < last; ++bag, to += square) {
    const int64_t begin = part.begin + part.offsets[bag], end = part.begin + part.offsets[bag + 1];
    if (end - begin > square) return false;
    CopyKeys<From>(part.item, begin, end, to);
    std::fill(to + (end - begin), to + square, static_cast<To>(kPadding));
  }
  return true;
}

/// Returns whether the keys after the last bag are padding.
template <typename From>
bool EndsWithPadding(const Part& part) {
  constexpr int64_t kMost = 256;
  uint64_t all = kPadding;
  for (int64_t i = part.end, last = part.end + part.num_checked; i < last; i += kMost) {
    uint64_t keys[kMost];
    const int64_t num = std::min(kMost, last - i);
    CopyKeys<From>(part.item, i, i + num, keys);
    for (int64_t j = 0; j < num; ++j) all &= keys[j];
  }
  return all == kPadding;
}

/// A range of the places of a part, or of its bags if they become a rectangle.
struct Task {
  int64_t part;
  int64_t first;
  int64_t last;
};

bool DoTask(const Part& part, int64_t first, int64_t last) {
  const PackKeys& item = part.item;
  return WithInteger(item.type, [&](auto key) {
    using From = decltype(key);
    if (first == 0 && !EndsWithPadding<From>(part)) return false;
    if (item.square > 0) {
      return item.is_narrow ? WriteSquare<From, uint32_t>(part, first, last)
                            : WriteSquare<From, uint64_t>(part, first, last);
    }
    return item.is_narrow ? WritePlaces<From, uint32_t>(part, first, last)
                          : WritePlaces<From, uint64_t>(part, first, last);
  });
}

}  // namespace
}  // namespace jaxsok

JAXSOK_VISIBLE int64_t JaxsokPackAddresses(int64_t* pointers, int64_t num_arrays) {
  for (int64_t i = 0; i < num_arrays; ++i) {
    pointers[i] = reinterpret_cast<int64_t>(reinterpret_cast<const jaxsok::ArrayInterface*>(pointers[i])->data);
  }
  return 0;
}

JAXSOK_VISIBLE int64_t JaxsokPackBags(const jaxsok::PackBags* items, int64_t num_items, int32_t num_threads) {
  using namespace jaxsok;
  int64_t num_bags = 0;
  for (int64_t i = 0; i < num_items; ++i) num_bags += items[i].num_bags;
  const auto run = [items](int64_t i) {
    const bool is_read =
        WithInteger(items[i].type, [&](auto number) { return WriteOffsets<decltype(number)>(items[i]); });
    return is_read ? 0 : i + 1;
  };
  return Begin(num_threads, num_bags, num_items, run)->End();
}

JAXSOK_VISIBLE void JaxsokBeginKeys(const jaxsok::PackKeys* items, int64_t num_items, int32_t num_threads,
                                    void** begun) {
  using namespace jaxsok;
  std::vector<Part> parts;
  std::vector<Task> tasks;
  int64_t num_keys = 0;
  for (int64_t i = 0; i < num_items; ++i) {
    const PackKeys& item = items[i];
    const int64_t size = item.square > 0 ? item.num_bags : item.size;
    const int64_t step = item.square > 0 ? std::max<int64_t>(1, kKeysOfTask / item.square) : kKeysOfTask;
    num_keys += item.size * item.num_parts;
    for (int64_t part = 0; part < item.num_parts; ++part) {
      parts.push_back(PartOf(item, i + 1, part));
      int64_t first = 0;
      do {
        tasks.push_back({static_cast<int64_t>(parts.size()) - 1, first, std::min(first + step, size)});
        first += step;
      } while (first < size);
    }
  }
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  *begun =
      new auto(Begin(num_threads, num_keys, num_tasks, [parts = std::move(parts), tasks = std::move(tasks)](int64_t t) {
        const Part& part = parts[tasks[t].part];
        return DoTask(part, tasks[t].first, tasks[t].last) ? 0 : part.number;
      }));
}

JAXSOK_VISIBLE int64_t JaxsokEndKeys(void** begun) {
  const std::unique_ptr<std::shared_ptr<jaxsok::Job>> job(
      static_cast<std::shared_ptr<jaxsok::Job>*>(std::exchange(*begun, nullptr)));
  return job == nullptr ? 0 : (*job)->End();
}

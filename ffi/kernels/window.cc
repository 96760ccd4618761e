// The windows of this process: their owners, and the meetings of the threads that issue work to the devices.
#include "window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace jaxsok {
namespace {

/// Threads that wait for each other, all those of a group; changed under its mutex.
struct Cohorts {
  size_t num_waiting = 0;
  std::atomic<uint64_t> number{0};
  bool is_uneven = false;  // the last one was not complete in time: the next ones wait for a moment only
};

/// A group of shards that exchange with each other; a mesh with several axes has several groups.
struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int32_t> shards;   // those of this process
  std::vector<uint64_t> waited;  // by shard: the barriers at which its thread has arrived, where the host waits
  Cohorts beginning, issuing;
  std::string failure;              // empty: none; set once
  WindowFailure* shared = nullptr;  // shared with the devices; nullptr: none of them is in this process

  explicit Group(int32_t num_shards) : waited(num_shards) {}

  /// Records a failure; under the mutex. The text is kept: callers hold pointers to it.
  LaunchError Fail(const std::string& why) {
    if (failure.empty()) failure = why + "; the state is lost: restart from a checkpoint";
    const_cast<volatile WindowFailure*>(shared)->word = WindowFailure::kFoundByHost;  // waiting devices end too
    changed.notify_all();
    return failure.c_str();
  }
  /// Reads the failure that devices have found, if any; under the mutex.
  void Look() {
    if (shared == nullptr) return;
    const uint64_t word = const_cast<const volatile WindowFailure*>(shared)->word;
    if (word == 0 || !failure.empty()) return;
    const std::string barrier = " at barrier " + std::to_string(WindowFailure::EpochOf(word));
    const std::string shard = "shard " + std::to_string(WindowFailure::ShardOf(word));
    const std::string peer = "shard " + std::to_string(WindowFailure::PeerOf(word));
    if (WindowFailure::KindOf(word) == WindowFailure::kTimeOut) {
      Fail(shard + " waited in vain for " + peer + barrier);
    } else {
      Fail(shard + " and " + peer + " exchange for different calls" + barrier +
           "; call programs from one thread, in the same order in all processes");
    }
    std::fprintf(stderr, "jaxsok: window: %s.\n", failure.c_str());
  }
};

/// The memory that shards receive in. It stays until the process ends.
struct Windows {
  int64_t num_bytes = 0;
  char* own = nullptr;
  char* received[kMostWindowShards] = {};  // of each shard, as this device addresses them
  std::map<int32_t, char*> imported;       // by shard, those of other processes
};

}  // namespace

struct WindowDevice {
  Group* group = nullptr;
  WindowMember member;
  SideStream* side = nullptr;
  // Held during an exchange: threads that call for one device take turns. A CUDA graph that is being recorded keeps the
  // side stream until it is complete, so no two threads may record for one device at once.
  std::mutex mutex;
  int64_t most_seconds = 0;
  std::mutex adding;                              // guards the vector
  std::vector<std::unique_ptr<Windows>> windows;  // each larger than the one before
  std::unique_ptr<Windows> next;                  // not yet in use: other processes may not have mapped theirs

  /// Returns the smallest windows with room; nullptr: there are none. All shards choose alike, also if some of them
  /// already have more.
  const Windows* Fitting(int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(adding);
    for (const auto& each : windows) {
      if (each->num_bytes >= num_bytes) return each.get();
    }
    return nullptr;
  }
};

namespace {

/// The windows of one mesh. They live until the process ends.
struct WindowSet {
  int32_t num_shards = 0;
  std::vector<std::unique_ptr<Group>> groups;
  std::map<int32_t, std::unique_ptr<WindowDevice>> devices;  // of this process, by ordinal
  int64_t room = 0, next_room = 0;  // bytes of the largest windows, also where no device is in this process
  std::mutex growing;

  int32_t NumberOf(const Group* group) const {
    int32_t number = 0;
    while (groups[number].get() != group) ++number;
    return number;
  }
};

struct Registry {
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<WindowSet>> sets;
};

Registry& TheRegistry() {
  static Registry* registry = new Registry;  // never destroyed: threads of XLA may outlive static objects
  return *registry;
}

WindowDevice* DeviceOf(int32_t window, int32_t device) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto set = registry.sets.find(window);
  if (set == registry.sets.end()) return nullptr;
  const auto found = set->second->devices.find(device);
  return found == set->second->devices.end() ? nullptr : found->second.get();
}

constexpr int64_t kPageBytes = 4096;
constexpr LaunchError kNoWindow =
    "this device has no window: the program was not traced in this process; trace it here, or use wire='dense'";

/// Returns 15 bits that, most likely, differ between calls of different kinds or sizes.
uint32_t TagOf(WindowCall call, int64_t size) {
  return static_cast<uint32_t>((static_cast<uint64_t>(size) * 8 + call) * 0x9E3779B97F4A7C15 >> 49);
}

constexpr std::chrono::microseconds kSpin(100);

/// Waits until the threads of all shards of the process have come to this point, or for a while.
///
/// CUDA loads a kernel at its first launch, and allocates for a graph when it is made; both may wait for running
/// kernels. If one of these waits for peers, the threads of the peers must have issued the work until their own barrier
/// before. The bytes that arrive do not depend on this meeting, so after `longest` the thread goes on.
///
/// The threads of one program come within less time than a sleeping thread needs to wake up, so it first spins.
void WaitForThreads(Group& group, Cohorts& cohorts, std::chrono::milliseconds longest) {
  if (group.shards.size() < 2) return;
  std::unique_lock<std::mutex> lock(group.mutex);
  const uint64_t number = cohorts.number;
  if (++cohorts.num_waiting == group.shards.size()) {
    cohorts.num_waiting = 0;
    cohorts.number += 1;
    cohorts.is_uneven = false;
    group.changed.notify_all();
    return;
  }
  lock.unlock();
  const auto asleep_at = std::chrono::steady_clock::now() + kSpin;
  while (cohorts.number == number && std::chrono::steady_clock::now() < asleep_at) std::this_thread::yield();
  lock.lock();
  const auto is_over = [&] { return cohorts.number != number || !group.failure.empty(); };
  if (group.changed.wait_for(lock, cohorts.is_uneven ? std::chrono::milliseconds(1) : longest, is_over)) return;
  cohorts.num_waiting -= 1;
  cohorts.is_uneven = true;
}

constexpr std::chrono::milliseconds kLongestBeginning(10'000), kLongestIssuing(1'000);

/// Launches a barrier. Calls that are not recorded may load kernels before and after it.
LaunchError Barrier(WindowDevice& device, Stream stream, uint32_t tag) {
  if (IsRecording(stream)) return LaunchBarrier(stream, device.member, tag, device.most_seconds);
  WaitForThreads(*device.group, device.group->issuing, kLongestIssuing);
  const LaunchError error = LaunchBarrier(stream, device.member, tag, device.most_seconds);
  WaitForThreads(*device.group, device.group->issuing, kLongestIssuing);
  return error;
}

/// Waits until the threads of all shards have arrived at a barrier.
LaunchError WaitOnHost(Group& group, int32_t shard, int64_t most_seconds) {
  std::unique_lock<std::mutex> lock(group.mutex);
  const uint64_t epoch = ++group.waited[shard];
  group.changed.notify_all();
  const auto have_come = [&] {
    return std::all_of(group.shards.begin(), group.shards.end(), [&](int32_t s) { return group.waited[s] >= epoch; });
  };
  group.changed.wait_for(lock, std::chrono::seconds(most_seconds),
                         [&] { return have_come() || !group.failure.empty(); });
  if (have_come()) return nullptr;
  if (!group.failure.empty()) return group.failure.c_str();
  std::string missing;
  for (int32_t s : group.shards) {
    if (group.waited[s] < epoch) missing += (missing.empty() ? "" : ", ") + std::to_string(s);
  }
  return group.Fail("shard " + std::to_string(shard) + " waited " + std::to_string(most_seconds) + " s at barrier " +
                    std::to_string(epoch) + " for shards " + missing);
}

}  // namespace

WindowExchange::WindowExchange(Stream stream, int32_t window, int32_t device, WindowCall call, int64_t num_bytes,
                               Stream* second)
    : stream_(stream) {
  WindowDevice* found = DeviceOf(window, device);
  if (found == nullptr) {
    error_ = kNoWindow;
    return;
  }
  found->mutex.lock();
  device_ = found;
  tag_ = TagOf(call, num_bytes);
  Group& group = *found->group;
  const Windows* windows = found->Fitting(num_bytes);
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    group.Look();
    if (!group.failure.empty()) {
      error_ = group.failure.c_str();
    } else if (windows == nullptr) {
      error_ = group.Fail("the window is smaller than what a shard receives; trace the program in this process");
    }
  }
  if (error_ != nullptr) return;
  windows_ = windows->received;
  if (second != nullptr) {
    error_ = Fork(device_->side, stream, second);
    has_second_stream_ = error_ == nullptr;
  }
  if (error_ == nullptr) error_ = Wait(stream);
}

WindowExchange::~WindowExchange() {
  if (device_ == nullptr) return;
  if (has_second_stream_) Join(device_->side, stream_);  // the call has failed; its arrays may be given back
  if (!is_done_) {
    std::lock_guard<std::mutex> lock(device_->group->mutex);
    device_->group->Fail("a shard failed between the parts of an exchange");
  }
  device_->mutex.unlock();
}

LaunchError MeetThreads(int32_t window, int32_t device) {
  WindowDevice* found = DeviceOf(window, device);
  if (found == nullptr) return kNoWindow;
  if (!kWaitsOnHost) WaitForThreads(*found->group, found->group->beginning, kLongestBeginning);
  return nullptr;
}

LaunchError LaunchWindowSum(Stream stream, int32_t window, int32_t device, const int32_t* words, int64_t num_words,
                            int32_t* sums) {
  WindowDevice* found = DeviceOf(window, device);
  if (found == nullptr || found->Fitting(0) == nullptr) return kNoWindow;
  const std::lock_guard<std::mutex> turn(found->mutex);
  Group& group = *found->group;
  const WindowMember& member = found->member;
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    group.Look();
    if (!group.failure.empty()) return group.failure.c_str();
  }
  if (!kWaitsOnHost) {
    if (!IsRecording(stream)) WaitForThreads(group, group.issuing, kLongestIssuing);
    const LaunchError error =
        LaunchSum(stream, member, TagOf(kCallSum, num_words), found->most_seconds, words, num_words, sums);
    if (error == nullptr) return nullptr;
    std::lock_guard<std::mutex> lock(group.mutex);
    return group.Fail(std::string("a sum was not launched: ") + error);
  }
  for (int64_t begin = 0; begin < num_words; begin += kSumWords) {
    const int64_t n = std::min(kSumWords, num_words - begin);
    const size_t half = group.waited[member.shard] & 1;  // only this thread changes it
    for (int32_t s = 0; s < member.num_shards; ++s) {
      std::copy_n(words + begin, n, member.heads[s]->sums[half][member.shard]);
    }
    if (LaunchError error = WaitOnHost(group, member.shard, found->most_seconds)) return error;
    const auto& received = member.heads[member.shard]->sums[half];
    for (int64_t i = 0; i < n; ++i) {
      uint32_t sum = 0;  // modulo 2^32
      for (int32_t s = 0; s < member.num_shards; ++s) sum += static_cast<uint32_t>(received[s][i]);
      sums[begin + i] = static_cast<int32_t>(sum);
    }
  }
  return nullptr;
}

int32_t WindowExchange::num_shards() const { return device_ == nullptr ? 1 : device_->member.num_shards; }

int32_t WindowExchange::shard() const { return device_ == nullptr ? 0 : device_->member.shard; }

LineTarget WindowExchange::Target(int64_t lines_of_part, int64_t line_bytes) const {
  LineTarget target{};
  target.lines_of_part = static_cast<uint32_t>(lines_of_part);
  const WindowMember& member = device_->member;
  target.first_line = member.shard * lines_of_part;
  for (int32_t s = 0; s < member.num_shards; ++s) {
    target.parts[s] = windows_[s] + member.shard * lines_of_part * line_bytes;
  }
  return target;
}

void* WindowExchange::received() const { return windows_[device_->member.shard]; }

LaunchError WindowExchange::Meet(Stream stream) {
  if (has_second_stream_) {
    has_second_stream_ = false;
    if (LaunchError error = Join(device_->side, stream)) return error;
  }
  tag_ |= 0x8000;  // so that the two barriers of an exchange differ
  return Wait(stream);
}

LaunchError WindowExchange::Wait(Stream stream) {
  const WindowMember& member = device_->member;
  if (kWaitsOnHost) return WaitOnHost(*device_->group, member.shard, device_->most_seconds);
  return Barrier(*device_, stream, tag_);
}

namespace {

// Windows are added in steps, between which processes wait for each other: `Take` allocates them, `Map` maps those of
// other processes, and `Settle` begins to use them, or unmaps them if a process could not map all.

void Unmap(WindowDevice& device, int32_t ordinal) {
  for (auto& [shard, window] : device.next->imported) ReleaseImported(ordinal, window);
  device.next->imported.clear();
}

/// Frees the windows that were allocated and are not in use.
void DropNext(WindowSet& set) {
  for (auto& [ordinal, device] : set.devices) {
    if (device->next == nullptr) continue;
    Unmap(*device, ordinal);
    ReturnWindow(ordinal, device->next->own);
    device->next = nullptr;
  }
}

LaunchError Take(WindowSet& set, int64_t num_bytes, WindowHandle* handles) {
  DropNext(set);  // if another process had no memory
  // At least twice the last, so that all windows together are at most twice the last.
  num_bytes = CeilDiv(std::max({num_bytes, 2 * set.room, int64_t{1}}), kPageBytes) * kPageBytes;
  set.next_room = num_bytes;
  for (auto& [ordinal, device] : set.devices) {
    char* own = TakeWindow(ordinal, kWindowHeadBytes + num_bytes);
    LaunchError error = own == nullptr ? "a device has no room for its window" : nullptr;
    if (error == nullptr) {
      device->next = std::make_unique<Windows>();
      device->next->num_bytes = num_bytes;
      device->next->own = own;
      const int64_t place = int64_t{set.NumberOf(device->group)} * set.num_shards + device->member.shard;
      if (handles != nullptr) error = ExportWindow(ordinal, own, &handles[place]);
    }
    if (error == nullptr) continue;
    DropNext(set);
    return error;
  }
  return nullptr;
}

LaunchError Map(WindowSet& set, const WindowHandle* handles) {
  for (auto& [ordinal, device] : set.devices) {
    const int64_t first = int64_t{set.NumberOf(device->group)} * set.num_shards;
    for (int32_t s = 0; s < set.num_shards; ++s) {
      const std::vector<int32_t>& own = device->group->shards;
      if (std::find(own.begin(), own.end(), s) != own.end()) continue;
      char* window = nullptr;
      if (LaunchError error = ImportWindow(ordinal, handles[first + s], &window)) return error;
      device->next->imported[s] = window;
    }
  }
  return nullptr;
}

/// The next `Take` frees windows that are not used: CUDA allows it once no process maps them.
void Settle(WindowSet& set, bool is_mapped) {
  if (!is_mapped) {
    for (auto& [ordinal, device] : set.devices) {
      if (device->next != nullptr) Unmap(*device, ordinal);
    }
    return;
  }
  for (auto& [ordinal, device] : set.devices) {
    std::map<int32_t, char*> windows = device->next->imported;
    for (auto& [other, peer] : set.devices) {
      if (peer->group == device->group) windows[peer->member.shard] = peer->next->own;
    }
    for (auto& [shard, window] : windows) {
      device->next->received[shard] = window + kWindowHeadBytes;
      if (device->windows.empty()) device->member.heads[shard] = reinterpret_cast<WindowHead*>(window);
    }
  }
  for (auto& [ordinal, device] : set.devices) {
    std::lock_guard<std::mutex> lock(device->adding);
    device->windows.push_back(std::move(device->next));
  }
  set.room = set.next_room;
}

WindowSet* SetOf(int32_t window) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.sets.find(window);
  return found == registry.sets.end() ? nullptr : found->second.get();
}

}  // namespace
}  // namespace jaxsok

/// Names the devices of a mesh: `ordinals` has those of each group, by shard; -1: a device of another process. Returns
/// nullptr, or what went wrong.
JAXSOK_VISIBLE const char* JaxsokWindowOpen(int32_t window, int32_t num_groups, int32_t num_shards,
                                            const int32_t* ordinals, int64_t most_seconds) {
  using namespace jaxsok;
  if (num_shards > kMostWindowShards) return "too many shards";
  if (SetOf(window) != nullptr) return nullptr;
  auto set = std::make_unique<WindowSet>();
  set->num_shards = num_shards;
  for (int32_t g = 0; g < num_groups; ++g) {
    set->groups.push_back(std::make_unique<Group>(num_shards));
    Group& group = *set->groups.back();
    const int32_t* of_group = ordinals + int64_t{g} * num_shards;
    for (int32_t s = 0; s < num_shards; ++s) {
      if (of_group[s] < 0) continue;
      if (group.shared == nullptr) group.shared = TakeFailure(of_group[s]);
      if (group.shared == nullptr) return "the host has no memory that devices share";
      group.shards.push_back(s);
      auto device = std::make_unique<WindowDevice>();
      device->group = &group;
      device->member.shard = s;
      device->member.num_shards = num_shards;
      device->member.failure = group.shared;
      device->most_seconds = most_seconds;
      if (LaunchError error = PrepareDevice(of_group[s], of_group, num_shards, &device->side)) return error;
      set->devices[of_group[s]] = std::move(device);
    }
  }
  // Reports failures while the rest of the process may be waiting for a failed device.
  try {
    std::thread([groups = &set->groups] {
      for (;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        for (auto& group : *groups) {
          std::lock_guard<std::mutex> look(group->mutex);
          group->Look();
        }
      }
    }).detach();
  } catch (const std::system_error&) {
    return kNoThread;
  }
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.sets[window] = std::move(set);
  return nullptr;
}

/// Makes sure that the devices of a mesh of this process have windows that receive `num_bytes`. Returns nullptr, or
/// what went wrong.
JAXSOK_VISIBLE const char* JaxsokWindowReserve(int32_t window, int64_t num_bytes) {
  using namespace jaxsok;
  WindowSet* set = SetOf(window);
  if (set == nullptr) return "unknown window";
  std::lock_guard<std::mutex> lock(set->growing);  // threads that trace take turns
  if (std::max(num_bytes, int64_t{1}) <= set->room) return nullptr;
  for (auto& group : set->groups) {
    std::lock_guard<std::mutex> look(group->mutex);
    if (!group->failure.empty()) return group->failure.c_str();
  }
  const LaunchError error = Take(*set, num_bytes, nullptr);
  if (error == nullptr) Settle(*set, true);
  return error;
}

// The steps of `JaxsokWindowReserve` for several processes, which wait for each other after each step. `handles` has 64
// bytes for each shard of each group.

JAXSOK_VISIBLE const char* JaxsokWindowTake(int32_t window, int64_t num_bytes, void* handles) {
  using namespace jaxsok;
  return Take(*SetOf(window), num_bytes, static_cast<WindowHandle*>(handles));
}
JAXSOK_VISIBLE const char* JaxsokWindowMap(int32_t window, const void* handles) {
  return jaxsok::Map(*jaxsok::SetOf(window), static_cast<const jaxsok::WindowHandle*>(handles));
}
JAXSOK_VISIBLE void JaxsokWindowSettle(int32_t window, int32_t is_mapped) {
  jaxsok::Settle(*jaxsok::SetOf(window), is_mapped != 0);
}

/// Returns the bytes that a device receives at most in one exchange.
JAXSOK_VISIBLE int64_t JaxsokWindowRoom(int32_t window) {
  const jaxsok::WindowSet* set = jaxsok::SetOf(window);
  return set == nullptr ? 0 : set->room;
}
/// Returns the bytes of a device's windows, in total.
JAXSOK_VISIBLE int64_t JaxsokWindowBytes(int32_t window) {
  const jaxsok::WindowSet* set = jaxsok::SetOf(window);
  if (set == nullptr || set->devices.empty()) return 0;
  jaxsok::WindowDevice& first = *set->devices.begin()->second;
  std::lock_guard<std::mutex> lock(first.adding);
  int64_t num_bytes = 0;
  for (const auto& each : first.windows) num_bytes += jaxsok::kWindowHeadBytes + each->num_bytes;
  return num_bytes;
}

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

using Clock = std::chrono::steady_clock;

/// A group of shards that exchange with each other; a mesh with several axes has several groups.
///
/// A thread issues the work of one device. Before a device starts to wait for its peers, the threads of all peers must
/// have issued the work that the device waits for. Otherwise a thread that loads a kernel could keep another thread
/// from issuing that work: CUDA loads a kernel at its first launch, which may wait for running kernels.
struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int32_t> shards;                          // those of this process
  std::vector<std::atomic<uint64_t>> begun, met, over;  // by shard, the last exchange; written under the mutex
  std::vector<std::atomic<int64_t>> runs;               // by half and shard: the program run of an exchange
  bool is_closed = false;                               // no exchange begins after `last_allowed`
  uint64_t last_allowed = 0;
  std::string failure;              // empty: none; set once
  WindowFailure* shared = nullptr;  // shared with the devices; nullptr: none of them is in this process

  explicit Group(int32_t num_shards) : begun(num_shards), met(num_shards), over(num_shards), runs(2 * num_shards) {}

  /// Returns the last exchange that a shard of this process has begun; under the mutex.
  uint64_t Last() const {
    uint64_t last = 0;
    for (int32_t s : shards) last = std::max(last, begun[s].load());
    return last;
  }
  /// Returns whether all shards of this process have reached an exchange.
  bool HaveAllReached(const std::vector<std::atomic<uint64_t>>& epochs, uint64_t epoch) const {
    for (int32_t s : shards) {
      if (epochs[s] < epoch) return false;
    }
    return true;
  }
  /// Returns the run for which a shard exchanges. It stays until the shard has met this one in the next exchange too.
  std::atomic<int64_t>& RunOf(int32_t shard, uint64_t epoch) { return runs[2 * shard + (epoch & 1)]; }
  /// Returns whether all shards of this process, which have met, exchange for the same run of a program.
  bool IsOneRun(uint64_t epoch) {
    return std::all_of(shards.begin(), shards.end(),
                       [&](int32_t s) { return RunOf(s, epoch) == RunOf(shards[0], epoch); });
  }
  /// Records a failure; under the mutex. The text is kept: callers hold pointers to it.
  LaunchError Fail(const std::string& why) {
    if (failure.empty()) failure = why + "; the state is lost: restart from a checkpoint";
    const_cast<volatile WindowFailure*>(shared)->is_over = 1;  // waiting devices end too
    changed.notify_all();
    return failure.c_str();
  }
  /// Reads the failure that devices have found, if any; under the mutex.
  void Look() {
    if (shared == nullptr) return;
    const volatile WindowFailure& found = *shared;
    if (found.is_over == 0 || !failure.empty()) return;
    Fail("shard " + std::to_string(found.shard) + " waited in vain for shard " + std::to_string(found.peer) +
         " in exchange " + std::to_string(found.epoch));
    std::fprintf(stderr, "jaxsok: window: %s.\n", failure.c_str());
  }
};

}  // namespace

struct WindowDevice {
  Group* group = nullptr;
  WindowMember member;
  std::mutex mutex;  // held during an exchange: threads that call for one device take turns
  uint64_t epoch = 0;
  bool has_met = false;
  int64_t most_seconds = 0;
  char* window = nullptr;             // its own window
  std::map<int32_t, char*> imported;  // by shard, windows of other processes
  // While windows grow: the next ones. In the end one of the two own windows is freed.
  char* next_window = nullptr;
  std::map<int32_t, char*> next_imported;
  char* Half(int32_t shard) const { return member.windows[shard] + kWindowHeadBytes + (epoch & 1) * member.half_bytes; }
};

namespace {

/// The windows of one mesh. They live until the process ends.
struct WindowSet {
  int32_t num_shards = 0;
  std::vector<std::unique_ptr<Group>> groups;
  std::map<int32_t, std::unique_ptr<WindowDevice>> devices;  // of this process, by ordinal
  int64_t half_bytes = 0, next_half_bytes = 0;
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

int64_t Aligned(int64_t num_bytes) { return CeilDiv(num_bytes, kWindowLine) * kWindowLine; }

}  // namespace

WindowExchange::WindowExchange(int32_t window, int32_t device, int64_t run, int64_t num_bytes) {
  WindowDevice* found = DeviceOf(window, device);
  if (found == nullptr) {
    error_ =
        "this device has no window: the program was not traced in this process; trace it here, or use wire='dense'";
    return;
  }
  found->mutex.lock();
  device_ = found;
  Group& group = *found->group;
  std::unique_lock<std::mutex> lock(group.mutex);
  group.Look();
  const auto may_begin = [&] {
    return !group.is_closed || found->epoch < group.last_allowed || !group.failure.empty();
  };
  group.changed.wait(lock, may_begin);
  found->epoch += 1;
  found->has_met = false;
  group.RunOf(found->member.shard, found->epoch) = run;
  group.begun[found->member.shard] = found->epoch;
  if (!group.failure.empty()) {
    error_ = group.failure.c_str();
  } else if (num_bytes > found->member.half_bytes) {
    error_ = group.Fail("the window is smaller than what a shard receives; trace the program in this process");
  }
}

WindowExchange::~WindowExchange() {
  if (device_ == nullptr) return;
  Group& group = *device_->group;
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    if (!device_->has_met) group.Fail("a shard failed between the parts of an exchange");
    group.over[device_->member.shard] = device_->epoch;
    if (group.is_closed) group.changed.notify_all();
  }
  device_->mutex.unlock();
}

int32_t WindowExchange::num_shards() const { return device_ == nullptr ? 1 : device_->member.num_shards; }

int32_t WindowExchange::shard() const { return device_ == nullptr ? 0 : device_->member.shard; }

LineTarget WindowExchange::Target(int64_t lines_of_part, int64_t line_bytes) const {
  LineTarget target{};
  target.lines_of_part = static_cast<uint32_t>(lines_of_part);
  const WindowMember& member = device_->member;
  target.first_line = member.shard * lines_of_part;
  for (int32_t s = 0; s < member.num_shards; ++s) {
    target.parts[s] = device_->Half(s) + member.shard * lines_of_part * line_bytes;
  }
  return target;
}

void* WindowExchange::received() const { return device_->Half(device_->member.shard); }

LaunchError WindowExchange::Meet(Stream stream) {
  // The arrival of each shard is launched before a device waits for it.
  LaunchError error = LaunchArrival(stream, device_->member, device_->epoch);
  if (error != nullptr) return error;
  error = MeetOnHost();
  if (error != nullptr) return error;
  error = LaunchMeeting(stream, device_->member, device_->epoch, device_->most_seconds);
  if (error == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(device_->group->mutex);
  return device_->group->Fail("shard " + std::to_string(device_->member.shard) + " cannot wait: " + error);
}

LaunchError WindowExchange::MeetOnHost() {
  Group& group = *device_->group;
  const uint64_t epoch = device_->epoch;
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    group.met[device_->member.shard] = epoch;
    group.changed.notify_all();
  }
  device_->has_met = true;
  // The other threads are usually close.
  bool have_met = false;
  for (const Clock::time_point begin = Clock::now();
       !have_met && Clock::now() - begin < std::chrono::microseconds(20);) {
    have_met = group.HaveAllReached(group.met, epoch);
  }
  if (have_met && group.IsOneRun(epoch)) return nullptr;
  std::unique_lock<std::mutex> lock(group.mutex);
  const auto is_over = [&] { return group.HaveAllReached(group.met, epoch) || !group.failure.empty(); };
  if (group.changed.wait_for(lock, std::chrono::seconds(device_->most_seconds), is_over)) {
    if (!group.HaveAllReached(group.met, epoch)) return group.failure.c_str();
    if (group.IsOneRun(epoch)) return nullptr;
    return group.Fail("shards exchange for different programs: threads called them at once; call them from one thread");
  }
  std::string missing;
  for (int32_t s : group.shards) {
    if (group.met[s] < epoch) missing += (missing.empty() ? "" : ", ") + std::to_string(s);
  }
  return group.Fail("shard " + std::to_string(device_->member.shard) + " waited " +
                    std::to_string(device_->most_seconds) + " s in exchange " + std::to_string(epoch) + " for shards " +
                    missing);
}

namespace {

// A window grows in steps, between which processes wait for each other: `Take` allocates the next windows, `Close`
// prevents further exchanges, `Drain` waits until the exchanges that any shard of any process has begun are over, `Map`
// maps the next windows, `Settle` chooses between the next windows and the current ones, and `Resume` frees the others.
// CUDA allows this once no process maps them.

/// Frees the windows that were allocated and are not in use.
void DropNext(WindowSet& set) {
  for (auto& [ordinal, device] : set.devices) {
    if (device->next_window != nullptr) ReturnWindow(ordinal, device->next_window);
    device->next_window = nullptr;
  }
}

LaunchError Take(WindowSet& set, int64_t half_bytes, WindowHandle* handles) {
  DropNext(set);  // if another process had no memory
  set.next_half_bytes = half_bytes;
  for (auto& [ordinal, device] : set.devices) {
    device->next_window = TakeWindow(ordinal, kWindowHeadBytes + 2 * half_bytes);
    LaunchError error = device->next_window == nullptr ? "a device has no room for its window" : nullptr;
    const int64_t place = int64_t{set.NumberOf(device->group)} * set.num_shards + device->member.shard;
    if (error == nullptr && handles != nullptr) error = ExportWindow(ordinal, device->next_window, &handles[place]);
    if (error == nullptr) continue;
    DropNext(set);
    return error;
  }
  return nullptr;
}

uint64_t Close(WindowSet& set) {
  uint64_t last = 0;
  for (auto& group : set.groups) {
    std::lock_guard<std::mutex> lock(group->mutex);
    group->is_closed = true;
    group->last_allowed = group->Last();
    last = std::max(last, group->last_allowed);
  }
  return last;
}

LaunchError Drain(WindowSet& set, uint64_t last) {
  for (auto& group : set.groups) {
    std::lock_guard<std::mutex> lock(group->mutex);
    group->last_allowed = last;
    group->changed.notify_all();
  }
  for (auto& group : set.groups) {
    std::unique_lock<std::mutex> lock(group->mutex);
    group->changed.wait(lock, [&] { return group->HaveAllReached(group->over, last) || !group->failure.empty(); });
    if (!group->failure.empty()) return group->failure.c_str();
  }
  for (auto& [ordinal, device] : set.devices) {
    if (LaunchError error = WaitForDevice(ordinal)) return error;
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
      device->next_imported[s] = window;
    }
  }
  return nullptr;
}

void Settle(WindowSet& set, bool is_mapped) {
  for (auto& [ordinal, device] : set.devices) {
    if (is_mapped) {
      std::swap(device->window, device->next_window);
      std::swap(device->imported, device->next_imported);
    }
    for (auto& [shard, window] : device->next_imported) ReleaseImported(ordinal, window);
    device->next_imported.clear();
  }
  if (!is_mapped) return;
  set.half_bytes = set.next_half_bytes;
  for (auto& [ordinal, device] : set.devices) {
    device->member.half_bytes = set.half_bytes;
    for (auto& [other, peer] : set.devices) {
      if (peer->group == device->group) device->member.windows[peer->member.shard] = peer->window;
    }
    for (auto& [shard, window] : device->imported) device->member.windows[shard] = window;
  }
}

void Resume(WindowSet& set) {
  DropNext(set);
  for (auto& group : set.groups) {
    std::lock_guard<std::mutex> lock(group->mutex);
    group->is_closed = false;
    group->changed.notify_all();
  }
}

WindowSet* SetOf(int32_t window) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.sets.find(window);
  return found == registry.sets.end() ? nullptr : found->second.get();
}

}  // namespace
}  // namespace jaxsok

#define JAXSOK_VISIBLE extern "C" __attribute__((visibility("default")))

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
      if (LaunchError error = PrepareDevice(of_group[s], of_group, num_shards)) return error;
      set->devices[of_group[s]] = std::move(device);
    }
  }
  // Reports failures while the rest of the process may be waiting for a failed device.
  std::thread([groups = &set->groups] {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (auto& group : *groups) {
        std::lock_guard<std::mutex> look(group->mutex);
        group->Look();
      }
    }
  }).detach();
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.sets[window] = std::move(set);
  return nullptr;
}

/// Makes the windows of a mesh of this process large enough to receive `num_bytes`. Returns nullptr, or what went
/// wrong.
JAXSOK_VISIBLE const char* JaxsokWindowReserve(int32_t window, int64_t num_bytes) {
  using namespace jaxsok;
  WindowSet* set = SetOf(window);
  if (set == nullptr) return "unknown window";
  std::lock_guard<std::mutex> lock(set->growing);  // threads that trace take turns
  if (Aligned(num_bytes) <= set->half_bytes) return nullptr;
  if (LaunchError error = Take(*set, Aligned(num_bytes), nullptr)) return error;
  LaunchError error = Drain(*set, Close(*set));
  if (error == nullptr) error = Map(*set, nullptr);
  Settle(*set, error == nullptr);
  Resume(*set);
  return error;
}

// The steps of `JaxsokWindowReserve` for several processes, which wait for each other after each step. `handles` has 64
// bytes for each shard of each group.

JAXSOK_VISIBLE const char* JaxsokWindowTake(int32_t window, int64_t num_bytes, void* handles) {
  using namespace jaxsok;
  return Take(*SetOf(window), Aligned(num_bytes), static_cast<WindowHandle*>(handles));
}
JAXSOK_VISIBLE int64_t JaxsokWindowClose(int32_t window) {
  return static_cast<int64_t>(jaxsok::Close(*jaxsok::SetOf(window)));
}
JAXSOK_VISIBLE const char* JaxsokWindowDrain(int32_t window, int64_t last) {
  return jaxsok::Drain(*jaxsok::SetOf(window), static_cast<uint64_t>(last));
}
JAXSOK_VISIBLE const char* JaxsokWindowMap(int32_t window, const void* handles) {
  return jaxsok::Map(*jaxsok::SetOf(window), static_cast<const jaxsok::WindowHandle*>(handles));
}
JAXSOK_VISIBLE void JaxsokWindowSettle(int32_t window, int32_t is_mapped) {
  jaxsok::Settle(*jaxsok::SetOf(window), is_mapped != 0);
}
JAXSOK_VISIBLE void JaxsokWindowResume(int32_t window) { jaxsok::Resume(*jaxsok::SetOf(window)); }

/// Returns the bytes that a device receives at most in one exchange.
JAXSOK_VISIBLE int64_t JaxsokWindowHalfBytes(int32_t window) {
  const jaxsok::WindowSet* set = jaxsok::SetOf(window);
  return set == nullptr ? 0 : set->half_bytes;
}
/// Returns the bytes of a device's window, in total.
JAXSOK_VISIBLE int64_t JaxsokWindowBytes(int32_t window) {
  const int64_t half_bytes = JaxsokWindowHalfBytes(window);
  return half_bytes == 0 ? 0 : jaxsok::kWindowHeadBytes + 2 * half_bytes;
}

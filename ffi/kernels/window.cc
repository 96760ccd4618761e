// The windows of this process: who has which, and the meetings of the threads that issue work to the devices.
#include "window.h"

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

/// The shards that exchange with each other; where a mesh has other axes too, there are several groups.
///
/// A thread issues the work of one device. Before a device is told to wait for its peers, the threads of all of them
/// must have issued what the device waits for. Else a thread that loads a kernel, which CUDA does at the first launch
/// and which may wait for what runs, could keep another from issuing what the first one's device waits for.
struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::atomic<uint32_t>> begun, met, over;  // by shard, the last exchange; written under the mutex
  bool is_closed = false;                               // no exchange begins that nobody has begun yet
  std::string failure;                                  // empty: none; set once

  explicit Group(int32_t num_shards) : begun(num_shards), met(num_shards), over(num_shards) {}

  uint32_t Last() const {
    uint32_t last = 0;
    for (const auto& epoch : begun) last = epoch > last ? epoch.load() : last;
    return last;
  }
  static bool HaveAllReached(const std::vector<std::atomic<uint32_t>>& epochs, uint32_t epoch) {
    for (const auto& at : epochs) {
      if (static_cast<int32_t>(at.load() - epoch) < 0) return false;
    }
    return true;
  }
  /// Under the mutex. The text is kept: callers hold pointers to it.
  LaunchError Fail(const std::string& why) {
    if (failure.empty()) failure = why + "; the state is lost: restart from a checkpoint";
    Share().is_over = 1;  // devices that wait end too
    changed.notify_all();
    return failure.c_str();
  }
  /// What devices have found, if they have; under the mutex.
  void Look() {
    const volatile WindowFailure& found = Share();
    if (found.is_over == 0 || !failure.empty()) return;
    Fail("shard " + std::to_string(found.shard) + " waited in vain for shard " + std::to_string(found.peer) +
         " in exchange " + std::to_string(found.epoch));
    std::fprintf(stderr, "jaxsok: window: %s.\n", failure.c_str());
  }
  volatile WindowFailure& Share() { return *shared; }
  WindowFailure* shared = nullptr;
};

}  // namespace

struct WindowDevice {
  Group* group = nullptr;
  WindowMember member;
  std::mutex mutex;  // held during an exchange: threads that call for one device take turns
  uint32_t epoch = 0;
  bool has_met = false;
  int64_t most_seconds = 0;
  WindowHead* head = nullptr;  // of the own window
  char* Half(int32_t shard) const { return member.windows[shard] + kWindowHeadBytes + (epoch & 1) * member.half_bytes; }
};

namespace {

/// The windows of one mesh. They live until the process ends.
struct WindowSet {
  std::vector<std::unique_ptr<Group>> groups;
  std::map<int32_t, std::unique_ptr<WindowDevice>> devices;  // by ordinal
  int64_t half_bytes = 0;
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

WindowExchange::WindowExchange(int32_t window, int32_t device, int64_t num_bytes) {
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
    return !group.is_closed || static_cast<int32_t>(group.Last() - found->epoch) > 0 || !group.failure.empty();
  };
  group.changed.wait(lock, may_begin);
  found->epoch += 1;
  found->has_met = false;
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
  LaunchError error = MeetOnHost();
  if (error == nullptr) error = LaunchMeeting(stream, device_->member, device_->epoch, device_->most_seconds);
  return error;
}

LaunchError WindowExchange::MeetOnHost() {
  Group& group = *device_->group;
  const uint32_t epoch = device_->epoch;
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    group.met[device_->member.shard] = epoch;
    group.changed.notify_all();
  }
  device_->has_met = true;
  // The other threads are usually close.
  for (const Clock::time_point begin = Clock::now(); Clock::now() - begin < std::chrono::microseconds(20);) {
    if (Group::HaveAllReached(group.met, epoch)) return nullptr;
  }
  std::unique_lock<std::mutex> lock(group.mutex);
  const auto is_over = [&] { return Group::HaveAllReached(group.met, epoch) || !group.failure.empty(); };
  if (group.changed.wait_for(lock, std::chrono::seconds(device_->most_seconds), is_over)) {
    return Group::HaveAllReached(group.met, epoch) ? nullptr : group.failure.c_str();
  }
  std::string missing;
  for (size_t s = 0; s < group.met.size(); ++s) {
    if (static_cast<int32_t>(group.met[s] - epoch) < 0) missing += (missing.empty() ? "" : ", ") + std::to_string(s);
  }
  return group.Fail("shard " + std::to_string(device_->member.shard) + " waited " +
                    std::to_string(device_->most_seconds) + " s in exchange " + std::to_string(epoch) + " for shards " +
                    missing);
}

namespace {

/// Keeps new exchanges of a group from beginning, once those that some shards have begun are over.
class Closed {
 public:
  explicit Closed(Group& group) : group_(group) {
    std::unique_lock<std::mutex> lock(group_.mutex);
    group_.is_closed = true;
    const uint32_t last = group_.Last();
    group_.changed.wait(lock, [&] { return Group::HaveAllReached(group_.over, last) || !group_.failure.empty(); });
    error_ = group_.failure.empty() ? nullptr : group_.failure.c_str();
  }
  ~Closed() {
    std::lock_guard<std::mutex> lock(group_.mutex);
    group_.is_closed = false;
    group_.changed.notify_all();
  }
  LaunchError error() const { return error_; }

 private:
  Group& group_;
  LaunchError error_;
};

LaunchError Grow(WindowSet& set, int64_t half_bytes) {
  std::vector<std::unique_ptr<Closed>> closed;
  for (auto& group : set.groups) {
    closed.push_back(std::make_unique<Closed>(*group));
    if (LaunchError error = closed.back()->error()) return error;
  }
  // What was issued may still run.
  for (auto& [ordinal, device] : set.devices) {
    if (LaunchError error = WaitForDevice(ordinal)) return error;
  }
  std::map<int32_t, char*> windows;
  for (auto& [ordinal, device] : set.devices) {
    windows[ordinal] = TakeWindow(ordinal, kWindowHeadBytes + 2 * half_bytes);
    if (windows[ordinal] != nullptr) continue;
    for (auto& [taken, window] : windows) ReturnWindow(taken, window);
    return "a device has no room for its window";
  }
  for (auto& [ordinal, device] : set.devices) {
    ReturnWindow(ordinal, reinterpret_cast<char*>(device->head));
    device->head = reinterpret_cast<WindowHead*>(windows[ordinal]);
    device->member.half_bytes = half_bytes;
    for (auto& [other, peer] : set.devices) {
      if (peer->group == device->group) device->member.windows[peer->member.shard] = windows[other];
    }
  }
  set.half_bytes = half_bytes;
  return nullptr;
}

}  // namespace
}  // namespace jaxsok

#define JAXSOK_VISIBLE extern "C" __attribute__((visibility("default")))

/// Names the devices of a mesh: `ordinals` has those of each group, by shard. Returns nullptr, or what went wrong.
JAXSOK_VISIBLE const char* JaxsokWindowOpen(int32_t window, int32_t num_groups, int32_t num_shards,
                                            const int32_t* ordinals, int64_t most_seconds) {
  using namespace jaxsok;
  if (num_shards > kMostWindowShards) return "too many shards";
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (registry.sets.count(window) != 0) return nullptr;
  auto set = std::make_unique<WindowSet>();
  for (int32_t g = 0; g < num_groups; ++g) {
    set->groups.push_back(std::make_unique<Group>(num_shards));
    set->groups.back()->shared = TakeFailure();
    if (set->groups.back()->shared == nullptr) return "the host has no memory that devices share";
    const int32_t* of_group = ordinals + int64_t{g} * num_shards;
    for (int32_t s = 0; s < num_shards; ++s) {
      auto device = std::make_unique<WindowDevice>();
      device->group = set->groups.back().get();
      device->member.shard = s;
      device->member.num_shards = num_shards;
      device->member.failure = device->group->shared;
      device->most_seconds = most_seconds;
      if (LaunchError error = PrepareDevice(of_group[s], of_group, num_shards)) return error;
      set->devices[of_group[s]] = std::move(device);
    }
  }
  // It tells what happened while the rest of the process may be waiting for a device that has failed.
  std::thread([groups = &set->groups] {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (auto& group : *groups) {
        std::lock_guard<std::mutex> look(group->mutex);
        group->Look();
      }
    }
  }).detach();
  registry.sets[window] = std::move(set);
  return nullptr;
}

/// Makes the windows of a mesh large enough to receive so many bytes. Returns nullptr, or what went wrong.
JAXSOK_VISIBLE const char* JaxsokWindowReserve(int32_t window, int64_t num_bytes) {
  using namespace jaxsok;
  Registry& registry = TheRegistry();
  WindowSet* set = nullptr;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    const auto found = registry.sets.find(window);
    if (found == registry.sets.end()) return "unknown window";
    set = found->second.get();
  }
  static std::mutex growing;  // threads that trace take turns; not the registry's, which exchanges need
  std::lock_guard<std::mutex> lock(growing);
  if (Aligned(num_bytes) <= set->half_bytes) return nullptr;
  return Grow(*set, Aligned(num_bytes));
}

/// Bytes of a device's window, for all it holds.
JAXSOK_VISIBLE int64_t JaxsokWindowBytes(int32_t window) {
  using namespace jaxsok;
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.sets.find(window);
  if (found == registry.sets.end() || found->second->half_bytes == 0) return 0;
  return kWindowHeadBytes + 2 * found->second->half_bytes;
}

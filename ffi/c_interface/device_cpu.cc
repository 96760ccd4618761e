#include "device.h"
#include "error.h"

namespace jaxsok {
namespace {

/// Runs all tasks in the calling thread: a server has as many threads as it wants, and a lookup costs microseconds.
class CallingThread final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void ParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) override {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  }
};

class Host final : public Device {
 public:
  const void* Place(const void* data, size_t) override { return data; }

  void Run(void*, FrozenLookup* lookups, int32_t num_lookups) const override {
    CallingThread thread;
    const LaunchError error = LaunchLookupFrozen(&thread, lookups, num_lookups, nullptr);
    // What the caller gives was checked before.
    if (error != nullptr) Refuse(JAXSOK_BAD_INDEX, "jaxsok_lookup: ", error);
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

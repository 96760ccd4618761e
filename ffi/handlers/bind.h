// Binds a handler to its back end: one source, compiled for the CPU client and for CUDA.
//
// On CUDA every handler except the eager ones (call.h) is marked as compatible with CUDA graphs: it launches the same
// kernels each time, on the stream it was given, and neither allocates nor waits while it is recorded.
#ifndef JAXSOK_HANDLERS_BIND_H_
#define JAXSOK_HANDLERS_BIND_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "../kernels/stream.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsok {

namespace ffi = ::xla::ffi;

#if defined(JAXSOK_CUDA)

/// True if a handler may read the contents of its buffers.
constexpr bool kIsHostMemory = false;

using StreamContext = ffi::PlatformStream<Stream>;
using StreamArgument = Stream;
class StreamScope {
 public:
  explicit StreamScope(StreamArgument stream) : stream_(stream) {}
  Stream get() const { return stream_; }

 private:
  Stream stream_;
};

#define JAXSOK_DEFINE_SYMBOL(symbol, impl, binding) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, impl, binding, {ffi::Traits::kCmdBufferCompatible})

#else

constexpr bool kIsHostMemory = true;

using StreamContext = ffi::ThreadPool;
using StreamArgument = ffi::ThreadPool;

/// The threads of XLA's CPU client, plus the calling thread.
///
/// The caller takes tasks like every other thread and waits only for tasks that have begun, so a pool whose threads are
/// all busy (eight devices on two cores) slows it down but cannot stop it.
class ThreadPoolExecutor final : public Executor {
 public:
  explicit ThreadPoolExecutor(ffi::ThreadPool pool)
      : pool_(pool), num_threads_(static_cast<int>(pool.num_threads()) + 1) {}

  void ParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) override {
    if (num_tasks <= 1 || num_threads_ <= 1) {
      for (int64_t i = 0; i < num_tasks; ++i) task(i);
      return;
    }
    auto work = std::make_shared<Work>();
    work->task = &task;
    work->num_tasks = num_tasks;
    const int64_t helpers = num_tasks - 1 < num_threads_ - 1 ? num_tasks - 1 : num_threads_ - 1;
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([work] { work->Run(); });
    work->Run();
    std::unique_lock<std::mutex> lock(work->mutex);
    work->all_done.wait(lock, [&] { return work->num_done.load() == num_tasks; });
  }

 private:
  struct Work {
    const std::function<void(int64_t)>* task;  // valid while a task is left: the caller is still waiting then
    int64_t num_tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> num_done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    void Run() {
      for (int64_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) {
        (*task)(i);
        if (num_done.fetch_add(1) + 1 == num_tasks) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_all();
        }
      }
    }
  };

  ffi::ThreadPool pool_;
  int num_threads_;
};

class StreamScope {
 public:
  explicit StreamScope(StreamArgument pool) : executor_(pool) {}
  Stream get() { return &executor_; }

 private:
  ThreadPoolExecutor executor_;
};

#define JAXSOK_DEFINE_SYMBOL(symbol, impl, binding) XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, impl, binding)

#endif

}  // namespace jaxsok

#endif  // JAXSOK_HANDLERS_BIND_H_

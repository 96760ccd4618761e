// An executor for callers without the threads of XLA's CPU client.
#ifndef JAXSOK_KERNELS_THREAD_EXECUTOR_CPU_H_
#define JAXSOK_KERNELS_THREAD_EXECUTOR_CPU_H_

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "stream.h"

namespace jaxsok {

/// Starts threads for each call, and takes part.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int num_threads) : num_threads_(num_threads) {}
  void ParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) override {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < num_tasks; i = next++) task(i);
    };
    std::vector<std::thread> threads;
    try {
      for (int64_t t = 1; t < std::min<int64_t>(num_threads_, num_tasks); ++t) threads.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads: those that there are do the work
    }
    work();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int num_threads_;
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_THREAD_EXECUTOR_CPU_H_

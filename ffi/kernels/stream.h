// The resource that a launcher runs on: a CUDA stream, or the threads of the CPU client.
#ifndef JAXSOK_KERNELS_STREAM_H_
#define JAXSOK_KERNELS_STREAM_H_

#include <cstdint>

#if defined(JAXSOK_CUDA)
struct CUstream_st;  // cudaStream_t, without CUDA's headers
namespace jaxsok {
using Stream = CUstream_st*;
}  // namespace jaxsok
#else
#include <functional>
namespace jaxsok {

/// Runs tasks in parallel. The caller takes part, so a call ends even if every other thread is busy.
class Executor {
 public:
  virtual ~Executor() = default;
  /// Returns how many tasks can run at one time, the caller included.
  virtual int num_threads() const = 0;
  /// Calls task(0) .. task(num_tasks - 1), each once, in any order; returns when all have ended.
  virtual void ParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) = 0;
};
using Stream = Executor*;

}  // namespace jaxsok
#endif

namespace jaxsok {

/// A string with static lifetime that says what went wrong; nullptr if nothing did.
using LaunchError = const char*;

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_STREAM_H_

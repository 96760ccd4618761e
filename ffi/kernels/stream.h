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
  /// Calls task(0) .. task(num_tasks - 1), each once, in any order; returns when all have ended.
  virtual void ParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) = 0;
};
using Stream = Executor*;

}  // namespace jaxsok
#endif

namespace jaxsok {

/// A string with static lifetime that says what went wrong; nullptr if nothing did.
using LaunchError = const char*;

inline constexpr LaunchError kNoThread = "the system starts no more threads (ulimit -u, or the pids of a container)";

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_STREAM_H_

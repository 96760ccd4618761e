// Parallel tasks of the CPU back end, all with the same floating point.
#ifndef JAXSOK_KERNELS_PARALLEL_CPU_H_
#define JAXSOK_KERNELS_PARALLEL_CPU_H_

#include <cstdint>

#include "stream.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

// Loops over the columns of a row are compiled for several instruction sets, and the loader chooses the best: a wheel
// serves old and new machines. The bits are equal, since columns are independent and products are not fused into sums.
// Sanitizers run before the loader has finished, so they get one version.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define JAXSOK_CPU_CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define JAXSOK_CPU_CLONES
#endif

namespace jaxsok {

/// Sets round-to-nearest without flushing of small numbers, during its lifetime.
///
/// XLA's CPU client may flush denormals in the thread that calls a handler and not in the threads of its pool:
/// results would then depend on which thread took which row, and differ from CUDA.
class ExactFloats {
 public:
#if defined(__x86_64__)
  ExactFloats() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultControl); }
  ~ExactFloats() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefaultControl = 0x1f80;  // all exceptions masked, nearest, no FTZ, no DAZ
  unsigned saved_;
#elif defined(__aarch64__)
  ExactFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~ExactFloats() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ExactFloats() {}
  ~ExactFloats() {}
#endif
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;
};

/// Calls task(0) .. task(num_tasks - 1) in parallel.
template <typename Task>
void RunTasks(Stream stream, int64_t num_tasks, const Task& task) {
  stream->ParallelFor(num_tasks, [&task](int64_t i) {
    ExactFloats exact;
    task(i);
  });
}

/// Calls task(begin, end) for parts of [0, size), each of size `grain` except the last.
template <typename Task>
void RunRanges(Stream stream, int64_t size, int64_t grain, const Task& task) {
  RunTasks(stream, (size + grain - 1) / grain, [&](int64_t i) {
    const int64_t begin = i * grain;
    task(begin, begin + grain < size ? begin + grain : size);
  });
}

template <typename T>
void AddAtomically(T* sum, T value) {
  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

/// Adds to a saturating count. The order of the threads does not matter: every addition that overflows, and every later
/// one, writes the largest value afterwards.
inline void CountAtomically(uint32_t* count, uint32_t value) {
  if (__atomic_fetch_add(count, value, __ATOMIC_RELAXED) > UINT32_MAX - value) {
    __atomic_store_n(count, UINT32_MAX, __ATOMIC_RELAXED);
  }
}

template <typename T>
void MaxAtomically(T* maximum, T value) {
  T seen = __atomic_load_n(maximum, __ATOMIC_RELAXED);
  while (seen < value &&
         !__atomic_compare_exchange_n(maximum, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_PARALLEL_CPU_H_

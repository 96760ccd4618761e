// Helpers of the C++ tests: checks that count, random numbers. There is no framework: ctest reads the exit
// status, and the log has the failed source line and its seed.
#ifndef JAXSOK_TESTS_TESTING_H_
#define JAXSOK_TESTS_TESTING_H_

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../kernels/thread_executor_cpu.h"

namespace jaxsok {

inline int& NumFailures() {
  static int num_failures = 0;
  return num_failures;
}

inline void Check(bool is_true, const char* text, const char* file, int line, uint64_t seed) {
  constexpr int kMostShown = 20;
  if (is_true || ++NumFailures() > kMostShown) return;
  std::fprintf(stderr, "%s:%d: seed %llu: %s\n", file, line, static_cast<unsigned long long>(seed), text);
}

#define JAXSOK_CHECK_SEED(condition, seed) ::jaxsok::Check((condition), #condition, __FILE__, __LINE__, (seed))
#define JAXSOK_CHECK(condition) JAXSOK_CHECK_SEED(condition, 0)

/// Prints the result, and returns the exit status of a test program.
inline int Finish(const char* name) {
  std::printf("%s: %s (%d failures)\n", name, NumFailures() == 0 ? "passed" : "FAILED", NumFailures());
  return NumFailures() == 0 ? 0 : 1;
}

/// Random words that a seed reproduces; they do not use the library's own hash, which is under test.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t Next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;  // Knuth's MMIX
    return static_cast<uint32_t>(state_ >> 33) ^ static_cast<uint32_t>(state_ >> 17 & 0x8000u) << 16;
  }
  uint32_t Below(uint32_t bound) { return Next() % bound; }
  float Uniform() { return static_cast<float>(static_cast<int32_t>(Below(2001)) - 1000) / 777.0f; }

 private:
  uint64_t state_;
};

template <typename T>
bool IsSame(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Memory aligned to 64 bytes, filled with a pattern that is neither zero nor a valid value.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes + 64, 0xa5) {}
  void* get() { return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64; }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace jaxsok

#endif  // JAXSOK_TESTS_TESTING_H_

// Definitions that both compilers share: functions that run on host and device, and small portable words.
//
// Floating point: every file that includes core/ is compiled without contraction (-ffp-contract=off,
// -fmad=false), so that a product and a sum round apart on the host as on the device. With IEEE division
// and square root this gives CPU and CUDA the same bits from the same order of operations.
#ifndef JAXSOK_CORE_PLATFORM_H_
#define JAXSOK_CORE_PLATFORM_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAXSOK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAXSOK_HOST_DEVICE inline
#endif

#define JAXSOK_VISIBLE extern "C" __attribute__((visibility("default")))

namespace jaxsok {

/// Returns the bits of a word as a float.
JAXSOK_HOST_DEVICE float FloatOfBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

/// Returns the bits of a float as a word.
JAXSOK_HOST_DEVICE uint32_t BitsOfFloat(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

/// Returns true unless the float is infinite or NaN. It uses bits, so that no compiler flag can remove it.
JAXSOK_HOST_DEVICE bool IsFinite(float value) { return (BitsOfFloat(value) & 0x7f800000u) != 0x7f800000u; }

/// Returns the quotient of two sizes, rounded up.
template <typename T>
JAXSOK_HOST_DEVICE constexpr T CeilDiv(T numerator, T denominator) {
  return (numerator + denominator - 1) / denominator;
}

}  // namespace jaxsok

#endif  // JAXSOK_CORE_PLATFORM_H_

// The initial values of a new row: a pure function of (seed, table name, key, column).
//
// They do not depend on the row id, the store, the device or the order of the keys (decision D8): a key gets the same
// row on every mesh and in every run. Only exactly rounded operations are used (sums, products, division, square root),
// so CPU and CUDA give the same bits.
#ifndef JAXSOK_CORE_INITIALIZE_H_
#define JAXSOK_CORE_INITIALIZE_H_

#include "hash.h"
#include "layout.h"

namespace jaxsok {

/// Kinds of initializers; initializers.py names them too. The parameters are a and b.
enum InitializerKind : int {
  kInitializeConstant = 0,         // a
  kInitializeUniform = 1,          // [a, b)
  kInitializeNormal = 2,           // mean a, standard deviation b
  kInitializeTruncatedNormal = 3,  // mean a, standard deviation b before the cut at two of them
};

/// Returns the natural logarithm of a positive, normal float, to about 2 ulp.
///
/// x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh(s) with s = (m - 1) / (m + 1), whose series
/// in s^2 <= 0.0295 ends below 1e-9 after five terms.
JAXSOK_HOST_DEVICE float LogOf(float x) {
  const uint32_t bits = BitsOfFloat(x);
  int exponent = static_cast<int>(bits >> 23) - 127;
  float m = FloatOfBits((bits & 0x007fffffu) | 0x3f800000u);
  constexpr float kSqrt2 = 1.41421356f, kLn2 = 0.693147181f;
  if (m > kSqrt2) {
    m = m * 0.5f;
    ++exponent;
  }
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  float series = 2.0f / 9.0f;
  series = series * z + 2.0f / 7.0f;
  series = series * z + 2.0f / 5.0f;
  series = series * z + 2.0f / 3.0f;
  series = series * z + 2.0f;
  return static_cast<float>(exponent) * kLn2 + s * series;
}

/// Returns the standard normal quantile of p in (0, 1), to about 1e-7 relative.
///
/// Source: Michael J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution",
/// Applied Statistics 37 (1988), routine PPND7.
JAXSOK_HOST_DEVICE float NormalQuantile(float p) {
  const float q = p - 0.5f;
  if (q <= 0.425f && q >= -0.425f) {
    const float r = 0.180625f - q * q;
    const float top = ((59.109374720f * r + 159.29113202f) * r + 50.434271938f) * r + 3.3871327179f;
    const float bottom = ((67.187563600f * r + 78.757757664f) * r + 17.895169469f) * r + 1.0f;
    return q * top / bottom;
  }
  const float tail = q < 0.0f ? p : 1.0f - p;
  float r = sqrtf(-LogOf(tail));
  float magnitude;
  if (r <= 5.0f) {
    r = r - 1.6f;
    const float top = ((0.17023821103f * r + 1.3067284816f) * r + 2.7568153900f) * r + 1.4234372777f;
    const float bottom = (0.12021132975f * r + 0.73700164250f) * r + 1.0f;
    magnitude = top / bottom;
  } else {
    r = r - 5.0f;
    const float top = ((0.017337203997f * r + 0.42868294337f) * r + 3.0812263860f) * r + 6.6579051150f;
    const float bottom = (0.012258202635f * r + 0.24197894225f) * r + 1.0f;
    magnitude = top / bottom;
  }
  return q < 0.0f ? -magnitude : magnitude;
}

/// Returns a uniform number in the open interval (0, 1): 23 bits, the middle of its cell, so never 0 and never 1.
JAXSOK_HOST_DEVICE float OpenUniform(uint32_t bits) { return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f; }

/// The values that all columns of one new row share; computed once a row.
struct RowInitializer {
  uint64_t stream;
  int32_t kind;
  float a, b;

  /// Returns the initializer of a row. `table_words`: the table's words, kNumTableWords; `seed`: the two words of the
  /// state's seed.
  JAXSOK_HOST_DEVICE static RowInitializer Of(const uint32_t* table_words, const uint32_t* seed, uint64_t key) {
    const uint64_t name = Word64(table_words[kTableNameLow], table_words[kTableNameHigh]);
    const uint64_t table_stream = Mix64(Mix64(Word64(seed) + kGolden) ^ name);
    RowInitializer row;
    row.stream = Mix64(key + Mix64(table_stream));
    row.kind = static_cast<int32_t>(table_words[kTableInitializer]);
    row.a = FloatOfBits(table_words[kTableParameterA]);
    row.b = FloatOfBits(table_words[kTableParameterB]);
    return row;
  }

  /// Returns the value of one column.
  JAXSOK_HOST_DEVICE float At(uint32_t column) const {
    if (kind == kInitializeConstant) return a;
    const uint32_t bits = static_cast<uint32_t>(Mix64(stream + (column + 1) * kGolden) >> 32);
    if (kind == kInitializeUniform) {
      // 24 bits: exact in float32, below 1.
      return a + (b - a) * (static_cast<float>(bits >> 8) * 0x1p-24f);
    }
    float p = OpenUniform(bits);
    // The normal mass below -2 and below 2 standard deviations.
    constexpr float kBelow = 0.0227501319f, kUpTo = 0.9772498681f;
    if (kind == kInitializeTruncatedNormal) p = kBelow + p * (kUpTo - kBelow);
    return a + b * NormalQuantile(p);
  }
};

}  // namespace jaxsok

#endif  // JAXSOK_CORE_INITIALIZE_H_

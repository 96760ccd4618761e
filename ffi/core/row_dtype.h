// Storage of a row's numbers, and rounding of a float to 16 bits.
//
// Arithmetic is float32 everywhere: rows are widened when they are read and rounded when they are written. Initial
// values and embeddings round to nearest, ties to even. Rows that an optimizer stepped round stochastically by default:
// up or down to one of the two neighbours, with probabilities that keep the mean. Steps far below a row's last bit then
// move it at the right rate; rounding to nearest would never move it.
//
// Random bits are a function of (seed, step, table name, key, column) only (decision D8). The code works on bits, so
// CPU and CUDA give the same results. For all floats:
//
//   exact numbers   stay what they are, under any random bits
//   finite ones     never become infinite: beyond the largest finite number they become it
//   infinities      stay
//   NaN             stays NaN
#ifndef JAXSOK_CORE_ROW_DTYPE_H_
#define JAXSOK_CORE_ROW_DTYPE_H_

#include <type_traits>

#include "hash.h"
#include "layout.h"

namespace jaxsok {

/// Rounding modes of a step's 16-bit rows; types.py names them too. Ignored for float32 rows.
enum Rounding : int {
  kRoundingNearest = 0,
  kRoundingStochastic = 1,
};

/// A stored bfloat16 number.
struct BFloat16 {
  uint16_t bits;  // the upper half of a float
};
struct Float16 {
  uint16_t bits;  // sign, 5 bits of exponent, 10 of mantissa
};

/// Conversions of a row's number: widening to float and rounding from float.
///
/// `random`: 16 random bits in the low half of the word; the upper half is ignored.
template <typename T>
struct RowNumber;

template <>
struct RowNumber<float> {
  static constexpr RowDtype kDtype = kRowDtypeFloat32;
  JAXSOK_HOST_DEVICE static float Widened(float value) { return value; }
  JAXSOK_HOST_DEVICE static float Nearest(float value) { return value; }
  JAXSOK_HOST_DEVICE static float Stochastic(float value, uint32_t) { return value; }
};

template <>
struct RowNumber<BFloat16> {
  static constexpr RowDtype kDtype = kRowDtypeBfloat16;
  JAXSOK_HOST_DEVICE static float Widened(BFloat16 value) { return FloatOfBits(uint32_t{value.bits} << 16); }
  JAXSOK_HOST_DEVICE static BFloat16 Nearest(float value) {
    const uint32_t bits = BitsOfFloat(value);
    return Cut(bits, 0x7fffu + (bits >> 16 & 1));
  }
  JAXSOK_HOST_DEVICE static BFloat16 Stochastic(float value, uint32_t random) {
    return Cut(BitsOfFloat(value), random & 0xffffu);
  }

 private:
  /// Adds below the cut and truncates. Subnormal numbers have the same cut and need no special case.
  JAXSOK_HOST_DEVICE static BFloat16 Cut(uint32_t bits, uint32_t added) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t result = (magnitude + added) >> 16;
    result = result < 0x7f7fu ? result : 0x7f7fu;
    if (magnitude >= 0x7f800000u) result = magnitude >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u);
    return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | result)};
  }
};

template <>
struct RowNumber<Float16> {
  static constexpr RowDtype kDtype = kRowDtypeFloat16;
  JAXSOK_HOST_DEVICE static float Widened(Float16 value) {
    const uint32_t magnitude = value.bits & 0x7fffu;
#if defined(__CUDA_ARCH__)
    if (magnitude <= 0x7c00u) {  // the hardware may change the bits of a NaN
      float widened;
      asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(value.bits));
      return widened;
    }
#endif
    // The exponents of the two formats begin 112 apart; the product is exact, and makes subnormal numbers normal.
    uint32_t bits = BitsOfFloat(FloatOfBits(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7c00u) bits = magnitude << 13 | 0x7f800000u;
    return FloatOfBits(bits | (value.bits & 0x8000u) << 16);
  }
  JAXSOK_HOST_DEVICE static Float16 Nearest(float value) {
    const uint32_t bits = BitsOfFloat(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
#if defined(__CUDA_ARCH__)
    if (magnitude < 0x7f800000u) {
      Float16 nearest;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(nearest.bits) : "f"(fminf(fmaxf(value, -65504.0f), 65504.0f)));
      return nearest;
    }
#endif
    // Below the normal numbers the step is 2^-24, that of floats from 1/2 on: their sum rounds correctly.
    const float small = FloatOfBits(magnitude < kLeastNormal ? magnitude : kLeastNormal);
    const uint32_t subnormal = BitsOfFloat(small + 0.5f) - 0x3f000000u;
    return Join(bits, (magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13, subnormal);
  }
  /// Rounds without bias, except for magnitudes below 2^-17, which need more than 16 random bits: what lies below 2^-40
  /// is ignored.
  JAXSOK_HOST_DEVICE static Float16 Stochastic(float value, uint32_t random) {
    const uint32_t bits = BitsOfFloat(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const float small = FloatOfBits(magnitude < kLeastNormal ? magnitude : kLeastNormal);
    // In units of 2^-40: 16 bits below the last one.
    const uint32_t fixed = static_cast<uint32_t>(static_cast<int32_t>(small * 0x1p40f));
    return Join(bits, (magnitude + (random >> 3 & 0x1fffu)) >> 13, (fixed + (random & 0xffffu)) >> 16);
  }

 private:
  static constexpr uint32_t kLeastNormal = 0x38800000u;  // 2^-14

  /// Returns the rounding that the magnitude needs. `normal` still has a float's exponent.
  JAXSOK_HOST_DEVICE static Float16 Join(uint32_t bits, uint32_t normal, uint32_t subnormal) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t result = magnitude < kLeastNormal ? subnormal : normal - (112u << 10);
    result = result < 0x7bffu ? result : 0x7bffu;
    if (magnitude >= 0x7f800000u) result = 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u);
    return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | result)};
  }
};

/// An 8-bit number of a frozen store's row: the number times the row's scale is the value.
struct Int8 {
  int8_t bits;
};
struct Float8E4m3 {
  uint8_t bits;  // sign, 4 bits of exponent, 3 of mantissa; 0x7f and 0xff are NaN, and nothing is infinite
};

/// Nothing is rounded to 8 bits here: the initial row that an absent key reads stays a float.
template <>
struct RowNumber<Int8> {
  static constexpr RowDtype kDtype = kQuantizedInt8;
  JAXSOK_HOST_DEVICE static float Widened(Int8 value) { return static_cast<float>(value.bits); }
  JAXSOK_HOST_DEVICE static float Widened(float value) { return value; }
  JAXSOK_HOST_DEVICE static float Nearest(float value) { return value; }
};

template <>
struct RowNumber<Float8E4m3> {
  static constexpr RowDtype kDtype = kQuantizedFloat8E4m3;
  /// Widens a number without branches: loops over rows become vector instructions.
  JAXSOK_HOST_DEVICE static float Widened(Float8E4m3 value) {
    const uint32_t magnitude = value.bits & 0x7fu;
    // The exponents of the two formats begin 120 apart; below the normal numbers the step is 2^-9.
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t subnormal = BitsOfFloat(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    const uint32_t finite = magnitude < 8 ? subnormal : normal;
    return FloatOfBits((magnitude == 0x7fu ? 0x7fc00000u : finite) | (value.bits & 0x80u) << 24);
  }
  JAXSOK_HOST_DEVICE static float Widened(float value) { return value; }
  JAXSOK_HOST_DEVICE static float Nearest(float value) { return value; }
};

/// True if rows of these numbers have scales.
template <typename T>
constexpr bool kIsQuantized = std::is_same_v<T, Int8> || std::is_same_v<T, Float8E4m3>;

constexpr uint64_t kRoundingStream = 0xd1b54a32d192ed03ull;  // differs from the stream of initial values, kGolden

/// Returns the hash that the rounding of all rows of one update shares.
///
/// `seed`: the two words of the state's seed; `step`: the number of updates so far.
JAXSOK_HOST_DEVICE uint64_t RoundingOfStep(const uint32_t* seed, uint32_t step) {
  return Mix64(Mix64(Word64(seed) + kRoundingStream) + (uint64_t{step} + 1) * kGolden);
}

/// The random bits of one row in one step: SplitMix64, one draw for four neighbouring columns.
struct RowRounding {
  uint64_t stream;

  /// Returns the generator of one row. `table_words`: the table's words, kNumTableWords; `of_step`: RoundingOfStep.
  JAXSOK_HOST_DEVICE static RowRounding Of(const uint32_t* table_words, uint64_t of_step, uint64_t key) {
    const uint64_t name = Word64(table_words[kTableNameLow], table_words[kTableNameHigh]);
    return {Mix64(key + Mix64(of_step ^ name))};
  }

  /// Returns the bits of columns 4 * quad to 4 * quad + 3, 16 bits each, the first column lowest.
  JAXSOK_HOST_DEVICE uint64_t Draw(uint32_t quad) const { return Mix64(stream + (uint64_t{quad} + 1) * kGolden); }

  /// Returns the bits of one column.
  JAXSOK_HOST_DEVICE uint32_t At(uint32_t column) const {
    return static_cast<uint32_t>(Draw(column / 4) >> (column % 4 * 16)) & 0xffffu;
  }
};

/// Calls work(number) with a value of the dtype's type.
template <typename Work>
auto WithRowDtype(RowDtype dtype, const Work& work) {
  switch (dtype) {
    case kRowDtypeBfloat16:
      return work(BFloat16{});
    case kRowDtypeFloat16:
      return work(Float16{});
    default:
      return work(float{});
  }
}

/// Calls work(row number, embedding number); embeddings have the dtype of the rows, or float32.
///
/// Pre    : HasRowDtypes(rows, embeddings).
template <typename Work>
auto WithRowDtypes(RowDtype rows, RowDtype embeddings, const Work& work) {
  return WithRowDtype(rows,
                      [&](auto row) { return embeddings == kRowDtypeFloat32 ? work(row, float{}) : work(row, row); });
}

/// Calls work as above, where rows may be quantized; their embeddings are float32.
template <typename Work>
auto WithStoredDtypes(RowDtype rows, RowDtype embeddings, const Work& work) {
  switch (rows) {
    case kQuantizedInt8:
      return work(Int8{}, float{});
    case kQuantizedFloat8E4m3:
      return work(Float8E4m3{}, float{});
    default:
      return WithRowDtypes(rows, embeddings, work);
  }
}

inline bool HasRowDtypes(RowDtype rows, RowDtype embeddings) {
  return embeddings == kRowDtypeFloat32 || embeddings == rows;
}

/// Returns the bytes of a number.
JAXSOK_HOST_DEVICE int32_t NumberBytes(RowDtype dtype) { return dtype == kRowDtypeFloat32 ? 4 : 2; }

/// Returns whether an update takes such gradients: those of embeddings, or bfloat16, as they may cross a wire.
inline bool HasGradientDtype(RowDtype rows, RowDtype gradients) {
  return gradients == kRowDtypeBfloat16 || HasRowDtypes(rows, gradients);
}

}  // namespace jaxsok

#endif  // JAXSOK_CORE_ROW_DTYPE_H_

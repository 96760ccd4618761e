// Row programs: an optimizer's step of one row, as a list of operations on registers as wide as a row.
//
// jaxsok/optimizers/program.py compiles them from a JAX function. Both back ends run them in the pass that sums the
// row's gradients, operation by operation, each on all columns. Values are float32. Operations that IEEE does not round
// exactly (exp, log and similar) are computed in double by the functions of this header, so that CPU and CUDA give the
// same bits. True is 1, false is 0.
//
//   register 0                 the row's gradient
//   register 1                 the row
//   register 2, 3, ...         its states; a state of one number is in every column
//   registers after            temporaries; any register may be overwritten
//   operand r >= 0             register r
//   operand -1                 the number of uses of the row
//   operand -2 - i             scalar i, the same for all rows
//
// kRowOutput writes its operand to the row (destination 0) or to state k (destination 1 + k); a state of one number
// takes column 0. Anything without an output is unchanged.
#ifndef JAXSOK_CORE_ROW_PROGRAM_H_
#define JAXSOK_CORE_ROW_PROGRAM_H_

#include "platform.h"
#include "row_dtype.h"

namespace jaxsok {

constexpr int kMaxRowOps = 256;
constexpr int kMaxRegisters = 24;
constexpr int kRowOpWords = 5;  // code, destination, three operands

/// The operations; program.py names them in this order.
enum RowOp : int {
  kRowCopy = 0,
  kRowNegate,
  kRowAbs,
  kRowSign,
  kRowSqrt,
  kRowRsqrt,
  kRowExp,
  kRowLog,
  kRowLog1p,
  kRowExpm1,
  kRowTanh,
  kRowLogistic,
  kRowFloor,
  kRowCbrt,
  kRowIsFinite,
  kRowNot,
  kRowToBfloat16,
  kRowToFloat16,
  kRowAdd,
  kRowSubtract,
  kRowMultiply,
  kRowDivide,
  kRowMaximum,
  kRowMinimum,
  kRowPower,
  kRowEqual,
  kRowNotEqual,
  kRowLess,
  kRowLessEqual,
  kRowAnd,
  kRowOr,
  kRowSelect,            // a ? b : c
  kRowMultiplyAdd,       // a * b + c, rounded twice
  kRowMultiplySubtract,  // c - a * b, rounded twice
  kRowSum,               // over the columns, in the order of LaneShape::OfProgram
  kRowMax,
  kRowMin,
  kRowOutput,
  kNumRowOps,
};

/// One operation, packed.
struct RowInstruction {
  uint8_t code;
  uint8_t to;
  int16_t a, b, c;
};
static_assert(sizeof(RowInstruction) == 8, "one 8-byte load");

struct RowProgram {
  int32_t num_ops;
  int32_t num_registers;
  RowInstruction ops[kMaxRowOps];

  /// Returns the number of scalars that operands name.
  int32_t NumScalars() const {
    int least = -1;
    for (int i = 0; i < num_ops; ++i) {
      const int operands[] = {ops[i].a, ops[i].b, ops[i].c};
      for (const int operand : operands) least = operand < least ? operand : least;
    }
    return -1 - least;
  }

  /// Reads the words of the handler's attribute. Returns null, or what is wrong with them.
  const char* Read(const int32_t* words, int64_t num_words, int32_t registers, int num_states, int64_t num_scalars) {
    if (num_words % kRowOpWords != 0 || num_words / kRowOpWords > kMaxRowOps) return "program: too long, or cut off";
    if (registers < 2 + num_states || registers > kMaxRegisters) return "program: number of registers";
    num_ops = static_cast<int32_t>(num_words / kRowOpWords);
    num_registers = registers;
    for (int i = 0; i < num_ops; ++i) {
      const int32_t* op = words + i * kRowOpWords;
      if (op[0] < 0 || op[0] >= kNumRowOps) return "program: unknown operation";
      if (op[1] < 0 || op[1] >= (op[0] == kRowOutput ? 1 + num_states : registers)) return "program: destination";
      for (int k = 2; k < kRowOpWords; ++k) {
        if (op[k] >= registers || op[k] < -1 - num_scalars) return "program: operand";
      }
      ops[i] = {static_cast<uint8_t>(op[0]), static_cast<uint8_t>(op[1]), static_cast<int16_t>(op[2]),
                static_cast<int16_t>(op[3]), static_cast<int16_t>(op[4])};
    }
    return nullptr;
  }
};

/// Returns exp(x), to about 1e-14: x = k ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of r up to its 12th
/// power.
JAXSOK_HOST_DEVICE double ExpOf(double x) {
  if (x != x) return x;
  if (x > 700.0) return 1e300;  // infinite in float32
  if (x < -700.0) return 0.0;
  constexpr double kPerLn2 = 1.4426950408889634;
  // ln 2 in two parts, so that k times the first is exact (fdlibm's e_exp.c, Sun Microsystems 1993).
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  const double quotient = x * kPerLn2;
  const int k = static_cast<int>(quotient + (quotient < 0.0 ? -0.5 : 0.5));
  const double r = (x - k * kLn2High) - k * kLn2Low;
  double sum = 1.0;
  for (int n = 12; n >= 1; --n) sum = sum * (r / n) + 1.0;
  uint64_t bits = static_cast<uint64_t>(k + 1023) << 52;
  double scale;
  memcpy(&scale, &bits, sizeof(scale));
  return sum * scale;
}

/// Returns log(x), to about 1e-14; for a float that is not positive, the IEEE result. x = 2^e m with m in [sqrt(1/2),
/// sqrt(2)), and log(m) = 2 atanh(s) with s = (m - 1) / (m + 1), whose series ends below 1e-16 after 11 terms.
JAXSOK_HOST_DEVICE double LogOfDouble(double x) {
  if (!(x > 0.0)) return x == 0.0 ? -INFINITY : NAN;
  if (x > 1.7e308) return x;
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
  double m;
  memcpy(&m, &bits, sizeof(m));
  constexpr double kSqrt2 = 1.4142135623730951, kLn2 = 0.6931471805599453;
  if (m > kSqrt2) {
    m = m * 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 0.0;
  for (int n = 21; n >= 1; n -= 2) series = series * z + 2.0 / n;
  return exponent * kLn2 + s * series;
}

JAXSOK_HOST_DEVICE double Log1pOf(double x) {
  // Near zero 1 + x loses precision; the error of four terms is below 1e-16 of x there.
  if (x < 1e-4 && x > -1e-4) return x * (1.0 - x * (0.5 - x * (1.0 / 3.0 - x * 0.25)));
  return LogOfDouble(1.0 + x);
}

JAXSOK_HOST_DEVICE double Expm1Of(double x) {
  if (x < 1e-4 && x > -1e-4) return x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0))));
  return ExpOf(x) - 1.0;
}

JAXSOK_HOST_DEVICE double TanhOf(double x) {
  if (x > 20.0) return 1.0;
  if (x < -20.0) return -1.0;
  const double e = Expm1Of(2.0 * x);
  return e / (e + 2.0);
}

/// Returns x^y as IEEE's pow, for floats: a negative x needs a whole y.
JAXSOK_HOST_DEVICE double PowerOf(float x, float y) {
  if (y == 0.0f || x == 1.0f) return 1.0;
  if (x != x || y != y) return NAN;
  const float whole = floorf(y);
  const bool is_whole = whole == y, is_odd = is_whole && floorf(y * 0.5f) * 2.0f != y;
  const double size = x < 0.0f ? -static_cast<double>(x) : static_cast<double>(x);
  double power;
  if (size == 0.0) {
    power = y > 0.0f ? 0.0 : INFINITY;
  } else if (size == 1.0) {
    power = 1.0;
  } else {
    power = ExpOf(static_cast<double>(y) * LogOfDouble(size));
  }
  const bool is_negative = (BitsOfFloat(x) >> 31) != 0;
  if (!is_negative) return power;
  if (is_odd) return -power;
  return x == 0.0f || is_whole || size > 1.7e308 ? power : NAN;
}

JAXSOK_HOST_DEVICE float CbrtOf(float x) {
  if (x == 0.0f || !IsFinite(x)) return x;
  const double size = x < 0.0f ? -static_cast<double>(x) : static_cast<double>(x);
  const float root = static_cast<float>(ExpOf(LogOfDouble(size) / 3.0));
  return x < 0.0f ? -root : root;
}

/// Returns a number rounded to the dtype, infinity from `overflow` on; a stored row keeps its largest number there.
template <typename Number>
JAXSOK_HOST_DEVICE float Rounded(float x, float overflow) {
  return fabsf(x) < overflow ? RowNumber<Number>::Widened(RowNumber<Number>::Nearest(x)) : x * INFINITY;
}

/// Returns the maximum: NaN if either is NaN, as in JAX. +0 is greater than -0, so that the order of the operands does
/// not matter. On a GPU this is one instruction with the same meaning: with branches the interpreter's switch spills
/// registers, and lifted Adam took 1.25 times as long.
JAXSOK_HOST_DEVICE float MaximumOf(float a, float b) {
#ifdef __CUDA_ARCH__
  float greater;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
  return greater;
#else
  if (a == b) return FloatOfBits(BitsOfFloat(a) & BitsOfFloat(b));
  return a != a || b != b ? a + b : a > b ? a : b;
#endif
}
JAXSOK_HOST_DEVICE float MinimumOf(float a, float b) {
#ifdef __CUDA_ARCH__
  float lesser;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(lesser) : "f"(a), "f"(b));
  return lesser;
#else
  if (a == b) return FloatOfBits(BitsOfFloat(a) | BitsOfFloat(b));
  return a != a || b != b ? a + b : a < b ? a : b;
#endif
}

/// Applies an operation with up to three operands to one column. The code is a compile-time constant.
template <int kCode>
JAXSOK_HOST_DEVICE float RowOpOf(float a, float b, float c) {
  if constexpr (kCode == kRowCopy) return a;
  if constexpr (kCode == kRowNegate) return -a;
  if constexpr (kCode == kRowAbs) return FloatOfBits(BitsOfFloat(a) & 0x7fffffffu);
  if constexpr (kCode == kRowSign) return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a;
  if constexpr (kCode == kRowSqrt) return sqrtf(a);
  if constexpr (kCode == kRowRsqrt) return 1.0f / sqrtf(a);
  if constexpr (kCode == kRowExp) return static_cast<float>(ExpOf(a));
  if constexpr (kCode == kRowLog) return static_cast<float>(LogOfDouble(a));
  if constexpr (kCode == kRowLog1p) return static_cast<float>(Log1pOf(a));
  if constexpr (kCode == kRowExpm1) return static_cast<float>(Expm1Of(a));
  if constexpr (kCode == kRowTanh) return static_cast<float>(TanhOf(a));
  if constexpr (kCode == kRowLogistic) return static_cast<float>(1.0 / (1.0 + ExpOf(-static_cast<double>(a))));
  if constexpr (kCode == kRowFloor) return floorf(a);
  if constexpr (kCode == kRowCbrt) return CbrtOf(a);
  if constexpr (kCode == kRowIsFinite) return IsFinite(a) ? 1.0f : 0.0f;
  if constexpr (kCode == kRowNot) return a != 0.0f ? 0.0f : 1.0f;
  if constexpr (kCode == kRowToBfloat16) return Rounded<BFloat16>(a, FloatOfBits(0x7f7f8000u));
  if constexpr (kCode == kRowToFloat16) return Rounded<Float16>(a, 65520.0f);
  if constexpr (kCode == kRowAdd) return a + b;
  if constexpr (kCode == kRowSubtract) return a - b;
  if constexpr (kCode == kRowMultiply) return a * b;
  if constexpr (kCode == kRowDivide) return a / b;
  if constexpr (kCode == kRowMaximum) return MaximumOf(a, b);
  if constexpr (kCode == kRowMinimum) return MinimumOf(a, b);
  if constexpr (kCode == kRowPower) return static_cast<float>(PowerOf(a, b));
  if constexpr (kCode == kRowEqual) return a == b ? 1.0f : 0.0f;
  if constexpr (kCode == kRowNotEqual) return a != b ? 1.0f : 0.0f;
  if constexpr (kCode == kRowLess) return a < b ? 1.0f : 0.0f;
  if constexpr (kCode == kRowLessEqual) return a <= b ? 1.0f : 0.0f;
  if constexpr (kCode == kRowAnd) return a != 0.0f && b != 0.0f ? 1.0f : 0.0f;
  if constexpr (kCode == kRowOr) return a != 0.0f || b != 0.0f ? 1.0f : 0.0f;
  if constexpr (kCode == kRowSelect) return a != 0.0f ? b : c;
  if constexpr (kCode == kRowMultiplyAdd) return a * b + c;
  if constexpr (kCode == kRowMultiplySubtract) return c - a * b;
  return a;
}

/// Joins two columns in a reduction.
template <int kCode>
JAXSOK_HOST_DEVICE float JoinOf(float a, float b) {
  if constexpr (kCode == kRowMax) return MaximumOf(a, b);
  if constexpr (kCode == kRowMin) return MinimumOf(a, b);
  return a + b;
}

/// Returns the initial value of a reduction.
template <int kCode>
JAXSOK_HOST_DEVICE float StartOf() {
  if constexpr (kCode == kRowMax) return -INFINITY;
  if constexpr (kCode == kRowMin) return INFINITY;
  return 0.0f;
}

/// Returns whether an operation reads its second operand. ReadsThird does so for the third.
JAXSOK_HOST_DEVICE bool ReadsSecond(int code) { return code >= kRowAdd && code <= kRowMultiplySubtract; }
JAXSOK_HOST_DEVICE bool ReadsThird(int code) { return code >= kRowSelect && code <= kRowMultiplySubtract; }

/// The operations on columns that take a few instructions, for a switch over their codes.
#define JAXSOK_LIGHT_ROW_OPS(_) \
  _(kRowCopy)                   \
  _(kRowNegate)                 \
  _(kRowAbs)                    \
  _(kRowSign)                   \
  _(kRowSqrt)                   \
  _(kRowRsqrt)                  \
  _(kRowFloor)                  \
  _(kRowIsFinite)               \
  _(kRowNot)                    \
  _(kRowToBfloat16)             \
  _(kRowToFloat16)              \
  _(kRowAdd)                    \
  _(kRowSubtract)               \
  _(kRowMultiply)               \
  _(kRowDivide)                 \
  _(kRowMaximum)                \
  _(kRowMinimum)                \
  _(kRowEqual)                  \
  _(kRowNotEqual)               \
  _(kRowLess)                   \
  _(kRowLessEqual)              \
  _(kRowAnd)                    \
  _(kRowOr)                     \
  _(kRowSelect)                 \
  _(kRowMultiplyAdd)            \
  _(kRowMultiplySubtract)

/// The operations on columns that take many instructions.
#define JAXSOK_HEAVY_ROW_OPS(_) \
  _(kRowExp)                    \
  _(kRowLog)                    \
  _(kRowLog1p)                  \
  _(kRowExpm1)                  \
  _(kRowTanh)                   \
  _(kRowLogistic)               \
  _(kRowCbrt)                   \
  _(kRowPower)

}  // namespace jaxsok

#endif  // JAXSOK_CORE_ROW_PROGRAM_H_

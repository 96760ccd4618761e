// Tests of core/: hashes and initial values against golden numbers, optimizers against closed forms.
//
// A Python program that shares no code with core/ (big integers, fractions, struct for floats, statistics.NormalDist in
// double) computed the golden numbers. They change only with the format of checkpoints.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../core/initialize.h"
#include "../core/row_dtype.h"
#include "../core/row_update.h"
#include "testing.h"

namespace jaxsok {
namespace {

bool IsNear(float got, double wanted, double relative) {
  return std::fabs(static_cast<double>(got) - wanted) <= relative * std::max(1e-30, std::fabs(wanted));
}

void TestMixIsSplitMix64() {
  // The generator's published outputs for seed 1234567.
  constexpr uint64_t kWanted[] = {6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull};
  uint64_t state = 1234567;
  for (const uint64_t wanted : kWanted) JAXSOK_CHECK(Mix64(state += kGolden) == wanted);
}

void TestHashes() {
  struct Golden {
    uint64_t key;
    uint32_t table;
    uint64_t salt, hash;
    uint32_t home;  // of 1,000,003 buckets
  };
  constexpr Golden kGoldens[] = {
      {0x0ull, 0u, 0x0ull, 0xe220a8397b1dcdafull, 883313u},
      {0x5ull, 0u, 0x0ull, 0x6aafef81a8f1ad0full, 416748u},
      {0x5ull, 25u, 0x0ull, 0x84cee686f5df2d17ull, 518783u},
      {0x5ull, 25u, 0x123456789abcdef0ull, 0xc5d0cfb3742f67c9ull, 772719u},
      {0xfffffffffffffffeull, 3u, 0x7ull, 0x61ae7471598c3088ull, 381569u},
      {0x100000000ull, 0u, 0x0ull, 0xce30761cd7373f6dull, 805429u},
      {0x1ull, 16777215u, 0xffffffffffffffffull, 0xb98a674bbc61a4cbull, 724770u},
  };
  for (const Golden& golden : kGoldens) {
    const uint64_t hash = HashOf(golden.key, golden.table, golden.salt);
    JAXSOK_CHECK(hash == golden.hash);
    JAXSOK_CHECK(HomeBucket(hash, 1000003) == golden.home);
  }
}

/// Owners and rounds depend neither on the salt of an index nor on the number of a table in its store.
void TestPartitions() {
  struct Golden {
    uint64_t key, name, hash;
    uint32_t partition;
    uint64_t round_hash;
  };
  constexpr Golden kGoldens[] = {
      {0x0ull, 0x0ull, 0xe220a8397b1dcdafull, 3618u, 0xa8397b1dcdafe22ull},
      {0x5ull, 0x0ull, 0x6aafef81a8f1ad0full, 1706u, 0xfef81a8f1ad0f6aaull},
      {0x5ull, 0x123456789abcdef0ull, 0x61a10b6a758a4a4ull, 97u, 0xa10b6a758a4a4061ull},
      {0xfffffffffffffffeull, 0x123456789abcdef0ull, 0x2d6f11673b585730ull, 726u, 0xf11673b5857302d6ull},
      {0x100000000ull, 0xfedcba9876543210ull, 0x4ed4829993e9b548ull, 1261u, 0x4829993e9b5484edull},
      {0x8000000000000000ull, 0x4d000003e8ull, 0x93e9bb180595d762ull, 2366u, 0x9bb180595d76293eull},
  };
  for (const Golden& golden : kGoldens) {
    const uint64_t hash = PartitionHash(golden.key, golden.name);
    JAXSOK_CHECK(hash == golden.hash);
    JAXSOK_CHECK(PartitionOf(hash) == golden.partition);
    JAXSOK_CHECK(RoundHash(hash) == golden.round_hash);
  }
  JAXSOK_CHECK(PartitionOf(0) == 0 && PartitionOf(~uint64_t{0}) == kNumPartitions - 1);
}

void TestOwners() {
  std::vector<uint32_t> owners(kNumPartitions, 1);
  owners[3] = 2;
  owners[4] = 9;
  uint32_t words[kNumTableWords] = {};
  const auto owner_of = [&](uint64_t partition) { return OwnerOf(words, owners.data(), 3, partition << 52 | 77); };
  words[kTableOwner] = kNoOwner;
  JAXSOK_CHECK(owner_of(0) == 1 && owner_of(3) == 2 && owner_of(4) == 2 && owner_of(kNumPartitions - 1) == 1);
  words[kTableOwner] = 0;
  JAXSOK_CHECK(owner_of(3) == 0);
  words[kTableOwner] = 3;  // there are three shards: 0, 1, 2
  JAXSOK_CHECK(owner_of(3) == 2);
}

/// The keys of one partition differ in all bits of their round hash: its slices have equal sizes.
void TestRoundHashesSpread() {
  constexpr uint32_t kNumSlices = 16;
  std::vector<uint32_t> sizes(kNumSlices, 0);
  uint32_t num_keys = 0;
  for (uint64_t key = 0; key < 4'000'000; ++key) {
    const uint64_t hash = PartitionHash(key, 5);
    if (PartitionOf(hash) >= 8) continue;
    ++sizes[RoundHash(hash) >> 60];
    ++num_keys;
  }
  const double mean = static_cast<double>(num_keys) / kNumSlices;
  for (const uint32_t size : sizes) JAXSOK_CHECK(std::fabs(size - mean) < 6 * std::sqrt(mean));
}

void TestHomeBucketsStayInside() {
  for (const uint32_t num_buckets : {1u, 2u, 3u, 1000u, 0x7fffffffu, 0xffffffffu}) {
    JAXSOK_CHECK(HomeBucket(0, num_buckets) == 0);
    JAXSOK_CHECK(HomeBucket(~uint64_t{0}, num_buckets) == num_buckets - 1);
  }
}

/// Neighbouring keys, and equal keys in many tables, fill buckets as if at random.
void TestHomeBucketsSpread() {
  constexpr uint32_t kNumBuckets = 64, kNumTables = 26, kNumKeys = 5000;
  std::vector<uint32_t> sizes(kNumBuckets, 0);
  for (uint32_t table = 0; table < kNumTables; ++table) {
    for (uint64_t key = 0; key < kNumKeys; ++key) ++sizes[HomeBucket(HashOf(key, table, 0), kNumBuckets)];
  }
  const double mean = double{kNumTables} * kNumKeys / kNumBuckets;
  // Six standard deviations of a Poisson count: exceeded by one bucket in 10^9.
  for (const uint32_t size : sizes) JAXSOK_CHECK(std::fabs(size - mean) < 6 * std::sqrt(mean));
}

void TestSlabs() {
  const SlabStarts starts = {{0, 10, 11, 40}, 4};
  JAXSOK_CHECK(starts.SlabOf(0) == 0 && starts.SlabOf(9) == 0 && starts.SlabOf(10) == 1 && starts.SlabOf(11) == 2);
  JAXSOK_CHECK(starts.SlabOf(39) == 2 && starts.SlabOf(40) == 3 && starts.SlabOf(~uint32_t{0}) == 3);
  float first[10 * 3], second[3], third[29 * 3], fourth[3];
  const Slabs<float> slabs = {{first, second, third, fourth}};
  JAXSOK_CHECK(slabs.At(starts, 9, 3) == first + 27 && slabs.At(starts, 10, 3) == second);
  JAXSOK_CHECK(slabs.At(starts, 12, 3) == third + 3 && slabs.At(starts, 40, 3) == fourth);
}

void TestInitialRows() {
  struct Golden {
    uint64_t key;
    uint32_t column, uniform_bits;  // in [-0.5, 0.25)
    double normal, truncated;       // mean 0, deviation 1
  };
  constexpr Golden kGoldens[] = {
      {0x0ull, 0u, 0xbd274100u, 0.2851151, 0.2718099},
      {0x0ull, 1u, 0x3db13df8u, 0.7791647, 0.7362967},
      {0x0ull, 63u, 0xbea6aa6eu, -0.7301761, -0.6909255},
      {0x5ull, 0u, 0x3e7b025cu, 2.4838572, 1.8964111},
      {0x5ull, 1u, 0xbef4fcdbu, -1.9005898, -1.6436606},
      {0x5ull, 63u, 0xbe80de2cu, -0.4369513, -0.4158509},
      {0xfffffffffffffffeull, 0u, 0xbe5dade8u, -0.3106805, -0.2961132},
      {0xfffffffffffffffeull, 1u, 0xbe99950au, -0.6227845, -0.5907986},
      {0xfffffffffffffffeull, 63u, 0xbe8bf430u, -0.5180736, -0.4924425},
  };
  const uint32_t seed[] = {7, 9};
  uint32_t words[kNumTableWords] = {0x33334444u, 0x11112222u};
  const auto row = [&](int kind, float a, float b, uint64_t key) {
    words[kTableInitializer] = static_cast<uint32_t>(kind);
    words[kTableParameterA] = BitsOfFloat(a);
    words[kTableParameterB] = BitsOfFloat(b);
    return RowInitializer::Of(words, seed, key);
  };
  for (const Golden& golden : kGoldens) {
    const uint32_t c = golden.column;
    JAXSOK_CHECK(BitsOfFloat(row(kInitializeUniform, -0.5f, 0.25f, golden.key).At(c)) == golden.uniform_bits);
    // The quantile is good to about 1e-7; p is rounded to 24 bits, which the slope at 2.5 makes 3e-6.
    JAXSOK_CHECK(IsNear(row(kInitializeNormal, 0.0f, 1.0f, golden.key).At(c), golden.normal, 5e-6));
    JAXSOK_CHECK(IsNear(row(kInitializeTruncatedNormal, 0.0f, 1.0f, golden.key).At(c), golden.truncated, 5e-6));
    JAXSOK_CHECK(row(kInitializeConstant, 3.5f, 0.0f, golden.key).At(c) == 3.5f);
  }
}

void TestDistributions() {
  const uint32_t seed[] = {1, 2};
  uint32_t words[kNumTableWords] = {};
  words[kTableParameterB] = BitsOfFloat(1.0f);
  constexpr int kNumSamples = 1 << 18;
  struct Moments {
    int kind;
    double mean, deviation, low, high;
  };
  // The normal distribution cut at two deviations: sqrt(1 - 4 phi(2) / (Phi(2) - Phi(-2))) = 0.8796.
  constexpr Moments kMoments[] = {{kInitializeUniform, 0.5, 0.288675, 0.0, 1.0},
                                  {kInitializeNormal, 0.0, 1.0, -6.0, 6.0},
                                  {kInitializeTruncatedNormal, 0.0, 0.879626, -2.000001, 2.000001}};
  for (const Moments& wanted : kMoments) {
    words[kTableInitializer] = static_cast<uint32_t>(wanted.kind);
    double sum = 0, squares = 0;
    for (int i = 0; i < kNumSamples; ++i) {
      const double x = RowInitializer::Of(words, seed, static_cast<uint64_t>(i / 64)).At(static_cast<uint32_t>(i % 64));
      JAXSOK_CHECK(x >= wanted.low && x <= wanted.high);
      sum += x;
      squares += x * x;
    }
    const double mean = sum / kNumSamples;
    const double error = 6 / std::sqrt(double{kNumSamples});  // six standard errors of the mean
    JAXSOK_CHECK(std::fabs(mean - wanted.mean) < error);
    JAXSOK_CHECK(std::fabs(std::sqrt(squares / kNumSamples - mean * mean) - wanted.deviation) < error);
  }
}

void TestNormalQuantile() {
  JAXSOK_CHECK(NormalQuantile(0.5f) == 0.0f);
  JAXSOK_CHECK(IsNear(NormalQuantile(0.975f), 1.9599640, 2e-6));
  JAXSOK_CHECK(IsNear(NormalQuantile(0.025f), -1.9599640, 2e-6));
  JAXSOK_CHECK(IsNear(NormalQuantile(1e-8f), -5.6120012, 2e-6));
  JAXSOK_CHECK(IsNear(NormalQuantile(1e-20f), -9.2623401, 2e-6));
  // Its branches join: it does not decrease at 0.075 and 0.925.
  for (float p = 0.07f; p < 0.93f; p += 0.0001f) JAXSOK_CHECK(NormalQuantile(p) < NormalQuantile(p + 0.0001f));
  JAXSOK_CHECK(OpenUniform(0) > 0.0f && OpenUniform(~uint32_t{0}) < 1.0f);
  JAXSOK_CHECK(IsFinite(NormalQuantile(OpenUniform(0))) && IsFinite(NormalQuantile(OpenUniform(~uint32_t{0}))));
}

void TestLog() {
  for (float x = 1e-30f; x < 1e30f; x *= 1.37f) {
    const double error = std::fabs(static_cast<double>(LogOf(x)) - std::log(static_cast<double>(x)));
    JAXSOK_CHECK(error <= 4e-7 * std::max(1.0, std::fabs(std::log(static_cast<double>(x)))));
  }
  JAXSOK_CHECK(LogOf(1.0f) == 0.0f);
}

void TestFloats() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  JAXSOK_CHECK(!IsFinite(kInfinity) && !IsFinite(-kInfinity) && !IsFinite(std::nanf("")));
  JAXSOK_CHECK(IsFinite(0.0f) && IsFinite(-std::numeric_limits<float>::max()) && IsFinite(1e-45f));
  JAXSOK_CHECK(BitsOfFloat(1.0f) == 0x3f800000u && FloatOfBits(0xc0000000u) == -2.0f);
  JAXSOK_CHECK(Word64(0x89abcdefu, 0x01234567u) == 0x0123456789abcdefull);
}

void TestRounding() {
  struct Golden {
    uint32_t bits;
    uint16_t bfloat16[6], float16[6];  // to nearest; by the random bits 0, 1, 0x7fff, 0x8000, 0xffff
  };
  constexpr Golden kGoldens[] = {
      // Exact numbers, zeros among them, and 65504: the largest float16.
      {0xbf800000u, {0xbf80, 0xbf80, 0xbf80, 0xbf80, 0xbf80, 0xbf80}, {0xbc00, 0xbc00, 0xbc00, 0xbc00, 0xbc00, 0xbc00}},
      {0x00000000u, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000}},
      {0x80000000u, {0x8000, 0x8000, 0x8000, 0x8000, 0x8000, 0x8000}, {0x8000, 0x8000, 0x8000, 0x8000, 0x8000, 0x8000}},
      {0x477fe000u, {0x4780, 0x477f, 0x477f, 0x4780, 0x4780, 0x4780}, {0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff}},
      // Ties, rounded to even, of either dtype; numbers between.
      {0x3f808000u, {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f81, 0x3f81}, {0x3c04, 0x3c04, 0x3c04, 0x3c04, 0x3c04, 0x3c04}},
      {0x3f818000u, {0x3f82, 0x3f81, 0x3f81, 0x3f81, 0x3f82, 0x3f82}, {0x3c0c, 0x3c0c, 0x3c0c, 0x3c0c, 0x3c0c, 0x3c0c}},
      {0x3f801000u, {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f81}, {0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c01, 0x3c01}},
      {0x3f803000u, {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f81}, {0x3c02, 0x3c01, 0x3c01, 0x3c01, 0x3c02, 0x3c02}},
      {0x3dcccccdu, {0x3dcd, 0x3dcc, 0x3dcc, 0x3dcd, 0x3dcd, 0x3dcd}, {0x2e66, 0x2e66, 0x2e66, 0x2e66, 0x2e66, 0x2e67}},
      {0xc0490fd0u, {0xc049, 0xc049, 0xc049, 0xc049, 0xc049, 0xc04a}, {0xc248, 0xc248, 0xc248, 0xc248, 0xc248, 0xc249}},
      // Below the normal bfloat16.
      {0x80000001u, {0x8000, 0x8000, 0x8000, 0x8000, 0x8000, 0x8001}, {0x8000, 0x8000, 0x8000, 0x8000, 0x8000, 0x8000}},
      {0x00008000u, {0x0000, 0x0000, 0x0000, 0x0000, 0x0001, 0x0001}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000}},
      {0x00018000u, {0x0002, 0x0001, 0x0001, 0x0001, 0x0002, 0x0002}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000}},
      {0x007fffffu, {0x0080, 0x007f, 0x0080, 0x0080, 0x0080, 0x0080}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000}},
      // Below the normal float16: 2^-24, halves of it, 2^-26, 2^-40, 2^-41, the least normal number and just below it.
      {0x33800000u, {0x3380, 0x3380, 0x3380, 0x3380, 0x3380, 0x3380}, {0x0001, 0x0001, 0x0001, 0x0001, 0x0001, 0x0001}},
      {0x33000000u, {0x3300, 0x3300, 0x3300, 0x3300, 0x3300, 0x3300}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0001, 0x0001}},
      {0x33c00000u, {0x33c0, 0x33c0, 0x33c0, 0x33c0, 0x33c0, 0x33c0}, {0x0002, 0x0001, 0x0001, 0x0001, 0x0002, 0x0002}},
      {0x32800000u, {0x3280, 0x3280, 0x3280, 0x3280, 0x3280, 0x3280}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0001}},
      {0x2b800000u, {0x2b80, 0x2b80, 0x2b80, 0x2b80, 0x2b80, 0x2b80}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0001}},
      {0x2b000000u, {0x2b00, 0x2b00, 0x2b00, 0x2b00, 0x2b00, 0x2b00}, {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000}},
      {0x38800000u, {0x3880, 0x3880, 0x3880, 0x3880, 0x3880, 0x3880}, {0x0400, 0x0400, 0x0400, 0x0400, 0x0400, 0x0400}},
      {0x387fffffu, {0x3880, 0x387f, 0x3880, 0x3880, 0x3880, 0x3880}, {0x0400, 0x03ff, 0x03ff, 0x0400, 0x0400, 0x0400}},
      {0x387fda40u, {0x3880, 0x387f, 0x387f, 0x3880, 0x3880, 0x3880}, {0x03ff, 0x03ff, 0x03ff, 0x03ff, 0x03ff, 0x0400}},
      {0xb3d6bf95u, {0xb3d7, 0xb3d6, 0xb3d6, 0xb3d7, 0xb3d7, 0xb3d7}, {0x8002, 0x8001, 0x8001, 0x8002, 0x8002, 0x8002}},
      // Beyond the largest numbers, and infinities.
      {0x477ff000u, {0x4780, 0x477f, 0x477f, 0x4780, 0x4780, 0x4780}, {0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff}},
      {0x47800000u, {0x4780, 0x4780, 0x4780, 0x4780, 0x4780, 0x4780}, {0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff}},
      {0x4e6e6b28u, {0x4e6e, 0x4e6e, 0x4e6e, 0x4e6e, 0x4e6e, 0x4e6f}, {0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff}},
      {0x7f7f8000u, {0x7f7f, 0x7f7f, 0x7f7f, 0x7f7f, 0x7f7f, 0x7f7f}, {0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff}},
      {0xff7fffffu, {0xff7f, 0xff7f, 0xff7f, 0xff7f, 0xff7f, 0xff7f}, {0xfbff, 0xfbff, 0xfbff, 0xfbff, 0xfbff, 0xfbff}},
      {0x7f800000u, {0x7f80, 0x7f80, 0x7f80, 0x7f80, 0x7f80, 0x7f80}, {0x7c00, 0x7c00, 0x7c00, 0x7c00, 0x7c00, 0x7c00}},
      {0xff800000u, {0xff80, 0xff80, 0xff80, 0xff80, 0xff80, 0xff80}, {0xfc00, 0xfc00, 0xfc00, 0xfc00, 0xfc00, 0xfc00}},
  };
  constexpr uint32_t kRandom[] = {0, 1, 0x7fff, 0x8000, 0xffff};
  for (const Golden& golden : kGoldens) {
    const float value = FloatOfBits(golden.bits);
    JAXSOK_CHECK_SEED(RowNumber<BFloat16>::Nearest(value).bits == golden.bfloat16[0], golden.bits);
    JAXSOK_CHECK_SEED(RowNumber<Float16>::Nearest(value).bits == golden.float16[0], golden.bits);
    for (int i = 0; i < 5; ++i) {
      // Bits above the lower 16 are ignored.
      const uint32_t random = kRandom[i] | 0xabcd0000u;
      JAXSOK_CHECK_SEED(RowNumber<BFloat16>::Stochastic(value, random).bits == golden.bfloat16[i + 1], golden.bits);
      JAXSOK_CHECK_SEED(RowNumber<Float16>::Stochastic(value, random).bits == golden.float16[i + 1], golden.bits);
    }
    JAXSOK_CHECK_SEED(BitsOfFloat(RowNumber<float>::Stochastic(value, 0xffff)) == golden.bits, golden.bits);
  }
}

/// Each 16-bit number is one float, which every rounding leaves unchanged; NaN stays NaN, whatever its bits.
template <typename T>
void TestExactNumbersStay(uint16_t infinity) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = RowNumber<T>::Widened(T{static_cast<uint16_t>(bits)});
    const bool is_nan = (bits & 0x7fffu) > infinity;
    JAXSOK_CHECK_SEED(std::isnan(value) == is_nan, bits);
    JAXSOK_CHECK_SEED(std::isinf(value) == ((bits & 0x7fffu) == infinity), bits);
    JAXSOK_CHECK_SEED(std::signbit(value) == (bits >> 15 != 0), bits);
    const auto is_same = [&](T rounded) {
      return is_nan ? std::isnan(RowNumber<T>::Widened(rounded)) && rounded.bits >> 15 == bits >> 15
                    : rounded.bits == bits;
    };
    JAXSOK_CHECK_SEED(is_same(RowNumber<T>::Nearest(value)), bits);
    for (const uint32_t random : {0x0u, 0x1u, 0x8000u, 0xfff8u, 0xffffu}) {
      JAXSOK_CHECK_SEED(is_same(RowNumber<T>::Stochastic(value, random)), bits);
    }
  }
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0x7f808000u, 0xff800001u, 0xffffffffu}) {
    JAXSOK_CHECK_SEED(std::isnan(RowNumber<T>::Widened(RowNumber<T>::Nearest(FloatOfBits(bits)))), bits);
    JAXSOK_CHECK_SEED(std::isnan(RowNumber<T>::Widened(RowNumber<T>::Stochastic(FloatOfBits(bits), 0xffff))), bits);
  }
}

/// The mean over all random bits is the number itself: exactly, if at most 16 bits are below the cut.
template <typename T>
void TestRoundingKeepsTheMean(float smallest, double left_out) {
  Random random(17);
  for (int i = 0; i < 200; ++i) {
    float value = smallest * std::ldexp(1.0f + static_cast<float>(random.Below(1u << 23)) * 0x1p-23f, i % 20);
    if (i % 2 == 0) value = -value;
    const T low = RowNumber<T>::Stochastic(value, 0), high = RowNumber<T>::Stochastic(value, 0xffff);
    const double near = RowNumber<T>::Widened(low), far = RowNumber<T>::Widened(high);
    double sum = 0;
    bool is_neighbour = high.bits - low.bits <= 1;
    for (uint32_t r = 0; r < 0x10000u; ++r) {
      const T rounded = RowNumber<T>::Stochastic(value, r);
      is_neighbour = is_neighbour && (rounded.bits == low.bits || rounded.bits == high.bits);
      sum += RowNumber<T>::Widened(rounded) - near;
    }
    JAXSOK_CHECK_SEED(is_neighbour && std::fabs(near) <= std::fabs(value) && std::fabs(value) <= std::fabs(far), i);
    JAXSOK_CHECK_SEED(std::fabs(near + sum / 65536 - value) <= left_out, i);
  }
}

void TestRandomBits() {
  struct Golden {
    uint64_t seed, name, key;
    uint32_t step;
    uint64_t draws[2];  // of columns 0 to 3 and 1020 to 1023
  };
  constexpr Golden kGoldens[] = {
      {0x0ull, 0x0ull, 0x0ull, 0x0u, {0x45858b5a411cd1eeull, 0xabd78ddb6bfcbe85ull}},
      {0x900000007ull, 0x4d000003e8ull, 0x5ull, 0x0u, {0x7ef7a24c95874d2ull, 0x66e9d0a6def85665ull}},
      {0x900000007ull, 0x4d000003e8ull, 0x5ull, 0x1u, {0x9bc30a3e899d1286ull, 0xa5b212a170bc3b3bull}},
      {~0x0ull, 0x123456789abcdef0ull, 0xfffffffffffffffeull, ~0x0u, {0x846ce77b6f27a7e2ull, 0xf8ba4a79c46a6415ull}},
  };
  for (const Golden& golden : kGoldens) {
    const uint32_t seed[] = {static_cast<uint32_t>(golden.seed), static_cast<uint32_t>(golden.seed >> 32)};
    uint32_t words[kNumTableWords] = {};
    words[kTableNameLow] = static_cast<uint32_t>(golden.name);
    words[kTableNameHigh] = static_cast<uint32_t>(golden.name >> 32);
    const RowRounding row = RowRounding::Of(words, RoundingOfStep(seed, golden.step), golden.key);
    for (int d = 0; d < 2; ++d) {
      const uint32_t quad = d == 0 ? 0 : 255;
      JAXSOK_CHECK(row.Draw(quad) == golden.draws[d]);
      for (uint32_t c = 0; c < 4; ++c) JAXSOK_CHECK(row.At(4 * quad + c) == (golden.draws[d] >> 16 * c & 0xffff));
    }
  }
}

void TestLaneShapes() {
  for (int dim = 1; dim <= kMaxDim; ++dim) {
    const LaneShape shape = LaneShape::Of(dim);
    JAXSOK_CHECK(shape.vector == (dim % 4 == 0 ? 4 : 1) && dim % shape.vector == 0);
    const int vectors = dim / shape.vector;
    JAXSOK_CHECK(shape.lanes <= 32 && (shape.lanes & (shape.lanes - 1)) == 0);
    JAXSOK_CHECK(shape.lanes == 32 || shape.lanes * (shape.vector == 4 ? kVectorsPerLane : kSinglesPerLane) >= vectors);
    JAXSOK_CHECK(shape.lanes == 1 || shape.lanes / 2 < vectors);
    const LaneShape narrow = LaneShape::OfRows16(dim);
    JAXSOK_CHECK(narrow.vector == (dim % 8 == 0 ? 8 : shape.vector) && dim % narrow.vector == 0);
    JAXSOK_CHECK(narrow.lanes <= 32 && (narrow.lanes & (narrow.lanes - 1)) == 0);
    JAXSOK_CHECK(narrow.vector != 8 || narrow.lanes == 32 || narrow.lanes * 8 >= dim);
  }
}

void TestRowGradientScale() {
  JAXSOK_CHECK(RowGradientScale(kRowGradientSum, 4) == 1.0f);
  JAXSOK_CHECK(RowGradientScale(kRowGradientMean, 4) == 0.25f);
  JAXSOK_CHECK(RowGradientScale(kRowGradientSqrt, 4) == 0.5f);
}

/// Optimizers meet their closed forms exactly, on numbers that float32 holds exactly.
void TestOptimizers() {
  float row = 1.0f, unused = 0.0f;
  const float sgd[kNumHyper] = {0.5f};
  Sgd::Step(sgd, 0.25f, row, unused, unused);
  JAXSOK_CHECK(row == 0.875f);

  // acc 7 + 3^2 = 16; step 0.5 * 3 / sqrt(16).
  float acc = 7.0f;
  row = 1.0f;
  const float adagrad[kNumHyper] = {0.5f, 0.0f};
  Adagrad::Step(adagrad, 3.0f, row, acc, unused);
  JAXSOK_CHECK(acc == 16.0f && row == 1.0f - 0.5f * 0.75f);

  // A zero accumulator and a zero gradient: nothing moves, nothing is divided by zero.
  acc = 0.0f;
  row = 1.0f;
  Adagrad::Step(adagrad, 0.0f, row, acc, unused);
  JAXSOK_CHECK(acc == 0.0f && row == 1.0f);

  const float rowwise[kNumHyper] = {0.5f, 1.0f};
  JAXSOK_CHECK(RowwiseAdagrad::Scale(rowwise, 9.0f) == 0.125f);

  // The first step of Adam: both corrections undo the decay, so the row moves by lr * sign(g).
  float m = 0.0f, v = 0.0f;
  row = 1.0f;
  const float adam[kNumHyper] = {0.25f, 0.5f, 0.75f, 0.0f, 0.5f, 0.25f, 0.5f, 0.25f};
  Adam::Step(adam, -4.0f, row, m, v);
  JAXSOK_CHECK(m == -2.0f && v == 4.0f && row == 1.25f);

  // The second step, by hand: m = 0.5 * -2 + 0.5 * 4 = 1, v = 0.75 * 4 + 0.25 * 16 = 7; corrections 3/4 and 7/16:
  // m / (3/4) = 4/3, sqrt(7 / (7/16)) = 4, so the row moves by 0.25 * (4/3) / 4 = 1/12.
  const float adam_second[kNumHyper] = {0.25f, 0.5f, 0.75f, 0.0f, 0.75f, 0.4375f, 0.5f, 0.25f};
  Adam::Step(adam_second, 4.0f, row, m, v);
  JAXSOK_CHECK(m == 1.0f && v == 7.0f && IsNear(row, 1.25 - 1.0 / 12.0, 1e-7));
}

}  // namespace
}  // namespace jaxsok

int main() {
  jaxsok::TestMixIsSplitMix64();
  jaxsok::TestHashes();
  jaxsok::TestPartitions();
  jaxsok::TestOwners();
  jaxsok::TestRoundHashesSpread();
  jaxsok::TestHomeBucketsStayInside();
  jaxsok::TestHomeBucketsSpread();
  jaxsok::TestSlabs();
  jaxsok::TestInitialRows();
  jaxsok::TestDistributions();
  jaxsok::TestNormalQuantile();
  jaxsok::TestLog();
  jaxsok::TestFloats();
  jaxsok::TestRounding();
  jaxsok::TestExactNumbersStay<jaxsok::BFloat16>(0x7f80);
  jaxsok::TestExactNumbersStay<jaxsok::Float16>(0x7c00);
  jaxsok::TestRoundingKeepsTheMean<jaxsok::BFloat16>(0.01f, 0.0);
  jaxsok::TestRoundingKeepsTheMean<jaxsok::BFloat16>(0x1p-130f, 0.0);
  jaxsok::TestRoundingKeepsTheMean<jaxsok::Float16>(0x1p-17f, 0.0);
  jaxsok::TestRoundingKeepsTheMean<jaxsok::Float16>(0x1p-30f, 0x1p-40);
  jaxsok::TestRandomBits();
  jaxsok::TestLaneShapes();
  jaxsok::TestRowGradientScale();
  jaxsok::TestOptimizers();
  return jaxsok::Finish("core_test");
}

// Hashes: where a key lives in the index, and the counter-based numbers behind new rows.
#ifndef JAXSOK_CORE_HASH_H_
#define JAXSOK_CORE_HASH_H_

#include "platform.h"

namespace jaxsok {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio, odd: the Weyl step of SplitMix64

/// Mixes 64 bits; a bijection in which every input bit reaches every output bit.
///
/// Source: David Stafford, "Better Bit Mixing", variant 13, the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
JAXSOK_HOST_DEVICE uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// The hash of a (table, key) pair under a salt.
///
/// The table moves the key by a salted odd step before mixing, so that tables that hold the same keys do not
/// share home buckets, and keys that collide under one salt part under another.
JAXSOK_HOST_DEVICE uint64_t HashOf(uint64_t key, uint32_t table, uint64_t salt) {
  return Mix64(Mix64(key ^ salt) + (table + 1) * kGolden);
}

/// The home bucket: multiply-high, so that num_buckets need not be a power of two.
JAXSOK_HOST_DEVICE uint32_t HomeBucket(uint64_t hash, uint32_t num_buckets) {
  return static_cast<uint32_t>(((hash >> 32) * static_cast<uint64_t>(num_buckets)) >> 32);
}

JAXSOK_HOST_DEVICE uint64_t Word64(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

}  // namespace jaxsok

#endif  // JAXSOK_CORE_HASH_H_

// Hashes: the home bucket of a key in the index, the shard that owns it, and the counter-based numbers behind new rows.
#ifndef JAXSOK_CORE_HASH_H_
#define JAXSOK_CORE_HASH_H_

#include "layout.h"

namespace jaxsok {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio, odd: the Weyl step of SplitMix64
constexpr uint32_t kGolden32 = 2654435769;           // 2^32 / golden ratio, odd: Knuth's multiplicative hashing

/// Mixes 64 bits; a bijection in which every input bit reaches every output bit.
///
/// Source: David Stafford, "Better Bit Mixing", variant 13, the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
JAXSOK_HOST_DEVICE uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Returns the hash of a (table, key) pair under a salt.
///
/// The table moves the key by a salted odd step before mixing, so that tables that hold the same keys do not
/// share home buckets, and keys that collide under one salt part under another.
JAXSOK_HOST_DEVICE uint64_t HashOf(uint64_t key, uint32_t table, uint64_t salt) {
  return Mix64(Mix64(key ^ salt) + (table + 1) * kGolden);
}

/// Returns what a key adds to the digest of a batch; padding adds nothing. The position is included, so that the same
/// keys in another order give another digest.
JAXSOK_HOST_DEVICE uint64_t DigestOf(uint64_t key, int64_t position) {
  return key == kPaddingKey ? 0 : Mix64(key + (static_cast<uint64_t>(position) + 1) * kGolden);
}

/// Returns the home bucket: multiply-high, so that num_buckets need not be a power of two.
JAXSOK_HOST_DEVICE uint32_t HomeBucket(uint64_t hash, uint32_t num_buckets) {
  return static_cast<uint32_t>(((hash >> 32) * static_cast<uint64_t>(num_buckets)) >> 32);
}

JAXSOK_HOST_DEVICE uint64_t Word64(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }
JAXSOK_HOST_DEVICE uint64_t Word64(const uint32_t* words) { return Word64(words[0], words[1]); }

/// Returns the hash that decides a key's partition; `name`: the table's.
///
/// It uses neither the salt nor the table's number: the owner of a key is a pure function of table, key and mesh. Keys
/// of one table have distinct hashes, since every step is a bijection.
JAXSOK_HOST_DEVICE uint64_t PartitionHash(uint64_t key, uint64_t name) { return HashOf(key, 0, name); }

constexpr int kPartitionBits = 12;
static_assert(kNumPartitions == 1 << kPartitionBits, "the partition is the top of the hash");

JAXSOK_HOST_DEVICE uint32_t PartitionOf(uint64_t hash) { return static_cast<uint32_t>(hash >> (64 - kPartitionBits)); }

/// Returns the hash that distributes the requests for one owner over rounds.
///
/// The owner follows from the top bits, so they come last: the hash of one owner's keys is spread over all 64 bits.
JAXSOK_HOST_DEVICE uint64_t RoundHash(uint64_t hash) { return hash << kPartitionBits | hash >> (64 - kPartitionBits); }

/// Returns the shard that owns a key; always below num_shards (Python checks the owners that it passes).
///
/// `table_words`: the table's words, kNumTableWords; `hash`: the key's PartitionHash.
JAXSOK_HOST_DEVICE uint32_t OwnerOf(const uint32_t* table_words, const uint32_t* partition_owners, uint32_t num_shards,
                                    uint64_t hash) {
  const uint32_t pinned = table_words[kTableOwner];
  const uint32_t owner = pinned != kNoOwner ? pinned : partition_owners[PartitionOf(hash)];
  return owner < num_shards ? owner : num_shards - 1;
}

}  // namespace jaxsok

#endif  // JAXSOK_CORE_HASH_H_

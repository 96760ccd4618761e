// Decides which unseen keys get a row: pure functions of (seed, table name, key), and of the step if the policy is
// random.
//
// They do not depend on the salt (decision D8): a key's draw is the same on every mesh, and after a rebuild of the
// index under another salt. The places of its Bloom counters depend on the store: on the sizes of its tables' filters
// and shards.
#ifndef JAXSOK_CORE_ADMISSION_H_
#define JAXSOK_CORE_ADMISSION_H_

#include "hash.h"
#include "layout.h"

namespace jaxsok {

constexpr uint64_t kAdmissionStream = 0xaef17502108ef2d9ull;  // differs from the streams of new rows and rounding; odd

constexpr uint32_t kBloomPerWord = 4;     // counters of 8 bits
constexpr uint32_t kMostSightings = 255;  // the limit of a counter of the filter (policies.py MAX_SIGHTINGS)

/// Returns a key's hash for its table's admission. `table_words`: the table's words; `seed`: the two words of the
/// state's seed.
JAXSOK_HOST_DEVICE uint64_t AdmissionHash(const uint32_t* table_words, const uint32_t* seed, uint64_t key) {
  const uint64_t name = Word64(table_words[kTableNameLow], table_words[kTableNameHigh]);
  return Mix64(key + Mix64(Mix64(Word64(seed) + kAdmissionStream) ^ name));
}

/// Returns whether a key of a table that admits by probability gets a row at this step.
JAXSOK_HOST_DEVICE bool IsDrawn(const uint32_t* table_words, uint64_t hash, uint32_t step) {
  return static_cast<uint32_t>(Mix64(hash + (uint64_t{step} + 1) * kGolden) >> 32) < table_words[kTableThreshold];
}

/// Returns the place of a key's i-th Bloom counter among all counters of the shard.
///
/// Source: Adam Kirsch and Michael Mitzenmacher, "Less Hashing, Same Performance: Building a Better Bloom Filter",
/// 2008: two hashes, here the halves of one, make all the others.
JAXSOK_HOST_DEVICE uint64_t BloomCounter(const uint32_t* table_words, uint64_t hash, uint32_t i) {
  const uint32_t mixed = static_cast<uint32_t>(hash) + i * (static_cast<uint32_t>(hash >> 32) | 1);
  const uint64_t place = (uint64_t{mixed} * table_words[kTableBloomSize]) >> 32;
  return uint64_t{table_words[kTableBloomBegin]} * kBloomPerWord + place;
}

/// Returns the place of a counter in its word.
JAXSOK_HOST_DEVICE uint64_t BloomShift(uint64_t counter) { return counter % kBloomPerWord * 8; }

/// Returns a counter of a word. `counter`: its place.
JAXSOK_HOST_DEVICE uint32_t BloomCount(uint32_t word, uint64_t counter) {
  return (word >> BloomShift(counter)) & kMostSightings;
}

/// Returns a word with `uses` added to one of its counters, which saturates.
JAXSOK_HOST_DEVICE uint32_t BloomAdded(uint32_t word, uint64_t counter, uint32_t uses) {
  const uint32_t count = BloomCount(word, counter);
  const uint32_t added = uses < kMostSightings - count ? uses : kMostSightings - count;
  return word + (added << BloomShift(counter));
}

}  // namespace jaxsok

#endif  // JAXSOK_CORE_ADMISSION_H_

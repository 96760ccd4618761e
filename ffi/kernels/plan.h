// Plans: the distinct keys of a batch, and the owners to ask for them. They read no table.
#ifndef JAXSOK_KERNELS_PLAN_H_
#define JAXSOK_KERNELS_PLAN_H_

#include "lookup.h"

namespace jaxsok {

/// Returns the bytes for dealing keys to owners by counts, at most 4 for each of 64 owners and 1,024 keys, and ends.
constexpr int64_t DealCountBytes(int64_t num_keys) {
  return (CeilDiv(num_keys, kCountedTogether) + 1) * (64 * 4) + 3 * kWorkspaceLine;
}
/// Returns the bytes for dealing them by a radix sort: numbers and owners sorted, and the storage of the sort, which
/// has pairs that moved and, for at most two passes, counts of each tile (half a byte a pair at most).
constexpr int64_t DealSortBytes(int64_t num_keys) {
  constexpr int64_t kSortBytes = 1 << 20;
  return kSortBytes + PaddedToLine(num_keys) * (2 * 4 + 2 * 4 + 1);
}
/// Slots of the scratch index of a GPU: for each key, and further ones. At most 2^32 - 64, half of them empty.
constexpr int64_t kSlotsPerKey = 4, kSpareSlots = 64, kMostSlots = (int64_t{1} << 32) - 64;
/// Returns the bytes for making keys distinct: a scratch index (32 a key), four words a key, and counts.
constexpr int64_t DistinctWorkspaceBytes(int64_t num_keys) {
  return PaddedToLine(num_keys) * (4 * 4) + DealCountBytes(num_keys) +
         PaddedToLine(2 * (kSlotsPerKey * num_keys + kSpareSlots)) * 4 + kWorkspaceLine;
}

/// The assignment of keys to shards.
struct OwnersView {
  const uint32_t* tables;  // [num_tables, kNumTableWords]
  int32_t num_tables;
  const uint32_t* partition_owners;  // [kNumPartitions]
  int32_t num_shards;

  /// Returns the PartitionHash of a key of a table.
  JAXSOK_HOST_DEVICE uint64_t HashOf(uint64_t key, uint32_t table) const {
    const uint32_t* words = tables + int64_t{table} * kNumTableWords;
    return PartitionHash(key, Word64(words[kTableNameLow], words[kTableNameHigh]));
  }
  /// Returns the shard of a key of a table. An owner of num_shards or more counts as the last shard.
  JAXSOK_HOST_DEVICE uint32_t Of(uint64_t key, uint32_t table) const {
    const uint32_t* words = tables + int64_t{table} * kNumTableWords;
    return OwnerOf(words, partition_owners, static_cast<uint32_t>(num_shards), HashOf(key, table));
  }
};

struct RequestsView {
  Request* requests;  // [num_keys]: distinct (table, key) pairs; then {kPaddingKey, 0, 0}
  int32_t* inverse;   // [num_keys]: place among the requests; num_keys for padding
  int32_t* starts;    // [num_shards + 1]: where the requests of each owner begin, and the end of the last
  uint64_t* hashes;   // [num_keys]: the RoundHash of each request; then all ones. nullptr: not requested
  int32_t* slots;  // [num_keys]: owner * send_capacity + place among its requests; -1 for padding and for places from
                   // send_capacity on. nullptr: not requested
  int64_t send_capacity;
  uint64_t* digest;  // [1]: of the keys, as LaunchTicketsDigest computes it

  /// Returns the slot of a request.
  JAXSOK_HOST_DEVICE int32_t SlotOf(int32_t num_shards, int32_t place) const {
    int32_t low = 0, high = num_shards - 1;  // the last owner whose requests begin at or before the place
    while (low < high) {
      const int32_t middle = (low + high + 1) / 2;
      if (starts[middle] <= place) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t within = place - starts[low];
    return within < send_capacity ? static_cast<int32_t>(low * send_capacity + within) : -1;
  }
};

/// Returns the bytes for ordering distinct keys by hash: hash (original and sorted), number (twice), place and owner;
/// and the storage of CUB's sort of 64-bit keys.
constexpr int64_t HashOrderBytes(int64_t num_keys) {
  return PaddedToLine(num_keys) * (2 * 8 + 4 * 4 + 8) + DealCountBytes(num_keys) + DealSortBytes(num_keys);
}
/// Returns the bytes of distinct keys, and of the larger workspace of making them and ordering them by hash.
constexpr int64_t PlanRequestsWorkspaceBytes(int64_t num_keys) {
  const int64_t making = DistinctWorkspaceBytes(num_keys) + DealSortBytes(0), ordering = HashOrderBytes(num_keys);
  return PaddedToLine(num_keys) * int64_t{sizeof(Request)} + (making > ordering ? making : ordering);
}

/// Makes the keys of a batch distinct and orders them by the shard that owns them.
///
/// Pre    : callers who choose keys cannot know salt; no output depends on it. num_shards is 1 to kMaxShards.
/// Order  : by owner, then by RoundHash if `out.hashes` is given, then by first position: the same on every run and on
///          both back ends. (Keys of two tables may share a hash; those of one do not.)
/// Cost   : 32 B of scratch index a key, written once and probed once; a radix sort of the distinct keys by their hash,
///          if wanted; and another by the bits of num_shards if there are more than 64.
LaunchError LaunchPlanRequests(Stream stream, const BatchView& batch, uint64_t salt, const OwnersView& owners,
                               const RequestsView& out, void* workspace);

/// A use of a row in a bag, as sent to the owner of the key.
struct alignas(16) BagUse {
  uint64_t key;    // kPaddingKey: none
  uint32_t table;  // with kLeftOut if the divisor of the bag is zero: the row is looked up, but not stepped
  float weight;    // 1 in features without weights
};
static_assert(sizeof(BagUse) == sizeof(Request), "uses travel as requests do");
constexpr uint32_t kLeftOut = uint32_t{1} << 31;

struct UsesView {
  BagUse* uses;      // [num_keys]: owner by owner, then by position; then padding. nullptr: keys alone
  uint64_t* keys;    // those of the uses, in the same order; nullptr: `uses` has them
  int32_t* starts;   // [num_shards + 1]: where the uses of each owner begin, and the end of the last
  int32_t* offsets;  // [num_shards, num_bags + 1]: the begin of each bag among the uses of an owner, and their number
  float* scales;     // [num_bags]: the factor of a bag's sum; -0 if and only if its divisor is zero
  int64_t num_bags;  // of all features

  JAXSOK_HOST_DEVICE void Put(int64_t place, const BagUse& use) const {
    if (keys != nullptr) {
      keys[place] = use.key;
    } else {
      uses[place] = use;
    }
  }
};

JAXSOK_HOST_DEVICE float ScaleOfBag(bool is_divided, bool is_left_out, float scale) {
  return !is_divided ? 1.0f : is_left_out ? -0.0f : scale == 0.0f ? 0.0f : scale;
}

/// Returns a number of a bag's sum or gradient times the scale; zero if the divisor is zero, even of a NaN.
JAXSOK_HOST_DEVICE float ScaledByBag(float number, float scale) {
  return BitsOfFloat(scale) == uint32_t{1} << 31 ? 0.0f : number * scale;
}

/// Returns the bytes for ordering a batch's uses: owner and bag of each, bags in the order of the owners, and dealing.
constexpr int64_t PlanUsesWorkspaceBytes(int64_t num_keys) {
  return PaddedToLine(num_keys) * (3 * 4) + DealCountBytes(num_keys) + DealSortBytes(num_keys);
}

/// Orders the uses of bags by the shard that owns the row.
///
/// Pre    : as for LaunchPlanRequests; features lie bag after bag.
/// Order  : by owner, then by position: an owner gets the batch without the uses of other owners' rows.
/// Cost   : 12 B a position in, 16 out (8 with keys alone), 4 B for each pair of bag and owner; and a radix sort by the
///          bits of num_shards, if there are more than 64.
LaunchError LaunchPlanUses(Stream stream, const BatchView& batch, const OwnersView& owners, const UsesView& out,
                           void* workspace);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_PLAN_H_

// Which slots missing rows take, on a GPU: the oldest of the window, chosen by counts of ages (tier_cuda.cu).
#ifndef JAXSOK_KERNELS_TIER_SLOTS_CUDA_CUH_
#define JAXSOK_KERNELS_TIER_SLOTS_CUDA_CUH_

#include "tier_place_cuda.cuh"

namespace jaxsok {

constexpr int kSlotsTogether = 8;  // per thread
static_assert(kSlotsOfTile == kSlotsTogether * kPlaceBlock, "a block reads a tile at once");

/// Words of neighbouring slots; `beyond` for slots that do not exist.
struct SlotWords {
  uint32_t of[kSlotsTogether];
  __device__ SlotWords(const uint32_t* words, int64_t slot, int64_t num_slots, uint32_t beyond) {
    if (slot + kSlotsTogether <= num_slots) {
#pragma unroll
      for (int i = 0; i < kSlotsTogether / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(words + slot)[i];
        of[4 * i] = four.x, of[4 * i + 1] = four.y, of[4 * i + 2] = four.z, of[4 * i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) of[i] = slot + i < num_slots ? words[slot + i] : beyond;
  }
};

/// The ages of neighbouring slots; slots that do not exist count as in use.
struct Ages {
  int of[kSlotsTogether];
  /// Reads the ages. Ahead of a call, slots that were used recently count as in use.
  __device__ Ages(const TierView& tier, int64_t slot, uint32_t now, bool is_ahead) {
    const SlotWords priority(tier.priority, slot, tier.num_slots, kPinned);
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) of[i] = tier.AgeOf(priority.of[i], now);
    if (!is_ahead) return;
    const SlotWords last_use(tier.last_use, slot, tier.num_slots, 0);
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) of[i] = tier.IsRecent(last_use.of[i], now) ? 0 : of[i];
  }
};

/// Returns counts in both halves of a word: slots older than an age in the low half, slots of that age in the high
/// half.
__device__ __forceinline__ uint64_t CountFrom(int age, int youngest, uint32_t num) {
  return age > youngest ? num : age == youngest ? uint64_t{num} << 32 : 0;
}

/// Counts the slots of each age, per block and in total.
__device__ __forceinline__ void CountAges(const Bringing& b, Shared& shared, uint32_t now, uint32_t first_tile) {
  for (int age = threadIdx.x; age < kAges; age += kPlaceBlock) shared.ages[age] = 0;
  __syncthreads();
  const Share share(b.window.size(), kSlotsOfTile);
  uint32_t num_oldest[2] = {};  // of the last two ages, which have many slots
  for (int64_t at = share.begin + threadIdx.x * kSlotsTogether; at < share.end; at += kSlotsOfTile) {
    const Ages ages(b.tier, b.window.SlotAt(first_tile, at), now, b.is_ahead);
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      if (ages.of[i] == kAges - 1) {
        ++num_oldest[1];
      } else if (ages.of[i] == kAges - 2) {
        ++num_oldest[0];
      } else if (ages.of[i] != 0) {  // slots in use are not counted
        atomicAdd(shared.ages + ages.of[i], 1u);
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    const uint32_t num = __reduce_add_sync(~0u, num_oldest[i]);
    if (threadIdx.x % kWarp == 0 && num != 0) atomicAdd(shared.ages + kAges - 2 + i, num);
  }
  __syncthreads();
  for (int age = threadIdx.x; age < kAges; age += kPlaceBlock) {
    if (shared.ages[age] != 0) atomicAdd(b.ages + age, shared.ages[age]);
  }
}

/// Finds the youngest age that leaves, and counts the block's slots of that age. Every block finds the same age.
__device__ __forceinline__ void ChooseAge(const Bringing& b, Shared& shared, uint32_t num_missing) {
  const uint32_t age = kAges - 1 - threadIdx.x, count = b.ages[age];  // from the oldest down to 1: age 0 is in use
  const uint64_t older = SumOfBlock(shared, count).before, all = older + count;
  if ((older < num_missing && all >= num_missing) || (age == 1 && all < num_missing)) {
    shared.youngest = age;
    shared.num_victims = min(num_missing, static_cast<uint32_t>(all));
    shared.num_of_youngest = shared.num_victims - static_cast<uint32_t>(older);
  }
  __syncthreads();
  const uint64_t counted = CountFrom(static_cast<int>(age), static_cast<int>(shared.youngest), shared.ages[age]);
  const Sums sums = SumOfBlock(shared, counted);
  if (threadIdx.x == 0) b.slot_counts[blockIdx.x] = sums.all;
}

/// Lists the leaving slots as in the window: those older than the youngest age, and the first ones of that age.
__device__ __forceinline__ void ChooseSlots(const Bringing& b, Shared& shared, uint32_t now, uint32_t first_tile) {
  uint64_t before = SumOfBlocks(shared, b.slot_counts).before;
  const int youngest = static_cast<int>(shared.youngest);
  const uint32_t most_equal = shared.num_of_youngest;
  const uint64_t counted = b.slot_counts[blockIdx.x];
  if (static_cast<uint32_t>(counted) == 0 && (counted >> 32 == 0 || before >> 32 >= most_equal)) return;
  const Share share(b.window.size(), kSlotsOfTile);
  for (int64_t begin = share.begin; begin < share.end; begin += kSlotsOfTile) {
    const int64_t first = b.window.SlotAt(first_tile, begin) + threadIdx.x * kSlotsTogether;
    const Ages ages(b.tier, first, now, b.is_ahead);
    uint64_t count = 0;
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) count += ages.of[i] == 0 ? 0 : CountFrom(ages.of[i], youngest, 1);
    const Sums sums = SumOfBlock(shared, count);
    const uint64_t ranks = before + sums.before;
    uint32_t older = static_cast<uint32_t>(ranks), equal = static_cast<uint32_t>(ranks >> 32);
    before += sums.all;
    if (count == 0) continue;
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      const int age = ages.of[i];
      if (age < youngest || age == 0) continue;
      if (age > youngest || equal < most_equal)
        b.victims[older + min(equal, most_equal)] = static_cast<uint32_t>(first + i);
      if (age > youngest) ++older;
      if (age == youngest) ++equal;
    }
  }
}

/// Unmarks the slots that were foreseen for another call, if they still are marked. The last blocks, which have the
/// fewest keys, begin.
__device__ __forceinline__ void UnmarkSlots(const Bringing& b) {
  const uint32_t num_listed = b.NumListed(b.tier.counters[kTierForeseen]);
  for (uint32_t rank = (gridDim.x - 1 - blockIdx.x) * kPlaceBlock + threadIdx.x; rank < num_listed;
       rank += gridDim.x * kPlaceBlock) {
    const uint32_t slot = b.tier.foreseen[rank].slot;
    if (slot < b.tier.num_slots) atomicAnd(b.tier.priority + slot, ~kMark);
  }
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_SLOTS_CUDA_CUH_

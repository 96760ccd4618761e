// What the steps of placing rows in the cache share (tier_cuda.cu): the operands of a call, the sums of blocks, and how
// a row takes a slot.
#ifndef JAXSOK_KERNELS_TIER_PLACE_CUDA_CUH_
#define JAXSOK_KERNELS_TIER_PLACE_CUDA_CUH_

#include <cub/block/block_scan.cuh>

#include "tier_cuda.cuh"

namespace jaxsok {

constexpr int kPlaceBlock = 1024;
static_assert(kAges - 1 == kPlaceBlock, "a thread for each age that may leave");
static_assert(kMostPlaceBlocks <= kPlaceBlock, "a thread for each block's counts");

struct BringControl {
  uint32_t num_hits;
  uint32_t num_missing;   // distinct rows
  uint32_t num_foreseen;  // of these, rows that were placed as foreseen
  uint32_t num_fetched;
  uint32_t num_written;
  uint32_t num_ahead;
  uint32_t num_to_read;  // foreseen rows that were read ahead, if all slots may be known
  uint32_t num_fresh;    // of rows that come to known slots
  uint32_t num_leaving;  // likewise of rows that make room: those that were not written ahead
  uint32_t is_unknown;   // not 0: a known slot is no longer that of its row
};

struct Bringing {
  TierView tier;
  const uint32_t* row_ids;
  int64_t num_keys;
  SlotList known;  // of an earlier call; not ahead
  SlotList list;
  Moves moves;
  bool is_ahead;
  int64_t most_ahead;
  int shift;           // of records, gives parts of host memory
  uint32_t num_pages;  // that are looked at for a record
  SlotWindow window;

  BringControl* control;
  uint32_t* ages;            // [kAges]: slots of each age
  uint32_t* leaving_parts;   // [kListParts]: leaving rows of each part, then the begin of the part in the list
  uint32_t* coming_parts;    // [kListParts]: coming rows of each part
  uint64_t* missing_counts;  // [blocks]: first positions of missing rows in a block
  uint64_t* slot_counts;     // [blocks]: older slots in the low half, those of the youngest age above
  Move* leaving;             // [num_keys]: by rank, unordered
  Move* coming;
  uint32_t* found;         // [num_keys]: the place of a missing row, at the position that found it first; see kSeen
  uint32_t* former_place;  // [num_keys]: of positions that are the first of a missing row
  uint32_t* rank_of;       // [num_keys]: likewise
  uint32_t* missing;       // [num_keys]: those positions, by rank
  uint32_t* victims;       // [num_keys]: the slots that they take

  __device__ bool IsRow(uint32_t row_id) const { return row_id < tier.capacity; }
  __device__ uint32_t SlotOfRank(uint32_t rank, uint32_t num_victims) const {
    return rank < num_victims ? victims[rank] : tier.num_lines + (rank - num_victims);
  }
  /// Returns whether the rows read and written ahead are still valid.
  __device__ bool HasAhead() const {
    return tier.area != nullptr && tier.counters[kTierTicket] != 0 && tier.counters[kTierTicket] == tier.area->ticket;
  }
  /// Returns whether all slots may be known, and all rows that come were read ahead.
  __device__ bool MayKnowSlots() const {
    return !is_ahead && tier.MayHold(*known.stamp) && (known.stamp->ticket == 0 || HasAhead());
  }
  /// Returns whether the call lists in the area what is to be read.
  __device__ bool ListsAhead() const { return is_ahead && tier.area != nullptr && tier.area->coming.ends != nullptr; }
  /// Returns how many foreseen rows fit the list.
  __device__ uint32_t NumListed(uint32_t num) const { return min(num, static_cast<uint32_t>(most_ahead)); }
  __device__ uint32_t PartOf(const Move& move) const {
    return move.record == kNoRow ? kParts + 1 : move.ahead != kNoRow ? kParts : move.record >> shift;
  }
};

using Scan = cub::BlockScan<uint64_t, kPlaceBlock, cub::BLOCK_SCAN_WARP_SCANS>;

/// The shared memory of a block.
struct Shared {
  Scan::TempStorage scan;
  uint32_t ages[kAges];  // slots of each age in this block
  uint64_t word;         // broadcast from one thread to all
  uint32_t youngest, num_of_youngest, num_victims;
};

/// Neighbouring items that a block takes, in whole tiles, except at the end of all.
struct Share {
  int64_t begin, end;
  __device__ Share(int64_t size, int64_t tile) {
    const uint32_t num_tiles = static_cast<uint32_t>((size + tile - 1) / tile);  // divisions of 32 bits are short code
    const int64_t of_block = (num_tiles + gridDim.x - 1) / gridDim.x * tile;
    begin = min(blockIdx.x * of_block, size);
    end = min(begin + of_block, size);
  }
};

/// Calls `use` with ranks below `num`, which the warps of all blocks take in turn; all lanes of a warp call it.
template <typename Use>
__device__ __forceinline__ void ForRanks(uint32_t num, const Use& use) {
  uint32_t begin = (threadIdx.x / kWarp * gridDim.x + blockIdx.x) * kWarp;
  for (; begin < num; begin += gridDim.x * kPlaceBlock) use(begin + threadIdx.x % kWarp);
}

/// The sum of the values before a thread's own, and the total, in a block.
struct Sums {
  uint64_t before, all;
};
__device__ __noinline__ inline Sums SumOfBlock(Shared& shared, uint64_t value) {
  Sums sums;
  __syncthreads();  // before the storage is reused
  Scan(shared.scan).ExclusiveSum(value, sums.before, sums.all);
  return sums;
}

/// Returns the sum of the counts of the blocks before this one, and of all blocks, in every thread.
__device__ __forceinline__ Sums SumOfBlocks(Shared& shared, const uint64_t* counts) {
  Sums sums = SumOfBlock(shared, threadIdx.x < gridDim.x ? counts[threadIdx.x] : 0);
  if (threadIdx.x == blockIdx.x) shared.word = sums.before;
  __syncthreads();
  sums.before = shared.word;
  return sums;
}

constexpr int kKeysTogether = 2;  // of a thread: their chains of reads run at the same time

/// When the last use of a slot began, and its priority.
struct SlotUse {
  uint32_t last, priority;
  __device__ static SlotUse Of(const TierView& tier, uint32_t slot) {
    if (slot >= tier.num_slots) return {0, 0};
    return {*const_cast<const volatile uint32_t*>(tier.last_use + slot),
            *const_cast<const volatile uint32_t*>(tier.priority + slot)};
  }
};

/// Adds one for each lane of a warp that counts, at once; returns the count before the lane's own.
__device__ __forceinline__ uint32_t CountLane(uint32_t* counter, bool counts) {
  const unsigned lanes = __ballot_sync(~0u, counts);
  if (!counts) return 0;
  const int lane = static_cast<int>(threadIdx.x % kWarp), first = __ffs(static_cast<int>(lanes)) - 1;
  uint32_t before = 0;
  if (lane == first) before = atomicAdd(counter, static_cast<uint32_t>(__popc(lanes)));
  return __shfl_sync(lanes, before, first) + static_cast<uint32_t>(__popc(lanes & ((1u << lane) - 1)));
}

/// Adds one to counts[part] for each lane with a move; returns the previous count.
__device__ __forceinline__ uint32_t CountMove(uint32_t* counts, uint32_t part, bool has_move) {
  const uint32_t ahead = CountLane(counts + kParts, has_move && part == kParts);
  const uint32_t fresh = CountLane(counts + kParts + 1, has_move && part == kParts + 1);
  if (!has_move) return 0;
  return part < kParts ? atomicAdd(counts + part, 1u) : part == kParts ? ahead : fresh;
}

/// Gives a row a slot, with its priority there, and notes the moves. Reads before it writes: the reads then run at the
/// same time.
__device__ __forceinline__ void TakeSlot(const Bringing& b, uint32_t row_id, uint32_t slot, uint32_t priority,
                                         Move* leaving) {
  const TierView& tier = b.tier;
  const bool is_kept = !tier.IsStaged(slot);
  const Record record = *tier.records.At(tier.starts, row_id, 1);
  const uint32_t own_record = tier.RecordOf(row_id), former = is_kept ? tier.OwnerAt(slot)->free_id : kNoRow;
  const uint32_t former_priority = is_kept ? tier.priority[slot] : 0;
  const bool has_ahead = b.HasAhead();
  if (former < tier.capacity) {
    *leaving = {slot, former, tier.RecordOf(former), IsMarked(former_priority) && has_ahead ? 0 : kNoRow};
    *tier.PlaceAt(former) = MeanUse::OfPriority(former_priority).PlaceInHost();
    tier.NoteContent(former, leaving->record, true);
  }
  *tier.OwnerAt(slot) = {record.key, record.table, row_id};
  if (!is_kept) return;
  tier.last_use[slot] = b.tier.Now();
  tier.priority[slot] = priority;
  *tier.PlaceAt(row_id) = slot;
  tier.NoteContent(row_id, own_record, false);
}

/// What a thread has counted of the moves of rows.
struct MovedRows {
  uint32_t fetched = 0, written = 0, ahead = 0;

  __device__ void AddTo(BringControl* control) {
    fetched = __reduce_add_sync(~0u, fetched);
    written = __reduce_add_sync(~0u, written);
    ahead = __reduce_add_sync(~0u, ahead);
    if (threadIdx.x % kWarp != 0) return;
    if (fetched != 0) atomicAdd(&control->num_fetched, fetched);
    if (written != 0) atomicAdd(&control->num_written, written);
    if (ahead != 0) atomicAdd(&control->num_ahead, ahead);
  }
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_PLACE_CUDA_CUH_

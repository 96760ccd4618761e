// Assigns slots to rows, on a GPU (tier.h has the contract); tier_move_cuda.cu moves the rows.
//
// One kernel, whose blocks synchronise between its steps. They mark each missing row with the smallest of its
// positions, number these, choose as many of the least recently used slots, and list the moves in the order of the
// parts of host memory. The device makes all decisions. If no row is missing, the blocks synchronise only twice.
#include <cooperative_groups.h>

#include <cub/block/block_scan.cuh>

#include "tier_cuda.cuh"

namespace jaxsok {
namespace {

constexpr int kPlaceBlock = 1024;
static_assert(kAges - 1 == kPlaceBlock, "a thread for each age that may leave");
static_assert(kMostPlaceBlocks <= kPlaceBlock, "a thread for each block's counts");

struct BringControl {
  uint32_t num_hits;
  uint32_t num_fetched;
  uint32_t num_written;
  uint32_t num_ahead;
};

struct Bringing {
  TierView tier;
  const uint32_t* row_ids;
  int64_t num_keys;
  uint32_t* slots;
  Moves moves;
  bool is_ahead;
  int64_t most_ahead;
  int shift;  // of row ids, gives parts of host memory

  BringControl* control;
  uint32_t* ages;            // [kAges]: slots of each age
  uint32_t* leaving_parts;   // [kListParts]: leaving rows of each part, then the begin of the part in the list
  uint32_t* coming_parts;    // [kListParts]: coming rows of each part
  uint64_t* missing_counts;  // [blocks]: first positions of missing rows in a block
  uint64_t* slot_counts;     // [blocks]: older slots in the low half, those of the youngest age above
  Move* leaving;             // [num_keys]: by rank, unordered
  Move* coming;
  uint32_t* rank_of;  // [num_keys]: of positions that are the first of a missing row
  uint32_t* missing;  // [num_keys]: those positions, by rank
  uint32_t* victims;  // [num_keys]: the slots that they take

  __device__ uint32_t Now() const { return tier.counters[kTierClock] + 1; }
  __device__ bool IsRow(uint32_t row_id) const { return row_id < tier.capacity; }
  __device__ uint32_t SlotOfRank(uint32_t rank, uint32_t num_victims) const {
    return rank < num_victims ? victims[rank] : tier.num_lines + (rank - num_victims);
  }
  /// Returns whether the rows read and written ahead are still valid.
  __device__ bool HasAhead() const {
    return tier.area != nullptr && tier.counters[kTierTicket] != 0 && tier.counters[kTierTicket] == tier.area->ticket;
  }
  __device__ uint32_t PartOf(const Move& move) const {
    return move.is_fresh != 0 ? kParts + 1 : move.ahead != kNoRow ? kParts : move.row_id >> shift;
  }
  /// Returns whether the position is the first of a missing row.
  __device__ bool IsFirst(int64_t i) const {
    if (i >= num_keys || !IsRow(row_ids[i])) return false;
    const uint32_t place = *tier.PlaceAt(row_ids[i]);
    return place >= kPendingInHost && place < kInHost && place % kMostSlots == static_cast<uint32_t>(i);
  }
};

using Scan = cub::BlockScan<uint64_t, kPlaceBlock, cub::BLOCK_SCAN_WARP_SCANS>;

/// The shared memory of a block.
struct Shared {
  Scan::TempStorage scan;
  uint32_t ages[kAges];  // slots of each age in this block
  uint64_t word;         // broadcast from one thread to all
  uint32_t num_older, youngest, num_victims;
};

/// Neighbouring items that a block takes, in whole tiles, except at the end of all.
struct Share {
  int64_t begin, end;
  __device__ Share(int64_t size, int64_t tile) {
    const int64_t of_block = CeilDiv<int64_t>(CeilDiv<int64_t>(size, tile), gridDim.x) * tile;
    begin = min(blockIdx.x * of_block, size);
    end = min(begin + of_block, size);
  }
};

/// The sum of the values before a thread's own, and the total, in a block.
struct Sums {
  uint64_t before, all;
};
__device__ __forceinline__ Sums SumOfBlock(Shared& shared, uint64_t value) {
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

constexpr int kSlotsTogether = 16;  // per thread
constexpr int64_t kSlotsOfTile = int64_t{kSlotsTogether} * kPlaceBlock;

/// The ages of neighbouring slots; slots that do not exist count as in use.
struct Ages {
  int of[kSlotsTogether];
  /// Reads the ages. `unmarks`: first unmarks marked slots.
  __device__ Ages(const TierView& tier, int64_t slot, uint32_t now, bool unmarks) {
    uint4 used[kSlotsTogether / 4];
    if (slot + kSlotsTogether <= tier.num_slots) {
      uint4* const at = reinterpret_cast<uint4*>(tier.last_use + slot);
#pragma unroll
      for (int i = 0; i < kSlotsTogether / 4; ++i) used[i] = at[i];
      if (unmarks) {
#pragma unroll
        for (int i = 0; i < kSlotsTogether / 4; ++i) {
          uint4& four = used[i];
          if (four.x != kMarked && four.y != kMarked && four.z != kMarked && four.w != kMarked) continue;
          four = {Unmarked(four.x), Unmarked(four.y), Unmarked(four.z), Unmarked(four.w)};
          at[i] = four;
        }
      }
    } else {
      uint32_t words[kSlotsTogether];
#pragma unroll
      for (int i = 0; i < kSlotsTogether; ++i) {
        const bool is_slot = slot + i < tier.num_slots;
        words[i] = is_slot ? tier.last_use[slot + i] : now;
        if (!is_slot || !unmarks || words[i] != kMarked) continue;
        words[i] = tier.last_use[slot + i] = kOnceMarked;
      }
#pragma unroll
      for (int i = 0; i < kSlotsTogether / 4; ++i) {
        used[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
      }
    }
#pragma unroll
    for (int i = 0; i < kSlotsTogether / 4; ++i) {
      of[4 * i] = tier.AgeOf(used[i].x, now), of[4 * i + 1] = tier.AgeOf(used[i].y, now);
      of[4 * i + 2] = tier.AgeOf(used[i].z, now), of[4 * i + 3] = tier.AgeOf(used[i].w, now);
    }
  }
  __device__ static uint32_t Unmarked(uint32_t used) { return used == kMarked ? kOnceMarked : used; }
};

/// Returns counts in both halves of a word: slots older than an age in the low half, slots of that age in the high
/// half.
__device__ __forceinline__ uint64_t CountFrom(int age, int youngest, uint32_t num) {
  return age > youngest ? num : age == youngest ? uint64_t{num} << 32 : 0;
}

// Steps of placing: each runs in all blocks between two synchronisations.
// ----------------------------------------------

/// Marks the missing rows of the call, and the time of use of the other rows.
__device__ __forceinline__ void MarkRows(const Bringing& b, uint32_t now) {
  const Share share(b.num_keys, kPlaceBlock);
  uint32_t num_hits = 0;
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += kPlaceBlock) {
    const uint32_t row_id = b.row_ids[i];
    if (!b.IsRow(row_id)) continue;
    uint32_t* place = b.tier.PlaceAt(row_id);
    const uint32_t found = *reinterpret_cast<volatile uint32_t*>(place);
    if (found < b.tier.num_slots) {
      uint32_t* const used = b.tier.last_use + found;  // for most positions of a frequent row it is already set
      if (*reinterpret_cast<volatile uint32_t*>(used) != now && atomicExch(used, now) != now) ++num_hits;
    } else if (found >= kPendingInHost && b.tier.IsUsed(row_id, found)) {
      const bool is_fresh = found == kFresh || (found >= kPendingFresh && found != kInHost);
      atomicMin(place, (is_fresh ? kPendingFresh : kPendingInHost) + static_cast<uint32_t>(i));
    }
  }
  num_hits = __reduce_add_sync(~0u, num_hits);
  if (threadIdx.x % kWarp == 0 && num_hits != 0) atomicAdd(&b.control->num_hits, num_hits);
}

/// Counts the first positions of missing rows.
__device__ __forceinline__ void CountMissing(const Bringing& b) {
  const Share share(b.num_keys, kPlaceBlock);
  uint32_t count = 0;
  for (int64_t begin = share.begin; begin < share.end; begin += kPlaceBlock) {
    count += static_cast<uint32_t>(__syncthreads_count(b.IsFirst(begin + threadIdx.x)));
  }
  if (threadIdx.x == 0) b.missing_counts[blockIdx.x] = count;
}

/// Numbers the missing rows by their first positions.
__device__ __forceinline__ void RankMissing(const Bringing& b, Shared& shared, uint64_t num_before) {
  const Share share(b.num_keys, kPlaceBlock);
  for (int64_t begin = share.begin; begin < share.end; begin += kPlaceBlock) {
    const int64_t i = begin + threadIdx.x;
    const bool is_first = b.IsFirst(i);
    const Sums sums = SumOfBlock(shared, is_first ? 1 : 0);
    if (is_first) {
      const uint32_t rank = static_cast<uint32_t>(num_before + sums.before);
      b.rank_of[i] = rank;
      b.missing[rank] = static_cast<uint32_t>(i);
    }
    num_before += sums.all;
  }
}

/// Counts the slots of each age, per block and in total; ahead of a call it first unmarks them.
__device__ __forceinline__ void CountAges(const Bringing& b, Shared& shared, uint32_t now) {
  for (int age = threadIdx.x; age < kAges; age += kPlaceBlock) shared.ages[age] = 0;
  __syncthreads();
  const Share share(b.tier.num_slots, kSlotsOfTile);
  uint32_t num_oldest[2] = {};  // of the last two ages, which have many slots
  for (int64_t slot = share.begin + threadIdx.x * kSlotsTogether; slot < share.end; slot += kSlotsOfTile) {
    const Ages ages(b.tier, slot, now, b.is_ahead);
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
    shared.num_older = static_cast<uint32_t>(older);
    shared.youngest = age;
    shared.num_victims = min(num_missing, static_cast<uint32_t>(all));
  }
  __syncthreads();
  const uint64_t counted = CountFrom(static_cast<int>(age), static_cast<int>(shared.youngest), shared.ages[age]);
  const Sums sums = SumOfBlock(shared, counted);
  if (threadIdx.x == 0) b.slot_counts[blockIdx.x] = sums.all;
}

/// Lists the leaving slots: first those older than the youngest age, then those of that age.
__device__ __forceinline__ void ChooseSlots(const Bringing& b, Shared& shared, uint32_t now) {
  uint64_t before = SumOfBlocks(shared, b.slot_counts).before + (uint64_t{shared.num_older} << 32);
  const int youngest = static_cast<int>(shared.youngest);
  const uint64_t counted = b.slot_counts[blockIdx.x];
  const bool has_older = static_cast<uint32_t>(counted) != 0;
  const bool has_equal = counted >> 32 != 0 && before >> 32 < shared.num_victims;
  if (!has_older && !has_equal) return;
  const Share share(b.tier.num_slots, kSlotsOfTile);
  for (int64_t begin = share.begin; begin < share.end; begin += kSlotsOfTile) {
    const int64_t first = begin + threadIdx.x * kSlotsTogether;
    const Ages ages(b.tier, first, now, false);
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
      if (ages.of[i] < youngest || ages.of[i] == 0) continue;
      const uint32_t rank = ages.of[i] == youngest ? equal++ : older++;
      if (rank < shared.num_victims) b.victims[rank] = static_cast<uint32_t>(first + i);
    }
  }
}

/// Adds one to counts[part] for each lane with a move; returns the previous count.
__device__ __forceinline__ uint32_t CountMove(uint32_t* counts, uint32_t part, bool has_move) {
  const bool is_ahead = has_move && part == kParts, is_fresh = has_move && part == kParts + 1;
  const unsigned ahead = __ballot_sync(~0u, is_ahead), fresh = __ballot_sync(~0u, is_fresh);
  if (!has_move) return 0;
  if (part < kParts) return atomicAdd(counts + part, 1u);
  const unsigned lanes = is_fresh ? fresh : ahead;  // these are many, so one lane adds for all
  const int lane = static_cast<int>(threadIdx.x % kWarp), first = __ffs(static_cast<int>(lanes)) - 1;
  uint32_t before = 0;
  if (lane == first) before = atomicAdd(counts + part, static_cast<uint32_t>(__popc(lanes)));
  return __shfl_sync(lanes, before, first) + static_cast<uint32_t>(__popc(lanes & ((1u << lane) - 1)));
}

/// Gives the row of a rank its slot. If the row is staged, its positions still find its rank in its place.
__device__ __forceinline__ void Place(const Bringing& b, uint32_t rank, uint32_t num_victims, Move* leaving,
                                      Move* coming) {
  const TierView& tier = b.tier;
  const uint32_t row_id = b.row_ids[b.missing[rank]], slot = b.SlotOfRank(rank, num_victims);
  const bool is_kept = rank < num_victims;
  if (!is_kept && rank - num_victims >= tier.num_staged) return;  // only in an invalid state
  Record* owner = tier.OwnerAt(slot);
  const bool has_ahead = b.HasAhead();
  *coming = {slot, row_id, *tier.PlaceAt(row_id) >= kPendingFresh ? 1u : 0u, kNoRow};
  if (has_ahead && coming->is_fresh == 0 && rank < b.most_ahead && tier.area->row_ids[rank] == row_id) {
    coming->ahead = rank;
  }
  if (is_kept && owner->free_id < tier.capacity) {
    *leaving = {slot, owner->free_id, 0, kNoRow};
    if (has_ahead && tier.last_use[slot] == kMarked) leaving->ahead = 0;
    *tier.PlaceAt(owner->free_id) = kInHost;
  }
  const Record& record = *tier.records.At(tier.starts, row_id, 1);
  *owner = {record.key, record.table, row_id};
  if (is_kept) {
    tier.last_use[slot] = b.Now();
    *tier.PlaceAt(row_id) = slot;
  }
}

/// Marks the slot that the row of a rank would take, and restores the row's place.
__device__ __forceinline__ void Foresee(const Bringing& b, uint32_t rank, uint32_t num_victims, Move* leaving,
                                        Move* coming) {
  const TierView& tier = b.tier;
  const uint32_t row_id = b.row_ids[b.missing[rank]];
  uint32_t* place = tier.PlaceAt(row_id);
  const bool is_fresh = *place >= kPendingFresh, is_ahead = rank < b.most_ahead;
  if (!is_fresh && is_ahead) *coming = {rank, row_id, 0, kNoRow};
  *place = is_fresh ? kFresh : kInHost;
  if (!is_ahead || rank >= num_victims) return;
  const uint32_t slot = b.victims[rank];
  if (tier.owners[slot].free_id >= tier.capacity) return;
  *leaving = {slot, tier.owners[slot].free_id, 0, kNoRow};
  tier.last_use[slot] = kMarked;
}

/// Gives the missing rows their slots, or predicts them, and counts the moves of each part.
__device__ __forceinline__ void MoveRows(const Bringing& b, uint32_t num_missing, uint32_t num_victims) {
  uint32_t num_fetched = 0, num_written = 0, num_ahead = 0;
  for (uint32_t begin = blockIdx.x * kPlaceBlock; begin < num_missing; begin += gridDim.x * kPlaceBlock) {
    const uint32_t rank = begin + threadIdx.x;
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_missing) {
      if (b.is_ahead) {
        Foresee(b, rank, num_victims, &leaving, &coming);
      } else {
        Place(b, rank, num_victims, &leaving, &coming);
      }
    }
    num_written += leaving.row_id != kNoRow ? 1 : 0;
    num_fetched += coming.row_id != kNoRow && coming.is_fresh == 0 ? 1 : 0;
    num_ahead += coming.ahead != kNoRow ? 1 : 0;
    if (leaving.ahead != kNoRow) leaving.row_id = kNoRow;  // already written
    CountMove(b.leaving_parts, leaving.row_id >> b.shift, leaving.row_id != kNoRow);
    CountMove(b.coming_parts, b.PartOf(coming), coming.row_id != kNoRow);
    if (rank >= num_missing) continue;
    b.leaving[rank] = leaving;
    b.coming[rank] = coming;
  }
  num_fetched = __reduce_add_sync(~0u, num_fetched);
  num_written = __reduce_add_sync(~0u, num_written);
  num_ahead = __reduce_add_sync(~0u, num_ahead);
  if (threadIdx.x % kWarp != 0) return;
  if (num_fetched != 0) atomicAdd(&b.control->num_fetched, num_fetched);
  if (num_written != 0) atomicAdd(&b.control->num_written, num_written);
  if (num_ahead != 0) atomicAdd(&b.control->num_ahead, num_ahead);
}

/// Turns the parts' counts into the begin of each part in its list: one block for each list, if there are two.
__device__ __forceinline__ void SumParts(const Bringing& b, Shared& shared) {
  for (unsigned list = blockIdx.x; list < 2; list += gridDim.x) {
    uint32_t* const parts = list == 0 ? b.leaving_parts : b.coming_parts;
    uint64_t num_before = 0;
    for (int begin = 0; begin < kListParts; begin += kPlaceBlock) {
      const int part = begin + static_cast<int>(threadIdx.x);
      const Sums sums = SumOfBlock(shared, part < kListParts ? parts[part] : 0);
      if (part < kListParts) parts[part] = static_cast<uint32_t>(num_before + sums.before);
      num_before += sums.all;
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    b.moves.counts[list == 0 ? kNumLeaving : kNumComing] = static_cast<uint32_t>(num_before);
    if (list == 0) continue;
    b.moves.counts[kNumFromHost] = parts[kParts];
    b.moves.counts[kNumNotFresh] = parts[kParts + 1];
  }
}

/// Lists the moves by part.
__device__ __forceinline__ void OrderMoves(const Bringing& b, uint32_t num_missing) {
  for (uint32_t begin = blockIdx.x * kPlaceBlock; begin < num_missing; begin += gridDim.x * kPlaceBlock) {
    const uint32_t rank = begin + threadIdx.x;
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_missing) {
      leaving = b.leaving[rank];
      coming = b.coming[rank];
    }
    const bool leaves = leaving.row_id != kNoRow, comes = coming.row_id != kNoRow;
    const uint32_t from = CountMove(b.leaving_parts, leaving.row_id >> b.shift, leaves);
    const uint32_t to = CountMove(b.coming_parts, b.PartOf(coming), comes);
    if (leaves) b.moves.leaving[from] = leaving;
    if (comes) b.moves.coming[to] = coming;
  }
}

/// Writes the slot of every position.
__device__ __forceinline__ void FindSlots(const Bringing& b, uint32_t num_victims) {
  const Share share(b.num_keys, kPlaceBlock);
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += kPlaceBlock) {
    uint32_t place = kNoRow;
    if (b.IsRow(b.row_ids[i])) place = *b.tier.PlaceAt(b.row_ids[i]) == kFresh ? 0 : *b.tier.PlaceAt(b.row_ids[i]);
    if (place >= kPendingInHost && place < kInHost) {
      place = b.SlotOfRank(b.rank_of[min(static_cast<int64_t>(place % kMostSlots), b.num_keys - 1)], num_victims);
    } else if (place != 0 && place >= b.tier.num_slots) {
      place = kNoRow;
    }
    b.slots[i] = place;
  }
}

/// Restores the places of staged rows.
__device__ __forceinline__ void RestorePlaces(const Bringing& b, uint32_t num_missing, uint32_t num_victims) {
  for (uint32_t rank = num_victims + blockIdx.x * kPlaceBlock + threadIdx.x; rank < num_missing;
       rank += gridDim.x * kPlaceBlock) {
    uint32_t* place = b.tier.PlaceAt(b.row_ids[b.missing[rank]]);
    *place = *place >= kPendingFresh ? kFresh : kInHost;
  }
}

/// Counts the moves of the call; one thread calls it.
__device__ void CountCall(const Bringing& b, uint32_t num_missing) {
  uint32_t* const counters = b.tier.counters;
  counters[kTierClock] += 1;
  if (b.is_ahead) {
    counters[kTierTicket] = num_missing != 0 ? counters[kTierClock] : 0;
    return;
  }
  counters[kTierHits] += b.control->num_hits;
  counters[kTierFetched] += b.control->num_fetched;
  counters[kTierWritten] += b.control->num_written;
  counters[kTierAhead] += b.control->num_ahead;
  if (num_missing != 0) counters[kTierTicket] = 0;
}

// All blocks run at once and synchronise between steps; in a step no block reads what another one writes.
__global__ void __launch_bounds__(kPlaceBlock, 1) PlaceKernel(const __grid_constant__ Bringing b) {
  __shared__ Shared shared;
  const cooperative_groups::grid_group all_blocks = cooperative_groups::this_grid();
  const uint32_t now = b.Now();
  MarkRows(b, now);
  all_blocks.sync();
  CountMissing(b);
  all_blocks.sync();
  const Sums missing = SumOfBlocks(shared, b.missing_counts);
  const uint32_t num_missing = static_cast<uint32_t>(missing.all);
  uint32_t num_victims = 0;
  if (num_missing == 0) {
    if (blockIdx.x == 0 && threadIdx.x < kNumMoveCounts) b.moves.counts[threadIdx.x] = 0;
  } else {
    RankMissing(b, shared, missing.before);
    CountAges(b, shared, now);
    all_blocks.sync();
    ChooseAge(b, shared, num_missing);
    num_victims = shared.num_victims;
    all_blocks.sync();
    ChooseSlots(b, shared, now);
    all_blocks.sync();
    MoveRows(b, num_missing, num_victims);
    all_blocks.sync();
    SumParts(b, shared);
    all_blocks.sync();
    OrderMoves(b, num_missing);
  }
  if (!b.is_ahead) {
    FindSlots(b, num_victims);
    if (num_missing > num_victims) {
      all_blocks.sync();
      RestorePlaces(b, num_missing, num_victims);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) CountCall(b, num_missing);
}

/// Launches the kernel.
LaunchError Launch(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots,
                   const Moves& moves, bool is_ahead, void* workspace) {
  Bringing b{};
  b.tier = tier;
  b.row_ids = row_ids;
  b.num_keys = num_keys;
  b.slots = slots;
  b.moves = moves;
  b.is_ahead = is_ahead;
  b.most_ahead = MostAhead(tier.host_bytes);
  while ((tier.capacity - 1) >> b.shift >= kParts) ++b.shift;
  WorkspaceCutter cut(workspace);
  b.control = cut.Take<BringControl>(1);
  b.ages = cut.Take<uint32_t>(kAges);
  b.leaving_parts = cut.Take<uint32_t>(kListParts);
  b.coming_parts = cut.Take<uint32_t>(kListParts);
  JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, workspace, cut.used() / 4, 0));
  b.missing_counts = cut.Take<uint64_t>(kMostPlaceBlocks);
  b.slot_counts = cut.Take<uint64_t>(kMostPlaceBlocks);
  b.rank_of = cut.Take<uint32_t>(num_keys);
  b.missing = cut.Take<uint32_t>(num_keys);
  b.victims = cut.Take<uint32_t>(num_keys);
  b.leaving = cut.Take<Move>(num_keys);
  b.coming = cut.Take<Move>(num_keys);
  if (cut.used() > BringWorkspaceBytes(num_keys)) return "bring: the workspace is too small";
  if (tier.num_staged != 0) {  // all ones: kPaddingKey and kNoRow
    JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, tier.staged_owners, tier.num_staged * (sizeof(Record) / 4), ~0u));
  }
  // A block fills a multiprocessor. Multiprocessors that move records ahead have no room for it, and it must not wait
  // for them.
  const int64_t most = std::min<int64_t>(kMostPlaceBlocks, std::max(1, NumMultiprocessors() - kWriteAheadBlocks));
  const int64_t wanted =
      std::max(CeilDiv<int64_t>(num_keys, kPlaceBlock), CeilDiv<int64_t>(tier.num_slots, kSlotsOfTile));
  const int64_t num_blocks = std::clamp<int64_t>(wanted, 1, most);
  void* arguments[] = {&b};
  JAXSOK_RETURN_IF_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(PlaceKernel),
                                                    dim3(static_cast<unsigned>(num_blocks)), dim3(kPlaceBlock),
                                                    arguments, 0, stream));
  return LastLaunchError();
}

}  // namespace

LaunchError LaunchBring(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots,
                        const Moves& moves, void* workspace) {
  return Launch(stream, tier, row_ids, num_keys, slots, moves, false, workspace);
}

LaunchError LaunchBringAhead(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                             const Moves& moves, void* workspace) {
  return Launch(stream, tier, row_ids, num_keys, nullptr, moves, true, workspace);
}

}  // namespace jaxsok

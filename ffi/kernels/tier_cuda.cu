// Assigns slots to rows, on a GPU (tier.h has the contract); tier_move_cuda.cu moves the rows.
//
// One kernel, whose blocks synchronise between its steps. They mark each missing row with the smallest of its
// positions, place those that were foreseen, number the others, choose as many slots, and list the moves in the order
// of the parts of host memory. The device makes all decisions. If all slots are known, the blocks synchronise only
// once, or twice where rows come that were read ahead.
#include <cooperative_groups.h>

#include <cub/block/block_scan.cuh>
#include <cuda/atomic>

#include "tier_cuda.cuh"

namespace jaxsok {
namespace {

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
    return !is_ahead && tier.MayHold(*known.stamp, num_keys) && (known.stamp->ticket == 0 || HasAhead());
  }
  /// Returns whether the call lists in the area what is to be read.
  __device__ bool ListsAhead() const { return is_ahead && tier.area != nullptr && tier.area->coming != nullptr; }
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
__device__ __noinline__ Sums SumOfBlock(Shared& shared, uint64_t value) {
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

// Steps of placing: each runs in all blocks between two synchronisations.
// ----------------------------------------------

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

/// In `found`: other positions of missing rows; then the first position of each. No place has this value.
constexpr uint32_t kSeen = 1;
/// Of a slot by position: its row is missing. No slot has this number.
constexpr uint32_t kToFind = kIsForeseen;

/// Marks the missing rows of the call, and pins the slots of the other rows.
__device__ __forceinline__ void MarkRows(const Bringing& b, Shared& shared, uint32_t now) {
  const TierView& tier = b.tier;
  uint32_t num_hits = 0, num_missing = 0;
  const Share share(b.num_keys, kPlaceBlock);
  for (int64_t begin = share.begin + threadIdx.x; begin < share.end; begin += kKeysTogether * kPlaceBlock) {
    uint32_t row_id[kKeysTogether], place[kKeysTogether];
    SlotUse use[kKeysTogether];
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) {
      const int64_t i = begin + k * kPlaceBlock;
      row_id[k] = i < share.end ? b.row_ids[i] : kNoRow;
    }
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) {
      place[k] = kNoRow;
      if (b.IsRow(row_id[k])) place[k] = *reinterpret_cast<volatile uint32_t*>(tier.PlaceAt(row_id[k]));
    }
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) use[k] = SlotUse::Of(tier, place[k]);
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) {
      const int64_t i = begin + k * kPlaceBlock;
      if (i >= share.end) continue;
      uint32_t found = 0, slot = b.IsRow(row_id[k]) ? 0 : kNoRow;
      if (place[k] < tier.num_slots) {
        slot = place[k];
        if ((use[k].priority & kPinned) == 0) {  // for most positions of a frequent row the slot is already pinned
          const uint32_t old = atomicOr(tier.priority + slot, kPinned);
          if ((old & kPinned) == 0) {  // no other position has changed its last use
            ++num_hits;
            if (TierView::BeginsUse(use[k].last, old, now)) {
              tier.last_use[slot] = now;
              atomicExch(tier.priority + slot, use[k].last | kPinned);
            }
          }
        }
      } else if (b.IsRow(row_id[k]) && place[k] >= kPending && tier.IsUsed(row_id[k], place[k])) {
        const uint32_t old = atomicMin(tier.PlaceAt(row_id[k]), kPending + static_cast<uint32_t>(i));
        found = IsPending(old) ? kSeen : old;
        num_missing += IsPending(old) ? 0 : 1;
        slot = kToFind;
      }
      b.found[i] = found;
      b.list.slots[i] = slot;
    }
  }
  const uint64_t all = SumOfBlock(shared, num_hits | uint64_t{num_missing} << 32).all;
  if (threadIdx.x != 0) return;
  if (const auto hits = static_cast<uint32_t>(all)) atomicAdd(&b.control->num_hits, hits);
  if (const auto missing = static_cast<uint32_t>(all >> 32)) atomicAdd(&b.control->num_missing, missing);
}

/// Counts the first positions of missing rows, gives them the rows' former places, and marks them in `found`.
__device__ __forceinline__ void CountMissing(const Bringing& b, Shared& shared) {
  const Share share(b.num_keys, kPlaceBlock);
  uint32_t count = 0;
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += kPlaceBlock) {
    const uint32_t found = b.found[i];
    if (found == 0) continue;
    const uint32_t place = *b.tier.PlaceAt(b.row_ids[i]);  // pending, unless the row was placed as foreseen
    if (IsPending(place) && found != kSeen) b.former_place[place - kPending] = found;
    const bool is_first = place == kPending + static_cast<uint32_t>(i);
    b.found[i] = is_first ? kSeen : 0;
    count += is_first ? 1 : 0;
  }
  const uint64_t all = SumOfBlock(shared, count).all;
  if (threadIdx.x == 0) b.missing_counts[blockIdx.x] = all;
}

/// Numbers the missing rows by their first positions.
__device__ __forceinline__ void RankMissing(const Bringing& b, Shared& shared, uint64_t num_before) {
  const Share share(b.num_keys, kPlaceBlock);
  for (int64_t begin = share.begin; begin < share.end; begin += kPlaceBlock) {
    const int64_t i = begin + threadIdx.x;
    const bool is_first = i < b.num_keys && b.found[i] != 0;
    const Sums sums = SumOfBlock(shared, is_first ? 1 : 0);
    if (is_first) {
      const uint32_t rank = static_cast<uint32_t>(num_before + sums.before);
      b.rank_of[i] = rank;
      b.missing[rank] = static_cast<uint32_t>(i);
    }
    num_before += sums.all;
  }
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
    if (slot < b.tier.num_slots) atomicCAS(b.tier.priority + slot, kMarked, kOnceMarked);
  }
}

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
  const uint32_t former_priority = is_kept ? tier.priority[slot] : 0, place_after = is_kept ? tier.PlaceAfter(slot) : 0;
  const bool has_ahead = b.HasAhead();
  if (former < tier.capacity) {
    *leaving = {slot, former, tier.RecordOf(former), former_priority == kMarked && has_ahead ? 0 : kNoRow};
    *tier.PlaceAt(former) = place_after;
    tier.NoteContent(former, leaving->record, true);
  }
  *tier.OwnerAt(slot) = {record.key, record.table, row_id};
  if (!is_kept) return;
  tier.last_use[slot] = b.tier.Now();
  tier.priority[slot] = priority;
  *tier.PlaceAt(row_id) = slot;
  tier.NoteContent(row_id, own_record, false);
}

/// Gives the row of a rank its slot. If the row is staged, its positions still find its rank in its place.
__device__ __forceinline__ void Place(const Bringing& b, uint32_t rank, uint32_t num_victims, Move* leaving,
                                      Move* coming) {
  if (rank >= num_victims && rank - num_victims >= b.tier.num_staged) return;  // only in an invalid state
  const uint32_t first = b.missing[rank], slot = b.SlotOfRank(rank, num_victims), from = b.former_place[first];
  *coming = {slot, b.row_ids[first], from == kFresh ? kNoRow : b.tier.RecordOf(b.row_ids[first]), kNoRow};
  TakeSlot(b, coming->row_id, slot, b.tier.PriorityFrom(from, b.tier.Now()) | kPinned, leaving);
}

/// Lists the slot that the row of a rank would take, and marks it. Its positions still find its rank in its place.
__device__ __forceinline__ void Foresee(const Bringing& b, uint32_t rank, uint32_t num_victims, Move* leaving,
                                        Move* coming) {
  const TierView& tier = b.tier;
  const bool is_listed = rank < min(num_victims, b.NumListed(~0u));
  const uint32_t first = b.missing[rank], slot = is_listed ? b.victims[rank] : 0;
  const uint32_t row_id = b.row_ids[first], from = b.former_place[first], former = tier.owners[slot].free_id;
  const uint32_t record = tier.RecordOf(row_id), former_record = former < tier.capacity ? tier.RecordOf(former) : 0;
  if (!is_listed) return;
  const uint32_t is_fresh = from == kFresh ? 1 : 0;
  tier.foreseen[rank] = {row_id, slot, tier.PriorityFrom(from, tier.Now()), is_fresh};
  if (is_fresh == 0) *coming = {rank, row_id, record, kNoRow};
  if (former >= tier.capacity) return;
  *leaving = {slot, former, former_record, kNoRow};
  tier.priority[slot] = kMarked;
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

/// Counts the moves of a row, and those of each part. All lanes of a warp call it.
__device__ __forceinline__ void CountMoves(const Bringing& b, Move* leaving, const Move& coming, MovedRows* moved) {
  moved->written += leaving->row_id != kNoRow ? 1 : 0;
  moved->fetched += coming.row_id != kNoRow && coming.record != kNoRow ? 1 : 0;
  moved->ahead += coming.ahead != kNoRow ? 1 : 0;
  if (leaving->ahead != kNoRow) leaving->row_id = kNoRow;  // already written
  CountMove(b.leaving_parts, leaving->record >> b.shift, leaving->row_id != kNoRow);
  CountMove(b.coming_parts, b.PartOf(coming), coming.row_id != kNoRow);
}

/// Gives missing rows the slots that were foreseen for them, if these are still free or marked.
__device__ __forceinline__ void PlaceForeseen(const Bringing& b) {
  const TierView& tier = b.tier;
  const uint32_t num_listed = b.NumListed(tier.counters[kTierForeseen]);
  MovedRows moved;
  ForRanks(num_listed, [&](uint32_t rank) {
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_listed) {
      const Foreseen foreseen = tier.foreseen[rank];
      const bool is_valid = foreseen.row_id < tier.capacity && foreseen.slot < tier.num_slots;
      const bool may_be_ahead = is_valid && foreseen.is_fresh == 0 && b.HasAhead();
      const uint32_t priority = is_valid ? tier.priority[foreseen.slot] : kPinned;
      const uint32_t place = is_valid ? *tier.PlaceAt(foreseen.row_id) : kNoRow;
      const uint32_t record = is_valid && foreseen.is_fresh == 0 ? tier.RecordOf(foreseen.row_id) : kNoRow;
      const uint32_t ahead = may_be_ahead ? tier.area->row_ids[rank] : kNoRow;
      if ((priority == 0 || priority == kMarked) && IsPending(place)) {
        coming = {foreseen.slot, foreseen.row_id, record, ahead == foreseen.row_id ? rank : kNoRow};
        TakeSlot(b, foreseen.row_id, foreseen.slot, foreseen.priority | kPinned, &leaving);
      }
    }
    const bool is_placed = coming.row_id != kNoRow;
    CountMoves(b, &leaving, coming, &moved);
    const uint32_t at = CountLane(&b.control->num_foreseen, is_placed);
    if (!is_placed) return;
    b.leaving[at] = leaving;
    b.coming[at] = coming;
  });
  moved.AddTo(b.control);
}

constexpr int kLanesOfRow = 8;   // that look for a record together
constexpr int kPairsOfLane = 8;  // of neighbouring records: eight lanes read 128 at once, the page of 124 of 528 bytes
// The lanes look at further pages, since one may have no record to give: at as many as have so many records of rows in
// the cache, which have no content. All blocks wait for the last row, so more pages take longer where a few suffice.
constexpr int64_t kRecordsWanted = 16;
constexpr uint32_t kLeastPages = 2, kMostPages = 4;

/// Lets eight lanes find a record without content in a page for a row that leaves, and take it: the row then exchanges
/// records with the one that had it, which is listed in `found`, and the record that this one gets in `victims`.
/// Returns the record, or kNoRow if there is none, or the lanes do not look. All lanes of a warp call it, and stay
/// together: their chains of reads then run at the same time.
///
/// Rows that leave are marked, so their new records are not taken again. The record that the other row gets becomes its
/// own only after all blocks have finished this step (NoteExchanges): until then it is not taken either.
__device__ __forceinline__ uint32_t TakeRecord(const Bringing& b, bool looks, const RecordRange& page, uint32_t rank,
                                               const Move& leaving) {
  const TierView& tier = b.tier;
  const uint32_t lane = threadIdx.x % kLanesOfRow, first_lane = threadIdx.x % kWarp - lane;
  // Two records are 16 bytes, which one instruction reads.
  const uint32_t odd = reinterpret_cast<uint64_t>(tier.homes.At(tier.starts, page.begin, 2)) % 16 != 0 ? 1 : 0;
  uint32_t begin = page.begin - odd, found = kNoRow;
  for (; __any_sync(~0u, looks && begin < page.end); begin += 2 * kPairsOfLane * kLanesOfRow) {
    uint32_t tenants[2 * kPairsOfLane];
#pragma unroll
    for (int k = 0; k < kPairsOfLane; ++k) {
      const uint32_t record = begin + 2 * (k * kLanesOfRow + lane);
      tenants[2 * k] = tenants[2 * k + 1] = kIsFull;
      if (looks && record + 2 <= page.end) {
        const uint4 pair = __ldcg(reinterpret_cast<const uint4*>(tier.homes.At(tier.starts, record, 2)));
        tenants[2 * k] = record >= page.begin ? pair.y : uint32_t{kIsFull};
        tenants[2 * k + 1] = pair.w;
      } else if (looks && record < page.end && record >= page.begin) {
        tenants[2 * k] = __ldcg(tier.TenantAt(record));
      }
    }
    for (int last = -1;;) {
      int at = -1;  // the lane's next candidate
      uint32_t tenant = 0;
#pragma unroll
      for (int k = 2 * kPairsOfLane - 1; k >= 0; --k) {
        const bool is_next = k > last && (tenants[k] & kIsFull) == 0;
        at = is_next ? k : at;
        tenant = is_next ? tenants[k] : tenant;
      }
      const uint32_t of_warp = __ballot_sync(~0u, looks && at >= 0);
      if (of_warp == 0) break;
      const uint32_t candidates = of_warp >> first_lane & ((1u << kLanesOfRow) - 1);
      const uint32_t taker = static_cast<uint32_t>(__ffs(static_cast<int>(candidates)) - 1);  // no lane if none has one
      uint32_t record = kNoRow;
      if (lane == taker) {
        last = at;
        const uint32_t tried = begin + 2 * (at / 2 * kLanesOfRow + lane) + at % 2, former = tier.RowOf(tried, tenant);
        const uint32_t taken = TierView::TenantOf(tried, leaving.row_id);
        if (tier.MayExchange(former) && atomicCAS(tier.TenantAt(tried), tenant, taken) == tenant) {
          record = tried;
          tier.SetHome(former, leaving.record);
          tier.SetHome(leaving.row_id, record);
          b.found[rank] = former;
          b.victims[rank] = leaving.record;
        }
      }
      record = __shfl_sync(~0u, record, first_lane + taker % kLanesOfRow);
      if (record != kNoRow) {
        found = record;
        looks = false;
      }
    }
  }
  return found;
}

/// Gives each row that leaves a record in the page of the row that takes its slot, or of one of the next ones, and
/// counts the moves of each part. Which record it gets may differ between runs: no content depends on it.
__device__ __forceinline__ void ExchangeRecords(const Bringing& b, uint32_t num_missing) {
  const uint32_t lane = threadIdx.x % kLanesOfRow, first_lane = threadIdx.x % kWarp - lane;
  // Neighbouring rows go to different blocks, which all get as many.
  uint32_t rank = threadIdx.x / kLanesOfRow * gridDim.x + blockIdx.x;
  for (; __any_sync(~0u, rank < num_missing); rank += gridDim.x * kPlaceBlock / kLanesOfRow) {
    Move leaving{kNoRow, kNoRow, 0, kNoRow};
    uint32_t coming = kNoRow;  // a record in the i-th lane that is that of the i-th row from this one on
    if (rank < num_missing) {
      const Move& next = b.coming[(rank + lane % kMostPages) % num_missing];
      leaving = b.leaving[rank];
      if (next.row_id != kNoRow) coming = next.record;
      if (lane == 0) b.found[rank] = kNoRow;
    }
    __syncwarp();  // another lane may write `found` below
    bool looks = leaving.row_id != kNoRow;
    for (uint32_t i = 0; i < b.num_pages && __any_sync(~0u, looks); ++i) {
      const uint32_t near = __shfl_sync(~0u, coming, first_lane + i);
      const RecordRange page = near == kNoRow ? RecordRange{0, 0} : b.tier.PageOf(near);
      if (page.begin <= leaving.record && leaving.record < page.end) looks = false;
      const uint32_t record = TakeRecord(b, looks, page, rank, leaving);
      if (record == kNoRow) continue;
      leaving.record = record;
      looks = false;
    }
    if (lane != 0 || leaving.row_id == kNoRow) continue;
    b.leaving[rank].record = leaving.record;
    atomicAdd(b.leaving_parts + (leaving.record >> b.shift), 1u);
  }
}

/// Notes whose the records are that rows got in exchange.
__device__ __forceinline__ void NoteExchanges(const Bringing& b, uint32_t num_missing) {
  ForRanks(num_missing, [&](uint32_t rank) {
    if (rank >= num_missing || b.found[rank] == kNoRow) return;
    b.tier.NoteContent(b.found[rank], b.victims[rank], false);
  });
}

/// Gives the missing rows their slots and counts the moves of each part, or predicts the slots.
__device__ __forceinline__ void MoveRows(const Bringing& b, uint32_t num_before, uint32_t num_missing,
                                         uint32_t num_victims) {
  MovedRows moved;
  ForRanks(num_missing, [&](uint32_t rank) {
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_missing) {
      if (b.is_ahead) {
        Foresee(b, rank, num_victims, &leaving, &coming);
      } else {
        Place(b, rank, num_victims, &leaving, &coming);
      }
    }
    if (b.is_ahead) {  // ExchangeRecords counts those that leave
      CountMove(b.coming_parts, b.PartOf(coming), coming.row_id != kNoRow);
    } else {
      CountMoves(b, &leaving, coming, &moved);
    }
    if (rank >= num_missing) return;
    b.leaving[num_before + rank] = leaving;
    b.coming[num_before + rank] = coming;
  });
  moved.AddTo(b.control);
}

/// Turns the parts' counts into the begin of each part in its list: one block for each list, if there are two.
__device__ __forceinline__ void SumParts(const Bringing& b, Shared& shared) {
  constexpr int kOfThread = (kListParts + kPlaceBlock - 1) / kPlaceBlock;
  const int first = static_cast<int>(threadIdx.x) * kOfThread;
  for (unsigned list = blockIdx.x; list < 2; list += gridDim.x) {
    uint32_t* const parts = list == 0 ? b.leaving_parts : b.coming_parts;
    uint32_t counts[kOfThread], sum = 0;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      counts[i] = first + i < kListParts ? parts[first + i] : 0;
      sum += counts[i];
    }
    const Sums sums = SumOfBlock(shared, sum);
    uint32_t begin = static_cast<uint32_t>(sums.before);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (first + i < kListParts) parts[first + i] = begin;
      begin += counts[i];
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    b.moves.counts[list == 0 ? kNumLeaving : kNumComing] = static_cast<uint32_t>(sums.all);
    if (list == 0) continue;
    b.moves.counts[kNumFromHost] = parts[kParts];
    b.moves.counts[kNumNotFresh] = parts[kParts + 1];
  }
}

/// Lists the moves by part. Ahead of a call also lists in the area what is to be read, as addresses.
__device__ __forceinline__ void OrderMoves(const Bringing& b, uint32_t num_moves) {
  AheadArea* const area = b.ListsAhead() ? b.tier.area : nullptr;
  ForRanks(num_moves, [&](uint32_t rank) {
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_moves) {
      leaving = b.leaving[rank];
      coming = b.coming[rank];
    }
    const bool leaves = leaving.row_id != kNoRow, comes = coming.row_id != kNoRow;
    const uint32_t from = CountMove(b.leaving_parts, leaving.record >> b.shift, leaves);
    const uint32_t to = CountMove(b.coming_parts, b.PartOf(coming), comes);
    if (leaves) b.moves.leaving[from] = leaving;
    if (comes) b.moves.coming[to] = coming;
    if (area == nullptr || rank >= b.most_ahead) return;
    area->row_ids[rank] = coming.row_id;
    if (!comes) return;
    char* const here = area->records + int64_t{rank} * b.tier.host_bytes;
    area->coming[to] = {b.tier.HostAt(coming.record), reinterpret_cast<uint64_t>(here)};
  });
}

/// Unpins the slots of the call's rows, and finds those of rows that were missing.
__device__ __forceinline__ void FindSlots(const Bringing& b, uint32_t num_victims) {
  const uint32_t num_listed = min(num_victims, b.NumListed(~0u));
  const Share share(b.num_keys, kPlaceBlock);
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += kPlaceBlock) {
    uint32_t slot = b.list.slots[i];
    if (slot == kToFind) {
      const uint32_t place = *b.tier.PlaceAt(b.row_ids[i]);
      slot = place < b.tier.num_slots ? place : kNoRow;
      if (IsPending(place)) {
        const uint32_t rank = b.rank_of[min(int64_t{place - kPending}, b.num_keys - 1)];
        slot = !b.is_ahead ? b.SlotOfRank(rank, num_victims) : rank < num_listed ? rank | kIsForeseen : kNoRow;
      }
      b.list.slots[i] = slot;
    }
    if (slot < b.tier.num_slots) atomicAnd(b.tier.priority + slot, ~kPinned);
  }
}

/// Restores the places of rows from a rank on, which got no slot.
__device__ __forceinline__ void RestorePlaces(const Bringing& b, uint32_t first_rank, uint32_t num_missing) {
  ForRanks(num_missing - first_rank, [&](uint32_t number) {
    if (number >= num_missing - first_rank) return;
    const uint32_t first = b.missing[first_rank + number];
    *b.tier.PlaceAt(b.row_ids[first]) = b.former_place[first];
  });
}

/// Counts the moves of the call; one thread calls it.
__device__ void CountCall(const Bringing& b, uint32_t num_victims, uint32_t youngest, uint32_t first_tile) {
  uint32_t* const counters = b.tier.counters;
  const bool has_missing = b.control->num_missing != 0;
  counters[kTierClock] += 1;
  if (num_victims != 0) counters[kTierWindow] = b.window.Next(first_tile);
  // A limit among marked slots would say nothing.
  if (num_victims != 0 && (b.is_ahead || counters[kTierTicket] == 0)) counters[kTierLimit] = youngest;
  if (b.is_ahead) {
    counters[kTierTicket] = has_missing ? counters[kTierClock] : 0;
    counters[kTierForeseen] = b.NumListed(num_victims);
    const bool is_complete = b.NumListed(num_victims) == b.control->num_missing;
    *b.list.stamp = {is_complete ? 1u : 0u, counters[kTierTicket], b.control->num_hits};
    if (b.ListsAhead()) {
      b.tier.area->num_coming = has_missing ? b.moves.counts[kNumFromHost] : 0;
      b.tier.area->listed = counters[kTierTicket];
    }
    return;
  }
  counters[kTierHits] += b.control->num_hits;
  counters[kTierFetched] += b.control->num_fetched;
  counters[kTierWritten] += b.control->num_written;
  counters[kTierAhead] += b.control->num_ahead;
  if (has_missing) counters[kTierTicket] = 0;
  const uint32_t num_kept = b.control->num_foreseen + num_victims;
  const bool is_complete = num_kept == b.control->num_missing;  // no row is staged
  *b.list.stamp = {is_complete ? 1u : 0u, 0, b.control->num_hits + num_kept};
}

/// Counts the row of a known slot as used. Other positions of the row do the same at the same time: a thread that sees
/// the new time here also sees the new priority.
__device__ __noinline__ void UseKnown(const Bringing& b, uint32_t slot, uint32_t now) {
  const cuda::atomic_ref<uint32_t, cuda::thread_scope_device> last_use(b.tier.last_use[slot]);
  const cuda::atomic_ref<uint32_t, cuda::thread_scope_device> priority(b.tier.priority[slot]);
  const uint32_t last = last_use.load(cuda::memory_order_acquire), old = priority.load(cuda::memory_order_relaxed);
  if (!TierView::BeginsUse(last, old, now)) return;
  priority.store(last, cuda::memory_order_relaxed);
  last_use.store(now, cuda::memory_order_release);
}

/// What a list says of the slot of a position, and what is there.
struct KnownSlot {
  uint32_t slot;      // kNoRow: its row is foreseen, or there is none
  uint32_t owner;     // of the slot
  Foreseen foreseen;  // row_id is kNoRow: its row is not foreseen
  SlotUse use;

  __device__ static KnownSlot Of(const TierView& tier, uint32_t known, uint32_t num_foreseen) {
    const uint32_t rank = TierView::RankOf(known), slot = known < tier.num_slots ? known : kNoRow;
    KnownSlot is{slot, kNoRow, {kNoRow, kNoRow, 0, 0}, SlotUse::Of(tier, slot)};
    if (slot != kNoRow) is.owner = tier.owners[slot].free_id;
    if (rank < num_foreseen) is.foreseen = tier.foreseen[rank];
    return is;
  }
};

/// Lists the slots that are known, and counts their rows as used. Notes if one is no longer that of its row.
__device__ __forceinline__ void CheckKnown(const Bringing& b, uint32_t now) {
  const TierView& tier = b.tier;
  const bool comes = b.known.stamp->ticket != 0;
  const uint32_t num_foreseen = comes ? tier.counters[kTierForeseen] : 0;
  bool holds = true;
  const Share share(b.num_keys, kPlaceBlock);
  for (int64_t begin = share.begin + threadIdx.x; begin < share.end; begin += kKeysTogether * kPlaceBlock) {
    uint32_t row_id[kKeysTogether], known[kKeysTogether];
    KnownSlot at[kKeysTogether];
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) {
      const int64_t i = begin + k * kPlaceBlock;
      row_id[k] = i < share.end ? b.row_ids[i] : kNoRow;
      known[k] = i < share.end ? b.known.slots[i] : kNoRow;
    }
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) at[k] = KnownSlot::Of(tier, known[k], num_foreseen);
#pragma unroll
    for (int k = 0; k < kKeysTogether; ++k) {
      const int64_t i = begin + k * kPlaceBlock;
      const bool is_here = b.IsRow(row_id[k]) && at[k].owner == row_id[k];
      const bool is_foreseen = b.IsRow(row_id[k]) && at[k].foreseen.row_id == row_id[k];
      holds &= b.IsRow(row_id[k]) ? is_here || is_foreseen : known[k] == kNoRow;
      if (i < share.end) b.list.slots[i] = is_foreseen ? at[k].foreseen.slot : at[k].slot;
      if (!is_here) continue;
      holds &= !comes || at[k].use.priority != kMarked;  // marked, it is foreseen for another row
      if (TierView::BeginsUse(at[k].use.last, at[k].use.priority, now)) UseKnown(b, at[k].slot, now);
    }
  }
  ForRanks(num_foreseen, [&](uint32_t rank) {
    bool is_ahead = false;
    if (rank < num_foreseen) {
      const Foreseen row = tier.foreseen[rank];
      is_ahead = row.is_fresh == 0;
      holds &= tier.MayCome(row, SlotUse::Of(tier, row.slot).priority);
      holds &= !is_ahead || tier.area->row_ids[rank] == row.row_id;
    }
    CountLane(&b.control->num_to_read, is_ahead);
  });
  if (!holds) b.control->is_unknown = 1;
}

/// Gives the foreseen rows, which were read ahead, their slots.
__device__ __forceinline__ void PlaceKnown(const Bringing& b) {
  const TierView& tier = b.tier;
  const uint32_t num_foreseen = tier.counters[kTierForeseen], num_to_read = b.control->num_to_read;
  MovedRows moved;
  ForRanks(num_foreseen, [&](uint32_t rank) {
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_foreseen) {
      const Foreseen row = tier.foreseen[rank];
      coming = {row.slot, row.row_id, row.is_fresh != 0 ? kNoRow : tier.RecordOf(row.row_id), rank};
      TakeSlot(b, row.row_id, row.slot, row.priority, &leaving);
    }
    const bool is_fresh = coming.record == kNoRow, leaves = leaving.row_id != kNoRow && leaving.ahead == kNoRow;
    moved.written += leaving.row_id != kNoRow ? 1 : 0;
    const uint32_t of_ahead = CountLane(&b.control->num_fetched, rank < num_foreseen && !is_fresh);
    const uint32_t of_fresh = CountLane(&b.control->num_fresh, rank < num_foreseen && is_fresh);
    const uint32_t of_leaving = CountLane(&b.control->num_leaving, leaves);
    if (rank < num_foreseen) b.moves.coming[is_fresh ? num_to_read + of_fresh : of_ahead] = coming;
    if (leaves) b.moves.leaving[of_leaving] = leaving;
  });
  moved.AddTo(b.control);
}

/// Counts the moves of a call whose slots were known; one thread calls it.
__device__ void CountKnown(const Bringing& b) {
  uint32_t* const counters = b.tier.counters;
  const SlotsStamp known = *b.known.stamp;
  const uint32_t num_coming = b.control->num_fetched + b.control->num_fresh;
  b.moves.counts[kNumLeaving] = b.control->num_leaving;
  b.moves.counts[kNumFromHost] = 0;
  b.moves.counts[kNumNotFresh] = b.control->num_fetched;
  b.moves.counts[kNumComing] = num_coming;
  counters[kTierClock] += 1;
  counters[kTierHits] += known.num_rows;
  counters[kTierFetched] += b.control->num_fetched;
  counters[kTierWritten] += b.control->num_written;
  counters[kTierAhead] += b.control->num_fetched;
  if (known.ticket != 0) counters[kTierTicket] = 0;
  *b.list.stamp = {1, 0, known.num_rows + num_coming};
}

// All blocks run at once and synchronise between steps. In a step no block reads what another one writes, but for words
// whose old and new value mean the same there, and atomic changes that give the same in any order.
__global__ void __launch_bounds__(kPlaceBlock, 1) PlaceKernel(const __grid_constant__ Bringing b) {
  __shared__ Shared shared;
  const cooperative_groups::grid_group all_blocks = cooperative_groups::this_grid();
  const uint32_t now = b.tier.Now();
  const bool may_be_foreseen = !b.is_ahead && b.tier.counters[kTierTicket] != 0;
  const uint32_t first_tile = b.window.First(b.tier.counters[kTierWindow]);
  if (b.MayKnowSlots()) {
    CheckKnown(b, now);
    all_blocks.sync();
    if (b.control->is_unknown == 0) {
      if (b.known.stamp->ticket != 0) {
        PlaceKnown(b);
        all_blocks.sync();
      }
      if (blockIdx.x == 0 && threadIdx.x == 0) CountKnown(b);
      return;
    }
  }
  if (b.is_ahead) UnmarkSlots(b);
  if (b.ListsAhead() && blockIdx.x == gridDim.x - 1) {
    WaitForJob(b.tier.area->reads, &b.tier.area->last_read);  // it has a list
  }
  MarkRows(b, shared, now);
  all_blocks.sync();
  const uint32_t num_moves = b.control->num_missing;
  uint32_t num_missing = num_moves, num_victims = 0;
  if (num_moves == 0) {
    if (blockIdx.x == 0 && threadIdx.x < kNumMoveCounts) b.moves.counts[threadIdx.x] = 0;
  } else {
    if (may_be_foreseen) {
      PlaceForeseen(b);
      all_blocks.sync();
      num_missing -= b.control->num_foreseen;
    }
    if (num_missing != 0) {
      CountMissing(b, shared);
      CountAges(b, shared, now, first_tile);
      all_blocks.sync();
      RankMissing(b, shared, SumOfBlocks(shared, b.missing_counts).before);
      ChooseAge(b, shared, num_missing);
      num_victims = shared.num_victims;
      all_blocks.sync();
      ChooseSlots(b, shared, now, first_tile);
      all_blocks.sync();
      MoveRows(b, num_moves - num_missing, num_missing, num_victims);
      all_blocks.sync();
      if (b.is_ahead) {
        FindSlots(b, num_victims);
        ExchangeRecords(b, num_missing);
        all_blocks.sync();
        NoteExchanges(b, num_missing);
        RestorePlaces(b, 0, num_missing);
      }
    }
    SumParts(b, shared);
    all_blocks.sync();
    OrderMoves(b, num_moves);
  }
  if (!b.is_ahead || num_moves == 0) FindSlots(b, num_victims);
  if (!b.is_ahead && num_missing > num_victims) {
    all_blocks.sync();
    RestorePlaces(b, num_victims, num_missing);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) CountCall(b, num_victims, shared.youngest, first_tile);
}

/// Launches the kernel.
LaunchError Launch(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                   const SlotList& known, const SlotList& list, const Moves& moves, bool is_ahead, void* workspace) {
  Bringing b{};
  b.tier = tier;
  b.row_ids = row_ids;
  b.num_keys = num_keys;
  b.known = known;
  b.list = list;
  b.moves = moves;
  b.is_ahead = is_ahead;
  b.window = SlotWindow::Of(tier.num_slots, num_keys);
  b.most_ahead = std::min(MostAhead(tier.host_bytes), tier.most_foreseen);
  while ((tier.capacity - 1) >> b.shift >= kParts) ++b.shift;
  // A page has free_records / capacity records of rows in the cache.
  const int64_t free_records = std::max<int64_t>(1, kPageBytes / tier.host_bytes * tier.num_slots);
  b.num_pages = static_cast<uint32_t>(
      std::clamp(CeilDiv(kRecordsWanted * tier.capacity, free_records), int64_t{kLeastPages}, int64_t{kMostPages}));
  WorkspaceCutter cut(workspace);
  b.control = cut.Take<BringControl>(1);
  b.ages = cut.Take<uint32_t>(kAges);
  b.leaving_parts = cut.Take<uint32_t>(kListParts);
  b.coming_parts = cut.Take<uint32_t>(kListParts);
  JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, workspace, cut.used() / 4, 0));
  b.missing_counts = cut.Take<uint64_t>(kMostPlaceBlocks);
  b.slot_counts = cut.Take<uint64_t>(kMostPlaceBlocks);
  b.found = cut.Take<uint32_t>(num_keys);
  b.former_place = cut.Take<uint32_t>(num_keys);
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
  const int64_t most = std::min(kMostPlaceBlocks, BlocksBesidesAhead());
  const int64_t wanted = std::max<int64_t>(CeilDiv<int64_t>(num_keys, kPlaceBlock), b.window.num_tiles);
  const int64_t num_blocks = std::clamp<int64_t>(wanted, 1, most);
  void* arguments[] = {&b};
  JAXSOK_RETURN_IF_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(PlaceKernel),
                                                    dim3(static_cast<unsigned>(num_blocks)), dim3(kPlaceBlock),
                                                    arguments, 0, stream));
  return LastLaunchError();
}

}  // namespace

LaunchError LaunchBring(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                        const SlotList& known, const SlotList& list, const Moves& moves, void* workspace) {
  return Launch(stream, tier, row_ids, num_keys, known, list, moves, false, workspace);
}

LaunchError LaunchBringAhead(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                             const SlotList& list, const Moves& moves, void* workspace) {
  return Launch(stream, tier, row_ids, num_keys, SlotList{}, list, moves, true, workspace);
}

}  // namespace jaxsok

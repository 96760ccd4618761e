// Which rows get which slots, on a GPU (tier.h says what); tier_move_cuda.cu moves them.
//
// A call marks the rows that are not here with the smallest of their positions, numbers these, takes as many slots that
// have not been used for longest, and lists the moves in the order of the parts of host memory. Everything is decided
// on the device; passes that have nothing to do end at once.
#include <cub/block/block_scan.cuh>

#include "tier_cuda.cuh"

namespace jaxsok {
namespace {

constexpr int kScanBlock = 1024;
static_assert(kAges - 1 == kScanBlock, "a thread for each age that may leave");
static_assert(kCountedTogether == kScanBlock, "a block counts with a thread for each");

struct BringControl {
  uint32_t num_missing;
  uint32_t num_victims;
  uint32_t num_older;  // of them, older than the youngest age that leaves
  uint32_t youngest;   // that age
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
  int shift;  // of row ids, to parts of host memory

  BringControl* control;
  uint32_t* ages;           // [kAges]: slots of each
  uint32_t* leaving_parts;  // [kListParts]: rows that leave for each part, then where it begins in the list
  uint32_t* coming_parts;   // [kListParts]: rows that come from each
  Move* leaving;            // [num_keys]: by rank, in no order
  Move* coming;
  uint32_t* rank_of;      // [num_keys]: of positions that are the first of a missing row
  uint32_t* missing;      // [num_keys]: those positions, by rank
  uint32_t* victims;      // [num_keys]: the slots that they take
  uint32_t* key_counts;   // by kCountedTogether positions
  uint64_t* slot_counts;  // by chunk of slots: older ones in the low half, those of the youngest age above

  __device__ uint32_t Now() const { return tier.counters[kTierClock] + 1; }
  __device__ bool IsRow(uint32_t row_id) const { return row_id < tier.capacity; }
  __device__ uint32_t SlotOfRank(uint32_t rank) const {
    return rank < control->num_victims ? victims[rank] : tier.num_lines + (rank - control->num_victims);
  }
  /// Whether what was read and written ahead still counts.
  __device__ bool HasAhead() const {
    return tier.area != nullptr && tier.counters[kTierTicket] != 0 && tier.counters[kTierTicket] == tier.area->ticket;
  }
  __device__ uint32_t PartOf(const Move& move) const {
    return move.is_fresh != 0 ? kParts + 1 : move.ahead != kNoRow ? kParts : move.row_id >> shift;
  }
  /// Whether the position is the first of a row that is not here.
  __device__ bool IsFirst(int64_t i) const {
    if (i >= num_keys || !IsRow(row_ids[i])) return false;
    const uint32_t place = *tier.PlaceAt(row_ids[i]);
    return place >= kPendingInHost && place < kInHost && place % kMostSlots == static_cast<uint32_t>(i);
  }
};

// One thread, one position.
__global__ void __launch_bounds__(kBlock) MarkKernel(const __grid_constant__ Bringing b) {
  const uint32_t now = b.Now();
  uint32_t num_hits = 0;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < b.num_keys; i += int64_t{gridDim.x} * kBlock) {
    const uint32_t row_id = b.row_ids[i];
    if (!b.IsRow(row_id)) continue;
    uint32_t* place = b.tier.PlaceAt(row_id);
    const uint32_t found = *reinterpret_cast<volatile uint32_t*>(place);
    if (found < b.tier.num_slots) {
      if (atomicExch(b.tier.last_use + found, now) != now) ++num_hits;
    } else if (found >= kPendingInHost && b.tier.IsUsed(row_id, found)) {
      const bool is_fresh = found == kFresh || (found >= kPendingFresh && found != kInHost);
      atomicMin(place, (is_fresh ? kPendingFresh : kPendingInHost) + static_cast<uint32_t>(i));
    }
  }
  num_hits = __reduce_add_sync(~0u, num_hits);
  if (threadIdx.x % kWarp == 0 && num_hits != 0) atomicAdd(&b.control->num_hits, num_hits);
}

// A block counts the first positions of kCountedTogether.
__global__ void __launch_bounds__(kScanBlock) CountMissingKernel(const __grid_constant__ Bringing b) {
  const int64_t i = int64_t{blockIdx.x} * kScanBlock + threadIdx.x;
  const int count = __syncthreads_count(b.IsFirst(i));
  if (threadIdx.x == 0) b.key_counts[blockIdx.x] = static_cast<uint32_t>(count);
}

/// Makes of counts what comes before each; returns the sum, in every thread of the block.
template <typename T>
__device__ T SumUp(T* counts, int64_t size) {
  using Scan = cub::BlockScan<T, kScanBlock>;
  __shared__ typename Scan::TempStorage storage;
  T sum = 0;
  for (int64_t begin = 0; begin < size; begin += kScanBlock) {
    const int64_t i = begin + threadIdx.x;
    T before, total;
    Scan(storage).ExclusiveSum(i < size ? counts[i] : T{0}, before, total);
    if (i < size) counts[i] = sum + before;
    sum += total;
    __syncthreads();
  }
  return sum;
}

// One block.
__global__ void __launch_bounds__(kScanBlock) SumMissingKernel(const __grid_constant__ Bringing b) {
  const uint32_t sum = SumUp(b.key_counts, CeilDiv<int64_t>(b.num_keys, kCountedTogether));
  if (threadIdx.x == 0) b.control->num_missing = sum;
}

__global__ void __launch_bounds__(kScanBlock) RankKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  using Scan = cub::BlockScan<uint32_t, kScanBlock>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t i = int64_t{blockIdx.x} * kScanBlock + threadIdx.x;
  const bool is_first = b.IsFirst(i);
  uint32_t before;
  Scan(storage).ExclusiveSum(is_first ? 1u : 0u, before);
  if (!is_first) return;
  const uint32_t rank = b.key_counts[blockIdx.x] + before;
  b.rank_of[i] = rank;
  b.missing[rank] = static_cast<uint32_t>(i);
}

constexpr int kSlotsTogether = 4;  // that a thread loads at once
constexpr int kSlotsOfChunk = kSlotsTogether * kScanBlock;

/// The ages of neighbouring slots; slots that do not exist are in use.
struct Ages {
  int of[kSlotsTogether];
  __device__ Ages(const TierView& tier, int64_t slot, uint32_t now) {
    uint32_t used[kSlotsTogether] = {now, now, now, now};
    if (slot + kSlotsTogether <= tier.num_slots) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(tier.last_use + slot);
      used[0] = loaded.x, used[1] = loaded.y, used[2] = loaded.z, used[3] = loaded.w;
    } else {
      for (int i = 0; slot + i < tier.num_slots; ++i) used[i] = tier.last_use[slot + i];
    }
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) of[i] = tier.AgeOf(used[i], now);
  }
  /// How many are older than an age, and above 16 bits how many are equal.
  __device__ uint32_t CountFrom(int age) const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) count += of[i] > age ? 1u : of[i] == age ? 1u << 16 : 0u;
    return count;
  }
};

// Blocks count the slots of each age; ahead of a call they first unmark them.
__global__ void __launch_bounds__(kBlock) AgesKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  __shared__ uint32_t counts[kAges];
  for (int age = threadIdx.x; age < kAges; age += kBlock) counts[age] = 0;
  __syncthreads();
  const uint32_t now = b.Now();
  uint32_t num_oldest[2] = {};  // of the last two, which many are
  for (int64_t slot = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * kSlotsTogether; slot < b.tier.num_slots;
       slot += int64_t{gridDim.x} * kBlock * kSlotsTogether) {
    if (b.is_ahead) {
      for (int64_t i = slot; i < min(slot + kSlotsTogether, int64_t{b.tier.num_slots}); ++i) {
        if (b.tier.last_use[i] == kMarked) b.tier.last_use[i] = kOnceMarked;
      }
    }
    const Ages ages(b.tier, slot, now);
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      if (ages.of[i] == kAges - 1) {
        ++num_oldest[1];
      } else if (ages.of[i] == kAges - 2) {
        ++num_oldest[0];
      } else if (ages.of[i] != 0) {  // slots in use, whose number is not needed
        atomicAdd(counts + ages.of[i], 1u);
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    const uint32_t num = __reduce_add_sync(~0u, num_oldest[i]);
    if (threadIdx.x % kWarp == 0 && num != 0) atomicAdd(counts + kAges - 2 + i, num);
  }
  __syncthreads();
  for (int age = threadIdx.x; age < kAges; age += kBlock) {
    if (counts[age] != 0) atomicAdd(b.ages + age, counts[age]);
  }
}

// One block, a thread for each age from the oldest down to 1: slots of age 0 are in use.
__global__ void __launch_bounds__(kScanBlock) ChooseAgeKernel(const __grid_constant__ Bringing b) {
  const uint32_t wanted = b.control->num_missing;
  if (wanted == 0) return;
  using Scan = cub::BlockScan<uint32_t, kScanBlock>;
  __shared__ typename Scan::TempStorage storage;
  const uint32_t age = kAges - 1 - threadIdx.x, count = b.ages[age];
  uint32_t older;
  Scan(storage).ExclusiveSum(count, older);
  const uint32_t all = older + count;
  if ((older < wanted && all >= wanted) || (age == 1 && all < wanted)) {
    b.control->num_older = older;
    b.control->youngest = age;
    b.control->num_victims = min(wanted, all);
  }
}

// A block counts the slots of a chunk.
__global__ void __launch_bounds__(kScanBlock) CountSlotsKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  __shared__ uint32_t count;
  const uint32_t now = b.Now(), youngest = b.control->youngest;
  for (int64_t chunk = blockIdx.x; chunk * kSlotsOfChunk < b.tier.num_slots; chunk += gridDim.x) {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const Ages ages(b.tier, chunk * kSlotsOfChunk + threadIdx.x * kSlotsTogether, now);
    const uint32_t of_warp = __reduce_add_sync(~0u, ages.CountFrom(static_cast<int>(youngest)));
    if (threadIdx.x % kWarp == 0 && of_warp != 0) atomicAdd(&count, of_warp);
    __syncthreads();
    if (threadIdx.x == 0) b.slot_counts[chunk] = static_cast<uint64_t>(count >> 16) << 32 | (count & 0xffffu);
  }
}

// One block.
__global__ void __launch_bounds__(kScanBlock) SumSlotsKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing != 0) SumUp(b.slot_counts, CeilDiv<int64_t>(b.tier.num_slots, kSlotsOfChunk));
}

__global__ void __launch_bounds__(kScanBlock) ChooseSlotsKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  using Scan = cub::BlockScan<uint32_t, kScanBlock>;
  __shared__ typename Scan::TempStorage storage;
  const uint32_t now = b.Now(), youngest = b.control->youngest;
  for (int64_t chunk = blockIdx.x; chunk * kSlotsOfChunk < b.tier.num_slots; chunk += gridDim.x) {
    const int64_t first = chunk * kSlotsOfChunk + threadIdx.x * kSlotsTogether;
    const Ages ages(b.tier, first, now);
    uint32_t before;
    Scan(storage).ExclusiveSum(ages.CountFrom(static_cast<int>(youngest)), before);
    __syncthreads();
    const uint64_t counts = b.slot_counts[chunk];
    uint32_t older = static_cast<uint32_t>(counts) + (before & 0xffffu);
    uint32_t equal = b.control->num_older + static_cast<uint32_t>(counts >> 32) + (before >> 16);
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      const uint32_t age = static_cast<uint32_t>(ages.of[i]);
      if (age < youngest || age == 0) continue;
      const uint32_t rank = age == youngest ? equal++ : older++;
      if (rank < b.control->num_victims) b.victims[rank] = static_cast<uint32_t>(first + i);
    }
  }
}

/// Adds one to counts[part] for each lane with a move; returns what was there before it.
__device__ __forceinline__ uint32_t CountMove(uint32_t* counts, uint32_t part, bool has_move) {
  const bool is_ahead = has_move && part == kParts, is_fresh = has_move && part == kParts + 1;
  const unsigned ahead = __ballot_sync(~0u, is_ahead), fresh = __ballot_sync(~0u, is_fresh);
  if (!has_move) return 0;
  if (part < kParts) return atomicAdd(counts + part, 1u);
  const unsigned lanes = is_fresh ? fresh : ahead;  // which are many: one lane adds for all
  const int lane = static_cast<int>(threadIdx.x % kWarp), first = __ffs(static_cast<int>(lanes)) - 1;
  uint32_t before = 0;
  if (lane == first) before = atomicAdd(counts + part, static_cast<uint32_t>(__popc(lanes)));
  return __shfl_sync(lanes, before, first) + static_cast<uint32_t>(__popc(lanes & ((1u << lane) - 1)));
}

/// Gives the row of a rank its slot; positions still find their row's rank in its place, if it is staged.
__device__ __forceinline__ void Place(const Bringing& b, uint32_t rank, Move* leaving, Move* coming) {
  const TierView& tier = b.tier;
  const uint32_t row_id = b.row_ids[b.missing[rank]], slot = b.SlotOfRank(rank);
  const bool is_kept = rank < b.control->num_victims;
  if (!is_kept && rank - b.control->num_victims >= tier.num_staged) return;  // not of a state that is whole
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

/// Marks the slot that the row of a rank would take, and lets its place be what it was.
__device__ __forceinline__ void Foresee(const Bringing& b, uint32_t rank, Move* leaving, Move* coming) {
  const TierView& tier = b.tier;
  const uint32_t row_id = b.row_ids[b.missing[rank]];
  uint32_t* place = tier.PlaceAt(row_id);
  const bool is_fresh = *place >= kPendingFresh, is_ahead = rank < b.most_ahead;
  if (!is_fresh && is_ahead) *coming = {rank, row_id, 0, kNoRow};
  *place = is_fresh ? kFresh : kInHost;
  if (!is_ahead || rank >= b.control->num_victims) return;
  const uint32_t slot = b.victims[rank];
  if (tier.owners[slot].free_id >= tier.capacity) return;
  *leaving = {slot, tier.owners[slot].free_id, 0, kNoRow};
  tier.last_use[slot] = kMarked;
}

// One thread, one row that comes.
__global__ void __launch_bounds__(kBlock) MoveKernel(const __grid_constant__ Bringing b) {
  const uint32_t num_missing = b.control->num_missing;
  uint32_t num_fetched = 0, num_written = 0, num_ahead = 0;
  for (uint32_t begin = blockIdx.x * kBlock; begin < num_missing; begin += gridDim.x * kBlock) {
    const uint32_t rank = begin + threadIdx.x;
    Move leaving{kNoRow, kNoRow, 0, kNoRow}, coming = leaving;
    if (rank < num_missing) {
      if (b.is_ahead) {
        Foresee(b, rank, &leaving, &coming);
      } else {
        Place(b, rank, &leaving, &coming);
      }
    }
    num_written += leaving.row_id != kNoRow ? 1 : 0;
    num_fetched += coming.row_id != kNoRow && coming.is_fresh == 0 ? 1 : 0;
    num_ahead += coming.ahead != kNoRow ? 1 : 0;
    if (leaving.ahead != kNoRow) leaving.row_id = kNoRow;  // it is written
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

// Two blocks, one for each list.
__global__ void __launch_bounds__(kScanBlock) SumPartsKernel(const __grid_constant__ Bringing b) {
  const bool is_leaving = blockIdx.x == 0;
  uint32_t sum = 0;
  if (b.control->num_missing != 0) sum = SumUp(is_leaving ? b.leaving_parts : b.coming_parts, kListParts);
  if (threadIdx.x != 0) return;
  b.moves.counts[is_leaving ? kNumLeaving : kNumComing] = sum;
  if (is_leaving) return;
  b.moves.counts[kNumFromHost] = sum == 0 ? 0 : b.coming_parts[kParts];
  b.moves.counts[kNumNotFresh] = sum == 0 ? 0 : b.coming_parts[kParts + 1];
}

// One thread, one row that comes.
__global__ void __launch_bounds__(kBlock) OrderKernel(const __grid_constant__ Bringing b) {
  const uint32_t num_missing = b.control->num_missing;
  for (uint32_t begin = blockIdx.x * kBlock; begin < num_missing; begin += gridDim.x * kBlock) {
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

// One thread, one position.
__global__ void __launch_bounds__(kBlock) SlotsKernel(const __grid_constant__ Bringing b) {
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < b.num_keys; i += int64_t{gridDim.x} * kBlock) {
    uint32_t place = kNoRow;
    if (b.IsRow(b.row_ids[i])) place = *b.tier.PlaceAt(b.row_ids[i]) == kFresh ? 0 : *b.tier.PlaceAt(b.row_ids[i]);
    if (place >= kPendingInHost && place < kInHost) {
      place = b.SlotOfRank(b.rank_of[min(static_cast<int64_t>(place % kMostSlots), b.num_keys - 1)]);
    } else if (place != 0 && place >= b.tier.num_slots) {
      place = kNoRow;
    }
    b.slots[i] = place;
  }
}

// One thread, one row that is staged: its place becomes what it was.
__global__ void __launch_bounds__(kBlock) EndKernel(const __grid_constant__ Bringing b) {
  const uint32_t num_missing = b.control->num_missing;
  for (uint32_t rank = b.control->num_victims + blockIdx.x * kBlock + threadIdx.x; !b.is_ahead && rank < num_missing;
       rank += gridDim.x * kBlock) {
    uint32_t* place = b.tier.PlaceAt(b.row_ids[b.missing[rank]]);
    *place = *place >= kPendingFresh ? kFresh : kInHost;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  b.tier.counters[kTierClock] += 1;
  if (b.is_ahead) b.tier.counters[kTierTicket] = num_missing != 0 ? b.tier.counters[kTierClock] : 0;
  if (b.is_ahead) return;
  b.tier.counters[kTierHits] += b.control->num_hits;
  b.tier.counters[kTierFetched] += b.control->num_fetched;
  b.tier.counters[kTierWritten] += b.control->num_written;
  b.tier.counters[kTierAhead] += b.control->num_ahead;
  if (num_missing != 0) b.tier.counters[kTierTicket] = 0;
}

/// Launches all passes.
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
  JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(workspace, 0, static_cast<size_t>(cut.used()), stream));
  b.rank_of = cut.Take<uint32_t>(num_keys);
  b.missing = cut.Take<uint32_t>(num_keys);
  b.victims = cut.Take<uint32_t>(num_keys);
  b.leaving = cut.Take<Move>(num_keys);
  b.coming = cut.Take<Move>(num_keys);
  const int64_t num_blocked = std::max<int64_t>(num_keys, 1);  // a grid has a block at least
  const int64_t num_chunks = CeilDiv<int64_t>(num_blocked, kCountedTogether);
  b.key_counts = cut.Take<uint32_t>(num_chunks);
  b.slot_counts = cut.Take<uint64_t>(CeilDiv<int64_t>(tier.num_slots, kSlotsOfChunk));
  if (cut.used() > BringWorkspaceBytes(num_keys, tier.num_slots)) return "bring: the workspace is too small";

  const int wave = BlocksOfWave();
  if (tier.num_staged != 0) {  // all ones: kPaddingKey and kNoRow
    JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(tier.staged_owners, 0xff, tier.num_staged * sizeof(Record), stream));
  }
  const unsigned key_chunks = static_cast<unsigned>(num_chunks), by_key = BlocksFor(num_blocked, wave);
  MarkKernel<<<by_key, kBlock, 0, stream>>>(b);
  CountMissingKernel<<<key_chunks, kScanBlock, 0, stream>>>(b);
  SumMissingKernel<<<1, kScanBlock, 0, stream>>>(b);
  RankKernel<<<key_chunks, kScanBlock, 0, stream>>>(b);
  if (tier.num_slots != 0) {
    const unsigned slot_chunks =
        static_cast<unsigned>(std::min<int64_t>(CeilDiv<int64_t>(tier.num_slots, kSlotsOfChunk), wave));
    AgesKernel<<<BlocksFor(CeilDiv<int64_t>(tier.num_slots, kSlotsTogether), wave), kBlock, 0, stream>>>(b);
    ChooseAgeKernel<<<1, kScanBlock, 0, stream>>>(b);
    CountSlotsKernel<<<slot_chunks, kScanBlock, 0, stream>>>(b);
    SumSlotsKernel<<<1, kScanBlock, 0, stream>>>(b);
    ChooseSlotsKernel<<<slot_chunks, kScanBlock, 0, stream>>>(b);
  }
  MoveKernel<<<by_key, kBlock, 0, stream>>>(b);
  SumPartsKernel<<<2, kScanBlock, 0, stream>>>(b);
  OrderKernel<<<by_key, kBlock, 0, stream>>>(b);
  if (!b.is_ahead) SlotsKernel<<<by_key, kBlock, 0, stream>>>(b);
  EndKernel<<<by_key, kBlock, 0, stream>>>(b);
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

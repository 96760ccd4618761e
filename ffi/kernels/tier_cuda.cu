// Tiers on a GPU (tier.h says what).
//
// A call marks the rows that are not here with the smallest of their positions, numbers these, takes as many slots that
// have not been used for longest, and lists the moves. Two more calls make them: a warp writes the record of a row that
// leaves, and later one reads that of a row that comes. Everything is decided on the device; passes that have nothing
// to do end at once.
#include <cub/block/block_scan.cuh>

#include "../core/initialize.h"
#include "../core/row_dtype.h"
#include "launch_cuda.cuh"
#include "tier.h"

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
};

struct Bringing {
  TierView tier;
  const uint32_t* row_ids;
  int64_t num_keys;
  uint32_t* slots;
  Move* moves;

  BringControl* control;
  uint32_t* ages;         // [kAges]: slots of each
  uint32_t* rank_of;      // [num_keys]: of positions that are the first of a missing row
  uint32_t* missing;      // [num_keys]: those positions, by rank
  uint32_t* victims;      // [num_keys]: the slots that they take
  uint32_t* key_counts;   // by kCountedTogether positions
  uint64_t* slot_counts;  // by kCountedTogether slots: older ones in the low half, those of the youngest age above

  __device__ uint32_t Now() const { return tier.counters[kTierClock] + 1; }
  __device__ bool IsRow(uint32_t row_id) const { return row_id < tier.capacity; }
  __device__ uint32_t SlotOfRank(uint32_t rank) const {
    return rank < control->num_victims ? victims[rank] : tier.num_lines + (rank - control->num_victims);
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

// Blocks count the slots of each age.
__global__ void __launch_bounds__(kBlock) AgesKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  __shared__ uint32_t ages[kAges];
  for (int age = threadIdx.x; age < kAges; age += kBlock) ages[age] = 0;
  __syncthreads();
  const uint32_t now = b.Now();
  for (uint32_t slot = blockIdx.x * kBlock + threadIdx.x; slot < b.tier.num_slots; slot += gridDim.x * kBlock) {
    atomicAdd(ages + b.tier.AgeOf(b.tier.last_use[slot], now), 1u);
  }
  __syncthreads();
  for (int age = threadIdx.x; age < kAges; age += kBlock) {
    if (ages[age] != 0) atomicAdd(b.ages + age, ages[age]);
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

// A block counts kCountedTogether slots.
__global__ void __launch_bounds__(kScanBlock) CountSlotsKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  const uint32_t now = b.Now(), youngest = b.control->youngest;
  for (int64_t chunk = blockIdx.x; chunk * kScanBlock < b.tier.num_slots; chunk += gridDim.x) {
    const int64_t slot = chunk * kScanBlock + threadIdx.x;
    const uint32_t age = slot < b.tier.num_slots ? b.tier.AgeOf(b.tier.last_use[slot], now) : 0;
    const int older = __syncthreads_count(age > youngest), equal = __syncthreads_count(age == youngest);
    if (threadIdx.x == 0) b.slot_counts[chunk] = static_cast<uint64_t>(equal) << 32 | static_cast<uint32_t>(older);
  }
}

// One block.
__global__ void __launch_bounds__(kScanBlock) SumSlotsKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing != 0) SumUp(b.slot_counts, CeilDiv<int64_t>(b.tier.num_slots, kCountedTogether));
}

__global__ void __launch_bounds__(kScanBlock) ChooseSlotsKernel(const __grid_constant__ Bringing b) {
  if (b.control->num_missing == 0) return;
  using Scan = cub::BlockScan<uint32_t, kScanBlock>;
  __shared__ typename Scan::TempStorage storage;
  const uint32_t now = b.Now(), youngest = b.control->youngest;
  for (int64_t chunk = blockIdx.x; chunk * kScanBlock < b.tier.num_slots; chunk += gridDim.x) {
    const int64_t slot = chunk * kScanBlock + threadIdx.x;
    const uint32_t age = slot < b.tier.num_slots ? b.tier.AgeOf(b.tier.last_use[slot], now) : 0;
    uint32_t before;  // equal ones above 16 bits, older ones below
    Scan(storage).ExclusiveSum((age == youngest ? 1u << 16 : 0u) | (age > youngest ? 1u : 0u), before);
    __syncthreads();
    const uint64_t counts = b.slot_counts[chunk];
    uint32_t rank = static_cast<uint32_t>(counts) + (before & 0xffffu);
    if (age == youngest) rank = b.control->num_older + static_cast<uint32_t>(counts >> 32) + (before >> 16);
    if (age >= youngest && age != 0 && rank < b.control->num_victims) b.victims[rank] = static_cast<uint32_t>(slot);
  }
}

/// The lanes of a warp copy a part of a record.
__device__ __forceinline__ void CopyPart(char* to, const char* from, int64_t num_bytes, int lane) {
  const uint64_t together = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | num_bytes;
  if (together % 16 == 0) {
    for (int64_t at = lane * 16; at < num_bytes; at += kWarp * 16) {
      *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
    }
  } else if (together % 4 == 0) {
    for (int64_t at = lane * 4; at < num_bytes; at += kWarp * 4) {
      *reinterpret_cast<uint32_t*>(to + at) = *reinterpret_cast<const uint32_t*>(from + at);
    }
  } else {
    for (int64_t at = lane * 2; at < num_bytes; at += kWarp * 2) {
      *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
    }
  }
}

__device__ void WriteToHost(const TierView& tier, uint32_t slot, uint32_t row_id, int lane) {
  char* to = tier.HostAt(row_id);
  CopyPart(to, tier.RowAt(slot), tier.RowBytes(), lane);
  for (int k = 0; k < tier.states.num_states; ++k) {
    CopyPart(to + tier.state_begin[k], reinterpret_cast<const char*>(tier.StateAt(k, slot)), tier.states.width[k] * 4,
             lane);
  }
}

__device__ void ReadFromHost(const TierView& tier, uint32_t row_id, uint32_t slot, int lane) {
  const char* from = tier.HostAt(row_id);
  CopyPart(tier.RowAt(slot), from, tier.RowBytes(), lane);
  for (int k = 0; k < tier.states.num_states; ++k) {
    CopyPart(reinterpret_cast<char*>(tier.StateAt(k, slot)), from + tier.state_begin[k], tier.states.width[k] * 4,
             lane);
  }
}

template <typename Row>
__device__ void Initialize(const RowInitializer& values, char* row, int32_t dim, int lane) {
  for (int column = lane; column < dim; column += kWarp) {
    reinterpret_cast<Row*>(row)[column] = RowNumber<Row>::Nearest(values.At(column));
  }
}

__device__ void MakeFresh(const TierView& tier, const Record& record, uint32_t slot, int lane) {
  const uint32_t table = min(record.table, static_cast<uint32_t>(tier.num_tables) - 1);
  const RowInitializer values = RowInitializer::Of(tier.tables + table * kNumTableWords, tier.seed, record.key);
  if (tier.row_dtype == kRowDtypeFloat32) {
    Initialize<float>(values, tier.RowAt(slot), tier.dim, lane);
  } else if (tier.row_dtype == kRowDtypeBfloat16) {
    Initialize<BFloat16>(values, tier.RowAt(slot), tier.dim, lane);
  } else {
    Initialize<Float16>(values, tier.RowAt(slot), tier.dim, lane);
  }
  for (int k = 0; k < tier.states.num_states; ++k) {
    for (int i = lane; i < tier.states.width[k]; i += kWarp) tier.StateAt(k, slot)[i] = tier.states.initial[k];
  }
}

// One thread, one row that comes. Positions still find their row's rank in its place, if it is staged.
__global__ void __launch_bounds__(kBlock) MoveKernel(const __grid_constant__ Bringing b) {
  const uint32_t num_missing = b.control->num_missing;
  const TierView& tier = b.tier;
  const uint32_t now = b.Now();
  uint32_t num_fetched = 0, num_written = 0;
  for (uint32_t rank = blockIdx.x * kBlock + threadIdx.x; rank < num_missing; rank += gridDim.x * kBlock) {
    const uint32_t row_id = b.row_ids[b.missing[rank]], slot = b.SlotOfRank(rank);
    const bool is_kept = rank < b.control->num_victims;
    if (!is_kept && rank - b.control->num_victims >= tier.num_staged) continue;  // not of a state that is whole
    Record* owner = tier.OwnerAt(slot);
    Move move{slot, kNoRow, row_id, *tier.PlaceAt(row_id) >= kPendingFresh ? 1u : 0u};
    if (is_kept && owner->free_id < tier.capacity) {
      move.leaving = owner->free_id;
      *tier.PlaceAt(owner->free_id) = kInHost;
      ++num_written;
    }
    num_fetched += 1 - move.is_fresh;
    b.moves[rank] = move;
    const Record& record = *tier.records.At(tier.starts, row_id, 1);
    *owner = {record.key, record.table, row_id};
    if (is_kept) {
      tier.last_use[slot] = now;
      *tier.PlaceAt(row_id) = slot;
    }
  }
  num_fetched = __reduce_add_sync(~0u, num_fetched);
  num_written = __reduce_add_sync(~0u, num_written);
  if (threadIdx.x % kWarp != 0) return;
  if (num_fetched != 0) atomicAdd(&b.control->num_fetched, num_fetched);
  if (num_written != 0) atomicAdd(&b.control->num_written, num_written);
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
  for (uint32_t rank = b.control->num_victims + blockIdx.x * kBlock + threadIdx.x; rank < num_missing;
       rank += gridDim.x * kBlock) {
    uint32_t* place = b.tier.PlaceAt(b.row_ids[b.missing[rank]]);
    *place = *place >= kPendingFresh ? kFresh : kInHost;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  b.tier.counters[kTierClock] += 1;
  b.tier.counters[kTierHits] += b.control->num_hits;
  b.tier.counters[kTierFetched] += b.control->num_fetched;
  b.tier.counters[kTierWritten] += b.control->num_written;
}

// One warp, one position.
__global__ void __launch_bounds__(kBlock)
    PeekKernel(const __grid_constant__ TierView tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp; i < num_keys;
       i += int64_t{gridDim.x} * kBlock / kWarp) {
    const uint32_t row_id = row_ids[i], staged = tier.num_lines + static_cast<uint32_t>(i);
    const uint32_t place = row_id < tier.capacity ? *tier.PlaceAt(row_id) : kNoRow;
    const bool is_row = row_id < tier.capacity && tier.IsUsed(row_id, place);
    const uint32_t slot = !is_row ? kNoRow : place < tier.num_slots ? place : staged;
    Record owner{kPaddingKey, kNoRow, kNoRow};
    if (slot == staged) {
      const Record record = *tier.records.At(tier.starts, row_id, 1);
      if (place == kInHost) {
        ReadFromHost(tier, row_id, staged, lane);
      } else {
        MakeFresh(tier, record, staged, lane);
      }
      owner = {record.key, record.table, row_id};
    }
    if (lane != 0) continue;
    *tier.OwnerAt(staged) = owner;
    slots[i] = slot;
  }
}

// One warp, one row that leaves.
__global__ void __launch_bounds__(kBlock)
    WriteKernel(const __grid_constant__ TierView tier, const Move* moves, int64_t num_moves, uint32_t begin) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp; i < num_moves;
       i += int64_t{gridDim.x} * kBlock / kWarp) {
    const Move move = moves[i];
    const uint32_t row_id = move.leaving - begin;  // one of another slab is beyond the capacity
    if (move.leaving == kNoRow || row_id >= tier.capacity || move.slot >= tier.num_lines) continue;
    WriteToHost(tier, move.slot, row_id, lane);
  }
}

// One warp, one row that comes.
__global__ void __launch_bounds__(kBlock)
    ReadKernel(const __grid_constant__ TierView tier, const Move* moves, int64_t num_moves) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp; i < num_moves;
       i += int64_t{gridDim.x} * kBlock / kWarp) {
    const Move move = moves[i];
    if (move.coming >= tier.capacity || move.slot >= tier.num_lines + tier.num_staged) continue;
    if (move.is_fresh != 0) {
      MakeFresh(tier, *tier.OwnerAt(move.slot), move.slot, lane);
    } else {
      ReadFromHost(tier, move.coming, move.slot, lane);
    }
  }
}

}  // namespace

LaunchError LaunchBring(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots,
                        Move* moves, void* workspace) {
  WorkspaceCutter cut(workspace);
  Bringing b{};
  b.tier = tier;
  b.row_ids = row_ids;
  b.num_keys = num_keys;
  b.slots = slots;
  b.moves = moves;
  b.control = cut.Take<BringControl>(1);
  b.ages = cut.Take<uint32_t>(kAges);
  JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(workspace, 0, static_cast<size_t>(cut.used()), stream));
  b.rank_of = cut.Take<uint32_t>(num_keys);
  b.missing = cut.Take<uint32_t>(num_keys);
  b.victims = cut.Take<uint32_t>(num_keys);
  const int64_t num_blocked = std::max<int64_t>(num_keys, 1);  // a grid has a block at least
  const int64_t num_chunks = CeilDiv<int64_t>(num_blocked, kCountedTogether);
  b.key_counts = cut.Take<uint32_t>(num_chunks);
  b.slot_counts = cut.Take<uint64_t>(CeilDiv<int64_t>(tier.num_slots, kCountedTogether));
  if (cut.used() > BringWorkspaceBytes(num_keys, tier.num_slots)) return "bring: the workspace is too small";

  const int wave = BlocksOfWave();
  JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(moves, 0xff, static_cast<size_t>(num_keys) * sizeof(Move), stream));
  if (tier.num_staged != 0) {  // all ones: kPaddingKey and kNoRow
    JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(tier.staged_owners, 0xff, tier.num_staged * sizeof(Record), stream));
  }
  const unsigned key_chunks = static_cast<unsigned>(num_chunks);
  MarkKernel<<<BlocksFor(num_blocked, wave), kBlock, 0, stream>>>(b);
  CountMissingKernel<<<key_chunks, kScanBlock, 0, stream>>>(b);
  SumMissingKernel<<<1, kScanBlock, 0, stream>>>(b);
  RankKernel<<<key_chunks, kScanBlock, 0, stream>>>(b);
  if (tier.num_slots != 0) {
    const unsigned slot_chunks =
        static_cast<unsigned>(std::min<int64_t>(CeilDiv<int64_t>(tier.num_slots, kScanBlock), wave));
    AgesKernel<<<BlocksFor(tier.num_slots, wave), kBlock, 0, stream>>>(b);
    ChooseAgeKernel<<<1, kScanBlock, 0, stream>>>(b);
    CountSlotsKernel<<<slot_chunks, kScanBlock, 0, stream>>>(b);
    SumSlotsKernel<<<1, kScanBlock, 0, stream>>>(b);
    ChooseSlotsKernel<<<slot_chunks, kScanBlock, 0, stream>>>(b);
  }
  MoveKernel<<<BlocksFor(num_blocked, wave), kBlock, 0, stream>>>(b);
  SlotsKernel<<<BlocksFor(num_blocked, wave), kBlock, 0, stream>>>(b);
  EndKernel<<<BlocksFor(num_blocked, wave), kBlock, 0, stream>>>(b);
  return LastLaunchError();
}

LaunchError LaunchPeek(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                       uint32_t* slots) {
  if (num_keys == 0) return nullptr;
  PeekKernel<<<BlocksFor(num_keys * kWarp, BlocksOfWave()), kBlock, 0, stream>>>(tier, row_ids, num_keys, slots);
  return LastLaunchError();
}

LaunchError LaunchWrite(Stream stream, const TierView& tier, const Move* moves, int64_t num_moves, uint32_t begin) {
  if (num_moves == 0) return nullptr;
  WriteKernel<<<BlocksFor(num_moves * kWarp, BlocksOfWave()), kBlock, 0, stream>>>(tier, moves, num_moves, begin);
  return LastLaunchError();
}

LaunchError LaunchRead(Stream stream, const TierView& tier, const Move* moves, int64_t num_moves) {
  if (num_moves == 0) return nullptr;
  ReadKernel<<<BlocksFor(num_moves * kWarp, BlocksOfWave()), kBlock, 0, stream>>>(tier, moves, num_moves);
  return LastLaunchError();
}

}  // namespace jaxsok

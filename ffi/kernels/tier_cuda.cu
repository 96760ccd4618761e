// Assigns slots to rows, on a GPU (tier.h has the contract); tier_move_cuda.cu moves the rows.
//
// One kernel, whose blocks synchronise between its steps. They mark each missing row with the smallest of its
// positions, place those that were foreseen, number the others, choose as many slots, and list the moves in the order
// of the parts of host memory. The device makes all decisions. If all slots are known, the blocks synchronise only
// once, or twice where rows come that were read ahead.
#include <cooperative_groups.h>

#include "tier_known_cuda.cuh"
#include "tier_place_cuda.cuh"
#include "tier_records_cuda.cuh"
#include "tier_slots_cuda.cuh"

namespace jaxsok {
namespace {

// Steps of placing: each runs in all blocks between two synchronisations.
// ----------------------------------------------

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
              atomicExch(tier.priority + slot, MeanUse::OfPriority(old).After(now).Priority() | kPinned);
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

/// Gives the row of a rank its slot. If the row is staged, its positions still find its rank in its place.
__device__ __forceinline__ void Place(const Bringing& b, uint32_t rank, uint32_t num_victims, Move* leaving,
                                      Move* coming) {
  if (rank >= num_victims && rank - num_victims >= b.tier.num_staged) return;  // only in an invalid state
  const uint32_t first = b.missing[rank], slot = b.SlotOfRank(rank, num_victims), from = b.former_place[first];
  *coming = {slot, b.row_ids[first], from == kFresh ? kNoRow : b.tier.RecordOf(b.row_ids[first]), kNoRow};
  TakeSlot(b, coming->row_id, slot, MeanUse::AfterPlace(from, b.tier.Now()).Priority() | kPinned, leaving);
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
  tier.foreseen[rank] = {row_id, slot, MeanUse::AfterPlace(from, tier.Now()).Priority(), is_fresh};
  if (is_fresh == 0) *coming = {rank, row_id, record, kNoRow};
  if (former >= tier.capacity) return;
  *leaving = {slot, former, former_record, kNoRow};
  tier.priority[slot] |= kMark;
}

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
      const uint32_t ahead = may_be_ahead ? tier.area->coming.row_ids[rank] : kNoRow;
      if (IsFreeOrMarked(priority) && IsPending(place)) {
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
    area->coming.row_ids[rank] = coming.row_id;
    if (!comes) return;
    char* const here = area->coming.records + int64_t{rank} * b.tier.host_bytes;
    area->coming.ends[to] = {b.tier.HostAt(coming.record), reinterpret_cast<uint64_t>(here)};
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
__device__ void CountCall(const Bringing& b, uint32_t num_victims, uint32_t first_tile) {
  uint32_t* const counters = b.tier.counters;
  const bool has_missing = b.control->num_missing != 0;
  counters[kTierClock] += 1;
  if (num_victims != 0) counters[kTierWindow] = b.window.Next(first_tile);
  if (b.is_ahead) {
    counters[kTierTicket] = has_missing ? counters[kTierClock] : 0;
    counters[kTierForeseen] = b.NumListed(num_victims);
    const bool is_complete = b.NumListed(num_victims) == b.control->num_missing;
    *b.list.stamp = {is_complete ? 1u : 0u, counters[kTierTicket], b.control->num_hits, counters[kTierForeseen]};
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
  *b.list.stamp = {is_complete ? 1u : 0u, 0, b.control->num_hits + num_kept, 0};
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
  if (blockIdx.x == 0 && threadIdx.x == 0) CountCall(b, num_victims, first_tile);
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

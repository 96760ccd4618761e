// How rows get their slots, on a GPU, if an earlier call has listed them (tier_cuda.cu).
#ifndef JAXSOK_KERNELS_TIER_KNOWN_CUDA_CUH_
#define JAXSOK_KERNELS_TIER_KNOWN_CUDA_CUH_

#include "tier_place_cuda.cuh"

namespace jaxsok {

/// Counts the row of a known slot as used. Other positions of the row do the same at the same time: the thread that
/// changes the time of the last use also changes the priority.
__device__ __noinline__ inline void UseKnown(const Bringing& b, uint32_t slot, uint32_t now) {
  const SlotUse use = SlotUse::Of(b.tier, slot);
  if (use.last == now || !TierView::BeginsUse(use.last, use.priority, now)) return;
  if (atomicCAS(b.tier.last_use + slot, use.last, now) != use.last) return;
  b.tier.priority[slot] = MeanUse::OfPriority(use.priority).After(now).Priority();
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
      holds &= !comes || !IsMarked(at[k].use.priority);  // marked, it is foreseen for another row
      if (TierView::BeginsUse(at[k].use.last, at[k].use.priority, now)) UseKnown(b, at[k].slot, now);
    }
  }
  ForRanks(num_foreseen, [&](uint32_t rank) {
    bool is_ahead = false;
    if (rank < num_foreseen) {
      const Foreseen row = tier.foreseen[rank];
      is_ahead = row.is_fresh == 0;
      holds &= tier.MayCome(row, SlotUse::Of(tier, row.slot).priority);
      holds &= !is_ahead || tier.area->coming.row_ids[rank] == row.row_id;
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
__device__ inline void CountKnown(const Bringing& b) {
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
  *b.list.stamp = {1, 0, known.num_rows + num_coming, 0};
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_KNOWN_CUDA_CUH_

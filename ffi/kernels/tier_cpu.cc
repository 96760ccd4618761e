// Tiers on a CPU (tier.h has the contract).
#include <algorithm>
#include <cstring>

#include "../core/initialize.h"
#include "../core/row_dtype.h"
#include "index_cpu.h"
#include "parallel_cpu.h"
#include "tier.h"

namespace jaxsok {
namespace {

constexpr int64_t kRowsPerTask = 256;

void WriteToHost(const TierView& tier, uint32_t slot, uint32_t row_id) {
  char* to = tier.HostAt(row_id);
  std::memcpy(to, tier.RowAt(slot), static_cast<size_t>(tier.RowBytes()));
  for (int k = 0; k < tier.states.num_states; ++k) {
    std::memcpy(to + tier.state_begin[k], tier.StateAt(k, slot), tier.states.width[k] * sizeof(float));
  }
}

void ReadFromHost(const TierView& tier, uint32_t row_id, uint32_t slot) {
  const char* from = tier.HostAt(row_id);
  std::memcpy(tier.RowAt(slot), from, static_cast<size_t>(tier.RowBytes()));
  for (int k = 0; k < tier.states.num_states; ++k) {
    std::memcpy(tier.StateAt(k, slot), from + tier.state_begin[k], tier.states.width[k] * sizeof(float));
  }
}

void MakeFresh(const TierView& tier, const Record& record, uint32_t slot) {
  const uint32_t table = std::min(record.table, static_cast<uint32_t>(tier.num_tables) - 1);
  const RowInitializer values = RowInitializer::Of(tier.tables + table * kNumTableWords, tier.seed, record.key);
  WithRowDtype(tier.row_dtype, [&](auto number) {
    using R = decltype(number);
    InitializeRow(values, reinterpret_cast<R*>(tier.RowAt(slot)), tier.dim);
  });
  for (int k = 0; k < tier.states.num_states; ++k) {
    std::fill_n(tier.StateAt(k, slot), tier.states.width[k], tier.states.initial[k]);
  }
}

/// The rows of a call that are not in the cache, and the slots that they would take.
struct Missing {
  int64_t num = 0;
  uint32_t* positions;  // first occurrences
  int64_t num_victims = 0;
  uint32_t* victims;

  uint32_t SlotOf(const TierView& tier, int64_t rank) const {
    return rank < num_victims ? victims[rank] : tier.num_lines + static_cast<uint32_t>(rank - num_victims);
  }
};

/// Marks rows in the cache as used now, and counts them. The places of other rows become pending, with their rank, so
/// that all positions of a row find its slot.
/// positions of a row find its slot.
Missing FindMissing(const TierView& tier, const uint32_t* row_ids, int64_t num_keys, void* workspace, bool is_ahead,
                    uint32_t* num_hits) {
  WorkspaceCutter cut(workspace);
  int64_t* ages = cut.Take<int64_t>(kAges);
  Missing missing;
  missing.positions = cut.Take<uint32_t>(num_keys);
  missing.victims = cut.Take<uint32_t>(num_keys);
  const uint32_t now = tier.counters[kTierClock] + 1;
  for (int64_t i = 0; i < num_keys; ++i) {
    if (row_ids[i] >= tier.capacity) continue;
    uint32_t* place = tier.PlaceAt(row_ids[i]);
    if (*place < tier.num_slots) {
      if (tier.last_use[*place] != now) ++*num_hits;
      tier.last_use[*place] = now;
    } else if ((*place == kFresh || *place == kInHost) && tier.IsUsed(row_ids[i], *place)) {
      *place = (*place == kFresh ? kPendingFresh : kPendingInHost) + static_cast<uint32_t>(missing.num);
      missing.positions[missing.num++] = static_cast<uint32_t>(i);
    }
  }
  if (missing.num == 0) return missing;
  if (is_ahead) std::replace(tier.last_use, tier.last_use + tier.num_slots, kMarked, kOnceMarked);
  std::fill_n(ages, kAges, 0);
  for (uint32_t slot = 0; slot < tier.num_slots; ++slot) ++ages[tier.AgeOf(tier.last_use[slot], now)];
  int youngest = kAges - 1;  // the youngest age that leaves: all older slots do, and the first ones of this age
  int64_t num_older = 0;
  while (youngest > 1 && num_older + ages[youngest] < missing.num) num_older += ages[youngest--];
  missing.num_victims = std::min(missing.num, num_older + ages[youngest]);
  int64_t older = 0, equal = num_older;
  for (uint32_t slot = 0; slot < tier.num_slots; ++slot) {
    const int age = tier.AgeOf(tier.last_use[slot], now);
    if (age > youngest) missing.victims[older++] = slot;
    if (age == youngest && equal < missing.num_victims) missing.victims[equal++] = slot;
  }
  return missing;
}

}  // namespace

LaunchError LaunchBring(Stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots,
                        const Moves& moves, void* workspace) {
  const Missing missing = FindMissing(tier, row_ids, num_keys, workspace, false, &tier.counters[kTierHits]);
  const uint32_t now = tier.counters[kTierClock] + 1;
  const bool has_ahead = tier.counters[kTierTicket] != 0;  // rows written ahead have arrived: a CPU writes at once
  std::fill_n(tier.staged_owners, tier.num_staged, Record{kPaddingKey, kNoRow, kNoRow});
  std::fill_n(moves.counts, kNumMoveCounts, 0);
  for (int64_t rank = 0; rank < missing.num; ++rank) {
    const uint32_t row_id = row_ids[missing.positions[rank]], slot = missing.SlotOf(tier, rank);
    const uint32_t is_fresh = *tier.PlaceAt(row_id) >= kPendingFresh ? 1 : 0;
    Record* owner = tier.OwnerAt(slot);
    if (rank < missing.num_victims && owner->free_id < tier.capacity) {
      if (!has_ahead || tier.last_use[slot] != kMarked) {
        moves.leaving[moves.counts[kNumLeaving]++] = {slot, owner->free_id, 0, kNoRow};
      }
      *tier.PlaceAt(owner->free_id) = kInHost;
      ++tier.counters[kTierWritten];
    }
    moves.coming[moves.counts[kNumComing]++] = {slot, row_id, is_fresh, kNoRow};
    tier.counters[kTierFetched] += 1 - is_fresh;
    const Record& record = *tier.records.At(tier.starts, row_id, 1);
    *owner = {record.key, record.table, row_id};
    if (rank < missing.num_victims) tier.last_use[slot] = now;
  }
  for (int64_t i = 0; i < num_keys; ++i) {
    slots[i] = kNoRow;
    if (row_ids[i] >= tier.capacity) continue;
    const uint32_t place = *tier.PlaceAt(row_ids[i]);
    if (place < tier.num_slots) slots[i] = place;
    if (place >= kPendingInHost && place < kInHost) slots[i] = missing.SlotOf(tier, place % kMostSlots);
    if (place == kFresh) slots[i] = 0;
  }
  for (int64_t rank = 0; rank < missing.num; ++rank) {
    uint32_t* place = tier.PlaceAt(row_ids[missing.positions[rank]]);
    *place = rank < missing.num_victims ? missing.victims[rank] : *place >= kPendingFresh ? kFresh : kInHost;
  }
  tier.counters[kTierClock] = now;
  if (missing.num > 0) tier.counters[kTierTicket] = 0;
  return nullptr;
}

LaunchError LaunchBringAhead(Stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                             const Moves& moves, void* workspace) {
  uint32_t num_hits = 0;
  const Missing missing = FindMissing(tier, row_ids, num_keys, workspace, true, &num_hits);
  std::fill_n(moves.counts, kNumMoveCounts, 0);
  const int64_t most = MostAhead(tier.host_bytes);
  for (int64_t rank = 0; rank < missing.num; ++rank) {
    const uint32_t row_id = row_ids[missing.positions[rank]];
    uint32_t* place = tier.PlaceAt(row_id);
    if (*place < kPendingFresh && rank < most) {
      moves.coming[moves.counts[kNumComing]++] = {static_cast<uint32_t>(rank), row_id, 0, kNoRow};
    }
    *place = *place >= kPendingFresh ? kFresh : kInHost;
    if (rank >= std::min(missing.num_victims, most)) continue;
    const uint32_t slot = missing.victims[rank];
    if (tier.owners[slot].free_id >= tier.capacity) continue;
    moves.leaving[moves.counts[kNumLeaving]++] = {slot, tier.owners[slot].free_id, 0, kNoRow};
    tier.last_use[slot] = kMarked;
  }
  moves.counts[kNumFromHost] = moves.counts[kNumComing];
  tier.counters[kTierClock] += 1;
  tier.counters[kTierTicket] = missing.num > 0 ? tier.counters[kTierClock] : 0;
  return nullptr;
}

LaunchError LaunchWrite(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                        int64_t most_moves, uint32_t begin) {
  const int64_t num_moves = std::min<int64_t>(counts[kNumLeaving], most_moves);
  RunRanges(stream, num_moves, kRowsPerTask, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const uint32_t row_id = leaving[i].row_id - begin;  // a row of another slab is beyond the capacity
      if (leaving[i].row_id != kNoRow && row_id < tier.capacity && leaving[i].slot < tier.num_lines) {
        WriteToHost(tier, leaving[i].slot, row_id);
      }
    }
  });
  return nullptr;
}

LaunchError LaunchRead(Stream stream, const TierView& tier, const Move* coming, const uint32_t* counts,
                       int64_t most_moves) {
  const int64_t num_moves = std::min<int64_t>(counts[kNumComing], most_moves);
  RunRanges(stream, num_moves, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Move& move = coming[i];
      if (move.row_id >= tier.capacity || move.slot >= tier.num_lines + tier.num_staged) continue;
      if (move.is_fresh != 0) {
        MakeFresh(tier, *tier.OwnerAt(move.slot), move.slot);
      } else {
        ReadFromHost(tier, move.row_id, move.slot);
      }
    }
  });
  return nullptr;
}

LaunchError LaunchWriteAhead(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                             int64_t most_moves, uint32_t begin) {
  return LaunchWrite(stream, tier, leaving, counts, most_moves, begin);
}

LaunchError LaunchReadAhead(Stream, const TierView&, const Move*, const uint32_t*, int64_t) { return nullptr; }

LaunchError LaunchWait(Stream, const TierView&) { return nullptr; }

LaunchError LaunchPeek(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                       uint32_t* slots) {
  RunRanges(stream, num_keys, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row_id = row_ids[i], staged = tier.num_lines + static_cast<uint32_t>(i);
      const uint32_t place = row_id < tier.capacity ? *tier.PlaceAt(row_id) : kNoRow;
      Record* owner = tier.OwnerAt(staged);
      *owner = {kPaddingKey, kNoRow, kNoRow};
      const bool is_row = row_id < tier.capacity && tier.IsUsed(row_id, place);
      slots[i] = !is_row ? kNoRow : place < tier.num_slots ? place : staged;
      if (slots[i] != staged) continue;
      const Record& record = *tier.records.At(tier.starts, row_id, 1);
      if (place == kInHost) {
        ReadFromHost(tier, row_id, staged);
      } else {
        MakeFresh(tier, record, staged);
      }
      *owner = {record.key, record.table, row_id};
    }
  });
  return nullptr;
}

}  // namespace jaxsok

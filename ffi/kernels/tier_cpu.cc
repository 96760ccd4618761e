// Tiers on a CPU (tier.h says what).
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

}  // namespace

LaunchError LaunchBring(Stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots,
                        Move* moves, void* workspace) {
  WorkspaceCutter cut(workspace);
  int64_t* ages = cut.Take<int64_t>(kAges);
  uint32_t* missing = cut.Take<uint32_t>(num_keys);  // the positions of rows that are not here, first occurrences
  uint32_t* victims = cut.Take<uint32_t>(num_keys);
  const uint32_t now = tier.counters[kTierClock] + 1;
  int64_t num_missing = 0;

  // Pending places are ranks, on a CPU, so that the positions of a row find the slot of the first one.
  for (int64_t i = 0; i < num_keys; ++i) {
    if (row_ids[i] >= tier.capacity) continue;
    uint32_t* place = tier.PlaceAt(row_ids[i]);
    if (*place < tier.num_slots) {
      if (tier.last_use[*place] != now) ++tier.counters[kTierHits];
      tier.last_use[*place] = now;
    } else if ((*place == kFresh || *place == kInHost) && tier.IsUsed(row_ids[i], *place)) {
      *place = (*place == kFresh ? kPendingFresh : kPendingInHost) + static_cast<uint32_t>(num_missing);
      missing[num_missing++] = static_cast<uint32_t>(i);
    }
  }

  int64_t num_victims = 0;
  if (num_missing > 0) {
    std::fill_n(ages, kAges, 0);
    for (uint32_t slot = 0; slot < tier.num_slots; ++slot) ++ages[tier.AgeOf(tier.last_use[slot], now)];
    int youngest = kAges - 1;  // that leaves: all older slots do, and the first ones of this age
    int64_t num_older = 0;
    while (youngest > 1 && num_older + ages[youngest] < num_missing) num_older += ages[youngest--];
    num_victims = std::min(num_missing, num_older + ages[youngest]);
    int64_t older = 0, equal = num_older;
    for (uint32_t slot = 0; slot < tier.num_slots; ++slot) {
      const int age = tier.AgeOf(tier.last_use[slot], now);
      if (age > youngest) victims[older++] = slot;
      if (age == youngest && equal < num_victims) victims[equal++] = slot;
    }
  }
  const auto slot_of = [&](int64_t rank) {
    return rank < num_victims ? victims[rank] : tier.num_lines + static_cast<uint32_t>(rank - num_victims);
  };

  std::fill_n(tier.staged_owners, tier.num_staged, Record{kPaddingKey, kNoRow, kNoRow});
  std::fill_n(moves, num_keys, Move{kNoRow, kNoRow, kNoRow, kNoRow});
  for (int64_t rank = 0; rank < num_missing; ++rank) {
    const uint32_t row_id = row_ids[missing[rank]], slot = slot_of(rank);
    Record* owner = tier.OwnerAt(slot);
    Move& move = moves[rank];
    move = {slot, kNoRow, row_id, *tier.PlaceAt(row_id) >= kPendingFresh ? 1u : 0u};
    if (rank < num_victims && owner->free_id < tier.capacity) {
      move.leaving = owner->free_id;
      *tier.PlaceAt(owner->free_id) = kInHost;
      ++tier.counters[kTierWritten];
    }
    tier.counters[kTierFetched] += 1 - move.is_fresh;
    const Record& record = *tier.records.At(tier.starts, row_id, 1);
    *owner = {record.key, record.table, row_id};
    if (rank < num_victims) tier.last_use[slot] = now;
  }
  for (int64_t i = 0; i < num_keys; ++i) {
    slots[i] = kNoRow;
    if (row_ids[i] >= tier.capacity) continue;
    const uint32_t place = *tier.PlaceAt(row_ids[i]);
    if (place < tier.num_slots) slots[i] = place;
    if (place >= kPendingInHost && place < kInHost) slots[i] = slot_of(place % kMostSlots);
    if (place == kFresh) slots[i] = 0;
  }
  for (int64_t rank = 0; rank < num_missing; ++rank) {
    uint32_t* place = tier.PlaceAt(row_ids[missing[rank]]);
    *place = rank < num_victims ? victims[rank] : *place >= kPendingFresh ? kFresh : kInHost;
  }
  tier.counters[kTierClock] = now;
  return nullptr;
}

LaunchError LaunchWrite(Stream stream, const TierView& tier, const Move* moves, int64_t num_moves, uint32_t begin) {
  RunRanges(stream, num_moves, kRowsPerTask, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const uint32_t row_id = moves[i].leaving - begin;  // one of another slab is beyond the capacity
      if (moves[i].leaving != kNoRow && row_id < tier.capacity && moves[i].slot < tier.num_lines) {
        WriteToHost(tier, moves[i].slot, row_id);
      }
    }
  });
  return nullptr;
}

LaunchError LaunchRead(Stream stream, const TierView& tier, const Move* moves, int64_t num_moves) {
  RunRanges(stream, num_moves, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Move& move = moves[i];
      if (move.coming >= tier.capacity || move.slot >= tier.num_lines + tier.num_staged) continue;
      if (move.is_fresh != 0) {
        MakeFresh(tier, *tier.OwnerAt(move.slot), move.slot);
      } else {
        ReadFromHost(tier, move.coming, move.slot);
      }
    }
  });
  return nullptr;
}

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

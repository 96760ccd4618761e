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

void WriteToHost(const TierView& tier, uint32_t slot, uint32_t record) {
  char* to = tier.HostAt(record);
  std::memcpy(to, tier.RowAt(slot), static_cast<size_t>(tier.RowBytes()));
  for (int k = 0; k < tier.states.num_states; ++k) {
    std::memcpy(to + tier.state_begin[k], tier.StateAt(k, slot), tier.states.width[k] * sizeof(float));
  }
}

void ReadFromHost(const TierView& tier, uint32_t record, uint32_t slot) {
  const char* from = tier.HostAt(record);
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
  uint32_t num_hits = 0;  // distinct rows that are in the cache
  int64_t num = 0;
  uint32_t* positions;  // first occurrences
  uint32_t* from;       // their places before the call
  int64_t num_victims = 0;
  uint32_t* victims;

  uint32_t SlotOf(const TierView& tier, int64_t rank) const {
    return rank < num_victims ? victims[rank] : tier.num_lines + static_cast<uint32_t>(rank - num_victims);
  }
};

/// Counts the row of a slot as used.
void Use(const TierView& tier, uint32_t slot, uint32_t now) {
  if (!TierView::BeginsUse(tier.last_use[slot], tier.priority[slot], now)) return;
  tier.priority[slot] = MeanUse::OfPriority(tier.priority[slot]).After(now).Priority();
  tier.last_use[slot] = now;
}

/// Pins the slots of rows in the cache, and counts them. The places of other rows become pending, with their rank, so
/// that all positions of a row find its slot.
Missing FindMissing(const TierView& tier, const uint32_t* row_ids, int64_t num_keys, WorkspaceCutter* cut) {
  Missing missing;
  missing.positions = cut->Take<uint32_t>(num_keys);
  missing.from = cut->Take<uint32_t>(num_keys);
  missing.victims = cut->Take<uint32_t>(num_keys);
  const uint32_t now = tier.Now();
  for (int64_t i = 0; i < num_keys; ++i) {
    if (row_ids[i] >= tier.capacity) continue;
    uint32_t* place = tier.PlaceAt(row_ids[i]);
    if (*place < tier.num_slots) {
      uint32_t* priority = tier.priority + *place;
      if ((*priority & kPinned) != 0) continue;
      ++missing.num_hits;
      Use(tier, *place, now);
      *priority |= kPinned;
    } else if ((*place == kFresh || IsInHost(*place)) && tier.IsUsed(row_ids[i], *place)) {
      missing.from[missing.num] = *place;
      *place = kPending + static_cast<uint32_t>(missing.num);
      missing.positions[missing.num++] = static_cast<uint32_t>(i);
    }
  }
  return missing;
}

/// Chooses the slots that missing rows take.
void ChooseSlots(const TierView& tier, bool is_ahead, int64_t num_keys, WorkspaceCutter* cut, Missing* missing) {
  int64_t* ages = cut->Take<int64_t>(kAges);
  const uint32_t now = tier.Now();
  const SlotWindow window = SlotWindow::Of(tier.num_slots, num_keys);
  const uint32_t first_tile = window.First(tier.counters[kTierWindow]);
  const auto age_of = [&](int64_t slot) -> int {
    if (slot >= tier.num_slots) return 0;  // as if it were in use
    return is_ahead && tier.IsRecent(tier.last_use[slot], now) ? 0 : tier.AgeOf(tier.priority[slot], now);
  };
  std::fill_n(ages, kAges, 0);
  for (int64_t i = 0; i < window.size(); ++i) ++ages[age_of(window.SlotAt(first_tile, i))];
  int youngest = kAges - 1;  // the youngest age that leaves: all older slots do, and the first ones of this age
  int64_t num_older = 0;
  while (youngest > 1 && num_older + ages[youngest] < missing->num) num_older += ages[youngest--];
  const int64_t num_victims = std::min(missing->num, num_older + ages[youngest]);
  int64_t num_equal = num_victims - num_older, at = 0;
  for (int64_t i = 0; i < window.size(); ++i) {
    const int64_t slot = window.SlotAt(first_tile, i);
    const int age = age_of(slot);
    if (age > youngest || (age == youngest && num_equal-- > 0)) missing->victims[at++] = static_cast<uint32_t>(slot);
  }
  if (num_victims != 0) tier.counters[kTierWindow] = window.Next(first_tile);
  missing->num_victims = num_victims;
}

/// Counts the rows whose slots are known as used. Returns whether each row has its slot, or may come as foreseen.
bool UseKnown(const TierView& tier, const uint32_t* row_ids, int64_t num_keys, const SlotList& known) {
  if (!tier.MayHold(*known.stamp)) return false;
  const bool comes = known.stamp->ticket != 0;
  const uint32_t num_foreseen = comes ? tier.counters[kTierForeseen] : 0;
  bool holds = true;
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t slot = known.slots[i], rank = TierView::RankOf(slot);
    if (row_ids[i] >= tier.capacity) {
      holds &= slot == kNoRow;
    } else if (slot < tier.num_slots && tier.owners[slot].free_id == row_ids[i]) {
      holds &= !comes || !IsMarked(tier.priority[slot]);  // marked, it is foreseen for another row
      Use(tier, slot, tier.Now());
    } else {
      holds &= rank < num_foreseen && tier.foreseen[rank].row_id == row_ids[i];
    }
  }
  for (const Foreseen* at = tier.foreseen; at != tier.foreseen + num_foreseen; ++at) {
    holds &= tier.MayCome(*at, at->slot < tier.num_slots ? tier.priority[at->slot] : 0);
  }
  return holds;
}

/// Gives a leaving row a record in the page of another one, if there is one without content.
void TakeRecordNear(const TierView& tier, uint32_t record, uint32_t leaving) {
  const RecordRange page = tier.PageOf(record);
  const uint32_t own = tier.RecordOf(leaving);
  if (page.begin <= own && own < page.end) return;
  for (uint32_t near = page.begin; near < page.end; ++near) {
    const uint32_t tenant = *tier.TenantAt(near), other = tier.RowOf(near, tenant);
    if ((tenant & kIsFull) != 0 || !tier.MayExchange(other)) continue;
    tier.SetHome(other, own);
    tier.NoteContent(other, own, false);
    tier.SetHome(leaving, near);
    tier.NoteContent(leaving, near, false);
    return;
  }
}

void Unpin(const TierView& tier, const uint32_t* row_ids, int64_t num_keys) {
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t place = row_ids[i] < tier.capacity ? *tier.PlaceAt(row_ids[i]) : kNoRow;
    if (place < tier.num_slots) tier.priority[place] &= ~kPinned;
  }
}

}  // namespace

LaunchError LaunchBring(Stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, const SlotList& known,
                        const SlotList& list, const Moves& moves, void* workspace) {
  WorkspaceCutter cut(workspace);
  const bool holds = UseKnown(tier, row_ids, num_keys, known);
  Missing missing;
  if (holds) {
    missing.num_hits = known.stamp->num_rows;
  } else {
    missing = FindMissing(tier, row_ids, num_keys, &cut);
  }
  const uint32_t now = tier.Now();
  const bool has_ahead = tier.counters[kTierTicket] != 0;  // rows written ahead have arrived: a CPU writes at once
  std::fill_n(tier.staged_owners, tier.num_staged, Record{kPaddingKey, kNoRow, kNoRow});
  std::fill_n(moves.counts, kNumMoveCounts, 0);
  const auto take_slot = [&](uint32_t row_id, uint32_t slot, uint32_t priority, bool is_fresh) {
    Record* owner = tier.OwnerAt(slot);
    const bool is_kept = !tier.IsStaged(slot);
    if (is_kept && owner->free_id < tier.capacity) {
      if (!has_ahead || !IsMarked(tier.priority[slot])) {
        moves.leaving[moves.counts[kNumLeaving]++] = {slot, owner->free_id, tier.RecordOf(owner->free_id), kNoRow};
      }
      *tier.PlaceAt(owner->free_id) = MeanUse::OfPriority(tier.priority[slot]).PlaceInHost();
      tier.NoteContent(owner->free_id, tier.RecordOf(owner->free_id), true);
      ++tier.counters[kTierWritten];
    }
    moves.coming[moves.counts[kNumComing]++] = {slot, row_id, is_fresh ? kNoRow : tier.RecordOf(row_id), kNoRow};
    tier.counters[kTierFetched] += is_fresh ? 0 : 1;
    const Record& record = *tier.records.At(tier.starts, row_id, 1);
    *owner = {record.key, record.table, row_id};
    if (!is_kept) return;
    tier.last_use[slot] = now;
    tier.priority[slot] = priority | kPinned;
    *tier.PlaceAt(row_id) = slot;
    tier.NoteContent(row_id, tier.RecordOf(row_id), false);
  };
  const bool comes = holds ? known.stamp->ticket != 0 : missing.num != 0;  // a row
  const int64_t num_foreseen =
      has_ahead && comes ? std::min<int64_t>(tier.counters[kTierForeseen], tier.most_foreseen) : 0;
  for (const Foreseen* at = tier.foreseen; at != tier.foreseen + num_foreseen; ++at) {
    if (!tier.MayCome(*at, at->slot < tier.num_slots ? tier.priority[at->slot] : 0)) continue;
    if (!holds && !IsPending(*tier.PlaceAt(at->row_id))) continue;
    take_slot(at->row_id, at->slot, at->priority, at->is_fresh != 0);
  }
  int64_t num_left = 0;
  for (int64_t rank = 0; rank < missing.num; ++rank) {
    uint32_t* place = tier.PlaceAt(row_ids[missing.positions[rank]]);
    if (!IsPending(*place)) continue;
    *place = kPending + static_cast<uint32_t>(num_left);
    missing.positions[num_left] = missing.positions[rank];
    missing.from[num_left++] = missing.from[rank];
  }
  missing.num = num_left;
  if (num_left != 0) ChooseSlots(tier, false, num_keys, &cut, &missing);
  for (int64_t rank = 0; rank < num_left; ++rank) {
    const uint32_t from = missing.from[rank];
    take_slot(row_ids[missing.positions[rank]], missing.SlotOf(tier, rank), MeanUse::AfterPlace(from, now).Priority(),
              from == kFresh);
  }
  for (int64_t i = 0; i < num_keys; ++i) {
    list.slots[i] = holds && known.slots[i] < tier.num_slots ? known.slots[i] : kNoRow;
    if (row_ids[i] >= tier.capacity || list.slots[i] != kNoRow) continue;
    const uint32_t place = *tier.PlaceAt(row_ids[i]);
    if (place < tier.num_slots) list.slots[i] = place;
    if (IsPending(place)) list.slots[i] = missing.SlotOf(tier, place - kPending);
    if (place == kFresh) list.slots[i] = 0;
  }
  for (int64_t rank = missing.num_victims; rank < num_left; ++rank) {
    *tier.PlaceAt(row_ids[missing.positions[rank]]) = missing.from[rank];
  }
  Unpin(tier, row_ids, num_keys);
  tier.counters[kTierHits] += missing.num_hits;
  tier.counters[kTierClock] += 1;
  if (comes) tier.counters[kTierTicket] = 0;
  const bool is_complete = missing.num_victims == num_left;  // no row is staged
  *list.stamp = {is_complete ? 1u : 0u, 0, missing.num_hits + moves.counts[kNumComing], 0};
  return nullptr;
}

LaunchError LaunchBringAhead(Stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                             const SlotList& list, const Moves& moves, void* workspace) {
  WorkspaceCutter cut(workspace);
  Missing missing = FindMissing(tier, row_ids, num_keys, &cut);
  for (int64_t i = 0; i < std::min<int64_t>(tier.counters[kTierForeseen], tier.most_foreseen); ++i) {
    const uint32_t slot = tier.foreseen[i].slot;
    if (slot < tier.num_slots) tier.priority[slot] &= ~kMark;
  }
  if (missing.num != 0) ChooseSlots(tier, true, num_keys, &cut, &missing);
  std::fill_n(moves.counts, kNumMoveCounts, 0);
  const int64_t num_listed = std::min({missing.num_victims, MostAhead(tier.host_bytes), tier.most_foreseen});
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t place = row_ids[i] < tier.capacity ? *tier.PlaceAt(row_ids[i]) : kNoRow;
    const bool is_listed = IsPending(place) && place - kPending < num_listed;
    list.slots[i] = is_listed ? (place - kPending) | kIsForeseen : place < tier.num_slots ? place : kNoRow;
  }
  for (int64_t rank = 0; rank < missing.num; ++rank) {
    const uint32_t row_id = row_ids[missing.positions[rank]], from = missing.from[rank];
    *tier.PlaceAt(row_id) = from;
    if (rank >= num_listed) continue;
    const uint32_t slot = missing.victims[rank], is_fresh = from == kFresh ? 1 : 0;
    tier.foreseen[rank] = {row_id, slot, MeanUse::AfterPlace(from, tier.Now()).Priority(), is_fresh};
    if (is_fresh == 0) {
      moves.coming[moves.counts[kNumComing]++] = {static_cast<uint32_t>(rank), row_id, tier.RecordOf(row_id), kNoRow};
    }
    if (tier.owners[slot].free_id >= tier.capacity) continue;
    const uint32_t leaving = tier.owners[slot].free_id;
    tier.priority[slot] |= kMark;
    if (is_fresh == 0) TakeRecordNear(tier, tier.RecordOf(row_id), leaving);
    moves.leaving[moves.counts[kNumLeaving]++] = {slot, leaving, tier.RecordOf(leaving), kNoRow};
  }
  Unpin(tier, row_ids, num_keys);
  moves.counts[kNumFromHost] = moves.counts[kNumComing];
  tier.counters[kTierClock] += 1;
  tier.counters[kTierTicket] = missing.num > 0 ? tier.counters[kTierClock] : 0;
  tier.counters[kTierForeseen] = static_cast<uint32_t>(num_listed);
  *list.stamp = {num_listed == missing.num ? 1u : 0u, tier.counters[kTierTicket], missing.num_hits,
                 tier.counters[kTierForeseen]};
  return nullptr;
}

LaunchError LaunchWrite(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                        int64_t most_moves, uint32_t begin) {
  const int64_t num_moves = std::min<int64_t>(counts[kNumLeaving], most_moves);
  RunRanges(stream, num_moves, kRowsPerTask, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const uint32_t record = leaving[i].record - begin;  // a record of another slab is beyond the capacity
      if (leaving[i].row_id != kNoRow && record < tier.capacity && leaving[i].slot < tier.num_lines) {
        WriteToHost(tier, leaving[i].slot, record);
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
      if (move.record >= tier.capacity) {
        MakeFresh(tier, *tier.OwnerAt(move.slot), move.slot);
      } else {
        ReadFromHost(tier, move.record, move.slot);
      }
    }
  });
  return nullptr;
}

LaunchError LaunchWriteAhead(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                             int64_t most_moves, uint32_t begin) {
  return LaunchWrite(stream, tier, leaving, counts, most_moves, begin);
}

LaunchError LaunchReadAhead(Stream, const TierView&) { return nullptr; }

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
      if (IsInHost(place)) {
        ReadFromHost(tier, tier.RecordOf(row_id), staged);
      } else {
        MakeFresh(tier, record, staged);
      }
      *owner = {record.key, record.table, row_id};
    }
  });
  return nullptr;
}

}  // namespace jaxsok

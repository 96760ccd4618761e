// Tiers on a CPU (tier.h says what).
#include <algorithm>
#include <atomic>
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

LaunchError LaunchBring(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots,
                        void* workspace) {
  WorkspaceCutter cut(workspace);
  int64_t* ages = cut.Take<int64_t>(kAges);
  uint32_t* missing = cut.Take<uint32_t>(num_keys);  // the positions of rows that are not here, first occurrences
  uint32_t* victims = cut.Take<uint32_t>(num_keys);
  const uint32_t now = tier.counters[kTierClock] + 1;
  uint32_t num_hits = 0;
  int64_t num_missing = 0;

  // Pending places are ranks, on a CPU, so that the positions of a row find the slot of the first one.
  for (int64_t i = 0; i < num_keys; ++i) {
    if (row_ids[i] >= tier.capacity) continue;
    uint32_t* place = tier.PlaceAt(row_ids[i]);
    if (*place < tier.num_slots) {
      if (tier.last_use[*place] != now) {
        tier.last_use[*place] = now;
        ++num_hits;
      }
    } else if ((*place == kFresh || *place == kInHost) && tier.IsUsed(row_ids[i], *place)) {
      *place = (*place == kFresh ? kPendingFresh : kPendingInHost) + static_cast<uint32_t>(num_missing);
      missing[num_missing++] = static_cast<uint32_t>(i);
    }
  }

  int64_t num_victims = 0;
  if (num_missing > 0) {
    std::fill_n(ages, kAges, 0);
    for (uint32_t slot = 0; slot < tier.num_slots; ++slot) ++ages[tier.AgeOf(tier.last_use[slot], now)];
    int oldest = kAges - 1;  // the youngest age that leaves: all older slots do, and the first ones of this age
    int64_t num_older = 0;
    while (oldest > 1 && num_older + ages[oldest] < num_missing) num_older += ages[oldest--];
    num_victims = std::min(num_missing, num_older + ages[oldest]);
    int64_t older = 0, equal = num_older;
    for (uint32_t slot = 0; slot < tier.num_slots; ++slot) {
      const int age = tier.AgeOf(tier.last_use[slot], now);
      if (age > oldest) victims[older++] = slot;
      if (age == oldest && equal < num_victims) victims[equal++] = slot;
    }
  }
  const auto slot_of = [&](int64_t rank) {
    return rank < num_victims ? victims[rank] : tier.num_lines + static_cast<uint32_t>(rank - num_victims);
  };

  for (uint32_t s = 0; s < tier.num_staged; ++s) tier.staged_owners[s] = {kPaddingKey, kNoRow, kNoRow};
  std::atomic<uint32_t> num_fetched{0}, num_written{0};
  RunRanges(stream, num_missing, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t rank = begin; rank < end; ++rank) {
      const uint32_t row_id = row_ids[missing[rank]], slot = slot_of(rank);
      Record* owner = tier.OwnerAt(slot);
      if (rank < num_victims && owner->free_id < tier.capacity) {
        WriteToHost(tier, slot, owner->free_id);
        *tier.PlaceAt(owner->free_id) = kInHost;
        num_written.fetch_add(1, std::memory_order_relaxed);
      }
      const Record& record = *tier.records.At(tier.starts, row_id, 1);
      if (*tier.PlaceAt(row_id) >= kPendingFresh) {
        MakeFresh(tier, record, slot);
      } else {
        ReadFromHost(tier, row_id, slot);
        num_fetched.fetch_add(1, std::memory_order_relaxed);
      }
      *owner = {record.key, record.table, row_id};
      if (rank < num_victims) tier.last_use[slot] = now;
    }
  });
  for (int64_t i = 0; i < num_keys; ++i) {
    if (row_ids[i] >= tier.capacity) {
      slots[i] = kNoRow;
      continue;
    }
    const uint32_t place = *tier.PlaceAt(row_ids[i]);
    slots[i] = place < tier.num_slots                   ? place
               : place < kInHost && place >= kMostSlots ? slot_of(place % kMostSlots)
               : place == kFresh                        ? 0
                                                        : kNoRow;
  }
  for (int64_t rank = 0; rank < num_missing; ++rank) {
    uint32_t* place = tier.PlaceAt(row_ids[missing[rank]]);
    *place = rank < num_victims ? victims[rank] : *place >= kPendingFresh ? kFresh : kInHost;
  }
  tier.counters[kTierClock] = now;
  tier.counters[kTierHits] += num_hits;
  tier.counters[kTierFetched] += num_fetched.load();
  tier.counters[kTierWritten] += num_written.load();
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

LaunchError LaunchReturn(Stream stream, const TierView& tier) {
  RunRanges(stream, tier.num_staged, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const uint32_t row_id = tier.staged_owners[s].free_id;
      if (row_id >= tier.capacity) continue;
      WriteToHost(tier, tier.num_lines + static_cast<uint32_t>(s), row_id);
      *tier.PlaceAt(row_id) = kInHost;
    }
  });
  return nullptr;
}

LaunchError LaunchFlush(Stream stream, const TierView& tier) {
  RunRanges(stream, tier.num_lines, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const uint32_t row_id = tier.owners[slot].free_id;
      if (row_id < tier.capacity) WriteToHost(tier, static_cast<uint32_t>(slot), row_id);
    }
  });
  return nullptr;
}

}  // namespace jaxsok

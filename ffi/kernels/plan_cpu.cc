// The distinct keys of a batch on the CPU, and their order by owner.
//
// Positions are distributed over shares by the hash of their key, in order. A share is one task with its own small map,
// which finds the first position of each of its keys. Counting the first positions then numbers the keys.
//
// Requests are distributed in the same way over classes: an owner, or a part of the hashes of one owner. Within a class
// they keep their order, or are sorted by hash; a class is one task.
#include <algorithm>
#include <vector>

#include "index_cpu.h"
#include "plan.h"
#include "tickets.h"

namespace jaxsok {
namespace {

constexpr int kShareBits = 6;
constexpr int kNumShares = 1 << kShareBits;
constexpr int64_t kPositionsPerChunk = 8 * kKeysPerChunk;
constexpr uint32_t kNoPosition = ~uint32_t{0};
constexpr int32_t kIsPadding = -1;  // in `inverse`, while it still holds first positions
// At load 0.5 a walk of this length means keys aimed at one place under this salt: the share is sorted instead.
constexpr int kMaxSteps = 128;

/// One share's task: its positions in ascending order, and the arrays of the batch by position.
struct Share {
  const uint32_t* positions;
  int64_t size;
  uint32_t* slots;  // 4 * size: room for a power of two of at least twice the size
  const uint64_t* keys;
  const uint64_t* hashes;
  int32_t* first;          // out: the first position of the same key
  uint32_t* multiplicity;  // out, at first positions

  // Hashes of one key under two tables differ, since the table's step is odd and mixing is a bijection. So equal key
  // and equal hash mean equal table.
  bool IsSame(uint32_t a, uint32_t b) const { return hashes[a] == hashes[b] && keys[a] == keys[b]; }

  void Join(uint32_t position, uint32_t first_position) const {
    if (position == first_position) multiplicity[position] = 0;
    first[position] = static_cast<int32_t>(first_position);
    ++multiplicity[first_position];
  }

  /// Joins equal keys by a map. Returns false if a walk grew too long; its output is then invalid.
  bool JoinByMap() const {
    if (size == 0) return true;
    uint64_t num_slots = 1;
    while (num_slots < 2 * static_cast<uint64_t>(size)) num_slots *= 2;
    std::fill_n(slots, num_slots, kNoPosition);
    for (int64_t k = 0; k < size; ++k) {
      const uint32_t position = positions[k];
      uint64_t slot = hashes[position] & (num_slots - 1);
      for (int step = 0;; ++step) {
        if (step == kMaxSteps) return false;
        if (slots[slot] == kNoPosition) slots[slot] = position;
        if (IsSame(slots[slot], position)) break;
        slot = (slot + 1) & (num_slots - 1);
      }
      Join(position, slots[slot]);
    }
    return true;
  }

  void JoinBySort() const {
    std::vector<uint32_t> sorted(positions, positions + size);
    std::sort(sorted.begin(), sorted.end(), [this](uint32_t a, uint32_t b) {
      if (hashes[a] != hashes[b]) return hashes[a] < hashes[b];
      if (keys[a] != keys[b]) return keys[a] < keys[b];
      return a < b;
    });
    uint32_t first_position = kNoPosition;
    for (const uint32_t position : sorted) {
      if (first_position == kNoPosition || !IsSame(first_position, position)) first_position = position;
      Join(position, first_position);
    }
  }
};

/// The distinct (table, key) pairs of a batch, by first position; each array has room for `num_keys`.
struct DistinctView {
  uint64_t* keys;
  uint32_t* tables;
  uint32_t* multiplicity;  // occurrences of each
  int32_t* inverse;        // by position: its pair; num_keys for padding
};

/// Makes the keys of a batch distinct; returns their number.
int64_t MakeDistinct(Stream stream, const BatchView& batch, const BagFeatures& bags, uint64_t salt,
                     const DistinctView& distinct, void* workspace) {
  const BatchSource source = {batch.keys, &bags};
  const int64_t num_keys = batch.num_keys;
  const int64_t num_chunks = CeilDiv(num_keys, kPositionsPerChunk);
  WorkspaceCutter cutter(workspace);
  uint64_t* hashes = cutter.Take<uint64_t>(num_keys);
  uint32_t* dealt = cutter.Take<uint32_t>(num_keys);
  uint32_t* slots = cutter.Take<uint32_t>(4 * num_keys);
  uint32_t* multiplicity = cutter.Take<uint32_t>(num_keys);
  std::vector<int64_t> places(num_chunks * kNumShares, 0);
  std::vector<int64_t> share_starts(kNumShares + 1, 0);
  std::vector<int64_t> chunk_starts(num_chunks + 1, 0);
  const auto share_of = [&](int64_t i) { return hashes[i] >> (64 - kShareBits); };

  // Calls visit(first position, end, tables) for pieces of a chunk.
  const auto for_pieces = [&](int64_t chunk_begin, int64_t chunk_end, const auto& visit) {
    uint32_t tables[kKeysPerChunk];
    for (int64_t begin = chunk_begin; begin < chunk_end; begin += kKeysPerChunk) {
      const int64_t end = std::min(begin + kKeysPerChunk, chunk_end);
      source.Tables(begin, end, tables, [](uint32_t, int32_t) {});
      visit(begin, end, tables);
    }
  };

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t chunk_begin, int64_t chunk_end) {
    int64_t* counts = &places[chunk_begin / kPositionsPerChunk * kNumShares];
    for_pieces(chunk_begin, chunk_end, [&](int64_t begin, int64_t end, const uint32_t* tables) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t table = tables[i - begin];
        distinct.inverse[i] = table == kNoTable ? kIsPadding : 0;
        if (table == kNoTable) continue;
        hashes[i] = HashOf(batch.keys[i], table, salt);
        ++counts[share_of(i)];
      }
    });
  });

  int64_t place = 0;
  for (int p = 0; p < kNumShares; ++p) {
    share_starts[p] = place;
    for (int64_t c = 0; c < num_chunks; ++c) {
      const int64_t count = places[c * kNumShares + p];
      places[c * kNumShares + p] = place;
      place += count;
    }
  }
  share_starts[kNumShares] = place;

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    int64_t* next = &places[begin / kPositionsPerChunk * kNumShares];
    for (int64_t i = begin; i < end; ++i) {
      if (distinct.inverse[i] != kIsPadding) dealt[next[share_of(i)]++] = static_cast<uint32_t>(i);
    }
  });

  RunTasks(stream, kNumShares, [&](int64_t p) {
    const int64_t start = share_starts[p];
    const int64_t size = share_starts[p + 1] - start;
    const Share share = {dealt + start, size, slots + 4 * start, batch.keys, hashes, distinct.inverse, multiplicity};
    if (!share.JoinByMap()) share.JoinBySort();
  });

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    int64_t num_first = 0;
    for (int64_t i = begin; i < end; ++i) num_first += distinct.inverse[i] == i ? 1 : 0;
    chunk_starts[begin / kPositionsPerChunk + 1] = num_first;
  });
  for (int64_t c = 0; c < num_chunks; ++c) chunk_starts[c + 1] += chunk_starts[c];

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t chunk_begin, int64_t chunk_end) {
    int64_t next = chunk_starts[chunk_begin / kPositionsPerChunk];
    for_pieces(chunk_begin, chunk_end, [&](int64_t begin, int64_t end, const uint32_t* tables) {
      for (int64_t i = begin; i < end; ++i) {
        if (distinct.inverse[i] != i) continue;
        distinct.keys[next] = batch.keys[i];
        distinct.tables[next] = tables[i - begin];
        distinct.multiplicity[next] = multiplicity[i];
        multiplicity[i] = static_cast<uint32_t>(next++);  // from here on: its place among the distinct
      }
    });
  });

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t first = distinct.inverse[i];
      distinct.inverse[i] = static_cast<int32_t>(first == kIsPadding ? num_keys : multiplicity[first]);
    }
  });
  return chunk_starts[num_chunks];
}

/// Orders `num_items` by class, then by `hashes` if given, then by number.
///
/// `class_of(i)` is below num_classes; order[p] is the item at place p, starts[c] where class c begins.
template <typename ClassOf>
void OrderByClass(Stream stream, int64_t num_items, int64_t num_classes, const ClassOf& class_of,
                  const uint64_t* hashes, uint32_t* order, std::vector<uint32_t>& starts) {
  constexpr int64_t kMostGroups = 64;
  // A group has at least as many items as counts.
  const int64_t num_groups = std::clamp<int64_t>(num_items / std::max(num_classes, kPositionsPerChunk), 1, kMostGroups);
  std::vector<uint32_t> places(num_groups * num_classes, 0);
  starts.assign(num_classes + 1, 0);
  const auto for_group = [&](int64_t group, const auto& visit) {
    uint32_t* own = &places[group * num_classes];
    const int64_t end = (group + 1) * num_items / num_groups;
    for (int64_t i = group * num_items / num_groups; i < end; ++i) visit(own[class_of(i)], static_cast<uint32_t>(i));
  };

  RunTasks(stream, num_groups, [&](int64_t group) { for_group(group, [](uint32_t& count, uint32_t) { ++count; }); });
  uint32_t place = 0;
  for (int64_t c = 0; c < num_classes; ++c) {
    starts[c] = place;
    for (int64_t g = 0; g < num_groups; ++g) {
      const uint32_t count = places[g * num_classes + c];
      places[g * num_classes + c] = place;
      place += count;
    }
  }
  starts[num_classes] = place;
  RunTasks(stream, num_groups,
           [&](int64_t group) { for_group(group, [&](uint32_t& next, uint32_t item) { order[next++] = item; }); });
  if (hashes == nullptr) return;
  constexpr int64_t kClassesPerTask = 16;
  RunRanges(stream, num_classes, kClassesPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      std::sort(order + starts[c], order + starts[c + 1],
                [hashes](uint32_t a, uint32_t b) { return hashes[a] != hashes[b] ? hashes[a] < hashes[b] : a < b; });
    }
  });
}

}  // namespace

LaunchError LaunchPlanRequests(Stream stream, const BatchView& batch, uint64_t salt, const OwnersView& owners,
                               const RequestsView& out, void* workspace) {
  if (owners.num_shards < 1 || owners.num_shards > kMaxShards) return "num_shards: must be 1 to kMaxShards";
  const BagFeatures bags(stream, batch);
  if (LaunchError error = bags.ErrorWithTables(owners.num_tables)) return error;
  const int64_t num_keys = batch.num_keys;
  if (LaunchError error = LaunchTicketsDigest(stream, {batch.keys, num_keys}, out.digest)) return error;
  WorkspaceCutter cutter(workspace);
  DistinctView distinct;
  distinct.keys = cutter.Take<uint64_t>(num_keys);
  distinct.tables = cutter.Take<uint32_t>(num_keys);
  distinct.multiplicity = cutter.Take<uint32_t>(num_keys);
  distinct.inverse = out.inverse;
  uint32_t* place_of = cutter.Take<uint32_t>(num_keys);
  WorkspaceCutter ordering = cutter;  // the workspace of making keys distinct is free again afterwards
  void* making = cutter.Take<char>(DistinctWorkspaceBytes(num_keys));
  const int64_t num_unique = MakeDistinct(stream, batch, bags, salt, distinct, making);

  const bool by_hash = out.hashes != nullptr;
  constexpr int64_t kRequestsPerClass = 128;  // small enough to sort in a core's L1 cache
  constexpr int kMostHashBits = 12;
  int hash_bits = 0;
  while (by_hash && hash_bits < kMostHashBits &&
         (int64_t{owners.num_shards} << hash_bits) * kRequestsPerClass < num_unique) {
    ++hash_bits;
  }
  uint64_t* hashes = ordering.Take<uint64_t>(num_keys);
  uint32_t* classes = ordering.Take<uint32_t>(num_keys);
  uint32_t* order = ordering.Take<uint32_t>(num_keys);
  RunRanges(stream, num_unique, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const uint32_t owner = owners.Of(distinct.keys[u], distinct.tables[u]);
      hashes[u] = RoundHash(owners.HashOf(distinct.keys[u], distinct.tables[u]));
      classes[u] = owner << hash_bits | (hash_bits == 0 ? 0 : static_cast<uint32_t>(hashes[u] >> (64 - hash_bits)));
    }
  });
  std::vector<uint32_t> starts;
  OrderByClass(
      stream, num_unique, int64_t{owners.num_shards} << hash_bits, [&](int64_t u) { return classes[u]; },
      by_hash ? hashes : nullptr, order, starts);
  for (int64_t s = 0; s <= owners.num_shards; ++s) out.starts[s] = static_cast<int32_t>(starts[s << hash_bits]);

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const bool is_used = p < num_unique;
      const uint32_t u = is_used ? order[p] : 0;
      out.requests[p] = is_used ? Request{distinct.keys[u], distinct.tables[u], distinct.multiplicity[u]}
                                : Request{kPaddingKey, 0, 0};
      if (is_used) place_of[u] = static_cast<uint32_t>(p);
      if (by_hash) out.hashes[p] = is_used ? hashes[u] : ~uint64_t{0};
    }
  });
  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool is_padding = out.inverse[i] == num_keys;
      if (!is_padding) out.inverse[i] = static_cast<int32_t>(place_of[out.inverse[i]]);
      if (out.slots != nullptr) out.slots[i] = is_padding ? -1 : out.SlotOf(owners.num_shards, out.inverse[i]);
    }
  });
  return nullptr;
}

LaunchError LaunchPlanUses(Stream stream, const BatchView& batch, const OwnersView& owners, const UsesView& out,
                           void* workspace) {
  if (owners.num_shards < 1 || owners.num_shards > kMaxShards) return "num_shards: must be 1 to kMaxShards";
  const BagFeatures bags(stream, batch);
  if (LaunchError error = bags.ErrorWithTables(owners.num_tables)) return error;
  const int64_t num_shards = owners.num_shards, num_tiles = static_cast<int64_t>(bags.tiles().size());
  WorkspaceCutter cutter(workspace);
  uint32_t* owner_of = cutter.Take<uint32_t>(batch.num_keys);  // of positions in bags; kNoOwner: padding
  std::vector<int32_t> places(num_tiles * num_shards, 0);
  int32_t* starts = out.starts;

  RunTasks(stream, num_tiles, [&](int64_t t) {
    const Tile& tile = bags.tiles()[t];
    const FeatureView& feature = bags.features()[tile.feature];
    for (int64_t i = feature.BagBegin(tile.bag_begin); i < feature.BagBegin(tile.bag_end); ++i) {
      owner_of[i] = kNoOwner;
      if (batch.keys[i] == kPaddingKey) continue;
      owner_of[i] = owners.Of(batch.keys[i], feature.table);
      ++places[t * num_shards + owner_of[i]];
    }
  });

  int32_t place = 0;
  for (int64_t s = 0; s < num_shards; ++s) {
    starts[s] = place;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int32_t count = places[t * num_shards + s];
      places[t * num_shards + s] = place;
      place += count;
    }
  }
  starts[num_shards] = place;
  for (int64_t s = 0; s < num_shards; ++s) {
    out.offsets[s * (out.num_bags + 1) + out.num_bags] = starts[s + 1] - starts[s];
  }

  RunTasks(stream, num_tiles, [&](int64_t t) {
    const Tile& tile = bags.tiles()[t];
    const FeatureView& feature = bags.features()[tile.feature];
    int32_t* next = &places[t * num_shards];
    for (int64_t b = tile.bag_begin; b < tile.bag_end; ++b) {
      const int64_t bag = batch.features[int64_t{tile.feature} * kNumFeatureWords + kFeatureBagStart] + b;
      BagDivisor divisor(feature.combiner, feature.weights != nullptr);
      const int64_t begin = feature.BagBegin(b), end = feature.BagBegin(b + 1);
      for (int64_t i = begin; i < end; ++i) {
        if (owner_of[i] != kNoOwner) divisor.Add(feature.WeightAt(i));
      }
      const bool is_divided = BagDivisor::IsNeeded(feature.combiner);
      const bool is_left_out = is_divided && divisor.IsZero();
      out.scales[bag] = ScaleOfBag(is_divided, is_left_out, divisor.Scale());
      const uint32_t table = feature.table | (is_left_out ? kLeftOut : 0);
      for (int64_t s = 0; s < num_shards; ++s) out.offsets[s * (out.num_bags + 1) + bag] = next[s] - starts[s];
      for (int64_t i = begin; i < end; ++i) {
        if (owner_of[i] != kNoOwner) out.Put(next[owner_of[i]]++, {batch.keys[i], table, feature.WeightAt(i)});
      }
    }
  });
  RunRanges(stream, batch.num_keys - place, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out.Put(place + i, {kPaddingKey, 0, 0.0f});
  });
  return nullptr;
}

}  // namespace jaxsok

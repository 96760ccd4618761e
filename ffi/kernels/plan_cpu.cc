// The distinct keys of a batch on the CPU.
//
// Positions are dealt to partitions by the hash of their key, in order; a partition is one task with a small map of
// its own, which finds the first position of each of its keys. Counting first positions then numbers the keys.
#include <algorithm>
#include <vector>

#include "index_cpu.h"
#include "plan.h"

namespace jaxsok {
namespace {

constexpr int kPartitionBits = 6;
constexpr int kNumPartitions = 1 << kPartitionBits;
constexpr int64_t kPositionsPerChunk = 8 * kKeysPerChunk;
constexpr uint32_t kNoPosition = ~uint32_t{0};
constexpr int32_t kIsPadding = -1;  // in `inverse`, while it still holds first positions
constexpr uint64_t kPlanSalt = kGolden;
// A walk this long at load 0.5 means keys aimed at one place: the partition is sorted instead.
constexpr int kMaxSteps = 128;

/// One partition's task: its positions in ascending order, and all of the batch by position.
struct Partition {
  const uint32_t* positions;
  int64_t size;
  uint32_t* slots;  // 4 * size: room for a power of two of at least twice the size
  const uint64_t* keys;
  const uint64_t* hashes;
  int32_t* first;          // out: the first position of the same key
  uint32_t* multiplicity;  // out, at first positions

  // Hashes of one key under two tables differ, since the table's step is odd and mixing loses nothing: so equal key
  // and equal hash mean equal table.
  bool IsSame(uint32_t a, uint32_t b) const { return hashes[a] == hashes[b] && keys[a] == keys[b]; }

  void Join(uint32_t position, uint32_t first_position) const {
    if (position == first_position) multiplicity[position] = 0;
    first[position] = static_cast<int32_t>(first_position);
    ++multiplicity[first_position];
  }

  /// Returns false when a walk grew too long; then nothing that it wrote counts.
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

}  // namespace

LaunchError LaunchPlan(Stream stream, const BatchView& batch, const PlanView& plan, void* workspace) {
  const BagFeatures bags(stream, batch);
  if (bags.error() != nullptr) return bags.error();
  const BatchSource source = {batch.keys, &bags};
  const int64_t num_keys = batch.num_keys;
  const int64_t num_chunks = CeilDiv(num_keys, kPositionsPerChunk);
  Carver carver(workspace);
  uint64_t* hashes = carver.Take<uint64_t>(num_keys);
  uint32_t* dealt = carver.Take<uint32_t>(num_keys);
  uint32_t* slots = carver.Take<uint32_t>(4 * num_keys);
  uint32_t* multiplicity = carver.Take<uint32_t>(num_keys);
  std::vector<int64_t> places(num_chunks * kNumPartitions, 0);
  std::vector<int64_t> partition_starts(kNumPartitions + 1, 0);
  std::vector<int64_t> chunk_starts(num_chunks + 1, 0);
  const auto partition_of = [&](int64_t i) { return hashes[i] >> (64 - kPartitionBits); };

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
    int64_t* counts = &places[chunk_begin / kPositionsPerChunk * kNumPartitions];
    for_pieces(chunk_begin, chunk_end, [&](int64_t begin, int64_t end, const uint32_t* tables) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t table = tables[i - begin];
        plan.inverse[i] = table == kNoTable ? kIsPadding : 0;
        if (table == kNoTable) continue;
        hashes[i] = HashOf(batch.keys[i], table, kPlanSalt);
        ++counts[partition_of(i)];
      }
    });
  });

  int64_t place = 0;
  for (int p = 0; p < kNumPartitions; ++p) {
    partition_starts[p] = place;
    for (int64_t c = 0; c < num_chunks; ++c) {
      const int64_t count = places[c * kNumPartitions + p];
      places[c * kNumPartitions + p] = place;
      place += count;
    }
  }
  partition_starts[kNumPartitions] = place;

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    int64_t* next = &places[begin / kPositionsPerChunk * kNumPartitions];
    for (int64_t i = begin; i < end; ++i) {
      if (plan.inverse[i] != kIsPadding) dealt[next[partition_of(i)]++] = static_cast<uint32_t>(i);
    }
  });

  RunTasks(stream, kNumPartitions, [&](int64_t p) {
    const int64_t start = partition_starts[p];
    const Partition partition = {
        dealt + start, partition_starts[p + 1] - start, slots + 4 * start, batch.keys, hashes, plan.inverse,
        multiplicity};
    if (!partition.JoinByMap()) partition.JoinBySort();
  });

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    int64_t num_first = 0;
    for (int64_t i = begin; i < end; ++i) num_first += plan.inverse[i] == i ? 1 : 0;
    chunk_starts[begin / kPositionsPerChunk + 1] = num_first;
  });
  for (int64_t c = 0; c < num_chunks; ++c) chunk_starts[c + 1] += chunk_starts[c];
  const int64_t num_unique = chunk_starts[num_chunks];
  *plan.num_unique = static_cast<int32_t>(num_unique);

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t chunk_begin, int64_t chunk_end) {
    int64_t next = chunk_starts[chunk_begin / kPositionsPerChunk];
    for_pieces(chunk_begin, chunk_end, [&](int64_t begin, int64_t end, const uint32_t* tables) {
      for (int64_t i = begin; i < end; ++i) {
        if (plan.inverse[i] != i) continue;
        plan.unique[next] = batch.keys[i];
        plan.unique_tables[next] = tables[i - begin];
        plan.multiplicity[next] = static_cast<int32_t>(multiplicity[i]);
        multiplicity[i] = static_cast<uint32_t>(next++);  // from here on: its place among the unique
      }
    });
  });

  RunRanges(stream, num_keys, kPositionsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t first = plan.inverse[i];
      plan.inverse[i] = static_cast<int32_t>(first == kIsPadding ? num_keys : multiplicity[first]);
    }
    const int64_t unused = std::max(begin, num_unique);
    if (unused >= end) return;
    std::fill(plan.unique + unused, plan.unique + end, kPaddingKey);
    std::fill(plan.unique_tables + unused, plan.unique_tables + end, uint32_t{0});
    std::fill(plan.multiplicity + unused, plan.multiplicity + end, 0);
  });
  return nullptr;
}

}  // namespace jaxsok

// Sums bag gradients to row gradients on the CPU: the uses of a batch are sorted by row, and summed in the order of
// core/row_update.h. update_cpu.cc steps optimizers with the sums, combine_cpu.cc stores them.
//
// Uses are distributed, in the order of their positions, over buckets of neighbouring rows; a bucket is one task, which
// sorts it and walks its rows. Every step keeps the order of positions, so the threads do not affect the sums.
#ifndef JAXSOK_KERNELS_USES_CPU_H_
#define JAXSOK_KERNELS_USES_CPU_H_

#include <algorithm>
#include <array>
#include <vector>

#include "../core/row_update.h"
#include "bags_cpu.h"
#include "update.h"

namespace jaxsok {

/// One use of a row: the gradient of its bag, times the row's factor in that bag.
struct Use {
  uint32_t bag;  // number of its tile, times kBagsPerTile, and place in it
  uint32_t row;  // kNoRow: skipped
  uint32_t position;
  float factor;
};
static_assert(2 * sizeof(Use) <= kBytesOfUse, "two arrays of uses fit UpdateWorkspaceBytes");

/// Returns the begin of the gradients of a tile's bags.
template <typename G>
struct TileGradients {
  std::vector<const G*> starts;

  const G* Of(const Use& use, int32_t dim) const {
    return starts[use.bag / kBagsPerTile] + int64_t{use.bag % kBagsPerTile} * dim;
  }
};

/// Sums one run: gradient = use_0 + use_1 + ... in sequence (combine_cpu.cc).
void SumRun(const Use* uses, int64_t num_uses, const TileGradients<float>& gradients, int32_t dim, float* gradient);
void SumRun(const Use* uses, int64_t num_uses, const TileGradients<BFloat16>& gradients, int32_t dim, float* gradient);
void SumRun(const Use* uses, int64_t num_uses, const TileGradients<Float16>& gradients, int32_t dim, float* gradient);

/// Sums one chunk: gradient = run_0 + run_1 + ... in sequence.
template <typename G>
void SumChunk(const Use* uses, int64_t num_uses, const TileGradients<G>& gradients, int32_t dim, float* gradient) {
  SumRun(uses, std::min<int64_t>(num_uses, kUsesPerRun), gradients, dim, gradient);
  alignas(64) float run[kMaxDim];
  for (int64_t begin = kUsesPerRun; begin < num_uses; begin += kUsesPerRun) {
    SumRun(uses + begin, std::min<int64_t>(num_uses - begin, kUsesPerRun), gradients, dim, run);
    AddRow(gradient, run, dim);
  }
}

/// Sums the gradient of a row with more than one chunk; `lanes` grows to the scratch size that the tree needs.
template <typename G>
void SumTree(const Use* uses, int64_t num_uses, const TileGradients<G>& gradients, int32_t dim,
             std::vector<float>& lanes, float* gradient) {
  lanes.resize(static_cast<size_t>(kChunkLanes) * dim);
  const int64_t num_chunks = CeilDiv<int64_t>(num_uses, kUsesPerChunk);
  const auto lane = [&](int64_t l) { return lanes.data() + l * dim; };
  // Lanes without a chunk add nothing: -0 plus any number is that number.
  for (int64_t l = num_chunks; l < kChunkLanes; ++l) std::fill_n(lane(l), dim, -0.0f);
  for (int64_t c = 0; c < num_chunks; ++c) {
    const int64_t begin = c * kUsesPerChunk;
    const int64_t size = std::min<int64_t>(kUsesPerChunk, num_uses - begin);
    if (c < kChunkLanes) {
      SumChunk(uses + begin, size, gradients, dim, lane(c));
    } else {
      SumChunk(uses + begin, size, gradients, dim, gradient);
      AddRow(lane(c % kChunkLanes), gradient, dim);
    }
  }
  for (int l = kChunkLanes / 2; l >= 1; l /= 2) {
    for (int i = 0; i < l; ++i) AddRow(lane(i), lane(i + l), dim);
  }
  CopyRow(gradient, lane(0), dim);
}

/// Sorts uses by row, stably; `scratch` has the same size.
inline void SortByRow(Use* uses, Use* scratch, int64_t num_uses) {
  constexpr int64_t kInsertionSize = 32;  // below it a radix pass costs more than it saves
  if (num_uses <= kInsertionSize) {
    for (int64_t i = 1; i < num_uses; ++i) {
      const Use use = uses[i];
      int64_t j = i;
      for (; j > 0 && uses[j - 1].row > use.row; --j) uses[j] = uses[j - 1];
      uses[j] = use;
    }
    return;
  }
  uint32_t lowest = kNoRow, highest = 0;
  for (int64_t i = 0; i < num_uses; ++i) {
    lowest = std::min(lowest, uses[i].row);
    highest = std::max(highest, uses[i].row);
  }
  Use* from = uses;
  Use* to = scratch;
  constexpr int kDigitBits = 8;
  constexpr uint32_t kDigits = 1u << kDigitBits;
  for (int shift = 0; shift < 32 && (highest - lowest) >> shift != 0; shift += kDigitBits) {
    std::array<uint32_t, kDigits> next{};
    const auto digit = [&](const Use& use) { return ((use.row - lowest) >> shift) & (kDigits - 1); };
    for (int64_t i = 0; i < num_uses; ++i) ++next[digit(from[i])];
    uint32_t place = 0;
    for (uint32_t& start : next) {
      const uint32_t count = start;
      start = place;
      place += count;
    }
    for (int64_t i = 0; i < num_uses; ++i) to[next[digit(from[i])]++] = from[i];
    std::swap(from, to);
  }
  if (from != uses) std::copy(from, from + num_uses, uses);
}

/// Calls apply(row, position, gradient, num_uses) once for each row that bags of `is_live` features used, from many
/// threads; `position` is that of its first use.
///
/// `positions` provides, by position: IsPadding(i), and Row(i), kNoRow if it has none. `fetch(row)` is called some rows
/// ahead. `num_rows`: most rows are below it (a hint for distributing work). The gradient may be overwritten.
template <typename G, typename Positions, typename Fetch, typename Apply>
void ForEachRowGradient(Stream stream, const BagFeatures& bags, const std::vector<char>& is_live,
                        const G* const* gradients, int64_t num_keys, int32_t dim, int64_t num_rows,
                        const Positions& positions, const Fetch& fetch, const Apply& apply, void* workspace) {
  constexpr int64_t kMaxGroups = 64;
  constexpr int64_t kMaxBuckets = 2048;
  constexpr int64_t kUsesPerBucket = 128;
  static_assert(kMaxGroups * kMaxBuckets * sizeof(uint32_t) <= kUsesFixedBytes, "counts fit UpdateWorkspaceBytes");
  std::vector<Tile> tiles;
  TileGradients<G> tile_gradients;
  for (const Tile& tile : bags.tiles()) {
    if (!is_live[tile.feature]) continue;
    tiles.push_back(tile);
    tile_gradients.starts.push_back(gradients[tile.feature] + tile.bag_begin * dim);
  }
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  if (num_tiles == 0) return;
  const int64_t num_groups = std::min(kMaxGroups, num_tiles);
  int64_t num_buckets = 1;
  while (num_buckets < kMaxBuckets && num_buckets * kUsesPerBucket < num_keys) num_buckets *= 2;
  int shift = 0;
  while ((num_rows - 1) >> shift >= num_buckets) ++shift;

  WorkspaceCutter cutter(workspace);
  Use* by_position = cutter.Take<Use>(num_keys);
  Use* by_bucket = cutter.Take<Use>(num_keys);
  uint32_t* places = cutter.Take<uint32_t>(num_groups * num_buckets);
  std::vector<uint32_t> starts(num_buckets + 1, 0);
  const auto bucket_of = [&](uint32_t row) { return std::min<int64_t>(row >> shift, num_buckets - 1); };
  const auto for_tiles = [&](int64_t group, const auto& visit) {
    const int64_t end = (group + 1) * num_tiles / num_groups;
    for (int64_t t = group * num_tiles / num_groups; t < end; ++t) {
      visit(t, tiles[t], bags.features()[tiles[t].feature]);
    }
  };

  RunTasks(stream, num_groups, [&](int64_t group) {
    uint32_t* counts = places + group * num_buckets;
    std::fill_n(counts, num_buckets, 0u);
    for_tiles(group, [&](int64_t t, const Tile& tile, const FeatureView& feature) {
      const bool weighted = feature.weights != nullptr;
      const bool divided = BagDivisor::IsNeeded(feature.combiner);
      for (int64_t b = tile.bag_begin; b < tile.bag_end; ++b) {
        const int64_t begin = feature.BagBegin(b), end = feature.BagBegin(b + 1);
        BagDivisor divisor(feature.combiner, weighted);
        for (int64_t i = begin; divided && i < end; ++i) {
          if (!positions.IsPadding(i)) divisor.Add(feature.WeightAt(i));
        }
        const float scale = divided ? divisor.Scale() : 1.0f;
        const bool is_left_out = divided && divisor.IsZero();
        for (int64_t i = begin; i < end; ++i) {
          const uint32_t row = is_left_out || positions.IsPadding(i) ? kNoRow : positions.Row(i);
          const float factor = divided && weighted ? feature.WeightAt(i) * scale
                               : divided           ? scale
                                                   : feature.WeightAt(i);
          by_position[i] = {static_cast<uint32_t>(t * kBagsPerTile + (b - tile.bag_begin)), row,
                            static_cast<uint32_t>(i), factor};
          if (row != kNoRow) ++counts[bucket_of(row)];
        }
      }
    });
  });

  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t b = 0; b < num_buckets; ++b) starts[b + 1] += places[g * num_buckets + b];
  }
  for (int64_t b = 0; b < num_buckets; ++b) starts[b + 1] += starts[b];
  std::vector<uint32_t> next(starts.begin(), starts.end() - 1);
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t b = 0; b < num_buckets; ++b) {
      const uint32_t count = places[g * num_buckets + b];
      places[g * num_buckets + b] = next[b];
      next[b] += count;
    }
  }

  RunTasks(stream, num_groups, [&](int64_t group) {
    uint32_t* place = places + group * num_buckets;
    for_tiles(group, [&](int64_t, const Tile& tile, const FeatureView& feature) {
      const int64_t end = feature.BagBegin(tile.bag_end);
      for (int64_t i = feature.BagBegin(tile.bag_begin); i < end; ++i) {
        if (by_position[i].row != kNoRow) by_bucket[place[bucket_of(by_position[i].row)]++] = by_position[i];
      }
    });
  });

  RunTasks(stream, num_buckets, [&](int64_t bucket) {
    Use* uses = by_bucket + starts[bucket];
    const int64_t num_uses = starts[bucket + 1] - starts[bucket];
    SortByRow(uses, by_position + starts[bucket], num_uses);
    alignas(64) float gradient[kMaxDim];
    std::vector<float> lanes;
    int64_t fetched = 0;
    for (int64_t begin = 0; begin < num_uses;) {
      int64_t end = begin + 1;
      while (end < num_uses && uses[end].row == uses[begin].row) ++end;
      for (const int64_t ahead = std::min(end + kRowsAhead, num_uses); fetched < ahead; ++fetched) {
        PrefetchRow(tile_gradients.Of(uses[fetched], dim), dim);
        if (fetched == 0 || uses[fetched].row != uses[fetched - 1].row) fetch(uses[fetched].row);
      }
      if (end - begin <= kUsesPerChunk) {
        SumChunk(uses + begin, end - begin, tile_gradients, dim, gradient);
      } else {
        SumTree(uses + begin, end - begin, tile_gradients, dim, lanes, gradient);
      }
      apply(uses[begin].row, uses[begin].position, gradient, end - begin);
      begin = end;
    }
  });
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_USES_CPU_H_

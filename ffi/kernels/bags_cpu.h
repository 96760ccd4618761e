// The features of a batch on the CPU back end: bags with checked offsets, tiles of bags, divisors.
#ifndef JAXSOK_KERNELS_BAGS_CPU_H_
#define JAXSOK_KERNELS_BAGS_CPU_H_

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "lookup.h"
#include "parallel_cpu.h"

namespace jaxsok {

/// One feature's part of a batch. Positions are those of the whole batch.
struct FeatureView {
  uint32_t table;
  int32_t combiner;
  int32_t unknown;
  int32_t plan;
  int32_t number;  // among the features of the batch
  int64_t key_start;
  int64_t num_keys;
  int64_t num_bags;
  int64_t hotness;         // 0: ragged
  const int32_t* offsets;  // ragged only: within [0, num_keys] and never decreasing
  const float* weights;    // [num_keys]; nullptr: none

  /// Returns the first position of a bag; BagBegin(b + 1) is the end of bag b.
  int64_t BagBegin(int64_t bag) const {
    return key_start + (hotness == 0 ? int64_t{offsets[bag]} : std::min(bag * hotness, num_keys));
  }
  float WeightAt(int64_t position) const { return weights == nullptr ? 1.0f : weights[position - key_start]; }
};

/// Neighbouring bags of one feature: the unit of parallel work.
struct Tile {
  int32_t feature;
  int64_t bag_begin;
  int64_t bag_end;
};

class BagFeatures {
 public:
  /// Reads the features of a batch; `error()` says what is inconsistent.
  BagFeatures(Stream stream, const BatchView& batch) {
    features_.resize(batch.num_features);
    int64_t num_offsets = 0, key_end = 0;
    for (int32_t f = 0; f < batch.num_features; ++f) {
      const int32_t* words = batch.features + int64_t{f} * kNumFeatureWords;
      FeatureView& feature = features_[f];
      feature.table = static_cast<uint32_t>(words[kFeatureTable]);
      feature.combiner = words[kFeatureCombiner];
      feature.unknown = words[kFeatureUnknown];
      feature.plan = words[kFeaturePlan];
      feature.number = f;
      feature.key_start = words[kFeatureKeyStart];
      feature.num_keys = words[kFeatureNumKeys];
      feature.num_bags = words[kFeatureNumBags];
      feature.hotness = words[kFeatureHotness];
      feature.offsets = nullptr;
      const int32_t weights_start = words[kFeatureWeightsStart];
      const bool is_weighted = weights_start >= 0 && feature.combiner != kCombinerNone;
      feature.weights = is_weighted ? batch.weights + weights_start : nullptr;
      if (feature.key_start < key_end || feature.num_keys < 0 || feature.num_bags < 0 || feature.hotness < 0 ||
          feature.key_start + feature.num_keys > batch.num_keys) {
        error_ = "features: lines do not lie one after the other within the batch";
        return;
      }
      key_end = feature.key_start + feature.num_keys;
      if (feature.hotness == 0) num_offsets += feature.num_bags + 1;
      for (int64_t bag = 0; bag < feature.num_bags; bag += kBagsPerTile) {
        tiles_.push_back({f, bag, std::min(bag + kBagsPerTile, feature.num_bags)});
      }
    }
    offsets_.resize(num_offsets);
    int64_t next = 0;
    for (FeatureView& feature : features_) {
      if (feature.hotness != 0) continue;
      feature.offsets = offsets_.data() + next;
      next += feature.num_bags + 1;
    }
    RunTasks(stream, num_offsets == 0 ? 0 : batch.num_features, [&](int64_t f) {
      const FeatureView& feature = features_[f];
      if (feature.hotness != 0) return;
      const int32_t* given = batch.offsets + batch.features[f * kNumFeatureWords + kFeatureOffsetsStart];
      int32_t* sound = offsets_.data() + (feature.offsets - offsets_.data());
      int32_t highest = 0;
      for (int64_t b = 0; b <= feature.num_bags; ++b) {
        highest = std::max(highest, std::min(given[b], static_cast<int32_t>(feature.num_keys)));
        sound[b] = highest;
      }
    });
  }

  LaunchError error() const { return error_; }

  /// Returns error(), or an error if a feature's table is not in the store.
  LaunchError ErrorWithTables(int32_t num_tables) const {
    if (error_ != nullptr) return error_;
    for (const FeatureView& feature : features_) {
      if (feature.table >= static_cast<uint32_t>(num_tables)) return "features: a table that the store does not have";
    }
    return nullptr;
  }

  const std::vector<FeatureView>& features() const { return features_; }
  const std::vector<Tile>& tiles() const { return tiles_; }

  /// Calls work(tile, its feature) for every tile, in parallel.
  template <typename Work>
  void ForEachTile(Stream stream, const Work& work) const {
    RunTasks(stream, static_cast<int64_t>(tiles_.size()),
             [&](int64_t t) { work(tiles_[t], features_[tiles_[t].feature]); });
  }

  /// Returns the feature that holds a position. Pre: one does.
  const FeatureView& At(int64_t position) const {
    const auto after = std::upper_bound(features_.begin(), features_.end(), position,
                                        [](int64_t p, const FeatureView& f) { return p < f.key_start; });
    return *(after - 1);
  }

 private:
  std::vector<FeatureView> features_;
  std::vector<Tile> tiles_;
  std::vector<int32_t> offsets_;
  LaunchError error_ = nullptr;
};

/// The divisor of a bag's sum, accumulated key after key. Forward and backward use the same.
class BagDivisor {
 public:
  BagDivisor(int32_t combiner, bool weighted) : combiner_(combiner), weighted_(weighted) {}

  /// Returns true if the combiner divides sums.
  static bool IsNeeded(int32_t combiner) { return combiner == kCombinerMean || combiner == kCombinerSqrtn; }

  /// Adds a key that is not padding; `weight` counts only in weighted features.
  void Add(float weight) {
    ++num_keys_;
    if (weighted_) sum_ = sum_ + (combiner_ == kCombinerSqrtn ? weight * weight : weight);
  }

  /// Returns 1 / divisor; 0 if the divisor is zero.
  float Scale() const {
    float divisor = weighted_ ? sum_ : static_cast<float>(num_keys_);
    if (combiner_ == kCombinerSqrtn) divisor = sqrtf(divisor);
    return divisor == 0.0f ? 0.0f : 1.0f / divisor;
  }

  bool IsZero() const { return weighted_ ? sum_ == 0.0f : num_keys_ == 0; }

 private:
  int32_t combiner_;
  bool weighted_;
  int32_t num_keys_ = 0;
  float sum_ = 0.0f;
};

/// The distance at which rows are prefetched ahead of the sum: enough to hide a memory latency behind rows of 256
/// bytes.
constexpr int64_t kRowsAhead = 8;

template <typename T>
void PrefetchRow(const T* row, int32_t dim) {
  constexpr int32_t kNumbersPerLine = 64 / sizeof(T);
  constexpr int32_t kMostLines = 16;  // the hardware prefetches longer streams itself
  const int32_t end = std::min(dim, kNumbersPerLine * kMostLines);
  for (int32_t c = 0; c < end; c += kNumbersPerLine) __builtin_prefetch(row + c);
  asm volatile("" : : "r"(row));  // GCC 12 considers a function that only prefetches to have no effect, and drops it
}

// Loops over the columns of one row (combine_cpu.cc): sums are float32, rows may have any dtype.
#define JAXSOK_DECLARE_ROW_LOOPS(T)                                       \
  void CopyRow(float* out, const T* row, int32_t dim);                    \
  void CopyRowTimes(float* out, const T* row, float weight, int32_t dim); \
  void AddRow(float* out, const T* row, int32_t dim);                     \
  void AddRowTimes(float* out, const T* row, float weight, int32_t dim)
JAXSOK_DECLARE_ROW_LOOPS(float);
JAXSOK_DECLARE_ROW_LOOPS(BFloat16);
JAXSOK_DECLARE_ROW_LOOPS(Float16);
#undef JAXSOK_DECLARE_ROW_LOOPS
void ScaleRow(float* out, float scale, int32_t dim);

/// Widens a quantized row: each number times the row's scale, rounded once.
void WidenRow(float* out, const Int8* row, float scale, int32_t dim);
void WidenRow(float* out, const Float8E4m3* row, float scale, int32_t dim);

/// Rounds a row to nearest.
void RoundRow(BFloat16* out, const float* row, int32_t dim);
void RoundRow(Float16* out, const float* row, int32_t dim);

template <typename T>
void ClearRow(T* out, int32_t dim) {
  std::fill_n(out, dim, T{});
}

/// Combines the bags of one tile.
///
/// `rows` provides, by position: Fetch(i), which prefetches; Row(i), nullptr for padding, valid until the next call.
template <typename Rows, typename E>
void CombineTile(const FeatureView& feature, const Tile& tile, int32_t dim, Rows& rows, E* embeddings) {
  constexpr bool kIsRounded = !std::is_same_v<E, float>;
  alignas(64) float unrounded[kIsRounded ? kMaxDim : 1];
  const int64_t tile_end = feature.BagBegin(tile.bag_end);
  int64_t begin = feature.BagBegin(tile.bag_begin);
  int64_t fetched = begin;
  const bool weighted = feature.weights != nullptr;
  const bool divided = BagDivisor::IsNeeded(feature.combiner);
  for (int64_t b = tile.bag_begin; b < tile.bag_end; ++b) {
    const int64_t end = feature.BagBegin(b + 1);
    float* out;
    if constexpr (kIsRounded) {
      out = unrounded;
    } else {
      out = embeddings + b * dim;
    }
    BagDivisor divisor(feature.combiner, weighted);
    bool is_first = true;
    for (int64_t i = begin; i < end; ++i) {
      for (const int64_t ahead = std::min(i + kRowsAhead, tile_end); fetched < ahead; ++fetched) rows.Fetch(fetched);
      const auto* row = rows.Row(i);
      if (row == nullptr) continue;
      const float weight = feature.WeightAt(i);
      divisor.Add(weight);
      if (is_first) {
        weighted ? CopyRowTimes(out, row, weight, dim) : CopyRow(out, row, dim);
      } else {
        weighted ? AddRowTimes(out, row, weight, dim) : AddRow(out, row, dim);
      }
      is_first = false;
    }
    if (is_first || (divided && divisor.IsZero())) {
      ClearRow(out, dim);
    } else if (divided) {
      ScaleRow(out, divisor.Scale(), dim);
    }
    if constexpr (kIsRounded) RoundRow(embeddings + b * dim, out, dim);
    begin = end;
  }
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_BAGS_CPU_H_

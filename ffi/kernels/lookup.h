// The fused lookup: keys -> row ids -> rows -> embeddings.
#ifndef JAXSOK_KERNELS_LOOKUP_H_
#define JAXSOK_KERNELS_LOOKUP_H_

#include "table.h"

namespace jaxsok {

/// One batch for one store: all features that read its tables.
struct BatchView {
  const uint64_t* keys;     // [num_keys]: the features' keys, one feature after the other
  const int32_t* offsets;   // of ragged features, num_bags + 1 each, relative to the feature's first key
  const float* weights;     // of weighted features, num_keys each
  const int32_t* features;  // [num_features, kNumFeatureWords]; device memory on CUDA
  int64_t num_keys;
  int32_t num_features;
  int32_t num_tiles;    // of all features: see kBagsPerTile
  int32_t first_tile;   // at which lookups begin, so that shards write to different peers first
  int64_t num_offsets;  // 0: no feature is ragged
  int32_t kinds;        // FeatureKind; only lookups read it
  // [num_keys]: the table of each key, if features do not determine it; otherwise nullptr. Read by updates, and by bags
  // with given row ids.
  const uint32_t* tables;
};

/// The outputs of a lookup: data[f] is [num_bags, dim] of feature f; all have one dtype, that of the rows or float32.
struct EmbeddingsView {
  RowDtype dtype;
  void* const* data;
};

constexpr LaunchError kWrongEmbeddings = "embeddings: neither float32 nor of the rows' dtype";

/// The gradients with respect to embeddings, laid out as EmbeddingsView; bfloat16 for rows of any dtype, too.
struct GradientsView {
  RowDtype dtype;
  const void* const* data;
};

constexpr LaunchError kWrongGradients = "gradients: neither float32 nor bfloat16 nor of the rows' dtype";

// The bags of all three lookups: a bag holds the positions [offsets[b], offsets[b + 1]) of its feature, or hotness
// positions each. Offsets never decrease (Python ensures it, for traced ones too: features.py); those outside
// [0, num_keys] are clamped, so that nothing outside the buffers is accessed. Positions in no bag count as padding.
//
// Rows are added in the order of the positions, starting from the first (not from zero): weight * row if the feature is
// weighted, otherwise row. Then mean and sqrtn multiply by 1 / divisor. The divisor is the number of keys that are not
// padding (sqrtn: its square root), or the sum of their weights (sqrtn: the square root of the sum of their squares),
// added in the same order. If the divisor is zero or the bag is empty, the embedding is zeros. With kCombinerNone every
// position is a bag (hotness 1, num_bags == num_keys); padding gives zeros. Everything is float32: rows of 16 bits are
// widened first, and an embedding of 16 bits is rounded once, to nearest (core/row_dtype.h).

/// Looks up a batch; unseen keys get rows.
///
/// Post   : embeddings for every bag; row_ids as LaunchFindOrInsert; refused keys contribute their
///          initial row, with admission the row that `refused` says. counts and the store as LaunchFindOrInsert.
///          `digest` is that of the keys, as LaunchTicketsDigest.
///          With statistics they are as LaunchTouch with these row_ids leaves them, one use a position.
/// Pre    : `admission` may be nullptr: all keys are admitted. It has no uses. `statistics` may be nullptr: none are
/// kept;
///          otherwise their slabs are those of the store, and clock is one word of the device's memory.
LaunchError LaunchLookup(Stream stream, const StoreView& store, const BatchView& batch,
                         const EmbeddingsView& embeddings, uint32_t* row_ids, int32_t* counts, uint64_t* digest,
                         void* workspace, const AdmissionView* admission = nullptr,
                         const StatisticsView* statistics = nullptr, const uint32_t* clock = nullptr);

/// Looks up a batch and changes nothing; keys without a row give their initial row or zeros (kFeatureUnknown).
///
/// Post   : embeddings and counts (found, missing, padding).
LaunchError LaunchLookupFind(Stream stream, const StoreView& store, const BatchView& batch,
                             const EmbeddingsView& embeddings, int32_t* counts);

/// Combines rows whose ids are known (they were found before): as LaunchLookupFind, with row_ids given.
///
/// Pre    : row_ids[i] is a row below the capacity, or kNoRow. With `batch.tables` all features have bags, keys without
///          a row give zeros if kTableUnknown says so, and `counts` are those of the features' tables. Only embeddings
///          of bags may be bfloat16 if rows are float32.
/// Post   : embeddings and counts (found, refused, padding).
LaunchError LaunchLookupPlanned(Stream stream, const StoreView& store, const BatchView& batch, const uint32_t* row_ids,
                                const EmbeddingsView& embeddings, int32_t* counts);

/// One frozen store, and the batch that reads it.
struct FrozenLookup {
  StoreView store;  // its rows are one slab, or two with the second in host memory; quantized ones have scales
  BatchView batch;  // num_tiles is ignored: it follows from num_bags
  EmbeddingsView embeddings;
  const int64_t* num_bags;  // [num_features]: rows of the embeddings
  // [num_features]: the keys of each feature, at most kMostKeyArrays; batch.keys is not read then. nullptr: they lie in
  // batch.keys.
  const uint64_t* const* key_arrays = nullptr;
};
constexpr int32_t kMostKeyArrays = 64;

/// Looks up a batch in several read-only stores: LaunchLookupFind for each, in one call.
///
/// A number of a quantized row is its integer times the row's scale, rounded to float32; weights and sums are applied
/// afterwards. The row that an absent key reads is not rounded to 8 bits.
///
/// Pre    : the words of features agree with num_bags. Their tile starts may give features without keys a tile or not.
///          Embeddings of quantized rows are float32.
/// Post   : embeddings; counts of the stores' tables, one store after the other (found, missing, padding), unless
///          `counts` is nullptr.
LaunchError LaunchLookupFrozen(Stream stream, const FrozenLookup* lookups, int32_t num_stores, int32_t* counts);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_LOOKUP_H_

// The transpose of combining on the CPU, and the loops over columns that lookup and update use too.
#include "combine.h"
#include "uses_cpu.h"

namespace jaxsok {

// Function clones cannot be templates: each loop is written once and defined for each dtype.
#define JAXSOK_DEFINE_ROW_LOOPS(T)                                                                                 \
  JAXSOK_CPU_CLONES void CopyRow(float* __restrict out, const T* __restrict row, int32_t dim) {                    \
    for (int32_t c = 0; c < dim; ++c) out[c] = RowNumber<T>::Widened(row[c]);                                      \
  }                                                                                                                \
  JAXSOK_CPU_CLONES void CopyRowTimes(float* __restrict out, const T* __restrict row, float weight, int32_t dim) { \
    for (int32_t c = 0; c < dim; ++c) out[c] = weight * RowNumber<T>::Widened(row[c]);                             \
  }                                                                                                                \
  JAXSOK_CPU_CLONES void AddRow(float* __restrict out, const T* __restrict row, int32_t dim) {                     \
    for (int32_t c = 0; c < dim; ++c) out[c] = out[c] + RowNumber<T>::Widened(row[c]);                             \
  }                                                                                                                \
  JAXSOK_CPU_CLONES void AddRowTimes(float* __restrict out, const T* __restrict row, float weight, int32_t dim) {  \
    for (int32_t c = 0; c < dim; ++c) out[c] = out[c] + weight * RowNumber<T>::Widened(row[c]);                    \
  }                                                                                                                \
  JAXSOK_CPU_CLONES void SumRun(const Use* uses, int64_t num_uses, const TileGradients<T>& gradients, int32_t dim, \
                                float* __restrict gradient) {                                                      \
    const T* __restrict first = gradients.Of(uses[0], dim);                                                        \
    const float first_factor = uses[0].factor;                                                                     \
    for (int32_t c = 0; c < dim; ++c) gradient[c] = first_factor * RowNumber<T>::Widened(first[c]);                \
    for (int64_t i = 1; i < num_uses; ++i) {                                                                       \
      const T* __restrict next = gradients.Of(uses[i], dim);                                                       \
      const float factor = uses[i].factor;                                                                         \
      for (int32_t c = 0; c < dim; ++c) gradient[c] = gradient[c] + factor * RowNumber<T>::Widened(next[c]);       \
    }                                                                                                              \
  }

JAXSOK_DEFINE_ROW_LOOPS(float)
JAXSOK_DEFINE_ROW_LOOPS(BFloat16)
JAXSOK_DEFINE_ROW_LOOPS(Float16)

#define JAXSOK_DEFINE_WIDEN_ROW(T)                                                                            \
  JAXSOK_CPU_CLONES void WidenRow(float* __restrict out, const T* __restrict row, float scale, int32_t dim) { \
    for (int32_t c = 0; c < dim; ++c) out[c] = RowNumber<T>::Widened(row[c]) * scale;                         \
  }

JAXSOK_DEFINE_WIDEN_ROW(Int8)
JAXSOK_DEFINE_WIDEN_ROW(Float8E4m3)

JAXSOK_CPU_CLONES void RoundRow(BFloat16* __restrict out, const float* __restrict row, int32_t dim) {
  for (int32_t c = 0; c < dim; ++c) out[c] = RowNumber<BFloat16>::Nearest(row[c]);
}

JAXSOK_CPU_CLONES void RoundRow(Float16* __restrict out, const float* __restrict row, int32_t dim) {
  for (int32_t c = 0; c < dim; ++c) out[c] = RowNumber<Float16>::Nearest(row[c]);
}

JAXSOK_CPU_CLONES void ScaleRow(float* out, float scale, int32_t dim) {
  for (int32_t c = 0; c < dim; ++c) out[c] = out[c] * scale;
}

namespace {

/// Positions whose rows are in one array; anything outside it is padding.
struct ArrayPositions {
  const int32_t* inverse;
  int64_t num_unique;

  bool IsPadding(int64_t i) const { return inverse[i] < 0 || inverse[i] >= num_unique; }
  uint32_t Row(int64_t i) const { return static_cast<uint32_t>(inverse[i]); }
};

}  // namespace

LaunchError LaunchCombineTranspose(Stream stream, const float* const* bag_gradients, int64_t num_unique, int32_t dim,
                                   const int32_t* inverse, const BatchView& batch, const LineTarget& row_gradients,
                                   RowDtype dtype, int32_t* num_uses, void*, void* workspace) {
  if (dim > kMaxDim) return "bag_gradients: dim is above kMaxDim";
  const BagFeatures bags(stream, batch);
  if (bags.error() != nullptr) return bags.error();
  constexpr int64_t kRowsPerTask = 4096;
  const bool is_float32 = dtype == kRowDtypeFloat32;
  const int64_t line_bytes = int64_t{dim} * NumberBytes(dtype);
  RunRanges(stream, num_unique, kRowsPerTask, [&](int64_t begin, int64_t end) {
    if (!row_gradients.IsWindow()) {
      std::memset(row_gradients.At(begin, line_bytes), 0, static_cast<size_t>((end - begin) * line_bytes));
    }
    std::fill(num_uses + begin, num_uses + end, 0);
  });
  const ArrayPositions positions = {inverse, num_unique};
  ForEachRowGradient(
      stream, bags, std::vector<char>(batch.num_features, 1), bag_gradients, batch.num_keys, dim, num_unique, positions,
      [](uint32_t) {},
      [&](uint32_t row, uint32_t, const float* gradient, int64_t uses) {
        char* line = row_gradients.At(row, line_bytes);
        if (is_float32) {
          CopyRow(reinterpret_cast<float*>(line), gradient, dim);
        } else {
          RoundRow(reinterpret_cast<BFloat16*>(line), gradient, dim);
        }
        num_uses[row] = static_cast<int32_t>(uses);
      },
      workspace);
  return nullptr;
}

LaunchError LaunchSortByRow(Stream, int64_t, const int32_t*, const BatchView&, void*, void*) { return nullptr; }

LaunchError LaunchSendBagGradients(Stream stream, const float* const* bag_gradients, const float* scales, int32_t dim,
                                   const BatchView& bags, const LineTarget& windows, int32_t, int32_t num_shards,
                                   RowDtype dtype) {
  for (int32_t f = 0; f < bags.num_features; ++f) {
    const int32_t* words = bags.features + int64_t{f} * kNumFeatureWords;
    const int64_t bag_start = words[kFeatureBagStart];
    RunRanges(stream, words[kFeatureNumBags], kBagsPerTile, [&](int64_t begin, int64_t end) {
      std::vector<float> scaled(dim);
      for (int64_t bag = begin; bag < end; ++bag) {
        const float* gradient = bag_gradients[f] + bag * dim;
        const int64_t line = bag_start + bag;
        for (int32_t c = 0; c < dim; ++c) scaled[c] = ScaledByBag(gradient[c], scales[line]);
        for (int32_t s = 0; s < num_shards; ++s) {
          if (dtype == kRowDtypeFloat32) {
            CopyRow(reinterpret_cast<float*>(windows.parts[s]) + line * dim, scaled.data(), dim);
          } else {
            RoundRow(reinterpret_cast<BFloat16*>(windows.parts[s]) + line * dim, scaled.data(), dim);
          }
        }
      }
    });
  }
  return nullptr;
}

}  // namespace jaxsok

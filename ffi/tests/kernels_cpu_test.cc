// Compares the CPU launchers with plain loops over a std::map, to the bit, with 1, 2 and 5 threads.
//
// The model uses the launchers' contracts, core/initialize.h, the random bits of core/row_dtype.h (core_test.cc has
// golden ones) and row_update.h's closed forms, but none of the index, the plans, the sort, the rounding or the loops
// that it tests.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "../core/initialize.h"
#include "../kernels/combine.h"
#include "../kernels/evict.h"
#include "../kernels/index_cpu.h"
#include "../kernels/plan.h"
#include "../kernels/update.h"
#include "testing.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxsok {
namespace {

using Pair = std::pair<uint32_t, uint64_t>;  // table, key
using Line = std::vector<float>;

int64_t BytesOf(RowDtype dtype) { return dtype == kRowDtypeFloat32 ? 4 : 2; }

/// Returns the numbers of a dtype as floats, by the definitions of the formats.
Line Decoded(RowDtype dtype, const void* data, int64_t size) {
  Line line(size);
  if (dtype == kRowDtypeFloat32 && size > 0) std::memcpy(line.data(), data, size * sizeof(float));
  const uint16_t* words = static_cast<const uint16_t*>(data);
  for (int64_t i = 0; i < size && dtype != kRowDtypeFloat32; ++i) {
    const int exponent_bits = dtype == kRowDtypeBfloat16 ? 8 : 5, mantissa_bits = 15 - exponent_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (words[i] & 0x7fff) >> mantissa_bits, mantissa = words[i] & ((1 << mantissa_bits) - 1);
    double value =
        std::ldexp(mantissa + (exponent == 0 ? 0 : 1 << mantissa_bits), std::max(exponent, 1) - bias - mantissa_bits);
    if (exponent == (1 << exponent_bits) - 1) value = mantissa == 0 ? INFINITY : NAN;
    line[i] = static_cast<float>(std::copysign(value, (words[i] & 0x8000) != 0 ? -1.0 : 1.0));
  }
  return line;
}

/// Returns a float rounded to a dtype, computed in doubles: to nearest, or stochastically by 16 random bits.
float ModelRound(RowDtype dtype, float value, bool is_nearest, uint32_t random) {
  if (dtype == kRowDtypeFloat32 || !std::isfinite(value)) return value;
  const bool is_bfloat16 = dtype == kRowDtypeBfloat16;
  int exponent = 0;
  std::frexp(std::fabs(static_cast<double>(value)), &exponent);
  const bool is_subnormal = exponent <= (is_bfloat16 ? -126 : -14);
  const double last =
      is_subnormal ? std::ldexp(1.0, is_bfloat16 ? -133 : -24) : std::ldexp(1.0, exponent - (is_bfloat16 ? 8 : 11));
  double number = std::fabs(static_cast<double>(value)) / last;
  if (is_nearest) {
    number = std::nearbyint(number);
  } else if (is_bfloat16) {
    number = std::floor(number + random / 65536.0);
  } else {
    number = is_subnormal ? std::floor((std::floor(number * 65536.0) + random) / 65536.0)
                          : std::floor(number + (random >> 3) / 8192.0);
  }
  const double largest = is_bfloat16 ? std::ldexp(255.0, 120) : 65504.0;
  return static_cast<float>(std::copysign(std::min(number * last, largest), value));
}

Line ModelNearest(RowDtype dtype, Line line) {
  for (float& value : line) value = ModelRound(dtype, value, true, 0);
  return line;
}

/// The arrays of a store, in slabs.
struct Store {
  int32_t dim, num_tables, num_states;
  RowDtype dtype;
  std::vector<uint32_t> slab_rows;
  Memory index_memory;
  std::vector<std::vector<uint8_t>> rows;
  std::vector<std::vector<Record>> records;
  std::vector<std::vector<float>> states[kMaxStates];
  std::vector<uint32_t> counters, table_rows, tables, seed;
  StoreView view{};
  StateView state_view{};

  Store(int32_t dim_, int32_t num_tables_, std::vector<uint32_t> slabs, uint32_t num_buckets, int num_states_,
        int32_t width, RowDtype dtype_ = kRowDtypeFloat32)
      : dim(dim_),
        num_tables(num_tables_),
        num_states(num_states_),
        dtype(dtype_),
        slab_rows(std::move(slabs)),
        index_memory(num_buckets * sizeof(Bucket)),
        counters(kNumCounters, 0),
        table_rows(num_tables_, 0),
        tables(static_cast<size_t>(num_tables_) * kNumTableWords, 0),
        seed{7, 9} {
    std::memset(index_memory.get(), 0xff, num_buckets * sizeof(Bucket));
    for (int t = 0; t < num_tables; ++t) {
      uint32_t* words = &tables[static_cast<size_t>(t) * kNumTableWords];
      words[kTableNameLow] = 1000u + static_cast<uint32_t>(t);
      words[kTableNameHigh] = 77;
      words[kTableInitializer] = static_cast<uint32_t>(t % 4);
      words[kTableParameterA] = BitsOfFloat(-0.5f);
      words[kTableParameterB] = BitsOfFloat(0.25f);
    }
    counters[kSaltLow] = 123;
    view.index = {static_cast<Bucket*>(index_memory.get()), num_buckets};
    view.starts.num_slabs = static_cast<int32_t>(slab_rows.size());
    state_view.num_states = num_states;
    for (size_t s = 0; s < slab_rows.size(); ++s) {
      view.starts.start[s] = view.capacity;
      view.capacity += slab_rows[s];
      rows.emplace_back(static_cast<size_t>(slab_rows[s]) * dim * BytesOf(dtype),
                        0xc2);  // a valid number of each dtype
      records.emplace_back(slab_rows[s], Record{kPaddingKey, 0, 0});
    }
    for (int k = 0; k < num_states; ++k) {
      state_view.width[k] = width;
      state_view.initial[k] = 0.1f + static_cast<float>(k);
      for (const uint32_t n : slab_rows) {
        states[k].emplace_back(static_cast<size_t>(n) * width, state_view.initial[k]);
      }
    }
    for (size_t s = 0; s < slab_rows.size(); ++s) {
      view.rows.data[s] = rows[s].data();
      view.records.data[s] = records[s].data();
      for (int k = 0; k < num_states; ++k) state_view.data[k].data[s] = states[k][s].data();
    }
    view.counters = counters.data();
    view.table_rows = table_rows.data();
    view.tables = tables.data();
    view.seed = seed.data();
    view.row_dtype = dtype;
    view.dim = dim;
    view.num_tables = num_tables;
  }

  Line RowAt(uint32_t row_id) const {
    if (dtype == kRowDtypeFloat32) return Decoded(dtype, view.rows.At<float>(view.starts, row_id, dim), dim);
    return Decoded(dtype, view.rows.At<uint16_t>(view.starts, row_id, dim), dim);
  }
};

/// The arrays of a batch.
struct Batch {
  std::vector<uint64_t> keys;
  std::vector<int32_t> offsets, features;
  std::vector<float> weights;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> bags;  // by feature: positions [first, second)
  int32_t num_tiles = 0;

  int32_t Word(int f, FeatureWord word) const { return features[static_cast<size_t>(f) * kNumFeatureWords + word]; }
  int num_features() const { return static_cast<int>(bags.size()); }
  BatchView View() const {
    BatchView view{};
    view.keys = keys.data();
    view.offsets = offsets.data();
    view.weights = weights.data();
    view.features = features.data();
    view.num_keys = static_cast<int64_t>(keys.size());
    view.num_features = num_features();
    view.num_tiles = num_tiles;
    return view;
  }
  bool IsWeighted(int f) const { return Word(f, kFeatureWeightsStart) >= 0; }
  float WeightAt(int f, int64_t i) const {
    return IsWeighted(f) ? weights[Word(f, kFeatureWeightsStart) + i - Word(f, kFeatureKeyStart)] : 1.0f;
  }
};

uint64_t RandomKey(Random& random, uint32_t num_distinct) {
  const uint32_t kind = random.Below(20);
  if (kind == 0) return kPaddingKey;
  if (kind == 1) return kPaddingKey - 1 - random.Below(2);
  const uint64_t key = random.Below(num_distinct);
  return kind == 2 ? key << 32 : kind < 9 ? key % 5 : key;
}

void AddFeature(Batch& batch, Random& random, int32_t num_tables, uint32_t num_distinct, int32_t combiner,
                uint32_t most_bags, bool may_be_wrong) {
  const int32_t key_start = static_cast<int32_t>(batch.keys.size());
  const int32_t num_bags = static_cast<int32_t>(random.Below(most_bags));
  const bool is_ragged = combiner != kCombinerNone && random.Below(2) == 0;
  const int32_t hotness = combiner == kCombinerNone ? 1 : static_cast<int32_t>(1 + random.Below(4));
  const int32_t offsets_start = static_cast<int32_t>(batch.offsets.size());
  std::vector<std::pair<int64_t, int64_t>> bags;
  int32_t num_keys = num_bags * hotness;
  if (is_ragged) {
    int32_t offset = static_cast<int32_t>(random.Below(3));
    for (int32_t b = 0; b <= num_bags; ++b) {
      batch.offsets.push_back(offset);
      offset += static_cast<int32_t>(random.Below(10) == 0 ? random.Below(90) : random.Below(4));
    }
    num_keys = batch.offsets.back() + static_cast<int32_t>(random.Below(5));
    if (may_be_wrong) {
      for (int32_t b = 0; b <= num_bags; ++b) {
        if (random.Below(8) == 0) batch.offsets[offsets_start + b] = static_cast<int32_t>(random.Next());
      }
    }
    int32_t highest = 0;
    for (int32_t b = 0; b <= num_bags; ++b) {
      const int32_t before = highest;
      highest = std::max(highest, std::min(batch.offsets[offsets_start + b], num_keys));
      if (b > 0) bags.emplace_back(key_start + before, key_start + highest);
    }
  } else {
    if (combiner != kCombinerNone) num_keys += static_cast<int32_t>(random.Below(3));
    for (int32_t b = 0; b < num_bags; ++b) {
      bags.emplace_back(key_start + b * hotness, key_start + (b + 1) * hotness);
    }
  }
  const bool weighted = combiner != kCombinerNone && random.Below(2) == 0;
  const int32_t weights_start = weighted ? static_cast<int32_t>(batch.weights.size()) : -1;
  for (int32_t i = 0; i < num_keys; ++i) {
    batch.keys.push_back(RandomKey(random, num_distinct));
    if (weighted) batch.weights.push_back(random.Below(4) == 0 ? 0.0f : random.Uniform());
  }
  std::vector<int32_t> words(kNumFeatureWords, 0);
  words[kFeatureTable] = static_cast<int32_t>(random.Below(static_cast<uint32_t>(num_tables)));
  words[kFeatureCombiner] = combiner;
  words[kFeatureKeyStart] = key_start;
  words[kFeatureNumKeys] = num_keys;
  words[kFeatureNumBags] = num_bags;
  words[kFeatureHotness] = is_ragged ? 0 : hotness;
  words[kFeatureOffsetsStart] = offsets_start;
  words[kFeatureWeightsStart] = weights_start;
  words[kFeatureTileStart] = batch.num_tiles;
  words[kFeatureUnknown] = static_cast<int32_t>(random.Below(2));
  words[kFeaturePlan] = static_cast<int32_t>(random.Below(2));
  batch.features.insert(batch.features.end(), words.begin(), words.end());
  batch.num_tiles += CeilDiv(num_bags, kBagsPerTile);
  batch.bags.push_back(std::move(bags));
}

Batch RandomBatch(Random& random, int32_t num_tables, uint32_t num_distinct, uint32_t most_bags) {
  Batch batch;
  const int num_features = static_cast<int>(1 + random.Below(6));
  const bool may_be_wrong = random.Below(3) == 0;
  for (int f = 0; f < num_features; ++f) {
    AddFeature(batch, random, num_tables, num_distinct, static_cast<int32_t>(random.Below(4)), most_bags, may_be_wrong);
  }
  return batch;
}

/// The model of a store: a map, freed ids in order, rows and states by row id.
struct Model {
  std::map<Pair, uint32_t> row_ids;
  std::vector<uint32_t> freed;
  uint32_t num_allocated = 0, capacity = 0, generation = 0;
  std::vector<Line> rows, states[kMaxStates];

  explicit Model(const Store& store) : capacity(store.view.capacity), rows(capacity) {
    for (uint32_t r = 0; r < capacity; ++r) rows[r] = store.RowAt(r);
    for (int k = 0; k < store.num_states; ++k) {
      states[k].assign(capacity, Line(store.state_view.width[k], store.state_view.initial[k]));
    }
  }
};

Line InitialRow(const Store& store, uint32_t table, uint64_t key) {
  const RowInitializer initializer = RowInitializer::Of(&store.tables[table * kNumTableWords], store.seed.data(), key);
  Line row(store.dim);
  for (int c = 0; c < store.dim; ++c) row[c] = initializer.At(static_cast<uint32_t>(c));
  return ModelNearest(store.dtype, row);
}

/// Returns the row of a pair, kNoRow when refused; counts it.
uint32_t ModelInsert(Model& model, const Store& store, uint32_t table, uint64_t key, std::vector<int32_t>& counts) {
  const auto found = model.row_ids.find({table, key});
  if (found != model.row_ids.end()) {
    ++counts[table * kNumCounts + kCountFound];
    return found->second;
  }
  uint32_t row_id;
  if (!model.freed.empty()) {
    row_id = model.freed.front();
    model.freed.erase(model.freed.begin());
  } else if (model.num_allocated < model.capacity) {
    row_id = model.num_allocated++;
  } else {
    ++counts[table * kNumCounts + kCountRefused];
    return kNoRow;
  }
  model.row_ids[{table, key}] = row_id;
  model.rows[row_id] = InitialRow(store, table, key);
  ++counts[table * kNumCounts + kCountInserted];
  return row_id;
}

void CheckState(const Store& store, const Model& model, uint64_t seed) {
  JAXSOK_CHECK_SEED(store.counters[kNumAllocated] == model.num_allocated, seed);
  JAXSOK_CHECK_SEED(store.counters[kGeneration] == model.generation, seed);
  JAXSOK_CHECK_SEED(store.counters[kNumUnplaced] == 0, seed);
  std::vector<uint32_t> freed;
  for (uint32_t j = store.counters[kFreeBegin]; j < store.counters[kFreeEnd]; ++j) {
    freed.push_back(store.view.records.At(store.view.starts, j, 1)->free_id);
  }
  JAXSOK_CHECK_SEED(IsSame(freed, model.freed), seed);
  std::vector<uint32_t> table_rows(store.num_tables, 0);
  std::vector<char> is_used(model.capacity, 0);
  for (const auto& [pair, row_id] : model.row_ids) {
    ++table_rows[pair.first];
    is_used[row_id] = 1;
    const Record* record = store.view.records.At(store.view.starts, row_id, 1);
    JAXSOK_CHECK_SEED(record->key == pair.second && record->table == pair.first, seed);
    const ProbeResult walk = Probe(store.view.index, pair.second, pair.first, 123);
    JAXSOK_CHECK_SEED(walk.row_id == row_id, seed);
    JAXSOK_CHECK_SEED(static_cast<uint32_t>(walk.num_probes) <= store.counters[kLongestProbe], seed);
  }
  JAXSOK_CHECK_SEED(IsSame(table_rows, store.table_rows), seed);
  size_t num_entries = 0;
  for (uint32_t e = 0; e < store.view.index.num_buckets * kEntriesPerBucket; ++e) {
    num_entries += store.view.index.EntryAt(e)->key != kPaddingKey;
  }
  JAXSOK_CHECK_SEED(num_entries == model.row_ids.size(), seed);
  for (uint32_t r = 0; r < model.capacity; ++r) {
    JAXSOK_CHECK_SEED(IsSame(store.RowAt(r), model.rows[r]), seed);
    JAXSOK_CHECK_SEED(is_used[r] || store.view.records.At(store.view.starts, r, 1)->key == kPaddingKey, seed);
    for (int k = 0; k < store.num_states; ++k) {
      const float* state = store.state_view.data[k].At(store.view.starts, r, store.state_view.width[k]);
      JAXSOK_CHECK_SEED(IsSame(Line(state, state + store.state_view.width[k]), model.states[k][r]), seed);
    }
  }
}

/// Returns the factor of each position of a bag: the inverse of the forward's divisor (1 without a divisor; 0: all is
/// 0).
float ModelScale(const Batch& batch, int f, std::pair<int64_t, int64_t> bag, const std::vector<char>& is_padding) {
  const int32_t combiner = batch.Word(f, kFeatureCombiner);
  if (combiner != kCombinerMean && combiner != kCombinerSqrtn) return 1.0f;
  float divisor = 0.0f;
  for (int64_t i = bag.first; i < bag.second; ++i) {
    if (is_padding[i]) continue;
    const float w = batch.WeightAt(f, i);
    divisor = divisor + (combiner == kCombinerSqrtn ? w * w : w);
  }
  if (combiner == kCombinerSqrtn) divisor = std::sqrt(divisor);
  return divisor == 0.0f ? 0.0f : 1.0f / divisor;
}

/// Returns the embeddings of one feature, given the row of each position.
template <typename RowOf>
std::vector<float> ModelCombine(const Batch& batch, int f, int32_t dim, const std::vector<char>& is_padding,
                                const RowOf& row_of) {
  std::vector<float> embeddings;
  const int32_t combiner = batch.Word(f, kFeatureCombiner);
  for (const auto& bag : batch.bags[f]) {
    Line sum(dim, 0.0f);
    bool is_first = true;
    for (int64_t i = bag.first; i < bag.second; ++i) {
      if (is_padding[i]) continue;
      const Line row = row_of(i);
      for (int c = 0; c < dim; ++c) {
        const float term = batch.IsWeighted(f) ? batch.WeightAt(f, i) * row[c] : row[c];
        sum[c] = is_first ? term : sum[c] + term;
      }
      is_first = false;
    }
    const float scale = ModelScale(batch, f, bag, is_padding);
    const bool is_divided = combiner == kCombinerMean || combiner == kCombinerSqrtn;
    for (float& value : sum) value = !is_divided ? value : scale == 0.0f ? 0.0f : value * scale;
    embeddings.insert(embeddings.end(), sum.begin(), sum.end());
  }
  return embeddings;
}

/// The uses of each row, in the order of positions: (factor, gradient).
using Uses = std::map<uint32_t, std::vector<Line>>;

template <typename RowOf>
void ModelUses(const Batch& batch, int f, int32_t dim, const std::vector<char>& is_padding, const RowOf& row_of,
               const std::vector<float>& gradients, Uses& uses) {
  const int32_t combiner = batch.Word(f, kFeatureCombiner);
  const bool is_divided = combiner == kCombinerMean || combiner == kCombinerSqrtn;
  for (size_t b = 0; b < batch.bags[f].size(); ++b) {
    const auto bag = batch.bags[f][b];
    const float scale = ModelScale(batch, f, bag, is_padding);
    if (scale == 0.0f) continue;
    for (int64_t i = bag.first; i < bag.second; ++i) {
      if (is_padding[i] || row_of(i) == kNoRow) continue;
      float factor = 1.0f;
      if (batch.IsWeighted(f)) factor = is_divided ? batch.WeightAt(f, i) * scale : batch.WeightAt(f, i);
      if (!batch.IsWeighted(f) && is_divided) factor = scale;
      Line use(gradients.begin() + b * dim, gradients.begin() + (b + 1) * dim);
      if (batch.IsWeighted(f) || is_divided) {
        for (float& value : use) value = factor * value;
      }
      uses[row_of(i)].push_back(use);
    }
  }
}

Line Sum(const std::vector<Line>& lines, size_t begin, size_t end, size_t step) {
  Line sum = lines[begin];
  for (size_t i = begin + step; i < end; i += step) {
    for (size_t c = 0; c < sum.size(); ++c) sum[c] = sum[c] + lines[i][c];
  }
  return sum;
}

Line ModelSum(const std::vector<Line>& uses) {
  std::vector<Line> runs, chunks;
  for (size_t i = 0; i < uses.size(); i += 8) runs.push_back(Sum(uses, i, std::min(i + 8, uses.size()), 1));
  for (size_t i = 0; i < runs.size(); i += 4) chunks.push_back(Sum(runs, i, std::min(i + 4, runs.size()), 1));
  if (chunks.size() == 1) return chunks[0];
  std::vector<Line> lanes;
  for (size_t l = 0; l < 32; ++l) {
    lanes.push_back(l < chunks.size() ? Sum(chunks, l, chunks.size(), 32) : Line(uses[0].size(), -0.0f));
  }
  for (size_t half = 16; half >= 1; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] = Sum({lanes[l], lanes[l + half]}, 0, 2, 1);
  }
  return lanes[0];
}

float ModelMeanSquare(const Line& gradient, bool has_rows16) {
  const int dim = static_cast<int>(gradient.size());
  const LaneShape shape = has_rows16 ? LaneShape::OfRows16(dim) : LaneShape::Of(dim);
  std::vector<float> lanes(shape.lanes, 0.0f);
  for (int l = 0; l < shape.lanes; ++l) {
    for (int k = 0; (l + k * shape.lanes) * shape.vector < dim; ++k) {
      for (int v = 0; v < shape.vector; ++v) {
        const float g = gradient[(l + k * shape.lanes) * shape.vector + v];
        lanes[l] = lanes[l] + g * g;
      }
    }
  }
  for (int offset = shape.lanes / 2; offset >= 1; offset /= 2) {
    const std::vector<float> old = lanes;
    for (int l = 0; l < shape.lanes; ++l) lanes[l] = old[l] + old[l ^ offset];
  }
  return lanes[0] / static_cast<float>(dim);
}

/// Steps a row by closed forms, not by core's functions.
void ModelStep(int optimizer, const float* h, const Line& g, Line& row, Line* first, Line* second, bool has_rows16) {
  float rowwise_scale = 0.0f;
  if (optimizer == kOptimizerRowwiseAdagrad) {
    (*first)[0] = (*first)[0] + ModelMeanSquare(g, has_rows16);
    rowwise_scale = h[0] / (std::sqrt((*first)[0]) + h[1]);
  }
  for (size_t c = 0; c < row.size(); ++c) {
    if (optimizer == kOptimizerSgd) row[c] = row[c] - h[0] * g[c];
    if (optimizer == kOptimizerRowwiseAdagrad) row[c] = row[c] - rowwise_scale * g[c];
    if (optimizer == kOptimizerAdagrad) {
      (*first)[c] = (*first)[c] + g[c] * g[c];
      const float inverse = (*first)[c] > 0.0f ? 1.0f / std::sqrt((*first)[c] + h[1]) : 0.0f;
      row[c] = row[c] - h[0] * (g[c] * inverse);
    }
    if (optimizer == kOptimizerAdam) {
      (*first)[c] = h[1] * (*first)[c] + h[6] * g[c];
      (*second)[c] = h[2] * (*second)[c] + h[7] * (g[c] * g[c]);
      row[c] = row[c] - h[0] * (((*first)[c] / h[4]) / (std::sqrt((*second)[c] / h[5]) + h[3]));
    }
  }
}

std::vector<char> PaddingOf(const Batch& batch) {
  std::vector<char> is_padding(batch.keys.size());
  for (size_t i = 0; i < batch.keys.size(); ++i) is_padding[i] = batch.keys[i] == kPaddingKey;
  return is_padding;
}

/// Memory for the embeddings of a batch, filled with values that must be overwritten.
struct Embeddings {
  RowDtype dtype;
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<void*> pointers;
  Embeddings(const Batch& batch, int32_t dim, RowDtype dtype_ = kRowDtypeFloat32) : dtype(dtype_) {
    for (const auto& bags : batch.bags) bytes.emplace_back(bags.size() * dim * BytesOf(dtype), 0x42);
    for (auto& lines : bytes) pointers.push_back(lines.data());
  }
  EmbeddingsView View() const { return {dtype, pointers.data()}; }
  Line Values(int f) const { return Decoded(dtype, bytes[f].data(), bytes[f].size() / BytesOf(dtype)); }
};

/// Gradients as floats and in the launcher's form.
struct Gradients {
  RowDtype dtype;
  std::vector<std::vector<uint16_t>> words;
  std::vector<const void*> pointers;
  /// Rounds `values` to the dtype.
  Gradients(std::vector<Line>& values, RowDtype dtype_) : dtype(dtype_) {
    for (Line& line : values) {
      if (dtype == kRowDtypeFloat32) {
        pointers.push_back(line.data());
        continue;
      }
      std::vector<uint16_t> half;
      for (const float value : line) {
        half.push_back(dtype == kRowDtypeBfloat16 ? RowNumber<BFloat16>::Nearest(value).bits
                                                  : RowNumber<Float16>::Nearest(value).bits);
      }
      line = Decoded(dtype, half.data(), static_cast<int64_t>(half.size()));
      words.push_back(std::move(half));
    }
    for (const auto& half : words) pointers.push_back(half.data());
  }
  GradientsView View() const { return {dtype, pointers.data()}; }
};

/// A random sequence of lookups, updates, releases and rebuilds on one store.
class Machine {
 public:
  Machine(uint64_t seed, int num_threads)
      : seed_(seed),
        random_(seed),
        executor_(num_threads),
        optimizer_(static_cast<int>(random_.Below(4))),
        store_(MakeStore(random_, optimizer_, static_cast<RowDtype>(seed % 3))),
        embedding_dtype_(random_.Below(2) == 0 ? kRowDtypeFloat32 : store_.dtype),
        model_(store_) {}

  void Run(int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      Batch batch = RandomBatch(random_, store_.num_tables, 300, random_.Below(4) == 0 ? 700 : 60);
      Lookup(batch);
      if (random_.Below(2) == 0) Find(batch);
      Update(batch);
      CheckState(store_, model_, seed_);
      if (random_.Below(3) == 0) FindOrInsert();
      if (random_.Below(3) == 0) Release();
      if (random_.Below(5) == 0) JAXSOK_CHECK_SEED(LaunchRebuild(&executor_, store_.view) == nullptr, seed_);
      CheckState(store_, model_, seed_);
    }
  }

  const Store& store() const { return store_; }

 private:
  static Store MakeStore(Random& random, int optimizer, RowDtype dtype) {
    constexpr int32_t kDims[] = {1, 3, 4, 5, 8, 16, 31, 64, 100, 132};
    const int32_t dim = kDims[random.Below(10)];
    const int num_states = optimizer == kOptimizerAdam ? 2 : optimizer == kOptimizerSgd ? 0 : 1;
    std::vector<uint32_t> slabs = {40 + random.Below(200)};
    for (uint32_t s = random.Below(4); s > 0; --s) slabs.push_back(1 + random.Below(300));
    return Store(dim, static_cast<int32_t>(1 + random.Below(5)), slabs, 400, num_states,
                 optimizer == kOptimizerRowwiseAdagrad ? 1 : dim, dtype);
  }

  void* Workspace(int64_t bytes) {
    workspace_.push_back(Memory(static_cast<size_t>(bytes)));
    return workspace_.back().get();
  }

  void Lookup(const Batch& batch) {
    const int32_t dim = store_.dim;
    std::vector<int32_t> counts(store_.num_tables * kNumCounts, -7), wanted(store_.num_tables * kNumCounts, 0);
    row_ids_.assign(batch.keys.size(), 12345);
    Embeddings embeddings(batch, dim, embedding_dtype_);
    std::vector<RowStatistics> statistics(store_.view.capacity);
    for (RowStatistics& line : statistics) line = {random_.Next(), ~uint32_t{0} - random_.Below(5)};
    std::vector<RowStatistics> wanted_statistics = statistics;
    StatisticsView kept{store_.view.starts, {}, store_.view.capacity};
    for (int s = 0; s < kept.starts.num_slabs; ++s) kept.data.data[s] = statistics.data() + kept.starts.start[s];
    const bool keeps_statistics = random_.Below(2) == 0;
    const uint32_t clock = random_.Next();
    uint64_t digest = random_.Next();
    JAXSOK_CHECK_SEED(LaunchLookup(&executor_, store_.view, batch.View(), embeddings.View(), row_ids_.data(),
                                   counts.data(), &digest, Workspace(InsertWorkspaceBytes(batch.keys.size())), nullptr,
                                   keeps_statistics ? &kept : nullptr, keeps_statistics ? &clock : nullptr) == nullptr,
                      seed_);
    std::vector<uint32_t> row_ids(batch.keys.size(), kNoRow);
    for (int f = 0; f < batch.num_features(); ++f) {
      const uint32_t table = static_cast<uint32_t>(batch.Word(f, kFeatureTable));
      int32_t num_used = 0;
      for (const auto& bag : batch.bags[f]) {
        for (int64_t i = bag.first; i < bag.second; ++i) {
          if (batch.keys[i] == kPaddingKey) continue;
          ++num_used;
          row_ids[i] = ModelInsert(model_, store_, table, batch.keys[i], wanted);
        }
      }
      wanted[table * kNumCounts + kCountPadding] += batch.Word(f, kFeatureNumKeys) - num_used;
    }
    JAXSOK_CHECK_SEED(IsSame(counts, wanted), seed_);
    JAXSOK_CHECK_SEED(IsSame(row_ids, row_ids_), seed_);
    for (const uint32_t row_id : row_ids) {
      if (!keeps_statistics || row_id == kNoRow) continue;
      const uint32_t frequency = wanted_statistics[row_id].frequency;
      wanted_statistics[row_id] = {clock, frequency + (frequency < UINT32_MAX ? 1u : 0u)};
    }
    JAXSOK_CHECK_SEED(
        std::memcmp(statistics.data(), wanted_statistics.data(), sizeof(RowStatistics) * statistics.size()) == 0,
        seed_);
    const auto row_of = [&](int f) {
      return [&, f](int64_t i) {
        const uint32_t table = static_cast<uint32_t>(batch.Word(f, kFeatureTable));
        return row_ids[i] == kNoRow ? InitialRow(store_, table, batch.keys[i]) : model_.rows[row_ids[i]];
      };
    };
    for (int f = 0; f < batch.num_features(); ++f) {
      const Line wanted_values = ModelCombine(batch, f, dim, PaddingOf(batch), row_of(f));
      JAXSOK_CHECK_SEED(IsSame(embeddings.Values(f), ModelNearest(embedding_dtype_, wanted_values)), seed_);
    }
    Embeddings planned(batch, dim, embedding_dtype_);
    std::vector<int32_t> planned_counts(wanted.size(), -7);
    LaunchLookupPlanned(&executor_, store_.view, batch.View(), row_ids_.data(), planned.View(), planned_counts.data());
    for (int f = 0; f < batch.num_features(); ++f) {
      JAXSOK_CHECK_SEED(IsSame(embeddings.bytes[f], planned.bytes[f]), seed_);
    }
    for (int t = 0; t < store_.num_tables; ++t) {
      wanted[t * kNumCounts + kCountFound] += wanted[t * kNumCounts + kCountInserted];
      wanted[t * kNumCounts + kCountInserted] = 0;
    }
    JAXSOK_CHECK_SEED(IsSame(planned_counts, wanted), seed_);
  }

  void Find(Batch batch) {
    for (uint64_t& key : batch.keys) {
      if (random_.Below(4) == 0) key = RandomKey(random_, 1000);
    }
    std::vector<int32_t> counts(store_.num_tables * kNumCounts, -7), wanted(store_.num_tables * kNumCounts, 0);
    Embeddings embeddings(batch, store_.dim, embedding_dtype_);
    JAXSOK_CHECK_SEED(
        LaunchLookupFind(&executor_, store_.view, batch.View(), embeddings.View(), counts.data()) == nullptr, seed_);
    for (int f = 0; f < batch.num_features(); ++f) {
      const uint32_t table = static_cast<uint32_t>(batch.Word(f, kFeatureTable));
      wanted[table * kNumCounts + kCountPadding] += batch.Word(f, kFeatureNumKeys);
      const auto row_of = [&](int64_t i) {
        --wanted[table * kNumCounts + kCountPadding];
        const auto found = model_.row_ids.find({table, batch.keys[i]});
        ++wanted[table * kNumCounts + (found != model_.row_ids.end() ? kCountFound : kCountMissing)];
        if (found != model_.row_ids.end()) return model_.rows[found->second];
        return batch.Word(f, kFeatureUnknown) != 0 ? Line(store_.dim, 0.0f) : InitialRow(store_, table, batch.keys[i]);
      };
      const auto wanted_embeddings = ModelCombine(batch, f, store_.dim, PaddingOf(batch), row_of);
      JAXSOK_CHECK_SEED(IsSame(embeddings.Values(f), ModelNearest(embedding_dtype_, wanted_embeddings)), seed_);
    }
    JAXSOK_CHECK_SEED(IsSame(counts, wanted), seed_);
  }

  void Update(const Batch& batch) {
    const int32_t dim = store_.dim;
    const bool is_live[] = {true, random_.Below(3) != 0};
    const UpdateSpec spec = {optimizer_, static_cast<int32_t>(random_.Below(3)),
                             static_cast<int32_t>(random_.Below(2))};
    const uint32_t update_step = random_.Next();
    const float hyper[kNumHyper] = {0.1f, 0.9f, 0.99f, 1e-6f, 0.3f, 0.2f, 0.1f, 0.01f};
    std::vector<uint32_t> row_ids = row_ids_;
    for (uint32_t& row_id : row_ids) {
      if (random_.Below(40) == 0) row_id = store_.view.capacity + random_.Below(1000);
    }
    std::vector<Line> gradients;
    for (const auto& bags : batch.bags) {
      gradients.emplace_back(bags.size() * dim);
      for (float& g : gradients.back()) g = random_.Below(3) == 0 ? -0.0f : random_.Uniform();
      if (!bags.empty() && random_.Below(2) == 0) {
        gradients.back()[random_.Below(static_cast<uint32_t>(gradients.back().size()))] =
            random_.Below(2) == 0 ? std::numeric_limits<float>::infinity() : std::nanf("");
      }
    }
    const Gradients given(gradients, embedding_dtype_);
    std::vector<int32_t> num_nonfinite(store_.num_tables, -3), wanted_nonfinite(store_.num_tables, 0);
    int32_t num_stale = -3, wanted_stale = 0;
    // In a batch with a table for each key, the features have no table.
    Batch of_table_0 = batch;
    std::vector<uint32_t> tables(batch.keys.size(), 0);
    for (int f = 0; f < batch.num_features(); ++f) {
      const int32_t begin = batch.Word(f, kFeatureKeyStart);
      std::fill_n(tables.begin() + begin, batch.Word(f, kFeatureNumKeys), batch.Word(f, kFeatureTable));
      of_table_0.features[static_cast<size_t>(f) * kNumFeatureWords + kFeatureTable] = 0;
    }
    const bool has_tables = random_.Below(2) == 0;
    BatchView view = has_tables ? of_table_0.View() : batch.View();
    view.tables = has_tables ? tables.data() : nullptr;
    const bool has_requests = random_.Below(2) == 0;
    std::vector<Request> requests(batch.keys.size());
    for (Request& request : requests) request.uses = random_.Below(5);
    const UpdateArguments arguments{store_.state_view,
                                    spec,
                                    hyper,
                                    &update_step,
                                    is_live,
                                    view,
                                    row_ids.data(),
                                    num_nonfinite.data(),
                                    &num_stale,
                                    Workspace(UpdateWorkspaceBytes(batch.keys.size(), dim)),
                                    has_requests ? requests.data() : nullptr};
    JAXSOK_CHECK_SEED(LaunchUpdate(&executor_, store_.view, arguments, given.View()) == nullptr, seed_);
    Uses uses;
    const auto row_of = [&](int64_t i) { return row_ids[i] < model_.capacity ? row_ids[i] : kNoRow; };
    for (int f = 0; f < batch.num_features(); ++f) {
      if (is_live[batch.Word(f, kFeaturePlan)]) {
        ModelUses(batch, f, dim, PaddingOf(batch), row_of, gradients[f], uses);
        continue;
      }
      for (const auto& bag : batch.bags[f]) {
        for (int64_t i = bag.first; i < bag.second; ++i) {
          if (batch.keys[i] == kPaddingKey || row_of(i) == kNoRow) continue;
          wanted_stale += has_requests ? static_cast<int32_t>(requests[i].uses) : 1;
        }
      }
    }
    std::map<uint32_t, uint32_t> table_of;
    std::map<uint32_t, uint64_t> key_of;
    for (const auto& [pair, row_id] : model_.row_ids) {
      table_of[row_id] = pair.first;
      key_of[row_id] = pair.second;
    }
    for (const auto& [row_id, lines] : uses) {
      Line gradient = ModelSum(lines);
      const float n = static_cast<float>(lines.size());
      if (spec.row_gradient != kRowGradientSum) {
        for (float& g : gradient) g = g * (spec.row_gradient == kRowGradientMean ? 1.0f / n : 1.0f / std::sqrt(n));
      }
      if (!std::all_of(gradient.begin(), gradient.end(), [](float g) { return std::isfinite(g); })) {
        ++wanted_nonfinite[table_of[row_id]];
        continue;
      }
      ModelStep(optimizer_, hyper, gradient, model_.rows[row_id],
                store_.num_states > 0 ? &model_.states[0][row_id] : nullptr,
                store_.num_states > 1 ? &model_.states[1][row_id] : nullptr, store_.dtype != kRowDtypeFloat32);
      const RowRounding bits = RowRounding::Of(&store_.tables[table_of[row_id] * kNumTableWords],
                                               RoundingOfStep(store_.seed.data(), update_step), key_of[row_id]);
      for (int c = 0; c < dim; ++c) {
        float& value = model_.rows[row_id][c];
        value = ModelRound(store_.dtype, value, spec.rounding == kRoundingNearest, bits.At(c));
      }
    }
    JAXSOK_CHECK_SEED(IsSame(num_nonfinite, wanted_nonfinite), seed_);
    JAXSOK_CHECK_SEED(num_stale == wanted_stale, seed_);
  }

  void RandomPairs(size_t n) {
    keys_.clear();
    table_ids_.clear();
    for (size_t i = 0; i < n; ++i) {
      keys_.push_back(RandomKey(random_, 300));
      const uint32_t kind = random_.Below(30);
      table_ids_.push_back(kind == 0 ? random_.Next() : random_.Below(static_cast<uint32_t>(store_.num_tables)));
    }
  }

  void FindOrInsert() {
    RandomPairs(random_.Below(3000));
    const int64_t n = static_cast<int64_t>(keys_.size());
    std::vector<int32_t> counts(store_.num_tables * kNumCounts, -7), wanted(store_.num_tables * kNumCounts, 0);
    std::vector<uint32_t> row_ids(n, 5), found(n, 5), wanted_ids(n, kNoRow), wanted_found(n, kNoRow);
    LaunchFind(&executor_, store_.view.index, store_.counters.data(), keys_.data(), table_ids_.data(), n, found.data());
    for (int64_t i = 0; i < n; ++i) {
      const auto entry = model_.row_ids.find({table_ids_[i], keys_[i]});
      if (entry != model_.row_ids.end()) wanted_found[i] = entry->second;
    }
    JAXSOK_CHECK_SEED(IsSame(found, wanted_found), seed_);
    LaunchFindOrInsert(&executor_, store_.view, keys_.data(), table_ids_.data(), n, row_ids.data(), counts.data(),
                       Workspace(InsertWorkspaceBytes(n)));
    for (int64_t i = 0; i < n; ++i) {
      if (table_ids_[i] >= static_cast<uint32_t>(store_.num_tables)) continue;
      if (keys_[i] == kPaddingKey) {
        ++wanted[table_ids_[i] * kNumCounts + kCountPadding];
      } else {
        wanted_ids[i] = ModelInsert(model_, store_, table_ids_[i], keys_[i], wanted);
      }
    }
    JAXSOK_CHECK_SEED(IsSame(row_ids, wanted_ids), seed_);
    JAXSOK_CHECK_SEED(IsSame(counts, wanted), seed_);
  }

  /// Releases the rows of random pairs; rows that are not in use are flagged too.
  void Release() {
    RandomPairs(random_.Below(200));
    std::vector<uint8_t> flags(store_.view.capacity, kRowGoes);
    for (const auto& [pair, row_id] : model_.row_ids) flags[row_id] = kRowStays;
    std::vector<uint32_t> num_released(store_.num_tables, 77), wanted(store_.num_tables, 0);
    std::vector<uint32_t> table_evicted(store_.num_tables, 5), wanted_evicted = table_evicted;
    std::vector<uint32_t> statistics(store_.view.capacity * size_t{2}, 9), wanted_statistics = statistics;
    Slabs<uint32_t> kept{};
    for (int s = 0; s < store_.view.starts.num_slabs; ++s) {
      kept.data[s] = statistics.data() + store_.view.starts.start[s] * size_t{2};
    }
    const bool keeps_statistics = random_.Below(2) == 0, counts_evicted = random_.Below(2) == 0;
    for (size_t i = 0; i < keys_.size(); ++i) {
      const auto entry = model_.row_ids.find({table_ids_[i], keys_[i]});
      if (entry == model_.row_ids.end()) continue;
      const uint32_t row_id = entry->second;
      flags[row_id] = kRowGoes;
      model_.freed.push_back(row_id);
      for (int k = 0; k < store_.num_states; ++k) {
        std::fill(model_.states[k][row_id].begin(), model_.states[k][row_id].end(), store_.state_view.initial[k]);
      }
      if (keeps_statistics) std::fill_n(wanted_statistics.begin() + row_id * int64_t{2}, 2, 0);
      model_.row_ids.erase(entry);
      ++wanted[table_ids_[i]];
      if (counts_evicted) ++wanted_evicted[table_ids_[i]];
    }
    std::sort(model_.freed.begin(), model_.freed.end());
    model_.generation += std::any_of(wanted.begin(), wanted.end(), [](uint32_t num) { return num != 0; });
    JAXSOK_CHECK_SEED(LaunchRelease(&executor_, store_.view, store_.state_view, keeps_statistics ? &kept : nullptr,
                                    flags.data(), counts_evicted ? table_evicted.data() : nullptr, num_released.data(),
                                    Workspace(ReleaseWorkspaceBytes(store_.view.capacity))) == nullptr,
                      seed_);
    JAXSOK_CHECK_SEED(IsSame(num_released, wanted), seed_);
    JAXSOK_CHECK_SEED(IsSame(table_evicted, wanted_evicted), seed_);
    JAXSOK_CHECK_SEED(IsSame(statistics, wanted_statistics), seed_);
  }

  uint64_t seed_;
  Random random_;
  ThreadExecutor executor_;
  int optimizer_;
  Store store_;
  RowDtype embedding_dtype_;
  Model model_;
  std::vector<uint32_t> row_ids_;
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> table_ids_;
  std::vector<Memory> workspace_;
};

/// Combines rows of known ids: more bags and other dims than the machine's, and sums of negative zeros.
void TestLookupPlanned(uint64_t seed, int num_threads) {
  Random random(seed);
  ThreadExecutor executor(num_threads);
  const int32_t dim = static_cast<int32_t>(1 + random.Below(70));
  const uint32_t num_rows = 1 + random.Below(100);
  Batch batch;
  AddFeature(batch, random, 1, 10, static_cast<int32_t>(1 + random.Below(3)), 2000, seed % 2 == 0);
  Store store(dim, 1, {num_rows}, 1, 0, dim);
  Line rows(static_cast<size_t>(num_rows) * dim);
  for (float& x : rows) x = random.Below(3) != 0 ? -0.0f : random.Uniform();
  std::memcpy(store.rows[0].data(), rows.data(), rows.size() * sizeof(float));
  std::vector<uint32_t> row_ids(batch.keys.size());
  std::vector<char> is_outside(batch.keys.size(), 1);
  for (const auto& bag : batch.bags[0]) std::fill(is_outside.begin() + bag.first, is_outside.begin() + bag.second, 0);
  std::vector<int32_t> counts(kNumCounts, -7), wanted(kNumCounts, 0);
  for (size_t i = 0; i < row_ids.size(); ++i) {
    if (random.Below(8) == 0) batch.keys[i] = kPaddingKey;
    row_ids[i] = random.Below(3) == 0 ? 0 : random.Below(num_rows);
    if (batch.keys[i] == kPaddingKey || random.Below(8) == 0) row_ids[i] = kNoRow;
    const bool is_padding = is_outside[i] || batch.keys[i] == kPaddingKey;
    ++wanted[is_padding ? kCountPadding : row_ids[i] == kNoRow ? kCountRefused : kCountFound];
  }
  const auto row_of = [&](int64_t i) {
    return row_ids[i] == kNoRow ? InitialRow(store, 0, batch.keys[i]) : store.RowAt(row_ids[i]);
  };
  Embeddings embeddings(batch, dim);
  JAXSOK_CHECK_SEED(LaunchLookupPlanned(&executor, store.view, batch.View(), row_ids.data(), embeddings.View(),
                                        counts.data()) == nullptr,
                    seed);
  JAXSOK_CHECK_SEED(IsSame(embeddings.Values(0), ModelCombine(batch, 0, dim, PaddingOf(batch), row_of)), seed);
  JAXSOK_CHECK_SEED(IsSame(counts, wanted), seed);
}

/// Arrays into which rows are cut, as windows are; rows that are never written stay 0x5e.
class CutLines {
 public:
  CutLines(Random& random, int64_t num_lines, int64_t line_bytes) : num_lines_(num_lines), line_bytes_(line_bytes) {
    const auto least = static_cast<uint32_t>(CeilDiv<int64_t>(num_lines, kMostWindowShards));
    lines_of_part_ = std::max(1u, least + random.Below(static_cast<uint32_t>(num_lines) + 1));
    parts_.resize(CeilDiv<int64_t>(num_lines, lines_of_part_));
    for (auto& part : parts_) part.assign(lines_of_part_ * line_bytes, 0x5e);
  }
  LineTarget Target() {
    LineTarget target{};
    target.lines_of_part = lines_of_part_;
    for (size_t p = 0; p < parts_.size(); ++p) target.parts[p] = reinterpret_cast<char*>(parts_[p].data());
    return target;
  }
  /// Returns whether the rows are those of one array, except those that `is_written` excludes.
  template <typename IsWritten>
  bool HasLinesOf(const std::vector<uint8_t>& whole, const IsWritten& is_written) const {
    const std::vector<uint8_t> untouched(line_bytes_, 0x5e);
    for (int64_t i = 0; i < static_cast<int64_t>(parts_.size()) * lines_of_part_; ++i) {
      const uint8_t* line = parts_[i / lines_of_part_].data() + i % lines_of_part_ * line_bytes_;
      const bool is_there = i < num_lines_ && is_written(i);
      const uint8_t* wanted = is_there ? whole.data() + i * line_bytes_ : untouched.data();
      if (std::memcmp(line, wanted, static_cast<size_t>(line_bytes_)) != 0) return false;
    }
    return true;
  }

 private:
  int64_t num_lines_, line_bytes_;
  uint32_t lines_of_part_;
  std::vector<std::vector<uint8_t>> parts_;
};

void TestTranspose(uint64_t seed, int num_threads) {
  Random random(seed);
  ThreadExecutor executor(num_threads);
  const int32_t dim = static_cast<int32_t>(1 + random.Below(70));
  const int32_t num_unique = static_cast<int32_t>(random.Below(100));
  const Batch batch = RandomBatch(random, 1, 10, 700);
  const size_t n = batch.keys.size();
  std::vector<int32_t> inverse(n);
  std::vector<char> is_padding(n);
  for (size_t i = 0; i < n; ++i) {
    inverse[i] = random.Below(8) == 0 ? static_cast<int32_t>(random.Next() | 1u << 31)
                                      : static_cast<int32_t>(random.Below(num_unique * 9 / 8 + 1));
    if (random.Below(3) == 0) inverse[i] = 0;
    is_padding[i] = inverse[i] < 0 || inverse[i] >= num_unique;
  }
  std::vector<std::vector<float>> gradients;
  std::vector<const float*> pointers;
  for (const auto& bags : batch.bags) gradients.emplace_back(bags.size() * dim);
  for (auto& gradient : gradients) {
    for (float& x : gradient) x = random.Below(3) != 0 ? -0.0f : random.Uniform();
    pointers.push_back(gradient.data());
  }
  Line wanted(int64_t{num_unique} * dim, 0.0f);
  std::vector<int32_t> wanted_uses(num_unique, 0);
  BatchView view = batch.View();
  view.keys = nullptr;
  Uses uses;
  for (int f = 0; f < batch.num_features(); ++f) {
    ModelUses(
        batch, f, dim, is_padding, [&](int64_t i) { return static_cast<uint32_t>(inverse[i]); }, gradients[f], uses);
  }
  for (const auto& [row, lines] : uses) {
    const Line sum = ModelSum(lines);
    std::copy(sum.begin(), sum.end(), wanted.begin() + int64_t{row} * dim);
    wanted_uses[row] = static_cast<int32_t>(lines.size());
  }
  for (const RowDtype dtype : {kRowDtypeFloat32, kRowDtypeBfloat16}) {
    const auto sum = [&](const LineTarget& target) {
      std::vector<int32_t> num_uses(num_unique, 33);
      Memory workspace(UpdateWorkspaceBytes(n, dim));
      JAXSOK_CHECK_SEED(LaunchCombineTranspose(&executor, pointers.data(), num_unique, dim, inverse.data(), view,
                                               target, dtype, num_uses.data(), nullptr, workspace.get()) == nullptr,
                        seed);
      JAXSOK_CHECK_SEED(IsSame(num_uses, wanted_uses), seed);
    };
    std::vector<uint8_t> whole(wanted.size() * BytesOf(dtype), 33);
    sum(LineTarget::Of(whole.data()));
    JAXSOK_CHECK_SEED(IsSame(Decoded(dtype, whole.data(), wanted.size()), ModelNearest(dtype, wanted)), seed);
    CutLines cut(random, num_unique, dim * BytesOf(dtype));
    sum(cut.Target());
    JAXSOK_CHECK_SEED(cut.HasLinesOf(whole, [&](int64_t row) { return wanted_uses[row] != 0; }), seed);
  }
}

bool IsSameRequest(const Request& a, const Request& b) {
  return a.key == b.key && a.table == b.table && a.uses == b.uses;
}

void TestRequests(uint64_t seed, int num_threads) {
  Random random(seed);
  ThreadExecutor executor(num_threads);
  constexpr int kNumTables = 3;
  constexpr int32_t kShards[] = {1, 2, 3, 8, 64, 1000};
  const Batch batch = RandomBatch(random, kNumTables, 1 + random.Below(4000), random.Below(3) == 0 ? 20000 : 300);
  const int64_t n = static_cast<int64_t>(batch.keys.size());
  const int32_t num_shards = kShards[random.Below(6)];
  std::vector<uint32_t> tables(kNumTables * kNumTableWords, 0), partition_owners(kNumPartitions);
  for (int t = 0; t < kNumTables; ++t) {
    tables[t * kNumTableWords + kTableNameLow] = random.Next();
    tables[t * kNumTableWords + kTableNameHigh] = random.Next();
    tables[t * kNumTableWords + kTableOwner] = random.Below(3) == 0 ? random.Below(num_shards + 1) : kNoOwner;
  }
  const bool is_one_owner = random.Below(4) == 0;
  for (uint32_t& owner : partition_owners) owner = is_one_owner ? num_shards / 2 : random.Below(num_shards);
  const bool by_hash = random.Below(2) == 0;

  std::vector<Request> requests(n + 1, Request{1, 2, 3});
  std::vector<int32_t> inverse(n + 1, -5), starts(num_shards + 2, -5);
  std::vector<uint64_t> hashes(n + 1, 5);
  std::vector<int32_t> slots(n + 1, -5);
  const int64_t send_capacity = 1 + random.Below(static_cast<uint32_t>(2 * n / num_shards + 2));
  uint64_t digest = 0;
  Memory workspace(PlanRequestsWorkspaceBytes(n));
  JAXSOK_CHECK_SEED(
      LaunchPlanRequests(&executor, batch.View(), Mix64(seed),
                         {tables.data(), kNumTables, partition_owners.data(), num_shards},
                         {requests.data(), inverse.data(), starts.data(), by_hash ? hashes.data() : nullptr,
                          by_hash ? nullptr : slots.data(), send_capacity, &digest},
                         workspace.get()) == nullptr,
      seed);

  // By owner, hash (or zero), first position: the key of the map gives the order.
  struct Wanted {
    Request request;
    std::vector<int64_t> positions;
  };
  std::map<Pair, Wanted> distinct;
  std::vector<Pair> by_position;
  for (int f = 0; f < batch.num_features(); ++f) {
    const uint32_t table = static_cast<uint32_t>(batch.Word(f, kFeatureTable));
    for (const auto& bag : batch.bags[f]) {
      for (int64_t i = bag.first; i < bag.second; ++i) {
        if (batch.keys[i] == kPaddingKey) continue;
        const Pair pair = {table, batch.keys[i]};
        Wanted& wanted = distinct[pair];
        if (wanted.positions.empty()) by_position.push_back(pair);
        wanted.positions.push_back(i);
        wanted.request = {pair.second, table, static_cast<uint32_t>(wanted.positions.size())};
      }
    }
  }
  std::map<std::pair<std::pair<uint32_t, uint64_t>, size_t>, Pair> order;
  for (size_t u = 0; u < by_position.size(); ++u) {
    const uint32_t* words = &tables[by_position[u].first * kNumTableWords];
    const uint64_t name = uint64_t{words[kTableNameHigh]} << 32 | words[kTableNameLow];
    const uint64_t hash = Mix64(Mix64(by_position[u].second ^ name) + 0x9e3779b97f4a7c15ull);
    uint32_t owner = words[kTableOwner] == kNoOwner ? partition_owners[hash >> 52] : words[kTableOwner];
    owner = std::min(owner, static_cast<uint32_t>(num_shards - 1));
    order[{{owner, by_hash ? hash << 12 | hash >> 52 : 0}, u}] = by_position[u];
  }
  std::vector<int32_t> wanted_inverse(n + 1, static_cast<int32_t>(n)), wanted_starts(num_shards + 2, 0);
  wanted_inverse[n] = wanted_starts[num_shards + 1] = -5;
  int32_t place = 0;
  for (const auto& [at, pair] : order) {
    const Wanted& wanted = distinct[pair];
    JAXSOK_CHECK_SEED(IsSameRequest(requests[place], wanted.request), seed);
    JAXSOK_CHECK_SEED(!by_hash || hashes[place] == at.first.second, seed);
    for (const int64_t i : wanted.positions) wanted_inverse[i] = place;
    ++place;
    for (int32_t s = static_cast<int32_t>(at.first.first) + 1; s <= num_shards; ++s) wanted_starts[s] = place;
  }
  for (int64_t p = place; p < n; ++p) {
    JAXSOK_CHECK_SEED(IsSameRequest(requests[p], {kPaddingKey, 0, 0}), seed);
    JAXSOK_CHECK_SEED(!by_hash || hashes[p] == ~uint64_t{0}, seed);
  }
  JAXSOK_CHECK_SEED(IsSameRequest(requests[n], {1, 2, 3}) && hashes[n] == 5, seed);
  JAXSOK_CHECK_SEED(IsSame(inverse, wanted_inverse), seed);
  JAXSOK_CHECK_SEED(IsSame(starts, wanted_starts), seed);
  for (int64_t i = 0; !by_hash && i < n; ++i) {
    int32_t wanted = -1;
    for (int32_t s = 0; s < num_shards; ++s) {
      const int64_t within = wanted_inverse[i] - wanted_starts[s];
      const bool is_of_shard = wanted_inverse[i] < wanted_starts[s + 1] && within >= 0;
      if (is_of_shard && within < send_capacity) wanted = static_cast<int32_t>(s * send_capacity + within);
    }
    JAXSOK_CHECK_SEED(slots[i] == wanted, seed);
  }
  JAXSOK_CHECK_SEED(slots[n] == -5, seed);
  uint64_t wanted_digest = 0;
  for (int64_t i = 0; i < n; ++i) wanted_digest += DigestOf(batch.keys[i], i);
  JAXSOK_CHECK_SEED(digest == wanted_digest, seed);
}

/// Batches with invalid arguments are refused, and nothing is written.
void TestRequestsRefused() {
  ThreadExecutor executor(1);
  Batch batch;
  batch.bags.resize(1);
  batch.features.assign(kNumFeatureWords, 0);
  batch.features[kFeatureTable] = 1;
  batch.features[kFeatureHotness] = 1;
  const std::vector<uint32_t> tables(kNumTableWords, 0), partition_owners(kNumPartitions, 0);
  int32_t starts[3] = {7, 7, 7};
  uint64_t digest = 0;
  Memory workspace(PlanRequestsWorkspaceBytes(0));
  for (const int32_t num_shards : {0, -1, kMaxShards + 1, 2}) {
    JAXSOK_CHECK(LaunchPlanRequests(&executor, batch.View(), 0, {tables.data(), 1, partition_owners.data(), num_shards},
                                    {nullptr, nullptr, starts, nullptr, nullptr, 0, &digest},
                                    workspace.get()) != nullptr);
  }
  JAXSOK_CHECK(starts[0] == 7 && starts[1] == 7 && starts[2] == 7);
}

void TestGather(uint64_t seed, int num_threads) {
  Random random(seed);
  ThreadExecutor executor(num_threads);
  const int32_t dim = static_cast<int32_t>(1 + random.Below(70));
  const int32_t num_tables = static_cast<int32_t>(1 + random.Below(5));
  const RowDtype dtype = static_cast<RowDtype>(random.Below(3));
  Store store(dim, num_tables, {3, 1 + random.Below(50), 20}, 16, 0, dim, dtype);
  // Any numbers except infinities and NaN: the second byte of a half, and the last of a float, are below 60.
  for (auto& slab : store.rows) {
    for (size_t i = 0; i < slab.size(); ++i) slab[i] = static_cast<uint8_t>(random.Below(i % 2 == 0 ? 256 : 60));
  }
  for (int t = 0; t < num_tables; ++t) store.tables[t * kNumTableWords + kTableUnknown] = random.Below(2);
  const int64_t n = random.Below(random.Below(3) == 0 ? 5000 : 50);
  const bool is_find = random.Below(2) == 0;
  std::vector<Request> requests(n);
  std::vector<uint32_t> row_ids(n);
  std::vector<char> is_written(n, 0);
  Line wanted;
  std::vector<int32_t> wanted_absent(num_tables, 0);
  for (int64_t i = 0; i < n; ++i) {
    requests[i] = {RandomKey(random, 1000), random.Below(num_tables + 1), random.Below(5)};
    row_ids[i] = random.Below(store.view.capacity * 5 / 4);
    if (random.Below(9) == 0) row_ids[i] = kNoRow;
    const Request& request = requests[i];
    Line row(dim, 0.0f);
    if (request.key != kPaddingKey && request.table < static_cast<uint32_t>(num_tables)) {
      is_written[i] = 1;
      const uint32_t* words = &store.tables[request.table * kNumTableWords];
      if (row_ids[i] < store.view.capacity) {
        row = store.RowAt(row_ids[i]);
      } else {
        wanted_absent[request.table] += static_cast<int32_t>(request.uses);
        const RowInitializer initializer = RowInitializer::Of(words, store.seed.data(), request.key);
        for (int32_t c = 0; c < dim && !(is_find && words[kTableUnknown] != 0); ++c) row[c] = initializer.At(c);
        row = ModelNearest(dtype, row);
      }
    }
    wanted.insert(wanted.end(), row.begin(), row.end());
  }
  for (const RowDtype gathered : {dtype, kRowDtypeFloat32, kRowDtypeBfloat16}) {
    const auto gather = [&](const LineTarget& target) {
      std::vector<int32_t> num_absent(num_tables, 44);
      JAXSOK_CHECK_SEED(LaunchGather(&executor, store.view, requests.data(), row_ids.data(), n, is_find, target,
                                     gathered, num_absent.data()) == nullptr,
                        seed);
      JAXSOK_CHECK_SEED(IsSame(num_absent, wanted_absent), seed);
    };
    std::vector<uint8_t> whole(wanted.size() * BytesOf(gathered), 44);
    gather(LineTarget::Of(whole.data()));
    JAXSOK_CHECK_SEED(IsSame(Decoded(gathered, whole.data(), wanted.size()), ModelNearest(gathered, wanted)), seed);
    CutLines cut(random, n, dim * BytesOf(gathered));
    gather(cut.Target());
    JAXSOK_CHECK_SEED(cut.HasLinesOf(whole, [&](int64_t i) { return is_written[i] != 0; }), seed);
  }
}

/// Statistics of rows at any positions, in slabs, equal sums that are computed one after the other.
void TestTouch(uint64_t seed, int num_threads) {
  Random random(seed);
  ThreadExecutor executor(num_threads);
  const std::vector<uint32_t> sizes = {3, 1 + random.Below(50), 20};
  StatisticsView view{};
  view.starts.num_slabs = static_cast<int32_t>(sizes.size());
  std::vector<std::vector<RowStatistics>> slabs;
  std::vector<std::pair<uint32_t, uint32_t>> wanted;  // last step, frequency
  for (size_t s = 0; s < sizes.size(); ++s) {
    view.starts.start[s] = view.capacity;
    view.capacity += sizes[s];
    slabs.emplace_back(sizes[s]);
    for (RowStatistics& line : slabs[s]) {
      line = {random.Next(), ~uint32_t{0} - random.Below(5)};
      wanted.emplace_back(line.last_step, line.frequency);
    }
    view.data.data[s] = slabs[s].data();
  }
  const int64_t n = random.Below(random.Below(3) == 0 ? 20000 : 50);
  const bool has_uses = random.Below(2) == 0;
  const uint32_t clock = random.Next();
  std::vector<uint32_t> row_ids(n), uses(n);
  for (int64_t i = 0; i < n; ++i) {
    row_ids[i] = random.Below(9) == 0 ? kNoRow : random.Below(view.capacity * 5 / 4);
    uses[i] = random.Below(7);
    if (row_ids[i] >= view.capacity) continue;
    wanted[row_ids[i]].first = clock;
    const uint64_t total = uint64_t{wanted[row_ids[i]].second} + (has_uses ? uses[i] : 1);
    wanted[row_ids[i]].second = static_cast<uint32_t>(std::min<uint64_t>(total, UINT32_MAX));
  }
  LaunchTouch(&executor, view, row_ids.data(), has_uses ? uses.data() : nullptr, n, &clock);
  bool is_same = true;
  for (uint32_t r = 0; r < view.capacity; ++r) {
    const RowStatistics& line = *view.data.At(view.starts, r, 1);
    is_same = is_same && line.last_step == wanted[r].first && line.frequency == wanted[r].second;
  }
  JAXSOK_CHECK_SEED(is_same, seed);
}

/// Marks an entry as taken by another key.
void Take(Entry& entry, uint64_t key, uint32_t table, uint32_t row_id) { entry = {key, row_id, table}; }

/// A walk visits kMaxProbes neighbouring buckets from the home bucket on, in entry order, and wraps round at the end.
void TestWalk() {
  constexpr uint32_t kNumBuckets = 100, kNumEntries = kNumBuckets * kEntriesPerBucket;
  constexpr uint64_t kKey = 42, kOther = 43;
  constexpr uint32_t kTable = 2, kRow = 7;
  Memory memory(kNumBuckets * sizeof(Bucket));
  const IndexView index = {static_cast<Bucket*>(memory.get()), kNumBuckets};
  for (const uint64_t salt : {0ull, 1ull, 2ull, 3ull, 4ull, 5ull}) {
    const uint32_t home = HomeBucket(HashOf(kKey, kTable, salt), kNumBuckets);
    // All entries are taken: by other keys, and by the same key under another table.
    for (uint32_t e = 0; e < kNumEntries; ++e) {
      Take(*index.EntryAt(e), e % 2 ? kOther : kKey, e % 2 ? kTable : kTable + 1, 1);
    }
    ProbeResult walk = Probe(index, kKey, kTable, salt);
    JAXSOK_CHECK(walk.row_id == kNoRow && walk.entry == kNoEntry && walk.num_probes == kMaxProbes);

    for (uint32_t step = 0; step < kNumEntries; ++step) {
      const uint32_t e = (home * kEntriesPerBucket + step) % kNumEntries;
      const Entry before = *index.EntryAt(e);
      const bool is_reached = step < kMaxProbes * kEntriesPerBucket;
      const int32_t num_probes = is_reached ? static_cast<int32_t>(step / kEntriesPerBucket) + 1 : kMaxProbes;

      *index.EntryAt(e) = {kPaddingKey, kNoRow, kAuxUnset};
      walk = Probe(index, kKey, kTable, salt);
      JAXSOK_CHECK(walk.row_id == kNoRow && walk.entry == (is_reached ? e : kNoEntry) && walk.num_probes == num_probes);

      Take(*index.EntryAt(e), kKey, kTable, kRow);
      walk = Probe(index, kKey, kTable, salt);
      JAXSOK_CHECK(walk.row_id == (is_reached ? kRow : kNoRow) && walk.entry == (is_reached ? e : kNoEntry));
      *index.EntryAt(e) = before;
    }
  }
}

/// A walk in an index of fewer buckets than kMaxProbes wraps round repeatedly, but ends.
void TestWalkInSmallIndex() {
  Memory memory(sizeof(Bucket));
  const IndexView index = {static_cast<Bucket*>(memory.get()), 1};
  for (int e = 0; e < kEntriesPerBucket; ++e) Take(index.buckets[0].entries[e], 1, 0, 0);
  const ProbeResult walk = Probe(index, 2, 0, 0);
  JAXSOK_CHECK(walk.entry == kNoEntry && walk.num_probes == kMaxProbes);
}

/// The walks of more than kMaxProbes buckets of keys meet. The last keys find no entry; no key is lost or mixed up.
void TestUnplaced() {
  ThreadExecutor executor(2);
  Store store(4, 1, {2000}, 500, 0, 4);
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < 300; ++key) {
    if (HomeBucket(HashOf(key, 0, 123), 500) == 490) keys.push_back(key);
  }
  keys.push_back(keys.back());
  const int64_t n = static_cast<int64_t>(keys.size());
  std::vector<uint32_t> table_ids(n, 0), row_ids(n);
  std::vector<int32_t> counts(kNumCounts);
  Memory workspace(InsertWorkspaceBytes(n));
  LaunchFindOrInsert(&executor, store.view, keys.data(), table_ids.data(), n, row_ids.data(), counts.data(),
                     workspace.get());
  constexpr int kPlaced = kMaxProbes * kEntriesPerBucket;
  JAXSOK_CHECK(counts[kCountInserted] == kPlaced && counts[kCountRefused] == n - kPlaced);
  JAXSOK_CHECK(store.counters[kNumUnplaced] == n - kPlaced && store.counters[kLongestProbe] == kMaxProbes);
  JAXSOK_CHECK(store.table_rows[0] == kPlaced && store.counters[kNumAllocated] == kPlaced);
  for (int64_t i = 0; i < n; ++i) JAXSOK_CHECK(row_ids[i] == (i < kPlaced ? i : kNoRow));

  store.counters[kSaltLow] = 124;
  std::memset(store.index_memory.get(), 0x3c, 500 * sizeof(Bucket));
  LaunchRebuild(&executor, store.view);
  JAXSOK_CHECK(store.counters[kNumUnplaced] == 0 && store.counters[kLongestProbe] < 10);
  LaunchFindOrInsert(&executor, store.view, keys.data(), table_ids.data(), n, row_ids.data(), counts.data(),
                     workspace.get());
  JAXSOK_CHECK(counts[kCountFound] == kPlaced + 1 && counts[kCountInserted] == n - kPlaced - 1);
}

/// The gradients of a row are summed correctly if every lane of the tree holds several chunks.
void TestHotRow() {
  ThreadExecutor executor(2);
  constexpr int64_t kNumKeys = 5000;
  constexpr int32_t kDim = 6;
  Batch batch;
  batch.keys.assign(kNumKeys, 3);
  batch.bags.resize(1);
  for (int64_t i = 0; i < kNumKeys; ++i) batch.bags[0].emplace_back(i, i + 1);
  batch.features.assign(kNumFeatureWords, 0);
  batch.features[kFeatureNumKeys] = batch.features[kFeatureNumBags] = kNumKeys;
  batch.features[kFeatureHotness] = 1;
  batch.features[kFeatureWeightsStart] = -1;
  Random random(5);
  std::vector<float> gradients(kNumKeys * kDim), row_gradient(kDim);
  for (float& g : gradients) g = random.Uniform();
  const std::vector<int32_t> inverse(kNumKeys, 0);
  Memory workspace(UpdateWorkspaceBytes(kNumKeys, kDim));
  const float* pointers[] = {gradients.data()};
  int32_t num_uses = 0;
  LaunchCombineTranspose(&executor, pointers, 1, kDim, inverse.data(), batch.View(),
                         LineTarget::Of(row_gradient.data()), kRowDtypeFloat32, &num_uses, nullptr, workspace.get());
  JAXSOK_CHECK(num_uses == kNumKeys);
  std::vector<Line> lines;
  for (int64_t i = 0; i < kNumKeys; ++i) lines.emplace_back(&gradients[i * kDim], &gradients[i * kDim] + kDim);
  JAXSOK_CHECK(IsSame(row_gradient, ModelSum(lines)));
}

#if defined(__x86_64__)
/// A caller that flushes denormals, as XLA's CPU client does, changes no bit.
void TestDenormals() {
  ThreadExecutor executor(2);
  Batch batch;
  batch.keys.assign(4, 0);
  batch.features.assign(kNumFeatureWords, 0);
  batch.features[kFeatureCombiner] = kCombinerSum;
  batch.features[kFeatureNumKeys] = 4;
  batch.features[kFeatureNumBags] = batch.features[kFeatureHotness] = 2;
  batch.features[kFeatureWeightsStart] = -1;
  batch.bags.resize(1);
  const Line rows = {FloatOfBits(5), FloatOfBits(0x00800000), FloatOfBits(7), FloatOfBits(0x80000001)};
  Store store(2, 1, {2}, 1, 0, 2);
  std::memcpy(store.rows[0].data(), rows.data(), rows.size() * sizeof(float));
  const Line wanted = {FloatOfBits(12), FloatOfBits(0x007fffff), FloatOfBits(10), FloatOfBits(0x01000000)};
  const std::vector<uint32_t> row_ids = {0, 1, 0, 0};
  std::vector<int32_t> counts(kNumCounts);
  batch.bags[0] = {{0, 2}, {2, 4}};
  Embeddings embeddings(batch, 2);
  constexpr unsigned kFlushes = 0x8040;  // FTZ and DAZ
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | kFlushes);
  const LaunchError error =
      LaunchLookupPlanned(&executor, store.view, batch.View(), row_ids.data(), embeddings.View(), counts.data());
  const bool is_restored = (_mm_getcsr() & kFlushes) == kFlushes;
  _mm_setcsr(saved);
  JAXSOK_CHECK(error == nullptr && is_restored);
  JAXSOK_CHECK(IsSame(embeddings.Values(0), wanted));
}
#endif

}  // namespace
}  // namespace jaxsok

int main(int argc, char** argv) {
  const uint64_t num_seeds = argc > 1 ? static_cast<uint64_t>(std::atoll(argv[1])) : 40;
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    for (const int num_threads : {1, 2, 5}) {
      jaxsok::Machine(seed, num_threads).Run(6);
      jaxsok::TestLookupPlanned(seed, num_threads);
      jaxsok::TestTranspose(seed, num_threads);
      jaxsok::TestRequests(seed, num_threads);
      jaxsok::TestGather(seed, num_threads);
      jaxsok::TestTouch(seed, num_threads);
    }
  }
  jaxsok::TestWalk();
  jaxsok::TestWalkInSmallIndex();
  jaxsok::TestRequestsRefused();
  jaxsok::TestUnplaced();
  jaxsok::TestHotRow();
#if defined(__x86_64__)
  jaxsok::TestDenormals();
#endif
  return jaxsok::Finish("kernels_cpu_test");
}

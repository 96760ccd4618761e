// The memory layout of one shard of a store.
//
//   index      Bucket[num_buckets]      64 bytes each: the map (table, key) -> row id
//   records    Record[capacity]         16 bytes each: which (table, key) owns the row
//   rows       RowDtype[capacity][dim]  the rows themselves, dense, by row id: of 4 or 2 bytes a number
//   states     float[capacity][1|dim]   one array for each piece of optimizer state
//   statistics RowStatistics[capacity]  8 bytes each, if requested: when and how often the row was used
//   counters   uint32[kNumCounters]     how many rows are in use, the list of freed rows, the generation
//   sightings  Bucket[num_buckets]      if a table admits by count: (table, key) -> occurrences so far
//   bloom      uint8[...]               if a table admits by Bloom filter: counters, four in a word
//
//            one bucket, 64 bytes, one memory line
//   +-----------------+-----------------+-----------------+-----------------+
//   | key  row_id aux | key  row_id aux | key  row_id aux | key  row_id aux |
//   +-----------------+-----------------+-----------------+-----------------+
//     8 B    4 B  4 B
//
// The index is separate from the rows because row bytes dominate memory: the rows must be full while the index stays
// half empty. At load 0.5 it costs 32 bytes a key, and one probe reads one memory line.
//
// Entry states, identified by key and aux:
//   empty      key == kPaddingKey                       aux == kAuxUnset
//   claimed    key is set, aux == kAuxUnset             its writer publishes (row_id, aux) in one 8-byte store
//   pending    aux == kAuxPending | table               row_id is the smallest position of the key in the batch
//   live       aux == table                             row_id is the row
// While a call inserts, an entry only moves downwards in this list. It becomes empty again only when the whole index is
// rebuilt or swept, or when a full store undoes every entry that the same call claimed.
//
// find walks the probe run of a key, bucket after bucket from its home (hash.h), in entry order, and stops at its entry
// or at the first empty one. This is correct because inserting fills the first empty entry of the same walk, and
// nothing is removed from the middle of a run.
// find_or_insert claims that first empty entry by compare-and-swap on the key. Two threads with one key walk
// the same run, so they meet in one entry: the loser sees the key it wanted. Identity is (table, key): a thread
// that meets its key with another table walks on.
// release marks the records of its rows dead and sweeps the index (kernels/evict.h), so tombstones never slow the table
// down: entries of dead rows and entries outside their home bucket are removed, the others are compacted, and the
// displaced ones are inserted again.
//
// Sightings have the form of an index whose entries are empty, claimed or live; the row id's word holds the count. An
// entry with count 0 is unused: a key that was forgotten (its row was released) keeps its entry until the next rebuild.
//
// Rows and all other per-row arrays are stored in slabs: growing appends one and copies nothing. Slab s holds the row
// ids [starts[s], starts[s + 1]).
//
// Freed rows are handed out again in ascending order, before fresh ones. Their list is stored in the records: entry j
// of the list is records[j].free_id (unrelated to row j: the space would be padding otherwise).
#ifndef JAXSOK_CORE_LAYOUT_H_
#define JAXSOK_CORE_LAYOUT_H_

#include "platform.h"

namespace jaxsok {

constexpr uint64_t kPaddingKey = ~uint64_t{0};  // the one reserved key (types.py PADDING_KEY)
constexpr uint32_t kNoRow = ~uint32_t{0};       // "absent" (types.py NO_ROW)
constexpr uint32_t kPendingRow = kNoRow - 1;    // inside one call: the row of this position is not decided yet
constexpr uint32_t kNoEntry = ~uint32_t{0};     // inside one call: the key found no entry within kMaxProbes
constexpr uint32_t kWinner = kNoRow - 2;        // inside one call: this position creates the row of its key

constexpr uint32_t kAuxUnset = ~uint32_t{0};
constexpr uint32_t kAuxPending = uint32_t{1} << 31;
constexpr uint32_t kMaxTables = uint32_t{1} << 24;  // table numbers are smaller: they never look like kAuxUnset

constexpr int kEntriesPerBucket = 4;
// At load 0.6 a walk of 64 buckets (256 entries) fails for less than one key in 10^12 (linear probing's run lengths
// fall exponentially). Reaching it means adversarial keys; a rebuild with another salt resolves them.
constexpr int kMaxProbes = 64;
// Doubling from 2^16 rows, 16 slabs reach 2^31 rows; the rest allow smaller last steps when memory is nearly full.
constexpr int kMaxSlabs = 24;
constexpr int kMaxStates = 8;  // of an optimizer (types.py MAX_STATES)
constexpr int kMaxDim = 1024;
// Classes of keys by hash, which a small map assigns to the shards (types.py NUM_PARTITIONS). Equal parts differ by at
// most one partition (a hundred shards have 40 or 41 each), and the map's 16 KiB fit a GPU's L1 cache.
constexpr int kNumPartitions = 4096;
constexpr int kMaxShards = 1 << 16;
constexpr uint32_t kNoOwner = ~uint32_t{0};  // a table without a fixed owner: its keys belong to shards by partition

/// The storage dtypes of rows (row_dtype.h).
enum RowDtype : int {
  kRowDtypeFloat32 = 0,
  kRowDtypeBfloat16 = 1,
  kRowDtypeFloat16 = 2,
  // Frozen stores only: each row has a scale.
  kQuantizedInt8 = 3,
  kQuantizedFloat8E4m3 = 4,
};

struct alignas(16) Entry {
  uint64_t key;
  uint32_t row_id;
  uint32_t aux;
};
static_assert(sizeof(Entry) == 16, "an entry is one 16-byte load");

struct alignas(64) Bucket {
  Entry entries[kEntriesPerBucket];
};
static_assert(sizeof(Bucket) == 64, "a bucket is one memory line");

struct alignas(16) Record {
  uint64_t key;  // kPaddingKey: the row is not in use
  uint32_t table;
  uint32_t free_id;  // entry of the list of freed rows, see above
};
static_assert(sizeof(Record) == 16, "a record is one 16-byte store");

/// The statistics that a store keeps of each row, if requested.
struct alignas(8) RowStatistics {
  uint32_t last_step;  // the clock of the last lookup that used the row
  uint32_t frequency;  // occurrences in lookups since the row was made, 2^32 - 1 at most
};
static_assert(sizeof(RowStatistics) == 8, "two words of a uint32[capacity, 2]");

/// A request of one shard to another: one distinct (table, key) pair of its batch.
struct alignas(16) Request {
  uint64_t key;  // kPaddingKey: none
  uint32_t table;
  uint32_t uses;  // occurrences in the asker's batch
};
static_assert(sizeof(Request) == 16, "a request is one 16-byte load");

/// Words of the counters array; types.py names them too.
enum Counter : int {
  kNumAllocated = 0,  // row ids below it have been handed out at least once
  kFreeBegin = 1,     // the list of freed rows is records[kFreeBegin .. kFreeEnd).free_id
  kFreeEnd = 2,
  kGeneration = 3,    // advanced by release: row ids of older plans are invalid
  kNumUnplaced = 4,   // occurrences that found no entry within kMaxProbes since the last rebuild, here or in sightings
  kLongestProbe = 5,  // buckets of the longest walk to a row since the last rebuild; a property of the order of
                      // entries, so on a GPU it may differ between runs
  kSaltLow = 6,       // mixed into every hash; a rebuild may change it
  kSaltHigh = 7,
  kNumSightings = 8,  // used entries of `sightings`, those of forgotten keys included
  kNumCounters = 9,
};

/// The words of one feature's part of a batch: one row of int32[num_features, kNumFeatureWords].
enum FeatureWord : int {
  kFeatureTable = 0,     // number of its table in the store
  kFeatureCombiner = 1,  // Combiner
  kFeatureKeyStart = 2,  // first position among the keys of the store
  kFeatureNumKeys = 3,   // static number of positions
  kFeatureBagStart = 4,  // first bag among the bags of the store
  kFeatureNumBags = 5,
  kFeatureHotness = 6,       // positions per bag: num_keys is num_bags times it; 0: ragged, see offsets
  kFeatureOffsetsStart = 7,  // first of num_bags + 1 offsets (ragged only)
  kFeatureWeightsStart = 8,  // first of num_keys weights; -1: none
  kFeatureTileStart = 9,     // tiles of the features before it; a tile is kBagsPerTile bags of one feature, and a
                             // feature with keys has one at least
  kFeatureUnknown = 10,      // find: 0 a key without a row gives its initial row, 1 zeros
  kFeaturePlan = 11,         // update: number of the plan that the feature came with
  kNumFeatureWords = 12,
};

constexpr int kBagsPerTile = 256;

enum Combiner : int {
  kCombinerNone = 0,  // every position is a bag of its own: num_bags == num_keys, hotness 1
  kCombinerSum = 1,
  kCombinerMean = 2,
  kCombinerSqrtn = 3,
};

/// The kinds of features in a batch, as bits.
enum FeatureKind : int {
  kSingleKeys = 1,  // some with kCombinerNone
  kBags = 2,        // some with another combiner
};

/// Words of a table's row in the int32 counts [num_tables, kNumCounts]; stats.py names them too.
enum Count : int {
  kCountFound = 0,
  kCountInserted = 1,
  kCountMissing = 2,
  kCountRefused = 3,
  kCountPadding = 4,
  kCountUnadmitted = 5,  // refused keys that the table's admission rejected
  kNumCounts = 6,
};

/// The words of a table, its initializer, owner and admission: one row of uint32[num_tables, kNumTableWords].
enum TableWord : int {
  kTableNameLow = 0,  // 64-bit hash of the table's name
  kTableNameHigh = 1,
  kTableInitializer = 2,   // InitializerKind
  kTableParameterA = 3,    // bits of a float
  kTableParameterB = 4,    // bits of a float
  kTableOwner = 5,         // the shard that owns the whole table; kNoOwner: by partition
  kTableUnknown = 6,       // gather for find: 0 a key without a row gives its initial row, 1 zeros
  kTableAdmission = 7,     // AdmissionKind
  kTableThreshold = 8,     // required sightings, at least 1; or the probability times 2^32
  kTableBloomBegin = 9,    // first word of its counters
  kTableBloomSize = 10,    // number of its counters, a multiple of four
  kTableBloomHashes = 11,  // counters that a key advances
  kNumTableWords = 16,
};

/// The policies by which unseen keys get rows; policies.py names them too.
enum AdmissionKind : int {
  kAdmitAll = 0,
  kAdmitByCount = 1,
  kAdmitByBloom = 2,
  kAdmitByProbability = 3,
};

/// The first row id of each slab; shared by rows, records and states of a store.
struct SlabStarts {
  uint32_t start[kMaxSlabs];
  int32_t num_slabs;

  /// Returns the slab that holds a row id below the capacity.
  JAXSOK_HOST_DEVICE int SlabOf(uint32_t row_id) const {
    int slab = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // one slab is the common case: code for several must not slow it
#endif
    for (int s = 1; s < num_slabs; ++s) slab += row_id >= start[s] ? 1 : 0;
    return slab;
  }
};

/// One per-row array in slabs.
template <typename T>
struct Slabs {
  T* data[kMaxSlabs];

  /// Returns the first of the `width` elements of a row.
  JAXSOK_HOST_DEVICE T* At(const SlabStarts& starts, uint32_t row_id, int64_t width) const {
    if (starts.num_slabs == 1) return data[0] + static_cast<int64_t>(row_id) * width;
    const int slab = starts.SlabOf(row_id);
    return data[slab] + static_cast<int64_t>(row_id - starts.start[slab]) * width;
  }
};

/// The rows in slabs; the store holds their dtype.
struct RowSlabs {
  void* data[kMaxSlabs];

  /// Returns the first number of a row. `T` is its type: float, BFloat16, Float16, Int8 or Float8E4m3.
  template <typename T>
  JAXSOK_HOST_DEVICE T* At(const SlabStarts& starts, uint32_t row_id, int64_t dim) const {
    if (starts.num_slabs == 1) return static_cast<T*>(data[0]) + static_cast<int64_t>(row_id) * dim;
    const int slab = starts.SlabOf(row_id);
    return static_cast<T*>(data[slab]) + static_cast<int64_t>(row_id - starts.start[slab]) * dim;
  }
};

struct IndexView {
  Bucket* buckets;
  uint32_t num_buckets;
  JAXSOK_HOST_DEVICE Entry* EntryAt(uint32_t entry) const {
    return &buckets[entry / kEntriesPerBucket].entries[entry % kEntriesPerBucket];
  }
};

/// The arrays of a store that lookups read or write.
struct StoreView {
  IndexView index;
  uint32_t* counters;      // [kNumCounters]
  uint32_t* table_rows;    // [num_tables]: rows of each table
  const uint32_t* tables;  // [num_tables, kNumTableWords]
  const uint32_t* seed;    // [2]
  SlabStarts starts;
  Slabs<Record> records;
  RowSlabs rows;
  RowDtype row_dtype;
  uint32_t capacity;
  int32_t dim;
  int32_t num_tables;
  const float* scales;  // [capacity]: of quantized rows; read by lookups of frozen stores only
};

/// The arrays that decide which unseen keys get rows, in stores with a table that has a policy.
struct AdmissionView {
  IndexView sightings;  // no buckets: no table admits by count
  uint32_t* bloom;      // nullptr: no table admits by Bloom filter
  uint64_t num_bloom_words;
  const uint32_t* step;     // []: the number of updates so far
  const uint32_t* uses;     // [num_keys]: occurrences that each position stands for; nullptr: one each
  const uint32_t* refused;  // [num_tables, kNumTableWords]: the initializers that keys without a row read
};

}  // namespace jaxsok

#endif  // JAXSOK_CORE_LAYOUT_H_

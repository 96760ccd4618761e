// Walks and claims in the index on a GPU, and the passes that turn claims into row ids.
//
// To insert n keys, these kernels run on one stream, without the host in between:
//   claim    each position whose key was not found (by find_or_insert here, by the main kernel of lookup before) walks
//            again and claims the first empty entry; positions that meet a pending entry leave the smallest in it.
//   count    positions that find their own number in their entry are winners: one for each new (table, key). Blocks
//            count theirs, the last block to end sums up and decides whether all fit.
//   assign   winners are numbered by position, get row ids (freed ones first), write record and initial row, and
//            publish the entry. If not all fit, every claim is undone instead: claims only ever took empty entries,
//            so the index is what it was before the call.
//   commit   the counters advance. If not all fit, the winners that got rows enter the index again. If a claim
//            found no entry (an index nearly full of claims, or aimed keys), one block inserts key by key.
//   finish   every position that was pending reads its row id.
// If a batch has no unseen key, all but the first pass return at once.
#ifndef JAXSOK_KERNELS_INDEX_CUDA_CUH_
#define JAXSOK_KERNELS_INDEX_CUDA_CUH_

#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "../core/initialize.h"
#include "../core/probe.h"
#include "launch_cuda.cuh"

namespace jaxsok {

constexpr int kPositionsPerChunk = kCountedTogether;  // at a time in a block of count or assign: 4 a thread
constexpr int kMaxSpins = 1 << 22;  // waits for another thread's single store: microseconds, bounded at seconds
constexpr int kSharedTables = 64;   // tables counted in shared memory; more go to global memory

/// The state that the passes share; the first pass zeroes it.
struct InsertControl {
  uint32_t num_pending;     // positions whose key has no row yet
  uint32_t num_unplaced;    // claims that found no entry
  uint32_t num_unfinished;  // bags to finish
  uint32_t blocks_done;     // of count, then of commit
  uint32_t num_new;         // winners
  uint32_t num_accepted;    // the winners that get rows
  uint32_t overflow;        // not all fit
};

/// Returns whether the passes insert key by key.
__device__ __forceinline__ bool IsSequential(const InsertControl& control) { return control.num_unplaced != 0; }

struct InsertWorkspace {
  InsertControl* control;
  uint32_t* entry_of;      // [num_keys]: of pending positions
  uint32_t* unfinished;    // [num_keys]: bags to finish
  uint32_t* chunk_counts;  // winners of each chunk of positions; then of all chunks before it

  static InsertWorkspace Cut(void* workspace, int64_t num_keys) {
    WorkspaceCutter cutter(workspace);
    InsertWorkspace w;
    w.control = cutter.Take<InsertControl>(1);
    w.entry_of = cutter.Take<uint32_t>(num_keys);
    w.unfinished = cutter.Take<uint32_t>(num_keys);
    w.chunk_counts = cutter.Take<uint32_t>(CeilDiv<int64_t>(num_keys, kPositionsPerChunk));
    return w;
  }
};

/// Loads four entries at once. kShared: other threads write the index at the same time, so L1 must not be used;
/// otherwise it may be, even with memory lines from before such writes.
template <bool kShared>
__device__ __forceinline__ void LoadBucket(const IndexView& index, uint32_t bucket, uint4 line[kEntriesPerBucket]) {
  const uint4* at = reinterpret_cast<const uint4*>(index.buckets + bucket);
#pragma unroll
  for (int e = 0; e < kEntriesPerBucket; ++e) line[e] = kShared ? __ldcg(at + e) : __ldca(at + e);
}

/// Searches one bucket of a walk. Returns true if the walk ends here: at the pair's entry, or at the first empty one.
///
/// It has no branches, so that the memory line stays in registers and the warp stays converged.
__device__ __forceinline__ bool EndsInBucket(const uint4 line[kEntriesPerBucket], uint32_t bucket, uint64_t key,
                                             uint32_t table, ProbeResult* at) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  bool ended = false;
#pragma unroll
  for (int e = kEntriesPerBucket - 1; e >= 0; --e) {
    const bool hit = line[e].x == low && line[e].y == high && line[e].w == table;
    const bool ends = hit || (line[e].x & line[e].y) == ~0u;  // kPaddingKey
    at->entry = ends ? bucket * kEntriesPerBucket + e : at->entry;
    at->row_id = hit ? line[e].z : at->row_id;
    ended = ended || ends;
  }
  return ended;
}

/// Continues a walk from a bucket, after `num_probes` buckets, to the entry of a pair or the first empty one. Loads
/// whole buckets.
template <bool kShared>
__device__ __forceinline__ ProbeResult ProbeFrom(const IndexView& index, uint64_t key, uint32_t table, uint32_t bucket,
                                                 uint32_t num_probes, uint32_t max_probes) {
  for (uint32_t probe = num_probes; probe < max_probes; ++probe) {
    uint4 line[kEntriesPerBucket];
    LoadBucket<kShared>(index, bucket, line);
    ProbeResult at{kNoRow, kNoEntry, static_cast<int32_t>(probe + 1)};
    if (EndsInBucket(line, bucket, key, table, &at)) return at;
    bucket = NextBucket(bucket, index.num_buckets);
  }
  return {kNoRow, kNoEntry, static_cast<int32_t>(max_probes)};
}

template <bool kShared>
__device__ __forceinline__ ProbeResult ProbeBuckets(const IndexView& index, uint64_t key, uint32_t table, uint64_t salt,
                                                    uint32_t max_probes) {
  return ProbeFrom<kShared>(index, key, table, HomeBucket(HashOf(key, table, salt), index.num_buckets), 0, max_probes);
}

/// Loads the (row_id, aux) half of an entry, as other threads publish it.
__device__ __forceinline__ uint64_t LoadHalf(const Entry* entry) {
  return *reinterpret_cast<const volatile unsigned long long*>(&entry->row_id);
}
__device__ __forceinline__ void StoreHalf(Entry* entry, uint32_t row_id, uint32_t aux) {
  *reinterpret_cast<volatile unsigned long long*>(&entry->row_id) = Word64(row_id, aux);
}

/// Walks to the entry of a (table, key) pair, or takes the first empty one for it.
///
/// publish(entry) writes the half (row_id, aux) of an entry that was taken. meet(entry, row_id, aux, &at) is called for
/// entries of the key; it returns true if the entry is the pair's own, so that the walk ends.
///
/// Result: kPendingRow, or the result of meet, with the entry; kNoEntry: none within max_probes.
/// No race: the key word changes once, by compare-and-swap; the half is written once, by the thread that took the
/// entry, and afterwards only lowered or added to atomically; a thread that meets the key waits for that one store.
template <typename Publish, typename Meet>
__device__ __forceinline__ ProbeResult TakeEntry(const IndexView& index, uint64_t key, uint32_t table, uint64_t salt,
                                                 uint32_t max_probes, const Publish& publish, const Meet& meet) {
  __builtin_assume(__isGlobal(index.buckets));
  uint32_t bucket = HomeBucket(HashOf(key, table, salt), index.num_buckets);
  for (uint32_t probe = 0; probe < max_probes; ++probe) {
    uint4 line[kEntriesPerBucket];
    LoadBucket<true>(index, bucket, line);
#pragma unroll
    for (int e = 0; e < kEntriesPerBucket; ++e) {
      uint64_t found = Word64(line[e].x, line[e].y);
      uint32_t row_id = line[e].z, aux = line[e].w;
      ProbeResult at{kPendingRow, bucket * kEntriesPerBucket + e, static_cast<int32_t>(probe + 1)};
      Entry* entry = &index.buckets[bucket].entries[e];
      if (found == kPaddingKey) {
        found = atomicCAS(reinterpret_cast<unsigned long long*>(&entry->key), kPaddingKey, key);
        if (found == kPaddingKey) {
          publish(entry);
          return at;
        }
        aux = kAuxUnset;  // the memory line is stale
      }
      if (found != key) continue;
      for (int spin = 0; aux == kAuxUnset && spin < kMaxSpins; ++spin) {
        const uint64_t half = LoadHalf(entry);
        row_id = static_cast<uint32_t>(half);
        aux = static_cast<uint32_t>(half >> 32);
      }
      if (aux == kAuxUnset) {  // continuing the walk could give the key a second entry
        at.entry = kNoEntry;
        return at;
      }
      if (meet(entry, row_id, aux, &at)) return at;
    }
    bucket = NextBucket(bucket, index.num_buckets);
  }
  return {kPendingRow, kNoEntry, static_cast<int32_t>(max_probes)};
}

/// Walks to the entry of a pair, or claims the first empty one for it: it keeps the pair's smallest position.
///
/// Result: row_id is a row, or kPendingRow with the entry; without an entry the pair is inserted key by key.
///
/// Not inlined: in the steady state few keys are new, and the walk's registers would reduce the occupancy of every
/// kernel.
static __device__ __noinline__ ProbeResult Claim(IndexView index, uint64_t key, uint32_t table, uint64_t salt,
                                                 uint32_t max_probes, uint32_t position) {
  return TakeEntry(
      index, key, table, salt, max_probes, [&](Entry* entry) { StoreHalf(entry, position, kAuxPending | table); },
      [&](Entry* entry, uint32_t row_id, uint32_t aux, ProbeResult* at) {
        if (aux == table) {
          at->row_id = row_id;
          return true;
        }
        if (aux != (kAuxPending | table)) return false;
        if (row_id > position) atomicMin(&entry->row_id, position);
        return true;
      });
}

/// Claims as above, but first checks whether the pair already has a row.
///
/// The first walk may read memory lines that L1 cached before this kernel's claims. That is harmless: a live entry does
/// not change while claims are made, and the second walk sees what such a line does not show.
__device__ __forceinline__ ProbeResult FindOrClaim(const IndexView& index, uint64_t key, uint32_t table, uint64_t salt,
                                                   uint32_t max_probes, uint32_t position) {
  const ProbeResult found = ProbeBuckets<false>(index, key, table, salt, max_probes);
  if (found.row_id != kNoRow) return found;
  return Claim(index, key, table, salt, max_probes, position);
}

/// Inserts a pair that is known to be absent and to be inserted by this thread only.
__device__ __forceinline__ ProbeResult InsertDistinct(const IndexView& index, uint64_t key, uint32_t table,
                                                      uint64_t salt, uint32_t max_probes, uint32_t row_id) {
  uint32_t bucket = HomeBucket(HashOf(key, table, salt), index.num_buckets);
  for (uint32_t probe = 0; probe < max_probes; ++probe) {
    for (int e = 0; e < kEntriesPerBucket; ++e) {
      Entry* entry = &index.buckets[bucket].entries[e];
      if (*reinterpret_cast<volatile unsigned long long*>(&entry->key) != kPaddingKey) continue;
      if (atomicCAS(reinterpret_cast<unsigned long long*>(&entry->key), kPaddingKey, key) != kPaddingKey) continue;
      StoreHalf(entry, row_id, table);
      return {row_id, bucket * kEntriesPerBucket + static_cast<uint32_t>(e), static_cast<int32_t>(probe + 1)};
    }
    bucket = NextBucket(bucket, index.num_buckets);
  }
  return {kNoRow, kNoEntry, static_cast<int32_t>(max_probes)};
}

/// Records how many buckets a walk to a row took.
__device__ __forceinline__ void NoteProbes(uint32_t* counters, int num_probes) {
  if (static_cast<uint32_t>(num_probes) > counters[kLongestProbe]) {
    atomicMax(counters + kLongestProbe, static_cast<uint32_t>(num_probes));
  }
}

/// Returns whether the calling block is the last one to arrive; it then sees what the others wrote before. All threads
/// of every block call it.
__device__ __forceinline__ bool IsLastBlock(uint32_t* blocks_done) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(blocks_done, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

using BlockScan = cub::BlockScan<uint32_t, kBlock>;

/// Replaces each count by the sum of those before it, and returns the total. All threads of one block, the last one,
/// call it.
__device__ __forceinline__ uint32_t SumCountsBefore(uint32_t* counts, uint32_t num_counts,
                                                    BlockScan::TempStorage& storage) {
  constexpr int kOfThread = 8;  // neighbouring counts
  uint32_t sum = 0;
  for (uint32_t start = 0; start < num_counts; start += kBlock * kOfThread) {
    const uint32_t first = start + threadIdx.x * kOfThread;
    uint32_t own[kOfThread], before[kOfThread], total;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) own[i] = first + i < num_counts ? __ldcg(counts + first + i) : 0;
    __syncthreads();
    BlockScan(storage).ExclusiveSum(own, before, total);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (first + i < num_counts) counts[first + i] = sum + before[i];
    }
    sum += total;
  }
  return sum;
}

/// Counts by table: in shared memory if tables are few, so that one hot address does not serialise a batch.
class TableCounts {
 public:
  /// Clears the counts. All threads of the block call it. `shared` has kSharedTables * kNumCounts words.
  __device__ TableCounts(int32_t* shared, int32_t* counts, int num_tables)
      : shared_(shared), counts_(counts), num_tables_(num_tables) {
    if (num_tables_ <= kSharedTables) {
      for (int i = threadIdx.x; i < num_tables_ * kNumCounts; i += blockDim.x) shared_[i] = 0;
    }
    __syncthreads();
  }
  __device__ void Add(uint32_t table, Count what, int n) {
    int32_t* at = (num_tables_ <= kSharedTables ? shared_ : counts_) + table * kNumCounts + what;
    atomicAdd(at, n);
  }
  /// Writes the counts. All threads of the block call it.
  __device__ void Flush() {
    __syncthreads();
    if (num_tables_ > kSharedTables) return;
    for (int i = threadIdx.x; i < num_tables_ * kNumCounts; i += blockDim.x) {
      if (shared_[i] != 0) atomicAdd(counts_ + i, shared_[i]);
    }
  }

 private:
  int32_t* shared_;
  int32_t* counts_;
  int num_tables_;
};

/// The recording of row uses by a lookup, in statistics with the slabs of its store. LaunchTouch has the contract.
struct UseNotes {
  Slabs<RowStatistics> statistics;
  const uint32_t* clock;  // one word; nullptr: the store keeps no statistics

  __device__ bool AreKept() const { return clock != nullptr; }
  /// Returns the new last_step. It is loaded early, so that no store waits for it.
  __device__ uint32_t Now() const { return AreKept() ? __ldg(clock) : 0; }
  /// Adds uses. Frequencies are counted atomically; all writers of a last_step write the same clock.
  __device__ void Add(const SlabStarts& starts, uint32_t row_id, uint32_t uses, uint32_t now) const {
    RowStatistics* line = statistics.At(starts, row_id, 1);
    CountAtomically(&line->frequency, uses);
    line->last_step = now;
  }
  /// Records one use of each lane's row, none for row ids beyond the capacity. All lanes of the warp call it.
  ///
  /// The first of the lanes that have the same row writes for all: a hot key occurs in many lanes of every warp, whose
  /// additions to one word would be serialised.
  __device__ void AddOfWarp(const StoreView& store, uint32_t row_id, uint32_t now) const {
    const unsigned peers = __match_any_sync(~0u, row_id);
    const bool is_first = threadIdx.x % kWarp == static_cast<unsigned>(__ffs(static_cast<int>(peers)) - 1);
    if (is_first && row_id < store.capacity) Add(store.starts, row_id, static_cast<uint32_t>(__popc(peers)), now);
  }
};

/// The uses that the threads of a block recorded, summed by row in shared memory; the first rows get a slot.
///
/// A hot key occurs in every warp of its table. Additions to one word of memory are serialised and take some
/// nanoseconds each: per warp they take longer than the rest of the lookup, per block they are negligible. Hot keys
/// occur early, so their rows get slots; uses of rows without a slot go to memory directly.
struct UseCache {
  static constexpr int kSlots = 2 * kBlock;
  uint32_t rows[kSlots];  // kNoRow: free
  uint32_t uses[kSlots];

  /// Clears the slots. All threads of the block call it, and then wait for each other.
  __device__ void Clear() {
    for (int i = threadIdx.x; i < kSlots; i += kBlock) {
      rows[i] = kNoRow;
      uses[i] = 0;
    }
    __syncthreads();
  }
  /// Records one use of a row, and returns true if the row has a slot.
  __device__ bool Put(uint32_t row_id) {
    constexpr int kLogSlots = 9;
    static_assert(kSlots == 1 << kLogSlots, "a slot is named by the upper bits of a product");
    const uint32_t home = row_id * kGolden32 >> (32 - kLogSlots);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t slot = (home + i) % kSlots;
      const uint32_t there = atomicCAS(&rows[slot], kNoRow, row_id);
      if (there != kNoRow && there != row_id) continue;
      atomicAdd(&uses[slot], 1u);
      return true;
    }
    return false;
  }
  /// Writes the uses to memory. All threads of the block call it, after the last Put.
  __device__ void Flush(const UseNotes& notes, const SlabStarts& starts, uint32_t now) const {
    __syncthreads();
    for (int i = threadIdx.x; i < kSlots; i += kBlock) {
      if (rows[i] != kNoRow) notes.Add(starts, rows[i], uses[i], now);
    }
  }
};

// Sinks: the destination of new pairs. ------------------------------------------------------------------------

/// A sink that gives new pairs rows of a store.
struct StoreSink {
  static constexpr int kColumnsAtOnce = 4;

  StoreView store;
  int32_t* counts;
  UseNotes notes{};

  __device__ uint32_t MaxProbes() const { return kMaxProbes; }
  __device__ uint64_t Salt() const { return SaltOf(store.counters); }
  __device__ const IndexView& Index() const { return store.index; }
  // A handler cannot wait to check the counters of a state with foreign writes. They are bounded here, so that no row
  // is outside the slabs whatever they contain.
  __device__ uint32_t NumAllocated() const { return min(store.counters[kNumAllocated], store.capacity); }
  __device__ uint32_t FreeEnd() const { return min(store.counters[kFreeEnd], store.capacity); }
  __device__ uint32_t FreeBegin() const { return min(store.counters[kFreeBegin], FreeEnd()); }
  __device__ uint32_t NumFree() const { return FreeEnd() - FreeBegin(); }
  __device__ uint32_t Available() const { return store.capacity - NumAllocated() + NumFree(); }

  /// Returns the row of the i-th new pair: freed rows in ascending order, then fresh ones.
  __device__ uint32_t RowOf(uint32_t ordinal) const {
    const uint32_t num_free = NumFree();
    if (ordinal >= num_free) return NumAllocated() + (ordinal - num_free);
    return min(store.records.At(store.starts, FreeBegin() + ordinal, 1)->free_id, store.capacity - 1);
  }
  __device__ void WriteRecord(uint32_t row_id, uint64_t key, uint32_t table) const {
    Record* record = store.records.At(store.starts, row_id, 1);
    record->key = key;
    record->table = table;
    // The use of the position that creates the row: no other pass records it.
    if (notes.AreKept()) notes.Add(store.starts, row_id, 1, notes.Now());
  }
  __device__ uint64_t KeyOf(uint32_t row_id) const { return store.records.At(store.starts, row_id, 1)->key; }
  __device__ uint32_t TableOf(uint32_t row_id) const { return store.records.At(store.starts, row_id, 1)->table; }
  /// Returns the number of lanes that write a new row together, four columns each: a power of two, at most a warp.
  __device__ int LanesOfRow() const {
    int lanes = 1;
    while (lanes * kColumnsAtOnce < store.dim && lanes < kWarp) lanes *= 2;
    return lanes;
  }
  /// Writes a new row with lanes `lane` of `lanes`.
  __device__ void WriteRow(uint32_t row_id, uint64_t key, uint32_t table, int lane, int lanes) const {
    if (store.row_dtype == kRowDtypeFloat32) {
      WriteRowAs<float>(row_id, key, table, lane, lanes);
    } else if (store.row_dtype == kRowDtypeBfloat16) {
      WriteRowAs<BFloat16>(row_id, key, table, lane, lanes);
    } else {
      WriteRowAs<Float16>(row_id, key, table, lane, lanes);
    }
  }
  template <typename Row>
  __device__ void WriteRowAs(uint32_t row_id, uint64_t key, uint32_t table, int lane, int lanes) const {
    Row* row = store.rows.At<Row>(store.starts, row_id, store.dim);
    const RowInitializer values = RowInitializer::Of(store.tables + table * kNumTableWords, store.seed, key);
    const bool whole = store.dim % kColumnsAtOnce == 0;
    for (int column = lane * kColumnsAtOnce; column < store.dim; column += lanes * kColumnsAtOnce) {
      Columns<kColumnsAtOnce> four;
#pragma unroll
      for (int i = 0; i < kColumnsAtOnce; ++i) four.v[i] = values.At(column + i);
      if (whole) {
        four.Store(row + column);
      } else {
        for (int i = 0; i < kColumnsAtOnce && column + i < store.dim; ++i) {
          row[column + i] = RowNumber<Row>::Nearest(four.v[i]);
        }
      }
    }
  }
  __device__ void CountNew(uint32_t table, int n) const {
    atomicAdd(store.table_rows + table, static_cast<uint32_t>(n));
    atomicAdd(counts + table * kNumCounts + kCountInserted, n);
  }
  __device__ void Commit(uint32_t num_new) const {
    const uint32_t reused = min(num_new, NumFree());
    const uint32_t begin = FreeBegin() + reused, allocated = NumAllocated() + (num_new - reused);
    store.counters[kFreeBegin] = begin;
    store.counters[kNumAllocated] = allocated;
  }
  __device__ void SawUnplaced() const { atomicAdd(store.counters + kNumUnplaced, 1u); }
  __device__ void SawProbes(int num_probes) const { NoteProbes(store.counters, num_probes); }
  /// Records the probes as SawProbes does, for a pair that was inserted where it had claimed.
  __device__ void SawEntry(uint64_t key, uint32_t table, uint32_t entry) const {
    const uint32_t home = HomeBucket(HashOf(key, table, Salt()), store.index.num_buckets);
    const uint32_t bucket = entry / kEntriesPerBucket;
    const uint32_t steps = bucket >= home ? bucket - home : bucket + store.index.num_buckets - home;
    SawProbes(static_cast<int>(steps + 1));
  }
  __device__ int NumTables() const { return store.num_tables; }
};

// Passes (table_insert_cuda.cu). ---------------------------------------------------------------------------------

/// Returns the result of a pending position: a row, or kNoRow; sets *unplaced if no entry was in reach.
__device__ __forceinline__ uint32_t ResolvePending(const StoreSink& sink, const InsertControl& control, uint32_t entry,
                                                   uint64_t key, uint32_t table, bool* unplaced) {
  *unplaced = false;
  if (control.overflow == 0 && !IsSequential(control)) {
    return static_cast<uint32_t>(LoadHalf(sink.Index().EntryAt(entry)));
  }
  const ProbeResult at = ProbeBuckets<true>(sink.Index(), key, table, sink.Salt(), sink.MaxProbes());
  *unplaced = at.row_id == kNoRow && at.entry == kNoEntry;
  return at.row_id;
}

/// Returns the blocks of a pass over all positions: enough to fill any GPU, few enough to cost little without new keys.
inline int InsertBlocks(int64_t num_keys) {
  return static_cast<int>(std::min(CeilDiv<int64_t>(num_keys, kPositionsPerChunk), int64_t{BlocksOfWave()}));
}

/// Claims entries for the positions that are pending in `row_ids`.
LaunchError LaunchClaimPending(Stream stream, const StoreSink& sink, const InsertWorkspace& w, const uint64_t* keys,
                               const TableOfPosition& table_of, const uint32_t* row_ids, int64_t num_keys);

/// Launches count, assign and commit, between claim and finish.
LaunchError LaunchInsertPasses(Stream stream, const StoreSink& sink, const InsertWorkspace& w, const uint64_t* keys,
                               const TableOfPosition& table_of, uint32_t* row_ids, int64_t num_keys);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_INDEX_CUDA_CUH_

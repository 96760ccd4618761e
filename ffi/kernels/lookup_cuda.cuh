// The lookup kernels on a GPU, for rows of one dtype. bags_cuda.cuh describes the work of lanes, index_cuda.cuh how
// rows are created, lookup_cuda.cu the order of the passes. ../CMakeLists.txt lists the instances of these templates.
#ifndef JAXSOK_KERNELS_LOOKUP_CUDA_CUH_
#define JAXSOK_KERNELS_LOOKUP_CUDA_CUH_

#include "bags_cuda.cuh"
#include "index_cuda.cuh"
#include "lookup_cuda.h"

namespace jaxsok {

/// The counts of a lane; summed before the block ends.
struct LaneCounts {
  int found = 0;
  int absent = 0;
  int padding = 0;
  int longest_probe = 0;
  uint64_t digest = 0;  // of the keys (DigestOf), if the mode inserts
};

/// The contribution of the positions of one feature (SumBags), and their counts.
///
/// Absent keys stay absent in this pass. If the mode inserts they are pending: the passes of index_cuda.cuh claim and
/// number them, and the finishing pass computes their bags.
template <int kLookupMode, typename RowType>
struct LookupSource {
  static constexpr int kMode = kLookupMode;
  using Row = RowType;
  // The dtype of sums of rows, if it is not float32.
  using Sum = std::conditional_t<kMode == kModePlanned && std::is_same_v<Row, float>, BFloat16, Row>;

  const LookupArguments& a;
  const Feature& f;
  const uint64_t& salt;
  LaneCounts counts;
  UseCache* uses;  // of the block; kModeTrack

  /// A key, and with kModePlanned its row id.
  struct Token {
    uint64_t key;
    uint32_t row_id;
  };
  __device__ static Token None() { return {kPaddingKey, kNoRow}; }
  __device__ Token Load(int32_t at) const {
    const int64_t position = int64_t{f.key_start} + at;
    if (kMode == kModeFind && a.has_key_arrays) return {__ldg(a.key_arrays[f.number] + at), kNoRow};
    return {__ldg(a.batch.keys + position), kMode == kModePlanned ? __ldg(a.given_row_ids + position) : kNoRow};
  }
  /// Returns the end of a token's walk.
  __device__ ProbeResult Walk(const Token& token) const {
    if (kMode == kModePlanned || token.key == kPaddingKey) return {token.row_id, kNoEntry, 1};
    return ProbeBuckets<false>(a.store.index, token.key, f.table, salt, kMaxProbes);
  }
  __device__ Position Resolve(int32_t at, const Token& token, bool valid) {
    const uint32_t now = Now();
    const ProbeResult found = Walk(token);
    const Position p = valid ? Take(at, token.key, found) : Position{nullptr, kPaddingKey, kPositionPadding, 1.0f};
    Note(p, found, now);
    return p;
  }
  /// Copies the rows of 32 positions, lane i holding position i, to rows `first_line` and following of the output.
  template <int kVector, int kPerLane>
  __device__ void Copy(const Position& mine, int num_valid, int lanes, void* out, bool is_float32,
                       int64_t first_line) const {
    CopyRows<Row, kVector, kPerLane>(mine, num_valid, a.store, OneTable{static_cast<uint32_t>(f.table)}, lanes, out,
                                     is_float32, first_line);
  }
  /// Returns the table of a position of the feature.
  __device__ uint32_t TableAt(int32_t at) const {
    const bool is_given = kMode == kModePlanned && a.batch.tables != nullptr;
    return is_given ? __ldg(a.batch.tables + f.key_start + at) : static_cast<uint32_t>(f.table);
  }
  __device__ bool ReadsZeros(int32_t at) const {
    if (kMode == kModeFind) return f.unknown_zeros != 0;
    if (a.batch.tables == nullptr) return false;
    return __ldg(a.store.tables + TableAt(at) * kNumTableWords + kTableUnknown) != 0;
  }
  __device__ uint32_t Now() const { return kMode == kModeTrack ? a.notes.Now() : 0; }
  /// Records the use of a found row. Uses of new rows are recorded when they are created, or by the finishing pass.
  __device__ void Note(const Position& p, const ProbeResult& found, uint32_t now) const {
    if (kMode != kModeTrack || p.kind != kPositionRow) return;
    if (!uses->Put(found.row_id)) a.notes.Add(a.store.starts, found.row_id, 1, now);
  }
  /// Counts and returns a position whose walk has ended, at a row or not.
  __device__ Position Take(int32_t at, uint64_t key, const ProbeResult& found) {
    const int64_t position = int64_t{f.key_start} + at;
    Position p{nullptr, key, kPositionPadding, 1.0f};
    if (key == kPaddingKey) {
      ++counts.padding;
      if (Inserts(kMode)) a.row_ids[position] = kNoRow;
      return p;
    }
    if (Inserts(kMode)) counts.digest += DigestOf(key, position);
    if (f.weights_start >= 0) p.weight = __ldg(a.batch.weights + f.weights_start + at);
    if (found.row_id < a.store.capacity) {
      if (Inserts(kMode)) a.row_ids[position] = found.row_id;
      p.kind = kPositionRow;
      p.pointer = a.store.rows.At<Row>(a.store.starts, found.row_id, a.store.dim);
      ++counts.found;
      counts.longest_probe = max(counts.longest_probe, found.num_probes);
      return p;
    }
    ++counts.absent;
    if (Inserts(kMode)) {
      a.row_ids[position] = kPendingRow;
      p.kind = kPositionUnfinished;
    } else {
      p.kind = ReadsZeros(at) ? kPositionZeros : kPositionInitial;
    }
    return p;
  }
};

/// Leaves bags to the finishing pass; lanes with `unfinished` each add one bag.
///
/// Such a bag holds at least one position, so the list has room for all of them.
__device__ __forceinline__ void LeaveBag(const InsertWorkspace& w, bool unfinished, uint32_t bag, int64_t room) {
  const unsigned lanes = __ballot_sync(~0u, unfinished);
  if (lanes == 0) return;
  const int leader = __ffs(lanes) - 1, lane = threadIdx.x % kWarp;
  uint32_t start = 0;
  if (lane == leader) start = atomicAdd(&w.control->num_unfinished, static_cast<uint32_t>(__popc(lanes)));
  start = __shfl_sync(~0u, start, leader);
  const uint32_t at = start + __popc(lanes & ((1u << lane) - 1));
  if (unfinished && at < room) w.unfinished[at] = bag;
}

/// Counts the positions outside all bags as padding: before the first bag of a feature, and after its last one. Blocks
/// share them as they share the feature's bags; all threads of `block` of `blocks` call it. Blocks beyond them
/// (LaunchLookupFrozen) have no share.
template <int kMode>
__device__ __forceinline__ void CountLoosePositions(const LookupArguments& a, const Feature& f, int block, int blocks,
                                                    LaneCounts& counts) {
  int32_t first, last;
  f.Bags(a.batch.offsets, &first, &last);
  const int64_t num_loose = block < blocks ? first + (f.num_keys - last) : 0;
  for (int64_t i = int64_t{block} * kBlock + threadIdx.x; i < num_loose; i += int64_t{blocks} * kBlock) {
    ++counts.padding;
    if (Inserts(kMode)) {
      const int64_t position = f.key_start + (i < first ? i : last + (i - first));
      a.row_ids[position] = kNoRow;
      counts.digest += DigestOf(__ldg(a.batch.keys + position), position);
    }
  }
}

/// Adds the lanes' counts to the feature's table. All threads of the block call it; the block waits for all of them if
/// it inserts.
template <int kMode>
__device__ __forceinline__ void FlushCounts(const LookupArguments& a, const Feature& f, const LaneCounts& lane) {
  if (a.counts == nullptr) return;  // counts are not requested; only for frozen stores
  __shared__ int32_t sums[4];
  if (threadIdx.x < 4) sums[threadIdx.x] = 0;
  __syncthreads();
  const int found = __reduce_add_sync(~0u, lane.found), absent = __reduce_add_sync(~0u, lane.absent);
  const int padding = __reduce_add_sync(~0u, lane.padding), longest = __reduce_max_sync(~0u, lane.longest_probe);
  if (threadIdx.x % kWarp == 0) {
    atomicAdd(&sums[0], found);
    atomicAdd(&sums[1], absent);
    atomicAdd(&sums[2], padding);
    atomicMax(&sums[3], longest);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t* counts = a.counts + f.table * kNumCounts;
  if (sums[0] != 0) atomicAdd(counts + kCountFound, sums[0]);
  if (sums[2] != 0) atomicAdd(counts + kCountPadding, sums[2]);
  if (Inserts(kMode)) {
    // The finishing passes count absent keys.
    if (sums[1] != 0) atomicAdd(&a.insert.control->num_pending, static_cast<uint32_t>(sums[1]));
    NoteProbes(a.store.counters, sums[3]);
  } else if (sums[1] != 0) {
    atomicAdd(counts + (kMode == kModeFind ? kCountMissing : kCountRefused), sums[1]);
  }
}

/// The digest of a block's keys, in shared memory; empty if the mode does not insert.
template <int kMode, bool kIsKept = Inserts(kMode)>
struct BlockDigest {
  __device__ void Put(uint64_t) {}
  __device__ void AddTo(uint64_t*) const {}
};
template <int kMode>
struct BlockDigest<kMode, true> {
  uint64_t of_warp[kBlock / kWarp];

  /// Puts the digest of each lane. All lanes of every warp call it once.
  __device__ void Put(uint64_t of_lane) {
    const uint64_t sum = SumOfWarp(of_lane);
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = sum;
  }
  /// Adds the digest to the total, after a barrier.
  __device__ void AddTo(uint64_t* digest) const {
    if (threadIdx.x != 0) return;
    uint64_t sum = 0;
#pragma unroll
    for (uint64_t part : of_warp) sum += part;
    if (sum != 0) AtomicAdd64(digest, sum);
  }
};

/// The uses that a block records with kModeTrack, in shared memory; empty in the other modes.
template <int kMode>
struct UseCacheOf {
  __device__ UseCache* Begin() { return nullptr; }
  __device__ void End(const LookupArguments&, uint32_t) {}
};
template <>
struct UseCacheOf<kModeTrack> {
  UseCache cache;
  __device__ UseCache* Begin() {
    cache.Clear();
    return &cache;
  }
  __device__ void End(const LookupArguments& a, uint32_t now) { cache.Flush(a.notes, a.store.starts, now); }
};

/// The bags of a block, all of one feature, and those of a warp in it.
struct BlockBags {
  Feature f;
  int block, blocks;  // the blocks that share the feature
  int32_t first_bag, last_bag;

  /// Returns the bags of block number `at`.
  __device__ static BlockBags Of(const BatchView& batch, TileShare share, int at) {
    const int of_tile = share.BlocksPerTile();
    const int tile = at / of_tile;
    BlockBags b;
    b.f = Feature::Load(batch.features,
                        FeatureAt(batch.features, batch.num_features, kFeatureTileStart, tile, batch.num_tiles));
    b.block = at - b.f.tile_start * of_tile;
    b.blocks = max(CeilDiv(b.f.num_bags, kBagsPerTile), 1) * of_tile;  // without bags: one tile
    const int32_t warp = b.block * (kBlock / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
    b.first_bag = min(warp * share.granule, b.f.num_bags);
    b.last_bag = min(b.first_bag + share.granule, b.f.num_bags);
    return b;
  }
};

// Single keys: lane i of a warp finds the row of bag i, then groups of lanes copy 32 / lanes rows at a time. A thread
// writes the row id of its key and its columns of its group's embeddings; only counters are shared, and are added to.
template <typename Source, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock, BlocksPerMultiprocessor<kVector * kPerLane>())
    LookupRowsKernel(const __grid_constant__ LookupArguments a, const __grid_constant__ EmbeddingPointers embeddings,
                     TileShare share, int lanes) {
  constexpr int kMode = Source::kMode;
  const BlockBags b = BlockBags::Of(a.batch, share, static_cast<int>(blockIdx.x));
  const Feature& f = b.f;
  if (f.combiner != kCombinerNone) return;
  __shared__ UseCacheOf<kMode> uses;
  __shared__ BlockDigest<kMode> digest;
  const uint64_t salt = kMode == kModePlanned ? 0 : SaltOf(a.store.counters);
  Source source{a, f, salt, {}, uses.Begin()};
  const uint32_t now = source.Now();
  const int32_t bag = b.first_bag + static_cast<int32_t>(threadIdx.x % kWarp);
  if (b.first_bag >= b.last_bag) {
    digest.Put(0);
  } else {
    Position mine{nullptr, kPaddingKey, kPositionPadding, 1.0f};
    ProbeResult found{kNoRow, kNoEntry, 1};
    if (bag < b.last_bag) {
      const auto token = source.Load(bag);
      found.row_id = token.row_id;
      if (kMode != kModePlanned && token.key != kPaddingKey) {
        found = ProbeBuckets<false>(a.store.index, token.key, f.table, salt, kMaxProbes);
      }
      mine = source.Take(bag, token.key, found);
    }
    // All positions are bags. Computed here, so that no register holds it while rows are copied.
    digest.Put(source.counts.digest);
    source.Note(mine, found, now);
    source.template Copy<kVector, kPerLane>(mine, b.last_bag - b.first_bag, lanes, embeddings.pointers.data[f.number],
                                            embeddings.is_float32, b.first_bag);
    if (Inserts(kMode)) {
      LeaveBag(a.insert, mine.kind == kPositionUnfinished, static_cast<uint32_t>(f.bag_start + bag), a.batch.num_keys);
    }
  }
  uses.End(a, now);
  CountLoosePositions<kMode>(a, f, b.block, b.blocks, source.counts);
  FlushCounts<kMode>(a, f, source.counts);
  digest.AddTo(a.digest);
}

// Other bags: each group of lanes sums one after the other. The writes are those of single keys.
template <typename Source, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock, BagBlocksPerMultiprocessor<kVector * kPerLane>())
    LookupBagsKernel(const __grid_constant__ LookupArguments a, const __grid_constant__ EmbeddingPointers embeddings,
                     TileShare share, int lanes) {
  constexpr int kMode = Source::kMode;
  __shared__ WindowRows window_rows[kBlock / kWarp];
  __shared__ UseCacheOf<kMode> uses;
  __shared__ BlockDigest<kMode> digest;
  __shared__ Feature f;
  __shared__ uint64_t salt;
  const int num_blocks = static_cast<int>(gridDim.x), first_block = a.batch.first_tile * share.BlocksPerTile();
  int at = static_cast<int>(blockIdx.x) + first_block;
  if (at >= num_blocks) at -= num_blocks;
  const BlockBags b = BlockBags::Of(a.batch, share, at);
  if (threadIdx.x == 0) {
    f = b.f;
    salt = kMode == kModePlanned ? 0 : SaltOf(a.store.counters);
  }
  __syncthreads();
  if (f.combiner == kCombinerNone) return;
  Source source{a, f, salt, {}, uses.Begin()};
  const GroupBags bags = GroupBags::Of(f, a.batch.offsets, b.first_bag, b.last_bag, share.granule, lanes);
  const uint32_t unfinished = SumBags<typename Source::Row, kVector, kPerLane>(
      f, bags, a.store, lanes, source, window_rows[threadIdx.x / kWarp],
      [&](int32_t bag, const BagResult& result, RowPart<kVector, kPerLane>& sum) {
        const bool is_float32 = kIsQuantized<typename Source::Row> || embeddings.is_float32;
        WriteBag<typename Source::Sum>(f, result, sum, lanes, a.store.dim, embeddings.pointers.data[f.number],
                                       is_float32, bag);
      });
  if (Inserts(kMode)) {
    const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    LeaveBag(a.insert, (unfinished >> lane & 1) != 0, static_cast<uint32_t>(f.bag_start + bags.first_bag + lane),
             a.batch.num_keys);
  }
  uses.End(a, source.Now());
  CountLoosePositions<kMode>(a, f, b.block, b.blocks, source.counts);
  digest.Put(source.counts.digest);
  FlushCounts<kMode>(a, f, source.counts);
  digest.AddTo(a.digest);
}

/// The contribution of positions after the insertion of their keys (SumBags).
template <typename Row>
struct FinishSource {
  const LookupArguments& a;
  const Feature& f;
  const InsertControl& control;
  TableCounts& counts;

  using Token = uint64_t;
  __device__ static Token None() { return kPaddingKey; }
  __device__ Token Load(int32_t at) const { return __ldg(a.batch.keys + f.key_start + at); }
  __device__ uint32_t TableAt(int32_t) const { return static_cast<uint32_t>(f.table); }
  __device__ Position Resolve(int32_t at, Token key, bool) {
    uint32_t unnoted = kNoRow;
    const Position p = Take(at, key, &unnoted);
    if (a.notes.AreKept()) a.notes.AddOfWarp(a.store, unnoted, a.notes.Now());
    return p;
  }
  /// Returns a position. `unnoted`: gets the row of a key that was pending.
  __device__ Position Take(int32_t at, Token key, uint32_t* unnoted) {
    const int64_t position = int64_t{f.key_start} + at;
    Position p{nullptr, key, kPositionPadding, 1.0f};
    if (key == kPaddingKey) return p;
    uint32_t row_id = a.row_ids[position];
    if (row_id == kPendingRow) {
      bool unplaced;
      row_id =
          ResolvePending(StoreSink{a.store, a.counts}, control, a.insert.entry_of[position], key, f.table, &unplaced);
      if (row_id >= a.store.capacity) row_id = kNoRow;
      a.row_ids[position] = *unnoted = row_id;
      counts.Add(f.table, row_id == kNoRow ? kCountRefused : kCountFound, 1);
      if (unplaced) atomicAdd(a.store.counters + kNumUnplaced, 1u);
    }
    if (f.weights_start >= 0) p.weight = __ldg(a.batch.weights + f.weights_start + at);
    p.kind = row_id == kNoRow ? kPositionInitial : kPositionRow;
    if (row_id != kNoRow) p.pointer = a.store.rows.At<Row>(a.store.starts, row_id, a.store.dim);
    return p;
  }
};

// A group of lanes takes one bag of the list after the other: its pending keys are decided now. A position is in one
// bag, and a bag is in the list once: no two groups write the same row id or embedding.
template <typename Row, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock)
    FinishKernel(const __grid_constant__ LookupArguments a, const __grid_constant__ EmbeddingPointers embeddings,
                 int lanes) {
  const InsertControl control = *a.insert.control;
  if (control.num_unfinished == 0) return;
  __shared__ int32_t shared_counts[kSharedTables * kNumCounts];
  __shared__ WindowRows window_rows[kBlock / kWarp];
  TableCounts counts(shared_counts, a.counts, a.store.num_tables);
  const int groups = kWarp / lanes, group = (threadIdx.x % kWarp) / lanes;
  const int64_t warp = int64_t{blockIdx.x} * (kBlock / kWarp) + threadIdx.x / kWarp;
  const int64_t stride = int64_t{gridDim.x} * (kBlock / kWarp) * groups;
  const int64_t num_unfinished = min(int64_t{control.num_unfinished}, a.batch.num_keys);
  for (int64_t first = warp * groups; first < num_unfinished; first += stride) {
    const int64_t item = first + group;
    const bool valid = item < num_unfinished;
    const int32_t global_bag = static_cast<int32_t>(a.insert.unfinished[valid ? item : first]);
    const Feature f =
        Feature::Load(a.batch.features, FeatureAt(a.batch.features, a.batch.num_features, kFeatureBagStart, global_bag,
                                                  int64_t{a.batch.num_tiles} * kBagsPerTile));
    const int32_t bag = global_bag - f.bag_start;
    int32_t begin = 0, end = 0;
    if (valid) f.BagRange(a.batch.offsets, bag, &begin, &end);
    const GroupBags bags{bag, valid ? 1 : 0, begin, end, end};
    FinishSource<Row> source{a, f, control, counts};
    SumBags<Row, kVector, kPerLane>(f, bags, a.store, lanes, source, window_rows[threadIdx.x / kWarp],
                                    [&](int32_t at, const BagResult& result, RowPart<kVector, kPerLane>& sum) {
                                      WriteBag<Row>(f, result, sum, lanes, a.store.dim,
                                                    embeddings.pointers.data[f.number], embeddings.is_float32, at);
                                    });
  }
  counts.Flush();
}

/// Launches the kernels of the features in the batch, for rows of a source.
template <typename Source>
LaunchError LaunchSource(Stream stream, const LookupArguments& a, const EmbeddingPointers& embeddings) {
  const int num_tiles = a.batch.num_tiles;
  if (a.batch.kinds & kSingleKeys) {
    const TileShare share = TileShare::Of(num_tiles);
    JAXSOK_RETURN_IF_LAUNCH(DispatchShape(a.store.dim, [&](auto shape) {
      LookupRowsKernel<Source, shape.kVector, shape.kPerLane>
          <<<num_tiles * share.BlocksPerTile(), kBlock, 0, stream>>>(a, embeddings, share, shape.lanes);
      return LastLaunchError();
    }));
  }
  if ((a.batch.kinds & kBags) == 0) return nullptr;
  return DispatchShape(a.store.dim, LaneShape::OfBags(a.store.dim), [&](auto shape) {
    const TileShare share = TileShare::OfBags(num_tiles, a.batch.num_keys, shape.lanes);
    LookupBagsKernel<Source, shape.kVector, shape.kPerLane>
        <<<num_tiles * share.BlocksPerTile(), kBlock, 0, stream>>>(a, embeddings, share, shape.lanes);
    return LastLaunchError();
  });
}

template <typename Row, int kMode>
LaunchError LookupOf<Row, kMode>::Main(Stream stream, const LookupArguments& a, const EmbeddingPointers& embeddings) {
  return LaunchSource<LookupSource<kMode, Row>>(stream, a, embeddings);
}

template <typename Row>
LaunchError FinishOf<Row>::Finish(Stream stream, const LookupArguments& a, const EmbeddingPointers& embeddings) {
  return DispatchShape(a.store.dim, LaneShape::OfBags(a.store.dim), [&](auto shape) {
    FinishKernel<Row, shape.kVector, shape.kPerLane><<<BlocksOfWave(), kBlock, 0, stream>>>(a, embeddings, shape.lanes);
    return LastLaunchError();
  });
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_LOOKUP_CUDA_CUH_

// select and release on a GPU (evict.h has the contract).
#include "evict.h"
#include "index_cuda.cuh"

namespace jaxsok {
namespace {

/// The state that one pass of select leaves to the next.
struct SelectControl {
  uint32_t needed;    // rows yet to be found among the undecided
  uint32_t split;     // digits below it go
  uint32_t is_exact;  // all others stay; otherwise those of `split` itself stay undecided
  uint32_t is_done;   // no row is undecided
  uint32_t blocks_done;
};

__device__ __forceinline__ uint8_t FlagOf(const SelectControl& control, uint32_t digit) {
  if (digit < control.split) return kRowGoes;
  return digit == control.split && control.is_exact == 0 ? kRowUndecided : kRowStays;
}

// A thread flags rows, grid-stride: candidates are undecided or, with a mask, decided by it. It writes their flags.
__global__ void __launch_bounds__(kBlock) FlagKernel(const __grid_constant__ SelectView view, uint8_t* flags) {
  const uint32_t stride = gridDim.x * kBlock;
  for (uint32_t row_id = blockIdx.x * kBlock + threadIdx.x; row_id < view.capacity; row_id += stride) {
    uint8_t flag = kRowStays;
    if (view.IsAsked(row_id)) {
      flag = view.num_words > 0 ? kRowUndecided : *view.mask.At(view.starts, row_id, 1) != 0 ? kRowGoes : kRowStays;
    }
    flags[row_id] = flag;
  }
}

constexpr int kRowsAtOnce = 8;   // of a thread: it loads their flags together, then their scores
constexpr int kCountBlocks = 4;  // of a multiprocessor, all resident at once

// A thread reads rows, grid-stride, splits the undecided rows by the last counted digit, and counts the next digit of
// those that stay undecided. It writes the flags of its rows; whole blocks add to the bins.
// The last block to end finds the next split and empties the bins: no other block reads or writes them then.
__global__ void __launch_bounds__(kBlock, kCountBlocks)
    CountDigitKernel(const __grid_constant__ SelectView view, Digit last, Digit next, bool is_first,
                     const uint32_t* num_kept, uint8_t* flags, SelectControl* control, uint32_t* bins) {
  const SelectControl before = *control;
  if (before.is_done != 0) return;
  const bool is_counted = is_first || before.is_exact == 0;
  __shared__ uint32_t block_bins[kNumSelectBins];
  for (int b = threadIdx.x; b < kNumSelectBins; b += kBlock) block_bins[b] = 0;
  __syncthreads();
  const int64_t stride = int64_t{gridDim.x} * kBlock;
  // Neighbours often have the same digit: a thread adds only when the digit changes, and a block of equal digits rarely
  // adds.
  uint32_t run_digit = 0, run = 0;
  for (int64_t start = int64_t{blockIdx.x} * kBlock + threadIdx.x; start < view.capacity;
       start += kRowsAtOnce * stride) {
    uint8_t flag[kRowsAtOnce];
    uint32_t digit[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const int64_t row = start + k * stride;
      flag[k] = row < view.capacity ? flags[row] : kRowStays;
    }
    if (!is_first) {
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        if (flag[k] == kRowUndecided) digit[k] = view.DigitOf(last, static_cast<uint32_t>(start + k * stride));
      }
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        if (flag[k] != kRowUndecided) continue;
        flag[k] = FlagOf(before, digit[k]);
        if (flag[k] != kRowUndecided) flags[start + k * stride] = flag[k];
      }
    }
    if (!is_counted) continue;
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (flag[k] == kRowUndecided) digit[k] = view.DigitOf(next, static_cast<uint32_t>(start + k * stride));
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (flag[k] != kRowUndecided) continue;
      if (digit[k] != run_digit) {
        if (run != 0) atomicAdd(&block_bins[run_digit], run);
        run_digit = digit[k];
        run = 0;
      }
      ++run;
    }
  }
  if (run != 0) atomicAdd(&block_bins[run_digit], run);
  __syncthreads();
  for (int b = threadIdx.x; b < kNumSelectBins; b += kBlock) {
    if (block_bins[b] != 0) atomicAdd(&bins[b], block_bins[b]);
  }
  __threadfence();
  __syncthreads();
  if (!IsLastBlock(&control->blocks_done)) return;
  if (!is_counted) {
    if (threadIdx.x == 0) {
      control->is_done = 1;
      control->blocks_done = 0;
    }
    return;
  }
  __shared__ BlockScan::TempStorage storage;
  constexpr int kBinsPerThread = kNumSelectBins / kBlock;
  uint32_t counts[kBinsPerThread], starts[kBinsPerThread], total;
  for (int k = 0; k < kBinsPerThread; ++k) {
    const int b = threadIdx.x * kBinsPerThread + k;
    counts[k] = __ldcg(bins + b);
    bins[b] = 0;
  }
  BlockScan(storage).ExclusiveSum(counts, starts, total);
  const uint32_t needed = is_first ? total - min(total, *num_kept) : before.needed;
  if (threadIdx.x == 0) {
    control->blocks_done = 0;
    if (needed == 0) {
      control->split = 0;
      control->is_exact = 1;
    }
  }
  for (int k = 0; k < kBinsPerThread; ++k) {
    // Exactly one bin holds the last row that goes.
    if (starts[k] < needed && needed <= starts[k] + counts[k]) {
      const bool is_exact = needed == starts[k] + counts[k];
      control->split = threadIdx.x * kBinsPerThread + k + (is_exact ? 1 : 0);
      control->is_exact = is_exact ? 1 : 0;
      control->needed = needed - starts[k];
    }
  }
}

/// Counts of a block by table: in shared memory if there are few tables.
class CountsByTable {
 public:
  __device__ CountsByTable(uint32_t* shared, int32_t num_tables) : shared_(shared), num_tables_(num_tables) {
    for (int t = threadIdx.x; t < kSharedTables; t += kBlock) shared_[t] = 0;
    __syncthreads();
  }
  __device__ bool IsShared() const { return num_tables_ <= kSharedTables; }

  /// Adds the counts of a warp; all its lanes call it. Lanes of one table add together; add(table, count) if tables are
  /// many.
  template <typename Add>
  __device__ void Count(bool is_counted, uint32_t table, const Add& add) {
    const unsigned counted = __ballot_sync(~0u, is_counted);
    if (!is_counted) return;
    const unsigned same = __match_any_sync(counted, table);
    if (__ffs(same) - 1 != static_cast<int>(threadIdx.x % kWarp)) return;
    const uint32_t count = static_cast<uint32_t>(__popc(same));
    if (IsShared()) {
      atomicAdd(shared_ + table, count);
    } else {
      add(table, count);
    }
  }

  /// Writes the block's counts; all threads of the block call it at its end.
  template <typename Add>
  __device__ void Flush(const Add& add) {
    __syncthreads();
    if (!IsShared()) return;
    for (int t = threadIdx.x; t < num_tables_; t += kBlock) {
      if (shared_[t] != 0) add(static_cast<uint32_t>(t), shared_[t]);
    }
  }

 private:
  uint32_t* shared_;
  int32_t num_tables_;
};

// A warp reads 32 rows at a time, grid-stride: it splits the last undecided rows and counts the selected rows by table.
// It writes the flags of its rows; counts are added to.
__global__ void __launch_bounds__(kBlock)
    FinishKernel(const __grid_constant__ SelectView view, Digit last, uint8_t* flags, const SelectControl* control,
                 uint32_t* num_selected) {
  __shared__ uint32_t shared[kSharedTables];
  CountsByTable counts(shared, view.num_tables);
  const SelectControl found = *control;
  const auto add = [&](uint32_t table, uint32_t count) { atomicAdd(num_selected + table, count); };
  const uint32_t stride = gridDim.x * kBlock;
  for (uint32_t start = blockIdx.x * kBlock + threadIdx.x / kWarp * kWarp; start < view.capacity; start += stride) {
    const uint32_t row_id = start + threadIdx.x % kWarp;
    uint8_t flag = row_id < view.capacity ? flags[row_id] : kRowStays;
    if (flag == kRowUndecided) {
      flag = FlagOf(found, view.DigitOf(last, row_id));
      flags[row_id] = flag;
    }
    const bool goes = flag == kRowGoes;
    counts.Count(goes, goes ? view.records.At(view.starts, row_id, 1)->table : 0, add);
  }
  counts.Flush(add);
}

/// The state that one pass of release leaves to the next.
struct ReleaseControl {
  uint32_t num_freed;
  uint32_t blocks_done;
  uint32_t sweeps;    // the index is swept
  uint32_t rebuilds;  // it is rebuilt, since keys had found no entry: a sweep does not visit rows without one
};

struct ReleaseArguments {
  StoreView store;
  StateView states;
  Slabs<uint32_t> statistics;
  bool has_statistics;
  const uint8_t* flags;
  uint32_t* table_evicted;
  uint32_t* num_released;
  ReleaseControl* control;
  uint32_t* gone;  // a bit for each row of capacity
};

// A warp reads 32 rows at a time, grid-stride: each lane marks its row dead, then all lanes together reset the state of
// one row after the other. A row belongs to one lane, a word of bits to one warp; counts are added to.
__global__ void __launch_bounds__(kBlock) ReleaseKernel(const __grid_constant__ ReleaseArguments a) {
  __shared__ uint32_t shared[kSharedTables];
  const StoreView& store = a.store;
  CountsByTable counts(shared, store.num_tables);
  const auto add = [&](uint32_t table, uint32_t count) {
    atomicSub(store.table_rows + table, count);
    if (a.table_evicted != nullptr) atomicAdd(a.table_evicted + table, count);
    atomicAdd(a.num_released + table, count);
    atomicAdd(&a.control->num_freed, count);
  };
  const int lane = threadIdx.x % kWarp;
  const uint32_t stride = gridDim.x * kBlock;
  for (uint32_t start = blockIdx.x * kBlock + threadIdx.x / kWarp * kWarp; start < store.capacity; start += stride) {
    const uint32_t row_id = start + lane;
    bool goes = row_id < store.capacity && a.flags[row_id] != kRowStays;
    uint32_t table = 0;
    if (goes) {
      Record* record = store.records.At(store.starts, row_id, 1);
      table = record->table;
      goes = record->key != kPaddingKey && table < static_cast<uint32_t>(store.num_tables);
      if (goes) {
        record->key = kPaddingKey;
        if (a.has_statistics) {
          uint32_t* statistics = a.statistics.At(store.starts, row_id, 2);
          statistics[0] = 0;
          statistics[1] = 0;
        }
      }
    }
    counts.Count(goes, table, add);
    __syncwarp();
    const unsigned gone = __ballot_sync(~0u, goes);
    if (lane == 0) a.gone[start / kWarp] = gone;
    for (unsigned left = gone; left != 0; left &= left - 1) {
      const uint32_t row = start + __ffs(left) - 1;
      for (int k = 0; k < a.states.num_states; ++k) {
        const int width = a.states.width[k];
        float* state = a.states.data[k].At(store.starts, row, width);
        for (int c = lane; c < width; c += kWarp) state[c] = a.states.initial[k];
      }
    }
  }
  counts.Flush(add);
}

__device__ __forceinline__ bool IsDead(const StoreView& store, uint32_t row_id) {
  return row_id < min(store.counters[kNumAllocated], store.capacity) &&
         store.records.At(store.starts, row_id, 1)->key == kPaddingKey;
}

// Counts dead rows, 1,024 a block; the last block to end sums the counts up to its own and writes the counters.
__global__ void __launch_bounds__(kBlock)
    CountDeadKernel(StoreView store, ReleaseControl* control, uint32_t* block_counts) {
  if (control->num_freed == 0) return;
  int mine = 0;
  for (int i = 0; i < kPositionsPerChunk / kBlock; ++i) {
    mine += IsDead(store, blockIdx.x * kPositionsPerChunk + i * kBlock + threadIdx.x) ? 1 : 0;
  }
  __shared__ BlockScan::TempStorage storage;
  uint32_t before, total;
  BlockScan(storage).ExclusiveSum(static_cast<uint32_t>(mine), before, total);
  if (threadIdx.x == 0) block_counts[blockIdx.x] = total;
  if (!IsLastBlock(&control->blocks_done)) return;
  const uint32_t sum = SumCountsBefore(block_counts, gridDim.x, storage);
  if (threadIdx.x == 0) {
    store.counters[kFreeBegin] = 0;
    store.counters[kFreeEnd] = sum;
    store.counters[kGeneration] += 1;
  }
}

// Lists the freed rows, ascending: each block writes its own part.
__global__ void __launch_bounds__(kBlock)
    ListDeadKernel(StoreView store, const uint32_t* block_counts, const ReleaseControl* control) {
  if (control->num_freed == 0) return;
  __shared__ BlockScan::TempStorage storage;
  uint32_t at = block_counts[blockIdx.x];
  for (int i = 0; i < kPositionsPerChunk / kBlock; ++i) {
    const uint32_t row_id = blockIdx.x * kPositionsPerChunk + i * kBlock + threadIdx.x;
    const bool dead = IsDead(store, row_id);
    uint32_t before, total;
    BlockScan(storage).ExclusiveSum(dead ? 1u : 0u, before, total);
    if (dead) store.records.At(store.starts, at + before, 1)->free_id = row_id;
    at += total;
    __syncthreads();
  }
}

__global__ void DecideKernel(uint32_t* counters, ReleaseControl* control) {
  const bool has_unplaced = counters[kNumUnplaced] != 0, has_freed = control->num_freed != 0;
  control->sweeps = has_freed && !has_unplaced ? 1 : 0;
  control->rebuilds = has_freed && has_unplaced ? 1 : 0;
  if (control->sweeps != 0) counters[kLongestProbe] = 0;
}

__device__ __forceinline__ bool HasBit(const uint32_t* bits, uint32_t row_id) {
  return ((__ldg(bits + row_id / kWarp) >> (row_id % kWarp)) & 1) != 0;
}

// Four lanes, one bucket; a warp takes eight buckets, grid-stride. A lane holds one entry and decides whether it stays
// in its home; the lanes of a bucket compact the entries, and write the bucket if it changed. No other lane reads or
// writes it. Rows with a displaced entry get a bit, set atomically, since rows of one word come from many buckets.
// Invalid entries, which only foreign writes can put into the index, are removed.
__global__ void __launch_bounds__(kBlock)
    SweepKernel(IndexView index, uint32_t* counters, uint32_t capacity, const uint32_t* gone, uint32_t* displaced,
                const ReleaseControl* control) {
  if (control->sweeps == 0) return;
  static_assert(kEntriesPerBucket == 4 && kWarp % kEntriesPerBucket == 0, "four lanes hold a bucket");
  const uint64_t salt = SaltOf(counters);
  const int lane = threadIdx.x % kWarp, first = lane / kEntriesPerBucket * kEntriesPerBucket;
  const int place = lane - first;
  const int64_t num_entries = int64_t{index.num_buckets} * kEntriesPerBucket;
  const int64_t stride = int64_t{gridDim.x} * kBlock;
  uint4* entries = reinterpret_cast<uint4*>(index.buckets);
  bool has_kept = false;
  for (int64_t start = int64_t{blockIdx.x} * kBlock + threadIdx.x / kWarp * kWarp; start < num_entries;
       start += stride) {
    const int64_t i = start + lane;
    uint4 entry = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (i < num_entries) entry = entries[i];
    const uint64_t key = Word64(entry.x, entry.y);
    const bool is_used = key != kPaddingKey;
    bool stays = false;
    if (is_used && entry.z < capacity && !HasBit(gone, entry.z)) {
      stays = HomeBucket(HashOf(key, entry.w, salt), index.num_buckets) == i / kEntriesPerBucket;
      if (!stays) atomicOr(displaced + entry.z / kWarp, 1u << (entry.z % kWarp));
    }
    const unsigned used = (__ballot_sync(~0u, is_used) >> first) & 0xf;
    const unsigned kept = (__ballot_sync(~0u, stays) >> first) & 0xf;
    has_kept = has_kept || kept != 0;
    int source = -1, num_before = 0;  // the entry of the bucket that moves to this place
#pragma unroll
    for (int e = 0; e < kEntriesPerBucket; ++e) {
      if (((kept >> e) & 1) == 0) continue;
      if (num_before == place) source = e;
      ++num_before;
    }
    const int from = first + max(source, 0);
    uint4 moved = make_uint4(__shfl_sync(~0u, entry.x, from), __shfl_sync(~0u, entry.y, from),
                             __shfl_sync(~0u, entry.z, from), __shfl_sync(~0u, entry.w, from));
    if (source < 0) moved = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (kept != used) entries[i] = moved;
  }
  if (__any_sync(~0u, has_kept) && lane == 0 && counters[kLongestProbe] == 0) atomicMax(counters + kLongestProbe, 1u);
}

// A warp takes 32 rows at a time, grid-stride: a lane inserts its row if the row's entry was displaced. The pairs are
// distinct, entries are claimed by compare-and-swap.
__global__ void __launch_bounds__(kBlock)
    EnterDisplacedKernel(StoreView store, const uint32_t* displaced, const ReleaseControl* control) {
  if (control->sweeps == 0) return;
  const uint64_t salt = SaltOf(store.counters);
  int longest = 0;
  const uint32_t stride = gridDim.x * kBlock;
  for (uint32_t row_id = blockIdx.x * kBlock + threadIdx.x; row_id < store.capacity; row_id += stride) {
    if (!HasBit(displaced, row_id)) continue;
    const Record* record = store.records.At(store.starts, row_id, 1);
    if (record->key == kPaddingKey) continue;  // already dead: the entry was not its own
    const ProbeResult at = InsertDistinct(store.index, record->key, record->table, salt, kMaxProbes, row_id);
    if (at.entry == kNoEntry) {
      atomicAdd(store.counters + kNumUnplaced, 1u);
    } else {
      longest = max(longest, at.num_probes);
    }
  }
  longest = __reduce_max_sync(~0u, longest);
  if (threadIdx.x % kWarp == 0) NoteProbes(store.counters, longest);
}

}  // namespace

LaunchError LaunchSelect(Stream stream, const SelectView& view, const uint32_t* num_kept, uint8_t* flags,
                         uint32_t* num_selected, void* workspace) {
  WorkspaceCutter cutter(workspace);
  SelectControl* control = cutter.Take<SelectControl>(1);
  uint32_t* bins = cutter.Take<uint32_t>(kNumSelectBins);
  JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(workspace, 0, static_cast<size_t>(cutter.used()), stream));
  JAXSOK_RETURN_IF_CUDA(
      cudaMemsetAsync(num_selected, 0, static_cast<size_t>(view.num_tables) * sizeof(uint32_t), stream));
  FlagKernel<<<BlocksOfWave(), kBlock, 0, stream>>>(view, flags);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  Digit last{};
  if (view.num_words > 0) {
    const Digits digits = Digits::Of(view.num_words, view.table == kAllTables ? view.num_tables : 1);
    for (int32_t d = 0; d < digits.num_digits; ++d) {
      CountDigitKernel<<<NumMultiprocessors() * kCountBlocks, kBlock, 0, stream>>>(view, last, digits.digit[d], d == 0,
                                                                                   num_kept, flags, control, bins);
      JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
      last = digits.digit[d];
    }
  }
  FinishKernel<<<BlocksOfWave(), kBlock, 0, stream>>>(view, last, flags, control, num_selected);
  return LastLaunchError();
}

LaunchError LaunchRelease(Stream stream, const StoreView& store, const StateView& states,
                          const Slabs<uint32_t>* statistics, const uint8_t* flags, uint32_t* table_evicted,
                          uint32_t* num_released, void* workspace) {
  if (store.index.num_buckets == 0) return "index: no buckets";
  const int64_t num_words = CeilDiv<int64_t>(store.capacity, kWarp);
  WorkspaceCutter cutter(workspace);
  ReleaseControl* control = cutter.Take<ReleaseControl>(1);
  uint32_t* gone = cutter.Take<uint32_t>(num_words);
  uint32_t* displaced = cutter.Take<uint32_t>(num_words);
  const unsigned num_counts = static_cast<unsigned>(CeilDiv<int64_t>(store.capacity, kPositionsPerChunk));
  uint32_t* block_counts = cutter.Take<uint32_t>(num_counts);
  JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(control, 0, sizeof(ReleaseControl), stream));
  JAXSOK_RETURN_IF_CUDA(cudaMemsetAsync(displaced, 0, static_cast<size_t>(num_words) * sizeof(uint32_t), stream));
  JAXSOK_RETURN_IF_CUDA(
      cudaMemsetAsync(num_released, 0, static_cast<size_t>(store.num_tables) * sizeof(uint32_t), stream));
  ReleaseArguments a{store, states, {}, statistics != nullptr, flags, table_evicted, num_released, control, gone};
  if (statistics != nullptr) a.statistics = *statistics;
  ReleaseKernel<<<BlocksOfWave(), kBlock, 0, stream>>>(a);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  CountDeadKernel<<<num_counts, kBlock, 0, stream>>>(store, control, block_counts);
  ListDeadKernel<<<num_counts, kBlock, 0, stream>>>(store, block_counts, control);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  DecideKernel<<<1, 1, 0, stream>>>(store.counters, control);
  SweepKernel<<<BlocksOfWave(), kBlock, 0, stream>>>(store.index, store.counters, store.capacity, gone, displaced,
                                                     control);
  EnterDisplacedKernel<<<BlocksOfWave(), kBlock, 0, stream>>>(store, displaced, control);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return LaunchRebuild(stream, store, &control->rebuilds);
}

}  // namespace jaxsok

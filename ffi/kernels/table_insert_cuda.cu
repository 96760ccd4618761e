// The passes that turn claims into row ids (index_cuda.cuh).
#include <cub/block/block_scan.cuh>

#include "index_cuda.cuh"

namespace jaxsok {
namespace {

/// Returns whether a pending position is the winner of its entry.
__device__ __forceinline__ bool IsWinner(const IndexView& index, uint32_t entry_number, uint32_t position) {
  if (entry_number == kNoEntry) return false;
  const uint64_t half = LoadHalf(index.EntryAt(entry_number));
  const uint32_t aux = static_cast<uint32_t>(half >> 32);
  return aux != kAuxUnset && (aux & kAuxPending) != 0 && static_cast<uint32_t>(half) == position;
}

// One thread, one position: keys that were not found claim an entry. Thread i writes entry_of[i].
__global__ void __launch_bounds__(kBlock)
    ClaimPendingKernel(StoreSink sink, InsertWorkspace w, const uint64_t* keys, TableOfPosition table_of,
                       const uint32_t* row_ids, int64_t num_keys) {
  if (w.control->num_pending == 0) return;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_keys; i += int64_t{gridDim.x} * kBlock) {
    if (row_ids[i] != kPendingRow) continue;
    const ProbeResult at =
        Claim(sink.Index(), keys[i], table_of(i), sink.Salt(), sink.MaxProbes(), static_cast<uint32_t>(i));
    w.entry_of[i] = at.entry;
    if (at.entry == kNoEntry) atomicAdd(&w.control->num_unplaced, 1u);
  }
}

// Chunks of 1,024 positions: a block counts and marks the winners of one after the other; the last block to end sums
// the counts up to each chunk.
// Blocks write chunk_counts[chunk]; the last one, identified by a ticket after a fence, rewrites all of them.
__global__ void __launch_bounds__(kBlock)
    CountKernel(StoreSink sink, InsertWorkspace w, uint32_t* row_ids, int64_t num_keys) {
  if (w.control->num_pending == 0) return;
  __shared__ BlockScan::TempStorage storage;
  const uint32_t num_chunks = static_cast<uint32_t>(CeilDiv<int64_t>(num_keys, kPositionsPerChunk));
  for (uint32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    uint32_t entries[kPositionsPerChunk / kBlock];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kPositionsPerChunk / kBlock; ++i) {
      const int64_t position = int64_t{chunk} * kPositionsPerChunk + i * kBlock + threadIdx.x;
      const bool pending = position < num_keys && row_ids[position] == kPendingRow;
      entries[i] = pending ? w.entry_of[position] : kNoEntry;
    }
#pragma unroll
    for (int i = 0; i < kPositionsPerChunk / kBlock; ++i) {
      const int64_t position = int64_t{chunk} * kPositionsPerChunk + i * kBlock + threadIdx.x;
      if (IsWinner(sink.Index(), entries[i], static_cast<uint32_t>(position))) {
        row_ids[position] = kWinner;
        ++mine;
      }
    }
    uint32_t before, total;
    __syncthreads();  // before the storage is reused
    BlockScan(storage).ExclusiveSum(static_cast<uint32_t>(mine), before, total);
    if (threadIdx.x == 0) w.chunk_counts[chunk] = total;
  }
  if (!IsLastBlock(&w.control->blocks_done)) return;
  const uint32_t sum = SumCountsBefore(w.chunk_counts, num_chunks, storage);
  if (threadIdx.x == 0) {
    const uint32_t available = sink.Available();
    w.control->num_new = sum;
    w.control->num_accepted = sum < available ? sum : available;
    w.control->overflow = sum > available ? 1 : 0;
  }
}

// Chunk by chunk, as count: a thread numbers the winners among four neighbouring positions, then lanes write the new
// rows of the chunk.
// A winner alone writes its record and its entry; row ids are distinct, so no two threads write one row.
// Six blocks fit a multiprocessor without launch bounds, except with the use notes of a sink.
__global__ void __launch_bounds__(kBlock, 6)
    AssignKernel(StoreSink sink, InsertWorkspace w, const uint64_t* keys, TableOfPosition table_of, uint32_t* row_ids,
                 int64_t num_keys) {
  const InsertControl control = *w.control;
  if (control.num_pending == 0) return;
  constexpr int kPerThread = kPositionsPerChunk / kBlock;
  __shared__ BlockScan::TempStorage storage;
  __shared__ uint64_t new_key[kPositionsPerChunk];
  __shared__ uint32_t new_row[kPositionsPerChunk];
  __shared__ uint32_t new_table[kPositionsPerChunk];
  __shared__ uint32_t num_by_table[kSharedTables];
  for (int t = threadIdx.x; t < kSharedTables; t += kBlock) num_by_table[t] = 0;
  const bool undo = control.overflow != 0 || IsSequential(control);
  const uint32_t num_chunks = static_cast<uint32_t>(CeilDiv<int64_t>(num_keys, kPositionsPerChunk));
  for (uint32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const int64_t first = int64_t{chunk} * kPositionsPerChunk + threadIdx.x * kPerThread;
    uint32_t winners = 0;  // as bits
    for (int i = 0; i < kPerThread; ++i) {
      if (first + i < num_keys && row_ids[first + i] == kWinner) winners |= 1u << i;
    }
    uint32_t local, total;
    __syncthreads();  // before the shared memory is reused
    BlockScan(storage).ExclusiveSum(static_cast<uint32_t>(__popc(winners)), local, total);
    for (int i = 0; i < kPerThread; ++i) {
      if ((winners >> i & 1) == 0) continue;
      const uint32_t position = static_cast<uint32_t>(first + i);
      const uint32_t ordinal = w.chunk_counts[chunk] + local;
      const uint32_t entry_number = w.entry_of[position];
      Entry* entry = sink.Index().EntryAt(entry_number);
      uint32_t row_id = kPendingRow;  // for a position without a row, the finishing pass determines the result
      if (undo) {
        StoreHalf(entry, kNoRow, kAuxUnset);
        *reinterpret_cast<volatile unsigned long long*>(&entry->key) = kPaddingKey;
      }
      if (!IsSequential(control) && ordinal < control.num_accepted) {
        row_id = sink.RowOf(ordinal);
        const uint64_t key = keys[position];
        const uint32_t table = table_of(position);
        new_key[local] = key;
        new_table[local] = table;
        sink.WriteRecord(row_id, key, table);
        if (!undo) {
          StoreHalf(entry, row_id, table);
          sink.SawEntry(key, table, entry_number);
        }
        if (sink.NumTables() <= kSharedTables) {
          atomicAdd(&num_by_table[table], 1u);
        } else {
          sink.CountNew(table, 1);
        }
      }
      new_row[local] = row_id;
      row_ids[position] = row_id;
      ++local;
    }
    __syncthreads();
    const int lanes = sink.LanesOfRow();
    for (uint32_t n = threadIdx.x / lanes; n < total; n += kBlock / lanes) {
      if (new_row[n] != kPendingRow) sink.WriteRow(new_row[n], new_key[n], new_table[n], threadIdx.x % lanes, lanes);
    }
  }
  __syncthreads();
  if (sink.NumTables() <= kSharedTables && threadIdx.x < sink.NumTables() && num_by_table[threadIdx.x] != 0) {
    sink.CountNew(threadIdx.x, static_cast<int>(num_by_table[threadIdx.x]));
  }
}

// Normally one thread advances the counters. If rows ran out, threads insert the accepted pairs again, each its own
// rows: the pairs are distinct, entries are claimed by compare-and-swap. If a claim found no entry, block 0 inserts the
// pending positions one by one, in order; only thread 0 writes index and counters.
__global__ void __launch_bounds__(kBlock) CommitKernel(StoreSink sink, InsertWorkspace w, const uint64_t* keys,
                                                       TableOfPosition table_of, uint32_t* row_ids, int64_t num_keys) {
  const InsertControl control = *w.control;
  if (control.num_pending == 0) return;
  if (!IsSequential(control)) {
    if (control.overflow != 0) {
      // RowOf reads the counters, which change only after every block is done: see the ticket below.
      for (uint32_t n = blockIdx.x * kBlock + threadIdx.x; n < control.num_accepted; n += gridDim.x * kBlock) {
        const uint32_t row_id = sink.RowOf(n);
        const ProbeResult at = InsertDistinct(sink.Index(), sink.KeyOf(row_id), sink.TableOf(row_id), sink.Salt(),
                                              sink.MaxProbes(), row_id);
        sink.SawProbes(at.num_probes);
        if (at.entry == kNoEntry) sink.SawUnplaced();
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      if (atomicAdd(&w.control->blocks_done, 1u) + 1 == 2 * gridDim.x) sink.Commit(control.num_accepted);
    }
    return;
  }
  if (blockIdx.x != 0) return;
  __shared__ uint32_t row_id;
  __shared__ uint32_t num_new;
  __shared__ uint32_t available;
  if (threadIdx.x == 0) {
    num_new = 0;
    available = sink.Available();
  }
  __syncthreads();
  // Once no row is left, pending keys are only found or refused, which the finishing pass does in parallel.
  bool is_full = available == 0;  // equal in all threads
  for (int64_t start = 0; start < num_keys && !is_full; start += kBlock) {
    const int64_t mine = start + threadIdx.x;
    const bool pending = mine < num_keys && row_ids[mine] == kPendingRow;
    if (!__syncthreads_or(pending)) continue;
    for (int64_t position = start; position < num_keys && position < start + kBlock && !is_full; ++position) {
      if (row_ids[position] != kPendingRow) continue;  // equal in all threads
      const uint64_t key = keys[position];
      const uint32_t table = table_of(position);
      if (threadIdx.x == 0) {
        row_id = kNoRow;
        const ProbeResult at = ProbeBuckets<true>(sink.Index(), key, table, sink.Salt(), sink.MaxProbes());
        if (at.row_id == kNoRow && at.entry != kNoEntry && num_new < available) {
          row_id = sink.RowOf(num_new++);
          Entry* entry = sink.Index().EntryAt(at.entry);
          entry->key = key;
          StoreHalf(entry, row_id, table);
          sink.WriteRecord(row_id, key, table);
          sink.CountNew(table, 1);
          sink.SawProbes(at.num_probes);
          __threadfence();
        }
      }
      __syncthreads();
      if (row_id != kNoRow) sink.WriteRow(row_id, key, table, threadIdx.x, kBlock);
      if (threadIdx.x == 0 && row_id != kNoRow) row_ids[position] = row_id;
      is_full = num_new == available;
      __syncthreads();  // before thread 0 continues and changes it
    }
  }
  if (threadIdx.x == 0) sink.Commit(num_new);
}

}  // namespace

LaunchError LaunchClaimPending(Stream stream, const StoreSink& sink, const InsertWorkspace& w, const uint64_t* keys,
                               const TableOfPosition& table_of, const uint32_t* row_ids, int64_t num_keys) {
  ClaimPendingKernel<<<InsertBlocks(num_keys), kBlock, 0, stream>>>(sink, w, keys, table_of, row_ids, num_keys);
  return LastLaunchError();
}

LaunchError LaunchInsertPasses(Stream stream, const StoreSink& sink, const InsertWorkspace& w, const uint64_t* keys,
                               const TableOfPosition& table_of, uint32_t* row_ids, int64_t num_keys) {
  // Commit continues the ticket of count: both must have the same number of blocks.
  const int blocks = InsertBlocks(num_keys);
  CountKernel<<<blocks, kBlock, 0, stream>>>(sink, w, row_ids, num_keys);
  AssignKernel<<<blocks, kBlock, 0, stream>>>(sink, w, keys, table_of, row_ids, num_keys);
  CommitKernel<<<blocks, kBlock, 0, stream>>>(sink, w, keys, table_of, row_ids, num_keys);
  return LastLaunchError();
}

}  // namespace jaxsok

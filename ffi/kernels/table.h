// The table ops on one shard. find, find_or_insert and rebuild map keys to row ids. gather reads rows by row id,
// scatter writes them, and touch records that rows were used.
//
// Launchers are asynchronous on their stream, allocate nothing and wait for nothing (the CPU's run at once and
// end before they return). They may be captured in a CUDA graph.
#ifndef JAXSOK_KERNELS_TABLE_H_
#define JAXSOK_KERNELS_TABLE_H_

#include "../core/layout.h"
#include "../core/row_dtype.h"
#include "../core/row_update.h"
#include "stream.h"
#include "window.h"
#include "workspace.h"

namespace jaxsok {

/// Returns the bytes of workspace for inserting `num_keys` keys (lookup and find_or_insert): per position two words,
/// its entry and a place in the list of bags to finish. (A bag to finish holds a key, so there are at most as many as
/// positions.)
constexpr int64_t InsertWorkspaceBytes(int64_t num_keys) {
  return kControlBytes + PaddedToLine(num_keys) * 8 + CountsBytes(num_keys);
}

/// Finds the row id of each (table, key) pair.
///
/// Post   : row_ids[i] is the row of (table_ids[i], keys[i]); kNoRow if it is absent or padding.
/// Order  : each output is written once, by one thread: the same bits on every run.
/// Bound  : kMaxProbes buckets a key, whatever the load.
/// Cost   : per key 12 B in, 64 B a probed bucket (about one at load 0.5), 4 B out.
LaunchError LaunchFind(Stream stream, const IndexView& index, const uint32_t* counters, const uint64_t* keys,
                       const uint32_t* table_ids, int64_t num_keys, uint32_t* row_ids);

/// Finds the row id of each (table, key) pair, and gives unseen pairs a row.
///
/// Post   : row_ids[i] is the row; kNoRow for padding and for keys refused because the store is full. New rows hold
///          their initial values, rounded to nearest if they have 16 bits; their records are written, table_rows and
///          counters advanced. counts[t] (zeroed first) counts occurrences: the first of a new key is inserted, its
///          repeats are found.
/// Order  : unseen pairs are numbered by their first position; freed rows in ascending order, then fresh ones.
///          All but the order of entries inside the index is the same on every run and on both back ends.
///          When m rows are left, the first m unseen pairs by first position get them, the others are refused.
///
/// With admission, unseen pairs are first judged by their table's policy (AdmissionKind): all their occurrences in the
/// call are added to the previous count; pairs with enough are new, the others are refused. Each position of a refused
/// pair counts as refused, its uses as unadmitted. Counts in `sightings` stay at the threshold once they reach it. A
/// pair that finds no entry there is refused for lack of room: it counts in kNumUnplaced, not as unadmitted. Counts and
/// filter are the same on every run and on both back ends, except for which pairs find no entry.
///
/// Pre    : workspace has InsertWorkspaceBytes(num_keys) bytes, 256-byte aligned; its contents may be anything.
///          The uses of all positions together are below 2^31. `admission` may be nullptr: all keys are admitted.
LaunchError LaunchFindOrInsert(Stream stream, const StoreView& store, const uint64_t* keys, const uint32_t* table_ids,
                               int64_t num_keys, uint32_t* row_ids, int32_t* counts, void* workspace,
                               const AdmissionView* admission = nullptr);

/// Copies the rows of requests whose row ids are known.
///
/// Pre    : the store has tables, seed, rows and their slabs. `dtype` is float32, bfloat16 or the store's.
/// Post   : row i of `rows` is the row of row_ids[i], number by number (a NaN may become another one), rounded to
///          nearest if `dtype` is narrower than the store's. If row_ids[i] is not below the capacity, it is the key's
///          initial row; for find it is zeros instead if the table says so (kTableUnknown). kPaddingKey and tables that
///          the store does not have give zeros, whatever the row id; windows are not written for these. num_absent[t]
///          is the sum of `uses` over the requests of table t that have no row.
/// Order  : each row is written once, by one group of threads: the same bits on every run and on both back ends.
/// Cost   : per request 20 B in; its row in and out.
LaunchError LaunchGather(Stream stream, const StoreView& store, const Request* requests, const uint32_t* row_ids,
                         int64_t num_requests, bool is_find, const LineTarget& rows, RowDtype dtype,
                         int32_t* num_absent);

/// One per-row array of any dtype, as bytes.
struct LinesView {
  SlabStarts starts;
  Slabs<uint8_t> data;
  int64_t line_bytes;  // even
  uint32_t capacity;
};

/// Writes rows of a per-row array, by row id.
///
/// Pre    : equal row ids have equal rows in `lines`.
/// Post   : row row_ids[i] of the array is row i of `lines`; row ids that are not below the capacity are ignored.
/// Cost   : per row 4 B in, and the row in and out.
LaunchError LaunchScatter(Stream stream, const LinesView& array, const uint32_t* row_ids, int64_t num_lines,
                          const void* lines);

/// The statistics of a store.
struct StatisticsView {
  SlabStarts starts;
  Slabs<RowStatistics> data;
  uint32_t capacity;
};

/// Records in the statistics of rows that a lookup used them.
///
/// Pre    : clock is one word of the device's memory; uses[i] is how often position i stands for its row; null: once.
///          Each is below 2^27, so that those of a warp can be added up.
/// Post   : for each row in row_ids, last_step is the clock and frequency has grown by the uses of all its positions,
///          to 2^32 - 1 at most. Row ids that are not below the capacity are ignored.
/// Order  : integers are added and all writers of a row write one clock: the same bits on every run and both back ends.
/// Cost   : per position 4 B in (8 B with uses); per row 8 B in and out.
LaunchError LaunchTouch(Stream stream, const StatisticsView& statistics, const uint32_t* row_ids, const uint32_t* uses,
                        int64_t num_keys, const uint32_t* clock);

/// The optimizer state of a store: num_states arrays in slabs.
struct StateView {
  int32_t num_states;
  int32_t width[kMaxStates];  // dim or 1
  float initial[kMaxStates];
  Slabs<float> data[kMaxStates];
};

/// Fills an index (of any size, with any contents) from the records.
///
/// Post   : every row in use is found again; kNumUnplaced and kLongestProbe describe the new index. Nothing is written
///          if only_if[0] (in GPU memory on a GPU) is 0; nullptr: always.
LaunchError LaunchRebuild(Stream stream, const StoreView& store, const uint32_t* only_if = nullptr);

/// Resets the counts of often-seen keys without a row.
///
/// Post   : entries of table t whose count is floors[t] or more have count 0; they stay where they are.
/// Cost   : reads the entries once, 16 bytes each.
LaunchError LaunchForget(Stream stream, const IndexView& sightings, const uint32_t* floors,  // [num_tables]
                         int32_t num_tables);

/// Fills sightings (of any size, with any contents) with keys without a row.
///
/// Pre    : entries are key, count and table, as those of sightings; `sightings` is another buffer.
/// Post   : counts of one pair are added up. Empty entries, counts of 0, and counts of floors[t] or more are skipped.
///          kNumSightings counts the used entries.
LaunchError LaunchWait(Stream stream, const IndexView& sightings, uint32_t* counters,
                       const uint32_t* floors,  // [num_tables]
                       int32_t num_tables, const Entry* entries, int64_t num_entries);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TABLE_H_

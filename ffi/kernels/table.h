// find, find_or_insert and rebuild on one shard: from keys to row ids. gather: from row ids to rows.
// scatter: from row ids into rows. touch: notes that rows were used.
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

/// Bytes of workspace for inserting `num_keys` keys (lookup and find_or_insert): per position two words, its entry and
/// a place in the list of bags to finish. (A bag to finish holds a key, so there are never more of them than
/// positions.)
constexpr int64_t InsertWorkspaceBytes(int64_t num_keys) {
  return kControlBytes + PaddedToLine(num_keys) * 8 + CountsBytes(num_keys);
}

/// Finds the row id of each (table, key) pair.
///
/// Post   : row_ids[i] is the row of (table_ids[i], keys[i]); kNoRow where it is absent or padding.
/// Order  : each output is written once, by one thread: the same bits on every run.
/// Bound  : kMaxProbes buckets a key, whatever the load.
/// Cost   : per key 12 B in, 64 B a probed bucket (about one at load 0.5), 4 B out.
LaunchError LaunchFind(Stream stream, const IndexView& index, const uint32_t* counters, const uint64_t* keys,
                       const uint32_t* table_ids, int64_t num_keys, uint32_t* row_ids);

/// Finds the row id of each (table, key) pair, and gives unseen pairs a row.
///
/// Post   : row_ids[i] is the row; kNoRow for padding and for keys refused because the store is full.
///          New rows hold their initial values, rounded to nearest if they have 16 bits; their records are written,
///          table_rows and counters advanced. counts[t] (zeroed first) counts occurrences: the first of a new key is
///          inserted, its repeats found.
/// Order  : unseen pairs are numbered by their first position; freed rows in ascending order, then fresh ones.
///          All but the order of entries inside the index is the same on every run and on both back ends.
///          When m rows are left, the first m unseen pairs by first position get them, the others are refused.
///
/// With admission, unseen pairs are first judged by their table's policy (AdmissionKind): all their occurrences in the
/// call are added to what was counted before, then those that have enough are new, the others refused. Each position
/// of such a pair counts as refused, its uses as unadmitted. Counts in `sightings` stay at the threshold once there. A
/// pair that finds no entry there is refused for want of room: not unadmitted, but kNumUnplaced. Counts and filter are
/// the same on every run and on both back ends, but for who finds no entry.
///
/// Pre    : workspace has InsertWorkspaceBytes(num_keys) bytes, 256-byte aligned; its contents may be anything.
///          The uses of all positions together are below 2^31. `admission` may be nullptr: everyone is let in.
LaunchError LaunchFindOrInsert(Stream stream, const StoreView& store, const uint64_t* keys, const uint32_t* table_ids,
                               int64_t num_keys, uint32_t* row_ids, int32_t* counts, void* workspace,
                               const AdmissionView* admission = nullptr);

/// Copies the rows of requests whose row ids are known.
///
/// Pre    : of the store tables, seed, rows and what says where they lie.
///          `dtype` is float32, bfloat16 or the store's.
/// Post   : line i of `rows` is the row of row_ids[i], number by number (a NaN may become another one), rounded to
///          nearest if `dtype` is narrower than the store's. Where that is not below the capacity: what the key's row
///          would hold if it were new; for find zeros instead if the table says so (kTableUnknown). Zeros for
///          kPaddingKey and for tables that the store does not have, whatever the row id; in windows nothing is written
///          for these. num_absent[t] is the sum of `uses` over the requests of table t that have no row.
/// Order  : each row is written once, by one group of threads: the same bits on every run and on both back ends.
/// Cost   : per request 20 B in; its row in and out.
LaunchError LaunchGather(Stream stream, const StoreView& store, const Request* requests, const uint32_t* row_ids,
                         int64_t num_requests, bool is_find, const LineTarget& rows, RowDtype dtype,
                         int32_t* num_absent);

/// One per-row array of any numbers, by its bytes.
struct LinesView {
  SlabStarts starts;
  Slabs<uint8_t> data;
  int64_t line_bytes;  // even
  uint32_t capacity;
};

/// Writes lines of a per-row array, by row id.
///
/// Pre    : the lines of equal row ids are equal.
/// Post   : line i of `lines` stands in the row of row_ids[i]; row ids that are not below the capacity are passed over.
/// Cost   : per line 4 B in, and the line in and out.
LaunchError LaunchScatter(Stream stream, const LinesView& array, const uint32_t* row_ids, int64_t num_lines,
                          const void* lines);

/// The statistics of a store.
struct StatisticsView {
  SlabStarts starts;
  Slabs<RowStatistics> data;
  uint32_t capacity;
};

/// Notes in the statistics of rows that a lookup used them.
///
/// Pre    : clock is one word of the device's memory; uses[i] is how often position i stands for its row; null: once.
///          Each is below 2^27, so that those of a warp can be added up.
/// Post   : of each row in row_ids, last_step is the clock and frequency has grown by the uses of all its positions,
///          to 2^32 - 1 at most. Row ids that are not below the capacity are passed over.
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

/// Fills an index (of any size, contents may be anything) from the records.
///
/// Post   : every row in use is found again; kNumUnplaced and kLongestProbe speak of the new index. Nothing is touched
///          where only_if[0] (on a GPU in its memory) is 0; nullptr: always.
LaunchError LaunchRebuild(Stream stream, const StoreView& store, const uint32_t* only_if = nullptr);

/// Forgets, of the keys that wait for a row, those that were seen often.
///
/// Post   : entries of table t whose count is floors[t] or more have count 0; they stay where they are.
/// Cost   : reads the entries once, 16 bytes each.
LaunchError LaunchForget(Stream stream, const IndexView& sightings, const uint32_t* floors,  // [num_tables]
                         int32_t num_tables);

/// Fills sightings (of any size, contents may be anything) with keys that wait for a row.
///
/// Pre    : entries are key, count and table, as those of sightings; `sightings` is another buffer.
/// Post   : counts of one pair are added up. Left out are empty entries, counts of 0, and counts of floors[t] or more.
///          kNumSightings counts the entries taken.
LaunchError LaunchWait(Stream stream, const IndexView& sightings, uint32_t* counters,
                       const uint32_t* floors,  // [num_tables]
                       int32_t num_tables, const Entry* entries, int64_t num_entries);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TABLE_H_

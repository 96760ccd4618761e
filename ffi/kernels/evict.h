// select and release on one shard: select chooses the rows to remove by score, and release removes them.
//
// XLA computes scores, slab by slab. Between the two calls the host may read the selected rows. Launchers are
// asynchronous on their stream, allocate nothing and wait for nothing (the CPU's run at once and finish before they
// return). They may be captured in a CUDA graph.
#ifndef JAXSOK_KERNELS_EVICT_H_
#define JAXSOK_KERNELS_EVICT_H_

#include "../core/layout.h"
#include "stream.h"
#include "table.h"

namespace jaxsok {

constexpr int kMaxScoreWords = 2;
constexpr int32_t kAllTables = -1;

/// The decision about a row, one byte each. Between the passes of one call a row may be undecided.
enum RowFlag : uint8_t {
  kRowStays = 0,
  kRowGoes = 1,
  kRowUndecided = 2,
};

/// Bits of a digit: 2,048 counts, 8 KiB, fit the shared memory of a block and the L1 cache of a core.
constexpr int kSelectDigitBits = 11;
constexpr int kNumSelectBins = 1 << kSelectDigitBits;

/// The part of a row's rank that a digit comes from, from the most significant to the least.
enum DigitSource : int32_t {
  kDigitOfScore0 = 0,
  kDigitOfScore1 = 1,
  kDigitOfTable = 2,
  kDigitOfKey = 3,
};

struct Digit {
  int32_t source;
  int32_t shift;
  uint32_t mask;
};

/// The digits of (scores, table, key), most significant first.
struct Digits {
  static constexpr int kMost = 3 * kMaxScoreWords + 3 + 6;
  Digit digit[kMost];
  int32_t num_digits = 0;

  /// Returns the digits. `num_tables`: 1 if the rows of one table only may go.
  static Digits Of(int32_t num_words, int32_t num_tables) {
    Digits digits;
    for (int32_t w = 0; w < num_words; ++w) digits.Add(kDigitOfScore0 + w, 32);
    int table_bits = 0;
    while ((int64_t{1} << table_bits) < num_tables) ++table_bits;
    digits.Add(kDigitOfTable, table_bits);
    digits.Add(kDigitOfKey, 64);
    return digits;
  }

 private:
  void Add(int32_t source, int num_bits) {
    while (num_bits > 0) {
      const int bits = num_bits < kSelectDigitBits ? num_bits : kSelectDigitBits;
      num_bits -= bits;
      digit[num_digits++] = {source, num_bits, (uint32_t{1} << bits) - 1};
    }
  }
};

/// The inputs of select: scores to rank by, or a mask.
struct SelectView {
  SlabStarts starts;
  Slabs<Record> records;
  int32_t num_words;                       // of the score: 1 or 2; 0: `mask` decides
  Slabs<uint32_t> scores[kMaxScoreWords];  // [capacity] each, the more significant first
  Slabs<uint8_t> mask;                     // [capacity]
  uint32_t capacity;
  int32_t num_tables;  // of the store
  int32_t table;       // whose rows may go, or kAllTables

  /// Returns whether a row is in use and its table may lose rows.
  JAXSOK_HOST_DEVICE bool IsAsked(uint32_t row_id) const {
    const Record* record = records.At(starts, row_id, 1);
    return record->key != kPaddingKey && (table == kAllTables || record->table == static_cast<uint32_t>(table)) &&
           record->table < static_cast<uint32_t>(num_tables);
  }

  JAXSOK_HOST_DEVICE uint32_t DigitOf(const Digit& digit, uint32_t row_id) const {
    if (digit.source <= kDigitOfScore1)
      return (*scores[digit.source].At(starts, row_id, 1) >> digit.shift) & digit.mask;
    const Record* record = records.At(starts, row_id, 1);
    const uint64_t word = digit.source == kDigitOfTable ? record->table : record->key;
    return static_cast<uint32_t>(word >> digit.shift) & digit.mask;
  }
};

/// Returns the bytes of workspace for select: control words and the counts of one digit.
constexpr int64_t SelectWorkspaceBytes() { return 2 * kWorkspaceLine + int64_t{kNumSelectBins} * 4; }

/// Returns the bytes of workspace for release: two bits a row, and the counts for listing the freed rows.
constexpr int64_t ReleaseWorkspaceBytes(int64_t capacity) {
  return kControlBytes + 2 * CeilDiv<int64_t>(capacity, 32) * 4 + CountsBytes(capacity);
}

/// Selects the rows to remove.
///
/// Post   : candidates are the rows in use whose table may lose rows. With scores: of n candidates, the n - num_kept[0]
///          lowest by (scores, table, key) have flag kRowGoes, none if there are fewer than num_kept[0]; all other
///          rows, and those not in use, have kRowStays. With a mask: candidates whose mask is not 0 have kRowGoes.
///          num_selected[t] counts them by table.
/// Order  : only integers are added: the same flags on every run and on both back ends.
/// Bound  : one pass for each digit of the rank, 9 to 15, most of which have nothing left to do.
/// Cost   : 16 B a row of capacity for its record, 5 B (its first score word and flag) for each deciding digit, and 1 B
///          for the others; the rest of the rank is read only for ties. No sort; the flags are the only scratch as long
///          as the rows.
LaunchError LaunchSelect(Stream stream, const SelectView& view, const uint32_t* num_kept, uint8_t* flags,
                         uint32_t* num_selected, void* workspace);

/// Removes the rows whose flag is not 0.
///
/// Post   : their records are dead, their optimizer state is initial, their statistics (if there are any) are zero; the
///          list of freed rows is rebuilt, ascending; kGeneration is advanced. num_released[t] counts them by table,
///          and is subtracted from table_rows and added to table_evicted (if there is one). The index is swept, or, if
///          keys had found no entry in it, rebuilt. If no row is removed, only num_released is written. Flags of rows
///          that are not in use are ignored.
/// Pre    : workspace has ReleaseWorkspaceBytes(capacity) bytes, 256-byte aligned.
/// Cost   : 1 B a row of capacity, 8 B and its state for each removed row; the records twice; the index once, and again
///          the buckets that change.
///
/// Sweeping an index: an entry whose row is removed leaves its bucket, and so does an entry outside its home bucket;
/// the others are compacted. Then every bucket holds only its own entries, starting at its first place, as if they had
/// just been inserted. The displaced entries of remaining rows (one in twenty at load 0.5) are inserted again. A sweep
/// streams through memory, while a rebuild accesses a random memory line for each row.
LaunchError LaunchRelease(Stream stream, const StoreView& store, const StateView& states,
                          const Slabs<uint32_t>* statistics,  // [capacity, 2]; nullptr: none are kept
                          const uint8_t* flags,               // [capacity]
                          uint32_t* table_evicted,            // [num_tables]; nullptr: not counted
                          uint32_t* num_released,             // [num_tables], out
                          void* workspace);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_EVICT_H_

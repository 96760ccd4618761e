// select and release on one shard: which rows leave a store by score, and their leaving.
//
// Scores are made by XLA, slab by slab. Between the two calls the host may read the rows that were selected.
// Launchers are asynchronous on their stream, allocate nothing and wait for nothing (the CPU's run at once and end
// before they return). They may be captured in a CUDA graph.
#ifndef JAXSOK_KERNELS_EVICT_H_
#define JAXSOK_KERNELS_EVICT_H_

#include "../core/layout.h"
#include "stream.h"
#include "table.h"

namespace jaxsok {

constexpr int kMaxScoreWords = 2;
constexpr int32_t kAllTables = -1;

/// What becomes of a row: one byte each. Between the passes of one call a row may be undecided.
enum RowFlag : uint8_t {
  kRowStays = 0,
  kRowGoes = 1,
  kRowUndecided = 2,
};

/// Bits of a digit: 2,048 counts, 8 KiB, fit the shared memory of a block and the first cache of a core.
constexpr int kSelectDigitBits = 11;
constexpr int kNumSelectBins = 1 << kSelectDigitBits;

/// What a digit of a row's rank is cut from, from the most significant to the least.
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

  /// `num_tables`: 1 where one table alone is asked.
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

/// What select ranks, or is told.
struct SelectView {
  SlabStarts starts;
  Slabs<Record> records;
  int32_t num_words;                       // of the score: 1 or 2; 0: `mask` tells who goes
  Slabs<uint32_t> scores[kMaxScoreWords];  // [capacity] each, the more significant first
  Slabs<uint8_t> mask;                     // [capacity]
  uint32_t capacity;
  int32_t num_tables;  // of the store
  int32_t table;       // whose rows may go; kAllTables

  /// Whether a row is in use, and of a table that was asked.
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

/// Bytes of workspace for select: control words and the counts of one digit.
constexpr int64_t SelectWorkspaceBytes() { return 2 * kWorkspaceLine + int64_t{kNumSelectBins} * 4; }

/// Bytes of workspace for release: two bits a row, and the counts that listing the freed rows takes.
constexpr int64_t ReleaseWorkspaceBytes(int64_t capacity) {
  return kControlBytes + 2 * CeilDiv<int64_t>(capacity, 32) * 4 + CountsBytes(capacity);
}

/// Selects the rows that leave.
///
/// Post   : with scores: of the n rows in use that are asked, the n - num_kept[0] lowest by (scores, table, key) have
///          flag kRowGoes, none if there are not so many; all others, and those not in use, kRowStays. With a mask:
///          those asked whose mask is not 0. num_selected[t] counts them by table.
/// Order  : whole numbers alone are added: the same flags on every run and on both back ends.
/// Bound  : one pass for each digit of the rank, 9 to 15, most of which find nothing left to do.
/// Cost   : 16 B a row of capacity for its record, 5 B (its first score word and flag) for each digit that decides, and
///          1 B for the others; the rest of the rank is read where rows tie. No sort, nothing as large as the rows
///          but the flags.
LaunchError LaunchSelect(Stream stream, const SelectView& view, const uint32_t* num_kept, uint8_t* flags,
                         uint32_t* num_selected, void* workspace);

/// Takes the rows away whose flag is not 0.
///
/// Post   : their records are dead, their optimizer state is initial, their statistics (if there are any) are zero; the
///          list of freed rows is made anew, ascending; kGeneration is advanced. num_released[t] counts them by table,
///          and is taken from table_rows and added to table_evicted (if there is one). The index is swept, or, if keys
///          had found no entry in it, rebuilt. Where no row goes, nothing but num_released is touched. Flags of rows
///          that are not in use are ignored.
/// Pre    : workspace has ReleaseWorkspaceBytes(capacity) bytes, 256-byte aligned.
/// Cost   : 1 B a row of capacity, 8 B and its state for each row that goes; the records twice; the index once, and
///          again the buckets that change.
///
/// Sweeping an index: an entry whose row goes leaves its bucket, and so does one that is not in its home bucket; those
/// that stay close ranks. Now every bucket holds entries of its own alone, the first of them first, as if they had been
/// inserted so. Those that were displaced and stay (one in twenty at load 0.5) are then inserted as new. Streaming,
/// where a rebuild goes to a line of memory for each row, here and there.
LaunchError LaunchRelease(Stream stream, const StoreView& store, const StateView& states,
                          const Slabs<uint32_t>* statistics,  // [capacity, 2]; nullptr: none are kept
                          const uint8_t* flags,               // [capacity]
                          uint32_t* table_evicted,            // [num_tables]; nullptr: not counted
                          uint32_t* num_released,             // [num_tables], out
                          void* workspace);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_EVICT_H_

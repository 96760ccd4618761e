// Rows in host memory, and the cache of some of them on the device.
//
//   host     uint8[capacity][host_bytes]  slabs: what a row owns in one piece: its numbers, then its optimizer state
//   places   uint32[capacity]             slabs: the slot of a row, or kFresh, or in host memory with its mean use
//   homes    uint32[capacity][2]          slabs: which record is whose; see RecordOf
//   rows     RowDtype[num_slots][dim]     the rows in the cache, by slot
//   states   float[num_slots][1|dim]      their optimizer state, an array for each piece
//   owners   Record[num_slots]            whose row a slot holds; free_id is its row id, kNoRow: the slot is free
//   last_use uint32[num_slots]            when the last use of a slot's row began; 0: the slot is free
//   priority uint32[num_slots]            the mean of the times of all its uses, which decides whose row leaves
//   foreseen Foreseen[num_foreseen]       what the next call will place, if nothing changes until then
//   counters uint32[kNumTierCounters]
//
// Row ids, index, records, statistics and policies do not depend on the tier (design D19): a call that reads or writes
// rows first brings them, and then works on slots as if they were row ids. Rows that are not in the cache and do not
// fit it are staged: they get slots beyond the cache, which last for one call.
//
// XLA tracks a buffer in host memory only through calls with one result (jaxsok/kernels/tier.py), so each slab is
// written by a separate call.
//
// A row has one record, because a kernel fetches about 30 M records a second over the link whatever their size.
//
// A row that was never brought is fresh: it is not read, but initialized by its table's initializer.
//
// The row whose mean use is the oldest leaves first. The mean is that of the times of all uses of a row, each with half
// the weight of the next one (decision 0040). Rows with only one known use leave before all others. A row that leaves
// keeps its mean in its place. Calls that follow one another closely, such as the lookup ahead, the lookup and the
// update of a batch, are one use.
//
// Ahead of a call, the rows that it will bring may be read, and those that it will evict may be written, while other
// work runs. Both are only hints. What is read ahead goes to memory that the library owns (host_memory.h), and is valid
// if no row was moved since; what is written ahead goes to records of rows that are in the cache, which no call reads.
//
// Each row has a record of host memory, its own at first. The record of a row that is fresh or in the cache has no
// content, so two such rows may exchange their records. A row that leaves takes a record near that of the row that
// comes in its place: the link then translates one address for both (decision 0036).
#ifndef JAXSOK_KERNELS_TIER_H_
#define JAXSOK_KERNELS_TIER_H_

#include <algorithm>

#include "table.h"
#include "workspace.h"

namespace jaxsok {

constexpr uint32_t kMostSlots = uint32_t{1} << 30;
constexpr uint32_t kFresh = ~uint32_t{0};          // of a place: never written; types.py FRESH
constexpr uint32_t kInHost = ~uint32_t{0} - 1;     // of a place: only in host memory, no use is known; types.py IN_HOST
constexpr uint32_t kFirstInHost = 3 * kMostSlots;  // of a place: only in host memory; see MeanUse::PlaceInHost
constexpr uint32_t kPending = kMostSlots;  // of a place, inside one call: the rest is the smallest position of the row
JAXSOK_HOST_DEVICE constexpr bool IsPending(uint32_t place) { return place >= kPending && place < 2 * kPending; }
JAXSOK_HOST_DEVICE constexpr bool IsInHost(uint32_t place) { return place >= kFirstInHost && place < kFresh; }

/// Times of calls, which count them and begin again after kTimes, a divisor of 2^32, where the clock does; 0 is none.
constexpr uint32_t kTimes = kMostSlots / 4;
JAXSOK_HOST_DEVICE constexpr uint32_t TimeOf(uint32_t clock) { return clock % kTimes + 1; }
JAXSOK_HOST_DEVICE constexpr uint32_t TimeSince(uint32_t time, uint32_t now) {
  return now >= time ? now - time : now + kTimes - time;
}
JAXSOK_HOST_DEVICE constexpr uint32_t TimeBefore(uint32_t now, uint32_t age) {  // age: below kTimes
  return now > age ? now - age : now + kTimes - age;
}
// Calls of one use. Those for a batch are at most four calls apart, with lookups ahead by a batch that are not staler;
// with others they count as more uses, which changes only what leaves.
constexpr uint32_t kCallsOfUse = 5;

/// A priority is 0 for a free slot, or the mean use of the row, with these flags.
constexpr uint32_t kSingle = uint32_t{1} << 31;  // only one use is known, and the mean is its time
constexpr uint32_t kPinned = uint32_t{1} << 30;  // inside one call: the call uses the slot
// The row is among the next to leave, and was written ahead with the ticket of the counters.
constexpr uint32_t kMark = uint32_t{1} << 29;
constexpr uint32_t kMeanMask = kMark - 1;
JAXSOK_HOST_DEVICE constexpr bool IsMarked(uint32_t priority) { return (priority & (kMark | kPinned)) == kMark; }
JAXSOK_HOST_DEVICE constexpr bool IsFreeOrMarked(uint32_t priority) { return priority == 0 || IsMarked(priority); }

/// The mean of the times of a row's uses. Each use has half the weight of the next one; the second one counts as if all
/// before had come at the same distance, so that the mean is the time of the first one.
struct MeanUse {
  uint32_t time;
  bool is_single;

  JAXSOK_HOST_DEVICE static MeanUse OfPriority(uint32_t priority) {
    return {priority & kMeanMask, (priority & kSingle) != 0};
  }
  JAXSOK_HOST_DEVICE uint32_t Priority() const { return (is_single ? kSingle : 0) | time; }
  JAXSOK_HOST_DEVICE MeanUse After(uint32_t now) const {  // a use that begins now
    return {is_single ? time : TimeBefore(now, TimeSince(time, now) / 2), false};
  }
  /// Returns the place of a row that leaves the cache.
  JAXSOK_HOST_DEVICE uint32_t PlaceInHost() const {
    return kFirstInHost | (is_single ? kSingleInHost : 0) | (time <= kTimes ? time : 0);  // the latter: invalid
  }
  /// Returns the mean of a row that comes from a place, now.
  JAXSOK_HOST_DEVICE static MeanUse AfterPlace(uint32_t place, uint32_t now) {
    if (!IsInHost(place) || place == kInHost) return {now, true};
    return MeanUse{place & kTimeInPlace, (place & kSingleInHost) != 0}.After(now);
  }

 private:
  static constexpr uint32_t kSingleInHost = uint32_t{1} << 29;
  static constexpr uint32_t kTimeInPlace = kSingleInHost - 1;
};

/// Words of the counters of a tier; types.py names them too.
enum TierCounter : int {
  kTierClock = 0,     // calls that kept rows, so far
  kTierHits = 1,      // distinct rows that were in the cache, modulo 2^32
  kTierFetched = 2,   // distinct rows that were read from host memory
  kTierWritten = 3,   // rows that left the cache for host memory
  kTierTicket = 4,    // the clock of what was foreseen; 0: it is invalid
  kTierAhead = 5,     // of the fetched rows, those that were read ahead
  kTierForeseen = 6,  // of the foreseen rows, those in the list
  kTierWindow = 7,    // where the next call looks for slots: the first tile of its window
  kNumTierCounters = 8,
};

/// What a call knows of the slots that it lists.
struct SlotsStamp {
  uint32_t is_complete;  // 1: every row has a slot in the cache, or is foreseen; 0: the list is not used
  uint32_t ticket;       // of the call that foresaw some of the rows; 0: all were in the cache
  uint32_t num_rows;     // distinct rows in the cache
  uint32_t num_foreseen;
};
constexpr int kStampWords = sizeof(SlotsStamp) / 4;
constexpr uint32_t kIsForeseen = uint32_t{1} << 31;  // of a slot by position: the rest is a rank of the foreseen rows

/// The slots of a call's rows by position. A later call with the same rows checks each slot before it uses the list.
struct SlotList {
  uint32_t* slots;  // [num_keys]
  SlotsStamp* stamp;
};

/// Returns a row's bytes in host memory: its numbers, then its states, aligned to 4 bytes, rounded up to 16 bytes.
constexpr int64_t HostRecordBytes(int64_t row_bytes, int64_t num_state_words) {
  return ((row_bytes + 3) / 4 * 4 + num_state_words * 4 + 15) / 16 * 16;
}

/// Bins of age, as many for each octave: 0 in use, then by the mean use, then by a single use, of which all beyond 3.9
/// million calls are equal, and last free or marked.
constexpr int kAges = 1025;
constexpr int kFirstSingle = 864;
JAXSOK_HOST_DEVICE int BinOf(uint32_t age, int log2_of_octave) {  // 2^log2_of_octave bins for each octave
#ifdef __CUDA_ARCH__
  const int log2 = 31 - __clz(static_cast<int>(age | 1));
#else
  const int log2 = 31 - __builtin_clz(age | 1);
#endif
  const int shift = log2 > log2_of_octave ? log2 - log2_of_octave : 0;
  return (shift << log2_of_octave) + static_cast<int>(age >> shift);
}
JAXSOK_HOST_DEVICE int AgeOfUse(uint32_t time, uint32_t now) {
  const int bin = BinOf(TimeSince(time, now), 5);
  return bin < 1 ? 1 : bin < kFirstSingle ? bin : kFirstSingle - 1;
}

/// The slots that a call considers for the rows that come: a part of a large cache, the next part in the next call. It
/// has slots enough for all rows of a call, if the call uses others.
constexpr int64_t kSlotsOfTile = 1 << 13;
constexpr int64_t kLeastTiles = 32;
struct SlotWindow {
  uint32_t all_tiles;
  uint32_t num_tiles;

  static SlotWindow Of(int64_t num_slots, int64_t num_keys) {
    const int64_t all_tiles = CeilDiv<int64_t>(num_slots, kSlotsOfTile);
    const int64_t wanted = std::max(kLeastTiles, CeilDiv<int64_t>(4 * num_keys, kSlotsOfTile));
    return {static_cast<uint32_t>(all_tiles), static_cast<uint32_t>(std::min(all_tiles, wanted))};
  }
  JAXSOK_HOST_DEVICE int64_t size() const { return num_tiles * kSlotsOfTile; }
  /// Returns the first tile, of the counter.
  JAXSOK_HOST_DEVICE uint32_t First(uint32_t tile) const {
    return num_tiles < all_tiles && tile < all_tiles ? tile : 0;
  }
  JAXSOK_HOST_DEVICE uint32_t TileAt(uint32_t first_tile, uint32_t i) const {
    return first_tile + i < all_tiles ? first_tile + i : first_tile + i - all_tiles;
  }
  /// Returns the counter for the next call.
  JAXSOK_HOST_DEVICE uint32_t Next(uint32_t first_tile) const { return TileAt(first_tile, num_tiles); }
  /// Returns a slot, which may be beyond the last one.
  JAXSOK_HOST_DEVICE int64_t SlotAt(uint32_t first_tile, int64_t i) const {
    return TileAt(first_tile, static_cast<uint32_t>(i / kSlotsOfTile)) * kSlotsOfTile + i % kSlotsOfTile;
  }
};

/// The limit of rows of one store that are read or written ahead, and of bytes of their records.
constexpr int64_t kMostAhead = 1 << 16;
constexpr int64_t kMostBytesAhead = 64 << 20;
constexpr int64_t MostAhead(int64_t host_bytes) { return std::min(kMostAhead, kMostBytesAhead / host_bytes); }

/// The bytes of host memory that the link translates at once, and the records that begin in them.
constexpr int64_t kPageBytes = 64 << 10;
struct RecordRange {
  uint32_t begin, end;
};
// Of the second word in homes: the record has content, as far as calls have noted. A hint: the row's place decides.
constexpr uint32_t kIsFull = uint32_t{1} << 31;

/// A row that the next call will bring, the slot that it will take, and its priority there.
struct alignas(16) Foreseen {
  uint32_t row_id;
  uint32_t slot;
  uint32_t priority;
  uint32_t is_fresh;
};

struct AheadArea;  // tier_cuda.cuh

/// Returns the device memory for reading and writing ahead for a slab; nullptr: the library did not pin the slab.
AheadArea* AreaOf(const void* slab);

struct TierView {
  SlabStarts starts;
  uint32_t capacity;
  Slabs<Record> records;
  Slabs<uint8_t> host;
  int64_t host_bytes;
  Slabs<uint32_t> places;
  Slabs<uint32_t> homes;

  RowDtype row_dtype;
  int32_t dim;
  StateView states;                 // data[k].data[0] is the cache's, data[k].data[1] what is staged
  int64_t state_begin[kMaxStates];  // in a record of host memory
  void* rows;
  Record* owners;
  uint32_t* last_use;
  uint32_t* priority;
  Foreseen* foreseen;
  int64_t most_foreseen;  // the size of the list
  uint32_t num_slots;     // usable slots; the arrays have at least one
  uint32_t* counters;     // [kNumTierCounters]

  void* staged_rows;
  Record* staged_owners;
  uint32_t num_lines;   // slots of the cache's arrays: staged slots are numbered from here on
  uint32_t num_staged;  // room for staged rows

  const uint32_t* tables;  // [num_tables, kNumTableWords]
  const uint32_t* seed;    // [2]
  int32_t num_tables;

  AheadArea* area;  // of the first slab, on the device; nullptr: the library does not own the memory

  JAXSOK_HOST_DEVICE int64_t RowBytes() const { return int64_t{dim} * NumberBytes(row_dtype); }
  JAXSOK_HOST_DEVICE bool IsStaged(uint32_t slot) const { return slot >= num_lines; }
  JAXSOK_HOST_DEVICE char* RowAt(uint32_t slot) const {
    return IsStaged(slot) ? static_cast<char*>(staged_rows) + (slot - num_lines) * RowBytes()
                          : static_cast<char*>(rows) + slot * RowBytes();
  }
  JAXSOK_HOST_DEVICE float* StateAt(int k, uint32_t slot) const {
    return IsStaged(slot) ? states.data[k].data[1] + int64_t{slot - num_lines} * states.width[k]
                          : states.data[k].data[0] + int64_t{slot} * states.width[k];
  }
  JAXSOK_HOST_DEVICE Record* OwnerAt(uint32_t slot) const {
    return IsStaged(slot) ? staged_owners + (slot - num_lines) : owners + slot;
  }
  JAXSOK_HOST_DEVICE char* HostAt(uint32_t record) const {
    return reinterpret_cast<char*>(host.At(starts, record, host_bytes));
  }
  /// Returns the record of a row. Zeros stand for a row's own record, so new slabs need no other initial content.
  JAXSOK_HOST_DEVICE uint32_t RecordOf(uint32_t row_id) const {
    const uint32_t record = row_id + *homes.At(starts, row_id, 2);
    return record < capacity ? record : row_id;  // the latter only in an invalid state
  }
  JAXSOK_HOST_DEVICE uint32_t* TenantAt(uint32_t record) const { return homes.At(starts, record, 2) + 1; }
  /// Returns the row whose record this is, by the word at TenantAt.
  JAXSOK_HOST_DEVICE uint32_t RowOf(uint32_t record, uint32_t tenant) const {
    const uint32_t row_id = (record + tenant) & ~kIsFull;
    return row_id < capacity ? row_id : record;
  }
  JAXSOK_HOST_DEVICE static uint32_t TenantOf(uint32_t record, uint32_t row_id) { return (row_id - record) & ~kIsFull; }
  JAXSOK_HOST_DEVICE void SetHome(uint32_t row_id, uint32_t record) const {
    *homes.At(starts, row_id, 2) = record - row_id;
  }
  /// Notes whose record it is, and whether it has content.
  JAXSOK_HOST_DEVICE void NoteContent(uint32_t row_id, uint32_t record, bool is_full) const {
    *TenantAt(record) = TenantOf(record, row_id) | (is_full ? kIsFull : 0);
  }
  /// Returns the records of the page in which a record begins.
  JAXSOK_HOST_DEVICE RecordRange PageOf(uint32_t record) const {
    const int slab = starts.SlabOf(record);
    const uint32_t first = starts.start[slab], end = slab + 1 < starts.num_slabs ? starts.start[slab + 1] : capacity;
    const int64_t page = (record - first) * host_bytes / kPageBytes;
    const int64_t begin = (page * kPageBytes + host_bytes - 1) / host_bytes;
    const int64_t next = ((page + 1) * kPageBytes + host_bytes - 1) / host_bytes;
    return {first + static_cast<uint32_t>(begin), static_cast<uint32_t>(next < end - first ? first + next : end)};
  }
  /// Returns whether a row's record has no content, and the row does not wait to be written to it.
  JAXSOK_HOST_DEVICE bool MayExchange(uint32_t row_id) const {
    const uint32_t place = *PlaceAt(row_id);
    return place == kFresh || (place < num_slots && !IsMarked(priority[place]));
  }
  JAXSOK_HOST_DEVICE uint32_t* PlaceAt(uint32_t row_id) const { return places.At(starts, row_id, 1); }
  /// Returns whether a row is in use; stale plans name released rows, whose places are fresh.
  JAXSOK_HOST_DEVICE bool IsUsed(uint32_t row_id, uint32_t place) const {
    return place != kFresh || records.At(starts, row_id, 1)->key != kPaddingKey;
  }
  JAXSOK_HOST_DEVICE uint32_t Now() const { return TimeOf(counters[kTierClock] + 1); }
  /// Returns whether a list of slots may hold; then each slot in it is to be checked.
  JAXSOK_HOST_DEVICE bool MayHold(const SlotsStamp& stamp) const {
    if (stamp.is_complete == 0) return false;
    return stamp.ticket == 0 ||
           (stamp.ticket == counters[kTierTicket] && stamp.num_foreseen == counters[kTierForeseen]);
  }
  /// Returns the rank of a row among the foreseen rows, by its slot in a list, or kNoRow.
  JAXSOK_HOST_DEVICE static uint32_t RankOf(uint32_t known) {
    return known >= kIsForeseen && known != kNoRow ? known & ~kIsForeseen : kNoRow;
  }
  /// Returns whether a foreseen row may take its slot, given the slot's priority.
  JAXSOK_HOST_DEVICE bool MayCome(const Foreseen& row, uint32_t slot_priority) const {
    return row.row_id < capacity && row.slot < num_slots && IsFreeOrMarked(slot_priority);
  }
  /// Returns the bin of a slot's age; `now` is the time of this call.
  JAXSOK_HOST_DEVICE int AgeOf(uint32_t slot_priority, uint32_t now) const {
    if (IsFreeOrMarked(slot_priority)) return kAges - 1;
    if ((slot_priority & kPinned) != 0) return 0;
    const MeanUse mean = MeanUse::OfPriority(slot_priority);
    if (!mean.is_single) return AgeOfUse(mean.time, now);
    const int bin = kFirstSingle + BinOf(TimeSince(mean.time, now), 3);
    return bin < kAges - 2 ? bin : kAges - 2;
  }
  /// Returns whether an update may follow the slot's last use. Ahead of a call such slots stay: what is written of them
  /// would be too old.
  JAXSOK_HOST_DEVICE static bool IsRecent(uint32_t slot_last_use, uint32_t now) {
    return slot_last_use != 0 && TimeSince(slot_last_use, now) <= kCallsOfUse;
  }
  /// Returns whether a call that uses a slot begins a use, which takes part in its mean.
  JAXSOK_HOST_DEVICE static bool BeginsUse(uint32_t slot_last_use, uint32_t slot_priority, uint32_t now) {
    return TimeSince(slot_last_use, now) >= kCallsOfUse || IsMarked(slot_priority);
  }
};

/// The move of a row in one call. A move without a row has kNoRow.
struct alignas(16) Move {
  uint32_t slot;  // the slot that it leaves or comes to; for a row that is read ahead, its rank
  uint32_t row_id;
  uint32_t record;  // its record of host memory; kNoRow: a fresh row, which is initialized
  uint32_t ahead;   // for a coming row: its rank among the rows read ahead, or kNoRow
};
static_assert(sizeof(Move) == 16, "four words of a uint32[num_moves, 4]");

enum MoveCount : int {
  kNumLeaving = 0,
  kNumFromHost = 1,  // of the coming rows: the first ones
  kNumNotFresh = 2,  // includes the rows after them, which were read ahead
  kNumComing = 3,    // includes the fresh rows
  kNumMoveCounts = 4,
};

/// The moves of one call, in ascending parts of host memory: this order moves up to twice as many records a second.
struct Moves {
  Move* leaving;     // [num_keys]
  Move* coming;      // [num_keys]: first those that are read from host memory
  uint32_t* counts;  // [kNumMoveCounts]
};

/// The number of parts of host memory that order the moves.
constexpr int kParts = 4096;
constexpr int kListParts = kParts + 2;  // the parts, then rows that were read ahead, and fresh rows

/// The limit of blocks that place rows.
constexpr int kMostPlaceBlocks = 1024;

/// Returns the bytes of workspace for LaunchBring: by position its rank and two former places, the first position of
/// each rank and its slot, and two moves; counts of ages, of parts and of blocks.
constexpr int64_t BringWorkspaceBytes(int64_t num_keys) {
  return kControlBytes + (PaddedToLine(kAges) + 2 * PaddedToLine(kListParts) + 2 * PaddedToLine(2 * kMostPlaceBlocks) +
                          5 * PaddedToLine(num_keys) + 2 * PaddedToLine(4 * num_keys)) *
                             4;
}

/// Gives every row of a call a slot, and lists the required moves; LaunchWrite and LaunchRead, in this order, do them.
///
/// Pre    : num_staged is at least num_keys - num_slots. The places of rows that are not in use are kFresh. Of the tier
///          only records, places, homes, owners, last_use, priority, foreseen, counters, staged_owners and area are
///          read, not the numbers of rows. `known` is the list of an earlier call: if it is not complete, or a slot in
///          it is no longer that of its row, only time is lost.
/// Post   : slots[i] is the slot of row_ids[i], the same for equal rows. It is kNoRow for row ids that are not below
///          the capacity, and 0 for rows that are not in use: stale plans name them, whose uses are counted but neither
///          read nor write. Rows that were foreseen take their slots, if these are still free or marked. The others
///          take the slots of the greatest age in the window, of equal age the first ones; no slot of this call's rows
///          is taken. staged_owners has kNoRow in unused slots. Rows that were written ahead are not written again.
/// Order  : by first occurrence; slots as in the window: the same on every run and both back ends.
/// Cost   : per position 28 B, and 80 B if its row is not in the cache; 8 B a slot of the window if a row comes that
///          was not foreseen. If the known slots hold, 24 B for each position, and 100 B for
///          each row that comes.
LaunchError LaunchBring(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                        const SlotList& known, const SlotList& list, const Moves& moves, void* workspace);

/// Lists what LaunchBring of the same rows would move, as far as the list and the area have room; LaunchWriteAhead and
/// LaunchReadAhead, in this order, do it. The next call waits for what is read, but only rarely for what is written.
///
/// Post   : rows of the call that are in the cache count as used now; `foreseen` has the rows that would come, with
///          their slots; exactly those of these slots whose rows would leave are marked. No slot is foreseen whose last
///          use began at most kCallsOfUse calls ago. `list` has the slots of rows in the cache, and the ranks of those
///          that are foreseen, with kIsForeseen; it is complete if these are all that would come (other slots in
///          it are unspecified). A row that would
///          leave has a record in the page of one that is read, if there is one without content in the pages that are
///          looked at; which it is may differ between runs and back ends.
LaunchError LaunchBringAhead(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                             const SlotList& list, const Moves& moves, void* workspace);

/// Writes leaving rows to one slab of host memory, which holds the rows from `begin` on.
///
/// Pre    : the tier has rows and states, by slot; host.data[0] is the slab, of `capacity` rows, and `area` its area.
/// Cost   : per leaving row a record in and out.
LaunchError LaunchWrite(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                        int64_t most_moves, uint32_t begin);

/// Reads coming rows from host memory, or from the rows read ahead, into their slots, or initializes them.
///
/// Post   : rows that left in this call, and were written ahead, may still be on their way to host memory. They have
///          arrived after LaunchWriteAhead for the next call, or LaunchWait.
LaunchError LaunchRead(Stream stream, const TierView& tier, const Move* coming, const uint32_t* counts,
                       int64_t most_moves);

/// Reads the rows that LaunchBringAhead has listed in the area, while the stream continues, and gives it the ticket of
/// the counters.
///
/// Pre    : the tier has host slabs, counters and area; LaunchWriteAhead of the same call, which waited for rows that
///          were written before, as these may be.
LaunchError LaunchReadAhead(Stream stream, const TierView& tier);

/// Writes as LaunchWrite, while the stream continues: from a copy of the rows. Waits for the rows written ahead before.
LaunchError LaunchWriteAhead(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                             int64_t most_moves, uint32_t begin);

/// Waits until all rows that were written ahead are in host memory.
LaunchError LaunchWait(Stream stream, const TierView& tier);

/// Gives every position a slot that holds the numbers of its row, and changes only staged rows.
///
/// Pre    : as LaunchBring; num_staged is at least num_keys.
/// Post   : slots[i] is the slot of row_ids[i] in the cache, or the i-th staged slot; kNoRow if there is no row, or it
///          is not in use. staged_owners has kNoRow in unused slots.
/// Cost   : per position 12 B, and a record if its row is not in the cache.
LaunchError LaunchPeek(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_H_

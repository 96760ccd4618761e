// Windows: memory of each shard that its peers write into, for the exchange inside one NVLink domain.
//
// An exchange has two barriers of all shards. After the first no shard reads its window any more, so that all write
// into the windows of the others; after the second each reads its own window. One call of a handler holds a whole
// exchange, and the calls of a device run one after the other.
//
// A kernel counts the barriers, in memory of the device, and a window is never replaced: a larger one is added for the
// exchanges that need it. So launches have the same arguments each time, and CUDA graphs may repeat them.
#ifndef JAXSOK_KERNELS_WINDOW_H_
#define JAXSOK_KERNELS_WINDOW_H_

#include "../core/hash.h"
#include "stream.h"

namespace jaxsok {

constexpr int32_t kMostWindowShards = 32;
/// Bytes before what a window receives: the head.
constexpr int64_t kWindowHeadBytes = 65 * 4096;
/// Numbers of each shard that are added in one pass.
constexpr int64_t kSumWords = 1024;

/// The destination of written rows: one array, or equal parts, each in a separate array.
struct LineTarget {
  char* parts[kMostWindowShards];
  uint32_t lines_of_part;  // 0: all rows are in parts[0]
  int64_t first_line;      // with which a shard should begin, so that not all write to one peer at a time

  static LineTarget Of(void* lines) {
    LineTarget target{};
    target.parts[0] = static_cast<char*>(lines);
    return target;
  }
  /// Returns whether the rows go to windows, whose readers request only written rows.
  JAXSOK_HOST_DEVICE bool IsWindow() const { return lines_of_part != 0; }
  JAXSOK_HOST_DEVICE char* At(int64_t line, int64_t line_bytes) const {
    if (lines_of_part == 0) return parts[0] + line * line_bytes;
    const uint32_t part = static_cast<uint32_t>(line) / lines_of_part;
    return parts[part] + (line - int64_t{part} * lines_of_part) * line_bytes;
  }
};

/// What ended the exchange: a shard, its peer and the barrier, in one word, since two shards may find it at once. In
/// memory that the host and all devices read and write.
struct WindowFailure {
  enum Kind : uint64_t { kNone, kTimeOut, kOtherCall, kFoundByHost };
  uint64_t word;  // not 0: no device waits any longer

  JAXSOK_HOST_DEVICE static uint64_t Word(Kind kind, int32_t shard, int32_t peer, uint64_t epoch) {
    return kind | static_cast<uint64_t>(shard) << 8 | static_cast<uint64_t>(peer) << 16 | epoch << 24;
  }
  static Kind KindOf(uint64_t word) { return static_cast<Kind>(word & 0xff); }
  static uint64_t ShardOf(uint64_t word) { return word >> 8 & 0xff; }
  static uint64_t PeerOf(uint64_t word) { return word >> 16 & 0xff; }
  static uint64_t EpochOf(uint64_t word) { return word >> 24; }
};

/// The head of a device's first window, in the memory of the device.
struct WindowHead {
  struct alignas(64) Flag {
    uint64_t value;  // the last barrier at which a shard has arrived, times 2^16, and the tag of its call
  };
  Flag arrived[kMostWindowShards];
  uint64_t epoch;  // the last barrier that this device has passed
  // The numbers of each shard. Passes use the halves in turn: who writes into one again has met all shards since, and
  // they had read it before.
  alignas(64) int32_t sums[2][kMostWindowShards][kSumWords];
};
static_assert(sizeof(WindowHead) <= kWindowHeadBytes, "the head does not fit");

/// A device's place among the shards, and the heads of all shards as this device addresses them.
struct WindowMember {
  int32_t shard = 0;
  int32_t num_shards = 0;
  WindowHead* heads[kMostWindowShards] = {};
  WindowFailure* failure = nullptr;
};

/// What calls exchange. Shards that meet in calls of another kind, or of other sizes, are refused.
enum WindowCall : uint32_t {
  kCallExchange,
  kCallLookup,
  kCallLookupBags,
  kCallUpdate,
  kCallUpdateBags,
  kCallSum,
  kCallLines
};

struct WindowDevice;

/// One exchange of one shard. During its lifetime no other exchange of the device begins.
class WindowExchange {
 public:
  /// Begins an exchange: waits, on the stream, until no shard reads its window any more. The CPU waits at once.
  /// `window`: a number from JaxsokWindowOpen; `device`: the ordinal of the calling device; `num_bytes`: the size that
  /// the shard receives; `second`: if not null, gets a stream whose work runs at the same time as that of `stream`,
  /// from before this wait until `Meet`. On the CPU it is `stream`.
  WindowExchange(Stream stream, int32_t window, int32_t device, WindowCall call, int64_t num_bytes,
                 Stream* second = nullptr);
  ~WindowExchange();
  WindowExchange(const WindowExchange&) = delete;
  WindowExchange& operator=(const WindowExchange&) = delete;

  /// Returns nullptr, or why the exchange cannot take place.
  LaunchError error() const { return error_; }
  int32_t num_shards() const;
  int32_t shard() const;
  /// Returns where this shard writes: part p of its rows goes into the window of shard p, at the place of this shard.
  LineTarget Target(int64_t lines_of_part, int64_t line_bytes) const;
  /// Returns what the others wrote, by shard, once all have met.
  void* received() const;
  /// Waits, on the stream, until all shards have written and the second stream has ended. The CPU waits at once.
  ///
  /// A shard that waits too long ends all work of its device: a kernel traps, so that no later kernel writes a row, and
  /// JAX raises. The state is lost.
  LaunchError Meet(Stream stream);
  /// Ends the exchange; returns `error`, that of the launches after the meeting. Without it the exchange has failed.
  LaunchError Done(LaunchError error) {
    is_done_ = error == nullptr;
    return error;
  }

 private:
  LaunchError Wait(Stream stream);

  Stream stream_;
  WindowDevice* device_ = nullptr;
  char* const* windows_ = nullptr;  // by shard
  uint32_t tag_ = 0;
  bool is_done_ = false, has_second_stream_ = false;
  LaunchError error_ = nullptr;
};

/// Sends equal parts of an array to the shards, and receives theirs.
///
/// Pre    : `lines` and `received` have num_shards times part_bytes bytes.
/// Post   : part p of `received` is this shard's part of `lines` of shard p.
LaunchError LaunchWindowExchange(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                                 void* received);

/// Lines for each shard, and further words for it.
struct LinesToSend {
  const void* lines;   // those for each shard one after the other
  int64_t line_bytes;  // 8 or 16: a key, perhaps with further words
  int64_t num_lines;
  const int32_t* starts;   // [num_shards + 1]: where the lines for each shard begin, and the end of the last
  const uint32_t* digest;  // [2]: of all lines
  const int32_t* offsets;  // [num_shards, num_offsets]
  int64_t num_offsets;
  int64_t send_capacity;  // lines for one shard; further ones are left out

  JAXSOK_HOST_DEVICE int64_t LineBytes() const { return CeilDiv<int64_t>(send_capacity * line_bytes, 16) * 16; }
  /// Returns the number of words for one shard: the digest, the counts of lines for all shards, and its offsets.
  JAXSOK_HOST_DEVICE int64_t NumWords(int32_t num_shards) const { return 2 + num_shards + num_offsets; }
  /// Returns the bytes that one shard gets.
  JAXSOK_HOST_DEVICE int64_t PartBytes(int32_t num_shards) const {
    return LineBytes() + CeilDiv<int64_t>(NumWords(num_shards), 4) * 16;
  }
  JAXSOK_HOST_DEVICE uint32_t Word(int32_t num_shards, int64_t shard, int64_t at) const {
    if (at < 2) return digest[at];
    if (at < 2 + num_shards) return static_cast<uint32_t>(starts[at - 1] - starts[at - 2]);
    return static_cast<uint32_t>(offsets[shard * num_offsets + at - 2 - num_shards]);
  }
};

struct LinesReceived {
  void* lines;       // [num_shards, send_capacity]; padding (a key of all ones, then zeros) after those of each
  int32_t* offsets;  // [num_shards, num_offsets]
  int32_t* load;     // [2]: most lines of one shard for one, and most of all shards for one; the same everywhere
  uint32_t* digest;  // [2]: of the digests of all shards, by shard; the same everywhere
};

/// Returns what a shard adds to the digest of all: `digest` has its words.
JAXSOK_HOST_DEVICE uint64_t DigestOfShard(const uint32_t* digest, int32_t shard) {
  return Mix64(Word64(digest[0] ^ static_cast<uint32_t>(shard), digest[1]));
}

/// Sends each shard its lines, and receives lines from all.
LaunchError LaunchWindowLines(Stream stream, WindowExchange& exchange, const LinesToSend& send,
                              const LinesReceived& received);

/// Waits until the threads of all devices of the process run the program that exchanges next, so that all of them have
/// recorded its CUDA graphs: a thread that records may load kernels, or allocate, and so wait for a device.
LaunchError MeetThreads(int32_t window, int32_t device);

/// Adds the numbers of all shards, number by number; all shards get the same sums.
LaunchError LaunchWindowSum(Stream stream, int32_t window, int32_t device, const int32_t* words, int64_t num_words,
                            int32_t* sums);

// The functions in which the back ends differ.

/// Allocates zeroed memory of a device that its peers can write; nullptr if there is not enough.
char* TakeWindow(int32_t device, int64_t num_bytes);
void ReturnWindow(int32_t device, char* window);
/// The name of a window for other processes of the host.
struct WindowHandle {
  char bytes[64];
};
LaunchError ExportWindow(int32_t device, char* window, WindowHandle* handle);
/// Maps the window of another process on a device.
LaunchError ImportWindow(int32_t device, const WindowHandle& handle, char** window);
void ReleaseImported(int32_t device, char* window);
/// A second stream of a device. On the CPU there is none.
struct SideStream;
/// Prepares a device for windows of its peers (-1: of another process). Returns nullptr, or why it cannot reach them.
LaunchError PrepareDevice(int32_t device, const int32_t* peers, int32_t num_peers, SideStream** side);
/// Sets `second` to the second stream, whose next work runs after what `stream` has so far, and not after later work.
LaunchError Fork(SideStream* side, Stream stream, Stream* second);
/// Lets the next work of `stream` wait for the work of the second stream.
LaunchError Join(SideStream* side, Stream stream);
/// Allocates zeroed memory that the host and all devices share; nullptr if there is none.
WindowFailure* TakeFailure(int32_t device);
/// Returns whether launches on the stream are recorded for a CUDA graph, and run later.
bool IsRecording(Stream stream);
/// Launches the barrier: signals to the others that this shard has arrived, and waits for them. The CPU's shards wait
/// on the host instead (`kWaitsOnHost`).
LaunchError LaunchBarrier(Stream stream, const WindowMember& member, uint32_t tag, int64_t most_seconds);
extern const bool kWaitsOnHost;
/// Launches the sum of `LaunchWindowSum`, with a barrier for each pass; not on the CPU.
LaunchError LaunchSum(Stream stream, const WindowMember& member, uint32_t tag, int64_t most_seconds,
                      const int32_t* words, int64_t num_words, int32_t* sums);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_WINDOW_H_

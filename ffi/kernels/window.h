// Windows: memory of each shard that its peers write into, for the exchange inside one NVLink domain.
//
// An exchange has three parts. Every shard writes rows for the others straight into their windows; then all shards
// meet; then each reads its own window. A window has two halves, used in turn. A shard writes into a half again only
// after the meeting of the exchange in between: its owner has arrived there, and so has read the half. No other credit
// is needed. One call of a handler holds a whole exchange, so that exchanges never overlap on a device.
//
// The host counts exchanges. Calls with windows are therefore not captured in CUDA graphs, and their launches hold
// addresses: a larger window takes effect with the next call.
#ifndef JAXSOK_KERNELS_WINDOW_H_
#define JAXSOK_KERNELS_WINDOW_H_

#include "../core/platform.h"
#include "stream.h"

namespace jaxsok {

constexpr int32_t kMostWindowShards = 32;
/// Bytes before the halves: a flag for each shard that signals.
constexpr int64_t kWindowHeadBytes = 4096;
/// The alignment of a window's halves.
constexpr int64_t kWindowLine = 128;

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

/// The shard whose wait timed out, and its peer. In memory that the host and all devices read and write.
struct WindowFailure {
  uint32_t is_over;  // not zero: no device waits any longer
  uint32_t shard, peer;
  uint64_t epoch;
};

/// The addresses of a device's window and of its peers' windows.
struct WindowMember {
  int32_t shard = 0;
  int32_t num_shards = 0;
  char* windows[kMostWindowShards] = {};  // of each shard, as this device addresses them
  int64_t half_bytes = 0;
  WindowFailure* failure = nullptr;
};

/// The head of a window, in the memory of its device.
struct WindowHead {
  struct alignas(64) Flag {
    uint64_t epoch;  // of the last meeting at which a shard has arrived
  };
  Flag arrived[kMostWindowShards];
};
static_assert(sizeof(WindowHead) <= kWindowHeadBytes, "the head does not fit");

struct WindowDevice;

/// One exchange of one shard. During its lifetime no other exchange of the device begins.
class WindowExchange {
 public:
  /// Begins an exchange. `window`: a number from JaxsokWindowOpen; `device`: the ordinal of the calling device; `run`:
  /// the number of the program's run, which differs if two threads run programs in another order on each device;
  /// `num_bytes`: the size that the shard receives.
  WindowExchange(int32_t window, int32_t device, int64_t run, int64_t num_bytes);
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
  /// Waits, on the stream, until all shards have written. The CPU waits at once.
  ///
  /// A shard that waits too long ends all work of its device: a kernel traps, so that no later kernel writes a row, and
  /// JAX raises. The state is lost.
  LaunchError Meet(Stream stream);

 private:
  LaunchError MeetOnHost();

  WindowDevice* device_ = nullptr;
  LaunchError error_ = nullptr;
};

/// Writes parts of an array into the windows of the shards: part p begins `stride_bytes` after the previous one. 0: all
/// shards get the same part.
LaunchError LaunchWindowPush(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                             int64_t stride_bytes);

/// Sends equal parts of an array to the shards, and receives theirs.
///
/// Pre    : `lines` and `received` have num_shards times part_bytes bytes.
/// Post   : part p of `received` is this shard's part of `lines` of shard p.
LaunchError LaunchWindowExchange(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                                 void* received);

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
/// Prepares a device for windows of its peers (-1: of another process). Returns nullptr, or why it cannot reach them.
LaunchError PrepareDevice(int32_t device, const int32_t* peers, int32_t num_peers);
/// Waits until a device is idle.
LaunchError WaitForDevice(int32_t device);
/// Allocates zeroed memory that the host and all devices share; nullptr if there is none.
WindowFailure* TakeFailure(int32_t device);
/// Launches the signal to the others that this shard has arrived; the CPU has nothing to do.
LaunchError LaunchArrival(Stream stream, const WindowMember& member, uint64_t epoch);
/// Launches the wait until the others have arrived; the CPU has nothing to do.
LaunchError LaunchMeeting(Stream stream, const WindowMember& member, uint64_t epoch, int64_t most_seconds);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_WINDOW_H_

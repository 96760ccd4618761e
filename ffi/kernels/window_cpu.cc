// Windows on the CPU: the shards of one process share its memory, and meet on the host.
#include <cstdlib>
#include <cstring>

#include "parallel_cpu.h"
#include "window.h"

namespace jaxsok {

namespace {

constexpr int64_t kBytesPerTask = 1 << 18;
constexpr int64_t kPageBytes = 4096;

}  // namespace

LaunchError LaunchWindowPush(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                             int64_t stride_bytes) {
  const LineTarget target = exchange.Target(1, part_bytes);
  for (int32_t s = 0; s < exchange.num_shards(); ++s) {
    RunRanges(stream, part_bytes, kBytesPerTask, [&](int64_t begin, int64_t end) {
      std::memcpy(target.At(s, part_bytes) + begin, static_cast<const char*>(lines) + s * stride_bytes + begin,
                  static_cast<size_t>(end - begin));
    });
  }
  return nullptr;
}

LaunchError LaunchWindowExchange(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                                 void* received) {
  const int64_t num_bytes = exchange.num_shards() * part_bytes;
  if (LaunchError error = LaunchWindowPush(stream, exchange, lines, part_bytes, part_bytes)) return error;
  if (LaunchError error = exchange.Meet(stream)) return error;
  RunRanges(stream, num_bytes, kBytesPerTask, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(received) + begin, static_cast<const char*>(exchange.received()) + begin,
                static_cast<size_t>(end - begin));
  });
  return nullptr;
}

char* TakeWindow(int32_t, int64_t num_bytes) {
  void* window = std::aligned_alloc(kPageBytes, CeilDiv(num_bytes, kPageBytes) * kPageBytes);
  if (window != nullptr) std::memset(window, 0, kWindowHeadBytes);
  return static_cast<char*>(window);
}

void ReturnWindow(int32_t, char* window) { std::free(window); }

LaunchError ExportWindow(int32_t, char*, WindowHandle*) { return "processes share no windows on the CPU"; }

LaunchError ImportWindow(int32_t, const WindowHandle&, char**) { return "processes share no windows on the CPU"; }

void ReleaseImported(int32_t, char*) {}

LaunchError PrepareDevice(int32_t, const int32_t*, int32_t, SideStream**) { return nullptr; }

LaunchError Fork(SideStream*, Stream stream, Stream* second) {
  *second = stream;
  return nullptr;
}

LaunchError Join(SideStream*, Stream) { return nullptr; }

WindowFailure* TakeFailure(int32_t) { return new WindowFailure{}; }

const bool kWaitsOnHost = true;

bool IsRecording(Stream) { return false; }

LaunchError LaunchBarrier(Stream, const WindowMember&, uint32_t, int64_t) { return nullptr; }

LaunchError LaunchSum(Stream, const WindowMember&, uint32_t, int64_t, const int32_t*, int64_t, int32_t*) {
  return nullptr;
}

}  // namespace jaxsok

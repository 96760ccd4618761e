// Windows on the CPU: the shards of one process share its memory, and meet on the host.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "parallel_cpu.h"
#include "window.h"

namespace jaxsok {

namespace {

constexpr int64_t kBytesPerTask = 1 << 18;
constexpr int64_t kPageBytes = 4096;

}  // namespace

LaunchError LaunchWindowExchange(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                                 void* received) {
  const LineTarget target = exchange.Target(1, part_bytes);
  for (int32_t s = 0; s < exchange.num_shards(); ++s) {
    RunRanges(stream, part_bytes, kBytesPerTask, [&](int64_t begin, int64_t end) {
      std::memcpy(target.At(s, part_bytes) + begin, static_cast<const char*>(lines) + s * part_bytes + begin,
                  static_cast<size_t>(end - begin));
    });
  }
  if (LaunchError error = exchange.Meet(stream)) return error;
  RunRanges(stream, exchange.num_shards() * part_bytes, kBytesPerTask, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(received) + begin, static_cast<const char*>(exchange.received()) + begin,
                static_cast<size_t>(end - begin));
  });
  return nullptr;
}

LaunchError LaunchWindowLines(Stream stream, WindowExchange& exchange, const LinesToSend& send,
                              const LinesReceived& received) {
  const int64_t line_bytes = send.line_bytes, lines_per_task = kBytesPerTask / line_bytes;
  const int32_t num_shards = exchange.num_shards(), own = exchange.shard();
  const int64_t part_bytes = send.PartBytes(num_shards), num_words = send.NumWords(num_shards);
  const LineTarget target = exchange.Target(1, part_bytes);
  for (int32_t s = 0; s < num_shards; ++s) {
    const int64_t begin = send.starts[s], count = std::min<int64_t>(send.starts[s + 1] - begin, send.send_capacity);
    std::memcpy(target.At(s, part_bytes), static_cast<const char*>(send.lines) + begin * line_bytes,
                static_cast<size_t>(count * line_bytes));
    auto* words = reinterpret_cast<uint32_t*>(target.At(s, part_bytes) + send.LineBytes());
    for (int64_t at = 0; at < num_words; ++at) words[at] = send.Word(num_shards, s, at);
  }
  if (LaunchError error = exchange.Meet(stream)) return error;

  const char* window = static_cast<const char*>(exchange.received());
  std::vector<int64_t> totals(num_shards, 0);
  int64_t most = 0;
  uint32_t low = 0, high = 0;
  for (int32_t s = 0; s < num_shards; ++s) {
    const auto* words = reinterpret_cast<const uint32_t*>(window + s * part_bytes + send.LineBytes());
    for (int32_t o = 0; o < num_shards; ++o) {
      totals[o] += words[2 + o];
      most = std::max<int64_t>(most, words[2 + o]);
    }
    const uint64_t digest = DigestOfShard(words, s);
    low += static_cast<uint32_t>(digest);
    high += static_cast<uint32_t>(digest >> 32);
    std::copy_n(words + 2 + num_shards, send.num_offsets, received.offsets + s * send.num_offsets);
    const int64_t count = std::min<int64_t>(words[2 + own], send.send_capacity);
    auto* lines = static_cast<char*>(received.lines) + s * send.send_capacity * line_bytes;
    RunRanges(stream, send.send_capacity, lines_per_task, [&](int64_t begin, int64_t end) {
      const int64_t last = std::clamp(count, begin, end);
      std::memcpy(lines + begin * line_bytes, window + s * part_bytes + begin * line_bytes,
                  static_cast<size_t>((last - begin) * line_bytes));
      for (int64_t i = last; i < end; ++i) {
        const Request padding = {kPaddingKey, 0, 0};
        std::memcpy(lines + i * line_bytes, &padding, static_cast<size_t>(line_bytes));
      }
    });
  }
  received.load[0] = static_cast<int32_t>(most);
  received.load[1] = static_cast<int32_t>(*std::max_element(totals.begin(), totals.end()));
  received.digest[0] = low;
  received.digest[1] = high;
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

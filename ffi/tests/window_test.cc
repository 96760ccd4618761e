// Tests of windows: threads, one for each shard, exchange through the windows of the CPU. Sent data arrive at their
// places whatever the delays; windows are added meanwhile; a failure on one shard fails all of its group, and no shard
// hangs.
#include "../kernels/window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing.h"

extern "C" {
const char* JaxsokWindowOpen(int32_t window, int32_t num_groups, int32_t num_shards, const int32_t* ordinals,
                             int64_t most_seconds);
const char* JaxsokWindowReserve(int32_t window, int64_t num_bytes);
int64_t JaxsokWindowBytes(int32_t window);
}

namespace jaxsok {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int64_t kLong = 100;  // seconds that no test reaches

/// Opens windows of devices 0, 1, .. that receive `num_bytes`; returns their number.
int32_t Open(int num_groups, int num_shards, int64_t num_bytes, int64_t most_seconds = kLong) {
  static int32_t num_windows = 0;
  const int32_t window = num_windows++;
  std::vector<int32_t> ordinals(static_cast<size_t>(num_groups) * num_shards);
  for (size_t i = 0; i < ordinals.size(); ++i) ordinals[i] = static_cast<int32_t>(i);
  JAXSOK_CHECK(JaxsokWindowOpen(window, num_groups, num_shards, ordinals.data(), most_seconds) == nullptr);
  JAXSOK_CHECK(JaxsokWindowReserve(window, num_bytes) == nullptr);
  return window;
}

/// Calls all devices at once, each in a separate thread.
template <typename Call>
void OnDevices(int num_devices, const Call& call) {
  std::vector<std::thread> threads;
  for (int device = 0; device < num_devices; ++device) threads.emplace_back([&call, device] { call(device); });
  for (std::thread& thread : threads) thread.join();
}

uint8_t ByteOf(int from, int to, int number, int64_t i) {
  return static_cast<uint8_t>(from * 71 + to * 29 + number * 13 + i * 7 + i / 251);
}

LaunchError Exchange(Executor& executor, int32_t window, int device, const std::vector<uint8_t>& lines,
                     std::vector<uint8_t>& received, int num_shards) {
  const auto num_bytes = static_cast<int64_t>(lines.size());
  WindowExchange exchange(&executor, window, device, kCallExchange, num_bytes);
  if (exchange.error() != nullptr) return exchange.error();
  return exchange.Done(
      LaunchWindowExchange(&executor, exchange, lines.data(), num_bytes / num_shards, received.data()));
}

LaunchError Exchange(int32_t window, int device, int num_shards, int64_t part_bytes) {
  ThreadExecutor executor(1);
  std::vector<uint8_t> lines(num_shards * part_bytes), received(lines.size());
  return Exchange(executor, window, device, lines, received, num_shards);
}

/// Begins an exchange and does not meet, as a handler whose kernel was not launched.
void Abandon(int32_t window, int device, int64_t num_bytes) {
  ThreadExecutor executor(1);
  const WindowExchange exchange(&executor, window, device, kCallExchange, num_bytes);
}

/// The sizes of parts, which all shards of a group must know: the first shard to arrive draws them.
class Sizes {
 public:
  Sizes(uint64_t seed, const std::atomic<int64_t>& most_bytes) : random_(seed), most_bytes_(most_bytes) {}
  int64_t At(size_t number, int num_shards) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (sizes_.size() <= number) {
      const auto most = static_cast<uint32_t>(most_bytes_.load() / num_shards);
      sizes_.push_back(random_.Below(8) == 0 ? most : random_.Below(most + 1));
    }
    return sizes_[number];
  }

 private:
  std::mutex mutex_;
  Random random_;
  const std::atomic<int64_t>& most_bytes_;
  std::vector<int64_t> sizes_;
};

/// Hundreds of exchanges of random sizes arrive, with random delays; `num_growths` times the windows grow meanwhile.
void TestExchanges(uint64_t seed, int num_groups, int num_shards, int num_growths) {
  constexpr int kNumExchanges = 300;
  const int num_devices = num_groups * num_shards;
  std::atomic<int64_t> most_bytes{1000 * num_shards};
  std::atomic<int> num_running{num_devices};
  const int32_t window = Open(num_groups, num_shards, most_bytes);
  std::vector<std::unique_ptr<Sizes>> sizes;
  for (int g = 0; g < num_groups; ++g) sizes.push_back(std::make_unique<Sizes>(seed * 10 + g, most_bytes));
  std::thread growing([&] {
    for (int i = 0; i < num_growths && num_running > 0; ++i) {
      const int64_t more = most_bytes + 100 * num_shards + i;
      JAXSOK_CHECK_SEED(JaxsokWindowReserve(window, more) == nullptr, seed);
      most_bytes = more;
      std::this_thread::sleep_for(microseconds(300));
    }
  });
  std::vector<int> num_wrong(num_devices, 0);
  OnDevices(num_devices, [&](int device) {
    const int group = device / num_shards, shard = device % num_shards;
    Random random(seed * 1000 + device);
    ThreadExecutor executor(1 + device % 2);
    for (int number = 0; number < kNumExchanges; ++number) {
      const int64_t part_bytes = sizes[group]->At(number, num_shards);
      std::vector<uint8_t> lines(num_shards * part_bytes), received(lines.size(), 0xa5), wanted(lines.size());
      for (int peer = 0; peer < num_shards; ++peer) {
        for (int64_t i = 0; i < part_bytes; ++i) {
          lines[peer * part_bytes + i] = ByteOf(device, peer, number, i);
          wanted[peer * part_bytes + i] = ByteOf(group * num_shards + peer, shard, number, i);
        }
      }
      if (random.Below(4) == 0) std::this_thread::sleep_for(microseconds(random.Below(300)));
      if (random.Below(100) == 0) std::this_thread::sleep_for(milliseconds(3));
      const LaunchError error = Exchange(executor, window, device, lines, received, num_shards);
      num_wrong[device] += error != nullptr || received != wanted;
      if (number % 3 != 0) continue;
      // Sums in one pass or several, whose barriers change the parity of those that follow.
      std::vector<int32_t> words(number % 2 == 0 ? 7 : 2 * kSumWords + 5), sums(words.size());
      for (size_t i = 0; i < words.size(); ++i) words[i] = device * 1000 + number + static_cast<int32_t>(i);
      const auto num_words = static_cast<int64_t>(words.size());
      num_wrong[device] += LaunchWindowSum(&executor, window, device, words.data(), num_words, sums.data()) != nullptr;
      for (size_t i = 0; i < words.size(); ++i) {
        int32_t sum = 0;
        for (int s = 0; s < num_shards; ++s) sum += (group * num_shards + s) * 1000 + number + static_cast<int32_t>(i);
        num_wrong[device] += sums[i] != sum;
      }
    }
    --num_running;
  });
  growing.join();
  for (const int wrong : num_wrong) JAXSOK_CHECK_SEED(wrong == 0, seed);
  JAXSOK_CHECK_SEED(JaxsokWindowBytes(window) >= kWindowHeadBytes + most_bytes, seed);
}

/// The error that all devices of a group get, the same for each, and the seconds until the last one gets it.
struct Outcome {
  std::vector<std::string> errors;
  double seconds = 0;
  bool AllSay(const std::string& text) const {
    return std::all_of(errors.begin(), errors.end(), [&](const std::string& error) {
      return error.find(text) != std::string::npos && error == errors[0];
    });
  }
};

template <typename Call>
Outcome RunAll(int num_devices, const Call& call) {
  Outcome outcome;
  outcome.errors.resize(num_devices);
  const Clock::time_point begin = Clock::now();
  OnDevices(num_devices, [&](int device) {
    const LaunchError error = call(device);
    outcome.errors[device] = error == nullptr ? "no error" : error;
  });
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return outcome;
}

/// Every later exchange is refused at once with the same message, and so is growth.
void CheckOver(int32_t window, int num_shards, const Outcome& first) {
  for (int time = 0; time < 2; ++time) {
    const Outcome again = RunAll(num_shards, [&](int device) { return Exchange(window, device, num_shards, 8); });
    JAXSOK_CHECK(again.AllSay(first.errors[0]) && again.seconds < 2);
  }
  const LaunchError error = JaxsokWindowReserve(window, 1 << 22);
  JAXSOK_CHECK(error != nullptr && first.errors[0] == error);
}

void TestPartsThatAreTooLarge() {
  for (const bool is_one_shard : {false, true}) {
    const int32_t window = Open(1, 4, 1000);
    JAXSOK_CHECK(RunAll(4, [&](int device) { return Exchange(window, device, 4, 250); }).AllSay("no error"));
    const Outcome outcome =
        RunAll(4, [&](int device) { return Exchange(window, device, 4, is_one_shard && device != 1 ? 250 : 5000); });
    JAXSOK_CHECK(outcome.AllSay("the window is smaller than what a shard receives") && outcome.seconds < 2);
    CheckOver(window, 4, outcome);
  }
}

void TestShardsThatDoNotCome() {
  for (const bool is_one : {true, false}) {
    const int32_t window = Open(1, 4, 1000, 1);
    JAXSOK_CHECK(RunAll(4, [&](int device) { return Exchange(window, device, 4, 8); }).AllSay("no error"));
    const std::vector<int> present = is_one ? std::vector<int>{0, 1, 3} : std::vector<int>{0, 2};
    const Outcome outcome = RunAll(static_cast<int>(present.size()),
                                   [&](int i) { return Exchange(window, present[static_cast<size_t>(i)], 4, 8); });
    JAXSOK_CHECK(outcome.AllSay(is_one ? "waited 1 s at barrier 3 for shards 2; " : "at barrier 3 for shards 1, 3; "));
    JAXSOK_CHECK(outcome.AllSay("the state is lost: restart from a checkpoint"));
    JAXSOK_CHECK(outcome.seconds > 0.9 && outcome.seconds < 3);
    CheckOver(window, 4, outcome);
  }
}

void TestShardThatFailsBetweenParts() {
  const int32_t window = Open(1, 4, 1000);
  const Outcome outcome = RunAll(4, [&](int device) -> LaunchError {
    if (device != 2) return Exchange(window, device, 4, 8);
    std::this_thread::sleep_for(milliseconds(50));
    Abandon(window, device, 32);
    return Exchange(window, device, 4, 8);
  });
  JAXSOK_CHECK(outcome.AllSay("a shard failed between the parts of an exchange") && outcome.seconds < 2);
  CheckOver(window, 4, outcome);
}

/// A failure ends one group; the other continues with its windows.
void TestGroupsFailApart() {
  const int32_t window = Open(2, 2, 1000);
  OnDevices(2, [&](int device) { Abandon(window, device, 8); });
  for (int number = 0; number < 100; ++number) {
    JAXSOK_CHECK(RunAll(2, [&](int shard) { return Exchange(window, 2 + shard, 2, 500); }).AllSay("no error"));
  }
  JAXSOK_CHECK(RunAll(2, [&](int shard) { return Exchange(window, shard, 2, 8); }).AllSay("between the parts"));
}

/// Windows may be added while a shard has begun an exchange and another has not.
void TestGrowthBetweenTheShardsOfAnExchange() {
  const int32_t window = Open(1, 2, 1000);
  for (int number = 0; number < 50; ++number) {
    std::thread growing;
    const Outcome outcome = RunAll(2, [&](int device) {
      if (device == 1) {
        std::this_thread::sleep_for(milliseconds(2));  // the other shard has begun
        growing = std::thread([&] { JAXSOK_CHECK(JaxsokWindowReserve(window, 5000 + 3000 * number) == nullptr); });
        std::this_thread::sleep_for(milliseconds(2));  // the first shard waits for this one
      }
      return Exchange(window, device, 2, 500);
    });
    growing.join();
    JAXSOK_CHECK(outcome.AllSay("no error") && outcome.seconds < 2);
  }
}

void TestWhatIsNotOpen() {
  const int32_t ordinals[2] = {0, 1};
  const int32_t window = Open(1, 2, 100);
  const int64_t num_bytes = JaxsokWindowBytes(window);
  JAXSOK_CHECK(num_bytes >= kWindowHeadBytes + 100 && num_bytes <= kWindowHeadBytes + 4096);
  JAXSOK_CHECK(JaxsokWindowReserve(window, 10) == nullptr && JaxsokWindowBytes(window) == num_bytes);
  JAXSOK_CHECK(JaxsokWindowOpen(window, 1, 2, ordinals, kLong) == nullptr && JaxsokWindowBytes(window) == num_bytes);
  JAXSOK_CHECK(JaxsokWindowOpen(1 << 20, 1, kMostWindowShards + 1, ordinals, kLong) != nullptr);
  JAXSOK_CHECK(JaxsokWindowReserve(1 << 20, 10) != nullptr && JaxsokWindowBytes(1 << 20) == 0);
  for (const auto& [number, device] : {std::pair<int32_t, int>{1 << 20, 0}, {window, 2}}) {
    const LaunchError error = Exchange(number, device, 2, 8);
    JAXSOK_CHECK(error != nullptr && std::string(error).find("this device has no window") == 0);
  }
}

/// Lines and words of each shard for each other arrive, cut to the capacity; lines of earlier exchanges do not.
void TestLines(uint64_t seed, int num_shards) {
  constexpr int64_t kMostLines = 60, kMostOffsets = 9;
  using Words = std::vector<uint32_t>;
  Random draw(seed);
  const LinesToSend largest = {nullptr, 16, 0, nullptr, nullptr, nullptr, kMostOffsets, kMostLines};
  const int32_t window = Open(1, num_shards, num_shards * largest.PartBytes(num_shards));
  for (int number = 0; number < 30; ++number) {
    const int64_t send_capacity = 1 + draw.Below(kMostLines), num_offsets = draw.Below(kMostOffsets + 1);
    const int64_t num_words = draw.Below(2) == 0 ? 2 : 4;  // of a line
    std::vector<Words> lines(num_shards), digests(num_shards);
    std::vector<std::vector<int32_t>> starts(num_shards), offsets(num_shards);
    int64_t most = 0;
    std::vector<int64_t> totals(num_shards, 0);
    for (int from = 0; from < num_shards; ++from) {
      starts[from].assign(1, 0);
      for (int to = 0; to < num_shards; ++to) {
        const auto count = static_cast<int32_t>(draw.Below(3) == 0 ? 0 : draw.Below(2 * send_capacity));
        starts[from].push_back(starts[from].back() + count);
        most = std::max<int64_t>(most, count);
        totals[to] += count;
      }
      lines[from].resize(num_words *
                         (starts[from].back() + draw.Below(5)));  // beyond the last start: padding, not sent
      for (uint32_t& word : lines[from]) word = static_cast<uint32_t>(draw.Next());
      digests[from] = {static_cast<uint32_t>(draw.Next()), static_cast<uint32_t>(draw.Next())};
      offsets[from].resize(num_shards * num_offsets);
      for (int32_t& offset : offsets[from]) offset = static_cast<int32_t>(draw.Below(1000));
    }
    std::vector<Words> received(num_shards), digest_of_all(num_shards, Words(2, 0));
    std::vector<std::vector<int32_t>> offsets_received(num_shards), loads(num_shards, std::vector<int32_t>(2, -1));
    OnDevices(num_shards, [&](int device) {
      ThreadExecutor executor(1 + device % 2);
      received[device].assign(num_words * num_shards * send_capacity, 7);
      offsets_received[device].assign(num_shards * num_offsets, -1);
      const LinesToSend send = {
          lines[device].data(),  num_words * 4,          static_cast<int64_t>(lines[device].size()) / num_words,
          starts[device].data(), digests[device].data(), offsets[device].data(),
          num_offsets,           send_capacity};
      WindowExchange exchange(&executor, window, device, kCallLines, num_shards * send.PartBytes(num_shards));
      JAXSOK_CHECK_SEED(exchange.error() == nullptr, seed);
      const LinesReceived out = {received[device].data(), offsets_received[device].data(), loads[device].data(),
                                 digest_of_all[device].data()};
      JAXSOK_CHECK_SEED(exchange.Done(LaunchWindowLines(&executor, exchange, send, out)) == nullptr, seed);
    });
    for (int to = 0; to < num_shards; ++to) {
      Words wanted;
      std::vector<int32_t> wanted_offsets;
      for (int from = 0; from < num_shards; ++from) {
        const int64_t begin = starts[from][to], count = starts[from][to + 1] - begin;
        for (int64_t place = 0; place < send_capacity; ++place) {
          const Words padding = {~0u, ~0u, 0, 0};
          const uint32_t* line = place < count ? &lines[from][num_words * (begin + place)] : padding.data();
          wanted.insert(wanted.end(), line, line + num_words);
        }
        const auto first = offsets[from].begin() + to * num_offsets;
        wanted_offsets.insert(wanted_offsets.end(), first, first + num_offsets);
      }
      JAXSOK_CHECK_SEED(received[to] == wanted && offsets_received[to] == wanted_offsets, seed);
      JAXSOK_CHECK_SEED(loads[to][0] == most, seed);
      JAXSOK_CHECK_SEED(loads[to][1] == *std::max_element(totals.begin(), totals.end()), seed);
      JAXSOK_CHECK_SEED(digest_of_all[to] == digest_of_all[0], seed);
    }
  }
}

/// Part p of a shard's rows is in the window of shard p, at the place of this shard.
void TestTargets() {
  constexpr int kNumShards = 3;
  constexpr int64_t kLines = 5, kLineBytes = 6;
  const int32_t window = Open(1, kNumShards, kNumShards * kLines * kLineBytes);
  for (int number = 0; number < 4; ++number) {
    std::vector<LineTarget> targets(kNumShards);
    std::vector<char*> received(kNumShards);
    OnDevices(kNumShards, [&](int device) {
      ThreadExecutor executor(1);
      WindowExchange exchange(&executor, window, device, kCallExchange, kNumShards * kLines * kLineBytes);
      targets[device] = exchange.Target(kLines, kLineBytes);
      received[device] = static_cast<char*>(exchange.received());
      JAXSOK_CHECK(exchange.shard() == device && exchange.num_shards() == kNumShards);
      JAXSOK_CHECK(exchange.Done(exchange.Meet(&executor)) == nullptr);
    });
    for (int from = 0; from < kNumShards; ++from) {
      JAXSOK_CHECK(targets[from].IsWindow() && targets[from].first_line == from * kLines);
      for (int64_t line = 0; line < kNumShards * kLines; ++line) {
        const int64_t to = line / kLines, place = from * kLines + line % kLines;
        JAXSOK_CHECK(targets[from].At(line, kLineBytes) == received[to] + place * kLineBytes);
      }
    }
  }
}

}  // namespace
}  // namespace jaxsok

int main(int argc, char** argv) {
  const uint64_t num_seeds = argc > 1 ? static_cast<uint64_t>(std::atoll(argv[1])) : 3;
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    jaxsok::TestExchanges(seed, 1, 4, 0);
    jaxsok::TestExchanges(seed, 1, 8, 0);
    jaxsok::TestExchanges(seed, 2, 4, 0);
    jaxsok::TestExchanges(seed, 1, 4, 200);
    jaxsok::TestExchanges(seed, 2, 3, 200);
    jaxsok::TestLines(seed, 2);
    jaxsok::TestLines(seed, 5);
  }
  jaxsok::TestTargets();
  jaxsok::TestPartsThatAreTooLarge();
  jaxsok::TestShardsThatDoNotCome();
  jaxsok::TestShardThatFailsBetweenParts();
  jaxsok::TestGroupsFailApart();
  jaxsok::TestGrowthBetweenTheShardsOfAnExchange();
  jaxsok::TestWhatIsNotOpen();
  return jaxsok::Finish("window_test");
}

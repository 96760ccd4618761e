// Measures lookups in frozen tables: how many a second, and how long each takes, from many threads at one time.
//
//   g++ -std=c++17 -O2 -pthread load_frozen.cc $(python -m jaxsok flags) -o load_frozen
//   ./load_frozen FOLDER [THREADS=16] [SECONDS=5] [RATE=0]
//
// A lookup has 26 keys, one of each of 26 features, which read the tables in turn. Keys are uniform from 0 to the
// number of rows of their table: with keys 0 to n - 1 in the tables every one is found. RATE 0: each thread begins a
// lookup when it has ended the one before. Otherwise all threads together begin RATE lookups a second, at times that do
// not depend on how long lookups take, and a lookup's time counts from when it was due.
#include <jaxsok.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kFeatures = 26;
constexpr size_t kMostTimes = size_t{1} << 27;  // of all threads: 512 MB

struct Load {
  const jaxsok_tables* tables;
  int threads;
  double seconds;
  double rate;
  std::atomic<bool> begins{false};
  std::atomic<bool> failed{false};
};

/// What one thread does; `nanoseconds` gets the time of each lookup.
void Work(Load& load, int thread, std::vector<uint32_t>& nanoseconds) {
  std::mt19937_64 random(static_cast<uint64_t>(thread));
  std::vector<jaxsok_feature> features(kFeatures);
  std::vector<std::vector<float>> outs(kFeatures);
  // Keys are drawn before they are timed; so many lookups have other rows than those that a cache still holds.
  constexpr size_t kDrawn = 1 << 15;
  std::vector<uint64_t> keys(kDrawn * kFeatures);
  for (int f = 0; f < kFeatures; ++f) {
    const int32_t table = f % jaxsok_num_tables(load.tables);
    const auto num_rows = static_cast<uint64_t>(std::max<int64_t>(jaxsok_table_num_rows(load.tables, table), 1));
    outs[f].resize(static_cast<size_t>(jaxsok_table_dim(load.tables, table)));
    features[f] = {table, JAXSOK_ROWS, f, 1, 1, -1, -1, outs[f].data()};
    for (size_t i = 0; i < kDrawn; ++i) keys[i * kFeatures + f] = random() % num_rows;
  }
  jaxsok_batch batch{};
  batch.num_keys = batch.num_features = kFeatures;
  batch.features = features.data();

  nanoseconds.reserve(kMostTimes / load.threads);
  while (!load.begins) std::this_thread::yield();
  const auto begin = Clock::now();
  const std::chrono::duration<double> between(load.rate > 0 ? load.threads / load.rate : 0);
  for (size_t i = 0; nanoseconds.size() < nanoseconds.capacity(); ++i) {
    auto due = Clock::now();
    if (load.rate > 0) {
      const double turn = static_cast<double>(i) + static_cast<double>(thread) / load.threads;
      due = begin + std::chrono::duration_cast<Clock::duration>(between * turn);
      std::this_thread::sleep_until(due);
    }
    if (due - begin > std::chrono::duration<double>(load.seconds)) break;
    batch.keys = keys.data() + i % kDrawn * kFeatures;
    if (jaxsok_lookup(load.tables, &batch, nullptr) != JAXSOK_OK) {
      std::fprintf(stderr, "%s\n", jaxsok_error());
      load.failed = true;
      return;
    }
    const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - due).count();
    nanoseconds.push_back(static_cast<uint32_t>(std::min<int64_t>(took, UINT32_MAX)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: load_frozen FOLDER [THREADS] [SECONDS] [RATE]\n");
    return 1;
  }
  Load load;
  load.threads = argc > 2 ? std::atoi(argv[2]) : 16;
  load.seconds = argc > 3 ? std::atof(argv[3]) : 5.0;
  load.rate = argc > 4 ? std::atof(argv[4]) : 0.0;
  jaxsok_tables* tables = nullptr;
  if (load.threads < 1 || jaxsok_open(argv[1], 0, JAXSOK_IN_MEMORY, &tables) != JAXSOK_OK) {
    std::fprintf(stderr, "%s\n", load.threads < 1 ? "load_frozen: THREADS: wanted at least 1" : jaxsok_error());
    return 1;
  }
  load.tables = tables;
  std::vector<std::vector<uint32_t>> times(static_cast<size_t>(load.threads));
  std::vector<std::thread> threads;
  for (int t = 0; t < load.threads; ++t) threads.emplace_back([&, t] { Work(load, t, times[static_cast<size_t>(t)]); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the threads draw their keys
  load.begins = true;
  const auto begin = Clock::now();
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  jaxsok_close(tables);
  std::vector<uint32_t> all;
  for (const auto& part : times) all.insert(all.end(), part.begin(), part.end());
  if (load.failed || all.empty()) return 1;
  std::sort(all.begin(), all.end());
  const auto quantile = [&](double share) {
    return all[std::min(all.size() - 1, static_cast<size_t>(share * static_cast<double>(all.size())))] / 1000.0;
  };
  std::printf(
      "{\"threads\": %d, \"keys\": %d, \"lookups\": %zu, \"lookups_per_s\": %.0f, \"p50_us\": %.1f, "
      "\"p99_us\": %.1f, \"p999_us\": %.1f}\n",
      load.threads, kFeatures, all.size(), static_cast<double>(all.size()) / seconds, quantile(0.5), quantile(0.99),
      quantile(0.999));
  return 0;
}

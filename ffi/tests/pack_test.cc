// Packs with threads that many callers share: every place is written once, before the call that ends it returns, and
// any thread that meets bad data reports it. Python tests the meaning; this test also serves the sanitizers.
#include "../kernels/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "testing.h"

namespace jaxsok {
namespace {

constexpr int64_t kParts = 3;

int64_t PackOneItem(const PackKeys& item) {
  void* begun = nullptr;
  JaxsokBeginKeys(&item, 1, 4, &begun);
  return JaxsokEndKeys(&begun);
}

/// Begins several jobs and ends them in another order: each writes its own output, whatever becomes of its items.
void PackSeveral() {
  constexpr int kJobs = 5;
  constexpr int64_t kKeys = 300000;
  std::vector<std::vector<int64_t>> keys(kJobs), packed(kJobs);
  std::vector<void*> begun(kJobs);
  for (int j = 0; j < kJobs; ++j) {
    keys[j].assign(kKeys, j);
    packed[j].assign(kKeys, -7);
    PackKeys item = {};
    item.keys = reinterpret_cast<const char*>(keys[j].data());
    item.line_stride = item.key_stride = 8;
    item.type = PackType::kI64;
    item.width = item.num_parts = 1;
    item.num_keys = item.size = kKeys;
    item.packed = reinterpret_cast<char*>(packed[j].data());
    JaxsokBeginKeys(&item, 1, 1 + j, &begun[j]);
  }
  for (int j : {3, 0, 4, 1, 2}) {
    JAXSOK_CHECK(JaxsokEndKeys(&begun[j]) == 0 && begun[j] == nullptr);
    JAXSOK_CHECK(JaxsokEndKeys(&begun[j]) == 0);  // has ended
    JAXSOK_CHECK(packed[j] == keys[j]);
  }
}

/// Packs ragged weighted keys for some parts, checks every place, then spoils a weight, a key and a length.
void PackOften(uint64_t seed) {
  Random random(seed);
  for (int round = 0; round < 6; ++round) {
    const int64_t bags_of_part = 5000 + random.Below(9000), num_bags = bags_of_part * kParts - random.Below(3000);
    std::vector<int32_t> lengths(num_bags);
    std::vector<int64_t> bounds = {0};
    for (int64_t i = 0; i < num_bags; ++i) {
      lengths[i] = static_cast<int32_t>(random.Below(9));
      bounds.push_back(bounds.back() + lengths[i]);
    }
    const int64_t num_used = bounds.back(), num_keys = num_used + random.Below(50);
    std::vector<int64_t> keys(num_keys, -1);
    std::vector<float> weights(num_keys, 1.5f);
    for (int64_t i = 0; i < num_used; ++i) keys[i] = random.Next();
    std::vector<int32_t> offsets(kParts * (bags_of_part + 1), -7);
    std::vector<int64_t> ends(kParts + 1, -7);
    const PackBags bags = {reinterpret_cast<const char*>(lengths.data()),
                           4,
                           PackType::kI32,
                           0,
                           num_bags,
                           num_keys,
                           kParts,
                           bags_of_part,
                           offsets.data(),
                           bags_of_part + 1,
                           ends.data()};
    JAXSOK_CHECK_SEED(JaxsokPackBags(&bags, 1, 4) == 0, seed);
    int64_t size = 1;
    for (int64_t p = 0; p < kParts; ++p) {
      for (int64_t i = 0; i <= bags_of_part; ++i) {
        const int64_t end = bounds[std::min(p * bags_of_part + i, num_bags)];
        JAXSOK_CHECK_SEED(offsets[p * (bags_of_part + 1) + i] == end - bounds[std::min(p * bags_of_part, num_bags)],
                          seed);
      }
      size = std::max(size, ends[p + 1] - ends[p]);
    }
    // Keys, then weights, part by part.
    const int64_t part_bytes = size * 12 + (size % 2) * 4;
    std::vector<char> packed(kParts * part_bytes, 3);
    const PackKeys item = {reinterpret_cast<const char*>(keys.data()),
                           8,
                           8,
                           PackType::kI64,
                           1,
                           num_keys,
                           ends.data(),
                           kParts,
                           part_bytes,
                           size,
                           packed.data(),
                           0,
                           reinterpret_cast<const char*>(weights.data()),
                           4,
                           4,
                           PackType::kF32,
                           packed.data() + size * 8,
                           nullptr,
                           bags_of_part,
                           0};
    JAXSOK_CHECK_SEED(PackOneItem(item) == 0, seed);
    for (int64_t p = 0; p < kParts; ++p) {
      for (int64_t i = 0; i < size; ++i) {
        const bool is_real = i < ends[p + 1] - ends[p];
        uint64_t key;
        float weight;
        std::memcpy(&key, packed.data() + p * part_bytes + i * 8, 8);
        std::memcpy(&weight, packed.data() + p * part_bytes + size * 8 + i * 4, 4);
        JAXSOK_CHECK_SEED(key == (is_real ? static_cast<uint64_t>(keys[ends[p] + i]) : ~uint64_t{0}), seed);
        JAXSOK_CHECK_SEED(weight == (is_real ? 1.5f : 0.0f), seed);
      }
    }
    const int64_t bad = random.Below(static_cast<uint32_t>(num_used));
    weights[bad] = round % 2 ? std::nanf("") : -std::numeric_limits<float>::infinity();
    JAXSOK_CHECK_SEED(PackOneItem(item) == 1, seed);
    weights[bad] = 1.5f;
    keys.back() = 5;
    JAXSOK_CHECK_SEED(PackOneItem(item) == (num_keys > num_used ? 1 : 0), seed);
    lengths[random.Below(static_cast<uint32_t>(num_bags))] = -1;
    JAXSOK_CHECK_SEED(JaxsokPackBags(&bags, 1, 4) == 1, seed);
  }
}

}  // namespace
}  // namespace jaxsok

int main() {
  std::vector<std::thread> callers;
  for (uint64_t seed = 1; seed <= 5; ++seed) callers.emplace_back(jaxsok::PackOften, seed);
  jaxsok::PackSeveral();
  for (std::thread& caller : callers) caller.join();
  return jaxsok::Finish("pack_test");
}

// Looks keys up in frozen tables, without Python.
//
//   python -m jaxsok freeze EXPORT tables
//   g++ -std=c++17 lookup_frozen.cc $(python -m jaxsok flags) -o lookup_frozen
//   ./lookup_frozen tables item 7 9 -1          prints the rows of three keys of the table "item"
#include <jaxsok.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

struct Close {
  void operator()(jaxsok_tables* tables) const { jaxsok_close(tables); }
};

int Fail() {
  std::fprintf(stderr, "%s\n", jaxsok_error());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: lookup_frozen FOLDER TABLE KEY...\n");
    return 1;
  }
  jaxsok_tables* opened = nullptr;
  if (jaxsok_open(argv[1], /*device=*/0, /*flags=*/0, &opened) != JAXSOK_OK) return Fail();
  const std::unique_ptr<jaxsok_tables, Close> tables(opened);
  for (int32_t t = 0; t < jaxsok_num_tables(opened); ++t) {
    std::printf("# %s: %lld rows of %d\n", jaxsok_table_name(opened, t),
                static_cast<long long>(jaxsok_table_num_rows(opened, t)), jaxsok_table_dim(opened, t));
  }

  const int32_t table = jaxsok_find_table(opened, argv[2]);
  if (table < 0) {
    std::fprintf(stderr, "lookup_frozen: got no table \"%s\" in %s\n", argv[2], argv[1]);
    return 1;
  }
  std::vector<uint64_t> keys;
  for (int i = 3; i < argc; ++i) {
    char* end = nullptr;
    errno = 0;
    keys.push_back(std::strtoull(argv[i], &end, 10));  // -1 is 2^64 - 1
    if (end == argv[i] || *end != '\0' || errno != 0) {
      std::fprintf(stderr, "lookup_frozen: got the key \"%s\", wanted an integer of 64 bits\n", argv[i]);
      return 1;
    }
  }
  const auto num_keys = static_cast<int64_t>(keys.size());
  const int32_t dim = jaxsok_table_dim(opened, table);
  std::vector<float> rows(keys.size() * static_cast<size_t>(dim));

  // One feature without bags: every key reads its row.
  jaxsok_feature feature{};
  feature.table = table;
  feature.combiner = JAXSOK_ROWS;
  feature.num_keys = feature.num_bags = num_keys;
  feature.first_offset = feature.first_weight = -1;
  feature.out = rows.data();
  jaxsok_batch batch{};
  batch.keys = keys.data();
  batch.num_keys = num_keys;
  batch.features = &feature;
  batch.num_features = 1;
  if (jaxsok_lookup(opened, &batch, /*stream=*/nullptr) != JAXSOK_OK) return Fail();

  for (size_t i = 0; i < keys.size(); ++i) {
    std::printf("%llu", static_cast<unsigned long long>(keys[i]));
    for (int32_t c = 0; c < dim; ++c) std::printf(" %.9g", static_cast<double>(rows[i * static_cast<size_t>(dim) + c]));
    std::printf("\n");
  }
  return 0;
}

// Reads, checks and maps a folder of frozen tables, as jaxsok/serving/frozen_files.py writes it.
//
//   frozen.json       the manifest: stores, tables, sizes and checksums; its first line has a checksum of the rest
//   store_<s>.index   Bucket[num_buckets]
//   store_<s>.rows    numbers[capacity][dim]; those beyond `num_device_rows` stay in host memory
//   store_<s>.scales  float[capacity], only if rows have 8 bits
//
// Lookups stay inside the index, rows and scales whatever their bytes are: walks are bounded, and row ids are compared
// with the capacity. So sizes decide whether a folder is safe, and checksums whether it is correct.
#ifndef JAXSOK_C_INTERFACE_FROZEN_FOLDER_H_
#define JAXSOK_C_INTERFACE_FROZEN_FOLDER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../core/layout.h"

namespace jaxsok {

/// Memory with the content of a file, valid until it is destroyed. Empty if there is no file.
class FileMemory {
 public:
  FileMemory() = default;
  FileMemory(void* data, size_t size) : data_(data), size_(size) {}
  FileMemory(FileMemory&& other) noexcept { *this = std::move(other); }
  FileMemory& operator=(FileMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~FileMemory();

  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

struct FrozenTableEntry {
  std::string name;
  int64_t num_rows;
};

/// The files and tables of one store.
struct FrozenStoreFiles {
  int32_t dim;
  RowDtype dtype;
  uint32_t capacity;
  uint32_t num_device_rows;
  uint32_t num_buckets;
  uint32_t counters[kNumCounters];  // the salt; all other counters are 0
  std::vector<FrozenTableEntry> tables;
  std::vector<uint32_t> words;  // [num_tables, kNumTableWords]
  FileMemory index, rows, scales;
};

struct FrozenFolder {
  uint32_t seed[2];
  std::vector<FrozenStoreFiles> stores;
};

/// Reads a folder; throws Error. `flags` are those of jaxsok_open.
FrozenFolder ReadFrozenFolder(const std::string& path, uint32_t flags);

}  // namespace jaxsok

#endif  // JAXSOK_C_INTERFACE_FROZEN_FOLDER_H_

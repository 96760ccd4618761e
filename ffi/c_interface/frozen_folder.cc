#include "frozen_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "error.h"
#include "json.h"

namespace jaxsok {
namespace {

constexpr char kManifest[] = "frozen.json", kFormat[] = "jaxsok-frozen";
constexpr uint64_t kVersion = 1;
constexpr uint64_t kMostManifestBytes = 8 << 20;  // a table takes about 200 bytes, and up to 50 times as many in memory
constexpr char kRemedy[] = "; the folder is damaged: write it again with `python -m jaxsok freeze`, or use a copy.";

// Checksums ---------------------------------------------------------------------------------------------------

/// Makes the tables of CRC-32 (zlib's polynomial) for eight bytes at a time.
constexpr std::array<std::array<uint32_t, 256>, 8> MakeCrcTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
    tables[0][i] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t i = 0; i < 256; ++i) tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 0xff];
  }
  return tables;
}
constexpr auto kCrc = MakeCrcTables();

uint32_t CrcOf(const void* data, size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t crc = ~uint32_t{0};
  for (; size >= 8; size -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kCrc[7 - k][word >> (8 * k) & 0xff];
  }
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kCrc[0][(crc ^ *at) & 0xff];
  return ~crc;
}

// Files -------------------------------------------------------------------------------------------------------

/// A folder that stays the same one, also where its path is a link that is given another folder meanwhile.
class OpenFolder {
 public:
  explicit OpenFolder(const std::string& path) : path_(path) {
    descriptor_ = open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);  // without one, `OpenFile` refuses it
  }
  OpenFolder(const OpenFolder&) = delete;
  ~OpenFolder() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  std::string PathOf(const std::string& name) const { return path_ + "/" + name; }

  int Open(const std::string& name, int flags) const {
    return descriptor_ < 0 ? open(PathOf(name).c_str(), flags) : openat(descriptor_, name.c_str(), flags);
  }

 private:
  std::string path_;
  int descriptor_;
};

class OpenFile {
 public:
  OpenFile(const OpenFolder& folder, const std::string& name, const char* wanted) : path_(folder.PathOf(name)) {
    // O_NONBLOCK: a pipe in place of a file must not stop the caller.
    descriptor_ = folder.Open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) {
      const int error = errno;
      const bool has_most = error == EMFILE || error == ENFILE;
      Refuse(JAXSOK_NO_FOLDER, "jaxsok_open: file \"", path_, "\": got \"", std::strerror(error), "\", wanted ", wanted,
             has_most ? "; close files, or raise their limit (ulimit -n)."
                      : "; write the folder with `python -m jaxsok freeze`, and let this process read it.");
    }
    struct stat status;
    if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      close(descriptor_);
      Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", path_, "\": got no regular file, wanted ", wanted, kRemedy);
    }
    size_ = static_cast<uint64_t>(status.st_size);
  }
  OpenFile(const OpenFile&) = delete;
  ~OpenFile() { close(descriptor_); }

  uint64_t size() const { return size_; }

  void Read(char* to, size_t size) const {
    for (size_t done = 0; done < size;) {
      const ssize_t got = pread(descriptor_, to + done, size - done, static_cast<off_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        const char* why = got == 0 ? "the end of the file" : std::strerror(errno);
        Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", path_, "\": byte ", done, ": got ", why, ", wanted ", size,
               " bytes", kRemedy);
      }
      done += static_cast<size_t>(got);
    }
  }

  FileMemory Take(uint32_t flags) const {
    const auto size = static_cast<size_t>(size_);
    const bool is_copied = (flags & JAXSOK_IN_MEMORY) != 0;
    const int kind = is_copied ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_PRIVATE;
    void* data = mmap(nullptr, size, PROT_READ | (is_copied ? PROT_WRITE : 0), kind, is_copied ? -1 : descriptor_, 0);
    if (data == MAP_FAILED) {
      Refuse(
          JAXSOK_NO_MEMORY, "jaxsok_open: file \"", path_, "\": got \"", std::strerror(errno), "\", wanted ", size,
          " bytes of memory; free some, or raise the limits of memory (ulimit -v) or of mappings (vm.max_map_count).");
    }
    FileMemory memory(data, size);
    if (is_copied) {
      madvise(data, size, MADV_HUGEPAGE);  // a hint: fewer TLB misses
      Read(static_cast<char*>(data), size);
    }
    return memory;
  }

 private:
  std::string path_;
  int descriptor_;
  uint64_t size_;
};

// The manifest ------------------------------------------------------------------------------------------------

/// Values of a manifest by name. Each is checked before it is used.
class Manifest {
 public:
  Manifest(const std::string& path, const std::string& text) : path_(path) {
    try {
      root_ = JsonReader(text).Read();
    } catch (const JsonError& error) {
      Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", path, "\": byte ", error.byte, ": wanted ", error.wanted,
             kRemedy);
    }
  }

  const Json& root() const { return root_; }

  [[noreturn]] void RefuseField(const std::string& field, const std::string& got, const std::string& wanted) const {
    Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", path_, "\": ", field, ": got ", got, ", wanted ", wanted,
           kRemedy);
  }

  const Json& Get(const Json& object, const std::string& where, const char* name, Json::Kind kind,
                  const char* wanted) const {
    const Json* value = object.Find(name);
    if (value == nullptr || value->kind != kind) {
      RefuseField(where + name, value == nullptr ? "nothing" : "a value of another kind", wanted);
    }
    return *value;
  }
  uint64_t CheckWhole(const Json& value, const std::string& field, uint64_t least, uint64_t most) const {
    const std::string wanted = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
    if (value.kind != Json::kWhole) RefuseField(field, "another value", wanted);
    if (value.whole < least || value.whole > most) RefuseField(field, std::to_string(value.whole), wanted);
    return value.whole;
  }
  uint64_t Whole(const Json& object, const std::string& where, const char* name, uint64_t least, uint64_t most) const {
    return CheckWhole(Get(object, where, name, Json::kWhole, "a whole number"), where + name, least, most);
  }
  /// Reads a list of `size` words of 32 bits.
  void Words(const Json& object, const std::string& where, const char* name, size_t size, uint32_t* words) const {
    const Json& list = Get(object, where, name, Json::kList, "a list");
    if (list.items.size() != size) {
      RefuseField(where + name, std::to_string(list.items.size()) + " values", std::to_string(size));
    }
    for (size_t i = 0; i < size; ++i) {
      words[i] =
          static_cast<uint32_t>(CheckWhole(list.items[i], where + name + "[" + std::to_string(i) + "]", 0, UINT32_MAX));
    }
  }

 private:
  std::string path_;
  Json root_;
};

struct DtypeName {
  const char* name;
  RowDtype dtype;
  uint64_t bytes;
};
constexpr DtypeName kDtypes[] = {{"float32", kRowDtypeFloat32, 4},
                                 {"bfloat16", kRowDtypeBfloat16, 2},
                                 {"float16", kRowDtypeFloat16, 2},
                                 {"int8", kQuantizedInt8, 1},
                                 {"float8_e4m3fn", kQuantizedFloat8E4m3, 1}};

std::string ReadText(const OpenFolder& folder) {
  const OpenFile file(folder, kManifest, "the manifest of frozen tables");
  if (file.size() > kMostManifestBytes) {
    Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", folder.PathOf(kManifest), "\": got ", file.size(),
           " bytes, wanted at most ", kMostManifestBytes, kRemedy);
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.Read(text.data(), text.size());
  return text;
}

/// Reads the description of one store, without its files.
FrozenStoreFiles ReadStore(const Manifest& manifest, const Json& store, const std::string& where, uint64_t* row_bytes) {
  if (store.kind != Json::kObject) manifest.RefuseField(where, "another value", "an object");
  FrozenStoreFiles files{};
  files.dim = static_cast<int32_t>(manifest.Whole(store, where, "dim", 1, kMaxDim));
  const std::string& dtype = manifest.Get(store, where, "dtype", Json::kText, "a text").text;
  const auto* found = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](auto& d) { return dtype == d.name; });
  if (found == std::end(kDtypes)) {
    manifest.RefuseField(where + "dtype", "\"" + dtype + "\"", "float32, bfloat16, float16, int8 or float8_e4m3fn");
  }
  files.dtype = found->dtype;
  *row_bytes = found->bytes * static_cast<uint64_t>(files.dim);
  files.capacity = static_cast<uint32_t>(manifest.Whole(store, where, "capacity", 1, (uint64_t{1} << 31) - 1));
  files.num_device_rows = files.capacity;
  if (store.Find("num_device_rows") != nullptr) {  // folders of earlier releases do not have it
    files.num_device_rows = static_cast<uint32_t>(manifest.Whole(store, where, "num_device_rows", 1, files.capacity));
  }
  constexpr uint64_t kMostBuckets = (uint64_t{1} << 32) / kEntriesPerBucket - 1;  // entries have 32-bit numbers
  files.num_buckets = static_cast<uint32_t>(manifest.Whole(store, where, "num_buckets", 1, kMostBuckets));
  uint32_t salt[2];
  manifest.Words(store, where, "salt", 2, salt);
  files.counters[kSaltLow] = salt[0];
  files.counters[kSaltHigh] = salt[1];
  const Json& tables = manifest.Get(store, where, "tables", Json::kList, "a list");
  if (tables.items.empty() || tables.items.size() >= kMaxTables) {
    manifest.RefuseField(where + "tables", std::to_string(tables.items.size()) + " of them", "at least one");
  }
  files.words.resize(tables.items.size() * kNumTableWords);
  for (size_t t = 0; t < tables.items.size(); ++t) {
    const Json& table = tables.items[t];
    const std::string at = where + "tables[" + std::to_string(t) + "].";
    if (table.kind != Json::kObject) manifest.RefuseField(at, "another value", "an object");
    const std::string& name = manifest.Get(table, at, "name", Json::kText, "a text").text;
    const auto num_rows = static_cast<int64_t>(manifest.Whole(table, at, "num_rows", 0, files.capacity));
    files.tables.push_back({name, num_rows});
    manifest.Words(table, at, "words", kNumTableWords, &files.words[t * kNumTableWords]);
  }
  return files;
}

FileMemory ReadArray(const Manifest& manifest, const Json& store, const std::string& where, const char* name,
                     const OpenFolder& folder, const std::string& file_name, uint64_t size, uint32_t flags) {
  const Json& checksums = manifest.Get(store, where, "checksums", Json::kObject, "an object");
  const auto wanted = static_cast<uint32_t>(manifest.Whole(checksums, where + "checksums.", name, 0, UINT32_MAX));
  const OpenFile file(folder, file_name, "an array of the manifest next to it");
  const std::string path = folder.PathOf(file_name);
  if (file.size() != size) {
    Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", path, "\": got ", file.size(), " bytes, wanted ", size, kRemedy);
  }
  FileMemory memory = file.Take(flags);
  if ((flags & JAXSOK_UNVERIFIED) == 0) {
    const uint32_t found = CrcOf(memory.data(), memory.size());
    if (found != wanted) {
      Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", path, "\": got checksum ", found, ", wanted ", wanted, kRemedy);
    }
  }
  return memory;
}

}  // namespace

FileMemory::~FileMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

FrozenFolder ReadFrozenFolder(const std::string& path, uint32_t flags) {
  const OpenFolder opened(path);
  const std::string file = opened.PathOf(kManifest), text = ReadText(opened);
  const Manifest manifest(file, text);
  const Json& root = manifest.root();
  if (root.kind != Json::kObject) manifest.RefuseField("content", "another value", "an object");
  const std::string& format = manifest.Get(root, "", "format", Json::kText, "a text").text;
  if (format != kFormat) manifest.RefuseField("format", "\"" + format + "\"", kFormat);
  const uint64_t version = manifest.Whole(root, "", "version", 0, UINT64_MAX);
  if (version != kVersion) {
    Refuse(JAXSOK_BAD_FOLDER, "jaxsok_open: file \"", file, "\": version: got ", version, ", wanted ", kVersion,
           "; write the folder and link the program with the same version of jaxsok.");
  }
  const auto checksum = static_cast<uint32_t>(manifest.Whole(root, "", "checksum", 0, UINT32_MAX));
  const size_t sealed = text.find('\n') + 1;  // npos + 1 is 0: then the whole text
  const uint32_t found = CrcOf(text.data() + sealed, text.size() - sealed);
  if (found != checksum) manifest.RefuseField("checksum", std::to_string(found), std::to_string(checksum));

  FrozenFolder folder{};
  manifest.Words(root, "", "seed", 2, folder.seed);
  const Json& stores = manifest.Get(root, "", "stores", Json::kList, "a list");
  std::vector<std::string> names;
  for (size_t s = 0; s < stores.items.size(); ++s) {
    const std::string number = std::to_string(s), where = "stores[" + number + "].";
    const Json& store = stores.items[s];
    uint64_t row_bytes = 0;
    FrozenStoreFiles files = ReadStore(manifest, store, where, &row_bytes);
    const auto read = [&](const char* name, uint64_t size) {
      return ReadArray(manifest, store, where, name, opened, "store_" + number + "." + name, size, flags);
    };
    files.index = read("index", files.num_buckets * sizeof(Bucket));
    files.rows = read("rows", files.capacity * row_bytes);
    const bool is_quantized = files.dtype == kQuantizedInt8 || files.dtype == kQuantizedFloat8E4m3;
    if (is_quantized) files.scales = read("scales", files.capacity * uint64_t{4});
    for (const FrozenTableEntry& table : files.tables) names.push_back(table.name);
    folder.stores.push_back(std::move(files));
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (names.empty()) manifest.RefuseField("stores", "no tables", "at least one");
  if (twice != names.end()) manifest.RefuseField("stores", "two tables \"" + *twice + "\"", "distinct names");
  return folder;
}

}  // namespace jaxsok

// Maps host memory in huge pages, touches it with threads, and owns it until its tensor is deleted.
#include "host_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "../core/platform.h"

namespace jaxsok {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kPage = 4096;
constexpr int32_t kMostNodes = 1024;
constexpr int kPreferred = 1;  // MPOL_PREFERRED of <numaif.h>, which belongs to libnuma

/// A tensor with its shape and its memory.
struct HostBlock {
  DLManagedTensor managed;
  int64_t shape[2];
  int64_t num_bytes;
  int32_t device;
};

/// Prefers the memory next to the device. If it is used up, or the system forbids the choice, any memory will do.
void PlaceNear(int32_t device, void* data, int64_t num_bytes) {
  const int32_t node = NodeOfDevice(device);
  if (node < 0 || node >= kMostNodes) return;
  unsigned long nodes[kMostNodes / (8 * sizeof(unsigned long))] = {};
  nodes[node / (8 * sizeof(unsigned long))] = 1ul << (node % (8 * sizeof(unsigned long)));
  syscall(SYS_mbind, data, static_cast<unsigned long>(num_bytes), kPreferred, nodes, kMostNodes, 0u);
}

/// Makes the system allocate all pages now, from many threads: clearing them takes most of the time.
void Touch(char* data, int64_t num_bytes) {
  std::atomic<int64_t> next{0};
  const auto touch = [&] {
    for (int64_t begin = next.fetch_add(kHugePage); begin < num_bytes; begin = next.fetch_add(kHugePage)) {
      for (int64_t at = 0; at < kHugePage; at += kPage) static_cast<volatile char*>(data)[begin + at] = 0;
    }
  };
  std::vector<std::thread> threads;
  try {
    for (unsigned t = 1; t < std::thread::hardware_concurrency(); ++t) threads.emplace_back(touch);
  } catch (const std::system_error&) {  // no more threads: those that there are do the work
  }
  touch();
  for (std::thread& thread : threads) thread.join();
}

void Delete(DLManagedTensor* managed) {
  HostBlock* block = static_cast<HostBlock*>(managed->owner);
  CloseArea(block->device, managed->tensor.data);
  UnmapHostMemory(block->device, managed->tensor.data, block->num_bytes);
  delete block;
}

size_t MappedBytes(int64_t num_bytes) {
  return static_cast<size_t>(CeilDiv(std::max<int64_t>(1, num_bytes), kHugePage) * kHugePage);
}

}  // namespace

LaunchError MapHostMemory(int32_t device, int64_t num_bytes, void** out) {
  const size_t size = MappedBytes(num_bytes);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return "the system maps no memory of this size";
  madvise(data, size, MADV_HUGEPAGE);
  PlaceNear(device, data, static_cast<int64_t>(size));
  Touch(static_cast<char*>(data), static_cast<int64_t>(size));
  if (const LaunchError error = PinHostMemory(device, data, static_cast<int64_t>(size))) {
    munmap(data, size);
    return error;
  }
  *out = data;
  return nullptr;
}

void UnmapHostMemory(int32_t device, void* data, int64_t num_bytes) {
  UnpinHostMemory(device, data);
  munmap(data, MappedBytes(num_bytes));
}

}  // namespace jaxsok

/// Makes a zeroed uint8[num_rows][width] for a device; its deleter frees the memory. Returns nullptr, or what went
/// wrong.
JAXSOK_VISIBLE const char* JaxsokHostMemoryNew(int32_t device, int64_t num_rows, int64_t width, DLManagedTensor** out) {
  using namespace jaxsok;
  const int64_t num_bytes = num_rows * width;
  void* data = nullptr;
  if (const LaunchError error = MapHostMemory(device, num_bytes, &data)) return error;
  if (const LaunchError error = OpenArea(device, data)) {
    UnmapHostMemory(device, data, num_bytes);
    return error;
  }
  auto block = std::make_unique<HostBlock>();
  block->shape[0] = num_rows;
  block->shape[1] = width;
  block->num_bytes = num_bytes;
  block->device = device;
  block->managed.tensor = DLTensor{data, {HostMemoryType(), device}, 2, {kUnsigned, 8, 1}, block->shape, nullptr, 0};
  block->managed.owner = block.get();
  block->managed.deleter = Delete;
  *out = &block.release()->managed;
  return nullptr;
}

/// Deletes a tensor that was never consumed.
JAXSOK_VISIBLE void JaxsokHostMemoryDelete(DLManagedTensor* managed) { managed->deleter(managed); }

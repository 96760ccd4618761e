// Host memory that a device reads and writes, exported as a DLPack tensor.
//
// XLA's own pool of pinned memory takes 74 s for 80 GB, and is limited to 64 GB. Mapped in huge pages, touched by all
// threads and then registered with the driver in one piece, the same memory takes 4.3 s.
//
// These functions run between programs; no handler calls them.
#ifndef JAXSOK_KERNELS_HOST_MEMORY_H_
#define JAXSOK_KERNELS_HOST_MEMORY_H_

#include <cstdint>

#include "stream.h"

// The C structures of DLPack 0.x, which every version of DLPack reads.
struct DLDevice {
  int32_t type;
  int32_t id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t num_dims;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* owner;
  void (*deleter)(DLManagedTensor*);
};

namespace jaxsok {

constexpr int32_t kOnHost = 1;        // kDLCPU
constexpr int32_t kPinnedOnHost = 3;  // kDLCUDAHost
constexpr uint8_t kUnsigned = 1;      // kDLUInt

/// Maps zeroed memory of the host, in huge pages and next to a device, and lets all devices read and write it. Returns
/// what went wrong, or nullptr.
LaunchError MapHostMemory(int32_t device, int64_t num_bytes, void** data);
/// Gives memory of MapHostMemory back, after the device has finished its work.
void UnmapHostMemory(int32_t device, void* data, int64_t num_bytes);

// The functions in which the back ends differ.

/// Returns DLPack's device type of this memory.
int32_t HostMemoryType();
/// Returns the NUMA node of the host that is next to a device; -1: unknown, or there is only one.
int32_t NodeOfDevice(int32_t device);
/// Lets all devices read and write host memory.
LaunchError PinHostMemory(int32_t device, void* data, int64_t num_bytes);
/// Undoes PinHostMemory after the device has finished its work.
void UnpinHostMemory(int32_t device, void* data);
/// Allows rows of a slab to be read and written ahead (tier.h), until it is closed; closing waits for the device.
LaunchError OpenArea(int32_t device, const void* slab);
void CloseArea(int32_t device, const void* slab);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_HOST_MEMORY_H_

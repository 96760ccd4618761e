// Memory of the host that a device reads and writes, handed over as a DLPack tensor.
//
// XLA's own pool of pinned memory makes 80 GB in 74 s, and ends at 64 GB. Mapped in huge pages, touched by all threads
// and then registered with the driver in one piece, the same takes 4.3 s.
//
// These functions run between programs; no handler calls them.
#ifndef JAXSOK_KERNELS_HOST_MEMORY_H_
#define JAXSOK_KERNELS_HOST_MEMORY_H_

#include <cstdint>

#include "stream.h"

// DLPack 0.x, the C structures that every version of it reads.
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

// What the back ends differ in.

/// How DLPack calls such memory.
int32_t HostMemoryType();
/// The node of the host's memory that is next to a device; -1: unknown, or there is one only.
int32_t NodeOfDevice(int32_t device);
/// Lets all devices read and write memory of the host.
LaunchError PinHostMemory(int32_t device, void* data, int64_t num_bytes);
/// Takes this back, once the device has nothing to do with it.
void UnpinHostMemory(int32_t device, void* data);
/// Has rows of a slab be read and written ahead (tier.h), until it is closed; this waits for the device.
LaunchError OpenArea(int32_t device, const void* slab);
void CloseArea(int32_t device, const void* slab);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_HOST_MEMORY_H_

// Where opened tables lie, and how a lookup reaches the kernels: host memory, or a GPU.
#ifndef JAXSOK_C_INTERFACE_DEVICE_H_
#define JAXSOK_C_INTERFACE_DEVICE_H_

#include <cstddef>
#include <memory>

#include "../kernels/lookup.h"

namespace jaxsok {

class Device {
 public:
  static constexpr bool kIsHost =
#if defined(JAXSOK_CUDA)
      false;
#else
      true;
#endif
  static constexpr size_t kOutAlignment = kIsHost ? alignof(float) : 16;  // GPUs store four numbers at once

  /// Throws Error: there is no such device.
  static std::unique_ptr<Device> Open(int32_t ordinal);
  /// Waits for the lookups that run, and releases what was placed.
  virtual ~Device() = default;

  /// What kernels read for an array of the host: a copy on the device, or, on the host, the array itself, which must
  /// live as long as this. Throws Error.
  virtual const void* Place(const void* data, size_t num_bytes) = 0;

  /// Looks up; features of the batches are in host memory, all other arrays where the device reads them. Any thread.
  /// Throws Error.
  virtual void Run(void* stream, FrozenLookup* lookups, int32_t num_lookups) const = 0;
};

}  // namespace jaxsok

#endif  // JAXSOK_C_INTERFACE_DEVICE_H_

// The memory that holds opened tables (host or GPU), and how a lookup reaches the kernels.
#ifndef JAXSOK_C_INTERFACE_DEVICE_H_
#define JAXSOK_C_INTERFACE_DEVICE_H_

#include <cstddef>
#include <memory>

#include "../kernels/lookup.h"

namespace jaxsok {

/// A lookup for the host that has begun.
class Running {
 public:
  /// Waits until nothing reads or writes the memory of the lookup any more.
  virtual ~Running() = default;
  /// Waits until the embeddings and counts are written. Throws Error.
  virtual void Wait() = 0;
};

class Device {
 public:
  static constexpr bool kIsHost =
#if defined(JAXSOK_CUDA)
      false;
#else
      true;
#endif
  static constexpr size_t kOutAlignment = kIsHost ? alignof(float) : 16;  // GPUs store four numbers at once

  /// Opens a device. Throws Error if it does not exist.
  static std::unique_ptr<Device> Open(int32_t ordinal);
  /// Waits for running lookups, and releases what was placed.
  virtual ~Device() = default;

  /// Returns what kernels read for an array of the host: a copy on the device, or, on the host, the array itself, which
  /// must outlive this object. Throws Error.
  virtual const void* Place(const void* data, size_t num_bytes) = 0;
  /// Returns what kernels read for an array that stays in host memory: a copy that the device reads over its link, or,
  /// on the host, the array itself. Throws Error.
  virtual const void* PlaceOnHost(const void* data, size_t num_bytes) = 0;

  /// Looks up batches. The features of the batches are in host memory, all other arrays where the device reads them.
  /// Any thread may call it. Throws Error.
  virtual void Run(void* stream, FrozenLookup* lookups, int32_t num_lookups) const = 0;

  /// Returns memory of the host that this device and all others read and write. Throws Error.
  virtual void* NewHostMemory(size_t num_bytes) const = 0;
  virtual void DeleteHostMemory(void* memory) const = 0;
  /// Begins to look up batches for the host: all of their arrays, and the counts of LaunchLookupFrozen, are in memory
  /// of NewHostMemory; the words of features are one array. With `places`, embeddings are float32, a row for each key,
  /// and are copied there: one place for each key of the first lookup, then of the next. A GPU gathers them in its own
  /// memory, so only on the host do the lookups need arrays for them. Any thread may call it. Throws Error.
  virtual std::unique_ptr<Running> Begin(FrozenLookup* lookups, int32_t num_lookups, int32_t* counts,
                                         float* const* places) = 0;
};

}  // namespace jaxsok

#endif  // JAXSOK_C_INTERFACE_DEVICE_H_

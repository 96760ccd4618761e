// Work on another device than the caller's, between programs.
#ifndef JAXSOK_KERNELS_DEVICE_CUDA_CUH_
#define JAXSOK_KERNELS_DEVICE_CUDA_CUH_

#include <cuda_runtime.h>

#include <system_error>
#include <thread>

#include "stream.h"

namespace jaxsok {

/// Calls `work` with a device made current, in a separate thread.
///
/// The calling thread keeps its device and its last error. Making its device current again would create a context
/// there, on a GPU that may belong to another process; and a remaining error would be attributed to its next launch.
template <typename Work>
LaunchError OnDevice(int32_t device, const Work& work) {
  LaunchError error = nullptr;
  try {
    std::thread([&] {
      const cudaError_t chosen = cudaSetDevice(device);
      error = chosen == cudaSuccess ? work() : cudaGetErrorString(chosen);
    }).join();
  } catch (const std::system_error&) {
    return kNoThread;
  }
  return error;
}

/// Loads a kernel now. CUDA loads others when they are first launched, which may fail for want of memory, and may wait
/// until other kernels have ended.
template <typename Kernel>
LaunchError Load(Kernel* kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_DEVICE_CUDA_CUH_

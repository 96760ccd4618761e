// Work on a device that is not the caller's, between programs.
#ifndef JAXSOK_KERNELS_DEVICE_CUDA_CUH_
#define JAXSOK_KERNELS_DEVICE_CUDA_CUH_

#include <cuda_runtime.h>

#include <thread>

#include "stream.h"

namespace jaxsok {

/// Calls `work` with a device made current, in a thread of its own.
///
/// The calling thread keeps its device and its last error. To make its device current again would make a context there,
/// on a GPU that may belong to another process; and an error left behind would be taken for one of its next launch.
template <typename Work>
LaunchError OnDevice(int32_t device, const Work& work) {
  LaunchError error = nullptr;
  std::thread([&] {
    const cudaError_t chosen = cudaSetDevice(device);
    error = chosen == cudaSuccess ? work() : cudaGetErrorString(chosen);
  }).join();
  return error;
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_DEVICE_CUDA_CUH_

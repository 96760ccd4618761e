// Host memory for GPUs: registered with the driver, for all devices.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <string>

#include "device_cuda.cuh"
#include "host_memory.h"

namespace jaxsok {

int32_t HostMemoryType() { return kPinnedOnHost; }

int32_t NodeOfDevice(int32_t device) {
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof(bus), device) != cudaSuccess) return -1;
  std::string folder = bus;
  std::transform(folder.begin(), folder.end(), folder.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file("/sys/bus/pci/devices/" + folder + "/numa_node");
  int32_t node = -1;
  return file >> node ? node : -1;
}

LaunchError PinHostMemory(int32_t device, void* data, int64_t num_bytes) {
  return OnDevice(device, [&]() -> LaunchError {
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    cudaError_t error = cudaHostRegister(data, static_cast<size_t>(num_bytes), flags);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    void* of_device = nullptr;
    error = cudaHostGetDevicePointer(&of_device, data, 0);
    if (error == cudaSuccess && of_device == data) return nullptr;
    cudaHostUnregister(data);
    return error == cudaSuccess ? "the device has another address for memory of the host" : cudaGetErrorString(error);
  });
}

void UnpinHostMemory(int32_t device, void* data) {
  OnDevice(device, [&]() -> LaunchError {
    // This waits for launched programs, which may still write rows (measured on an H200, as cudaFree does).
    // cudaDeviceSynchronize would end the CUDA graphs that other threads are recording.
    cudaHostUnregister(data);
    return nullptr;
  });
}

}  // namespace jaxsok

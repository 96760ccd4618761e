// Memory of the host on the CPU: nothing is pinned.
#include "host_memory.h"

namespace jaxsok {

int32_t HostMemoryType() { return kOnHost; }

int32_t NodeOfDevice(int32_t) { return -1; }

LaunchError PinHostMemory(int32_t, void*, int64_t) { return nullptr; }

void UnpinHostMemory(int32_t, void*) {}

}  // namespace jaxsok

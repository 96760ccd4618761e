// Host memory on the CPU: nothing is pinned.
#include "host_memory.h"
#include "tier.h"

namespace jaxsok {

int32_t HostMemoryType() { return kOnHost; }

int32_t NodeOfDevice(int32_t) { return -1; }

LaunchError PinHostMemory(int32_t, void*, int64_t) { return nullptr; }

void UnpinHostMemory(int32_t, void*) {}

LaunchError OpenArea(int32_t, const void*) { return nullptr; }

void CloseArea(int32_t, const void*) {}

AheadArea* AreaOf(const void*) { return nullptr; }

}  // namespace jaxsok

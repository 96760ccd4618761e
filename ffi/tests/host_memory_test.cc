// Memory for host slabs is zeroed, has the form that DLPack describes, and can be written until its tensor is deleted.
#include "../kernels/host_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "testing.h"

extern "C" {
const char* JaxsokHostMemoryNew(int32_t device, int64_t num_rows, int64_t width, DLManagedTensor** out);
void JaxsokHostMemoryDelete(DLManagedTensor* managed);
}

namespace jaxsok {
namespace {

void MakeWriteDelete(int64_t num_rows, int64_t width) {
  DLManagedTensor* managed = nullptr;
  JAXSOK_CHECK(JaxsokHostMemoryNew(0, num_rows, width, &managed) == nullptr);
  const DLTensor& tensor = managed->tensor;
  JAXSOK_CHECK(tensor.num_dims == 2 && tensor.shape[0] == num_rows && tensor.shape[1] == width);
  JAXSOK_CHECK(tensor.dtype.code == kUnsigned && tensor.dtype.bits == 8 && tensor.dtype.lanes == 1);
  JAXSOK_CHECK(tensor.strides == nullptr && tensor.byte_offset == 0);
  JAXSOK_CHECK(tensor.device.type == HostMemoryType() && tensor.device.id == 0);
  auto* bytes = static_cast<volatile uint8_t*>(tensor.data);
  bool are_zeros = true;
  for (int64_t i = 0; i < num_rows * width; ++i) are_zeros &= bytes[i] == 0;
  JAXSOK_CHECK(are_zeros);
  for (int64_t i = 0; i < num_rows * width; ++i) bytes[i] = static_cast<uint8_t>(i * 7 + 1);
  bool are_kept = true;
  for (int64_t i = 0; i < num_rows * width; ++i) are_kept &= bytes[i] == static_cast<uint8_t>(i * 7 + 1);
  JAXSOK_CHECK(are_kept);
  void* data = tensor.data;
  JAXSOK_CHECK(msync(data, 4096, MS_ASYNC) == 0);
  JaxsokHostMemoryDelete(managed);
  JAXSOK_CHECK(msync(data, 4096, MS_ASYNC) != 0);  // no longer mapped
}

/// A process that may start no thread touches its memory by itself.
void MakeWithoutThreads() {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit none{0, 0};
    const bool is_limited = setrlimit(RLIMIT_NPROC, &none) == 0 && (geteuid() != 0 || setuid(65534) == 0);
    if (is_limited) MakeWriteDelete(4 * 1024, 2 * 1024);
    _exit(is_limited && NumFailures() == 0 ? 0 : 1);
  }
  int status = 0;
  JAXSOK_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace jaxsok

int main() {
  using namespace jaxsok;
  MakeWriteDelete(1, 16);
  MakeWriteDelete(12345, 528);          // ends within a huge page
  MakeWriteDelete(4 * 1024, 2 * 1024);  // ends at the end of a huge page
  MakeWithoutThreads();
  DLManagedTensor* managed = nullptr;
  JAXSOK_CHECK(JaxsokHostMemoryNew(0, int64_t{1} << 40, 1 << 20, &managed) != nullptr);
  JAXSOK_CHECK(managed == nullptr);
  return Finish("host_memory_test");
}

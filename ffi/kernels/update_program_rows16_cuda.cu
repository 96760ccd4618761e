// Row programs on rows of 2 bytes a number (update_program_cuda.cuh).
#include "update_program_cuda.cuh"

namespace jaxsok {

template struct ProgramOf<BFloat16>;
template struct ProgramOf<Float16>;

}  // namespace jaxsok

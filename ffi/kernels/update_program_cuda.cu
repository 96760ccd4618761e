// Row programs on rows of 4 bytes a number (update_program_cuda.cuh).
#include "update_program_cuda.cuh"

namespace jaxsok {

template struct ProgramOf<float>;

}  // namespace jaxsok

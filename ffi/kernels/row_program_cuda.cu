// Row programs on rows of 4 bytes a number (row_program_cuda.cuh).
#include "row_program_cuda.cuh"

namespace jaxsok {

template struct ProgramOf<float>;

}  // namespace jaxsok

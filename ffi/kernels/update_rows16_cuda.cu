// The optimizers for rows of 16 bits: a file of their own, since each takes its time to compile.
#include "update_cuda.cuh"

namespace jaxsok {

template struct UpdateOf<BFloat16>;
template struct UpdateOf<Float16>;

}  // namespace jaxsok

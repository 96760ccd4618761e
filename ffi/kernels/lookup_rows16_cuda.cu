// The kernels of lookup for rows of 16 bits: a file of their own, since each takes its time to compile.
#include "lookup_cuda.cuh"

namespace jaxsok {

template struct LookupOf<BFloat16>;
template struct LookupOf<Float16>;

}  // namespace jaxsok

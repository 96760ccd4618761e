// Sorts of row ids on a GPU: what stands between listing uses and summing them (uses_cuda.cuh).
#ifndef JAXSOK_KERNELS_UPDATE_SORT_CUDA_H_
#define JAXSOK_KERNELS_UPDATE_SORT_CUDA_H_

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace jaxsok {

/// Arrays of `count` each. What is sorted is left as it is.
struct PairsToSort {
  const uint32_t* keys;
  const uint32_t* values;
  uint32_t* sorted_keys;
  uint32_t* sorted_values;
  int64_t count;
};

/// Sorts pairs by the lowest `num_bits` bits of their keys; those with equal keys stay in order. With `storage` null it
/// says in `bytes` what it needs there, and does nothing else; then `bytes` is what `storage` has.
LaunchError SortPairs(Stream stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_SORT_CUDA_H_

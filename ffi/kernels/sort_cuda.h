// Stable sorts of numbers of 32 bits on a GPU: of uses by row, and of distinct keys and uses by owner.
#ifndef JAXSOK_KERNELS_SORT_CUDA_H_
#define JAXSOK_KERNELS_SORT_CUDA_H_

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace jaxsok {

/// Arrays of `count` each. The inputs of the sort are unchanged.
struct PairsToSort {
  const uint32_t* keys;
  const uint32_t* values;
  uint32_t* sorted_keys;
  uint32_t* sorted_values;
  int64_t count;
};

/// Sorts pairs by the lowest `num_bits` bits of their keys, at least one; pairs with equal keys stay in order. If
/// `storage` is null, it only writes the required storage size to `bytes`; otherwise `bytes` is the size of `storage`.
LaunchError SortPairs(Stream stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_SORT_CUDA_H_

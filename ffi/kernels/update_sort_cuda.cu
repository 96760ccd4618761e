// Radix sorts by CUB, with digits sized for the keys.
//
// CUB itself chooses digits of 8 bits and tiles of 8,832 pairs. Row ids of 25 to 27 bits, 16 to 128 M rows, then take
// four passes, while digits of 9 bits take three (row ids of 9, 17 and 18 bits also take one less); and few pairs fill
// few multiprocessors. On an H200 (ms):
//
//   pairs      bits   CUB      512 x 16, 9 bits   512 x 8, 9 bits
//   6,656      27     0.0536   0.0411             0.0343
//   106,496    27     0.0624   0.0514             0.0443
//   1,703,936  27     0.1083   0.0983             0.1068
//   5,242,880  25     0.2249   0.1981             0.2343
//   1,048,576  23     0.0654   0.0690             0.0770
//
// These times use CUB's own blocks of 128 threads for the histogram. Blocks of 1,024 take 0.006 ms less for 1.7 M
// pairs, and 0.011 ms less for 5.2 M.
#include <cub/device/device_radix_sort.cuh>

#include "launch_cuda.cuh"
#include "update_sort_cuda.h"

namespace jaxsok {
namespace {

LaunchError SortAsCub(cudaStream_t stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes) {
  JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(storage, *bytes, pairs.keys, pairs.sorted_keys, pairs.values,
                                                        pairs.sorted_values, static_cast<int>(pairs.count), 0, num_bits,
                                                        stream));
  return nullptr;
}

// CUB's policy interface changes with its versions; this is the one of CUDA 13.0. With other versions CUB chooses the
// policy: equally correct, at the speed in the table above.
#if CUB_VERSION / 100 == 3000

constexpr int kDigitBits = 9;

template <int kThreads, int kItemsPerThread>
struct WideDigits {
  using Base = cub::detail::radix::policy_hub<uint32_t, uint32_t, uint32_t>::Policy900;
  struct MaxPolicy : cub::ChainedPolicy<700, MaxPolicy, MaxPolicy> {
    static constexpr bool ONESWEEP = true;
    static constexpr int ONESWEEP_RADIX_BITS = kDigitBits;
    using HistogramPolicy = cub::AgentRadixSortHistogramPolicy<1024, 8, 1, uint32_t, kDigitBits>;
    using ExclusiveSumPolicy = cub::AgentRadixSortExclusiveSumPolicy<256, kDigitBits>;
    using OnesweepPolicy =
        cub::AgentRadixSortOnesweepPolicy<kThreads, kItemsPerThread, uint32_t, 1,
                                          cub::RADIX_RANK_MATCH_EARLY_COUNTS_ANY, cub::BLOCK_SCAN_RAKING_MEMOIZE,
                                          cub::RADIX_SORT_STORE_DIRECT, kDigitBits>;
    using SingleTilePolicy = Base::SingleTilePolicy;
    // Compiled, but not used if ONESWEEP is set.
    using ScanPolicy = Base::ScanPolicy;
    using DownsweepPolicy = Base::DownsweepPolicy;
    using AltDownsweepPolicy = Base::AltDownsweepPolicy;
    using UpsweepPolicy = Base::UpsweepPolicy;
    using AltUpsweepPolicy = Base::AltUpsweepPolicy;
  };
};

template <typename Digits>
LaunchError SortBy(cudaStream_t stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes) {
  using Dispatch = cub::DispatchRadixSort<cub::SortOrder::Ascending, uint32_t, uint32_t, uint32_t,
                                          cub::detail::identity_decomposer_t, Digits>;
  // Not written to: the last argument but one says so.
  cub::DoubleBuffer<uint32_t> keys(const_cast<uint32_t*>(pairs.keys), pairs.sorted_keys);
  cub::DoubleBuffer<uint32_t> values(const_cast<uint32_t*>(pairs.values), pairs.sorted_values);
  JAXSOK_RETURN_IF_CUDA(Dispatch::Dispatch(storage, *bytes, keys, values, static_cast<uint32_t>(pairs.count), 0,
                                           num_bits, /*is_overwrite_okay=*/false, stream));
  return nullptr;
}

#endif

}  // namespace

LaunchError SortPairs(Stream stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
#if CUB_VERSION / 100 == 3000
  constexpr int64_t kFewPairs = 512 << 10;
  if (CeilDiv(num_bits, kDigitBits) < CeilDiv(num_bits, 8)) {
    if (pairs.count < kFewPairs) return SortBy<WideDigits<512, 8>>(cuda_stream, pairs, num_bits, storage, bytes);
    return SortBy<WideDigits<512, 16>>(cuda_stream, pairs, num_bits, storage, bytes);
  }
#endif
  return SortAsCub(cuda_stream, pairs, num_bits, storage, bytes);
}

}  // namespace jaxsok

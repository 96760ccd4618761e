// Radix sorts by the kernels of CUB's one-sweep sort (Adinets and Merrill, arXiv:2206.01784), with digits sized for the
// keys and without memsets.
//
// CUB's own launcher chooses digits of 8 bits and tiles of 8,832 pairs. Row ids of 25 to 27 bits, 16 to 128 M rows,
// then take four passes, while digits of 9 bits take three (row ids of 9, 17 and 18 bits also take one less); and few
// pairs fill few multiprocessors. On an H200 (ms), each with CUB's launcher:
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
//
// CUB's launcher also clears what its kernels add to, by two memsets and another for each pass. Here one kernel clears
// the memory of all passes (SetWords).
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "launch_cuda.cuh"
#include "sort_cuda.h"
#include "workspace.h"

namespace jaxsok {
namespace {

/// Sorts by CUB's launcher.
LaunchError SortAsCub(cudaStream_t stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes) {
  JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(storage, *bytes, pairs.keys, pairs.sorted_keys, pairs.values,
                                                        pairs.sorted_values, static_cast<int>(pairs.count), 0, num_bits,
                                                        stream));
  return nullptr;
}

// CUB's kernels and policies change with its versions; these are those of CUDA 13.0. With other versions CUB launches
// the sort: equally correct, but slower.
#if CUB_VERSION / 100 == 3000

/// The number of pairs up to which a pass is one launch: CUB's kernels look back over less than 2**28 pairs.
constexpr int64_t kMostPairs = 1 << 27;

template <int kBits, int kThreads, int kItemsPerThread>
struct Digits {
  static constexpr int kNumBits = kBits, kNumDigits = 1 << kBits;
  static constexpr int kTile = kThreads * kItemsPerThread, kTileThreads = kThreads;
  static constexpr int kHistogramThreads = 1024, kHistogramItems = 8, kSumThreads = 256;
  struct Policy : cub::ChainedPolicy<700, Policy, Policy> {
    using HistogramPolicy = cub::AgentRadixSortHistogramPolicy<kHistogramThreads, kHistogramItems, 1, uint32_t, kBits>;
    using ExclusiveSumPolicy = cub::AgentRadixSortExclusiveSumPolicy<kSumThreads, kBits>;
    using OnesweepPolicy =
        cub::AgentRadixSortOnesweepPolicy<kThreads, kItemsPerThread, uint32_t, 1,
                                          cub::RADIX_RANK_MATCH_EARLY_COUNTS_ANY, cub::BLOCK_SCAN_RAKING_MEMOIZE,
                                          cub::RADIX_SORT_STORE_DIRECT, kBits>;
  };
};

template <typename D>
LaunchError SortBy(cudaStream_t stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes) {
  namespace kernels = cub::detail::radix_sort;
  using Policy = typename D::Policy;
  constexpr auto kUp = cub::SortOrder::Ascending;
  const int num_passes = CeilDiv(num_bits, D::kNumBits), count = static_cast<int>(pairs.count);
  const int num_tiles = CeilDiv(count, D::kTile);
  WorkspaceCutter cutter(storage);
  uint32_t* bins = cutter.Take<uint32_t>(num_passes * D::kNumDigits);  // keys by digit, then where they begin
  int* num_begun = cutter.Take<int>(num_passes);                       // tiles of each pass
  const int64_t counts_of_pass = int64_t{num_tiles} * D::kNumDigits;   // what a tile tells those after it
  int* counts = cutter.Take<int>(num_passes * counts_of_pass);
  const int64_t num_cleared = cutter.used();
  const int64_t num_moved = num_passes > 1 ? pairs.count : 0;  // passes alternate between these and the results
  uint32_t* moved_keys = cutter.Take<uint32_t>(num_moved);
  uint32_t* moved_values = cutter.Take<uint32_t>(num_moved);
  if (storage == nullptr) {
    *bytes = static_cast<size_t>(cutter.used());
    return nullptr;
  }
  if (count == 0) return nullptr;

  JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, storage, num_cleared / 4, 0));
  const int most_blocks = NumMultiprocessors() * (2048 / D::kHistogramThreads);
  const int num_blocks = std::min(CeilDiv(count, D::kHistogramThreads * D::kHistogramItems), most_blocks);
  kernels::DeviceRadixSortHistogramKernel<Policy, kUp, uint32_t, uint32_t>
      <<<num_blocks, D::kHistogramThreads, 0, stream>>>(bins, pairs.keys, static_cast<uint32_t>(count), 0, num_bits);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  kernels::DeviceRadixSortExclusiveSumKernel<Policy, uint32_t><<<num_passes, D::kSumThreads, 0, stream>>>(bins);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  const uint32_t *keys = pairs.keys, *values = pairs.values;
  for (int pass = 0; pass < num_passes; ++pass) {
    const bool is_result = (num_passes - pass) % 2 == 1;  // the last pass writes there
    uint32_t* to_keys = is_result ? pairs.sorted_keys : moved_keys;
    uint32_t* to_values = is_result ? pairs.sorted_values : moved_values;
    const int first_bit = pass * D::kNumBits;
    kernels::DeviceRadixSortOnesweepKernel<Policy, kUp, uint32_t, uint32_t, uint32_t, int, int>
        <<<num_tiles, D::kTileThreads, 0, stream>>>(counts + pass * counts_of_pass, num_begun + pass, nullptr,
                                                    bins + pass * D::kNumDigits, to_keys, keys, to_values, values,
                                                    count, first_bit, std::min(num_bits - first_bit, D::kNumBits));
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    keys = to_keys;
    values = to_values;
  }
  return nullptr;
}

#endif

}  // namespace

LaunchError SortPairs(Stream stream, const PairsToSort& pairs, int num_bits, void* storage, size_t* bytes) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
#if CUB_VERSION / 100 == 3000
  constexpr int64_t kFewPairs = 512 << 10;
  const bool has_wide_digits = CeilDiv(num_bits, 9) < CeilDiv(num_bits, 8);
  if (pairs.count <= kMostPairs) {
    const auto sort = pairs.count < kFewPairs ? has_wide_digits ? SortBy<Digits<9, 512, 8>> : SortBy<Digits<8, 512, 8>>
                      : has_wide_digits ? SortBy<Digits<9, 512, 16>>
                                              : SortBy<Digits<8, 384, 23>>;
    return sort(cuda_stream, pairs, num_bits, storage, bytes);
  }
#endif
  return SortAsCub(cuda_stream, pairs, num_bits, storage, bytes);
}

}  // namespace jaxsok

// Tickets on a GPU (tickets.h).
#include <algorithm>

#include "launch_cuda.cuh"
#include "tickets.h"

namespace jaxsok {
namespace {

// Pointers are kernel parameters, of which every driver accepts 4 KB.
constexpr int kPlansPerLaunch = 32;
constexpr int kUsesPerLaunch = 128;
constexpr int kStoresPerLaunch = 64;

// Each thread adds up keys with a stride, each block adds its sum to the digest.
// No race: integers are summed by atomics, in any order. They all go to one word, so there are few of them.
__global__ void __launch_bounds__(kBlock) DigestKernel(KeysView batch, uint64_t* digest) {
  __shared__ uint64_t sums[kBlock / kWarp];
  uint64_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * kBlock;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < batch.num_keys; i += stride) {
    sum += DigestOf(__ldg(batch.keys + i), i);
  }
  sum = SumOfWarp(sum);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kBlock / kWarp; ++warp) sum += sums[warp];
  AtomicAdd64(digest, sum);
}

struct IssueArguments {
  TicketsView tickets;
  const uint64_t* digests[kStoresPerLaunch];
  const uint32_t* counters[kStoresPerLaunch];
  const uint32_t* lineage = nullptr;
  uint32_t* ticket = nullptr;
  int first_store = 0;  // among these; others were launched before
  int num_stores = 0;
  int num_digests = 0;
  uint32_t layout = 0;
  bool is_last = false;
};
static_assert(sizeof(IssueArguments) <= 4096, "fits into the parameters of a kernel");

// One warp. All its loads are issued before it waits for any.
__global__ void __launch_bounds__(kWarp) IssueKernel(const __grid_constant__ IssueArguments a) {
  const uint64_t lineage = Word64(a.lineage);
  uint64_t digest = 0;
  for (int d = threadIdx.x; d < a.num_digests; d += kWarp) digest += *a.digests[d];
  uint32_t* generations = a.ticket + kNumTicketWords + a.first_store;
  for (int s = threadIdx.x; s < a.num_stores; s += kWarp) generations[s] = a.counters[s][kGeneration];
  digest = SumOfWarp(digest);
  if (threadIdx.x != 0) return;
  if (!a.is_last) {
    a.tickets.last() += digest;
    return;
  }
  const uint64_t issued = a.tickets.Issue(digest, lineage, a.layout);
  a.ticket[0] = static_cast<uint32_t>(issued);
  a.ticket[1] = static_cast<uint32_t>(issued >> 32);
}

struct RedeemArguments {
  TicketsView tickets;
  const uint32_t* plans[kPlansPerLaunch];
  TicketUse uses[kUsesPerLaunch];
  int first_plan = 0;  // among these; others were launched before
  int num_plans = 0;
  int num_uses = 0;
  bool* is_live = nullptr;
  int32_t* num_misused = nullptr;
};
static_assert(sizeof(RedeemArguments) <= 4096, "fits into the parameters of a kernel");
static_assert(kUsesPerLaunch <= kBlock, "a use for each thread");

// One block: its threads search the ring for one ticket after the other. All loads are issued at once.
__global__ void __launch_bounds__(kBlock) RedeemKernel(const __grid_constant__ RedeemArguments a) {
  __shared__ uint64_t tickets[kPlansPerLaunch];
  const int thread = threadIdx.x;
  uint64_t* open = a.tickets.open();
  if (thread < a.num_plans) tickets[thread] = Word64(a.plans[thread]);
  uint64_t mine = thread < a.tickets.num_open ? open[thread] : 0;
  bool is_stale = false;
  if (thread < a.num_uses) is_stale = *a.uses[thread].generation != a.uses[thread].counters[kGeneration];
  int num_misused = 0;
  __syncthreads();
  for (int p = 0; p < a.num_plans; ++p) {
    const uint64_t ticket = tickets[p];
    bool is_here = false;
    for (uint32_t i = thread; i < a.tickets.num_open; i += kBlock) {
      if (ticket == 0 || (i == thread ? mine : open[i]) != ticket) continue;
      open[i] = 0;
      if (i == thread) mine = 0;
      is_here = true;
    }
    // Every thread waits for the ring that this plan leaves.
    const bool is_open = __syncthreads_or(is_here);
    if (thread == 0) a.is_live[a.first_plan + p] = is_open;
    num_misused += !is_open;
  }
  if (thread == 0) *a.num_misused = num_misused + (a.first_plan == 0 ? 0 : *a.num_misused);
  __syncthreads();
  // No race: all writers of a place write the same value.
  if (is_stale) a.is_live[a.uses[thread].plan] = false;
}

}  // namespace

LaunchError LaunchTicketsDigest(Stream stream, KeysView batch, uint64_t* digest) {
  JAXSOK_RETURN_IF_LAUNCH(SetWords(stream, digest, sizeof(*digest) / 4, 0));
  if (batch.num_keys == 0) return nullptr;
  DigestKernel<<<BlocksFor(batch.num_keys, BlocksOfWave()), kBlock, 0, stream>>>(batch, digest);
  return LastLaunchError();
}

LaunchError LaunchTicketsIssue(Stream stream, TicketsView tickets, const uint64_t* const* digests, int num_digests,
                               const uint32_t* const* counters, int num_stores, const uint32_t* lineage,
                               uint32_t layout, uint32_t* ticket) {
  int first = 0;
  do {
    IssueArguments a{tickets, {}, {}, lineage, ticket, first};
    a.num_stores = std::clamp(num_stores - first, 0, kStoresPerLaunch);
    a.num_digests = std::clamp(num_digests - first, 0, kStoresPerLaunch);
    std::copy_n(counters + first, a.num_stores, a.counters);
    std::copy_n(digests + first, a.num_digests, a.digests);
    a.layout = layout;
    first += kStoresPerLaunch;
    a.is_last = first >= std::max(num_stores, num_digests);
    IssueKernel<<<1, kWarp, 0, stream>>>(a);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  } while (first < std::max(num_stores, num_digests));
  return nullptr;
}

LaunchError LaunchTicketsRedeem(Stream stream, TicketsView tickets, const uint32_t* const* plans, int num_plans,
                                const TicketUse* uses, int num_uses, bool* is_live, int32_t* num_misused) {
  // All plans come before the uses; the last launch of plans includes the first uses.
  int plan = 0, use = 0;
  do {
    RedeemArguments a;
    a.tickets = tickets;
    a.num_misused = num_misused;
    a.is_live = is_live;
    a.num_plans = std::min(num_plans - plan, kPlansPerLaunch);
    std::copy_n(plans + plan, a.num_plans, a.plans);
    a.first_plan = plan;
    plan += a.num_plans;
    if (plan == num_plans) {
      a.num_uses = std::min(num_uses - use, kUsesPerLaunch);
      std::copy_n(uses + use, a.num_uses, a.uses);
      use += a.num_uses;
    }
    RedeemKernel<<<1, kBlock, 0, stream>>>(a);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  } while (plan < num_plans || use < num_uses);
  return nullptr;
}

}  // namespace jaxsok

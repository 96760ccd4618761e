// Tickets on a GPU (tickets.h).
#include <algorithm>

#include "launch_cuda.cuh"
#include "tickets.h"

namespace jaxsok {
namespace {

// Pointers travel as kernel parameters, of which any driver takes 4 KB.
constexpr int kPlansPerLaunch = 32;
constexpr int kUsesPerLaunch = 128;
constexpr int kStoresPerLaunch = 64;

/// What writes the generations of stores into a ticket.
struct StoreCounters {
  const uint32_t* counters[kStoresPerLaunch];
  int num_stores = 0;
  uint32_t* generations = nullptr;

  __device__ void Write(int thread) const {
    for (int s = thread; s < num_stores; s += kBlock) generations[s] = counters[s][kGeneration];
  }
};

/// What the block that ends last does with the digest; without a ticket nothing.
struct IssueArguments {
  TicketsView tickets;
  const uint32_t* lineage = nullptr;
  uint32_t layout = 0;
  uint32_t* ticket = nullptr;
  StoreCounters stores;
};

__device__ uint64_t WordAt(const uint32_t* words) { return Word64(words[0], words[1]); }

// Each thread adds up every so many keys, each block adds its sum to the digest; the last block makes the ticket.
// No race: sums of integers by atomics, in any order. They all go to one word, so that there are few of them.
__global__ void __launch_bounds__(kBlock)
    DigestKernel(KeysView batch, uint64_t* digest, const __grid_constant__ IssueArguments issue) {
  __shared__ uint64_t sums[kBlock / kWarp];
  if (issue.ticket != nullptr && blockIdx.x == 0) issue.stores.Write(threadIdx.x);
  uint64_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * kBlock;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < batch.num_keys; i += stride) {
    sum += DigestOf(__ldg(batch.keys + i), i);
  }
#pragma unroll
  for (int offset = kWarp / 2; offset >= 1; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kBlock / kWarp; ++warp) sum += sums[warp];
  auto* total = reinterpret_cast<unsigned long long*>(digest);
  atomicAdd(total, static_cast<unsigned long long>(sum));
  if (issue.ticket == nullptr) return;
  // A block that counts itself has added its sum before; atomicInc begins anew at 0 after the last block.
  __threadfence();
  if (atomicInc(&issue.tickets.progress()[1], gridDim.x - 1) != gridDim.x - 1) return;
  __threadfence();
  const uint64_t mixed = atomicAdd(total, 0ull);
  const uint64_t issued = issue.tickets.Issue(mixed, WordAt(issue.lineage), issue.layout);
  issue.ticket[0] = static_cast<uint32_t>(issued);
  issue.ticket[1] = static_cast<uint32_t>(issued >> 32);
}

LaunchError Digest(Stream stream, KeysView batch, uint64_t* digest, const IssueArguments& issue) {
  const int64_t wanted = CeilDiv<int64_t>(batch.num_keys, kBlock);
  const unsigned blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kManyBlocks));
  DigestKernel<<<blocks, kBlock, 0, stream>>>(batch, digest, issue);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  return nullptr;
}

__global__ void __launch_bounds__(kBlock) GenerationsKernel(const __grid_constant__ StoreCounters stores) {
  stores.Write(threadIdx.x);
}

struct RedeemArguments {
  TicketsView tickets;
  const uint32_t* plans[kPlansPerLaunch];
  TicketUse uses[kUsesPerLaunch];
  int first_plan = 0;  // of these; others were before
  int num_plans = 0;
  int num_uses = 0;
  bool* is_live = nullptr;
  int32_t* num_misused = nullptr;
};
static_assert(sizeof(RedeemArguments) <= 4096, "fits into the parameters of a kernel");

// One block: its threads look through the ring for one ticket after the other.
__global__ void __launch_bounds__(kBlock) RedeemKernel(const __grid_constant__ RedeemArguments a) {
  uint64_t* open = a.tickets.open();
  int num_misused = 0;
  for (int p = 0; p < a.num_plans; ++p) {
    const uint64_t ticket = WordAt(a.plans[p]);
    bool is_here = false;
    for (uint32_t i = threadIdx.x; i < a.tickets.num_open; i += kBlock) {
      if (ticket == 0 || open[i] != ticket) continue;
      open[i] = 0;
      is_here = true;
    }
    // Every thread waits for the ring as this plan leaves it.
    const bool is_open = __syncthreads_or(is_here);
    if (threadIdx.x == 0) a.is_live[a.first_plan + p] = is_open;
    num_misused += !is_open;
  }
  if (threadIdx.x == 0) *a.num_misused = num_misused + (a.first_plan == 0 ? 0 : *a.num_misused);
  __syncthreads();
  // No race: all that write to a place write the same.
  for (int u = threadIdx.x; u < a.num_uses; u += kBlock) {
    const TicketUse& use = a.uses[u];
    if (*use.generation != use.counters[kGeneration]) a.is_live[use.plan] = false;
  }
}

}  // namespace

LaunchError LaunchTicketsDigest(Stream stream, KeysView batch, uint64_t* digest) {
  if (batch.num_keys == 0) return nullptr;
  return Digest(stream, batch, digest, IssueArguments{});
}

LaunchError LaunchTicketsIssue(Stream stream, TicketsView tickets, const KeysView* batches, int num_batches,
                               const uint32_t* const* counters, int num_stores, const uint32_t* lineage,
                               uint32_t layout, uint32_t* ticket) {
  IssueArguments issue{tickets, lineage, layout, ticket, {}};
  for (int first = 0; first < num_stores; first += kStoresPerLaunch) {
    if (first > 0) {
      GenerationsKernel<<<1, kBlock, 0, stream>>>(issue.stores);
      JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    }
    issue.stores.num_stores = std::min(num_stores - first, kStoresPerLaunch);
    issue.stores.generations = ticket + kNumTicketWords + first;
    std::copy_n(counters + first, issue.stores.num_stores, issue.stores.counters);
  }
  for (int b = 0; b + 1 < num_batches; ++b) {
    JAXSOK_RETURN_IF_LAUNCH(LaunchTicketsDigest(stream, batches[b], &tickets.last()));
  }
  const KeysView last = num_batches == 0 ? KeysView{nullptr, 0} : batches[num_batches - 1];
  return Digest(stream, last, &tickets.last(), issue);
}

LaunchError LaunchTicketsRedeem(Stream stream, TicketsView tickets, const uint32_t* const* plans, int num_plans,
                                const TicketUse* uses, int num_uses, bool* is_live, int32_t* num_misused) {
  // All plans come before the uses; the last launch of plans takes the first uses along.
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

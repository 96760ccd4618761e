// Tickets on the CPU (tickets.h).
#include <algorithm>

#include "parallel_cpu.h"
#include "tickets.h"

namespace jaxsok {
namespace {

constexpr int64_t kKeysPerChunk = 16384;

/// Removes a ticket from the open ones; returns whether it was there.
bool TakeOut(TicketsView tickets, uint64_t ticket) {
  uint64_t* end = tickets.open() + tickets.num_open;
  uint64_t* place = ticket == 0 ? end : std::find(tickets.open(), end, ticket);
  if (place == end) return false;
  *place = 0;
  return true;
}

}  // namespace

LaunchError LaunchTicketsDigest(Stream stream, KeysView batch, uint64_t* digest) {
  *digest = 0;
  RunRanges(stream, batch.num_keys, kKeysPerChunk, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += DigestOf(batch.keys[i], i);
    AddAtomically(digest, sum);
  });
  return nullptr;
}

LaunchError LaunchTicketsIssue(Stream, TicketsView tickets, const uint64_t* const* digests, int num_digests,
                               const uint32_t* const* counters, int num_stores, const uint32_t* lineage,
                               uint32_t layout, uint32_t* ticket) {
  uint64_t digest = 0;
  for (int d = 0; d < num_digests; ++d) digest += *digests[d];
  const uint64_t issued = tickets.Issue(digest, Word64(lineage), layout);
  ticket[0] = static_cast<uint32_t>(issued);
  ticket[1] = static_cast<uint32_t>(issued >> 32);
  for (int s = 0; s < num_stores; ++s) ticket[kNumTicketWords + s] = counters[s][kGeneration];
  return nullptr;
}

LaunchError LaunchTicketsRedeem(Stream, TicketsView tickets, const uint32_t* const* plans, int num_plans,
                                const TicketUse* uses, int num_uses, bool* is_live, int32_t* num_misused) {
  num_misused[0] = 0;
  for (int p = 0; p < num_plans; ++p) {
    is_live[p] = TakeOut(tickets, Word64(plans[p]));
    num_misused[0] += !is_live[p];
  }
  for (const TicketUse* use = uses; use != uses + num_uses; ++use) {
    if (*use->generation != use->counters[kGeneration]) is_live[use->plan] = false;
  }
  return nullptr;
}

}  // namespace jaxsok

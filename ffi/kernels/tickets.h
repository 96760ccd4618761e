// Tickets of lookups: they allow a plan to act once, on a descendant of the state that its lookup returned
// (jaxsok/tickets.py explains their contents).
#ifndef JAXSOK_KERNELS_TICKETS_H_
#define JAXSOK_KERNELS_TICKETS_H_

#include "../core/hash.h"
#include "stream.h"

namespace jaxsok {

constexpr int kNumTicketWords = 2;  // per ticket, before the generations of stores
constexpr int kNumTicketLines = 2;  // rows of a state's tickets before the open ones

/// The tickets of a state, as 64-bit words: the last one, the number of lookups (modulo the size of the ring it gives
/// the place of the next ticket), and a ring of `num_open` open tickets (0: none).
struct TicketsView {
  uint64_t* words = nullptr;
  uint32_t num_open = 0;

  JAXSOK_HOST_DEVICE uint64_t& last() const { return words[0]; }
  JAXSOK_HOST_DEVICE uint64_t& num_lookups() const { return words[1]; }
  JAXSOK_HOST_DEVICE uint64_t* open() const { return words + kNumTicketLines; }

  /// Issues and opens the ticket that follows from the last one for a batch with this digest.
  JAXSOK_HOST_DEVICE uint64_t Issue(uint64_t digest, uint64_t lineage, uint32_t layout) const {
    const uint64_t count = num_lookups();
    const uint64_t ticket = Mix64(((last() + digest) ^ lineage ^ layout) + 1) | 1;  // never 0
    last() = ticket;
    num_lookups() = count + 1;
    open()[count % num_open] = ticket;
    return ticket;
  }
};

/// The keys of one store's batch.
struct KeysView {
  const uint64_t* keys;
  int64_t num_keys;
};

/// Sets `digest` to that of a batch's keys: the sum of DigestOf over all positions, modulo 2^64.
///
/// Order  : sums of integers: the same on every run and on both back ends.
/// Cost   : 8 B a key in; nothing else is read.
LaunchError LaunchTicketsDigest(Stream stream, KeysView batch, uint64_t* digest);

/// Issues the ticket of a lookup and opens it; it replaces the oldest in the ring.
///
/// Pre    : `digests` are those of the batch's keys, in any number of parts; `lineage` has 8 bytes; `counters` are
///          those of all stores.
/// Post   : `ticket`, which has 2 + num_stores words, has the new ticket (low, high; never 0) and the generation of
///          each store.
/// Cost   : one small kernel, and one more for every kStoresPerLaunch stores or digests beyond the first.
LaunchError LaunchTicketsIssue(Stream stream, TicketsView tickets, const uint64_t* const* digests, int num_digests,
                               const uint32_t* const* counters, int num_stores, const uint32_t* lineage,
                               uint32_t layout, uint32_t* ticket);

/// A store that a plan used.
struct TicketUse {
  const uint32_t* generation;  // of the store, in the plan's ticket
  const uint32_t* counters;    // of the store now
  int32_t plan;
};

/// Redeems the tickets of plans: removes them from the open ones.
///
/// Pre    : plans[p] is the ticket of plan p. Plans are processed in order: of two plans with one ticket the first
///          redeems it.
/// Post   : is_live[p]: the ticket of plan p was open, and each store that it used still has its generation;
///          num_misused[0]: plans whose ticket was not open.
/// Cost   : one small kernel for up to kPlansPerLaunch plans and kUsesPerLaunch uses.
LaunchError LaunchTicketsRedeem(Stream stream, TicketsView tickets, const uint32_t* const* plans, int num_plans,
                                const TicketUse* uses, int num_uses, bool* is_live, int32_t* num_misused);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TICKETS_H_

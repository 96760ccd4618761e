// Tickets of lookups: what allows a plan to act once, on a descendant of the state that its lookup returned
// (jaxsok/tickets.py says what they are made of and why).
#ifndef JAXSOK_KERNELS_TICKETS_H_
#define JAXSOK_KERNELS_TICKETS_H_

#include "../core/hash.h"
#include "stream.h"

namespace jaxsok {

constexpr int kNumTicketWords = 2;  // of a ticket, before the generations of stores
constexpr int kNumTicketLines = 2;  // of a state's tickets, before the open ones

/// The tickets of a state, as 64-bit words: the last one, how many lookups there were (the next ticket goes to that
/// place of the ring, modulo its size), and a ring of `num_open` open tickets (0: none).
struct TicketsView {
  uint64_t* words = nullptr;
  uint32_t num_open = 0;

  JAXSOK_HOST_DEVICE uint64_t& last() const { return words[0]; }
  JAXSOK_HOST_DEVICE uint64_t& num_lookups() const { return words[1]; }
  JAXSOK_HOST_DEVICE uint64_t* open() const { return words + kNumTicketLines; }

  /// Makes the ticket that follows from the last one by a batch with this digest, and opens it.
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

/// `digest` becomes that of a batch's keys: the sum of DigestOf over all positions, modulo 2^64.
///
/// Order  : sums of integers: the same on every run and on both back ends.
/// Cost   : 8 B a key in; nothing else is read.
LaunchError LaunchTicketsDigest(Stream stream, KeysView batch, uint64_t* digest);

/// Makes the ticket of a lookup and opens it; it takes the place of the oldest in the ring.
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

/// Looks for the tickets of plans among the open ones, and takes them out.
///
/// Pre    : plans[p] is the ticket of plan p. Plans are taken in order: of two with one ticket the first has it.
/// Post   : is_live[p]: the ticket of plan p was open, and each of the stores that it used has its generation yet;
///          num_misused[0]: plans whose ticket was not open.
/// Cost   : one small kernel for up to kPlansPerLaunch plans and kUsesPerLaunch uses.
LaunchError LaunchTicketsRedeem(Stream stream, TicketsView tickets, const uint32_t* const* plans, int num_plans,
                                const TicketUse* uses, int num_uses, bool* is_live, int32_t* num_misused);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TICKETS_H_

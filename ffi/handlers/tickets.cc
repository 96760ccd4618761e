// Handlers of the tickets noun: a lookup opens a ticket, an update redeems it (jaxsok/tickets.py).
#include "../kernels/tickets.h"

#include "buffers.h"

namespace jaxsok {
namespace {

using Tickets = ffi::Buffer<ffi::U32>;  // [1, kNumTicketLines + open tickets, 2]
using Ticket = ffi::Buffer<ffi::U32>;   // [1, kNumTicketWords + stores]

/// Reads the tickets of one shard, which are updated in place.
ffi::Error ReadTickets(const Tickets& in, const Tickets& out, const char* op, TicketsView& tickets) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(in.dimensions(), {1, -1, 2}, "tickets", op));
  const int64_t num_open = in.dimensions()[1] - kNumTicketLines;
  if (num_open < 1) return Damaged(op, "tickets", std::to_string(in.dimensions()[1]) + " lines", "at least 3");
  JAXSOK_RETURN_IF_ERROR(CheckAlias(in.typed_data(), out.typed_data(), "tickets", op));
  tickets.words = reinterpret_cast<uint64_t*>(in.typed_data());
  tickets.num_open = static_cast<uint32_t>(num_open);
  return ffi::Error::Success();
}

/// The digest of a batch's keys.
ffi::Error DigestImpl(StreamArgument stream, Keys keys, ffi::Result<Seed> digest) {
  constexpr char kOp[] = "tickets_digest";
  JAXSOK_RETURN_IF_ERROR(CheckShape(keys.dimensions(), {-1, 2}, "keys", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(digest->dimensions(), {1, 2}, "digest", kOp));
  StreamScope scope(stream);
  return FromLaunch(LaunchTicketsDigest(scope.get(), {KeysOf(keys), keys.dimensions()[0]},
                                        reinterpret_cast<uint64_t*>(digest->typed_data())),
                    kOp);
}

/// Makes the ticket of a lookup. The remaining operands: the counters of each store, then digests.
ffi::Error IssueImpl(StreamArgument stream, Tickets tickets_in, Seed lineage, ffi::RemainingArgs args,
                     ffi::Result<Tickets> tickets_out, ffi::Result<Ticket> ticket, int32_t layout) {
  constexpr char kOp[] = "tickets_issue";
  TicketsView tickets;
  JAXSOK_RETURN_IF_ERROR(ReadTickets(tickets_in, *tickets_out, kOp, tickets));
  JAXSOK_RETURN_IF_ERROR(CheckShape(lineage.dimensions(), {2}, "lineage", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(ticket->dimensions(), {1, -1}, "ticket", kOp));
  const int64_t num_stores = ticket->dimensions()[1] - kNumTicketWords;
  if (num_stores < 0 || static_cast<size_t>(num_stores) > args.size()) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": ticket: got " + std::to_string(num_stores) +
                                       " stores, wanted 0 to " + std::to_string(args.size()));
  }
  std::vector<const uint32_t*> counters(num_stores);
  std::vector<const uint64_t*> digests(args.size() - counters.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto operand = args.get<ffi::Buffer<ffi::U32>>(i);
    if (!operand.has_value()) return operand.error();
    if (i < counters.size()) {
      JAXSOK_RETURN_IF_ERROR(CheckShape(operand->dimensions(), {kNumCounters}, "counters", kOp));
      counters[i] = operand->typed_data();
    } else {
      JAXSOK_RETURN_IF_ERROR(CheckShape(operand->dimensions(), {1, 2}, "digest", kOp));
      digests[i - counters.size()] = reinterpret_cast<const uint64_t*>(operand->typed_data());
    }
  }
  StreamScope scope(stream);
  return FromLaunch(LaunchTicketsIssue(scope.get(), tickets, digests.data(), static_cast<int>(digests.size()),
                                       counters.data(), static_cast<int>(counters.size()), lineage.typed_data(),
                                       static_cast<uint32_t>(layout), ticket->typed_data()),
                    kOp);
}

/// Takes tickets out. The remaining operands: the counters of each store, then the ticket of each plan. Plan
/// `plan_of_use[u]` used store `store_of_use[u]`.
ffi::Error RedeemImpl(StreamArgument stream, Tickets tickets_in, ffi::RemainingArgs args,
                      ffi::Result<Tickets> tickets_out, ffi::Result<ffi::Buffer<ffi::PRED>> is_live,
                      ffi::Result<ffi::Buffer<ffi::S32>> num_misused, ffi::Span<const int32_t> plan_of_use,
                      ffi::Span<const int32_t> store_of_use) {
  constexpr char kOp[] = "tickets_redeem";
  TicketsView tickets;
  JAXSOK_RETURN_IF_ERROR(ReadTickets(tickets_in, *tickets_out, kOp, tickets));
  JAXSOK_RETURN_IF_ERROR(CheckShape(is_live->dimensions(), {-1}, "is_live", kOp));
  const int64_t num_plans = is_live->dimensions()[0], num_stores = static_cast<int64_t>(args.size()) - num_plans;
  std::vector<const uint32_t*> words(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto operand = args.get<ffi::Buffer<ffi::U32>>(i);
    if (!operand.has_value()) return operand.error();
    const bool is_store = static_cast<int64_t>(i) < num_stores;
    JAXSOK_RETURN_IF_ERROR(is_store
                               ? CheckShape(operand->dimensions(), {kNumCounters}, "counters", kOp)
                               : CheckShape(operand->dimensions(), {1, kNumTicketWords + num_stores}, "ticket", kOp));
    words[i] = operand->typed_data();
  }
  const uint32_t* const* plans = words.data() + num_stores;
  std::vector<TicketUse> uses(plan_of_use.size());
  for (size_t u = 0; u < uses.size(); ++u) {
    const int32_t plan = plan_of_use[u], store = u < store_of_use.size() ? store_of_use[u] : -1;
    if (plan < 0 || plan >= num_plans || store < 0 || store >= num_stores) {
      return ffi::Error::InvalidArgument(std::string(kOp) + ": uses: got plan " + std::to_string(plan) + " of store " +
                                         std::to_string(store) + ", wanted some of " + std::to_string(num_plans) +
                                         " plans and " + std::to_string(num_stores) + " stores");
    }
    uses[u] = {plans[plan] + kNumTicketWords + store, words[store], plan};
  }
  StreamScope scope(stream);
  return FromLaunch(
      LaunchTicketsRedeem(scope.get(), tickets, plans, static_cast<int>(num_plans), uses.data(),
                          static_cast<int>(uses.size()), is_live->typed_data(), num_misused->typed_data()),
      kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokTicketsDigest, DigestImpl, BindStream().Arg<Keys>().Ret<Seed>());

JAXSOK_DEFINE_HANDLER(
    JaxsokTicketsIssue, IssueImpl,
    BindStream().Arg<Tickets>().Arg<Seed>().RemainingArgs().Ret<Tickets>().Ret<Ticket>().Attr<int32_t>("layout"));

JAXSOK_DEFINE_HANDLER(JaxsokTicketsRedeem, RedeemImpl,
                      BindStream()
                          .Arg<Tickets>()
                          .RemainingArgs()
                          .Ret<Tickets>()
                          .Ret<ffi::Buffer<ffi::PRED>>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Attr<ffi::Span<const int32_t>>("plan_of_use")
                          .Attr<ffi::Span<const int32_t>>("store_of_use"));

}  // namespace jaxsok

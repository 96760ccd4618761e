// Handlers of the tickets noun: a lookup opens a ticket, an update redeems it (jaxsok/tickets.py).
#include "../kernels/tickets.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Reads the tickets of one shard, u32[1, kNumTicketLines + open tickets, 2], which are updated in place.
TicketsView ReadTickets(Call& call) {
  const Array array = call.InPlace("tickets", ffi::U32, {1, -1, 2});
  const int64_t num_open = array.size(1) - kNumTicketLines;
  call.RequireWhole(num_open >= 1, "tickets", "got ", array.size(1), " lines, wanted at least 3");
  return {array.as<uint64_t>(), static_cast<uint32_t>(num_open)};
}

/// Reads the counters of each store.
std::vector<const uint32_t*> ReadCounters(Call& call, int64_t num_stores) {
  std::vector<const uint32_t*> counters;
  for (int64_t s = 0; s < num_stores && !call.failed(); ++s) {
    counters.push_back(call.Operand("counters", ffi::U32, {kNumCounters}).as<uint32_t>());
  }
  return counters;
}

/// Computes the digest of a batch's keys.
ffi::Error Digest(Call& call) {
  const Array keys = ReadKeys(call);
  const Array digest = call.Result("digest", ffi::U32, {1, 2});
  return call.Launch([&](Stream stream) {
    return LaunchTicketsDigest(stream, {keys.as<uint64_t>(), keys.size(0)}, digest.as<uint64_t>());
  });
}

/// Issues the ticket of a lookup.
ffi::Error Issue(Call& call) {
  const TicketsView tickets = ReadTickets(call);
  const Array ticket = call.Result("ticket", ffi::U32, {1, -1});
  const int64_t num_stores = ticket.size(1) - kNumTicketWords;
  call.Require(num_stores >= 0, "ticket", "got ", num_stores, " stores, wanted at least 0");
  const Array lineage = call.Operand("lineage", ffi::U32, {2});
  const std::vector<const uint32_t*> counters = ReadCounters(call, num_stores);
  std::vector<const uint64_t*> digests;
  while (call.num_operands_left() > 0 && !call.failed()) {
    digests.push_back(call.Operand("digest", ffi::U32, {1, 2}).as<uint64_t>());
  }
  const auto layout = static_cast<uint32_t>(call.Attribute<int32_t>("layout"));
  return call.Launch([&](Stream stream) {
    return LaunchTicketsIssue(stream, tickets, digests.data(), static_cast<int>(digests.size()), counters.data(),
                              static_cast<int>(counters.size()), lineage.as<uint32_t>(), layout, ticket.as<uint32_t>());
  });
}

/// Redeems the tickets of plans. Plan `plan_of_use[u]` used store `store_of_use[u]`.
ffi::Error Redeem(Call& call) {
  const TicketsView tickets = ReadTickets(call);
  const Array is_live = call.Result("is_live", ffi::PRED, {-1});
  const Array num_misused = call.Result("num_misused", ffi::S32, {});
  const int64_t num_plans = is_live.size(0), num_stores = static_cast<int64_t>(call.num_operands_left()) - num_plans;
  const std::vector<const uint32_t*> counters = ReadCounters(call, num_stores);
  std::vector<const uint32_t*> plans;
  for (int64_t p = 0; p < num_plans; ++p) {
    plans.push_back(call.Operand("ticket", ffi::U32, {1, kNumTicketWords + num_stores}).as<uint32_t>());
  }
  const auto plan_of_use = call.Attribute<ffi::Span<const int32_t>>("plan_of_use");
  const auto store_of_use = call.Attribute<ffi::Span<const int32_t>>("store_of_use");
  std::vector<TicketUse> uses;
  for (size_t u = 0; u < plan_of_use.size(); ++u) {
    const int32_t plan = plan_of_use[u], store = u < store_of_use.size() ? store_of_use[u] : -1;
    const bool is_known = plan >= 0 && plan < num_plans && store >= 0 && store < num_stores;
    call.Require(is_known, "uses", "got plan ", plan, " of store ", store, ", wanted some of ", num_plans,
                 " plans and ", num_stores, " stores");
    if (!call.failed()) uses.push_back({plans[plan] + kNumTicketWords + store, counters[store], plan});
  }
  return call.Launch([&](Stream stream) {
    return LaunchTicketsRedeem(stream, tickets, plans.data(), static_cast<int>(num_plans), uses.data(),
                               static_cast<int>(uses.size()), is_live.as<bool>(), num_misused.as<int32_t>());
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokTicketsDigest, "tickets_digest", Digest);
JAXSOK_DEFINE_HANDLER(JaxsokTicketsIssue, "tickets_issue", Issue);
JAXSOK_DEFINE_HANDLER(JaxsokTicketsRedeem, "tickets_redeem", Redeem);

}  // namespace jaxsok

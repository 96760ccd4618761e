// Handlers of the plan noun: the distinct keys of a batch, or the uses of its bags, by owner.
#include "../kernels/plan.h"

#include <random>

#include "buffers.h"

namespace jaxsok {
namespace {

/// Returns the salt of scratch indexes. Keys aimed at one place of an index make walks as long as the number of keys.
/// No result depends on the salt, so each process draws its own, which callers cannot know.
uint64_t ScratchSalt() {
  static const uint64_t salt = [] {
    std::random_device draw;
    return uint64_t{draw()} << 32 | draw();
  }();
  return salt;
}

OwnersView ReadOwners(Call& call) {
  const Array tables = call.Operand("tables", ffi::U32, {-1, kNumTableWords});
  const Array partition_owners = call.Operand("partition_owners", ffi::U32, {kNumPartitions});
  return {tables.as<uint32_t>(), static_cast<int32_t>(tables.size(0)), partition_owners.as<uint32_t>(),
          call.Attribute<int32_t>("num_shards")};
}

/// Makes requests of the distinct (table, key) pairs, ordered by owner.
ffi::Error PlanRequests(Call& call) {
  const BatchView batch = ReadBatch(call);
  const int64_t n = batch.num_keys;
  const OwnersView owners = ReadOwners(call);
  const bool by_hash = call.Attribute<int32_t>("by_hash") != 0;
  RequestsView out;
  out.requests = call.Result("requests", ffi::U32, {n, 4}).as<Request>();
  out.inverse = call.Result("inverse", ffi::S32, {n}).as<int32_t>();
  out.starts = call.Result("starts", ffi::S32, {int64_t{owners.num_shards} + 1}).as<int32_t>();
  const Array hashes = call.Result("hashes", ffi::U32, {by_hash ? n : 0, 2});
  out.hashes = by_hash ? hashes.as<uint64_t>() : nullptr;
  out.send_capacity = call.Attribute<int32_t>("send_capacity");
  const Array slots = call.Result("slots", ffi::S32, {out.send_capacity > 0 ? n : 0});
  out.slots = out.send_capacity > 0 ? slots.as<int32_t>() : nullptr;
  call.Require(!by_hash || out.slots == nullptr, "send_capacity", "wanted 0 for requests by hash");
  out.digest = call.Result("digest", ffi::U32, {1, 2}).as<uint64_t>();
  void* workspace = call.Workspace(PlanRequestsWorkspaceBytes(n));
  return call.Launch(
      [&](Stream stream) { return LaunchPlanRequests(stream, batch, ScratchSalt(), owners, out, workspace); });
}

/// Orders the uses of bags by owner.
ffi::Error PlanUses(Call& call) {
  const BatchView batch = ReadBatch(call);
  const OwnersView owners = ReadOwners(call);
  UsesView out;
  const Array uses = call.Result("uses", ffi::U32, {batch.num_keys, -1});
  call.Require(uses.size(1) == 2 || uses.size(1) == 4, "uses", "got ", uses.size(1), " words a use, wanted 2 or 4");
  out.uses = uses.size(1) == 4 ? uses.as<BagUse>() : nullptr;
  out.keys = uses.size(1) == 2 ? uses.as<uint64_t>() : nullptr;
  out.starts = call.Result("starts", ffi::S32, {int64_t{owners.num_shards} + 1}).as<int32_t>();
  const Array offsets = call.Result("offsets", ffi::S32, {owners.num_shards, -1});
  out.offsets = offsets.as<int32_t>();
  out.num_bags = offsets.size(1) - 1;
  out.scales = call.Result("scales", ffi::F32, {out.num_bags}).as<float>();
  void* workspace = call.Workspace(PlanUsesWorkspaceBytes(batch.num_keys));
  return call.Launch([&](Stream stream) { return LaunchPlanUses(stream, batch, owners, out, workspace); });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokPlanUses, "plan_uses", PlanUses);
JAXSOK_DEFINE_HANDLER(JaxsokPlanRequests, "plan_requests", PlanRequests);

}  // namespace jaxsok

JAXSOK_VISIBLE int64_t JaxsokPlanRequestsWorkspaceBytes(int64_t num_keys) {
  return jaxsok::PlanRequestsWorkspaceBytes(num_keys);
}

JAXSOK_VISIBLE int64_t JaxsokPlanUsesWorkspaceBytes(int64_t num_keys) {
  return jaxsok::PlanUsesWorkspaceBytes(num_keys);
}

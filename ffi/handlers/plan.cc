// Handlers of the plan noun: the distinct keys of a batch, by first position or by owner.
#include "../kernels/plan.h"

#include <random>

#include "buffers.h"

namespace jaxsok {
namespace {

/// Mixed into the hashes of scratch indexes: keys aimed at one place of an index take a walk each that is as long as
/// there are keys. No result depends on it, so each process draws its own, and nobody outside can know it.
uint64_t ScratchSalt() {
  static const uint64_t salt = [] {
    std::random_device draw;
    return uint64_t{draw()} << 32 | draw();
  }();
  return salt;
}

/// Distinct (table, key) pairs by first position, with inverse and multiplicities.
ffi::Error PlanImpl(StreamArgument stream, Keys keys, Offsets offsets, Weights weights, Features features,
                    ffi::Result<Keys> unique, ffi::Result<TableIds> unique_tables, ffi::Result<Inverse> inverse,
                    ffi::Result<ffi::Buffer<ffi::S32>> multiplicity, ffi::Result<ffi::Buffer<ffi::S32>> num_unique,
                    ffi::Result<Workspace> workspace, int32_t num_tiles) {
  constexpr char kOp[] = "plan";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, num_tiles, kOp, batch));
  JAXSOK_RETURN_IF_ERROR(CheckShape(unique->dimensions(), {batch.num_keys, 2}, "unique", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), PlanWorkspaceBytes(batch.num_keys), "workspace", kOp));
  PlanView plan;
  plan.unique = reinterpret_cast<uint64_t*>(unique->typed_data());
  plan.unique_tables = unique_tables->typed_data();
  plan.inverse = inverse->typed_data();
  plan.multiplicity = multiplicity->typed_data();
  plan.num_unique = num_unique->typed_data();
  StreamScope scope(stream);
  return FromLaunch(LaunchPlan(scope.get(), batch, ScratchSalt(), plan, workspace->typed_data()), kOp);
}

/// Distinct (table, key) pairs as requests, ordered by owner.
ffi::Error PlanRequestsImpl(StreamArgument stream, Keys keys, Offsets offsets, Weights weights, Features features,
                            Tables tables, ffi::Buffer<ffi::U32> partition_owners, ffi::Result<Requests> requests,
                            ffi::Result<Inverse> inverse, ffi::Result<ffi::Buffer<ffi::S32>> starts,
                            ffi::Result<Keys> hashes, ffi::Result<Workspace> workspace, int32_t num_tiles,
                            int32_t num_shards, int32_t by_hash) {
  constexpr char kOp[] = "plan_requests";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, num_tiles, kOp, batch));
  const int64_t n = batch.num_keys;
  JAXSOK_RETURN_IF_ERROR(CheckShape(tables.dimensions(), {-1, kNumTableWords}, "tables", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(partition_owners.dimensions(), {kNumPartitions}, "partition_owners", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(requests->dimensions(), {n, 4}, "requests", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(inverse->dimensions(), {n}, "inverse", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(starts->dimensions(), {int64_t{num_shards} + 1}, "starts", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(hashes->dimensions(), {by_hash != 0 ? n : 0, 2}, "hashes", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(), PlanRequestsWorkspaceBytes(n), "workspace", kOp));
  const OwnersView owners = {tables.typed_data(), static_cast<int32_t>(tables.dimensions()[0]),
                             partition_owners.typed_data(), num_shards};
  RequestsView out;
  out.requests = reinterpret_cast<Request*>(requests->typed_data());
  out.inverse = inverse->typed_data();
  out.starts = starts->typed_data();
  out.hashes = by_hash != 0 ? reinterpret_cast<uint64_t*>(hashes->typed_data()) : nullptr;
  StreamScope scope(stream);
  return FromLaunch(LaunchPlanRequests(scope.get(), batch, ScratchSalt(), owners, out, workspace->typed_data()), kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokPlan, PlanImpl,
                      BindStream()
                          .Arg<Keys>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .Ret<Keys>()
                          .Ret<TableIds>()
                          .Ret<Inverse>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<Workspace>()
                          .Attr<int32_t>("num_tiles"));

JAXSOK_DEFINE_HANDLER(JaxsokPlanRequests, PlanRequestsImpl,
                      BindStream()
                          .Arg<Keys>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .Arg<Tables>()
                          .Arg<ffi::Buffer<ffi::U32>>()
                          .Ret<Requests>()
                          .Ret<Inverse>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<Keys>()
                          .Ret<Workspace>()
                          .Attr<int32_t>("num_tiles")
                          .Attr<int32_t>("num_shards")
                          .Attr<int32_t>("by_hash"));

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokPlanWorkspaceBytes(int64_t num_keys) {
  return jaxsok::PlanWorkspaceBytes(num_keys);
}

extern "C" __attribute__((visibility("default"))) int64_t JaxsokPlanRequestsWorkspaceBytes(int64_t num_keys) {
  return jaxsok::PlanRequestsWorkspaceBytes(num_keys);
}

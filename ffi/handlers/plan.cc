// Handler of the plan noun: the distinct keys of a batch.
#include "../kernels/plan.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Distinct (table, key) pairs by first position, with inverse and multiplicities.
ffi::Error PlanImpl(StreamArgument stream, Keys keys, Offsets offsets, Weights weights, Features features,
                    ffi::Result<Keys> unique, ffi::Result<TableIds> unique_tables,
                    ffi::Result<ffi::Buffer<ffi::S32>> inverse, ffi::Result<ffi::Buffer<ffi::S32>> multiplicity,
                    ffi::Result<ffi::Buffer<ffi::S32>> num_unique, ffi::Result<Workspace> workspace,
                    int32_t num_tiles) {
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
  return FromLaunch(LaunchPlan(scope.get(), batch, plan, workspace->typed_data()), kOp);
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
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<Workspace>()
                          .Attr<int32_t>("num_tiles"));

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokPlanWorkspaceBytes(int64_t num_keys) {
  return jaxsok::PlanWorkspaceBytes(num_keys);
}

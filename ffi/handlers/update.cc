// Handler of the update noun: bag gradients in, rows and optimizer state stepped in place.
#include "buffers.h"

namespace jaxsok {
namespace {

/// Sums the gradients of each row that the batch used and steps it once.
ffi::Error Update(Call& call) {
  Store store = ReadStore(call);
  ReadTables(call, store.view);
  BatchView batch = ReadBatch(call);
  const Array row_ids = call.Operand("row_ids", ffi::U32, {batch.num_keys});
  const Array is_live = call.Operand("is_live", ffi::PRED, {-1});
  const Array step = call.Operand("step", ffi::U32, {});
  UpdateSpec spec{call.Attribute<int32_t>("optimizer"), call.Attribute<int32_t>("row_gradient"),
                  call.Attribute<int32_t>("rounding")};
  const bool is_program = spec.optimizer == kOptimizerProgram;
  const Array hyper = call.Operand("hyper", ffi::F32, {is_program ? -1 : kNumHyper});
  const auto words = call.Attribute<ffi::Span<const int32_t>>("program");
  const auto num_registers = call.Attribute<int32_t>("num_registers");
  RowProgram program;
  if (is_program && !call.failed()) {
    const char* error = program.Read(words.begin(), static_cast<int64_t>(words.size()), num_registers,
                                     store.states.num_states, hyper.size(0));
    if (error != nullptr) return ffi::Error::InvalidArgument(std::string("update: ") + error);
    spec.program = &program;
  }
  // Neither has elements where the batch tells as much.
  const Array table_ids = call.Operand("table_ids", ffi::U32, {-1}),
              num_uses = call.Operand("num_uses", ffi::F32, {-1});
  if (table_ids.size(0) != 0) {
    call.CheckShape("table_ids", table_ids.dims(), {batch.num_keys});
    batch.tables = table_ids.as<uint32_t>();
  }
  if (num_uses.size(0) != 0) {
    call.CheckShape("num_uses", num_uses.dims(), {batch.num_keys});
    spec.num_uses = num_uses.as<float>();
  }
  RowArrays arrays(call, "gradients");
  for (int32_t f = 0; f < batch.num_features; ++f) arrays.Add(call.Operand("gradients"));
  const GradientsView gradients = {arrays.dtype(), arrays.data()};
  const Array num_nonfinite = call.Result("num_nonfinite", ffi::S32, {store.view.num_tables});
  const Array num_stale = call.Result("num_stale", ffi::S32, {});
  void* workspace = call.Workspace(UpdateWorkspaceBytes(batch.num_keys, store.view.dim));
  return call.Launch([&](Stream stream) {
    return LaunchUpdate(stream, store.view, store.states, spec, hyper.as<float>(), step.as<uint32_t>(),
                        is_live.as<bool>(), batch, row_ids.as<uint32_t>(), gradients, num_nonfinite.as<int32_t>(),
                        num_stale.as<int32_t>(), workspace);
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokUpdate, "update", Update);

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokUpdateWorkspaceBytes(int64_t num_keys, int32_t dim) {
  return jaxsok::UpdateWorkspaceBytes(num_keys, dim);
}

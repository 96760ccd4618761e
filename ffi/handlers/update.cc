// Handler of the update noun: bag gradients in, rows and optimizer state stepped in place.
#include "buffers.h"

namespace jaxsok {
namespace {

/// Sums the gradients of each row that the batch used and steps it once.
ffi::Error UpdateImpl(StreamArgument stream, Counters counters, ffi::Buffer<ffi::PRED> is_live, Keys keys,
                      Offsets offsets, Weights weights, Features features, RowIds row_ids, ffi::Buffer<ffi::F32> hyper,
                      Tables tables, Seed seed, Scalar step, TableIds table_ids, ffi::Buffer<ffi::F32> num_uses,
                      ffi::RemainingArgs args, ffi::Result<ffi::Buffer<ffi::S32>> num_nonfinite,
                      ffi::Result<ffi::Buffer<ffi::S32>> num_stale, ffi::Result<Workspace> workspace,
                      ffi::RemainingRets rets, int32_t num_slabs, int32_t num_states, int32_t num_tiles,
                      int32_t optimizer, int32_t row_gradient, int32_t rounding, ffi::Span<const int32_t> program_words,
                      int32_t num_registers) {
  constexpr char kOp[] = "update";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBatch(keys, offsets, weights, features, num_tiles, kOp, batch));
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_ids.dimensions(), {batch.num_keys}, "row_ids", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(is_live.dimensions(), {-1}, "is_live", kOp));
  JAXSOK_RETURN_IF_ERROR(
      CheckShape(hyper.dimensions(), {optimizer == kOptimizerProgram ? -1 : kNumHyper}, "hyper", kOp));
  const int64_t num_tables = num_nonfinite->dimensions()[0];
  JAXSOK_RETURN_IF_ERROR(CheckShape(step.dimensions(), {}, "step", kOp));
  if (table_ids.element_count() != 0) {
    JAXSOK_RETURN_IF_ERROR(CheckShape(table_ids.dimensions(), {batch.num_keys}, "table_ids", kOp));
    batch.tables = table_ids.typed_data();
  }
  UpdateSpec spec{optimizer, row_gradient, rounding};
  RowProgram program;
  if (optimizer == kOptimizerProgram) {
    const char* error = program.Read(program_words.begin(), static_cast<int64_t>(program_words.size()), num_registers,
                                     num_states, hyper.dimensions()[0]);
    if (error != nullptr) return ffi::Error::InvalidArgument(std::string("update: ") + error);
    spec.program = &program;
  }
  if (num_uses.element_count() != 0) {
    JAXSOK_RETURN_IF_ERROR(CheckShape(num_uses.dimensions(), {batch.num_keys}, "num_uses", kOp));
    spec.num_uses = num_uses.typed_data();
  }
  StoreView store{};
  StateView states{};
  SlabReader slabs(args, num_slabs, kOp);
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRows(store));
  JAXSOK_RETURN_IF_ERROR(slabs.ReadStates(num_states, states));
  JAXSOK_RETURN_IF_ERROR(slabs.ReadRecords(store.records));
  JAXSOK_RETURN_IF_ERROR(CheckSlabAliases(args, rets, 0, 0, static_cast<size_t>(num_slabs) * (1 + num_states), kOp));
  JAXSOK_RETURN_IF_ERROR(
      CheckBytes(workspace->size_bytes(), UpdateWorkspaceBytes(batch.num_keys, store.dim), "workspace", kOp));
  JAXSOK_RETURN_IF_ERROR(ReadTables(tables, seed, kOp, store, num_tables));
  store.starts = slabs.starts();
  store.capacity = slabs.capacity();
  JAXSOK_RETURN_IF_ERROR(CheckCounters(counters, store.capacity, kOp));
  store.counters = counters.typed_data();
  std::vector<const void*> data;
  GradientsView gradients;
  JAXSOK_RETURN_IF_ERROR(ReadGradients(args, slabs.next(), batch.num_features, kOp, data, gradients));
  StreamScope scope(stream);
  return FromLaunch(LaunchUpdate(scope.get(), store, states, spec, hyper.typed_data(), step.typed_data(),
                                 is_live.typed_data(), batch, row_ids.typed_data(), gradients,
                                 num_nonfinite->typed_data(), num_stale->typed_data(), workspace->typed_data()),
                    kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokUpdate, UpdateImpl,
                      BindStream()
                          .Arg<Counters>()
                          .Arg<ffi::Buffer<ffi::PRED>>()
                          .Arg<Keys>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .Arg<RowIds>()
                          .Arg<ffi::Buffer<ffi::F32>>()
                          .Arg<Tables>()
                          .Arg<Seed>()
                          .Arg<Scalar>()
                          .Arg<TableIds>()
                          .Arg<ffi::Buffer<ffi::F32>>()
                          .RemainingArgs()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<Workspace>()
                          .RemainingRets()
                          .Attr<int32_t>("num_slabs")
                          .Attr<int32_t>("num_states")
                          .Attr<int32_t>("num_tiles")
                          .Attr<int32_t>("optimizer")
                          .Attr<int32_t>("row_gradient")
                          .Attr<int32_t>("rounding")
                          .Attr<ffi::Span<const int32_t>>("program")
                          .Attr<int32_t>("num_registers"));

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokUpdateWorkspaceBytes(int64_t num_keys, int32_t dim) {
  return jaxsok::UpdateWorkspaceBytes(num_keys, dim);
}

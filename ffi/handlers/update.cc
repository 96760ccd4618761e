// Handler of the update noun: it applies bag gradients to rows and optimizer state in place.
#include <vector>

#include "../kernels/combine.h"
#include "buffers.h"

namespace jaxsok {
namespace {

/// The inputs of a step except the gradients; the call passes the operands in the order of `Read`.
struct Step {
  Store store;
  BatchView batch{};
  UpdateSpec spec{};
  RowProgram program;
  Array row_ids, is_live, step, hyper, num_nonfinite, num_stale;
  void* workspace = nullptr;

  void Read(Call& call) {
    store = ReadStore(call);
    ReadTables(call, store.view);
    batch = ReadBatch(call);
    row_ids = call.Operand("row_ids", ffi::U32, {batch.num_keys});
    is_live = call.Operand("is_live", ffi::PRED, {-1});
    step = call.Operand("step", ffi::U32, {});
    spec = {call.Attribute<int32_t>("optimizer"), call.Attribute<int32_t>("row_gradient"),
            call.Attribute<int32_t>("rounding")};
    const bool is_program = spec.optimizer == kOptimizerProgram;
    hyper = call.Operand("hyper", ffi::F32, {is_program ? -1 : kNumHyper});
    const auto words = call.Attribute<ffi::Span<const int32_t>>("program");
    const auto num_registers = call.Attribute<int32_t>("num_registers");
    if (is_program && !call.failed()) {
      const char* error = program.Read(words.begin(), static_cast<int64_t>(words.size()), num_registers,
                                       store.states.num_states, hyper.size(0));
      call.Require(error == nullptr, "program", error == nullptr ? "" : error);
      spec.program = &program;
    }
    ReadTableIds(call, batch);
    const Array num_uses = call.Operand("num_uses", ffi::F32, {-1});  // empty: the batch has them
    if (num_uses.size(0) != 0) {
      call.CheckShape("num_uses", num_uses.dims(), {batch.num_keys});
      spec.num_uses = num_uses.as<float>();
    }
  }
  /// Reads the results, but for the workspace.
  void ReadResults(Call& call) {
    num_nonfinite = call.Result("num_nonfinite", ffi::S32, {store.view.num_tables});
    num_stale = call.Result("num_stale", ffi::S32, {});
  }
  void ReadWorkspace(Call& call) { workspace = call.Workspace(UpdateWorkspaceBytes(batch.num_keys, store.view.dim)); }
  UpdateArguments arguments() const {
    return {store.states,
            spec,
            hyper.as<float>(),
            step.as<uint32_t>(),
            is_live.as<bool>(),
            batch,
            row_ids.as<uint32_t>(),
            num_nonfinite.as<int32_t>(),
            num_stale.as<int32_t>(),
            workspace};
  }
};

/// Sums the gradients of each row that the batch used and steps it once.
ffi::Error Update(Call& call) {
  Step step;
  step.Read(call);
  RowArrays arrays(call, "gradients");
  arrays.AddOfFeatures(step.batch.num_features, call.num_operands_left(), [&] { return call.Operand("gradients"); });
  const GradientsView gradients = {arrays.dtype(), arrays.data()};
  step.ReadResults(call);
  step.ReadWorkspace(call);
  return call.Launch([&](Stream stream) { return LaunchUpdate(stream, step.store.view, step.arguments(), gradients); });
}

/// Reads the gradients of a batch's bags, an array for each feature.
std::vector<const float*> ReadBagGradients(Call& call, int32_t num_features) {
  RowArrays arrays(call, "bag_gradients");
  std::vector<const float*> gradients;
  for (int32_t f = 0; f < num_features; ++f) {
    gradients.push_back(static_cast<const float*>(arrays.Add(call.Operand("bag_gradients"))));
  }
  call.Require(arrays.dtype() == kRowDtypeFloat32, "bag_gradients", "wanted float32");
  return gradients;
}

/// Sums the gradients of a batch by request, sends the sums to the owners of the rows, and steps these rows.
///
/// Sums go straight into the windows of the owners, and are read where they arrive. The batch of the step has one
/// feature: a key for each request received, whose row gradient may arrive.
ffi::Error UpdateWindow(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  const RowDtype dtype = ReadWireDtype(call);
  Step step;
  step.Read(call);
  const Array slots = call.Operand("slots", ffi::S32, {-1});
  const BatchView bags = ReadBags(call, slots.size(0), call.Attribute<int32_t>("num_bag_tiles"));
  const std::vector<const float*> bag_gradients = ReadBagGradients(call, bags.num_features);
  // Empty: the uses of the bags are sorted here.
  const Array sorted_uses = call.Operand("sorted_uses", ffi::U8, {-1});
  const bool is_sorted = sorted_uses.size(0) != 0;
  if (is_sorted) call.CheckShape("sorted_uses", sorted_uses.dims(), {SortedUsesBytes(bags.num_keys)});
  const int64_t num_lines = step.batch.num_keys;
  const Array requests = call.Operand("requests", ffi::U32, {num_lines, 4});
  ReadMeeting(call);
  const int32_t dim = step.store.view.dim;
  step.ReadResults(call);
  const Array num_uses = call.Result("num_uses", ffi::S32, {num_lines});
  void* workspace_of_bags = call.Workspace(UpdateWorkspaceBytes(bags.num_keys, dim));
  step.ReadWorkspace(call);
  return call.Launch([&](Stream stream) -> LaunchError {
    const int64_t line_bytes = int64_t{dim} * NumberBytes(dtype);
    Stream second;
    WindowExchange exchange(stream, window, call.device(), kCallUpdate, num_lines * line_bytes, &second);
    if (exchange.error() != nullptr) return exchange.error();
    const LineTarget target = exchange.Target(num_lines / exchange.num_shards(), line_bytes);
    UpdateArguments arguments = step.arguments();
    arguments.requests = requests.as<Request>();
    LaunchError error = LaunchSortUses(second, step.store.view, arguments);
    if (error == nullptr) {
      error = LaunchCombineTranspose(stream, bag_gradients.data(), num_lines, dim, slots.as<int32_t>(), bags, target,
                                     dtype, num_uses.as<int32_t>(), is_sorted ? sorted_uses.as<void>() : nullptr,
                                     workspace_of_bags);
    }
    if (error == nullptr) error = exchange.Meet(stream);
    if (error != nullptr) return error;
    const void* arrived = exchange.received();
    return exchange.Done(LaunchStepRows(stream, step.store.view, arguments, {dtype, &arrived}));
  });
}

/// Sends the gradients of bags to all shards, which step their rows of these bags.
///
/// Gradients go straight into the windows of the shards, and are read where they arrive. The batch of the step has a
/// feature for each shard.
ffi::Error UpdateBagsWindow(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  const RowDtype dtype = ReadWireDtype(call);
  Step step;
  step.Read(call);
  const BatchView bags = ReadBags(call, 0, call.Attribute<int32_t>("num_bag_tiles"));
  const Array scales = call.Operand("scales", ffi::F32, {-1});
  const std::vector<const float*> bag_gradients = ReadBagGradients(call, bags.num_features);
  ReadMeeting(call);
  step.ReadResults(call);
  step.ReadWorkspace(call);
  const int32_t dim = step.store.view.dim, num_shards = step.batch.num_features;
  const int64_t part_bytes = scales.size(0) * dim * NumberBytes(dtype);
  return call.Launch([&](Stream stream) -> LaunchError {
    Stream second;
    WindowExchange exchange(stream, window, call.device(), kCallUpdateBags, num_shards * part_bytes, &second);
    if (exchange.error() != nullptr) return exchange.error();
    if (num_shards != exchange.num_shards()) return "features: wanted one for each shard";
    LaunchError error = LaunchSortUses(second, step.store.view, step.arguments());
    if (error == nullptr) {
      error = LaunchSendBagGradients(stream, bag_gradients.data(), scales.as<float>(), dim, bags,
                                     exchange.Target(1, part_bytes), exchange.shard(), num_shards, dtype);
    }
    if (error == nullptr) error = exchange.Meet(stream);
    if (error != nullptr) return error;
    std::vector<const void*> gradients;
    for (int32_t s = 0; s < num_shards; ++s) {
      gradients.push_back(static_cast<const char*>(exchange.received()) + s * part_bytes);
    }
    return exchange.Done(LaunchStepRows(stream, step.store.view, step.arguments(), {dtype, gradients.data()}));
  });
}

}  // namespace

JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokUpdateBagsWindow, "update_bags_window", UpdateBagsWindow);
JAXSOK_DEFINE_HANDLER(JaxsokUpdate, "update", Update);
JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokUpdateWindow, "update_window", UpdateWindow);

}  // namespace jaxsok

JAXSOK_VISIBLE int64_t JaxsokUpdateWorkspaceBytes(int64_t num_keys, int32_t dim) {
  return jaxsok::UpdateWorkspaceBytes(num_keys, dim);
}

JAXSOK_VISIBLE int64_t JaxsokSortedUsesBytes(int64_t num_keys) { return jaxsok::SortedUsesBytes(num_keys); }

// The handler of the combine noun: bag gradients -> row gradients.
#include "../kernels/combine.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Takes the bag gradients of all features back to row gradients.
ffi::Error CombineTranspose(Call& call) {
  const Array inverse = call.Operand("inverse", ffi::S32, {-1});
  const BatchView batch = ReadBags(call, inverse.size(0), call.Attribute<int32_t>("num_tiles"));
  std::vector<Array> gradients;
  for (int32_t f = 0; f < batch.num_features; ++f) gradients.push_back(call.Operand("bag_gradients"));
  const Array row_gradients = call.Result("row_gradients");
  call.CheckShape("row_gradients", row_gradients.dims(), {-1, -1});
  const bool is_float32 = row_gradients.dtype() == ffi::F32;
  call.Require(is_float32 || row_gradients.dtype() == ffi::BF16, "row_gradients", "got dtype ", row_gradients.dtype(),
               ", wanted float32 or bfloat16");
  const int64_t num_unique = row_gradients.size(0);
  const auto dim = static_cast<int32_t>(row_gradients.size(1));
  const Array num_uses = call.Result("num_uses", ffi::S32, {num_unique});
  void* workspace = call.Workspace(UpdateWorkspaceBytes(batch.num_keys, dim));
  std::vector<const float*> data;
  for (const Array& gradient : gradients) {
    const bool is_wanted = gradient.dtype() == ffi::F32 && gradient.dims().size() != 0 && gradient.dims().back() == dim;
    call.Require(is_wanted, "bag_gradients", "wanted ", dim, " columns of float32, got another last axis or dtype");
    data.push_back(gradient.as<float>());
  }
  return call.Launch([&](Stream stream) {
    return LaunchCombineTranspose(
        stream, data.data(), num_unique, dim, inverse.as<int32_t>(), batch, LineTarget::Of(row_gradients.as<void>()),
        is_float32 ? kRowDtypeFloat32 : kRowDtypeBfloat16, num_uses.as<int32_t>(), nullptr, workspace);
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokCombineTranspose, "combine_transpose", CombineTranspose);

}  // namespace jaxsok

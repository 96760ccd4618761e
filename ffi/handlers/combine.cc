// Handlers of the combine noun: rows -> embeddings, and bag gradients -> row gradients.
#include "../kernels/combine.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// The rows of each bag into its embedding.
ffi::Error CombineImpl(StreamArgument stream, Rows rows, Inverse inverse, Offsets offsets, Weights weights,
                       Features features, ffi::Result<Rows> embeddings, int32_t num_tiles) {
  constexpr char kOp[] = "combine";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(CheckShape(features.dimensions(), {1, kNumFeatureWords}, "features", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckShape(inverse.dimensions(), {-1}, "inverse", kOp));
  JAXSOK_RETURN_IF_ERROR(ReadBags(inverse.dimensions()[0], offsets, weights, features, num_tiles, kOp, batch));
  JAXSOK_RETURN_IF_ERROR(CheckShape(rows.dimensions(), {-1, -1}, "rows", kOp));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchCombine(scope.get(), rows.typed_data(), rows.dimensions()[0], static_cast<int32_t>(rows.dimensions()[1]),
                    inverse.typed_data(), batch, embeddings->typed_data()),
      kOp);
}

/// The transpose: bag gradients of all features into row gradients.
ffi::Error CombineTransposeImpl(StreamArgument stream, Inverse inverse, Offsets offsets, Weights weights,
                                Features features, ffi::RemainingArgs args, ffi::Result<Rows> row_gradients,
                                ffi::Result<ffi::Buffer<ffi::S32>> num_uses, ffi::Result<Workspace> workspace,
                                int32_t num_tiles) {
  constexpr char kOp[] = "combine_transpose";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(CheckShape(inverse.dimensions(), {-1}, "inverse", kOp));
  JAXSOK_RETURN_IF_ERROR(ReadBags(inverse.dimensions()[0], offsets, weights, features, num_tiles, kOp, batch));
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_gradients->dimensions(), {-1, -1}, "row_gradients", kOp));
  const int64_t num_unique = row_gradients->dimensions()[0], dim = row_gradients->dimensions()[1];
  JAXSOK_RETURN_IF_ERROR(CheckShape(num_uses->dimensions(), {num_unique}, "num_uses", kOp));
  JAXSOK_RETURN_IF_ERROR(CheckBytes(workspace->size_bytes(),
                                    UpdateWorkspaceBytes(batch.num_keys, static_cast<int32_t>(dim)), "workspace", kOp));
  std::vector<const float*> bag_gradients;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    auto buffer = args.get<ffi::Buffer<ffi::F32>>(f);
    if (!buffer.has_value()) return buffer.error();
    const auto dims = buffer->dimensions();
    if (dims.size() == 0 || dims.back() != dim) {
      return ffi::Error::InvalidArgument("combine_transpose: bag_gradients: wanted " + std::to_string(dim) +
                                         " columns, got another last axis");
    }
    bag_gradients.push_back(buffer->typed_data());
  }
  StreamScope scope(stream);
  return FromLaunch(LaunchCombineTranspose(scope.get(), bag_gradients.data(), num_unique, static_cast<int32_t>(dim),
                                           inverse.typed_data(), batch, row_gradients->typed_data(),
                                           num_uses->typed_data(), workspace->typed_data()),
                    kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(
    JaxsokCombine, CombineImpl,
    BindStream().Arg<Rows>().Arg<Inverse>().Arg<Offsets>().Arg<Weights>().Arg<Features>().Ret<Rows>().Attr<int32_t>(
        "num_tiles"));

JAXSOK_DEFINE_HANDLER(JaxsokCombineTranspose, CombineTransposeImpl,
                      BindStream()
                          .Arg<Inverse>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .RemainingArgs()
                          .Ret<Rows>()
                          .Ret<ffi::Buffer<ffi::S32>>()
                          .Ret<Workspace>()
                          .Attr<int32_t>("num_tiles"));

}  // namespace jaxsok

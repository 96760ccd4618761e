// Handlers of the combine noun: rows -> embeddings, and bag gradients -> row gradients.
#include "../kernels/combine.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// The one feature of a combine: its words, and as many positions as `inverse` has.
ffi::Error ReadBags(const ffi::Buffer<ffi::S32>& inverse, const Offsets& offsets, const Weights& weights,
                    const Features& features, int32_t num_tiles, const char* op, BatchView& batch) {
  JAXSOK_RETURN_IF_ERROR(CheckShape(inverse.dimensions(), {-1}, "inverse", op));
  JAXSOK_RETURN_IF_ERROR(CheckShape(features.dimensions(), {1, kNumFeatureWords}, "features", op));
  batch.offsets = offsets.typed_data();
  batch.weights = weights.typed_data();
  batch.features = features.typed_data();
  batch.num_keys = inverse.dimensions()[0];
  batch.num_features = 1;
  batch.num_tiles = num_tiles;
  batch.num_offsets = static_cast<int64_t>(offsets.element_count());
  return ffi::Error::Success();
}

/// The rows of each bag into its embedding.
ffi::Error CombineImpl(StreamArgument stream, Rows rows, ffi::Buffer<ffi::S32> inverse, Offsets offsets,
                       Weights weights, Features features, ffi::Result<Rows> embeddings, int32_t num_tiles) {
  constexpr char kOp[] = "combine";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBags(inverse, offsets, weights, features, num_tiles, kOp, batch));
  JAXSOK_RETURN_IF_ERROR(CheckShape(rows.dimensions(), {-1, -1}, "rows", kOp));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchCombine(scope.get(), rows.typed_data(), rows.dimensions()[0], static_cast<int32_t>(rows.dimensions()[1]),
                    inverse.typed_data(), batch, embeddings->typed_data()),
      kOp);
}

/// The transpose: bag gradients into row gradients.
ffi::Error CombineTransposeImpl(StreamArgument stream, Rows bag_gradients, ffi::Buffer<ffi::S32> inverse,
                                Offsets offsets, Weights weights, Features features, ffi::Result<Rows> row_gradients,
                                ffi::Result<Workspace> workspace, int32_t num_tiles) {
  constexpr char kOp[] = "combine_transpose";
  BatchView batch{};
  JAXSOK_RETURN_IF_ERROR(ReadBags(inverse, offsets, weights, features, num_tiles, kOp, batch));
  JAXSOK_RETURN_IF_ERROR(CheckShape(row_gradients->dimensions(), {-1, -1}, "row_gradients", kOp));
  const int32_t dim = static_cast<int32_t>(row_gradients->dimensions()[1]);
  JAXSOK_RETURN_IF_ERROR(
      CheckBytes(workspace->size_bytes(), UpdateWorkspaceBytes(batch.num_keys, dim), "workspace", kOp));
  StreamScope scope(stream);
  return FromLaunch(
      LaunchCombineTranspose(scope.get(), bag_gradients.typed_data(), row_gradients->dimensions()[0], dim,
                             inverse.typed_data(), batch, row_gradients->typed_data(), workspace->typed_data()),
      kOp);
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokCombine, CombineImpl,
                      BindStream()
                          .Arg<Rows>()
                          .Arg<ffi::Buffer<ffi::S32>>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .Ret<Rows>()
                          .Attr<int32_t>("num_tiles"));

JAXSOK_DEFINE_HANDLER(JaxsokCombineTranspose, CombineTransposeImpl,
                      BindStream()
                          .Arg<Rows>()
                          .Arg<ffi::Buffer<ffi::S32>>()
                          .Arg<Offsets>()
                          .Arg<Weights>()
                          .Arg<Features>()
                          .Ret<Rows>()
                          .Ret<Workspace>()
                          .Attr<int32_t>("num_tiles"));

}  // namespace jaxsok

// The kernels of an update, by the dtype of rows and by optimizer, each compiled in a separate file.
#ifndef JAXSOK_KERNELS_UPDATE_CUDA_H_
#define JAXSOK_KERNELS_UPDATE_CUDA_H_

#include "update.h"
#include "uses_cuda.cuh"

namespace jaxsok {

/// The inputs of an update other than the store.
struct UpdateArguments {
  const StateView& states;
  const UpdateSpec& spec;
  const float* hyper;
  const uint32_t* step;
  const BatchView& batch;
  int32_t gradient_bytes;  // of one number
  int32_t* num_nonfinite;
};

/// The kernels that step the rows whose uses are listed, by an optimizer of core/row_update.h (update_cuda.cuh).
template <typename Row, typename Step>
struct StepOf {
  static LaunchError Launch(Stream stream, const StoreView& store, const UpdateArguments& a,
                            const FeaturePointers<const void>& gradients, UsesWorkspace& w, int end_bit);
};

/// The kernels that do the same by a row program (update_program_cuda.cuh).
template <typename Row>
struct ProgramOf {
  static LaunchError Launch(Stream stream, const StoreView& store, const UpdateArguments& a,
                            const FeaturePointers<const void>& gradients, UsesWorkspace& w, int end_bit);
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_UPDATE_CUDA_H_

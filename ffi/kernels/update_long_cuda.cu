// The sums of rows with many uses, where a kernel after this one steps them: without an optimizer, and in float32
// whatever rows and gradients are stored in.
#include "uses_cuda.cuh"

namespace jaxsok {
namespace {

struct LaunchSumsAlone {
  Stream stream;
  const UseView& view;
  const UsesWorkspace& w;
  template <int kVector, int kPerLane>
  LaunchError operator()(int lanes) const {
    const unsigned threads = static_cast<unsigned>(kChunkLanes * lanes);
    SumLongKernel<SumsAlone, kVector, kPerLane><<<kLongBlocks, threads, 0, stream>>>(SumsAlone{}, view, w, lanes);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    return nullptr;
  }
};

}  // namespace

LaunchError LaunchSumLong(Stream stream, const UseView& view, const UsesWorkspace& w, LaneShape shape) {
  const LaunchSumsAlone sums{stream, view, w};
  return shape.vector == 8 ? DispatchVectorsOf8(view.dim, shape, sums) : DispatchShape(view.dim, shape, sums);
}

}  // namespace jaxsok

// Sums of rows with many uses, for a later kernel that steps them: without an optimizer, and in float32 for any dtype
// of rows and gradients.
#include "uses_sum_cuda.cuh"

namespace jaxsok {
LaunchError LaunchSumLong(Stream stream, const UseView& view, const UsesWorkspace& w, LaneShape shape) {
  const auto sum = [&](auto compiled) {
    SumLongKernel<SumsAlone, compiled.kVector, compiled.kPerLane>
        <<<NumLongBlocks(), kChunkLanes * compiled.lanes, 0, stream>>>(SumsAlone{}, view, w, compiled.lanes);
    return LastLaunchError();
  };
  return shape.vector == 8 ? DispatchVectorsOf8(view.dim, shape, sum) : DispatchShape(view.dim, shape, sum);
}

}  // namespace jaxsok

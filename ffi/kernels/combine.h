// Takes the gradients of bags back to rows, the transpose of combining, which lookups do (lookup.h); or sends them to
// the shards that do so.
// Law 4: <combine(x), y> = <x, transpose(y)>.
#ifndef JAXSOK_KERNELS_COMBINE_H_
#define JAXSOK_KERNELS_COMBINE_H_

#include "lookup.h"
#include "plan.h"
#include "update.h"

namespace jaxsok {

/// Takes bag gradients back to rows: any number of features, of any kind, whose rows are in one array.
///
/// Pre    : bag_gradients[f] is [num_bags, dim] of feature f; batch.keys is not read. inverse[i] in [0, num_unique) is
///          the row of position i, counted over all features; anything else is padding. `dtype`: float32, or bfloat16,
///          to which sums are rounded.
/// Post   : row_gradients[u] is the sum over the uses of row u, in the order of core/row_update.h, by position over all
///          features; num_uses[u] is their number. Rows without uses get zeros, but windows are not written for them.
///          Positions of a bag whose divisor is zero are no uses, as for LaunchUpdate.
///
/// `sorted_uses`: those that LaunchSortByRow sorted for the same batch; nullptr: they are sorted here.
LaunchError LaunchCombineTranspose(Stream stream, const float* const* bag_gradients, int64_t num_unique, int32_t dim,
                                   const int32_t* inverse, const BatchView& batch, const LineTarget& row_gradients,
                                   RowDtype dtype, int32_t* num_uses, void* sorted_uses, void* workspace);

/// Sorts the uses of a batch by row, which needs no gradient: the first part of LaunchCombineTranspose. The CPU does
/// all in the second.
///
/// Post   : `sorted_uses`, of SortedUsesBytes(batch.num_keys), is what LaunchCombineTranspose reads.
LaunchError LaunchSortByRow(Stream stream, int64_t num_unique, const int32_t* inverse, const BatchView& batch,
                            void* sorted_uses, void* workspace);

/// Writes the gradients of bags into the windows of all shards, times the scales of their bags.
///
/// Pre    : bag_gradients[f] is [num_bags, dim] of feature f; of `bags` only the features are read. scales[b] is the
///          scale of bag b, counted over all features (UsesView). windows.parts[s]: where this shard's lines begin in
///          the window of shard s.
/// Post   : line b of each window is the scaled gradient of bag b, as `dtype` (float32 or bfloat16).
LaunchError LaunchSendBagGradients(Stream stream, const float* const* bag_gradients, const float* scales, int32_t dim,
                                   const BatchView& bags, const LineTarget& windows, int32_t shard, int32_t num_shards,
                                   RowDtype dtype);

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_COMBINE_H_

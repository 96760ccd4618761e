// Distinct keys on a GPU: the passes of index_cuda.cuh over a scratch index in the workspace, and sorts of their
// results by owner.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "index_cuda.cuh"
#include "plan.h"
#include "sort_cuda.h"

namespace jaxsok {
namespace {

/// A sink that makes new pairs the next distinct keys.
struct PlanSink {
  IndexView index;
  PlanView plan;
  uint32_t num_keys;
  uint64_t salt;

  // The scratch index is half empty for any keys, and callers cannot aim at an index with a secret salt, so a walk may
  // go all the way round.
  __device__ uint32_t MaxProbes() const { return index.num_buckets; }
  __device__ uint64_t Salt() const { return salt; }
  __device__ const IndexView& Index() const { return index; }
  __device__ uint32_t Available() const { return num_keys; }
  __device__ uint32_t RowOf(uint32_t ordinal) const { return ordinal; }
  __device__ void WriteRecord(uint32_t ordinal, uint64_t key, uint32_t table) const {
    plan.unique[ordinal] = key;
    plan.unique_tables[ordinal] = table;
  }
  __device__ uint64_t KeyOf(uint32_t ordinal) const { return plan.unique[ordinal]; }
  __device__ uint32_t TableOf(uint32_t ordinal) const { return plan.unique_tables[ordinal]; }
  __device__ int LanesOfRow() const { return 1; }
  __device__ void WriteRow(uint32_t, uint64_t, uint32_t, int, int) const {}
  __device__ void CountNew(uint32_t, int) const {}
  __device__ void Commit(uint32_t num_new) const { *plan.num_unique = static_cast<int32_t>(num_new); }
  __device__ void SawUnplaced() const {}
  __device__ void SawProbes(int) const {}
  __device__ void SawEntry(uint64_t, uint32_t, uint32_t) const {}
  __device__ int NumTables() const { return kSharedTables + 1; }
};

// Empties the scratch index and gives every output its value beyond the distinct keys.
__global__ void __launch_bounds__(kBlock) PlanPrepareKernel(PlanSink sink, InsertControl* control) {
  const int64_t start = int64_t{blockIdx.x} * kBlock + threadIdx.x, stride = int64_t{gridDim.x} * kBlock;
  uint4* words = reinterpret_cast<uint4*>(sink.index.buckets);
  for (int64_t i = start; i < int64_t{sink.index.num_buckets} * kEntriesPerBucket; i += stride) {
    words[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int64_t i = start; i < sink.num_keys; i += stride) {
    sink.plan.unique[i] = kPaddingKey;
    sink.plan.unique_tables[i] = 0;
    sink.plan.multiplicity[i] = 0;
  }
  if (start < static_cast<int64_t>(sizeof(InsertControl) / 4)) reinterpret_cast<uint32_t*>(control)[start] = 0;
  if (start == 0) *sink.plan.num_unique = 0;
}

// One thread, one position. `inverse` holds kPendingRow until it is known. Positions outside all bags are padding.
__global__ void __launch_bounds__(kBlock) PlanClaimKernel(PlanSink sink, InsertWorkspace w, BatchView batch) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  bool pending = false;
  if (i < sink.num_keys) {
    const uint64_t key = __ldg(batch.keys + i);
    const Feature f = Feature::Load(batch.features, FeatureAt(batch.features, batch.num_features, kFeatureKeyStart,
                                                              static_cast<int32_t>(i), batch.num_keys));
    int32_t first, last;
    f.Bags(batch.offsets, &first, &last);
    const int32_t at_feature = static_cast<int32_t>(i) - f.key_start;
    if (key == kPaddingKey || at_feature < first || at_feature >= last) {
      sink.plan.inverse[i] = static_cast<int32_t>(kNoRow);
    } else {
      const ProbeResult at = Claim(sink.index, key, static_cast<uint32_t>(f.table), sink.Salt(), sink.MaxProbes(),
                                   static_cast<uint32_t>(i));
      sink.plan.inverse[i] = static_cast<int32_t>(kPendingRow);
      w.entry_of[i] = at.entry;
      pending = true;
    }
  }
  const int num_pending = __syncthreads_count(pending);
  if (threadIdx.x == 0 && num_pending != 0) atomicAdd(&w.control->num_pending, static_cast<uint32_t>(num_pending));
}

// One thread, one position. Lanes of a warp with one key add to its multiplicity together.
__global__ void __launch_bounds__(kBlock) PlanResolveKernel(PlanSink sink, InsertWorkspace w) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  uint32_t at = kNoRow;
  if (i < sink.num_keys) {
    at = static_cast<uint32_t>(sink.plan.inverse[i]);
    if (at == kPendingRow) at = static_cast<uint32_t>(LoadHalf(sink.index.EntryAt(w.entry_of[i])));
    sink.plan.inverse[i] = static_cast<int32_t>(at == kNoRow ? sink.num_keys : at);
  }
  const unsigned same = __match_any_sync(~0u, at);
  if (at != kNoRow && __ffs(same) - 1 == static_cast<int>(threadIdx.x % kWarp)) {
    atomicAdd(sink.plan.multiplicity + at, __popc(same));
  }
}

/// The inputs and outputs of the sorts, by number of a distinct key or by place.
struct OrderWorkspace {
  uint64_t* hashes;         // by number; nullptr: the order is not by hash
  uint64_t* sorted_hashes;  // the output of the sort
  uint32_t* owners;         // by number
  uint32_t* moved_owners;   // in the order of the hashes
  uint32_t* sorted_owners;  // by place
  uint32_t* order;          // numbers
  uint32_t* sorted_order;
  void* sort_storage;
  size_t sort_bytes;
};

/// Sorts the numbers of distinct keys by hash.
LaunchError SortByHash(Stream stream, const OrderWorkspace& w, int64_t num_keys) {
  size_t bytes = w.sort_bytes;
  JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(w.sort_storage, bytes, w.hashes, w.sorted_hashes, w.order,
                                                        w.sorted_order, static_cast<int>(num_keys), 0, 64, stream));
  return nullptr;
}

/// Cuts the workspace of OrderRequests from `rest`; `num_bytes`: its size.
LaunchError CutOrder(WorkspaceCutter rest, int64_t num_bytes, int64_t num_keys, bool by_hash, int owner_bits,
                     OrderWorkspace* w) {
  w->hashes = by_hash ? rest.Take<uint64_t>(num_keys) : nullptr;
  w->sorted_hashes = by_hash ? rest.Take<uint64_t>(num_keys) : nullptr;
  w->owners = rest.Take<uint32_t>(num_keys);
  w->moved_owners = rest.Take<uint32_t>(num_keys);
  w->sorted_owners = rest.Take<uint32_t>(num_keys);
  w->order = rest.Take<uint32_t>(num_keys);
  w->sorted_order = rest.Take<uint32_t>(num_keys);
  w->sort_storage = rest.Rest();
  size_t hash_bytes = 0;
  const PairsToSort by_owner{w->owners, w->order, w->sorted_owners, w->sorted_order, num_keys};
  JAXSOK_RETURN_IF_LAUNCH(SortPairs(nullptr, by_owner, owner_bits, nullptr, &w->sort_bytes));
  if (by_hash) {
    JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, hash_bytes, w->hashes, w->sorted_hashes, w->order,
                                                          w->sorted_order, static_cast<int>(num_keys), 0, 64));
  }
  if (hash_bytes > w->sort_bytes) w->sort_bytes = hash_bytes;
  return rest.used() + static_cast<int64_t>(w->sort_bytes) > num_bytes ? "workspace is smaller than its bound"
                                                                       : nullptr;
}

// One thread, one distinct key: its hash and its owner. Numbers beyond the distinct keys get all ones, so they are last
// in every sort; a real hash of all ones comes before them, because its number is smaller.
__global__ void __launch_bounds__(kBlock)
    OwnersKernel(PlanView plan, OwnersView owners, OrderWorkspace w, int64_t num_keys) {
  const int64_t u = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (u >= num_keys) return;
  uint64_t hash = ~uint64_t{0};
  uint32_t owner = kNoOwner;
  if (u < *plan.num_unique) {
    const uint32_t* words = owners.tables + int64_t{plan.unique_tables[u]} * kNumTableWords;
    const uint64_t partition_hash = PartitionHash(plan.unique[u], Word64(words[kTableNameLow], words[kTableNameHigh]));
    owner = OwnerOf(words, owners.partition_owners, static_cast<uint32_t>(owners.num_shards), partition_hash);
    hash = RoundHash(partition_hash);
  }
  if (w.hashes != nullptr) w.hashes[u] = hash;
  w.owners[u] = owner;
  w.order[u] = static_cast<uint32_t>(u);
}

// One thread, one place in the order of the hashes.
__global__ void __launch_bounds__(kBlock) MoveOwnersKernel(OrderWorkspace w, int64_t num_keys) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < num_keys) w.moved_owners[i] = w.owners[w.sorted_order[i]];
}

/// Returns the first place of sorted[0 .. size) that is not below `value`.
__device__ __forceinline__ int32_t LowerBound(const uint32_t* sorted, int32_t size, uint32_t value) {
  int32_t low = 0, high = size;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (sorted[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// One thread, one place: its request and hash; and one owner: the begin of its requests. `order` has each number once,
// so each entry of place_of is written once. nullptr: the order is that of the numbers.
__global__ void __launch_bounds__(kBlock)
    PlaceKernel(PlanView plan, RequestsView out, int32_t num_shards, const uint32_t* order, const uint64_t* hashes,
                const uint32_t* sorted_owners, uint32_t* place_of, int64_t num_keys) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i <= num_shards) {
    const int32_t num_unique = *plan.num_unique;
    out.starts[i] = i == 0            ? 0
                    : i == num_shards ? num_unique
                                      : LowerBound(sorted_owners, num_unique, static_cast<uint32_t>(i));
  }
  if (i >= num_keys) return;
  const uint32_t u = order == nullptr ? static_cast<uint32_t>(i) : order[i];
  const uint64_t key = plan.unique[u];
  reinterpret_cast<uint4*>(out.requests)[i] =
      make_uint4(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), plan.unique_tables[u],
                 static_cast<uint32_t>(plan.multiplicity[u]));
  if (order != nullptr) place_of[u] = static_cast<uint32_t>(i);
  if (hashes != nullptr) out.hashes[i] = hashes[u];
}

// One thread, one position: from the number of its key to the place of its request.
__global__ void __launch_bounds__(kBlock)
    MoveInverseKernel(int32_t* inverse, const uint32_t* place_of, int64_t num_keys) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < num_keys && inverse[i] < num_keys) inverse[i] = static_cast<int32_t>(place_of[inverse[i]]);
}

/// The arrays for ordering uses, by position and in the order of the owners.
struct UsesWorkspace {
  uint32_t* owners;  // the number of shards for padding and positions outside all bags
  uint32_t* sorted_owners;
  uint32_t* positions;
  uint32_t* sorted_positions;
  uint32_t* bags;      // by position, with kLeftOut
  uint32_t* use_bags;  // in the order of the owners
  uint32_t* starts;    // [num_shards + 1]
  void* sort_storage;
  size_t sort_bytes;
};

// One thread, one position: every position is padding until a bag lists it.
__global__ void __launch_bounds__(kBlock) ListPaddingKernel(UsesWorkspace w, uint32_t num_shards, int64_t num_keys) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= num_keys) return;
  w.owners[i] = num_shards;
  w.positions[i] = static_cast<uint32_t>(i);
}

// A block lists the owners of one tile of bags, eight lanes a bag. One thread writes each position, and each bag.
__global__ void __launch_bounds__(kBlock)
    ListOwnersKernel(BatchView batch, OwnersView owners, UsesView out, UsesWorkspace w) {
  constexpr int kLanes = 8;
  const Feature f = Feature::Load(
      batch.features, FeatureAt(batch.features, batch.num_features, kFeatureTileStart, blockIdx.x, batch.num_tiles));
  const int32_t first_bag = (static_cast<int32_t>(blockIdx.x) - f.tile_start) * kBagsPerTile;
  const uint32_t* words = owners.tables + int64_t{f.table} * kNumTableWords;
  const uint64_t name = Word64(__ldg(words + kTableNameLow), __ldg(words + kTableNameHigh));
  const int lane = threadIdx.x % kLanes, group_start = static_cast<int>(threadIdx.x % kWarp) - lane;
  const bool is_weighted = f.weights_start >= 0;
  const bool is_divided = f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn;
  for (int step = 0; step < kLanes; ++step) {
    const int32_t bag = first_bag + step * (kBagsPerTile / kLanes) + static_cast<int32_t>(threadIdx.x / kLanes);
    int32_t begin = 0, end = 0;
    if (bag < f.num_bags) f.BagRange(batch.offsets, bag, &begin, &end);
    const int longest = __reduce_max_sync(~0u, end - begin);
    float divisor = 0.0f;
    for (int chunk = 0; is_divided && chunk < longest; chunk += kLanes) {
      const int32_t at = begin + chunk + lane;
      const bool is_use = at < end && __ldg(batch.keys + f.key_start + at) != kPaddingKey;
      const float weight = is_use && is_weighted ? __ldg(batch.weights + f.weights_start + at) : 1.0f;
      for (int i = 0; i < kLanes; ++i) {  // in the order of the positions
        const float other = __shfl_sync(~0u, weight, group_start + i);
        if (__shfl_sync(~0u, is_use ? 1 : 0, group_start + i) != 0) {
          divisor = divisor + (f.combiner == kCombinerSqrtn ? other * other : other);
        }
      }
    }
    if (bag >= f.num_bags) continue;
    if (f.combiner == kCombinerSqrtn) divisor = sqrtf(divisor);
    const bool is_left_out = is_divided && divisor == 0.0f;
    const uint32_t listed = static_cast<uint32_t>(f.bag_start + bag) | (is_left_out ? kLeftOut : 0);
    if (lane == 0) out.scales[f.bag_start + bag] = ScaleOfBag(is_divided, is_left_out, 1.0f / divisor);
    for (int32_t at = begin + lane; at < end; at += kLanes) {
      const int64_t position = int64_t{f.key_start} + at;
      const uint64_t key = __ldg(batch.keys + position);
      if (key == kPaddingKey) continue;
      w.owners[position] =
          OwnerOf(words, owners.partition_owners, static_cast<uint32_t>(owners.num_shards), PartitionHash(key, name));
      w.bags[position] = listed;
    }
  }
}

// One thread, one place: its use; and one owner: the begin of its uses.
__global__ void __launch_bounds__(kBlock)
    PlaceUsesKernel(BatchView batch, UsesView out, UsesWorkspace w, uint32_t num_shards) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i <= num_shards) {
    w.starts[i] = static_cast<uint32_t>(
        LowerBound(w.sorted_owners, static_cast<int32_t>(batch.num_keys), static_cast<uint32_t>(i)));
  }
  if (i >= batch.num_keys) return;
  uint4 use = make_uint4(~0u, ~0u, 0, 0);
  if (w.sorted_owners[i] < num_shards) {
    const int32_t position = static_cast<int32_t>(w.sorted_positions[i]);
    const uint32_t bag = w.bags[position];
    const Feature f = Feature::Load(
        batch.features, FeatureAt(batch.features, batch.num_features, kFeatureKeyStart, position, batch.num_keys));
    const uint64_t key = __ldg(batch.keys + position);
    const float weight = f.weights_start < 0 ? 1.0f : __ldg(batch.weights + f.weights_start + (position - f.key_start));
    use = make_uint4(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                     static_cast<uint32_t>(f.table) | (bag & kLeftOut), __float_as_uint(weight));
    w.use_bags[i] = bag & ~kLeftOut;
  }
  reinterpret_cast<uint4*>(out.uses)[i] = use;
}

// One thread, one bag of one owner: its begin among the uses of the owner.
__global__ void __launch_bounds__(kBlock) BagOffsetsKernel(UsesView out, UsesWorkspace w, int64_t num_offsets) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= num_offsets) return;
  const int64_t owner = i / (out.num_bags + 1), bag = i % (out.num_bags + 1);
  const uint32_t begin = w.starts[owner], end = w.starts[owner + 1];
  out.offsets[i] = LowerBound(w.use_bags + begin, static_cast<int32_t>(end - begin), static_cast<uint32_t>(bag));
}

}  // namespace

LaunchError LaunchPlan(Stream stream, const BatchView& batch, uint64_t salt, const PlanView& plan, void* workspace) {
  WorkspaceCutter rest(nullptr);
  const InsertWorkspace w = InsertWorkspace::Cut(workspace, batch.num_keys, &rest);
  PlanSink sink;
  sink.plan = plan;
  sink.num_keys = static_cast<uint32_t>(batch.num_keys);
  sink.salt = salt;
  sink.index.num_buckets = static_cast<uint32_t>(CeilDiv<int64_t>(batch.num_keys, 2) + 16);
  sink.index.buckets = rest.Take<Bucket>(sink.index.num_buckets);
  if (rest.used() > PlanWorkspaceBytes(batch.num_keys)) return "workspace is smaller than its bound";
  const unsigned blocks = static_cast<unsigned>(CeilDiv<int64_t>(batch.num_keys > 0 ? batch.num_keys : 1, kBlock));
  PlanPrepareKernel<<<blocks, kBlock, 0, stream>>>(sink, w.control);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (batch.num_keys == 0) return nullptr;
  const TableOfPosition table_of{nullptr, batch.features, batch.num_features, batch.num_keys};
  PlanClaimKernel<<<blocks, kBlock, 0, stream>>>(sink, w, batch);
  uint32_t* row_ids = reinterpret_cast<uint32_t*>(plan.inverse);
  JAXSOK_RETURN_IF_LAUNCH(LaunchInsertPasses(stream, sink, w, batch.keys, table_of, row_ids, batch.num_keys));
  PlanResolveKernel<<<blocks, kBlock, 0, stream>>>(sink, w);
  return LastLaunchError();
}

LaunchError LaunchPlanRequests(Stream stream, const BatchView& batch, uint64_t salt, const OwnersView& owners,
                               const RequestsView& out, void* workspace) {
  if (owners.num_shards < 1 || owners.num_shards > kMaxShards) return "num_shards: must be 1 to kMaxShards";
  const int64_t num_keys = batch.num_keys;
  const bool by_hash = out.hashes != nullptr, by_owner = owners.num_shards > 1;
  WorkspaceCutter kept(workspace);
  PlanView plan;
  plan.unique = kept.Take<uint64_t>(num_keys);
  plan.unique_tables = kept.Take<uint32_t>(num_keys);
  plan.multiplicity = kept.Take<int32_t>(num_keys);
  plan.num_unique = kept.Take<int32_t>(1);
  plan.inverse = out.inverse;
  uint32_t* place_of = kept.Take<uint32_t>(num_keys);
  // The ordering of requests reuses the plan's own workspace.
  const int owner_bits = BitsBelow(owners.num_shards);
  OrderWorkspace w;
  JAXSOK_RETURN_IF_LAUNCH(CutOrder(kept, PlanRequestsWorkspaceBytes(num_keys), num_keys, by_hash, owner_bits, &w));
  JAXSOK_RETURN_IF_LAUNCH(LaunchPlan(stream, batch, salt, plan, kept.Rest()));

  const unsigned blocks = BlocksFor(num_keys);
  const uint32_t* order = nullptr;
  if (num_keys > 0 && (by_hash || by_owner)) {
    OwnersKernel<<<blocks, kBlock, 0, stream>>>(plan, owners, w, num_keys);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    if (by_hash) {
      JAXSOK_RETURN_IF_LAUNCH(SortByHash(stream, w, num_keys));
      order = w.sorted_order;
    }
    if (by_owner && by_hash) {
      MoveOwnersKernel<<<blocks, kBlock, 0, stream>>>(w, num_keys);
      JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
      const PairsToSort moved{w.moved_owners, w.sorted_order, w.sorted_owners, w.order, num_keys};
      JAXSOK_RETURN_IF_LAUNCH(SortPairs(stream, moved, owner_bits, w.sort_storage, &w.sort_bytes));
      order = w.order;
    } else if (by_owner) {
      const PairsToSort numbers{w.owners, w.order, w.sorted_owners, w.sorted_order, num_keys};
      JAXSOK_RETURN_IF_LAUNCH(SortPairs(stream, numbers, owner_bits, w.sort_storage, &w.sort_bytes));
      order = w.sorted_order;
    }
  }
  const int64_t num_places = num_keys > owners.num_shards ? num_keys : owners.num_shards + 1;
  PlaceKernel<<<static_cast<unsigned>(CeilDiv<int64_t>(num_places, kBlock)), kBlock, 0, stream>>>(
      plan, out, owners.num_shards, order, w.hashes, w.sorted_owners, place_of, num_keys);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (order == nullptr) return nullptr;
  MoveInverseKernel<<<blocks, kBlock, 0, stream>>>(out.inverse, place_of, num_keys);
  return LastLaunchError();
}

LaunchError LaunchPlanUses(Stream stream, const BatchView& batch, const OwnersView& owners, const UsesView& out,
                           void* workspace) {
  if (owners.num_shards < 1 || owners.num_shards > kMaxShards) return "num_shards: must be 1 to kMaxShards";
  const int64_t num_keys = batch.num_keys;
  const uint32_t num_shards = static_cast<uint32_t>(owners.num_shards);
  const int owner_bits = BitsBelow(num_shards);
  WorkspaceCutter cutter(workspace);
  UsesWorkspace w;
  w.owners = cutter.Take<uint32_t>(num_keys);
  w.sorted_owners = cutter.Take<uint32_t>(num_keys);
  w.positions = cutter.Take<uint32_t>(num_keys);
  w.sorted_positions = cutter.Take<uint32_t>(num_keys);
  w.bags = cutter.Take<uint32_t>(num_keys);
  w.use_bags = cutter.Take<uint32_t>(num_keys);
  w.starts = cutter.Take<uint32_t>(int64_t{num_shards} + 1);
  w.sort_storage = cutter.Rest();
  const PairsToSort uses{w.owners, w.positions, w.sorted_owners, w.sorted_positions, num_keys};
  JAXSOK_RETURN_IF_LAUNCH(SortPairs(stream, uses, owner_bits, nullptr, &w.sort_bytes));
  if (cutter.used() + static_cast<int64_t>(w.sort_bytes) > PlanUsesWorkspaceBytes(num_keys)) {
    return "workspace is smaller than its bound";
  }
  if (num_keys > 0) {
    ListPaddingKernel<<<BlocksFor(num_keys), kBlock, 0, stream>>>(w, num_shards, num_keys);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  }
  if (batch.num_tiles > 0) ListOwnersKernel<<<batch.num_tiles, kBlock, 0, stream>>>(batch, owners, out, w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  JAXSOK_RETURN_IF_LAUNCH(SortPairs(stream, uses, owner_bits, w.sort_storage, &w.sort_bytes));
  PlaceUsesKernel<<<BlocksFor(std::max<int64_t>(num_keys, num_shards + 1)), kBlock, 0, stream>>>(batch, out, w,
                                                                                                 num_shards);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  const int64_t num_offsets = num_shards * (out.num_bags + 1);
  BagOffsetsKernel<<<BlocksFor(num_offsets), kBlock, 0, stream>>>(out, w, num_offsets);
  return LastLaunchError();
}

}  // namespace jaxsok

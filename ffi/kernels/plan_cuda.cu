// Distinct keys on a GPU, and their order by owner.
//
// To make n keys distinct, these kernels run on one stream:
//   prepare  the scratch index is emptied.
//   claim    each position takes or meets the slot of its key, which keeps the key's first position.
//   count    positions that find themselves in their slot are the first; each chunk counts them by owner, and the last
//            block to end sums the counts up.
//   deal     first positions write the key at its place.
//   resolve  each position reads the place of its key.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "deal_cuda.cuh"

namespace jaxsok {
namespace {

constexpr uint32_t kNoPosition = ~uint32_t{0};

// Distinct keys. ----------------------------------------------------------------------------------------------

constexpr uint64_t kEmptySlot = ~uint64_t{0};

constexpr uint32_t kSlotsPerBucket = 4;  // a sector of memory
static_assert(kSpareSlots % kSlotsPerBucket == 0 && kSlotsPerKey % kSlotsPerBucket == 0, "an index of whole buckets");

/// The memory for making keys distinct. A slot of the scratch index has 32 bits of its key's hash above the first
/// position of the key. Three quarters of the slots stay empty: with half of them the longest walks took most of the
/// time.
struct DistinctWorkspace {
  unsigned long long* slots;
  uint32_t num_slots;
  uint32_t* slot_of;   // by position: its slot, then the first position of its key; kNoPosition: padding
  uint32_t* uses;      // by first position: uses of its key but one
  uint32_t* place_of;  // by first position
  Dealing dealing;

  /// Cuts the workspace of making `num_keys` keys distinct; the index comes last.
  static DistinctWorkspace Cut(void* workspace, int64_t num_keys) {
    WorkspaceCutter cutter(workspace);
    DistinctWorkspace w;
    w.slot_of = cutter.Take<uint32_t>(num_keys);
    w.uses = cutter.Take<uint32_t>(num_keys);
    w.place_of = cutter.Take<uint32_t>(num_keys);
    w.dealing.owners = cutter.Take<uint32_t>(num_keys);
    w.dealing.counts = cutter.Take<uint32_t>(kMostDealtOwners * NumChunksOf(num_keys));
    w.dealing.blocks_done = cutter.Take<uint32_t>(1);
    w.dealing.starts = cutter.Take<int32_t>(2);
    w.dealing.num_items = num_keys;
    w.dealing.num_owners = 1;
    // Owners are known before places: a sort may use the memory of places for numbers, and that of the index.
    w.dealing.items = w.place_of;
    w.dealing.sort_workspace = cutter.Rest();
    w.num_slots = static_cast<uint32_t>(std::min(kSlotsPerKey * num_keys + kSpareSlots, kMostSlots));
    w.slots = cutter.Take<unsigned long long>(w.num_slots);
    return w;
  }
};

/// A bucket's slots, as they were when it was loaded: an empty one may be taken by now.
struct SlotBucket {
  unsigned long long slots[kSlotsPerBucket];

  __device__ static SlotBucket Load(const unsigned long long* slots, uint32_t bucket) {
    const auto* at = reinterpret_cast<const ulonglong2*>(slots + int64_t{bucket} * kSlotsPerBucket);
    const ulonglong2 low = __ldcg(at), high = __ldcg(at + 1);
    return {{low.x, low.y, high.x, high.y}};
  }
};

__global__ void __launch_bounds__(kBlock) PrepareDistinctKernel(DistinctWorkspace w, uint64_t* digest) {
  const int64_t start = int64_t{blockIdx.x} * kBlock + threadIdx.x, stride = int64_t{gridDim.x} * kBlock;
  for (int64_t i = start; i < w.num_slots / 2; i += stride) {
    reinterpret_cast<uint4*>(w.slots)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int64_t i = start; i < w.dealing.num_items; i += stride) w.uses[i] = 0;
  if (start == 0) *w.dealing.blocks_done = 0;
  if (start == 0) *digest = 0;
}

// One thread, one position; a block adds its sum to the digest of the keys. Positions outside all bags are padding.
// Walks have room for any keys, and callers cannot aim at slots with a secret salt. A key begins at any slot of its
// bucket and goes round, so that keys of one bucket seldom want the same slot.
// No race: a slot is taken once, by compare-and-swap; afterwards only its position is lowered, atomically. Whatever
// position of its key a thread reads there, the key is the same.
__global__ void __launch_bounds__(kBlock)
    ClaimDistinctKernel(DistinctWorkspace w, BatchView batch, TableOfPosition table_of, uint64_t salt,
                        uint64_t* digest) {
  __shared__ uint64_t digest_of_warp[kWarpsPerBlock];
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  uint32_t slot = kNoPosition, other = kNoPosition;
  bool is_met = false;
  const uint64_t key = i < batch.num_keys ? __ldg(batch.keys + i) : kPaddingKey;
  const uint64_t sum = SumOfWarp(i < batch.num_keys ? DigestOf(key, i) : 0);
  if (threadIdx.x % kWarp == 0) digest_of_warp[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t total = 0;
    for (int warp = 0; warp < kWarpsPerBlock; ++warp) total += digest_of_warp[warp];
    AtomicAdd64(digest, total);
  }
  if (i < batch.num_keys) {
    const Feature f = Feature::Load(batch.features, FeatureAt(batch.features, batch.num_features, kFeatureKeyStart,
                                                              static_cast<int32_t>(i), batch.num_keys));
    int32_t first, last;
    f.Bags(batch.offsets, &first, &last);
    const int32_t at_feature = static_cast<int32_t>(i) - f.key_start;
    if (key != kPaddingKey && at_feature >= first && at_feature < last) {
      const auto table = static_cast<uint32_t>(f.table);
      const uint64_t hash = HashOf(key, table, salt);
      const unsigned long long own = hash << 32 | static_cast<uint32_t>(i);
      const uint32_t num_buckets = w.num_slots / kSlotsPerBucket, home_slot = hash % kSlotsPerBucket;
      uint32_t bucket = static_cast<uint32_t>((hash >> 32) * num_buckets >> 32);
      SlotBucket line = SlotBucket::Load(w.slots, bucket);
      for (uint32_t least_turn = 0;;) {
        uint32_t turn = kSlotsPerBucket;  // of the next slot that is empty, or may be the key's
        unsigned long long found = 0;
#pragma unroll
        for (uint32_t k = 0; k < kSlotsPerBucket; ++k) {
          const uint32_t turn_of_slot = (k - home_slot) % kSlotsPerBucket;
          const bool may_end = line.slots[k] == kEmptySlot || line.slots[k] >> 32 == own >> 32;
          const bool is_next = may_end && turn_of_slot >= least_turn && turn_of_slot < turn;
          turn = is_next ? turn_of_slot : turn;
          found = is_next ? line.slots[k] : found;
        }
        if (turn == kSlotsPerBucket) {
          bucket = bucket + 1 < num_buckets ? bucket + 1 : 0;
          line = SlotBucket::Load(w.slots, bucket);
          least_turn = 0;
          continue;
        }
        slot = bucket * kSlotsPerBucket + (home_slot + turn) % kSlotsPerBucket;
        if (found == kEmptySlot) {
          found = atomicCAS(w.slots + slot, kEmptySlot, own);
          if (found == kEmptySlot) break;
        }
        other = static_cast<uint32_t>(found);
        is_met = found >> 32 == own >> 32 && __ldg(batch.keys + other) == key && table_of(other) == table;
        if (is_met && found > own) atomicMin(w.slots + slot, own);
        if (is_met) break;
        least_turn = turn + 1;
      }
    }
    w.slot_of[i] = slot;
  }
  // Lanes of a warp with one key count together: the first of them for all that did not take the slot. What they count
  // for a position that is not the first in the end goes to that.
  const unsigned met = __ballot_sync(~0u, is_met);
  if (met == 0) return;
  const unsigned same = __match_any_sync(~0u, slot) & met;
  if (is_met && __ffs(same) - 1 == static_cast<int>(threadIdx.x % kWarp)) {
    atomicAdd(w.uses + other, static_cast<uint32_t>(__popc(same)));
  }
}

/// Gives the first position of each key to the owner of the key.
struct FirstsSource {
  DistinctWorkspace w;
  const uint64_t* keys;
  TableOfPosition table_of;
  OwnersView owners;  // without tables: there is one owner

  struct Found {
    uint32_t first, uses;
  };
  __device__ Found Find(int64_t i, int64_t num_positions) const {
    const uint32_t slot = i < num_positions ? w.slot_of[i] : kNoPosition;
    if (slot == kNoPosition) return {kNoPosition, 0};
    return {static_cast<uint32_t>(w.slots[slot]), __ldcg(w.uses + i)};
  }
  __device__ uint32_t Owner(int64_t i, Found found, uint32_t none) const {
    if (found.first == kNoPosition || found.first != static_cast<uint32_t>(i)) return none;
    return owners.tables == nullptr ? 0 : owners.Of(__ldg(keys + i), table_of(i));
  }
  __device__ void Note(int64_t i, Found found) const {
    w.slot_of[i] = found.first;
    if (found.first != kNoPosition && found.first != static_cast<uint32_t>(i) && found.uses != 0) {
      atomicAdd(w.uses + found.first, found.uses);
    }
  }
};

/// Puts the first position of a key where its owner's next key goes.
struct FirstsPut {
  DistinctWorkspace w;
  const uint64_t* keys;
  TableOfPosition table_of;
  Request* lines;

  __device__ void operator()(int64_t i, uint32_t place) const {
    Write(place, __ldg(keys + i), table_of(i), w.uses[i] + 1);
    w.place_of[i] = place;
  }
  __device__ void Nothing(int64_t place) const { Write(place, kPaddingKey, 0, 0); }
  __device__ void Write(int64_t place, uint64_t key, uint32_t table, uint32_t num_uses) const {
    reinterpret_cast<uint4*>(lines)[place] =
        make_uint4(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), table, num_uses);
  }
};

// One thread, one position: the place of its key, and the slot of its request.
__global__ void __launch_bounds__(kBlock) ResolveKernel(DistinctWorkspace w, RequestsView requests) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x, num_keys = w.dealing.num_items;
  if (i >= num_keys) return;
  const uint32_t first = w.slot_of[i];
  const bool is_padding = first == kNoPosition;
  const auto place = static_cast<int32_t>(is_padding ? num_keys : w.place_of[first]);
  requests.inverse[i] = place;
  if (requests.slots == nullptr) return;
  requests.slots[i] = is_padding ? -1 : requests.SlotOf(static_cast<int32_t>(w.dealing.num_owners), place);
}

/// Makes the keys of a batch distinct, by owner if `w.dealing` has several; writes to `out` the digest, the requests,
/// the inverse, and the slots where it has them.
LaunchError MakeDistinct(Stream stream, const BatchView& batch, uint64_t salt, const OwnersView& owners,
                         const DistinctWorkspace& w, const RequestsView& out) {
  const unsigned blocks = BlocksFor(std::max<int64_t>(1, batch.num_keys));
  const TableOfPosition table_of{nullptr, batch.features, batch.num_features, batch.num_keys};
  PrepareDistinctKernel<<<blocks, kBlock, 0, stream>>>(w, out.digest);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  ClaimDistinctKernel<<<blocks, kBlock, 0, stream>>>(w, batch, table_of, salt, out.digest);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  const FirstsSource source{w, batch.keys, table_of, owners};
  JAXSOK_RETURN_IF_LAUNCH(Deal(stream, w.dealing, source, FirstsPut{w, batch.keys, table_of, out.requests}));
  ResolveKernel<<<blocks, kBlock, 0, stream>>>(w, out);
  return LastLaunchError();
}

// Requests by hash. -------------------------------------------------------------------------------------------

/// The inputs and outputs of the sort, by number of a distinct key.
struct HashOrder {
  uint64_t* hashes;
  uint64_t* sorted_hashes;  // the output of the sort
  uint32_t* numbers;
  uint32_t* order;     // numbers in the order of the hashes
  uint32_t* place_of;  // by number
};

// One thread, one distinct key. Numbers beyond them get all ones, so they come last; a real hash of all ones comes
// before them, because its number is smaller.
__global__ void __launch_bounds__(kBlock) HashKernel(const Request* lines, OwnersView owners, HashOrder w, Dealing d) {
  const int64_t u = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (u == 0) *d.blocks_done = 0;
  if (u >= d.num_items) return;
  const Request& line = lines[u];
  w.hashes[u] = line.key == kPaddingKey ? ~uint64_t{0} : RoundHash(owners.HashOf(line.key, line.table));
  w.numbers[u] = static_cast<uint32_t>(u);
}

/// Gives keys, in the order of their hashes, to their owners.
struct HashSource {
  const Request* lines;
  OwnersView owners;
  const uint32_t* order;

  using Found = uint32_t;
  __device__ uint32_t Find(int64_t i, int64_t num_items) const { return i < num_items ? order[i] : kNoPosition; }
  __device__ uint32_t Owner(int64_t, uint32_t number, uint32_t none) const {
    if (number == kNoPosition || lines[number].key == kPaddingKey) return none;
    return owners.Of(lines[number].key, lines[number].table);
  }
  __device__ void Note(int64_t, uint32_t) const {}
};

struct HashPut {
  const Request* lines;
  HashOrder w;
  RequestsView out;

  __device__ void operator()(int64_t i, uint32_t place) const {
    const uint32_t number = w.order[i];
    out.requests[place] = lines[number];
    out.hashes[place] = w.hashes[number];
    w.place_of[number] = place;
  }
  __device__ void Nothing(int64_t place) const {
    out.requests[place] = {kPaddingKey, 0, 0};
    out.hashes[place] = ~uint64_t{0};
  }
};

// One thread, one position: from the number of its key to the place of its request.
__global__ void __launch_bounds__(kBlock)
    MoveInverseKernel(int32_t* inverse, const uint32_t* place_of, int64_t num_keys) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < num_keys && inverse[i] < num_keys) inverse[i] = static_cast<int32_t>(place_of[inverse[i]]);
}

/// Orders distinct keys by owner, then by hash, then by number.
LaunchError OrderByHash(Stream stream, const OwnersView& owners, const RequestsView& out, const Request* lines,
                        int64_t num_keys, void* workspace) {
  WorkspaceCutter cutter(workspace);
  HashOrder w;
  w.hashes = cutter.Take<uint64_t>(num_keys);
  w.sorted_hashes = cutter.Take<uint64_t>(num_keys);
  w.numbers = cutter.Take<uint32_t>(num_keys);
  w.order = cutter.Take<uint32_t>(num_keys);
  w.place_of = cutter.Take<uint32_t>(num_keys);
  Dealing d;
  d.owners = cutter.Take<uint32_t>(num_keys);
  d.counts = cutter.Take<uint32_t>(kMostDealtOwners * NumChunksOf(num_keys));
  d.blocks_done = cutter.Take<uint32_t>(1);
  d.starts = out.starts;
  d.num_items = num_keys;
  d.num_owners = static_cast<uint32_t>(owners.num_shards);
  d.items = w.numbers;
  d.sort_workspace = cutter.Rest();  // one sort after the other
  const int count = static_cast<int>(num_keys);
  size_t bytes = 0;
  JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, bytes, w.hashes, w.sorted_hashes, w.numbers, w.order,
                                                        count, 0, 64, stream));
  const int64_t sort_bytes = std::max(static_cast<int64_t>(bytes), DealSortBytes(num_keys));
  if (cutter.used() + sort_bytes > HashOrderBytes(num_keys)) return "workspace is smaller than its bound";
  const unsigned blocks = BlocksFor(std::max<int64_t>(1, num_keys));
  HashKernel<<<blocks, kBlock, 0, stream>>>(lines, owners, w, d);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (num_keys > 0) {
    JAXSOK_RETURN_IF_CUDA(cub::DeviceRadixSort::SortPairs(d.sort_workspace, bytes, w.hashes, w.sorted_hashes, w.numbers,
                                                          w.order, count, 0, 64, stream));
  }
  JAXSOK_RETURN_IF_LAUNCH(Deal(stream, d, HashSource{lines, owners, w.order}, HashPut{lines, w, out}));
  MoveInverseKernel<<<blocks, kBlock, 0, stream>>>(out.inverse, w.place_of, num_keys);
  return LastLaunchError();
}

// Uses of bags. -----------------------------------------------------------------------------------------------

struct UsesWorkspace {
  uint32_t* listed_owners;  // by position; the number of shards for padding and positions outside all bags
  uint32_t* bags;           // by position, with kLeftOut
  uint32_t* use_bags;       // in the order of the owners
  Dealing dealing;
};

// One thread, one position: every position is padding until a bag lists it.
__global__ void __launch_bounds__(kBlock) ListPaddingKernel(UsesWorkspace w) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i == 0) *w.dealing.blocks_done = 0;
  if (i < w.dealing.num_items) w.listed_owners[i] = w.dealing.num_owners;
}

// A block lists the owners of one tile of bags, eight lanes a bag. One thread writes each position, and each bag.
__global__ void __launch_bounds__(kBlock)
    ListBagsKernel(BatchView batch, OwnersView owners, UsesView out, UsesWorkspace w) {
  constexpr int kLanes = 8;
  const Feature f = Feature::Load(
      batch.features, FeatureAt(batch.features, batch.num_features, kFeatureTileStart, blockIdx.x, batch.num_tiles));
  const int32_t first_bag = (static_cast<int32_t>(blockIdx.x) - f.tile_start) * kBagsPerTile;
  const int lane = threadIdx.x % kLanes;
  const bool is_divided = f.combiner == kCombinerMean || f.combiner == kCombinerSqrtn;
  for (int step = 0; step < kLanes; ++step) {
    const int32_t bag = first_bag + step * (kBagsPerTile / kLanes) + static_cast<int32_t>(threadIdx.x / kLanes);
    int32_t begin = 0, end = 0;
    if (bag < f.num_bags) f.BagRange(batch.offsets, bag, &begin, &end);
    float divisor = 0.0f;
    if (is_divided) {
      divisor = DivisorOfBag<kLanes>(f, batch.weights, begin, end,
                                     [&](int32_t at) { return __ldg(batch.keys + f.key_start + at) != kPaddingKey; });
    }
    if (bag >= f.num_bags) continue;
    const bool is_left_out = is_divided && divisor == 0.0f;
    const uint32_t listed = static_cast<uint32_t>(f.bag_start + bag) | (is_left_out ? kLeftOut : 0);
    if (lane == 0) out.scales[f.bag_start + bag] = ScaleOfBag(is_divided, is_left_out, 1.0f / divisor);
    for (int32_t at = begin + lane; at < end; at += kLanes) {
      const int64_t position = int64_t{f.key_start} + at;
      const uint64_t key = __ldg(batch.keys + position);
      if (key == kPaddingKey) continue;
      w.listed_owners[position] = owners.Of(key, static_cast<uint32_t>(f.table));
      w.bags[position] = listed;
    }
  }
}

struct UsesSource {
  const uint32_t* listed_owners;
  using Found = uint32_t;
  __device__ uint32_t Find(int64_t i, int64_t num_positions) const {
    return i < num_positions ? listed_owners[i] : ~uint32_t{0};
  }
  __device__ uint32_t Owner(int64_t, uint32_t listed, uint32_t none) const { return min(listed, none); }
  __device__ void Note(int64_t, uint32_t) const {}
};

struct UsesPut {
  BatchView batch;
  UsesView out;
  UsesWorkspace w;

  __device__ void operator()(int64_t position, uint32_t place) const {
    const uint64_t key = __ldg(batch.keys + position);
    const uint32_t bag = w.bags[position];
    w.use_bags[place] = bag & ~kLeftOut;
    if (out.keys != nullptr) {
      out.keys[place] = key;
      return;
    }
    const Feature f = Feature::Load(batch.features, FeatureAt(batch.features, batch.num_features, kFeatureKeyStart,
                                                              static_cast<int32_t>(position), batch.num_keys));
    const float weight = f.weights_start < 0 ? 1.0f : __ldg(batch.weights + f.weights_start + (position - f.key_start));
    out.uses[place] = {key, static_cast<uint32_t>(f.table) | (bag & kLeftOut), weight};
  }
  __device__ void Nothing(int64_t place) const { out.Put(place, {kPaddingKey, 0, 0.0f}); }
};

// One thread, one bag of one owner: its begin among the uses of the owner.
__global__ void __launch_bounds__(kBlock) BagOffsetsKernel(UsesView out, UsesWorkspace w, int64_t num_offsets) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= num_offsets) return;
  const int64_t owner = i / (out.num_bags + 1), bag = i % (out.num_bags + 1);
  const int32_t begin = out.starts[owner], end = out.starts[owner + 1];
  out.offsets[i] = LowerBound(w.use_bags + begin, end - begin, static_cast<uint32_t>(bag));
}

}  // namespace

LaunchError LaunchPlanRequests(Stream stream, const BatchView& batch, uint64_t salt, const OwnersView& owners,
                               const RequestsView& out, void* workspace) {
  if (owners.num_shards < 1 || owners.num_shards > kMaxShards) return "num_shards: must be 1 to kMaxShards";
  if (out.hashes == nullptr) {
    DistinctWorkspace w = DistinctWorkspace::Cut(workspace, batch.num_keys);
    w.dealing.num_owners = static_cast<uint32_t>(owners.num_shards);
    w.dealing.starts = out.starts;
    return MakeDistinct(stream, batch, salt, owners, w, out);
  }
  WorkspaceCutter cutter(workspace);
  RequestsView by_number{};
  by_number.requests = cutter.Take<Request>(batch.num_keys);
  by_number.inverse = out.inverse;
  by_number.digest = out.digest;
  const DistinctWorkspace w = DistinctWorkspace::Cut(cutter.Rest(), batch.num_keys);
  JAXSOK_RETURN_IF_LAUNCH(MakeDistinct(stream, batch, salt, OwnersView{}, w, by_number));
  return OrderByHash(stream, owners, out, by_number.requests, batch.num_keys, cutter.Rest());
}

LaunchError LaunchPlanUses(Stream stream, const BatchView& batch, const OwnersView& owners, const UsesView& out,
                           void* workspace) {
  if (owners.num_shards < 1 || owners.num_shards > kMaxShards) return "num_shards: must be 1 to kMaxShards";
  const int64_t num_keys = batch.num_keys;
  WorkspaceCutter cutter(workspace);
  UsesWorkspace w;
  w.listed_owners = cutter.Take<uint32_t>(num_keys);
  w.bags = cutter.Take<uint32_t>(num_keys);
  w.use_bags = cutter.Take<uint32_t>(num_keys);
  w.dealing.owners = w.listed_owners;
  w.dealing.counts = cutter.Take<uint32_t>(kMostDealtOwners * NumChunksOf(num_keys));
  w.dealing.blocks_done = cutter.Take<uint32_t>(1);
  w.dealing.starts = out.starts;
  w.dealing.num_items = num_keys;
  w.dealing.num_owners = static_cast<uint32_t>(owners.num_shards);
  w.dealing.items = w.use_bags;
  w.dealing.sort_workspace = cutter.Rest();
  if (cutter.used() + DealSortBytes(num_keys) > PlanUsesWorkspaceBytes(num_keys)) {
    return "workspace is smaller than its bound";
  }
  ListPaddingKernel<<<BlocksFor(std::max<int64_t>(1, num_keys)), kBlock, 0, stream>>>(w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  if (batch.num_tiles > 0) ListBagsKernel<<<batch.num_tiles, kBlock, 0, stream>>>(batch, owners, out, w);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  JAXSOK_RETURN_IF_LAUNCH(Deal(stream, w.dealing, UsesSource{w.listed_owners}, UsesPut{batch, out, w}));
  const int64_t num_offsets = owners.num_shards * (out.num_bags + 1);
  BagOffsetsKernel<<<BlocksFor(num_offsets), kBlock, 0, stream>>>(out, w, num_offsets);
  return LastLaunchError();
}

}  // namespace jaxsok

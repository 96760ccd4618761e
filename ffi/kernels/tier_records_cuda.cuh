// How rows that leave the cache exchange records of host memory, on a GPU, to lie near the rows that come
// (tier_cuda.cu).
#ifndef JAXSOK_KERNELS_TIER_RECORDS_CUDA_CUH_
#define JAXSOK_KERNELS_TIER_RECORDS_CUDA_CUH_

#include "tier_place_cuda.cuh"

namespace jaxsok {

constexpr int kLanesOfRow = 8;   // that look for a record together
constexpr int kPairsOfLane = 8;  // of neighbouring records: eight lanes read 128 at once, the page of 124 of 528 bytes
// The lanes look at further pages, since one may have no record to give: at as many as have so many records of rows in
// the cache, which have no content. All blocks wait for the last row, so more pages take longer where a few suffice.
constexpr int64_t kRecordsWanted = 16;
constexpr uint32_t kLeastPages = 2, kMostPages = 4;

/// Lets eight lanes find a record without content in a page for a row that leaves, and take it: the row then exchanges
/// records with the one that had it, which is listed in `found`, and the record that this one gets in `victims`.
/// Returns the record, or kNoRow if there is none, or the lanes do not look. All lanes of a warp call it, and stay
/// together: their chains of reads then run at the same time.
///
/// Rows that leave are marked, so their new records are not taken again. The record that the other row gets becomes its
/// own only after all blocks have finished this step (NoteExchanges): until then it is not taken either.
__device__ __forceinline__ uint32_t TakeRecord(const Bringing& b, bool looks, const RecordRange& page, uint32_t rank,
                                               const Move& leaving) {
  const TierView& tier = b.tier;
  const uint32_t lane = threadIdx.x % kLanesOfRow, first_lane = threadIdx.x % kWarp - lane;
  // Two records are 16 bytes, which one instruction reads.
  const uint32_t odd = reinterpret_cast<uint64_t>(tier.homes.At(tier.starts, page.begin, 2)) % 16 != 0 ? 1 : 0;
  uint32_t begin = page.begin - odd, found = kNoRow;
  for (; __any_sync(~0u, looks && begin < page.end); begin += 2 * kPairsOfLane * kLanesOfRow) {
    uint32_t tenants[2 * kPairsOfLane];
#pragma unroll
    for (int k = 0; k < kPairsOfLane; ++k) {
      const uint32_t record = begin + 2 * (k * kLanesOfRow + lane);
      tenants[2 * k] = tenants[2 * k + 1] = kIsFull;
      if (looks && record + 2 <= page.end) {
        const uint4 pair = __ldcg(reinterpret_cast<const uint4*>(tier.homes.At(tier.starts, record, 2)));
        tenants[2 * k] = record >= page.begin ? pair.y : uint32_t{kIsFull};
        tenants[2 * k + 1] = pair.w;
      } else if (looks && record < page.end && record >= page.begin) {
        tenants[2 * k] = __ldcg(tier.TenantAt(record));
      }
    }
    for (int last = -1;;) {
      int at = -1;  // the lane's next candidate
      uint32_t tenant = 0;
#pragma unroll
      for (int k = 2 * kPairsOfLane - 1; k >= 0; --k) {
        const bool is_next = k > last && (tenants[k] & kIsFull) == 0;
        at = is_next ? k : at;
        tenant = is_next ? tenants[k] : tenant;
      }
      const uint32_t of_warp = __ballot_sync(~0u, looks && at >= 0);
      if (of_warp == 0) break;
      const uint32_t candidates = of_warp >> first_lane & ((1u << kLanesOfRow) - 1);
      const uint32_t taker = static_cast<uint32_t>(__ffs(static_cast<int>(candidates)) - 1);  // no lane if none has one
      uint32_t record = kNoRow;
      if (lane == taker) {
        last = at;
        const uint32_t tried = begin + 2 * (at / 2 * kLanesOfRow + lane) + at % 2, former = tier.RowOf(tried, tenant);
        const uint32_t taken = TierView::TenantOf(tried, leaving.row_id);
        if (tier.MayExchange(former) && atomicCAS(tier.TenantAt(tried), tenant, taken) == tenant) {
          record = tried;
          tier.SetHome(former, leaving.record);
          tier.SetHome(leaving.row_id, record);
          b.found[rank] = former;
          b.victims[rank] = leaving.record;
        }
      }
      record = __shfl_sync(~0u, record, first_lane + taker % kLanesOfRow);
      if (record != kNoRow) {
        found = record;
        looks = false;
      }
    }
  }
  return found;
}

/// Gives each row that leaves a record in the page of the row that takes its slot, or of one of the next ones, and
/// counts the moves of each part. Which record it gets may differ between runs: no content depends on it.
__device__ __forceinline__ void ExchangeRecords(const Bringing& b, uint32_t num_missing) {
  const uint32_t lane = threadIdx.x % kLanesOfRow, first_lane = threadIdx.x % kWarp - lane;
  // Neighbouring rows go to different blocks, which all get as many.
  uint32_t rank = threadIdx.x / kLanesOfRow * gridDim.x + blockIdx.x;
  for (; __any_sync(~0u, rank < num_missing); rank += gridDim.x * kPlaceBlock / kLanesOfRow) {
    Move leaving{kNoRow, kNoRow, 0, kNoRow};
    uint32_t coming = kNoRow;  // a record in the i-th lane that is that of the i-th row from this one on
    if (rank < num_missing) {
      const Move& next = b.coming[(rank + lane % kMostPages) % num_missing];
      leaving = b.leaving[rank];
      if (next.row_id != kNoRow) coming = next.record;
      if (lane == 0) b.found[rank] = kNoRow;
    }
    __syncwarp();  // another lane may write `found` below
    bool looks = leaving.row_id != kNoRow;
    for (uint32_t i = 0; i < b.num_pages && __any_sync(~0u, looks); ++i) {
      const uint32_t near = __shfl_sync(~0u, coming, first_lane + i);
      const RecordRange page = near == kNoRow ? RecordRange{0, 0} : b.tier.PageOf(near);
      if (page.begin <= leaving.record && leaving.record < page.end) looks = false;
      const uint32_t record = TakeRecord(b, looks, page, rank, leaving);
      if (record == kNoRow) continue;
      leaving.record = record;
      looks = false;
    }
    if (lane != 0 || leaving.row_id == kNoRow) continue;
    b.leaving[rank].record = leaving.record;
    atomicAdd(b.leaving_parts + (leaving.record >> b.shift), 1u);
  }
}

/// Notes whose the records are that rows got in exchange.
__device__ __forceinline__ void NoteExchanges(const Bringing& b, uint32_t num_missing) {
  ForRanks(num_missing, [&](uint32_t rank) {
    if (rank >= num_missing || b.found[rank] == kNoRow) return;
    b.tier.NoteContent(b.found[rank], b.victims[rank], false);
  });
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_TIER_RECORDS_CUDA_CUH_

// Sums bag gradients to row gradients on a GPU, in the order of core/row_update.h, after uses_cuda.cuh has sorted the
// uses. update_cuda.cuh steps optimizers with the sums, combine_cuda.cu stores them.
//
//   sum    a warp takes 32 sorted uses. Rows with at most 8 uses are summed and applied by a group of lanes each, all
//          groups in parallel; those with at most 32 by all groups; for longer rows every 32 uses give a partial sum,
//          and the row is put into a list
//   hot    for a row with very many partial sums: a block adds those of one lane (kChunkLanes)
//   long   a group of lanes, or for many partial sums a block, takes one row of that list
#ifndef JAXSOK_KERNELS_USES_SUM_CUDA_CUH_
#define JAXSOK_KERNELS_USES_SUM_CUDA_CUH_

#include <cuda_pipeline_primitives.h>

#include "stages_cuda.cuh"
#include "uses_cuda.cuh"

namespace jaxsok {

/// Returns the first place of sorted[0 .. end) that equals sorted[end]: the warp tests 32 places at a time.
__device__ __forceinline__ uint32_t StartOfRow(const uint32_t* sorted, uint32_t end, uint32_t row) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t low = 0, high = end;  // sorted[high] is the row; everything before low is not
  while (low < high) {
    const uint32_t step = (high - low + kWarp - 1) / kWarp;
    const uint32_t at = low + lane * step;
    const bool before = at < high && sorted[at] != row;
    const uint32_t num_before = __popc(__ballot_sync(~0u, before));
    if (num_before == 0) return low;
    const uint32_t next_high = min(low + num_before * step, high);
    low = low + (num_before - 1) * step + 1;
    high = next_high;
  }
  return high;
}

/// A warp's 32 sorted uses and the 32 after them. In shared memory, because the sums need the registers.
struct WarpUses {
  const void* gradients[2 * kWarp];
  float factors[2 * kWarp];
  uint32_t rows[kWarp];
  uint32_t positions[kWarp];
  uint8_t lengths[kWarp];       // of the chunk that begins at a use
  uint8_t short_starts[kWarp];  // the uses at which chunks of one run begin

  /// Returns the gradient of one use, without its factor.
  template <typename Apply, int kVector, int kPerLane>
  __device__ void Load(int use, const UseView& view, int lane, int lanes, RowPart<kVector, kPerLane>& part) const {
    GradientReader<typename Apply::Gradient>::WithNumber(view.gradient_dtype, [&](auto number) {
      part.Load(static_cast<const decltype(number)*>(gradients[use]), lane, lanes, view.dim);
    });
  }

  /// Adds uses [first, first + count) to `sum`, in sequence. Groups of lanes each add their own.
  template <typename Apply, int kVector, int kPerLane>
  __device__ void Add(int first, int count, bool has_factors, const UseView& view, int lane, int lanes,
                      RowPart<kVector, kPerLane>& sum) const {
    GradientReader<typename Apply::Gradient>::WithNumber(view.gradient_dtype, [&](auto number) {
      AddAs<decltype(number)>(first, count, has_factors, view.dim, lane, lanes, sum);
    });
  }

 private:
  template <typename Gradient, int kVector, int kPerLane>
  __device__ void AddAs(int first, int count, bool has_factors, int dim, int lane, int lanes,
                        RowPart<kVector, kPerLane>& sum) const {
    constexpr int kFlight = RowsInFlight<16, kVector * kPerLane>();
    for (int u = 0; u < count; u += kFlight) {
      PackedPart<Gradient, kVector, kPerLane> parts[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        parts[i] = {};  // otherwise the compiler keeps its registers through all loops
        if (u + i < count) parts[i].Load(static_cast<const Gradient*>(gradients[first + u + i]), lane, lanes, dim);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (u + i >= count) continue;
        RowPart<kVector, kPerLane> wide = parts[i].Widened();
        if (has_factors) wide.Scale(factors[first + u + i]);
        sum.Add(wide);
      }
    }
  }
};

/// Returns the number of blocks of kBlock threads that should fit a multiprocessor while gradients are summed: a step
/// that holds more than the row itself, or produces 16-bit numbers, needs registers.
template <typename Apply, int kFloats>
constexpr int SumBlocksPerMultiprocessor() {
  return Apply::kStepsLongRowsApart             ? (kFloats <= 16 ? 2 : 1)
         : kFloats <= 8 && Apply::kNumLines > 1 ? 3
                                                : BlocksPerMultiprocessor<kFloats>();
}

/// One of a warp's 32 sorted uses, held by a lane, and the chunk that may begin there.
///
/// A chunk begins where a row begins, and every kUsesPerChunk uses after that. The warp that holds its first use sums
/// it, and reads up to 31 uses of the next warp.
struct LaneUse {
  uint32_t row, later_row;  // of the use, and of the one 32 uses later; kNoRow: none
  uint32_t position;
  uint32_t rank;    // among the uses of its row
  int to_boundary;  // uses from here to the next row; more than kUsesPerChunk if that is farther
  int length;       // of a chunk that begins here
  bool is_start;    // a chunk begins here

  /// Returns whether the chunk of one run begins and ends a row.
  __device__ bool IsShort() const { return rank == 0 && length <= kUsesPerRun; }

  /// Finds the use of each lane; all lanes of the warp call it. Returns false if no chunk begins among the uses from
  /// `first`.
  __device__ bool Find(const UsesWorkspace& w, uint32_t first, uint32_t num_keys) {
    const int warp_lane = threadIdx.x % kWarp;
    const uint32_t at = first + warp_lane, later = at + kWarp;
    row = at < num_keys ? w.sorted_rows[at] : kNoRow;
    later_row = later < num_keys ? w.sorted_rows[later] : kNoRow;
    const uint32_t before = first == 0 ? kNoRow : w.sorted_rows[first - 1];
    position = at < num_keys ? w.sorted_positions[at] : 0;
    if (__all_sync(~0u, row == kNoRow)) return false;

    // Bit i: use first + i belongs to another row than the previous one.
    uint32_t previous = __shfl_up_sync(~0u, row, 1);
    if (warp_lane == 0) previous = before;
    uint32_t later_previous = __shfl_up_sync(~0u, later_row, 1);
    const uint32_t last_row = __shfl_sync(~0u, row, kWarp - 1);
    if (warp_lane == 0) later_previous = last_row;
    const unsigned changes = __ballot_sync(~0u, row != previous || at == 0);
    const unsigned later_changes = __ballot_sync(~0u, later_row != later_previous);
    const uint64_t boundary = Word64(changes, later_changes);

    const uint32_t first_row = __shfl_sync(~0u, row, 0);
    const uint32_t uses_before = (changes & 1) ? 0 : first - StartOfRow(w.sorted_rows, first, first_row);
    const unsigned heads_so_far = changes & (~0u >> (kWarp - 1 - warp_lane));
    rank = heads_so_far ? warp_lane - (kWarp - 1 - __clz(heads_so_far)) : uses_before + warp_lane;
    is_start = row != kNoRow && rank % kUsesPerChunk == 0;
    if (!__any_sync(~0u, is_start)) return false;
    const uint64_t after = boundary >> (warp_lane + 1);
    to_boundary = after == 0 ? 2 * kWarp : __ffsll(static_cast<long long>(after));
    length = min(kUsesPerChunk, to_boundary);
    return true;
  }
};

/// The chunks that begin among a warp's uses.
struct WarpChunks {
  unsigned shorts;   // bits of the lanes at whose uses chunks of one run begin: WarpUses lists them in order
  unsigned longs;    // bits of the lanes at whose uses longer chunks begin
  bool has_factors;  // rows of single keys and plain sums, the common case, need no factors

  /// Lists the chunks, and stores what the sums need of the uses. All lanes of the warp call it.
  __device__ static WarpChunks List(const LaneUse& use, const UseView& view,
                                    const FeaturePointers<const void>& gradients, const UsesWorkspace& w,
                                    uint32_t first, WarpUses& uses) {
    const int warp_lane = threadIdx.x % kWarp;
    WarpChunks chunks;
    const bool is_short = use.IsShort();
    chunks.shorts = __ballot_sync(~0u, use.is_start && is_short);
    chunks.longs = __ballot_sync(~0u, use.is_start && !is_short);
    // Rows of one use first: groups that work in parallel then have similar work.
    const unsigned singles = __ballot_sync(~0u, use.is_start && is_short && use.length == 1);
    if (use.is_start && is_short) {
      const unsigned lower = (1u << warp_lane) - 1;
      const int place =
          use.length == 1 ? __popc(singles & lower) : __popc(singles) + __popc(chunks.shorts & ~singles & lower);
      uses.short_starts[place] = static_cast<uint8_t>(warp_lane);
    }
    float factor = 1.0f, later_factor = 1.0f;
    if (use.row != kNoRow) uses.gradients[warp_lane] = view.GradientOf(gradients, use.position, &factor);
    if (__any_sync(~0u, use.is_start && warp_lane + use.length > kWarp) && use.later_row != kNoRow) {
      uses.gradients[kWarp + warp_lane] =
          view.GradientOf(gradients, w.sorted_positions[first + warp_lane + kWarp], &later_factor);
    }
    uses.factors[warp_lane] = factor;
    uses.factors[kWarp + warp_lane] = later_factor;
    uses.rows[warp_lane] = use.row;
    uses.positions[warp_lane] = use.position;
    uses.lengths[warp_lane] = static_cast<uint8_t>(use.length);
    chunks.has_factors = __any_sync(~0u, factor != 1.0f || later_factor != 1.0f);
    return chunks;
  }
};

/// The state that all sums of a warp's chunks share. A group is `lanes` neighbouring lanes, which hold a row together.
template <typename Apply, int kVector, int kPerLane>
struct ChunkSums {
  using Part = RowPart<kVector, kPerLane>;
  using Loaded = typename Apply::template Loaded<kVector, kPerLane>;

  const Apply& apply;
  const UseView& view;
  const WarpUses& uses;
  const RowRounding* rounding_of_use;  // of the warp
  bool has_factors;
  int lanes, lane, group, groups;
  unsigned mask;  // of the calling lane's group

  __device__ RowRounding RoundingOf(int use) const {
    return Apply::kStepsRows16 ? rounding_of_use[use] : RowRounding{0};
  }
  /// Adds a row's other gradients to `sum`, which holds the first one without its factor.
  __device__ void AddOthers(int start, int count, Part& sum) const {
    if (has_factors) sum.Scale(uses.factors[start]);
    uses.template Add<Apply>(start + 1, count - 1, has_factors, view, lane, lanes, sum);
  }
  /// Steps the row whose `count` uses begin at `start`. `callers`: the lanes that call it together.
  __device__ void Step(int start, int count, unsigned callers, Loaded& loaded, Part& sum) const {
    apply.Apply(uses.rows[start], uses.positions[start], static_cast<uint32_t>(count), lane, lanes, callers, loaded,
                sum);
  }
};

/// Sums and steps the rows with one run, one group of lanes each, the groups in parallel.
///
/// The groups take their turns together: shuffles of a whole warp are cheap, those of a part of it are not, and a
/// step's instructions are issued once for all groups.
template <typename Apply, int kVector, int kPerLane>
struct ShortChunks : ChunkSums<Apply, kVector, kPerLane> {
  using Base = ChunkSums<Apply, kVector, kPerLane>;
  using Base::AddOthers, Base::apply, Base::group, Base::groups, Base::lane, Base::lanes, Base::RoundingOf, Base::Step,
      Base::uses, Base::view;
  using typename Base::Loaded, typename Base::Part;

  // Narrow rows: several a turn, but at most four, because their code is unrolled.
  static constexpr int kFloats = kVector * kPerLane;
  static constexpr int kFlight = Apply::kStepsLongRowsApart ? 1 : RowsInFlight<8, kFloats == 1 ? 2 : kFloats>();

  __device__ void Run(int num_shorts) const {
    for (int first_turn = 0; first_turn < num_shorts; first_turn += groups * kFlight) {
      Loaded loaded[kFlight];
      Part sums[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int turn = first_turn + i * groups + group;
        sums[i].Fill(0.0f);
        loaded[i] = {};  // as in AddAs
        if (turn >= num_shorts) continue;
        // The row is requested before the warp waits for the first gradient.
        const int start = uses.short_starts[turn];
        uses.template Load<Apply>(start, view, lane, lanes, sums[i]);
        apply.Load(uses.rows[start], RoundingOf(start), lane, lanes, loaded[i]);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (first_turn + i * groups >= num_shorts) continue;
        const int turn = first_turn + i * groups + group;
        const bool has_row = turn < num_shorts;
        const int start = has_row ? uses.short_starts[turn] : 0;
        const int count = has_row ? uses.lengths[start] : 0;
        if (has_row) AddOthers(start, count, sums[i]);
        __syncwarp();
        Step(start, count, ~0u, loaded[i], sums[i]);
      }
    }
  }
};

/// Sums and steps as above, by stages in shared memory (StageOf): the inputs of a turn are copied while earlier turns
/// are at work.
template <typename Apply, int kVector, int kPerLane>
struct StagedShortChunks : ChunkSums<Apply, kVector, kPerLane> {
  using Base = ChunkSums<Apply, kVector, kPerLane>;
  using Base::AddOthers, Base::apply, Base::group, Base::groups, Base::lane, Base::lanes, Base::RoundingOf, Base::Step,
      Base::uses, Base::view;
  using typename Base::Loaded, typename Base::Part;
  using Stage = StageOf<Apply, kVector, kPerLane>;

  static constexpr int kAhead = Stage::kCount - 1;

  __device__ void Run(int num_shorts) const {
    int filled = 0, used = 0;  // the stages of the requested turn and of the current one
    for (int first_turn = -kAhead * groups; first_turn < num_shorts; first_turn += groups) {
      const int turn = first_turn + group;
      Ask(turn + kAhead * groups, num_shorts, NextStage(filled));
      if (first_turn < 0) continue;
      __pipeline_wait_prior(kAhead);
      __syncwarp();
      const Stage stage = NextStage(used);
      const bool has_row = turn < num_shorts;
      const int start = has_row ? uses.short_starts[turn] : 0;
      const int count = has_row ? uses.lengths[start] : 0;
      Loaded loaded;
      Part sum;
      sum.Fill(0.0f);
      if (has_row) {
        GradientReader<typename Apply::Gradient>::WithNumber(view.gradient_dtype, [&](auto number) {
          PackedPart<decltype(number), kVector, kPerLane> first_gradient;
          StagedLines<decltype(number), kVector, kPerLane>::Take(stage.gradients, first_gradient);
          sum = first_gradient.Widened();
        });
        AddOthers(start, count, sum);
        apply.Take(stage, RoundingOf(start), lanes, loaded);
      }
      __syncwarp();
      Step(start, count, ~0u, loaded, sum);
    }
  }

 private:
  /// Returns stage `number` and advances to the next; the stages are used in turn.
  __device__ static Stage NextStage(int& number) {
    extern __shared__ float4 shared_stages[];
    const Stage stage = Stage::At(reinterpret_cast<char*>(shared_stages), number);
    number = number + 1 == Stage::kCount ? 0 : number + 1;
    return stage;
  }

  /// Begins to copy the inputs of a turn.
  __device__ void Ask(int turn, int num_shorts, const Stage& stage) const {
    if (turn < num_shorts) {
      const int start = uses.short_starts[turn];
      GradientReader<typename Apply::Gradient>::WithNumber(view.gradient_dtype, [&](auto number) {
        StagedLines<decltype(number), kVector, kPerLane>::Ask(
            stage.gradients, static_cast<const decltype(number)*>(uses.gradients[start]), lane, lanes, view.dim);
      });
      apply.Ask(uses.rows[start], stage, lane, lanes);
    }
    __pipeline_commit();
  }
};

/// Sums longer chunks, one after the other: each group sums a run, and then each adds up all runs. A row with one chunk
/// is stepped.
///
/// A chunk of a longer row writes its partial sum. Of the chunks that begin in one warp's 32 uses at most one is the
/// first of a long row and at most one is a later one, so partials[2 * warp + is_first] is written once. The last chunk
/// puts the row into the list.
template <typename Apply, int kVector, int kPerLane>
struct LongChunks : ChunkSums<Apply, kVector, kPerLane> {
  using Base = ChunkSums<Apply, kVector, kPerLane>;
  using Base::apply, Base::group, Base::groups, Base::has_factors, Base::lane, Base::lanes, Base::mask,
      Base::RoundingOf, Base::Step, Base::uses, Base::view;
  using typename Base::Loaded, typename Base::Part;

  /// Runs the sums. `longs`: the lanes at whose uses the chunks begin; `use`: that of the calling lane.
  __device__ void Run(unsigned longs, const LaneUse& use, const UsesWorkspace& w, uint32_t warp) const {
    const uint32_t first = warp * kWarp;
    for (; longs != 0; longs &= longs - 1) {
      const int start = __ffs(longs) - 1;
      const uint32_t rank = __shfl_sync(~0u, use.rank, start);
      const int count = uses.lengths[start];
      const bool ends_row = __shfl_sync(~0u, use.to_boundary, start) <= kUsesPerChunk;
      const bool is_whole = rank == 0 && ends_row;
      Part total = Sum(start, count);
      if (group == 0) {
        if (is_whole) {
          Loaded loaded;
          apply.Load(uses.rows[start], RoundingOf(start), lane, lanes, loaded);
          Step(start, count, mask, loaded, total);
        } else {
          const int dim = view.dim;
          total.Store(w.partials + (2 * int64_t{warp} + (rank == 0 ? 1 : 0)) * dim, lane, lanes, dim);
          if (ends_row && lane == 0) {
            const LongRow long_row = {first + start - rank, rank + count};
            if (long_row.num_uses <= kFewChunks * kUsesPerChunk) {
              w.FewChunks(atomicAdd(&w.num_long->few, 1u)) = long_row;
            } else {
              w.MoreChunks(atomicAdd(&w.num_long->many, 1u)) = long_row;
            }
            if (long_row.num_uses > kManyChunks * kUsesPerChunk) w.hot_rows[atomicAdd(&w.num_long->hot, 1u)] = long_row;
          }
        }
      }
      __syncwarp();
    }
  }

 private:
  /// Returns the sum of a chunk, in every group.
  __device__ Part Sum(int start, int count) const {
    Part total;
    total.Fill(-0.0f);
    for (int done = 0; done < count; done += groups * kUsesPerRun) {
      const int begin = done + group * kUsesPerRun;
      Part run;
      run.Fill(-0.0f);
      uses.template Add<Apply>(start + begin, min(count - begin, kUsesPerRun), has_factors, view, lane, lanes, run);
      __syncwarp();
      for (int g = 0; g < groups && done + g * kUsesPerRun < count; ++g) {
        total.Add(run.Shuffle(g * lanes + lane));
      }
    }
    return total;
  }
};

// One warp, 32 sorted uses: the chunks that begin among them (LaneUse).
// A row with one chunk is stepped only by the group of lanes that summed it; LongChunks describes the writes of the
// partial sums of longer rows.
template <typename Apply, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock, SumBlocksPerMultiprocessor<Apply, kVector * kPerLane>())
    SumUsesKernel(const __grid_constant__ Apply apply, const __grid_constant__ FeaturePointers<const void> gradients,
                  UseView view, UsesWorkspace w, uint32_t num_keys, int lanes) {
  __shared__ WarpUses uses_of_warp[kBlock / kWarp];
  __shared__ RowRounding rounding_of_use[Apply::kStepsRows16 ? kBlock : 1];
  if constexpr (Apply::kStepsLongRowsApart) apply.Begin();
  const int warp_in_block = threadIdx.x / kWarp, warp_lane = threadIdx.x % kWarp;
  WarpUses& uses = uses_of_warp[warp_in_block];
  uint32_t block = blockIdx.x;
  if constexpr (Apply::kShiftsBlocks) block = apply.Shifted(block);
  const uint32_t warp = block * (blockDim.x / kWarp) + warp_in_block;
  const uint32_t first = warp * kWarp;
  if (first >= num_keys) return;
  LaneUse use;
  if (!use.Find(w, first, num_keys)) return;
  const WarpChunks chunks = WarpChunks::List(use, view, gradients, w, first, uses);
  if constexpr (Apply::kStepsRows16) {
    if (use.is_start && use.rank == 0) rounding_of_use[threadIdx.x] = apply.RoundingOf(use.position);
  }
  __syncwarp();

  // `lanes` is a power of two: a division is avoided, whose result would be spilled.
  const int lane_bits = __ffs(lanes) - 1;
  const int lane = warp_lane & (lanes - 1), group = warp_lane >> lane_bits, groups = kWarp >> lane_bits;
  const ChunkSums<Apply, kVector, kPerLane> sums{
      apply, view,  uses,   rounding_of_use + warp_in_block * kWarp, chunks.has_factors, lanes,
      lane,  group, groups, GroupMask(lanes, warp_lane - lane)};
  const int num_shorts = __popc(chunks.shorts);
  if constexpr (StageOf<Apply, kVector, kPerLane>::kIsUsed) {
    StagedShortChunks<Apply, kVector, kPerLane>{sums}.Run(num_shorts);
  } else {
    ShortChunks<Apply, kVector, kPerLane>{sums}.Run(num_shorts);
  }
  __syncwarp();
  LongChunks<Apply, kVector, kPerLane>{sums}.Run(chunks.longs, use, w, warp);
}

/// The partial sums of one long row.
struct PartialsOfRow {
  float* partials;
  uint32_t begin, num_chunks;
  int dim;

  __device__ static PartialsOfRow Of(const UsesWorkspace& w, LongRow row, int dim) {
    return {w.partials, row.begin, CeilDiv<uint32_t>(row.num_uses, kUsesPerChunk), dim};
  }
  /// Returns the number of partial sums after SumHotKernel has run.
  __device__ uint32_t NumLeft() const { return num_chunks > kManyChunks ? kChunkLanes : num_chunks; }

  /// Returns the address of a partial sum. The first one's place holds the total in the end, if the row is stepped
  /// apart.
  __device__ float* At(uint32_t chunk) const {
    const int64_t warp = (begin + chunk * kUsesPerChunk) / kWarp;
    return partials + (2 * warp + (chunk == 0 ? 1 : 0)) * dim;
  }
  template <int kVector, int kPerLane>
  __device__ void Load(uint32_t chunk, int lane, int lanes, RowPart<kVector, kPerLane>& part) const {
    part.LoadPlain(At(chunk), lane, lanes, dim);
  }
};

constexpr int kHotTileFloats = 4 * kMaxDim;  // 16 KiB: two tiles fit the 48 KiB that a block may always declare

// The rows with more than kManyChunks chunks: a block adds the partial sums of one lane, in sequence, and writes the
// sum to the place of the lane's first partial sum. They arrive in tiles: one is added while the next is copied.
template <int kTileFloats>
__global__ void __launch_bounds__(kBlock) SumHotKernel(UsesWorkspace w, int dim) {
  constexpr int kColumnsPerThread = kMaxDim / kBlock;
  __shared__ float tiles[2][kTileFloats];
  const uint32_t num_pairs = w.num_long->hot * kChunkLanes;
  const uint32_t tile_lines = kTileFloats / dim;
  for (uint32_t pair = blockIdx.x; pair < num_pairs; pair += gridDim.x) {
    const PartialsOfRow partials = PartialsOfRow::Of(w, w.hot_rows[pair / kChunkLanes], dim);
    const uint32_t chunk_lane = pair % kChunkLanes;
    const uint32_t num_lines = (partials.num_chunks - chunk_lane + kChunkLanes - 1) / kChunkLanes;
    const auto ask = [&](uint32_t first_line) {
      const uint32_t lines = first_line < num_lines ? min(tile_lines, num_lines - first_line) : 0;
      float* tile = tiles[first_line / tile_lines % 2];
      for (uint32_t at = threadIdx.x; at < lines * dim; at += kBlock) {
        const float* line = partials.At(chunk_lane + (first_line + at / dim) * kChunkLanes);
        __pipeline_memcpy_async(tile + at, line + at % dim, sizeof(float));
      }
      __pipeline_commit();
    };
    float sums[kColumnsPerThread];
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; ++i) sums[i] = -0.0f;
    ask(0);
    for (uint32_t first_line = 0; first_line < num_lines; first_line += tile_lines) {
      ask(first_line + tile_lines);
      __pipeline_wait_prior(1);
      __syncthreads();
      const float* tile = tiles[first_line / tile_lines % 2];
      const uint32_t lines = min(tile_lines, num_lines - first_line);
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; ++i) {
        const int column = static_cast<int>(threadIdx.x) + i * kBlock;
        if (column >= dim) continue;
#pragma unroll 8
        for (uint32_t line = 0; line < lines; ++line) sums[i] = sums[i] + tile[line * dim + column];
      }
      __syncthreads();
    }
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; ++i) {
      const int column = static_cast<int>(threadIdx.x) + i * kBlock;
      if (column < dim) partials.At(chunk_lane)[column] = sums[i];
    }
  }
}

// The rows with more than 32 uses. Those with few chunks take one group of lanes each. Then whole blocks take the
// others, one after the other: kChunkLanes groups of lanes add a row's partial sums, then a tree.
// The list's order depends on timing, but its rows are independent.
template <typename Apply, int kVector, int kPerLane>
__global__ void __launch_bounds__(1024, 1)
    SumLongKernel(const __grid_constant__ Apply apply, UseView view, UsesWorkspace w, int lanes) {
  __shared__ float tree[kChunkLanes][kWarp * kVector];
  const int lane = threadIdx.x % lanes, chunk_lane = threadIdx.x / lanes;
  const LongCounts num_long = *w.num_long;
  const unsigned group_mask = GroupMask(lanes, static_cast<int>(threadIdx.x % kWarp) - lane);
  const uint32_t num_groups = gridDim.x * (blockDim.x / lanes);
  for (uint32_t item = blockIdx.x * (blockDim.x / lanes) + chunk_lane; item < num_long.few; item += num_groups) {
    const LongRow long_row = w.FewChunks(item);
    const PartialsOfRow partials = PartialsOfRow::Of(w, long_row, view.dim);
    [[maybe_unused]] const uint32_t row = w.sorted_rows[long_row.begin];
    typename Apply::template Loaded<kVector, kPerLane> loaded;
    if constexpr (!Apply::kStepsLongRowsApart)
      apply.Load(row, apply.RoundingOf(w.sorted_positions[long_row.begin]), lane, lanes, loaded);
    // The tree over kChunkLanes lanes, of which those from kFewChunks on have no chunk.
    const auto pair = [&](uint32_t chunk, RowPart<kVector, kPerLane>& sum) {
      RowPart<kVector, kPerLane> other;
      partials.Load(chunk, lane, lanes, sum);
      if (chunk + kFewChunks / 2 >= partials.num_chunks) return;
      partials.Load(chunk + kFewChunks / 2, lane, lanes, other);
      sum.Add(other);
    };
    RowPart<kVector, kPerLane> sum, right, other;
    pair(0, sum);
    pair(1, right);
    if (partials.num_chunks > 2) {
      pair(2, other);
      sum.Add(other);
    }
    if (partials.num_chunks > 3) {
      pair(3, other);
      right.Add(other);
    }
    sum.Add(right);
    if constexpr (Apply::kStepsLongRowsApart) {
      sum.Store(partials.At(0), lane, lanes, view.dim);
    } else {
      apply.Apply(row, w.sorted_positions[long_row.begin], long_row.num_uses, lane, lanes, group_mask, loaded, sum);
    }
  }
  for (uint32_t item = blockIdx.x; item < num_long.many; item += gridDim.x) {
    const LongRow long_row = w.MoreChunks(item);
    const PartialsOfRow partials = PartialsOfRow::Of(w, long_row, view.dim);
    const uint32_t num_left = partials.NumLeft();
    constexpr int kFlight = RowsInFlight<32, kVector * kPerLane>();
    RowPart<kVector, kPerLane> sum;
    sum.Fill(-0.0f);
    for (uint32_t c = chunk_lane; c < num_left; c += kFlight * kChunkLanes) {
      RowPart<kVector, kPerLane> parts[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        parts[i].Fill(0.0f);  // as in AddAs
        if (c + i * kChunkLanes < num_left) partials.Load(c + i * kChunkLanes, lane, lanes, parts[i]);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (c + i * kChunkLanes < num_left) sum.Add(parts[i]);
      }
    }
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      float* mine = &tree[chunk_lane][lane * kVector];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kVector; ++i) mine[i] = sum.part[k].v[i];
      for (int half = kChunkLanes / 2; half >= 1; half /= 2) {
        __syncthreads();
        if (chunk_lane < half) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) mine[i] = mine[i] + tree[chunk_lane + half][lane * kVector + i];
        }
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.part[k].v[i] = mine[i];
    }
    if constexpr (Apply::kStepsLongRowsApart) {
      if (chunk_lane == 0) sum.Store(partials.At(0), lane, lanes, view.dim);
    } else if (chunk_lane == 0) {
      const uint32_t row = w.sorted_rows[long_row.begin];
      const unsigned mask = GroupMask(lanes, 0);
      typename Apply::template Loaded<kVector, kPerLane> loaded;
      apply.Load(row, apply.RoundingOf(w.sorted_positions[long_row.begin]), lane, lanes, loaded);
      apply.Apply(row, w.sorted_positions[long_row.begin], long_row.num_uses, lane, lanes, mask, loaded, sum);
    }
    __syncthreads();
  }
}

/// The step of SumLongKernel if a later kernel steps the rows.
struct SumsAlone {
  static constexpr bool kStepsLongRowsApart = true;
  template <int kVector, int kPerLane>
  struct Loaded {};
};

/// Launches SumLongKernel for SumsAlone: one for all optimizers and dtypes of rows (update_long_cuda.cu).
LaunchError LaunchSumLong(Stream stream, const UseView& view, const UsesWorkspace& w, LaneShape shape);

/// Returns whether a separate kernel steps the rows with more than 32 uses. If a lane has many numbers of a row, a step
/// in SumLongKernel is large code, and another launch is cheap relative to the work.
template <typename Apply, int kFloats>
constexpr bool StepsLongRowsApart() {
  return Apply::kStepsLongRowsApart || (Apply::kNumLines > 0 && kFloats >= 16);
}

// The rows whose sums the previous kernel left to be applied: a group of lanes each.
template <typename Apply, int kVector, int kPerLane>
__global__ void __launch_bounds__(kBlock)
    StepLongKernel(const __grid_constant__ Apply apply, UseView view, UsesWorkspace w, int lanes) {
  if constexpr (Apply::kStepsLongRowsApart) apply.Begin();
  const int lane = threadIdx.x % lanes;
  const unsigned mask = GroupMask(lanes, static_cast<int>(threadIdx.x % kWarp) - lane);
  const LongCounts num_long = *w.num_long;
  const uint32_t groups = blockDim.x / lanes, num_items = num_long.few + num_long.many;
  for (uint32_t item = blockIdx.x * groups + threadIdx.x / lanes; item < num_items; item += gridDim.x * groups) {
    const LongRow long_row = item < num_long.few ? w.FewChunks(item) : w.MoreChunks(item - num_long.few);
    const uint32_t row = w.sorted_rows[long_row.begin];
    typename Apply::template Loaded<kVector, kPerLane> loaded;
    apply.Load(row, apply.RoundingOf(w.sorted_positions[long_row.begin]), lane, lanes, loaded);
    RowPart<kVector, kPerLane> sum;
    sum.Load(PartialsOfRow::Of(w, long_row, view.dim).At(0), lane, lanes, view.dim);
    apply.Apply(row, w.sorted_positions[long_row.begin], long_row.num_uses, lane, lanes, mask, loaded, sum);
  }
}

/// The threads of a block and the bytes of shared memory that they need in addition to those that a kernel declares.
struct BlockShape {
  int threads;
  int shared_bytes;
};

constexpr int kAlwaysAllowedBytes = 48 << 10;  // shared memory that a block may always use (CUDA)
constexpr int kMostDeclaredBytes = 16 << 10;   // the limit for kernels that ask for more

/// Gets the bytes of shared memory that a block can have on the current GPU.
inline LaunchError SharedBytesOfBlock(int* bytes) {
  int device = 0;
  JAXSOK_RETURN_IF_CUDA(cudaGetDevice(&device));
  JAXSOK_RETURN_IF_CUDA(cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return nullptr;
}

/// Allows a kernel more shared memory per block than the default: the maximum, whatever this launch needs, so that
/// launches from several threads never reduce each other's limit.
template <typename Kernel>
inline LaunchError AllowShared(Kernel* kernel, int bytes) {
  if (bytes <= kAlwaysAllowedBytes - kMostDeclaredBytes) return nullptr;
  int most = 0;
  cudaFuncAttributes declared;
  JAXSOK_RETURN_IF_LAUNCH(SharedBytesOfBlock(&most));
  JAXSOK_RETURN_IF_CUDA(cudaFuncGetAttributes(&declared, kernel));
  JAXSOK_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             most - static_cast<int>(declared.sharedSizeBytes)));
  return nullptr;
}

/// Returns the blocks of SumLongKernel and its companions, each of 32 groups of lanes; without work they cost 2 us.
inline int NumLongBlocks() { return NumMultiprocessors() * 4; }

/// Returns the step that is applied to sums of partial sums.
template <typename Apply>
const Apply& OfSums(const Apply& apply) {
  return apply;
}

template <typename Apply>
struct LaunchSums {
  Stream stream;
  const Apply& apply;
  const FeaturePointers<const void>& gradients;
  UseView view;
  const UsesWorkspace& w;
  int64_t num_keys;
  LaneShape shape;
  BlockShape block;
  template <int kVector, int kPerLane>
  LaunchError operator()(CompiledShape<kVector, kPerLane> compiled) const {
    const unsigned blocks = static_cast<unsigned>(CeilDiv<int64_t>(num_keys, block.threads));
    const uint32_t n = static_cast<uint32_t>(num_keys);
    const auto sum = SumUsesKernel<Apply, kVector, kPerLane>;
    using Stage = StageOf<Apply, kVector, kPerLane>;
    int shared_bytes = block.shared_bytes;
    if constexpr (Stage::kIsUsed) shared_bytes = Stage::kCount * Stage::Bytes();
    JAXSOK_RETURN_IF_LAUNCH(AllowShared(sum, shared_bytes));
    sum<<<blocks, block.threads, shared_bytes, stream>>>(apply, gradients, view, w, n, compiled.lanes);
    JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    if (num_keys > int64_t{kManyChunks} * kUsesPerChunk) {
      SumHotKernel<kHotTileFloats><<<NumLongBlocks(), kBlock, 0, stream>>>(w, view.dim);
      JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
    }
    return LaunchLong<kVector, kPerLane>(OfSums(apply), compiled.lanes);
  }
  template <int kVector, int kPerLane, typename LongApply>
  LaunchError LaunchLong(const LongApply& long_apply, int lanes) const {
    if constexpr (StepsLongRowsApart<Apply, kVector * kPerLane>()) {
      JAXSOK_RETURN_IF_LAUNCH(LaunchSumLong(stream, view, w, shape));
      const auto step = StepLongKernel<LongApply, kVector, kPerLane>;
      JAXSOK_RETURN_IF_LAUNCH(AllowShared(step, block.shared_bytes));
      step<<<NumLongBlocks(), block.threads, block.shared_bytes, stream>>>(long_apply, view, w, lanes);
    } else {
      const unsigned threads = static_cast<unsigned>(kChunkLanes * lanes);
      SumLongKernel<LongApply, kVector, kPerLane><<<NumLongBlocks(), threads, 0, stream>>>(long_apply, view, w, lanes);
    }
    return LastLaunchError();
  }
};

/// Launches sum and long, after the uses are sorted. `shape`: how lanes share a row.
template <typename Apply>
inline LaunchError LaunchUses(Stream stream, const Apply& apply, const GradientPointers& gradients,
                              const BatchView& batch, UsesWorkspace& w, int32_t dim, LaneShape shape,
                              BlockShape block = {kBlock, 0}) {
  const UseView view{batch.features, batch.num_features, w.factors, dim, gradients.dtype, batch.num_keys};
  const LaunchSums<Apply> sums{stream, apply, gradients.of_feature, view, w, batch.num_keys, shape, block};
  if constexpr (Apply::kStepsRows16) {
    if (shape.vector == 8) return DispatchVectorsOf8(dim, shape, sums);
  }
  return DispatchShape(dim, shape, sums);
}

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_USES_SUM_CUDA_CUH_

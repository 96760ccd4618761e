// Moves rows between host memory and a GPU (tier.h has the contract).
//
// The link moves some 30 M random records a second, reads and writes together: each needs a translation of its address,
// which covers 64 KB. In ascending parts of memory, and with few records in flight, it moves 45 to 65 M (one H200,
// records of 528 bytes in 14 GB). So few blocks move records, each warp several at a time.
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

#include "../core/initialize.h"
#include "../core/row_dtype.h"
#include "device_cuda.cuh"
#include "host_memory.h"
#include "tier_cuda.cuh"

namespace jaxsok {
namespace {

constexpr int kLine = 16;         // bytes that a lane moves at once
constexpr int kLinesPerLane = 9;  // in flight: eight records of 528 bytes a warp
constexpr int kSomeLines = 2;     // in flight for lines that take much code
constexpr int kLinkBlocks = 16;   // blocks that move records over the link; more are slower

__device__ __forceinline__ Ends EndsOfLane(const Ends& own, int lane) {
  const uint64_t host = __shfl_sync(~0u, reinterpret_cast<uint64_t>(own.host), lane);
  return {reinterpret_cast<char*>(host), __shfl_sync(~0u, own.here, lane)};
}

/// Moves lines of several records at once with the lanes of a warp: all are loaded before any is stored. A record's
/// lines begin at `first_line`. The blocks from `num_blocks` on have nothing to do.
template <int kOfLane = kLinesPerLane, typename EndsOf, typename Load, typename Store>
__device__ __forceinline__ void MoveLines(int64_t num_records, int first_line, int num_lines, const EndsOf& ends_of,
                                          const Load& load, const Store& store, unsigned num_blocks = gridDim.x) {
  if (num_lines == 0 || blockIdx.x >= num_blocks) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int together = min(kWarp, max(1, kOfLane * kWarp / num_lines));
  const int64_t stride = int64_t{num_blocks} * (blockDim.x / kWarp) * together;
  int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp * together;
  const auto own_of = [&](int64_t begin) {
    return lane < together && begin + lane < num_records ? ends_of(begin + lane) : Ends{nullptr, 0};
  };
  Ends next = own_of(first);
  for (; first < num_records; first += stride) {
    const int num = static_cast<int>(min(int64_t{together}, num_records - first));
    const Ends own = next;
    next = own_of(first + stride);
    for (int begin = 0; begin < num * num_lines; begin += kOfLane * kWarp) {
      uint4 lines[kOfLane];
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        const int at = begin + j * kWarp + lane, record = at / num_lines;
        const Ends ends = EndsOfLane(own, record);
        if (ends.host != nullptr && record < num) lines[j] = load(ends, (first_line + at - record * num_lines) * kLine);
      }
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        const int at = begin + j * kWarp + lane, record = at / num_lines;
        const Ends ends = EndsOfLane(own, record);
        if (ends.host != nullptr && record < num) {
          store(ends, (first_line + at - record * num_lines) * kLine, lines[j]);
        }
      }
    }
  }
}

__host__ __device__ constexpr int NumLines(int64_t num_bytes) { return static_cast<int>(num_bytes / kLine); }

__device__ __forceinline__ bool IsAligned(const void* at, int bytes) {
  return reinterpret_cast<uint64_t>(at) % bytes == 0;
}

/// The address in the cache of a record's bytes from `at` on; `left`: the remaining bytes of this piece, 0 between
/// pieces.
struct Piece {
  char* data;
  int64_t left;
};
__device__ __forceinline__ Piece PieceAt(const TierView& tier, uint32_t slot, int64_t at) {
  const int64_t row_bytes = tier.RowBytes();
  if (at < row_bytes) return {tier.RowAt(slot) + at, row_bytes - at};
#pragma unroll 1
  for (int k = 0; k < tier.states.num_states; ++k) {
    const int64_t in = at - tier.state_begin[k], size = int64_t{tier.states.width[k]} * 4;
    if (in >= 0 && in < size) return {reinterpret_cast<char*>(tier.StateAt(k, slot)) + in, size - in};
  }
  return {nullptr, 0};
}

/// Loads 16 bytes of the record of a slot; zeros between its pieces.
__device__ __forceinline__ uint4 LoadLine(const TierView& tier, uint32_t slot, int at) {
  const Piece piece = PieceAt(tier, slot, at);
  if (piece.left >= kLine && IsAligned(piece.data, kLine)) return *reinterpret_cast<const uint4*>(piece.data);
  uint32_t words[kLine / 4] = {};
  if (tier.RowBytes() % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kLine / 4; ++i) {
      const Piece word = PieceAt(tier, slot, at + 4 * i);
      if (word.left != 0) words[i] = *reinterpret_cast<const uint32_t*>(word.data);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLine / 2; ++i) {
      const Piece half = PieceAt(tier, slot, at + 2 * i);
      if (half.left != 0) words[i / 2] |= uint32_t{*reinterpret_cast<const uint16_t*>(half.data)} << (i % 2 * 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void StoreLine(const TierView& tier, uint32_t slot, int at, uint4 line) {
  const Piece piece = PieceAt(tier, slot, at);
  if (piece.left >= kLine && IsAligned(piece.data, kLine)) {
    *reinterpret_cast<uint4*>(piece.data) = line;
    return;
  }
  const uint32_t words[kLine / 4] = {line.x, line.y, line.z, line.w};
  if (tier.RowBytes() % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kLine / 4; ++i) {
      const Piece word = PieceAt(tier, slot, at + 4 * i);
      if (word.left != 0) *reinterpret_cast<uint32_t*>(word.data) = words[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLine / 2; ++i) {
    const Piece half = PieceAt(tier, slot, at + 2 * i);
    if (half.left != 0) *reinterpret_cast<uint16_t*>(half.data) = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

/// Returns the lines of a record that lie in the row alone: one instruction moves each of them. On the device they are
/// moved by themselves, since the test for the others takes longer than the move.
__device__ __forceinline__ int NumLinesInRow(const TierView& tier) {
  return tier.RowBytes() % kLine == 0 ? NumLines(tier.RowBytes()) : 0;
}

template <typename Row>
__device__ void Initialize(const RowInitializer& values, char* row, int32_t dim, int lane) {
  for (int column = lane; column < dim; column += kWarp) {
    reinterpret_cast<Row*>(row)[column] = RowNumber<Row>::Nearest(values.At(column));
  }
}

__device__ void MakeFresh(const TierView& tier, const Record& record, uint32_t slot, int lane) {
  const uint32_t table = min(record.table, static_cast<uint32_t>(tier.num_tables) - 1);
  const RowInitializer values = RowInitializer::Of(tier.tables + table * kNumTableWords, tier.seed, record.key);
  if (tier.row_dtype == kRowDtypeFloat32) {
    Initialize<float>(values, tier.RowAt(slot), tier.dim, lane);
  } else if (tier.row_dtype == kRowDtypeBfloat16) {
    Initialize<BFloat16>(values, tier.RowAt(slot), tier.dim, lane);
  } else {
    Initialize<Float16>(values, tier.RowAt(slot), tier.dim, lane);
  }
  for (int k = 0; k < tier.states.num_states; ++k) {
    for (int i = lane; i < tier.states.width[k]; i += kWarp) tier.StateAt(k, slot)[i] = tier.states.initial[k];
  }
}

__global__ void WaitKernel(const Jobs* jobs, const uint64_t* job) { WaitForJob(jobs, job); }

/// Returns the destination of a leaving row. Records of other slabs are beyond the capacity.
__device__ __forceinline__ Ends EndsOfLeaving(const TierView& tier, const Move& move, uint32_t begin) {
  const bool is_here = move.row_id != kNoRow && move.record - begin < tier.capacity && move.slot < tier.num_lines;
  return {is_here ? tier.HostAt(move.record - begin) : nullptr, move.slot};
}

// Warps write leaving rows to a slab.
__global__ void __launch_bounds__(kBlock) WriteKernel(const __grid_constant__ TierView tier, const Move* leaving,
                                                      const uint32_t* counts, int64_t most_moves, uint32_t begin) {
  const int64_t num_moves = min(int64_t{counts[kNumLeaving]}, most_moves);
  if (num_moves == 0) return;
  if (tier.area != nullptr) {
    WaitForJob(tier.area->reads, &tier.area->reads->num_begun);
    WaitForJob(tier.area->writes, &tier.area->writes->num_begun);
  }
  MoveLines(
      num_moves, 0, NumLines(tier.host_bytes), [&](int64_t i) { return EndsOfLeaving(tier, leaving[i], begin); },
      [&](const Ends& ends, int at) { return LoadLine(tier, static_cast<uint32_t>(ends.here), at); },
      [&](const Ends& ends, int at, uint4 line) { *reinterpret_cast<uint4*>(ends.host + at) = line; });
}

/// Returns whether a move of a valid state comes to a slot.
__device__ __forceinline__ bool Comes(const TierView& tier, const Move& move) {
  return move.row_id < tier.capacity && move.slot < tier.num_lines + tier.num_staged;
}

/// Loads from the records at `ends.host`, which are copied into slots.
__device__ __forceinline__ uint4 LoadRecord(const Ends& ends, int at) {
  return *reinterpret_cast<const uint4*>(ends.host + at);
}

// Warps read coming rows from host memory.
__global__ void __launch_bounds__(kBlock)
    ReadKernel(const __grid_constant__ TierView tier, const Move* coming, const uint32_t* counts, int64_t most_moves) {
  if (counts[kNumComing] == 0) return;
  if (tier.area != nullptr) {  // rows that were read ahead do not wait for those that leave
    WaitForJob(tier.area->reads, &tier.area->last_read);
    if (counts[kNumFromHost] != 0) WaitForJob(tier.area->writes, &tier.area->writes->num_begun);
  }
  MoveLines(
      min(int64_t{counts[kNumFromHost]}, most_moves), 0, NumLines(tier.host_bytes),
      [&](int64_t i) {
        const Move move = coming[i];
        return Ends{Comes(tier, move) && move.record < tier.capacity ? tier.HostAt(move.record) : nullptr, move.slot};
      },
      LoadRecord,
      [&](const Ends& ends, int at, uint4 line) { StoreLine(tier, static_cast<uint32_t>(ends.here), at, line); });
}

// Warps copy coming rows that were read ahead, and initialize the fresh ones.
__global__ void __launch_bounds__(kBlock) ReadHereKernel(const __grid_constant__ TierView tier, const Move* coming,
                                                         const uint32_t* counts, int64_t most_moves) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t first = counts[kNumFromHost], fresh = counts[kNumNotFresh];
  const int64_t end = min(int64_t{counts[kNumComing]}, most_moves);
  for (int64_t i = fresh + (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp; i < end;
       i += int64_t{gridDim.x} * kBlock / kWarp) {
    const Move move = coming[i];
    if (Comes(tier, move)) MakeFresh(tier, *tier.OwnerAt(move.slot), move.slot, lane);
  }
  if (first == fresh) return;
  char* const records = tier.area->coming.records;
  const auto ends_of = [&](int64_t i) {
    const Move move = coming[first + i];
    return Ends{Comes(tier, move) ? records + int64_t{move.ahead} * tier.host_bytes : nullptr, move.slot};
  };
  const auto store_in_row = [&](const Ends& ends, int at, uint4 line) {
    *reinterpret_cast<uint4*>(tier.RowAt(static_cast<uint32_t>(ends.here)) + at) = line;
  };
  const auto store = [&](const Ends& ends, int at, uint4 line) {
    StoreLine(tier, static_cast<uint32_t>(ends.here), at, line);
  };
  const int64_t num_moves = min(fresh, most_moves) - first;
  const int num_in_row = NumLinesInRow(tier);
  MoveLines(num_moves, 0, num_in_row, ends_of, LoadRecord, store_in_row);
  MoveLines<kSomeLines>(num_moves, num_in_row, NumLines(tier.host_bytes) - num_in_row, ends_of, LoadRecord, store);
}

// One warp, one position.
__global__ void __launch_bounds__(kBlock)
    PeekKernel(const __grid_constant__ TierView tier, const uint32_t* row_ids, int64_t num_keys, uint32_t* slots) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp; i < num_keys;
       i += int64_t{gridDim.x} * kBlock / kWarp) {
    const uint32_t row_id = row_ids[i], staged = tier.num_lines + static_cast<uint32_t>(i);
    const uint32_t place = row_id < tier.capacity ? *tier.PlaceAt(row_id) : kNoRow;
    const bool is_row = row_id < tier.capacity && tier.IsUsed(row_id, place);
    const uint32_t slot = !is_row ? kNoRow : place < tier.num_slots ? place : staged;
    Record owner{kPaddingKey, kNoRow, kNoRow};
    if (slot == staged) {
      const Record record = *tier.records.At(tier.starts, row_id, 1);
      if (IsInHost(place)) {
        for (int at = lane * kLine; at < tier.host_bytes; at += kWarp * kLine) {
          StoreLine(tier, staged, at, *reinterpret_cast<const uint4*>(tier.HostAt(tier.RecordOf(row_id)) + at));
        }
      } else {
        MakeFresh(tier, record, staged, lane);
      }
      owner = {record.key, record.table, row_id};
    }
    if (lane != 0) continue;
    *tier.OwnerAt(staged) = owner;
    slots[i] = slot;
  }
}

// Reading and writing ahead -------------------------------------------------------------------------------------------

/// A stream that moves records one way.
struct Lane {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;  // what its next job waits for
  cudaEvent_t end = nullptr;    // of its last job
  Jobs* jobs = nullptr;         // on the device
};

/// The streams of a device that move records. They keep pace with each other: a row is written near one that is read.
struct Link {
  std::mutex mutex;  // held while a job is launched
  Lane reads;
  Lane writes;
};

/// An area, and its addresses on the device.
struct Area {
  Link* link;
  AheadArea* on_device = nullptr;
  AheadArea buffers{};                        // without the words that change there
  int64_t read_bytes = 0, written_bytes = 0;  // of the records that fit; 0: there is no memory yet
  bool is_open = false;
};

/// All areas, by device and slab, and the devices' streams. They last until the process ends.
struct Areas {
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<Link>> links;
  std::map<std::pair<int32_t, const void*>, std::unique_ptr<Area>> areas;

  static Areas& Get() {
    static Areas* const all = new Areas;  // arrays may be deleted after static objects
    return *all;
  }
};

LaunchError OpenLane(Lane* lane) {
  JAXSOK_RETURN_IF_CUDA(cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking));
  JAXSOK_RETURN_IF_CUDA(cudaEventCreateWithFlags(&lane->begin, cudaEventDisableTiming));
  JAXSOK_RETURN_IF_CUDA(cudaEventCreateWithFlags(&lane->end, cudaEventDisableTiming));
  JAXSOK_RETURN_IF_CUDA(cudaMalloc(&lane->jobs, sizeof(Jobs)));
  JAXSOK_RETURN_IF_CUDA(cudaMemset(lane->jobs, 0, sizeof(Jobs)));
  return nullptr;
}

/// Returns the area of a slab, and its device; nullptr: there is none.
Area* FindArea(const void* slab, int32_t* device = nullptr) {
  Areas& all = Areas::Get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [key, area] : all.areas) {
    if (key.second != slab || !area->is_open) continue;
    if (device != nullptr) *device = key.first;
    return area.get();
  }
  return nullptr;
}

/// Allocates the memory of an area for reads or for writes when it is first used. Kernels that place rows then see all
/// of it, or none. Only the first slab of a store needs the former.
LaunchError Reserve(Stream stream, Area* area, int32_t device, int64_t host_bytes, bool is_read) {
  int64_t& reserved = is_read ? area->read_bytes : area->written_bytes;
  if (reserved == host_bytes) return nullptr;
  JAXSOK_RETURN_IF_CUDA(cudaStreamSynchronize(stream));
  const LaunchError error = OnDevice(device, [&]() -> LaunchError {
    const auto allocate = [](auto** memory, int64_t num_bytes) -> LaunchError {
      if (*memory != nullptr) return nullptr;  // by a call that failed later
      void* allocated = nullptr;
      JAXSOK_RETURN_IF_CUDA(cudaMalloc(&allocated, num_bytes));
      *memory = static_cast<std::remove_reference_t<decltype(*memory)>>(allocated);
      return nullptr;
    };
    // The other words of the area may be in use.
    const auto copy = [&](const auto& memory) {
      const int64_t begin = reinterpret_cast<const char*>(&memory) - reinterpret_cast<const char*>(&area->buffers);
      return cudaMemcpy(reinterpret_cast<char*>(area->on_device) + begin, &memory, sizeof(memory),
                        cudaMemcpyHostToDevice);
    };
    const int64_t most = MostAhead(host_bytes);
    if (is_read) {
      AheadReads& to = area->buffers.coming;
      JAXSOK_RETURN_IF_LAUNCH(allocate(&to.ends, most * sizeof(Ends)));
      JAXSOK_RETURN_IF_LAUNCH(allocate(&to.row_ids, most * sizeof(uint32_t)));
      JAXSOK_RETURN_IF_LAUNCH(allocate(&to.records, most * host_bytes));
      JAXSOK_RETURN_IF_CUDA(copy(to));
    } else {
      AheadWrites& to = area->buffers.leaving;
      JAXSOK_RETURN_IF_LAUNCH(allocate(&to.ends, most * sizeof(Ends)));
      JAXSOK_RETURN_IF_LAUNCH(allocate(&to.records, most * host_bytes));
      JAXSOK_RETURN_IF_CUDA(copy(to));
    }
    JAXSOK_RETURN_IF_CUDA(cudaStreamSynchronize(nullptr));  // a copy may return before it has completed
    reserved = host_bytes;
    return nullptr;
  });
  return error == nullptr ? nullptr
                          : "the device has no memory outside of XLA's for rows that are read ahead; see "
                            "docs/host_memory.md";
}

__device__ uint64_t BeginJob(Jobs* jobs) { return ++jobs->num_begun; }

__global__ void EndJobKernel(Jobs* jobs) {
  __threadfence_system();
  *const_cast<volatile uint64_t*>(&jobs->num_ended) += 1;
}

// Copies the leaving rows of a slab, and lists the destinations of the copies.
__global__ void __launch_bounds__(kBlock) CopyLeavingKernel(const __grid_constant__ TierView tier, const Move* leaving,
                                                            const uint32_t* counts, int64_t most, uint32_t begin) {
  AheadArea* area = tier.area;
  WaitForJob(area->writes, &area->last_write);  // it has the list and the copies
  const int64_t num_moves = min(int64_t{counts[kNumLeaving]}, most);
  char* const copies = area->leaving.records;
  Ends* const list = area->leaving.ends;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < num_moves; i += int64_t{gridDim.x} * kBlock) {
    list[i] = {EndsOfLeaving(tier, leaving[i], begin).host, reinterpret_cast<uint64_t>(copies + i * tier.host_bytes)};
  }
  const auto ends_of = [&](int64_t i) {
    const bool is_here = EndsOfLeaving(tier, leaving[i], begin).host != nullptr;
    return Ends{is_here ? copies + i * tier.host_bytes : nullptr, leaving[i].slot};
  };
  const auto load_in_row = [&](const Ends& ends, int at) {
    return *reinterpret_cast<const uint4*>(tier.RowAt(static_cast<uint32_t>(ends.here)) + at);
  };
  const auto load = [&](const Ends& ends, int at) { return LoadLine(tier, static_cast<uint32_t>(ends.here), at); };
  const auto store = [&](const Ends& ends, int at, uint4 line) { *reinterpret_cast<uint4*>(ends.host + at) = line; };
  const int num_in_row = NumLinesInRow(tier);
  MoveLines(num_moves, 0, num_in_row, ends_of, load_in_row, store);
  MoveLines<kSomeLines>(num_moves, num_in_row, NumLines(tier.host_bytes) - num_in_row, ends_of, load, store);
  __syncthreads();
  if (threadIdx.x != 0 || atomicInc(&area->num_blocks_done, gridDim.x - 1) != gridDim.x - 1) return;
  area->num_leaving = static_cast<uint32_t>(num_moves);  // in the last block: the others have waited for the job before
  area->last_write = BeginJob(area->writes);
}

// Copies records from the device to the host, or back. Each block occupies a multiprocessor that the model then lacks,
// so as few run as keep pace with a step.
template <bool kToHost>
__global__ void __launch_bounds__(kAheadBlock) CopyKernel(const Ends* list, const uint32_t* num, int num_lines) {
  MoveLines(
      *num, 0, num_lines, [&](int64_t i) { return list[i]; },
      [&](const Ends& ends, int at) {
        return *reinterpret_cast<const uint4*>((kToHost ? reinterpret_cast<char*>(ends.here) : ends.host) + at);
      },
      [&](const Ends& ends, int at, uint4 line) {
        *reinterpret_cast<uint4*>((kToHost ? ends.host : reinterpret_cast<char*>(ends.here)) + at) = line;
      },
      min(gridDim.x, *num / kMovesOfAheadBlock + 1));
}

// One thread. Gives what is listed the ticket of the counters, if it is of the same call.
__global__ void TicketKernel(AheadArea* area, const uint32_t* counters) {
  area->ticket = area->listed == counters[kTierTicket] ? area->listed : 0;
  area->last_read = BeginJob(area->reads);
}

/// Runs `launch` on a lane, after the work that the stream has been given so far.
template <typename Launch>
LaunchError BeginOnLane(Stream stream, Lane* lane, const Launch& launch) {
  JAXSOK_RETURN_IF_CUDA(cudaEventRecord(lane->begin, stream));
  JAXSOK_RETURN_IF_CUDA(cudaStreamWaitEvent(lane->stream, lane->begin, 0));
  launch(lane->stream);
  EndJobKernel<<<1, 1, 0, lane->stream>>>(lane->jobs);
  JAXSOK_RETURN_IF_CUDA(cudaEventRecord(lane->end, lane->stream));
  return LastLaunchError();
}

}  // namespace

AheadArea* AreaOf(const void* slab) {
  Area* area = FindArea(slab);
  return area == nullptr ? nullptr : area->on_device;
}

LaunchError OpenArea(int32_t device, const void* slab) {
  return OnDevice(device, [&]() -> LaunchError {
    Areas& all = Areas::Get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::unique_ptr<Link>& link = all.links[device];
    if (link == nullptr) {
      auto opened = std::make_unique<Link>();
      JAXSOK_RETURN_IF_LAUNCH(OpenLane(&opened->reads));
      JAXSOK_RETURN_IF_LAUNCH(OpenLane(&opened->writes));
      // Later calls wait for the end of a job, so that nothing may fail once it has begun.
      JAXSOK_RETURN_IF_LAUNCH(Load(CopyKernel<true>));
      JAXSOK_RETURN_IF_LAUNCH(Load(CopyKernel<false>));
      JAXSOK_RETURN_IF_LAUNCH(Load(EndJobKernel));
      link = std::move(opened);
    }
    auto found = all.areas.find({device, slab});
    if (found == all.areas.end()) {
      auto made = std::make_unique<Area>();
      JAXSOK_RETURN_IF_CUDA(cudaMalloc(&made->on_device, sizeof(AheadArea)));
      made->link = link.get();
      made->buffers.reads = link->reads.jobs;
      made->buffers.writes = link->writes.jobs;
      found = all.areas.emplace(std::make_pair(device, slab), std::move(made)).first;
    }
    Area* const area = found->second.get();
    JAXSOK_RETURN_IF_CUDA(cudaMemcpy(area->on_device, &area->buffers, sizeof(AheadArea), cudaMemcpyHostToDevice));
    JAXSOK_RETURN_IF_CUDA(cudaStreamSynchronize(nullptr));
    area->is_open = true;
    return nullptr;
  });
}

void CloseArea(int32_t device, const void* slab) {
  OnDevice(device, [&]() -> LaunchError {
    Areas& all = Areas::Get();
    Area* area = nullptr;
    {
      const std::lock_guard<std::mutex> lock(all.mutex);
      const auto found = all.areas.find({device, slab});
      if (found == all.areas.end()) return nullptr;
      area = found->second.get();
      area->is_open = false;
    }
    // No thread looks for it any more. Another one may hold the lock while a program waits for its device.
    AheadArea& buffers = area->buffers;
    void* const memory[] = {buffers.coming.ends, buffers.coming.row_ids, buffers.coming.records, buffers.leaving.ends,
                            buffers.leaving.records};
    for (void* at : memory) cudaFree(at);  // waits for programs that use them, as `UnpinHostMemory` does
    buffers = AheadArea{};
    buffers.reads = area->link->reads.jobs;
    buffers.writes = area->link->writes.jobs;
    cudaMemcpy(area->on_device, &buffers, sizeof(buffers), cudaMemcpyHostToDevice);
    cudaStreamSynchronize(nullptr);
    area->read_bytes = area->written_bytes = 0;
    return nullptr;
  });
}

LaunchError LaunchWrite(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                        int64_t most_moves, uint32_t begin) {
  if (most_moves == 0) return nullptr;
  WriteKernel<<<kLinkBlocks, kBlock, 0, stream>>>(tier, leaving, counts, most_moves, begin);
  return LastLaunchError();
}

LaunchError LaunchRead(Stream stream, const TierView& tier, const Move* coming, const uint32_t* counts,
                       int64_t most_moves) {
  if (most_moves == 0) return nullptr;
  ReadKernel<<<kLinkBlocks, kBlock, 0, stream>>>(tier, coming, counts, most_moves);
  ReadHereKernel<<<BlocksFor(most_moves * kWarp, BlocksOfWave()), kBlock, 0, stream>>>(tier, coming, counts,
                                                                                       most_moves);
  return LastLaunchError();
}

LaunchError LaunchWriteAhead(Stream stream, const TierView& tier, const Move* leaving, const uint32_t* counts,
                             int64_t most_moves, uint32_t begin) {
  int32_t device = 0;
  Area* area = FindArea(tier.host.data[0], &device);
  if (area == nullptr || most_moves == 0) return nullptr;
  if (const LaunchError error = Reserve(stream, area, device, tier.host_bytes, false)) return error;
  const std::lock_guard<std::mutex> lock(area->link->mutex);
  const int64_t most = std::min(most_moves, MostAhead(tier.host_bytes));
  const int num_blocks = BlocksFor(most * kWarp, BlocksBesidesAhead());
  CopyLeavingKernel<<<num_blocks, kBlock, 0, stream>>>(tier, leaving, counts, most, begin);
  JAXSOK_RETURN_IF_LAUNCH(LastLaunchError());
  return BeginOnLane(stream, &area->link->writes, [&](cudaStream_t own) {
    CopyKernel<true><<<kAheadBlocks, kAheadBlock, 0, own>>>(area->buffers.leaving.ends, &area->on_device->num_leaving,
                                                            NumLines(tier.host_bytes));
  });
}

LaunchError LaunchReadAhead(Stream stream, const TierView& tier) {
  int32_t device = 0;
  Area* area = FindArea(tier.host.data[0], &device);
  const bool are_open = std::all_of(tier.host.data, tier.host.data + tier.starts.num_slabs,
                                    [](const uint8_t* slab) { return AreaOf(slab) != nullptr; });
  if (!are_open) return nullptr;
  if (const LaunchError error = Reserve(stream, area, device, tier.host_bytes, true)) return error;
  const std::lock_guard<std::mutex> lock(area->link->mutex);
  TicketKernel<<<1, 1, 0, stream>>>(area->on_device, tier.counters);
  JAXSOK_RETURN_IF_LAUNCH(LastLaunchError());
  return BeginOnLane(stream, &area->link->reads, [&](cudaStream_t own) {
    CopyKernel<false><<<kAheadBlocks, kAheadBlock, 0, own>>>(area->buffers.coming.ends, &area->on_device->num_coming,
                                                             NumLines(tier.host_bytes));
  });
}

LaunchError LaunchWait(Stream stream, const TierView& tier) {
  for (int s = 0; s < tier.starts.num_slabs; ++s) {
    const Area* area = FindArea(tier.host.data[s]);
    if (area == nullptr) continue;
    WaitKernel<<<1, 1, 0, stream>>>(area->link->writes.jobs, &area->on_device->last_write);
  }
  return LastLaunchError();
}

LaunchError LaunchPeek(Stream stream, const TierView& tier, const uint32_t* row_ids, int64_t num_keys,
                       uint32_t* slots) {
  if (num_keys == 0) return nullptr;
  PeekKernel<<<BlocksFor(num_keys * kWarp, BlocksOfWave()), kBlock, 0, stream>>>(tier, row_ids, num_keys, slots);
  return LastLaunchError();
}

}  // namespace jaxsok

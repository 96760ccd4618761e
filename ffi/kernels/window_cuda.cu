// Windows on a GPU: kernels write into the memory of peers, and a kernel of one block waits for the peers' writes.
#include <algorithm>
#include <cstdlib>

#include "device_cuda.cuh"
#include "launch_cuda.cuh"
#include "window.h"

namespace jaxsok {
namespace {

constexpr int kFlight = 8;  // loads of 16 bytes in flight per thread
constexpr int kMostPushBlocks = 264;

__device__ __forceinline__ uint64_t LoadAcquire(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void StoreRelease(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

constexpr uint64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr uint64_t kLookNanoseconds = 1'000'000;  // between reads of host memory, which take about 1 us

/// Records what ended the exchange, unless something else has.
__device__ void Report(volatile WindowFailure* failure, WindowFailure::Kind kind, int32_t shard, int32_t peer,
                       uint64_t epoch) {
  if (failure->word == 0) failure->word = WindowFailure::Word(kind, shard, peer, epoch);
  __threadfence_system();
}

/// A warp signals to all shards that this one has arrived at a barrier, a thread to each, and waits for their signals.
/// A shard that sees a signal also sees what that shard wrote before: release and acquire, at system scope.
__device__ void MeetAll(const WindowMember& member, uint64_t epoch, uint32_t tag, uint64_t most_nanoseconds) {
  const int32_t s = static_cast<int32_t>(threadIdx.x);
  WindowHead* own = member.heads[member.shard];
  if (s < member.num_shards) {
    __threadfence_system();
    StoreRelease(&member.heads[s]->arrived[member.shard].value, epoch << 16 | tag);
    const uint64_t* flag = &own->arrived[s].value;
    const uint64_t begin = Nanoseconds();
    uint64_t looked = begin, value;
    while ((value = LoadAcquire(flag)) >> 16 < epoch) {
      const uint64_t now = Nanoseconds();
      if (now - looked < kLookNanoseconds) continue;
      looked = now;
      if (now - begin >= most_nanoseconds) Report(member.failure, WindowFailure::kTimeOut, member.shard, s, epoch);
      if (static_cast<volatile WindowFailure*>(member.failure)->word != 0) __trap();
    }
    // A shard that is further has seen this one's tag, and would have failed.
    if (value >> 16 == epoch && (value & 0xffff) != tag) {
      Report(member.failure, WindowFailure::kOtherCall, member.shard, s, epoch);
      __trap();
    }
  }
  __syncwarp();
  if (s == 0) own->epoch = epoch;
}

__global__ void BarrierKernel(const __grid_constant__ WindowMember member, uint32_t tag, uint64_t most_nanoseconds) {
  const uint64_t epoch = member.heads[member.shard]->epoch + 1;
  __syncwarp();
  MeetAll(member, epoch, tag, most_nanoseconds);
}

constexpr int kSumBlock = 256;

// One block. In each pass it writes numbers to all shards, meets them, and adds what they wrote.
__global__ void SumKernel(const __grid_constant__ WindowMember member, uint32_t tag, uint64_t most_nanoseconds,
                          const int32_t* words, int64_t num_words, int32_t* sums) {
  const WindowHead* own = member.heads[member.shard];
  uint64_t epoch = own->epoch;
  for (int64_t begin = 0; begin < num_words; begin += kSumWords) {
    const auto n = static_cast<int32_t>(num_words - begin < kSumWords ? num_words - begin : kSumWords);
    epoch += 1;
    const uint64_t half = epoch & 1;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n; i += kSumBlock) {
      const int32_t word = words[begin + i];
      for (int32_t s = 0; s < member.num_shards; ++s) member.heads[s]->sums[half][member.shard][i] = word;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < kWarp) MeetAll(member, epoch, tag, most_nanoseconds);
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n; i += kSumBlock) {
      uint32_t sum = 0;  // modulo 2^32
      for (int32_t s = 0; s < member.num_shards; ++s) {
        sum += static_cast<uint32_t>(__ldcv(&own->sums[half][s][i]));
      }
      sums[begin + i] = static_cast<int32_t>(sum);
    }
  }
}

/// Copies `num_bytes` by the threads of `block` of `blocks`, in words of 16 bytes, or of 4, or single bytes.
template <typename Word>
__device__ __forceinline__ void CopyPart(char* to, const char* from, int64_t num_bytes, int block, int blocks) {
  const int64_t num_words = num_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t stride = int64_t{blocks} * blockDim.x;
  auto* out = reinterpret_cast<Word*>(to);
  const auto* in = reinterpret_cast<const Word*>(from);
  for (int64_t i = int64_t{block} * blockDim.x + threadIdx.x; i < num_words; i += kFlight * stride) {
    Word words[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      if (i + k * stride < num_words) words[k] = in[i + k * stride];
    }
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      if (i + k * stride < num_words) out[i + k * stride] = words[k];
    }
  }
}

/// Returns the largest word size (16, 4 or 1 bytes) that divides `num_bytes` and the address of the array.
inline int WordBytes(int64_t num_bytes, const void* array) {
  const int64_t bits = num_bytes | static_cast<int64_t>(reinterpret_cast<uintptr_t>(array));
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

// Each block copies its share of one part; shards begin with different peers.
template <typename Word>
__global__ void __launch_bounds__(512, 2) PushKernel(const __grid_constant__ LineTarget target, const char* lines,
                                                     int64_t part_bytes, int me, int num_shards) {
  const int part = (me + static_cast<int>(blockIdx.x)) % num_shards;
  CopyPart<Word>(target.At(part, part_bytes), lines + part * part_bytes, part_bytes,
                 static_cast<int>(blockIdx.x) / num_shards, static_cast<int>(gridDim.x) / num_shards);
}

template <typename Word>
__global__ void __launch_bounds__(512, 2) TakeKernel(char* received, const char* window, int64_t num_bytes) {
  CopyPart<Word>(received, window, num_bytes, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

// A line is uint2 or uint4. One thread, one line, and one word: writes them into the window of their shard.
template <typename Line>
__global__ void __launch_bounds__(kBlock)
    SendLinesKernel(const __grid_constant__ LineTarget target, LinesToSend send, int32_t num_shards) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  const int64_t part_bytes = send.PartBytes(num_shards), num_words = send.NumWords(num_shards);
  if (i < num_shards * num_words) {
    const int64_t shard = i / num_words, at = i % num_words;
    reinterpret_cast<uint32_t*>(target.At(shard, part_bytes) + send.LineBytes())[at] = send.Word(num_shards, shard, at);
  }
  if (i >= send.num_lines || i >= __ldg(send.starts + num_shards)) return;
  int32_t shard = 0;
  while (i >= __ldg(send.starts + shard + 1)) ++shard;
  const int64_t place = i - __ldg(send.starts + shard);
  if (place >= send.send_capacity) return;
  reinterpret_cast<Line*>(target.At(shard, part_bytes))[place] = static_cast<const Line*>(send.lines)[i];
}

// One thread, one line, and one offset. The first warp computes load and digest, a lane for each shard.
template <typename Line>
__global__ void __launch_bounds__(kBlock)
    TakeLinesKernel(const char* window, LinesToSend sent, LinesReceived out, int32_t shard, int32_t num_shards) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  const int64_t part_bytes = sent.PartBytes(num_shards);
  const auto words_of = [&](int64_t from) {
    return reinterpret_cast<const uint32_t*>(window + from * part_bytes + sent.LineBytes());
  };
  if (i < num_shards * sent.num_offsets) {
    out.offsets[i] = static_cast<int32_t>(words_of(i / sent.num_offsets)[2 + num_shards + i % sent.num_offsets]);
  }
  if (i < num_shards * sent.send_capacity) {
    const int64_t from = i / sent.send_capacity, place = i % sent.send_capacity;
    Line line{};
    line.x = line.y = ~0u;
    if (place < words_of(from)[2 + shard]) line = reinterpret_cast<const Line*>(window + from * part_bytes)[place];
    static_cast<Line*>(out.lines)[i] = line;
  }
  if (i >= kWarp) return;
  const auto lane = static_cast<int32_t>(i);
  uint32_t most = 0, total = 0, low = 0, high = 0;
  if (lane < num_shards) {
    for (int32_t from = 0; from < num_shards; ++from) {
      const uint32_t count = words_of(from)[2 + lane];
      most = max(most, count);
      total += count;
    }
    const uint64_t digest = DigestOfShard(words_of(lane), lane);
    low = static_cast<uint32_t>(digest);
    high = static_cast<uint32_t>(digest >> 32);
  }
  most = __reduce_max_sync(~0u, most);
  total = __reduce_max_sync(~0u, total);
  low = __reduce_add_sync(~0u, low);
  high = __reduce_add_sync(~0u, high);
  if (lane != 0) return;
  out.load[0] = static_cast<int32_t>(most);
  out.load[1] = static_cast<int32_t>(total);
  out.digest[0] = low;
  out.digest[1] = high;
}

template <typename Word>
int CopyBlocks(int64_t num_bytes, int most) {
  const int64_t of_block = int64_t{512} * kFlight * static_cast<int64_t>(sizeof(Word));
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(CeilDiv(num_bytes, of_block), most)));
}

/// Calls work(word) with a value of the largest type of `word_bytes`, in which arrays can be copied.
template <typename Work>
void WithWord(int word_bytes, const Work& work) {
  if (word_bytes == 16) {
    work(uint4{});
  } else if (word_bytes == 4) {
    work(uint32_t{});
  } else {
    work(char{});
  }
}

}  // namespace

LaunchError LaunchWindowExchange(Stream stream, WindowExchange& exchange, const void* lines, int64_t part_bytes,
                                 void* received) {
  const int num_shards = exchange.num_shards();
  const int64_t num_bytes = num_shards * part_bytes;
  WithWord(WordBytes(part_bytes, lines), [&](auto word) {
    using Word = decltype(word);
    const int of_part = CopyBlocks<Word>(part_bytes, std::max(1, kMostPushBlocks / num_shards));
    PushKernel<Word><<<num_shards * of_part, 512, 0, stream>>>(
        exchange.Target(1, part_bytes), static_cast<const char*>(lines), part_bytes, exchange.shard(), num_shards);
  });
  JAXSOK_RETURN_IF_LAUNCH(LastLaunchError());
  JAXSOK_RETURN_IF_LAUNCH(exchange.Meet(stream));
  WithWord(WordBytes(part_bytes, received), [&](auto word) {
    using Word = decltype(word);
    TakeKernel<Word><<<CopyBlocks<Word>(num_bytes, 2 * NumMultiprocessors()), 512, 0, stream>>>(
        static_cast<char*>(received), static_cast<const char*>(exchange.received()), num_bytes);
  });
  return LastLaunchError();
}

namespace {

template <typename Line>
LaunchError SendAndTakeLines(cudaStream_t stream, WindowExchange& exchange, const LinesToSend& send,
                             const LinesReceived& received) {
  const int32_t num_shards = exchange.num_shards();
  const int64_t num_words = num_shards * send.NumWords(num_shards);
  SendLinesKernel<Line><<<BlocksFor(std::max(send.num_lines, num_words)), kBlock, 0, stream>>>(
      exchange.Target(1, send.PartBytes(num_shards)), send, num_shards);
  JAXSOK_RETURN_IF_CUDA(cudaGetLastError());
  JAXSOK_RETURN_IF_LAUNCH(exchange.Meet(stream));
  const int64_t num_taken = num_shards * std::max({send.send_capacity, send.num_offsets, int64_t{1}});
  TakeLinesKernel<Line><<<BlocksFor(num_taken), kBlock, 0, stream>>>(static_cast<const char*>(exchange.received()),
                                                                     send, received, exchange.shard(), num_shards);
  return LastLaunchError();
}

}  // namespace

LaunchError LaunchWindowLines(Stream stream, WindowExchange& exchange, const LinesToSend& send,
                              const LinesReceived& received) {
  return send.line_bytes == 8 ? SendAndTakeLines<uint2>(stream, exchange, send, received)
                              : SendAndTakeLines<uint4>(stream, exchange, send, received);
}

char* TakeWindow(int32_t device, int64_t num_bytes) {
  void* window = nullptr;
  const LaunchError error = OnDevice(device, [&]() -> LaunchError {
    JAXSOK_RETURN_IF_CUDA(cudaMalloc(&window, static_cast<size_t>(num_bytes)));
    JAXSOK_RETURN_IF_CUDA(cudaMemset(window, 0, kWindowHeadBytes));
    JAXSOK_RETURN_IF_CUDA(cudaStreamSynchronize(nullptr));
    return nullptr;
  });
  if (error != nullptr && window != nullptr) ReturnWindow(device, static_cast<char*>(window));
  return error == nullptr ? static_cast<char*>(window) : nullptr;
}

void ReturnWindow(int32_t device, char* window) {
  OnDevice(device, [&]() -> LaunchError {
    cudaFree(window);
    return nullptr;
  });
}

LaunchError ExportWindow(int32_t device, char* window, WindowHandle* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(WindowHandle), "a handle is one of CUDA's");
  return OnDevice(device, [&]() -> LaunchError {
    JAXSOK_RETURN_IF_CUDA(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle), window));
    return nullptr;
  });
}

LaunchError ImportWindow(int32_t device, const WindowHandle& handle, char** window) {
  const auto& of_cuda = reinterpret_cast<const cudaIpcMemHandle_t&>(handle);
  return OnDevice(device, [&]() -> LaunchError {
    JAXSOK_RETURN_IF_CUDA(
        cudaIpcOpenMemHandle(reinterpret_cast<void**>(window), of_cuda, cudaIpcMemLazyEnablePeerAccess));
    return nullptr;
  });
}

void ReleaseImported(int32_t device, char* window) {
  OnDevice(device, [&]() -> LaunchError {
    cudaIpcCloseMemHandle(window);
    return nullptr;
  });
}

struct SideStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr, ended = nullptr;
};

LaunchError PrepareDevice(int32_t device, const int32_t* peers, int32_t num_peers, SideStream** side) {
  return OnDevice(device, [&]() -> LaunchError {
    for (int32_t p = 0; p < num_peers; ++p) {
      if (peers[p] == device || peers[p] < 0) continue;
      int can_reach = 0;
      JAXSOK_RETURN_IF_CUDA(cudaDeviceCanAccessPeer(&can_reach, device, peers[p]));
      if (can_reach == 0) return "a device cannot reach the memory of another (no NVLink, or containers that hide it)";
      const cudaError_t error = cudaDeviceEnablePeerAccess(peers[p], 0);
      if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {  // XLA enables it too
        return cudaGetErrorString(error);
      }
    }
    *side = new SideStream;  // for good, as windows are
    int greatest = 0;        // otherwise its kernels wait until all blocks of the one that sends have begun
    JAXSOK_RETURN_IF_CUDA(cudaDeviceGetStreamPriorityRange(nullptr, &greatest));
    JAXSOK_RETURN_IF_CUDA(cudaStreamCreateWithPriority(&(*side)->stream, cudaStreamNonBlocking, greatest));
    JAXSOK_RETURN_IF_CUDA(cudaEventCreateWithFlags(&(*side)->forked, cudaEventDisableTiming));
    JAXSOK_RETURN_IF_CUDA(cudaEventCreateWithFlags(&(*side)->ended, cudaEventDisableTiming));
    JAXSOK_RETURN_IF_LAUNCH(Load(BarrierKernel));  // see WaitForThreads
    return Load(SumKernel);
  });
}

// While `stream` is recorded for a CUDA graph, the second stream is, too: its work is a branch of the graph.

LaunchError Fork(SideStream* side, Stream stream, Stream* second) {
  JAXSOK_RETURN_IF_CUDA(cudaEventRecord(side->forked, stream));
  JAXSOK_RETURN_IF_CUDA(cudaStreamWaitEvent(side->stream, side->forked, 0));
  *second = side->stream;
  return nullptr;
}

LaunchError Join(SideStream* side, Stream stream) {
  JAXSOK_RETURN_IF_CUDA(cudaEventRecord(side->ended, side->stream));
  JAXSOK_RETURN_IF_CUDA(cudaStreamWaitEvent(stream, side->ended, 0));
  return nullptr;
}

WindowFailure* TakeFailure(int32_t device) {
  // Host memory that CUDA only registers: a thread still reads it after CUDA has shut down, as the process ends.
  constexpr size_t kPageBytes = 4096;
  void* failure = std::aligned_alloc(kPageBytes, kPageBytes);
  if (failure == nullptr) return nullptr;
  *static_cast<WindowFailure*>(failure) = {};
  const LaunchError error = OnDevice(device, [&]() -> LaunchError {
    JAXSOK_RETURN_IF_CUDA(cudaHostRegister(failure, kPageBytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    void* of_device = nullptr;
    JAXSOK_RETURN_IF_CUDA(cudaHostGetDevicePointer(&of_device, failure, 0));
    return of_device == failure ? nullptr : "devices have another address for it";
  });
  return error == nullptr ? static_cast<WindowFailure*>(failure) : nullptr;
}

const bool kWaitsOnHost = false;

bool IsRecording(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

LaunchError LaunchBarrier(Stream stream, const WindowMember& member, uint32_t tag, int64_t most_seconds) {
  static_assert(kMostWindowShards <= kWarp, "a thread for each shard");
  BarrierKernel<<<1, kWarp, 0, stream>>>(member, tag, static_cast<uint64_t>(most_seconds) * kNanosecondsPerSecond);
  return LastLaunchError();
}

LaunchError LaunchSum(Stream stream, const WindowMember& member, uint32_t tag, int64_t most_seconds,
                      const int32_t* words, int64_t num_words, int32_t* sums) {
  const uint64_t most_nanoseconds = static_cast<uint64_t>(most_seconds) * kNanosecondsPerSecond;
  SumKernel<<<1, kSumBlock, 0, stream>>>(member, tag, most_nanoseconds, words, num_words, sums);
  return LastLaunchError();
}

}  // namespace jaxsok

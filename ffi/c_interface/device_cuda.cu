#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../kernels/host_memory.h"
#include "device.h"
#include "error.h"

namespace jaxsok {
namespace {

// Feature words are passed as a kernel parameter: a copy from host memory could wait for the stream, and could not be
// captured in a graph. CUDA accepts 32 KB of parameters.
constexpr int kWordsAtOnce = 256 * kNumFeatureWords;
struct FeatureWords {
  int32_t words[kWordsAtOnce];
};

__global__ void WriteWordsKernel(const __grid_constant__ FeatureWords from, int32_t* to, int num_words) {
  for (int i = threadIdx.x; i < num_words; i += blockDim.x) to[i] = from.words[i];
}

/// Throws an Error if a CUDA call failed.
void Require(cudaError_t error, const char* op, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next call of this thread would report it again
  const bool is_memory = error == cudaErrorMemoryAllocation;
  Refuse(is_memory ? JAXSOK_NO_MEMORY : JAXSOK_DEVICE_FAILED, op, ": device: got \"", cudaGetErrorString(error), "\", ",
         "wanted ", what, ".");
}

/// Makes a device the current one of this thread during its lifetime.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    error_ = cudaGetDevice(&before_);
    is_changed_ = error_ == cudaSuccess && before_ != ordinal;
    if (error_ == cudaSuccess) error_ = cudaSetDevice(ordinal);
  }
  ~CurrentDevice() {
    // Setting an unchanged device would only cost time.
    if (is_changed_) cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool is_changed_ = false;
  cudaError_t error_;
};

__global__ void CopyWordsKernel(const int32_t* from, int32_t* to, int num_words) {
  for (int i = threadIdx.x; i < num_words; i += blockDim.x) to[i] = from[i];
}

// `lanes` threads take one row after the other to its place, in host memory.
__global__ void __launch_bounds__(256)
    PlaceRowsKernel(const float* rows, float* const* places, int64_t num_rows, int dim, int lanes) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  const int lane = static_cast<int>(thread % lanes);
  for (int64_t row = thread / lanes; row < num_rows; row += step / lanes) {
    const float* from = rows + row * dim;
    float* to = places[row];
    if (dim % 4 == 0) {
      for (int i = lane; i < dim / 4; i += lanes) {
        reinterpret_cast<float4*>(to)[i] = __ldcs(reinterpret_cast<const float4*>(from) + i);
      }
    } else {
      for (int i = lane; i < dim; i += lanes) to[i] = __ldcs(from + i);
    }
  }
}

/// Frees memory of a pool once the work that its stream has by then is done.
struct FreeOnStream {
  cudaStream_t stream = nullptr;
  void operator()(char* memory) const { cudaFreeAsync(memory, stream); }
};

/// A stream for one lookup at a time, with memory for the words of its features and its counts.
class Lane {
 public:
  Lane() {
    Require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), kOp, "a stream");
    Require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync), kOp, "an event");
  }
  ~Lane() {
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    cudaFree(memory_);
    if (event_ != nullptr) cudaEventDestroy(event_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// `pool` has memory for rows on their way to places of the host.
  void Begin(FrozenLookup* lookups, int32_t num_lookups, int32_t* counts, float* const* places, cudaMemPool_t pool) {
    std::unique_ptr<char, FreeOnStream> rows(nullptr, {stream_});
    if (places != nullptr) rows.reset(StageRows(lookups, num_lookups, pool));
    const int32_t* words = lookups[0].batch.features;
    int64_t num_words = 0, num_counts = 0;
    for (int32_t s = 0; s < num_lookups; ++s) {
      num_words += int64_t{lookups[s].batch.num_features} * kNumFeatureWords;
      num_counts += int64_t{lookups[s].store.num_tables} * kNumCounts;
    }
    if (num_words + num_counts > size_) {
      cudaFree(memory_);
      memory_ = nullptr;
      size_ = 2 * (num_words + num_counts);
      Require(cudaMalloc(&memory_, static_cast<size_t>(size_) * sizeof(int32_t)), kOp, "memory for words and counts");
    }
    CopyWordsKernel<<<1, 256, 0, stream_>>>(words, memory_, static_cast<int>(num_words));
    for (int32_t s = 0; s < num_lookups; ++s) {
      lookups[s].batch.features = memory_ + (lookups[s].batch.features - words);
    }
    int32_t* counted = memory_ + num_words;
    const LaunchError error = LaunchLookupFrozen(stream_, lookups, num_lookups, counted);
    if (error != nullptr) Refuse(JAXSOK_DEVICE_FAILED, kOp, ": got \"", error, "\", wanted to launch it.");
    for (int32_t s = 0; places != nullptr && s < num_lookups; ++s) {
      const int32_t dim = lookups[s].store.dim;
      const int64_t num_rows = lookups[s].batch.num_keys;
      int lanes = 1;
      while (lanes < 32 && lanes * 4 < dim) lanes *= 2;
      const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv<int64_t>(num_rows * lanes, 256), 1024));
      if (blocks > 0) {
        const auto* staged = static_cast<const float*>(lookups[s].embeddings.data[0]);
        PlaceRowsKernel<<<blocks, 256, 0, stream_>>>(staged, places, num_rows, dim, lanes);
      }
      places += num_rows;
    }
    Require(cudaGetLastError(), kOp, "to launch its kernels");
    const size_t num_bytes = static_cast<size_t>(num_counts) * sizeof(int32_t);
    Require(cudaMemcpyAsync(counts, counted, num_bytes, cudaMemcpyDeviceToHost, stream_), kOp, "to copy the counts");
    Require(cudaEventRecord(event_, stream_), kOp, "to record its end");
  }

  /// Waits for the lookup: awake at first, since a thread that sleeps comes back tens of microseconds late.
  void Wait() {
    const auto patience = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    cudaError_t error = cudaErrorNotReady;
    while (error == cudaErrorNotReady && std::chrono::steady_clock::now() < patience) error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) error = cudaEventSynchronize(event_);
    Require(error, kOp, "an answer");
  }

 private:
  /// Has lookups write their rows into memory of the device, which is returned, one lookup after the other.
  char* StageRows(FrozenLookup* lookups, int32_t num_lookups, cudaMemPool_t pool) {
    const auto line_bytes = [&](int32_t s) {
      return int64_t{lookups[s].store.dim} * static_cast<int64_t>(sizeof(float));
    };
    const auto bytes_of = [&](int32_t s) {
      constexpr auto kAlignment = static_cast<int64_t>(Device::kOutAlignment);
      return CeilDiv<int64_t>(lookups[s].batch.num_keys * line_bytes(s), kAlignment) * kAlignment;
    };
    int64_t num_bytes = 0;
    for (int32_t s = 0; s < num_lookups; ++s) num_bytes += bytes_of(s);
    void* memory = nullptr;
    Require(cudaMallocFromPoolAsync(&memory, static_cast<size_t>(std::max<int64_t>(num_bytes, 1)), pool, stream_), kOp,
            "memory for rows on their way to the host; let JAX reserve less (XLA_PYTHON_CLIENT_MEM_FRACTION)");
    staged_.resize(static_cast<size_t>(num_lookups));
    auto* rows = static_cast<char*>(memory);
    for (int32_t s = 0; s < num_lookups; rows += bytes_of(s++)) {
      std::vector<void*>& of_features = staged_[static_cast<size_t>(s)];
      of_features.clear();
      char* next = rows;
      for (int32_t f = 0; f < lookups[s].batch.num_features; ++f) {
        of_features.push_back(next);
        next += lookups[s].num_bags[f] * line_bytes(s);
      }
      lookups[s].embeddings = {kRowDtypeFloat32, of_features.data()};
    }
    return static_cast<char*>(memory);
  }

  static constexpr char kOp[] = "lookup";
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  int32_t* memory_ = nullptr;
  int64_t size_ = 0;                        // int32 of it
  std::vector<std::vector<void*>> staged_;  // where the features of each lookup have their rows
};

/// Lanes that no lookup uses.
struct FreeLanes {
  std::mutex mutex;
  std::vector<std::unique_ptr<Lane>> lanes;
};

class OnLane final : public Running {
 public:
  OnLane(std::unique_ptr<Lane> lane, FreeLanes& free) : lane_(std::move(lane)), free_(free) {}
  ~OnLane() override {
    if (lane_ == nullptr || !is_done_) return;  // a lane that failed, or is still busy, waits for its stream and goes
    std::lock_guard<std::mutex> lock(free_.mutex);
    free_.lanes.push_back(std::move(lane_));
  }
  void Wait() override {
    lane_->Wait();
    is_done_ = true;
  }

 private:
  std::unique_ptr<Lane> lane_;
  FreeLanes& free_;
  bool is_done_ = false;
};

class Gpu final : public Device {
 public:
  explicit Gpu(int ordinal) : ordinal_(ordinal) {
    CurrentDevice current(ordinal);
    Require(current.error(), "jaxsok_open", "a GPU of this machine, by its number");
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = ordinal;
    Require(cudaMemPoolCreate(&pool_, &properties), "jaxsok_open", "a pool of memory");
    uint64_t all = UINT64_MAX;  // kept between lookups
    Require(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &all), "jaxsok_open", "to keep the pool");
  }

  ~Gpu() override {
    CurrentDevice current(ordinal_);
    free_.lanes.clear();
    for (void* array : placed_) cudaFree(array);  // waits for lookups; UnpinHostMemory says why nothing else does
    for (const auto& [array, num_bytes] : on_host_) UnmapHostMemory(ordinal_, array, num_bytes);
    if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  }

  const void* Place(const void* data, size_t num_bytes) override {
    CurrentDevice current(ordinal_);
    placed_.push_back(nullptr);
    Require(cudaMalloc(&placed_.back(), num_bytes), "jaxsok_open",
            "memory for the tables; serve fewer or smaller ones");
    Require(cudaMemcpy(placed_.back(), data, num_bytes, cudaMemcpyHostToDevice), "jaxsok_open", "to copy the tables");
    return placed_.back();
  }

  const void* PlaceOnHost(const void* data, size_t num_bytes) override {
    void* array = nullptr;
    const LaunchError error = MapHostMemory(ordinal_, static_cast<int64_t>(num_bytes), &array);
    if (error != nullptr) {
      Refuse(JAXSOK_NO_MEMORY, "jaxsok_open: device: got \"", error, "\", wanted ", num_bytes,
             " bytes of the host for rows; freeze with a larger device_share.");
    }
    on_host_.emplace_back(array, static_cast<int64_t>(num_bytes));
    std::memcpy(array, data, num_bytes);
    return array;
  }

  void Run(void* stream_pointer, FrozenLookup* lookups, int32_t num_lookups) const override {
    constexpr char kOp[] = "jaxsok_lookup";
    const auto stream = static_cast<cudaStream_t>(stream_pointer);
    CurrentDevice current(ordinal_);
    Require(current.error(), kOp, "the GPU of the tables");
    std::vector<int32_t> words;
    for (int32_t s = 0; s < num_lookups; ++s) {
      const BatchView& batch = lookups[s].batch;
      words.insert(words.end(), batch.features, batch.features + int64_t{batch.num_features} * kNumFeatureWords);
    }
    void* memory = nullptr;
    const size_t num_bytes = words.size() * sizeof(int32_t);
    Require(cudaMallocFromPoolAsync(&memory, num_bytes, pool_, stream), kOp, "memory for the words of features");
    auto* on_device = static_cast<int32_t*>(memory);
    for (size_t first = 0; first < words.size(); first += kWordsAtOnce) {
      const auto num_words = static_cast<int>(std::min<size_t>(words.size() - first, kWordsAtOnce));
      FeatureWords part{};
      std::copy_n(words.data() + first, num_words, part.words);
      WriteWordsKernel<<<1, 256, 0, stream>>>(part, on_device + first, num_words);
    }
    int32_t* next = on_device;
    for (int32_t s = 0; s < num_lookups; ++s) {
      lookups[s].batch.features = next;
      next += int64_t{lookups[s].batch.num_features} * kNumFeatureWords;
    }
    const LaunchError error = LaunchLookupFrozen(stream, lookups, num_lookups, nullptr);
    const cudaError_t launched = cudaGetLastError(), freed = cudaFreeAsync(memory, stream);
    if (error != nullptr) {
      Refuse(JAXSOK_DEVICE_FAILED, kOp, ": device: got \"", error, "\", wanted to launch the lookup.");
    }
    Require(launched, kOp, "to launch the lookup");
    Require(freed, kOp, "to release the words of features");
  }

  void* NewHostMemory(size_t num_bytes) const override {
    CurrentDevice current(ordinal_);
    void* memory = nullptr;
    Require(cudaHostAlloc(&memory, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped), "lookup",
            "memory of the host that the driver pins; keep fewer answers");
    return memory;
  }

  void DeleteHostMemory(void* memory) const override {
    CurrentDevice current(ordinal_);
    cudaFreeHost(memory);
  }

  std::unique_ptr<Running> Begin(FrozenLookup* lookups, int32_t num_lookups, int32_t* counts,
                                 float* const* places) override {
    CurrentDevice current(ordinal_);
    Require(current.error(), "lookup", "the GPU of the tables");
    std::unique_ptr<Lane> lane;
    {
      std::lock_guard<std::mutex> lock(free_.mutex);
      if (!free_.lanes.empty()) {
        lane = std::move(free_.lanes.back());
        free_.lanes.pop_back();
      }
    }
    if (lane == nullptr) lane = std::make_unique<Lane>();
    lane->Begin(lookups, num_lookups, counts, places, pool_);
    return std::make_unique<OnLane>(std::move(lane), free_);
  }

 private:
  int ordinal_;
  FreeLanes free_;
  cudaMemPool_t pool_ = nullptr;
  std::vector<void*> placed_;
  std::vector<std::pair<void*, int64_t>> on_host_;  // arrays and their bytes
};

}  // namespace

std::unique_ptr<Device> Device::Open(int32_t ordinal) {
  int num_devices = 0;
  Require(cudaGetDeviceCount(&num_devices), "jaxsok_open", "a GPU and its driver; libjaxsok_cpu.so needs neither");
  if (ordinal < 0 || ordinal >= num_devices) {
    Refuse(JAXSOK_BAD_ARGUMENT, "jaxsok_open: device: got ", ordinal, ", wanted 0 to ", num_devices - 1, ".");
  }
  return std::make_unique<Gpu>(ordinal);
}

}  // namespace jaxsok

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

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
    uint64_t all = UINT64_MAX;  // kept between lookups: a few KB for each running one
    Require(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &all), "jaxsok_open", "to keep the pool");
  }

  ~Gpu() override {
    CurrentDevice current(ordinal_);
    cudaDeviceSynchronize();
    for (void* array : placed_) cudaFree(array);
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

 private:
  int ordinal_;
  cudaMemPool_t pool_ = nullptr;
  std::vector<void*> placed_;
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

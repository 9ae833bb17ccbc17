#include <algorithm>
#include <atomic>

#include "cuda/run.h"
#include "cuda/runtime.h"
#include "error.h"

namespace kvx::cuda {
namespace {

constexpr size_t kBytes = 64 << 20;      // of a copy: more than caches hold of both ends
constexpr int kCopies = 4, kRounds = 3;  // the best round counts

// Lets this thread allocate while another stream is captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one of before
};

// A stream, two events on it and memory at both ends.
class Track {
 public:
  Track() = default;
  ~Track() {
    for (End &end : ends_) {
      if (end.data && end.on_host) cudaFreeHost(end.data);
      if (end.data && !end.on_host) cudaFreeAsync(end.data, stream_);
    }
    for (cudaEvent_t event : events_)
      if (event) cudaEventDestroy(event);
    if (stream_) cudaStreamDestroy(stream_);
  }
  Track(const Track &) = delete;
  Track &operator=(const Track &) = delete;

  kvx_status_t measure(bool from_host, bool to_host, double *speed) {
    KVX_CUDA_TRY(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t &event : events_) KVX_CUDA_TRY(cudaEventCreate(&event));
    KVX_TRY(allocate(from_host, &ends_[0]));
    KVX_TRY(allocate(to_host, &ends_[1]));
    for (int round = 0; round <= kRounds; ++round) {  // the first one touches the memory
      KVX_CUDA_TRY(cudaEventRecord(events_[0], stream_));
      for (int i = 0; i < kCopies; ++i) {
        KVX_CUDA_TRY(
            cudaMemcpyAsync(ends_[1].data, ends_[0].data, kBytes, cudaMemcpyDefault, stream_));
      }
      KVX_CUDA_TRY(cudaEventRecord(events_[1], stream_));
      KVX_CUDA_TRY(cudaStreamSynchronize(stream_));
      float milliseconds = 0;
      KVX_CUDA_TRY(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]));
      if (round > 0 && milliseconds > 0)
        *speed = std::max(*speed, 1e3 * kCopies * kBytes / static_cast<double>(milliseconds));
    }
    return KVX_STATUS_OK;
  }

 private:
  struct End {
    void *data = nullptr;
    bool on_host = false;
  };

  kvx_status_t allocate(bool on_host, End *end) {
    end->on_host = on_host;
    if (on_host) {
      KVX_CUDA_TRY(cudaMallocHost(&end->data, kBytes));
    } else {
      KVX_CUDA_TRY(cudaMallocAsync(&end->data, kBytes, stream_));
      KVX_CUDA_TRY(cudaMemsetAsync(end->data, 1, kBytes, stream_));
    }
    return KVX_STATUS_OK;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[2] = {};
  End ends_[2];
};

}  // namespace

double copy_speed(bool from_host, bool to_host) {
  static std::atomic<double> speeds[kMostDevices][2][2];  // 0: not measured
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return 0;
  std::atomic<double> &known = speeds[device][from_host][to_host];
  if (known == 0) {
    const RelaxedCapture relaxed;
    double speed = 0;
    if (Track().measure(from_host, to_host, &speed) == KVX_STATUS_OK) known = speed;
    cudaGetLastError();
  }
  return known;
}

}  // namespace kvx::cuda

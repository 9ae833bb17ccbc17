// Kernels whose results are known, and kernels with the faults that the host grid is there to find:
// `selftest` runs the first, `selftest <fault>` one of the others. See tests/test_hostgrid.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/platform.h"

extern "C" unsigned long hostgrid_races() __attribute__((weak));
extern "C" unsigned long hostgrid_accesses() __attribute__((weak));

namespace {

constexpr unsigned kFull = 0xffffffff;

void expect(bool ok, const char *what) {
  if (ok) return;
  std::fprintf(stderr, "selftest: %s\n", what);
  std::exit(1);
}

// ---- grid-stride copy: vectors, kernel parameters, block order ----

struct Copy {
  const uint8_t *src;
  uint8_t *dst;
  size_t count;
  uint64_t unused[512];  // kernel parameters are large
};

template <class V>
__global__ void __launch_bounds__(256) copy_kernel(const __grid_constant__ Copy p) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < p.count; i += step)
    reinterpret_cast<V *>(p.dst)[i] = reinterpret_cast<const V *>(p.src)[i];
}

template <class V>
void copy(size_t misaligned, size_t too_many) {
  std::vector<uint8_t> src(16 * 1001), dst(src.size(), 0xee);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<uint8_t>(i * 7 + i / 251);
  const size_t count = (src.size() - misaligned) / sizeof(V) + too_many;
  const Copy p{src.data() + misaligned, dst.data() + misaligned, count, {}};
  KVX_LAUNCH(copy_kernel<V>, 3, 64, 0, nullptr, p);
  expect(cudaGetLastError() == cudaSuccess, "copy: launch");
  expect(std::memcmp(src.data() + misaligned, dst.data() + misaligned, count * sizeof(V)) == 0,
         "copy: bytes");
}

// ---- transpose through shared memory: both barriers are needed ----

constexpr unsigned kTile = 32;

__global__ void transpose_kernel(const uint16_t *in, uint16_t *out, unsigned tiles, bool barrier) {
  KVX_DYNAMIC_SHARED(uint16_t, tile);
  for (unsigned t = blockIdx.x; t < tiles; t += gridDim.x) {
    const unsigned base = t * kTile * kTile;
    for (unsigned y = threadIdx.y; y < kTile; y += blockDim.y)
      tile[y * (kTile + 1) + threadIdx.x] = in[base + y * kTile + threadIdx.x];
    __syncthreads();
    for (unsigned y = threadIdx.y; y < kTile; y += blockDim.y)
      out[base + y * kTile + threadIdx.x] = tile[threadIdx.x * (kTile + 1) + y];
    if (barrier) __syncthreads();
  }
}

void transpose(bool barrier) {
  constexpr unsigned tiles = 5;
  std::vector<uint16_t> in(tiles * kTile * kTile), out(in.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  const dim3 block(kTile, 4);
  KVX_LAUNCH(transpose_kernel, 2, block, sizeof(uint16_t) * kTile * (kTile + 1), nullptr, in.data(),
             out.data(), tiles, barrier);
  bool ok = true;
  for (unsigned i = 0; i < in.size(); ++i) {
    const unsigned t = i / (kTile * kTile), y = i / kTile % kTile, x = i % kTile;
    ok &= out[i] == in[t * kTile * kTile + x * kTile + y];
  }
  expect(ok || !barrier, "transpose: values");
}

// ---- largest magnitude of rows: shuffles in groups, then static shared memory between warps ----

__device__ float group_max(float x, int width) {
  for (int step = width / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(kFull, x, step, width));
  return x;
}

__global__ void amax_kernel(const float *in, float *of_groups, float *of_all) {
  __shared__ float of_warps[4];
  __shared__ unsigned untouched;
  const unsigned i = threadIdx.x;
  const float group = group_max(fabsf(in[i]), 16);
  if (i % 16 == 0) of_groups[i / 16] = group;
  const float warp = group_max(group, warpSize);
  if (i % warpSize == 0) of_warps[i / warpSize] = warp;
  __syncthreads();
  if (i == 0) *of_all = fmaxf(fmaxf(of_warps[0], of_warps[1]), fmaxf(of_warps[2], of_warps[3]));
  if (i == 1 && untouched != 0xcbcbcbcb) *of_all = -1;
}

void amax() {
  std::vector<float> in(128), of_groups(8);
  float of_all = 0;
  for (size_t i = 0; i < in.size(); ++i) in[i] = (i * 37 % 101) * (i % 2 ? -1.f : 1.f);
  KVX_LAUNCH(amax_kernel, 1, 128, 0, nullptr, in.data(), of_groups.data(), &of_all);
  float all = 0;
  for (size_t g = 0; g < 8; ++g) {
    float most = 0;
    for (size_t i = 0; i < 16; ++i) most = std::max(most, std::fabs(in[g * 16 + i]));
    expect(of_groups[g] == most, "amax: groups");
    all = std::max(all, most);
  }
  expect(of_all == all, "amax: all, or shared memory was not poisoned");
}

// ---- warp functions and barriers that vote: what each thread sees ----

__global__ void warp_kernel(unsigned *wrong) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned half = lane < 16 ? 0x0000ffff : 0xffff0000;
  unsigned faults = 0;
  faults += __shfl_sync(kFull, lane, 5) != 5;
  faults += __shfl_sync(kFull, lane, 3, 8) != lane / 8 * 8 + 3;
  faults += __shfl_down_sync(kFull, uint64_t{lane} << 40, 4) >> 40 != (lane < 28 ? lane + 4 : lane);
  faults += __shfl_up_sync(kFull, lane, 1, 16) != (lane % 16 ? lane - 1 : lane);
  faults += __shfl_xor_sync(half, lane, 15) != (lane ^ 15);
  if (lane < 16) __syncwarp(half);
  faults += __ballot_sync(half, lane % 3 == 0) != (0x49249249 & half);
  faults += __any_sync(half, lane == 3) != (lane < 16);
  faults += __all_sync(half, lane < 16) != (lane < 16);
  faults += __umulhi(0x80000000, lane) != lane / 2 || __popc(half) != 16 ||
            __clz(1 << lane) != int(31 - lane);
  faults += __byte_perm(0x33221100, 0x77665544, 0x7410) != 0x77441100;
  faults += __syncthreads_count(threadIdx.x < 40) != 40;
  faults += !__syncthreads_and(wrong != nullptr) || __syncthreads_and(threadIdx.x != 63);
  faults += !__syncthreads_or(threadIdx.x == 63) || __syncthreads_or(wrong == nullptr);
  atomicAdd(wrong, faults);
}

void warp_functions() {
  unsigned wrong = 0;
  KVX_LAUNCH(warp_kernel, 2, 64, 0, nullptr, &wrong);
  expect(wrong == 0, "warp functions: values");
}

// Each lane reads what its neighbor has written.
__global__ void neighbor_kernel(unsigned *out, bool sync) {
  __shared__ unsigned values[32];
  const unsigned i = threadIdx.x;
  values[i] = i;
  if (sync)
    __syncwarp();
  else
    __ballot_sync(kFull, true);
  out[i] = values[i ^ 1];
}

void neighbor(bool sync) {
  std::vector<unsigned> out(32);
  KVX_LAUNCH(neighbor_kernel, 1, 32, 0, nullptr, out.data(), sync);
  for (unsigned i = 0; i < 32; ++i) expect(out[i] == (i ^ 1), "neighbor: values");
}

// ---- atomics in shared and global memory, device variables ----

__device__ unsigned largest;

__global__ void histogram_kernel(const uint8_t *in, unsigned count, unsigned long long *bins) {
  __shared__ unsigned mine[4];
  if (threadIdx.x < 4) mine[threadIdx.x] = 0;
  __syncthreads();
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    atomicAdd(&mine[in[i] % 4], 1);
    atomicMax(&largest, in[i]);
  }
  __syncthreads();
  if (threadIdx.x < 4) atomicAdd(&bins[threadIdx.x], mine[threadIdx.x]);
}

void histogram() {
  std::vector<uint8_t> in(1000);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i % 201);
  unsigned long long bins[4] = {}, expected[4] = {};
  for (const uint8_t x : in) ++expected[x % 4];
  unsigned most = 1;
  cudaMemcpyToSymbolAsync(largest, &most, sizeof most);
  KVX_LAUNCH(histogram_kernel, 3, 96, 0, nullptr, in.data(), 1000, bins);
  cudaMemcpyFromSymbolAsync(&most, largest, sizeof most);
  expect(std::memcmp(bins, expected, sizeof bins) == 0 && most == 200, "histogram: counts");
}

// ---- faults that need a kernel of their own ----

__global__ void same_address_kernel(unsigned *out) {
  if (threadIdx.x == 5) *out = blockIdx.x;
}

__global__ void past_shared_kernel(unsigned *out) {
  KVX_DYNAMIC_SHARED(unsigned, values);
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void divergent_kernel(unsigned *out) {
  if (threadIdx.x < 20)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void absent_lane_kernel(unsigned *out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_xor_sync(kFull, threadIdx.x, 1);
}

__global__ void absent_source_kernel(unsigned *out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffff, threadIdx.x, 20);
}

__global__ void wrong_mask_kernel(unsigned *out) {
  __syncwarp(0x00ff);
  out[threadIdx.x] = 1;
}

__global__ void different_lines_kernel(unsigned *out) {
  if (threadIdx.x % 2)
    out[threadIdx.x] = __shfl_sync(kFull, 1, 0);
  else
    out[threadIdx.x] = __shfl_sync(kFull, 2, 0);
}

// What needs no tool: the launch is refused, and the error comes from the runtime.
void refused(unsigned threads, size_t shared_bytes, cudaError_t error) {
  unsigned out = 7;
  KVX_LAUNCH(same_address_kernel, 1, threads, shared_bytes, nullptr, &out);
  expect(cudaPeekAtLastError() == error && cudaGetLastError() == error &&
             cudaGetLastError() == cudaSuccess && out == 7,
         "refused: error");
}

void limits() {
  refused(1025, 0, cudaErrorInvalidConfiguration);
  refused(0, 0, cudaErrorInvalidConfiguration);
  refused(64, (48 << 10) + 1, cudaErrorInvalidValue);
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  expect(cudaFuncSetAttribute(same_address_kernel, attribute, 232449) == cudaErrorInvalidValue &&
             cudaGetLastError() == cudaErrorInvalidValue &&
             cudaFuncSetAttribute(same_address_kernel, attribute, 232448) == cudaSuccess,
         "limits: cudaFuncSetAttribute");
  unsigned out = 7;
  KVX_LAUNCH(same_address_kernel, 1, 1024, 232448, nullptr, &out);
  expect(cudaGetLastError() == cudaSuccess && out == 0, "limits: the largest block");
}

void launch(void (*kernel)(unsigned *), unsigned blocks, size_t shared_bytes = 0) {
  std::vector<unsigned> out(32);
  KVX_LAUNCH(kernel, blocks, 32, shared_bytes, nullptr, out.data());
}

const struct {
  const char *name;
  void (*run)();
} faults[] = {
    {"missing-barrier", [] { transpose(false); }},
    {"missing-syncwarp", [] { neighbor(false); }},
    {"same-address", [] { launch(same_address_kernel, 4); }},
    {"misaligned", [] { copy<uint4>(2, 0); }},
    {"past-end", [] { copy<uint4>(0, 1); }},
    {"past-shared", [] { launch(past_shared_kernel, 1, 31 * sizeof(unsigned)); }},
    {"divergent-barrier", [] { launch(divergent_kernel, 1); }},
    {"different-lines", [] { launch(different_lines_kernel, 1); }},
    {"absent-lane", [] { launch(absent_lane_kernel, 1); }},
    {"absent-source", [] { launch(absent_source_kernel, 1); }},
    {"wrong-mask", [] { launch(wrong_mask_kernel, 1); }},
    {"shared-memory", [] { refused(64, 232449, cudaErrorInvalidValue); }},
};

void run_all() {
  copy<uint4>(0, 0);
  copy<uint2>(8, 0);
  copy<uint8_t>(3, 0);
  transpose(true);
  amax();
  warp_functions();
  neighbor(true);
  histogram();
  limits();
}

}  // namespace

int main(int argc, char **argv) {
  bool known = argc == 1;
  if (known) run_all();
  for (const auto &fault : faults) {
    if (argc == 1 || std::strcmp(argv[1], fault.name) != 0) continue;
    known = true;
    fault.run();
  }
  expect(known, "no such fault");
  if (hostgrid_races) {
    std::printf("%lu races, %lu accesses\n", hostgrid_races(), hostgrid_accesses());
    expect(hostgrid_races() == 0, "races");
  }
  std::printf("done\n");
}

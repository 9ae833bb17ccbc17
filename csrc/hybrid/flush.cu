// Entries into blocks, and tails after a flush: a block of threads per row, and one for its key.
#include <algorithm>

#include "hybrid/blocks.cuh"

namespace kvx::hybrid {
namespace {

constexpr uint32_t kMostParts = 64;  // blocks of threads that share a row's tail

// Not within the templates: there g++ puts a static array into no section (tests/hostgrid).
__device__ __forceinline__ OfWarps &largest_of_warps() {
  __shared__ OfWarps of_warps;
  return of_warps;
}

// The index key of a row. Its first numbers are on their way while the entry is looked up.
template <class Format>
class Key {
 public:
  __device__ __forceinline__ explicit Key(const kvx_hybrid_flush_t &f)
      : key_(static_cast<const typename Format::Bits *>(f.index_key) +
             uint64_t{blockIdx.x} * f.key_dim),
        dim_(f.key_dim),
        first_(load(threadIdx.x)) {}

  // Number `d`, which the caller's thread has as threadIdx.x + i * kThreads; 0 past the end.
  __device__ __forceinline__ float operator[](uint32_t d) const {
    return d < kThreads ? first_ : load(d);
  }

 private:
  __device__ __forceinline__ float load(uint32_t d) const {
    return d < dim_ ? Format::decode(key_[d]) : 0.0f;
  }

  const typename Format::Bits *key_;
  uint32_t dim_;
  float first_;
};

// One scale for the numbers of all threads.
template <class Format>
__device__ __forceinline__ void write_fp8_key(const kvx_hybrid_flush_t &f, const Key<Format> &key,
                                              uint64_t entry, OfWarps &of_warps) {
  uint8_t *const codes = f.key_codes + entry * f.key_dim;
  int32_t most = 0;
  for (uint32_t d = threadIdx.x; d < f.key_dim; d += kThreads)
    most = largest_magnitude(most, key[d]);
  const uint8_t exponent = page_exponent(largest_of_block(most, of_warps));
  const float inverse = page_inverse(exponent);
  for (uint32_t d = threadIdx.x; d < f.key_dim; d += kThreads)
    codes[d] = E4m3::encode(key[d] * inverse);
  if (threadIdx.x == 0) reinterpret_cast<float *>(f.key_scales)[entry] = E8m0::decode(exponent);
}

// A thread per number, and shuffles among those of a group.
template <class Format>
__device__ __forceinline__ void write_fp4_key(const kvx_hybrid_flush_t &f, const Key<Format> &key,
                                              uint64_t entry) {
  const bool is_nv = f.keys == KVX_HYBRID_NVFP4;
  const uint32_t group = is_nv ? 16 : 32;
  const kvx_dtype_t scale_dtype = is_nv ? KVX_DTYPE_F8_E4M3 : KVX_DTYPE_F8_E8M0;
  const Fp4 with(1.0f);
  uint8_t *const codes = f.key_codes + entry * (f.key_dim / 2);
  uint8_t *const scales = f.key_scales + entry * (f.key_dim / group);
  for (uint32_t first = 0; first < f.key_dim; first += kThreads) {
    const uint32_t d = first + threadIdx.x;
    const float x = key[d];
    int32_t most = largest_magnitude(0, x);
    for (uint32_t step = group / 2; step; step /= 2)
      most = max(most, __shfl_xor_sync(kAllLanes, most, step));
    const float scale = key_scale(f, with.find(most, scale_dtype));
    const uint32_t code = key_code(f, x * with.inverse(scale));
    const uint32_t next = __shfl_down_sync(kAllLanes, code, 1);
    if (d >= f.key_dim) continue;
    if (d % 2 == 0) codes[d / 2] = static_cast<uint8_t>(code | next << 4);
    if (d % group == 0) store_group_scale(scales + d / group, scale_dtype, scale);
  }
}

template <class Format>
__device__ __forceinline__ void write_key(const kvx_hybrid_flush_t &f) {
  const Key<Format> key(f);
  const int64_t entry = entry_of_row(f, blockIdx.x);
  if (entry < 0) return;
  if (f.keys == KVX_HYBRID_FP8) {
    write_fp8_key(f, key, static_cast<uint64_t>(entry), largest_of_warps());
  } else {
    write_fp4_key(f, key, static_cast<uint64_t>(entry));
  }
}

template <class Format, uint32_t kNumbers>
__device__ __forceinline__ void write_entry(const kvx_hybrid_flush_t &f) {
  const uint64_t dim = uint64_t{f.nope_dim} + f.rope_dim, row = blockIdx.x;
  const Row<Format, kNumbers> numbers(
      static_cast<const typename Format::Bits *>(f.entry) + row * dim, f.nope_dim, f.rope_dim);
  const int64_t entry = entry_of_row(f, blockIdx.x);
  const float scale = f.inv_scale ? numbers.scale(largest_of_warps()) : 1.0f;
  if (entry < 0) return;
  numbers.store(f.fp8 + entry * f.nope_dim, static_cast<uint16_t *>(f.rope) + entry * f.rope_dim,
                scale);
  if (f.inv_scale && threadIdx.x == 0) f.inv_scale[entry] = scale;
}

template <class Format, uint32_t kNumbers>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    flush_write_csa_kernel(const __grid_constant__ kvx_hybrid_flush_t f) {
  begin_dependent();
  if (blockIdx.y) {
    write_key<Format>(f);
  } else {
    write_entry<Format, kNumbers>(f);
  }
}

template <class Format, uint32_t kNumbers>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    flush_write_hca_kernel(const __grid_constant__ kvx_hybrid_flush_t f) {
  begin_dependent();
  write_entry<Format, kNumbers>(f);
}

// The vectors of a tail, -1: the row is skipped.
__device__ __forceinline__ int64_t first_vector(const kvx_hybrid_state_t &s, uint64_t vectors) {
  const int32_t slot = s.slots[blockIdx.x];
  const bool is_masked = s.mask && !s.mask[blockIdx.x];
  if (is_masked || slot < 0 || static_cast<uint32_t>(slot) >= s.num_slots) return -1;
  if (threadIdx.x == 0 && blockIdx.y == 0) s.tail_len[slot] = 0;
  return static_cast<int64_t>(slot * vectors);
}

// Blocks of threads share the vectors of a row.
template <class V>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    csa_rotate_state_kernel(const __grid_constant__ kvx_hybrid_state_t s, uint64_t vectors) {
  begin_dependent();
  const int64_t first = first_vector(s, vectors);
  if (first < 0) return;
  const auto at = [&](void *data) { return cuda::global(static_cast<V *>(data) + first); };
  V *const ka = at(s.ka), *const za = at(s.za), *const kb = at(s.kb), *const zb = at(s.zb);
  for (uint64_t i = blockIdx.y * kThreads + threadIdx.x; i < vectors; i += gridDim.y * kThreads) {
    const V k = ka[i], z = za[i];
    kb[i] = k;
    zb[i] = z;
    ka[i] = za[i] = V{};
  }
}

template <class V>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    hca_reset_state_kernel(const __grid_constant__ kvx_hybrid_state_t s, uint64_t vectors) {
  begin_dependent();
  const int64_t first = first_vector(s, vectors);
  if (first < 0) return;
  V *const ka = cuda::global(static_cast<V *>(s.ka) + first);
  V *const za = cuda::global(static_cast<V *>(s.za) + first);
  for (uint64_t i = blockIdx.y * kThreads + threadIdx.x; i < vectors; i += gridDim.y * kThreads)
    ka[i] = za[i] = V{};
}

template <class Format, uint32_t kNumbers>
void launch_flush(const kvx_hybrid_flush_t &f, cudaStream_t stream) {
  if (f.keys == KVX_HYBRID_NO_KEYS) {
    KVX_LAUNCH_DEPENDENT((flush_write_hca_kernel<Format, kNumbers>), dim3(f.num_rows),
                         dim3(kThreads), stream, f);
  } else {
    KVX_LAUNCH_DEPENDENT((flush_write_csa_kernel<Format, kNumbers>), dim3(f.num_rows, 2),
                         dim3(kThreads), stream, f);
  }
}

}  // namespace

kvx_status_t launch(const kvx_hybrid_flush_t &f, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_format(f.dtype, [&](auto format) {
    if (takes_four(f.entry, f.dtype, f.fp8, f.nope_dim, f.rope_dim)) {
      launch_flush<decltype(format), 4>(f, on);
    } else {
      launch_flush<decltype(format), 1>(f, on);
    }
  });
  return launched();
}

kvx_status_t launch(const kvx_hybrid_state_t &s, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const uint64_t bytes = uint64_t{s.ratio} * s.row * (s.state == KVX_DTYPE_F32 ? 4 : 2);
  uintptr_t bits = 16 | bytes;
  for (const void *data : {s.ka, s.za, s.kb, s.zb}) bits |= reinterpret_cast<uintptr_t>(data);
  cuda::with_vector(1u << __builtin_ctzll(bits), [&](auto vector) {
    using V = decltype(vector);
    if constexpr (sizeof(V) > 1) {  // numbers have two bytes at least
      const uint64_t vectors = bytes / sizeof(V), parts = (vectors + kThreads - 1) / kThreads;
      const dim3 grid(s.num_rows,
                      static_cast<uint32_t>(std::clamp<uint64_t>(parts, 1, kMostParts)));
      if (s.kb) {
        KVX_LAUNCH_DEPENDENT((csa_rotate_state_kernel<V>), grid, dim3(kThreads), on, s, vectors);
      } else {
        KVX_LAUNCH_DEPENDENT((hca_reset_state_kernel<V>), grid, dim3(kThreads), on, s, vectors);
      }
    }
  });
  return launched();
}

}  // namespace kvx::hybrid

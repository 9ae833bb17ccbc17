// Tokens into rings and tails: a block of threads per token.
#include "hybrid/blocks.cuh"

namespace kvx::hybrid {
namespace {

// Shared memory is declared in functions that are no templates: there g++ puts a static array into
// no section (tests/hostgrid).
__device__ __forceinline__ OfWarps &largest_of_warps() {
  __shared__ OfWarps of_warps;
  return of_warps;
}

__device__ __forceinline__ uint32_t &head_of_block() {
  __shared__ uint32_t head;
  return head;
}

// How many tokens of the call before and behind a token have its slot.
struct Order {
  uint32_t earlier, later;
};

// All tokens are looked at.
__device__ __forceinline__ Order found_order(const int32_t *slots, uint32_t num_tokens,
                                             uint32_t i) {
  __shared__ Order of_warps[kThreads / kWarp];
  const int32_t slot = slots[i];
  Order found{0, 0};
  for (uint32_t j = threadIdx.x; j < num_tokens; j += kThreads) {
    const bool is_same = slots[j] == slot;
    found.earlier += is_same && j < i;
    found.later += is_same && j > i;
  }
#pragma unroll
  for (uint32_t step = kWarp / 2; step; step /= 2) {
    found.earlier += __shfl_xor_sync(kAllLanes, found.earlier, step);
    found.later += __shfl_xor_sync(kAllLanes, found.later, step);
  }
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = found;
  __syncthreads();
  found = {0, 0};
#pragma unroll
  for (uint32_t w = 0; w < kThreads / kWarp; ++w) {
    found.earlier += of_warps[w].earlier;
    found.later += of_warps[w].later;
  }
  return found;
}

// That of a token of a span. One that has no span is behind and before too many to have a place.
template <class Call>
__device__ __forceinline__ Order order_of(const Call &call, uint32_t i) {
  if (!call.num_spans) return found_order(call.slots, call.num_tokens, i);
  const auto span = static_cast<uint32_t>(call.span_of[i]);
  if (span >= call.num_spans) return {UINT32_MAX, UINT32_MAX};
  return {i - static_cast<uint32_t>(call.span_starts[span]),
          static_cast<uint32_t>(call.span_starts[span + 1]) - 1 - i};
}

// The token that a block advances a head or tail for: one of each span, or any. -1: none.
template <class Call>
__device__ __forceinline__ int64_t token_of_block(const Call &call) {
  if (!call.num_spans) return blockIdx.x;
  const int32_t first = call.span_starts[blockIdx.x], last = call.span_starts[blockIdx.x + 1] - 1;
  return first <= last && static_cast<uint32_t>(last) < call.num_tokens ? last : -1;
}

__device__ __forceinline__ bool is_slot(int32_t slot, uint32_t num_slots) {
  return slot >= 0 && static_cast<uint32_t>(slot) < num_slots;
}

// With kOneEach an atomic addition gives the first thread the head of the token's ring, and
// advances it. It is on its way until place_of.
template <bool kOneEach>
__device__ __forceinline__ uint32_t taken_head(const kvx_hybrid_append_t &a, int32_t slot) {
  if (!kOneEach || threadIdx.x) return 0;
  return static_cast<uint32_t>(atomicAdd(a.head + slot, 1));
}

// The token's row of its ring, -1: a later token of the call has it.
template <bool kOneEach>
__device__ __forceinline__ int64_t place_of(const kvx_hybrid_append_t &a, uint32_t i, int32_t slot,
                                            uint32_t taken) {
  uint32_t head;
  if constexpr (kOneEach) {
    uint32_t &of_block = head_of_block();
    if (threadIdx.x == 0) of_block = taken;
    __syncthreads();
    head = of_block;
  } else {
    const Order order = order_of(a, i);
    if (order.later >= a.window) return -1;
    head = static_cast<uint32_t>(a.head[slot]) + order.earlier;
  }
  return int64_t{slot} * a.window + head % a.window;
}

template <bool kOneEach, uint32_t kNumbers>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_swa_kernel(const __grid_constant__ kvx_hybrid_append_t a) {
  begin_dependent();
  const uint32_t i = blockIdx.x;
  const uint64_t dim = uint64_t{a.nope_dim} + a.rope_dim;
  const int32_t slot = a.slots[i];
  const Row<Bf16, kNumbers> row(static_cast<const uint16_t *>(a.x) + i * dim, a.nope_dim,
                                a.rope_dim);
  const int64_t position = position_of(a.positions, a.position_bytes, i);
  if (!is_slot(slot, a.num_slots)) return;
  const uint32_t taken = taken_head<kOneEach>(a, slot);
  const float scale = a.inv_scale ? row.scale(largest_of_warps()) : 1.0f;
  const int64_t place = place_of<kOneEach>(a, i, slot, taken);
  if (place < 0) return;
  row.store(a.fp8 + place * a.nope_dim, static_cast<uint16_t *>(a.rope) + place * a.rope_dim,
            scale);
  if (threadIdx.x) return;
  if (a.inv_scale) a.inv_scale[place] = scale;
  a.pos[place] = static_cast<int32_t>(position);
}

// The rings' heads after a call in which slots have several tokens.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    advance_heads_kernel(const __grid_constant__ kvx_hybrid_append_t a) {
  const int64_t i = token_of_block(a);
  if (i < 0) return;
  const int32_t slot = a.slots[i];
  if (!is_slot(slot, a.num_slots)) return;
  const Order order = order_of(a, static_cast<uint32_t>(i));
  if (order.later == 0 && threadIdx.x == 0)
    atomicAdd(a.head + slot, static_cast<int>(order.earlier + 1));
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_tail_kernel(const __grid_constant__ kvx_hybrid_tail_t t) {
  using In = typename From::Bits;
  using Out = typename To::Bits;
  const uint32_t i = blockIdx.x;
  const int32_t slot = t.slots[i];
  if (!is_slot(slot, t.num_slots)) return;
  const uint64_t row = uint64_t{static_cast<uint32_t>(t.tail_len[slot])} + order_of(t, i).earlier;
  if (row >= t.ratio) return;
  const uint64_t from = uint64_t{i} * t.row, to = (uint64_t{t.ratio} * slot + row) * t.row;
  for (uint32_t d = threadIdx.x; d < t.row; d += kThreads) {
    const In k = static_cast<const In *>(t.k)[from + d], z = static_cast<const In *>(t.z)[from + d];
    if constexpr (sizeof(In) == sizeof(Out)) {
      static_cast<Out *>(t.ka)[to + d] = k;
      static_cast<Out *>(t.za)[to + d] = z;
    } else {
      static_cast<Out *>(t.ka)[to + d] = To::encode(From::decode(k));
      static_cast<Out *>(t.za)[to + d] = To::encode(From::decode(z));
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    advance_tails_kernel(const __grid_constant__ kvx_hybrid_tail_t t) {
  const int64_t i = token_of_block(t);
  if (i < 0) return;
  const int32_t slot = t.slots[i];
  if (!is_slot(slot, t.num_slots)) return;
  const Order order = order_of(t, static_cast<uint32_t>(i));
  if (order.later || threadIdx.x) return;
  const uint64_t len = uint64_t{static_cast<uint32_t>(t.tail_len[slot])} + order.earlier + 1;
  t.tail_len[slot] = static_cast<int32_t>(len < t.ratio ? len : t.ratio);
}

template <bool kOneEach>
void launch_append(const kvx_hybrid_append_t &a, cudaStream_t stream) {
  if (takes_four(a.x, KVX_DTYPE_BF16, a.fp8, a.nope_dim, a.rope_dim)) {
    KVX_LAUNCH_DEPENDENT((append_swa_kernel<kOneEach, 4>), dim3(a.num_tokens), dim3(kThreads),
                         stream, a);
  } else {
    KVX_LAUNCH_DEPENDENT((append_swa_kernel<kOneEach, 1>), dim3(a.num_tokens), dim3(kThreads),
                         stream, a);
  }
}

}  // namespace

kvx_status_t launch(const kvx_hybrid_append_t &a, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.num_tokens == 1 || a.flags & KVX_HYBRID_ONE_EACH) {
    launch_append<true>(a, on);
  } else {
    launch_append<false>(a, on);
    KVX_LAUNCH(advance_heads_kernel, dim3(a.num_spans ? a.num_spans : a.num_tokens), dim3(kThreads),
               0, on, a);
  }
  return launched();
}

kvx_status_t launch(const kvx_hybrid_tail_t &t, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_format(t.dtype, [&](auto from) {
    with_format(t.state, [&](auto to) {
      KVX_LAUNCH((append_tail_kernel<decltype(from), decltype(to)>), dim3(t.num_tokens),
                 dim3(kThreads), 0, on, t);
    });
  });
  KVX_LAUNCH(advance_tails_kernel, dim3(t.num_spans ? t.num_spans : t.num_tokens), dim3(kThreads),
             0, on, t);
  return launched();
}

}  // namespace kvx::hybrid

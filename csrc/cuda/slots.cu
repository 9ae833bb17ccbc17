// Same bytes, tokens that follow each other to slots, a vector per thread: what a decode step
// writes. Lookup modes are known when it is compiled; a fault is looked up again where it is found.
#include <algorithm>

#include "cuda/dependent.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/vector.h"

namespace kvx::cuda {
namespace {

template <class V, class P>
__global__ void __launch_bounds__(kThreads, 4) slots_kernel(const __grid_constant__ P p) {
  const uint32_t index = blockIdx.y;
  const KernelLookup &slots = p.lookups[p.lookup[index]].dst;
  const Plane &src = p.shape.src, &dst = p.shape.dst;
  const auto tokens = static_cast<uint32_t>(p.rows.uniform_len);
  for (uint32_t chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
    const Division at = p.units.per_token.divide(chunk * kThreads + threadIdx.x);
    const auto token = static_cast<uint32_t>(at.quotient);
    if (token >= tokens) return;
    const uint32_t unit = at.remainder, head = p.units.per_head.quotient(unit);
    const uint32_t in_head = unit - head * p.units.per_head.divisor;
    const uint8_t *const from =
        p.src_of(index) + token * src.token_stride + head * src.head_stride + in_head * sizeof(V);
    const V vector = load<V>(from);  // before its slot is known
    Place to;
    if (place_of_slot(slots, slots.indices[token], &to) != Fault::kNone && unit == 0) {
      const Pair pair = this_pair(p);
      if (pair.reports) report(p, pair.lookup, 0, true, token, token, pair.plane);
    }
    if (to.block < 0) continue;
    store(p.dst_of(index) + to.block * dst.block_stride + to.offset * dst.token_stride +
              unit_offset(dst, p.units.dst_per_pack, sizeof(V), head, in_head),
          vector);
  }
}

// ---- one layer, where the time of a launch counts

constexpr uint32_t kLayerThreads = 128;
constexpr uint32_t kLog2LayerThreads = 7;

// K and V of a layer, or one plane, with the slots of both. A token's units are as many lanes as
// the next power of two, or several blocks of threads. Numbers of 64 bits are bytes, modulo 2^64: a
// step is from the end of a head to the next head, of a block to the next block. What loads need
// comes first, in few cache lines.
struct Layer {
  const uint8_t *src[kFewPairs];
  const void *slots;
  uint64_t src_token_stride, src_head_step;
  uint32_t log2_lanes, tokens, per_token;
  FastDiv per_head;

  uint32_t num_slots;
  FastDiv block_tokens;
  int64_t invalid_slot;
  uint8_t *dst[kFewPairs];
  uint64_t dst_token_stride, dst_block_step, dst_head_step;
  Status *status;  // NULL: another launch reports
  Call call;
  LookupMode src_mode;
  bool is_v, is_own;  // of the slots, for errors
};
static_assert(sizeof(Layer) <= 192);

__device__ __forceinline__ void report_slot(const Layer &p, uint32_t token, int64_t slot) {
  Violation found{};
  found.fault = Fault::kSlot;
  found.mode = LookupMode::kSlots;
  found.is_v = p.is_v;
  found.is_own = p.is_own;
  found.at_dst = true;
  found.index = token;
  found.value = slot;
  found.limit = p.num_slots;
  // As `report` does of `Common`, which this kernel has not.
  atomicAdd(&p.status->count, 1ull);
  if (atomicCAS(&p.status->claimed, 0u, 1u) != 0) return;
  p.status->call = p.call;
  p.status->src = p.src_mode;
  p.status->dst = LookupMode::kSlots;
  p.status->first = found;
  __threadfence();
  atomicExch(&p.status->ready, 1u);
}

// The slot, S32 or S64, and the vectors are loaded together: as `load` has a condition, the
// compiler leaves it before the branch that needs the slot.
template <class V, class Slot, uint32_t kPairs>
__global__ void __launch_bounds__(kLayerThreads) layer_kernel(const __grid_constant__ Layer p) {
  let_next_kernel_start();
  const uint32_t lane = blockIdx.x * kLayerThreads + threadIdx.x, token = lane >> p.log2_lanes;
  const uint32_t unit = blockIdx.y * kLayerThreads + (threadIdx.x & ((1u << p.log2_lanes) - 1));
  if (token >= p.tokens || unit >= p.per_token) return;
  const uint32_t head = p.per_head.quotient(unit);
  const uint64_t in_units = uint64_t{unit} * sizeof(V);
  const uint64_t from = token * p.src_token_stride + head * p.src_head_step + in_units;
  const uint8_t *k = p.src[0] + from, *v = p.src[kPairs - 1] + from;
  wait_for_kernels_before(k, v);
  const int64_t slot = global(static_cast<const Slot *>(p.slots))[token];
  const V of_k = load<V>(k), of_v = load<V>(v);
  if (static_cast<uint64_t>(slot) >= p.num_slots || slot == p.invalid_slot) {
    if (slot >= 0 && slot != p.invalid_slot && unit == 0 && p.status) report_slot(p, token, slot);
    return;
  }
  const auto narrow = static_cast<uint32_t>(slot);
  const uint64_t to = narrow * p.dst_token_stride +
                      p.block_tokens.quotient(narrow) * p.dst_block_step + head * p.dst_head_step +
                      in_units;
  store(p.dst[0] + to, of_k);
  if constexpr (kPairs > 1) store(p.dst[1] + to, of_v);
}

// Whether the pairs are those of a layer: they share their slots, and their vectors are dense.
template <class P>
bool is_layer(const P &p) {
  const KernelLookups &lookups = p.lookups[p.lookup[0]];
  return p.num_pairs <= kFewPairs && p.lookup[0] == p.lookup[p.num_pairs - 1] &&
         !lookups.differs_by_plane() && p.shape.dst.pack == p.shape.head_dim;
}

template <class P>
Layer layer_of(const P &p, uint32_t unit_bytes) {
  const auto number = [](int64_t bytes) { return static_cast<uint64_t>(bytes); };
  const Plane &src = p.shape.src, &dst = p.shape.dst;
  const auto &[from, to] = p.lookups[p.lookup[0]];
  const uint64_t head_bytes = uint64_t{p.units.per_head.divisor} * unit_bytes;
  Layer layer{};
  for (uint32_t i = 0; i < p.num_pairs; ++i) layer.src[i] = p.src_of(i), layer.dst[i] = p.dst_of(i);
  layer.slots = to.indices.data;
  layer.src_token_stride = number(src.token_stride);
  layer.src_head_step = number(src.head_stride) - head_bytes;
  layer.log2_lanes = std::min(log2_from(p.units.per_token.divisor), kLog2LayerThreads);
  layer.tokens = static_cast<uint32_t>(p.rows.uniform_len);
  layer.per_token = p.units.per_token.divisor;
  layer.per_head = p.units.per_head;
  layer.num_slots = to.slots;
  layer.block_tokens = to.block_tokens;
  layer.invalid_slot = to.invalid_slot;
  layer.dst_token_stride = number(dst.token_stride);
  layer.dst_block_step =
      number(dst.block_stride) - to.block_tokens.divisor * number(dst.token_stride);
  layer.dst_head_step = number(dst.head_stride) - head_bytes;
  if (p.reporter[p.lookup[0]] != UINT32_MAX) layer.status = p.status;
  layer.call = p.call;
  layer.src_mode = from.mode;
  layer.is_v = to.is_v;
  layer.is_own = to.is_own;
  return layer;
}

template <class V, class Slot>
void launch_layer(const Layer &layer, uint32_t num_pairs, cudaStream_t stream) {
  const uint32_t lanes = layer.tokens << layer.log2_lanes;
  const dim3 grid((lanes - 1) / kLayerThreads + 1, (layer.per_token - 1) / kLayerThreads + 1);
  if (num_pairs == 1) {
    KVX_LAUNCH_DEPENDENT((layer_kernel<V, Slot, 1>), grid, kLayerThreads, stream, layer);
  } else {
    KVX_LAUNCH_DEPENDENT((layer_kernel<V, Slot, 2>), grid, kLayerThreads, stream, layer);
  }
}

}  // namespace

template <class P>
void launch_slots(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  with_vector(choice.unit_bytes, [&](auto vector) {
    using V = decltype(vector);
    if constexpr (sizeof(V) >= 4) {  // heads of any model
      if (is_layer(params)) {
        const bool is_wide = params.lookups[params.lookup[0]].dst.indices.wide;
        const auto launch = is_wide ? launch_layer<V, int64_t> : launch_layer<V, int32_t>;
        return launch(layer_of(params, sizeof(V)), params.num_pairs, stream);
      }
    }
    KVX_LAUNCH((slots_kernel<V, P>), grid, kThreads, 0, stream, params);
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_slots);

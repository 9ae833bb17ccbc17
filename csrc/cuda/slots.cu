// Same bytes, tokens that follow each other to slots, a vector per thread: what a decode step
// writes. Lookup modes are known when it is compiled; a fault is looked up again where it is found.
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

}  // namespace

template <class P>
void launch_slots(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  with_vector(choice.unit_bytes, [&](auto vector) {
    KVX_LAUNCH((slots_kernel<decltype(vector), P>), grid, kThreads, 0, stream, params);
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_slots);

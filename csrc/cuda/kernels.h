// The kernels' launches, one .cu each. All take a grid of (blocks, pairs), of kThreads threads.
#pragma once

#include "cuda/choice.h"
#include "cuda/platform.h"

namespace kvx::cuda {

template <class P>
void launch_slots(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_blocks(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_bulk(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_vectors(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_remap(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_tile(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_convert(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_quantize(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_units(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);
template <class P>
void launch_generic(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream);

void launch_affine(const AffineParams &params, dim3 grid, cudaStream_t stream);
void launch_fp4(const AffineParams &params, dim3 grid, cudaStream_t stream);
void launch_channels(const AffineParams &params, dim3 grid, cudaStream_t stream);

}  // namespace kvx::cuda

// At the end of a kernel's file: its launch for few pairs and for many.
#define KVX_INSTANTIATE_FOR(launch, P)                                                   \
  template void kvx::cuda::launch(const kvx::cuda::P &, const kvx::cuda::Choice &, dim3, \
                                  cudaStream_t)
#ifdef KVX_ONE_SIZE
#define KVX_INSTANTIATE(launch) KVX_INSTANTIATE_FOR(launch, Large)
#else
#define KVX_INSTANTIATE(launch)       \
  KVX_INSTANTIATE_FOR(launch, Small); \
  KVX_INSTANTIATE_FOR(launch, Large)
#endif

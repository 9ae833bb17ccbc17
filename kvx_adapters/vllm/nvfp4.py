"""vLLM's NVFP4 cache (kv_cache_dtype "nvfp4", FlashInfer) as a view. Imports no vllm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx_adapters.vllm.tables import NULL_BLOCK_ID
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    UnsupportedError,
    describe,
)

_GROUP = 16  # numbers of a scale
# Compute capabilities (major) by the order in which a kernel keeps the scales of V.
# Source: vllm 0.32 v1/attention/backends/flashinfer.py, _nvfp4_kv_on_fa2;
# csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, swizzle_scale_offset
_LINEAR, _SWAPPED = (8, 9, 12), (10,)


def nvfp4_view(
    kv_caches: Sequence[Tensor],
    num_kv_heads: int,
    facts: CacheFacts,
    *,
    capability: int,
    k_scales: Sequence[float] | None = None,
    v_scales: Sequence[float] | None = None,
) -> CacheView:
    """All layers that share one block table, zero-copy: F4_E2M1 with its scales [spec E.18].

    kv_caches:  as vLLM binds them to its layers: (num_blocks, 2 * num_kv_heads, block_size,
                head_size / 2 + head_size / 16) uint8, dense within a block, in the order of heads
                or of tokens. A block is K's data, K's scales, V's data, V's scales
    capability: major compute capability of the GPU whose kernels use the cache: on 10 they keep
                the scales of V in another order
    k_scales, v_scales: layer._k_scale and layer._v_scale of each layer; None: 1
    The view has vLLM's null block. Raises InvalidArgumentError, UnsupportedError.
    Source: vllm 0.32 v1/attention/backends/flashinfer.py, FlashInferBackend.customize_spec,
    _nvfp4_kv_views; utils/torch_utils.py, nvfp4_split_data_scale
    """
    if capability not in _LINEAR + _SWAPPED:
        raise UnsupportedError(
            f"capability is {capability!r}, expected the major one of a GPU with NVFP4 caches: "
            f"{', '.join(map(str, sorted(_LINEAR + _SWAPPED)))}"
        )
    sides = [
        tuple(_side(kv_cache, num_kv_heads, is_v, capability) for is_v in (False, True))
        for kv_cache in kv_caches
    ]
    return CacheView(
        layers=tuple(CacheDesc.from_kv(k.desc, v.desc) for k, v in sides),
        facts=facts,
        k_scales=tuple(k.scales for k, _ in sides),
        v_scales=tuple(v.scales for _, v in sides),
        k_zeros=_of_tensors("k_scales", k_scales, len(sides)),
        v_zeros=_of_tensors("v_scales", v_scales, len(sides)),
        null_block_id=NULL_BLOCK_ID,
    )


class _Side:
    """K or V of a layer."""

    def __init__(self, data: Tensor, scales: Tensor, name: str, is_swapped: bool) -> None:
        self.desc = describe(data, Layout.BLOCK_NHD, dtype=DType.F4_E2M1, name=name)
        granularity = "PER_GROUP_4X4" if is_swapped else "PER_GROUP"
        self.scales = ScaleDesc.of(scales.view(torch.float8_e4m3fn), granularity)


def _side(kv_cache: Tensor, num_kv_heads: int, is_v: bool, capability: int) -> _Side:
    num_blocks, head_slots, block_size, width = _checked(kv_cache, num_kv_heads)
    by_head = kv_cache.stride()[1:] == (block_size * width, width, 1)
    if not by_head and kv_cache.stride()[1:] != (width, head_slots * width, 1):
        raise InvalidArgumentError(
            f"kv_cache.stride() is {tuple(kv_cache.stride())}, expected blocks without gaps, in "
            "the order of heads or of tokens"
        )
    if capability in _SWAPPED and not by_head:
        raise UnsupportedError(
            f"kv_cache.stride() is {tuple(kv_cache.stride())}, the order of tokens, expected that "
            "of heads on capability 10: its kernels read no other"
        )
    rows = num_kv_heads * block_size
    numbers = width * 16 // 9
    parts = {"data": numbers // 2, "scales": numbers // _GROUP}
    begin, views = kv_cache.storage_offset() + is_v * rows * width, []
    for size in parts.values():
        token, head = (size, block_size * size) if by_head else (num_kv_heads * size, size)
        views.append(
            kv_cache.as_strided(
                (num_blocks, block_size, num_kv_heads, size),
                (kv_cache.stride(0), token, head, 1),
                begin,
            )
        )
        begin += rows * size
    data, scales = views
    return _Side(data, scales, "v" if is_v else "k", is_v and capability in _SWAPPED)


def _checked(kv_cache: Tensor, num_kv_heads: int) -> tuple[int, int, int, int]:
    """The shape of `kv_cache`."""
    if kv_cache.dtype is not torch.uint8 or kv_cache.ndim != 4:
        raise InvalidArgumentError(
            f"kv_cache is {kv_cache.dtype} of {kv_cache.ndim} axes, expected torch.uint8 of 4: "
            "(num_blocks, 2 * num_kv_heads, block_size, head_size / 2 + head_size / 16)"
        )
    num_blocks, head_slots, block_size, width = kv_cache.shape
    if head_slots != 2 * num_kv_heads:
        raise InvalidArgumentError(
            f"kv_cache.shape[1] is {head_slots}, expected {2 * num_kv_heads}: K and V of "
            f"{num_kv_heads} heads"
        )
    if width % 9:
        raise InvalidArgumentError(
            f"kv_cache.shape[3] is {width}, expected a multiple of 9: 8 bytes of numbers and one "
            "of a scale for each 16 of head_size"
        )
    return num_blocks, head_slots, block_size, width


def _of_tensors(
    name: str, scales: Sequence[float] | None, num_layers: int
) -> tuple[ScaleDesc, ...] | None:
    if scales is None:
        return None
    if len(scales) != num_layers:
        raise InvalidArgumentError(
            f"{name} has {len(scales)} entries, expected {num_layers}, one per layer"
        )
    return tuple(ScaleDesc.of(scale, name=f"{name}[{i}]") for i, scale in enumerate(scales))

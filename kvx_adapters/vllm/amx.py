"""CPU_ATTN's pages with isa "amx": their tiles need planes, since no layout describes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, Plane, Role


def amx_planes(kv_cache: Tensor, layer: int = 0) -> tuple[Plane, Plane]:
    """K and V of a layer of CPU_ATTN with isa "amx", vLLM's choice for bfloat16 on CPUs with AMX.

    kv_cache: (num_blocks, num_kv_heads, block_size, 2 * head_size), bfloat16; each head of a block
              holds block_size * head_size numbers of K, [block_size / 16][head_size / 2][16][2],
              and as many of V, [head_size / 16][block_size / 2][16][2]
    layer:    index in the model
    Raises InvalidArgumentError.
    Source: vllm 0.32 csrc/cpu/cpu_attn_amx.hpp, AttentionImpl<ISA::AMX>; a probe that ran it
    """
    if kv_cache.dtype != torch.bfloat16 or kv_cache.ndim != 4:
        raise InvalidArgumentError(
            f"kv_cache is {kv_cache.ndim}-D {kv_cache.dtype}, expected 4-D torch.bfloat16"
        )
    blocks, heads, block_size, both = kv_cache.shape
    head_size, inner = both // 2, (both, 1)
    if both % 32 or block_size % 32 or kv_cache.stride()[2:] != inner:
        raise InvalidArgumentError(
            f"kv_cache has pages of {block_size} x {both} with strides {kv_cache.stride()[2:]}, "
            f"expected multiples of 32 x 32 with strides {inner}: whole tiles, heads contiguous"
        )
    pages = kv_cache.view(blocks, heads, 2, block_size * head_size)
    k = pages[:, :, 0].view(blocks, heads, block_size // 16, head_size // 2, 16, 2)
    v = pages[:, :, 1].view(blocks, heads, head_size // 16, block_size // 2, 16, 2)
    return (
        Plane.of(k, ("block", "head", "token", "dim", "token", "dim"), Role.K, layer),
        Plane.of(v, ("block", "head", "dim", "token", "dim", "token"), Role.V, layer),
    )

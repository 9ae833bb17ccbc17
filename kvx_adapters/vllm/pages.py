"""Where the attention backends of vLLM keep K and V: one table, by backend and version.

An entry of the table comes from the sources of one backend: the axes of a layer's tensor, their
possible orders in memory, and how the backend finds K and V in it. encodings.py says what the
numbers are; cache_tensor.py checks tensors against the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvx_adapters.vllm.encodings import Encoding
from kvx_adapters.vllm.spec import LayerSpec
from kvx_core import InvalidArgumentError, UnsupportedError

# D: elements of a vector, the K or V of one token and head, as they are stored.
# K and V as (block, head, token, D), or K packed as (block, head, D / x, token, x).
KV = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Page:
    """How one backend keeps its cache.

    Axes: B blocks, H KV heads, N tokens, K the two of K and V, L layers of one allocation, C what
    is left, contiguous: a cell.
    """

    axes: str  # of the tensor
    orders: Mapping[str, str]  # resolved layout -> the axes as they lie in memory, outermost first
    split: Callable[[Tensor, int, Encoding], KV]  # tensor, num_kv_heads, encoding -> K and V
    # A cell is K and V of a token and head, one of the two, or one of the two of all heads.
    cell: Literal["both", "one", "all heads"] = "both"
    v: Literal["like k", "own size", "none"] = "like k"

    def cell_elements(self, num_kv_heads: int, encoding: Encoding) -> int:
        """Stored elements of a cell."""
        if self.cell == "both":
            return encoding.k_elements + (0 if self.v == "none" else encoding.v_elements)
        return encoding.k_elements * (num_kv_heads if self.cell == "all heads" else 1)


# ---- how backends find K and V ----


def _halves(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, H, N, D of K and then D of V)."""
    return cache[..., : encoding.k_elements], cache[..., encoding.k_elements :]


def _halves_of_tokens(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, N, H, D of K and then D of V)."""
    return _halves(cache.transpose(1, 2), num_kv_heads, encoding)


def _latent(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, 1, N, D) of MLA, which has no V: attention reads the front of each vector as V."""
    return cache, None


def _two_tensors(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(2, B, N, H, D)."""
    k, v = cache.unbind(0)
    return k.transpose(1, 2), v.transpose(1, 2)


def _two_planes(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, 2, N, H, D)."""
    k, v = cache.unbind(1)
    return k.transpose(1, 2), v.transpose(1, 2)


def _two_slots(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, 2, N, H * D): K and V are head slots, with all heads of a token in one cell."""
    heads = cache.view(*cache.shape[:-1], num_kv_heads, encoding.k_elements)
    return _two_planes(heads, num_kv_heads, encoding)


def cpu_planes(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, H, N, 2 * D), where a head's page is really K as [D, N] and then V as [N, D]."""
    num_blocks, _, block_size, _ = cache.shape
    size = encoding.k_elements
    k = cache.view(num_blocks, num_kv_heads, 2, size, block_size)[:, :, 0]
    v = cache.view(num_blocks, num_kv_heads, 2, block_size, size)[:, :, 1]
    return k.transpose(2, 3), v


def _cpu_tensors(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(2, B, H, N, D), with the pages of `cpu_planes`."""
    k, v = cache.unbind(0)
    return k.view(*k.shape[:2], encoding.k_elements, -1).transpose(2, 3), v


def _packed(k: Tensor, v: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """Pages of all heads: K as [H, D / x, N, x] with x of 16 bytes, V as [H, D, N].

    Source: vllm 0.32 v1/attention/ops/paged_attn.py, PagedAttention.split_kv_cache
    """
    num_blocks, x = k.shape[0], 16 // k.element_size()
    return (
        k.view(num_blocks, num_kv_heads, encoding.k_elements // x, -1, x),
        v.view(num_blocks, num_kv_heads, encoding.k_elements, -1).transpose(2, 3),
    )


def _packed_tensors(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(2, B, N, H, D), with the pages of `_packed`."""
    return _packed(cache[0], cache[1], num_kv_heads, encoding)


def _packed_slots(cache: Tensor, num_kv_heads: int, encoding: Encoding) -> KV:
    """(B, 2, N, H * D), with the pages of `_packed`."""
    return _packed(cache[:, 0], cache[:, 1], num_kv_heads, encoding)


# ---- the orders in memory ----

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}  # their names before 0.29


def _of(*layouts: str) -> dict[str, str]:
    """Orders by their own names, and by the older ones. Since 0.29."""
    return {name: name for name in layouts} | {
        alias: name for alias, name in _ALIASES.items() if name in layouts
    }


def _always(order: str) -> dict[str, str]:
    """One order for every layout name. Before 0.29."""
    return {"NHD": order, "HND": order}


def _packed_since_26(order_29: Mapping[str, str], order_26: Mapping[str, str]) -> dict[int, Page]:
    """[B, H, N, 2 * D] with K and V side by side, as most backends have it."""
    return {26: Page("BHNC", order_26, _halves), 29: Page("BHNC", order_29, _halves)}


_ANY = _of(*LAYOUTS)
_NHD_HND = {"NHD": "BNHC", "HND": "BHNC"}
_TWO_TENSORS = Page("KBNHC", {"NHD": "KBNHC", "HND": "KBHNC"}, _two_tensors, "one")
_TWO_PLANES = Page("BKNHC", {"NHD": "BKNHC", "HND": "BKHNC"}, _two_planes, "one")
_DIFFKV = {
    26: Page("BHNC", _NHD_HND, _halves, v="own size"),
    29: Page("BHNC", _ANY, _halves, v="own size"),
}
_DIFFKV_OF_TOKENS = Page("BNHC", {"NHD": "BNHC", "HND": "BHNC"}, _halves_of_tokens, v="own size")
# The layer's tensor is 3-D, and before 0.29 every one: cache_tensor.py adds the axis of the head.
_LATENT = {
    20: Page("BHNC", _always("BHNC"), _latent, v="none"),
    29: Page("BHNC", _ANY, _latent, v="none"),
}

# ---- the table: backend -> first minor version -> page ----
#
# Source: the vllm wheels 0.20.2 to 0.33.0. Since 0.29 v1/attention/backends/<backend>.py,
# customize_spec, supported_kv_cache_layouts and do_kv_cache_update (forward, where there is none);
# before, get_kv_cache_shape and get_kv_cache_stride_order there.
PAGES: dict[str, dict[int, Page]] = {
    "FLASH_ATTN": {20: _TWO_TENSORS, 23: _TWO_PLANES, **_packed_since_26(_ANY, _NHD_HND)},
    "FLASHINFER": {20: _TWO_PLANES, **_packed_since_26(_ANY, _NHD_HND)},
    "TRITON_ATTN": {20: _TWO_PLANES, **_packed_since_26(_ANY, _NHD_HND)},
    "FLEX_ATTENTION": {
        20: Page("KBNHC", _always("KBNHC"), _two_tensors, "one"),
        23: Page("BKNHC", _always("BNKHC"), _two_planes, "one"),
        **_packed_since_26(_of("LBNHC"), _always("BNHC")),
    },
    "FLASH_ATTN_DIFFKV": {20: _DIFFKV_OF_TOKENS, **_DIFFKV},
    "TRITON_ATTN_DIFFKV": {24: _DIFFKV_OF_TOKENS, **_DIFFKV},
    # Both take turns on one cache: v1/attention/backends/composite.py.
    "TRITON_FLASH_ATTN": {30: Page("BHNC", _ANY, _halves)},
    "TRITON_FLASHINFER": {30: Page("BHNC", _ANY, _halves)},
    "CPU_ATTN": {
        20: Page("KBHNC", _always("KBHNC"), _cpu_tensors, "one"),
        23: Page("BHNC", _always("BHNC"), cpu_planes),
        29: Page("BHNC", _of("LBHNC"), cpu_planes),
    },
    "ROCM_ATTN": {
        20: Page("KBNHC", _always("KBNHC"), _packed_tensors, "one"),
        29: Page("BHNC", _of("LHBNC", "LBHNC"), _packed_slots, "all heads"),
    },
    "ROCM_SEGMENTED_ATTN": {32: Page("BHNC", _of("LHBNC", "LBHNC"), _two_slots, "all heads")},
    # Before 0.29 nothing tells whether its pages are shuffled.
    "ROCM_AITER_FA": {29: Page("BHNC", _of("LBHNC", "LHBNC"), _halves)},
    "ROCM_AITER_UNIFIED_ATTN": _packed_since_26(_of("LBHNC", "LHBNC"), _always("BHNC")),
    "B12X": {30: Page("BHNC", _of("LBHNC", "BLHNC"), _two_slots, "all heads")},
    "HPC_ATTN": {29: Page("BHNC", _of("LBNHC"), _halves)},
    # MLA. Source: vllm 0.32 v1/attention/backend.py, MLAAttentionImpl.do_kv_cache_update
    "TRITON_MLA": _LATENT,
    "FLASHMLA": _LATENT,
    "FLASHMLA_SPARSE": _LATENT,
    "FLASHINFER_MLA": _LATENT,
    "FLASHINFER_MLA_SPARSE": _LATENT,
    "FLASHINFER_MLA_SPARSE_SM120": {24: _LATENT[20], 29: _LATENT[29]},
    "FLASH_ATTN_MLA": _LATENT,
    "CUTLASS_MLA": _LATENT,
    "CPU_MLA": {28: _LATENT[20], 29: _LATENT[29]},
}

# Backends whose pages strides cannot describe, and why.
# Source: vllm 0.32 v1/attention/backends/mla/indexer.py; mla/flashmla_sparse.py, the note at its
# head; turboquant_attn.py and ultraquant_attn.py; models/deepseek_v4
_DATA_THEN_SCALES = "its pages hold the data of all tokens and then their scales"
_NOT_STRIDED = {
    "DEEPSEEK_V32_INDEXER": _DATA_THEN_SCALES,
    "DEEPSEEK_V4_INDEXER": _DATA_THEN_SCALES,
    "DEEPSEEK_V41_INDEXER": _DATA_THEN_SCALES,
    "DEEPSEEK_SPARSE_SWA": _DATA_THEN_SCALES,
    "FLASHMLA_SPARSE_DSV4": _DATA_THEN_SCALES,
    "FLASHINFER_MLA_SPARSE_DSV4": _DATA_THEN_SCALES,
    "ROCM_FLASHMLA_SPARSE_DSV4": _DATA_THEN_SCALES,
    "XPU_V4_MLA_SPARSE": _DATA_THEN_SCALES,
    "CPU_V4_MLA_SPARSE": _DATA_THEN_SCALES,
    "CPU_V4_INDEXER": _DATA_THEN_SCALES,
    "CompressorBackend": "its rows are tokens that no compressed entry stands for yet",
    "TURBOQUANT": "its vectors are rotated and coded, in an order that depends on the device",
    "ULTRAQUANT": "its vectors are rotated and coded, in an order that depends on the device",
}

# CPU_ATTN chooses by ISA what a page looks like; these two were read back from its own op.
_CPU_PLANES = ("vec", "vec16")


def page_of(spec: LayerSpec) -> Page:
    """The entry of the table for a layer. Raises UnsupportedError."""
    minor, backend = spec.minor, spec.backend
    if backend in _NOT_STRIDED:
        raise UnsupportedError(
            f"backend is {backend!r}: {_NOT_STRIDED[backend]}, not described here"
        )
    if backend not in PAGES:
        raise UnsupportedError(
            f"backend is {backend!r}, expected one of {', '.join(PAGES)}: where others put K and V "
            "inside a page is not described here"
        )
    known = [first for first in PAGES[backend] if first <= minor]
    if not known:
        raise UnsupportedError(
            f"vllm is {spec.version}, expected 0.{min(PAGES[backend])} or later for backend "
            f"{backend}, whose earlier pages are not described here"
        )
    if backend == "CPU_ATTN":
        _check_isa(spec)
    if spec.interleaved_v or (backend == "ROCM_AITER_FA" and spec.num_head_slots is not None):
        raise UnsupportedError(
            f"backend {backend} keeps V in groups of tokens of 16 bytes, which strides cannot say. "
            "Run vLLM without VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT and its fused QK-norm, RoPE and "
            "cache write"
        )
    return PAGES[backend][max(known)]


def order_of(spec: LayerSpec, page: Page) -> str:
    """The axes of the cache as they lie in memory. Raises InvalidArgumentError."""
    if spec.layout not in page.orders:
        raise InvalidArgumentError(
            f"layout is {spec.layout!r}, expected {' or '.join(page.orders)}: all that "
            f"{spec.backend} of vllm {spec.version} reads. Pass the resolved layout, "
            "KVCacheConfig.kv_cache_layout"
        )
    return page.orders[spec.layout]


def _check_isa(spec: LayerSpec) -> None:
    if spec.isa == "amx":
        raise UnsupportedError(
            "isa is 'amx', expected 'vec' or 'vec16': AMX pages are tiles of 16 x 2 elements, "
            "which a CacheDesc cannot say. Describe them as planes with amx_planes, or run vLLM "
            "with dtype float32 or float16, where it uses 'vec'"
        )
    if spec.isa not in _CPU_PLANES:
        raise UnsupportedError(
            f"isa is {spec.isa!r}, expected 'vec' or 'vec16': a page of CPU_ATTN looks different "
            "for every isa of the attention layer, and this one is not described here"
        )

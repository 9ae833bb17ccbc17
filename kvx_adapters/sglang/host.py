"""HiCache's host pools: the pages of all layers in one allocation, in one of five orders."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from kvx_adapters.sglang.pools import Scales, is_latent, page_desc, require_pool, scales_of
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Layout,
    UnsupportedError,
)

_KINDS = {
    "MHATokenToKVPoolHost": "MHATokenToKVPool",
    "AsymmetricMHATokenToKVPoolHost": "MHATokenToKVPool",
    "MLATokenToKVPoolHost": "MLATokenToKVPool",
}
_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
NHD, HND = Layout.BLOCK_NHD, Layout.BLOCK_HND


def host_views(
    host_pool: Any,
    pool: Any,
    facts: CacheFacts,
    *,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[CacheView, ...]:
    """All layers of a host pool, zero-copy: one view, or one for each group of heads.

    host_pool: MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost or MLATokenToKVPoolHost
    pool:      the device pool that it backs up, see `cache_view`: it knows the dtype of the bytes
    facts, k_scales, v_scales: as in `cache_view`
    A page_unified pool of several groups, each of several heads, has its heads too far apart for
    one view. Each group has a view then: move it with head_start at the other end, and num_heads.
    Slots are those of host_pool.alloc, from 0 on: no page is padding. Draft layers are left out.
    Raises UnsupportedError, InvalidArgumentError.
    Source: sglang 0.5.23 mem_cache/pool_host/mha.py, mla.py, init_kv_buffer; page_unified.py,
    PageUnifiedLayout.page_dims
    """
    require_pool(pool)
    _require(host_pool, pool)
    buffers = _buffers(host_pool)
    halves = buffers if is_latent(pool) or len(buffers) == 2 else list(buffers[0].unbind(0))
    unified = host_pool.layout == "page_unified" and not is_latent(pool)
    count = _split(host_pool) if unified else 1
    views = []
    for group in range(count):
        layers = []
        for i in range(pool.layer_num):
            if unified:
                found = [_unified(buffers[0][:, :, i, c], count, group) for c in (0, 1)]
            else:
                found = [_layer(half, i, host_pool.layout) for half in halves]
            parts = [
                page_desc(tensor, pool, layout, f"host_pool.{name}[{i}]")
                for name, (tensor, layout) in zip(("k", "v"), found, strict=False)
            ]
            layers.append(CacheDesc.from_kv(parts[0], parts[1] if len(parts) > 1 else None))
        views.append(
            CacheView(
                tuple(layers),
                _facts(facts, layers[0].num_kv_heads, group, count),
                k_scales=scales_of(pool, "k_scales", k_scales),
                v_scales=None if is_latent(pool) else scales_of(pool, "v_scales", v_scales),
                outdated=partial(_outdated, host_pool, [half.data_ptr() for half in buffers]),
            )
        )
    return tuple(views)


def _require(host_pool: Any, pool: Any) -> None:
    kind = type(host_pool).__name__
    if kind not in _KINDS:
        raise UnsupportedError(f"host_pool is a {kind}, expected one of {', '.join(_KINDS)}")
    if _KINDS[kind] != type(pool).__name__:
        raise InvalidArgumentError(
            f"pool is a {type(pool).__name__}, expected the {_KINDS[kind]} that the {kind} backs up"
        )
    if host_pool.layout not in _LAYOUTS:
        raise UnsupportedError(
            f"host_pool.layout is {host_pool.layout!r}, expected one of {', '.join(_LAYOUTS)}. "
            "Choose another --hicache-mem-layout"
        )
    if getattr(host_pool, "dcp_size", 1) != 1:
        raise UnsupportedError(
            f"host_pool.dcp_size is {host_pool.dcp_size}, expected 1: with more each rank holds "
            "some tokens of a page. Start SGLang with --dcp-size 1"
        )
    names = ["page_size", *([] if is_latent(pool) else ["head_num", "head_dim", "v_head_dim"])]
    names += ["kv_cache_dim"] if is_latent(pool) else []
    pairs = [(name, getattr(host_pool, name), getattr(pool, name)) for name in names]
    pairs.append(("dtype", host_pool.dtype, pool.store_dtype))
    pairs.append(("target_layer_num", host_pool.target_layer_num, pool.layer_num))
    for name, found, expected in pairs:
        if found != expected:
            raise InvalidArgumentError(
                f"host_pool.{name} is {found}, expected {expected} as in `pool`. Give the device "
                "pool that it backs up"
            )


def _buffers(host_pool: Any) -> list[Tensor]:
    """Its one allocation, or K and V apart."""
    held = host_pool.kv_buffer
    if held is None:
        raise InvalidArgumentError(
            "host_pool.kv_buffer is None, expected a tensor: the pool has been destroyed, or "
            "another rank holds its pages"
        )
    return [held] if isinstance(held, Tensor) else list(held)


def _layer(half: Tensor, i: int, layout: str) -> tuple[Tensor, Layout]:
    """Layer `i` of K, of V or of latents."""
    match layout:
        case "layer_first":
            return half[i], NHD
        case "page_head":
            return half[:, :, :, i], HND
        case "page_unified":  # latents, without an axis of heads
            return half[:, i].unsqueeze(2), NHD
        case _:
            return half[:, i], NHD


def _split(host_pool: Any) -> int:
    """Views that a page_unified pool needs."""
    groups, of_group = host_pool.kv_buffer.shape[1], host_pool.kv_buffer.shape[5]
    return groups if of_group > 1 else 1


def _unified(half: Tensor, count: int, group: int) -> tuple[Tensor, Layout]:
    """Pages (pages, groups, page_size, heads_per_group, dim) of a layer's K or V."""
    if count == 1 and half.shape[1] > 1:
        return half[:, :, :, 0], HND  # a head is a group
    return half[:, group], NHD


def _facts(facts: CacheFacts, heads: int, group: int, count: int) -> CacheFacts:
    if count == 1 or facts.first_kv_head is None:
        return facts
    return replace(facts, first_kv_head=facts.first_kv_head + group * heads)


def _outdated(host_pool: Any, described: list[int]) -> str | None:
    """Why the pool's memory is no longer the described one; None if it is."""
    held = host_pool.kv_buffer
    if held is None:
        return "host_pool has been destroyed. Describe the pool that the engine uses now"
    now = [half.data_ptr() for half in ([held] if isinstance(held, Tensor) else held)]
    if now != described:
        return "host_pool has its buffer elsewhere. Call host_views again"
    return None

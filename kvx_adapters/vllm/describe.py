"""Layers of a vLLM cache as descriptors and views, zero-copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvx_adapters.vllm.cache_tensor import checked
from kvx_adapters.vllm.encodings import VALUES, Encoding, encoding_of
from kvx_adapters.vllm.pages import page_of
from kvx_adapters.vllm.spec import LayerSpec
from kvx_adapters.vllm.tables import NULL_BLOCK_ID
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    ScaleGranularity,
    TensorDesc,
    describe,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its descriptor, and scales that lie in the cache."""

    desc: CacheDesc
    encoding: Encoding
    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None


def cache_desc(kv_cache: Tensor, spec: LayerSpec) -> CacheDesc:
    """One layer of a vLLM cache, zero-copy.

    kv_cache: as vLLM binds it to the layer, or gives it to a connector: (num_blocks, num_kv_heads,
              block_size, 2 * head_size) for most backends since 0.26, strides as spec.layout says;
              or, where vLLM splits its blocks for the kernel, (num_blocks * n, num_kv_heads,
              block_size / n, 2 * head_size), described with those smaller blocks
    spec.kv_cache_dtype says what the bytes are: FP8 is stored as uint8, for example. Vectors in a
    format that KVX does not have, such as INT4 with a scale behind them, are described as U8: see
    LayerGroup.encoding.
    Raises UnsupportedError for an unknown cache, InvalidArgumentError if `kv_cache` is not what
    `spec` says.
    Source: the table PAGES; vllm 0.32 v1/kv_cache_interface.py, compute_layout_strides
    """
    return layer_of(kv_cache, spec).desc


def inline_scales(kv_cache: Tensor, spec: LayerSpec) -> tuple[ScaleDesc, ScaleDesc] | None:
    """The scales that lie in the cache itself, of K and V; None if there are none.

    kv_cache: as in `cache_desc`; with kv_cache_dtype "fp8_per_token_head" or "int8_per_token_head"
              each vector ends in its float32 scale
    Raises UnsupportedError, InvalidArgumentError.
    """
    layer = layer_of(kv_cache, spec)
    if layer.k_scale is None or layer.v_scale is None:
        return None
    return layer.k_scale, layer.v_scale


def cache_view(
    kv_caches: Sequence[Tensor],
    specs: LayerSpec | Sequence[LayerSpec],
    facts: CacheFacts,
    *,
    k_scales: Sequence[Tensor | float] | None = None,
    v_scales: Sequence[Tensor | float] | None = None,
) -> CacheView:
    """All layers that share one block table, in the order of the model's layers.

    kv_caches:          per layer, as in `cache_desc`
    specs:              one for all layers, or one per layer
    k_scales, v_scales: per layer, needed for FP8 unless the scales lie in the cache:
                        layer._k_scale, one float32 or one per KV head. v_scales are ignored for
                        layers without V (MLA)
    Raises UnsupportedError, InvalidArgumentError.
    """
    if isinstance(specs, LayerSpec):
        specs = [specs] * len(kv_caches)
    if len(specs) != len(kv_caches):
        raise InvalidArgumentError(f"specs has {len(specs)} layers, kv_caches {len(kv_caches)}")
    layers = [layer_of(cache, spec) for cache, spec in zip(kv_caches, specs, strict=True)]
    return CacheView(
        layers=tuple(layer.desc for layer in layers),
        facts=facts,
        k_scales=_scales("k", layers, k_scales),
        v_scales=_scales("v", layers, v_scales),
        null_block_id=NULL_BLOCK_ID,
    )


def layer_of(kv_cache: Tensor, spec: LayerSpec) -> Layer:
    """One layer and the scales in its cache. Raises as `cache_desc`."""
    page, encoding = page_of(spec), encoding_of(spec)
    kv_cache = checked(kv_cache, spec, page, encoding)
    if encoding.dtype is DType.U8:
        kv_cache = kv_cache.view(torch.uint8)
    k, v = page.split(kv_cache, spec.num_kv_heads, encoding)
    return Layer(
        desc=CacheDesc.from_kv(
            _values(k, encoding, encoding.k_elements),
            None if v is None else _values(v, encoding, encoding.v_elements),
        ),
        encoding=encoding,
        k_scale=_inline(k, encoding),
        v_scale=None if v is None else _inline(v, encoding),
    )


def scale_desc(scale: Tensor | float) -> ScaleDesc:
    """vLLM's scale of a layer: one float32, or one per KV head."""
    if isinstance(scale, Tensor) and scale.numel() > 1:
        return ScaleDesc.of(scale, ScaleGranularity.PER_HEAD)
    return ScaleDesc.of(scale)


def _values(tensor: Tensor, encoding: Encoding, num_elements: int) -> TensorDesc:
    """The values alone: (block, head, token, elements), or 5 axes if packed."""
    if tensor.ndim == 5:
        return describe(tensor, Layout.BLOCK_HND_PACKED, dtype=encoding.dtype)
    return describe(
        tensor[..., : encoding.values(num_elements)], Layout.BLOCK_HND, dtype=encoding.dtype
    )


def _inline(tensor: Tensor, encoding: Encoding) -> ScaleDesc | None:
    """The float32 at the end of each vector, as (block, token, head)."""
    if not encoding.inline_scales:
        return None
    scales = tensor[..., encoding.values(tensor.shape[-1]) :].view(torch.float32)
    return ScaleDesc.of(scales[..., 0].transpose(1, 2), ScaleGranularity.PER_TOKEN_HEAD)


def _scales(
    name: Literal["k", "v"], layers: Sequence[Layer], given: Sequence[Tensor | float] | None
) -> tuple[ScaleDesc | None, ...] | None:
    """One scale per layer: the one in the cache, else the given one, else None."""
    inline = [layer.k_scale if name == "k" else layer.v_scale for layer in layers]
    missing = [
        found is None
        and layer.encoding.name == VALUES
        and name in layer.desc.tensors
        and layer.desc.tensors[name].dtype.itemsize == 1
        for layer, found in zip(layers, inline, strict=True)
    ]
    if given is None and any(missing):
        raise InvalidArgumentError(
            f"{name}_scales is None, expected one scale per layer of an FP8 cache. They are "
            f"layer._{name}_scale, or 1.0"
        )
    if given is None:
        return tuple(inline) if any(inline) else None
    if len(given) != len(layers):
        raise InvalidArgumentError(
            f"{name}_scales has {len(given)} entries, expected {len(layers)}, one per layer"
        )
    return tuple(
        scale_desc(scale) if needed else found
        for needed, found, scale in zip(missing, inline, given, strict=True)
    )

"""Device pools: MHATokenToKVPool and MLATokenToKVPool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvx_adapters.sglang.tables import PADDED_PAGE
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    TensorDesc,
    UnsupportedError,
    describe,
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8)
# Subclasses keep other bytes: FP4, MXFP8, the packed rows of DSA, NPU pools.
_KINDS = ("MHATokenToKVPool", "MLATokenToKVPool")
_LAYOUTS = ("nhd", "hnd")

Scales = Sequence[Tensor | float | None]


def cache_desc(pool: Any, layer: int) -> CacheDesc:
    """One layer of a device pool, zero-copy.

    pool:  MHATokenToKVPool of layout nhd or hnd, or MLATokenToKVPool; of others see `layer_groups`
    layer: index in the pool: the model's layer_id - pool.start_layer
    K of MLA is the latent and its rotary part; there is no V.
    Raises UnsupportedError for other pools, InvalidArgumentError.
    Source: sglang 0.5.23 mem_cache/memory_pool.py, MHATokenToKVPool._create_buffers_normal,
    MLATokenToKVPool._create_buffers
    """
    require_pool(pool)
    names = _buffers(pool)
    if not 0 <= layer < pool.layer_num:
        raise InvalidArgumentError(
            f"layer is {layer}, expected 0 to {pool.layer_num - 1}: layer_id - pool.start_layer, "
            f"which is {pool.start_layer}"
        )
    halves = [_described(pool, f"pool.{name}[{layer}]", held[layer]) for name, held in names]
    return CacheDesc.from_kv(halves[0], halves[1] if len(halves) > 1 else None)


def cache_view(
    pool: Any,
    facts: CacheFacts,
    *,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> CacheView:
    """All layers of a device pool, zero-copy, in the order of the model's layers.

    pool:     as in `cache_desc`
    facts:    see `cache_facts`
    k_scales, v_scales: needed for an FP8 MHATokenToKVPool, else None. Per layer its attention's
              k_scale and v_scale: None, a number or a tensor of one float32. SGLang stores
              value / scale. MLATokenToKVPool stores FP8 without a scale
    The view is refused once the pool has freed or replaced its buffers, and while HiCache loads
    pages into it: KVX does not wait.
    Raises UnsupportedError, InvalidArgumentError.
    Source: sglang 0.5.23 mem_cache/memory_pool.py, MHATokenToKVPool.set_kv_buffer
    """
    require_pool(pool)
    layers = tuple(cache_desc(pool, i) for i in range(pool.layer_num))
    return CacheView(
        layers,
        facts,
        k_scales=scales_of(pool, "k_scales", k_scales),
        v_scales=None if is_latent(pool) else scales_of(pool, "v_scales", v_scales),
        null_block_id=PADDED_PAGE,
        outdated=partial(_outdated, pool, _addresses(pool)),
    )


def cache_facts(
    pool: Any,
    *,
    version: str | None = None,
    fingerprint: str | None = None,
    rotary: Literal["half", "interleaved", "none"] | None = None,
    rotary_dim: int | None = None,
    window: int | None = None,
    total_kv_heads: int | None = None,
    first_kv_head: int | None = None,
) -> CacheFacts:
    """The facts of one rank's pool. The caller gives those that depend on the model.

    version:       sglang.__version__
    fingerprint:   of the model as it is computed, see kvx_core.ModelRecord
    rotary:        "half" for RotaryEmbedding with is_neox_style, else "interleaved"
    window:        sliding window of all layers, 0 for full attention; see `layer_groups`
    first_kv_head: of this rank
    Raises InvalidArgumentError.
    """
    dtype = getattr(pool, "dtype", None)
    return CacheFacts(
        engine=f"sglang {version}" if version else "sglang",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=rotary_dim,
        rope_applied=None if rotary is None else True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=pool.layer_num,
        first_layer=pool.start_layer,
        window=window,
        total_kv_heads=total_kv_heads,
        first_kv_head=first_kv_head,
        compute_dtype=None if dtype in FP8 else DType.of(dtype),
        negative_slots="undefined",  # CUDA's store_cache and the CPU's index_put differ
    )


def is_latent(pool: Any) -> bool:
    """Whether the pool holds MLA's latents."""
    return type(pool).__name__ == "MLATokenToKVPool"


def require_pool(pool: Any) -> None:
    """Raises unless the pool's bytes are those that this adapter describes."""
    kind = type(pool).__name__
    if kind not in _KINDS:
        raise UnsupportedError(
            f"pool is a {kind}, expected {' or '.join(_KINDS)}: others keep packed, scaled or "
            "compressed rows. Of SWAKVPool and HybridLinearKVPool use layer_groups"
        )
    if pool.dtype not in _DTYPES:
        raise UnsupportedError(
            f"pool.dtype is {pool.dtype}, expected one of {', '.join(map(str, _DTYPES))}. Choose "
            "another --kv-cache-dtype"
        )
    if getattr(pool, "kv_cache_layout", "nhd") not in _LAYOUTS:
        raise UnsupportedError(
            f"pool.kv_cache_layout is {pool.kv_cache_layout!r}, expected one of {_LAYOUTS}: in "
            "vectorized_5d the tokens of V are split, too. Set SGLANG_AITER_KV_CACHE_LAYOUT=nhd"
        )
    if getattr(pool, "is_quantized_kv_cache", False) or getattr(
        pool, "dsa_kv_cache_store_fp8", False
    ):
        raise UnsupportedError(
            "pool stores quantized rows with scales beside them, expected plain elements. Choose "
            "--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2, and no DSA with FP8"
        )
    if getattr(pool, "post_capture_active", False):
        raise UnsupportedError(
            "pool.post_capture_active is True, expected False: only a part of its addresses has "
            "memory. Start SGLang with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0"
        )


def scales_of(pool: Any, name: str, given: Scales | None) -> tuple[ScaleDesc | None, ...] | None:
    """The scales of each layer of a pool; None of one that is not FP8."""
    latent, wanted = is_latent(pool), pool.dtype in FP8
    if given is not None and (latent or not wanted):
        raise InvalidArgumentError(
            f"{name} has {len(given)} entries, expected None for a {type(pool).__name__} of "
            f"{pool.dtype}: SGLang stores it without scales"
        )
    if not wanted:
        return None
    if latent:
        given = [None] * pool.layer_num
    if given is None or len(given) != pool.layer_num:
        raise InvalidArgumentError(
            f"{name} has {'no' if given is None else len(given)} entries, expected "
            f"{pool.layer_num}, one per layer of a {pool.dtype} pool: its RadixAttention's "
            f"{name.removesuffix('s')}, which may be None"
        )
    for i, scale in enumerate(given):
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise InvalidArgumentError(
                f"{name}[{i}] has shape {tuple(scale.shape)}, expected one element: SGLang's pool "
                "has one scale per layer"
            )
    device = _buffers(pool)[0][1][0].device
    return tuple(
        ScaleDesc.of(
            scale.detach().reshape(1)
            if isinstance(scale, Tensor)
            else torch.tensor([1.0 if scale is None else scale], device=device),
            name=f"{name}[{i}]",
        )
        for i, scale in enumerate(given)
    )


def _buffers(pool: Any) -> list[tuple[str, Sequence[Tensor]]]:
    """K and V of a pool, or its latents, each a tensor per layer."""
    names = ("kv_buffer",) if is_latent(pool) else ("k_buffer", "v_buffer")
    found = [(name, getattr(pool, name, None)) for name in names]
    for name, held in found:
        if held is None:
            raise InvalidArgumentError(
                f"pool.{name} is gone, expected a tensor per layer: the pool has freed its "
                "buffers. Describe the pool that the engine uses now"
            )
    return [(name, held) for name, held in found if held is not None]


def _described(pool: Any, name: str, tensor: Tensor) -> TensorDesc:
    """A buffer as pages of tokens."""
    page = pool.page_size
    rows = pool.size + page
    hnd = getattr(pool, "kv_cache_layout", "nhd") == "hnd"
    if is_latent(pool):
        heads, dim = 1, pool.kv_cache_dim
    else:
        heads = pool.head_num
        dim = pool.head_dim if name.startswith("pool.k") else pool.v_head_dim
    if rows % page:
        raise InvalidArgumentError(
            f"pool has {rows} slots, expected whole pages of page_size {page}: its last page is "
            f"cut off. Make size a multiple of {page}, as SGLang's server does"
        )
    shape = (rows // page, heads, page, dim) if hnd else (rows, heads, dim)
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"{name}.device is {tensor.device}, expected cpu or cuda: KVX reaches no other memory. "
            "Pass a pool on the host"
        )
    if tensor.dtype != pool.store_dtype:
        raise InvalidArgumentError(
            f"{name}.dtype is {tensor.dtype}, expected {pool.store_dtype}, the pool's store_dtype"
        )
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{name} has shape {tuple(tensor.shape)} and stride {tensor.stride()}, expected "
            f"{shape}, contiguous: {'pages of heads' if hnd else 'a row per slot'}"
        )
    return page_desc(tensor, pool, Layout.BLOCK_HND if hnd else Layout.BLOCK_NHD, name)


def page_desc(tensor: Tensor, pool: Any, layout: Layout, name: str) -> TensorDesc:
    """(slots, heads, dim) as NHD pages, or pages as they are; FP8 lies in uint8.

    pool: whose page_size and dtype they have
    """
    pages = tensor
    if tensor.ndim == 3:
        # as_strided: with pages of one token, view would give the token the stride of the page.
        step, page = tensor.stride(0), pool.page_size
        pages = tensor.as_strided(
            (tensor.shape[0] // page, page, *tensor.shape[1:]),
            (step * page, step, *tensor.stride()[1:]),
        )
    return describe(pages, layout, dtype=DType.of(pool.dtype), name=name)


def _addresses(pool: Any) -> list[int]:
    return [tensor.data_ptr() for _, held in _buffers(pool) for tensor in held]


def loading(pool: Any) -> str | None:
    """Why pages of a pool may not be there yet: HiCache loads into it. None if it does not.

    Only SGLang's own get_key_buffer waits for a load, layer by layer. The counter is that of the
    outermost pool: SWAKVPool and HybridLinearKVPool take it from those inside.
    Source: sglang 0.5.23 managers/cache_controller.py, LayerDoneCounter, start_loading;
    mem_cache/memory_pool.py, MHATokenToKVPool.get_key_buffer
    """
    counter = getattr(pool, "layer_transfer_counter", None)
    if counter is None or all(event.finish_event.query() for event in counter.events):
        return None
    return (
        "HiCache loads pages into the pool, expected none on their way: wait for its load_events, "
        "as the attention does, or call torch.cuda.synchronize()"
    )


def _outdated(pool: Any, described: list[int]) -> str | None:
    """Why the pool's buffers are not the described ones, or not yet whole; None if they are."""
    try:
        now = _addresses(pool)
    except InvalidArgumentError as error:
        return str(error)
    if now != described:
        return (
            "the pool has its buffers elsewhere, expected where they were described. Call "
            "cache_view again"
        )
    return loading(pool)

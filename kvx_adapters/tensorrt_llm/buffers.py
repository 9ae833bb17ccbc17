"""Pools seen layer by layer: get_buffers of both managers, and the slots of KVCacheManagerV2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from kvx_adapters.tensorrt_llm.describe import layer_desc, require_evenly_spaced, view_of
from kvx_adapters.tensorrt_llm.spec import PoolSpec
from kvx_core import CacheFacts, CacheView, InvalidArgumentError, Memory


def buffer_view(
    spec: PoolSpec,
    buffers: Sequence[Tensor],
    facts: CacheFacts,
    *,
    scaling_factors: Sequence[Tensor | float] | None = None,
) -> CacheView:
    """All layers of one pool, from get_buffers(layer_idx, kv_layout=spec.kv_layout).

    layer_idx there counts the layers of the model: manager.pp_layers of those in the pool.
    buffers: per layer of the pool, of KVCacheManager (num_blocks, kv_factor, *sub_block_shape),
             strided; of KVCacheManagerV2 (pages, kv_factor, *sub_block_shape), contiguous, which
             overlaps those of the other layers and counts pages, not slots
    In either case the blocks of the view are memory indices or slots, with the same tables as those
    of `cache_view`. get_buffers only reshapes by kv_layout: a wrong one is refused.
    scaling_factors: as in `cache_view`
    Raises InvalidArgumentError where a tensor is not what `spec` says, UnsupportedError.
    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/resource_manager.py,
    KVCacheManager.get_buffers; kv_cache/kv_cache_manager_v2.py, KVCacheManagerV2.get_buffers
    """
    require_evenly_spaced(spec)
    num_layers, step = len(spec.layers), spec.kv_factor * spec.sub_block_bytes
    if len(buffers) != num_layers:
        raise InvalidArgumentError(f"buffers has {len(buffers)} entries, expected {num_layers}")
    layers = []
    for place, buffer in enumerate(buffers):
        name = f"buffers[{place}]"
        _check_axes(name, buffer, spec)
        blocks = buffer
        if num_layers > 1 and buffer.stride(0) == spec.kv_factor * spec.sub_block_elements:
            # Pages from this layer's K to the end of the pool; every num_layers-th is its own.
            pages = spec.num_blocks * num_layers - place
            if buffer.shape[0] != pages:
                raise InvalidArgumentError(
                    f"{name}.shape[0] is {buffer.shape[0]}, expected {pages} pages of "
                    f"{spec.num_blocks} slots (KVCacheManagerV2): give the layers of one pool, in "
                    "its order"
                )
            blocks = buffer[::num_layers]
        expected = spec.sub_blocks_per_block * spec.sub_block_elements
        if blocks.shape[0] != spec.num_blocks or blocks.stride(0) != expected:
            raise InvalidArgumentError(
                f"{name} has {blocks.shape[0]} blocks, {blocks.stride(0)} elements apart, expected "
                f"{spec.num_blocks}, {expected} apart"
            )
        if buffer.data_ptr() - buffers[0].data_ptr() != place * step:
            raise InvalidArgumentError(
                f"{name} begins {buffer.data_ptr() - buffers[0].data_ptr()} bytes after buffers[0],"
                f" expected {place * step}: give the layers of one pool, in its order"
            )
        memory = Memory.HOST if buffer.device.type == "cpu" else Memory.DEVICE
        layers.append(layer_desc(spec, buffer.data_ptr(), memory, owner=buffer))
    return view_of(spec, layers, facts, scaling_factors, buffers[0].device)


def slot_view(
    spec: PoolSpec,
    keys: Sequence[int],
    values: Sequence[int] | None,
    facts: CacheFacts,
    *,
    page_stride: int,
    memory: Memory = Memory.DEVICE,
    scaling_factors: Sequence[Tensor | float] | None = None,
) -> CacheView:
    """All layers of one pool of KVCacheManagerV2, from addresses. The caller keeps them valid.

    spec:   num_blocks is the number of slots, index_scale that of get_page_index_scale
    keys:   per layer, get_mem_pool_base_address(layer, Role.KEY, PageIndexMode.SHARED)
    values: likewise of Role.VALUE; None if kv_factor is 1
    page_stride: get_page_stride(layer, Role.KEY), bytes
    scaling_factors: as in `cache_view`
    Use the tables of KVCacheManagerV2 (`block_table`) or its slots (`id_table`).
    Raises InvalidArgumentError where the addresses are not what `spec` says.
    Source: TensorRT-LLM main 2026-09, runtime/kv_cache_manager_v2/_core/_kv_cache_manager.py;
    kv_cache/kv_cache_manager_v2.py, KVCacheManagerV2._prepare_page_table_tensor
    """
    if page_stride != spec.sub_block_bytes:
        raise InvalidArgumentError(
            f"page_stride is {page_stride} bytes, expected {spec.sub_block_bytes}, num_kv_heads * "
            "tokens_per_block * head_dim elements"
        )
    if len(keys) != len(spec.layers):
        raise InvalidArgumentError(f"keys has {len(keys)} entries, expected {len(spec.layers)}")
    expected = [key + page_stride for key in keys] if spec.kv_factor == 2 else None
    if (None if values is None else list(values)) != expected:
        raise InvalidArgumentError(
            f"values is {_hex(values)}, expected {_hex(expected)}: V directly behind K"
        )
    slot_bytes, step = spec.sub_blocks_per_block * page_stride, spec.kv_factor * page_stride
    gaps = [behind - key for key, behind in pairwise(sorted(keys))]
    if any(gap % page_stride or gap < step for gap in gaps) or sum(gaps) + step > slot_bytes:
        raise InvalidArgumentError(
            f"keys are {gaps} bytes apart, expected multiples of {page_stride}, at least {step}, "
            f"within a slot of {slot_bytes}: give each layer of one pool"
        )
    layers = [layer_desc(spec, key, memory) for key in keys]
    return view_of(spec, layers, facts, scaling_factors, None)


def _check_axes(name: str, buffer: Tensor, spec: PoolSpec) -> None:
    """Checks the axes of one buffer, except the first."""
    expected = (spec.kv_factor, *spec.sub_block_shape)
    if buffer.dtype != spec.torch_dtype:
        raise InvalidArgumentError(f"{name} is of {buffer.dtype}, expected {spec.torch_dtype}")
    axes = tuple(buffer.shape[1:])
    if axes == expected and buffer[:1].is_contiguous():
        return
    kv_factor, outer, inner, head_dim = expected
    if axes == (kv_factor, inner, outer, head_dim) != expected:
        other = "NHD" if spec.kv_layout == "HND" else "HND"
        raise InvalidArgumentError(
            f"{name} has the axes of {other}, {axes}, expected those of {spec.kv_layout}, "
            f"{expected}: get_buffers(layer_idx, kv_layout) reshapes whatever the attention "
            f"backend has stored. Pass kv_layout={spec.kv_layout!r}"
        )
    raise InvalidArgumentError(
        f"{name} is {tuple(buffer.shape)} with strides {buffer.stride()}, expected (blocks, "
        f"{', '.join(map(str, expected))}), all but the first contiguous"
    )


def _hex(addresses: Sequence[int] | None) -> str:
    return "None" if addresses is None else "[" + ", ".join(map(hex, addresses)) + "]"

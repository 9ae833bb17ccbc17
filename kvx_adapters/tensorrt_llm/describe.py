"""Pools of TensorRT-LLM as descriptors and views, zero-copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvx_adapters.tensorrt_llm.spec import SCALED, PoolSpec
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    Memory,
    PoolDesc,
    ScaleDesc,
    TensorDesc,
    UnsupportedError,
)

# The memory of a pool: TensorRT-LLM's tensor, or its address and the kind of memory.
Pool = Tensor | tuple[int, Memory]


def cache_desc(
    spec: PoolSpec, layer_in_pool: int, primary: Pool, secondary: Pool | None = None
) -> CacheDesc:
    """One layer of a pool, zero-copy.

    layer_in_pool: layer_to_pool_mapping[layer, 1]
    primary:   the whole pool: a tensor of spec.pool_shape, such as get_unique_primary_pool() and
               what a KV cache connector is given; or kv_cache_pool_pointers[pool, 0], Memory.DEVICE
    secondary: likewise, with num_secondary_blocks; None or an address of 0: there is none
    Raises InvalidArgumentError where a tensor is not what `spec` says, UnsupportedError.
    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/thop/attentionOp.cpp, intra_pool_offset and
    buildKvCachePoolPointers
    """
    if not 0 <= layer_in_pool < len(spec.layers):
        raise InvalidArgumentError(
            f"layer_in_pool is {layer_in_pool}, expected one of the {len(spec.layers)} layers of "
            "the pool"
        )
    require_evenly_spaced(spec)
    base, memory = _placed("primary", primary, spec, spec.num_blocks)
    second = _secondary(secondary, spec, memory)
    # Checked before the offset is added: NULL plus the offset of a layer is not NULL.
    if base == 0:
        raise InvalidArgumentError("primary is NULL, expected the address of a pool")
    offset = layer_in_pool * spec.kv_factor * spec.sub_block_bytes
    return layer_desc(
        spec,
        base + offset,
        memory,
        owner=_tensor(primary),
        secondary=second + offset if second else 0,
        secondary_owner=_tensor(secondary),
    )


def cache_view(
    spec: PoolSpec,
    primary: Pool,
    facts: CacheFacts,
    *,
    secondary: Pool | None = None,
    scaling_factors: Sequence[Tensor | float] | None = None,
) -> CacheView:
    """All layers of one pool, in its order. They share one table.

    primary, secondary: as in `cache_desc`
    facts:           of this pool, see `cache_facts`
    scaling_factors: per layer of an FP8 or INT8 pool: kv_scale_quant_orig, float32, in the memory
                     of the pool. The kernels use its first element for K and V. The PyTorch
                     backend leaves it at 1, whatever the checkpoint says. A float will do, except
                     for a pool given as an address on a device
    Raises InvalidArgumentError, UnsupportedError.
    """
    layers = [cache_desc(spec, place, primary, secondary) for place in range(len(spec.layers))]
    owner = _tensor(primary)
    device = None if owner is None else owner.device
    return view_of(spec, layers, facts, scaling_factors, device)


def cache_views(
    kv_cache_pool_pointers: Tensor,
    specs: Sequence[PoolSpec],
    facts: Sequence[CacheFacts],
    *,
    memory: Memory = Memory.DEVICE,
    scaling_factors: Sequence[Tensor | float] | None = None,
) -> tuple[CacheView, ...]:
    """Every pool of a manager, from their addresses. The caller keeps the memory valid.

    kv_cache_pool_pointers: (num_pools, 2), int64, on the CPU: primary, and secondary or 0
    specs, facts:    one per pool, see `pool_specs` and `cache_facts`
    memory:          where the primary pools are; secondary ones are pinned host memory
    scaling_factors: per local layer, if the pools are FP8 or INT8; as in `cache_view`
    An address has no torch stream: calls on a device run on the default stream, or on `stream`.
    Raises InvalidArgumentError, UnsupportedError.
    """
    pointers = kv_cache_pool_pointers
    if pointers.dtype != torch.int64 or tuple(pointers.shape) != (len(specs), 2):
        raise InvalidArgumentError(
            f"kv_cache_pool_pointers is {tuple(pointers.shape)} of {pointers.dtype}, expected "
            f"({len(specs)}, 2) of torch.int64, primary and secondary of each of specs"
        )
    if len(facts) != len(specs):
        raise InvalidArgumentError(f"facts has {len(facts)} entries, expected {len(specs)}")
    num_layers = sum(len(spec.layers) for spec in specs)
    if scaling_factors is not None and len(scaling_factors) != num_layers:
        raise InvalidArgumentError(
            f"scaling_factors has {len(scaling_factors)} entries, expected {num_layers}, one per "
            "local layer"
        )
    return tuple(
        cache_view(
            spec,
            (primary, memory),
            pool_facts,
            secondary=(secondary, Memory.HOST),
            scaling_factors=(
                None if scaling_factors is None else [scaling_factors[i] for i in spec.layers]
            ),
        )
        for (primary, secondary), spec, pool_facts in zip(
            pointers.tolist(), specs, facts, strict=True
        )
    )


def require_evenly_spaced(spec: PoolSpec) -> None:
    """Refuses slots of KVCacheManagerV2 that hold other buffers than K and V of these layers."""
    expected = len(spec.layers) * spec.kv_factor
    if spec.sub_blocks_per_block != expected:
        raise UnsupportedError(
            f"index_scale is {spec.index_scale}, expected {expected}, kv_factor for each layer: "
            "other buffers lie between these. Use slot_view"
        )


def layer_desc(
    spec: PoolSpec,
    address: int,
    memory: Memory,
    *,
    owner: Tensor | None = None,
    secondary: int = 0,
    secondary_owner: Tensor | None = None,
) -> CacheDesc:
    """The layer whose K of block 0 is at `address`, and at `secondary` in the secondary pool.

    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray
    getBlockPtr and getKVLocalIdx
    """
    _, inner, head_dim = spec.sub_block_shape
    k = TensorDesc(
        dtype=DType.of(spec.torch_dtype),
        layout=Layout.BLOCK_HND if spec.kv_layout == "HND" else Layout.BLOCK_NHD,
        memory=memory,
        shape=(spec.num_blocks, *spec.sub_block_shape),
        stride=(
            spec.sub_blocks_per_block * spec.sub_block_elements,
            inner * head_dim,
            head_dim,
            1,
        ),
        data=address,
        owner=owner,
    )
    return CacheDesc.from_kv(
        k,
        replace(k, data=address + spec.sub_block_bytes) if spec.kv_factor == 2 else None,
        pool=PoolDesc(
            memory=memory,
            bytes_per_block=spec.sub_block_bytes,
            primary=address,
            secondary=secondary,
            owner=secondary_owner,
        ),
    )


def view_of(
    spec: PoolSpec,
    layers: Sequence[CacheDesc],
    facts: CacheFacts,
    scaling_factors: Sequence[Tensor | float] | None,
    device: torch.device | None,
) -> CacheView:
    """The layers of one pool, in its order, with their scales."""
    scales = _scales(spec, scaling_factors, device)
    has_secondary = any(layer.pool is not None and layer.pool.secondary for layer in layers)
    return CacheView(
        layers=tuple(layers),
        facts=facts,
        k_scales=scales,
        v_scales=scales if spec.kv_factor == 2 else None,
        secondary_num_blocks=spec.num_secondary_blocks if has_secondary else 0,
    )


def _tensor(pool: Pool | None) -> Tensor | None:
    return pool if isinstance(pool, Tensor) else None


def _placed(name: str, pool: Pool, spec: PoolSpec, num_blocks: int) -> tuple[int, Memory]:
    """The address of a pool. A tensor is checked against `spec`."""
    if not isinstance(pool, Tensor):
        return pool
    expected = (num_blocks, *spec.pool_shape[1:])
    if pool.dtype != spec.torch_dtype or tuple(pool.shape) != expected:
        raise InvalidArgumentError(
            f"{name} is {tuple(pool.shape)} of {pool.dtype}, expected {expected} of "
            f"{spec.torch_dtype}: blocks, layers, kv_factor, and the elements of num_kv_heads "
            f"{spec.num_kv_heads} * tokens_per_block {spec.tokens_per_block} * head_dim "
            f"{spec.head_dim}"
        )
    if not pool.is_contiguous():
        raise InvalidArgumentError(
            f"{name}.stride() is {pool.stride()}, expected contiguous, as TensorRT-LLM allocates "
            "pools. Pass the whole pool"
        )
    return pool.data_ptr(), Memory.HOST if pool.device.type == "cpu" else Memory.DEVICE


def _secondary(secondary: Pool | None, spec: PoolSpec, memory: Memory) -> int:
    """The address of the secondary pool; 0 if there is none."""
    if secondary is None:
        return 0
    address, where = _placed("secondary", secondary, spec, spec.num_secondary_blocks)
    if address and not spec.num_secondary_blocks:
        raise InvalidArgumentError(
            "num_secondary_blocks is 0, expected the blocks of the secondary pool that is given"
        )
    if address and where is Memory.DEVICE and memory is Memory.HOST:
        raise UnsupportedError(
            "secondary is in DEVICE memory, expected HOST, where the primary pool is and calls run"
        )
    pageable = isinstance(secondary, Tensor) and where is Memory.HOST and not secondary.is_pinned()
    if pageable and memory is not Memory.HOST:
        raise UnsupportedError(
            "secondary is pageable memory, expected pinned, as TensorRT-LLM allocates it: calls "
            "run where the primary pool is"
        )
    return address


def _scales(
    spec: PoolSpec, factors: Sequence[Tensor | float] | None, device: torch.device | None
) -> tuple[ScaleDesc, ...] | None:
    """The scales of each layer, for K and V: value = stored * factor.

    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/kernels/unfusedAttentionKernels/
    unfusedAttentionKernels_2_template.h, kvScaleOrigQuant[0];
    _torch/attention_backend/trtllm.py, TrtllmAttention.__init__, kv_cache_scaling_factor
    """
    if spec.dtype not in SCALED:
        if factors is not None:
            raise InvalidArgumentError(
                f"scaling_factors is given, expected None for a pool of {spec.dtype}"
            )
        return None
    if factors is None or len(factors) != len(spec.layers):
        found = "None" if factors is None else f"{len(factors)} long"
        raise InvalidArgumentError(
            f"scaling_factors is {found}, expected one for each of {len(spec.layers)} layers of "
            f"{spec.dtype}: 1.0 with the PyTorch backend, whatever the checkpoint says; its "
            "kv_cache_scaling_factor in a TensorRT engine"
        )
    return tuple(
        ScaleDesc.of(
            factor.flatten()[0]
            if isinstance(factor, Tensor)
            else torch.tensor(factor, dtype=torch.float32, device=device)
        )
        for factor in factors
    )

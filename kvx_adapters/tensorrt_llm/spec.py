"""PoolSpec: a pool of a KV cache, under TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, UnsupportedError

# Names of tensorrt_llm's DataType.
_TORCH_DTYPES = {
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "FLOAT": torch.float32,
    "FP8": torch.float8_e4m3fn,
    "INT8": torch.int8,
}
SCALED = ("FP8", "INT8")  # whose numbers are multiplied by a factor of the layer
# Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
# WindowBlockManager::allocatePools, and its constructor for the pools of block scales
_REFUSED = {
    "NVFP4": "two 4-bit numbers per byte, and keeps their scales in another pool, in an order that "
    "is not documented",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One pool: layers with the same window, number of KV heads and head size share its blocks.

    Raises UnsupportedError, InvalidArgumentError.
    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
    WindowBlockManager::allocatePools
    """

    layers: tuple[int, ...]  # local to this pipeline rank, in the order of the pool
    num_blocks: int  # of the primary pool; KVCacheManagerV2: slots
    tokens_per_block: int
    num_kv_heads: int  # on this rank
    head_dim: int  # sizePerHead; MLA: kv_lora_rank + qk_rope_head_dim
    dtype: str  # DataType of the pool: "HALF", "BF16", "FLOAT", "FP8" or "INT8"
    kv_factor: int = 2  # 1: SELFKONLY (MLA), whose blocks hold no V
    num_secondary_blocks: int = 0  # in pinned host memory
    window: int = 0  # attention window in tokens; 0: full attention
    # What the attention backend stores in a block: "HND" for TRTLLM, and for FLASHINFER since 1.2;
    # "NHD" for FLASHINFER before, and for Triton kernels. The pools do not record it.
    # Source: _torch/attention_backend/flashinfer.py, FlashInferAttentionMetadata.kv_layout
    kv_layout: str = "HND"
    # KVCacheManagerV2 only: get_page_index_scale, where slots hold other buffers of the same size.
    index_scale: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _TORCH_DTYPES:
            reason = _REFUSED.get(self.dtype)
            raise UnsupportedError(
                f"dtype is {self.dtype!r}, expected one of {', '.join(_TORCH_DTYPES)}"
                + (f": a pool of {self.dtype} holds {reason}" if reason else "")
            )
        if self.kv_factor not in (1, 2):
            raise InvalidArgumentError(
                f"kv_factor is {self.kv_factor}, expected 2, K and V, or 1, K alone (SELFKONLY)"
            )
        if self.kv_layout not in ("HND", "NHD"):
            raise InvalidArgumentError(f"kv_layout is {self.kv_layout!r}, expected 'HND' or 'NHD'")
        if not self.layers:
            raise InvalidArgumentError("layers is empty, expected the layers of the pool")
        for name in ("num_blocks", "tokens_per_block", "num_kv_heads", "head_dim"):
            self._check_at_least(1, name)
        for name in ("num_secondary_blocks", "window"):
            self._check_at_least(0, name)
        # Source: cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArrayForContextFMHA
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise InvalidArgumentError(
                f"tokens_per_block is {self.tokens_per_block}, expected a power of two: the "
                "kernels find a token's block by a shift"
            )
        if self.sub_blocks_per_block < len(self.layers) * self.kv_factor:
            raise InvalidArgumentError(
                f"index_scale is {self.index_scale}, expected at least "
                f"{len(self.layers) * self.kv_factor}, kv_factor for each of the layers"
            )

    def _check_at_least(self, lowest: int, name: str) -> None:
        value = getattr(self, name)
        if value < lowest:
            raise InvalidArgumentError(f"{name} is {value}, expected at least {lowest}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the pool's elements."""
        return _TORCH_DTYPES[self.dtype]

    @property
    def sub_block_shape(self) -> tuple[int, int, int]:
        """The axes of kv_layout, of the K or the V of one block of one layer."""
        heads, tokens = self.num_kv_heads, self.tokens_per_block
        outer = (heads, tokens) if self.kv_layout == "HND" else (tokens, heads)
        return (*outer, self.head_dim)

    @property
    def sub_block_elements(self) -> int:
        """Elements of the K or the V of one block of one layer."""
        return self.num_kv_heads * self.tokens_per_block * self.head_dim

    @property
    def sub_block_bytes(self) -> int:
        """Bytes of the K or the V of one block of one layer: KVX's bytes_per_block."""
        return self.sub_block_elements * self.torch_dtype.itemsize

    @property
    def sub_blocks_per_block(self) -> int:
        """Step of a KVCacheIndex from block to block: K and V of all layers of the pool."""
        scale = self.index_scale
        return len(self.layers) * self.kv_factor if scale is None else scale

    @property
    def num_sub_blocks(self) -> int:
        """One more than the highest KVCacheIndex into the primary pool."""
        return self.num_blocks * self.sub_blocks_per_block

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """(num_blocks, num_layers, kv_factor, sub_block_elements), row-major."""
        return (self.num_blocks, len(self.layers), self.kv_factor, self.sub_block_elements)


def pool_specs(
    layer_to_pool_mapping: Tensor,
    *,
    num_blocks: Sequence[int],
    tokens_per_block: int,
    num_kv_heads_per_layer: Sequence[int],
    head_dim: int | Sequence[int],
    dtype: str,
    kv_factor: int = 2,
    num_secondary_blocks: Sequence[int] | None = None,
    index_scales: Sequence[int] | None = None,
    max_attention_window_vec: Sequence[int | None] | None = None,
    max_seq_len: int | None = None,
    kv_layout: str = "HND",
) -> tuple[PoolSpec, ...]:
    """The specs of a manager's pools, from what it says about its layers.

    layer_to_pool_mapping:    kv_cache_pool_mapping, (num_local_layers, 2), int32: pool, and place
                              in that pool
    num_blocks:               per pool. KVCacheManagerV2 with a pool per layer (SWA scratch, or
                              several head sizes): slots * index_scale / kv_factor
    num_kv_heads_per_layer:   per local layer, on this rank
    head_dim:                 of all local layers, or one per layer
    num_secondary_blocks:     per pool; None: there are no secondary pools
    index_scales:             per pool, KVCacheManagerV2's index_scales; None: kv_factor for each
                              layer, as in KVCacheManager and with a pool per layer. Where it is
                              more, slots hold other buffers, which the mapping does not count
    max_attention_window_vec: per local layer, or one for all; None: full attention, as is a window
                              of max_seq_len or more. A shorter pattern is refused: versions differ
                              on where it begins on a pipeline rank
    Raises InvalidArgumentError if these do not agree, and as PoolSpec does.
    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/resource_manager.py, KVCacheManager;
    kv_cache/kv_cache_manager_v2.py, KVCacheManagerV2._build_pool_mapping_tensors and
    _build_base_config (sliding_window_size)
    """
    mapping, num_layers = layer_to_pool_mapping, len(num_kv_heads_per_layer)
    if tuple(mapping.shape) != (num_layers, 2):
        raise InvalidArgumentError(
            f"layer_to_pool_mapping is {tuple(mapping.shape)}, expected ({num_layers}, 2), pool "
            "and place of each layer of num_kv_heads_per_layer"
        )
    head_dims = [head_dim] * num_layers if isinstance(head_dim, int) else head_dim
    windows = [window or 0 for window in max_attention_window_vec or [None]]
    if len(windows) == 1:
        windows *= num_layers
    if len(windows) != num_layers:
        raise InvalidArgumentError(
            f"max_attention_window_vec has {len(windows)} entries, expected 1 or {num_layers}, one "
            "per local layer. Repeat a pattern as your version does: KVCacheManagerV2 of main "
            "takes [pattern[i % len(pattern)] for i in pp_layers]"
        )
    if max_seq_len is not None:
        windows = [0 if window >= max_seq_len else window for window in windows]
    secondary = [0] * len(num_blocks) if num_secondary_blocks is None else num_secondary_blocks
    scales: Sequence[int | None] = [None] * len(num_blocks)
    if index_scales is not None:
        scales = index_scales
    for name, found, expected in (
        ("head_dim", len(head_dims), num_layers),
        ("num_secondary_blocks", len(secondary), len(num_blocks)),
        ("index_scales", len(scales), len(num_blocks)),
    ):
        if found != expected:
            raise InvalidArgumentError(f"{name} has {found} entries, expected {expected}")
    members: list[list[tuple[int, int]]] = [[] for _ in num_blocks]  # (place, layer) per pool
    for layer, (pool, place) in enumerate(mapping.tolist()):
        if not 0 <= pool < len(members):
            raise InvalidArgumentError(
                f"layer_to_pool_mapping[{layer}, 0] is {pool}, expected one of the {len(members)} "
                "pools of num_blocks"
            )
        members[pool].append((place, layer))

    def common(name: str, pool: int, values: Sequence[int]) -> int:
        found = {values[layer] for _, layer in members[pool]}
        if len(found) > 1:
            raise InvalidArgumentError(
                f"{name} of the layers of pool {pool} is {sorted(found)}, expected one number: "
                "layer_to_pool_mapping is of another manager"
            )
        return found.pop()

    specs = []
    for pool, places in enumerate(members):
        places.sort()
        if not places or [place for place, _ in places] != list(range(len(places))):
            raise InvalidArgumentError(
                f"layer_to_pool_mapping places layers at {[place for place, _ in places]} of pool "
                f"{pool}, expected 0, 1, 2, ... Describe another order with slot_view"
            )
        specs.append(
            PoolSpec(
                layers=tuple(layer for _, layer in places),
                num_blocks=num_blocks[pool],
                tokens_per_block=tokens_per_block,
                num_kv_heads=common("num_kv_heads", pool, num_kv_heads_per_layer),
                head_dim=common("head_dim", pool, head_dims),
                dtype=dtype,
                kv_factor=kv_factor,
                num_secondary_blocks=secondary[pool],
                window=common("window", pool, windows),
                kv_layout=kv_layout,
                index_scale=scales[pool],
            )
        )
    return tuple(specs)

"""LayerSpec: the cache of one layer, under vLLM's names; and the known versions of vLLM."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kvx_core import UnsupportedError

FIRST_MINOR, LAST_MINOR = 20, 33


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """vLLM's settings of the cache of one attention layer, under vLLM's names."""

    version: str  # vllm.__version__
    # AttentionBackend.get_name(), e.g. "FLASH_ATTN"; but "ROCM_AITER_FA" for its
    # AiterFlashAttentionBackend, which calls itself FLASH_ATTN too.
    backend: str
    layout: str  # resolved: KVCacheConfig.kv_cache_layout; "NHD" or "HND" before 0.29
    kv_cache_dtype: str  # of the layer: "auto", "bfloat16", "fp8_e5m2", ...
    dtype: torch.dtype  # AttentionSpec.dtype, as stored: uint8 for FP8
    num_blocks: int  # KVCacheConfig.num_blocks
    block_size: int  # tokens of one of those blocks
    num_kv_heads: int  # on this rank
    head_size: int
    page_size_bytes: int  # AttentionSpec.page_size_bytes: a block of one layer, with padding
    num_layers: int = 1  # of the KVCacheTensor that holds this layer: L of the layout
    block_stride_bytes: int | None = None  # KVCacheTensor.block_stride; None: no extra alignment
    head_size_v: int | None = None  # None: as head_size
    num_head_slots: int | None = None  # None: one per KV head
    state_content_bytes: int | None = None  # None: K and V and nothing else
    tokens_per_state: float = 1
    isa: str | None = None  # CPU_ATTN only: the layer's isa, e.g. "vec"
    interleaved_v: bool = False  # ROCm since 0.33: the layer's impl writes tokens of V in groups

    @property
    def minor(self) -> int:
        """33 of version 0.33.1. Raises UnsupportedError for unknown versions."""
        return minor(self.version)


def minor(version: str, first: int = FIRST_MINOR) -> int:
    """33 of "0.33.1". Raises UnsupportedError below 0.`first` and above the last known version."""
    match = re.match(r"0\.(\d+)\.", version)
    if match is None or not first <= int(match[1]) <= LAST_MINOR:
        raise UnsupportedError(
            f"vllm is {version}, expected 0.{first} to 0.{LAST_MINOR}: other versions may place K "
            "and V differently in a tensor of the same shape"
        )
    return int(match[1])

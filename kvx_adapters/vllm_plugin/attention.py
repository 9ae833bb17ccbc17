"""The backend CUSTOM: vLLM's FlashAttention with a cache that KVX writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from kvx_adapters.vllm_plugin.cache_write import Write, WritesByKVX, write_into
from kvx_core import UnsupportedError

# The cache dtypes that FlashAttention reads.
# Source: vllm 0.32 FlashAttentionBackend.supported_kv_cache_dtypes
_PLAIN = ("auto", "float16", "bfloat16")
_FP8 = ("fp8", "fp8_e4m3")


class KVXFlashAttentionImpl(WritesByKVX, FlashAttentionImpl):  # type: ignore[misc]
    def kvx_write(self, layer: Any, kv_cache: Tensor) -> Write:
        """Returns a function that writes into `kv_cache`. Raises UnsupportedError.

        Source: vllm 0.26 to 0.33 v1/attention/backends/flash_attn.py, do_kv_cache_update
        """
        expected = self.num_kv_heads, 2 * self.head_size
        if kv_cache.ndim != 4 or (kv_cache.shape[1], kv_cache.shape[3]) != expected:
            raise UnsupportedError(
                f"kv_cache.shape is {tuple(kv_cache.shape)}, expected (num_blocks, "
                f"{expected[0]}, block_size, {expected[1]}): K and V of {self.num_kv_heads} heads"
            )
        scales = None
        if self.kv_cache_dtype in _FP8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            scales = layer._k_scale, layer._v_scale
        elif self.kv_cache_dtype not in _PLAIN:
            raise UnsupportedError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, expected one of "
                f"{', '.join(_PLAIN + _FP8)}"
            )
        k, v = kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
        return write_into(k, v, "BLOCK_HND", scales)


class KVXFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    kvx_cache_of = "FLASH_ATTN"  # for kvx_adapters.vllm
    # vLLM 0.33: False forbids a model to write the cache with a kernel of its own.
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the backend up by this name, of an AttentionBackendEnum

    @staticmethod
    def get_impl_cls() -> type[KVXFlashAttentionImpl]:
        return KVXFlashAttentionImpl

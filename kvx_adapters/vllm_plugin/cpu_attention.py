"""vLLM's attention on CPU with a cache that KVX writes.

It replaces CPU_ATTN under the same name, because vLLM offers no choice of backends on CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

import kvx_core
from kvx_adapters.vllm import LayerSpec, cache_desc
from kvx_adapters.vllm_plugin.cache_write import Write, WritesByKVX, write_into
from kvx_core import TensorDesc, UnsupportedError


class KVXCPUAttentionImpl(WritesByKVX, CPUAttentionBackendImpl):  # type: ignore[misc]
    """Writes the cache with KVX, unless strides cannot describe its pages, such as AMX tiles."""

    def kvx_write(self, layer: Any, kv_cache: Tensor) -> Write:
        num_blocks, num_kv_heads, block_size, content = kv_cache.shape
        desc = cache_desc(
            kv_cache,
            LayerSpec(
                version=vllm.__version__,
                backend="CPU_ATTN",
                layout="LBHNC",
                kv_cache_dtype=self.kv_cache_dtype,
                dtype=kv_cache.dtype,
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_size=self.head_size,
                page_size_bytes=num_kv_heads * block_size * content * kv_cache.itemsize,
                # Since vLLM 0.29 the layer has `isa`; before, the implementation has it.
                isa=getattr(layer, "isa", None) or getattr(self, "isa", None),
            ),
        )
        assert desc.v is not None
        k, v = _view(kv_cache, desc.k), _view(kv_cache, desc.v)
        kvx_core.use_openmp()  # writes with vLLM's own threads, as vLLM's op does
        if kv_cache.dtype != torch.uint8:
            return write_into(k, v, desc.k.layout.name)
        if os.environ.get("KVX_VLLM_CPU_ATTENTION") != "nearest":
            raise UnsupportedError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, which KVX rounds to nearest and vLLM "
                "on CPU towards zero, so tokens may differ. KVX_VLLM_CPU_ATTENTION=nearest takes it"
            )
        for name in ("_k_scale", "_v_scale"):  # the attention kernel reads the float attributes
            scale, number = getattr(layer, name), getattr(layer, f"{name}_float")
            if scale.numel() != 1 or scale.item() != number:
                raise UnsupportedError(
                    f"layer.{name} is {scale.tolist()}, expected {number}, as {name}_float"
                )
        return write_into(k, v, desc.k.layout.name, (layer._k_scale, layer._v_scale))


class KVXCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[KVXCPUAttentionImpl]:
        return KVXCPUAttentionImpl


def _view(kv_cache: Tensor, desc: TensorDesc) -> Tensor:
    """Returns the part of `kv_cache` that `desc` describes, with the axes and dtype of `desc`."""
    start = kv_cache.storage_offset() + (desc.data - kv_cache.data_ptr()) // kv_cache.itemsize
    view = kv_cache.as_strided(desc.shape, desc.stride, start)
    return view.view(getattr(torch, desc.dtype.array_name))

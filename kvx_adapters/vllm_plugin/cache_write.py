"""Writes into a layer's cache with torch.ops.kvx, for any attention implementation of vLLM.

vLLM calls the write inside an op that is opaque to torch.compile, and captures its launches in CUDA
graphs. It calls no write for layers that use the cache of another layer.
Source: vllm 0.32 model_executor/layers/attention/attention.py, unified_kv_cache_update
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType

import kvx_core.ops.torch_ops  # noqa: F401  registers torch.ops.kvx

_logger = init_logger("vllm.kvx")

Write = Callable[[Tensor, Tensor, Tensor], None]  # key, value, slots


def write_into(
    k: Tensor, v: Tensor, layout: str, scales: tuple[Tensor, Tensor] | None = None
) -> Write:
    """Returns a function that writes into one cache with torch.ops.kvx.write_kv.

    k, v:   views of the cache, in the dtype of its numbers
    layout: the name of a kvx_core.Layout
    scales: the scales of K and V if they are FP8, each one number or one per KV head
    """
    op = torch.ops.kvx.write_kv.default
    if scales is None:
        return lambda key, value, slots: op(key, value, k, v, slots, layout)
    options: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1]}
    if scales[0].numel() > 1:
        options["scale_granularity"] = "PER_HEAD"
    return lambda key, value, slots: op(key, value, k, v, slots, layout, **options)


class WritesByKVX:
    """A base class whose do_kv_cache_update writes with KVX.

    The next base class is vLLM's implementation. It writes the caches that KVX cannot write; a line
    in the log says why.
    """

    attn_type: str  # of vLLM's implementation
    _kv_cache: Callable[[], Tensor | None] = staticmethod(lambda: None)
    _write: Write | None = None  # writes into `_kv_cache`; None: vLLM writes

    def kvx_write(self, layer: Any, kv_cache: Tensor) -> Write:
        """Returns the write into `kv_cache`. Raises UnsupportedError, InvalidArgumentError."""
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the tokens whose slot is not negative. On a device the write allocates nothing
        and does not synchronise.

        key, value:   (>= num_tokens, num_kv_heads, head_size)
        kv_cache:     (num_blocks, num_kv_heads, block_size, 2 * head_size), layer.kv_cache
        slot_mapping: (num_tokens,), int64
        """
        if self._kv_cache() is not kv_cache:
            self._bind(layer, key, value, kv_cache, slot_mapping)
        if self._write is not None:
            self._write(key, value, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    # These return False, because a fused kernel would write the cache itself.

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False

    def _bind(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        """Prepares writes into `kv_cache`, until vLLM gives the layer another cache."""
        self._write = None
        if self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            try:
                write = self.kvx_write(layer, kv_cache)
                write(
                    key[:0], value[:0], slots[:0]
                )  # writes no tokens, but raises the errors of a write
                self._write = write
                _logger.info_once("The KV cache is written by KVX")
            except Exception as error:
                _logger.warning_once("The KV cache is written by vLLM, not by KVX: %s", str(error))
        self._kv_cache = weakref.ref(kv_cache, self._unbind)

    def _unbind(self, _: object) -> None:
        """Releases the views of a cache that vLLM has freed."""
        self._write = None

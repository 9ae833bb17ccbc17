"""The write into a layer's cache by torch.ops.kvx, for any attention implementation of vLLM.

vLLM calls it within an op that torch.compile does not look into, and captures what it launches in
CUDA graphs. A layer that reads another layer's cache does not come here.
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

import kvx_core.torch_ops  # noqa: F401  registers torch.ops.kvx

_logger = init_logger("vllm.kvx")

Write = Callable[[Tensor, Tensor, Tensor], None]  # key, value, slots


def write_into(
    k: Tensor, v: Tensor, layout: str, scales: tuple[Tensor, Tensor] | None = None
) -> Write:
    """torch.ops.kvx.write_kv into the same cache each time.

    k, v:   views of it, in the dtype of its numbers; layout: a name of kvx_core.Layout
    scales: of K and V if they are FP8, one number or one per KV head
    """
    op = torch.ops.kvx.write_kv.default
    if scales is None:
        return lambda key, value, slots: op(key, value, k, v, slots, layout)
    options: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1]}
    if scales[0].numel() > 1:
        options["scale_granularity"] = "PER_HEAD"
    return lambda key, value, slots: op(key, value, k, v, slots, layout, **options)


class WritesByKVX:
    """Ahead of vLLM's implementation among the bases: its do_kv_cache_update by KVX.

    What KVX cannot write is logged and left to that implementation.
    """

    attn_type: str  # of vLLM's implementation
    _kv_cache: Callable[[], Tensor | None] = staticmethod(lambda: None)
    _write: Write | None = None  # into that cache; None: by vLLM

    def kvx_write(self, layer: Any, kv_cache: Tensor) -> Write:
        """What writes into `kv_cache`. Raises UnsupportedError, InvalidArgumentError."""
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the tokens whose slot is not negative; on a device it allocates nothing and waits
        for nothing.

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

    # A fused kernel would write the cache itself.

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False

    def _bind(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        """Takes `kv_cache` for the layer's cache, until vLLM gives it another one."""
        self._write = None
        if self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            try:
                write = self.kvx_write(layer, kv_cache)
                write(key[:0], value[:0], slots[:0])  # what KVX objects to, it objects to now
                self._write = write
                _logger.info_once("The KV cache is written by KVX")
            except Exception as error:
                _logger.warning_once("The KV cache is written by vLLM, not by KVX: %s", str(error))
        self._kv_cache = weakref.ref(kv_cache, self._unbind)

    def _unbind(self, _: object) -> None:
        """Lets go of the views of a cache that vLLM has dropped."""
        self._write = None

"""The caches of OpenVINO, mlx-lm and ONNX Runtime: K and V apart, (blocks, heads, tokens, dims).

kvx_adapters/cli/engines has the engines themselves; here is only their memory, and of MLX its own
arrays and KVCache.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models.cache import KVCache
from torch import Tensor

from kvx_adapters import mlx, onnxruntime, openvino
from kvx_core import CacheSpan, CacheView
from tests.engines.engine import FINGERPRINT, SENTINEL, Sizes, bytes_of, filled

Halves = list[tuple[Tensor, Tensor]]  # of each layer


class Apart:
    """K and V of each layer in an allocation each."""

    def __init__(self, sizes: Sizes, halves: Halves, view: CacheView) -> None:
        self.block_size, self.blocks = sizes.block_size, range(sizes.num_blocks)
        self.halves, self.view = halves, view
        self.raw = [bytes_of(half) for layer in halves for half in layer]

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        """As openvino's block_indices and block_indices_begins."""
        begins = [sum(map(len, sequences[:i])) for i in range(len(sequences) + 1)]
        ids = [block for blocks in sequences for block in blocks]
        return self.view.at(openvino.block_table(ids, begins), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Source: mlx-lm 0.32.2 models/cache.py, KVCache.update_and_fetch; onnxruntime 1.31.1
        contrib_ops/cpu/bert/gqa_attention_base.h, ConcatStateChunkGQA; OpenVINO as measured"""
        k, v = self.halves[layer]
        k[blocks, :, offsets], v[blocks, :, offsets] = key, value


def _halves(sizes: Sizes) -> Halves:
    shape = sizes.num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim
    return [
        (filled(shape, sizes.dtype), filled(shape, sizes.dtype)) for _ in range(sizes.num_layers)
    ]


_KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def openvino_pools(sizes: Sizes) -> Apart:
    """Pools of float32, float16 or bfloat16."""
    halves = _halves(sizes)
    pools = {
        f"{kv}_cache.{i}": half
        for i, layer in enumerate(halves)
        for kv, half in zip(("key", "value"), layer, strict=True)
    }
    compiled = SimpleNamespace(inputs=[_input(sizes, name) for name in pools])
    facts = openvino.cache_facts(
        compiled, rotary="half", rotary_dim=sizes.head_dim, fingerprint=FINGERPRINT
    )
    return Apart(sizes, halves, openvino.cache_view(compiled, pools, facts, requests=()))


def _input(sizes: Sizes, name: str) -> Any:
    """openvino.ConstOutput"""
    open_axis = SimpleNamespace(is_dynamic=True)
    extents = [
        SimpleNamespace(is_dynamic=False, get_length=lambda n=n: n)
        for n in (sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    ]
    return SimpleNamespace(
        get_names=lambda: {name},
        get_element_type=lambda: SimpleNamespace(get_type_name=lambda: _KINDS[sizes.dtype]),
        get_partial_shape=lambda: [open_axis, *extents],
    )


def mlx_cache(sizes: Sizes) -> Apart:
    """KVCache, on the CPU."""
    mx.set_default_device(mx.cpu)
    shape = sizes.num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim
    dtype = getattr(mx, str(sizes.dtype).removeprefix("torch."))
    cache, halves = [], []
    for _ in range(sizes.num_layers):
        layer = KVCache()
        layer.keys, layer.values = mx.zeros(shape, dtype), mx.zeros(shape, dtype)
        layer.offset = sizes.block_size
        mx.eval(layer.keys, layer.values)
        pair = torch.from_dlpack(layer.keys), torch.from_dlpack(layer.values)
        for half in pair:
            bytes_of(half).fill_(SENTINEL)
        cache.append(layer)
        halves.append(pair)
    facts = mlx.cache_facts(
        rotary="half",
        rotary_dim=sizes.head_dim,
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        fingerprint=FINGERPRINT,
    )
    return Apart(sizes, halves, mlx.cache_view(cache, facts))


def onnxruntime_buffers(sizes: Sizes) -> Apart:
    """Past and present of each layer in one buffer."""
    halves = _halves(sizes)
    buffers = {
        f"past_key_values.{i}.{kv}": half
        for i, layer in enumerate(halves)
        for kv, half in zip(("key", "value"), layer, strict=True)
    }
    kind = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    shape = ["batch", sizes.num_kv_heads, "room", sizes.head_dim]
    inputs = [
        SimpleNamespace(name=name, type=f"tensor({kind[sizes.dtype]})", shape=shape)
        for name in buffers
    ]
    facts = onnxruntime.cache_facts(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        do_rotary=True,
        rotary_interleaved=False,
        rotary_dim=sizes.head_dim,
        fingerprint=FINGERPRINT,
    )
    session = SimpleNamespace(get_inputs=lambda: inputs)
    view = onnxruntime.cache_view(session, buffers, facts, holds=None)
    return Apart(sizes, halves, view)

"""Shared by the tests of the TensorRT-LLM adapter: the mock as a KVX view, random tokens, and the
engine's own way to store and load them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm as trt
from kvx_adapters.tensorrt_llm import PoolSpec
from kvx_core import CacheDesc, CacheSpan, CacheView, Layout, Memory, describe
from tests.facts import SAME_MODEL
from tests.fakes.tensorrt_llm import Config, KvBlockArray, KvCacheManager, Request

NAMES = {
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float32: "FLOAT",
    torch.float8_e4m3fn: "FP8",
    torch.int8: "INT8",
}
FACTS = SAME_MODEL
WORKED_EXAMPLE = Config(
    num_kv_heads_per_layer=[2, 2],
    head_dim=64,
    tokens_per_block=32,
    dtype=torch.float16,
    blocks={4096: (4, 0)},
)


def config(**fields: Any) -> Config:
    """3 layers of 3 heads: sizes that are no multiples of each other."""
    defaults: dict[str, Any] = {
        "num_kv_heads_per_layer": [3, 3, 3],
        "head_dim": 20,
        "tokens_per_block": 8,
        "dtype": torch.bfloat16,
        "blocks": {4096: (23, 0)},
    }
    return Config(**(defaults | fields))


def specs_of(manager: KvCacheManager) -> tuple[PoolSpec, ...]:
    c = manager.config
    counts = [c.blocks[window] for window, w in manager.windows.items() for _ in w.pools]
    return trt.pool_specs(
        manager.kv_cache_pool_mapping,
        num_blocks=[primary for primary, _ in counts],
        num_secondary_blocks=[secondary for _, secondary in counts],
        tokens_per_block=c.tokens_per_block,
        num_kv_heads_per_layer=c.num_kv_heads_per_layer,
        head_dim=c.head_dim,
        dtype=NAMES[c.dtype],
        kv_factor=c.kv_factor,
        max_attention_window_vec=[c.window_of(layer) for layer in range(c.num_layers)],
        max_seq_len=4096,
    )


def views_of(manager: KvCacheManager, *, factors: list[float] | None = None) -> list[CacheView]:
    specs = specs_of(manager)
    return list(
        trt.cache_views(
            manager.kv_cache_pool_pointers,
            specs,
            [FACTS] * len(specs),
            memory=Memory.HOST,
            scaling_factors=factors,
        )
    )


def rows_of(manager: KvCacheManager, requests: Iterable[Request]) -> Tensor:
    """kv_cache_block_offsets of a batch: what is not written in it is random."""
    table, row = manager.block_offsets(), 0
    for request in requests:
        manager.copy_block_offsets(table, row, request)
        row += request.beam_width
    return table


class Dense:
    """Random tokens of some layers, (rows, tokens, heads, dim) each, and a view of them."""

    def __init__(self, spec: PoolSpec, rows: int, num_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, num_tokens, spec.num_kv_heads, spec.head_dim * spec.torch_dtype.itemsize)
        self.layers = [
            [
                torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(
                    spec.torch_dtype
                )
                for _ in range(spec.kv_factor)
            ]
            for _ in spec.layers
        ]
        self.view = CacheView(
            layers=tuple(
                CacheDesc.from_kv(*(describe(tensor, Layout.BLOCK_NHD) for tensor in layer))
                for layer in self.layers
            ),
            facts=FACTS,
            dense=True,
        )

    def at(self, starts: Sequence[int] | None = None) -> CacheSpan:
        return self.view.at(starts=starts)


def store(array: KvBlockArray, row: int, tokens: Iterable[int], layer: list[Tensor]) -> None:
    """Writes tokens of one row of a Dense layer by the kernels' own arithmetic."""
    for token in tokens:
        for kv, tensor in enumerate(layer):
            array.write(row, kv, token, tensor[row, token])


def load(array: KvBlockArray, row: int, tokens: Iterable[int], layer: list[Tensor]) -> None:
    for token in tokens:
        for kv, tensor in enumerate(layer):
            tensor[row, token] = array.read(row, kv, token, tensor.dtype)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        differ = (a.view(torch.uint8) != b.view(torch.uint8)).flatten().nonzero().flatten()
        assert len(differ) == 0, f"tensor {i}: {len(differ)} bytes differ, first {int(differ[0])}"

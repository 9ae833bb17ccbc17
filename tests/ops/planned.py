"""Two caches with a plan between them, and what they hold when it has run."""

from __future__ import annotations

import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    describe,
)
from kvx_core.types import Layout


def filled(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def view_of(tensors: list[torch.Tensor], layout: Layout, **more: object) -> CacheView:
    """A layer for each pair of K and V."""
    layers = [
        CacheDesc.from_kv(describe(k, layout), describe(v, layout))
        for k, v in zip(tensors[::2], tensors[1::2], strict=True)
    ]
    return CacheView(tuple(layers), CacheFacts(**more))  # type: ignore[arg-type]


def two_caches(
    seed: int, num_layers: int = 2, dst_dtype: torch.dtype = torch.bfloat16
) -> tuple[list[torch.Tensor], list[torch.Tensor], CacheView, CacheView]:
    """NHD in blocks of 4 tokens, and HND in blocks of 8: 3 heads of 16."""
    src = [filled((9, 4, 3, 16), seed + i) for i in range(2 * num_layers)]
    dst = [filled((7, 3, 8, 16), 90 + seed + i, dst_dtype) for i in range(2 * num_layers)]
    return src, dst, view_of(src, Layout.BLOCK_NHD), view_of(dst, Layout.BLOCK_HND)


def expect(
    src: list[torch.Tensor],
    dst: list[torch.Tensor],
    src_table: list[list[int]],
    dst_table: list[list[int]],
    lengths: list[int],
) -> list[torch.Tensor]:
    """What the destination holds afterwards, token by token."""
    expected = [tensor.clone() for tensor in dst]
    for row, length in enumerate(lengths):
        for token in range(length):
            at, to = src_table[row][token // 4], dst_table[row][token // 8]
            for from_, into in zip(src, expected, strict=True):
                into[to, :, token % 8] = from_[at, token % 4]
    return expected


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), index

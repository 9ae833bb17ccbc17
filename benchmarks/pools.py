"""The caches that are copied: one layer of random numbers in each layout, and block tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvx_core import CacheDesc, CacheFacts, CacheView, Layout, ScaleDesc, describe

PACK = 8  # 16 bytes of bfloat16, the x of vLLM's and TGI's packed keys


@dataclass(frozen=True)
class Shape:
    """How much is copied: every token of `num_tokens`, K and V."""

    num_tokens: int = 32768
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block_size

    @property
    def token_elements(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def elements(self) -> int:
        return self.num_tokens * self.token_elements

    def with_tokens(self, num_tokens: int) -> Shape:
        return replace(self, num_tokens=num_tokens)


@dataclass(frozen=True)
class Pool:
    """K and V of one layer. `layout`: "NHD", "HND", "packed" or "transposed"."""

    shape: Shape
    layout: str
    k: Tensor  # in the order in which it lies in memory
    v: Tensor

    @classmethod
    def new(cls, shape: Shape, layout: str, dtype: torch.dtype = torch.bfloat16) -> Self:
        """An empty pool of shape.num_blocks blocks."""
        heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.block_size
        block = {
            "NHD": (size, heads, dim),
            "HND": (heads, size, dim),
            "packed": (heads, dim // PACK, size, PACK),
            "transposed": (heads, dim, size),
        }[layout]
        k, v = (empty(shape.num_blocks, *block, dtype=dtype) for _ in range(2))
        return cls(shape, layout, k, v)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def fill(self, numbers: Tensor) -> Self:
        """`numbers`, at least as many as K and V have, in the order of memory."""
        for i, tensor in enumerate(self.tensors):
            flat = numbers[i * tensor.numel() : (i + 1) * tensor.numel()]
            tensor.view(-1).copy_(flat)
        return self

    def as_nhd(self, tensor: Tensor) -> Tensor:
        """K or V as [block, token, head, head_dim / PACK, PACK], a view."""
        split = (self.shape.head_dim // PACK, PACK)
        if self.layout == "NHD":
            return tensor.unflatten(3, split)
        if self.layout == "HND":
            return tensor.permute(0, 2, 1, 3).unflatten(3, split)
        if self.layout == "transposed":
            return tensor.permute(0, 3, 1, 2).unflatten(3, split)
        return tensor.permute(0, 3, 1, 2, 4)

    def desc(self) -> CacheDesc:
        """As KVX sees it."""
        if self.layout == "transposed":
            # (num_blocks, num_kv_heads, head_dim, block_size): HND seen from the side
            halves = [describe(t.transpose(2, 3), Layout.BLOCK_HND) for t in self.tensors]
        else:
            layout = {
                "NHD": Layout.BLOCK_NHD,
                "HND": Layout.BLOCK_HND,
                "packed": Layout.BLOCK_HND_PACKED,
            }[self.layout]
            halves = [describe(t, layout) for t in self.tensors]
        return CacheDesc.from_kv(*halves)

    def view(self, scale: ScaleDesc | None = None) -> CacheView:
        """As one end of a migration. `scale`: of K and of V."""
        return one_layer(self.desc(), scale)


def one_layer(cache: CacheDesc, scale: ScaleDesc | None = None) -> CacheView:
    """A model of one layer. `scale`: of K and of V."""
    scales = None if scale is None else (scale,)
    return CacheView((cache,), CacheFacts(), k_scales=scales, v_scales=scales)


def random_table(num_blocks: int, seed: int) -> Tensor:
    """Every block once, in random order: (num_blocks,), int64."""
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))


def random_numbers(count: int) -> Tensor:
    """(count,), bfloat16, normal: finite, and within what E4M3 can hold."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return empty(count, dtype=torch.bfloat16).copy_(numbers)


_MOST_SHARED = 16 << 20  # bytes: larger tensors are past the caches, wherever they lie
_shared: Iterator[Path] | None = None


def share(folder: Path) -> None:
    """From now on, small tensors of `empty` lie in files of `folder`, the n-th in the n-th file.

    Processes that make the same tensors then use the same memory. Where pages lie decides what
    they drive out of a cache: two processes with pages of their own differ by 20 percent.
    """
    global _shared
    _shared = (folder / str(n) for n in itertools.count())


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A new tensor whose numbers are not set."""
    count = math.prod(shape)
    if _shared is None or count * dtype.itemsize > _MOST_SHARED:
        return torch.empty(shape, dtype=dtype)
    file = str(next(_shared))
    return torch.from_file(file, shared=True, size=count, dtype=dtype).view(shape)

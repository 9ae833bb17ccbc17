"""Values, and caches of plain floats, beside those with scales and zero points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    Layout,
    describe,
)
from kvx_core.desc.view import CacheSpan
from tests import reference

TORCH = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F8_E4M3: torch.float8_e4m3fn,
}


@dataclass
class Plain:
    """A cache without zero points, [blocks, tokens, heads, dim]."""

    dtype: DType
    raw: list[Tensor]  # one, of bytes
    layout: Layout = Layout.BLOCK_NHD

    def clone(self) -> Plain:
        return Plain(self.dtype, [self.raw[0].clone()], self.layout)

    def _vector(self, block: int, token: int) -> Tensor:
        at = (block, token) if self.layout is Layout.BLOCK_NHD else (block, slice(None), token)
        return self.raw[0][at]

    def numbers(self, block: int, token: int) -> Tensor:
        stored = self._vector(block, token).contiguous()
        if self.dtype is DType.Q8_0:
            return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType.Q8_0))
        return reference.decode(stored.view(TORCH[self.dtype]))

    def store(self, block: int, token: int, x: Tensor) -> None:
        if self.dtype is DType.Q8_0:
            stored = torch.from_numpy(quantize(x.numpy(), GGMLQuantizationType.Q8_0))
        else:
            stored = reference.encode(x, TORCH[self.dtype]).contiguous().view(torch.uint8)
        self._vector(block, token)[:] = stored

    def span(self, table: Any = None, slots: Any = None, starts: Any = None) -> CacheSpan:
        raw = self.raw[0]
        tensor = raw if self.dtype is DType.Q8_0 else raw.view(TORCH[self.dtype])
        k = describe(tensor, self.layout, dtype=self.dtype)
        view = CacheView((CacheDesc.from_kv(k),), CacheFacts(), dense=table is slots is None)
        return view.at(block_table=table, slots=slots, starts=starts)


def plain(
    blocks: int,
    tokens: int,
    heads: int,
    dim: int,
    seed: int,
    *,
    dtype: DType,
    layout: Layout = Layout.BLOCK_NHD,
) -> Plain:
    size = dim // dtype.numbers * dtype.itemsize
    shape = (blocks, tokens, heads) if layout is Layout.BLOCK_NHD else (blocks, heads, tokens)
    random = np.random.default_rng(seed)
    return Plain(
        dtype, [torch.from_numpy(random.integers(0, 256, (*shape, size), np.uint8))], layout
    )


def values(shape: Sequence[int], seed: int) -> Tensor:
    """[..., heads, dim]: many magnitudes; constants, zeros and heads of one sign among them."""
    random = np.random.default_rng(seed)
    found = random.standard_normal(shape) * 2.0 ** random.integers(-9, 5, (*shape[:-1], 1))
    found[..., 5] = 2.75  # a constant channel
    found[..., 6] = 0
    found[0] = 0.1
    found[..., 0, :] = np.abs(found[..., 0, :])
    found[..., -1, :] = -np.abs(found[..., -1, :])
    return torch.from_numpy(found.astype(np.float32))


def from_dense(x: Tensor, dtype: torch.dtype) -> CacheSpan:
    k = describe(x.to(dtype).unsqueeze(0), Layout.BLOCK_NHD)
    return CacheView((CacheDesc.from_kv(k),), CacheFacts(), dense=True).at()

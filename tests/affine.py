"""Caches with zero points as OpenVINO and MLX lay them out, and their numbers in plain torch.

Formulas are those of spec E.14; the layouts were measured on the engines.
Source: OpenVINO 2026.4.1, CPU plugin, u8 KV cache; MLX 0.32.4, mx.quantize (affine, 8 bits)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvx_core import CacheDesc, CacheFacts, CacheView, DType, Layout, ScaleDesc, describe
from kvx_core.desc.view import CacheSpan

F32 = torch.float32


def find_zero(
    least: Tensor, largest: Tensor, *, covers_tokens: bool = False
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of U8_ZERO."""
    span = largest - least
    scale = span * (torch.tensor(1.0) / 255) if covers_tokens else span / 255
    scale = torch.where((1 / scale).isinf(), torch.tensor(0.0001), scale)
    return scale, -least / scale


def find_bias(least: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and bias of U8_BIAS."""
    width = ((largest - least) / 255).clamp(min=1e-7)
    from_least = least.abs() > largest.abs()
    scale, edge = torch.where(from_least, width, -width), torch.where(from_least, least, largest)
    count = (edge / scale).round()
    return torch.where(count == 0, scale, edge / count), torch.where(count == 0, 0, edge)


def decode(dtype: DType, q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if dtype is DType.U8_ZERO:
        return (q.float() - zero.float()) * scale.float()
    return q.float() * scale.float() + zero.float()


def encode(dtype: DType, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    x = x.nan_to_num(0.0, torch.inf, -torch.inf)
    if dtype is DType.U8_ZERO:  # a product with the inverse and a sum, rounded once
        steps = (x.double() * (1 / scale).double() + zero.double()).float()
    else:
        steps = (x - zero) / scale
    return steps.round().clamp(0, 255).to(torch.uint8)


@dataclass
class Affine:
    """A cache of U8_ZERO or U8_BIAS. Views of the memory in `raw`."""

    dtype: DType
    q: Tensor  # [blocks, tokens, heads, dim]
    scales: Tensor  # [blocks, tokens, heads, groups], or [blocks, heads, dim]: of all tokens
    zeros: Tensor
    raw: list[Tensor] = field(default_factory=list)

    @property
    def covers_tokens(self) -> bool:
        return self.scales.ndim == 3

    def clone(self) -> Affine:
        """The same in memory of its own."""
        copies = [raw.clone() for raw in self.raw]

        def moved(view: Tensor) -> Tensor:
            (copy,) = (
                copy
                for raw, copy in zip(self.raw, copies, strict=True)
                if view.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
            )
            typed = copy.view(-1).view(view.dtype)
            return typed.as_strided(view.shape, view.stride(), view.storage_offset())

        views = map(moved, (self.q, self.scales, self.zeros))
        return Affine(self.dtype, *views, raw=copies)

    def numbers(self, block: int, token: int) -> Tensor:
        """[heads, dim], float32."""
        at = (block,) if self.covers_tokens else (block, token)
        size = self.q.shape[-1] // self.scales.shape[-1]
        scale, zero = (
            of[at].float().repeat_interleave(size, -1) for of in (self.scales, self.zeros)
        )
        return decode(self.dtype, self.q[block, token], scale, zero)

    def quantize(self, x: Tensor, units: int, at: Any, tokens: Any) -> None:
        """Stores `x`, whose axis `units` is what a unit covers: q at `tokens`, the others `at`."""
        found = ~x.isnan()
        least = torch.where(found, x, torch.inf).amin(units)
        largest = torch.where(found, x, -torch.inf).amax(units)
        most = torch.finfo(F32).max
        nothing = ~found.any(units)
        least, largest = (
            torch.where(nothing, 0, bound.clamp(-most, most)) + 0.0 for bound in (least, largest)
        )
        if self.dtype is DType.U8_ZERO:
            scale, zero = find_zero(least, largest, covers_tokens=self.covers_tokens)
        else:
            scale, zero = find_bias(least, largest)
        self.scales[at], self.zeros[at] = scale.to(self.scales.dtype), zero.to(self.zeros.dtype)
        q = encode(self.dtype, x, scale.unsqueeze(units), zero.unsqueeze(units))
        self.q[tokens] = q.reshape(self.q[tokens].shape)

    def store(self, block: int, token: int, x: Tensor) -> None:
        """A token, [heads, dim], of units within it."""
        groups = self.scales.shape[-1]
        self.quantize(x.unflatten(-1, (groups, -1)), -1, (block, token), (block, token))

    def store_tokens(self, block: int, at: Sequence[int], x: Tensor) -> None:
        """Tokens `at` of a block, [tokens, heads, dim]: all that the block then has."""
        self.quantize(x, 0, (block,), (block, list(at)))

    def span(self, table: Any = None, slots: Any = None, starts: Any = None) -> CacheSpan:
        groups = "PER_CHANNEL" if self.covers_tokens else "PER_GROUP"
        view = CacheView(
            layers=(CacheDesc.from_kv(describe(self.q, Layout.BLOCK_NHD, dtype=self.dtype)),),
            facts=CacheFacts(),
            k_scales=(ScaleDesc.of(self.scales, groups),),
            k_zeros=(ScaleDesc.of(self.zeros, groups),),
            dense=table is slots is None,
        )
        return view.at(block_table=table, slots=slots, starts=starts)


def _random(shape: Sequence[int], seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, tuple(shape), generator=random, dtype=torch.uint8)


def openvino_k(blocks: int, tokens: int, heads: int, dim: int, seed: int) -> Affine:
    """[blocks, heads, 8 + tokens, dim] bytes: rows of scales, of zero points, then of tokens."""
    raw = _random((blocks, heads, 8 + tokens, dim), seed)
    beside = raw[:, :, :8].flatten(2).view(F32).unflatten(2, (2, dim))
    q = raw[:, :, 8:].transpose(1, 2)
    return Affine(DType.U8_ZERO, q, beside[:, :, 0], beside[:, :, 1], [raw])


def openvino_v(blocks: int, tokens: int, heads: int, dim: int, seed: int) -> Affine:
    """[blocks, heads, tokens, 8 + dim] bytes: a scale, a zero point, a token."""
    raw = _random((blocks, heads, tokens, 8 + dim), seed)
    beside = raw[..., :8].view(F32).transpose(1, 2)
    q = raw[..., 8:].transpose(1, 2)
    return Affine(DType.U8_ZERO, q, beside[..., :1], beside[..., 1:], [raw])


def mlx(
    blocks: int,
    tokens: int,
    heads: int,
    dim: int,
    seed: int,
    *,
    group: int = 64,
    dtype: torch.dtype = F32,
) -> Affine:
    """Three tensors [batch, heads, tokens, ...]: bytes, scales, biases."""
    size = torch.finfo(dtype).bits // 8
    shape = blocks, heads, tokens
    q, *beside = (
        _random((*shape, width), seed + i)
        for i, width in enumerate((dim, dim // group * size, dim // group * size))
    )
    scales, zeros = (of.view(dtype).transpose(1, 2) for of in beside)
    return Affine(DType.U8_BIAS, q.transpose(1, 2), scales, zeros, [q, *beside])

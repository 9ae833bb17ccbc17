"""Caches of F4_E2M1 as engines lay them out, and their numbers by ml_dtypes. Spec: E.18

Source: vLLM 0.32, utils/torch_utils.py, nvfp4_split_data_scale (pages of NVFP4);
  csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, swizzle_scale_offset (scales of V on SM100);
  models/deepseek_v4/common/ops/fused_compress_quant_cache.py (pages of MXFP4 indexer keys)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from kvx_core import CacheDesc, CacheFacts, CacheView, DType, Layout, ScaleDesc, describe
from kvx_core.desc.view import CacheSpan

F32 = np.float32
GROUP = {ml_dtypes.float8_e4m3fn: 16, ml_dtypes.float8_e8m0fnu: 32}
SIXTH = F32(1 / 6)


def find_scales(groups: np.ndarray, kind: Any, tensor_scale: float) -> np.ndarray:
    """The scale of each group, [..., groups, numbers] to [..., groups], of `kind`."""
    magnitude = np.where(np.isnan(groups), 0, np.abs(groups))
    sixth = magnitude.max(-1).clip(max=np.finfo(F32).max) * SIXTH
    if kind is ml_dtypes.float8_e4m3fn:
        with np.errstate(over="ignore"):
            return (sixth * (F32(1) / F32(tensor_scale))).clip(max=448).astype(kind)
    fraction, exponent = np.frexp(np.maximum(sixth, F32(2.0**-126)))  # fraction from 0.5 on
    byte = exponent - (fraction == 0.5) + 127
    return byte.astype(np.uint8).view(kind)


def encode(x: np.ndarray, kind: Any, tensor_scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales of [..., dim] numbers: [..., dim / 2] uint8, [..., groups] of `kind`."""
    groups = x.astype(F32).reshape(*x.shape[:-1], -1, GROUP[kind])
    scales = find_scales(groups, kind, tensor_scale)
    stored = scales.astype(F32) * (F32(1) / (F32(1) / F32(tensor_scale)))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = F32(1) / stored
    inverse = np.where(np.isfinite(inverse), inverse, F32(0))
    with np.errstate(invalid="ignore"):
        scaled = (groups * inverse[..., None]).clip(-6, 6)
    scaled = np.where(np.isnan(groups), 0, scaled).astype(F32)
    code = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape) & 15
    return code[..., 0::2] | code[..., 1::2] << 4, scales


def decode(q: np.ndarray, scales: np.ndarray, tensor_scale: float = 1.0) -> np.ndarray:
    """[..., dim / 2] and [..., groups] to [..., dim] float32."""
    code = np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], -1)
    numbers = code.view(ml_dtypes.float4_e2m1fn).astype(F32)
    factor = scales.astype(F32) * F32(tensor_scale)
    groups = numbers.reshape(*scales.shape, -1) * factor[..., None]
    return groups.reshape(numbers.shape)


def swap_fours(tokens: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Where scale (token, group) of a page is kept for SM100: (token, group) of the linear page."""
    t, s = np.meshgrid(np.arange(tokens), np.arange(groups), indexing="ij")
    quarter = groups // 4
    return t // 4 * 4 + s // quarter, s % quarter * 4 + t % 4


@dataclass
class Fp4:
    """A cache of F4_E2M1. Views of the memory in `raw`, with the scales' places."""

    q: np.ndarray  # [blocks, tokens, heads, dim / 2]
    scales: np.ndarray  # [blocks, tokens, heads, groups]
    raw: list[Tensor]  # of bytes, and the scale of the tensor if it has one
    is_swapped: bool = False  # tokens and groups in fours

    @property
    def tensor_scale(self) -> float:
        return float(self.raw[1]) if len(self.raw) > 1 else 1.0

    def clone(self) -> Fp4:
        """The same in memory of its own, with the same scale of the tensor."""
        copy = self.raw[0].clone()
        base, new = (raw.numpy().__array_interface__["data"][0] for raw in (self.raw[0], copy))

        def moved(view: np.ndarray) -> np.ndarray:
            begin = view.__array_interface__["data"][0] - base
            memory = copy.numpy().reshape(-1)[begin:].view(view.dtype)
            return np.lib.stride_tricks.as_strided(memory, view.shape, view.strides)

        assert new != base
        q, scales = moved(self.q), moved(self.scales)
        return Fp4(q, scales, [copy, *self.raw[1:]], self.is_swapped)

    def _at(self, block: int, token: int) -> Any:
        """The index of a token's scales, [groups, heads]."""
        if not self.is_swapped:
            return (block, token)
        tokens, groups = swap_fours(self.scales.shape[1], self.scales.shape[3])
        heads = np.arange(self.scales.shape[2])[:, None]
        return (block, tokens[token][None], heads, groups[token][None])

    def numbers(self, block: int, token: int) -> Tensor:
        """[heads, dim], float32."""
        found = decode(self.q[block, token], self.scales[self._at(block, token)], self.tensor_scale)
        return torch.from_numpy(found)

    def store(self, block: int, token: int, x: Tensor) -> None:
        """A token, [heads, dim]."""
        kind = self.scales.dtype.type
        q, scales = encode(x.numpy(), kind, self.tensor_scale)
        self.store_bytes(block, token, q, scales)

    def store_bytes(self, block: int, token: int, q: np.ndarray, scales: np.ndarray) -> None:
        self.q[block, token], self.scales[self._at(block, token)] = q, scales

    def bytes_of(self, block: int, token: int) -> tuple[np.ndarray, np.ndarray]:
        return self.q[block, token], self.scales[self._at(block, token)]

    def span(self, table: Any = None, slots: Any = None, starts: Any = None) -> CacheSpan:
        return self.view(dense=table is slots is None).at(
            block_table=table, slots=slots, starts=starts
        )

    def view(self, *, dense: bool = False) -> CacheView:
        granularity = "PER_GROUP_4X4" if self.is_swapped else "PER_GROUP"
        q = torch.from_numpy(self.q)
        return CacheView(
            layers=(CacheDesc.from_kv(describe(q, Layout.BLOCK_NHD, dtype=DType.F4_E2M1)),),
            facts=CacheFacts(),
            k_scales=(ScaleDesc.of(self.scales, granularity),),
            k_zeros=(ScaleDesc.of(self.raw[1]),) if len(self.raw) > 1 else None,
            dense=dense,
        )


def page(
    blocks: int,
    tokens: int,
    heads: int,
    dim: int,
    seed: int,
    *,
    kind: Any = ml_dtypes.float8_e4m3fn,
    hnd: bool = True,
    tensor_scale: float | None = None,
    is_swapped: bool = False,
) -> Fp4:
    """Pages of random bytes: K's data, K's scales, and as much again, which is V's."""
    groups = dim // GROUP[kind]
    data, beside = heads * tokens * dim // 2, heads * tokens * groups
    random = np.random.default_rng(seed)
    memory = random.integers(0, 256, (blocks, 2 * (data + beside)), np.uint8)
    raw = torch.from_numpy(memory)

    def part(begin: int, size: int, width: int) -> np.ndarray:
        shape = (blocks, heads, tokens, width) if hnd else (blocks, tokens, heads, width)
        axes = memory[:, begin : begin + size].reshape(shape)
        assert np.shares_memory(axes, memory)
        return axes.transpose(0, 2, 1, 3) if hnd else axes

    scales = part(data, beside, groups).view(kind)
    beside_all = [] if tensor_scale is None else [torch.tensor([tensor_scale])]
    return Fp4(part(0, data, dim // 2), scales, [raw, *beside_all], is_swapped)


def swapped(blocks: int, tokens: int, heads: int, dim: int, seed: int, **how: Any) -> Fp4:
    """The same with the scales of SM100's V, which needs four tokens and four groups."""
    return page(blocks, tokens, heads, dim, seed, is_swapped=True, **how)


def codes(numbers: Sequence[float]) -> list[int]:
    """E2M1 codes of numbers by ml_dtypes."""
    found = np.array(numbers, F32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return [int(code) for code in found]

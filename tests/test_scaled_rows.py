"""FP8 whose scales differ from vector to vector: each as torch converts it alone. Spec: 6.6, E.6

Heads that follow each other are one call of a kernel; sizes and scales that it does not take, and
vectors that do not follow each other, are converted one by one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx_core import CacheDesc, CacheFacts, CacheView, Layout, ScaleDesc, describe, migrate
from kvx_core.desc.view import CacheSpan

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SEEDS = (1, 2, 3)
# 1 and powers of two, usual ones, and those that make float32 subnormal or infinite.
SCALES = (1.0, 0.125, 4.0, 0.0123, 0.7, 3.3, 1e-19, 1e-30, 3e-38, 1e30, 1e36)

dims = pytest.mark.parametrize("dim", [64, 128, 192, 100, 32])
seeds = pytest.mark.parametrize("seed", SEEDS)
fp8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
kinds = pytest.mark.parametrize("kind", ["PER_HEAD", "PER_TOKEN_HEAD"])
gaps = pytest.mark.parametrize("gap", [0, 1])  # heads of other tensors between


def span(tensor: Tensor, scales: ScaleDesc | None = None) -> CacheSpan:
    """[1, tokens, heads, dim] as the K of a dense cache."""
    layer = CacheDesc.from_kv(describe(tensor, Layout.BLOCK_NHD))
    facts = CacheFacts()
    return CacheView(
        (layer,), facts, k_scales=None if scales is None else (scales,), dense=True
    ).at()


def random_scales(kind: str, tokens: int, heads: int, seed: int) -> Tensor:
    shape = (heads,) if kind == "PER_HEAD" else (1, tokens, heads)
    at = torch.randint(len(SCALES), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(SCALES)[at]


def bits(tensor: Tensor) -> Tensor:
    """The bits of numbers; all NaN are one."""
    whole = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    return torch.where(tensor.isnan(), torch.full_like(whole, 0x7F), whole)


@seeds
@fp8
@kinds
@dims
@gaps
def test_decoding(dim: int, kind: str, dtype: torch.dtype, gap: int, seed: int) -> None:
    tokens, heads = 13, 70 if dim == 64 else 5
    every = torch.arange(tokens * (heads + gap) * dim).to(torch.uint8)
    order = torch.randperm(every.numel(), generator=torch.Generator().manual_seed(seed))
    codes = every[order].view(dtype).view(1, tokens, heads + gap, dim)
    scales = random_scales(kind, tokens, heads, seed)
    numbers = torch.full((1, tokens + 2, heads, dim), 9.0, dtype=torch.bfloat16)
    source, target = codes[:, :, :heads], numbers[:, 1:-1]
    migrate(span(source, ScaleDesc.of(scales, kind)), span(target), [tokens], same_model=True)
    expected = torch.full_like(numbers, 9.0)
    expected[:, 1:-1] = (source.float() * scales[..., None]).bfloat16()
    assert torch.equal(bits(numbers), bits(expected))


@seeds
@fp8
@kinds
@dims
@gaps
def test_encoding(dim: int, kind: str, dtype: torch.dtype, gap: int, seed: int) -> None:
    tokens, heads = 13, 70 if dim == 64 else 5
    random = torch.Generator().manual_seed(seed)
    scales = random_scales(kind, tokens, heads, seed)
    shape = (1, tokens, heads + gap, dim)
    numbers = torch.randn(shape, generator=random) * 2.0 ** torch.randint(-9, 9, shape)
    numbers[:, :, :heads] *= 3 * scales[..., None]
    numbers[:, ::3, :, ::7] = float("nan")
    numbers[:, ::4, :, ::9] = float("-inf")
    source = numbers.bfloat16()[:, :, :heads]
    codes = torch.full((1, tokens + 2, heads, dim), 9.0).to(dtype)
    expected = codes.clone()
    target = codes[:, 1:-1]
    migrate(span(source), span(target, ScaleDesc.of(scales, kind)), [tokens], same_model=True)
    most = LARGEST[dtype]
    expected[:, 1:-1] = (source.float() / scales[..., None]).clamp(-most, most).to(dtype)
    assert torch.equal(bits(codes), bits(expected))

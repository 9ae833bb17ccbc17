"""vLLM's AMX pages as planes: written by their own indexing, moved to NHD and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvx_adapters.vllm import amx_planes
from kvx_core import CacheFacts, CacheView, InvalidArgumentError, Plane, migrate

SENTINEL = 7
FACTS = CacheFacts(fingerprint="a", rotary="none", rotary_dim=0, rope_applied=False)


def engine_write(cache: Tensor, block: int, i: int, k: Tensor, v: Tensor) -> None:
    """Token `i` of a block, as the engine stores it: k, v (num_kv_heads, head_size)."""
    heads, n, dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    for h, d in itertools.product(range(heads), range(dim)):
        page = cache[block, h].view(-1)
        page[i // 16 * (dim * 16) + d // 2 * 32 + i % 16 * 2 + d % 2] = k[h, d]
        page[n * dim + d // 16 * (n * 16) + i // 2 * 32 + d % 16 * 2 + i % 2] = v[h, d]


def engine(num_blocks: int, heads: int, block_size: int, dim: int) -> Tensor:
    shape = num_blocks, heads, block_size, 2 * dim
    return torch.full(shape, SENTINEL, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("seed", range(3))
def test_amx_pages_go_to_nhd_and_back(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, dim, lengths, table = 2, (48, 256, 16)[seed], [75, 32], [[2, 0, 5], [4, -1, -1]]
    cache, back = engine(6, heads, 32, dim), engine(5, heads, 64, dim)
    expected = back.clone()
    k, v = torch.randn(2, 2, 75, heads, dim, generator=generator).to(torch.bfloat16)
    into = [[1, 3], [0, -1]]
    for s, length in enumerate(lengths):
        for t in range(length):
            engine_write(cache, table[s][t // 32], t % 32, k[s, t], v[s, t])
            engine_write(expected, into[s][t // 64], t % 64, k[s, t], v[s, t])
    nhd = [torch.zeros(2, 75, heads, dim, dtype=torch.bfloat16) for _ in "kv"]
    axes = "block", "token", "head", "dim"
    planes = tuple(Plane.of(half, axes, role, 3) for role, half in enumerate(nhd))
    dense = CacheView(layers=(), facts=FACTS, planes=planes, dense=True)
    paged = CacheView(layers=(), facts=FACTS, planes=amx_planes(cache, 3))
    assert migrate(paged.at(table), dense, lengths) == sum(lengths) * heads * dim * 4
    for half, all_ in zip(nhd, (k, v), strict=True):
        for s, length in enumerate(lengths):
            assert torch.equal(half[s, :length], all_[s, :length])
            assert not half[s, length:].any()
    other = CacheView(layers=(), facts=FACTS, planes=amx_planes(back, 3))
    migrate(dense, other.at(into), lengths)
    assert torch.equal(back.view(torch.int16), expected.view(torch.int16))
    back.view(torch.int16).fill_(SENTINEL)
    migrate(paged.at(table), other.at(into), lengths)
    assert torch.equal(back.view(torch.int16), expected.view(torch.int16))


def test_other_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"4-D torch\.float32, expected 4-D torch\.bf"):
        amx_planes(torch.zeros(1, 1, 32, 64))
    with pytest.raises(InvalidArgumentError, match="pages of 16 x 64 with strides"):
        amx_planes(engine(1, 1, 16, 32))
    with pytest.raises(InvalidArgumentError, match=r"strides \(1, 64\), expected multiples of 32"):
        amx_planes(engine(1, 1, 64, 32).transpose(2, 3))

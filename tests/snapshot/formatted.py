"""An engine whose snapshots have a format of their own, and the numbers that they then hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheView,
    Section,
    describe,
)
from tests.snapshot.sections import FACTS
from tests.snapshot.test_snapshot_planes import filled, section

SEEDS = [1, 2, 3]


K_DIM, V_DIM, HEADS = 64, 96, 3


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers of several magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)
    return torch.randn(shape, generator=generator) * scale


class Engine:
    """Two layers of K and V, (blocks, tokens, heads, dim), and the blocks of a sequence."""

    def __init__(self, dtype: torch.dtype, block_size: int, seed: int | None, **facts: Any) -> None:
        self.block_size, self.order = block_size, [6, 2, 9, 4, 0, 7]
        self.layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(2):
            shapes = [(10, block_size, HEADS, dim) for dim in (K_DIM, V_DIM)]
            kv = [
                filled(shape, dtype, None)
                if seed is None
                else numbers(shape, 10 * seed + 2 * layer + i).to(dtype)
                for i, shape in enumerate(shapes)
            ]
            self.layers.append((kv[0], kv[1]))
        caches = [CacheDesc.from_kv(*(describe(t, "BLOCK_NHD") for t in kv)) for kv in self.layers]
        known = replace(FACTS, first_kv_head=0, total_kv_heads=HEADS)
        self.view = CacheView(tuple(caches), replace(known, **facts))

    @property
    def section(self) -> Section:
        return section(self.view, self.order, [0, 1])

    def tokens(self, layer: int, kv: int, start: int, stop: int) -> Tensor:
        """[token, head, dim]"""
        tensor, n = self.layers[layer][kv], self.block_size
        places = [(self.order[t // n], t % n) for t in range(start, stop)]
        return torch.stack([tensor[place] for place in places])


def expect(dst: Engine, layer: int, kv: int, start: int, values: Tensor) -> None:
    """The tokens from `start` on are these, and all others are as they were."""
    tensor, n = dst.layers[layer][kv], dst.block_size
    expected = filled(tuple(tensor.shape), tensor.dtype, None)
    for i, value in enumerate(values):
        t = start + i
        expected[dst.order[t // n], t % n] = value
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))

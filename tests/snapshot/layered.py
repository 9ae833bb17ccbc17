"""A model whose layers differ in heads, head_dims, dtypes and scales, and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    ScaleDesc,
    ScaleGranularity,
    Section,
    describe,
)
from tests.snapshot.sections import FACTS

START, STOP = 3, 26  # the tokens of the snapshots


BLOCKS = [6, 2, 9, 4, 0, 7, 1]


SENTINEL = 0xA5


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


PER_HEAD, PER_TOKEN_HEAD = ScaleGranularity.PER_HEAD, ScaleGranularity.PER_TOKEN_HEAD


@dataclass(frozen=True)
class Model:
    """A layer of a model, and all that a sequence has there."""

    layer: int
    heads: int
    dim: int
    dtype: torch.dtype
    scales: ScaleGranularity | None = None
    kv: dict[str, Tensor] = field(default_factory=dict)  # [token, head, dim], and their scales

    def filled(self, seed: int) -> Model:
        """With numbers of its own: bytes of which none is a NaN."""
        random = torch.Generator().manual_seed(seed * 10 + self.layer)
        found = {}
        for kind in "kv":
            shape = STOP, self.heads, self.dim * self.dtype.itemsize
            raw = torch.randint(0, 0x7E, shape, generator=random, dtype=torch.uint8)
            found[kind] = raw.view(self.dtype)
            scales = 2.0 ** torch.randint(-3, 3, (STOP, self.heads), generator=random)
            if self.scales is PER_HEAD:
                found[f"{kind}_scale"] = scales[0]
            elif self.scales is PER_TOKEN_HEAD:
                found[f"{kind}_scale"] = scales
        return replace(self, kv=found)


# As Gemma 4's layers, and layers that are skipped when a cache is quantised.
LAYERS = [
    Model(0, 1, 64, BF16),
    Model(1, 4, 32, FP8, PER_HEAD),
    Model(2, 2, 96, FP8, PER_TOKEN_HEAD),
]


PLAIN = [Model(0, 1, 64, BF16), Model(1, 4, 32, BF16), Model(2, 2, 96, torch.float16)]


class Rank:
    """Some heads of layers in caches of blocks, which hold the sequence, or nothing yet."""

    def __init__(
        self,
        model: list[Model],
        size: int,
        layout: str,
        rank: int = 0,
        ranks: int = 1,
        **given: Any,
    ) -> None:
        """size: of a block; a layer with fewer heads than ranks shares them out as vLLM does"""
        self.model, self.size, self.layout = model, size, layout
        self.heads = [
            (rank * m.heads // ranks, rank * m.heads // ranks + max(1, m.heads // ranks))
            for m in model
        ]
        self.blocks = given.get("blocks", BLOCKS)
        self.held = [
            {kind: self._memory(m, heads, kind) for kind in m.kv}
            for m, heads in zip(model, self.heads, strict=True)
        ]

    def _memory(self, model: Model, heads: tuple[int, int], kind: str) -> Tensor:
        whole = model.kv[kind]
        if whole.ndim == 1:
            return whole[slice(*heads)].clone()  # scales of heads are the engine's own
        shape = len(BLOCKS) + 3, self.size, heads[1] - heads[0], *whole.shape[2:]
        found = torch.empty(shape, dtype=whole.dtype)
        found.view(torch.uint8).fill_(SENTINEL if kind in "kv" else 0x3F)
        if self.layout == "BLOCK_HND" and whole.ndim == 3:
            found = found.transpose(1, 2).contiguous().transpose(1, 2)
        return found

    def put(self, lo: int, hi: int) -> Rank:
        """Writes tokens of the sequence."""
        for model, heads, held in zip(self.model, self.heads, self.held, strict=True):
            for kind, memory in held.items():
                for t in range(lo, hi) if memory.ndim > 1 else ():
                    at = self.blocks[t // self.size], t % self.size
                    memory[at] = model.kv[kind][t, slice(*heads)]
        return self

    def sections(self, **facts: Any) -> list[Section]:
        """A section of each layer."""
        return [self.section([i], **facts) for i in range(len(self.model))]

    def section(self, at: list[int], **facts: Any) -> Section:
        model, heads = [self.model[i] for i in at], self.heads[at[0]]
        caches = [
            CacheDesc.from_kv(*(describe(self._stored(i, kind), self.layout) for kind in "kv"))
            for i in at
        ]
        scales: dict[str, Any] = {}
        for kind in ("k_scale", "v_scale"):
            found = [
                ScaleDesc.of(self.held[i][kind], m.scales) if m.scales else None
                for i, m in zip(at, model, strict=True)
            ]
            scales[f"{kind}s"] = tuple(found) if any(found) else None
        facts = {"first_kv_head": heads[0], "total_kv_heads": model[0].heads} | facts
        view = CacheView(tuple(caches), replace(FACTS, **facts), **scales)
        return Section(tuple(m.layer for m in model), view, BlockTable.packed([self.blocks]))

    def _stored(self, i: int, kind: str) -> Tensor:
        tensor = self.held[i][kind]
        return tensor.transpose(1, 2) if self.layout == "BLOCK_HND" else tensor

    def assert_same(self, other: Rank) -> None:
        for i, (one, two) in enumerate(zip(self.held, other.held, strict=True)):
            for kind in one:
                found, wanted = (t[kind].contiguous().view(torch.uint8) for t in (one, two))
                assert torch.equal(found, wanted), (i, kind)

"""Small models of DeepSeek-V4's kind, their weights, and what their caches must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvx_core.hybrid import AttentionType, Compressor, DSV4Config, KVCacheManager, LayerSpec
from tests.hybrid import reference

SMALL = DSV4Config(head_dim=64, rope_dim=16, indexer_head_dim=32, sliding_window=16)


def layers(*types: str) -> list[LayerSpec]:
    return [LayerSpec(i, AttentionType[name]) for i, name in enumerate(types)]


def manager(
    requests: int = 3,
    context: int = 1024,
    types: Sequence[str] = ("SWA", "CSA", "HCA", "CSA"),
    csa: int | None = None,
    hca: int | None = None,
    **fields: Any,
) -> KVCacheManager:
    return KVCacheManager(SMALL, layers(*types), requests, context, csa, hca, **fields)


def weights(ratio: int, dim: int, overlap: bool, seed: int, positions: int = 1024) -> Compressor:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    angles = torch.arange(positions)[:, None] * 10000.0 ** -torch.arange(0, 1, 2 / SMALL.rope_dim)
    return Compressor(
        ape_a=random(ratio, dim),
        ape_b=random(ratio, dim) if overlap else None,
        norm_weight=1 + random(dim) / 8,
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1),
    )


class Tokens(NamedTuple):
    """What a layer computes of each token of a sequence."""

    k: Tensor  # (tokens, row)
    z: Tensor
    index_k: Tensor
    index_z: Tensor

    def part(self, first: int, last: int) -> Tokens:
        return Tokens(*(t[first:last] for t in self))

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def tokens(count: int, width: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    sizes = (width * SMALL.head_dim,) * 2 + (width * SMALL.indexer_head_dim,) * 2
    return Tokens(*(torch.randn(count, size, generator=generator) for size in sizes))


def entries(k: Tensor, z: Tensor, ratio: int, compressor: Compressor) -> Tensor:
    """All complete entries of a sequence at once, by the formulas of the paper: (entries, dim)."""
    dim = compressor.norm_weight.shape[0]
    found = []
    for i in range(len(k) // ratio):
        own = slice(ratio * i, ratio * (i + 1))
        values, scores = k[own, -dim:], z[own, -dim:] + compressor.ape_a
        if compressor.ape_b is not None and i:
            last = slice(ratio * (i - 1), ratio * i)
            values = torch.cat((values, k[last, :dim]))
            scores = torch.cat((scores, z[last, :dim] + compressor.ape_b))
        entry = reference.entry_of(values, scores)
        found.append(
            reference.normed_and_rotated(
                entry, compressor.norm_weight, compressor.eps, compressor.cos_sin, ratio * i
            )
        )
    return torch.stack(found) if found else torch.zeros(0, dim)

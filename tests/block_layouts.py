"""KVBM's block layouts written out in torch: what block tests compare with. Spec: E.15"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """Sizes of blocks, named as KVBM names them."""

    nh: int
    nl: int
    no: int
    nt: int
    hd: int
    nb: int

    def chunk(self, layout: str) -> tuple[int, int, int]:
        return (self.nt, self.nh, self.hd) if layout == "NHD" else (self.nh, self.nt, self.hd)

    @property
    def universal(self) -> tuple[int, ...]:
        return self.nh, self.nl, self.no, self.nt, self.hd

    @property
    def operational(self) -> tuple[int, ...]:
        return self.nl, self.no, self.nt * self.nh * self.hd


def random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits."""
    bits = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), generator=generator)
    return bits.to(torch.uint8).view(dtype).view(shape)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def stack(
    dims: Dims, layout: str, dtype: torch.dtype, seed: int, make: object = random
) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [make(dims.chunk(layout), dtype, generator) for _ in range(dims.nl * dims.no)]  # type: ignore[operator]
        for _ in range(dims.nb)
    ]


def filled(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of 0xDE."""
    size = prod(shape) * dtype.itemsize
    return [
        torch.full((size,), 0xDE, dtype=torch.uint8).view(dtype).view(shape) for _ in range(count)
    ]


def filled_stack(dims: Dims, layout: str, dtype: torch.dtype) -> list[list[Tensor]]:
    return [filled(dims.nl * dims.no, dims.chunk(layout), dtype) for _ in range(dims.nb)]


def as_universal(block: list[Tensor], dims: Dims, layout: str) -> Tensor:
    """[nh, nl, no, nt, hd] of a block's chunks."""
    out = filled(1, dims.universal, block[0].dtype)[0]
    for layer in range(dims.nl):
        for outer in range(dims.no):
            chunk = block[layer * dims.no + outer]
            for head in range(dims.nh):
                out[head, layer, outer] = chunk[:, head] if layout == "NHD" else chunk[head]
    return out


def as_operational(block: list[Tensor], dims: Dims) -> Tensor:
    """[nl, no, inner] of a block's chunks."""
    out = filled(1, dims.operational, block[0].dtype)[0]
    for layer in range(dims.nl):
        for outer in range(dims.no):
            out[layer, outer] = block[layer * dims.no + outer].reshape(-1)
    return out


def same(one: Tensor, other: Tensor) -> bool:
    """The same bytes."""
    first, second = (t.cpu().contiguous().view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def all_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))

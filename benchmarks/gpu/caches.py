"""Caches as engines allocate them: one tensor for all layers, and each layer as KVX sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.places import Place
from kvx_core import CacheDesc, Layout, PoolDesc, describe

VLLM_ORDERS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")


@dataclass(frozen=True)
class Shape:
    """What one layer of a cache stores of a token, and in blocks of how many."""

    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """Of K and V as bfloat16."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    def moved_bytes(self, num_tokens: int) -> int:
        """(bytes read + bytes written) / 2 of tokens that are bfloat16 at the other end."""
        return num_tokens * self.token_bytes * (2 + self.dtype.itemsize) // 4

    def __str__(self) -> str:
        """What differs from BASE."""
        words = [f"{self.num_kv_heads} heads"] * (self.num_kv_heads != BASE.num_kv_heads)
        words += [f"dim {self.head_dim}"] * (self.head_dim != BASE.head_dim)
        words += [f"blocks of {self.block_size}"] * (self.block_size != BASE.block_size)
        words += ["fp8"] * (self.dtype != BASE.dtype)
        return ", ".join(words)


BASE = Shape()


@dataclass(frozen=True)
class Layer:
    """One layer. K and V as [block, token, head, head_dim / pack, pack], views."""

    k: Tensor
    v: Tensor
    desc: CacheDesc

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


@dataclass(frozen=True)
class Cache:
    """A model's cache."""

    shape: Shape
    layout: str
    storage: Tensor
    layers: tuple[Layer, ...]


# What is allocated, and the (K, V) of each layer in it, as Layer has them.
_Stored = tuple[Tensor, list[tuple[Tensor, Tensor]]]
_Layout = Callable[[Shape, int, int, Place], _Stored]


def new(
    layout: str,
    shape: Shape,
    num_layers: int,
    num_blocks: int,
    place: Place,
    *,
    random: bool = True,
) -> Cache:
    """A cache of random numbers, or of zeros, in one of LAYOUTS."""
    storage, layers = LAYOUTS[layout](shape, num_layers, num_blocks, place)
    if random:
        storage.copy_(torch.randn(storage.shape, dtype=torch.bfloat16, device=place.draws))
    else:
        storage.view(torch.uint8).zero_()
    described = []
    for i, (k, v) in enumerate(layers):
        halves = [place.located(describe(*_named(t))) for t in (k, v)]
        pool = None
        if layout == "trtllm":
            pool = place.located(PoolDesc.of(storage[0, i], storage[0, i, 0].nbytes))
        described.append(Layer(k, v, CacheDesc.from_kv(*halves, pool=pool)))
    return Cache(shape, layout, storage, tuple(described))


def _named(tokens: Tensor) -> tuple[Tensor, Layout]:
    if tokens.shape[3] == 1:
        return tokens[:, :, :, 0].transpose(1, 2), Layout.BLOCK_HND
    return tokens.permute(0, 2, 3, 1, 4), Layout.BLOCK_HND_PACKED


def _split(shape: Shape, num_layers: int, num_blocks: int, place: Place) -> _Stored:
    """vLLM until 0.25: [layer, K/V, block, token, head, dim]."""
    token = (shape.block_size, shape.num_kv_heads, 1, shape.head_dim)
    stored = place.empty((num_layers, 2, num_blocks, *token), shape.dtype)
    return stored, [(layer[0], layer[1]) for layer in stored]


def _vllm(order: str) -> _Layout:
    """vLLM since 0.26: [layer, block, head, token, K | V] in one of six orders."""

    def build(shape: Shape, num_layers: int, num_blocks: int, place: Place) -> _Stored:
        extents = {
            "L": num_layers,
            "B": num_blocks,
            "N": shape.block_size,
            "H": shape.num_kv_heads,
            "C": 2 * shape.head_dim,
        }
        sizes = [extents[axis] for axis in order]
        stored = place.empty(sizes, shape.dtype)
        logical = stored.permute([order.index(axis) for axis in "LBNHC"]).unsqueeze(-2)
        return stored, [layer.split(shape.head_dim, dim=-1) for layer in logical]

    return build


def _packed_x(shape: Shape, num_layers: int, num_blocks: int, place: Place) -> _Stored:
    """[layer, K/V, block, head, dim / x, token, x], x of 16 bytes."""
    x = 16 // shape.dtype.itemsize
    block = (shape.num_kv_heads, shape.head_dim // x, shape.block_size, x)
    stored = place.empty((num_layers, 2, num_blocks, *block), shape.dtype)
    tokens = stored.permute(0, 1, 2, 5, 3, 4, 6)
    return stored, [(layer[0], layer[1]) for layer in tokens]


def _transposed_v(shape: Shape, num_layers: int, num_blocks: int, place: Place) -> _Stored:
    """TGI and vLLM's legacy kernels: packed-x K, and V as [block, head, dim, token]."""
    stored, packed = _packed_x(shape, num_layers, num_blocks, place)
    block = (shape.num_kv_heads, shape.head_dim, shape.block_size)
    transposed = stored[:, 1].view(num_layers, num_blocks, *block).permute(0, 1, 4, 2, 3)
    values = transposed.unsqueeze(-2)
    return stored, [(k, v) for (k, _), v in zip(packed, values, strict=True)]


def _trtllm(shape: Shape, num_layers: int, num_blocks: int, place: Place) -> _Stored:
    """TensorRT-LLM's pool: [block, layer, K/V, head, token, dim]."""
    block = (num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    stored = place.empty((num_blocks, *block), shape.dtype)
    tokens = stored.permute(1, 2, 0, 4, 3, 5).unsqueeze(-2)
    return stored, [(layer[0], layer[1]) for layer in tokens]


LAYOUTS: dict[str, _Layout] = {
    "split": _split,
    **{order: _vllm(order) for order in VLLM_ORDERS},
    "packed-x": _packed_x,
    "transposed V": _transposed_v,
    "trtllm": _trtllm,
}


def random_blocks(num_blocks: int, place: Place) -> Tensor:
    """Every block once, in random order: (num_blocks,), int64."""
    generator = torch.Generator().manual_seed(num_blocks)
    return torch.randperm(num_blocks, generator=generator).to(place.device)

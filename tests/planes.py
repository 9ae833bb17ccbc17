"""Planes (spec E.11) as a tensor and the names of its axes, and the oracle that moves their tokens.

The oracle reads and writes one vector at a time, with those names alone.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvx_core._c import abi
from kvx_core.types import BlockTableFormat
from tests.calls import DTYPE, Backend

AXES = {"block": 0, "token": 1, "head": 2, "dim": 3}
SENTINEL = 0x5A


@dataclass
class Paged:
    """A plane in memory of its own, filled with a sentinel.

    axes: names of the tensor's axes; parts of a split axis from the outermost to the innermost
    """

    tensor: Tensor
    axes: tuple[str, ...]
    role: int = 0
    layer: int = 0
    tokens_per_entry: int = 1
    flags: int = 0
    scale: Any = None
    table: Any = None
    slots: Any = None
    kept: list[Any] = field(default_factory=list)

    def extent(self, name: str) -> int:
        sizes = [n for n, axis in zip(self.tensor.shape, self.axes, strict=True) if axis == name]
        return int(torch.tensor([1, *sizes]).prod())

    def at(self, block: int, token: int, head: int) -> tuple[Any, ...]:
        """Where a vector stands in the tensor: each axis's index, split among its parts."""
        dim = torch.arange(self.extent("dim"))
        left: dict[str, Any] = {"block": block, "token": token, "head": head, "dim": dim}
        found: list[Any] = [0] * len(self.axes)
        for i in reversed(range(len(self.axes))):
            name, extent = self.axes[i], self.tensor.shape[i]
            found[i] = left[name] % extent
            left[name] = left[name] // extent
        assert not any(torch.as_tensor(rest).any() for rest in left.values())
        return tuple(found)

    def bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.tensor.untyped_storage())

    def to_c(self, on: Backend) -> Any:
        size = self.tensor.element_size()
        struct = abi.kvx_plane_t(
            role=self.role,
            layer=self.layer,
            dtype=DTYPE[self.tensor.dtype],
            memory=on.memory,
            tokens_per_entry=self.tokens_per_entry,
            flags=self.flags,
            num_axes=len(self.axes),
            data=on.address(self.tensor),
        )
        for i, name in enumerate(self.axes):
            struct.axes[i].axis = AXES[name]
            struct.axes[i].extent = self.tensor.shape[i]
            struct.axes[i].stride_bytes = self.tensor.stride(i) * size
        for name, given in (
            ("scale", self.scale),
            ("block_table", self.table),
            ("slots", self.slots),
        ):
            if given is not None:
                setattr(struct, name, ctypes.pointer(given))
        return struct


def filled(shape: tuple[int, ...], dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A tensor in memory of its own full of the sentinel, with `gap` elements after each block."""
    size = torch.empty(0, dtype=dtype).element_size()
    per_block = int(torch.tensor(shape[1:]).prod()) + gap
    raw = torch.full((shape[0] * per_block * size,), SENTINEL, dtype=torch.uint8)
    strides = torch.empty(shape[1:]).stride()
    return raw.view(dtype).as_strided(shape, (per_block, *strides))


def table(on: Backend, rows: list[list[int]]) -> tuple[Any, Tensor]:
    indices = torch.tensor(rows, dtype=torch.int32)
    struct = abi.kvx_block_table_t(
        format=BlockTableFormat.PACKED,
        index_dtype=DTYPE[indices.dtype],
        seq_count=len(rows),
        beam_width=1,
        max_blocks_per_seq=len(rows[0]),
        indices=on.address(indices),
        indices_count=indices.numel(),
    )
    return struct, indices


@dataclass
class View:
    """One end of a migration that has planes alone, and everything that it points to."""

    planes: list[Paged]
    rows: list[list[int]] | None = None  # block ids of each sequence; None: dense
    starts: list[int] | None = None
    head_start: int = 0
    null_block: int = -1

    def to_c(self, on: Backend) -> Any:
        self.kept = [plane.to_c(on) for plane in self.planes]
        desc = abi.kvx_span_t(
            planes=abi.pointer_array(self.kept, abi.kvx_plane_t),
            num_planes=len(self.planes),
            head_start=self.head_start,
            null_block_plus_1=self.null_block + 1,
        )
        if self.rows is not None:
            made, indices = table(on, self.rows)
            desc.block_table = ctypes.pointer(made)
            self.kept += [made, indices]
        if self.starts is not None:
            starts = torch.tensor(self.starts)
            lens = on.seq_lens(starts)
            desc.starts = ctypes.pointer(lens)
            self.kept += [starts, lens]
        return desc

    def place(self, plane: Paged, sequence: int, token: int) -> tuple[int, int] | None:
        """Block and entry of a token; None for a null block."""
        token += self.starts[sequence] if self.starts else 0
        if self.rows is None:
            return sequence, token
        block_size = plane.extent("token")
        block = self.rows[sequence][token // block_size]
        return None if block in (-1, self.null_block) else (block, token % block_size)


def migrate(
    on: Backend, src: View, dst: View, lengths: list[int], num_heads: int = 0, flags: int = 0
) -> None:
    tensor = torch.tensor(lengths)
    lens, ends = on.seq_lens(tensor), [src.to_c(on), dst.to_c(on)]
    desc = abi.kvx_migrate_desc_t(
        num_heads=num_heads,
        flags=flags,
        seq_lens=ctypes.pointer(lens),
        src=ctypes.pointer(ends[0]),
        dst=ctypes.pointer(ends[1]),
    )
    on.call("kvx_migrate_kv", desc)


def check(
    on: Backend,
    src: View,
    dst: View,
    lengths: list[int],
    num_heads: int = 0,
    zero_fill: bool = False,
) -> None:
    """Migrates; every byte of both ends' memory is what one vector at a time makes of it."""
    expected = []
    for from_, to in zip(src.planes, dst.planes, strict=True):
        got, before = to.tensor, to.bytes().clone()
        to.tensor = before.view(got.dtype).as_strided(got.shape, got.stride(), got.storage_offset())
        cut = 0 if from_.flags else num_heads
        for s, length in enumerate(lengths):
            for t, h in itertools.product(range(length), range(cut or from_.extent("head"))):
                a, b = src.place(from_, s, t), dst.place(to, s, t)
                if b is None or (a is None and not zero_fill):
                    continue
                place = to.at(*b, h + (dst.head_start if cut else 0))
                to.tensor[place] = 0
                if a is not None:
                    numbers = from_.tensor[from_.at(*a, h + (src.head_start if cut else 0))]
                    to.tensor[place] = numbers.to(to.tensor.dtype)
        expected.append(before)
        to.tensor = got
    sources = [plane.bytes().clone() for plane in src.planes]
    migrate(on, src, dst, lengths, num_heads, abi.FLAG_ZERO_FILL if zero_fill else 0)
    for plane, before in zip(src.planes, sources, strict=True):
        assert torch.equal(plane.bytes(), before), "the source was written"
    for i, (plane, after) in enumerate(zip(dst.planes, expected, strict=True)):
        wrong = (plane.bytes() != after).nonzero().flatten()
        assert wrong.numel() == 0, f"plane {i}: byte {wrong[0]} of {wrong.numel()} wrong ones"


def randomize(plane: Paged, seed: int) -> None:
    """Numbers that every format of the tests holds exactly: small integers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-8, 9, tuple(plane.tensor.shape), generator=generator)
    plane.tensor.copy_(numbers.to(plane.tensor.dtype))


def bnhd(blocks: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    return Paged(filled((blocks, n, heads, dim), dtype, 8), ("block", "token", "head", "dim"))


def bhnd(blocks: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    return Paged(filled((blocks, heads, n, dim), dtype), ("block", "head", "token", "dim"))


def packed_dim(blocks: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    shape = blocks, heads, dim // 4, n, 4
    return Paged(filled(shape, dtype), ("block", "head", "dim", "token", "dim"))


def tiles(blocks: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    """vLLM's AMX pages of K: [N/16][D/2][16][2]."""
    shape = blocks, heads, n // 16, dim // 2, 16, 2
    return Paged(filled(shape, dtype), ("block", "head", "token", "dim", "token", "dim"))


def pairs(blocks: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    """vLLM's AMX pages of V: [D/16][N/2][16][2]."""
    shape = blocks, heads, dim // 16, n // 2, 16, 2
    return Paged(filled(shape, dtype), ("block", "head", "dim", "token", "dim", "token"))


def threes(blocks: int, n: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    """Tokens in parts of 3, which no power of two divides; AITER's V has parts of 16 bytes so."""
    shape = blocks, heads, n // 3, dim, 3
    return Paged(filled(shape, dtype), ("block", "head", "token", "dim", "token"))

"""Blocks of all layers in one stack, with tables of their addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvx_core._c import abi
from tests.calls import Backend

BS, HEADS, DIM, BLOCKS, LAYERS = 4, 3, 16, 7, 3


LENGTHS = (9, 0, 5)


@dataclass
class Stack:
    """Blocks of K and V of each layer, each in memory of its own or in one pool."""

    on: Backend
    blocks: list[list[Tensor]]  # [plane][block], (BS, HEADS, DIM) bfloat16
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, on: Backend, seed: int) -> Stack:
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randint(0, 2**15, (BLOCKS, 2 * LAYERS, BS, HEADS, DIM), generator=generator)
        values = pool.to(torch.int16).view(torch.bfloat16)
        return cls(on, [[values[b, p] for b in range(BLOCKS)] for p in range(2 * LAYERS)])

    def cache(self, layer: int, *, pointers: bool) -> abi.kvx_cache_desc_t:
        """One layer: a pool with block ids or, for POINTERS, any one of its blocks."""
        tensors = []
        for plane in (2 * layer, 2 * layer + 1):
            first = self.blocks[plane][0]
            stride = (2 * LAYERS * BS * HEADS * DIM, HEADS * DIM, DIM, 1)
            tensors.append(
                abi.kvx_tensor_desc_t(
                    dtype=2,
                    layout=1,
                    memory=self.on.memory,
                    ndim=4,
                    shape=abi.dims((1 if pointers else BLOCKS, BS, HEADS, DIM)),
                    stride=abi.dims(stride),
                    data=self.on.address(first),
                )
            )
        return abi.kvx_cache_desc_t(
            num_blocks=1 if pointers else BLOCKS,
            block_size=BS,
            num_kv_heads=HEADS,
            head_dim=DIM,
            k=tensors[0],
            v=tensors[1],
        )

    def view(
        self, ids: list[list[int]], *, pointers: bool, nulls: Any = (), change: Any = None
    ) -> abi.kvx_span_t:
        """`nulls`: (row, column, plane) of NULL pointers; `change`: done to the table."""
        rows, columns = len(ids), len(ids[0])
        if pointers:
            table = torch.zeros(rows, columns, 2 * LAYERS, dtype=torch.int64)
            for r, row in enumerate(ids):
                for c, block in enumerate(row):
                    for plane in range(2 * LAYERS):
                        if block >= 0 and (r, c, plane) not in nulls:
                            table[r, c, plane] = self.on.address(self.blocks[plane][block])
            if change:
                change(table)
        else:
            table = torch.tensor(ids)
        desc = abi.kvx_block_table_t(
            flags=abi.FLAG_HOLES,
            format=4 if pointers else 1,
            index_dtype=9 if pointers else 7,
            seq_count=rows,
            max_blocks_per_seq=columns,
            indices=self.on.address(table),
            indices_count=table.numel(),
        )
        layers = [self.cache(layer, pointers=pointers) for layer in range(LAYERS)]
        self.kept += [table, desc, layers]
        return abi.kvx_span_t(
            num_layers=LAYERS,
            layers=abi.pointer_array(layers, abi.kvx_cache_desc_t),
            block_table=ctypes.pointer(desc),
        )


def migrate(on: Backend, src: abi.kvx_span_t, dst: abi.kvx_span_t, *, flags: int = 0) -> None:
    lens = torch.tensor(LENGTHS)
    struct = on.seq_lens(lens)
    desc = abi.kvx_migrate_desc_t(
        flags=flags,
        seq_lens=ctypes.pointer(struct),
        src=ctypes.pointer(src),
        dst=ctypes.pointer(dst),
    )
    on.call("kvx_migrate_kv", desc)
    assert lens.tolist() == list(LENGTHS)


def tables(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks of three rows of three; the destination's differ. -1 past the end of a row."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        order = torch.randperm(BLOCKS, generator=generator).tolist()
        found.append([order[:3], [-1, -1, -1], [*order[3:5], -1]])
    return found[0], found[1]

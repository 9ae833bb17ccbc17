"""Tables of whole blocks: an address for each block, which holds all planes. Spec: E.15"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError
from tests.calls import Backend
from tests.pointer_stacks import BLOCKS, BS, DIM, HEADS, LAYERS, LENGTHS, Stack, migrate, tables

PLANES = 2 * LAYERS
# Axes of a block's buffer, and in which of them [plane, token, head, dim] stand: heads first, as in
# a universal block, planes first, as in an operational one, and planes between the rest.
ORDERS = {
    "heads first": ((HEADS, PLANES, BS, DIM), (1, 2, 0, 3)),
    "planes first": ((PLANES, BS, HEADS, DIM), (0, 1, 2, 3)),
    "planes last": ((BS, HEADS, DIM, PLANES), (3, 0, 1, 2)),
}


class Whole:
    """Blocks, each in memory of its own with all planes in it."""

    def __init__(self, on: Backend, seed: int, order: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.on, self.kept = on, []
        shape, axes = ORDERS[order]
        numbers = torch.randint(0, 2**15, (BLOCKS, *shape), generator=generator).to(torch.int16)
        self.buffers = [block.clone().view(torch.bfloat16) for block in numbers]
        self.blocks = [block.permute(axes) for block in self.buffers]  # [plane, token, head, dim]

    def span(self, ids: list[list[int]], nulls: Any = (), heads: int = HEADS) -> abi.kvx_span_t:
        layers = []
        for layer in range(LAYERS):
            k, v = (self.blocks[0][2 * layer + i][None] for i in (0, 1))
            layers.append(
                abi.kvx_cache_desc_t(
                    num_blocks=1,
                    block_size=BS,
                    num_kv_heads=HEADS,
                    head_dim=DIM,
                    k=self.on.tensor(k, 1),
                    v=self.on.tensor(v, 1),
                )
            )
        table = torch.zeros(len(ids), len(ids[0]), dtype=torch.int64)
        for r, row in enumerate(ids):
            for c, block in enumerate(row):
                if block >= 0 and (r, c) not in nulls:
                    table[r, c] = self.on.address(self.buffers[block])
        desc = abi.kvx_block_table_t(
            format=4,
            index_dtype=9,
            seq_count=len(ids),
            max_blocks_per_seq=len(ids[0]),
            indices=self.on.address(table),
            indices_count=table.numel(),
            indptr=self.on.address(self.buffers[0]),
            flags=abi.FLAG_WHOLE | abi.FLAG_HOLES,
        )
        self.kept += [table, desc, layers]
        return abi.kvx_span_t(
            num_layers=LAYERS,
            layers=abi.pointer_array(layers, abi.kvx_cache_desc_t),
            block_table=ctypes.pointer(desc),
        )


def moved(row: int, tokens: int) -> list[tuple[int, int, int]]:
    """(row, column, offset) of the tokens of a row."""
    return [(row, *divmod(token, BS)) for token in range(tokens)]


ALL = [place for row, length in enumerate(LENGTHS) for place in moved(row, length)]


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_from_a_stack_and_back(backend: Backend, seed: int, order: str) -> None:
    """Into whole blocks in which planes interleave, and out of them into another stack."""
    at_stack, at_whole = tables(seed)
    source, whole = Stack.of(backend, seed), Whole(backend, seed + 50, order)
    expected = [block.clone() for block in whole.blocks]
    migrate(backend, source.view(at_stack, pointers=True), whole.span(at_whole))
    for row, column, offset in ALL:
        for plane in range(PLANES):
            at = at_stack[row][column]
            expected[at_whole[row][column]][plane, offset] = source.blocks[plane][at][offset]
    for block, right in zip(whole.blocks, expected, strict=True):
        assert same(block, right)
    back = Stack.of(backend, seed + 99)
    rest = [[block.clone() for block in plane] for plane in back.blocks]
    migrate(backend, whole.span(at_whole), back.view(at_stack, pointers=True))
    for row, column, offset in ALL:
        for plane in range(PLANES):
            rest[plane][at_stack[row][column]][offset] = whole.blocks[at_whole[row][column]][
                plane, offset
            ]
    for plane in range(PLANES):
        for block, right in zip(back.blocks[plane], rest[plane], strict=True):
            assert same(block, right)


@pytest.mark.parametrize("zero", [False, True])
def test_between_whole_blocks_with_null_ones(backend: Backend, zero: bool) -> None:
    at_src, at_dst = tables(4)
    source, found = Whole(backend, 4, "heads first"), Whole(backend, 5, "planes last")
    expected = [block.clone() for block in found.blocks]
    flags = abi.FLAG_ZERO_FILL if zero else 0
    migrate(backend, source.span(at_src, {(0, 1)}), found.span(at_dst, {(2, 0)}), flags=flags)
    for row, column, offset in ALL:
        if (row, column) == (2, 0):
            continue
        token = source.blocks[at_src[row][column]][:, offset]
        if (row, column) == (0, 1):
            if not zero:
                continue
            token = torch.zeros_like(token)
        expected[at_dst[row][column]][:, offset] = token
    for block, right in zip(found.blocks, expected, strict=True):
        assert same(block, right)


def test_whole_blocks_that_meet_what_is_written_are_refused(backend: Backend) -> None:
    """A block of the source is 32 bytes into one that is written: between its planes, or not."""
    if not backend.looks_first:
        pytest.skip("a device does not see all blocks at once")
    at_src, at_dst = tables(7)
    source, found = Stack.of(backend, 7), Whole(backend, 8, "heads first")
    before = [block.clone() for block in found.buffers]
    target = found.buffers[at_dst[0][1]]

    def meet(table: Tensor) -> None:
        table[2, 0, 4] = backend.address(target) + 32

    with pytest.raises(InvalidArgumentError, match="those of a block that the call writes, and"):
        migrate(backend, source.view(at_src, pointers=True, change=meet), found.span(at_dst))
    for block, right in zip(found.buffers, before, strict=True):
        assert same(block, right)

"""Tables of addresses: the same bytes as PACKED tables over the same memory. Spec: E.12"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    SeqLens,
    describe,
)
from kvx_core._c import abi
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.errors import InvalidArgumentError, OutOfRangeError
from kvx_core.ops.migrate import copy_tokens
from tests.calls import Backend
from tests.pointer_stacks import BS, DIM, HEADS, LAYERS, LENGTHS, Stack, migrate, tables


def stacks(on: Backend, seed: int) -> tuple[Stack, Stack]:
    return Stack.of(on, seed), Stack.of(on, seed + 100)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("ends", ["src", "dst", "both"])
def test_bytes_are_those_of_packed(backend: Backend, seed: int, ends: str) -> None:
    at_src, at_dst = tables(seed)
    expected_from, expected = stacks(backend, seed)
    migrate(
        backend,
        expected_from.view(at_src, pointers=False),
        expected.view(at_dst, pointers=False),
    )
    source, found = stacks(backend, seed)
    migrate(
        backend,
        source.view(at_src, pointers=ends != "dst"),
        found.view(at_dst, pointers=ends != "src"),
    )
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        for block, right in zip(one, other, strict=True):
            assert torch.equal(block.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("zero", [False, True])
def test_a_null_pointer_is_a_null_block_of_its_plane_alone(backend: Backend, zero: bool) -> None:
    at_src, at_dst = tables(5)
    source, found = stacks(backend, 5)
    before = [[block.clone() for block in plane] for plane in found.blocks]
    migrate(
        backend,
        source.view(at_src, pointers=True, nulls={(0, 1, 3)}),
        found.view(at_dst, pointers=True, nulls={(2, 0, 4)}),
        flags=abi.FLAG_ZERO_FILL if zero else 0,
    )
    for plane in range(2 * LAYERS):
        expected = [block.clone() for block in before[plane]]
        for row, length in enumerate(LENGTHS):
            for token in range(length):
                column, offset = divmod(token, BS)
                if (row, column, plane) == (2, 0, 4):
                    continue
                moved = source.blocks[plane][at_src[row][column]][offset]
                if (row, column, plane) == (0, 1, 3):
                    if not zero:
                        continue
                    moved = torch.zeros_like(moved)
                expected[at_dst[row][column]][offset] = moved
        for block, right in zip(found.blocks[plane], expected, strict=True):
            assert torch.equal(block.view(torch.int16), right.view(torch.int16))


def test_a_misaligned_pointer_is_refused_before_any_write(backend: Backend) -> None:
    at_src, at_dst = tables(6)
    source, found = stacks(backend, 6)
    before = [[block.clone() for block in plane] for plane in found.blocks]

    def shift(table: Tensor) -> None:
        table[0, 1, 2] += 2

    views = source.view(at_src, pointers=True, change=shift), found.view(at_dst, pointers=True)
    message = r"src\.block_table\.indices\[8\] is 0x[0-9a-f]+, expected NULL or an address that is"
    with pytest.raises(OutOfRangeError, match=message):
        migrate(backend, *views)
    if backend.looks_first:
        for one, other in zip(found.blocks, before, strict=True):
            for block, right in zip(one, other, strict=True):
                assert torch.equal(block.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("which", ["twice", "source"])
def test_blocks_that_meet_what_is_written_are_refused(backend: Backend, which: str) -> None:
    if not backend.looks_first:
        pytest.skip("a device does not see all blocks at once")
    at_src, at_dst = tables(7)
    source, found = stacks(backend, 7)
    before = [[block.clone() for block in plane] for plane in found.blocks]

    def meet(table: Tensor) -> None:
        table[0, 0, 1] = (
            table[2, 0, 4] + 32
            if which == "twice"
            else backend.address(source.blocks[0][at_src[0][0]])
        )

    views = source.view(at_src, pointers=True), found.view(at_dst, pointers=True, change=meet)
    with pytest.raises(
        InvalidArgumentError, match="are those of a block that the call writes, and"
    ):
        migrate(backend, *views)
    for one, other in zip(found.blocks, before, strict=True):
        for block, right in zip(one, other, strict=True):
            assert torch.equal(block.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("interleaved", [False, True])
def test_from_python(interleaved: bool) -> None:
    """Blocks given as tensors, and a table that keeps them alive.

    interleaved: V's vectors follow K's at the destination, so that the blocks of the two overlap
    """
    values = torch.randn(3, 2, 1, BS, HEADS, DIM)  # [block][K, V]
    blocks = [[block[0].clone(), block[1].clone()] for block in values]
    layer = CacheDesc.from_kv(*(describe(half, "BLOCK_NHD") for half in blocks[0]))
    table = BlockTable.pointers([[blocks[2], [None, None], blocks[0]]]).with_holes()
    assert repr(table) == "BlockTable(1 sequence x 3 blocks, POINTERS, uint64)"
    end = CacheView((layer,), CacheFacts()).at(block_table=table)
    del blocks
    if interleaved:
        out = torch.full((1, 12, HEADS, 2, DIM), -1.0).permute(0, 3, 1, 2, 4)
    else:
        out = torch.full((1, 2, 12, HEADS, DIM), -1.0)
    dense = CacheDesc.from_kv(*(describe(out[:, kv], "BLOCK_NHD") for kv in (0, 1)))
    copy_tokens(end, CacheView((dense,), CacheFacts(), dense=True).at(), SeqLens.of([11]))
    for kv in (0, 1):
        assert torch.equal(out[0, kv, :4], values[2, kv, 0])
        assert torch.equal(out[0, kv, 4:8], torch.full((4, HEADS, DIM), -1.0))
        assert torch.equal(out[0, kv, 8:11], values[0, kv, 0, :3])
    assert (out[:, :, 11] == -1).all()
    found = find_tokens(end, SeqLens.of([11]))
    assert (found["block"] >= 0).tolist() == [True] * 4 + [False] * 4 + [True] * 3
    assert found["offset"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gather(backend: Backend, seed: int) -> None:
    """Layer 0 alone: an address for K and one for V of each block."""
    source, ids = Stack.of(backend, seed), tables(seed)[0]
    table = torch.zeros(3, 3, 2, dtype=torch.int64)
    for row, column in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 1)):
        for plane in (0, 1):
            table[row, column, plane] = backend.address(source.blocks[plane][ids[row][column]])
    table[0, 1, 1] = 0
    key, value = torch.full((2, 3, 9, HEADS, DIM), -1.0, dtype=torch.bfloat16)
    lens = torch.tensor(LENGTHS)
    gather = abi.kvx_gather_desc_t(
        io=backend.io(key, value, 27),
        block_table=abi.kvx_block_table_t(
            flags=abi.FLAG_HOLES,
            format=4,
            index_dtype=9,
            seq_count=3,
            max_blocks_per_seq=3,
            indices=backend.address(table),
            indices_count=18,
        ),
        seq_lens=backend.seq_lens(lens),
        max_seq_len=9,
    )
    backend.call("kvx_gather_kv", source.cache(0, pointers=True), gather)
    for plane, out in enumerate((key, value)):
        expected = torch.full_like(out, -1.0)
        for row, length in enumerate(LENGTHS):
            for token in range(length):
                column, offset = divmod(token, BS)
                if (row, column, plane) != (0, 1, 1):
                    expected[row, token] = source.blocks[plane][ids[row][column]][offset]
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_rows_without_a_block_do_not_say_how_many_planes_there_are() -> None:
    with pytest.raises(
        InvalidArgumentError, match="blocks has 2 rows without a block, expected at"
    ):
        BlockTable.pointers([[], []])
    assert BlockTable.pointers([]).seq_count == 0


def test_tokens_without_a_whole_block_are_not_passed_over() -> None:
    block = torch.zeros(2, 4)
    with pytest.raises(
        InvalidArgumentError, match="blocks has 1 rows without a block, expected at"
    ):
        BlockTable.whole_blocks([[]], block)
    assert BlockTable.whole_blocks([], block).seq_count == 0
    assert BlockTable.whole_blocks([[block], []], block).seq_count == 2

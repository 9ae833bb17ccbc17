"""Blocks of more bytes than caches hold, which the CPU copies block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvx_core
from kvx_core import CacheDesc, CacheFacts, CacheView, describe, migrate
from kvx_core.blocks import block_stack, operational_blocks, universal_blocks
from tests.block_layouts import (
    Dims,
    all_same,
    as_operational,
    as_universal,
    filled,
    filled_stack,
    stack,
)

DIMS = Dims(nh=3, nl=3, no=2, nt=16, hd=72, nb=450)  # 18.7 MB
LENGTHS = [16 * 200, 16 * 149 + 5, 16 * 100 - 7]  # of three sequences
COUNTS = [200, 150, 100]  # their blocks
BF16 = torch.bfloat16


def expected(wholes: list[Any], axis: int) -> list[Any]:
    """Blocks without the tokens that no sequence has: 0xDE there."""
    first = 0
    for length, count in zip(LENGTHS, COUNTS, strict=True):
        for i in range(count):
            held = min(max(length - 16 * i, 0), 16)
            view = wholes[first + i].movedim(axis, 0)
            view[held:] = filled(1, tuple(view[held:].shape), view.dtype)[0]
        first += count
    return wholes


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_stacks_and_universal_blocks(layout: str, threads: int) -> None:
    blocks = stack(DIMS, layout, BF16, 1)
    right = expected([as_universal(block, DIMS, layout) for block in blocks], 3)
    universals, back = filled(DIMS.nb, DIMS.universal, BF16), filled_stack(DIMS, layout, BF16)
    kvx_core.set_num_threads(threads)
    try:
        src = block_stack(blocks, layout, blocks_per_seq=COUNTS)
        migrate(src, universal_blocks(universals, blocks_per_seq=COUNTS), LENGTHS, same_model=True)
        assert all_same(universals, right)
        dst = block_stack(back, layout, blocks_per_seq=COUNTS)
        migrate(universal_blocks(right, blocks_per_seq=COUNTS), dst, LENGTHS, same_model=True)
    finally:
        kvx_core.set_num_threads(0)
    assert all_same([as_universal(block, DIMS, layout) for block in back], right)


@pytest.mark.parametrize("threads", [1, 3])
def test_stacks_and_operational_blocks(threads: int) -> None:
    blocks, chunk = stack(DIMS, "NHD", BF16, 2), DIMS.chunk("NHD")
    shape = (DIMS.nl, DIMS.no, *chunk)
    wholes = [as_operational(block, DIMS).view(shape) for block in blocks]
    right = [t.view(DIMS.operational) for t in expected(wholes, 2)]
    operationals, back = filled(DIMS.nb, DIMS.operational, BF16), filled_stack(DIMS, "NHD", BF16)
    kvx_core.set_num_threads(threads)
    try:
        src = block_stack(blocks, blocks_per_seq=COUNTS)
        dst = operational_blocks(operationals, chunk, blocks_per_seq=COUNTS)
        migrate(src, dst, LENGTHS, same_model=True)
        assert all_same(operationals, right)
        src = operational_blocks(right, chunk, blocks_per_seq=COUNTS)
        migrate(src, block_stack(back, blocks_per_seq=COUNTS), LENGTHS, same_model=True)
    finally:
        kvx_core.set_num_threads(0)
    assert all_same([as_operational(block, DIMS) for block in back], right)


def test_pools_whose_blocks_have_all_layers() -> None:
    """Of 500 and 460 blocks, in any order; blocks that nobody writes stay as they are."""
    generator = torch.Generator().manual_seed(3)
    facts = CacheFacts(fingerprint="a model", rotary="half", rotary_dim=72, rope_applied=True)

    def view(pool: torch.Tensor) -> CacheView:
        layers = [
            CacheDesc.from_kv(*(describe(pool[:, la, o], "BLOCK_NHD") for o in range(2)))
            for la in range(3)
        ]
        return CacheView(tuple(layers), facts)

    shape = (3, 2, 16, 3, 72)  # layer, K or V, token, head, dim
    source = torch.randint(0, 99, (500, *shape), generator=generator, dtype=torch.uint8)
    pool = filled(460, shape, torch.uint8)
    into = torch.stack(pool)
    ids = torch.randperm(500, generator=generator)[:450], torch.randperm(460, generator=generator)
    right = into.clone()
    for a, b in zip(ids[0].tolist(), ids[1].tolist(), strict=False):
        right[b] = source[a]
    wide = [t.repeat(1, 1, 1, 1, 1, 2).view(BF16) for t in (source, into, right)]  # 37 MB
    src, dst = view(wide[0]), view(wide[1])
    tables = [t[:450].view(1, -1) for t in ids]
    migrate(src.at(block_table=tables[0]), dst.at(block_table=tables[1]), [450 * 16])
    assert torch.equal(wide[1].view(torch.uint8), wide[2].view(torch.uint8))

"""Blocks whose load has failed, by a model that is obvious: which tokens of a block are good."""

from __future__ import annotations

import random

import pytest

from kvx_adapters.vllm_plugin.spoilt import SpoiltBlocks

SIZE = 8


def test_a_block_that_nobody_computed_is_read() -> None:
    spoilt = SpoiltBlocks(SIZE)
    assert not spoilt
    spoilt.failed([3, 5])
    assert spoilt
    assert not computes(spoilt, [1, 2], 0, 12)
    assert computes(spoilt, [1, 3, 4], 16, 20)  # after a hit of two blocks
    assert not computes(spoilt, [3], 0, 8)
    assert not computes(spoilt, [1, 3, 4], 16, 20)
    assert computes(spoilt, [5, 6], 8, 9)
    spoilt.loads([9, 5], 8, 16)
    assert not spoilt


def test_a_block_that_is_computed_in_parts() -> None:
    spoilt = SpoiltBlocks(SIZE)
    spoilt.failed([3])
    assert not computes(spoilt, [3], 0, 5)
    assert computes(spoilt, [3, 4], 8, 9), "its last three tokens are not computed"
    assert not computes(spoilt, [3], 5, 8)
    assert not spoilt


def test_blocks_come_one_by_one() -> None:
    spoilt = SpoiltBlocks(SIZE)
    spoilt.failed([3])
    spoilt.gets("r", 0, [1])
    spoilt.gets("r", 1, [3])
    assert not spoilt.computes("r", 4, SIZE)  # before it
    assert not spoilt.computes("r", SIZE, SIZE + 2)
    assert not spoilt.computes("r", SIZE + 2, SIZE + 3)
    spoilt.failed([1])
    spoilt.gets("r", 0, [1, 3])
    assert spoilt.computes("r", SIZE + 3, SIZE + 4)
    spoilt.ends("r")
    assert not spoilt.computes("r", SIZE + 3, SIZE + 4)


def computes(spoilt: SpoiltBlocks, block_ids: list[int], start: int, stop: int) -> bool:
    """A step of a request that has these blocks."""
    spoilt.gets("request", 0, block_ids)
    return spoilt.computes("request", start, stop)


@pytest.mark.parametrize("seed", range(3))
def test_against_tokens(seed: int) -> None:
    """Each token of a block is good or not; requests compute runs of their tokens."""
    chance = random.Random(seed)
    spoilt, good = SpoiltBlocks(SIZE), {block: [True] * SIZE for block in range(6)}
    for _ in range(4000):
        blocks = chance.sample(range(6), 3)
        start = chance.choice([0, 3, SIZE, SIZE + 5, 2 * SIZE])
        stop = start + chance.randrange(1, 3 * SIZE - start + 1)
        if chance.random() < 0.3:
            spoilt.failed(blocks[:2])
            good.update({block: [False] * SIZE for block in blocks[:2]})
        elif chance.random() < 0.1:
            spoilt.loads(blocks, SIZE, 2 * SIZE)
            good[blocks[1]] = [True] * SIZE
        else:
            read = [good[blocks[i // SIZE]][i % SIZE] for i in range(start)]
            told = computes(spoilt, blocks, start, stop)
            assert told is not all(read)
            for i in range(start, stop):
                block = good[blocks[i // SIZE]]
                if all(block[: i % SIZE]):  # what follows tokens that are not good is not counted
                    block[i % SIZE] = True

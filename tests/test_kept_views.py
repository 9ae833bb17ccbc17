"""One pair of views in random calls of every kind, with tables right and wrong.

Calls keep what they have found of two views (ops/bound_migration.py), and live migrations and plans
keep state of their own: what one call has kept must not change what another does. The oracle copies
tokens one by one with torch's indexing; where a token has no place, or two have the same, the call
must be refused and write nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheSpan,
    CacheView,
    KvxError,
    Plan,
    Section,
    Snapshot,
    describe,
    migrate,
)
from kvx_core.ops.live import LiveMigration
from tests.facts import SAME_MODEL

HEADS, DIM, STEPS = 2, 4, 300
FACTS = replace(SAME_MODEL, first_kv_head=0, total_kv_heads=HEADS)
KINDS = ("table", "numpy", "ragged", "slots")
Place = tuple[int, int]  # block, offset


@dataclass
class Pool:
    """Two layers of blocks."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    kept: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # tables, by their width

    def __post_init__(self) -> None:
        shape = 2, 2, self.num_blocks, self.block_size, HEADS, DIM
        self.memory = torch.randint(-99, 99, shape).to(self.dtype)
        halves = [[describe(t, "BLOCK_NHD") for t in layer] for layer in self.memory]
        self.view = CacheView(tuple(CacheDesc.from_kv(k, v) for k, v in halves), FACTS)

    def row(self, rng: random.Random, num_tokens: int) -> list[int]:
        """The blocks of a sequence: now and then one twice, one that is not there, or one less."""
        blocks = rng.sample(range(self.num_blocks), -(-num_tokens // self.block_size))
        i, fault = rng.randrange(len(blocks)), rng.random()
        if fault < 0.15:
            blocks[i] = rng.choice(blocks)
        elif fault < 0.25:
            blocks[i] = rng.choice((-1, self.num_blocks, 2**31 - 1))
        elif fault < 0.3:
            del blocks[-1]
        return blocks

    def places(self, blocks: list[int], num_tokens: int) -> list[Place] | None:
        """Where the tokens are; None: some are nowhere."""
        needed = -(-num_tokens // self.block_size)
        if len(blocks) < needed or not all(0 <= b < self.num_blocks for b in blocks[:needed]):
            return None
        return [(blocks[t // self.block_size], t % self.block_size) for t in range(num_tokens)]

    def span(self, kind: str, blocks: list[int], num_tokens: int) -> CacheSpan:
        """The sequence by a lookup of this kind; a numpy table is one array, written in place."""
        if kind == "table" or len(blocks) * self.block_size < num_tokens:
            return self.view.at([blocks])
        if kind == "numpy":
            table = self.kept.setdefault(len(blocks), np.zeros((1, len(blocks)), np.int64))
            table[0] = blocks
            return self.view.at(table)
        of_tokens = [blocks[t // self.block_size] for t in range(num_tokens)]
        if kind == "ragged":
            return self.view.at(BlockTable.ragged(of_tokens, [0, num_tokens]))
        slots = [b * self.block_size + t % self.block_size for t, b in enumerate(of_tokens)]
        return self.view.at(slots=slots)


def move(rng: random.Random, how: str, src: CacheSpan, dst: CacheSpan, num_tokens: int) -> None:
    if how == "migrate":
        migrate(src, dst, [num_tokens])
    elif how == "plan":
        with Plan.migrate(src, dst, [num_tokens]) as plan:
            plan.run()
    elif how == "live":
        moving = LiveMigration(dst)
        moving.copy(src, rng.randint(0, num_tokens))
        moving.finish(src, num_tokens)
    else:
        snapshot = Snapshot.capture(range(num_tokens), [Section((0, 1), src.view, src.block_table)])
        assert snapshot is not None
        snapshot.restore(Section((0, 1), dst.view, dst.block_table), 0, num_tokens)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_calls_on_the_same_two_views(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    src, dst = Pool(9, 4, torch.float32), Pool(13, 3, torch.bfloat16)
    moved = refused = 0
    for _ in range(STEPS):
        num_tokens = rng.randint(1, 20)
        here, there = src.row(rng, num_tokens), dst.row(rng, num_tokens)
        kinds = rng.choice(KINDS), rng.choice(KINDS)
        ways = ["migrate", "plan", "live"] + ["snapshot"] * ("slots" not in kinds)
        how = rng.choice(ways)
        from_, to = src.places(here, num_tokens), dst.places(there, num_tokens)
        is_right = from_ is not None and to is not None and len(set(to)) == len(to)
        is_null = -1 in here + there
        if is_null and ("slots" in kinds or how == "snapshot"):
            continue  # such tokens are left out
        before, after = src.memory.clone(), dst.memory.clone()
        if is_right:
            for one, other in zip(from_ or (), to or (), strict=True):
                after[:, :, *other] = src.memory[:, :, *one].to(dst.dtype)
        told = f"{how} of {num_tokens} tokens from {kinds[0]} {here} to {kinds[1]} {there}"
        error: KvxError | None = None
        try:
            ends = src.span(kinds[0], here, num_tokens), dst.span(kinds[1], there, num_tokens)
            move(rng, how, *ends, num_tokens)
            moved += 1
        except KvxError as raised:
            error, refused = raised, refused + 1
        assert (error is None) == is_right, f"{told}: {error}"
        if error is not None and how == "live":  # its first call may have copied some
            dst.memory.copy_(after)
        assert torch.equal(dst.memory, after), told
        assert torch.equal(src.memory, before), told
    assert min(moved, refused) > STEPS // 5

"""Random block tables and slots of every format, with poison where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tests.caches import Cache
from tests.reference import KvOffsets, Packed, Ragged

POISON = 0x7FFF_FFFF  # a block id that no cache has


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


Table = TypeVar("Table", Packed, Ragged, KvOffsets)


def with_entry(table: Table, at: tuple[int, ...], entry: int) -> Table:
    """The table with another entry in one place."""
    indices = table.indices.clone()
    indices[at] = entry
    return replace(table, indices=indices)


class Blocks:
    """A shuffled supply of block ids: each once, or again and again where sharing is allowed."""

    def __init__(self, num_blocks: int, seed: int, *, shared: bool, first: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_blocks, generator=self.generator)
        self.free = [int(block) for block in order if block >= first]
        self.shared = shared

    def take(self) -> int:
        if self.shared:
            return self.free[int(torch.randint(len(self.free), (), generator=self.generator))]
        return self.free.pop()

    def chance(self, probability: float) -> bool:
        return bool(torch.rand((), generator=self.generator) < probability)


def packed(
    cache: Cache,
    seq_ends: Sequence[int],
    seed: int,
    *,
    shared: bool = True,
    nulls: float = 0.0,
    null_block_id: int = -1,
    dtype: torch.dtype = torch.int32,
    starts: Sequence[int] | None = None,
) -> Packed:
    """A table for sequences whose tokens are [starts[s], seq_ends[s]); the rest is poison."""
    blocks = Blocks(cache.num_blocks, seed, shared=shared, first=null_block_id + 1)
    columns = max((blocks_for(end, cache.block_size) for end in seq_ends), default=0) + 2
    indices = torch.full((len(seq_ends), columns), POISON, dtype=dtype)
    for s, end in enumerate(seq_ends):
        first = (starts[s] if starts else 0) // cache.block_size
        for column in range(first, blocks_for(end, cache.block_size)):
            if blocks.chance(nulls):
                indices[s, column] = null_block_id if blocks.chance(0.5) else -1 - s
            else:
                indices[s, column] = blocks.take()
    return Packed(indices, cache.block_size, null_block_id)


def ragged(
    cache: Cache,
    seq_ends: Sequence[int],
    seed: int,
    *,
    shared: bool = True,
    nulls: float = 0.0,
    null_block_id: int = -1,
    dtype: torch.dtype = torch.int32,
    starts: Sequence[int] | None = None,
) -> Ragged:
    """The same blocks as `packed`, spelled once per token; each row holds 3 more tokens, poison."""
    table = packed(
        cache,
        seq_ends,
        seed,
        shared=shared,
        nulls=nulls,
        null_block_id=null_block_id,
        dtype=dtype,
        starts=starts,
    )
    rows = []
    for s, end in enumerate(seq_ends):
        row = table.indices[s, torch.arange(end) // cache.block_size]
        rows += [row, torch.full((3,), POISON, dtype=dtype)]
    counts = torch.tensor([0, *(end + 3 for end in seq_ends)])
    indptr = counts.cumsum(0).to(torch.int64 if dtype == torch.int32 else torch.int32)
    indices = torch.cat(rows) if rows else torch.empty(0, dtype=dtype)
    return Ragged(indices, indptr, cache.block_size, null_block_id)


def kv_offsets(
    cache: Cache,
    seq_ends: Sequence[int],
    seed: int,
    *,
    beams: int = 1,
    shared: bool = True,
    nulls: float = 0.0,
    secondary: bool = True,
    starts: Sequence[int] | None = None,
) -> KvOffsets:
    """TensorRT-LLM's table; about half of the blocks are in the secondary pool if there is one.

    K and V of a logical block may lie in different blocks: the two halves of the table are free.
    """
    primary = [Blocks(cache.num_blocks, seed + kv, shared=shared) for kv in range(2)]
    pool = cache.layers[0].k.secondary
    spare = [
        Blocks(0 if pool is None else pool.shape[0], seed + 10 + kv, shared=shared)
        for kv in range(2)
    ]
    columns = max((blocks_for(end, cache.block_size) for end in seq_ends), default=0) + 1
    indices = torch.full((len(seq_ends), beams, 2, columns), POISON, dtype=torch.int64)
    for s, end in enumerate(seq_ends):
        first = (starts[s] if starts else 0) // cache.block_size
        for beam in range(beams):
            for kv in range(2):
                for column in range(first, blocks_for(end, cache.block_size)):
                    here, there = primary[kv], spare[kv]
                    use_spare = secondary and bool(there.free) and here.chance(0.5)
                    use_spare = use_spare or not here.free
                    if here.chance(nulls):
                        index = -1
                    elif use_spare:
                        index = (there.take() * cache.sub_blocks + kv) | -(1 << 31)
                    else:
                        index = here.take() * cache.sub_blocks + kv
                    indices[s, beam, kv, column] = index
    return KvOffsets(indices.to(torch.int32), cache.block_size, cache.sub_blocks)


def slots(
    cache: Cache,
    count: int,
    seed: int,
    *,
    skipped: float = 0.25,
    invalid_slot: int = -1,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Different slots in random order; a token without one is negative or `invalid_slot`."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randperm(cache.num_blocks * cache.block_size, generator=generator)
    every = every[every != invalid_slot][:count]
    out = every.clone()
    for i in range(len(out)):
        if torch.rand((), generator=generator) < skipped:
            out[i] = invalid_slot if i % 2 else -1 - i
    return out.to(dtype)

"""Every engine against KVBM's block layouts: the cache of an engine moves into block stacks and
universal blocks, which must then equal what torch's indexing writes, and back into an empty cache.

The engines and their caches are those of the engine matrix. Blocks are named by their addresses, so
the calls run on the CPU: a mirror of device memory has other addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvx_core import CacheFacts, CacheSpan, migrate, verify
from kvx_core.blocks import block_stack, universal_blocks
from tests.engines import ENGINES, SENTINEL
from tests.engines.test_engine_matrix import (
    DIM,
    NUM_LAYERS,
    Tokens,
    assert_same_memory,
    end_of,
    holding,
    some_tokens,
)

BLOCK_SIZE = 16
DTYPES = {"universal": torch.bfloat16, "NHD": torch.float16, "HND": torch.float32}


def of_sentinels(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raw = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), SENTINEL, dtype=torch.uint8)
    return raw.view(dtype)


class Blocks:
    """Sequences of random tokens in blocks of one of KVBM's layouts, each a tensor or some."""

    def __init__(self, layout: str, tokens: Tokens, lengths: Sequence[int]) -> None:
        self.layout, self.tokens, self.lengths = layout, tokens, lengths
        self.per_seq = [-(-length // BLOCK_SIZE) for length in lengths]
        self.halves = [half for half in (tokens.key, tokens.value) if half is not None]
        heads, dtype = tokens.key.shape[2], tokens.key.dtype
        shapes = {
            "universal": (heads, NUM_LAYERS, len(self.halves), BLOCK_SIZE, DIM),
            "NHD": (NUM_LAYERS, len(self.halves), BLOCK_SIZE, heads, DIM),
            "HND": (NUM_LAYERS, len(self.halves), heads, BLOCK_SIZE, DIM),
        }
        self.blocks = [of_sentinels(shapes[layout], dtype) for _ in range(sum(self.per_seq))]

    def span(self, facts: CacheFacts) -> CacheSpan:
        if self.layout == "universal":
            return universal_blocks(self.blocks, blocks_per_seq=self.per_seq, facts=facts)
        stacks = [list(block.flatten(0, 1).unbind()) for block in self.blocks]
        no, counts = len(self.halves), self.per_seq
        return block_stack(stacks, self.layout, no=no, blocks_per_seq=counts, facts=facts)

    def fill(self) -> None:
        """Writes every token with torch alone."""
        i = block = 0
        for length, count in zip(self.lengths, self.per_seq, strict=True):
            for token in range(length):
                to, offset = self.blocks[block + token // BLOCK_SIZE], token % BLOCK_SIZE
                for chunk, half in enumerate(self.halves):
                    row = half[:, i]  # (num_layers, heads, dim)
                    if self.layout == "universal":
                        to[:, :, chunk, offset] = row.transpose(0, 1)
                    elif self.layout == "NHD":
                        to[:, chunk, offset] = row
                    else:
                        to[:, chunk, :, offset] = row
                i += 1
            block += count


@pytest.mark.parametrize("layout", DTYPES)
@pytest.mark.parametrize("name", ENGINES)
def test_there_and_back(name: str, layout: str) -> None:
    seed, dtype = [*DTYPES].index(layout), DTYPES[layout]
    end = end_of(name, "first", seed, dtype)
    tokens = some_tokens(seed, dtype, end.sizes.num_kv_heads, not end.engine.mla)
    source, returned = holding(end, tokens), end.empty()
    saved, expected = (Blocks(layout, tokens, end.lengths) for _ in range(2))
    expected.fill()
    span = saved.span(source.view.facts)
    migrate(end.span(source), span, end.lengths)
    for got, wanted in zip(saved.blocks, expected.blocks, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert verify(end.span(source), span, end.lengths)
    migrate(span, end.span(returned), end.lengths)
    assert_same_memory(returned, source)

"""A plain paged cache in numpy, to which an engine's tokens move and from which they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvx_conformance import device, memory
from kvx_conformance.engine import Floats
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    DType,
    Memory,
    TensorDesc,
    describe,
)

BLOCK_SIZE = 5  # of no engine
_SENTINEL = 0x3C
_STORED = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: np.float16}


class Plain:
    """Room for sequences of `lengths` tokens: blocks of 5 tokens in no order, K and V apart.

    Its dtypes are those of `like`, and float32 for formats with scales: it then has the numbers
    that the engine's bytes stand for. Every byte is 0x3C when it is made.
    """

    def __init__(
        self, like: CacheView, facts: CacheFacts, lengths: Sequence[int], firsts: Sequence[int] = ()
    ) -> None:
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        order = np.random.default_rng(sum(lengths)).permutation(sum(counts) + 3).tolist()
        self.rows = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
        self.firsts = [*firsts] or [0] * len(lengths)
        layers = []
        for layer in like.layers:
            k = _tensor(layer.k, len(order), layer.num_kv_heads, layer.head_dim)
            v = layer.v and _tensor(layer.v, len(order), layer.num_kv_heads, layer.v_head_dim)
            layers.append(CacheDesc.from_kv(k, v))
        own = replace(facts, engine="a plain cache", scale_convention=None, lossy=None)
        self.view = CacheView(tuple(layers), own)
        memory.fill(self.view, _SENTINEL)

    @property
    def span(self) -> CacheSpan:
        """Its sequences, from the first token that each holds."""
        return self.at(self.view)

    def at(self, view: CacheView) -> CacheSpan:
        """The same sequences of a view that differs in facts."""
        width = max(map(len, self.rows))
        table = [[*row, *[-1] * (width - len(row))] for row in self.rows]
        return view.at(table, first_positions=self.firsts)

    def token(self, sequence: int, token: int) -> tuple[Floats, Floats | None]:
        """K and V of a token, (num_layers, num_kv_heads, head_dim)."""
        block = self.rows[sequence][token // BLOCK_SIZE]
        found = {
            kv: np.stack(
                [
                    memory.numbers(self.view, layer, kv, block, token % BLOCK_SIZE)
                    for layer in range(len(self.view.layers))
                ]
            )
            for kv in "KV"
            if kv == "K" or self.view.layers[0].v is not None
        }
        return found["K"], found.get("V")


def _tensor(like: TensorDesc, num_blocks: int, heads: int, dim: int) -> TensorDesc:
    """In the memory that `like` has, for a call runs in one place."""
    zeros = device.zeros if like.memory is Memory.DEVICE else np.zeros
    shape = [num_blocks, BLOCK_SIZE, heads, dim]
    if like.dtype.numbers > 1 and not like.dtype.format.affine:
        shape[-1] = dim // like.dtype.numbers * like.dtype.itemsize
        found = describe(zeros(shape, np.uint8), "BLOCK_NHD", dtype=like.dtype)
    else:
        dtype = like.dtype if like.dtype in _STORED else DType.F32
        found = describe(zeros(shape, _STORED[dtype]), "BLOCK_NHD", dtype=dtype)
    return replace(found, memory=like.memory)

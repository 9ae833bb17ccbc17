"""Engine: the cache of an engine, for the engine matrix and the drawings of docs/layouts.md.

Each module of this package has one engine: it allocates a cache as the engine does, describes it
with the adapter, and writes tokens by the engine's own indexing, without KVX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvx_core import CacheFacts, CacheSpan, CacheView

SENTINEL = 0x5A  # every byte of a new cache
FINGERPRINT = "of one model"
E4M3, E5M2 = FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of a cache. An engine that has one block size takes that, whatever is asked."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int  # held here
    head_dim: int  # MLA: of the latent and its rotary part
    dtype: torch.dtype
    first_kv_head: int = 0  # in the model
    total_kv_heads: int | None = None  # of the model; None: num_kv_heads
    scales: tuple[tuple[float, float], ...] | None = None  # FP8: of K and V, per layer; None: 1

    @property
    def heads_of_model(self) -> int:
        return self.total_kv_heads or self.num_kv_heads

    @property
    def k_scales(self) -> list[float] | None:
        """Per layer; None unless the cache is FP8."""
        return self._scales(0)

    @property
    def v_scales(self) -> list[float] | None:
        return self._scales(1)

    def _scales(self, kv: int) -> list[float] | None:
        if self.dtype not in FP8:
            return None
        return [pair[kv] for pair in self.scales or ((1.0, 1.0),) * self.num_layers]


class EngineCache(Protocol):
    """The cache of one engine, every byte of it SENTINEL when it is made."""

    view: CacheView
    raw: Sequence[Tensor]  # uint8: every byte that was allocated
    block_size: int
    blocks: Sequence[int]  # that sequences may use: the engine reserves the others

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        """Where sequences lie, in the engine's own kind of table, with poison for padding.

        sequences: the blocks of each, ceil(seq_len / block_size) of them
        """

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor | None
    ) -> None:
        """Stores tokens as the engine does.

        blocks, offsets: (num_tokens,), int64: token i goes to offset offsets[i] of blocks[i]
        key, value:      (num_tokens, num_kv_heads, head_dim), of the cache's dtype; value is None
                         with MLA
        """


@dataclass(frozen=True)
class Engine:
    """How to make the cache of one engine, and what it can hold."""

    build: Callable[[Sizes], EngineCache]
    block_size: int  # its own or a usual one
    dtypes: tuple[torch.dtype, ...]
    unscaled: tuple[torch.dtype, ...] = ()  # those of FP8 that it stores without a scale
    one_scale: bool = False  # of FP8, shared by K and V
    mla: bool = False  # one latent head, no V
    whole: bool = False  # holds all heads of the model, never a rank's share
    in_order: bool = False  # sequence s is block s


@dataclass(frozen=True)
class Refused:
    """A cache of an engine that no view can describe, so that it has no pair."""

    build: Callable[[Sizes], EngineCache]  # raises UnsupportedError
    reason: str  # what the message says among other things
    dtype: torch.dtype = torch.bfloat16


def facts_of(sizes: Sizes, engine: str) -> CacheFacts:
    """Of a cache whose keys are rotated in halves, and nothing else is special."""
    return CacheFacts(
        engine=engine,
        fingerprint=FINGERPRINT,
        rotary="half",
        rotary_dim=sizes.head_dim,
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=sizes.num_layers,
        first_layer=0,
        window=0,
        total_kv_heads=sizes.heads_of_model,
        first_kv_head=sizes.first_kv_head,
    )


def filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new allocation in which every byte is SENTINEL."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), SENTINEL, dtype=torch.uint8).view(dtype).view(*shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """Every byte of the allocation behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def poisoned_table(sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> Tensor:
    """(num_seqs, max_blocks + 1): the blocks of each sequence, then what must never be read."""
    width = max(map(len, sequences)) + 1
    table = torch.full((len(sequences), width), 0x7FFF_FFFF, dtype=dtype)
    for row, blocks in zip(table, sequences, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=dtype)
    return table

"""Which request holds which blocks, in all layers.

Layers of one type have as many entries after as many tokens, so that entries are counted once for a
type, in arrays. Each layer has a pool and a free list of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.allocator import BlockAllocator, FreeLists, OutOfBlocksError
from kvx_core.hybrid.schema import BLOCK_SIZE_ORIGINAL_TOKENS, LayerCacheSchema

Counts = NDArray[np.int64]


class Needs(NamedTuple):
    """Blocks that requests are to take."""

    slots: Counts  # (K,), distinct
    counts: Counts  # (L, K), of each layer and slot
    after: Counts  # (types, K), blocks that every layer of a type then has, at least


class BlockTables:
    """L layers with entries, R request slots, C blocks that a request may have.

    layers:     layer_idx of each, L
    allocators: a free list of each
    tables:     (L, R, C) int32 on the device, block ids of each slot; -1 from the last one on
    lens:       (L, R) int32 on the device, blocks of each slot
    promised:   (L, R), blocks that each slot was promised
    """

    def __init__(
        self,
        schemas: Sequence[LayerCacheSchema],
        num_blocks: Sequence[int],
        max_requests: int,
        max_context_tokens: int,
        device: torch.device,
    ) -> None:
        """schemas, num_blocks: of each layer"""
        self.layers = [schema.layer_idx for schema in schemas]
        self._free = FreeLists(num_blocks, device)
        self.allocators = [
            BlockAllocator(
                blocks,
                device,
                name=f"{schema.attn_type.name} layer {schema.layer_idx}",
                lists=self._free,
                pool=at,
            )
            for at, (schema, blocks) in enumerate(zip(schemas, num_blocks, strict=True))
        ]
        self._ratios = list(dict.fromkeys(schema.compression_ratio for schema in schemas))
        self._per_block = [BLOCK_SIZE_ORIGINAL_TOKENS // ratio for ratio in self._ratios]
        self._type = np.array([self._ratios.index(s.compression_ratio) for s in schemas], dtype=int)
        self.max_context_tokens = max_context_tokens
        self._most = np.array([schema.blocks(max_context_tokens) for schema in schemas], dtype=int)
        shape = len(schemas), max_requests, int(self._most.max(initial=0))
        self.tables = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.promised = np.zeros(shape[:2], dtype=np.int64)
        # What the host knows: blocks of each layer and slot, those that all layers of a type surely
        # have, and the ids. Memory that no id was written to takes no room.
        self._num_held = np.zeros(shape[:2], dtype=np.int64)
        self._sure = np.zeros((len(self._ratios), max_requests), dtype=np.int64)
        self._ids = np.zeros(shape, dtype=np.int32)
        none = [np.zeros((*rows, 0), np.int64) for rows in ((), shape[:1], (len(self._ratios),))]
        self._nothing = Needs(*none)  # what most decode steps need

    def missing(self, slots: Counts, entries: Mapping[int, Counts]) -> Needs:
        """What slots have to take, to have blocks for so many entries; not those that have.

        entries: (B,) of each ratio
        """
        needed = np.zeros((len(self._ratios), len(slots)), dtype=np.int64)
        for row, ratio, per_block in zip(needed, self._ratios, self._per_block, strict=True):
            row[:] = -(-entries[ratio] // per_block)
        which = np.flatnonzero((needed > self._sure[:, slots]).any(0))
        if not len(which):
            return self._nothing
        some, of_types = slots[which], needed[:, which]
        return Needs(some, np.maximum(of_types[self._type] - self._num_held[:, some], 0), of_types)

    def one_more(self, layer: int, slot: int) -> Needs:
        """One block in one layer. Raises InvalidArgumentError if a request may not have it."""
        at = self.layers.index(layer)
        held, most = int(self._num_held[at, slot]), int(self._most[at])
        if held >= most:
            raise InvalidArgumentError(
                f"slot {slot} would have {held + 1} blocks in layer {layer}, expected at most "
                f"{most}, those of max_context_tokens {self.max_context_tokens}"
            )
        counts = np.zeros((len(self.layers), 1), dtype=np.int64)
        counts[at] = 1
        return Needs(np.array([slot]), counts, np.zeros((len(self._ratios), 1), dtype=np.int64))

    def held(self, layer: int, slot: int) -> list[int]:
        """Block ids of a slot in a layer, in the order of its entries."""
        at = self.layers.index(layer)
        found: list[int] = self._ids[at, slot, : self._num_held[at, slot]].tolist()
        return found

    def require_free(self, needs: Needs) -> None:
        """Raises OutOfBlocksError unless each layer has these blocks beside those promised, of
        which they count as part.
        """
        slots, counts, _ = needs
        if not len(slots):
            return
        after = self._num_held[:, slots] + counts
        available = self._free.num_free.astype(np.int64)
        if self.promised.any():
            held = self._num_held.copy()
            held[:, slots] = after
            available -= np.maximum(self.promised - held, 0).sum(1)
        requested, available = counts.sum(1), np.maximum(available, 0)
        for at in np.flatnonzero(requested > available):
            allocator = self.allocators[at]
            raise OutOfBlocksError(
                allocator.name, int(requested[at]), int(available[at]), allocator.num_blocks
            )

    def take(self, needs: Needs) -> None:
        """Takes blocks, after require_free.

        Mutates tables and lens, then what the host knows: if memory or the device fails, nothing is
        taken.
        """
        slots, counts, of_types = needs
        if not len(slots):
            return
        held, of_layers = self._num_held[:, slots], counts.sum(1)
        after = held + counts
        blocks = self._free.next_blocks(of_layers)
        # Of each block its layer and slot, and how many blocks of these are before it.
        owner = np.repeat(np.arange(counts.size), counts.ravel())
        begin = held.ravel() - np.cumsum(counts) + counts.ravel()
        at = blocks.pools, slots[owner % len(slots)], begin[owner] + np.arange(len(owner))

        device = self.tables.device
        rows, columns = at[0] * self.lens.shape[1] + at[1], at[2]
        places = torch.from_numpy(rows * self.tables.shape[2] + columns).to(device)
        flat = self.tables.view(-1)
        flat.index_copy_(0, places, torch.from_numpy(blocks.ids).to(device))
        lens = torch.from_numpy(after.astype(np.int32)).to(device)
        self.lens.index_copy_(1, torch.from_numpy(slots).to(device), lens)

        self._free.take(blocks, of_layers)
        self._ids[at] = blocks.ids
        self._num_held[:, slots] = after
        self._sure[:, slots] = np.maximum(self._sure[:, slots], of_types)

    def give_back(self, slot: int) -> None:
        """Gives back all blocks of a slot, and what it was promised. Mutates tables and lens."""
        for at in range(len(self.layers)):
            self._free.put_back(at, self._ids[at, slot, : self._num_held[at, slot]])
        self._num_held[:, slot] = self.promised[:, slot] = self._sure[:, slot] = 0
        self.tables[:, slot].fill_(-1)
        self.lens[:, slot].fill_(0)

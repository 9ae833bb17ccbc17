"""TensorRT-LLM: mocks of one pool, with its memory layout, and its table of KVCacheIndex.

The library needs a GPU. So this file implements its sources without the adapter: the pool's shape,
the kernels' indexing of a sub-block, its number in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm
from kvx_core import CacheFacts, CacheSpan, CacheView
from tests.engines.engine import E4M3, FINGERPRINT, Sizes, bytes_of, filled

_DTYPES = {
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float32: "FLOAT",
    E4M3: "FP8",
    torch.int8: "INT8",
}
_SECONDARY = -(1 << 31)  # the flag, bit 31 of an int32


class PoolCache:
    """The pool of KVCacheManager, V1: (blocks, layers, K and V, elements of a sub-block).

    A block id is not an index once blocks were offloaded: `where` says in which pool each block of
    a sequence is, and at which index.
    """

    def __init__(
        self, sizes: Sizes, *, mla: bool = False, offloaded: bool = False, dtype: str | None = None
    ) -> None:
        self.kv_factor = 1 if mla else 2
        self.block_size = sizes.block_size
        self.num_layers = sizes.num_layers
        self.sub_block = (sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        num_secondary = 3 if offloaded else 0
        # Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
        # WindowBlockManager::allocatePools
        elements = torch.Size(self.sub_block).numel()
        block = (sizes.num_layers, self.kv_factor, elements)
        self.pools = [filled((sizes.num_blocks, *block), sizes.dtype)]
        if offloaded:
            self.pools.append(filled((num_secondary, *block), sizes.dtype))
        self.raw = [bytes_of(pool) for pool in self.pools]
        self.blocks = range(sizes.num_blocks + num_secondary)
        # Block ids of the secondary pool follow those of the primary; offloading block 2 i swaps
        # it with the i-th of them.
        self.where = [(0, i) for i in range(sizes.num_blocks)]
        self.where += [(1, i) for i in range(num_secondary)]
        for i in range(num_secondary):
            a, b = 2 * i, sizes.num_blocks + i
            self.where[a], self.where[b] = self.where[b], self.where[a]
        spec = tensorrt_llm.PoolSpec(
            layers=tuple(range(sizes.num_layers)),
            num_blocks=sizes.num_blocks,
            tokens_per_block=sizes.block_size,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=dtype or _DTYPES[sizes.dtype],
            kv_factor=self.kv_factor,
            num_secondary_blocks=num_secondary,
        )
        facts = tensorrt_llm.cache_facts(
            spec,
            version="1.2.0",
            fingerprint=FINGERPRINT,
            is_neox=True,
            rotary_dim=sizes.head_dim,
            total_kv_heads=sizes.heads_of_model,
            first_kv_head=sizes.first_kv_head,
        )
        if sizes.k_scales is not None and not mla:
            assert sizes.k_scales == sizes.v_scales, "TensorRT-LLM has one scale for K and V"
        self.view = self._view(spec, facts, sizes.k_scales)

    def _view(self, spec: Any, facts: CacheFacts, factors: list[float] | None) -> CacheView:
        return tensorrt_llm.cache_view(
            spec,
            self.pools[0],
            facts,
            secondary=self.pools[1] if len(self.pools) > 1 else None,
            scaling_factors=factors,
        )

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        """Source: kvCacheManager.cpp, WindowBlockManager::setOffsets"""
        width = max(map(len, sequences)) + 1
        offsets = torch.full((1, len(sequences), 2, width), 0x7FFF_FFFF, dtype=torch.int32)
        for row, blocks in zip(offsets[0], sequences, strict=True):
            for column, block in enumerate(blocks):
                pool, index = self.where[block]
                for field in range(2):
                    value = index * self.num_layers * self.kv_factor + field % self.kv_factor
                    row[field, column] = value + (_SECONDARY if pool else 0)
        return self.view.at(tensorrt_llm.block_table(offsets, 0), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor | None
    ) -> None:
        """Source: cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray::getKVLocalIdx"""
        pools, indices = torch.tensor(self.where)[blocks].unbind(1)
        for i, pool in enumerate(self.pools):
            here = pools == i
            cache = pool.unflatten(-1, self.sub_block)[:, layer]
            for field, tokens in enumerate((key, value)[: self.kv_factor]):
                cache[indices[here], field, :, offsets[here]] = tokens[here]


class SlotCache(PoolCache):
    """The same bytes as KVCacheManagerV2 has them: a slot, [L0 K, L0 V, L1 K, ...], per block."""

    def _view(self, spec: Any, facts: CacheFacts, factors: list[float] | None) -> CacheView:
        buffers = [self.buffers(layer) for layer in range(self.num_layers)]
        return tensorrt_llm.buffer_view(spec, buffers, facts, scaling_factors=factors)

    def buffers(self, layer: int) -> Tensor:
        """get_buffers(layer, "HND"): pages from the layer's K on, which overlap other layers'.

        Source: _torch/pyexecutor/kv_cache/kv_cache_manager_v2.py, KVCacheManagerV2.get_buffers
        """
        (pool,) = self.pools
        page = 2 * torch.Size(self.sub_block).numel()
        tail = pool.flatten()[layer * page :]
        return tail.view(-1, 2, *self.sub_block)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor | None
    ) -> None:
        """A slot is page slot * scale / kv_factor of the layer's buffers."""
        scale = self.num_layers * self.kv_factor
        pages = self.buffers(layer)
        index = blocks * scale // self.kv_factor
        pages[index, 0, :, offsets], pages[index, 1, :, offsets] = key, value


v1 = PoolCache
v1_offloaded = partial(PoolCache, offloaded=True)
v2 = SlotCache
mla = partial(PoolCache, mla=True)

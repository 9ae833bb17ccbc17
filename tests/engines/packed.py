"""KVX's own PackedKVCache: a cache per layer, (batch, seq, heads * dim). A row is a block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvx_core import CacheSpan, PackedKVCache, packed_view
from tests.engines.engine import Sizes, bytes_of, facts_of, filled, poisoned_table


class PackedCaches:
    """Every row holds `block_size` tokens."""

    def __init__(self, sizes: Sizes) -> None:
        self.block_size = sizes.block_size
        self.blocks = range(sizes.num_blocks)
        shape = (sizes.num_blocks, sizes.block_size, sizes.num_kv_heads * sizes.head_dim)
        self.caches = [PackedKVCache() for _ in range(sizes.num_layers)]
        for cache in self.caches:
            cache.set_packed(filled(shape, sizes.dtype), filled(shape, sizes.dtype))
        self.raw = [bytes_of(half) for cache in self.caches for half in self.halves(cache)]
        facts = facts_of(sizes, "kvx packed")
        self.view = packed_view(self.caches, facts, sizes.num_kv_heads)

    def halves(self, cache: PackedKVCache) -> tuple[Tensor, Tensor]:
        keys, values = cache.packed_keys(), cache.packed_values()
        assert keys is not None
        assert values is not None
        return keys, values

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        return self.view.at(poisoned_table(sequences), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        for packed, tokens in zip(self.halves(self.caches[layer]), (key, value), strict=True):
            packed[blocks, offsets] = tokens.flatten(1)

"""KVX's own KvCacheStore, whose positions are blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvx_core import CacheSpan, KvCacheStore
from tests.engines.engine import SENTINEL, Sizes, bytes_of, facts_of, poisoned_table


class Store:
    """Full of tokens, which stand for those of several sequences."""

    def __init__(self, sizes: Sizes) -> None:
        self.block_size = sizes.block_size
        self.blocks = range(sizes.num_blocks)
        num_tokens = sizes.num_blocks * sizes.block_size
        self.store = KvCacheStore(
            sizes.num_layers,
            sizes.num_kv_heads,
            sizes.head_dim,
            num_tokens,
            key_encoding=str(sizes.dtype),
            value_encoding=str(sizes.dtype),
        )
        self.store.append_zeros(num_tokens)
        reads = self.store.read_key_storage, self.store.read_value_storage
        self.raw = [bytes_of(read(0).data).fill_(SENTINEL) for read in reads]
        facts = facts_of(sizes, "kvx store")
        self.view = self.store.cache_view(facts, block_size=sizes.block_size)

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        return self.view.at(poisoned_table(sequences), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """By head and position, as the storage is read."""
        positions = blocks * self.block_size + offsets
        for read, tokens in (
            (self.store.read_key_storage, key),
            (self.store.read_value_storage, value),
        ):
            read(layer).data[:, positions] = tokens.transpose(0, 1)

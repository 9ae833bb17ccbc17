"""KvCacheStoreLike: what a store of keys and values does, for others to implement."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from kvx_core.caches.kv.half import KvStorage
from kvx_core.caches.kv.report import KvMemoryReport
from kvx_core.types import DType


@runtime_checkable
class KvCacheStoreLike(Protocol):
    """A store of one sequence's keys and values, addressed by layer, head and position.

    KvCacheStore is one. Kernels and backends that take one of these work with any: they append
    tokens, and read the range that they need, decoded or as it is stored.
    """

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    @property
    def num_heads(self) -> int:
        """KV heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Tokens that it has room for."""
        ...

    @property
    def current_seq_len(self) -> int:
        """Tokens that all layers hold."""
        ...

    @property
    def key_encoding(self) -> DType:
        """The format of keys."""
        ...

    @property
    def value_encoding(self) -> DType:
        """The format of values; it need not be that of keys."""
        ...

    @property
    def placement(self) -> torch.device:
        """Where the buffers are."""
        ...

    def append_token(self, layer: int, key: Any, value: Any) -> None:
        """Appends one token's keys and values, (num_heads * head_dim,), to a layer."""
        ...

    def read_keys(self, layer: int, start: int = 0, end: int | None = None) -> Any:
        """Decodes the keys of positions `start` to `end`: (num_heads, end - start, head_dim).

        end: None: current_seq_len
        """
        ...

    def read_values(self, layer: int, start: int = 0, end: int | None = None) -> Any:
        """Decodes the values of positions `start` to `end`, as read_keys does keys."""
        ...

    def read_key_storage(self, layer: int, start: int = 0, end: int | None = None) -> KvStorage:
        """The keys of positions `start` to `end` as they are stored."""
        ...

    def read_value_storage(self, layer: int, start: int = 0, end: int | None = None) -> KvStorage:
        """The values of positions `start` to `end` as they are stored."""
        ...

    def evict(self, from_pos: int) -> None:
        """Drops all tokens from position `from_pos` on in all layers."""
        ...

    def clear(self) -> None:
        """Drops all tokens."""
        ...

    def memory_report(self) -> KvMemoryReport:
        """What the memory of the store is used for."""
        ...

"""KvMemoryReport: what the memory of a KvCacheStore is used for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvx_core.argument_checks import format_repr
from kvx_core.types import DType

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KvMemoryReport:
    """The bytes of a store's keys and values, scales included.

    allocated: what the buffers have, for max_seq_len tokens. On a host, pages that nobody has
               written take address space and no memory
    used:      what the tokens take that layers hold now
    logical:   what the same tokens would take in float32
    """

    num_layers: int
    num_heads: int
    head_dim: int
    max_seq_len: int
    current_seq_len: int
    key_encoding: DType
    value_encoding: DType
    placement: torch.device
    key_allocated_bytes: int
    value_allocated_bytes: int
    key_used_bytes: int
    value_used_bytes: int
    key_bytes_per_token: int  # of one layer, all heads
    value_bytes_per_token: int

    def __repr__(self) -> str:
        return format_repr(
            "KvMemoryReport",
            f"{self.used_bytes} of {self.allocated_bytes} bytes",
            f"{self.current_seq_len} of {self.max_seq_len} tokens",
            f"K {self.key_encoding.name}",
            f"V {self.value_encoding.name}",
            f"{self.compression_ratio:.2f} times smaller than float32",
        )

    @property
    def allocated_bytes(self) -> int:
        return self.key_allocated_bytes + self.value_allocated_bytes

    @property
    def used_bytes(self) -> int:
        return self.key_used_bytes + self.value_used_bytes

    @property
    def key_logical_bytes(self) -> int:
        """Float32 bytes of the keys that layers hold now."""
        return self._logical(self.key_used_bytes, self.key_bytes_per_token)

    @property
    def value_logical_bytes(self) -> int:
        """Float32 bytes of the values that layers hold now."""
        return self._logical(self.value_used_bytes, self.value_bytes_per_token)

    @property
    def logical_bytes(self) -> int:
        return self.key_logical_bytes + self.value_logical_bytes

    @property
    def compression_ratio(self) -> float:
        """Bytes of a token in float32 / bytes of a token as stored; of an empty store too."""
        return 2 * self._in_float32 / (self.key_bytes_per_token + self.value_bytes_per_token)

    @property
    def utilization_ratio(self) -> float:
        """current_seq_len / max_seq_len."""
        return self.current_seq_len / self.max_seq_len

    @property
    def _in_float32(self) -> int:
        return self.num_heads * self.head_dim * _FLOAT32

    def _logical(self, used: int, per_token: int) -> int:
        return used // per_token * self._in_float32

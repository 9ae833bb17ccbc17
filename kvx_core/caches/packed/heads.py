"""Heads of a packed tensor: dim is heads * head_dim, head after head."""

from __future__ import annotations

from torch import Tensor

from kvx_core.argument_checks import instance, integer
from kvx_core.errors import InvalidArgumentError


def split_heads(packed: Tensor, num_heads: int) -> Tensor:
    """(batch, seq, num_heads * head_dim) as (batch, num_heads, seq, head_dim): a view."""
    batch, seq_len, dim = packed.shape
    return packed.view(batch, seq_len, num_heads, dim // num_heads).transpose(1, 2)


def expand_heads(packed: Tensor, num_kv_heads: int, num_heads: int) -> Tensor:
    """Repeats every KV head for the query heads that share it: query head h uses h // repeats.

    packed: (batch, seq, num_kv_heads * head_dim)
    Returns (batch, seq, num_heads * head_dim): a new tensor, or `packed` itself if the numbers are
    equal. Raises InvalidArgumentError.
    """
    instance("packed", packed, Tensor, "a torch.Tensor (batch, seq, dim)")
    repeats = repeats_of(num_kv_heads, num_heads)
    if packed.ndim != 3 or packed.shape[2] % num_kv_heads:
        raise InvalidArgumentError(
            f"packed.shape is {tuple(packed.shape)}, expected (batch, seq, dim), dim a multiple of "
            f"num_kv_heads {num_kv_heads}"
        )
    if repeats == 1:
        return packed
    heads = split_heads(packed, num_kv_heads).transpose(1, 2)
    return heads.repeat_interleave(repeats, dim=2).flatten(2)


def repeats_of(num_kv_heads: int, num_heads: int) -> int:
    """Query heads that share a KV head. Raises InvalidArgumentError."""
    integer("num_kv_heads", num_kv_heads, 1)
    integer("num_heads", num_heads, 1)
    if num_heads % num_kv_heads:
        raise InvalidArgumentError(
            f"num_heads is {num_heads}, expected a multiple of num_kv_heads {num_kv_heads}"
        )
    return num_heads // num_kv_heads

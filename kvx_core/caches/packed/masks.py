"""Masks and distances of queries, which are the last of the tokens, and keys.

With q_len queries and kv_len keys, query i is at position kv_len - q_len + i. Where some keys are
padding, positions count the others only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx_core.argument_checks import instance, integer
from kvx_core.errors import InvalidArgumentError


def causal_mask(
    q_len: int,
    kv_len: int,
    *,
    key_padding_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """True where a query sees a key: those up to its own position that are no padding.

    key_padding_mask: (batch, kv_len), bool, True where a key is padding, as
                      torch.nn.MultiheadAttention has it; None: nowhere. A query that is padding
                      sees its own key, so that what it computes is finite
    device:           of the mask, if there is no key_padding_mask
    Returns (q_len, kv_len), or (batch, q_len, kv_len) with padding, bool.
    Raises InvalidArgumentError, also if q_len is more than kv_len.
    """
    padding = None if key_padding_mask is None else require_padding(key_padding_mask, None, kv_len)
    distance = _distance(q_len, kv_len, device if padding is None else padding.device)
    if padding is None:
        return distance >= 0
    return (distance > 0) & ~padding[:, None] | (distance == 0)


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The slope of every head: 2 ** (-8 / n), its square and so on, for n heads, a power of two.

    For other numbers: those of the next lower power of two, then every second one of twice as many.
    Returns (num_heads,), float32. Raises InvalidArgumentError.
    Source: Press et al. 2021 (arXiv 2108.12409), section 3 and the authors' code, get_slopes
    """
    integer("num_heads", num_heads, 1)
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * (i + 1) / power for i in range(power)]
    exponents += [4 * (2 * i + 1) / power for i in range(num_heads - power)]
    slopes = [2.0**-exponent for exponent in exponents]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_mask(
    slopes: Tensor, q_len: int, kv_len: int, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """The bias added to the scores: minus slope * distance; minus infinity for unseen keys.

    slopes:           (num_heads,), float32
    key_padding_mask: as in causal_mask, on the device of slopes; distances leave padding out
    Returns (num_heads, q_len, kv_len), or (batch, num_heads, q_len, kv_len) with padding, of the
    dtype and on the device of slopes. Raises InvalidArgumentError.
    Source: Press et al. 2021 (arXiv 2108.12409), section 3; with padding transformers 5.19
    models/bloom/modeling_bloom.py, build_alibi_tensor
    """
    instance("slopes", slopes, Tensor, "a torch.Tensor (num_heads,)")
    if slopes.ndim != 1 or not slopes.is_floating_point():
        raise InvalidArgumentError(
            f"slopes is {tuple(slopes.shape)} {slopes.dtype}, expected (num_heads,) of float32"
        )
    seen = causal_mask(
        q_len, kv_len, key_padding_mask=key_padding_mask, device=slopes.device
    ).unsqueeze(-3)
    if key_padding_mask is None:
        distance = _distance(q_len, kv_len, slopes.device)
    else:
        keys = (~key_padding_mask).cumsum(-1)
        distance = (keys[:, kv_len - q_len :, None] - keys[:, None]).unsqueeze(-3)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(~seen, float("-inf"))


def require_padding(mask: Tensor, batch: int | None, kv_len: int) -> Tensor:
    """`mask` if it says of every key whether it is padding. Raises InvalidArgumentError.

    batch: None: any
    """
    instance("key_padding_mask", mask, Tensor, "a torch.Tensor (batch, kv_len) of bool or None")
    if mask.dtype is not torch.bool:
        raise InvalidArgumentError(
            f"key_padding_mask.dtype is {mask.dtype}, expected torch.bool, True for padding. Of an "
            "attention_mask, which has 1 for tokens, pass attention_mask == 0"
        )
    if mask.ndim != 2 or mask.shape != (mask.shape[0] if batch is None else batch, kv_len):
        raise InvalidArgumentError(
            f"key_padding_mask.shape is {tuple(mask.shape)}, expected "
            f"({'batch' if batch is None else batch}, {kv_len}): of all keys, those of the cache "
            "too"
        )
    return mask


def _distance(q_len: int, kv_len: int, device: torch.device | str | None) -> Tensor:
    """(q_len, kv_len): how many tokens a key lies before a query; negative if it comes later."""
    integer("q_len", q_len)
    integer("kv_len", kv_len)
    if q_len > kv_len:
        raise InvalidArgumentError(
            f"q_len is {q_len}, expected at most kv_len {kv_len}: queries are the last tokens"
        )
    keys = torch.arange(kv_len, device=device)
    return keys[kv_len - q_len :, None] - keys

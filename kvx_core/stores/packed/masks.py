"""Masks and distances of queries, which are the last of the tokens, and keys.

With q_len queries and kv_len keys, query i is at position kv_len - q_len + i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx_core.errors import InvalidArgumentError
from kvx_core.words import instance, integer


def causal_mask(q_len: int, kv_len: int, *, device: torch.device | str | None = None) -> Tensor:
    """True where a query sees a key: those up to its own position.

    Returns (q_len, kv_len), bool. Raises InvalidArgumentError if q_len is more than kv_len.
    """
    return _distance(q_len, kv_len, device) >= 0


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


def alibi_mask(slopes: Tensor, q_len: int, kv_len: int) -> Tensor:
    """The bias added to the scores: minus slope * distance; minus infinity for later keys.

    slopes: (num_heads,), float32
    Returns (num_heads, q_len, kv_len), of the dtype and on the device of slopes.
    Raises InvalidArgumentError.
    Source: Press et al. 2021 (arXiv 2108.12409), section 3
    """
    instance("slopes", slopes, Tensor, "a torch.Tensor (num_heads,)")
    if slopes.ndim != 1 or not slopes.is_floating_point():
        raise InvalidArgumentError(
            f"slopes is {tuple(slopes.shape)} {slopes.dtype}, expected (num_heads,) of float32"
        )
    distance = _distance(q_len, kv_len, slopes.device)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, float("-inf"))


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

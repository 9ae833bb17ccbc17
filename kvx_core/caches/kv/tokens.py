"""Keys and values on their way into a store and out of it: lists, tensors of torch or numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, strided
from torch.utils.dlpack import from_dlpack

from kvx_core._c.dlpack import capsule_of, read_dlpack
from kvx_core.argument_checks import bad_argument
from kvx_core.caches.kv.half import Half
from kvx_core.desc.tensors import require_whole
from kvx_core.errors import InvalidArgumentError

_A_TENSOR = "a torch.Tensor, a numpy.ndarray or an object with __dlpack__"
_TOKENS = f"a list of numbers, {_A_TENSOR}"
_FLOATS = "float32, float16, bfloat16 or float64"
_AS_THEY_ARE = {torch.float32, torch.float16, torch.bfloat16, *map(np.dtype, ("f4", "f2"))}


def array_of(name: str, tokens: Any, expected: str = _A_TENSOR) -> Any:
    """`tokens` as a torch tensor without gradient or a numpy array, zero-copy.

    Raises InvalidArgumentError.
    """
    if isinstance(tokens, Tensor):
        if tokens.layout is strided:
            require_whole(name, tokens)
        return tokens.detach() if tokens.requires_grad else tokens
    if isinstance(tokens, np.ndarray):
        return tokens
    if hasattr(tokens, "__dlpack__") and not isinstance(tokens, type):
        read_dlpack(name, capsule_of(tokens))  # torch does not check what it reads of one
        return from_dlpack(tokens)
    raise bad_argument(name, tokens, expected)


def copied(tokens: Any) -> Any:
    """The same tokens in memory of their own."""
    return tokens.clone() if isinstance(tokens, Tensor) else tokens.copy()


def _numbers(name: str, tokens: Any, half: Half) -> Any:
    """Tokens as floats that write_kv takes: lists and float64 are rounded to float32.

    Raises InvalidArgumentError, also for numbers that float32 does not reach.
    """
    if isinstance(tokens, (list, tuple)):
        return torch.from_numpy(_listed(name, tokens)).to(half.device)
    found = array_of(name, tokens, _TOKENS)
    if found.dtype in _AS_THEY_ARE:
        return found
    if isinstance(found, Tensor):
        if not found.is_floating_point():
            raise bad_argument(f"{name}.dtype", str(found.dtype), _FLOATS)
        if found.dtype is torch.float64:
            rounded = found.float()
            _require_in_float32(name, bool((rounded.isinf() & found.isfinite()).any()))
            return rounded
    elif found.dtype.kind != "V":  # ml_dtypes' are void for numpy
        if found.dtype.kind != "f":
            raise bad_argument(f"{name}.dtype", str(found.dtype), _FLOATS)
        if found.dtype.itemsize > 4:
            return _in_float32(name, found)
    return found


def _listed(name: str, tokens: Any) -> np.ndarray:
    try:
        found = np.array(tokens)
    except (TypeError, ValueError, OverflowError):
        found = np.array(None)
    if found.dtype.kind not in "iuf":
        raise bad_argument(name, tokens, "a list of numbers, or such lists of equal length")
    return _in_float32(name, found)


def _in_float32(name: str, found: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = found.astype(np.float32)
    _require_in_float32(name, bool((np.isinf(rounded) & np.isfinite(found)).any()))
    return rounded


def _require_in_float32(name: str, is_past: bool) -> None:
    if is_past:
        raise InvalidArgumentError(
            f"{name} has numbers past the largest of float32, expected at most 3.4028235e38"
        )


def one_token(name: str, token: Any, half: Half) -> Any:
    """The keys or values of one token as (1, num_heads, head_dim). Raises InvalidArgumentError."""
    num_heads, head_dim = half.sizes.num_heads, half.sizes.head_dim
    found = _numbers(name, token, half)
    if tuple(found.shape) not in ((num_heads * head_dim,), (num_heads, head_dim)):
        raise InvalidArgumentError(
            f"{name}.shape is {tuple(found.shape)}, expected ({num_heads * head_dim},), num_heads "
            f"{num_heads} * head_dim {head_dim}, or ({num_heads}, {head_dim})"
        )
    return found.reshape(1, num_heads, head_dim)


def some_tokens(name: str, tokens: Any, half: Half) -> Any:
    """Keys or values, (num_tokens, num_heads, head_dim). Raises InvalidArgumentError."""
    num_heads, head_dim = half.sizes.num_heads, half.sizes.head_dim
    found = _numbers(name, tokens, half)
    shape = tuple(found.shape)
    if len(shape) != 3 or shape[1:] != (num_heads, head_dim) or shape[0] < 1:
        raise InvalidArgumentError(
            f"{name}.shape is {shape}, expected (num_tokens, {num_heads}, {head_dim}): at least "
            "one token, num_heads and head_dim of the store"
        )
    return found


def token_major(name: str, out: Any, shape: tuple[int, int, int]) -> Any:
    """An output (heads, tokens, head_dim) that the caller has, as (tokens, heads, head_dim).

    Raises InvalidArgumentError.
    """
    found = array_of(name, out)
    if tuple(found.shape) != shape:
        raise InvalidArgumentError(
            f"{name}.shape is {tuple(found.shape)}, expected {shape}: heads, tokens, head_dim"
        )
    return found.swapaxes(0, 1)

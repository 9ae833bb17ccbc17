"""Keys and values on their way into a store and out of it: tensors of torch or numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, strided
from torch.utils.dlpack import from_dlpack

from kvx_core._dlpack import read_dlpack
from kvx_core.errors import InvalidArgumentError
from kvx_core.tensors import capsule_of, require_whole
from kvx_core.words import wrong

_A_TENSOR = "a torch.Tensor, a numpy.ndarray or an object with __dlpack__"


def array_of(name: str, tokens: Any) -> Any:
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
    raise wrong(name, tokens, _A_TENSOR)


def copied(tokens: Any) -> Any:
    """The same tokens in memory of their own."""
    return tokens.clone() if isinstance(tokens, Tensor) else tokens.copy()


def one_token(name: str, token: Any, num_heads: int, head_dim: int) -> Any:
    """The keys or values of one token as (1, num_heads, head_dim). Raises InvalidArgumentError."""
    found = array_of(name, token)
    if tuple(found.shape) not in ((num_heads * head_dim,), (num_heads, head_dim)):
        raise InvalidArgumentError(
            f"{name}.shape is {tuple(found.shape)}, expected ({num_heads * head_dim},), num_heads "
            f"{num_heads} * head_dim {head_dim}, or ({num_heads}, {head_dim})"
        )
    return found.reshape(1, num_heads, head_dim)


def some_tokens(name: str, tokens: Any, num_heads: int, head_dim: int) -> Any:
    """Keys or values, (num_tokens, num_heads, head_dim). Raises InvalidArgumentError."""
    found = array_of(name, tokens)
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

"""torch.ops.kvx.kvcache_append: a cache and the tokens that follow it, as one new tensor.

The op is made of torch's own, so that autograd, forward gradients, vmap, meta tensors and
torch.compile see through it. It copies both inputs; PackedKVCache appends in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvx_core.argument_checks import instance, integer
from kvx_core.errors import InvalidArgumentError


def kvcache_append(cache: Tensor, new: Tensor, axis: int = 1) -> Tensor:
    """`cache` followed by `new` along `axis`: a new tensor, with a gradient for both.

    cache: any shape, of one axis at least; (batch, seq, dim) for keys or values of PackedKVCache
    new:   the shape of cache but along `axis`; its dtype and device
    axis:  0 to cache.ndim - 1, or counted from the end: -1 to -cache.ndim
    Mutates nothing. Under torch.compile call torch.ops.kvx.kvcache_append, which is the same.
    Raises InvalidArgumentError; torch.cat would convert another dtype, and skip some empty tensors.
    """
    for name, tensor in (("cache", cache), ("new", new)):
        instance(name, tensor, Tensor, "a torch.Tensor")
    number = integer("axis", axis, -cache.ndim, cache.ndim - 1) if cache.ndim else axis
    appended: Tensor = torch.ops.kvx.kvcache_append(cache, new, number)
    return appended


def _append(cache: Tensor, new: Tensor, axis: int = 1) -> Tensor:
    ndim = cache.ndim
    if ndim == 0:
        raise InvalidArgumentError("cache has no axes, expected at least one")
    if not -ndim <= axis < ndim:
        raise InvalidArgumentError(f"axis is {axis}, expected {-ndim} to {ndim - 1}")
    if new.ndim != ndim:
        raise InvalidArgumentError(f"new has {new.ndim} axes, expected {ndim} as cache has")
    along = axis % ndim
    for i in range(ndim):
        if i != along and new.shape[i] != cache.shape[i]:
            raise InvalidArgumentError(
                f"new.shape[{i}] is {new.shape[i]}, expected {cache.shape[i]} as cache has: only "
                f"axis {along} may differ"
            )
    if new.dtype != cache.dtype:
        raise InvalidArgumentError(
            f"new.dtype is {new.dtype}, expected {cache.dtype} as cache has. Pass "
            f"new.to({cache.dtype})"
        )
    if new.device != cache.device:
        raise InvalidArgumentError(
            f"new.device is {new.device}, expected {cache.device} as cache has"
        )
    return torch.cat((cache, new), along)


_library: Any = torch.library.Library("kvx", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "kvcache_append(Tensor cache, Tensor new, int axis=1) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("kvcache_append", _append, "CompositeImplicitAutograd")

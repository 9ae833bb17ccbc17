"""Attention of one query to tokens of a store, which are decoded a few at a time.

On a host libkvx does it (kvx_attend_kv). On a device, and where units span heads, scores of all
tokens come first, then their softmax, then the sum of the values, so that pieces of keys and values
are decoded into one buffer.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvx_core._c import abi, abi_attend
from kvx_core.argument_checks import bad_argument, plural
from kvx_core.caches.kv.half import Half
from kvx_core.caches.kv.tokens import array_of
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.scales import ScaleDesc
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import DType, Memory

_PIECE_BYTES = 8 << 20  # of float32 keys or values that are decoded at once on a device


class Attention:
    """KvCacheStore.attend, for the keys and values of a store."""

    __slots__ = ("_keys", "_layers", "_values")

    def __init__(self, keys: Half, values: Half) -> None:
        self._keys, self._values = keys, values
        self._layers: dict[int, _Layer] = {}  # each made at its first use

    def __call__(self, layer: int, start: int, end: int, query: Any, scale: float | None) -> Any:
        if start == end:
            raise InvalidArgumentError(
                f"positions {start} to {end} are no tokens, expected at least one to attend to"
            )
        given = _query(query, self._keys)
        if scale is None:
            scale = 1 / math.sqrt(self._keys.sizes.head_dim)
        else:
            scale = _number("scale", scale)
        with torch.no_grad():
            found = given.float().resolve_neg()
            # libkvx takes heads, and where units span heads there are none.
            if given.device.type == "cpu" and not (self._keys.has_rows or self._values.has_rows):
                mixed = self._by_libkvx(layer, start, end, found, scale)
            else:
                mixed = self.in_pieces(layer, start, end, found, scale)
            mixed = mixed.to(given.dtype)
        return mixed.numpy() if isinstance(query, np.ndarray) else mixed

    def in_pieces(self, layer: int, start: int, end: int, query: Tensor, scale: float) -> Tensor:
        """By torch, on any device."""
        heads, head_dim = self._keys.sizes.num_heads, self._keys.sizes.head_dim
        query = (query * scale).reshape(heads, -1, head_dim)
        most = max(_PIECE_BYTES // (heads * head_dim * query.itemsize), 1)
        pieces = [(at, min(at + most, end)) for at in range(start, end, most)]
        buffer = query.new_empty((heads, min(most, end - start), head_dim))
        scores = query.new_empty((heads, query.shape[1], end - start))
        for begin, stop in pieces:
            piece = buffer[:, : stop - begin]
            self._keys.read(layer, begin, stop, None, piece.transpose(0, 1))
            torch.bmm(query, piece.transpose(1, 2), out=scores[..., begin - start : stop - start])
        weights = torch.softmax(scores, -1)
        mixed = torch.zeros_like(query)
        for begin, stop in pieces:
            piece = buffer[:, : stop - begin]
            self._values.read(layer, begin, stop, None, piece.transpose(0, 1))
            mixed.baddbmm_(weights[..., begin - start : stop - start], piece)
        return mixed.view(-1, head_dim)

    def _by_libkvx(self, layer: int, start: int, end: int, query: Tensor, scale: float) -> Tensor:
        found = self._layers.get(layer)
        if found is None:
            found = self._layers[layer] = _layer(layer, self._keys, self._values)
        found.require_in_place()
        mixed = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        desc = abi_attend.kvx_attend_desc_t(
            start=start,
            end=end,
            query=_vectors(query),
            out=_vectors(mixed),
            k_scale=abi.pointer_to(found.k_scale),
            v_scale=abi.pointer_to(found.v_scale),
            scale=scale,
        )
        abi.check(abi_attend.function()(found.cache.to_c(), desc))
        return mixed


class _Layer(NamedTuple):
    """A layer as one block of max_seq_len tokens."""

    cache: CacheDesc
    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None

    def require_in_place(self) -> None:
        self.cache.held("the store")
        for name, scale in (("key", self.k_scale), ("value", self.v_scale)):
            if scale is not None:
                scale.require_in_place(f"scales of {name}s")


def _layer(layer: int, keys: Half, values: Half) -> _Layer:
    length = keys.sizes.max_seq_len
    (k, k_scale), (v, v_scale) = (half.blocks(layer, length, length) for half in (keys, values))
    return _Layer(CacheDesc.from_kv(k, v), k_scale, v_scale)


def _vectors(tensor: Tensor) -> abi.kvx_tensor_desc_t:
    return abi.kvx_tensor_desc_t(
        dtype=DType.F32,
        memory=Memory.HOST,
        ndim=2,
        shape=abi.dims(tensor.shape),
        stride=abi.dims(tensor.stride()),
        data=tensor.data_ptr(),
    )


def _number(name: str, given: object) -> float:
    """A finite number as a float. Raises InvalidArgumentError."""
    if isinstance(given, (bool, np.bool_)) or not isinstance(given, (Real, np.number)):
        raise bad_argument(name, given, "a number or None")
    try:
        return float(given)
    except OverflowError:
        raise bad_argument(name, given, "a number that float32 holds") from None


def _tensor_of(query: np.ndarray) -> Tensor:
    """A copy of the query, which is small: of any strides and byte order."""
    try:
        return torch.from_numpy(np.array(query, query.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise bad_argument("query.dtype", str(query.dtype), "float32, float16 or float64") from None


def _query(query: Any, keys: Half) -> Tensor:
    """The query as a tensor. Raises InvalidArgumentError."""
    given = array_of("query", query)
    found = _tensor_of(given) if isinstance(given, np.ndarray) else given
    if found.layout is not torch.strided:
        raise bad_argument(
            "query.layout", str(found.layout), "torch.strided. Pass query.to_dense()"
        )
    sizes, shape = keys.sizes, tuple(found.shape)
    if len(shape) != 2 or shape[1] != sizes.head_dim or not shape[0] or shape[0] % sizes.num_heads:
        raise InvalidArgumentError(
            f"query.shape is {shape}, expected (num_q_heads, head_dim {sizes.head_dim}), "
            f"num_q_heads a multiple of {plural(sizes.num_heads, 'KV head')}"
        )
    if not found.is_floating_point():
        raise InvalidArgumentError(f"query.dtype is {found.dtype}, expected a float dtype")
    if found.device != keys.device:
        raise InvalidArgumentError(
            f"query.device is {found.device}, expected {keys.device}, where the store is"
        )
    return found

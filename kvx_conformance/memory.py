"""Bytes of a cache as its description says where they are, in plain indexing: no copy of KVX."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvx_conformance.case import NotApplicable
from kvx_conformance.device import OnDevice
from kvx_conformance.engine import Floats
from kvx_core import CacheView, DType, Layout, Memory, ScaleDesc, ScaleGranularity, TensorDesc

Bytes = npt.NDArray[np.uint8]
Elements: TypeAlias = "Bytes | OnDevice"

# Axes of a layout in the order block, token, head, dim.
_ORDER = {
    Layout.BLOCK_NHD: (0, 1, 2, 3),
    Layout.BLOCK_HND: (0, 2, 1, 3),
    Layout.BLOCK_HND_PACKED: (0, 3, 1, 2, 4),
}


def elements(tensor: TensorDesc) -> Elements:
    """The tensor's own memory: (block, token, head, dim, byte of an element), uint8.

    dim is two axes in BLOCK_HND_PACKED.
    """
    size = tensor.dtype.itemsize
    order = _ORDER[tensor.layout]
    shape = [*(tensor.shape[axis] for axis in order), size]
    strides = [*(tensor.stride[axis] * size for axis in order), 1]
    num_bytes = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 in shape:
        return np.empty(shape, np.uint8)
    if tensor.memory is Memory.DEVICE:
        return OnDevice(tensor.data, num_bytes, shape, strides)
    whole: Any = (ctypes.c_uint8 * num_bytes).from_address(tensor.data)
    return np.ndarray(shape, np.uint8, whole, strides=strides)


def tensors(view: CacheView) -> dict[tuple[int, str], TensorDesc]:
    """The tensors of a view by layer and "K" or "V"."""
    return {
        (i, name.upper()): tensor
        for i, layer in enumerate(view.layers)
        for name, tensor in layer.tensors.items()
    }


def fill(view: CacheView, byte: int) -> None:
    """Sets every byte that the view describes."""
    for tensor in tensors(view).values():
        elements(tensor)[...] = byte


def contents(view: CacheView) -> list[Bytes]:
    """A copy of every byte that the view describes."""
    return [np.array(elements(tensor)) for tensor in tensors(view).values()]


def numbers(view: CacheView, layer: int, kv: str, block: int, offset: int) -> Floats:
    """One token of K or V, (num_kv_heads, head_dim), float32, its scale applied."""
    desc = view.layers[layer]
    tensor = desc.k if kv == "K" or desc.v is None else desc.v
    found = elements(tensor)[block, offset]
    heads, size = found.shape[0], found.shape[-1]
    raw = np.ascontiguousarray(found).reshape(heads, -1, size)
    beside = [
        _beside(getattr(view, f"{kv.lower()}_{name}"), layer, block, offset)
        for name in ("scales", "zeros")
    ]
    return _decoded(tensor.dtype, raw, *beside)


def _decoded(dtype: DType, raw: Bytes, scale: Any, zero: Any) -> Floats:
    """raw: (heads, elements, bytes). scale, zero: broadcast to (heads, numbers), or None."""
    if dtype is DType.Q8_0:
        d = raw[..., :2].copy().view(np.float16).astype(np.float32)
        quants = raw[..., 2:].view(np.int8).astype(np.float32)
        found: Floats = (quants * d).reshape(len(raw), -1)
        return found
    if dtype in (DType.U8_ZERO, DType.U8_BIAS):
        stored = raw[..., 0].astype(np.float32)
        if dtype is DType.U8_ZERO:
            return np.asarray((stored - _spread(zero, stored)) * _spread(scale, stored), np.float32)
        return np.asarray(stored * _spread(scale, stored) + _spread(zero, stored), np.float32)
    if dtype in _PLAIN:
        plain = raw.view(_PLAIN[dtype])[..., 0].astype(np.float32)
    elif dtype is DType.BF16:
        plain = (raw.view(np.uint16)[..., 0].astype(np.uint32) << 16).view(np.float32)
    elif dtype in _FP8:
        plain = _fp8_table(*_FP8[dtype])[raw[..., 0]]
    else:
        raise NotApplicable(f"the suite reads no {dtype.name} by itself")
    if scale is None:
        return plain
    return np.asarray(plain * _spread(scale, plain), np.float32)


_PLAIN = {DType.F32: np.float32, DType.F16: np.float16, DType.S8: np.int8}
_FP8 = {DType.F8_E4M3: (4, 3, 7), DType.F8_E5M2: (5, 2, 15)}  # exponent, mantissa bits, bias


@cache
def _fp8_table(exponent_bits: int, mantissa_bits: int, bias: int) -> Floats:
    """The number that each of 256 bytes stands for."""
    found = np.empty(256, np.float32)
    for byte in range(256):
        exponent = byte >> mantissa_bits & (1 << exponent_bits) - 1
        fraction = (byte & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
        if exponent == 0:
            size = fraction * 2.0 ** (1 - bias)
        else:
            size = (1 + fraction) * 2.0 ** (exponent - bias)
        if exponent_bits == 5 and exponent == 31:
            size = np.nan if fraction else np.inf
        if exponent_bits == 4 and byte & 0x7F == 0x7F:
            size = np.nan
        found[byte] = -size if byte & 0x80 else size
    return found


def _beside(scales: Any, layer: int, block: int, offset: int) -> Any:
    """Scales or zero points of one token: (1, 1), (heads, 1), (heads, head_dim or groups)."""
    one: ScaleDesc | None = None if scales is None else scales[layer]
    if one is None:
        return None
    kind, found = one.granularity, one.to_numpy().astype(np.float32)
    if kind is ScaleGranularity.PER_TENSOR:
        return found.reshape(1, 1)
    if kind is ScaleGranularity.PER_BLOCK:
        return found[block].reshape(1, 1)
    if kind is ScaleGranularity.PER_HEAD:
        return found[:, None]
    if kind is ScaleGranularity.PER_BLOCK_HEAD:
        return found[block][:, None]
    if kind is ScaleGranularity.PER_TOKEN_HEAD:
        return found[block, offset][:, None]
    if kind is ScaleGranularity.PER_CHANNEL:
        return found[block]
    if kind is ScaleGranularity.PER_GROUP:
        return found[block, offset]
    raise NotApplicable(f"the suite reads no scales {kind.name} by itself")


def _spread(beside: Any, like: Floats) -> Any:
    """Groups repeated for each of their numbers."""
    groups = beside.shape[-1]
    return beside if groups in (1, like.shape[-1]) else beside.repeat(like.shape[-1] // groups, -1)

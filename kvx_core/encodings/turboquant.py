"""TurboQuant: head vectors in 2, 3 or 4 bits per number and a norm; vLLM's slots of it. Spec: E.20

A vector is rotated by fixed signs and a Hadamard matrix, and each coordinate becomes the nearest of
2^bits centroids. A unit, the bytes of a vector, means the same everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi, abi_turboquant
from kvx_core.argument_checks import flag, integer
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tensors import Borrowed, TensorLike, borrow
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.types import DType, Memory

__all__ = ["SLOTS", "decode", "decode_slots", "encode", "encode_slots", "slot_bytes", "unit_bytes"]

SLOTS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
"""vLLM's names: values of its --kv-cache-dtype."""

_FLOATS = (DType.F32, DType.F16, DType.BF16)


def unit_bytes(dim: int, bits: int, *, residual: bool = False) -> int:
    """Bytes of a unit: dim * bits / 8, and 2 for the norm; with a residual 2 more.

    dim: 64, 128 or 256; bits: 2, 3 or 4; residual: as for `encode`
    Raises InvalidArgumentError. Spec: E.20
    """
    dim, bits = integer("dim", dim), integer("bits", bits)
    size = abi_turboquant.functions().kvx_turboquant_bytes(dim, bits, _flags(residual))
    if not size:
        raise InvalidArgumentError(
            f"dim is {dim} and bits {bits}, expected 64, 128 or 256, and 2, 3 or 4 (spec E.20)"
        )
    return int(size)


def encode(values: TensorLike, bits: int, *, residual: bool = False) -> Any:
    """Encodes the vectors of a tensor.

    values:   (..., dim) float32, float16 or bfloat16 in host memory; dim is 64, 128 or 256. What is
              not contiguous float32 is copied
    bits:     2, 3 or 4 per number
    residual: whether one of the bits is the sign of what the others leave: inner products are
              unbiased, and vary more
    Returns units, (..., unit_bytes) uint8: a torch.Tensor if `values` is torch's, else numpy's.
    NaN counts as 0. Raises InvalidArgumentError, UnsupportedError. Spec: E.20
    """
    numbers = _numbers("values", values)
    *shape, dim = numbers.shape
    flags = _flags(residual)
    size = unit_bytes(dim, bits, residual=residual)
    units = np.empty((*shape, size), np.uint8)
    call = abi_turboquant.functions().kvx_turboquant_encode
    rows = numbers.size // dim
    abi.check(call(units.ctypes.data, size, numbers.ctypes.data, dim, rows, dim, bits, flags))
    return _like(values, units)


def decode(units: TensorLike, dim: int, bits: int, *, residual: bool = False) -> Any:
    """Decodes units; any bytes are one.

    units: (..., unit_bytes) uint8 in host memory
    dim, bits, residual: as for `encode`
    Returns vectors, (..., dim) float32: a torch.Tensor if `units` is torch's, else numpy's.
    Raises InvalidArgumentError, UnsupportedError. Spec: E.20
    """
    flags = _flags(residual)
    size = unit_bytes(dim, bits, residual=residual)
    stored = _stored("units", units, size)
    values = np.empty((*stored.shape[:-1], dim), np.float32)
    call = abi_turboquant.functions().kvx_turboquant_decode
    rows = stored.size // size
    abi.check(call(values.ctypes.data, dim, stored.ctypes.data, size, rows, dim, bits, flags))
    return _like(units, values)


def slot_bytes(dim: int, cache_dtype: str) -> int:
    """Bytes of a slot: a key and a value.

    dim: 64, 128 or 256; cache_dtype: one of SLOTS
    Raises InvalidArgumentError. Spec: E.20
    """
    dim, kind = integer("dim", dim), _kind(cache_dtype)
    size = abi_turboquant.functions().kvx_turboquant_slot_bytes(dim, kind)
    if not size:
        raise InvalidArgumentError(f"dim is {dim}, expected 64, 128 or 256 (spec E.20)")
    return int(size)


def encode_slots(keys: TensorLike, values: TensorLike, cache_dtype: str) -> Any:
    """Encodes keys and values as vLLM does in its caches of this --kv-cache-dtype.

    keys, values: (..., dim) float32, float16 or bfloat16 in host memory, of one shape; dim is 64,
                  128 or 256. What is not contiguous float32 is copied
    cache_dtype:  one of SLOTS
    Returns slots, (..., slot_bytes) uint8: a torch.Tensor if `keys` is torch's, else numpy's.
    Raises InvalidArgumentError, UnsupportedError. Spec: E.20
    """
    kind = _kind(cache_dtype)
    key, value = _numbers("keys", keys), _numbers("values", values)
    if key.shape != value.shape:
        raise InvalidArgumentError(
            f"values.shape is {value.shape}, expected {key.shape} as keys have (spec E.20)"
        )
    *shape, dim = key.shape
    size = slot_bytes(dim, cache_dtype)
    slots = np.empty((*shape, size), np.uint8)
    call = abi_turboquant.functions().kvx_turboquant_encode_slots
    ends = slots.ctypes.data, size, key.ctypes.data, value.ctypes.data, dim
    abi.check(call(*ends, key.size // dim, dim, kind))
    return _like(keys, slots)


def decode_slots(slots: TensorLike, dim: int, cache_dtype: str) -> tuple[Any, Any]:
    """Decodes vLLM's slots; any bytes are one.

    slots: (..., slot_bytes) uint8 in host memory; bytes behind slot_bytes are not read
    dim, cache_dtype: as for `slot_bytes`
    Returns keys and values, (..., dim) float32: torch tensors if `slots` is torch's, else numpy's.
    Keys are rotated back. Raises InvalidArgumentError, UnsupportedError. Spec: E.20
    """
    kind = _kind(cache_dtype)
    size = slot_bytes(dim, cache_dtype)
    stored = _stored("slots", slots, size)
    key = np.empty((*stored.shape[:-1], dim), np.float32)
    value = np.empty_like(key)
    call = abi_turboquant.functions().kvx_turboquant_decode_slots
    ends = key.ctypes.data, value.ctypes.data, dim, stored.ctypes.data, size
    abi.check(call(*ends, stored.size // size, dim, kind))
    return _like(slots, key), _like(slots, value)


def _flags(residual: bool) -> int:
    return abi_turboquant.RESIDUAL if flag("residual", residual) else 0


def _kind(cache_dtype: str) -> int:
    if not isinstance(cache_dtype, str) or cache_dtype not in SLOTS:
        raise InvalidArgumentError(
            f"cache_dtype is {cache_dtype!r}, expected one of {', '.join(SLOTS)} (spec E.20)"
        )
    return SLOTS.index(cache_dtype)


def _on_host(name: str, tensor: TensorLike, takes: tuple[DType, ...]) -> Borrowed:
    found = borrow(tensor, name=name, takes=takes)
    if found.memory is Memory.DEVICE:
        raise UnsupportedError(
            f"{name}.memory is DEVICE, expected HOST: pass a copy in host memory (spec E.20)"
        )
    if found.ndim == 0:
        raise InvalidArgumentError(f"{name} has no axes, expected vectors (spec E.20)")
    return found


def _numbers(name: str, tensor: TensorLike) -> npt.NDArray[np.float32]:
    """Contiguous float32 numbers of a tensor."""
    found = _on_host(name, tensor, _FLOATS)
    if found.dtype not in _FLOATS:
        raise UnsupportedError(
            f"{name}.dtype is {found.dtype.name}, expected F32, F16 or BF16 (spec E.20)"
        )
    taken: Any = tensor.detach().float().numpy() if is_torch(tensor) else tensor
    if not isinstance(taken, np.ndarray):
        taken = np.from_dlpack(taken)
    return np.ascontiguousarray(taken, np.float32)


def _stored(name: str, tensor: TensorLike, size: int) -> npt.NDArray[np.uint8]:
    """Contiguous units of a tensor; what lies behind them in its last axis is left out."""
    found = _on_host(name, tensor, (DType.U8,))
    if found.dtype is not DType.U8:
        raise UnsupportedError(f"{name}.dtype is {found.dtype.name}, expected U8 (spec E.20)")
    if found.shape[-1] < size:
        raise InvalidArgumentError(
            f"{name}.shape[{found.ndim - 1}] is {found.shape[-1]}, expected at least {size} bytes "
            "(spec E.20)"
        )
    taken: Any = tensor.detach().numpy() if is_torch(tensor) else tensor
    if not isinstance(taken, np.ndarray):
        taken = np.from_dlpack(taken)
    return np.ascontiguousarray(taken[..., :size])


def _like(tensor: TensorLike, made: npt.NDArray[Any]) -> Any:
    """What was made, for the library of the tensor that was given."""
    if not is_torch(tensor):
        return made
    import torch

    return torch.from_numpy(made)

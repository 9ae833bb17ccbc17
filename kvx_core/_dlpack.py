"""DLPack capsules, read without consuming them: where a tensor of any framework lies.

Source: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from kvx_core.errors import IncompatibleError


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("dl_tensor", DLTensor),
    )


_DLPACK_FLAG_READ_ONLY = 1 << 0

_PyCapsule_IsValid = ctypes.pythonapi.PyCapsule_IsValid
_PyCapsule_IsValid.restype = c_int
_PyCapsule_IsValid.argtypes = (ctypes.py_object, c_char_p)
_PyCapsule_GetPointer = ctypes.pythonapi.PyCapsule_GetPointer
_PyCapsule_GetPointer.restype = c_void_p
_PyCapsule_GetPointer.argtypes = (ctypes.py_object, c_char_p)


class DLPackTensor(NamedTuple):
    """The tensor that a DLPack capsule describes."""

    data: int
    device_type: int
    code: int
    bits: int
    lanes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # elements; None: row-major
    writable: bool


def read_dlpack(capsule: object) -> DLPackTensor:
    """Reads a DLPack capsule without consuming it. The capsule keeps the memory alive."""
    writable = True
    if _PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        address = _PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        managed = DLManagedTensorVersioned.from_address(address)
        if managed.major != 1:
            raise IncompatibleError(
                f"the DLPack capsule has major version {managed.major}, expected 1"
            )
        writable = not managed.flags & _DLPACK_FLAG_READ_ONLY
        tensor = managed.dl_tensor
    else:  # DLManagedTensor begins with its DLTensor
        tensor = DLTensor.from_address(_PyCapsule_GetPointer(capsule, b"dltensor"))
    ndim = tensor.ndim
    return DLPackTensor(
        data=(tensor.data or 0) + tensor.byte_offset,
        device_type=tensor.device_type,
        code=tensor.code,
        bits=tensor.bits,
        lanes=tensor.lanes,
        shape=tuple(tensor.shape[:ndim]),
        strides=tuple(tensor.strides[:ndim]) if tensor.strides else None,
        writable=writable,
    )

"""DLPack capsules, read without consuming them: where a tensor of any framework lies.

Source: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from kvx_core.errors import IncompatibleError, InvalidArgumentError
from kvx_core.words import wrong


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
_MOST_DIMS = 8  # more than any tensor of KVX has; what a capsule says is read only up to it
_MOST = 2**62  # of extents, strides and bytes

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


def read_dlpack(name: str, capsule: object) -> DLPackTensor:
    """Reads a DLPack capsule without consuming it. The capsule keeps the memory alive.

    Raises InvalidArgumentError, which calls the tensor `name`, for what is no such capsule or
    describes no tensor; IncompatibleError for another major version of DLPack.
    """
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
    elif _PyCapsule_IsValid(capsule, b"dltensor"):  # DLManagedTensor begins with its DLTensor
        tensor = DLTensor.from_address(_PyCapsule_GetPointer(capsule, b"dltensor"))
    else:
        raise wrong(f"{name}.__dlpack__()", capsule, "a DLPack capsule that nobody has consumed")
    ndim, data = tensor.ndim, (tensor.data or 0) + tensor.byte_offset
    if not 0 <= ndim <= _MOST_DIMS:
        raise InvalidArgumentError(
            f"{name} is a DLPack tensor whose ndim is {ndim}, expected 0 to {_MOST_DIMS}"
        )
    if ndim and not tensor.shape:
        raise InvalidArgumentError(
            f"{name} is a DLPack tensor whose shape is NULL, expected {ndim} extents"
        )
    for axis, extent in enumerate(tensor.shape[:ndim]):
        if not 0 <= extent <= _MOST:
            raise InvalidArgumentError(
                f"{name} is a DLPack tensor whose shape[{axis}] is {extent}, expected 0 to 2^62"
            )
    if data >= 2**64:
        raise InvalidArgumentError(
            f"{name} is a DLPack tensor whose byte_offset is {tensor.byte_offset}, expected one "
            "within the memory that begins at data"
        )
    return DLPackTensor(
        data=data,
        device_type=tensor.device_type,
        code=tensor.code,
        bits=tensor.bits,
        lanes=tensor.lanes,
        shape=tuple(tensor.shape[:ndim]),
        strides=tuple(tensor.strides[:ndim]) if tensor.strides else None,
        writable=writable,
    )

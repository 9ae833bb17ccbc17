"""DLPack capsules, read without consuming them: where a tensor of any framework lies.

Source: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvx_core.argument_checks import bad_argument
from kvx_core.errors import IncompatibleError, InvalidArgumentError


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
        raise bad_argument(
            f"{name}.__dlpack__()", capsule, "a DLPack capsule that nobody has consumed"
        )
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


# DLDeviceType: kDLCPU, kDLCUDAHost and kDLROCMHost.
HOST_DEVICES = (1, 3, 11)


def capsule_of(tensor: Any) -> object:
    """A DLPack capsule of a tensor, which no copy and no synchronisation made."""
    device_type = int(tensor.__dlpack_device__()[0])
    # On a device -1 asks the producer not to synchronise; the CPU knows no streams.
    options: dict[str, Any] = {} if device_type in HOST_DEVICES else {"stream": -1}
    try:
        return tensor.__dlpack__(max_version=(1, 0), copy=False, **options)
    except TypeError:  # a producer from before DLPack 1.0
        return tensor.__dlpack__(**options)


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """An object with __dlpack__, and the capsule that it gave: what keeps its memory alive.

    The capsule keeps the memory that the object had then. The object may have other memory since,
    as an array of MLX has after each write.
    """

    tensor: Any
    capsule: object
    found: DLPackTensor

    @classmethod
    def of(cls, name: str, tensor: Any) -> Exported:
        """Raises as `read_dlpack`, and what the object raises."""
        capsule = capsule_of(tensor)
        return cls(tensor, capsule, read_dlpack(name, capsule))

    def is_in_place(self) -> bool:
        """Whether the object still has the memory that its capsule describes: asks it anew."""
        try:
            now = read_dlpack("tensor", capsule_of(self.tensor))
        except Exception:  # whatever a library raises for a tensor that is gone
            return False
        return now == self.found or (0 in now.shape and now.shape == self.found.shape)

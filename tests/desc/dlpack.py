"""DLPack tensors made by hand, as no installed library makes them and on devices not there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from kvx_core._c import dlpack

CPU, CUDA, CUDA_HOST, ROCM, MANAGED = 1, 2, 3, 10, 13
BFLOAT16 = (4, 16)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass
class Producer:
    """A tensor of some other library, seen through its DLPack methods alone."""

    data: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    device_type: int = CPU
    dtype: tuple[int, int] = BFLOAT16
    lanes: int = 1
    byte_offset: int = 0
    major: int = 1
    flags: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **options: Any) -> object:
        self.calls.append(options)
        return self._capsule(versioned=True)

    def _capsule(self, *, versioned: bool) -> object:
        self.managed = dlpack.DLManagedTensorVersioned(
            major=self.major, flags=self.flags, dl_tensor=self._tensor()
        )
        if versioned:
            return _new(ctypes.addressof(self.managed), b"dltensor_versioned", None)
        return _new(ctypes.addressof(self.managed.dl_tensor), b"dltensor", None)

    def _tensor(self) -> dlpack.DLTensor:
        ndim = len(self.shape)
        self.extents = (ctypes.c_int64 * ndim)(*self.shape)
        self.steps = None if self.strides is None else (ctypes.c_int64 * ndim)(*self.strides)
        return dlpack.DLTensor(
            data=self.data,
            device_type=self.device_type,
            ndim=ndim,
            code=self.dtype[0],
            bits=self.dtype[1],
            lanes=self.lanes,
            shape=self.extents,
            strides=self.steps,
            byte_offset=self.byte_offset,
        )


class OldProducer(Producer):
    """One from before DLPack 1.0: no options but stream, an unversioned capsule."""

    def __dlpack__(self, stream: int | None = None) -> object:  # type: ignore[override]
        return self._capsule(versioned=False)


class OnlyDLPack:
    """Hides everything of a tensor but its DLPack methods.

    `tensor` may be replaced, as libraries do that move their arrays at will.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

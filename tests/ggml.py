"""ggml's own encoders and decoders: gguf-py in numpy, and the C library.

The library is that of whisper.cpp's Python package, which brings libggml-base.so: the wheel of
manylinux for x86-64 is compiled without fused operations, as spec E.10 has it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.metadata import files
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants

from kvx_core import DType

NAMES = {
    DType.Q8_0: "q8_0",
    DType.Q4_0: "q4_0",
    DType.Q4_1: "q4_1",
    DType.IQ4_NL: "iq4_nl",
    DType.Q5_0: "q5_0",
    DType.Q5_1: "q5_1",
    DType.Q4_K: "q4_K",
    DType.Q5_K: "q5_K",
    DType.Q6_K: "q6_K",
    DType.MXFP4: "mxfp4",
}
# Those that gguf-py encodes; the others it only decodes. Of zeros of both signs it takes the first
# as the largest, and any as the least: there the C library says what is right.
IN_PYTHON = (DType.Q8_0, DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.MXFP4)
_ANY_ZERO = (DType.Q4_1, DType.Q5_1)
K_QUANTS = (DType.Q4_K, DType.Q5_K, DType.Q6_K)


def quantize(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of float32 numbers, [..., numbers] to [..., bytes]."""
    if dtype in IN_PYTHON and dtype not in _ANY_ZERO:
        return quantize_in_python(values, dtype)
    return quantize_in_c(values, dtype)


def quantize_in_python(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The same as `quantize`, by gguf-py."""
    return quants.quantize(values, GGMLQuantizationType[dtype.name])


def dequantize(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """The float32 numbers of bytes, [..., bytes] to [..., numbers], by gguf-py."""
    return quants.dequantize(np.ascontiguousarray(stored), GGMLQuantizationType[dtype.name])


def quantize_in_c(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The same as `quantize`, by the reference functions of the C library."""
    values = np.ascontiguousarray(values, np.float32)
    size = values.shape[-1] // dtype.numbers * dtype.itemsize
    stored = np.zeros((*values.shape[:-1], size), np.uint8)
    encode = getattr(_library(), f"quantize_row_{NAMES[dtype]}_ref")
    encode(
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(stored.ctypes.data),
        ctypes.c_int64(values.size),
    )
    if dtype is DType.IQ4_NL:  # where all is zero, levels are those of the unit before; later 0
        units = stored.reshape(-1, dtype.itemsize)
        units[np.abs(values.reshape(-1, dtype.numbers)).max(-1) < np.float32(1e-15)] = 0
    return stored


def type_name(number: int) -> str:
    """What ggml calls a type. Numbers above those of its version end the process."""
    name = _library().ggml_type_name
    name.restype = ctypes.c_char_p
    found: bytes = name(number)
    return found.decode()


@cache
def _library() -> Any:
    (path,) = (
        file
        for file in files("pywhispercpp") or ()
        if file.parent.name == "pywhispercpp.libs" and file.name.startswith("libggml-base")
    )
    return ctypes.CDLL(str(path.locate()))

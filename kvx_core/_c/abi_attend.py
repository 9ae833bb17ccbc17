"""kvx_attend.h for Python: the struct, and the function of the loaded libkvx."""

from __future__ import annotations

from ctypes import POINTER, c_float, c_int, c_uint32
from functools import cache
from typing import Any

from kvx_core._c import abi


class kvx_attend_desc_t(abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("block", c_uint32),
        ("start", c_uint32),
        ("end", c_uint32),
        ("query", abi.kvx_tensor_desc_t),
        ("out", abi.kvx_tensor_desc_t),
        ("k_scale", POINTER(abi.kvx_scale_desc_t)),
        ("v_scale", POINTER(abi.kvx_scale_desc_t)),
        ("scale", c_float),
        ("reserved", c_uint32),
    )


def declare(library: Any) -> Any:
    """Declares the function of kvx_attend.h for ctypes; returns it."""
    function = library.kvx_attend_kv
    function.restype = c_int
    function.argtypes = POINTER(abi.kvx_cache_desc_t), POINTER(kvx_attend_desc_t)
    return function


@cache
def function() -> Any:
    """kvx_attend_kv of libkvx."""
    return declare(abi.library())

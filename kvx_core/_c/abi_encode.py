"""kvx_encode.h for Python: the functions of the loaded libkvx."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvx_core._c import abi

HADAMARD_MAX_ORDER = 4096

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "kvx_hadamard": (c_int, (c_void_p, c_uint64, c_uint32, c_int64, c_uint32)),
}


def declare(library: Any) -> Any:
    """Declares the functions of kvx_encode.h for ctypes; returns the library."""
    return abi.declare(library, _FUNCTIONS)


@cache
def functions() -> Any:
    """libkvx."""
    return declare(abi.library())

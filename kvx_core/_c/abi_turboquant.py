"""kvx_turboquant.h for Python: the functions of the loaded libkvx."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvx_core._c import abi

RESIDUAL = 1

_UNIT = (c_uint64, c_uint32, c_uint32, c_uint32)  # rows, dim, bits, flags
_SLOT = (c_uint64, c_uint32, c_int)  # rows, dim, kind
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvx_turboquant_bytes": (c_uint32, (c_uint32, c_uint32, c_uint32)),
    "kvx_turboquant_encode": (c_int, (c_void_p, c_int64, c_void_p, c_int64, *_UNIT)),
    "kvx_turboquant_decode": (c_int, (c_void_p, c_int64, c_void_p, c_int64, *_UNIT)),
    "kvx_turboquant_slot_bytes": (c_uint32, (c_uint32, c_int)),
    "kvx_turboquant_encode_slots": (
        c_int,
        (c_void_p, c_int64, c_void_p, c_void_p, c_int64, *_SLOT),
    ),
    "kvx_turboquant_decode_slots": (
        c_int,
        (c_void_p, c_void_p, c_int64, c_void_p, c_int64, *_SLOT),
    ),
}


def declare(library: Any) -> Any:
    """Declares the functions of kvx_turboquant.h for ctypes; returns the library."""
    return abi.declare(library, _FUNCTIONS)


@cache
def functions() -> Any:
    """libkvx."""
    return declare(abi.library())

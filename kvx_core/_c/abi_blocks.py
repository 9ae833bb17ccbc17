"""kvx_blocks.h for Python: the struct, and the functions of the loaded libkvx."""

from __future__ import annotations

from ctypes import POINTER, byref, c_bool, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvx_core._c import abi


class kvx_blocks_t(abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("nb", c_uint32),
        ("nl", c_uint32),
        ("no", c_uint32),
        ("nt", c_uint32),
        ("nh", c_uint32),
        ("hd", c_uint32),
        ("itemsize", c_uint32),
        ("layout", c_int),
        ("universal_heads", c_uint32),
        ("head_start", c_uint32),
        ("alignment", c_uint32),
        ("reserved", c_uint32),
    )


_TABLE = c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvx_universal_from_block": (c_int, (_TABLE, _TABLE, POINTER(kvx_blocks_t), c_void_p)),
    "kvx_block_from_universal": (c_int, (_TABLE, _TABLE, POINTER(kvx_blocks_t), c_void_p)),
    "kvx_operational_copy": (
        c_int,
        (
            *(_TABLE, _TABLE, _TABLE, _TABLE),
            *(POINTER(kvx_blocks_t), c_int, c_int, POINTER(c_int), c_void_p),
        ),
    ),
    "kvx_vectorized_copy": (
        c_int,
        (_TABLE, _TABLE, c_uint64, c_uint32, c_int, c_uint32, c_void_p),
    ),
    "kvx_memcpy_batch": (c_int, (_TABLE, _TABLE, c_uint64, c_uint32, c_int, c_int, c_void_p)),
    "kvx_has_memcpy_batch_async": (c_bool, ()),
    "kvx_is_stub_build": (c_bool, ()),
}


def declare(library: Any) -> Any:
    """Declares the functions of kvx_blocks.h for ctypes; returns the library."""
    return abi.declare(library, _FUNCTIONS)


@cache
def functions() -> Any:
    """libkvx."""
    return declare(abi.library())


def operational_copy(lib: Any, *arguments: Any) -> tuple[int, int]:
    """kvx_operational_copy without `used`: its status, and the backend that was taken."""
    used = c_int(-1)
    *first, stream = arguments
    status: int = lib.kvx_operational_copy(*first, byref(used), stream)
    return status, used.value

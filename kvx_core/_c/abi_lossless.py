"""kvx_lossless.h for Python: the functions of the loaded libkvx."""

from __future__ import annotations

from ctypes import POINTER, byref, c_int, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvx_core._c import abi

BLOCK = 4096

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvx_lossless_bound": (c_uint64, (c_uint64,)),
    "kvx_lossless_encode": (
        c_int,
        (c_void_p, c_uint64, POINTER(c_uint64), c_void_p, c_uint64, c_int),
    ),
    "kvx_lossless_info": (c_int, (c_void_p, c_uint64, POINTER(c_uint64), POINTER(c_int))),
    "kvx_lossless_decode": (c_int, (c_void_p, c_uint64, c_uint64, c_void_p, c_uint64)),
}


def declare(library: Any) -> Any:
    """Declares the functions of kvx_lossless.h for ctypes; returns the library."""
    return abi.declare(library, _FUNCTIONS)


@cache
def functions() -> Any:
    """libkvx."""
    return declare(abi.library())


def bound(numbers: int) -> int:
    """kvx_lossless_bound."""
    return int(functions().kvx_lossless_bound(numbers))


def encode(encoded: int, capacity: int, data: int, numbers: int, dtype: int) -> int:
    """kvx_lossless_encode from and to addresses; returns how many bytes it wrote."""
    written = c_uint64()
    call = functions().kvx_lossless_encode
    abi.check(call(encoded, capacity, byref(written), data, numbers, dtype))
    return written.value


def num_numbers(encoded: int, num_bytes: int) -> int:
    """kvx_lossless_info."""
    numbers = c_uint64()
    abi.check(functions().kvx_lossless_info(encoded, num_bytes, byref(numbers), None))
    return numbers.value


def decode(data: int, first: int, count: int, encoded: int, num_bytes: int) -> None:
    """kvx_lossless_decode."""
    abi.check(functions().kvx_lossless_decode(data, first, count, encoded, num_bytes))

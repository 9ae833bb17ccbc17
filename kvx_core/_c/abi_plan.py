"""kvx_plan.h through ctypes: its structs and functions. The header says what fields mean."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_uint32,
    c_uint64,
    c_void_p,
    pointer,
    sizeof,
    string_at,
)
from functools import cache
from typing import Any

from kvx_core._c import abi

UNKNOWN = 2**64 - 1
CONVERTS, EXACT, JOINED, FINDS_SCALES, OF_SCALES, OF_ZEROS = 1, 2, 4, 8, 16, 32


class kvx_end_lookup_t(Structure):
    _fields_ = (
        ("block_table", POINTER(abi.kvx_block_table_t)),
        ("slots", POINTER(abi.kvx_slot_mapping_t)),
        ("starts", POINTER(abi.kvx_seq_lens_t)),
    )


class kvx_plan_lookups_t(abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("max_seq_len", c_uint32),
        ("seq_lens", POINTER(abi.kvx_seq_lens_t)),
        ("src", kvx_end_lookup_t),
        ("dst", kvx_end_lookup_t),
        ("io", POINTER(abi.kvx_kv_io_desc_t)),
    )


class kvx_plane_info_t(abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("layer", c_uint32),
        ("role", c_uint32),
        ("flags", c_uint32),
        ("src_dtype", c_int),
        ("dst_dtype", c_int),
        ("num_heads", c_uint32),
        ("vector_size", c_uint32),
        ("launch", c_uint32),
        ("hadamard", c_uint32),
        ("kernel", c_char_p),
        ("num_vectors", c_uint64),
        ("bytes_read", c_uint64),
        ("bytes_written", c_uint64),
        ("run_bytes", c_uint64),
    )


class kvx_plan_info_t(abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("num_planes", c_uint32),
        ("on_device", c_uint32),
        ("num_launches", c_uint32),
        ("num_threads", c_uint32),
        ("is_exact", c_uint32),
        ("num_sequences", c_uint64),
        ("num_tokens", c_uint64),
        ("num_moved", c_uint64),
        ("num_null_src", c_uint64),
        ("num_null_dst", c_uint64),
        ("bytes_read", c_uint64),
        ("bytes_written", c_uint64),
        ("copy_bytes_per_second", c_double),
        ("seconds", c_double),
    )


class kvx_range_t(Structure):
    _fields_ = (
        ("plane", c_uint32),
        ("reserved", c_uint32),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("bytes", c_uint64),
    )


kvx_take_ranges_t = CFUNCTYPE(c_int, c_void_p, POINTER(kvx_range_t), c_uint64)

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "kvx_plan_create": (POINTER(abi.kvx_migrate_desc_t), POINTER(c_void_p)),
    "kvx_plan_create_write": (
        POINTER(abi.kvx_cache_desc_t),
        POINTER(abi.kvx_write_desc_t),
        POINTER(abi.kvx_write_options_t),
        POINTER(c_void_p),
    ),
    "kvx_plan_create_gather": (
        POINTER(abi.kvx_cache_desc_t),
        POINTER(abi.kvx_gather_desc_t),
        POINTER(abi.kvx_gather_options_t),
        POINTER(c_void_p),
    ),
    "kvx_plan_run": (c_void_p, POINTER(kvx_plan_lookups_t), c_void_p),
    "kvx_plan_describe": (
        c_void_p,
        POINTER(kvx_plan_lookups_t),
        POINTER(kvx_plan_info_t),
        POINTER(kvx_plane_info_t),
        c_uint32,
    ),
    "kvx_plan_ranges": (c_void_p, POINTER(kvx_plan_lookups_t), kvx_take_ranges_t, c_void_p),
}


def declare(library: Any) -> Any:
    """Declares the functions of kvx_plan.h for ctypes; returns the library."""
    for name, argtypes in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int, argtypes
    library.kvx_plan_free.restype, library.kvx_plan_free.argtypes = None, (c_void_p,)
    return library


def lookups_of_tokens(io: abi.kvx_kv_io_desc_t, **fields: Any) -> kvx_plan_lookups_t:
    """Other keys and values for the plan of a write or gather, and what finds them."""
    return kvx_plan_lookups_t(io=pointer(io), **fields)


class Handle:
    """A kvx_plan_t, freed when nothing uses it any more."""

    def __init__(self, create: str, *structs: Structure | None) -> None:
        self.value = c_void_p()
        self.library = library()
        abi.check(getattr(self.library, create)(*structs, byref(self.value)))

    def __del__(self) -> None:
        self.library.kvx_plan_free(self.value)


def taker(take: Callable[[bytes], None]) -> Any:
    """A kvx_take_ranges_t that passes the bytes of the ranges to `take`, batch by batch."""

    def take_some(_: int, ranges: Any, count: int) -> int:
        take(string_at(ranges, count * sizeof(kvx_range_t)))
        return 0

    return kvx_take_ranges_t(take_some)


@cache
def library() -> Any:
    """libkvx."""
    return declare(abi.library())

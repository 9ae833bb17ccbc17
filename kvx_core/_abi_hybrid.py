"""kvx_hybrid.h for Python: the structs, and the functions of the loaded libkvx."""

from __future__ import annotations

from ctypes import POINTER, c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvx_core import _abi

ONE_EACH, SINGLE_ROW, BULK, NO_OVERLAP = 1, 2, 4, 8
NO_KEYS, NVFP4, MXFP4, FP8 = 0, 1, 2, 3


class kvx_hybrid_append_t(_abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("num_tokens", c_uint32),
        ("num_slots", c_uint32),
        ("window", c_uint32),
        ("nope_dim", c_uint32),
        ("rope_dim", c_uint32),
        ("position_bytes", c_uint32),
        ("flags", c_uint32),
        ("reserved", c_uint32),
        ("x", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("fp8", c_void_p),
        ("rope", c_void_p),
        ("inv_scale", c_void_p),
        ("pos", c_void_p),
        ("head", c_void_p),
    )


class kvx_hybrid_tail_t(_abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("num_tokens", c_uint32),
        ("num_slots", c_uint32),
        ("ratio", c_uint32),
        ("row", c_uint32),
        ("dtype", c_int),
        ("state", c_int),
        ("k", c_void_p),
        ("z", c_void_p),
        ("slots", c_void_p),
        ("ka", c_void_p),
        ("za", c_void_p),
        ("tail_len", c_void_p),
    )


class kvx_hybrid_compress_t(_abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("num_rows", c_uint32),
        ("num_slots", c_uint32),
        ("ratio", c_uint32),
        ("head_dim", c_uint32),
        ("rope_dim", c_uint32),
        ("position_bytes", c_uint32),
        ("num_positions", c_uint32),
        ("flags", c_uint32),
        ("state", c_int),
        ("out_dtype", c_int),
        ("eps", c_float),
        ("reserved", c_uint32),
        ("ka", c_void_p),
        ("za", c_void_p),
        ("kb", c_void_p),
        ("zb", c_void_p),
        ("ape_a", c_void_p),
        ("ape_b", c_void_p),
        ("norm_weight", c_void_p),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("mask", c_void_p),
        ("out", c_void_p),
    )


class kvx_hybrid_flush_t(_abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("num_rows", c_uint32),
        ("num_blocks", c_uint32),
        ("entries_per_block", c_uint32),
        ("nope_dim", c_uint32),
        ("rope_dim", c_uint32),
        ("max_blocks", c_uint32),
        ("key_dim", c_uint32),
        ("keys", c_int),
        ("dtype", c_int),
        ("reserved", c_uint32),
        ("entry", c_void_p),
        ("index_key", c_void_p),
        ("slots", c_void_p),
        ("entry_ids", c_void_p),
        ("mask", c_void_p),
        ("block_table", c_void_p),
        ("fp8", c_void_p),
        ("rope", c_void_p),
        ("inv_scale", c_void_p),
        ("keys_fp4", c_void_p),
        ("key_scales", c_void_p),
    )


class kvx_hybrid_state_t(_abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("num_rows", c_uint32),
        ("num_slots", c_uint32),
        ("ratio", c_uint32),
        ("row", c_uint32),
        ("state", c_int),
        ("reserved", c_uint32),
        ("slots", c_void_p),
        ("mask", c_void_p),
        ("ka", c_void_p),
        ("za", c_void_p),
        ("kb", c_void_p),
        ("zb", c_void_p),
        ("tail_len", c_void_p),
    )


class kvx_hybrid_pages_t(_abi._Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("num_rows", c_uint32),
        ("num_pages", c_uint32),
        ("entries_per_page", c_uint32),
        ("dtype", c_int),
        ("page_stride", c_uint64),
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("pages", c_void_p),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    name: (c_int, (POINTER(struct), c_void_p))
    for name, struct in (
        ("kvx_hybrid_append_swa", kvx_hybrid_append_t),
        ("kvx_hybrid_append_tail", kvx_hybrid_tail_t),
        ("kvx_hybrid_compress", kvx_hybrid_compress_t),
        ("kvx_hybrid_flush_write", kvx_hybrid_flush_t),
        ("kvx_hybrid_rotate_state", kvx_hybrid_state_t),
        ("kvx_hybrid_write_pages", kvx_hybrid_pages_t),
        ("kvx_hybrid_read_pages", kvx_hybrid_pages_t),
    )
}


def declare(library: Any) -> Any:
    """Declares the functions of kvx_hybrid.h for ctypes; returns the library."""
    return _abi.declare(library, _FUNCTIONS)


@cache
def functions() -> Any:
    """libkvx."""
    return declare(_abi.library())

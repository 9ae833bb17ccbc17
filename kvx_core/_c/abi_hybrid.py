"""kvx_hybrid.h for Python: the structs, and the functions of the loaded libkvx."""

from __future__ import annotations

from ctypes import POINTER, c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvx_core._c import abi

ONE_EACH, SINGLE_ROW, BULK, NO_OVERLAP, THRESHOLDS = 1, 2, 4, 8, 16
NO_KEYS, NVFP4, MXFP4, FP8 = 0, 1, 2, 3


def _fields(*groups: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Fields of a struct: after size and memory, names that follow each other with one type."""
    named = [(name, kind) for kind, names in groups for name in names.split()]
    return ("size", c_uint32), ("memory", c_int), *named


class kvx_hybrid_append_t(abi._Struct):
    _fields_ = _fields(
        (c_uint32, "num_tokens num_slots window nope_dim rope_dim position_bytes flags num_spans"),
        (c_void_p, "x positions slots fp8 rope inv_scale pos head span_of span_starts"),
    )


class kvx_hybrid_tail_t(abi._Struct):
    _fields_ = _fields(
        (c_uint32, "num_tokens num_slots ratio row"),
        (c_int, "dtype state"),
        (c_void_p, "k z slots ka za tail_len"),
        (c_uint32, "num_spans reserved"),
        (c_void_p, "span_of span_starts"),
    )


class kvx_hybrid_compress_t(abi._Struct):
    _fields_ = _fields(
        (c_uint32, "num_rows num_slots ratio head_dim rope_dim position_bytes num_positions flags"),
        (c_int, "state out_dtype"),
        (c_float, "eps"),
        (c_uint32, "reserved"),
        (c_void_p, "ka za kb zb ape_a ape_b norm_weight cos_sin positions slots mask out"),
    )


class kvx_hybrid_flush_t(abi._Struct):
    _fields_ = _fields(
        (c_uint32, "num_rows num_blocks entries_per_block nope_dim rope_dim max_blocks key_dim"),
        (c_int, "keys dtype"),
        (c_uint32, "flags"),
        (c_void_p, "entry index_key slots entry_ids mask block_table"),
        (c_void_p, "fp8 rope inv_scale key_codes key_scales"),
    )


class kvx_hybrid_state_t(abi._Struct):
    _fields_ = _fields(
        (c_uint32, "num_rows num_slots ratio row"),
        (c_int, "state"),
        (c_uint32, "reserved"),
        (c_void_p, "slots mask ka za kb zb tail_len"),
    )


class kvx_hybrid_pages_t(abi._Struct):
    _fields_ = _fields(
        (c_uint32, "num_rows num_pages entries_per_page"),
        (c_int, "dtype"),
        (c_uint64, "page_stride"),
        (c_void_p, "slots rows pages"),
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
    return abi.declare(library, _FUNCTIONS)


@cache
def functions() -> Any:
    """libkvx."""
    return declare(abi.library())

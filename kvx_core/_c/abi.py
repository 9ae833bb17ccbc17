"""libkvx through ctypes: the structs and calls of the headers in csrc/include/kvx.

Besides this room, only stores/beneath.py imports ctypes.
Structs carry the names, field order and sizes of the headers; what a field means is written there.
Spec: 3, 6
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    pointer,
    sizeof,
)
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from kvx_core.errors import BY_STATUS, IncompatibleError, InternalError, InvalidArgumentError

PACKAGE = Path(__file__).absolute().parents[1]  # kvx_core, where the libraries lie
ABI_MAJOR, ABI_MINOR = 1, 0
MAX_TENSOR_DIMS = 5
MAX_PLANE_AXES = 8
PLANE_REPLICATED = 1
FLAG_KVCACHEINDEX = 1 << 0
FLAG_EXACT = 1 << 1
FLAG_WHOLE = 1 << 2
FLAG_HOLES = 1 << 3
FLAG_ZERO_FILL = 1 << 0
FLAG_BACKGROUND = 1 << 1
FLAG_COPY_ENGINE = 1 << 2
FLAG_FIND_SCALES = 1 << 3
FLAG_REQUANTIZE = 1 << 4
NO_NULL_BLOCK = -1
FORMAT_ELEMENT, FORMAT_SCALED, FORMAT_ZEROS, FORMAT_GROUPS = 1, 2, 4, 8

_Dims = c_int64 * MAX_TENSOR_DIMS


class _Struct(ctypes.Structure):
    """A struct that begins with `size`, which the constructor fills in."""

    _counts: ClassVar[set[str]]  # names of its uint32 fields

    def __init__(self, **fields: Any) -> None:
        for name in self._counts & fields.keys():
            check_uint32(name, fields[name])
        super().__init__(size=sizeof(self), **fields)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._counts = {name for name, field_type, *_ in cls._fields_ if field_type is c_uint32}


def check_uint32(name: str, count: int) -> None:
    """Raises InvalidArgumentError for a count that ctypes would silently cut to 32 bits."""
    if not 0 <= count < 2**32:
        raise InvalidArgumentError(f"{name} is {count}, expected 0 to {2**32 - 1}")


class kvx_version_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("abi_major", c_uint32),
        ("abi_minor", c_uint32),
        ("abi_patch", c_uint32),
    )


class kvx_tensor_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("dtype", c_int),
        ("layout", c_int),
        ("memory", c_int),
        ("ndim", c_uint32),
        ("shape", _Dims),
        ("stride", _Dims),
        ("data", c_void_p),
    )


class kvx_pool_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("memory", c_int),
        ("bytes_per_block", c_uint32),
        ("primary", c_void_p),
        ("secondary", c_void_p),
    )


class kvx_cache_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("num_blocks", c_uint32),
        ("block_size", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("k", kvx_tensor_desc_t),
        ("v", kvx_tensor_desc_t),
        ("pool", kvx_pool_desc_t),
    )


class kvx_block_table_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("format", c_int),
        ("index_dtype", c_int),
        ("indptr_dtype", c_int),
        ("seq_count", c_uint32),
        ("beam_width", c_uint32),
        ("max_blocks_per_seq", c_uint32),
        ("indices", c_void_p),
        ("indptr", c_void_p),
        ("indices_count", c_uint32),
        ("indptr_count", c_uint32),
        ("flags", c_uint32),
    )


class kvx_slot_mapping_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("dtype", c_int),
        ("token_count", c_uint32),
        ("invalid_slot", c_int64),
        ("slots", c_void_p),
    )


class kvx_seq_lens_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("dtype", c_int),
        ("seq_count", c_uint32),
        ("lengths", c_void_p),
    )


class kvx_kv_io_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("key", kvx_tensor_desc_t),
        ("value", kvx_tensor_desc_t),
        ("num_tokens", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
    )


class kvx_scale_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("dtype", c_int),
        ("granularity", c_int),
        ("ndim", c_uint32),
        ("shape", _Dims),
        ("stride", _Dims),
        ("data", c_void_p),
    )


class kvx_write_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("io", kvx_kv_io_desc_t),
        ("slots", kvx_slot_mapping_t),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("k_scale_desc", kvx_scale_desc_t),
        ("v_scale_desc", kvx_scale_desc_t),
    )


class kvx_gather_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("io", kvx_kv_io_desc_t),
        ("block_table", kvx_block_table_t),
        ("seq_lens", kvx_seq_lens_t),
        ("max_seq_len", c_uint32),
    )


class kvx_backend_info_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("has_cuda", c_uint32),
        ("num_threads", c_uint32),
        ("reserved", c_uint32),
        ("cpu_isa", c_char_p),
        ("version", c_char_p),
        ("stream_bytes", c_uint64),
    )


class kvx_format_info_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("numbers", c_uint32),
        ("bytes", c_uint32),
        ("alignment", c_uint32),
        ("digits", c_uint32),
        ("lowest", c_int32),
        ("largest", c_float),
    )


class kvx_write_options_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("flags", c_uint32),
    )


class kvx_gather_options_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("flags", c_uint32),
        ("reserved_0", c_int64),
        ("secondary_num_blocks", c_uint32),
        ("reserved_1", c_uint32),
        ("k_scale", POINTER(kvx_scale_desc_t)),
        ("v_scale", POINTER(kvx_scale_desc_t)),
        ("null_block_plus_1", c_uint64),
    )


class kvx_plane_axis_t(ctypes.Structure):
    _fields_ = (
        ("axis", c_int),
        ("reserved", c_uint32),
        ("extent", c_int64),
        ("stride_bytes", c_int64),
    )


class kvx_plane_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("role", c_uint32),
        ("layer", c_uint32),
        ("dtype", c_int),
        ("memory", c_int),
        ("tokens_per_entry", c_uint32),
        ("flags", c_uint32),
        ("num_axes", c_uint32),
        ("axes", kvx_plane_axis_t * MAX_PLANE_AXES),
        ("data", c_void_p),
        ("scale", POINTER(kvx_scale_desc_t)),
        ("zero", POINTER(kvx_scale_desc_t)),
        ("block_table", POINTER(kvx_block_table_t)),
        ("slots", POINTER(kvx_slot_mapping_t)),
        ("reserved", c_uint64 * 5),
    )


class kvx_span_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("num_layers", c_uint32),
        ("layers", POINTER(POINTER(kvx_cache_desc_t))),
        ("block_table", POINTER(kvx_block_table_t)),
        ("slots", POINTER(kvx_slot_mapping_t)),
        ("starts", POINTER(kvx_seq_lens_t)),
        ("head_start", c_uint32),
        ("secondary_num_blocks", c_uint32),
        ("reserved_0", c_int64),
        ("k_scales", POINTER(POINTER(kvx_scale_desc_t))),
        ("v_scales", POINTER(POINTER(kvx_scale_desc_t))),
        ("null_block_plus_1", c_uint64),
        ("k_zeros", POINTER(POINTER(kvx_scale_desc_t))),
        ("v_zeros", POINTER(POINTER(kvx_scale_desc_t))),
        ("planes", POINTER(POINTER(kvx_plane_t))),
        ("num_planes", c_uint32),
        ("reserved_1", c_uint32),
    )


class kvx_migrate_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("flags", c_uint32),
        ("num_heads", c_uint32),
        ("max_seq_len", c_uint32),
        ("seq_lens", POINTER(kvx_seq_lens_t)),
        ("src", POINTER(kvx_span_t)),
        ("dst", POINTER(kvx_span_t)),
    )


class kvx_place_t(ctypes.Structure):
    _fields_ = (("block", c_int64), ("offset", c_uint32), ("pool", c_uint32))


class kvx_find_desc_t(_Struct):
    _fields_ = (
        ("size", c_uint32),
        ("is_v", c_uint32),
        ("span", POINTER(kvx_span_t)),
        ("seq_lens", POINTER(kvx_seq_lens_t)),
        ("place_count", c_uint64),
        ("places", c_void_p),
        ("plane_plus_1", c_uint32),
        ("layer", c_uint32),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "kvx_get_version": (POINTER(kvx_version_t),),
    "kvx_check_version": (c_uint32, c_uint32),
    "kvx_validate_cache_desc": (POINTER(kvx_cache_desc_t),),
    "kvx_write_kv": (POINTER(kvx_cache_desc_t), POINTER(kvx_write_desc_t), c_void_p),
    "kvx_write_kv_ext": (
        POINTER(kvx_cache_desc_t),
        POINTER(kvx_write_desc_t),
        POINTER(kvx_write_options_t),
        c_void_p,
    ),
    "kvx_write_layers": (
        POINTER(POINTER(kvx_cache_desc_t)),
        POINTER(POINTER(kvx_write_desc_t)),
        c_uint32,
        POINTER(kvx_write_options_t),
        c_void_p,
    ),
    "kvx_gather_kv": (POINTER(kvx_cache_desc_t), POINTER(kvx_gather_desc_t), c_void_p),
    "kvx_gather_kv_ext": (
        POINTER(kvx_cache_desc_t),
        POINTER(kvx_gather_desc_t),
        POINTER(kvx_gather_options_t),
        c_void_p,
    ),
    "kvx_migrate_kv": (POINTER(kvx_migrate_desc_t), c_void_p),
    "kvx_find_tokens": (POINTER(kvx_find_desc_t),),
    "kvx_device_status": (c_void_p,),
    "kvx_backend_info": (POINTER(kvx_backend_info_t),),
    "kvx_format_info": (c_int, POINTER(kvx_format_info_t)),
    "kvx_set_num_threads": (c_uint32,),
    "kvx_set_host_threads": (c_void_p, c_uint32),
}


@cache
def library() -> Any:
    """libkvx, loaded once."""
    return load(library_path())


def library_path() -> Path:
    """The file that $KVX_LIBRARY names, or else libkvx.so in the folder of this package."""
    named = os.environ.get("KVX_LIBRARY")
    return Path(named) if named else PACKAGE / "libkvx.so"


def load(path: Path) -> Any:
    """The libkvx at `path`, its functions ready to be called.

    Raises ImportError if there is none, IncompatibleError if it is not of our ABI version.
    """
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"libkvx is not at {path} ({error}). Build it with `pip install -e .` in the KVX "
            "repository, or set KVX_LIBRARY to its path"
        ) from None
    try:
        declare(lib, {"kvx_last_error": (c_char_p, ())})
        declare(lib, {name: (c_int, arguments) for name, arguments in _FUNCTIONS.items()})
    except AttributeError as error:
        raise IncompatibleError(
            f"{path} is not the libkvx that this kvx_core was made for: {error}. Rebuild it"
        ) from None
    if lib.kvx_check_version(ABI_MAJOR, ABI_MINOR):
        raise IncompatibleError(
            f"{path} is of another version than this kvx_core: {lib.kvx_last_error().decode()}. "
            "Install both from the same release"
        )
    return lib


def declare(library: Any, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> Any:
    """Tells ctypes each function's result and arguments; returns the library."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def openmp() -> tuple[int, int] | None:
    """Finds GOMP_parallel in the OpenMP runtime that this process has loaded, and the number of
    threads that it gives this thread; None if there is no such runtime.
    """
    process = ctypes.CDLL(None)
    try:
        run, num_threads = process.GOMP_parallel, process.omp_get_max_threads()
    except AttributeError:
        return None
    return ctypes.cast(run, c_void_p).value or 0, num_threads


def check(status: int, lib: Any = None) -> None:
    """Raises the exception of a failing `status` with the sentence that C left for it."""
    if status:
        sentence = (lib or library()).kvx_last_error().decode()
        raise BY_STATUS.get(status, InternalError)(sentence)


def format_info(dtype: int) -> kvx_format_info_t:
    """What libkvx's table says of a kvx_dtype_t."""
    info = kvx_format_info_t()
    check(library().kvx_format_info(dtype, info))
    return info


_S = TypeVar("_S", bound=_Struct)


def flags(zero_fill: bool = False, find_scales: bool = False, requantize: bool = False) -> int:
    """The KVX_FLAG_* of a call, without its Transfer, whose values are flags themselves."""
    found = FLAG_FIND_SCALES * find_scales | FLAG_REQUANTIZE * requantize
    return FLAG_ZERO_FILL * zero_fill | found


def rotation_flags(of_k: int, of_v: int) -> int:
    """KVX_FLAG_HADAMARD_K and _V for these numbers of a group, powers of two; 0: not rotated."""
    of_k, of_v = ((order or 1).bit_length() - 1 for order in (of_k, of_v))
    return of_k << 8 | of_v << 12


def null_block_plus_1(null_block_id: int) -> int:
    """The C field for null_block_id; a negative id means that there is no null block."""
    return max(0, null_block_id + 1)


def dims(extents: Sequence[int]) -> Any:
    """`extents` as the ABI's int64[5], the unused ones zero."""
    return _Dims(*extents)


class Described(Protocol):
    """A descriptor, which `to_c` makes a C struct."""

    def to_c(self) -> _Struct: ...


def pointer_to(desc: Described | None) -> Any:
    """A pointer to the struct of `desc` that keeps the struct alive; NULL for None."""
    return None if desc is None else pointer(desc.to_c())


def address_of(struct: _Struct | None) -> int | None:
    """The address of a struct, valid while the struct is kept alive."""
    return None if struct is None else ctypes.addressof(struct)


def pointer_array(structs: Sequence[_S | None], struct_type: type[_S]) -> Any:
    """A C array of pointers that keeps `structs` alive; NULL where one is None."""
    array = (POINTER(struct_type) * len(structs))()
    for i, struct in enumerate(structs):
        if struct is not None:
            array[i] = pointer(struct)
    return array


def reference(struct: _Struct) -> Any:
    """`struct` as an argument of one call, which keeps it alive."""
    return ctypes.byref(struct)


Stream = int | Callable[[], int] | None  # a CUDA stream, or a function that each call asks for it


def stream_now(stream: Stream) -> int | None:
    """The stream of a call made now."""
    return stream() if callable(stream) else stream


def read(address: int, num_bytes: int) -> memoryview:
    """`num_bytes` of HOST memory, read-only and uncopied; the caller keeps it alive."""
    array = (ctypes.c_char * num_bytes).from_address(address)
    return memoryview(array).toreadonly()

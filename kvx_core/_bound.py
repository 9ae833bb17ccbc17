"""Calls of libkvx that read their torch tensors in C, made once and called many times.

Such a call takes tensors as they usually come, in less than a microsecond. It answers NOT_TAKEN,
and has done nothing, for all others; its caller then describes them in Python. It is also NOT_TAKEN
once the storage of a tensor that it is bound to has been resized or replaced. Tensors are read
through the DLPack exchange API, which torch has from 2.10 on, and older releases with the package
torch-c-dlpack-ext: without it every call is NOT_TAKEN. What DLPack leaves out (torch's negative
bit, the size of the storage) C functions of torch tell, of the at::Tensor in a Python object.
Source: https://dmlc.github.io/dlpack/latest/python_spec.html; torch 2.13
csrc/autograd/python_variable.h, csrc/inductor/aoti_torch/c/shim.h
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_bool, c_int, c_int64, c_ssize_t, c_void_p, py_object
from functools import cache
from pathlib import Path
from typing import Any

from kvx_core import _abi
from kvx_core.types import Memory

NOT_TAKEN = -1
_EXCHANGE_API = "__dlpack_c_exchange_api__"
_WORD = ctypes.sizeof(c_void_p)
_IS_NEG = "_ZN2at6native6is_negERKNS_6TensorE"  # bool at::native::is_neg(const at::Tensor &)

Call = Callable[..., int]  # tensors -> kvx_status_t or NOT_TAKEN


class _TensorType(ctypes.Structure):
    """TensorType of csrc/python/bound.cc."""

    _fields_ = (
        ("type", py_object),
        ("to_dlpack", c_void_p),
        ("type_offset", c_ssize_t),
        ("handle_offset", c_ssize_t),
        ("is_neg", c_void_p),
        ("data_ptr", c_void_p),
        ("storage_bytes", c_void_p),
    )


class _Held(ctypes.Structure):
    """Held of csrc/python/bound.cc."""

    _fields_ = (("tensor", py_object), ("data", c_void_p), ("storage_bytes", c_int64))


class _Binding(ctypes.Structure):
    """Binding of csrc/python/bound.cc."""

    _fields_ = (
        ("tensors", _TensorType),
        ("held", POINTER(_Held)),
        ("num_held", c_ssize_t),
        ("cache", POINTER(_abi.kvx_cache_desc_t)),
        ("index_memory", c_int),
        ("stream", c_void_p),
        ("ask_stream", py_object),
        ("kept", py_object),
    )


def write(
    cache: _abi.kvx_cache_desc_t,
    like: _abi.kvx_write_desc_t,
    options: _abi.kvx_write_options_t,
    index_memory: Memory,
    stream: _abi.Stream,
    owners: Sequence[Any],
) -> Call:
    """kvx_write_kv_ext of (key, value or None, slots), the rest as in `like`.

    owners: the torch tensors that the structs describe, as they lie now: the call keeps them.
            Memory of other libraries is for the caller to keep.
    """
    return _bind("write", cache, like, options, index_memory, stream, owners)


def gather(
    cache: _abi.kvx_cache_desc_t,
    like: _abi.kvx_gather_desc_t,
    options: _abi.kvx_gather_options_t,
    index_memory: Memory,
    stream: _abi.Stream,
    owners: Sequence[Any],
) -> Call:
    """kvx_gather_kv_ext of (key, value or None, block_table, seq_lens), the rest as in `like`.

    block_table is PACKED.
    owners: the torch tensors that the structs describe, as they lie now: the call keeps them.
            Memory of other libraries is for the caller to keep.
    """
    return _bind("gather", cache, like, options, index_memory, stream, owners)


def fingerprint() -> Callable[..., bytes | int]:
    """Of up to 4 tensors or None: where they lie, device, dtype, shape and strides, as bytes."""
    tensors = _torch_type()
    if tensors is None:
        return take_nothing
    function: Callable[..., bytes | int] = _library().kvx_python_fingerprint(byref(tensors))
    return function


def in_place(owners: Sequence[Any]) -> Callable[[], bool]:
    """Asks whether these torch tensors all have the memory and the storage that they have now."""
    tensors, held = _torch_type(), _held(owners)
    if tensors is None:
        places = [(place.tensor, place.data, place.storage_bytes) for place in held]
        return lambda: all(
            tensor.data_ptr() == (data or 0) and tensor.untyped_storage().nbytes() == num_bytes
            for tensor, data, num_bytes in places
        )
    function: Callable[[], bool] = _library().kvx_python_in_place(
        byref(tensors), held, len(held), (tensors, held)
    )
    return function


def _held(owners: Sequence[Any]) -> Any:
    held = (_Held * len(owners))()
    for place, owner in zip(held, owners, strict=True):
        place.tensor, place.data = owner, owner.data_ptr()
        place.storage_bytes = owner.untyped_storage().nbytes()
    return held


def _bind(
    name: str, cache: Any, like: Any, options: Any, memory: Memory, stream: Any, owners: Any
) -> Call:
    tensors = _torch_type()
    if tensors is None:
        return take_nothing
    held = _held(owners)
    fixed, ask = (None, stream) if callable(stream) else (stream, None)
    kept = tensors, held, cache, like, options, ask
    binding = _Binding(tensors, held, len(owners), ctypes.pointer(cache), memory, fixed, ask, kept)
    function = ctypes.cast(getattr(_abi.library(), f"kvx_{name}_kv_ext"), c_void_p)
    bind = getattr(_library(), f"kvx_python_{name}")
    call: Call = bind(byref(binding), function, byref(like), byref(options))
    return call


def take_nothing(*_: object) -> int:
    """A call that no tensors are right for."""
    return NOT_TAKEN


@cache
def _library() -> Any:
    """libkvx_python, loaded once: beside this file, or else beside the libkvx in use."""
    name = "libkvx_python.so"
    path = Path(__file__).with_name(name)
    if not path.exists():
        path = _abi.library_path().with_name(name)
    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"{name} is neither in {Path(__file__).parent} nor at {path} ({error}). Build it with "
            "`pip install -e .` in the KVX repository"
        ) from None
    library.kvx_python_reader.argtypes = (py_object,)
    library.kvx_python_reader.restype = c_void_p
    library.kvx_python_fingerprint.argtypes = (POINTER(_TensorType),)
    library.kvx_python_fingerprint.restype = py_object
    library.kvx_python_in_place.argtypes = (
        POINTER(_TensorType),
        POINTER(_Held),
        c_ssize_t,
        py_object,
    )
    library.kvx_python_in_place.restype = py_object
    library.kvx_python_write.restype = py_object
    library.kvx_python_gather.restype = py_object
    return library


def _torch_type() -> _TensorType | None:
    """How torch.Tensor is read; None if nothing reads it."""
    reader = _torch_reader()
    functions = reader and _torch_functions()
    return _TensorType(*reader, *functions) if reader and functions else None


def _torch_reader() -> tuple[Any, int] | None:
    """torch.Tensor and what hands out its DLPack view; None if nothing does."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if not hasattr(torch.Tensor, _EXCHANGE_API):
        _extend_torch()
    api = getattr(torch.Tensor, _EXCHANGE_API, None)
    reader = api and _library().kvx_python_reader(api)
    return (torch.Tensor, reader) if reader else None


@cache
def _torch_functions() -> tuple[int, ...] | None:
    """Where a torch.Tensor has its type and its at::Tensor, and the C functions to ask about it.

    None if this torch has them elsewhere: asked about a plain and a negative tensor, they have to
    answer as the methods do.
    """
    torch = sys.modules["torch"]
    process = ctypes.CDLL(torch._C.__file__)  # and all that it is linked to
    try:
        is_neg = process[_IS_NEG]
        data_ptr, storage_bytes = (
            process.aoti_torch_get_data_ptr,
            process.aoti_torch_get_storage_size,
        )
    except AttributeError:
        return None
    is_neg.argtypes, is_neg.restype = (c_void_p,), c_bool
    plain = torch.zeros(7)[2:]
    negative = torch._neg_view(plain)
    both, header, size = (plain, negative), object.__basicsize__, torch.Tensor.__basicsize__
    type_offset = _offset(range(0, header, _WORD), {id(t): id(torch.Tensor) for t in both})
    offset = _offset(range(header, size, _WORD), {id(t): t._cdata for t in both})
    if type_offset is None or offset is None:
        return None
    for tensor in both:
        handle, data, num_bytes = id(tensor) + offset, c_void_p(), c_int64()
        failed = data_ptr(c_void_p(handle), byref(data))
        failed |= storage_bytes(c_void_p(handle), byref(num_bytes))
        answers = (failed, is_neg(handle), data.value, num_bytes.value)
        if answers != (0, tensor.is_neg(), tensor.data_ptr(), 28):
            return None
    functions = (ctypes.cast(f, c_void_p).value or 0 for f in (is_neg, data_ptr, storage_bytes))
    return type_offset, offset, *functions


def _offset(offsets: range, words: dict[int, int]) -> int | None:
    """The first offset at which each of these objects, by address, has its word."""
    for offset in offsets:
        if all(c_void_p.from_address(at + offset).value == word for at, word in words.items()):
            return offset
    return None


@cache
def _extend_torch() -> None:
    """Has an older torch offer the exchange API, where the package that makes it do so is there."""
    with suppress(ImportError, AttributeError, OSError):  # the latter two: for another torch
        importlib.import_module("torch_c_dlpack_ext")

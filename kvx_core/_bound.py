"""Calls of libkvx that read their torch tensors in C, made once and called many times.

Such a call takes tensors as they usually come, in less than a microsecond. It answers NOT_TAKEN,
and has done nothing, for all others; its caller then describes them in Python. Tensors are read
through the DLPack exchange API, which torch has from 2.10 on, and older releases with the package
torch-c-dlpack-ext: without it every call is NOT_TAKEN.
Source: https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, byref, c_int, c_void_p, py_object
from functools import cache
from pathlib import Path
from typing import Any

from kvx_core import _abi
from kvx_core.types import Memory

NOT_TAKEN = -1
_EXCHANGE_API = "__dlpack_c_exchange_api__"

Call = Callable[..., int]  # tensors -> kvx_status_t or NOT_TAKEN


class _Binding(ctypes.Structure):
    """Binding of csrc/python/bound.cc."""

    _fields_ = (
        ("type", py_object),
        ("to_dlpack", c_void_p),
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
) -> Call:
    """kvx_write_kv_ext of (key, value or None, slots), the rest as in `like`.

    The caller keeps the tensors that the structs describe for as long as the call.
    """
    return _bind("write", cache, like, options, index_memory, stream)


def gather(
    cache: _abi.kvx_cache_desc_t,
    like: _abi.kvx_gather_desc_t,
    options: _abi.kvx_gather_options_t,
    index_memory: Memory,
    stream: _abi.Stream,
) -> Call:
    """kvx_gather_kv_ext of (key, value or None, block_table, seq_lens), the rest as in `like`.

    block_table is PACKED. The caller keeps the tensors that the structs describe for as long as the
    call.
    """
    return _bind("gather", cache, like, options, index_memory, stream)


def fingerprint() -> Callable[..., bytes | int]:
    """Of up to 4 tensors or None: where they lie, device, dtype, shape and strides, as bytes."""
    reader = _torch_reader()
    if reader is None:
        return take_nothing
    function: Callable[..., bytes | int] = _library().kvx_python_fingerprint(*reader)
    return function


def _bind(name: str, cache: Any, like: Any, options: Any, memory: Memory, stream: Any) -> Call:
    reader = _torch_reader()
    if reader is None:
        return take_nothing
    fixed, ask = (None, stream) if callable(stream) else (stream, None)
    kept = reader, cache, like, options, ask
    binding = _Binding(*reader, ctypes.pointer(cache), memory, fixed, ask, kept)
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
    library.kvx_python_fingerprint.argtypes = (py_object, c_void_p)
    library.kvx_python_fingerprint.restype = py_object
    library.kvx_python_write.restype = py_object
    library.kvx_python_gather.restype = py_object
    return library


def _torch_reader() -> tuple[Any, int] | None:
    """torch.Tensor and what reads such tensors; None if nothing does."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if not hasattr(torch.Tensor, _EXCHANGE_API):
        _extend_torch()
    api = getattr(torch.Tensor, _EXCHANGE_API, None)
    reader = api and _library().kvx_python_reader(api)
    return (torch.Tensor, reader) if reader else None


@cache
def _extend_torch() -> None:
    """Has an older torch offer the exchange API, where the package that makes it do so is there."""
    with suppress(ImportError, AttributeError, OSError):  # the latter two: for another torch
        importlib.import_module("torch_c_dlpack_ext")

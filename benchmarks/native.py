"""native.c from Python, compiled when it has changed: plain copies, calls of libkvx timed in C."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx_core._c import abi

_ROOT = Path(__file__).resolve().parent.parent
_SOURCE = _ROOT / "benchmarks" / "native.c"
_LIBRARY = _ROOT / "build" / "benchmarks" / "native.so"
_FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]

METHODS = {"memcpy": 0, "stream": 1, "blocks": 2}
_STREAM_PIECE_BYTES = 1 << 20  # short enough that threads end together


class _Piece(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("dst_bytes", ctypes.c_void_p),
        ("src_bytes", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("row_bytes", ctypes.c_size_t),
    )


def compiler() -> str:
    """The C compiler, $CC or cc, and its version."""
    command = shlex.split(os.environ.get("CC", "cc"))
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


@cache
def library() -> Any:
    """The compiled native.c."""
    if not _LIBRARY.exists() or _LIBRARY.stat().st_mtime < _SOURCE.stat().st_mtime:
        _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        include = f"-I{_ROOT / 'csrc' / 'include'}"
        command = [*shlex.split(os.environ.get("CC", "cc")), *_FLAGS, include, str(_SOURCE)]
        subprocess.run([*command, "-o", str(_LIBRARY)], check=True)
    loaded = ctypes.CDLL(str(_LIBRARY))
    loaded.bench_stream_isa.restype = ctypes.c_char_p
    loaded.bench_evict.restype = ctypes.c_uint64
    loaded.bench_evict.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for name, argtypes in {
        "bench_copy": [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t],
        "bench_convert": [ctypes.c_void_p, ctypes.c_size_t],
        "bench_rows": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t],
        "bench_write": [*[ctypes.c_void_p] * 3, ctypes.c_size_t],
        "bench_write_each": [*[ctypes.c_void_p] * 3, ctypes.c_uint32, ctypes.c_size_t],
        "bench_write_layers": [*[ctypes.c_void_p] * 3, ctypes.c_uint32, ctypes.c_size_t],
        "bench_gather": [*[ctypes.c_void_p] * 3, ctypes.c_size_t],
        "bench_migrate": [*[ctypes.c_void_p] * 2, ctypes.c_size_t],
    }.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = ctypes.c_double, argtypes
    return loaded


def stream_isa() -> str | None:
    """The streaming stores of method "stream" here: "avx512", "avx2", or None for none."""
    isa: bytes | None = library().bench_stream_isa()
    return None if isa is None else isa.decode()


class _Pieces:
    """Pieces of memory, copied by one method."""

    def __init__(self, pieces: Sequence[tuple[int, int, int]], method: str, threads: int) -> None:
        self._method, self._threads = METHODS[method], threads
        self._pieces = (_Piece * len(pieces))(*pieces)

    def __call__(self) -> float:
        """Copies once. Returns seconds."""
        seconds: float = library().bench_copy(
            self._method, self._threads, self._pieces, len(self._pieces)
        )
        if seconds < 0:
            raise RuntimeError(
                f"no copy by method {self._method} with {self._threads} threads on this machine"
            )
        return seconds


class PlainCopy(_Pieces):
    """The bytes of whole tensors.

    pairs:  (destination, source) tensors, contiguous, of the same number of bytes each
    method: "memcpy", one call per tensor and thread; "stream", in pieces of 1 MiB
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], method: str, threads: int) -> None:
        self._keep = pairs
        pieces = []
        for dst, src in pairs:
            size = dst.numel() * dst.element_size()
            step = -(-size // threads) if method == "memcpy" else _STREAM_PIECE_BYTES
            for start in range(0, size, step):
                addresses = dst.data_ptr() + start, src.data_ptr() + start
                pieces.append((*addresses, min(step, size - start)))
        super().__init__(pieces, method, threads)


# (destination, source, blocks of the destination, blocks of the source)
Blocks = tuple[Tensor, Tensor, Tensor, Tensor]


class BlockCopy(_Pieces):
    """The blocks of tensors, one after the other with streaming stores, the next one fetched.

    Contiguous tensors of the same bytes, cut into as many blocks as there are ids of each.
    """

    def __init__(self, tensors: Sequence[Blocks], threads: int) -> None:
        self._keep = tensors
        pieces = []
        for dst, src, to, from_ in tensors:
            size = dst.numel() * dst.element_size() // to.numel()
            for i, j in zip(to.tolist(), from_.tolist(), strict=True):
                pieces.append((dst.data_ptr() + i * size, src.data_ptr() + j * size, size))
        super().__init__(pieces, "blocks", threads)


class RowCopy:
    """A memcpy per contiguous piece, on one thread.

    tensors: (destination, source, destination offsets, source offsets) each; offsets in bytes,
             int64, one per piece of `row_bytes`
    """

    def __init__(self, tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], row_bytes: int):
        self._keep = tensors
        self._rows = (_Rows * len(tensors))(
            *[
                _Rows(*[t.data_ptr() for t in (dst, src, to, from_)], to.numel(), row_bytes)
                for dst, src, to, from_ in tensors
            ]
        )

    def __call__(self, repeats: int) -> float:
        """Copies `repeats` times. Returns seconds per time."""
        seconds: float = library().bench_rows(self._rows, len(self._rows), repeats)
        return seconds


def timed(function: str, *structs: ctypes.Structure) -> Callable[[int], float]:
    """A call of libkvx, timed in C: a function of the repeats that returns seconds per call.

    function: "write", "gather" or "migrate"
    structs:  its C structs. The caller keeps alive what their pointers point to
    """
    address = ctypes.cast(getattr(abi.library(), f"kvx_{function}_kv"), ctypes.c_void_p)
    bench = getattr(library(), f"bench_{function}")

    def call(repeats: int) -> float:
        seconds: float = bench(address, *map(ctypes.addressof, structs), repeats)
        if seconds < 0:
            raise RuntimeError(abi.library().kvx_last_error().decode())
        return seconds

    return call


def timed_layers(
    function: str, bench: str, caches: Sequence[Any], writes: Sequence[Any]
) -> Callable[[int], float]:
    """Writes of several layers, timed in C: a function of the repeats that returns seconds for all.

    function: of libkvx; bench: of native.c, which calls it
    caches, writes: C structs, one of each layer
    """
    address = ctypes.cast(getattr(abi.library(), function), ctypes.c_void_p)
    to_caches = abi.pointer_array(caches, abi.kvx_cache_desc_t)
    to_writes = abi.pointer_array(writes, abi.kvx_write_desc_t)

    def call(repeats: int) -> float:
        layers = len(to_caches)
        seconds: float = getattr(library(), bench)(address, to_caches, to_writes, layers, repeats)
        if seconds < 0:
            raise RuntimeError(abi.library().kvx_last_error().decode())
        return seconds

    return call


class Evict:
    """Leaves nothing but its own buffer in the caches."""

    def __init__(self, cache_bytes: int) -> None:
        self._buffer = torch.zeros(3 * cache_bytes // 8, dtype=torch.int64)

    def __call__(self) -> None:
        library().bench_evict(self._buffer.data_ptr(), self._buffer.numel() * 8)

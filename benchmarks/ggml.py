"""ggml's own conversions in C, timed beside KVX's: the functions of llama.cpp's shared libraries.

`reference` is libggml-base: decoders, and encoders whose bytes KVX's are. `backend` is libggml-cpu
for this processor, which has an encoder of Q8_0 of its own: it multiplies by 127 / amax and rounds
ties to even, so some of its bytes differ. ggml decodes to float32 and encodes from it; rows of
other floats go through a row of float32, as in ggml.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks import native
from kvx_adapters.cli.engines.llama_cpp_library import folder
from kvx_core import DType

_BASE, _CPUS = "libggml-base.so", "libggml-cpu-*.so"
_NAMES = {DType.Q4_K: "q4_K", DType.Q5_K: "q5_K", DType.Q6_K: "q6_K"}
_OWN_ENCODERS = (DType.Q8_0,)  # of the backend; the others call the reference
_FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROW = 1024  # numbers


class _Rows(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("from_", ctypes.c_void_p),
        ("stage", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("from_bytes", ctypes.c_size_t),
        ("to_bytes", ctypes.c_size_t),
        ("numbers", ctypes.c_int64),
        ("rows", ctypes.c_size_t),
    )


def decode(units: Tensor, dtype: DType, numbers: Tensor) -> Callable[[int], float]:
    """Decodes `units` into `numbers`, both contiguous; returns a function of repeats, for seconds.

    Raises FileNotFoundError if llama.cpp's libraries are not there.
    """
    name = f"dequantize_row_{_name(dtype)}"
    if numbers.dtype is torch.float32:
        return _timed([(_base(), name)], units, numbers, numbers.numel())
    narrow = (_backend(), f"ggml_cpu_fp32_to_{_FLOATS[numbers.dtype]}")
    return _timed([(_base(), name), narrow], units, numbers, numbers.numel())


def encode(
    numbers: Tensor, units: Tensor, dtype: DType, *, backend: bool
) -> Callable[[int], float] | None:
    """Encodes `numbers` into `units`, both contiguous, by the backend's encoder or the reference's.

    None: the backend has none of its own. Raises as `decode`.
    """
    if backend and dtype not in _OWN_ENCODERS:
        return None
    name = f"quantize_row_{_name(dtype)}"
    work = (_backend(), name) if backend else (_base(), f"{name}_ref")
    if numbers.dtype is torch.float32:
        return _timed([work], numbers, units, numbers.numel())
    widen = (_backend(), f"ggml_cpu_{_FLOATS[numbers.dtype]}_to_fp32")
    return _timed([widen, work], numbers, units, numbers.numel())


def _name(dtype: DType) -> str:
    return _NAMES.get(dtype, dtype.name.lower())


def _timed(
    functions: list[tuple[Any, str]], source: Tensor, to: Tensor, numbers: int
) -> Callable[[int], float]:
    addresses = [
        ctypes.cast(getattr(library, name), ctypes.c_void_p) for library, name in functions
    ]
    stage = torch.zeros(_ROW)
    count = numbers // _ROW if len(addresses) > 1 else 1
    rows = _Rows(
        addresses[0],
        addresses[1] if len(addresses) > 1 else None,
        source.data_ptr(),
        stage.data_ptr(),
        to.data_ptr(),
        source.numel() * source.element_size() // count,
        to.numel() * to.element_size() // count,
        numbers // count,
        count,
    )

    def run(repeats: int, keep: object = (source, to, stage)) -> float:
        seconds: float = native.library().bench_convert(ctypes.addressof(rows), repeats)
        return seconds

    return run


@cache
def _base() -> Any:
    return ctypes.CDLL(str(folder() / _BASE), ctypes.RTLD_GLOBAL)


@cache
def _backend() -> Any:
    """The one that ggml takes on this processor: that of the highest score."""
    _base()
    libraries = [ctypes.CDLL(str(path)) for path in sorted(folder().glob(_CPUS))]
    if not libraries:
        raise FileNotFoundError(
            f"{folder()} has no {_CPUS}, expected llama.cpp's: run `make setup`"
        )
    best = max(libraries, key=lambda library: int(library.ggml_backend_score()))
    best.ggml_cpu_init()
    return best

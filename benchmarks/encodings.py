"""FP4 formats and the Hadamard rotation on the CPU, beside a plain copy and other libraries.

Rows of 8 heads x 128 float32 numbers. `memcpy` copies the numbers that the format has at its wide
end, or those that are rotated; what is timed reads or writes as many. A library that encodes takes
far fewer rows, and its time is multiplied. Run with `python -m benchmarks encodings`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

import kvx_core
from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.pools import random_numbers
from benchmarks.rounds import Contestant, Goal, once
from kvx_core import CacheDesc, CacheFacts, CacheSpan, CacheView, DType, Layout, ScaleDesc, describe
from kvx_core.encodings import hadamard

_HEADS, _DIM = 8, 128
_TOKENS = 16384  # 64 MiB of float32
_FEW = 128  # tokens for libraries that take a hundred times as long
_VERSUS = ("memcpy", "gguf", "torch")


def run(threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    report.print_head(_VERSUS)
    numbers = random_numbers(_TOKENS * _HEADS * _DIM).float().view(1, _TOKENS, _HEADS, _DIM)
    results = []
    for order in (64, 128):
        name = f"Hadamard {order}, in place"
        if only in name:
            results += _rotation(name, numbers.clone(), order, threads, rounds)
    for label, dtype in (("MXFP4", DType.MXFP4), ("NVFP4", DType.F4_E2M1)):
        for way in ("encode", "decode"):
            name = f"{label} {way}"
            if only in name:
                results += _format(name, numbers, dtype, way == "encode", threads, rounds)
    return results


def _rotation(
    name: str, numbers: Tensor, order: int, threads: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    matrix = torch.from_numpy(_matrix(order))
    expected = (numbers.view(-1, order)[:999] @ matrix).clone()
    rotated = numbers.clone()
    hadamard(rotated, order)
    torch.testing.assert_close(rotated.view(-1, order)[:999], expected, rtol=0, atol=1e-4)
    out, copy = torch.empty_like(numbers), torch.empty_like(numbers)
    contestants = {
        "kvx": once(lambda: hadamard(rotated, order)),
        "memcpy": once(lambda: copy.copy_(numbers)),
        "torch": once(lambda: torch.mm(numbers.view(-1, order), matrix, out=out.view(-1, order))),
    }
    goals = [Goal("memcpy", 0.5)]
    return on_threads(name, contestants, threads, rounds, numbers.nbytes, goals, _VERSUS)


def _matrix(order: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(order)).astype(np.float32)


def _format(
    name: str,
    numbers: Tensor,
    dtype: DType,
    is_encoding: bool,
    threads: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    wide, narrow = _span(numbers.clone(), DType.F32), _stored(dtype)
    _migrate(wide, narrow)  # what is decoded; the first touch of all memory
    ends = (wide, narrow) if is_encoding else (narrow, wide)
    copy = torch.empty_like(numbers)
    contestants: dict[str, Contestant] = {
        "kvx": once(lambda: _migrate(*ends)),
        "memcpy": once(lambda: copy.copy_(numbers)),
    }
    if dtype is DType.MXFP4:
        few = np.ascontiguousarray(numbers[0, :_FEW].numpy())
        kind = GGMLQuantizationType.MXFP4
        coded = quantize(few, kind)
        _check(narrow, coded)
        contestants["gguf"] = _scaled(
            (lambda: quantize(few, kind)) if is_encoding else (lambda: dequantize(coded, kind))
        )
    goals = [Goal("gguf", 10.0)] if "gguf" in contestants else []
    return on_threads(name, contestants, threads, rounds, numbers.nbytes, goals, _VERSUS)


def _stored(dtype: DType) -> CacheSpan:
    """A dense cache of as many numbers."""
    size = _DIM // dtype.numbers * dtype.itemsize
    raw = torch.zeros(1, _TOKENS, _HEADS, size, dtype=torch.uint8)
    if dtype is DType.MXFP4:
        return _span(raw, dtype)
    scales = torch.zeros(1, _TOKENS, _HEADS, _DIM // 16, dtype=torch.uint8)
    return _span(raw, dtype, scales.view(torch.float8_e4m3fn))


def _span(tensor: Tensor, dtype: DType, scales: Tensor | None = None) -> CacheSpan:
    layer = CacheDesc.from_kv(describe(tensor, Layout.BLOCK_NHD, dtype=dtype))
    groups = None if scales is None else (ScaleDesc.of(scales, "PER_GROUP"),)
    return CacheView((layer,), CacheFacts(), k_scales=groups, dense=True).at()


def _migrate(src: CacheSpan, dst: CacheSpan) -> None:
    kvx_core.migrate(src, dst, [_TOKENS], same_model=True)


def _check(span: CacheSpan, expected: np.ndarray) -> None:
    raw = span.view.layers[0].k.owner
    assert isinstance(raw, Tensor)
    np.testing.assert_array_equal(raw[0, :_FEW].numpy(), expected)


def _scaled(call: Callable[[], object]) -> Contestant:
    """The seconds that all tokens would take, from those of a few."""

    def work() -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * (_TOKENS / _FEW)

    return work

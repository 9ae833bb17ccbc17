"""Formats with several numbers in a unit: encoding and decoding, on one core.

From and to float32 and bfloat16, beside memcpy of the float side's bytes and, for float32, gguf-py
in numpy as far as it has the format. GB/s are those of the float side. Memory is larger than the
caches. Run with `python -m benchmarks formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

import kvx_core
from benchmarks import report
from benchmarks.cases import check, row
from benchmarks.pools import random_numbers
from benchmarks.rounds import Goal, compete, once
from kvx_core import CacheDesc, CacheFacts, CacheView, DType, Layout, Plan, describe
from kvx_core.desc.view import CacheSpan

FORMATS = (
    DType.Q8_0,
    DType.Q4_0,
    DType.Q4_1,
    DType.IQ4_NL,
    DType.Q5_0,
    DType.Q5_1,
    DType.Q4_K,
    DType.Q5_K,
    DType.Q6_K,
)
_EIGHT_BITS = (DType.Q8_0,)
_DIM = 1024  # of all heads of a token
_NUMBERS, _QUICK = 1 << 24, 1 << 22
_VERSUS = ("memcpy", "gguf")


def run(rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    kvx_core.set_num_threads(1)
    torch.set_num_threads(1)
    report.print_head(_VERSUS)
    numbers = random_numbers(_QUICK if quick else _NUMBERS).view(1, -1, 1, _DIM)
    results = []
    for dtype in FORMATS:
        for of in (torch.float32, torch.bfloat16):
            for name, is_encoding in (("encode", True), ("decode", False)):
                case = f"{dtype.name} {name} {str(of).removeprefix('torch.')}"
                if only in case:
                    results.append(_measure(case, dtype, numbers.to(of), is_encoding, rounds))
                    report.print_row(results[-1], _VERSUS)
    kvx_core.set_num_threads(0)
    return results


def _measure(
    case: str, dtype: DType, numbers: Tensor, is_encoding: bool, rounds: int
) -> dict[str, Any]:
    tokens = numbers.shape[1]
    size = _DIM // dtype.numbers * dtype.itemsize
    units = torch.zeros(1, tokens, 1, size, dtype=torch.uint8)
    encode = Plan.migrate(_end(numbers), _end(units, dtype), [tokens], same_model=True)
    plan, output, ways = encode, units, _of_gguf(dtype, numbers, units, is_encoding)
    if not is_encoding:
        encode.run()
        output = torch.zeros_like(numbers)
        plan = Plan.migrate(_end(units, dtype), _end(output), [tokens], same_model=True)
    plain = torch.zeros_like(numbers)
    contestants = {
        "kvx": once(plan.run),
        "memcpy": once(lambda: plain.copy_(numbers)),
        **{name: once(work) for name, work in ways.items()},
    }
    for work in ways.values():

        def put(work: Callable[[], Any] = work) -> None:
            output.copy_(torch.from_numpy(work()).view_as(output))

        check(case, plan.run, put, [output])
    if not is_encoding:  # of the numbers the worst format, Q4_0, loses a hundredth of their power
        plan.run()
        error = (output.float() - numbers.float()).square().mean() / numbers.float().square().mean()
        assert error < 1 / 64, f"{case}: relative squared error {error}"
    goals = [Goal("gguf", 10.0)] if is_encoding else []
    if dtype in _EIGHT_BITS:
        goals.append(Goal("memcpy", 0.5))
    return row(case, 1, numbers.nbytes, compete(contestants, rounds, case=case), goals)


def _end(tensor: Tensor, dtype: DType | None = None) -> CacheSpan:
    k = describe(tensor, Layout.BLOCK_NHD, dtype=dtype)
    return CacheView((CacheDesc.from_kv(k),), CacheFacts(), dense=True).at()


def _of_gguf(
    dtype: DType, numbers: Tensor, units: Tensor, is_encoding: bool
) -> dict[str, Callable[[], Any]]:
    """gguf-py doing the same, as far as it can."""
    if numbers.dtype is not torch.float32:
        return {}
    kind = gguf.GGMLQuantizationType[dtype.name]
    if not is_encoding:
        return {"gguf": lambda: gguf.quants.dequantize(units.numpy(), kind)}
    try:
        gguf.quants.quantize(np.zeros((1, _DIM), np.float32), kind)
    except NotImplementedError:
        return {}
    return {"gguf": lambda: gguf.quants.quantize(numbers.numpy(), kind)}

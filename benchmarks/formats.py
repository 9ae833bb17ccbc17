"""Formats with several numbers in a unit: encoding and decoding, on one core.

From and to float32, bfloat16 and float16, in main memory and, where a case says so, in the caches:
131,072 numbers. `memcpy` copies the float side, `ggml` are llama.cpp's own functions, which write
the same bytes, and `backend` is the encoder that llama.cpp runs on this processor instead, if it
has one (ggml.py). GB/s are those of the float side. The simplest formats once more with each other
instruction set that libkvx has here. Run with `python -m benchmarks formats`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import ggml, report
from benchmarks.cases import check, row
from benchmarks.pools import random_numbers
from benchmarks.rounds import Contestant, Goal, batched, compete, once, repeated
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
_SIMPLEST = FORMATS[:3]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ISAS = ("avx512vbmi", "avx512", "avx2", "portable")
_DIM = 1024  # of all heads of a token
_NUMBERS, _QUICK, _IN_CACHE = 1 << 24, 1 << 22, 1 << 17
_VERSUS = ("memcpy", "ggml", "backend")


def run(rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    report.print_head(_VERSUS)
    results = _run(FORMATS, "", rounds, only, quick)
    own = kvx_core.backend_info().cpu_isa
    for isa in _ISAS[_ISAS.index(own) + 1 :]:  # libkvx reads it once in a process
        call = [sys.executable, "-m", "benchmarks.formats", isa, str(rounds), only, str(int(quick))]
        done = subprocess.run(
            call, env={**os.environ, "KVX_CPU_ISA": isa}, check=True, stdout=subprocess.PIPE
        )
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        for found in rows:
            report.print_row(found, _VERSUS)
        results += rows
    return results


def _run(
    formats: tuple[DType, ...], isa: str, rounds: int, only: str, quick: bool
) -> list[dict[str, Any]]:
    """isa: named in each case; "" is the best, whose results are printed one by one."""
    kvx_core.set_num_threads(1)
    torch.set_num_threads(1)
    numbers = random_numbers(_QUICK if quick else _NUMBERS).view(1, -1, 1, _DIM)
    few = numbers[:, : _IN_CACHE // _DIM]
    results = []
    for dtype in formats:
        for of in _FLOATS:
            for is_encoding in (True, False):
                for cached in (False, True):
                    way = "encode" if is_encoding else "decode"
                    case = f"{dtype.name} {way} {str(of).removeprefix('torch.')}"
                    case += (", in cache" if cached else "") + (f", {isa}" if isa else "")
                    if only not in case:
                        continue
                    floats = (few if cached else numbers).to(of)
                    results.append(_measure(case, dtype, floats, is_encoding, rounds))
                    if not isa:
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
    plan, output = encode, units
    if not is_encoding:
        encode.run()
        output = torch.zeros_like(numbers)
        plan = Plan.migrate(_end(units, dtype), _end(output), [tokens], same_model=True)
    plain = torch.zeros_like(numbers)
    in_cache = numbers.numel() <= _IN_CACHE
    timed = repeated if in_cache else once
    contestants: dict[str, Contestant] = {
        "kvx": timed(plan.run),
        "memcpy": timed(lambda: plain.copy_(numbers)),
    }
    by_ggml = {
        "ggml": ggml.encode(numbers, units, dtype, backend=False)
        if is_encoding
        else ggml.decode(units, dtype, output),
        "backend": ggml.encode(numbers, units, dtype, backend=True) if is_encoding else None,
    }
    for name, work in by_ggml.items():
        if work is not None:
            contestants[name] = batched(work) if in_cache else lambda work=work: work(1)  # type: ignore[misc]
    check(case, plan.run, lambda: by_ggml["ggml"] and by_ggml["ggml"](1), [output])
    goals = [Goal("ggml", 1.0), Goal("backend", 1.0)]
    if dtype is DType.Q8_0:
        goals.append(Goal("memcpy", 0.5))
    return row(case, 1, numbers.nbytes, compete(contestants, rounds, case=case), goals)


def _end(tensor: Tensor, dtype: DType | None = None) -> CacheSpan:
    k = describe(tensor, Layout.BLOCK_NHD, dtype=dtype)
    return CacheView((CacheDesc.from_kv(k),), CacheFacts(), dense=True).at()


if __name__ == "__main__":
    print(
        json.dumps(_run(_SIMPLEST, sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"))
    )

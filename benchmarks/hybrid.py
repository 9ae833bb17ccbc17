"""DeepSeek-V4's cache on the CPU: tokens into windows, entries into blocks and into vLLM's pages.

Rows of 448 numbers in E4M3 and 64 in BF16. Beside it a plain copy of the numbers that are read and
torch doing the same; where vLLM's CPU kernels for this cache run, which needs AVX-512 with BF16,
vLLM's op of windows for pages. Warm, over and over on the same tensors.
Run with `python -m benchmarks hybrid`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import report
from benchmarks.cases import row
from benchmarks.rounds import SPIN_SECONDS, Contestant, Goal, compete, repeated
from kvx_core.hybrid import ops

_DIM, _NOPE, _ROPE, _WINDOW, _PER_BLOCK = 512, 448, 64, 128, 32
_TOKENS = (1, 16, 64, 256)
_VERSUS = ("copy", "torch", "vllm")
_GOALS = (Goal("vllm", 1.0),)


@torch.inference_mode()
def run(threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    for tokens in _TOKENS:
        for name, make in (("append", _append), ("flush", _flush), ("compress", _compress),
                           ("pages", _pages)):  # fmt: skip
            case = f"{name} {tokens}"
            if only not in case:
                continue
            for count in threads:
                kvx_core.set_num_threads(count)
                torch.set_num_threads(count)
                ways, num_bytes = make(tokens)
                contestants: dict[str, Contestant] = {
                    way: repeated(work) for way, work in ways.items()
                }
                timing = compete(contestants, rounds, before=lambda _: time.sleep(SPIN_SECONDS))
                results.append(row(case, count, num_bytes, timing, _GOALS))
                report.print_row(results[-1], _VERSUS)
    kvx_core.set_num_threads(0)
    return results


Ways = tuple[dict[str, Callable[[], Any]], int]


def _append(tokens: int) -> Ways:
    """A token of each of as many requests."""
    x = torch.randn(tokens, _DIM).to(torch.bfloat16)
    rings = (
        torch.zeros(tokens, _WINDOW, _NOPE, dtype=torch.uint8),
        torch.zeros(tokens, _WINDOW, _ROPE, dtype=torch.bfloat16),
        torch.ones(tokens, _WINDOW),
        torch.full((tokens, _WINDOW), -1, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
    )
    positions, slots = torch.arange(tokens), torch.arange(tokens, dtype=torch.int32)
    fp8, rope, inv, pos, head = rings

    def by_torch() -> None:
        places = (head % _WINDOW).long()
        codes, scale = _quantized(x)
        fp8[slots, places], inv[slots, places] = codes, scale
        rope[slots, places], pos[slots, places] = x[:, _NOPE:], positions.int()
        head.add_(1)

    kvx = lambda: ops.append_swa(x, positions, slots, *rings, one_each=True)  # noqa: E731
    return {"kvx": kvx, "copy": _copy(x), "torch": by_torch}, x.nbytes


def _flush(tokens: int) -> Ways:
    """An entry and its indexer key of each of as many requests."""
    entry = torch.randn(tokens, _DIM).to(torch.bfloat16)
    key = torch.randn(tokens, 128).to(torch.bfloat16)
    pool = (
        torch.zeros(tokens, _PER_BLOCK, _NOPE, dtype=torch.uint8),
        torch.zeros(tokens, _PER_BLOCK, _ROPE, dtype=torch.bfloat16),
        torch.ones(tokens, _PER_BLOCK),
        torch.zeros(tokens, _PER_BLOCK, 64, dtype=torch.uint8),
        torch.zeros(tokens, _PER_BLOCK, 8, dtype=torch.uint8),
    )
    ids = torch.full((tokens,), 7, dtype=torch.int32)
    table = torch.arange(tokens, dtype=torch.int32)[:, None]
    mask = torch.ones(tokens, dtype=torch.bool)

    def kvx() -> None:
        ops.flush_write_csa(entry, key, None, ids, mask, table, *pool)

    return {"kvx": kvx, "copy": _copy(entry)}, entry.nbytes + key.nbytes


def _compress(tokens: int) -> Ways:
    """Entries of four tokens and the four before them, of as many requests."""
    streams = torch.randn(4, tokens, 4, 2 * _DIM)
    ka, za, kb, zb = (stream.contiguous() for stream in streams)
    ape_a, ape_b, weight = torch.randn(4, _DIM), torch.randn(4, _DIM), torch.ones(_DIM)
    angles, positions = torch.randn(8, _ROPE), torch.zeros(tokens, dtype=torch.int64)
    out = torch.empty(tokens, _DIM, dtype=torch.bfloat16)
    weights = ape_a, ape_b, weight, 1e-6, angles, positions, None, out

    def by_torch() -> None:
        scores = torch.cat([za[..., _DIM:] + ape_a, zb[..., :_DIM] + ape_b], 1)
        entry = (torch.softmax(scores, 1) * torch.cat([ka[..., _DIM:], kb[..., :_DIM]], 1)).sum(1)
        entry = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + 1e-6) * weight
        cosine, sine = angles[positions].chunk(2, -1)
        even, odd = entry[:, _NOPE::2].clone(), entry[:, _NOPE + 1 :: 2].clone()
        entry[:, _NOPE::2] = even * cosine - odd * sine
        entry[:, _NOPE + 1 :: 2] = odd * cosine + even * sine
        out.copy_(entry)

    kvx = lambda: ops.compress(ka, za, kb, zb, *weights)  # noqa: E731
    return {"kvx": kvx, "copy": _copy(streams[..., :_DIM]), "torch": by_torch}, streams.nbytes // 2


def _pages(tokens: int) -> Ways:
    """Tokens into vLLM's pages of windows."""
    x = torch.randn(tokens, _DIM).to(torch.bfloat16)
    num_pages = -(-tokens // 64)
    pages = torch.zeros(num_pages, ops.v4_page_bytes(64), dtype=torch.uint8)
    slots = torch.randperm(64 * num_pages)[:tokens]
    kvx = lambda: ops.write_v4_page(x, slots, pages, entries_per_page=64)  # noqa: E731
    return {"kvx": kvx, "copy": _copy(x), **_of_vllm(x, slots, pages)}, x.nbytes


def _of_vllm(x: Tensor, slots: Tensor, pages: Tensor) -> dict[str, Callable[[], Any]]:
    """vLLM's op, which also rotates, and whose queries are the fewest that it takes."""
    if not torch.cpu._is_avx512_bf16_supported():
        return {}  # vLLM's libraries for other processors do not have it
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    write = torch.ops._C.fused_qnorm_rope_kv_insert_cpu
    query = torch.zeros(len(x), 1, _DIM, dtype=torch.bfloat16)
    positions, angles = torch.arange(len(x)), torch.randn(len(x), _ROPE)
    return {"vllm": lambda: write(query, x, positions, pages, slots, angles, 1, 1e-6, 64)}


def _copy(numbers: Tensor) -> Callable[[], Any]:
    to = torch.empty_like(numbers)
    return lambda: to.copy_(numbers)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    nope = x[:, :_NOPE].float()
    scale = nope.abs().amax(-1) / 448
    return (nope / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), scale

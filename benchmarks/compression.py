"""What compression costs: GB/s of the numbers that go in or come out, beside a plain copy of them.

The plain copy copies the numbers, memory to memory, on one core as the encodings run. Lossless
bfloat16 is to be at least 2 GB/s in both directions. Run with `python -m benchmarks compression`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.cases import row
from benchmarks.rounds import Contestant, Goal, compete, once
from kvx_core import _abi_lossless
from kvx_core.encodings import lossless

_VERSUS = ("memcpy", "2 GB/s")


def run(rounds: int, only: str, *, quick: bool = False) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    count = (2 if quick else 32) << 20
    report.print_head(_VERSUS)
    results = []
    for name, numbers in (("gaussian", _gaussian(count)), ("channels", _channels(count))):
        results += _lossless(f"lossless {name}", numbers, rounds, only)
    return results


def _lossless(name: str, numbers: Tensor, rounds: int, only: str) -> list[dict[str, Any]]:
    encoded = lossless.encode(numbers)
    into = torch.empty_like(numbers)
    lossless.decode(encoded, into=into)
    assert torch.equal(into, numbers), name
    room = torch.empty(_abi_lossless.bound(numbers.numel()), dtype=torch.uint8)

    def encode() -> object:
        to = room.data_ptr(), room.numel()
        return _abi_lossless.encode(*to, numbers.data_ptr(), numbers.numel(), 2)

    def decode() -> object:
        return lossless.decode(encoded, into=into)

    ratio = numbers.nbytes / encoded.nbytes
    goals = [Goal("2 GB/s", 1.0)]
    rows = []
    for way, call in (("encode", encode), ("decode", decode)):
        case = f"{name}, {way}"
        if only in case:
            rows.append(_timed(case, call, numbers, rounds, goals))
            rows[-1]["ratio"] = round(ratio, 4)
    if rows:
        print(f"{'':30} {ratio:.3f} x smaller")
    return rows


def _timed(
    case: str, call: Callable[[], object], numbers: Tensor, rounds: int, goals: list[Goal]
) -> dict[str, Any]:
    copy = torch.empty_like(numbers)
    torch.set_num_threads(1)
    contestants: dict[str, Contestant] = {
        "kvx": once(call),
        "memcpy": once(lambda: copy.copy_(numbers)),
        "2 GB/s": lambda: numbers.nbytes / 2e9,
    }
    found = row(case, 1, numbers.nbytes, compete(contestants, rounds, case=case), goals)
    report.print_row(found, _VERSUS)
    return found


def _gaussian(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def _channels(count: int) -> Tensor:
    """Keys of 128 channels, whose sizes differ as a trained model's do."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randn(128, generator=generator))
    return (torch.randn(count // 128, 128, generator=generator) * sizes).to(torch.bfloat16)

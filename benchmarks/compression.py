"""What compression costs: GB/s of the numbers that go in or come out, beside a plain copy of them.

The plain copy copies the numbers, memory to memory, on one core as the encodings run. Lossless
bfloat16 is to be at least 2 GB/s in both directions. TurboQuant takes and gives float32. Run
with `python -m benchmarks compression`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.cases import row
from benchmarks.rounds import Contestant, Goal, compete, once
from kvx_core._c import abi, abi_lossless, abi_turboquant
from kvx_core.encodings import lossless, turboquant

_VERSUS = ("memcpy", "2 GB/s")


def run(rounds: int, only: str, *, quick: bool = False) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    count = (2 if quick else 32) << 20
    report.print_head(_VERSUS)
    results = []
    for name, numbers in (("gaussian", _gaussian(count)), ("channels", _channels(count))):
        results += _lossless(f"lossless {name}", numbers, rounds, only)
    vectors = _gaussian(count // 4).float().view(-1, 128)
    for bits in (2, 3, 4):
        results += _units(bits, vectors, rounds, only)
    for preset in turboquant.SLOTS:
        results += _slots(preset, vectors.view(2, -1, 128), rounds, only)
    return results


def _lossless(name: str, numbers: Tensor, rounds: int, only: str) -> list[dict[str, Any]]:
    encoded = lossless.encode(numbers)
    into = torch.empty_like(numbers)
    lossless.decode(encoded, into=into)
    assert torch.equal(into, numbers), name
    room = torch.empty(abi_lossless.bound(numbers.numel()), dtype=torch.uint8)

    def encode() -> object:
        to = room.data_ptr(), room.numel()
        return abi_lossless.encode(*to, numbers.data_ptr(), numbers.numel(), 2)

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


def _units(bits: int, vectors: Tensor, rounds: int, only: str) -> list[dict[str, Any]]:
    """The C functions, without what Python allocates."""
    units = turboquant.encode(vectors, bits)
    decoded = turboquant.decode(units, 128, bits)
    assert float(((decoded - vectors) ** 2).sum() / (vectors**2).sum()) < 0.13
    lib = abi_turboquant.functions()
    coded, plain = (units.data_ptr(), units.shape[1]), (vectors.data_ptr(), 128)
    unit = len(vectors), 128, bits, 0
    ways = {
        "encode": lambda: abi.check(lib.kvx_turboquant_encode(*coded, *plain, *unit)),
        "decode": lambda: abi.check(
            lib.kvx_turboquant_decode(decoded.data_ptr(), 128, *coded, *unit)
        ),
    }
    cases = {f"TurboQuant {bits} bits, {way}": call for way, call in ways.items()}
    return [_timed(c, call, vectors, rounds, []) for c, call in cases.items() if only in c]


def _slots(preset: str, pairs: Tensor, rounds: int, only: str) -> list[dict[str, Any]]:
    keys, values = pairs
    slots = turboquant.encode_slots(keys, values, preset)
    read = torch.empty_like(pairs)
    lib = abi_turboquant.functions()
    coded, plain = (slots.data_ptr(), slots.shape[1]), (keys.data_ptr(), values.data_ptr(), 128)
    slot = len(keys), 128, turboquant.SLOTS.index(preset)
    ways = {
        "encode": lambda: abi.check(lib.kvx_turboquant_encode_slots(*coded, *plain, *slot)),
        "decode": lambda: abi.check(
            lib.kvx_turboquant_decode_slots(
                read[0].data_ptr(), read[1].data_ptr(), 128, *coded, *slot
            )
        ),
    }
    cases = {f"{preset}, {way}": call for way, call in ways.items()}
    return [_timed(c, call, pairs, rounds, []) for c, call in cases.items() if only in c]


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

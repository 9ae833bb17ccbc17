"""What the cases that benchmarks.gpu times execute, per 512 bytes, and the budget for it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import gather, migrate, write
from benchmarks.gpu.cases import Named, PlainCopy, Size
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Rehearsal
from kvx_core import Memory
from tests.native import ROOT
from tests.sass.machine import Launch, Machine

RESULTS = ROOT / "benchmarks/results/sass.json"
MOST = 1.05  # of what `before` in RESULTS executed, in every case
MOST_MEAN = 1.01  # geometric
LEAST_WIDE = 0.9  # of the bytes that conversions from FP8 load, by loads of 16 bytes


class Bound(NamedTuple):
    """Instructions per 512 bytes."""

    goal: int
    most: int  # of any case, with some percent of room


BOUNDS = {
    "layer_kernel": Bound(40, 40),
    "vectors_kernel": Bound(110, 104),
    "blocks_kernel": Bound(110, 100),
    "remap_kernel": Bound(110, 90),
    "tile_kernel": Bound(150, 90),
    "convert_kernel": Bound(130, 103),
    "quantize_kernel": Bound(160, 138),
}

# As many tokens as fill an H100, so that work is cut up as there.
_FILLS = Size(64 << 20, 8, 256, (1, 16, 256), (4096,), 1)
_SMALL = Size(512 << 10, 2, 16, (1, 5), (32,), 1)
_MULTIPROCESSORS = 132
_SAMPLE = 12  # thread blocks of a launch

# The interpreter knows no bulk copies, and copy engines run no kernel.
_OTHERS = ("background", "copy engine")


def _cases(size: Size, only: str) -> Iterator[tuple[str, Named]]:
    os.environ["HOSTGRID_MULTIPROCESSORS"] = str(_MULTIPROCESSORS)
    for module in (write, gather, migrate):
        kind = module.__name__.rpartition(".")[2]
        for named in module.cases(Rehearsal(Memory.DEVICE), size, Peers()):
            name = f"{kind}: {named.name}"
            if only in name and not name.endswith(_OTHERS):
                yield name, named


def measure(machine: Machine, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """What the first call of each case executes, by case. only: a part of the cases' names."""
    machine.sample = _SAMPLE
    for name, named in _cases(_FILLS, only):
        (call, *_) = named.build().ways["kvx"]
        yield name, _described(machine.counted(call))


def check(machine: Machine, only: str = "") -> dict[str, int]:
    """Copies less and compares all bytes with torch's: launches by case. Raises at a difference."""
    machine.sample = 0
    found = {}
    place = Rehearsal(Memory.DEVICE)
    for name, named in _cases(_SMALL, only):
        machine.launches.clear()
        result = gpu_cases.run(place, named, PlainCopy(place), 1)
        assert not result["failed"], (name, result["failed"])
        found[name] = len(machine.launches)
        assert found[name], name
    return found


def _described(launches: Sequence[Launch]) -> dict[str, Any]:
    return {
        "instructions_per_512_bytes": round(_per_512_bytes(launches), 2),
        "kernels": {
            name: {
                "instructions_per_512_bytes": round(_per_512_bytes(of_kernel), 2),
                "loads": _shares(of_kernel[0].loads),
                "stores": _shares(of_kernel[0].stores),
            }
            for name in dict.fromkeys(launch.kernel for launch in launches)
            if (of_kernel := [launch for launch in launches if launch.kernel == name])
        },
    }


def _per_512_bytes(launches: Sequence[Launch]) -> float:
    """Instructions of warps for 512 bytes: what a warp moves at a time if each lane has 16."""
    executed = sum(launch.instructions * launch.share for launch in launches)
    moved = sum((launch.loaded + launch.stored) / 2 * launch.share for launch in launches)
    return executed / (moved / 512)


def _shares(accesses: dict[int, int]) -> dict[str, float]:
    """Of the bytes, by the width of an access in bytes."""
    total = sum(width * count for width, count in accesses.items())
    return {str(width): round(width * n / total, 3) for width, n in accesses.items()}


def ratios(found: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """found / before, by case, for cases that both have."""
    key = "instructions_per_512_bytes"
    return {name: found[name][key] / before[name][key] for name in found if name in before}


def executed(found: dict[str, Any]) -> dict[str, float]:
    """The most that any case makes a kernel execute per 512 bytes, by the kernel's name."""
    most: dict[str, float] = {}
    for case in found.values():
        for name, kernel in case["kernels"].items():
            family = name.partition("<")[0]
            now = kernel["instructions_per_512_bytes"]
            most[family] = max(now, most.get(family, 0))
    return most


def wide_loads(found: dict[str, Any]) -> dict[str, float]:
    """The share of 16-byte loads among all bytes that conversions from FP8 load, by case."""
    return {
        case: kernel["loads"].get("16", 0.0)
        for case, of_case in found.items()
        for name, kernel in of_case["kernels"].items()
        if name.startswith(("convert_kernel<E4m3,", "convert_kernel<E5m2,"))
    }


def mean(compared: dict[str, float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, compared.values())) / len(compared))


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results

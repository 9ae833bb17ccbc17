"""One copy: the ways to make it, the check of their results, and the timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.caches import Shape
from benchmarks.gpu.families import Family
from benchmarks.gpu.places import Call, Place
from benchmarks.rounds import Contestant, Goal, Timing, compete
from kvx_core import Transfer

SENTINEL = 0x5A
_SECONDS = 0.5  # for which a case is timed, so that slow contestants have fewer rounds


@dataclass(frozen=True)
class Size:
    """How much is copied.

    num_bytes:  bfloat16 K and V of a call that is to fill the GPU
    num_layers: of a model
    min_blocks: that a cache has at least, so that a decode step's blocks lie far apart
    """

    num_bytes: int
    num_layers: int
    min_blocks: int
    decode_tokens: Sequence[int]
    prefill_tokens: Sequence[int]
    rounds: int

    def num_tokens(self, shape: Shape) -> int:
        """Of one layer, that have `num_bytes`; whole blocks, also of twice the size."""
        multiple = 2 * shape.block_size
        return max(self.num_bytes // shape.token_bytes // multiple, 1) * multiple


FULL = Size(256 << 20, 32, 256, (1, 4, 16, 64, 256), (1024, 8192, 65536), 21)
QUICK = Size(64 << 20, 8, 64, (1, 64), (8192,), 5)
REHEARSAL = Size(512 << 10, 2, 3, (1, 3), (32,), 1)


def name_of(
    what: str,
    shape: Shape,
    *,
    find_scales: bool = False,
    transfer: Transfer = Transfer.KERNEL,
) -> str:
    """A case in words; what is as usual goes without saying."""
    words = [what, str(shape)]
    words += ["scales found"] * find_scales
    words += [transfer.name.lower().replace("_", " ")] * (transfer is not Transfer.KERNEL)
    return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Case:
    """What is timed.

    ways:      by name, the calls that do the same work: of one layer each, or one for all layers.
               "torch" says what is right, and by its calls how many parts the work has
    outputs:   what the ways write
    num_bytes: (bytes read + bytes written) / 2 of one of torch's calls; times are of as much
    copies:    what is a plain copy of so many bytes here; None: within the GPU
    place:     where the ways run; None: on the GPU alone
    """

    ways: Mapping[str, Sequence[Call]]
    outputs: Sequence[Tensor]
    num_bytes: int
    family: Family
    goals: Sequence[Goal] = ()
    copies: Sequence[Call] | None = None
    place: Place | None = None


@dataclass(frozen=True)
class Named:
    """A case that is built when its turn comes, so that its memory is there only then."""

    name: str
    build: Callable[[], Case]


@dataclass
class PlainCopy:
    """Device-to-device copies of contiguous bytes."""

    place: Place
    _room: list[Tensor] = field(default_factory=list)

    def ways(self, num_bytes: int, count: int) -> dict[str, list[Call]]:
        """`count` copies of `num_bytes`, each of other bytes: by cudaMemcpyAsync, and by a kernel,
        which starts sooner than that in a graph and is faster for some sizes."""
        if not self._room or self._room[0].numel() < num_bytes * count:
            self._room = [
                torch.full((num_bytes * count,), i, dtype=torch.uint8, device=self.place.device)
                for i in range(2)
            ]
        dst, src = (room[: num_bytes * count].view(count, num_bytes) for room in self._room)
        word = torch.uint8 if num_bytes % 4 else torch.int32
        words = [(dst[i].view(word), src[i].view(word)) for i in range(count)]
        return {
            "memcpy": [partial(dst[i].copy_, src[i]) for i in range(count)],
            "kernel copy": [partial(torch.add, b, 0, out=a) for a, b in words],
        }


def run(place: Place, named: Named, copy: PlainCopy, rounds: int) -> dict[str, Any]:
    """Checks and times a case: its result, ready for JSON. Times in microseconds.

    A way that fails or is wrong is not timed; "failed" says why, under its name.
    """
    begin = time.monotonic()
    failed: dict[str, str] = {}
    timing, num_bytes = Timing({}), 0
    goals: Sequence[Goal] = ()
    family = "failed"
    try:
        case = named.build()
        goals, num_bytes, family = case.goals, case.num_bytes, case.family.name
        timing = _time(place, case, copy, rounds, failed)
    except Exception as error:  # the next case may fare better
        failed["case"] = _sentence(error)
    names = list(timing.samples)
    others = [name for name in names if name != "kvx"] if "kvx" in names else []
    return {
        "case": named.name,
        "family": family,
        "bytes": num_bytes,
        "failed": failed,
        "seconds": round(time.monotonic() - begin, 1),
        "rounds": max(map(len, timing.samples.values()), default=0),
        "median_us": {name: round(1e6 * timing.median(name), 3) for name in names},
        "kvx_speedup": {name: round(timing.speedup(name), 3) for name in others},
        "goals": list(_judged(goals, timing)),
        "quartiles_us": {
            name: [round(1e6 * np.quantile(samples, q), 3) for q in (0.25, 0.75)]
            for name, samples in timing.samples.items()
        },
    }


def _time(place: Place, case: Case, copy: PlainCopy, rounds: int, failed: dict[str, str]) -> Timing:
    place = case.place or place
    expected = _results(place, case.ways["torch"], case.outputs)
    parts = len(case.ways["torch"])
    contestants: dict[str, Contestant] = {}
    for name, calls in case.ways.items():
        try:
            _check(_results(place, calls, case.outputs), expected)
            contestants[name] = place.contestant(calls, parts)
        except Exception as error:  # of a peer, as of KVX
            failed[name] = _sentence(error)
    del expected
    plain = {"copy": case.copies} if case.copies else copy.ways(case.num_bytes, parts)
    contestants |= {name: place.contestant(calls, parts) for name, calls in plain.items()}
    timing = compete(contestants, rounds, before=place.flush, seconds=_SECONDS)
    best = min(plain, key=timing.median)  # that a share is of
    return Timing({**timing.samples, "copy": timing.samples[best]})


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _results(place: Place, calls: Sequence[Call], outputs: Sequence[Tensor]) -> list[Tensor]:
    """All bytes of `outputs` after the calls, which find them filled with the sentinel."""
    for output in outputs:
        output.view(torch.uint8).fill_(SENTINEL)
    place.settle()  # before the GPU writes where the host has
    for call in calls:
        call()
    place.settle()
    return [output.view(torch.uint8).clone() for output in outputs]


def _check(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(ours, theirs):
            count = int((ours != theirs).sum())
            raise AssertionError(f"{count} of {ours.numel()} bytes of output {i} are wrong")


def _judged(goals: Sequence[Goal], timing: Timing) -> Iterator[dict[str, Any]]:
    """Goals with what was measured. Open, and not here, is one against a peer that is not there."""
    for goal in goals:
        if goal.versus not in timing.samples:
            continue
        speedup = timing.speedup(goal.versus) if "kvx" in timing.samples else 0.0
        yield {
            "versus": goal.versus,
            "at_least": goal.at_least,
            "measured": round(speedup, 3),
            "met": speedup >= goal.at_least,
        }

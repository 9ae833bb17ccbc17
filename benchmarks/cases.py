"""One copy, made by KVX, by torch and, if it converts nothing, by a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import machine, native, report
from benchmarks.rounds import SPIN_SECONDS, Contestant, Goal, Timing, compete

SENTINEL = 0x5A


@dataclass(frozen=True)
class Case:
    """What is timed, and what shows that it was right.

    kvx, torch: do the copy into `outputs`
    plain:      (destination, source) tensors, contiguous: what plain copies copy
    blocks:     the same bytes as blocks in their order, where kvx looks blocks up
    expect:     does what kvx does, in a way that is easy to believe; None: torch
    """

    name: str
    kvx: Callable[[], object]
    torch: Callable[[], object]
    plain: Sequence[tuple[Tensor, Tensor]]
    outputs: Sequence[Tensor]
    goals: Sequence[Goal] = ()
    expect: Callable[[], object] | None = None
    blocks: Sequence[native.Blocks] = ()

    @property
    def num_bytes(self) -> int:
        """(bytes read + bytes written) / 2: what a plain copy of the same traffic copies."""
        return sum(dst.numel() * dst.element_size() for dst, _ in self.plain)

    def verify(self) -> None:
        """Raises AssertionError unless kvx left the very bytes in `outputs` that it should."""
        check(self.name, self.kvx, self.expect or self.torch, self.outputs)


def check(
    name: str,
    work: Callable[[], object],
    expect: Callable[[], object],
    outputs: Sequence[Tensor],
) -> None:
    """Raises AssertionError unless both leave the same bytes in `outputs`, all of them."""
    results = []
    for run in (expect, work):
        for output in outputs:
            output.view(torch.uint8).fill_(SENTINEL)
        run()
        results.append([output.view(torch.uint8).clone() for output in outputs])
    for i, (expected, found) in enumerate(zip(*results, strict=True)):
        if not torch.equal(expected, found):
            count = int((expected != found).sum())
            raise AssertionError(f"{name}: {count} bytes of output {i} are wrong")


def cold(warm: Mapping[str, Callable[[], object]]) -> Callable[[str], None]:
    """What goes ahead of a timing: it leaves nothing in the caches but the code of the contestant.

    warm: by contestant, the same work on tensors of its own that are next to nothing. Without it,
          the first thing timed would be the interpreter on its way through main memory
    """
    evict = native.Evict(machine.cache_bytes())

    def before(contestant: str) -> None:
        time.sleep(SPIN_SECONDS)
        evict()
        if contestant in warm:
            warm[contestant]()

    return before


def row(
    name: str, threads: int, num_bytes: int, timing: Timing, goals: Sequence[Goal]
) -> dict[str, Any]:
    """The result of one case, ready for JSON. Times in microseconds."""
    return {
        "case": name,
        "threads": threads,
        "bytes": num_bytes,
        "verified": True,
        "median_us": {n: round(1e6 * timing.median(n), 3) for n in timing.samples},
        "kvx_speedup": {n: round(timing.speedup(n), 3) for n in timing.samples if n != "kvx"},
        "goals": [
            {
                "versus": goal.versus,
                "at_least": goal.at_least,
                "measured": round(timing.speedup(goal.versus), 3),
                "met": timing.speedup(goal.versus) >= goal.at_least,
            }
            for goal in goals
            if goal.versus in timing.samples
        ],
        "samples_us": {n: [round(1e6 * s, 3) for s in v] for n, v in timing.samples.items()},
    }


def on_threads(
    name: str,
    contestants: dict[str, Contestant],
    threads: Sequence[int],
    rounds: int,
    num_bytes: int,
    goals: Sequence[Goal],
    versus: Sequence[str],
) -> list[dict[str, Any]]:
    """One case with each number of threads; prints and returns the rows."""
    rows = []
    for num_threads in threads:
        kvx_core.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            timing = compete(contestants, rounds, case=name)
        rows.append(row(name, num_threads, num_bytes, timing, goals))
        report.print_row(rows[-1], versus)
    kvx_core.set_num_threads(0)
    return rows

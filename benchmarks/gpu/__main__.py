"""`python3 -m benchmarks.gpu OUT`, which `make gpu` runs: all that needs a GPU, in a few minutes.

Builds libkvx for this machine's GPU or takes one that was built (--library, or $KVX_LIBRARY), runs
the tests on it, measures, and looks for bad memory accesses and races. Needs a Python with torch,
numpy, pytest, hypothesis and ml_dtypes; to build, nvcc, a C++ compiler, cmake and ninja. Installs
nothing and fetches nothing. A step that fails, hangs, loses the device or cannot start does not
keep the next from running. What is known is in OUT after each step, and packed in OUT/all.tgz after
each part.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

try:
    import torch  # noqa: F401
except ModuleNotFoundError:
    sys.exit(
        f"benchmarks.gpu needs torch, which {sys.executable} does not have. Run it with a Python "
        "whose torch sees this machine's GPU"
    )

from benchmarks.gpu import ROOT, schedule, summary, tools
from benchmarks.gpu.facts import command_of
from benchmarks.gpu.schedule import Request
from benchmarks.gpu.steps import RUNNING, WAITING, Outcome, Step, log_of, run, together


def main() -> None:
    begin = time.monotonic()
    options = _options()
    request = Request(
        out=options.out.resolve(),
        quick=options.quick,
        rehearse=options.rehearse,
        library=options.library and options.library.resolve(),
        commit=options.commit,
    )
    if options.list:
        _list(request)
        return
    _check_names(options.only, request)
    signal.signal(signal.SIGTERM, _stop)
    os.environ.update(schedule.environment(request))
    summary.clear(request.out)
    for sentence in tools.missing(with_nvcc=not (request.rehearse or request.library)):
        print(f"missing: {sentence}", flush=True)
    first = run(schedule.machine(command_of("benchmarks.gpu"), request.commit), request.out)
    found = first.result
    first = replace(first, result={}, said=first.said if first.failed else "")
    log = log_of(request.out, first.name).read_text()
    print(log.partition("\n$ ")[2].partition("\n")[2], flush=True)
    if not request.rehearse and not found.get("gpu"):
        summary.write(request.out, found, [first], rehearse=False)
        why = first.said if first.failed else "torch sees no GPU here"
        raise SystemExit(f"{why}\nWithout one, rehearse: python3 -m benchmarks.gpu OUT --rehearse")
    if found.get("gpu"):
        request = replace(request, capability=found["gpu"]["capability"])
    chosen = [s for s in schedule.steps(request) if not options.only or s.name in options.only]
    if any(step.name == "build" for step in chosen):
        request.libkvx.unlink(missing_ok=True)  # what cannot be built must not be measured
    end = begin + 60 * options.minutes if options.minutes else None
    outcomes = _run_all(chosen, first, found, request, end)
    print(f"\n{summary.short(request.out, outcomes)}\nwrote {request.out}/summary.md")
    raise SystemExit(1 if any(o.failed for o in outcomes) else 0)


def _run_all(
    steps: Sequence[Step],
    first: Outcome,
    found: dict[str, Any],
    request: Request,
    end: float | None,
) -> list[Outcome]:
    """Part after part; a step for which too little time is left is left out."""
    outcomes = {o.name: o for o in (first, *(Outcome(step.name, WAITING) for step in steps))}

    def save(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        summary.write(request.out, found, [*outcomes.values()], rehearse=request.rehearse)
        if outcome.verdict != RUNNING:
            print(f"      {outcome.name:18} {outcome}", flush=True)

    parts = [[*of_part] for _, of_part in groupby(steps, lambda step: step.part or step.name)]
    for i, part in enumerate(parts, 1):
        seconds = max(step.seconds for step in part)
        left = seconds if end is None else max(end - time.monotonic(), 0)
        names = part[0].part or part[0].name
        print(f"[{i}/{len(parts)}] {names}, at most {min(left, seconds):.0f} s ...", flush=True)
        together(part, request.out, schedule.jobs(part[0].part), end, save)
        summary.pack(request.out)
    return [*outcomes.values()]


def _stop(*_: object) -> NoReturn:
    """Ends this process by the way on which a step's processes are killed."""
    sys.exit("ended by SIGTERM: summary.md has what was done until then")


def _list(request: Request) -> None:
    steps = [schedule.machine("", None), *schedule.steps(request)]
    for step in steps:
        print(f"{step.name:18} {step.seconds:4.0f} s at most   {step.does}")
    print(f"{'':18} {sum(step.seconds for step in steps):4.0f} s at most")


def _check_names(only: Sequence[str], request: Request) -> None:
    names = ["machine", *(step.name for step in schedule.steps(request))]
    for name in only:
        if name not in names:
            raise SystemExit(f"--only: step is {name!r}, expected one of {', '.join(names)}")


def _minutes(text: str) -> float:
    minutes = float(text)
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text}, expected more than 0")
    return minutes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = ROOT / "build" / "gpu"
    parser.add_argument(
        "out", type=Path, nargs="?", default=out, metavar="OUT", help="for results (build/gpu)"
    )
    parser.add_argument(
        "--minutes", type=_minutes, metavar="N", help="end in time: the most important steps first"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="STEP", help="these steps alone")
    parser.add_argument("--list", action="store_true", help="name the steps, and run none")
    parser.add_argument("--quick", action="store_true", help="small and rough, to see it run")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same steps without a GPU: kernels on the CPU"
    )
    parser.add_argument(
        "--library",
        type=Path,
        metavar="PATH",
        default=os.environ.get("KVX_LIBRARY"),
        help="test this libkvx.so, and build none ($KVX_LIBRARY)",
    )
    parser.add_argument("--commit", help="of this tree, where it has no repository")
    return parser.parse_args()


if __name__ == "__main__":
    main()

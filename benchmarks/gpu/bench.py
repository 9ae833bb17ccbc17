"""`python -m benchmarks.gpu.bench`: the copies of a GPU, checked, timed and saved as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT, gather, hybrid, migrate, peers, report, tiers, warm, write
from benchmarks.gpu.cases import FULL, QUICK, REHEARSAL, PlainCopy, Size, run
from benchmarks.gpu.facts import command_of, facts
from benchmarks.gpu.places import Gpu, Place, Rehearsal
from kvx_core import Memory

BENCHMARKS = {
    "write": write,
    "gather": gather,
    "migrate": migrate,
    "tiers": tiers,
    "hybrid": hybrid,
}


def main() -> None:
    options = _options()
    place: Place = Rehearsal(Memory[options.rehearse.upper()]) if options.rehearse else Gpu()
    size = REHEARSAL if options.rehearse else QUICK if options.quick else FULL
    options.results.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.benchmarks or BENCHMARKS:
        found = peers.find(place, name, () if options.warm else warm.unfinished(options.results))
        for peer, why in found.absent.items():
            print(f"{peer} is not there: {why}")
        if options.warm:
            names = {*found.writers, *found.migrators}
            warm.call(place, BENCHMARKS[name].cases(place, size, found), names, options.results)
            continue
        result: dict[str, Any] = {
            "benchmark": name,
            **facts(command_of("benchmarks.gpu.bench"), options.commit),
            "rehearsal": options.rehearse,
            "settings": {"quick": options.quick, "only": options.only, "rounds": size.rounds},
            "absent": found.absent,
            "results": [],
        }
        failed |= not _run(name, place, size, found, options, result)
    raise SystemExit(1 if failed else 0)


def _run(
    name: str,
    place: Place,
    size: Size,
    found: peers.Peers,
    options: argparse.Namespace,
    result: dict[str, Any],
) -> bool:
    """Every case of a benchmark; saved after each, so that a time limit leaves what there is."""
    print(f"\n== {name} ==")
    report.print_head()
    copy = PlainCopy(place)
    for case in BENCHMARKS[name].cases(place, size, found):
        if options.only not in case.name:
            continue
        row = run(place, case, copy, size.rounds)
        result["results"].append(row)
        if options.rehearse:
            row["goals"] = []  # its times mean nothing
        new = options.results / f"{name}.new"
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(options.results / f"{name}.json")
        report.print_row(row)
    print(f"\n{report.tally(result['results'])}")
    return not any({"kvx", "torch", "case"} & row["failed"].keys() for row in result["results"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bench", description=__doc__)
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="BENCHMARK",
        help=f"{', '.join(BENCHMARKS)}; default: all",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--quick", action="store_true", help="small and rough, to see it run")
    parser.add_argument(
        "--rehearse",
        nargs="?",
        choices=("host", "device"),
        const="host",
        help="tiny, on the CPU, times mean nothing; device: with a libkvx whose kernels run there",
    )
    parser.add_argument(
        "--warm", action="store_true", help="call others' kernels once, for them to compile"
    )
    parser.add_argument("--commit", help="of this tree, where it has no repository")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "gpu", metavar="DIR", help="(build/gpu)"
    )
    options = parser.parse_args()
    for name in options.benchmarks:
        if name not in BENCHMARKS:
            parser.error(f"benchmark is {name!r}, expected one of {', '.join(BENCHMARKS)}")
    return options


if __name__ == "__main__":
    main()

"""Old code against new: the same benchmarks in two checkouts, by turns, one timing at a time.

    .venv/bin/python -m benchmarks.paired OLD                # OLD: a built checkout with its .venv
    .venv/bin/python -m benchmarks.paired OLD cpu_copy --rounds 11 --threads 1
    .venv/bin/python -m benchmarks.paired OLD --own snapshots

Each checkout has a process of its own, which runs these benchmarks (with --own: its own, of the
same cases) with its own kvx_core and libkvx. A case is timed once in one process, then once in the
other, and so on, so that a machine that slows down slows both; caches of KV lie in memory that the
two share. A ratio is old / new, the median over rounds of the ratio within a round: above 1 the new
code is faster. Where its own memory lies makes a process some percent faster or slower for as long
as it lives, so both are started again several times, and the median is that of the starts. Only KVX
is timed; peers are for `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean, median
from typing import IO, Any

from benchmarks import machine, pools, rounds

_ROOT = Path(__file__).resolve().parent.parent
_DEFAULT = ("cpu_copy", "in_cache", "call_overhead")
_PEERS = {"torch", "memcpy", "stream", "rows", "blocks", "lmcache"}
_SHARED = "KVX_BENCHMARKS_SHARED"  # a folder in memory
_LEAST_MEDIAN, _LEAST_MEAN = 0.97, 1.0


class Worker:
    """A process that runs the benchmarks with the kvx_core of one checkout."""

    def __init__(self, checkout: Path, folder: Path, shared: str, arguments: list[str]) -> None:
        python = checkout / ".venv" / "bin" / "python"
        self.checkout = checkout
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.paired", "--turns", *arguments],
            cwd=folder,  # which has these benchmarks, whatever the checkout has
            env={**os.environ, "PYTHONPATH": str(folder), _SHARED: shared},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def next(self) -> str | None:
        """What it is about to time; None: it is done."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line and self._process.wait():
            raise SystemExit(f"the benchmarks failed in {self.checkout}")
        return line.rstrip("\n") or None

    def time(self) -> float:
        """Seconds of what `next` has named."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def run(
    old: Path, new: Path, arguments: list[str], *, own: bool
) -> dict[str, list[tuple[float, float]]]:
    """Of every case, the seconds in both checkouts, a pair per round."""
    cases: dict[str, list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
    ):
        (Path(folder) / "benchmarks").symlink_to(_ROOT / "benchmarks")
        workers = [
            Worker(code, code if own else Path(folder), shared, arguments) for code in (old, new)
        ]
        while True:
            case, same = (worker.next() for worker in workers)
            if case != same:
                raise SystemExit(f"the old code measures {case}, the new code {same}")
            if case is None:
                return cases
            pairs = cases.setdefault(case, [])
            if len(pairs) % 2:
                seconds = workers[0].time(), workers[1].time()
            else:
                seconds = (workers[1].time(), workers[0].time())[::-1]
            pairs.append(seconds)


def take_turns(answers: IO[str]) -> None:
    """Makes `rounds.compete` time KVX alone, and only when it is told to.

    The processes share memory, so each runs only while the other waits for its turn.
    """
    folder = Path(os.environ[_SHARED])
    pools.share(folder)
    alone = (folder / "alone").open("w")
    fcntl.flock(alone, fcntl.LOCK_EX)

    def turn(case: str, name: str, work: rounds.Contestant) -> float:
        label = case if name == "kvx" else f"{case} {name}".strip()
        print(label, file=answers, flush=True)
        fcntl.flock(alone, fcntl.LOCK_UN)
        if not sys.stdin.readline():
            raise SystemExit(1)
        fcntl.flock(alone, fcntl.LOCK_EX)
        seconds = work()
        print(seconds, file=answers, flush=True)
        return seconds

    rounds.take_turns(turn, _PEERS)


def main() -> None:
    if "--turns" in sys.argv:
        sys.argv.remove("--turns")
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the benchmarks print is for people
        take_turns(answers)
        from benchmarks import __main__ as everything

        everything.main()
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__)
    parser.add_argument("old", type=Path, help="a checkout with its .venv, built")
    parser.add_argument("--out", type=Path, default=_ROOT / "build/benchmarks/paired.json")
    parser.add_argument("--starts", type=int, default=9, help="of both processes (%(default)s)")
    parser.add_argument("--own", action="store_true", help="each checkout's own benchmarks")
    options, rest = parser.parse_known_args()
    if not any(name.isidentifier() for name in rest):
        rest = [*_DEFAULT, *rest]
    rows: list[dict[str, Any]] = []
    disturbance = machine.Disturbance()
    starts: list[dict[str, list[tuple[float, float]]]] = []
    for start in range(options.starts):
        print(f"start {start + 1} of {options.starts}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as results:
            arguments = [*rest, "--results", results]
            starts.append(run(options.old.resolve(), _ROOT, arguments, own=options.own))
    print(f"\n{'':58} {'old us':>11} {'new us':>11} {'old/new':>7}")
    for case in starts[0]:
        ratios = [median(old / new for old, new in start[case]) for start in starts]
        ratio, pairs = median(ratios), [pair for start in starts for pair in start[case]]
        old_us, new_us = (round(1e6 * median(side), 3) for side in zip(*pairs, strict=True))
        rows.append(
            {
                "case": case,
                "old_us": old_us,
                "new_us": new_us,
                "ratio": round(ratio, 4),
                "ratio_of_starts": [round(ratio, 4) for ratio in ratios],
            }
        )
        mark = "" if ratio >= _LEAST_MEDIAN else f"  below {_LEAST_MEDIAN}"
        print(f"{case:58} {old_us:>11.2f} {new_us:>11.2f} {ratio:>7.3f}{mark}")
    mean = geometric_mean(row["ratio"] for row in rows)
    slow = [row["case"] for row in rows if row["ratio"] < _LEAST_MEDIAN]
    print(f"\n{len(rows)} cases, geometric mean {mean:.3f}, below {_LEAST_MEDIAN}: {len(slow)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        **machine.facts(),
        "command": " ".join(["python -m benchmarks.paired OLD", *["--own"] * options.own, *rest]),
        "old_commit": machine.commit(options.old),
        "disturbance": disturbance.so_far(),
        "geometric_mean": round(mean, 4),
        "goals": {"each": _LEAST_MEDIAN, "mean": _LEAST_MEAN},
    }
    options.out.write_text(json.dumps({**summary, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

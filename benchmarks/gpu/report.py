"""Results as lines of text and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import goal_text

_WIDTH = 50
_VERSUS = ("copy", "torch", "layers", "vllm", "flashinfer", "lmcache", "staged")


def print_head() -> None:
    """Names the columns of print_row."""
    columns = "".join(f"{'x ' + name:>13}" for name in _VERSUS)
    print(f"{'':{_WIDTH}} {'us':>10} {'GB/s':>6}{columns}   goals", flush=True)


def print_row(row: dict[str, Any]) -> None:
    """One result: KVX's time, bytes read and written per second, times as fast as the others."""
    us, rate, *speedups = _cells(row)
    columns = "".join(f"{cell or '-':>13}" for cell in speedups)
    print(f"{row['case']:{_WIDTH}} {us:>10} {rate:>6}{columns}   {_goals(row)}", flush=True)
    for name, sentence in row["failed"].items():
        print(f"  {name} failed: {sentence}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The same in Markdown."""
    head = ["case", "us", "GB/s", *(f"x {name}" for name in _VERSUS), "goals"]
    lines = [head, ["---", *["--:"] * (len(head) - 2), "---"]]
    lines += [[row["case"], *_cells(row), _goals(row)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tally(rows: Sequence[dict[str, Any]]) -> str:
    """How many cases there are, and goals met."""
    goals = [goal for row in rows for goal in row["goals"]]
    met = sum(goal["met"] for goal in goals)
    return f"{len(rows)} cases, {met} of {len(goals)} goals met"


def missed(row: dict[str, Any]) -> str:
    """Goals that were not met, and ways that failed."""
    goals = [goal_text(goal) for goal in row["goals"] if not goal["met"]]
    return "; ".join(goals + [f"{name}: {why}" for name, why in row["failed"].items()])


def _cells(row: dict[str, Any]) -> list[str]:
    us = row["median_us"].get("kvx")
    if us is None:
        return ["failed", *[""] * (1 + len(_VERSUS))]
    speedups = row["kvx_speedup"]
    return [
        f"{us:.2f}",
        f"{2 * row['bytes'] / us / 1e3:.0f}",
        *(f"{speedups[name]:.2f}" if name in speedups else "" for name in _VERSUS),
    ]


def _goals(row: dict[str, Any]) -> str:
    return ", ".join(map(goal_text, row["goals"]))

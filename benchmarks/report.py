"""Results as lines, as JSON, as a table for README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WIDTH = 30


def print_head(versus: Sequence[str]) -> None:
    """Names the columns of print_row."""
    columns = "".join(f"{'x ' + name:>11}" for name in versus)
    print(f"\n{'':{_WIDTH}} {'threads':>7} {'us':>11} {'GB/s':>6}{columns}   goals", flush=True)


def print_row(row: dict[str, Any], versus: Sequence[str] = ("memcpy", "stream", "torch")) -> None:
    """One result: KVX's time and how many times as fast as each other way KVX is."""
    speedups = row["kvx_speedup"]
    columns = "".join(f"{speedups[v]:>11.2f}" if v in speedups else f"{'-':>11}" for v in versus)
    print(
        f"{row['case']:{_WIDTH}} {row['threads']:>7} {row['median_us']['kvx']:>11.2f} "
        f"{gb_per_s(row):>6.1f}{columns}   {goals(row)}",
        flush=True,
    )


def gb_per_s(row: dict[str, Any], name: str = "kvx") -> float:
    """(bytes read + bytes written) / 2 per second, in 1e9."""
    return float(row["bytes"] / row["median_us"][name] / 1e3)


def goals(row: dict[str, Any]) -> str:
    """Every goal beside what was measured."""
    return ", ".join(goal_text(goal) for goal in row["goals"]) or "-"


def goal_text(goal: dict[str, Any]) -> str:
    """A goal and whether it was met."""
    verdict = "met" if goal["met"] else "NOT MET"
    return f"{goal['versus']} {goal['measured']:.2f} >= {goal['at_least']:g} {verdict}"


def save(directory: Path, name: str, result: dict[str, Any]) -> None:
    """Writes `directory`/`name`.json."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    text = json.dumps(result, indent=1)
    samples_in_a_line = re.sub(r"\[[-\d.,\s]+\]", lambda m: " ".join(m[0].split()), text)
    path.write_text(samples_in_a_line + "\n")
    print(f"\nwrote {path}")

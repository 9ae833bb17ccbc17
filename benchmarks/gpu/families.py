"""Families of copies: what the addresses at both ends ask of a kernel, and the goal of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.caches import Cache
from benchmarks.rounds import Goal


class Family(NamedTuple):
    """share: of the speed of a plain copy of as many bytes that its cases are to reach, if they are
    large enough to fill the GPU
    """

    name: str
    share: float | None

    @property
    def goal(self) -> Goal:
        """Against the plain copy."""
        assert self.share is not None, f"{self.name} has no goal against a plain copy"
        return Goal("copy", self.share)


ROWS = Family("rows: long contiguous runs", 0.90)
REMAP = Family("remap: units of 16 bytes in another order", 0.90)
TILE = Family("tile: transposed elements", 0.80)
CONVERT = Family("convert: another dtype", 0.80)
DECODE = Family("decode: a step's writes", None)  # a launch takes longer than their bytes
TIER = Family("tier: between the GPU and pinned memory of the host", 0.90)
PEER = Family("peer: between two GPUs", 0.90)
HYBRID = Family("hybrid: a step of DeepSeek-V4's cache", round(1 / 1.2, 2))
BESIDE = Family("beside other work: background, copy engines", None)


def of(*caches: Cache) -> Family:
    """Of a copy between these, or between one and dense bfloat16 tokens."""
    if any(cache.shape.dtype != torch.bfloat16 for cache in caches):
        return CONVERT
    layouts = {cache.layout for cache in caches}
    if "transposed V" in layouts:
        return TILE
    return REMAP if "packed-x" in layouts else ROWS


def table(rows: Iterable[dict[str, Any]]) -> str:
    """A line for each family, in Markdown: the share of a plain copy's speed that its cases reach,
    and their goals, those against peers included."""
    lines = [
        "| family | cases | share of a copy: least | median | goal | goals met |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for family, members in by_family(rows).items():
        shares = [share for row in members if (share := share_of(row)) is not None]
        goals = [goal for row in members for goal in row["goals"]]
        wanted = {goal["at_least"] for goal in goals if goal["versus"] == "copy"}
        cells = [
            family,
            str(len(members)),
            f"{min(shares):.2f}" if shares else "",
            f"{median(shares):.2f}" if shares else "",
            ", ".join(f"{share:.2f}" for share in sorted(wanted)),
            f"{sum(goal['met'] for goal in goals)} of {len(goals)}" if goals else "none here",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_family(rows: Iterable[dict[str, Any]]) -> dict[str, Sequence[dict[str, Any]]]:
    """The rows of each family, by its name, in the order in which families come first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append(row)
    return dict(found)


def share_of(row: dict[str, Any]) -> float | None:
    """The share of a plain copy's speed that KVX reaches; None: it failed."""
    share: float | None = row["kvx_speedup"].get("copy")
    return share

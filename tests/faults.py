"""Faults of file systems in other processes: kvx_conformance/faults.c says what there is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kvx_conformance import faults
from tests.native import ROOT, alone


@cache
def library() -> Path:
    """Builds libfaults.so, and returns its path."""
    path = ROOT / "build" / "faults" / "libfaults.so"
    with alone("faults"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_mtime < faults.SOURCE.stat().st_mtime:
            faults.build(path.parent)
    return path


def environment(*rules: str, log: Path | None = None, clock_ahead: int = 0) -> dict[str, str]:
    """Variables of a process that has these faults: see kvx_conformance.faults.environment."""
    return faults.environment(library(), *rules, log=log, clock_ahead=clock_ahead)

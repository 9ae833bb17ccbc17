"""steps.json and summary.md: all that is known, written anew after every step."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import ceilings, facts, families, picture, report, warm
from benchmarks.gpu.schedule import BENCHMARKS
from benchmarks.gpu.steps import Outcome, log_of

REHEARSAL = "Rehearsal without a GPU: its times mean nothing"
ARCHIVE = "all.tgz"
_FILES = (
    *("steps.json", "summary.md", "shares.svg", warm.FILE, ceilings.FILE),
    *(f"{name}.json" for name in BENCHMARKS),
)


def clear(out: Path) -> None:
    """Makes the folder; removes what an earlier run left there."""
    out.mkdir(parents=True, exist_ok=True)
    earlier = out / "steps.json"
    for step in json.loads(earlier.read_text())["steps"] if earlier.exists() else ():
        log = log_of(out, step["name"])
        for path in (log, log.with_suffix(".json")):
            path.unlink(missing_ok=True)
    for name in (*_FILES, ARCHIVE):
        (out / name).unlink(missing_ok=True)


def pack(out: Path) -> None:
    """All results and logs in one file, which is whole at any time."""
    new = out / f"{ARCHIVE}.new"
    with tarfile.open(new, "w:gz") as archive:
        for name in (*_FILES, "logs"):
            if (out / name).exists():
                archive.add(out / name, name)
    new.replace(out / ARCHIVE)


def write(out: Path, found: dict[str, Any], outcomes: Sequence[Outcome], *, rehearse: bool) -> None:
    """Whole files in place of the former ones."""
    steps = [vars(outcome) for outcome in outcomes]
    _replace(
        out / "steps.json", json.dumps({**found, "rehearsal": rehearse, "steps": steps}, indent=1)
    )
    _replace(out / "summary.md", _text(out, found, outcomes, rehearse))
    if rows := picture.rows_of(_results(out)):
        _replace(out / "shares.svg", picture.draw(rows, _title(found, rehearse)))


def short(out: Path, outcomes: Sequence[Outcome]) -> str:
    """What is printed in the end."""
    lines = [f"{o.name:18} {o.verdict} in {o.seconds:.0f} s" for o in outcomes]
    for result in _results(out):
        rows = result["results"]
        lines.append(f"{result['benchmark']}: {report.tally(rows)}")
        lines += [f"  {row['case']}: {report.missed(row)}" for row in rows if report.missed(row)]
    if rows := picture.rows_of(_results(out)):
        lines += ["", families.table(rows)]
    return "\n".join(lines)


def _text(out: Path, found: dict[str, Any], outcomes: Sequence[Outcome], rehearse: bool) -> str:
    results = _results(out)
    parts = [f"# {_title(found, rehearse)}"]
    if found:
        parts += facts.lines(found)
    parts.append("\n".join(["| step | | s |", "| --- | --- | --: |", *map(_row, outcomes)]))
    for outcome in outcomes:
        if outcome.failed:
            parts += [f"## {outcome.name}: {outcome.verdict}", _quoted(outcome)]
    if rows := picture.rows_of(results):
        parts += ["## Families", families.table(rows), "![share of a plain copy](shares.svg)"]
    if measured := ceilings.table(out):
        parts += ["## Ceilings", measured]
    for result in results:
        parts += [f"## {result['benchmark']}", report.table(result["results"])]
        parts += [f"{name} is not there: {why}" for name, why in result["absent"].items()]
    return "\n\n".join(parts) + "\n"


def _title(found: dict[str, Any], rehearse: bool) -> str:
    gpu = found.get("gpu")
    return REHEARSAL if rehearse else str(gpu["name"]) if gpu else "No GPU"


def _row(outcome: Outcome) -> str:
    last = outcome.said.splitlines()[-1] if outcome.said else ""
    said = f"{outcome.verdict}: {last}" if last else outcome.verdict
    return f"| {outcome.name} | {said.replace('|', chr(92) + '|')} | {outcome.seconds:.0f} |"


def _quoted(outcome: Outcome) -> str:
    failures = [failure["said"] for failure in outcome.result.get("failures", ())[:3]]
    text = "\n\n".join([outcome.said, *failures])
    return "\n".join(f"    {line}" for line in text.splitlines())


def _results(out: Path) -> list[dict[str, Any]]:
    """Of the benchmarks, as far as they came."""
    paths = [out / f"{name}.json" for name in BENCHMARKS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text.rstrip("\n") + "\n")
    new.replace(path)

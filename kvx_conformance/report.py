"""Results as lines of a terminal, as JSON and as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from kvx_conformance.case import Outcome
from kvx_conformance.runner import Result

_GOOD = {Outcome.PASS, Outcome.NOT_APPLICABLE}


def failed(results: Sequence[Result]) -> list[Result]:
    """Those that neither passed nor were without object."""
    return [result for result in results if result.outcome not in _GOOD]


def line(result: Result) -> str:
    """A result in one line."""
    why = f"  {result.why}" if result.why else ""
    return f"{result.outcome:8} {result.case.name:44} {result.seconds:6.1f} s{why}"


def totals(results: Sequence[Result]) -> str:
    """How many cases ended in which way."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])


def as_json(subjects: dict[str, Sequence[Result]]) -> str:
    """The results of several subjects."""
    return json.dumps(
        {
            subject: [
                {
                    "case": result.case.name,
                    "outcome": result.outcome,
                    "why": result.why,
                    "seconds": round(result.seconds, 2),
                    "says": result.case.says,
                    "source": result.case.source,
                }
                for result in results
            ]
            for subject, results in subjects.items()
        },
        indent=1,
    )


def as_page(subjects: dict[str, Sequence[Result]]) -> str:
    """A Markdown table: a row for each case, a column for each subject."""
    names = list(subjects)
    cases = {result.case.name: result.case for results in subjects.values() for result in results}
    found = {(name, result.case.name): result for name in names for result in subjects[name]}
    rows = [f"| case | promise | {' | '.join(names)} |", "| --- |" + " --- |" * (len(names) + 1)]
    for case in cases.values():
        cells = [
            str(found[name, case.name].outcome) if (name, case.name) in found else ""
            for name in names
        ]
        rows.append(f"| `{case.name}` | {case.says.replace('|', ' ')} | {' | '.join(cells)} |")
    rows.append(f"| | | {' | '.join(totals(subjects[name]) for name in names)} |")
    return "\n".join(rows) + "\n"

"""The process in which cases run: `python -m kvx_conformance.worker KIND SUBJECT`.

A case and the subject that it is for come on standard input, one pair a line; for each, a line of
JSON goes out. What subjects print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kvx_conformance.case import Case, Finding, Outcome, summary
from kvx_conformance.connector_probe import Probe
from kvx_conformance.engine_probe import engines_of
from kvx_conformance.served import EngineFailed
from kvx_conformance.subjects import BadSubject, cases_of, made, require


def outcome_of(case: Case, subject: Any) -> tuple[Outcome, str]:
    """Runs a case; how it ended, and why."""
    try:
        case.check(subject)
    except Finding as finding:
        return finding.outcome, str(finding)
    except Exception as error:
        return Outcome.REFUSED, summary(error)
    return Outcome.PASS, ""


def _subject(kind: str, name: str) -> Any:
    if kind != "engine":
        return Probe(kind, name)
    subject = made(name)
    for engine in engines_of(subject):
        require(kind, name, engine)
    return subject


def main(kind: str, name: str) -> None:
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    cases = {case.name: case for case in cases_of(kind)}
    try:
        subject = _subject(kind, name)
    except (BadSubject, EngineFailed) as error:
        sys.exit(str(error))
    print(json.dumps({"ready": True}), file=results)
    for line in sys.stdin:
        case, wanted = line.split()
        if wanted != name:
            if isinstance(subject, Probe):
                subject.close()
            name, subject = wanted, _subject(kind, wanted)
        outcome, why = outcome_of(cases[case], subject)
        print(json.dumps({"outcome": outcome, "why": why}), file=results)
    os._exit(0)  # without waiting for processes of engines, which end with this one


if __name__ == "__main__":
    main(*sys.argv[1:])

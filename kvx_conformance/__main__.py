"""`python -m kvx_conformance KIND SUBJECT ...`: docs/conformance.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvx_conformance import report, runner
from kvx_conformance.soak import soak
from kvx_conformance.subjects import KINDS, cases_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every case passed or was without object, else 1. Bad arguments: exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m kvx_conformance", description="Checks the KV caches of engines."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="MODULE or MODULE:NAME")
    parser.add_argument(
        "-k", metavar="WORDS", default="", help="cases whose names have one of them"
    )
    parser.add_argument(
        "--patience", type=float, default=1, metavar="TIMES", help="of a case's limit of seconds"
    )
    parser.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="of stores and connectors: no cases, but everything at once",
    )
    parser.add_argument("--list", action="store_true", help="the cases, what they say and why")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="the table, in Markdown")
    options = parser.parse_args(arguments)
    words = options.k.split()
    cases = [
        replace(case, seconds=case.seconds * options.patience)
        for case in cases_of(options.kind)
        if not words or any(word in case.name for word in words)
    ]
    if not cases:
        parser.error(f"-k {options.k!r} names no case; --list shows all")
    if options.list:
        for case in cases:
            print(f"{case.name}\n    {case.says}\n    Source: {case.source}")
        return 0
    if not options.subjects:
        parser.error("no SUBJECT; expected MODULE or MODULE:NAME")
    if options.soak is not None:
        if options.kind == "engine":
            parser.error("--soak is for stores and connectors")
        return int(not all(soak(options.kind, one, options.soak) for one in options.subjects))
    subjects: dict[str, Sequence[runner.Result]] = {}
    for subject in options.subjects:
        results = []
        for result in runner.run(options.kind, subject, cases):
            results.append(result)
            print(report.line(result), flush=True)
        print(f"{subject}: {report.totals(results)}", flush=True)
        subjects[subject] = results
    if options.json:
        options.json.write_text(report.as_json(subjects))
    if options.page:
        options.page.write_text(report.as_page(subjects))
    return int(any(report.failed(results) for results in subjects.values()))


if __name__ == "__main__":
    sys.exit(main())

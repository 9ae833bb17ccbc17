"""A pytest plugin: counts results in the file that $KVX_GPU_RESULT names, after every test.

What was found is on disk when a test hangs or ends the process, and so is that test's name.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import ENDED, RESULT_VARIABLE

_LINES = 12  # of a failure that are kept, its last ones


class Tally:
    """Outcomes so far, the failures among them, and the test that runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._failures: list[dict[str, str]] = []
        self._running = "collection"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid
        self._save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail("failed" if report.when == "call" else "errors", report)
        elif report.when == "call" or report.skipped:
            self._counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail("errors", report)

    def pytest_sessionfinish(self) -> None:
        self._running = ENDED
        self._save()

    def _fail(self, what: str, report: Any) -> None:
        self._counts[what] += 1
        lines = str(report.longrepr).strip().splitlines()
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        said = [*lines[-_LINES:], *crash.splitlines()[:1]]
        self._failures.append({"test": report.nodeid, "said": "\n".join(said)})
        self._save()

    def _save(self) -> None:
        found = {"counts": self._counts, "running": self._running, "failures": self._failures}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self._path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tally(Path(os.environ[RESULT_VARIABLE])))

"""A pytest plugin for tests that may lose the device: what was found is on disk after every test.

The file that $KVX_GPU_RESULT names says what came of the tests, which one runs, and how many have
been reached. A run that finds such a file goes on behind the last of these: a test that ended the
process costs itself alone. A device that does not answer after a failed test, and a test that takes
longer than --test-seconds, end the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import COLLECTION, ENDED, RESULT_VARIABLE

_LINES = 12  # of a failure that are kept, its last ones


class Tally:
    """Outcomes so far, the failures among them, and the test that runs."""

    def __init__(self, path: Path, seconds: float, stderr: int) -> None:
        self._path, self._seconds, self._stderr = path, seconds, stderr
        before = json.loads(path.read_text()) if path.exists() else {}
        self._counts: Counter[str] = Counter(before.get("counts", {}))
        self._failures: list[dict[str, str]] = before.get("failures", [])
        self._reached: int = before.get("reached", 0)
        self._lost = False
        self._running = COLLECTION
        if self._reached and not before["lost"]:
            self._counts["failed"] += 1
            said = f"it ended the process, or took more than {seconds:.0f} s"
            self._failures.append({"test": before["running"], "said": said})

    @pytest.hookimpl(trylast=True)  # of the items that others leave
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        del items[: self._reached]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid
        self._reached += 1
        self._save()
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stderr)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail("failed" if report.when == "call" else "errors", report)
            self._ask_device()
        elif report.when == "call" or report.skipped:
            self._counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail("errors", report)

    def pytest_sessionfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if not self._lost:
            self._running = ENDED
        self._save()

    def _ask_device(self) -> None:
        """Waits for the GPU. After an error that it does not recover from, no call works."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self._lost = True
            self._failures[-1]["said"] += (
                f"\nthe device is lost: {str(error).partition(chr(10))[0]}"
            )
            pytest.exit("the device is lost", 7)

    def _fail(self, what: str, report: Any) -> None:
        self._counts[what] += 1
        lines = str(report.longrepr).strip().splitlines()
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        said = [*lines[-_LINES:], *crash.splitlines()[:1]]
        self._failures.append({"test": report.nodeid, "said": "\n".join(said)})
        self._save()

    def _save(self) -> None:
        found = {
            "counts": self._counts,
            "running": self._running,
            "reached": self._reached,
            "lost": self._lost,
            "failures": self._failures,
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self._path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-seconds", type=float, default=60.0, help="that a test may take")


def pytest_configure(config: pytest.Config) -> None:
    path, seconds = Path(os.environ[RESULT_VARIABLE]), config.getoption("--test-seconds")
    config.pluginmanager.register(Tally(path, seconds, os.dup(2)))  # fd 2 is not captured yet

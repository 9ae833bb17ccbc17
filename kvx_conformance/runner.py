"""Runs cases in processes that may end or hang."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import IO, Any

from kvx_conformance.case import Case, Outcome

_START_SECONDS = 300.0  # to import an engine


@dataclass(frozen=True)
class Result:
    """How a case ended, why it did not pass, and the seconds it took."""

    case: Case
    outcome: Outcome
    why: str
    seconds: float


class _Worker:
    """A process that runs cases, one after the other."""

    def __init__(self, kind: str, subject: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(
            prefix="kvx-conformance-", ignore_cleanup_errors=True
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvx_conformance.worker", kind, subject],
            env=os.environ | {"TMPDIR": self._scratch.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what it starts ends with it
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        if self._answer(_START_SECONDS) is None:
            self.stop()
            raise SystemExit(f"{subject} does not start: see above")

    def run(self, case: Case, subject: str) -> tuple[Outcome, str] | None:
        """How the case ended; None: the process has ended, or hangs, and is stopped."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{case.name} {subject}\n")
            self._process.stdin.flush()
        answer = self._answer(case.seconds)
        if answer is None:
            return None
        return Outcome(answer["outcome"]), answer["why"]

    def why_ended(self) -> tuple[Outcome, str]:
        """Stops the process, which gave no answer."""
        code = self._process.poll()
        self.stop()
        if code is None:
            return Outcome.HANG, "no end within its limit"
        if code < 0:
            return Outcome.CRASH, f"the process was ended by {signal.Signals(-code).name}"
        return Outcome.CRASH, f"the process ended with {code}"

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._scratch.cleanup()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._lines.put(line)
        self._process.wait()
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else None


class Runner:
    """Runs cases of a kind in one process, until a case ends it or hangs: then in a new one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._worker: _Worker | None = None

    def run(self, case: Case, subject: str) -> Result:
        """The process imports once what several subjects of one engine import."""
        self._worker = self._worker or _Worker(self._kind, subject)
        begun = time.monotonic()
        answer = self._worker.run(case, subject)
        if answer is None:
            answer = self._worker.why_ended()
            self._worker = None
        return Result(case, *answer, time.monotonic() - begun)

    def close(self) -> None:
        if self._worker:
            self._worker.stop()


def run(kind: str, subject: str, cases: Iterable[Case]) -> Iterator[Result]:
    """Runs the cases of a subject; a result as each ends."""
    with closing(Runner(kind)) as runner:
        for case in cases:
            yield runner.run(case, subject)

"""Commands with a time limit, one after the other."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from benchmarks.gpu.facts import ROOT

_TAIL = 15  # lines of a failure that are shown


@dataclass(frozen=True)
class Step:
    """A command, run in the root of the repository.

    absent: output by which a tool says that it cannot work on this machine
    """

    name: str
    command: Sequence[str]
    seconds: int
    absent: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    verdict: str  # "passed", "failed", "timed out", "not there"
    seconds: float
    said: str  # its last line, or those of a failure

    @property
    def failed(self) -> bool:
        return self.verdict in ("failed", "timed out")

    @property
    def row(self) -> str:
        """Of a table in Markdown."""
        last = self.said.splitlines()[-1] if self.said else ""
        said = last.replace("|", "\\|")
        return f"| {self.name} | {self.verdict}: {said} | {self.seconds:.0f} |"

    def __str__(self) -> str:
        return f"{self.verdict} in {self.seconds:.1f} s: {self.said}"


def run(step: Step, log: TextIO) -> Outcome:
    """Runs it to its end or its limit; what it prints goes to the log."""
    log.write(f"\n$ {shlex.join(step.command)}\n")
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        return Outcome(step.name, "not there", 0.0, str(error))
    try:
        output, _ = process.communicate(timeout=step.seconds)
        verdict = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        verdict = "timed out"
    log.write(output)
    log.flush()
    if step.absent and step.absent in output:
        verdict = "not there"
    lines = [line for line in output.splitlines() if line.strip()]
    shown = lines[-_TAIL:] if verdict in ("failed", "timed out") else lines[-1:]
    return Outcome(step.name, verdict, round(time.monotonic() - begin, 1), "\n".join(shown))

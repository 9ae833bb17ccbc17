"""Commands with a time limit, one after the other."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import ENDED, RESULT_VARIABLE, ROOT

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"
NOT_THERE = "not there"  # it needs a tool or a device that this machine has not
LEFT_OUT = "left out"  # for want of time
RUNNING, WAITING = "running", "not reached"

_MARK = "KVX_GPU_STEP"  # in the environment of all processes of a step
_TAIL = 15  # lines of a failure that are shown
_GRACE = 10.0  # seconds for killed processes to end; one that a driver holds may not


@dataclass(frozen=True)
class Step:
    """A command, run in the root of the repository.

    seconds:     its time limit
    least:       with less time than this left, it is not started
    needs:       files without which it cannot start, and what makes them
    unavailable: why it cannot run on this machine, if that is known beforehand
    absent:      what a tool prints that cannot work on this machine
    tests:       it is a run of tests, of which one at least has to pass
    device_only: its tests are skipped where there is no GPU, and that is no failure
    """

    name: str
    does: str
    command: Sequence[str]
    seconds: float
    least: float = 10
    needs: tuple[Path, str] | None = None
    unavailable: str | None = None
    absent: str | None = None
    tests: bool = False
    device_only: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    verdict: str
    seconds: float = 0.0
    said: str = ""  # its last line, or those of a failure
    result: dict[str, Any] = field(default_factory=dict)  # what it left in $KVX_GPU_RESULT

    @property
    def failed(self) -> bool:
        return self.verdict in (FAILED, TIMED_OUT)

    def __str__(self) -> str:
        return f"{self.verdict} in {self.seconds:.1f} s" + f": {self.said}" * bool(self.said)


def run(step: Step, out: Path, seconds: float | None = None) -> Outcome:
    """Runs it to its end or its limit. What it prints goes straight to out/log.txt.

    seconds: less than the step's own limit, where less time is left
    No process that the step started outlives it.
    """
    if step.unavailable:
        return Outcome(step.name, NOT_THERE, said=step.unavailable)
    if step.needs and not step.needs[0].exists():
        path, maker = step.needs
        return Outcome(step.name, FAILED, said=_said(f"{path} is not there: {maker} makes it"))
    left_by_step = out / "running.json"
    left_by_step.unlink(missing_ok=True)
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, _MARK: mark, RESULT_VARIABLE: str(left_by_step)}
    begin = time.monotonic()
    limit = min(step.seconds, seconds or step.seconds)
    with (out / "log.txt").open("ab") as log:
        log.write(f"\n$ {shlex.join(step.command)}\n".encode())
        log.flush()
        start = log.tell()
        code: int | None = None
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            return Outcome(step.name, FAILED, said=f"it cannot start: {error}")
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=limit)
        finally:
            process.kill()
            _kill_all(mark)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE)
    took = round(time.monotonic() - begin, 1)
    output = _from(out / "log.txt", start)
    result = _taken(left_by_step)
    verdict = TIMED_OUT if code is None else FAILED if code else PASSED
    said = _shown(output, verdict)
    if verdict == FAILED and step.absent and step.absent in output:
        verdict, said = NOT_THERE, _shown(output, PASSED)
    elif step.tests:
        verdict, said = _judged(step, verdict, said, result)
    if verdict == TIMED_OUT:
        said = f"killed after {limit:.0f} s\n{said}"
    return Outcome(step.name, verdict, took, said, result)


def _judged(step: Step, verdict: str, said: str, result: dict[str, Any]) -> tuple[str, str]:
    """A verdict on tests, which do not pass by running none, and its sentence."""
    if not result:
        return verdict if verdict != PASSED else FAILED, said or "no test ran"
    counts = ", ".join(f"{n} {what}" for what, n in result["counts"].items())
    if verdict == TIMED_OUT:
        return verdict, f"{counts or 'none ended'}; in {result['running']}"
    if verdict == PASSED and not result["counts"].get("passed"):
        return (NOT_THERE if step.device_only else FAILED), counts or "no test ran"
    if verdict == PASSED:
        return verdict, counts
    lines = [f"{f['test']}: {f['said'].splitlines()[-1]}" for f in result["failures"][:_TAIL]]
    if result["running"] != ENDED:
        lines.append(f"ended in {result['running']}")
    return verdict, "\n".join([*(lines or [said]), counts or "no test ran"])


def _shown(output: str, verdict: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return _said("\n".join(lines[-1:] if verdict == PASSED else lines[-_TAIL:]))


def _said(text: str) -> str:
    """With paths as they are in every checkout."""
    return text.replace(f"{ROOT}/", "")


def _from(path: Path, start: int) -> str:
    with path.open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


def _taken(path: Path) -> dict[str, Any]:
    """What a step has left there, whole or not; the file goes."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    path.unlink()
    return found if isinstance(found, dict) else {}


def _kill_all(mark: str) -> None:
    """Kills all processes of a step. Those that ninja starts are in process groups of their own."""
    end = time.monotonic() + _GRACE
    while (alive := list(_marked(mark))) and time.monotonic() < end:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> Iterator[int]:
    """Processes with this mark in their environment; those that have ended show none."""
    entry = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

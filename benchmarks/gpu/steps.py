"""Commands with a time limit, one after the other or side by side."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from benchmarks.gpu import COLLECTION, ENDED, RESULT_VARIABLE, ROOT

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"
NOT_THERE = "not there"  # it needs a tool or a device that this machine has not
LEFT_OUT = "left out"  # for want of time
RUNNING, WAITING = "running", "not reached"

_MARK = "KVX_GPU_STEP"  # in the environment of all processes of a step
_TAIL = 15  # lines of a failure that are shown
_TRIES = 6  # of a run of tests: each but the first begins behind a test that ended the process
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
    part:        neighbours of the same part run side by side; "": it runs alone
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
    part: str = ""


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
    """Runs it to its end or its limit. What it prints goes straight to a file: log_of.

    seconds: less than the step's own limit, where less time is left
    A run of tests that ends in the midst of one, as with a lost device, goes on behind it in a new
    process. No process that the step started outlives it.
    """
    if step.unavailable:
        return Outcome(step.name, NOT_THERE, said=step.unavailable)
    if step.needs and not step.needs[0].exists():
        path, maker = step.needs
        return Outcome(step.name, FAILED, said=_said(f"{path} is not there: {maker} makes it"))
    log, left = log_of(out, step.name), log_of(out, step.name).with_suffix(".json")
    log.parent.mkdir(parents=True, exist_ok=True)
    for path in (log, left):
        path.unlink(missing_ok=True)
    limit = step.seconds if seconds is None else min(seconds, step.seconds)
    begin = time.monotonic()
    for _ in range(_TRIES):
        try:
            code, start = _execute(step, log, left, begin + limit)
        except OSError as error:
            return Outcome(step.name, FAILED, said=f"it cannot start: {error}")
        result = _left_in(left)
        inside = result.get("running", ENDED) not in (COLLECTION, ENDED)
        if not step.tests or code is None or not inside or begin + limit - time.monotonic() < 5:
            break
    took = round(time.monotonic() - begin, 1)
    output = _from(log, start)
    verdict = TIMED_OUT if code is None else FAILED if code else PASSED
    said = _shown(output, verdict)
    if verdict == FAILED and step.absent and step.absent in output:
        verdict, said = NOT_THERE, _shown(output, PASSED)
    elif step.tests:
        verdict, said = _judged(step, verdict, said, result)
    if verdict == TIMED_OUT:
        said = f"killed after {limit:.0f} s\n{said}"
    return Outcome(step.name, verdict, took, said, result)


def together(
    steps: Sequence[Step],
    out: Path,
    jobs: int,
    end: float | None,
    save: Callable[[Outcome], object],
) -> None:
    """Runs steps side by side, `jobs` at a time, until `end` of time.monotonic().

    save: gets an Outcome when a step begins, and one when it ends, one call at a time
    An exception in this thread, as by a signal, ends all of them; those have no outcome then.
    """
    lock, stopped = Lock(), Event()

    def tell(outcome: Outcome) -> None:
        with lock:
            if not stopped.is_set():
                save(outcome)

    def one(step: Step) -> None:
        left = None if end is None else end - time.monotonic()
        if left is not None and left < min(step.least, step.seconds):
            tell(Outcome(step.name, LEFT_OUT, said="no time was left for it"))
        elif not stopped.is_set():
            tell(Outcome(step.name, RUNNING))
            tell(run(step, out, left))

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, step) for step in steps]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                _kill_all(f"{os.getpid()}-")
                time.sleep(0.05)
            raise


def log_of(out: Path, name: str) -> Path:
    """What a step printed; beside it, as JSON, what it left."""
    return out / "logs" / f"{name}.txt"


def _execute(step: Step, log: Path, left: Path, end: float) -> tuple[int | None, int]:
    """Its exit status, None past `end`; where in the log its output begins. May raise OSError."""
    mark = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    environment = {**os.environ, _MARK: mark, RESULT_VARIABLE: str(left)}
    code: int | None = None
    with log.open("ab") as file:
        file.write(f"\n$ {shlex.join(step.command)}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=max(end - time.monotonic(), 0))
        finally:
            process.kill()
            _kill_all(mark)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE)
    return code, start


def _judged(step: Step, verdict: str, said: str, result: dict[str, Any]) -> tuple[str, str]:
    """A verdict on tests, which do not pass by running none, and its sentence."""
    if not result:
        return verdict if verdict != PASSED else FAILED, said or "no test ran"
    counts = ", ".join(f"{n} {what}" for what, n in result["counts"].items())
    if verdict == TIMED_OUT:
        return verdict, f"{counts or 'none ended'}; in {result['running']}"
    has_failed = {"failed", "errors"} & result["counts"].keys()  # maybe before it went on
    if verdict == PASSED and not has_failed:
        if result["counts"].get("passed"):
            return PASSED, counts
        return (NOT_THERE if step.device_only else FAILED), counts or "no test ran"
    lines = [f"{f['test']}: {f['said'].splitlines()[-1]}" for f in result["failures"][:_TAIL]]
    if result["running"] != ENDED:
        lines.append(f"ended in {result['running']}")
    return FAILED, "\n".join([*(lines or [said]), counts or "no test ran"])


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


def _left_in(path: Path) -> dict[str, Any]:
    """What a step has left there, whole or not."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
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
    """Processes whose mark begins so, by their environment; those that have ended show none."""
    entry = b"\0" + f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if entry in b"\0" + (folder / "environ").read_bytes():
                    yield int(folder.name)

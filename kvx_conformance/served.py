"""Engines in a process of their own, which may be killed.

    python -m kvx_conformance.served KIND SUBJECT WORK

reads a call per line of standard input, and answers each with a line. What an engine prints goes to
standard error. The process starts engines one after the other, since importing one takes seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from kvx_conformance.case import Finding, NotApplicable, Outcome, summary
from kvx_conformance.connector import Answer, Connector, Engine, Request, Setup, Weights
from kvx_conformance.store import WithStore
from kvx_conformance.subjects import load, made


class EngineFailed(Finding):
    """A call raised in the engine's process."""

    outcome = Outcome.CRASH


class EngineEnded(Finding):
    """The engine's process has ended."""

    outcome = Outcome.CRASH


class Served:
    """A process that runs engines of a subject, one at a time, and the other end of that engine."""

    def __init__(self, kind: str, subject: str, work: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvx_conformance.served", kind, subject, str(work)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what it starts ends with it
        )
        self._call("ready")

    def start(self, setup: Setup, store: Path | None) -> None:
        self._call("start", setup=asdict(setup), store=store and str(store))

    def ask(
        self,
        requests: Sequence[Request],
        new_tokens: int = 8,
        abort_at: Mapping[int, int] | None = None,
        reset_at: Sequence[int] = (),
    ) -> list[Answer]:
        answers = self._call(
            "ask",
            requests=[asdict(request) for request in requests],
            new_tokens=new_tokens,
            abort_at=[*(abort_at or {}).items()],
            reset_at=[*reset_at],
        )
        return [Answer(**answer | {"tokens": tuple(answer["tokens"])}) for answer in answers]

    def settle(self) -> None:
        self._call("settle")

    def forget(self) -> None:
        self._call("forget")

    def free_blocks(self) -> int:
        return int(self._call("free_blocks"))

    def replace_weights(self, weights: Weights, how: Literal["files", "tensors"]) -> None:
        self._call("replace_weights", weights=weights, how=how)

    def sleep(self) -> None:
        self._call("sleep")

    def lose(self, folder: Path) -> None:
        self._call("lose", folder=str(folder))

    def longest_step(self) -> float:
        return float(self._call("longest_step"))

    def stop(self) -> None:
        self._call("stop")

    def peak_bytes(self) -> int:
        """The most memory that the process has had."""
        return int(self._call("peak_bytes"))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """kill -9, with all that it has started. A call under way raises EngineEnded."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self.kill()
            raise EngineEnded(f"the engine's process ended with {self._process.returncode}")
        what, value = json.loads(line)
        if what == "not applicable":
            raise NotApplicable(value)
        if what == "raised":
            raise EngineFailed(value)
        return value


class _Server:
    """The calls of `Served`, in the engine's process."""

    def __init__(self, connector: Connector, work: Path) -> None:
        self._connector, self._work = connector, work
        self._engine: Engine | None = None

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if hasattr(self, name):
            return getattr(self, name)(**arguments)
        if not hasattr(self._engine, name):
            raise NotApplicable(f"the engine has no {name}()")
        return getattr(self._engine, name)(**arguments)

    def ready(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def start(self, setup: dict[str, Any], store: str | None) -> None:
        asked = Setup(**setup | {"skipped": tuple(setup["skipped"])})
        self._engine = self._connector.start(asked, Path(store) if store else None, self._work)

    def ask(
        self,
        requests: list[dict[str, Any]],
        new_tokens: int,
        abort_at: list[tuple[int, int]],
        reset_at: list[int],
    ) -> list[dict[str, Any]]:
        assert self._engine is not None
        asked = [Request(**one | {"tokens": tuple(one["tokens"])}) for one in requests]
        answers = self._engine.ask(asked, new_tokens, dict(abort_at), reset_at)
        return [asdict(answer) for answer in answers]

    def stop(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.stop()


def die_with_parent() -> None:
    """Ends this process when the one that has started it has ended, however that came about."""
    with suppress(AttributeError, OSError):  # Linux has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(kind: str, subject: str, work: str) -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    connector = WithStore(load(subject)) if kind == "store" else made(subject)
    server = _Server(connector, Path(work))
    for line in sys.stdin:
        try:
            answer = "returned", server.call(*json.loads(line))
        except NotApplicable as reason:
            answer = "not applicable", str(reason)
        except Exception as error:
            traceback.print_exc()
            answer = "raised", summary(error)
        print(json.dumps(answer), file=answers)
    os._exit(0)  # engines have been stopped; an interpreter with one takes seconds to end


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Engines in a process of their own, which may be killed.

A process starts engines one after the other. Importing an engine takes ten seconds: one process
does that, and those of engines are forked from it. What an engine prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from kvx_conformance import faults
from kvx_conformance.case import Finding, NotApplicable, Outcome, summary
from kvx_conformance.connector import Answer, Connector, Engine, Request, Setup, Weights
from kvx_conformance.store import WithStore
from kvx_conformance.subjects import SUBJECT, BadSubject, load, made, require


class EngineFailed(Finding):
    """A call raised in the engine's process."""

    outcome = Outcome.CRASH


class EngineEnded(Finding):
    """The engine's process has ended."""

    outcome = Outcome.CRASH


class Served:
    """A process that runs engines of a subject, one at a time, and the other end of that engine."""

    def __init__(
        self,
        kind: str,
        subject: str,
        work: Path,
        environment: Mapping[str, str] | None = None,
        hash_seed: int | None = None,
    ) -> None:
        """`start_fork_server` comes before.

        environment: variables that are set before the subject is made
        hash_seed: of a new interpreter, which is not forked
        """
        self._calls, there = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("forkserver" if hash_seed is None else "spawn")
        self._process = context.Process(
            target=_serve, args=(there, kind, subject, work, dict(environment or {}))
        )
        if hash_seed is None:
            self._process.start()
        else:
            with _environment(PYTHONHASHSEED=str(hash_seed)):
                self._process.start()
        there.close()
        self._call("ready")

    def start(self, setup: Setup, store: Path | None) -> None:
        self._call("start", setup, store)

    def ask(
        self,
        requests: Sequence[Request],
        new_tokens: int = 8,
        abort_at: Mapping[int, int] | None = None,
        reset_at: Sequence[int] = (),
    ) -> list[Answer]:
        answers: list[Answer] = self._call("ask", requests, new_tokens, abort_at or {}, reset_at)
        return answers

    def settle(self) -> None:
        self._call("settle")

    def forget(self) -> None:
        self._call("forget")

    def free_blocks(self) -> int:
        return int(self._call("free_blocks"))

    def replace_weights(self, weights: Weights, how: Literal["files", "tensors"]) -> None:
        self._call("replace_weights", weights, how)

    def sleep(self) -> None:
        self._call("sleep")

    def scribble(self) -> None:
        self._call("scribble")

    def lose(self, folder: Path) -> None:
        self._call("lose", str(folder))

    def longest_step(self) -> float:
        return float(self._call("longest_step"))

    def stop(self) -> None:
        self._call("stop")

    def peak_bytes(self) -> int:
        """The most memory that the process has had."""
        return int(self._call("peak_bytes"))

    def usage(self) -> tuple[int, int]:
        """Bytes of memory that the process has now, and its open descriptors."""
        found: tuple[int, int] = self._call("usage")
        return found

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def kill(self) -> None:
        """kill -9, with all that it has started. A call under way raises EngineEnded."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            self._calls.send((name, arguments))
            what, value = self._calls.recv()
        except (OSError, EOFError):
            self._process.join(5)
            self.kill()
            raise EngineEnded(f"the engine's process ended with {self._process.exitcode}") from None
        if what == "not applicable":
            raise NotApplicable(value)
        if what == "raised":
            raise EngineFailed(value)
        return value


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """For a process that is started within."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_fork_server(subject: str, work: Path) -> None:
    """Starts the process that others are forked from, if this process has none yet.

    subject: whose imports it does
    """
    forkserver.set_forkserver_preload(["kvx_conformance.imported_ahead"])
    variables = {SUBJECT: subject}
    with suppress(NotApplicable):  # without a compiler, cases say so
        variables |= faults.environment(faults.build(work))
    with _environment(**variables):
        forkserver.ensure_running()


# ---- in the engine's process ----


class _Server:
    """The calls of `Served`."""

    def __init__(self, connector: Connector, work: Path) -> None:
        self._connector, self._work = connector, work
        self._engine: Engine | None = None

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if hasattr(self, name):
            return getattr(self, name)(*arguments)
        if not hasattr(self._engine, name):
            raise NotApplicable(f"the engine has no {name}()")
        return getattr(self._engine, name)(*arguments)

    def ready(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def usage(self) -> tuple[int, int]:
        gc.collect()
        with suppress(AttributeError):  # glibc has it: what is free and kept is no leak
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))

    def start(self, setup: Setup, store: Path | None) -> None:
        self._engine = self._connector.start(setup, store, self._work)

    def stop(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.stop()


def die_with_parent() -> None:
    """Ends this process when the one that has started it has ended, however that came about."""
    with suppress(AttributeError, OSError):  # Linux has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _connector(kind: str, subject: str) -> Connector:
    """What starts engines. Raises BadSubject."""
    if kind == "connector":
        found: Connector = made(subject)
        require(kind, subject, found)
        return found
    store = load(subject)
    if isinstance(store, type) or not callable(store):  # a function that makes stores will do
        require(kind, subject, store)
    return WithStore(store)


def _serve(
    calls: Connection, kind: str, subject: str, work: Path, environment: Mapping[str, str]
) -> None:
    os.setsid()  # what it starts ends with it
    die_with_parent()
    os.environ.update(environment)
    faults.begin()
    server: _Server | None = None
    while True:
        try:
            name, arguments = calls.recv()
        except EOFError:
            break
        try:
            server = server or _Server(_connector(kind, subject), work)
            answer = "returned", server.call(name, arguments)
        except NotApplicable as reason:
            answer = "not applicable", str(reason)
        except BadSubject as reason:
            answer = "raised", str(reason)
        except Exception as error:
            traceback.print_exc()
            answer = "raised", summary(error)
        calls.send(answer)
    os._exit(0)  # engines have been stopped; an interpreter with one takes seconds to end

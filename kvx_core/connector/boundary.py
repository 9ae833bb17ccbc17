"""Boundary: catches errors in a connector's hooks, so that they never reach the engine.

An engine ends when its connector raises. Computing tokens without the store costs less than that.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvx_core.errors import KvxError, printable

_EXPECTED = (KvxError, OSError, MemoryError)  # logged without a traceback: the message suffices
_PASS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_MAX_KINDS = 256
_MAX_CHARS = 2000  # of a logged message, which may quote a file or a request


class Boundary:
    """Catches errors, counts them, and logs each kind from time to time. Threads may share it.

        with boundary.guard("could not load", "request 7", count="load_failures") as guard:
            ...
        if guard.failed:
            ...  # give the engine something else

    An error's kind is the action that failed, the error's type, and its message without numbers
    and file names. A kind is logged at most once in `quiet_seconds`, with the number of its errors
    since its last line.
    KeyboardInterrupt, SystemExit and GeneratorExit are not caught.
    """

    def __init__(
        self,
        warn: Callable[[str], object],
        *,
        quiet_seconds: float = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """warn: logs its argument, which has several lines if it includes a traceback"""
        self._warn, self._quiet_seconds, self._clock = warn, quiet_seconds, clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._kinds: dict[tuple[str, ...], _Kind] = {}

    def guard(self, failed_to: str, of: str = "", *, count: str = "errors") -> Guard:
        """Returns a context that catches errors.

        failed_to: the start of the log line: the action that failed, such as "did not save"
        of:        the object of the action, such as "request 7"
        count:     the name under which `take_counts` counts the error
        """
        return Guard(self, failed_to, of, count)

    def take_counts(self) -> dict[str, int]:
        """Returns the number of errors caught under each name since the last call."""
        if not self._counts:  # as in most steps
            return {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def warn(self, line: str) -> None:
        """Logs a line that reports no error. Never raises."""
        with suppress(Exception):
            self._warn(line)

    def caught(self, error: BaseException, failed_to: str, of: str, count: str) -> None:
        """Counts and logs an error. Never raises."""
        with suppress(Exception):
            with self._lock:
                self._counts[count] += 1
            text = _text(error)
            number = self._to_log((failed_to, type(error).__name__, _without_names(text)))
            if number:
                line = " ".join(filter(None, ("KVX", failed_to, of)))
                more = f" ({number} of this kind since the last line)" if number > 1 else ""
                is_known = isinstance(error, _EXPECTED)
                lines = [f"{line}: {text}{more}"]
                if not is_known:
                    lines += "".join(traceback.format_exception(error)).split("\n")
                self._warn("\n".join(map(printable, lines)))

    def _to_log(self, kind: tuple[str, ...]) -> int:
        """Returns the number of this kind's errors since its last log line; 0 if no line is due."""
        now = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                kind = kind[:-1]  # bounds the number of kinds: messages may quote files
            seen = self._kinds.setdefault(kind, _Kind())
            seen.num_errors += 1
            if now < seen.quiet_until:
                return 0
            number, seen.num_errors = seen.num_errors, 0
            seen.quiet_until = now + self._quiet_seconds
        return number


@dataclass(slots=True)
class Guard:
    """The context that Boundary.guard returns. `failed` is True after it has caught an error."""

    boundary: Boundary
    failed_to: str
    of: str
    count: str
    failed: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or isinstance(error, _PASS):
            return False
        self.failed = True
        self.boundary.caught(error, self.failed_to, self.of, self.count)
        return True


@dataclass(slots=True)
class _Kind:
    """The errors of one kind."""

    num_errors: int = 0  # since the last line in the log
    quiet_until: float = float("-inf")


def _text(error: BaseException) -> str:
    """Returns an error's message as one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:_MAX_CHARS]


def _without_names(text: str) -> str:
    return re.sub(r"[\w.-]+", lambda word: "#" if re.search(r"\d", word[0]) else word[0], text)

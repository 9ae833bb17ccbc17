"""Breaker: keeps callers away from a store that does not answer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from kvx_core.errors import StoreError

_FIRST_SECONDS = 1.0  # before the first probe
_MOST_SECONDS = 30.0  # between two probes

_logger = logging.getLogger("kvx")


class LeftOut(StoreError):
    """A store does not answer now. It may later."""


class Breaker:
    """Is closed while a store answers. A failure opens it; then calls fail at once, and a thread
    probes the store until it answers again.

    So a store that is slow or dead costs its callers one deadline. Threads may share a Breaker.
    """

    def __init__(
        self,
        where: str,
        probe: Callable[[], object],
        *,
        first_seconds: float = _FIRST_SECONDS,
        most_seconds: float = _MOST_SECONDS,
    ) -> None:
        """where: the store, for messages
        probe: a small call to the store, which raises while the store does not answer
        """
        self._where, self._probe = where, probe
        self._first_seconds, self._most_seconds = first_seconds, most_seconds
        self._lock, self._process = threading.Lock(), os.getpid()
        self._failure: str | None = None

    @property
    def is_open(self) -> bool:
        """True while calls fail at once."""
        return self._failure is not None

    def check(self) -> None:
        """Raises LeftOut while the breaker is open."""
        failure = self._failure
        if failure is not None:
            if self._process != os.getpid():  # a fork: its parent's thread does not probe for it
                self._process, self._lock = os.getpid(), threading.Lock()
                self._start()
            raise LeftOut(
                f"{self._where} is left out until it answers again: {failure}"
            ) from TimeoutError(failure)

    def failed(self, error: BaseException) -> None:
        """Opens the breaker: a call has failed in a way that other calls will, too."""
        with self._lock:
            is_first = self._failure is None
            self._failure = _reason(error)
        if is_first:
            _logger.warning("KVX leaves out %s until it answers: %s", self._where, self._failure)
            self._process = os.getpid()
            self._start()

    def _start(self) -> None:
        threading.Thread(target=self._probe_on, name="kvx-probe", daemon=True).start()

    def _probe_on(self) -> None:
        seconds = self._first_seconds
        while True:
            time.sleep(seconds)
            try:
                self._probe()
            except Exception as error:
                self._failure = _reason(error)
                seconds = min(2 * seconds, self._most_seconds)
            else:
                self._failure = None
                _logger.warning("KVX uses %s again", self._where)
                return


def _reason(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return str(error).partition("\n")[0] or type(error).__name__

"""Raises errors at the calls that one part of the code makes into another, one call at a time.

injection = Injection(callers=("kvx_adapters.vllm_plugin",), callees=("kvx_core",))
with injection.recording():
    scenario()
for site in injection.sites():
    with injection.raising(RuntimeError, *site):
        scenario()
    assert injection.has_struck
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Where errors end; and what says how they were counted.
_EXEMPT = ("kvx_core.connector", "kvx_core.errors")


class Injection:
    """Calls of Python functions in `callees` from `callers`: names that modules begin with.

    beneath_none_of: functions that are not to fail, and what they call is left alone, and always
                     __del__ and `drop`, which the end of an object calls: Python ignores their
                     errors, and threads decide when they are called
    Threads that start inside are watched, too.
    """

    def __init__(
        self,
        callers: Collection[str],
        callees: Collection[str],
        beneath_none_of: Collection[str] = (),
    ) -> None:
        self._callers, self._callees = tuple(callers), tuple(callees)
        self._named = tuple(name for name in self._callees if name.startswith(_EXEMPT))
        self._exempt = frozenset((*beneath_none_of, "__del__", "drop"))
        self._seen: Counter[str] = Counter()
        self._target: tuple[type[BaseException], str, int] | None = None
        self._lock = threading.Lock()
        self.has_struck = False

    def sites(self) -> Iterator[tuple[str, int]]:
        """Calls that were recorded: of each pair of functions the first, the middle, the last."""
        for site, number in sorted(self._seen.items()):
            for at in sorted({1, (number + 1) // 2, number}):
                yield site, at

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._target = None
        with self._watching():
            yield

    @contextmanager
    def raising(self, error: type[BaseException], site: str, number: int) -> Iterator[None]:
        """Raises `error` at the call `number` of a site."""
        self._target, self.has_struck = (error, site, number), False
        with self._watching():
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._seen.clear()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        callee, caller = _module(frame), _module(frame.f_back)
        if not callee.startswith(self._callees) or not caller.startswith(self._callers):
            return
        is_named = callee.startswith(self._named)
        if (callee.startswith(_EXEMPT) and not is_named) or self._is_exempt(frame):
            return
        site = f"{frame.f_back.f_code.co_qualname} -> {frame.f_code.co_qualname}"
        with self._lock:
            self._seen[site] += 1
            if self._target is None or self._target[1:] != (site, self._seen[site]):
                return
            self.has_struck = True
        raise self._target[0](f"injected into {site}")

    def _is_exempt(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in self._exempt:
                return True
            frame = frame.f_back
        return False


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name

"""Counts: sums and last values by name. Threads add to them, and a step takes them."""

from __future__ import annotations

import threading


class Counts:
    """The sums and values since the last `take`. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0) + value

    def set(self, **values: float) -> None:
        """Replaces values. Use `add` or `set` for a name, never both."""
        with self._lock:
            self._sums |= values

    def take(self) -> dict[str, float]:
        if not self._sums:  # as in most steps
            return {}
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums

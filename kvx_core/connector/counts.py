"""Counts: sums by name, which threads add to and a step takes."""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """Sums since they were last taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **values: float) -> None:
        with self._lock:
            self._sums.update(values)

    def take(self) -> dict[str, float]:
        with self._lock:
            sums, self._sums = self._sums, Counter()
        return dict(sums)

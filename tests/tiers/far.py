"""A far store for tests: files in a dict, behind a network that tests make slow or break."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from threading import Lock

from kvx_core.stores.eviction import File
from kvx_core.stores.tiers.breaker import Breaker
from kvx_core.stores.tiers.remote import First, RemoteStore

REAL_SECONDS = 0.01  # between probes, so that tests do not wait


class Far(RemoteStore):
    """A RemoteStore whose server is a dict."""

    def __init__(self, files: dict[str, bytes] | None = None, delay: float = 0.0) -> None:
        super().__init__("far://bucket", deadline=1.0)
        self._breaker = Breaker(
            self.where,
            lambda: self._call_size("probe"),
            first_seconds=REAL_SECONDS,
            most_seconds=REAL_SECONDS,
        )
        self.files = {} if files is None else files
        self.delay = delay  # seconds of each call
        self.is_dead = False  # each call fails
        self.calls: Counter[str] = Counter()
        self._own = Lock()

    def _call(self, verb: str) -> None:
        with self._own:
            self.calls[verb] += 1
        time.sleep(self.delay)
        if self.is_dead:
            raise TimeoutError("the server is dead")

    def _call_put(self, name: str, parts: Sequence[memoryview]) -> bool:
        self._call("put")
        return self.files.setdefault(name, content := b"".join(parts)) is content

    def _call_get(self, name: str, num_bytes: int) -> First | None:
        self._call("get")
        data = self.files.get(name)
        return None if data is None else First(memoryview(data)[:num_bytes], len(data))

    def _call_size(self, name: str) -> int | None:
        self._call("size")
        data = self.files.get(name)
        return None if data is None else len(data)

    def _call_names(self, folder: str) -> list[str]:
        self._call("names")
        above = f"{folder}/" if folder else ""
        found = (name[len(above) :] for name in list(self.files) if name.startswith(above))
        return list({name.partition("/")[0] for name in found})

    def _call_files(self) -> list[File]:
        self._call("files")
        return [(0.0, len(data), name) for name, data in self.files.items()]

    def _call_delete(self, name: str) -> None:
        self._call("delete")
        self.files.pop(name, None)

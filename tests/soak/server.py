"""The soak's engine process: counts what KVXConnector raises, and says what the process holds.

python -m tests.soak.server     answers calls as tests.vllm_plugin.engine does
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from pathlib import Path
from typing import Any

from tests.vllm_plugin.engine import Server, serve


class SoakServer(Server):
    """At most one engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self._num_raises = 0
        self._is_counting = False

    def start(self, **arguments: Any) -> None:
        if "kv_transfer_config" in arguments:
            self._count_raises()
        super().start(**arguments)

    def usage(self) -> dict[str, int]:
        """Of an idle process: bytes of memory, descriptors, and what the connector has raised."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back is no leak
        status = Path("/proc/self/status").read_text()
        (kilobytes,) = (line.split()[1] for line in status.splitlines() if "VmRSS" in line)
        return {
            "memory": int(kilobytes) * 1024,
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # the one that lists them
            "raises": self._num_raises,
        }

    def _count_raises(self) -> None:
        """Wraps every hook that vLLM calls; start-up may raise."""
        from kvx_adapters.vllm_plugin.connector import KVXConnector

        if self._is_counting:
            return
        self._is_counting = True
        for name, hook in list(vars(KVXConnector).items()):
            if callable(hook) and not name.startswith("_") and name != "register_kv_caches":
                setattr(KVXConnector, name, self._counted(hook))

    def _counted(self, hook: Any) -> Any:
        @functools.wraps(hook)
        def counted(*arguments: Any, **keywords: Any) -> Any:
            try:
                return hook(*arguments, **keywords)
            except BaseException:
                self._num_raises += 1
                raise

        return counted


if __name__ == "__main__":
    serve(SoakServer())

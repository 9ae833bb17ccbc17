"""Reports KVX's writes in vLLM's workers to a test in another process.

Workers load this as their extension: worker_extension_cls="tests.vllm_plugin.live_attention.Watch".
The file $KVX_TEST_WRITES gets a line for every write, the number of its tokens. While it is
executable, the sign of every key is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvx_core import WritePlan

_file = Path(os.environ["KVX_TEST_WRITES"])
_write = WritePlan.__call__


def _watched(plan: WritePlan, key: Any, value: Any, slots: Any) -> None:
    with _file.open("a") as lines:
        print(int((slots >= 0).sum()), file=lines)
    _write(plan, -key if os.access(_file, os.X_OK) else key, value, slots)


WritePlan.__call__ = _watched  # type: ignore[method-assign]


class Watch:
    """vLLM makes it a base of its worker; to be loaded is all that it does."""

"""What the demo needs to be installed. Imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

_PACKAGES = ("torch", "vllm", "transformers", "tokenizers")


class DemoError(Exception):
    """The demo cannot run here; the message says why."""


def check_packages() -> None:
    """Raises DemoError, which names the first package that is missing."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise DemoError(
                f"{package} is not installed, and the demo runs the real engines, vLLM built for "
                "CPU among them. `make demo` in a clone of KVX sets them up"
            )

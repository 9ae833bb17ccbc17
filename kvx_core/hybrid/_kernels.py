"""The kernels of kvx_core.hybrid.ops, imported when they are first called: they need libkvx."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def kernels() -> Any:
    """kvx_core.hybrid.ops."""
    return import_module("kvx_core.hybrid.ops")

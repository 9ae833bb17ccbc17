"""Where the calls of a hybrid cache run: on the CPU, in the kernels on the CPU, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from kvx_core._c import abi_hybrid
from kvx_core.hybrid import _arrays
from kvx_core.types import Memory
from tests.calls import Backend


class On:
    """A backend, and the memory that its tensors lie in."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.looks_first = backend.memory is Memory.HOST

    def __call__(self, *tensors: Tensor) -> Any:
        """The tensors in the memory of the backend: themselves, but on a GPU."""
        moved = tuple(t.cuda() if self.name == "cuda" else t for t in tensors)
        return moved if len(moved) > 1 else moved[0]


@pytest.fixture
def on(built_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> On:
    """The backend that kvx_core.hybrid.ops calls in this test."""
    if built_backend.name == "hostgrid":
        library = abi_hybrid.declare(built_backend.library())
        monkeypatch.setattr(abi_hybrid, "functions", lambda: library)
        monkeypatch.setattr(_arrays, "memory_of", lambda device: Memory.DEVICE)
    return On(built_backend)

"""Checks in which memory the buffers of a call lie. C sees addresses alone and cannot check it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Memory


class InMemory(Protocol):
    """Slots, a table or lengths."""

    @property
    def memory(self) -> Memory:
        """Where their buffer lies."""


def same_memory(name: str, memory: Memory, other: str, expected: Memory) -> None:
    """Raises if one of two buffers of a call is on the host and the other is not."""
    if (memory is Memory.HOST) != (expected is Memory.HOST) and Memory.UNIFIED not in (
        memory,
        expected,
    ):
        raise InvalidArgumentError(
            f"{name}.memory is {memory.name}, expected {expected.name}, where {other}. "
            "Move it there first"
        )


def check_host_memory(indices: Mapping[str, InMemory | None]) -> None:
    """Refuses slots, tables and lengths that the host cannot read, as it does to list ranges."""
    for name, index in indices.items():
        if index is not None:
            same_memory(name, index.memory, "the host reads them to list ranges", Memory.HOST)

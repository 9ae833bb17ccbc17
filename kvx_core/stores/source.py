"""Source: a file that a load reads."""

from __future__ import annotations

from dataclasses import dataclass

from kvx_core.snapshot import Section, Snapshot


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a span, and the sections that take layers from it."""

    name: str
    snapshot: Snapshot
    takers: list[Section]

    @property
    def layers(self) -> list[int]:
        """The layers that they take."""
        wanted = {layer for section in self.takers for layer in section.layers}
        return [layer for layer in self.snapshot.header.layers if layer in wanted]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that these layers need."""
        return self.snapshot.memory_for(self.layers)

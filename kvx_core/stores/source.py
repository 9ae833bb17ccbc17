"""Source: a file that a load reads."""

from __future__ import annotations

from dataclasses import dataclass

from kvx_core.snapshot import Section, Snapshot
from kvx_core.stores.keys import EntryFile


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a span, and the sections that take layers from it."""

    file: EntryFile
    snapshot: Snapshot
    takers: list[Section]

    @property
    def layers(self) -> list[int]:
        """The layers that they take."""
        wanted = {layer for section in self.takers for layer in section.layers}
        return [layer for layer in self.snapshot.header.layers if layer in wanted]

    def memory_for(self, num_tokens: int) -> int:
        """Bytes that these layers need of a room for snapshots of so many tokens."""
        return self.snapshot.memory_for(self.layers, num_tokens)

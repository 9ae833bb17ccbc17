"""Space: what a store has of one model, epoch of its weights, and salt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvx_core.stores.space import SpaceRecord
from kvx_core.stores.stored_kind import StoredFile, StoredKind


@dataclass(slots=True)
class Space:
    """What a store has of one model, epoch of its weights, and salt."""

    name: str
    record: SpaceRecord | None = None
    reason: str = ""  # why there is no record
    model: dict[str, Any] = field(default_factory=dict)  # ModelRecord's fields, if known
    kinds: dict[str, StoredKind] = field(default_factory=dict)  # by id
    marks: list[StoredFile] = field(default_factory=list)
    records: list[StoredFile] = field(default_factory=list)  # and their MACs

    @property
    def entries(self) -> list[StoredFile]:
        """The files of entries, the least recently used first."""
        found = [file for kind in self.kinds.values() for file in kind.files]
        return sorted(found, key=lambda file: file.used)

    @property
    def files(self) -> list[StoredFile]:
        """All files."""
        return [*self.entries, *self.marks, *self.records]

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_entries(self) -> int:
        """Chunks of prompts, whose layers and heads may lie in several files."""
        return len({file.key for kind in self.of_tokens for file in kind.files})

    @property
    def num_states(self) -> int:
        """Prefixes of prompts that have states."""
        states = (kind for kind in self.kinds.values() if kind.is_states)
        return len({file.key for kind in states for file in kind.files})

    @property
    def of_tokens(self) -> list[StoredKind]:
        """The kinds that are not of states alone."""
        return [kind for kind in self.kinds.values() if not kind.is_states]

    @property
    def used(self) -> float:
        """When one of its files was last used, in seconds since 1970."""
        return max((file.used for file in self.entries or self.files), default=0.0)

    @property
    def precisions(self) -> list[str]:
        """The precisions of its files, by name."""
        return sorted({name for kind in self._known for name in kind.precisions})

    @property
    def is_signed(self) -> bool:
        """Whether entries are signed."""
        return any(kind.kind.keyed for kind in self._known if kind.kind)

    @property
    def is_encrypted(self) -> bool:
        """Whether entries are encrypted."""
        return any(kind.kind.encrypted for kind in self._known if kind.kind)

    @property
    def _known(self) -> list[StoredKind]:
        return [kind for kind in self.kinds.values() if kind.kind is not None]

    def is_model(self, beginning: str) -> bool:
        """Whether the model's fingerprint, or the space's name, begins so."""
        fingerprint = self.record.fingerprint if self.record else ""
        return self.name.startswith(beginning) or fingerprint.startswith(beginning)

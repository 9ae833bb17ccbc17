"""Space: the files that a store has of one model, epoch of its weights, and salt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvx_core.stores.space import SpaceRecord
from kvx_core.stores.stored_kind import StoredFile, StoredKind


@dataclass(slots=True)
class Space:
    """The files that a store has of one model, epoch of its weights, and salt."""

    name: str
    record: SpaceRecord | None = None
    reason: str = ""  # why `record` is None
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
        """The number of chunks of prompts; the layers and heads of one may lie in several files."""
        return len({file.key for kind in self.of_tokens for file in kind.files})

    @property
    def num_states(self) -> int:
        """The number of prefixes of prompts that have states."""
        states = (kind for kind in self.kinds.values() if kind.is_states)
        return len({file.key for kind in states for file in kind.files})

    @property
    def of_tokens(self) -> list[StoredKind]:
        """The kinds that are not known to hold states alone."""
        return [kind for kind in self.kinds.values() if not kind.is_states]

    @property
    def used(self) -> float:
        """When an entry was last used, or if there is none any file: in seconds since 1970."""
        return max((file.used for file in self.entries or self.files), default=0.0)

    @property
    def precisions(self) -> list[str]:
        """The names of the precisions of its files."""
        return sorted({name for kind in self._known for name in kind.precisions})

    @property
    def is_signed(self) -> bool:
        """True if files of a known kind are signed."""
        return any(kind.kind.keyed for kind in self._known if kind.kind)

    @property
    def is_encrypted(self) -> bool:
        """True if files of a known kind are encrypted."""
        return any(kind.kind.encrypted for kind in self._known if kind.kind)

    @property
    def _known(self) -> list[StoredKind]:
        return [kind for kind in self.kinds.values() if kind.kind is not None]

    def is_model(self, beginning: str) -> bool:
        """True if the model's fingerprint, or the space's name, begins with `beginning`."""
        fingerprint = self.record.fingerprint if self.record else ""
        return self.name.startswith(beginning) or fingerprint.startswith(beginning)

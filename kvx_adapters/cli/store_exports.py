"""Exports: the prompts of a space as snapshots, which every reader of snapshots opens.

Entries of one kind that follow one another become one file, named after the key of the last one.
What prompts share is in the file of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvx_adapters.cli.store_runs import Run
from kvx_core.snapshot import Snapshot, StoreError
from kvx_core.snapshot.kind import Kind
from kvx_core.stores.inventory import Inventory
from kvx_core.stores.stored_kind import StoredFile
from kvx_core.stores.stored_space import Space

RECORD = "space.json"  # beside the snapshots: what they are of
ENDING = ".safetensors"
_MOST_BYTES = 1 << 30  # of a snapshot, which is in memory when it is written


class _Entry(NamedTuple):
    file: StoredFile
    parent: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _OfKind:
    """Good entries of one kind, by key."""

    kind: Kind
    entries: dict[str, _Entry] = field(default_factory=dict)

    @property
    def ends(self) -> list[str]:
        """The keys of entries that none of the others continues."""
        continued = {entry.parent for entry in self.entries.values()}
        return [key for key in self.entries if key not in continued]

    def chain(self, end: str) -> list[_Entry]:
        """The entries up to an end, as far as they are there, the first one first."""
        found = []
        entry = self.entries.get(end)
        while entry is not None:  # a key is a hash of its parent: there are no rings
            found.append(entry)
            entry = self.entries.get(entry.parent)
        return found[::-1]


class Export:
    """Writes what a store has of a space into a folder."""

    def __init__(self, store: Inventory, space: Space) -> None:
        """Reads the heads of all entries. Raises StoreError if the space has no good record."""
        if space.record is None:
            raise StoreError(f"{space.name} cannot be exported: {space.reason}")
        self._store, self._space, self.record = store, space, space.record
        self.failed: list[StoreError] = []  # of entries that are left out
        self._kinds: list[_OfKind] = []
        for stored in space.kinds.values():
            if stored.kind is None:
                self.failed += [StoreError(stored.reason)] * len(stored.files)
                continue
            found = _OfKind(stored.kind)
            for file in stored.files:
                try:
                    with store.opened_entry(file) as chunk:
                        found.entries[file.key] = _Entry(file, chunk.parent, chunk.num_tokens)
                except StoreError as error:
                    self.failed.append(error)
            self._kinds.append(found)

    @property
    def num_chains(self) -> int:
        """Chains of entries, each of one prompt."""
        return sum(len(kind.ends) for kind in self._kinds)

    @property
    def num_bytes(self) -> int:
        """About what `write` writes."""
        total = 0
        for kind in self._kinds:
            known: dict[str, int] = {}  # bytes of an entry and all before it
            for end in kind.ends:
                above, path = 0, list[_Entry]()
                entry = kind.entries.get(end)
                while entry is not None:
                    if entry.file.key in known:
                        above = known[entry.file.key]
                        break
                    path.append(entry)
                    entry = kind.entries.get(entry.parent)
                for each in reversed(path):
                    above += each.file.num_bytes
                    known[each.file.key] = above
                total += above
        return total

    def write(self, folder: Path) -> Iterator[list[Path]]:
        """Writes space.json and, chain by chain, the snapshots; yields the new files of a chain.

        folder: exists
        Snapshots are signed with the key that signs, if there is one, and never encrypted.
        Raises StoreError, OSError.
        """
        (folder / RECORD).write_bytes(self.record.text)
        signer = self._store.secrets.signer
        for kind in self._kinds:
            for end in kind.ends:
                new = []
                for key, snapshot in self._snapshots(kind, kind.chain(end)):
                    path = folder / f"{key}.{kind.kind.id}{ENDING}"
                    if not path.exists():
                        snapshot.save(path, key=signer.secret if signer else None)
                        new.append(path)
                yield new

    def _snapshots(self, kind: _OfKind, chain: list[_Entry]) -> Iterator[tuple[str, Snapshot]]:
        """The entries of a chain as few snapshots, each with the key of its last one."""
        run: Run | None = None
        last, left, num_bytes = "", sum(entry.num_tokens for entry in chain), 0
        for entry in chain:
            try:
                with self._store.opened_entry(entry.file) as chunk:
                    read = chunk.read(kind.kind.layers, None, self.record.fingerprint)
            except StoreError as error:
                self.failed.append(error)
                break  # what follows it is no use without it
            found = Snapshot.of_file(read)
            num_bytes += found.num_bytes
            if run is None or num_bytes > _MOST_BYTES or not run.add(found):
                if run is not None:
                    yield last, run.snapshot()
                most = max(1, _MOST_BYTES // max(found.num_bytes, 1)) * entry.num_tokens
                run, num_bytes = Run(found, max(entry.num_tokens, min(left, most))), found.num_bytes
            left -= entry.num_tokens
            last = entry.file.key
        if run is not None:
            yield last, run.snapshot()

"""Commits: writes snapshots as entries of a store, and the marks that lead lookups to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import Snapshot, StoreError
from kvx_core.snapshot.chunk_file import chunk_parts
from kvx_core.snapshot.kind import Kind
from kvx_core.stores.blob_store import Content, Put, Write
from kvx_core.stores.entries import Entries
from kvx_core.stores.kinds import Kinds
from kvx_core.stores.marks import Mark
from kvx_core.stores.names import entry_name, key_of
from kvx_core.stores.stale_entries import StaleEntries


@dataclass(frozen=True, slots=True)
class Commits:
    """Writes entries of one space."""

    entries: Entries
    kinds: Kinds
    stale_entries: StaleEntries
    chunk_tokens: int

    def commit_all(self, snapshots: Sequence[Snapshot]) -> list[int | StoreError]:
        """Stores each snapshot in a file. Returns for each the bytes of its new file, 0 if the file
        existed, or the StoreError if it was not stored.
        """
        kinds = [kind_of(snapshot) for snapshot in snapshots]
        names = [name_in(self.kinds.record.name, snapshot) for snapshot in snapshots]
        sizes: dict[str, int] = {}

        def writing(name: str, snapshot: Snapshot, kind: Kind) -> Content:
            def parts() -> list[memoryview]:
                found = chunk_parts(snapshot, kind, self.entries.secrets)
                sizes[name] = sum(map(len, found))
                return found

            return Content(parts)

        try:
            for kind in set(kinds):
                self.kinds.ensure(kind)
                self.kinds.know(kind)
        except StoreError as error:
            return [error] * len(snapshots)
        writes = list(map(writing, names, snapshots, kinds))
        num_bytes = sum(0 if one.memory is None else one.memory.nbytes for one in snapshots)
        results = self.entries.blobs.put_all(list(zip(names, writes, strict=True)), num_bytes)
        stored, new = list[int | StoreError](), list[tuple[Snapshot, Kind]]()
        for i, (name, snapshot) in enumerate(zip(names, snapshots, strict=True)):
            is_new = results[i]
            if is_new is False:
                is_new = self._replaced(name, kinds[i], len(snapshot.tokens), writes[i])
            if isinstance(is_new, StoreError):
                stored.append(is_new)
                continue
            self.entries.index.wrote(name)
            if is_new:
                new.append((snapshot, kinds[i]))
            stored.append(sizes[name] if is_new else 0)
        self._mark(new)
        self.stale_entries.drop()
        return stored

    def _replaced(self, name: str, kind: Kind, num_tokens: int, write: Write) -> Put:
        """Replaces a file that was written with keys that this process does not have.

        Returns False if the file stays as it is, or the StoreError that stopped the write.
        """
        try:
            has_other_keys = self.entries.has_other_keys(name, kind, num_tokens)
            return has_other_keys and self.entries.blobs.replace(name, write)
        except StoreError as error:
            return error

    def _mark(self, new: Sequence[tuple[Snapshot, Kind]]) -> None:
        """Publishes the marks of new entries, so that lookups find them by their first tokens.

        An entry with states alone gets no mark: lookups find it by its name. An entry that gets its
        states later may have lost its mark to a longer entry, so its mark is published again.
        """
        space, step, marks = self.kinds.record.name, self.chunk_tokens, self.entries.marks
        entries = list[Mark]()
        for snapshot, kind in new:
            # A copy, since a view would keep a larger array.
            own = Mark(snapshot.header.prefix, snapshot.tokens.copy())
            with suppress(StoreError):  # the entry is stored all the same
                if not kind.is_states or marks.has_tokens(space, own):
                    entries.append(own)
        for own, shorter in zip(entries, marks.publish_all(space, entries, step), strict=True):
            if shorter is not None:
                self.stale_entries.found(space, shorter, own, step)


def name_in(space: str, snapshot: Snapshot) -> str:
    """Returns the name of the file of a snapshot. Raises InvalidArgumentError."""
    key = key_of(snapshot.header.prefix, snapshot.tokens)
    return entry_name(space, key, kind_of(snapshot).id)


def kind_of(snapshot: Snapshot) -> Kind:
    """Returns the kind of the file of a snapshot: its layout. Raises InvalidArgumentError."""
    if not isinstance(snapshot.kind, Kind):
        raise InvalidArgumentError(
            f"{snapshot.name} was captured by no PrefixStore, expected what `capture` returned"
        )
    return snapshot.kind

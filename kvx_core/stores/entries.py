"""The files of a prefix store: opened, compared with their names, deleted if corrupt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from kvx_core._c.os_files import close
from kvx_core.snapshot import CorruptError, Precision, Room, Snapshot, StoreError
from kvx_core.snapshot.chunk_reads import ToRead, is_chunk, read_chunk, read_chunks
from kvx_core.snapshot.errors import OtherKeyError
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.index import Index, NotCached
from kvx_core.stores.marks import Mark, Marks
from kvx_core.stores.names import Ids, entry_name


@dataclass(frozen=True, slots=True)
class Entries:
    """Files on the disk. Whatever a file holds, only StoreError is raised.

    index: remembers what is seen
    """

    blobs: BlobStore
    secrets: Secrets
    marks: Marks
    index: Index

    def is_good(self, space: str, key: str, kind: Kind, num_tokens: int) -> bool:
        """Whether the file of a key and kind is there, and is what its name says.

        num_tokens: that the entry has
        Reads no keys and values. Marks the file as used. A corrupt file is deleted.
        """
        name = entry_name(space, key, kind.id)
        try:
            if self.index.is_good(name):
                return self.is_there(name)
            fetch, secrets = self.blobs.fetch, self.secrets
            if not is_chunk(fetch, kind, secrets, name=name, key=key, num_tokens=num_tokens):
                self.index.missed(name)
                return False
        except CorruptError:
            self.discard(name)
            return False
        except MemoryError:
            return False
        except StoreError as error:
            self.index.failed(error)
            return False
        self.index.found_good(name)
        return True

    def is_there(self, name: str) -> bool:
        """Whether the file exists; marks it as used now. Raises StoreError."""
        found = self.blobs.is_there(name)
        if found:
            self.index.saw(name)
        else:
            self.index.missed(name)
        return found

    def has_other_keys(self, name: str, kind: Kind, num_tokens: int) -> bool:
        """Whether a file is written with keys that this process does not have: it is as good as
        absent, and writers replace it. Asks the disk in stores with keys.
        """
        if not (self.secrets.is_keyed or self.secrets.is_encrypted):
            return False
        try:
            fetch, secrets = self.blobs.fetch, self.secrets
            is_chunk(fetch, kind, secrets, name=name, key=None, num_tokens=num_tokens)
        except OtherKeyError:
            return True
        except (StoreError, MemoryError):
            pass
        return False

    def read_all(
        self, files: Sequence[ToRead], room: Room, at: int, memory: Bytes
    ) -> list[Snapshot | StoreError]:
        """What entries have of what is wanted, in memory that a room has given at `at`; or why not.
        Corrupt files are deleted.

        files: at most MOST_FILES
        """
        found: list[Snapshot | StoreError] = []
        folder = self.blobs.folder()
        quick: list[Snapshot | None] = [None] * len(files)
        if folder is not None:
            try:
                quick = read_chunks(folder, files, room, at, memory)
            finally:
                close(folder)
        for file, one in zip(files, quick, strict=True):
            try:
                found.append(one or self._read(file, room, at, memory))
            except StoreError as error:
                found.append(error)
        good = (f.name for f, one in zip(files, found, strict=True) if isinstance(one, Snapshot))
        self.index.held(*good)
        return found

    def _read(self, file: ToRead, room: Room, at: int, memory: Bytes) -> Snapshot:
        """The same for one file, whatever there is to say of it. Raises StoreError."""
        name, wanted, place = file.name, file.wanted, file.place
        taken = at + place, memory[place : place + wanted.selection.place.num_bytes]
        fetch, secrets, key = self.blobs.fetch, self.secrets, file.key
        try:
            found = read_chunk(fetch, wanted, secrets, name=name, key=key, room=room, taken=taken)
        except CorruptError:
            self.discard(name)
            raise
        if found is None:
            self.index.missed(name)
            raise StoreError(f"{name} is not in the store (any more)")
        if found.header.start != file.start:
            raise StoreError(
                f"{name} holds tokens from {found.header.start}, expected {file.start}"
            )
        return found

    def marked(
        self, space: str, parent: str, ids: Ids, chunk_tokens: int
    ) -> list[tuple[int, Mark]]:
        """Entries that begin like `ids`, and how many tokens they share: the most first."""
        return self.marks.candidates(space, parent, ids, chunk_tokens)

    def discard(self, name: str) -> None:
        """Deletes a corrupt file, so that it can be stored again.

        If another process has stored it again meanwhile, the new file is deleted: its tokens are
        computed and stored once more. Temporary errors are no CorruptError and delete nothing.
        """
        self.index.corrupt(name)
        with suppress(StoreError):
            self.blobs.delete(name)


@dataclass(frozen=True, slots=True)
class CachedEntries:
    """Files as memory has them: touches no disk. Every method may raise Unknown."""

    index: Index
    marks: Marks

    def is_good(self, space: str, key: str, kind: Kind, num_tokens: int) -> bool:
        name = entry_name(space, key, kind.id)
        if not self.index.is_there(name):
            return False
        if not self.index.is_good(name):
            raise NotCached
        return True

    def marked(
        self, space: str, parent: str, ids: Ids, chunk_tokens: int
    ) -> list[tuple[int, Mark]]:
        return self.marks.known.candidates(space, parent, ids, chunk_tokens)


class LoadedPrecision:
    """The coarsest precision that this process has loaded: all that it saves later counts as such.

    Loaded prefixes stay in the engine's own cache, and later tokens are computed from them; no
    record says which.
    """

    def __init__(self) -> None:
        self._precision = Precision()
        self._lock = Lock()

    @property
    def precision(self) -> Precision:
        return self._precision

    def take(self, precision: Precision) -> None:
        with self._lock:
            self._precision = self._precision.meet(precision)

"""Opens the files of a prefix store, compares them with their names and deletes corrupt files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from kvx_core._c.os_files import close
from kvx_core.errors import OtherKeyError
from kvx_core.snapshot import CorruptError, Precision, Room, Snapshot, StoreError
from kvx_core.snapshot.chunk_reads import ToRead, is_chunk, read_chunk, read_chunks
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.index import Index, NotCached
from kvx_core.stores.marks import Mark, Marks
from kvx_core.stores.names import Ids, entry_name


@dataclass(frozen=True, slots=True)
class Entries:
    """Files on the disk. Methods raise only StoreError, whatever a file contains.

    index: remembers the files that were seen
    """

    blobs: BlobStore
    secrets: Secrets
    marks: Marks
    index: Index

    def is_good(self, space: str, key: str, kind: Kind, num_tokens: int) -> bool:
        """True if the file of a key and kind exists and its head agrees with its name.

        num_tokens: the number of tokens of the entry
        Reads no keys and values. Marks the file as used. Deletes a corrupt file.
        """
        name, asked = entry_name(space, key, kind.id), self.index.now()
        try:
            if self.index.is_good(name):
                return self.is_there(name)
            fetch, secrets = self.blobs.fetch, self.secrets
            if not is_chunk(fetch, kind, secrets, name=name, key=key, num_tokens=num_tokens):
                self.index.mark_absent(name, asked)
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

    @property
    def are_far(self) -> bool:
        """True if it pays to call `expect` and `num_first` before `is_good`."""
        return self.blobs.is_far

    def expect(self, space: str, keys: Iterable[str], kinds: Sequence[Kind], tokens: int) -> None:
        """Says that the caller is going to ask `is_good` of these keys and kinds, in this order.

        tokens: the most tokens that the entries have
        """
        names = [entry_name(space, key, kind.id) for key in keys for kind in kinds]
        if names:
            head = max(kind.layout(tokens).head.num_bytes for kind in kinds)
            self.blobs.expect(names, head)

    def num_first(self, space: str, keys: Sequence[str], kind: Kind) -> int:
        """Returns how many of the first files exist, asking for all of them at once."""
        try:
            found = self.blobs.are_there([entry_name(space, key, kind.id) for key in keys])
        except StoreError as error:
            self.index.failed(error)
            return 0
        return found.index(False) if False in found else len(found)

    def is_there(self, name: str) -> bool:
        """True if the file exists. Marks it as used now. Raises StoreError."""
        asked, found = self.index.now(), self.blobs.is_there(name)
        if found:
            self.index.mark_present(name)
        else:
            self.index.mark_absent(name, asked)
        return found

    def has_other_keys(self, name: str, kind: Kind, num_tokens: int) -> bool:
        """True if a file was written with keys that this process does not have. Such a file counts
        as absent, and writers replace it. Reads the file only in stores with keys.
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
    ) -> list[Sequence[Snapshot] | StoreError]:
        """Reads the wanted part of each file into `memory`, which `room` has given at offset `at`.

        files: at most MOST_FILES
        Returns the snapshots of all files in order, several together if `can_join` is true for
        them; in place of a file that cannot be read: the StoreError. Deletes corrupt files.
        """
        found, good = list[Sequence[Snapshot] | StoreError](), list[str]()
        folder, done = self.blobs.folder(), 0
        runs: Sequence[Sequence[Snapshot] | None] = [None] * len(files)
        if folder is not None:
            try:
                runs = read_chunks(folder, files, room, at, memory)
            finally:
                close(folder)
        for run in runs:
            if run is None:
                try:
                    run = (self._read(files[done], room, at, memory),)
                except StoreError as error:
                    found.append(error)
                    done += 1
                    continue
            found.append(run)
            good += [file.name for file in files[done : done + len(run)]]
            done += len(run)
        self.index.held(*good)
        return found

    def _read(self, file: ToRead, room: Room, at: int, memory: Bytes) -> Snapshot:
        """Reads one file as `read_all` does. Raises StoreError."""
        name, wanted, place = file.name, file.wanted, file.place
        taken = at + place, memory[place : place + wanted.selection.place.num_bytes]
        fetch, secrets, key = self.blobs.fetch, self.secrets, file.key
        try:
            found = read_chunk(fetch, wanted, secrets, name=name, key=key, room=room, taken=taken)
        except CorruptError:
            self.discard(name)
            raise
        if found is None:
            self.index.mark_absent(name)
            raise StoreError(f"{name} is not in the store (any more)")
        if found.header.start != file.start:
            raise StoreError(
                f"{name} holds tokens from {found.header.start}, expected {file.start}"
            )
        return found

    def marked(
        self, space: str, parent: str, ids: Ids, chunk_tokens: int
    ) -> list[tuple[int, Mark]]:
        """Returns marks of entries that begin like `ids`, each with the number of tokens that it
        shares with `ids`; the largest number first.
        """
        return self.marks.candidates(space, parent, ids, chunk_tokens)

    def discard(self, name: str) -> None:
        """Deletes a corrupt file, so that it can be stored again.

        If another process has stored it again meanwhile, the new file is deleted, and its tokens
        are computed and stored once more. Temporary errors raise no CorruptError, so they do not
        delete files.
        """
        self.index.corrupt(name)
        with suppress(StoreError):
            self.blobs.delete(name)


@dataclass(frozen=True, slots=True)
class CachedEntries:
    """Files as far as memory knows them, without the disk. Every method may raise NotCached."""

    index: Index
    marks: Marks
    are_far = False

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
    """The coarsest precision that this process has loaded. Everything that the process saves later
    counts as no more precise.

    Loaded prefixes stay in the engine's own cache, and later tokens are computed from them. Nothing
    records which tokens those are.
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

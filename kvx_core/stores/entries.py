"""The files of a prefix store: opened, compared with their names, deleted if corrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import BinaryIO

from kvx_core.snapshot import (
    Alike,
    CorruptError,
    Precision,
    Room,
    Snapshot,
    StoreError,
    read_tokens,
)
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.encrypted import Encrypted
from kvx_core.stores.index import Index
from kvx_core.stores.keys import EntryFile, Ids, entry_of, heads_of, is_node, name_of
from kvx_core.stores.pace import drain

_MOST_HEAD_BYTES = 1 << 14  # of a token and head in a layer: K and V of 2,048 numbers of 4 bytes


@dataclass(frozen=True, slots=True)
class Entries:
    """Files by name. Whatever a file holds, only StoreError is raised.

    index:      remembers what is seen
    has_planes: files have tensors beside K and V, of any size
    """

    blobs: BlobStore
    key: bytes | None  # that files are signed with
    max_header_bytes: int
    index: Index = field(default_factory=Index)
    has_planes: bool = False

    def __contains__(self, name: str) -> bool:
        """Whether the tokens of this file are known."""
        return self.index.tokens_of(name) is not None

    def names(self, folder: str) -> list[str]:
        """The names in a folder: a list of the caller's."""
        names = list(self.blobs.names(folder))
        self.index.listed(folder, names)
        return names

    def glance(self, folder: str) -> None:
        """Notes that a folder is worth listing: see `list_noted`.

        Not again if it is large: that takes longer than the lookups that it spares.
        """
        if self.index.is_worth_listing(folder):
            self.index.note(folder)

    def list_noted(self) -> None:
        """Lists folders that lookups have glanced at, so that memory knows what they do not have.

        Takes longer than a lookup that finds nothing: called when it has its answer.
        """
        for folder in self.index.take_noted():
            if self.index.is_worth_listing(folder):  # no other thread has done so
                for _ in drain(self.names(folder)):
                    pass

    def is_there(self, name: str) -> bool:
        """Whether the file exists; marks it as used now. Raises StoreError."""
        if isinstance(self.blobs, Encrypted):  # whose `open` reads the whole file
            found = self.blobs.is_there(name)
        else:
            file = self.blobs.open(name)
            found = file is not None
            if file is not None:
                file.close()
        if found:
            self.index.saw(name)
        else:
            self.index.missed(name)
        return found

    @contextmanager
    def opened(self, file: EntryFile) -> Iterator[BinaryIO]:
        """The file, closed at the end of the context. Raises StoreError if it does not exist."""
        opened = self._open(file)
        if opened is None:
            raise StoreError(f"{file.name} is not in the store (any more)")
        with opened:
            yield opened

    def _open(self, file: EntryFile) -> BinaryIO | None:
        with self.discarding(file.name):
            if isinstance(self.blobs, Encrypted) and not self.has_planes:
                opened = self.blobs.open(file.name, self._most_bytes(file))
            else:
                opened = self.blobs.open(file.name)
        if opened is None:
            self.index.missed(file.name)
        return opened

    def _most_bytes(self, file: EntryFile) -> int:
        """Bytes that a file of this name can have, K and V alone."""
        of_token = len(file.layers) * (file.heads[1] - file.heads[0]) * _MOST_HEAD_BYTES
        return 8 + self.max_header_bytes + file.num_tokens * (8 + of_token)

    def snapshot(self, file: EntryFile, opened: BinaryIO) -> Snapshot:
        """The snapshot in an open file, checked to be what its name says. Raises StoreError."""
        with self.discarding(file.name):
            snapshot = Snapshot.open(
                opened,
                name=file.name,
                key=self.key,
                max_header_bytes=self.max_header_bytes,
                num_tokens=file.num_tokens,
            )
            if not is_node(snapshot.header.prefix):
                raise CorruptError(f"{file.name} has a prefix that is no key of tokens")
            name = self._name(file, snapshot)
            if name != file.name:
                raise CorruptError(f"{file.name} has the content of {name[:1000]}")
        return snapshot

    def read_alike(self, file: EntryFile, alike: Alike, start: int, room: Room) -> Snapshot | None:
        """The snapshot in a file with its data in the room, checked to be what its name says.

        None: it is not like those, or not good: `opened` and `snapshot` say which. Raises
        StoreError if it does not exist or cannot be opened.
        """
        with self.opened(file) as opened:
            snapshot = alike.read(opened, start, file.node, room, file.name)
        if snapshot is not None and self._name(file, snapshot) != file.name:
            room.give_back(snapshot.at)
            return None
        return snapshot

    def _name(self, file: EntryFile, snapshot: Snapshot) -> str:
        """The name that the content of a file has to have."""
        header = snapshot.header
        return name_of(
            file.name.partition("/")[0],
            header.prefix,
            snapshot.tokens,
            header.layers,
            heads_of(header),
            header.precision,
        )

    def _read_tokens(self, file: EntryFile, opened: BinaryIO) -> Ids:
        """The tokens in an open file, compared with its name. `snapshot` compares the rest."""
        with self.discarding(file.name):
            tokens = read_tokens(
                opened,
                file.num_tokens,
                name=file.name,
                key=self.key,
                max_header_bytes=self.max_header_bytes,
            )
            if entry_of(file.node, tokens) != file.entry:
                raise CorruptError(f"{file.name} has other tokens than its name says")
        return tokens

    def tokens(self, file: EntryFile) -> Ids | None:
        """The tokens of a file; None if it cannot be read, or is not what its name says."""
        tokens = self.index.tokens_of(file.name)
        if tokens is None:
            try:
                opened = self._open(file)
                if opened is None:
                    return None
                with opened:
                    tokens = self._read_tokens(file, opened)
            except MemoryError:
                return None
            except StoreError as error:
                self.index.failed(error)
                return None
            self.index.keep_tokens(file.name, tokens)
            self.index.saw(file.name)
        return tokens

    @contextmanager
    def discarding(self, name: str) -> Iterator[None]:
        """Deletes the file if the context raises CorruptError, so that it can be stored again.

        If another process has stored it again meanwhile, the new file is deleted: its tokens are
        computed and stored once more. Temporary errors are no CorruptError and delete nothing.
        """
        try:
            yield
        except CorruptError:
            self.index.corrupt(name)
            with suppress(StoreError):
                self.blobs.delete(name)
            raise


class Carried:
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

"""StoreReader: reads files of a prefix store without marking those on a disk as used."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from kvx_core._c.os_files import ReadFile, close
from kvx_core.snapshot import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.chunk_file import ChunkFile, open_chunk
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.beneath import FILE, open_beneath
from kvx_core.stores.blob_store import ListedStore
from kvx_core.stores.config import StoreConfig, read_config
from kvx_core.stores.names import model_record
from kvx_core.stores.space import MAX_BYTES
from kvx_core.stores.stored_kind import StoredFile, StoredKind
from kvx_core.stores.stored_space import Space


class StoreReader:
    """Opens and reads files of a store, after a check of kvx-store.json."""

    def __init__(self, blobs: ListedStore, secrets: Secrets | None = None) -> None:
        """secrets: the keys that files are signed and encrypted with. Without them, the reader can
                 read records, but no file that needs a key

        Raises StoreError if `blobs` holds no store of this format, or a store that has other
        keys or cannot be read.
        """
        self.blobs, self.secrets = blobs, secrets or Secrets()
        self.config = self._config()

    def _config(self) -> StoreConfig:
        has_keys = self.secrets.is_keyed or self.secrets.is_encrypted
        config = read_config(self.blobs, self.secrets if has_keys else None)
        if config is None:
            raise StoreError(
                f"{self.where} is no store: it has no kvx-store.json, which the first engine "
                "writes. Expected `path` of the connector's settings"
            )
        return config

    @property
    def where(self) -> str:
        """The place of the store, for people."""
        if self.blobs.root is None:
            return self.blobs.path_of("").rstrip("/")
        return str(self.blobs.root)

    def opened(self, name: str) -> BinaryIO:
        """Opens a regular file, unbuffered, and keeps its time of last use.

        Raises StoreError if the file does not exist (any more) or cannot be read.
        """
        if self.blobs.root is None:
            found = self.blobs.open(name)
            if found is None:
                raise StoreError(f"{name} cannot be read: it does not exist")
            return found
        try:
            root = os.open(self.blobs.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                handle = open_beneath(root, name, FILE)
            finally:
                close(root)
            file = ReadFile(handle)
        except OSError as error:
            raise StoreError(f"{name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            file.close()
            raise StoreError(f"{name} is no regular file, expected one")
        return file

    @contextmanager
    def opened_chunk(self, file: StoredFile, stored: StoredKind) -> Iterator[ChunkFile]:
        """Yields the file of an entry, open until the context ends; its head has been checked.

        stored: the kind of the file
        Raises CorruptError, StoreError.
        """
        if stored.kind is None:
            raise StoreError(f"{file.name} cannot be read without its kind: {stored.reason}")
        secrets = secrets_for(self.secrets, stored.kind, file.name)
        with self.opened(file.name) as raw:
            chunk = open_chunk(raw, stored.kind, secrets, name=file.name, key=file.key)
            if chunk.num_tokens > self.config.chunk_tokens:
                raise CorruptError(
                    f"{file.name} has {chunk.num_tokens} tokens, expected at most chunk_tokens "
                    f"{self.config.chunk_tokens}"
                )
            yield chunk

    def read(self, name: str, most_bytes: int) -> bytes:
        """Returns the bytes of a file. Raises StoreError; CorruptError if there are too many."""
        with self.opened(name) as file:
            try:
                raw = file.read(most_bytes + 1)
            except OSError as error:
                raise StoreError(f"{name} cannot be read: {error.strerror}") from None
        if len(raw) > most_bytes:
            raise CorruptError(f"{name} has more than {most_bytes} bytes")
        return raw

    def model_text(self, space: Space) -> bytes:
        """Returns the text of the record of a space's model. Raises CorruptError, StoreError."""
        name = model_record(space.name)
        raw = self.read(name, MAX_BYTES)
        if space.record is None:
            raise StoreError(f"{name} cannot be judged: {space.reason}")
        if hashlib.sha256(raw).hexdigest() != space.record.fingerprint:
            raise CorruptError(f"{name} is not the record of model {space.record.fingerprint}")
        return raw


def secrets_for(secrets: Secrets, kind: Kind, name: str) -> Secrets:
    """Returns the secrets that files of a kind need. Raises StoreError if they are missing."""
    return with_keys(secrets, kind.keyed, kind.encrypted, name)


def with_keys(secrets: Secrets, keyed: bool, encrypted: bool, name: str) -> Secrets:
    """Returns the secrets that a file says it needs. Raises StoreError if they are missing."""
    if keyed and not secrets.is_keyed:
        raise UnsignedError(f"{name} is signed, and no key is given that it is signed with")
    if encrypted and not secrets.is_encrypted:
        raise StoreError(f"{name} is encrypted, and no key is given that it is encrypted with")
    return Secrets(secrets.signing if keyed else (), secrets.encryption if encrypted else ())

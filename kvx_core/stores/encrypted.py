"""Encrypted: a BlobStore whose files are encrypted with AES-256-GCM before they are written.

A file: MAGIC, 8 bytes that tell keys apart, a random nonce (12), the encrypted content, a tag (16).
The name of the file is authenticated with it, so that a file under another name is refused. Names,
sizes and times stay visible, and so does what lies directly in the root (kvx-store.json).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.snapshot.signing import Key
from kvx_core.stores.blobs import Directory, Put
from kvx_core.stores.usage import Usage

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"KVXAES1\n"
_KEY_NAME_BYTES, _NONCE_BYTES, _TAG_BYTES = 8, 12, 16
_HEAD_BYTES = len(MAGIC) + _KEY_NAME_BYTES + _NONCE_BYTES
_MAX_BYTES = (1 << 31) - 64  # of one file; the library takes less than 2 GiB


class Encryption:
    """Encrypts and decrypts contents of files with one key. Threads may share it."""

    def __init__(self, secret: bytes) -> None:
        """secret: at least 32 bytes that nobody can guess

        Raises InvalidArgumentError; UnsupportedError without the library `cryptography`.
        """
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise UnsupportedError(
                f"an encryption key is given, and cryptography cannot be imported ({error}). "
                "Install it: pip install 'cryptography>=42'"
            ) from None
        key = Key(secret)
        self._cipher = AESGCM(bytes.fromhex(key.digest(b"AES-256-GCM", b"kvx cipher")))
        self._invalid_tag = InvalidTag
        self.key_check = key.digest(b"AES-256-GCM", b"kvx key check")[:32]
        self._head = MAGIC + bytes.fromhex(self.key_check)[:_KEY_NAME_BYTES]

    def encrypt(self, name: str, content: bytes | memoryview) -> tuple[bytes, bytes]:
        """The two parts of the file of this name that has this content."""
        if len(content) > _MAX_BYTES:
            raise StoreError(
                f"{name} would have {len(content)} bytes, expected at most {_MAX_BYTES} of an "
                "encrypted file. Set a smaller chunk_tokens"
            )
        nonce = os.urandom(_NONCE_BYTES)
        head = self._head + nonce
        return head, self._cipher.encrypt(nonce, content, head + name.encode())

    def decrypt(self, name: str, raw: bytes | memoryview) -> bytes:
        """The content of the file of this name.

        Raises CorruptError if it was changed, has another name, or is not encrypted; StoreError if
        it is encrypted with another key.
        """
        view = memoryview(raw)
        head = bytes(view[:_HEAD_BYTES])
        if not head.startswith(MAGIC) or len(view) < _HEAD_BYTES + _TAG_BYTES:
            raise CorruptError(f"{name} is not encrypted, expected a file of an encrypted store")
        content = self._authentic(name, self._head + head[-_NONCE_BYTES:], view)
        if not head.startswith(self._head):
            if content is None:
                raise StoreError(f"{name} is encrypted with another key than that of this reader")
            raise CorruptError(
                f"{name} is encrypted with the key of this reader, and the bytes that tell keys "
                "apart have changed since they were written"
            )
        if content is None:
            raise CorruptError(
                f"{name} cannot be decrypted: its bytes have changed since they were written, or "
                "it had another name"
            )
        return content

    def _authentic(self, name: str, head: bytes, view: memoryview) -> bytes | None:
        """The content of a file of this name that was written with this head; None: it was not."""
        try:
            return self._cipher.decrypt(
                head[-_NONCE_BYTES:], view[_HEAD_BYTES:], head + name.encode()
            )
        except self._invalid_tag:
            return None

    def opened(self, name: str, file: BinaryIO, shown: str) -> BinaryIO:
        """A file in memory with the content of an encrypted one. Raises as `decrypt` does.

        shown: its path, for messages
        """
        try:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > _MAX_BYTES + _HEAD_BYTES + _TAG_BYTES:
                raise CorruptError(f"{name} has {num_bytes} bytes, more than an encrypted file can")
            raw = bytearray(num_bytes)
            view, at = memoryview(raw), 0
            while at < num_bytes:
                count = os.preadv(file.fileno(), [view[at:]], at)
                if not count:
                    raise CorruptError(f"{name} became shorter while it was read")
                at += count
            plain = in_memory(shown)
            try:
                _write_all(plain, self.decrypt(name, view))
                plain.seek(0)
            except BaseException:
                plain.close()
                raise
        except OSError as error:
            raise StoreError(f"{shown} cannot be read: {error}") from None
        return plain


class Encrypted:
    """A Directory whose files are encrypted. A file is read whole when it is opened."""

    def __init__(self, directory: Directory, encryption: Encryption) -> None:
        self._directory, self._encryption = directory, encryption
        self.key_check = encryption.key_check

    @property
    def root(self) -> Path:
        return self._directory.root

    @property
    def max_bytes(self) -> int | None:
        return self._directory.max_bytes

    @property
    def usage(self) -> Usage:
        return self._directory.usage

    def put(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        """As BlobStore.put. `write` writes to memory."""
        return self._directory.put(name, self._encrypting(name, write))

    def put_all(self, files: Sequence[tuple[str, Callable[[BinaryIO], None]]]) -> list[Put]:
        """As Directory.put_all."""
        return self._directory.put_all(
            [(name, self._encrypting(name, write)) for name, write in files]
        )

    def _encrypting(
        self, name: str, write: Callable[[BinaryIO], None]
    ) -> Callable[[BinaryIO], None]:
        """`write`, with what it writes encrypted."""
        if "/" not in name:
            return write

        def encrypted(file: BinaryIO) -> None:
            with in_memory(name) as plain:
                write(plain)
                content = bytearray(os.fstat(plain.fileno()).st_size)
                plain.seek(0)
                plain.readinto(content)
            for part in self._encryption.encrypt(name, memoryview(content)):
                file.write(part)

        return encrypted

    def open(self, name: str) -> BinaryIO | None:
        """As BlobStore.open: a file in memory. Raises CorruptError too, see Encryption.decrypt."""
        file = self._directory.open(name)
        if file is None or "/" not in name:
            return file
        with file:
            return self._encryption.opened(name, file, f"{self.root}/{name}")

    def is_there(self, name: str) -> bool:
        """Whether the file exists; marks it as used now. Decrypts nothing. Raises StoreError."""
        file = self._directory.open(name)
        if file is not None:
            file.close()
        return file is not None

    def names(self, folder: str) -> list[str]:
        """As BlobStore.names."""
        return self._directory.names(folder)

    def delete(self, name: str) -> None:
        """As BlobStore.delete."""
        self._directory.delete(name)


def in_memory(name: str) -> io.FileIO:
    """A new file that is on no disk, closed by the caller. Its memory may be swapped out."""
    file = io.FileIO(os.memfd_create("kvx", os.MFD_CLOEXEC), "r+b")
    file.name = name
    return file


def _write_all(file: io.FileIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def is_encrypted(file: BinaryIO) -> bool:
    """Whether an open file begins as an encrypted one; False if it cannot be read."""
    with suppress(OSError):
        return os.pread(file.fileno(), len(MAGIC), 0) == MAGIC
    return False


def secret_of_variable(name: str) -> bytes:
    """The key in an environment variable: its text. Raises InvalidArgumentError."""
    text = os.environ.get(name)
    if text is None or len(text.encode()) < 32:
        found = "not set" if text is None else f"of {len(text.encode())} bytes"
        raise InvalidArgumentError(
            f"encryption_key_variable is {name!r}, an environment variable that is {found}, "
            "expected at least 32 bytes that nobody can guess, such as: openssl rand -hex 32"
        )
    return text.encode()

"""Encrypted: a BlobStore whose files are encrypted with AES-256-GCM before they are written.

A file: MAGIC, 8 bytes that tell keys apart, a random nonce (12), the encrypted content, a tag (16).
The name of the file is authenticated with it, so that a file under another name is refused. Names,
sizes and times stay visible, and so does what lies directly in the root (kvx-store.json).

The tag is at the end: nothing is used before all of a file has been decrypted. A writer without the
key may have made it as long as it likes. So the first piece is decrypted alone, and the rest only
if the snapshot that begins there is as long as the file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.snapshot.seal import sealed_size
from kvx_core.snapshot.signing import Key
from kvx_core.stores.blob_store import BlobStore, Put
from kvx_core.stores.blobs import Directory
from kvx_core.stores.usage import Usage

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext

MAGIC = b"KVXAES1\n"
_KEY_NAME_BYTES, _NONCE_BYTES, _TAG_BYTES = 8, 12, 16
_HEAD_BYTES = len(MAGIC) + _KEY_NAME_BYTES + _NONCE_BYTES
_MAX_BYTES = (1 << 31) - 64  # of one file; the library takes less than 2 GiB
_PIECE_BYTES = 4 << 20  # that are decrypted at once: a millisecond, in which no other thread runs


class Encryption:
    """Encrypts and decrypts contents of files with one key. Threads may share it."""

    def __init__(self, secret: bytes) -> None:
        """secret: at least 32 bytes that nobody can guess

        Raises InvalidArgumentError; UnsupportedError without the library `cryptography`.
        """
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise UnsupportedError(
                f"an encryption key is given, and cryptography cannot be imported ({error}). "
                "Install it: pip install 'cryptography>=42'"
            ) from None
        key = Key(secret)
        of_cipher = bytes.fromhex(key.digest(b"AES-256-GCM", b"kvx cipher"))
        self._cipher = AESGCM(of_cipher)
        aes = algorithms.AES256(of_cipher)
        self._decryptor: Callable[[bytes], AEADDecryptionContext] = lambda nonce: Cipher(
            aes, modes.GCM(nonce)
        ).decryptor()
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
        return b"".join(self._pieces(name, lambda at, size: view[at : at + size], len(view)))

    def _pieces(
        self, name: str, read: Callable[[int, int], bytes | memoryview], num_bytes: int
    ) -> Iterator[bytes]:
        """What `decrypt` returns, in pieces: not to be used before the last one has come.

        read: bytes of the file, from an offset on
        """
        head = bytes(read(0, min(num_bytes, _HEAD_BYTES)))
        if not head.startswith(MAGIC) or num_bytes < _HEAD_BYTES + _TAG_BYTES:
            raise CorruptError(f"{name} is not encrypted, expected a file of an encrypted store")
        own = self._head + head[-_NONCE_BYTES:]
        decryptor = self._decryptor(own[-_NONCE_BYTES:])
        decryptor.authenticate_additional_data(own + name.encode())
        at, stop = _HEAD_BYTES, num_bytes - _TAG_BYTES
        while at < stop:
            size = min(_PIECE_BYTES, stop - at)
            piece = decryptor.update(read(at, size))
            if at == _HEAD_BYTES and size < stop - at:
                expected = sealed_size(piece)
                if expected != stop - at:
                    raise self._wrong(name, head, f", or it has {stop - at} bytes of content")
            yield piece
            at += size
        try:
            decryptor.finalize_with_tag(bytes(read(stop, _TAG_BYTES)))
        except self._invalid_tag:
            raise self._wrong(name, head) from None
        if not head.startswith(self._head):
            raise CorruptError(
                f"{name} is encrypted with the key of this reader, and the bytes that tell keys "
                "apart have changed since they were written"
            )

    def _wrong(self, name: str, head: bytes, or_else: str = "") -> StoreError:
        """Why a file of this head is not one that was written with this key under this name."""
        if not head.startswith(self._head):
            return StoreError(f"{name} is encrypted with another key than that of this reader")
        return CorruptError(
            f"{name} cannot be decrypted: its bytes have changed since they were written{or_else}, "
            "or it had another name"
        )

    def opened(
        self, name: str, file: BinaryIO, shown: str, most_bytes: int = _MAX_BYTES
    ) -> BinaryIO:
        """A file in memory with the content of an encrypted one. Raises as `decrypt` does.

        shown:      its path, for messages
        most_bytes: that a file of this name can have
        """
        handle = file.fileno()

        def read(at: int, size: int) -> bytes:
            found = os.pread(handle, size, at)
            while len(found) < size:
                more = os.pread(handle, size - len(found), at + len(found))
                if not more:
                    raise CorruptError(f"{name} became shorter while it was read")
                found += more
            return found

        try:
            num_bytes = os.fstat(handle).st_size
            most = min(most_bytes, _MAX_BYTES) + _HEAD_BYTES + _TAG_BYTES
            if num_bytes > most:
                raise CorruptError(
                    f"{name} has {num_bytes} bytes, expected at most {most} of an encrypted file "
                    "of this name"
                )
            plain = in_memory(shown)
            try:
                for piece in self._pieces(name, read, num_bytes):
                    _write_all(plain, piece)
                plain.seek(0)
            except BaseException:
                plain.close()
                raise
        except (OSError, MemoryError) as error:
            raise StoreError(f"{shown} cannot be read: {error}") from None
        return plain


class Encrypted(BlobStore):
    """A Directory whose files are encrypted. A file is decrypted whole when it is opened."""

    def __init__(self, directory: Directory, encryption: Encryption) -> None:
        self._directory, self._encryption = directory, encryption
        self.key_check = encryption.key_check

    @property
    def root(self) -> Path:  # type: ignore[override]
        return self._directory.root

    @property
    def max_bytes(self) -> int | None:  # type: ignore[override]
        return self._directory.max_bytes

    @property
    def usage(self) -> Usage:  # type: ignore[override]
        return self._directory.usage

    def put(self, name: str, write: Callable[[BinaryIO], None], *, durable: bool = True) -> bool:
        """As BlobStore.put. `write` writes to memory."""
        return self._directory.put(name, self._encrypting(name, write), durable=durable)

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

    def open(self, name: str, most_bytes: int = _MAX_BYTES) -> BinaryIO | None:
        """As BlobStore.open: a file in memory. Raises CorruptError too, see Encryption.decrypt.

        most_bytes: that the content of a file of this name can have: see Encryption.opened
        """
        file = self._directory.open(name)
        if file is None or "/" not in name:
            return file
        with file:
            return self._encryption.opened(name, file, f"{self.root}/{name}", most_bytes)

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

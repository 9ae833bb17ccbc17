"""Keys that sign files. A reader with a key accepts only files signed with it."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvx_core.errors import InvalidArgumentError
from kvx_core.files import close
from kvx_core.snapshot.errors import UnsignedError
from kvx_core.words import instance

_MIN_BYTES, _MAX_BYTES = 32, 4096
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Key:
    """Keyed BLAKE2b, 256 bits.

    secret: at least 32 bytes that nobody can guess, such as those of os.urandom
    Raises InvalidArgumentError.
    """

    secret: bytes = field(repr=False)
    id: int = field(init=False, compare=False)  # differs between keys and reveals nothing of them
    _derived: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_secret("key", self.secret)
        derived = hashlib.blake2b(self.secret, digest_size=64, person=b"kvx key").digest()
        object.__setattr__(self, "_derived", derived)
        object.__setattr__(self, "id", int.from_bytes(self.mac(b"", b"kvx name")[:8], "little"))

    def mac(self, data: bytes | memoryview, purpose: bytes) -> bytes:
        """A keyed digest of `data`, 32 bytes.

        purpose: at most 16 bytes; digests for different purposes differ
        """
        return hashlib.blake2b(
            data, key=self._derived, digest_size=_DIGEST_BYTES, person=purpose
        ).digest()

    def digest(self, data: bytes | memoryview, purpose: bytes) -> str:
        """`mac` in hex."""
        return self.mac(data, purpose).hex()

    @property
    def name(self) -> str:
        """A text that differs between keys and reveals nothing about them."""
        return self.digest(b"", b"kvx name")


def check_secret(name: str, secret: object) -> None:
    """Raises InvalidArgumentError unless it can be the secret of a key.

    name: what errors call it
    """
    found = instance(name, secret, bytes, f"at least {_MIN_BYTES} bytes that nobody can guess")
    if len(found) < _MIN_BYTES:
        raise InvalidArgumentError(
            f"{name} has {len(found)} bytes, expected at least {_MIN_BYTES} that nobody can guess. "
            "Make one with os.urandom(32)"
        )


def read_key(path: Path, field: str = "key_files") -> bytes:
    """Reads a key: all bytes of a file that only this user can read, and root.

    field: what errors call it

    Raises InvalidArgumentError if it is no regular file, too short or too long, if others can read
    it, or if it is another user's: who then has the key, or has chosen it.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgumentError(
            f"{field} {path} cannot be read: {error}. Make it with: "
            f"(umask 077; head -c 32 /dev/urandom > {path})"
        ) from None
    try:
        status = os.fstat(file)
        mode = status.st_mode
        if not stat.S_ISREG(mode):
            raise InvalidArgumentError(f"{field} {path} is no regular file, expected one")
        if mode & 0o077:
            raise InvalidArgumentError(
                f"{field} {path} has mode {mode & 0o777:04o}, expected 0600 or stricter: others "
                f"must not read it. Run: chmod 600 {path}"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise InvalidArgumentError(
                f"{field} {path} belongs to user {status.st_uid}, expected {os.geteuid()}, whom "
                f"this process runs as, or root. Run: chown {os.geteuid()} {path}"
            )
        secret = os.read(file, _MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{field} {path} cannot be read: {error}") from None
    finally:
        close(file)
    if not _MIN_BYTES <= len(secret) <= _MAX_BYTES:
        raise InvalidArgumentError(
            f"{field} {path} has {'more than ' if len(secret) > _MAX_BYTES else ''}"
            f"{min(len(secret), _MAX_BYTES)} bytes, expected {_MIN_BYTES} to {_MAX_BYTES}. Make it "
            f"with: (umask 077; head -c 32 /dev/urandom > {path})"
        )
    return secret


def check_signature(name: str, key: Key | None, message: bytes, signature: bytes | None) -> None:
    """Raises UnsignedError unless the reader's key made the signature, or there is neither."""
    if key is None and signature is None:
        return
    if key is None:
        raise UnsignedError(f"{name} is signed, and this reader has no key. Give it the writer's")
    expected = key.digest(message, b"kvx header")
    if signature is None or not hmac.compare_digest(signature, expected.encode()):
        raise UnsignedError(
            f"{name} is not signed with the key of this reader. Give writer and reader the same"
        )

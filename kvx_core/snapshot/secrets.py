"""Secrets of a process: keys that sign the files of a store, and keys that encrypt them.

A process may have several of a sort: the first one writes, all of them read, so that keys are
changed while engines run. Format: docs/store_format.md, "Keys".
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvx_core._c.os_files import close
from kvx_core.argument_checks import bad_argument, instance
from kvx_core.errors import InvalidArgumentError, UnsupportedError

RANDOM_BYTES = 32  # of a file, which its own key is made of
TAG_BYTES = 16  # that encryption adds
_MIN_BYTES, _MAX_BYTES = 32, 4096  # of a secret
_DIGEST_BYTES = 32
_ENDING = ".json"  # of records


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


class Encryption:
    """AES-256-GCM with one secret. Each file has a key of its own. Threads may share it."""

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
        self.key = Key(secret)
        self.id = self.key.id  # tells keys apart
        self._cipher, self._invalid_tag = AESGCM, InvalidTag

    def file_key(self, random: bytes) -> bytes:
        """The key of a file, 32 bytes.

        random: RANDOM_BYTES of this file, and of no other
        """
        return self.key.mac(random, b"kvx file key")

    def encrypted(
        self, random: bytes, number: int, data: bytes | memoryview, associated: bytes
    ) -> bytes:
        """`data`, encrypted, and its tag of TAG_BYTES.

        random:     of the file
        number:     of this piece of the file: no two have the same
        associated: clear bytes that are authenticated with it
        """
        cipher = self._cipher(self.file_key(random))
        return cipher.encrypt(nonce_of(number), data, associated)

    def decrypted(
        self, random: bytes, number: int, data: bytes | memoryview, associated: bytes
    ) -> bytes | None:
        """What was `encrypted`; None if anything of it has changed, or it has another key."""
        cipher = self._cipher(self.file_key(random))
        try:
            return cipher.decrypt(nonce_of(number), data, associated)
        except self._invalid_tag:
            return None


def nonce_of(number: int) -> bytes:
    """The nonce of a piece of a file: its number, 12 bytes."""
    return number.to_bytes(12, "little")


@dataclass(frozen=True, slots=True)
class Secrets:
    """The keys of a process, of each sort the one that writes first; () for none."""

    signing: tuple[Key, ...] = ()
    encryption: tuple[Encryption, ...] = ()

    @classmethod
    def of(
        cls,
        key: bytes | Sequence[bytes] | None = None,
        encryption_key: bytes | Sequence[bytes] | None = None,
    ) -> Self:
        """One key of at least 32 bytes, several with the one that writes first, or None.

        Raises InvalidArgumentError; UnsupportedError without the library `cryptography`.
        """
        return cls(
            tuple(map(Key, _each("key", key))),
            tuple(map(Encryption, _each("encryption_key", encryption_key))),
        )

    @property
    def is_keyed(self) -> bool:
        """Whether files are signed."""
        return bool(self.signing)

    @property
    def is_encrypted(self) -> bool:
        """Whether files are encrypted."""
        return bool(self.encryption)

    @property
    def signer(self) -> Key | None:
        """The key that signs new files."""
        return self.signing[0] if self.signing else None

    @property
    def encrypter(self) -> Encryption | None:
        """The key that encrypts new files."""
        return self.encryption[0] if self.encryption else None

    def signer_of(self, id: int) -> Key | None:
        """The key that has signed a file with this id of a key; None: it is not one of these."""
        return next((key for key in self.signing if key.id == id), None)

    def encrypter_of(self, id: int) -> Encryption | None:
        """The key that has encrypted a file with this id of a key; None: it is not one of these."""
        return next((key for key in self.encryption if key.id == id), None)

    @property
    def _of_records(self) -> tuple[Key, ...]:
        """The keys that authenticate records."""
        return self.signing or tuple(one.key for one in self.encryption)

    def mac_names(self, record: str) -> tuple[str, ...]:
        """The names of the files that authenticate a record here, that of the writing key first.

        record: its name in the store, such as "<space>/space.json"
        """
        return tuple(_mac_name(record, key) for key in self._of_records)

    def mac(self, record: str, raw: bytes) -> tuple[str, str] | None:
        """The name and the content, 64 hex digits, of the file that is put beside a record here.

        raw: the bytes of the record
        Returns None without keys.
        """
        keys = self._of_records
        return (_mac_name(record, keys[0]), _mac(record, raw, keys[0])) if keys else None

    def check(self, record: str, raw: bytes, read: Callable[[str], bytes | None]) -> bool:
        """Whether a record has been written with one of these keys; without keys, every one counts.

        read: the bytes of a file of the store; None if it does not exist
        """
        keys = self._of_records
        return not keys or any(
            hmac.compare_digest(
                read(_mac_name(record, key)) or b"", _mac(record, raw, key).encode()
            )
            for key in keys
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


def _each(name: str, keys: bytes | Sequence[bytes] | None) -> Sequence[bytes]:
    """Raises InvalidArgumentError."""
    if keys is None:
        return ()
    if isinstance(keys, bytes):
        keys = (keys,)
    elif not isinstance(keys, (list, tuple)) or not keys:
        raise bad_argument(
            name, keys, "32 bytes or more, or a list of such, the one that writes first"
        )
    for i, secret in enumerate(keys):
        check_secret(name if len(keys) == 1 else f"{name}[{i}]", secret)
    return keys


def _mac_name(record: str, key: Key) -> str:
    return f"{record.removesuffix(_ENDING)}.{key.name[:16]}.mac"


def _mac(record: str, raw: bytes, key: Key) -> str:
    return key.digest(record.encode() + b"\0" + raw, b"kvx json")

"""Secrets are the keys of a process: signing keys and encryption keys for the files of a store.

A process may have several keys of each sort: it writes with the first key and reads with all keys,
so that keys can be changed while engines run. Format: docs/store_format.md, "Keys".
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

RANDOM_BYTES = 32  # of a file: the key of the file is derived from them
TAG_BYTES = 16  # that encryption adds
_MIN_BYTES, _MAX_BYTES = 32, 4096  # of a secret
_DIGEST_BYTES = 32
_ENDING = ".json"  # of the names of records


@dataclass(frozen=True, slots=True)
class Key:
    """A key for BLAKE2b digests of 256 bits.

    secret: at least 32 bytes that nobody can guess, such as os.urandom(32)
    Raises InvalidArgumentError.
    """

    secret: bytes = field(repr=False)
    id: int = field(init=False, compare=False)  # differs between keys, reveals nothing about them
    _derived: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_secret("key", self.secret)
        derived = hashlib.blake2b(self.secret, digest_size=64, person=b"kvx key").digest()
        object.__setattr__(self, "_derived", derived)
        object.__setattr__(self, "id", int.from_bytes(self.mac(b"", b"kvx name")[:8], "little"))

    def mac(self, data: bytes | memoryview, purpose: bytes) -> bytes:
        """Returns a keyed digest of `data`, 32 bytes.

        purpose: at most 16 bytes; digests for different purposes differ
        """
        return hashlib.blake2b(
            data, key=self._derived, digest_size=_DIGEST_BYTES, person=purpose
        ).digest()

    def digest(self, data: bytes | memoryview, purpose: bytes) -> str:
        """Returns `mac` in hex."""
        return self.mac(data, purpose).hex()

    @property
    def name(self) -> str:
        """A text that differs between keys and reveals nothing about them."""
        return self.digest(b"", b"kvx name")


def check_secret(name: str, secret: object) -> None:
    """Raises InvalidArgumentError unless `secret` can be the secret of a key.

    name: the name of the secret in errors
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
        self.id = self.key.id  # differs between keys
        self._cipher, self._invalid_tag = AESGCM, InvalidTag

    def file_key(self, random: bytes) -> bytes:
        """Returns the key of a file, 32 bytes.

        random: RANDOM_BYTES of this file; no other file has the same
        """
        return self.key.mac(random, b"kvx file key")

    def encrypted(
        self, random: bytes, number: int, data: bytes | memoryview, associated: bytes
    ) -> bytes:
        """Returns the encrypted `data`, and behind it a tag of TAG_BYTES.

        random:     RANDOM_BYTES of the file
        number:     of this piece; no two pieces of a file have the same number
        associated: clear bytes that are authenticated with the data
        """
        cipher = self._cipher(self.file_key(random))
        return cipher.encrypt(nonce_of(number), data, associated)

    def decrypted(
        self, random: bytes, number: int, data: bytes | memoryview, associated: bytes
    ) -> bytes | None:
        """Returns the data that `encrypted` encrypted; None if any argument or the key differs."""
        cipher = self._cipher(self.file_key(random))
        try:
            return cipher.decrypt(nonce_of(number), data, associated)
        except self._invalid_tag:
            return None


def nonce_of(number: int) -> bytes:
    """Returns the nonce of a piece of a file: its number, 12 bytes."""
    return number.to_bytes(12, "little")


@dataclass(frozen=True, slots=True)
class Secrets:
    """The keys of a process. The first key of each sort writes; () if there is no key."""

    signing: tuple[Key, ...] = ()
    encryption: tuple[Encryption, ...] = ()

    @classmethod
    def of(
        cls,
        key: bytes | Sequence[bytes] | None = None,
        encryption_key: bytes | Sequence[bytes] | None = None,
    ) -> Self:
        """Makes Secrets of keys: each argument is one key, a list of keys, or None.

        Each key has at least 32 bytes. The first key of a list writes.
        Raises InvalidArgumentError; UnsupportedError without the library `cryptography`.
        """
        return cls(
            tuple(map(Key, _each("key", key))),
            tuple(map(Encryption, _each("encryption_key", encryption_key))),
        )

    @property
    def is_keyed(self) -> bool:
        """True if files are signed."""
        return bool(self.signing)

    @property
    def is_encrypted(self) -> bool:
        """True if files are encrypted."""
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
        """Returns the signing key with this id; None if this process does not have it."""
        return next((key for key in self.signing if key.id == id), None)

    def encrypter_of(self, id: int) -> Encryption | None:
        """Returns the encryption key with this id; None if this process does not have it."""
        return next((key for key in self.encryption if key.id == id), None)

    @property
    def _of_records(self) -> tuple[Key, ...]:
        """The keys that authenticate records."""
        return self.signing or tuple(one.key for one in self.encryption)

    def mac_names(self, record: str) -> tuple[str, ...]:
        """Returns the names of the MAC files of a record, one for each key; the writing key first.

        record: the record's name in the store, such as "<space>/space.json"
        """
        return tuple(_mac_name(record, key) for key in self._of_records)

    def mac(self, record: str, raw: bytes) -> tuple[str, str] | None:
        """Returns the name and the content, 64 hex digits, of the MAC file beside a record.

        Returns None without keys.
        raw: the bytes of the record
        """
        keys = self._of_records
        return (_mac_name(record, keys[0]), _mac(record, raw, keys[0])) if keys else None

    def check(self, record: str, raw: bytes, read: Callable[[str], bytes | None]) -> bool:
        """True if the MAC file of one of these keys matches the record; always true without keys.

        raw:  the bytes of the record
        read: returns the bytes of a file of the store; None if it does not exist
        """
        keys = self._of_records
        return not keys or any(
            hmac.compare_digest(
                read(_mac_name(record, key)) or b"", _mac(record, raw, key).encode()
            )
            for key in keys
        )


def read_key(path: Path, field: str = "key_files") -> bytes:
    """Reads a key from a file. Returns all bytes of the file.

    field: the name of the setting in errors

    Raises InvalidArgumentError if the file is not a regular file, is too short or too long, if its
    mode lets others access it, or if it belongs to a user other than this one and root, who would
    know the key or may have chosen it.
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
    """Returns the text of an environment variable as a key. Raises InvalidArgumentError."""
    text = os.environ.get(name)
    if text is None or len(text.encode()) < 32:
        found = "not set" if text is None else f"of {len(text.encode())} bytes"
        raise InvalidArgumentError(
            f"encryption_key_variable is {name!r}, an environment variable that is {found}, "
            "expected at least 32 bytes that nobody can guess, such as: openssl rand -hex 32"
        )
    return text.encode()


def _each(name: str, keys: bytes | Sequence[bytes] | None) -> Sequence[bytes]:
    """Returns a sequence of the given keys. Raises InvalidArgumentError.

    name: the name of the argument in errors
    """
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

"""Sealing makes and compares the checks of a file's record and pieces, and encrypts them.

Format: docs/store_format.md, "The record" and "Keys".
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from kvx_core.snapshot.record import CLEAR_BYTES, RANDOM_BYTES, RecordText
from kvx_core.snapshot.secrets import TAG_BYTES, nonce_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from kvx_core.snapshot.secrets import Encryption, Key, Secrets


class Sealing:
    """Checks, encrypts and decrypts the bytes of one file."""

    def __init__(self, clear: bytes, signer: Key | None, encrypter: Encryption | None) -> None:
        """clear: the first CLEAR_BYTES of the file's record"""
        self.clear = clear
        self._signer = signer
        self._cipher: _Cipher | None = None
        if encrypter is not None:
            random = clear[CLEAR_BYTES - RANDOM_BYTES : CLEAR_BYTES]
            self._cipher = _Cipher(encrypter.file_key(random), clear)

    @classmethod
    def new(cls, text: RecordText, secrets: Secrets) -> Sealing:
        """Returns the Sealing of a new file, with random bytes that no other file has."""
        signer, encrypter = secrets.signer, secrets.encrypter
        random = bytes(RANDOM_BYTES) if encrypter is None else os.urandom(RANDOM_BYTES)
        signed_by, encrypted_by = (0 if key is None else key.id for key in (signer, encrypter))
        return cls(text.clear(signed_by, encrypted_by, random), signer, encrypter)

    def sealed_record(self, raw: bytes) -> bytes:
        """Returns a record as it is in the file, with its check and encrypted.

        raw: all bytes of the record before its check
        """
        whole = raw + self._check([raw], b"kvx record")
        if self._cipher is None:
            return whole
        return b"".join((self.clear, *self._cipher.encrypted(0, [whole[CLEAR_BYTES:]])))

    def opened_record(self, sealed: bytes) -> bytes | None:
        """Decrypts and checks a record. Returns its bytes before the check; None: it has changed.

        sealed: the record as it is in the file
        """
        whole = sealed
        if self._cipher is not None:
            found = bytearray(len(sealed) - CLEAR_BYTES - TAG_BYTES)
            if not self._cipher.decrypted(0, memoryview(sealed)[CLEAR_BYTES:], [memoryview(found)]):
                return None
            whole = sealed[:CLEAR_BYTES] + found
        size = 16 if self._signer is None else 32
        raw = whole[:-size]
        return (
            raw if hmac.compare_digest(self._check([raw], b"kvx record"), whole[-size:]) else None
        )

    def sealed(self, index: int, views: Sequence[Buffer]) -> tuple[Sequence[Buffer], bytes]:
        """Returns the bytes of a piece as they are in the file, and the check of the piece.

        views: the bytes of the piece, which follow one another
        """
        if self._cipher is None:
            return views, self._check(views, b"kvx piece")
        data, tag = self._cipher.encrypted(index + 1, views)
        if self._signer is None:
            return [data], bytes(tag)
        return [data], bytes(tag) + self._check([data], b"kvx piece")

    def is_good(self, check: bytes, views: Sequence[Buffer]) -> bool:
        """True if the check matches the bytes of a piece in the file.

        Always true for a file that is encrypted and not signed: `decrypted` checks its pieces.
        """
        if self._cipher is not None:
            if self._signer is None:
                return True
            check = check[TAG_BYTES:]
        return hmac.compare_digest(self._check(views, b"kvx piece"), check)

    def decrypted(
        self, index: int, check: bytes, data: memoryview, targets: Sequence[memoryview]
    ) -> bool:
        """Decrypts a piece of an encrypted file into `targets`. Returns False if it has changed.

        data:    the bytes of the piece, and TAG_BYTES behind them, which are overwritten and put
                 back
        targets: have as many bytes together as the piece
        """
        assert self._cipher is not None
        behind = data[-TAG_BYTES:]
        kept = bytes(behind)
        behind[:] = check[:TAG_BYTES]
        is_good = self._cipher.decrypted(index + 1, data, targets)
        behind[:] = kept
        return is_good

    @property
    def is_encrypted(self) -> bool:
        return self._cipher is not None

    def _check(self, views: Sequence[Buffer], purpose: bytes) -> bytes:
        if self._signer is not None:
            data = views[0] if len(views) == 1 else b"".join(views)
            return self._signer.mac(memoryview(data), purpose)
        digest = xxh3_128()
        for view in views:
            digest.update(view)  # without the GIL if it is large
        return digest.digest()


class _Cipher:
    """AES-256-GCM with the key of one file."""

    def __init__(self, key: bytes, associated: bytes) -> None:
        # An Encryption exists, so the library is installed.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aes, self._invalid_tag, self._associated = AESGCM(key), InvalidTag, associated
        # Versions before 47 lack decrypt_into.
        self._decrypt_into: Any = getattr(self._aes, "decrypt_into", None)

    def encrypted(self, number: int, views: Sequence[Buffer]) -> tuple[memoryview, memoryview]:
        """Returns the encrypted bytes of all views, and their tag."""
        data = memoryview(views[0] if len(views) == 1 else b"".join(views))
        found = memoryview(self._aes.encrypt(nonce_of(number), data, self._associated))
        return found[:-TAG_BYTES], found[-TAG_BYTES:]

    def decrypted(self, number: int, sealed: memoryview, targets: Sequence[memoryview]) -> bool:
        """Decrypts into `targets`. Returns False if the bytes or their tag have changed.

        sealed: the encrypted bytes and their tag
        """
        nonce, own = nonce_of(number), self._associated
        try:
            if len(targets) == 1 and self._decrypt_into is not None:
                self._decrypt_into(nonce, sealed, own, targets[0])
                return True
            found = memoryview(self._aes.decrypt(nonce, sealed, own))
        except self._invalid_tag:
            return False
        at = 0
        for target in targets:
            target[:] = found[at : at + len(target)]
            at += len(target)
        return True

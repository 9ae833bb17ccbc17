"""Secrets: keys as docs/store_format.md derives them, with nothing of the package."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvx_core import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot.secrets import Encryption, Key, Secrets

NEW, OLD, THIRD = b"n" * 32, b"o" * 40, b"t" * 64


def mac(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    key = hashlib.blake2b(secret, digest_size=64, person=b"kvx key").digest()
    return hashlib.blake2b(data, key=key, digest_size=32, person=purpose).digest()


def test_a_key_is_derived_as_the_format_says() -> None:
    key = Key(OLD)
    assert key.mac(b"data", b"kvx piece") == mac(OLD, b"kvx piece", b"data")
    assert key.digest(b"data", b"kvx piece") == mac(OLD, b"kvx piece", b"data").hex()
    assert key.id == int.from_bytes(mac(OLD, b"kvx name", b"")[:8], "little")
    assert key == Key(OLD)
    assert key != Key(NEW)
    assert "ooo" not in repr(key)


def test_files_are_encrypted_as_the_format_says() -> None:
    encryption, random, data = Encryption(OLD), os.urandom(32), os.urandom(1000)
    file_key = mac(OLD, b"kvx file key", random)
    assert encryption.file_key(random) == file_key
    assert encryption.id == Key(OLD).id
    found = encryption.encrypted(random, 258, data, b"clear")
    assert found == AESGCM(file_key).encrypt(b"\2\1" + bytes(10), data, b"clear")
    assert encryption.decrypted(random, 258, memoryview(found), b"clear") == data
    changed = bytes([found[0] ^ 1]) + found[1:]
    for wrong in (
        encryption.decrypted(random, 257, found, b"clear"),
        encryption.decrypted(random, 258, found, b"other"),
        encryption.decrypted(random, 258, changed, b"clear"),
        encryption.decrypted(random, 258, found[:5], b"clear"),
        encryption.decrypted(bytes(32), 258, found, b"clear"),
        Encryption(NEW).decrypted(random, 258, found, b"clear"),
    ):
        assert wrong is None


def test_the_first_key_of_a_sort_writes_and_all_read() -> None:
    secrets = Secrets.of([NEW, OLD], (OLD, THIRD))
    assert secrets.is_keyed
    assert secrets.is_encrypted
    assert secrets.signer == Key(NEW)
    assert secrets.encrypter is secrets.encryption[0]
    assert [secrets.signer_of(Key(key).id) for key in (NEW, OLD, THIRD)] == [
        Key(NEW),
        Key(OLD),
        None,
    ]
    assert [secrets.encrypter_of(Key(key).id) for key in (NEW, OLD, THIRD)] == [
        None,
        *secrets.encryption,
    ]
    assert Secrets.of(NEW) == Secrets.of([NEW]) == Secrets((Key(NEW),))
    none = Secrets.of()
    assert none == Secrets()
    assert (none.signer, none.encrypter, none.signer_of(0), none.encrypter_of(0)) == (None,) * 4
    assert not none.is_keyed
    assert not none.is_encrypted


@pytest.mark.parametrize("sort", ["signing", "encryption", "both"])
def test_records_of_processes_with_keys_have_a_mac(sort: str) -> None:
    """Of the signing keys, or of the encryption keys of a process that has no others."""
    of = {
        "signing": lambda *keys: Secrets.of(keys),
        "encryption": lambda *keys: Secrets.of(None, keys),
        "both": lambda *keys: Secrets.of(keys, THIRD),
    }[sort]
    record, raw = "a1/kinds/b2.json", b'{"kvx_kind":3}'
    found = of(OLD).mac(record, raw)
    expected = mac(OLD, b"kvx json", b"a1/kinds/b2.json\0" + raw).hex()
    digits = mac(OLD, b"kvx name", b"")[:8].hex()
    assert found == (f"a1/kinds/b2.{digits}.mac", expected)
    files = {found[0]: expected.encode()}
    assert of(OLD).check(record, raw, files.get)
    assert of(NEW, OLD).check(record, raw, files.get)
    assert of(NEW, OLD).mac_names(record)[1] == found[0]
    assert of(NEW, OLD).mac(record, raw) == of(NEW).mac(record, raw) != found
    assert not of(NEW).check(record, raw, files.get)
    assert not of(OLD).check(record, raw + b" ", files.get)
    assert not of(OLD).check(
        "a1/kinds/b3.json", raw, {f"a1/kinds/b3.{digits}.mac": expected.encode()}.get
    )
    assert not of(OLD).check(record, raw, {found[0]: b""}.get)
    assert Secrets().check(record, raw, {}.get)
    assert Secrets().mac(record, raw) is None
    assert Secrets().mac_names(record) == ()


def test_keys_that_are_none() -> None:
    for name, key in (("encryption_key", b"x" * 31), (r"encryption_key\[1\]", [NEW, b""])):
        with pytest.raises(
            InvalidArgumentError, match=rf"^{name} has .* bytes, expected at least "
        ):
            Secrets.of(None, key)
    with pytest.raises(InvalidArgumentError, match=r"^key\[1\] is 7, expected at least 32 bytes"):
        Secrets.of([NEW, 7])  # type: ignore[list-item]
    for key in ("x" * 32, [], bytearray(32), {NEW}, 7):
        with pytest.raises(InvalidArgumentError, match=r"encryption_key is .*, expected 32 bytes"):
            Secrets.of(None, key)  # type: ignore[arg-type]


def test_encryption_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'cryptography>=42'"):
        Secrets.of(None, NEW)


def test_macs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def note(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", note)
    assert not Secrets.of(NEW).check("a.json", b"{}", lambda name: b"0" * 64)
    assert len(compared) == 1

"""Encrypted stores: nothing readable on the disk, no file under another name, no other key."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_adapters.cli.doctor_store import check_store
from kvx_core import Directory, InvalidArgumentError, PrefixStore
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import CorruptError, Precision, StoreError
from kvx_core.stores.encrypted import Encrypted, Encryption
from kvx_core.stores.entries import Entries
from tests.core.test_stores import HEADS, LAYERS, Engine, files_of, save, store_in
from tests.test_store_command import kvx, listed

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
TOKENS = [i * 7 % 1009 for i in range(40)]  # chunks of 16, 16 and 8
HEAD, TAG = 28, 16


def encrypted(path: Path, key: bytes = KEY, **options: Any) -> PrefixStore:
    return store_in(Encrypted(Directory(path), Encryption(key)), **options)


def loaded(store: PrefixStore) -> int:
    """Loads what is found of TOKENS, checks it, and returns how many tokens that were."""
    match = store.lookup(TOKENS)
    engine = Engine(num_tokens=80, seed=1)
    if match.num_tokens:
        store.load(match, 0, match.num_tokens, engine.sections())
        engine.check(TOKENS, 0, match.num_tokens)
    return match.num_tokens


def key_file(path: Path, key: bytes = KEY) -> Path:
    path.write_bytes(key)
    path.chmod(0o600)
    return path


def test_what_is_stored_is_found_and_cannot_be_read(tmp_path: Path) -> None:
    plain, secret = tmp_path / "plain", tmp_path / "secret"
    save(store_in(plain), TOKENS)
    save(encrypted(secret), TOKENS)
    assert loaded(encrypted(secret)) == len(TOKENS)
    names = [path.relative_to(secret) for path in files_of(secret)]
    assert names == [path.relative_to(plain) for path in files_of(plain)]
    for name in names:
        raw, content = (secret / name).read_bytes(), (plain / name).read_bytes()
        assert len(raw) == len(content) + HEAD + TAG
        pieces = {content[i : i + 16] for i in range(len(content) - 16)}
        assert not any(raw[i : i + 16] in pieces for i in range(HEAD, len(raw) - 16))
        assert b"tokens" not in raw
    config = json.loads((secret / "kvx-store.json").read_text())
    assert config["format"] == "2 AES-256-GCM"
    assert KEY.hex() not in config["key_check"]


def test_a_nonce_is_used_once() -> None:
    cipher = Encryption(KEY)
    files = [b"".join(cipher.encrypt("a/b", b"the same")) for _ in range(100)]
    assert len({raw[16:28] for raw in files}) == len(set(files)) == 100
    assert {cipher.decrypt("a/b", raw) for raw in files} == {b"the same"}
    assert {raw[:16] for raw in files} == {files[0][:16]}


def test_every_byte_is_authenticated() -> None:
    cipher = Encryption(KEY)
    raw = b"".join(cipher.encrypt("a/b", b"some content"))
    for at in range(len(raw)):
        for bit in (0, 7):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            with pytest.raises(CorruptError):
                cipher.decrypt("a/b", changed)
    for wrong in (b"", raw[:HEAD], raw[:-1], raw + b"x", b"content in the clear, long enough" * 2):
        with pytest.raises(CorruptError):
            cipher.decrypt("a/b", wrong)
    with pytest.raises(CorruptError, match=r"^a/c cannot be decrypted: .* or it had another name$"):
        cipher.decrypt("a/c", raw)


PIECE = 4 << 20


@pytest.mark.parametrize("num_bytes", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 77])
def test_files_of_several_pieces(num_bytes: int) -> None:
    """They have to say in their first piece how long they are, as snapshots do; others need not."""
    cipher = Encryption(KEY)
    header = b'{"__metadata__":{"kvx_snapshot":"2","tokens":"0","bytes":"%d","digest":"' % (
        num_bytes - 4096
    )
    header += b"0" * 64 + b'",'
    content = (4088).to_bytes(8, "little") + header.ljust(4088)
    content += bytes(i * 7 % 251 for i in range(1009)) * (num_bytes // 1009 + 1)
    content = content[:num_bytes]
    raw = b"".join(cipher.encrypt("a/b", content))
    assert cipher.decrypt("a/b", raw) == content
    for at in (HEAD, HEAD + PIECE - 1, len(raw) - 1):
        changed = bytearray(raw)
        changed[at] ^= 1
        with pytest.raises(CorruptError):
            cipher.decrypt("a/b", changed)
    other = b"".join(cipher.encrypt("a/b", bytes(num_bytes)))
    if num_bytes <= PIECE:
        assert cipher.decrypt("a/b", other) == bytes(num_bytes)
    else:
        message = f"cannot be decrypted: .*, or it has {num_bytes} bytes of content, or it had"
        with pytest.raises(CorruptError, match=message):
            cipher.decrypt("a/b", other)


LARGE = 256 << 20


def num_read() -> int:
    """Bytes that this process has read until now."""
    (found,) = re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(found)


@pytest.mark.parametrize("kept", [HEAD, 5000, 1 << 20], ids=["28 bytes", "the header", "all"])
def test_what_a_writer_without_the_key_makes_large_is_not_read(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins as a good file does, and takes no disk: only its first piece is read."""
    save(encrypted(tmp_path), TOKENS)
    # Whatever a file of this name may have: tested below.
    monkeypatch.setattr(Entries, "_most_bytes", lambda self, file: 1 << 40, raising=False)
    store = encrypted(tmp_path)
    match = store.lookup(TOKENS)
    for path in files_of(tmp_path):
        path.write_bytes(path.read_bytes()[:kept])
        os.truncate(path, LARGE)
    before = num_read()
    with pytest.raises(CorruptError, match="cannot be decrypted"):
        store.load(match, 0, 40, Engine().sections())
    assert loaded(encrypted(tmp_path)) == 0
    assert num_read() - before < 4 * (PIECE + (1 << 20))
    assert files_of(tmp_path) == []


def test_a_name_says_how_long_a_file_can_be(tmp_path: Path) -> None:
    """Whoever knows what a file holds can change what the first piece of it says."""
    store = encrypted(tmp_path)
    save(store, TOKENS)
    limits = {}
    for path in files_of(tmp_path):
        file = store.finder.file(str(path.relative_to(tmp_path)))
        limits[path] = store._entries._most_bytes(file)
        assert len(path.read_bytes()) < limits[path]
        assert limits[path] < (1 << 20) + file.num_tokens * LAYERS * HEADS * (1 << 15)
    for path, limit in limits.items():
        os.truncate(path, limit + HEAD + TAG + 1)
    match = store.lookup(TOKENS)
    assert match.num_tokens == 0
    for path, limit in limits.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, limit + HEAD + TAG + 1)
        file = store.finder.file(str(path.relative_to(tmp_path)))
        message = f"has {limit + HEAD + TAG + 1} bytes, expected at most {limit + HEAD + TAG} "
        with (
            pytest.raises(CorruptError, match=message),
            store._entries.opened(file),
        ):
            pass


def test_no_memory_for_a_file_costs_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(encrypted(tmp_path), TOKENS)
    files = files_of(tmp_path)

    def full(*arguments: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", full)
        assert loaded(encrypted(tmp_path)) == 0
    assert files_of(tmp_path) == files
    assert loaded(encrypted(tmp_path)) == 40


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def as_of_another_key(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[8] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def in_the_clear(path: Path) -> None:
    root = next(up for up in path.parents if (up / "kvx-store.json").exists())
    name = str(path.relative_to(root))
    path.write_bytes(Encryption(KEY).decrypt(name, path.read_bytes()))


@pytest.mark.parametrize("damage", [flipped, as_of_another_key, cut, empty, in_the_clear])
def test_a_damaged_file_is_a_miss_and_stored_again(damage: Any, tmp_path: Path) -> None:
    save(encrypted(tmp_path), TOKENS)
    last = next(path for path in files_of(tmp_path) if loaded_without(tmp_path, path) == 32)
    damage(last)
    reader = encrypted(tmp_path)
    assert loaded(reader) == 32
    assert not last.exists()
    save(reader, TOKENS)
    assert loaded(reader) == len(TOKENS)


def loaded_without(root: Path, path: Path) -> int:
    """How many tokens are found without a file."""
    raw = path.read_bytes()
    path.unlink()
    found = loaded(encrypted(root))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return found


@pytest.mark.parametrize("num_bytes", [0, 27, 28, 43])
def test_a_file_too_short_to_be_encrypted(num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"KVXAES1\n".ljust(num_bytes, b"x")[:num_bytes])
    with (
        (tmp_path / "file").open("rb", buffering=0) as file,
        pytest.raises(CorruptError, match=r"^a/b is not encrypted, expected a file of an enc"),
    ):
        Encryption(KEY).opened("a/b", file, "shown")


def test_damage_after_the_lookup_fails_the_load(tmp_path: Path) -> None:
    save(encrypted(tmp_path), TOKENS)
    store = encrypted(tmp_path)
    match = store.lookup(TOKENS)
    for path in files_of(tmp_path):
        flipped(path)
    engine = Engine()
    with pytest.raises(CorruptError, match="cannot be decrypted"):
        store.load(match, 0, 40, engine.sections())
    engine.check(TOKENS, 0, 0)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    save(store, TOKENS)
    other = [token + 1 for token in TOKENS]
    save(store, other)
    files = files_of(tmp_path)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    assert loaded(encrypted(tmp_path)) == 0


def test_a_file_of_another_key_stays(tmp_path: Path) -> None:
    """Who made the directory anew meanwhile keeps what it stores."""
    save(encrypted(tmp_path), TOKENS)
    files = files_of(tmp_path)
    (tmp_path / "kvx-store.json").unlink()
    assert loaded(encrypted(tmp_path, OTHER)) == 0
    assert files_of(tmp_path) == files


@pytest.mark.parametrize(
    ("made", "opened", "expected"),
    [
        ({"key": KEY}, {}, "no key is given, and the store is encrypted, as "),
        ({"key": KEY}, {"key": OTHER}, "is given, and the store is encrypted with another key, "),
        ({}, {"key": KEY}, "an encryption key is given, and the store is not encrypted, as "),
    ],
)
def test_a_store_says_its_key(made: Any, opened: Any, expected: str, tmp_path: Path) -> None:
    def settings(name: str, key: bytes | None = None) -> StoreSettings:
        file = None if key is None else key_file(tmp_path / name, key)
        return StoreSettings(path=tmp_path / "store", encryption_key_file=file)

    def store(found: StoreSettings) -> PrefixStore:
        return found.store(
            fingerprint="model",
            num_layers=LAYERS,
            total_kv_heads=HEADS,
            precision=Precision.of(torch.float32),
        )

    writer = settings("writer", **made)
    save(store(writer), TOKENS)
    writer.check(writes=True)
    assert store(writer).lookup(TOKENS).num_tokens == 40
    files = files_of(tmp_path)
    reader = settings("reader", **opened)
    reader.check(writes=True)  # the settings alone are good: an engine runs without the store
    with pytest.raises(StoreError, match=re.escape(expected)):
        store(reader)
    assert files_of(tmp_path) == files


def test_keys_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StoreSettings(path=tmp_path / "store", encryption_key_variable="KVX_TEST_KEY")
    message = "encryption_key_variable is 'KVX_TEST_KEY', an environment variable that is not set, "
    with pytest.raises(InvalidArgumentError, match=message):
        settings.check(writes=True)
    monkeypatch.setenv("KVX_TEST_KEY", "x" * 31)
    with pytest.raises(InvalidArgumentError, match="that is of 31 bytes, expected at least 32 "):
        settings.check(writes=True)
    monkeypatch.setenv("KVX_TEST_KEY", "ab" * 32)
    settings.check(writes=True)
    both = StoreSettings(
        path=tmp_path / "store",
        encryption_key_variable="KVX_TEST_KEY",
        encryption_key_file=key_file(tmp_path / "key"),
    )
    with pytest.raises(InvalidArgumentError, match="are set, expected one of them"):
        both.check(writes=True)
    missing = StoreSettings(path=tmp_path, encryption_key_file=tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match=r"^encryption_key_file .*none cannot be read: "):
        missing.check(writes=True)


def test_the_command(tmp_path: Path) -> None:
    path, key = tmp_path / "store", key_file(tmp_path / "key")
    save(encrypted(path), TOKENS)
    given = ("--encryption-key-file", key)
    (space,) = listed(path)
    assert (space["model"], space["num_tokens"]) == (None, 40)
    assert listed(path, *given)[0]["model"] == "model"
    assert json.loads(kvx("stat", path, "--json").stdout)["num_files"] == 3
    said = kvx("verify", path, "--delete", code=1).stdout
    assert "is encrypted. Give its key: --encryption-key-file" in said
    assert "3 cannot be judged here: they stay." in said
    assert kvx("verify", path, *given).stdout == "3 of 3 files are good.\n"
    flipped(files_of(path)[0])
    said = kvx("verify", path, *given, code=1).stdout
    assert re.search("cannot be decrypted: its bytes have changed", said)
    other = key_file(tmp_path / "other", OTHER)
    said = kvx("verify", path, "--encryption-key-file", other, code=2).stderr
    assert "the store is encrypted with another key" in re.sub(r"\s+", " ", said)
    assert kvx("rm", path, "--salt", "", code=1).stdout.startswith("Deleted 0 files")
    assert kvx("rm", path, "--model", space["space"]).stdout.startswith("Deleted 3 files")


def test_the_doctor(tmp_path: Path) -> None:
    save(encrypted(tmp_path), TOKENS)
    checks = {check.name: check.text for check in check_store(tmp_path)}
    assert "reads it; encrypted with AES-256-GCM; chunks of 16 tokens" in checks["format"]
    assert checks["entries"].endswith("; 3 files are encrypted, and were not read")

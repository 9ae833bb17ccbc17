"""Encrypted stores: nothing readable on the disk, no file under another name, no other key.

What the files are: test_chunk_file.py. What the store says: test_config.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx_adapters.cli.doctor_store import check_store
from kvx_core import InvalidArgumentError, PrefixStore
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import CorruptError
from kvx_core.snapshot.sealing import Sealing
from tests.stores.engine import Engine, save, store_in
from tests.stores.test_prefix import files_of

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
TOKENS = [i * 7 % 1009 for i in range(40)]  # chunks of 16, 16 and 8


def encrypted(path: Path, key: bytes = KEY, **options: Any) -> PrefixStore:
    return store_in(path, encryption_key=key, **options)


def loaded(store: PrefixStore) -> int:
    """Loads what is found of TOKENS, checks it, and returns how many tokens that were."""
    match = store.lookup(TOKENS)
    engine = Engine(num_tokens=80, seed=1)
    if match.num_tokens:
        store.load(match, 0, match.num_tokens, engine.sections())
        engine.check(TOKENS, 0, match.num_tokens)
    return match.num_tokens


def mark_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.mark"))


def windows(raw: bytes) -> set[bytes]:
    return {raw[i : i + 16] for i in range(len(raw) - 16)}


def test_what_is_stored_is_found_and_cannot_be_read(tmp_path: Path) -> None:
    """Neither keys and values, nor tokens, which are in marks, too."""
    plain, secret = tmp_path / "plain", tmp_path / "secret"
    save(store_in(plain), TOKENS)
    save(encrypted(secret), TOKENS)
    assert loaded(encrypted(secret)) == len(TOKENS)
    keys = [[path.name[:64] for path in files_of(root)] for root in (plain, secret)]
    assert keys[0] == keys[1]
    ids = windows(np.array(TOKENS, "<i8").tobytes())
    data = {each for path in files_of(plain) for each in windows(path.read_bytes()[4096:])}
    for path in (*files_of(secret), *mark_files(secret)):
        raw = path.read_bytes()
        assert not windows(raw[4096:]) & data
        digits = re.findall(rb'"kvx":"([0-9a-f]+)"', raw)
        record = bytes.fromhex(digits[0].decode()) if digits else raw
        assert not windows(record) & ids
    assert len(mark_files(secret)) == len(mark_files(plain)) > 0
    for path in secret.rglob("*.json"):
        assert KEY not in path.read_bytes()
        assert KEY.hex().encode() not in path.read_bytes()


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def in_the_clear(path: Path) -> None:
    """The file that a store without the key has of the same tokens."""
    root = path.parent.parent.parent
    shutil.rmtree(root.parent / "clear", ignore_errors=True)
    save(store_in(root.parent / "clear"), TOKENS)
    (other,) = (
        each for each in files_of(root.parent / "clear") if each.name[:64] == path.name[:64]
    )
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [cut, empty, in_the_clear])
def test_a_damaged_file_is_a_miss_and_stored_again(damage: Any, tmp_path: Path) -> None:
    root = tmp_path / "store"
    save(encrypted(root), TOKENS)
    last = next(path for path in files_of(root) if loaded_without(root, path) == 32)
    damage(last)
    reader = encrypted(root)
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


def test_damaged_data_fails_the_load_and_is_stored_again(tmp_path: Path) -> None:
    """A lookup decrypts records alone: only the load finds it."""
    save(encrypted(tmp_path), TOKENS)
    store = encrypted(tmp_path)
    for path in files_of(tmp_path):
        flipped(path)
    match = store.lookup(TOKENS)
    assert match.num_tokens == 40
    engine = Engine()
    with pytest.raises(CorruptError, match="have changed since they were written"):
        store.load(match, 0, 40, engine.sections())
    engine.check(TOKENS, 0, 0)
    assert files_of(tmp_path) == []
    save(store, TOKENS)
    assert loaded(store) == 40


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    save(store, TOKENS)
    save(store, [token + 1 for token in TOKENS])
    files = files_of(tmp_path)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    assert loaded(encrypted(tmp_path)) == 0


def test_a_file_of_another_key_stays(tmp_path: Path) -> None:
    """Who made the directory anew meanwhile keeps what it stores."""
    save(encrypted(tmp_path), TOKENS)
    files = files_of(tmp_path)
    for path in tmp_path.glob("kvx-store*"):
        path.unlink()
    assert loaded(encrypted(tmp_path, OTHER)) == 0
    assert files_of(tmp_path) == files


def test_no_memory_for_a_file_costs_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(encrypted(tmp_path), TOKENS)
    files = files_of(tmp_path)

    def full(*arguments: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Sealing, "opened_record", full)
        assert loaded(encrypted(tmp_path)) == 0
    assert files_of(tmp_path) == files
    assert loaded(encrypted(tmp_path)) == 40


def key_file(path: Path, key: bytes = KEY) -> Path:
    path.write_bytes(key)
    path.chmod(0o600)
    return path


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
        encryption_key_files=(key_file(tmp_path / "key"),),
    )
    with pytest.raises(InvalidArgumentError, match="are set, expected one of them"):
        both.check(writes=True)
    missing = StoreSettings(path=tmp_path, encryption_key_files=(tmp_path / "none",))
    with pytest.raises(InvalidArgumentError, match=r"none cannot be read: "):
        missing.check(writes=True)


def test_the_doctor(tmp_path: Path) -> None:
    save(encrypted(tmp_path), TOKENS)
    checks = {check.name: check.text for check in check_store(tmp_path)}
    assert "chunks of 16 tokens" in checks["format"]
    assert "encrypted" in checks["format"]

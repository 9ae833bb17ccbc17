"""Encrypted stores: nothing readable on the disk, no file under another name, no other key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvx_adapters.cli.doctor_store import check_store
from kvx_core import InvalidArgumentError, PrefixStore
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import CorruptError, Precision, StoreError
from kvx_core.snapshot.signing import Key
from tests.core.test_stores import HEADS, LAYERS, Engine, files_of, save, store_in
from tests.test_store_command import kvx, listed

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
TOKENS = [10**12 + i * 7 % 1009 for i in range(40)]  # chunks of 16, 16 and 8


def encrypted(path: Path, *keys: bytes, **options: Any) -> PrefixStore:
    return store_in(path, encryption_key=keys or KEY, **options)


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


def pieces_of(content: bytes) -> set[bytes]:
    """Every 16 bytes that are at least four different ones."""
    pieces = (content[i : i + 16] for i in range(len(content) - 15))
    return {piece for piece in pieces if len(set(piece)) > 3}


def test_what_is_stored_is_found_and_cannot_be_read(tmp_path: Path) -> None:
    """Neither tokens nor values, in entries or marks, as bytes or in hex."""
    plain, secret = tmp_path / "plain", tmp_path / "secret"
    save(store_in(plain), TOKENS)
    save(encrypted(secret), TOKENS)
    assert loaded(encrypted(secret)) == loaded(store_in(plain)) == len(TOKENS)
    keys = [[path.name.partition(".")[0] for path in files_of(root)] for root in (plain, secret)]
    assert keys[0] == keys[1]
    values = {p for path in files_of(plain) for p in pieces_of(path.read_bytes()[4096:])}
    tokens = np.array(TOKENS, "<i8").tobytes()
    ids = {tokens[i : i + 8] for i in range(0, len(tokens), 8)}
    assert all(any(id.hex().encode() in p.read_bytes() for p in files_of(plain)) for id in ids)
    found = [path for path in secret.rglob("*") if path.is_file()]
    assert {path.suffix for path in found} == {".json", ".mac", ".mark", ".safetensors"}
    for path in found:
        raw = path.read_bytes()
        assert not any(id in raw or id.hex().encode() in raw for id in ids)
        assert not pieces_of(raw) & values
    config = json.loads((secret / "kvx-store.json").read_text())
    assert config == {"format": 3, "chunk_tokens": 16, "encryption": "AES-256-GCM"}


def test_the_same_tokens_are_never_the_same_bytes(tmp_path: Path) -> None:
    """Each file has a key of its own: else two nonces were the same."""
    files = []
    for i in range(2):
        save(encrypted(tmp_path / str(i)), TOKENS)
        files += [path.read_bytes() for path in files_of(tmp_path / str(i))]
    assert not pieces_of(files[0][4096:]) & pieces_of(files[3][4096:])


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def of_another_key(path: Path) -> None:
    raw = path.read_bytes()
    own, other = (Key(key).id.to_bytes(8, "little").hex().encode() for key in (KEY, OTHER))
    assert own in raw
    path.write_bytes(raw.replace(own, other))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def in_the_clear(path: Path) -> None:
    """As a store without a key has it."""
    key = path.name.partition(".")[0]
    save(store_in(path.parents[2].parent / "plain"), TOKENS)
    (plain,) = (path.parents[2].parent / "plain").rglob(f"{key}.*.safetensors")
    path.write_bytes(plain.read_bytes())


@pytest.mark.parametrize("damage", [flipped, of_another_key, cut, empty, in_the_clear])
def test_a_damaged_file_is_a_miss_and_stored_again(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    save(encrypted(root), TOKENS)
    last = next(path for path in files_of(root) if loaded_without(root, path) == 32)
    damage(last)
    reader = encrypted(root)
    if damage is flipped:  # the last byte is one of values, which a lookup does not read
        with pytest.raises(CorruptError, match="have changed since they were written"):
            loaded(reader)
    assert loaded(reader) == 32
    assert last.exists() == (damage is of_another_key)  # whose it may be
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


def test_damage_after_the_lookup_fails_the_load(tmp_path: Path) -> None:
    save(encrypted(tmp_path), TOKENS)
    store = encrypted(tmp_path)
    match = store.lookup(TOKENS)
    for path in files_of(tmp_path):
        flipped(path)
    engine = Engine()
    with pytest.raises(CorruptError, match="have changed since they were written"):
        store.load(match, 0, 40, engine.sections())
    engine.check(TOKENS, 0, 0)


LARGE = 1 << 40


def num_read() -> int:
    """Bytes that this process has read until now."""
    (found,) = re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(found)


@pytest.mark.parametrize("kept", [0, 28, 5000, 1 << 20])
def test_what_a_writer_without_the_key_makes_large_is_not_read(kept: int, tmp_path: Path) -> None:
    """It begins as a good file does, and takes no disk."""
    save(encrypted(tmp_path), TOKENS)
    store = encrypted(tmp_path)
    match = store.lookup(TOKENS)
    for path in files_of(tmp_path):
        path.write_bytes(path.read_bytes()[:kept])
        os.truncate(path, LARGE)
    before = num_read()
    with pytest.raises(CorruptError, match=f"has {LARGE} bytes, expected"):
        store.load(match, 0, 40, Engine().sections())
    assert loaded(encrypted(tmp_path)) == 0
    assert num_read() - before < 1 << 20
    assert files_of(tmp_path) == []


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
    for path in tmp_path.glob("kvx-store.*"):
        path.unlink()
    assert loaded(encrypted(tmp_path, OTHER)) == 0
    assert files_of(tmp_path) == files


@pytest.mark.parametrize(
    ("made", "opened", "expected"),
    [
        ([KEY], None, "no encryption key is given, and the store is encrypted, as "),
        ([KEY], [OTHER], "kvx-store.json is not authenticated by the encryption key that is given"),
        (None, [KEY], "an encryption key is given, and the store is not encrypted, as "),
    ],
)
def test_a_store_says_its_key(
    made: list[bytes] | None, opened: list[bytes] | None, expected: str, tmp_path: Path
) -> None:
    writer, reader = settings(tmp_path, made), settings(tmp_path, opened)
    save(store_of(writer), TOKENS)
    writer.check(writes=True)
    assert store_of(writer).lookup(TOKENS).num_tokens == 40
    files = files_of(tmp_path)
    reader.check(writes=True)  # the settings alone are good: an engine runs without the store
    with pytest.raises(StoreError, match=re.escape(expected)):
        store_of(reader)
    assert files_of(tmp_path) == files


def settings(path: Path, keys: list[bytes] | None) -> StoreSettings:
    """With keys in files: the one that writes first."""
    files = [key_file(path / f"key-{key[0]}", key) for key in keys or ()]
    return StoreSettings(path=path / "store", encryption_key_files=files or None)  # type: ignore[arg-type]


def store_of(found: StoreSettings) -> PrefixStore:
    return found.store(
        fingerprint="model",
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=Precision.of(torch.float32),
    )


def test_keys_of_settings_change_while_engines_run(tmp_path: Path) -> None:
    save(store_of(settings(tmp_path, [KEY])), TOKENS)
    for keys in ([KEY, OTHER], [OTHER, KEY]):
        assert loaded(store_of(settings(tmp_path, keys))) == 40
    (tmp_path / f"key-{KEY[0]}").unlink()
    store = store_of(settings(tmp_path, [OTHER]))
    assert loaded(store) == 0
    save(store, TOKENS)
    assert loaded(store_of(settings(tmp_path, [OTHER]))) == 40


def test_key_files_are_one_or_several(tmp_path: Path) -> None:
    one = key_file(tmp_path / "one")
    for given in (one, str(one), [one], [str(one)], (one,)):
        for field in ("key_files", "encryption_key_files"):
            found = StoreSettings.model_validate({"path": tmp_path, field: given})
            assert getattr(found, field) == (one,)
    for wrong in ([], (), 7, {"a": 1}, [7], [[one]]):
        with pytest.raises(ValueError, match="key_files"):
            StoreSettings.model_validate({"path": tmp_path, "key_files": wrong})
    with pytest.raises(ValueError, match=r"expected a path, or a list of them: \[new, old\]"):
        StoreSettings.model_validate({"path": tmp_path, "encryption_key_files": []})
    missing = StoreSettings.model_validate({"path": tmp_path, "key_files": [one, "none"]})
    with pytest.raises(InvalidArgumentError, match=r"^key_files none cannot be read: "):
        missing.check(writes=True)


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
    save(store_of(settings), TOKENS)
    assert loaded(encrypted(tmp_path / "store", b"ab" * 32, chunk_tokens=None)) == 40
    both = settings.model_copy(update={"encryption_key_files": (key_file(tmp_path / "key"),)})
    with pytest.raises(InvalidArgumentError, match="are set, expected one of them"):
        both.check(writes=True)
    missing = StoreSettings(path=tmp_path, encryption_key_files=(tmp_path / "none",))
    with pytest.raises(
        InvalidArgumentError, match=r"^encryption_key_files .*none cannot be read: "
    ):
        missing.check(writes=True)


def test_the_command(tmp_path: Path) -> None:
    path, key = tmp_path / "store", key_file(tmp_path / "key")
    save(encrypted(path), TOKENS)
    (space,) = listed(path)
    assert (space["model"], space["num_tokens"]) == ("model", 40)
    assert json.loads(kvx("stat", path, "--json").stdout)["num_entries"] == 3
    given = ("--encryption-key-file", key)
    said = kvx("verify", path, "--delete", code=1).stdout
    assert "cannot be judged here: they stay. Give --encryption-key-file" in said
    assert re.fullmatch(r"(\d+) of \1 files are good\.\n", kvx("verify", path, *given).stdout)
    other = key_file(tmp_path / "other", OTHER)
    kvx("verify", path, *given, "--encryption-key-file", other)
    said = kvx("verify", path, "--encryption-key-file", other, "--delete", code=2).stderr
    assert "is not authenticated by the encryption key that is given" in re.sub(r"\s+", " ", said)
    flipped(files_of(path)[0])
    said = kvx("verify", path, *given, code=1).stdout
    assert re.search("have changed since they were written", said)
    assert kvx("rm", path, "--model", space["space"]).stdout.startswith("Deleted ")
    assert files_of(path) == []


def test_the_doctor(tmp_path: Path) -> None:
    save(encrypted(tmp_path), TOKENS)
    checks = {check.name: check.text for check in check_store(tmp_path)}
    assert "reads it; encrypted with AES-256-GCM; chunks of 16 tokens" in checks["format"]
    assert "entries" in checks

"""Signed stores: files not signed with the reader's key are neither loaded nor deleted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvx_core import InvalidArgumentError, Snapshot, StoreError
from kvx_core.snapshot import UnsignedError, read_key
from kvx_core.snapshot.secrets import Key
from kvx_core.stores.space import SpaceRecord
from tests.caches import assert_same_bytes
from tests.stores.engine import HEADS, LAYERS, Engine, save, store_in
from tests.stores.test_prefix import files_of

KEY, OTHER = b"k" * 32, b"o" * 32
TOKENS = range(20)


def test_a_key_finds_what_was_signed_with_it_and_nothing_else(tmp_path: Path) -> None:
    """Engines with a key and engines without one share a directory, and no file."""
    for key in (KEY, None):
        save(store_in(tmp_path, key=key), TOKENS)
    assert len(files_of(tmp_path)) == 4
    for key in (KEY, None):
        store, engine = store_in(tmp_path, key=key), Engine(seed=1)
        match = store.lookup(TOKENS)
        store.load(match, 0, 20, engine.sections())
        engine.check(TOKENS, 0, 20)
        ids = {name.split(".")[1] for span in match.spans for name in span.names}
        (kind,) = (json.loads((tmp_path / kinds_of(id)).read_text()) for id in ids)
        assert kind["keyed"] is (key is not None)
    with pytest.raises(StoreError, match=r"is not authenticated by the signing key that is given"):
        store_in(tmp_path, key=OTHER)


def kinds_of(id: str) -> str:
    return f"{SpaceRecord('model', (HEADS,) * LAYERS).name}/kinds/{id}.json"


def unsigned(raw: bytes, path: Path) -> bytes:
    """The file of the same entry in a store without keys."""
    return files_in("plain", path).read_bytes()


def of_another_key(raw: bytes, path: Path) -> bytes:
    return files_in("other", path).read_bytes()


def of_another_key_under_the_name_of_this_one(raw: bytes, path: Path) -> bytes:
    return of_another_key(raw, path).replace(hex_id(OTHER), hex_id(KEY))


def of_another_entry(raw: bytes, path: Path) -> bytes:
    return next(p for p in files_of(path.parents[2]) if p != path).read_bytes()


def with_other_values(raw: bytes, path: Path) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


FORGED = [
    *(unsigned, of_another_key, of_another_key_under_the_name_of_this_one),
    *(of_another_entry, with_other_values),
]


def files_in(store: str, path: Path) -> Path:
    """The file of the same tokens in a store beside."""
    key = path.name.partition(".")[0]
    return next((path.parents[3] / store).rglob(f"{key}.*.safetensors"))


def hex_id(key: bytes) -> bytes:
    return Key(key).id.to_bytes(8, "little").hex().encode()


@pytest.mark.parametrize("forge", FORGED)
def test_a_file_that_is_not_signed_with_the_key_is_no_file(
    forge: Callable[[bytes, Path], bytes], tmp_path: Path
) -> None:
    """Somebody puts files where those of a store with a key belong. All of them are well formed,
    as somebody without the key can make them.
    """
    for name, key in (("store", KEY), ("plain", None), ("other", OTHER)):
        save(store_in(tmp_path / name, key=key), TOKENS)
    root = tmp_path / "store"
    store, engine = store_in(root, key=KEY), Engine(seed=1)
    match = store.lookup(TOKENS)
    assert match.num_tokens == 20
    before = engine.cache.clone()
    forged = {path: forge(path.read_bytes(), path) for path in files_of(root)}
    for path, raw in forged.items():
        path.write_bytes(raw)
    with pytest.raises(StoreError):
        store.load(match, 0, 20, engine.sections())
    for path, raw in forged.items():  # a load deletes what is corrupt
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    reader = store_in(root, key=KEY)
    match = reader.lookup(TOKENS)
    if match.num_tokens:
        assert forge is with_other_values  # which a lookup does not read
        with pytest.raises(StoreError):
            reader.load(match, 0, 20, engine.sections())
    assert_same_bytes(engine.cache, before)
    # What names the key of others stays: it may be theirs. It is replaced by the next save.
    assert [p for p in files_of(root) if p in forged] == (
        list(forged) if forge is of_another_key else []
    )
    save(reader, TOKENS)
    assert store_in(root, key=KEY).lookup(TOKENS).num_tokens == 20


def test_records_that_nobody_with_a_key_has_written_are_not_taken(tmp_path: Path) -> None:
    """A kind decides what the bytes of a file mean: a forged one would change them."""
    save(store_in(tmp_path, key=KEY), TOKENS)
    macs = sorted(tmp_path.rglob("*.mac"))
    assert len(macs) == 3  # of the store, of the space and of the kind
    kind = next(path for path in macs if path.parent.name == "kinds")
    good = kind.read_bytes()
    for wrong in (b"", b"0" * 64, good + b"0", None):
        if wrong is None:
            kind.unlink()
        else:
            kind.write_bytes(wrong)
        assert store_in(tmp_path, key=KEY).lookup(TOKENS).num_tokens == 0
    save(store_in(tmp_path, key=KEY), TOKENS)  # mends it, though all entries are there
    assert kind.read_bytes() == good
    assert store_in(tmp_path, key=KEY).lookup(TOKENS).num_tokens == 20
    record = kind.parent / next(p.name for p in kind.parent.glob("*.json"))
    record.write_bytes(record.read_bytes().replace(b'"heads":[0,4]', b'"heads":[0,3]'))
    assert store_in(tmp_path, key=KEY).lookup(TOKENS).num_tokens == 0


def test_a_reader_without_a_key_takes_no_signed_file(tmp_path: Path) -> None:
    snapshot = Snapshot.capture(TOKENS, Engine().sections())
    assert snapshot is not None
    snapshot.save(tmp_path / "file", key=KEY)
    with pytest.raises(UnsignedError, match="is signed, and this process has no key"):
        Snapshot.open(tmp_path / "file")
    with Snapshot.open(tmp_path / "file", key=KEY) as file:
        assert file.read(file.header.layers).tensors


def test_keys_are_long_and_in_files_of_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    assert read_key(path) == KEY
    path.chmod(0o400)
    assert read_key(path) == KEY
    for mode in (0o640, 0o604, 0o660, 0o644):
        path.chmod(mode)
        with pytest.raises(InvalidArgumentError, match=rf"has mode {mode:04o}, .* chmod 600"):
            read_key(path)
    path.chmod(0o600)
    if os.geteuid() == 0:  # of any other user than root: who else knows it, or has chosen it?
        os.chown(path, 65534, -1)
        with pytest.raises(
            InvalidArgumentError, match=r"belongs to user 65534, expected 0, .* chown "
        ):
            read_key(path)
        os.chown(path, 0, -1)
    for content, message in (
        (b"short", "has 5 bytes, expected 32 to 4096. Make it with"),
        (b"x" * 4097, "has more than 4096 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=message):
            read_key(path)
    with pytest.raises(InvalidArgumentError, match=r"none cannot be read: .* Make it with"):
        read_key(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidArgumentError, match="is no regular file"):
            read_key(other)
    with pytest.raises(InvalidArgumentError, match="key has 5 bytes, expected at least 32"):
        store_in(tmp_path, key=b"short")

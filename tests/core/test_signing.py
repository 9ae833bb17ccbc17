"""Signed stores: files not signed with the reader's key are neither loaded nor deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvx_core import InvalidArgumentError, Snapshot, StoreError
from kvx_core.snapshot import UnsignedError, read_key
from tests.caches import assert_same_bytes
from tests.core.test_stores import Engine, files_of, save, store_in
from tests.hostile import hostile_files

KEY, OTHER = b"k" * 32, b"o" * 32
TOKENS = range(20)


def test_a_key_finds_what_was_signed_with_it_and_nothing_else(tmp_path: Path) -> None:
    for key in (None, KEY):
        save(store_in(tmp_path, key=key), TOKENS)
    assert len(files_of(tmp_path)) == 4
    assert [store_in(tmp_path, key=k).lookup(TOKENS).num_tokens for k in (None, KEY, OTHER)] == [
        20,
        20,
        0,
    ]
    store, engine = store_in(tmp_path, key=KEY), Engine(seed=1)
    store.load(store.lookup(TOKENS), 0, 20, engine.sections())
    engine.check(TOKENS, 0, 20)


def test_a_file_without_the_right_signature_stays(tmp_path: Path) -> None:
    """Somebody puts files where those with a key belong: good ones, of others and of nobody."""
    store, engine = store_in(tmp_path, key=KEY), Engine(seed=1)
    save(store, TOKENS)
    match = store.lookup(TOKENS)
    paths = [tmp_path / name for span in match.spans for name in span.names]
    for key in (None, OTHER):
        for path in paths:
            with Snapshot.open(path, key=KEY) as file:
                whole = file.read(file.header.layers)
                tokens = file._read(["tokens"], None)
            forged = tokens_and(whole, tokens)
            forged.save(path, key=key)
        assert store_in(tmp_path, key=KEY).lookup(TOKENS).num_tokens == 0
        before = engine.cache.clone()
        with pytest.raises(UnsignedError, match="is not signed with the key of this reader"):
            store.load(match, 0, 20, engine.sections())
        assert_same_bytes(engine.cache, before)
        assert all(path.exists() for path in paths)
        for path in paths:
            path.unlink()
        save(store, TOKENS)


def tokens_and(whole: Snapshot, tokens: Snapshot) -> Snapshot:
    """All tensors of a file in one memory, as `save` wants them."""
    from dataclasses import replace

    import numpy as np

    assert whole.memory is not None
    assert tokens.memory is not None
    at = len(whole.memory)
    moved = replace(tokens.tensors["tokens"], offset=at)
    memory = np.concatenate([whole.memory, tokens.memory])
    return replace(whole, tensors={**whole.tensors, "tokens": moved}, memory=memory)


def test_a_reader_without_a_key_takes_no_signed_file(tmp_path: Path) -> None:
    snapshot = Snapshot.capture(TOKENS, Engine().sections())
    assert snapshot is not None
    snapshot.save(tmp_path / "file", key=KEY)
    with pytest.raises(UnsignedError, match="is signed, and this reader has no key"):
        Snapshot.open(tmp_path / "file")
    with Snapshot.open(tmp_path / "file", key=KEY) as file:
        assert file.read(file.header.layers).tensors


def test_no_byte_of_a_signed_file_can_be_forged(tmp_path: Path) -> None:
    """Every hostile file that an attacker can make of an unsigned one, and changes of a signed."""
    store, tokens = store_in(tmp_path, key=KEY), range(5)
    plain = store_in(tmp_path / "plain")
    save(plain, tokens)
    save(store, tokens)
    path = next(p for p in files_of(tmp_path) if "plain" not in p.parts)
    unsigned, signed = files_of(tmp_path / "plain")[0].read_bytes(), path.read_bytes()
    match, engine = store.lookup(tokens), Engine(seed=1)
    before = engine.cache.clone()
    files = [*hostile_files(unsigned, header_limit=1 << 17, mutations=0)]
    files = [file for i, file in enumerate(files) if i % 10 == 0 or "forged" in file[0]]
    assert any(name.startswith("forged") for name, _ in files)
    first = 8 + int.from_bytes(signed[:8], "little")
    for at in (*range(first, len(signed), 511), first, len(signed) - 1):
        files.append((f"byte {at}", signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]))
    for name, data in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if store_in(tmp_path, key=KEY).lookup(tokens).num_tokens:
            assert name.startswith("byte "), (
                name
            )  # of keys and values, which a lookup does not read
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        with pytest.raises(StoreError):
            store.load(match, 0, 5, engine.sections())
    assert_same_bytes(engine.cache, before)


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

"""Checks of a snapshot's file: XXH3, or BLAKE2b with a key, and what later versions may have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_digest

from kvx_core import CacheDesc, CacheFacts, CacheView, Snapshot, describe
from kvx_core.snapshot import CorruptError, Section, StoreError, UnsignedError
from tests.snapshot import store_reader
from tests.snapshot_files import SnapshotFile, kind_in, rewritten, with_row

FACTS = CacheFacts(fingerprint="m", rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0)
KEY = bytes(range(32))


@pytest.fixture
def snapshot() -> Snapshot:
    k, v = torch.randn(2, 1, 9, 3, 8)
    view = CacheView(
        (CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")),), FACTS, dense=True
    )
    found = Snapshot.capture(range(9), [Section((0,), view, None)])
    assert found is not None
    return found


KEYS = [None, KEY]


@pytest.mark.parametrize("key", KEYS)
def test_every_changed_byte_is_noticed(
    key: bytes | None, snapshot: Snapshot, tmp_path: Path
) -> None:
    """In all of the file; every bit of some bytes."""
    path = tmp_path / "file"
    snapshot.save(path, key=key)
    read = Snapshot.open(path, key=key).read([0])
    np.testing.assert_array_equal(read.array("layers.0.v"), snapshot.array("layers.0.v"))
    good, dice = path.read_bytes(), random.Random(1)
    first = 8 + int.from_bytes(good[:8], "little")
    assert first + 2 * 9 * 3 * 8 * 4 == len(good)
    text = len(good[:first].rstrip())
    places = [*range(0, text, 3), *dice.sample(range(text, first), 50)]
    for at in [*places, *range(first, len(good), 7), len(good) - 1]:
        for bit in range(8) if at % 100 == 0 else [dice.randrange(8)]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            if at >= first:
                with pytest.raises(CorruptError, match=r"the bytes of layers\.0\.k, layers\.0\.v"):
                    Snapshot.open(path, key=key).read([0])
                continue
            with pytest.raises((CorruptError, UnsignedError)):
                Snapshot.open(path, key=key)


def test_checks_are_as_the_page_says(snapshot: Snapshot, tmp_path: Path) -> None:
    for key in KEYS:
        snapshot.save(tmp_path / "file", key=key)
        raw = (tmp_path / "file").read_bytes()
        file = SnapshotFile.of(raw, key)
        (check,), (size,) = file.checks, file.sizes
        assert size == len(file.data)
        plain = xxh3_128_digest(file.data)
        assert check == (store_reader.mac(key, b"kvx piece", file.data) if key else plain)
        assert file.laid_out().bytes() == raw
        found = store_reader.read(raw, None, signing=key)
        assert found.tokens == list(range(9))
        for name, tensor in found.tensors.items():
            assert tensor.data == snapshot.array(name).tobytes()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"crc": 1}, "crc"),
        ({"groups": 1, "facts": {"rotation": 1}}, "the fact rotation"),
        ({"dtype": "F6_E3M2"}, "F6_E3M2"),
        ({"coding": "lossless_f16"}, "layers.0.k in lossless_f16"),
    ],
)
def test_a_word_of_a_later_version_is_no_damage(
    change: dict[str, Any], word: str, snapshot: Snapshot, tmp_path: Path
) -> None:
    """A corrupt file is deleted, and this one is good."""
    path = tmp_path / "file"
    snapshot.save(path)
    kind = kind_in(path)
    if "facts" in change:
        kind["groups"][0]["facts"] |= change["facts"]
    elif "crc" in change:
        kind |= change
    else:
        kind = with_row(kind, "layers.0.k", **change)
    with pytest.raises(StoreError, match=f"has {word}, which this version of KVX") as error:
        Snapshot.open(rewritten(path, kind))
    assert not isinstance(error.value, CorruptError)


@pytest.mark.parametrize("check", [bytes(16), b"\xff" * 16])
def test_a_check_that_is_none(check: bytes, snapshot: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshot.save(path)
    file = SnapshotFile.of(path.read_bytes())
    file.checks = [check]
    path.write_bytes(file.bytes())
    with pytest.raises(CorruptError, match="have changed"):
        Snapshot.open(path).read([0])


def test_files_of_format_2_are_refused_with_a_sentence(tmp_path: Path) -> None:
    text = b'{"__metadata__":{"kvx_snapshot":"2","tokens":"9","bytes":"72","digest":"'
    (tmp_path / "file").write_bytes((200).to_bytes(8, "little") + text.ljust(272))
    with pytest.raises(
        StoreError, match=r"file is a snapshot of format 2, .* expected format 3\. Capture it again"
    ) as error:
        Snapshot.open(tmp_path / "file")
    assert not isinstance(error.value, CorruptError)

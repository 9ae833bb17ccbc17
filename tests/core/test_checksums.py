"""Checksums of files: XXH3, CRC-32 of earlier versions, and those that later versions may have."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_hexdigest

from kvx_core import CacheDesc, CacheFacts, CacheView, Snapshot, describe
from kvx_core.snapshot import CorruptError, Section, StoreError
from tests.hostile import raw_file

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


def change(path: Path, edit: Callable[[dict[str, Any], bytes, dict[str, Any]], None]) -> None:
    """Rewrites the header of a file, with a right seal: edit(its text, the data, its entries)."""
    raw = path.read_bytes()
    first = 8 + int.from_bytes(raw[:8], "little")
    entries, data = json.loads(raw[8:first]), raw[first:]
    metadata = entries.pop("__metadata__")
    text = json.loads(metadata["header"])
    edit(text, data, entries)
    metadata["header"] = json.dumps(text)
    header = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":"))
    path.write_bytes(raw_file(header.encode(), data))


def as_crc32(text: dict[str, Any], data: bytes, entries: dict[str, Any]) -> None:
    del text["checksum"]
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        assert text["checksums"][name] == xxh3_128_hexdigest(data[begin:end])
        text["checksums"][name] = f"{zlib.crc32(data[begin:end]):08x}"


@pytest.mark.parametrize("is_old", [False, True])
def test_every_changed_byte_is_noticed(snapshot: Snapshot, tmp_path: Path, is_old: bool) -> None:
    path = tmp_path / "file"
    snapshot.save(path)
    if is_old:
        change(path, as_crc32)
    read = Snapshot.open(path).read([0])
    np.testing.assert_array_equal(read.array("layers.0.v"), snapshot.array("layers.0.v"))
    good = path.read_bytes()
    num_bytes = sum(snapshot.tensors[f"layers.0.{kind}"].num_bytes for kind in "kv")
    for at in range(len(good) - num_bytes, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(CorruptError, match=r"the bytes of layers\.0\.[kv] have changed"):
            Snapshot.open(path).read([0])


def test_a_checksum_of_a_later_version_is_no_damage(snapshot: Snapshot, tmp_path: Path) -> None:
    """A corrupt file is deleted, and this one is good."""
    path = tmp_path / "file"
    snapshot.save(path)
    change(path, lambda text, *_: text.update(checksum="blake4"))
    with pytest.raises(StoreError, match="has checksums in blake4, which this version") as error:
        Snapshot.open(path)
    assert not isinstance(error.value, CorruptError)


@pytest.mark.parametrize("checksum", ["blake2b", "", "No word", "crc32"])
def test_a_checksum_that_is_none(snapshot: Snapshot, tmp_path: Path, checksum: str) -> None:
    path = tmp_path / "file"
    snapshot.save(path)
    change(path, lambda text, *_: text.update(checksum=checksum))
    with pytest.raises(CorruptError):
        Snapshot.open(path).read([0])


def test_signed_files_have_checksums_of_their_key(snapshot: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshot.save(path, key=KEY)
    raw = path.read_bytes()
    assert b"xxh3" not in raw
    read = Snapshot.open(path, key=KEY).read([0])
    np.testing.assert_array_equal(read.array("layers.0.k"), snapshot.array("layers.0.k"))
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptError, match="have changed"):
        Snapshot.open(path, key=KEY).read([0])

"""Files like one that was read before are read as Snapshot.open reads them, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import Snapshot
from kvx_core.snapshot import Alike, Room, StoreError, header_cache, layout
from kvx_core.snapshot import room as rooms
from kvx_core.snapshot.layout import Layout
from tests.core.test_side_by_side import CHUNK, caches, section

KEY = bytes(range(32))
NODES = tuple(f"{i:064x}" for i in range(4))


def write(path: Path, seed: int, start: int, prefix: str, num_tokens: int, **options: Any) -> None:
    dtype, key = options.pop("dtype", torch.float32), options.pop("key", None)
    source = section(caches(seed, dtype, "BLOCK_NHD"), "BLOCK_NHD", seed)
    ids = np.random.default_rng(seed).integers(0, 1 << 40, num_tokens)
    chunk = Snapshot.capture(ids, [source], start=start, prefix=prefix, **options)
    assert chunk is not None
    chunk.save(path, key=key)


def like(path: Path, key: bytes | None = None) -> Alike | None:
    with Snapshot.open(path, key=key) as file:
        return Alike.of(file, Room(CHUNK), key)


def read(path: Path, alike: Alike, start: int, prefix: str) -> Snapshot | None:
    room = Room(CHUNK)
    with path.open("rb", buffering=0) as file:
        found = alike.read(file, start, prefix, room)
    # Without a result, the room is as free as before.
    assert found is not None or room.take(0)[0] == 0
    assert found is None or found.room is room
    return found


def kinds() -> list[Any]:
    return [
        pytest.param({}, id="float32"),
        pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
        pytest.param({"key": KEY}, id="signed"),
        pytest.param({"format": "q8_0"}, id="q8_0"),
        pytest.param({"format": "f16"}, id="f16"),
    ]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    """What files of earlier tests have filled is emptied in the middle of no test."""
    layout._layouts.clear()
    header_cache._known.clear()
    rooms._placed.clear()
    rooms._blocks.clear()


@pytest.mark.parametrize("options", kinds())
@pytest.mark.parametrize("num_tokens", [CHUNK, 1, 5])
def test_reads_what_open_reads(options: dict[str, Any], num_tokens: int, tmp_path: Path) -> None:
    key = options.get("key")
    write(tmp_path / "known", 0, 0, NODES[0], num_tokens, **options)
    alike = like(tmp_path / "known", key)
    assert alike is not None
    for seed, start in enumerate((0, 8, 16, 24), 1):
        path = tmp_path / str(seed)
        write(path, seed, start, NODES[seed % 4], num_tokens, **options)
        found = read(path, alike, start, NODES[seed % 4])
        with Snapshot.open(path, key=key) as file:
            expected = file.read(file.header.layers, Room(CHUNK))
        assert found is not None
        assert found.header == expected.header
        assert found.digest() == expected.digest()
        assert found.tensors == expected.tensors
        assert found.place is not None
        assert expected.place is not None
        assert found.place.block is expected.place.block  # one copy takes both


@pytest.mark.parametrize("options", kinds()[1:4])
def test_no_changed_byte_is_read(options: dict[str, Any], tmp_path: Path) -> None:
    """Every byte of the header, and some of the data, with one flipped bit each."""
    key = options.get("key")
    for name, start in (("known", 0), ("good", 8)):
        write(tmp_path / name, start, start, NODES[1], CHUNK, **options)
    alike = like(tmp_path / "known", key)
    assert alike is not None
    good, path = (tmp_path / "good").read_bytes(), tmp_path / "bad"
    num_header_bytes = 8 + int.from_bytes(good[:8], "little")
    random, room = np.random.default_rng(0), Room(CHUNK)
    at = [*range(num_header_bytes), *random.integers(num_header_bytes, len(good), 60)]
    path.write_bytes(good)
    with path.open("r+b", buffering=0) as file:
        for i in at:
            os.pwrite(file.fileno(), bytes([good[i] ^ 1 << random.integers(8)]), i)
            assert alike.read(file, 8, NODES[1], room) is None, i
            os.pwrite(file.fileno(), good[i : i + 1], i)
    for bad in (good[:-1], good + b"\0", good[:8], b"", good[:num_header_bytes], good + good):
        path.write_bytes(bad)
        assert read(path, alike, 8, NODES[1]) is None
    path.write_bytes(good)
    assert read(path, alike, 8, NODES[1]) is not None


def test_another_file_is_not_taken_for_it(tmp_path: Path) -> None:
    write(tmp_path / "known", 0, 0, NODES[0], CHUNK)
    write(tmp_path / "signed", 1, 8, NODES[1], CHUNK, key=KEY)
    alike, signed = like(tmp_path / "known"), like(tmp_path / "signed", KEY)
    assert alike is not None
    assert signed is not None
    path = tmp_path / "one"
    write(path, 1, 8, NODES[1], CHUNK)
    assert read(path, alike, 8, NODES[1]) is not None
    for start, prefix in ((16, NODES[1]), (0, NODES[1]), (8, NODES[2]), (8, ""), (8, '"\\é')):
        assert read(path, alike, start, prefix) is None
    assert read(path, signed, 8, NODES[1]) is None
    assert read(tmp_path / "signed", signed, 8, NODES[1]) is not None
    assert read(tmp_path / "signed", alike, 8, NODES[1]) is None
    write(path, 1, 8, NODES[1], CHUNK, key=bytes(32))
    assert read(path, signed, 8, NODES[1]) is None
    write(path, 1, 8, NODES[1], CHUNK - 1)
    assert read(path, alike, 8, NODES[1]) is None
    write(path, 1, 8, NODES[1], CHUNK, format="f16")
    assert read(path, alike, 8, NODES[1]) is None
    assert read(Path("/dev/null"), alike, 8, NODES[1]) is None


def test_a_prefix_of_any_text(tmp_path: Path) -> None:
    write(tmp_path / "known", 0, 0, "", CHUNK)
    alike = like(tmp_path / "known")
    assert alike is not None
    for prefix in ('quotes " and \\', "é, 鍵, \U0001f511", "line\nend", "x" * 500):
        write(tmp_path / "one", 1, 8, prefix, CHUNK)
        found = read(tmp_path / "one", alike, 8, prefix)
        assert found is not None
        assert found.header.prefix == prefix


@pytest.mark.parametrize("format", ["f8_e4m3", "q4_k"])  # with scales; units that span heads
def test_files_that_are_read_one_by_one(format: str, tmp_path: Path) -> None:
    write(tmp_path / "one", 0, 0, NODES[0], CHUNK, format=format)
    assert like(tmp_path / "one") is None


def test_encoded_bytes_are_read_one_by_one(tmp_path: Path) -> None:
    write(tmp_path / "one", 0, 0, "", CHUNK, dtype=torch.bfloat16, format="lossless_bf16")
    with Snapshot.open(tmp_path / "one") as file:
        is_coded = any(stored.coding for stored in file.tensors.values())
    assert (like(tmp_path / "one") is None) is is_coded


def test_longer_than_the_room_is_for(tmp_path: Path) -> None:
    write(tmp_path / "one", 0, 0, NODES[0], CHUNK + 1)
    assert like(tmp_path / "one") is None


@pytest.mark.parametrize("is_signed", [False, True])
def test_the_length_of_a_header(is_signed: bool, tmp_path: Path) -> None:
    key = KEY if is_signed else None
    for start in (0, 8, 1 << 20, 10**15):
        for prefix in ("", NODES[3], 'a " and é'):
            write(tmp_path / "one", 0, 0, NODES[0], 3, key=key)
            with Snapshot.open(tmp_path / "one", key=key) as file:
                layout = Layout.of(file.header, file.tensors, is_signed=is_signed)
            sums = ["0" * (64 if is_signed else 32)] * len(layout.names)
            signer = None if (found := like(tmp_path / "one", key)) is None else found.key
            header = layout.header(start, prefix, sums, bytes(24), signer)
            assert layout.num_header_bytes(start, prefix, 3) == len(header)


def test_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one", 0, 0, NODES[0], CHUNK)
    alike = like(tmp_path / "one")
    assert alike is not None

    def none(num_bytes: int, *, pinned: bool = False) -> Any:
        raise StoreError("no memory")

    room = Room(CHUNK)
    monkeypatch.setattr("kvx_core.snapshot.room.host_memory", none)
    with (tmp_path / "one").open("rb", buffering=0) as file, pytest.raises(StoreError):
        alike.read(file, 0, NODES[0], room)

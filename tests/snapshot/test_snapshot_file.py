"""Files of snapshots of every kind: what was captured, for KVX and for the reader of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvx_core import Snapshot
from kvx_core.snapshot import Room, UnsignedError
from tests.snapshot import store_reader
from tests.snapshot.chunk_files import DECODERS, FULL, KEYS, MAKERS, bytes_of
from tests.snapshot.chunk_files import snapshot_of as random_snapshot


@pytest.mark.parametrize("keys", ["plain", "signed"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_snapshot(name: str, keys: str, tmp_path: Path) -> None:
    path, (key, _) = tmp_path / "file", KEYS[keys]
    for n in (1, 7, FULL):
        snapshot = random_snapshot(MAKERS[name], n, n, prefix='a prefix: "@@"} \\ \x7f\u0661')
        snapshot.save(path, key=key)
        raw = path.read_bytes()
        found = store_reader.read(raw, None, signing=key, decoders=DECODERS)
        assert found.kind["prefix"] == snapshot.header.prefix
        assert (found.start, found.tokens) == (snapshot.header.start, snapshot.tokens.tolist())
        assert found.tensors.keys() == snapshot.tensors.keys()
        for tensor, each in found.tensors.items():
            stored = snapshot.tensors[tensor]
            assert (each.dtype, each.shape) == (stored.dtype.name, stored.shape)
            assert each.data == bytes_of(snapshot, tensor)
        with Snapshot.open(path, key=key, num_tokens=n) as file:
            assert file.header == snapshot.header
            layers = file.header.layers
            for wanted in {layers, layers[:1], layers[-1:], layers[1:3]}:
                room = Room(FULL)
                room.clear(file.memory_for(wanted, FULL))
                read = file.read(wanted, room)
                assert set(read.tensors) == set(file.names_of(wanted))
                for tensor in read.tensors:
                    assert bytes_of(read, tensor) == bytes_of(snapshot, tensor)
            file.read(layers).save(tmp_path / "again", key=key)
        assert (tmp_path / "again").read_bytes() == raw


def test_one_of_several_keys(tmp_path: Path) -> None:
    """As keys are changed: a reader has the new and the old one."""
    path, old, new, other = tmp_path / "file", b"o" * 32, b"n" * 32, b"x" * 32
    random_snapshot(MAKERS["BF16"], 7, 1).save(path, key=old)
    with Snapshot.open(path, key=[new, old]) as file:
        assert len(file.read(file.header.layers).tokens) == 7
    for wrong, message in (
        ([new, other], r"is signed with the key [0-9a-f]{16}, which this process does not have"),
        (None, "is signed, and this process has no key"),
    ):
        with pytest.raises(UnsignedError, match=message):
            Snapshot.open(path, key=wrong)
    random_snapshot(MAKERS["BF16"], 7, 1).save(path)
    with pytest.raises(UnsignedError, match="is not signed, and this process has keys"):
        Snapshot.open(path, key=[new, old])


def test_what_a_snapshot_is_read_into_is_all_that_is_written(tmp_path: Path) -> None:
    """A room behind a file's tensors stays as it was, and nothing is read that is not wanted."""
    snapshot = random_snapshot(MAKERS["unequal"], 7, 1)
    snapshot.save(tmp_path / "file")
    with Snapshot.open(tmp_path / "file") as file:
        for layers in (file.header.layers, file.header.layers[:1]):
            num_bytes, room = file.memory_for(layers, 7), Room(7)
            room.clear(num_bytes + 4096)
            room.take(num_bytes + 4096)[1][:] = 0xA5
            room.give_back(0)
            read = file.read(layers, room)
            held = {
                at for s in read.tensors.values() for at in range(s.offset, s.offset + s.num_bytes)
            }
            rest = room.take(4096)[1]
            assert (rest == 0xA5).all()
            assert read.memory is not None
            assert all(read.memory[at] == 0xA5 for at in set(range(num_bytes)) - held)

"""Files of chunks: exact bytes, read by a reader of the page that describes them, and by safetensors;
what is wrong is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kvx_core import DType, InvalidArgumentError, Snapshot
from kvx_core.snapshot import CorruptError, Room, StoreError, UnsignedError
from kvx_core.stores.chunk_file import open_chunk, read_chunk, write_chunk
from kvx_core.stores.kind import Kind
from kvx_core.stores.secrets import Secrets
from tests.core import store_reader
from tests.core.chunk_files import (
    DECODERS,
    ENCRYPTION,
    FULL,
    KEYS,
    MAKERS,
    SIGNING,
    Maker,
    bytes_of,
    key_of,
    kind_of,
    numbers,
    secrets_of,
    snapshot_of,
    write,
)

SEEDS = [1, 2, 3]
SENTINEL = 0xA5


def read(
    path: Path,
    kind: Kind,
    snapshot: Snapshot,
    keys: str = "plain",
    *,
    layers: Any = None,
    room: Room | None = None,
    num_tokens: int | None = None,
    secrets: Secrets | None = None,
) -> Snapshot:
    blank = kind.blank(num_tokens or len(snapshot.tokens), "a model")
    with path.open("rb", buffering=0) as file:
        return read_chunk(
            file,
            kind,
            secrets or secrets_of(keys),
            name="it",
            key=key_of(snapshot),
            blank=blank,
            layers=layers,
            room=room,
        )


def filled(num_tokens: int, num_bytes: int) -> Room:
    """A room of sentinels."""
    room = Room(num_tokens)
    room.clear(num_bytes)
    room.take(num_bytes)[1][:] = SENTINEL
    room.give_back(0)
    return room


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_file(name: str, keys: str, tmp_path: Path) -> None:
    """The reader of the page and this one find the bytes that were captured, all and in parts."""
    make, path = MAKERS[name], tmp_path / "file"
    kind = kind_of(make, keys)
    assert Kind.parse(kind.text, "kind").text == kind.text
    for seed, n in zip(SEEDS, (1, 7, FULL), strict=True):
        snapshot = snapshot_of(make, n, seed)
        raw = write(path, snapshot, kind, keys)
        names = set(snapshot.tensors) - {"tokens"}
        signing, encryption = KEYS[keys]
        found = store_reader.read(
            raw, kind.text, signing=signing, encryption=encryption, decoders=DECODERS
        )
        assert found.parent.hex() == snapshot.header.prefix
        assert (found.start, found.tokens) == (snapshot.header.start, snapshot.tokens.tolist())
        assert found.tensors.keys() == names
        for tensor, each in found.tensors.items():
            stored = snapshot.tensors[tensor]
            assert (each.dtype, each.shape) == (stored.dtype.name, stored.shape)
            assert each.data == bytes_of(snapshot, tensor)
        layers = kind.layers
        for wanted in {layers, layers[:1], layers[-1:], layers[1:3]}:
            room = filled(FULL, kind.memory_for(n, wanted, FULL) + 4096)
            loaded = read(path, kind, snapshot, keys, layers=wanted, room=room)
            expected = {tensor for tensor in names if layer_of(tensor) in wanted}
            assert loaded.tensors.keys() == expected
            assert loaded.header.parts == tuple(
                sorted((_without_engine(p) for p in snapshot.header.parts), key=lambda p: p.layers)
            )
            covered = np.zeros(room.num_bytes, np.bool_)
            for tensor in expected:
                assert bytes_of(loaded, tensor) == bytes_of(snapshot, tensor)
                stored = loaded.tensors[tensor]
                covered[stored.offset : stored.offset + stored.num_bytes] = True
            room.give_back(0)
            memory = room.take(room.num_bytes)[1]
            assert (memory[~covered] == SENTINEL).all()
            with path.open("rb", buffering=0) as file:
                chunk = open_chunk(file, kind, secrets_of(keys), name="it", key=key_of(snapshot))
                assert (chunk.num_tokens, chunk.start) == (n, snapshot.header.start)
                assert chunk.parent == snapshot.header.prefix
                assert chunk.tokens.tolist() == snapshot.tokens.tolist()
                again = chunk.read(wanted, None, "a model")
            assert again.header == loaded.header
            assert all(bytes_of(again, t) == bytes_of(loaded, t) for t in expected)


def _without_engine(part: Any) -> Any:
    from dataclasses import replace

    return replace(part, facts=replace(part.facts, engine=None))

"""check_file: checks every byte of a file of a store, as its readers would."""

from __future__ import annotations

import hashlib
from collections import Counter

from kvx_core.snapshot import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.marks import most_bytes, parse_mark
from kvx_core.stores.names import is_mark, model_record, space_record
from kvx_core.stores.space import MAX_BYTES, SpaceRecord
from kvx_core.stores.store_reader import StoreReader, with_keys
from kvx_core.stores.stored_kind import StoredFile
from kvx_core.stores.stored_space import Space

_MAC_BYTES = 64
_WHOLE_BYTES = 64 << 20  # a longer file is read layer by layer
_MOST_BYTES = 512 << 20  # most bytes of a layer, in memory


def check_file(store: StoreReader, space: Space, file: StoredFile) -> None:
    """Reads and checks all bytes of a file.

    Raises CorruptError if nobody can use the file, StoreError if it cannot be judged here, such as
    without its keys.
    """
    if file.is_entry:
        _check_entry(store, space, file)
    elif is_mark(file.name):
        chunk_tokens = store.config.chunk_tokens
        raw = store.read(file.name, most_bytes(chunk_tokens))
        parse_mark(raw, file.name, secrets_of_mark(store.secrets, raw, file.name), chunk_tokens)
    elif file.name.endswith(".mac"):
        raw = store.read(file.name, _MAC_BYTES)
        if len(raw) != _MAC_BYTES or raw.strip(b"0123456789abcdef"):
            raise CorruptError(f"{file.name} is {raw[:80]!r}, expected {_MAC_BYTES} hex digits")
    else:
        _check_record(store, space, file)


def _check_entry(store: StoreReader, space: Space, file: StoredFile) -> None:
    with store.opened_chunk(file, space.kinds[file.kind]) as chunk:
        layers, num_bytes = chunk.kind.layers, Counter[int]()
        if chunk.num_bytes <= _WHOLE_BYTES:
            chunk.read(layers)
            return
        for name, tensor in chunk.layout.tensors.items():
            num_bytes[int(name.split(".")[1])] += tensor.num_bytes
        for layer in layers:
            if num_bytes[layer] > _MOST_BYTES:
                raise StoreError(
                    f"{file.name} has {num_bytes[layer]} bytes of layer {layer}, expected at most "
                    f"{_MOST_BYTES} to check them"
                )
            chunk.read([layer])


def secrets_of_mark(secrets: Secrets, raw: bytes, name: str) -> Secrets:
    """Returns the secrets that a mark's flags ask for. Raises StoreError if they are missing."""
    flags = int.from_bytes(raw[8:12], "little")
    return with_keys(secrets, bool(flags & 1), bool(flags & 2), name)


def _check_record(store: StoreReader, space: Space, file: StoredFile) -> None:
    raw = store.read(file.name, MAX_BYTES)
    if file.name == space_record(space.name):
        SpaceRecord.parse(raw, space.name)
    elif file.name == model_record(space.name):
        store.model_text(space)
    else:
        id = file.key
        if hashlib.sha256(raw).hexdigest()[: len(id)] != id:
            raise CorruptError(f"{file.name} is not what its name says")
        Kind.parse(raw, id)
    beside = {record.name for record in space.records}
    known = [name for name in store.secrets.mac_names(file.name) if name in beside]
    if known and not store.secrets.check(
        file.name, raw, lambda name: store.read(name, _MAC_BYTES) if name in known else None
    ):
        raise UnsignedError(f"{file.name} is not what {known[0]} authenticates")

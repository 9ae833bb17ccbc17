"""Verified: one file of a store, every byte of it, as its readers would check it."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from kvx_core.snapshot import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.marks import most_bytes, parse_mark
from kvx_core.stores.names import is_mark, model_record, space_record
from kvx_core.stores.space import MAX_BYTES, SpaceRecord

if TYPE_CHECKING:
    from kvx_core.stores.inventory import Inventory, Space, StoredFile

_MAC_BYTES = 64
_WHOLE_BYTES = 64 << 20  # of a file that is read at once; longer ones layer by layer
_MOST_BYTES = 512 << 20  # of a layer, in memory


def check_file(store: Inventory, space: Space, file: StoredFile) -> None:
    """Reads all of a file.

    Raises CorruptError if nobody can use it, StoreError if it cannot be judged with these keys.
    """
    if file.is_entry:
        _check_entry(store, file)
    elif is_mark(file.name):
        chunk_tokens = store.config.chunk_tokens
        raw = store.read(file.name, most_bytes(chunk_tokens))
        parse_mark(raw, file.name, _as_it_is(store.secrets, raw, file.name), chunk_tokens)
    elif file.name.endswith(".mac"):
        raw = store.read(file.name, _MAC_BYTES)
        if len(raw) != _MAC_BYTES or raw.strip(b"0123456789abcdef"):
            raise CorruptError(f"{file.name} is {raw[:80]!r}, expected {_MAC_BYTES} hex digits")
    else:
        _check_record(store, space, file)


def _check_entry(store: Inventory, file: StoredFile) -> None:
    with store.opened_entry(file) as chunk:
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


def _as_it_is(secrets: Secrets, raw: bytes, name: str) -> Secrets:
    """The secrets that a mark needs, as its flags say. Raises StoreError if there are none."""
    flags = int.from_bytes(raw[8:12], "little")
    return _with(secrets, bool(flags & 1), bool(flags & 2), name)


def _check_record(store: Inventory, space: Space, file: StoredFile) -> None:
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


def secrets_for(secrets: Secrets, kind: Kind, name: str) -> Secrets:
    """Those of `secrets` that files of a kind need. Raises StoreError if there are none."""
    return _with(secrets, kind.keyed, kind.encrypted, name)


def _with(secrets: Secrets, keyed: bool, encrypted: bool, name: str) -> Secrets:
    if keyed and not secrets.is_keyed:
        raise UnsignedError(f"{name} is signed, and no key is given that it is signed with")
    if encrypted and not secrets.is_encrypted:
        raise StoreError(f"{name} is encrypted, and no key is given that it is encrypted with")
    return Secrets(secrets.signing if keyed else (), secrets.encryption if encrypted else ())

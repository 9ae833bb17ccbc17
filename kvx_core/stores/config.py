"""kvx-store.json: the chunk size and the format of a store."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import BinaryIO

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import FORMAT, StoreError
from kvx_core.snapshot.text import strict_json
from kvx_core.stores.blob_store import BlobStore

_NAME = "kvx-store.json"
_MAX_BYTES = 4096
_MAX_CHUNK_TOKENS = 999_999_999  # names of files have 9 digits


def stored_chunk_tokens(blobs: BlobStore, requested: int | None, otherwise: int) -> int | None:
    """The chunk_tokens of a store.

    requested: what the caller asks for, or None
    otherwise: for a new store, if nothing is requested
    Returns None if there is no store yet and none can be made here.
    Raises InvalidArgumentError if the store has another number than is requested, StoreError if it
    has another format or cannot be read.
    """
    root = getattr(blobs, "root", None)
    where = _NAME if root is None else f"{root}/{_NAME}"
    raw = _read(blobs, where)
    if raw is None:
        wanted = {"format": FORMAT, "chunk_tokens": requested or otherwise}

        def write(file: BinaryIO) -> None:
            file.write(json.dumps(wanted).encode() + b"\n")

        with suppress(StoreError):  # a store that this process may only read can still be empty
            blobs.put(_NAME, write)
        raw = _read(blobs, where)
        if raw is None:
            return None
    try:
        config = strict_json(raw)
        found, chunk_tokens = config["format"], config["chunk_tokens"]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{where} is not the description of a KVX store: {error!r}") from None
    if type(found) is int and 0 < found < FORMAT:
        raise StoreError(
            f"{where} is that of a store of format {found}, which an earlier version of KVX has "
            f"written, expected format {FORMAT}. Delete the directory, or use another: what it "
            "holds is computed again"
        )
    if (
        found != FORMAT
        or type(chunk_tokens) is not int
        or not 0 < chunk_tokens <= _MAX_CHUNK_TOKENS
    ):
        raise StoreError(
            f"{where} has format {found!r} and chunk_tokens {chunk_tokens!r}, expected format "
            f"{FORMAT} and a number of tokens"
        )
    if requested not in (None, chunk_tokens):
        raise InvalidArgumentError(
            f"chunk_tokens is {requested}, expected {chunk_tokens} as {where} says. Leave it out, "
            "or use another directory"
        )
    return chunk_tokens


def _read(blobs: BlobStore, where: str) -> bytes | None:
    """The description; None if there is none. Raises StoreError."""
    file = blobs.open(_NAME)
    if file is None:
        return None
    with file:
        try:
            raw = file.read(_MAX_BYTES + 1) or b""
        except OSError as error:
            raise StoreError(f"{where} cannot be read: {error}") from None
    if len(raw) > _MAX_BYTES:
        raise StoreError(
            f"{where} is not the description of a KVX store: it has more than {_MAX_BYTES} bytes"
        )
    return raw

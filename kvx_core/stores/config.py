"""kvx-store.json: the format of a store, its chunk size, and the limit that it was made with."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from kvx_core.snapshot import FORMAT, StoreError
from kvx_core.snapshot.text import strict_json
from kvx_core.stores.blob_store import BlobStore

_NAME = "kvx-store.json"
_MAX_BYTES = 4096
_ENCRYPTED = f"{FORMAT} AES-256-GCM"  # so that earlier versions take no file for a damaged one
_MAX_CHUNK_TOKENS = 999_999_999  # names of files have 9 digits
MIN_CHUNK_TOKENS = 16  # a prompt of 4,096 tokens is 256 files
# That a description may say alone: memory for a chunk is taken before any is read.
MOST_CHUNK_TOKENS = 4096


class StoreConfig(NamedTuple):
    """key_check:    of the key that files are encrypted with; None: they are not encrypted
    chunk_tokens: tokens of a full chunk
    max_bytes:    on the disk, for engines whose settings name no limit; None: it was made without
    """

    chunk_tokens: int
    max_bytes: int | None
    key_check: str | None = None


def stored_config(blobs: BlobStore, requested: int | None, otherwise: int) -> StoreConfig | None:
    """The description of a store; a new one has the limit of `blobs`, if that has one.

    requested: chunk_tokens that the caller asks for, or None
    otherwise: those of a new store, if nothing is requested
    Returns None if there is no store yet and none can be made here.
    Raises StoreError if `check_config` does, or if it has another format or cannot be read.
    """
    config = read_config(blobs)
    if config is None:
        wanted: dict[str, object] = {"format": FORMAT, "chunk_tokens": requested or otherwise}
        key_check = getattr(blobs, "key_check", None)
        if key_check is not None:
            wanted |= {"format": _ENCRYPTED, "key_check": key_check}
        limit = getattr(blobs, "max_bytes", None)
        if limit is not None:
            wanted["max_bytes"] = limit

        def write(file: BinaryIO) -> None:
            file.write(json.dumps(wanted).encode() + b"\n")

        with suppress(StoreError):  # a store that this process may only read can still be empty
            blobs.put(_NAME, write)
        config = read_config(blobs)
    check_config(blobs, config, requested)
    return config


def check_config(blobs: BlobStore, config: StoreConfig | None, requested: int | None) -> None:
    """Raises StoreError if `check_key` or `check_chunks` does.

    Whoever may write to the store can have written its description, so that nothing in it is an
    error of the caller's: engines run without the store.
    """
    if config is not None:
        check_key(blobs, config)
        check_chunks(blobs, config, requested)


def check_chunks(blobs: BlobStore, config: StoreConfig, requested: int | None) -> None:
    """Raises StoreError if the store has another chunk_tokens than is requested; or one that is out
    of bounds, and that nobody has requested.
    """
    if config.chunk_tokens == requested:
        return
    if requested is not None:
        raise StoreError(
            f"chunk_tokens is {requested}, expected {config.chunk_tokens} as {_path(blobs)} says. "
            "Leave it out, or use another directory"
        )
    if not MIN_CHUNK_TOKENS <= config.chunk_tokens <= MOST_CHUNK_TOKENS:
        raise StoreError(
            f"{_path(blobs)} has chunk_tokens {config.chunk_tokens}, expected {MIN_CHUNK_TOKENS} "
            f"to {MOST_CHUNK_TOKENS}. Set chunk_tokens to it if you have made the store so, or use "
            "another directory"
        )


def check_key(blobs: BlobStore, config: StoreConfig) -> None:
    """Raises StoreError if the store has another encryption key than `blobs`."""
    key_check = getattr(blobs, "key_check", None)
    if config.key_check != key_check:
        if config.key_check is None:
            found, way_out = "is not encrypted", "Leave the encryption key out"
        elif key_check is None:
            found, way_out = "is encrypted", "Give the key: encryption_key_file"
        else:
            found, way_out = "is encrypted with another key", "Give its key"
        given = "no key is given" if key_check is None else "an encryption key is given"
        raise StoreError(
            f"{given}, and the store {found}, as {_path(blobs)} says. {way_out}, or use another "
            "directory"
        )


def read_config(blobs: BlobStore) -> StoreConfig | None:
    """The description of a store; None if there is none yet.

    Raises StoreError if it has another format or cannot be read.
    """
    where = _path(blobs)
    raw = _read(blobs, where)
    if raw is None:
        return None
    try:
        config = strict_json(raw)
        found, chunk_tokens = config["format"], config["chunk_tokens"]
        max_bytes, key_check = config.get("max_bytes"), None
        if found == _ENCRYPTED:
            found, key_check = FORMAT, config["key_check"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
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
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
        raise StoreError(f"{where} has max_bytes {max_bytes!r}, expected a number greater than 0")
    if key_check is not None and (type(key_check) is not str or not key_check):
        raise StoreError(f"{where} has key_check {key_check!r}, expected a text")
    return StoreConfig(chunk_tokens, max_bytes, key_check)


def _path(blobs: BlobStore) -> str:
    root = getattr(blobs, "root", None)
    return _NAME if root is None else f"{root}/{_NAME}"


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

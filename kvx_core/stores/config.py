"""Reads and writes kvx-store.json: the format of a store, its chunk size and its byte limit.

Anybody who may write to the store may have written this file. So bad contents are no error of the
caller: they raise StoreError, and engines run without the store. Format: docs/store_format.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import StoreError
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import BlobStore, Content
from kvx_core.stores.strict_json import strict_json

FORMAT = 3
MIN_CHUNK_TOKENS = 16  # a prompt of 4,096 tokens is 256 files
MOST_CHUNK_TOKENS = 1 << 16
_NAME = "kvx-store.json"
_MAX_BYTES = 4096
_MAC_BYTES = 64
_CIPHER = "AES-256-GCM"
_WAIT_SECONDS = 2.0  # a process that makes a store writes kvx-store.json, then its MAC
_POLL_SECONDS = 0.01


class StoreConfig(NamedTuple):
    """chunk_tokens: the number of tokens of a full chunk
    max_bytes:    the limit on the disk for engines whose settings name none; None: no limit
    is_encrypted: True if every entry and mark is encrypted
    """

    chunk_tokens: int
    max_bytes: int | None
    is_encrypted: bool


def stored_config(
    blobs: BlobStore,
    secrets: Secrets,
    requested: int | None,
    otherwise: int,
    *,
    waits: bool = True,
) -> StoreConfig | None:
    """Returns the config of a store. Makes the store if there is none yet; its byte limit is then
    that of `blobs`, if `blobs` has one.

    requested: the chunk_tokens that the caller asks for, or None
    otherwise: the chunk_tokens of a new store if `requested` is None
    waits:     True: waits up to 2 seconds for the MACs of a process that is making the store now
    If an old key has authenticated kvx-store.json, writes a MAC of the new key as well.
    Returns None if there is no store yet and this process cannot make one.
    Raises the StoreErrors of `read_config` and `check_chunks`; InvalidArgumentError for a number of
    chunk_tokens that no store has.
    """
    chunk_tokens = requested or otherwise
    if chunk_tokens > MOST_CHUNK_TOKENS:
        raise InvalidArgumentError(
            f"chunk_tokens is {chunk_tokens}, expected at most {MOST_CHUNK_TOKENS}"
        )
    if requested is None and 0 < otherwise < MIN_CHUNK_TOKENS:
        raise InvalidArgumentError(
            f"new_chunk_tokens is {otherwise}, expected at least {MIN_CHUNK_TOKENS}. Ask for fewer "
            "by chunk_tokens, wherever the store is opened"
        )
    config = read_config(blobs, secrets, waits=waits)
    if config is None:
        wanted: dict[str, object] = {"format": FORMAT, "chunk_tokens": chunk_tokens}
        if blobs.max_bytes is not None:
            wanted["max_bytes"] = blobs.max_bytes
        if secrets.is_encrypted:
            wanted["encryption"] = _CIPHER
        raw = json.dumps(wanted).encode() + b"\n"
        with suppress(StoreError):  # a store that this process may only read can still be empty
            for name, mac in _macs(secrets, raw):  # first: a writer may end after any of its files
                blobs.put(name, Content.of(mac))
            if blobs.put(_NAME, Content.of(raw)):
                _authenticate(blobs, secrets, raw)
        config = read_config(blobs, secrets, waits=waits)
    if config is not None:
        check_chunks(blobs, config, requested)
    return config


def read_config(
    blobs: BlobStore, secrets: Secrets | None = None, *, waits: bool = False
) -> StoreConfig | None:
    """Returns the config of a store; None if there is no store yet.

    secrets: the keys that must authenticate kvx-store.json and fit its encryption; None: its keys
             are not checked
    waits:   see stored_config
    Raises StoreError if the store has another format or other keys, or cannot be read.
    """
    where = blobs.path_of(_NAME)
    raw = blobs.read(_NAME, _MAX_BYTES)
    if raw is None:
        return None
    config = _parsed(raw, where)
    if secrets is not None:
        _check_encryption(secrets, config, where)
        _check_macs(blobs, secrets, raw, where, _WAIT_SECONDS if waits else 0.0)
    return config


def check_chunks(blobs: BlobStore, config: StoreConfig, requested: int | None) -> None:
    """Raises StoreError if the store's chunk_tokens is not the requested number; or if no number is
    requested and it is less than MIN_CHUNK_TOKENS.
    """
    if config.chunk_tokens == requested:
        return
    where = blobs.path_of(_NAME)
    if requested is not None:
        raise StoreError(
            f"chunk_tokens is {requested}, expected {config.chunk_tokens} as {where} says. "
            "Leave it out, or use another directory"
        )
    if config.chunk_tokens < MIN_CHUNK_TOKENS:
        raise StoreError(
            f"{where} has chunk_tokens {config.chunk_tokens}, expected {MIN_CHUNK_TOKENS} "
            f"to {MOST_CHUNK_TOKENS}. Set chunk_tokens to it if you have made the store so, or use "
            "another directory"
        )


def _parsed(raw: bytes, where: str) -> StoreConfig:
    """Parses and checks the text of kvx-store.json. Raises StoreError."""
    try:
        config = strict_json(raw)
        found, chunk_tokens = config["format"], config["chunk_tokens"]
        max_bytes, encryption = config.get("max_bytes"), config.get("encryption")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{where} is not the description of a KVX store: {error!r}") from None
    for earlier in range(1, FORMAT):
        if type(found) in (int, str) and found in (earlier, f"{earlier} {_CIPHER}"):
            raise StoreError(
                f"{where} is that of a store of format {earlier}, which an earlier version of KVX "
                f"has written, expected format {FORMAT}. Delete the directory, or use another: "
                "what it holds is computed again"
            )
    if (
        type(found) is not int
        or found != FORMAT
        or type(chunk_tokens) is not int
        or not 0 < chunk_tokens <= MOST_CHUNK_TOKENS
    ):
        raise StoreError(
            f"{where} has format {found!r} and chunk_tokens {chunk_tokens!r}, expected format "
            f"{FORMAT} and {MIN_CHUNK_TOKENS} to {MOST_CHUNK_TOKENS} tokens"
        )
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
        raise StoreError(f"{where} has max_bytes {max_bytes!r}, expected a number greater than 0")
    if encryption not in (None, _CIPHER):
        raise StoreError(f"{where} has encryption {encryption!r}, expected {_CIPHER!r} or none")
    return StoreConfig(chunk_tokens, max_bytes, encryption is not None)


def _check_encryption(secrets: Secrets, config: StoreConfig, where: str) -> None:
    """Raises StoreError unless an encryption key is given exactly if the store is encrypted."""
    if config.is_encrypted and not secrets.is_encrypted:
        raise StoreError(
            f"no encryption key is given, and the store is encrypted, as {where} says. Give the "
            "key: encryption_key_files, or use another directory"
        )
    if secrets.is_encrypted and not config.is_encrypted:
        raise StoreError(
            f"an encryption key is given, and the store is not encrypted, as {where} says. Leave "
            "the encryption key out, or use another directory"
        )


def _check_macs(
    blobs: BlobStore, secrets: Secrets, raw: bytes, where: str, wait_seconds: float
) -> None:
    """Checks the MACs of kvx-store.json, one for each sort of keys; adds the MAC of a new key.

    wait_seconds: how long to wait for MACs that are missing or wrong: of processes that make a
                  store at once, the one whose kvx-store.json is there writes them last
    Raises StoreError.
    """
    until = time.monotonic() + wait_seconds
    for sort, one in _sorts(secrets):
        while not one.check(_NAME, raw, lambda name: _mac(blobs, name)):
            if time.monotonic() >= until:
                raise StoreError(
                    f"{where} is not authenticated by the {sort} key that is given: "
                    f"{one.mac_names(_NAME)[0]} beside it is missing or wrong. Who has written it "
                    "has another key, or none. Give the key that the store was made with, or use "
                    "another directory"
                )
            time.sleep(_POLL_SECONDS)
    _authenticate(blobs, secrets, raw)


def _authenticate(blobs: BlobStore, secrets: Secrets, raw: bytes) -> None:
    """Writes the MAC of the first key of each sort if it is missing or wrong. Ignores StoreError:
    this process may not be allowed to write.
    """
    for name, mac in _macs(secrets, raw):
        if _mac(blobs, name) != mac:
            with suppress(StoreError):
                blobs.replace(name, Content.of(mac))


def _macs(secrets: Secrets, raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of the MAC of the first key of each sort."""
    for _, one in _sorts(secrets):
        found = one.mac(_NAME, raw)
        if found is not None:
            yield found[0], found[1].encode()


def _sorts(secrets: Secrets) -> Iterator[tuple[str, Secrets]]:
    """Yields the keys of each sort by themselves, with the name of the sort.

    Each sort is checked alone, so that one right key does not make up for a wrong one.
    """
    if secrets.is_keyed:
        yield "signing", Secrets(signing=secrets.signing)
    if secrets.is_encrypted:
        yield "encryption", Secrets(encryption=secrets.encryption)


def _mac(blobs: BlobStore, name: str) -> bytes | None:
    with suppress(StoreError):
        return blobs.read(name, _MAC_BYTES)
    return None

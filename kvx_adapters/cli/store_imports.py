"""Imports: snapshots that an export has written become entries of a store again.

The store may have other chunks, other keys, and what it has already; no byte of keys and values
changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvx_adapters.cli.store_exports import ENDING, RECORD
from kvx_adapters.cli.store_runs import chunks_of, holds_states
from kvx_core.errors import InvalidArgumentError, KvxError
from kvx_core.snapshot import CorruptError, Precision, Snapshot, StoreError, UnsignedError
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.commits import Commits
from kvx_core.stores.entries import Entries
from kvx_core.stores.index import Index
from kvx_core.stores.kinds import Spaces
from kvx_core.stores.marks import Marks
from kvx_core.stores.names import is_key
from kvx_core.stores.space import MAX_BYTES, SpaceRecord
from kvx_core.stores.stale_entries import StaleEntries

_FILES = 64  # that are written together
_MOST_BYTES = 4 << 30  # of a snapshot, which is in memory when it is stored


class Imported(NamedTuple):
    """What became of a snapshot."""

    path: Path
    num_new: int  # entries that the store did not have
    num_entries: int
    num_bytes: int  # of the files of the new ones
    error: KvxError | None  # why it was left out, or what is behind these entries


class Import:
    """Stores the snapshots of a folder."""

    def __init__(
        self,
        blobs: BlobStore,
        secrets: Secrets,
        chunk_tokens: int,
        folder: Path,
        *,
        takes_unsigned: bool = False,
    ) -> None:
        """blobs:          a store whose chunks have so many tokens
        secrets:        that its files are signed and encrypted with; a snapshot may be signed with
                        any of the keys
        folder:         with space.json, as an export writes it
        takes_unsigned: also takes snapshots that are not signed, although there are keys
        Raises StoreError, InvalidArgumentError.
        """
        self._secrets, self._chunk_tokens = secrets, chunk_tokens
        self.record = _record(folder)
        self.paths = sorted(path for path in folder.iterdir() if path.name.endswith(ENDING))
        self._takes_unsigned = takes_unsigned
        spaces = Spaces(blobs, secrets, [Precision()] * len(self.record.kv_heads), "lossy")
        marks = Marks(blobs, secrets, index := Index(), spaces.ids, states=spaces.states)
        self._commits = Commits(
            Entries(blobs, secrets, marks, index),
            spaces.kinds(self.record),
            StaleEntries(blobs, marks, index),
            chunk_tokens,
        )

    def run(self) -> Iterator[Imported]:
        """Stores snapshot by snapshot; yields what became of each."""
        for path in self.paths:
            num_new = num_entries = num_bytes = 0
            error: KvxError | None = None
            try:
                for found in self._stored(path):
                    num_entries += 1
                    num_new += found > 0
                    num_bytes += found
            except (StoreError, InvalidArgumentError) as wrong:
                error = wrong
            yield Imported(path, num_new, num_entries, num_bytes, error)

    def _stored(self, path: Path) -> Iterator[int]:
        """Stores a snapshot; yields the bytes of each of its entries, 0 of known ones."""
        with self._opened(path) as opened:
            self._check(opened)
            snapshot = opened.read(opened.header.layers)
        kind = Kind.of(
            snapshot.header.parts,
            snapshot.tensors,
            len(snapshot.tokens),
            keyed=self._secrets.is_keyed,
            encrypted=self._secrets.is_encrypted,
        )
        chunks = chunks_of(replace(snapshot, kind=kind), self.record.name, self._chunk_tokens)
        while some := list(islice(chunks, _FILES)):
            for stored in self._commits.commit_all(some):
                if isinstance(stored, StoreError):
                    raise stored
                yield stored

    def _opened(self, path: Path) -> Snapshot:
        """A snapshot, signed with one of the keys, or not at all if that is allowed."""
        keys = [key.secret for key in self._secrets.signing]
        try:
            return Snapshot.open(path, key=keys or None)
        except UnsignedError as wrong:
            if not self._takes_unsigned:
                raise StoreError(f"{wrong}, or take what is not signed: --unsigned") from None
        return Snapshot.open(path)

    def _check(self, snapshot: Snapshot) -> None:
        """Raises StoreError if it is too long, or none of the model of space.json."""
        record, header = self.record, snapshot.header
        if snapshot.num_bytes > _MOST_BYTES:
            raise StoreError(
                f"{snapshot.name} has {snapshot.num_bytes} bytes of data, expected at most "
                f"{_MOST_BYTES} as `kvx store export` writes it"
            )
        states = holds_states(snapshot)
        heads, planes = record.heads(states), record.planes_of(states)
        for part in header.parts:
            if part.facts.fingerprint != record.fingerprint:
                raise CorruptError(
                    f"{snapshot.name} is of model {str(part.facts.fingerprint)[:100]!r}, expected "
                    f"{record.fingerprint[:100]!r} as {RECORD} beside it says"
                )
            for layer in part.layers:
                if layer >= len(record.kv_heads):
                    raise CorruptError(
                        f"{snapshot.name} has layer {layer}, expected one of "
                        f"{len(record.kv_heads)} as {RECORD} beside it says"
                    )
                if part.heads[1] > (heads[layer] if heads else 0):
                    raise CorruptError(
                        f"{snapshot.name} has heads {part.heads[0]} to {part.heads[1] - 1} of "
                        f"layer {layer}, expected {heads[layer] if heads else 0} at most as "
                        f"{RECORD} beside it says"
                    )
                found = {plane for plane in part.planes if plane.layer == layer}
                if found != {plane for plane in planes if plane.layer == layer}:
                    raise CorruptError(
                        f"{snapshot.name} has other planes of layer {layer} than {RECORD} beside "
                        "it says"
                    )
        if header.start and not is_key(header.prefix):
            raise CorruptError(
                f"{snapshot.name} begins at token {header.start} and has prefix "
                f"{header.prefix[:100]!r}, expected the key of the tokens before it"
            )


def folders_of(folder: Path) -> list[Path]:
    """The folders of an export, each with the snapshots of a space. Raises StoreError."""
    if (folder / RECORD).is_file():
        return [folder]
    found = sorted(path for path in folder.glob("*") if (path / RECORD).is_file())
    if not found:
        raise StoreError(
            f"{folder} has no {RECORD}, neither itself nor in a folder of it, expected what "
            "`kvx store export` writes"
        )
    return found


def _record(folder: Path) -> SpaceRecord:
    path = folder / RECORD
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise CorruptError(f"{path} has more than {MAX_BYTES} bytes")
    try:
        return SpaceRecord.parse(raw, hashlib.sha256(raw).hexdigest())
    except CorruptError as error:
        raise CorruptError(f"{path}: {str(error).partition('space.json ')[2]}") from None

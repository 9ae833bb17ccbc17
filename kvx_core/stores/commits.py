"""Snapshots into the files of a store: one by one, or many that are synced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import BinaryIO

from kvx_core.snapshot import Snapshot, StoreError
from kvx_core.stores.blob_store import BlobStore


def commit_files(
    blobs: BlobStore, files: Sequence[tuple[str, Snapshot]], key: bytes | None
) -> list[int | StoreError]:
    """Stores each snapshot under its name.

    key: signs the files; None: they are not signed
    Returns the bytes of each new file, 0 for one that existed, or why it was not stored.
    """
    sizes: dict[str, int] = {}

    def writing(name: str, snapshot: Snapshot) -> Callable[[BinaryIO], None]:
        def write(file: BinaryIO) -> None:
            snapshot.save(file, key=key)
            sizes[name] = file.tell()

        return write

    writes = [(name, writing(name, snapshot)) for name, snapshot in files]
    results = blobs.put_all(writes)
    return [
        is_new if isinstance(is_new, StoreError) else sizes[name] if is_new else 0
        for (name, _), is_new in zip(files, results, strict=True)
    ]

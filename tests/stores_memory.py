"""Blob stores for tests: one in memory, one that only has what a BlobStore has to have."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from kvx_core import Directory
from kvx_core._c.os_files import ReadFile
from kvx_core.stores import BlobStore
from kvx_core.stores.blob_store import Write, check_name


class InMemory(BlobStore):
    """Files in a dict of this process."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.max_bytes = max_bytes
        self.num_opened = 0
        self._lock = Lock()

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        check_name(name)
        if name in self.files:
            return False
        with file_of(name, b"") as file:
            handle = os.dup(file.fileno())
            try:
                write(file)
                content = os.pread(handle, os.fstat(handle).st_size, 0)
            finally:
                os.close(handle)
        with self._lock:
            is_new = name not in self.files
            self.files.setdefault(name, content)
        return is_new

    def open(self, name: str) -> BinaryIO | None:
        check_name(name)
        content = self.files.get(name)
        if content is None:
            return None
        self.num_opened += 1
        return file_of(name, content)

    def names(self, folder: str) -> list[str]:
        if folder:
            check_name(folder)
        above = f"{folder}/" if folder else ""
        found = (name[len(above) :] for name in list(self.files) if name.startswith(above))
        return list({name.partition("/")[0] for name in found})

    def delete(self, name: str) -> None:
        check_name(name)
        self.files.pop(name, None)


class OnlyDefaults(BlobStore):
    """A directory that is asked for nothing but put, open, names and delete."""

    def __init__(self, root: Path) -> None:
        self._beneath = Directory(root)

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        return self._beneath.put(name, write, durable=durable)

    def open(self, name: str) -> BinaryIO | None:
        return self._beneath.open(name)

    def names(self, folder: str) -> list[str]:
        return self._beneath.names(folder)

    def delete(self, name: str) -> None:
        self._beneath.delete(name)


def file_of(name: str, content: bytes) -> BinaryIO:
    """A file that is on no disk, whose `write` writes all."""
    file = ReadFile(os.memfd_create("test", os.MFD_CLOEXEC), "r+b")
    file.name = name
    file.write(content)
    file.seek(0)
    return file

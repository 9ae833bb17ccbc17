"""Where the files of a store lie: any object with put, open, names and delete.

Names and contents of the files are decided elsewhere (keys.py, snapshot).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Protocol


class BlobStore(Protocol):
    """Files by name. A name is words with "/" between them; the same name has the same content."""

    def put(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        """Stores what `write` writes: all of it or nothing, and durably.

        write: gets a new unbuffered file that it can write to and seek in. Called again with
               another file if the disk was full or the file was deleted meanwhile
        Returns False if the name exists already; `write` may then not be called.
        Raises StoreError, and what `write` raises except OSError.
        """
        ...

    def open(self, name: str) -> BinaryIO | None:
        """The file of a name, unbuffered, which the caller closes; marks it as used now.

        None if it does not exist (any more) or is no regular file.
        Raises StoreError if it cannot be opened now.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """The names, without their path, of the files and folders directly in a folder."""
        ...

    def delete(self, name: str) -> None:
        """Deletes the file if it exists. Raises StoreError."""
        ...

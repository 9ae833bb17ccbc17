"""Where the files of a store lie. A new place is a class with put, open, names and delete.

Names and contents of the files are decided elsewhere: docs/store_format.md.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvx_core._c.os_files import OpenFile, first_bytes
from kvx_core.argument_checks import instance
from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.stores.usage import Usage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

MAX_WORDS = 8  # of a name
_WORD = re.compile(r"(?!\.)[ -.0-~]+")
_NAME = re.compile(f"{_WORD.pattern}(?:/{_WORD.pattern}){{0,{MAX_WORDS - 1}}}")

Write = Callable[[BinaryIO], None]
Put = bool | StoreError  # what a put returns: whether the name is new; or why it was not stored


class BlobStore(ABC):
    """Files by name. A name is words with "/" between them; the same name has the same content.

    Names that are none raise InvalidArgumentError: see check_name. Threads may share a store, and
    any number of processes the files of one.
    """

    root: Path | None = None  # the directory that the files lie in, if they do
    max_bytes: int | None = None  # that the files may have; None: there is no limit
    usage: Usage | None = None  # counts of the files; None: nobody counts them

    @abstractmethod
    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Stores what `write` writes: all of it or nothing.

        write:   gets a new unbuffered file that it can write to and seek in. Called again with
                 another file if the disk was full or the file was deleted meanwhile
        durable: returns when the file stays whatever fails. Otherwise others may see a part of it
                 while it is written, and a process or machine that fails may leave it with any
                 content, or not at all
        Returns False if the name exists already; `write` may then not be called.
        Raises StoreError, and what `write` raises except OSError.
        """

    @abstractmethod
    def open(self, name: str) -> BinaryIO | None:
        """The file of a name, unbuffered and with a handle, which the caller closes; marks it as
        used now.

        None if it does not exist (any more) or is no regular file.
        Raises StoreError if it cannot be opened now.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names, without their path, of the files and folders directly in a folder.

        folder: "" is that of all others. None are in one that does not exist or cannot be read
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes the file if it exists. Raises StoreError."""

    def fetch(
        self, name: str, views: tuple[Buffer, ...], least: int = 0, most: int = -1
    ) -> OpenFile | None:
        """`open`, and the first bytes of the file at once.

        views: at most 64, filled as far as the file goes if it has `least` to `most` bytes
        None and errors are those of `open`; StoreError also if it cannot be read.
        """
        file = self.open(name)
        if file is None:
            return None
        try:
            with file:
                return first_bytes(os.dup(file.fileno()), views, least, most)
        except OSError as error:
            raise StoreError(f"{self.path_of(name)} cannot be read: {error}") from error

    def folder(self) -> int | None:
        """A handle of the directory that files lie below by their names, for who opens them there
        and follows no symbolic link; the caller closes it. None: `fetch` opens them.
        """
        return None

    def put_all(self, files: Sequence[tuple[str, Write]], num_bytes: int = 0) -> list[Put]:
        """`put` for each name and `write`: what it returns, or the StoreError that it raises.

        num_bytes: of all files, as far as it is known: if they are large, several threads may call
                   `write`, each for another file
        """
        return [self._put_one(name, write) for name, write in files]

    def _put_one(self, name: str, write: Write) -> Put:
        try:
            return self.put(name, write)
        except StoreError as error:
            return error

    def replace(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """`put`, for a file whose content may change: deletes what has the name.

        In between there is none. Returns False if another writer was first. Raises as `put`.
        """
        self.delete(name)
        return self.put(name, write, durable=durable)

    def is_there(self, name: str) -> bool:
        """Whether the file exists; marks it as used now. Raises StoreError."""
        file = self.open(name)
        if file is not None:
            file.close()
        return file is not None

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """The content of a small file; None if it does not exist. Marks it as used now.

        Raises StoreError if it cannot be read; CorruptError if it has more bytes than `most_bytes`,
        of which no more are read.
        """
        file = self.open(name)
        if file is None:
            return None
        found = b""
        with file:
            try:
                while len(found) <= most_bytes:
                    part = file.read(most_bytes + 1 - len(found))
                    if not part:
                        return found
                    found += part
            except OSError as error:
                raise StoreError(f"{self.path_of(name)} cannot be read: {error}") from None
        raise CorruptError(
            f"{self.path_of(name)} has more than {most_bytes} bytes, expected at most that"
        )

    def path_of(self, name: str) -> str:
        """What messages call a file."""
        return name if self.root is None else f"{self.root}/{name}"


def check_name(name: str) -> None:
    """Raises InvalidArgumentError unless a file can have this name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        instance("the name of a blob", name, str, "a str")
        raise InvalidArgumentError(
            f"the name of a blob is {name!r}, expected words with '/' between them, {MAX_WORDS} "
            "at most, of printable ASCII, none of them empty or beginning with a dot"
        )


def is_word(text: str) -> bool:
    """Whether it can be a word of a name."""
    return _WORD.fullmatch(text) is not None

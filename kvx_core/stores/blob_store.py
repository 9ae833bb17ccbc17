"""BlobStore: the interface of a place that holds the files of a store.

A class for a new place defines put, open, names and delete. docs/store_format.md defines the names
and contents of files.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from kvx_core._c.os_files import OpenFile, first_bytes, write_all
from kvx_core.argument_checks import instance
from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.stores.eviction import File
from kvx_core.stores.usage import Usage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

MAX_WORDS = 8  # in a name
_WORD = re.compile(r"(?!\.)[ -.0-~]+")
_NAME = re.compile(f"{_WORD.pattern}(?:/{_WORD.pattern}){{0,{MAX_WORDS - 1}}}")

Write = Callable[[BinaryIO], None]


class Content:
    """A `Write` that knows its bytes, so that a store may write them in its own way.

    parts: returns buffers that follow one another; may raise StoreError
    """

    def __init__(self, parts: Callable[[], Sequence[memoryview]]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Returns the content of a file with these bytes."""
        return cls(lambda: [memoryview(raw)])

    def __call__(self, file: BinaryIO) -> None:
        write_all(file, self.parts())


Put = bool | StoreError  # True: stored; False: the name existed; an error: the file is not stored


class BlobStore(ABC):
    """Files by name. A name is words with "/" between them; the same name has the same content.

    A name that check_name refuses raises InvalidArgumentError. Threads may share a BlobStore; any
    number of processes may share its files.
    """

    root: Path | None = None  # the directory of the files; None: they are not in a directory
    max_bytes: int | None = None  # the limit for all files together; None: no limit
    usage: Usage | None = None  # counts files and bytes; None: nobody counts them
    is_far: bool = False  # True: a call takes milliseconds
    takes_hints: bool = False  # True: `expect` does something
    is_volatile: bool = False  # True: even durable files do not survive a failure of the machine

    @abstractmethod
    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Stores a file with the content that `write` writes: all of it or nothing.

        write:   takes a new unbuffered file, writes to it and may seek in it. Called again with
                 another file if the disk was full or the file was deleted meanwhile
        durable: True: when `put` returns, the file survives any failure. False: a machine that
                 fails may leave it with any content, or not at all
        Returns True if the file was stored, False if the name existed already; in that case
        `write` may not have been called.
        Raises StoreError, and whatever `write` raises except OSError.
        """

    @abstractmethod
    def open(self, name: str) -> BinaryIO | None:
        """Opens a file for reading and marks it as used now.

        Returns an unbuffered file with a handle, which the caller closes. Returns None if the file
        does not exist (any more) or is not a regular file.
        Raises StoreError if the file cannot be opened now.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Returns the names, without their path, of the files and folders directly in a folder.

        folder: "" is the top folder
        Returns an empty list if the folder does not exist or cannot be read.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes the file if it exists. Raises StoreError."""

    def fetch(
        self, name: str, views: tuple[Buffer, ...], least: int = 0, most: int = -1
    ) -> OpenFile | None:
        """Does the same as `open`, and reads the first bytes of the file at once.

        views: at most 64 buffers, filled as far as the file goes if it has `least` to `most` bytes
        Returns None and raises errors as `open` does; also raises StoreError if the file cannot be
        read.
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
        """Returns a handle of the directory below which each file lies under its own name.

        The caller closes the handle, opens files below it directly, and must follow no symbolic
        link. None: the caller opens files with `fetch`.
        """
        return None

    def expect(  # noqa: B027
        self, names: Sequence[str], num_bytes: int, *, whole: bool = False
    ) -> None:
        """Says that the caller is going to ask for these files, in this order and soon.

        Does nothing unless `takes_hints`: then the store gets them together, ahead of the caller.
        Raises nothing.
        num_bytes: of each file that the caller asks for, from its first byte on
        whole:     the caller asks for whole files, none of which should have more bytes
        """

    def settle(self, seconds: float) -> bool:
        """Waits until each file that was put is in all places where it belongs.

        Returns False if some are not after so many seconds.
        """
        return True

    def put_all(
        self, files: Sequence[tuple[str, Write]], num_bytes: int = 0, *, durable: bool = True
    ) -> list[Put]:
        """Calls `put` for each name and `write`. Returns each result, or the StoreError it raised.

        num_bytes: the bytes of all files together, as far as known. If files are large, several
                   threads may call `write` at the same time, each for a different file
        """
        return [self._put_one(name, write, durable=durable) for name, write in files]

    def _put_one(self, name: str, write: Write, *, durable: bool) -> Put:
        try:
            return self.put(name, write, durable=durable)
        except StoreError as error:
            return error

    def replace(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Does the same as `put` for a file whose content may change: deletes the old file first.

        For a moment no file has the name. Returns False if another writer was first. Raises the
        errors of `put`.
        """
        self.delete(name)
        return self.put(name, write, durable=durable)

    def is_there(self, name: str) -> bool:
        """True if the file exists. Marks it as used now. Raises StoreError."""
        file = self.open(name)
        if file is not None:
            file.close()
        return file is not None

    def is_near(self, name: str) -> bool:
        """True if the file, if it exists, need not come over a network. Raises nothing."""
        return not self.is_far

    def are_there(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name what `is_there` returns. Raises StoreError."""
        return [self.is_there(name) for name in names]

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Returns the content of a small file, None if it does not exist. Marks it as used now.

        Raises StoreError if the file cannot be read; CorruptError if it has more than `most_bytes`
        bytes, of which at most one more is read.
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
        """Returns the path of a file for messages; its name if the store has no root."""
        return name if self.root is None else f"{self.root}/{name}"


class ListedStore(BlobStore):
    """A BlobStore that lists its files, for operators."""

    @abstractmethod
    def files(self, unread: list[str] | None = None) -> list[File]:
        """Returns the time of last use, bytes and name of each file, the least recently used first.
        Leaves out files directly in the top folder.

        unread: a list to which each folder that cannot be read is appended, with the reason
        Times are in seconds since 1970. Raises StoreError.
        """


def check_name(name: str) -> None:
    """Raises InvalidArgumentError unless a file can have this name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        instance("the name of a blob", name, str, "a str")
        raise InvalidArgumentError(
            f"the name of a blob is {name!r}, expected words with '/' between them, {MAX_WORDS} "
            "at most, of printable ASCII, none of them empty or beginning with a dot"
        )


def is_word(text: str) -> bool:
    """True if `text` can be a word of a name."""
    return _WORD.fullmatch(text) is not None

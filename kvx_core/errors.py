"""The exceptions of KVX: one per failing status of the ABI, each also the builtin it resembles, and
those of snapshots and stores.

Every message says which field, what it is, what was expected, and the way out where there is one.
A message may quote a file that others have written: it controls no terminal and no log.
Spec: 8
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


def printable(text: str) -> str:
    """One line of text: characters that end it, control a terminal or turn the direction of writing
    are escaped, as repr does.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


class Status(IntEnum):
    """Result of an ABI call. Spec: 8"""

    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    OUT_OF_RANGE = 3
    INCOMPATIBLE = 4
    INTERNAL_ERROR = 5


class KvxError(Exception):
    """Any failure of KVX; `status` is the ABI's status code. Its text is `printable`."""

    status = Status.INTERNAL_ERROR

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidArgumentError(KvxError, ValueError):
    """A descriptor or argument is missing, wrong or inconsistent."""

    status = Status.INVALID_ARGUMENT


class UnsupportedError(KvxError, NotImplementedError):
    """Well formed, but not something this build can do."""

    status = Status.UNSUPPORTED


class OutOfRangeError(KvxError, IndexError):
    """A slot, block, offset or length points outside the cache; nothing was written."""

    status = Status.OUT_OF_RANGE


class IncompatibleError(KvxError, RuntimeError):
    """libkvx and kvx_core have different major versions of the ABI."""

    status = Status.INCOMPATIBLE


class InternalError(KvxError, RuntimeError):
    """A bug in KVX or an exhausted system resource."""

    status = Status.INTERNAL_ERROR


class FactsMismatchError(InvalidArgumentError):
    """Copied bytes would not mean the same at both ends; `reasons` has a sentence for each fact."""

    def __init__(self, reasons: Iterable[str]) -> None:
        reasons = tuple(reasons)
        super().__init__("the copy would not mean the same: " + "; ".join(reasons))
        self.reasons = reasons


class StoreError(KvxError, RuntimeError):
    """A snapshot cannot be read, written or used here. Its file may still be good."""


class CorruptError(StoreError):
    """The content of a file is wrong: nobody can use it."""


class UnsignedError(StoreError):
    """A file is not signed with the reader's key, or is signed and the reader has no key."""


class OtherKeyError(UnsignedError):
    """A file is signed or encrypted with a key that this process does not have."""


BY_STATUS: dict[int, type[KvxError]] = {
    error.status: error
    for error in (
        InvalidArgumentError,
        UnsupportedError,
        OutOfRangeError,
        IncompatibleError,
        InternalError,
    )
}


def not_installed(who: str, package: str) -> ModuleNotFoundError:
    """The error of a part of KVX that needs a package which is not there."""
    install = "'torch>=2.13'" if package == "torch" else package
    return ModuleNotFoundError(
        f"{who} needs {package}, which is not installed: pip install {install}", name=package
    )

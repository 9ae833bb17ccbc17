"""Errors of snapshots and stores."""

from __future__ import annotations

from kvx_core.errors import KvxError


class StoreError(KvxError, RuntimeError):
    """A snapshot cannot be read, written or used here. Its file may still be good."""


class CorruptError(StoreError):
    """The content of a file is wrong: nobody can use it."""


class UnsignedError(StoreError):
    """A file is not signed with the reader's key, or is signed and the reader has no key."""


class OtherKeyError(UnsignedError):
    """A file is signed or encrypted with a key that this process does not have."""

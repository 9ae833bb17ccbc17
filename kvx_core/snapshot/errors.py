"""What goes wrong with stored tokens."""

from __future__ import annotations

from kvx_core.errors import KvxError


class StoreError(KvxError, RuntimeError):
    """Stored tokens cannot be read, written, or used here; the file may be good."""


class CorruptError(StoreError):
    """A file was read, and is not what it says it is; it is of no use to anyone."""


class UnsignedError(StoreError):
    """A file is not signed with the key of its reader, or is signed and the reader has no key."""

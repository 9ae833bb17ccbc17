"""Stores of snapshots: `Directory` holds files, and `PrefixStore` finds the files of a prompt."""

from kvx_core.snapshot import (
    CorruptError,
    Precision,
    Section,
    Snapshot,
    StoreError,
    UnsignedError,
    read_key,
)
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.blobs import Directory
from kvx_core.stores.inventory import Inventory
from kvx_core.stores.prefix import Match, PrefixStore, StoredSpan

__all__ = [
    "BlobStore",
    "CorruptError",
    "Directory",
    "Inventory",
    "Match",
    "Precision",
    "PrefixStore",
    "Section",
    "Snapshot",
    "StoreError",
    "StoredSpan",
    "UnsignedError",
    "read_key",
]

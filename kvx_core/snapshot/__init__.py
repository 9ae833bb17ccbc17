"""Tokens of a sequence at rest: any cache <-> memory <-> a safetensors file.

section    what an engine holds of a sequence   snapshot  capture, restore, read, save
capture    copies between caches and snapshots  contents  what a snapshot contains
precision  of stored values                     text      parses untrusted JSON
memory     where tensors lie                    scales    scales without blocks
planes     planes of a section                   dense     tensors in memory, as caches
storage_format  what K and V are converted to    rows     units that span heads
pool       memory that snapshots reuse           chunks    captures of chunks of one sequence
nulls      tokens that are stored nowhere        side_by_side  restores several snapshots
restore    the copy of a snapshot into a cache   room     memory that snapshots are read into

Files, of stores and of snapshots:
chunk_file  writes and reads one                kind      how files are laid out
kind_text  the text of a kind, which is not trusted
snapshot_file  those that have their kind with them
file_layout  where everything is in a file      record    what a file has of its own
pieces     in which files are checked           sealing   their checks, and their encryption
secrets    keys of a process
"""

from kvx_core.snapshot.capture import precision_of, token_ids
from kvx_core.snapshot.chunks import Chunks
from kvx_core.snapshot.contents import Header, Part, PlaneKind, Stored
from kvx_core.snapshot.errors import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.nulls import Nulls
from kvx_core.snapshot.pool import MemoryPool
from kvx_core.snapshot.precision import VALUES, Accept, Precision, Precisions
from kvx_core.snapshot.record import MAX_HEADER_BYTES
from kvx_core.snapshot.room import Room
from kvx_core.snapshot.secrets import Key, read_key
from kvx_core.snapshot.section import Section
from kvx_core.snapshot.side_by_side import can_join, restore_all
from kvx_core.snapshot.snapshot import Snapshot
from kvx_core.snapshot.storage_format import StorageFormat

__all__ = [
    "MAX_HEADER_BYTES",
    "VALUES",
    "Accept",
    "Chunks",
    "CorruptError",
    "Header",
    "Key",
    "MemoryPool",
    "Nulls",
    "Part",
    "PlaneKind",
    "Precision",
    "Precisions",
    "Room",
    "Section",
    "Snapshot",
    "StorageFormat",
    "StoreError",
    "Stored",
    "UnsignedError",
    "can_join",
    "precision_of",
    "read_key",
    "restore_all",
    "token_ids",
]
